//! PostgreSQL's own statistics of a window, beside what was traced in it.
//!
//! PostgreSQL charges a read to who issued it, so all of this is by owner. It times how long the issuer spent on handing a read
//! over and on waiting for it, which is not how long the read took.

use serde::Serialize;

use super::Dist;

/// `pg_stat_io` beside the traced reads, of all sessions: no filter applies.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PgStatIo {
    /// Whether PostgreSQL's `reads` counts blocks instead of reads, as it does before version 18.
    pub reads_are_blocks: bool,
    /// One entry a type of backend and kind of object that was read, most read first. The kernel cannot see contexts.
    pub rows: Vec<PgStatIoRow>,
    /// What PostgreSQL counted in each context.
    pub contexts: Vec<PgStatIoContext>,
}

/// Reads of one kind of object by one type of backend.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PgStatIoRow {
    /// As `pg_stat_io` names it: parallel workers are `background worker`s. `None`: traced reads whose owner's type is not known.
    pub backend_type: Option<String>,
    /// `relation`, `temp relation` or `wal`.
    pub object: String,
    /// What PostgreSQL counted; `None` where that is not known.
    pub claimed: Option<ClaimedReads>,
    /// What was traced.
    pub traced: TracedReads,
    /// `claimed` less `traced`; `None` where either is not known.
    pub difference: Option<ReadsDifference>,
    /// Why they differ, or why there is no difference to tell; `None` where they are equal, or no reason is known.
    pub reason: Option<String>,
}

/// `pg_stat_get_backend_io` beside the traced reads.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PgStatBackendIo {
    /// One entry a backend that was there at the end, and kind of object that was read, most read first. Of one that came in the
    /// window, PostgreSQL counts from 0.
    pub rows: Vec<PgStatBackendIoRow>,
    /// Backends with traced reads that ended in the window: their statistics went with them.
    pub ended: u64,
}

/// Reads of one kind of object by one backend.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PgStatBackendIoRow {
    /// PID as the tracer sees it.
    pub pid: u32,
    /// As `pg_stat_io` names it.
    pub backend_type: String,
    /// `relation`, `temp relation` or `wal`.
    pub object: String,
    /// What PostgreSQL counted; `None` where that is not known.
    pub claimed: Option<ClaimedReads>,
    /// What was traced.
    pub traced: TracedReads,
    /// `claimed` less `traced`; `None` where either is not known.
    pub difference: Option<ReadsDifference>,
    /// As [`PgStatIoRow::reason`].
    pub reason: Option<String>,
}

/// `pg_stat_database` beside the traced reads of each database's relations.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PgStatDatabase {
    /// One entry a database of which something was read, most read first.
    pub rows: Vec<PgStatDatabaseRow>,
}

/// Reads of one database's relations.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PgStatDatabaseRow {
    /// OID; 0: relations that all databases share.
    pub oid: u32,
    /// Name; `None` for shared relations, and where it is not known.
    pub database: Option<String>,
    /// What PostgreSQL counted; `None` where that is not known.
    pub claimed: Option<ClaimedBlocks>,
    /// What was traced.
    pub traced: TracedReads,
    /// `claimed` less `traced`; `None` where either is not known.
    pub difference: Option<BlocksDifference>,
    /// As [`PgStatIoRow::reason`].
    pub reason: Option<String>,
}

/// Reads, as PostgreSQL counted them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ClaimedReads {
    /// Reads; blocks where [`PgStatIo::reads_are_blocks`].
    pub reads: u64,
    /// Bytes that were asked for.
    pub bytes: u64,
    /// How long the issuers spent on them, milliseconds; `None` when `track_io_timing` is off.
    pub read_time_ms: Option<f64>,
}

/// Blocks that were not in shared buffers, as PostgreSQL counted them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ClaimedBlocks {
    /// Blocks.
    pub blocks: u64,
    /// How long the database's sessions spent on reads, of shared relations too, milliseconds; `None` when `track_io_timing` is
    /// off.
    pub read_time_ms: Option<f64>,
}

/// Reads, as they were traced.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TracedReads {
    /// Reads, failed ones included.
    pub reads: u64,
    /// Bytes returned.
    pub bytes: u64,
    /// Server blocks of relations.
    pub blocks: u64,
    /// How long they took.
    pub latency_us: Option<Dist>,
}

/// What PostgreSQL counted less what was traced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ReadsDifference {
    /// Reads; `None` where PostgreSQL counts blocks instead.
    pub reads: Option<i64>,
    /// Bytes.
    pub bytes: i64,
}

/// What PostgreSQL counted less what was traced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct BlocksDifference {
    /// Blocks.
    pub blocks: i64,
}

/// What PostgreSQL counted of one type of backend, kind of object and context; `None` is what it does not count there.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PgStatIoContext {
    /// Type of the backends.
    pub backend_type: String,
    /// `relation`, `temp relation` or `wal`.
    pub object: String,
    /// `normal`, `bulkread`, `bulkwrite`, `vacuum`, `init`.
    pub context: String,
    /// Reads.
    pub reads: Option<ClaimedOperations>,
    /// Writes.
    pub writes: Option<ClaimedOperations>,
    /// Blocks that the kernel was asked to write back.
    pub writebacks: Option<ClaimedOperations>,
    /// Relations made longer.
    pub extends: Option<ClaimedOperations>,
    /// fsync calls.
    pub fsyncs: Option<ClaimedOperations>,
    /// Blocks that left their buffer for another one.
    pub evictions: Option<u64>,
    /// Blocks found in shared buffers.
    pub hits: Option<u64>,
    /// Buffers of a ring that were used again.
    pub reuses: Option<u64>,
}

/// Operations of one kind, as PostgreSQL counted and timed them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ClaimedOperations {
    /// Operations; blocks where [`PgStatIo::reads_are_blocks`].
    pub count: u64,
    /// Bytes; `None` where PostgreSQL counts none.
    pub bytes: Option<u64>,
    /// Milliseconds; `None` when they are not timed.
    pub time_ms: Option<f64>,
    /// The two divided, microseconds; `None` also when there was no operation.
    pub mean_us: Option<f64>,
}

impl ClaimedReads {
    /// What PostgreSQL's figures suggest that a read took, microseconds.
    #[must_use]
    pub fn mean_us(&self) -> Option<f64> {
        mean_us(self.reads, self.read_time_ms)
    }
}

/// Mean of `count` operations, microseconds.
#[must_use]
pub fn mean_us(count: u64, time_ms: Option<f64>) -> Option<f64> {
    time_ms.filter(|_| count > 0).map(|time_ms| time_ms * 1e3 / count as f64)
}
