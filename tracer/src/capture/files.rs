//! Which file a read without a handle reads: from inode to path.

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::{DirEntryExt, MetadataExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use super::{FileFacts, FileId};
use crate::{
    model::io::Subject,
    server::{Pid, discover::Server, relpath},
};

/// How often the data directory may be listed.
const LISTING_INTERVAL: Duration = Duration::from_secs(1);

/// Files of the server by inode.
pub struct Files {
    /// The data directory as the tracer reaches it, and as the server names it.
    data_directory: PathBuf,
    server_data_directory: PathBuf,
    /// The server's root folder as the kernel writes it before the paths of descriptors: not `/` in a chroot.
    server_root: PathBuf,
    known: HashMap<FileId, FileFacts>,
    /// Paths by inode as of the last listing.
    listing: HashMap<u64, PathBuf>,
    listed: Option<Instant>,
}

/// What nothing is known of.
static UNKNOWN: FileFacts = FileFacts { subject: Subject::Unknown, segment: 0 };

impl Files {
    /// Nothing is looked at yet.
    pub fn new(server: &Server) -> Self {
        Self {
            data_directory: server.host_path(&server.data_directory),
            server_data_directory: server.data_directory.clone(),
            server_root: fs::read_link(format!("/proc/{}/root", server.postmaster))
                .unwrap_or_else(|_| PathBuf::from("/")),
            known: HashMap::new(),
            listing: HashMap::new(),
            listed: None,
        }
    }

    /// What a file is, and whether that was not known before. `fd` is the descriptor by which the process `reader`
    /// read it; the process may be gone by now, or the descriptor closed or reused, so the inode is compared.
    pub fn look_up(&mut self, id: FileId, reader: Pid, fd: i32) -> (&FileFacts, bool) {
        let is_new = !self.known.contains_key(&id);
        if is_new {
            let Some(path) = path_of_descriptor(id, reader, fd).or_else(|| self.listed_path(id)) else {
                return (&UNKNOWN, false);
            };
            let facts = self.facts_of(&path);
            self.known.insert(id, facts);
        }
        (&self.known[&id], is_new)
    }

    fn facts_of(&self, path: &Path) -> FileFacts {
        let path = self.relative(path);
        let segment = relpath::segment_of(&path);
        FileFacts {
            segment: segment.map_or(0, |segment| segment.number),
            subject: relpath::subject_of(&path),
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

    /// The path by which the data directory lists an inode: for files that are open for a moment only. Directory
    /// entries carry the inode, so no file is touched.
    fn listed_path(&mut self, id: FileId) -> Option<PathBuf> {
        let is_due = self.listed.is_none_or(|listed| listed.elapsed() >= LISTING_INTERVAL);
        if is_due && !self.listing.contains_key(&id.inode) {
            self.list();
        }
        self.listing.get(&id.inode).cloned()
    }

    fn list(&mut self) {
        self.listed = Some(Instant::now());
        self.listing.clear();
        let mut folders = vec![self.data_directory.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                match entry.file_type() {
                    Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                    Ok(kind) if kind.is_file() => {
                        self.listing.insert(entry.ino(), entry.path());
                    }
                    _ => {}
                }
            }
        }
    }
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
