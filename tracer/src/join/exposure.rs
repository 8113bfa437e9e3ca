//! How much of its reading each backend waited for: exposed and hidden time, and bounds for what nobody measures.

use std::collections::{HashMap, VecDeque};

use pgiotrace_ebpf::WaitRecord;

use crate::model::{
    LatencyHistogram,
    aggregate::{ExposureTotals, Incarnation},
    intervals::Intervals,
    io::{Io, Method},
};

/// How many intervals of each owner are remembered, for reads and waits that are still on their way.
const REMEMBERED: usize = 1024;

/// How much a read or a wait adds to a backend's times, nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ExposureGrowth {
    /// Blocked while a read of its own was in flight.
    pub exposed_ns: u64,
    /// A read of its own was in flight.
    pub reading_ns: u64,
}

impl ExposureGrowth {
    pub fn add(&mut self, other: Self) {
        self.exposed_ns += other.exposed_ns;
        self.reading_ns += other.reading_ns;
    }

    fn since(self, before: Self) -> Self {
        Self {
            exposed_ns: self.exposed_ns - before.exposed_ns,
            reading_ns: self.reading_ns - before.reading_ns,
        }
    }
}

/// One backend's waiting and reading, as it grows.
#[derive(Debug, Clone, Default)]
pub(super) struct Exposure {
    waits: Intervals,
    reads: Intervals,
    unawaited: VecDeque<Unawaited>,
    exposed_ns: u64,
    reading_ns: u64,
    pg_queue_at_least: LatencyHistogram,
    owner_wakeup_at_most: LatencyHistogram,
}

impl Exposure {
    /// The sums.
    pub fn totals(mut self) -> ExposureTotals {
        for mut read in std::mem::take(&mut self.unawaited) {
            self.bound_queue(&mut read, None);
        }
        ExposureTotals {
            exposed_ns: self.exposed_ns,
            // Both forget their oldest intervals, each by itself.
            hidden_ns: self.reading_ns.saturating_sub(self.exposed_ns),
            pg_queue_at_least: self.pg_queue_at_least,
            owner_wakeup_at_most: self.owner_wakeup_at_most,
        }
    }

    /// The owner was blocked.
    fn add_wait(&mut self, start: u64, end: u64) {
        for (from, to) in self.waits.add(start, end).iter() {
            self.exposed_ns += self.reads.overlap(from, to);
        }
        self.waits.keep_newest(REMEMBERED);
    }

    /// A read of the owner's was in flight.
    fn add_read(&mut self, start: u64, end: u64) {
        for (from, to) in self.reads.add(start, end).iter() {
            self.reading_ns += to - from;
            self.exposed_ns += self.waits.overlap(from, to);
        }
        self.reads.keep_newest(REMEMBERED);
    }

    /// A read has ended. Returns how much that adds.
    pub fn read(&mut self, io: &Io) -> ExposureGrowth {
        let before = self.growth();
        let (start, end) = (io.timing.start_ns, io.timing.end_ns);
        if io.method == Method::Sync {
            // Inside its own system call, the owner waits.
            self.add_wait(io.timing.execution_start_ns(), end);
        } else {
            let execution_ns = io.timing.execution_start_ns();
            let mut read = Unawaited {
                execution_ns,
                end_ns: io.timing.execution_end_ns(),
                queued_by_ns: io.timing.queued_by_ns.filter(|by_ns| *by_ns < execution_ns),
                may_be_queued: io.method == Method::Worker,
            };
            if let Some((since, _)) = self.waits.around(execution_ns) {
                self.bound_queue(&mut read, Some(since));
            }
            match self.waits.around(read.end_ns) {
                // It is told after the wait that it ended in.
                Some((_, until)) => {
                    self.bound_queue(&mut read, None);
                    self.owner_wakeup_at_most.record(until - read.end_ns);
                }
                None => self.unawaited.push_back(read),
            }
            if self.unawaited.len() > REMEMBERED
                && let Some(mut oldest) = self.unawaited.pop_front()
            {
                self.bound_queue(&mut oldest, None);
            }
        }
        self.add_read(start, end);
        self.growth().since(before)
    }

    fn growth(&self) -> ExposureGrowth {
        ExposureGrowth { exposed_ns: self.exposed_ns, reading_ns: self.reading_ns }
    }

    /// A wait of the owner's has ended. Returns how much that adds.
    pub fn wait(&mut self, record: &WaitRecord) -> ExposureGrowth {
        let before = self.growth();
        let (start, end) = (record.start_ns, record.end_ns);
        self.add_wait(start, end);
        while let Some(mut read) = self.unawaited.pop_front_if(|read| read.end_ns <= end) {
            let since = (start..end).contains(&read.execution_ns).then_some(start);
            self.bound_queue(&mut read, since);
            if read.end_ns >= start {
                self.owner_wakeup_at_most.record(end - read.end_ns);
            }
        }
        self.growth().since(before)
    }

    /// A read that an io worker begins while its owner is blocked was in the queue ever since: the owner could not have
    /// submitted it meanwhile. And one that `pg_aios` had shown on its way was in it since then.
    fn bound_queue(&mut self, read: &mut Unawaited, blocked_since_ns: Option<u64>) {
        let since = [blocked_since_ns, read.queued_by_ns].into_iter().flatten().min();
        if let (true, Some(since)) = (read.may_be_queued, since) {
            self.pg_queue_at_least.record(read.execution_ns - since);
            // Once is enough.
            read.may_be_queued = false;
        }
    }
}

/// A read that another process executed, and whose owner has not been seen to wait for it.
#[derive(Debug, Clone, Copy)]
struct Unawaited {
    /// When its execution began.
    execution_ns: u64,
    end_ns: u64,
    /// When it was in the queue at the latest, as far as the view tells.
    queued_by_ns: Option<u64>,
    /// Whether an io worker executed it, and no bound of its time in the queue is recorded.
    may_be_queued: bool,
}

/// All backends' waiting and reading.
#[derive(Debug, Default)]
pub(super) struct Exposures(HashMap<Incarnation, Exposure>);

impl Exposures {
    /// One backend's, to add to.
    pub fn entry(&mut self, owner: Incarnation) -> &mut Exposure {
        self.0.entry(owner).or_default()
    }

    /// All backends.
    pub fn owners(&self) -> Vec<Incarnation> {
        self.0.keys().copied().collect()
    }

    /// Forgets a backend, and hands over what it had.
    pub fn remove(&mut self, owner: Incarnation) -> Option<Exposure> {
        self.0.remove(&owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::Pid;

    fn io(method: Method, start_ns: u64, end_ns: u64) -> Io {
        Io { method, ..Io::example(Pid(1), start_ns, end_ns) }
    }

    /// The view had shown it by then.
    fn seen(by_ns: u64, mut io: Io) -> Io {
        io.timing.queued_by_ns = Some(by_ns);
        io
    }

    fn wait(start_ns: u64, end_ns: u64) -> WaitRecord {
        WaitRecord { start_ns, end_ns, ..WaitRecord::default() }
    }

    fn exposure(reads: &[(Method, u64, u64)], waits: &[(u64, u64)]) -> Exposure {
        let mut exposure = Exposure::default();
        for (method, start, end) in reads {
            exposure.read(&io(*method, *start, *end));
        }
        for (start, end) in waits {
            exposure.wait(&wait(*start, *end));
        }
        exposure
    }

    fn times(exposure: Exposure) -> (u64, u64) {
        let totals = exposure.totals();
        (totals.exposed_ns, totals.hidden_ns)
    }

    #[test]
    fn a_backends_own_reads_hide_nothing() {
        let exposure = exposure(&[(Method::Sync, 100, 200), (Method::Sync, 250, 300)], &[]);
        assert_eq!(times(exposure), (150, 0));
    }

    #[test]
    fn reads_that_overlap_the_owners_work_are_hidden_but_for_its_waits() {
        let reads = [(Method::Worker, 100, 200), (Method::Worker, 150, 300), (Method::IoUring, 500, 600)];
        let exposure = exposure(&reads, &[(180, 320), (400, 450)]);
        assert_eq!(times(exposure), (120, 180));
    }

    #[test]
    fn the_order_in_which_reads_and_waits_are_told_does_not_matter() {
        let mut exposure = exposure(&[], &[(180, 320), (400, 450)]);
        for (start, end) in [(150, 300), (100, 200), (440, 460)] {
            exposure.read(&io(Method::Worker, start, end));
        }
        assert_eq!(times(exposure), (130, 90));
    }

    #[test]
    fn a_read_that_begins_while_its_owner_is_blocked_had_been_in_the_queue() {
        let exposure = exposure(&[(Method::Worker, 250, 300), (Method::Worker, 100, 310)], &[(180, 320)]);
        assert_eq!(exposure.pg_queue_at_least.dist().map(|dist| (dist.count, dist.max)), Some((1, 0.07)));
        assert_eq!(exposure.owner_wakeup_at_most.dist().map(|dist| (dist.count, dist.max)), Some((2, 0.02)));
    }

    #[test]
    fn a_read_that_is_told_after_its_owners_wait_is_bounded_all_the_same() {
        let mut exposure = exposure(&[], &[(180, 320)]);
        exposure.read(&io(Method::Worker, 250, 300));
        assert_eq!(exposure.pg_queue_at_least.dist().map(|dist| (dist.count, dist.max)), Some((1, 0.07)));
        assert_eq!(exposure.owner_wakeup_at_most.dist().map(|dist| (dist.count, dist.max)), Some((1, 0.02)));
    }

    #[test]
    fn the_earlier_of_two_bounds_counts_and_only_once() {
        let mut exposure = Exposure::default();
        exposure.read(&seen(150, io(Method::Worker, 250, 300)));
        exposure.read(&seen(240, io(Method::Worker, 260, 310)));
        exposure.wait(&wait(180, 320));
        // Not in a wait, and only the view says something.
        exposure.read(&seen(370, io(Method::Worker, 400, 410)));
        exposure.read(&seen(370, io(Method::IoUring, 400, 410)));
        let bounds = exposure.totals().pg_queue_at_least.dist().expect("there are bounds");
        assert_eq!((bounds.count, bounds.max, bounds.sum), (3, 0.1, 0.21));
    }
}
