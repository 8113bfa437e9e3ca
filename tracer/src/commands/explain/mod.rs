//! `pgiotrace explain`: PostgreSQL's claim of a query beside what the kernel saw of it.
//!
//! The query runs in a session of its own, in a transaction that is rolled back; the trace counts what this session and its
//! parallel workers wanted.

mod cold;
pub mod compare;
mod plan;
mod query;
mod relations;
mod session;

use std::{
    fs,
    io::{self, IsTerminal, Read},
    pin::pin,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{anyhow, bail};
use postgres::Client;
use rustix::process::Signal;

use self::{
    plan::{Node, Plan},
    query::QueryError,
    relations::{Found, Reads},
    session::Session,
};
use super::{
    doctor, find_server, runtime,
    stat::{INCOMPLETE, Signals},
};
use crate::{
    capture::{
        Capture, Event,
        live::{self, Live},
        sampler::{Habits, PgSample},
    },
    cli::{self, ExplainOptions, Filter, QuerySource},
    join::{Join, Sums},
    model::{Claim, ExplainReport, PlanNode, QuerySession, Run, StatReport, Window},
    present::{self, Format},
    server::{
        InnerPid, Pid,
        connect::{Connector, innermost},
        discover::Server,
        facts::{ServerFacts, facts},
    },
    units, verdict,
};

/// Wrong usage, as clap's own.
const WRONG_USAGE: u8 = 2;
/// Between two samples of `pg_stat_activity` and `pg_aios`.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(50);
/// Size of the ring between kernel and tracer, as `stat`'s default.
const RING_BYTES: u32 = 16 << 20;
/// How long after a cancel request the next is sent: the first is lost when the query had not begun yet.
const CANCEL_AGAIN: Duration = Duration::from_millis(200);

/// Runs the verb.
///
/// # Errors
///
/// When there is no query, it is refused or fails, no server can be traced, or the report cannot be written.
pub fn run(
    options: &ExplainOptions,
    is_verbose: bool,
    color: anstream::ColorChoice,
) -> anyhow::Result<ExitCode> {
    options.report.destination.check()?;
    if let Some(save) = &options.save {
        save.check()?;
    }
    let sql = read_query(&options.query)?;
    if options.cold {
        cold::require()?;
        match if options.yes { cold::Consent::Given } else { cold::ask()? } {
            cold::Consent::Given => {}
            cold::Consent::Refused => bail!("nothing was done: the page cache stays"),
            cold::Consent::Unasked(why) => {
                anstream::eprintln!("pgiotrace: {why}");
                return Ok(ExitCode::from(WRONG_USAGE));
            }
        }
    }
    let (server, connector) = find_server(&options.connection)?;
    let connector = connector.ok_or_else(|| anyhow!("explain needs a connection to the server"))?;
    doctor::require_privileges()?;
    let outcome = runtime()?.block_on(explain(options, sql, &server, connector, is_verbose))?;
    let report = match outcome {
        Outcome::Reported(report) => report,
        Outcome::Interrupted(signal) => {
            anstream::eprintln!("pgiotrace: {}", QueryError::Cancelled);
            return Ok(ExitCode::from(u8::try_from(128 + signal.as_raw()).unwrap_or(1)));
        }
    };
    if let Some(save) = &options.save {
        present::deliver_explain(&report, Format::Json, save, color)?;
    }
    present::deliver_explain(&report, options.report.format, &options.report.destination, color)?;
    Ok(if report.trace.ledger.complete { ExitCode::SUCCESS } else { ExitCode::from(INCOMPLETE) })
}

/// The query's text, which holds at least something.
fn read_query(source: &QuerySource) -> anyhow::Result<String> {
    let (sql, place) = match source {
        QuerySource::Text(text) => (text.clone(), "the argument".to_owned()),
        QuerySource::StandardInput => {
            let mut text = String::new();
            let read = io::stdin().read_to_string(&mut text);
            read.map_err(|error| anyhow!("reading the query from standard input failed: {error}"))?;
            (text, "standard input".to_owned())
        }
        QuerySource::File(path) => {
            let text = fs::read_to_string(path);
            let place = path.display().to_string();
            (text.map_err(|error| anyhow!("reading the query from {place} failed: {error}"))?, place)
        }
    };
    if query::is_empty(&sql) {
        bail!("there is no query in {place}; give one statement");
    }
    if sql.contains('\0') {
        bail!("the query in {place} holds a zero byte, which no SQL may; give a text file");
    }
    Ok(sql)
}

/// How it ended.
enum Outcome {
    Reported(Box<ExplainReport>),
    Interrupted(Signal),
}

/// What a step came to: its result, or the signal that ended it.
type Step<T> = Result<T, Signal>;

/// Who the session is.
struct About {
    inner_pid: InnerPid,
    database: String,
    user: String,
    is_timed: bool,
}

/// A run's plan, and what was traced meanwhile.
struct Traced {
    plan: Plan,
    reads: Vec<Reads>,
    relations: Vec<crate::model::PlanRelation>,
    report: StatReport,
    sums: Sums,
}

/// The sessions and what is known of the query.
struct Explanation<'a> {
    options: &'a ExplainOptions,
    sql: String,
    server: &'a Server,
    connector: Connector,
    /// Runs the query.
    session: Session,
    /// Cancels it, and asks the catalogs.
    control: Session,
    about: About,
    pid: Pid,
    facts: ServerFacts,
    is_verbose: bool,
}

async fn explain(
    options: &ExplainOptions,
    sql: String,
    server: &Server,
    connector: Connector,
    is_verbose: bool,
) -> anyhow::Result<Outcome> {
    let mut signals = Signals::listen()?;
    let explanation = Explanation::begin(options, sql, server, connector, is_verbose).await?;
    let outcome = explanation.all_runs(&mut signals).await;
    if explanation.session.is_busy() {
        // Asked twice to end, or the trace failed: what does not end by itself is not waited for.
        let inner_pid = explanation.about.inner_pid;
        let cancelled = explanation.control.run(move |client| cancel(client, inner_pid));
        let _ = tokio::time::timeout(CANCEL_AGAIN, cancelled).await;
        let Explanation { session, control, .. } = explanation;
        session.abandon();
        control.abandon();
    }
    outcome
}

impl<'a> Explanation<'a> {
    async fn begin(
        options: &'a ExplainOptions,
        sql: String,
        server: &'a Server,
        connector: Connector,
        is_verbose: bool,
    ) -> anyhow::Result<Self> {
        let session = Session::open(connector.clone().for_queries(), None).await?;
        let about = session.run(introduce).await?.map_err(|error| no_answer(&error))?;
        let control = Session::open(connector.clone(), Some(about.database.clone())).await?;
        let facts = control.run(take_control).await?.map_err(|error| no_answer(&error))?;
        let pid = server.child(about.inner_pid).ok_or_else(|| {
            anyhow!("the process of the session (PID {}) has ended; try again", about.inner_pid)
        })?;
        Ok(Self { options, sql, server, connector, session, control, about, pid, facts, is_verbose })
    }

    async fn all_runs(&self, signals: &mut Signals) -> anyhow::Result<Outcome> {
        let allow_write = self.options.allow_write;
        let sql = self.sql.clone();
        let planned = self.session.run(move |client| query::plan(client, &sql, allow_write));
        let named = match self.cancellable(planned, signals).await? {
            Ok(plan) => plan?.nodes,
            Err(signal) => return Ok(Outcome::Interrupted(signal)),
        };
        let to_look_up = named.clone();
        let look_up = move |client: &mut Client| relations::look_up(client, &to_look_up);
        let found = self.control.run(look_up).await?.map_err(|error| no_answer(&error))?;
        let mut runs = Vec::new();
        let mut notes = Vec::new();
        for number in 1..=self.options.runs.get() {
            if self.options.cold {
                let note = self.make_cold(&found).await?;
                notes.extend(note.filter(|note| !notes.contains(note)));
            }
            match self.one_run(number, &named, &found, signals).await? {
                Ok(traced) => runs.push(traced),
                Err(signal) => return Ok(Outcome::Interrupted(signal)),
            }
        }
        if !self.about.is_timed {
            notes.push(
                "EXPLAIN claims no times: track_io_timing is off, and the role may not switch it on for its session".to_owned(),
            );
        }
        Ok(Outcome::Reported(Box::new(self.report(runs, notes))))
    }

    async fn make_cold(&self, found: &[Found]) -> anyhow::Result<Option<String>> {
        let relations: Vec<u32> = found.iter().filter(|one| one.key.is_some()).map(|one| one.oid).collect();
        let note = self.control.run(move |client| cold::evict(client, &relations)).await?;
        cold::drop_page_cache()?;
        Ok(note)
    }

    /// Waits for something that the session does, or cancels it.
    async fn cancellable<T>(
        &self,
        work: impl Future<Output = anyhow::Result<T>>,
        signals: &mut Signals,
    ) -> anyhow::Result<Step<T>> {
        let mut work = pin!(work);
        tokio::select! {
            done = &mut work => done.map(Ok),
            signal = signals.next() => {
                self.cancel(work, signals).await;
                Ok(Err(signal))
            }
        }
    }

    /// Cancels what the session does, and waits for its end; not any longer after a second signal.
    async fn cancel<T>(&self, mut work: std::pin::Pin<&mut impl Future<Output = T>>, signals: &mut Signals) {
        let inner_pid = self.about.inner_pid;
        let cancel = || self.control.run(move |client| cancel(client, inner_pid));
        loop {
            let again = async {
                // One that is refused is as good as one that comes too late: the end is waited for.
                let _ = cancel().await;
                tokio::time::sleep(CANCEL_AGAIN).await;
            };
            tokio::select! {
                _ = &mut work => return,
                _ = signals.next() => return,
                () = again => {}
            }
        }
    }

    async fn one_run(
        &self,
        number: u32,
        named: &[Node],
        found: &[Found],
        signals: &mut Signals,
    ) -> anyhow::Result<Step<Traced>> {
        let session = cli::Session { pid: self.pid, inner_pid: self.about.inner_pid };
        let filter = Filter { session: Some(session), ..Filter::default() };
        let mut join = Join::new(self.server.clone(), filter, true);
        if self.options.pg_probes {
            join = join.with_wakeups();
        }
        // A short query ends before the sampler has begun.
        join.take(Event::Sample(PgSample::Facts(Box::new(self.facts.clone()))));
        let attaching = Instant::now();
        let mut live = Live::attach(self.plan())?;
        let attach_ms = attaching.elapsed().as_secs_f64() * 1e3;
        self.say_that_it_runs(number);
        let (start, began) = (jiff::Timestamp::now(), Instant::now());
        let (sql, allow_write) = (self.sql.clone(), self.options.allow_write);
        let mut work = pin!(self.session.run(move |client| query::run(client, &sql, allow_write)));
        let answer = loop {
            let mut sink = |event| join.take(event);
            tokio::select! {
                result = live.next(&mut sink) => result?,
                answer = &mut work => break answer?,
                signal = signals.next() => {
                    // Without it, nobody is slowed down while the query ends.
                    drop(live);
                    self.cancel(work, signals).await;
                    return Ok(Err(signal));
                }
            }
        };
        let window = Window { start: format!("{start:.6}"), duration_s: began.elapsed().as_secs_f64() };
        let plan = answer?;
        let ending = live.finish(&mut |event| join.take(event)).await?;
        let (reads, relations) = relations::assign(&plan.nodes, named, found);
        let groups: Vec<_> = reads
            .iter()
            .map(|reads| match reads {
                Reads::Alone(keys) => keys.clone(),
                Reads::Nothing | Reads::Shared => Vec::new(),
            })
            .collect();
        let (report, sums) = join.report_with_sums(window, attach_ms, &ending, &groups);
        Ok(Ok(Traced { plan, reads, relations, report, sums }))
    }

    fn plan(&self) -> live::Plan {
        live::Plan {
            server: self.server.clone(),
            connector: Some(self.connector.clone()),
            samples: Some(Habits {
                interval: SAMPLE_INTERVAL,
                is_unlimited: false,
                query_text: true,
                spent: Arc::default(),
            }),
            use_handles: true,
            pg_probes: self.options.pg_probes,
            ring_bytes: RING_BYTES,
            raw_records: None,
        }
    }

    /// On a terminal a person waits for the end; with `--verbose` a program may wait for the start.
    fn say_that_it_runs(&self, number: u32) {
        if self.is_verbose || io::stderr().is_terminal() {
            let runs = self.options.runs;
            anstream::eprintln!(
                "tracing run {number} of {runs} in process {}; Ctrl-C cancels the query",
                self.pid
            );
        }
    }

    /// The report of all runs: in detail, of the one with the median run time.
    fn report(&self, mut all: Vec<Traced>, notes: Vec<String>) -> ExplainReport {
        let reported = median(&all.iter().map(|traced| traced.plan.run_time_ms).collect::<Vec<_>>());
        let run = |(number, traced): (usize, &Traced)| Run {
            run_time_ms: traced.plan.run_time_ms,
            claimed: traced.plan.claim,
            measured: traced.sums.all.clone(),
            is_reported: number == reported,
        };
        let runs = all.iter().enumerate().map(run).collect();
        let Traced { plan, reads, relations, mut report, sums } = all.swap_remove(reported);
        report.notes.extend(difference(&plan.claim, sums.all.blocks));
        report.notes.extend(notes);
        if report.ledger.complete && report.ledger.impossible == 0 {
            let misleads = verdict::explain_misleads(plan.claim.io_read_time_ms, &sums.all);
            verdict::add(&mut report.verdicts, misleads);
        }
        let About { database, user, .. } = &self.about;
        ExplainReport {
            query: self.sql.clone(),
            session: QuerySession {
                pid: self.pid.0,
                database: database.clone(),
                user: user.clone(),
                allow_write: self.options.allow_write,
                cold: self.options.cold,
            },
            run_time_ms: plan.run_time_ms,
            claimed: plan.claim,
            measured: sums.all,
            nodes: plan_nodes(&plan.nodes, &reads, sums.groups),
            plan: plan.json,
            plan_relations: relations,
            runs,
            trace: report,
        }
    }
}

/// Nodes with what was measured of each.
fn plan_nodes(nodes: &[Node], reads: &[Reads], groups: Vec<crate::model::IoSummary>) -> Vec<PlanNode> {
    let node = |((node, reads), sum): ((&Node, &Reads), _)| PlanNode {
        depth: node.depth,
        label: node.label.clone(),
        subplan: node.subplan.clone(),
        rows: node.rows,
        loops: node.loops,
        time_ms: node.time_ms,
        claimed: node.claimed,
        measured: matches!(reads, Reads::Alone(_)).then_some(sum),
        shares_relations: *reads == Reads::Shared,
    };
    nodes.iter().zip(reads).zip(groups).map(node).collect()
}

/// The number of the run with the median run time; of an even number, the shorter of the two in the middle.
fn median(run_times: &[f64]) -> usize {
    let mut numbers: Vec<usize> = (0..run_times.len()).collect();
    numbers.sort_by(|a, b| run_times[*a].total_cmp(&run_times[*b]));
    numbers.get(run_times.len().saturating_sub(1) / 2).copied().unwrap_or(0)
}

/// In what the traced blocks are not the claimed ones, in one sentence.
fn difference(claim: &Claim, traced: u64) -> Option<String> {
    let claimed = claim.shared_read_blocks + claim.local_read_blocks;
    let blocks = units::counted(traced.abs_diff(claimed), "block");
    match traced.cmp(&claimed) {
        std::cmp::Ordering::Equal => None,
        std::cmp::Ordering::Greater => Some(format!(
            "the session read {blocks} more than EXPLAIN's nodes count: it counts neither catalogs that are read while the query is \
             analysed and while parallel workers start, nor what triggers read"
        )),
        std::cmp::Ordering::Less => Some(format!(
            "EXPLAIN counts {blocks} more than the session was seen to read: other processes may have read them for it, or the \
             trace missed them"
        )),
    }
}

/// Who the session is; its times are switched on where that is allowed.
fn introduce(client: &mut Client) -> Result<About, postgres::Error> {
    // A query whose tracer was killed ends soon, too. Before PostgreSQL 14 there is no such setting.
    let _ = client.batch_execute("SET client_connection_check_interval = '1s'");
    // Only a superuser may, or who was granted it.
    let _ = client.batch_execute("SET track_io_timing = on");
    let row = client.query_one(
        "SELECT pg_catalog.pg_backend_pid(), pg_catalog.current_database()::text, CURRENT_USER::text, \
         pg_catalog.current_setting('track_io_timing')",
        &[],
    )?;
    Ok(About {
        inner_pid: InnerPid(row.try_get::<_, i32>(0)?.unsigned_abs()),
        database: row.try_get(1)?,
        user: row.try_get(2)?,
        is_timed: row.try_get::<_, String>(3)? == "on",
    })
}

/// Emptying large buffers may take its time.
fn take_control(client: &mut Client) -> Result<ServerFacts, postgres::Error> {
    client.batch_execute("SET statement_timeout = 0")?;
    facts(client)
}

/// From another session of the same role, which needs neither a right nor the first one's connection.
fn cancel(client: &mut Client, backend: InnerPid) -> Result<(), postgres::Error> {
    let pid = i32::try_from(backend.0).unwrap_or_default();
    client.execute("SELECT pg_catalog.pg_cancel_backend($1)", &[&pid]).map(drop)
}

fn no_answer(error: &postgres::Error) -> anyhow::Error {
    anyhow!("asking the server failed: {}; try again", innermost(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_the_shorter_one() {
        assert_eq!(median(&[5.0]), 0);
        assert_eq!(median(&[5.0, 1.0]), 1);
        assert_eq!(median(&[5.0, 1.0, 3.0]), 2);
        assert_eq!(median(&[4.0, 1.0, 3.0, 9.0]), 2);
    }

    #[test]
    fn blocks_that_differ_are_said_to() {
        let claim = Claim { shared_read_blocks: 10, local_read_blocks: 2, ..Claim::default() };
        assert_eq!(difference(&claim, 12), None);
        assert!(difference(&claim, 13).is_some_and(|note| note.contains("1 block more than EXPLAIN")));
        assert!(difference(&claim, 2).is_some_and(|note| note.contains("EXPLAIN counts 10 blocks more")));
    }
}
