//! What a trace amounts to: distributions, I/O aggregates, and the reports made of them.
//!
//! Nothing here reads or writes anything; `join` fills these types and `present` shows them.

mod activity;
pub mod aggregate;
mod dist;
mod doctor;
mod explain;
pub mod intervals;
pub mod io;
mod pg_stats;
mod stat;
mod verdict;

pub use activity::{AwaitedOwner, Doing, DoingCounts, Query, QueryCertainty, QueryKind, Session, Wait};
pub use dist::{Dist, KernelHistogram, LatencyHistogram, MOST_NANOS};
pub use doctor::{Check, DoctorReport, Status};
pub use explain::{
    COMPARISON_SCHEMA, Claim, ComparedFile, ComparedStages, Comparison, EXPLAIN_SCHEMA, ExplainReport,
    NodeClaim, PlanNode, PlanRelation, QuerySession, RelationKind, Run,
};
pub use pg_stats::{
    BlocksDifference, ClaimedBlocks, ClaimedOperations, ClaimedReads, PgStatBackendIo, PgStatBackendIoRow,
    PgStatDatabase, PgStatDatabaseRow, PgStatIo, PgStatIoContext, PgStatIoRow, ReadsDifference, TracedReads,
    mean_us,
};
pub use stat::{
    Backend, Bounds, ByExecutor, ByMethod, BySource, Depth, Device, EndedBackends, FilterReport, FromDevice,
    IoSummary, IoWorker, Ledger, MethodTotals, Overhead, OwnerShare, PgAiosLedger, PgProbes, Relation,
    RequestSizes, STAT_SCHEMA, SamplerCost, Stages, StatReport, Target, Users, Window,
};
pub use verdict::{Severity, Verdict};
