//! One cold query under each I/O method, on the machine's own disk and on one whose reads take 5 ms: what PostgreSQL claims, what the
//! kernel saw, and what that amounts to.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use pgiotrace_tests::{
    Cluster, Kept, Latency, PgInstall, SlowDisk, Tracer, is_root, remove_everything, scan,
};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};

use crate::{
    project::{cargo, root, run_visibly},
    setup::{self, Scope},
    step,
};

/// Small, so that a table twenty times as large loads in seconds.
const SHARED_BUFFERS: &str = "32MB";
/// About 13 MB each.
const PGBENCH_SCALE: u32 = 50;
/// How long a read of the slow disk takes.
const SLOW_LATENCY: Duration = Duration::from_millis(5);
/// A tenth of the rows, since the slow disk takes so much longer.
const SLOW_TABLE: &str = "CREATE SCHEMA slow;
    CREATE TABLE slow.pgbench_accounts AS SELECT * FROM pgbench_accounts WHERE aid % 10 = 0";
/// The query that is measured. Which table that is, the search path decides.
const QUERY: &str = "SELECT count(abalance) FROM pgbench_accounts";

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
    // Its mounts and its loop device need root, and sudo gives that to single commands only.
    let disk = is_root().then(|| SlowDisk::builder().size(512 << 20).start()).transpose()?;
    let mut cluster = start_cluster(install, disk.as_ref(), keep)?;
    let reports = measure(&mut cluster, &methods, disk.as_ref(), &tracer)?;
    println!("\nThe table has {}.\n", sizes(&cluster, disk.is_some())?);
    let mut compare = Command::new(&tracer);
    compare.args(["explain", "--compare"]).args(&reports).current_dir(cluster.folder());
    run_visibly(&mut compare).context("cannot compare the reports")?;
    println!(
        "\nEXPLAIN's I/O time is what the backend spent on submitting reads, waiting for them and checking their pages;"
    );
    println!("TOTAL is what the reads themselves took, and EXPOSED what the query waited for them.");
    if !methods.contains(&"io_uring") {
        println!("\nio_uring is left out: this server was built without it.");
    }
    if disk.is_none() {
        println!("\nThe slow disk is left out: run the demo as root to see it.");
    }
    if keep {
        // As servers are: through the page cache.
        cluster.restart(&[("debug_io_direct", "")])?;
        // The disk goes with this process.
        let mut client = cluster.connect("postgres")?;
        client.batch_execute("DROP SCHEMA IF EXISTS slow CASCADE")?;
        client.batch_execute("DROP TABLESPACE IF EXISTS slow")?;
        print_kept(&cluster.keep()?, &tracer);
    }
    Ok(())
}

/// Runs the query under each method, cold, on each disk. Returns the reports' names, in the cluster's folder.
fn measure(
    cluster: &mut Cluster,
    methods: &[&str],
    disk: Option<&SlowDisk>,
    tracer: &Path,
) -> Result<Vec<String>> {
    let mut places = vec![("own", "public", "")];
    // The kernel would read so far ahead that little of the latency were left.
    places.extend(disk.map(|_| ("slow", "slow", "data")));
    let mut reports = Vec::new();
    for (place, schema, direct) in places {
        for method in methods {
            step::doing(method, format!("reading the table on the {place} disk, cold"));
            cluster.restart(&[("io_method", method), ("debug_io_direct", direct)])?;
            if let Some(disk) = disk {
                disk.set_latency(Latency::Constant(SLOW_LATENCY));
            }
            let report = format!("{place} {method}");
            let run = Tracer::new(["explain", "--cold", "--yes", "-o", "/dev/null"])
                .binary(tracer.to_owned())
                .server(cluster)
                .args(["--save".into(), cluster.folder().join(&report)])
                .arg(QUERY)
                .env("PGOPTIONS", format!("-c search_path={schema}"))
                .finish()?;
            ensure!(run.status.success(), "pgiotrace failed ({}): {}", run.status, run.stderr.trim());
            reports.push(report);
        }
    }
    step::done("measured", format!("{}, each with cold caches and a fresh server", methods.join(", ")));
    Ok(reports)
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

fn start_cluster(install: PgInstall, disk: Option<&SlowDisk>, keep: bool) -> Result<Cluster> {
    step::doing("cluster", "starting it and loading a table");
    let mut builder = Cluster::builder(install)
        .shared_buffers(SHARED_BUFFERS)
        // The fewer backends there may be, the more buffers one may pin, and the more reads it may have at once.
        .setting("max_connections", "20")
        .setting("max_parallel_workers_per_gather", "0");
    if keep {
        builder = builder.outlives_us();
    }
    if let Some(disk) = disk {
        builder = builder.slow_disk(disk);
    }
    let cluster = builder.start()?;
    cluster.pgbench_init(PGBENCH_SCALE)?;
    if let Some(disk) = disk {
        let mut client = cluster.connect("postgres")?;
        scan::use_disk(&mut client, disk)?;
        client.batch_execute(SLOW_TABLE)?;
        client.batch_execute("VACUUM ANALYZE slow.pgbench_accounts")?;
        client.batch_execute("CHECKPOINT")?;
    }
    step::done("cluster", format!("in {}, shared_buffers {SHARED_BUFFERS}", cluster.folder().display()));
    Ok(cluster)
}

/// How large the tables are, and where.
fn sizes(cluster: &Cluster, has_slow_disk: bool) -> Result<String> {
    let mut client = cluster.connect("postgres")?;
    let mut size = |table: &str| -> Result<String> {
        let query = "SELECT pg_size_pretty(pg_relation_size($1::text::regclass))";
        Ok(client.query_one(query, &[&table]).context("cannot ask for the table's size")?.get(0))
    };
    let own = format!("{} on the machine's own disk", size("pgbench_accounts")?);
    let latency = SLOW_LATENCY.as_millis();
    Ok(if has_slow_disk {
        format!(
            "{own}, and {} on one whose reads take {latency} ms, read directly",
            size("slow.pgbench_accounts")?
        )
    } else {
        own
    })
}

fn print_kept(kept: &Kept, tracer: &Path) {
    let Kept { folder, socket_dir, port, postmaster_pid } = kept;
    println!("\nThe server runs on. Reach it with");
    println!("  psql -h {} -p {port} -U postgres postgres", socket_dir.display());
    println!("  {} stat -p {port} -U postgres", tracer.display());
    println!("and end it with");
    println!(
        "  kill -INT {postmaster_pid} && tail --pid={postmaster_pid} -f /dev/null && rm -rf {}",
        folder.display()
    );
}
