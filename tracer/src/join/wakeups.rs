//! When the owners of reads that others executed ran again, as `--pg-probes` tells.
//!
//! A read is told before its owner's wait for it has ended. So it is held until the owner's next wait that ended after
//! it: that one was for this read, or none was.

use std::collections::HashMap;

use pgiotrace_ebpf::WaitRecord;

use crate::model::{
    aggregate::Incarnation,
    io::{Io, Stage},
};

/// How many reads are held at once; beyond it, all are let go as they are.
const MOST_HELD: usize = 65_536;

/// One use of an I/O handle: its number and generation.
pub(super) type Use = (u32, u64);

/// A read whose owner may still wait for it.
#[derive(Debug)]
struct Held {
    handle: Use,
    io: Io,
}

/// The reads that are held, by owner.
#[derive(Debug, Default)]
pub(super) struct Wakeups {
    by_owner: HashMap<Incarnation, Vec<Held>>,
    count: usize,
}

impl Wakeups {
    /// Holds a read. Returns reads that are held no longer, for want of room.
    pub fn hold(&mut self, owner: Incarnation, handle: Use, io: Io) -> Vec<(Io, Incarnation)> {
        let let_go = if self.count >= MOST_HELD { self.give_up() } else { Vec::new() };
        self.by_owner.entry(owner).or_default().push(Held { handle, io });
        self.count += 1;
        let_go
    }

    /// A wait has ended: returns the owner's reads that had ended before, the one that was waited for with its wakeup.
    pub fn wait(&mut self, owner: Incarnation, wait: &WaitRecord) -> Vec<Io> {
        let Some(held) = self.by_owner.get_mut(&owner) else { return Vec::new() };
        let ended = held.extract_if(.., |held| held.io.timing.end_ns <= wait.end_ns);
        let ended: Vec<Io> = ended.map(|held| woken(held, wait)).collect();
        self.count -= ended.len();
        ended
    }

    /// The owner has ended: returns its reads as they are.
    pub fn leave(&mut self, owner: Incarnation) -> Vec<Io> {
        let held = self.by_owner.remove(&owner).unwrap_or_default();
        self.count -= held.len();
        held.into_iter().map(|held| held.io).collect()
    }

    /// Returns all reads as they are.
    pub fn give_up(&mut self) -> Vec<(Io, Incarnation)> {
        self.count = 0;
        let by_owner = std::mem::take(&mut self.by_owner).into_iter();
        by_owner.flat_map(|(owner, held)| held.into_iter().map(move |held| (held.io, owner))).collect()
    }
}

/// Adds the wakeup to a read that its owner waited for.
///
/// What a process is said to await may be of an earlier wait, but that one's read had ended before this one began.
fn woken(held: Held, wait: &WaitRecord) -> Io {
    let Held { handle, mut io } = held;
    let was_awaited = handle == (wait.awaited_io_id, wait.awaited_generation);
    let timing = &mut io.timing;
    if was_awaited && timing.end_ns >= wait.start_ns {
        let wakeup_ns = wait.end_ns - timing.end_ns;
        let before_ns = timing.stages.get(Stage::Wakeup).unwrap_or(0);
        timing.stages.set(Stage::Wakeup, before_ns + wakeup_ns);
        timing.end_ns = wait.end_ns;
        timing.woken_after_ns = wakeup_ns;
    }
    io
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{model::io::Method, server::Pid};

    const OWNER: Incarnation = Incarnation { pid: Pid(1), number: 0 };
    const OTHER: Incarnation = Incarnation { pid: Pid(2), number: 0 };

    fn io(start_ns: u64, end_ns: u64) -> Io {
        Io { method: Method::Worker, ..Io::example(OWNER.pid, start_ns, end_ns) }
    }

    fn wait(start_ns: u64, end_ns: u64, awaited: Use) -> WaitRecord {
        let (awaited_io_id, awaited_generation) = awaited;
        WaitRecord { start_ns, end_ns, awaited_io_id, awaited_generation, ..WaitRecord::default() }
    }

    fn held(reads: &[(Use, Io)]) -> Wakeups {
        let mut wakeups = Wakeups::default();
        for (handle, io) in reads {
            assert!(wakeups.hold(OWNER, *handle, io.clone()).is_empty());
        }
        wakeups
    }

    #[test]
    fn an_awaited_read_ends_when_its_owner_runs() {
        let mut read = io(100, 200);
        read.timing.stages.set(Stage::Wakeup, 5);
        read.timing.stages.set(Stage::Cache, 95);
        let woken = held(&[((3, 7), read)]).wait(OWNER, &wait(150, 230, (3, 7)));
        let [io] = &woken[..] else { panic!("{woken:?}") };
        assert_eq!((io.timing.end_ns, io.timing.woken_after_ns), (230, 30));
        assert_eq!(io.timing.stages.get(Stage::Wakeup), Some(35));
        assert!(io.timing.stages.sum_ns() <= io.timing.latency_ns());
        assert_eq!(io.timing.execution_ns(), 100);
    }

    #[test]
    fn what_was_not_awaited_stays_as_it_is() {
        let reads = [((3, 7), io(100, 200)), ((4, 8), io(100, 190)), ((3, 6), io(100, 195))];
        for wait in [
            // Another use, another handle, a wait that began later.
            wait(150, 230, (3, 9)),
            wait(150, 230, (5, 7)),
            wait(201, 230, (3, 7)),
            wait(150, 230, (0, 0)),
        ] {
            let mut wakeups = held(&reads);
            let expected: Vec<Io> = reads.iter().map(|(_, io)| io.clone()).collect();
            assert_eq!(wakeups.wait(OWNER, &wait), expected, "{wait:?}");
            assert!(wakeups.give_up().is_empty());
        }
    }

    #[test]
    fn a_read_is_held_until_its_owners_next_wait_after_it() {
        let mut wakeups = held(&[((3, 7), io(100, 200))]);
        assert!(wakeups.wait(OTHER, &wait(150, 230, (3, 7))).is_empty());
        assert!(wakeups.wait(OWNER, &wait(100, 199, (3, 7))).is_empty());
        // The second call of one wait.
        assert_eq!(wakeups.wait(OWNER, &wait(199, 210, (3, 7)))[0].timing.end_ns, 210);
        assert!(wakeups.wait(OWNER, &wait(211, 220, (3, 7))).is_empty());
    }

    #[test]
    fn what_is_left_is_let_go_as_it_is() {
        let mut wakeups = held(&[((3, 7), io(100, 200)), ((4, 8), io(100, 300))]);
        assert!(wakeups.leave(OTHER).is_empty());
        assert_eq!(wakeups.leave(OWNER), [io(100, 200), io(100, 300)]);
        assert!(wakeups.hold(OTHER, (3, 7), io(1, 2)).is_empty());
        assert_eq!(wakeups.give_up(), [(io(1, 2), OTHER)]);
        assert_eq!((wakeups.count, wakeups.give_up().len()), (0, 0));
    }

    #[test]
    fn only_so_many_are_held() {
        let mut wakeups = Wakeups::default();
        for generation in 0..MOST_HELD as u64 {
            assert!(wakeups.hold(OWNER, (0, generation), io(1, 2)).is_empty());
        }
        assert_eq!(wakeups.hold(OTHER, (0, 0), io(3, 4)).len(), MOST_HELD);
        assert_eq!(wakeups.give_up(), [(io(3, 4), OTHER)]);
    }
}
