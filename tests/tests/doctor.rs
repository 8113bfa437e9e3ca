//! `pgiotrace doctor`: what it says is so, and its exit code tells whether `stat` could run.

use anyhow::{Context as _, Result, ensure};
use pgiotrace_tests::{Cluster, Finished, PgInstall, StopMode, Tracer, scan::list};
use serde_json::Value;

fn doctor(cluster: &Cluster, format: &str) -> Result<Finished> {
    Tracer::new(["doctor", "--format", format]).server(cluster).finish()
}

fn report(run: &Finished) -> Result<Value> {
    serde_json::from_str(&run.stdout).with_context(|| format!("no JSON: {}{}", run.stdout, run.stderr))
}

/// The checks of an area.
fn checks<'a>(report: &'a Value, area: &str) -> Vec<&'a Value> {
    list(report, "checks").iter().filter(|check| check["area"] == area).collect()
}

#[test]
fn where_all_works_it_says_so_and_ends_with_0() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?).io_method("io_uring").start()?;
    let run = doctor(&cluster, "json")?;
    let report = report(&run)?;
    ensure!(run.code() == 0 && report["can_trace"] == true, "{report:#}");
    let programs = checks(&report, "programs");
    ensure!(programs.len() == 16, "{programs:#?}");
    for check in programs.iter().chain(&checks(&report, "privileges")) {
        ensure!(check["status"] == "ok", "{check:#}");
    }
    let server = checks(&report, "server");
    for (name, part) in [("server", "PostgreSQL 18"), ("io_method", "io_uring")] {
        let check =
            server.iter().find(|check| check["name"] == name).with_context(|| format!("no {name}"))?;
        let detail = check["detail"].as_str().unwrap_or_default();
        ensure!(check["status"] == "ok" && detail.contains(part), "{check:#}");
    }
    let text = doctor(&cluster, "text")?;
    ensure!(text.code() == 0 && text.stdout.contains("BTF tracepoint sys_enter"), "{}", text.stdout);
    Ok(())
}

#[test]
fn without_a_server_it_says_what_to_do_and_ends_with_1() -> Result<()> {
    let mut cluster = Cluster::builder(PgInstall::v18()?).start()?;
    cluster.stop(StopMode::Fast)?;
    let run = doctor(&cluster, "json")?;
    let report = report(&run)?;
    ensure!(run.code() == 1 && report["can_trace"] == false, "{report:#}");
    let missing = checks(&report, "server");
    let [server] = missing[..] else { anyhow::bail!("one line is enough: {missing:#?}") };
    ensure!(server["status"] == "missing" && server["required"] == true, "{server:#}");
    ensure!(server["mend"].as_str().is_some_and(|mend| mend.contains("start")), "{server:#}");
    Ok(())
}

#[test]
fn a_role_without_rights_is_told_the_statement_that_gives_them() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?).start()?;
    cluster.connect("postgres")?.batch_execute("CREATE ROLE poor LOGIN")?;
    let tracer = Tracer::new(["doctor", "--format", "json", "-U", "poor", "-d", "postgres", "-D"]);
    let run = tracer.arg(cluster.data_dir()).finish()?;
    let report = report(&run)?;
    ensure!(run.code() == 0, "names are missing, but stat could run: {report:#}");
    let is_told = |check: &&Value| check["mend"] == "GRANT pg_monitor TO \"poor\"";
    ensure!(list(&report, "checks").iter().any(|check| is_told(&check)), "{report:#}");
    Ok(())
}
