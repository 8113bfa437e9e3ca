//! PostgreSQL's statistics before and after the window, and what was traced between the two looks.
//!
//! `pg_stat_io` charges a read to its issuer, which is the owner, when it is handed over, and in bytes that are asked for
//! (`AsyncReadBuffers`, `src/backend/storage/buffer/bufmgr.c`). A backend adds its counts to the statistics when it is idle outside a
//! transaction, at most once a second, and when it ends (`pgstat_report_stat`, `src/backend/utils/activity/pgstat.c`).

mod compare;
mod deltas;
mod reasons;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};

use super::{Join, Sampling, people::People};
use crate::{
    capture::{
        Ending,
        statistics::{Moment, Statistics},
    },
    model::{
        LatencyHistogram, PgStatBackendIo, PgStatDatabase, PgStatIo, TracedReads,
        aggregate::Incarnation,
        io::{Io, Subject},
    },
};

/// Reads of an owner that are kept one by one, so that those of the tracer's own sessions can be told apart by when they were counted:
/// a session that connects and prepares its statements reads some hundred blocks of catalogs at most.
const KEPT: usize = 512;

/// Folder of the write-ahead log, in the data directory.
const WAL: &str = "pg_wal";

/// Kinds of objects that PostgreSQL counts by (`pgstat_get_io_object_name`, `src/backend/utils/activity/pgstat_io.c`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Object {
    Relation,
    TemporaryRelation,
    Wal,
}

impl Object {
    const ALL: [Self; 3] = [Self::Relation, Self::TemporaryRelation, Self::Wal];

    fn name(self) -> &'static str {
        match self {
            Self::Relation => "relation",
            Self::TemporaryRelation => "temp relation",
            Self::Wal => "wal",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|object| object.name() == name)
    }
}

/// What reads are told apart by, within an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    object: Object,
    /// 0 for shared relations, and for the log.
    database_oid: u32,
}

impl Key {
    /// `None` for what PostgreSQL does not count.
    fn of(subject: &Subject) -> Option<Self> {
        match subject {
            Subject::Relation(relation) => Some(Self {
                object: if relation.temporary { Object::TemporaryRelation } else { Object::Relation },
                database_oid: relation.database_oid,
            }),
            Subject::Folder(folder) if folder == WAL => Some(Self { object: Object::Wal, database_oid: 0 }),
            Subject::Folder(_) | Subject::Unknown => None,
        }
    }
}

/// A read, as far as it matters here.
#[derive(Debug, Clone, Copy)]
struct Traced {
    key: Key,
    start_ns: u64,
    latency_ns: u64,
    bytes: u64,
    blocks: u64,
    has_handle: bool,
}

/// Reads, added up.
#[derive(Debug, Clone)]
struct Sum {
    reads: u64,
    bytes: u64,
    blocks: u64,
    /// Of the reads, those that have no I/O handle.
    without_handle: u64,
    latency: LatencyHistogram,
}

impl Default for Sum {
    fn default() -> Self {
        let latency = LatencyHistogram::of_two_digits();
        Self { reads: 0, bytes: 0, blocks: 0, without_handle: 0, latency }
    }
}

impl Sum {
    fn add(&mut self, read: &Traced) {
        self.reads += 1;
        self.bytes += read.bytes;
        self.blocks += read.blocks;
        self.without_handle += u64::from(!read.has_handle);
        self.latency.record(read.latency_ns);
    }

    fn merge(&mut self, other: &Self) {
        let Self { reads, bytes, blocks, without_handle, latency } = other;
        self.reads += reads;
        self.bytes += bytes;
        self.blocks += blocks;
        self.without_handle += without_handle;
        self.latency.merge(latency);
    }

    fn reads(&self) -> TracedReads {
        let Self { reads, bytes, blocks, latency, .. } = self;
        TracedReads { reads: *reads, bytes: *bytes, blocks: *blocks, latency_us: latency.dist() }
    }
}

type Sums = BTreeMap<Key, Sum>;

fn merge(sums: &mut Sums, others: &Sums) {
    for (key, sum) in others {
        sums.entry(*key).or_default().merge(sum);
    }
}

/// What one process owned.
#[derive(Debug, Clone, Default)]
struct OwnerReads {
    /// The first ones, in the order in which they ended.
    first: Vec<Traced>,
    /// The others.
    sums: Sums,
    /// Bytes of those that ended before the first look.
    early_bytes: u64,
}

impl OwnerReads {
    fn add(&mut self, read: Traced) {
        if self.first.len() < KEPT {
            self.first.push(read);
        } else {
            self.sums.entry(read.key).or_default().add(&read);
        }
    }

    /// Adds up all those that are wanted of the first ones, and the others.
    fn sums(&self, mut is_wanted: impl FnMut(&Traced) -> bool) -> Sums {
        let mut sums = self.sums.clone();
        for read in self.first.iter().filter(|read| is_wanted(read)) {
            sums.entry(read.key).or_default().add(read);
        }
        sums
    }
}

/// Both looks at the statistics, and the reads that they are to be held against.
#[derive(Debug, Default)]
pub(super) struct PgStats {
    before: Option<Statistics>,
    after: Option<Statistics>,
    owners: HashMap<Incarnation, OwnerReads>,
    /// What processes owned that ended long ago, by their type; and how many these were.
    folded: BTreeMap<Option<String>, (u64, Sums)>,
    /// Reads without a known owner.
    unowned: Sums,
}

/// The comparisons, as the report has them.
#[derive(Debug, Default)]
pub(super) struct Compared {
    pub io: Option<PgStatIo>,
    pub backend_io: Option<PgStatBackendIo>,
    pub database: Option<PgStatDatabase>,
    pub notes: Vec<String>,
}

impl PgStats {
    /// Whether the first look is in.
    pub fn has_begun(&self) -> bool {
        self.before.is_some()
    }

    /// Takes in a read whose owner is settled.
    pub fn add(&mut self, io: &Io, owner: Option<Incarnation>, has_handle: bool) {
        let Some(key) = Key::of(&io.subject) else { return };
        let read = Traced {
            key,
            start_ns: io.timing.start_ns,
            latency_ns: io.timing.latency_ns(),
            bytes: io.bytes,
            blocks: io.blocks,
            has_handle,
        };
        let Some(owner) = owner else {
            return self.unowned.entry(key).or_default().add(&read);
        };
        let is_early = self.before.is_none();
        let reads = self.owners.entry(owner).or_default();
        reads.early_bytes += if is_early { read.bytes } else { 0 };
        reads.add(read);
    }

    /// Keeps what a process owned that ended long ago by its type only.
    pub fn fold(&mut self, owner: Incarnation, backend_type: Option<String>) {
        let Some(reads) = self.owners.remove(&owner) else { return };
        let (processes, sums) = self.folded.entry(backend_type).or_default();
        *processes += 1;
        merge(sums, &reads.sums(|_| true));
    }

    /// Takes in a look. Each new connection takes a first one, and the first of these counts.
    pub fn look(&mut self, statistics: Statistics, people: &People) {
        match statistics.moment {
            Moment::After => self.after = Some(statistics),
            Moment::Before if self.before.is_some() => {}
            Moment::Before => {
                // Whoever had ended had all its reads in the statistics already.
                self.owners.retain(|owner, _| people.current(owner.pid) == *owner);
                self.folded.clear();
                self.before = Some(statistics);
            }
        }
    }
}

impl Join {
    /// Whether the first look at PostgreSQL's statistics is in, or will never be.
    #[must_use]
    pub fn has_first_look(&self) -> bool {
        self.pg_stats.has_begun() || self.sampling != Sampling::Expected
    }

    /// Compares what PostgreSQL counted with what was traced.
    pub(super) fn compare_with_statistics(&mut self, ending: &Ending) -> Compared {
        let stats = std::mem::take(&mut self.pg_stats);
        let (Some(before), Some(after)) = (&stats.before, &stats.after) else {
            let mut compared = Compared::default();
            // Without a session at all, that is said already.
            if self.facts.is_some() {
                let missing = if stats.before.is_some() { "second" } else { "first" };
                compared.notes.push(format!(
                    "traced reads are not compared with PostgreSQL's statistics: there was no time for the {missing} look \
                     at them; see that the server answers"
                ));
            }
            return compared;
        };
        let seen = compare::Seen::new(self, &stats, before, after, ending);
        compare::compare(&seen)
    }
}
