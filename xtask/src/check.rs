//! What CI holds every change to, apart from the tests.

use std::{env, process::Command};

use anyhow::{Context as _, Result, bail};

use crate::{
    project::{cargo, root, run_quietly, run_visibly, tools_bin},
    setup::{self, Scope},
    step,
};

/// Runs every check, up to the first that fails.
pub(crate) fn run() -> Result<()> {
    setup::run(Scope::Build)?;
    setup::cargo_deny()?;
    setup::typos()?;
    check("fmt", cargo()?.args(["fmt", "--all", "--check"]))?;
    let lints = ["--", "-D", "warnings"];
    check("clippy, user", cargo()?.args(["clippy", "--quiet", "--workspace", "--all-targets"]).args(lints))?;
    check("clippy, kernel", kernel_clippy()?.args(lints))?;
    check("deny", cargo()?.args(["deny", "--log-level", "error", "check", "bans", "licenses", "sources"]))?;
    advisories()?;
    let typos = crate::project::find_program("typos").unwrap_or(tools_bin()?.join("typos"));
    check("typos", Command::new(typos).current_dir(root()))
}

fn check(name: &str, command: &mut Command) -> Result<()> {
    step::doing(name, "checking");
    run_visibly(command).with_context(|| format!("the check `{name}` failed"))?;
    step::done(name, "ok");
    Ok(())
}

/// The kernel side as aya-build compiles it for the tracer: the same target, `core` from source, and the same `cfg`.
fn kernel_clippy() -> Result<Command> {
    let target = if cfg!(target_endian = "big") { "bpfeb-unknown-none" } else { "bpfel-unknown-none" };
    let mut command = cargo()?;
    command.args(["clippy", "--quiet", "--release", "--package", "pgiotrace-ebpf", "--bin", "pgiotrace-bpf"]);
    command.args(["--features", "kernel", "--target", target, "-Z", "build-std=core"]);
    // Its own folder, since other flags would make the ordinary build start afresh each time.
    command.arg("--target-dir").arg(root().join("target/ebpf"));
    command.env("RUSTC_BOOTSTRAP", "1");
    command.env("CARGO_ENCODED_RUSTFLAGS", format!("--cfg=bpf_target_arch=\"{}\"", env::consts::ARCH));
    Ok(command)
}

/// Known weaknesses of dependencies, where the database of them can be reached.
fn advisories() -> Result<()> {
    step::doing("advisories", "fetching the database");
    if let Err(error) = run_quietly(cargo()?.args(["deny", "--log-level", "error", "fetch", "db"])) {
        let reason = format!("{error:#}");
        let reason = reason.lines().next().unwrap_or_default();
        step::done("advisories", format!("not checked, since their database cannot be fetched ({reason})"));
        return Ok(());
    }
    let mut command = cargo()?;
    if run_visibly(command.args(["deny", "--log-level", "error", "check", "--disable-fetch", "advisories"]))
        .is_err()
    {
        bail!("the check `advisories` failed");
    }
    step::done("advisories", "ok");
    Ok(())
}
