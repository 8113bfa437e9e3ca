//! What the CSV form tells of PostgreSQL's own statistics: the sections `pg_stat_io`, `pg_stat_backend_io` and
//! `pg_stat_database`, where `claimed_*` is what PostgreSQL counted and `difference_*` that less what was traced, and
//! `pg_stat_io_context`, where nothing was traced.

use super::super::printable::printable;
use super::{Cell, Row, cell, named, thousandths};
use crate::model::{
    BlocksDifference, ClaimedOperations, ClaimedReads, PgStatBackendIoRow, PgStatDatabaseRow,
    PgStatIoContext, PgStatIoRow, ReadsDifference, StatReport, TracedReads,
};

/// What such a row has beside the columns that others have, too.
#[derive(Default)]
pub(super) struct Claims<'a> {
    object: Option<&'a str>,
    context: Option<&'a str>,
    reads: Option<ClaimedOperations>,
    blocks: Option<u64>,
    difference_reads: Option<i64>,
    difference_bytes: Option<i64>,
    difference_blocks: Option<i64>,
    reason: Option<&'a str>,
    writes: Option<ClaimedOperations>,
    writebacks: Option<ClaimedOperations>,
    extends: Option<ClaimedOperations>,
    fsyncs: Option<ClaimedOperations>,
    evictions: Option<u64>,
    hits: Option<u64>,
    reuses: Option<u64>,
}

impl Claims<'_> {
    pub fn cells(&self) -> Vec<Cell> {
        let count =
            |operations: Option<ClaimedOperations>| cell(operations.map(|operations| operations.count));
        let bytes =
            |operations: Option<ClaimedOperations>| cell(operations.and_then(|operations| operations.bytes));
        let time = |operations: Option<ClaimedOperations>| {
            cell(operations.and_then(|operations| operations.time_ms).map(thousandths))
        };
        named([
            ("object", cell(self.object.map(printable))),
            ("context", cell(self.context.map(printable))),
            ("claimed_reads", count(self.reads.filter(|_| self.blocks.is_none()))),
            ("claimed_bytes", bytes(self.reads)),
            ("claimed_blocks", cell(self.blocks)),
            ("claimed_read_time_ms", time(self.reads)),
            ("difference_reads", cell(self.difference_reads)),
            ("difference_bytes", cell(self.difference_bytes)),
            ("difference_blocks", cell(self.difference_blocks)),
            ("reason", cell(self.reason.map(printable))),
            ("claimed_writes", count(self.writes)),
            ("claimed_write_bytes", bytes(self.writes)),
            ("claimed_write_time_ms", time(self.writes)),
            ("claimed_writebacks", count(self.writebacks)),
            ("claimed_writeback_time_ms", time(self.writebacks)),
            ("claimed_extends", count(self.extends)),
            ("claimed_extend_bytes", bytes(self.extends)),
            ("claimed_extend_time_ms", time(self.extends)),
            ("claimed_fsyncs", count(self.fsyncs)),
            ("claimed_fsync_time_ms", time(self.fsyncs)),
            ("claimed_evictions", cell(self.evictions)),
            ("claimed_hits", cell(self.hits)),
            ("claimed_reuses", cell(self.reuses)),
        ])
    }
}

/// The rows of all sections.
pub(super) fn rows(report: &StatReport) -> impl Iterator<Item = Row<'_>> {
    let io = report.pg_stat_io.as_ref();
    let of_backends = report.pg_stat_backend_io.as_ref().map(|io| &io.rows);
    let databases = report.pg_stat_database.as_ref().map(|databases| &databases.rows);
    (io.into_iter().flat_map(|io| io.rows.iter().map(of_type)))
        .chain(io.into_iter().flat_map(|io| io.contexts.iter().map(of_context)))
        .chain(of_backends.into_iter().flatten().map(of_backend))
        .chain(databases.into_iter().flatten().map(of_database))
}

fn of_type(row: &PgStatIoRow) -> Row<'_> {
    let PgStatIoRow { backend_type, object, claimed, traced, difference, reason } = row;
    Row {
        backend_type: backend_type.as_deref(),
        claims: claims(object, *claimed, *difference, reason.as_deref()),
        ..of_traced("pg_stat_io", traced)
    }
}

fn of_backend(row: &PgStatBackendIoRow) -> Row<'_> {
    let PgStatBackendIoRow { pid, backend_type, object, claimed, traced, difference, reason } = row;
    Row {
        pid: Some(*pid),
        backend_type: Some(backend_type),
        claims: claims(object, *claimed, *difference, reason.as_deref()),
        ..of_traced("pg_stat_backend_io", traced)
    }
}

fn of_database(row: &PgStatDatabaseRow) -> Row<'_> {
    let PgStatDatabaseRow { oid: _, database, claimed, traced, difference, reason } = row;
    let reads =
        claimed.map(|claimed| ClaimedOperations { time_ms: claimed.read_time_ms, ..Default::default() });
    Row {
        database: database.as_deref(),
        claims: Claims {
            reads,
            blocks: claimed.map(|claimed| claimed.blocks),
            difference_blocks: difference.map(|BlocksDifference { blocks }| blocks),
            reason: reason.as_deref(),
            ..Claims::default()
        },
        ..of_traced("pg_stat_database", traced)
    }
}

fn of_context(row: &PgStatIoContext) -> Row<'_> {
    let PgStatIoContext {
        backend_type,
        object,
        context,
        reads,
        writes,
        writebacks,
        extends,
        fsyncs,
        evictions,
        hits,
        reuses,
    } = row;
    Row {
        section: "pg_stat_io_context",
        backend_type: Some(backend_type),
        claims: Claims {
            object: Some(object),
            context: Some(context),
            reads: *reads,
            writes: *writes,
            writebacks: *writebacks,
            extends: *extends,
            fsyncs: *fsyncs,
            evictions: *evictions,
            hits: *hits,
            reuses: *reuses,
            ..Claims::default()
        },
        ..Row::default()
    }
}

fn of_traced<'a>(section: &'static str, traced: &TracedReads) -> Row<'a> {
    let TracedReads { reads, bytes, blocks, latency_us } = traced;
    Row {
        section,
        reads: Some(*reads),
        bytes: Some(*bytes),
        blocks: Some(*blocks),
        latency_us: *latency_us,
        ..Row::default()
    }
}

fn claims<'a>(
    object: &'a str,
    claimed: Option<ClaimedReads>,
    difference: Option<ReadsDifference>,
    reason: Option<&'a str>,
) -> Claims<'a> {
    let reads = claimed.map(|ClaimedReads { reads, bytes, read_time_ms }| ClaimedOperations {
        count: reads,
        bytes: Some(bytes),
        time_ms: read_time_ms,
        mean_us: None,
    });
    Claims {
        object: Some(object),
        reads,
        difference_reads: difference.and_then(|difference| difference.reads),
        difference_bytes: difference.map(|difference| difference.bytes),
        reason,
        ..Claims::default()
    }
}
