//! Reads that wait for the end of their latency, each for its own.

use std::{
    cmp::Ordering,
    collections::{BinaryHeap, VecDeque},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};

use super::latency::{Latency, Model};

/// CLOCK_MONOTONIC, which is also the clock of `bpf_ktime_get_ns`.
pub(super) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // Never negative: it counts from the machine's start.
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// Holds items until they are due. Several threads may put in and take out.
#[derive(Debug)]
pub(super) struct DelayQueue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<T> {
    model: Model,
    seed: u64,
    /// How many may be in service at once; more than that wait in `waiting`.
    limit: usize,
    in_service: usize,
    due: BinaryHeap<Due<T>>,
    waiting: VecDeque<T>,
    /// Orders items that are due at the same time.
    taken_in: u64,
    is_hurrying: bool,
    is_closed: bool,
}

#[derive(Debug)]
struct Due<T> {
    deadline_ns: u64,
    number: u64,
    item: T,
}

impl<T> DelayQueue<T> {
    pub(super) fn new(latency: Latency, seed: u64, limit: usize) -> Self {
        let state = State {
            model: Model::new(latency, seed),
            seed,
            limit: limit.max(1),
            in_service: 0,
            due: BinaryHeap::new(),
            waiting: VecDeque::new(),
            taken_in: 0,
            is_hurrying: false,
            is_closed: false,
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// For items that begin their service from now on; those in service keep what they have.
    pub(super) fn set_latency(&self, latency: Latency) {
        let mut state = self.state();
        state.model = Model::new(latency, state.seed);
    }

    pub(super) fn put(&self, item: T) {
        let mut state = self.state();
        if state.in_service < state.limit {
            state.begin(item);
            self.changed.notify_one();
        } else {
            state.waiting.push_back(item);
        }
    }

    /// The next item that is due, once it is; `None` when the queue is closed. [`DelayQueue::done`] must follow.
    pub(super) fn take(&self) -> Option<T> {
        let mut state = self.state();
        loop {
            if state.is_closed {
                return None;
            }
            let Some(next) = state.due.peek() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = next.deadline_ns.saturating_sub(now_ns());
            if left == 0 || state.is_hurrying {
                return state.due.pop().map(|due| due.item);
            }
            let waited = self.changed.wait_timeout(state, Duration::from_nanos(left));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// One item's service is over: the next that waited for a place begins.
    pub(super) fn done(&self) {
        let mut state = self.state();
        state.in_service -= 1;
        if let Some(item) = state.waiting.pop_front() {
            state.begin(item);
            self.changed.notify_one();
        }
    }

    /// From now on, and for what is in service, there is no latency any more.
    pub(super) fn hurry(&self) {
        self.state().is_hurrying = true;
        self.changed.notify_all();
    }

    /// Ends every [`DelayQueue::take`].
    pub(super) fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> State<T> {
    fn begin(&mut self, item: T) {
        self.in_service += 1;
        self.taken_in += 1;
        let deadline_ns = self.model.deadline(now_ns());
        self.due.push(Due { deadline_ns, number: self.taken_in, item });
    }
}

impl<T> Due<T> {
    fn key(&self) -> (u64, u64) {
        (self.deadline_ns, self.number)
    }
}

/// The greatest is taken first: the one that is due first.
impl<T> Ord for Due<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        other.key().cmp(&self.key())
    }
}

impl<T> PartialOrd for Due<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> PartialEq for Due<T> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<T> Eq for Due<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENCY: Duration = Duration::from_millis(20);

    fn elapsed(since_ns: u64) -> Duration {
        Duration::from_nanos(now_ns() - since_ns)
    }

    #[test]
    fn delays_run_side_by_side_and_in_order() {
        let queue = DelayQueue::new(Latency::Constant(LATENCY), 1, usize::MAX);
        let start = now_ns();
        (0..10).for_each(|item| queue.put(item));
        assert!((0..10).all(|item| queue.take() == Some(item)));
        // One after the other would be ten times the latency.
        assert!((LATENCY..5 * LATENCY).contains(&elapsed(start)), "{:?}", elapsed(start));
    }

    #[test]
    fn no_more_are_in_service_than_the_limit() {
        let queue = DelayQueue::new(Latency::Constant(LATENCY), 1, 2);
        let start = now_ns();
        (0..4).for_each(|item| queue.put(item));
        for item in 0..4 {
            assert_eq!(queue.take(), Some(item));
            queue.done();
        }
        assert!(elapsed(start) >= 2 * LATENCY, "{:?}", elapsed(start));
    }

    #[test]
    fn haste_ends_the_wait_and_closing_ends_all() {
        let queue = DelayQueue::new(Latency::Constant(Duration::from_hours(1)), 1, usize::MAX);
        queue.put(1);
        queue.hurry();
        assert_eq!(queue.take(), Some(1));
        queue.close();
        assert_eq!(queue.take(), None);
    }
}
