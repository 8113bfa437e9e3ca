//! Where the time of reads went, held against a disk whose latency is known, request by request.

use std::{
    collections::HashMap,
    fmt::Write as _,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use pgiotrace_ebpf::{RequestRecord, SECTOR_BYTES, request_flags};
use pgiotrace_tests::{
    Cluster, FileSystem, Latency, PgInstall, RawRecords, Served, SlowDisk, Throttle, Tracer,
    ledger::{complaints, count, report_of, traced_blocks},
    quantile_of, scan,
};
use postgres::Client;
use procfs::process::Process;
use serde_json::Value;

const MIB: u64 = 1 << 20;
const TABLE: &str = "on_slow_disk";
const TABLE_MIB: u32 = 32;
const METHODS: [&str; 3] = ["sync", "worker", "io_uring"];
/// How often times are compared until they agree: the host of a virtual machine takes a processor away for milliseconds
/// at times.
const ATTEMPTS: u32 = 5;
/// The tolerance: a share, or that many microseconds.
const SHARE: f64 = 0.02;
const MICROS: f64 = 100.0;
/// The way of half of the requests through the loop driver and FUSE, microseconds.
const MOST_HOP: f64 = 300.0;

/// One test at a time: they measure times, on few processors.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A server with a table on a disk.
struct Rig {
    // Before the disk that it uses.
    cluster: Cluster,
    disk: SlowDisk,
}

impl Rig {
    fn start(file_system: FileSystem, is_direct: bool, mebibytes: u32) -> Result<Self> {
        let disk = SlowDisk::builder().size(512 * MIB).file_system(file_system).start()?;
        let mut builder =
            Cluster::builder(PgInstall::v18()?).io_method("sync").shared_buffers("16MB").slow_disk(&disk);
        // The fewer backends there may be, the more buffers one may pin, and the longer are its reads.
        builder = builder.setting("max_connections", "20");
        if is_direct {
            builder = builder.setting("debug_io_direct", "data");
        }
        let cluster = builder.start()?;
        let mut client = cluster.connect("postgres")?;
        scan::use_disk(&mut client, &disk)?;
        scan::create_table(&mut client, TABLE, mebibytes)?;
        Ok(Self { cluster, disk })
    }

    /// Scans the cold table under the tracer.
    fn cold_scan(&self, latency: Latency) -> Result<Scan> {
        self.cold_query(latency, &format!("SELECT count(*) FROM {TABLE}"))
    }

    /// Runs a query that reads the cold table once, under the tracer.
    fn cold_query(&self, latency: Latency, query: &str) -> Result<Scan> {
        self.disk.set_latency(Latency::NONE);
        self.cluster.drop_caches()?;
        let mut client = self.cluster.connect("postgres")?;
        let pid = scan::backend_pid(&mut client)?;
        // What the planner has to know, and the file system of the file.
        client.simple_query(&format!("EXPLAIN SELECT count(*) FROM {TABLE}"))?;
        let records = self.cluster.folder().join("records");
        let tracer = Tracer::stat(&self.cluster).arg("--raw-records").arg(&records).start()?;
        self.disk.wait_idle()?;
        self.disk.clear_log();
        self.disk.set_latency(latency);
        let (cpu, begin) = (cpu_time(pid)?, Instant::now());
        let blocks = Self::read_blocks(&mut client, query)?;
        let (cpu, took) = (cpu_time(pid)?.saturating_sub(cpu), begin.elapsed());
        // What the kernel has read ahead, too.
        self.disk.wait_idle()?;
        let log = self.disk.log();
        let report = report_of(&tracer.interrupt()?)?;
        self.disk.set_latency(Latency::NONE);

        ensure!(complaints(&report).is_empty(), "{:#?}", complaints(&report));
        ensure!(traced_blocks(&report, TABLE) == blocks);
        let records = RawRecords::read(&records)?;
        Ok(Scan { report, log, records, pid, took, cpu })
    }

    /// Runs a query; the blocks that EXPLAIN says were read.
    fn read_blocks(client: &mut Client, query: &str) -> Result<u64> {
        client.batch_execute("SET max_parallel_workers_per_gather = 0")?;
        let plan = scan::explain(client, query)?;
        plan["Shared Read Blocks"].as_u64().filter(|blocks| *blocks > 0).context("nothing was read")
    }
}

/// What a scan gave.
struct Scan {
    report: Value,
    log: Vec<Served>,
    records: RawRecords,
    pid: u32,
    /// How long the query took.
    took: Duration,
    /// How long its backend was on a processor meanwhile.
    cpu: Duration,
}

/// How long a process has been on a processor.
fn cpu_time(pid: u32) -> Result<Duration> {
    Ok(Duration::from_nanos(Process::new(i32::try_from(pid)?)?.schedstat()?.sum_exec_runtime))
}

impl Scan {
    /// Requests that neither the server queued nor are for a file's pages.
    fn others_of(&self, disk: &SlowDisk) -> Result<usize> {
        let device = scan::device(&self.report, disk)?;
        ensure!(
            count(device, "/requests")? == self.log.len() as u64,
            "not all requests are counted: {device:#}"
        );
        let told = self.records.requests_of(disk.device());
        let told = told.iter().filter(|record| record.request.flags & request_flags::PART == 0).count();
        Ok(self.log.len() - told)
    }
}

/// A request as the tracer and the disk saw it, microseconds.
struct Pair {
    /// Issued to completed.
    tracer: f64,
    /// How long the disk served it.
    disk: f64,
    /// From its issue until the disk saw it: the way through the loop driver and FUSE.
    hop: f64,
}

/// Pairs the tracer's requests with the disk's: the same bytes, served while the request was with the device.
///
/// Of the disk's, `others` may be left: what kernel threads read for themselves is counted, but not told one by one.
fn pair(requests: &[&RequestRecord], log: &[Served], others: usize) -> Result<Vec<Pair>> {
    let mut served: HashMap<(u64, u32), Vec<&Served>> = HashMap::new();
    for read in log {
        served.entry((read.offset, read.length)).or_default().push(read);
    }
    let mut pairs = Vec::new();
    for record in requests {
        let (issued, done) = (record.request.issued_ns, record.done_ns);
        let place = (record.request.sector * SECTOR_BYTES + record.start, record.bytes);
        let candidates = served.get_mut(&place).with_context(|| format!("the disk served no {record:?}"))?;
        // The log's end is stamped after the answer was given.
        let found = candidates.iter().position(|read| read.start_ns >= issued && read.start_ns <= done);
        let read = candidates.swap_remove(found.with_context(|| format!("the disk served no {record:?}"))?);
        pairs.push(Pair {
            tracer: (done - issued) as f64 / 1e3,
            disk: read.service_ns() as f64 / 1e3,
            hop: (read.start_ns - issued) as f64 / 1e3,
        });
    }
    let left: Vec<_> = served.into_values().flatten().collect();
    ensure!(left.len() == others, "the tracer saw {others} requests of others, and none of {left:?}");
    Ok(pairs)
}

fn quantile(values: impl Iterator<Item = f64>, share: f64) -> f64 {
    let mut sorted: Vec<_> = values.collect();
    sorted.sort_by(f64::total_cmp);
    quantile_of(&sorted, share)
}

/// Whether the tracer's percentiles are the disk's once the way through the loop driver is taken off each request. That is
/// the device's own, and rightly in the tracer's time; in bursts, and on a machine that has other things to do, it is long.
fn agree(what: &str, pairs: &[Pair]) -> bool {
    let hop = |share| quantile(pairs.iter().map(|pair| pair.hop), share);
    let mut text = format!("{what}: {} pairs, hop {:.0} to {:.0} µs", pairs.len(), hop(0.5), hop(0.99));
    // A wrong time of issue would show here, and only here.
    let mut agrees = hop(0.5) <= MOST_HOP;
    for share in [0.5, 0.9, 0.99] {
        let tracer = quantile(pairs.iter().map(|pair| pair.tracer), share);
        let without_hop = quantile(pairs.iter().map(|pair| pair.tracer - pair.hop), share);
        let disk = quantile(pairs.iter().map(|pair| pair.disk), share);
        agrees &= (without_hop - disk).abs() <= tolerance(disk);
        let _ =
            write!(text, "; p{:.0} {tracer:.0}, without hop {without_hop:.0}, disk {disk:.0}", share * 100.0);
    }
    println!("{text}");
    agrees
}

fn tolerance(micros: f64) -> f64 {
    (micros * SHARE).max(MICROS)
}

fn compare(file_system: FileSystem, is_direct: bool) -> Result<()> {
    let _alone = alone();
    let mut rig = Rig::start(file_system, is_direct, TABLE_MIB)?;
    let ms = Duration::from_millis;
    let latencies = [
        Latency::Constant(Duration::from_micros(200)),
        Latency::Constant(ms(1)),
        Latency::Constant(ms(5)),
        Latency::Constant(ms(20)),
        Latency::HeavyTailed { median: ms(2), p99: ms(40) },
    ];
    for method in METHODS {
        rig.cluster.restart(&[("io_method", method)])?;
        for latency in latencies {
            let what = format!(
                "{file_system:?}, {}, {method}, {latency:?}",
                if is_direct { "direct" } else { "buffered" }
            );
            let mut attempt = 0;
            loop {
                attempt += 1;
                let scan = rig.cold_scan(latency)?;
                let requests = scan.records.requests_of(rig.disk.device());
                let pairs =
                    pair(&requests, &scan.log, scan.others_of(&rig.disk)?).with_context(|| what.clone())?;
                if agree(&what, &pairs) {
                    break;
                }
                ensure!(attempt < ATTEMPTS, "{what}: not the disk's times in {ATTEMPTS} attempts");
            }
        }
    }
    Ok(())
}

#[test]
fn every_request_of_buffered_reads_has_its_partner_on_ext4() -> Result<()> {
    compare(FileSystem::Ext4, false)
}

#[test]
fn every_request_of_direct_reads_has_its_partner_on_ext4() -> Result<()> {
    compare(FileSystem::Ext4, true)
}

#[test]
fn every_request_of_buffered_reads_has_its_partner_on_xfs() -> Result<()> {
    compare(FileSystem::Xfs, false)
}

#[test]
fn every_request_of_direct_reads_has_its_partner_on_xfs() -> Result<()> {
    compare(FileSystem::Xfs, true)
}

/// Sum of a stage over the reads of the table, microseconds.
fn stage(report: &Value, stage: &str) -> Result<f64> {
    let io = &scan::relation(report, TABLE)?["io"];
    let sum = io["stages_us"][stage].is_object().then(|| io["stages_us"][stage]["sum"].as_f64());
    Ok(sum.flatten().unwrap_or(0.0))
}

fn latency(report: &Value) -> Result<f64> {
    let io = &scan::relation(report, TABLE)?["io"];
    io["latency_us"]["sum"].as_f64().context("the table has no latency")
}

#[test]
fn the_stages_of_a_cold_scan_add_up_to_its_latency() -> Result<()> {
    const ALL: [&str; 5] = ["submit", "cache", "block_queue", "device", "wakeup"];
    // What is no other stage is "cache": on a slow device, little.
    const MOST_REST: f64 = 0.1;
    let _alone = alone();
    let mut rig = Rig::start(FileSystem::Ext4, false, TABLE_MIB)?;
    for method in METHODS {
        rig.cluster.restart(&[("io_method", method)])?;
        let scan = rig.cold_scan(Latency::Constant(Duration::from_millis(20)))?;
        let latency = latency(&scan.report)?;
        let mut sum = 0.0;
        let mut text = format!("{method}: of {latency:.0} µs");
        for name in ALL {
            let part = stage(&scan.report, name)?;
            let _ = write!(text, ", {name} {:.1} %", 100.0 * part / latency);
            sum += part;
        }
        println!("{text}");
        assert!(sum >= 0.95 * latency, "{sum} of {latency}");
        assert!(sum <= latency * 1.000_001, "{sum} of {latency}");
        let rest = stage(&scan.report, "cache")? + stage(&scan.report, "submit")?;
        assert!(rest <= MOST_REST * latency, "{rest} of {latency}");
    }
    Ok(())
}

#[test]
fn what_the_block_layer_holds_back_is_queue_and_not_device() -> Result<()> {
    const READS_PER_SECOND: u32 = 100;
    let _alone = alone();
    for is_direct in [false, true] {
        let mut rig = Rig::start(FileSystem::Ext4, is_direct, TABLE_MIB)?;
        for method in METHODS {
            rig.cluster.restart(&[("io_method", method)])?;
            let throttle = Throttle::reads_per_second(&rig.cluster, rig.disk.device(), READS_PER_SECOND)?;
            let scan = rig.cold_scan(Latency::NONE)?;
            drop(throttle);
            let what = format!("{method}, direct {is_direct}");
            is_held_back(&what, &scan, &rig.disk, READS_PER_SECOND).context(what)?;
        }
    }
    Ok(())
}

fn is_held_back(what: &str, scan: &Scan, disk: &SlowDisk, reads_per_second: u32) -> Result<()> {
    let latency = latency(&scan.report)?;
    let (queue, device) = (stage(&scan.report, "block_queue")?, stage(&scan.report, "device")?);
    println!(
        "{what}: {} requests; of {latency:.0} µs, block_queue {:.1} %, device {:.1} %",
        scan.log.len(),
        100.0 * queue / latency,
        100.0 * device / latency,
    );
    // The limit lets through bursts of a tenth of a second.
    ensure!(scan.took.as_secs_f64() > scan.log.len() as f64 / f64::from(reads_per_second) - 0.2);
    ensure!(queue > 0.9 * latency, "the queue has only {queue} of {latency} µs");
    ensure!(device < 0.1 * latency, "the device has {device} of {latency} µs");
    // What a kernel thread queued for the server is not another program's.
    let users = &scan::device(&scan.report, disk)?["users"];
    ensure!(count(users, "/other_requests")? == 0, "{users:#}");
    ensure!(count(users, "/server_bytes")? > count(users, "/unknown_bytes")?, "{users:#}");
    Ok(())
}

/// More readers than the device takes requests: they wait for a free one, which is the queue's time, and neither submission nor
/// the device's.
#[test]
fn waiting_for_a_device_that_takes_no_more_is_queue() -> Result<()> {
    const READERS: u32 = 16;
    const REQUESTS: &str = "4";
    let _alone = alone();
    let rig = Rig::start(FileSystem::Ext4, true, TABLE_MIB)?;
    rig.disk.limit_requests(REQUESTS)?;
    rig.cluster.drop_caches()?;
    rig.disk.set_latency(Latency::Constant(Duration::from_millis(20)));
    let tracer = Tracer::stat(&rig.cluster).start()?;
    thread::scope(|scope| {
        let reader = |number: u32| {
            let cluster = &rig.cluster;
            scope.spawn(move || -> Result<()> {
                let mut client = cluster.connect("postgres")?;
                // Each a part of its own: together they would read in step.
                let blocks = TABLE_MIB * 128 / READERS;
                let (from, to) = (number * blocks, (number + 1) * blocks - 1);
                let scan =
                    format!("SELECT count(*) FROM {TABLE} WHERE ctid BETWEEN '({from},1)' AND '({to},9)'");
                client.batch_execute(&scan)?;
                Ok(())
            })
        };
        let readers: Vec<_> = (0..READERS).map(reader).collect();
        readers.into_iter().try_for_each(|reader| reader.join().expect("a reader panicked"))
    })?;
    let report = report_of(&tracer.interrupt()?)?;
    rig.disk.set_latency(Latency::NONE);
    let latency = latency(&report)?;
    let [submit, queue, device] = ["submit", "block_queue", "device"].map(|name| stage(&report, name));
    let (submit, queue, device) = (submit?, queue?, device?);
    println!(
        "of {latency:.0} µs, submit {:.1} %, block_queue {:.1} %, device {:.1} %",
        100.0 * submit / latency,
        100.0 * queue / latency,
        100.0 * device / latency
    );
    ensure!(queue > 0.2 * latency, "the queue has only {queue} of {latency} µs");
    ensure!(submit < 0.1 * latency, "submission has {submit} of {latency} µs");
    Ok(())
}

/// A backend's exposed and hidden time, microseconds.
fn exposure(scan: &Scan) -> Result<(f64, f64)> {
    let io = &scan::backend(&scan.report, scan.pid)?["io"];
    let of = |key: &str| io[key].as_f64().with_context(|| format!("the backend has no {key}"));
    Ok((of("exposed_us")?, of("hidden_us")?))
}

#[test]
fn a_backend_that_reads_by_itself_hides_nothing() -> Result<()> {
    let _alone = alone();
    let rig = Rig::start(FileSystem::Ext4, false, TABLE_MIB)?;
    let scan = rig.cold_scan(Latency::Constant(Duration::from_millis(1)))?;
    let (exposed, hidden) = exposure(&scan)?;
    let latency = scan::backend(&scan.report, scan.pid)?["io"]["latency_us"]["sum"].as_f64().unwrap_or(0.0);
    println!("exposed {exposed:.0} µs, hidden {hidden:.0} µs, latency {latency:.0} µs");
    assert!(hidden == 0.0, "{hidden}");
    assert!((exposed - latency).abs() < 1.0, "{exposed} of {latency}");
    Ok(())
}

#[test]
fn exposed_time_and_computation_make_up_the_run_time_of_a_deep_prefetch() -> Result<()> {
    let _alone = alone();
    let mut rig = Rig::start(FileSystem::Ext4, true, TABLE_MIB)?;
    let query = format!("SELECT sum(length(md5(filler || id))) FROM {TABLE}, generate_series(1, 4)");
    for method in ["worker", "io_uring"] {
        let settings =
            [("io_method", method), ("shared_buffers", "128MB"), ("effective_io_concurrency", "8")];
        let mut attempt = 0;
        loop {
            attempt += 1;
            rig.cluster.restart(&settings)?;
            let scan = rig.cold_query(Latency::Constant(Duration::from_millis(5)), &query)?;
            let (exposed, hidden) = exposure(&scan)?;
            let (cpu, took) = (scan.cpu.as_secs_f64() * 1e6, scan.took.as_secs_f64() * 1e6);
            println!(
                "{method}: {took:.0} µs = exposed {exposed:.0} + computing {cpu:.0} + {:.1} %; hidden {hidden:.0}",
                100.0 * (took - exposed - cpu) / took
            );
            ensure!(hidden > 0.0, "{method}: nothing was hidden");
            if (took - exposed - cpu).abs() <= 0.05 * took {
                break;
            }
            ensure!(attempt < ATTEMPTS, "{method}: exposed time and computation are not the run time");
        }
    }
    Ok(())
}
