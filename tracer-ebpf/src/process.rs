//! Which processes belong to the traced cluster, and who owns which slot of PostgreSQL's process array.

use aya_ebpf::helpers::{
    bpf_get_current_pid_tgid, bpf_probe_read_user,
    generated::{bpf_get_current_task, bpf_ktime_get_ns},
};
use aya_log_ebpf::warn;
use pgiotrace_ebpf::{
    Begun, Cluster, Counter, Execution, NOT_KNOWN, Process, ProcessRecord, flags, kind, status,
};

use crate::{
    counters::count,
    kernel::{Args, TASK_FLAGS, TASK_RUN_DELAY, TASK_TGID},
    maps::{CLUSTER, IO_URING_READS, OWNERS, PROCESSES, RECORDS, SYSCALL_READS},
};

/// `PF_KTHREAD` (`include/linux/sched.h`).
const PF_KTHREAD: u32 = 0x0020_0000;

/// The current thread: (TGID, thread id).
#[inline(always)]
pub fn current() -> (u32, u32) {
    let both = bpf_get_current_pid_tgid();
    ((both >> 32) as u32, both as u32)
}

/// Whether the current thread is one of the kernel's own, which works for others.
#[inline(always)]
pub fn is_kernel_thread() -> bool {
    // SAFETY: a helper without preconditions.
    let task = unsafe { bpf_get_current_task() };
    TASK_FLAGS.read::<u32>(task).is_some_and(|flags| flags & PF_KTHREAD != 0)
}

/// How long the current thread has ever been ready to run without a processor; [`NOT_KNOWN`] where the kernel does not
/// keep it.
#[inline(always)]
pub fn run_delay() -> u64 {
    // SAFETY: a helper without preconditions.
    let task = unsafe { bpf_get_current_task() };
    TASK_RUN_DELAY.read(task).unwrap_or(NOT_KNOWN)
}

/// How much longer that is than it was.
#[inline(always)]
pub fn run_delay_since(before: u64) -> u64 {
    let now = run_delay();
    if before == NOT_KNOWN || now == NOT_KNOWN { NOT_KNOWN } else { now.wrapping_sub(before) }
}

/// The read that the current thread, of this process of the cluster, is in: inside a system call, or submitting it.
#[inline(always)]
pub fn current_read(process: *mut Process) -> Option<*const Begun> {
    let (tgid, tid) = current();
    if let Some(begun) = SYSCALL_READS.get_ptr(tid) {
        return Some(begun);
    }
    // SAFETY: a live map value.
    let submitting = unsafe { (*process).submitting };
    if tid != tgid || submitting == 0 {
        return None;
    }
    IO_URING_READS.get_ptr(submitting)
}

/// The cluster's entry for a process; `None` for every process outside, after this one look-up.
#[inline(always)]
pub fn of_cluster(tgid: u32) -> Option<*mut Process> {
    PROCESSES.get_ptr_mut(tgid)
}

/// Where the cluster keeps its handles.
#[inline(always)]
pub fn cluster() -> Option<&'static Cluster> {
    CLUSTER.get(0)
}

/// The process's `MyProcNumber`, learned once from the process itself.
///
/// A backend reads its database's `pg_filenode.map` (`load_relmap_file`, `src/backend/utils/cache/relmapper.c`)
/// after `InitProcess` gave it the number and before it can start any I/O of its own, so the number is known by
/// the time anyone executes a read for it.
#[inline(always)]
pub fn learn_proc_number(tgid: u32, process: *mut Process, cluster: &Cluster) -> i32 {
    // SAFETY: `process` is a live map value; the set's entry is removed only by its own process's exit.
    let known = unsafe { (*process).proc_number };
    if known >= 0 || cluster.my_proc_number == 0 {
        return known;
    }
    // SAFETY: the helper checks the address itself.
    let Ok(number) = (unsafe { bpf_probe_read_user(cluster.my_proc_number as *const i32) }) else {
        return -1;
    };
    if number >= 0 && OWNERS.set(number as u32, tgid, 0).is_ok() {
        // SAFETY: as above.
        unsafe { (*process).proc_number = number };
    }
    number
}

/// What the current process of the cluster is executing, as it says itself: nobody else writes there, so nothing changes
/// meanwhile. `None` where that cannot be told.
#[inline(always)]
pub fn execution(process: *mut Process, cluster: &Cluster) -> Option<Execution> {
    if cluster.my_be_entry == 0 {
        return None;
    }
    // SAFETY: a live map value, as in `learn_proc_number`.
    let mut at = unsafe { (*process).status };
    if at == 0 {
        // Set once in a process's life (`pgstat_beinit`, `src/backend/utils/activity/backend_status.c`).
        at = user(cluster.my_be_entry)?;
        if at == 0 {
            return None;
        }
        // SAFETY: as above.
        unsafe { (*process).status = at };
    }
    if user::<i32>(at + status::PROCESS)? == 0 {
        // It starts, and what stands there is of the process that had the entry before.
        return Some(Execution::default());
    }
    Some(Execution { started_us: user(at + status::ACTIVITY_START)?, query_id: user(at + status::QUERY_ID)? })
}

/// Adds to a read what its owner, which begins it, executes.
#[inline(always)]
pub fn describe_execution(begun: &mut Begun, process: *mut Process, cluster: &Cluster) {
    if let Some(execution) = execution(process, cluster) {
        begun.execution = execution;
        begun.flags |= flags::EXECUTION;
    }
}

/// Reads a value from the current process's memory.
#[inline(always)]
fn user<T>(address: u64) -> Option<T> {
    // SAFETY: the helper checks the address itself.
    unsafe { bpf_probe_read_user(address as *const T) }.ok()
}

/// The TGID that holds a slot of the process array; 0 when that is not known.
#[inline(always)]
pub fn owner_of(proc_number: i32) -> u32 {
    OWNERS.get(proc_number as u32).copied().unwrap_or(0)
}

/// A task forks: the postmaster's children join the set.
#[inline(always)]
pub fn fork(args: &Args) {
    let Some(cluster) = cluster() else { return };
    let (parent, _) = current();
    if parent != cluster.postmaster_tgid {
        return;
    }
    let Some(child) = TASK_TGID.read::<u32>(args.get(1)) else { return };
    if child == parent {
        return;
    }
    let process = Process { proc_number: -1, ..Process::default() };
    if PROCESSES.insert(child, process, 0).is_err() {
        count(Counter::ProcessesFull);
        warn!(args, "process {} is not followed: the set of processes is full", child);
        return;
    }
    announce(kind::FORK, child);
}

/// A task ends: a process of the set leaves it, with what it had open.
#[inline(always)]
pub fn exit(_args: &Args) {
    let (tgid, tid) = current();
    let Some(process) = of_cluster(tgid) else { return };
    // Backends have one thread of their own; the others that share the TGID are io-wq threads.
    if tid != tgid {
        return;
    }
    // SAFETY: a live map value, removed below by this very program.
    let number = unsafe { (*process).proc_number };
    if number >= 0 && owner_of(number) == tgid {
        let _ = OWNERS.set(number as u32, 0, 0);
    }
    let _ = PROCESSES.remove(tgid);
    announce(kind::EXIT, tgid);
}

/// Tells userspace that a process joined or left.
#[inline(always)]
fn announce(kind: u32, tgid: u32) {
    let Some(mut entry) = RECORDS.reserve::<ProcessRecord>(0) else {
        count(Counter::ProcessRecordLost);
        return;
    };
    // SAFETY: a helper without preconditions.
    let at_ns = unsafe { bpf_ktime_get_ns() };
    entry.write(ProcessRecord { kind, tgid, at_ns });
    entry.submit(0);
}
