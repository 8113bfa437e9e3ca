//! The end of a read: counters, its group, and its record.

use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use pgiotrace_ebpf::{
    BUCKETS, Begun, Counter, Group, GroupKey, Histogram, ReadRecord, bucket_of, flags, kind, method,
};

use crate::{
    atomic,
    counters::count,
    maps::{GROUPS, RECORDS},
};

/// What an ended read came to.
pub struct Ended {
    /// Process in whose context it was executed.
    pub executor_tgid: u32,
    /// Thread that executed it; 0 when not known.
    pub executor_tid: u32,
    /// As in [`ReadRecord`].
    pub run_delay_ns: u64,
    /// Bytes, or a negative errno.
    pub result: i64,
    /// As in [`ReadRecord`].
    pub waiter_tgids: [u32; 2],
}

/// What a group starts from: too large for a program's stack.
static EMPTY_GROUP: &Group = &Group::EMPTY;

/// Books an ended read.
#[inline(always)]
pub fn read(begun: &Begun, ended: &Ended) {
    // SAFETY: a helper without preconditions.
    let end_ns = unsafe { bpf_ktime_get_ns() };
    let failed = ended.result < 0;
    count(if failed { Counter::Failed } else { Counter::Completed });
    add_to_group(begun, ended, end_ns.saturating_sub(begun.start_ns));
    let Some(mut entry) = RECORDS.reserve::<ReadRecord>(0) else {
        count(if failed { Counter::FailedRingFull } else { Counter::RingFull });
        return;
    };
    entry.write(ReadRecord {
        kind: kind::READ,
        executor_tgid: ended.executor_tgid,
        executor_tid: ended.executor_tid,
        reserved: 0,
        run_delay_ns: ended.run_delay_ns,
        end_ns,
        result: ended.result,
        waiter_tgids: ended.waiter_tgids,
        begun: *begun,
    });
    entry.submit(0);
}

#[inline(always)]
fn add_to_group(begun: &Begun, ended: &Ended, latency_ns: u64) {
    let method = if begun.flags & flags::IO_URING != 0 {
        method::IO_URING
    } else if begun.owner_tgid == ended.executor_tgid {
        method::SYNC
    } else {
        method::WORKER
    };
    let key = GroupKey { owner_tgid: begun.owner_tgid, executor_tgid: ended.executor_tgid, method };
    let Some(group) = group(&key) else {
        count(Counter::GroupsFull);
        return;
    };
    if ended.result < 0 {
        add(&raw mut group.failed, 1);
    } else {
        add(&raw mut group.completed, 1);
        add(&raw mut group.bytes, ended.result as u64);
        add(&raw mut group.blocks, u64::from(begun.handle.blocks));
    }
    add_latency(&mut group.latency, latency_ns);
}

#[inline(always)]
fn group(key: &GroupKey) -> Option<&'static mut Group> {
    let group = GROUPS.get_ptr_mut(key).or_else(|| {
        // BPF_NOEXIST (1): another CPU may have made it meanwhile, and its counts must stay.
        let _ = GROUPS.insert(key, EMPTY_GROUP, 1);
        GROUPS.get_ptr_mut(key)
    })?;
    // SAFETY: userspace removes a group only after its owner's end; members are changed atomically.
    Some(unsafe { &mut *group })
}

/// Adds a latency; several CPUs may do so at once.
#[inline(always)]
pub fn add_latency(histogram: &mut Histogram, nanos: u64) {
    add(&raw mut histogram.sum_ns, nanos);
    raise(&raw mut histogram.max_ns, nanos);
    if let Some(count) =
        histogram.counts.get_mut(atomic::opaque(bucket_of(nanos) as u64) as usize & (BUCKETS - 1))
    {
        // SAFETY: an aligned u32 of a map value.
        unsafe { atomic::add_u32(count, 1) };
    }
}

/// Raises a maximum. Two CPUs with a new one at the same moment may keep the smaller: unless records are lost, the
/// records tell the true one.
#[inline(always)]
pub fn raise(most: *mut u64, value: u64) {
    // SAFETY: callers pass an aligned u64 of a map value.
    if value > unsafe { most.read_volatile() } {
        // SAFETY: as above.
        unsafe { most.write_volatile(value) };
    }
}

#[inline(always)]
pub fn add(value: *mut u64, amount: u64) {
    // SAFETY: callers pass an aligned u64 of a map value.
    unsafe { atomic::add_u64(value, amount) };
}
