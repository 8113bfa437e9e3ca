//! bpftool, with which the tests look for what a killed tracer left in the kernel.

use std::{fs, os::unix::fs::PermissionsExt as _};

use anyhow::{Context as _, Result};

use super::debian::{self, Installed, Suite};
use crate::{
    project::{cache, find_program, make_dir, tools_bin},
    step,
};

const STEP: &str = "bpftool";
/// Runs it with those of its libraries that the machine lacks.
const WRAPPER: &str = r#"#!/bin/sh
tree=$(dirname "$(readlink -f "$0")")/../../bpftool
LD_LIBRARY_PATH=$(echo "$tree"/usr/lib/*-linux-gnu) exec "$tree/usr/sbin/bpftool" "$@"
"#;

/// Brings it; without it a few tests fail.
pub(super) fn ensure() {
    if let Some(file) = find_program(STEP) {
        step::done(STEP, format!("found in {}", file.parent().unwrap_or(&file).display()));
        return;
    }
    match from_debian() {
        Ok(version) => step::done(STEP, format!("{version}, from the Debian package, in the cache")),
        Err(error) => step::done(
            STEP,
            format!("left out: {error:#}: its tests will fail; install it, so that it is in PATH"),
        ),
    }
}

fn from_debian() -> Result<String> {
    step::doing(STEP, "fetching it from Debian");
    let suite = Suite::of_this_machine(Installed::AsHere)?;
    let version = suite.versions(STEP)?.into_iter().next().context("there is no bpftool")?;
    let files = suite.download(&[STEP])?;
    debian::unpack(&files, &cache()?.join(STEP), &format!("{STEP} {version}"))?;
    let bin = tools_bin()?;
    make_dir(&bin)?;
    let wrapper = bin.join(STEP);
    fs::write(&wrapper, WRAPPER).context("cannot write bpftool's wrapper")?;
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755))
        .context("cannot make bpftool's wrapper executable")?;
    Ok(version)
}
