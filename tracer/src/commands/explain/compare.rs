//! `--compare`: saved reports, read back as far as they are compared.

use std::{fs, path::Path, process::ExitCode};

use anyhow::{anyhow, bail};
use serde::Deserialize;
use serde_json::Value;

use crate::{
    cli::CompareOptions,
    model::{COMPARISON_SCHEMA, ComparedFile, ComparedStages, Comparison, EXPLAIN_SCHEMA},
    present,
};

/// What the name of every version's schema begins with.
const SCHEMA_FAMILY: &str = "pgiotrace.explain/";

/// Runs the verb with `--compare`.
///
/// # Errors
///
/// When a file cannot be read or is no report, or the table cannot be written.
pub fn run(options: &CompareOptions, color: anstream::ColorChoice) -> anyhow::Result<ExitCode> {
    let files = options.files.iter().map(|path| read(path)).collect::<anyhow::Result<Vec<_>>>()?;
    let comparison = Comparison { schema: COMPARISON_SCHEMA, notes: notes(&files), files };
    present::deliver_comparison(&comparison, options.report.format, &options.report.destination, color)?;
    Ok(ExitCode::SUCCESS)
}

fn read(path: &Path) -> anyhow::Result<ComparedFile> {
    let file = path.display();
    let text = fs::read(path).map_err(|error| anyhow!("reading the saved report {file} failed: {error}"))?;
    parse(&file.to_string(), &text)
}

fn parse(file: &str, text: &[u8]) -> anyhow::Result<ComparedFile> {
    let damaged = |error: serde_json::Error| {
        anyhow!("{file} is no whole report of pgiotrace explain ({error}); save it again with --save")
    };
    // Nothing of the plan is needed, but it may be nested deeply.
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    deserializer.disable_recursion_limit();
    let report = Value::deserialize(&mut deserializer).map_err(damaged)?;
    deserializer.end().map_err(damaged)?;
    match report.get("schema").and_then(Value::as_str) {
        Some(EXPLAIN_SCHEMA) => {}
        Some(schema) if schema.starts_with(SCHEMA_FAMILY) => bail!(
            "{file} was saved by another version of pgiotrace ({schema}, and this one reads {EXPLAIN_SCHEMA}); compare it with that version"
        ),
        Some(schema) => {
            bail!("{file} is no report of pgiotrace explain but {schema:?}; save one with --save")
        }
        None => bail!("{file} is no report of pgiotrace: it has no schema; save one with explain --save"),
    }
    let saved: Saved = serde_json::from_value(report).map_err(damaged)?;
    Ok(saved.compared(file))
}

fn notes(files: &[ComparedFile]) -> Vec<String> {
    let mut notes = Vec::new();
    let differ = |what: fn(&ComparedFile) -> &str| files.iter().any(|file| what(file) != what(&files[0]));
    if differ(|file| file.query.trim()) {
        notes.push("the files are of different queries".to_owned());
    }
    if differ(|file| &file.server_version) {
        notes.push("the files are of different versions of PostgreSQL".to_owned());
    }
    for file in files.iter().filter(|file| !file.is_complete) {
        notes.push(format!("{}: reads were lost, so that its figures are too small", file.file));
    }
    notes
}

#[derive(Deserialize)]
struct Saved {
    target: Target,
    ledger: Ledger,
    query: String,
    run_time_ms: f64,
    claimed: Claimed,
    measured: Measured,
    verdicts: Vec<Named>,
}

#[derive(Deserialize)]
struct Target {
    server_version: String,
    io_method: Option<String>,
}

#[derive(Deserialize)]
struct Ledger {
    complete: bool,
}

#[derive(Deserialize)]
struct Claimed {
    shared_read_blocks: u64,
    io_read_time_ms: Option<f64>,
}

#[derive(Deserialize)]
struct Measured {
    reads: u64,
    blocks: u64,
    by_source: Option<Sources>,
    latency_us: Option<Dist>,
    stages_us: Stages,
    exposed_us: Option<f64>,
    hidden_us: Option<f64>,
}

#[derive(Deserialize)]
struct Sources {
    cache: u64,
    device: u64,
    mixed: u64,
}

#[derive(Deserialize)]
struct Dist {
    p50: f64,
    p99: f64,
    sum: f64,
}

#[derive(Deserialize)]
struct Stages {
    pg_queue: Option<Dist>,
    submit: Option<Dist>,
    cache: Option<Dist>,
    block_queue: Option<Dist>,
    device: Option<Dist>,
    wakeup: Option<Dist>,
}

#[derive(Deserialize)]
struct Named {
    rule: String,
}

impl Saved {
    fn compared(self, file: &str) -> ComparedFile {
        let Measured { reads, blocks, by_source, latency_us, stages_us, exposed_us, hidden_us } =
            self.measured;
        let sum = |dist: Option<Dist>| dist.map(|dist| dist.sum);
        let in_flight = exposed_us.zip(hidden_us).map(|(exposed, hidden)| exposed + hidden);
        let latency = latency_us.as_ref();
        let depth = latency.zip(in_flight.filter(|time| *time > 0.0)).map(|(dist, time)| dist.sum / time);
        let device_share = by_source.and_then(|Sources { cache, device, mixed }| {
            let all = cache + device + mixed;
            (all > 0).then(|| (device + mixed) as f64 / all as f64)
        });
        ComparedFile {
            file: file.to_owned(),
            server_version: self.target.server_version,
            io_method: self.target.io_method,
            query: self.query,
            run_time_ms: self.run_time_ms,
            claimed_blocks: self.claimed.shared_read_blocks,
            claimed_ms: self.claimed.io_read_time_ms,
            reads,
            blocks,
            p50_us: latency.map(|dist| dist.p50),
            p99_us: latency.map(|dist| dist.p99),
            latency_sum_us: latency.map(|dist| dist.sum),
            stages_us: ComparedStages {
                pg_queue: sum(stages_us.pg_queue),
                submit: sum(stages_us.submit),
                cache: sum(stages_us.cache),
                block_queue: sum(stages_us.block_queue),
                device: sum(stages_us.device),
                wakeup: sum(stages_us.wakeup),
            },
            exposed_us,
            hidden_us,
            depth,
            device_share,
            verdicts: self.verdicts.into_iter().map(|verdict| verdict.rule).collect(),
            is_complete: self.ledger.complete,
        }
    }
}
