//! How long each read takes.

use std::{f64::consts::TAU, time::Duration};

use fastrand::Rng;

/// The quantile 0.99 of the normal distribution.
const NORMAL_P99: f64 = 2.326_347_874;

/// How long reads of a slow disk take. What is random is so by the disk's seed: the same sequence after each setting.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Latency {
    /// Each the same.
    Constant(Duration),
    /// Fast, except for a share (0 to 1) of slow ones.
    TwoPoint {
        /// Of most reads.
        fast: Duration,
        /// Of the few.
        slow: Duration,
        /// How many are slow, 0 to 1.
        slow_share: f64,
    },
    /// Log-normal: most near the median, few a multiple of it, without an upper bound.
    HeavyTailed {
        /// Half of the reads take less.
        median: Duration,
        /// One in a hundred takes longer.
        p99: Duration,
    },
    /// No latency, but once, after that many reads, the disk answers nothing for a while: the read that begins the stall
    /// and those that come meanwhile end with it.
    Stall {
        /// Reads before it.
        after: u64,
        /// How long it takes.
        lasting: Duration,
    },
}

impl Latency {
    /// As fast as it goes.
    pub const NONE: Self = Self::Constant(Duration::ZERO);
}

/// A latency with the state that it needs from read to read.
#[derive(Debug)]
pub(super) struct Model {
    latency: Latency,
    rng: Rng,
    reads: u64,
    stalled_until_ns: u64,
}

impl Model {
    pub(super) fn new(latency: Latency, seed: u64) -> Self {
        Self { latency, rng: Rng::with_seed(seed), reads: 0, stalled_until_ns: 0 }
    }

    /// When a read that begins now shall end, as CLOCK_MONOTONIC in nanoseconds.
    pub(super) fn deadline(&mut self, now_ns: u64) -> u64 {
        self.reads += 1;
        let takes = match self.latency {
            Latency::Constant(latency) => latency,
            Latency::TwoPoint { slow, slow_share, .. } if self.rng.f64() < slow_share => slow,
            Latency::TwoPoint { fast, .. } => fast,
            Latency::HeavyTailed { median, p99 } => self.log_normal(median, p99),
            Latency::Stall { after, lasting } => {
                if self.reads == after + 1 {
                    self.stalled_until_ns = now_ns + nanos(lasting);
                }
                Duration::from_nanos(self.stalled_until_ns.saturating_sub(now_ns))
            }
        };
        now_ns + nanos(takes)
    }

    /// By the method of Box and Muller.
    fn log_normal(&mut self, median: Duration, p99: Duration) -> Duration {
        let deviation = (p99.as_secs_f64() / median.as_secs_f64()).ln() / NORMAL_P99;
        // 1 - f64() is never 0, whose logarithm is infinite.
        let normal = (-2.0 * (1.0 - self.rng.f64()).ln()).sqrt() * (TAU * self.rng.f64()).cos();
        median.mul_f64((deviation * normal).exp())
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const READS: usize = 100_000;

    /// Latencies of many reads, sorted, in milliseconds.
    fn sample(latency: Latency) -> Vec<f64> {
        let mut model = Model::new(latency, 1);
        let mut all: Vec<_> = (0..READS).map(|_| model.deadline(7) as f64 - 7.0).map(|ns| ns / 1e6).collect();
        all.sort_by(f64::total_cmp);
        all
    }

    fn is_near(value: f64, wanted: f64) -> bool {
        (value / wanted - 1.0).abs() < 0.02
    }

    #[test]
    fn a_heavy_tail_has_its_median_and_its_p99() {
        let latency =
            Latency::HeavyTailed { median: Duration::from_millis(1), p99: Duration::from_millis(20) };
        let all = sample(latency);
        assert!(is_near(all[READS / 2], 1.0), "{}", all[READS / 2]);
        assert!(is_near(all[READS * 99 / 100], 20.0), "{}", all[READS * 99 / 100]);
        assert!(all[READS - 1] > 100.0, "{}", all[READS - 1]);
    }

    #[test]
    fn two_points_have_their_shares() {
        let (fast, slow) = (Duration::from_millis(1), Duration::from_millis(30));
        let all = sample(Latency::TwoPoint { fast, slow, slow_share: 0.1 });
        let slow = all.iter().filter(|ms| is_near(**ms, 30.0)).count();
        assert_eq!(all.iter().filter(|ms| is_near(**ms, 1.0)).count() + slow, READS);
        assert!(is_near(slow as f64, READS as f64 / 10.0), "{slow}");
    }

    #[test]
    fn a_stall_ends_for_all_at_once_and_comes_once() {
        let mut model = Model::new(Latency::Stall { after: 1, lasting: Duration::from_nanos(100) }, 1);
        let ends: Vec<_> = [0, 10, 50, 109, 110, 500].map(|now| model.deadline(now)).into();
        assert_eq!(ends, [0, 110, 110, 110, 110, 500]);
    }

    #[test]
    fn the_same_seed_makes_the_same_sequence() {
        let latency =
            Latency::HeavyTailed { median: Duration::from_millis(1), p99: Duration::from_millis(9) };
        let (mut one, mut two) = (Model::new(latency, 3), Model::new(latency, 3));
        assert!((0..100).all(|_| one.deadline(0) == two.deadline(0)));
    }
}
