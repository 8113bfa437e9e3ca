//! Whether the programs load and attach: each is really tried, and detached at once.

use tokio::runtime;

use super::privileges::Privileges;
use super::topic::{Problem, Topic, first_line};
use crate::capture::kernel::programs::{Alternative, Kind, Outcome, PROGRAMS, Phase, Program};
use crate::capture::kernel::{Kernel, Sizes};
use crate::model::Check;

const AREA: &str = "programs";
const ALL: Topic = Topic::required(AREA, "kernel side");

const NOTHING: &str = "nothing can be traced";

/// As small as they may be: nothing is traced. The ring is one page of the largest kind.
const SIZES: Sizes = Sizes { processes: 1, handles: 1, ring_bytes: 64 << 10 };

/// All checks of this area.
pub(super) fn checks(privileges: &Privileges) -> Vec<Check> {
    if !privileges.may_load() {
        let detail = "not tried, because the privileges to load programs are missing";
        return vec![ALL.missing(Problem::new(detail, NOTHING).mend("mend the privileges first"))];
    }
    // The ring registers with the runtime of the thread. What is declared first is dropped last.
    let runtime = match runtime::Builder::new_current_thread().enable_io().build() {
        Ok(runtime) => runtime,
        Err(error) => return vec![ALL.broken(Problem::new(first_line(&error), NOTHING))],
    };
    let _guard = runtime.enter();
    let mut kernel = match Kernel::load(SIZES) {
        Ok(kernel) => kernel,
        Err(error) => return vec![ALL.broken(Problem::from_sentence(&first_line(&error), NOTHING))],
    };
    let phases = [Phase::Processes, Phase::Ends, Phase::Begins];
    let mut outcomes: Vec<_> = phases.into_iter().flat_map(|phase| kernel.attach_phase(phase)).collect();
    outcomes.sort_by_key(|outcome| PROGRAMS.iter().position(|program| program.name == outcome.program.name));
    let mut checks: Vec<_> = outcomes.iter().map(check).collect();
    checks.push(probes(&mut kernel));
    checks
}

/// Whether the server's functions could be probed: tried on one of the tracer's own.
fn probes(kernel: &mut Kernel) -> Check {
    let topic = Topic::optional(AREA, "probes of stat --pg-probes");
    match kernel.trap_ns() {
        Ok(nanos) => topic.ok(format!("uprobes attach; each trap costs the server about {nanos:.0} ns")),
        Err(error) => topic.missing(Problem::from_sentence(&first_line(&error), "stat refuses --pg-probes")),
    }
}

fn check(outcome: &Outcome) -> Check {
    let Outcome { program, result } = outcome;
    let topic = if program.required { Topic::required } else { Topic::optional }(AREA, program.name);
    let problem = |detail: String| Problem::new(detail, format!("{} would be missing", program.lost_without));
    match result {
        Ok(attached) => topic.ok(describe(attached.alternative)),
        Err(refusal) if refusal.is_absence() => {
            let problem = problem(refusal.to_string());
            topic.missing(match mend_absence(program) {
                Some(mend) => problem.mend(mend),
                None => problem,
            })
        }
        Err(refusal) => {
            let mend = "report this line with the output of uname -r as an issue of pgiotrace";
            topic.broken(problem(first_line(refusal)).mend(mend))
        }
    }
}

/// "BTF tracepoint sys_enter".
fn describe(alternative: &Alternative) -> String {
    let kind = match alternative.kind {
        Kind::Btf => "BTF",
        Kind::Raw => "raw",
    };
    format!("{kind} tracepoint {}", alternative.tracepoint)
}

/// What gives a kernel the tracepoints of a program.
fn mend_absence(program: &Program) -> Option<&'static str> {
    let tracepoint = program.alternatives.first()?.tracepoint;
    match tracepoint.split('_').next()? {
        "io" => Some("boot Linux 6.0 or newer with CONFIG_IO_URING=y"),
        "sys" | "sched" => Some("boot a kernel with CONFIG_TRACEPOINTS=y and CONFIG_BPF_EVENTS=y"),
        "block" if tracepoint == "block_io_start" => Some("boot Linux 6.5 or newer"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use aya::programs::ProgramError;

    use super::*;
    use crate::capture::kernel::programs::Refusal;
    use crate::model::Status;

    fn refused(program: &'static Program, refusal: Refusal) -> Check {
        check(&Outcome { program, result: Err(refusal) })
    }

    #[test]
    fn absence_is_missing_and_refusal_is_broken() {
        for program in PROGRAMS {
            let missing = refused(program, Refusal::Absent("a".to_owned()));
            assert_eq!((missing.status, missing.required), (Status::Missing, program.required));
            assert!(missing.cost.is_some_and(|cost| cost.contains(program.lost_without)));
            let source = ProgramError::IOError(io::Error::from_raw_os_error(7));
            let broken = refused(program, Refusal::Refused { program: "p", tracepoint: "t", source });
            assert_eq!(broken.status, Status::Broken);
            assert!(broken.detail.contains("os error 7"), "{}", broken.detail);
        }
    }

    #[test]
    fn what_is_required_can_be_mended() {
        let required = PROGRAMS.iter().filter(|program| program.required);
        assert!(required.clone().count() > 0);
        for program in required {
            assert!(mend_absence(program).is_some(), "{}", program.name);
        }
    }

    #[test]
    fn the_kind_of_attachment_is_named() {
        let names: Vec<_> = PROGRAMS[0].alternatives.iter().map(describe).collect();
        assert_eq!(names, ["BTF tracepoint sched_process_fork", "raw tracepoint sched_process_fork"]);
    }
}
