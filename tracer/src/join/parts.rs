//! A block request, as the join sees it.

use pgiotrace_ebpf::{
    FileId, MergeRecord, NOT_KNOWN, ReadKey, Request, RequestRecord, SECTOR_BYTES, request_flags,
};

use super::stages::Waited;
use crate::model::intervals::Intervals;

/// A completed request, or a part of one.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub waited: Waited,
    pub device: u32,
    pub bytes: u64,
    pub sector: u64,
    /// The read in whose course it was queued; its `start_ns` is 0 when there was none.
    pub read: ReadKey,
    /// The file of its pages; the inode is 0 when there is none.
    pub file: FileId,
    /// Offsets in that file: start and end of what it brought.
    pub range: (u64, u64),
    /// What of it reads have asked for so far, as offsets in the file.
    pub asked: Intervals,
    /// The split bio that it is a part of; 0: of none.
    pub chain: u64,
    /// Whether no more parts of the same request follow.
    pub is_last: bool,
    /// Whether it is for a direct read of that file, which began where `range` does.
    pub is_direct: bool,
    /// For whom it was queued.
    pub wanted_by: WantedBy,
}

/// For whom a request was queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WantedBy {
    /// For the read in whose course it was.
    Server,
    /// It was not known, until a read of the server's waited for it.
    Adopted,
    /// By this process of the server in no read's course, as a thread of its io_uring does: its reads turn out when they end.
    RingOf(u32),
    /// The block layer had held it back: whether the server wanted it turns out when its reads end.
    NotKnown,
    /// By another program.
    Others,
}

impl WantedBy {
    fn of(request: &Request) -> Self {
        let is_of_cluster = request.flags & request_flags::CLUSTER != 0;
        if is_of_cluster && request.read.start_ns == 0 {
            Self::RingOf(request.submitter_tgid)
        } else if is_of_cluster {
            Self::Server
        } else if request.flags & request_flags::HELD != 0 {
            Self::NotKnown
        } else {
            Self::Others
        }
    }
}

impl Part {
    pub fn of(record: &RequestRecord) -> Self {
        let request = &record.request;
        // How far the pages of the file go, in the part that this record is about.
        let file_end = request.offset + u64::from(request.file_bytes);
        let start = (request.offset + record.start).min(file_end);
        let range = (start, (start + u64::from(record.bytes)).min(file_end));
        let is_of_read = request.read.start_ns != 0;
        let mut asked = Intervals::default();
        // Without a length (a vector's parts are not added up), it turns out when the read ends.
        if is_of_read && request.asked_offset != NOT_KNOWN {
            let end = request.asked_offset.saturating_add(request.asked_length);
            let (from, to) = overlap(range, (request.asked_offset, end));
            asked.add(from, to);
        }
        Self {
            waited: Waited {
                queued_ns: (request.queued_ns != 0).then_some(request.queued_ns),
                issued_ns: request.issued_ns,
                done_ns: record.done_ns,
                is_held: request.flags & request_flags::HELD != 0,
            },
            device: request.device,
            bytes: u64::from(record.bytes),
            sector: request.sector + record.start / SECTOR_BYTES,
            read: request.read,
            file: request.file,
            range,
            asked,
            chain: request.chain,
            is_last: request.flags & request_flags::PART == 0,
            is_direct: request.flags & request_flags::DIRECT != 0,
            wanted_by: WantedBy::of(request),
        }
    }

    /// Whether a moment and a place are the ones at which something was merged into it.
    pub fn takes(&self, merge: &MergeRecord) -> bool {
        let sectors = self.sector..self.sector + self.bytes.div_ceil(SECTOR_BYTES);
        self.device == merge.device
            && sectors.contains(&merge.sector)
            && self.waited.first_ns() <= merge.at_ns
            && merge.at_ns <= self.waited.done_ns
    }

    pub fn is_of_file(&self) -> bool {
        self.file.inode != 0 && self.range.0 < self.range.1
    }
}

/// What two ranges have in common; an empty range when it is nothing.
pub(super) fn overlap(one: (u64, u64), other: (u64, u64)) -> (u64, u64) {
    let start = one.0.max(other.0);
    (start, one.1.min(other.1).max(start))
}
