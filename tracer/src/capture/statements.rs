//! Texts of queries as `pg_stat_statements` keeps them: with parameters in place of constants.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use postgres::{Client, Statement};

/// The view reads the file with all texts each time, so that it is not asked more often than this.
const INTERVAL: Duration = Duration::from_secs(1);
/// Queries that are asked for; in a trace of more, the others keep the text of one execution.
const MOST_ASKED: usize = 10_000;

/// Asks for texts, once for each query.
pub struct Statements {
    question: Statement,
    wanted: HashSet<i64>,
    asked: HashSet<i64>,
    next: Instant,
}

impl Statements {
    /// Prepares the question; `None` where the extension is not in this database, or may not be read. `characters`: how much
    /// of a query is wanted.
    pub fn prepare(client: &mut Client, characters: i32) -> Option<Self> {
        let place = "SELECT pg_catalog.quote_ident(nspname) FROM pg_catalog.pg_extension
            JOIN pg_catalog.pg_namespace ON pg_namespace.oid = extnamespace WHERE extname = 'pg_stat_statements'";
        let schema: String = client.query_opt(place, &[]).ok()??.try_get(0).ok()?;
        let question = format!(
            "SELECT DISTINCT ON (queryid) queryid, pg_catalog.left(query, {characters})
            FROM {schema}.pg_stat_statements WHERE queryid = ANY ($1)"
        );
        let question = client.prepare(&question).ok()?;
        Some(Self { question, wanted: HashSet::new(), asked: HashSet::new(), next: Instant::now() })
    }

    /// A query was seen.
    pub fn want(&mut self, query_id: i64) {
        if self.asked.len() < MOST_ASKED && !self.asked.contains(&query_id) {
            self.wanted.insert(query_id);
        }
    }

    /// Asks, if there is something to ask and it is time. A view that does not answer (it is there, but its library was not
    /// loaded) is asked no more.
    pub fn ask(&mut self, client: &mut Client) -> Vec<(i64, Arc<str>)> {
        if self.wanted.is_empty() || Instant::now() < self.next {
            return Vec::new();
        }
        self.next = Instant::now() + INTERVAL;
        let wanted: Vec<i64> = self.wanted.drain().collect();
        self.asked.extend(&wanted);
        let Ok(rows) = client.query(&self.question, &[&wanted]) else {
            self.next += Duration::from_hours(24);
            return Vec::new();
        };
        let text = |row: &postgres::Row| {
            let text: Option<String> = row.try_get(1).ok()?;
            Some((row.try_get(0).ok()?, text?.into()))
        };
        rows.iter().filter_map(text).collect()
    }
}
