//! How the server's programs are started: by which account, in which root folder, and so that nothing of them is left.

use std::{
    ffi::{OsStr, OsString},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use crate::{
    install::{Kind, PgInstall, reachable_by_all},
    is_root,
    user::{Account, elevated},
};

/// Mounts pairs of source and target up to `--`, then becomes the rest of its arguments.
const MOUNT_AND_EXEC: &str = r#"
set -e
while [ "$1" != -- ]; do
    if [ "$1" = tmpfs ]; then
        mount -t tmpfs tmpfs "$2"
    else
        [ -e "$2" ] || mkdir -p "$2"
        mount --rbind "$1" "$2"
    fi
    shift 2
done
shift
exec "$@"
"#;

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Starts programs of one installation for one cluster.
///
/// As root they get mount and IPC namespaces of their own: what is mounted, and the shared memory that a killed server
/// leaves, goes with its last process. The chain of commands ends in `exec`, so the child's PID is the program's, except
/// through `sudo`.
#[derive(Debug)]
pub(crate) struct Sandbox {
    install: PgInstall,
    account: Account,
    /// The cluster's folder, at the same path inside and outside.
    folder: PathBuf,
    /// Whether the server gets a PID namespace of its own, as in a container.
    has_own_pids: bool,
    /// More folders at the same path inside and outside.
    visible: Vec<PathBuf>,
}

impl Sandbox {
    pub(crate) fn new(
        install: PgInstall,
        account: Account,
        folder: &Path,
        has_own_pids: bool,
        visible: Vec<PathBuf>,
    ) -> Result<Self> {
        // initdb wants a name for its account; the root folder of a chroot knows none.
        let passwd = format!("postgres:x:{}:{}:::/bin/sh\n", account.uid, account.gid);
        fs::write(folder.join("passwd"), passwd)
            .with_context(|| format!("cannot write into the cluster's folder {}", folder.display()))?;
        Ok(Self { install, account, folder: folder.to_owned(), has_own_pids, visible })
    }

    /// Whether the server has a PID namespace of its own.
    pub(crate) fn has_own_pids(&self) -> bool {
        self.has_own_pids
    }

    pub(crate) fn install(&self) -> &PgInstall {
        &self.install
    }

    /// A command of the installation, as usable by a person in a shell.
    pub(crate) fn command(&self, program: &str) -> Result<Command> {
        self.build(program, false)
    }

    /// The same, ended by SIGQUIT (a server's immediate shutdown) when the thread that started it ends.
    pub(crate) fn command_that_dies_with_us(&self, program: &str) -> Result<Command> {
        self.build(program, true)
    }

    fn build(&self, program: &str, dies: bool) -> Result<Command> {
        self.install.check_has(program)?;
        let mut command = if is_root() || matches!(self.install.kind(), Kind::Chroot { .. }) {
            self.in_namespaces(program, dies)
        } else {
            let mut command = Command::new("env");
            command.args(self.environment());
            if dies {
                command.args(["setpriv", "--pdeathsig", "QUIT", "--"]);
            }
            command.arg(self.install.on_host(program));
            command
        };
        command.current_dir("/");
        Ok(command)
    }

    fn in_namespaces(&self, program: &str, dies: bool) -> Command {
        let mut command = elevated("env");
        command.args(self.environment());
        if dies && self.has_own_pids {
            // Here the server is not the child itself, but the child's.
            command.args(["setpriv", "--pdeathsig=KILL", "--"]);
        }
        // Slave: what is mounted there stays there, but what is unmounted here is unmounted there, too.
        command.args(["unshare", "--mount", "--propagation", "slave", "--ipc"]);
        if dies && self.has_own_pids {
            command.args(["--pid", "--fork", "--kill-child=QUIT"]);
        }
        command.args(["--", "sh", "-c", MOUNT_AND_EXEC, "sh"]);
        let mut mount = |source: &OsStr, target: &Path| {
            command.arg(source).arg(target);
        };
        let program = match self.install.kind() {
            Kind::Chroot { root, bin_dir } => {
                mount(OsStr::new("/proc"), &root.join("proc"));
                mount(OsStr::new("/dev"), &root.join("dev"));
                mount(OsStr::new("tmpfs"), &root.join("dev/shm"));
                mount(OsStr::new("tmpfs"), &root.join("tmp"));
                mount(self.folder.as_os_str(), &beneath(root, &self.folder));
                for folder in &self.visible {
                    mount(folder.as_os_str(), &beneath(root, folder));
                }
                mount(self.folder.join("passwd").as_os_str(), &root.join("etc/passwd"));
                bin_dir.join(program)
            }
            Kind::Native { prefix, bin_dir } => {
                mount(OsStr::new("tmpfs"), Path::new("/dev/shm"));
                if reachable_by_all(bin_dir) {
                    bin_dir.join(program)
                } else {
                    // The cache may be in root's home, where the server's account cannot go.
                    let here = self.folder.join("install");
                    mount(prefix.as_os_str(), &here);
                    here.join(bin_dir.strip_prefix(prefix).unwrap_or(bin_dir)).join(program)
                }
            }
        };
        command.arg("--");
        if let Kind::Chroot { root, .. } = self.install.kind() {
            command.arg("chroot").arg(root);
        }
        command.arg("setpriv").args(self.drop_privileges(dies)).arg("--").arg(program);
        command
    }

    fn drop_privileges(&self, dies: bool) -> Vec<String> {
        let Account { uid, gid } = self.account;
        let mut args = vec![format!("--reuid={uid}"), format!("--regid={gid}"), "--clear-groups".to_owned()];
        if dies {
            args.push("--pdeathsig=QUIT".to_owned());
        }
        args
    }

    /// Arguments of `env`: nothing of the caller's environment (PG*, LANG, TZ) may decide what a test sees.
    fn environment(&self) -> [OsString; 4] {
        let mut home = OsString::from("HOME=");
        home.push(&self.folder);
        ["-i".into(), PATH.into(), "LC_ALL=C".into(), home]
    }
}

/// The absolute `path` inside of `root`.
fn beneath(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}
