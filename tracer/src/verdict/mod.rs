//! What a trace amounts to: rules over the finished report. Pure; one small function a rule.
//!
//! A rule says nothing where a figure that it needs is not known, or where there are too few reads to judge by. Shares are
//! shares of *time*, since many fast reads cost less than a few slow ones.

mod cache;
mod claim;
mod depth;
mod device;
mod figures;
mod reads;
#[cfg(test)]
mod samples;
mod sessions;

use std::cmp::Reverse;

pub use claim::explain_misleads;
use figures::Figures;

use crate::model::{Severity, StatReport, Verdict};

/// The least number of reads to judge by. A percentile or a share of fewer is chance; and a server that reads less in a
/// trace has no trouble with reading, or was not traced when it had.
pub const FEWEST_READS: u64 = 100;

/// More than that many findings are a list to work off, and no verdict.
const MOST_VERDICTS: usize = 5;

/// From that share of the time on, a finding is a problem: whatever else is mended, more than half of the time stays.
const MOST_OF_THE_TIME: f64 = 0.5;

/// A figure that a rule needs is not known, or there are too few reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NotKnown;

/// A figure, where it is known.
type Known<T> = Result<T, NotKnown>;

/// A rule that held.
#[derive(Debug, Clone, PartialEq)]
struct Finding {
    /// Share of the time of reading that is at stake, 0 to 1.
    share: f64,
    severity: Severity,
    evidence: String,
    advice: String,
}

impl Finding {
    /// As severe as its share of the time.
    fn of(share: f64, evidence: String, advice: impl Into<String>) -> Self {
        let severity = if share >= MOST_OF_THE_TIME { Severity::Problem } else { Severity::Warn };
        Self { share, severity, evidence, advice: advice.into() }
    }

    /// No more severe than that.
    fn at_most(self, most: Severity) -> Self {
        Self { severity: self.severity.min(most), ..self }
    }
}

/// What stands for a rule in a report, and when it holds.
struct Rule {
    name: &'static str,
    /// What it looks at, in words.
    looks_at: &'static str,
    judge: fn(&Figures<'_>) -> Known<Option<Finding>>,
    /// Rules that name the cause of what this one sees, or whose finding it would contradict.
    yields_to: &'static [&'static str],
}

const THROTTLED: &str = "throttled";
const NOISY_NEIGHBOUR: &str = "noisy-neighbour";
const IO_WORKERS_SATURATED: &str = "io-workers-saturated";
const PREFETCH_TOO_SHALLOW: &str = "prefetch-too-shallow";
const NOT_IO: &str = "not-io";

const RULES: [Rule; 10] = [
    Rule { name: THROTTLED, looks_at: "the block layer's queue", judge: device::throttled, yields_to: &[] },
    Rule {
        name: NOISY_NEIGHBOUR,
        looks_at: "other programs on the devices",
        judge: device::noisy_neighbour,
        yields_to: &[],
    },
    Rule {
        name: IO_WORKERS_SATURATED,
        looks_at: "the io workers",
        judge: depth::io_workers_saturated,
        // More reads at once would only wait elsewhere.
        yields_to: &[THROTTLED],
    },
    Rule {
        name: PREFETCH_TOO_SHALLOW,
        looks_at: "the depth of prefetching",
        judge: depth::prefetch_too_shallow,
        yields_to: &[THROTTLED, NOISY_NEIGHBOUR, IO_WORKERS_SATURATED],
    },
    Rule {
        name: "device-bound",
        looks_at: "the devices",
        judge: device::device_bound,
        // Their device has room, or would have it.
        yields_to: &[THROTTLED, NOISY_NEIGHBOUR, IO_WORKERS_SATURATED, PREFETCH_TOO_SHALLOW],
    },
    Rule {
        name: "index-heap-random",
        looks_at: "reads of single blocks",
        judge: reads::index_heap_random,
        yields_to: &[],
    },
    Rule { name: "small-reads", looks_at: "the reads' sizes", judge: reads::small_reads, yields_to: &[] },
    Rule {
        name: "io_uring-copies-inline",
        looks_at: "what io_uring does inside submissions",
        judge: cache::io_uring_copies_inline,
        yields_to: &[],
    },
    Rule {
        name: "served-from-page-cache",
        looks_at: "the page cache",
        judge: cache::served_from_page_cache,
        yields_to: &[],
    },
    Rule {
        name: NOT_IO,
        looks_at: "how long sessions waited for reads",
        judge: sessions::not_io,
        yields_to: &[],
    },
];

/// What the report amounts to: at most five findings, worst first. None is a result, too: [`scope`] says of what.
#[must_use]
pub fn of(report: &StatReport) -> Vec<Verdict> {
    let Ok(figures) = Figures::of(report) else { return Vec::new() };
    let judged = RULES.iter().filter_map(|rule| Some((rule, (rule.judge)(&figures).ok().flatten()?)));
    let held: Vec<(&Rule, Finding)> = judged.collect();
    let holds = |name: &str| held.iter().any(|(rule, _)| rule.name == name);
    // Whatever reading has to wait for, it is little of the time.
    let most = if holds(NOT_IO) { Severity::Info } else { Severity::Problem };
    let stand = held.iter().filter(|(rule, _)| !rule.yields_to.iter().any(|other| holds(other)));
    let mut findings: Vec<(&Rule, Finding)> =
        stand.map(|(rule, finding)| (*rule, finding.clone().at_most(most))).collect();
    findings.sort_by(|(_, a), (_, b)| {
        Reverse(a.severity).cmp(&Reverse(b.severity)).then(b.share.total_cmp(&a.share))
    });
    let verdict = |(rule, finding): (&Rule, Finding)| Verdict {
        rule: rule.name,
        severity: finding.severity,
        evidence: finding.evidence,
        advice: finding.advice,
    };
    findings.into_iter().take(MOST_VERDICTS).map(verdict).collect()
}

/// Adds a finding that the report alone does not tell, before all of its severity.
pub fn add(verdicts: &mut Vec<Verdict>, another: Option<Verdict>) {
    let Some(another) = another else { return };
    let place = verdicts.iter().position(|verdict| verdict.severity <= another.severity);
    verdicts.insert(place.unwrap_or(verdicts.len()), another);
    verdicts.truncate(MOST_VERDICTS);
}

/// What rules looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// Reads are missing, or their times contradict each other.
    Incomplete,
    /// The filter takes slow reads only, so that no share of the time can be told.
    SlowReadsOnly,
    /// So many reads only.
    TooFew(u64),
    /// All that could be known.
    Judged {
        /// What rules looked at.
        looked_at: Vec<&'static str>,
        /// What they could not look at.
        not_known: Vec<&'static str>,
    },
}

/// What the rules looked at: what "no finding" is worth.
#[must_use]
pub fn scope(report: &StatReport) -> Scope {
    let figures = match Figures::of(report) {
        Ok(figures) => figures,
        Err(scope) => return scope,
    };
    let (known, unknown): (Vec<&Rule>, Vec<&Rule>) =
        RULES.iter().partition(|rule| (rule.judge)(&figures).is_ok());
    let words = |rules: Vec<&Rule>| rules.into_iter().map(|rule| rule.looks_at).collect();
    Scope::Judged { looked_at: words(known), not_known: words(unknown) }
}

#[cfg(test)]
mod tests {
    use super::{samples::Sample, *};

    fn holds(rule: &Rule, figures: &Figures<'_>) -> bool {
        matches!((rule.judge)(figures), Ok(Some(_)))
    }

    #[test]
    fn a_cause_silences_what_it_causes() {
        // Most of the rest of the time is with the device.
        let report = Sample::of("sync", 1_000, 5_000.0).stages(0.0, 0.3, 0.65).report();
        assert_eq!(samples::rules(&report), ["device-bound"]);
        let mut shared = report.clone();
        shared.devices[0].users.other_bytes = shared.devices[0].bytes / 2;
        assert_eq!(samples::rules(&shared), ["noisy-neighbour"]);
    }

    #[test]
    fn another_finding_comes_before_those_of_its_severity_and_five_are_enough() {
        let of = |rule, severity| Verdict { rule, severity, evidence: String::new(), advice: String::new() };
        let mut verdicts = vec![of("a", Severity::Problem), of("b", Severity::Warn), of("c", Severity::Info)];
        add(&mut verdicts, None);
        add(&mut verdicts, Some(of("new", Severity::Warn)));
        add(&mut verdicts, Some(of("last", Severity::Info)));
        add(&mut verdicts, Some(of("first", Severity::Problem)));
        let rules: Vec<_> = verdicts.iter().map(|verdict| verdict.rule).collect();
        assert_eq!(rules, ["first", "a", "new", "b", "last"]);
    }

    #[test]
    fn the_worst_comes_first() {
        let report = samples::everything_at_once();
        let verdicts = of(&report);
        assert!(verdicts.is_sorted_by_key(|verdict| Reverse(verdict.severity)), "{verdicts:#?}");
        assert_eq!(verdicts[0].rule, "index-heap-random");
        assert!(verdicts.iter().any(|verdict| verdict.severity == Severity::Warn), "{verdicts:#?}");
    }

    #[test]
    fn there_are_five_at_most() {
        let mut report = samples::everything_at_once();
        report.window.duration_s = 1_000.0;
        report.io_workers[0].busy_ratio /= 50.0;
        let figures = Figures::of(&report).expect("there are enough reads");
        let held: Vec<_> = RULES.iter().filter(|rule| holds(rule, &figures)).map(|rule| rule.name).collect();
        assert!(held.len() > MOST_VERDICTS, "{held:?}");
        assert_eq!(of(&report).len(), MOST_VERDICTS);
    }

    #[test]
    fn little_time_makes_no_problem() {
        let mut report = Sample::of("sync", 1_000, 5_000.0).stages(0.0, 0.0, 0.95).report();
        report.window.duration_s = 5_000.0;
        let verdicts = of(&report);
        assert!(verdicts.iter().all(|verdict| verdict.severity == Severity::Info), "{verdicts:?}");
        assert_eq!(samples::rules(&report)[0], NOT_IO);
    }

    #[test]
    fn nothing_is_said_of_reads_that_are_missing_too_few_or_chosen_for_their_latency() {
        let report = || Sample::of("sync", 1_000, 5_000.0).stages(0.0, 0.0, 0.95).report();
        assert_eq!(samples::rules(&report()), ["device-bound"]);
        let mut incomplete = report();
        incomplete.ledger.complete = false;
        assert_eq!((of(&incomplete), scope(&incomplete)), (vec![], Scope::Incomplete));
        let mut impossible = report();
        impossible.ledger.impossible = 1;
        assert_eq!((of(&impossible), scope(&impossible)), (vec![], Scope::Incomplete));
        let few = Sample::of("sync", FEWEST_READS - 1, 5_000.0).stages(0.0, 0.0, 0.95).report();
        assert_eq!((of(&few), scope(&few)), (vec![], Scope::TooFew(FEWEST_READS - 1)));
        assert!(!of(&Sample::of("sync", FEWEST_READS, 5_000.0).stages(0.0, 0.0, 0.95).report()).is_empty());
        let mut slow = report();
        slow.filter = Some(crate::model::FilterReport { min_latency_us: Some(1.0), ..Default::default() });
        assert_eq!((of(&slow), scope(&slow)), (vec![], Scope::SlowReadsOnly));
    }

    #[test]
    fn what_is_not_known_is_not_said_to_have_been_looked_at() {
        let mut report = Sample::of("sync", 1_000, 50.0).report();
        let Scope::Judged { looked_at, not_known } = scope(&report) else { panic!("there are enough reads") };
        assert!(looked_at.contains(&"the devices") && !not_known.contains(&"the devices"));
        samples::forget_stages(&mut report);
        let Scope::Judged { looked_at, not_known } = scope(&report) else { panic!("there are enough reads") };
        assert!(!looked_at.contains(&"the devices") && not_known.contains(&"the devices"));
        assert_eq!(of(&report), []);
    }
}
