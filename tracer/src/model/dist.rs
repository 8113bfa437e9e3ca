//! Distributions of latencies.

use hdrhistogram::Histogram;
use pgiotrace_ebpf::{BUCKETS, bucket_bounds};
use serde::Serialize;

/// Longest latency that a histogram holds: one hour, in nanoseconds.
const MAX_NANOS: u64 = 3_600 * 1_000_000_000;

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

/// Latencies from 1 ns to one hour with three significant digits; sum, count and maximum are exact.
///
/// It grows with what is put in, so that an empty one costs little. Longer values are counted in
/// [`LatencyHistogram::beyond_range`], not clipped.
#[derive(Debug, Clone)]
pub struct LatencyHistogram {
    histogram: Histogram<u32>,
    sum_nanos: u128,
    max_nanos: u64,
    beyond_range: u64,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        let mut histogram = Histogram::new(3).expect("three significant digits are in hdrhistogram's range");
        histogram.auto(true);
        Self { histogram, sum_nanos: 0, max_nanos: 0, beyond_range: 0 }
    }
}

impl LatencyHistogram {
    /// Adds one latency, in nanoseconds.
    pub fn record(&mut self, nanos: u64) {
        self.record_n(nanos, 1);
    }

    /// Adds `count` equal latencies, in nanoseconds.
    pub fn record_n(&mut self, nanos: u64, count: u64) {
        if count == 0 {
            return;
        }
        self.sum_nanos += u128::from(nanos) * u128::from(count);
        self.max_nanos = self.max_nanos.max(nanos);
        let count_u32 = u32::try_from(count).unwrap_or(u32::MAX);
        if nanos > MAX_NANOS || self.histogram.record_n(nanos, count_u32).is_err() {
            self.beyond_range += count;
        }
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
        let count = self.histogram.len() + self.beyond_range;
        if count == 0 {
            return None;
        }
        let sum = self.sum_nanos as f64 / 1e3;
        Some(Dist {
            count,
            mean: sum / count as f64,
            p50: self.percentile(count, 0.50),
            p90: self.percentile(count, 0.90),
            p99: self.percentile(count, 0.99),
            p999: self.percentile(count, 0.999),
            max: self.max_nanos as f64 / 1e3,
            sum,
        })
    }

    /// The value below which `quantile` of all `count` values lie; values beyond the range count as the maximum.
    fn percentile(&self, count: u64, quantile: f64) -> f64 {
        let in_range = self.histogram.len() as f64;
        let rank = quantile * count as f64;
        if rank > in_range || in_range == 0.0 {
            return self.max_nanos as f64 / 1e3;
        }
        let nanos = self.histogram.value_at_quantile(rank / in_range).min(self.max_nanos);
        nanos as f64 / 1e3
    }
}

/// Latencies in the kernel side's buckets, a sixteenth of the value wide; sum and maximum are exact.
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

    /// Sum of all values, nanoseconds.
    #[must_use]
    pub fn sum_nanos(&self) -> u64 {
        self.sum_nanos
    }

    /// The summary, or `None` when nothing was added. A percentile is the middle of its bucket.
    #[must_use]
    pub fn dist(&self) -> Option<Dist> {
        let count: u64 = self.counts.iter().sum();
        if count == 0 {
            return None;
        }
        let sum = self.sum_nanos as f64 / 1e3;
        Some(Dist {
            count,
            mean: sum / count as f64,
            p50: self.percentile(count, 0.50),
            p90: self.percentile(count, 0.90),
            p99: self.percentile(count, 0.99),
            p999: self.percentile(count, 0.999),
            max: self.max_nanos as f64 / 1e3,
            sum,
        })
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
        histogram.record(MAX_NANOS + 1);
        let dist = histogram.dist().expect("values were recorded");
        assert_eq!((histogram.beyond_range(), dist.count), (1, 2));
        assert!(dist.max > 3.6e9, "the maximum is the true one: {}", dist.max);
        assert!((dist.p50 - 1.0).abs() < 1e-9);
    }
}
