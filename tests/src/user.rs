//! Who runs what: the server's account, and the few things that need root.

use std::{ffi::OsStr, fs, process::Command};

use anyhow::{Context as _, Result, bail};

/// Whether this process may do what only root may.
#[must_use]
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A command that runs as root: `program` itself as root, through `sudo` as anybody else.
///
/// `sudo -n` never asks: whoever starts a longer run calls `sudo -v` first, while a person is watching.
#[must_use]
pub fn elevated(program: impl AsRef<OsStr>) -> Command {
    if is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("sudo");
    command.args(["-n", "--"]).arg(program);
    command
}

/// Writes back what is dirty and empties the kernel's page cache, so that the next reads come from the device.
///
/// # Errors
///
/// When the kernel refuses: root is needed, and a container may not be allowed to at all.
pub fn drop_caches() -> Result<()> {
    let script = "sync && echo 3 > /proc/sys/vm/drop_caches";
    let status =
        elevated("sh").args(["-c", script]).status().context("cannot run sh to empty the page cache")?;
    if !status.success() {
        bail!(
            "cannot empty the page cache through /proc/sys/vm/drop_caches: run this as root, outside of a container"
        );
    }
    Ok(())
}

/// The account that a server runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Account {
    pub uid: u32,
    pub gid: u32,
}

impl Account {
    /// This process's own account, unless that is root, which PostgreSQL refuses: then `postgres`, else `nobody`.
    pub(crate) fn for_server() -> Result<Self> {
        if !is_root() {
            let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
            return Ok(Self { uid, gid });
        }
        let passwd = fs::read_to_string("/etc/passwd")
            .context("cannot read /etc/passwd to choose the server's account")?;
        ["postgres", "nobody"].iter().find_map(|name| Self::parse(&passwd, name)).context(
            "cannot choose the server's account: /etc/passwd has neither `postgres` nor `nobody`; add one of them",
        )
    }

    fn parse(passwd: &str, name: &str) -> Option<Self> {
        let fields: Vec<_> =
            passwd.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|f| f[0] == name)?;
        Some(Self { uid: fields.get(2)?.parse().ok()?, gid: fields.get(3)?.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_are_found_by_name() {
        let passwd = "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65533::/:/usr/sbin/nologin\n";
        assert_eq!(Account::parse(passwd, "nobody"), Some(Account { uid: 65534, gid: 65533 }));
        assert_eq!(Account::parse(passwd, "postgres"), None);
    }
}
