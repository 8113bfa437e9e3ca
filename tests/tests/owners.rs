//! Every read has its owner, and it is the right one: in a crowd, when sessions come and go, and when it can only be
//! inferred.

use std::{fs, sync::Barrier, thread, time::SystemTime};

use anyhow::{Context as _, Result, anyhow};
use pgiotrace_tests::{
    Cluster, PgInstall, Running, Tracer,
    ledger::{complaints, count, report_of, traced_blocks},
    scan::{backend_pid, list, scan},
    wait_until,
};
use postgres::Client;
use serde_json::Value;

/// Backends that scan at once, each its own table.
const BACKENDS: usize = 32;
/// Buffers that hold less than the smallest table.
const SMALL: &str = "16MB";
/// Buffers of which each backend may pin enough to have several reads under way.
const LARGE: &str = "128MB";
/// Blocks of the smallest of their tables.
const LEAST_BLOCKS: usize = 2_600;
/// By so many blocks each table is larger than the one before: a mix-up shows as a wrong sum.
const STEP_BLOCKS: usize = 31;
/// Sessions of the test in which they come and go.
const SESSIONS: usize = 200;
/// Of these, so many in a second.
const SESSIONS_PER_SECOND: &str = "20";

/// A server under `worker`.
fn worker_cluster(shared_buffers: &str) -> Result<Cluster> {
    let builder = Cluster::builder(PgInstall::v18()?).io_method("worker").shared_buffers(shared_buffers);
    let builder = builder.setting("max_parallel_workers_per_gather", "0").setting("max_wal_size", "4GB");
    // Each scan begins at the first block.
    let builder = builder.setting("synchronize_seqscans", "off");
    let cluster = builder.start()?;
    cluster.connect("postgres")?.batch_execute("CREATE EXTENSION pg_buffercache")?;
    Ok(cluster)
}

/// Makes a table of that many blocks, with a row in each.
fn create_table(client: &mut Client, name: &str, blocks: usize) -> Result<()> {
    client.batch_execute(&format!(
        "CREATE UNLOGGED TABLE {name} (id int, pad text STORAGE PLAIN);
         INSERT INTO {name} SELECT i, repeat('x', 7900) FROM generate_series(1, {blocks}) i"
    ))?;
    // Not in a transaction with the other statements.
    client.batch_execute(&format!("VACUUM (FREEZE) {name}"))?;
    Ok(())
}

/// Empties `shared_buffers` of a table.
fn evict(client: &mut Client, table: &str) -> Result<()> {
    let evict = "SELECT buffers_skipped FROM pg_buffercache_evict_relation($1::text::regclass)";
    wait_until("the table is evicted", || {
        client.query_one(evict, &[&table]).is_ok_and(|row| row.get::<_, i32>(0) == 0)
    })
}

fn blocks_of(backend: &Value) -> u64 {
    backend["io"]["blocks"].as_u64().unwrap_or(0)
}

/// A backend of the crowd: it scans `table` and nothing else.
struct Scanner {
    client: Client,
    pid: u32,
    table: String,
}

impl Scanner {
    fn connect(cluster: &Cluster, table: String) -> Result<Self> {
        let mut client = cluster.connect("postgres")?;
        client.batch_execute(&format!("SET application_name = 'scans {table}'"))?;
        Ok(Self { pid: backend_pid(&mut client)?, client, table })
    }
}

fn table_of(number: usize) -> String {
    format!("own_{number}")
}

/// Connects the crowd, with cold caches.
fn crowd(cluster: &Cluster) -> Result<Vec<Scanner>> {
    let mut client = cluster.connect("postgres")?;
    (0..BACKENDS).try_for_each(|number| evict(&mut client, &table_of(number)))?;
    cluster.drop_caches()?;
    (0..BACKENDS).map(|number| Scanner::connect(cluster, table_of(number))).collect()
}

/// Lets all scan at once; the blocks that each read, as EXPLAIN counts them.
fn scan_at_once(crowd: &mut [Scanner]) -> Result<Vec<u64>> {
    let start = Barrier::new(crowd.len());
    let scan_own = |scanner: &mut Scanner| {
        start.wait();
        scan(&mut scanner.client, &scanner.table)
    };
    thread::scope(|scope| {
        let scans: Vec<_> = crowd.iter_mut().map(|scanner| scope.spawn(|| scan_own(scanner))).collect();
        let join = |scan: thread::ScopedJoinHandle<'_, Result<u64>>| {
            scan.join().map_err(|_| anyhow!("the thread of a scan panicked"))?
        };
        scans.into_iter().map(join).collect()
    })
}

/// What was found in reports that are confined to some of the tables.
#[derive(Debug, Default)]
struct Findings {
    /// Reads of the crowd's tables.
    reads: u64,
    /// Of these, such as are shown with an owner who scans another table.
    foreign_reads: u64,
    /// Rows that were sampled from `pg_aios`.
    rows: u64,
    /// Of these, such as no traced read matches.
    unmatched: u64,
    wrong: Vec<String>,
}

impl Findings {
    /// Judges a report of the reads of those tables whose numbers are `chosen`.
    fn judge(&mut self, report: &Value, crowd: &[Scanner], counted: &[u64], chosen: &[usize]) -> Result<()> {
        self.wrong.extend(complaints(report));
        self.rows += count(report, "/ledger/pg_aios/rows")?;
        self.unmatched += count(report, "/ledger/pg_aios/unmatched")?;
        for backend in list(report, "backends") {
            let reads = backend["io"]["reads"].as_u64().context("a backend has no io.reads")?;
            self.reads += reads;
            let is_chosen = chosen.iter().any(|number| crowd[*number].pid == backend["pid"]);
            if !is_chosen {
                self.foreign_reads += reads;
                self.wrong.push(format!("{backend} owns reads of tables of others"));
            }
        }
        for number in chosen {
            let scanner = &crowd[*number];
            let own = list(report, "backends").iter().filter(|backend| backend["pid"] == scanner.pid);
            let owned: u64 = own.map(blocks_of).sum();
            let traced = traced_blocks(report, &scanner.table);
            if (owned, traced) != (counted[*number], counted[*number]) {
                let read = counted[*number];
                self.wrong
                    .push(format!("{}: {owned} blocks owned, {traced} traced, {read} read", scanner.table));
            }
        }
        Ok(())
    }
}

/// Starts a tracer of these tables' reads alone.
fn trace_only(cluster: &Cluster, crowd: &[Scanner], chosen: &[usize]) -> Result<Running> {
    let filter = |tracer: Tracer, number: &usize| {
        tracer.args(["--relation", &format!("public.{}", crowd[*number].table)])
    };
    chosen.iter().fold(Tracer::stat(cluster), filter).start()
}

/// The numbers of tables differ in at least one of their five bits. For each bit, one tracer shows who owned the reads of
/// the tables that have it set, and another of those that have it not: a mix-up of any two backends is seen by both.
#[test]
fn each_of_32_backends_at_once_owns_the_reads_of_its_own_table_and_no_other() -> Result<()> {
    let cluster = worker_cluster(SMALL)?;
    let mut client = cluster.connect("postgres")?;
    for number in 0..BACKENDS {
        create_table(&mut client, &table_of(number), LEAST_BLOCKS + STEP_BLOCKS * number)?;
    }
    let mut findings = Findings::default();
    for bit in 0..BACKENDS.ilog2() {
        let mut crowd = crowd(&cluster)?;
        let (set, unset): (Vec<_>, Vec<_>) = (0..BACKENDS).partition(|number| number >> bit & 1 == 1);
        let tracers = [trace_only(&cluster, &crowd, &set)?, trace_only(&cluster, &crowd, &unset)?];
        let counted = scan_at_once(&mut crowd)?;
        for (tracer, chosen) in tracers.into_iter().zip([set, unset]) {
            findings.judge(&report_of(&tracer.interrupt()?)?, &crowd, &counted, &chosen)?;
        }
    }
    let Findings { reads, foreign_reads, rows, unmatched, wrong } = findings;
    println!(
        "{reads} reads of {BACKENDS} tables: {foreign_reads} with another table's owner; {rows} rows of pg_aios, {unmatched} unmatched"
    );
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(foreign_reads, 0);
    assert!(rows > 0, "pg_aios showed nothing to compare with");
    assert_eq!(unmatched, 0, "of {rows} rows of pg_aios: all reads began and ended within the trace");
    Ok(())
}

#[test]
fn in_a_crowd_every_read_of_the_whole_server_is_exact() -> Result<()> {
    let cluster = worker_cluster(SMALL)?;
    let mut client = cluster.connect("postgres")?;
    for number in 0..BACKENDS {
        create_table(&mut client, &table_of(number), LEAST_BLOCKS + STEP_BLOCKS * number)?;
    }
    let mut crowd = crowd(&cluster)?;
    let tracer = Tracer::stat(&cluster).start()?;
    let counted = scan_at_once(&mut crowd)?;
    let report = report_of(&tracer.interrupt()?)?;

    let ledger = &report["ledger"];
    println!("{ledger}");
    assert!(complaints(&report).is_empty(), "{:#?}", complaints(&report));
    assert!(count(&report, "/ledger/pg_aios/rows")? > 0, "pg_aios showed nothing to compare with: {ledger}");
    assert_eq!(ledger["pg_aios"]["unmatched"], 0, "all reads began and ended within the trace: {ledger}");
    let by_workers: u64 =
        list(&report, "io_workers").iter().filter_map(|one| one["io"]["reads"].as_u64()).sum();
    assert!(by_workers > 0, "no io worker executed a read");
    for (scanner, read) in crowd.iter().zip(counted) {
        assert_eq!(traced_blocks(&report, &scanner.table), read, "{}", scanner.table);
        let named = list(&report, "backends").iter().find(|backend| backend["pid"] == scanner.pid);
        let named =
            named.with_context(|| format!("the backend of {} is not in the report", scanner.table))?;
        assert_eq!(named["application_name"], format!("scans {}", scanner.table));
        assert!(blocks_of(named) >= read, "{named} owns less than the {read} blocks that it read");
    }
    Ok(())
}

#[test]
fn sessions_that_come_and_go_own_every_read_exactly() -> Result<()> {
    let cluster = worker_cluster(SMALL)?;
    // Larger than shared_buffers, so that each session has something to read.
    let mut client = cluster.connect("postgres")?;
    create_table(&mut client, "visited", LEAST_BLOCKS)?;
    let script = cluster.folder().join("visit.sql");
    fs::write(&script, "SELECT count(id) FROM visited;\n")?;
    let script = script.to_string_lossy().into_owned();
    let transactions = SESSIONS.to_string();
    let arguments = ["-n", "-C", "-c", "1", "-R", SESSIONS_PER_SECOND, "-t", &transactions, "-f", &script];
    let tracer = Tracer::stat(&cluster).args(["--relation", "public.visited"]);
    let report = report_of(&tracer.run(&cluster.pgbench_command(&arguments)?)?)?;

    let backends = list(&report, "backends");
    let named = backends.iter().filter(|backend| backend["application_name"] == "pgbench").count();
    println!("{} sessions, {named} of them sampled; {}", backends.len(), report["ledger"]);
    assert!(complaints(&report).is_empty(), "{:#?}", complaints(&report));
    assert_eq!(backends.len(), SESSIONS, "each session is one owner: {backends:#?}");
    assert_eq!(backends.iter().map(blocks_of).sum::<u64>(), traced_blocks(&report, "visited"));
    assert!(backends.iter().all(|backend| blocks_of(backend) > 0));
    Ok(())
}

/// Starts a tracer that leaves handles unread, so that owners of io workers' reads are inferred from `pg_aios`.
fn trace_by_view(cluster: &Cluster, arguments: &[&str]) -> Result<Running> {
    Tracer::stat(cluster).args(["--attribution", "pg_aios"]).args(arguments.iter().copied()).start()
}

/// Owners that io workers' reads are shown with, apart from "not known".
fn owners_of_workers_reads(report: &Value) -> Vec<u64> {
    let shares = list(report, "io_workers").iter().flat_map(|worker| list(worker, "owners"));
    let mut owners: Vec<_> = shares.filter_map(|share| share["pid"].as_u64()).collect();
    owners.sort_unstable();
    owners.dedup();
    owners
}

#[test]
fn without_handles_owners_are_inferred_from_the_view_and_never_called_exact() -> Result<()> {
    let cluster = worker_cluster(SMALL)?;
    let mut client = cluster.connect("postgres")?;
    (0..2).try_for_each(|number| create_table(&mut client, &table_of(number), 8_000))?;
    cluster.drop_caches()?;
    let mut crowd =
        (0..2).map(|number| Scanner::connect(&cluster, table_of(number))).collect::<Result<Vec<_>>>()?;
    let whole = trace_by_view(&cluster, &["--sample-rate", "500"])?;
    let first = trace_by_view(&cluster, &["--sample-rate", "500", "--relation", "public.own_0"])?;
    for _ in 0..5 {
        scan_at_once(&mut crowd)?;
    }
    let (whole, first) = (report_of(&whole.interrupt()?)?, report_of(&first.interrupt()?)?);

    println!("{}", whole["ledger"]);
    let ledger = |key: &str| count(&whole, &format!("/ledger/{key}"));
    let (inferred, unknown) = (ledger("inferred")?, ledger("ambiguous")? + ledger("unattributed")?);
    let by_workers: u64 =
        list(&whole, "io_workers").iter().filter_map(|one| one["io"]["reads"].as_u64()).sum();
    assert!(inferred > 0, "no owner was inferred: {}", whole["ledger"]);
    assert_eq!(inferred + unknown, by_workers, "reads of io workers are inferred or without an owner");
    assert_eq!(ledger("exact")?, ledger("reads")? - by_workers, "only a process's own reads are exact");
    assert_eq!(whole["ledger"]["complete"], true);
    assert_eq!(owners_of_workers_reads(&first), [u64::from(crowd[0].pid)], "{:#}", first["io_workers"]);
    Ok(())
}

/// A backend that has read ahead and does not look at what came leaves its reads in the view. When it has looked at last,
/// and another backend reads the same place of the same file a moment later, that read is not the first one's.
#[test]
fn without_handles_a_remembered_row_gives_nobody_the_reads_of_another() -> Result<()> {
    let cluster = worker_cluster(LARGE)?;
    let mut client = cluster.connect("postgres")?;
    create_table(&mut client, "shared", LEAST_BLOCKS)?;
    let mut first = Scanner::connect(&cluster, "shared".to_owned())?;
    let mut second = Scanner::connect(&cluster, "shared".to_owned())?;
    let exact = Tracer::stat(&cluster).args(["--relation", "public.shared"]).start()?;
    let inferred = trace_by_view(&cluster, &["--relation", "public.shared"])?;
    for _ in 0..10 {
        evict(&mut client, "shared")?;
        first
            .client
            .batch_execute("BEGIN; DECLARE ahead CURSOR FOR SELECT id FROM shared; FETCH 100 FROM ahead")?;
        wait_until_sampled(&mut client, first.pid)?;
        first.client.batch_execute("COMMIT")?;
        for _ in 0..8 {
            evict(&mut client, "shared")?;
            second
                .client
                .batch_execute("SELECT count(id) FROM (SELECT id FROM shared LIMIT 100) AS the_same")?;
        }
    }
    let (exact, inferred) = (report_of(&exact.interrupt()?)?, report_of(&inferred.interrupt()?)?);
    println!("{}", inferred["ledger"]);
    assert!(count(&inferred, "/ledger/inferred")? > 0, "no owner was inferred: {}", inferred["ledger"]);
    for pid in [first.pid, second.pid] {
        let blocks = |report: &Value| -> u64 {
            list(report, "backends").iter().filter(|backend| backend["pid"] == pid).map(blocks_of).sum()
        };
        let (shown, read) = (blocks(&inferred), blocks(&exact));
        println!("backend {pid}: {shown} blocks shown, {read} read");
        assert!(read > 0, "backend {pid} read nothing");
        assert!(shown <= read, "backend {pid} is shown with {shown} blocks, and read {read}");
    }
    Ok(())
}

/// Waits until a tracer's sample began after now, while a read of `pid` stands in the view.
fn wait_until_sampled(client: &mut Client, pid: u32) -> Result<()> {
    let pid = i32::try_from(pid)?;
    let stands = "SELECT FROM pg_aios WHERE pid = $1 AND operation = 'readv'";
    wait_until("a read stands in pg_aios", || {
        client.query(stands, &[&pid]).is_ok_and(|rows| !rows.is_empty())
    })?;
    let now: SystemTime = client.query_one("SELECT clock_timestamp()", &[])?.get(0);
    let sampled = "SELECT FROM pg_stat_activity
        WHERE application_name = 'pgiotrace' AND query LIKE '%pg_aios%' AND state = 'idle' AND query_start > $1";
    // Two tracers: each has its own samples.
    wait_until("both tracers have sampled", || {
        client.query(sampled, &[&now]).is_ok_and(|rows| rows.len() == 2)
    })
}
