//! Builds the kernel side with the same compiler and places it where the tracer embeds it from.

#[path = "../tests/src/cache.rs"]
mod cache;

use std::{
    env,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail};
use aya_build::{Package, Toolchain};

/// Marks the second run of this script, in the environment that aya-build wants.
const PREPARED: &str = "PGIOTRACE_BUILD_PREPARED";
/// The compiler of `rust-toolchain.toml`.
const COMPILER: &str = "1.95.0";

fn main() -> anyhow::Result<()> {
    if env::var_os(PREPARED).is_none() {
        return run_prepared();
    }
    let directory =
        PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").context("cargo sets CARGO_MANIFEST_DIR")?);
    let kernel_side = directory.join("../tracer-ebpf");
    let package = Package {
        name: "pgiotrace-ebpf",
        root_dir: kernel_side.to_str().context("the path of tracer-ebpf is not UTF-8")?,
        no_default_features: false,
        features: &["kernel"],
    };
    aya_build::build_ebpf([package], Toolchain::Custom(COMPILER))
        .context("building the kernel side failed; `cargo xtask setup` brings what it needs")
}

/// Runs this script once more with what aya-build reads from its environment: a stable compiler that builds `core`,
/// and the project's own tools on the PATH. A process cannot safely change its own environment.
fn run_prepared() -> anyhow::Result<()> {
    let mut path = env::var_os("PATH").unwrap_or_default();
    if let Some(cache) = cache::cache_dir() {
        path.push(":");
        path.push(cache.join("tools/bin"));
    }
    let script = env::current_exe().context("finding the build script itself")?;
    let output = Command::new(script)
        .env(PREPARED, "1")
        .env("RUSTC_BOOTSTRAP", "1")
        .env("PATH", path)
        .stderr(Stdio::inherit())
        .output()
        .context("running the build script once more")?;
    let instructions = String::from_utf8_lossy(&output.stdout);
    for line in instructions.lines().filter(|line| !is_progress(line)) {
        println!("{line}");
    }
    if !output.status.success() {
        bail!("the kernel side was not built");
    }
    Ok(())
}

/// Whether a line only repeats, as a warning, what the inner cargo says while it works.
fn is_progress(line: &str) -> bool {
    let text = line.strip_prefix("cargo:warning=").map(str::trim_start);
    text.is_some_and(|text| {
        [
            "Compiling ",
            "Finished ",
            "Downloading ",
            "Downloaded ",
            "Blocking ",
            "Updating ",
            "Locking ",
            "Adding ",
        ]
        .iter()
        .any(|verb| text.starts_with(verb))
    })
}
