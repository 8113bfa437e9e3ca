//! From the join's sums to the report.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
};

use pgiotrace_ebpf::{Counter, DeviceGroup};

use super::{
    Join, activity,
    ended::{Ended, Kind},
    people::Person,
    sums,
};
use crate::{
    capture::Ending,
    cli::Filter,
    model::{
        Backend, Bounds, Depth, Device, EndedBackends, FilterReport, FromDevice, IoSummary, IoWorker,
        KernelHistogram, Ledger, MethodTotals, Overhead, OwnerShare, PgProbes, Relation, RequestSizes,
        STAT_SCHEMA, SamplerCost, Stages, StatReport, Target, Users, Window,
        aggregate::{IoTotals, WorkerTotals},
        io::{Method, Subject},
    },
    server::{Pid, aio::FIRST_AIO_MAJOR, own_sessions::Serves},
    verdict,
};

pub(super) fn build(mut join: Join, window: Window, attach_ms: f64, ending: &Ending) -> StatReport {
    let own = own_reads_if_records_were_lost(&join, ending);
    join.own_reads = own.unwrap_or(join.own_reads);
    let ledger = ledger(&join, ending);
    let known = Known::of(&join, ending);
    for (is_known, note) in [(known.requests, NO_REQUESTS), (known.waits, NO_WAITS)] {
        if !is_known {
            join.note(note.to_owned());
        }
    }
    for (counter, note) in COUNTED_NOTES {
        let count = ending.totals.counts.of(counter);
        if count > 0 {
            join.note(format!("{count} {note}"));
        }
    }
    if let Some(note) = unmatched_filter(&join) {
        join.note(note.to_owned());
    }
    for contradiction in join.uses.contradictions().to_vec() {
        join.note(contradiction);
    }
    let activity = activity::of(&mut join, known);
    let compared = join.compare_with_statistics(ending);
    for note in compared.notes {
        join.note(note);
    }
    use_kernel_counts_if_records_were_lost(&mut join, ending);
    let mut report = StatReport {
        schema: STAT_SCHEMA,
        target: target(&join),
        ledger,
        filter: filter(&join),
        overhead: overhead(ending, attach_ms),
        verdicts: Vec::new(),
        methods: methods(&join, known),
        backends: backends(&join, known),
        ended_backends: ended_backends(&join, known),
        query_certainty: (ending.totals.counts.ring_full() == 0).then_some(activity.certainty),
        queries: activity.queries,
        sessions: activity.sessions,
        waits: activity.waits,
        io_workers: io_workers(&join, known, window.duration_s),
        relations: relations(&join, known, ending),
        devices: devices(&join, known, ending),
        pg_stat_io: compared.io,
        pg_stat_backend_io: compared.backend_io,
        pg_stat_database: compared.database,
        notes: std::mem::take(&mut join.notes),
        window,
    };
    report.verdicts = verdict::of(&report);
    report
}

/// What the reader must know when the kernel side counted something, behind the count.
const COUNTED_NOTES: [(Counter, &str); 4] = [
    (
        Counter::ProcessRecordLost,
        "starts or ends of processes found the ring full: reads of two processes with the same PID may stand together",
    ),
    (
        Counter::FileUnreadable,
        "reads are of files that could not be told, because the kernel's structures could not be read",
    ),
    (
        Counter::Mixed,
        "block requests served several files or places at once: reads of what came behind may be shown as served from the \
         page cache",
    ),
    (Counter::RequestsFull, "block requests found their table full, and are missing among the devices"),
];

const NO_REQUESTS: &str = "where the reads' bytes came from and where their time went is not known: not every block request was seen";
const NO_WAITS: &str = "exposed and hidden times are not known: not every wait was seen";

/// What of the reads can be told.
#[derive(Clone, Copy)]
pub(super) struct Known {
    /// Which requests they waited for.
    requests: bool,
    /// When their owners waited.
    pub waits: bool,
    /// Whether io workers have a queue that can be full.
    has_queue: Option<bool>,
}

impl Known {
    pub(super) fn of(join: &Join, ending: &Ending) -> Self {
        let counts = &ending.totals.counts;
        let are_reads_known = counts.ring_full() == 0;
        let lost = [Counter::RequestRecordLost, Counter::RequestsFull, Counter::ChainsFull];
        let lost: u64 = lost.map(|counter| counts.of(counter)).iter().sum();
        let method = join.facts.as_ref().and_then(|facts| facts.io_method.as_deref());
        Self {
            requests: are_reads_known && ending.are_requests_traced && lost == 0,
            waits: are_reads_known && counts.of(Counter::WaitRecordLost) == 0,
            has_queue: method.map(|method| method == "worker"),
        }
    }

    /// The summary of reads, without what is not known of them.
    pub(super) fn summary(self, totals: &IoTotals) -> IoSummary {
        let mut summary = totals.summary();
        summary.queue_full_fallbacks = match self.has_queue {
            Some(true) => summary.queue_full_fallbacks,
            Some(false) => Some(0),
            None => None,
        };
        if !self.requests {
            (summary.by_source, summary.readahead_hits) = (None, None);
            summary.stages_us = Stages { pg_queue: summary.stages_us.pg_queue, ..Stages::default() };
        }
        if !self.waits {
            (summary.exposed_us, summary.hidden_us) = (None, None);
            summary.bounds_us = Bounds::default();
        }
        summary
    }
}

fn target(join: &Join) -> Target {
    let facts = join.facts.as_ref();
    Target {
        postmaster_pid: join.server.postmaster.0,
        data_directory: join.server.data_directory.to_string_lossy().into_owned(),
        server_version: facts.map_or_else(|| join.server.major.to_string(), |facts| facts.version.clone()),
        io_method: facts.and_then(|facts| facts.io_method.clone()),
        cluster_name: facts
            .and_then(|facts| facts.settings.get("cluster_name").cloned())
            .filter(|name| !name.is_empty()),
        settings: facts.map(|facts| facts.settings.clone()).unwrap_or_default(),
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
        own: join.own_reads,
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
        impossible: ends.impossible + join.blocks.impossible,
        complete: lost == 0 && begun == accounted && counts.of(Counter::ProcessesFull) == 0,
        pg_aios: join.uses.ledger(),
    }
}

/// Reads of the tracer's own sessions, where only the kernel's counts tell all of them.
fn own_reads_if_records_were_lost(join: &Join, ending: &Ending) -> Option<u64> {
    let is_own = |tgid: u32| join.people.serves(join.people.current(Pid(tgid))) == Serves::Tracer;
    let own = ending.totals.groups.iter().filter(|(key, _)| is_own(key.owner_tgid));
    let reads = own.map(|(_, group)| group.completed + group.failed).sum();
    (ending.totals.counts.ring_full() > 0).then_some(reads)
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
    let is_others = |tgid: u32| people.serves(people.current(Pid(tgid))) != Serves::Tracer;
    let groups = ending.totals.groups.iter().filter(|(key, _)| is_others(key.owner_tgid));
    aggregate.replace_by_groups(
        groups,
        |pid| people.current(pid),
        |pid| people.is_io_worker(pid) == Some(true),
    );
    let blocks = if join.server.major < FIRST_AIO_MAJOR { " (their blocks are not counted)" } else { "" };
    join.note(format!(
        "the ring between kernel and tracer was full: methods, backends{blocks} and io workers are complete from the kernel's \
         own counts, with percentiles to 1/16, but for owners that had ended long before; {lost} reads are missing among \
         relations"
    ));
}

fn filter(join: &Join) -> Option<FilterReport> {
    let Filter { pids, relations, databases, users, query_ids, min_latency, session: _ } = &join.filter;
    (!join.filter.is_empty()).then(|| FilterReport {
        pids: pids.clone(),
        relations: relations.iter().map(ToString::to_string).collect(),
        databases: databases.clone(),
        users: users.clone(),
        query_ids: query_ids.iter().map(ToString::to_string).collect(),
        min_latency_us: min_latency.map(|shortest| shortest.as_secs_f64() * 1e6),
        reads: join.passed,
    })
}

/// Why a filter may have let nothing pass, if it has not.
fn unmatched_filter(join: &Join) -> Option<&'static str> {
    let Filter { relations, databases, users, session, .. } = &join.filter;
    let is_by_name = !(relations.is_empty() && databases.is_empty() && users.is_empty());
    // A session may well have found all that it needed in shared_buffers.
    if join.filter.is_empty() || join.passed > 0 || session.is_some() {
        None
    } else if is_by_name && join.facts.is_none() {
        Some("no read matched the filter: without a connection to the server, names are not known")
    } else {
        Some("no read matched the filter: check its names, or whether those reads were made at all")
    }
}

fn overhead(ending: &Ending, attach_ms: f64) -> Overhead {
    let ended = ending.totals.counts.of(Counter::Completed) + ending.totals.counts.of(Counter::Failed);
    Overhead {
        bpf_ns_per_read: ending.program_ns.filter(|_| ended > 0).map(|nanos| nanos as f64 / ended as f64),
        bpf_cpu_s: ending.program_ns.map(|nanos| nanos as f64 / 1e9),
        tracer_cpu_s: ending.tracer_cpu_s,
        tracer_max_rss_bytes: ending.tracer_max_rss_bytes,
        attach_ms,
        sampler: ending
            .spent
            .as_ref()
            .map(|spent| SamplerCost { samples: spent.samples(), server_cpu_s: spent.server_s() }),
        pg_probes: ending.probes.map(|probes| {
            let traps = ending.totals.counts.of(Counter::ProbeTraps);
            let estimated_cpu_s = probes.ns_per_trap.map(|nanos| traps as f64 * nanos / 1e9);
            PgProbes { traps, ns_per_trap: probes.ns_per_trap, estimated_cpu_s }
        }),
    }
}

fn methods(join: &Join, known: Known) -> Vec<MethodTotals> {
    let mut methods: Vec<_> = join.aggregate.methods.iter().filter(|(_, totals)| totals.reads > 0).collect();
    methods.sort_by_key(|(method, totals)| (Reverse(totals.latency_sum_ns()), **method));
    let entry = |(method, totals): (&Method, &IoTotals)| MethodTotals {
        method: method.name(),
        io: known.summary(totals),
    };
    methods.into_iter().map(entry).collect()
}

fn backends(join: &Join, known: Known) -> Vec<Backend> {
    let mut backends: Vec<_> = join.aggregate.owners.iter().collect();
    backends.sort_by_key(|(incarnation, totals)| (Reverse(totals.latency_sum_ns()), **incarnation));
    let nobody = Person::default();
    let backend = |(incarnation, totals): (&_, &IoTotals)| {
        let person = join.people.get(*incarnation).unwrap_or(&nobody);
        let row = person.activity.as_ref();
        let leader = person.leader();
        Backend {
            pid: incarnation.pid.0,
            backend_type: person
                .backend_type()
                .map(str::to_owned)
                .or_else(|| (incarnation.pid == join.server.postmaster).then(|| "postmaster".to_owned())),
            leader_pid: leader.map(|leader| join.people.outer(leader).map_or(leader.0, |pid| pid.0)),
            database: row.and_then(|row| row.database.clone()),
            user: row.and_then(|row| row.user.clone()),
            application_name: row.and_then(|row| row.application_name.clone()),
            io: known.summary(totals),
        }
    };
    backends.into_iter().map(backend).collect()
}

fn ended_backends(join: &Join, known: Known) -> Vec<EndedBackends> {
    let entry = |(kind, (processes, totals)): (&Kind, &(u64, IoTotals))| EndedBackends {
        processes: *processes,
        backend_type: kind.backend_type.clone(),
        database: kind.database.clone(),
        user: kind.user.clone(),
        application_name: kind.application_name.clone(),
        io: known.summary(totals),
    };
    join.ended.folded.iter().map(entry).collect()
}

fn io_workers(join: &Join, known: Known, duration_s: f64) -> Vec<IoWorker> {
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
        let busy_s = totals.busy_ns as f64 / 1e9;
        IoWorker {
            pid: pid.0,
            worker: number,
            busy_ratio: if duration_s > 0.0 { busy_s / duration_s } else { 0.0 },
            owners,
            io: known.summary(&totals.io),
        }
    };
    workers.into_iter().map(worker).collect()
}

fn relations(join: &Join, known: Known, ending: &Ending) -> Vec<Relation> {
    let mut subjects: Vec<_> = join.aggregate.subjects.iter().collect();
    subjects.sort_by_key(|(subject, totals)| (Reverse(totals.latency_sum_ns()), *subject));
    let mut devices = known.requests.then(|| devices_by_subject(join, ending));
    let relation = |(subject, totals)| {
        let mut relation = relation(join, subject, known.summary(totals));
        // None is known of it only where all came from the page cache.
        let is_cached = relation.io.by_source.is_some_and(|by| by.device + by.mixed + by.unknown == 0);
        let found = devices.as_mut().map(|devices| devices.remove(subject));
        relation.devices = found.and_then(|found| found.or_else(|| is_cached.then(Vec::new)));
        relation
    };
    subjects.into_iter().map(relation).collect()
}

/// What was read of each subject from each device, most first.
fn devices_by_subject<'a>(join: &'a Join, ending: &Ending) -> HashMap<&'a Subject, Vec<FromDevice>> {
    let mut sums: BTreeMap<(&Subject, u32), sums::FromDevice> = BTreeMap::new();
    for (file, device, sum) in join.blocks.sums.iter() {
        if let Some(subject) = join.files.get(&file) {
            sums.entry((subject, device)).or_default().merge(sum);
        }
    }
    let mut all: HashMap<&Subject, Vec<FromDevice>> = HashMap::new();
    for ((subject, device), sum) in sums {
        all.entry(subject).or_default().push(FromDevice {
            dev: device_number(device),
            name: ending.device_names.get(&device).cloned(),
            requests: sum.requests,
            asked_bytes: sum.asked_bytes,
            readahead_bytes: sum.ahead_bytes,
        });
    }
    for devices in all.values_mut() {
        devices.sort_by_key(|device| Reverse(device.requests));
    }
    all
}

fn relation(join: &Join, subject: &Subject, io: IoSummary) -> Relation {
    let unnamed = Relation {
        database: None,
        schema: None,
        name: None,
        fork: None,
        relfilenode: None,
        temporary: false,
        file: None,
        devices: None,
        io,
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

fn devices(join: &Join, known: Known, ending: &Ending) -> Vec<Device> {
    let mut devices: Vec<_> = ending.totals.devices.iter().collect();
    // The one that took most of the time first.
    devices.sort_by_key(|(number, group)| (Reverse(group.service.sum_ns), *number));
    devices.into_iter().map(|(number, group)| device(join, known, ending, *number, group)).collect()
}

fn device(join: &Join, known: Known, ending: &Ending, number: u32, group: &DeviceGroup) -> Device {
    let [queue, service, sizes] = [&group.queue, &group.service, &group.sizes].map(|histogram| {
        let mut sum = KernelHistogram::default();
        sum.add(histogram);
        sum
    });
    // Little's law: requests there at once = their rate x the time that each is there.
    let mean_depth = service.sum_nanos() as f64 / ending.duration_ns.max(1) as f64;
    let of_device = join.blocks.sums.iter().filter(|(_, device, _)| *device == number);
    let ahead = of_device.map(|(.., sum)| sum.ahead_bytes).sum();
    Device {
        dev: device_number(number),
        name: ending.device_names.get(&number).cloned(),
        requests: group.requests,
        bytes: group.bytes,
        block_queue_us: queue.dist(),
        device_us: service.dist(),
        request_bytes: sizes.dist().map(|dist| RequestSizes {
            // The histogram takes its values for nanoseconds.
            mean: dist.mean * 1e3,
            p50: dist.p50 * 1e3,
            p99: dist.p99 * 1e3,
            max: dist.max * 1e3,
        }),
        requeues: group.requeues,
        depth: Depth { mean: mean_depth, max: group.most_depth },
        users: users(join, known, number, group, ahead),
    }
}

/// For whom a device read. What kernel threads queued and the server's reads waited for is known only here.
fn users(join: &Join, known: Known, number: u32, group: &DeviceGroup, ahead: u64) -> Users {
    let adopted = join.blocks.sums.adopted(number);
    let server_requests = group.cluster_requests + adopted.requests;
    let server_bytes = group.cluster_bytes + adopted.bytes;
    let unknown_requests = group.held_requests.saturating_sub(adopted.requests);
    let unknown_bytes = group.held_bytes.saturating_sub(adopted.bytes);
    Users {
        server_requests,
        server_bytes,
        readahead_bytes: known.requests.then_some(ahead),
        unknown_requests,
        unknown_bytes,
        other_requests: group.requests.saturating_sub(server_requests + unknown_requests),
        other_bytes: group.bytes.saturating_sub(server_bytes + unknown_bytes),
    }
}

/// `major:minor` of a number as the kernel encodes it.
fn device_number(number: u32) -> String {
    format!("{}:{}", number >> 20, number & 0xf_ffff)
}
