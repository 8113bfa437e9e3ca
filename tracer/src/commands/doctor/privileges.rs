//! What this process may do.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use procfs::process::Process;

use super::topic::{FileText, Problem, Topic, read};
use crate::model::Check;

const AREA: &str = "privileges";
const BPF: Topic = Topic::required(AREA, "loading programs");
const PERFMON: Topic = Topic::required(AREA, "reading the kernel's events");
const PROCESSES: Topic = Topic::optional(AREA, "looking into the server's processes");
const LOCKDOWN: Topic = Topic::required(AREA, "kernel lockdown");
const PID_NAMESPACE: Topic = Topic::required(AREA, "PID namespace");

const NOTHING: &str = "nothing can be traced";
const MEND: &str = "run pgiotrace as root (sudo pgiotrace), or with the capabilities CAP_BPF, CAP_PERFMON, \
    CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH";

/// Numbers of inodes of the initial namespaces: `PROC_USER_INIT_INO` and `PROC_PID_INIT_INO` in the kernel's
/// `include/linux/proc_ns.h`.
const INITIAL_USER_NAMESPACE: u64 = 0xEFFF_FFFD;
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Capabilities, as the kernel's `include/uapi/linux/capability.h` numbers them.
#[derive(Debug, Clone, Copy)]
enum Capability {
    DacOverride = 1,
    DacReadSearch = 2,
    SysPtrace = 19,
    SysAdmin = 21,
    Perfmon = 38,
    Bpf = 39,
}

/// The set `CapEff` of `/proc/PID/status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Capabilities(u64);

impl Capabilities {
    fn has(self, capability: Capability) -> bool {
        self.0 >> capability as u32 & 1 == 1
    }

    /// The first of some capabilities, each of which is enough.
    fn any(self, names: &[(Capability, &'static str)]) -> Option<&'static str> {
        names.iter().find(|(capability, _)| self.has(*capability)).map(|(_, name)| *name)
    }

    fn bpf(self) -> Option<&'static str> {
        self.any(&[(Capability::Bpf, "CAP_BPF"), (Capability::SysAdmin, "CAP_SYS_ADMIN")])
    }

    fn perfmon(self) -> Option<&'static str> {
        self.any(&[(Capability::Perfmon, "CAP_PERFMON"), (Capability::SysAdmin, "CAP_SYS_ADMIN")])
    }

    fn read_any_file(self) -> Option<&'static str> {
        self.any(&[
            (Capability::DacReadSearch, "CAP_DAC_READ_SEARCH"),
            (Capability::DacOverride, "CAP_DAC_OVERRIDE"),
        ])
    }
}

/// What this process may do, and where it stands.
pub(super) struct Privileges {
    /// `None` when `/proc/self/status` cannot be read.
    capabilities: Option<Capabilities>,
    user_namespace: Option<u64>,
    pid_namespace: Option<u64>,
}

impl Privileges {
    /// Asks `/proc`.
    pub(super) fn of_this_process() -> Self {
        let status = Process::myself().and_then(|process| process.status());
        let inode = |name: &str| fs::metadata(format!("/proc/self/ns/{name}")).map(|found| found.ino()).ok();
        Self {
            capabilities: status.map(|status| Capabilities(status.capeff)).ok(),
            user_namespace: inode("user"),
            pid_namespace: inode("pid"),
        }
    }

    /// Whether it makes sense to try the programs.
    pub(super) fn may_load(&self) -> bool {
        let is_initial = self.user_namespace.is_none_or(|inode| inode == INITIAL_USER_NAMESPACE);
        let capabilities = self.capabilities;
        is_initial && capabilities.is_some_and(|set| set.bpf().is_some() && set.perfmon().is_some())
    }

    /// All checks of this area.
    pub(super) fn checks(&self) -> Vec<Check> {
        let scope = read("/proc/sys/kernel/yama/ptrace_scope");
        let state = read("/sys/kernel/security/lockdown");
        let mut checks = match self.capabilities {
            None => vec![
                BPF.broken(
                    Problem::new("/proc/self/status cannot be read", NOTHING)
                        .mend("mount procfs: mount -t proc proc /proc"),
                ),
            ],
            Some(set) => vec![
                loading(BPF, set.bpf(), "CAP_BPF", self.user_namespace),
                loading(PERFMON, set.perfmon(), "CAP_PERFMON", self.user_namespace),
                processes(set, scope.as_deref().map_err(|kind| *kind)),
            ],
        };
        checks.push(lockdown(state.as_deref().map_err(|kind| *kind)));
        checks.push(pid_namespace(self.pid_namespace));
        checks
    }
}

/// `held`: the capability that allows it. `kernel.unprivileged_bpf_disabled` is of no matter: without a capability no
/// kernel loads tracing programs.
fn loading(topic: Topic, held: Option<&str>, wanted: &str, user_namespace: Option<u64>) -> Check {
    let Some(held) = held else {
        let detail = format!("neither {wanted} nor CAP_SYS_ADMIN is effective");
        return topic.missing(Problem::new(detail, NOTHING).mend(MEND));
    };
    if user_namespace.is_some_and(|inode| inode != INITIAL_USER_NAMESPACE) {
        let detail =
            format!("{held} holds only in this user namespace, and the kernel wants it in the initial one");
        return topic.broken(
            Problem::new(detail, NOTHING).mend("run pgiotrace on the host, outside of a rootless container"),
        );
    }
    topic.ok(held)
}

/// Servers of other users need both: `/proc/PID/cwd` and `mem` are guarded by ptrace's rules (`proc_pid_get_link` and
/// `proc_mem_open` in the kernel's `fs/proc/base.c`), and by the permissions of the data directory.
fn processes(set: Capabilities, ptrace_scope: FileText) -> Check {
    let cost = "owners of reads by io workers are only inferred from pg_aios, and relations of reads through io_uring are not \
        known";
    // YAMA_SCOPE_NO_ATTACH of security/yama/yama_lsm.c binds even root, and for /proc/PID/mem too.
    if ptrace_scope == Ok("3") {
        let detail = "kernel.yama.ptrace_scope is 3, so nobody may read a process's memory";
        let mend =
            "set kernel.yama.ptrace_scope=1 in /etc/sysctl.d and reboot: 3 cannot be taken back before";
        return PROCESSES.broken(Problem::new(detail, cost).mend(mend));
    }
    let trace = set.has(Capability::SysPtrace).then_some("CAP_SYS_PTRACE");
    let lacking = match (trace, set.read_any_file()) {
        (Some(trace), Some(read)) => return PROCESSES.ok(format!("{trace}, {read}")),
        (None, Some(_)) => "CAP_SYS_PTRACE is not effective",
        (Some(_), None) => "CAP_DAC_READ_SEARCH is not effective",
        (None, None) => "CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH are not effective",
    };
    let cost = format!("only servers of one's own user are found, and where Yama restricts ptrace, {cost}");
    PROCESSES.missing(Problem::new(lacking, cost).mend(MEND))
}

/// `text`: `[none] integrity confidentiality`, the state in brackets. Where it cannot be told, the programs tell: they
/// are really loaded.
fn lockdown(text: FileText) -> Check {
    let state = match text {
        Ok(text) => text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']')),
        Err(io::ErrorKind::NotFound) => {
            return LOCKDOWN.ok("off: the kernel shows no /sys/kernel/security/lockdown");
        }
        Err(kind) => {
            return LOCKDOWN
                .ok(format!("not known, since /sys/kernel/security/lockdown cannot be read: {kind}"));
        }
    };
    match state {
        // LOCKDOWN_BPF_READ_KERNEL (include/linux/security.h) comes after LOCKDOWN_INTEGRITY_MAX.
        Some("confidentiality") => {
            let problem = Problem::new("confidentiality: no program may read the kernel's memory", NOTHING);
            LOCKDOWN.broken(
                problem.mend("boot with lockdown=integrity or lockdown=none on the kernel's command line"),
            )
        }
        Some("none") => LOCKDOWN.ok("off"),
        Some(state) => LOCKDOWN.ok(format!("{state}, which lets programs read the kernel's memory")),
        None => LOCKDOWN.ok("not known, since /sys/kernel/security/lockdown names no state"),
    }
}

/// The kernel side sees PIDs of the initial namespace, the tracer those of its own.
fn pid_namespace(inode: Option<u64>) -> Check {
    match inode {
        Some(INITIAL_PID_NAMESPACE) => PID_NAMESPACE.ok("the initial one"),
        Some(_) => {
            let detail = "not the initial one: the kernel's PIDs are not those that pgiotrace sees";
            let mend = "run pgiotrace on the host, or its container with --pid=host";
            PID_NAMESPACE
                .broken(Problem::new(detail, "no process of the server would be recognised").mend(mend))
        }
        None => PID_NAMESPACE.broken(
            Problem::new(
                "not known, since /proc/self/ns/pid cannot be read",
                "processes may not be recognised",
            )
            .mend("mount procfs: mount -t proc proc /proc"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Status;

    const ROOT: Capabilities = Capabilities(0x1ff_ffff_ffff);

    fn set(capabilities: &[Capability]) -> Capabilities {
        Capabilities(capabilities.iter().fold(0, |set, capability| set | 1 << *capability as u32))
    }

    fn privileges(capabilities: Capabilities, user_namespace: u64) -> Privileges {
        Privileges {
            capabilities: Some(capabilities),
            user_namespace: Some(user_namespace),
            pid_namespace: Some(INITIAL_PID_NAMESPACE),
        }
    }

    #[test]
    fn either_the_fine_or_the_coarse_capability_is_enough() {
        assert_eq!((ROOT.bpf(), ROOT.perfmon()), (Some("CAP_BPF"), Some("CAP_PERFMON")));
        let coarse = set(&[Capability::SysAdmin]);
        assert_eq!((coarse.bpf(), coarse.perfmon()), (Some("CAP_SYS_ADMIN"), Some("CAP_SYS_ADMIN")));
        let fine = set(&[Capability::Bpf]);
        assert_eq!((fine.bpf(), fine.perfmon()), (Some("CAP_BPF"), None));
        // As /proc/self/status shows CAP_BPF and CAP_PERFMON.
        assert_eq!(set(&[Capability::Bpf, Capability::Perfmon]), Capabilities(0xc0_0000_0000));
    }

    #[test]
    fn programs_are_tried_only_where_they_could_load() {
        let both = set(&[Capability::Bpf, Capability::Perfmon]);
        assert!(privileges(both, INITIAL_USER_NAMESPACE).may_load());
        assert!(!privileges(set(&[Capability::Bpf]), INITIAL_USER_NAMESPACE).may_load());
        assert!(!privileges(set(&[]), INITIAL_USER_NAMESPACE).may_load());
        assert!(!privileges(ROOT, 4_026_532_001).may_load(), "root of a rootless container");
        assert!(!Privileges { capabilities: None, user_namespace: None, pid_namespace: None }.may_load());
    }

    #[test]
    fn a_missing_capability_says_how_to_get_it() {
        let check = loading(BPF, None, "CAP_BPF", Some(INITIAL_USER_NAMESPACE));
        assert_eq!((check.status, check.required), (Status::Missing, true));
        assert!(check.mend.is_some_and(|mend| mend.contains("sudo pgiotrace")));
        let rootless = loading(BPF, Some("CAP_BPF"), "CAP_BPF", Some(4_026_532_001));
        assert_eq!(rootless.status, Status::Broken);
    }

    #[test]
    fn processes_of_other_users_need_two_capabilities() {
        assert_eq!(processes(ROOT, Ok("1")).status, Status::Ok);
        let none = processes(set(&[]), Ok("1"));
        assert_eq!((none.status, none.required), (Status::Missing, false));
        assert_eq!(none.detail, "CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH are not effective");
        let half = processes(set(&[Capability::SysPtrace]), Err(io::ErrorKind::NotFound));
        assert_eq!(half.detail, "CAP_DAC_READ_SEARCH is not effective");
        assert_eq!(
            processes(set(&[Capability::SysPtrace, Capability::DacOverride]), Ok("0")).status,
            Status::Ok
        );
        assert_eq!(processes(ROOT, Ok("3")).status, Status::Broken, "Yama binds root too");
    }

    #[test]
    fn only_confidentiality_bars_tracing() {
        assert_eq!(lockdown(Ok("[none] integrity confidentiality")).detail, "off");
        assert_eq!(lockdown(Ok("none [integrity] confidentiality")).status, Status::Ok);
        let check = lockdown(Ok("none integrity [confidentiality]"));
        assert_eq!((check.status, check.required), (Status::Broken, true));
        assert_eq!(lockdown(Err(io::ErrorKind::NotFound)).status, Status::Ok);
        for text in [Ok(""), Ok("none integrity"), Err(io::ErrorKind::PermissionDenied)] {
            assert!(lockdown(text).detail.starts_with("not known"), "{text:?}");
        }
    }

    #[test]
    fn a_container_has_other_pids() {
        assert_eq!(pid_namespace(Some(INITIAL_PID_NAMESPACE)).status, Status::Ok);
        let container = pid_namespace(Some(4_026_532_180));
        assert_eq!((container.status, container.required), (Status::Broken, true));
        assert_eq!(pid_namespace(None).status, Status::Broken);
    }
}
