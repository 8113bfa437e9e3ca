//! Which of the server's processes serve the tracer itself: they are left out of what it shows.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{InnerPid, Pid};

/// The tracer's own sessions; clones share them.
#[derive(Debug, Clone, Default)]
pub struct OwnSessions(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Attempts to connect that are under way: the PIDs of their processes are not known yet.
    connecting: usize,
    processes: Vec<(InnerPid, Pid)>,
}

/// Whom a process of the server serves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Serves {
    /// Others than the tracer.
    #[default]
    Others,
    /// The tracer, perhaps: it is connecting.
    Undecided,
    /// The tracer.
    Tracer,
}

/// An attempt to connect.
#[derive(Debug)]
pub struct Attempt<'a>(&'a OwnSessions);

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        self.0.state().connecting -= 1;
    }
}

impl OwnSessions {
    /// Begins an attempt to connect, which lasts until the value is dropped: before the server can fork a process for it.
    #[must_use]
    pub fn attempt(&self) -> Attempt<'_> {
        self.state().connecting += 1;
        Attempt(self)
    }

    /// The attempt succeeded: this process serves it.
    pub fn add(&self, inner: InnerPid, process: Pid) {
        self.state().processes.push((inner, process));
    }

    /// A process has ended: its PID may be another's soon.
    pub fn forget(&self, process: Pid) {
        self.state().processes.retain(|(_, known)| *known != process);
    }

    /// Whom a process serves that was forked before this call.
    #[must_use]
    pub fn whom_serves(&self, process: InnerPid) -> Serves {
        let state = self.state();
        if state.processes.iter().any(|(inner, _)| *inner == process) {
            Serves::Tracer
        } else if state.connecting > 0 {
            Serves::Undecided
        } else {
            Serves::Others
        }
    }

    /// The processes of all sessions so far, unless an attempt is under way.
    #[must_use]
    pub fn all(&self) -> Option<Vec<InnerPid>> {
        let state = self.state();
        (state.connecting == 0).then(|| state.processes.iter().map(|(inner, _)| *inner).collect())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // What panicked in between changed a number or a list, whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_undecided_only_while_an_attempt_is_under_way() {
        let own = OwnSessions::default();
        assert_eq!(own.whom_serves(InnerPid(1)), Serves::Others);
        let attempt = own.attempt();
        assert_eq!((own.whom_serves(InnerPid(1)), own.all()), (Serves::Undecided, None));
        own.add(InnerPid(1), Pid(1001));
        drop(attempt);
        assert_eq!(own.whom_serves(InnerPid(1)), Serves::Tracer);
        assert_eq!(own.whom_serves(InnerPid(2)), Serves::Others);
        assert_eq!(own.all(), Some(vec![InnerPid(1)]));
        own.forget(Pid(1001));
        assert_eq!(own.whom_serves(InnerPid(1)), Serves::Others);
    }
}
