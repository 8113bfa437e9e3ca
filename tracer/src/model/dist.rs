//! Distributions of latencies.

use hdrhistogram::Histogram;
use pgiotrace_ebpf::{BUCKETS, bucket_bounds};
use serde::Serialize;

/// Longest latency that a histogram holds: one hour, in nanoseconds.
pub const MOST_NANOS: u64 = 3_600 * 1_000_000_000;

/// Summary of a distribution, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Dist {
    /// Values, those beyond the histogram's range included.
    pub count: u64,
    /// Arithmetic mean, exact.
    pub mean: f64,
    /// Median, three significant digits, as all percentiles.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Largest value, exact.
    pub max: f64,
    /// Sum, exact.
    pub sum: f64,
}

impl Dist {
    /// The summary of `count` values, `None` when there are none. `percentile` is in microseconds.
    fn of(count: u64, sum_nanos: f64, max_nanos: u64, percentile: impl Fn(f64) -> f64) -> Option<Self> {
        (count > 0).then(|| Self {
            count,
            mean: sum_nanos / 1e3 / count as f64,
            p50: percentile(0.50),
            p90: percentile(0.90),
            p99: percentile(0.99),
            p999: percentile(0.999),
            max: max_nanos as f64 / 1e3,
            sum: sum_nanos / 1e3,
        })
    }
}

/// Latencies from 1 ns to one hour with three significant digits (of the stages two, of which there are many); sum, count
/// and maximum are exact.
///
/// The first [`FEW`] values are kept as they are, because most relations of a large server are read a few times only and
/// a histogram takes tens of KiB. Longer values than one hour are counted in [`LatencyHistogram::beyond_range`], not
/// clipped.
#[derive(Debug, Clone, Default)]
pub struct LatencyHistogram {
    values: Values,
    precision: Precision,
    sum_nanos: u128,
    max_nanos: u64,
    beyond_range: u64,
}

/// How many values are kept as they are.
const FEW: usize = 256;

/// Why recording does not fail.
const GROWS: &str = "a histogram that grows by itself takes every value";

/// Significant digits of percentiles.
#[derive(Debug, Clone, Copy, Default)]
enum Precision {
    #[default]
    Three = 3,
    Two = 2,
}

#[derive(Debug, Clone)]
enum Values {
    Few(Vec<u64>),
    Many(Histogram<u32>),
}

impl Default for Values {
    fn default() -> Self {
        Self::Few(Vec::new())
    }
}

impl Values {
    fn len(&self) -> u64 {
        match self {
            Self::Few(values) => values.len() as u64,
            Self::Many(histogram) => histogram.len(),
        }
    }

    /// Adds a value within the range.
    fn record(&mut self, nanos: u64, precision: Precision) {
        match self {
            Self::Few(values) if values.len() < FEW => values.push(nanos),
            Self::Few(_) => {
                self.many(precision);
                self.record(nanos, precision);
            }
            Self::Many(histogram) => histogram.record(nanos).expect(GROWS),
        }
    }

    /// Turns into a histogram.
    fn many(&mut self, precision: Precision) -> &mut Histogram<u32> {
        if let Self::Few(values) = self {
            let mut histogram = Histogram::new(precision as u8)
                .expect("two or three significant digits are in hdrhistogram's range");
            histogram.auto(true);
            for nanos in values {
                histogram.record(*nanos).expect(GROWS);
            }
            *self = Self::Many(histogram);
        }
        match self {
            Self::Many(histogram) => histogram,
            Self::Few(_) => unreachable!("it was turned into a histogram above"),
        }
    }

    fn merge(&mut self, other: &Self, precision: Precision) {
        match other {
            Self::Few(values) => values.iter().for_each(|nanos| self.record(*nanos, precision)),
            Self::Many(histogram) => {
                self.many(precision).add(histogram).expect(GROWS);
            }
        }
    }

    /// The smallest value that `share` of all values do not exceed. There must be values.
    fn at(&self, share: f64) -> u64 {
        match self {
            Self::Many(histogram) => histogram.value_at_quantile(share),
            Self::Few(values) => {
                let mut values = values.clone();
                values.sort_unstable();
                let below = values
                    .iter()
                    .enumerate()
                    .find(|(index, _)| (index + 1) as f64 >= share * values.len() as f64);
                below.map_or(0, |(_, nanos)| *nanos)
            }
        }
    }
}

impl LatencyHistogram {
    /// Empty, for one of many.
    #[must_use]
    pub fn of_two_digits() -> Self {
        Self { precision: Precision::Two, ..Self::default() }
    }

    /// Adds one latency, in nanoseconds.
    pub fn record(&mut self, nanos: u64) {
        self.sum_nanos += u128::from(nanos);
        self.max_nanos = self.max_nanos.max(nanos);
        if nanos > MOST_NANOS {
            self.beyond_range += 1;
        } else {
            self.values.record(nanos, self.precision);
        }
    }

    /// Adds all that another one holds.
    pub fn merge(&mut self, other: &Self) {
        let Self { values, precision: _, sum_nanos, max_nanos, beyond_range } = other;
        self.values.merge(values, self.precision);
        self.sum_nanos += sum_nanos;
        self.max_nanos = self.max_nanos.max(*max_nanos);
        self.beyond_range += beyond_range;
    }

    /// Values that were too long for the histogram.
    #[must_use]
    pub fn beyond_range(&self) -> u64 {
        self.beyond_range
    }

    /// Sum of all values, nanoseconds.
    #[must_use]
    pub fn sum_nanos(&self) -> u128 {
        self.sum_nanos
    }

    /// The summary, or `None` when nothing was recorded.
    #[must_use]
    pub fn dist(&self) -> Option<Dist> {
        let count = self.values.len() + self.beyond_range;
        Dist::of(count, self.sum_nanos as f64, self.max_nanos, |quantile| self.percentile(count, quantile))
    }

    /// The value below which `quantile` of all `count` values lie; values beyond the range count as the maximum.
    fn percentile(&self, count: u64, quantile: f64) -> f64 {
        let in_range = self.values.len() as f64;
        let rank = quantile * count as f64;
        if rank > in_range || in_range == 0.0 {
            return self.max_nanos as f64 / 1e3;
        }
        self.values.at(rank / in_range).min(self.max_nanos) as f64 / 1e3
    }
}

/// Latencies in the kernel side's buckets, a sixteenth of the value wide. The sum is exact; of two new maxima at the same
/// moment on two CPUs the smaller may have been kept.
#[derive(Debug, Clone, Default)]
pub struct KernelHistogram {
    counts: Vec<u64>,
    sum_nanos: u64,
    max_nanos: u64,
}

impl KernelHistogram {
    /// Adds what one of the kernel's histograms holds.
    pub fn add(&mut self, histogram: &pgiotrace_ebpf::Histogram) {
        self.counts.resize(BUCKETS, 0);
        for (sum, count) in self.counts.iter_mut().zip(&histogram.counts) {
            *sum += u64::from(*count);
        }
        self.sum_nanos += histogram.sum_ns;
        self.max_nanos = self.max_nanos.max(histogram.max_ns);
    }

    /// Adds all that another one holds.
    pub fn merge(&mut self, other: &Self) {
        let Self { counts, sum_nanos, max_nanos } = other;
        self.counts.resize(self.counts.len().max(counts.len()), 0);
        for (sum, count) in self.counts.iter_mut().zip(counts) {
            *sum += count;
        }
        self.sum_nanos += sum_nanos;
        self.max_nanos = self.max_nanos.max(*max_nanos);
    }

    /// Sum of all values, nanoseconds.
    #[must_use]
    pub fn sum_nanos(&self) -> u64 {
        self.sum_nanos
    }

    /// The summary, or `None` when nothing was added. A percentile is the middle of its bucket.
    #[must_use]
    pub fn dist(&self) -> Option<Dist> {
        let count = self.counts.iter().sum();
        Dist::of(count, self.sum_nanos as f64, self.max_nanos, |quantile| self.percentile(count, quantile))
    }

    fn percentile(&self, count: u64, quantile: f64) -> f64 {
        let mut below = 0;
        for (bucket, in_bucket) in self.counts.iter().enumerate() {
            below += in_bucket;
            if below as f64 >= quantile * count as f64 {
                let (low, high) = bucket_bounds(bucket);
                return u64::midpoint(low, high).min(self.max_nanos) as f64 / 1e3;
            }
        }
        self.max_nanos as f64 / 1e3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_recorded_is_no_distribution() {
        assert_eq!(LatencyHistogram::default().dist(), None);
    }

    #[test]
    fn percentiles_hold_three_significant_digits() {
        let mut histogram = LatencyHistogram::default();
        for micros in 1..=1_000_u64 {
            histogram.record(micros * 1_000);
        }
        let dist = histogram.dist().expect("values were recorded");
        assert_eq!((dist.count, dist.max), (1_000, 1_000.0));
        assert!((dist.mean - 500.5).abs() < 1e-9, "the mean is exact: {}", dist.mean);
        for (found, expected) in [(dist.p50, 500.0), (dist.p90, 900.0), (dist.p99, 990.0), (dist.p999, 999.0)]
        {
            assert!((found - expected).abs() / expected < 1e-3, "{found} is not {expected}");
        }
    }

    #[test]
    fn values_beyond_one_hour_are_counted_not_clipped() {
        let mut histogram = LatencyHistogram::default();
        histogram.record(1_000);
        histogram.record(MOST_NANOS + 1);
        let dist = histogram.dist().expect("values were recorded");
        assert_eq!((histogram.beyond_range(), dist.count), (1, 2));
        assert!(dist.max > 3.6e9, "the maximum is the true one: {}", dist.max);
        assert!((dist.p50 - 1.0).abs() < 1e-9);
    }

    #[test]
    fn few_values_give_the_same_as_many_and_merge_like_them() {
        let (mut few, mut parts) = (LatencyHistogram::default(), LatencyHistogram::default());
        for micros in 1..=FEW as u64 {
            few.record(micros * 1_000);
        }
        for range in [1..=10_u64, 11..=FEW as u64] {
            let mut part = LatencyHistogram::default();
            range.for_each(|micros| part.record(micros * 1_000));
            parts.merge(&part);
        }
        assert_eq!(few.dist(), parts.dist());
        let exact = few.dist().expect("values were recorded");
        few.values.many(Precision::Three);
        let coarse = few.dist().expect("values were recorded");
        for (exact, coarse) in [(exact.p50, coarse.p50), (exact.p99, coarse.p99), (exact.p999, coarse.p999)] {
            assert!((exact - coarse).abs() / exact < 1e-3, "{exact} and {coarse}");
        }
        parts.merge(&few);
        assert_eq!(parts.dist().map(|dist| dist.count), Some(2 * FEW as u64));
    }
}
