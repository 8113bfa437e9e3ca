//! Sets of moments, as intervals of nanoseconds.

/// Disjoint intervals in ascending order, as `(start, end)` with `start < end`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Intervals(Vec<(u64, u64)>);

impl Intervals {
    /// Adds an interval, and says which parts of it were not in the set before. One that ends before it starts is empty.
    #[expect(clippy::return_self_not_must_use, reason = "most callers only add")]
    pub fn add(&mut self, start: u64, end: u64) -> Self {
        let new = self.gaps(start, end);
        if new.0.is_empty() {
            return new;
        }
        // All that touch the new one become one with it.
        let first = self.0.partition_point(|(_, known_end)| *known_end < start);
        let last = first + self.0[first..].partition_point(|(known_start, _)| *known_start <= end);
        let merged = self.0[first..last]
            .iter()
            .fold((start, end), |merged, known| (merged.0.min(known.0), merged.1.max(known.1)));
        self.0.splice(first..last, [merged]);
        new
    }

    /// The parts of an interval that are not in the set.
    #[must_use]
    pub fn gaps(&self, start: u64, end: u64) -> Self {
        let mut gaps = Vec::new();
        let mut at = start;
        for (known_start, known_end) in self.from(start) {
            if *known_start >= end {
                break;
            }
            if *known_start > at {
                gaps.push((at, *known_start));
            }
            at = at.max(*known_end);
        }
        if at < end {
            gaps.push((at, end));
        }
        Self(gaps)
    }

    /// How much of an interval is in the set, nanoseconds.
    #[must_use]
    pub fn overlap(&self, start: u64, end: u64) -> u64 {
        let inside = self.from(start).iter().take_while(|(known_start, _)| *known_start < end);
        inside.map(|(known_start, known_end)| (*known_end).min(end) - (*known_start).max(start)).sum()
    }

    /// The interval that a moment lies in, if one does.
    #[must_use]
    pub fn around(&self, moment: u64) -> Option<(u64, u64)> {
        self.from(moment).first().filter(|(start, _)| *start <= moment).copied()
    }

    /// The intervals.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().copied()
    }

    /// All of it, nanoseconds.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.iter().map(|(start, end)| end - start).sum()
    }

    /// Forgets the oldest intervals when there are twice as many as are to be kept: in large steps, since each moves the
    /// rest.
    pub fn keep_newest(&mut self, kept: usize) {
        if self.0.len() > 2 * kept {
            self.0.drain(..self.0.len() - kept);
        }
    }

    /// The intervals that end after a moment.
    fn from(&self, moment: u64) -> &[(u64, u64)] {
        &self.0[self.0.partition_point(|(_, end)| *end <= moment)..]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn set(intervals: &[(u64, u64)]) -> Intervals {
        let mut set = Intervals::default();
        for (start, end) in intervals {
            set.add(*start, *end);
        }
        set
    }

    proptest! {
        #[test]
        fn a_set_holds_exactly_the_moments_that_were_added(
            added in prop::collection::vec((0_u64..60, 0_u64..20), 0..12),
            (start, length) in (0_u64..70, 0_u64..30),
        ) {
            let mut moments = BTreeSet::new();
            let mut set = Intervals::default();
            for (start, length) in added {
                let end = start + length;
                let new = (start..end).filter(|at| !moments.contains(at)).count() as u64;
                prop_assert_eq!(set.add(start, end).length(), new);
                moments.extend(start..end);
            }
            let end = start + length;
            let inside = (start..end).filter(|at| moments.contains(at)).count() as u64;
            prop_assert_eq!(set.overlap(start, end), inside);
            prop_assert_eq!(set.gaps(start, end).length(), length - inside);
            prop_assert_eq!(set.length(), moments.len() as u64);
            prop_assert!(set.0.windows(2).all(|pair| pair[0].1 < pair[1].0));
            for at in 0..100_u64 {
                prop_assert_eq!(set.around(at).is_some(), moments.contains(&at));
            }
        }
    }

    #[test]
    fn the_oldest_are_forgotten_first() {
        let mut set = set(&[(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]);
        set.keep_newest(3);
        assert_eq!(set.iter().count(), 5);
        set.keep_newest(2);
        assert_eq!(set.iter().collect::<Vec<_>>(), [(6, 7), (8, 9)]);
    }
}
