//! Which file a read is of, and which file a page belongs to.

use aya_ebpf::helpers::generated::bpf_get_current_task;
use pgiotrace_ebpf::{Begun, FileId, NOT_KNOWN, OFFSET_OF_FILE_POSITION, flags};

use crate::kernel::{
    self, BIO_DONE, BIO_INDEX, BIO_PRIVATE, BIO_VECTOR, DIO_IOCB, DIO_SIZE, FDTABLE_FD, FDTABLE_MAX_FDS,
    FILE_FLAGS, FILE_INODE, FILE_POSITION, FILES_FDT, FOLIO_INDEX, FOLIO_MAPPING, INODE_GENERATION,
    INODE_INO, INODE_MODE, INODE_SB, INODE_SIZE, IOCB_FILE, IOCB_POSITION, MAPPING_HOST, PAGE_BYTES,
    PAGE_COMPOUND_HEAD, PAGE_STRUCT_BYTES, SB_BDEV, SB_DEV, SB_MAGIC, TASK_FILES, VECTOR_OFFSET, VECTOR_PAGE,
};

/// `S_IFMT` and `S_IFREG` (`include/uapi/linux/stat.h`).
const S_IFMT: u16 = 0o170_000;
const S_IFREG: u16 = 0o100_000;
/// `O_DIRECT` (`include/uapi/asm-generic/fcntl.h`; arm64 has a number of its own, `arch/arm64/include/uapi/asm/fcntl.h`).
#[cfg(bpf_target_arch = "x86_64")]
const O_DIRECT: u32 = 0o40_000;
#[cfg(bpf_target_arch = "aarch64")]
const O_DIRECT: u32 = 0o200_000;
/// `BTRFS_SUPER_MAGIC` (`include/uapi/linux/magic.h`): a file system on block devices that names none as its own.
const BTRFS_SUPER_MAGIC: u64 = 0x9123_683e;
/// Bytes of a `struct bio_vec` (`include/linux/bvec.h`): a pointer and two u32.
const VECTOR_BYTES: u64 = 16;
/// Set in `page.compound_head` of a page that is not a folio's first (`include/linux/page-flags.h`).
const TAIL: u64 = 1;
/// Set in `folio.mapping` when it is no file's (`FOLIO_MAPPING_FLAGS`, before 6.16 `PAGE_MAPPING_FLAGS`, same header).
const NO_FILE: u64 = 3;

/// Where a page's bytes are in a file.
pub struct Place {
    /// Address of the `struct inode`.
    pub inode: u64,
    /// Offset in the file.
    pub offset: u64,
}

/// Adds the file of the current thread's descriptor, and says whether it is a regular one; `None` when the kernel's
/// structures cannot be read.
#[inline(always)]
pub fn describe(begun: &mut Begun) -> Option<bool> {
    // SAFETY: a helper without preconditions.
    let task = unsafe { bpf_get_current_task() };
    let table: u64 = FILES_FDT.read(TASK_FILES.read(task)?)?;
    let size: u32 = FDTABLE_MAX_FDS.read(table)?;
    if begun.fd as u32 >= size {
        // No descriptor: the call will say so.
        return Some(false);
    }
    let files: u64 = FDTABLE_FD.read(table)?;
    let file: u64 = kernel::read(files + u64::from(begun.fd as u32) * 8)?;
    if file == 0 {
        return Some(false);
    }
    let inode: u64 = FILE_INODE.read(file)?;
    if !is_regular(inode)? {
        return Some(false);
    }
    let super_block = INODE_SB.read(inode)?;
    begun.file = id_of(inode, super_block)?;
    begun.position = match begun.offset {
        OFFSET_OF_FILE_POSITION => FILE_POSITION.read(file).unwrap_or(NOT_KNOWN),
        offset => offset,
    };
    if FILE_FLAGS.read::<u32>(file)? & O_DIRECT != 0 {
        begun.flags |= flags::DIRECT;
    }
    if !is_on_device(super_block)? {
        begun.flags |= flags::NO_DEVICE;
    }
    Some(true)
}

/// Whether an inode is a regular file's.
#[inline(always)]
fn is_regular(inode: u64) -> Option<bool> {
    Some(INODE_MODE.read::<u16>(inode)? & S_IFMT == S_IFREG)
}

/// Whether a file system is on a block device. Shared memory is not (tmpfs, hugetlbfs), and shared buffers are where direct
/// reads of PostgreSQL go to.
#[inline(always)]
fn is_on_device(super_block: u64) -> Option<bool> {
    Some(SB_BDEV.read::<u64>(super_block)? != 0 || SB_MAGIC.read::<u64>(super_block)? == BTRFS_SUPER_MAGIC)
}

/// The file of an inode; `None` when it is no regular one on a block device.
#[inline(always)]
pub fn on_device(inode: u64) -> Option<FileId> {
    let super_block = INODE_SB.read(inode)?;
    if is_regular(inode)? && is_on_device(super_block)? { id_of(inode, super_block) } else { None }
}

#[inline(always)]
fn id_of(inode: u64, super_block: u64) -> Option<FileId> {
    Some(FileId {
        inode: INODE_INO.read(inode)?,
        device: SB_DEV.read(super_block)?,
        generation: INODE_GENERATION.read(inode)?,
    })
}

/// Where the first byte is that a bio has still to transfer; `None` when its page is of no file (direct I/O).
///
/// The file's offset is that of the folio, and how far into it the page is: a tail page points to the folio's first.
#[inline(always)]
pub fn place_of(bio: u64) -> Option<Place> {
    let index: u32 = BIO_INDEX.read(bio)?;
    let vector = BIO_VECTOR.read::<u64>(bio)? + u64::from(index) * VECTOR_BYTES;
    let page: u64 = VECTOR_PAGE.read(vector)?;
    let within = u64::from(VECTOR_OFFSET.read::<u32>(vector)?) + u64::from(BIO_DONE.read::<u32>(bio)?);
    let compound: u64 = PAGE_COMPOUND_HEAD.read(page)?;
    let head = if compound & TAIL != 0 { compound - TAIL } else { page };
    let mapping: u64 = FOLIO_MAPPING.read(head)?;
    // Loaded once, so that the compiler sees that nothing is divided by 0.
    let page_struct_bytes = PAGE_STRUCT_BYTES.get();
    if mapping == 0 || mapping & NO_FILE != 0 || page_struct_bytes == 0 {
        return None;
    }
    let pages = (page - head) / page_struct_bytes;
    let offset = (FOLIO_INDEX.read::<u64>(head)? + pages) * PAGE_BYTES.get() + within;
    Some(Place { inode: MAPPING_HOST.read(mapping)?, offset })
}

/// The direct read that a bio is for, and where in the file it began: on its bios hangs a `struct iomap_dio`
/// (`iomap_dio_alloc_bio` and its callers, `fs/iomap/direct-io.c`), or the bio that it was split from.
///
/// What hangs there is believed only if all it leads to fits: a regular file on a disk, whose size is the one that was noted when
/// the read began (`__iomap_dio_rw`).
#[inline(always)]
pub fn direct_read_of(bio: u64) -> Option<(FileId, u64)> {
    let private: u64 = BIO_PRIVATE.read(bio)?;
    read_of_dio(private).or_else(|| read_of_dio(BIO_PRIVATE.read(private)?))
}

#[inline(always)]
fn read_of_dio(dio: u64) -> Option<(FileId, u64)> {
    let iocb: u64 = DIO_IOCB.read(dio)?;
    let inode: u64 = FILE_INODE.read(IOCB_FILE.read(iocb)?)?;
    let file = on_device(inode)?;
    let fits = INODE_SIZE.read::<u64>(inode)? == DIO_SIZE.read::<u64>(dio)?;
    fits.then_some((file, IOCB_POSITION.read(iocb)?))
}
