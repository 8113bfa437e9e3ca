//! What sessions did, what they waited for, and which queries wanted the reads.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};

use super::IoSummary;

/// All executions of a query that read something, or what processes read without one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Query {
    /// What this entry stands for.
    pub kind: QueryKind,
    /// `query_id`, as a string; `None` where the server does not compute it (`compute_query_id`).
    pub query_id: Option<String>,
    /// The query, as far as the server keeps it: normalised where `pg_stat_statements` has it, else that of one execution.
    /// `None` where no sample saw it, or `--no-query-text` leaves it out.
    pub query: Option<String>,
    /// Database of the execution that was seen first.
    pub database: Option<String>,
    /// What kind of process executed it: `client backend`, `autovacuum worker`, `walsender`, …
    pub backend_type: Option<String>,
    /// Executions that read something; those of parallel workers count as their leader's.
    pub executions: u64,
    /// Reads that this query wanted for certain.
    pub certain: u64,
    /// Reads that it probably wanted: the last query that the owner was seen to execute.
    pub probable: u64,
    /// The reads.
    pub io: IoSummary,
}

/// What an entry of the queries stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum QueryKind {
    /// A query.
    Query,
    /// Queries of which neither identifier nor text is known, and reads of which no query is known.
    Unknown,
    /// No query: a session that starts, or a process that executes none.
    None,
}

/// Reads by how sure it is which query wanted them. A read whose owner is not known is of no query.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct QueryCertainty {
    /// The owner was seen to execute the query as the read began, or before it and after.
    pub certain: u64,
    /// It was seen to execute it before, and not since.
    pub probable: u64,
    /// No query is known.
    pub unknown: u64,
    /// The process executed none: a session that starts, or one of the server's own.
    pub none: u64,
}

/// A session or another process of the server, as the samples of `pg_stat_activity` saw it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Session {
    /// PID as the tracer sees it.
    pub pid: u32,
    /// `backend_type`.
    pub backend_type: Option<String>,
    /// Name of the database.
    pub database: Option<String>,
    /// Name of the role.
    pub user: Option<String>,
    /// Address of the client; `None` for a Unix socket.
    pub client: Option<String>,
    /// `application_name`.
    pub application_name: Option<String>,
    /// Samples that saw it.
    pub samples: u64,
    /// Share of these in which it was active, 0 to 1.
    pub busy_ratio: f64,
    /// Distinct executions that were seen, in samples or by its reads and waits.
    pub executions: u64,
    /// `query_id` of the query that was active in most samples.
    pub query_id: Option<String>,
    /// That query.
    pub query: Option<String>,
    /// What it waited for while active, by wait event (`IO:AioIoCompletion`): samples. Running counts as `CPU`.
    pub wait_events: BTreeMap<String, u64>,
    /// PIDs of those that blocked it (`pg_blocking_pids`), as the tracer sees them.
    pub blocked_by: Vec<u32>,
}

/// Samples in which a backend waited for a read, by what that read was doing.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Wait {
    /// PID of the backend that waited, as the tracer sees it.
    pub pid: u32,
    /// Its `backend_type`.
    pub backend_type: Option<String>,
    /// `query_id` of what it executed.
    pub query_id: Option<String>,
    /// What it executed.
    pub query: Option<String>,
    /// The wait event: `IO:AioIoCompletion`, …
    pub event: String,
    /// Samples.
    pub samples: u64,
    /// Samples by what the awaited read was doing.
    pub doing: DoingCounts,
    /// Samples in which the awaited read was another backend's, by that backend.
    pub of_others: Vec<AwaitedOwner>,
}

/// A backend whose reads another one waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct AwaitedOwner {
    /// Its PID, as the tracer sees it.
    pub pid: u32,
    /// Samples.
    pub samples: u64,
}

/// What a read was doing when a sample saw somebody wait for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Doing {
    /// In PostgreSQL's queue, for an io worker.
    PgQueue,
    /// On its way into the block layer.
    Submit,
    /// Copied from the page cache, and all that is no other stage.
    Cache,
    /// In the block layer's queue.
    BlockQueue,
    /// With the device.
    Device,
    /// Its data is there, and the thread that waited for it in the kernel has no processor.
    Wakeup,
    /// Finished in the kernel, and not reaped: its pages are checked, and its waiters woken.
    Finished,
    /// None was awaited, but a lock: whoever reaps a ring, or fills the io workers' queue.
    Lock,
    /// Which read was awaited is not known.
    NotKnown,
}

impl Doing {
    /// All, in the order of time.
    pub const ALL: [Self; 9] = [
        Self::PgQueue,
        Self::Submit,
        Self::Cache,
        Self::BlockQueue,
        Self::Device,
        Self::Wakeup,
        Self::Finished,
        Self::Lock,
        Self::NotKnown,
    ];

    /// Its JSON key.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::PgQueue => "pg_queue",
            Self::Submit => "submit",
            Self::Cache => "cache",
            Self::BlockQueue => "block_queue",
            Self::Device => "device",
            Self::Wakeup => "wakeup",
            Self::Finished => "finished",
            Self::Lock => "lock",
            Self::NotKnown => "not_known",
        }
    }
}

/// Samples by what the awaited read was doing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DoingCounts(pub BTreeMap<Doing, u64>);

impl DoingCounts {
    /// Samples of one kind.
    #[must_use]
    pub fn of(&self, doing: Doing) -> u64 {
        self.0.get(&doing).copied().unwrap_or(0)
    }
}

impl Serialize for DoingCounts {
    /// With all keys, so that nobody takes a missing one for "not measured".
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(Doing::ALL.map(|doing| (doing.name(), self.of(doing))))
    }
}
