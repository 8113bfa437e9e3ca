//! Executions of the same query, put together.

use std::collections::HashMap;
use std::sync::Arc;

use super::{
    Join,
    executions::{EndedProcess, QueryReads, Run},
    people::Person,
};
use crate::model::aggregate::Incarnation;

/// Queries that are kept one by one; what comes beyond goes into the entry of queries that are not known.
const MOST_QUERIES: usize = 5_000;

/// What makes two executions the same query.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum QueryKey {
    /// Its identifier, which the server computes from what the query means.
    Id(i64),
    /// Where that is not computed: its text.
    Text(Arc<str>),
    /// A query of which neither is known.
    Unknown,
    /// None: what the process is.
    NoQuery(Option<String>),
}

/// All executions of a query.
#[derive(Debug, Clone, Default)]
pub(super) struct QueryTotals {
    /// Text of one of them.
    pub text: Option<Arc<str>>,
    /// Database of the one that was seen first.
    pub database: Option<String>,
    /// What kind of process executed it.
    pub backend_type: Option<String>,
    /// Executions that read something.
    pub executions: u64,
    pub reads: QueryReads,
}

/// The queries of a trace.
#[derive(Debug, Default)]
pub(super) struct Queries {
    pub totals: HashMap<QueryKey, QueryTotals>,
    /// Texts by identifier, also of executions that read nothing.
    texts: HashMap<i64, Arc<str>>,
}

impl Queries {
    /// A sample showed a query's text.
    pub fn learn(&mut self, query_id: i64, text: &Arc<str>) {
        if self.texts.len() < MOST_QUERIES {
            self.texts.entry(query_id).or_insert_with(|| Arc::clone(text));
        }
    }

    /// Texts with parameters in place of constants, which are better than those of one execution.
    pub fn learn_normalised(&mut self, texts: Vec<(i64, Arc<str>)>) {
        for (query_id, text) in texts {
            if self.texts.len() < MOST_QUERIES || self.texts.contains_key(&query_id) {
                self.texts.insert(query_id, text);
            }
        }
    }

    /// A query's text, if one is known.
    pub fn text(&self, key: &QueryKey) -> Option<Arc<str>> {
        match key {
            QueryKey::Id(query_id) => self.texts.get(query_id).cloned(),
            QueryKey::Text(text) => Some(Arc::clone(text)),
            QueryKey::Unknown | QueryKey::NoQuery(_) => None,
        }
    }

    fn entry(&mut self, key: QueryKey) -> &mut QueryTotals {
        let has_room = self.totals.len() < MOST_QUERIES || self.totals.contains_key(&key);
        self.totals.entry(if has_room { key } else { QueryKey::Unknown }).or_default()
    }
}

impl Join {
    /// Adds an execution that is over to its query.
    pub(super) fn fold_run(&mut self, process: Incarnation, run: Run) {
        if run.reads.io.reads == 0 {
            return;
        }
        let key = match (run.query_id, &run.text) {
            (Some(query_id), _) => QueryKey::Id(query_id),
            (None, Some(text)) => QueryKey::Text(Arc::clone(text)),
            (None, None) => QueryKey::Unknown,
        };
        let (database, backend_type) = self.who(process);
        let entry = self.queries.entry(key);
        entry.executions += 1;
        entry.text = entry.text.take().or(run.text);
        entry.database = entry.database.take().or(database);
        entry.backend_type = entry.backend_type.take().or(backend_type);
        entry.reads.merge(&run.reads);
    }

    /// A process has ended: adds all that it executed, once it is known of all its reads whether they count.
    pub(super) fn fold_when_settled(&mut self, process: Incarnation) {
        if self.has_deferred(process) {
            self.unfolded.push(process);
        } else {
            self.fold_executions(process);
        }
    }

    /// Of more reads it is known whether they count.
    pub(super) fn fold_settled(&mut self) {
        for process in std::mem::take(&mut self.unfolded) {
            self.fold_when_settled(process);
        }
    }

    fn has_deferred(&self, process: Incarnation) -> bool {
        self.deferred.iter().any(|(_, owner)| *owner == Some(process))
    }

    /// A process has ended, or the trace: adds all that it executed.
    pub(super) fn fold_executions(&mut self, process: Incarnation) {
        if let Some(sum) = self.sessions.0.get_mut(&process) {
            sum.executions = self.executions.count(process);
        }
        let leader = self.people.get(process).and_then(Person::leader);
        let leader = leader.and_then(|leader| self.people.outer(leader)).map(|pid| self.people.current(pid));
        let EndedProcess { runs, no_query, unknown } = self.executions.end(process, leader);
        for run in runs {
            self.fold_run(process, run);
        }
        let (_, backend_type) = self.who(process);
        for (key, reads) in
            [(QueryKey::NoQuery(backend_type.clone()), no_query), (QueryKey::Unknown, unknown)]
        {
            if reads.io.reads > 0 {
                let entry = self.queries.entry(key);
                entry.backend_type = entry.backend_type.take().or_else(|| backend_type.clone());
                entry.reads.merge(&reads);
            }
        }
    }

    fn who(&self, process: Incarnation) -> (Option<String>, Option<String>) {
        let person = self.people.get(process);
        let row = person.and_then(|person| person.activity.as_ref());
        let backend_type = person.and_then(Person::backend_type).map(str::to_owned);
        (row.and_then(|row| row.database.clone()), backend_type)
    }
}
