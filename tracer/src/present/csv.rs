//! The CSV form of a `stat` report, for spreadsheets and `COPY`.
//!
//! One header line, then one row per (section, entity): `backend`, `io_worker`, `relation`, `device`. All rows have
//! all columns; a cell is empty where the section has no such thing or where it was not measured. Cells are
//! quoted as RFC 4180 says; control characters in names are escaped, so that a row is one line and a terminal is safe.
//! Of a device, `reads` are its requests and `latency_*` is the time from issue to completion.

use std::io::{self, Write};

use ::csv::Writer;

use super::printable::printable;
use crate::model::{
    Backend, ByMethod, Device, Dist, EndedBackends, IoSummary, IoWorker, Relation, StatReport,
};

/// Writes all rows.
///
/// # Errors
///
/// When `out` cannot be written to.
pub fn write_stat(out: &mut dyn Write, report: &StatReport) -> io::Result<()> {
    let mut writer = Writer::from_writer(out);
    writer.write_record(Row::default().cells().map(|(column, _)| column))?;
    let rows = (report.backends.iter().map(backend))
        .chain(report.ended_backends.iter().map(ended_backends))
        .chain(report.io_workers.iter().map(io_worker))
        .chain(report.relations.iter().map(relation))
        .chain(report.devices.iter().map(device));
    for row in rows {
        writer.write_record(row.cells().map(|(_, cell)| cell))?;
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
    reads: u64,
    bytes: u64,
    blocks: Option<u64>,
    by_method: Option<ByMethod>,
    latency_us: Option<Dist>,
    block_queue_us: Option<Dist>,
}

impl<'a> Row<'a> {
    /// A row of `section` with the figures of `io`.
    fn of(section: &'static str, io: &IoSummary) -> Self {
        Self {
            section,
            reads: io.reads,
            bytes: io.bytes,
            blocks: Some(io.blocks),
            by_method: Some(io.by_method),
            latency_us: io.latency_us,
            ..Self::default()
        }
    }

    /// All columns with their cells, in the order of the file.
    fn cells(&self) -> impl Iterator<Item = (&'static str, String)> + use<'a> {
        let method = self.by_method;
        let names = [
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
        ];
        let figures = [
            ("reads", self.reads.to_string()),
            ("bytes", self.bytes.to_string()),
            ("blocks", cell(self.blocks)),
            ("reads_sync", cell(method.map(|method| method.sync))),
            ("reads_worker", cell(method.map(|method| method.worker))),
            ("reads_io_uring", cell(method.map(|method| method.io_uring))),
        ];
        let latency = dist(&LATENCY_COLUMNS, self.latency_us);
        let block_queue = dist(&BLOCK_QUEUE_COLUMNS, self.block_queue_us);
        names.into_iter().chain(figures).chain(latency).chain(block_queue)
    }
}

/// Columns of the latency, in the order of [`dist`].
const LATENCY_COLUMNS: [&str; 7] = [
    "latency_mean_us",
    "latency_p50_us",
    "latency_p90_us",
    "latency_p99_us",
    "latency_p999_us",
    "latency_max_us",
    "latency_sum_us",
];

/// Columns of a device's queue, in the order of [`dist`].
const BLOCK_QUEUE_COLUMNS: [&str; 7] = [
    "block_queue_mean_us",
    "block_queue_p50_us",
    "block_queue_p90_us",
    "block_queue_p99_us",
    "block_queue_p999_us",
    "block_queue_max_us",
    "block_queue_sum_us",
];

/// The figures of a distribution under the names in `columns`.
fn dist(
    columns: &[&'static str; 7],
    dist: Option<Dist>,
) -> impl Iterator<Item = (&'static str, String)> + use<> {
    let figures = dist.map(|dist| {
        // The count is left out: it is the number of reads.
        let Dist { count: _, mean, p50, p90, p99, p999, max, sum } = dist;
        [mean, p50, p90, p99, p999, max, sum]
    });
    let columns = *columns;
    columns.into_iter().enumerate().map(move |(index, column)| {
        let micros = figures.map(|figures| format!("{:.3}", figures[index]));
        (column, cell(micros))
    })
}

/// A value, or an empty cell where there is none.
fn cell<T: ToString>(value: Option<T>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
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

fn device(device: &Device) -> Row<'_> {
    Row {
        section: "device",
        device: Some(&device.dev),
        name: device.name.as_deref(),
        reads: device.requests,
        bytes: device.bytes,
        latency_us: device.device_us,
        block_queue_us: device.block_queue_us,
        ..Row::default()
    }
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
    fn odd_names_come_back_with_their_control_characters_escaped() {
        let mut report = samples::full();
        report.backends[0].application_name = Some("a,\"b\"\n\u{1b}[2J".to_owned());
        let text = written(&report);
        assert_eq!(text.lines().count(), written(&samples::full()).lines().count());
        let mut reader = ::csv::Reader::from_reader(text.as_bytes());
        let row = reader.records().next().expect("a row").expect("it is CSV");
        assert_eq!(&row[6], r#"a,"b"\n\u{1b}[2J"#);
    }
}
