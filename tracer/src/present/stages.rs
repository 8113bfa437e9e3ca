//! Where the time of reads went: one stacked bar a method and one a backend.

use std::io::{self, Write};

use anstyle::{AnsiColor, Color, Style};

use super::printable::printable;
use super::table::{Column, HEADING, NOT_MEASURED, known, lay_out};
use crate::model::{Backend, Bounds, BySource, Dist, IoSummary, Stages, StatReport};
use crate::server::connect::APPLICATION_NAME;
use crate::units;

/// Backends that have a bar; the report is sorted, so these are the busiest.
const BACKENDS_SHOWN: usize = 10;

/// Backends that are named because they found the io workers' queue full.
const FALLBACKS_SHOWN: usize = 3;

/// Characters of what identifies a backend.
const LABEL_LENGTH: usize = 24;

/// Cells of a bar.
const BAR_WIDTH: usize = 30;

/// Parts of a time: the stages and what none of them covers.
const PARTS: usize = 7;

/// The least share of the time that is put in words.
const LEAST_SHARE: f64 = 0.005;

/// A part of the reads' time, as it is shown.
struct Part {
    /// Its cell of a bar, which must carry it alone where there is no colour.
    letter: char,
    word: &'static str,
    legend: &'static str,
    style: Style,
}

/// The stages in the order of time, and last what no stage covers.
const SHOWN: [Part; PARTS] = [
    part('P', "pg queue", "PostgreSQL's queue", AnsiColor::Magenta),
    part('S', "submit", "submission", AnsiColor::Cyan),
    part('C', "cache", "page cache and copy", AnsiColor::Green),
    part('Q', "block queue", "block layer's queue", AnsiColor::Yellow),
    part('D', "device", "device", AnsiColor::Red),
    part('W', "wakeup", "wakeup", AnsiColor::Blue),
    part('?', "not measured", "not measured", AnsiColor::White),
];

const fn part(letter: char, word: &'static str, legend: &'static str, color: AnsiColor) -> Part {
    let style = Style::new().fg_color(Some(Color::Ansi(AnsiColor::Black))).bg_color(Some(Color::Ansi(color)));
    Part { letter, word, legend, style }
}

/// A set of reads that has a bar.
struct Line<'a> {
    label: String,
    io: &'a IoSummary,
}

/// What stands before the bars.
fn columns<'a>() -> [Column<Line<'a>>; 2] {
    [
        Column::name("READS", |line| line.label.clone()),
        Column::figure("TOTAL", |line| known(line.io.latency_us.map(|dist| units::duration(dist.sum)))),
    ]
}

/// Writes the bars with a legend, and who executed reads because the io workers' queue was full; nothing when nothing
/// was read.
pub fn write_stages(out: &mut dyn Write, report: &StatReport) -> io::Result<()> {
    let methods = report
        .methods
        .iter()
        .map(|totals| Line { label: format!("method {}", totals.method), io: &totals.io });
    // The tracer's own sessions stand in the table of backends.
    let is_own = |backend: &&Backend| backend.application_name.as_deref() == Some(APPLICATION_NAME);
    let with_reads = report.backends.iter().filter(|backend| backend.io.reads > 0 && !is_own(backend));
    let backends = with_reads.clone().map(|backend| Line { label: label(backend), io: &backend.io });
    let lines: Vec<Line<'_>> = methods.chain(backends.take(BACKENDS_SHOWN)).collect();
    if lines.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{HEADING}Where the time went{HEADING:#}")?;
    let laid_out = lay_out(&columns(), &lines);
    let mut rows = laid_out.lines();
    let headings = rows.next().unwrap_or_default();
    writeln!(out, "{HEADING}{headings}  STAGES{HEADING:#}")?;
    // Headings have narrow characters only, and the last column is aligned right: all rows are as wide.
    let indent = " ".repeat(headings.chars().count() + 2);
    for (row, line) in rows.zip(&lines) {
        write_line(out, row, line.io)?;
        let bounds = bounds(&line.io.bounds_us);
        let bounds = (!bounds.is_empty()).then(|| format!("bounds: {}", bounds.join(", ")));
        for details in [details(line.io), bounds].into_iter().flatten() {
            writeln!(out, "{indent}{details}")?;
        }
    }
    let hidden = with_reads.count().saturating_sub(BACKENDS_SHOWN);
    if hidden > 0 {
        writeln!(out, "  … {} more", units::counted(hidden as u64, "backend"))?;
    }
    if lines.iter().any(|line| times(line.io).is_some()) {
        write_legend(out)?;
    }
    match fallbacks(&report.backends) {
        Some(fallbacks) => writeln!(out, "  {fallbacks}"),
        None => Ok(()),
    }
}

/// One set of reads: its bar and the shares in words.
fn write_line(out: &mut dyn Write, row: &str, io: &IoSummary) -> io::Result<()> {
    let Some(times) = times(io) else { return writeln!(out, "{row}  not measured") };
    write!(out, "{row}  ")?;
    write_bar(out, &times, BAR_WIDTH)?;
    writeln!(out, "  {}", shares(&times))
}

/// The parts of a time, as letters in colours.
pub(super) fn write_bar(out: &mut dyn Write, times: &[f64; PARTS], width: usize) -> io::Result<()> {
    for (part, cells) in SHOWN.iter().zip(bar(times, width)) {
        if cells > 0 {
            write_cells(out, part, cells)?;
        }
    }
    Ok(())
}

/// Microseconds of each part of the reads' time; `None` when no stage was measured.
pub(super) fn times(io: &IoSummary) -> Option<[f64; PARTS]> {
    let Stages { pg_queue, submit, cache, block_queue, device, wakeup } = &io.stages_us;
    let stages = [pg_queue, submit, cache, block_queue, device, wakeup];
    if stages.iter().all(|stage| stage.is_none()) {
        return None;
    }
    let mut times = [0.0; PARTS];
    for (time, stage) in times.iter_mut().zip(stages) {
        *time = stage.map_or(0.0, |dist| dist.sum);
    }
    let covered: f64 = times.iter().sum();
    times[PARTS - 1] = (io.latency_us.map_or(0.0, |dist| dist.sum) - covered).max(0.0);
    Some(times)
}

fn write_cells(out: &mut dyn Write, part: &Part, cells: usize) -> io::Result<()> {
    let Part { letter, style, .. } = part;
    write!(out, "{style}{}{style:#}", String::from(*letter).repeat(cells))
}

/// Divides `width` cells in the ratio of `weights`, by the largest remainder: the cells add up to the width, unless there
/// is no weight at all, and each is less than one cell from its true part.
fn bar<const N: usize>(weights: &[f64; N], width: usize) -> [usize; N] {
    let total: f64 = weights.iter().sum();
    if total <= 0.0 || !total.is_finite() {
        return [0; N];
    }
    let exact = weights.map(|weight| weight / total * width as f64);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "cells of a bar are few and never negative"
    )]
    let mut cells = exact.map(|cells| cells.floor() as usize);
    let remainder = |index: usize| exact[index].fract();
    let mut by_remainder: [usize; N] = std::array::from_fn(|index| index);
    by_remainder.sort_by(|a, b| remainder(*b).total_cmp(&remainder(*a)));
    let left = width.saturating_sub(cells.iter().sum());
    for index in by_remainder.into_iter().take(left) {
        cells[index] += 1;
    }
    cells
}

/// `device 71 % · block queue 12 % · cache 9 %`, largest first, and last what was not measured.
pub(super) fn shares(times: &[f64; PARTS]) -> String {
    let total: f64 = times.iter().sum();
    let mut shown: Vec<(usize, f64)> = times.iter().map(|time| time / total).enumerate().collect();
    shown.retain(|(_, share)| *share >= LEAST_SHARE);
    shown.sort_by(|(a, share_a), (b, share_b)| {
        let is_unknown = |index: usize| index == PARTS - 1;
        is_unknown(*a).cmp(&is_unknown(*b)).then(share_b.total_cmp(share_a))
    });
    let words =
        shown.into_iter().map(|(index, share)| format!("{} {}", SHOWN[index].word, units::percent(share)));
    words.collect::<Vec<_>>().join(" · ")
}

/// Where the bytes came from and how much of the time the owner waited; `None` where nothing of it is known.
pub(super) fn details(io: &IoSummary) -> Option<String> {
    let mut details = Vec::new();
    details.extend(io.by_source.map(|by_source| sources(&by_source)));
    details
        .extend(io.readahead_hits.filter(|hits| *hits > 0).map(|hits| units::counted(hits, "readahead hit")));
    details.extend(io.exposed_us.map(|exposed| format!("exposed {}", units::duration(exposed))));
    details.extend(io.hidden_us.map(|hidden| format!("hidden {}", units::duration(hidden))));
    (!details.is_empty()).then(|| details.join(", "))
}

/// `25 % of reads from the device, 5 % in part`.
fn sources(by_source: &BySource) -> String {
    let BySource { cache, device, mixed, unknown: _ } = *by_source;
    let reads = cache + device + mixed;
    if device + mixed == 0 {
        return "all reads from the page cache".to_owned();
    }
    let share = |part: u64| units::percent(part as f64 / reads as f64);
    let whole = format!("{} of reads from the device", share(device));
    if mixed > 0 { format!("{whole}, {} in part", share(mixed)) } else { whole }
}

/// What is only bounded: of how many reads, and by how much; one text a bound.
pub(super) fn bounds(bounds: &Bounds) -> Vec<String> {
    let Bounds { pg_queue_at_least, owner_wakeup_at_most } = bounds;
    let bound = |what: &str, dist: &Dist| {
        let [p50, p99] = [dist.p50, dist.p99].map(units::duration);
        format!("{what} {p50} (P99 {p99}, of {})", units::counted(dist.count, "read"))
    };
    let queue = pg_queue_at_least.as_ref().map(|dist| bound("pg queue at least", dist));
    let wakeup =
        owner_wakeup_at_most.as_ref().map(|dist| bound("the owner ran after the read's end at most", dist));
    [queue, wakeup].into_iter().flatten().collect()
}

fn write_legend(out: &mut dyn Write) -> io::Result<()> {
    for (index, part) in SHOWN.iter().enumerate() {
        write!(out, "{}", if index == 0 { "  " } else { " · " })?;
        write_cells(out, part, 1)?;
        write!(out, " {}", part.legend)?;
    }
    writeln!(out)
}

/// Who executed reads itself because the io workers' queue was full; `None` where nobody did, or it is not known.
fn fallbacks(backends: &[Backend]) -> Option<String> {
    let counts = backends.iter().map(|backend| (backend.pid, backend.io.queue_full_fallbacks.unwrap_or(0)));
    let mut counts: Vec<(u32, u64)> = counts.filter(|(_, reads)| *reads > 0).collect();
    counts.sort_by_key(|(pid, reads)| (std::cmp::Reverse(*reads), *pid));
    let named = counts.iter().take(FALLBACKS_SHOWN);
    let mut words: Vec<String> = named
        .map(|(pid, reads)| format!("{pid} executed {} itself", units::counted(*reads, "read")))
        .collect();
    let others = counts.get(FALLBACKS_SHOWN..).unwrap_or_default();
    if !others.is_empty() {
        let reads = others.iter().map(|(_, reads)| reads).sum();
        words.push(format!(
            "{} more executed {}",
            units::count(others.len() as u64),
            units::counted(reads, "read")
        ));
    }
    (!words.is_empty()).then(|| format!("{} because the io workers' queue was full.", words.join(", ")))
}

/// The PID of a backend and, shortly, what tells it from others.
fn label(backend: &Backend) -> String {
    let kind = backend.backend_type.as_deref().filter(|kind| !kind.is_empty());
    let application = backend.application_name.as_deref().filter(|name| !name.is_empty());
    // Parallel workers bear their leader's application name.
    let what = match backend.leader_pid {
        Some(leader) if leader != backend.pid => Some(format!("{} of {leader}", kind.unwrap_or("worker"))),
        _ => application.or(kind).map(|what| printable(what).into_owned()),
    };
    match what {
        Some(what) => format!("{} {}", backend.pid, shortened(&what)),
        None => format!("{} {NOT_MEASURED}", backend.pid),
    }
}

/// The beginning of a text that is too long.
pub(super) fn shortened(text: &str) -> String {
    match text.char_indices().nth(LABEL_LENGTH) {
        Some(_) => text.chars().take(LABEL_LENGTH - 1).chain(['…']).collect(),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;
    use crate::model::MethodTotals;

    fn styled(report: &StatReport) -> String {
        let mut out = Vec::new();
        write_stages(&mut out, report).expect("a vector takes everything");
        String::from_utf8(out).expect("reports are UTF-8")
    }

    fn written(report: &StatReport) -> String {
        anstream::adapter::strip_str(&styled(report)).to_string()
    }

    #[test]
    fn cells_always_add_up_to_the_width() {
        proptest::proptest!(|(weights in proptest::array::uniform7(0.0..1e12_f64), width in 0..200_usize)| {
            let cells = bar(&weights, width);
            let total: f64 = weights.iter().sum();
            assert_eq!(cells.iter().sum::<usize>(), if total > 0.0 { width } else { 0 });
            for (cells, weight) in cells.iter().zip(weights) {
                assert!((*cells as f64 - weight / total * width as f64).abs() < 1.0, "{cells} of {weight}");
            }
        });
    }

    #[test]
    fn cells_go_to_the_largest_remainders() {
        assert_eq!(bar(&[1.0, 1.0, 1.0], 10), [4, 3, 3]);
        assert_eq!(bar(&[71.0, 12.0, 9.0, 5.0, 3.0], 30), [21, 4, 3, 1, 1]);
        // A stage that has time, but less than a cell, may have none.
        assert_eq!(bar(&[1.0, 999.0], 30), [0, 30]);
        assert_eq!(bar(&[0.0, 0.0], 30), [0, 0]);
        assert_eq!(bar(&[f64::NAN, 1.0], 30), [0, 0]);
    }

    #[test]
    fn the_largest_share_is_named_first_and_what_was_not_measured_last() {
        assert_eq!(
            shares(&[0.0, 5.0, 9.0, 12.0, 21.0, 3.0, 50.0]),
            "device 21 % · block queue 12 % · cache 9 % · submit 5 % · wakeup 3 % · not measured 50 %"
        );
        assert_eq!(shares(&[0.0, 0.4, 0.0, 0.0, 99.6, 0.0, 0.0]), "device >99 %");
    }

    #[test]
    fn a_time_that_no_stage_covers_is_not_measured() {
        let mut io = samples::full().methods[0].io.clone();
        let covered = times(&io).expect("stages are known");
        io.stages_us.device = None;
        let uncovered = times(&io).expect("stages are known");
        assert!((uncovered[6] - covered[6] - covered[4]).abs() < 1.0, "{covered:?} {uncovered:?}");
        io.stages_us = Stages::default();
        assert_eq!(times(&io), None);
    }

    #[test]
    fn each_part_has_its_own_letter_and_colour() {
        for (index, part) in SHOWN.iter().enumerate() {
            for other in &SHOWN[index + 1..] {
                assert_ne!((part.letter, part.word), (other.letter, other.word));
                assert_ne!(part.style, other.style);
            }
        }
        assert!(styled(&samples::full()).contains(&format!("{}", SHOWN[4].style)));
    }

    #[test]
    fn backends_beyond_the_busiest_are_counted() {
        let mut report = samples::full();
        let busiest = report.backends[0].clone();
        report.backends = vec![busiest; BACKENDS_SHOWN + 2];
        let text = written(&report);
        assert_eq!(text.matches("4243 parallel").count(), BACKENDS_SHOWN);
        assert!(text.contains("\n  … 2 backends more\n"), "{text}");
    }

    #[test]
    fn nothing_is_shown_of_backends_that_read_nothing() {
        let mut report = samples::full();
        report.methods.clear();
        for backend in &mut report.backends {
            backend.io.reads = 0;
        }
        assert_eq!(written(&report), "");
    }

    #[test]
    fn reads_of_which_only_counts_are_left_show_no_figure_of_stages() {
        let full = samples::full();
        let unknown = full.backends.last().expect("samples have backends");
        let methods = vec![MethodTotals { method: "sync", io: unknown.io.clone() }];
        let report = StatReport { methods, backends: vec![unknown.clone()], ..samples::empty() };
        insta::assert_snapshot!(written(&report));
    }

    #[test]
    fn those_who_found_the_queue_full_are_named_with_their_reads() {
        let mut backends = samples::full().backends;
        for (backend, reads) in backends.iter_mut().zip([None, Some(60), Some(0), Some(1)]) {
            backend.io.queue_full_fallbacks = reads;
        }
        let expected = "4242 executed 60 reads itself, 51 executed 1 read itself because the io workers' queue was full.";
        assert_eq!(fallbacks(&backends).as_deref(), Some(expected));
        for backend in &mut backends {
            backend.io.queue_full_fallbacks = Some(2);
        }
        let text = fallbacks(&backends).expect("there are some");
        assert!(text.contains("4243 executed 2 reads itself, 1 more executed 2 reads because"), "{text}");
        for backend in &mut backends {
            backend.io.queue_full_fallbacks = Some(0);
        }
        assert_eq!(fallbacks(&backends), None);
    }

    #[test]
    fn long_names_are_shortened() {
        assert_eq!(shortened("データ"), "データ");
        assert_eq!(shortened("a report with a name that goes on"), "a report with a name th…");
    }
}
