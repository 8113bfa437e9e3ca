//! Verdicts on real servers and rigs: for each scenario the full set of rules that must fire; all others must be silent.
//!
//! `cargo test -p pgiotrace-tests --test verdicts -- --nocapture` prints the matrix. Rigs are far from the rules'
//! thresholds, so that a busy machine does not turn a verdict round.

use std::{
    fmt::Write as _,
    fs::File,
    os::unix::fs::FileExt as _,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use pgiotrace_tests::{
    Cluster, Latency, PgInstall, SlowDisk, Throttle, Tracer,
    ledger::report_of,
    scan::{self, list},
};
use rustix::fs::{Advice, fadvise};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const TABLE: &str = "scanned";
const TABLE_MIB: u32 = 48;
/// The same on the server's own disk.
const CACHED: &str = "cached";

/// The matrix's rows.
const RULES: [&str; 10] = [
    "device-bound",
    "throttled",
    "noisy-neighbour",
    "io-workers-saturated",
    "prefetch-too-shallow",
    "small-reads",
    "index-heap-random",
    "io_uring-copies-inline",
    "served-from-page-cache",
    "not-io",
];

// Of a column: the index alone would not do.
const SCAN: &str = "SELECT count(filler) FROM scanned";
/// Fetches rows in an order that has nothing to do with their places.
const BY_INDEX: &str =
    "SELECT sum(length(filler)) FROM (SELECT filler FROM scanned ORDER BY hashint4(id) LIMIT 500) AS first";
/// Computes for much longer than it reads.
const COMPUTING: &str = "SELECT sum(length(md5(md5(filler)))) FROM scanned, generate_series(1, 10)";
/// Brings blocks and looks into none of them.
const CACHED_SCANS: &str = "SELECT pg_prewarm('cached') FROM generate_series(1, 40)";

/// What happens beside the query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beside {
    Nothing,
    /// The block layer lets the server have that many reads a second.
    Limit(u32),
    /// Another program reads the same disk.
    Neighbour,
}

/// A server, a disk, a query, and what must be said of it.
struct Scenario {
    name: &'static str,
    settings: &'static [(&'static str, &'static str)],
    latency_us: u64,
    beside: Beside,
    query: &'static str,
    /// Sessions that divide the table among them; 1: the query as it is.
    sessions: u32,
    fires: &'static [&'static str],
}

/// The first has what the others do not name.
const PLAIN: Scenario = Scenario {
    name: "sync",
    settings: &[("io_method", "sync")],
    latency_us: 4_000,
    beside: Beside::Nothing,
    query: SCAN,
    sessions: 1,
    fires: &["device-bound"],
};

const SCENARIOS: [Scenario; 19] = [
    PLAIN,
    Scenario {
        name: "worker, depth 1",
        settings: &[("io_method", "worker"), ("effective_io_concurrency", "1")],
        fires: &["prefetch-too-shallow"],
        ..PLAIN
    },
    Scenario {
        name: "worker, depth 16",
        settings: &[("io_method", "worker"), ("io_workers", "32")],
        latency_us: 40_000,
        ..PLAIN
    },
    Scenario {
        name: "one io worker",
        settings: &[("io_method", "worker"), ("io_workers", "1")],
        sessions: 4,
        fires: &["io-workers-saturated"],
        ..PLAIN
    },
    Scenario {
        name: "three io workers",
        settings: &[("io_method", "worker")],
        latency_us: 10_000,
        fires: &["io-workers-saturated"],
        ..PLAIN
    },
    Scenario {
        name: "enough io workers",
        settings: &[("io_method", "worker"), ("io_workers", "32"), ("effective_io_concurrency", "4")],
        latency_us: 40_000,
        sessions: 4,
        ..PLAIN
    },
    Scenario {
        name: "no prefetching",
        settings: &[("io_method", "worker"), ("effective_io_concurrency", "0")],
        fires: &["prefetch-too-shallow"],
        ..PLAIN
    },
    Scenario {
        name: "io_uring, depth 1",
        settings: &[("io_method", "io_uring"), ("effective_io_concurrency", "1")],
        fires: &["prefetch-too-shallow"],
        ..PLAIN
    },
    Scenario {
        // So few that a session may pin what two reads need.
        name: "few buffers",
        settings: &[("io_method", "io_uring"), ("shared_buffers", "16MB")],
        fires: &["prefetch-too-shallow"],
        ..PLAIN
    },
    Scenario {
        name: "io_uring, depth 16",
        settings: &[("io_method", "io_uring")],
        latency_us: 40_000,
        ..PLAIN
    },
    Scenario {
        name: "reads of 8 kB",
        settings: &[("io_method", "io_uring"), ("io_combine_limit", "8kB")],
        latency_us: 4_000,
        fires: &["device-bound", "small-reads"],
        ..PLAIN
    },
    Scenario {
        name: "index scan",
        settings: &[("io_method", "worker")],
        query: BY_INDEX,
        fires: &["device-bound", "index-heap-random"],
        ..PLAIN
    },
    Scenario {
        name: "limited reads",
        // Direct reads that are held back together are merged, and then it is not known whose time it was.
        settings: &[("io_method", "worker"), ("debug_io_direct", "")],
        latency_us: 0,
        beside: Beside::Limit(150),
        fires: &["throttled"],
        ..PLAIN
    },
    Scenario { name: "neighbour", beside: Beside::Neighbour, fires: &["noisy-neighbour"], ..PLAIN },
    Scenario {
        name: "computing",
        settings: &[("io_method", "io_uring")],
        query: COMPUTING,
        fires: &["not-io"],
        ..PLAIN
    },
    Scenario {
        name: "warm, io_uring",
        settings: &[("io_method", "io_uring"), ("debug_io_direct", ""), ("shared_buffers", "16MB")],
        query: CACHED_SCANS,
        fires: &["io_uring-copies-inline", "served-from-page-cache"],
        ..PLAIN
    },
    Scenario {
        name: "warm, worker",
        settings: &[("io_method", "worker"), ("debug_io_direct", ""), ("shared_buffers", "16MB")],
        query: CACHED_SCANS,
        fires: &["served-from-page-cache"],
        ..PLAIN
    },
    Scenario {
        name: "warm, sync",
        settings: &[("io_method", "sync"), ("debug_io_direct", ""), ("shared_buffers", "16MB")],
        query: CACHED_SCANS,
        fires: &["served-from-page-cache"],
        ..PLAIN
    },
    Scenario {
        name: "read ahead",
        settings: &[("io_method", "sync"), ("debug_io_direct", "")],
        latency_us: 150_000,
        ..PLAIN
    },
];

/// A server with a table on a slow disk, and one on its own.
struct Rig {
    // Before the disk that it uses.
    cluster: Cluster,
    disk: SlowDisk,
}

impl Rig {
    fn start() -> Result<Self> {
        let disk = SlowDisk::builder().size(512 * MIB).start()?;
        let builder = Cluster::builder(PgInstall::v18()?).slow_disk(&disk);
        // The fewer backends there may be, the more buffers one may pin, and the deeper it reads ahead.
        let cluster = builder.setting("max_connections", "20").start()?;
        let mut client = cluster.connect("postgres")?;
        client.batch_execute("CREATE EXTENSION pg_prewarm")?;
        scan::create_table(&mut client, CACHED, TABLE_MIB)?;
        scan::use_disk(&mut client, &disk)?;
        scan::create_table(&mut client, TABLE, TABLE_MIB)?;
        client.batch_execute("CREATE INDEX ON scanned (hashint4(id))")?;
        client.batch_execute("VACUUM ANALYZE scanned")?;
        Ok(Self { cluster, disk })
    }

    /// What is said of a scenario.
    fn run(&mut self, scenario: &Scenario) -> Result<Value> {
        let defaults = [
            // Past the page cache, so that the device is asked for what the server reads.
            ("debug_io_direct", "data"),
            ("shared_buffers", "128MB"),
            ("effective_io_concurrency", "16"),
            ("io_combine_limit", "128kB"),
            ("io_workers", "3"),
            ("max_parallel_workers_per_gather", "0"),
            ("enable_sort", "off"),
            ("synchronize_seqscans", "off"),
        ];
        let settings = [&defaults, scenario.settings].concat();
        self.disk.set_latency(Latency::NONE);
        self.cluster.restart(&settings)?;
        self.cluster.drop_caches()?;
        let mut client = self.cluster.connect("postgres")?;
        // What the planner has to know, and the copies of what is to be warm.
        client.simple_query(&format!("EXPLAIN {}", scenario.query))?;
        if scenario.query == CACHED_SCANS {
            client.batch_execute("SELECT pg_prewarm('cached')")?;
        }
        let limit = match scenario.beside {
            Beside::Limit(reads) => {
                Some(Throttle::reads_per_second(&self.cluster, self.disk.device(), reads)?)
            }
            _ => None,
        };
        let tracer = Tracer::stat(&self.cluster).start()?;
        self.disk.set_latency(Latency::Constant(Duration::from_micros(scenario.latency_us)));
        let is_over = AtomicBool::new(scenario.beside != Beside::Neighbour);
        thread::scope(|scope| {
            let neighbour = scope.spawn(|| self.neighbour(&is_over));
            let queried = self.query(scenario);
            is_over.store(true, Ordering::Relaxed);
            neighbour.join().expect("the neighbour panicked")?;
            queried
        })?;
        let report = report_of(&tracer.interrupt()?)?;
        drop(limit);
        Ok(report)
    }

    /// Runs the query, or a part of it in each of the sessions.
    fn query(&self, scenario: &Scenario) -> Result<()> {
        let blocks = TABLE_MIB * 128 / scenario.sessions;
        thread::scope(|scope| {
            let session = |number: u32| {
                scope.spawn(move || -> Result<()> {
                    let (from, to) = (number * blocks, (number + 1) * blocks - 1);
                    let part = format!(" WHERE ctid BETWEEN '({from},1)' AND '({to},9)'");
                    let part = if scenario.sessions > 1 { part.as_str() } else { "" };
                    let mut client = self.cluster.connect("postgres")?;
                    Ok(client.batch_execute(&format!("{}{part}", scenario.query))?)
                })
            };
            let sessions: Vec<_> = (0..scenario.sessions).map(session).collect();
            sessions.into_iter().try_for_each(|session| session.join().expect("a session panicked"))
        })
    }

    /// Reads the disk again and again, past the page cache.
    fn neighbour(&self, is_over: &AtomicBool) -> Result<()> {
        let device = File::open(self.disk.device_node())?;
        let mut buffer = vec![0; usize::try_from(MIB)?];
        while !is_over.load(Ordering::Relaxed) {
            fadvise(&device, 0, None, Advice::DontNeed)?;
            for offset in (0..16 * MIB).step_by(buffer.len()) {
                device.read_exact_at(&mut buffer, offset)?;
            }
        }
        Ok(())
    }
}

/// The longest that a session was blocked by its reads, by the length of the window.
fn blocked(report: &Value) -> f64 {
    let exposed = list(report, "backends").iter().filter_map(|backend| backend["io"]["exposed_us"].as_f64());
    exposed.fold(0.0, f64::max) / 1e6 / report["window"]["duration_s"].as_f64().unwrap_or(f64::NAN)
}

/// Rules that fired.
fn fired(report: &Value) -> Vec<&str> {
    list(report, "verdicts").iter().filter_map(|verdict| verdict["rule"].as_str()).collect()
}

/// One column a scenario, by its number.
fn matrix(reports: &[Value]) -> String {
    let mut text = String::new();
    for (number, scenario) in SCENARIOS.iter().enumerate() {
        let _ = writeln!(text, "{:>2}  {}", number + 1, scenario.name);
    }
    let _ = write!(text, "\n{:<24}", "rule");
    let _ = writeln!(
        text,
        "{}",
        (1..=reports.len()).fold(String::new(), |line, number| format!("{line}{number:>6}"))
    );
    for rule in RULES {
        let cell = |report: &Value| if fired(report).contains(&rule) { "FIRED" } else { "·" };
        let _ = write!(text, "{rule:<24}");
        let _ = writeln!(
            text,
            "{}",
            reports.iter().fold(String::new(), |line, report| format!("{line}{:>6}", cell(report)))
        );
    }
    text
}

#[test]
fn each_rule_fires_where_a_rig_makes_it_true_and_is_silent_elsewhere() -> Result<()> {
    let begin = Instant::now();
    let mut rig = Rig::start()?;
    let mut reports = Vec::new();
    let mut wrong = Vec::new();
    println!("rig ready after {:?}", begin.elapsed());
    for scenario in &SCENARIOS {
        let start = Instant::now();
        let report = rig.run(scenario).with_context(|| format!("scenario {}", scenario.name))?;
        println!(
            "\n{} ({:.1} s, {} reads, blocked for {:.0} % of the window)",
            scenario.name,
            start.elapsed().as_secs_f64(),
            report["ledger"]["reads"],
            100.0 * blocked(&report),
        );
        for verdict in list(&report, "verdicts") {
            let text = |key: &str| verdict[key].as_str().unwrap_or_default().to_owned();
            println!("  {} {}: {} -> {}", text("severity"), text("rule"), text("evidence"), text("advice"));
        }
        let mut said = fired(&report);
        said.sort_unstable();
        if said != scenario.fires {
            println!(
                "  methods {:#}\n  backends {:#}\n  devices {:#}\n  workers {:#}",
                report["methods"], report["backends"], report["devices"], report["io_workers"]
            );
            wrong.push(format!("{}: {said:?} instead of {:?}", scenario.name, scenario.fires));
        }
        reports.push(report);
    }
    println!("\n{}\nall of it took {:?}", matrix(&reports), begin.elapsed());
    ensure!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

#[test]
fn each_rule_has_a_scenario_in_which_it_fires() {
    for rule in RULES {
        assert!(SCENARIOS.iter().any(|scenario| scenario.fires.contains(&rule)), "{rule}");
        assert!(SCENARIOS.iter().any(|scenario| !scenario.fires.contains(&rule)), "{rule}");
    }
    assert!(SCENARIOS.iter().all(|scenario| scenario.fires.is_sorted()));
}
