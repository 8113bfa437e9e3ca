//! Block requests and the reads that waited for them: where each read's time went.
//!
//! A read waits for a request whose pages are among those that it reads, whoever queued it, while both were in flight; and for
//! one that was queued in its own course and brings no page of its file: metadata, or direct I/O. A request in its
//! course that brings other pages of its file is readahead, for which it does not wait.

use std::collections::{BTreeMap, HashMap, VecDeque};

use pgiotrace_ebpf::{FileId, MergeRecord, NOT_KNOWN, ReadKey, ReadRecord, RequestRecord, flags};

use crate::model::{
    intervals::Intervals,
    io::{Source, Timing},
};

use super::{
    parts::{Part, WantedBy, overlap},
    stages::{self, Waited},
    sums::Sums,
};

/// Requests that are remembered, for reads that have not ended and to recognise what readahead brought.
const MOST_REQUESTS: usize = 50_000;
/// Merges that are remembered until their requests complete.
const MOST_MERGES: usize = 4096;

/// A part of what was too long for one request.
#[derive(Debug, Clone, Copy)]
struct Chained {
    waited: Waited,
    file: FileId,
    offset: u64,
}

/// Where a part is found.
#[derive(Debug, Clone, Copy, Default)]
struct Remembered {
    read: ReadKey,
    chain: u64,
    file: FileId,
    offset: u64,
    done_ns: u64,
}

/// The requests of a trace.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// By file and offset: the newest that brought those pages. They do not overlap.
    by_file: HashMap<FileId, BTreeMap<u64, Part>>,
    /// By the read in whose course they were.
    by_read: HashMap<ReadKey, Vec<Part>>,
    /// By file and the offset at which a direct read began: what was queued in no read's course.
    direct: HashMap<(FileId, u64), Vec<Part>>,
    /// Parts of what was too long for one request: whoever waits for a page of it waits for all of them.
    by_chain: HashMap<u64, Vec<Chained>>,
    /// Oldest first: what is in the four above.
    order: VecDeque<Remembered>,
    /// Merges whose requests have not completed.
    merges: Vec<MergeRecord>,
    /// Requests whose times contradict each other.
    pub impossible: u64,
    /// For whom devices read.
    pub sums: Sums,
}

impl Blocks {
    /// Takes in a request, or a part of one, that has completed.
    pub fn add(&mut self, record: &RequestRecord) {
        let part = Part::of(record);
        self.sums.add(&part);
        self.impossible += u64::from(!part.waited.is_possible());
        self.remember(&part);
        for read in self.merged_into(&part) {
            self.by_read.entry(read).or_default().push(part.clone());
            self.order.push_back(Remembered { read, ..Remembered::default() });
        }
        self.forget_oldest();
    }

    /// The reads that had something merged into a request.
    fn merged_into(&mut self, part: &Part) -> Vec<ReadKey> {
        let its = self.merges.extract_if(.., |merge| part.takes(merge));
        its.map(|merge| merge.read).collect()
    }

    fn remember(&mut self, part: &Part) {
        if part.read.start_ns != 0 {
            self.by_read.entry(part.read).or_default().push(part.clone());
        }
        if part.is_of_file() {
            let parts = self.by_file.entry(part.file).or_default();
            // Whoever reads those pages now, has them from here.
            let replaced: Vec<u64> = parts_in(parts, part.range).map(|old| old.range.0).collect();
            for start in replaced {
                parts.remove(&start);
            }
            parts.insert(part.range.0, part.clone());
        }
        if part.is_direct {
            self.direct.entry((part.file, part.range.0)).or_default().push(part.clone());
        }
        if part.chain != 0 {
            let chained = Chained { waited: part.waited, file: part.file, offset: part.range.0 };
            self.by_chain.entry(part.chain).or_default().push(chained);
        }
        self.order.push_back(Remembered {
            read: part.read,
            chain: part.chain,
            file: part.file,
            offset: part.range.0,
            done_ns: part.waited.done_ns,
        });
    }

    /// Takes in that something of a read was merged into a request.
    pub fn add_merge(&mut self, merge: MergeRecord) {
        if self.merges.len() >= MOST_MERGES {
            // Of requests whose completion was never told: the oldest half goes at once.
            self.merges.drain(..MOST_MERGES / 2);
        }
        self.merges.push(merge);
    }

    /// Where the time of a read went that has just ended.
    pub fn settle(&mut self, read: &ReadRecord) -> Timing {
        let begun = &read.begun;
        let start_ns = if begun.staged_ns == 0 { begun.start_ns } else { begun.staged_ns };
        let mut timing = Timing { start_ns, end_ns: read.end_ns, ..Timing::default() };
        let own = self.by_read.remove(&key_of(read)).unwrap_or_default();
        let Some(range) = range_of(read).filter(|_| begun.flags & flags::NO_DEVICE == 0) else {
            return timing;
        };
        let found = if begun.flags & flags::DIRECT == 0 {
            Some(self.buffered(read, range, &own))
        } else {
            self.direct(read, &own)
        };
        if let Some(found) = found {
            (timing.stages, timing.spans) = stages::of(read, &found.waited);
            // What brought no bytes came from nowhere.
            timing.source = (read.result > 0).then_some(found.source);
            timing.is_readahead_hit = found.is_readahead_hit && found.source == Source::Cache;
        }
        timing
    }

    /// What a read through the page cache waited for: what brings its pages, whoever queued it, and metadata.
    fn buffered(&mut self, read: &ReadRecord, range: (u64, u64), own: &[Part]) -> Found {
        let begun = &read.begun;
        let is_metadata = |part: &&Part| part.file != begun.file || !part.is_of_file();
        let mut waited: Vec<Waited> = own.iter().filter(is_metadata).map(|part| part.waited).collect();
        self.credit(read, own);
        let mut brought = Intervals::default();
        let mut is_readahead_hit = false;
        let mut chains = Vec::new();
        let parts = self.by_file.get_mut(&begun.file).into_iter().flat_map(|parts| parts_in(parts, range));
        for part in parts {
            let common = overlap(part.range, range);
            let newly = part.asked.add(common.0, common.1).length();
            if part.waited.first_ns() >= read.end_ns {
                // Began after the read had ended.
                continue;
            }
            let chained = self.by_chain.get(&part.chain).map(Vec::as_slice).unwrap_or_default();
            let ends = chained.iter().map(|other| other.waited.done_ns);
            let done_ns = ends.fold(part.waited.done_ns, u64::max);
            if done_ns <= begun.start_ns {
                is_readahead_hit |= newly > 0;
                continue;
            }
            let is_held = self.sums.adopt(part) || part.wanted_by == WantedBy::Adopted;
            if is_held || part.read == key_of(read) || part.wanted_by == WantedBy::RingOf(begun.caller_tgid) {
                self.sums.ask(part, newly);
            }
            waited.push(part.waited);
            waited.extend(chained.iter().map(|other| other.waited));
            brought.add(common.0, common.1);
            chains.push(part.chain);
        }
        self.adopt_chains(&chains);
        let source = if waited.is_empty() {
            Source::Cache
        } else if brought.length() == range.1 - range.0 {
            Source::Device
        } else {
            Source::Mixed
        };
        Found { waited, source, is_readahead_hit }
    }

    /// A read of the server's waited for all parts of these.
    fn adopt_chains(&mut self, chains: &[u64]) {
        for Chained { file, offset, .. } in
            chains.iter().filter_map(|chain| self.by_chain.get(chain)).flatten()
        {
            let part = self.by_file.get_mut(file).and_then(|parts| parts.get_mut(offset));
            if let Some(part) = part.filter(|part| chains.contains(&part.chain)) {
                self.sums.adopt(part);
            }
        }
    }

    /// What a direct read waited for: what was queued in its course, and what names it. `None` where that is not all.
    fn direct(&mut self, read: &ReadRecord, own: &[Part]) -> Option<Found> {
        self.credit(read, own);
        let mut waited: Vec<Waited> = own.iter().map(|part| part.waited).collect();
        let mut bytes: u64 = own.iter().map(|part| part.bytes).sum();
        for part in self.claim_direct(read) {
            bytes += part.bytes;
            waited.push(part.waited);
        }
        let is_all = bytes >= u64::try_from(read.result).unwrap_or(0);
        (is_all && !waited.is_empty()).then_some(Found {
            waited,
            source: Source::Device,
            is_readahead_hit: false,
        })
    }

    /// Counts what brought no page of a file for the file of the read in whose course it was.
    fn credit(&mut self, read: &ReadRecord, own: &[Part]) {
        let key = key_of(read);
        for part in own.iter().filter(|part| part.read == key && !part.is_of_file()) {
            self.sums.credit(part, read.begun.file);
        }
    }

    /// Requests that name this direct read.
    fn claim_direct(&mut self, read: &ReadRecord) -> Vec<Part> {
        let begun = &read.begun;
        let parts = self.direct.get_mut(&(begun.file, begun.position)).into_iter().flatten();
        let its =
            parts.filter(|part| part.waited.first_ns() < read.end_ns && part.waited.done_ns > begun.start_ns);
        its.map(|part| {
            self.sums.claim_direct(part);
            part.clone()
        })
        .collect()
    }

    fn forget_oldest(&mut self) {
        while self.order.len() > MOST_REQUESTS {
            let Some(oldest) = self.order.pop_front() else { return };
            let Remembered { read, chain, file, offset, done_ns } = oldest;
            self.by_read.remove(&read);
            self.by_chain.remove(&chain);
            self.direct.remove(&(file, offset));
            if let Some(parts) = self.by_file.get_mut(&file) {
                // A newer one may have taken its place.
                if parts.get(&offset).is_some_and(|part| part.waited.done_ns == done_ns) {
                    parts.remove(&offset);
                }
                if parts.is_empty() {
                    self.by_file.remove(&file);
                }
            }
        }
    }
}

/// What a read waited for.
struct Found {
    waited: Vec<Waited>,
    source: Source,
    /// Whether it had pages that were read ahead, and that no read had asked for before.
    is_readahead_hit: bool,
}

/// By what a read's requests name it: the thread that began it, and when.
fn key_of(read: &ReadRecord) -> ReadKey {
    let is_call = read.begun.flags & flags::IO_URING == 0;
    let tid = if is_call { read.executor_tid } else { read.begun.caller_tgid };
    ReadKey { start_ns: read.begun.start_ns, tid, reserved: 0 }
}

/// Of parts that do not overlap each other, by their start: those that bring something of a range.
fn parts_in(parts: &mut BTreeMap<u64, Part>, range: (u64, u64)) -> impl Iterator<Item = &mut Part> {
    let until_end = parts.range_mut(..range.1.max(range.0)).rev().map(|(_, part)| part);
    until_end.take_while(move |part| part.range.1 > range.0)
}

/// Where in its file a read was, up to where it got; one that failed, where it wanted to. `None` when that is not known.
fn range_of(read: &ReadRecord) -> Option<(u64, u64)> {
    let begun = &read.begun;
    let bytes = u64::try_from(read.result).unwrap_or(begun.length);
    let is_known = begun.file.inode != 0 && begun.position != NOT_KNOWN;
    is_known.then(|| (begun.position, begun.position.saturating_add(bytes)))
}

#[cfg(test)]
mod tests {
    use pgiotrace_ebpf::{Begun, Request, SECTOR_BYTES, request_flags};

    use super::{
        super::sums::{Adopted, FromDevice},
        *,
    };
    use crate::model::io::Stage;

    const TABLE: FileId = FileId { inode: 7, device: 8, generation: 1 };
    const KIB: u64 = 1024;

    /// A read of a thread, of 8 KiB at an offset.
    fn read(tid: u32, offset: u64, (start_ns, end_ns): (u64, u64)) -> ReadRecord {
        ReadRecord {
            executor_tgid: tid,
            executor_tid: tid,
            run_delay_ns: NOT_KNOWN,
            end_ns,
            result: 8192,
            begun: Begun {
                start_ns,
                offset,
                position: offset,
                length: 8192,
                file: TABLE,
                caller_tgid: tid,
                owner_tgid: tid,
                ..Begun::default()
            },
            ..ReadRecord::default()
        }
    }

    fn key(read: &ReadRecord) -> ReadKey {
        ReadKey { start_ns: read.begun.start_ns, tid: key_of(read).tid, reserved: 0 }
    }

    /// A request for a range of the table.
    fn request((from, to): (u64, u64), [queued_ns, issued_ns, done_ns]: [u64; 3]) -> RequestRecord {
        let bytes = u32::try_from(to - from).expect("short");
        let request = Request {
            queued_ns,
            issued_ns,
            sector: from / SECTOR_BYTES,
            asked_offset: NOT_KNOWN,
            file: TABLE,
            offset: from,
            file_bytes: bytes,
            device: 1,
            flags: request_flags::CLUSTER,
            ..Request::default()
        };
        RequestRecord { bytes, done_ns, request, ..RequestRecord::default() }
    }

    /// The same, in the course of a read.
    fn request_of(by: &ReadRecord, range: (u64, u64), times: [u64; 3]) -> RequestRecord {
        let mut record = request(range, times);
        record.request.read = key(by);
        record.request.asked_offset = by.begun.position;
        record.request.asked_length = by.begun.length;
        record
    }

    fn of_no_file(mut record: RequestRecord) -> RequestRecord {
        record.request.file = FileId::default();
        (record.request.offset, record.request.file_bytes) = (0, 0);
        record
    }

    fn sums_of(blocks: &Blocks, file: FileId) -> FromDevice {
        let found = blocks.sums.iter().find(|(of, device, _)| (*of, *device) == (file, 1));
        found.map(|(_, _, sum)| *sum).unwrap_or_default()
    }

    fn stage(timing: &Timing, stage: Stage) -> Option<u64> {
        timing.stages.get(stage)
    }

    #[test]
    fn a_read_waits_for_the_request_that_it_caused() {
        let mut blocks = Blocks::default();
        let read = read(5, 0, (100, 900));
        blocks.add(&request_of(&read, (0, 8192), [110, 150, 800]));
        let timing = blocks.settle(&read);
        assert_eq!(timing.source, Some(Source::Device));
        assert_eq!(stage(&timing, Stage::Submit), Some(10));
        assert_eq!(stage(&timing, Stage::BlockQueue), Some(40));
        assert_eq!(stage(&timing, Stage::Device), Some(650));
        assert_eq!(timing.stages.sum_ns(), timing.latency_ns());
    }

    #[test]
    fn a_read_that_no_request_overlaps_is_served_from_the_cache() {
        let mut blocks = Blocks::default();
        let first = read(5, 0, (100, 900));
        blocks.add(&request_of(&first, (0, 8192), [110, 150, 800]));
        blocks.settle(&first);
        let again = read(6, 0, (1_000, 1_200));
        let timing = blocks.settle(&again);
        assert_eq!((timing.source, timing.is_readahead_hit), (Some(Source::Cache), false));
        assert_eq!(stage(&timing, Stage::Cache), Some(200));
        assert_eq!(stage(&timing, Stage::Device), None);
    }

    #[test]
    fn what_readahead_brought_is_told_from_what_was_asked() {
        let mut blocks = Blocks::default();
        let first = read(5, 0, (100, 900));
        blocks.add(&request_of(&first, (0, 128 * KIB), [110, 150, 800]));
        blocks.settle(&first);
        let sums = sums_of(&blocks, TABLE);
        assert_eq!((sums.requests, sums.asked_bytes, sums.ahead_bytes), (1, 8 * KIB, 120 * KIB));
        let next = blocks.settle(&read(5, 8 * KIB, (1_000, 1_100)));
        assert_eq!((next.source, next.is_readahead_hit), (Some(Source::Cache), true));
    }

    #[test]
    fn a_read_does_not_wait_for_its_own_readahead() {
        let mut blocks = Blocks::default();
        let read = read(5, 0, (100, 300));
        // It outlives the read.
        blocks.add(&request_of(&read, (64 * KIB, 128 * KIB), [110, 150, 200]));
        let timing = blocks.settle(&read);
        assert_eq!(timing.source, Some(Source::Cache));
        blocks.add(&request_of(&read, (128 * KIB, 256 * KIB), [120, 160, 5_000]));
        assert_eq!(sums_of(&blocks, TABLE).ahead_bytes, 192 * KIB);
    }

    #[test]
    fn a_read_waits_for_the_rest_of_a_request_that_another_one_caused() {
        let mut blocks = Blocks::default();
        let (other, late) = (read(5, 0, (100, 900)), read(6, 64 * KIB, (400, 850)));
        blocks.add(&request_of(&other, (0, 128 * KIB), [110, 150, 800]));
        let timing = blocks.settle(&late);
        assert_eq!(timing.source, Some(Source::Device));
        assert_eq!(stage(&timing, Stage::Device), Some(400));
        assert_eq!(stage(&timing, Stage::BlockQueue), None, "it came when the request was with the device");
    }

    #[test]
    fn a_request_that_completed_before_the_read_looked_costs_it_nothing() {
        let mut blocks = Blocks::default();
        blocks.add(&request((0, 8192), [10, 20, 90]));
        let timing = blocks.settle(&read(5, 0, (100, 200)));
        assert_eq!(timing.source, Some(Source::Cache));
        assert_eq!(timing.stages.sum_ns(), 100);
    }

    #[test]
    fn a_request_that_outlives_the_read_counts_only_while_the_read_lasted() {
        let mut blocks = Blocks::default();
        // The driver completes in parts: the pages are there before the request has ended.
        let read = read(5, 0, (100, 500));
        let mut part = request_of(&read, (0, 16 * KIB), [110, 150, 400]);
        part.bytes = 8192;
        part.request.flags |= request_flags::PART;
        blocks.add(&part);
        let timing = blocks.settle(&read);
        assert_eq!((timing.source, stage(&timing, Stage::Device)), (Some(Source::Device), Some(250)));
        let rest = RequestRecord { start: 8192, done_ns: 900, ..part };
        blocks.add(&RequestRecord {
            request: Request { flags: request_flags::CLUSTER, ..rest.request },
            ..rest
        });
        assert_eq!(sums_of(&blocks, TABLE).requests, 1, "two parts are one request");
    }

    #[test]
    fn metadata_in_the_course_of_a_read_is_waited_for() {
        let mut blocks = Blocks::default();
        let read = read(5, 0, (100, 900));
        blocks.add(&of_no_file(request_of(&read, (4096, 8192), [110, 150, 800])));
        let timing = blocks.settle(&read);
        assert_eq!((timing.source, stage(&timing, Stage::Device)), (Some(Source::Mixed), Some(650)));
    }

    #[test]
    fn direct_reads_that_share_a_request_wait_for_it_together() {
        let mut blocks = Blocks::default();
        let direct = |offset, times| {
            let mut read = read(5, offset, times);
            read.begun.flags |= flags::DIRECT | flags::IO_URING;
            read
        };
        let (one, two, lone) = (direct(0, (100, 900)), direct(8192, (105, 910)), direct(MIB, (106, 920)));
        blocks.add_merge(MergeRecord {
            device: 1,
            sector: 16,
            at_ns: 115,
            read: key(&two),
            ..MergeRecord::default()
        });
        blocks.add(&of_no_file(request_of(&one, (0, 16 * KIB), [110, 150, 800])));
        for read in [&one, &two] {
            let timing = blocks.settle(read);
            assert_eq!((timing.source, stage(&timing, Stage::Device)), (Some(Source::Device), Some(650)));
        }
        let counted = FromDevice { requests: 1, asked_bytes: 16 * KIB, ahead_bytes: 0 };
        assert_eq!(sums_of(&blocks, TABLE), counted);
        assert_eq!(sums_of(&blocks, FileId::default()), FromDevice::default());
        let timing = blocks.settle(&lone);
        assert_eq!((timing.source, stage(&timing, Stage::Device)), (None, None), "not measured");
    }

    const MIB: u64 = KIB * KIB;

    #[test]
    fn a_request_of_an_io_uring_thread_is_found_by_file_and_range() {
        let mut blocks = Blocks::default();
        let mut read = read(5, 0, (100, 900));
        read.begun.flags |= flags::IO_URING | flags::PUNTED;
        let mut record = request((0, 32 * KIB), [200, 250, 800]);
        record.request.submitter_tgid = 5;
        blocks.add(&record);
        let timing = blocks.settle(&read);
        assert_eq!((timing.source, stage(&timing, Stage::Device)), (Some(Source::Device), Some(550)));
        let sums = sums_of(&blocks, TABLE);
        assert_eq!((sums.asked_bytes, sums.ahead_bytes), (8 * KIB, 24 * KIB));
    }

    #[test]
    fn what_the_block_layer_held_back_is_time_in_its_queue() {
        let mut blocks = Blocks::default();
        let read = read(5, 0, (100, 900));
        let mut record = request((0, 8192), [600, 610, 800]);
        record.request.flags = request_flags::HELD;
        blocks.add(&record);
        let timing = blocks.settle(&read);
        assert_eq!(stage(&timing, Stage::BlockQueue), Some(510));
        assert_eq!(stage(&timing, Stage::Device), Some(190));
        assert_eq!(blocks.sums.adopted(1), Adopted { requests: 1, bytes: 8192 }, "it was the server's");
        blocks.settle(&read);
        assert_eq!(blocks.sums.adopted(1), Adopted { requests: 1, bytes: 8192 }, "once");
        assert_eq!(sums_of(&blocks, TABLE), FromDevice { requests: 1, asked_bytes: 8192, ahead_bytes: 0 });
    }

    #[test]
    fn a_direct_read_that_the_block_layer_held_back_is_found_by_where_it_began() {
        let mut blocks = Blocks::default();
        let mut read = read(5, 8192, (100, 900));
        read.begun.flags |= flags::DIRECT;
        let mut record = of_no_file(request((0, 8192), [600, 610, 800]));
        (record.request.file, record.request.offset) = (TABLE, 8192);
        record.request.flags = request_flags::HELD | request_flags::DIRECT;
        blocks.add(&record);
        let timing = blocks.settle(&read);
        assert_eq!((timing.source, stage(&timing, Stage::BlockQueue)), (Some(Source::Device), Some(510)));
        assert_eq!(sums_of(&blocks, TABLE), FromDevice { requests: 1, asked_bytes: 8192, ahead_bytes: 0 });
        assert_eq!(blocks.sums.adopted(1), Adopted { requests: 1, bytes: 8192 });
    }

    #[test]
    fn a_read_waits_for_all_parts_of_what_was_too_long_for_one_request() {
        let mut blocks = Blocks::default();
        let read = read(5, 0, (100, 900));
        // Its own pages were there before it came, but not to be had.
        for (range, times, is_held) in
            [((0, 512 * KIB), [10, 20, 90], false), ((512 * KIB, MIB), [700, 710, 800], true)]
        {
            let mut part = request(range, times);
            part.request.chain = 5;
            part.request.flags |= if is_held { request_flags::HELD } else { 0 };
            blocks.add(&part);
        }
        let timing = blocks.settle(&read);
        assert_eq!(timing.source, Some(Source::Device));
        assert_eq!(stage(&timing, Stage::BlockQueue), Some(610));
        assert_eq!(stage(&timing, Stage::Device), Some(90));
        assert_eq!(timing.stages.sum_ns(), 800);
    }

    #[test]
    fn a_read_without_bytes_has_times_but_no_source() {
        let mut blocks = Blocks::default();
        let at_the_end = ReadRecord { result: 0, ..read(5, 0, (100, 110)) };
        let timing = blocks.settle(&at_the_end);
        assert_eq!((timing.source, timing.stages.sum_ns()), (None, 10));
        let failed = ReadRecord { result: -5, ..read(5, 0, (200, 900)) };
        blocks.add(&request_of(&failed, (0, 8192), [210, 250, 800]));
        let timing = blocks.settle(&failed);
        assert_eq!((timing.source, stage(&timing, Stage::Device)), (None, Some(550)));
    }

    #[test]
    fn what_readahead_brought_is_a_hit_for_the_first_who_reads_it() {
        let mut blocks = Blocks::default();
        let first = read(5, 0, (100, 900));
        blocks.add(&request_of(&first, (0, 128 * KIB), [110, 150, 800]));
        blocks.settle(&first);
        let hits = [0, 8 * KIB, 8 * KIB].map(|offset| blocks.settle(&read(6, offset, (1_000, 1_100))));
        assert_eq!(hits.map(|timing| timing.is_readahead_hit), [false, true, false]);
    }

    #[test]
    fn the_newest_request_tells_where_pages_are_from() {
        let mut blocks = Blocks::default();
        let first = read(5, 0, (100, 900));
        blocks.add(&request_of(&first, (0, 128 * KIB), [110, 150, 800]));
        // Evicted, and read again for itself.
        let again = read(6, 8 * KIB, (1_000, 2_000));
        blocks.add(&request_of(&again, (8 * KIB, 16 * KIB), [1_010, 1_020, 1_900]));
        blocks.settle(&again);
        assert!(!blocks.settle(&read(7, 8 * KIB, (3_000, 3_010))).is_readahead_hit);
    }

    #[test]
    fn a_read_without_a_known_length_has_asked_for_what_it_got() {
        let mut blocks = Blocks::default();
        let mut vectored = read(5, 0, (100, 900));
        vectored.begun.length = 0;
        blocks.add(&request_of(&vectored, (0, 32 * KIB), [110, 150, 800]));
        blocks.settle(&vectored);
        let sums = sums_of(&blocks, TABLE);
        assert_eq!((sums.asked_bytes, sums.ahead_bytes), (8 * KIB, 24 * KIB));
    }

    #[test]
    fn of_a_file_system_without_a_device_nothing_is_told() {
        let mut blocks = Blocks::default();
        let mut remote = read(5, 0, (100, 900));
        remote.begun.flags |= flags::NO_DEVICE;
        let timing = blocks.settle(&remote);
        assert_eq!((timing.source, timing.stages.sum_ns(), timing.latency_ns()), (None, 0, 800));
    }

    #[test]
    fn a_direct_read_of_which_a_part_is_missing_has_no_stages() {
        let mut blocks = Blocks::default();
        let mut read = read(5, 0, (100, 900));
        read.begun.flags |= flags::DIRECT;
        blocks.add(&of_no_file(request_of(&read, (0, 4 * KIB), [110, 150, 300])));
        let timing = blocks.settle(&read);
        assert_eq!((timing.source, timing.stages.sum_ns()), (None, 0));
    }

    #[test]
    fn memory_stays_bounded_however_many_requests_there_are() {
        let mut blocks = Blocks::default();
        for number in 0..MOST_REQUESTS as u64 + 1_000 {
            let read = read(5, number * 8192, (number * 10 + 1, number * 10 + 9));
            let offset = number * 8192;
            blocks.add(&request_of(
                &read,
                (offset, offset + 8192),
                [number * 10 + 2, number * 10 + 3, number * 10 + 4],
            ));
        }
        assert_eq!(blocks.order.len(), MOST_REQUESTS);
        assert_eq!(blocks.by_file[&TABLE].len(), MOST_REQUESTS);
        assert_eq!(blocks.by_read.len(), MOST_REQUESTS);
    }
}
