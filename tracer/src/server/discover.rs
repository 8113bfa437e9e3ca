//! Finding the server to trace, and its processes.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::net::{IpAddr, ToSocketAddrs, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use procfs::process::Process;

use super::control_file::{self, BuildSizes};
use super::postmaster_pid::{self, PostmasterPid};
use super::{InnerPid, Pid};

/// The oldest major version that is traced.
pub const OLDEST_MAJOR: u16 = 15;

/// A running PostgreSQL server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// The postmaster.
    pub postmaster: Pid,
    /// The postmaster, in the server's PID namespace.
    pub inner_postmaster: InnerPid,
    /// The data directory, as the server sees it.
    pub data_directory: PathBuf,
    /// Major version, from the file `PG_VERSION`.
    pub major: u16,
    /// TCP port, which also names the Unix socket.
    pub port: u16,
    /// The first directory of Unix sockets, as the server sees it.
    pub socket_directory: Option<PathBuf>,
    /// The first address that the server listens on; `*` is all of them, `None` is no TCP at all.
    pub listen_address: Option<String>,
    /// Owner of the postmaster.
    pub uid: u32,
    /// Sizes that it was built with, where they can be read.
    pub build_sizes: Option<BuildSizes>,
    /// Start of the process, in clock ticks since boot: tells the postmaster from a later process of the same
    /// PID.
    process_start: u64,
}

/// A process of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessInfo {
    /// The process.
    pub pid: Pid,
    /// The process, in the server's PID namespace.
    pub inner_pid: InnerPid,
    /// Its title: `postgres: io worker 0`, `postgres: alice shop [local] SELECT`.
    pub title: String,
}

/// Which server is wanted; all `None` is "the one that runs".
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// `-D`: the data directory, as the tracer or as the server sees it.
    pub data_directory: Option<PathBuf>,
    /// `-p`.
    pub port: Option<u16>,
    /// `-h`: a directory of Unix sockets, or a name or address of this machine.
    pub host: Option<String>,
}

/// Why no server was found, or not one.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// `/proc` cannot be listed.
    #[error("listing the processes in /proc failed: {source}; mount procfs there")]
    Processes {
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// No server runs, or none that may be inspected.
    #[error("no running PostgreSQL server was found in /proc; {}", hint_for_none(*.unreadable, rustix::process::geteuid().is_root()))]
    NoServer {
        /// Processes whose working directory could not be looked at.
        unreadable: usize,
    },
    /// Several servers run and none was chosen.
    #[error("several PostgreSQL servers run here; choose one with -D or -p:{}", listing(.servers))]
    Several {
        /// All of them.
        servers: Vec<Server>,
    },
    /// No server matches `-p` or `-h`.
    #[error(
        "no PostgreSQL server {wanted} runs here; these do, choose one with -D or -p:{}",
        listing(.servers)
    )]
    NoMatch {
        /// What was asked for: "on port 5433".
        wanted: String,
        /// Those that run.
        servers: Vec<Server>,
    },
    /// `-h` names another machine.
    #[error(
        "host \"{host}\" is not this machine, and pgiotrace traces the kernel it runs on: run it on the \
         server's host"
    )]
    Remote {
        /// The host as given.
        host: String,
    },
    /// `-D` names something else.
    #[error(
        "{} is not a PostgreSQL data directory (reading its PG_VERSION failed: {source}); give the \
         directory that SHOW data_directory names",
        .path.display()
    )]
    NotDataDirectory {
        /// The directory as given.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// `-D` may not be read.
    #[error("the data directory {} cannot be read: {source}; run pgiotrace as root", .path.display())]
    Unreadable {
        /// The directory as given.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// `-D` names a data directory without `postmaster.pid`.
    #[error(
        "no server runs in the data directory {} (it has no postmaster.pid); start it first",
        .path.display()
    )]
    NotRunning {
        /// The directory as given.
        path: PathBuf,
    },
    /// `-D` names a data directory whose server is gone.
    #[error(
        "no server runs in the data directory {}: its postmaster.pid is left over from process {pid}; start \
         the server first",
        .path.display()
    )]
    Stale {
        /// The directory as given.
        path: PathBuf,
        /// The process that `postmaster.pid` names.
        pid: InnerPid,
    },
    /// The server of `-D` runs, but may not be looked at.
    #[error(
        "process {pid}, which serves {}, cannot be inspected: {source}; run pgiotrace as root",
        .path.display()
    )]
    Inspect {
        /// The postmaster.
        pid: Pid,
        /// The directory as given.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Too old.
    #[error(
        "PostgreSQL {major} in {} is not supported: pgiotrace needs {OLDEST_MAJOR} or newer; upgrade the \
         server",
        .path.display()
    )]
    Unsupported {
        /// Its major version.
        major: u16,
        /// Its data directory.
        path: PathBuf,
    },
}

fn hint_for_none(unreadable: usize, is_root: bool) -> String {
    // Even root is refused a few: kernel threads that are just ending, processes behind a security module.
    if unreadable == 0 || is_root {
        return "start the server first".to_owned();
    }
    format!(
        "the processes of other users ({unreadable}) could not be inspected: run pgiotrace as root, or start the server first"
    )
}

fn listing(servers: &[Server]) -> String {
    if servers.is_empty() {
        return " none".to_owned();
    }
    servers.iter().fold(String::new(), |mut text, server| {
        let (major, port, pid) = (server.major, server.port, server.postmaster);
        let directory = server.data_directory.display();
        // Writing to a String does not fail.
        let _ = write!(text, "\n  -p {port} -D {directory}  (PostgreSQL {major}, PID {pid})");
        text
    })
}

impl Server {
    /// A server that does not run, for tests.
    #[cfg(test)]
    pub(crate) fn example() -> Self {
        Self {
            postmaster: Pid(1000),
            inner_postmaster: InnerPid(1),
            data_directory: PathBuf::from("/data"),
            major: 18,
            port: 5432,
            socket_directory: Some(PathBuf::from("/run/postgresql")),
            listen_address: None,
            uid: 70,
            build_sizes: None,
            process_start: 0,
        }
    }

    /// Where the tracer reaches a path of the server, which may live in a chroot or a container.
    #[must_use]
    pub fn host_path(&self, path: &Path) -> PathBuf {
        let relative = path.strip_prefix("/").unwrap_or(path);
        PathBuf::from(format!("/proc/{}/root", self.postmaster)).join(relative)
    }

    /// Whether the postmaster still runs; a later process of the same PID is not taken for it.
    #[must_use]
    pub fn is_running(&self) -> bool {
        process_start(self.postmaster).is_some_and(|start| start == self.process_start)
    }

    /// The postmaster's child that SQL shows under a PID; `None` when there is none, or it is gone.
    #[must_use]
    pub fn child(&self, wanted: InnerPid) -> Option<Pid> {
        // Latest first: who asks has often just connected.
        children(self.postmaster).into_iter().rev().find(|pid| inner_pid(*pid) == Some(wanted))
    }

    /// The postmaster's children: backends, io workers, the checkpointer and so on. Those that exit meanwhile
    /// are left out; a postmaster that is gone has none.
    #[must_use]
    pub fn processes(&self) -> Vec<ProcessInfo> {
        children(self.postmaster).into_iter().filter_map(process).collect()
    }

    /// Names the server's shared memory: another answer than before means that a crash restart made it anew. `None`
    /// while there is none.
    #[must_use]
    pub fn shared_memory(&self) -> Option<String> {
        let file = format!("/proc/{}/cwd/postmaster.pid", self.postmaster);
        postmaster_pid::parse(&fs::read_to_string(file).ok()?).shared_memory
    }
}

/// Who a process is; `None` once it is gone.
#[must_use]
pub fn process(pid: Pid) -> Option<ProcessInfo> {
    let inner_pid = inner_pid(pid)?;
    let title = title(&fs::read(format!("/proc/{pid}/cmdline")).ok()?);
    Some(ProcessInfo { pid, inner_pid, title })
}

/// A process's PID in its innermost PID namespace; `None` once it is gone.
#[must_use]
pub fn inner_pid(pid: Pid) -> Option<InnerPid> {
    parse_ns_pid(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?).map(InnerPid)
}

/// The last number of the line `NSpid` of `/proc/PID/status`: the PID in the innermost namespace.
///
/// Not through procfs, which parses all sixty lines: this is done for each of what may be thousands of
/// processes.
fn parse_ns_pid(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace().next_back()?.parse().ok()
}

/// PostgreSQL overwrites its arguments with the title and pads it (`set_ps_display` in `ps_status.c`).
fn title(command_line: &[u8]) -> String {
    let text = String::from_utf8_lossy(command_line);
    text.trim_end_matches(['\0', ' ']).replace('\0', " ")
}

/// When a process started, in clock ticks since boot; `None` for one that is gone. A zombie is gone, too: its parent may
/// never wait for it, like the first process of many a container.
fn process_start(pid: Pid) -> Option<u64> {
    let process = Process::new(i32::try_from(pid.0).ok()?).ok()?;
    process.stat().ok().filter(|stat| !matches!(stat.state, 'Z' | 'X')).map(|stat| stat.starttime)
}

fn children(parent: Pid) -> Vec<Pid> {
    // Needs CONFIG_PROC_CHILDREN; complete, because the postmaster has one thread.
    match fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")) {
        Ok(list) => list.split_whitespace().filter_map(|pid| pid.parse().ok().map(Pid)).collect(),
        Err(_) => children_by_parent(parent),
    }
}

fn children_by_parent(parent: Pid) -> Vec<Pid> {
    let Ok(pids) = all_pids() else { return Vec::new() };
    let is_child = |pid: &Pid| {
        let process = i32::try_from(pid.0).ok().and_then(|pid| Process::new(pid).ok());
        let stat = process.and_then(|process| process.stat().ok());
        stat.is_some_and(|stat| u32::try_from(stat.ppid) == Ok(parent.0))
    };
    pids.into_iter().filter(is_child).collect()
}

fn all_pids() -> io::Result<Vec<Pid>> {
    let name_to_pid =
        |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok().map(Pid);
    Ok(fs::read_dir("/proc")?.filter_map(name_to_pid).collect())
}

/// All servers that run here, by port, and the number of processes that could not be looked at.
fn scan() -> Result<(Vec<Server>, usize), ServerError> {
    let mut servers = Vec::new();
    let mut unreadable = 0;
    for pid in all_pids().map_err(|source| ServerError::Processes { source })? {
        // A backend's working directory is the data directory too, so it also gets here.
        match fs::read_to_string(format!("/proc/{pid}/cwd/postmaster.pid")) {
            Ok(text) => servers.extend(postmaster(pid, &postmaster_pid::parse(&text))),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => unreadable += 1,
            Err(_) => {}
        }
    }
    servers.sort_by(|a, b| (a.port, &a.data_directory).cmp(&(b.port, &b.data_directory)));
    Ok((servers, unreadable))
}

/// The server whose postmaster is `pid`, when the `postmaster.pid` in its working directory names it.
fn postmaster(pid: Pid, file: &PostmasterPid) -> Option<Server> {
    let inner_postmaster = file.pid?;
    // Cheap first: a PID of the tracer's own namespace is the last one of NSpid unless the server is in a
    // container.
    if inner_pid(pid)? != inner_postmaster {
        return None;
    }
    let uid = fs::metadata(format!("/proc/{pid}")).ok()?.uid();
    let major = read_major(&PathBuf::from(format!("/proc/{pid}/cwd"))).ok()?;
    Some(Server {
        postmaster: pid,
        inner_postmaster,
        data_directory: file.data_directory.clone()?,
        major,
        port: file.port?,
        socket_directory: file.socket_directory.clone(),
        listen_address: file.listen_address.clone(),
        uid,
        build_sizes: control_file::read(&PathBuf::from(format!("/proc/{pid}/cwd"))),
        process_start: process_start(pid)?,
    })
}

/// Major version of the server that made a data directory.
fn read_major(data_directory: &Path) -> io::Result<u16> {
    let text = fs::read_to_string(data_directory.join("PG_VERSION"))?;
    // Before PostgreSQL 10 it reads "9.6".
    let major = text.trim().split('.').next().unwrap_or_default();
    major.parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it holds no version"))
}

/// Finds the server that `selection` means.
///
/// # Errors
///
/// When none or several match, when the choice is not a server of this machine, or when it is too old; each
/// [`ServerError`] says what to do.
pub fn find(selection: &Selection) -> Result<Server, ServerError> {
    let (servers, unreadable) = scan()?;
    let server = match &selection.data_directory {
        Some(directory) => find_by_directory(directory, servers)?,
        None => find_by_address(selection, servers, unreadable)?,
    };
    if let Some(port) = selection.port.filter(|port| *port != server.port) {
        return Err(ServerError::NoMatch {
            wanted: format!("on port {port} in that directory"),
            servers: vec![server],
        });
    }
    if server.major < OLDEST_MAJOR {
        return Err(ServerError::Unsupported { major: server.major, path: server.data_directory });
    }
    Ok(server)
}

fn find_by_directory(directory: &Path, servers: Vec<Server>) -> Result<Server, ServerError> {
    let identity = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let wanted = identity(directory);
    let same_directory = |server: &Server| {
        let working = identity(&PathBuf::from(format!("/proc/{}/cwd", server.postmaster)));
        wanted.map_or(server.data_directory == directory, |wanted| working == Some(wanted))
    };
    if let Some(server) = servers.into_iter().find(same_directory) {
        return Ok(server);
    }
    let path = directory.to_path_buf();
    let major = match read_major(directory) {
        Ok(major) => major,
        Err(source) if source.kind() == io::ErrorKind::PermissionDenied => {
            return Err(ServerError::Unreadable { path, source });
        }
        Err(source) => return Err(ServerError::NotDataDirectory { path, source }),
    };
    if major < OLDEST_MAJOR {
        return Err(ServerError::Unsupported { major, path });
    }
    Err(why_not_running(path))
}

/// Says why no running server belongs to a data directory.
fn why_not_running(path: PathBuf) -> ServerError {
    let text = fs::read_to_string(path.join("postmaster.pid")).unwrap_or_default();
    let Some(pid) = postmaster_pid::parse(&text).pid else {
        return ServerError::NotRunning { path };
    };
    match fs::read_link(format!("/proc/{pid}/cwd")) {
        Err(source) if source.kind() == io::ErrorKind::PermissionDenied => {
            ServerError::Inspect { pid: Pid(pid.0), path, source }
        }
        _ => ServerError::Stale { path, pid },
    }
}

fn find_by_address(
    selection: &Selection,
    servers: Vec<Server>,
    unreadable: usize,
) -> Result<Server, ServerError> {
    let host = Host::of(selection.host.as_deref())?;
    let is_wanted =
        |server: &&Server| selection.port.is_none_or(|port| port == server.port) && host.may_be(server);
    let mut matching: Vec<Server> = servers.iter().filter(is_wanted).cloned().collect();
    if matching.len() > 1 {
        return Err(ServerError::Several { servers: matching });
    }
    match matching.pop() {
        Some(server) => Ok(server),
        None if servers.is_empty() => Err(ServerError::NoServer { unreadable }),
        None => Err(ServerError::NoMatch { wanted: wanted(selection), servers }),
    }
}

/// "on port 5433 with sockets in /tmp".
fn wanted(selection: &Selection) -> String {
    let port = selection.port.map(|port| format!("on port {port}"));
    let host = selection.host.as_ref().map(|host| {
        if host.starts_with('/') { format!("with sockets in {host}") } else { format!("for host \"{host}\"") }
    });
    port.into_iter().chain(host).collect::<Vec<_>>().join(" ")
}

/// What `-h` says about the server.
enum Host {
    Any,
    SocketDirectory(PathBuf),
}

impl Host {
    fn of(host: Option<&str>) -> Result<Self, ServerError> {
        match host {
            None | Some("") => Ok(Self::Any),
            // As libpq: an absolute path is a directory of sockets.
            Some(path) if path.starts_with('/') => Ok(Self::SocketDirectory(PathBuf::from(path))),
            Some(name) if is_this_machine(name) => Ok(Self::Any),
            Some(name) => Err(ServerError::Remote { host: name.to_owned() }),
        }
    }

    fn may_be(&self, server: &Server) -> bool {
        let Self::SocketDirectory(wanted) = self else {
            return true;
        };
        let Some(directory) = &server.socket_directory else {
            return false;
        };
        let identity = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
        directory == wanted
            || identity(wanted).is_some_and(|wanted| identity(&server.host_path(directory)) == Some(wanted))
    }
}

/// Whether a host name or address means the machine that the tracer runs on.
#[must_use]
pub fn is_this_machine(host: &str) -> bool {
    // localhost need not resolve, as in a chroot without /etc/hosts.
    if host.eq_ignore_ascii_case("localhost") {
        return true;
    }
    let addresses: HashSet<IpAddr> = match host.parse() {
        Ok(address) => HashSet::from([address]),
        Err(_) => (host, 0)
            .to_socket_addrs()
            .map(|found| found.map(|address| address.ip()).collect())
            .unwrap_or_default(),
    };
    // The kernel binds only to addresses of its own; nothing is sent.
    addresses.into_iter().any(|address| UdpSocket::bind((address, 0)).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(port: u16, directory: &str) -> Server {
        let postmaster = Pid(100 + u32::from(port));
        Server { postmaster, port, data_directory: PathBuf::from(directory), ..Server::example() }
    }

    #[test]
    fn the_innermost_pid_is_the_last_one() {
        assert_eq!(parse_ns_pid("Name:\tpostgres\nNSpid:\t4711\t31\t1\nNSpgid:\t4711\n"), Some(1));
        assert_eq!(parse_ns_pid("NSpid:\t4711\n"), Some(4711));
        assert_eq!(parse_ns_pid("NSpid:\n"), None);
        assert_eq!(parse_ns_pid("Name:\tpostgres\n"), None);
    }

    #[test]
    fn a_title_loses_its_padding() {
        assert_eq!(title(b"postgres: io worker 0 \0\0\0\0"), "postgres: io worker 0");
        assert_eq!(title(b"/usr/bin/postgres\0-D\0/data\0"), "/usr/bin/postgres -D /data");
        assert_eq!(title(b""), "");
    }

    #[test]
    fn several_servers_are_listed() {
        let servers = vec![server(5432, "/a"), server(5433, "/b")];
        let error = find_by_address(&Selection::default(), servers, 0).expect_err("two servers match");
        assert_eq!(
            error.to_string(),
            "several PostgreSQL servers run here; choose one with -D or -p:\
             \n  -p 5432 -D /a  (PostgreSQL 18, PID 5532)\n  -p 5433 -D /b  (PostgreSQL 18, PID 5533)"
        );
    }

    #[test]
    fn an_unknown_port_lists_what_runs() {
        let selection = Selection { port: Some(1), ..Selection::default() };
        let error =
            find_by_address(&selection, vec![server(5432, "/a")], 0).expect_err("no server has port 1");
        assert_eq!(
            error.to_string(),
            "no PostgreSQL server on port 1 runs here; these do, choose one with -D or -p:\
             \n  -p 5432 -D /a  (PostgreSQL 18, PID 5532)"
        );
    }

    #[test]
    fn a_port_chooses_among_several() {
        let selection = Selection { port: Some(5433), ..Selection::default() };
        let found = find_by_address(&selection, vec![server(5432, "/a"), server(5433, "/b")], 0);
        assert_eq!(found.expect("one server has port 5433").data_directory, Path::new("/b"));
    }

    #[test]
    fn a_socket_directory_chooses_among_several() {
        let mut other = server(5433, "/b");
        other.socket_directory = Some(PathBuf::from("/no/such/directory"));
        let selection = Selection { host: Some("/no/such/directory".to_owned()), ..Selection::default() };
        let found = find_by_address(&selection, vec![server(5432, "/a"), other], 0);
        assert_eq!(found.expect("one server has that directory").port, 5433);
    }

    #[test]
    fn another_machine_is_refused() {
        // 192.0.2.0/24 is reserved for documentation: it is nobody's address.
        let selection = Selection { host: Some("192.0.2.1".to_owned()), ..Selection::default() };
        let error = find_by_address(&selection, vec![server(5432, "/a")], 0).expect_err("a remote host");
        assert!(matches!(error, ServerError::Remote { .. }), "{error}");
    }

    #[test]
    fn this_machine_has_many_names() {
        for host in ["localhost", "LOCALHOST", "127.0.0.1", "127.0.0.2"] {
            assert!(is_this_machine(host), "{host}");
        }
    }

    #[test]
    fn nothing_running_says_what_to_do() {
        let error = find_by_address(&Selection::default(), Vec::new(), 0).expect_err("no server");
        assert_eq!(
            error.to_string(),
            "no running PostgreSQL server was found in /proc; start the server first"
        );
        assert!(hint_for_none(7, false).contains("run pgiotrace as root"));
        assert_eq!(hint_for_none(7, true), "start the server first");
    }

    #[test]
    fn a_directory_of_something_else_is_refused() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let find = || find_by_directory(directory.path(), Vec::new()).expect_err("no server runs there");
        assert!(matches!(find(), ServerError::NotDataDirectory { .. }));
        fs::write(directory.path().join("PG_VERSION"), "nonsense\n").expect("a file");
        assert!(matches!(find(), ServerError::NotDataDirectory { .. }));
        fs::write(directory.path().join("PG_VERSION"), "14\n").expect("a file");
        assert!(matches!(find(), ServerError::Unsupported { major: 14, .. }));
        fs::write(directory.path().join("PG_VERSION"), "9.6\n").expect("a file");
        assert!(matches!(find(), ServerError::Unsupported { major: 9, .. }));
        fs::write(directory.path().join("PG_VERSION"), "18\n").expect("a file");
        assert!(matches!(find(), ServerError::NotRunning { .. }));
        // Beyond the kernel's largest PID, so surely nobody's.
        fs::write(directory.path().join("postmaster.pid"), "4194305\n/data\n").expect("a file");
        assert!(matches!(find(), ServerError::Stale { pid: InnerPid(4_194_305), .. }));
    }
}
