//! System calls in which a process of the cluster may wait: what an owner's time is exposed in.

use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use pgiotrace_ebpf::{Counter, WaitRecord, kind, wait};

use crate::{counters::count, maps::RECORDS, process};

/// Shorter calls did not wait, and are not told.
const SHORTEST_NS: u64 = 1_000;

/// The current process enters a system call in which it may wait.
#[inline(always)]
pub fn begin(kind: u32) {
    let (tgid, tid) = process::current();
    let (Some(process), Some(cluster)) = (process::of_cluster(tgid), process::cluster()) else { return };
    // Backends have one thread of their own; the others that share the TGID are io-wq threads.
    if tid != tgid {
        return;
    }
    // Now, before it waits: afterwards it may be told to execute something else.
    let execution = process::execution(process, cluster).unwrap_or_default();
    // SAFETY: a live map value, and only its own thread changes these members.
    let process = unsafe { &mut *process };
    process.execution = execution;
    process.wait = kind;
    // SAFETY: a helper without preconditions.
    process.wait_start_ns = unsafe { bpf_ktime_get_ns() };
}

/// The current process leaves it.
#[inline(always)]
pub fn end() {
    let (tgid, tid) = process::current();
    let Some(process) = process::of_cluster(tgid) else { return };
    // SAFETY: as in `begin`.
    let process = unsafe { &mut *process };
    if tid != tgid || process.wait == wait::NONE {
        return;
    }
    // SAFETY: a helper without preconditions.
    let end_ns = unsafe { bpf_ktime_get_ns() };
    process.submitting = 0;
    let kind_of_wait = process.wait;
    process.wait = wait::NONE;
    if end_ns - process.wait_start_ns < SHORTEST_NS {
        return;
    }
    let Some(mut entry) = RECORDS.reserve::<WaitRecord>(0) else {
        count(Counter::WaitRecordLost);
        return;
    };
    entry.write(WaitRecord {
        kind: kind::WAIT,
        tgid,
        start_ns: process.wait_start_ns,
        end_ns,
        awaited_generation: process.awaited_generation,
        awaited_io_id: process.awaited_io_id,
        wait: kind_of_wait,
        execution: process.execution,
    });
    entry.submit(0);
    // One wait takes several calls when other reads complete first (`pgaio_uring_wait_one`,
    // `src/backend/storage/aio/method_io_uring.c`), and is not given up. That on a latch is, when the query is cancelled:
    // the next one, perhaps for the client, is no longer for the read.
    if kind_of_wait == wait::EPOLL {
        process.awaited_generation = 0;
    }
}
