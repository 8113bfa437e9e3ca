//! Processes that ended: with many connections a second, there are too many to keep one by one.

use std::collections::{BTreeMap, VecDeque};

use super::Join;
use crate::model::aggregate::{Incarnation, IoTotals};

/// How many ended processes are kept one by one.
const KEPT: usize = 512;

/// Who processes were, as far as it goes into one entry.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Kind {
    pub backend_type: Option<String>,
    pub database: Option<String>,
    pub user: Option<String>,
    pub application_name: Option<String>,
}

/// Processes that ended.
#[derive(Debug, Default)]
pub(super) struct Ended {
    /// Kept one by one, oldest first.
    kept: VecDeque<Incarnation>,
    /// Folded: how many, and what they owned.
    pub folded: BTreeMap<Kind, (u64, IoTotals)>,
}

impl Join {
    /// A process ended.
    pub(super) fn end_process(&mut self, incarnation: Incarnation) {
        self.settle_exposure(incarnation);
        self.ended.kept.push_back(incarnation);
        if self.ended.kept.len() > KEPT
            && let Some(oldest) = self.ended.kept.pop_front()
        {
            self.fold(oldest);
        }
    }

    /// Adds how much of its reading a process waited for to what it owned.
    pub(super) fn settle_exposure(&mut self, incarnation: Incarnation) {
        if let Some(exposure) = self.exposures.remove(incarnation)
            && let Some(totals) = self.aggregate.owners.get_mut(&incarnation)
        {
            totals.add_exposure(&exposure.totals());
        }
    }

    fn fold(&mut self, incarnation: Incarnation) {
        let person = self.people.forget(incarnation).unwrap_or_default();
        let backend_type = person.backend_type().map(str::to_owned);
        self.pg_stats.fold(incarnation, backend_type.clone());
        let Some(totals) = self.aggregate.owners.remove(&incarnation) else { return };
        let row = person.activity;
        let kind = Kind {
            backend_type,
            database: row.as_ref().and_then(|row| row.database.clone()),
            user: row.as_ref().and_then(|row| row.user.clone()),
            application_name: row.and_then(|row| row.application_name),
        };
        let (processes, sum) = self.ended.folded.entry(kind).or_default();
        *processes += 1;
        sum.merge(&totals);
    }
}
