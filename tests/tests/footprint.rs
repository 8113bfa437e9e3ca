//! What the tracer leaves behind, which is nothing, and what it costs to start.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use pgiotrace_tests::{
    Cluster, Finished, PgInstall, Running, Tracer, bpftool,
    ledger::{complaints, count, report_of, traced_blocks},
    scan::{create_table, scan},
    wait_until,
};
use rustix::process::Signal;

/// What is read while the tracer is at work; larger than `shared_buffers`.
const TABLE: &str = "read_on";
const TABLE_MEBIBYTES: u32 = 40;
/// What the tracer calls its own sessions.
const OWN_SESSIONS: &str = "SELECT FROM pg_stat_activity WHERE application_name = 'pgiotrace'";

/// Generous: tests run a debug build, on shared machines.
const MOST_ATTACH_MS: f64 = 2_000.0;
const STARTS: u32 = 3;
const MOST_MEMORY_BYTES: u64 = 200 << 20;

fn cluster() -> Result<Cluster> {
    let builder = Cluster::builder(PgInstall::v18()?).io_method("worker").shared_buffers("16MB");
    let cluster = builder.start()?;
    create_table(&mut cluster.connect("postgres")?, TABLE, TABLE_MEBIBYTES)?;
    Ok(cluster)
}

/// Objects of the kernel's BPF side.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct BpfObjects {
    programs: BTreeSet<u64>,
    maps: BTreeSet<u64>,
    links: BTreeSet<u64>,
}

impl BpfObjects {
    /// All that there are, whoever made them: other tests' tracers too.
    fn all() -> Result<Self> {
        Ok(Self { programs: numbers("prog")?, maps: numbers("map")?, links: numbers("link")? })
    }

    /// Those that a process holds by descriptors: the kernel tells their numbers (`bpf_prog_show_fdinfo`,
    /// `bpf_map_show_fdinfo` and `bpf_link_show_fdinfo` in its kernel/bpf/syscall.c).
    fn of(pid: u32) -> Result<Self> {
        let mut held = Self::default();
        for entry in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
            // A descriptor may be closed meanwhile.
            let text = fs::read_to_string(entry?.path()).unwrap_or_default();
            for (key, number) in text.lines().filter_map(|line| line.split_once(":\t")) {
                let objects = match key {
                    "prog_id" => &mut held.programs,
                    "map_id" => &mut held.maps,
                    "link_id" => &mut held.links,
                    _ => continue,
                };
                objects.insert(number.trim().parse()?);
            }
        }
        Ok(held)
    }

    fn is_contained_in(&self, other: &Self) -> bool {
        self.programs.is_subset(&other.programs)
            && self.maps.is_subset(&other.maps)
            && self.links.is_subset(&other.links)
    }

    fn is_disjoint(&self, other: &Self) -> bool {
        self.programs.is_disjoint(&other.programs)
            && self.maps.is_disjoint(&other.maps)
            && self.links.is_disjoint(&other.links)
    }
}

/// Numbers of the objects of a kind that there are.
fn numbers(kind: &str) -> Result<BTreeSet<u64>> {
    let all = bpftool(&[kind, "show"])?;
    let all = all.as_array().context("bpftool printed no list")?;
    Ok(all.iter().filter_map(|object| object["id"].as_u64()).collect())
}

/// How a trace ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Killed,
    Terminated,
    Interrupted,
}

impl End {
    fn bring(self, tracer: Running) -> Result<Finished> {
        match self {
            Self::Killed => tracer.kill(),
            Self::Terminated => tracer.end_with(Signal::TERM),
            Self::Interrupted => tracer.interrupt(),
        }
    }
}

/// Names in a folder.
fn files_in(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
    Ok(entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
}

/// Scans the table again and again while `body` runs.
fn while_it_is_read<T>(cluster: &Cluster, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut client = cluster.connect("postgres")?;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut scans = 0;
            while !is_over.load(Ordering::Relaxed) {
                scan(&mut client, TABLE)?;
                scans += 1;
            }
            anyhow::Ok(scans)
        });
        let result = body();
        is_over.store(true, Ordering::Relaxed);
        let scans = reader.join().map_err(|_| anyhow!("the reading thread panicked"))??;
        ensure!(scans > 0, "nothing was read meanwhile");
        result
    })
}

/// Traces a server that is being read from, and ends the tracer in the middle of that.
fn leaves_nothing_behind(end: End, arguments: &[&str]) -> Result<()> {
    let cluster = cluster()?;
    let folder = |name: &str| -> Result<PathBuf> {
        let path = cluster.folder().join(name);
        fs::create_dir(&path)?;
        Ok(path)
    };
    let (output, temporary) = (folder("output")?, folder("temporary")?);
    let tracer =
        Tracer::new(["stat", "--format", "json", "-o"]).arg(output.join("report.json")).server(&cluster);
    let tracer = tracer.env("TMPDIR", &temporary).args(arguments.iter().copied());

    let before = BpfObjects::all()?;
    let (own, during, run) = while_it_is_read(&cluster, || {
        let tracer = tracer.start()?;
        let (own, during) = (BpfObjects::of(tracer.pid())?, BpfObjects::all()?);
        let mut client = cluster.connect("postgres")?;
        wait_until("the tracer has its session", || sessions(&mut client) > 0)?;
        Ok((own, during, end.bring(tracer)?))
    })?;
    println!(
        "{end:?}: had {} programs, {} maps, {} links",
        own.programs.len(),
        own.maps.len(),
        own.links.len()
    );
    assert!(!own.programs.is_empty() && !own.maps.is_empty() && !own.links.is_empty(), "{own:?}");
    assert!(own.is_contained_in(&during), "bpftool lists not all of {own:?}: {during:?}");
    assert!(own.is_disjoint(&before), "the tracer uses what was there before: {own:?} {before:?}");
    // The kernel frees them a moment later.
    wait_until("the kernel has freed the tracer's programs and maps", || {
        BpfObjects::all().is_ok_and(|now| now.is_disjoint(&own))
    })?;
    let mut client = cluster.connect("postgres")?;
    wait_until("the server has ended the tracer's sessions", || sessions(&mut client) == 0)?;
    assert_eq!(files_in(&temporary)?, Vec::<String>::new());
    if end == End::Killed {
        assert_eq!(run.code(), 128 + 9);
        assert_eq!(files_in(&output)?, Vec::<String>::new());
    } else {
        assert_eq!(run.code(), 0, "{}", run.stderr);
        assert_eq!(files_in(&output)?, ["report.json"]);
    }
    Ok(())
}

fn sessions(client: &mut postgres::Client) -> usize {
    client.query(OWN_SESSIONS, &[]).map_or(0, |rows| rows.len())
}

#[test]
fn a_killed_tracer_leaves_nothing_behind() -> Result<()> {
    leaves_nothing_behind(End::Killed, &[])
}

#[test]
fn a_killed_tracer_leaves_no_probe_in_the_server() -> Result<()> {
    leaves_nothing_behind(End::Killed, &["--pg-probes"])
}

#[test]
fn a_terminated_tracer_leaves_its_report_alone() -> Result<()> {
    leaves_nothing_behind(End::Terminated, &[])
}

#[test]
fn an_interrupted_tracer_leaves_its_report_alone() -> Result<()> {
    leaves_nothing_behind(End::Interrupted, &[])
}

#[test]
fn it_is_attached_in_moments_and_stays_small() -> Result<()> {
    let cluster = cluster()?;
    let (mut attach_ms, mut memory) = (f64::INFINITY, 0);
    // The fastest of a few: other tests have the processors as well.
    for _ in 0..STARTS {
        let report = while_it_is_read(&cluster, || {
            let tracer = Tracer::stat(&cluster).start()?;
            scan(&mut cluster.connect("postgres")?, TABLE)?;
            report_of(&tracer.interrupt()?)
        })?;
        let taken = report["overhead"]["attach_ms"].as_f64().context("the report has no attach_ms")?;
        attach_ms = attach_ms.min(taken);
        memory = memory.max(count(&report, "/overhead/tracer_max_rss_bytes")?);
    }
    let mebibytes = memory as f64 / 1_048_576.0;
    println!("attached {attach_ms:.0} ms after its start; at most {mebibytes:.1} MiB resident");
    assert!(attach_ms > 0.0 && attach_ms < MOST_ATTACH_MS, "attached after {attach_ms} ms");
    assert!(memory > 0 && memory < MOST_MEMORY_BYTES, "{memory} bytes resident");
    Ok(())
}

#[test]
fn two_tracers_beside_each_other_both_count_all() -> Result<()> {
    let cluster = cluster()?;
    cluster.drop_caches()?;
    let tracers = [Tracer::stat(&cluster).start()?, Tracer::stat(&cluster).start()?];
    let read = scan(&mut cluster.connect("postgres")?, TABLE)?;
    for tracer in tracers {
        let report = report_of(&tracer.interrupt()?)?;
        assert!(complaints(&report).is_empty(), "{:#?}", complaints(&report));
        assert_eq!(traced_blocks(&report, TABLE), read);
    }
    Ok(())
}
