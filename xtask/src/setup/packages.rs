//! Packages of Python's and Node's registries, for the few programs that they bring ready-made.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use super::unpack;
use crate::project::{cache, in_path, make_dir, run_quietly};

/// A wheel of the Python package index.
pub(crate) struct Wheel {
    /// Name and exact version.
    pub requirement: &'static str,
    /// Checksums of the files that may be used; pip refuses any other.
    pub sha256: &'static [&'static str],
}

/// Installs a wheel, and nothing that it depends on, into a folder of its own.
pub(crate) fn install_wheel(wheel: &Wheel, target: &Path) -> Result<()> {
    if in_path("python3").is_none() {
        bail!("cannot fetch {}: python3 with pip is not installed", wheel.requirement);
    }
    let downloads = cache()?.join("downloads/wheels");
    make_dir(&downloads)?;
    let mut requirement = wheel.requirement.to_owned();
    for hash in wheel.sha256 {
        write!(requirement, " --hash=sha256:{hash}")?;
    }
    let file = downloads.join("requirements.txt");
    fs::write(&file, requirement).with_context(|| format!("cannot write {}", file.display()))?;

    let pip = |verb: &str| {
        let mut command = Command::new("python3");
        command.args(["-m", "pip", verb, "--quiet", "--disable-pip-version-check", "--no-deps"]);
        command.args(["--only-binary", ":all:", "--require-hashes", "-r"]).arg(&file);
        command
    };
    run_quietly(pip("download").arg("--dest").arg(&downloads))?;
    unpack::atomically(target, wheel.requirement, |fresh| {
        run_quietly(
            pip("install").args(["--no-index", "--find-links"]).arg(&downloads).arg("--target").arg(fresh),
        )?;
        Ok(())
    })
}

/// Fetches a package of the Node registry, which npm checks against the index, and unpacks it.
pub(crate) fn unpack_npm(package: &str, target: &Path) -> Result<()> {
    if in_path("npm").is_none() {
        bail!("cannot fetch {package}: npm is not installed");
    }
    let downloads = cache()?.join("downloads/npm");
    make_dir(&downloads)?;
    let mut npm = Command::new("npm");
    npm.args(["pack", "--silent", "--pack-destination"]).arg(&downloads).arg(package).current_dir(&downloads);
    let printed = run_quietly(&mut npm)?;
    let archive: PathBuf =
        downloads.join(printed.lines().last().context("npm named no file that it fetched")?);
    unpack::atomically(target, package, |fresh| {
        // All is below one folder, whose name says nothing.
        let mut tar = Command::new("tar");
        tar.arg("-xzf").arg(&archive).arg("-C").arg(fresh).args(["--strip-components=1", "--no-same-owner"]);
        run_quietly(&mut tar).map(drop)
    })
}
