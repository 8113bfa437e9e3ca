//! The comparisons: a row of the report for each row of the statistics.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
};

use pgiotrace_ebpf::Counter;

use super::{
    Compared, Key, Object, OwnerReads, PgStats, Sum, Sums,
    deltas::{self, WasReset, by, context, measured_ms, since},
    reasons::{self, Situation},
};
use crate::{
    capture::{
        Ending,
        statistics::{BackendRow, DatabaseRow, FIRST_IO_BYTES_MAJOR, Operations, SessionRow, Statistics},
    },
    join::{
        Join,
        people::{People, Person},
    },
    model::{
        BlocksDifference, ClaimedBlocks, ClaimedReads, PgStatBackendIo, PgStatBackendIoRow, PgStatDatabase,
        PgStatDatabaseRow, PgStatIo, PgStatIoRow, ReadsDifference, aggregate::Incarnation,
    },
    server::{InnerPid, Pid, own_sessions::Serves},
};

/// Types of backends in `pg_stat_io` (`GetBackendTypeDesc`, `src/backend/utils/init/miscinit.c`). What `pg_stat_activity` calls
/// otherwise, by the name that its code gave it, is a background worker.
const BACKEND_TYPES: [&str; 14] = [
    "autovacuum launcher",
    "autovacuum worker",
    "background writer",
    "checkpointer",
    "client backend",
    "io worker",
    "slotsync worker",
    "standalone backend",
    "startup",
    "walreceiver",
    "walsender",
    "walsummarizer",
    "walwriter",
    BACKGROUND_WORKER,
];
const BACKGROUND_WORKER: &str = "background worker";

/// A session adds what it has to the statistics after this time of idleness at the latest: `PGSTAT_IDLE_INTERVAL`,
/// `src/backend/utils/activity/pgstat.c`.
const IDLE_INTERVAL_S: f64 = 10.0;

/// A process that owned reads.
pub(super) struct Owner {
    /// The process in the server's namespace, as long as it is there.
    inner: Option<InnerPid>,
    /// What `pg_stat_io` calls its type; `None` when that is not known.
    pub kind: Option<String>,
    pub sums: Sums,
    /// Bytes of its reads that ended before the first look, the tracer's own sessions aside.
    pub early_bytes: u64,
    /// Whether it may have kept back what it counted when the second look was taken.
    pub may_keep_back: bool,
    /// Whether it is a session of the tracer's.
    is_own: bool,
    /// Bytes of all its reads.
    traced_bytes: u64,
}

/// A process that was there at the second look, and one kind of object.
pub(super) struct Backend<'a> {
    pub row: &'a BackendRow,
    /// As the tracer sees it.
    pid: u32,
    pub claimed: Result<Operations, WasReset>,
    pub traced: Sum,
    /// Databases that it read from.
    pub databases: BTreeSet<u32>,
    pub was_there_before: bool,
    pub may_keep_back: bool,
}

impl Backend<'_> {
    /// Bytes that PostgreSQL counted less those that were traced.
    pub fn difference(&self) -> i64 {
        self.claimed.map_or(0, |claimed| signed(claimed.bytes.unwrap_or(0)) - signed(self.traced.bytes))
    }
}

/// All that the comparisons are made of.
pub(super) struct Seen<'a> {
    before: &'a Statistics,
    after: &'a Statistics,
    pub owners: Vec<Owner>,
    folded: BTreeMap<Option<String>, Sums>,
    unowned: &'a Sums,
    pub backends: Vec<Backend<'a>>,
    /// Backends with reads that were not there at the end.
    ended: u64,
    pub situation: Situation,
}

impl<'a> Seen<'a> {
    pub fn new(
        join: &Join,
        stats: &'a PgStats,
        before: &'a Statistics,
        after: &'a Statistics,
        ending: &Ending,
    ) -> Self {
        let counts = &ending.totals.counts;
        let lost = counts.ring_full() + counts.of(Counter::TableFull);
        let people = &join.people;
        let owners: Vec<_> =
            stats.owners.iter().map(|(who, reads)| owner(people, before, after, *who, reads)).collect();
        let backends = backends(people, before, after, &owners);
        let at_work_before = sessions(before).any(|session| {
            // A process that serves nobody has no state; a hidden one has no start either.
            let may_serve = session.state.is_some() || session.started.is_none();
            may_serve && !serves_tracer(people, session.pid) && may_keep_back(session)
        });
        let own = owners.iter().filter(|owner| owner.is_own);
        let own_bytes = own.map(|owner| owner.traced_bytes).sum();
        let is_there = |owner: &&Owner| owner.inner.is_none();
        let ended = owners.iter().filter(is_there).count() as u64
            + stats.folded.values().map(|(processes, _)| processes).sum::<u64>();
        let folded =
            stats.folded.iter().map(|(kind, (_, sums))| (kind.as_deref().map(pg_type), sums.clone()));
        Self {
            before,
            after,
            owners,
            folded: folded.collect(),
            unowned: &stats.unowned,
            backends,
            ended,
            situation: Situation {
                major: join.server.major,
                block_bytes: join.block_bytes(),
                is_timed: join.facts.as_ref().is_some_and(|facts| facts.track_io_timing),
                is_complete: lost == 0,
                in_flight: counts.in_flight,
                short_or_failed: join.ends.short + join.ends.failed,
                at_work_before,
                own_bytes,
            },
        }
    }

    /// Whether PostgreSQL counts by backend.
    pub fn has_backends(&self) -> bool {
        self.before.backends.is_some() && self.after.backends.is_some()
    }

    /// Whether there are reads without a known owner.
    pub fn has_unowned(&self) -> bool {
        !self.unowned.is_empty()
    }

    /// Traced reads by type of owner and kind of object. PostgreSQL 18 is the first that counts those of the log.
    fn traced(&self) -> BTreeMap<(Option<String>, Object), Sum> {
        let mut traced: BTreeMap<_, Sum> = BTreeMap::new();
        let owned = self.owners.iter().map(|owner| (owner.kind.clone(), &owner.sums));
        let folded = self.folded.iter().map(|(kind, sums)| (kind.clone(), sums));
        for (kind, sums) in owned.chain(folded).chain([(None, self.unowned)]) {
            for (key, sum) in sums {
                if key.object != Object::Wal || self.situation.major >= FIRST_IO_BYTES_MAJOR {
                    traced.entry((kind.clone(), key.object)).or_default().merge(sum);
                }
            }
        }
        traced
    }

    /// Traced reads by database.
    fn traced_of_databases(&self) -> BTreeMap<u32, Sum> {
        let mut traced: BTreeMap<_, Sum> = BTreeMap::new();
        let owned = self.owners.iter().map(|owner| &owner.sums);
        for sums in owned.chain(self.folded.values()).chain([self.unowned]) {
            for (key, sum) in sums.iter().filter(|(key, _)| key.object != Object::Wal) {
                traced.entry(key.database_oid).or_default().merge(sum);
            }
        }
        traced
    }
}

pub(super) fn compare(seen: &Seen) -> Compared {
    let mut compared = Compared::default();
    compared.notes.extend(seen.before.refusals.iter().cloned());
    if let (Some(before), Some(after)) = (&seen.before.io, &seen.after.io) {
        let rows = deltas::io_rows(before, after);
        if rows.is_err() {
            compared.notes.push(WAS_RESET.to_owned());
        }
        compared.io = Some(PgStatIo {
            reads_are_blocks: seen.situation.major < FIRST_IO_BYTES_MAJOR,
            contexts: rows.iter().flatten().filter_map(|row| context(row, seen.situation.is_timed)).collect(),
            rows: io_rows(seen, rows.as_deref()),
        });
    }
    if seen.has_backends() {
        compared.backend_io = Some(backend_io(seen));
    }
    if let (Some(before), Some(after)) = (&seen.before.databases, &seen.after.databases) {
        compared.database = Some(database(seen, before, after));
    }
    compared
}

const WAS_RESET: &str =
    "pg_stat_io was reset while the server was traced: what it counted in the window is not known";

fn io_rows(
    seen: &Seen,
    counted: Result<&[crate::capture::statistics::IoRow], &WasReset>,
) -> Vec<PgStatIoRow> {
    let traced = seen.traced();
    let mut claims: BTreeMap<(Option<String>, Object), Operations> = BTreeMap::new();
    for row in counted.unwrap_or_default() {
        if let (Some(object), Some(reads)) = (Object::from_name(&row.object), row.reads) {
            add(claims.entry((Some(row.backend_type.clone()), object)).or_default(), reads);
        }
    }
    let keys: BTreeSet<_> = traced.keys().chain(claims.keys()).cloned().collect();
    let none = Sum::default();
    let rows = keys.into_iter().map(|key| {
        let traced = traced.get(&key).unwrap_or(&none);
        // A type that never reads such objects has no row, which is to say that it counted nothing.
        let claim = claims.get(&key).copied().unwrap_or_default();
        let (kind, object) = key;
        let claimed = kind.as_ref().filter(|_| counted.is_ok()).map(|_| claimed(seen, object, claim));
        let difference = claimed.filter(|_| seen.situation.is_complete);
        let difference = difference.map(|claimed| difference_of(seen, &claimed, traced));
        let reason = match (&kind, difference) {
            (None, _) => Some(reasons::UNKNOWN_TYPE.to_owned()),
            (Some(_), None) => Some(reasons::no_difference(counted.is_err()).to_owned()),
            (Some(kind), Some(difference)) => reasons::of_type(seen, kind, object, traced, difference),
        };
        PgStatIoRow {
            backend_type: kind,
            object: object.name().to_owned(),
            claimed,
            traced: traced.reads(),
            difference,
            reason,
        }
    });
    let mut rows: Vec<_> = rows
        .filter(|row| row.traced.reads > 0 || row.claimed.is_some_and(|claimed| claimed.reads > 0))
        .collect();
    rows.sort_by_key(|row| Reverse(row.traced.bytes));
    rows
}

fn backend_io(seen: &Seen) -> PgStatBackendIo {
    let rows = seen.backends.iter().map(|backend| {
        let object = Object::from_name(&backend.row.object);
        let claimed =
            backend.claimed.ok().zip(object).map(|(operations, object)| claimed(seen, object, operations));
        let difference = claimed.filter(|_| seen.situation.is_complete);
        let difference = difference.map(|claimed| difference_of(seen, &claimed, &backend.traced));
        let reason = match difference {
            None => Some(reasons::no_difference(backend.claimed.is_err()).to_owned()),
            Some(difference) => reasons::of_backend(seen, backend, difference),
        };
        PgStatBackendIoRow {
            pid: backend.pid,
            backend_type: backend.row.backend_type.clone(),
            object: backend.row.object.clone(),
            claimed,
            traced: backend.traced.reads(),
            difference,
            reason,
        }
    });
    let mut rows: Vec<_> = rows
        .filter(|row| row.traced.reads > 0 || row.claimed.is_some_and(|claimed| claimed.reads > 0))
        .collect();
    rows.sort_by_key(|row| (Reverse(row.traced.bytes), row.pid));
    PgStatBackendIo { rows, ended: seen.ended }
}

fn database(seen: &Seen, before: &[DatabaseRow], after: &[DatabaseRow]) -> PgStatDatabase {
    let traced = seen.traced_of_databases();
    let before = by(before, |row| row.oid);
    let counters = |row: &DatabaseRow| {
        let time_ms = Some(row.read_time_ms);
        (Operations { count: row.blocks_read, bytes: None, time_ms }, row.reset)
    };
    let none = Sum::default();
    let rows = after.iter().map(|row| {
        let traced = traced.get(&row.oid).unwrap_or(&none);
        let counted = since(before.get(&row.oid).map(|row| counters(row)), counters(row));
        let claimed = counted.ok().map(|Operations { count, time_ms, .. }| ClaimedBlocks {
            blocks: count,
            read_time_ms: measured_ms(time_ms, seen.situation.is_timed),
        });
        let difference = claimed.filter(|_| seen.situation.is_complete);
        let difference = difference.map(|claimed| signed(claimed.blocks) - signed(traced.blocks));
        PgStatDatabaseRow {
            oid: row.oid,
            database: row.name.clone(),
            claimed,
            traced: traced.reads(),
            difference: difference.map(|blocks| BlocksDifference { blocks }),
            reason: match difference {
                None => Some(reasons::no_difference(counted.is_err()).to_owned()),
                Some(blocks) => reasons::of_database(seen, row.oid, traced, blocks),
            },
        }
    });
    let mut rows: Vec<_> = rows
        .filter(|row| row.traced.reads > 0 || row.claimed.is_some_and(|claimed| claimed.blocks > 0))
        .collect();
    rows.sort_by_key(|row| Reverse(row.traced.bytes));
    PgStatDatabase { rows }
}

fn claimed(seen: &Seen, object: Object, operations: Operations) -> ClaimedReads {
    let Operations { count, bytes, time_ms } = operations;
    let is_timed = seen.situation.is_timed && object != Object::Wal;
    ClaimedReads { reads: count, bytes: bytes.unwrap_or(0), read_time_ms: measured_ms(time_ms, is_timed) }
}

fn difference_of(seen: &Seen, claimed: &ClaimedReads, traced: &Sum) -> ReadsDifference {
    let are_reads = seen.situation.major >= FIRST_IO_BYTES_MAJOR;
    ReadsDifference {
        reads: are_reads.then(|| signed(claimed.reads) - signed(traced.reads)),
        bytes: signed(claimed.bytes) - signed(traced.bytes),
    }
}

fn add(sum: &mut Operations, operations: Operations) {
    sum.count += operations.count;
    sum.bytes = Some(sum.bytes.unwrap_or(0) + operations.bytes.unwrap_or(0));
    sum.time_ms = Some(sum.time_ms.unwrap_or(0.0) + operations.time_ms.unwrap_or(0.0));
}

/// Counters are far from the ends of either type.
fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// What `pg_stat_io` calls a type of `pg_stat_activity`'s.
fn pg_type(activity_type: &str) -> String {
    let known = BACKEND_TYPES.into_iter().find(|known| *known == activity_type);
    known.unwrap_or(BACKGROUND_WORKER).to_owned()
}

fn sessions(statistics: &Statistics) -> impl Iterator<Item = &SessionRow> {
    statistics.sessions.iter().flatten()
}

/// Whether a session may not have added all that it counted to the statistics yet. Where its state is hidden, it may.
fn may_keep_back(session: &SessionRow) -> bool {
    session.in_transaction
        || session.state.as_deref() != Some("idle")
        || session.state_age_s.is_none_or(|age_s| age_s < IDLE_INTERVAL_S)
}

fn owner(
    people: &People,
    before: &Statistics,
    after: &Statistics,
    who: Incarnation,
    reads: &OwnerReads,
) -> Owner {
    let person = people.get(who);
    let inner = person.and_then(|person| person.inner_pid).filter(|_| people.current(who.pid) == who);
    let row_of = |statistics: &Statistics| {
        let rows = statistics.backends.iter().flatten();
        rows.clone().find(|row| Some(row.pid) == inner).map(|row| row.backend_type.clone())
    };
    let kind = person.and_then(Person::backend_type);
    let session = sessions(after).find(|session| Some(session.pid) == inner);
    let is_own = people.serves(who) == Serves::Tracer;
    let sums = if is_own { own_sums(before, after, inner, reads) } else { reads.sums(|_| true) };
    Owner {
        inner: inner.filter(|_| session.is_some()),
        kind: kind.map(pg_type).or_else(|| row_of(after)).or_else(|| row_of(before)),
        sums,
        early_bytes: if is_own { 0 } else { reads.early_bytes },
        may_keep_back: !is_own && session.is_some_and(may_keep_back),
        is_own,
        traced_bytes: reads.sums(|_| true).values().map(|sum| sum.bytes).sum(),
    }
}

/// Reads of a session of the tracer's own, only those that were added to the statistics in the window. It began after the trace, so it
/// is known which these are where PostgreSQL counts by backend: those that follow its first so many bytes. Else it is known by time only,
/// of the session that takes the looks.
fn own_sums(before: &Statistics, after: &Statistics, inner: Option<InnerPid>, reads: &OwnerReads) -> Sums {
    let counted = |statistics: &Statistics| {
        let rows = statistics.backends.iter().flatten();
        let own = rows.filter(|row| Some(row.pid) == inner && row.object == Object::Relation.name());
        own.map(|row| row.reads.bytes.unwrap_or(0)).sum::<u64>()
    };
    let is_there = sessions(after).any(|session| Some(session.pid) == inner);
    let is_counted_by_backend = before.backends.is_some() && after.backends.is_some();
    if !is_counted_by_backend {
        return reads.sums(|read| read.start_ns >= before.taken.from_ns);
    }
    let (from, to) = (counted(before), if is_there { counted(after) } else { u64::MAX });
    let mut position = 0;
    reads.sums(|read| {
        let is_within = position >= from && position + read.bytes <= to;
        position += read.bytes;
        is_within
    })
}

fn backends<'a>(
    people: &People,
    before: &Statistics,
    after: &'a Statistics,
    owners: &[Owner],
) -> Vec<Backend<'a>> {
    let owners: HashMap<_, _> = owners.iter().filter_map(|owner| Some((owner.inner?, owner))).collect();
    let started =
        |statistics: &'a Statistics| by(statistics.sessions.as_deref().unwrap_or_default(), |row| row.pid);
    let sessions_after = started(after);
    let sessions_before = by(before.sessions.as_deref().unwrap_or_default(), |row| row.pid);
    let rows_before =
        by(before.backends.as_deref().unwrap_or_default(), |row| (row.pid, row.object.as_str()));
    let none = Sums::new();
    let backend = |row: &'a BackendRow| {
        let session = sessions_after.get(&row.pid);
        let earlier = sessions_before.get(&row.pid);
        // A process of the same PID that started at another time is another one.
        let same = earlier.filter(|then| session.is_none_or(|now| now.started == then.started));
        let then = rows_before.get(&(row.pid, row.object.as_str())).filter(|_| same.is_some());
        let owner = owners.get(&row.pid);
        let sums = owner.map_or(&none, |owner| &owner.sums);
        let of_object = |(key, _): &(&Key, &Sum)| key.object.name() == row.object;
        let mut traced = Sum::default();
        sums.iter().filter(of_object).for_each(|(_, sum)| traced.merge(sum));
        Backend {
            row,
            pid: people.outer(row.pid).map_or(row.pid.0, |Pid(pid)| pid),
            claimed: since(then.map(|then| (then.reads, then.reset)), (row.reads, row.reset)),
            databases: sums.iter().filter(of_object).map(|(key, _)| key.database_oid).collect(),
            traced,
            was_there_before: same.is_some(),
            may_keep_back: session.is_some_and(|session| may_keep_back(session)),
        }
    };
    let others = after.backends.iter().flatten().filter(|row| !serves_tracer(people, row.pid));
    others.map(backend).collect()
}

/// Whether a process serves the tracer itself.
fn serves_tracer(people: &People, process: InnerPid) -> bool {
    people.outer(process).is_some_and(|pid| people.serves(people.current(pid)) == Serves::Tracer)
}
