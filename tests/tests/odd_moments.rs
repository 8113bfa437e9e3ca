//! What happens to a server, to a read or to the tracer in the midst of a trace: the report says so, and is right.

use std::{
    collections::BTreeSet,
    fs::{self, File, Permissions},
    os::unix::fs::{PermissionsExt as _, chown},
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use pgiotrace_tests::{
    Cluster, ClusterBuilder, Finished, Kind, PgInstall, StopMode, Tracer, drop_caches, elevated, run,
    scan::{backend, backend_pid, blocks, create_table, explain, fill_table, list, notes, relation, scan},
    signal, wait_until,
};
use postgres::{Client, Config, NoTls};
use rustix::process::Signal;
use serde_json::Value;

/// Small beside the tables, so that these are read again.
const SHARED_BUFFERS: &str = "16MB";
/// Size of a table that is scanned, in mebibytes.
const TABLE_SIZE: u32 = 32;
/// A trace that is to end by itself before.
const LONG: Duration = Duration::from_secs(30);
/// Bytes of a server block.
const BLOCK: u64 = 8192;

/// `io_max_concurrency` at the most.
const HANDLES_OF_A_BACKEND: u64 = 64;

fn builder(method: &str) -> Result<ClusterBuilder> {
    Ok(Cluster::builder(PgInstall::v18()?).io_method(method).shared_buffers(SHARED_BUFFERS))
}

/// A cluster with tables of these names.
fn with_tables(method: &str, tables: &[&str]) -> Result<Cluster> {
    let cluster = builder(method)?.start()?;
    let mut client = cluster.connect("postgres")?;
    for table in tables {
        create_table(&mut client, table, TABLE_SIZE)?;
    }
    Ok(cluster)
}

/// The report of a trace that ended well.
fn good_report(run: &Finished) -> Result<Value> {
    ensure!(run.code() == 0, "pgiotrace ended with {}: {}", run.code(), run.stderr);
    run.report()
}

fn count(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("no count: {value}"))
}

/// All that began is accounted for, and every owner is certain.
fn assert_all_exact(report: &Value) {
    assert_balanced(report);
    let ledger = &report["ledger"];
    assert_eq!(ledger["exact"], ledger["reads"], "{ledger:#}");
    // None when the view was not sampled in a short trace.
    assert_eq!(ledger["pg_aios"]["contradicted"].as_u64().unwrap_or(0), 0, "{ledger:#}");
}

/// All that began is accounted for.
fn assert_balanced(report: &Value) {
    let ledger = &report["ledger"];
    assert_eq!((&ledger["complete"], count(&ledger["lost"])), (&Value::Bool(true), 0), "{ledger:#}");
    let ends = ["completed", "failed", "in_flight"].map(|key| count(&ledger[key]));
    assert_eq!(count(&ledger["begun"]), ends.iter().sum::<u64>(), "{ledger:#}");
}

/// One of the notes says this.
fn assert_noted(report: &Value, part: &str) {
    assert!(
        notes(report).iter().any(|note| note.contains(part)),
        "no note says {part:?}: {:#}",
        report["notes"]
    );
}

/// The number of a table's files.
fn filenode(client: &mut Client, table: &str) -> Result<u32> {
    Ok(client.query_one("SELECT pg_relation_filenode($1::text::regclass)", &[&table])?.get(0))
}

/// What the report says of a table's main fork, for lack of its name.
fn relation_of(report: &Value, filenode: u32) -> Result<&Value> {
    let is_it = |entry: &&Value| entry["relfilenode"] == filenode && entry["fork"] == "main";
    list(report, "relations").iter().find(is_it).context("the table was not traced")
}

/// Begins to read a table through a cursor and stops in the middle, with reads under way.
fn begin_scan(client: &mut Client, table: &str) -> Result<()> {
    let begin = format!("BEGIN; DECLARE c NO SCROLL CURSOR FOR SELECT * FROM {table}; MOVE 100 FROM c");
    client.batch_execute(&begin).with_context(|| format!("cannot begin to read {table}"))
}

/// PIDs of the server's io workers.
fn io_workers(client: &mut Client) -> Result<Vec<u32>> {
    let query = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'io worker'";
    Ok(client.query(query, &[])?.iter().map(|row| row.get::<_, i32>(0).unsigned_abs()).collect())
}

#[test]
fn a_server_that_stops_ends_the_trace_with_a_report() -> Result<()> {
    let mut cluster = with_tables("worker", &["t"])?;
    let began = Instant::now();
    let tracer = Tracer::stat(&cluster).args(["--duration", "30s"]).start()?;
    let mut client = cluster.connect("postgres")?;
    let filenode = filenode(&mut client, "t")?;
    let scanned = scan(&mut client, "t")?;
    cluster.stop(StopMode::Fast)?;
    let report = good_report(&tracer.wait()?)?;
    assert!(began.elapsed() < LONG, "the trace went on without a server");
    assert_noted(&report, "the server stopped during the trace");
    // Its name may not have been asked for in time.
    assert_eq!(relation_of(&report, filenode)?["io"]["blocks"], scanned);
    assert_all_exact(&report);
    Ok(())
}

#[test]
fn a_postmaster_that_is_killed_ends_the_trace_even_as_a_zombie() -> Result<()> {
    let cluster = builder("worker")?.start()?;
    let began = Instant::now();
    let tracer = Tracer::stat(&cluster).args(["--duration", "30s"]).start()?;
    // Nobody waits for it as long as the cluster's handle lives, like in a container whose first process does not.
    assert!(signal(cluster.postmaster_pid()?, Signal::KILL));
    let report = good_report(&tracer.wait()?)?;
    assert!(began.elapsed() < LONG, "the trace went on without a server");
    assert_noted(&report, "the server stopped during the trace");
    assert_balanced(&report);
    Ok(())
}

/// Crashes the server in the midst of a trace by killing one of its processes, then scans a table in the same trace.
fn crash(victim: impl FnOnce(&mut Client) -> Result<u32>) -> Result<()> {
    let cluster = with_tables("worker", &["before", "after"])?;
    let mut reading = cluster.connect("postgres")?;
    let victim = victim(&mut reading)?;
    let tracer = Tracer::stat(&cluster).start()?;
    begin_scan(&mut reading, "before")?;
    assert!(signal(victim, Signal::KILL));
    wait_until("the server has begun to recover", || cluster.log().contains("terminated by signal 9"))?;
    wait_until("the server lets sessions in again", || cluster.connect("postgres").is_ok())?;
    let mut client = cluster.connect("postgres")?;
    let scanned = scan(&mut client, "after")?;
    let report = good_report(&tracer.interrupt()?)?;

    assert_noted(&report, "crashed and restarted");
    assert_eq!(blocks(&report, "after")?, scanned);
    let of_backend = backend(&report, backend_pid(&mut client)?)?;
    assert!(count(&of_backend["io"]["by_method"]["worker"]) > 0, "io workers read for it: {of_backend:#}");
    assert!(count(&of_backend["io"]["blocks"]) >= scanned, "{of_backend:#}");
    assert_balanced(&report);
    // What a killed backend had still queued, an io worker may begin to read when there is no owner any more.
    let ledger = &report["ledger"];
    let [reads, exact, unattributed] = ["reads", "exact", "unattributed"].map(|key| count(&ledger[key]));
    assert!(exact + unattributed == reads && unattributed <= HANDLES_OF_A_BACKEND, "{ledger:#}");
    assert_eq!(ledger["pg_aios"]["contradicted"].as_u64().unwrap_or(0), 0, "{ledger:#}");
    Ok(())
}

#[test]
fn a_crash_by_a_killed_backend_is_said_and_reads_after_it_are_exact() -> Result<()> {
    crash(backend_pid)
}

#[test]
fn a_crash_by_a_killed_io_worker_is_said_and_reads_after_it_are_exact() -> Result<()> {
    crash(|client| io_workers(client)?.first().copied().context("the server has no io worker"))
}

#[test]
fn a_connection_that_is_terminated_in_mid_scan_keeps_its_reads() -> Result<()> {
    for method in PgInstall::v18()?.io_methods() {
        let cluster = with_tables(method, &["t"])?;
        let (mut reading, mut client) = (cluster.connect("postgres")?, cluster.connect("postgres")?);
        let pid = backend_pid(&mut reading)?;
        let tracer = Tracer::stat(&cluster).start()?;
        let scanning = thread::spawn(move || reading.simple_query("SELECT count(pg_sleep(0.001)) FROM t"));
        let in_the_middle = "SELECT 1 FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'PgSleep'";
        let inner = pid.cast_signed();
        wait_until("the scan is under way", || {
            client.query_opt(in_the_middle, &[&inner]).is_ok_and(|row| row.is_some())
        })?;
        client.execute("SELECT pg_terminate_backend($1, 10000)", &[&inner])?;
        let ended = scanning.join().map_err(|_| anyhow::anyhow!("the scanning thread panicked"))?;
        assert!(ended.is_err(), "{method}: the scan was not interrupted");
        let scanned = scan(&mut client, "t")?;
        let report = good_report(&tracer.interrupt()?)?;
        let of_terminated = backend(&report, pid)?;
        assert!(count(&of_terminated["io"]["blocks"]) > 0, "{method}: {of_terminated:#}");
        assert!(blocks(&report, "t")? > scanned, "{method}: the reads of both are counted");
        assert_all_exact(&report);
    }
    Ok(())
}

/// Path of a table's first segment file.
fn segment_file(cluster: &Cluster, client: &mut Client, table: &str) -> Result<PathBuf> {
    let path: String = client.query_one("SELECT pg_relation_filepath($1::text::regclass)", &[&table])?.get(0);
    Ok(cluster.data_dir().join(path))
}

/// Scans a table whose file shrinks by half meanwhile, to the middle of a block.
fn short_reads(cluster: &Cluster, table: &str, combine_limit: &str) -> Result<()> {
    let mut client = cluster.connect("postgres")?;
    client.batch_execute(&format!("SET io_combine_limit = '{combine_limit}'"))?;
    let filenode = filenode(&mut client, table)?;
    let file = segment_file(cluster, &mut client, table)?;
    // A new session reads small files to their end: without a connection, nobody but this scan reads.
    let tracer =
        Tracer::new(["stat", "--no-connect", "--format", "json", "-D"]).arg(cluster.data_dir()).start()?;
    // The scan has asked for the table's length already when it shrinks.
    begin_scan(&mut client, table)?;
    let half = fs::metadata(&file)?.len() / 2 / BLOCK * BLOCK;
    File::options().write(true).open(&file)?.set_len(half + BLOCK / 2)?;
    let error = client.batch_execute("MOVE ALL FROM c").err().context("the query read what is not there")?;
    let message = error.as_db_error().context("the connection failed")?.message().to_owned();
    ensure!(message.contains("read only 0 of 8192 bytes"), "it failed for another reason: {message}");
    let report = good_report(&tracer.interrupt()?)?;

    let (ledger, io) = (&report["ledger"], &relation_of(&report, filenode)?["io"]);
    assert_eq!(count(&ledger["failed"]), 0, "a short read is no error: {ledger:#}");
    assert_eq!(io["latency_us"]["count"], io["reads"], "every read has its latency");
    let (short, reads, bytes) = (count(&ledger["short"]), count(&io["reads"]), count(&io["bytes"]));
    assert!(bytes < count(&io["blocks"]) * BLOCK, "fewer bytes came than were asked for: {io:#}");
    if combine_limit == "8kB" {
        assert_eq!(bytes, half + BLOCK / 2, "half a block, once");
        assert_eq!(short, reads - bytes / BLOCK, "all but those of whole blocks: {ledger:#} {io:#}");
    } else {
        // Blocks and a half, then once more the half by itself, unless a read begins there; beyond it, nothing comes. Where
        // reads overtake each other, one from beyond may end the query before the half is read.
        let halves = (bytes - half) / (BLOCK / 2);
        assert!(bytes == half + halves * BLOCK / 2 && halves <= 2, "{bytes} bytes of {half}");
        assert!(short >= halves.max(1), "{short} of {halves}: {ledger:#} {io:#}");
    }
    assert_all_exact(&report);
    Ok(())
}

#[test]
fn reads_of_a_truncated_file_are_counted_as_short() -> Result<()> {
    for method in PgInstall::v18()?.io_methods() {
        let cluster = with_tables(method, &["single", "combined"])?;
        for (table, combine_limit) in [("single", "8kB"), ("combined", "128kB")] {
            println!("{method}, {table}");
            short_reads(&cluster, table, combine_limit)?;
        }
    }
    Ok(())
}

/// A small ext4 on a loop device over a file, mounted where one server alone sees it: it goes with that server.
struct Disk {
    image: PathBuf,
    device: String,
    directory: PathBuf,
}

impl Disk {
    /// Mounts one in a cluster's folder.
    fn mount(cluster: &Cluster) -> Result<Self> {
        let (image, directory) = (cluster.folder().join("image"), cluster.folder().join("disk"));
        File::create(&image)?.set_len(96 << 20)?;
        fs::create_dir(&directory)?;
        run(Command::new("mkfs.ext4").args(["-q", "-O", "^has_journal"]).arg(&image))?;
        // The server's root folder may be another one, where its own folder is mounted too.
        let postmaster = cluster.postmaster_pid()?;
        let inside = match cluster.install().kind() {
            Kind::Chroot { root, .. } => root.join(directory.strip_prefix("/")?),
            Kind::Native { .. } => directory.clone(),
        };
        // The loop device is freed with its last user.
        let mount = ["--mount", &format!("--target={postmaster}"), "--", "mount", "-o", "loop"];
        run(elevated("nsenter").args(mount).arg(&image).arg(&inside))?;
        let found =
            Command::new("losetup").args(["--noheadings", "--output=NAME", "-j"]).arg(&image).output()?;
        let device = String::from_utf8(found.stdout)?.trim().to_owned();
        // Through the page cache, what is missing would read as zeros.
        run(elevated("losetup").args(["--direct-io=on", &device]))?;
        let disk = Self { image, device, directory };
        disk.give_to(cluster, postmaster)?;
        Ok(disk)
    }

    fn give_to(&self, cluster: &Cluster, postmaster: u32) -> Result<()> {
        use std::os::unix::fs::MetadataExt as _;
        let owner = fs::metadata(cluster.data_dir())?;
        let place = PathBuf::from(format!("/proc/{postmaster}/root")).join(self.directory.strip_prefix("/")?);
        let tablespace = place.join("tablespace");
        fs::create_dir(&tablespace)?;
        for path in [place, tablespace] {
            chown(&path, Some(owner.uid()), Some(owner.gid()))?;
            fs::set_permissions(&path, Permissions::from_mode(0o700))?;
        }
        Ok(())
    }

    /// Where a tablespace can be.
    fn tablespace(&self) -> String {
        self.directory.join("tablespace").display().to_string()
    }

    /// Loses all data: from now on, reading it is an error (EIO).
    fn lose(&self) -> Result<()> {
        drop_caches()?;
        File::options().write(true).open(&self.image)?.set_len(1 << 20)?;
        Ok(())
    }
}

/// A server with a table on a disk of its own.
fn with_table_on_disk(method: &str) -> Result<(Cluster, Disk, Client)> {
    let cluster = builder(method)?.start()?;
    let disk = Disk::mount(&cluster)?;
    let mut client = cluster.connect("postgres")?;
    client.batch_execute(&format!("CREATE TABLESPACE disk LOCATION '{}'", disk.tablespace()))?;
    client.batch_execute("CREATE TABLE t (id int, filler text) TABLESPACE disk")?;
    fill_table(&mut client, "t", TABLE_SIZE)?;
    scan(&mut client, "t")?;
    Ok((cluster, disk, client))
}

#[test]
fn a_relation_on_a_stacked_device_is_read_from_the_upper_one() -> Result<()> {
    for method in PgInstall::v18()?.io_methods() {
        let (cluster, disk, mut client) = with_table_on_disk(method)?;
        cluster.drop_caches()?;
        let tracer = Tracer::stat(&cluster).start()?;
        let scanned = scan(&mut client, "t")? * BLOCK;
        let report = good_report(&tracer.interrupt()?)?;
        let upper = disk.device.trim_start_matches("/dev/");
        let of_relation = list(relation(&report, "t")?, "devices");
        assert_eq!(of_relation.len(), 1, "{method}: {of_relation:#?}");
        assert_eq!(of_relation[0]["name"], upper, "{method}");
        let read = count(&of_relation[0]["asked_bytes"]) + count(&of_relation[0]["readahead_bytes"]);
        assert!(read >= scanned, "{method}: {read} of {scanned} bytes");
        // For whom the loop driver reads from its file, nobody can tell on the lower device.
        let is_lower = |device: &Value| {
            device["name"] != upper && count(&device["users"]["unknown_bytes"]) >= scanned / 10 * 9
        };
        let devices = list(&report, "devices");
        assert!(devices.iter().any(is_lower), "{method}: {devices:#?}");
    }
    Ok(())
}

/// A table on a disk that loses it during the trace.
fn reads_that_fail(method: &str) -> Result<()> {
    let (cluster, disk, mut client) = with_table_on_disk(method)?;
    let tracer = Tracer::stat(&cluster).start()?;
    disk.lose().with_context(|| format!("cannot truncate the file beneath {}", disk.device))?;
    let error = scan(&mut client, "t").err().context("the query read what is not there")?;
    assert!(format!("{error:?}").contains("Input/output error"), "{method}: {error:?}");
    let report = good_report(&tracer.interrupt()?)?;

    let ledger = &report["ledger"];
    let failed = count(&ledger["failed"]);
    assert!(failed > 0, "{method}: {ledger:#}");
    let io = &relation(&report, "t")?["io"];
    assert!(count(&io["reads"]) >= failed, "{method}: {io:#}");
    assert_eq!(io["latency_us"]["count"], io["reads"], "{method}: a failed read has its latency, too");
    assert_eq!(
        count(&io["blocks"]) * BLOCK,
        count(&io["bytes"]),
        "{method}: a failed read brought none: {io:#}"
    );
    let of_backend = backend(&report, backend_pid(&mut client)?)?;
    assert!(count(&of_backend["io"]["reads"]) >= failed, "{method}: the owner is known: {of_backend:#}");
    assert_all_exact(&report);
    Ok(())
}

#[test]
fn failed_reads_are_counted_with_their_latency_under_sync() -> Result<()> {
    reads_that_fail("sync")
}

#[test]
fn failed_reads_are_counted_with_their_latency_under_worker() -> Result<()> {
    reads_that_fail("worker")
}

#[test]
fn failed_reads_are_counted_with_their_latency_under_io_uring() -> Result<()> {
    reads_that_fail("io_uring")
}

#[test]
fn every_ending_signal_ends_the_trace_with_a_report() -> Result<()> {
    let cluster = with_tables("worker", &["t"])?;
    let mut client = cluster.connect("postgres")?;
    for ending in [Signal::INT, Signal::TERM, Signal::HUP] {
        let tracer = Tracer::stat(&cluster).start()?;
        let scanned = scan(&mut client, "t")?;
        let run = tracer.end_with(ending)?;
        let report = good_report(&run).with_context(|| format!("after {ending:?}"))?;
        assert_eq!(blocks(&report, "t")?, scanned, "{ending:?}");
        assert_eq!(notes(&report), [""; 0], "{ending:?}");
        assert_all_exact(&report);
    }
    Ok(())
}

#[test]
fn sigterm_is_handed_on_to_the_command() -> Result<()> {
    let cluster = builder("worker")?.start()?;
    let ready = cluster.folder().join("ready");
    let handles = format!("trap 'exit 9' TERM; : > {}; while :; do sleep 0.05; done", ready.display());
    let does_not = format!(": > {}; exec sleep 60", ready.display());
    for (script, code) in [(handles, 9), (does_not, 128 + Signal::TERM.as_raw())] {
        let tracer = Tracer::stat(&cluster).args(["--", "sh", "-c", &script]).start()?;
        wait_until("the command runs", || ready.exists())?;
        let run = tracer.end_with(Signal::TERM)?;
        assert_eq!(run.code(), code, "{}", run.stderr);
        assert_eq!(run.report()?["schema"], "pgiotrace.stat/1");
        fs::remove_file(&ready)?;
    }
    Ok(())
}

#[test]
fn connections_that_come_and_go_are_all_counted() -> Result<()> {
    // More than are kept one by one.
    const CONNECTIONS: u64 = 700;
    let cluster = builder("worker")?.start()?;
    cluster.pgbench_init(1)?;
    let pgbench = cluster.pgbench_command(&["-n", "-S", "-C", "-c4", "-t175"])?;
    let report = good_report(&Tracer::stat(&cluster).run(&pgbench)?)?;
    let (kept, ended) = (list(&report, "backends"), list(&report, "ended_backends"));
    // Each reads at least the map of its database's catalogs.
    let folded: u64 = ended.iter().map(|entry| count(&entry["processes"])).sum();
    assert!(folded > 0 && kept.len() as u64 + folded >= CONNECTIONS, "{} kept, {folded} folded", kept.len());
    let reads: u64 = kept.iter().chain(ended).map(|entry| count(&entry["io"]["reads"])).sum();
    let others = count(&report["ledger"]["reads"]) - count(&report["ledger"]["own"]);
    assert_eq!(reads, others, "none of their reads is lost");
    assert!(kept.iter().any(|entry| entry["user"] == "postgres"), "no session was named");
    assert_all_exact(&report);
    Ok(())
}

#[test]
fn io_workers_that_come_and_go_are_listed_by_their_numbers() -> Result<()> {
    let tables = ["t0", "t1", "t2", "t3"];
    let cluster = builder("worker")?.setting("io_workers", "1").start()?;
    let mut client = cluster.connect("postgres")?;
    for table in tables {
        create_table(&mut client, table, TABLE_SIZE)?;
    }
    let tracer = Tracer::stat(&cluster).start()?;
    let mut scanned = scan_all(&cluster, &tables)?;
    for workers in [6, 1] {
        client.batch_execute(&format!("ALTER SYSTEM SET io_workers = {workers}"))?;
        client.batch_execute("SELECT pg_reload_conf()")?;
        wait_until("the io workers are as many as they shall be", || {
            io_workers(&mut client).is_ok_and(|pids| pids.len() == workers)
        })?;
        for (sum, blocks) in scanned.iter_mut().zip(scan_all(&cluster, &tables)?) {
            *sum += blocks;
        }
    }
    let report = good_report(&tracer.interrupt()?)?;

    let shown = tables.iter().map(|table| blocks(&report, table)).collect::<Result<Vec<_>>>()?;
    assert_eq!(shown, scanned);
    let workers = list(&report, "io_workers");
    let numbers: BTreeSet<_> = workers.iter().map(|entry| entry["worker"].as_u64()).collect();
    assert!(!numbers.contains(&None), "every io worker has a number: {:#}", report["io_workers"]);
    assert!(numbers.iter().all(|number| *number < Some(6)), "{numbers:?}");
    let new = workers.iter().filter(|entry| entry["worker"] != 0 && count(&entry["io"]["reads"]) > 0);
    assert!(new.count() > 0, "no new io worker has read: {:#}", report["io_workers"]);
    assert_all_exact(&report);
    Ok(())
}

/// Scans all tables at once, each from a session of its own.
fn scan_all(cluster: &Cluster, tables: &[&str]) -> Result<Vec<u64>> {
    thread::scope(|scope| {
        let scans: Vec<_> = tables
            .iter()
            .map(|table| scope.spawn(move || scan(&mut cluster.connect("postgres")?, table)))
            .collect();
        let join = |scan: thread::ScopedJoinHandle<Result<u64>>| {
            scan.join().map_err(|_| anyhow::anyhow!("a scanning thread panicked"))?
        };
        scans.into_iter().map(join).collect()
    })
}

#[test]
fn temporary_files_are_shown_by_their_folder() -> Result<()> {
    let cluster = with_tables("worker", &["t"])?;
    let mut client = cluster.connect("postgres")?;
    client.batch_execute("SET work_mem = '256kB'; SET max_parallel_workers_per_gather = 0")?;
    let tracer = Tracer::stat(&cluster).start()?;
    let plan = explain(&mut client, "SELECT * FROM t ORDER BY filler, id DESC")?;
    let report = good_report(&tracer.interrupt()?)?;

    let temp_blocks = count(&plan["Temp Read Blocks"]);
    assert!(temp_blocks > 0, "the sort did not spill");
    let found: Vec<_> =
        list(&report, "relations").iter().filter(|entry| entry["file"] == "base/pgsql_tmp").collect();
    let [entry] = found[..] else { bail!("{} entries: {:#}", found.len(), report["relations"]) };
    let io = &entry["io"];
    assert_eq!(count(&io["bytes"]), temp_blocks * BLOCK);
    assert_eq!(io["by_method"]["sync"], io["reads"], "io workers read no temporary files");
    assert!(["name", "fork", "relfilenode"].iter().all(|key| entry[key].is_null()), "{entry:#}");
    assert_eq!(count(&io["blocks"]), 0, "blocks are those of relations");
    assert_eq!(blocks(&report, "t")?, count(&plan["Shared Read Blocks"]));
    assert_all_exact(&report);
    Ok(())
}

/// Two sessions that differ in all that a filter can tell: role, database, table.
struct Pair {
    cluster: Cluster,
    /// `postgres` in `postgres`, reads `t`.
    first: Client,
    /// `alice` in `shop`, reads `u`.
    second: Client,
}

impl Pair {
    fn new() -> Result<Self> {
        let cluster = with_tables("worker", &["t"])?;
        let mut first = cluster.connect("postgres")?;
        first.batch_execute("CREATE ROLE alice LOGIN IN ROLE pg_checkpoint")?;
        first.batch_execute("CREATE DATABASE shop OWNER alice")?;
        let mut config = Config::new();
        config.host_path(cluster.socket_dir()).port(cluster.port()).user("alice").dbname("shop");
        let mut second = config.connect(NoTls)?;
        second.batch_execute("CREATE SCHEMA store")?;
        create_table(&mut second, "store.u", TABLE_SIZE)?;
        Ok(Self { cluster, first, second })
    }

    /// Traces both with a filter. The report, with the blocks that each session scanned.
    fn trace(&mut self, filter: &[&str]) -> Result<(Value, u64, u64)> {
        let tracer = Tracer::stat(&self.cluster).args(filter.iter().copied()).start()?;
        let (first, second) = (scan(&mut self.first, "t")?, scan(&mut self.second, "store.u")?);
        let report = good_report(&tracer.interrupt()?)?;
        let all = count(&report["ledger"]["blocks"]);
        assert!(all >= first + second, "{filter:?}: the ledger counts all: {:#}", report["ledger"]);
        assert_all_exact(&report);
        Ok((report, first, second))
    }
}

/// Names of the relations in a report, and of its backends' roles.
fn shown(report: &Value) -> (BTreeSet<&str>, BTreeSet<&str>) {
    let names = |list: &'static str, key: &'static str| {
        self::list(report, list).iter().filter_map(move |entry| entry[key].as_str()).collect()
    };
    (names("relations", "name"), names("backends", "user"))
}

#[test]
fn filters_restrict_the_tables_and_not_the_ledger() -> Result<()> {
    let mut pair = Pair::new()?;
    let pid = backend_pid(&mut pair.second)?;
    // By session: all that alice reads, of which her table is the most.
    for filter in [["--pid", &pid.to_string()], ["--database", "shop"], ["--user", "alice"]] {
        let (report, _, second) = pair.trace(&filter)?;
        let backends = list(&report, "backends");
        assert!(backends.iter().any(|entry| entry["pid"] == pid), "{filter:?}: {backends:#?}");
        // The tracer's own session looks up names in the same database, as another role.
        let key = filter[0].trim_start_matches("--");
        let wanted: Value = if key == "pid" { pid.into() } else { filter[1].into() };
        assert!(backends.iter().all(|entry: &Value| entry[key] == wanted), "{filter:?}: {backends:#?}");
        assert!(relation(&report, "t").is_err(), "{filter:?}: t is read by the other session");
        assert_eq!(blocks(&report, "u")?, second, "{filter:?}");
    }
    // By relation: of everybody who reads it.
    for filter in [["--relation", "store.u"], ["--relation", "U"]] {
        let (report, _, second) = pair.trace(&filter)?;
        assert_eq!(shown(&report), (["u"].into(), ["alice"].into()), "{filter:?}");
        assert_eq!(blocks(&report, "u")?, second, "{filter:?}");
    }
    // What is repeated, widens; another kind, narrows.
    let (report, first, second) = pair.trace(&["--relation", "t", "--relation", "u"])?;
    assert_eq!((blocks(&report, "t")?, blocks(&report, "u")?), (first, second));
    let (report, ..) = pair.trace(&["--relation", "t", "--user", "alice"])?;
    assert_eq!(shown(&report), (BTreeSet::new(), BTreeSet::new()), "alice does not read t");
    let (report, ..) = pair.trace(&["--relation", "other.u"])?;
    assert_eq!(shown(&report), (BTreeSet::new(), BTreeSet::new()), "u is in another schema");
    Ok(())
}

#[test]
fn min_latency_leaves_out_the_shorter_reads() -> Result<()> {
    let mut pair = Pair::new()?;
    pair.cluster.drop_caches()?;
    let (report, ..) = pair.trace(&["--min-latency", "200us"])?;
    let io = |entry: &Value| (count(&entry["io"]["reads"]), entry["io"]["latency_us"]["p50"].as_f64());
    let shown: Vec<_> = list(&report, "backends").iter().map(io).collect();
    let reads: u64 = shown.iter().map(|(reads, _)| reads).sum();
    assert!(reads > 0, "no cold read took 200 µs");
    assert!(reads < count(&report["ledger"]["reads"]), "no read was shorter: {:#}", report["ledger"]);
    assert!(shown.iter().all(|(_, p50)| *p50 >= Some(199.0)), "{shown:?}");

    let (report, ..) = pair.trace(&["--min-latency", "1h"])?;
    assert!(["backends", "relations"].iter().all(|key| list(&report, key).is_empty()), "{report:#}");
    Ok(())
}

#[test]
fn csv_has_a_row_for_each_table_of_the_report() -> Result<()> {
    let cluster = with_tables("worker", &["t"])?;
    let mut client = cluster.connect("postgres")?;
    let tracer = Tracer::new(["stat", "--format", "csv"]).server(&cluster).start()?;
    let scanned = scan(&mut client, "t")?;
    let run = tracer.interrupt()?;
    assert_eq!(run.code(), 0, "{}", run.stderr);

    let mut reader = csv::Reader::from_reader(run.stdout.as_bytes());
    let header = reader.headers()?.clone();
    // Each row has as many cells as the header, or it is an error.
    let rows = reader.records().collect::<Result<Vec<_>, _>>()?;
    let column = |name: &str| header.iter().position(|column| column == name).context("a column is missing");
    let (section, name, fork) = (column("section")?, column("name")?, column("fork")?);
    let is_it =
        |row: &&csv::StringRecord| (&row[section], &row[name], &row[fork]) == ("relation", "t", "main");
    let row = rows.iter().find(is_it).context("the table has no row")?;
    assert_eq!(row[column("blocks")?], scanned.to_string());
    let sections: BTreeSet<_> = rows.iter().map(|row| &row[section]).collect();
    assert!(sections.is_superset(&["backend", "io_worker", "query", "relation"].into()), "{sections:?}");
    Ok(())
}

#[test]
fn beside_a_command_the_report_goes_where_it_is_sent() -> Result<()> {
    let cluster = builder("worker")?.start()?;
    let psql = cluster.psql_command(&["-At", "-c", "SELECT 'the output of psql'"]);
    let json = Tracer::new(["stat", "--format", "json"]).server(&cluster);
    let run = json.clone().args(["-o", "-"]).run(&psql)?;
    let (said, report) = run.stdout.split_once('\n').context("there is no output")?;
    assert_eq!((run.code(), said, run.stderr.as_str()), (0, "the output of psql", ""));
    assert_eq!(serde_json::from_str::<Value>(report)?["schema"], "pgiotrace.stat/1");

    let run = json.run(&psql)?;
    assert_eq!((run.code(), run.stdout.as_str()), (0, "the output of psql\n"));
    assert_eq!(serde_json::from_str::<Value>(&run.stderr)?["schema"], "pgiotrace.stat/1");
    Ok(())
}
