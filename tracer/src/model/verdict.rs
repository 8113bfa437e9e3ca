//! What a trace amounts to, in sentences.

use serde::Serialize;

/// A finding: a rule that held, with the figures that it held by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// Name of the rule: `device-bound`, `throttled`, …
    pub rule: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// One sentence with numbers.
    pub evidence: String,
    /// What to try: one sentence.
    pub advice: String,
}

/// How much a finding matters, least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Good to know.
    Info,
    /// Costs time.
    Warn,
    /// Costs most of the time.
    Problem,
}

impl Severity {
    /// Its name, as in the JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Problem => "problem",
        }
    }
}
