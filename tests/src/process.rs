//! Starting, awaiting and ending processes.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::Path,
    process::{Child, Command, ExitStatus},
    sync::{Mutex, OnceLock, PoisonError, mpsc},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
};

struct Job {
    command: Command,
    reply: mpsc::Sender<io::Result<Child>>,
}

/// Starts `command` from a thread that lives as long as this process.
///
/// The kernel sends the parent-death signal when the *thread* that started a child ends, and a test's thread ends before
/// the suite does.
pub(crate) fn spawn_from_lasting_thread(command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<Mutex<mpsc::Sender<Job>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, jobs) = mpsc::channel::<Job>();
        thread::spawn(move || {
            for mut job in jobs {
                // A caller that is gone does not want the answer.
                let _ = job.reply.send(job.command.spawn());
            }
        });
        Mutex::new(sender)
    });
    let (reply, answer) = mpsc::channel();
    let gone = || io::Error::other("the thread that starts servers is gone");
    let sender = spawner.lock().unwrap_or_else(PoisonError::into_inner);
    sender.send(Job { command, reply }).map_err(|_| gone())?;
    answer.recv().map_err(|_| gone())?
}

/// Waits until `child` has ended, at most `timeout`; `None` when it still runs then.
///
/// # Errors
///
/// When the child cannot be waited for, because somebody else already did.
pub fn wait_timeout(child: &mut Child, timeout: Duration) -> Result<Option<ExitStatus>> {
    if let Some(status) = child.try_wait().context("cannot ask for the state of a child process")? {
        return Ok(Some(status));
    }
    await_exit(Pid::from_child(child), timeout)?;
    child.try_wait().context("cannot ask for the state of a child process")
}

/// Waits until the process has ended or the time is over; a process that is already gone is no error.
fn await_exit(pid: Pid, timeout: Duration) -> Result<()> {
    let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(Errno::SRCH) => return Ok(()),
        Err(error) => return Err(error).context("cannot open a pidfd to wait for a process"),
    };
    let timeout = Timespec::try_from(timeout).context("a timeout is too long for poll")?;
    let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
    poll(&mut fds, Some(&timeout)).context("cannot poll for the end of a process")?;
    Ok(())
}

/// Sends a signal; whether the process still existed.
#[expect(clippy::must_use_candidate, reason = "a process that is gone is as good as ended")]
pub fn signal(pid: u32, signal: Signal) -> bool {
    to_pid(pid).is_some_and(|pid| kill_process(pid, signal).is_ok())
}

fn to_pid(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

/// When the process started, in clock ticks since boot; `None` when there is none. Tells a reused PID from the old one.
pub(crate) fn start_time(pid: u32) -> Option<u64> {
    let process = procfs::process::Process::new(i32::try_from(pid).ok()?).ok()?;
    process.stat().ok().filter(|stat| stat.state != 'Z').map(|stat| stat.starttime)
}

/// Kills every process whose working directory is `dir`, and waits until they are gone.
///
/// Compared by device and inode: the path that the kernel shows for a process in another mount namespace is not ours.
pub(crate) fn kill_all_in(dir: &Path) {
    let Ok(wanted) = fs::metadata(dir) else { return };
    for pid in all_pids() {
        let here = fs::metadata(format!("/proc/{pid}/cwd"))
            .is_ok_and(|cwd| (cwd.dev(), cwd.ino()) == (wanted.dev(), wanted.ino()));
        if here
            && signal(pid, Signal::KILL)
            && let Some(pid) = to_pid(pid)
        {
            // A process that does not end within seconds of SIGKILL hangs in the kernel: waiting longer helps nobody.
            let _ = await_exit(pid, Duration::from_secs(10));
        }
    }
}

/// Asks every child of this process to end, and says which these are.
pub(crate) fn terminate_children() -> Vec<u32> {
    children_of(std::process::id()).into_iter().filter(|pid| signal(*pid, Signal::TERM)).collect()
}

/// Processes that another one has started and that still run.
pub(crate) fn children_of(parent: u32) -> Vec<u32> {
    let parent = i32::try_from(parent).unwrap_or_default();
    let is_child = |pid: &u32| {
        let process = i32::try_from(*pid).ok().and_then(|pid| procfs::process::Process::new(pid).ok());
        process.and_then(|process| process.stat().ok()).is_some_and(|stat| stat.ppid == parent)
    };
    all_pids().into_iter().filter(is_child).collect()
}

/// Waits, a few seconds for each, until the processes have ended.
pub(crate) fn await_all(pids: &[u32]) {
    for pid in pids.iter().filter_map(|pid| to_pid(*pid)) {
        // One that does not end is not ours to kill: it may be root's, at work for us through sudo.
        let _ = await_exit(pid, Duration::from_secs(10));
    }
}

fn all_pids() -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}
