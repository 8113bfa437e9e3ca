//! From the kernel's record of a read to the read with its owner.

use pgiotrace_ebpf::{Execution, OFFSET_OF_FILE_POSITION, WaitRecord, flags};

use super::{
    Join, MOST_DEFERRED, MOST_FILES, MOST_WAITING, Name, Sampling,
    claims::{Candidates, Place, Span},
    uses::TracedUse,
    wakeups::Wakeups,
};
use crate::{
    capture::{SeenRead, names::RelationKey},
    model::{
        MOST_NANOS,
        aggregate::Incarnation,
        io::{Executor, Fidelity, Io, Method, QueryOf, RelationFork, Sighting, Subject, Timing},
    },
    server::{Pid, aio::FIRST_AIO_MAJOR, own_sessions::Serves},
};

/// Blocks of a segment file unless the control file says otherwise: `RELSEG_SIZE` of a default build, 1 GiB.
const DEFAULT_SEGMENT_BLOCKS: u32 = 131_072;
/// Bytes of a block unless the control file says otherwise: `BLCKSZ` of a default build.
const DEFAULT_BLOCK_BYTES: u32 = 8192;

/// Who owns a read, as far as the record alone tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ownership {
    /// This process, for sure.
    Known(Pid),
    /// Another process than the executor; the view `pg_aios` may tell which.
    Elsewhere,
    /// What the record says cannot be.
    Contradictory,
}

impl Join {
    pub(super) fn take_read(&mut self, read: SeenRead) {
        if self.expects_aios {
            self.compare_with_view(&read);
        }
        self.count_end(&read);
        self.remember_file(&read);
        // Now, while the requests that it may have waited for are remembered.
        let mut timing = self.blocks.settle(&read.record);
        if RelationFork::of_handle(&read.record.begun).is_some() {
            let handle = &read.record.begun.handle;
            timing.queued_by_ns = self.uses.queued_by_ns(handle.io_id, handle.generation);
        }
        match self.ownership(&read) {
            Ownership::Known(owner) => self.finish(&read, timing, Some(owner), Fidelity::Exact),
            Ownership::Contradictory => self.finish(&read, timing, None, Fidelity::Unattributed),
            Ownership::Elsewhere => {
                self.waiting.push_back((read, timing));
                if self.waiting.len() > MOST_WAITING {
                    self.settle_oldest();
                }
            }
        }
    }

    fn ownership(&self, read: &SeenRead) -> Ownership {
        let begun = &read.record.begun;
        let executor = Pid(read.record.executor_tgid);
        // Before asynchronous I/O there were none. What is not known may be one.
        let may_be_io_worker =
            self.server.major >= FIRST_AIO_MAJOR && self.people.is_io_worker(executor) != Some(false);
        if begun.flags & flags::HANDLE != 0 {
            // Only its owner or an io worker executes a handle's read.
            return match begun.owner_tgid {
                0 if may_be_io_worker => Ownership::Elsewhere,
                0 => Ownership::Known(executor),
                owner if owner == executor.0 || may_be_io_worker => Ownership::Known(Pid(owner)),
                _ => Ownership::Contradictory,
            };
        }
        // Without a handle: an io_uring request is its submitter's, and a system call its caller's, unless the caller
        // is an io worker: those read relations only for others. Relations are always read at an offset (`FileReadV`,
        // `src/backend/storage/file/fd.c`), and an io worker's own files by `read`.
        let is_for_another = may_be_io_worker
            && begun.flags & flags::IO_URING == 0
            && begun.offset != OFFSET_OF_FILE_POSITION
            && !matches!(read.subject(), Subject::Folder(_));
        if is_for_another { Ownership::Elsewhere } else { Ownership::Known(executor) }
    }

    /// Remembers what a file is, so that requests for it can be told apart. Most reads are of a known one.
    fn remember_file(&mut self, read: &SeenRead) {
        let file = read.record.begun.file;
        if file.inode != 0 && !self.files.contains_key(&file) && self.files.len() < MOST_FILES {
            self.files.insert(file, read.subject());
        }
    }

    /// Compares a read with the rows of the view: by its handle, or else as one that a row may mean.
    fn compare_with_view(&mut self, read: &SeenRead) {
        let begun = &read.record.begun;
        let Some(relation) = RelationFork::of_handle(begun) else {
            if let Some((place, span)) = read.place() {
                self.claims.add_read(place, span);
            }
            return;
        };
        let owner = (begun.owner_tgid != 0).then_some(Pid(begun.owner_tgid));
        let traced = TracedUse {
            end_ns: read.record.end_ns,
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

    fn count_end(&mut self, read: &SeenRead) {
        self.ends.beyond_range += u64::from(read.latency_ns() > MOST_NANOS);
        match u64::try_from(read.record.result) {
            Ok(bytes) => {
                self.ends.completed += 1;
                self.ends.short += u64::from(bytes < self.wanted_bytes(read));
                self.ends.bytes += bytes;
                self.ends.blocks += self.blocks(read);
            }
            Err(_) => self.ends.failed += 1,
        }
    }

    /// Finds owners for the reads to which all claims are in.
    pub(super) fn settle_waiting(&mut self) {
        while self.waiting.front().is_some_and(|(oldest, _)| self.claims.are_settled(oldest.record.end_ns)) {
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
        let Some((read, timing)) = self.waiting.pop_front() else { return };
        let candidates = self.candidates(&read);
        let (owner, fidelity) = match candidates {
            Candidates::One(inner) => match self.people.outer(inner) {
                Some(owner) => (Some(owner), Fidelity::Inferred),
                None => (None, Fidelity::Unattributed),
            },
            Candidates::Several => (None, Fidelity::Ambiguous),
            Candidates::None => (None, Fidelity::Unattributed),
        };
        self.finish(&read, timing, owner, fidelity);
    }

    fn candidates(&self, read: &SeenRead) -> Candidates {
        let begun = &read.record.begun;
        if begun.flags & flags::HANDLE != 0 {
            let owner = self.uses.owner_of_use(begun.handle.io_id, begun.handle.generation);
            return owner.map_or(Candidates::None, Candidates::One);
        }
        // As long as a claim may still be to another read, it decides nothing.
        let found = read.place().filter(|_| self.claims.are_settled(read.record.end_ns));
        found.map_or(Candidates::None, |(place, span)| self.claims.owner_of(&place, &span))
    }

    /// Books a read whose owner is settled.
    fn finish(&mut self, read: &SeenRead, timing: Timing, owner: Option<Pid>, fidelity: Fidelity) {
        self.fidelity.add(fidelity);
        let executor = Pid(read.record.executor_tgid);
        let method = if read.record.begun.flags & flags::IO_URING != 0 {
            Method::IoUring
        } else if owner == Some(executor) {
            Method::Sync
        } else {
            Method::Worker
        };
        let executor_kind = match method {
            Method::Worker => Executor::IoWorker,
            Method::IoUring if read.record.begun.flags & flags::PUNTED != 0 => Executor::IouWrk,
            Method::Sync | Method::IoUring => Executor::Owner,
        };
        let io = Io {
            owner,
            executor,
            executor_kind,
            method,
            subject: read.subject(),
            blocks: self.blocks(read),
            bytes: u64::try_from(read.record.result).unwrap_or(0),
            is_queue_full_fallback: method == Method::Sync && read.may_have_been_queued(),
            sighting: read.sighting(owner),
            query: QueryOf::default(),
            timing,
        };
        if self.sampling != Sampling::Never {
            let waiters = read.record.waiter_tgids.map(|tgid| (tgid != 0).then_some(Pid(tgid)));
            self.waits.read(&io, waiters);
        }
        let owner = owner.map(|owner| self.people.current(owner));
        self.pg_stats.add(&io, owner, read.record.begun.flags & flags::HANDLE != 0);
        match (owner, &mut self.wakeups) {
            // Without its handle it cannot be told from others.
            (Some(owner), Some(wakeups))
                if method != Method::Sync && read.record.begun.flags & flags::HANDLE != 0 =>
            {
                let handle = &read.record.begun.handle;
                let let_go = wakeups.hold(owner, (handle.io_id, handle.generation), io);
                self.book_each(let_go);
            }
            _ => self.book(io, owner),
        }
    }

    /// Books the reads for which an owner's wait decides whether it was for them.
    pub(super) fn book_woken(&mut self, owner: Incarnation, wait: &WaitRecord) {
        let woken = self.wakeups.as_mut().map(|wakeups| wakeups.wait(owner, wait)).unwrap_or_default();
        self.book_each(woken.into_iter().map(|io| (io, owner)));
    }

    /// Books the reads that an owner had not waited for when it ended.
    pub(super) fn let_go_of(&mut self, owner: Incarnation) {
        let left = self.wakeups.as_mut().map(|wakeups| wakeups.leave(owner)).unwrap_or_default();
        self.book_each(left.into_iter().map(|io| (io, owner)));
    }

    /// Books the reads that owners have not waited for.
    pub(super) fn let_go_of_all(&mut self) {
        let left = self.wakeups.as_mut().map(Wakeups::give_up).unwrap_or_default();
        self.book_each(left);
    }

    fn book_each(&mut self, reads: impl IntoIterator<Item = (Io, Incarnation)>) {
        for (io, owner) in reads {
            self.book(io, Some(owner));
        }
    }

    fn book(&mut self, io: Io, owner: Option<Incarnation>) {
        self.ends.impossible += u64::from(!io.timing.is_possible());
        match owner {
            Some(owner) => {
                let settled = self.executions.read(owner, io);
                self.book_settled(owner, settled);
            }
            None => self.book_whole(io, None),
        }
    }

    /// Books reads of which it is settled what query wanted them.
    pub(super) fn book_settled(&mut self, owner: Incarnation, reads: Vec<Io>) {
        for io in reads {
            self.book_whole(io, Some(owner));
        }
    }

    /// Books a read of which all is known that will be.
    fn book_whole(&mut self, io: Io, owner: Option<Incarnation>) {
        if self.serves(owner) == Serves::Tracer {
            self.own_reads += 1;
            return;
        }
        match self.admits(&io, owner) {
            Some(true) => self.pass(&io, owner),
            Some(false) => {}
            None => {
                self.deferred.push_back((io, owner));
                if self.deferred.len() > MOST_DEFERRED {
                    self.settle_deferred(true);
                    if !self.filter.is_empty() {
                        self.note("the filter left out reads whose names were learned too late".to_owned());
                    }
                }
            }
        }
    }

    fn pass(&mut self, io: &Io, owner: Option<Incarnation>) {
        self.passed += 1;
        self.aggregate.add(io, owner);
        let Some(owner) = owner else { return };
        let growth = self.exposures.entry(owner).read(io);
        if let Some(run) = self.executions.add(owner, io) {
            self.fold_run(owner, run);
        }
        self.executions.add_exposure(owner, io.query, growth);
    }

    /// Whom a read's owner serves.
    fn serves(&self, owner: Option<Incarnation>) -> Serves {
        owner.map(|owner| self.people.serves(owner)).unwrap_or_default()
    }

    fn admits(&self, io: &Io, owner: Option<Incarnation>) -> Option<bool> {
        match self.serves(owner) {
            Serves::Others => {}
            Serves::Undecided => return None,
            Serves::Tracer => return Some(false),
        }
        if self.filter.is_empty() {
            return Some(true);
        }
        let person = owner.and_then(|owner| self.people.get(owner));
        let by_query = match (owner, &self.filter.query_ids[..]) {
            (_, []) => Some(true),
            (Some(owner), query_ids) => self.executions.is_among(owner, io, query_ids),
            (None, _) => Some(false),
        };
        let by_rest = self.filter.admits(io, person, self.name_of(&io.subject));
        match (by_query, by_rest) {
            (Some(false), _) | (_, Some(false)) => Some(false),
            (Some(true), Some(true)) => Some(true),
            _ => None,
        }
    }

    /// Books the deferred reads that the filter now can tell; at the end, the others are left out.
    pub(super) fn settle_deferred(&mut self, is_end: bool) {
        for (io, owner) in std::mem::take(&mut self.deferred) {
            match self.admits(&io, owner) {
                Some(true) => self.pass(&io, owner),
                Some(false) if self.serves(owner) == Serves::Tracer => self.own_reads += 1,
                Some(false) => {}
                None if is_end && self.filter.is_empty() => self.pass(&io, owner),
                None if is_end => {
                    self.note(
                        "the filter left out reads of sessions or relations whose names are not known"
                            .to_owned(),
                    );
                }
                None => self.deferred.push_back((io, owner)),
            }
        }
        self.fold_settled();
    }

    pub(super) fn name_of(&self, subject: &Subject) -> Option<&Name> {
        let Subject::Relation(relation) = subject else { return None };
        self.names.get(&RelationKey::of(relation))
    }

    /// Blocks that a read covered.
    fn blocks(&self, read: &SeenRead) -> u64 {
        let Ok(bytes) = u64::try_from(read.record.result) else { return 0 };
        if read.record.begun.flags & flags::HANDLE != 0 {
            return u64::from(read.record.begun.handle.blocks);
        }
        match read.subject() {
            Subject::Relation(_) => bytes / u64::from(self.block_bytes()),
            Subject::Folder(_) | Subject::Unknown => 0,
        }
    }

    /// Bytes that the result is held against; 0 when it may be anything. The kernel side does not add up a vector's
    /// parts, and sees no length of what goes through io_uring, but the handle tells. A plain `read` of a small file
    /// asks for a buffer's length, and gets what there is.
    fn wanted_bytes(&self, read: &SeenRead) -> u64 {
        let begun = &read.record.begun;
        if begun.flags & flags::HANDLE != 0 {
            u64::from(begun.handle.blocks) * u64::from(self.block_bytes())
        } else if begun.offset == OFFSET_OF_FILE_POSITION {
            0
        } else {
            begun.length
        }
    }

    pub(super) fn block_bytes(&self) -> u32 {
        self.server.build_sizes.map_or(DEFAULT_BLOCK_BYTES, |sizes| sizes.block_bytes)
    }

    pub(super) fn segment_blocks(&self) -> u32 {
        self.server.build_sizes.map_or(DEFAULT_SEGMENT_BLOCKS, |sizes| sizes.segment_blocks)
    }
}

/// Flags of a handle whose read is executed by its owner by design: `PGAIO_HF_SYNCHRONOUS`, `PGAIO_HF_REFERENCES_LOCAL`
/// (`src/include/storage/aio.h`).
const EXECUTED_BY_OWNER: u8 = 1 | 2;

impl SeenRead {
    /// Whether an io worker could have executed it (`pgaio_worker_needs_synchronous_execution`,
    /// `src/backend/storage/aio/method_worker.c`).
    fn may_have_been_queued(&self) -> bool {
        let begun = &self.record.begun;
        begun.flags & flags::HANDLE != 0 && begun.handle.flags & EXECUTED_BY_OWNER == 0
    }

    /// What its record says of the query that wanted it. Only of the process that began it, its record says what that executed.
    fn sighting(&self, owner: Option<Pid>) -> Sighting {
        let begun = &self.record.begun;
        if begun.flags & flags::HANDLE != 0 && begun.handle.is_abandoned != 0 {
            return Sighting::Abandoned;
        }
        if owner != Some(Pid(begun.caller_tgid)) || begun.flags & flags::EXECUTION == 0 {
            return Sighting::None;
        }
        let Execution { started_us, query_id } = begun.execution;
        if started_us == 0 {
            return Sighting::NoQuery;
        }
        Sighting::Query { started_us, query_id: (query_id != 0).then_some(query_id) }
    }

    /// Nanoseconds from start to end.
    fn latency_ns(&self) -> u64 {
        self.record.end_ns.saturating_sub(self.record.begun.start_ns)
    }

    /// What was read.
    fn subject(&self) -> Subject {
        match (RelationFork::of_handle(&self.record.begun), &self.file) {
            (Some(relation), _) => Subject::Relation(relation),
            (None, Some(file)) => file.subject.clone(),
            (None, None) => Subject::Unknown,
        }
    }

    /// What a read without a handle reads of a relation, and when.
    fn place(&self) -> Option<(Place, Span)> {
        let (begun, file) = (&self.record.begun, self.file.as_ref()?);
        let Subject::Relation(relation) = file.subject else { return None };
        if begun.offset == OFFSET_OF_FILE_POSITION {
            return None;
        }
        let length = match begun.length {
            0 => u64::try_from(self.record.result).ok()?,
            length => length,
        };
        let place = Place { relation, segment: file.segment, offset: begun.offset, length };
        Some((place, Span { start_ns: begun.start_ns, end_ns: self.record.end_ns }))
    }
}
