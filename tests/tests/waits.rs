//! Waits for reads that samples of `pg_stat_activity` saw, and what the awaited reads were doing: on a disk whose latency is set.

use std::{thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use pgiotrace_tests::{
    Cluster, Latency, PgInstall, SlowDisk, Tracer,
    ledger::{complaints, report_of},
    scan::{self, create_table, list},
};
use postgres::Client;
use serde_json::Value;

const LATENCY: Duration = Duration::from_millis(5);
const DOING: [&str; 9] =
    ["pg_queue", "submit", "cache", "block_queue", "device", "wakeup", "finished", "lock", "not_known"];

/// A server whose tables `one` and `two` are on a slow disk. Reads are direct: each of them waits for the disk.
struct Rig {
    // Before the disk that it uses.
    cluster: Cluster,
    disk: SlowDisk,
}

impl Rig {
    fn start(method: &str, settings: &[(&str, &str)]) -> Result<Self> {
        let disk = SlowDisk::builder().size(256 << 20).start()?;
        let mut builder = Cluster::builder(PgInstall::v18()?)
            .io_method(method)
            .shared_buffers("16MB")
            .setting("debug_io_direct", "data")
            .slow_disk(&disk);
        for (name, value) in settings {
            builder = builder.setting(name, value);
        }
        let cluster = builder.start()?;
        let mut client = cluster.connect("postgres")?;
        scan::use_disk(&mut client, &disk)?;
        for table in ["one", "two"] {
            create_table(&mut client, table, 40)?;
        }
        Ok(Self { cluster, disk })
    }

    fn session(&self) -> Result<Client> {
        let mut client = self.cluster.connect("postgres")?;
        client.batch_execute("SET max_parallel_workers_per_gather = 0; SET synchronize_seqscans = off")?;
        for table in ["one", "two"] {
            client.simple_query(&format!("EXPLAIN SELECT count(*) FROM {table}"))?;
        }
        Ok(client)
    }

    /// Scans tables at once, one session each, under the tracer.
    fn scan(&self, tables: &[&str]) -> Result<Value> {
        self.cluster.drop_caches()?;
        let sessions =
            tables.iter().map(|table| Ok((self.session()?, *table))).collect::<Result<Vec<_>>>()?;
        let tracer = Tracer::stat(&self.cluster).args(["--sample-rate", "200"]).start()?;
        self.disk.set_latency(Latency::Constant(LATENCY));
        thread::scope(|scope| {
            let scans: Vec<_> = sessions
                .into_iter()
                .map(|(mut client, table)| {
                    scope.spawn(move || {
                        client.simple_query(&format!("SELECT count(id) FROM {table}")).map(drop)
                    })
                })
                .collect();
            scans.into_iter().try_for_each(|scan| scan.join().expect("no panic"))
        })?;
        let report = report_of(&tracer.interrupt()?)?;
        self.disk.set_latency(Latency::NONE);
        ensure!(complaints(&report).is_empty(), "{:#?}", complaints(&report));
        Ok(report)
    }
}

/// Samples of a wait event, by what the awaited read was doing.
fn doing(report: &Value, event: &str) -> [u64; 9] {
    let rows = list(report, "waits").iter().filter(|wait| wait["event"] == event);
    let mut sums = [0; 9];
    for row in rows {
        for (sum, name) in sums.iter_mut().zip(DOING) {
            *sum += row["doing"][name].as_u64().unwrap_or_default();
        }
    }
    sums
}

fn print(rig: &str, event: &str, counts: [u64; 9]) {
    let all: u64 = counts.iter().sum();
    let shown: Vec<_> = DOING.iter().zip(counts).filter(|(_, count)| *count > 0).collect();
    println!("{rig}: {event}: {all} samples: {shown:?}");
}

#[test]
fn with_one_io_worker_waits_are_explained_and_most_reads_are_in_postgresqls_queue() -> Result<()> {
    let rig = Rig::start("worker", &[("io_workers", "1"), ("effective_io_concurrency", "16")])?;
    let report = rig.scan(&["one", "two"])?;
    let counts = doing(&report, "IO:AioIoCompletion");
    print("one io worker", "AioIoCompletion", counts);
    let (all, unexplained) = (counts.iter().sum::<u64>(), counts[8]);
    assert!(all >= 20, "{:#}", report["waits"]);
    assert!(unexplained * 20 <= all, "{unexplained} of {all} are not explained: {:#}", report["waits"]);
    let [pg_queue, _, _, _, device, ..] = counts;
    // Two sessions wait for one worker, which is always at the device: a session waits for a queued read often.
    assert!(pg_queue * 5 >= all, "{counts:?}");
    assert!(device > 0, "{counts:?}");
    let worker = doing(&report, "IO:DataFileRead");
    print("one io worker", "DataFileRead", worker);
    assert!(worker[4] * 10 >= worker.iter().sum::<u64>() * 8, "the worker waits for the device: {worker:?}");
    Ok(())
}

#[test]
fn a_wait_for_the_read_of_another_backend_names_it() -> Result<()> {
    let rig = Rig::start("worker", &[("effective_io_concurrency", "1"), ("io_combine_limit", "8kB")])?;
    // Both scan the same table at the same pace: each waits for what the other has asked for.
    let report = rig.scan(&["one", "one"])?;
    let pids: Vec<u64> = list(&report, "waits").iter().filter_map(|wait| wait["pid"].as_u64()).collect();
    let others: Vec<_> = list(&report, "waits")
        .iter()
        .filter(|wait| wait["event"] == "IO:AioIoCompletion")
        .flat_map(|wait| list(wait, "of_others").iter().map(move |other| (wait["pid"].as_u64(), other)))
        .collect();
    println!("waits for others: {others:?}");
    assert!(!others.is_empty(), "{:#}", report["waits"]);
    for (waiter, other) in &others {
        let owner = other["pid"].as_u64().context("an owner has a PID")?;
        assert!(Some(owner) != *waiter && pids.contains(&owner), "{other}: {pids:?}");
    }
    Ok(())
}

#[test]
fn under_io_uring_waits_in_the_ring_are_for_the_device() -> Result<()> {
    let rig = Rig::start("io_uring", &[("effective_io_concurrency", "16")])?;
    let report = rig.scan(&["one"])?;
    let counts = doing(&report, "IO:AioIoUringExecution");
    print("io_uring", "AioIoUringExecution", counts);
    let all: u64 = counts.iter().sum();
    assert!(all >= 10, "{:#}", report["waits"]);
    assert!(counts[8] * 20 <= all, "{counts:?}");
    assert!(counts[4] * 10 >= all * 7, "{counts:?}");
    Ok(())
}

#[test]
fn under_sync_a_backend_waits_in_its_own_call() -> Result<()> {
    let rig = Rig::start("sync", &[])?;
    let report = rig.scan(&["one"])?;
    let counts = doing(&report, "IO:DataFileRead");
    print("sync", "DataFileRead", counts);
    let all: u64 = counts.iter().sum();
    assert!(all >= 10 && counts[8] * 20 <= all && counts[4] * 10 >= all * 8, "{counts:?}");
    Ok(())
}
