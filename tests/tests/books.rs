//! The ledger: no read is lost silently.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use pgiotrace_tests::{Cluster, PgInstall, Tracer, ledger, scan};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Sum of a count over the entries of a list of the report.
fn sum(report: &Value, section: &str, count: &str) -> u64 {
    scan::list(report, section).iter().filter_map(|entry| entry["io"][count].as_u64()).sum()
}

#[test]
fn a_full_ring_is_counted_and_backends_and_workers_stay_complete() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?).io_method("worker").shared_buffers("8MB").start()?;
    let mut client = cluster.connect("postgres")?;
    scan::create_table(&mut client, "large", 64)?;
    client.batch_execute("SET application_name = 'scanner'")?;
    // Room for 481 records, which the stopped tracer does not take out.
    let running = Tracer::stat(&cluster).args(["--ring-kib", "64"]).start()?;
    let pid = i32::try_from(running.pid()).ok().and_then(Pid::from_raw).context("the tracer has a PID")?;
    kill_process(pid, Signal::STOP)?;
    let mut counted = BTreeMap::new();
    for turn in 0..4 {
        counted.insert(turn, scan::scan(&mut client, "large")?);
    }
    kill_process(pid, Signal::CONT)?;
    let run = running.interrupt()?;
    ensure!(run.code() == 3, "an incomplete ledger exits with 3, not {}: {}", run.code(), run.stderr);
    let report = run.report()?;
    let [begun, reads, in_flight, lost] =
        ["begun", "reads", "in_flight", "lost"].map(|key| report["ledger"][key].as_u64().unwrap_or_default());
    ensure!(lost > 0 && report["ledger"]["complete"] == false, "{:#}", report["ledger"]);
    ensure!(begun == reads + in_flight + lost, "the books balance all the same: {:#}", report["ledger"]);
    let own = ledger::count(&report, "/ledger/own")?;
    ensure!(sum(&report, "backends", "reads") + own == reads + lost, "backends have every read: {report:#}");
    let is_scanner = |entry: &&Value| entry["application_name"] == "scanner";
    let scanner =
        scan::list(&report, "backends").iter().find(is_scanner).context("the scanner owned reads")?;
    let blocks = scanner["io"]["blocks"].as_u64().unwrap_or_default();
    let counted: u64 = counted.values().sum();
    println!("lost {lost} of {begun} reads; blocks of the scanner {blocks}, counted by PostgreSQL {counted}");
    // Catalogs may add a few blocks to the scanner's own.
    ensure!((counted..counted + 200).contains(&blocks), "{blocks} blocks traced, {counted} counted");
    ensure!(scanner["io"]["latency_us"]["count"] == scanner["io"]["reads"], "{scanner:#}");
    ensure!(sum(&report, "io_workers", "reads") > 0, "{report:#}");
    Ok(())
}

#[test]
fn a_complete_ledger_says_so_and_its_tables_add_up_to_it() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?).io_method("worker").shared_buffers("8MB").start()?;
    scan::create_table(&mut cluster.connect("postgres")?, "large", 32)?;
    let query = cluster.psql_command(&["-c", "SELECT count(*) FROM large"]);
    let report = ledger::report_of(&Tracer::stat(&cluster).run(&query)?)?;
    let complaints = ledger::complaints(&report);
    ensure!(complaints.is_empty(), "{complaints:?}");
    let reads = ledger::count(&report, "/ledger/reads")? - ledger::count(&report, "/ledger/own")?;
    for section in ["backends", "relations"] {
        ensure!(sum(&report, section, "reads") == reads, "{section} have all {reads} reads: {report:#}");
    }
    ensure!(sum(&report, "methods", "reads") == reads, "{report:#}");
    Ok(())
}
