//! A copy of a test's own program that is there to be killed.
//!
//! A suite that uses it has a test of the name `victim`, which in an ordinary run does nothing.

use std::{
    env,
    io::{self, BufRead as _, BufReader, Read as _},
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result};

/// Set in the copy.
const VICTIM: &str = "PGIOTRACE_TEST_VICTIM";
/// What the copy says first.
const STARTED: &str = "started: ";

/// Whether this process is the copy.
#[must_use]
pub fn is_victim() -> bool {
    env::var_os(VICTIM).is_some()
}

/// In the copy: tells the one who started it that all is made, and lives on until it is killed or its parent is gone.
///
/// # Errors
///
/// When its standard input cannot be read.
pub fn live_on(message: &str) -> Result<()> {
    println!("\n{STARTED}{message}");
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// Starts the copy, waits until all is made, and returns what it says.
///
/// # Errors
///
/// When it cannot be started, or ended before.
pub fn start() -> Result<(Child, String)> {
    let mut victim = Command::new(env::current_exe()?)
        .args(["--exact", "victim", "--nocapture"])
        .env(VICTIM, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let lines = BufReader::new(victim.stdout.take().context("the victim has no stdout")?).lines();
    let said = lines.map_while(Result::ok).find_map(|line| line.strip_prefix(STARTED).map(str::to_owned));
    Ok((victim, said.context("the victim ended before it had made all")?))
}
