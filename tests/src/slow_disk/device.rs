//! The loop device on the served file, and the file system on that.

use std::{
    ffi::CStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use rustix::{
    fs::{major, minor, stat},
    mount::{MountFlags, mount},
};

use crate::tool::{find_program, run};

/// The longest request. FUSE splits what is longer than 256 pages (`fs.fuse.max_pages_limit`), or touches more than these
/// in part; half of it is never split, so each request of the loop device's is one of FUSE's.
const MAX_REQUEST_KIB: u32 = 512;

/// How many requests the device has at once: the kernel's own default (`BLKDEV_DEFAULT_RQ`, `include/linux/blkdev.h`).
const MAX_REQUESTS: &str = "128";

/// So much that a scan's reads are several requests at once.
const READ_AHEAD_KIB: &str = "8192";

/// What the disk is formatted with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystem {
    /// Any size from a few MiB on.
    Ext4,
    /// 300 MiB at least.
    Xfs,
}

impl FileSystem {
    fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }

    /// Arguments for mkfs: no discards, of what is empty anyway, and no questions.
    fn format_args(self) -> &'static [&'static str] {
        match self {
            Self::Ext4 => &["-q", "-F", "-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"],
            Self::Xfs => &["-q", "-f", "-K"],
        }
    }

    /// Without a kernel thread of ext4's that goes on with formatting.
    fn mount_options(self) -> Option<&'static CStr> {
        match self {
            Self::Ext4 => Some(c"noinit_itable"),
            Self::Xfs => None,
        }
    }
}

/// A loop device.
#[derive(Debug)]
pub(super) struct LoopDevice {
    pub(super) node: PathBuf,
    pub(super) number: (u32, u32),
}

impl LoopDevice {
    /// Attaches one to a file. It is detached by [`crate::mounts::release`].
    pub(super) fn attach(file: &Path) -> Result<Self> {
        let mut losetup = Command::new(find_program("losetup")?);
        losetup.args(["--find", "--show", "--direct-io=on"]).arg(file);
        let node = PathBuf::from(run(&mut losetup).context("cannot attach a loop device")?);
        let info = stat(&node).with_context(|| format!("cannot look at {}", node.display()))?;
        let device = Self { number: (major(info.st_rdev), minor(info.st_rdev)), node };
        // The kernel keeps what an earlier user of the device has set.
        device.limit("max_sectors_kb", &MAX_REQUEST_KIB.to_string())?;
        device.limit("nr_requests", MAX_REQUESTS)?;
        device.limit("read_ahead_kb", READ_AHEAD_KIB)?;
        Ok(device)
    }

    /// Sets one of the limits of the device's queue.
    pub(super) fn limit(&self, name: &str, value: &str) -> Result<()> {
        let device = self.node.file_name().unwrap_or_default();
        let file = Path::new("/sys/block").join(device).join("queue").join(name);
        fs::write(&file, value).with_context(|| format!("cannot write {value} to {}", file.display()))
    }

    pub(super) fn format(&self, file_system: FileSystem) -> Result<()> {
        let mut mkfs = Command::new(find_program(&format!("mkfs.{}", file_system.name()))?);
        run(mkfs.args(file_system.format_args()).arg(&self.node)).map(drop)
    }

    pub(super) fn mount(&self, file_system: FileSystem, mount_point: &Path) -> Result<()> {
        let options = file_system.mount_options();
        mount(&self.node, mount_point, file_system.name(), MountFlags::NOATIME, options)
            .with_context(|| format!("cannot mount {} ({})", self.node.display(), file_system.name()))
    }
}
