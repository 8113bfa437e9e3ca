//! Where the server's functions are that `--pg-probes` probes.

use super::aio::{AioRefusal, FIRST_AIO_MAJOR, Memory};
use super::discover::Server;
use super::symbols::{self, Code, SymbolError, Symbols};

/// The only version whose table of an I/O method is known. PostgreSQL 19 keeps callbacks for shared memory in it, and
/// changed their number until late: it is added only after reading its `aio_internal.h`.
const KNOWN_MAJOR: u16 = 18;

/// `struct IoMethodOps` of PostgreSQL 18 (`src/include/storage/aio_internal.h`): a bool, then pointers to functions.
mod table {
    /// Bytes of it.
    pub const SIZE: usize = 56;
    /// `bool wait_on_fd_before_close`.
    pub const WAIT_ON_FD_BEFORE_CLOSE: usize = 0;
    /// The first of the functions, `shmem_size`; the others follow, each of them optional but `submit`.
    pub const FUNCTIONS: usize = 8;
    /// `int (*submit) (uint16 num_staged_ios, PgAioHandle **staged_ios)`.
    pub const SUBMIT: usize = 40;
}

/// Offsets in the server's binary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbePoints {
    /// `submit` of the server's I/O method: called once a batch, by the reads' owner.
    pub submit: u64,
    /// `pgaio_wref_wait`: called by who waits for a read.
    pub wait: u64,
}

/// Why the functions cannot be found. Nothing is guessed: a probe in the middle of an instruction ends a process.
#[derive(Debug, thiserror::Error)]
pub enum ProbeRefusal {
    /// The server predates asynchronous I/O.
    #[error("PostgreSQL {major} has no asynchronous I/O, so there is nothing to probe")]
    BeforeAio {
        /// The server's major version.
        major: u16,
    },
    /// Nobody has read this version's sources for the table yet.
    #[error(
        "the table of an I/O method in PostgreSQL {major} is not known to this pgiotrace, which knows that of \
         {KNOWN_MAJOR}"
    )]
    UnknownMajor {
        /// The server's major version.
        major: u16,
    },
    /// The server's binary cannot be read.
    #[error(transparent)]
    Symbols(#[from] SymbolError),
    /// The server's memory cannot be read, or its handles cannot be found.
    #[error(transparent)]
    Aio(#[from] AioRefusal),
    /// The binary does not export what is needed.
    #[error("the server's binary does not export {symbol}")]
    SymbolMissing {
        /// Its name.
        symbol: &'static str,
    },
    /// An I/O method that PostgreSQL 18 does not have.
    #[error("the server's I/O method has the number {number}, which is not known")]
    UnknownMethod {
        /// `enum IoMethod` (`src/include/storage/aio.h`).
        number: i32,
    },
    /// The table is not what the layout says.
    #[error("{symbol} in the server's memory is not laid out as in PostgreSQL {KNOWN_MAJOR}: {detail}")]
    LayoutMismatch {
        /// Its name.
        symbol: &'static str,
        /// What does not fit.
        detail: String,
    },
}

/// Finds the functions to probe; `None` when the I/O method is `sync`, which hands nothing over.
///
/// The address of `submit` is read from the running postmaster rather than from the binary's relocations: there it is
/// right in whatever form the binary keeps them (`.rela.dyn`, packed `.relr.dyn`, or none at all when it is not position
/// independent), and on every processor.
///
/// # Errors
///
/// A [`ProbeRefusal`] says why they cannot be found.
pub fn find(server: &Server) -> Result<Option<ProbePoints>, ProbeRefusal> {
    let (pid, major) = (server.postmaster, server.major);
    if major < FIRST_AIO_MAJOR {
        return Err(ProbeRefusal::BeforeAio { major });
    }
    if major != KNOWN_MAJOR {
        return Err(ProbeRefusal::UnknownMajor { major });
    }
    let symbols = symbols::read(pid)?;
    let memory = Memory::open(pid)?;
    let Some((symbol, table)) = table_of_method(&symbols, &memory)? else { return Ok(None) };
    let code = Code::read(pid)?;
    let submit = submit_of(&memory.read(symbol, table)?, &code)
        .map_err(|detail| ProbeRefusal::LayoutMismatch { symbol, detail })?;
    let symbol = "pgaio_wref_wait";
    let wait = symbols.pgaio_wref_wait.ok_or(ProbeRefusal::SymbolMissing { symbol })?;
    let detail = || format!("{wait:#x} is no address of its code");
    let wait =
        code.file_offset(wait).ok_or_else(|| ProbeRefusal::LayoutMismatch { symbol, detail: detail() })?;
    Ok(Some(ProbePoints { submit, wait }))
}

/// Name and address of the table of the server's I/O method.
fn table_of_method(symbols: &Symbols, memory: &Memory) -> Result<Option<(&'static str, u64)>, ProbeRefusal> {
    let missing = |symbol| ProbeRefusal::SymbolMissing { symbol };
    let method = symbols.io_method.ok_or_else(|| missing("io_method"))?;
    let (symbol, table) = match i32::from_ne_bytes(memory.read("io_method", method)?) {
        0 => return Ok(None),
        1 => ("pgaio_worker_ops", symbols.pgaio_worker_ops),
        2 => ("pgaio_uring_ops", symbols.pgaio_uring_ops),
        number => return Err(ProbeRefusal::UnknownMethod { number }),
    };
    Ok(Some((symbol, table.ok_or_else(|| missing(symbol))?)))
}

/// Where `submit` stands in the file, if all of the table is what it should be.
fn submit_of(table: &[u8; table::SIZE], code: &Code) -> Result<u64, String> {
    if table[table::WAIT_ON_FD_BEFORE_CLOSE] > 1 {
        return Err(format!("its first byte is {}", table[table::WAIT_ON_FD_BEFORE_CLOSE]));
    }
    let (functions, _) = table[table::FUNCTIONS..].as_chunks();
    for address in functions.iter().copied().map(u64::from_ne_bytes).filter(|address| *address != 0) {
        if code.file_offset(address).is_none() {
            return Err(format!("{address:#x} in it is no address of the server's code"));
        }
    }
    let submit = functions[(table::SUBMIT - table::FUNCTIONS) / size_of::<u64>()];
    code.file_offset(u64::from_ne_bytes(submit)).ok_or_else(|| "it has no function submit".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: u64 = 0x5555_0000_1000;

    fn code() -> Code {
        Code::of_segment(CODE, 0x1000, 0x400)
    }

    /// A table with these functions from `shmem_size` on, written with plain numbers so that the constants are tested too.
    fn built(functions: [u64; 6]) -> [u8; 56] {
        let mut table = [0; 56];
        table[0] = 1;
        for (index, function) in functions.iter().enumerate() {
            table[8 + 8 * index..16 + 8 * index].copy_from_slice(&function.to_ne_bytes());
        }
        table
    }

    #[test]
    fn the_fifth_function_is_submit() {
        let table = built([CODE, CODE + 1, 0, CODE + 3, CODE + 0x44, 0]);
        assert_eq!(submit_of(&table, &code()), Ok(0x444));
    }

    #[test]
    fn a_table_that_does_not_fit_is_refused() {
        let good = [CODE, CODE + 1, 0, CODE + 3, CODE + 0x44, 0];
        let mut no_bool = built(good);
        no_bool[0] = 2;
        for bad in [
            no_bool,
            built([CODE, CODE, CODE, CODE, 0, CODE]),
            built([CODE, CODE, CODE, CODE, CODE + 0x1000, CODE]),
            built([64, CODE, CODE, CODE, CODE, CODE]),
        ] {
            assert!(submit_of(&bad, &code()).is_err(), "{bad:x?}");
        }
    }
}
