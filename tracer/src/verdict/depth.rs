//! How many reads are on their way at once: `io-workers-saturated`, `prefetch-too-shallow`.

use super::{FEWEST_READS, Finding, Known, NotKnown, figures};
use crate::{
    model::{Backend, IoSummary},
    units,
};
use figures::{Figures, Times, Waits, ratio, sum};

/// Share of the time from which on io workers are busy. Of a queue with one server that is busy four fifths of the time, four
/// customers are there on average; with less, a new worker has little to do.
const BUSY: f64 = 0.8;
/// How long reads must have been queued, measured by how long their execution took: below it, another worker would
/// shorten the way of a read by less than a third.
const QUEUED: f64 = 0.5;
/// Share of the reads that owners executed themselves because the queue was full, from which on it is no accident.
const FALLBACKS: f64 = 0.05;
/// Most io workers that a server can have (`MAX_IO_WORKERS`, `src/include/storage/proc.h`).
const MOST_IO_WORKERS: u64 = 32;

/// Reads at once below which a device may have room. Whatever is faster than a single disk with a head (SSDs, striped and
/// network volumes) serves four requests at once in little more time than one.
const SHALLOW: f64 = 4.0;
/// How much of `effective_io_concurrency` must be reached for it to be what limits the depth; else something else does.
const REACHED: f64 = 0.5;
/// Share of the reads' time that must be with the device for their number to matter, and share of their reading that owners
/// must have been blocked.
const WAITING: f64 = 0.5;
/// Share of a session's reads that must be asynchronous for its depth to be theirs: the others are of what the planner needs
/// to know, and fast.
const MOSTLY: f64 = 0.5;
/// Share of them that found what the kernel had read ahead, from which on the kernel decides what the device has to do.
const READ_AHEAD: f64 = 0.5;
/// Queued for less than that part of their time of service: the device took requests when they came.
const ROOM: f64 = 0.5;

/// The io workers had work all the time, and reads waited for them.
pub(super) fn io_workers_saturated(figures: &Figures<'_>) -> Known<Option<Finding>> {
    let Some(io) = figures.method("worker") else { return Ok(None) };
    // What the filter leaves out keeps them busy, too.
    if figures.is_filtered() || io.reads < FEWEST_READS {
        return Err(NotKnown);
    }
    // Nor would more of them help where something else holds their reads back.
    figures.times?;
    let load = Load::of(figures, io)?;
    let is_queued = load.queued >= QUEUED * load.busy;
    let needed = load.needed();
    if load.busy_ratio() < BUSY
        || !(is_queued || load.fallback_share() >= FALLBACKS)
        || needed <= load.workers
    {
        return Ok(None);
    }
    let evidence = format!(
        "{} {} busy {} of the time in which there was something to read; reads waited for them for at least {} in all, \
         beside {} of execution, and {} found the queue full.",
        units::counted(load.workers, "io worker"),
        if load.workers == 1 { "was" } else { "were" },
        units::percent(load.busy_ratio()),
        units::duration(load.queued),
        units::duration(load.busy),
        units::count(load.fallbacks),
    );
    let more = if needed < MOST_IO_WORKERS { " or more" } else { ", the most there can be" };
    let advice = format!(
        "Set io_workers = {needed}{more} (it needs no restart): at least so many reads were on their way at once, by \
         Little's law."
    );
    let share = (load.queued / (load.queued + load.busy)).max(load.fallback_share());
    Ok(Some(Finding::of(share, evidence, advice)))
}

/// What the io workers had to do; times in microseconds.
struct Load {
    workers: u64,
    /// They executed reads, all together.
    busy: f64,
    /// Reads were in their queue, at least.
    queued: f64,
    /// There was something to do.
    active: f64,
    reads: u64,
    fallbacks: u64,
}

impl Load {
    fn of(figures: &Figures<'_>, io: &IoSummary) -> Known<Self> {
        let workers = &figures.report.io_workers;
        let owners = || figures.report.backends.iter().filter(|backend| backend.io.by_method.worker > 0);
        let reading = Waits::of(owners().map(|owner| &owner.io))?.reading();
        let bounds = owners().map(|owner| sum(owner.io.bounds_us.pg_queue_at_least.as_ref())).sum();
        let fallbacks: Option<u64> = owners().map(|owner| owner.io.queue_full_fallbacks).sum();
        let load = Self {
            workers: workers.len() as u64,
            busy: workers.iter().map(|worker| worker.busy_ratio).sum::<f64>() * figures.window_us(),
            queued: sum(io.stages_us.pg_queue.as_ref()).max(bounds),
            // Of several owners it may be less, so that workers are busier than they seem.
            active: reading.min(figures.window_us()),
            reads: io.reads,
            fallbacks: fallbacks.ok_or(NotKnown)?,
        };
        if load.workers > 0 && load.active > 0.0 { Ok(load) } else { Err(NotKnown) }
    }

    fn busy_ratio(&self) -> f64 {
        // Reads that began before the trace make it more than the whole, by little.
        (self.busy / (self.workers as f64 * self.active)).min(1.0)
    }

    fn fallback_share(&self) -> f64 {
        ratio(self.fallbacks, self.fallbacks + self.reads)
    }

    /// How many workers would do. Little's law: reads there at once = the time that they were there, by the time that passed.
    /// What found the queue full would have been executed by a worker, as the others were.
    fn needed(&self) -> u64 {
        let each = self.busy / self.reads as f64;
        let at_once = (self.busy + self.queued + each * self.fallbacks as f64) / self.active;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a mean number of reads is positive, and clipped"
        )]
        let needed = at_once.ceil().min(MOST_IO_WORKERS as f64) as u64;
        needed
    }
}

/// Scans had few reads on their way at once, waited for each, and the device had room for more.
pub(super) fn prefetch_too_shallow(figures: &Figures<'_>) -> Known<Option<Finding>> {
    let set = figures.number("effective_io_concurrency")?;
    if figures.report.target.io_method.as_deref().ok_or(NotKnown)? == "sync" {
        return Ok(None);
    }
    let all = figures.waits?.exposed;
    let scans: Vec<Scan<'_>> = figures.sessions().filter_map(|session| Scan::of(session, set)).collect();
    let shallow = scans.iter().filter(|scan| scan.depth() < SHALLOW);
    let exposed: f64 = shallow.clone().map(|scan| scan.waits.exposed).sum();
    let longest = shallow.max_by(|a, b| a.waits.exposed.total_cmp(&b.waits.exposed));
    let (Some(scan), true) = (longest, has_room(figures)) else { return Ok(None) };
    let evidence = format!(
        "Process {} had {:.1} reads with the device at once, waited for {} of the time it read, and the device had room; \
         effective_io_concurrency is {set}.",
        scan.session.pid,
        scan.depth(),
        units::percent(scan.waits.exposed_share()),
    );
    let advice = if scan.depth() >= REACHED * set as f64 {
        "Raise effective_io_concurrency (16 is the default; more for network volumes), for the session, the database or the \
         tablespace."
    } else {
        "Look for what keeps the depth below effective_io_concurrency: most likely how many buffers a session may pin, which \
         is shared_buffers divided by the connections that there may be."
    };
    Ok(Some(Finding::of(if all > 0.0 { exposed / all } else { 0.0 }, evidence, advice)))
}

/// A session that scanned: its reads could have been prefetched, and most of their time is with the device.
struct Scan<'a> {
    session: &'a Backend,
    waits: Waits,
}

impl<'a> Scan<'a> {
    fn of(session: &'a Backend, set: u64) -> Option<Self> {
        let io = &session.io;
        let ahead = io.by_method.worker + io.by_method.io_uring;
        // Nothing is prefetched at 0: a read of many blocks tells that it is a scan's.
        let is_scan = if set == 0 {
            io.reads >= FEWEST_READS && io.blocks >= 2 * io.reads
        } else {
            ahead >= FEWEST_READS && ratio(ahead, io.reads) >= MOSTLY
        };
        let times = Times::of([io]).ok()?;
        let waits = Waits::of([io]).ok()?;
        let is_slow = times.share(times.device) >= WAITING && waits.exposed_share() >= WAITING;
        let is_read_ahead = io.readahead_hits.is_none_or(|hits| ratio(hits, io.reads) >= READ_AHEAD);
        (is_scan && is_slow && !is_read_ahead).then_some(Self { session, waits })
    }

    /// Reads at once, while there were any: their time, by the time in which there were any (Little's law).
    fn depth(&self) -> f64 {
        sum(self.session.io.latency_us.as_ref()) / self.waits.reading()
    }
}

/// Whether the device that the server uses most took requests as they came, and had few of them.
fn has_room(figures: &Figures<'_>) -> bool {
    figures.busiest_device().is_some_and(|device| {
        let (queued, served) = (sum(device.block_queue_us.as_ref()), sum(device.device_us.as_ref()));
        queued < ROOM * served
            && (device.depth.mean < SHALLOW || device.depth.mean < device.depth.max as f64 / 2.0)
    })
}

#[cfg(test)]
mod tests {
    use super::super::{
        of,
        samples::{Sample, dist, has},
    };
    use crate::model::{FilterReport, StatReport};

    const SATURATED: &str = "io-workers-saturated";
    const SHALLOW: &str = "prefetch-too-shallow";

    /// A second of reading by one worker of `workers`, busy for that share of it; reads queued for that many seconds.
    fn workers(workers: usize, busy: f64, queued: f64, fallbacks: u64) -> StatReport {
        let mut report = Sample::of("worker", 1_000, 1_000.0).stages(0.0, 0.0, 0.9).report();
        report.io_workers = vec![report.io_workers[0].clone(); workers];
        for worker in &mut report.io_workers {
            worker.busy_ratio = busy / report.window.duration_s;
        }
        let io = &mut report.backends[0].io;
        io.bounds_us.pg_queue_at_least = (queued > 0.0).then(|| dist(1_000, queued * 1e3));
        io.queue_full_fallbacks = Some(fallbacks);
        report
    }

    #[test]
    fn workers_are_saturated_that_are_busy_while_reads_wait() {
        assert!(has(&workers(1, 0.81, 3.0, 0), SATURATED));
        assert!(!has(&workers(1, 0.79, 3.0, 0), SATURATED), "not busy");
        assert!(has(&workers(2, 1.0, 1.01, 0), SATURATED));
        assert!(!has(&workers(2, 1.0, 0.99, 0), SATURATED), "nobody waits");
        assert!(has(&workers(1, 1.0, 0.0, 60), SATURATED), "the queue was full");
        assert!(!has(&workers(1, 1.0, 0.0, 50), SATURATED));
    }

    #[test]
    fn the_number_of_workers_that_would_do_is_said() {
        let advice = |report: &StatReport| {
            of(report).into_iter().find(|verdict| verdict.rule == SATURATED).map(|verdict| verdict.advice)
        };
        let text = advice(&workers(1, 1.0, 3.5, 0)).expect("it is saturated");
        assert!(
            text.starts_with("Set io_workers = 5 or more (it needs no restart): at least so many reads"),
            "{text}"
        );
        let text = advice(&workers(1, 1.0, 500.0, 0)).expect("it is saturated");
        assert!(
            text.starts_with("Set io_workers = 32, the most there can be (it needs no restart): "),
            "{text}"
        );
    }

    #[test]
    fn a_filter_or_unknown_figures_leave_the_workers_alone() {
        let saturated = workers(1, 1.0, 3.0, 0);
        let mut filtered = saturated.clone();
        filtered.filter = Some(FilterReport::default());
        assert!(!has(&filtered, SATURATED));
        let mut unknown = saturated.clone();
        unknown.backends[0].io.queue_full_fallbacks = None;
        assert!(!has(&unknown, SATURATED));
        let mut none = saturated;
        none.io_workers.clear();
        assert!(!has(&none, SATURATED));
    }

    /// A scan with that many reads at once under that setting, blocked for that share of its reading.
    fn scan(depth: f64, set: &str, exposed: f64, device: f64) -> StatReport {
        let sample = Sample::of("io_uring", 1_000, 1_000.0).stages(0.0, 0.0, device);
        let mut report = sample
            .exposed(exposed / depth, (1.0 - exposed) / depth)
            .setting("effective_io_concurrency", set)
            .report();
        report.devices[0].depth.mean = depth;
        report
    }

    #[test]
    fn prefetching_is_too_shallow_below_four_at_once() {
        assert!(has(&scan(1.0, "1", 1.0, 0.9), SHALLOW));
        assert!(has(&scan(3.9, "4", 1.0, 0.9), SHALLOW));
        assert!(!has(&scan(4.1, "4", 1.0, 0.9), SHALLOW), "deep enough");
    }

    #[test]
    fn the_setting_is_blamed_only_where_it_is_reached() {
        let blames =
            |set| of(&scan(3.9, set, 1.0, 0.9))[0].advice.starts_with("Raise effective_io_concurrency");
        assert!(blames("7"));
        assert!(!blames("8"));
    }

    #[test]
    fn where_the_kernel_reads_ahead_the_depth_is_the_kernels() {
        let with = |hits| {
            let mut report = scan(1.0, "1", 1.0, 0.9);
            report.backends[0].io.readahead_hits = hits;
            has(&report, SHALLOW)
        };
        assert!(with(Some(499)));
        assert!(!with(Some(501)));
        assert!(!with(None));
    }

    #[test]
    fn depth_matters_for_those_who_wait_for_a_device() {
        assert!(has(&scan(1.0, "1", 0.51, 0.51), SHALLOW));
        assert!(!has(&scan(1.0, "1", 0.49, 0.51), SHALLOW), "hidden");
        assert!(!has(&scan(1.0, "1", 0.51, 0.49), SHALLOW), "not with the device");
        let mut full = scan(1.0, "1", 1.0, 0.9);
        full.devices[0].block_queue_us = full.devices[0].device_us;
        assert!(!has(&full, SHALLOW), "the device had no room");
        let mut busy = scan(1.0, "1", 1.0, 0.9);
        (busy.devices[0].depth.mean, busy.devices[0].depth.max) = (20.0, 32);
        assert!(!has(&busy, SHALLOW), "others keep the device busy");
        busy.devices[0].depth.max = 64;
        assert!(has(&busy, SHALLOW), "it had as many before");
    }

    #[test]
    fn without_prefetching_big_reads_are_scans() {
        let with = |blocks| {
            let sample = Sample::of("sync", 1_000, 5_000.0).stages(0.0, 0.0, 0.9).blocks(blocks);
            let mut report = sample.setting("effective_io_concurrency", "0").report();
            report.target.io_method = Some("worker".to_owned());
            report
        };
        assert!(has(&with(2), SHALLOW));
        assert!(!has(&with(1), SHALLOW));
        let mut sync = with(16);
        sync.target.io_method = Some("sync".to_owned());
        assert!(!has(&sync, SHALLOW), "no setting would help");
        let mut unknown = with(16);
        unknown.target.settings.remove("effective_io_concurrency");
        assert!(!has(&unknown, SHALLOW));
    }
}
