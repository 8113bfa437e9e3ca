//! Temporary folders that are gone with their owner, or at the latest when the next one is made.

use std::{
    env, fs, io,
    os::unix::fs::{PermissionsExt as _, chown},
    path::{Path, PathBuf},
    process,
    sync::{Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context as _, Result, bail};

use crate::{mounts, process as proc, user::Account};

/// All folders' names begin like this.
const PREFIX: &str = "pgiotrace-";
/// Holds PID and start time of the process that the folder belongs to.
const OWNER: &str = "owner";
/// Exists in a folder whose server is meant to outlive its owner.
const KEEP: &str = "keep";
/// Magic number of tmpfs (`include/uapi/linux/magic.h`).
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// What this process has made and not yet removed.
struct Live {
    /// Set by [`remove_everything`]: from then on nothing new may begin.
    closing: bool,
    folders: Vec<PathBuf>,
}

static LIVE: Mutex<Live> = Mutex::new(Live { closing: false, folders: Vec::new() });

fn live() -> MutexGuard<'static, Live> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A folder for one cluster or disk; dropping it ends what still runs in it, unmounts what is mounted in it, and removes
/// it.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
}

impl Folder {
    /// Makes one that `account` may write to.
    pub(crate) fn create(account: Account) -> Result<Self> {
        sweep_stale();
        let mut live = live();
        if live.closing {
            bail!("not making a folder for anything new: this process was told to end");
        }
        let base = base()?;
        let what = || {
            format!(
                "cannot make a temporary folder in {}: set TMPDIR to one that is writable",
                base.display()
            )
        };
        let path = tempfile::Builder::new().prefix(PREFIX).tempdir_in(&base).with_context(what)?.keep();
        live.folders.push(path.clone());
        drop(live);

        let folder = Self { path };
        fs::write(folder.path.join(OWNER), owner_line(process::id())).with_context(what)?;
        fs::set_permissions(&folder.path, fs::Permissions::from_mode(0o755)).with_context(what)?;
        chown(&folder.path, Some(account.uid), Some(account.gid)).with_context(what)?;
        Ok(folder)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Where the server's data is.
    pub(crate) fn data(&self) -> PathBuf {
        data_of(&self.path)
    }

    /// Leaves the folder and its server to outlive this process.
    pub(crate) fn keep(&self) -> Result<()> {
        fs::write(self.path.join(KEEP), "").context("cannot mark the cluster's folder as one to keep")?;
        live().folders.retain(|folder| *folder != self.path);
        Ok(())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Not there any more: kept, or taken over by `remove_everything`.
        if !live().folders.contains(&self.path) {
            return;
        }
        if let Err(error) = remove(&self.path) {
            eprintln!("warning: cannot remove {}: {error:#}", self.path.display());
        }
        live().folders.retain(|folder| *folder != self.path);
    }
}

/// Ends and removes all that this process has made; nothing new can be made afterwards. For signal handlers' threads.
pub fn remove_everything() {
    let folders = {
        let mut live = live();
        live.closing = true;
        std::mem::take(&mut live.folders)
    };
    let children = proc::terminate_children();
    for folder in &folders {
        proc::kill_all_in(&data_of(folder));
    }
    proc::await_all(&children);
    for folder in folders {
        if let Err(error) = remove(&folder) {
            eprintln!("warning: cannot remove {}: {error:#}", folder.display());
        }
    }
}

/// Removes the folders of processes that were killed before they could, and ends what still runs in them.
pub fn sweep_stale() {
    let Ok(entries) = base().and_then(|base| Ok(fs::read_dir(base)?)) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        if entry.file_name().to_string_lossy().starts_with(PREFIX) && is_stale(&path) {
            // Another user's folder, or another process sweeping at the same time: theirs to mend.
            let _ = remove(&path);
        }
    }
}

fn is_stale(folder: &Path) -> bool {
    // Without the owner's file it is not one of ours, or still in the making.
    let Ok(owner) = fs::read_to_string(folder.join(OWNER)) else { return false };
    let pid_of = |text: &str| text.split_whitespace().next().and_then(|pid| pid.parse::<u32>().ok());
    if pid_of(&owner).is_some_and(|pid| owner == owner_line(pid)) {
        return false;
    }
    let server = fs::read_to_string(data_of(folder).join("postmaster.pid")).ok();
    let server_runs = server.as_deref().and_then(pid_of).and_then(proc::start_time).is_some();
    !(folder.join(KEEP).exists() && server_runs)
}

/// PID and start time; of a process that does not exist, no line that any owner has written.
fn owner_line(pid: u32) -> String {
    proc::start_time(pid).map_or_else(|| "gone".to_owned(), |start| format!("{pid} {start}\n"))
}

fn remove(folder: &Path) -> Result<()> {
    proc::kill_all_in(&data_of(folder));
    // Before anything is removed: not what is mounted there.
    mounts::release(folder)?;
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

fn data_of(folder: &Path) -> PathBuf {
    folder.join("data")
}

/// The folder for temporary folders: the usual one unless that is in memory, where no read ever reaches a device.
fn base() -> Result<PathBuf> {
    let usual = env::temp_dir();
    let info = rustix::fs::statfs(&usual).with_context(|| format!("cannot look at {}", usual.display()))?;
    // The field's type and sign differ between architectures.
    let in_memory = u64::try_from(info.f_type).is_ok_and(|magic| magic == TMPFS_MAGIC);
    Ok(if in_memory { PathBuf::from("/var/tmp") } else { usual })
}
