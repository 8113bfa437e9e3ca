//! The kernel side, loaded and attached: its records, its counts, and the set of processes that it traces.

pub mod btf;
pub mod probes;
pub mod programs;

use std::{
    fs::File,
    io::{self, BufWriter, Write as _},
    path::Path,
    time::Duration,
};

use aya::{
    Btf, Ebpf, EbpfLoader,
    maps::{Array, HashMap, MapData, MapError, PerCpuArray, RingBuf},
    programs::uprobe::UProbeLink,
};
use aya_log::EbpfLogger;
use pgiotrace_ebpf::{
    COUNTER_COUNT, Cluster, Counter, DeviceGroup, Group, GroupKey, MergeRecord, Process, ProcessRecord,
    ReadRecord, RequestRecord, Staged, WaitRecord, globals, kind, maps, wait,
};
use tokio::io::unix::AsyncFd;
use zerocopy::{FromBytes, IntoBytes};

use super::monotonic_ns;
use crate::server::{Pid, probes::ProbePoints};
use btf::{BtfError, KernelTypes};
use probes::ProbeError;
use programs::{Attached, Outcome, PROGRAMS, Phase, Refusal};

/// The kernel object, built by `build.rs`.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/pgiotrace-bpf"));

/// Why the kernel cannot be traced.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The kernel's types are not known.
    #[error(transparent)]
    Types(#[from] BtfError),
    /// The kernel's types as aya reads them.
    #[error("reading the kernel's type information failed: {0}; the kernel needs CONFIG_DEBUG_INFO_BTF=y")]
    Btf(#[source] aya::BtfError),
    /// The object was refused.
    #[error("loading the kernel side failed: {0}; `pgiotrace doctor` says what is missing")]
    Load(#[source] Box<aya::EbpfError>),
    /// The kernel side's own messages cannot be read.
    #[error("reading the kernel side's messages failed: {0}")]
    Log(#[source] Box<aya_log::Error>),
    /// A map of the object is missing or refused an access.
    #[error("map {map} of the kernel side: {source}")]
    Map {
        /// Its name.
        map: &'static str,
        /// What the kernel said.
        #[source]
        source: MapError,
    },
    /// The ring cannot be waited for.
    #[error("waiting for the kernel's records failed: {0}")]
    Ring(#[source] io::Error),
    /// A program that is required did not attach.
    #[error(
        "{name} cannot be traced: {refusal}; without it, {lost_without} would be missing, so nothing is traced"
    )]
    Required {
        /// What `doctor` calls it.
        name: &'static str,
        /// What would be missing.
        lost_without: &'static str,
        /// Why.
        #[source]
        refusal: Box<Refusal>,
    },
}

/// How many entries the tables hold.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Processes that the server may have.
    pub processes: u32,
    /// I/O handles that the server has.
    pub handles: u32,
    /// Bytes of the ring; a power of two of pages.
    pub ring_bytes: u32,
}

impl Sizes {
    /// Room for processes that end while others already start.
    const CHURN: u32 = 1024;
    /// At 2 KiB an entry, 18 MiB of kernel memory at the most.
    const MOST_GROUPS: u32 = 8192;

    fn processes(self) -> u32 {
        self.processes.saturating_add(Self::CHURN)
    }

    fn groups(self) -> u32 {
        self.processes.saturating_mul(4).saturating_add(512).min(Self::MOST_GROUPS)
    }

    /// Groups above this number are collected by [`Kernel::retire_groups`].
    fn crowded_groups(self) -> usize {
        self.groups() as usize / 2
    }
}

/// One record of the ring.
#[derive(Debug, Clone, Copy)]
pub enum Record {
    /// A read ended.
    Read(ReadRecord),
    /// A device completed a request.
    Request(RequestRecord),
    /// A read's pages were merged into a request of others.
    Merge(MergeRecord),
    /// A process was inside a system call that may wait.
    Wait(WaitRecord),
    /// A process joined the cluster.
    Joined(Pid),
    /// A process of the cluster ended.
    Left(Pid),
}

/// What the kernel counted, complete even when the ring was full.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    counters: [u64; COUNTER_COUNT as usize],
    /// Reads that have begun and not ended.
    pub in_flight: u64,
}

impl Counts {
    /// A counter.
    #[must_use]
    pub fn of(&self, counter: Counter) -> u64 {
        self.counters[counter as usize]
    }

    /// Sets a counter, for tests.
    #[cfg(test)]
    pub(crate) fn set(&mut self, counter: Counter, value: u64) {
        self.counters[counter as usize] = value;
    }

    /// Reads that ended with their record in the ring.
    #[must_use]
    pub fn recorded(&self) -> u64 {
        // Counters are read one after the other while reads may still end.
        (self.of(Counter::Completed) + self.of(Counter::Failed)).saturating_sub(self.ring_full())
    }

    /// Reads that ended without a record, for want of room in the ring.
    #[must_use]
    pub fn ring_full(&self) -> u64 {
        self.of(Counter::RingFull) + self.of(Counter::FailedRingFull)
    }

    /// Whether every read that began has ended, is in flight, or was counted as not followed.
    #[must_use]
    pub fn balance(&self) -> bool {
        let ended = self.of(Counter::Completed) + self.of(Counter::Failed);
        self.of(Counter::Begun) == ended + self.in_flight + self.of(Counter::TableFull)
    }
}

/// All that the kernel side knows at the end.
#[derive(Debug, Clone, Default)]
pub struct Totals {
    /// Counts.
    pub counts: Counts,
    /// Counts and latencies per owner, executor and method; owner 0 is "not known", or ended and folded.
    pub groups: Vec<(GroupKey, Group)>,
    /// Read requests per device number (major << 20 | minor).
    pub devices: Vec<(u32, DeviceGroup)>,
    /// Processes that are inside a system call in which they may wait, as of now.
    pub waiting: Vec<WaitRecord>,
}

/// The loaded kernel side.
pub struct Kernel {
    ebpf: Ebpf,
    logger: EbpfLogger<&'static dyn log::Log>,
    btf: Btf,
    types: KernelTypes,
    sizes: Sizes,
    ring: AsyncFd<RingBuf<MapData>>,
    attached: Vec<(&'static programs::Program, Attached)>,
    /// The probes of `--pg-probes`, kept attached.
    probes: Vec<UProbeLink>,
    /// Groups of owners that ended, taken out of the kernel's table and folded.
    retired: std::collections::HashMap<GroupKey, Group>,
    received: u64,
    is_behind: bool,
    absent: Vec<(&'static str, &'static str)>,
    tap: Option<BufWriter<File>>,
}

/// How many records are taken out of the ring at once.
const MOST_AT_ONCE: usize = 50_000;

impl Kernel {
    /// Loads the kernel side; nothing is attached yet.
    ///
    /// # Errors
    ///
    /// When the kernel's types cannot be read or the object is refused.
    pub fn load(sizes: Sizes) -> Result<Self, KernelError> {
        // Each reads the same 5 MiB in its own way, which is half of the time until all is attached.
        let (types, btf) = std::thread::scope(|scope| {
            let types = scope.spawn(KernelTypes::of_running_kernel);
            let btf = Btf::from_sys_fs().map_err(KernelError::Btf);
            (types.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), btf)
        });
        let (types, btf) = (types?, btf?);
        let mut offsets = Vec::with_capacity(globals::OFFSETS.len());
        let mut absent = Vec::new();
        for (global, structure, member) in globals::OFFSETS {
            let offset = types.offset_of(structure, member)?;
            if offset.is_none() {
                absent.push((structure, member));
            }
            offsets.push((global, offset.unwrap_or(globals::ABSENT)));
        }
        let mut loader = EbpfLoader::new();
        loader
            .btf(Some(&btf))
            .map_max_entries(maps::PROCESSES, sizes.processes())
            .map_max_entries(maps::OWNERS, sizes.processes())
            .map_max_entries(maps::SYSCALL_READS, sizes.processes())
            .map_max_entries(maps::IO_URING_READS, sizes.handles.clamp(1024, 65_536))
            .map_max_entries(maps::STAGED, sizes.handles.max(1))
            .map_max_entries(maps::GROUPS, sizes.groups())
            .map_max_entries(maps::RECORDS, sizes.ring_bytes);
        for (global, offset) in &offsets {
            loader.override_global(global, offset, true);
        }
        let page_struct_bytes = types.size_of("page").unwrap_or(0);
        let page_bytes = u32::try_from(rustix::param::page_size()).unwrap_or(0);
        loader.override_global(globals::PAGE_STRUCT_BYTES, &page_struct_bytes, true);
        loader.override_global(globals::PAGE_BYTES, &page_bytes, true);
        // Off, the verifier takes the logging out of the programs.
        let log_level = log::max_level() as u8;
        loader.override_global(aya_log::LEVEL, &log_level, true);
        let mut ebpf = loader.load(OBJECT).map_err(|error| KernelError::Load(Box::new(error)))?;
        let ring = ebpf.take_map(maps::RECORDS).ok_or_else(|| no_such_map(maps::RECORDS))?;
        let ring =
            RingBuf::try_from(ring).map_err(|source| KernelError::Map { map: maps::RECORDS, source })?;
        // SAFETY: the ring owns its descriptor and neither closes nor replaces it before it is dropped.
        let ring = unsafe { AsyncFd::register(ring) }.map_err(|error| KernelError::Ring(error.into()))?;
        let logger = EbpfLogger::init(&mut ebpf).map_err(|error| KernelError::Log(Box::new(error)))?;
        let retired = std::collections::HashMap::new();
        Ok(Self {
            ebpf,
            logger,
            btf,
            types,
            sizes,
            ring,
            attached: Vec::new(),
            probes: Vec::new(),
            retired,
            received: 0,
            is_behind: false,
            absent,
            tap: None,
        })
    }

    /// Writes every entry of the ring to a file as well: its length as a u32, and its bytes. A testing aid; it ends where
    /// something cannot be written.
    pub fn tap(&mut self, file: Option<File>) {
        self.tap = file.map(BufWriter::new);
    }

    /// Members of structures that this kernel lacks: (structure, member).
    #[must_use]
    pub fn absent_members(&self) -> &[(&'static str, &'static str)] {
        &self.absent
    }

    /// Attaches the programs of a phase and says what became of each.
    pub fn attach_phase(&mut self, phase: Phase) -> Vec<Outcome> {
        PROGRAMS
            .iter()
            .filter(|program| program.phase == phase)
            .map(|program| programs::attach(&mut self.ebpf, &self.btf, &self.types, program))
            .collect()
    }

    /// Keeps programs attached until [`Kernel::detach`]; returns the optional ones that are not.
    ///
    /// # Errors
    ///
    /// When a required program is not attached.
    pub fn keep(
        &mut self,
        outcomes: Vec<Outcome>,
    ) -> Result<Vec<(&'static programs::Program, Refusal)>, KernelError> {
        let mut missing = Vec::new();
        for Outcome { program, result } in outcomes {
            match result {
                Ok(attached) => self.attached.push((program, attached)),
                Err(refusal) if program.required => {
                    let (name, lost_without) = (program.name, program.lost_without);
                    return Err(KernelError::Required { name, lost_without, refusal: Box::new(refusal) });
                }
                Err(refusal) => missing.push((program, refusal)),
            }
        }
        Ok(missing)
    }

    /// Attaches the probes of `--pg-probes` to the server's binary, until [`Kernel::detach`].
    ///
    /// # Errors
    ///
    /// When the kernel refuses one.
    pub fn attach_probes(&mut self, postmaster: Pid, points: &ProbePoints) -> Result<(), ProbeError> {
        // The link leads to the very file that the server runs, whatever root or mount namespace it has.
        let binary = format!("/proc/{postmaster}/exe");
        for (program, offset) in [("pgaio_wref_wait", points.wait), ("pgaio_submit", points.submit)] {
            self.probes.push(probes::attach(&mut self.ebpf, program, Path::new(&binary), offset)?);
        }
        Ok(())
    }

    /// Measures what a trap into a probe costs, nanoseconds: see [`probes::trap_ns`].
    ///
    /// # Errors
    ///
    /// When the kernel takes no probe.
    pub fn trap_ns(&mut self) -> Result<f64, ProbeError> {
        probes::trap_ns(&mut self.ebpf)
    }

    /// Forgets which reads were handed over: their handles are gone.
    ///
    /// # Errors
    ///
    /// When the map refuses.
    pub fn forget_staged(&mut self) -> Result<(), KernelError> {
        let mut staged: Array<_, [u8; size_of::<Staged>()]> = self.map_mut(maps::STAGED)?;
        for io_id in 0..staged.len() {
            staged
                .set(io_id, [0; size_of::<Staged>()], 0)
                .map_err(|source| KernelError::Map { map: maps::STAGED, source })?;
        }
        Ok(())
    }

    /// Detaches everything: first what sees reads begin, then the rest. After it no count changes any more, but for
    /// programs that are just running.
    pub fn detach(&mut self) {
        self.attached.retain(|(program, _)| program.phase != Phase::Begins);
        self.probes.clear();
        self.attached.clear();
    }

    /// Says where the cluster's handles are, and whose children join the set.
    ///
    /// # Errors
    ///
    /// When the map refuses.
    pub fn set_cluster(&mut self, cluster: &Cluster) -> Result<(), KernelError> {
        let mut value = [0_u8; size_of::<Cluster>()];
        value.copy_from_slice(cluster.as_bytes());
        let mut map: Array<_, [u8; size_of::<Cluster>()]> = self.map_mut(maps::CLUSTER)?;
        map.set(0, value, 0).map_err(|source| KernelError::Map { map: maps::CLUSTER, source })
    }

    /// Adds a process that was there before the trace. One that the kernel side already knows stays as it is.
    ///
    /// # Errors
    ///
    /// When the set is full.
    pub fn add_process(&mut self, pid: Pid) -> Result<(), KernelError> {
        const NO_EXIST: u64 = 1;
        let mut value = [0_u8; size_of::<Process>()];
        value.copy_from_slice(Process { proc_number: -1, ..Process::default() }.as_bytes());
        let mut set: HashMap<_, u32, [u8; size_of::<Process>()]> = self.map_mut(maps::PROCESSES)?;
        match set.insert(pid.0, value, NO_EXIST) {
            Err(MapError::SyscallError(error)) if error.io_error.kind() == io::ErrorKind::AlreadyExists => {
                Ok(())
            }
            other => other.map_err(|source| KernelError::Map { map: maps::PROCESSES, source }),
        }
    }

    /// Says who has a slot of the server's process array, unless the kernel side has learned it from the owner itself.
    ///
    /// # Errors
    ///
    /// When the map refuses.
    pub fn add_owner(&mut self, proc_number: i32, pid: Pid) -> Result<(), KernelError> {
        let Ok(slot) = u32::try_from(proc_number) else { return Ok(()) };
        let mut owners: Array<_, u32> = self.map_mut(maps::OWNERS)?;
        let refused = |source| KernelError::Map { map: maps::OWNERS, source };
        if owners.get(&slot, 0).map_err(refused)? == 0 {
            owners.set(slot, pid.0, 0).map_err(refused)?;
        }
        Ok(())
    }

    /// Takes a process out again, which ended before its end could be seen.
    ///
    /// # Errors
    ///
    /// When a map refuses.
    pub fn remove_process(&mut self, pid: Pid, proc_number: Option<i32>) -> Result<(), KernelError> {
        let mut set: HashMap<_, u32, [u8; size_of::<Process>()]> = self.map_mut(maps::PROCESSES)?;
        match set.remove(&pid.0) {
            Ok(()) | Err(MapError::KeyNotFound) => {}
            Err(source) => return Err(KernelError::Map { map: maps::PROCESSES, source }),
        }
        let Some(slot) = proc_number.and_then(|number| u32::try_from(number).ok()) else { return Ok(()) };
        let mut owners: Array<_, u32> = self.map_mut(maps::OWNERS)?;
        let refused = |source| KernelError::Map { map: maps::OWNERS, source };
        if owners.get(&slot, 0).map_err(refused)? == pid.0 {
            owners.set(slot, 0, 0).map_err(refused)?;
        }
        Ok(())
    }

    /// Waits until the ring may hold something.
    ///
    /// # Errors
    ///
    /// When the ring cannot be waited for.
    pub async fn readable(&self) -> Result<(), KernelError> {
        self.ring.readable().await.map_err(KernelError::Ring)?.retain_ready();
        Ok(())
    }

    /// Hands over what the ring holds, oldest first, but no more than [`MOST_AT_ONCE`] records: reads may come faster
    /// than they are taken in, and the end of the trace must get its turn.
    pub fn drain(&mut self, mut sink: impl FnMut(Record)) {
        self.logger.flush();
        self.clear_ready();
        for _ in 0..MOST_AT_ONCE {
            let Some(item) = self.ring.get_mut().next() else { return };
            if let Some(tap) = &mut self.tap {
                let length = u32::try_from(item.len()).unwrap_or(0);
                if tap.write_all(&length.to_ne_bytes()).and_then(|()| tap.write_all(&item)).is_err() {
                    self.tap = None;
                }
            }
            if let Some(record) = parse(&item) {
                self.received += u64::from(matches!(record, Record::Read(_)));
                sink(record);
            }
        }
        self.is_behind = true;
    }

    /// Forgets that the ring is readable. It is told anew by what arrives from here on, since readiness is
    /// edge-triggered, so this comes before the ring is emptied.
    fn clear_ready(&mut self) {
        self.is_behind = false;
        let waker = std::task::Waker::noop();
        if let std::task::Poll::Ready(Ok(mut guard)) =
            self.ring.poll_read_ready_mut(&mut std::task::Context::from_waker(waker))
        {
            guard.clear_ready();
        }
    }

    /// Whether the last [`Kernel::drain`] left records in the ring, of which [`Kernel::readable`] would not tell.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// Waits, after [`Kernel::detach`], until the programs that were still running have ended and the ring holds
    /// every record that was counted. Gives up after a tenth of a second; then the totals do not balance.
    ///
    /// # Errors
    ///
    /// When a map refuses.
    pub async fn settle(&mut self, mut sink: impl FnMut(Record)) -> Result<Totals, KernelError> {
        const TRIES: u32 = 100;
        for tries_left in (0..TRIES).rev() {
            self.drain(&mut sink);
            let counts = self.counts()?;
            if !self.is_behind
                && (tries_left == 0 || (counts.balance() && counts.recorded() == self.received))
            {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.totals()
    }

    /// Takes the groups of ended owners out of the kernel's table when it is half full.
    ///
    /// # Errors
    ///
    /// When a map refuses.
    pub fn retire_groups(&mut self, is_alive: impl Fn(Pid) -> bool) -> Result<(), KernelError> {
        let mut map: HashMap<_, [u8; size_of::<GroupKey>()], [u8; size_of::<Group>()]> =
            HashMap::try_from(self.ebpf.map_mut(maps::GROUPS).ok_or_else(|| no_such_map(maps::GROUPS))?)
                .map_err(|source| KernelError::Map { map: maps::GROUPS, source })?;
        let keys: Vec<_> = map.keys().filter_map(Result::ok).collect();
        if keys.len() < self.sizes.crowded_groups() {
            return Ok(());
        }
        for bytes in keys {
            let Ok(key) = GroupKey::read_from_bytes(&bytes) else { continue };
            // Owner 0 is "not known", and goes on counting.
            if key.owner_tgid == 0 || is_alive(Pid(key.owner_tgid)) {
                continue;
            }
            if let Some(group) = map.get(&bytes, 0).ok().and_then(|bytes| Group::read_from_bytes(&bytes).ok())
            {
                // Of ended owners only the sums are kept, so that they need no more room than executors do.
                let folded = GroupKey { owner_tgid: 0, ..key };
                merge(self.retired.entry(folded).or_insert(Group::EMPTY), &group);
            }
            map.remove(&bytes).map_err(|source| KernelError::Map { map: maps::GROUPS, source })?;
        }
        Ok(())
    }

    /// What the kernel has counted so far.
    ///
    /// # Errors
    ///
    /// When a map refuses.
    pub fn counts(&self) -> Result<Counts, KernelError> {
        let mut counts = Counts::default();
        let per_cpu: PerCpuArray<_, u64> = self.map(maps::COUNTERS)?;
        for (index, counter) in (0..).zip(&mut counts.counters) {
            let values =
                per_cpu.get(&index, 0).map_err(|source| KernelError::Map { map: maps::COUNTERS, source })?;
            *counter = values.iter().sum();
        }
        let in_flight = self.entries::<4, { size_of::<pgiotrace_ebpf::Begun>() }>(maps::SYSCALL_READS)?.len()
            + self.entries::<8, { size_of::<pgiotrace_ebpf::Begun>() }>(maps::IO_URING_READS)?.len();
        counts.in_flight = in_flight as u64;
        Ok(counts)
    }

    /// All that the kernel side knows.
    ///
    /// # Errors
    ///
    /// When a map refuses.
    pub fn totals(&self) -> Result<Totals, KernelError> {
        let mut groups = self.retired.clone();
        for (key, group) in self.entries::<{ size_of::<GroupKey>() }, { size_of::<Group>() }>(maps::GROUPS)? {
            if let (Ok(key), Ok(group)) = (GroupKey::read_from_bytes(&key), Group::read_from_bytes(&group)) {
                merge(groups.entry(key).or_insert(Group::EMPTY), &group);
            }
        }
        let devices = self.entries::<4, { size_of::<DeviceGroup>() }>(maps::DEVICES)?;
        let devices = devices.into_iter().filter_map(|(device, group)| {
            Some((u32::from_ne_bytes(device), DeviceGroup::read_from_bytes(&group).ok()?))
        });
        Ok(Totals {
            counts: self.counts()?,
            groups: groups.into_iter().collect(),
            devices: devices.collect(),
            waiting: self.waiting()?,
        })
    }

    fn waiting(&self) -> Result<Vec<WaitRecord>, KernelError> {
        let now_ns = monotonic_ns();
        let processes = self.entries::<4, { size_of::<Process>() }>(maps::PROCESSES)?;
        let waiting = processes.into_iter().filter_map(|(tgid, process)| {
            let process = Process::read_from_bytes(&process).ok()?;
            (process.wait != wait::NONE).then(|| WaitRecord {
                kind: kind::WAIT,
                tgid: u32::from_ne_bytes(tgid),
                start_ns: process.wait_start_ns,
                end_ns: now_ns.max(process.wait_start_ns),
                awaited_generation: process.awaited_generation,
                awaited_io_id: process.awaited_io_id,
                wait: process.wait,
                execution: process.execution,
            })
        });
        Ok(waiting.collect())
    }

    /// Whether every request is told that a read may have waited for, as far as the ring has room: all programs of the
    /// block layer that this needs are attached, and find their way through the kernel's structures.
    #[must_use]
    pub fn traces_requests(&self) -> bool {
        let is_attached = |name: &&str| self.attached.iter().any(|(program, _)| program.name == *name);
        let needed =
            ["block I/O queued", "block request started", "block request issued", "block request completed"];
        let blind = self.absent.iter().any(|(structure, _)| REQUEST_STRUCTURES.contains(structure));
        needed.iter().all(is_attached) && !blind
    }

    /// Run time in nanoseconds and number of runs of all attached programs together; zero runs unless the kernel's
    /// BPF statistics (`kernel.bpf_stats_enabled`) are on.
    #[must_use]
    pub fn run_time(&self) -> (u64, u64) {
        let infos = self.ebpf.programs().filter_map(|(_, program)| program.info().ok());
        infos.fold((0, 0), |(nanos, runs), info| {
            let time = u64::try_from(info.run_time().as_nanos()).unwrap_or(u64::MAX);
            (nanos.saturating_add(time), runs + info.run_count())
        })
    }

    fn entries<const K: usize, const V: usize>(
        &self,
        name: &'static str,
    ) -> Result<Entries<K, V>, KernelError> {
        let map: HashMap<_, [u8; K], [u8; V]> = self.map(name)?;
        Ok(map.iter().filter_map(Result::ok).collect())
    }

    fn map<'a, M>(&'a self, name: &'static str) -> Result<M, KernelError>
    where
        M: TryFrom<&'a aya::maps::Map, Error = MapError>,
    {
        let map = self.ebpf.map(name).ok_or_else(|| no_such_map(name))?;
        M::try_from(map).map_err(|source| KernelError::Map { map: name, source })
    }

    fn map_mut<'a, M>(&'a mut self, name: &'static str) -> Result<M, KernelError>
    where
        M: TryFrom<&'a mut aya::maps::Map, Error = MapError>,
    {
        let map = self.ebpf.map_mut(name).ok_or_else(|| no_such_map(name))?;
        M::try_from(map).map_err(|source| KernelError::Map { map: name, source })
    }
}

/// What a hash map holds, as the kernel's bytes.
type Entries<const K: usize, const V: usize> = Vec<([u8; K], [u8; V])>;

fn no_such_map(map: &'static str) -> KernelError {
    KernelError::Map { map, source: MapError::ElementNotFound }
}

/// Structures that tie a request to the reads that wait for it.
const REQUEST_STRUCTURES: [&str; 7] =
    ["request", "bio", "bio_vec", "block_device", "page", "folio", "address_space"];

/// What the kernel side cannot tell without a structure's members.
#[must_use]
pub fn lost_without_member_of(structure: &str) -> &'static str {
    match structure {
        "task_struct" => {
            "backends that connect during the trace are missing, and files of reads without an I/O handle are not known"
        }
        "io_kiocb" => "reads of the method io_uring are missing",
        "request" | "request_queue" | "gendisk" => "the devices are missing",
        _ if REQUEST_STRUCTURES.contains(&structure) => "where the reads' time went is not known",
        _ => {
            "files of reads without an I/O handle (WAL, temporary files, before PostgreSQL 18 all) are not known"
        }
    }
}

/// Turns a ring entry into a record; an entry of unknown kind or size is none.
fn parse(bytes: &[u8]) -> Option<Record> {
    let (kind, _) = u32::read_from_prefix(bytes).ok()?;
    match kind {
        kind::READ => ReadRecord::read_from_bytes(bytes).ok().map(Record::Read),
        kind::REQUEST => RequestRecord::read_from_bytes(bytes).ok().map(Record::Request),
        kind::MERGE => MergeRecord::read_from_bytes(bytes).ok().map(Record::Merge),
        kind::WAIT => WaitRecord::read_from_bytes(bytes).ok().map(Record::Wait),
        kind::FORK => {
            ProcessRecord::read_from_bytes(bytes).ok().map(|record| Record::Joined(Pid(record.tgid)))
        }
        kind::EXIT => ProcessRecord::read_from_bytes(bytes).ok().map(|record| Record::Left(Pid(record.tgid))),
        _ => None,
    }
}

/// Adds one group to another.
fn merge(into: &mut Group, group: &Group) {
    let Group { completed, failed, bytes, blocks, latency } = group;
    into.completed += completed;
    into.failed += failed;
    into.bytes += bytes;
    into.blocks += blocks;
    into.latency.sum_ns += latency.sum_ns;
    into.latency.max_ns = into.latency.max_ns.max(latency.max_ns);
    for (sum, count) in into.latency.counts.iter_mut().zip(&latency.counts) {
        *sum = sum.saturating_add(*count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_of_unknown_kind_or_wrong_size_is_no_record() {
        assert!(parse(&[]).is_none());
        assert!(parse(&99_u32.to_ne_bytes()).is_none());
        let mut truncated = vec![0_u8; size_of::<ReadRecord>() - 1];
        truncated[0] = 1;
        assert!(parse(&truncated).is_none());
    }
}
