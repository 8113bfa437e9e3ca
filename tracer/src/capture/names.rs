//! Names of relations, looked up in the server's catalogs when asked.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender, TrySendError};
use std::thread;
use std::time::{Duration, Instant};

use postgres::{Client, Statement};
use tokio::sync::mpsc::UnboundedSender;

use crate::model::io::RelationFork;
use crate::server::connect::{ConnectError, Connector, innermost};

/// Requests that may wait.
const QUEUE_LENGTH: usize = 4096;

/// Sessions at a time, one a database, beside the one for `pg_database` and shared relations.
const MAX_SESSIONS: usize = 8;

/// How long a session is kept without use.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to leave a server alone that could not be connected to.
const AWAY_INTERVAL: Duration = Duration::from_millis(500);

/// When to look again for what is not there: the transaction that creates or rewrites a relation reads it
/// before others see its catalog entry.
const RETRY_INTERVALS: [Duration; 4] = [
    Duration::from_millis(100),
    Duration::from_millis(500),
    Duration::from_millis(2500),
    Duration::from_secs(10),
];

const RELATION: &str = "SELECT n.nspname::text, c.relname::text
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = pg_catalog.pg_filenode_relation($1, $2)";

/// For temporary relations, which `pg_filenode_relation` leaves out. A relfilenode names one only within its
/// session, and 0 is the database's own tablespace.
const TEMPORARY_RELATION: &str = "SELECT n.nspname::text, c.relname::text
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relpersistence = 't' AND c.reltablespace IN (0, $1) AND c.relfilenode = $2 LIMIT 2";

const DATABASE: &str = "SELECT datname::text FROM pg_catalog.pg_database WHERE oid = $1";

/// What an I/O handle calls a relation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RelationKey {
    /// Tablespace.
    pub tablespace_oid: u32,
    /// Database; 0 for shared relations.
    pub database_oid: u32,
    /// Relfilenode.
    pub relfilenumber: u32,
    /// Whether the relation is a temporary one.
    pub is_temp: bool,
}

impl RelationKey {
    /// The relation that a fork is of.
    #[must_use]
    pub fn of(relation: &RelationFork) -> Self {
        Self {
            tablespace_oid: relation.tablespace_oid,
            database_oid: relation.database_oid,
            relfilenumber: relation.relfilenumber,
            is_temp: relation.temporary,
        }
    }
}

/// What people call a relation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelationName {
    /// Database; `None` for shared relations.
    pub database: Option<String>,
    /// Schema.
    pub schema: String,
    /// Name.
    pub name: String,
}

/// What the resolver sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NameAnswer {
    /// A relation's name.
    Known(RelationKey, RelationName),
    /// A relation that has no name, or none that can be found: it was dropped or rewritten, or its database
    /// lets nobody in.
    Unknown {
        /// The relation.
        key: RelationKey,
        /// Its database, when at least that is known.
        database: Option<String>,
    },
    /// What the user should know, in one sentence, once.
    Notice(String),
}

/// A thread that looks names up. Dropping it lets the thread try once more what is still open; then the
/// answers end.
#[derive(Debug)]
pub struct Resolver {
    requests: SyncSender<RelationKey>,
}

impl Resolver {
    /// Starts the thread; it connects when first asked.
    ///
    /// # Errors
    ///
    /// When the system gives no thread.
    pub fn spawn(connector: Connector, answers: UnboundedSender<NameAnswer>) -> io::Result<Self> {
        let (requests, asked) = mpsc::sync_channel(QUEUE_LENGTH);
        let work = move || Worker::new(connector, answers).run(&asked);
        thread::Builder::new().name("pg-names".to_owned()).spawn(work)?;
        Ok(Self { requests })
    }

    /// Asks for a name; each question is answered once. `false`: too many are waiting, or the thread has
    /// ended.
    #[must_use]
    pub fn ask(&self, key: RelationKey) -> bool {
        match self.requests.try_send(key) {
            Ok(()) => true,
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => false,
        }
    }
}

/// A question that is to be asked again.
struct Open {
    key: RelationKey,
    due: Instant,
    /// Attempts so far.
    attempts: usize,
}

/// A session on one database.
struct Session {
    client: Client,
    relation: Statement,
    temporary: Statement,
    used: Instant,
}

impl Session {
    fn open(connector: &Connector, database: Option<&str>) -> Result<Self, Failure> {
        let mut client = connector.connect(database).map_err(Failure::Connect)?;
        let relation = client.prepare(RELATION).map_err(Failure::Query)?;
        let temporary = client.prepare(TEMPORARY_RELATION).map_err(Failure::Query)?;
        Ok(Self { client, relation, temporary, used: Instant::now() })
    }

    /// The relation, when there is exactly one.
    fn look_up(
        &mut self,
        key: &RelationKey,
        database: Option<&str>,
    ) -> Result<Option<RelationName>, Failure> {
        self.used = Instant::now();
        let statement = if key.is_temp { &self.temporary } else { &self.relation };
        let parameters = [&key.tablespace_oid as _, &key.relfilenumber as _];
        let rows = self.client.query(statement, &parameters).map_err(Failure::Query)?;
        let [row] = &rows[..] else { return Ok(None) };
        Ok(Some(RelationName {
            database: database.map(str::to_owned),
            schema: row.try_get(0).map_err(Failure::Query)?,
            name: row.try_get(1).map_err(Failure::Query)?,
        }))
    }
}

enum Failure {
    Connect(ConnectError),
    Query(postgres::Error),
}

impl Failure {
    fn is_transient(&self) -> bool {
        match self {
            Self::Connect(error) => error.is_transient(),
            Self::Query(_) => true,
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Connect(error) => error.to_string(),
            Self::Query(error) => innermost(error),
        }
    }
}

/// The thread's own state.
struct Worker {
    connector: Connector,
    answers: UnboundedSender<NameAnswer>,
    main: Option<Session>,
    sessions: HashMap<u32, Session>,
    databases: HashMap<u32, String>,
    /// Databases that do not let the role in.
    barred: HashSet<u32>,
    /// Whether none does.
    is_barred: bool,
    open: Vec<Open>,
    /// Set while the server is left alone.
    away_until: Option<Instant>,
    has_said_away: bool,
}

impl Worker {
    fn new(connector: Connector, answers: UnboundedSender<NameAnswer>) -> Self {
        Self {
            connector,
            answers,
            main: None,
            sessions: HashMap::new(),
            databases: HashMap::new(),
            barred: HashSet::new(),
            is_barred: false,
            open: Vec::new(),
            away_until: None,
            has_said_away: false,
        }
    }

    /// Works until nobody asks any more.
    fn run(&mut self, asked: &mpsc::Receiver<RelationKey>) {
        while !self.answers.is_closed() {
            match asked.recv_timeout(self.until_next_work()) {
                Ok(key) => self.open.push(Open { key, due: Instant::now(), attempts: 0 }),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return self.finish(),
            }
            self.work_off();
            self.close_idle();
        }
    }

    fn until_next_work(&self) -> Duration {
        let due = self.open.iter().map(|open| open.due).min();
        let due = due.map(|due| self.away_until.map_or(due, |until| until.max(due)));
        let idle = self.sessions.values().map(|session| session.used + IDLE_TIMEOUT).min();
        let next = due.into_iter().chain(idle).min();
        next.map_or(IDLE_TIMEOUT, |next| next.saturating_duration_since(Instant::now()))
    }

    /// Tries what is due.
    fn work_off(&mut self) {
        let now = Instant::now();
        let (due, later) = std::mem::take(&mut self.open).into_iter().partition(|open| open.due <= now);
        self.open = later;
        for open in due {
            if self.away_until.is_some_and(|until| until > Instant::now()) {
                self.open.push(open);
            } else {
                self.try_again(open);
            }
        }
    }

    fn try_again(&mut self, open: Open) {
        if self.lets_nobody_in(open.key.database_oid) {
            return self.give_up(open.key);
        }
        match self.resolve(&open.key) {
            Ok(Some(name)) => self.answer(NameAnswer::Known(open.key, name)),
            Ok(None) => match RETRY_INTERVALS.get(open.attempts) {
                Some(interval) => {
                    let due = Instant::now() + *interval;
                    self.open.push(Open { due, attempts: open.attempts + 1, ..open });
                }
                None => self.give_up(open.key),
            },
            Err(failure) => {
                self.fail(&open.key, &failure);
                // Not an attempt: the server was not asked.
                self.open.push(open);
            }
        }
    }

    /// Tries everything once more, for the last time.
    fn finish(&mut self) {
        // Who was away a moment ago, as a server is that recovers, may be back; the first failure tells.
        self.away_until = None;
        for open in std::mem::take(&mut self.open) {
            let is_away = self.away_until.is_some_and(|until| until > Instant::now());
            match (!is_away).then(|| self.resolve(&open.key)) {
                Some(Ok(Some(name))) => self.answer(NameAnswer::Known(open.key, name)),
                Some(Err(failure)) => {
                    self.fail(&open.key, &failure);
                    self.give_up(open.key);
                }
                Some(Ok(None)) | None => self.give_up(open.key),
            }
        }
    }

    fn fail(&mut self, key: &RelationKey, failure: &Failure) {
        if failure.is_transient() {
            self.away(failure);
        } else {
            self.bar(key.database_oid, failure);
        }
    }

    fn resolve(&mut self, key: &RelationKey) -> Result<Option<RelationName>, Failure> {
        if self.lets_nobody_in(key.database_oid) {
            return Ok(None);
        }
        let mut found = self.resolve_once(key);
        if matches!(found, Err(Failure::Query(_))) {
            // A session may have died long ago, when the server crashed: what fails on a new one is news.
            self.main = None;
            self.sessions.clear();
            found = self.resolve_once(key);
        }
        if found.is_ok() {
            self.away_until = None;
        }
        found
    }

    fn resolve_once(&mut self, key: &RelationKey) -> Result<Option<RelationName>, Failure> {
        if key.database_oid == 0 {
            return self.main()?.look_up(key, None);
        }
        let Some(database) = self.database(key.database_oid)? else { return Ok(None) };
        if !self.sessions.contains_key(&key.database_oid) {
            self.make_room();
            let session = Session::open(&self.connector, Some(&database))?;
            self.sessions.insert(key.database_oid, session);
        }
        let session = self.sessions.get_mut(&key.database_oid);
        session.map_or(Ok(None), |session| session.look_up(key, Some(&database)))
    }

    /// Closes the session that has not been used for longest, when there is no room for another.
    fn make_room(&mut self) {
        if self.sessions.len() >= MAX_SESSIONS {
            let oldest = self.sessions.iter().min_by_key(|(_, session)| session.used).map(|(oid, _)| *oid);
            oldest.and_then(|oid| self.sessions.remove(&oid));
        }
    }

    fn main(&mut self) -> Result<&mut Session, Failure> {
        let session = match self.main.take() {
            Some(session) => session,
            None => Session::open(&self.connector, None)?,
        };
        Ok(self.main.insert(session))
    }

    /// Name of a database; it is asked for once, so that a database that is renamed keeps its old name in one
    /// trace.
    fn database(&mut self, oid: u32) -> Result<Option<String>, Failure> {
        if let Some(name) = self.databases.get(&oid) {
            return Ok(Some(name.clone()));
        }
        let row = self.main()?.client.query_opt(DATABASE, &[&oid]).map_err(Failure::Query)?;
        let Some(row) = row else { return Ok(None) };
        let name: String = row.try_get(0).map_err(Failure::Query)?;
        self.databases.insert(oid, name.clone());
        Ok(Some(name))
    }

    /// Leaves a server alone for a while that could not be asked, and says so the first time.
    fn away(&mut self, failure: &Failure) {
        self.away_until = Some(Instant::now() + AWAY_INTERVAL);
        if !self.has_said_away {
            self.has_said_away = true;
            let why = failure.text();
            self.answer(NameAnswer::Notice(format!("looking up relation names failed, trying again: {why}")));
        }
    }

    fn lets_nobody_in(&self, database_oid: u32) -> bool {
        self.is_barred || self.barred.contains(&database_oid)
    }

    /// Asks no more about a database, or about any, and says so.
    fn bar(&mut self, database_oid: u32, failure: &Failure) {
        let why = failure.text();
        // Its name is known only through the session that serves all databases: without a name, that one
        // failed.
        let notice = match self.databases.get(&database_oid) {
            Some(name) => format!("relation names of database \"{name}\" are missing: {why}"),
            None => format!("relation names are missing: {why}"),
        };
        self.is_barred = !self.databases.contains_key(&database_oid);
        self.barred.insert(database_oid);
        self.answer(NameAnswer::Notice(notice));
    }

    fn give_up(&self, key: RelationKey) {
        let database = self.databases.get(&key.database_oid).cloned();
        self.answer(NameAnswer::Unknown { key, database });
    }

    fn answer(&self, answer: NameAnswer) {
        // Without a receiver the loop ends at its next turn.
        let _ = self.answers.send(answer);
    }

    fn close_idle(&mut self) {
        self.sessions.retain(|_, session| session.used.elapsed() < IDLE_TIMEOUT);
    }
}
