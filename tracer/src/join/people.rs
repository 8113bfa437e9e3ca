//! Who the processes of the server are.

use std::collections::HashMap;

use crate::{
    capture::sampler::ActivityRow,
    model::aggregate::Incarnation,
    server::{InnerPid, Pid, discover::ProcessInfo, own_sessions::Serves},
};

/// All that is known of one process.
#[derive(Debug, Clone, Default)]
pub struct Person {
    /// PID in the server's namespace.
    pub inner_pid: Option<InnerPid>,
    /// Number of an io worker.
    pub io_worker: Option<u32>,
    /// Leader of the parallel group, as its title says.
    pub title_leader: Option<InnerPid>,
    /// Whom it serves.
    pub serves: Serves,
    /// Its row of `pg_stat_activity`, the newest that was sampled.
    pub activity: Option<ActivityRow>,
    /// What its title says it is, for want of such a row.
    pub title_type: Option<String>,
}

impl Person {
    /// Leader of the parallel group, where this is a parallel worker. The title tells it also of one that came and went
    /// between two samples.
    pub fn leader(&self) -> Option<InnerPid> {
        self.activity.as_ref().and_then(|row| row.leader).or(self.title_leader)
    }

    /// What the server calls its type; `None` when that is not known.
    pub fn backend_type(&self) -> Option<&str> {
        let in_view = self.activity.as_ref().and_then(|row| row.backend_type.as_deref());
        in_view.or(self.title_type.as_deref())
    }

    /// With `update_process_title` off the title has no number, and may be all that is known.
    fn is_io_worker(&self) -> bool {
        self.backend_type() == Some(IO_WORKER)
    }
}

/// What PostgreSQL calls them, in titles and in `pg_stat_activity.backend_type`.
const IO_WORKER: &str = "io worker";
/// How the title of a parallel worker begins; behind it stands its leader's PID.
const PARALLEL_WORKER: &str = "parallel worker for PID ";

/// Processes by PID; one that ended is told from a later one of its PID.
#[derive(Debug, Default)]
pub struct People {
    ended: HashMap<Pid, u32>,
    known: HashMap<Incarnation, Person>,
    by_inner: HashMap<InnerPid, Pid>,
    /// Rows of processes that were not introduced yet.
    unclaimed: HashMap<InnerPid, ActivityRow>,
}

impl People {
    /// The process that has a PID now.
    #[must_use]
    pub fn current(&self, pid: Pid) -> Incarnation {
        Incarnation { pid, number: self.ended.get(&pid).copied().unwrap_or(0) }
    }

    /// What is known of a process.
    #[must_use]
    pub fn get(&self, incarnation: Incarnation) -> Option<&Person> {
        self.known.get(&incarnation)
    }

    /// The process of a PID of the server's namespace.
    #[must_use]
    pub fn outer(&self, inner: InnerPid) -> Option<Pid> {
        self.by_inner.get(&inner).copied()
    }

    /// The PID in the server's namespace.
    #[must_use]
    pub fn inner(&self, pid: Pid) -> Option<InnerPid> {
        self.get(self.current(pid))?.inner_pid
    }

    /// Whether a process is an io worker; `None` when nothing is known of it.
    #[must_use]
    pub fn is_io_worker(&self, pid: Pid) -> Option<bool> {
        self.get(self.current(pid)).map(Person::is_io_worker)
    }

    /// All io workers that were seen, with their numbers where those are known.
    pub fn io_workers(&self) -> impl Iterator<Item = (Pid, Option<u32>)> {
        let workers = self.known.iter().filter(|(_, person)| person.is_io_worker());
        workers.map(|(incarnation, person)| (incarnation.pid, person.io_worker))
    }

    /// Takes in who a process is.
    pub fn introduce(&mut self, process: &ProcessInfo, serves: Serves) {
        let incarnation = self.current(process.pid);
        self.by_inner.insert(process.inner_pid, process.pid);
        let person = self.known.entry(incarnation).or_default();
        person.inner_pid = Some(process.inner_pid);
        person.serves = serves;
        person.io_worker = io_worker_number(&process.title);
        person.title_type = type_of_title(&process.title);
        person.title_leader = leader_of_title(&process.title);
        if let Some(row) = self.unclaimed.remove(&process.inner_pid) {
            person.activity = Some(row);
        }
    }

    /// Whom the undecided processes serve.
    pub fn decide_own(&mut self, own: &[InnerPid]) {
        for person in self.known.values_mut().filter(|person| person.serves == Serves::Undecided) {
            let is_own = person.inner_pid.is_some_and(|pid| own.contains(&pid));
            person.serves = if is_own { Serves::Tracer } else { Serves::Others };
        }
    }

    /// Whom a process serves.
    #[must_use]
    pub fn serves(&self, incarnation: Incarnation) -> Serves {
        self.get(incarnation).map(|person| person.serves).unwrap_or_default()
    }

    /// A process ended: what is known of it stays, and its PID is free.
    pub fn leave(&mut self, pid: Pid) {
        if let Some(inner) = self.inner(pid) {
            self.by_inner.remove(&inner);
            self.unclaimed.remove(&inner);
        }
        *self.ended.entry(pid).or_default() += 1;
    }

    /// Forgets a process that ended, and says who it was.
    pub fn forget(&mut self, incarnation: Incarnation) -> Option<Person> {
        self.known.remove(&incarnation)
    }

    /// Begins to take in a sample of `pg_stat_activity`. Rows of the one before whose process was never introduced are
    /// forgotten: their PIDs may be others' by now.
    pub fn begin_sample(&mut self) {
        self.unclaimed.clear();
    }

    /// Takes in a row of `pg_stat_activity`.
    pub fn name(&mut self, row: ActivityRow) {
        let known = self.outer(row.pid).map(|pid| self.current(pid));
        match known.and_then(|incarnation| self.known.get_mut(&incarnation)) {
            Some(person) => person.activity = Some(row),
            None => {
                self.unclaimed.insert(row.pid, row);
            }
        }
    }
}

/// The number in a title `postgres: [cluster: ]io worker N`.
fn io_worker_number(title: &str) -> Option<u32> {
    let number = last_part(title)?.strip_prefix(IO_WORKER)?;
    number.trim().parse().ok()
}

/// What a title says behind the server's and the cluster's name.
fn last_part(title: &str) -> Option<&str> {
    title.trim_end().strip_prefix("postgres: ")?.rsplit(": ").next()
}

/// The leader in a title `postgres: [cluster: ]parallel worker for PID N` (`InitializeParallelDSM`,
/// `src/backend/access/transam/parallel.c`, names the worker so).
fn leader_of_title(title: &str) -> Option<InnerPid> {
    last_part(title)?.strip_prefix(PARALLEL_WORKER)?.trim().parse().ok().map(InnerPid)
}

/// The type of a process, from a title such as `postgres: checkpointer`. Titles of sessions name user and database in one
/// string that cannot be taken apart for sure, but they do name a client.
fn type_of_title(title: &str) -> Option<String> {
    const TYPES: [&str; 11] = [
        "archiver",
        "autovacuum launcher",
        "autovacuum worker",
        "background writer",
        "checkpointer",
        "logger",
        "logical replication launcher",
        "startup",
        "walreceiver",
        "walsender",
        "walwriter",
    ];
    let last = last_part(title)?;
    if last.starts_with(PARALLEL_WORKER) {
        return Some("parallel worker".to_owned());
    }
    if last == IO_WORKER || io_worker_number(title).is_some() {
        return Some(IO_WORKER.to_owned());
    }
    let found = TYPES.iter().find(|kind| last.starts_with(**kind)).copied();
    found.or_else(|| is_of_client(last).then_some("client backend")).map(str::to_owned)
}

/// Whether a title names a client, as `[local]` or `ADDRESS(PORT)`: only sessions do (`BackendInitialize`,
/// `src/backend/tcop/backend_startup.c`).
fn is_of_client(title: &str) -> bool {
    title.split(' ').any(|word| {
        let port = word.strip_suffix(')').and_then(|word| word.rsplit_once('('));
        word == "[local]" || port.is_some_and(|(_, port)| port.parse::<u16>().is_ok())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, inner: u32, title: &str) -> ProcessInfo {
        ProcessInfo { pid: Pid(pid), inner_pid: InnerPid(inner), title: title.to_owned() }
    }

    fn row(pid: u32, user: &str) -> ActivityRow {
        ActivityRow {
            backend_type: Some("client backend".to_owned()),
            database_oid: Some(5),
            database: Some("shop".to_owned()),
            user: Some(user.to_owned()),
            ..ActivityRow::of(InnerPid(pid))
        }
    }

    #[test]
    fn an_io_worker_is_known_by_its_title() {
        assert_eq!(io_worker_number("postgres: io worker 2"), Some(2));
        assert_eq!(io_worker_number("postgres: 18/main: io worker 11 "), Some(11));
        assert_eq!(io_worker_number("postgres: alice io worker 2"), None);
        assert_eq!(io_worker_number("postgres: alice shop [local] SELECT"), None);
        assert_eq!(type_of_title("postgres: 18/main: checkpointer ").as_deref(), Some("checkpointer"));
        for client in ["[local]", "127.0.0.1(5123)", "::1(5123)"] {
            let title = format!("postgres: main: alice shop {client} SELECT");
            assert_eq!(type_of_title(&title).as_deref(), Some("client backend"), "{title}");
        }
        assert_eq!(
            type_of_title("postgres: walsender bob 127.0.0.1(5123) idle").as_deref(),
            Some("walsender")
        );
        assert_eq!(type_of_title("postgres: some extension's (first) worker "), None);
        assert_eq!(leader_of_title("postgres: main: parallel worker for PID 42 "), Some(InnerPid(42)));
        assert_eq!(leader_of_title("postgres: io worker 2"), None);
        assert_eq!(
            type_of_title("postgres: io worker").as_deref(),
            Some("io worker"),
            "no update_process_title"
        );
    }

    #[test]
    fn rows_name_the_process_by_its_inner_pid_whichever_comes_first() {
        let mut people = People::default();
        people.name(row(7, "alice"));
        people.introduce(&process(1007, 7, "postgres: alice shop [local] idle"), Serves::Others);
        people.introduce(&process(1008, 8, "postgres: bob shop [local] idle"), Serves::Others);
        people.name(row(8, "bob"));
        for (pid, user) in [(1007, "alice"), (1008, "bob")] {
            let person = people.get(people.current(Pid(pid))).expect("introduced");
            assert_eq!(person.activity.as_ref().and_then(|row| row.user.as_deref()), Some(user));
        }
    }

    #[test]
    fn a_reused_pid_is_another_process() {
        let mut people = People::default();
        people.introduce(&process(1007, 7, "postgres: alice shop [local] idle"), Serves::Others);
        people.name(row(7, "alice"));
        let first = people.current(Pid(1007));
        people.leave(Pid(1007));
        let second = people.current(Pid(1007));
        assert_ne!(first, second);
        assert!(people.get(first).is_some_and(|person| person.activity.is_some()));
        assert!(people.get(second).is_none());
    }
}
