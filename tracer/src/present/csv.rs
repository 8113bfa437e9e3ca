//! The CSV form of a `stat` report, for spreadsheets and `COPY`.
//!
//! One header line, then one row per (section, entity): `method`, `backend`, `ended_backends`, `io_worker`, `relation`,
//! `relation_device` (what a relation had from one device), `device`, `query`, `session`, `wait`, those of PostgreSQL's statistics, `verdict`. All rows have all columns; a cell is empty where the
//! section has no such thing or where it was not measured. Cells are quoted as RFC 4180 says; control characters in names
//! are escaped, so that a row is one line and a terminal is safe. Of a device, also of a relation's, `reads` and `bytes`
//! are those of its requests, and `latency_*` is the time from issue to completion. The columns of a stage are over the
//! reads that had it, whose number is its `_count`; of a device, `block_queue_*` is over its requests. What PostgreSQL's own
//! statistics say is in sections of its own: see `csv/pg_stats.rs`.

mod pg_stats;

use std::{
    borrow::Cow,
    io::{self, Write},
};

use ::csv::Writer;

use super::printable::printable;
use crate::model::{
    Backend, Bounds, ByMethod, BySource, Device, Dist, Doing, DoingCounts, EndedBackends, FromDevice,
    IoSummary, IoWorker, MethodTotals, Query, Relation, RequestSizes, Session, Stages, StatReport, Users,
    Verdict, Wait,
};

/// Writes all rows.
///
/// # Errors
///
/// When `out` cannot be written to.
pub fn write_stat(out: &mut dyn Write, report: &StatReport) -> io::Result<()> {
    let mut writer = Writer::from_writer(out);
    writer.write_record(Row::default().cells().iter().map(|(column, _)| column.as_bytes()))?;
    let rows = (report.methods.iter().map(method))
        .chain(report.backends.iter().map(backend))
        .chain(report.ended_backends.iter().map(ended_backends))
        .chain(report.io_workers.iter().map(io_worker))
        .chain(report.relations.iter().map(relation))
        .chain(report.relations.iter().flat_map(relation_devices))
        .chain(report.devices.iter().map(device))
        .chain(report.queries.iter().map(query))
        .chain(report.sessions.iter().flatten().map(session))
        .chain(report.waits.iter().flatten().map(wait))
        .chain(pg_stats::rows(report))
        .chain(report.verdicts.iter().map(verdict));
    for row in rows {
        writer.write_record(row.cells().iter().map(|(_, cell)| cell))?;
    }
    writer.flush()
}

/// One row; what its section does not have stays `None`.
#[derive(Default)]
struct Row<'a> {
    section: &'static str,
    pid: Option<u32>,
    processes: Option<u64>,
    backend_type: Option<&'a str>,
    leader_pid: Option<u32>,
    database: Option<&'a str>,
    user: Option<&'a str>,
    application_name: Option<&'a str>,
    worker: Option<u32>,
    busy_ratio: Option<f64>,
    schema: Option<&'a str>,
    name: Option<&'a str>,
    fork: Option<&'a str>,
    relfilenode: Option<u32>,
    temporary: Option<bool>,
    file: Option<&'a str>,
    device: Option<&'a str>,
    reads: Option<u64>,
    bytes: Option<u64>,
    blocks: Option<u64>,
    by_method: Option<ByMethod>,
    latency_us: Option<Dist>,
    block_queue_us: Option<Dist>,
    method: Option<&'static str>,
    by_source: Option<BySource>,
    readahead_hits: Option<u64>,
    queue_full_fallbacks: Option<u64>,
    exposed_us: Option<f64>,
    hidden_us: Option<f64>,
    /// But for the block queue, which has a place of its own.
    stages_us: Stages,
    bounds_us: Bounds,
    request_bytes: Option<RequestSizes>,
    requeues: Option<u64>,
    depth_mean: Option<f64>,
    depth_max: Option<u64>,
    users: Option<Users>,
    readahead_bytes: Option<u64>,
    query_id: Option<&'a str>,
    query: Option<&'a str>,
    client: Option<&'a str>,
    executions: Option<u64>,
    certain: Option<u64>,
    probable: Option<u64>,
    event: Option<&'a str>,
    samples: Option<u64>,
    doing: Option<&'a DoingCounts>,
    claims: pg_stats::Claims<'a>,
    verdict: Option<&'a Verdict>,
}

/// A column and a row's cell in it.
type Cell = (Cow<'static, str>, String);

impl Row<'_> {
    /// A row of `section` with the figures of `io`.
    fn of(section: &'static str, io: &IoSummary) -> Self {
        Self {
            section,
            reads: Some(io.reads),
            bytes: Some(io.bytes),
            blocks: Some(io.blocks),
            by_method: Some(io.by_method),
            latency_us: io.latency_us,
            block_queue_us: io.stages_us.block_queue,
            by_source: io.by_source,
            readahead_hits: io.readahead_hits,
            queue_full_fallbacks: io.queue_full_fallbacks,
            exposed_us: io.exposed_us,
            hidden_us: io.hidden_us,
            stages_us: io.stages_us.clone(),
            bounds_us: io.bounds_us.clone(),
            ..Self::default()
        }
    }

    /// All columns with their cells, in the order of the file. New ones come last, so that the old ones keep their places.
    fn cells(&self) -> Vec<Cell> {
        let mut cells = self.names();
        cells.extend(self.counts());
        cells.extend(dist("latency", self.latency_us));
        cells.extend(dist("block_queue", self.block_queue_us));
        cells.extend(self.sources_and_waits());
        let Stages { pg_queue, submit, cache, block_queue: _, device, wakeup } = self.stages_us;
        let Bounds { pg_queue_at_least, owner_wakeup_at_most } = self.bounds_us;
        cells.push(count("block_queue", self.block_queue_us));
        let dists = [
            ("pg_queue", pg_queue),
            ("submit", submit),
            ("cache", cache),
            ("device", device),
            ("wakeup", wakeup),
            ("pg_queue_at_least", pg_queue_at_least),
            ("owner_wakeup_at_most", owner_wakeup_at_most),
        ];
        for (name, figures) in dists {
            cells.push(count(name, figures));
            cells.extend(dist(name, figures));
        }
        cells.extend(self.requests());
        cells.extend(self.activity());
        cells.extend(self.claims.cells());
        cells.extend(self.verdict());
        cells
    }

    /// What is known from PostgreSQL's side.
    fn activity(&self) -> Vec<Cell> {
        let text = |text: Option<&str>| text.map(|text| printable(text).into_owned()).unwrap_or_default();
        let mut cells: Vec<Cell> = vec![
            ("query_id".into(), text(self.query_id)),
            ("query".into(), text(self.query)),
            ("client".into(), text(self.client)),
            ("executions".into(), cell(self.executions)),
            ("certain".into(), cell(self.certain)),
            ("probable".into(), cell(self.probable)),
            ("event".into(), text(self.event)),
            ("samples".into(), cell(self.samples)),
        ];
        let doing = |doing: Doing| cell(self.doing.map(|counts| counts.of(doing)));
        cells.extend(Doing::ALL.map(|kind| (Cow::Owned(format!("doing_{}", kind.name())), doing(kind))));
        cells
    }

    /// Who or what the row is about.
    fn names(&self) -> Vec<Cell> {
        named([
            ("section", self.section.to_owned()),
            ("pid", cell(self.pid)),
            ("backend_type", cell(self.backend_type.map(printable))),
            ("leader_pid", cell(self.leader_pid)),
            ("database", cell(self.database.map(printable))),
            ("user", cell(self.user.map(printable))),
            ("application_name", cell(self.application_name.map(printable))),
            ("processes", cell(self.processes)),
            ("worker", cell(self.worker)),
            ("busy_ratio", cell(self.busy_ratio)),
            ("schema", cell(self.schema.map(printable))),
            ("name", cell(self.name.map(printable))),
            ("fork", cell(self.fork.map(printable))),
            ("relfilenode", cell(self.relfilenode)),
            ("temporary", cell(self.temporary)),
            ("file", cell(self.file.map(printable))),
            ("device", cell(self.device.map(printable))),
        ])
    }

    fn counts(&self) -> Vec<Cell> {
        let method = self.by_method;
        named([
            ("reads", cell(self.reads)),
            ("bytes", cell(self.bytes)),
            ("blocks", cell(self.blocks)),
            ("reads_sync", cell(method.map(|method| method.sync))),
            ("reads_worker", cell(method.map(|method| method.worker))),
            ("reads_io_uring", cell(method.map(|method| method.io_uring))),
        ])
    }

    fn sources_and_waits(&self) -> Vec<Cell> {
        let source = self.by_source;
        named([
            ("method", cell(self.method)),
            ("reads_cache", cell(source.map(|source| source.cache))),
            ("reads_device", cell(source.map(|source| source.device))),
            ("reads_mixed", cell(source.map(|source| source.mixed))),
            ("readahead_hits", cell(self.readahead_hits)),
            ("queue_full_fallbacks", cell(self.queue_full_fallbacks)),
            ("exposed_us", cell(self.exposed_us.map(thousandths))),
            ("hidden_us", cell(self.hidden_us.map(thousandths))),
        ])
    }

    /// Of a device: its requests.
    fn requests(&self) -> Vec<Cell> {
        let (sizes, users) = (self.request_bytes, self.users);
        named([
            ("request_bytes_mean", cell(sizes.map(|sizes| thousandths(sizes.mean)))),
            ("request_bytes_p50", cell(sizes.map(|sizes| sizes.p50))),
            ("request_bytes_p99", cell(sizes.map(|sizes| sizes.p99))),
            ("request_bytes_max", cell(sizes.map(|sizes| sizes.max))),
            ("requeues", cell(self.requeues)),
            ("depth_mean", cell(self.depth_mean.map(thousandths))),
            ("depth_max", cell(self.depth_max)),
            ("server_requests", cell(users.map(|users| users.server_requests))),
            ("server_bytes", cell(users.map(|users| users.server_bytes))),
            ("readahead_bytes", cell(self.readahead_bytes)),
            ("unknown_requests", cell(users.map(|users| users.unknown_requests))),
            ("unknown_bytes", cell(users.map(|users| users.unknown_bytes))),
            ("other_requests", cell(users.map(|users| users.other_requests))),
            ("other_bytes", cell(users.map(|users| users.other_bytes))),
        ])
    }

    fn verdict(&self) -> Vec<Cell> {
        let text = |of: fn(&Verdict) -> &str| cell(self.verdict.map(of).map(printable));
        named([
            ("rule", text(|verdict| verdict.rule)),
            ("severity", text(|verdict| verdict.severity.name())),
            ("evidence", text(|verdict| &verdict.evidence)),
            ("advice", text(|verdict| &verdict.advice)),
        ])
    }
}

fn named<const N: usize>(cells: [(&'static str, String); N]) -> Vec<Cell> {
    cells.into_iter().map(|(column, cell)| (Cow::Borrowed(column), cell)).collect()
}

/// How many a distribution is over.
fn count(name: &str, dist: Option<Dist>) -> Cell {
    (Cow::Owned(format!("{name}_count")), cell(dist.map(|dist| dist.count)))
}

/// The figures of a distribution of microseconds, but for its count.
fn dist(name: &str, dist: Option<Dist>) -> Vec<Cell> {
    let figures = dist.map(|dist| {
        let Dist { count: _, mean, p50, p90, p99, p999, max, sum } = dist;
        [mean, p50, p90, p99, p999, max, sum]
    });
    let columns = ["mean", "p50", "p90", "p99", "p999", "max", "sum"].into_iter().enumerate();
    let named = columns.map(|(index, figure)| {
        let micros = figures.map(|figures| thousandths(figures[index]));
        (Cow::Owned(format!("{name}_{figure}_us")), cell(micros))
    });
    named.collect()
}

fn thousandths(value: f64) -> String {
    format!("{value:.3}")
}

/// A value, or an empty cell where there is none.
fn cell<T: ToString>(value: Option<T>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

fn method(totals: &MethodTotals) -> Row<'_> {
    Row { method: Some(totals.method), ..Row::of("method", &totals.io) }
}

fn backend(backend: &Backend) -> Row<'_> {
    Row {
        pid: Some(backend.pid),
        backend_type: backend.backend_type.as_deref(),
        leader_pid: backend.leader_pid,
        database: backend.database.as_deref(),
        user: backend.user.as_deref(),
        application_name: backend.application_name.as_deref(),
        ..Row::of("backend", &backend.io)
    }
}

fn ended_backends(ended: &EndedBackends) -> Row<'_> {
    Row {
        processes: Some(ended.processes),
        backend_type: ended.backend_type.as_deref(),
        database: ended.database.as_deref(),
        user: ended.user.as_deref(),
        application_name: ended.application_name.as_deref(),
        ..Row::of("ended_backends", &ended.io)
    }
}

fn io_worker(worker: &IoWorker) -> Row<'_> {
    Row {
        pid: Some(worker.pid),
        worker: worker.worker,
        busy_ratio: Some(worker.busy_ratio),
        ..Row::of("io_worker", &worker.io)
    }
}

fn relation(relation: &Relation) -> Row<'_> {
    let is_relation = relation.file.is_none();
    Row {
        database: relation.database.as_deref(),
        schema: relation.schema.as_deref(),
        name: relation.name.as_deref(),
        fork: relation.fork.as_deref(),
        relfilenode: relation.relfilenode,
        temporary: is_relation.then_some(relation.temporary),
        file: relation.file.as_deref(),
        blocks: is_relation.then_some(relation.io.blocks),
        ..Row::of("relation", &relation.io)
    }
}

/// One row a device that the relation came from.
fn relation_devices(of: &Relation) -> impl Iterator<Item = Row<'_>> {
    let devices = of.devices.iter().flatten();
    devices.map(|from| {
        let FromDevice { dev, name: _, requests, asked_bytes, readahead_bytes } = from;
        let Row { database, schema, name, fork, relfilenode, temporary, file, .. } = relation(of);
        Row {
            section: "relation_device",
            database,
            schema,
            name,
            fork,
            relfilenode,
            temporary,
            file,
            device: Some(dev),
            reads: Some(*requests),
            bytes: Some(asked_bytes + readahead_bytes),
            readahead_bytes: Some(*readahead_bytes),
            ..Row::default()
        }
    })
}

fn query(query: &Query) -> Row<'_> {
    Row {
        database: query.database.as_deref(),
        backend_type: query.backend_type.as_deref(),
        query_id: query.query_id.as_deref(),
        query: query.query.as_deref(),
        executions: Some(query.executions),
        certain: Some(query.certain),
        probable: Some(query.probable),
        ..Row::of("query", &query.io)
    }
}

fn session(session: &Session) -> Row<'_> {
    Row {
        section: "session",
        pid: Some(session.pid),
        backend_type: session.backend_type.as_deref(),
        database: session.database.as_deref(),
        user: session.user.as_deref(),
        application_name: session.application_name.as_deref(),
        busy_ratio: Some(session.busy_ratio),
        query_id: session.query_id.as_deref(),
        query: session.query.as_deref(),
        client: session.client.as_deref(),
        executions: Some(session.executions),
        samples: Some(session.samples),
        ..Row::default()
    }
}

fn wait(wait: &Wait) -> Row<'_> {
    Row {
        section: "wait",
        pid: Some(wait.pid),
        backend_type: wait.backend_type.as_deref(),
        query_id: wait.query_id.as_deref(),
        query: wait.query.as_deref(),
        event: Some(&wait.event),
        samples: Some(wait.samples),
        doing: Some(&wait.doing),
        ..Row::default()
    }
}

fn device(device: &Device) -> Row<'_> {
    Row {
        section: "device",
        device: Some(&device.dev),
        name: device.name.as_deref(),
        reads: Some(device.requests),
        bytes: Some(device.bytes),
        latency_us: device.device_us,
        block_queue_us: device.block_queue_us,
        request_bytes: device.request_bytes,
        // The mean comes from the times with the device.
        requeues: Some(device.requeues),
        depth_mean: device.device_us.map(|_| device.depth.mean),
        depth_max: Some(device.depth.max),
        users: Some(device.users),
        readahead_bytes: device.users.readahead_bytes,
        ..Row::default()
    }
}

fn verdict(verdict: &Verdict) -> Row<'_> {
    Row { section: "verdict", verdict: Some(verdict), ..Row::default() }
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    fn written(report: &StatReport) -> String {
        let mut out = Vec::new();
        write_stat(&mut out, report).expect("a vector takes everything");
        String::from_utf8(out).expect("reports are UTF-8")
    }

    #[test]
    fn full_report() {
        insta::assert_snapshot!(written(&samples::full()));
    }

    #[test]
    fn empty_report_has_its_header() {
        insta::assert_snapshot!(written(&samples::empty()));
    }

    #[test]
    fn incomplete_ledger() {
        insta::assert_snapshot!(written(&samples::incomplete()));
    }

    #[test]
    fn every_column_has_a_name_of_its_own() {
        let cells = Row::default().cells();
        let columns: std::collections::HashSet<_> = cells.iter().map(|(column, _)| column).collect();
        assert_eq!(columns.len(), cells.len());
    }

    #[test]
    fn odd_names_come_back_with_their_control_characters_escaped() {
        let mut report = samples::full();
        report.backends[0].application_name = Some("a,\"b\"\n\u{1b}[2J".to_owned());
        let text = written(&report);
        assert_eq!(text.lines().count(), written(&samples::full()).lines().count());
        let mut reader = ::csv::Reader::from_reader(text.as_bytes());
        let mut rows = reader.records().map(|row| row.expect("it is CSV"));
        let row = rows.find(|row| &row[0] == "backend").expect("there are backends");
        assert_eq!(&row[6], r#"a,"b"\n\u{1b}[2J"#);
    }
}
