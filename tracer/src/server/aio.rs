//! The area of shared memory that PostgreSQL's asynchronous I/O lives in, from version 18 on.

use std::fs::File;
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::FileExt;

use pgiotrace_ebpf::handle as layout;

use super::Pid;
use super::discover::Server;
use super::symbols::Symbols;

/// First version with asynchronous I/O, and with the view `pg_aios`.
pub const FIRST_AIO_MAJOR: u16 = 18;

/// The table of layouts by major version: so far there is one, in [`pgiotrace_ebpf::handle`] and [`control`],
/// read in the sources of 18.0 to 18.6 and of 19beta3, and tested with 18.6 and 19rc1. Another version is added only after reading its
/// `aio_internal.h`.
const KNOWN_MAJORS: RangeInclusive<u16> = 18..=19;

/// Handles that are checked against the layout, the first and the last among them.
const CHECKED_HANDLES: u32 = 66;

/// Where the members of `PgAioCtl` lie that are read here; `struct PgAioCtl` in PostgreSQL's
/// `src/include/storage/aio_internal.h`. The same in 18.0 to 18.6 and 19beta3.
mod control {
    /// Bytes to read.
    pub const SIZE: usize = 56;
    /// `uint32 iovec_count`.
    pub const IOVEC_COUNT: usize = 16;
    /// `struct iovec *iovecs`.
    pub const IOVECS: usize = 24;
    /// `uint32 io_handle_count`.
    pub const HANDLE_COUNT: usize = 40;
    /// `PgAioHandle *io_handles`.
    pub const HANDLES: usize = 48;
}

/// The AIO area, at the same addresses in every process of the server. A crash restart moves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AioArea {
    /// Address of the array of handles.
    pub handles: u64,
    /// Handles in it.
    pub handle_count: u32,
    /// Address of the array of `struct iovec`.
    pub iovecs: u64,
    /// Entries in it.
    pub iovec_count: u32,
    /// Consecutive iovecs of each handle (`io_max_combine_limit`).
    pub iovecs_per_handle: u32,
    /// Consecutive handles of each process (`io_max_concurrency`).
    pub handles_per_proc: u32,
}

/// Why reads cannot be attributed through handles. Nothing is guessed then.
#[derive(Debug, thiserror::Error)]
pub enum AioRefusal {
    /// The server predates asynchronous I/O: nothing is missing.
    #[error("PostgreSQL {major} has no asynchronous I/O, so its reads have no handles")]
    BeforeAio {
        /// The server's major version.
        major: u16,
    },
    /// Nobody has read this version's sources for the layout yet.
    #[error(
        "the layout of I/O handles in PostgreSQL {major} is not known to this pgiotrace, which knows {} to \
         {}; use a newer pgiotrace",
        KNOWN_MAJORS.start(),
        KNOWN_MAJORS.end()
    )]
    UnknownMajor {
        /// The server's major version.
        major: u16,
    },
    /// The binary does not export a variable.
    #[error("the server's binary does not export the variable {symbol}, so its I/O handles cannot be found")]
    SymbolMissing {
        /// Its name.
        symbol: &'static str,
    },
    /// The postmaster's memory cannot be read.
    #[error(
        "reading {what} at {address:#x} in /proc/{pid}/mem failed: {source}; run pgiotrace as root while \
         the server runs"
    )]
    Unreadable {
        /// The postmaster.
        pid: Pid,
        /// What was read.
        what: &'static str,
        /// Where.
        address: u64,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Shared memory is not set up: the server is starting or restarting.
    #[error("the server has not set up its I/O handles yet; try again when it accepts connections")]
    NotReady,
    /// The memory is not what the layout says.
    #[error(
        "the I/O handles in the server's memory do not have the layout of PostgreSQL {major}: {detail}; is \
         the build patched?"
    )]
    LayoutMismatch {
        /// The server's major version.
        major: u16,
        /// What does not fit.
        detail: String,
    },
}

/// What never changes in an I/O handle, and its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HandleIdentity {
    /// One of [`pgiotrace_ebpf::handle`]'s `STATE_…`.
    state: u8,
    /// Index of the owner in `ProcGlobal->allProcs`.
    owner_procno: i32,
    /// Index of the first of its iovecs.
    iovec_off: u32,
}

impl HandleIdentity {
    fn parse(bytes: &[u8; layout::SIZE]) -> Self {
        Self {
            state: bytes[layout::STATE],
            owner_procno: i32::from_ne_bytes(part(bytes, layout::OWNER_PROCNO)),
            iovec_off: u32::from_ne_bytes(part(bytes, layout::IOVEC_OFF)),
        }
    }
}

/// `N` bytes from `offset` on; the offsets are constants within `bytes`.
fn part<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[offset..offset + N]);
    part
}

/// Finds a server's I/O handles and checks that they are what the layout says.
///
/// Only `/proc/PID/mem` of the postmaster is read, which neither stops nor changes it.
///
/// # Errors
///
/// An [`AioRefusal`] says why reads cannot be attributed through handles.
pub fn read(server: &Server, symbols: &Symbols) -> Result<AioArea, AioRefusal> {
    let major = server.major;
    if major < FIRST_AIO_MAJOR {
        return Err(AioRefusal::BeforeAio { major });
    }
    if !KNOWN_MAJORS.contains(&major) {
        return Err(AioRefusal::UnknownMajor { major });
    }
    let memory = Memory::open(server.postmaster)?;
    let area = read_area(&memory, symbols)?;
    let mismatch = |detail| AioRefusal::LayoutMismatch { major, detail };
    check_area(&area).map_err(mismatch)?;
    for io_id in sample(area.handle_count) {
        let address = area.handles + u64::from(io_id) * layout::SIZE as u64;
        let handle = HandleIdentity::parse(&memory.read("an I/O handle", address)?);
        check_handle(&area, io_id, &handle).map_err(mismatch)?;
    }
    Ok(area)
}

fn read_area(memory: &Memory, symbols: &Symbols) -> Result<AioArea, AioRefusal> {
    let number = |address: Option<u64>, symbol: &'static str| {
        let address = address.ok_or(AioRefusal::SymbolMissing { symbol })?;
        memory.read(symbol, address).map(u32::from_ne_bytes)
    };
    let pointer = symbols.pgaio_ctl.ok_or(AioRefusal::SymbolMissing { symbol: "pgaio_ctl" })?;
    let address = u64::from_ne_bytes(memory.read("pgaio_ctl", pointer)?);
    if address == 0 {
        return Err(AioRefusal::NotReady);
    }
    let bytes: [u8; control::SIZE] = memory.read("PgAioCtl", address)?;
    Ok(AioArea {
        handles: u64::from_ne_bytes(part(&bytes, control::HANDLES)),
        handle_count: u32::from_ne_bytes(part(&bytes, control::HANDLE_COUNT)),
        iovecs: u64::from_ne_bytes(part(&bytes, control::IOVECS)),
        iovec_count: u32::from_ne_bytes(part(&bytes, control::IOVEC_COUNT)),
        iovecs_per_handle: number(symbols.io_max_combine_limit, "io_max_combine_limit")?,
        handles_per_proc: number(symbols.io_max_concurrency, "io_max_concurrency")?,
    })
}

/// What `AioShmemInit` in `aio_init.c` guarantees of the area as a whole.
fn check_area(area: &AioArea) -> Result<(), String> {
    let AioArea { handles, handle_count, iovecs, iovec_count, iovecs_per_handle, handles_per_proc } = *area;
    if handles == 0 || !handles.is_multiple_of(8) || iovecs == 0 || !iovecs.is_multiple_of(8) {
        return Err(format!("the arrays at {handles:#x} and {iovecs:#x} are not aligned"));
    }
    // Upper limits of the settings: io_max_concurrency 1024 (guc_parameters.dat), MAX_IO_COMBINE_LIMIT 128
    // (bufmgr.h).
    if !(1..=1024).contains(&handles_per_proc) || !(1..=128).contains(&iovecs_per_handle) {
        return Err(format!(
            "io_max_concurrency {handles_per_proc} or io_max_combine_limit {iovecs_per_handle} is out of \
             range"
        ));
    }
    if handle_count == 0 || !handle_count.is_multiple_of(handles_per_proc) {
        return Err(format!("{handle_count} handles are not {handles_per_proc} for each process"));
    }
    if u64::from(iovec_count) != u64::from(handle_count) * u64::from(iovecs_per_handle) {
        return Err(format!(
            "{iovec_count} iovecs are not {iovecs_per_handle} for each of {handle_count} handles"
        ));
    }
    Ok(())
}

/// What `AioShmemInit` writes into each handle and nobody changes.
fn check_handle(area: &AioArea, io_id: u32, handle: &HandleIdentity) -> Result<(), String> {
    if handle.state > layout::STATE_MAX {
        return Err(format!("handle {io_id} has state {}", handle.state));
    }
    let owner = io_id / area.handles_per_proc;
    if u32::try_from(handle.owner_procno) != Ok(owner) {
        return Err(format!("handle {io_id} belongs to process {}, not {owner}", handle.owner_procno));
    }
    let iovec = io_id * area.iovecs_per_handle;
    if handle.iovec_off != iovec {
        return Err(format!("handle {io_id} has its iovecs at {}, not {iovec}", handle.iovec_off));
    }
    Ok(())
}

/// Handles to check: the first, the last, and some spread between.
fn sample(handle_count: u32) -> impl Iterator<Item = u32> {
    let last = handle_count.saturating_sub(1);
    let steps = CHECKED_HANDLES.min(handle_count).max(2) - 1;
    (0..=steps)
        .map(move |step| u32::try_from(u64::from(last) * u64::from(step) / u64::from(steps)).unwrap_or(last))
}

/// A backend's own process number, which I/O handles name their owner by.
///
/// `None` while the process has none (it is starting or ending), when it is gone, or when the server does not
/// export `MyProcNumber` (before PostgreSQL 17).
#[must_use]
pub fn read_my_proc_number(pid: Pid, symbols: &Symbols) -> Option<i32> {
    let address = symbols.my_proc_number?;
    let number = i32::from_ne_bytes(Memory::open(pid).ok()?.read("MyProcNumber", address).ok()?);
    // INVALID_PROC_NUMBER is -1 (procnumber.h).
    (number >= 0).then_some(number)
}

/// A process's memory, for reading.
pub(super) struct Memory {
    pid: Pid,
    file: File,
}

impl Memory {
    pub(super) fn open(pid: Pid) -> Result<Self, AioRefusal> {
        let file = File::open(format!("/proc/{pid}/mem")).map_err(|source| AioRefusal::Unreadable {
            pid,
            what: "the process",
            address: 0,
            source,
        })?;
        Ok(Self { pid, file })
    }

    pub(super) fn read<const N: usize>(
        &self,
        what: &'static str,
        address: u64,
    ) -> Result<[u8; N], AioRefusal> {
        let mut bytes = [0; N];
        self.file.read_exact_at(&mut bytes, address).map_err(|source| AioRefusal::Unreadable {
            pid: self.pid,
            what,
            address,
            source,
        })?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AREA: AioArea = AioArea {
        handles: 0x7000_0000,
        handle_count: 128 * 64,
        iovecs: 0x7100_0000,
        iovec_count: 128 * 64 * 16,
        iovecs_per_handle: 16,
        handles_per_proc: 64,
    };

    fn put(bytes: &mut [u8], offset: usize, value: &[u8]) {
        bytes[offset..offset + value.len()].copy_from_slice(value);
    }

    /// A handle as the sources lay it out, written with plain numbers so that the constants are tested too.
    fn built() -> [u8; layout::SIZE] {
        let mut bytes = [0xEE; layout::SIZE];
        bytes[0] = 4;
        put(&mut bytes, 16, &3_i32.to_ne_bytes());
        put(&mut bytes, 92, &3200_u32.to_ne_bytes());
        bytes
    }

    #[test]
    fn a_handle_is_read_from_its_bytes() {
        let expected = HandleIdentity { state: layout::STATE_SUBMITTED, owner_procno: 3, iovec_off: 3200 };
        assert_eq!(HandleIdentity::parse(&built()), expected);
    }

    #[test]
    fn a_handle_that_fits_passes() {
        assert_eq!(check_area(&AREA), Ok(()));
        assert_eq!(check_handle(&AREA, 200, &HandleIdentity::parse(&built())), Ok(()));
    }

    #[test]
    fn a_handle_that_does_not_fit_is_refused() {
        let good = HandleIdentity::parse(&built());
        for (io_id, bad) in [
            (200, HandleIdentity { state: 8, ..good }),
            (200, HandleIdentity { owner_procno: 4, ..good }),
            (200, HandleIdentity { owner_procno: -1, ..good }),
            (200, HandleIdentity { iovec_off: 0, ..good }),
            (201, good),
        ] {
            assert!(check_handle(&AREA, io_id, &bad).is_err(), "{io_id} {bad:?}");
        }
    }

    #[test]
    fn an_area_that_does_not_fit_is_refused() {
        for bad in [
            AioArea { handles: 0, ..AREA },
            AioArea { handles: AREA.handles + 4, ..AREA },
            AioArea { iovecs: 0, ..AREA },
            AioArea { handle_count: 0, ..AREA },
            AioArea { handle_count: AREA.handle_count + 1, ..AREA },
            AioArea { iovec_count: AREA.iovec_count - 1, ..AREA },
            AioArea { handles_per_proc: 0, ..AREA },
            AioArea { iovecs_per_handle: u32::MAX, ..AREA },
        ] {
            assert!(check_area(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_first_and_the_last_handle_are_checked() {
        let all: Vec<u32> = sample(8192).collect();
        assert_eq!((all.first(), all.last(), all.len()), (Some(&0), Some(&8191), 66));
        assert_eq!(sample(1).collect::<Vec<_>>(), [0, 0]);
        assert_eq!(sample(3).collect::<Vec<_>>(), [0, 1, 2]);
    }
}
