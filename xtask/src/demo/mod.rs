//! One cold query under each I/O method: what PostgreSQL claims, and what the kernel saw.

mod measure;
mod table;

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use anyhow::{Context as _, Result, bail};
use pgiotrace_tests::{Cluster, Kept, PgInstall, is_root, remove_everything};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};

use crate::{
    project::{cargo, root, run_visibly},
    setup::{self, Scope},
    step,
};

/// Small, so that a table ten times as large loads in seconds.
const SHARED_BUFFERS: &str = "32MB";
/// About 13 MB each.
const PGBENCH_SCALE: u32 = 26;

/// Set once this process was told to end.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Runs the demo. Whatever it made is gone afterwards, unless `keep`.
pub(crate) fn run(keep: bool) -> Result<()> {
    clean_up_on_signals()?;
    let result = compare_methods(keep);
    while INTERRUPTED.load(Ordering::SeqCst) {
        // What failed, failed because everything is being ended; the thread that does it ends the process as well.
        thread::park();
    }
    result
}

fn compare_methods(keep: bool) -> Result<()> {
    if !is_root() {
        ask_for_root()?;
    }
    setup::run(Scope::Demo)?;
    let tracer = build_tracer()?;
    let install = PgInstall::v18()?;
    let methods = install.io_methods();
    let mut cluster = start_cluster(install, keep)?;
    let mut rows = Vec::new();
    for method in &methods {
        step::doing(method, "reading the table, cold");
        cluster.restart(&[("io_method", method)])?;
        rows.push(measure::cold_count(&cluster, method, &tracer)?);
    }
    step::done("measured", format!("{}, each with cold caches and a fresh server", methods.join(", ")));
    println!("\nSELECT count(abalance) FROM pgbench_accounts, {}\n", table_size(&cluster)?);
    println!("{}", table::render(&rows));
    println!(
        "\nEXPLAIN's time is what the backend spent on submitting reads, waiting for them and checking their pages; the"
    );
    println!(
        "kernel's is what the reads themselves took. Reads that overlap the query's work cost EXPLAIN nothing."
    );
    if !methods.contains(&"io_uring") {
        println!("\nio_uring is left out: this server was built without it.");
    }
    if keep {
        print_kept(&cluster.keep()?, &tracer);
    }
    Ok(())
}

/// Removes everything when this process is told to end, from a thread of its own: the main one may be waiting for
/// anything. The process ends with the code that a shell expects.
fn clean_up_on_signals() -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot listen for signals")?;
    thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            INTERRUPTED.store(true, Ordering::SeqCst);
            eprintln!("\ninterrupted: removing what was made");
            remove_everything();
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}

fn ask_for_root() -> Result<()> {
    println!("The demo runs as you, except for what needs root, for which it uses sudo:");
    println!("  pgiotrace itself, mounts (tracefs, and the server's root folder), emptying the page cache");
    let status = Command::new("sudo").arg("-v").status().context("cannot run sudo: run the demo as root")?;
    if !status.success() {
        bail!("sudo lets you run nothing: run the demo as root");
    }
    Ok(())
}

/// The tracer of this workspace, unless PGIOTRACE_BIN names another.
fn build_tracer() -> Result<PathBuf> {
    if let Some(named) = env::var_os("PGIOTRACE_BIN") {
        return Ok(named.into());
    }
    step::doing("pgiotrace", "building it");
    run_visibly(cargo()?.args(["build", "--quiet", "--release", "--package", "pgiotrace"]))
        .context("cannot build the tracer")?;
    let binary = root().join("target/release/pgiotrace");
    step::done("pgiotrace", "built");
    Ok(binary)
}

fn start_cluster(install: PgInstall, keep: bool) -> Result<Cluster> {
    step::doing("cluster", "starting it and loading a table");
    let mut builder = Cluster::builder(install)
        .shared_buffers(SHARED_BUFFERS)
        .setting("max_parallel_workers_per_gather", "0");
    if keep {
        builder = builder.outlives_us();
    }
    let cluster = builder.start()?;
    cluster.pgbench_init(PGBENCH_SCALE)?;
    step::done("cluster", format!("in {}, shared_buffers {SHARED_BUFFERS}", cluster.folder().display()));
    Ok(cluster)
}

fn table_size(cluster: &Cluster) -> Result<String> {
    let query = "SELECT pg_size_pretty(pg_relation_size('pgbench_accounts'))";
    let row =
        cluster.connect("postgres")?.query_one(query, &[]).context("cannot ask for the table's size")?;
    Ok(row.get(0))
}

fn print_kept(kept: &Kept, tracer: &Path) {
    let Kept { folder, socket_dir, port, postmaster_pid } = kept;
    println!("\nThe server runs on. Reach it with");
    println!("  psql -h {} -p {port} -U postgres postgres", socket_dir.display());
    println!("  {} stat -p {port} -U postgres", tracer.display());
    println!("and end it with");
    println!(
        "  kill -INT {postmaster_pid} && tail --pid={postmaster_pid} -f /dev/null && rm -r {}",
        folder.display()
    );
}
