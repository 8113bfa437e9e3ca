//! What this kernel is and offers.

use std::fs;
use std::io;

use pgiotrace_ebpf::globals::OFFSETS;

use super::topic::{FileText, Problem, Topic, first_line, read};
use crate::capture::kernel::btf::{BtfError, KernelTypes, VMLINUX};
use crate::capture::kernel::lost_without_member_of;
use crate::model::Check;
use crate::units;

const AREA: &str = "kernel";
const RELEASE: Topic = Topic::optional(AREA, "release");
const ARCHITECTURE: Topic = Topic::required(AREA, "architecture");
const BTF: Topic = Topic::required(AREA, "BTF");
const MEMBERS: Topic = Topic::optional(AREA, "structure members");
const TRACEFS: Topic = Topic::optional(AREA, "tracefs");
const JIT: Topic = Topic::optional(AREA, "BPF compiler (JIT)");
const STATISTICS: Topic = Topic::optional(AREA, "BPF statistics");
const IO_URING: Topic = Topic::optional(AREA, "io_uring");

/// The oldest kernel that pgiotrace is made for, that of RHEL 9.
const OLDEST: (u32, u32) = (5, 14);

/// Tracepoint that only a kernel with CONFIG_IO_URING has.
const IO_URING_TRACEPOINT: &str = "io_uring_complete";

/// All checks of this area.
pub(super) fn checks() -> Vec<Check> {
    let uname = rustix::system::uname();
    let types = KernelTypes::of_running_kernel();
    let [mounts, jit, statistics, disabled, group] = [
        "/proc/self/mounts",
        "/proc/sys/net/core/bpf_jit_enable",
        "/proc/sys/kernel/bpf_stats_enabled",
        "/proc/sys/kernel/io_uring_disabled",
        "/proc/sys/kernel/io_uring_group",
    ]
    .map(read);
    let has_io_uring =
        types.as_ref().ok().map(|types| types.tracepoint_arguments(IO_URING_TRACEPOINT).is_some());
    vec![
        release(&uname.release().to_string_lossy()),
        architecture(&uname.machine().to_string_lossy()),
        btf(types.as_ref().map(|_| ()), fs::metadata(VMLINUX).map(|file| file.len())),
        types.as_ref().map_or_else(|_| members_unknown(), |types| members(absent(types))),
        tracefs(mounts.as_deref().unwrap_or_default()),
        jit_check(text(&jit)),
        statistics_check(text(&statistics)),
        io_uring(has_io_uring, text(&disabled), text(&group)),
    ]
}

fn text(read: &Result<String, io::ErrorKind>) -> FileText<'_> {
    read.as_deref().map_err(|kind| *kind)
}

fn release(release: &str) -> Check {
    match version(release) {
        Some(version) if version < OLDEST => {
            let detail = format!("{release} is older than {}.{}", OLDEST.0, OLDEST.1);
            let cost = "nobody tried pgiotrace on it; the programs below say what works";
            RELEASE.broken(Problem::new(detail, cost).mend("upgrade the kernel"))
        }
        _ => RELEASE.ok(release),
    }
}

/// "6.12.0-1-amd64" is (6, 12).
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|character: char| !character.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Those whose registers the kernel side reads.
fn architecture(machine: &str) -> Check {
    if ["x86_64", "aarch64"].contains(&machine) {
        return ARCHITECTURE.ok(machine);
    }
    let detail = format!("{machine} is neither x86_64 nor aarch64");
    let problem =
        Problem::new(detail, "the arguments of system calls cannot be read, so nothing can be traced");
    ARCHITECTURE.broken(problem.mend("trace on a 64-bit x86 or ARM machine"))
}

/// `size`: of the file.
fn btf(parsed: Result<(), &BtfError>, size: io::Result<u64>) -> Check {
    let problem = |detail: String| {
        let cost = "the kernel's structures are not known, so nothing can be traced";
        Problem::new(detail, cost)
            .mend("boot a kernel with CONFIG_DEBUG_INFO_BTF=y, as distributions build theirs")
    };
    match (parsed, size) {
        (Ok(()), Ok(size)) => BTF.ok(format!("{VMLINUX}, {}", units::size(size))),
        (Ok(()), Err(_)) => BTF.ok(VMLINUX),
        (Err(_), Err(error)) if error.kind() == io::ErrorKind::NotFound => {
            BTF.missing(problem(format!("{VMLINUX} is not there")))
        }
        (Err(error), _) => BTF.broken(Problem::from_sentence(&first_line(error), "nothing can be traced")),
    }
}

/// Members that the kernel side reads and this kernel has not: (structure, member).
fn absent(types: &KernelTypes) -> Result<Vec<(&'static str, &'static str)>, BtfError> {
    let mut absent = Vec::new();
    for (_, structure, member) in OFFSETS {
        if types.offset_of(structure, member)?.is_none() {
            absent.push((structure, member));
        }
    }
    Ok(absent)
}

fn members(absent: Result<Vec<(&str, &str)>, BtfError>) -> Check {
    let absent = match absent {
        Ok(absent) if absent.is_empty() => return MEMBERS.ok(format!("all {} are known", OFFSETS.len())),
        Ok(absent) => absent,
        Err(error) => return MEMBERS.broken(Problem::new(error.to_string(), "nothing can be traced")),
    };
    let names: Vec<_> = absent.iter().map(|(structure, member)| format!("{structure}.{member}")).collect();
    let mut costs: Vec<_> = absent.iter().map(|(structure, _)| lost_without_member_of(structure)).collect();
    // Members of a structure are neighbours in the table.
    costs.dedup();
    let detail = format!("this kernel has no {}", names.join(", "));
    MEMBERS.missing(
        Problem::new(detail, costs.join("; ")).mend("look for a newer pgiotrace that knows this kernel"),
    )
}

fn members_unknown() -> Check {
    MEMBERS.missing(Problem::new("not known without BTF", "nothing can be traced").mend("as for BTF"))
}

/// `mounts`: `/proc/self/mounts`. BTF and raw tracepoints are opened with bpf(2) alone.
fn tracefs(mounts: &str) -> Check {
    let of_kind = |line: &str| {
        let mut words = line.split(' ').skip(1);
        let (place, kind) = (words.next()?, words.next()?);
        (kind == "tracefs").then(|| place.to_owned())
    };
    let found = mounts
        .lines()
        .find_map(of_kind)
        .map_or("not mounted".to_owned(), |place| format!("mounted at {place}"));
    TRACEFS.ok(format!("{found}; not needed by these programs, which attach by BTF and raw tracepoints"))
}

/// `net.core.bpf_jit_enable`, which only the initial network namespace shows (`net_core_table` in the kernel's
/// `net/core/sysctl_net_core.c`).
fn jit_check(text: FileText) -> Check {
    match text {
        Ok("0") => {
            let detail = "net.core.bpf_jit_enable is 0, so programs are interpreted";
            let problem = Problem::new(detail, "tracing slows the server down several times as much");
            JIT.broken(problem.mend("sysctl -w net.core.bpf_jit_enable=1"))
        }
        // 2 also writes each program to the kernel's log (Documentation/admin-guide/sysctl/net.rst).
        Ok("2") => {
            let problem = Problem::new(
                "net.core.bpf_jit_enable is 2, which writes each program to the kernel's log",
                "loading is slower and the log is full of programs",
            );
            JIT.broken(problem.mend("sysctl -w net.core.bpf_jit_enable=1"))
        }
        Ok(_) => JIT.ok("on"),
        Err(kind) => {
            let detail = format!("not known: reading net.core.bpf_jit_enable failed ({kind})");
            let problem = Problem::new(detail, "whether programs run at full speed cannot be said");
            JIT.missing(problem.mend(
                "run pgiotrace doctor in the host's network namespace: nsenter -t 1 -n pgiotrace doctor",
            ))
        }
    }
}

/// `kernel.bpf_stats_enabled`.
fn statistics_check(text: FileText) -> Check {
    let detail = match text {
        Ok("0") => "kernel.bpf_stats_enabled is 0".to_owned(),
        Ok(_) => return STATISTICS.ok("on, so that the programs' own run time is measured"),
        Err(kind) => format!("not known: reading kernel.bpf_stats_enabled failed ({kind})"),
    };
    let problem = Problem::new(detail, "overhead.bpf_ns_per_read is not measured; nothing else is lost");
    STATISTICS.missing(
        problem.mend("sysctl -w kernel.bpf_stats_enabled=1 (and 0 afterwards: it costs a little each run)"),
    )
}

/// `is_built`: whether the kernel has io_uring at all, where BTF tells. `disabled` and `group`: the sysctls
/// `kernel.io_uring_disabled` (from 6.6 on) and `kernel.io_uring_group`.
fn io_uring(is_built: Option<bool>, disabled: FileText, group: FileText) -> Check {
    let cost = "PostgreSQL cannot run with io_method=io_uring; sync and worker are traced all the same";
    if is_built == Some(false) {
        let problem = Problem::new("this kernel is built without it", cost);
        return IO_URING
            .missing(problem.mend("boot a kernel with CONFIG_IO_URING=y, or leave io_method at worker"));
    }
    match disabled {
        Ok("0") => IO_URING.ok("kernel.io_uring_disabled is 0: PostgreSQL may use io_method=io_uring"),
        Ok("1") => {
            let detail = match group {
                Ok("-1") | Err(_) => {
                    "kernel.io_uring_disabled is 1: only processes with CAP_SYS_ADMIN may use it".to_owned()
                }
                Ok(group) => {
                    format!("kernel.io_uring_disabled is 1: only members of group {group} may use it")
                }
            };
            let cost = "PostgreSQL runs with io_method=io_uring only if its user is in that group";
            let mend = "sysctl -w kernel.io_uring_group=GID (a group of the server's user), or \
                kernel.io_uring_disabled=0";
            IO_URING.missing(Problem::new(detail, cost).mend(mend))
        }
        Ok(state) => {
            let detail = format!("kernel.io_uring_disabled is {state}: nobody may use it");
            IO_URING.missing(Problem::new(detail, cost).mend("sysctl -w kernel.io_uring_disabled=0"))
        }
        Err(io::ErrorKind::NotFound) if is_built == Some(true) => {
            IO_URING.ok("there; this kernel has no kernel.io_uring_disabled, so everybody may use it")
        }
        Err(kind) => {
            let detail = format!("not known: reading kernel.io_uring_disabled failed ({kind})");
            let cost = "whether PostgreSQL may use io_method=io_uring cannot be said";
            IO_URING.missing(Problem::new(detail, cost).mend("sysctl kernel.io_uring_disabled as root"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Status;

    #[test]
    fn releases_are_compared_by_number() {
        assert_eq!(version("6.12.0-1-amd64"), Some((6, 12)));
        assert_eq!(version("5.4"), Some((5, 4)));
        assert_eq!(version("next"), None);
        for (text, status) in [
            ("5.14.0-503.el9.x86_64", Status::Ok),
            ("6.1.0", Status::Ok),
            ("10.0", Status::Ok),
            ("5.4.0", Status::Broken),
            ("unheard-of", Status::Ok),
        ] {
            let check = release(text);
            assert_eq!((check.status, check.required), (status, false), "{text}");
        }
    }

    #[test]
    fn two_architectures_are_known() {
        assert_eq!(architecture("x86_64").status, Status::Ok);
        assert_eq!(architecture("aarch64").status, Status::Ok);
        assert_eq!(
            (architecture("riscv64").status, architecture("riscv64").required),
            (Status::Broken, true)
        );
    }

    #[test]
    fn btf_that_is_not_there_is_missing_and_other_trouble_is_broken() {
        assert_eq!(btf(Ok(()), Ok(1 << 20)).detail, "/sys/kernel/btf/vmlinux, 1.00 MiB");
        let error = BtfError::AmbiguousStructure("file".to_owned());
        let missing = btf(Err(&error), Err(io::ErrorKind::NotFound.into()));
        assert_eq!((missing.status, missing.required), (Status::Missing, true));
        assert!(missing.mend.is_some_and(|mend| mend.contains("CONFIG_DEBUG_INFO_BTF=y")));
        assert_eq!(btf(Err(&error), Ok(1)).status, Status::Broken);
    }

    #[test]
    fn absent_members_are_named_with_what_they_cost() {
        assert_eq!(members(Ok(Vec::new())).status, Status::Ok);
        let check = members(Ok(vec![("io_kiocb", "cqe.fd"), ("request", "q"), ("gendisk", "major")]));
        assert_eq!((check.status, check.required), (Status::Missing, false));
        assert_eq!(check.detail, "this kernel has no io_kiocb.cqe.fd, request.q, gendisk.major");
        let cost = "reads of the method io_uring are missing; the devices are missing";
        assert_eq!(check.cost.as_deref(), Some(cost));
        let ambiguous = members(Err(BtfError::AmbiguousStructure("file".to_owned())));
        assert_eq!(ambiguous.status, Status::Broken);
    }

    #[test]
    fn tracefs_is_no_condition() {
        let mounted = tracefs("proc /proc proc rw 0 0\ntracefs /sys/kernel/tracing tracefs rw,nosuid 0 0\n");
        assert!(
            mounted.detail.starts_with("mounted at /sys/kernel/tracing; not needed"),
            "{}",
            mounted.detail
        );
        let absent = tracefs("proc /proc proc rw 0 0\n\nodd\n");
        assert!(absent.detail.starts_with("not mounted; not needed"), "{}", absent.detail);
        assert_eq!(absent.status, Status::Ok);
    }

    #[test]
    fn what_cannot_be_read_is_not_known_rather_than_well() {
        assert_eq!(jit_check(Ok("1")).status, Status::Ok);
        assert_eq!((jit_check(Ok("0")).status, jit_check(Ok("2")).status), (Status::Broken, Status::Broken));
        assert_eq!(statistics_check(Ok("1")).status, Status::Ok);
        assert_eq!(statistics_check(Ok("0")).status, Status::Missing);
        let denied = Err(io::ErrorKind::PermissionDenied);
        for check in [jit_check(denied), statistics_check(denied), io_uring(Some(true), denied, denied)] {
            assert_eq!((check.status, check.required), (Status::Missing, false), "{check:?}");
            assert!(check.detail.starts_with("not known"), "{check:?}");
            assert!(check.cost.is_some() && check.mend.is_some(), "{check:?}");
        }
    }

    #[test]
    fn io_uring_may_be_restricted() {
        let absent = Err(io::ErrorKind::NotFound);
        assert_eq!(io_uring(Some(true), Ok("0"), Ok("-1")).status, Status::Ok);
        assert_eq!(io_uring(Some(true), absent, absent).status, Status::Ok, "before 6.6");
        assert_eq!(io_uring(Some(false), absent, absent).status, Status::Missing);
        assert_eq!(io_uring(None, absent, absent).status, Status::Missing);
        assert_eq!(io_uring(Some(true), Ok("2"), Ok("-1")).status, Status::Missing);
        assert!(io_uring(Some(true), Ok("1"), Ok("-1")).detail.contains("CAP_SYS_ADMIN"));
        assert!(io_uring(Some(true), Ok("1"), Ok("26")).detail.contains("group 26"));
    }
}
