//! `--pg-probes`: how long reads waited for their executor, and how long after their end their owner ran.

use std::{thread, time::Duration};

use anyhow::{Context as _, Result, anyhow, ensure};
use pgiotrace_tests::{
    Cluster, Latency, PgInstall, SlowDisk, Tracer,
    ledger::{complaints, count, report_of},
    scan::{backend_pid, create_table, list, notes, relation, scan},
};
use serde_json::Value;

const TABLE: &str = "read_on";
const TABLE_MEBIBYTES: u32 = 64;
/// More than one io worker can serve at once.
const SCANNERS: usize = 4;

fn cluster(method: &str) -> Result<Cluster> {
    let builder = Cluster::builder(PgInstall::v18()?)
        .io_method(method)
        .setting("io_workers", "1")
        .setting("synchronize_seqscans", "off");
    let cluster = builder.shared_buffers("8MB").start()?;
    create_table(&mut cluster.connect("postgres")?, TABLE, TABLE_MEBIBYTES)?;
    Ok(cluster)
}

/// The report of a trace in which several backends scan the table at the same time.
fn scanned(cluster: &Cluster, arguments: &[&str]) -> Result<Value> {
    cluster.drop_caches()?;
    let mut clients = (0..SCANNERS).map(|_| cluster.connect("postgres")).collect::<Result<Vec<_>>>()?;
    let tracer = Tracer::stat(cluster).args(arguments.iter().copied()).start()?;
    thread::scope(|scope| {
        let scanners: Vec<_> =
            clients.iter_mut().map(|client| scope.spawn(move || scan(client, TABLE))).collect();
        scanners
            .into_iter()
            .try_for_each(|scanner| scanner.join().map_err(|_| anyhow!("a scanner panicked"))?.map(drop))
    })?;
    let report = report_of(&tracer.interrupt()?)?;
    ensure!(complaints(&report).is_empty(), "{:#?}", complaints(&report));
    Ok(report)
}

/// A figure of a distribution.
fn figure(io: &Value, pointer: &str) -> Result<f64> {
    io.pointer(pointer).and_then(Value::as_f64).with_context(|| format!("no {pointer}: {io:#}"))
}

/// Checks what holds under every method, and returns what the report says of the table.
fn checked(report: &Value) -> Result<&Value> {
    let io = &relation(report, TABLE)?["io"];
    let stages = ["pg_queue", "submit", "cache", "block_queue", "device", "wakeup"];
    let sum: f64 =
        stages.iter().filter_map(|stage| io.pointer(&format!("/stages_us/{stage}/sum"))?.as_f64()).sum();
    let latency = figure(io, "/latency_us/sum")?;
    ensure!(sum <= latency * 1.000_001, "the stages, {sum} µs, are longer than the reads, {latency} µs");
    for worker in list(report, "io_workers") {
        ensure!(worker["busy_ratio"].as_f64().is_some_and(|ratio| ratio <= 1.0), "{worker:#}");
    }
    let probes = &report["overhead"]["pg_probes"];
    let [traps, nanos, cpu] =
        ["traps", "ns_per_trap", "estimated_cpu_s"].map(|key| probes[key].as_f64().unwrap_or_default());
    println!("probes: {traps} traps of {nanos:.0} ns, {:.1} ms of CPU; {} reads", cpu * 1e3, io["reads"]);
    ensure!(traps > 0.0 && nanos > 50.0 && nanos < 1e6, "{probes}");
    ensure!((cpu - traps * nanos / 1e9).abs() < 1e-6, "{probes}");
    for stage in ["pg_queue", "wakeup"] {
        println!("{stage}: {}", io["stages_us"][stage]);
    }
    println!("bounds of a backend: {}", report["backends"][0]["io"]["bounds_us"]);
    Ok(io)
}

#[test]
fn reads_wait_for_a_busy_io_worker_and_their_owners_for_them() -> Result<()> {
    let cluster = cluster("worker")?;
    let report = scanned(&cluster, &["--pg-probes"])?;
    let io = checked(&report)?;
    let by_worker = count(io, "/by_method/worker")?;
    // What found the queue full was handed over as well, and came back to its owner. Each of the table's reads was
    // handed over after the start of the trace, so none is missing.
    let handed_over = by_worker + count(io, "/queue_full_fallbacks")?;
    ensure!(by_worker > 100, "the io worker read: {io:#}");
    ensure!(count(io, "/stages_us/pg_queue/count")? == handed_over, "of {handed_over}: {io:#}");
    ensure!(figure(io, "/stages_us/pg_queue/p99")? > 0.0, "{io:#}");
    // Backends that outrun one worker have reads that wait behind others.
    ensure!(figure(io, "/stages_us/pg_queue/max")? > figure(io, "/stages_us/pg_queue/p50")?, "{io:#}");
    let is_scanner = |io: &&Value| io["by_method"]["worker"].as_u64() > Some(20);
    let scanners: Vec<_> =
        list(&report, "backends").iter().map(|backend| &backend["io"]).filter(is_scanner).collect();
    ensure!(scanners.len() == SCANNERS, "{scanners:#?}");
    for io in scanners {
        let [queue, at_least, wakeup, at_most] = [
            "/stages_us/pg_queue/max",
            "/bounds_us/pg_queue_at_least/max",
            "/stages_us/wakeup/max",
            "/bounds_us/owner_wakeup_at_most/max",
        ]
        .map(|pointer| figure(io, pointer).unwrap_or_default());
        // The maxima are exact.
        ensure!(at_least <= queue && queue > 0.0, "{at_least} <= {queue}: {io:#}");
        ensure!(wakeup > 0.0 && at_most > 0.0, "{wakeup} and {at_most}: {io:#}");
    }
    Ok(())
}

#[test]
fn a_backend_that_waits_for_a_read_has_a_wakeup() -> Result<()> {
    let cluster = cluster("worker")?;
    let mut client = cluster.connect("postgres")?;
    let pid = backend_pid(&mut client)?;
    // Mostly from the page cache, where the io worker itself waits for nothing that it would be woken from.
    scan(&mut client, TABLE)?;
    let tracer = Tracer::stat(&cluster).arg("--pg-probes").start()?;
    scan(&mut client, TABLE)?;
    let report = report_of(&tracer.interrupt()?)?;
    let io = &pgiotrace_tests::scan::backend(&report, pid)?["io"];
    println!("{} {}", io["stages_us"]["wakeup"], io["bounds_us"]);
    let from_device = count(io, "/by_source/device")? + count(io, "/by_source/mixed")?;
    ensure!(count(io, "/stages_us/wakeup/count")? > from_device, "no read has its owner's wakeup: {io:#}");
    Ok(())
}

#[test]
fn under_io_uring_only_the_submission_is_waited_for() -> Result<()> {
    let cluster = cluster("io_uring")?;
    let report = scanned(&cluster, &["--pg-probes"])?;
    let io = checked(&report)?;
    ensure!(count(io, "/stages_us/pg_queue/count")? == count(io, "/by_method/io_uring")?, "{io:#}");
    // The owner submits by itself, at once.
    let (queue, latency) = (figure(io, "/stages_us/pg_queue/p50")?, figure(io, "/latency_us/p50")?);
    ensure!(queue > 0.0 && queue < 1_000.0, "{queue} of {latency} µs: {io:#}");
    Ok(())
}

#[test]
fn an_owner_runs_soon_after_a_slow_read_whoever_executed_it() -> Result<()> {
    const LATENCY: Duration = Duration::from_millis(1);
    for method in ["worker", "io_uring"] {
        let disk = SlowDisk::builder().size(512 << 20).start()?;
        let cluster = Cluster::builder(PgInstall::v18()?).io_method(method).shared_buffers("8MB");
        // Each read asks the disk: no readahead has brought it.
        let cluster = cluster.setting("debug_io_direct", "data").slow_disk(&disk).start()?;
        let mut client = cluster.connect("postgres")?;
        let location = disk.tablespace_dir();
        client.batch_execute(&format!("CREATE TABLESPACE slow LOCATION '{}'", location.display()))?;
        client.batch_execute("SET default_tablespace = slow")?;
        create_table(&mut client, TABLE, 16)?;
        cluster.drop_caches()?;
        disk.set_latency(Latency::Constant(LATENCY));
        let tracer = Tracer::stat(&cluster).arg("--pg-probes").start()?;
        scan(&mut client, TABLE)?;
        let report = report_of(&tracer.interrupt()?)?;
        let io = checked(&report)?;
        println!("{method}: device {}", io["stages_us"]["device"]);
        let wakeup = figure(io, "/stages_us/wakeup/p50")?;
        ensure!(count(io, "/by_source/device")? > 100, "{method}: {io:#}");
        ensure!(wakeup > 0.0 && wakeup < LATENCY.as_secs_f64() * 1e6 / 2.0, "{method}: {io:#}");
    }
    Ok(())
}

#[test]
fn without_the_option_nothing_is_probed() -> Result<()> {
    let report = scanned(&cluster("worker")?, &[])?;
    let io = &relation(&report, TABLE)?["io"];
    ensure!(io["stages_us"]["pg_queue"].is_null() && report["overhead"]["pg_probes"].is_null(), "{report:#}");
    ensure!(report["overhead"].get("pg_probes").is_some(), "the key is there: {:#}", report["overhead"]);
    Ok(())
}

#[test]
fn with_io_method_sync_there_is_nothing_to_probe() -> Result<()> {
    let report = scanned(&cluster("sync")?, &["--pg-probes"])?;
    let io = &relation(&report, TABLE)?["io"];
    ensure!(io["stages_us"]["pg_queue"].is_null() && report["overhead"]["pg_probes"].is_null(), "{report:#}");
    ensure!(notes(&report).iter().any(|note| note.contains("--pg-probes adds nothing")), "{report:#}");
    Ok(())
}

#[test]
fn a_server_that_cannot_be_probed_is_refused_in_one_sentence() -> Result<()> {
    for install in [PgInstall::v17()?, PgInstall::v15()?] {
        let major = install.major();
        let cluster = Cluster::builder(install).start()?;
        let run = Tracer::stat(&cluster).args(["--pg-probes", "--duration", "1s"]).finish()?;
        let said = run.stderr.trim();
        println!("{said}");
        ensure!(run.code() == 1 && said.lines().count() == 1, "{}: {said}", run.code());
        ensure!(said.contains(&format!("PostgreSQL {major} has no asynchronous I/O")), "{said}");
        ensure!(said.contains("leave the option out"), "{said}");
    }
    Ok(())
}
