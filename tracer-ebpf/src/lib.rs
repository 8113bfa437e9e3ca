//! What the kernel side and userspace agree on: records, map values, counters, and the layout of PostgreSQL's
//! I/O handle.
//!
//! Compiled for both sides. Every type is `repr(C)` without hidden padding, and its size is asserted.

#![no_std]

pub mod handle;
mod histogram;

pub use histogram::{BUCKETS, Histogram, bucket_bounds, bucket_of};

/// Names of the maps in the kernel object.
pub mod maps {
    /// [`super::Cluster`], one entry.
    pub const CLUSTER: &str = "CLUSTER";
    /// TGID → [`super::Process`]: the processes of the traced cluster.
    pub const PROCESSES: &str = "PROCESSES";
    /// `MyProcNumber` → TGID.
    pub const OWNERS: &str = "OWNERS";
    /// Thread → [`super::Begun`]: reads inside a system call.
    pub const SYSCALL_READS: &str = "SYSCALL_READS";
    /// `io_kiocb` address → [`super::Begun`]: reads inside io_uring.
    pub const IO_URING_READS: &str = "IO_URING_READS";
    /// `request` address → [`super::Request`]: requests inside the block layer.
    pub const REQUESTS: &str = "REQUESTS";
    /// Thread → when it last gave a bio to the block layer, `CLOCK_MONOTONIC` nanoseconds.
    pub const QUEUED: &str = "QUEUED";
    /// `bio` address → [`super::Chain`]: the parts of what was too long for one request.
    pub const CHAINS: &str = "CHAINS";
    /// [`super::GroupKey`] → [`super::Group`]: counts and latencies per owner, executor and method.
    pub const GROUPS: &str = "GROUPS";
    /// Device number → [`super::DeviceGroup`].
    pub const DEVICES: &str = "DEVICES";
    /// [`super::Counter`] → u64, per CPU.
    pub const COUNTERS: &str = "COUNTERS";
    /// Number of the handle → [`super::Staged`]: batches that owners have submitted. Filled with `--pg-probes` only.
    pub const STAGED: &str = "STAGED";
    /// Ring buffer of records, each of which begins with its [`super::kind`].
    pub const RECORDS: &str = "RECORDS";
}

/// Offsets in the running kernel's structures, filled in from its BTF when the object is loaded.
pub mod globals {
    /// What a member's offset is when the running kernel has no such member.
    pub const ABSENT: u32 = u32::MAX;

    /// (global in the kernel object, structure, path of members) of every offset that the kernel side needs.
    pub const OFFSETS: [(&str, &str, &str); 49] = [
        ("TASK_TGID", "task_struct", "tgid"),
        ("TASK_FILES", "task_struct", "files"),
        ("FILES_FDT", "files_struct", "fdt"),
        ("FDTABLE_MAX_FDS", "fdtable", "max_fds"),
        ("FDTABLE_FD", "fdtable", "fd"),
        ("FILE_INODE", "file", "f_inode"),
        ("INODE_MODE", "inode", "i_mode"),
        ("INODE_INO", "inode", "i_ino"),
        ("INODE_GENERATION", "inode", "i_generation"),
        ("INODE_SB", "inode", "i_sb"),
        ("INODE_SIZE", "inode", "i_size"),
        ("SB_DEV", "super_block", "s_dev"),
        ("SB_MAGIC", "super_block", "s_magic"),
        ("SB_BDEV", "super_block", "s_bdev"),
        ("KIOCB_OPCODE", "io_kiocb", "opcode"),
        ("KIOCB_USER_DATA", "io_kiocb", "cqe.user_data"),
        ("KIOCB_FD", "io_kiocb", "cqe.fd"),
        ("REQUEST_CMD_FLAGS", "request", "cmd_flags"),
        ("REQUEST_DATA_LEN", "request", "__data_len"),
        ("REQUEST_QUEUE", "request", "q"),
        ("QUEUE_DISK", "request_queue", "disk"),
        ("DISK_MAJOR", "gendisk", "major"),
        ("DISK_FIRST_MINOR", "gendisk", "first_minor"),
        ("TASK_FLAGS", "task_struct", "flags"),
        ("TASK_RUN_DELAY", "task_struct", "sched_info.run_delay"),
        ("FILE_FLAGS", "file", "f_flags"),
        ("FILE_POSITION", "file", "f_pos"),
        ("REQUEST_SECTOR", "request", "__sector"),
        ("REQUEST_BIO", "request", "bio"),
        ("REQUEST_BIOTAIL", "request", "biotail"),
        ("BIO_BDEV", "bio", "bi_bdev"),
        ("BIO_FLAGS", "bio", "bi_opf"),
        ("BIO_PRIVATE", "bio", "bi_private"),
        ("BIO_SECTOR", "bio", "bi_iter.bi_sector"),
        ("BIO_SIZE", "bio", "bi_iter.bi_size"),
        ("BIO_INDEX", "bio", "bi_iter.bi_idx"),
        ("BIO_DONE", "bio", "bi_iter.bi_bvec_done"),
        ("BIO_VECTOR", "bio", "bi_io_vec"),
        ("BDEV_DISK", "block_device", "bd_disk"),
        ("VECTOR_PAGE", "bio_vec", "bv_page"),
        ("VECTOR_OFFSET", "bio_vec", "bv_offset"),
        ("PAGE_COMPOUND_HEAD", "page", "compound_head"),
        ("FOLIO_MAPPING", "folio", "mapping"),
        ("FOLIO_INDEX", "folio", "index"),
        ("MAPPING_HOST", "address_space", "host"),
        ("DIO_IOCB", "iomap_dio", "iocb"),
        ("DIO_SIZE", "iomap_dio", "i_size"),
        ("IOCB_FILE", "kiocb", "ki_filp"),
        ("IOCB_POSITION", "kiocb", "ki_pos"),
    ];

    /// Global: bytes of a `struct page`.
    pub const PAGE_STRUCT_BYTES: &str = "PAGE_STRUCT_BYTES";
    /// Global: bytes of a page of memory.
    pub const PAGE_BYTES: &str = "PAGE_BYTES";
}

/// A time that is not known.
pub const NOT_KNOWN: u64 = u64::MAX;

/// Bytes of a sector, as the block layer counts (`SECTOR_SHIFT`, `include/linux/blk_types.h`).
pub const SECTOR_BYTES: u64 = 512;

/// [`Begun::offset`] of a call that names none (`read`, `readv`).
pub const OFFSET_OF_FILE_POSITION: u64 = u64::MAX;

/// Where the traced cluster keeps its I/O handles. Userspace rewrites it when shared memory is new.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// Address of the first `PgAioHandle`; 0: do not look for handles.
    pub handles: u64,
    /// Address of the first `struct iovec` of the handles.
    pub iovecs: u64,
    /// Address of the variable `MyProcNumber` in every process of the cluster; 0: not known.
    pub my_proc_number: u64,
    /// Address of the variable `MyBEEntry` in every process of the cluster; 0: queries are not looked for.
    pub my_be_entry: u64,
    /// Number of handles.
    pub handle_count: u32,
    /// Number of iovecs.
    pub iovec_count: u32,
    /// Consecutive iovecs that each handle owns (`io_max_combine_limit`).
    pub iovecs_per_handle: u32,
    /// TGID of the postmaster; processes that it forks join the set.
    pub postmaster_tgid: u32,
    /// Bytes of a block (`BLCKSZ`); 0: not known.
    pub block_bytes: u32,
    /// Explicit padding.
    pub reserved: u32,
}

/// A process of the cluster.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// Its `MyProcNumber`, -1 until it has one.
    pub proc_number: i32,
    /// [`wait`]: the system call that it is inside of, if that is one which may wait.
    pub wait: u32,
    /// When that call began, `CLOCK_MONOTONIC` nanoseconds.
    pub wait_start_ns: u64,
    /// The `io_kiocb` that its `io_uring_enter` is submitting; 0: none.
    pub submitting: u64,
    /// The use of a handle for which it waits, as `pgaio_wref_wait` said last: known with `--pg-probes` only.
    pub awaited_generation: u64,
    /// Number of that handle.
    pub awaited_io_id: u32,
    /// Explicit padding.
    pub reserved: u32,
    /// Address of its [`status`] in shared memory; 0 until it has one.
    pub status: u64,
    /// What it was executing when [`Process::wait`] began.
    pub execution: Execution,
}

/// One execution of a query, as a process says of itself in shared memory.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Execution {
    /// `st_activity_start_timestamp`: microseconds since 2000-01-01 00:00 UTC; 0: not known, or none.
    pub started_us: i64,
    /// `st_query_id`; 0: not computed (yet).
    pub query_id: i64,
}

/// Layout of what a process says of itself, `struct PgBackendStatus` (`src/include/utils/backend_status.h`), on 64-bit
/// machines: the same in PostgreSQL 14 to 19.
pub mod status {
    /// `st_procpid`, i32: 0 until the entry is the process's (`pgstat_bestart`), whoever had it before.
    pub const PROCESS: u64 = 4;
    /// `st_activity_start_timestamp`, a `TimestampTz`.
    pub const ACTIVITY_START: u64 = 32;
    /// `st_query_id`, 64 bits.
    pub const QUERY_ID: u64 = 424;
}

/// System calls in which a process may wait: [`Process::wait`], [`WaitRecord::wait`].
pub mod wait {
    /// None.
    pub const NONE: u32 = 0;
    /// `epoll_wait` and its relatives: a latch, a client, a condition variable.
    pub const EPOLL: u32 = 1;
    /// `io_uring_enter`: it submits, or waits for completions, or both.
    pub const IO_URING: u32 = 2;
}

/// When the owner of a handle's use handed it to the executor ([`maps::STAGED`]).
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Staged {
    /// `PgAioHandle.generation`.
    pub generation: u64,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub at_ns: u64,
}

/// A file, told from all others that there are or were.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId {
    /// Inode number; 0: not known.
    pub inode: u64,
    /// `super_block.s_dev` of the inode (kernel encoding: major << 20 | minor).
    pub device: u32,
    /// `inode.i_generation`, so that a reused inode number is not mistaken for the old file.
    pub generation: u32,
}

/// A read, told from all others: who began it, and when.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReadKey {
    /// [`Begun::start_ns`]; 0: no read.
    pub start_ns: u64,
    /// Thread that began it.
    pub tid: u32,
    /// Explicit padding.
    pub reserved: u32,
}

/// One use of an I/O handle, as read from the handle while its read was being executed.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandleUse {
    /// `PgAioHandle.generation`.
    pub generation: u64,
    /// Number of the handle.
    pub io_id: u32,
    /// `PgAioHandle.owner_procno`.
    pub owner_proc_number: i32,
    /// Tablespace.
    pub tablespace_oid: u32,
    /// Database; 0 for shared relations.
    pub database_oid: u32,
    /// `relNumber`.
    pub relfilenumber: u32,
    /// First block, counted from the start of the relation.
    pub block: u32,
    /// Number of blocks.
    pub blocks: u32,
    /// Fork number.
    pub fork: u8,
    /// 1: a temporary relation.
    pub is_temp: u8,
    /// `PgAioHandle.flags`.
    pub flags: u8,
    /// 1: its owner had let go of it before it was executed (the query failed): `PgAioHandle.resowner` is null.
    pub is_abandoned: u8,
}

/// A read that has begun.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Begun {
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub start_ns: u64,
    /// Offset asked for; [`OFFSET_OF_FILE_POSITION`] when the call names none.
    pub offset: u64,
    /// Bytes asked for; 0 when only the result tells.
    pub length: u64,
    /// Its file.
    pub file: FileId,
    /// Where in the file it begins: [`Begun::offset`], or the file's position; [`NOT_KNOWN`] where that cannot be told.
    pub position: u64,
    /// When its owner handed it over ([`Staged`]); 0: not known.
    pub staged_ns: u64,
    /// How long the thread that began it had ever been ready to run without a processor (`sched_info.run_delay`).
    pub run_delay_ns: u64,
    /// File descriptor in the executing process; -1 when not known.
    pub fd: i32,
    /// TGID that called the kernel: the executor of a system call, the submitter of an io_uring request.
    pub caller_tgid: u32,
    /// TGID of the owner; 0 when not known.
    pub owner_tgid: u32,
    /// Bits of [`flags`].
    pub flags: u32,
    /// Valid when [`flags::HANDLE`] is set.
    pub handle: HandleUse,
    /// What the owner was executing, where it was the owner who began the read.
    pub execution: Execution,
}

/// Bits of [`Begun::flags`].
pub mod flags {
    /// A handle was found and validated.
    pub const HANDLE: u32 = 1;
    /// A candidate for a handle was found and failed validation.
    pub const HANDLE_REJECTED: u32 = 2;
    /// Submitted through io_uring.
    pub const IO_URING: u32 = 4;
    /// Handed to an io-wq thread.
    pub const PUNTED: u32 = 8;
    /// The file is open for direct I/O.
    pub const DIRECT: u32 = 16;
    /// The file's own file system is on no block device: overlayfs, a network file system, FUSE. Which requests its reads wait for
    /// cannot be told.
    pub const NO_DEVICE: u32 = 32;
    /// [`super::Begun::execution`] was read.
    pub const EXECUTION: u32 = 64;
}

/// Bits of [`RequestRecord::flags`].
pub mod request_flags {
    /// A kernel thread queued it: the block layer, or a device above this one, had held it back.
    pub const HELD: u32 = 1;
    /// A process of the cluster queued it.
    pub const CLUSTER: u32 = 2;
    /// More parts of the same request follow.
    pub const PART: u32 = 8;
    /// It is for a direct read of the file that is named, which began at the offset that is named.
    pub const DIRECT: u32 = 16;
}

/// Kind of a record in the ring: the first four bytes of each.
pub mod kind {
    /// [`super::ReadRecord`].
    pub const READ: u32 = 1;
    /// [`super::ProcessRecord`]: a process joined the cluster.
    pub const FORK: u32 = 2;
    /// [`super::ProcessRecord`]: a process of the cluster ended.
    pub const EXIT: u32 = 3;
    /// [`super::RequestRecord`].
    pub const REQUEST: u32 = 4;
    /// [`super::MergeRecord`].
    pub const MERGE: u32 = 5;
    /// [`super::WaitRecord`].
    pub const WAIT: u32 = 6;
}

/// A read that has ended.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadRecord {
    /// [`kind::READ`].
    pub kind: u32,
    /// TGID of the process in whose context it was executed.
    pub executor_tgid: u32,
    /// Thread of that process; 0 when an io-wq thread executed it and which one is not known.
    pub executor_tid: u32,
    /// Explicit padding.
    pub reserved: u32,
    /// How long the executing thread was ready to run during the read, but had no processor; [`NOT_KNOWN`] where
    /// that cannot be told.
    pub run_delay_ns: u64,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub end_ns: u64,
    /// Bytes, or a negative errno.
    pub result: i64,
    /// TGIDs of the first and the last process that waited for the read when it ended, as the handle's condition variable
    /// lists them; 0: none, or not known.
    pub waiter_tgids: [u32; 2],
    /// How it began.
    pub begun: Begun,
}

/// A process joined or left the cluster.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessRecord {
    /// [`kind::FORK`] or [`kind::EXIT`].
    pub kind: u32,
    /// Its TGID.
    pub tgid: u32,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub at_ns: u64,
}

/// How a read was executed.
pub mod method {
    /// By its owner, in a read system call.
    pub const SYNC: u32 = 0;
    /// By another process of the cluster.
    pub const WORKER: u32 = 1;
    /// Through io_uring.
    pub const IO_URING: u32 = 2;
}

/// Reads of one owner, executed by one process, in one way.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GroupKey {
    /// Owner; 0 when not known.
    pub owner_tgid: u32,
    /// Executor.
    pub executor_tgid: u32,
    /// One of [`method`].
    pub method: u32,
}

/// Counts and latencies of a group, complete even when the ring was full.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Reads that ended well.
    pub completed: u64,
    /// Reads that ended with an error.
    pub failed: u64,
    /// Bytes returned.
    pub bytes: u64,
    /// Blocks of relations, from handles.
    pub blocks: u64,
    /// Latencies.
    pub latency: Histogram,
}

impl Group {
    /// Nothing yet.
    pub const EMPTY: Self = Self { completed: 0, failed: 0, bytes: 0, blocks: 0, latency: Histogram::EMPTY };
}

/// A bio that was split: whoever waits for its pages gets them when its last part has completed (`bio_chain`,
/// `block/bio.c`).
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// When it was split first, `CLOCK_MONOTONIC` nanoseconds: its identity.
    pub id: u64,
    /// First sector of its parts.
    pub sector: u64,
    /// The sector after the last.
    pub end_sector: u64,
}

/// A read request inside the block layer.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Queued (given to the block layer), `CLOCK_MONOTONIC` nanoseconds; 0: not seen.
    pub queued_ns: u64,
    /// Issued to the driver; 0: not yet.
    pub issued_ns: u64,
    /// Bytes completed so far: a request may complete in parts.
    pub done_bytes: u64,
    /// First sector (of 512 bytes) on the disk.
    pub sector: u64,
    /// The read in whose course it was queued.
    pub read: ReadKey,
    /// [`Begun::position`] of this read.
    pub asked_offset: u64,
    /// Bytes that it asks for.
    pub asked_length: u64,
    /// File that the first page belongs to; all 0: no page of a file (direct I/O).
    pub file: FileId,
    /// Offset in that file.
    pub offset: u64,
    /// [`Chain::id`] of the bio that it is a part of; 0: it is all of its bios.
    pub chain: u64,
    /// Bytes of the file from there on.
    pub file_bytes: u32,
    /// Disk (kernel encoding: major << 20 | minor).
    pub device: u32,
    /// TGID that queued it.
    pub submitter_tgid: u32,
    /// Bits of [`request_flags`].
    pub flags: u32,
}

/// A read request that a device has completed, or a part of one.
///
/// There is one for every request that a process of the cluster queued, and for every other one whose pages belong to
/// a file: a read may wait for what somebody else has asked for.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestRecord {
    /// [`kind::REQUEST`].
    pub kind: u32,
    /// Bytes of this part.
    pub bytes: u32,
    /// Completed, `CLOCK_MONOTONIC` nanoseconds.
    pub done_ns: u64,
    /// Where this part begins, counted from the start of the request, bytes.
    pub start: u64,
    /// What is known of the request.
    pub request: Request,
}

/// In the course of a read, pages that are not of its file were merged into a request that there was already.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MergeRecord {
    /// [`kind::MERGE`].
    pub kind: u32,
    /// Disk (kernel encoding: major << 20 | minor).
    pub device: u32,
    /// First sector (of 512 bytes).
    pub sector: u64,
    /// Merged, `CLOCK_MONOTONIC` nanoseconds.
    pub at_ns: u64,
    /// The read.
    pub read: ReadKey,
}

/// A process of the cluster was inside a system call in which it may have waited.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitRecord {
    /// [`kind::WAIT`].
    pub kind: u32,
    /// The process.
    pub tgid: u32,
    /// Start, `CLOCK_MONOTONIC` nanoseconds.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
    /// [`Process::awaited_generation`].
    pub awaited_generation: u64,
    /// [`Process::awaited_io_id`].
    pub awaited_io_id: u32,
    /// One of [`wait`].
    pub wait: u32,
    /// [`Process::execution`].
    pub execution: Execution,
}

/// Read requests of one device.
#[repr(C)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceGroup {
    /// Completed requests, whoever wanted them.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Of the requests: those that processes of the cluster queued.
    pub cluster_requests: u64,
    /// Their bytes.
    pub cluster_bytes: u64,
    /// Of the requests: those that kernel threads queued, for whom is not known here.
    pub held_requests: u64,
    /// Their bytes.
    pub held_bytes: u64,
    /// How often a request was issued again, because the driver had given it back.
    pub requeues: u64,
    /// Requests that are issued and not completed.
    pub depth: u64,
    /// Most requests that were so at once; of two new maxima at the same moment the smaller may be kept.
    pub most_depth: u64,
    /// Queued to issued.
    pub queue: Histogram,
    /// Issued to completed.
    pub service: Histogram,
    /// Bytes of the requests, in place of nanoseconds.
    pub sizes: Histogram,
}

impl DeviceGroup {
    /// Nothing yet.
    pub const EMPTY: Self = Self {
        requests: 0,
        bytes: 0,
        cluster_requests: 0,
        cluster_bytes: 0,
        held_requests: 0,
        held_bytes: 0,
        requeues: 0,
        depth: 0,
        most_depth: 0,
        queue: Histogram::EMPTY,
        service: Histogram::EMPTY,
        sizes: Histogram::EMPTY,
    };
}

/// Indexes of the counters that the kernel side keeps per CPU.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    /// Reads seen to begin.
    Begun = 0,
    /// Reads that ended well.
    Completed = 1,
    /// Reads that ended with an error.
    Failed = 2,
    /// Reads that ended well, whose record the ring had no room for.
    RingFull = 3,
    /// Reads that began, but could not be followed because a table was full.
    TableFull = 4,
    /// Reads that ended, but are in no group because the table of groups was full.
    GroupsFull = 5,
    /// Candidates for a handle that failed validation.
    CandidateRejected = 6,
    /// Candidates for a handle whose memory could not be read.
    CandidateUnreadable = 7,
    /// Process records that the ring had no room for.
    ProcessRecordLost = 8,
    /// Processes that the set had no room for.
    ProcessesFull = 9,
    /// Reads that failed, whose record the ring had no room for.
    FailedRingFull = 10,
    /// Reads whose file could not be told, because the kernel's structures could not be read.
    FileUnreadable = 11,
    /// Requests or devices that their tables had no room for.
    RequestsFull = 12,
    /// Request or merge records that the ring had no room for.
    RequestRecordLost = 13,
    /// Wait records that the ring had no room for.
    WaitRecordLost = 14,
    /// Traps into the probes of `--pg-probes`.
    ProbeTraps = 15,
    /// Requests of several files, or of several places in one, of which only the first is known.
    Mixed = 16,
    /// Parts of split bios that their table had no room for.
    ChainsFull = 17,
}

/// Number of counters.
pub const COUNTER_COUNT: u32 = 18;

const _: () = {
    assert!(size_of::<Cluster>() == 56);
    assert!(size_of::<Process>() == 64);
    assert!(size_of::<Execution>() == 16);
    assert!(size_of::<Staged>() == 16);
    assert!(size_of::<FileId>() == 16);
    assert!(size_of::<ReadKey>() == 16);
    assert!(size_of::<HandleUse>() == 40);
    assert!(size_of::<Begun>() == 136);
    assert!(size_of::<ReadRecord>() == 184);
    assert!(size_of::<ProcessRecord>() == 16);
    assert!(size_of::<GroupKey>() == 12);
    assert!(size_of::<Chain>() == 24);
    assert!(size_of::<Request>() == 112);
    assert!(size_of::<RequestRecord>() == 136);
    assert!(size_of::<MergeRecord>() == 40);
    assert!(size_of::<WaitRecord>() == 56);
    assert!(size_of::<Histogram>() == 16 + 4 * BUCKETS);
    assert!(size_of::<Group>() == 32 + size_of::<Histogram>());
    assert!(size_of::<DeviceGroup>() == 72 + 3 * size_of::<Histogram>());
};
