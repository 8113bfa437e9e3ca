//! Everything at once, for a while: the books balance, no time is impossible, and nothing grows.

use std::{
    collections::BTreeMap,
    env, fs,
    os::unix::fs::FileExt as _,
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use pgiotrace_tests::{
    Cluster, PgInstall, Running, Tracer, bpftool, drop_caches,
    ledger::{complaints, count},
    scan,
};
use procfs::process::Process;
use rustix::fs::{Advice, fadvise};
use serde_json::Value;

/// How long it lasts, unless the default is long enough.
const SECONDS: &str = "PGIOTRACE_MIXED_SECONDS";
const DEFAULT_SECONDS: u64 = 20;
const PGBENCH_SCALE: u32 = 20;
const TABLE: &str = "scanned";
const TABLE_MIB: u32 = 96;
/// Of a server with 100 connections.
const MOST_GROUPS: usize = 1_200;
const NEIGHBOURS_FILE: u64 = 256 << 20;

/// Entries that each of the tracer's hash tables holds, but for those that overwrite their oldest.
fn entries(tracer: u32) -> Result<BTreeMap<String, usize>> {
    let mut tables = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{tracer}/fdinfo"))? {
        let text = fs::read_to_string(entry?.path()).unwrap_or_default();
        let Some(id) = text.lines().find_map(|line| line.strip_prefix("map_id:\t")) else { continue };
        let map = bpftool(&["map", "show", "id", id.trim()])?;
        if map["type"] == "hash" {
            let all = bpftool(&["map", "dump", "id", id.trim()])?;
            let name = map["name"].as_str().context("a map has no name")?;
            tables.insert(name.to_owned(), all.as_array().map_or(0, Vec::len));
        }
    }
    Ok(tables)
}

fn resident_kib(pid: u32) -> Result<u64> {
    let status = Process::new(i32::try_from(pid)?)?.status()?;
    status.vmrss.context("no resident size")
}

/// Reads a file on the server's device again and again, past the page cache.
fn neighbour(cluster: &Cluster, is_over: &AtomicBool) -> Result<()> {
    let path = cluster.folder().join("neighbours-file");
    fs::write(&path, vec![7; usize::try_from(NEIGHBOURS_FILE)?])?;
    let file = fs::File::open(&path)?;
    file.sync_all()?;
    let mut buffer = vec![0; 1 << 20];
    while !is_over.load(Ordering::Relaxed) {
        fadvise(&file, 0, None, Advice::DontNeed)?;
        for offset in (0..NEIGHBOURS_FILE).step_by(buffer.len()) {
            file.read_exact_at(&mut buffer, offset)?;
        }
    }
    Ok(())
}

/// Empties the page cache again and again, so that the server reads from the device, too.
fn forget(is_over: &AtomicBool) -> Result<()> {
    while !is_over.load(Ordering::Relaxed) {
        drop_caches()?;
        thread::sleep(Duration::from_secs(1));
    }
    Ok(())
}

/// Runs a statement again and again.
fn again_and_again(cluster: &Cluster, statement: &str, is_over: &AtomicBool) -> Result<u64> {
    let mut client = cluster.connect("postgres")?;
    let mut times = 0;
    while !is_over.load(Ordering::Relaxed) {
        client.batch_execute(statement)?;
        // So that a debug build of the tracer keeps up.
        client.batch_execute("SELECT pg_sleep(0.1)")?;
        times += 1;
    }
    Ok(times)
}

/// What the tracer holds after a while, and at the end.
struct Growth {
    tables: [BTreeMap<String, usize>; 2],
    resident_kib: [u64; 2],
}

/// Lets the load work, looking at the tracer twice; `tracer` is ended.
fn watch(tracer: Running, lasting: Duration) -> Result<(Growth, Value)> {
    let pid = tracer.pid();
    let look = || -> Result<_> { Ok((entries(pid)?, resident_kib(pid)?)) };
    // Not a wait for something to happen: the load is to last that long.
    thread::sleep(lasting / 3);
    let early = look()?;
    thread::sleep(lasting * 2 / 3);
    let late = look()?;
    // An incomplete ledger is complained about with its figures.
    let report = tracer.interrupt()?.report()?;
    Ok((Growth { tables: [early.0, late.0], resident_kib: [early.1, late.1] }, report))
}

fn run(method: &str, lasting: Duration) -> Result<(Growth, Value)> {
    let cluster = Cluster::builder(PgInstall::v18()?)
        .io_method(method)
        .shared_buffers("16MB")
        .setting("autovacuum_naptime", "5s")
        .start()?;
    cluster.pgbench_init(PGBENCH_SCALE)?;
    scan::create_table(&mut cluster.connect("postgres")?, TABLE, TABLE_MIB)?;
    let tracer = Tracer::stat(&cluster).start()?;
    let is_over = AtomicBool::new(false);
    let scan = format!("SELECT count(*) FROM {TABLE}");
    thread::scope(|scope| {
        let seconds = lasting.as_secs().to_string();
        let mut pgbench = cluster
            .pgbench_command(&["-c", "4", "-C", "-n", "-R", "150", "-T", &seconds])?
            .stdout(Stdio::null())
            .spawn()?;
        let workers = [
            scope.spawn(|| again_and_again(&cluster, &scan, &is_over).map(drop)),
            scope.spawn(|| again_and_again(&cluster, "VACUUM pgbench_accounts", &is_over).map(drop)),
            scope.spawn(|| neighbour(&cluster, &is_over)),
            scope.spawn(|| forget(&is_over)),
        ];
        let watched = watch(tracer, lasting);
        is_over.store(true, Ordering::Relaxed);
        let status = pgbench.wait()?;
        for worker in workers {
            worker.join().expect("a part of the load panicked")?;
        }
        ensure!(status.success(), "pgbench failed: {status}");
        watched
    })
}

/// The longest latency and stage that the report tells of anything, microseconds.
fn longest(value: &Value) -> f64 {
    match value {
        Value::Object(all) => {
            let own = all.get("p999").and(all.get("max")).and_then(Value::as_f64).unwrap_or(0.0);
            all.values().map(longest).fold(own, f64::max)
        }
        Value::Array(all) => all.iter().map(longest).fold(0.0, f64::max),
        _ => 0.0,
    }
}

#[test]
fn a_mixed_load_keeps_the_books_and_nothing_grows() -> Result<()> {
    let seconds = env::var(SECONDS).ok().and_then(|text| text.parse().ok()).unwrap_or(DEFAULT_SECONDS);
    let lasting = Duration::from_secs(seconds);
    let begin = Instant::now();
    for method in ["worker", "io_uring"] {
        let (growth, report) = run(method, lasting / 2)?;
        let window_us = report["window"]["duration_s"].as_f64().context("no window")? * 1e6;
        println!(
            "{method}, {:.0} s: {}; longest {:.0} µs; tables {:?} then {:?}; tracer {} then {} KiB",
            window_us / 1e6,
            report["ledger"],
            longest(&report),
            growth.tables[0],
            growth.tables[1],
            growth.resident_kib[0],
            growth.resident_kib[1],
        );
        println!("{}", report["devices"]);
        ensure!(complaints(&report).is_empty(), "{:#?}", complaints(&report));
        ensure!(count(&report, "/ledger/reads")? > 1_000, "hardly anything was read");
        ensure!(longest(&report) < window_us, "something took longer than the trace");
        let others: u64 = scan::list(&report, "devices")
            .iter()
            .filter_map(|device| device.pointer("/users/other_bytes").and_then(Value::as_u64))
            .sum();
        ensure!(others >= NEIGHBOURS_FILE / 2, "the neighbour was not seen: {others} bytes");
        for (name, late) in &growth.tables[1] {
            let early = growth.tables[0].get(name).copied().unwrap_or(0);
            // What is in flight comes and goes; what stays behind would be a multiple of it. Groups of ended backends are taken
            // out when they crowd.
            let most = if name == "GROUPS" { MOST_GROUPS } else { 2 * early + 200 };
            ensure!(*late <= most, "table {name} grew from {early} to {late} entries");
        }
    }
    println!("all of it took {:?}", begin.elapsed());
    Ok(())
}
