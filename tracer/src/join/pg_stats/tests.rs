//! The comparison, fed with made-up looks and reads.

use std::time::{Duration, SystemTime};

use pgiotrace_ebpf::Counter;

use super::*;
use crate::{
    capture::{
        Event,
        kernel::Totals,
        sampler::{ActivityRow, PgSample, Taken},
        statistics::{BackendRow, DatabaseRow, IoRow, Operations, SessionRow},
    },
    cli::Filter,
    model::{
        PgStatIoRow,
        io::{Fork, RelationFork},
    },
    server::{
        InnerPid, Pid,
        discover::{ProcessInfo, Server},
        facts::ServerFacts,
        own_sessions::Serves,
    },
};

const BACKEND: Pid = Pid(1007);
const OWN: Pid = Pid(1020);
const BLOCK: u64 = 8192;
const DATABASE: u32 = 5;

fn inner(pid: Pid) -> InnerPid {
    InnerPid(pid.0 - 1000)
}

/// A join that knows a client's session and the tracer's own.
fn join() -> Join {
    let mut join = Join::new(Server::example(), Filter::default(), true);
    join.take(Event::Sample(PgSample::Facts(Box::new(ServerFacts::example()))));
    let title = "postgres: alice shop [local] SELECT";
    for (pid, serves) in [(BACKEND, Serves::Others), (OWN, Serves::Tracer)] {
        let process = ProcessInfo { pid, inner_pid: inner(pid), title: title.to_owned() };
        join.take(Event::Process(process, serves));
        join.people.name(ActivityRow {
            backend_type: Some("client backend".to_owned()),
            database_oid: Some(DATABASE),
            database: Some("shop".to_owned()),
            user: Some("alice".to_owned()),
            ..ActivityRow::of(inner(pid))
        });
    }
    join
}

/// Reads of a block each, of a relation.
fn add(join: &mut Join, owner: Option<Pid>, reads: u64) {
    for number in 0..reads {
        let subject = Subject::Relation(RelationFork {
            tablespace_oid: 1663,
            database_oid: DATABASE,
            relfilenumber: 16_384,
            fork: Fork::Main,
            temporary: false,
        });
        let io = Io { owner, subject, bytes: BLOCK, ..Io::example(Pid(1), number, number + 1_000) };
        let owner = owner.map(|owner| join.people.current(owner));
        join.pg_stats.add(&io, owner, true);
    }
}

fn blocks(count: u64) -> Operations {
    Operations { count, bytes: Some(count * BLOCK), time_ms: Some(0.0) }
}

/// A look at a server of which this is true: blocks read by all client backends, and by each of the two sessions.
struct Look {
    all: u64,
    backend: Option<u64>,
    own: u64,
    state: &'static str,
}

fn look(moment: Moment, look: &Look) -> Event {
    let session = |pid: Pid, state: &str| SessionRow {
        pid: inner(pid),
        started: None,
        application_name: None,
        state: Some(state.to_owned()),
        in_transaction: false,
        state_age_s: Some(60.0),
    };
    let row = |pid: Pid, count: u64| BackendRow {
        pid: inner(pid),
        backend_type: "client backend".to_owned(),
        object: "relation".to_owned(),
        reads: blocks(count),
        reset: None,
    };
    let backend = look.backend.map(|count| row(BACKEND, count));
    let statistics = Statistics {
        moment,
        taken: Taken { from_ns: 0, to_ns: 0 },
        sessions: Some(
            look.backend
                .map(|_| session(BACKEND, look.state))
                .into_iter()
                .chain([session(OWN, "active")])
                .collect(),
        ),
        io: Some(vec![IoRow {
            backend_type: "client backend".to_owned(),
            object: "relation".to_owned(),
            context: "normal".to_owned(),
            reads: Some(blocks(look.all)),
            ..IoRow::default()
        }]),
        backends: Some(backend.into_iter().chain([row(OWN, look.own)]).collect()),
        databases: Some(vec![DatabaseRow {
            oid: DATABASE,
            name: Some("shop".to_owned()),
            blocks_read: look.all,
            read_time_ms: 0.0,
            reset: None,
        }]),
        refusals: Vec::new(),
    };
    Event::Sample(PgSample::Statistics(Box::new(statistics)))
}

fn compared(join: &mut Join) -> Compared {
    join.compare_with_statistics(&Ending::default())
}

fn only_row(compared: &Compared) -> &PgStatIoRow {
    let io = compared.io.as_ref().expect("there were two looks");
    let [row] = &io.rows[..] else { panic!("one row: {:?}", io.rows) };
    row
}

fn reason(row: &PgStatIoRow) -> &str {
    row.reason.as_deref().unwrap_or_default()
}

#[test]
fn own_reads_count_only_where_postgresql_counts_them_in_the_window() {
    let mut join = join();
    // Of 20 blocks, 10 were added before the first look, and 2 are not added yet.
    add(&mut join, Some(OWN), 20);
    join.take(look(Moment::Before, &Look { all: 110, backend: Some(100), own: 10, state: "idle" }));
    add(&mut join, Some(BACKEND), 30);
    join.take(look(Moment::After, &Look { all: 148, backend: Some(130), own: 18, state: "idle" }));
    let compared = compared(&mut join);
    let row = only_row(&compared);
    assert_eq!((row.claimed.map(|claimed| claimed.reads), row.traced.reads), (Some(38), 38));
    assert_eq!((row.difference.map(|difference| difference.bytes), reason(row)), (Some(0), ""));
    let database = compared.database.expect("there were two looks");
    assert_eq!(database.rows[0].difference.map(|difference| difference.blocks), Some(0));
}

#[test]
fn a_session_in_its_statement_has_not_flushed_and_one_long_idle_has() {
    for (state, expected) in [("active", "not flushed yet: 1 backend had 30 blocks in"), ("idle", "")] {
        let mut join = join();
        join.take(look(Moment::Before, &Look { all: 100, backend: Some(100), own: 0, state: "idle" }));
        add(&mut join, Some(BACKEND), 30);
        join.take(look(Moment::After, &Look { all: 100, backend: Some(100), own: 0, state }));
        let compared = compared(&mut join);
        let row = only_row(&compared);
        assert_eq!(row.difference.map(|difference| difference.reads), Some(Some(-30)));
        assert!(reason(row).starts_with(expected), "{state}: {row:?}");
        assert_eq!(row.reason.is_none(), expected.is_empty(), "{row:?}");
    }
}

#[test]
fn what_postgresql_counted_more_is_never_said_to_be_not_flushed() {
    let mut join = join();
    join.take(look(Moment::Before, &Look { all: 100, backend: Some(100), own: 0, state: "active" }));
    add(&mut join, Some(BACKEND), 10);
    join.take(look(Moment::After, &Look { all: 150, backend: Some(150), own: 0, state: "active" }));
    let compared = compared(&mut join);
    let row = only_row(&compared);
    assert_eq!(row.difference.map(|difference| difference.reads), Some(Some(40)));
    assert!(reason(row).starts_with("counted before the trace"), "{row:?}");
    let backends = compared.backend_io.expect("there were two looks");
    assert!(backends.rows[0].reason.as_deref().is_some_and(|reason| reason.starts_with("counted before")));
}

#[test]
fn without_a_known_reason_none_is_given() {
    let mut join = join();
    join.take(look(Moment::Before, &Look { all: 100, backend: Some(100), own: 0, state: "idle" }));
    add(&mut join, Some(BACKEND), 10);
    // Nobody was at work at either edge, and nothing is in flight: the trace has missed them.
    join.take(look(Moment::After, &Look { all: 150, backend: Some(110), own: 0, state: "idle" }));
    let compared = compared(&mut join);
    let row = only_row(&compared);
    assert_eq!(row.difference.map(|difference| difference.reads), Some(Some(40)));
    assert_eq!(row.reason, None, "{row:?}");
}

#[test]
fn a_backend_that_ended_before_the_first_look_is_in_neither_figure() {
    let mut join = join();
    add(&mut join, Some(BACKEND), 30);
    join.take(Event::Left(BACKEND));
    join.take(look(Moment::Before, &Look { all: 130, backend: None, own: 0, state: "" }));
    join.take(look(Moment::After, &Look { all: 130, backend: None, own: 0, state: "" }));
    let compared = compared(&mut join);
    assert_eq!(compared.io.map(|io| io.rows), Some(Vec::new()));
}

#[test]
fn a_backend_that_came_in_the_window_counts_from_nothing_and_one_that_ended_has_no_row() {
    for (backend, rows, ended) in [(Some(30), 1, 0), (None, 0, 1)] {
        let mut join = join();
        join.take(look(Moment::Before, &Look { all: 100, backend: None, own: 0, state: "" }));
        add(&mut join, Some(BACKEND), 30);
        if backend.is_none() {
            join.take(Event::Left(BACKEND));
        }
        join.take(look(Moment::After, &Look { all: 130, backend, own: 0, state: "idle" }));
        let backends = compared(&mut join).backend_io.expect("there were two looks");
        assert_eq!((backends.rows.len(), backends.ended), (rows, ended), "{backends:?}");
        assert!(
            backends.rows.iter().all(|row| row.reason.is_none() && row.traced.reads == 30),
            "{backends:?}"
        );
    }
}

#[test]
fn counters_that_go_backwards_or_have_another_reset_give_no_figure() {
    let reset = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1));
    for (all, reset) in [(50, None), (150, reset)] {
        let mut join = join();
        join.take(look(Moment::Before, &Look { all: 100, backend: None, own: 0, state: "" }));
        add(&mut join, Some(BACKEND), 30);
        let Event::Sample(PgSample::Statistics(mut after)) =
            look(Moment::After, &Look { all, backend: None, own: 0, state: "" })
        else {
            unreachable!()
        };
        for row in after.io.iter_mut().flatten() {
            row.reset = reset;
        }
        join.take(Event::Sample(PgSample::Statistics(after)));
        let compared = compared(&mut join);
        let row = only_row(&compared);
        assert_eq!((row.claimed, row.difference, row.traced.reads), (None, None, 30));
        assert_eq!(reason(row), "the counters were reset in the window");
        assert!(compared.notes.iter().any(|note| note.starts_with("pg_stat_io was reset")));
    }
}

#[test]
fn reads_without_a_known_owner_are_a_row_of_their_own() {
    let mut join = join();
    join.take(look(Moment::Before, &Look { all: 100, backend: Some(100), own: 0, state: "idle" }));
    add(&mut join, Some(BACKEND), 10);
    add(&mut join, None, 5);
    join.take(look(Moment::After, &Look { all: 115, backend: Some(115), own: 0, state: "idle" }));
    let io = compared(&mut join).io.expect("there were two looks");
    let unknown = io.rows.iter().find(|row| row.backend_type.is_none()).expect("it has a row");
    assert_eq!((unknown.traced.reads, unknown.claimed, unknown.difference), (5, None, None));
    let known = io.rows.iter().find(|row| row.backend_type.is_some()).expect("it has a row");
    assert!(reason(known).starts_with("some traced reads stand under no type"), "{known:?}");
}

#[test]
fn where_records_were_lost_no_difference_is_told() {
    let mut join = join();
    join.take(look(Moment::Before, &Look { all: 100, backend: Some(100), own: 0, state: "idle" }));
    add(&mut join, Some(BACKEND), 10);
    join.take(look(Moment::After, &Look { all: 115, backend: Some(115), own: 0, state: "idle" }));
    let mut totals = Totals::default();
    totals.counts.set(Counter::TableFull, 5);
    let compared = join.compare_with_statistics(&Ending { totals, ..Ending::default() });
    let row = only_row(&compared);
    assert_eq!((row.claimed.map(|claimed| claimed.reads), row.difference), (Some(15), None));
    assert_eq!(reason(row), "not all reads were traced: records were lost");
}

#[test]
fn without_a_second_look_nothing_is_compared_and_that_is_said() {
    let mut join = join();
    join.take(look(Moment::Before, &Look { all: 100, backend: None, own: 0, state: "" }));
    let compared = compared(&mut join);
    assert!(compared.io.is_none() && compared.backend_io.is_none() && compared.database.is_none());
    assert!(compared.notes[0].contains("no time for the second look"), "{:?}", compared.notes);
}
