//! Which query wanted each read.
//!
//! A process says in shared memory what it executes, and since when. The kernel side reads that when the process begins a
//! read or a wait of its own, and the samples of `pg_stat_activity` show it, too: each is a sighting of one execution at one
//! moment. A read that the owner began itself carries its own. One that an io worker began for it waits for the owner's next
//! sighting: if that is of an execution which had begun before the read, the read is of this execution for certain.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::exposure::ExposureGrowth;
use crate::model::{
    aggregate::{Incarnation, IoTotals},
    io::{Certainty, Io, QueryOf, Sighting},
};

/// Executions of each process that are kept one by one, so that a sample that comes late still names them.
const KEPT: usize = 16;
/// Reads of a process whose execution is still looked for; beyond it, the oldest is settled with what is known.
const MOST_PENDING: usize = 4096;

/// One execution of a query.
#[derive(Debug, Clone)]
pub(super) struct Run {
    /// `query_start`, microseconds since 2000-01-01.
    pub started_us: i64,
    /// `None` where it is not computed, or not yet.
    pub query_id: Option<i64>,
    /// The query, where a sample showed it.
    pub text: Option<Arc<str>>,
    /// When it was seen last, `CLOCK_MONOTONIC` nanoseconds.
    seen_ns: u64,
    /// Its reads, and those of its parallel workers.
    pub reads: QueryReads,
}

impl Run {
    fn key(&self) -> (i64, Option<i64>) {
        (self.started_us, self.query_id)
    }

    /// Whether it may be this one: statements of one message begin at the same moment, and differ by their identifiers.
    fn is(&self, started_us: i64, query_id: Option<i64>) -> bool {
        let is_other = query_id.is_some() && self.query_id.is_some() && query_id != self.query_id;
        self.started_us == started_us && !is_other
    }

    fn new(started_us: i64) -> Self {
        Self { started_us, query_id: None, text: None, seen_ns: 0, reads: QueryReads::default() }
    }
}

/// Reads of a query, or of one execution.
#[derive(Debug, Clone, Default)]
pub(super) struct QueryReads {
    pub io: IoTotals,
    pub certain: u64,
    pub probable: u64,
    /// Time in which its process was blocked by reading, and in which a read of its own was in flight, nanoseconds.
    pub exposure: ExposureGrowth,
}

impl QueryReads {
    fn add(&mut self, io: &Io) {
        self.io.add(io);
        match io.query.certainty {
            Certainty::Certain => self.certain += 1,
            Certainty::Probable => self.probable += 1,
            Certainty::Unknown => {}
        }
    }

    pub fn merge(&mut self, other: &Self) {
        self.io.merge(&other.io);
        self.certain += other.certain;
        self.probable += other.probable;
        self.exposure.add(other.exposure);
    }
}

/// One process.
#[derive(Debug, Default)]
struct Process {
    /// Newest last.
    runs: VecDeque<Run>,
    /// In the order in which they ended.
    pending: VecDeque<Io>,
    /// Reads of no execution.
    no_query: QueryReads,
    /// Reads of an execution that is not known.
    unknown: QueryReads,
    /// Executions that were seen.
    executions: u64,
}

impl Process {
    fn run(&self, started_us: i64, query_id: Option<i64>) -> Option<&Run> {
        self.runs.iter().rev().find(|run| run.is(started_us, query_id))
    }

    fn run_mut(&mut self, started_us: i64, query_id: Option<i64>) -> Option<&mut Run> {
        self.runs.iter_mut().rev().find(|run| run.is(started_us, query_id))
    }

    /// The pending reads that a sighting settles: all that began before it. `since_ns`: when the execution began, by the kernel's clock.
    fn settle(&mut self, seen: &Seen, since_ns: Option<u64>) -> Vec<Io> {
        let Seen { at_ns, started_us, query_id, .. } = *seen;
        let known = self.run(started_us, query_id);
        // Another statement of the same message began at the same moment, and nobody knows when this one did.
        let is_alone =
            self.runs.iter().all(|run| run.started_us != started_us || run.is(started_us, query_id));
        let seen_before_ns = known.map(|run| run.seen_ns).filter(|seen| *seen > 0);
        let before = self.runs.iter().rev().find(|run| !run.is(started_us, query_id)).map(Run::key);
        let mut settled = Vec::new();
        for mut io in std::mem::take(&mut self.pending) {
            let begin = io.timing.execution_start_ns();
            if begin > at_ns {
                self.pending.push_back(io);
                continue;
            }
            let is_of_it = (is_alone && since_ns.is_some_and(|start| start <= begin))
                || seen_before_ns.is_some_and(|seen| seen <= begin);
            io.query = if is_of_it {
                QueryOf { started_us, query_id, certainty: Certainty::Certain }
            } else {
                QueryOf::probably(before)
            };
            settled.push(io);
        }
        settled
    }

    /// Executions that read nothing are remembered for samples that come late, and no longer.
    fn forget_what_read_nothing(&mut self) {
        while self.runs.len() > 2 * KEPT
            && let Some(place) = self.runs.iter().position(|run| run.reads.io.reads == 0)
        {
            self.runs.remove(place);
        }
    }

    /// Settles a pending read with what is known: the execution that was seen last.
    fn give_up_oldest(&mut self) -> Option<Io> {
        let mut io = self.pending.pop_front()?;
        io.query = QueryOf::probably(self.runs.back().map(Run::key));
        Some(io)
    }
}

/// What a process is seen to execute.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seen<'a> {
    /// When, `CLOCK_MONOTONIC` nanoseconds.
    pub at_ns: u64,
    /// `query_start`, microseconds since 2000-01-01.
    pub started_us: i64,
    pub query_id: Option<i64>,
    pub text: Option<&'a Arc<str>>,
}

/// What a process left behind.
#[derive(Debug, Default)]
pub(super) struct EndedProcess {
    pub runs: Vec<Run>,
    /// Reads of no execution.
    pub no_query: QueryReads,
    /// Reads of an execution that is not known.
    pub unknown: QueryReads,
}

/// What all processes execute and executed.
#[derive(Debug, Default)]
pub(super) struct Executions {
    /// The server's clock (microseconds since 2000-01-01) at `CLOCK_MONOTONIC` 0; `None` until it is known.
    zero_us: Option<i64>,
    processes: HashMap<Incarnation, Process>,
}

impl Executions {
    /// The server's clock when `CLOCK_MONOTONIC` was 0.
    pub fn set_clock(&mut self, zero_us: i64) {
        self.zero_us = Some(zero_us);
    }

    /// A read has ended. Returns the reads of this process that are settled now.
    pub fn read(&mut self, owner: Incarnation, mut io: Io) -> Vec<Io> {
        match io.sighting {
            Sighting::Query { started_us, query_id } => {
                // Until its end its owner did nothing else.
                let at_ns = io.timing.execution_end_ns();
                let mut settled = self.see(owner, Seen { at_ns, started_us, query_id, text: None });
                let run = self.processes.get(&owner).and_then(|process| process.run(started_us, query_id));
                // Between two statements of one message the identifier is unknown: it may be either's.
                let is_between = query_id.is_none() && run.is_some_and(|run| run.query_id.is_some());
                let certainty = if is_between { Certainty::Probable } else { Certainty::Certain };
                let query_id = query_id.or_else(|| run.and_then(|run| run.query_id));
                io.query = QueryOf { started_us, query_id, certainty };
                settled.push(io);
                settled
            }
            Sighting::NoQuery | Sighting::Abandoned => vec![io],
            Sighting::None => {
                let process = self.processes.entry(owner).or_default();
                process.pending.push_back(io);
                let is_too_much = process.pending.len() > MOST_PENDING;
                is_too_much.then(|| process.give_up_oldest()).flatten().into_iter().collect()
            }
        }
    }

    /// A process is seen to execute something. Returns its reads that are settled by that.
    pub fn see(&mut self, process: Incarnation, seen: Seen) -> Vec<Io> {
        let Seen { at_ns, started_us, query_id, text } = seen;
        let since_ns =
            self.zero_us.and_then(|zero| u64::try_from(started_us - zero).ok()).map(|us| us * 1000);
        let process = self.processes.entry(process).or_default();
        let newest = process.runs.back();
        // A sample may come after what began later; it settles nothing, but names what it shows.
        let is_current = newest.is_none_or(|newest| newest.started_us <= started_us);
        let settled = if is_current { process.settle(&seen, since_ns) } else { Vec::new() };
        if is_current && process.run(started_us, query_id).is_none() {
            process.runs.push_back(Run::new(started_us));
            process.executions += 1;
            process.forget_what_read_nothing();
        }
        if let Some(run) = process.run_mut(started_us, query_id) {
            run.seen_ns = run.seen_ns.max(at_ns);
            run.query_id = query_id.or(run.query_id);
            run.text = text.cloned().or_else(|| run.text.take());
        }
        settled
    }

    /// Books a settled read. Returns an execution that is kept no longer, or of which only this read is left.
    pub fn add(&mut self, owner: Incarnation, io: &Io) -> Option<Run> {
        let process = self.processes.entry(owner).or_default();
        let QueryOf { started_us, query_id, certainty } = io.query;
        if certainty == Certainty::Unknown {
            let others =
                if io.sighting == Sighting::NoQuery { &mut process.no_query } else { &mut process.unknown };
            others.add(io);
            return None;
        }
        let Some(run) = process.run_mut(started_us, query_id) else {
            // It was told long after its execution, because it was not known whether it counts.
            let mut run = Run { query_id, ..Run::new(started_us) };
            run.reads.add(io);
            return Some(run);
        };
        run.reads.add(io);
        (process.runs.len() > KEPT).then(|| process.runs.pop_front()).flatten()
    }

    /// Adds how much of its reading a process waited for, to what it executed then.
    pub fn add_exposure(&mut self, process: Incarnation, query: QueryOf, growth: ExposureGrowth) {
        if growth == ExposureGrowth::default() {
            return;
        }
        let Some(process) = self.processes.get_mut(&process) else { return };
        if let Some(run) = process.run_mut(query.started_us, query.query_id) {
            run.reads.exposure.add(growth);
        } else {
            process.no_query.exposure.add(growth);
        }
    }

    /// Whether a read's query is one of these; `None` while its identifier is not known.
    pub fn is_among(&self, owner: Incarnation, io: &Io, query_ids: &[i64]) -> Option<bool> {
        if io.query.certainty == Certainty::Unknown {
            return Some(false);
        }
        let QueryOf { started_us, query_id, .. } = io.query;
        let known = || self.processes.get(&owner)?.run(started_us, query_id)?.query_id;
        Some(query_ids.contains(&query_id.or_else(known)?))
    }

    /// Settles all pending reads of a process, which has ended or whose trace ends.
    pub fn give_up(&mut self, process: Incarnation) -> Vec<Io> {
        let Some(process) = self.processes.get_mut(&process) else { return Vec::new() };
        std::iter::from_fn(|| process.give_up_oldest()).collect()
    }

    /// All processes.
    pub fn processes(&self) -> Vec<Incarnation> {
        self.processes.keys().copied().collect()
    }

    /// How many executions of a process were seen.
    pub fn count(&self, process: Incarnation) -> u64 {
        self.processes.get(&process).map_or(0, |process| process.executions)
    }

    /// Forgets a process: returns its executions, and its reads of none. What a parallel worker read goes to what its leader
    /// executes, which waits for its workers.
    pub fn end(&mut self, process: Incarnation, leader: Option<Incarnation>) -> EndedProcess {
        let Some(ended) = self.processes.remove(&process) else { return EndedProcess::default() };
        let Process { runs, no_query, unknown, .. } = ended;
        let leaders =
            leader.and_then(|leader| self.processes.get_mut(&leader)).and_then(|led| led.runs.back_mut());
        match leaders {
            Some(run) if runs.front().is_none_or(|first| run.started_us <= first.started_us) => {
                for own in &runs {
                    run.reads.merge(&own.reads);
                    run.query_id = run.query_id.or(own.query_id);
                    run.text = run.text.take().or_else(|| own.text.clone());
                }
                EndedProcess { runs: Vec::new(), no_query, unknown }
            }
            _ => EndedProcess { runs: runs.into(), no_query, unknown },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::Pid;

    const OWNER: Incarnation = Incarnation { pid: Pid(1), number: 0 };
    const LEADER: Incarnation = Incarnation { pid: Pid(2), number: 0 };

    /// A read that began and ended at these microseconds.
    fn io(start_us: u64, end_us: u64, sighting: Sighting) -> Io {
        Io { sighting, ..Io::example(OWNER.pid, start_us * 1000, end_us * 1000) }
    }

    /// Seen at this microsecond to execute what began at that one.
    fn seen(at_us: u64, started_us: i64) -> Seen<'static> {
        Seen { at_ns: at_us * 1000, started_us, query_id: Some(started_us), text: None }
    }

    /// The server's clock is the kernel's.
    fn executions() -> Executions {
        let mut executions = Executions::default();
        executions.set_clock(0);
        executions
    }

    fn queries(settled: &[Io]) -> Vec<(i64, Certainty)> {
        settled.iter().map(|io| (io.query.started_us, io.query.certainty)).collect()
    }

    #[test]
    fn a_read_that_its_owner_began_carries_its_query() {
        let own = Sighting::Query { started_us: 5, query_id: None };
        let settled = executions().read(OWNER, io(10, 20, own));
        assert_eq!(queries(&settled), [(5, Certainty::Certain)]);
        for none in [Sighting::NoQuery, Sighting::Abandoned] {
            let settled = executions().read(OWNER, io(10, 20, none));
            assert_eq!(queries(&settled), [(0, Certainty::Unknown)]);
        }
    }

    #[test]
    fn a_read_between_the_start_of_an_execution_and_a_sighting_of_it_is_certain() {
        let mut executions = executions();
        assert!(executions.read(OWNER, io(10, 20, Sighting::None)).is_empty());
        assert!(executions.read(OWNER, io(40, 50, Sighting::None)).is_empty());
        assert_eq!(queries(&executions.see(OWNER, seen(30, 5))), [(5, Certainty::Certain)]);
        // Began after that; the next execution began even later.
        assert_eq!(queries(&executions.see(OWNER, seen(70, 60))), [(5, Certainty::Probable)]);
        assert!(executions.give_up(OWNER).is_empty());
    }

    #[test]
    fn statements_of_one_message_are_told_apart_by_their_identifiers() {
        let mut executions = executions();
        let own = |query_id| Sighting::Query { started_us: 5, query_id };
        for (query_id, certainty) in [
            (None, Certainty::Certain),
            (Some(1), Certainty::Certain),
            // Parsed, and not known yet.
            (None, Certainty::Probable),
            (Some(2), Certainty::Certain),
        ] {
            for io in executions.read(OWNER, io(10, 20, own(query_id))) {
                assert_eq!(io.query.certainty, certainty, "{query_id:?}");
                assert!(executions.add(OWNER, &io).is_none());
            }
        }
        // Which of the two an io worker's read is of, the moment of their start does not tell.
        executions.read(OWNER, io(12, 20, Sighting::None));
        let settled = executions.see(OWNER, Seen { query_id: Some(2), ..seen(18, 5) });
        assert_eq!(queries(&settled), [(5, Certainty::Probable)]);
        let runs = executions.end(OWNER, None).runs;
        let reads: Vec<_> = runs.iter().map(|run| (run.query_id, run.reads.io.reads)).collect();
        assert_eq!(reads, [(Some(1), 3), (Some(2), 1)]);
    }

    #[test]
    fn executions_that_read_nothing_are_forgotten() {
        let mut executions = executions();
        for started_us in 1..10_000 {
            executions.see(OWNER, seen(20_000, started_us));
        }
        assert!(executions.end(OWNER, None).runs.len() <= 2 * KEPT);
    }

    #[test]
    fn a_read_that_is_told_after_its_execution_was_forgotten_is_still_of_its_query() {
        let mut executions = executions();
        let late = executions.read(OWNER, io(10, 20, Sighting::Query { started_us: 5, query_id: Some(7) }));
        for started_us in 6..100 {
            executions.see(OWNER, seen(1_000, started_us));
        }
        let run = executions.add(OWNER, &late[0]).expect("it is given away at once");
        assert_eq!((run.query_id, run.reads.certain), (Some(7), 1));
    }

    #[test]
    fn without_the_clock_only_what_lies_between_two_sightings_is_certain() {
        let mut executions = Executions::default();
        executions.see(OWNER, seen(30, 5));
        executions.read(OWNER, io(10, 20, Sighting::None));
        executions.read(OWNER, io(40, 50, Sighting::None));
        let settled = executions.see(OWNER, seen(60, 5));
        assert_eq!(queries(&settled), [(0, Certainty::Unknown), (5, Certainty::Certain)]);
    }

    #[test]
    fn what_began_before_any_known_execution_is_of_none() {
        let mut executions = executions();
        executions.read(OWNER, io(10, 20, Sighting::None));
        assert_eq!(queries(&executions.see(OWNER, seen(30, 25))), [(0, Certainty::Unknown)]);
    }

    #[test]
    fn a_sample_that_comes_late_names_its_execution_and_settles_nothing() {
        let mut executions = executions();
        executions.see(OWNER, Seen { query_id: None, ..seen(10, 5) });
        executions.see(OWNER, seen(30, 25));
        executions.read(OWNER, io(40, 50, Sighting::None));
        let text: Arc<str> = "SELECT 1".into();
        assert!(executions.see(OWNER, Seen { text: Some(&text), ..seen(10, 5) }).is_empty());
        let ended = executions.end(OWNER, None);
        assert_eq!(ended.runs[0].text.as_deref(), Some("SELECT 1"));
        assert_eq!(ended.runs.len(), 2);
    }

    #[test]
    fn what_is_left_at_the_end_is_probably_of_the_last_execution() {
        let mut executions = executions();
        executions.see(OWNER, seen(10, 5));
        executions.read(OWNER, io(40, 50, Sighting::None));
        assert_eq!(queries(&executions.give_up(OWNER)), [(5, Certainty::Probable)]);
    }

    #[test]
    fn pending_reads_are_bounded() {
        let mut executions = executions();
        let held =
            (0..MOST_PENDING as u64).map(|at| executions.read(OWNER, io(at, at, Sighting::None)).len());
        assert_eq!(held.sum::<usize>(), 0);
        assert_eq!(executions.read(OWNER, io(0, 1, Sighting::None)).len(), 1);
    }

    #[test]
    fn a_parallel_workers_reads_go_to_what_its_leader_executes() {
        let mut executions = executions();
        executions.see(LEADER, seen(10, 5));
        let own = Sighting::Query { started_us: 5, query_id: Some(77) };
        for io in executions.read(OWNER, io(20, 30, own)) {
            assert!(executions.add(OWNER, &io).is_none());
        }
        assert!(executions.end(OWNER, Some(LEADER)).runs.is_empty());
        let led = executions.end(LEADER, None);
        assert_eq!(
            (led.runs[0].reads.io.reads, led.runs[0].reads.certain, led.runs[0].query_id),
            (1, 1, Some(5))
        );
    }

    #[test]
    fn of_many_executions_the_oldest_is_given_away() {
        let mut executions = executions();
        let mut given = 0;
        for started_us in 1..=40 {
            let own = Sighting::Query { started_us, query_id: None };
            for io in executions.read(OWNER, io(50, 60, own)) {
                given += usize::from(executions.add(OWNER, &io).is_some());
            }
        }
        assert_eq!((given, executions.count(OWNER)), (40 - KEPT, 40));
    }
}
