//! Kinds of servers: a standby, one with a name, the next version.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use pgiotrace_tests::{
    Cluster, ClusterBuilder, PgInstall, StopMode, Tracer,
    ledger::{complaints, report_of},
    run,
    scan::{backend_pid, blocks, create_table, explain, list, notes, scan},
    wait_until,
};
use postgres::Client;
use serde_json::Value;

/// Small beside the tables, so that these are read again.
const SHARED_BUFFERS: &str = "16MB";
/// Size of a table, in mebibytes.
const TABLE_SIZE: u32 = 32;
/// With what could be taken for the end of a title.
const CLUSTER_NAME: &str = "shop: io worker 7: main";

fn builder(install: PgInstall, method: &str) -> ClusterBuilder {
    Cluster::builder(install).io_method(method).shared_buffers(SHARED_BUFFERS)
}

fn assert_books(report: &Value) {
    assert_eq!(complaints(report), [""; 0]);
}

/// A standby by an archive, which has everything but what it has to replay.
struct Standby {
    cluster: Cluster,
    /// Where the standby finds log that it has not replayed, once it is there.
    archive: PathBuf,
    /// The same log, where the standby does not look.
    kept: PathBuf,
}

impl Standby {
    /// A standby with table `t`, of which every row was changed after it was made.
    fn new(method: &str) -> Result<Self> {
        let builder = builder(PgInstall::v18()?, method)
            // Else the log brings whole pages, and there is nothing to read.
            .setting("full_page_writes", "off")
            .setting("wal_retrieve_retry_interval", "100ms");
        let mut cluster = builder.start()?;
        create_table(&mut cluster.connect("postgres")?, "t", TABLE_SIZE)?;
        cluster.stop(StopMode::Fast)?;
        let [archive, kept, copy] = ["archive", "kept", "copy"].map(|name| cluster.folder().join(name));
        copy_tree(&cluster.data_dir(), &copy)?;
        cluster.start()?;
        cluster.connect("postgres")?.batch_execute("UPDATE t SET filler = 'x'")?;
        cluster.stop(StopMode::Fast)?;
        copy_tree(&cluster.data_dir().join("pg_wal"), &kept)?;
        fs::remove_dir_all(cluster.data_dir())?;
        fs::rename(&copy, cluster.data_dir())?;
        fs::write(cluster.data_dir().join("standby.signal"), "")?;
        let restore = format!("cp {}/%f \"%p\"", archive.display());
        cluster.restart(&[("restore_command", &restore)])?;
        Ok(Self { cluster, archive, kept })
    }

    /// Lets it replay all that it has missed, and waits until it has: no row is as it was.
    fn catch_up(&self, client: &mut Client) -> Result<()> {
        fs::rename(&self.kept, &self.archive)?;
        // Each look reads the table, but who reads it does not matter here.
        let last = "SELECT filler = 'x' FROM t ORDER BY ctid DESC LIMIT 1";
        wait_until("the standby has replayed everything", || {
            client
                .query_opt(last, &[])
                .ok()
                .flatten()
                .is_some_and(|row| row.get::<_, Option<bool>>(0) == Some(true))
        })
    }
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    run(Command::new("cp").arg("-a").arg(from).arg(to)).map(|_| ())
}

#[test]
fn a_standby_is_traced_to_the_block_and_its_replay_is_named() -> Result<()> {
    for method in PgInstall::v18()?.io_methods().into_iter().filter(|method| *method != "sync") {
        let standby = Standby::new(method)?;
        let mut client = standby.cluster.connect("postgres")?;
        let is_standby: bool = client.query_one("SELECT pg_is_in_recovery()", &[])?.get(0);
        ensure!(is_standby, "the server is no standby");
        let tracer = Tracer::stat(&standby.cluster).start()?;
        let scanned = scan(&mut client, "t")?;
        let report = report_of(&tracer.interrupt()?)?;
        assert_eq!(blocks(&report, "t")?, scanned, "{method}");
        assert_books(&report);
        assert_eq!(notes(&report), [""; 0], "{method}");

        let tracer = Tracer::stat(&standby.cluster).start()?;
        standby.catch_up(&mut client)?;
        let report = report_of(&tracer.interrupt()?)?;
        let is_startup = |entry: &&Value| entry["backend_type"] == "startup";
        let startup = list(&report, "backends").iter().find(is_startup);
        let startup = startup.with_context(|| format!("the startup process is not named: {report:#}"))?;
        assert!(startup["io"]["blocks"].as_u64() > Some(100), "{method}: it replayed: {startup:#}");
        assert_books(&report);
    }
    Ok(())
}

#[test]
fn a_clusters_name_hides_neither_io_workers_nor_parallel_workers() -> Result<()> {
    let cluster = builder(PgInstall::v18()?, "worker").setting("cluster_name", CLUSTER_NAME).start()?;
    let mut client = cluster.connect("postgres")?;
    create_table(&mut client, "t", TABLE_SIZE)?;
    client.batch_execute(
        "SET max_parallel_workers_per_gather = 2; SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; \
         SET min_parallel_table_scan_size = 0; SET parallel_leader_participation = off",
    )?;
    // Without a connection, titles are all there is.
    let titles = ["stat", "--no-connect", "--format", "json", "-D"];
    for (tracer, name) in [
        (Tracer::stat(&cluster), Value::from(CLUSTER_NAME)),
        (Tracer::new(titles).arg(cluster.data_dir()), Value::Null),
    ] {
        let tracer = tracer.start()?;
        explain(&mut client, "SELECT count(*) FROM t")?;
        let report = report_of(&tracer.interrupt()?)?;
        let ledger = &report["ledger"];
        assert_eq!(
            (&ledger["complete"], &ledger["exact"]),
            (&Value::Bool(true), &ledger["reads"]),
            "{ledger:#}"
        );
        assert_eq!(report["target"]["cluster_name"], name);
        let numbers: Vec<_> = list(&report, "io_workers").iter().map(|entry| &entry["worker"]).collect();
        assert!(numbers.contains(&&Value::from(0)), "{:#}", report["io_workers"]);
        assert!(numbers.iter().all(|number| number.as_u64() < Some(7)), "none of its name: {numbers:?}");
        let leader = backend_pid(&mut client)?;
        let is_its_worker =
            |entry: &&Value| entry["backend_type"] == "parallel worker" && entry["leader_pid"] == leader;
        assert!(
            list(&report, "backends").iter().any(|entry| is_its_worker(&entry)),
            "{:#}",
            report["backends"]
        );
    }
    let text = Tracer::new(["stat", "--duration", "1s"]).server(&cluster).finish()?;
    assert!(text.stdout.contains(&format!(" \"{CLUSTER_NAME}\", postmaster ")), "{}", text.stdout);
    let doctor = Tracer::new(["doctor"]).server(&cluster).finish()?;
    assert!(doctor.stdout.contains(&format!("cluster \"{CLUSTER_NAME}\"")), "{}", doctor.stdout);
    Ok(())
}

#[test]
fn the_next_version_is_traced_to_the_block_with_exact_owners() -> Result<()> {
    let install = PgInstall::v19()?;
    for method in install.io_methods() {
        let cluster = builder(install.clone(), method).start()?;
        let mut client = cluster.connect("postgres")?;
        create_table(&mut client, "t", TABLE_SIZE)?;
        let tracer = Tracer::stat(&cluster).args(["--sample-rate", "100"]).start()?;
        let mut scanned = 0;
        for _ in 0..3 {
            scanned += scan(&mut client, "t")?;
        }
        let report = report_of(&tracer.interrupt()?)?;
        assert_eq!(blocks(&report, "t")?, scanned, "{method}");
        assert_books(&report);
        assert_eq!(notes(&report), [""; 0], "{method}");
        let is_read = |entry: &&Value| entry["io"]["by_method"][method].as_u64() > Some(0);
        assert!(list(&report, "backends").iter().any(|entry| is_read(&entry)), "{method}: {report:#}");
    }
    Ok(())
}
