//! From the kernel's record of a read to the read with its owner.

use pgiotrace_ebpf::{Begun, OFFSET_OF_FILE_POSITION, ReadRecord, flags};

use super::{
    Join, MOST_DEFERRED, MOST_WAITING, Name,
    claims::{Candidates, Place, Span},
    uses::TracedUse,
};
use crate::{
    capture::{FileId, names::RelationKey},
    model::{
        aggregate::Incarnation,
        io::{Executor, Fidelity, Fork, Io, Method, RelationFork, Subject},
    },
    server::Pid,
};

/// Blocks of a segment file unless the server says otherwise: `RELSEG_SIZE` of a default build, 1 GiB.
const DEFAULT_SEGMENT_BLOCKS: u32 = 131_072;
/// Bytes of a block unless the server says otherwise: `BLCKSZ` of a default build.
const DEFAULT_BLOCK_BYTES: u32 = 8192;

/// Who owns a read, as far as the record alone tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ownership {
    /// This process, for sure.
    Known(Pid),
    /// Another process than the executor; the view `pg_aios` may tell which.
    Elsewhere,
}

impl Join {
    pub(super) fn take_read(&mut self, record: ReadRecord) {
        if self.expects_aios {
            self.compare_with_view(&record);
        }
        self.count_end(&record);
        match self.ownership(&record) {
            Ownership::Known(owner) => self.finish(&record, Some(owner), Fidelity::Exact),
            Ownership::Elsewhere => {
                self.waiting.push_back(record);
                if self.waiting.len() > MOST_WAITING {
                    self.settle_oldest();
                }
            }
        }
    }

    fn ownership(&self, record: &ReadRecord) -> Ownership {
        let begun = &record.begun;
        if begun.flags & flags::HANDLE != 0 {
            return match begun.owner_tgid {
                0 => Ownership::Elsewhere,
                owner => Ownership::Known(Pid(owner)),
            };
        }
        // Without a handle: an io_uring request is its submitter's, and a system call its caller's, unless the caller
        // is an io worker: those read relations only for others. What may be one counts as one; but relations are always
        // read at an offset (`FileReadV`, `src/backend/storage/file/fd.c`), and an io worker's own files by `read`.
        let executor = Pid(record.executor_tgid);
        let is_for_another = begun.flags & flags::IO_URING == 0
            && begun.offset != OFFSET_OF_FILE_POSITION
            && self.people.is_io_worker(executor)
            && !matches!(self.subject(record), Subject::Folder(_));
        if is_for_another { Ownership::Elsewhere } else { Ownership::Known(executor) }
    }

    /// Compares a read with the rows of the view: by its handle, or else as one that a row may mean.
    fn compare_with_view(&mut self, record: &ReadRecord) {
        let begun = &record.begun;
        let Some(relation) = relation_of_handle(begun) else {
            if let Some((place, span)) = self.place_of_file(record) {
                self.claims.add_read(place, span);
            }
            return;
        };
        let owner = (begun.owner_tgid != 0).then_some(Pid(begun.owner_tgid));
        let traced = TracedUse {
            end_ns: record.end_ns,
            generation: begun.handle.generation,
            owner: owner.and_then(|owner| self.people.inner(owner)),
            offset: (begun.offset != OFFSET_OF_FILE_POSITION).then_some(begun.offset),
            length: (begun.length != 0).then_some(begun.length),
            relation,
            block: begun.handle.block,
            blocks: begun.handle.blocks,
        };
        self.uses.add_use(begun.handle.io_id, traced);
    }

    fn count_end(&mut self, record: &ReadRecord) {
        match u64::try_from(record.result) {
            Ok(bytes) => {
                self.ends.completed += 1;
                self.ends.short += u64::from(bytes < self.wanted_bytes(record));
                self.ends.bytes += bytes;
                self.ends.blocks += self.blocks(record);
            }
            Err(_) => self.ends.failed += 1,
        }
    }

    /// Finds owners for the reads to which all claims are in.
    pub(super) fn settle_waiting(&mut self) {
        while self.waiting.front().is_some_and(|oldest| self.claims.are_settled(oldest.end_ns)) {
            self.settle_oldest();
        }
    }

    /// Finds owners for the reads that are left, with the samples that there are.
    pub(super) fn give_up_waiting(&mut self) {
        while !self.waiting.is_empty() {
            self.settle_oldest();
        }
    }

    fn settle_oldest(&mut self) {
        let Some(record) = self.waiting.pop_front() else { return };
        let candidates = self.candidates(&record);
        let (owner, fidelity) = match candidates {
            Candidates::One(inner) => match self.people.outer(inner) {
                Some(owner) => (Some(owner), Fidelity::Inferred),
                None => (None, Fidelity::Unattributed),
            },
            Candidates::Several => (None, Fidelity::Ambiguous),
            Candidates::None => (None, Fidelity::Unattributed),
        };
        self.finish(&record, owner, fidelity);
    }

    fn candidates(&self, record: &ReadRecord) -> Candidates {
        let begun = &record.begun;
        if begun.flags & flags::HANDLE != 0 {
            let owner = self.uses.owner_of_use(begun.handle.io_id, begun.handle.generation);
            return owner.map_or(Candidates::None, Candidates::One);
        }
        // As long as a claim may still be to another read, it decides nothing.
        let found = self.place_of_file(record).filter(|_| self.claims.are_settled(record.end_ns));
        found.map_or(Candidates::None, |(place, span)| self.claims.owner_of(&place, &span))
    }

    /// What a read without a handle reads of a relation, and when.
    fn place_of_file(&self, record: &ReadRecord) -> Option<(Place, Span)> {
        let begun = &record.begun;
        if begun.flags & flags::IO_URING != 0 || begun.offset == OFFSET_OF_FILE_POSITION {
            return None;
        }
        let file = self.files.get(&FileId::of(record))?;
        let Subject::Relation(relation) = file.subject else { return None };
        let length = match begun.length {
            0 => record.result.unsigned_abs(),
            length => length,
        };
        let place = Place { relation, segment: file.segment, offset: begun.offset, length };
        Some((place, Span { start_ns: begun.start_ns, end_ns: record.end_ns }))
    }

    /// Books a read whose owner is settled.
    fn finish(&mut self, record: &ReadRecord, owner: Option<Pid>, fidelity: Fidelity) {
        self.fidelity.add(fidelity);
        let executor = Pid(record.executor_tgid);
        let method = if record.begun.flags & flags::IO_URING != 0 {
            Method::IoUring
        } else if owner == Some(executor) {
            Method::Sync
        } else {
            Method::Worker
        };
        let executor_kind = match method {
            Method::Worker => Executor::IoWorker,
            Method::IoUring if record.begun.flags & flags::PUNTED != 0 => Executor::IouWrk,
            Method::Sync | Method::IoUring => Executor::Owner,
        };
        let io = Io {
            owner,
            executor,
            executor_kind,
            method,
            fidelity,
            subject: self.subject(record),
            blocks: self.blocks(record),
            bytes: u64::try_from(record.result).unwrap_or(0),
            failed: record.result < 0,
            latency_ns: record.end_ns.saturating_sub(record.begun.start_ns),
        };
        let owner = owner.map(|owner| self.people.current(owner));
        self.book(io, owner);
    }

    fn book(&mut self, io: Io, owner: Option<Incarnation>) {
        match self.admits(&io, owner) {
            Some(true) => self.aggregate.add(&io, owner),
            Some(false) => {}
            None => {
                self.deferred.push_back((io, owner));
                if self.deferred.len() > MOST_DEFERRED {
                    self.deferred.pop_front();
                    self.note("the filter left out reads whose names were learned too late".to_owned());
                }
            }
        }
    }

    fn admits(&self, io: &Io, owner: Option<Incarnation>) -> Option<bool> {
        if self.filter.is_empty() {
            return Some(true);
        }
        let person = owner.and_then(|owner| self.people.get(owner));
        self.filter.admits(io, person, self.name_of(&io.subject))
    }

    /// Books the deferred reads that the filter now can tell; at the end, the others are left out.
    pub(super) fn settle_deferred(&mut self, is_end: bool) {
        for (io, owner) in std::mem::take(&mut self.deferred) {
            match self.admits(&io, owner) {
                Some(true) => self.aggregate.add(&io, owner),
                Some(false) => {}
                None if is_end => {
                    self.note(
                        "the filter left out reads of sessions or relations whose names are not known"
                            .to_owned(),
                    );
                }
                None => self.deferred.push_back((io, owner)),
            }
        }
    }

    pub(super) fn name_of(&self, subject: &Subject) -> Option<&Name> {
        let Subject::Relation(relation) = subject else { return None };
        self.names.get(&RelationKey::of(relation))
    }

    fn subject(&self, record: &ReadRecord) -> Subject {
        if let Some(relation) = relation_of_handle(&record.begun) {
            return Subject::Relation(relation);
        }
        let file = self.files.get(&FileId::of(record));
        file.map_or(Subject::Unknown, |file| file.subject.clone())
    }

    /// Blocks that a read covered.
    fn blocks(&self, record: &ReadRecord) -> u64 {
        let Ok(bytes) = u64::try_from(record.result) else { return 0 };
        if record.begun.flags & flags::HANDLE != 0 {
            return u64::from(record.begun.handle.blocks);
        }
        match self.subject(record) {
            Subject::Relation(_) => bytes / u64::from(self.block_bytes()),
            Subject::Folder(_) | Subject::Unknown => 0,
        }
    }

    /// Bytes that the result is held against; 0 when it may be anything. The kernel side does not add up a vector's
    /// parts, and sees no length of what goes through io_uring, but the handle tells. A plain `read` of a small file
    /// asks for a buffer's length, and gets what there is.
    fn wanted_bytes(&self, record: &ReadRecord) -> u64 {
        let begun = &record.begun;
        if begun.flags & flags::HANDLE != 0 {
            u64::from(begun.handle.blocks) * u64::from(self.block_bytes())
        } else if begun.offset == OFFSET_OF_FILE_POSITION {
            0
        } else {
            begun.length
        }
    }

    fn block_bytes(&self) -> u32 {
        self.facts.as_ref().map_or(DEFAULT_BLOCK_BYTES, |facts| facts.block_size.max(1))
    }

    pub(super) fn segment_blocks(&self) -> u32 {
        self.facts.as_ref().map_or(DEFAULT_SEGMENT_BLOCKS, |facts| facts.segment_blocks)
    }
}

fn relation_of_handle(begun: &Begun) -> Option<RelationFork> {
    if begun.flags & flags::HANDLE == 0 {
        return None;
    }
    let handle = &begun.handle;
    Some(RelationFork {
        tablespace_oid: handle.tablespace_oid,
        database_oid: handle.database_oid,
        relfilenumber: handle.relfilenumber,
        fork: Fork::from_number(handle.fork)?,
        temporary: handle.is_temp != 0,
    })
}
