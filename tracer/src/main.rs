//! The binary `pgiotrace`: options, the verb, the exit code.

mod messages;

use std::{process::ExitCode, time::Instant};

use pgiotrace::{
    cli::{self, Action, Options},
    commands,
    present::Destination,
};

fn main() -> ExitCode {
    let started = Instant::now();
    let Options { action, verbosity, color } = cli::parse();
    color.write_global();
    messages::to_stderr(verbosity);
    let result = match &action {
        Action::Stat(options) => commands::stat::run(options, verbosity > 0, started, color),
        Action::Explain(options) => commands::explain::run(options, verbosity > 0, color),
        Action::Compare(options) => commands::explain::compare::run(options, color),
        Action::Doctor(options) => commands::doctor::run(options, color),
        Action::Completions(shell) => {
            let written = Destination::Stdout.write(color, |out| cli::write_completions(*shell, out));
            written.map(|()| ExitCode::SUCCESS).map_err(Into::into)
        }
    };
    result.unwrap_or_else(|error| {
        // Each error is one sentence that names its cause already.
        anstream::eprintln!("pgiotrace: {error}");
        ExitCode::FAILURE
    })
}
