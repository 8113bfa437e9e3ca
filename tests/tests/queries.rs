//! Every read carries the query that wanted it: certain where that can be known, and never another one.

use std::{
    process::{Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use pgiotrace_tests::{
    Cluster, Latency, PgInstall, SlowDisk, Tracer,
    ledger::{complaints, count, report_of},
    scan::{self, create_table, list},
    wait_until,
};
use postgres::{Client, NoTls, config::Config};
use serde_json::Value;

/// Look-ups a second: what the debug build of the tracer keeps up with beside other tests.
const LOOK_UPS: &str = "3000";

/// Rows of the report's queries whose text begins like this.
fn queries<'a>(report: &'a Value, text: &str) -> Vec<&'a Value> {
    let begins = |query: &&Value| query["query"].as_str().is_some_and(|known| known.starts_with(text));
    list(report, "queries").iter().filter(begins).collect()
}

fn of(row: &Value, pointer: &str) -> u64 {
    row.pointer(pointer).and_then(Value::as_u64).unwrap_or_default()
}

fn server(install: PgInstall, method: &str) -> Result<Cluster> {
    let builder = Cluster::builder(install).shared_buffers("4MB").setting("compute_query_id", "on");
    let builder = if method.is_empty() { builder } else { builder.io_method(method) };
    builder.start()
}

/// What the server itself calls a query, whose session is named `application`.
fn query_id(cluster: &Cluster, application: &str) -> Result<String> {
    let mut client = cluster.connect("postgres")?;
    let question = "SELECT query_id::text FROM pg_stat_activity WHERE application_name = $1";
    let row = client.query_one(question, &[&application])?;
    row.get::<_, Option<String>>(0).context("the server computes no query_id")
}

fn complain_of_nothing(report: &Value) {
    assert!(complaints(report).is_empty(), "{:#?}", complaints(report));
}

#[test]
fn every_read_of_long_scans_is_certain_beside_eight_busy_clients() -> Result<()> {
    println!("method     reads  certain  probable  unknown  none   of scans, certain  of pgbench, certain");
    for method in ["sync", "worker", "io_uring"] {
        let cluster = server(PgInstall::v18()?, method)?;
        cluster.pgbench_init(10)?;
        let mut scanners = Vec::new();
        for table in ["long_one", "long_two"] {
            let mut client = cluster.connect("postgres")?;
            create_table(&mut client, table, 64)?;
            client.batch_execute("SET max_parallel_workers_per_gather = 0")?;
            scanners.push((client, table));
        }
        cluster.drop_caches()?;
        let tracer = Tracer::stat(&cluster).start()?;
        let mut clients = cluster
            .pgbench_command(&["-n", "-S", "-c", "8", "-T", "4", "-R", LOOK_UPS])?
            .stdout(Stdio::null())
            .spawn()?;
        thread::scope(|scope| {
            let scans: Vec<_> = scanners
                .iter_mut()
                .map(|(client, table)| {
                    scope.spawn(move || client.simple_query(&format!("SELECT count(id) FROM {table}")))
                })
                .collect();
            scans.into_iter().try_for_each(|scan| scan.join().expect("no panic").map(drop))
        })?;
        ensure!(clients.wait()?.success(), "pgbench failed");
        let report = report_of(&tracer.interrupt()?)?;
        complain_of_nothing(&report);

        let certainty = |name: &str| of(&report, &format!("/query_certainty/{name}"));
        let rows = |text: &str| {
            let rows = queries(&report, text);
            let sum = |pointer: &str| rows.iter().map(|row| of(row, pointer)).sum::<u64>();
            (sum("/io/reads"), sum("/certain"))
        };
        let (scans, look_ups) = (rows("SELECT count(id) FROM long_"), rows("SELECT abalance FROM"));
        println!(
            "{method:8} {:>7}  {:>7}  {:>8}  {:>7}  {:>4}   {:>7} of {:>7}  {:>7} of {:>7}",
            of(&report, "/ledger/reads") - of(&report, "/ledger/own"),
            certainty("certain"),
            certainty("probable"),
            certainty("unknown"),
            certainty("none"),
            scans.1,
            scans.0,
            look_ups.1,
            look_ups.0,
        );
        assert!(scans.0 > 0 && scans.1 == scans.0, "{method}: {:#?}", queries(&report, "SELECT count(id)"));
        assert!(look_ups.0 > 1_000 && look_ups.1 * 100 >= look_ups.0 * 99, "{method}: {look_ups:?}");
        let all: u64 = ["certain", "probable", "unknown", "none"].iter().map(|name| certainty(name)).sum();
        assert_eq!(
            all,
            of(&report, "/ledger/reads") - of(&report, "/ledger/own"),
            "each read is in one of them"
        );
        for table in ["long_one", "long_two"] {
            let rows = queries(&report, &format!("SELECT count(id) FROM {table}"));
            assert_eq!(rows.len(), 1, "{rows:#?}");
            // The table, and what the catalog had to be read for.
            let blocks = scan::blocks(&report, table)?;
            assert!((blocks..blocks + 200).contains(&of(rows[0], "/io/blocks")), "{blocks}: {}", rows[0]);
        }
    }
    Ok(())
}

#[test]
fn the_identifier_that_a_process_says_itself_is_the_one_that_the_view_shows() -> Result<()> {
    for install in [PgInstall::v15()?, PgInstall::v17()?, PgInstall::v18()?] {
        let major = install.major();
        let cluster = server(install, "")?;
        let mut client = named(&cluster, "who am I")?;
        create_table(&mut client, "known", 8)?;
        client.batch_execute("SET max_parallel_workers_per_gather = 0")?;
        cluster.drop_caches()?;
        // No samples: only what the process says itself.
        let tracer =
            Tracer::stat(&cluster).args(["--sample-rate", "0", "--relation", "public.known"]).start()?;
        client.simple_query("SELECT count(id) FROM known")?;
        let said = query_id(&cluster, "who am I")?;
        let report = report_of(&tracer.interrupt()?)?;
        assert_eq!(report["ledger"]["complete"], true);
        let rows = list(&report, "queries");
        println!(
            "PostgreSQL {major}: {said}, {} of {} reads",
            of(&rows[0], "/certain"),
            of(&rows[0], "/io/reads")
        );
        assert_eq!(rows.len(), 1, "{rows:#?}");
        assert_eq!(rows[0]["query_id"], said.as_str());
        assert_eq!(of(&rows[0], "/certain"), of(&rows[0], "/io/reads"));
        assert_eq!(rows[0]["query"], Value::Null, "nobody sampled it");
        assert_eq!((&report["sessions"], &report["waits"]), (&Value::Null, &Value::Null), "not sampled");
    }
    Ok(())
}

/// A session with a name of its own.
fn named(cluster: &Cluster, name: &str) -> Result<Client> {
    let mut client = cluster.connect("postgres")?;
    client.batch_execute(&format!("SET application_name = '{name}'"))?;
    Ok(client)
}

/// Where several statements come in one message, all began at the same moment.
#[test]
fn statements_of_one_message_keep_their_reads_apart() -> Result<()> {
    for method in ["sync", "worker"] {
        let cluster = server(PgInstall::v18()?, method)?;
        let mut client = cluster.connect("postgres")?;
        for table in ["first", "second"] {
            create_table(&mut client, table, 8)?;
        }
        client.batch_execute("SET max_parallel_workers_per_gather = 0")?;
        cluster.drop_caches()?;
        let tracer = Tracer::stat(&cluster).args(["--relation", "first", "--relation", "second"]).start()?;
        client.simple_query("SELECT count(id) FROM first; SELECT max(id) FROM second")?;
        let report = report_of(&tracer.interrupt()?)?;
        complain_of_nothing(&report);
        let certain: Vec<_> = list(&report, "queries").iter().map(|row| of(row, "/certain")).collect();
        println!("{method}: certain reads of each query: {certain:?} of {}", of(&report, "/filter/reads"));
        assert!(certain.iter().filter(|certain| **certain > 0).count() >= 2, "{:#}", report["queries"]);
        let first = scan::relation(&report, "first")?["io"]["reads"].as_u64().unwrap_or_default();
        let second = scan::relation(&report, "second")?["io"]["reads"].as_u64().unwrap_or_default();
        assert!(
            certain.iter().all(|certain| *certain <= first.max(second)),
            "{certain:?}: {first}, {second}"
        );
    }
    Ok(())
}

/// A backend's entry still has what its predecessor executed, until it is its own: in 15 and 17 that is after it has read catalogs.
#[test]
fn what_a_session_reads_as_it_starts_is_of_no_query() -> Result<()> {
    for install in [PgInstall::v15()?, PgInstall::v17()?, PgInstall::v18()?] {
        let major = install.major();
        let cluster = server(install, "")?;
        cluster.pgbench_init(1)?;
        cluster.drop_caches()?;
        let tracer = Tracer::stat(&cluster).start()?;
        for _ in 0..20 {
            let mut client = cluster.connect("postgres")?;
            client.simple_query("SELECT 1 AS nothing")?;
        }
        let report = report_of(&tracer.interrupt()?)?;
        let reads = |text: &str| queries(&report, text).iter().map(|row| of(row, "/io/reads")).sum::<u64>();
        let none = of(&report, "/query_certainty/none");
        println!(
            "PostgreSQL {major}: {none} reads of no query, {} of a query that reads nothing",
            reads("SELECT 1")
        );
        assert!(none >= 20, "{:#}", report["query_certainty"]);
        // What is parsed and planned reads a catalog now and then; to start takes many times as much.
        assert!(reads("SELECT 1") * 4 < none, "{:#}", report["queries"]);
    }
    Ok(())
}

#[test]
fn the_filter_by_query_lets_that_query_pass_and_no_other() -> Result<()> {
    let cluster = server(PgInstall::v18()?, "worker")?;
    let mut client = named(&cluster, "filtered")?;
    for table in ["wanted", "other"] {
        create_table(&mut client, table, 8)?;
    }
    client.batch_execute("SET max_parallel_workers_per_gather = 0")?;
    client.simple_query("SELECT count(id) FROM wanted")?;
    let id = query_id(&cluster, "filtered")?;
    cluster.drop_caches()?;
    let tracer = Tracer::stat(&cluster).arg(format!("--query-id={id}")).start()?;
    client.simple_query("SELECT count(id) FROM other")?;
    client.simple_query("SELECT count(id) FROM wanted")?;
    let report = report_of(&tracer.interrupt()?)?;
    let blocks = scan::blocks(&report, "wanted")?;
    // But for the ring of buffers that the scan before used.
    assert!((8 * 128 - 32..=8 * 128).contains(&blocks), "{blocks}");
    assert!(scan::relation(&report, "other").is_err(), "{:#}", report["relations"]);
    assert_eq!(report["filter"]["query_ids"][0], id.as_str());
    Ok(())
}

#[test]
fn where_pg_stat_statements_is_a_query_is_shown_without_its_constants() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?)
        .io_method("worker")
        .shared_buffers("4MB")
        .setting("shared_preload_libraries", "pg_stat_statements")
        .start()?;
    let mut client = cluster.connect("postgres")?;
    create_table(&mut client, "secrets", 8)?;
    client
        .batch_execute("CREATE SCHEMA \"Odd one\"; CREATE EXTENSION pg_stat_statements SCHEMA \"Odd one\"")?;
    client.batch_execute("SET max_parallel_workers_per_gather = 0")?;
    let query = |secret: &str| format!("SELECT count(id) FROM secrets WHERE filler <> '{secret}'");
    // Before, because the view has only what has ended.
    client.simple_query(&query("0815"))?;
    cluster.drop_caches()?;
    let tracer = Tracer::stat(&cluster).args(["--sample-rate", "200"]).start()?;
    let begin = Instant::now();
    // Several samples, whatever else the processors have to do.
    while begin.elapsed() < Duration::from_millis(500) {
        client.simple_query(&query("4711"))?;
    }
    let report = report_of(&tracer.interrupt()?)?;
    let shown = queries(&report, "SELECT count(id) FROM secrets");
    assert_eq!(shown.len(), 1, "{shown:#?}");
    assert_eq!(shown[0]["query"], "SELECT count(id) FROM secrets WHERE filler <> $1");
    assert!(!report.to_string().contains("4711"));
    Ok(())
}

#[test]
fn without_identifiers_a_query_is_known_by_its_text_and_without_text_by_neither() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?)
        .io_method("worker")
        .shared_buffers("4MB")
        .setting("compute_query_id", "off")
        .start()?;
    let mut client = cluster.connect("postgres")?;
    create_table(&mut client, "texts", 8)?;
    client.batch_execute("SET max_parallel_workers_per_gather = 0")?;
    for (arguments, is_shown) in [(&[][..], true), (&["--no-query-text"][..], false)] {
        cluster.drop_caches()?;
        let tracer = Tracer::stat(&cluster).args(arguments.iter().copied()).start()?;
        // Long enough for a sample; the line break must not break the report's line.
        client.simple_query("SELECT count(id),\n pg_sleep(0.3) FROM texts")?;
        let finished = tracer.interrupt()?;
        let report = report_of(&finished)?;
        complain_of_nothing(&report);
        assert_eq!(report.to_string().contains("pg_sleep"), is_shown, "{:#}", report["queries"]);
        let rows = queries(&report, "SELECT count(id),\n pg_sleep");
        assert_eq!(rows.len(), usize::from(is_shown));
        assert!(
            rows.iter()
                .all(|row| row["query_id"] == Value::Null && of(row, "/certain") == of(row, "/io/reads"))
        );
        let reads: u64 = list(&report, "queries").iter().map(|row| of(row, "/io/reads")).sum();
        assert_eq!(reads, count(&report, "/ledger/reads")? - count(&report, "/ledger/own")?);
    }
    Ok(())
}

#[test]
fn parallel_workers_count_to_their_leaders_query_and_to_its_one_execution() -> Result<()> {
    let cluster = server(PgInstall::v18()?, "worker")?;
    let mut client = cluster.connect("postgres")?;
    create_table(&mut client, "shared_work", 32)?;
    client.batch_execute(
        "SET max_parallel_workers_per_gather = 2; SET min_parallel_table_scan_size = 0;
         SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0",
    )?;
    cluster.drop_caches()?;
    let tracer = Tracer::stat(&cluster).args(["--relation", "public.shared_work"]).start()?;
    let plan = scan::explain(&mut client, "SELECT count(id) FROM shared_work")?;
    let report = report_of(&tracer.interrupt()?)?;
    ensure!(plan.to_string().contains("\"Workers Launched\":2"), "no parallel plan: {plan:#}");
    let rows = list(&report, "queries");
    let shown: Vec<_> = rows
        .iter()
        .map(|row| {
            (&row["query"], &row["query_id"], &row["backend_type"], &row["io"]["reads"], &row["executions"])
        })
        .collect();
    assert_eq!(rows.len(), 1, "{shown:#?}");
    assert_eq!(of(&rows[0], "/executions"), 1, "{}", rows[0]);
    assert_eq!(of(&rows[0], "/io/blocks"), scan::blocks(&report, "shared_work")?);
    assert!(list(&report, "backends").len() >= 3, "{:#}", report["backends"]);
    Ok(())
}

#[test]
fn processes_without_a_query_are_named_as_what_they_are() -> Result<()> {
    let cluster = Cluster::builder(PgInstall::v18()?)
        .io_method("worker")
        .shared_buffers("4MB")
        .setting("autovacuum", "on")
        .setting("autovacuum_naptime", "1s")
        .setting("wal_level", "replica")
        .start()?;
    let mut client = cluster.connect("postgres")?;
    create_table(&mut client, "tended", 16)?;
    cluster.drop_caches()?;
    let tracer = Tracer::stat(&cluster).start()?;
    client.batch_execute("UPDATE tended SET id = id + 1")?;
    let vacuumed = "SELECT autovacuum_count > 0 FROM pg_stat_user_tables WHERE relname = 'tended'";
    wait_until("autovacuum to tend the table", || {
        client.query_one(vacuumed, &[]).is_ok_and(|row| row.get(0))
    })?;
    // Reads the data directory through a walsender.
    let backup = base_backup(&cluster)?;
    ensure!(backup.status.success(), "{}", String::from_utf8_lossy(&backup.stderr));
    let report = report_of(&tracer.interrupt()?)?;
    let vacuums = queries(&report, "autovacuum: ");
    assert!(!vacuums.is_empty(), "{:#}", report["queries"]);
    assert!(vacuums.iter().all(|row| row["backend_type"] == "autovacuum worker"), "{vacuums:#?}");
    let senders: Vec<_> =
        list(&report, "queries").iter().filter(|row| row["backend_type"] == "walsender").collect();
    assert!(!senders.is_empty(), "{:#}", report["queries"]);
    Ok(())
}

fn base_backup(cluster: &Cluster) -> Result<Output> {
    let mut command = cluster.client_command("pg_basebackup")?;
    Ok(command.args(["-D", "-", "-F", "t", "-X", "none", "-c", "fast"]).output()?)
}

/// A query that fails leaves reads behind in the io workers' queue. They are not the next query's.
#[test]
fn the_next_query_does_not_get_what_a_cancelled_one_left_in_the_queue() -> Result<()> {
    let disk = SlowDisk::builder().size(256 << 20).start()?;
    let cluster = Cluster::builder(PgInstall::v18()?)
        .io_method("worker")
        .shared_buffers("16MB")
        .setting("io_workers", "1")
        .setting("compute_query_id", "on")
        .setting("debug_io_direct", "data")
        .setting("effective_io_concurrency", "64")
        .slow_disk(&disk)
        .start()?;
    let mut client = cluster.connect("postgres")?;
    scan::use_disk(&mut client, &disk)?;
    create_table(&mut client, "cancelled", 64)?;
    client.batch_execute("SET max_parallel_workers_per_gather = 0")?;
    client.batch_execute("SET io_combine_limit = 1; SET statement_timeout = '300ms'")?;
    client.simple_query("EXPLAIN SELECT count(id) FROM cancelled")?;
    cluster.drop_caches()?;
    disk.set_latency(Latency::Constant(Duration::from_millis(10)));
    let tracer = Tracer::stat(&cluster).args(["--relation", "public.cancelled"]).start()?;
    ensure!(client.simple_query("SELECT count(id) FROM cancelled").is_err(), "it was not cancelled");
    // Without a pause: the queue is not empty yet.
    client.simple_query("SELECT 1 FROM pg_sleep(0.25)")?;
    wait_until("the io worker to be done with what was left", || {
        client
            .query_one("SELECT count(*) FROM pg_aios WHERE state NOT LIKE 'COMPLETED%'", &[])
            .is_ok_and(|row| row.get::<_, i64>(0) == 0)
    })?;
    let report = report_of(&tracer.interrupt()?)?;
    complain_of_nothing(&report);
    let rows = list(&report, "queries");
    println!(
        "{} reads, {} left behind by the cancelled query",
        of(&report, "/filter/reads"),
        of(&report, "/query_certainty/unknown")
    );
    let wrong = rows.iter().filter(|row| row["kind"] == "query").filter(|row| {
        !row["query"].as_str().is_some_and(|text| text.starts_with("SELECT count(id) FROM cancelled"))
    });
    assert_eq!(wrong.count(), 0, "{rows:#?}");
    assert!(of(&report, "/query_certainty/unknown") > 0, "nothing was left behind: {rows:#?}");
    Ok(())
}

#[test]
fn a_session_is_shown_with_its_client_its_waits_and_who_blocks_it() -> Result<()> {
    let cluster = server(PgInstall::v18()?, "worker")?;
    let mut blocker = named(&cluster, "blocker")?;
    create_table(&mut blocker, "locked", 1)?;
    let (blocker_pid, tracer) = (scan::backend_pid(&mut blocker)?, Tracer::stat(&cluster).start()?);
    blocker.batch_execute("BEGIN; LOCK TABLE locked")?;
    let mut config: Config = Config::new();
    config.host("127.0.0.1").port(cluster.port()).user("postgres").dbname("postgres");
    let mut waiter = config.application_name("blocked").connect(NoTls)?;
    let waiter_pid = scan::backend_pid(&mut waiter)?;
    let waiting = thread::spawn(move || waiter.simple_query("SELECT count(*) FROM locked").map(drop));
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND state_change < now() - interval '300 ms'";
    wait_until("the lock to be waited for", || {
        // A transaction sees one picture; this one needs another each time.
        cluster
            .connect("postgres")
            .and_then(|mut client| Ok(client.query_one(waits, &[])?))
            .is_ok_and(|row| row.get::<_, i64>(0) == 1)
    })?;
    blocker.batch_execute("COMMIT")?;
    waiting.join().expect("no panic")?;
    let report = report_of(&tracer.interrupt()?)?;
    let sessions = list(&report, "sessions");
    let session = sessions.iter().find(|session| session["pid"] == waiter_pid).context("it is not shown")?;
    assert_eq!(session["application_name"], "blocked");
    assert_eq!(session["client"], "127.0.0.1");
    assert_eq!(session["blocked_by"], serde_json::json!([blocker_pid]));
    assert_eq!(session["query"], "SELECT count(*) FROM locked");
    assert!(of(session, "/wait_events/Lock:relation") >= 1, "{session:#}");
    assert!(session["busy_ratio"].as_f64().is_some_and(|busy| busy > 0.5 && busy <= 1.0), "{session:#}");
    Ok(())
}

#[test]
fn the_tracers_own_sessions_are_in_no_table() -> Result<()> {
    let cluster = server(PgInstall::v18()?, "worker")?;
    let mut client = cluster.connect("postgres")?;
    create_table(&mut client, "mine", 8)?;
    cluster.drop_caches()?;
    let tracer = Tracer::stat(&cluster).args(["--sample-rate", "200"]).start()?;
    client.simple_query("SELECT count(id) FROM mine")?;
    let report = report_of(&tracer.interrupt()?)?;
    complain_of_nothing(&report);
    assert!(count(&report, "/ledger/own")? > 0, "its sessions read nothing: {}", report["ledger"]);
    for list_name in ["backends", "sessions", "waits"] {
        let own = list(&report, list_name).iter().filter(|row| row["application_name"] == "pgiotrace");
        assert_eq!(own.count(), 0, "{list_name}: {:#}", report[list_name]);
    }
    let shown: u64 = list(&report, "methods").iter().map(|row| of(row, "/io/reads")).sum();
    assert_eq!(shown, count(&report, "/ledger/reads")? - count(&report, "/ledger/own")?);
    let named = list(&report, "queries")
        .iter()
        .filter(|row| row["query"].as_str().is_some_and(|text| text.contains("pg_stat_activity")));
    assert_eq!(named.count(), 0, "{:#}", report["queries"]);
    Ok(())
}

#[test]
fn samples_cost_the_server_no_more_than_a_hundredth_of_a_processor() -> Result<()> {
    let cluster =
        Cluster::builder(PgInstall::v18()?).io_method("worker").setting("max_connections", "350").start()?;
    let crowd: Vec<Client> = (0..300).map(|_| cluster.connect("postgres")).collect::<Result<_>>()?;
    let run = Tracer::stat(&cluster).args(["--sample-rate", "1000", "--duration", "5s"]).finish()?;
    let report = report_of(&run)?;
    drop(crowd);
    let (samples, cpu) =
        (of(&report, "/overhead/sampler/samples"), report["overhead"]["sampler"]["server_cpu_s"].as_f64());
    let (cpu, duration) =
        (cpu.context("not measured")?, report["window"]["duration_s"].as_f64().context("no window")?);
    println!(
        "300 sessions, asked for 1000 samples a second: {samples} samples in {duration:.1} s, {:.0} us each, {:.2} % of a processor",
        cpu / samples as f64 * 1e6,
        cpu / duration * 100.0
    );
    assert!(samples >= 3, "{}", report["overhead"]);
    // The first sample is taken before its cost is known.
    let one = cpu / samples as f64;
    assert!(cpu <= duration * 0.01 + 3.0 * one, "{}", report["overhead"]);
    Ok(())
}
