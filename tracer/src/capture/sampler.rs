//! Samples of `pg_stat_activity` and `pg_aios`.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use postgres::{Client, Row, Statement, types::Type};
use procfs::process::Process;
use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

use super::statistics::{Observer, Statistics};
use super::{SERVER_EPOCH_UNIX_S, aio_target::AioTarget, monotonic_ns, statements::Statements};
use crate::server::connect::{Connector, innermost};
use crate::server::discover::Server;
use crate::server::facts::{ServerFacts, facts};
use crate::server::{InnerPid, Pid};

/// Characters of a query that are kept: the server keeps `track_activity_query_size` bytes, 1024 unless set otherwise.
const QUERY_CHARS: i32 = 1024;

/// What samples may cost the server: a hundredth of one processor. Where they would cost more, they are taken less often.
pub const MOST_SERVER_SHARE: f64 = 0.01;

/// How long between attempts to connect again.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(500);

/// How long between attempts to hand over a sample while the receiver is behind.
const FULL_INTERVAL: Duration = Duration::from_millis(10);

/// How long [`Sampler::stop`] waits for a query that is under way.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);

/// The sessions alone: before PostgreSQL 18, or without the right to see `pg_aios`. $1: the moment of the sample before; the
/// text of a query that began earlier has been seen. $2: how many characters of it are wanted. Who blocks whom is asked for those
/// only that wait for a lock, because `pg_blocking_pids` locks the server's lock tables.
const ACTIVITY: &str =
    "SELECT pid, leader_pid, backend_type, datid, datname::text, usename::text, application_name,
            pg_catalog.host(client_addr) AS client, state AS session_state, wait_event_type, wait_event,
            query_start, query_id,
            CASE WHEN query_start >= $1 THEN pg_catalog.left(query, $2) END AS query,
            CASE WHEN wait_event_type = 'Lock' THEN pg_catalog.pg_blocking_pids(pid) END AS blockers,
            pg_catalog.statement_timestamp() AS asked_at, pg_catalog.clock_timestamp() AS listed_at
    FROM pg_catalog.pg_stat_activity";

/// The reads, in one statement with the sessions: one moment, and one round trip. A row is a read where `io_id`
/// is not null; a handle without an owner has just been released.
const AND_AIOS: (&str, &str) = (
    "SELECT sessions.*, NULL::int4 AS io_id, NULL::int8 AS io_generation, NULL::text AS state,
            NULL::int8 AS offset_bytes, NULL::int8 AS length, NULL::text AS target_desc, NULL::bool AS f_sync
    FROM (",
    ") AS sessions
    UNION ALL
    SELECT pid, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
           io_id, io_generation, state, \"off\", length, target_desc, f_sync
    FROM pg_catalog.pg_aios WHERE operation = 'readv' AND pid IS NOT NULL",
);

/// What the view shows instead of a query that the role may not see (`pg_stat_get_activity`, `pgstatfuncs.c`).
const NOT_FOR_YOU: &str = "<insufficient privilege>";

/// When a sample was taken: at some moment from `from_ns` to `to_ns`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// Before the question was sent, `CLOCK_MONOTONIC` nanoseconds.
    pub from_ns: u64,
    /// After the answer was there, `CLOCK_MONOTONIC` nanoseconds.
    pub to_ns: u64,
}

impl Taken {
    /// The part of it that lies between two moments of the server's clock, which is that of the system: all of it, where they do not
    /// lie within.
    fn narrowed(self, from: SystemTime, to: SystemTime) -> Self {
        let now = (SystemTime::now(), monotonic_ns());
        let at = |moment: SystemTime| {
            let ago = now.0.duration_since(moment).ok()?;
            now.1.checked_sub(u64::try_from(ago.as_nanos()).ok()?)
        };
        match (at(from), at(to)) {
            (Some(from), Some(to)) if self.from_ns <= from && from <= to && to <= self.to_ns => {
                Self { from_ns: from, to_ns: to }
            }
            _ => self,
        }
    }
}

/// A row of `pg_stat_activity`. Without `pg_read_all_stats`, other roles' sessions lack most of it.
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
    /// Address of the client; `None` for a Unix socket, and for processes without a client.
    pub client: Option<String>,
    /// `active`, `idle`, `idle in transaction`, …; `None` for processes that execute no queries.
    pub state: Option<String>,
    /// What it waits for; `None` when it does not wait.
    pub wait: Option<WaitEvent>,
    /// What it executes, or executed last; `None` when it has not yet.
    pub execution: Option<ExecutionRow>,
    /// Who holds the lock that it waits for, or is before it in the queue; empty when it does not wait for one.
    pub blockers: Vec<InnerPid>,
}

/// A wait event, as the view names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WaitEvent {
    /// `IO`, `LWLock`, `Lock`, …
    pub kind: String,
    /// `AioIoCompletion`, `DataFileRead`, …
    pub name: String,
}

impl fmt::Display for WaitEvent {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.kind, self.name)
    }
}

#[cfg(test)]
impl ActivityRow {
    /// A row that says nothing, for tests.
    pub(crate) fn of(pid: InnerPid) -> Self {
        Self {
            pid,
            leader: None,
            backend_type: None,
            database_oid: None,
            database: None,
            user: None,
            application_name: None,
            client: None,
            state: None,
            wait: None,
            execution: None,
            blockers: Vec::new(),
        }
    }
}

/// One execution of a query, as the view shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecutionRow {
    /// `query_start`, microseconds since 2000-01-01 00:00 UTC, as the server counts.
    pub started_us: i64,
    /// `query_id`; `None` where the server does not compute it.
    pub query_id: Option<i64>,
    /// The query, as far as the server keeps it; `None` where it is not wanted, or not for this role to see.
    pub text: Option<Arc<str>>,
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
    /// Queries as `pg_stat_statements` keeps them, by `query_id`.
    Statements(Vec<(i64, Arc<str>)>),
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

/// How samples are taken.
#[derive(Debug, Clone)]
pub struct Habits {
    /// Between two samples, unless that would cost the server more than [`MOST_SERVER_SHARE`] of a processor.
    pub interval: Duration,
    /// Whether they may cost more than that.
    pub is_unlimited: bool,
    /// Whether the texts of queries are asked for.
    pub query_text: bool,
    /// What they cost.
    pub spent: Arc<Spent>,
}

/// What samples cost the server so far.
#[derive(Debug)]
pub struct Spent {
    samples: AtomicU64,
    /// Processor time of the process that serves the sampler, nanoseconds.
    server_ns: AtomicU64,
    is_known: AtomicBool,
}

impl Default for Spent {
    fn default() -> Self {
        Self { samples: AtomicU64::new(0), server_ns: AtomicU64::new(0), is_known: AtomicBool::new(true) }
    }
}

impl Spent {
    /// Samples taken.
    pub fn samples(&self) -> u64 {
        self.samples.load(Ordering::Relaxed)
    }

    /// Processor time of the server's process that answered, seconds; `None` where that could not be measured.
    pub fn server_s(&self) -> Option<f64> {
        let is_known = self.is_known.load(Ordering::Relaxed);
        is_known.then(|| self.server_ns.load(Ordering::Relaxed) as f64 / 1e9)
    }
}

/// A thread that samples; dropping it ends the thread.
#[derive(Debug)]
pub struct Sampler {
    stop: mpsc::Sender<()>,
    /// The last look at the statistics, if any; disconnected when the thread has ended.
    ended: mpsc::Receiver<PgSample>,
}

impl Sampler {
    /// Starts to sample.
    ///
    /// A receiver that is behind delays the next sample; no sample is dropped. The thread ends when the
    /// receiver is dropped, and after an error that trying again cannot mend.
    ///
    /// # Errors
    ///
    /// When the system gives no thread.
    pub fn spawn(connector: Connector, habits: Habits, samples: Sender<PgSample>) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let (last, ended) = mpsc::channel();
        let work = move || {
            // Dropped with the thread, and that is a message, too.
            let mut outbox = Outbox { samples, stopped, last, is_away: false };
            // Stopped is the only way out, and what was wanted.
            let _ = run(&connector, &habits, &mut outbox);
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
fn run(connector: &Connector, habits: &Habits, outbox: &mut Outbox) -> Result<(), Stopped> {
    loop {
        match connector.connect(None) {
            Ok(mut client) => {
                let server = connector.server();
                let mut observer = Observer::new(server.major);
                let outcome = sample_until_lost(&mut client, server, habits, &mut observer, outbox);
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
    server: &Server,
    habits: &Habits,
    observer: &mut Observer,
    outbox: &mut Outbox,
) -> Result<postgres::Error, Stopped> {
    let (facts, mut question) = match prepare(client, habits) {
        Ok(prepared) => prepared,
        Err(error) => return Ok(error),
    };
    let missing_rights = facts.missing_rights();
    let has_aios = facts.reads_aios == Some(true);
    let mut cost = Cost::of(server.child(facts.backend));
    let mut introduction = Some((facts, missing_rights));
    let mut statements = habits.query_text.then(|| Statements::prepare(client, QUERY_CHARS)).flatten();
    let mut due = Instant::now();
    loop {
        cost.begin();
        let Sample { taken, listed, activity, aios } = match question.ask(client) {
            Ok(sample) => sample,
            Err(error) => return Ok(error),
        };
        cost.sampled(&habits.spent);
        outbox.back()?;
        let is_first = introduction.is_some();
        if let Some((facts, missing_rights)) = introduction.take() {
            outbox.send(PgSample::Facts(Box::new(facts)))?;
            missing_rights.map_or(Ok(()), |missing| outbox.send(PgSample::Limited(missing.to_string())))?;
        }
        if let Some(statements) = &mut statements {
            let seen = activity.iter().filter_map(|row| row.execution.as_ref()?.query_id);
            seen.for_each(|query_id| statements.want(query_id));
            let texts = statements.ask(client);
            if !texts.is_empty() {
                outbox.send(PgSample::Statements(texts))?;
            }
        }
        outbox.send(PgSample::Activity { taken: listed, rows: activity })?;
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
        due = (due + habits.interval.max(cost.shortest_interval(habits.is_unlimited))).max(now);
        outbox.wait(due - now)?;
    }
}

/// What samples cost the server: processor time of the process that serves the sampler.
struct Cost {
    process: Option<Process>,
    /// Its processor time so far, nanoseconds.
    before_ns: Option<u64>,
    /// Of a sample, nanoseconds: a moving average. The first one does not count, which fills the session's caches.
    of_one_ns: Option<u64>,
    is_first: bool,
}

impl Cost {
    fn of(process: Option<Pid>) -> Self {
        let process = process.and_then(|pid| Process::new(i32::try_from(pid.0).ok()?).ok());
        let before_ns = process.as_ref().and_then(cpu_ns);
        Self { process, before_ns, of_one_ns: None, is_first: true }
    }

    /// A sample is about to be taken: what came before is not its cost.
    fn begin(&mut self) {
        self.before_ns = self.process.as_ref().and_then(cpu_ns);
    }

    /// Another sample was taken.
    fn sampled(&mut self, spent: &Spent) {
        let now_ns = self.process.as_ref().and_then(cpu_ns);
        let this_ns = now_ns.zip(self.before_ns).map(|(now, before)| now.saturating_sub(before));
        self.before_ns = now_ns;
        match this_ns {
            Some(nanos) => {
                if !std::mem::take(&mut self.is_first) {
                    self.of_one_ns = Some(self.of_one_ns.map_or(nanos, |before| before.midpoint(nanos)));
                }
                spent.server_ns.fetch_add(nanos, Ordering::Relaxed);
            }
            None => spent.is_known.store(false, Ordering::Relaxed),
        }
        spent.samples.fetch_add(1, Ordering::Relaxed);
    }

    /// Samples as close as this cost [`MOST_SERVER_SHARE`] of a processor.
    fn shortest_interval(&self, is_unlimited: bool) -> Duration {
        if is_unlimited {
            return Duration::ZERO;
        }
        Duration::from_nanos(self.of_one_ns.unwrap_or(0)).mul_f64(1.0 / MOST_SERVER_SHARE)
    }
}

/// Processor time of a process, nanoseconds.
fn cpu_ns(process: &Process) -> Option<u64> {
    process.schedstat().ok().map(|times| times.sum_exec_runtime)
}

fn prepare(client: &mut Client, habits: &Habits) -> Result<(ServerFacts, Question), postgres::Error> {
    let facts = facts(client)?;
    let query = if facts.reads_aios == Some(true) {
        let (before, behind) = AND_AIOS;
        format!("{before}{ACTIVITY}{behind}")
    } else {
        ACTIVITY.to_owned()
    };
    // Else the server plans it anew the first five times, which takes longer than to answer.
    client.batch_execute("SET plan_cache_mode = force_generic_plan")?;
    let types = [Type::TIMESTAMPTZ, Type::INT4];
    let statement = client.prepare_typed(&query, &types)?;
    Ok((facts, Question::new(statement, if habits.query_text { QUERY_CHARS } else { 0 })))
}

/// An answer.
struct Sample {
    taken: Taken,
    /// When the sessions were listed: within that time.
    listed: Taken,
    activity: Vec<ActivityRow>,
    aios: Vec<AioRow>,
}

/// What is asked again and again, and what has been learned from the answers.
struct Question {
    statement: Statement,
    /// Characters of a query that are wanted; 0: none.
    text_chars: i32,
    /// When the server was asked last, by its own clock.
    asked_at: SystemTime,
    /// Text of the newest query of each process, and when that began.
    texts: HashMap<InnerPid, (i64, Arc<str>)>,
}

impl Question {
    fn new(statement: Statement, text_chars: i32) -> Self {
        Self { statement, text_chars, asked_at: SystemTime::UNIX_EPOCH, texts: HashMap::new() }
    }

    fn ask(&mut self, client: &mut Client) -> Result<Sample, postgres::Error> {
        let from_ns = monotonic_ns();
        let rows = client.query(&self.statement, &[&self.asked_at, &self.text_chars])?;
        let taken = Taken { from_ns, to_ns: monotonic_ns() };
        let has_aios = self.statement.columns().iter().any(|column| column.name() == "io_id");
        let mut activity = Vec::with_capacity(rows.len());
        let mut aios = Vec::new();
        // The rows are collected when the first is asked for, and then go by one after the other.
        let (mut asked_at, mut listed_at) = (None, None::<SystemTime>);
        for row in &rows {
            match row {
                row if has_aios && row.try_get::<_, Option<i32>>("io_id")?.is_some() => {
                    aios.push(aio_row(row)?);
                }
                row => {
                    asked_at = row.try_get::<_, Option<SystemTime>>("asked_at")?;
                    let at = row.try_get::<_, Option<SystemTime>>("listed_at")?;
                    listed_at = listed_at.into_iter().chain(at).min();
                    activity.push(self.activity_row(row)?);
                }
            }
        }
        self.asked_at = asked_at.unwrap_or(self.asked_at);
        let listed = asked_at.zip(listed_at).map_or(taken, |(from, to)| taken.narrowed(from, to));
        self.texts.retain(|pid, _| activity.iter().any(|row| row.pid == *pid));
        Ok(Sample { taken, listed, activity, aios })
    }

    fn activity_row(&mut self, row: &Row) -> Result<ActivityRow, postgres::Error> {
        let pid = inner_pid(row.try_get("pid")?);
        let name = row.try_get::<_, Option<String>>("application_name")?;
        let wait = row.try_get::<_, Option<String>>("wait_event_type")?.zip(row.try_get("wait_event")?);
        let blockers = row.try_get::<_, Option<Vec<i32>>>("blockers")?.unwrap_or_default();
        Ok(ActivityRow {
            pid,
            leader: row.try_get::<_, Option<i32>>("leader_pid")?.map(inner_pid),
            backend_type: row.try_get("backend_type")?,
            database_oid: row.try_get("datid")?,
            database: row.try_get("datname")?,
            user: row.try_get("usename")?,
            application_name: name.filter(|name| !name.is_empty()),
            client: row.try_get("client")?,
            state: row.try_get("session_state")?,
            wait: wait.map(|(kind, name)| WaitEvent { kind, name }),
            execution: self.execution(pid, row)?,
            // 0 stands for a prepared transaction, which has no process.
            blockers: blockers.into_iter().filter(|pid| *pid != 0).map(inner_pid).collect(),
        })
    }

    fn execution(&mut self, pid: InnerPid, row: &Row) -> Result<Option<ExecutionRow>, postgres::Error> {
        let Some(start) = row.try_get::<_, Option<SystemTime>>("query_start")? else { return Ok(None) };
        let started_us = server_time_us(start);
        let text = row.try_get::<_, Option<String>>("query")?;
        if let Some(text) = text.filter(|text| !text.is_empty() && text != NOT_FOR_YOU) {
            self.texts.insert(pid, (started_us, text.into()));
        }
        let known = self.texts.get(&pid).filter(|(start, _)| *start == started_us);
        Ok(Some(ExecutionRow {
            started_us,
            query_id: row.try_get("query_id")?,
            text: known.map(|(_, text)| Arc::clone(text)),
        }))
    }
}

/// A moment as the server counts: microseconds since 2000-01-01 00:00 UTC (`TimestampTz`).
fn server_time_us(moment: SystemTime) -> i64 {
    let epoch = SystemTime::UNIX_EPOCH + Duration::from_secs(SERVER_EPOCH_UNIX_S.unsigned_abs());
    let micros = |duration: Duration| i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
    moment.duration_since(epoch).map_or_else(|error| -micros(error.duration()), micros)
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
