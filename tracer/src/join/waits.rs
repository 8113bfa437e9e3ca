//! What backends waited for when a sample of `pg_stat_activity` saw them waiting for a read, and what that read was doing.
//!
//! A wait is a system call that the kernel side tells of when it ends, and so is the read that ends it. Of a read that another
//! process executes, its handle's condition variable names the waiters (`pgaio_io_wait`, `src/backend/storage/aio/aio.c`).

use std::collections::{BTreeMap, HashMap, VecDeque};

use pgiotrace_ebpf::WaitRecord;

use crate::{
    capture::sampler::{Taken, WaitEvent},
    model::{
        Doing,
        aggregate::Incarnation,
        io::{Executor, Io, Method, Spans, Stage},
    },
    server::Pid,
};

/// Reads that are remembered, for samples that are still on their way: 8 MB.
const MOST_READS: usize = 65_536;
/// Waits of one process that are remembered.
const MOST_WAITS: usize = 64;
/// Sampled waits of one process that are not explained yet; beyond it, the oldest stays unexplained.
const MOST_OPEN: usize = 256;
/// Entries that are kept apart; beyond it, those of other queries of a process are one.
const MOST_KEYS: usize = 2_000;
/// A read that has ended is no longer awaited for this long: what is left is checking its pages, and waking its waiters. One
/// hundred times what that takes (10 to 100 µs) would still be less than most disks take.
const REAPING_NS: u64 = 5_000_000;

/// The wait events that are explained, by what ends such a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Awaiting {
    /// `AioIoCompletion`: another process's completion of a read, told by its condition variable.
    Completion,
    /// `AioIoUringExecution`: a completion in a ring.
    Ring,
    /// `AioIoUringSubmit`: its own submission.
    Submission,
    /// `DataFileRead`: its own system call.
    OwnCall,
    /// The two LWLocks of asynchronous I/O: whoever reaps a ring, or fills the io workers' queue.
    Lock,
}

impl Awaiting {
    /// Names as in `src/backend/utils/activity/wait_event_names.txt`.
    pub fn of(event: &WaitEvent) -> Option<Self> {
        Some(match (event.kind.as_str(), event.name.as_str()) {
            ("IO", "AioIoCompletion") => Self::Completion,
            ("IO", "AioIoUringExecution") => Self::Ring,
            ("IO", "AioIoUringSubmit") => Self::Submission,
            ("IO", "DataFileRead") => Self::OwnCall,
            ("LWLock", "AioUringCompletion" | "AioWorkerSubmissionQueue") => Self::Lock,
            _ => return None,
        })
    }
}

/// What is counted together.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WaitKey {
    pub process: Incarnation,
    pub event: WaitEvent,
    pub query_id: Option<i64>,
    pub query: Option<std::sync::Arc<str>>,
}

/// Sampled waits.
#[derive(Debug, Clone, Default)]
pub(super) struct WaitCounts {
    pub samples: u64,
    pub doing: BTreeMap<Doing, u64>,
    /// Whose reads were awaited, where they were others'.
    pub of_others: BTreeMap<Pid, u64>,
}

/// A sampled wait that is not explained yet.
#[derive(Debug, Clone)]
struct Open {
    key: WaitKey,
    awaiting: Awaiting,
    taken: Taken,
}

impl Open {
    fn moment_ns(&self) -> u64 {
        self.taken.from_ns.midpoint(self.taken.to_ns)
    }
}

/// A read that has ended.
#[derive(Debug)]
struct Ended {
    owner: Option<Pid>,
    executor: Pid,
    executor_kind: Executor,
    method: Method,
    start_ns: u64,
    end_ns: u64,
    spans: Option<Box<Spans>>,
    waiters: [Option<Pid>; 2],
}

impl Ended {
    fn at(&self, moment_ns: u64) -> Doing {
        if moment_ns < self.start_ns {
            return if self.method == Method::Worker { Doing::PgQueue } else { Doing::Submit };
        }
        if moment_ns > self.end_ns {
            return Doing::Finished;
        }
        match self.spans.as_ref().map_or(Stage::Cache, |spans| spans.at(moment_ns)) {
            Stage::Device => Doing::Device,
            Stage::BlockQueue => Doing::BlockQueue,
            Stage::Submit => Doing::Submit,
            Stage::Wakeup => Doing::Wakeup,
            Stage::PgQueue | Stage::Cache => Doing::Cache,
        }
    }
}

/// All sampled waits, as they grow.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// In the order of their ends.
    reads: VecDeque<Ended>,
    calls: HashMap<Pid, VecDeque<(u64, u64)>>,
    open: HashMap<Pid, VecDeque<Open>>,
    counts: BTreeMap<WaitKey, WaitCounts>,
}

impl Waits {
    /// A read has ended.
    pub fn read(&mut self, io: &Io, waiters: [Option<Pid>; 2]) {
        if self.reads.len() >= MOST_READS {
            self.reads.pop_front();
        }
        let ended = Ended {
            owner: io.owner,
            executor: io.executor,
            executor_kind: io.executor_kind,
            method: io.method,
            start_ns: io.timing.execution_start_ns(),
            end_ns: io.timing.execution_end_ns(),
            spans: io.timing.spans.clone(),
            waiters,
        };
        // In the order of their ends: one whose owner had to be found is told late.
        let later = self.reads.iter().rev().take_while(|read| read.end_ns > ended.end_ns).count();
        self.reads.insert(self.reads.len() - later, ended);
        // Waits inside of one's own call end with it.
        if io.method == Method::Sync || io.executor_kind == Executor::IoWorker {
            self.wait_ended(io.executor, io.timing.execution_start_ns(), io.timing.execution_end_ns());
        }
    }

    /// A process has waited.
    pub fn wait(&mut self, record: &WaitRecord) {
        self.wait_ended(Pid(record.tgid), record.start_ns, record.end_ns);
    }

    fn wait_ended(&mut self, process: Pid, start_ns: u64, end_ns: u64) {
        let Some(open) = self.open.get_mut(&process) else {
            return self.remember(process, (start_ns, end_ns));
        };
        let (explained, later): (Vec<Open>, Vec<Open>) =
            std::mem::take(open).into_iter().partition(|open| open.taken.from_ns <= end_ns);
        open.extend(later);
        for open in explained {
            self.explain(&open, Some((start_ns, end_ns)).filter(|(start, _)| *start <= open.taken.to_ns));
        }
        self.remember(process, (start_ns, end_ns));
    }

    fn remember(&mut self, process: Pid, wait: (u64, u64)) {
        let waits = self.calls.entry(process).or_default();
        if waits.len() >= MOST_WAITS {
            waits.pop_front();
        }
        waits.push_back(wait);
    }

    /// A sample saw a process waiting.
    pub fn sampled(&mut self, key: WaitKey, awaiting: Awaiting, taken: Taken) {
        let process = key.process.pid;
        let open = Open { key, awaiting, taken };
        let known = self.calls.get(&process).into_iter().flatten();
        let around = known.copied().find(|(start, end)| *start <= taken.to_ns && taken.from_ns <= *end);
        if awaiting == Awaiting::Lock || around.is_some() {
            return self.explain(&open, around);
        }
        let all = self.open.entry(process).or_default();
        all.push_back(open);
        if all.len() > MOST_OPEN
            && let Some(oldest) = all.pop_front()
        {
            self.explain(&oldest, None);
        }
    }

    /// A process has ended: its waits stay as they are.
    pub fn leave(&mut self, process: Pid) {
        self.calls.remove(&process);
        for open in self.open.remove(&process).into_iter().flatten() {
            self.explain(&open, None);
        }
    }

    /// The sums. What is still open stays unexplained.
    pub fn finish(&mut self) -> BTreeMap<WaitKey, WaitCounts> {
        for open in std::mem::take(&mut self.open).into_values().flatten() {
            self.explain(&open, None);
        }
        std::mem::take(&mut self.counts)
    }

    /// Counts a sampled wait. `wait`: the system call that it was in.
    fn explain(&mut self, open: &Open, wait: Option<(u64, u64)>) {
        let (doing, other) = match (open.awaiting, wait) {
            (Awaiting::Lock, _) => (Doing::Lock, None),
            (_, None) => (Doing::NotKnown, None),
            (awaiting, Some(wait)) => self.explanation(open, awaiting, wait),
        };
        let mut key = open.key.clone();
        if self.counts.len() >= MOST_KEYS && !self.counts.contains_key(&key) {
            (key.query_id, key.query) = (None, None);
        }
        let counts = self.counts.entry(key).or_default();
        counts.samples += 1;
        *counts.doing.entry(doing).or_default() += 1;
        if let Some(other) = other {
            *counts.of_others.entry(other).or_default() += 1;
        }
    }

    /// What the awaited read was doing, and whose it was, if another's.
    fn explanation(&self, open: &Open, awaiting: Awaiting, (start, end): (u64, u64)) -> (Doing, Option<Pid>) {
        let process = open.key.process.pid;
        let moment = open.moment_ns().clamp(start, end.max(start));
        let found = match awaiting {
            Awaiting::OwnCall => {
                self.ended_in(start, end, |read| read.executor == process && read.method != Method::IoUring)
            }
            Awaiting::Completion => {
                let names_it = |read: &Ended| read.waiters.contains(&Some(process));
                let is_own = |read: &Ended| read.owner == Some(process);
                self.ended_in(start, end, names_it).or_else(|| {
                    // The last one that ended before it ran on.
                    self.recent(start.saturating_sub(REAPING_NS), end).find(|read| is_own(read))
                })
            }
            Awaiting::Ring => self.in_ring(process, moment, (start, end)),
            Awaiting::Submission => {
                let is_own = |read: &&Ended| read.owner == Some(process) && read.method == Method::IoUring;
                // What is copied inside of the submission; the other requests only pass through it.
                self.recent(moment, u64::MAX)
                    .filter(is_own)
                    .find(|read| read.executor_kind == Executor::Owner && read.start_ns <= moment)
            }
            Awaiting::Lock => None,
        };
        match found {
            Some(read) => (
                read.at(moment),
                read.owner.filter(|owner| *owner != process && awaiting != Awaiting::OwnCall),
            ),
            None if awaiting == Awaiting::Submission => (Doing::Submit, None),
            None => (Doing::NotKnown, None),
        }
    }

    /// The request in a ring that ended a wait for it, or that a process waited to see reaped.
    fn in_ring(&self, process: Pid, moment: u64, (start, end): (u64, u64)) -> Option<&Ended> {
        let in_ring = |read: &&Ended| read.method == Method::IoUring;
        let is_own = |read: &&Ended| in_ring(read) && read.owner == Some(process);
        // What it had seen to its end already, it waits for no more: but it may not have seen it.
        let just_before = || self.recent(start.saturating_sub(REAPING_NS), moment).find(is_own);
        self.recent(moment, end).filter(is_own).last().or_else(just_before).or_else(|| {
            let others: Vec<&Ended> = self.recent(moment, end).filter(in_ring).collect();
            // Another's ring, if it can only have been one.
            let first = others.last()?;
            others.iter().all(|read| read.owner == first.owner).then_some(*first)
        })
    }

    /// The first read of a kind that ended within a time.
    fn ended_in(&self, start: u64, end: u64, is_wanted: impl Fn(&Ended) -> bool) -> Option<&Ended> {
        self.recent(start, end).filter(|read| is_wanted(read)).last()
    }

    /// Reads that ended within a time, latest first.
    fn recent(&self, start: u64, end: u64) -> impl Iterator<Item = &Ended> {
        let newest_first = self.reads.iter().rev().skip_while(move |read| read.end_ns > end);
        newest_first.take_while(move |read| read.end_ns >= start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: Pid = Pid(1);
    const OTHER: Pid = Pid(2);
    const WORKER: Pid = Pid(9);
    const MS: u64 = 1_000_000;

    /// A read whose one request is with the device from `start + 1 ms` to `end - 1 ms`.
    fn io(owner: Pid, method: Method, start_ms: u64, end_ms: u64) -> Io {
        let mut spans = Spans { first_queued_ns: start_ms * MS + MS / 2, ..Spans::default() };
        let (from, to) = (start_ms * MS + MS, end_ms * MS - MS);
        spans.device.add(from, to);
        spans.block_layer.add(spans.first_queued_ns, to);
        let (executor, executor_kind) = match method {
            Method::Worker => (WORKER, Executor::IoWorker),
            Method::IoUring => (owner, Executor::IouWrk),
            Method::Sync => (owner, Executor::Owner),
        };
        let mut io = Io { executor, executor_kind, method, ..Io::example(owner, start_ms * MS, end_ms * MS) };
        io.timing.spans = Some(Box::new(spans));
        io
    }

    fn sampled(waits: &mut Waits, process: Pid, event: &str, at_ms: u64) {
        let event = WaitEvent { kind: "IO".to_owned(), name: event.to_owned() };
        let awaiting = Awaiting::of(&event).expect("it is explained");
        let process = Incarnation { pid: process, number: 0 };
        let key = WaitKey { process, event, query_id: None, query: None };
        waits.sampled(key, awaiting, Taken { from_ns: at_ms * MS, to_ns: at_ms * MS });
    }

    fn wait(process: Pid, start_ms: u64, end_ms: u64) -> WaitRecord {
        WaitRecord { tgid: process.0, start_ns: start_ms * MS, end_ns: end_ms * MS, ..WaitRecord::default() }
    }

    type Found = (Vec<(Doing, u64)>, Vec<(Pid, u64)>);

    /// What the waits of all samples were for, in order of [`Doing`], and whose.
    fn found(mut waits: Waits) -> Found {
        let mut doing: BTreeMap<Doing, u64> = BTreeMap::new();
        let mut others: BTreeMap<Pid, u64> = BTreeMap::new();
        for counts in waits.finish().into_values() {
            counts.doing.into_iter().for_each(|(what, count)| *doing.entry(what).or_default() += count);
            counts.of_others.into_iter().for_each(|(pid, count)| *others.entry(pid).or_default() += count);
        }
        (doing.into_iter().collect(), others.into_iter().collect())
    }

    #[test]
    fn a_wait_is_explained_by_the_read_that_names_the_waiter_whichever_is_told_first() {
        for is_sample_late in [false, true] {
            let mut waits = Waits::default();
            let samples = |waits: &mut Waits| {
                for at_ms in [12, 25] {
                    sampled(waits, OWNER, "AioIoCompletion", at_ms);
                }
            };
            if !is_sample_late {
                samples(&mut waits);
            }
            // An earlier one of its own, and the one that it waits for: queued until 20.
            waits.read(&io(OWNER, Method::Worker, 5, 15), [None, None]);
            waits.read(&io(OWNER, Method::Worker, 20, 30), [Some(OTHER), Some(OWNER)]);
            waits.wait(&wait(OWNER, 10, 31));
            if is_sample_late {
                samples(&mut waits);
            }
            assert_eq!(found(waits), (vec![(Doing::PgQueue, 1), (Doing::Device, 1)], Vec::new()));
        }
    }

    #[test]
    fn a_wait_for_the_read_of_another_names_its_owner() {
        let mut waits = Waits::default();
        sampled(&mut waits, OWNER, "AioIoCompletion", 15);
        waits.read(&io(OTHER, Method::Sync, 10, 20), [Some(OWNER), Some(OWNER)]);
        waits.wait(&wait(OWNER, 11, 21));
        assert_eq!(found(waits), (vec![(Doing::Device, 1)], vec![(OTHER, 1)]));
    }

    #[test]
    fn what_has_ended_and_is_still_awaited_is_finished() {
        let mut waits = Waits::default();
        waits.read(&io(OWNER, Method::Worker, 10, 20), [None, None]);
        sampled(&mut waits, OWNER, "AioIoCompletion", 21);
        waits.wait(&wait(OWNER, 21, 22));
        assert_eq!(found(waits), (vec![(Doing::Finished, 1)], Vec::new()));
    }

    #[test]
    fn own_calls_and_rings_are_explained_by_what_ends_them() {
        let mut waits = Waits::default();
        sampled(&mut waits, WORKER, "DataFileRead", 15);
        sampled(&mut waits, OTHER, "AioIoUringExecution", 16);
        waits.read(&io(OWNER, Method::Worker, 10, 20), [None, None]);
        waits.read(&io(OTHER, Method::IoUring, 10, 20), [None, None]);
        waits.wait(&wait(OTHER, 12, 21));
        assert_eq!(found(waits), (vec![(Doing::Device, 2)], Vec::new()));
    }

    #[test]
    fn a_wait_without_a_read_stays_unexplained() {
        let mut waits = Waits::default();
        sampled(&mut waits, OWNER, "AioIoCompletion", 15);
        waits.wait(&wait(OWNER, 11, 21));
        sampled(&mut waits, OTHER, "AioIoCompletion", 15);
        waits.leave(OTHER);
        assert_eq!(found(waits), (vec![(Doing::NotKnown, 2)], Vec::new()));
        let lock = WaitEvent { kind: "LWLock".to_owned(), name: "AioUringCompletion".to_owned() };
        assert_eq!(Awaiting::of(&lock), Some(Awaiting::Lock));
        let client = WaitEvent { kind: "Client".to_owned(), name: "ClientRead".to_owned() };
        assert_eq!(Awaiting::of(&client), None);
    }
}
