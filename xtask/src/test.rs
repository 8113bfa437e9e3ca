//! Unit and integration tests.

use anyhow::{Context as _, Result};
use pgiotrace_tests::is_root;

use crate::{
    project::{cargo, root, run_visibly},
    setup::{self, Scope},
    step,
};

/// Sets up, builds, and runs all tests that this user may.
pub(crate) fn run() -> Result<()> {
    let everything = is_root();
    setup::run(if everything { Scope::Tests } else { Scope::Build })?;
    run_visibly(cargo()?.args(["build", "--workspace"])).context("cannot build the workspace")?;
    let mut command = cargo()?;
    command.args(["test", "--workspace"]);
    if everything {
        command.env("PGIOTRACE_BIN", root().join("target/debug/pgiotrace"));
    } else {
        command.args(["--exclude", "pgiotrace-tests"]);
        step::done(
            "integration",
            "left out: it loads programs into the kernel, mounts and empties the page cache, so it needs root \
             (in a virtual machine of its own, if you like): sudo -E cargo xtask test",
        );
    }
    run_visibly(&mut command).context("the tests failed")
}
