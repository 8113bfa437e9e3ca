//! What a trace amounts to: distributions, I/O aggregates, and the reports made of them.
//!
//! Nothing here reads or writes anything; `join` fills these types and `present` shows them.

pub mod aggregate;
mod dist;
mod doctor;
mod explain;
pub mod intervals;
pub mod io;
mod stat;
mod verdict;

pub use dist::{Dist, KernelHistogram, LatencyHistogram, MOST_NANOS};
pub use doctor::{Check, DoctorReport, Status};
pub use explain::{
    COMPARISON_SCHEMA, Claim, ComparedFile, ComparedStages, Comparison, EXPLAIN_SCHEMA, ExplainReport,
    NodeClaim, PlanNode, PlanRelation, QuerySession, RelationKind, Run,
};
pub use stat::{
    Backend, Bounds, ByExecutor, ByMethod, BySource, Depth, Device, EndedBackends, FilterReport, FromDevice,
    IoSummary, IoWorker, Ledger, MethodTotals, Overhead, OwnerShare, PgAiosLedger, PgProbes, Relation,
    RequestSizes, STAT_SCHEMA, Stages, StatReport, Target, Users, Window,
};
pub use verdict::{Severity, Verdict};
