//! PostgreSQL's cumulative statistics of its reads and writes: `pg_stat_io`, `pg_stat_get_backend_io` and `pg_stat_database`.

use std::collections::HashSet;
use std::thread;
use std::time::{Duration, SystemTime};

use postgres::{Client, Row, Statement};

use super::{monotonic_ns, sampler::Taken};
use crate::server::{
    InnerPid,
    connect::{APPLICATION_NAME, innermost},
};

/// The first major version with `pg_stat_io`.
pub const FIRST_IO_MAJOR: u16 = 16;
/// The first major version that counts bytes in `pg_stat_io`, and operations rather than blocks; and the first with
/// `pg_stat_get_backend_io`.
pub const FIRST_IO_BYTES_MAJOR: u16 = 18;

/// How often, and how many times, the last look waits for sessions whose client has just left: they add what they counted when they end.
const LEAVING_INTERVAL: Duration = Duration::from_millis(10);
const LEAVING_ATTEMPTS: u32 = 10;

/// Has the session add what it counted itself to the statistics at the end of this statement, as it else does once a second
/// (`pgstat_report_stat`, `src/backend/utils/activity/pgstat.c`): so that it is known which of its reads a look includes.
const FLUSH_OWN: &str = "SELECT FROM pg_catalog.pg_stat_force_next_flush()";

/// Since when a session has been in its state tells whether it may still keep back what it counted.
const SESSIONS: &str =
    "SELECT pid, backend_start, application_name, state, xact_start IS NOT NULL AS in_transaction,
        pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - state_change) AS state_age_s
    FROM pg_catalog.pg_stat_activity";

const IO: &str = "SELECT backend_type, object, context, reads, read_bytes::int8, read_time, writes, write_bytes::int8,
        write_time, writebacks, writeback_time, extends, extend_bytes::int8, extend_time, fsyncs, fsync_time, evictions,
        hits, reuses, stats_reset
    FROM pg_catalog.pg_stat_io";

/// The same from 16 and 17, where each operation counts blocks of `op_bytes` (`pgstat_count_io_op_time` is called with the
/// number of buffers, `src/backend/storage/buffer/bufmgr.c`).
const IO_BY_BLOCKS: &str = "SELECT backend_type, object, context, reads, reads * op_bytes AS read_bytes, read_time, writes,
        writes * op_bytes AS write_bytes, write_time, writebacks, writeback_time, extends, extends * op_bytes AS extend_bytes,
        extend_time, fsyncs, fsync_time, evictions, hits, reuses, stats_reset
    FROM pg_catalog.pg_stat_io";

const BACKENDS: &str = "SELECT activity.pid, io.backend_type, io.object, pg_catalog.sum(io.reads)::int8 AS reads,
        pg_catalog.sum(io.read_bytes)::int8 AS read_bytes, pg_catalog.sum(io.read_time) AS read_time,
        pg_catalog.max(io.stats_reset) AS stats_reset
    FROM pg_catalog.pg_stat_activity AS activity, LATERAL pg_catalog.pg_stat_get_backend_io(activity.pid) AS io
    WHERE io.reads IS NOT NULL
    GROUP BY activity.pid, io.backend_type, io.object";

const DATABASES: &str =
    "SELECT datid, datname::text, blks_read, blk_read_time, stats_reset FROM pg_catalog.pg_stat_database";

/// Which of the two looks at the statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// As soon as there is a session.
    Before,
    /// When the trace has ended.
    After,
}

/// The statistics at one moment, all since their last reset. What the server does not have, or the role may not see, is
/// `None`.
#[derive(Debug, Clone, PartialEq)]
pub struct Statistics {
    /// Which look this is.
    pub moment: Moment,
    /// When.
    pub taken: Taken,
    /// The server's processes; `None` when they could not be asked for.
    pub sessions: Option<Vec<SessionRow>>,
    /// `pg_stat_io`; `None` before PostgreSQL 16.
    pub io: Option<Vec<IoRow>>,
    /// What `pg_stat_get_backend_io` says of each process, all contexts together; `None` before PostgreSQL 18.
    pub backends: Option<Vec<BackendRow>>,
    /// `pg_stat_database`.
    pub databases: Option<Vec<DatabaseRow>>,
    /// What the server refused, and what that costs; in one sentence each.
    pub refusals: Vec<String>,
}

/// A process of the server. Of other roles' sessions, most is hidden without the rights of `pg_read_all_stats`.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionRow {
    /// The process.
    pub pid: InnerPid,
    /// When it started; `None` where it is hidden.
    pub started: Option<SystemTime>,
    /// What its client calls itself.
    pub application_name: Option<String>,
    /// `active`, `idle`, …; `None` where it is hidden or the process serves no client.
    pub state: Option<String>,
    /// Whether it is in a transaction; `false` also where that is hidden.
    pub in_transaction: bool,
    /// Seconds since it has been in its state; `None` where it is hidden.
    pub state_age_s: Option<f64>,
}

/// Operations of one kind: how many, and where the server counts them, their bytes and their time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Operations {
    /// Operations; blocks before PostgreSQL 18.
    pub count: u64,
    /// Bytes; `None` for operations of which none are counted.
    pub bytes: Option<u64>,
    /// Milliseconds; 0 while timing is off. `None` for operations that are not timed.
    pub time_ms: Option<f64>,
}

/// A row of `pg_stat_io`. What the server does not count there is `None`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct IoRow {
    /// Type of the backends.
    pub backend_type: String,
    /// `relation`, `temp relation` or `wal`.
    pub object: String,
    /// `normal`, `bulkread`, `bulkwrite`, `vacuum`, `init`.
    pub context: String,
    /// Reads.
    pub reads: Option<Operations>,
    /// Writes.
    pub writes: Option<Operations>,
    /// Blocks that the kernel was asked to write back.
    pub writebacks: Option<Operations>,
    /// Relations made longer.
    pub extends: Option<Operations>,
    /// fsync calls.
    pub fsyncs: Option<Operations>,
    /// Blocks written out of a buffer to make it free.
    pub evictions: Option<Operations>,
    /// Blocks found in shared buffers.
    pub hits: Option<Operations>,
    /// Buffers of a ring that were used again.
    pub reuses: Option<Operations>,
    /// When the counters were reset last.
    pub reset: Option<SystemTime>,
}

/// What one process counted for one object, in all contexts.
#[derive(Debug, Clone, PartialEq)]
pub struct BackendRow {
    /// The process.
    pub pid: InnerPid,
    /// Its type.
    pub backend_type: String,
    /// `relation`, `temp relation` or `wal`.
    pub object: String,
    /// Reads.
    pub reads: Operations,
    /// When its counters were reset; `None`: never.
    pub reset: Option<SystemTime>,
}

/// A row of `pg_stat_database`.
#[derive(Debug, Clone, PartialEq)]
pub struct DatabaseRow {
    /// The database; 0 stands for the relations that all share.
    pub oid: u32,
    /// Its name; `None` for shared relations.
    pub name: Option<String>,
    /// Blocks that were not in shared buffers.
    pub blocks_read: u64,
    /// Milliseconds that its sessions spent on them; 0 while timing is off.
    pub read_time_ms: f64,
    /// When the counters were reset last.
    pub reset: Option<SystemTime>,
}

/// Looks at the statistics, twice: the statements are prepared once.
#[derive(Debug)]
pub struct Observer {
    major: u16,
    statements: Option<Statements>,
    /// Who was there at the first look.
    residents: HashSet<(InnerPid, Option<SystemTime>)>,
}

#[derive(Debug)]
struct Statements {
    flush: Question,
    sessions: Question,
    io: Option<Question>,
    backends: Option<Question>,
    databases: Question,
}

/// A prepared statement, or why the server refused it.
type Question = Result<Statement, String>;

impl Observer {
    /// Nothing is prepared yet.
    #[must_use]
    pub fn new(major: u16) -> Self {
        Self { major, statements: None, residents: HashSet::new() }
    }

    /// The first look.
    ///
    /// # Errors
    ///
    /// When the connection is lost. What the server refuses is no error, but absent.
    pub fn first_look(&mut self, client: &mut Client) -> Result<Statistics, postgres::Error> {
        let statements = Statements::prepare(client, self.major)?;
        let statistics = statements.look(client, Moment::Before)?;
        let sessions = statistics.sessions.iter().flatten();
        self.residents = sessions.map(|session| (session.pid, session.started)).collect();
        self.statements = Some(statements);
        Ok(statistics)
    }

    /// The last look; `None` without a first one, or when the connection is lost.
    pub fn last_look(&mut self, client: &mut Client) -> Option<Statistics> {
        let statements = self.statements.as_ref()?;
        for _ in 0..LEAVING_ATTEMPTS {
            let sessions = Asking::of(client).rows(Some(&statements.sessions), "", session_row).ok()?;
            if !sessions.iter().flatten().any(|session| self.may_be_leaving(session)) {
                break;
            }
            thread::sleep(LEAVING_INTERVAL);
        }
        statements.look(client, Moment::After).ok()
    }

    /// Whether a session came since the first look, and does nothing any more; hidden, it may.
    fn may_be_leaving(&self, session: &SessionRow) -> bool {
        let is_newcomer = !self.residents.contains(&(session.pid, session.started));
        let is_hidden = session.state.is_none() && session.started.is_none();
        is_newcomer
            && (is_hidden || session.state.as_deref() == Some("idle"))
            && session.application_name.as_deref() != Some(APPLICATION_NAME)
    }
}

impl Statements {
    fn prepare(client: &mut Client, major: u16) -> Result<Self, postgres::Error> {
        let io = if major >= FIRST_IO_BYTES_MAJOR { IO } else { IO_BY_BLOCKS };
        let mut prepare = |statement| refused(client.prepare(statement));
        Ok(Self {
            flush: prepare(FLUSH_OWN)?,
            sessions: prepare(SESSIONS)?,
            io: (major >= FIRST_IO_MAJOR).then(|| prepare(io)).transpose()?,
            backends: (major >= FIRST_IO_BYTES_MAJOR).then(|| prepare(BACKENDS)).transpose()?,
            databases: prepare(DATABASES)?,
        })
    }

    /// Each statement is a transaction of its own, so each sees the statistics as they are: what
    /// `stats_fetch_consistency` keeps, it keeps within a transaction.
    fn look(&self, client: &mut Client, moment: Moment) -> Result<Statistics, postgres::Error> {
        let from_ns = monotonic_ns();
        let mut asking = Asking::of(client);
        // Refused, the session's own reads are told apart less well, and that is all.
        let flush = self.flush.as_ref().map_err(String::clone);
        if let Ok(flush) = flush {
            refused(asking.client.query(flush, &[]))?.ok();
        }
        // The sessions first: what one of them adds to the statistics meanwhile is then in them rather than missing.
        let sessions = asking.rows(Some(&self.sessions), "the sessions", session_row)?;
        let backends = asking.rows(self.backends.as_ref(), "pg_stat_get_backend_io", backend_row)?;
        let io = asking.rows(self.io.as_ref(), "pg_stat_io", io_row)?;
        let databases = asking.rows(Some(&self.databases), "pg_stat_database", database_row)?;
        let refusals = asking.refusals;
        let taken = Taken { from_ns, to_ns: monotonic_ns() };
        Ok(Statistics { moment, taken, sessions, io, backends, databases, refusals })
    }
}

/// A look, as it goes on.
struct Asking<'a> {
    client: &'a mut Client,
    refusals: Vec<String>,
}

impl<'a> Asking<'a> {
    fn of(client: &'a mut Client) -> Self {
        Self { client, refusals: Vec::new() }
    }

    /// The answer to a question; `None` where there is none to ask, or the server refuses it.
    fn rows<T>(
        &mut self,
        question: Option<&Question>,
        what: &str,
        row: fn(&Row) -> Result<T, postgres::Error>,
    ) -> Result<Option<Vec<T>>, postgres::Error> {
        let answer = match question {
            None => return Ok(None),
            Some(Err(refusal)) => Err(refusal.clone()),
            Some(Ok(statement)) => refused(self.client.query(statement, &[]))?,
        };
        match answer {
            Ok(rows) => rows.iter().map(row).collect::<Result<_, _>>().map(Some),
            Err(refusal) => {
                self.refusals.push(format!(
                    "asking for {what} failed ({refusal}): traced reads are not compared with it; see that the role may \
                     read it"
                ));
                Ok(None)
            }
        }
    }
}

/// What the server refuses, apart from what breaks the connection.
fn refused<T>(outcome: Result<T, postgres::Error>) -> Result<Result<T, String>, postgres::Error> {
    match outcome {
        Ok(done) => Ok(Ok(done)),
        Err(error) if error.as_db_error().is_some() && !error.is_closed() => Ok(Err(innermost(&error))),
        Err(error) => Err(error),
    }
}

fn session_row(row: &Row) -> Result<SessionRow, postgres::Error> {
    Ok(SessionRow {
        pid: pid(row)?,
        started: row.try_get("backend_start")?,
        application_name: row.try_get("application_name")?,
        state: row.try_get("state")?,
        in_transaction: row.try_get("in_transaction")?,
        state_age_s: row.try_get("state_age_s")?,
    })
}

fn io_row(row: &Row) -> Result<IoRow, postgres::Error> {
    let counted = |column| Ok(count(row, column)?.map(|count| Operations { count, ..Operations::default() }));
    let timed = |column, time| {
        let time_ms = row.try_get(time)?;
        Ok(counted(column)?.map(|operations| Operations { time_ms, ..operations }))
    };
    let measured = |column, bytes, time| {
        let bytes = count(row, bytes)?;
        let operations: Result<_, postgres::Error> = timed(column, time);
        Ok(operations?.map(|operations| Operations { bytes, ..operations }))
    };
    Ok(IoRow {
        backend_type: row.try_get("backend_type")?,
        object: row.try_get("object")?,
        context: row.try_get("context")?,
        reads: measured("reads", "read_bytes", "read_time")?,
        writes: measured("writes", "write_bytes", "write_time")?,
        writebacks: timed("writebacks", "writeback_time")?,
        extends: measured("extends", "extend_bytes", "extend_time")?,
        fsyncs: timed("fsyncs", "fsync_time")?,
        evictions: counted("evictions")?,
        hits: counted("hits")?,
        reuses: counted("reuses")?,
        reset: row.try_get("stats_reset")?,
    })
}

fn backend_row(row: &Row) -> Result<BackendRow, postgres::Error> {
    Ok(BackendRow {
        pid: pid(row)?,
        backend_type: row.try_get("backend_type")?,
        object: row.try_get("object")?,
        reads: Operations {
            count: count(row, "reads")?.unwrap_or(0),
            bytes: count(row, "read_bytes")?,
            time_ms: row.try_get("read_time")?,
        },
        reset: row.try_get("stats_reset")?,
    })
}

fn database_row(row: &Row) -> Result<DatabaseRow, postgres::Error> {
    Ok(DatabaseRow {
        oid: row.try_get("datid")?,
        name: row.try_get("datname")?,
        blocks_read: count(row, "blks_read")?.unwrap_or(0),
        read_time_ms: row.try_get::<_, Option<f64>>("blk_read_time")?.unwrap_or(0.0),
        reset: row.try_get("stats_reset")?,
    })
}

/// A counter; the views show unsigned numbers in a signed type.
fn count(row: &Row, column: &str) -> Result<Option<u64>, postgres::Error> {
    Ok(row.try_get::<_, Option<i64>>(column)?.map(i64::unsigned_abs))
}

fn pid(row: &Row) -> Result<InnerPid, postgres::Error> {
    Ok(InnerPid(row.try_get::<_, i32>("pid")?.unsigned_abs()))
}
