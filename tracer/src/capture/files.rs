//! Which file a read without a handle reads: from inode to path.

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::{DirEntryExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use pgiotrace_ebpf::{FileId, ReadRecord};

use super::FileFacts;
use crate::{
    model::io::Subject,
    server::{Pid, aio::FIRST_AIO_MAJOR, discover::Server, relpath},
};

/// Between two listings of the data directory at first; twice as long after each, up to the longest.
const LISTING_INTERVAL: Duration = Duration::from_secs(1);
/// Between two listings of the data directory at the most.
const LONGEST_LISTING_INTERVAL: Duration = Duration::from_mins(1);
/// Files that are remembered; beyond it, all are learned anew.
const MOST_FILES: usize = 65_536;

/// Files of a database that are open for a moment only (`relmapper.c`, `relcache.c`, `miscinit.c`).
const MOMENTARY_FILES: [&str; 3] = ["PG_VERSION", "pg_filenode.map", "pg_internal.init"];

/// Files of the server by inode.
pub struct Files {
    /// The data directory as the tracer reaches it, and as the server names it.
    data_directory: PathBuf,
    server_data_directory: PathBuf,
    /// The server's root folder as the kernel writes it before the paths of descriptors: not `/` in a chroot.
    server_root: PathBuf,
    /// Whether relations are read without a handle, and so their files are to be found as well.
    wants_relations: bool,
    /// The data directory's device as the kernel numbers it: inode numbers mean nothing on another.
    device: Option<u32>,
    known: HashMap<FileId, Arc<FileFacts>>,
    /// Paths by inode as of the last listing.
    listing: HashMap<u64, PathBuf>,
    listed: Option<Instant>,
    listing_interval: Duration,
    unknown: Arc<FileFacts>,
}

impl Files {
    /// Nothing is looked at yet.
    pub fn new(server: &Server) -> Self {
        let data_directory = server.host_path(&server.data_directory);
        Self {
            device: fs::metadata(&data_directory).ok().map(|found| kernel_device(found.dev())),
            data_directory,
            server_data_directory: server.data_directory.clone(),
            server_root: fs::read_link(format!("/proc/{}/root", server.postmaster))
                .unwrap_or_else(|_| PathBuf::from("/")),
            wants_relations: server.major < FIRST_AIO_MAJOR,
            known: HashMap::new(),
            listing: HashMap::new(),
            listed: None,
            listing_interval: LISTING_INTERVAL,
            unknown: Arc::new(FileFacts { subject: Subject::Unknown, segment: 0 }),
        }
    }

    /// What the file of a read without a handle is. The reader may be gone by now, or its descriptor closed or reused,
    /// so the inode is compared.
    pub fn look_up(&mut self, read: &ReadRecord) -> Arc<FileFacts> {
        let begun = &read.begun;
        let id = begun.file;
        if let Some(facts) = self.known.get(&id) {
            return Arc::clone(facts);
        }
        let path = match path_of_descriptor(id, Pid(read.executor_tgid), begun.fd) {
            Some(path) => {
                let path = self.relative(&path);
                self.learn_device(id, &path);
                path
            }
            None => match self.listed_path(id) {
                Some(path) => self.relative(&path),
                None => return Arc::clone(&self.unknown),
            },
        };
        if self.known.len() >= MOST_FILES {
            self.known.clear();
        }
        let facts = Arc::new(facts_of(&path));
        self.known.insert(id, Arc::clone(&facts));
        facts
    }

    /// overlayfs and btrfs show another device to processes than the kernel's own; a descriptor tells the true one.
    fn learn_device(&mut self, id: FileId, path: &str) {
        if Path::new(path).is_relative() && !path.starts_with("pg_tblspc") {
            self.device = Some(id.device);
        }
    }

    /// A path relative to the data directory, with a tablespace's own place turned back into its link.
    fn relative(&self, path: &Path) -> String {
        let as_server_sees = path.strip_prefix(&self.server_root).map(|inside| Path::new("/").join(inside));
        let path = as_server_sees.as_deref().unwrap_or(path);
        let inside = path
            .strip_prefix(&self.server_data_directory)
            .or_else(|_| path.strip_prefix(&self.data_directory));
        if let Ok(inside) = inside {
            return inside.to_string_lossy().into_owned();
        }
        let links = fs::read_dir(self.data_directory.join("pg_tblspc")).into_iter().flatten().flatten();
        for link in links {
            let Ok(place) = fs::read_link(link.path()) else { continue };
            if let Ok(inside) = path.strip_prefix(&place) {
                return format!(
                    "pg_tblspc/{}/{}",
                    link.file_name().to_string_lossy(),
                    inside.to_string_lossy()
                );
            }
        }
        path.to_string_lossy().into_owned()
    }

    /// The path by which the data directory lists an inode: for files that are open for a moment only.
    fn listed_path(&mut self, id: FileId) -> Option<PathBuf> {
        if self.device != Some(id.device) {
            return None;
        }
        let is_due = self.listed.is_none_or(|listed| listed.elapsed() >= self.listing_interval);
        if is_due && !self.listing.contains_key(&id.inode) {
            self.list();
        }
        self.listing.get(&id.inode).cloned()
    }

    /// Lists what may be open for a moment. With many relations that takes time in which the ring fills, so their files
    /// are left out where handles tell them.
    fn list(&mut self) {
        if self.listed.replace(Instant::now()).is_some() {
            self.listing_interval = (self.listing_interval * 2).min(LONGEST_LISTING_INTERVAL);
        }
        self.listing.clear();
        let mut folders = vec![self.data_directory.clone()];
        while let Some(folder) = folders.pop() {
            let is_base = folder.file_name().is_some_and(|name| name == "base");
            // Directory entries carry the inode, so no file is touched.
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                match entry.file_type() {
                    Ok(kind) if kind.is_dir() && is_base && !self.wants_relations => {
                        self.list_database(&entry.path());
                    }
                    Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                    Ok(kind) if kind.is_file() => {
                        self.listing.insert(entry.ino(), entry.path());
                    }
                    _ => {}
                }
            }
        }
    }

    fn list_database(&mut self, folder: &Path) {
        for name in MOMENTARY_FILES {
            let path = folder.join(name);
            if let Ok(found) = fs::metadata(&path) {
                self.listing.insert(found.ino(), path);
            }
        }
    }
}

/// What the file of a path relative to the data directory is.
fn facts_of(path: &str) -> FileFacts {
    let segment = relpath::segment_of(path);
    FileFacts { segment: segment.map_or(0, |segment| segment.number), subject: relpath::subject_of(path) }
}

/// A device's number as the kernel encodes it (`MKDEV`, `include/linux/kdev_t.h`).
fn kernel_device(device: u64) -> u32 {
    (rustix::fs::major(device) << 20) | rustix::fs::minor(device)
}

/// The path of a process's descriptor, if it still is this file.
fn path_of_descriptor(id: FileId, reader: Pid, fd: i32) -> Option<PathBuf> {
    let link = format!("/proc/{reader}/fd/{fd}");
    // The device is not compared: overlayfs and btrfs show another one to processes than the kernel's own.
    if fs::metadata(&link).ok()?.ino() != id.inode {
        return None;
    }
    let path = fs::read_link(link).ok()?;
    // The kernel appends this to the name of a file that has no name any more (d_path in fs/d_path.c).
    let text = path.to_string_lossy();
    Some(PathBuf::from(text.strip_suffix(" (deleted)").unwrap_or(&text)))
}
