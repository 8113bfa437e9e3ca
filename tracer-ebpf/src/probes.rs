//! Probes of the server's own functions, attached with `--pg-probes` only: when a read was handed over, and which one
//! its owner waits for.

use aya_ebpf::{
    helpers::{bpf_probe_read_user, generated::bpf_ktime_get_ns},
    programs::ProbeContext,
};
use pgiotrace_ebpf::{Cluster, Counter, Staged, handle};

use crate::{counters::count, handles, maps::STAGED, process};

/// `PGAIO_SUBMIT_BATCH_SIZE` (`src/include/storage/aio_internal.h`).
const MOST_IN_BATCH: u64 = 32;

/// `PgAioWaitRef` (`src/include/storage/aio_types.h`).
#[repr(C)]
struct WaitReference {
    io_id: u32,
    generation_upper: u32,
    generation_lower: u32,
}

/// The owner hands a batch over: `submit(uint16 num_staged_ios, PgAioHandle **staged_ios)` of `IoMethodOps`.
#[inline(always)]
pub fn submit(ctx: &ProbeContext) {
    count(Counter::ProbeTraps);
    let (tgid, _) = process::current();
    // The probe is in the binary, which other clusters may run as well.
    if process::of_cluster(tgid).is_none() {
        return;
    }
    let (Some(cluster), Some(number), Some(handles)) =
        (process::cluster(), ctx.arg::<u16>(0), ctx.arg::<u64>(1))
    else {
        return;
    };
    // SAFETY: a helper without preconditions.
    let at_ns = unsafe { bpf_ktime_get_ns() };
    for index in 0..MOST_IN_BATCH {
        if index >= u64::from(number) {
            break;
        }
        stage(cluster, handles + index * 8, at_ns);
    }
}

/// Remembers when the use of a handle was handed over, whose address stands at another.
#[inline(always)]
fn stage(cluster: &Cluster, pointer: u64, at_ns: u64) {
    // SAFETY: the helper checks the address itself.
    let Ok(address) = (unsafe { bpf_probe_read_user(pointer as *const u64) }) else { return };
    let Some(io_id) = handles::io_id_at(cluster, address) else { return };
    let generation = (address + handle::GENERATION as u64) as *const u64;
    // SAFETY: as above.
    let Ok(generation) = (unsafe { bpf_probe_read_user(generation) }) else { return };
    let _ = STAGED.set(io_id, Staged { generation, at_ns }, 0);
}

/// A process begins to wait for the use of a handle: `pgaio_wref_wait(PgAioWaitRef *iow)`
/// (`src/backend/storage/aio/aio.c`).
#[inline(always)]
pub fn wait(ctx: &ProbeContext) {
    count(Counter::ProbeTraps);
    let (tgid, _) = process::current();
    let (Some(process), Some(reference)) = (process::of_cluster(tgid), ctx.arg::<u64>(0)) else { return };
    // SAFETY: the helper checks the address itself.
    let Ok(reference) = (unsafe { bpf_probe_read_user(reference as *const WaitReference) }) else { return };
    let WaitReference { io_id, generation_upper, generation_lower } = reference;
    // SAFETY: a live map value, and only its own thread changes these members.
    let process = unsafe { &mut *process };
    process.awaited_io_id = io_id;
    process.awaited_generation = u64::from(generation_upper) << 32 | u64::from(generation_lower);
}
