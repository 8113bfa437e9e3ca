//! The text form of a `doctor` report.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};

use super::printable::printable;
use crate::model::{Check, DoctorReport, Status};
use crate::units;

/// Headings of the areas.
const HEADING: Style = Style::new().bold();

/// Column at which the details of a check begin, after its status.
const STATUS_WIDTH: usize = 7;

/// Writes one line a check, and under it, when not all is well, what that costs and how to mend it.
///
/// # Errors
///
/// When `out` cannot be written to.
pub fn write_doctor(out: &mut dyn Write, report: &DoctorReport) -> io::Result<()> {
    let mut area = "";
    for check in &report.checks {
        if check.area != area {
            let gap = if area.is_empty() { "" } else { "\n" };
            area = check.area;
            writeln!(out, "{gap}{HEADING}{area}{HEADING:#}")?;
        }
        write_check(out, check)?;
    }
    writeln!(out, "\n{}", summary(&report.checks))?;
    writeln!(out, "{}", verdict(report))
}

fn write_check(out: &mut dyn Write, check: &Check) -> io::Result<()> {
    let (word, style) = status(check.status);
    let (name, detail) = (printable(&check.name), printable(&check.detail));
    let required = if check.required && check.status != Status::Ok { " (required)" } else { "" };
    writeln!(out, "  {style}{word:<STATUS_WIDTH$}{style:#}  {name}{required}: {detail}")?;
    let indent = " ".repeat(2 + STATUS_WIDTH + 2);
    if let Some(cost) = &check.cost {
        writeln!(out, "{indent}cost: {}", printable(cost))?;
    }
    if let Some(mend) = &check.mend {
        writeln!(out, "{indent}mend: {}", printable(mend))?;
    }
    Ok(())
}

/// The word for a status and how it is shown.
fn status(status: Status) -> (&'static str, Style) {
    match status {
        Status::Ok => ("ok", AnsiColor::Green.on_default()),
        Status::Missing => ("missing", AnsiColor::Yellow.on_default()),
        Status::Broken => ("broken", AnsiColor::Red.on_default().bold()),
    }
}

/// "5 checks: 3 ok, 1 missing, 1 broken".
fn summary(checks: &[Check]) -> String {
    let with = |status| checks.iter().filter(|check| check.status == status).count() as u64;
    let mut text = format!("{}: {} ok", units::counted(checks.len() as u64, "check"), with(Status::Ok));
    for (status, word) in [(Status::Missing, "missing"), (Status::Broken, "broken")] {
        let number = with(status);
        if number > 0 {
            text = format!("{text}, {number} {word}");
        }
    }
    text
}

/// Whether `stat` could run, and if not, for want of what.
fn verdict(report: &DoctorReport) -> String {
    if report.can_trace {
        return "pgiotrace stat can run here.".to_owned();
    }
    let lacking: Vec<_> = (report.checks.iter())
        .filter(|check| check.required && check.status != Status::Ok)
        .map(|check| printable(&check.name))
        .collect();
    if lacking.is_empty() {
        return "pgiotrace stat cannot run here.".to_owned();
    }
    format!("pgiotrace stat cannot run here before this is mended: {}.", lacking.join(", "))
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    fn written(report: &DoctorReport) -> String {
        let mut out = Vec::new();
        write_doctor(&mut out, report).expect("a vector takes everything");
        anstream::adapter::strip_str(&String::from_utf8(out).expect("reports are UTF-8")).to_string()
    }

    #[test]
    fn each_check_says_what_it_costs_and_how_to_mend_it() {
        insta::assert_snapshot!(written(&samples::doctor()), @"
        kernel
          ok       release: 6.12.0
          missing  BTF (required): /sys/kernel/btf/vmlinux is not there
                   cost: no program can be attached
                   mend: boot a kernel with CONFIG_DEBUG_INFO_BTF=y

        server
          ok       version: 18.1
          broken   rights: dba is no member of pg_monitor
                   cost: names of relations are missing
                   mend: GRANT pg_monitor TO dba

        4 checks: 2 ok, 1 missing, 1 broken
        pgiotrace stat cannot run here before this is mended: BTF.
        ");
    }

    #[test]
    fn all_is_well() {
        let mut report = samples::doctor();
        report.checks.retain(|check| check.status == Status::Ok);
        report.can_trace = true;
        insta::assert_snapshot!(written(&report), @"
        kernel
          ok       release: 6.12.0

        server
          ok       version: 18.1

        2 checks: 2 ok
        pgiotrace stat can run here.
        ");
    }
}
