//! Join: events become attributed reads, and these the report. Pure: no I/O, so it is tested with made-up events.

mod blocks;
mod claims;
mod ended;
mod exposure;
mod filter;
mod groups;
mod parts;
mod people;
mod reads;
mod report;
mod stages;
mod sums;
#[cfg(test)]
mod tests;
mod uses;
mod wakeups;

use std::collections::{HashMap, VecDeque};

use pgiotrace_ebpf::FileId;

use crate::{
    capture::{
        Ending, Event, SeenRead,
        names::{NameAnswer, RelationKey, RelationName},
        sampler::{AioState, PgSample},
    },
    cli::Filter,
    model::{
        StatReport, Window,
        aggregate::{Aggregate, FidelityCounts, Incarnation},
        io::{Io, Subject, Timing},
    },
    server::{Pid, aio::FIRST_AIO_MAJOR, discover::Server, facts::ServerFacts},
};
use blocks::Blocks;
use claims::Claims;
use ended::Ended;
use exposure::Exposures;
pub use groups::Sums;
use people::People;
use uses::Uses;
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
    /// Reads without an owner, until the samples around them are in.
    waiting: VecDeque<(SeenRead, Timing)>,
    /// Reads of which it is not known yet whether the filter takes them.
    deferred: VecDeque<(Io, Option<Incarnation>)>,
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
            wakeups: None,
            files: HashMap::new(),
            expects_aios,
            aggregate: Aggregate::default(),
            fidelity: FidelityCounts::default(),
            ends: Ends::default(),
            ended: Ended::default(),
            waiting: VecDeque::new(),
            deferred: VecDeque::new(),
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
            Event::Wait(wait) => {
                let owner = self.people.current(Pid(wait.tgid));
                // Before: a wait counts for the reads that are known.
                self.book_woken(owner, &wait);
                self.exposures.entry(owner).wait(&wait);
            }
            Event::Process(process) => self.people.introduce(&process),
            Event::Left(pid) => {
                let incarnation = self.people.current(pid);
                self.let_go_of(incarnation);
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

    fn take_sample(&mut self, sample: PgSample) {
        match sample {
            PgSample::Facts(facts) => self.facts = Some(*facts),
            PgSample::Limited(note) | PgSample::Unavailable(note) => self.note(note),
            PgSample::Back => {}
            PgSample::Activity { rows, .. } => {
                self.people.begin_sample();
                for row in rows {
                    self.people.name(row);
                }
                self.settle_deferred(false);
            }
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
        self.let_go_of_all();
        self.settle_deferred(true);
        for record in &ending.totals.waiting {
            let owner = self.people.current(Pid(record.tgid));
            self.exposures.entry(owner).wait(record);
        }
        for owner in self.exposures.owners() {
            self.settle_exposure(owner);
        }
    }
}
