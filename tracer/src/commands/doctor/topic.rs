//! What a check is about, and how its result is put into words.

use std::error::Error;
use std::fs;
use std::io;

use crate::model::{Check, Status};

/// What a check is about, whatever becomes of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Topic {
    area: &'static str,
    name: &'static str,
    required: bool,
}

/// What is wrong.
#[derive(Debug, Clone)]
pub(super) struct Problem {
    detail: String,
    cost: String,
    mend: Option<String>,
}

impl Problem {
    /// What was found and what is lost by it.
    pub(super) fn new(detail: impl Into<String>, cost: impl Into<String>) -> Self {
        Self { detail: detail.into(), cost: cost.into(), mend: None }
    }

    /// From an error whose sentence ends with what to do, as this program's do: `…; run pgiotrace as root`.
    pub(super) fn from_sentence(sentence: &str, cost: impl Into<String>) -> Self {
        match sentence.split_once("; ") {
            // A question mends nothing.
            Some((detail, mend)) if !mend.ends_with('?') => Self::new(detail, cost).mend(mend),
            _ => Self::new(sentence, cost),
        }
    }

    /// How to mend it.
    pub(super) fn mend(self, mend: impl Into<String>) -> Self {
        Self { mend: Some(mend.into()), ..self }
    }

    /// How to mend it, unless that is already known.
    pub(super) fn or_mend(self, mend: &str) -> Self {
        Self { mend: self.mend.or_else(|| Some(mend.to_owned())), ..self }
    }
}

impl Topic {
    /// Without it `stat` cannot run.
    pub(super) const fn required(area: &'static str, name: &'static str) -> Self {
        Self { area, name, required: true }
    }

    /// Without it `stat` runs and shows less.
    pub(super) const fn optional(area: &'static str, name: &'static str) -> Self {
        Self { area, name, required: false }
    }

    /// All is well.
    pub(super) fn ok(self, detail: impl Into<String>) -> Check {
        let Self { area, name, required } = self;
        let (name, detail) = (name.to_owned(), detail.into());
        Check { area, name, status: Status::Ok, detail, cost: None, mend: None, required }
    }

    /// It is not there.
    pub(super) fn missing(self, problem: Problem) -> Check {
        self.with(Status::Missing, problem)
    }

    /// It is there and does not work.
    pub(super) fn broken(self, problem: Problem) -> Check {
        self.with(Status::Broken, problem)
    }

    fn with(self, status: Status, problem: Problem) -> Check {
        let Problem { detail, cost, mend } = problem;
        Check { status, cost: Some(cost), mend, ..self.ok(detail) }
    }
}

/// Text of a small file, trimmed, or why there is none.
pub(super) type FileText<'a> = Result<&'a str, io::ErrorKind>;

/// Reads a small file such as a sysctl.
pub(super) fn read(path: &str) -> Result<String, io::ErrorKind> {
    fs::read_to_string(path).map(|text| text.trim().to_owned()).map_err(|error| error.kind())
}

/// First line of an error, and the cause at its bottom where that line leaves it out.
pub(super) fn first_line(error: &dyn Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default().trim_end_matches([' ', ':']);
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    let cause = cause.to_string();
    let cause = cause.lines().next().unwrap_or_default();
    if line.contains(cause) { line.to_owned() } else { format!("{line}: {cause}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Outer {
        text: &'static str,
        source: io::Error,
    }

    fn problem(sentence: &str) -> (String, Option<String>) {
        let problem = Problem::from_sentence(sentence, "something");
        (problem.detail, problem.mend)
    }

    #[test]
    fn a_sentence_is_taken_apart_where_it_says_what_to_do() {
        let both = ("no server runs".to_owned(), Some("start it first".to_owned()));
        assert_eq!(problem("no server runs; start it first"), both);
        assert_eq!(problem("it is remote"), ("it is remote".to_owned(), None));
        let question = "connecting failed; is it accepting connections there?";
        assert_eq!(problem(question), (question.to_owned(), None));
    }

    #[test]
    fn a_cause_is_named_once() {
        let refused = |text| first_line(&Outer { text, source: io::Error::from_raw_os_error(1) });
        let cause = io::Error::from_raw_os_error(1).to_string();
        assert_eq!(refused("`bpf` failed"), format!("`bpf` failed: {cause}"));
        assert_eq!(refused("it said Operation not permitted (os error 1). Log:\nmore"), {
            "it said Operation not permitted (os error 1). Log"
        });
    }
}
