//! Undoing mounts and loop devices, one's own or those of a process that was killed.

use std::{
    fs,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use procfs::process::{MountInfo, Process};
use rustix::{
    io::Errno,
    mount::{MountFlags, UnmountFlags, mount, unmount},
};

use crate::tool;

/// How long something that is still in use is waited for; a process that was just killed holds its files for a moment.
const PATIENCE: Duration = Duration::from_secs(3);
/// Between two attempts.
const RETRY: Duration = Duration::from_millis(20);

/// Unmounts all below `folder`, the last first, and detaches the loop devices whose files are there.
///
/// What is still in use is cut off: unmounted lazily, and a FUSE file system aborted first, so that nothing waits for it.
pub(crate) fn release(folder: &Path) -> Result<()> {
    // As the kernel shows it; and where there is no folder, nothing can be mounted.
    let Ok(folder) = folder.canonicalize() else { return Ok(()) };
    for mount in mounts_below(&folder)?.iter().rev() {
        if let Err(error) = detach_loops_below(&mount.mount_point) {
            // The mounts are cut off all the same.
            eprintln!("warning: cannot detach a loop device: {error:#}");
        }
        if !patiently(|| unmount(&mount.mount_point, UnmountFlags::empty())) {
            if mount.fs_type.starts_with("fuse") {
                abort(mount, &folder)?;
            }
            unmount(&mount.mount_point, UnmountFlags::DETACH)
                .with_context(|| format!("cannot unmount {}", mount.mount_point.display()))?;
        }
    }
    Ok(())
}

/// What is mounted below a folder, in the order in which it was.
fn mounts_below(folder: &Path) -> Result<Vec<MountInfo>> {
    let mounts =
        Process::myself().and_then(|me| me.mountinfo()).context("cannot read the table of mounts")?;
    Ok(mounts.into_iter().filter(|mount| mount.mount_point.starts_with(folder)).collect())
}

/// Whether it went well before the patience ended. Whatever is wrong except use will not get better.
fn patiently(attempt: impl Fn() -> rustix::io::Result<()>) -> bool {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match attempt() {
            // Invalid: it is not mounted any more.
            Ok(()) | Err(Errno::INVAL) => return true,
            Err(Errno::BUSY) if Instant::now() < deadline => thread::sleep(RETRY),
            Err(_) => return false,
        }
    }
}

/// Detaches the loop devices whose files are below a folder, and waits until they are.
fn detach_loops_below(folder: &Path) -> Result<()> {
    for device in loops_below(folder) {
        let node = Path::new("/dev").join(device.file_name().unwrap_or_default());
        tool::run(Command::new(tool::find_program("losetup")?).arg("--detach").arg(&node))?;
        // One that is still in use is detached by the kernel when it no longer is.
        let deadline = Instant::now() + PATIENCE;
        while device.join("loop/backing_file").exists() && Instant::now() < deadline {
            thread::sleep(RETRY);
        }
    }
    Ok(())
}

/// Folders `/sys/block/loopN` of the loop devices whose files are below a folder.
pub(crate) fn loops_below(folder: &Path) -> Vec<PathBuf> {
    let Ok(devices) = fs::read_dir("/sys/block") else { return Vec::new() };
    let is_below = |device: &PathBuf| {
        // As bytes: the kernel may add " (deleted)", which is of no matter here.
        let file = fs::read(device.join("loop/backing_file")).unwrap_or_default();
        Path::new(std::ffi::OsStr::from_bytes(&file)).starts_with(folder)
    };
    devices.flatten().map(|entry| entry.path()).filter(is_below).collect()
}

/// Makes all requests to a FUSE file system fail, those too that wait for an answer that never comes.
fn abort(fuse: &MountInfo, folder: &Path) -> Result<()> {
    // The connection's number is the file system's device number, whose major is 0.
    let connection = fuse.majmin.split(':').nth(1).unwrap_or_default();
    // The usual place is /sys/fs/fuse/connections, where it is often not mounted.
    let control = folder.join("fusectl");
    fs::create_dir_all(&control).context("cannot make a folder to mount fusectl on")?;
    mount("fusectl", &control, "fusectl", MountFlags::empty(), None).context("cannot mount fusectl")?;
    let aborted = fs::write(control.join(connection).join("abort"), "1");
    unmount(&control, UnmountFlags::DETACH).context("cannot unmount fusectl")?;
    match aborted {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).context("cannot abort a FUSE connection")
        }
        // Not there: it has ended by itself.
        _ => Ok(()),
    }
}
