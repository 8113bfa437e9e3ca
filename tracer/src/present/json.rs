//! The JSON forms: one object on one line, so that reports can be appended to a file and read line by line.

use std::io::{self, Write};

use serde::Serialize;

use crate::model::{Comparison, DoctorReport, ExplainReport, StatReport};

/// Writes a `stat` report.
///
/// # Errors
///
/// When `out` cannot be written to.
pub fn write_stat(out: &mut dyn Write, report: &StatReport) -> io::Result<()> {
    write_line(out, report)
}

/// Writes a `doctor` report.
///
/// # Errors
///
/// When `out` cannot be written to.
pub fn write_doctor(out: &mut dyn Write, report: &DoctorReport) -> io::Result<()> {
    write_line(out, report)
}

/// Writes an `explain` report.
///
/// # Errors
///
/// When `out` cannot be written to.
pub fn write_explain(out: &mut dyn Write, report: &ExplainReport) -> io::Result<()> {
    write_line(out, report)
}

/// Writes a comparison of `explain` reports.
///
/// # Errors
///
/// When `out` cannot be written to.
pub fn write_comparison(out: &mut dyn Write, comparison: &Comparison) -> io::Result<()> {
    write_line(out, comparison)
}

fn write_line<T: Serialize>(out: &mut dyn Write, object: &T) -> io::Result<()> {
    serde_json::to_writer(&mut *out, object)?;
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    /// The form that is written, indented for the snapshot's reader.
    fn indented(report: &StatReport) -> String {
        let mut out = Vec::new();
        write_stat(&mut out, report).expect("a vector takes everything");
        let first_end = out.iter().position(|byte| *byte == b'\n');
        assert_eq!(first_end, Some(out.len() - 1), "one object, one line");
        let value: serde_json::Value = serde_json::from_slice(&out).expect("the report is JSON");
        serde_json::to_string_pretty(&value).expect("a value is JSON")
    }

    #[test]
    fn full_report() {
        insta::assert_snapshot!(indented(&samples::full()));
    }

    #[test]
    fn empty_report() {
        insta::assert_snapshot!(indented(&samples::empty()));
    }

    #[test]
    fn incomplete_ledger() {
        insta::assert_snapshot!(indented(&samples::incomplete()));
    }

    #[test]
    fn doctor_report() {
        let mut out = Vec::new();
        write_doctor(&mut out, &samples::doctor()).expect("a vector takes everything");
        insta::assert_snapshot!(String::from_utf8(out).expect("JSON is UTF-8"));
    }
}
