//! PostgreSQL's own statistics beside the traced reads: `pg_stat_io`, `pg_stat_get_backend_io`, `pg_stat_database`.

use anyhow::{Context as _, Result, ensure};
use pgiotrace_tests::{
    Cluster, ClusterBuilder, Latency, PgInstall, SlowDisk, Tracer,
    ledger::{complaints, report_of},
    scan::{backend_pid, create_table, list, notes, use_disk},
    wait_until,
};
use serde_json::Value;
use std::{thread, time::Duration};

const SCAN: &str = "SELECT count(*) FROM large";
/// Mebibytes of the table.
const SIZE: u32 = 48;

fn builder(install: PgInstall) -> ClusterBuilder {
    Cluster::builder(install).shared_buffers("64MB").setting("max_parallel_workers_per_gather", "0")
}

/// Makes the table, and empties all caches of it.
fn loaded(cluster: &mut Cluster) -> Result<()> {
    create_table(&mut cluster.connect("postgres")?, "large", SIZE)?;
    cluster.restart(&[])?;
    cluster.drop_caches()
}

/// The row of a type of backend in `pg_stat_io`.
fn row<'a>(report: &'a Value, backend_type: &str, object: &str) -> Result<&'a Value> {
    let is_it = |row: &&Value| row["backend_type"] == backend_type && row["object"] == object;
    let found = list(&report["pg_stat_io"], "rows").iter().find(is_it);
    found.with_context(|| format!("no row of {backend_type}: {:#}", report["pg_stat_io"]))
}

fn database<'a>(report: &'a Value, name: &str) -> Result<&'a Value> {
    let found = list(&report["pg_stat_database"], "rows").iter().find(|row| row["database"] == name);
    found.with_context(|| format!("no row of {name}: {:#}", report["pg_stat_database"]))
}

fn number(value: &Value) -> Result<f64> {
    value.as_f64().with_context(|| format!("{value} is no number"))
}

/// The counts are equal, and so no reason is given.
fn ensure_equal(row: &Value, keys: &[&str]) -> Result<()> {
    for key in keys {
        ensure!(row["difference"][*key] == 0, "{key} differ: {row:#}");
        ensure!(row["claimed"][*key] == row["traced"][*key], "{key} differ: {row:#}");
    }
    ensure!(row["reason"].is_null(), "{row:#}");
    Ok(())
}

#[test]
fn a_commands_reads_are_those_that_postgresql_counted_under_each_method() -> Result<()> {
    let install = PgInstall::v18()?;
    let methods = install.io_methods();
    let mut cluster = builder(install).start()?;
    loaded(&mut cluster)?;
    for method in methods {
        cluster.restart(&[("io_method", method)])?;
        cluster.drop_caches()?;
        let run = Tracer::stat(&cluster).run(&cluster.psql_command(&["-c", SCAN]))?;
        let report = report_of(&run)?;
        ensure!(complaints(&report).is_empty(), "{method}: {:?}", complaints(&report));
        let clients = row(&report, "client backend", "relation")?;
        println!("{method}: {clients:#} {:#}", report["pg_stat_database"]);
        ensure_equal(clients, &["reads", "bytes"])?;
        ensure!(number(&clients["claimed"]["bytes"])? >= f64::from(SIZE << 20), "{clients:#}");
        for row in list(&report["pg_stat_database"], "rows") {
            ensure_equal(row, &["blocks"])?;
        }
        ensure!(number(&database(&report, "postgres")?["claimed"]["blocks"])? > 0.0);
        // The io workers' own rows stay empty: reads are charged to who wanted them.
        ensure!(row(&report, "io worker", "relation").is_err(), "{:#}", report["pg_stat_io"]);
        let bulk = list(&report["pg_stat_io"], "contexts").iter().find(|row| row["context"] == "bulkread");
        let bulk = bulk.with_context(|| format!("no bulk reads: {:#}", report["pg_stat_io"]))?;
        ensure!(number(&bulk["reads"]["count"])? > 0.0 && number(&bulk["evictions"])? >= 0.0, "{bulk:#}");
    }
    Ok(())
}

#[test]
fn what_postgresql_claims_of_the_time_is_the_issuers_and_not_the_reads() -> Result<()> {
    let disk = SlowDisk::builder().size(512 << 20).start()?;
    let mut cluster =
        builder(PgInstall::v18()?).slow_disk(&disk).setting("debug_io_direct", "data").start()?;
    let mut client = cluster.connect("postgres")?;
    use_disk(&mut client, &disk)?;
    create_table(&mut client, "large", 24)?;
    drop(client);
    for method in ["sync", "worker", "io_uring"] {
        cluster.restart(&[("io_method", method)])?;
        disk.set_latency(Latency::Constant(Duration::from_millis(5)));
        let run = Tracer::stat(&cluster).run(&cluster.psql_command(&["-c", SCAN]))?;
        disk.set_latency(Latency::NONE);
        let report = report_of(&run)?;
        let clients = row(&report, "client backend", "relation")?;
        ensure_equal(clients, &["reads", "bytes"])?;
        let claimed_ms = number(&clients["claimed"]["read_time_ms"])?;
        let traced_ms = number(&clients["traced"]["latency_us"]["sum"])? / 1e3;
        println!("{method}: claimed {claimed_ms:.0} ms, traced {traced_ms:.0} ms");
        if method == "sync" {
            // One process, one read at a time: all of each read, and little more.
            ensure!(claimed_ms > traced_ms * 0.95, "{clients:#}");
        } else {
            // Several reads were in flight at once, and the time until the first of them ended was the time of all.
            ensure!(claimed_ms < traced_ms * 0.75, "{clients:#}");
        }
    }
    Ok(())
}

/// Traces while statements run on sessions of their own.
fn traced_while(cluster: &Cluster, work: impl FnOnce() -> Result<()>) -> Result<Value> {
    let mut client = cluster.connect("postgres")?;
    let tracer = Tracer::stat(cluster).start()?;
    // With its first sample it also looks at the statistics: the last statement of that look.
    let looked = "SELECT FROM pg_stat_activity WHERE application_name = 'pgiotrace' AND query LIKE '%pg_stat_activity%'
        AND EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'pgiotrace')";
    wait_until("the server is sampled", || client.query(looked, &[]).is_ok_and(|rows| !rows.is_empty()))?;
    work()?;
    report_of(&tracer.interrupt()?)
}

#[test]
fn a_session_that_is_still_in_its_statement_has_not_flushed_and_that_is_the_reason() -> Result<()> {
    let mut cluster = builder(PgInstall::v18()?).io_method("sync").start()?;
    loaded(&mut cluster)?;
    let mut busy = cluster.connect("postgres")?;
    let pid = backend_pid(&mut busy)?;
    let cancel = busy.cancel_token();
    let mut held = None;
    let report = traced_while(&cluster, || {
        held = Some(thread::spawn(move || busy.simple_query("SELECT count(*), pg_sleep(600) FROM large")));
        let mut client = cluster.connect("postgres")?;
        let sleeping = "SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'PgSleep'";
        let pid = i32::try_from(pid)?;
        wait_until("the scan is done", || client.query(sleeping, &[&pid]).is_ok_and(|rows| !rows.is_empty()))
    })?;
    cancel.cancel_query(postgres::NoTls)?;
    held.map(thread::JoinHandle::join);

    for row in [
        row(&report, "client backend", "relation")?,
        backend_row(&report, pid)?,
        database(&report, "postgres")?,
    ] {
        let reason = row["reason"].as_str().with_context(|| format!("no reason: {row:#}"))?;
        ensure!(reason.starts_with("not flushed yet: "), "{reason}");
    }
    let row = backend_row(&report, pid)?;
    ensure!(number(&row["difference"]["bytes"])? <= -f64::from(SIZE << 20), "{row:#}");
    Ok(())
}

fn backend_row(report: &Value, pid: u32) -> Result<&Value> {
    let found = list(&report["pg_stat_backend_io"], "rows").iter().find(|row| row["pid"] == pid);
    found.with_context(|| format!("no row of {pid}: {:#}", report["pg_stat_backend_io"]))
}

#[test]
fn a_vacuums_reads_are_in_their_context() -> Result<()> {
    let mut cluster = builder(PgInstall::v18()?).io_method("worker").start()?;
    loaded(&mut cluster)?;
    let vacuum = cluster.psql_command(&["-c", "VACUUM (DISABLE_PAGE_SKIPPING) large"]);
    let report = report_of(&Tracer::stat(&cluster).run(&vacuum)?)?;
    ensure_equal(row(&report, "client backend", "relation")?, &["reads", "bytes"])?;
    let is_vacuum = |row: &&Value| row["context"] == "vacuum" && row["backend_type"] == "client backend";
    let context =
        list(&report["pg_stat_io"], "contexts").iter().find(is_vacuum).context("no context vacuum")?;
    ensure!(number(&context["reads"]["count"])? > 0.0, "{context:#}");
    ensure!(number(&context["reads"]["mean_us"])? > 0.0, "{context:#}");
    Ok(())
}

#[test]
fn before_18_blocks_are_counted_and_before_16_only_databases() -> Result<()> {
    for (install, has_io) in [(PgInstall::v17()?, true), (PgInstall::v15()?, false)] {
        let mut cluster = builder(install).start()?;
        loaded(&mut cluster)?;
        let report = report_of(&Tracer::stat(&cluster).run(&cluster.psql_command(&["-c", SCAN]))?)?;
        println!("{:#} {:#}", report["pg_stat_io"], report["pg_stat_database"]);
        ensure!(report["pg_stat_backend_io"].is_null(), "{report:#}");
        ensure!(report["pg_stat_io"].is_null() != has_io, "{report:#}");
        if has_io {
            ensure!(report["pg_stat_io"]["reads_are_blocks"] == true, "{report:#}");
            let clients = row(&report, "client backend", "relation")?;
            ensure!(
                clients["claimed"]["reads"].as_u64() > clients["traced"]["reads"].as_u64(),
                "{clients:#}"
            );
            ensure!(clients["difference"]["reads"].is_null(), "blocks are no reads: {clients:#}");
            judge(clients, "bytes", 8192.0)?;
        }
        judge(database(&report, "postgres")?, "blocks", 1.0)?;
    }
    Ok(())
}

/// The tracer's own sessions cannot be told apart before 18: what they add is little, and is said.
fn judge(row: &Value, key: &str, unit: f64) -> Result<()> {
    let difference = number(&row["difference"][key])?;
    ensure!(difference.abs() <= 200.0 * unit, "{row:#}");
    ensure!(row["reason"].is_null() == (difference == 0.0), "{row:#}");
    Ok(())
}

#[test]
fn a_role_that_may_only_log_in_compares_as_well() -> Result<()> {
    let mut cluster = builder(PgInstall::v18()?).io_method("sync").start()?;
    loaded(&mut cluster)?;
    cluster.connect("postgres")?.batch_execute("CREATE ROLE poor LOGIN")?;
    let tracer = Tracer::new(["stat", "--format", "json", "-U", "poor", "-d", "postgres", "-D"]);
    let scan = cluster.psql_command(&["-q", "-o", "/dev/null", "-c", SCAN]);
    let run = tracer.arg(cluster.data_dir()).args(["-o", "-"]).run(&scan)?;
    let report = run.report()?;
    ensure_equal(row(&report, "client backend", "relation")?, &["reads", "bytes"])?;
    ensure_equal(database(&report, "postgres")?, &["blocks"])
}

#[test]
fn statistics_that_are_reset_in_the_window_give_no_figure() -> Result<()> {
    let mut cluster = builder(PgInstall::v18()?).io_method("sync").start()?;
    loaded(&mut cluster)?;
    let command = cluster.psql_command(&["-c", SCAN, "-c", "SELECT pg_stat_reset_shared('io')"]);
    let report = report_of(&Tracer::stat(&cluster).run(&command)?)?;
    let clients = row(&report, "client backend", "relation")?;
    ensure!(clients["claimed"].is_null() && clients["difference"].is_null(), "{clients:#}");
    ensure!(clients["reason"] == "the counters were reset in the window", "{clients:#}");
    ensure!(list(&report["pg_stat_io"], "contexts").is_empty(), "{report:#}");
    ensure!(notes(&report).iter().any(|note| note.starts_with("pg_stat_io was reset")), "{report:#}");
    // The databases' counters go on.
    ensure_equal(database(&report, "postgres")?, &["blocks"])
}

#[test]
fn times_that_are_not_taken_are_not_shown_as_zero() -> Result<()> {
    let mut cluster =
        builder(PgInstall::v18()?).io_method("sync").setting("track_io_timing", "off").start()?;
    loaded(&mut cluster)?;
    let report = report_of(&Tracer::stat(&cluster).run(&cluster.psql_command(&["-c", SCAN]))?)?;
    let clients = row(&report, "client backend", "relation")?;
    ensure_equal(clients, &["reads", "bytes"])?;
    ensure!(clients["claimed"]["read_time_ms"].is_null(), "{clients:#}");
    ensure!(database(&report, "postgres")?["claimed"]["read_time_ms"].is_null(), "{report:#}");
    Ok(())
}

#[test]
fn without_samples_there_is_nothing_to_compare() -> Result<()> {
    let mut cluster = builder(PgInstall::v18()?).io_method("sync").start()?;
    loaded(&mut cluster)?;
    let scan = cluster.psql_command(&["-c", SCAN]);
    let report = report_of(&Tracer::stat(&cluster).args(["--sample-rate", "0"]).run(&scan)?)?;
    for key in ["pg_stat_io", "pg_stat_backend_io", "pg_stat_database"] {
        ensure!(report[key].is_null(), "{key}: {:#}", report[key]);
    }
    Ok(())
}
