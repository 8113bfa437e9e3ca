//! Reads through io_uring: from the submission to the completion of the request.

use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use pgiotrace_ebpf::{Begun, Counter, NOT_KNOWN, OFFSET_OF_FILE_POSITION, flags};

use crate::{
    counters::count,
    files,
    finish::{self, Ended},
    handles::{self, Expected},
    kernel::{self, Args, KIOCB_FD, KIOCB_OPCODE, KIOCB_USER_DATA},
    maps::IO_URING_READS,
    process,
};

/// `enum io_uring_op` (`include/uapi/linux/io_uring.h`).
const IORING_OP_READV: u8 = 1;
const IORING_OP_READ_FIXED: u8 = 4;
const IORING_OP_READ: u8 = 22;

/// A request is submitted, in its submitter's context.
#[inline(always)]
pub fn submit(args: &Args) {
    let (tgid, _) = process::current();
    let Some(process) = process::of_cluster(tgid) else { return };
    let Some(cluster) = process::cluster() else { return };
    let request = args.get(0);
    let Some(IORING_OP_READV | IORING_OP_READ_FIXED | IORING_OP_READ) = KIOCB_OPCODE.read::<u8>(request)
    else {
        return;
    };
    let proc_number = process::learn_proc_number(tgid, process, cluster);
    let mut begun = Begun {
        offset: OFFSET_OF_FILE_POSITION,
        fd: KIOCB_FD.read(request).unwrap_or(-1),
        caller_tgid: tgid,
        // Only the owner submits (`pgaio_uring_submit`, `src/backend/storage/aio/method_io_uring.c`).
        owner_tgid: tgid,
        flags: flags::IO_URING,
        ..Begun::default()
    };
    // PostgreSQL's user_data is the address of the handle.
    if let Some(user_data) = KIOCB_USER_DATA.read::<u64>(request)
        && let Some(io_id) = handles::io_id_at(cluster, user_data)
    {
        let expected = Expected { fd: begun.fd, offset: None, iov_length: None, length: None };
        match handles::validate(cluster, io_id, &expected) {
            Some(found) if proc_number < 0 || found.handle.owner_proc_number == proc_number => {
                found.describe(&mut begun, cluster);
            }
            Some(_) => {
                count(Counter::CandidateRejected);
                begun.flags |= flags::HANDLE_REJECTED;
            }
            None => begun.flags |= flags::HANDLE_REJECTED,
        }
    }
    if files::describe(&mut begun).is_none() {
        count(Counter::FileUnreadable);
    }
    if begun.flags & flags::HANDLE == 0 {
        // Its offset stands where only the kernel's own code looks.
        begun.position = NOT_KNOWN;
    }
    process::describe_execution(&mut begun, process, cluster);
    begun.run_delay_ns = process::run_delay();
    begun.staged_ns = handles::staged_ns(&begun);
    // SAFETY: a helper without preconditions.
    begun.start_ns = unsafe { bpf_ktime_get_ns() };
    // SAFETY: a live map value, and only its own thread changes this member.
    unsafe { (*process).submitting = request };
    count(Counter::Begun);
    if IO_URING_READS.insert(request, begun, 0).is_err() {
        count(Counter::TableFull);
    }
}

/// A request is handed to an io-wq thread.
#[inline(always)]
pub fn punt(args: &Args) {
    let Some(begun) = IO_URING_READS.get_ptr_mut(args.get(0)) else { return };
    // SAFETY: the request is in flight, so its entry lives until its completion.
    unsafe { (*begun).flags |= flags::PUNTED };
}

/// A request completes, in any context; the result stands in the completion queue's entry.
#[inline(always)]
pub fn complete_cqe(args: &Args) {
    let request = args.get(1);
    let Some(begun) = IO_URING_READS.get_ptr(request) else { return };
    // `io_uring_cqe.res` follows the u64 user_data (`include/uapi/linux/io_uring.h`).
    if let Some(result) = kernel::read::<i32>(args.get(2) + 8) {
        // SAFETY: the request is in flight, so its entry lives until it is removed below.
        complete(request, unsafe { &*begun }, result);
    }
}

/// A request completes; the result is an argument of its own.
#[inline(always)]
pub fn complete_res(args: &Args) {
    let request = args.get(1);
    let Some(begun) = IO_URING_READS.get_ptr(request) else { return };
    // SAFETY: as in `complete_cqe`.
    complete(request, unsafe { &*begun }, args.get(3) as i32);
}

#[inline(always)]
fn complete(request: u64, begun: &Begun, result: i32) {
    let (tgid, tid) = process::current();
    // An io-wq thread shares the submitter's TGID, not its thread id. Any other context only completes.
    let executor_tid = match begun.flags & flags::PUNTED {
        0 => begun.caller_tgid,
        _ if tgid == begun.caller_tgid && tid != tgid => tid,
        _ => 0,
    };
    // Only of the thread that submitted it is the delay at the start known.
    let run_delay_ns =
        if tid == begun.caller_tgid { process::run_delay_since(begun.run_delay_ns) } else { NOT_KNOWN };
    let executor_tgid = begun.caller_tgid;
    // Who waits for it waits for the ring, not for the handle's condition variable.
    let waiter_tgids = [0; 2];
    let result = i64::from(result);
    finish::read(begun, &Ended { executor_tgid, executor_tid, run_delay_ns, result, waiter_tgids });
    let _ = IO_URING_READS.remove(request);
}
