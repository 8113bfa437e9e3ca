//! A server in a PID namespace of its own, as in a container.

use anyhow::{Context as _, Result, ensure};
use pgiotrace_tests::{Cluster, PgInstall, Tracer, ledger, scan};
use serde_json::Value;

#[test]
fn in_a_container_names_and_rows_are_found_by_the_pids_of_its_own_namespace() -> Result<()> {
    let cluster =
        Cluster::builder(PgInstall::v18()?).io_method("worker").shared_buffers("8MB").own_pids().start()?;
    let mut client = cluster.connect("postgres")?;
    scan::create_table(&mut client, "large", 32)?;
    client.batch_execute("SET application_name = 'scanner'")?;
    let inner = scan::backend_pid(&mut client)?;
    let running = Tracer::stat(&cluster).args(["--sample-rate", "100"]).start()?;
    let mut counted = 0;
    for _ in 0..5 {
        counted += scan::scan(&mut client, "large")?;
    }
    let report = ledger::report_of(&running.interrupt()?)?;
    let complaints = ledger::complaints(&report);
    ensure!(complaints.is_empty(), "{complaints:?}");
    ensure!(scan::blocks(&report, "large")? == counted, "{counted} blocks counted: {report:#}");
    let is_scanner = |entry: &&Value| entry["application_name"] == "scanner";
    let scanner = scan::list(&report, "backends").iter().find(is_scanner).context("the scanner is named")?;
    ensure!(scanner["pid"] != inner, "PIDs are those that the tracer's own system shows: {scanner:#}");
    ensure!(report["ledger"]["pg_aios"]["confirmed"].as_u64() > Some(0), "{:#}", report["ledger"]);
    Ok(())
}
