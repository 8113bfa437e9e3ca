//! The slow disk: it takes as long as it says, says what it served, and leaves nothing.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use pgiotrace_tests::{
    Cluster, FileSystem, Latency, PgInstall, Served, SlowDisk, Tracer, drop_caches,
    ledger::{complaints, count, report_of, traced_blocks},
    quantile_of, scan, sweep_stale, victim, wait_until,
};
use rustix::fs::{Mode, OFlags, open};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const TABLE: &str = "on_slow_disk";
/// How often times are compared until they agree.
const ATTEMPTS: u32 = 5;
/// Of reads of the table. In the bursts of a scan a request's way through the loop driver takes 50 to 300 µs, which the
/// tracer rightly counts and the disk's log does not: 2 % are to be more than that.
const LATENCY: Duration = Duration::from_millis(20);
const BLOCK: usize = 4096;
/// How much longer than its latency a read may be served, but for a few: the host of a virtual machine takes a processor
/// away for milliseconds at times.
const SLACK: Duration = Duration::from_millis(10);

/// One test at a time: they measure times, on few processors.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn small_disk() -> Result<SlowDisk> {
    SlowDisk::builder().size(64 * MIB).start()
}

/// A file of that many blocks on a disk, written back, and opened so that each read is a request.
fn file_for_direct_reads(disk: &SlowDisk, blocks: usize) -> Result<File> {
    let path = disk.mount_point().join("file");
    fs::write(&path, vec![1; blocks * BLOCK])?;
    drop_caches()?;
    let file = File::from(open(&path, OFlags::RDONLY | OFlags::DIRECT, Mode::empty())?);
    // Brings what the file system has to know of the file.
    read_block(&file, 0)?;
    disk.clear_log();
    Ok(file)
}

/// Reads one block directly; how long it took.
fn read_block(file: &File, number: usize) -> Result<Duration> {
    use std::os::unix::fs::FileExt as _;
    let mut space = [0; 2 * BLOCK];
    // Direct reads want aligned memory.
    let start = space.as_ptr().align_offset(BLOCK);
    let begin = Instant::now();
    file.read_exact_at(&mut space[start..start + BLOCK], (number * BLOCK) as u64)?;
    ensure!(space[start] == 1, "block {number} has not what was written");
    Ok(begin.elapsed())
}

/// Times of service in microseconds, sorted.
fn service_us(log: &[Served]) -> Vec<f64> {
    let mut all: Vec<_> = log.iter().map(|read| read.service_ns() as f64 / 1e3).collect();
    all.sort_by(f64::total_cmp);
    all
}

#[test]
fn a_constant_latency_is_that_of_each_read() -> Result<()> {
    const READS: usize = 100;
    let _alone = alone();
    let latency = Duration::from_millis(5);
    for file_system in [FileSystem::Ext4, FileSystem::Xfs] {
        let disk = SlowDisk::builder().size(512 * MIB).file_system(file_system).start()?;
        let file = file_for_direct_reads(&disk, READS)?;
        disk.set_latency(Latency::Constant(latency));
        let times = (0..READS).map(|number| read_block(&file, number)).collect::<Result<Vec<_>>>()?;

        let log = disk.log();
        let (all, took) = (service_us(&log), times.iter().sum::<Duration>());
        println!(
            "{file_system:?}: {} reads served in {:.0} to {:.0} µs, mean {:.1} µs; the reader's mean {:.1} µs",
            log.len(),
            all[0],
            all[all.len() - 1],
            all.iter().sum::<f64>() / all.len() as f64,
            took.as_secs_f64() * 1e6 / READS as f64,
        );
        assert_eq!(log.len(), READS, "{log:#?}");
        assert!(log.iter().all(|read| read.length as usize == BLOCK));
        let (least, most) = (latency.as_secs_f64() * 1e6, (latency + SLACK).as_secs_f64() * 1e6);
        assert!(all[0] >= least, "{log:#?}");
        assert!(quantile_of(&all, 0.95) <= most, "{log:#?}");
        // Not the logged time: the log's end is stamped after the answer, and the reader may have it by then.
        assert!(times.iter().all(|took| *took >= latency), "{times:#?}");
        // One after the other, each at its place.
        let offsets: Vec<_> = log.iter().map(|read| read.offset - log[0].offset).collect();
        assert_eq!(offsets, (0..READS).map(|number| (number * BLOCK) as u64).collect::<Vec<_>>());
        assert!(log.windows(2).all(|pair| pair[0].end_ns <= pair[1].start_ns));
    }
    Ok(())
}

#[test]
fn a_long_request_is_one_read() -> Result<()> {
    let _alone = alone();
    let disk = small_disk()?;
    let path = disk.mount_point().join("long");
    fs::write(&path, vec![1; 16 << 20])?;
    drop_caches()?;
    disk.clear_log();
    let before = requests_of(&disk)?;
    fs::read(&path)?;
    let (requests, log) = (requests_of(&disk)? - before, disk.log());
    let longest = log.iter().map(|read| read.length).max().unwrap_or_default();
    println!(
        "{requests} requests of the loop device's, {} reads, the longest {} KiB",
        log.len(),
        longest >> 10
    );
    assert_eq!(log.len() as u64, requests);
    Ok(())
}

/// Read requests that the loop device has completed, as the kernel counts them.
fn requests_of(disk: &SlowDisk) -> Result<u64> {
    let (major, minor) = disk.device();
    let stat = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat"))?;
    stat.split_whitespace()
        .next()
        .and_then(|reads| reads.parse().ok())
        .context("the device has no statistics")
}

#[test]
fn reads_are_served_side_by_side_up_to_the_limit() -> Result<()> {
    const READERS: usize = 16;
    let _alone = alone();
    let latency = Duration::from_millis(50);
    for (limit, least, most) in [(usize::MAX, 1, 4), (4, 4, 12)] {
        let disk = SlowDisk::builder().size(64 * MIB).concurrency(limit).start()?;
        let file = file_for_direct_reads(&disk, READERS)?;
        disk.set_latency(Latency::Constant(latency));
        let begin = Instant::now();
        thread::scope(|scope| {
            let readers: Vec<_> = (0..READERS)
                .map(|number| {
                    scope.spawn({
                        let file = &file;
                        move || read_block(file, number)
                    })
                })
                .collect();
            readers.into_iter().try_for_each(|reader| reader.join().expect("a reader panicked").map(drop))
        })?;
        let took = begin.elapsed();
        println!("{READERS} reads of {latency:?}, {limit} at once: {took:?}");
        assert!((least * latency..most * latency).contains(&took), "{took:?} with {limit} at once");
    }
    Ok(())
}

#[test]
fn the_log_has_the_quantiles_that_were_set() -> Result<()> {
    const READS: usize = 600;
    let _alone = alone();
    let disk = small_disk()?;
    let file = file_for_direct_reads(&disk, READS)?;
    let ms = Duration::from_millis;
    let measure = |latency| -> Result<Vec<f64>> {
        disk.set_latency(latency);
        disk.clear_log();
        (0..READS).try_for_each(|number| read_block(&file, number).map(drop))?;
        Ok(service_us(&disk.log()))
    };

    let two = measure(Latency::TwoPoint { fast: ms(1), slow: ms(20), slow_share: 0.1 })?;
    let slow = two.iter().filter(|us| **us >= 20_000.0).count();
    println!(
        "two-point: p50 {:.0} µs, p95 {:.0} µs, {slow} slow",
        quantile_of(&two, 0.5),
        quantile_of(&two, 0.95)
    );
    assert!((1_000.0..3_000.0).contains(&quantile_of(&two, 0.5)));
    assert!((20_000.0..30_000.0).contains(&quantile_of(&two, 0.95)));
    assert!((40..=80).contains(&slow), "{slow} of {READS} are slow, not about 60");

    let tail = measure(Latency::HeavyTailed { median: ms(1), p99: ms(20) })?;
    let (p50, p90, p99) = (quantile_of(&tail, 0.5), quantile_of(&tail, 0.9), quantile_of(&tail, 0.99));
    println!("heavy tail: p50 {p50:.0} µs, p90 {p90:.0} µs, p99 {p99:.0} µs, max {:.0} µs", tail[READS - 1]);
    // Of a few hundred values; the model's own test looks closer.
    assert!((900.0..3_000.0).contains(&p50), "p50 {p50}");
    // exp(1.2816 σ) of a log-normal distribution with that p99.
    assert!((4_200.0..9_000.0).contains(&p90), "p90 {p90}");
    assert!((10_000.0..40_000.0).contains(&p99), "p99 {p99}");
    Ok(())
}

/// What the disk says of a scan, and what the tracer says.
struct Figures {
    requests: usize,
    mean: f64,
    p50: f64,
    p90: f64,
    p99: f64,
    max: f64,
}

impl Figures {
    fn of_log(log: &[Served]) -> Self {
        let sorted = service_us(log);
        let of = |share| quantile_of(&sorted, share);
        let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
        Self { requests: log.len(), mean, p50: of(0.5), p90: of(0.9), p99: of(0.99), max: of(1.0) }
    }

    fn of_device(entry: &Value) -> Result<Self> {
        let of = |key: &str| {
            entry["device_us"][key].as_f64().with_context(|| format!("the device has no device_us.{key}"))
        };
        let requests = usize::try_from(count(entry, "/requests")?)?;
        let (p50, p90, p99) = (of("p50")?, of("p90")?, of("p99")?);
        Ok(Self { requests, mean: of("mean")?, p50, p90, p99, max: of("max")? })
    }

    fn print(&self, whose: &str) {
        let Self { requests, mean, p50, p90, p99, max } = self;
        println!(
            "  {whose:<6} {requests} requests, µs: mean {mean:.0}, p50 {p50:.0}, p90 {p90:.0}, p99 {p99:.0}, max {max:.0}"
        );
    }

    /// Whether means are as good as the same, and medians as far as a histogram with buckets 1/16 wide can tell.
    fn agrees_with(&self, truth: &Self) -> bool {
        (self.mean - truth.mean).abs() <= (truth.mean * 0.02).max(100.0)
            && (self.p50 - truth.p50).abs() <= truth.p50 / 16.0 + 100.0
    }
}

/// Scans a cold table on the disk under the tracer; the figures of the disk's log, and those of the tracer.
fn cold_scan(cluster: &Cluster, disk: &SlowDisk) -> Result<(Figures, Figures)> {
    cluster.drop_caches()?;
    let mut client = cluster.connect("postgres")?;
    let tracer = Tracer::stat(cluster).start()?;
    disk.wait_idle()?;
    disk.clear_log();
    let blocks = scan::scan(&mut client, TABLE)?;
    // What the kernel has read ahead, too.
    disk.wait_idle()?;
    let log = disk.log();
    let report = report_of(&tracer.interrupt()?)?;

    assert!(complaints(&report).is_empty(), "{:#?}", complaints(&report));
    assert_eq!(traced_blocks(&report, TABLE), blocks);
    let entry = scan::device(&report, disk)?;
    assert_eq!(count(entry, "/requests")?, log.len() as u64);
    assert_eq!(count(entry, "/bytes")?, log.iter().map(|read| u64::from(read.length)).sum::<u64>());
    Ok((Figures::of_log(&log), Figures::of_device(entry)?))
}

/// Holds the tracer's times of the device against the disk's log.
fn agrees_with_the_log(file_system: FileSystem, method: &str, latency: Latency) -> Result<()> {
    let _alone = alone();
    let disk = SlowDisk::builder().size(512 * MIB).file_system(file_system).start()?;
    let cluster = Cluster::builder(PgInstall::v18()?)
        .io_method(method)
        .shared_buffers("16MB")
        .slow_disk(&disk)
        .start()?;
    let mut client = cluster.connect("postgres")?;
    scan::use_disk(&mut client, &disk)?;
    scan::create_table(&mut client, TABLE, 64)?;

    // Where the machine takes a processor away for ten milliseconds, a mean is no longer that of the disk.
    for attempt in 1..=ATTEMPTS {
        disk.set_latency(latency);
        let (disks, tracers) = cold_scan(&cluster, &disk)?;
        println!("{file_system:?}, {method}, {latency:?}, attempt {attempt}:");
        disks.print("disk");
        tracers.print("tracer");
        if tracers.agrees_with(&disks) {
            return Ok(());
        }
    }
    bail!("the tracer's times were not the disk's in {ATTEMPTS} attempts")
}

#[test]
fn the_tracer_sees_the_latency_of_sync_reads() -> Result<()> {
    agrees_with_the_log(FileSystem::Ext4, "sync", Latency::Constant(LATENCY))
}

#[test]
fn the_tracer_sees_the_latency_of_io_uring_reads_on_xfs() -> Result<()> {
    agrees_with_the_log(FileSystem::Xfs, "io_uring", Latency::Constant(LATENCY))
}

#[test]
fn the_tracer_sees_a_heavy_tail_of_worker_reads() -> Result<()> {
    let (median, p99) = (LATENCY / 2, LATENCY * 5);
    agrees_with_the_log(FileSystem::Ext4, "worker", Latency::HeavyTailed { median, p99 })
}

/// A folder of the kernel's that exists while the disk's loop device has a file, even if none of its names is left.
fn loop_of(disk: &SlowDisk) -> PathBuf {
    let (major, minor) = disk.device();
    PathBuf::from(format!("/sys/dev/block/{major}:{minor}/loop"))
}

/// What there still is of a disk in a folder.
fn remains(folder: &Path) -> Result<Vec<String>> {
    let text = folder.to_string_lossy().into_owned();
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let mut all: Vec<_> = mounts.lines().filter(|line| line.contains(&text)).map(str::to_owned).collect();
    for device in fs::read_dir("/sys/block")? {
        let file = fs::read_to_string(device?.path().join("loop/backing_file")).unwrap_or_default();
        all.extend(file.contains(&text).then_some(file));
    }
    if folder.exists() {
        all.push(text);
    }
    Ok(all)
}

#[test]
fn nothing_remains() -> Result<()> {
    let _alone = alone();
    let disk = small_disk()?;
    let (folder, device) = (disk.folder().to_owned(), loop_of(&disk));
    // The folder with the mounts, the file system of the served file, that on the disk; the loop device; the folder.
    assert_eq!(remains(&folder)?.len(), 5, "{:#?}", remains(&folder)?);
    assert!(device.exists());
    drop(disk);
    assert_eq!(remains(&folder)?, Vec::<String>::new());
    assert!(!device.exists());
    Ok(())
}

#[test]
fn nothing_remains_when_others_have_copies_of_the_mounts() -> Result<()> {
    let _alone = alone();
    let disk = small_disk()?;
    let (folder, device) = (disk.folder().to_owned(), loop_of(&disk));
    let cluster = Cluster::builder(PgInstall::v18()?).start()?;
    let begin = Instant::now();
    drop(disk);
    let took = begin.elapsed();
    assert_eq!(remains(&folder)?, Vec::<String>::new());
    assert!(!device.exists());
    // A copy that stays mounted would be waited for, and then cut off.
    assert!(took < Duration::from_secs(2), "the end of the disk took {took:?}");
    drop(cluster);
    Ok(())
}

#[test]
fn nothing_remains_when_it_stalls_and_is_still_in_use() -> Result<()> {
    let _alone = alone();
    let disk = small_disk()?;
    let (folder, device) = (disk.folder().to_owned(), loop_of(&disk));
    let has_reads = || {
        let requests = fs::read_to_string(device.with_file_name("inflight"));
        requests.is_ok_and(|requests| !requests.trim_start().starts_with('0'))
    };
    let file = file_for_direct_reads(&disk, 2)?;
    disk.set_latency(Latency::Stall { after: 0, lasting: Duration::from_hours(1) });
    let (end, ended) = mpsc::channel::<()>();
    let reader = thread::spawn(move || {
        let took = read_block(&file, 1);
        // The file stays open until the disk's end has given up waiting for us.
        let _ = ended.recv();
        took
    });
    wait_until("the read has begun", has_reads)?;
    drop(disk);
    assert_eq!(remains(&folder)?, Vec::<String>::new());
    drop(end);
    assert!(reader.join().expect("the reader panicked")? < Duration::from_mins(1));
    wait_until("the loop device is free", || !device.exists())
}

#[test]
fn a_failing_start_leaves_nothing() -> Result<()> {
    let _alone = alone();
    // XFS wants more than that.
    let started = SlowDisk::builder().size(64 * MIB).file_system(FileSystem::Xfs).start();
    let error = format!("{:#}", started.err().context("an XFS was made where it does not fit")?);
    assert!(error.contains("mkfs.xfs failed"), "{error}");
    assert!(!fs::read_to_string("/proc/self/mountinfo")?.contains("pgiotrace-slow-disk"));
    Ok(())
}

/// Does nothing in an ordinary run: it is the part of the next test that runs in a process of its own.
#[test]
fn victim() -> Result<()> {
    if !victim::is_victim() {
        return Ok(());
    }
    let disk = small_disk()?;
    victim::live_on(&disk.folder().to_string_lossy())
}

#[test]
fn a_killed_owner_is_swept_by_the_next_start() -> Result<()> {
    let _alone = alone();
    let (mut victim, folder) = victim::start()?;
    let folder = PathBuf::from(folder);
    assert!(!remains(&folder)?.is_empty());
    victim.kill()?;
    victim.wait()?;
    let disk = small_disk()?;
    wait_until("the next start has swept", || remains(&folder).is_ok_and(|left| left.is_empty()))?;
    drop(disk);
    // There is nothing more to do.
    sweep_stale();
    Ok(())
}
