//! Programs of the system's, or those that setup has brought.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::cache::cache_dir;

/// Finds a program: in `PATH`, in the administrators' folders that a `PATH` often lacks, or in setup's cache.
///
/// # Errors
///
/// When it is in none of them.
pub fn find_program(name: &str) -> Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let usual = env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    let folders = usual.chain(cache_dir().map(|cache| cache.join("tools/bin")));
    let found = folders.map(|folder| folder.join(name)).find(|file| file.exists());
    found.with_context(|| format!("cannot find {name}: run `cargo xtask setup`, or install it"))
}

/// Runs a program to its end and returns what it wrote to stdout.
///
/// # Errors
///
/// When it cannot be started, or did not end well; the error has what it said.
pub fn run(command: &mut Command) -> Result<String> {
    let name =
        Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {name}"))?;
    if !output.status.success() {
        bail!("{name} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// What bpftool says, as JSON.
///
/// # Errors
///
/// When it is not there, or does not know what it was asked for.
pub fn bpftool(args: &[&str]) -> Result<Value> {
    let text = run(Command::new(find_program("bpftool")?).arg("--json").args(args))?;
    serde_json::from_str(&text).context("bpftool printed no JSON")
}
