//! Capture: what the kernel, `/proc` and PostgreSQL say, as one stream of events.
//!
//! [`Capture`] is the border between I/O and the pure rest: `live::Live` asks the running machine.

pub mod aio_target;
mod describer;
mod files;
pub mod kernel;
pub mod live;
pub mod names;
pub mod sampler;
mod statements;
pub mod statistics;

use std::sync::Arc;

use pgiotrace_ebpf::{MergeRecord, ReadRecord, RequestRecord, WaitRecord};

use crate::{
    model::io::Subject,
    server::{InnerPid, Pid, discover::ProcessInfo, own_sessions::Serves},
};
use kernel::Totals;
use names::NameAnswer;
use sampler::PgSample;

/// Something that was captured.
#[derive(Debug, Clone)]
pub enum Event {
    /// A read has ended.
    Read(SeenRead),
    /// A device has completed a request; comes before the end of any read that waited for it.
    Request(RequestRecord),
    /// Pages of a read were merged into a request of others; comes before that request completes.
    Merge(MergeRecord),
    /// A process has left a system call in which it may have waited.
    Wait(WaitRecord),
    /// The server's clock, microseconds since 2000-01-01 00:00 UTC, when `CLOCK_MONOTONIC` was 0.
    Clock {
        /// That moment.
        zero_us: i64,
    },
    /// Who a process is, and whom it serves; comes before its first read.
    Process(ProcessInfo, Serves),
    /// The processes that serve the tracer; all others that were undecided serve others.
    OwnSessions(Vec<InnerPid>),
    /// A process of the cluster ended.
    Left(Pid),
    /// PostgreSQL's own picture.
    Sample(PgSample),
    /// A relation's name.
    Name(NameAnswer),
    /// The server crashed and restarted: its shared memory, and with it every handle, is new.
    Restarted,
    /// The server ended.
    Stopped,
    /// What the user must know, in one sentence.
    Note(String),
}

/// A read that has ended, with what `/proc` says of its file.
#[derive(Debug, Clone)]
pub struct SeenRead {
    /// The kernel's record.
    pub record: ReadRecord,
    /// Its file, unless it has a handle, or went through io_uring.
    pub file: Option<Arc<FileFacts>>,
}

/// What a file is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileFacts {
    /// What the report calls it.
    pub subject: Subject,
    /// Number of the segment, of a relation's file.
    pub segment: u32,
}

/// Everything that is known only at the end.
#[derive(Debug, Clone, Default)]
pub struct Ending {
    /// What the kernel counted.
    pub totals: Totals,
    /// Whether every request was told that a read may have waited for, as far as the ring had room.
    pub are_requests_traced: bool,
    /// Length of the trace, nanoseconds.
    pub duration_ns: u64,
    /// Devices by number (major << 20 | minor): the kernel's name.
    pub device_names: std::collections::HashMap<u32, String>,
    /// Run time of the kernel side's programs, nanoseconds; `None` unless the kernel measures it.
    pub program_ns: Option<u64>,
    /// The probes of `--pg-probes`; `None` when none is attached.
    pub probes: Option<Probes>,
    /// What samples cost the server; `None` where it was not sampled.
    pub spent: Option<Arc<sampler::Spent>>,
    /// CPU time of the tracer, seconds.
    pub tracer_cpu_s: f64,
    /// Peak resident memory of the tracer, bytes.
    pub tracer_max_rss_bytes: u64,
}

/// What is known of the attached probes of `--pg-probes`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Probes {
    /// What a trap costs, measured on the tracer itself, nanoseconds; `None` where that failed.
    pub ns_per_trap: Option<f64>,
}

/// A source of events.
pub trait Capture {
    /// What can go wrong.
    type Error;

    /// Waits until something happens, and hands over all that there is. Safe to drop while it waits.
    fn next(&mut self, sink: &mut impl FnMut(Event)) -> impl Future<Output = Result<(), Self::Error>>;

    /// Ends the capture: hands over what is left, and says what is known only now.
    fn finish(self, sink: &mut impl FnMut(Event)) -> impl Future<Output = Result<Ending, Self::Error>>;
}

/// 2000-01-01 00:00 UTC, from which the server counts (`POSTGRES_EPOCH_JDATE`, `src/include/datatype/timestamp.h`), in seconds of
/// the Unix epoch.
const SERVER_EPOCH_UNIX_S: i64 = 946_684_800;

/// `CLOCK_MONOTONIC`, the clock of the kernel's records, in nanoseconds.
fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
