//! Reports for the rules' tests: one backend with reads of one method, from one relation on one device.

use std::collections::BTreeMap;

use super::of;
use crate::model::{
    Backend, Bounds, ByExecutor, ByMethod, BySource, Depth, Device, Dist, FromDevice, IoSummary, IoWorker,
    Ledger, MethodTotals, Overhead, Relation, STAT_SCHEMA, Stages, StatReport, Target, Users, Window,
};

/// Names of the rules that hold, in the report's order.
pub fn rules(report: &StatReport) -> Vec<&'static str> {
    of(report).into_iter().map(|verdict| verdict.rule).collect()
}

/// Whether a rule holds.
pub fn has(report: &StatReport, rule: &str) -> bool {
    rules(report).contains(&rule)
}

/// `count` values of that many microseconds.
pub fn dist(count: u64, micros: f64) -> Dist {
    Dist {
        count,
        mean: micros,
        p50: micros,
        p90: micros,
        p99: micros,
        p999: micros,
        max: micros,
        sum: micros * count as f64,
    }
}

/// Every set of reads of a report.
fn each_io(report: &mut StatReport, change: impl Fn(&mut IoSummary)) {
    report.methods.iter_mut().for_each(|totals| change(&mut totals.io));
    report.backends.iter_mut().for_each(|backend| change(&mut backend.io));
    report.io_workers.iter_mut().for_each(|worker| change(&mut worker.io));
    report.relations.iter_mut().for_each(|relation| change(&mut relation.io));
}

/// As if not all requests had been seen.
pub fn forget_stages(report: &mut StatReport) {
    each_io(report, |io| {
        (io.by_source, io.readahead_hits) = (None, None);
        io.stages_us = Stages::default();
    });
}

/// As if not all waits had been seen.
pub fn forget_waits(report: &mut StatReport) {
    each_io(report, |io| {
        (io.exposed_us, io.hidden_us) = (None, None);
        io.bounds_us = Bounds::default();
    });
}

/// A report in the making.
pub struct Sample {
    method: &'static str,
    reads: u64,
    micros: f64,
    blocks: u64,
    block_queue: f64,
    device: f64,
    uncovered: f64,
    exposed: f64,
    hidden: f64,
    settings: BTreeMap<String, String>,
}

impl Sample {
    /// So many reads of a method, each of that many microseconds, all waited for, all from the page cache, none of them
    /// read ahead.
    pub fn of(method: &'static str, reads: u64, micros: f64) -> Self {
        let settings = [
            ("block_size", "8192"),
            ("effective_io_concurrency", "16"),
            ("io_combine_limit", "128kB"),
            ("shared_buffers", "128MB"),
        ];
        Self {
            method,
            reads,
            micros,
            blocks: 4,
            block_queue: 0.0,
            device: 0.0,
            uncovered: 0.0,
            exposed: 1.0,
            hidden: 0.0,
            settings: settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
        }
    }

    /// Shares of the reads' time; what is left is the copy's.
    pub fn stages(self, uncovered: f64, block_queue: f64, device: f64) -> Self {
        let uncovered = self.uncovered + uncovered;
        Self { block_queue, device, uncovered, ..self }
    }

    /// A share of the reads' time that is in no stage.
    pub fn uncovered(self, uncovered: f64) -> Self {
        Self { uncovered, ..self }
    }

    /// Exposed and hidden time, as shares of the sum of the reads' times.
    pub fn exposed(self, exposed: f64, hidden: f64) -> Self {
        Self { exposed, hidden, ..self }
    }

    /// Blocks of each read.
    pub fn blocks(self, blocks: u64) -> Self {
        Self { blocks, ..self }
    }

    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.insert(name.to_owned(), value.to_owned());
        self
    }

    fn io(&self) -> IoSummary {
        let reads = self.reads;
        let by = |method| if self.method == method { reads } else { 0 };
        let from_device = if self.device > 0.0 { reads } else { 0 };
        let of = |share: f64| (share > 0.0).then(|| dist(reads, self.micros * share));
        let all = self.micros * reads as f64;
        IoSummary {
            reads,
            bytes: reads * self.blocks * 8_192,
            blocks: reads * self.blocks,
            by_method: ByMethod { sync: by("sync"), worker: by("worker"), io_uring: by("io_uring") },
            by_executor: Some(ByExecutor {
                owner: by("sync") + by("io_uring"),
                io_worker: by("worker"),
                iou_wrk: 0,
            }),
            by_source: Some(BySource {
                cache: reads - from_device,
                device: from_device,
                mixed: 0,
                unknown: 0,
            }),
            readahead_hits: Some(0),
            queue_full_fallbacks: Some(0),
            latency_us: of(1.0),
            stages_us: Stages {
                cache: of(1.0 - self.uncovered - self.block_queue - self.device),
                block_queue: of(self.block_queue),
                device: of(self.device),
                ..Stages::default()
            },
            bounds_us: Bounds::default(),
            exposed_us: Some(all * self.exposed),
            hidden_us: Some(all * self.hidden),
        }
    }

    /// The report of a window that was twice as long as the reads of this backend, one after the other.
    pub fn report(self) -> StatReport {
        let io = self.io();
        let without_owner = IoSummary { exposed_us: None, hidden_us: None, ..io.clone() };
        let duration_s = self.micros * self.reads as f64 / 1e6 * 2.0;
        let io_workers = if self.method == "worker" { vec![io_worker(&without_owner)] } else { Vec::new() };
        StatReport {
            schema: STAT_SCHEMA,
            target: Target {
                postmaster_pid: 1,
                data_directory: "/data".to_owned(),
                server_version: "18.6".to_owned(),
                io_method: Some(self.method.to_owned()),
                cluster_name: None,
                settings: self.settings,
            },
            window: Window { start: String::new(), duration_s },
            ledger: Ledger { reads: self.reads, complete: true, ..Ledger::default() },
            filter: None,
            overhead: Overhead::default(),
            verdicts: Vec::new(),
            methods: vec![MethodTotals { method: self.method, io: without_owner.clone() }],
            backends: vec![backend(io)],
            ended_backends: Vec::new(),
            query_certainty: None,
            queries: Vec::new(),
            sessions: None,
            waits: None,
            io_workers,
            relations: vec![relation(without_owner)],
            devices: vec![device(self.reads, self.micros, self.device)],
            pg_stat_io: None,
            pg_stat_backend_io: None,
            pg_stat_database: None,
            notes: Vec::new(),
        }
    }
}

fn backend(io: IoSummary) -> Backend {
    let text = |text: &str| Some(text.to_owned());
    Backend {
        pid: 4_242,
        backend_type: text("client backend"),
        leader_pid: None,
        database: text("shop"),
        user: text("web"),
        application_name: text("psql"),
        io,
    }
}

fn io_worker(io: &IoSummary) -> IoWorker {
    IoWorker { pid: 4_110, worker: Some(0), busy_ratio: 0.4, owners: Vec::new(), io: io.clone() }
}

fn relation(io: IoSummary) -> Relation {
    let text = |text: &str| Some(text.to_owned());
    Relation {
        database: text("shop"),
        schema: text("public"),
        name: text("items"),
        fork: text("main"),
        relfilenode: Some(16_456),
        temporary: false,
        file: None,
        devices: Some(Vec::<FromDevice>::new()),
        io,
    }
}

/// Its requests were the server's.
fn device(requests: u64, micros: f64, share: f64) -> Device {
    Device {
        dev: "254:0".to_owned(),
        name: Some("vda".to_owned()),
        requests,
        bytes: requests * 8_192,
        block_queue_us: None,
        device_us: (share > 0.0).then(|| dist(requests, micros * share)),
        request_bytes: None,
        requeues: 0,
        depth: Depth { mean: share, max: 1 },
        users: Users {
            server_requests: requests,
            server_bytes: requests * 8_192,
            readahead_bytes: Some(0),
            ..Users::default()
        },
    }
}

/// More rules hold than a report names.
pub fn everything_at_once() -> StatReport {
    let mut report = Sample::of("io_uring", 1_000, 1_000.0)
        .stages(0.0, 0.0, 0.4)
        .blocks(2)
        .setting("io_combine_limit", "16kB")
        .report();
    let io = &mut report.methods[0].io;
    io.by_source = Some(BySource { cache: 900, device: 100, mixed: 0, unknown: 0 });
    let mut random = Sample::of("sync", 1_000, 9_000.0).stages(0.0, 0.0, 0.9).blocks(1).report();
    report.methods.append(&mut random.methods);
    report.backends.append(&mut random.backends);
    report.relations.append(&mut random.relations);
    let mut queued = Sample::of("worker", 1_000, 1_000.0).stages(0.0, 0.0, 0.4).report();
    queued.backends[0].io.bounds_us.pg_queue_at_least = Some(dist(1_000, 3_000.0));
    queued.io_workers[0].busy_ratio = 0.05;
    report.methods.append(&mut queued.methods);
    report.backends.append(&mut queued.backends);
    report.io_workers = queued.io_workers;
    report.window.duration_s = 20.0;
    let device = &mut report.devices[0];
    device.device_us = Some(dist(1_000, 8_000.0));
    device.depth.mean = 0.8;
    device.users.other_bytes = device.bytes / 4;
    report
}
