//! A log-linear histogram small enough for a map value.
//!
//! Each power of two of nanoseconds is divided into [`STEPS`] equal buckets, so that a bucket is at most 1/16 of
//! its value wide. The range is 1 µs to 73 minutes; shorter values share the first bucket, longer ones the last.

/// Smallest power of two that has buckets of its own: 2^10 ns.
const FIRST_EXPONENT: u32 = 10;
/// First power of two beyond the range: 2^42 ns is 73 minutes.
const END_EXPONENT: u32 = 42;
/// log2 of the number of buckets for each power of two.
const STEP_BITS: u32 = 4;
/// Buckets for each power of two.
const STEPS: u32 = 1 << STEP_BITS;

/// Number of buckets: a power of two, so that a mask bounds an index.
pub const BUCKETS: usize = ((END_EXPONENT - FIRST_EXPONENT) * STEPS) as usize;

const _: () = assert!(BUCKETS.is_power_of_two());

/// Latencies in nanoseconds.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Histogram {
    /// Exact sum, nanoseconds.
    pub sum_ns: u64,
    /// Maximum, nanoseconds; of two new ones at the same moment on two CPUs, the smaller may be kept.
    pub max_ns: u64,
    /// Values per bucket.
    pub counts: [u32; BUCKETS],
}

impl Histogram {
    /// No values.
    pub const EMPTY: Self = Self { sum_ns: 0, max_ns: 0, counts: [0; BUCKETS] };
}

/// The bucket of a latency.
#[must_use]
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "masked to STEP_BITS bits")]
pub const fn bucket_of(nanos: u64) -> usize {
    if nanos < 1 << FIRST_EXPONENT {
        return 0;
    }
    let exponent = nanos.ilog2();
    if exponent >= END_EXPONENT {
        return BUCKETS - 1;
    }
    let step = (nanos >> (exponent - STEP_BITS)) as u32 & (STEPS - 1);
    ((exponent - FIRST_EXPONENT) * STEPS + step) as usize
}

/// Lower bound (inclusive) and upper bound (exclusive) of a bucket, nanoseconds.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "there are fewer than 2^32 buckets")]
pub const fn bucket_bounds(bucket: usize) -> (u64, u64) {
    let exponent = FIRST_EXPONENT + bucket as u32 / STEPS;
    let width = 1_u64 << (exponent - STEP_BITS);
    let low = (1 << exponent) + (bucket as u64 % STEPS as u64) * width;
    (if bucket == 0 { 0 } else { low }, low + width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_in_range_lies_within_the_bounds_of_its_bucket() {
        for exponent in 0..END_EXPONENT {
            for nanos in [1_u64 << exponent, (1 << exponent) + (1 << exponent) / 3, (2 << exponent) - 1] {
                let (low, high) = bucket_bounds(bucket_of(nanos));
                assert!((low..high).contains(&nanos), "{nanos} is not in {low}..{high}");
            }
        }
    }

    #[test]
    fn a_bucket_is_at_most_a_sixteenth_of_its_value_wide() {
        for bucket in 1..BUCKETS {
            let (low, high) = bucket_bounds(bucket);
            assert!((high - low) * u64::from(STEPS) <= low, "bucket {bucket} is {low}..{high}");
        }
    }

    #[test]
    fn values_beyond_the_range_fall_into_the_last_bucket() {
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert_eq!(bucket_of(1 << END_EXPONENT), BUCKETS - 1);
    }
}
