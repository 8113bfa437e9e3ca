//! `pgiotrace explain`: the claim and the truth agree where they must, and the query does no harm.

use std::{
    ffi::OsString,
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use pgiotrace_tests::{
    Cluster, Finished, Latency, PgInstall, SlowDisk, Tracer,
    ledger::{complaints, report_of},
    scan::{self, list, notes},
    tracer_binary, wait_until,
};
use postgres::Client;
use serde_json::Value;

/// Small beside the large tables, so that these are read by a ring of buffers and the catalogs stay.
const SHARED_BUFFERS: &str = "32MB";

const LOAD: [&str; 14] = [
    "CREATE EXTENSION pg_buffercache",
    "CREATE TABLE items (id int, k int, pad text)",
    // 7919 is prime to the number of rows: neighbours in k are far apart in the table.
    "INSERT INTO items SELECT i, i::int8 * 7919 % 200000, repeat('x', 100) FROM generate_series(1, 200000) i",
    "CREATE INDEX items_k ON items (k)",
    "CREATE TABLE others (id int PRIMARY KEY, pad text)",
    "INSERT INTO others SELECT i, repeat('y', 100) FROM generate_series(1, 100000) i",
    "CREATE TABLE parts (id int, pad text) PARTITION BY RANGE (id)",
    "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (50000)",
    "CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (50000) TO (100000)",
    "INSERT INTO parts SELECT i, repeat('z', 100) FROM generate_series(0, 99999) i",
    // Values that are stored out of line, uncompressed.
    "CREATE TABLE long_values (id int, value text)",
    "ALTER TABLE long_values ALTER value SET STORAGE EXTERNAL",
    "INSERT INTO long_values SELECT i, repeat('v', 5000) FROM generate_series(1, 500) i",
    "VACUUM (FREEZE, ANALYZE)",
];

/// A query, and what reads its relations.
struct Case {
    name: &'static str,
    /// Settings for the session.
    settings: &'static str,
    query: &'static str,
    /// Relations that must have been read.
    relations: &'static [&'static str],
    /// Nodes that must show what they read alone, by the beginnings of their names.
    alone: &'static [&'static str],
}

const CASES: [Case; 8] = [
    Case {
        name: "seq scan",
        settings: "-c max_parallel_workers_per_gather=0",
        query: "SELECT count(pad) FROM items",
        relations: &["items"],
        alone: &["Seq Scan on items"],
    },
    Case {
        name: "index scan",
        settings: "-c enable_seqscan=off -c enable_bitmapscan=off -c max_parallel_workers_per_gather=0",
        query: "SELECT count(pad) FROM items WHERE k < 5000",
        relations: &["items", "items_k"],
        alone: &["Index Scan using items_k on items"],
    },
    Case {
        name: "bitmap heap scan",
        settings: "-c enable_seqscan=off -c enable_indexscan=off -c max_parallel_workers_per_gather=0",
        query: "SELECT count(pad) FROM items WHERE k < 5000",
        relations: &["items", "items_k"],
        alone: &["Bitmap Heap Scan on items", "Bitmap Index Scan on items_k"],
    },
    Case {
        name: "join",
        settings: "-c max_parallel_workers_per_gather=0 -c enable_nestloop=off -c work_mem=64MB",
        query: "SELECT count(i.pad), count(o.pad) FROM items i JOIN others o USING (id)",
        relations: &["items", "others"],
        alone: &["Seq Scan on items i", "Seq Scan on others o"],
    },
    Case {
        name: "parallel scan",
        settings: "-c max_parallel_workers_per_gather=2 -c parallel_setup_cost=0 -c parallel_tuple_cost=0 \
                   -c min_parallel_table_scan_size=0",
        query: "SELECT count(*) FROM items WHERE sha512(pad::bytea) <> ''",
        relations: &["items"],
        alone: &["Parallel Seq Scan on items"],
    },
    Case {
        name: "partitions",
        settings: "-c max_parallel_workers_per_gather=0",
        query: "SELECT count(pad) FROM parts",
        relations: &["parts_1", "parts_2"],
        alone: &["Seq Scan on parts_1", "Seq Scan on parts_2"],
    },
    Case {
        name: "a CTE that reads a table twice",
        settings: "-c max_parallel_workers_per_gather=0 -c work_mem=64MB",
        query: "WITH c AS MATERIALIZED (SELECT a.id FROM others a JOIN others b ON a.id = b.id + 50000) \
                SELECT count(*) FROM c x JOIN c y USING (id)",
        relations: &["others"],
        alone: &[],
    },
    Case {
        name: "long values",
        settings: "-c max_parallel_workers_per_gather=0",
        query: "SELECT sum(length(value)) FROM long_values",
        relations: &["long_values"],
        alone: &["Seq Scan on long_values"],
    },
];

fn loaded(install: PgInstall) -> Result<Cluster> {
    let cluster = Cluster::builder(install).shared_buffers(SHARED_BUFFERS).start()?;
    let mut client = cluster.connect("postgres")?;
    for statement in LOAD {
        client.batch_execute(statement).with_context(|| format!("cannot run {statement}"))?;
    }
    client.batch_execute("CHECKPOINT")?;
    Ok(cluster)
}

/// `pgiotrace explain` of this server, with settings for its session.
fn explain_with(cluster: &Cluster, settings: &str) -> Tracer {
    let database = format!("dbname=postgres options='{settings}'");
    let data = cluster.data_dir().into_os_string();
    Tracer::new([OsString::from("explain"), "-D".into(), data, "-U".into(), "postgres".into()])
        .args(["-d", &database])
}

fn explain(cluster: &Cluster) -> Tracer {
    explain_with(cluster, "")
}

/// Makes sure of one sentence on stderr, nothing on stdout, and the exit code.
fn refused(run: &Finished, code: i32) -> String {
    let said = run.stderr.trim_end();
    assert_eq!((run.code(), run.stdout.as_str()), (code, ""), "{said}");
    assert!(said.starts_with("pgiotrace: ") && said.lines().count() == 1, "it is no sentence: {said}");
    assert!(!said.contains(". "), "these are several sentences: {said}");
    said.to_owned()
}

fn assert_says(said: &str, part: &str) {
    assert!(said.contains(part), "it does not say {part:?}: {said}");
}

fn number(report: &Value, pointer: &str) -> Result<u64> {
    report.pointer(pointer).and_then(Value::as_u64).with_context(|| format!("no {pointer}: {report:#}"))
}

/// What is wrong with a report of a cold run.
fn complaints_of(report: &Value, case: &Case) -> Result<Vec<String>> {
    let mut wrong = complaints(report);
    let claimed = number(report, "/claimed/shared_read_blocks")?;
    let planning = number(report, "/claimed/planning_read_blocks")?;
    // Files that are no relation have no schema.
    let of_schema = |is_catalog: bool| {
        let is_wanted = move |entry: &&Value| {
            entry["schema"].is_string() && (entry["schema"] == "pg_catalog") == is_catalog
        };
        list(report, "relations").iter().filter(is_wanted).collect::<Vec<_>>()
    };
    let blocks = |entries: &[&Value]| -> u64 {
        entries.iter().filter_map(|entry| entry["io"]["blocks"].as_u64()).sum()
    };
    let (relations, catalogs) = (of_schema(false), of_schema(true));
    // Catalogs were read before, and are read again only by parallel workers, at whose start nothing counts.
    if claimed != blocks(&relations) || claimed == 0 {
        wrong.push(format!("{claimed} blocks are claimed, {} were seen", blocks(&relations)));
    }
    if !catalogs.is_empty() && !case.name.starts_with("parallel") {
        wrong.push(format!("catalogs were read: {catalogs:#?}"));
    }
    if number(report, "/measured/blocks")? != blocks(&relations) + blocks(&catalogs) {
        wrong.push(format!("the relations' blocks are not all: {}", report["measured"]["blocks"]));
    }
    for name in case.relations {
        if !relations.iter().any(|entry| entry["name"] == *name) {
            wrong.push(format!("{name} was not read"));
        }
    }
    let planned = list(report, "plan_relations");
    for entry in relations {
        if !planned.iter().any(|planned| planned["name"] == entry["name"]) {
            wrong.push(format!("{} is not among the plan's relations", entry["name"]));
        }
    }
    let nodes = list(report, "nodes");
    let mut of_planning = 0;
    for name in case.alone {
        let node = nodes.iter().find(|node| node["label"] == *name);
        let node = node.with_context(|| format!("the plan has no {name}: {nodes:#?}"))?;
        let figure = |pointer| node.pointer(pointer).and_then(Value::as_u64).unwrap_or(0);
        let (own, seen) = (figure("/claimed/read_blocks"), figure("/measured/blocks"));
        // The planner may have looked at the ends of an index, and at a page of the table.
        of_planning += seen.saturating_sub(own);
        if own > seen || own == 0 || of_planning > planning {
            wrong.push(format!("of {name} {own} blocks are claimed, {seen} were seen"));
        }
    }
    let of_nodes: u64 = nodes.iter().filter_map(|node| node["claimed"]["read_blocks"].as_u64()).sum();
    if of_nodes + planning != claimed {
        wrong.push(format!("the nodes claim {of_nodes} blocks and planning {planning} of {claimed}"));
    }
    Ok(wrong)
}

#[test]
fn the_kernel_saw_the_blocks_that_explain_claims_and_saved_reports_are_compared() -> Result<()> {
    let install = PgInstall::v18()?;
    let methods = install.io_methods();
    assert_eq!(methods.len(), 3, "setup has brought a PostgreSQL 18 with io_uring");
    let mut cluster = loaded(install)?;
    let folder = tempfile::tempdir()?;
    let mut wrong = Vec::new();
    let mut saved = Vec::new();
    for method in methods {
        cluster.restart(&[("io_method", method)])?;
        for case in &CASES {
            let file = folder.path().join(format!("{method}.json"));
            let run = explain_with(&cluster, case.settings)
                .args(["--cold", "--yes", "--format", "json", "--save"])
                .arg(&file)
                .arg(case.query)
                .finish()?;
            let report = report_of(&run).with_context(|| format!("{} under {method}", case.name))?;
            let complaints = complaints_of(&report, case)?;
            println!(
                "{:<30} {method:<9} {:>6} blocks claimed, {:>6} seen in {:>5} reads; {}",
                case.name,
                report["claimed"]["shared_read_blocks"],
                report["measured"]["blocks"],
                report["measured"]["reads"],
                report["notes"],
            );
            if !complaints.is_empty() {
                wrong.push(format!("{} under {method}: {complaints:#?}", case.name));
            }
            assert_eq!(report["target"]["io_method"], method);
            assert_eq!(report["schema"], "pgiotrace.explain/1");
            assert_eq!(
                serde_json::from_slice::<Value>(&fs::read(&file)?)?,
                report,
                "it is saved as it is shown"
            );
            if case.name == CASES[0].name {
                assert_eq!(report["measured"]["by_method"][method], report["measured"]["reads"]);
                fs::copy(&file, folder.path().join(format!("saved-{method}")))?;
                saved.push(folder.path().join(format!("saved-{method}")));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));

    let compare = || Tracer::new(["explain", "--compare"]).args(saved.clone());
    let text = compare().finish()?;
    println!("{}", text.stdout);
    assert_eq!(text.code(), 0, "{}", text.stderr);
    for part in ["saved-sync", "saved-worker", "saved-io_uring", "RUN TIME", "SELECT count(pad) FROM items"] {
        assert_says(&text.stdout, part);
    }
    let json = report_of(&compare().args(["--format", "json"]).finish()?)?;
    let methods: Vec<_> = list(&json, "files").iter().map(|file| &file["io_method"]).collect();
    assert_eq!(methods, ["sync", "worker", "io_uring"]);
    Ok(())
}

#[test]
fn a_report_for_people_names_claim_truth_and_plan() -> Result<()> {
    let cluster = loaded(PgInstall::v18()?)?;
    let run = explain_with(&cluster, "-c max_parallel_workers_per_gather=0")
        .args(["--cold", "--yes", "SELECT count(pad) FROM items"])
        .finish()?;
    println!("{}", run.stdout);
    assert_eq!(run.code(), 0, "{}", run.stderr);
    for part in ["EXPLAIN claims", "The kernel saw", "  Seq Scan on items", "public.items", "exposed "] {
        assert_says(&run.stdout, part);
    }
    Ok(())
}

#[test]
fn other_sessions_reads_do_not_count() -> Result<()> {
    let cluster = loaded(PgInstall::v18()?)?;
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let noise = scope.spawn(|| -> Result<()> {
            let mut client = cluster.connect("postgres")?;
            while !is_done.load(Ordering::Relaxed) {
                client.batch_execute(
                    "SELECT pg_buffercache_evict_relation('others'); SELECT count(pad) FROM others",
                )?;
            }
            Ok(())
        });
        let run = explain_with(&cluster, "-c max_parallel_workers_per_gather=0")
            .args(["--cold", "--yes", "--format", "json", "SELECT count(pad) FROM items"])
            .finish();
        is_done.store(true, Ordering::Relaxed);
        let report = report_of(&run?)?;
        noise.join().expect("the noise does not panic")?;
        assert_eq!(report["claimed"]["shared_read_blocks"], report["measured"]["blocks"]);
        assert!(list(&report, "relations").iter().all(|entry| entry["name"] != "others"));
        assert!(
            number(&report, "/ledger/reads")? > number(&report, "/measured/reads")?,
            "there was no noise"
        );
        Ok(())
    })
}

#[test]
fn a_cold_run_reads_again_and_a_warm_one_does_not() -> Result<()> {
    let cluster = loaded(PgInstall::v18()?)?;
    // Fits into shared_buffers.
    let query = "SELECT count(*) FROM long_values";
    let runs = |args: &[&str]| -> Result<Value> {
        report_of(&explain(&cluster).args(["--format", "json", "--runs", "3", query]).args(args).finish()?)
    };
    let warm = runs(&[])?;
    let reads = |report: &Value| -> Vec<u64> {
        list(report, "runs").iter().filter_map(|run| run["measured"]["reads"].as_u64()).collect()
    };
    assert_eq!(reads(&warm)[1..], [0, 0], "{:#}", warm["runs"]);
    let cold = runs(&["--cold", "--yes"])?;
    assert!(reads(&cold).iter().all(|reads| *reads > 0), "{:#}", cold["runs"]);
    let device = |run: &Value| run["measured"]["by_source"]["device"].as_u64().unwrap_or(0);
    assert!(list(&cold, "runs").iter().all(|run| device(run) > 0), "{:#}", cold["runs"]);
    let reported: Vec<_> = list(&cold, "runs").iter().filter(|run| run["is_reported"] == true).collect();
    assert_eq!(reported.len(), 1);
    assert_eq!(reported[0]["run_time_ms"], cold["run_time_ms"]);
    Ok(())
}

#[test]
fn without_a_terminal_cold_must_be_agreed_to() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?).start()?;
    let run = explain(&cluster).args(["--cold", "SELECT 1"]).finish()?;
    assert_says(&refused(&run, 2), "--yes");
    // Without the extension, shared_buffers stay as they are, and the report says so.
    let report =
        report_of(&explain(&cluster).args(["--cold", "--yes", "--format", "json", "SELECT 1"]).finish()?)?;
    assert!(notes(&report).iter().any(|note| note.contains("CREATE EXTENSION pg_buffercache")), "{report:#}");
    Ok(())
}

/// Rows of the table, and names of all tables.
fn state(client: &mut Client) -> Result<(i64, i64, Vec<String>)> {
    let row = client.query_one("SELECT count(*), sum(id) FROM t", &[])?;
    let tables = "SELECT relname::text FROM pg_class WHERE relkind IN ('r', 'm', 'S') AND relnamespace = 'public'::regnamespace
        ORDER BY 1";
    let tables = client.query(tables, &[])?.iter().map(|row| row.get(0)).collect();
    Ok((row.get(0), row.get(1), tables))
}

const WRITING: [&str; 8] = [
    "INSERT INTO t SELECT 1",
    "INSERT INTO t SELECT 1 RETURNING id",
    "UPDATE t SET id = id + 1",
    "DELETE FROM t WHERE id > 0",
    "WITH gone AS (DELETE FROM t RETURNING id) SELECT count(*) FROM gone",
    "CREATE TABLE made AS SELECT * FROM t",
    "SELECT * INTO made FROM t",
    "CREATE MATERIALIZED VIEW made AS SELECT * FROM t",
];

#[test]
fn what_writes_is_refused_unless_allowed_and_always_rolled_back() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?).start()?;
    let mut client = cluster.connect("postgres")?;
    client.batch_execute("CREATE TABLE t AS SELECT generate_series(1, 100) AS id")?;
    let before = state(&mut client)?;
    for statement in WRITING {
        let run = explain(&cluster).arg(statement).finish()?;
        assert_says(&refused(&run, 1), "--allow-write");
        assert_eq!(state(&mut client)?, before, "{statement}");
        let run = explain(&cluster).args(["--allow-write", "--format", "json", statement]).finish()?;
        let report = report_of(&run).context(statement)?;
        assert_eq!(report["session"]["allow_write"], true);
        assert_eq!(state(&mut client)?, before, "{statement}");
    }
    // A query without columns is no statement that writes.
    report_of(&explain(&cluster).args(["--format", "json", "SELECT FROM t"]).finish()?)?;
    Ok(())
}

#[test]
fn several_statements_are_refused_and_harmless() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?).start()?;
    let mut client = cluster.connect("postgres")?;
    client.batch_execute("CREATE TABLE t AS SELECT generate_series(1, 100) AS id")?;
    let before = state(&mut client)?;
    for statement in [
        "SELECT 1; COMMIT; DROP TABLE t",
        "SELECT 1; DROP TABLE t",
        "SELECT 1;\n/* */ COMMIT; UPDATE t SET id = 0;",
        "SELECT 1) DROP TABLE t; --",
        "; DROP TABLE t",
    ] {
        for args in [&[][..], &["--allow-write"]] {
            refused(&explain(&cluster).args(args.iter().copied()).arg(statement).finish()?, 1);
            assert_eq!(state(&mut client)?, before, "{statement}");
        }
    }
    let said = refused(&explain(&cluster).arg("SELECT 1; DROP TABLE t").finish()?, 1);
    assert_says(&said, "takes one statement");
    // One statement with a semicolon and comments is one.
    report_of(&explain(&cluster).args(["--format", "json", "/* a */ SELECT 1; -- b"]).finish()?)?;
    Ok(())
}

#[test]
fn what_is_no_query_is_refused_in_a_sentence() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?).start()?;
    cluster.connect("postgres")?.batch_execute("CREATE MATERIALIZED VIEW m AS SELECT 1 AS id")?;
    for (statement, part) in [
        ("SELECT FROM WHERE", "syntax error"),
        ("SELECT * FROM nowhere", "\"nowhere\" does not exist"),
        ("VACUUM m", "syntax error"),
        ("COMMIT", "syntax error"),
        ("CALL p()", "syntax error"),
        ("REFRESH MATERIALIZED VIEW m", "no plan"),
        ("EXPLAIN SELECT 1", "give the query alone"),
        ("-- a comment\n explain (analyze) SELECT 1", "give the query alone"),
        ("SELECT $1::int", "parameters"),
        ("SELECT 1 / (SELECT 0)", "division by zero"),
        ("EXECUTE nothing", "does not exist"),
        ("  ", "no query"),
        ("-- nothing", "no query"),
    ] {
        let args = ["--", statement];
        let run = explain(&cluster).args(args).finish()?;
        println!("{statement:?}: {}", run.stderr.trim_end());
        assert_says(&refused(&run, 1), part);
    }
    Ok(())
}

#[test]
fn a_query_comes_from_a_file_or_from_standard_input() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?).start()?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("query.sql");
    fs::write(&file, "-- from a file\nSELECT 'ä';\n")?;
    let run = explain(&cluster).args(["--format", "json", "-f"]).arg(&file).finish()?;
    assert_eq!(report_of(&run)?["query"], "-- from a file\nSELECT 'ä';\n");

    let script = format!("exec \"$@\" < {}", file.display());
    let run = explain(&cluster)
        .args(["--format", "json", "-f", "-"])
        .through(["sh", "-c", &script, "sh"])
        .finish()?;
    assert_eq!(report_of(&run)?["query"], "-- from a file\nSELECT 'ä';\n");

    fs::write(&file, "-- nothing\n;\n")?;
    assert_says(&refused(&explain(&cluster).arg("-f").arg(&file).finish()?, 1), "no query in");
    fs::write(&file, [0xff, 0xfe])?;
    assert_says(&refused(&explain(&cluster).arg("-f").arg(&file).finish()?, 1), "UTF-8");
    fs::remove_file(&file)?;
    assert_says(&refused(&explain(&cluster).arg("-f").arg(&file).finish()?, 1), "No such file");
    for args in
        [&["explain"][..], &["explain", "SELECT 1", "-f", "x"], &["explain", "SELECT 1", "--no-connect"]]
    {
        assert_eq!(Tracer::new(args.iter().copied()).finish()?.code(), 2, "{args:?}");
    }
    Ok(())
}

#[test]
fn a_file_that_is_no_report_is_named() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name);
    for (name, text, part) in [
        ("empty", "", "no whole report"),
        ("damaged", "{\"schema\": \"pgiotrace.explain/1\", \"tar", "no whole report"),
        ("thin", "{\"schema\": \"pgiotrace.explain/1\"}", "no whole report"),
        (
            "newer",
            "{\"schema\": \"pgiotrace.explain/2\"}",
            "another version of pgiotrace (pgiotrace.explain/2",
        ),
        ("foreign", "{\"schema\": \"pgiotrace.stat/1\"}", "no report of pgiotrace explain"),
        ("other", "[1, 2]", "no report of pgiotrace"),
    ] {
        fs::write(path(name), text)?;
        let run = Tracer::new(["explain", "--compare"]).arg(path(name)).finish()?;
        let said = refused(&run, 1);
        assert_says(&said, part);
        assert_says(&said, &path(name).display().to_string());
    }
    let run = Tracer::new(["explain", "--compare"]).arg(path("nowhere")).finish()?;
    assert_says(&refused(&run, 1), "No such file");
    Ok(())
}

fn sessions(client: &mut Client) -> Result<i64> {
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgiotrace%'";
    Ok(client.query_one(sessions, &[])?.get(0))
}

#[test]
fn ctrl_c_cancels_the_query_and_leaves_no_session() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?).start()?;
    let mut client = cluster.connect("postgres")?;
    client.batch_execute("CREATE TABLE t AS SELECT generate_series(1, 100) AS id")?;
    for (args, is_locked) in [
        (&["SELECT pg_sleep(600)"][..], false),
        (&["--allow-write", "UPDATE t SET id = id + pg_sleep(600)::text::int"], false),
        // It waits while the query is planned already.
        (&["SELECT * FROM t"], true),
    ] {
        let mut transaction = client.transaction()?;
        let run = if is_locked {
            transaction.batch_execute("LOCK TABLE t")?;
            let running = explain(&cluster).args(args.iter().copied()).spawn()?;
            let waits = "SELECT count(*) FROM pg_locks WHERE NOT granted";
            wait_until("the query waits for the lock", || {
                transaction.query_one(waits, &[]).is_ok_and(|row| row.get::<_, i64>(0) > 0)
            })?;
            running.interrupt()?
        } else {
            explain(&cluster).args(args.iter().copied()).start()?.interrupt()?
        };
        transaction.rollback()?;
        let said = run.stderr.lines().last().unwrap_or_default().to_owned();
        assert_eq!((run.code(), run.stdout.as_str()), (130, ""), "{}", run.stderr);
        assert_says(&said, "pgiotrace: the query was cancelled");
        wait_until("the sessions are gone", || sessions(&mut client).is_ok_and(|sessions| sessions == 0))?;
    }
    assert_eq!(state(&mut client)?.1, 5050);
    Ok(())
}

/// What io_uring does inside a submission, EXPLAIN does not time: here it waits for a free block request, as the kernel reads ahead.
#[test]
fn explain_misleads_where_submissions_block_and_does_not_where_every_read_is_waited_for() -> Result<()> {
    let disk = SlowDisk::builder().size(256 << 20).start()?;
    let mut cluster = Cluster::builder(PgInstall::v18()?)
        .shared_buffers("16MB")
        .setting("max_connections", "20")
        .setting("max_parallel_workers_per_gather", "0")
        .slow_disk(&disk)
        .start()?;
    let mut client = cluster.connect("postgres")?;
    scan::use_disk(&mut client, &disk)?;
    scan::create_table(&mut client, "slow", 48)?;
    drop(client);
    for (method, requests, misleads) in [("io_uring", "4", true), ("sync", "64", false)] {
        cluster.restart(&[("io_method", method), ("debug_io_direct", if misleads { "" } else { "data" })])?;
        disk.limit_requests(requests)?;
        disk.set_latency(Latency::Constant(Duration::from_millis(5)));
        let run = explain(&cluster)
            .args(["--format", "json", "--cold", "--yes"])
            .arg("SELECT count(filler) FROM slow")
            .finish()?;
        disk.set_latency(Latency::NONE);
        let report = report_of(&run)?;
        let verdicts: Vec<_> =
            list(&report, "verdicts").iter().filter_map(|verdict| verdict["rule"].as_str()).collect();
        println!(
            "{method}: EXPLAIN claims {} ms, exposed {} us: {verdicts:?}",
            report["claimed"]["io_read_time_ms"], report["measured"]["exposed_us"]
        );
        assert_eq!(verdicts.contains(&"explain-misleads"), misleads, "{:#}", report["verdicts"]);
    }
    Ok(())
}

#[test]
fn older_servers_are_traced_as_well() -> Result<()> {
    for install in [PgInstall::v17()?, PgInstall::v15()?] {
        let major = install.major();
        let cluster = loaded(install)?;
        let case = &CASES[0];
        cluster.drop_caches()?;
        // Too large for shared_buffers: it is read again.
        let run = explain_with(&cluster, case.settings).args(["--format", "json", case.query]).finish()?;
        let report = report_of(&run).with_context(|| format!("PostgreSQL {major}"))?;
        let mut wrong = complaints_of(&report, case)?;
        // There is no pg_aios that could be compared.
        wrong.retain(|complaint| !complaint.contains("/pg_aios"));
        ensure!(wrong.is_empty(), "PostgreSQL {major}: {wrong:#?}");
        assert!(report["claimed"]["io_read_time_ms"].as_f64().is_some_and(|time| time > 0.0), "{report:#}");
        assert_eq!(report["target"]["io_method"], Value::Null);
    }
    Ok(())
}

#[test]
fn parallel_workers_of_a_server_with_its_own_pids_belong_to_the_session() -> Result<()> {
    let cluster =
        Cluster::builder(PgInstall::v18()?).io_method("worker").shared_buffers("8MB").own_pids().start()?;
    scan::create_table(&mut cluster.connect("postgres")?, "t", 32)?;
    let parallel = CASES.iter().find(|case| case.name == "parallel scan").context("there is such a case")?;
    let settings = format!("{} -c parallel_leader_participation=off", parallel.settings);
    let run =
        explain_with(&cluster, &settings).args(["--format", "json", "SELECT count(*) FROM t"]).finish()?;
    let report = report_of(&run)?;
    let node = list(&report, "nodes").iter().find(|node| node["label"] == "Parallel Seq Scan on t");
    let node = node.context("the plan is not parallel")?;
    assert_eq!(node["claimed"]["read_blocks"], node["measured"]["blocks"], "{node:#}");
    let session = &report["session"]["pid"];
    let of_workers: Vec<_> =
        list(&report, "backends").iter().filter(|backend| backend["leader_pid"] == *session).collect();
    assert!(!of_workers.is_empty(), "{:#}", report["backends"]);
    assert!(
        list(&report, "backends").iter().all(|one| one["pid"] == *session || one["leader_pid"] == *session)
    );
    Ok(())
}

#[test]
fn who_may_not_drop_the_page_cache_is_told_before_anything_is_done() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?).start()?;
    // Where the tracer was built, not everybody may go.
    let binary = cluster.folder().join("pgiotrace");
    fs::copy(tracer_binary()?, &binary)?;
    let wrapper = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"];
    let run =
        explain(&cluster).args(["--cold", "--yes", "SELECT 1"]).through(wrapper).binary(binary).finish()?;
    assert_says(&refused(&run, 1), "run it as root");
    Ok(())
}

#[test]
fn a_role_that_may_only_log_in_gets_its_claim_without_times() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?).setting("track_io_timing", "off").start()?;
    let mut client = cluster.connect("postgres")?;
    scan::create_table(&mut client, "t", 8)?;
    client.batch_execute("CREATE ROLE simple LOGIN; GRANT SELECT ON t TO simple")?;
    let data = cluster.data_dir().into_os_string();
    let run = Tracer::new([OsString::from("explain"), "-D".into(), data])
        .args([
            "-U",
            "simple",
            "-d",
            "postgres",
            "--cold",
            "--yes",
            "--format",
            "json",
            "SELECT count(*) FROM t",
        ])
        .finish()?;
    let report = report_of(&run)?;
    assert_eq!(report["claimed"]["io_read_time_ms"], Value::Null);
    assert_eq!(report["claimed"]["shared_read_blocks"], report["measured"]["blocks"]);
    assert!(notes(&report).iter().any(|note| note.contains("track_io_timing")), "{report:#}");
    assert!(notes(&report).iter().any(|note| note.contains("shared_buffers may still")), "{report:#}");
    // Whoever may, gets them switched on for the session.
    let report =
        report_of(&explain(&cluster).args(["--format", "json", "SELECT count(*) FROM t"]).finish()?)?;
    assert!(report["claimed"]["io_read_time_ms"].is_number(), "{report:#}");
    Ok(())
}
