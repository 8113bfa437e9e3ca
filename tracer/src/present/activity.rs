//! The text form of queries, sessions and waits.

use std::io::{self, Write};

use super::printable::printable;
use super::table::{Column, known, write_table};
use super::text::{latency, name};
use crate::model::{Doing, Query, QueryCertainty, QueryKind, Session, StatReport, Wait};
use crate::units;

/// Characters of a query that a table shows; JSON and CSV have it whole.
const QUERY_CHARS: usize = 60;
/// Wait events that a session's row names.
const EVENTS_SHOWN: usize = 2;

/// Writes which queries wanted the reads.
pub fn write_queries(out: &mut dyn Write, report: &StatReport) -> io::Result<()> {
    write_table(out, "Queries that wanted the reads", &QUERIES, &report.queries)?;
    match &report.query_certainty {
        Some(certainty) if !report.queries.is_empty() => writeln!(out, "  {}", certainties(certainty)),
        _ => Ok(()),
    }
}

/// Writes what the sessions did, and what they waited for.
pub fn write_sessions(out: &mut dyn Write, report: &StatReport) -> io::Result<()> {
    let sessions = report.sessions.as_deref().unwrap_or_default();
    write_table(out, "Sessions, as samples of pg_stat_activity saw them", &SESSIONS, sessions)?;
    let waits = report.waits.as_deref().unwrap_or_default();
    write_table(out, "Waits for reads: samples, by what the awaited read was doing", &WAITS, waits)
}

const QUERIES: [Column<Query>; 14] = [
    Column::figure("QUERY ID", |query| known(query.query_id.clone())),
    Column::name("TYPE", |query| name(query.backend_type.as_deref())),
    Column::figure("RUNS", |query| {
        known((query.kind != QueryKind::None).then(|| units::count(query.executions)))
    }),
    Column::figure("READS", |query| units::count(query.io.reads)),
    Column::figure("CERTAIN", certain),
    Column::figure("SIZE", |query| units::size(query.io.bytes)),
    Column::figure("P50", |query| latency(&query.io, |dist| dist.p50)),
    Column::figure("P99", |query| latency(&query.io, |dist| dist.p99)),
    Column::figure("TOTAL", |query| latency(&query.io, |dist| dist.sum)),
    Column::figure("FROM DEVICE", from_device),
    Column::figure("EXPOSED", |query| known(query.io.exposed_us.map(units::duration))),
    Column::figure("HIDDEN", |query| known(query.io.hidden_us.map(units::duration))),
    Column::name("DATABASE", |query| name(query.database.as_deref())),
    Column::name("QUERY", query_text),
];

const SESSIONS: [Column<Session>; 11] = [
    Column::figure("PID", |session| session.pid.to_string()),
    Column::figure("BUSY", |session| units::ratio(session.busy_ratio)),
    Column::figure("RUNS", |session| units::count(session.executions)),
    Column::name("DATABASE", |session| name(session.database.as_deref())),
    Column::name("USER", |session| name(session.user.as_deref())),
    Column::name("CLIENT", |session| session.client.clone().unwrap_or_else(|| "local".to_owned())),
    Column::name("APPLICATION", |session| name(session.application_name.as_deref())),
    Column::name("TYPE", |session| name(session.backend_type.as_deref())),
    Column::name("WAITS", wait_events),
    Column::name("BLOCKED BY", |session| pids(&session.blocked_by)),
    Column::name("QUERY", |session| known(session.query.as_deref().map(shortened))),
];

const WAITS: [Column<Wait>; 14] = [
    Column::figure("PID", |wait| wait.pid.to_string()),
    Column::name("EVENT", |wait| printable(&wait.event).into_owned()),
    Column::figure("SAMPLES", |wait| units::count(wait.samples)),
    Column::figure("PG QUEUE", |wait| doing(wait, Doing::PgQueue)),
    Column::figure("SUBMIT", |wait| doing(wait, Doing::Submit)),
    Column::figure("CACHE", |wait| doing(wait, Doing::Cache)),
    Column::figure("BLOCK QUEUE", |wait| doing(wait, Doing::BlockQueue)),
    Column::figure("DEVICE", |wait| doing(wait, Doing::Device)),
    Column::figure("WAKEUP", |wait| doing(wait, Doing::Wakeup)),
    Column::figure("FINISHED", |wait| doing(wait, Doing::Finished)),
    Column::figure("LOCK", |wait| doing(wait, Doing::Lock)),
    Column::figure("NOT KNOWN", |wait| doing(wait, Doing::NotKnown)),
    Column::name("OF OTHERS", of_others),
    Column::name("QUERY", |wait| known(wait.query.as_deref().map(shortened))),
];

/// How sure it is which query wanted the reads.
fn certainties(certainty: &QueryCertainty) -> String {
    let QueryCertainty { certain, probable, unknown, none } = *certainty;
    let all = certain + probable + unknown + none;
    let share = |part| units::share(part, all).unwrap_or_default();
    let parts = [
        (certain, "certain"),
        (probable, "probable"),
        (none, "of no query"),
        (unknown, "of a query that is not known"),
    ];
    let shown =
        parts.iter().filter(|(part, _)| *part > 0).map(|(part, what)| format!("{} {what}", share(*part)));
    let shown: Vec<String> = shown.collect();
    format!(
        "{}: {}",
        units::counted(all, "read"),
        if shown.is_empty() { "none".to_owned() } else { shown.join(", ") }
    )
}

/// Share of a query's reads that it wanted for certain.
fn certain(query: &Query) -> String {
    known(units::share(query.certain, query.io.reads).filter(|_| query.kind == QueryKind::Query))
}

/// Share of a query's reads whose bytes came from a device, in part at least.
fn from_device(query: &Query) -> String {
    let share = query.io.by_source.and_then(|by| units::share(by.device + by.mixed, by.known()));
    known(share)
}

/// The query, or what stands in its place.
fn query_text(query: &Query) -> String {
    match (query.kind, &query.query) {
        (_, Some(text)) => shortened(text),
        (QueryKind::Query, None) => known(None),
        (QueryKind::Unknown, None) => "(not known)".to_owned(),
        (QueryKind::None, None) if query.backend_type.as_deref() == Some("client backend") => {
            "(none: the session starts)".to_owned()
        }
        (QueryKind::None, None) => "(none)".to_owned(),
    }
}

/// A query on one line: runs of white space become one space, and what is too long is cut.
fn shortened(query: &str) -> String {
    let line = query.split_whitespace().collect::<Vec<_>>().join(" ");
    let cut = line.char_indices().nth(QUERY_CHARS).map(|(index, _)| &line[..index]);
    match cut {
        Some(head) => format!("{}…", printable(head)),
        None => printable(&line).into_owned(),
    }
}

/// What a session waited for most, in shares of the samples that saw it active.
fn wait_events(session: &Session) -> String {
    let active: u64 = session.wait_events.values().sum();
    let mut events: Vec<_> = session.wait_events.iter().collect();
    events.sort_by_key(|(event, samples)| (std::cmp::Reverse(**samples), event.as_str()));
    let shown = events.iter().take(EVENTS_SHOWN).map(|(event, samples)| {
        format!("{} {}", printable(event), units::share(**samples, active).unwrap_or_default())
    });
    known((!events.is_empty()).then(|| shown.collect::<Vec<_>>().join(", ")))
}

/// Samples of one kind; nothing where there are none.
fn doing(wait: &Wait, doing: Doing) -> String {
    match wait.doing.of(doing) {
        0 => String::new(),
        samples => units::count(samples),
    }
}

/// The backends whose reads were awaited, where they were others'.
fn of_others(wait: &Wait) -> String {
    let owners = wait.of_others.iter().map(|other| format!("{} {}×", other.pid, units::count(other.samples)));
    owners.collect::<Vec<_>>().join(", ")
}

fn pids(pids: &[u32]) -> String {
    pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_shown_on_one_line_and_cut() {
        assert_eq!(shortened("SELECT 1\n  FROM\tt"), "SELECT 1 FROM t");
        assert_eq!(shortened("a\u{1b}[2J"), r"a\u{1b}[2J");
        let long = "é".repeat(QUERY_CHARS + 1);
        assert_eq!(shortened(&long), format!("{}…", "é".repeat(QUERY_CHARS)));
        assert_eq!(shortened(&long[..2 * QUERY_CHARS]), "é".repeat(QUERY_CHARS));
    }
}
