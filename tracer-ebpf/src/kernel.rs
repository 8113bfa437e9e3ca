//! Access to tracepoint arguments and to the running kernel's structures.

use core::ffi::c_void;

use aya_ebpf::{
    EbpfContext, Global,
    helpers::bpf_probe_read_kernel,
    programs::{BtfTracePointContext, RawTracePointContext},
};
use pgiotrace_ebpf::globals::ABSENT;

/// Arguments of a tracepoint, however the program is attached.
pub enum Args {
    /// Attached as a BTF tracepoint.
    Btf(BtfTracePointContext),
    /// Attached as a raw tracepoint.
    Raw(RawTracePointContext),
}

impl Args {
    /// The `n`th argument of the tracepoint's `TP_PROTO`.
    #[inline(always)]
    pub fn get(&self, n: usize) -> u64 {
        match self {
            Self::Btf(ctx) => ctx.arg(n),
            Self::Raw(ctx) => ctx.arg(n),
        }
    }
}

impl EbpfContext for Args {
    fn as_ptr(&self) -> *mut c_void {
        match self {
            Self::Btf(ctx) => ctx.as_ptr(),
            Self::Raw(ctx) => ctx.as_ptr(),
        }
    }
}

/// Offset of a structure's member, resolved by userspace from the running kernel's BTF.
pub struct Offset(Global<u32>);

impl Offset {
    /// Not resolved yet.
    pub const fn unresolved() -> Self {
        Self(Global::new(ABSENT))
    }

    /// Reads the member of type `T` of the structure at `base`; `None` where the kernel has no such member or
    /// the memory cannot be read.
    #[inline(always)]
    pub fn read<T>(&self, base: u64) -> Option<T> {
        let offset = self.0.load();
        if offset == ABSENT {
            return None;
        }
        read(base + u64::from(offset))
    }
}

/// Reads kernel memory.
#[inline(always)]
pub fn read<T>(address: u64) -> Option<T> {
    // SAFETY: the helper checks the address itself and fails for what is not mapped.
    unsafe { bpf_probe_read_kernel(address as *const T) }.ok()
}

/// What userspace knows of the running kernel beside offsets.
pub struct Setting(Global<u32>);

impl Setting {
    const fn unset() -> Self {
        Self(Global::new(0))
    }

    /// Its value; 0 when userspace could not tell.
    #[inline(always)]
    pub fn get(&self) -> u64 {
        u64::from(self.0.load())
    }
}

#[unsafe(no_mangle)]
pub static PAGE_STRUCT_BYTES: Setting = Setting::unset();
#[unsafe(no_mangle)]
pub static PAGE_BYTES: Setting = Setting::unset();

macro_rules! offsets {
    ($($name:ident),* $(,)?) => {
        $(#[unsafe(no_mangle)] pub static $name: Offset = Offset::unresolved();)*
    };
}

offsets! {
    TASK_TGID, TASK_FILES, FILES_FDT, FDTABLE_MAX_FDS, FDTABLE_FD, FILE_INODE,
    INODE_MODE, INODE_INO, INODE_GENERATION, INODE_SB, SB_DEV, SB_MAGIC, SB_BDEV,
    KIOCB_OPCODE, KIOCB_USER_DATA, KIOCB_FD,
    REQUEST_CMD_FLAGS, REQUEST_DATA_LEN, REQUEST_QUEUE, QUEUE_DISK, DISK_MAJOR, DISK_FIRST_MINOR,
    TASK_FLAGS, TASK_RUN_DELAY, FILE_FLAGS, FILE_POSITION,
    REQUEST_SECTOR, REQUEST_BIO, REQUEST_BIOTAIL,
    BIO_BDEV, BIO_FLAGS, BIO_PRIVATE, BIO_SECTOR, BIO_SIZE, BIO_INDEX, BIO_DONE, BIO_VECTOR, BDEV_DISK,
    VECTOR_PAGE, VECTOR_OFFSET, PAGE_COMPOUND_HEAD, FOLIO_MAPPING, FOLIO_INDEX, MAPPING_HOST,
    INODE_SIZE, DIO_IOCB, DIO_SIZE, IOCB_FILE, IOCB_POSITION,
}
