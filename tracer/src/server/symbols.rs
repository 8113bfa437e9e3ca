//! Run-time addresses of variables that the server's binary exports.

use std::fs::File;
use std::io;

use object::elf::{
    ET_DYN, ET_EXEC, FileHeader64, PF_X, PT_LOAD, ProgramHeader64, SHN_UNDEF, SHT_DYNSYM, Sym64,
};
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, Sym};
use object::read::{ReadCache, StringTable};
use object::{Endianness, SectionIndex};
use procfs::process::Process;

use super::Pid;

/// `AT_ENTRY` of the auxiliary vector, from the kernel's `include/uapi/linux/auxvec.h`.
const AT_ENTRY: u64 = 9;

/// Addresses in the server's processes, which are forks of one postmaster and so share them.
///
/// `None` is a variable that this version of PostgreSQL does not export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Symbols {
    /// `PgAioCtl *pgaio_ctl` in `aio.c`: the AIO area of shared memory, from PostgreSQL 18 on.
    pub pgaio_ctl: Option<u64>,
    /// `ProcNumber MyProcNumber` in `globals.c`: each backend's own number, from PostgreSQL 17 on.
    pub my_proc_number: Option<u64>,
    /// `PgBackendStatus *MyBEEntry` in `backend_status.c`: what each process says of itself.
    pub my_be_entry: Option<u64>,
    /// `int io_max_concurrency` in `aio.c`: handles of each backend.
    pub io_max_concurrency: Option<u64>,
    /// `int io_max_combine_limit` in `bufmgr.c`: iovecs of each handle.
    pub io_max_combine_limit: Option<u64>,
    /// `int io_method` in `aio.c`: 0 sync, 1 worker, 2 io_uring.
    pub io_method: Option<u64>,
    /// `const IoMethodOps pgaio_worker_ops` in `method_worker.c`.
    pub pgaio_worker_ops: Option<u64>,
    /// `const IoMethodOps pgaio_uring_ops` in `method_io_uring.c`, of builds with liburing.
    pub pgaio_uring_ops: Option<u64>,
    /// The function `pgaio_wref_wait` in `aio.c`.
    pub pgaio_wref_wait: Option<u64>,
}

/// Machine code of the server's binary: where it is in the server's processes, and where in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Code {
    /// (run-time address, bytes, offset in the file) of every segment that may be executed.
    segments: Vec<(u64, u64, u64)>,
}

impl Code {
    /// Reads where it is from the program headers, which a stripped binary has as well.
    ///
    /// # Errors
    ///
    /// When the binary or the auxiliary vector cannot be read, or the binary is no 64-bit ELF file.
    pub fn read(postmaster: Pid) -> Result<Self, SymbolError> {
        let (binary, entry) = open(postmaster)?;
        let segments = executable_segments(&binary, entry);
        segments
            .map(|segments| Self { segments })
            .map_err(|detail| SymbolError::Elf { pid: postmaster, detail })
    }

    /// One segment, for tests.
    #[cfg(test)]
    pub(super) fn of_segment(address: u64, bytes: u64, file_offset: u64) -> Self {
        Self { segments: vec![(address, bytes, file_offset)] }
    }

    /// Where the instruction at a run-time address stands in the file; `None` when there is no code of the binary's.
    #[must_use]
    pub fn file_offset(&self, address: u64) -> Option<u64> {
        self.segments.iter().find_map(|(start, bytes, offset)| {
            let distance = address.checked_sub(*start).filter(|distance| distance < bytes)?;
            offset.checked_add(distance)
        })
    }
}

/// Why the symbols could not be read.
#[derive(Debug, thiserror::Error)]
pub enum SymbolError {
    /// The postmaster's binary cannot be opened.
    #[error("opening the server's binary /proc/{pid}/exe failed: {source}; run pgiotrace as root")]
    Open {
        /// The postmaster.
        pid: Pid,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The postmaster's auxiliary vector cannot be read.
    #[error("reading /proc/{pid}/auxv failed: {source}; run pgiotrace as root while the server runs")]
    AuxiliaryVector {
        /// The postmaster.
        pid: Pid,
        /// What procfs said.
        #[source]
        source: procfs::ProcError,
    },
    /// The binary is not what PostgreSQL's is.
    #[error("the server's binary /proc/{pid}/exe has no usable dynamic symbol table: {detail}")]
    Elf {
        /// The postmaster.
        pid: Pid,
        /// What is wrong with it.
        detail: String,
    },
}

/// Finds the run-time addresses in a server's postmaster.
///
/// Only the headers and the dynamic symbol table are read: it is there in a stripped binary too, since
/// extensions are linked against it.
///
/// # Errors
///
/// When the binary or the auxiliary vector cannot be read, or the binary is no 64-bit ELF file with dynamic
/// symbols.
pub fn read(postmaster: Pid) -> Result<Symbols, SymbolError> {
    let (binary, entry) = open(postmaster)?;
    let mut symbols = Symbols::default();
    scan(&binary, entry, &mut symbols).map_err(|detail| SymbolError::Elf { pid: postmaster, detail })?;
    Ok(symbols)
}

/// The postmaster's binary, and its entry point in memory.
fn open(pid: Pid) -> Result<(ReadCache<File>, u64), SymbolError> {
    let binary =
        File::open(format!("/proc/{pid}/exe")).map_err(|source| SymbolError::Open { pid, source })?;
    Ok((ReadCache::new(binary), runtime_entry(pid)?))
}

fn executable_segments(data: &ReadCache<File>, runtime_entry: u64) -> Result<Vec<(u64, u64, u64)>, String> {
    let text = |error: object::Error| error.to_string();
    let header = FileHeader64::<Endianness>::parse(data).map_err(text)?;
    let endian = header.endian().map_err(text)?;
    let bias = load_bias(header, endian, data, runtime_entry)?;
    let segments = header.program_headers(endian, data).map_err(text)?.iter();
    let executable = segments
        .filter(|segment| segment.p_type(endian) == PT_LOAD && segment.p_flags(endian).contains(PF_X));
    let place = |segment: &ProgramHeader64<Endianness>| {
        let start = segment.p_vaddr(endian).wrapping_add(bias);
        (start, segment.p_filesz(endian), segment.p_offset(endian))
    };
    Ok(executable.map(place).collect())
}

/// Where the kernel started the program: with the entry point of the file, that is the load bias. Unlike the
/// mappings in `/proc/PID/maps` it needs no match of file names or devices, which overlay file systems and
/// chroots distort.
fn runtime_entry(pid: Pid) -> Result<u64, SymbolError> {
    let auxiliary = i32::try_from(pid.0)
        .map_err(|_| procfs::ProcError::Other(format!("{pid} is no PID")))
        .and_then(Process::new)
        .and_then(|process| process.auxv())
        .map_err(|source| SymbolError::AuxiliaryVector { pid, source })?;
    auxiliary.get(&AT_ENTRY).copied().ok_or_else(|| SymbolError::AuxiliaryVector {
        pid,
        source: procfs::ProcError::Other("it has no AT_ENTRY".to_owned()),
    })
}

fn scan(data: &ReadCache<File>, runtime_entry: u64, found: &mut Symbols) -> Result<(), String> {
    let text = |error: object::Error| error.to_string();
    let header = FileHeader64::<Endianness>::parse(data).map_err(text)?;
    let endian = header.endian().map_err(text)?;
    let bias = load_bias(header, endian, data, runtime_entry)?;

    let sections = header.sections(endian, data).map_err(text)?;
    let is_dynamic =
        |section: &&object::elf::SectionHeader64<Endianness>| section.sh_type(endian) == SHT_DYNSYM;
    let section = sections.iter().find(is_dynamic).ok_or("it has no section .dynsym")?;
    let table: &[Sym64<Endianness>] = section.data_as_array(endian, data).map_err(text)?;
    let names = sections.section(SectionIndex(section.sh_link(endian) as usize)).map_err(text)?;
    // In one piece: name by name would be a system call for each of 15,000 symbols.
    let names = names.data(endian, data).map_err(text)?;
    let names = StringTable::new(names, 0, names.len() as u64);

    for symbol in table.iter().filter(|symbol| symbol.st_shndx(endian) != SHN_UNDEF) {
        if let Ok(name) = symbol.name(endian, names) {
            assign(found, name, bias.wrapping_add(symbol.st_value(endian)));
        }
    }
    Ok(())
}

fn assign(found: &mut Symbols, name: &[u8], address: u64) {
    let slot = match name {
        b"pgaio_ctl" => &mut found.pgaio_ctl,
        b"MyProcNumber" => &mut found.my_proc_number,
        b"MyBEEntry" => &mut found.my_be_entry,
        b"io_max_concurrency" => &mut found.io_max_concurrency,
        b"io_max_combine_limit" => &mut found.io_max_combine_limit,
        b"io_method" => &mut found.io_method,
        b"pgaio_worker_ops" => &mut found.pgaio_worker_ops,
        b"pgaio_uring_ops" => &mut found.pgaio_uring_ops,
        b"pgaio_wref_wait" => &mut found.pgaio_wref_wait,
        _ => return,
    };
    *slot = Some(address);
}

/// How far from its link-time addresses the program was loaded: 0 unless it is position independent.
fn load_bias(
    header: &FileHeader64<Endianness>,
    endian: Endianness,
    data: &ReadCache<File>,
    runtime_entry: u64,
) -> Result<u64, String> {
    let bias = match header.e_type(endian) {
        ET_EXEC => 0,
        ET_DYN => runtime_entry.wrapping_sub(header.e_entry(endian)),
        other => return Err(format!("its ELF type is {other}, not that of a program")),
    };
    let segments = header.program_headers(endian, data).map_err(|error| error.to_string())?;
    let alignment = segments.iter().filter(|segment| segment.p_type(endian) == PT_LOAD);
    // The kernel loads whole pages, so anything else means that the process runs another file than this one.
    let page = alignment.map(|segment| segment.p_align(endian)).min().unwrap_or(1).max(1);
    if runtime_entry != header.e_entry(endian).wrapping_add(bias) || !bias.is_multiple_of(page) {
        return Err(format!("entry point {runtime_entry:#x} of the process is not that of the file"));
    }
    Ok(bias)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_outside_of_the_code_has_no_offset() {
        let code = Code { segments: vec![(0x5000, 0x100, 0x2000), (0x9000, 0x10, 0x3000)] };
        assert_eq!(code.file_offset(0x5000), Some(0x2000));
        assert_eq!(code.file_offset(0x50ff), Some(0x20ff));
        assert_eq!(code.file_offset(0x9008), Some(0x3008));
        for outside in [0, 0x4fff, 0x5100, 0x9010, u64::MAX] {
            assert_eq!(code.file_offset(outside), None, "{outside:#x}");
        }
    }
}
