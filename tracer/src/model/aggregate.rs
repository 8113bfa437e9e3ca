//! Sums and distributions over reads.

use std::collections::HashMap;

use pgiotrace_ebpf::{Group, GroupKey, method};

use super::{
    ByExecutor, ByMethod, Dist, IoSummary, LatencyHistogram, Stages,
    dist::KernelHistogram,
    io::{Executor, Fidelity, Io, Method, Subject},
};
use crate::server::Pid;

/// A process, told from a later one of the same PID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Incarnation {
    /// The process.
    pub pid: Pid,
    /// How many processes of this PID had ended before.
    pub number: u32,
}

/// Aggregate of a set of reads, as it grows.
#[derive(Debug, Clone, Default)]
pub struct IoTotals {
    /// Reads, failed ones included.
    pub reads: u64,
    /// Bytes returned.
    pub bytes: u64,
    /// Server blocks of relations.
    pub blocks: u64,
    by_method: ByMethod,
    by_executor: ByExecutor,
    latency: LatencyHistogram,
    /// Latencies that are known only in the kernel's coarser buckets.
    coarse: KernelHistogram,
}

impl IoTotals {
    /// Adds one read.
    pub fn add(&mut self, io: &Io) {
        self.reads += 1;
        self.bytes += io.bytes;
        self.blocks += io.blocks;
        *self.method_mut(io.method) += 1;
        *match io.executor_kind {
            Executor::Owner => &mut self.by_executor.owner,
            Executor::IoWorker => &mut self.by_executor.io_worker,
            Executor::IouWrk => &mut self.by_executor.iou_wrk,
        } += 1;
        self.latency.record(io.latency_ns);
    }

    /// Adds what the kernel counted.
    pub fn add_group(&mut self, method: Method, group: &Group) {
        let reads = group.completed + group.failed;
        self.reads += reads;
        self.bytes += group.bytes;
        self.blocks += group.blocks;
        *self.method_mut(method) += reads;
        self.coarse.add(&group.latency);
    }

    fn method_mut(&mut self, method: Method) -> &mut u64 {
        match method {
            Method::Sync => &mut self.by_method.sync,
            Method::Worker => &mut self.by_method.worker,
            Method::IoUring => &mut self.by_method.io_uring,
        }
    }

    /// Adds all that another set holds.
    pub fn merge(&mut self, other: &Self) {
        let Self { reads, bytes, blocks, by_method, by_executor, latency, coarse } = other;
        self.reads += reads;
        self.bytes += bytes;
        self.blocks += blocks;
        self.by_method.sync += by_method.sync;
        self.by_method.worker += by_method.worker;
        self.by_method.io_uring += by_method.io_uring;
        self.by_executor.owner += by_executor.owner;
        self.by_executor.io_worker += by_executor.io_worker;
        self.by_executor.iou_wrk += by_executor.iou_wrk;
        self.latency.merge(latency);
        self.coarse.merge(coarse);
    }

    /// Sum of all latencies, nanoseconds.
    #[must_use]
    pub fn latency_sum_ns(&self) -> u128 {
        self.latency.sum_nanos() + u128::from(self.coarse.sum_nanos())
    }

    /// The summary, as the report shows it.
    #[must_use]
    pub fn summary(&self) -> IoSummary {
        IoSummary {
            reads: self.reads,
            bytes: self.bytes,
            blocks: self.blocks,
            by_method: self.by_method,
            by_executor: self.executors_are_known().then_some(self.by_executor),
            by_source: None,
            latency_us: self.latency_dist(),
            stages_us: Stages::default(),
            exposed_us: None,
            hidden_us: None,
        }
    }

    /// The kernel's own counts do not tell executors.
    fn executors_are_known(&self) -> bool {
        let ByExecutor { owner, io_worker, iou_wrk } = self.by_executor;
        owner + io_worker + iou_wrk == self.reads
    }

    fn latency_dist(&self) -> Option<Dist> {
        self.latency.dist().or_else(|| self.coarse.dist())
    }
}

/// What an io worker executed.
#[derive(Debug, Clone, Default)]
pub struct WorkerTotals {
    /// All of it.
    pub io: IoTotals,
    /// Reads and bytes per owner.
    pub owners: HashMap<Option<Pid>, (u64, u64)>,
}

/// Reads by how sure their owners are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FidelityCounts {
    /// See [`Fidelity::Exact`].
    pub exact: u64,
    /// See [`Fidelity::Inferred`].
    pub inferred: u64,
    /// See [`Fidelity::Ambiguous`].
    pub ambiguous: u64,
    /// See [`Fidelity::Unattributed`].
    pub unattributed: u64,
}

impl FidelityCounts {
    /// Counts one read.
    pub fn add(&mut self, fidelity: Fidelity) {
        *match fidelity {
            Fidelity::Exact => &mut self.exact,
            Fidelity::Inferred => &mut self.inferred,
            Fidelity::Ambiguous => &mut self.ambiguous,
            Fidelity::Unattributed => &mut self.unattributed,
        } += 1;
    }
}

/// The reads of a trace, by owner, io worker and subject.
#[derive(Debug, Clone, Default)]
pub struct Aggregate {
    /// By the process that wanted them.
    pub owners: HashMap<Incarnation, IoTotals>,
    /// By the io worker that executed them.
    pub workers: HashMap<Pid, WorkerTotals>,
    /// By what was read.
    pub subjects: HashMap<Subject, IoTotals>,
}

impl Aggregate {
    /// Adds one read; `owner` tells which process of the owner's PID it was.
    pub fn add(&mut self, io: &Io, owner: Option<Incarnation>) {
        if let Some(owner) = owner {
            self.owners.entry(owner).or_default().add(io);
        }
        if io.method == Method::Worker {
            let worker = self.workers.entry(io.executor).or_default();
            worker.io.add(io);
            let share = worker.owners.entry(io.owner).or_default();
            *share = (share.0 + 1, share.1 + io.bytes);
        }
        // Cloned only for a subject that is new: most reads are of a known one.
        if let Some(totals) = self.subjects.get_mut(&io.subject) {
            totals.add(io);
        } else {
            self.subjects.entry(io.subject.clone()).or_default().add(io);
        }
    }

    /// Replaces owners and io workers by what the kernel counted, which is complete even when records were lost.
    /// What an io worker read without a known owner, the kernel booked as the worker's own: `is_io_worker` tells.
    pub fn replace_by_groups(
        &mut self,
        groups: &[(GroupKey, Group)],
        incarnation: impl Fn(Pid) -> Incarnation,
        is_io_worker: impl Fn(Pid) -> bool,
    ) {
        self.owners.clear();
        self.workers.clear();
        for (key, group) in groups {
            let executor = Pid(key.executor_tgid);
            let owner = (key.owner_tgid != 0).then_some(Pid(key.owner_tgid));
            let owner = owner.filter(|owner| *owner != executor || !is_io_worker(executor));
            let method = match key.method {
                method::IO_URING => Method::IoUring,
                _ if owner == Some(executor) => Method::Sync,
                _ => Method::Worker,
            };
            if let Some(owner) = owner {
                self.owners.entry(incarnation(owner)).or_default().add_group(method, group);
            }
            if method == Method::Worker {
                let worker = self.workers.entry(executor).or_default();
                worker.io.add_group(method, group);
                let share = worker.owners.entry(owner).or_default();
                *share = (share.0 + group.completed + group.failed, share.1 + group.bytes);
            }
        }
    }
}
