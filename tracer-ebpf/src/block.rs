//! Read requests in the block layer: counts per device, whoever wanted them, and a record of each that a read of the
//! cluster may have waited for.
//!
//! The block layer's own times are cached per plug since 6.9, so each event takes its own.

use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use pgiotrace_ebpf::{
    Begun, Chain, Counter, DeviceGroup, MergeRecord, NOT_KNOWN, ReadKey, Request, RequestRecord,
    SECTOR_BYTES, flags, kind, request_flags,
};

use crate::{
    counters::count,
    files,
    finish::{add, add_latency, raise},
    kernel::{
        Args, BDEV_DISK, BIO_BDEV, BIO_FLAGS, BIO_PRIVATE, BIO_SECTOR, BIO_SIZE, DISK_FIRST_MINOR,
        DISK_MAJOR, Offset, QUEUE_DISK, REQUEST_BIO, REQUEST_BIOTAIL, REQUEST_CMD_FLAGS, REQUEST_DATA_LEN,
        REQUEST_QUEUE, REQUEST_SECTOR,
    },
    maps::{CHAINS, DEVICES, QUEUED, RECORDS, REQUESTS},
    process,
};

/// `REQ_OP_MASK` and `REQ_OP_READ` (`include/linux/blk_types.h`).
const REQ_OP_MASK: u32 = 0xff;
const REQ_OP_READ: u32 = 0;

/// `BPF_RB_AVAIL_DATA` and `BPF_RB_RING_SIZE` (`include/uapi/linux/bpf.h`).
const BPF_RB_AVAIL_DATA: u64 = 0;
const BPF_RB_RING_SIZE: u64 = 1;

/// What a device starts from: too large for a program's stack.
static EMPTY_DEVICE: &DeviceGroup = &DeviceGroup::EMPTY;

#[inline(always)]
fn is_read(request: u64) -> bool {
    reads(&REQUEST_CMD_FLAGS, request)
}

#[inline(always)]
fn is_read_bio(bio: u64) -> bool {
    reads(&BIO_FLAGS, bio)
}

#[inline(always)]
fn reads(flags: &Offset, of: u64) -> bool {
    flags.read::<u32>(of).is_some_and(|flags| flags & REQ_OP_MASK == REQ_OP_READ)
}

/// A thread gives a bio to the block layer (Q). From here on it may wait: for a free request above all.
#[inline(always)]
pub fn queued(args: &Args) {
    if !is_read_bio(args.get(0)) {
        return;
    }
    let (_, tid) = process::current();
    // SAFETY: a helper without preconditions.
    let queued_ns = unsafe { bpf_ktime_get_ns() };
    let _ = QUEUED.insert(tid, queued_ns, 0);
}

/// A request is made, for the bio that its thread gave to the block layer last, or for a part of it.
#[inline(always)]
pub fn started(args: &Args) {
    let address = args.get(0);
    if !is_read(address) {
        return;
    }
    let (submitter_tgid, tid) = process::current();
    // SAFETY: a helper without preconditions.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    let queued_ns = QUEUED.get_ptr(tid).map_or(now_ns, |queued| {
        // SAFETY: an aligned u64 of a preallocated table, which only this thread changes.
        unsafe { *queued }
    });
    let mut request = Request { queued_ns, submitter_tgid, asked_offset: NOT_KNOWN, ..Request::default() };
    match process::of_cluster(submitter_tgid) {
        Some(process) => {
            request.flags = request_flags::CLUSTER;
            if let Some(begun) = process::current_read(process) {
                // SAFETY: the read is in the course of this very thread, so its entry lives.
                let begun = unsafe { &*begun };
                request.read = ReadKey { start_ns: begun.start_ns, tid, reserved: 0 };
                request.asked_offset = begun.position;
                request.asked_length = begun.length;
                if queued_ns < begun.start_ns {
                    // Of an earlier bio: on this kernel, nobody tells of this one.
                    request.queued_ns = now_ns;
                }
            }
        }
        None if process::is_kernel_thread() => request.flags = request_flags::HELD,
        None => {}
    }
    follow(address, request);
}

/// A request goes to the driver (D). Its beginning may not have been seen: before the trace, or on kernels without
/// `block_io_start`. One that the driver gave back is issued again, and the last time counts.
#[inline(always)]
pub fn issued(args: &Args) {
    let address = args.get(0);
    if !is_read(address) {
        // A read that was merged into another never completes, and its address now serves this write.
        if REQUESTS.get_ptr(address).is_some() {
            let _ = REQUESTS.remove(address);
        }
        return;
    }
    // SAFETY: a helper without preconditions.
    let issued_ns = unsafe { bpf_ktime_get_ns() };
    if REQUESTS.get_ptr(address).is_none() {
        follow(address, Request { asked_offset: NOT_KNOWN, ..Request::default() });
    }
    let Some(request) = REQUESTS.get_ptr_mut(address) else { return };
    // SAFETY: the request is in flight, so its entry lives; a request is issued by one CPU at a time.
    let request = unsafe { &mut *request };
    let is_again = request.issued_ns != 0;
    request.issued_ns = issued_ns;
    if request.done_bytes == 0 {
        // Only now are its bytes final: until here, others may have been merged into it.
        describe(address, request);
    }
    let Some(group) = device_group(request.device) else { return };
    if is_again {
        add(&raw mut group.requeues, 1);
        return;
    }
    add(&raw mut group.depth, 1);
    let depth = &raw const group.depth;
    // SAFETY: an aligned u64 of a map value.
    raise(&raw mut group.most_depth, unsafe { depth.read_volatile() });
}

/// Says what a request is for.
#[inline(always)]
fn describe(address: u64, request: &mut Request) {
    request.sector = REQUEST_SECTOR.read(address).unwrap_or(0);
    request.device = device_of(address).unwrap_or(0);
    if request.chain == 0 {
        request.chain = chain_of(address);
    }
    if name_file(address, request).is_none() && is_of_no_known_read(request) {
        let _ = name_direct_read(address, request);
    }
}

/// Says which file the request's pages belong to, and where: as long as the last bio of those that were merged lies as
/// far into the same file as into the device, all between them is taken to be of it, too.
#[inline(always)]
fn name_file(address: u64, request: &mut Request) -> Option<()> {
    let first: u64 = REQUEST_BIO.read(address)?;
    let last: u64 = REQUEST_BIOTAIL.read(address)?;
    let place = files::place_of(first)?;
    // The device's own pages, which hold the file system's metadata, are of none.
    request.file = files::on_device(place.inode)?;
    request.offset = place.offset;
    request.file_bytes = REQUEST_DATA_LEN.read(address)?;
    if last == first {
        return Some(());
    }
    let sectors = BIO_SECTOR.read::<u64>(last)?.wrapping_sub(BIO_SECTOR.read::<u64>(first)?);
    let follows = files::place_of(last).is_some_and(|end| {
        end.inode == place.inode && end.offset.wrapping_sub(place.offset) == sectors * SECTOR_BYTES
    });
    if !follows {
        request.file_bytes = BIO_SIZE.read(first)?;
        count(Counter::Mixed);
    }
    Some(())
}

/// Whether the block layer held it back, or a thread of io_uring queued it: then its pages alone tell what it is for.
#[inline(always)]
fn is_of_no_known_read(request: &Request) -> bool {
    request.read.start_ns == 0 && request.flags & (request_flags::HELD | request_flags::CLUSTER) != 0
}

#[inline(always)]
fn name_direct_read(address: u64, request: &mut Request) -> Option<()> {
    (request.file, request.offset) = files::direct_read_of(REQUEST_BIO.read(address)?)?;
    request.flags |= request_flags::DIRECT;
    Some(())
}

/// A bio is too long for one request: the front of it goes on as a new bio, and the rest is submitted anew
/// (`bio_submit_split`, `block/blk-merge.c`).
#[inline(always)]
pub fn split(args: &Args) {
    let front = args.get(0);
    if !is_read_bio(front) {
        return;
    }
    let _ = chain(front);
}

#[inline(always)]
fn chain(front: u64) -> Option<()> {
    // `bio_chain` made the rest the front's `bi_private`.
    let rest: u64 = BIO_PRIVATE.read(front)?;
    let sector: u64 = BIO_SECTOR.read(front)?;
    let end_sector = BIO_SECTOR.read::<u64>(rest)? + u64::from(BIO_SIZE.read::<u32>(rest)?) / SECTOR_BYTES;
    // The rest of an earlier split is split again.
    let known = CHAINS.get_ptr(rest).map(|chain| {
        // SAFETY: a copy of an entry of a preallocated table; one that is reused meanwhile fails the check of the sectors.
        unsafe { *chain }
    });
    let chain = match known {
        Some(chain) if chain.end_sector == end_sector && chain.sector <= sector => chain,
        // SAFETY: a helper without preconditions.
        _ => Chain { id: unsafe { bpf_ktime_get_ns() }, sector, end_sector },
    };
    if CHAINS.insert(front, chain, 0).is_err() || CHAINS.insert(rest, chain, 0).is_err() {
        count(Counter::ChainsFull);
    }
    Some(())
}

/// The split bio that a request is a part of; 0: of none. A part may have been merged with others.
#[inline(always)]
fn chain_of(request: u64) -> u64 {
    let first = REQUEST_BIO.read(request).unwrap_or(0);
    match chain_of_bio(first) {
        0 => REQUEST_BIOTAIL.read(request).filter(|last| *last != first).map_or(0, chain_of_bio),
        id => id,
    }
}

#[inline(always)]
fn chain_of_bio(bio: u64) -> u64 {
    let Some(chain) = CHAINS.get_ptr(bio) else { return 0 };
    // SAFETY: as in `chain`.
    let chain = unsafe { *chain };
    let _ = CHAINS.remove(bio);
    // The address may serve another bio by now.
    match BIO_SECTOR.read::<u64>(bio) {
        Some(sector) if (chain.sector..chain.end_sector).contains(&sector) => chain.id,
        _ => 0,
    }
}

#[inline(always)]
fn follow(address: u64, request: Request) {
    if REQUESTS.insert(address, request, 0).is_err() {
        count(Counter::RequestsFull);
    }
}

/// A bio is merged into a request that there is already. Pages of the read's own file are recognised when that request is
/// issued; what belongs to a read in another way (direct I/O) must be told here.
#[inline(always)]
pub fn merged_bio(args: &Args) {
    let (tgid, tid) = process::current();
    let Some(process) = process::of_cluster(tgid) else { return };
    let bio = args.get(0);
    if !is_read_bio(bio) {
        return;
    }
    let Some(begun) = process::current_read(process) else { return };
    // SAFETY: the read is in the course of this very thread, so its entry lives.
    let begun: &Begun = unsafe { &*begun };
    if begun.flags & flags::DIRECT == 0 && files::place_of(bio).is_some() {
        return;
    }
    let Some(device) = BIO_BDEV.read(bio).and_then(|bdev| number_of(BDEV_DISK.read(bdev)?)) else { return };
    let read = ReadKey { start_ns: begun.start_ns, tid, reserved: 0 };
    tell_merge(device, BIO_SECTOR.read(bio).unwrap_or(0), read);
}

/// A request is merged into another one, and ends with it.
#[inline(always)]
pub fn merged_request(args: &Args) {
    let address = args.get(0);
    let Some(request) = REQUESTS.get_ptr(address) else { return };
    // SAFETY: the request is in the block layer, so its entry lives until it is removed below.
    let request = unsafe { &*request };
    if request.read.start_ns != 0
        && let Some(device) = device_of(address)
    {
        tell_merge(device, REQUEST_SECTOR.read(address).unwrap_or(0), request.read);
    }
    let _ = REQUESTS.remove(address);
}

#[inline(always)]
fn tell_merge(device: u32, sector: u64, read: ReadKey) {
    let Some(mut entry) = RECORDS.reserve::<MergeRecord>(0) else {
        count(Counter::RequestRecordLost);
        return;
    };
    // SAFETY: a helper without preconditions.
    let at_ns = unsafe { bpf_ktime_get_ns() };
    entry.write(MergeRecord { kind: kind::MERGE, device, sector, at_ns, read });
    entry.submit(0);
}

/// A request, or a part of it, completes (C).
#[inline(always)]
pub fn completed(args: &Args) {
    let address = args.get(0);
    let Some(request) = REQUESTS.get_ptr_mut(address) else { return };
    // SAFETY: the request is in flight, so its entry lives; a request completes on one CPU at a time.
    let request = unsafe { &mut *request };
    // SAFETY: a helper without preconditions.
    let done_ns = unsafe { bpf_ktime_get_ns() };
    let part = args.get(2) & 0xffff_ffff;
    // `__data_len` still holds what is left, this part included (`blk_update_request`, `block/blk-mq.c`).
    let left = REQUEST_DATA_LEN.read::<u32>(address).map_or(0, u64::from);
    let is_last = part >= left;
    if request.issued_ns != 0 {
        tell(request, done_ns, part as u32, !is_last);
        request.done_bytes += part;
        if is_last {
            add_to_device(request, done_ns);
        }
    }
    if is_last {
        let _ = REQUESTS.remove(address);
    }
}

/// Tells userspace of a completed part, if a read of the cluster may have waited for it.
#[inline(always)]
fn tell(request: &Request, done_ns: u64, bytes: u32, is_part: bool) {
    if request.flags & request_flags::CLUSTER == 0 {
        if request.file.inode == 0 {
            return;
        }
        // However much others read, the server's own reads shall find room.
        if RECORDS.query(BPF_RB_AVAIL_DATA) > RECORDS.query(BPF_RB_RING_SIZE) / 2 {
            count(Counter::RequestRecordLost);
            return;
        }
    }
    let Some(mut entry) = RECORDS.reserve::<RequestRecord>(0) else {
        count(Counter::RequestRecordLost);
        return;
    };
    let flags = request.flags | if is_part { request_flags::PART } else { 0 };
    let request = Request { flags, ..*request };
    entry.write(RequestRecord { kind: kind::REQUEST, bytes, done_ns, start: request.done_bytes, request });
    entry.submit(0);
}

#[inline(always)]
fn add_to_device(request: &Request, done_ns: u64) {
    let Some(group) = device_group(request.device) else { return };
    add(&raw mut group.depth, 1_u64.wrapping_neg());
    add(&raw mut group.requests, 1);
    add(&raw mut group.bytes, request.done_bytes);
    if request.flags & request_flags::CLUSTER != 0 {
        add(&raw mut group.cluster_requests, 1);
        add(&raw mut group.cluster_bytes, request.done_bytes);
    }
    if request.flags & request_flags::HELD != 0 {
        add(&raw mut group.held_requests, 1);
        add(&raw mut group.held_bytes, request.done_bytes);
    }
    if request.queued_ns != 0 {
        add_latency(&mut group.queue, request.issued_ns.saturating_sub(request.queued_ns));
    }
    add_latency(&mut group.service, done_ns.saturating_sub(request.issued_ns));
    add_latency(&mut group.sizes, request.done_bytes);
}

/// The disk's number as the kernel encodes it (`MKDEV`, `include/linux/kdev_t.h`).
#[inline(always)]
fn device_of(request: u64) -> Option<u32> {
    number_of(QUEUE_DISK.read(REQUEST_QUEUE.read(request)?)?)
}

#[inline(always)]
fn number_of(disk: u64) -> Option<u32> {
    let major: u32 = DISK_MAJOR.read(disk)?;
    let first_minor: u32 = DISK_FIRST_MINOR.read(disk)?;
    Some((major << 20) | first_minor)
}

#[inline(always)]
fn device_group(device: u32) -> Option<&'static mut DeviceGroup> {
    let group = DEVICES.get_ptr_mut(device).or_else(|| {
        // BPF_NOEXIST (1), as for groups of reads.
        let _ = DEVICES.insert(device, EMPTY_DEVICE, 1);
        DEVICES.get_ptr_mut(device)
    });
    let Some(group) = group else {
        count(Counter::RequestsFull);
        return None;
    };
    // SAFETY: devices are never removed; members are changed atomically.
    Some(unsafe { &mut *group })
}
