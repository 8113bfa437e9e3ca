//! What `EXPLAIN` claims: `explain-misleads`.

use super::{FEWEST_READS, figures};
use crate::{
    model::{IoSummary, Severity, Verdict},
    units,
};
use figures::sum;

/// From that factor on a claim misleads. Around its reads the server does other things within the time that it claims (waking
/// up, checking pages): on a slow disk a few hundredths, on a fast one up to half of it.
const FACTOR: f64 = 2.0;
/// Microseconds that must be between the claim and the truth: what is less, nobody looks for.
const LEAST_GAP_US: f64 = 10_000.0;

/// Whether the reading time that `EXPLAIN (ANALYZE, BUFFERS)` claims for a query (the sum of its I/O read timings,
/// milliseconds; `None` where `track_io_timing` was off) misleads about what its reads cost it.
///
/// `io` is what the query's processes owned while it ran. The truth is the time in which they were blocked by reads of theirs;
/// where that is not known, or there are too few reads, nothing is said.
#[must_use]
pub fn explain_misleads(claimed_read_time_ms: Option<f64>, io: &IoSummary) -> Option<Verdict> {
    let (claimed, exposed) = (claimed_read_time_ms? * 1e3, io.exposed_us?);
    if io.reads < FEWEST_READS {
        return None;
    }
    // The server's clock runs while a read waits for an io worker; ours only from the start of its execution.
    let most = exposed + sum(io.bounds_us.pg_queue_at_least.as_ref());
    let is_too_little = exposed >= FACTOR * claimed && exposed - claimed >= LEAST_GAP_US;
    let is_too_much = claimed >= FACTOR * most && claimed - most >= LEAST_GAP_US;
    if !(is_too_little || is_too_much) {
        return None;
    }
    let truth = if is_too_little { exposed } else { most };
    let (more, less) = if is_too_little { (truth, claimed) } else { (claimed, truth) };
    let factor = if less > 0.0 { format!(", a factor of {:.1}", more / less) } else { String::new() };
    let evidence = format!(
        "EXPLAIN claims {} of reading; the query was blocked by its reads for {}{factor}; the reads themselves took {} in \
         all.",
        units::duration(claimed),
        units::duration(truth),
        units::duration(sum(io.latency_us.as_ref())),
    );
    let advice = if is_too_little {
        "Do not judge by EXPLAIN's I/O timings here: they leave out what io_uring reads inside submissions, and reads that \
         others execute; believe buffer counts and the exposed time."
    } else {
        "Do not judge by EXPLAIN's I/O timings here: they also have what is done around the reads, such as checking the pages' \
         checksums; believe buffer counts and the exposed time."
    };
    let severity = if is_too_little { Severity::Warn } else { Severity::Info };
    Some(Verdict { rule: "explain-misleads", severity, evidence, advice: advice.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::{
        super::samples::{Sample, dist},
        *,
    };

    fn blocked_for(seconds: f64) -> IoSummary {
        let report = Sample::of("io_uring", 1_000, 1_000.0).exposed(seconds, 0.0).report();
        report.backends[0].io.clone()
    }

    #[test]
    fn a_claim_misleads_from_twice_or_half_the_truth_on() {
        let misleads = |claimed| explain_misleads(Some(claimed), &blocked_for(0.67)).is_some();
        assert!(misleads(334.0));
        assert!(!misleads(336.0));
        assert!(!misleads(1_339.0));
        assert!(misleads(1_341.0));
    }

    #[test]
    fn the_factor_is_said() {
        let verdict = explain_misleads(Some(56.0), &blocked_for(0.67)).expect("it misleads");
        assert_eq!(
            verdict.evidence,
            "EXPLAIN claims 56.0 ms of reading; the query was blocked by its reads for 670 ms, a factor of 12.0; the reads \
             themselves took 1.00 s in all."
        );
        let verdict = explain_misleads(Some(0.0), &blocked_for(0.67)).expect("it misleads");
        assert!(!verdict.evidence.contains("factor"), "{}", verdict.evidence);
    }

    #[test]
    fn waiting_for_an_io_worker_is_rightly_claimed() {
        let mut io = blocked_for(0.2);
        assert!(explain_misleads(Some(900.0), &io).is_some());
        io.bounds_us.pg_queue_at_least = Some(dist(1_000, 700.0));
        assert_eq!(explain_misleads(Some(900.0), &io), None);
    }

    /// Scans of 320 MiB and of 48 MiB on a disk of 5 ms, as they were measured: claim, exposed, at least queued,
    /// milliseconds.
    #[test]
    fn measured_scans_are_judged_as_they_were() {
        let judged = |claimed, exposed_ms: f64, queued_ms: f64| {
            let mut io = blocked_for(exposed_ms / 1e3);
            io.bounds_us.pg_queue_at_least = (queued_ms > 0.0).then(|| dist(1_000, queued_ms));
            explain_misleads(Some(claimed), &io).map(|verdict| verdict.severity)
        };
        assert_eq!(judged(69.1, 318.0, 0.0), Some(Severity::Warn), "io_uring, cold");
        assert_eq!(judged(64.1, 65.2, 0.0), None, "io_uring, warm");
        assert_eq!(judged(1_024.0, 1_020.0, 0.0), None, "io_uring, slow disk, direct");
        assert_eq!(judged(221.0, 127.0, 56.3), None, "worker, cold");
        assert_eq!(judged(411.0, 332.0, 0.0), None, "sync, cold");
        assert_eq!(judged(2_177.0, 2_157.0, 0.0), None, "sync, slow disk, direct");
        assert_eq!(judged(190.0, 66.2, 0.0), Some(Severity::Info), "sync, warm: checksums");
    }

    #[test]
    fn nothing_is_said_without_a_claim_or_of_little() {
        let io = blocked_for(0.67);
        assert_eq!(explain_misleads(None, &io), None);
        assert_eq!(explain_misleads(Some(56.0), &IoSummary { exposed_us: None, ..io.clone() }), None);
        assert_eq!(explain_misleads(Some(56.0), &IoSummary { reads: FEWEST_READS - 1, ..io }), None);
        assert!(explain_misleads(Some(0.1), &blocked_for(0.010_2)).is_some());
        assert_eq!(explain_misleads(Some(0.1), &blocked_for(0.010_0)), None);
    }
}
