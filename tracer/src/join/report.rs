//! From the join's sums to the report.

use std::cmp::Reverse;

use pgiotrace_ebpf::Counter;

use super::{
    Join,
    ended::{Ended, Kind},
    people::Person,
};
use crate::{
    capture::Ending,
    cli::Filter,
    model::{
        Backend, Device, EndedBackends, FilterReport, IoWorker, KernelHistogram, Ledger, Overhead,
        OwnerShare, Relation, STAT_SCHEMA, StatReport, Target, Window,
        aggregate::{Incarnation, IoTotals, WorkerTotals},
        io::Subject,
    },
    server::{Pid, aio::FIRST_AIO_MAJOR, connect::APPLICATION_NAME},
};

pub(super) fn build(mut join: Join, window: Window, attach_ms: f64, ending: &Ending) -> StatReport {
    let ledger = ledger(&join, ending);
    for (counter, note) in COUNTED_NOTES {
        let count = ending.totals.counts.of(counter);
        if count > 0 {
            join.note(format!("{count} {note}"));
        }
    }
    for contradiction in join.uses.contradictions().to_vec() {
        join.note(contradiction);
    }
    use_kernel_counts_if_records_were_lost(&mut join, ending);
    StatReport {
        schema: STAT_SCHEMA,
        target: target(&join),
        ledger,
        filter: filter(&join),
        overhead: overhead(ending, attach_ms),
        backends: backends(&join),
        ended_backends: ended_backends(&join),
        io_workers: io_workers(&join, window.duration_s),
        relations: relations(&join),
        devices: devices(ending),
        notes: std::mem::take(&mut join.notes),
        window,
    }
}

/// What the reader must know when the kernel side counted something, behind the count.
const COUNTED_NOTES: [(Counter, &str); 3] = [
    (
        Counter::ProcessRecordLost,
        "starts or ends of processes found the ring full: reads of two processes with the same PID may stand together",
    ),
    (
        Counter::FileUnreadable,
        "reads are of files that could not be told, because the kernel's structures could not be read",
    ),
    (Counter::RequestsFull, "block requests found their table full, and are missing among the devices"),
];

fn target(join: &Join) -> Target {
    let facts = join.facts.as_ref();
    Target {
        postmaster_pid: join.server.postmaster.0,
        data_directory: join.server.data_directory.to_string_lossy().into_owned(),
        server_version: facts.map_or_else(|| join.server.major.to_string(), |facts| facts.version.clone()),
        io_method: facts.and_then(|facts| facts.io_method.clone()),
    }
}

fn ledger(join: &Join, ending: &Ending) -> Ledger {
    let counts = &ending.totals.counts;
    let ends = join.ends;
    let lost = counts.ring_full() + counts.of(Counter::TableFull);
    let begun = counts.of(Counter::Begun);
    let accounted = ends.completed + ends.failed + counts.in_flight + lost;
    Ledger {
        reads: ends.completed + ends.failed,
        bytes: ends.bytes,
        blocks: ends.blocks,
        exact: join.fidelity.exact,
        inferred: join.fidelity.inferred,
        ambiguous: join.fidelity.ambiguous,
        unattributed: join.fidelity.unattributed,
        own: own_reads(join),
        begun,
        completed: ends.completed,
        failed: ends.failed,
        // The kernel's count is complete even when records are lost, but leaves out reads whose length it does not know.
        short: ends.short,
        in_flight: counts.in_flight,
        lost,
        processes_not_followed: counts.of(Counter::ProcessesFull),
        rejected_candidates: counts.of(Counter::CandidateRejected),
        unreadable_candidates: counts.of(Counter::CandidateUnreadable),
        beyond_range: ends.beyond_range,
        complete: lost == 0 && begun == accounted && counts.of(Counter::ProcessesFull) == 0,
        pg_aios: join.uses.ledger(),
    }
}

/// The kernel's counts per owner and executor are complete even when the ring was full.
fn use_kernel_counts_if_records_were_lost(join: &mut Join, ending: &Ending) {
    let lost = ending.totals.counts.ring_full();
    if lost == 0 {
        return;
    }
    if !join.filter.is_empty() || ending.totals.counts.of(Counter::GroupsFull) > 0 {
        join.note(format!(
            "{lost} reads are missing in every table: the ring between kernel and tracer was full"
        ));
        return;
    }
    join.ended = Ended::default();
    let Join { aggregate, people, .. } = join;
    aggregate.replace_by_groups(
        &ending.totals.groups,
        |pid| people.current(pid),
        |pid| people.is_io_worker(pid) == Some(true),
    );
    let blocks = if join.server.major < FIRST_AIO_MAJOR { " (their blocks are not counted)" } else { "" };
    join.note(format!(
        "the ring between kernel and tracer was full: backends{blocks} and io workers are complete from the kernel's own \
         counts, with percentiles to 1/16, but for owners that had ended long before; {lost} reads are missing among \
         relations"
    ));
}

fn filter(join: &Join) -> Option<FilterReport> {
    let Filter { pids, relations, databases, users, min_latency } = &join.filter;
    (!join.filter.is_empty()).then(|| FilterReport {
        pids: pids.clone(),
        relations: relations.iter().map(ToString::to_string).collect(),
        databases: databases.clone(),
        users: users.clone(),
        min_latency_us: min_latency.map(|shortest| shortest.as_secs_f64() * 1e6),
        reads: join.passed,
    })
}

/// Reads of the tracer's own sessions.
fn own_reads(join: &Join) -> u64 {
    let is_own = |incarnation: &Incarnation| {
        let row = join.people.get(*incarnation).and_then(|person| person.activity.as_ref());
        row.and_then(|row| row.application_name.as_deref()) == Some(APPLICATION_NAME)
    };
    let kept = join.aggregate.owners.iter().filter(|(incarnation, _)| is_own(incarnation));
    kept.map(|(_, totals)| totals.reads).sum()
}

fn overhead(ending: &Ending, attach_ms: f64) -> Overhead {
    let ended = ending.totals.counts.of(Counter::Completed) + ending.totals.counts.of(Counter::Failed);
    Overhead {
        bpf_ns_per_read: ending.program_ns.filter(|_| ended > 0).map(|nanos| nanos as f64 / ended as f64),
        bpf_cpu_s: ending.program_ns.map(|nanos| nanos as f64 / 1e9),
        tracer_cpu_s: ending.tracer_cpu_s,
        tracer_max_rss_bytes: ending.tracer_max_rss_bytes,
        attach_ms,
    }
}

fn backends(join: &Join) -> Vec<Backend> {
    let mut backends: Vec<_> = join.aggregate.owners.iter().collect();
    backends.sort_by_key(|(incarnation, totals)| (Reverse(totals.latency_sum_ns()), **incarnation));
    let nobody = Person::default();
    let backend = |(incarnation, totals): (&_, &IoTotals)| {
        let person = join.people.get(*incarnation).unwrap_or(&nobody);
        let row = person.activity.as_ref();
        let leader = row.and_then(|row| row.leader);
        Backend {
            pid: incarnation.pid.0,
            backend_type: row
                .and_then(|row| row.backend_type.clone())
                .or_else(|| person.title_type.clone())
                .or_else(|| (incarnation.pid == join.server.postmaster).then(|| "postmaster".to_owned())),
            leader_pid: leader.map(|leader| join.people.outer(leader).map_or(leader.0, |pid| pid.0)),
            database: row.and_then(|row| row.database.clone()),
            user: row.and_then(|row| row.user.clone()),
            application_name: row.and_then(|row| row.application_name.clone()),
            io: totals.summary(),
        }
    };
    backends.into_iter().map(backend).collect()
}

fn ended_backends(join: &Join) -> Vec<EndedBackends> {
    let entry = |(kind, (processes, totals)): (&Kind, &(u64, IoTotals))| EndedBackends {
        processes: *processes,
        backend_type: kind.backend_type.clone(),
        database: kind.database.clone(),
        user: kind.user.clone(),
        application_name: kind.application_name.clone(),
        io: totals.summary(),
    };
    join.ended.folded.iter().map(entry).collect()
}

fn io_workers(join: &Join, duration_s: f64) -> Vec<IoWorker> {
    let idle = WorkerTotals::default();
    let mut workers: Vec<(Pid, Option<u32>)> = join.people.io_workers().collect();
    for pid in join.aggregate.workers.keys() {
        if !workers.iter().any(|(known, _)| known == pid) {
            workers.push((*pid, None));
        }
    }
    workers.sort_by_key(|(pid, number)| (*number, *pid));
    let worker = |(pid, number): (Pid, Option<u32>)| {
        let totals = join.aggregate.workers.get(&pid).unwrap_or(&idle);
        let mut owners: Vec<_> = totals
            .owners
            .iter()
            .map(|(owner, (reads, bytes))| OwnerShare {
                pid: owner.map(|owner| owner.0),
                reads: *reads,
                bytes: *bytes,
            })
            .collect();
        owners.sort_by_key(|share| (Reverse(share.reads), share.pid));
        let busy_s = totals.io.latency_sum_ns() as f64 / 1e9;
        IoWorker {
            pid: pid.0,
            worker: number,
            busy_ratio: if duration_s > 0.0 { busy_s / duration_s } else { 0.0 },
            owners,
            io: totals.io.summary(),
        }
    };
    workers.into_iter().map(worker).collect()
}

fn relations(join: &Join) -> Vec<Relation> {
    let mut subjects: Vec<_> = join.aggregate.subjects.iter().collect();
    subjects.sort_by_key(|(subject, totals)| (Reverse(totals.latency_sum_ns()), *subject));
    subjects.into_iter().map(|(subject, totals)| relation(join, subject, totals)).collect()
}

fn relation(join: &Join, subject: &Subject, totals: &IoTotals) -> Relation {
    let unnamed = Relation {
        database: None,
        schema: None,
        name: None,
        fork: None,
        relfilenode: None,
        temporary: false,
        file: None,
        io: totals.summary(),
    };
    match subject {
        Subject::Unknown => unnamed,
        Subject::Folder(folder) => Relation { file: Some(folder.clone()), ..unnamed },
        Subject::Relation(relation) => {
            let name = join.name_of(subject);
            let known = name.and_then(|name| name.relation.as_ref());
            Relation {
                database: name.and_then(|name| name.database.clone()),
                schema: known.map(|known| known.schema.clone()),
                name: known.map(|known| known.name.clone()),
                fork: Some(relation.fork.to_string()),
                relfilenode: Some(relation.relfilenumber),
                temporary: relation.temporary,
                ..unnamed
            }
        }
    }
}

fn devices(ending: &Ending) -> Vec<Device> {
    let mut devices: Vec<_> = ending.totals.devices.iter().collect();
    devices.sort_by_key(|(number, group)| (Reverse(group.requests), *number));
    let device = |(number, group): &(u32, pgiotrace_ebpf::DeviceGroup)| {
        let mut queue = KernelHistogram::default();
        queue.add(&group.queue);
        let mut service = KernelHistogram::default();
        service.add(&group.service);
        Device {
            dev: format!("{}:{}", number >> 20, number & 0xf_ffff),
            name: ending.device_names.get(number).cloned(),
            requests: group.requests,
            bytes: group.bytes,
            block_queue_us: queue.dist(),
            device_us: service.dist(),
        }
    };
    devices.into_iter().map(device).collect()
}
