//! Reports for the snapshot tests of all forms.

use std::collections::BTreeMap;

use crate::model::{
    AwaitedOwner, Backend, BlocksDifference, Bounds, ByExecutor, ByMethod, BySource, Check, ClaimedBlocks,
    ClaimedOperations, ClaimedReads, Depth, Device, Dist, DoctorReport, Doing, DoingCounts, EndedBackends,
    FromDevice, IoSummary, IoWorker, Ledger, MethodTotals, Overhead, OwnerShare, PgAiosLedger,
    PgStatBackendIo, PgStatBackendIoRow, PgStatDatabase, PgStatDatabaseRow, PgStatIo, PgStatIoContext,
    PgStatIoRow, Query, QueryCertainty, QueryKind, ReadsDifference, Relation, RequestSizes, STAT_SCHEMA,
    Session, Severity, Stages, StatReport, Status, Target, TracedReads, Users, Verdict, Wait, Window,
};

/// Three methods, wide characters, a parallel worker, a temporary relation, names that are not known, a file
/// that is no relation.
pub fn full() -> StatReport {
    StatReport {
        ledger: Ledger {
            completed: 5_151,
            short: 1,
            failed: 1,
            in_flight: 2,
            begun: 5_154,
            own: 10,
            pg_aios: Some(PgAiosLedger { rows: 512, confirmed: 509, contradicted: 0, unmatched: 3 }),
            ..balanced()
        },
        methods: vec![
            MethodTotals { method: "io_uring", io: io(method(0, 0, 2_130), 16, 4_560.0) },
            MethodTotals { method: "worker", io: io(method(0, 3_000, 0), 16, 123.4) },
            MethodTotals { method: "sync", io: cached(io(method(4_022, 0, 0), 1, 12.5)) },
        ],
        backends: backends(),
        ended_backends: vec![EndedBackends {
            processes: 1_200,
            backend_type: Some("client backend".to_owned()),
            database: Some("shop".to_owned()),
            user: Some("web".to_owned()),
            application_name: None,
            io: io(method(4_000, 0, 0), 1, 12.5),
        }],
        query_certainty: Some(QueryCertainty { certain: 5_000, probable: 100, unknown: 21, none: 30 }),
        queries: queries(),
        sessions: Some(sessions()),
        waits: Some(waits()),
        io_workers: io_workers(),
        relations: relations(),
        devices: devices(),
        pg_stat_io: Some(pg_stat_io()),
        pg_stat_backend_io: Some(pg_stat_backend_io()),
        pg_stat_database: Some(pg_stat_database()),
        verdicts: verdicts(),
        notes: vec!["the names of 1 relation are missing: its database could not be connected to".to_owned()],
        ..empty()
    }
}

/// A window in which nothing happened, on an older server, without a connection.
pub fn empty() -> StatReport {
    StatReport {
        schema: STAT_SCHEMA,
        target: Target {
            postmaster_pid: 4_100,
            data_directory: "/var/lib/postgresql/18/main".to_owned(),
            server_version: "18.1".to_owned(),
            io_method: Some("worker".to_owned()),
            cluster_name: None,
            settings: BTreeMap::new(),
        },
        window: Window { start: "2026-01-31T10:00:00.123456Z".to_owned(), duration_s: 10.004 },
        ledger: Ledger { complete: true, ..Ledger::default() },
        filter: None,
        overhead: Overhead {
            bpf_ns_per_read: Some(1_234.5),
            bpf_cpu_s: Some(0.006_4),
            tracer_cpu_s: 0.12,
            tracer_max_rss_bytes: 24 << 20,
            attach_ms: 310.0,
            sampler: None,
            pg_probes: None,
        },
        verdicts: Vec::new(),
        methods: Vec::new(),
        backends: Vec::new(),
        ended_backends: Vec::new(),
        query_certainty: Some(QueryCertainty::default()),
        queries: Vec::new(),
        sessions: None,
        waits: None,
        io_workers: Vec::new(),
        relations: Vec::new(),
        devices: Vec::new(),
        pg_stat_io: None,
        pg_stat_backend_io: None,
        pg_stat_database: None,
        notes: Vec::new(),
    }
}

/// Reads were lost, owners are uncertain, `pg_aios` contradicts, the kernel's BPF statistics are off.
pub fn incomplete() -> StatReport {
    StatReport {
        target: Target { server_version: "17".to_owned(), io_method: None, ..empty().target },
        ledger: Ledger {
            begun: 5_275,
            lost: 123,
            exact: 5_001,
            inferred: 100,
            ambiguous: 40,
            unattributed: 11,
            beyond_range: 1,
            complete: false,
            pg_aios: Some(PgAiosLedger { rows: 20, confirmed: 18, contradicted: 1, unmatched: 1 }),
            ..balanced()
        },
        overhead: Overhead { bpf_ns_per_read: None, bpf_cpu_s: None, ..empty().overhead },
        methods: vec![MethodTotals { method: "sync", io: counted(io(method(10, 0, 0), 1, 0.87)) }],
        backends: vec![unknown_backend()],
        ..empty()
    }
}

/// One check of each status.
pub fn doctor() -> DoctorReport {
    let check = |area, name: &str, status, detail: &str| Check {
        area,
        name: name.to_owned(),
        status,
        detail: detail.to_owned(),
        cost: None,
        mend: None,
        required: false,
    };
    DoctorReport {
        schema: "pgiotrace.doctor/1",
        checks: vec![
            check("kernel", "release", Status::Ok, "6.12.0"),
            Check {
                cost: Some("no program can be attached".to_owned()),
                mend: Some("boot a kernel with CONFIG_DEBUG_INFO_BTF=y".to_owned()),
                required: true,
                ..check("kernel", "BTF", Status::Missing, "/sys/kernel/btf/vmlinux is not there")
            },
            check("server", "version", Status::Ok, "18.1"),
            Check {
                cost: Some("names of relations are missing".to_owned()),
                mend: Some("GRANT pg_monitor TO dba".to_owned()),
                ..check("server", "rights", Status::Broken, "dba is no member of pg_monitor")
            },
        ],
        can_trace: false,
    }
}

fn balanced() -> Ledger {
    Ledger {
        reads: 5_152,
        bytes: 640 << 20,
        blocks: 81_968,
        exact: 5_152,
        begun: 5_152,
        completed: 5_152,
        complete: true,
        ..Ledger::default()
    }
}

fn dist(count: u64, p50: f64) -> Dist {
    let mean = p50 * 1.25;
    Dist {
        count,
        mean,
        p50,
        p90: p50 * 2.0,
        p99: p50 * 4.0,
        p999: p50 * 8.0,
        max: p50 * 100.0,
        sum: mean * count as f64,
    }
}

fn io(by_method: ByMethod, blocks_per_read: u64, p50: f64) -> IoSummary {
    let ByMethod { sync, worker, io_uring } = by_method;
    let reads = sync + worker + io_uring;
    IoSummary {
        reads,
        bytes: reads * blocks_per_read * 8_192,
        blocks: reads * blocks_per_read,
        by_method,
        by_executor: Some(ByExecutor { owner: sync + io_uring, io_worker: worker, iou_wrk: 0 }),
        by_source: Some(BySource {
            cache: reads - reads / 4 - reads / 20,
            device: reads / 4,
            mixed: reads / 20,
            unknown: 0,
        }),
        readahead_hits: Some(reads / 2),
        queue_full_fallbacks: Some(worker / 50),
        latency_us: (reads > 0).then(|| dist(reads, p50)),
        stages_us: stages(reads, p50),
        bounds_us: Bounds::default(),
        exposed_us: None,
        hidden_us: None,
    }
}

/// Of a quarter of the reads, the time with the device; a part of the time is covered by no stage.
fn stages(reads: u64, p50: f64) -> Stages {
    let of = |reads: u64, share: f64| (reads > 0).then(|| dist(reads, p50 * share));
    Stages {
        pg_queue: None,
        submit: of(reads / 4, 0.12),
        cache: of(reads, 0.06),
        block_queue: of(reads / 4, 0.48),
        device: of(reads / 4, 2.84),
        wakeup: of(reads / 4, 0.08),
    }
}

/// Reads that no device had to serve.
fn cached(io: IoSummary) -> IoSummary {
    IoSummary {
        by_source: Some(BySource { cache: io.reads, device: 0, mixed: 0, unknown: 0 }),
        stages_us: Stages { cache: io.latency_us, ..Stages::default() },
        ..io
    }
}

/// Reads of which only the kernel's counts are left.
fn counted(io: IoSummary) -> IoSummary {
    IoSummary {
        by_executor: None,
        by_source: None,
        readahead_hits: None,
        queue_full_fallbacks: None,
        stages_us: Stages::default(),
        ..io
    }
}

/// Reads whose owner's waits are known.
fn waited_for(io: IoSummary) -> IoSummary {
    let total = io.latency_us.map_or(0.0, |dist| dist.sum);
    IoSummary {
        bounds_us: Bounds {
            pg_queue_at_least: Some(dist(120, 12.3)),
            owner_wakeup_at_most: Some(dist(2_000, 3.4)),
        },
        exposed_us: Some(total * 0.8),
        hidden_us: Some(total * 0.1),
        ..io
    }
}

fn method(sync: u64, worker: u64, io_uring: u64) -> ByMethod {
    ByMethod { sync, worker, io_uring }
}

fn backends() -> Vec<Backend> {
    let text = |text: &str| Some(text.to_owned());
    let leader = Backend {
        pid: 4_242,
        backend_type: text("client backend"),
        leader_pid: None,
        database: text("データ"),
        user: text("postgres"),
        application_name: text("psql"),
        io: waited_for(io(method(12, 3_000, 0), 16, 123.4)),
    };
    vec![
        Backend {
            pid: 4_243,
            backend_type: text("parallel worker"),
            leader_pid: Some(4_242),
            io: IoSummary {
                exposed_us: Some(9.1e6),
                hidden_us: Some(0.0),
                ..io(method(0, 0, 2_130), 16, 4_560.0)
            },
            ..leader.clone()
        },
        leader.clone(),
        Backend {
            pid: 4_250,
            application_name: text("a report with a name that goes on and on"),
            io: cached(io(method(500, 0, 0), 1, 12.5)),
            ..leader
        },
        unknown_backend(),
    ]
}

/// A backend whose names nobody could tell, and of whose reads nothing but their latency is known.
fn unknown_backend() -> Backend {
    Backend {
        pid: 51,
        backend_type: None,
        leader_pid: None,
        database: None,
        user: None,
        application_name: None,
        io: counted(io(method(10, 0, 0), 1, 0.87)),
    }
}

fn io_workers() -> Vec<IoWorker> {
    let share = |pid, reads| OwnerShare { pid, reads, bytes: reads * 131_072 };
    vec![
        IoWorker {
            pid: 4_110,
            worker: Some(0),
            busy_ratio: 0.982,
            owners: vec![share(Some(4_242), 2_990), share(None, 10)],
            io: io(method(0, 3_000, 0), 16, 120.0),
        },
        IoWorker {
            pid: 4_111,
            worker: None,
            busy_ratio: 0.0,
            owners: vec![],
            io: io(method(0, 0, 0), 16, 0.0),
        },
    ]
}

fn relations() -> Vec<Relation> {
    let text = |text: &str| Some(text.to_owned());
    let accounts = Relation {
        database: text("データ"),
        schema: text("public"),
        name: text("pgbench_accounts"),
        fork: text("main"),
        relfilenode: Some(16_456),
        temporary: false,
        file: None,
        devices: Some(vec![
            from_device("254:0", Some("vda"), 410 << 20, 90 << 20),
            from_device("7:1", None, 180 << 20, 20 << 20),
        ]),
        io: io(method(12, 3_000, 2_000), 16, 200.0),
    };
    vec![
        accounts.clone(),
        Relation {
            schema: text("pg_temp_3"),
            name: text("表"),
            relfilenode: Some(16_999),
            temporary: true,
            devices: Some(vec![from_device("254:0", Some("vda"), 12 << 20, 0)]),
            io: io(method(0, 0, 100), 16, 150.0),
            ..accounts.clone()
        },
        Relation {
            database: None,
            schema: None,
            name: None,
            relfilenode: Some(1_262),
            devices: None,
            io: io(method(0, 0, 30), 1, 90.0),
            ..accounts.clone()
        },
        Relation {
            database: None,
            schema: None,
            name: None,
            fork: None,
            relfilenode: None,
            file: text("pg_wal"),
            devices: Some(Vec::new()),
            io: cached(IoSummary { blocks: 0, ..io(method(10, 0, 0), 1, 0.87) }),
            ..accounts
        },
    ]
}

/// One of each severity.
fn verdicts() -> Vec<Verdict> {
    let verdict = |rule, severity, evidence: &str, advice: &str| Verdict {
        rule,
        severity,
        evidence: evidence.to_owned(),
        advice: advice.to_owned(),
    };
    vec![
        verdict(
            "throttled",
            Severity::Problem,
            "93 % of the reads' time, 11.7 s of 12.6 s, was in the block layer's queue, before any device saw them; the \
             device then needed 412 ms.",
            "Look for a limit to the server's reads: its cgroup's io.max or blkio.throttle.",
        ),
        verdict("small-reads", Severity::Warn, "3,000 reads had 8.00 KiB each.", "Set io_combine_limit."),
        verdict(
            "served-from-page-cache",
            Severity::Info,
            "71 % came from the \"page cache\".",
            "Do not worry.",
        ),
    ]
}

fn from_device(dev: &str, name: Option<&str>, asked_bytes: u64, readahead_bytes: u64) -> FromDevice {
    FromDevice {
        dev: dev.to_owned(),
        name: name.map(str::to_owned),
        requests: 280,
        asked_bytes,
        readahead_bytes,
    }
}

fn devices() -> Vec<Device> {
    vec![
        Device {
            dev: "254:0".to_owned(),
            name: Some("vda".to_owned()),
            requests: 2_600,
            bytes: 600 << 20,
            block_queue_us: Some(dist(2_600, 2.5)),
            device_us: Some(dist(2_600, 98.7)),
            request_bytes: Some(RequestSizes {
                mean: 242_000.0,
                p50: 131_072.0,
                p99: 1_048_576.0,
                max: 1_048_576.0,
            }),
            requeues: 4,
            depth: Depth { mean: 1.7, max: 32 },
            users: Users {
                server_requests: 2_400,
                server_bytes: 380 << 20,
                readahead_bytes: Some(90 << 20),
                unknown_requests: 0,
                unknown_bytes: 0,
                other_requests: 200,
                other_bytes: 220 << 20,
            },
        },
        Device {
            dev: "7:1".to_owned(),
            name: None,
            requests: 3,
            bytes: 12_288,
            block_queue_us: None,
            device_us: Some(dist(3, 1_500.0)),
            request_bytes: None,
            requeues: 0,
            depth: Depth { mean: 0.0, max: 1 },
            users: Users { other_requests: 3, other_bytes: 12_288, ..Users::default() },
        },
    ]
}

fn queries() -> Vec<Query> {
    let query = Query {
        kind: QueryKind::Query,
        query_id: Some("-1234567890123456789".to_owned()),
        query: Some(
            "SELECT count(*)\n  FROM データ WHERE name = $1 AND created_at > now() - interval '1 day'"
                .to_owned(),
        ),
        database: Some("shop".to_owned()),
        backend_type: Some("client backend".to_owned()),
        executions: 1_200,
        certain: 5_000,
        probable: 100,
        io: IoSummary {
            exposed_us: Some(9_000.0),
            hidden_us: Some(1_000.0),
            ..io(method(100, 5_000, 0), 16, 123.4)
        },
    };
    let none = |kind, backend_type: &str| Query {
        kind,
        query_id: None,
        query: None,
        database: None,
        backend_type: Some(backend_type.to_owned()),
        executions: 0,
        certain: 0,
        probable: 0,
        io: io(method(10, 0, 0), 1, 12.5),
    };
    let unknown = Query { backend_type: None, ..none(QueryKind::Unknown, "") };
    vec![query, none(QueryKind::None, "client backend"), none(QueryKind::None, "checkpointer"), unknown]
}

fn sessions() -> Vec<Session> {
    vec![Session {
        pid: 4_242,
        backend_type: Some("client backend".to_owned()),
        database: Some("shop".to_owned()),
        user: Some("web".to_owned()),
        client: Some("10.0.0.7".to_owned()),
        application_name: None,
        samples: 200,
        busy_ratio: 0.75,
        executions: 1_200,
        query_id: Some("-1234567890123456789".to_owned()),
        query: Some("SELECT count(*) FROM データ".to_owned()),
        wait_events: [("CPU", 100), ("IO:AioIoCompletion", 45), ("Lock:relation", 5)]
            .map(|(event, samples)| (event.to_owned(), samples))
            .into(),
        blocked_by: vec![4_243, 4_244],
    }]
}

fn waits() -> Vec<Wait> {
    vec![Wait {
        pid: 4_242,
        backend_type: Some("client backend".to_owned()),
        query_id: None,
        query: Some("SELECT count(*) FROM データ".to_owned()),
        event: "IO:AioIoCompletion".to_owned(),
        samples: 45,
        doing: DoingCounts([(Doing::PgQueue, 20), (Doing::Device, 24), (Doing::NotKnown, 1)].into()),
        of_others: vec![AwaitedOwner { pid: 4_243, samples: 3 }],
    }]
}

fn traced(reads: u64, blocks_per_read: u64, p50: f64) -> TracedReads {
    let blocks = reads * blocks_per_read;
    TracedReads { reads, bytes: blocks * 8_192, blocks, latency_us: (reads > 0).then(|| dist(reads, p50)) }
}

/// Clients that have not flushed, a type that is as it was traced, reads of no known type.
fn pg_stat_io() -> PgStatIo {
    let of = |claimed: u64, traced: TracedReads, reason: Option<&str>| {
        let reads = claimed.cast_signed() - traced.reads.cast_signed();
        let claimed = ClaimedReads {
            reads: claimed,
            bytes: claimed * 131_072,
            read_time_ms: Some(claimed as f64 * 0.02),
        };
        PgStatIoRow {
            backend_type: Some("client backend".to_owned()),
            object: "relation".to_owned(),
            claimed: Some(claimed),
            traced,
            difference: Some(ReadsDifference { reads: Some(reads), bytes: reads * 131_072 }),
            reason: reason.map(str::to_owned),
        }
    };
    let operations = |count: u64, mean_us: Option<f64>| {
        let time_ms = mean_us.map(|mean_us| mean_us * count as f64 / 1e3);
        Some(ClaimedOperations { count, bytes: Some(count * 8_192), time_ms, mean_us })
    };
    PgStatIo {
        reads_are_blocks: false,
        rows: vec![
            of(
                3_000,
                traced(5_130, 16, 123.4),
                Some("not flushed yet: 1 backend had 34080 blocks in no statistics"),
            ),
            PgStatIoRow {
                backend_type: Some("background worker".to_owned()),
                ..of(2_130, traced(2_130, 16, 4_560.0), None)
            },
            PgStatIoRow {
                backend_type: None,
                claimed: None,
                difference: None,
                ..of(0, traced(10, 1, 0.87), Some("the types of these reads' owners are not known"))
            },
        ],
        contexts: vec![
            PgStatIoContext {
                backend_type: "client backend".to_owned(),
                object: "relation".to_owned(),
                context: "bulkread".to_owned(),
                reads: operations(3_000, Some(20.0)),
                writes: operations(0, None),
                evictions: Some(2_900),
                hits: Some(12),
                reuses: Some(40_000),
                ..PgStatIoContext::default()
            },
            PgStatIoContext {
                backend_type: "checkpointer".to_owned(),
                object: "relation".to_owned(),
                context: "normal".to_owned(),
                writes: operations(500, Some(15.0)),
                writebacks: operations(500, Some(1.5)),
                fsyncs: operations(3, Some(12_000.0)),
                ..PgStatIoContext::default()
            },
        ],
    }
}

fn pg_stat_backend_io() -> PgStatBackendIo {
    let PgStatIoRow { object, claimed, traced, difference, reason, .. } = pg_stat_io().rows[0].clone();
    let backend_type = "client backend".to_owned();
    let row = PgStatBackendIoRow { pid: 4_242, backend_type, object, claimed, traced, difference, reason };
    PgStatBackendIo { rows: vec![row], ended: 1_200 }
}

fn pg_stat_database() -> PgStatDatabase {
    let row = |oid, database: Option<&str>, claimed: u64, traced: TracedReads| PgStatDatabaseRow {
        oid,
        database: database.map(str::to_owned),
        claimed: Some(ClaimedBlocks { blocks: claimed, read_time_ms: None }),
        difference: Some(BlocksDifference { blocks: claimed.cast_signed() - traced.blocks.cast_signed() }),
        traced,
        reason: None,
    };
    PgStatDatabase {
        rows: vec![
            row(16_384, Some("データ"), 82_080, traced(5_130, 16, 123.4)),
            row(0, None, 32, traced(30, 1, 90.0)),
        ],
    }
}
