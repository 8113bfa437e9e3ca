//! Why PostgreSQL's counts and the traced reads differ: in one sentence, and only a reason that can explain the direction.

use super::{
    Object, Sum,
    compare::{Backend, Owner, Seen},
};
use crate::{capture::statistics::FIRST_IO_MAJOR, model::ReadsDifference, server::aio::FIRST_AIO_MAJOR};

/// What is known of the window as a whole.
pub(super) struct Situation {
    pub major: u16,
    pub block_bytes: u32,
    /// `track_io_timing`.
    pub is_timed: bool,
    /// Whether no record was lost.
    pub is_complete: bool,
    /// Reads in flight at the end.
    pub in_flight: u64,
    /// Reads that brought less than was asked for.
    pub short_or_failed: u64,
    /// Whether sessions may have kept back what they counted at the first look.
    pub at_work_before: bool,
    /// Bytes that the tracer's own sessions read.
    pub own_bytes: u64,
}

pub(super) const UNKNOWN_TYPE: &str =
    "the types of these reads' owners are not known: PostgreSQL counted them under another type";

const WAS_RESET: &str = "the counters were reset in the window";
const RECORDS_LOST: &str = "not all reads were traced: records were lost";
const BASE_BACKUP: &str =
    "PostgreSQL does not count what a base backup reads, since it reads files, not buffers";
const FROM_BEFORE: &str = "counted before the trace: what backends had read earlier was added to the statistics in the window, \
    since they add their counts between transactions only, and at most once a second";
const EXTENDED: &str =
    "before PostgreSQL 16, blks_read also counts the blocks by which relations were extended";
const IN_FLIGHT: &str =
    "PostgreSQL counts a read when it is handed over, and some had not ended when the trace did";
const SHORT_OR_FAILED: &str =
    "PostgreSQL counts the bytes that it asks for, and some reads failed or brought less";
const UNKNOWN_OWNERS: &str =
    "some traced reads stand under no type, because their owners' types are not known";
const OWN: &str = "pgiotrace's own sessions: before PostgreSQL 18 it is not known which of their reads are in the statistics";
const EDGE_OF_START: &str = "the edge of the window: the first look at the statistics came after the first reads, and had some of \
    them already";
const EDGE_OF_END: &str = "the edge of the window: the second look at the statistics came after the end of the trace, and sessions were \
    still at work";

/// Why there is no difference to tell.
pub(super) fn no_difference(was_reset: bool) -> &'static str {
    if was_reset { WAS_RESET } else { RECORDS_LOST }
}

/// Of a row of `pg_stat_io`.
pub(super) fn of_type(
    seen: &Seen,
    kind: &str,
    object: Object,
    traced: &Sum,
    difference: ReadsDifference,
) -> Option<String> {
    let ReadsDifference { reads, bytes } = difference;
    if bytes == 0 && reads.is_none_or(|reads| reads == 0) {
        return None;
    }
    if is_own(seen, bytes.unsigned_abs()) {
        return Some(OWN.to_owned());
    }
    let is_of_type = |owner: &&Owner| owner.kind.as_deref() == Some(kind);
    let owners = || seen.owners.iter().filter(is_of_type);
    let backends = || {
        let of_type =
            |backend: &&Backend| backend.row.backend_type == kind && backend.row.object == object.name();
        seen.backends.iter().filter(of_type)
    };
    if bytes < 0 {
        let reading = owners().filter(|owner| owner.sums.keys().any(|key| key.object == object));
        not_flushed(seen, backends(), reading, bytes.unsigned_abs())
            .or_else(|| (kind == "walsender" && object == Object::Relation).then(|| BASE_BACKUP.to_owned()))
            .or_else(|| past_buffers(seen, object, traced))
            .or_else(|| edge_of_start(owners(), bytes.unsigned_abs()))
    } else {
        let has_unknown = seen.owners.iter().any(|owner| owner.kind.is_none() && !owner.sums.is_empty());
        let is_from_before = backends().any(|backend| backend.difference() > 0 && backend.was_there_before);
        more(seen, has_unknown || seen.has_unowned(), is_from_before)
    }
}

/// Of a row of `pg_stat_get_backend_io`.
pub(super) fn of_backend(seen: &Seen, backend: &Backend, difference: ReadsDifference) -> Option<String> {
    let ReadsDifference { reads, bytes } = difference;
    if bytes == 0 && reads.is_none_or(|reads| reads == 0) {
        None
    } else if bytes > 0 {
        let is_from_before = backend.was_there_before;
        more(seen, seen.has_unowned(), is_from_before)
    } else if backend.may_keep_back {
        not_flushed(seen, std::iter::once(backend), std::iter::empty(), bytes.unsigned_abs())
    } else {
        let object = Object::from_name(&backend.row.object)?;
        past_buffers(seen, object, &backend.traced)
    }
}

/// Of a row of `pg_stat_database`.
pub(super) fn of_database(seen: &Seen, oid: u32, traced: &Sum, blocks: i64) -> Option<String> {
    if blocks == 0 {
        return None;
    }
    let of_database = |backend: &&Backend| backend.databases.contains(&oid);
    let backends = || seen.backends.iter().filter(of_database);
    let bytes = blocks.unsigned_abs() * u64::from(seen.situation.block_bytes);
    if is_own(seen, bytes) {
        return Some(OWN.to_owned());
    }
    if blocks < 0 {
        let reading = seen.owners.iter().filter(|owner| owner.sums.keys().any(|key| key.database_oid == oid));
        return not_flushed(seen, backends(), reading, bytes)
            .or_else(|| past_buffers(seen, Object::Relation, traced))
            .or_else(|| edge_of_start(seen.owners.iter(), bytes));
    }
    if seen.situation.major < FIRST_IO_MAJOR {
        return Some(EXTENDED.to_owned());
    }
    let is_from_before = backends().any(|backend| backend.difference() > 0 && backend.was_there_before);
    more(seen, false, is_from_before)
}

/// Whether the tracer's own sessions explain that many bytes. From 18 on, these are told apart.
fn is_own(seen: &Seen, bytes: u64) -> bool {
    !seen.has_backends() && bytes <= seen.situation.own_bytes
}

/// PostgreSQL counted less because backends keep back what they counted. Where it counts by backend, it is known how much; else who may.
fn not_flushed<'a>(
    seen: &Seen,
    backends: impl Iterator<Item = &'a Backend<'a>>,
    owners: impl Iterator<Item = &'a Owner>,
    bytes: u64,
) -> Option<String> {
    let (mut keeping, mut kept) = (0_u64, 0_u64);
    for backend in backends.filter(|backend| backend.may_keep_back && backend.difference() < 0) {
        keeping += 1;
        kept += backend.difference().unsigned_abs();
    }
    let why =
        "a backend adds its counts to the statistics between transactions only, and at most once a second";
    if keeping > 0 {
        let blocks = |bytes: u64| bytes / u64::from(seen.situation.block_bytes.max(1));
        let of = if kept < bytes { format!(" of the {} missing", blocks(bytes)) } else { String::new() };
        let plural = if keeping == 1 { "backend" } else { "backends" };
        return Some(format!(
            "not flushed yet: {keeping} {plural} had {} blocks{of} in no statistics at the end; {why}",
            blocks(kept)
        ));
    }
    let by_backend = seen.has_backends();
    let may = owners.filter(|owner| owner.may_keep_back).count();
    (!by_backend && may > 0).then(|| {
        format!(
            "probably not flushed yet: {may} of the reading sessions may have kept their counts back; {why}"
        )
    })
}

/// PostgreSQL counted less because the first look had some reads already: those that ended before it explain no more than they are.
fn edge_of_start<'a>(owners: impl Iterator<Item = &'a Owner>, bytes: u64) -> Option<String> {
    let early: u64 = owners.map(|owner| owner.early_bytes).sum();
    (early >= bytes).then(|| EDGE_OF_START.to_owned())
}

/// PostgreSQL counted less because reads went past its buffers. From 18 on, those have no I/O handle.
fn past_buffers(seen: &Seen, object: Object, traced: &Sum) -> Option<String> {
    let (without, all) = (traced.without_handle, traced.reads);
    let is_known = seen.situation.major >= FIRST_AIO_MAJOR && object != Object::Wal && without < all;
    (is_known && without > 0).then(|| {
        format!(
            "{without} of the {all} traced reads have no I/O handle: PostgreSQL does not count what it reads past its buffers, as \
             when it copies a relation's file"
        )
    })
}

/// Why PostgreSQL counted more.
fn more(seen: &Seen, has_unknown: bool, is_from_before: bool) -> Option<String> {
    let situation = &seen.situation;
    // Where PostgreSQL counts by backend, one that still is there tells for itself.
    let may_be_from_before = situation.at_work_before;
    let reasons = [
        (has_unknown, UNKNOWN_OWNERS),
        (is_from_before, FROM_BEFORE),
        (situation.short_or_failed > 0, SHORT_OR_FAILED),
        (situation.in_flight > 0, IN_FLIGHT),
        (may_be_from_before, FROM_BEFORE),
        (seen.owners.iter().any(|owner| owner.may_keep_back), EDGE_OF_END),
    ];
    reasons.into_iter().find(|(holds, _)| *holds).map(|(_, reason)| reason.to_owned())
}
