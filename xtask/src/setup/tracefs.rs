//! tracefs, in which the kernel describes its tracepoints.

use std::{fs, process::Command};

use anyhow::{Context as _, Result};
use pgiotrace_tests::{elevated, is_root};

use super::Scope;
use crate::{project::run_quietly, step};

const STEP: &str = "tracefs";
const PLACE: &str = "/sys/kernel/tracing";

/// Mounts it where it is missing. A normal user is told how to; the demo, which has said that it uses sudo, mounts it.
pub(super) fn ensure(scope: Scope) -> Result<()> {
    if is_mounted()? {
        step::done(STEP, format!("mounted at {PLACE}"));
        return Ok(());
    }
    if !is_root() && scope != Scope::Demo {
        step::done(STEP, format!("not mounted; tracing needs it: sudo mount -t tracefs tracefs {PLACE}"));
        return Ok(());
    }
    let mount: &mut Command = &mut elevated("mount");
    run_quietly(mount.args(["-t", "tracefs", "tracefs", PLACE]))
        .with_context(|| format!("cannot mount tracefs at {PLACE}: does this kernel have CONFIG_TRACING?"))?;
    step::done(STEP, format!("mounted now, at {PLACE}"));
    Ok(())
}

/// Asked of the mount table: a normal user may not look into tracefs itself.
fn is_mounted() -> Result<bool> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read /proc/self/mounts")?;
    Ok(mounts.lines().any(|line| {
        let mut fields = line.split(' ').skip(1);
        fields.next() == Some(PLACE) && fields.next() == Some("tracefs")
    }))
}
