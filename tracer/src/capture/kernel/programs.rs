//! The programs: what each is for, how it may be attached, and what is lost without it.
//!
//! One table. Each entry attaches on its own, by the first of its alternatives that the running kernel takes.

use aya::{
    Btf, Ebpf,
    programs::{
        BtfTracePoint, ProgramError, RawTracePoint, raw_trace_point::RawTracePointLink,
        tp_btf::BtfTracePointLink,
    },
};

use super::btf::KernelTypes;

/// A program of the kernel object that serves one purpose.
#[derive(Debug)]
pub struct Program {
    /// What `doctor` calls it.
    pub name: &'static str,
    /// Tried in this order.
    pub alternatives: &'static [Alternative],
    /// Whether nothing can be traced without it.
    pub required: bool,
    /// What a user loses without it.
    pub lost_without: &'static str,
    /// When it is detached at the end.
    pub phase: Phase,
}

/// Where a program stands between the beginnings and the ends of reads. Beginnings attach last and detach first, so
/// that no read is seen to begin whose end could be missed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Keeps the set of processes.
    Processes,
    /// Sees reads or requests end.
    Ends,
    /// Sees reads begin.
    Begins,
}

/// One way to attach.
#[derive(Debug)]
pub struct Alternative {
    /// Program in the kernel object.
    pub program: &'static str,
    /// Kind of attachment.
    pub kind: Kind,
    /// Tracepoint.
    pub tracepoint: &'static str,
    /// Fewest and most arguments of the tracepoint that the program understands.
    pub arguments: (usize, usize),
}

/// How a program is attached, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// BTF tracepoint (`tp_btf`).
    Btf,
    /// Raw tracepoint.
    Raw,
}

const fn btf(program: &'static str, tracepoint: &'static str, arguments: (usize, usize)) -> Alternative {
    Alternative { program, kind: Kind::Btf, tracepoint, arguments }
}

const fn raw(program: &'static str, tracepoint: &'static str, arguments: (usize, usize)) -> Alternative {
    Alternative { program, kind: Kind::Raw, tracepoint, arguments }
}

/// Any number of arguments from `fewest`: the kernel only ever appended to these.
const fn from(fewest: usize) -> (usize, usize) {
    (fewest, usize::MAX)
}

/// All programs.
pub const PROGRAMS: &[Program] = &[
    Program {
        name: "process start",
        alternatives: &[
            btf("process_fork", "sched_process_fork", from(2)),
            raw("process_fork_raw", "sched_process_fork", from(2)),
        ],
        required: true,
        lost_without: "backends that connect during the trace",
        phase: Phase::Processes,
    },
    Program {
        name: "process end",
        alternatives: &[
            btf("process_exit", "sched_process_exit", from(1)),
            raw("process_exit_raw", "sched_process_exit", from(1)),
        ],
        required: true,
        lost_without: "the difference between an ended backend and a later process of its PID",
        phase: Phase::Processes,
    },
    Program {
        name: "read system calls, end",
        alternatives: &[btf("sys_exit", "sys_exit", from(2)), raw("sys_exit_raw", "sys_exit", from(2))],
        required: true,
        lost_without: "all reads of the methods sync and worker",
        phase: Phase::Ends,
    },
    Program {
        name: "read system calls, start",
        alternatives: &[btf("sys_enter", "sys_enter", from(2)), raw("sys_enter_raw", "sys_enter", from(2))],
        required: true,
        lost_without: "all reads of the methods sync and worker",
        phase: Phase::Begins,
    },
    Program {
        name: "io_uring completion",
        alternatives: &[
            btf("io_uring_done_cqe", "io_uring_complete", (3, 3)),
            raw("io_uring_done_cqe_raw", "io_uring_complete", (3, 3)),
            // From 5.17 on the request is an argument, and until 6.11 the result is one of its own.
            btf("io_uring_done_res", "io_uring_complete", (5, 7)),
            raw("io_uring_done_res_raw", "io_uring_complete", (5, 7)),
        ],
        required: false,
        lost_without: "all reads of the method io_uring",
        phase: Phase::Ends,
    },
    Program {
        name: "io_uring hand-over to a kernel thread",
        alternatives: &[
            btf("io_uring_punt", "io_uring_queue_async_work", (2, 2)),
            raw("io_uring_punt_raw", "io_uring_queue_async_work", (2, 2)),
        ],
        required: false,
        lost_without: "which io_uring reads a kernel thread (iou-wrk) executed",
        phase: Phase::Ends,
    },
    Program {
        name: "io_uring submission",
        alternatives: &[
            btf("io_uring_submit", "io_uring_submit_req", (1, 1)),
            raw("io_uring_submit_raw", "io_uring_submit_req", (1, 1)),
            // Its name until 6.3; before 6.0 its first argument was the ring, not the request.
            btf("io_uring_submit", "io_uring_submit_sqe", (2, 2)),
            raw("io_uring_submit_raw", "io_uring_submit_sqe", (2, 2)),
        ],
        required: false,
        lost_without: "all reads of the method io_uring",
        phase: Phase::Begins,
    },
    Program {
        name: "block request completed",
        alternatives: &[
            btf("block_done", "block_rq_complete", (3, 3)),
            raw("block_done_raw", "block_rq_complete", (3, 3)),
        ],
        required: false,
        lost_without: "the devices",
        phase: Phase::Ends,
    },
    Program {
        name: "block request issued",
        alternatives: &[
            // Until 5.11 the queue came first.
            btf("block_issue", "block_rq_issue", (1, 1)),
            raw("block_issue_raw", "block_rq_issue", (1, 1)),
        ],
        required: false,
        lost_without: "the devices",
        phase: Phase::Ends,
    },
    Program {
        name: "block I/O queued",
        alternatives: &[
            // Until 5.11 the queue came first.
            btf("block_queue", "block_bio_queue", (1, 1)),
            raw("block_queue_raw", "block_bio_queue", (1, 1)),
        ],
        required: false,
        lost_without: "the time that requests wait in the block layer for a free slot",
        phase: Phase::Begins,
    },
    Program {
        name: "block request started",
        alternatives: &[
            btf("block_start", "block_io_start", (1, 1)),
            raw("block_start_raw", "block_io_start", (1, 1)),
        ],
        required: false,
        lost_without: "the time that requests wait in the block layer before a device gets them, and which reads they are for",
        phase: Phase::Begins,
    },
    Program {
        name: "block request split",
        alternatives: &[
            // Until 5.11 the queue came first.
            btf("block_split", "block_split", (2, 2)),
            raw("block_split_raw", "block_split", (2, 2)),
        ],
        required: false,
        lost_without: "that a read waits for all parts of what was too long for one request",
        phase: Phase::Begins,
    },
    Program {
        name: "block request merged behind another",
        alternatives: &[
            // Until 5.11 the queue came first, as in those below.
            btf("block_back_merge", "block_bio_backmerge", (1, 1)),
            raw("block_back_merge_raw", "block_bio_backmerge", (1, 1)),
        ],
        required: false,
        lost_without: "direct reads that one request serves together",
        phase: Phase::Ends,
    },
    Program {
        name: "block request merged before another",
        alternatives: &[
            btf("block_front_merge", "block_bio_frontmerge", (1, 1)),
            raw("block_front_merge_raw", "block_bio_frontmerge", (1, 1)),
        ],
        required: false,
        lost_without: "direct reads that one request serves together",
        phase: Phase::Ends,
    },
    Program {
        name: "block requests merged",
        alternatives: &[
            btf("block_merge", "block_rq_merge", (1, 1)),
            raw("block_merge_raw", "block_rq_merge", (1, 1)),
        ],
        required: false,
        lost_without: "direct reads that one request serves together",
        phase: Phase::Ends,
    },
];

/// What became of a program.
#[derive(Debug)]
pub struct Outcome {
    /// Which one.
    pub program: &'static Program,
    /// How it is attached, or why not.
    pub result: Result<Attached, Refusal>,
}

/// An attached program.
#[derive(Debug)]
pub struct Attached {
    /// The alternative that the kernel took.
    pub alternative: &'static Alternative,
    /// Detaches when dropped.
    _link: Link,
}

/// Keeps a program attached for as long as it lives.
#[derive(Debug)]
#[expect(dead_code, reason = "the links are only held, for their Drop")]
enum Link {
    Btf(BtfTracePointLink),
    Raw(RawTracePointLink),
}

/// Why a program is not attached.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The kernel has none of the tracepoints, or in a form that the program does not know.
    #[error("this kernel has no tracepoint {0} of a known form")]
    Absent(String),
    /// The kernel refused it.
    #[error("attaching {program} to the tracepoint {tracepoint} failed: {source}")]
    Refused {
        /// Program in the kernel object.
        program: &'static str,
        /// Tracepoint.
        tracepoint: &'static str,
        /// What the kernel said.
        #[source]
        source: ProgramError,
    },
}

impl Refusal {
    /// Whether the kernel lacks the feature, as opposed to refusing it.
    #[must_use]
    pub fn is_absence(&self) -> bool {
        matches!(self, Self::Absent(_))
    }
}

/// Attaches the program in the first way that the kernel takes.
pub fn attach(ebpf: &mut Ebpf, btf: &Btf, types: &KernelTypes, program: &'static Program) -> Outcome {
    let mut refusal = None;
    for alternative in program.alternatives {
        let arguments = types.tracepoint_arguments(alternative.tracepoint);
        let (fewest, most) = alternative.arguments;
        if !arguments.is_some_and(|count| (fewest..=most).contains(&count)) {
            continue;
        }
        match attach_one(ebpf, btf, alternative) {
            Ok(link) => return Outcome { program, result: Ok(Attached { alternative, _link: link }) },
            // The first refusal is of the best alternative, and says most.
            Err(source) => refusal = refusal.or(Some((alternative, source))),
        }
    }
    let result = Err(match refusal {
        Some((alternative, source)) => {
            Refusal::Refused { program: alternative.program, tracepoint: alternative.tracepoint, source }
        }
        None => Refusal::Absent(tracepoints_of(program)),
    });
    Outcome { program, result }
}

fn tracepoints_of(program: &Program) -> String {
    let mut names: Vec<_> = program.alternatives.iter().map(|alternative| alternative.tracepoint).collect();
    names.dedup();
    names.join(" or ")
}

fn attach_one(ebpf: &mut Ebpf, btf: &Btf, alternative: &Alternative) -> Result<Link, ProgramError> {
    let program = ebpf.program_mut(alternative.program).ok_or(ProgramError::NotLoaded)?;
    match alternative.kind {
        Kind::Btf => {
            let program: &mut BtfTracePoint = program.try_into()?;
            program.load(alternative.tracepoint, btf)?;
            let link = program.attach()?;
            Ok(Link::Btf(program.take_link(link)?))
        }
        Kind::Raw => {
            let program: &mut RawTracePoint = program.try_into()?;
            program.load()?;
            let link = program.attach(alternative.tracepoint)?;
            Ok(Link::Raw(program.take_link(link)?))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_program_can_be_attached_in_two_kinds() {
        for program in PROGRAMS {
            for kind in [Kind::Btf, Kind::Raw] {
                let has = program.alternatives.iter().any(|alternative| alternative.kind == kind);
                assert!(has, "{} has no alternative of kind {kind:?}", program.name);
            }
        }
    }
}
