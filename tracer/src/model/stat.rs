//! The report of `pgiotrace stat`, exactly as its JSON is promised.
//!
//! Field names are the JSON keys: keys may be added, never renamed. `None` is "not measured" and becomes
//! `null`; it is never shown as zero.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Dist, PgStatBackendIo, PgStatDatabase, PgStatIo, Query, QueryCertainty, Session, Verdict, Wait};

/// Value of the key `schema` of a `stat` report.
pub const STAT_SCHEMA: &str = "pgiotrace.stat/1";

/// All that `stat` found out in one window.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StatReport {
    /// Always [`STAT_SCHEMA`].
    pub schema: &'static str,
    /// The server that was traced.
    pub target: Target,
    /// When it was traced.
    pub window: Window,
    /// Whether what was begun is accounted for.
    pub ledger: Ledger,
    /// Which reads the tables are restricted to; `None`: all. The ledger and the devices always have all.
    pub filter: Option<FilterReport>,
    /// What the tracer itself cost.
    pub overhead: Overhead,
    /// What this amounts to, worst first; empty where no rule found anything.
    pub verdicts: Vec<Verdict>,
    /// One entry a method that executed reads, busiest first.
    pub methods: Vec<MethodTotals>,
    /// One entry a process that owned reads, busiest first.
    pub backends: Vec<Backend>,
    /// Processes that ended, where there were too many to keep one by one: folded by who they were.
    pub ended_backends: Vec<EndedBackends>,
    /// How sure it is which query wanted each read; `None` where reads are missing.
    pub query_certainty: Option<QueryCertainty>,
    /// One entry a query, most read time first.
    pub queries: Vec<Query>,
    /// One entry a session that was sampled while it was active; `None` without samples.
    pub sessions: Option<Vec<Session>>,
    /// One entry a backend, query and wait event for reads, most samples first; `None` without samples.
    pub waits: Option<Vec<Wait>>,
    /// One entry an io worker of the server.
    pub io_workers: Vec<IoWorker>,
    /// One entry a relation fork that was read, most read first.
    pub relations: Vec<Relation>,
    /// One entry a block device.
    pub devices: Vec<Device>,
    /// `pg_stat_io`; `None` before PostgreSQL 16, and when it was not looked at both before and after the window.
    pub pg_stat_io: Option<PgStatIo>,
    /// `pg_stat_get_backend_io`; `None` before PostgreSQL 18, and as above.
    pub pg_stat_backend_io: Option<PgStatBackendIo>,
    /// `pg_stat_database`; `None` as above.
    pub pg_stat_database: Option<PgStatDatabase>,
    /// What the reader must know about this report, each in one sentence ("relation names are missing: …").
    pub notes: Vec<String>,
}

/// The server that was traced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Target {
    /// PID of the postmaster, as the tracer sees it.
    pub postmaster_pid: u32,
    /// The server's data directory.
    pub data_directory: String,
    /// `SHOW server_version` when a connection told it, else the major version from `PG_VERSION`.
    pub server_version: String,
    /// `SHOW io_method`; `None` before PostgreSQL 18 or when nobody could be asked.
    pub io_method: Option<String>,
    /// `cluster_name`, where one is set.
    pub cluster_name: Option<String>,
    /// Settings that bear on reading, as `SHOW` writes them; those that the role may not see, or the server does not have,
    /// are missing.
    pub settings: BTreeMap<String, String>,
}

/// When the trace ran.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Window {
    /// Wall-clock time of the start, RFC 3339.
    pub start: String,
    /// Length in seconds, from the monotonic clock.
    pub duration_s: f64,
}

/// The books of a trace: `begun = completed + failed + in_flight + lost`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Ledger {
    /// Reads that ended with their details known (`completed + failed`).
    pub reads: u64,
    /// Bytes that those reads returned.
    pub bytes: u64,
    /// Server blocks of relations that those reads covered.
    pub blocks: u64,
    /// Reads whose owner was read from the I/O itself and validated.
    pub exact: u64,
    /// Reads whose owner is the only match among `pg_aios` rows.
    pub inferred: u64,
    /// Reads with several possible owners; none is shown.
    pub ambiguous: u64,
    /// Reads with no known owner.
    pub unattributed: u64,
    /// Reads that the kernel side saw begin.
    pub begun: u64,
    /// Reads that ended well, short ones included.
    pub completed: u64,
    /// Reads that ended with an error.
    pub failed: u64,
    /// Of the completed ones: those that returned fewer bytes than asked (plain `read` calls aside, which ask for a
    /// buffer's length and get what there is).
    pub short: u64,
    /// Of the reads: those that the tracer's own sessions wanted, as far as these are known.
    pub own: u64,
    /// Reads that had not ended when the trace did.
    pub in_flight: u64,
    /// Reads whose details were lost (ring or table full). Not zero: the ledger is incomplete.
    pub lost: u64,
    /// Processes of the server that could not be followed. Not zero: the ledger is incomplete.
    pub processes_not_followed: u64,
    /// Addresses that might have been a read's I/O handle and failed validation. Some are normal: a register may still
    /// hold the handle of an earlier read.
    pub rejected_candidates: u64,
    /// Addresses that might have been a read's I/O handle and could not be read.
    pub unreadable_candidates: u64,
    /// Reads that took longer than the histograms' range of one hour: counted, not in any percentile.
    pub beyond_range: u64,
    /// Reads and requests whose times contradict each other, as an end before the start. Not zero: do not believe the
    /// times, and report it as a bug.
    pub impossible: u64,
    /// Whether nothing was lost and the books balance.
    pub complete: bool,
    /// Rows sampled from `pg_aios`; `None` when it could not be sampled.
    pub pg_aios: Option<PgAiosLedger>,
}

/// A filter, and what it let pass.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct FilterReport {
    /// Owners.
    pub pids: Vec<u32>,
    /// Relations, as given.
    pub relations: Vec<String>,
    /// Databases of the owners.
    pub databases: Vec<String>,
    /// Roles of the owners.
    pub users: Vec<String>,
    /// Identifiers of the queries that wanted them.
    pub query_ids: Vec<String>,
    /// Shortest latency, microseconds.
    pub min_latency_us: Option<f64>,
    /// Reads that passed.
    pub reads: u64,
}

/// How the rows sampled from `pg_aios` compare with the traced reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct PgAiosLedger {
    /// Distinct reads (io_id, generation) seen in the view during the window.
    pub rows: u64,
    /// Those that a traced read matches in all that is known of it: relation and blocks, and mostly owner, offset and
    /// length.
    pub confirmed: u64,
    /// Those that a traced read of the same io_id and generation contradicts.
    pub contradicted: u64,
    /// Those without a traced read: begun before the trace, not ended with it, or traced without its handle.
    pub unmatched: u64,
}

/// What the tracer cost.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Overhead {
    /// Mean run time of all programs for one traced read; `None` unless the kernel's BPF statistics are on.
    pub bpf_ns_per_read: Option<f64>,
    /// CPU time of all programs; `None` unless the kernel's BPF statistics are on.
    pub bpf_cpu_s: Option<f64>,
    /// CPU time of the tracer's own process, user and system.
    pub tracer_cpu_s: f64,
    /// Peak resident memory of the tracer's process.
    pub tracer_max_rss_bytes: u64,
    /// From the tracer's start until all programs were attached.
    pub attach_ms: f64,
    /// What sampling cost the server; `None` when it was not sampled.
    pub sampler: Option<SamplerCost>,
    /// What the probes of `--pg-probes` cost; `None` when none was attached.
    pub pg_probes: Option<PgProbes>,
}

/// What samples of `pg_stat_activity` and `pg_aios` cost the server. Above a hundredth of one processor, they are taken less often.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct SamplerCost {
    /// Samples taken.
    pub samples: u64,
    /// Processor time of the server's process that answered, seconds; `None` where it could not be measured.
    pub server_cpu_s: Option<f64>,
}

/// What the probes cost the server, and whoever else runs the same binary.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct PgProbes {
    /// Traps: one for each batch of reads that was handed over, and one for each wait for a read.
    pub traps: u64,
    /// What a trap costs on this machine, nanoseconds: measured at the start, on an empty function of the tracer's own with
    /// an empty program. `None` where that failed.
    pub ns_per_trap: Option<f64>,
    /// The two multiplied, seconds.
    pub estimated_cpu_s: Option<f64>,
}

/// All reads that one method executed, whether their owners are known or not.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MethodTotals {
    /// `sync`, `worker` or `io_uring`: how the reads were executed, not what the server is set to.
    pub method: &'static str,
    /// The reads.
    pub io: IoSummary,
}

/// A process that owned reads, whoever executed them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Backend {
    /// PID as the tracer sees it.
    pub pid: u32,
    /// `pg_stat_activity.backend_type`.
    pub backend_type: Option<String>,
    /// Leader of the parallel group, where this is a parallel worker.
    pub leader_pid: Option<u32>,
    /// Name of the database.
    pub database: Option<String>,
    /// Name of the role.
    pub user: Option<String>,
    /// `application_name` of the session.
    pub application_name: Option<String>,
    /// What it owned.
    pub io: IoSummary,
}

/// Processes that ended, folded into one entry.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EndedBackends {
    /// How many.
    pub processes: u64,
    /// `pg_stat_activity.backend_type`.
    pub backend_type: Option<String>,
    /// Name of the database.
    pub database: Option<String>,
    /// Name of the role.
    pub user: Option<String>,
    /// `application_name` of the sessions.
    pub application_name: Option<String>,
    /// What they owned.
    pub io: IoSummary,
}

/// An io worker, by what it executed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IoWorker {
    /// PID as the tracer sees it.
    pub pid: u32,
    /// The worker's number, as in its title `io worker N`.
    pub worker: Option<u32>,
    /// Share of the window it spent inside reads, 0 to 1.
    pub busy_ratio: f64,
    /// For whom it read.
    pub owners: Vec<OwnerShare>,
    /// What it executed.
    pub io: IoSummary,
}

/// An owner's part of what an io worker executed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OwnerShare {
    /// The owner; `None` where it is not known.
    pub pid: Option<u32>,
    /// Reads.
    pub reads: u64,
    /// Bytes.
    pub bytes: u64,
}

/// One fork of one relation, or one file that is none.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Relation {
    /// Database; `None` for shared relations and for unknown ones.
    pub database: Option<String>,
    /// Schema; `None` until known.
    pub schema: Option<String>,
    /// Name; `None` until known. Files that are no relation ("pg_wal", "base/pgsql_tmp") stand in `file`.
    pub name: Option<String>,
    /// `main`, `fsm`, `vm`, `init`; `None` for a file that is no relation.
    pub fork: Option<String>,
    /// The relfilenode; `None` for a file that is no relation.
    pub relfilenode: Option<u32>,
    /// Whether the relation is a temporary one.
    pub temporary: bool,
    /// Folder, relative to the data directory, of files that are no relation; `None` for relations.
    pub file: Option<String>,
    /// Devices that it was read from; `None` where that is not known.
    pub devices: Option<Vec<FromDevice>>,
    /// What was read of it.
    pub io: IoSummary,
}

/// A block device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Device {
    /// `major:minor`.
    pub dev: String,
    /// Kernel name.
    pub name: Option<String>,
    /// Read requests that it completed, whoever wanted them.
    pub requests: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Queued to issued (Q to D), microseconds.
    pub block_queue_us: Option<Dist>,
    /// Issued to completed (D to C), microseconds.
    pub device_us: Option<Dist>,
    /// Sizes of the requests.
    pub request_bytes: Option<RequestSizes>,
    /// How often the driver gave a request back, to be issued again; its times are those of the last time.
    pub requeues: u64,
    /// Requests with the device at once.
    pub depth: Depth,
    /// For whom it read.
    pub users: Users,
}

/// Sizes of requests, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RequestSizes {
    /// Arithmetic mean.
    pub mean: f64,
    /// Median, to a sixteenth.
    pub p50: f64,
    /// 99th percentile, to a sixteenth.
    pub p99: f64,
    /// Largest.
    pub max: f64,
}

/// Read requests that were with a device at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Depth {
    /// Mean over the window.
    pub mean: f64,
    /// Most.
    pub max: u64,
}

/// For whom a device read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Users {
    /// Requests that processes of the server queued.
    pub server_requests: u64,
    /// Bytes of these.
    pub server_bytes: u64,
    /// Of these bytes: what no read had asked for; `None` where that is not known.
    pub readahead_bytes: Option<u64>,
    /// Requests that kernel threads queued, for whom is not known: the block layer had held them back, or a stacked device is
    /// above. Those that a read of the server's waited for count as the server's.
    pub unknown_requests: u64,
    /// Bytes of these.
    pub unknown_bytes: u64,
    /// Requests of other programs.
    pub other_requests: u64,
    /// Bytes of these.
    pub other_bytes: u64,
}

/// What was read of a relation from one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FromDevice {
    /// `major:minor`.
    pub dev: String,
    /// Kernel name.
    pub name: Option<String>,
    /// Requests that processes of the server queued.
    pub requests: u64,
    /// Bytes that reads had asked for.
    pub asked_bytes: u64,
    /// Bytes that were read ahead.
    pub readahead_bytes: u64,
}

/// Aggregate of a set of reads.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IoSummary {
    /// Reads.
    pub reads: u64,
    /// Bytes that they returned.
    pub bytes: u64,
    /// Server blocks of relations.
    pub blocks: u64,
    /// Reads by the way they were executed.
    pub by_method: ByMethod,
    /// Reads by what executed them; `None` where only the kernel's counts are left, which do not tell it.
    pub by_executor: Option<ByExecutor>,
    /// Reads by where the bytes came from, but for those that brought none; `None` where that is known of none of them.
    pub by_source: Option<BySource>,
    /// Of those from the cache: reads of bytes that the readahead of an earlier read had brought, and nobody had asked for
    /// since. Readahead from long before is forgotten, so there may be more. `None` where only the
    /// kernel's counts are left.
    pub readahead_hits: Option<u64>,
    /// Reads that their owner executed itself although an io worker could have, because their queue was full (or, in PostgreSQL
    /// 19, another process was just at it); `None` where only the
    /// kernel's counts are left.
    pub queue_full_fallbacks: Option<u64>,
    /// The reads' latency; `None` when there are none.
    pub latency_us: Option<Dist>,
    /// Where the time went.
    pub stages_us: Stages,
    /// What is not measured, but bounded.
    pub bounds_us: Bounds,
    /// Microseconds in which the owner was blocked while a read of its own was in flight; `None` for sets of reads of
    /// several owners.
    pub exposed_us: Option<f64>,
    /// Microseconds in which a read of its own was in flight, and the owner was not blocked by reading: not in a wait for a latch,
    /// an `io_uring_enter` or a read call.
    pub hidden_us: Option<f64>,
}

/// Reads by the way they were executed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ByMethod {
    /// By the owner itself, in a read system call.
    pub sync: u64,
    /// By an io worker.
    pub worker: u64,
    /// Through io_uring.
    pub io_uring: u64,
}

/// Reads by what executed them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ByExecutor {
    /// The owner itself: in a system call, or inside its io_uring submission.
    pub owner: u64,
    /// An io worker.
    pub io_worker: u64,
    /// A kernel thread of the owner's ring (`iou-wrk`).
    pub iou_wrk: u64,
}

/// Reads by where their bytes came from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct BySource {
    /// All from the page cache.
    pub cache: u64,
    /// All from a device.
    pub device: u64,
    /// Some from each.
    pub mixed: u64,
    /// Not known, as of direct reads of which not every byte was found in a request.
    pub unknown: u64,
}

impl BySource {
    /// Reads of which it is known.
    #[must_use]
    pub fn known(&self) -> u64 {
        self.cache + self.device + self.mixed
    }
}

/// Bounds of times that lie outside of a read's latency, microseconds; `None` where there is no bound.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Bounds {
    /// Of reads of io workers: how long the owner had been blocked when the worker began, or since when `pg_aios` had shown
    /// the read. They waited in the queue at least that long.
    pub pg_queue_at_least: Option<Dist>,
    /// Of reads that others executed and that ended while their owner was blocked: how much longer it was. It ran again
    /// that much later at the most.
    pub owner_wakeup_at_most: Option<Dist>,
}

/// Distributions of the stages of reads, microseconds, over those reads that had the stage. `None` where no read had it,
/// or it was not measured. The stages of one read never add up to more than its latency.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Stages {
    /// Submitted by the owner until an executor starts; measured with `--pg-probes` only.
    pub pg_queue: Option<Dist>,
    /// From the start of the execution until the first request was queued.
    pub submit: Option<Dist>,
    /// Page-cache work and copy: what is no other stage.
    pub cache: Option<Dist>,
    /// In the block layer: queued to issued.
    pub block_queue: Option<Dist>,
    /// With the device: issued to completed.
    pub device: Option<Dist>,
    /// After the last completion: how long the thread that waited in the kernel was ready to run and had no processor. What
    /// it had of that before the last completion is not told apart, so it may be less. With `--pg-probes` also until the owner
    /// ran. With
    /// `--pg-probes`, of reads that others executed and that the owner waited for, also from the end of the execution until
    /// the owner ran.
    pub wakeup: Option<Dist>,
}
