//! A disk whose latency is known: what the tracer says of a device is held against the disk's own log.
//!
//! A file system (ext4 or xfs) on a loop device, on a file in a FUSE file system that this very process serves:
//!
//! ```text
//! mount_point()  ->  /dev/loopN  ->  mounts/fuse/disk  ->  our threads: each read waits for its latency  ->  memory
//! ```
//!
//! Each read request of the loop device's is one of FUSE's: both sides are direct, so no page cache answers in between,
//! and the loop device's requests are kept shorter than what FUSE would split.
//!
//! The log's times lie inside of the device's own: the way of a request through the loop driver and FUSE, before it comes to
//! us, takes some 30 to 70 µs on a small virtual machine (`block_rq_issue` to [`Served::start_ns`]; in a scan's bursts 50 to
//! 150 µs, and more where a processor is taken away); its end comes 3 to 10 µs *before* [`Served::end_ns`].

mod device;
mod latency;
mod queue;
mod server;

pub use device::FileSystem;
pub use latency::Latency;
pub use server::Served;

use std::{
    fs,
    os::unix::fs::chown,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use rustix::mount::{MountPropagationFlags, mount_bind, mount_change};

use crate::{folder::Folder, is_root, user::Account, wait_until};
use device::LoopDevice;
use queue::DelayQueue;
use server::Server;

/// What a disk is to be like.
#[derive(Debug, Clone)]
pub struct SlowDiskBuilder {
    size: u64,
    file_system: FileSystem,
    latency: Latency,
    concurrency: usize,
    seed: u64,
}

impl SlowDiskBuilder {
    /// Sets the size in bytes; 1 GiB unless set. Memory is used for what is written only.
    #[must_use]
    pub fn size(mut self, bytes: u64) -> Self {
        self.size = bytes;
        self
    }

    /// Sets the file system; ext4 unless set.
    #[must_use]
    pub fn file_system(mut self, file_system: FileSystem) -> Self {
        self.file_system = file_system;
        self
    }

    /// Sets the latency of reads, once the disk is made and mounted; none unless set. Writes have none.
    #[must_use]
    pub fn latency(mut self, latency: Latency) -> Self {
        self.latency = latency;
        self
    }

    /// Sets how many reads are served at once; those beyond it wait, and that wait is part of their time of service.
    /// Unless set, all are served at once.
    #[must_use]
    pub fn concurrency(mut self, reads: usize) -> Self {
        self.concurrency = reads;
        self
    }

    /// Sets the seed of latencies that are random.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Makes the disk and mounts it.
    ///
    /// # Errors
    ///
    /// When this process is not root, there is no FUSE, no loop device, or no program that formats.
    pub fn start(self) -> Result<SlowDisk> {
        ensure!(is_root(), "cannot make a slow disk: mounting needs root");
        let account = Account::for_server()?;
        let folder = Folder::create(account)?;
        let mounts = folder.path().join("mounts");
        let mount_point = mounts.join("disk");
        let fuse = mounts.join("fuse");
        share(&mounts)?;
        for dir in [&mount_point, &fuse] {
            fs::create_dir(dir).with_context(|| format!("cannot make the folder {}", dir.display()))?;
        }
        let queue = DelayQueue::new(Latency::NONE, self.seed, self.concurrency);
        let server = Server::start(self.size, queue, &fuse)?;
        // From here on, an error on the way ends all in order.
        let mut disk = SlowDisk { folder, server, mounts, mount_point, device: None };

        let device = disk.device.insert(LoopDevice::attach(&fuse.join(server::DISK))?);
        device.format(self.file_system)?;
        device.mount(self.file_system, &disk.mount_point)?;
        let tablespace = disk.tablespace_dir();
        fs::create_dir(&tablespace).context("cannot make a folder on the slow disk")?;
        chown(&tablespace, Some(account.uid), Some(account.gid))
            .context("cannot give a folder on the slow disk to the server's account")?;
        Server::raise_priority();
        disk.set_latency(self.latency);
        disk.clear_log();
        Ok(disk)
    }
}

/// A mounted disk with a latency that one sets, and a log of what it served. Dropping it leaves nothing behind; those who
/// use it, a [`crate::Cluster`] above all, are to be dropped before it.
#[derive(Debug)]
pub struct SlowDisk {
    // First: while its mounts are undone, the server still answers.
    folder: Folder,
    server: Server,
    mounts: PathBuf,
    mount_point: PathBuf,
    device: Option<LoopDevice>,
}

impl SlowDisk {
    /// Begins to describe a disk.
    #[must_use]
    pub fn builder() -> SlowDiskBuilder {
        SlowDiskBuilder {
            size: 1 << 30,
            file_system: FileSystem::Ext4,
            latency: Latency::NONE,
            concurrency: usize::MAX,
            seed: 1,
        }
    }

    /// Where it is mounted.
    #[must_use]
    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }

    /// An empty folder on it that belongs to the account that servers run as.
    #[must_use]
    pub fn tablespace_dir(&self) -> PathBuf {
        self.mount_point.join("tablespace")
    }

    /// Sets the latency of the reads that come from now on; random ones start their sequence anew.
    pub fn set_latency(&self, latency: Latency) {
        self.server.queue().set_latency(latency);
    }

    /// The reads that were served, in the order of their ends.
    #[must_use]
    pub fn log(&self) -> Vec<Served> {
        self.server.log()
    }

    /// Forgets the reads that were served. One that is still being served will be in the log.
    pub fn clear_log(&self) {
        self.server.clear_log();
    }

    /// Waits until the device has no request: one that somebody still waits for, or that the kernel reads ahead.
    ///
    /// # Errors
    ///
    /// When it still has one after a minute.
    pub fn wait_idle(&self) -> Result<()> {
        let (major, minor) = self.device();
        let file = format!("/sys/dev/block/{major}:{minor}/inflight");
        // Reads and writes.
        let is_idle = |text: String| text.split_whitespace().all(|requests| requests == "0");
        wait_until("the slow disk has no request", || fs::read_to_string(&file).is_ok_and(is_idle))
    }

    /// Limits how many requests the device has at once ("128" unless set); the others wait in the block layer.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn limit_requests(&self, requests: &str) -> Result<()> {
        self.loop_device().limit("nr_requests", requests)
    }

    /// Major and minor number of the loop device.
    ///
    /// # Panics
    ///
    /// Never: a disk that was started has its device.
    #[must_use]
    pub fn device(&self) -> (u32, u32) {
        self.loop_device().number
    }

    /// The loop device's file in `/dev`.
    ///
    /// # Panics
    ///
    /// Never: a disk that was started has its device.
    #[must_use]
    pub fn device_node(&self) -> &Path {
        &self.loop_device().node
    }

    /// The folder with all of it, which is gone with this value.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The folder whose mounts come and go in namespaces that were made from ours, too.
    pub(crate) fn shared_mounts(&self) -> &Path {
        &self.mounts
    }

    fn loop_device(&self) -> &LoopDevice {
        self.device.as_ref().expect("a disk that was started has its device")
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        // What unmounting reads, and whoever still waits, shall not be delayed.
        self.server.queue().hurry();
    }
}

/// Makes a folder in which mounts are shared with the mount namespaces that servers run in: unmounting here unmounts there,
/// where a copy would keep the loop device in use otherwise.
fn share(folder: &Path) -> Result<()> {
    fs::create_dir(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    let what = || format!("cannot make {} a mount of its own", folder.display());
    mount_bind(folder, folder).with_context(what)?;
    mount_change(folder, MountPropagationFlags::SHARED).with_context(what)
}

/// The smallest of some sorted values that at least this share of all does not exceed: the convention of the tracer's
/// histograms.
///
/// # Panics
///
/// When there are no values.
#[must_use]
pub fn quantile_of(sorted: &[f64], share: f64) -> f64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rank is small and positive"
    )]
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted[rank.saturating_sub(1).min(sorted.len() - 1)]
}
