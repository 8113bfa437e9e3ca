//! Sums and distributions over reads.

use std::collections::HashMap;

use pgiotrace_ebpf::{Group, GroupKey, method};

use super::{
    Bounds, ByExecutor, ByMethod, BySource, Dist, IoSummary, LatencyHistogram, Stages,
    dist::KernelHistogram,
    io::{Executor, Fidelity, Io, Method, Source, Stage, Subject, Timing},
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

/// Where the time of a set of reads went, as it grows.
#[derive(Debug, Clone)]
struct StageTotals {
    by_source: BySource,
    /// Reads that brought no bytes: failed, or at the end of a file.
    without_bytes: u64,
    readahead_hits: u64,
    by_stage: [LatencyHistogram; Stage::COUNT],
}

impl Default for StageTotals {
    fn default() -> Self {
        let by_stage = std::array::from_fn(|_| LatencyHistogram::of_two_digits());
        Self { by_source: BySource::default(), without_bytes: 0, readahead_hits: 0, by_stage }
    }
}

impl StageTotals {
    fn add(&mut self, timing: &Timing, bytes: u64) {
        *match timing.source {
            Some(Source::Cache) => &mut self.by_source.cache,
            Some(Source::Device) => &mut self.by_source.device,
            Some(Source::Mixed) => &mut self.by_source.mixed,
            // What brought no bytes has no source.
            None if bytes == 0 => &mut self.without_bytes,
            None => &mut self.by_source.unknown,
        } += 1;
        self.readahead_hits += u64::from(timing.is_readahead_hit);
        for stage in Stage::ALL {
            if let Some(nanos) = timing.stages.get(stage) {
                self.by_stage[stage as usize].record(nanos);
            }
        }
    }

    fn merge(&mut self, other: &Self) {
        let Self { by_source, without_bytes, readahead_hits, by_stage } = other;
        self.by_source.cache += by_source.cache;
        self.by_source.device += by_source.device;
        self.by_source.mixed += by_source.mixed;
        self.without_bytes += without_bytes;
        self.by_source.unknown += by_source.unknown;
        self.readahead_hits += readahead_hits;
        for (sum, stage) in self.by_stage.iter_mut().zip(by_stage) {
            sum.merge(stage);
        }
    }

    fn stages(&self) -> Stages {
        let of = |stage: Stage| self.by_stage[stage as usize].dist();
        Stages {
            pg_queue: of(Stage::PgQueue),
            submit: of(Stage::Submit),
            cache: of(Stage::Cache),
            block_queue: of(Stage::BlockQueue),
            device: of(Stage::Device),
            wakeup: of(Stage::Wakeup),
        }
    }
}

/// How much of an owner's reading it waited for, and what is only bounded.
#[derive(Debug, Clone, Default)]
pub struct ExposureTotals {
    /// Nanoseconds in which the owner was blocked while a read of its own was in flight.
    pub exposed_ns: u64,
    /// Nanoseconds in which a read of its own was in flight, and it was not blocked.
    pub hidden_ns: u64,
    /// The least that reads waited for an io worker.
    pub pg_queue_at_least: LatencyHistogram,
    /// The most that passed from the end of a read until its owner ran.
    pub owner_wakeup_at_most: LatencyHistogram,
}

impl ExposureTotals {
    fn merge(&mut self, other: &Self) {
        self.exposed_ns += other.exposed_ns;
        self.hidden_ns += other.hidden_ns;
        self.pg_queue_at_least.merge(&other.pg_queue_at_least);
        self.owner_wakeup_at_most.merge(&other.owner_wakeup_at_most);
    }
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
    stages: StageTotals,
    /// Reads that an owner executed itself because the queue of the io workers was full.
    queue_full_fallbacks: u64,
    /// Of an owner only.
    exposure: Option<ExposureTotals>,
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
        self.latency.record(io.timing.latency_ns());
        self.stages.add(&io.timing, io.bytes);
        self.queue_full_fallbacks += u64::from(io.is_queue_full_fallback);
    }

    /// Adds how much of these reads their owner waited for.
    pub fn add_exposure(&mut self, exposure: &ExposureTotals) {
        self.exposure.get_or_insert_default().merge(exposure);
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
        let Self {
            reads,
            bytes,
            blocks,
            by_method,
            by_executor,
            latency,
            stages,
            queue_full_fallbacks,
            exposure,
            coarse,
        } = other;
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
        self.stages.merge(stages);
        self.queue_full_fallbacks += queue_full_fallbacks;
        if let Some(exposure) = exposure {
            self.add_exposure(exposure);
        }
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
        let are_records_known = self.executors_are_known();
        let exposure = self.exposure.as_ref();
        IoSummary {
            reads: self.reads,
            bytes: self.bytes,
            blocks: self.blocks,
            by_method: self.by_method,
            by_executor: are_records_known.then_some(self.by_executor),
            by_source: (are_records_known
                && (self.stages.by_source.known() > 0 || self.stages.by_source.unknown == 0))
                .then_some(self.stages.by_source),
            readahead_hits: are_records_known.then_some(self.stages.readahead_hits),
            queue_full_fallbacks: are_records_known.then_some(self.queue_full_fallbacks),
            latency_us: self.latency_dist(),
            stages_us: self.stages.stages(),
            bounds_us: Bounds {
                pg_queue_at_least: exposure.and_then(|exposure| exposure.pg_queue_at_least.dist()),
                owner_wakeup_at_most: exposure.and_then(|exposure| exposure.owner_wakeup_at_most.dist()),
            },
            exposed_us: exposure.map(|exposure| exposure.exposed_ns as f64 / 1e3),
            hidden_us: exposure.map(|exposure| exposure.hidden_ns as f64 / 1e3),
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
    /// Time that it spent on them, nanoseconds.
    pub busy_ns: u128,
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

/// The reads of a trace, by method, owner, io worker and subject.
#[derive(Debug, Clone, Default)]
pub struct Aggregate {
    /// By the way they were executed, those without a known owner included.
    pub methods: HashMap<Method, IoTotals>,
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
        self.methods.entry(io.method).or_default().add(io);
        if let Some(owner) = owner {
            self.owners.entry(owner).or_default().add(io);
        }
        if io.method == Method::Worker {
            let worker = self.workers.entry(io.executor).or_default();
            worker.io.add(io);
            worker.busy_ns += u128::from(io.timing.execution_ns());
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

    /// Replaces methods, owners and io workers by what the kernel counted, which is complete even when records were lost.
    /// What an io worker read without a known owner, the kernel booked as the worker's own: `is_io_worker` tells.
    pub fn replace_by_groups<'a>(
        &mut self,
        groups: impl IntoIterator<Item = &'a (GroupKey, Group)>,
        incarnation: impl Fn(Pid) -> Incarnation,
        is_io_worker: impl Fn(Pid) -> bool,
    ) {
        self.methods.clear();
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
            self.methods.entry(method).or_default().add_group(method, group);
            if let Some(owner) = owner {
                self.owners.entry(incarnation(owner)).or_default().add_group(method, group);
            }
            if method == Method::Worker {
                let worker = self.workers.entry(executor).or_default();
                worker.io.add_group(method, group);
                worker.busy_ns += u128::from(group.latency.sum_ns);
                let share = worker.owners.entry(owner).or_default();
                *share = (share.0 + group.completed + group.failed, share.1 + group.bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_groups_replace_what_the_methods_had() {
        let group = |reads| Group { completed: reads, failed: 1, ..Group::EMPTY };
        let key = |owner_tgid, executor_tgid, method| GroupKey { owner_tgid, executor_tgid, method };
        let groups = [
            (key(7, 7, method::SYNC), group(1)),
            (key(7, 9, method::WORKER), group(10)),
            (key(0, 9, method::WORKER), group(100)),
            (key(8, 8, method::IO_URING), group(1_000)),
        ];
        let mut aggregate = Aggregate::default();
        // Of what had been seen before, nothing stays.
        aggregate.methods.entry(Method::Sync).or_default().reads = 5;
        aggregate.replace_by_groups(&groups, |pid| Incarnation { pid, number: 0 }, |pid| pid == Pid(9));
        let reads = |method| aggregate.methods[&method].summary().reads;
        assert_eq!([Method::Sync, Method::Worker, Method::IoUring].map(reads), [2, 112, 1_001]);
    }
}
