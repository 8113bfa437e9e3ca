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
    fn run_mut(&mut self, started_us: i64) -> Option<&mut Run> {
        self.runs.iter_mut().rev().find(|run| run.started_us == started_us)
    }

    /// The pending reads that a sighting settles: all that began before it. `since_ns`: when the execution began, by the kernel's clock.
    fn settle(&mut self, at_ns: u64, started_us: i64, since_ns: Option<u64>) -> Vec<Io> {
        let known = self.runs.iter().rev().find(|run| run.started_us < started_us);
        let before = known.map(|run| run.started_us);
        let seen_before_ns = self.run(started_us).map(|run| run.seen_ns).filter(|seen| *seen > 0);
        let mut settled = Vec::new();
        for mut io in std::mem::take(&mut self.pending) {
            let begin = io.timing.execution_start_ns();
            if begin > at_ns {
                self.pending.push_back(io);
                continue;
            }
            let is_of_it = since_ns.is_some_and(|start| start <= begin)
                || seen_before_ns.is_some_and(|seen| seen <= begin);
            io.query = if is_of_it {
                QueryOf { started_us, certainty: Certainty::Certain }
            } else {
                QueryOf::probably(before)
            };
            settled.push(io);
        }
        settled
    }

    fn run(&self, started_us: i64) -> Option<&Run> {
        self.runs.iter().rev().find(|run| run.started_us == started_us)
    }

    /// Settles a pending read with what is known: the execution that was seen last.
    fn give_up_oldest(&mut self) -> Option<Io> {
        let mut io = self.pending.pop_front()?;
        io.query = QueryOf::probably(self.runs.back().map(|run| run.started_us));
        Some(io)
    }
}

/// What a process is seen to execute.
#[derive(Debug, Clone, Copy)]
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
                io.query = QueryOf { started_us, certainty: Certainty::Certain };
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
        let newest = process.runs.back().map(|run| run.started_us);
        // A sample may come after what began later; it settles nothing, but names what it shows.
        let is_current = newest.is_none_or(|newest| newest <= started_us);
        let settled = if is_current { process.settle(at_ns, started_us, since_ns) } else { Vec::new() };
        if newest.is_none_or(|newest| newest < started_us) {
            process.runs.push_back(Run::new(started_us));
            process.executions += 1;
        }
        if let Some(run) = process.run_mut(started_us) {
            run.seen_ns = run.seen_ns.max(at_ns);
            run.query_id = query_id.or(run.query_id);
            run.text = text.cloned().or_else(|| run.text.take());
        }
        settled
    }

    /// Books a settled read. Returns an execution that is kept no longer.
    pub fn add(&mut self, owner: Incarnation, io: &Io) -> Option<Run> {
        let process = self.processes.entry(owner).or_default();
        match process.run_mut(io.query.started_us) {
            Some(run) if io.query.certainty != Certainty::Unknown => run.reads.add(io),
            _ if io.sighting == Sighting::NoQuery => process.no_query.add(io),
            _ => process.unknown.add(io),
        }
        (process.runs.len() > KEPT).then(|| process.runs.pop_front()).flatten()
    }

    /// Adds how much of its reading a process waited for, to what it executes.
    pub fn add_exposure(&mut self, process: Incarnation, growth: ExposureGrowth) {
        let Some(process) = self.processes.get_mut(&process) else { return };
        let reads = process.runs.back_mut().map_or(&mut process.no_query, |run| &mut run.reads);
        reads.exposure.add(growth);
    }

    /// Whether a read's query is one of these; `None` while its identifier is not known.
    pub fn is_among(&self, owner: Incarnation, io: &Io, query_ids: &[i64]) -> Option<bool> {
        if io.query.certainty == Certainty::Unknown {
            return Some(false);
        }
        let run = self.processes.get(&owner)?.run(io.query.started_us)?;
        Some(query_ids.contains(&run.query_id?))
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
