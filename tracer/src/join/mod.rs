//! Join: events become attributed reads, and these the report. Pure: no I/O, so it is tested with made-up events.

mod activity;
mod blocks;
mod claims;
mod ended;
mod executions;
mod exposure;
mod filter;
mod groups;
mod parts;
mod people;
mod pg_stats;
mod queries;
mod reads;
mod report;
mod sessions;
mod stages;
mod sums;
#[cfg(test)]
mod tests;
mod uses;
mod waits;
mod wakeups;

use std::collections::{HashMap, VecDeque};

use pgiotrace_ebpf::{Execution, FileId, WaitRecord};

use crate::{
    capture::{
        Ending, Event, SeenRead,
        names::{NameAnswer, RelationKey, RelationName},
        sampler::{ActivityRow, AioState, ExecutionRow, PgSample, Taken},
    },
    cli::Filter,
    model::{
        StatReport, Window,
        aggregate::{Aggregate, FidelityCounts, Incarnation},
        io::{Io, QueryOf, Subject, Timing},
    },
    server::{Pid, aio::FIRST_AIO_MAJOR, discover::Server, facts::ServerFacts, own_sessions::Serves},
};
use blocks::Blocks;
use claims::Claims;
use ended::Ended;
use executions::{Executions, Seen};
use exposure::Exposures;
pub use groups::Sums;
use people::People;
use pg_stats::PgStats;
use queries::Queries;
use sessions::Sessions;
use uses::Uses;
use waits::{Awaiting, WaitKey, Waits};
use wakeups::Wakeups;

/// Reads whose owner is still looked for; beyond it, the oldest is given up.
const MOST_WAITING: usize = 100_000;
/// Reads whose names are awaited for a filter; beyond it, those that still are not known are left out.
const MOST_DEFERRED: usize = 200_000;

/// Files whose subject is remembered.
const MOST_FILES: usize = 65_536;

/// What `pg_filenode_relation` and `pg_database` say of a relation.
#[derive(Debug, Clone, Default)]
struct Name {
    database: Option<String>,
    relation: Option<RelationName>,
}

/// Reads by how they ended.
#[derive(Debug, Clone, Copy, Default)]
struct Ends {
    completed: u64,
    failed: u64,
    short: u64,
    bytes: u64,
    blocks: u64,
    beyond_range: u64,
    impossible: u64,
}

/// Whether samples come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sampling {
    /// The server is not asked.
    Never,
    /// It is asked.
    Expected,
    /// It is asked, and does not answer at present.
    Away,
}

/// The join, as it grows.
pub struct Join {
    server: Server,
    filter: Filter,
    facts: Option<ServerFacts>,
    people: People,
    names: HashMap<RelationKey, Name>,
    uses: Uses,
    claims: Claims,
    blocks: Blocks,
    exposures: Exposures,
    executions: Executions,
    queries: Queries,
    sessions: Sessions,
    waits: Waits,
    sampling: Sampling,
    /// Reads whose owners may still wait for them; `None` where nobody tells what for.
    wakeups: Option<Wakeups>,
    /// What each file is that was read.
    files: HashMap<FileId, Subject>,
    /// Whether rows of `pg_aios` are to be expected.
    expects_aios: bool,
    aggregate: Aggregate,
    fidelity: FidelityCounts,
    ends: Ends,
    ended: Ended,
    pg_stats: PgStats,
    /// Reads without an owner, until the samples around them are in.
    waiting: VecDeque<(SeenRead, Timing)>,
    /// Reads of which it is not known yet whether the filter takes them.
    deferred: VecDeque<(Io, Option<Incarnation>)>,
    /// Processes that ended while some of their reads were deferred.
    unfolded: Vec<Incarnation>,
    /// Reads that the tracer's own sessions wanted: in no table.
    own_reads: u64,
    /// Reads that passed the filter.
    passed: u64,
    is_stopped: bool,
    notes: Vec<String>,
}

impl Join {
    /// Nothing has happened yet. `is_sampled`: the server is asked for samples.
    #[must_use]
    pub fn new(server: Server, filter: Filter, is_sampled: bool) -> Self {
        let expects_aios = is_sampled && server.major >= FIRST_AIO_MAJOR;
        Self {
            server,
            filter,
            facts: None,
            people: People::default(),
            names: HashMap::new(),
            uses: Uses::default(),
            claims: Claims::default(),
            blocks: Blocks::default(),
            exposures: Exposures::default(),
            executions: Executions::default(),
            queries: Queries::default(),
            sessions: Sessions::default(),
            waits: Waits::default(),
            sampling: if is_sampled { Sampling::Expected } else { Sampling::Never },
            wakeups: None,
            files: HashMap::new(),
            expects_aios,
            aggregate: Aggregate::default(),
            fidelity: FidelityCounts::default(),
            ends: Ends::default(),
            ended: Ended::default(),
            pg_stats: PgStats::default(),
            waiting: VecDeque::new(),
            deferred: VecDeque::new(),
            unfolded: Vec::new(),
            own_reads: 0,
            passed: 0,
            is_stopped: false,
            notes: Vec::new(),
        }
    }

    /// Waits say what they are for, as with `--pg-probes`.
    #[must_use]
    pub fn with_wakeups(self) -> Self {
        Self { wakeups: Some(Wakeups::default()), ..self }
    }

    /// Whether the server has ended.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Takes one event in.
    pub fn take(&mut self, event: Event) {
        match event {
            Event::Read(read) => self.take_read(read),
            Event::Request(request) => self.blocks.add(&request),
            Event::Merge(merge) => self.blocks.add_merge(merge),
            Event::Wait(wait) => self.take_wait(&wait),
            Event::Clock { zero_us } => self.executions.set_clock(zero_us),
            Event::Process(process, serves) => self.people.introduce(&process, serves),
            Event::OwnSessions(own) => {
                self.people.decide_own(&own);
                self.settle_deferred(false);
            }
            Event::Left(pid) => {
                let incarnation = self.people.current(pid);
                self.let_go_of(incarnation);
                let left = self.executions.give_up(incarnation);
                self.book_settled(incarnation, left);
                self.fold_when_settled(incarnation);
                self.waits.leave(pid);
                self.people.leave(pid);
                self.end_process(incarnation);
            }
            Event::Sample(sample) => self.take_sample(sample),
            Event::Name(answer) => self.take_name(answer),
            Event::Restarted => {
                self.give_up_waiting();
                self.uses.forget();
                self.claims.forget();
                self.note(
                    "the server crashed and restarted during the trace; its reads are traced on".to_owned(),
                );
            }
            Event::Stopped => {
                self.is_stopped = true;
                self.note("the server stopped during the trace".to_owned());
            }
            Event::Note(note) => self.note(note),
        }
    }

    /// A process of the cluster waited. It executed one and the same thing all the time.
    fn take_wait(&mut self, wait: &WaitRecord) {
        let owner = self.people.current(Pid(wait.tgid));
        // Before: a wait counts for the reads that are known.
        self.book_woken(owner, wait);
        let Execution { started_us, query_id } = wait.execution;
        let query_id = (query_id != 0).then_some(query_id);
        if started_us != 0 {
            self.see(owner, Seen { at_ns: wait.end_ns, started_us, query_id, text: None });
        }
        self.waits.wait(wait);
        let growth = self.exposures.entry(owner).wait(wait);
        self.executions.add_exposure(owner, QueryOf { started_us, query_id, ..QueryOf::default() }, growth);
    }

    /// A process is seen to execute something.
    fn see(&mut self, process: Incarnation, seen: Seen) {
        let settled = self.executions.see(process, seen);
        self.book_settled(process, settled);
    }

    /// What the sessions of a sample execute, and what they wait for.
    fn see_rows(&mut self, taken: Taken, rows: &[ActivityRow]) {
        for row in rows {
            let Some(process) = self.people.outer(row.pid).map(|pid| self.people.current(pid)) else {
                continue;
            };
            if self.people.serves(process) != Serves::Others {
                continue;
            }
            self.sessions.add(process, row);
            if let Some(ExecutionRow { started_us, query_id, ref text }) = row.execution {
                if let (Some(query_id), Some(text)) = (query_id, text) {
                    self.queries.learn(query_id, text);
                }
                let seen = Seen { at_ns: taken.from_ns, started_us, query_id, text: text.as_ref() };
                self.see(process, seen);
            }
            let event = row.wait.as_ref().and_then(|event| Some((event, Awaiting::of(event)?)));
            if let Some((event, awaiting)) = event {
                let execution = row.execution.as_ref();
                let query_id = execution.and_then(|execution| execution.query_id);
                let text = execution.and_then(|execution| execution.text.clone());
                let query = text.filter(|_| query_id.is_none());
                let key = WaitKey { process, event: event.clone(), query_id, query };
                self.waits.sampled(key, awaiting, taken);
            }
        }
    }

    fn take_sample(&mut self, sample: PgSample) {
        match sample {
            PgSample::Facts(facts) => self.facts = Some(*facts),
            PgSample::Limited(note) => self.note(note),
            PgSample::Unavailable(note) => {
                self.sampling = Sampling::Away;
                self.note(note);
            }
            PgSample::Back => self.sampling = Sampling::Expected,
            PgSample::Statistics(statistics) => self.pg_stats.look(*statistics, &self.people),
            PgSample::Activity { taken, rows } => {
                self.see_rows(taken, &rows);
                self.people.begin_sample();
                for row in rows {
                    self.people.name(row);
                }
                self.settle_deferred(false);
            }
            PgSample::Statements(texts) => self.queries.learn_normalised(texts),
            PgSample::Aios { taken, mut rows } => {
                // In this state a row may carry the generation of the handle's next use already: `pgaio_io_reclaim`
                // (`src/backend/storage/aio/aio.c`) advances it before it leaves the state, and `pg_get_aios` notices
                // only changes.
                rows.retain(|row| row.state != AioState::CompletedLocal);
                self.uses.add_rows(taken, &rows);
                self.claims.add_sample(taken, &rows, self.segment_blocks());
                self.settle_waiting();
            }
        }
    }

    fn take_name(&mut self, answer: NameAnswer) {
        match answer {
            NameAnswer::Known(key, name) => {
                let name = Name { database: name.database.clone(), relation: Some(name) };
                self.names.insert(key, name);
            }
            NameAnswer::Unknown { key, database } => {
                self.names.insert(key, Name { database, relation: None });
            }
            NameAnswer::Notice(note) => self.note(note),
        }
        self.settle_deferred(false);
    }

    /// Keeps a sentence for the report, once: of two of which one only adds what it costs ("relation names are missing:
    /// …"), that one.
    fn note(&mut self, note: String) {
        let says_the_same = |known: &&mut String| known.ends_with(&note) || note.ends_with(known.as_str());
        match self.notes.iter_mut().find(says_the_same) {
            Some(known) if note.len() > known.len() => *known = note,
            Some(_) => {}
            None => self.notes.push(note),
        }
    }

    /// Sentences for the report so far.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The report.
    #[must_use]
    pub fn report(mut self, window: Window, attach_ms: f64, ending: &Ending) -> StatReport {
        self.settle(ending);
        report::build(self, window, attach_ms, ending)
    }

    /// The report, with the sums over all reads that passed the filter, and over those of each group of relations.
    #[must_use]
    pub fn report_with_sums(
        mut self,
        window: Window,
        attach_ms: f64,
        ending: &Ending,
        groups: &[Vec<RelationKey>],
    ) -> (StatReport, Sums) {
        self.settle(ending);
        let sums = groups::sums(&self, ending, groups);
        (report::build(self, window, attach_ms, ending), sums)
    }

    /// Decides what was still open.
    fn settle(&mut self, ending: &Ending) {
        self.give_up_waiting();
        for record in &ending.totals.waiting {
            self.take_wait(record);
        }
        self.let_go_of_all();
        for process in self.executions.processes() {
            let left = self.executions.give_up(process);
            self.book_settled(process, left);
        }
        self.settle_deferred(true);
        for owner in self.exposures.owners() {
            self.settle_exposure(owner);
        }
    }
}
