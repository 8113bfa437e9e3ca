//! PostgreSQL's own statistics beside the traced reads, as text.

use std::io::{self, Write};

use super::printable::printable;
use super::table::{Column, TOP_ROWS, known, write_table};
use crate::model::{
    ClaimedOperations, Dist, PgStatBackendIoRow, PgStatDatabaseRow, PgStatIo, PgStatIoContext, PgStatIoRow,
    StatReport, TracedReads,
};
use crate::units;

/// Writes the tables that there are something to show of.
///
/// # Errors
///
/// When `out` cannot be written to.
pub fn write_pg_stats(out: &mut dyn Write, report: &StatReport) -> io::Result<()> {
    if let Some(io) = &report.pg_stat_io {
        write_io(out, io)?;
    }
    if let Some(backends) = &report.pg_stat_backend_io {
        let title = "PostgreSQL's pg_stat_get_backend_io (PG) beside the traced reads";
        write_table(out, title, &BACKENDS, &backends.rows)?;
        let why = |row: &PgStatBackendIoRow| (row.pid.to_string(), row.reason.clone());
        write_reasons(out, backends.rows.iter().take(TOP_ROWS).map(why))?;
        if backends.ended > 0 {
            let ended = units::count(backends.ended);
            writeln!(out, "  {ended} more ended in the window, and their statistics with them")?;
        }
    }
    let databases =
        report.pg_stat_database.as_ref().map(|database| database.rows.as_slice()).unwrap_or_default();
    write_table(out, "PostgreSQL's pg_stat_database (PG) beside the traced reads", &DATABASES, databases)?;
    write_reasons(out, databases.iter().take(TOP_ROWS).map(|row| (database(row), row.reason.clone())))
}

fn write_io(out: &mut dyn Write, io: &PgStatIo) -> io::Result<()> {
    let title = "PostgreSQL's pg_stat_io (PG) beside the traced reads; its mean is what issuers spent, not how long reads took";
    if io.reads_are_blocks {
        write_table(out, title, &TYPES_BY_BLOCKS, &io.rows)?;
    } else {
        write_table(out, title, &TYPES, &io.rows)?;
    }
    let why = |row: &PgStatIoRow| {
        (format!("{}, {}", backend_type(row), printable(&row.object)), row.reason.clone())
    };
    write_reasons(out, io.rows.iter().take(TOP_ROWS).map(why))?;
    write_table(
        out,
        "PostgreSQL's pg_stat_io by context: operations, and the mean that PostgreSQL claims",
        &CONTEXTS,
        &io.contexts,
    )
}

/// Columns of `pg_stat_io`.
const TYPES: [Column<PgStatIoRow>; 11] = types("PG READS");
/// The same before PostgreSQL 18.
const TYPES_BY_BLOCKS: [Column<PgStatIoRow>; 11] = types("PG BLOCKS");

const fn types(reads: &'static str) -> [Column<PgStatIoRow>; 11] {
    [
        Column::name("TYPE", backend_type),
        Column::name("OBJECT", |row| printable(&row.object).into_owned()),
        Column::figure(reads, |row| known(row.claimed.map(|claimed| units::count(claimed.reads)))),
        Column::figure("READS", |row| units::count(row.traced.reads)),
        Column::figure("PG SIZE", |row| known(row.claimed.map(|claimed| units::size(claimed.bytes)))),
        Column::figure("SIZE", |row| units::size(row.traced.bytes)),
        Column::figure("LESS/MORE", |row| size_difference(row.difference.map(|difference| difference.bytes))),
        Column::figure("PG MEAN", |row| micros(row.claimed.and_then(|claimed| claimed.mean_us()))),
        Column::figure("MEAN", |row| latency(&row.traced, |dist| dist.mean)),
        Column::figure("P50", |row| latency(&row.traced, |dist| dist.p50)),
        Column::figure("P99", |row| latency(&row.traced, |dist| dist.p99)),
    ]
}

/// Columns of `pg_stat_get_backend_io`.
const BACKENDS: [Column<PgStatBackendIoRow>; 10] = [
    Column::figure("PID", |row| row.pid.to_string()),
    Column::name("TYPE", |row| printable(&row.backend_type).into_owned()),
    Column::name("OBJECT", |row| printable(&row.object).into_owned()),
    Column::figure("PG READS", |row| known(row.claimed.map(|claimed| units::count(claimed.reads)))),
    Column::figure("READS", |row| units::count(row.traced.reads)),
    Column::figure("PG SIZE", |row| known(row.claimed.map(|claimed| units::size(claimed.bytes)))),
    Column::figure("SIZE", |row| units::size(row.traced.bytes)),
    Column::figure("LESS/MORE", |row| size_difference(row.difference.map(|difference| difference.bytes))),
    Column::figure("PG MEAN", |row| micros(row.claimed.and_then(|claimed| claimed.mean_us()))),
    Column::figure("MEAN", |row| latency(&row.traced, |dist| dist.mean)),
];

/// Columns of `pg_stat_database`.
const DATABASES: [Column<PgStatDatabaseRow>; 6] = [
    Column::name("DATABASE", database),
    Column::figure("PG BLOCKS", |row| known(row.claimed.map(|claimed| units::count(claimed.blocks)))),
    Column::figure("BLOCKS", |row| units::count(row.traced.blocks)),
    Column::figure("LESS/MORE", |row| count_difference(row.difference.map(|difference| difference.blocks))),
    Column::figure("PG TIME", |row| {
        micros(row.claimed.and_then(|claimed| claimed.read_time_ms).map(|millis| millis * 1e3))
    }),
    Column::figure("TIME", |row| latency(&row.traced, |dist| dist.sum)),
];

/// Columns of the contexts.
const CONTEXTS: [Column<PgStatIoContext>; 9] = [
    Column::name("TYPE", |row| printable(&row.backend_type).into_owned()),
    Column::name("OBJECT", |row| printable(&row.object).into_owned()),
    Column::name("CONTEXT", |row| printable(&row.context).into_owned()),
    Column::figure("READS", |row| operations(row.reads)),
    Column::figure("WRITES", |row| operations(row.writes)),
    Column::figure("WRITEBACKS", |row| operations(row.writebacks)),
    Column::figure("EXTENDS", |row| operations(row.extends)),
    Column::figure("FSYNCS", |row| operations(row.fsyncs)),
    Column::figure("EVICTIONS", |row| known(row.evictions.map(units::count))),
];

/// Each reason, behind what it is of.
fn write_reasons(
    out: &mut dyn Write,
    reasons: impl Iterator<Item = (String, Option<String>)>,
) -> io::Result<()> {
    for (of, reason) in reasons {
        if let Some(reason) = reason {
            writeln!(out, "  {of}: {}", printable(&reason))?;
        }
    }
    Ok(())
}

fn backend_type(row: &PgStatIoRow) -> String {
    known(row.backend_type.as_deref().map(|kind| printable(kind).into_owned()))
}

fn database(row: &PgStatDatabaseRow) -> String {
    match (&row.database, row.oid) {
        (Some(name), _) => printable(name).into_owned(),
        (None, 0) => "(shared)".to_owned(),
        (None, oid) => format!("OID {oid}"),
    }
}

/// How many, and how long each took as PostgreSQL claims.
fn operations(operations: Option<ClaimedOperations>) -> String {
    known(operations.map(|operations| match operations.mean_us {
        Some(mean_us) => format!("{} × {}", units::count(operations.count), units::duration(mean_us)),
        None => units::count(operations.count),
    }))
}

fn micros(micros: Option<f64>) -> String {
    known(micros.map(units::duration))
}

fn latency(traced: &TracedReads, figure: fn(&Dist) -> f64) -> String {
    micros(traced.latency_us.as_ref().map(figure))
}

/// What PostgreSQL counted less what was traced.
fn size_difference(bytes: Option<i64>) -> String {
    signed(bytes, units::size)
}

fn count_difference(count: Option<i64>) -> String {
    signed(count, units::count)
}

fn signed(difference: Option<i64>, unit: fn(u64) -> String) -> String {
    known(difference.map(|difference| match difference {
        0 => "0".to_owned(),
        less if less < 0 => format!("−{}", unit(less.unsigned_abs())),
        more => format!("+{}", unit(more.unsigned_abs())),
    }))
}
