//! Tables to be read, what PostgreSQL counts of it, and where a report tells the same.

use anyhow::{Context as _, Result, bail, ensure};
use postgres::{Client, SimpleQueryMessage};
use serde_json::Value;

use crate::SlowDisk;

/// Rows of [`create_table`] in a block: a kilobyte each.
const ROWS_PER_BLOCK: u32 = 7;
/// Blocks in a mebibyte.
const BLOCKS_PER_MEBIBYTE: u32 = 128;

/// Makes a table `name (id int, filler text)` of that many mebibytes, vacuumed and written back.
///
/// # Errors
///
/// What the server says.
pub fn create_table(client: &mut Client, name: &str, mebibytes: u32) -> Result<()> {
    client.batch_execute(&format!("CREATE TABLE {name} (id int, filler text)"))?;
    fill_table(client, name, mebibytes)
}

/// Fills a table of [`create_table`]'s columns.
///
/// # Errors
///
/// What the server says.
pub fn fill_table(client: &mut Client, name: &str, mebibytes: u32) -> Result<()> {
    let rows = mebibytes * BLOCKS_PER_MEBIBYTE * ROWS_PER_BLOCK;
    // Not a string of one character, which would be stored compressed.
    let filler = "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 32) n)";
    let steps = [
        format!("ALTER TABLE {name} ALTER filler SET STORAGE PLAIN"),
        format!("INSERT INTO {name} SELECT i, f FROM {filler} AS filler(f), generate_series(1, {rows}) i"),
        format!("VACUUM {name}"),
        "CHECKPOINT".to_owned(),
    ];
    for step in steps {
        client.batch_execute(&step).with_context(|| format!("cannot fill table {name}: {step}"))?;
    }
    Ok(())
}

/// Makes the session's tables on a disk.
///
/// # Errors
///
/// What the server says.
pub fn use_disk(client: &mut Client, disk: &SlowDisk) -> Result<()> {
    let location = disk.tablespace_dir();
    client.batch_execute(&format!("CREATE TABLESPACE slow LOCATION '{}'", location.display()))?;
    client.batch_execute("SET default_tablespace = slow")?;
    Ok(())
}

/// Runs a query under `EXPLAIN (ANALYZE, BUFFERS)` and returns its topmost plan.
///
/// # Errors
///
/// What the server says.
pub fn explain(client: &mut Client, query: &str) -> Result<Value> {
    let explain = format!("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {query}");
    for message in client.simple_query(&explain).with_context(|| format!("cannot run {query}"))? {
        if let SimpleQueryMessage::Row(row) = message {
            let explained: Value = serde_json::from_str(row.get(0).unwrap_or_default())?;
            return Ok(explained[0]["Plan"].clone());
        }
    }
    bail!("EXPLAIN explained nothing of {query}")
}

/// Reads a whole table in one process and returns the blocks that were not in `shared_buffers`, as EXPLAIN counts them:
/// never 0, which would compare nothing.
///
/// # Errors
///
/// What the server says; and when it read nothing.
pub fn scan(client: &mut Client, table: &str) -> Result<u64> {
    client.batch_execute("SET max_parallel_workers_per_gather = 0")?;
    let plan = explain(client, &format!("SELECT count(*) FROM {table}"))?;
    let blocks = plan["Shared Read Blocks"].as_u64().context("EXPLAIN counts no blocks")?;
    ensure!(blocks > 0, "all of {table} was in shared_buffers");
    Ok(blocks)
}

/// PID of the process that serves a connection.
///
/// # Errors
///
/// What the server says.
pub fn backend_pid(client: &mut Client) -> Result<u32> {
    let pid: i32 = client.query_one("SELECT pg_backend_pid()", &[])?.get(0);
    Ok(pid.unsigned_abs())
}

/// A list of the report: "backends", "relations". No list is an empty one.
#[must_use]
pub fn list<'a>(report: &'a Value, key: &str) -> &'a [Value] {
    report[key].as_array().map(Vec::as_slice).unwrap_or_default()
}

/// What the report says of a table's main fork.
///
/// # Errors
///
/// When it has no such entry, or more than one.
pub fn relation<'a>(report: &'a Value, name: &str) -> Result<&'a Value> {
    let is_it = |entry: &&Value| entry["name"] == name && entry["fork"] == "main";
    let found: Vec<_> = list(report, "relations").iter().filter(is_it).collect();
    match found[..] {
        [entry] => Ok(entry),
        _ => bail!("the report has {} entries of relation {name}: {:#}", found.len(), report["relations"]),
    }
}

/// Blocks that the report tells of a table's main fork.
///
/// # Errors
///
/// As [`relation`].
pub fn blocks(report: &Value, name: &str) -> Result<u64> {
    relation(report, name)?["io"]["blocks"].as_u64().context("the relation's entry has no io.blocks")
}

/// What the report says of a disk's device.
///
/// # Errors
///
/// When it has no such entry.
pub fn device<'a>(report: &'a Value, disk: &SlowDisk) -> Result<&'a Value> {
    let (major, minor) = disk.device();
    let dev = format!("{major}:{minor}");
    let found = list(report, "devices").iter().find(|entry| entry["dev"] == dev);
    found.with_context(|| format!("the report has no device {dev}: {:#}", report["devices"]))
}

/// What the report says of the reads that a process wanted.
///
/// # Errors
///
/// When it has no such entry, or more than one.
pub fn backend(report: &Value, pid: u32) -> Result<&Value> {
    let found: Vec<_> = list(report, "backends").iter().filter(|entry| entry["pid"] == pid).collect();
    match found[..] {
        [entry] => Ok(entry),
        _ => bail!("the report has {} entries of backend {pid}: {:#}", found.len(), report["backends"]),
    }
}

/// The report's notes.
#[must_use]
pub fn notes(report: &Value) -> Vec<&str> {
    list(report, "notes").iter().filter_map(Value::as_str).collect()
}
