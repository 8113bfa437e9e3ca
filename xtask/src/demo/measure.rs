//! One cold run under the tracer.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use pgiotrace_tests::{Cluster, Tracer};
use serde_json::Value;

const TABLE: &str = "pgbench_accounts";
const QUERY: &str = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT count(abalance) FROM pgbench_accounts";

/// What one method's run showed.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    pub method: String,
    /// The query's run time, milliseconds.
    pub run_ms: f64,
    /// What EXPLAIN says about the time spent in shared reads, milliseconds.
    pub claimed_ms: f64,
    /// What EXPLAIN says about the blocks read.
    pub claimed_blocks: u64,
    /// What the kernel saw; `None` when no read of the table was traced.
    pub traced: Option<Traced>,
}

/// The table's reads as traced.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Traced {
    pub reads: u64,
    pub blocks: u64,
    /// Latencies in microseconds.
    pub sum_us: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub max_us: f64,
    /// Who executed the reads.
    pub executors: String,
}

/// Runs the query with cold caches under `pgiotrace stat`.
pub(super) fn cold_count(cluster: &Cluster, method: &str, tracer: &Path) -> Result<Row> {
    cluster.drop_caches()?;
    let query = cluster.psql_command(&["-q", "-A", "-t", "-c", QUERY]);
    let run = Tracer::stat(cluster).binary(tracer.to_owned()).run(&query)?;
    ensure!(run.status.success(), "pgiotrace failed ({}): {}", run.status, run.stderr.trim());
    let plan: Value = serde_json::from_str(&run.stdout).context("EXPLAIN's output is no JSON")?;
    row(method, &plan, &run.report()?)
        .with_context(|| format!("cannot read what the run under {method} printed"))
}

fn row(method: &str, explain: &Value, report: &Value) -> Result<Row> {
    let (query, plan) = (&explain[0], &explain[0]["Plan"]);
    // Before PostgreSQL 17 there was one time for shared and local reads together.
    let claimed_ms = plan["Shared I/O Read Time"].as_f64().or_else(|| plan["I/O Read Time"].as_f64());
    let of_table = |relation: &&Value| relation["name"] == TABLE && relation["fork"] == "main";
    let relation =
        report["relations"].as_array().context("the report has no relations")?.iter().find(of_table);
    Ok(Row {
        method: method.to_owned(),
        run_ms: query["Execution Time"].as_f64().context("EXPLAIN tells no execution time")?,
        claimed_ms: claimed_ms.context("EXPLAIN tells no time of its reads: is track_io_timing on?")?,
        claimed_blocks: plan["Shared Read Blocks"].as_u64().context("EXPLAIN tells no blocks")?,
        traced: relation.map(|relation| traced(&relation["io"], report)).transpose()?,
    })
}

fn traced(io: &Value, report: &Value) -> Result<Traced> {
    let count = |key: &str| io[key].as_u64().with_context(|| format!("the report's relation has no {key}"));
    let latency = |key: &str| {
        io["latency_us"][key]
            .as_f64()
            .with_context(|| format!("the report's relation has no latency_us.{key}"))
    };
    Ok(Traced {
        reads: count("reads")?,
        blocks: count("blocks")?,
        sum_us: latency("sum")?,
        p50_us: latency("p50")?,
        p99_us: latency("p99")?,
        max_us: latency("max")?,
        executors: executors(&io["by_executor"], &workers(report)),
    })
}

/// Numbers of the io workers that executed reads.
fn workers(report: &Value) -> Vec<u64> {
    let all = report["io_workers"].as_array().map(Vec::as_slice).unwrap_or_default();
    let busy = all.iter().filter(|worker| worker["io"]["reads"].as_u64().is_some_and(|reads| reads > 0));
    let mut numbers: Vec<_> = busy.filter_map(|worker| worker["worker"].as_u64()).collect();
    numbers.sort_unstable();
    numbers
}

/// Who executed the reads, with their shares.
fn executors(by_executor: &Value, workers: &[u64]) -> String {
    let count = |key: &str| by_executor[key].as_u64().unwrap_or(0);
    let numbers: Vec<_> = workers.iter().map(u64::to_string).collect();
    let parties = [
        (count("owner"), "backend".to_owned()),
        (count("io_worker"), format!("io workers {}", numbers.join(","))),
        (count("iou_wrk"), "iou-wrk".to_owned()),
    ];
    let total: u64 = parties.iter().map(|(reads, _)| reads).sum();
    let share = |(reads, who): &(u64, String)| format!("{} {}", who.trim_end(), percent(*reads, total));
    let mut busy: Vec<_> = parties.iter().filter(|(reads, _)| *reads > 0).collect();
    busy.sort_by_key(|(reads, _)| std::cmp::Reverse(*reads));
    busy.into_iter().map(share).collect::<Vec<_>>().join(", ")
}

/// A share for people: what is not all and not nothing never reads 100 or 0.
fn percent(part: u64, total: u64) -> String {
    let share = part as f64 * 100.0 / total.max(1) as f64;
    if part == total {
        "100 %".to_owned()
    } else if share > 99.0 {
        ">99 %".to_owned()
    } else if share < 1.0 {
        "<1 %".to_owned()
    } else {
        format!("{share:.0} %")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_run_is_read_from_both_reports() -> Result<()> {
        let explain = json!([{"Plan": {"Shared Read Blocks": 42635, "Shared I/O Read Time": 56.5}, "Execution Time": 900.25}]);
        let dist = json!({"sum": 5000.0, "p50": 10.0, "p99": 90.0, "max": 99.0});
        let by_executor = json!({"owner": 1, "io_worker": 2664, "iou_wrk": 0});
        let io = json!({"reads": 2665, "blocks": 42635, "latency_us": dist, "by_executor": by_executor});
        let report = json!({
            "relations": [
                {"name": "pgbench_accounts", "fork": "vm", "io": {}},
                {"name": "pgbench_accounts", "fork": "main", "io": io},
            ],
            "io_workers": [
                {"worker": 1, "io": {"reads": 9}}, {"worker": 0, "io": {"reads": 9}}, {"worker": 2, "io": {"reads": 0}},
            ],
        });
        let row = row("worker", &explain, &report)?;
        let traced = row.traced.context("the table was traced")?;
        assert_eq!((traced.blocks, row.claimed_blocks), (42635, 42635));
        assert_eq!(traced.executors, "io workers 0,1 >99 %, backend <1 %");
        Ok(())
    }

    #[test]
    fn a_table_that_was_not_traced_is_not_zero() -> Result<()> {
        let explain =
            json!([{"Plan": {"Shared Read Blocks": 1, "I/O Read Time": 0.5}, "Execution Time": 1.0}]);
        assert_eq!(row("sync", &explain, &json!({"relations": []}))?.traced, None);
        Ok(())
    }
}
