//! Verdicts: what the trace amounts to, above all tables; and where there is none, what was looked at.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use comfy_table::{ContentArrangement, Table, presets};

use super::printable::printable;
use super::table::HEADING;
use crate::model::{Severity, StatReport, Verdict};
use crate::units;
use crate::verdict::{self, FEWEST_READS, Scope};

/// Columns of a terminal that every line fits into.
const WIDTH: u16 = 80;
/// Column at which a rule's name begins, after its severity.
const SEVERITY_WIDTH: usize = 7;
/// What stands before a line: the severity of the first, as `doctor` shows a check's status.
const INDENT: usize = 2 + SEVERITY_WIDTH + 2;

/// Writes one paragraph a verdict, worst first.
pub fn write_verdicts(out: &mut dyn Write, report: &StatReport) -> io::Result<()> {
    writeln!(out)?;
    if report.verdicts.is_empty() {
        return write_wrapped(out, &format!("Verdict: no finding{}.", of_what(report)), 0);
    }
    writeln!(out, "{HEADING}Verdicts{HEADING:#}")?;
    report.verdicts.iter().try_for_each(|verdict| write_verdict(out, verdict))
}

/// One verdict: its rule, its evidence and what to try.
fn write_verdict(out: &mut dyn Write, verdict: &Verdict) -> io::Result<()> {
    let Verdict { rule, severity, evidence, advice } = verdict;
    let (word, style) = (severity.name(), style(*severity));
    writeln!(out, "  {style}{word:<SEVERITY_WIDTH$}  {rule}{style:#}")?;
    write_wrapped(out, evidence, INDENT)?;
    write_wrapped(out, &format!("→ {advice}"), INDENT)
}

/// How a severity is shown.
fn style(severity: Severity) -> Style {
    match severity {
        Severity::Info => AnsiColor::Cyan.on_default(),
        Severity::Warn => AnsiColor::Yellow.on_default(),
        Severity::Problem => AnsiColor::Red.on_default().bold(),
    }
}

/// What a missing finding is worth.
fn of_what(report: &StatReport) -> String {
    match verdict::scope(report) {
        Scope::Incomplete => ": the ledger is incomplete, or times in it contradict each other".to_owned(),
        Scope::SlowReadsOnly => {
            ": --min-latency leaves out the fast reads, so that no share of the time can be told".to_owned()
        }
        Scope::TooFew(reads) => format!(
            ": {} {} too few to judge by ({FEWEST_READS} are needed)",
            units::counted(reads, "read"),
            if reads == 1 { "is" } else { "are" },
        ),
        Scope::Judged { looked_at, not_known } => {
            let unknown = if not_known.is_empty() {
                String::new()
            } else {
                format!("; not known: {}", not_known.join(", "))
            };
            format!(" in {}{unknown}", looked_at.join(", "))
        }
    }
}

/// Writes a text in lines that fit a terminal, each after an indent.
fn write_wrapped(out: &mut dyn Write, text: &str, indent: usize) -> io::Result<()> {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(WIDTH - u16::try_from(indent).unwrap_or(0))
        .add_row([printable(text)]);
    for column in table.column_iter_mut() {
        column.set_padding((0, 0));
    }
    let indent = " ".repeat(indent);
    table.to_string().lines().try_for_each(|line| writeln!(out, "{indent}{}", line.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    fn styled(report: &StatReport) -> String {
        let mut out = Vec::new();
        write_verdicts(&mut out, report).expect("a vector takes everything");
        String::from_utf8(out).expect("reports are UTF-8")
    }

    fn written(report: &StatReport) -> String {
        anstream::adapter::strip_str(&styled(report)).to_string()
    }

    #[test]
    fn every_line_fits_a_terminal() {
        let mut report = samples::full();
        for text in [written(&report), written(&samples::empty())] {
            assert!(text.lines().all(|line| line.chars().count() <= usize::from(WIDTH)), "{text}");
        }
        report.verdicts[0].evidence = "データ".repeat(40);
        let narrow = |line: &str| line.trim_start().chars().count() * 2 + INDENT <= usize::from(WIDTH);
        assert!(
            written(&report).lines().filter(|line| line.contains('デ')).all(narrow),
            "{}",
            written(&report)
        );
    }

    #[test]
    fn verdicts_are_told_by_word_and_by_colour() {
        let text = styled(&samples::full());
        for severity in [Severity::Problem, Severity::Warn, Severity::Info] {
            let style = style(severity);
            assert!(text.contains(&format!("  {style}{:<SEVERITY_WIDTH$}  ", severity.name())), "{text:?}");
        }
    }

    #[test]
    fn no_finding_says_what_of() {
        let mut report = samples::full();
        report.verdicts.clear();
        assert!(
            written(&report).starts_with("\nVerdict: no finding in the block layer's queue, "),
            "{report:?}"
        );
        report.filter = Some(crate::model::FilterReport { min_latency_us: Some(5.0), ..Default::default() });
        assert!(written(&report).contains("--min-latency leaves out the fast reads"));
        let few = "\nVerdict: no finding: 0 reads are too few to judge by (100 are needed).\n";
        assert_eq!(written(&samples::empty()), few);
        assert!(written(&samples::incomplete()).contains("no finding: the ledger is incomplete"));
    }

    #[test]
    fn a_hostile_name_does_not_reach_the_terminal() {
        let mut report = samples::full();
        report.verdicts[0].evidence = "\u{1b}[2J\u{9b}1;1H\r\n".to_owned();
        let text = written(&report);
        assert!(text.chars().all(|character| character == '\n' || !character.is_control()), "{text:?}");
    }
}
