//! Reads inside a system call: by a backend itself, or by an io worker.

#[cfg(bpf_target_arch = "x86_64")]
use aya_ebpf::bindings::pt_regs;
use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use aya_log_ebpf::debug;
use pgiotrace_ebpf::{Begun, Cluster, Counter, OFFSET_OF_FILE_POSITION, flags, wait};

use crate::{
    counters::count,
    files,
    finish::{self, Ended},
    handles::{self, Expected, Validated},
    kernel::{self, Args},
    maps::SYSCALL_READS,
    process, waits,
};

/// System call numbers (`arch/x86/entry/syscalls/syscall_64.tbl`).
#[cfg(bpf_target_arch = "x86_64")]
mod number {
    pub const READ: u64 = 0;
    pub const PREAD64: u64 = 17;
    pub const READV: u64 = 19;
    pub const PREADV: u64 = 295;
    pub const PREADV2: u64 = 327;
    pub const EPOLL_WAIT: u64 = 232;
    pub const EPOLL_PWAIT: u64 = 281;
    pub const IO_URING_ENTER: u64 = 426;
    pub const EPOLL_PWAIT2: u64 = 441;
}

/// System call numbers (`include/uapi/asm-generic/unistd.h`).
#[cfg(bpf_target_arch = "aarch64")]
mod number {
    pub const READ: u64 = 63;
    pub const READV: u64 = 65;
    pub const PREAD64: u64 = 67;
    pub const PREADV: u64 = 69;
    pub const PREADV2: u64 = 286;
    /// Not on this processor.
    pub const EPOLL_WAIT: u64 = u64::MAX;
    pub const EPOLL_PWAIT: u64 = 22;
    pub const IO_URING_ENTER: u64 = 426;
    pub const EPOLL_PWAIT2: u64 = 441;
}

/// Registers that a callee preserves, so that a handle's address lives on in one of them across the system call.
#[cfg(bpf_target_arch = "x86_64")]
const PRESERVED: usize = 6;
#[cfg(bpf_target_arch = "aarch64")]
const PRESERVED: usize = 10;

/// What is needed of the registers with which a process calls the kernel.
struct Registers {
    arguments: [u64; 4],
    preserved: [u64; PRESERVED],
}

/// The arguments of a read system call.
struct Call {
    fd: i32,
    /// Buffer, or array of iovecs.
    address: u64,
    /// Bytes, or number of iovecs.
    length: u64,
    offset: u64,
    vectored: bool,
}

#[inline(always)]
const fn is_read(number: u64) -> bool {
    matches!(number, number::READ | number::PREAD64 | number::READV | number::PREADV | number::PREADV2)
}

/// What a system call other than a read may wait for: one of [`wait`].
#[inline(always)]
const fn may_wait(number: u64) -> u32 {
    match number {
        number::EPOLL_WAIT | number::EPOLL_PWAIT | number::EPOLL_PWAIT2 => wait::EPOLL,
        number::IO_URING_ENTER => wait::IO_URING,
        _ => wait::NONE,
    }
}

/// A system call begins.
#[inline(always)]
pub fn enter(args: &Args) {
    let number = args.get(1);
    if is_read(number) {
        enter_read(args, number);
    } else if may_wait(number) != wait::NONE {
        waits::begin(may_wait(number));
    }
}

#[inline(always)]
fn enter_read(args: &Args, number: u64) {
    let (tgid, tid) = process::current();
    let Some(process) = process::of_cluster(tgid) else { return };
    let (Some(cluster), Some(regs)) = (process::cluster(), registers(args.get(0))) else {
        return;
    };
    let proc_number = process::learn_proc_number(tgid, process, cluster);
    let call = decode(number, &regs);
    let Some(mut begun) = begin(cluster, &call, &regs, tgid, proc_number) else { return };
    if begun.owner_tgid == tgid {
        process::describe_execution(&mut begun, process, cluster);
    }
    if begun.flags & flags::HANDLE_REJECTED != 0 {
        debug!(
            args,
            "process {}: no candidate for a handle describes the read at offset {}", tgid, call.offset
        );
    }
    count(Counter::Begun);
    if SYSCALL_READS.insert(tid, begun, 0).is_err() {
        count(Counter::TableFull);
    }
}

/// A system call ends.
#[inline(always)]
pub fn exit(args: &Args) {
    let Some(number) = system_call_of(args.get(0)) else { return };
    if is_read(number) {
        exit_read(args);
    } else if may_wait(number) != wait::NONE {
        waits::end();
    }
}

#[inline(always)]
fn exit_read(args: &Args) {
    let (tgid, tid) = process::current();
    let Some(begun) = SYSCALL_READS.get_ptr(tid) else { return };
    // SAFETY: only this thread inserts and removes its own entry.
    let begun = unsafe { &*begun };
    let run_delay_ns = process::run_delay_since(begun.run_delay_ns);
    let result = args.get(1) as i64;
    let waiter_tgids = handles::waiters(begun);
    finish::read(
        begun,
        &Ended { executor_tgid: tgid, executor_tid: tid, run_delay_ns, result, waiter_tgids },
    );
    let _ = SYSCALL_READS.remove(tid);
}

/// What is known of the read at its start; `None` when it is no read of a file.
#[inline(always)]
fn begin(cluster: &Cluster, call: &Call, regs: &Registers, tgid: u32, proc_number: i32) -> Option<Begun> {
    let mut begun = Begun {
        offset: call.offset,
        length: if call.vectored { 0 } else { call.length },
        fd: call.fd,
        caller_tgid: tgid,
        ..Begun::default()
    };
    let mut candidate = false;
    if let Some(found) = find_handle(cluster, call, regs, &mut candidate) {
        let owner = found.handle.owner_proc_number;
        begun.owner_tgid = if owner == proc_number { tgid } else { process::owner_of(owner) };
        found.describe(&mut begun, cluster);
    } else {
        if candidate {
            begun.flags = flags::HANDLE_REJECTED;
        }
        begun.owner_tgid = tgid;
    }
    match files::describe(&mut begun) {
        Some(true) => {}
        // A handle is always a file's: it was closed meanwhile, and the call will say so.
        Some(false) if begun.flags & flags::HANDLE == 0 => return None,
        // Followed all the same, as a read of an unknown file: nothing is lost silently.
        Some(false) | None => count(Counter::FileUnreadable),
    }
    begun.run_delay_ns = process::run_delay();
    begun.staged_ns = handles::staged_ns(&begun);
    // SAFETY: a helper without preconditions.
    begun.start_ns = unsafe { bpf_ktime_get_ns() };
    Some(begun)
}

/// The handle that this call executes, from the iovec's address or from a preserved register.
///
/// `pgaio_io_perform_synchronously` (`src/backend/storage/aio/aio_io.c`) keeps the handle's address across
/// `pg_preadv`; which register holds it is the compiler's choice, so all of them are tried.
#[inline(always)]
fn find_handle(cluster: &Cluster, call: &Call, regs: &Registers, candidate: &mut bool) -> Option<Validated> {
    if cluster.handles == 0 || call.offset == OFFSET_OF_FILE_POSITION {
        return None;
    }
    let iov_length = if call.vectored { call.length as u16 } else { 1 };
    let expected = Expected {
        fd: call.fd,
        offset: Some(call.offset),
        iov_length: Some(iov_length),
        length: (!call.vectored).then_some(call.length),
    };
    if call.vectored
        && let Some(io_id) = handles::io_id_of_iovec(cluster, call.address)
    {
        *candidate = true;
        return handles::validate(cluster, io_id, &expected);
    }
    for register in regs.preserved {
        let Some(io_id) = handles::io_id_at(cluster, register) else { continue };
        *candidate = true;
        if let Some(handle) = handles::validate(cluster, io_id, &expected) {
            return Some(handle);
        }
    }
    None
}

#[inline(always)]
fn decode(number: u64, regs: &Registers) -> Call {
    let [fd, address, length, offset] = regs.arguments;
    let vectored = matches!(number, number::READV | number::PREADV | number::PREADV2);
    let positioned = matches!(number, number::PREAD64 | number::PREADV | number::PREADV2);
    // preadv2 with offset -1 reads at the file's position, and -1 is OFFSET_OF_FILE_POSITION.
    let offset = if positioned { offset } else { OFFSET_OF_FILE_POSITION };
    Call { fd: fd as i32, address, length, offset, vectored }
}

#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
fn registers(address: u64) -> Option<Registers> {
    // `struct pt_regs` (`arch/x86/include/asm/ptrace.h`): r15, r14, r13, r12, bp, bx; r11, r10, r9, r8, ax, cx, dx, si, di. Not
    // read as a whole: it would take a third of the stack.
    let [_r11, r10, _r9, _r8, _ax, _cx, dx, si, di] = kernel::read(address + 6 * 8)?;
    Some(Registers { arguments: [di, si, dx, r10], preserved: kernel::read(address)? })
}

/// The number of the system call that is ending, from the registers saved at its start.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
fn system_call_of(regs: u64) -> Option<u64> {
    kernel::read(regs + core::mem::offset_of!(pt_regs, orig_rax) as u64)
}

/// `struct pt_regs` starts with x0 to x30 (`arch/arm64/include/asm/ptrace.h`), of which x19 to x28 are preserved. Not
/// read as a whole: it would take half of the stack.
#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
fn registers(address: u64) -> Option<Registers> {
    Some(Registers { arguments: kernel::read(address)?, preserved: kernel::read(address + 19 * 8)? })
}

/// The number of the system call that is ending: in `struct pt_regs`, `syscallno` follows the 34 words of
/// `user_pt_regs` and `orig_x0`.
#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
fn system_call_of(regs: u64) -> Option<u64> {
    kernel::read::<i32>(regs + 35 * 8).map(|number| number as u64)
}
