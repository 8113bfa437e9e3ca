//! Programs that tests need beside PostgreSQL: found, or unpacked from a Debian package into the cache.

use std::{fs, os::unix::fs::PermissionsExt as _};

use anyhow::{Context as _, Result};

use super::debian::{self, Installed, Suite};
use crate::{
    project::{cache, find_program, make_dir, tools_bin},
    step,
};

/// Runs a program with those of its libraries and settings that the machine lacks.
const WRAPPER: &str = r#"#!/bin/sh
tree=$(dirname "$(readlink -f "$0")")/../../PACKAGE
program=$(ls "$tree/usr/sbin/PROGRAM" "$tree/sbin/PROGRAM" 2>/dev/null | head -n 1)
LD_LIBRARY_PATH=$(echo "$tree"/usr/lib/*-linux-gnu "$tree"/lib/*-linux-gnu | tr ' ' ':')
MKE2FS_CONFIG=$tree/etc/mke2fs.conf
export LD_LIBRARY_PATH
[ ! -e "$MKE2FS_CONFIG" ] || export MKE2FS_CONFIG
exec "$program" "$@"
"#;

/// A program of the administrators' and the package that brings it.
#[derive(Debug)]
pub(crate) struct DebianTool {
    program: &'static str,
    package: &'static str,
}

/// With it the tests look for what a killed tracer left in the kernel.
pub(crate) const BPFTOOL: DebianTool = DebianTool { program: "bpftool", package: "bpftool" };
/// Formats slow disks.
pub(crate) const MKFS_EXT4: DebianTool = DebianTool { program: "mkfs.ext4", package: "e2fsprogs" };
/// Formats slow disks.
pub(crate) const MKFS_XFS: DebianTool = DebianTool { program: "mkfs.xfs", package: "xfsprogs" };

impl DebianTool {
    /// Brings it; without it a few tests fail.
    pub(crate) fn ensure(&self) {
        let program = self.program;
        if let Some(file) = find_program(program) {
            step::done(program, format!("found in {}", file.parent().unwrap_or(&file).display()));
            return;
        }
        match self.fetch() {
            Ok(version) => step::done(program, format!("{version}, from the Debian package, in the cache")),
            Err(error) => step::done(
                program,
                format!("left out: {error:#}: what needs it will fail; install it, so that it is in PATH"),
            ),
        }
    }

    fn fetch(&self) -> Result<String> {
        let Self { program, package } = *self;
        step::doing(program, "fetching it from Debian");
        let suite = Suite::of_this_machine(Installed::AsHere)?;
        let version =
            suite.versions(package)?.into_iter().next().with_context(|| format!("there is no {package}"))?;
        let files = suite.download(&[package])?;
        debian::unpack(&files, &cache()?.join(package), &format!("{package} {version}"))?;
        let bin = tools_bin()?;
        make_dir(&bin)?;
        let wrapper = bin.join(program);
        fs::write(&wrapper, WRAPPER.replace("PACKAGE", package).replace("PROGRAM", program))
            .with_context(|| format!("cannot write {program}'s wrapper"))?;
        fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755))
            .with_context(|| format!("cannot make {program}'s wrapper executable"))?;
        Ok(version)
    }
}
