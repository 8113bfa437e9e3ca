//! The probes of `--pg-probes`, and what a trap into one costs.

use std::{
    error::Error,
    hint::black_box,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use aya::{
    Ebpf,
    programs::{
        ProgramError, UProbe,
        uprobe::{UProbeLink, UProbeScope},
    },
};
use procfs::process::Process;

/// Why a probe is not attached.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The kernel refused it.
    #[error(
        "attaching {program} to {} at {offset:#x} failed: {}; a kernel with CONFIG_UPROBES=y and the capability \
         CAP_PERFMON are needed",
        binary.display(),
        cause(source)
    )]
    Refused {
        /// Program in the kernel object.
        program: &'static str,
        /// What it was to be attached to.
        binary: PathBuf,
        /// Where.
        offset: u64,
        /// What the kernel said.
        #[source]
        source: Box<ProgramError>,
    },
    /// The tracer's own function cannot be found.
    #[error("finding this program's own code in /proc/self/maps failed: {0}")]
    OwnCode(#[source] procfs::ProcError),
}

/// What is at the bottom of an error: aya's own sentences leave it out.
fn cause(error: &ProgramError) -> String {
    let mut cause: &dyn Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    let text = cause.to_string();
    // Behind the first line is the verifier's log.
    text.lines().next().unwrap_or_default().to_owned()
}

/// Attaches a program to an instruction of a binary, whichever process runs it: processes that start later are to trap
/// as well. The probe is removed when what is returned is dropped, or the tracer ends.
///
/// # Errors
///
/// When the kernel refuses it.
pub fn attach(
    ebpf: &mut Ebpf,
    program: &'static str,
    binary: &Path,
    offset: u64,
) -> Result<UProbeLink, ProbeError> {
    attach_one(ebpf, program, binary, offset).map_err(|source| ProbeError::Refused {
        program,
        binary: binary.to_owned(),
        offset,
        source: Box::new(source),
    })
}

fn attach_one(
    ebpf: &mut Ebpf,
    program: &'static str,
    binary: &Path,
    offset: u64,
) -> Result<UProbeLink, ProgramError> {
    let program: &mut UProbe = ebpf.program_mut(program).ok_or(ProgramError::NotLoaded)?.try_into()?;
    program.load()?;
    let link = program.attach(offset, binary, UProbeScope::AllProcesses)?;
    program.take_link(link)
}

/// What is called with a trap.
#[inline(never)]
extern "C" fn probed(number: u64) -> u64 {
    black_box(number) + 1
}

/// The same without a trap. Another number, or the linker might make one function of the two.
#[inline(never)]
extern "C" fn unprobed(number: u64) -> u64 {
    black_box(number) + 2
}

/// Measures what a trap costs, nanoseconds: the difference between calls of two functions of the tracer's own, to one of
/// which an empty program is attached. The median of interleaved rounds; it takes some 10 ms.
///
/// The server's functions begin with other instructions, and its programs do something: it is an estimate.
///
/// # Errors
///
/// When the program cannot be attached.
pub fn trap_ns(ebpf: &mut Ebpf) -> Result<f64, ProbeError> {
    const MOST_TIME: Duration = Duration::from_millis(10);
    const MOST_ROUNDS: usize = 51;
    const CALLS: u32 = 16;
    let offset = file_offset(probed as *const () as u64).map_err(ProbeError::OwnCode)?;
    let _link = attach(ebpf, "empty_probe", Path::new("/proc/self/exe"), offset)?;
    // The first trap breaks the page off the file's.
    probed(0);
    let began = Instant::now();
    let mut rounds = Vec::with_capacity(MOST_ROUNDS);
    while rounds.is_empty() || (rounds.len() < MOST_ROUNDS && began.elapsed() < MOST_TIME) {
        let with = time(CALLS, probed);
        let without = time(CALLS, unprobed);
        rounds.push((with - without) / f64::from(CALLS));
    }
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[rounds.len() / 2].max(0.0))
}

/// Nanoseconds that a number of calls take.
fn time(calls: u32, function: extern "C" fn(u64) -> u64) -> f64 {
    let function = black_box(function);
    let began = Instant::now();
    for number in 0..calls {
        black_box(function(u64::from(number)));
    }
    began.elapsed().as_secs_f64() * 1e9
}

/// Where an instruction of the tracer's own stands in its file.
fn file_offset(address: u64) -> Result<u64, procfs::ProcError> {
    let maps = Process::myself()?.maps()?;
    let map = maps.iter().find(|map| (map.address.0..map.address.1).contains(&address));
    map.map(|map| address - map.address.0 + map.offset)
        .ok_or_else(|| procfs::ProcError::Other(format!("it has no mapping at {address:#x}")))
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::unix::fs::FileExt as _};

    use super::*;

    #[test]
    fn the_functions_that_are_compared_are_two_and_are_found_in_the_file() {
        let addresses = [probed as *const () as u64, unprobed as *const () as u64];
        assert_ne!(addresses[0], addresses[1]);
        let file = File::open("/proc/self/exe").expect("this test's own file");
        let memory = File::open("/proc/self/mem").expect("this test's own memory");
        for address in addresses {
            let (mut filed, mut mapped) = ([0; 8], [1; 8]);
            let offset = file_offset(address).expect("its own code is mapped");
            file.read_exact_at(&mut filed, offset).expect("the code is in the file");
            memory.read_exact_at(&mut mapped, address).expect("the code is in memory");
            assert_eq!(filed, mapped);
        }
    }
}
