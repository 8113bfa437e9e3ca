//! Programs that are written in Rust: found, or installed by cargo or as a wheel.

use std::{os::unix::fs::symlink, path::PathBuf};

use anyhow::{Context as _, Result};

use super::packages::{self, Wheel};
use crate::{
    project::{cache, cargo, in_path, is_executable, run_quietly, tools_bin, version_of},
    step,
};

/// A program and the crate that brings it.
struct Tool {
    program: &'static str,
    package: &'static str,
    /// The version that is installed.
    version: &'static str,
    /// What the version of one that is already there must begin with.
    accepted: &'static str,
    /// A wheel that brings the same program within seconds.
    wheel: Option<Wheel>,
}

/// The linker of the kernel side. From 0.11 on it needs an LLVM of the system's.
const BPF_LINKER: Tool =
    Tool { program: "bpf-linker", package: "bpf-linker", version: "0.10.4", accepted: "0.10.", wheel: None };

const CARGO_DENY: Tool =
    Tool { program: "cargo-deny", package: "cargo-deny", version: "0.20.2", accepted: "0.", wheel: None };

const TYPOS: Tool = Tool {
    program: "typos",
    package: "typos-cli",
    version: "1.52.0",
    accepted: "1.",
    wheel: Some(Wheel {
        requirement: "typos==1.52.0",
        // manylinux x86_64 and aarch64, as the package index states them.
        sha256: &[
            "418fd85f7fc11dec14e5482e747f6e916af56da96207cde0cdd69540a4b389f6",
            "5e870133c7e9cace94183e4d638697004a1473e79abcd01b8f75e362049a9b5c",
        ],
    }),
};

/// Brings the linker of the kernel side.
pub(crate) fn bpf_linker() -> Result<()> {
    BPF_LINKER.ensure()
}

/// Brings the checker of licences and sources.
pub(crate) fn cargo_deny() -> Result<()> {
    CARGO_DENY.ensure()
}

/// Brings the spell checker.
pub(crate) fn typos() -> Result<()> {
    TYPOS.ensure()
}

impl Tool {
    fn ensure(&self) -> Result<()> {
        let cached = tools_bin()?.join(self.program);
        let candidates = [(in_path(self.program), "PATH"), (Some(cached), "the cache")];
        for (file, place) in candidates {
            let version = file.filter(|file| is_executable(file)).and_then(|file| version_of(&file));
            if let Some(version) = version.filter(|version| version.starts_with(self.accepted)) {
                step::done(self.program, format!("{version}, in {place}"));
                return Ok(());
            }
        }
        if let Some(wheel) = &self.wheel
            && self.install_wheel(wheel).is_ok()
        {
            step::done(self.program, format!("{}, installed from its wheel into the cache", self.version));
            return Ok(());
        }
        self.install_with_cargo()?;
        step::done(self.program, format!("{}, installed with cargo into the cache", self.version));
        Ok(())
    }

    fn install_with_cargo(&self) -> Result<()> {
        step::doing(self.program, format!("installing {} with cargo, takes minutes", self.version));
        let mut command = cargo()?;
        command.args(["install", self.package, "--version", self.version, "--locked", "--force", "--root"]);
        command.arg(cache()?.join("tools"));
        // Not this workspace's build folder: cargo would lock it, and keep the tool's objects there for ever.
        command.env_remove("CARGO_TARGET_DIR");
        run_quietly(&mut command).map(drop).with_context(|| {
            format!(
                "cannot install {} {}: install it by hand, so that it is in PATH",
                self.program, self.version
            )
        })
    }

    fn install_wheel(&self, wheel: &Wheel) -> Result<()> {
        step::doing(self.program, format!("fetching {}", wheel.requirement));
        let dir: PathBuf = cache()?.join("wheels").join(self.program);
        packages::install_wheel(wheel, &dir)?;
        let bin = tools_bin()?;
        crate::project::make_dir(&bin)?;
        let link = bin.join(self.program);
        // One that is too old, or of an interrupted run.
        let _ = std::fs::remove_file(&link);
        symlink(dir.join("bin").join(self.program), &link)
            .context("cannot link the wheel's program into the cache")
    }
}
