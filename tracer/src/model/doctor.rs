//! The report of `pgiotrace doctor`.

use serde::Serialize;

/// What became of one check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Ok,
    /// Not there; `cost` says what that takes away.
    Missing,
    /// There, but does not work.
    Broken,
}

/// One line of the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Group of checks: `kernel`, `programs`, `privileges`, `server`.
    pub area: &'static str,
    /// What was looked at.
    pub name: String,
    /// What became of it.
    pub status: Status,
    /// What was found.
    pub detail: String,
    /// What is lost by it, when not `Ok`.
    pub cost: Option<String>,
    /// How to mend it, when not `Ok` and something can be done.
    pub mend: Option<String>,
    /// Whether `stat` cannot run without it.
    pub required: bool,
}

/// All checks, in the order in which they are shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DoctorReport {
    /// Always `pgiotrace.doctor/1`.
    pub schema: &'static str,
    /// The checks.
    pub checks: Vec<Check>,
    /// Whether `stat` could run.
    pub can_trace: bool,
}
