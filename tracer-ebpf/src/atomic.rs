//! Atomic additions to map values. `core`'s atomics have none on this target, because its older processors lack
//! compare-and-swap; the instruction itself (`BPF_ATOMIC | BPF_ADD`) has always been there.

use core::arch::asm;

/// Adds to a u64 that other CPUs may change at the same time.
///
/// # Safety
///
/// `value` must be an aligned u64 in a map value.
#[inline(always)]
pub unsafe fn add_u64(value: *mut u64, amount: u64) {
    // SAFETY: the caller's promise; the verifier checks the access as well.
    unsafe { asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) value, in(reg) amount, options(nostack)) };
}

/// Adds to a u32 that other CPUs may change at the same time.
///
/// # Safety
///
/// `value` must be an aligned u32 in a map value.
#[inline(always)]
pub unsafe fn add_u32(value: *mut u32, amount: u32) {
    // SAFETY: the caller's promise; the verifier checks the access as well.
    unsafe {
        asm!("lock *(u32 *)({0} + 0) += {1}", in(reg) value, in(reg) u64::from(amount), options(nostack));
    };
}

/// Hides a value's range from the compiler, so that a check of it stays in the program: the verifier does not see
/// through the arithmetic by which the compiler would prove the check needless.
#[inline(always)]
pub fn opaque(mut value: u64) -> u64 {
    // SAFETY: a move of a register to itself.
    unsafe { asm!("{0} = {0}", inout(reg) value, options(nomem, nostack)) };
    value
}
