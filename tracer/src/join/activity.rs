//! From the join's sums to what the report says of queries, sessions and waits.

use std::{cmp::Reverse, sync::Arc};

use super::{
    Join, Sampling,
    people::Person,
    queries::{QueryKey, QueryTotals},
    report::Known,
    sessions::SessionSum,
    waits::{WaitCounts, WaitKey},
};
use crate::{
    model::{
        AwaitedOwner, DoingCounts, Query, QueryCertainty, QueryKind, Session, Wait, aggregate::Incarnation,
    },
    server::InnerPid,
};

/// What the report says beside the reads themselves.
pub(super) struct Activity {
    pub certainty: QueryCertainty,
    pub queries: Vec<Query>,
    pub sessions: Option<Vec<Session>>,
    pub waits: Option<Vec<Wait>>,
}

pub(super) fn of(join: &mut Join, known: Known) -> Activity {
    // A parallel worker's reads go to its leader's query, which must still be there.
    let mut processes = join.executions.processes();
    processes.sort_by_key(|process| join.people.get(*process).and_then(Person::leader).is_none());
    for process in processes {
        join.fold_executions(process);
    }
    let waits = (join.sampling != Sampling::Never).then(|| waits(join));
    let queries = queries(join, known);
    Activity {
        certainty: certainty(join),
        queries,
        sessions: (join.sampling != Sampling::Never).then(|| sessions(join)),
        waits,
    }
}

fn certainty(join: &Join) -> QueryCertainty {
    let mut sum = QueryCertainty::default();
    for (key, totals) in &join.queries.totals {
        let reads = totals.reads.io.reads;
        let (certain, probable) = (totals.reads.certain, totals.reads.probable);
        match key {
            // However sure it is which execution it was: nobody knows of which query.
            QueryKey::Unknown => sum.unknown += reads,
            QueryKey::NoQuery(_) => sum.none += reads,
            QueryKey::Id(_) | QueryKey::Text(_) => {
                sum.certain += certain;
                sum.probable += probable;
                sum.unknown += reads - certain - probable;
            }
        }
    }
    let of_owners: u64 = join.queries.totals.values().map(|totals| totals.reads.io.reads).sum();
    // Those without a known owner.
    sum.unknown += join.passed.saturating_sub(of_owners);
    sum
}

fn queries(join: &Join, known: Known) -> Vec<Query> {
    let mut all: Vec<(&QueryKey, &QueryTotals)> = join.queries.totals.iter().collect();
    all.sort_by_key(|(key, totals)| (Reverse(totals.reads.io.latency_sum_ns()), *key));
    let entry = |(key, totals): (&QueryKey, &QueryTotals)| {
        let mut io = known.summary(&totals.reads.io);
        if known.waits {
            let growth = totals.reads.exposure;
            io.exposed_us = Some(growth.exposed_ns as f64 / 1e3);
            io.hidden_us = Some(growth.reading_ns.saturating_sub(growth.exposed_ns) as f64 / 1e3);
        }
        let text = join.queries.text(key).or_else(|| totals.text.clone());
        let is_known = matches!(key, QueryKey::Id(_) | QueryKey::Text(_));
        Query {
            kind: match key {
                QueryKey::Id(_) | QueryKey::Text(_) => QueryKind::Query,
                QueryKey::Unknown => QueryKind::Unknown,
                QueryKey::NoQuery(_) => QueryKind::None,
            },
            query_id: match key {
                QueryKey::Id(query_id) => Some(query_id.to_string()),
                _ => None,
            },
            query: text.map(|text| text.to_string()),
            database: totals.database.clone(),
            backend_type: totals.backend_type.clone(),
            executions: totals.executions,
            certain: if is_known { totals.reads.certain } else { 0 },
            probable: if is_known { totals.reads.probable } else { 0 },
            io,
        }
    };
    all.into_iter().map(entry).collect()
}

fn sessions(join: &Join) -> Vec<Session> {
    let sessions =
        join.sessions.0.iter().filter(|(process, sum)| sum.active > 0 && join.shows_process(**process));
    let mut all: Vec<_> = sessions.collect();
    all.sort_by_key(|(process, sum)| (Reverse(sum.active), **process));
    all.into_iter().map(|(process, sum)| session(join, *process, sum)).collect()
}

fn session(join: &Join, process: Incarnation, sum: &SessionSum) -> Session {
    let row = join.people.get(process).and_then(|person| person.activity.as_ref());
    let (query_id, query) = sum.query();
    Session {
        pid: process.pid.0,
        backend_type: row.and_then(|row| row.backend_type.clone()),
        database: row.and_then(|row| row.database.clone()),
        user: row.and_then(|row| row.user.clone()),
        client: sum.client.clone(),
        application_name: row.and_then(|row| row.application_name.clone()),
        samples: sum.samples,
        busy_ratio: sum.active as f64 / sum.samples.max(1) as f64,
        executions: sum.executions,
        query_id: query_id.map(|query_id| query_id.to_string()),
        query: text_of(join, query_id, query),
        wait_events: sum.wait_events.clone(),
        blocked_by: sum.blockers.iter().map(|pid| outer(join, *pid)).collect(),
    }
}

fn waits(join: &mut Join) -> Vec<Wait> {
    let counted = join.waits.finish().into_iter();
    let mut all: Vec<(WaitKey, WaitCounts)> = counted.filter(|(key, _)| join.shows_wait(key)).collect();
    all.sort_by(|(left_key, left), (right_key, right)| {
        right.samples.cmp(&left.samples).then_with(|| left_key.cmp(right_key))
    });
    let entry = |(key, counts): (WaitKey, WaitCounts)| {
        let row = join.people.get(key.process).and_then(|person| person.activity.as_ref());
        let of_others = counts.of_others.into_iter();
        Wait {
            pid: key.process.pid.0,
            backend_type: row.and_then(|row| row.backend_type.clone()),
            query_id: key.query_id.map(|query_id| query_id.to_string()),
            query: text_of(join, key.query_id, key.query),
            event: key.event.to_string(),
            samples: counts.samples,
            doing: DoingCounts(counts.doing),
            of_others: of_others.map(|(pid, samples)| AwaitedOwner { pid: pid.0, samples }).collect(),
        }
    };
    all.into_iter().map(entry).collect()
}

fn text_of(join: &Join, query_id: Option<i64>, text: Option<Arc<str>>) -> Option<String> {
    let known = query_id.and_then(|query_id| join.queries.text(&QueryKey::Id(query_id)));
    known.or(text).map(|text| text.to_string())
}

fn outer(join: &Join, inner: InnerPid) -> u32 {
    join.people.outer(inner).map_or(inner.0, |pid| pid.0)
}
