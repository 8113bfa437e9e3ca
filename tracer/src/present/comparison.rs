//! The text form of a comparison of `explain` reports.

use std::io::{self, Write};
use std::path::Path;

use super::printable::printable;
use super::stages::shortened;
use super::table::{Column, HEADING, known, write_table};
use super::text::{name, write_notes};
use crate::model::{ComparedFile, Comparison};
use crate::units;

/// Characters of the query.
const MOST_QUERY: usize = 100;

/// What PostgreSQL claims, and what the kernel saw.
const CLAIM_AND_TRUTH: [Column<ComparedFile>; 10] = [
    Column::name("FILE", file_name),
    Column::name("IO_METHOD", |file| name(file.io_method.as_deref())),
    Column::figure("RUN TIME", |file| units::duration(file.run_time_ms * 1e3)),
    Column::figure("CLAIMED", |file| units::count(file.claimed_blocks)),
    Column::figure("I/O TIME", |file| known(file.claimed_ms.map(|time| units::duration(time * 1e3)))),
    Column::figure("SEEN", |file| units::count(file.blocks)),
    Column::figure("READS", |file| units::count(file.reads)),
    Column::figure("P50", |file| time(file.p50_us)),
    Column::figure("P99", |file| time(file.p99_us)),
    Column::figure("TOTAL", |file| time(file.latency_sum_us)),
];

/// Where the kernel saw the time go.
const TIMES: [Column<ComparedFile>; 9] = [
    Column::name("FILE", file_name),
    Column::figure("DEVICE", |file| time(file.stages_us.device)),
    Column::figure("BLOCK QUEUE", |file| time(file.stages_us.block_queue)),
    Column::figure("CACHE", |file| time(file.stages_us.cache)),
    Column::figure("SUBMIT", |file| time(file.stages_us.submit)),
    Column::figure("EXPOSED", |file| time(file.exposed_us)),
    Column::figure("HIDDEN", |file| time(file.hidden_us)),
    Column::figure("IN FLIGHT", |file| known(file.depth.map(|depth| format!("{depth:.2}")))),
    Column::figure("FROM DEVICE", |file| known(file.device_share.map(units::percent))),
];

/// Writes the comparison.
///
/// # Errors
///
/// When `out` cannot be written to.
pub fn write_comparison(out: &mut dyn Write, comparison: &Comparison) -> io::Result<()> {
    let files = &comparison.files;
    if let Some(first) = files.first() {
        let words = first.query.split_whitespace().collect::<Vec<_>>().join(" ");
        let query: String = words.chars().take(MOST_QUERY).collect();
        let more = if query == words { "" } else { "…" };
        writeln!(out, "{}{more}", printable(&query))?;
    }
    write_table(
        out,
        "Blocks CLAIMED by EXPLAIN with its I/O TIME, and those SEEN by the kernel",
        &CLAIM_AND_TRUTH,
        files,
    )?;
    write_table(out, "Where the reads' time went, and what of it the query waited for", &TIMES, files)?;
    let with_verdicts = files.iter().filter(|file| !file.verdicts.is_empty());
    for (index, file) in with_verdicts.enumerate() {
        if index == 0 {
            writeln!(out, "\n{HEADING}Verdicts{HEADING:#}")?;
        }
        writeln!(out, "  {}: {}", file_name(file), printable(&file.verdicts.join(", ")))?;
    }
    write_notes(out, &comparison.notes)
}

/// The last part of the file's path.
fn file_name(file: &ComparedFile) -> String {
    let last = Path::new(&file.file).file_name().map(|last| last.to_string_lossy().into_owned());
    shortened(&printable(&last.unwrap_or_else(|| file.file.clone())))
}

fn time(micros: Option<f64>) -> String {
    known(micros.map(units::duration))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{COMPARISON_SCHEMA, ComparedStages};

    fn file(name: &str, method: &str, claimed_ms: Option<f64>) -> ComparedFile {
        ComparedFile {
            file: format!("/tmp/{name}"),
            server_version: "18.6".to_owned(),
            io_method: Some(method.to_owned()),
            query: "SELECT count(*)\nFROM t\n".to_owned(),
            run_time_ms: 578.6,
            claimed_blocks: 42_623,
            claimed_ms,
            reads: 2_845,
            blocks: 42_623,
            p50_us: Some(16.0),
            p99_us: Some(97.5),
            latency_sum_us: Some(702_000.0),
            stages_us: ComparedStages {
                device: Some(500_000.0),
                cache: Some(2_000.0),
                ..ComparedStages::default()
            },
            exposed_us: Some(300_000.0),
            hidden_us: Some(50_000.0),
            depth: Some(2.005),
            device_share: Some(0.25),
            verdicts: vec!["device-bound".to_owned(), "explain-misleads".to_owned()],
            is_complete: true,
        }
    }

    #[test]
    fn two_files() {
        let mut other = file("a-report-with-a-very-long-name.json", "sync", None);
        (other.verdicts, other.exposed_us) = (Vec::new(), None);
        let comparison = Comparison {
            schema: COMPARISON_SCHEMA,
            files: vec![file("io_uring.json", "io_uring", Some(52.6)), other],
            notes: vec!["the files are of different queries".to_owned()],
        };
        let mut out = Vec::new();
        write_comparison(&mut out, &comparison).expect("a vector takes everything");
        let text = String::from_utf8(out).expect("tables are UTF-8");
        insta::assert_snapshot!(anstream::adapter::strip_str(&text).to_string());
    }
}
