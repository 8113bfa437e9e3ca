//! The join, fed with made-up events.

use std::sync::Arc;

use pgiotrace_ebpf::{Begun, Counter, HandleUse, ReadRecord, WaitRecord, flags};

use super::*;
use crate::server::own_sessions::Serves;
use crate::{
    capture::{
        FileFacts,
        aio_target::AioTarget,
        kernel::Totals,
        sampler::{ActivityRow, AioRow, AioState, Taken},
    },
    server::{InnerPid, Pid, discover::ProcessInfo, relpath},
};

const BACKEND: Pid = Pid(1007);
const OTHER_BACKEND: Pid = Pid(1008);
const WORKER: Pid = Pid(1001);
const MS: u64 = 1_000_000;

fn join(filter: Filter) -> Join {
    let mut join = Join::new(Server::example(), filter, true);
    for (pid, title) in [
        (WORKER, "postgres: io worker 1"),
        (BACKEND, "postgres: alice shop [local] SELECT"),
        (OTHER_BACKEND, "postgres: bob shop [local] SELECT"),
    ] {
        join.take(Event::Process(process(pid, title), Serves::Others));
    }
    join
}

/// PIDs of the server's namespace are those of the tracer's less 1000.
fn process(pid: Pid, title: &str) -> ProcessInfo {
    ProcessInfo { pid, inner_pid: InnerPid(pid.0 - 1000), title: title.to_owned() }
}

fn activity(pid: Pid, user: &str) -> ActivityRow {
    ActivityRow {
        backend_type: Some("client backend".to_owned()),
        database_oid: Some(5),
        database: Some("shop".to_owned()),
        user: Some(user.to_owned()),
        ..ActivityRow::of(InnerPid(pid.0 - 1000))
    }
}

fn sessions() -> Event {
    let rows = vec![activity(BACKEND, "alice"), activity(OTHER_BACKEND, "bob")];
    Event::Sample(PgSample::Activity { taken: Taken { from_ns: 0, to_ns: 0 }, rows })
}

/// A read of 16 blocks that an io worker executed for an owner, at a time in milliseconds.
fn handle_read(owner: Option<Pid>, at_ms: u64, generation: u64) -> ReadRecord {
    let handle = HandleUse {
        generation,
        io_id: 3,
        owner_proc_number: 42,
        tablespace_oid: 1663,
        database_oid: 5,
        relfilenumber: 16384,
        block: 16,
        blocks: 16,
        ..HandleUse::default()
    };
    let begun = Begun {
        start_ns: at_ms * MS,
        offset: 131_072,
        length: 131_072,
        owner_tgid: owner.map_or(0, |owner| owner.0),
        caller_tgid: WORKER.0,
        flags: flags::HANDLE,
        handle,
        ..Begun::default()
    };
    ReadRecord {
        executor_tgid: WORKER.0,
        executor_tid: WORKER.0,
        end_ns: (at_ms + 1) * MS,
        result: 131_072,
        begun,
        ..ReadRecord::default()
    }
}

/// The same read, without a handle.
fn file_read(executor: Pid, at_ms: u64) -> ReadRecord {
    let mut read = handle_read(Some(executor), at_ms, 0);
    read.executor_tgid = executor.0;
    read.begun.flags = flags::HANDLE_REJECTED;
    read.begun.handle = HandleUse::default();
    read
}

/// A read that has a handle, or of a file that could not be told.
fn read(record: ReadRecord) -> Event {
    Event::Read(SeenRead { record, file: None })
}

/// A read of the file of this path.
fn read_of(record: ReadRecord, path: &str) -> Event {
    let facts = FileFacts { subject: relpath::subject_of(path), segment: 0 };
    Event::Read(SeenRead { record, file: Some(Arc::new(facts)) })
}

fn rows(at_ms: u64, owners: &[Pid], generation: u64) -> Event {
    let row = |owner: &Pid| AioRow {
        owner: InnerPid(owner.0 - 1000),
        io_id: owner.0,
        generation,
        state: AioState::Submitted,
        offset: 131_072,
        length: 131_072,
        target: AioTarget::parse("blocks 16..31 in file \"base/5/16384\""),
        is_synchronous: false,
    };
    let taken = Taken { from_ns: at_ms * MS, to_ns: at_ms * MS };
    Event::Sample(PgSample::Aios { taken, rows: owners.iter().map(row).collect() })
}

fn name(schema: &str, name: &str) -> Event {
    let key = RelationKey { tablespace_oid: 1663, database_oid: 5, relfilenumber: 16384, is_temp: false };
    let name =
        RelationName { database: Some("shop".to_owned()), schema: schema.to_owned(), name: name.to_owned() };
    Event::Name(NameAnswer::Known(key, name))
}

/// The report of a trace in which the kernel saw these reads begin and end.
fn report(join: Join, begun: u64, completed: u64, failed: u64) -> StatReport {
    let mut totals = Totals::default();
    totals.counts.set(Counter::Begun, begun);
    totals.counts.set(Counter::Completed, completed);
    totals.counts.set(Counter::Failed, failed);
    let ending = Ending { totals, ..Ending::default() };
    join.report(Window { start: String::new(), duration_s: 1.0 }, 0.0, &ending)
}

#[test]
fn a_workers_read_belongs_to_the_handles_owner_and_is_exact() {
    let mut join = join(Filter::default());
    join.take(sessions());
    join.take(name("public", "orders"));
    join.take(read(handle_read(Some(BACKEND), 1, 1)));
    let report = report(join, 1, 1, 0);
    assert_eq!((report.ledger.exact, report.ledger.blocks, report.ledger.complete), (1, 16, true));
    let [backend] = &report.backends[..] else { panic!("one owner: {:?}", report.backends) };
    assert_eq!((backend.pid, backend.user.as_deref()), (BACKEND.0, Some("alice")));
    assert_eq!((backend.io.by_method.worker, backend.io.blocks), (1, 16));
    let worker = &report.io_workers[0];
    assert_eq!((worker.pid, worker.worker, worker.io.reads), (WORKER.0, Some(1), 1));
    assert_eq!(worker.owners[0].pid, Some(BACKEND.0));
    assert!((worker.busy_ratio - 0.001).abs() < 1e-9);
    assert_eq!(report.relations[0].name.as_deref(), Some("orders"));
    let [method] = &report.methods[..] else { panic!("one method: {:?}", report.methods) };
    assert_eq!((method.method, method.io.reads, method.io.blocks), ("worker", 1, 16));
}

#[test]
fn a_rejected_handle_is_never_exact_when_a_worker_executed_it() {
    let mut join = join(Filter::default());
    let read = file_read(WORKER, 1000);
    join.take(read_of(read, "base/5/16384"));
    let report = report(join, 1, 1, 0);
    assert_eq!((report.ledger.exact, report.ledger.unattributed), (0, 1));
    assert!(report.backends.is_empty());
    assert_eq!(report.io_workers[0].owners[0].pid, None);
    // A method has its reads whether their owners are known or not.
    assert_eq!(report.methods[0].io.reads, 1);
}

#[test]
fn one_matching_row_infers_the_owner_and_two_make_it_ambiguous() {
    for (owners, inferred, ambiguous) in [(&[BACKEND][..], 1, 0), (&[BACKEND, OTHER_BACKEND][..], 0, 1)] {
        let mut join = join(Filter::default());
        let read = file_read(WORKER, 1000);
        join.take(rows(999, &[], 1));
        join.take(rows(1000, owners, 1));
        join.take(read_of(read, "base/5/16384"));
        // Only the second sample after the read settles it.
        join.take(rows(1050, &[], 1));
        assert_eq!(join.fidelity, FidelityCounts::default());
        join.take(rows(1100, &[], 1));
        let report = report(join, 1, 1, 0);
        assert_eq!((report.ledger.inferred, report.ledger.ambiguous), (inferred, ambiguous));
        assert_eq!(report.backends.len() as u64, inferred);
    }
}

#[test]
fn a_use_whose_owner_the_kernel_did_not_know_is_inferred_from_its_row() {
    let mut join = join(Filter::default());
    let Event::Sample(PgSample::Aios { taken, mut rows }) = rows(1, &[BACKEND], 5) else { unreachable!() };
    rows[0].io_id = 3;
    join.take(Event::Sample(PgSample::Aios { taken, rows }));
    join.take(read(handle_read(None, 1, 5)));
    let report = report(join, 1, 1, 0);
    assert_eq!((report.ledger.inferred, report.ledger.unattributed), (1, 0));
    assert_eq!(report.ledger.pg_aios.map(|ledger| ledger.confirmed), Some(1));
    assert_eq!(report.backends[0].pid, BACKEND.0);
}

#[test]
fn a_read_of_ones_own_is_exact_without_a_handle() {
    let mut join = join(Filter::default());
    let own = file_read(BACKEND, 1);
    let workers_own = file_read(WORKER, 1);
    join.take(read_of(own, "base/5/16384"));
    join.take(read_of(workers_own, "global/pg_filenode.map"));
    let report = report(join, 2, 2, 0);
    assert_eq!((report.ledger.exact, report.ledger.blocks), (2, 16));
    assert!(report.backends.iter().all(|backend| backend.io.by_method.sync == 1));
}

#[test]
fn a_workers_read_of_an_unknown_file_is_its_own_only_without_an_offset() {
    let mut join = join(Filter::default());
    let config = file_read(WORKER, 1);
    let begun = Begun { offset: pgiotrace_ebpf::OFFSET_OF_FILE_POSITION, ..config.begun };
    join.take(read(ReadRecord { begun, ..config }));
    join.take(read(file_read(WORKER, 2)));
    let report = report(join, 2, 2, 0);
    assert_eq!((report.ledger.exact, report.ledger.unattributed), (1, 1));
}

#[test]
fn a_handle_that_names_another_owner_than_the_backend_that_executes_it_is_not_believed() {
    let mut join = join(Filter::default());
    join.take(read(ReadRecord { executor_tgid: OTHER_BACKEND.0, ..handle_read(Some(BACKEND), 1, 1) }));
    let report = report(join, 1, 1, 0);
    assert_eq!((report.ledger.exact, report.ledger.unattributed), (0, 1));
    assert!(report.backends.is_empty());
}

#[test]
fn without_numbers_in_the_process_array_a_backends_own_read_is_its_own() {
    let mut join = join(Filter::default());
    join.take(read(ReadRecord { executor_tgid: BACKEND.0, ..handle_read(None, 1, 1) }));
    let report = report(join, 1, 1, 0);
    assert_eq!((report.ledger.exact, report.backends[0].io.by_method.sync), (1, 1));
}

#[test]
fn an_io_worker_without_a_number_and_a_process_that_nobody_knows_own_no_relations_reads() {
    let unknown = Pid(1999);
    let mut join = join(Filter::default());
    join.take(Event::Process(process(WORKER, "postgres: io worker"), Serves::Others));
    for pid in [WORKER, unknown] {
        let read = file_read(pid, 1);
        join.take(read_of(read, "base/5/16384"));
    }
    let report = report(join, 2, 2, 0);
    assert_eq!((report.ledger.exact, report.ledger.unattributed), (0, 2));
    assert_eq!(report.io_workers.iter().filter(|worker| worker.worker.is_none()).count(), 2);
}

#[test]
fn a_row_of_a_process_that_was_never_seen_names_no_later_one_of_its_pid() {
    let mut join = join(Filter::default());
    let sample = |rows| Event::Sample(PgSample::Activity { taken: Taken { from_ns: 0, to_ns: 0 }, rows });
    join.take(sample(vec![activity(Pid(1050), "alice")]));
    join.take(sample(Vec::new()));
    join.take(Event::Process(process(Pid(1050), "postgres: bob shop [local] SELECT"), Serves::Others));
    join.take(read(handle_read(Some(Pid(1050)), 1, 1)));
    assert_eq!(report(join, 1, 1, 0).backends[0].user, None);
}

#[test]
fn failed_reads_keep_their_latency_and_count_no_blocks() {
    let mut join = join(Filter::default());
    join.take(read(ReadRecord { result: -5, ..handle_read(Some(BACKEND), 1, 1) }));
    let report = report(join, 1, 0, 1);
    assert_eq!((report.ledger.failed, report.ledger.completed, report.ledger.blocks), (1, 0, 0));
    assert!(report.ledger.complete);
    let io = &report.backends[0].io;
    assert_eq!((io.reads, io.bytes, io.blocks), (1, 0, 0));
    assert_eq!(io.latency_us.map(|dist| dist.max), Some(1000.0));
}

#[test]
fn books_that_do_not_balance_are_incomplete() {
    let mut join = join(Filter::default());
    join.take(read(handle_read(Some(BACKEND), 1, 1)));
    assert!(!report(join, 2, 1, 0).ledger.complete);
}

#[test]
fn filters_restrict_the_tables_and_never_the_ledger() {
    let relation = |name: &str| vec![crate::cli::RelationName { schema: None, name: name.to_owned() }];
    let filters = [
        (Filter { pids: vec![BACKEND.0], ..Filter::default() }, 1),
        (Filter { users: vec!["alice".to_owned()], ..Filter::default() }, 1),
        (Filter { databases: vec!["shop".to_owned()], ..Filter::default() }, 2),
        (Filter { relations: relation("orders"), ..Filter::default() }, 2),
        (Filter { relations: relation("customers"), ..Filter::default() }, 0),
        (Filter { min_latency: Some(std::time::Duration::from_millis(2)), ..Filter::default() }, 0),
    ];
    for (filter, reads) in filters {
        let mut join = join(filter.clone());
        join.take(read(handle_read(Some(BACKEND), 1, 1)));
        join.take(read(handle_read(Some(OTHER_BACKEND), 1, 2)));
        // Names come after the reads.
        join.take(sessions());
        join.take(name("public", "orders"));
        let report = report(join, 2, 2, 0);
        assert_eq!(report.backends.iter().map(|backend| backend.io.reads).sum::<u64>(), reads, "{filter:?}");
        assert_eq!(
            report.relations.iter().map(|relation| relation.io.reads).sum::<u64>(),
            reads,
            "{filter:?}"
        );
        assert_eq!(report.ledger.reads, 2);
    }
}

#[test]
fn a_session_is_its_process_and_its_parallel_workers() {
    const OWN_WORKER: Pid = Pid(1020);
    const FOREIGN_WORKER: Pid = Pid(1021);
    const STRANGER: Pid = Pid(1022);
    let session = crate::cli::Session { pid: BACKEND, inner_pid: InnerPid(BACKEND.0 - 1000) };
    let mut join = join(Filter { session: Some(session), ..Filter::default() });
    for (pid, leader) in [(OWN_WORKER, BACKEND), (FOREIGN_WORKER, OTHER_BACKEND)] {
        let title = format!("postgres: parallel worker for PID {}", leader.0 - 1000);
        join.take(Event::Process(process(pid, &title), Serves::Others));
    }
    let owners = [BACKEND, OTHER_BACKEND, OWN_WORKER, FOREIGN_WORKER, STRANGER];
    for (generation, owner) in (1..).zip(owners) {
        join.take(read(handle_read(Some(owner), generation, generation)));
    }
    join.take(read(handle_read(None, 9, 9)));
    let totals = Totals::default();
    let ending = Ending { totals, ..Ending::default() };
    let key = RelationKey { tablespace_oid: 1663, database_oid: 5, relfilenumber: 16384, is_temp: false };
    let other = RelationKey { relfilenumber: 16385, ..key };
    let groups = [vec![key], vec![other], vec![key, other]];
    let window = Window { start: String::new(), duration_s: 1.0 };
    let (report, sums) = join.report_with_sums(window, 1.0, &ending, &groups);
    let mut pids: Vec<u32> = report.backends.iter().map(|backend| backend.pid).collect();
    pids.sort_unstable();
    assert_eq!(pids, [BACKEND.0, OWN_WORKER.0]);
    assert_eq!((sums.all.reads, sums.all.blocks, report.relations[0].io.reads), (2, 32, 2));
    assert_eq!(sums.groups.iter().map(|sum| sum.reads).collect::<Vec<_>>(), [2, 0, 2]);
    // Of the stranger nothing is known, and that is said.
    assert!(report.notes.iter().any(|note| note.contains("left out")), "{:?}", report.notes);
}

#[test]
fn ended_backends_are_folded_and_none_of_their_reads_is_lost() {
    let mut join = join(Filter::default());
    let reads = 2000;
    for number in 0..reads {
        // Two PIDs, used again and again.
        let pid = Pid(2000 + number % 2);
        join.take(Event::Process(process(pid, "postgres: web shop [local] SELECT"), Serves::Others));
        let row = activity(pid, "web");
        join.take(Event::Sample(PgSample::Activity {
            taken: Taken { from_ns: 0, to_ns: 0 },
            rows: vec![row],
        }));
        join.take(read(handle_read(Some(pid), u64::from(number), u64::from(number))));
        join.take(Event::Left(pid));
    }
    let reads = u64::from(reads);
    let report = report(join, reads, reads, 0);
    let [ended] = &report.ended_backends[..] else {
        panic!("of one kind: {:?}", report.ended_backends.len())
    };
    assert_eq!(ended.user.as_deref(), Some("web"));
    assert_eq!(ended.processes + report.backends.len() as u64, reads);
    let kept: u64 = report.backends.iter().map(|backend| backend.io.reads).sum();
    assert_eq!(kept + ended.io.reads, reads);
}

#[test]
fn a_row_of_a_handle_that_is_being_reclaimed_contradicts_nothing() {
    let mut join = join(Filter::default());
    let Event::Sample(PgSample::Aios { taken, mut rows }) = rows(1, &[OTHER_BACKEND], 1) else {
        unreachable!()
    };
    // The last use's contents under the next one's generation.
    rows[0].io_id = 3;
    rows[0].state = AioState::CompletedLocal;
    join.take(Event::Sample(PgSample::Aios { taken, rows }));
    join.take(read(handle_read(Some(BACKEND), 1, 1)));
    let ledger = report(join, 1, 1, 0).ledger;
    assert_eq!(ledger.pg_aios.map(|aios| (aios.rows, aios.contradicted)), Some((0, 0)));
}

#[test]
fn a_crash_restart_forgets_the_uses_of_handles() {
    let mut join = join(Filter::default());
    join.take(read(handle_read(Some(BACKEND), 1, 1)));
    join.take(Event::Restarted);
    let Event::Sample(PgSample::Aios { taken, mut rows }) = rows(1, &[OTHER_BACKEND], 1) else {
        unreachable!()
    };
    rows[0].io_id = 3;
    join.take(Event::Sample(PgSample::Aios { taken, rows }));
    let ledger = report(join, 1, 1, 0).ledger;
    assert_eq!(ledger.pg_aios.map(|aios| (aios.contradicted, aios.unmatched)), Some((0, 1)));
}

#[test]
fn a_file_of_unknown_path_is_not_taken_for_a_relation() {
    let mut join = join(Filter::default());
    join.take(read(file_read(BACKEND, 1)));
    let report = report(join, 1, 1, 0);
    assert_eq!((report.ledger.exact, report.ledger.blocks), (1, 0));
    assert_eq!((report.relations[0].name.as_deref(), report.relations[0].file.as_deref()), (None, None));
}

/// The owner waited for this use of a handle, up to a time in milliseconds.
fn wait(owner: Pid, from_ms: u64, to_ms: u64, generation: u64) -> Event {
    Event::Wait(WaitRecord {
        tgid: owner.0,
        start_ns: from_ms * MS,
        end_ns: to_ms * MS,
        awaited_generation: generation,
        awaited_io_id: 3,
        ..WaitRecord::default()
    })
}

#[test]
fn what_its_owner_waited_for_has_a_wakeup_that_keeps_no_io_worker_busy() {
    let mut join = join(Filter::default()).with_wakeups();
    join.take(read(handle_read(Some(BACKEND), 10, 7)));
    join.take(wait(BACKEND, 9, 15, 7));
    // Held to the end, and found as it is.
    join.take(read(handle_read(Some(BACKEND), 20, 8)));
    let report = report(join, 2, 2, 0);
    let io = &report.backends[0].io;
    assert_eq!(io.reads, 2);
    assert_eq!(io.latency_us.map(|dist| (dist.count, dist.sum)), Some((2, 6_000.0)));
    assert_eq!(io.bounds_us.owner_wakeup_at_most.map(|dist| (dist.count, dist.max)), Some((1, 4_000.0)));
    assert_eq!((io.exposed_us, io.hidden_us), (Some(5_000.0), Some(1_000.0)));
    let busy_ms = report.io_workers[0].busy_ratio * report.window.duration_s * 1e3;
    assert!((busy_ms - 2.0).abs() < 1e-9, "two reads of a millisecond each: {busy_ms} ms");
}

#[test]
fn without_probes_waits_are_for_no_read() {
    let mut join = join(Filter::default());
    join.take(read(handle_read(Some(BACKEND), 10, 7)));
    join.take(wait(BACKEND, 9, 15, 7));
    assert_eq!(report(join, 1, 1, 0).backends[0].io.latency_us.map(|dist| dist.sum), Some(1_000.0));
}

#[test]
fn a_read_without_its_handle_is_not_taken_for_an_awaited_one() {
    let mut join = join(Filter::default()).with_wakeups();
    let mut record = file_read(WORKER, 10);
    record.begun.flags |= flags::IO_URING;
    record.begun.handle.io_id = 3;
    join.take(read(record));
    join.take(wait(WORKER, 9, 15, 0));
    assert_eq!(report(join, 1, 1, 0).backends[0].io.latency_us.map(|dist| dist.sum), Some(1_000.0));
}
