//! What the samples of `pg_stat_activity` showed of each process.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::{
    capture::sampler::{ActivityRow, ExecutionRow},
    model::aggregate::Incarnation,
    server::InnerPid,
};

/// Queries of one session that are counted apart.
const MOST_QUERIES: usize = 64;
/// Sessions that are kept; what comes later, in a trace of very many short ones, is left out.
const MOST_SESSIONS: usize = 4096;

/// `pg_stat_activity.state` of a session that executes something.
const ACTIVE: &str = "active";
/// What stands for a wait event where an active session waits for nothing.
const CPU: &str = "CPU";

/// A query as the view names it: its identifier, or else its text.
type Label = (Option<i64>, Option<Arc<str>>);

/// What samples showed of one process.
#[derive(Debug, Clone, Default)]
pub(super) struct SessionSum {
    pub samples: u64,
    pub active: u64,
    /// Executions that were seen, in samples or by its reads and waits.
    pub executions: u64,
    pub client: Option<String>,
    pub wait_events: BTreeMap<String, u64>,
    pub blockers: BTreeSet<InnerPid>,
    queries: HashMap<Label, (u64, Option<Arc<str>>)>,
}

impl SessionSum {
    fn add(&mut self, row: &ActivityRow) {
        self.samples += 1;
        if self.client.is_none() {
            self.client.clone_from(&row.client);
        }
        self.blockers.extend(&row.blockers);
        if row.state.as_deref() != Some(ACTIVE) {
            return;
        }
        self.active += 1;
        let event = row.wait.as_ref().map_or_else(|| CPU.to_owned(), ToString::to_string);
        *self.wait_events.entry(event).or_default() += 1;
        if let Some(ExecutionRow { query_id, text, .. }) = &row.execution {
            let label = (*query_id, text.clone().filter(|_| query_id.is_none()));
            if self.queries.len() < MOST_QUERIES || self.queries.contains_key(&label) {
                let (count, known) = self.queries.entry(label).or_default();
                *count += 1;
                *known = known.take().or_else(|| text.clone());
            }
        }
    }

    /// The query that was active in most samples: its identifier and its text.
    pub fn query(&self) -> (Option<i64>, Option<Arc<str>>) {
        let most = self.queries.iter().max_by_key(|(label, (count, _))| (*count, *label));
        most.map(|((query_id, _), (_, text))| (*query_id, text.clone())).unwrap_or_default()
    }
}

/// All processes that samples showed.
#[derive(Debug, Default)]
pub(super) struct Sessions(pub HashMap<Incarnation, SessionSum>);

impl Sessions {
    /// A sample showed a process.
    pub fn add(&mut self, process: Incarnation, row: &ActivityRow) {
        if self.0.len() < MOST_SESSIONS || self.0.contains_key(&process) {
            self.0.entry(process).or_default().add(row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::sampler::WaitEvent;

    fn row(state: &str, wait: Option<(&str, &str)>, query: &str) -> ActivityRow {
        ActivityRow {
            state: Some(state.to_owned()),
            wait: wait.map(|(kind, name)| WaitEvent { kind: kind.to_owned(), name: name.to_owned() }),
            execution: Some(ExecutionRow { started_us: 1, query_id: None, text: Some(query.into()) }),
            ..ActivityRow::of(InnerPid(1))
        }
    }

    #[test]
    fn a_session_is_busy_in_the_samples_that_saw_it_active() {
        let mut sum = SessionSum::default();
        sum.add(&row("idle", Some(("Client", "ClientRead")), "SELECT 1"));
        sum.add(&row("active", Some(("IO", "AioIoCompletion")), "SELECT 2"));
        sum.add(&row("active", None, "SELECT 2"));
        sum.add(&row("active", None, "SELECT 3"));
        assert_eq!((sum.samples, sum.active), (4, 3));
        assert_eq!(sum.query().1.as_deref(), Some("SELECT 2"));
        let events: Vec<_> = sum.wait_events.into_iter().collect();
        assert_eq!(events, [("CPU".to_owned(), 2), ("IO:AioIoCompletion".to_owned(), 1)]);
    }
}
