//! Reports for people and for programs: one form a file.
//!
//! The forms are pure: they write a report to whatever they are given. [`output`] decides where that goes.

mod activity;
mod comparison;
mod csv;
mod devices;
mod doctor;
mod explain;
mod json;
pub mod output;
mod pg_stats;
mod printable;
#[cfg(test)]
mod samples;
mod stages;
mod table;
mod text;
mod verdicts;

use std::io::{self, Write};

use anstream::ColorChoice;
pub use output::{Destination, OutputError};
pub use printable::printable;
pub use table::{NOT_MEASURED, TOP_ROWS};

use crate::model::{Comparison, DoctorReport, ExplainReport, StatReport};

/// Form of a report.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Aligned tables for people, the top 20 rows of each.
    #[default]
    Text,
    /// One JSON object on one line, with everything.
    Json,
    /// One row per method, backend, io worker, relation and device; only for stat.
    Csv,
}

impl Format {
    /// Data is delivered byte by byte as it was written; only text has styles to strip.
    fn styles(self, color: ColorChoice) -> ColorChoice {
        if self == Self::Text { color } else { ColorChoice::AlwaysAnsi }
    }
}

/// Delivers a `stat` report to `destination`, whole or not at all.
///
/// # Errors
///
/// As [`Destination::write`].
pub fn deliver_stat(
    report: &StatReport,
    format: Format,
    destination: &Destination,
    color: ColorChoice,
) -> Result<(), OutputError> {
    destination.write(format.styles(color), |out| write_stat(out, report, format))
}

/// Delivers a `doctor` report to `destination`, whole or not at all.
///
/// # Errors
///
/// As [`Destination::write`]; also for CSV, which `doctor` does not have and the command line refuses.
pub fn deliver_doctor(
    report: &DoctorReport,
    format: Format,
    destination: &Destination,
    color: ColorChoice,
) -> Result<(), OutputError> {
    destination.write(format.styles(color), |out| write_doctor(out, report, format))
}

/// Delivers an `explain` report to `destination`, whole or not at all.
///
/// # Errors
///
/// As [`Destination::write`]; also for CSV, which `explain` does not have and the command line refuses.
pub fn deliver_explain(
    report: &ExplainReport,
    format: Format,
    destination: &Destination,
    color: ColorChoice,
) -> Result<(), OutputError> {
    let width = destination.width().unwrap_or(explain::WIDEST);
    destination.write(format.styles(color), |out| match format {
        Format::Text => explain::write_explain(out, report, width),
        Format::Json => json::write_explain(out, report),
        Format::Csv => Err(io::Error::new(io::ErrorKind::Unsupported, "explain has no CSV form")),
    })
}

/// Delivers a comparison of `explain` reports to `destination`, whole or not at all.
///
/// # Errors
///
/// As [`deliver_explain`].
pub fn deliver_comparison(
    comparison: &Comparison,
    format: Format,
    destination: &Destination,
    color: ColorChoice,
) -> Result<(), OutputError> {
    destination.write(format.styles(color), |out| match format {
        Format::Text => comparison::write_comparison(out, comparison),
        Format::Json => json::write_comparison(out, comparison),
        Format::Csv => Err(io::Error::new(io::ErrorKind::Unsupported, "explain has no CSV form")),
    })
}

/// Writes a `stat` report in `format`. Text carries ANSI styles: pass a stream that strips them where they are not
/// wanted, as [`deliver_stat`] does.
///
/// # Errors
///
/// When `out` cannot be written to.
pub fn write_stat(out: &mut dyn Write, report: &StatReport, format: Format) -> io::Result<()> {
    match format {
        Format::Text => text::write_stat(out, report),
        Format::Json => json::write_stat(out, report),
        Format::Csv => csv::write_stat(out, report),
    }
}

/// Writes a `doctor` report in `format`, with ANSI styles as [`write_stat`] does.
///
/// # Errors
///
/// When `out` cannot be written to, or with [`io::ErrorKind::Unsupported`] for CSV, which the command line refuses.
pub fn write_doctor(out: &mut dyn Write, report: &DoctorReport, format: Format) -> io::Result<()> {
    match format {
        Format::Text => doctor::write_doctor(out, report),
        Format::Json => json::write_doctor(out, report),
        Format::Csv => Err(io::Error::new(io::ErrorKind::Unsupported, "doctor has no CSV form")),
    }
}
