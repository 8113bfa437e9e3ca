//! The text form of a `stat` report, for a terminal or a file.
//!
//! Everything is written with styles; the stream that the caller passes strips them where they are not wanted.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};

use super::activity::{write_queries, write_sessions};
use super::devices::{devices_of, read_ahead, write_devices};
use super::pg_stats::write_pg_stats;
use super::printable::printable;
use super::stages::write_stages;
use super::table::{Column, NOT_MEASURED, known, write_table};
use super::verdicts::write_verdicts;
use crate::model::{
    Backend, Dist, EndedBackends, FilterReport, IoSummary, IoWorker, Ledger, Overhead, OwnerShare,
    PgAiosLedger, PgProbes, Relation, SamplerCost, StatReport, Target, Window,
};
use crate::units;

/// What the reader must not overlook.
pub(super) const WARNING: Style = AnsiColor::Red.on_default().bold();

/// Owners that are named in the row of an io worker.
const OWNERS_SHOWN: usize = 3;

/// Writes the whole report.
///
/// # Errors
///
/// When `out` cannot be written to.
pub fn write_stat(out: &mut dyn Write, report: &StatReport) -> io::Result<()> {
    write_head(out, &report.target, &report.window)?;
    write_ledger(out, &report.ledger)?;
    write_pg_aios(out, report.ledger.pg_aios.as_ref())?;
    write_filter(out, report.filter.as_ref(), report.ledger.reads)?;
    write_verdicts(out, report)?;
    write_stages(out, report)?;
    write_table(out, "Backends: reads they wanted, whoever executed them", &BACKENDS, &report.backends)?;
    write_table(out, "Backends that ended, folded", &ENDED_BACKENDS, &report.ended_backends)?;
    write_queries(out, report)?;
    write_sessions(out, report)?;
    write_table(
        out,
        "Io workers: reads they executed, whoever wanted them",
        &IO_WORKERS,
        &report.io_workers,
    )?;
    write_table(out, "Relations and files", &RELATIONS, &report.relations)?;
    write_devices(out, &report.devices)?;
    write_pg_stats(out, report)?;
    write_notes(out, &report.notes)?;
    write_overhead(out, &report.overhead)
}

/// Columns of the table of backends.
const BACKENDS: [Column<Backend>; 15] = [
    Column::figure("PID", |backend| backend.pid.to_string()),
    Column::name("TYPE", backend_type),
    Column::name("DATABASE", |backend| name(backend.database.as_deref())),
    Column::name("USER", |backend| name(backend.user.as_deref())),
    Column::name("APPLICATION", |backend| name(backend.application_name.as_deref())),
    Column::figure("READS", |backend| units::count(backend.io.reads)),
    Column::figure("SIZE", |backend| units::size(backend.io.bytes)),
    Column::figure("BLOCKS", |backend| units::count(backend.io.blocks)),
    Column::figure("SYNC", |backend| units::count(backend.io.by_method.sync)),
    Column::figure("WORKER", |backend| units::count(backend.io.by_method.worker)),
    Column::figure("IO_URING", |backend| units::count(backend.io.by_method.io_uring)),
    Column::figure("P50", |backend| latency(&backend.io, |dist| dist.p50)),
    Column::figure("P99", |backend| latency(&backend.io, |dist| dist.p99)),
    Column::figure("MAX", |backend| latency(&backend.io, |dist| dist.max)),
    Column::figure("TOTAL", |backend| latency(&backend.io, |dist| dist.sum)),
];

/// Columns of the table of ended backends.
const ENDED_BACKENDS: [Column<EndedBackends>; 12] = [
    Column::figure("PROCESSES", |ended| units::count(ended.processes)),
    Column::name("TYPE", |ended| name(ended.backend_type.as_deref())),
    Column::name("DATABASE", |ended| name(ended.database.as_deref())),
    Column::name("USER", |ended| name(ended.user.as_deref())),
    Column::name("APPLICATION", |ended| name(ended.application_name.as_deref())),
    Column::figure("READS", |ended| units::count(ended.io.reads)),
    Column::figure("SIZE", |ended| units::size(ended.io.bytes)),
    Column::figure("BLOCKS", |ended| units::count(ended.io.blocks)),
    Column::figure("P50", |ended| latency(&ended.io, |dist| dist.p50)),
    Column::figure("P99", |ended| latency(&ended.io, |dist| dist.p99)),
    Column::figure("MAX", |ended| latency(&ended.io, |dist| dist.max)),
    Column::figure("TOTAL", |ended| latency(&ended.io, |dist| dist.sum)),
];

/// Columns of the table of io workers.
const IO_WORKERS: [Column<IoWorker>; 10] = [
    Column::name("WORKER", |worker| known(worker.worker.map(|number| format!("worker {number}")))),
    Column::figure("PID", |worker| worker.pid.to_string()),
    Column::figure("BUSY", |worker| units::ratio(worker.busy_ratio)),
    Column::figure("READS", |worker| units::count(worker.io.reads)),
    Column::figure("SIZE", |worker| units::size(worker.io.bytes)),
    Column::figure("P50", |worker| latency(&worker.io, |dist| dist.p50)),
    Column::figure("P99", |worker| latency(&worker.io, |dist| dist.p99)),
    Column::figure("MAX", |worker| latency(&worker.io, |dist| dist.max)),
    Column::figure("TOTAL", |worker| latency(&worker.io, |dist| dist.sum)),
    Column::name("FOR", owners),
];

/// Columns of the table of relations.
const RELATIONS: [Column<Relation>; 12] = [
    Column::name("DATABASE", |relation| name(relation.database.as_deref())),
    Column::name("RELATION", relation_name),
    Column::name("FORK", |relation| name(relation.fork.as_deref())),
    Column::figure("READS", |relation| units::count(relation.io.reads)),
    Column::figure("SIZE", |relation| units::size(relation.io.bytes)),
    Column::figure("BLOCKS", relation_blocks),
    Column::figure("P50", |relation| latency(&relation.io, |dist| dist.p50)),
    Column::figure("P99", |relation| latency(&relation.io, |dist| dist.p99)),
    Column::figure("MAX", |relation| latency(&relation.io, |dist| dist.max)),
    Column::figure("TOTAL", |relation| latency(&relation.io, |dist| dist.sum)),
    Column::figure("AHEAD", read_ahead),
    Column::name("FROM", devices_of),
];

/// Which server, and when.
fn write_head(out: &mut dyn Write, target: &Target, window: &Window) -> io::Result<()> {
    let method = target.io_method.as_deref().unwrap_or("not known");
    let cluster = target.cluster_name.as_deref().filter(|name| !name.is_empty());
    let cluster = cluster.map_or_else(String::new, |name| format!(" \"{}\"", printable(name)));
    writeln!(
        out,
        "PostgreSQL {}{cluster}, postmaster {}, {}, io_method {}",
        printable(&target.server_version),
        target.postmaster_pid,
        printable(&target.data_directory),
        printable(method),
    )?;
    let length = units::duration(window.duration_s * 1e6);
    writeln!(out, "Traced for {length} from {}", printable(&window.start))
}

/// The books, and first of all whether they are complete.
fn write_ledger(out: &mut dyn Write, ledger: &Ledger) -> io::Result<()> {
    writeln!(out)?;
    if !ledger.complete {
        writeln!(out, "{WARNING}LEDGER INCOMPLETE: {}{WARNING:#}", incompleteness(ledger))?;
    }
    if ledger.begun == 0 && ledger.reads == 0 {
        return writeln!(out, "No read began while the server was traced.");
    }
    writeln!(
        out,
        "{}, {}, {}; {}.",
        units::counted(ledger.reads, "read"),
        units::size(ledger.bytes),
        units::counted(ledger.blocks, "block"),
        fidelity(ledger),
    )?;
    writeln!(out, "{}.", outcomes(ledger))?;
    if ledger.own > 0 {
        writeln!(
            out,
            "Of these, {} by pgiotrace's own sessions, in no table below.",
            units::counted(ledger.own, "read")
        )?;
    }
    Ok(())
}

/// What the tables below are restricted to.
fn write_filter(out: &mut dyn Write, filter: Option<&FilterReport>, reads: u64) -> io::Result<()> {
    let Some(filter) = filter else { return Ok(()) };
    let mut words: Vec<String> = Vec::new();
    words.extend(filter.pids.iter().map(|pid| format!("--pid {pid}")));
    words.extend(filter.relations.iter().map(|name| format!("--relation {}", printable(name))));
    words.extend(filter.databases.iter().map(|name| format!("--database {}", printable(name))));
    words.extend(filter.users.iter().map(|name| format!("--user {}", printable(name))));
    words.extend(filter.query_ids.iter().map(|query_id| format!("--query-id {query_id}")));
    words
        .extend(filter.min_latency_us.map(|shortest| format!("--min-latency {}", units::duration(shortest))));
    writeln!(
        out,
        "Below are the {} of {} that match {}.",
        units::count(filter.reads),
        units::counted(reads, "read"),
        words.join(" "),
    )
}

/// What is missing in an incomplete ledger.
pub(super) fn incompleteness(ledger: &Ledger) -> String {
    if ledger.lost > 0 {
        return format!(
            "{} lost of {} that began (the tracer's buffers were full); the tables may miss them",
            units::counted(ledger.lost, "read"),
            units::count(ledger.begun),
        );
    }
    if ledger.processes_not_followed > 0 {
        return format!("{} could not be followed", units::counted(ledger.processes_not_followed, "process"));
    }
    let accounted = ledger.completed + ledger.failed + ledger.in_flight;
    format!(
        "{} began, but {} are accounted for",
        units::counted(ledger.begun, "read"),
        units::count(accounted)
    )
}

/// How sure the owners of the reads are: "100 % exact".
fn fidelity(ledger: &Ledger) -> String {
    let Some(exact) = units::share(ledger.exact, ledger.reads) else {
        return "no owner to find".to_owned();
    };
    let others = [
        (ledger.inferred, "inferred from pg_aios"),
        (ledger.ambiguous, "ambiguous"),
        (ledger.unattributed, "without a known owner"),
    ];
    join_nonzero(format!("owners {exact} exact"), &others)
}

/// What became of the reads that began.
fn outcomes(ledger: &Ledger) -> String {
    let head = format!(
        "{} began: {} completed",
        units::counted(ledger.begun, "read"),
        units::count(ledger.completed)
    );
    let others = [
        (ledger.short, "of them short"),
        (ledger.failed, "failed"),
        (ledger.in_flight, "in flight at the end"),
        (ledger.lost, "lost"),
        (ledger.impossible, "with times that contradict each other"),
        (ledger.beyond_range, "longer than an hour, in no percentile"),
    ];
    join_nonzero(head, &others)
}

/// `head` and, after it, those figures that are not zero.
fn join_nonzero(head: String, figures: &[(u64, &str)]) -> String {
    let shown = figures.iter().filter(|(number, _)| *number > 0);
    shown.fold(head, |text, (number, what)| format!("{text}, {} {what}", units::count(*number)))
}

/// How the rows of `pg_aios` compare.
fn write_pg_aios(out: &mut dyn Write, pg_aios: Option<&PgAiosLedger>) -> io::Result<()> {
    let Some(pg_aios) = pg_aios else {
        return writeln!(out, "pg_aios: not sampled.");
    };
    let PgAiosLedger { rows, confirmed, contradicted, unmatched } = *pg_aios;
    let style = if contradicted > 0 { WARNING } else { Style::new() };
    writeln!(
        out,
        "pg_aios: {} seen, {} confirmed, {style}{} contradicted{style:#}, {} not traced from begin to end.",
        units::counted(rows, "read"),
        units::count(confirmed),
        units::count(contradicted),
        units::count(unmatched),
    )
}

/// What the reader must know about the report.
pub(super) fn write_notes(out: &mut dyn Write, notes: &[String]) -> io::Result<()> {
    if !notes.is_empty() {
        writeln!(out)?;
    }
    for note in notes {
        writeln!(out, "Note: {}", printable(note))?;
    }
    Ok(())
}

/// What the tracer itself cost.
pub(super) fn write_overhead(out: &mut dyn Write, overhead: &Overhead) -> io::Result<()> {
    let Overhead {
        bpf_ns_per_read,
        bpf_cpu_s,
        tracer_cpu_s,
        tracer_max_rss_bytes,
        attach_ms,
        sampler,
        pg_probes,
    } = *overhead;
    let seconds = |seconds: f64| units::duration(seconds * 1e6);
    let per_read = bpf_ns_per_read.map(|nanos| format!("{} a read", units::duration(nanos / 1e3)));
    let in_all = bpf_cpu_s.map(|cpu| format!("{} of CPU", seconds(cpu)));
    let programs = [per_read, in_all].into_iter().flatten().collect::<Vec<_>>().join(", ");
    writeln!(
        out,
        "\nCost: kernel programs {}; {}{}tracer {} of CPU, {} of memory at most, attached after {}.",
        if programs.is_empty() { "not measured" } else { &programs },
        pg_probes.map(probes).unwrap_or_default(),
        sampler.map(samples).unwrap_or_default(),
        seconds(tracer_cpu_s),
        units::size(tracer_max_rss_bytes),
        units::duration(attach_ms * 1e3),
    )
}

/// What sampling cost the server.
fn samples(sampler: SamplerCost) -> String {
    let in_all = known(sampler.server_cpu_s.map(|cpu| units::duration(cpu * 1e6)));
    format!("{}, {in_all} of the server's CPU; ", units::counted(sampler.samples, "sample"))
}

/// What the probes of `--pg-probes` cost.
fn probes(probes: PgProbes) -> String {
    let in_all = known(probes.estimated_cpu_s.map(|cpu| units::duration(cpu * 1e6)));
    format!("probes {} traps, about {in_all} of CPU; ", units::count(probes.traps))
}

/// A name from the server, made safe.
pub(super) fn name(name: Option<&str>) -> String {
    known(name.filter(|name| !name.is_empty()).map(|name| printable(name).into_owned()))
}

/// One figure of the latency of `io`.
pub(super) fn latency(io: &IoSummary, figure: fn(&Dist) -> f64) -> String {
    known(io.latency_us.as_ref().map(|dist| units::duration(figure(dist))))
}

/// The type of a backend, with the leader of a parallel worker.
fn backend_type(backend: &Backend) -> String {
    let own = name(backend.backend_type.as_deref());
    match backend.leader_pid {
        Some(leader) if leader != backend.pid => format!("{own} of {leader}"),
        _ => own,
    }
}

/// For whom an io worker read: the largest owners by reads, each with its share.
fn owners(worker: &IoWorker) -> String {
    let mut owners: Vec<&OwnerShare> = worker.owners.iter().collect();
    owners.sort_by_key(|owner| std::cmp::Reverse(owner.reads));
    let total = owners.iter().map(|owner| owner.reads).sum();
    let mut shown: Vec<String> =
        owners.iter().take(OWNERS_SHOWN).map(|owner| owner_share(owner, total)).collect();
    if owners.len() > OWNERS_SHOWN {
        shown.push(format!("{} more", units::count((owners.len() - OWNERS_SHOWN) as u64)));
    }
    known((!shown.is_empty()).then(|| shown.join(", ")))
}

/// One owner and its share of `total` reads.
fn owner_share(owner: &OwnerShare, total: u64) -> String {
    let pid = owner.pid.map_or_else(|| "unknown".to_owned(), |pid| pid.to_string());
    match units::share(owner.reads, total) {
        Some(share) => format!("{pid} {share}"),
        None => pid,
    }
}

/// `schema.name`, or the relfilenode until the name is known, or the folder of files that are no relation.
fn relation_name(relation: &Relation) -> String {
    let Relation { schema, name, relfilenode, temporary, file, .. } = relation;
    let base = match (schema, name, relfilenode, file) {
        (Some(schema), Some(name), ..) => format!("{}.{}", printable(schema), printable(name)),
        (None, Some(name), ..) => printable(name).into_owned(),
        (.., Some(relfilenode), _) => format!("relfilenode {relfilenode}"),
        (.., Some(file)) => printable(file).into_owned(),
        _ => NOT_MEASURED.to_owned(),
    };
    if *temporary { format!("{base} (temporary)") } else { base }
}

/// Blocks of a relation; files that are none have no blocks.
pub(super) fn relation_blocks(relation: &Relation) -> String {
    known(relation.file.is_none().then(|| units::count(relation.io.blocks)))
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    fn written(report: &StatReport) -> String {
        let mut out = Vec::new();
        write_stat(&mut out, report).expect("a vector takes everything");
        anstream::adapter::strip_str(&String::from_utf8(out).expect("reports are UTF-8")).to_string()
    }

    #[test]
    fn full_report() {
        insta::assert_snapshot!(written(&samples::full()));
    }

    #[test]
    fn empty_report() {
        insta::assert_snapshot!(written(&samples::empty()));
    }

    #[test]
    fn incomplete_ledger() {
        insta::assert_snapshot!(written(&samples::incomplete()));
    }

    #[test]
    fn books_that_do_not_balance_are_said_to_be_incomplete() {
        let ledger = Ledger { begun: 5, completed: 4, reads: 4, exact: 4, ..Ledger::default() };
        let mut out = Vec::new();
        write_ledger(&mut out, &ledger).expect("a vector takes everything");
        let text = String::from_utf8(out).expect("reports are UTF-8");
        assert!(text.contains("LEDGER INCOMPLETE: 5 reads began, but 4 are accounted for"), "{text}");
    }

    #[test]
    fn a_hostile_name_does_not_reach_the_terminal() {
        let mut report = samples::full();
        let hostile = "\u{1b}[2J\u{9b}1;1H\r\n";
        for backend in &mut report.backends {
            backend.application_name = Some(hostile.to_owned());
            backend.database = Some(hostile.to_owned());
        }
        for device in report.relations[0].devices.iter_mut().flatten() {
            device.name = Some(hostile.to_owned());
        }
        report.relations[0].name = Some(hostile.to_owned());
        report.devices[0].name = Some(hostile.to_owned());
        report.target.data_directory = hostile.to_owned();
        report.notes.push(hostile.to_owned());
        let text = written(&report);
        let mut stripped = Vec::new();
        write_stat(&mut stripped, &report).expect("a vector takes everything");
        assert!(!String::from_utf8_lossy(&stripped).contains("\u{1b}[2J"));
        assert!(text.chars().all(|character| character == '\n' || !character.is_control()), "{text:?}");
    }

    #[test]
    fn many_owners_are_cut_to_the_largest() {
        let mut report = samples::full();
        let worker = &mut report.io_workers[0];
        worker.owners = (1..=5).map(|n| OwnerShare { pid: Some(n), reads: u64::from(n), bytes: 0 }).collect();
        assert_eq!(owners(worker), "5 33.3 %, 4 26.7 %, 3 20.0 %, 2 more");
    }
}
