//! A limit to the reads a second that a server's processes may have on a device: the block layer holds back what is beyond
//! it, before any driver sees it.
//!
//! The kernel's `blkio.throttle.read_iops_device` (`Documentation/admin-guide/cgroup-v1/blkio-controller.rst`).

use std::{
    fs,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use crate::{Cluster, process as proc};

/// Where the controller is mounted.
const CONTROLLER: &str = "/sys/fs/cgroup/blkio";
/// All groups' names begin like this; PID and start time of the process that made it follow.
const PREFIX: &str = "pgiotrace-";
/// How often a group's removal is tried: processes that have just left it may hold it for a moment.
const REMOVALS: u32 = 100;

/// A limit that holds until this is dropped, or at the latest until the next one is made.
#[derive(Debug)]
pub struct Throttle {
    group: PathBuf,
}

impl Throttle {
    /// Limits all processes of a server, those to come included.
    ///
    /// # Errors
    ///
    /// When the controller is not there, or this process may not use it.
    pub fn reads_per_second(cluster: &Cluster, (major, minor): (u32, u32), reads: u32) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        sweep_stale();
        let controller = Path::new(CONTROLLER);
        ensure!(
            controller.join("blkio.throttle.read_iops_device").exists(),
            "cannot limit reads: {CONTROLLER} is no mounted blkio controller of version 1"
        );
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let owner = process::id();
        let start = proc::start_time(owner).context("cannot tell when this process started")?;
        let group = controller.join(format!("{PREFIX}{owner}-{start}-{number}"));
        fs::create_dir(&group).with_context(|| format!("cannot make the group {}", group.display()))?;
        let throttle = Self { group };
        throttle.write("blkio.throttle.read_iops_device", &format!("{major}:{minor} {reads}"))?;
        let postmaster = cluster.postmaster_pid()?;
        throttle.write("cgroup.procs", &postmaster.to_string())?;
        // From here on, its new children are born into the group.
        for child in proc::children_of(postmaster) {
            // It may have ended meanwhile.
            let _ = throttle.write("cgroup.procs", &child.to_string());
        }
        Ok(throttle)
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.group.join(file);
        fs::write(&path, text).with_context(|| format!("cannot write {text} to {}", path.display()))
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        if !remove(&self.group) {
            eprintln!("warning: cannot remove the group {}", self.group.display());
        }
    }
}

/// Removes the groups of processes that were killed before they could.
fn sweep_stale() {
    for entry in fs::read_dir(CONTROLLER).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(owner) = name.strip_prefix(PREFIX) else { continue };
        let mut parts = owner.split('-');
        let (pid, start) = (parts.next().and_then(|pid| pid.parse().ok()), parts.next());
        if pid.and_then(proc::start_time).map(|start| start.to_string()).as_deref() != start {
            remove(&entry.path());
        }
    }
}

/// Sets the group's processes free and removes it; whether that worked.
fn remove(group: &Path) -> bool {
    for _ in 0..REMOVALS {
        for pid in fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default().lines() {
            let _ = fs::write(Path::new(CONTROLLER).join("cgroup.procs"), pid);
        }
        if fs::remove_dir(group).is_ok() || !group.exists() {
            return true;
        }
        thread::sleep(Duration::from_millis(10));
    }
    false
}
