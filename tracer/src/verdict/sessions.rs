//! Whether reading matters at all: `not-io`.

use super::{Finding, Known, NotKnown, figures};
use crate::{
    model::{Backend, IoSummary, Severity},
    units,
};
use figures::{Figures, sum};

/// Share of the window that the session that waits most may wait for reads: if they cost nothing, it were a tenth faster
/// at best.
const LITTLE: f64 = 0.1;

/// Even the session that waits most for its reads is blocked by them for a small part of the time.
pub(super) fn not_io(figures: &Figures<'_>) -> Known<Option<Finding>> {
    let window = figures.window_us();
    // What the filter leaves out may be what a session waits for.
    if figures.is_filtered() || window <= 0.0 {
        return Err(NotKnown);
    }
    let mut longest: Option<(&Backend, f64)> = None;
    for session in figures.sessions() {
        let blocked = blocked(&session.io)?;
        if longest.is_none_or(|(_, most)| blocked > most) {
            longest = Some((session, blocked));
        }
    }
    let (session, blocked) = longest.ok_or(NotKnown)?;
    if blocked >= LITTLE * window {
        return Ok(None);
    }
    let application = session.application_name.as_deref().filter(|name| !name.is_empty());
    let evidence = format!(
        "The session that waited longest for its reads, {}{}, was blocked by them for {} of the {} traced ({}).",
        session.pid,
        application.map(|name| format!(" ({name})")).unwrap_or_default(),
        units::duration(blocked),
        units::duration(window),
        units::percent(blocked / window),
    );
    let advice = "If it was at work all that time, look elsewhere: processor time, locks, the plan.";
    Ok(Some(Finding::of(1.0 - blocked / window, evidence, advice).at_most(Severity::Info)))
}

/// How long an owner was blocked, microseconds: by reads being executed, and, at least, by reads that no io worker had
/// begun yet.
fn blocked(io: &IoSummary) -> Known<f64> {
    Ok(io.exposed_us.ok_or(NotKnown)? + sum(io.bounds_us.pg_queue_at_least.as_ref()))
}

#[cfg(test)]
mod tests {
    use super::super::samples::{Sample, dist, forget_waits, has};
    use crate::model::{FilterReport, StatReport};

    const RULE: &str = "not-io";

    /// A second of reading in a window.
    fn within(seconds: f64) -> StatReport {
        let mut report = Sample::of("sync", 1_000, 1_000.0).report();
        report.window.duration_s = seconds;
        report
    }

    #[test]
    fn io_is_no_matter_below_a_tenth_of_the_window() {
        assert!(has(&within(10.1), RULE));
        assert!(!has(&within(9.9), RULE));
    }

    #[test]
    fn waiting_for_an_io_worker_is_waiting() {
        let mut report = within(20.0);
        assert!(has(&report, RULE));
        report.backends[0].io.bounds_us.pg_queue_at_least = Some(dist(1_000, 1_100.0));
        assert!(!has(&report, RULE));
    }

    #[test]
    fn the_busiest_session_counts() {
        let mut report = within(20.0);
        let mut busy = report.backends[0].clone();
        busy.io.exposed_us = Some(5e6);
        report.backends.push(busy);
        assert!(!has(&report, RULE));
    }

    #[test]
    fn what_is_not_known_of_all_sessions_is_not_judged() {
        let mut report = within(20.0);
        report.filter = Some(FilterReport::default());
        assert!(!has(&report, RULE));
        let mut report = within(20.0);
        forget_waits(&mut report);
        assert!(!has(&report, RULE));
    }
}
