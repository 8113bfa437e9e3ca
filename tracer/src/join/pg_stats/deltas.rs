//! From two looks at counters to what was counted between them.

use std::{collections::HashMap, hash::Hash, time::SystemTime};

use crate::{
    capture::statistics::{IoRow, Operations},
    model::{ClaimedOperations, PgStatIoContext, mean_us},
};

/// The counters were reset between the looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WasReset;

/// What was counted since, if the counters were not reset. Without counters before, they began at 0.
pub(super) fn since(
    before: Option<(Operations, Option<SystemTime>)>,
    after: (Operations, Option<SystemTime>),
) -> Result<Operations, WasReset> {
    let (now, reset_now) = after;
    let Some((then, reset_then)) = before else { return Ok(now) };
    if reset_then != reset_now {
        return Err(WasReset);
    }
    operations(then, now)
}

fn operations(then: Operations, now: Operations) -> Result<Operations, WasReset> {
    let grown = |then: u64, now: u64| now.checked_sub(then).ok_or(WasReset);
    Ok(Operations {
        count: grown(then.count, now.count)?,
        bytes: now.bytes.map(|bytes| grown(then.bytes.unwrap_or(0), bytes)).transpose()?,
        time_ms: now.time_ms.map(|time_ms| (time_ms - then.time_ms.unwrap_or(0.0)).max(0.0)),
    })
}

/// What was counted between two looks at `pg_stat_io`, row by row.
pub(super) fn io_rows(before: &[IoRow], after: &[IoRow]) -> Result<Vec<IoRow>, WasReset> {
    let before = by(before, |row| (&row.backend_type, &row.object, &row.context));
    let grown = |row: &IoRow| {
        let then = before.get(&(&row.backend_type, &row.object, &row.context)).copied();
        let since = |of: fn(&IoRow) -> Option<Operations>| {
            let then = then.map(|then| (of(then).unwrap_or_default(), then.reset));
            of(row).map(|now| since(then, (now, row.reset))).transpose()
        };
        Ok(IoRow {
            reads: since(|row| row.reads)?,
            writes: since(|row| row.writes)?,
            writebacks: since(|row| row.writebacks)?,
            extends: since(|row| row.extends)?,
            fsyncs: since(|row| row.fsyncs)?,
            evictions: since(|row| row.evictions)?,
            hits: since(|row| row.hits)?,
            reuses: since(|row| row.reuses)?,
            ..row.clone()
        })
    };
    after.iter().map(grown).collect()
}

/// Things by a key of theirs.
pub(super) fn by<'a, T, K: Eq + Hash>(things: &'a [T], key: impl Fn(&'a T) -> K) -> HashMap<K, &'a T> {
    things.iter().map(|thing| (key(thing), thing)).collect()
}

/// A time that is known to have been measured. While timing is off, the counters stand at 0.
pub(super) fn measured_ms(time_ms: Option<f64>, is_timed: bool) -> Option<f64> {
    time_ms.filter(|time_ms| is_timed || *time_ms > 0.0)
}

/// A row of the report; `None` when nothing happened. `is_timed`: whether relations are (`track_io_timing`).
pub(super) fn context(row: &IoRow, is_timed: bool) -> Option<PgStatIoContext> {
    let IoRow { reads, writes, writebacks, extends, fsyncs, evictions, hits, reuses, .. } = row;
    let all = [reads, writes, writebacks, extends, fsyncs, evictions, hits, reuses];
    if all.into_iter().flatten().all(|operations| operations.count == 0) {
        return None;
    }
    // The log has a setting of its own, `track_wal_io_timing`.
    let is_timed = is_timed && row.object != "wal";
    let claimed = |operations: &Option<Operations>| {
        operations.map(|Operations { count, bytes, time_ms }| {
            let time_ms = measured_ms(time_ms, is_timed);
            ClaimedOperations { count, bytes, time_ms, mean_us: mean_us(count, time_ms) }
        })
    };
    let counted = |operations: &Option<Operations>| operations.map(|operations| operations.count);
    Some(PgStatIoContext {
        backend_type: row.backend_type.clone(),
        object: row.object.clone(),
        context: row.context.clone(),
        reads: claimed(reads),
        writes: claimed(writes),
        writebacks: claimed(writebacks),
        extends: claimed(extends),
        fsyncs: claimed(fsyncs),
        evictions: counted(evictions),
        hits: counted(hits),
        reuses: counted(reuses),
    })
}
