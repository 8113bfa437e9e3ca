//! Capture: what the kernel, `/proc` and PostgreSQL say, as one stream of events.
//!
//! [`Capture`] is the border between I/O and the pure rest: `live::Live` asks the running machine.

pub mod aio_target;
mod files;
pub mod kernel;
pub mod live;
pub mod names;
pub mod sampler;

use pgiotrace_ebpf::ReadRecord;

use crate::{
    model::io::Subject,
    server::{Pid, discover::ProcessInfo},
};
use kernel::Totals;
use names::NameAnswer;
use sampler::PgSample;

/// A file, as the kernel tells it apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    /// `super_block.s_dev`.
    pub device: u32,
    /// Inode number.
    pub inode: u64,
    /// Generation of the inode.
    pub generation: u32,
}

impl FileId {
    /// The file of a read that has no handle.
    #[must_use]
    pub fn of(record: &ReadRecord) -> Self {
        let begun = &record.begun;
        Self { device: begun.device, inode: begun.inode, generation: begun.inode_generation }
    }
}

/// Something that was captured.
#[derive(Debug, Clone)]
pub enum Event {
    /// A read has ended.
    Read(ReadRecord),
    /// What a file is; comes before the first read of it.
    File(FileId, FileFacts),
    /// Who a process is; comes before its first read.
    Process(ProcessInfo),
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
    /// Devices by number (major << 20 | minor): the kernel's name.
    pub device_names: std::collections::HashMap<u32, String>,
    /// Run time of the kernel side's programs, nanoseconds; `None` unless the kernel measures it.
    pub program_ns: Option<u64>,
    /// CPU time of the tracer, seconds.
    pub tracer_cpu_s: f64,
    /// Peak resident memory of the tracer, bytes.
    pub tracer_max_rss_bytes: u64,
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
