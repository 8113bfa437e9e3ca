//! The blocks that are traced are the blocks that PostgreSQL counted, to the block: nine ways of reading, each under all
//! three I/O methods.
//!
//! Each run is held against two counts that PostgreSQL makes apart from each other: its statistics of each relation
//! (`pg_statio_all_tables`, `pg_statio_all_indexes`), and what the command itself says (EXPLAIN's buffers, VACUUM's
//! buffer usage, the result of `pg_prewarm`).

use std::{fmt::Write as _, fs, os::unix::fs as unix, os::unix::fs::MetadataExt as _, process::Command};

use anyhow::{Context as _, Result, ensure};
use pgiotrace_tests::{
    Cluster, PgInstall, Tracer,
    ledger::{complaints, report_of, traced_blocks},
    scan::list,
    wait_until,
};
use postgres::Client;
use serde_json::Value;

/// Whom the traced session calls itself: psql's own choice.
const SESSION: &str = "psql";
/// Samples a second: a parallel worker lives for some hundred milliseconds, and its leader is to be sampled.
const SAMPLE_RATE: &str = "200";

/// How a relation is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// By a query whose plan has this node.
    Query { node: &'static str, settings: &'static [&'static str], query: &'static str },
    /// By VACUUM, after a part of the rows was deleted.
    Vacuum,
    /// By `pg_prewarm`.
    Prewarm,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    way: Way,
    table: &'static str,
    /// An index that is read as well.
    index: Option<&'static str>,
    /// By what method the table's reads are executed.
    executed: Executed,
}

/// By what method the table's reads are executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Executed {
    /// The server's own.
    AsSet,
    /// The server's own, but an io worker cannot reach the backend's own memory.
    AsSetUnlessWorker,
    /// The backend waits for each single read, so it executes it itself.
    Synchronously,
}

const CASES: [Case; 9] = [
    Case {
        name: "seq scan",
        way: Way::Query { node: "Seq Scan", settings: &[], query: "SELECT count(pad) FROM items" },
        table: "items",
        index: None,
        executed: Executed::AsSet,
    },
    Case {
        name: "parallel seq scan",
        way: Way::Query {
            node: "Gather",
            settings: &[
                "max_parallel_workers_per_gather = 2",
                "parallel_setup_cost = 0",
                "parallel_tuple_cost = 0",
                "min_parallel_table_scan_size = 0",
                "parallel_leader_participation = off",
            ],
            // Costly to compute, so that the workers live long enough to be sampled.
            query: "SELECT count(*) FROM items WHERE sha512(pad::bytea) <> ''",
        },
        table: "items",
        index: None,
        executed: Executed::AsSet,
    },
    Case {
        name: "bitmap heap scan",
        way: Way::Query {
            node: "Bitmap Heap Scan",
            settings: &["enable_seqscan = off", "enable_indexscan = off"],
            query: "SELECT count(pad) FROM items WHERE k < 20000",
        },
        table: "items",
        index: Some("items_k"),
        executed: Executed::AsSet,
    },
    Case {
        name: "index scan",
        way: Way::Query {
            node: "Index Scan",
            settings: &["enable_seqscan = off", "enable_bitmapscan = off"],
            query: "SELECT count(pad) FROM items WHERE k < 20000",
        },
        table: "items",
        index: Some("items_k"),
        executed: Executed::Synchronously,
    },
    Case {
        name: "VACUUM",
        way: Way::Vacuum,
        table: "changed",
        index: Some("changed_k"),
        executed: Executed::AsSet,
    },
    Case { name: "pg_prewarm", way: Way::Prewarm, table: "items", index: None, executed: Executed::AsSet },
    Case {
        name: "two segments",
        way: Way::Query { node: "Seq Scan", settings: &[], query: "SELECT count(id) FROM wide" },
        table: "wide",
        index: None,
        executed: Executed::AsSet,
    },
    Case {
        name: "temp table",
        way: Way::Query {
            node: "Seq Scan",
            settings: &["temp_buffers = '1MB'"],
            query: "SELECT count(pad) FROM passing",
        },
        table: "passing",
        index: None,
        executed: Executed::AsSetUnlessWorker,
    },
    Case {
        name: "tablespace",
        way: Way::Query { node: "Seq Scan", settings: &[], query: "SELECT count(pad) FROM elsewhere" },
        table: "elsewhere",
        index: None,
        executed: Executed::AsSet,
    },
];

const TEMP_TABLE: &str = "passing";
/// Asks what the statistics say of a table, which comes last.
const TABLE_COUNT: &str = "SELECT heap_blks_read FROM pg_statio_all_tables WHERE relid = ";
/// The same of an index.
const INDEX_COUNT: &str = "SELECT idx_blks_read FROM pg_statio_all_indexes WHERE indexrelid = ";
/// A segment file has that many blocks, in builds with the default of 1 GiB.
const SEGMENT_BLOCKS: u64 = 131_072;

const LOAD: [&str; 14] = [
    "CREATE EXTENSION pg_buffercache",
    "CREATE EXTENSION pg_prewarm",
    "CREATE TABLE items (id int, k int, pad text)",
    // 7919 is prime to the number of rows: k has every value once, and neighbours in k are far apart in the table.
    "INSERT INTO items SELECT i, i::int8 * 7919 % 400000, repeat('x', 100) FROM generate_series(1, 400000) i",
    "CREATE INDEX items_k ON items (k)",
    "CREATE TABLE changed (id int, k int, pad text)",
    "INSERT INTO changed SELECT i, i::int8 * 7919 % 200000, repeat('x', 100) FROM generate_series(1, 200000) i",
    "CREATE INDEX changed_k ON changed (k)",
    "CREATE TABLE elsewhere (id int, pad text) TABLESPACE space",
    "INSERT INTO elsewhere SELECT i, repeat('x', 100) FROM generate_series(1, 100000) i",
    // A row in each block, uncompressed, and some more blocks than a segment has.
    "CREATE UNLOGGED TABLE wide (id int, pad text STORAGE PLAIN)",
    "INSERT INTO wide SELECT i, repeat('x', 7900) FROM generate_series(1, 133000) i",
    "VACUUM (FREEZE, ANALYZE)",
    "CHECKPOINT",
];

/// Blocks of one relation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Blocks {
    traced: u64,
    counted: u64,
}

/// What a run showed.
#[derive(Debug)]
struct Row {
    case: &'static str,
    method: &'static str,
    table: Blocks,
    index: Option<Blocks>,
    /// The sum of both, as the command itself says it.
    said: u64,
    /// All that is wrong apart from the numbers of blocks.
    complaints: Vec<String>,
}

impl Row {
    fn traced(&self) -> u64 {
        self.table.traced + self.index.unwrap_or_default().traced
    }

    /// How far the traced blocks are from PostgreSQL's counts, the worst of all of them.
    fn difference(&self) -> u64 {
        let index = self.index.unwrap_or_default();
        let pairs = [
            (self.table.traced, self.table.counted),
            (index.traced, index.counted),
            (self.traced(), self.said),
        ];
        pairs.into_iter().map(|(traced, counted)| traced.abs_diff(counted)).max().unwrap_or(0)
    }
}

#[test]
fn traced_blocks_equal_what_postgresql_counted() -> Result<()> {
    let install = PgInstall::v18()?;
    let methods = install.io_methods();
    assert_eq!(methods, ["sync", "worker", "io_uring"], "setup has brought a PostgreSQL 18 with io_uring");
    let mut cluster = loaded_cluster(install)?;
    let mut rows = Vec::new();
    for (round, method) in methods.into_iter().enumerate() {
        cluster.restart(&[("io_method", method)])?;
        for case in &CASES {
            let row = measure(&cluster, case, method, round)
                .with_context(|| format!("{} under {method}", case.name))?;
            rows.push(row);
        }
    }
    println!("\n{}", table(&rows));
    let wrong: Vec<_> =
        rows.iter().filter(|row| row.difference() != 0 || !row.complaints.is_empty()).collect();
    assert!(wrong.is_empty(), "{wrong:#?}\n{}", table(&rows));
    assert_eq!(rows.len(), 27);
    assert!(rows.iter().all(|row| row.traced() > 0), "a run without reads compares nothing");
    Ok(())
}

fn loaded_cluster(install: PgInstall) -> Result<Cluster> {
    let cluster = Cluster::builder(install)
        .shared_buffers("32MB")
        .setting("max_parallel_workers_per_gather", "0")
        .setting("max_wal_size", "4GB")
        .setting("wal_level", "minimal")
        .setting("max_wal_senders", "0")
        .start()?;
    let space = cluster.folder().join("space");
    fs::create_dir(&space)?;
    let owner = fs::metadata(cluster.folder())?;
    unix::chown(&space, Some(owner.uid()), Some(owner.gid()))?;
    let mut client = cluster.connect("postgres")?;
    client.batch_execute(&format!("CREATE TABLESPACE space LOCATION '{}'", space.display()))?;
    for statement in LOAD {
        client.batch_execute(statement).with_context(|| format!("cannot run {statement}"))?;
    }
    Ok(cluster)
}

/// Runs one case with cold caches under the tracer.
fn measure(cluster: &Cluster, case: &Case, method: &'static str, round: usize) -> Result<Row> {
    let mut client = cluster.connect("postgres")?;
    if case.way == Way::Vacuum {
        client.batch_execute(&format!("DELETE FROM {} WHERE id % 8 = {round}", case.table))?;
    }
    make_cold(cluster, &mut client, case)?;
    // Else what this session has read would be added in the middle of the trace.
    client.batch_execute("SELECT pg_stat_force_next_flush()")?;
    let before = counts(&mut client, case)?;
    let run = tracer(cluster, case).run(&command(cluster, case))?;
    let report = report_of(&run)?;
    wait_until("the traced session has ended, its statistics with it", || is_gone(&mut client))?;
    let after = counts(&mut client, case)?;

    let (pid, printed) = run.stdout.split_once('\n').context("psql printed nothing")?;
    let session: u32 = pid.trim().parse().context("psql did not print its backend's PID")?;
    let (said, mut wrong) = match case.way {
        Way::Query { node, .. } => said_by_explain(printed, node, &report, session)?,
        Way::Vacuum => (said_by_vacuum(&run.stderr)?, Vec::new()),
        Way::Prewarm => (printed.trim().parse().context("pg_prewarm returned no number")?, Vec::new()),
    };
    wrong.extend(complaints(&report));
    wrong.extend(complaints_of_owners(&report, case, session));
    wrong.extend(complaints_of_methods(&report, case, method));
    let mut counted = (after.0 - before.0, after.1 - before.1);
    if case.table == TEMP_TABLE {
        counted.0 =
            printed.lines().next_back().unwrap_or_default().parse().context("no count was printed")?;
    }
    let (table, index) = blocks(&report, case, counted);
    if case.name == "two segments" && table.traced <= SEGMENT_BLOCKS {
        wrong.push(format!("{} blocks are not more than one segment", table.traced));
    }
    Ok(Row { case: case.name, method, table, index, said, complaints: wrong })
}

/// Empties `shared_buffers` of the case's relations and the kernel of all, but leaves the catalogs that the command needs
/// in `shared_buffers`: EXPLAIN counts reads of these too.
fn make_cold(cluster: &Cluster, client: &mut Client, case: &Case) -> Result<()> {
    if case.table != TEMP_TABLE {
        if let Way::Query { query, .. } = case.way {
            client.batch_execute(&format!("EXPLAIN {query}"))?;
        }
        for relation in [Some(case.table), case.index].into_iter().flatten() {
            // A page that somebody holds at this moment is skipped.
            let evict = "SELECT buffers_skipped FROM pg_buffercache_evict_relation($1::text::regclass)";
            wait_until("the relation is evicted", || {
                client.query_one(evict, &[&relation]).is_ok_and(|row| row.get::<_, i32>(0) == 0)
            })?;
        }
    }
    cluster.drop_caches()
}

fn tracer(cluster: &Cluster, case: &Case) -> Tracer {
    let tracer = Tracer::stat(cluster).args(["--sample-rate", SAMPLE_RATE]);
    // A temporary relation has no name that a filter could match.
    let relations = [Some(case.table), case.index].into_iter().flatten().filter(|name| *name != TEMP_TABLE);
    relations.fold(tracer, |tracer, name| tracer.args(["--relation", &format!("public.{name}")]))
}

/// psql, printing its backend's PID and then what the command says.
fn command(cluster: &Cluster, case: &Case) -> Command {
    let mut statements = vec!["SELECT pg_backend_pid()".to_owned()];
    match case.way {
        Way::Query { settings, query, .. } => {
            statements.extend(settings.iter().map(|setting| format!("SET {setting}")));
            if case.table == TEMP_TABLE {
                statements.push(format!(
                    "CREATE TEMP TABLE {TEMP_TABLE} AS SELECT repeat('x', 100) AS pad FROM generate_series(1, 100000)"
                ));
            }
            statements.push(format!("EXPLAIN (ANALYZE, BUFFERS, VERBOSE, FORMAT JSON) {query}"));
            if case.table == TEMP_TABLE {
                // Gone with the session, so that it has to ask itself.
                statements.push("SELECT pg_stat_force_next_flush()".to_owned());
                statements.push(format!("SELECT ({TABLE_COUNT}'{TEMP_TABLE}'::regclass)"));
            }
        }
        Way::Vacuum => statements.push(format!("VACUUM (VERBOSE) {}", case.table)),
        Way::Prewarm => statements.push(format!("SELECT pg_prewarm('{}', 'buffer')", case.table)),
    }
    let mut command = cluster.psql_command(&["-q", "-A", "-t"]);
    command.args(statements.iter().flat_map(|statement| ["-c", statement]));
    command
}

/// Blocks read of the table and of the index, since the server began to count. A temporary table is its session's alone.
fn counts(client: &mut Client, case: &Case) -> Result<(u64, u64)> {
    if case.table == TEMP_TABLE {
        return Ok((0, 0));
    }
    let mut count = |query, relation| -> Result<u64> {
        let blocks: i64 = client.query_one(&format!("{query}$1::text::regclass"), &[&relation])?.get(0);
        Ok(blocks.unsigned_abs())
    };
    let of_index = case.index.map(|name| count(INDEX_COUNT, name)).transpose()?.unwrap_or(0);
    Ok((count(TABLE_COUNT, case.table)?, of_index))
}

fn is_gone(client: &mut Client) -> bool {
    let sessions = "SELECT FROM pg_stat_activity WHERE application_name = $1";
    client.query(sessions, &[&SESSION]).is_ok_and(|rows| rows.is_empty())
}

/// What EXPLAIN counted, planning included, and what is wrong with the plan.
fn said_by_explain(printed: &str, node: &str, report: &Value, session: u32) -> Result<(u64, Vec<String>)> {
    let json = printed.rfind(']').map_or(printed, |end| &printed[..=end]);
    let explained: Value = serde_json::from_str(json).context("EXPLAIN's output is no JSON")?;
    let read = |of: &Value| {
        let kinds = ["Shared Read Blocks", "Local Read Blocks"];
        kinds.iter().filter_map(|kind| of[*kind].as_u64()).sum::<u64>()
    };
    let plan = &explained[0]["Plan"];
    let found = nodes(plan).into_iter().find(|found| found["Node Type"] == node);
    let found = found.with_context(|| format!("the plan has no {node}: {plan:#}"))?;
    let mut wrong = Vec::new();
    if node == "Gather" {
        ensure!(found["Workers Launched"] == 2, "2 workers were wanted: {found:#}");
        let scan = nodes(plan).into_iter().find(|found| found["Node Type"] == "Seq Scan");
        let workers = list(scan.context("the plan has no Seq Scan")?, "Workers").iter().map(read).collect();
        wrong.extend(complaints_of_parallel_workers(report, session, workers));
    }
    Ok((read(plan) + read(&explained[0]["Planning"]), wrong))
}

/// A plan's nodes, from the top.
fn nodes(plan: &Value) -> Vec<&Value> {
    std::iter::once(plan).chain(list(plan, "Plans").iter().flat_map(nodes)).collect()
}

/// What VACUUM counted: "buffer usage: 1 hits, 2 reads, 3 dirtied".
fn said_by_vacuum(stderr: &str) -> Result<u64> {
    let usage = stderr.lines().find_map(|line| line.strip_prefix("buffer usage: "));
    let usage = usage.with_context(|| format!("VACUUM told no buffer usage: {stderr}"))?;
    let reads = usage.split(", ").find_map(|part| part.strip_suffix(" reads"));
    reads.context("VACUUM told no reads")?.parse().context("VACUUM told no number of reads")
}

/// Each parallel worker must own the blocks that EXPLAIN says it read, and be known as its leader's worker.
fn complaints_of_parallel_workers(report: &Value, session: u32, mut counted: Vec<u64>) -> Vec<String> {
    let workers = list(report, "backends").iter().filter(|backend| backend["leader_pid"] == session);
    let mut traced: Vec<_> = workers.filter_map(|worker| worker["io"]["blocks"].as_u64()).collect();
    // One that came too late to read anything is not in the report.
    counted.retain(|blocks| *blocks > 0);
    counted.sort_unstable();
    traced.sort_unstable();
    if traced == counted && !counted.is_empty() {
        return Vec::new();
    }
    vec![format!("parallel workers owned {traced:?} blocks and read {counted:?}: {:#}", report["backends"])]
}

/// The reads of the relations must be those of the session and its parallel workers, all of them.
fn complaints_of_owners(report: &Value, case: &Case, session: u32) -> Vec<String> {
    let is_own = |backend: &&Value| backend["pid"] == session || backend["leader_pid"] == session;
    let (own, others): (Vec<_>, Vec<_>) = list(report, "backends").iter().partition(is_own);
    let sum = |entries: &[&Value]| entries.iter().filter_map(|one| one["io"]["blocks"].as_u64()).sum::<u64>();
    let relations = sum(&list(report, "relations").iter().collect::<Vec<_>>());
    let mut wrong = Vec::new();
    // Only a filtered report leaves out the catalogs, which others read too.
    if case.table != TEMP_TABLE && !others.is_empty() {
        wrong.push(format!("others than the session {session} own reads: {others:#?}"));
    }
    if sum(&own) + sum(&others) != relations {
        wrong.push(format!(
            "backends own {} blocks of the {relations} that were traced",
            sum(&own) + sum(&others)
        ));
    }
    wrong
}

/// The table's reads must have been executed by the method that PostgreSQL uses for them.
fn complaints_of_methods(report: &Value, case: &Case, set: &'static str) -> Vec<String> {
    let method = match (case.executed, set) {
        (Executed::Synchronously, _) | (Executed::AsSetUnlessWorker, "worker") => "sync",
        _ => set,
    };
    let is_table = |entry: &&Value| entry["fork"] == "main" && is_of(entry, case.table);
    let Some(entry) = list(report, "relations").iter().find(is_table) else {
        return vec![format!("{} is not in the report: {:#}", case.table, report["relations"])];
    };
    let by_method = &entry["io"]["by_method"];
    // A backend executes a read itself when the workers' queue is full, or when it needs a single block at once.
    let is_only = set == "sync" || method == "sync";
    let reads = |name: &str| by_method[name].as_u64().unwrap_or(0);
    let others = ["sync", "worker", "io_uring"].iter().filter(|name| **name != method && **name != "sync");
    let is_right = reads(method) > 0
        && others.map(|name| reads(name)).sum::<u64>() == 0
        && (!is_only || reads("sync") == entry["io"]["reads"].as_u64().unwrap_or(0));
    if is_right { Vec::new() } else { vec![format!("reads were not executed by {method}: {by_method}")] }
}

fn is_of(entry: &Value, table: &str) -> bool {
    if table == TEMP_TABLE { entry["temporary"] == true } else { entry["name"] == table }
}

/// The case's blocks of the table and of the index, all forks.
fn blocks(report: &Value, case: &Case, counted: (u64, u64)) -> (Blocks, Option<Blocks>) {
    let of_table = list(report, "relations").iter().filter(|entry| is_of(entry, case.table));
    let traced = of_table.filter_map(|entry| entry["io"]["blocks"].as_u64()).sum();
    let index = |name| Blocks { traced: traced_blocks(report, name), counted: counted.1 };
    (Blocks { traced, counted: counted.0 }, case.index.map(index))
}

/// The numbers, aligned.
fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<18} {:<9} {:>13} {:>14} {:>13} {:>14} {:>14} {:>11}\n",
        "",
        "",
        "table, traced",
        "table, counted",
        "index, traced",
        "index, counted",
        "said in total",
        "difference"
    );
    for row in rows {
        let index = |number: fn(Blocks) -> u64| {
            row.index.map_or_else(|| "-".to_owned(), |index| number(index).to_string())
        };
        let (traced, counted) = (index(|blocks| blocks.traced), index(|blocks| blocks.counted));
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{:<18} {:<9} {:>13} {:>14} {traced:>13} {counted:>14} {:>14} {:>11}",
            row.case,
            row.method,
            row.table.traced,
            row.table.counted,
            row.said,
            row.difference()
        );
    }
    text
}
