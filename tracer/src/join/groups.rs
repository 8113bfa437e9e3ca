//! Sums over the reads of one session: all of them, and those of groups of relations.

use super::{Join, report::Known};
use crate::{
    capture::{Ending, names::RelationKey},
    model::{IoSummary, aggregate::IoTotals, io::Subject},
};

/// Sums over reads that passed the filter.
#[derive(Debug, Clone, PartialEq)]
pub struct Sums {
    /// Those of all owners; exposed and hidden times add up over these.
    pub all: IoSummary,
    /// Those of each group, all forks, in the groups' order.
    pub groups: Vec<IoSummary>,
}

/// The sums, of a join in which nothing is open any more.
pub(super) fn sums(join: &Join, ending: &Ending, groups: &[Vec<RelationKey>]) -> Sums {
    let known = Known::of(join, ending);
    let mut all = IoTotals::default();
    for totals in join.aggregate.owners.values() {
        all.merge(totals);
    }
    let group = |group: &Vec<RelationKey>| {
        let mut sum = IoTotals::default();
        for (subject, totals) in &join.aggregate.subjects {
            if let Subject::Relation(relation) = subject
                && group.contains(&RelationKey::of(relation))
            {
                sum.merge(totals);
            }
        }
        known.summary(&sum)
    };
    Sums { all: known.summary(&all), groups: groups.iter().map(group).collect() }
}
