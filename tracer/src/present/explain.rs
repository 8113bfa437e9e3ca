//! The text form of an `explain` report: the claim beside the truth, and the plan with both.

use std::io::{self, Write};

use comfy_table::{CellAlignment, ContentArrangement, Table};

use super::devices::{depth, mean_size};
use super::printable::printable;
use super::stages;
use super::table::{Column, HEADING, NOT_MEASURED, known, write_table};
use super::text::{WARNING, incompleteness, latency, name, relation_blocks, write_notes, write_overhead};
use super::verdicts::write_verdicts;
use crate::model::{
    Claim, Device, Dist, ExplainReport, IoSummary, PlanNode, PlanRelation, Relation, RelationKind, Run,
};
use crate::units;

/// Columns that a report takes at most.
pub const WIDEST: usize = 110;
/// Columns that it takes where there is room for less: figures are not cut.
const NARROWEST: usize = 80;
/// Columns of a plan's node at least.
const LEAST_LABEL: usize = 16;
/// Columns of the bar of stages; the words below it begin with its letters, but for the block layer's queue (Q).
const BAR_WIDTH: usize = 60;
/// Columns of the name of a relation at most.
const MOST_NAME: usize = 32;
/// What stands where a node's reads are also others'.
const SEE_RELATIONS: &str = "*";

/// Writes the whole report, `width` columns wide where it can be.
///
/// # Errors
///
/// When `out` cannot be written to.
pub fn write_explain(out: &mut dyn Write, report: &ExplainReport, width: usize) -> io::Result<()> {
    write_head(out, report)?;
    write_claim_and_truth(out, report)?;
    write_verdicts(out, &report.trace)?;
    write_runs(out, &report.runs)?;
    write_plan(out, &report.nodes, width.clamp(NARROWEST, WIDEST))?;
    if report.claimed.planning_read_blocks > 0 {
        let blocks = units::counted(report.claimed.planning_read_blocks, "block");
        writeln!(
            out,
            "  planning read {blocks}, which the nodes do not claim: of their relations, the kernel saw these as well"
        )?;
    }
    write_relations(out, report)?;
    write_table(out, "Devices: all read requests, whoever wanted them", &DEVICES, &report.trace.devices)?;
    write_notes(out, &report.trace.notes)?;
    write_overhead(out, &report.trace.overhead)
}

/// Which server, and how the query was run.
fn write_head(out: &mut dyn Write, report: &ExplainReport) -> io::Result<()> {
    let (target, session) = (&report.trace.target, &report.session);
    writeln!(
        out,
        "PostgreSQL {}, postmaster {}, {}, io_method {}",
        printable(&target.server_version),
        target.postmaster_pid,
        printable(&target.data_directory),
        printable(target.io_method.as_deref().unwrap_or("not known")),
    )?;
    writeln!(
        out,
        "Run in database {} as {} by process {}, {} and rolled back{}",
        printable(&session.database),
        printable(&session.user),
        session.pid,
        if session.allow_write { "allowed to write" } else { "read-only" },
        if session.cold { "; caches were emptied before" } else { "" },
    )?;
    if report.trace.ledger.complete {
        return Ok(());
    }
    writeln!(out, "\n{WARNING}LEDGER INCOMPLETE: {}{WARNING:#}", incompleteness(&report.trace.ledger))
}

/// The lines that all the rest explains.
fn write_claim_and_truth(out: &mut dyn Write, report: &ExplainReport) -> io::Result<()> {
    let label = |label: &str| format!("{HEADING}{label:<16}{HEADING:#}");
    let of_runs = match report.runs.len() {
        0 | 1 => String::new(),
        runs => format!(", the median of {runs} runs"),
    };
    writeln!(out, "\n{}{}{of_runs}", label("Run time"), units::duration(report.run_time_ms * 1e3))?;
    writeln!(out, "{}{}", label("EXPLAIN claims"), claim(&report.claimed))?;
    let io = &report.measured;
    if io.reads == 0 {
        return writeln!(out, "{}no read: all was in shared_buffers", label("The kernel saw"));
    }
    writeln!(out, "{}{}", label("The kernel saw"), truth(io))?;
    let indent = " ".repeat(16);
    if let Some(exposure) = exposure(io) {
        writeln!(out, "{indent}{exposure}")?;
    }
    if let Some(times) = stages::times(io) {
        write!(out, "{indent}")?;
        stages::write_bar(out, &times, BAR_WIDTH)?;
        writeln!(out, "\n{indent}{}", stages::shares(&times))?;
    }
    let without_exposure = IoSummary { exposed_us: None, hidden_us: None, ..io.clone() };
    for line in stages::details(&without_exposure).into_iter().chain(stages::bounds(&io.bounds_us)) {
        writeln!(out, "{indent}{line}")?;
    }
    Ok(())
}

/// What PostgreSQL says.
fn claim(claim: &Claim) -> String {
    let Claim { shared_read_blocks, local_read_blocks, temp_read_blocks, io_read_time_ms, .. } = *claim;
    let time = match io_read_time_ms {
        Some(time) => format!("I/O time {}", units::duration(time * 1e3)),
        None => "no I/O time (track_io_timing is off)".to_owned(),
    };
    let others = [(local_read_blocks, "of temporary relations"), (temp_read_blocks, "of temporary files")];
    let others = others.iter().filter(|(blocks, _)| *blocks > 0);
    let others = others.map(|(blocks, what)| format!(", {} {what}", units::counted(*blocks, "block")));
    format!("{} read{}, {time}", units::counted(shared_read_blocks, "block"), others.collect::<String>())
}

/// What the kernel says.
fn truth(io: &IoSummary) -> String {
    let blocks = units::counted(io.blocks, "block");
    let reads = units::counted(io.reads, "read");
    let [p50, p99, sum] = [|dist: &Dist| dist.p50, |dist: &Dist| dist.p99, |dist: &Dist| dist.sum]
        .map(|figure| latency(io, figure));
    format!("{blocks} in {reads}: P50 {p50}, P99 {p99}, {sum} in all")
}

/// What the reads cost the query.
fn exposure(io: &IoSummary) -> Option<String> {
    let (exposed, hidden) = io.exposed_us.zip(io.hidden_us)?;
    let sum = io.latency_us?.sum;
    let in_flight = exposed + hidden;
    let depth = if in_flight > 0.0 { format!("; {:.2} in flight", sum / in_flight) } else { String::new() };
    Some(format!(
        "exposed {} (the query waited for them), hidden {}{depth}",
        units::duration(exposed),
        units::duration(hidden),
    ))
}

/// Columns of the table of runs.
fn runs_columns<'a>() -> [Column<(usize, &'a Run)>; 10] {
    [
        Column::figure(
            "RUN",
            |(number, run)| if run.is_reported { format!("> {number}") } else { number.to_string() },
        ),
        Column::figure("TIME", |(_, run)| units::duration(run.run_time_ms * 1e3)),
        Column::figure("CLAIMED BLOCKS", |(_, run)| units::count(run.claimed.shared_read_blocks)),
        Column::figure("I/O TIME", |(_, run)| {
            known(run.claimed.io_read_time_ms.map(|time| units::duration(time * 1e3)))
        }),
        Column::figure("READS", |(_, run)| units::count(run.measured.reads)),
        Column::figure("BLOCKS", |(_, run)| units::count(run.measured.blocks)),
        Column::figure("P50", |(_, run)| latency(&run.measured, |dist| dist.p50)),
        Column::figure("P99", |(_, run)| latency(&run.measured, |dist| dist.p99)),
        Column::figure("TOTAL", |(_, run)| latency(&run.measured, |dist| dist.sum)),
        Column::figure("EXPOSED", |(_, run)| known(run.measured.exposed_us.map(units::duration))),
    ]
}

/// All runs, where there are several.
fn write_runs(out: &mut dyn Write, runs: &[Run]) -> io::Result<()> {
    if runs.len() < 2 {
        return Ok(());
    }
    let numbered: Vec<(usize, &Run)> = runs.iter().enumerate().map(|(index, run)| (index + 1, run)).collect();
    write_table(out, "Runs: the one that the rest tells of is marked", &runs_columns(), &numbered)
}

/// A column of the plan's figures.
type Figure = (&'static str, fn(&PlanNode) -> String);

/// What PostgreSQL claims of a node; its loops stand before these where they say something.
const CLAIMED: [Figure; 4] = [
    ("ROWS", |node| known(node.rows.map(rows))),
    ("TIME", |node| known(node.time_ms.map(|time| units::duration(time * 1e3)))),
    ("BLOCKS", |node| known(node.claimed.map(|claim| units::count(claim.read_blocks)))),
    ("I/O TIME", |node| {
        let time = node.claimed.filter(|claim| claim.read_blocks > 0).and_then(|claim| claim.io_read_time_ms);
        known(time.map(|time| units::duration(time * 1e3)))
    }),
];

/// What the kernel saw of it.
const SEEN: [Figure; 5] = [
    ("READS", |node| of_node(node, |io| Some(units::count(io.reads)))),
    ("BLOCKS", |node| of_node(node, |io| Some(units::count(io.blocks)))),
    ("P50", |node| of_node(node, |io| io.latency_us.map(|dist| units::duration(dist.p50)))),
    ("P99", |node| of_node(node, |io| io.latency_us.map(|dist| units::duration(dist.p99)))),
    ("DEVICE", |node| of_node(node, device_share)),
];

/// A figure of what was measured of a node.
fn of_node(node: &PlanNode, figure: fn(&IoSummary) -> Option<String>) -> String {
    match &node.measured {
        Some(io) => known(figure(io)),
        None if node.shares_relations => SEE_RELATIONS.to_owned(),
        None => NOT_MEASURED.to_owned(),
    }
}

/// The share of the reads' time that was the device's.
fn device_share(io: &IoSummary) -> Option<String> {
    stages::times(io)?;
    let sum = io.latency_us.filter(|dist| dist.sum > 0.0)?.sum;
    Some(units::percent(io.stages_us.device.map_or(0.0, |dist| dist.sum) / sum))
}

/// Rows are a mean, and mostly whole.
fn rows(rows: f64) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a count of rows is not negative, and far below 2^64"
    )]
    let whole = rows.round() as u64;
    if (rows - rows.round()).abs() < 0.005 { units::count(whole) } else { format!("{rows:.2}") }
}

/// The plan as a tree, with what is claimed and what was seen beside each node.
fn write_plan(out: &mut dyn Write, nodes: &[PlanNode], width: usize) -> io::Result<()> {
    let has_loops = nodes.iter().any(|node| node.rows.is_some() && node.loops > 1.0);
    let loops: Option<Figure> = has_loops.then_some(("LOOPS", |node| rows(node.loops)));
    let claimed: Vec<Figure> =
        CLAIMED[..2].iter().copied().chain(loops).chain(CLAIMED[2..].iter().copied()).collect();
    let figures: Vec<Figure> = claimed.iter().chain(&SEEN).copied().collect();
    let cells: Vec<Vec<String>> =
        nodes.iter().map(|node| figures.iter().map(|(_, figure)| figure(node)).collect()).collect();
    // Two columns set off who says it, one is enough between figures.
    let padding = |column: usize| if column == 0 || column == claimed.len() { 2 } else { 1 };
    let of_figure = |column: usize| {
        let widths = cells.iter().map(|row| row[column].chars().count());
        widths.chain([figures[column].0.len()]).max().unwrap_or(0) + usize::from(padding(column))
    };
    let widths: Vec<usize> = (0..figures.len()).map(of_figure).collect();
    let room = width.saturating_sub(widths.iter().sum::<usize>() + 2).max(LEAST_LABEL);
    let mut table = Table::new();
    table
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header([vec!["PLAN"], figures.iter().map(|(heading, _)| *heading).collect()].concat());
    for (node, row) in nodes.iter().zip(cells) {
        table.add_row([vec![shortened(&label(node), room)], row].concat());
    }
    table.load_style(comfy_table::presets::NOTHING);
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((index.checked_sub(1).map_or(2, padding), 0));
        column.set_cell_alignment(if index == 0 { CellAlignment::Left } else { CellAlignment::Right });
    }
    let text = table.to_string();
    let mut lines = text.lines();
    let headings = lines.next().unwrap_or_default();
    writeln!(out, "\n{HEADING}Plan{HEADING:#}")?;
    writeln!(out, "{HEADING}{}{HEADING:#}", groups(headings, &widths, claimed.len()))?;
    writeln!(out, "{HEADING}{}{HEADING:#}", headings.trim_end())?;
    for line in lines {
        writeln!(out, "{}", line.trim_end())?;
    }
    if nodes.iter().any(|node| node.shares_relations) {
        writeln!(out, "  {SEE_RELATIONS} other nodes read these relations, too: see the relations")?;
    }
    if has_loops {
        writeln!(out, "  ROWS and TIME are EXPLAIN's means over the loops; TIME includes the children")?;
    }
    Ok(())
}

/// Who says what: stands above the headings, each over the first column that is its.
fn groups(headings: &str, widths: &[usize], claimed: usize) -> String {
    let all = headings.chars().count();
    let of_seen: usize = widths[claimed..].iter().sum();
    let of_claimed: usize = widths[..claimed].iter().sum();
    let before = all.saturating_sub(of_seen + of_claimed);
    let (claims, saw) = ("EXPLAIN claims".len(), "the kernel saw".len());
    let [claims_room, saw_room] =
        [of_claimed.saturating_sub(claims + 4), of_seen.saturating_sub(saw + 4)].map(|room| "─".repeat(room));
    format!("{}  EXPLAIN claims {claims_room}─  the kernel saw {saw_room}─", " ".repeat(before))
}

/// A node, indented, with its name where it is a subplan.
fn label(node: &PlanNode) -> String {
    let subplan = node.subplan.as_ref().map(|name| format!("{}: ", printable(name))).unwrap_or_default();
    format!("{}{subplan}{}", "  ".repeat(node.depth), printable(&node.label))
}

/// A text that fits into `room` columns, an ellipsis where it was cut.
fn shortened(text: &str, room: usize) -> String {
    if text.chars().count() <= room {
        return text.to_owned();
    }
    text.chars().take(room - 1).chain(['…']).collect()
}

/// A relation that was read, with what the plan knows of it.
struct Row<'a> {
    relation: &'a Relation,
    planned: Option<&'a PlanRelation>,
}

/// Columns of the table of relations.
fn relations_columns<'a>() -> [Column<Row<'a>>; 7] {
    [
        Column::name("RELATION", |row| shortened(&relation_name(row), MOST_NAME)),
        Column::figure("READS", |row| units::count(row.relation.io.reads)),
        Column::figure("BLOCKS", |row| relation_blocks(row.relation)),
        Column::figure("P50", |row| latency(&row.relation.io, |dist| dist.p50)),
        Column::figure("P99", |row| latency(&row.relation.io, |dist| dist.p99)),
        Column::figure("TOTAL", |row| latency(&row.relation.io, |dist| dist.sum)),
        Column::name("WHERE THE TIME WENT", |row| {
            known(stages::times(&row.relation.io).map(|times| shortened(&stages::shares(&times), MOST_NAME)))
        }),
    ]
}

fn write_relations(out: &mut dyn Write, report: &ExplainReport) -> io::Result<()> {
    let row = |relation| Row { relation, planned: planned(report, relation) };
    let rows: Vec<Row<'_>> = report.trace.relations.iter().map(row).collect();
    write_table(out, "Relations and files that the session read", &relations_columns(), &rows)
}

fn planned<'a>(report: &'a ExplainReport, relation: &Relation) -> Option<&'a PlanRelation> {
    let is_it = |planned: &&PlanRelation| {
        relation.schema.as_ref() == Some(&planned.schema) && relation.name.as_ref() == Some(&planned.name)
    };
    report.plan_relations.iter().find(is_it)
}

/// What people call a relation: TOAST relations by their tables, and forks other than the main one by their names.
fn relation_name(row: &Row<'_>) -> String {
    let Relation { schema, name: own, fork, relfilenode, file, .. } = row.relation;
    let of_table = |planned: &PlanRelation| {
        let table = planned.table.as_deref().map(printable)?;
        match planned.kind {
            RelationKind::Toast => Some(format!("toast of {table}")),
            RelationKind::ToastIndex => Some(format!("toast index of {table}")),
            RelationKind::Table | RelationKind::Index => None,
        }
    };
    let base = row.planned.and_then(of_table).unwrap_or_else(|| match (schema, own, relfilenode) {
        (Some(schema), Some(own), _) => format!("{}.{}", printable(schema), printable(own)),
        (.., Some(relfilenode)) => format!("relfilenode {relfilenode}"),
        _ => name(file.as_deref()),
    });
    match fork.as_deref() {
        None | Some("main") => base,
        Some(fork) => format!("{base} ({fork})"),
    }
}

/// Columns of the table of devices.
const DEVICES: [Column<Device>; 9] = [
    Column::name("DEVICE", |device| name(device.name.as_deref().or(Some(&device.dev)))),
    Column::figure("REQUESTS", |device| units::count(device.requests)),
    Column::figure("SIZE", |device| units::size(device.bytes)),
    Column::figure("MEAN SIZE", mean_size),
    Column::figure("DEPTH", depth),
    Column::figure("QUEUE P50", |device| known(device.block_queue_us.map(|dist| units::duration(dist.p50)))),
    Column::figure("DEVICE P50", |device| known(device.device_us.map(|dist| units::duration(dist.p50)))),
    Column::figure("DEVICE P99", |device| known(device.device_us.map(|dist| units::duration(dist.p99)))),
    Column::figure("OTHERS", |device| known(units::share(device.users.other_bytes, device.bytes))),
];

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::super::samples;
    use super::*;
    use crate::model::{NodeClaim, QuerySession};
    use crate::model::{Severity, Verdict};

    fn node(depth: usize, label: &str, claimed: u64, measured: Option<IoSummary>) -> PlanNode {
        PlanNode {
            depth,
            label: label.to_owned(),
            subplan: None,
            rows: Some(1_000_000.0),
            loops: 1.0,
            time_ms: Some(123.4),
            claimed: Some(NodeClaim { read_blocks: claimed, io_read_time_ms: Some(12.5) }),
            shares_relations: false,
            measured,
        }
    }

    fn report() -> ExplainReport {
        let trace = samples::full();
        let io = trace.methods[0].io.clone();
        let measured = IoSummary { exposed_us: Some(800_000.0), hidden_us: Some(1_600_000.0), ..io.clone() };
        let claimed = Claim {
            shared_read_blocks: 34_080,
            planning_read_blocks: 3,
            io_read_time_ms: Some(56.0),
            ..Claim::default()
        };
        let mut looped = node(
            2,
            "Index Scan using a_very_long_name_of_an_index on a_table_with_a_long_name t",
            4_000,
            None,
        );
        (looped.loops, looped.rows, looped.shares_relations) = (3.0, Some(2.5), true);
        let mut subplan = node(1, "Seq Scan on öffentlich", 0, Some(io.clone()));
        subplan.subplan = Some("InitPlan 1".to_owned());
        let never =
            PlanNode { rows: None, time_ms: None, loops: 0.0, claimed: None, ..node(1, "Result", 0, None) };
        ExplainReport {
            query: "SELECT 1".to_owned(),
            session: QuerySession {
                pid: 4242,
                database: "shop".to_owned(),
                user: "alice".to_owned(),
                allow_write: false,
                cold: true,
            },
            plan: RawValue::from_string(r#"[{"Plan":{"Node Type":"Aggregate"}}]"#.to_owned()).expect("JSON"),
            run_time_ms: 1_234.5,
            claimed,
            runs: vec![Run { run_time_ms: 1_234.5, claimed, measured: measured.clone(), is_reported: true }],
            measured,
            nodes: vec![
                node(0, "Aggregate", 0, None),
                subplan,
                node(1, "Seq Scan on orders", 30_077, Some(io)),
                looped,
                never,
            ],
            plan_relations: vec![PlanRelation {
                schema: "public".to_owned(),
                name: "orders".to_owned(),
                kind: RelationKind::Toast,
                table: Some("public.customers".to_owned()),
                nodes: vec![2],
            }],
            trace,
        }
    }

    fn written(report: &ExplainReport, width: usize) -> String {
        let mut out = Vec::new();
        write_explain(&mut out, report, width).expect("a vector takes everything");
        anstream::adapter::strip_str(&String::from_utf8(out).expect("reports are UTF-8")).to_string()
    }

    #[test]
    fn full_report() {
        insta::assert_snapshot!(written(&report(), WIDEST));
    }

    #[test]
    fn narrow_report_of_several_runs() {
        let mut report = report();
        let mut other = report.runs[0].clone();
        (other.is_reported, other.claimed.io_read_time_ms) = (false, None);
        report.runs.push(other);
        report.trace.verdicts = vec![Verdict {
            rule: "device-bound",
            severity: Severity::Problem,
            evidence: "71 % of the reads' time was with the device.".to_owned(),
            advice: "Try a faster device.".to_owned(),
        }];
        insta::assert_snapshot!(written(&report, NARROWEST));
    }

    #[test]
    fn a_query_that_read_nothing_is_no_line_of_dashes() {
        let mut report = report();
        report.measured.reads = 0;
        report.claimed = Claim::default();
        let text = written(&report, WIDEST);
        assert!(text.contains("The kernel saw  no read: all was in shared_buffers\n"), "{text}");
        assert!(
            text.contains("EXPLAIN claims  0 blocks read, no I/O time (track_io_timing is off)\n"),
            "{text}"
        );
    }

    #[test]
    fn no_line_is_wider_than_allowed() {
        for width in [10, 80, 90, 110, 300] {
            let text = written(&report(), width);
            let tables =
                text.lines().filter(|line| !line.starts_with("Note: ") && !line.starts_with("Cost: "));
            let too_wide: Vec<_> = tables.filter(|line| line.chars().count() > WIDEST).collect();
            assert!(too_wide.is_empty(), "{too_wide:#?}");
        }
    }

    #[test]
    fn the_json_has_the_plan_as_it_was() {
        let text = serde_json::to_string(&report()).expect("a report is JSON");
        assert!(
            text.contains(r#""plan":[{"Plan":{"Node Type":"Aggregate"}}],"run_time_ms":1234.5,"#),
            "{text}"
        );
        assert!(text.starts_with(r#"{"schema":"pgiotrace.explain/1","target":{"#), "{text}");
    }
}
