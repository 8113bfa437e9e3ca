//! The kernel side: maps and program entry points. What each program does stands in the module of its stage.

#![no_std]
#![no_main]
// Inline assembly for the target is how atomic additions are written there: see `atomic`.
#![feature(asm_experimental_arch)]
#![expect(
    clippy::inline_always,
    reason = "a program is one function to the verifier; calls cost stack, of which there are 512 bytes"
)]
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "arguments and registers are u64 whatever they carry, and -1 is a value"
)]
#![expect(clippy::similar_names, reason = "tgid and tid are the kernel's own names")]
#![expect(clippy::needless_pass_by_value, reason = "the macros hand a program its context by value")]
#![expect(
    missing_docs,
    reason = "a binary has no callers; the macros that make the programs drop their docs"
)]

mod atomic;
mod block;
mod counters;
mod files;
mod finish;
mod handles;
mod io_uring;
mod kernel;
mod maps;
mod probes;
mod process;
mod syscall;
mod waits;

use aya_ebpf::{
    macros::{btf_tracepoint, raw_tracepoint, uprobe},
    programs::{BtfTracePointContext, ProbeContext, RawTracePointContext},
};

/// Defines one stage's two programs, for a BTF tracepoint and for the raw tracepoint of the same arguments.
macro_rules! programs {
    ($($(#[$doc:meta])* $name:ident, $raw_name:ident => $stage:path;)*) => {$(
        $(#[$doc])*
        #[btf_tracepoint]
        pub fn $name(ctx: BtfTracePointContext) -> i32 {
            $stage(&kernel::Args::Btf(ctx));
            0
        }

        $(#[$doc])*
        #[raw_tracepoint]
        pub fn $raw_name(ctx: RawTracePointContext) -> i32 {
            $stage(&kernel::Args::Raw(ctx));
            0
        }
    )*};
}

programs! {
    /// A system call begins: `sys_enter(struct pt_regs *regs, long id)`.
    sys_enter, sys_enter_raw => syscall::enter;
    /// A system call ends: `sys_exit(struct pt_regs *regs, long ret)`.
    sys_exit, sys_exit_raw => syscall::exit;
    /// `sched_process_fork(struct task_struct *parent, struct task_struct *child)`.
    process_fork, process_fork_raw => process::fork;
    /// `sched_process_exit(struct task_struct *p, …)`.
    process_exit, process_exit_raw => process::exit;
    /// `io_uring_submit_req(struct io_kiocb *req)`; until 6.2 `io_uring_submit_sqe(req, bool force_nonblock)`.
    io_uring_submit, io_uring_submit_raw => io_uring::submit;
    /// `io_uring_queue_async_work(struct io_kiocb *req, int rw)`.
    io_uring_punt, io_uring_punt_raw => io_uring::punt;
    /// `io_uring_complete(struct io_ring_ctx *ctx, void *req, struct io_uring_cqe *cqe)`.
    io_uring_done_cqe, io_uring_done_cqe_raw => io_uring::complete_cqe;
    /// Before that: `io_uring_complete(void *ctx, void *req, u64 user_data, int res, unsigned cflags, …)`.
    io_uring_done_res, io_uring_done_res_raw => io_uring::complete_res;
    /// `block_bio_queue(struct bio *bio)`.
    block_queue, block_queue_raw => block::queued;
    /// `block_io_start(struct request *rq)`; before 6.5 `block_getrq(struct bio *bio)` has no request.
    block_start, block_start_raw => block::started;
    /// `block_rq_issue(struct request *rq)`.
    block_issue, block_issue_raw => block::issued;
    /// `block_rq_complete(struct request *rq, blk_status_t error, unsigned int nr_bytes)`.
    block_done, block_done_raw => block::completed;
    /// `block_split(struct bio *bio, unsigned int new_sector)`.
    block_split, block_split_raw => block::split;
    /// `block_bio_backmerge(struct bio *bio)`.
    block_back_merge, block_back_merge_raw => block::merged_bio;
    /// `block_bio_frontmerge(struct bio *bio)`.
    block_front_merge, block_front_merge_raw => block::merged_bio;
    /// `block_rq_merge(struct request *rq)`.
    block_merge, block_merge_raw => block::merged_request;
}

/// A batch of reads is handed over; see `probes`.
#[uprobe]
pub fn pgaio_submit(ctx: ProbeContext) -> u32 {
    probes::submit(&ctx);
    0
}

/// A process begins to wait for a read; see `probes`.
#[uprobe]
pub fn pgaio_wref_wait(ctx: ProbeContext) -> u32 {
    probes::wait(&ctx);
    0
}

/// Does nothing: what a trap costs is measured with it.
#[uprobe]
pub fn empty_probe(_ctx: ProbeContext) -> u32 {
    0
}

/// The licence that the kernel asks for; the GPL part opens the helpers that read memory.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    // Never reached: what could panic is checked before. Were it reached, the verifier would refuse the program, since it
    // takes no endless loop.
    loop {}
}
