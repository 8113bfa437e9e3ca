//! The report of `pgiotrace explain`, exactly as its JSON is promised, and the comparison of such reports.
//!
//! Field names are the JSON keys: keys may be added, never renamed. `None` is "not measured" and becomes `null`.

use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

use super::{
    Backend, Device, IoSummary, IoWorker, Ledger, MethodTotals, Overhead, Relation, StatReport, Target,
    Verdict, Window,
};

/// Value of the key `schema` of an `explain` report.
pub const EXPLAIN_SCHEMA: &str = "pgiotrace.explain/1";
/// Value of the key `schema` of a comparison.
pub const COMPARISON_SCHEMA: &str = "pgiotrace.explain.comparison/1";

/// What PostgreSQL claims of a query beside what the kernel saw of it.
#[derive(Debug, Clone)]
pub struct ExplainReport {
    /// The query, as it was given.
    pub query: String,
    /// The session that ran it.
    pub session: QuerySession,
    /// PostgreSQL's plan as it wrote it, but for the white space between its words.
    pub plan: Box<RawValue>,
    /// EXPLAIN's Planning Time and Execution Time added up, milliseconds.
    pub run_time_ms: f64,
    /// What PostgreSQL claims.
    pub claimed: Claim,
    /// What the kernel saw of the session, its parallel workers included.
    pub measured: IoSummary,
    /// The nodes of the plan, from the top, children behind their parents.
    pub nodes: Vec<PlanNode>,
    /// The relations that the plan names, with the indexes and TOAST relations of its tables.
    pub plan_relations: Vec<PlanRelation>,
    /// All runs, in their order.
    pub runs: Vec<Run>,
    /// The trace of the run that the rest tells of: its tables are restricted to the session, its ledger and its devices are
    /// not.
    pub trace: StatReport,
}

/// The session that ran the query.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct QuerySession {
    /// PID as the tracer sees it.
    pub pid: u32,
    /// Name of the database.
    pub database: String,
    /// Name of the role.
    pub user: String,
    /// Whether the transaction, which is rolled back in any case, might write.
    pub allow_write: bool,
    /// Whether caches were emptied before each run.
    pub cold: bool,
}

/// What PostgreSQL claims of a query.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Claim {
    /// `Shared Read Blocks` of the topmost node and of planning.
    pub shared_read_blocks: u64,
    /// The part of planning in these.
    pub planning_read_blocks: u64,
    /// `Local Read Blocks`, likewise: of temporary relations.
    pub local_read_blocks: u64,
    /// `Temp Read Blocks`, likewise: of temporary files.
    pub temp_read_blocks: u64,
    /// `Shared I/O Read Time`, or before PostgreSQL 17 `I/O Read Time`, likewise, milliseconds; `None` when
    /// `track_io_timing` was off.
    pub io_read_time_ms: Option<f64>,
}

/// One run of the query.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    /// As in the report.
    pub run_time_ms: f64,
    /// What PostgreSQL claims of this run.
    pub claimed: Claim,
    /// What the kernel saw of it.
    pub measured: IoSummary,
    /// Whether the rest of the report tells of this run: the one with the median run time.
    pub is_reported: bool,
}

/// A node of the plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlanNode {
    /// How many nodes are above it.
    pub depth: usize,
    /// What psql would call it: `Index Scan using a on b`.
    pub label: String,
    /// Role under its parent, where it is a subplan: `CTE x`, `InitPlan 1`, `SubPlan 1`.
    pub subplan: Option<String>,
    /// `Actual Rows`: a mean over the loops. `None` where it was never executed.
    pub rows: Option<f64>,
    /// `Actual Loops`.
    pub loops: f64,
    /// `Actual Total Time`, its children's included, milliseconds: a mean over the loops.
    pub time_ms: Option<f64>,
    /// What PostgreSQL claims of the node alone; `None` where that cannot be told, because a subplan's share is in it or in
    /// another node's.
    pub claimed: Option<NodeClaim>,
    /// What the kernel saw of the node's relations; `None` unless it reads some, and no other node reads them.
    pub measured: Option<IoSummary>,
    /// Whether the node reads relations that other nodes read as well, or that are not known.
    pub shares_relations: bool,
}

/// What PostgreSQL claims of one node without its children.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct NodeClaim {
    /// `Shared Read Blocks` and `Local Read Blocks`.
    pub read_blocks: u64,
    /// Of these, milliseconds; `None` when `track_io_timing` was off.
    pub io_read_time_ms: Option<f64>,
}

/// A relation that a query may read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlanRelation {
    /// Schema.
    pub schema: String,
    /// Name.
    pub name: String,
    /// What it is.
    pub kind: RelationKind,
    /// The table that an index or a TOAST relation belongs to, as `schema.name`.
    pub table: Option<String>,
    /// The nodes that read it, by their number in `nodes`.
    pub nodes: Vec<usize>,
}

/// Kind of a relation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RelationKind {
    /// A table, a partition, a materialized view.
    Table,
    /// An index.
    Index,
    /// Holds the long values of a table.
    Toast,
    /// Its index.
    ToastIndex,
}

/// The keys in their order: those of the design first.
#[derive(Serialize)]
struct Keys<'a> {
    schema: &'static str,
    target: &'a Target,
    window: &'a Window,
    ledger: &'a Ledger,
    query: &'a str,
    session: &'a QuerySession,
    plan: &'a RawValue,
    run_time_ms: f64,
    claimed: &'a Claim,
    measured: &'a IoSummary,
    nodes: &'a [PlanNode],
    plan_relations: &'a [PlanRelation],
    runs: &'a [Run],
    methods: &'a [MethodTotals],
    backends: &'a [Backend],
    io_workers: &'a [IoWorker],
    relations: &'a [Relation],
    devices: &'a [Device],
    verdicts: &'a [Verdict],
    overhead: &'a Overhead,
    notes: &'a [String],
}

impl Serialize for ExplainReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let trace = &self.trace;
        let keys = Keys {
            schema: EXPLAIN_SCHEMA,
            target: &trace.target,
            window: &trace.window,
            ledger: &trace.ledger,
            query: &self.query,
            session: &self.session,
            plan: &self.plan,
            run_time_ms: self.run_time_ms,
            claimed: &self.claimed,
            measured: &self.measured,
            nodes: &self.nodes,
            plan_relations: &self.plan_relations,
            runs: &self.runs,
            methods: &trace.methods,
            backends: &trace.backends,
            io_workers: &trace.io_workers,
            relations: &trace.relations,
            devices: &trace.devices,
            verdicts: &trace.verdicts,
            overhead: &trace.overhead,
            notes: &trace.notes,
        };
        keys.serialize(serializer)
    }
}

/// Saved reports, one beside the other.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Always [`COMPARISON_SCHEMA`].
    pub schema: &'static str,
    /// One entry a file, in the order in which they were given.
    pub files: Vec<ComparedFile>,
    /// What the reader must know.
    pub notes: Vec<String>,
}

/// A saved report, as far as it is compared. Times are in microseconds unless the name says otherwise.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ComparedFile {
    /// The file.
    pub file: String,
    /// `SHOW server_version`.
    pub server_version: String,
    /// `SHOW io_method`.
    pub io_method: Option<String>,
    /// The query.
    pub query: String,
    /// Run time, milliseconds.
    pub run_time_ms: f64,
    /// `Shared Read Blocks`, planning included.
    pub claimed_blocks: u64,
    /// EXPLAIN's I/O time, milliseconds.
    pub claimed_ms: Option<f64>,
    /// Reads.
    pub reads: u64,
    /// Blocks of relations.
    pub blocks: u64,
    /// Median latency.
    pub p50_us: Option<f64>,
    /// 99th percentile.
    pub p99_us: Option<f64>,
    /// Sum of all latencies.
    pub latency_sum_us: Option<f64>,
    /// Sums of the stages.
    pub stages_us: ComparedStages,
    /// Time in which the session was blocked by a read of its own.
    pub exposed_us: Option<f64>,
    /// Time of reads that overlapped other work.
    pub hidden_us: Option<f64>,
    /// Mean number of reads in flight, while there was any.
    pub depth: Option<f64>,
    /// Share of the reads that needed the device, wholly or in part.
    pub device_share: Option<f64>,
    /// Names of the rules that found something.
    pub verdicts: Vec<String>,
    /// Whether the books of the trace balanced.
    pub is_complete: bool,
}

/// Sums of the stages of reads, microseconds; `None` where no read had the stage, or it was not measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ComparedStages {
    /// PostgreSQL's queue.
    pub pg_queue: Option<f64>,
    /// Submission.
    pub submit: Option<f64>,
    /// Page cache and copy.
    pub cache: Option<f64>,
    /// Block layer's queue.
    pub block_queue: Option<f64>,
    /// Device.
    pub device: Option<f64>,
    /// Wake-up.
    pub wakeup: Option<f64>,
}
