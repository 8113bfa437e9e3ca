//! Everything that a contributor runs: `cargo xtask setup | check | test | demo | slowdisk`.

mod check;
mod demo;
mod project;
mod setup;
mod slowdisk;
mod step;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Set-up, checks, tests and the demo of pgiotrace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Bring all that the build, the tests and the demo need; says what it found, and fetches only what is missing.
    Setup,
    /// Check the formatting, both sides with clippy, licences and sources of the dependencies, and the spelling.
    Check,
    /// Set up, build, and run the unit tests and, as root, the integration tests.
    Test,
    /// Run one cold query under sync, worker and io_uring on a throw-away server, and compare what is claimed with what
    /// was.
    Demo {
        /// Leave the server running, and say how to reach it and how to end it.
        #[arg(long)]
        keep: bool,
    },
    /// Make a disk whose reads take as long as you say, print where it is mounted, and remove it at Ctrl-C. Needs root.
    Slowdisk(slowdisk::Args),
}

fn main() -> ExitCode {
    // `cargo xtask demo -- --keep` is what cargo's users type by habit.
    let args = std::env::args_os().filter(|arg| arg != "--");
    let result = match Cli::parse_from(args).task {
        Task::Setup => setup::run(setup::Scope::Tests),
        Task::Check => check::run(),
        Task::Test => test::run(),
        Task::Demo { keep } => demo::run(keep),
        Task::Slowdisk(args) => slowdisk::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
