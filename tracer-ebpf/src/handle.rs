//! Layout of PostgreSQL's I/O handle, `struct PgAioHandle` (`src/include/storage/aio_internal.h`), on 64-bit
//! machines. The same in 18.0 to 18.6 and in 19 (beta 3).
//!
//! Every offset is in bytes from the start of the handle. Which server versions have this layout stands in one
//! table, in the tracer's `server::aio`.

/// `sizeof(PgAioHandle)`.
pub const SIZE: usize = 144;

/// `state`, u8, an `enum PgAioHandleState`.
pub const STATE: usize = 0;
/// `target`, u8, an `enum PgAioTargetID`.
pub const TARGET: usize = 1;
/// `op`, u8, an `enum PgAioOp`.
pub const OP: usize = 2;
/// `flags`, u8, bits of `enum PgAioHandleFlags`.
pub const FLAGS: usize = 3;
/// `owner_procno`, i32: the backend that wanted the I/O.
pub const OWNER_PROCNO: usize = 16;
/// `resowner`, a pointer: null once the owner has let go of the handle (`pgaio_io_release_resowner`, `aio.c`).
pub const RESOWNER: usize = 40;
/// `generation`, u64: `(io_id, generation)` names one use.
pub const GENERATION: usize = 64;
/// `cv.wakeup`, a `proclist_head` (`src/include/storage/proclist_types.h`): i32 numbers of the first and the last process
/// that waits, negative when none does.
pub const CV_WAKEUP: usize = 76;
/// `iovec_off`, u32: index of the handle's first iovec.
pub const IOVEC_OFF: usize = 92;
/// `op_data.read.fd`, i32.
pub const FD: usize = 104;
/// `op_data.read.iov_length`, u16: number of iovecs.
pub const IOV_LENGTH: usize = 108;
/// `op_data.read.offset`, u64: bytes within the segment file.
pub const OFFSET: usize = 112;
/// `target_data.smgr.rlocator.spcOid`, u32.
pub const SPC_OID: usize = 120;
/// `target_data.smgr.rlocator.dbOid`, u32.
pub const DB_OID: usize = 124;
/// `target_data.smgr.rlocator.relNumber`, u32.
pub const REL_NUMBER: usize = 128;
/// `target_data.smgr.blockNum`, u32: first block, counted from the start of the relation.
pub const BLOCK_NUM: usize = 132;
/// `target_data.smgr.nblocks`, u32.
pub const NBLOCKS: usize = 136;
/// `target_data.smgr.forkNum`, an 8-bit field.
pub const FORK_NUM: usize = 140;
/// `target_data.smgr.is_temp`, bit 0 of this byte.
pub const IS_TEMP: usize = 141;

/// `PGAIO_HS_SUBMITTED` of `enum PgAioHandleState`.
pub const STATE_SUBMITTED: u8 = 4;
/// The largest value of `enum PgAioHandleState` (`PGAIO_HS_COMPLETED_LOCAL`).
pub const STATE_MAX: u8 = 7;
/// `PGAIO_TID_SMGR` of `enum PgAioTargetID`.
pub const TARGET_SMGR: u8 = 1;
/// `PGAIO_OP_READV` of `enum PgAioOp`.
pub const OP_READV: u8 = 1;

/// `sizeof(struct iovec)`.
pub const IOVEC_SIZE: usize = 16;
