//! What a report's books must show, whatever was traced.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::{Finished, scan::list};

/// The report of a run that ended well.
///
/// # Errors
///
/// When the tracer failed, or wrote no report; the error has what it said.
pub fn report_of(run: &Finished) -> Result<Value> {
    ensure!(run.status.success(), "pgiotrace failed ({}): {}", run.status, run.stderr.trim());
    run.report()
}

/// A number of the report, by its JSON pointer ("/ledger/pg_aios/rows").
///
/// # Errors
///
/// When it is not there, or no count.
pub fn count(report: &Value, pointer: &str) -> Result<u64> {
    let number = report.pointer(pointer).and_then(Value::as_u64);
    number.with_context(|| format!("the report tells no {pointer}: {:#}", report["ledger"]))
}

/// What is wrong with the books of a trace in which nothing went wrong; an empty list when all is well.
///
/// Every read must be accounted for, have ended well, and have an owner who is certain; and no row that was sampled from
/// `pg_aios` may contradict a traced read.
#[must_use]
pub fn complaints(report: &Value) -> Vec<String> {
    let ledger = &report["ledger"];
    let mut found = Vec::new();
    if ledger["complete"] != true {
        found.push(format!("the ledger is incomplete: {ledger}"));
    }
    for pointer in [
        "/lost",
        "/failed",
        "/inferred",
        "/ambiguous",
        "/unattributed",
        "/impossible",
        "/pg_aios/contradicted",
    ] {
        let number = ledger.pointer(pointer).unwrap_or(&Value::Null);
        if *number != 0 {
            found.push(format!("ledger{pointer} is {number}, not 0"));
        }
    }
    if ledger["exact"] != ledger["reads"] {
        found.push(format!("only {} of {} reads are exact", ledger["exact"], ledger["reads"]));
    }
    found
}

/// Blocks of all forks of a relation of the schema `public`, as traced.
#[must_use]
pub fn traced_blocks(report: &Value, name: &str) -> u64 {
    let is_it = |entry: &&Value| entry["name"] == name && entry["schema"] == "public";
    list(report, "relations").iter().filter(is_it).filter_map(|entry| entry["io"]["blocks"].as_u64()).sum()
}
