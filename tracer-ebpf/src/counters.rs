//! Counters, per CPU so that no two CPUs fight for one cache line.

use pgiotrace_ebpf::Counter;

use crate::{atomic, maps::COUNTERS};

/// Adds one.
#[inline(always)]
pub fn count(counter: Counter) {
    if let Some(value) = COUNTERS.get_ptr_mut(counter as u32) {
        // SAFETY: an aligned u64 of a map value. Atomic although it is this CPU's own: a program may be
        // interrupted by another one (a block completion) on the same CPU.
        unsafe { atomic::add_u64(value, 1) };
    }
}
