//! From the requests that a read waited for to where its time went.

use pgiotrace_ebpf::{NOT_KNOWN, ReadRecord};

use crate::model::{
    intervals::Intervals,
    io::{Spans, Stage, StageTimes},
};

/// When a request was where. `CLOCK_MONOTONIC`, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Waited {
    /// Queued; `None`: not seen.
    pub queued_ns: Option<u64>,
    /// Issued to the driver.
    pub issued_ns: u64,
    /// Completed.
    pub done_ns: u64,
    /// Whether the block layer had held it back before it was seen to be queued.
    pub is_held: bool,
}

impl Waited {
    /// Whether it was queued, issued and completed in this order.
    pub fn is_possible(&self) -> bool {
        self.first_ns() <= self.issued_ns && self.issued_ns <= self.done_ns
    }

    /// When it is first known to have been in the block layer.
    pub fn first_ns(&self) -> u64 {
        self.queued_ns.unwrap_or(self.issued_ns)
    }
}

/// Divides a read's time among its stages: each moment belongs to one. A moment in which any of its requests was with a
/// device is the device's; else, in which any was queued, the queue's. So the stages never add up to more than the
/// latency.
pub(super) fn of(read: &ReadRecord, waited: &[Waited]) -> (StageTimes, Option<Box<Spans>>) {
    let (start, end) = (read.begun.start_ns, read.end_ns);
    let mut times = StageTimes::default();
    if read.begun.staged_ns != 0 {
        times.set(Stage::PgQueue, start.saturating_sub(read.begun.staged_ns));
    }
    if waited.is_empty() {
        times.set(Stage::Cache, end.saturating_sub(start));
        return (times, None);
    }
    let clip = |moment: u64| moment.clamp(start, end.max(start));
    let mut covered = Intervals::default();
    for request in waited {
        covered.add(clip(request.issued_ns), clip(request.done_ns));
    }
    let device = covered.length();
    times.set(Stage::Device, device);
    let at_device = covered.clone();

    let held_since = held_since(start, waited);
    let mut first = end;
    let mut are_queues_known = true;
    for request in waited {
        are_queues_known &= request.queued_ns.is_some();
        let seen = clip(request.first_ns());
        let queued = if request.is_held { seen.min(held_since) } else { seen };
        first = first.min(queued);
        covered.add(queued, clip(request.issued_ns));
    }
    let queue = covered.length() - device;
    let block_layer = covered.clone();
    // What was with the device already when the read came was in no queue for it.
    if are_queues_known && waited.iter().any(|request| request.issued_ns > start) {
        times.set(Stage::BlockQueue, queue);
    }
    if first > start {
        times.set(Stage::Submit, first - start);
        covered.add(start, first);
    }
    let last = waited.iter().map(|request| clip(request.done_ns)).max().unwrap_or(end);
    let mut wakeup_ns = 0;
    let mut rest = (end - start.min(end)).saturating_sub(covered.length());
    if read.run_delay_ns != NOT_KNOWN {
        let wakeup = read.run_delay_ns.min(end.saturating_sub(last)).min(rest);
        times.set(Stage::Wakeup, wakeup);
        rest -= wakeup;
        wakeup_ns = wakeup;
    }
    times.set(Stage::Cache, rest);
    let spans =
        Spans { device: at_device, block_layer, first_queued_ns: first, last_done_ns: last, wakeup_ns };
    (times, Some(Box::new(spans)))
}

/// Since when a request that a kernel thread queued had been held back: the reader gave it to the block layer after the
/// last request that it is seen to queue itself, and before it is seen to wait. The few microseconds that it worked in
/// between count as held.
fn held_since(start: u64, waited: &[Waited]) -> u64 {
    let own = waited.iter().filter(|request| !request.is_held).filter_map(|request| request.queued_ns);
    own.filter(|queued| *queued >= start).max().unwrap_or(start)
}

#[cfg(test)]
mod tests {
    use pgiotrace_ebpf::Begun;
    use proptest::prelude::*;

    use super::*;

    fn read(start_ns: u64, end_ns: u64, run_delay_ns: u64) -> ReadRecord {
        ReadRecord {
            end_ns,
            run_delay_ns,
            begun: Begun { start_ns, ..Begun::default() },
            ..ReadRecord::default()
        }
    }

    fn request() -> impl Strategy<Value = Waited> {
        (prop::option::of(0_u64..400), 0_u64..400, 0_u64..400, any::<bool>()).prop_map(
            |(queued, queue, device, is_held)| {
                let issued_ns = queued.unwrap_or(100) + queue;
                Waited { queued_ns: queued, issued_ns, done_ns: issued_ns + device, is_held }
            },
        )
    }

    proptest! {
        #[test]
        fn the_stages_of_a_read_never_add_up_to_more_than_its_latency(
            start in 100_u64..600,
            latency in 0_u64..600,
            run_delay in prop::option::of(0_u64..2_000),
            staged in prop::option::of(1_u64..100),
            waited in prop::collection::vec(request(), 0..6),
        ) {
            let mut read = read(start, start + latency, run_delay.unwrap_or(NOT_KNOWN));
            read.begun.staged_ns = staged.unwrap_or(0);
            let whole = latency + staged.map_or(0, |staged| start - staged);
            let (times, _) = of(&read, &waited);
            prop_assert!(times.sum_ns() <= whole, "{times:?} of {whole}");
            if waited.iter().all(|request| request.queued_ns.is_some()) {
                prop_assert_eq!(times.sum_ns(), whole, "all was measured: {:?}", times);
            }
        }
    }

    #[test]
    fn a_moment_in_which_one_request_waits_and_another_is_served_is_the_devices() {
        let waited = |queued, issued_ns, done_ns| Waited {
            queued_ns: Some(queued),
            issued_ns,
            done_ns,
            is_held: false,
        };
        let (times, spans) = of(&read(0, 100, 0), &[waited(10, 20, 60), waited(10, 50, 90)]);
        assert_eq!(times.get(Stage::Device), Some(70));
        assert_eq!(times.get(Stage::BlockQueue), Some(10));
        assert_eq!(times.get(Stage::Submit), Some(10));
        assert_eq!(times.get(Stage::Wakeup), Some(0));
        assert_eq!(times.get(Stage::Cache), Some(10));
        let spans = spans.expect("it waited");
        let stages = [5, 15, 30, 55, 89, 95].map(|moment| spans.at(moment));
        let expected =
            [Stage::Submit, Stage::BlockQueue, Stage::Device, Stage::Device, Stage::Device, Stage::Cache];
        assert_eq!(stages, expected);
    }

    #[test]
    fn without_the_queueing_event_the_queue_is_not_measured() {
        let waited = Waited { queued_ns: None, issued_ns: 20, done_ns: 60, is_held: false };
        assert_eq!(of(&read(0, 100, 0), &[waited]).0.get(Stage::BlockQueue), None);
    }

    #[test]
    fn waiting_for_a_processor_after_the_last_completion_is_wakeup() {
        let waited = Waited { queued_ns: Some(10), issued_ns: 20, done_ns: 60, is_held: false };
        assert_eq!(of(&read(0, 100, 30), &[waited]).0.get(Stage::Wakeup), Some(30));
        assert_eq!(of(&read(0, 100, 3_000), &[waited]).0.get(Stage::Wakeup), Some(40));
        assert_eq!(of(&read(0, 100, NOT_KNOWN), &[waited]).0.get(Stage::Wakeup), None);
    }
}
