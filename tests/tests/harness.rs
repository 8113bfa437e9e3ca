//! The harness itself: what it starts, works; what it leaves, is nothing.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use pgiotrace_tests::{Cluster, PgInstall, StopMode, Tracer, sweep_stale, victim, wait_until};

fn is_gone(folder: &Path, postmaster: u32) {
    assert!(!folder.exists(), "{} is still there", folder.display());
    assert!(fs::metadata(format!("/proc/{postmaster}")).is_err(), "the postmaster {postmaster} still runs");
}

#[test]
fn every_method_starts_answers_and_leaves_nothing() -> Result<()> {
    let install = PgInstall::v18()?;
    let methods = install.io_methods();
    assert_eq!(methods, ["sync", "worker", "io_uring"], "setup has brought a PostgreSQL 18 with io_uring");
    let mut cluster = Cluster::builder(install).shared_buffers("16MB").start()?;
    for method in methods {
        cluster.restart(&[("io_method", method)])?;
        let shown: String = cluster.connect("postgres")?.query_one("SHOW io_method", &[])?.get(0);
        assert_eq!(shown, method);
    }
    let output = cluster.psql_command(&["-At", "-c", "SELECT 42"]).output().context("cannot run psql")?;
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "42\n",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    cluster.pgbench_init(1)?;
    cluster.drop_caches()?;

    let (folder, postmaster) = (cluster.folder().to_owned(), cluster.postmaster_pid()?);
    drop(cluster);
    is_gone(&folder, postmaster);
    Ok(())
}

#[test]
fn older_majors_start() -> Result<()> {
    for install in [PgInstall::v17()?, PgInstall::v15()?, PgInstall::v14()?] {
        let major = install.major();
        let mut cluster = Cluster::builder(install).start()?;
        let number: String = cluster.connect("postgres")?.query_one("SHOW server_version_num", &[])?.get(0);
        assert_eq!(number.parse::<u32>()? / 10_000, major);
        cluster.stop(StopMode::Fast)?;
    }
    Ok(())
}

#[test]
fn a_failing_start_says_why() -> Result<()> {
    let started = Cluster::builder(PgInstall::v18()?).setting("shared_buffers", "lots").start();
    let error = format!("{:#}", started.err().context("a server started with a senseless setting")?);
    assert!(error.contains("invalid value for parameter \"shared_buffers\""), "{error}");
    Ok(())
}

#[test]
fn a_password_is_asked_for() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?).password("right").start()?;
    cluster.connect("postgres")?;
    let output = cluster.psql_command(&["-w", "-c", "SELECT 1"]).output().context("cannot run psql")?;
    assert!(!output.status.success(), "psql got in without a password");
    Ok(())
}

/// Does nothing in an ordinary run: it is the part of the next test that runs in a process of its own.
#[test]
fn victim() -> Result<()> {
    if !victim::is_victim() {
        return Ok(());
    }
    let cluster = Cluster::builder(PgInstall::v18()?).start()?;
    victim::live_on(&format!("{} {}", cluster.postmaster_pid()?, cluster.folder().display()))
}

#[test]
fn a_killed_owner_leaves_no_server_and_its_folder_goes_with_the_next_start() -> Result<()> {
    let (mut victim, said) = victim::start()?;
    victim.kill()?;
    victim.wait()?;
    let (postmaster, folder) = said.split_once(' ').context("the victim named no folder")?;

    let process = format!("/proc/{postmaster}");
    wait_until("the postmaster is gone with its owner", || !Path::new(&process).exists())?;
    sweep_stale();
    is_gone(Path::new(folder), postmaster.parse()?);
    Ok(())
}

#[test]
fn the_tracer_is_run_beside_a_server_in_both_ways() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?).start()?;
    let run = Tracer::stat(&cluster).run(&cluster.psql_command(&["-At", "-c", "SELECT 42"]))?;
    assert_eq!((run.code(), run.stdout.as_str()), (0, "42\n"), "{}", run.stderr);
    assert_eq!(run.report()?["target"]["postmaster_pid"], cluster.postmaster_pid()?);

    let background = Tracer::stat(&cluster).start()?;
    cluster.connect("postgres")?.batch_execute("SELECT 1")?;
    let run = background.interrupt()?;
    assert_eq!(run.code(), 0, "{}", run.stderr);
    assert_eq!(run.report()?["schema"], "pgiotrace.stat/1");
    Ok(())
}
