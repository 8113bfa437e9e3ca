//! The source of `core`, which is compiled anew for the kernel side.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use super::debian::{self, Installed, Suite};
use crate::{
    project::{cache, in_path, root, run_quietly},
    setup::unpack,
    step,
};

const STEP: &str = "rust-src";
/// Suites that have carried the compiler's source, where older versions stay longest first.
const SUITES: [&str; 5] = ["trixie-backports", "forky", "sid", "trixie", "bookworm-backports"];

/// Brings the source of the very version of the pinned compiler.
pub(super) fn ensure() -> Result<()> {
    let rustc = |args: &[&str]| run_quietly(pinned("rustc").args(args));
    let version = rustc(&["-V"])?.split_whitespace().nth(1).context("rustc -V prints no version")?.to_owned();
    let place = PathBuf::from(rustc(&["--print", "sysroot"])?.trim()).join("lib/rustlib/src/rust");
    if has_core(&place) {
        step::done(STEP, format!("{version}, in the toolchain"));
        return Ok(());
    }
    step::doing(STEP, "asking rustup for it");
    let added =
        in_path("rustup").is_some() && run_quietly(pinned("rustup").args(["component", "add", STEP])).is_ok();
    if added && has_core(&place) {
        step::done(STEP, format!("{version}, added by rustup"));
        return Ok(());
    }
    let source = from_debian(&version).with_context(|| {
        format!("cannot get the source of Rust {version}: run `rustup component add rust-src` with a network")
    })?;
    link(&source, &place)?;
    step::done(STEP, format!("{version}, from the Debian package, linked into the toolchain"));
    Ok(())
}

/// A program of the toolchain that rust-toolchain.toml names, whichever this very task was started with.
fn pinned(program: &str) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).env_remove("RUSTUP_TOOLCHAIN");
    command
}

fn has_core(place: &Path) -> bool {
    place.join("library/core/src/lib.rs").exists()
}

/// The source's folder in the cache.
fn from_debian(version: &str) -> Result<PathBuf> {
    let tree = cache()?.join(STEP).join(version);
    let source = tree.join(format!("usr/src/rustc-{version}"));
    if unpack::is_complete(&tree) && has_core(&source) {
        return Ok(source);
    }
    let (suite, package) = find(version)?;
    step::doing(STEP, format!("fetching {package}"));
    let files = suite.download(&[&package])?;
    debian::unpack(&files, &tree, &format!("Debian {package}"))?;
    if !has_core(&source) {
        bail!("Debian's {package} has no library/core in usr/src/rustc-{version}");
    }
    Ok(source)
}

fn find(version: &str) -> Result<(Suite, String)> {
    let mut failures = Vec::new();
    for name in SUITES {
        step::doing(STEP, format!("looking for {version} in Debian {name}"));
        match Suite::open(name, Installed::Nothing).and_then(|suite| Ok((suite.versions(STEP)?, suite))) {
            Ok((versions, suite)) => {
                let same = |found: &&String| found.split(['+', '-']).next() == Some(version);
                if let Some(found) = versions.iter().find(same) {
                    return Ok((suite, format!("{STEP}={found}")));
                }
                failures.push(format!("{name} has only {}", versions.join(", ")));
            }
            Err(error) => failures.push(format!("{error:#}")),
        }
    }
    bail!("no Debian suite has it ({})", failures.join("; "))
}

fn link(source: &Path, place: &Path) -> Result<()> {
    let what = || {
        format!(
            "cannot link {} into the toolchain as {}: is the toolchain yours?",
            source.display(),
            place.display()
        )
    };
    let parent = place.parent().context("the toolchain's source has no parent folder")?;
    fs::create_dir_all(parent).with_context(what)?;
    // A link into a cache that was moved away.
    if place.is_symlink() {
        fs::remove_file(place).with_context(what)?;
    }
    symlink(source, place).with_context(what)
}
