//! A FUSE file system of one file, whose reads take as long as they are told to.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io,
    os::unix::{fs::FileExt as _, net::UnixDatagram},
    path::Path,
    process::Command,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, Result};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyWrite, Request, Session, WriteFlags,
};
use rustix::{
    fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create},
    net::sockopt::set_socket_keepalive,
};

use super::queue::{DelayQueue, now_ns};

/// Name of the file.
pub(super) const DISK: &str = "disk";
/// Its inode number.
const DISK_INO: INodeNo = INodeNo(2);
/// The kernel need not ask again: nobody changes attributes.
const TTL: Duration = Duration::from_hours(1);
/// Threads that answer: copying one answer must not delay the next for long.
const WORKERS: usize = 2;
/// More than a loop device has requests (128): beyond it the kernel would hold them back before we see them.
const MAX_IN_FLIGHT: u16 = 1024;
/// How the threads' names begin, fuser's and our own.
const THREADS: [&str; 2] = ["fuser-", "slow-disk"];
/// How long the end of the file system may take once it is unmounted.
const PATIENCE: Duration = Duration::from_secs(5);

/// One read request as it was served. Times are CLOCK_MONOTONIC in nanoseconds, as in `bpf_ktime_get_ns`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Served {
    /// Where it began in the disk, bytes.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
    /// When it had come from the kernel.
    pub start_ns: u64,
    /// When the kernel had taken its answer, data included.
    pub end_ns: u64,
}

impl Served {
    /// Time of service, nanoseconds.
    #[must_use]
    pub fn service_ns(&self) -> u64 {
        self.end_ns - self.start_ns
    }
}

/// Serves the file until it is dropped, which is to be after the file system was unmounted.
#[derive(Debug)]
pub(super) struct Server {
    shared: Arc<Shared>,
    session: Option<BackgroundSession>,
    workers: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// In memory: neither does emptying the page cache touch it, nor does a real disk add its own latency.
    data: File,
    size: u64,
    queue: DelayQueue<Read>,
    log: Mutex<Log>,
    answered: Condvar,
}

#[derive(Debug, Default)]
struct Log {
    served: Vec<Served>,
    /// Answers that are being given: their readers may know already what is not in the log yet.
    answering: usize,
}

/// A read request that waits for the end of its latency.
#[derive(Debug)]
pub(super) struct Read {
    offset: u64,
    length: u32,
    start_ns: u64,
    reply: ReplyData,
}

impl Server {
    /// Mounts the file system and begins to serve it.
    pub(super) fn start(size: u64, queue: DelayQueue<Read>, mount_point: &Path) -> Result<Self> {
        let data =
            File::from(memfd_create(DISK, MemfdFlags::CLOEXEC).context("cannot make a file in memory")?);
        data.set_len(size).context("cannot make a file in memory as large as the disk")?;
        let shared = Arc::new(Shared { data, size, queue, log: Mutex::default(), answered: Condvar::new() });
        let mut server = Self { shared: shared.clone(), session: None, workers: Vec::new() };
        for _ in 0..WORKERS {
            let shared = shared.clone();
            let worker = thread::Builder::new().name("slow-disk".to_owned()).spawn(move || shared.work());
            server.workers.push(worker.context("cannot start a thread of the slow disk's")?);
        }
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("pgiotrace-slow-disk".to_owned())];
        let session = Session::new(OneFile(shared), mount_point, &config).and_then(Session::spawn);
        server.session = Some(session.context("cannot mount a FUSE file system (/dev/fuse)")?);
        Ok(server)
    }

    /// Lets the serving threads run before whatever else the machine is busy with, and have exact timers: what is measured
    /// is the latency that was set, not the wait for a processor. Without the right to it, the disk is only less exact.
    ///
    /// Once something was served: fuser starts a thread from another one.
    pub(super) fn raise_priority() {
        let Ok(threads) = fs::read_dir("/proc/self/task") else { return };
        for thread in threads.flatten() {
            let name = fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
            if THREADS.iter().any(|ours| name.starts_with(ours)) {
                let mut chrt = Command::new("chrt");
                let _ = chrt.args(["--fifo", "--pid", "10"]).arg(thread.file_name()).output();
            }
        }
    }

    pub(super) fn queue(&self) -> &DelayQueue<Read> {
        &self.shared.queue
    }

    pub(super) fn log(&self) -> Vec<Served> {
        let mut log = self.shared.log();
        while log.answering > 0 {
            log = self.shared.answered.wait(log).unwrap_or_else(PoisonError::into_inner);
        }
        log.served.clone()
    }

    pub(super) fn clear_log(&self) {
        self.shared.log().served.clear();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some(session) = self.session.take() else { return self.end_workers() };
        let deadline = Instant::now() + PATIENCE;
        while !session.guard.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        if !session.guard.is_finished() {
            // Somebody else still has it open: it is served, without delay, for as long as this process lives.
            eprintln!("warning: the slow disk's file system is still in use, although it is unmounted");
            std::mem::forget(session);
            self.workers.clear();
            return;
        }
        self.end_workers();
    }
}

impl Server {
    fn end_workers(&mut self) {
        self.shared.queue.close();
        for worker in self.workers.drain(..) {
            // One that panicked has said so.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// A worker's life.
    fn work(&self) {
        let mut buffer = Vec::new();
        let socket = UnixDatagram::unbound();
        while let Some(Read { offset, length, start_ns, reply }) = self.queue.take() {
            buffer.resize(length as usize, 0);
            let result = self.data.read_exact_at(&mut buffer, offset);
            self.log().answering += 1;
            match result {
                Ok(()) => reply.data(&buffer),
                Err(error) => reply.error(error.into()),
            }
            let _ = socket.as_ref().map(run_pending_softirqs);
            let served = Served { offset, length, start_ns, end_ns: now_ns() };
            let mut log = self.log();
            log.served.push(served);
            log.answering -= 1;
            drop(log);
            self.answered.notify_all();
            self.queue.done();
        }
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attributes(&self, ino: INodeNo) -> FileAttr {
        let is_disk = ino == DISK_INO;
        FileAttr {
            ino,
            size: if is_disk { self.size } else { 0 },
            blocks: if is_disk { self.size / 512 } else { 0 },
            atime: SystemTime::UNIX_EPOCH,
            mtime: SystemTime::UNIX_EPOCH,
            ctime: SystemTime::UNIX_EPOCH,
            crtime: SystemTime::UNIX_EPOCH,
            kind: if is_disk { FileType::RegularFile } else { FileType::Directory },
            perm: if is_disk { 0o600 } else { 0o700 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

/// The kernel ends the loop device's request in a softirq of this processor's, for which its ordinary thread would have to
/// wait until we sleep. Whoever releases a socket's lock runs what is pending (`__local_bh_enable_ip` in
/// kernel/softirq.c): this brings the end down from some 200 µs after the answer to a few.
fn run_pending_softirqs(socket: &UnixDatagram) {
    let _ = set_socket_keepalive(socket, false);
}

#[derive(Debug)]
struct OneFile(Arc<Shared>);

impl Filesystem for OneFile {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Without it each request of the loop device's would wait for the one before it (fuse_direct_IO in fs/fuse/file.c).
        config
            .add_capabilities(InitFlags::FUSE_ASYNC_DIO)
            .map_err(|_| io::Error::other("this kernel's FUSE has no asynchronous direct I/O"))?;
        config
            .set_max_background(MAX_IN_FLIGHT)
            .map_err(|_| io::Error::other("FUSE takes no max_background"))?;
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == INodeNo::ROOT && name == DISK {
            reply.entry(&TTL, &self.0.attributes(DISK_INO), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.0.attributes(ino));
    }

    fn open(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // No page cache between the loop device and us, whatever it asks for.
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        reply.opened(FileHandle(0), flags | FopenFlags::FOPEN_NOFLUSH);
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let start_ns = now_ns();
        let left = self.0.size.saturating_sub(offset);
        let length = u32::try_from(left).unwrap_or(u32::MAX).min(size);
        self.0.queue.put(Read { offset, length, start_ns, reply });
    }

    fn write(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.0.data.write_all_at(data, offset) {
            // A request's length fits by the protocol.
            Ok(()) => reply.written(u32::try_from(data.len()).unwrap_or(u32::MAX)),
            Err(error) => reply.error(error.into()),
        }
    }

    fn fsync(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        // Memory is as safe as it gets.
        reply.ok();
    }

    fn fallocate(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let mode = FallocateFlags::from_bits_retain(mode.unsigned_abs());
        // A file in memory knows no ZERO_RANGE, but a hole is zeroes as well.
        let mode = if mode.contains(FallocateFlags::ZERO_RANGE) {
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE
        } else {
            mode
        };
        match fallocate(&self.0.data, mode, offset, length) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(io::Error::from(error).into()),
        }
    }
}
