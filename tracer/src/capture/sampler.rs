//! Samples of `pg_stat_activity` and `pg_aios`.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use postgres::{Client, Row, Statement};
use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

use super::statistics::{Observer, Statistics};
use super::{aio_target::AioTarget, monotonic_ns};
use crate::server::InnerPid;
use crate::server::connect::{Connector, innermost};
use crate::server::facts::{ServerFacts, facts};

/// How long between attempts to connect again.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(500);

/// How long between attempts to hand over a sample while the receiver is behind.
const FULL_INTERVAL: Duration = Duration::from_millis(10);

/// How long [`Sampler::stop`] waits for a query that is under way.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);

/// The sessions alone: before PostgreSQL 18, or without the right to see `pg_aios`.
const ACTIVITY: &str =
    "SELECT pid, leader_pid, backend_type, datid, datname::text, usename::text, application_name
    FROM pg_catalog.pg_stat_activity";

/// The sessions and the reads in one statement: one moment, and one round trip. A row is a read where `io_id`
/// is not null; a handle without an owner has just been released.
const ACTIVITY_AND_AIOS: &str =
    "SELECT pid, leader_pid, backend_type, datid, datname::text, usename::text, application_name,
            NULL::int4 AS io_id, NULL::int8 AS io_generation, NULL::text AS state, NULL::int8 AS offset_bytes,
            NULL::int8 AS length, NULL::text AS target_desc, NULL::bool AS f_sync
    FROM pg_catalog.pg_stat_activity
    UNION ALL
    SELECT pid, NULL, NULL, NULL, NULL, NULL, NULL,
           io_id, io_generation, state, \"off\", length, target_desc, f_sync
    FROM pg_catalog.pg_aios WHERE operation = 'readv' AND pid IS NOT NULL";

/// When a sample was taken: at some moment from `from_ns` to `to_ns`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// Before the question was sent, `CLOCK_MONOTONIC` nanoseconds.
    pub from_ns: u64,
    /// After the answer was there, `CLOCK_MONOTONIC` nanoseconds.
    pub to_ns: u64,
}

/// A row of `pg_stat_activity`. Without `pg_read_all_stats`, other roles' sessions lack type and leader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActivityRow {
    /// The process.
    pub pid: InnerPid,
    /// Leader of the parallel group, where this is a parallel worker.
    pub leader: Option<InnerPid>,
    /// `client backend`, `parallel worker`, `io worker`, …
    pub backend_type: Option<String>,
    /// Database.
    pub database_oid: Option<u32>,
    /// Name of the database.
    pub database: Option<String>,
    /// Name of the role.
    pub user: Option<String>,
    /// What the client calls itself; `None` when it does not.
    pub application_name: Option<String>,
}

/// State of an I/O handle (`pgaio_io_state_get_name` in PostgreSQL's `aio.c`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AioState {
    /// The operation is defined.
    Defined,
    /// Waits to be submitted.
    Staged,
    /// Is, or was, executed: io_uring leaves finished reads here until somebody reaps them.
    Submitted,
    /// The result is in.
    CompletedIo,
    /// The shared callbacks have run.
    CompletedShared,
    /// The owner's callbacks have run.
    CompletedLocal,
    /// One that this pgiotrace does not know.
    Other,
}

impl AioState {
    fn parse(name: &str) -> Self {
        match name {
            "DEFINED" => Self::Defined,
            "STAGED" => Self::Staged,
            "SUBMITTED" => Self::Submitted,
            "COMPLETED_IO" => Self::CompletedIo,
            "COMPLETED_SHARED" => Self::CompletedShared,
            "COMPLETED_LOCAL" => Self::CompletedLocal,
            _ => Self::Other,
        }
    }
}

/// A read in `pg_aios`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AioRow {
    /// The backend that wants the read.
    pub owner: InnerPid,
    /// Number of the handle.
    pub io_id: u32,
    /// Use of the handle.
    pub generation: u64,
    /// How far it is.
    pub state: AioState,
    /// Bytes from the start of the segment file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// The blocks that are read; `None` when the description is not understood.
    pub target: Option<AioTarget>,
    /// The owner executes the read itself.
    pub is_synchronous: bool,
}

/// What the sampler sends.
#[derive(Debug, Clone, PartialEq)]
pub enum PgSample {
    /// What the server says about itself; once for each connection, before its samples.
    Facts(Box<ServerFacts>),
    /// What is missing for lack of rights and how to mend that, in one sentence; after the facts.
    Limited(String),
    /// All sessions.
    Activity {
        /// When.
        taken: Taken,
        /// One row a process of the server.
        rows: Vec<ActivityRow>,
    },
    /// All reads that have a handle, of the same moment as the activity before.
    Aios {
        /// When.
        taken: Taken,
        /// One row a read.
        rows: Vec<AioRow>,
    },
    /// The cumulative statistics: once for each connection after its first sample, and once more at the end.
    Statistics(Box<Statistics>),
    /// There are no samples from here on; why, in one sentence.
    Unavailable(String),
    /// Samples are back.
    Back,
}

/// A thread that samples; dropping it ends the thread.
#[derive(Debug)]
pub struct Sampler {
    stop: mpsc::Sender<()>,
    /// The last look at the statistics, if any; disconnected when the thread has ended.
    ended: mpsc::Receiver<PgSample>,
}

impl Sampler {
    /// Starts to sample every `interval`.
    ///
    /// A receiver that is behind delays the next sample; no sample is dropped. The thread ends when the
    /// receiver is dropped, and after an error that trying again cannot mend.
    ///
    /// # Errors
    ///
    /// When the system gives no thread.
    pub fn spawn(connector: Connector, interval: Duration, samples: Sender<PgSample>) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let (last, ended) = mpsc::channel();
        let work = move || {
            // Dropped with the thread, and that is a message, too.
            let mut outbox = Outbox { samples, stopped, last, is_away: false };
            // Stopped is the only way out, and what was wanted.
            let _ = run(&connector, interval, &mut outbox);
        };
        thread::Builder::new().name("pg-sampler".to_owned()).spawn(work)?;
        Ok(Self { stop, ended })
    }

    /// Ends the thread and waits for it, but not for a server that does not answer. Returns what the sampler had to say at last.
    #[must_use]
    pub fn stop(self) -> Option<PgSample> {
        // The thread may have ended by itself.
        let _ = self.stop.send(());
        self.ended.recv_timeout(STOP_TIMEOUT).ok()
    }
}

/// The sampler is to end.
struct Stopped;

/// Where samples go, and where the word to stop comes from.
struct Outbox {
    samples: Sender<PgSample>,
    stopped: mpsc::Receiver<()>,
    /// For the very last sample, which the receiver takes after all others.
    last: mpsc::Sender<PgSample>,
    /// Whether the receiver was told that there are no samples.
    is_away: bool,
}

impl Outbox {
    /// Hands a sample over. Not by a blocking send: a receiver that waits for this thread to end would never
    /// receive it.
    fn send(&self, sample: PgSample) -> Result<(), Stopped> {
        let mut sample = sample;
        loop {
            match self.samples.try_send(sample) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Closed(_)) => return Err(Stopped),
                Err(TrySendError::Full(back)) => sample = back,
            }
            self.wait(FULL_INTERVAL)?;
        }
    }

    /// Waits, unless the word to stop comes first.
    fn wait(&self, duration: Duration) -> Result<(), Stopped> {
        match self.stopped.recv_timeout(duration) {
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Ok(()) | Err(RecvTimeoutError::Disconnected) => Err(Stopped),
        }
    }

    /// Tells, once, that there are no samples.
    fn away(&mut self, why: String) -> Result<(), Stopped> {
        if self.is_away {
            return Ok(());
        }
        self.is_away = true;
        self.send(PgSample::Unavailable(why))
    }

    /// Tells, once, that samples are back: only with a sample in hand, lest a server that lets in but does
    /// not answer comes and goes twice a second.
    fn back(&mut self) -> Result<(), Stopped> {
        if !self.is_away {
            return Ok(());
        }
        self.is_away = false;
        self.send(PgSample::Back)
    }
}

/// Connects, samples until the connection is lost, and connects again.
fn run(connector: &Connector, interval: Duration, outbox: &mut Outbox) -> Result<(), Stopped> {
    loop {
        match connector.connect(None) {
            Ok(mut client) => {
                let mut observer = Observer::new(connector.server().major);
                let outcome = sample_until_lost(&mut client, interval, &mut observer, outbox);
                if outcome.is_err()
                    && let Some(statistics) = observer.last_look(&mut client)
                {
                    // Nobody may wait for it any more.
                    let _ = outbox.last.send(PgSample::Statistics(Box::new(statistics)));
                }
                let error = outcome?;
                let why = innermost(&error);
                outbox.away(format!(
                    "sampling pg_stat_activity failed ({why}): tracing goes on with fewer names until the \
                     server answers again"
                ))?;
            }
            Err(error) => {
                outbox.away(error.to_string())?;
                if !error.is_transient() {
                    return Ok(());
                }
            }
        }
        outbox.wait(RECONNECT_INTERVAL)?;
    }
}

/// Samples until a query fails, and returns its error.
fn sample_until_lost(
    client: &mut Client,
    interval: Duration,
    observer: &mut Observer,
    outbox: &mut Outbox,
) -> Result<postgres::Error, Stopped> {
    let (facts, statement) = match prepare(client) {
        Ok(prepared) => prepared,
        Err(error) => return Ok(error),
    };
    let missing_rights = facts.missing_rights();
    let has_aios = facts.reads_aios == Some(true);
    let mut introduction = Some((facts, missing_rights));
    let mut due = Instant::now();
    loop {
        let (taken, activity, aios) = match sample(client, &statement) {
            Ok(sample) => sample,
            Err(error) => return Ok(error),
        };
        outbox.back()?;
        let is_first = introduction.is_some();
        if let Some((facts, missing_rights)) = introduction.take() {
            outbox.send(PgSample::Facts(Box::new(facts)))?;
            missing_rights.map_or(Ok(()), |missing| outbox.send(PgSample::Limited(missing.to_string())))?;
        }
        outbox.send(PgSample::Activity { taken, rows: activity })?;
        if has_aios {
            outbox.send(PgSample::Aios { taken, rows: aios })?;
        }
        if is_first {
            match observer.first_look(client) {
                Ok(statistics) => outbox.send(PgSample::Statistics(Box::new(statistics)))?,
                Err(error) => return Ok(error),
            }
        }
        // From deadline to deadline, so that a query's own time does not lower the rate; what was missed is
        // not made up.
        let now = Instant::now();
        due = (due + interval).max(now);
        outbox.wait(due - now)?;
    }
}

fn prepare(client: &mut Client) -> Result<(ServerFacts, Statement), postgres::Error> {
    let facts = facts(client)?;
    let query = if facts.reads_aios == Some(true) { ACTIVITY_AND_AIOS } else { ACTIVITY };
    let statement = client.prepare(query)?;
    Ok((facts, statement))
}

type Sample = (Taken, Vec<ActivityRow>, Vec<AioRow>);

fn sample(client: &mut Client, statement: &Statement) -> Result<Sample, postgres::Error> {
    let from_ns = monotonic_ns();
    let rows = client.query(statement, &[])?;
    let taken = Taken { from_ns, to_ns: monotonic_ns() };
    let has_aios = statement.columns().iter().any(|column| column.name() == "io_id");
    let mut activity = Vec::with_capacity(rows.len());
    let mut aios = Vec::new();
    for row in &rows {
        match row {
            row if has_aios && row.try_get::<_, Option<i32>>("io_id")?.is_some() => aios.push(aio_row(row)?),
            row => activity.push(activity_row(row)?),
        }
    }
    Ok((taken, activity, aios))
}

fn activity_row(row: &Row) -> Result<ActivityRow, postgres::Error> {
    let name = row.try_get::<_, Option<String>>("application_name")?;
    Ok(ActivityRow {
        pid: inner_pid(row.try_get("pid")?),
        leader: row.try_get::<_, Option<i32>>("leader_pid")?.map(inner_pid),
        backend_type: row.try_get("backend_type")?,
        database_oid: row.try_get("datid")?,
        database: row.try_get("datname")?,
        user: row.try_get("usename")?,
        application_name: name.filter(|name| !name.is_empty()),
    })
}

fn aio_row(row: &Row) -> Result<AioRow, postgres::Error> {
    let description: String = row.try_get("target_desc")?;
    Ok(AioRow {
        owner: inner_pid(row.try_get("pid")?),
        io_id: row.try_get::<_, i32>("io_id")?.unsigned_abs(),
        // The views show unsigned 64-bit numbers in a signed type (pg_get_aios in aio_funcs.c).
        generation: row.try_get::<_, i64>("io_generation")?.cast_unsigned(),
        state: AioState::parse(row.try_get("state")?),
        offset: row.try_get::<_, i64>("offset_bytes")?.cast_unsigned(),
        length: row.try_get::<_, i64>("length")?.cast_unsigned(),
        target: AioTarget::parse(&description),
        is_synchronous: row.try_get("f_sync")?,
    })
}

fn inner_pid(pid: i32) -> InnerPid {
    InnerPid(pid.unsigned_abs())
}
