//! Read requests in the block layer, per device, whoever wanted them.
//!
//! The block layer's own times are cached per plug since 6.9, so each event takes its own.

use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use pgiotrace_ebpf::{Counter, DeviceGroup, Request};

use crate::{
    counters::count,
    finish::{add, add_latency},
    kernel::{
        Args, DISK_FIRST_MINOR, DISK_MAJOR, QUEUE_DISK, REQUEST_CMD_FLAGS, REQUEST_DATA_LEN, REQUEST_QUEUE,
    },
    maps::{DEVICES, REQUESTS},
};

/// `REQ_OP_MASK` and `REQ_OP_READ` (`include/linux/blk_types.h`).
const REQ_OP_MASK: u32 = 0xff;
const REQ_OP_READ: u32 = 0;

/// What a device starts from: too large for a program's stack.
static EMPTY_DEVICE: &DeviceGroup = &DeviceGroup::EMPTY;

#[inline(always)]
fn is_read(request: u64) -> bool {
    REQUEST_CMD_FLAGS.read::<u32>(request).is_some_and(|flags| flags & REQ_OP_MASK == REQ_OP_READ)
}

/// A request is made (Q).
#[inline(always)]
pub fn queued(args: &Args) {
    let request = args.get(0);
    if is_read(request) {
        // SAFETY: a helper without preconditions.
        let queued_ns = unsafe { bpf_ktime_get_ns() };
        follow(request, Request { queued_ns, issued_ns: 0, done_bytes: 0 });
    }
}

/// A request goes to the driver (D). Its beginning may not have been seen: before the trace, or on kernels without
/// `block_io_start`.
#[inline(always)]
pub fn issued(args: &Args) {
    let request = args.get(0);
    let known = REQUESTS.get_ptr_mut(request);
    if !is_read(request) {
        // A read that was merged into another never completes, and its address now serves this write.
        if known.is_some() {
            let _ = REQUESTS.remove(request);
        }
        return;
    }
    // SAFETY: a helper without preconditions.
    let issued_ns = unsafe { bpf_ktime_get_ns() };
    match known {
        // SAFETY: the request is in flight, so its entry lives; a request is issued by one CPU at a time.
        Some(known) => unsafe { (*known).issued_ns = issued_ns },
        None => follow(request, Request { queued_ns: 0, issued_ns, done_bytes: 0 }),
    }
}

#[inline(always)]
fn follow(address: u64, request: Request) {
    if REQUESTS.insert(address, request, 0).is_err() {
        count(Counter::RequestsFull);
    }
}

/// A request, or a part of it, completes (C).
#[inline(always)]
pub fn completed(args: &Args) {
    let address = args.get(0);
    let Some(request) = REQUESTS.get_ptr_mut(address) else { return };
    // SAFETY: the request is in flight, so its entry lives; a request completes on one CPU at a time.
    let request = unsafe { &mut *request };
    let part = args.get(2) & 0xffff_ffff;
    // `__data_len` still holds what is left, this part included (`blk_update_request`, `block/blk-mq.c`).
    let left = REQUEST_DATA_LEN.read::<u32>(address).map_or(0, u64::from);
    request.done_bytes += part;
    if part < left {
        return;
    }
    // SAFETY: a helper without preconditions.
    let done_ns = unsafe { bpf_ktime_get_ns() };
    if request.issued_ns != 0
        && let Some(device) = device_of(address)
        && let Some(group) = device_group(device)
    {
        add(&raw mut group.requests, 1);
        add(&raw mut group.bytes, request.done_bytes);
        if request.queued_ns != 0 {
            add_latency(&mut group.queue, request.issued_ns.saturating_sub(request.queued_ns));
        }
        add_latency(&mut group.service, done_ns.saturating_sub(request.issued_ns));
    }
    let _ = REQUESTS.remove(address);
}

/// The disk's number as the kernel encodes it (`MKDEV`, `include/linux/kdev_t.h`).
#[inline(always)]
fn device_of(request: u64) -> Option<u32> {
    let disk: u64 = QUEUE_DISK.read(REQUEST_QUEUE.read(request)?)?;
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
