//! The running machine as a source of events.

use std::{
    fs::{self, File},
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use pgiotrace_ebpf::Cluster;
use tokio::{
    sync::mpsc::{self, Receiver, UnboundedReceiver},
    time::{Interval, MissedTickBehavior, interval},
};

use super::{
    Capture, Ending, Event, Probes, SERVER_EPOCH_UNIX_S,
    describer::Describer,
    kernel::{
        Kernel, KernelError, Record, Sizes, lost_without_member_of,
        probes::ProbeError,
        programs::{Phase, Program, Refusal},
    },
    monotonic_ns,
    names::{NameAnswer, Resolver},
    sampler::{Habits, PgSample, Sampler, Spent},
};
use crate::server::{
    Pid,
    aio::{self, AioArea, AioRefusal},
    connect::Connector,
    discover::{ProcessInfo, Server},
    own_sessions::Serves,
    probes::{self, ProbePoints, ProbeRefusal},
    symbols::{self, SymbolError, Symbols},
};

/// How often the server itself is looked at: whether it runs, and whether its shared memory is new.
const WATCH_INTERVAL: Duration = Duration::from_millis(250);
/// Samples that may wait to be taken in.
const SAMPLES_WAITING: usize = 64;
/// How long answers about names are waited for at the end.
const NAMES_TIMEOUT: Duration = Duration::from_secs(2);
/// Processes of a server that does not say how many it may have (before PostgreSQL 18).
const ASSUMED_PROCESSES: u32 = 4096;

const PROBES_FAILED: &str = "probing the server's functions as --pg-probes asks failed";
const LEAVE_OUT: &str = "leave the option out to trace without them";
const NOTHING_TO_PROBE: &str = "--pg-probes adds nothing: with io_method = sync no read is handed over";

/// Why nothing can be captured.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    /// The kernel side.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The functions to probe cannot be found.
    #[error("{PROBES_FAILED}: {0}; {LEAVE_OUT}")]
    NoProbes(#[source] ProbeRefusal),
    /// The kernel refused a probe.
    #[error("{PROBES_FAILED}: {0}; {LEAVE_OUT}")]
    Probes(#[from] ProbeError),
    /// A thread for PostgreSQL's side did not start.
    #[error("starting a thread failed: {0}")]
    Thread(#[source] io::Error),
}

/// What is to be captured.
pub struct Plan {
    /// The server.
    pub server: Server,
    /// How to ask it; `None` to leave it alone.
    pub connector: Option<Connector>,
    /// How to sample it; `None` for no samples.
    pub samples: Option<Habits>,
    /// Whether the kernel side looks for I/O handles.
    pub use_handles: bool,
    /// Whether the server's functions are probed.
    pub pg_probes: bool,
    /// Size of the ring between kernel and tracer; a power of two of pages.
    pub ring_bytes: u32,
    /// Where the kernel's records go as they come, too.
    pub raw_records: Option<File>,
}

/// An attached trace.
pub struct Live {
    server: Server,
    kernel: Kernel,
    aio: AioState,
    shared_memory: Option<String>,
    describer: Describer,
    sampler: Option<Sampler>,
    /// What samples cost.
    spent: Option<Arc<Spent>>,
    samples: Option<Receiver<PgSample>>,
    answers: Option<UnboundedReceiver<NameAnswer>>,
    watch: Interval,
    some_left: bool,
    some_joined: bool,
    is_stopped: bool,
    /// Events that arose outside [`Capture::next`].
    pending: Vec<Event>,
    /// When all programs were attached.
    attached: Instant,
    /// What the programs had run before the trace.
    programs_before: Option<u64>,
    probes: Option<Probes>,
}

/// Where the server's I/O handles are.
struct AioState {
    use_handles: bool,
    symbols: Result<Symbols, SymbolError>,
    area: Result<AioArea, AioRefusal>,
}

impl AioState {
    fn read(server: &Server, use_handles: bool) -> Self {
        let symbols = symbols::read(server.postmaster);
        let area = aio::read(server, symbols.as_ref().unwrap_or(&Symbols::default()));
        Self { use_handles, symbols, area }
    }

    fn cluster(&self, server: &Server) -> Cluster {
        let mut cluster = Cluster {
            postmaster_tgid: server.postmaster.0,
            block_bytes: server.build_sizes.map_or(0, |sizes| sizes.block_bytes),
            ..Cluster::default()
        };
        if let Ok(symbols) = &self.symbols {
            cluster.my_proc_number = symbols.my_proc_number.unwrap_or(0);
            cluster.my_be_entry = symbols.my_be_entry.unwrap_or(0);
        }
        if let (true, Ok(area)) = (self.use_handles, &self.area) {
            cluster.handles = area.handles;
            cluster.handle_count = area.handle_count;
            cluster.iovecs = area.iovecs;
            cluster.iovec_count = area.iovec_count;
            cluster.iovecs_per_handle = area.iovecs_per_handle;
        }
        cluster
    }

    fn sizes(&self, ring_bytes: u32) -> Sizes {
        let (handles, processes) = match &self.area {
            Ok(area) => (area.handle_count, area.handle_count / area.handles_per_proc.max(1)),
            Err(_) => (0, ASSUMED_PROCESSES),
        };
        Sizes { processes, handles, ring_bytes }
    }

    /// Whether another look would find the same: not while shared memory is being filled.
    fn is_settled(&self) -> bool {
        !matches!(self.area, Err(AioRefusal::Unreadable { .. } | AioRefusal::NotReady))
    }

    fn proc_number_of(&self, pid: Pid) -> Option<i32> {
        aio::read_my_proc_number(pid, self.symbols.as_ref().ok()?)
    }

    /// What the user loses because handles cannot be read, if anything.
    fn note(&self) -> Option<String> {
        let reason = match (&self.symbols, &self.area) {
            (_, Ok(_) | Err(AioRefusal::BeforeAio { .. })) => return None,
            (Err(error), _) => error.to_string(),
            (_, Err(refusal)) => refusal.to_string(),
        };
        Some(format!(
            "{reason}: the owners of io workers' reads are only inferred from pg_aios, and the relations of reads through \
             io_uring are not known"
        ))
    }
}

impl Live {
    /// Attaches to the kernel and starts to ask the server.
    ///
    /// # Errors
    ///
    /// When the kernel refuses a program that nothing can be traced without, or a probe that is asked for.
    pub fn attach(plan: Plan) -> Result<Self, LiveError> {
        let Plan { server, connector, samples, use_handles, pg_probes, ring_bytes, raw_records } = plan;
        // Named before it is read, so that a restart in between is noticed at the next look.
        let shared_memory = server.shared_memory();
        let (aio, points) = look_at(&server, use_handles, pg_probes)?;
        let mut notes: Vec<String> = aio.note().into_iter().collect();
        if pg_probes && points.is_none() {
            notes.push(NOTHING_TO_PROBE.to_owned());
        }
        let mut kernel = Kernel::load(aio.sizes(ring_bytes))?;
        kernel.tap(raw_records);
        notes.extend(kernel.absent_members().iter().map(|(structure, member)| {
            format!("this kernel has no {structure}.{member}: {}", lost_without_member_of(structure))
        }));
        kernel.set_cluster(&aio.cluster(&server))?;
        // The set of processes is kept by the kernel from here on; those that are there already are added after it,
        // so that none falls between.
        let outcomes = kernel.attach_phase(Phase::Processes);
        kernel.keep(outcomes)?;
        let processes = seed(&mut kernel, &server, &aio)?;
        let outcomes = kernel.attach_phase(Phase::Ends);
        notes.extend(kernel.keep(outcomes)?.iter().map(missing_program));
        // Before reads are seen to begin, so that it is known of most when they were handed over.
        let probes = points.map(|points| attach_probes(&mut kernel, &server, &points)).transpose()?;
        let outcomes = kernel.attach_phase(Phase::Begins);
        notes.extend(kernel.keep(outcomes)?.iter().map(missing_program));
        let programs_before = programs_ns(&kernel);
        let mut watch = interval(WATCH_INTERVAL);
        watch.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut live = Self {
            describer: Describer::new(&server),
            shared_memory: if aio.is_settled() { shared_memory } else { None },
            server,
            kernel,
            aio,
            sampler: None,
            spent: None,
            samples: None,
            answers: None,
            watch,
            some_left: false,
            some_joined: false,
            is_stopped: false,
            pending: notes.into_iter().map(Event::Note).collect(),
            attached: Instant::now(),
            programs_before,
            probes,
        };
        live.pending.extend(processes.into_iter().map(|process| Event::Process(process, Serves::Others)));
        live.pending.push(clock());
        live.ask_server(connector, samples)?;
        Ok(live)
    }

    fn ask_server(&mut self, connector: Option<Connector>, habits: Option<Habits>) -> Result<(), LiveError> {
        let Some(connector) = connector else { return Ok(()) };
        self.describer.own = connector.own_sessions().clone();
        self.pending.extend(connector.warnings().iter().cloned().map(Event::Note));
        if let Some(habits) = habits {
            self.spent = Some(Arc::clone(&habits.spent));
            let (sender, receiver) = mpsc::channel(SAMPLES_WAITING);
            self.sampler =
                Some(Sampler::spawn(connector.clone(), habits, sender).map_err(LiveError::Thread)?);
            self.samples = Some(receiver);
        }
        let (sender, receiver) = mpsc::unbounded_channel();
        self.describer.resolver = Some(Resolver::spawn(connector, sender).map_err(LiveError::Thread)?);
        self.answers = Some(receiver);
        Ok(())
    }

    /// Looks after the server: whether it runs, and whether its shared memory is new.
    fn watch_server(&mut self, sink: &mut impl FnMut(Event)) -> Result<(), KernelError> {
        if self.is_stopped {
            return Ok(());
        }
        if !self.server.is_running() {
            self.is_stopped = true;
            sink(Event::Stopped);
            return Ok(());
        }
        if std::mem::take(&mut self.some_left) {
            self.kernel.retire_groups(|owner| fs::exists(format!("/proc/{owner}")).unwrap_or(false))?;
        }
        self.look_for_restart(sink)
    }

    /// Reads the handles' addresses again when the server's shared memory is new.
    fn look_for_restart(&mut self, sink: &mut impl FnMut(Event)) -> Result<(), KernelError> {
        let Some(shared_memory) = self.server.shared_memory() else { return Ok(()) };
        if self.shared_memory.as_ref() == Some(&shared_memory) {
            return Ok(());
        }
        let aio = AioState::read(&self.server, self.aio.use_handles);
        if !aio.is_settled() {
            return Ok(());
        }
        self.kernel.set_cluster(&aio.cluster(&self.server))?;
        if self.probes.is_some() {
            // The handles' generations begin anew.
            self.kernel.forget_staged()?;
        }
        self.aio = aio;
        // Without a name before, the server was only starting.
        if self.shared_memory.replace(shared_memory).is_some() {
            sink(Event::Restarted);
        }
        Ok(())
    }

    fn drain(&mut self, sink: &mut impl FnMut(Event)) {
        let Self { kernel, describer, some_left, some_joined, .. } = self;
        kernel.drain(|record| {
            *some_joined |= matches!(record, Record::Joined(_));
            *some_left |= describer.hand_over(record, sink);
        });
    }
}

impl Capture for Live {
    type Error = LiveError;

    async fn next(&mut self, sink: &mut impl FnMut(Event)) -> Result<(), LiveError> {
        self.pending.drain(..).for_each(&mut *sink);
        let mut is_time_to_watch = false;
        let is_behind = self.kernel.is_behind();
        let event = tokio::select! {
            () = tokio::task::yield_now(), if is_behind => None,
            ready = self.kernel.readable() => { ready?; None }
            Some(sample) = receive(&mut self.samples), if !is_behind => Some(Event::Sample(sample)),
            Some(answer) = receive_unbounded(&mut self.answers) => Some(Event::Name(answer)),
            _ = self.watch.tick() => { is_time_to_watch = true; None }
        };
        // Reads before what was sampled after them: the join relies on that.
        self.drain(sink);
        self.describer.decide_own(sink);
        event.into_iter().for_each(&mut *sink);
        if is_time_to_watch {
            // Clocks are set now and then.
            sink(clock());
            self.watch_server(sink)?;
        }
        // Who joins may be the first process of a server that has just restarted after a crash, and its reads are to be
        // exact, too: the watch would come too late for them.
        if std::mem::take(&mut self.some_joined) {
            self.look_for_restart(sink)?;
        }
        Ok(())
    }

    async fn finish(mut self, sink: &mut impl FnMut(Event)) -> Result<Ending, LiveError> {
        self.pending.drain(..).for_each(&mut *sink);
        // What happened since the last look belongs into the report as well.
        self.watch_server(sink)?;
        let programs_now = programs_ns(&self.kernel);
        let are_requests_traced = self.kernel.traces_requests();
        let duration_ns = u64::try_from(self.attached.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.kernel.detach();
        let Self { kernel, describer, .. } = &mut self;
        let totals = kernel
            .settle(|record| {
                describer.hand_over(record, sink);
            })
            .await?;
        self.finish_server_side(sink).await;
        self.describer.decide_own(sink);
        Ok(Ending {
            are_requests_traced,
            duration_ns,
            device_names: totals
                .devices
                .iter()
                .filter_map(|(dev, _)| Some((*dev, device_name(*dev)?)))
                .collect(),
            totals,
            program_ns: self
                .programs_before
                .zip(programs_now)
                .map(|(before, now)| now.saturating_sub(before)),
            probes: self.probes,
            spent: self.spent.take(),
            tracer_cpu_s: own_cpu_s(),
            tracer_max_rss_bytes: own_max_rss_bytes().unwrap_or(0),
        })
    }
}

impl Live {
    /// Takes in the last samples and names.
    async fn finish_server_side(&mut self, sink: &mut impl FnMut(Event)) {
        let last = self.sampler.take().and_then(Sampler::stop);
        while let Some(sample) = self.samples.as_mut().and_then(|samples| samples.try_recv().ok()) {
            sink(Event::Sample(sample));
        }
        if let Some(sample) = last {
            sink(Event::Sample(sample));
        }
        // Dropped: the resolver tries once more what is open, and ends.
        self.describer.resolver = None;
        let Some(mut answers) = self.answers.take() else { return };
        let all = async {
            while let Some(answer) = answers.recv().await {
                sink(Event::Name(answer));
            }
        };
        // A server that does not answer must not keep the report from its reader.
        let _ = tokio::time::timeout(NAMES_TIMEOUT, all).await;
    }
}

/// Where the server's I/O handles are, and where to probe: nowhere unless that is wanted and there is something to probe.
fn look_at(
    server: &Server,
    use_handles: bool,
    pg_probes: bool,
) -> Result<(AioState, Option<ProbePoints>), LiveError> {
    let points = if pg_probes { probes::find(server).map_err(LiveError::NoProbes)? } else { None };
    match AioState::read(server, use_handles) {
        // What the probes tell, they tell of handles.
        AioState { area: Err(refusal), .. } if points.is_some() => Err(LiveError::NoProbes(refusal.into())),
        aio => Ok((aio, points)),
    }
}

/// Adds the processes that the server has already.
fn seed(kernel: &mut Kernel, server: &Server, aio: &AioState) -> Result<Vec<ProcessInfo>, KernelError> {
    kernel.add_process(server.postmaster)?;
    let processes = server.processes();
    for process in &processes {
        let pid = process.pid;
        kernel.add_process(pid)?;
        let proc_number = aio.proc_number_of(pid);
        if let Some(number) = proc_number {
            kernel.add_owner(number, pid)?;
        }
        // One that ended meanwhile would stay for ever, and its slot may be another's by now.
        if !fs::exists(format!("/proc/{pid}")).unwrap_or(true) {
            kernel.remove_process(pid, proc_number)?;
        }
    }
    Ok(processes)
}

/// Attaches the probes, and measures what they will cost.
fn attach_probes(kernel: &mut Kernel, server: &Server, points: &ProbePoints) -> Result<Probes, ProbeError> {
    kernel.attach_probes(server.postmaster, points)?;
    let ns_per_trap =
        kernel.trap_ns().inspect_err(|error| log::warn!("the cost of a trap is not known: {error}")).ok();
    Ok(Probes { ns_per_trap })
}

/// How the server's clock, which is that of the system, stands to the kernel's.
fn clock() -> Event {
    let read = || {
        let before_ns = monotonic_ns();
        let wall = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        (monotonic_ns() - before_ns, before_ns, wall)
    };
    // The closest pair of readings: this thread may lose its processor in between.
    let pairs = [read(), read(), read()];
    let (_, at_ns, wall) = pairs.into_iter().min_by_key(|(between_ns, ..)| *between_ns).unwrap_or_else(read);
    let wall_us = (wall.tv_sec - SERVER_EPOCH_UNIX_S) * 1_000_000 + wall.tv_nsec / 1_000;
    Event::Clock { zero_us: wall_us - i64::try_from(at_ns / 1_000).unwrap_or(i64::MAX) }
}

fn missing_program((program, refusal): &(&'static Program, Refusal)) -> String {
    format!("{} not traced: {refusal}; missing: {}", program.name, program.lost_without)
}

/// Run time of the kernel side's programs so far, if the kernel measures it.
fn programs_ns(kernel: &Kernel) -> Option<u64> {
    let is_measured =
        fs::read_to_string("/proc/sys/kernel/bpf_stats_enabled").is_ok_and(|text| text.trim() == "1");
    is_measured.then(|| kernel.run_time().0)
}

/// CPU time of this process so far, all threads, seconds.
fn own_cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Peak resident memory of this process.
fn own_max_rss_bytes() -> Option<u64> {
    let status = procfs::process::Process::myself().ok()?.status().ok()?;
    status.vmhwm.map(|kib| kib * 1024)
}

/// The kernel's name of a device.
fn device_name(device: u32) -> Option<String> {
    let (major, minor) = (device >> 20, device & 0xf_ffff);
    let link = fs::read_link(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    Some(link.file_name()?.to_string_lossy().into_owned())
}

/// The next sample; waits for ever when there are none (any more).
async fn receive(samples: &mut Option<Receiver<PgSample>>) -> Option<PgSample> {
    match samples {
        Some(receiver) => receiver.recv().await,
        None => std::future::pending().await,
    }
}

async fn receive_unbounded(answers: &mut Option<UnboundedReceiver<NameAnswer>>) -> Option<NameAnswer> {
    match answers {
        Some(receiver) => receiver.recv().await,
        None => std::future::pending().await,
    }
}
