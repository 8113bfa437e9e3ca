//! `pgiotrace doctor`: what this kernel, these privileges and this server allow.
//!
//! Privileges come first: without them every later probe of the kernel would fail for the wrong reason. Each check is a
//! pure function of what was read, so that it can be tested for machines that are not at hand.

mod connection;
mod kernel;
mod privileges;
mod programs;
mod server;
mod topic;

use std::process::ExitCode;

use anstream::ColorChoice;

use crate::cli::{ConnectionOptions, DoctorOptions};
use crate::model::{Check, DoctorReport, Status};
use crate::present;

/// Version of the JSON form.
const SCHEMA: &str = "pgiotrace.doctor/1";

/// Looks at everything and delivers the report; success when `stat` could run. Changes nothing.
///
/// Must not be called on a thread that runs an async runtime: the connection to the server is a blocking one, and the
/// programs are loaded inside a runtime of their own.
///
/// # Errors
///
/// When the report cannot be delivered.
pub fn run(options: &DoctorOptions, color: ColorChoice) -> anyhow::Result<ExitCode> {
    let DoctorOptions { connection, report: output } = options;
    let report = examine(connection);
    present::deliver_doctor(&report, output.format, &output.destination, color)?;
    Ok(if report.can_trace { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn examine(connection: &ConnectionOptions) -> DoctorReport {
    let privileges = privileges::Privileges::of_this_process();
    let mut checks = privileges.checks();
    checks.extend(kernel::checks());
    checks.extend(programs::checks(&privileges));
    checks.extend(server::checks(connection));
    DoctorReport { schema: SCHEMA, can_trace: can_trace(&checks), checks }
}

/// Makes sure that this process may trace at all: without the privileges the kernel's own errors are cryptic, and in a
/// container's PID namespace a trace would be silently empty.
///
/// # Errors
///
/// The first thing that is missing, in one sentence.
pub(super) fn require_privileges() -> anyhow::Result<()> {
    let checks = privileges::Privileges::of_this_process().checks();
    match checks.into_iter().find(|check| check.required && check.status != Status::Ok) {
        None => Ok(()),
        Some(Check { name, detail, mend, .. }) => {
            let mend = mend.unwrap_or_else(|| "see pgiotrace doctor".to_owned());
            anyhow::bail!("nothing can be traced here: {name}: {detail}; {mend}")
        }
    }
}

/// Whether everything that is required is there.
fn can_trace(checks: &[Check]) -> bool {
    checks.iter().all(|check| !check.required || check.status == Status::Ok)
}

#[cfg(test)]
mod tests {
    use super::topic::{Problem, Topic};
    use super::*;

    #[test]
    fn only_what_is_required_stops_a_trace() {
        let (needed, useful) = (Topic::required("kernel", "a"), Topic::optional("kernel", "b"));
        let problem = || Problem::new("gone", "something");
        assert!(can_trace(&[needed.ok("there"), useful.missing(problem()), useful.broken(problem())]));
        assert!(!can_trace(&[needed.missing(problem()), useful.ok("there")]));
        assert!(!can_trace(&[needed.broken(problem())]));
    }
}
