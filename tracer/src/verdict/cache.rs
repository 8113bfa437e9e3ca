//! The page cache: `served-from-page-cache`, `io_uring-copies-inline`.

use super::{FEWEST_READS, Finding, Known, NotKnown, figures};
use crate::{
    model::{BySource, Severity},
    units,
};
use figures::{Figures, Times, ratio, sources};

/// Share of reads from which on nearly all are alike.
const NEARLY_ALL: f64 = 0.8;
/// Share of the time that devices and their queues may have where reads are said to come from the page cache: a few reads
/// from a disk take longer than thousands of copies.
const MOST_DEVICE: f64 = 0.1;
/// Share of io_uring's time from which on it is the copying that takes it.
const COPYING: f64 = 0.5;

/// Nearly all reads found their bytes in the kernel's page cache, from before the trace or before they were evicted from
/// `shared_buffers`, not because the kernel had read ahead for this very scan.
pub(super) fn served_from_page_cache(figures: &Figures<'_>) -> Known<Option<Finding>> {
    let times = figures.times?;
    let methods = || figures.report.methods.iter().map(|totals| &totals.io).filter(|io| io.reads > 0);
    let BySource { cache, device, mixed, unknown: _ } = sources(methods())?;
    let ahead: Option<u64> = methods().map(|io| io.readahead_hits).sum();
    let (kept, reads) = (cache.saturating_sub(ahead.ok_or(NotKnown)?), cache + device + mixed);
    let waiting = times.share(times.block_queue + times.device);
    if ratio(kept, reads) < NEARLY_ALL || waiting > MOST_DEVICE {
        return Ok(None);
    }
    let evidence = format!(
        "{} of {} found their bytes in the kernel's page cache without any device; copying them took {} of the reads' \
         time.",
        units::percent(ratio(kept, reads)),
        units::counted(reads, "read"),
        units::percent(times.share(times.cache)),
    );
    let now = figures.report.target.settings.get("shared_buffers");
    let advice = format!(
        "Do not take these figures for the disk's (for those, empty the caches first); a larger shared_buffers{} saves the \
         copies.",
        now.map(|now| format!(" (now {now})")).unwrap_or_default(),
    );
    Ok(Some(Finding::of(times.share(times.cache), evidence, advice).at_most(Severity::Info)))
}

/// io_uring's reads were done by the owner itself, inside the system call that submits them, and copying is what took the
/// time: asynchronous in name only.
pub(super) fn io_uring_copies_inline(figures: &Figures<'_>) -> Known<Option<Finding>> {
    let Some(io) = figures.method("io_uring") else { return Ok(None) };
    if io.reads < FEWEST_READS {
        return Err(NotKnown);
    }
    let (times, executors) = (Times::of([io])?, io.by_executor.ok_or(NotKnown)?);
    let BySource { cache, device, mixed, unknown: _ } = io.by_source.ok_or(NotKnown)?;
    let copying = times.submit + times.cache;
    let (inline, cached) = (ratio(executors.owner, io.reads), ratio(cache, cache + device + mixed));
    if inline < NEARLY_ALL || cached < NEARLY_ALL || times.share(copying) < COPYING {
        return Ok(None);
    }
    let evidence = format!(
        "{} of {} through io_uring were copied from the page cache by the backend itself while it submitted them: {} that \
         no computation overlapped.",
        units::percent(inline.min(cached)),
        units::counted(io.reads, "read"),
        units::duration(copying),
    );
    let advice = "Let others copy (io_method = worker), or keep what is read often in a larger shared_buffers; \
                  effective_io_concurrency changes nothing here.";
    Ok(Some(Finding::of(copying / figures.times?.all, evidence, advice).at_most(Severity::Warn)))
}

#[cfg(test)]
mod tests {
    use super::super::samples::{Sample, forget_stages, has};
    use crate::model::{ByExecutor, BySource, StatReport};

    fn cached(method: &'static str, cache: u64, ahead: u64) -> StatReport {
        let mut report = Sample::of(method, 1_000, 20.0).stages(0.0, 0.0, 0.05).report();
        let io = &mut report.methods[0].io;
        io.by_source = Some(BySource { cache, device: 1_000 - cache, mixed: 0, unknown: 0 });
        io.readahead_hits = Some(ahead);
        report
    }

    #[test]
    fn the_page_cache_serves_from_four_in_five_reads_on() {
        let rule = "served-from-page-cache";
        assert!(has(&cached("sync", 810, 0), rule));
        assert!(!has(&cached("sync", 790, 0), rule));
        assert!(!has(&cached("sync", 1_000, 210), rule), "the kernel had read ahead");
        assert!(has(&cached("sync", 1_000, 190), rule));
        let mut unknown = cached("sync", 1_000, 0);
        unknown.methods[0].io.by_source = None;
        assert!(!has(&unknown, rule));
    }

    #[test]
    fn few_reads_from_a_device_may_take_most_of_the_time() {
        let with = |device| {
            let mut report = Sample::of("sync", 1_000, 20.0).stages(0.0, 0.0, device).report();
            report.methods[0].io.by_source = Some(BySource { cache: 990, device: 10, mixed: 0, unknown: 0 });
            has(&report, "served-from-page-cache")
        };
        assert!(with(0.09));
        assert!(!with(0.11));
    }

    #[test]
    fn io_uring_copies_inline_where_the_owner_does_it_and_it_takes_the_time() {
        let rule = "io_uring-copies-inline";
        let with = |owner, cache, device| {
            let mut report = Sample::of("io_uring", 1_000, 20.0).stages(0.0, 0.0, device).report();
            let io = &mut report.methods[0].io;
            io.by_executor = Some(ByExecutor { owner, io_worker: 0, iou_wrk: 1_000 - owner });
            io.by_source = Some(BySource { cache, device: 1_000 - cache, mixed: 0, unknown: 0 });
            report
        };
        assert!(has(&with(810, 810, 0.4), rule));
        assert!(!has(&with(790, 1_000, 0.0), rule), "kernel threads did it");
        assert!(!has(&with(1_000, 790, 0.0), rule), "a device served it");
        assert!(!has(&with(1_000, 1_000, 0.51), rule), "it waited for the device's readahead");
        assert!(!has(&cached("worker", 1_000, 0), rule));
        let mut unknown = with(1_000, 1_000, 0.0);
        unknown.methods[0].io.by_executor = None;
        assert!(!has(&unknown, rule));
        let mut unknown = with(1_000, 1_000, 0.0);
        forget_stages(&mut unknown);
        assert!(!has(&unknown, rule));
    }
}
