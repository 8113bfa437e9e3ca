//! Finding PostgreSQL's I/O handle from what a system call or an io_uring request carries, and validating it.

use aya_ebpf::helpers::{bpf_probe_read_user, bpf_probe_read_user_buf};
use pgiotrace_ebpf::{Begun, Cluster, Counter, HandleUse, flags, handle};

use crate::{counters::count, maps::STAGED, process};

/// What the caller knows of the I/O; a handle that disagrees is not its handle.
pub struct Expected {
    /// File descriptor.
    pub fd: i32,
    /// Offset in the file; `None` when the caller does not know it.
    pub offset: Option<u64>,
    /// Number of iovecs; `None` when the caller does not know it.
    pub iov_length: Option<u16>,
    /// Bytes; `None` when the caller does not know it.
    pub length: Option<u64>,
}

/// The 144 bytes of a handle, aligned for its u64 members.
#[repr(C, align(8))]
struct Bytes([u8; handle::SIZE]);

impl Bytes {
    #[inline(always)]
    fn u32(&self, at: usize) -> u32 {
        // SAFETY: every offset in `handle` is aligned to its member and ends within SIZE.
        unsafe { *self.0.as_ptr().add(at).cast() }
    }

    #[inline(always)]
    fn u64(&self, at: usize) -> u64 {
        // SAFETY: as above.
        unsafe { *self.0.as_ptr().add(at).cast() }
    }

    #[inline(always)]
    fn u16(&self, at: usize) -> u16 {
        // SAFETY: as above.
        unsafe { *self.0.as_ptr().add(at).cast() }
    }
}

/// The number of the handle at an address, or `None` when no handle starts there.
#[inline(always)]
pub fn io_id_at(cluster: &Cluster, address: u64) -> Option<u32> {
    let distance = address.wrapping_sub(cluster.handles);
    let size = handle::SIZE as u64;
    if cluster.handles == 0
        || distance >= u64::from(cluster.handle_count) * size
        || !distance.is_multiple_of(size)
    {
        return None;
    }
    Some((distance / size) as u32)
}

/// The number of the handle that owns the iovec at an address, or `None` when no handle's first one lies there.
#[inline(always)]
pub fn io_id_of_iovec(cluster: &Cluster, address: u64) -> Option<u32> {
    let distance = address.wrapping_sub(cluster.iovecs);
    let size = handle::IOVEC_SIZE as u64 * u64::from(cluster.iovecs_per_handle);
    let end = u64::from(cluster.iovec_count) * handle::IOVEC_SIZE as u64;
    if cluster.handles == 0 || size == 0 || distance >= end || !distance.is_multiple_of(size) {
        return None;
    }
    Some((distance / size) as u32)
}

/// A validated handle.
pub struct Validated {
    /// What it says.
    pub handle: HandleUse,
    /// Offset in the segment file.
    pub offset: u64,
}

impl Validated {
    /// Fills in what the handle says of a read.
    #[inline(always)]
    pub fn describe(self, begun: &mut Begun, cluster: &Cluster) {
        begun.offset = self.offset;
        if cluster.block_bytes != 0 {
            begun.length = u64::from(self.handle.blocks) * u64::from(cluster.block_bytes);
        }
        begun.handle = self.handle;
        begun.flags |= flags::HANDLE;
    }
}

/// Reads a handle and accepts it only if it describes the very read that the caller sees.
///
/// A handle whose read is being executed is in the state SUBMITTED (`pgaio_io_prepare_submit`,
/// `src/backend/storage/aio/aio.c`), and holds the executing process's own descriptor
/// (`pgaio_io_reopen` in an io worker).
#[inline(always)]
pub fn validate(cluster: &Cluster, io_id: u32, expected: &Expected) -> Option<Validated> {
    let address = cluster.handles + u64::from(io_id) * handle::SIZE as u64;
    let mut bytes = Bytes([0; handle::SIZE]);
    // SAFETY: the helper checks the address itself and fails for what is not resident.
    if unsafe { bpf_probe_read_user_buf(address as *const u8, &mut bytes.0) }.is_err() {
        count(Counter::CandidateUnreadable);
        return None;
    }
    let fits = bytes.0[handle::STATE] == handle::STATE_SUBMITTED
        && bytes.0[handle::OP] == handle::OP_READV
        && bytes.0[handle::TARGET] == handle::TARGET_SMGR
        && bytes.u32(handle::FD) as i32 == expected.fd
        && expected.offset.is_none_or(|offset| bytes.u64(handle::OFFSET) == offset)
        && expected.iov_length.is_none_or(|length| bytes.u16(handle::IOV_LENGTH) == length)
        && expected.length.is_none_or(|length| {
            let block_bytes = u64::from(cluster.block_bytes);
            block_bytes == 0 || u64::from(bytes.u32(handle::NBLOCKS)) * block_bytes == length
        })
        && bytes.u32(handle::IOVEC_OFF) == io_id * cluster.iovecs_per_handle;
    if !fits {
        count(Counter::CandidateRejected);
        return None;
    }
    let handle = HandleUse {
        generation: bytes.u64(handle::GENERATION),
        io_id,
        owner_proc_number: bytes.u32(handle::OWNER_PROCNO) as i32,
        tablespace_oid: bytes.u32(handle::SPC_OID),
        database_oid: bytes.u32(handle::DB_OID),
        relfilenumber: bytes.u32(handle::REL_NUMBER),
        block: bytes.u32(handle::BLOCK_NUM),
        blocks: bytes.u32(handle::NBLOCKS),
        fork: bytes.0[handle::FORK_NUM],
        is_temp: bytes.0[handle::IS_TEMP] & 1,
        flags: bytes.0[handle::FLAGS],
        is_abandoned: u8::from(bytes.u64(handle::RESOWNER) == 0),
    };
    Some(Validated { handle, offset: bytes.u64(handle::OFFSET) })
}

/// The first and the last process that wait for a read that has just been executed; 0: none, or not known.
#[inline(always)]
pub fn waiters(begun: &Begun) -> [u32; 2] {
    let (Some(cluster), true) = (process::cluster(), begun.flags & flags::HANDLE != 0) else { return [0; 2] };
    let address = cluster.handles + u64::from(begun.handle.io_id) * handle::SIZE as u64;
    // SAFETY: the helper checks the address itself.
    let ends = unsafe { bpf_probe_read_user((address + handle::CV_WAKEUP as u64) as *const [i32; 2]) };
    match ends {
        Ok([first, last]) if first >= 0 => [process::owner_of(first), process::owner_of(last)],
        _ => [0; 2],
    }
}

/// When the owner handed a read over to its executor; 0 when that is not known.
#[inline(always)]
pub fn staged_ns(begun: &Begun) -> u64 {
    if begun.flags & flags::HANDLE == 0 {
        return 0;
    }
    match STAGED.get(begun.handle.io_id) {
        Some(staged) if staged.generation == begun.handle.generation => staged.at_ns,
        _ => 0,
    }
}
