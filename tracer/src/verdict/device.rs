//! The block layer and the devices: `device-bound`, `throttled`, `noisy-neighbour`.

use super::{Finding, Known, figures};
use crate::{
    model::{Device, Dist},
    units,
};
use figures::{Figures, Times, device_name, ratio, server_time};

/// Share of the reads' time from which on the device has most of it.
const DEVICE_SHARE: f64 = 0.5;
/// Share of their reading that owners must have been blocked: what is hidden behind computation costs them nothing.
const LEAST_EXPOSED: f64 = 0.5;

/// Share of the reads' time from which on the queue has most of it.
const QUEUE_SHARE: f64 = 0.5;
/// How much longer reads must be queued than served: a device that is merely busy has a queue of about its own time of
/// service, since it takes many requests at once (`nr_requests` is 64 and more); what is held back has many times as much.
const QUEUE_TO_DEVICE: f64 = 2.0;

/// Share of a device's bytes from which on others may slow it down: a fifth of a disk's throughput is more than its
/// figures differ from one run to the next.
const NOISY_BYTES: f64 = 0.2;
/// Share of its requests, however short: half of all turns.
const NOISY_REQUESTS: f64 = 0.5;
/// Mean depth from which on a device is at work enough to slow anybody down: a request in a tenth of the time.
const AT_WORK: f64 = 0.1;
/// Share of the reads' time in the block layer and with the device from which on it matters how fast these are.
const WAITING: f64 = 0.25;
/// Share of the server's time with devices that the shared one must have had.
const SERVER_PART: f64 = 0.25;

/// Most of the reads' time is with the device, and their owners wait for it.
pub(super) fn device_bound(figures: &Figures<'_>) -> Known<Option<Finding>> {
    let times = figures.times?;
    let share = times.share(times.device);
    if share < DEVICE_SHARE || figures.waits?.exposed_share() < LEAST_EXPOSED {
        return Ok(None);
    }
    let device = figures.busiest_device();
    let name = device.map_or("the device", device_name);
    let evidence = format!(
        "{} of the reads' time, {} of {}, was with {name}{}.",
        units::percent(share),
        units::duration(times.device),
        units::duration(times.all),
        device.and_then(speed).unwrap_or_default(),
    );
    let advice = "Read less of it (an index, fewer columns' worth of table, a larger shared_buffers), or move it to a \
                  faster device.";
    Ok(Some(Finding::of(share, evidence, advice)))
}

/// `, which took 5.31 ms for half of its requests and 9.12 ms for one in a hundred, 1.02 at once on average`.
fn speed(device: &Device) -> Option<String> {
    let Dist { p50, p99, .. } = device.device_us?;
    Some(format!(
        ", which took {} for half of its requests and up to {} for 99 %, {:.1} at once on average",
        units::duration(p50),
        units::duration(p99),
        device.depth.mean,
    ))
}

/// The block layer held the reads back, much longer than the device needed for them.
pub(super) fn throttled(figures: &Figures<'_>) -> Known<Option<Finding>> {
    let times = figures.times?;
    let Times { block_queue, device, .. } = times;
    let share = times.share(block_queue);
    if share < QUEUE_SHARE || block_queue < QUEUE_TO_DEVICE * device {
        return Ok(None);
    }
    let evidence = format!(
        "{} of the reads' time, {} of {}, was in the block layer's queue, before any device saw them; the device then \
         needed {}.",
        units::percent(share),
        units::duration(block_queue),
        units::duration(times.all),
        units::duration(device),
    );
    let advice = "Look for a limit to the server's reads: its cgroup's io.max or blkio.throttle, the I/O scheduler, the \
                  device's nr_requests.";
    Ok(Some(Finding::of(share, evidence, advice)))
}

/// Other programs had a large share of a device that the server waited for.
pub(super) fn noisy_neighbour(figures: &Figures<'_>) -> Known<Option<Finding>> {
    let times = figures.times?;
    let waiting = times.share(times.block_queue + times.device);
    let all: f64 = figures.report.devices.iter().map(server_time).sum();
    let shared = figures.report.devices.iter().filter(|device| server_time(device) >= SERVER_PART * all);
    let noisy = shared.filter_map(|device| Some((device, others(device)?)));
    let Some((device, others)) = noisy.max_by(|(_, a), (_, b)| a.most().total_cmp(&b.most())) else {
        return Ok(None);
    };
    if waiting < WAITING {
        return Ok(None);
    }
    let evidence = format!(
        "{} of the requests to {} and {} of the bytes were other programs', and the server's reads spent {} of their time \
         in the block layer and with devices.",
        units::percent(others.requests),
        device_name(device),
        units::percent(others.bytes),
        units::percent(waiting),
    );
    let advice =
        "Find who reads there (biosnoop, iotop), and move it, slow it down or let it run at another time.";
    Ok(Some(Finding::of(waiting * others.most(), evidence, advice)))
}

/// Others' shares of a device.
struct Others {
    requests: f64,
    bytes: f64,
}

impl Others {
    fn most(&self) -> f64 {
        self.requests.max(self.bytes)
    }
}

/// What others had of a device, where that may explain the server's latencies: the server used it too, others had much of
/// it, and it was at work for a good part of the time.
fn others(device: &Device) -> Option<Others> {
    let users = device.users;
    let requests = ratio(users.other_requests, device.requests);
    let bytes = ratio(users.other_bytes, device.bytes);
    let is_at_work = device.depth.mean >= AT_WORK;
    let is_much = bytes >= NOISY_BYTES || requests >= NOISY_REQUESTS;
    (users.server_requests > 0 && is_at_work && is_much).then_some(Others { requests, bytes })
}

#[cfg(test)]
mod tests {
    use super::super::samples::{Sample, forget_stages, forget_waits, has};

    const RULE: &str = "device-bound";

    #[test]
    fn a_device_binds_from_half_of_the_time_on() {
        let with = |device| Sample::of("sync", 1_000, 5_000.0).stages(0.0, 0.0, device).report();
        assert!(has(&with(0.51), RULE));
        assert!(!has(&with(0.49), RULE));
        let text = &super::super::of(&with(0.51))[0].evidence;
        assert!(
            text.starts_with("51 % of the reads' time, 2.55 s of 5.00 s, was with vda, which took"),
            "{text}"
        );
    }

    #[test]
    fn what_is_hidden_behind_computation_does_not_bind() {
        let with = |exposed| {
            let sample = Sample::of("io_uring", 1_000, 5_000.0).stages(0.0, 0.0, 0.95);
            // Eight at once.
            sample.exposed(exposed / 8.0, (1.0 - exposed) / 8.0).report()
        };
        assert!(has(&with(0.51), RULE));
        assert!(!has(&with(0.49), RULE));
    }

    #[test]
    fn without_stages_or_waits_nothing_is_said_of_devices() {
        let report = Sample::of("sync", 1_000, 5_000.0).stages(0.0, 0.0, 0.95).report();
        for forget in [forget_stages, forget_waits] {
            let mut report = report.clone();
            forget(&mut report);
            assert!(!has(&report, RULE));
        }
        // A fifth of the time is in no stage.
        assert!(!has(
            &Sample::of("sync", 1_000, 5_000.0).uncovered(0.2).stages(0.0, 0.0, 0.7).report(),
            RULE
        ));
    }

    #[test]
    fn held_back_is_what_is_queued_much_longer_than_served() {
        let with = |queue, device| Sample::of("sync", 1_000, 5_000.0).stages(0.0, queue, device).report();
        assert!(has(&with(0.51, 0.25), "throttled"));
        assert!(!has(&with(0.49, 0.01), "throttled"), "not most of the time");
        assert!(!has(&with(0.6, 0.31), "throttled"), "a busy device");
        assert!(has(&with(0.6, 0.29), "throttled"));
    }

    #[test]
    fn a_neighbour_is_noisy_on_a_device_that_the_server_waits_for() {
        let with = |device: f64, bytes: u64, requests: u64| {
            let mut report = Sample::of("sync", 1_000, 5_000.0).stages(0.0, 0.0, device).report();
            let shared = &mut report.devices[0];
            shared.users.other_bytes = shared.bytes * bytes / 100;
            shared.users.other_requests = shared.requests * requests / 100;
            report
        };
        let rule = "noisy-neighbour";
        assert!(has(&with(0.9, 21, 0), rule));
        assert!(!has(&with(0.9, 19, 49), rule));
        assert!(has(&with(0.9, 0, 51), rule), "short, but many");
        assert!(!has(&with(0.24, 90, 90), rule), "the server's reads hardly came there");
        assert!(has(&with(0.26, 90, 90), rule));
        let mut idle = with(0.9, 90, 90);
        idle.devices[0].depth.mean = 0.09;
        assert!(!has(&idle, rule), "nobody waits for an idle device");
        let mut elsewhere = with(0.9, 0, 0);
        let mut other = elsewhere.devices[0].clone();
        other.users.server_requests = 1;
        other.users.other_bytes = other.bytes;
        elsewhere.devices.push(other);
        assert!(!has(&elsewhere, rule), "the server waited for another one");
    }
}
