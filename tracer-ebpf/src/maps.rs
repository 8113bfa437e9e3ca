//! The maps. Sizes here are for a small server; userspace sets them from the server's own settings at load.

use aya_ebpf::{
    macros::map,
    maps::{Array, HashMap, LruHashMap, PerCpuArray, RingBuf},
};
use pgiotrace_ebpf::{
    Begun, COUNTER_COUNT, Chain, Cluster, DeviceGroup, Group, GroupKey, Process, Request, Staged,
};

#[map]
pub static CLUSTER: Array<Cluster> = Array::with_max_entries(1, 0);
#[map]
pub static PROCESSES: HashMap<u32, Process> = HashMap::with_max_entries(1024, 0);
#[map]
pub static OWNERS: Array<u32> = Array::with_max_entries(1024, 0);
#[map]
pub static SYSCALL_READS: HashMap<u32, Begun> = HashMap::with_max_entries(1024, 0);
#[map]
pub static IO_URING_READS: HashMap<u64, Begun> = HashMap::with_max_entries(8192, 0);
#[map]
pub static REQUESTS: HashMap<u64, Request> = HashMap::with_max_entries(16384, 0);
/// Threads come and go: of those that are gone, the least recently used is overwritten.
#[map]
pub static QUEUED: LruHashMap<u32, u64> = LruHashMap::with_max_entries(8192, 0);
/// Entries are removed with their requests; of what is left behind otherwise, the least recently used goes.
#[map]
pub static CHAINS: LruHashMap<u64, Chain> = LruHashMap::with_max_entries(16384, 0);
#[map]
pub static GROUPS: HashMap<GroupKey, Group> = HashMap::with_max_entries(1024, 0);
#[map]
pub static DEVICES: HashMap<u32, DeviceGroup> = HashMap::with_max_entries(1024, 0);
#[map]
pub static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(COUNTER_COUNT, 0);
#[map]
pub static STAGED: Array<Staged> = Array::with_max_entries(1, 0);
#[map]
pub static RECORDS: RingBuf = RingBuf::with_byte_size(8 << 20, 0);
