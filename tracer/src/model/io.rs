//! One read, fully attributed.

use std::fmt;

use pgiotrace_ebpf::{Begun, flags};

use super::intervals::Intervals;
use crate::server::Pid;

/// How a read was executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Method {
    /// By its owner, in a read system call.
    Sync,
    /// By an io worker.
    Worker,
    /// Through io_uring.
    IoUring,
}

impl Method {
    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sync => "sync",
            Self::Worker => "worker",
            Self::IoUring => "io_uring",
        }
    }
}

/// What executed a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Executor {
    /// The owner itself: in a system call, or inside its io_uring submission.
    Owner,
    /// An io worker.
    IoWorker,
    /// A kernel thread of the owner's ring (`iou-wrk`).
    IouWrk,
}

/// How sure the owner of a read is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fidelity {
    /// Read from the I/O itself and validated.
    Exact,
    /// The only match among `pg_aios` rows.
    Inferred,
    /// Several matches: no owner is shown.
    Ambiguous,
    /// No owner is known.
    Unattributed,
}

/// One fork of one relation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RelationFork {
    /// Tablespace; never 0.
    pub tablespace_oid: u32,
    /// Database; 0 for shared relations.
    pub database_oid: u32,
    /// The relfilenode.
    pub relfilenumber: u32,
    /// Fork.
    pub fork: Fork,
    /// Whether the relation is a temporary one.
    pub temporary: bool,
}

impl RelationFork {
    /// The relation that a read's handle names, if it has one.
    #[must_use]
    pub fn of_handle(begun: &Begun) -> Option<Self> {
        if begun.flags & flags::HANDLE == 0 {
            return None;
        }
        let handle = &begun.handle;
        Some(Self {
            tablespace_oid: handle.tablespace_oid,
            database_oid: handle.database_oid,
            relfilenumber: handle.relfilenumber,
            fork: Fork::from_number(handle.fork)?,
            temporary: handle.is_temp != 0,
        })
    }
}

/// `ForkNumber` of PostgreSQL's `src/include/common/relpath.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fork {
    /// The data.
    Main,
    /// Free space map.
    FreeSpaceMap,
    /// Visibility map.
    VisibilityMap,
    /// Initial contents of an unlogged relation.
    Init,
}

impl Fork {
    /// The fork of a number, `None` for a number that PostgreSQL does not have.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Main,
            1 => Self::FreeSpaceMap,
            2 => Self::VisibilityMap,
            3 => Self::Init,
            _ => return None,
        })
    }

    /// The fork of a name as PostgreSQL appends it to file names (`forkNames` in `src/common/relpath.c`).
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "main" => Self::Main,
            "fsm" => Self::FreeSpaceMap,
            "vm" => Self::VisibilityMap,
            "init" => Self::Init,
            _ => return None,
        })
    }
}

impl fmt::Display for Fork {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Main => "main",
            Self::FreeSpaceMap => "fsm",
            Self::VisibilityMap => "vm",
            Self::Init => "init",
        })
    }
}

/// What was read.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Subject {
    /// A relation.
    Relation(RelationFork),
    /// A file that is no relation, by its folder: relative to the data directory where it lies in it.
    Folder(String),
    /// A file whose path could not be learned.
    Unknown,
}

/// One read that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Io {
    /// The backend that wanted it; `None` when not known.
    pub owner: Option<Pid>,
    /// The process that performed it; for an io-wq thread, the process that the thread belongs to.
    pub executor: Pid,
    /// What kind of process that is.
    pub executor_kind: Executor,
    /// How it was executed.
    pub method: Method,
    /// What was read.
    pub subject: Subject,
    /// Server blocks that it covered; 0 for files that are no relation and for failed reads.
    pub blocks: u64,
    /// Bytes returned; 0 for failed reads.
    pub bytes: u64,
    /// Whether its owner executed it only because the io workers' queue was full.
    pub is_queue_full_fallback: bool,
    /// What the owner was seen to execute when the read began.
    pub sighting: Sighting,
    /// Which execution of a query wanted it.
    pub query: QueryOf,
    /// When, and where the time went.
    pub timing: Timing,
}

#[cfg(test)]
impl Io {
    /// A read of a block by the process itself that wanted it, in so many nanoseconds, for tests.
    pub(crate) fn example(owner: Pid, start_ns: u64, end_ns: u64) -> Self {
        Self {
            owner: Some(owner),
            executor: owner,
            executor_kind: Executor::Owner,
            method: Method::Sync,
            subject: Subject::Unknown,
            blocks: 1,
            bytes: 8192,
            is_queue_full_fallback: false,
            sighting: Sighting::None,
            query: QueryOf::default(),
            timing: Timing { start_ns, end_ns, ..Timing::default() },
        }
    }
}

/// What a read's record says of the query that wanted it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Sighting {
    /// Nothing.
    #[default]
    None,
    /// The owner began the read itself, and executed this.
    Query {
        /// `query_start`, microseconds since 2000-01-01 00:00 UTC: with the process, the name of the execution.
        started_us: i64,
        /// `query_id`; `None` where it is not computed, or not yet.
        query_id: Option<i64>,
    },
    /// The owner began the read itself, and has executed no query yet: it starts, or executes none.
    NoQuery,
    /// The owner had let go of the read before it was executed: its query had failed.
    Abandoned,
}

/// Which execution of a query wanted a read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueryOf {
    /// `query_start` of the execution; 0 when none is known.
    pub started_us: i64,
    /// Its `query_id`, as far as it was known then: of several statements in one message, it tells which.
    pub query_id: Option<i64>,
    /// How sure that is.
    pub certainty: Certainty,
}

impl QueryOf {
    /// The execution that was known last, if there was one.
    #[must_use]
    pub fn probably(execution: Option<(i64, Option<i64>)>) -> Self {
        let of = |(started_us, query_id)| Self { started_us, query_id, certainty: Certainty::Probable };
        execution.map_or_else(Self::default, of)
    }
}

/// How sure it is which query wanted a read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Certainty {
    /// The owner was seen to execute it as the read began, or before it and after.
    Certain,
    /// It was seen to execute it before, and not since.
    Probable,
    /// No query is known, or the process executes none.
    #[default]
    Unknown,
}

/// When a read happened, and where its time went. Times are `CLOCK_MONOTONIC`, nanoseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Timing {
    /// When its owner handed it over, where that is known; else when its execution began.
    pub start_ns: u64,
    /// When its execution ended, or, where it is known that its owner waited for it, when the owner ran again.
    pub end_ns: u64,
    /// How long before that its execution had ended.
    pub woken_after_ns: u64,
    /// When `pg_aios` had shown it on its way to its executor, if it did.
    pub queued_by_ns: Option<u64>,
    /// Where the time between went.
    pub stages: StageTimes,
    /// When its requests were where; `None` when it waited for none, or that is not known.
    pub spans: Option<Box<Spans>>,
    /// Where its bytes came from; `None` when that is not known.
    pub source: Option<Source>,
    /// Whether its bytes were in the page cache because an earlier read's readahead had brought them.
    pub is_readahead_hit: bool,
}

impl Timing {
    /// Nanoseconds from start to end.
    #[must_use]
    pub fn latency_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }

    /// Whether the times agree with each other: the end is not before the start, and the stages add up to no more than what
    /// lies between.
    #[must_use]
    pub fn is_possible(&self) -> bool {
        self.start_ns <= self.end_ns && self.stages.sum_ns() <= self.latency_ns()
    }

    /// When its execution began.
    #[must_use]
    pub fn execution_start_ns(&self) -> u64 {
        self.start_ns + self.stages.get(Stage::PgQueue).unwrap_or(0)
    }

    /// When its execution ended.
    #[must_use]
    pub fn execution_end_ns(&self) -> u64 {
        self.end_ns - self.woken_after_ns
    }

    /// How long its executor was busy with it, nanoseconds.
    #[must_use]
    pub fn execution_ns(&self) -> u64 {
        self.execution_end_ns().saturating_sub(self.execution_start_ns())
    }
}

/// When the requests that a read waited for were where.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spans {
    /// With a device.
    pub device: Intervals,
    /// In the block layer, or with a device.
    pub block_layer: Intervals,
    /// When the first was queued, `CLOCK_MONOTONIC` nanoseconds.
    pub first_queued_ns: u64,
    /// When the last was completed.
    pub last_done_ns: u64,
    /// How long after that the thread that waited in the kernel had no processor.
    pub wakeup_ns: u64,
}

impl Spans {
    /// In which stage of its execution the read was at a moment. What follows is [`Stage::Wakeup`] and then [`Stage::Cache`].
    #[must_use]
    pub fn at(&self, moment_ns: u64) -> Stage {
        if self.device.around(moment_ns).is_some() {
            Stage::Device
        } else if self.block_layer.around(moment_ns).is_some() {
            Stage::BlockQueue
        } else if moment_ns < self.first_queued_ns {
            Stage::Submit
        } else if moment_ns >= self.last_done_ns && moment_ns - self.last_done_ns < self.wakeup_ns {
            Stage::Wakeup
        } else {
            Stage::Cache
        }
    }
}

/// The stages of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Handed over by the owner until the executor starts.
    PgQueue,
    /// From the start of the execution until the first request is queued.
    Submit,
    /// Page-cache work and copy: all that is no other stage.
    Cache,
    /// Block layer, queued to issued.
    BlockQueue,
    /// Device, issued to completed.
    Device,
    /// Completion until who waits for it runs: the executing thread in the kernel, and the owner where that is known.
    Wakeup,
}

impl Stage {
    /// Number of stages.
    pub const COUNT: usize = 6;
    /// All, in the order of time.
    pub const ALL: [Self; Self::COUNT] =
        [Self::PgQueue, Self::Submit, Self::Cache, Self::BlockQueue, Self::Device, Self::Wakeup];
}

/// Nanoseconds of each stage; `None` where it was not measured, or where the read had none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StageTimes([Option<u64>; Stage::COUNT]);

impl StageTimes {
    /// A stage's time.
    #[must_use]
    pub fn get(&self, stage: Stage) -> Option<u64> {
        self.0[stage as usize]
    }

    /// Sets a stage's time.
    pub fn set(&mut self, stage: Stage, nanos: u64) {
        self.0[stage as usize] = Some(nanos);
    }

    /// Sum of those that are known.
    #[must_use]
    pub fn sum_ns(&self) -> u64 {
        self.0.iter().flatten().sum()
    }
}

/// Where a read's bytes came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// All were in the page cache.
    Cache,
    /// All came from a device.
    Device,
    /// Some from each.
    Mixed,
}
