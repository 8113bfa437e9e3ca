//! Rows of `pg_aios` against traced reads.
//!
//! `(io_id, generation)` names one use of a handle, so a row and a read of the same use must agree on everything
//! else. Rows and reads come through different channels and may overtake each other: each side is kept for a while.

use std::collections::VecDeque;

use crate::{
    capture::sampler::{AioRow, Taken},
    model::{PgAiosLedger, io::RelationFork},
    server::InnerPid,
};

/// How many uses of one handle are remembered on either side.
const REMEMBERED: usize = 8;
/// How many rows are remembered for finding owners.
const RECENT_ROWS: usize = 16_384;

/// A traced read, as far as the view shows it too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TracedUse {
    /// Use of the handle.
    pub generation: u64,
    /// The backend that wanted it; `None` when not known.
    pub owner: Option<InnerPid>,
    /// Bytes from the start of the segment file; `None` when not known.
    pub offset: Option<u64>,
    /// Bytes asked for; `None` when not known.
    pub length: Option<u64>,
    /// What is read.
    pub relation: RelationFork,
    /// First block.
    pub block: u32,
    /// Number of blocks.
    pub blocks: u32,
}

impl TracedUse {
    fn agrees_with(&self, row: &AioRow) -> bool {
        self.owner.is_none_or(|owner| owner == row.owner)
            && self.offset.is_none_or(|offset| offset == row.offset)
            && self.length.is_none_or(|length| length == row.length)
            && row.target.is_none_or(|target| {
                target.relation == self.relation
                    && target.first_block == self.block
                    && target.blocks() == self.blocks
            })
    }
}

/// A read without a usable handle, of which the view may tell the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unowned {
    /// Start, `CLOCK_MONOTONIC` nanoseconds.
    pub start_ns: u64,
    /// End, `CLOCK_MONOTONIC` nanoseconds.
    pub end_ns: u64,
    /// What is read.
    pub relation: RelationFork,
    /// Number of the segment.
    pub segment: u32,
    /// Bytes from the start of the segment file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Who the view says owns a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Candidates {
    /// Nobody.
    None,
    /// One backend.
    One(InnerPid),
    /// Several backends.
    Several,
}

#[derive(Debug, Clone, Default)]
struct Slot {
    rows: VecDeque<(AioRow, bool)>,
    uses: VecDeque<TracedUse>,
}

/// The comparison, as it grows.
#[derive(Debug, Default)]
pub struct Aios {
    slots: Vec<Slot>,
    recent: VecDeque<(Taken, AioRow)>,
    ledger: PgAiosLedger,
    sampled: bool,
}

impl Aios {
    /// The books, `None` if the view was never sampled.
    #[must_use]
    pub fn ledger(&self) -> Option<PgAiosLedger> {
        let PgAiosLedger { rows, confirmed, contradicted, .. } = self.ledger;
        let unmatched = rows - confirmed - contradicted;
        self.sampled.then_some(PgAiosLedger { rows, confirmed, contradicted, unmatched })
    }

    /// Forgets rows and reads, because handles and generations start anew.
    pub fn forget(&mut self) {
        self.slots.clear();
        self.recent.clear();
    }

    /// Adds the rows of one sample.
    pub fn add_rows(&mut self, taken: Taken, rows: Vec<AioRow>) {
        self.sampled = true;
        for row in rows {
            self.recent.push_back((taken, row.clone()));
            self.add_row(row);
        }
        let surplus = self.recent.len().saturating_sub(RECENT_ROWS);
        self.recent.drain(..surplus);
    }

    fn add_row(&mut self, row: AioRow) {
        let slot = slot(&mut self.slots, row.io_id);
        // The same use, seen again at the next sample.
        if slot.rows.iter().any(|(known, _)| known.generation == row.generation) {
            return;
        }
        self.ledger.rows += 1;
        let traced = slot.uses.iter().find(|traced| traced.generation == row.generation);
        let matched = traced.map(|traced| traced.agrees_with(&row));
        count(&mut self.ledger, matched);
        slot.rows.push_back((row, matched.is_some()));
        if slot.rows.len() > REMEMBERED {
            slot.rows.pop_front();
        }
    }

    /// Adds a traced read of a handle.
    pub fn add_use(&mut self, io_id: u32, traced: TracedUse) {
        let slot = slot(&mut self.slots, io_id);
        for (row, is_settled) in &mut slot.rows {
            if row.generation == traced.generation && !*is_settled {
                *is_settled = true;
                count(&mut self.ledger, Some(traced.agrees_with(row)));
            }
        }
        slot.uses.push_back(traced);
        if slot.uses.len() > REMEMBERED {
            slot.uses.pop_front();
        }
    }

    /// The owner that the view shows for a use of a handle.
    #[must_use]
    pub fn owner_of_use(&self, io_id: u32, generation: u64) -> Option<InnerPid> {
        let rows = &self.slots.get(io_id as usize)?.rows;
        rows.iter().find(|(row, _)| row.generation == generation).map(|(row, _)| row.owner)
    }

    /// Whose reads the view shows at the file, offset and length of a read, around the time of the read.
    #[must_use]
    pub fn owners_of(&self, read: &Unowned, segment_blocks: u32) -> Candidates {
        let mut found = Candidates::None;
        // Newest first, down to the samples that are too old for this read.
        for (taken, row) in self.recent.iter().rev() {
            if taken.to_ns.saturating_add(SLACK_NS) < read.start_ns {
                break;
            }
            // A row lingers after its read, until the owner looks; and it stands before the read starts.
            let is_same = taken.from_ns <= read.end_ns.saturating_add(SLACK_NS)
                && row.offset == read.offset
                && row.length == read.length
                && row.target.is_some_and(|target| {
                    target.relation == read.relation
                        && target.first_block / segment_blocks.max(1) == read.segment
                });
            if !is_same {
                continue;
            }
            found = match found {
                Candidates::None => Candidates::One(row.owner),
                Candidates::One(owner) if owner == row.owner => found,
                _ => Candidates::Several,
            };
        }
        found
    }
}

/// How far a sample may be from a read to be of it.
pub const SLACK_NS: u64 = 100_000_000;

fn count(ledger: &mut PgAiosLedger, matched: Option<bool>) {
    match matched {
        Some(true) => ledger.confirmed += 1,
        Some(false) => ledger.contradicted += 1,
        None => {}
    }
}

fn slot(slots: &mut Vec<Slot>, io_id: u32) -> &mut Slot {
    let index = io_id as usize;
    if slots.len() <= index {
        slots.resize_with(index + 1, Slot::default);
    }
    &mut slots[index]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        capture::{aio_target::AioTarget, sampler::AioState},
        model::io::Fork,
    };

    const RELATION: RelationFork = RelationFork {
        tablespace_oid: 1663,
        database_oid: 5,
        relfilenumber: 16384,
        fork: Fork::Main,
        temporary: false,
    };

    fn row(owner: u32, generation: u64) -> AioRow {
        AioRow {
            owner: InnerPid(owner),
            io_id: 3,
            generation,
            state: AioState::Submitted,
            offset: 81_920,
            length: 131_072,
            target: AioTarget::parse("blocks 10..25 in file \"base/5/16384\""),
            is_synchronous: false,
            is_local_memory: false,
            is_buffered: true,
        }
    }

    fn traced(owner: u32, generation: u64) -> TracedUse {
        TracedUse {
            generation,
            owner: Some(InnerPid(owner)),
            offset: Some(81_920),
            length: Some(131_072),
            relation: RELATION,
            block: 10,
            blocks: 16,
        }
    }

    fn taken(ns: u64) -> Taken {
        Taken { from_ns: ns, to_ns: ns }
    }

    #[test]
    fn a_row_is_confirmed_whichever_side_comes_first() {
        let mut aios = Aios::default();
        aios.add_rows(taken(0), vec![row(7, 1)]);
        aios.add_use(3, traced(7, 1));
        aios.add_use(3, traced(7, 2));
        aios.add_rows(taken(1), vec![row(7, 2)]);
        let expected = PgAiosLedger { rows: 2, confirmed: 2, contradicted: 0, unmatched: 0 };
        assert_eq!(aios.ledger(), Some(expected));
    }

    #[test]
    fn a_row_that_is_sampled_twice_counts_once() {
        let mut aios = Aios::default();
        aios.add_rows(taken(0), vec![row(7, 1)]);
        aios.add_rows(taken(1), vec![row(7, 1)]);
        aios.add_use(3, traced(7, 1));
        let expected = PgAiosLedger { rows: 1, confirmed: 1, contradicted: 0, unmatched: 0 };
        assert_eq!(aios.ledger(), Some(expected));
    }

    #[test]
    fn a_row_of_the_same_use_that_disagrees_is_contradicted() {
        for wrong in [
            TracedUse { owner: Some(InnerPid(8)), ..traced(7, 1) },
            TracedUse { offset: Some(0), ..traced(7, 1) },
            TracedUse { blocks: 15, ..traced(7, 1) },
            TracedUse { relation: RelationFork { relfilenumber: 1, ..RELATION }, ..traced(7, 1) },
        ] {
            let mut aios = Aios::default();
            aios.add_rows(taken(0), vec![row(7, 1)]);
            aios.add_use(3, wrong);
            let ledger = aios.ledger().expect("sampled");
            assert_eq!((ledger.confirmed, ledger.contradicted), (0, 1), "{wrong:?}");
        }
    }

    #[test]
    fn a_row_without_a_read_is_unmatched_and_no_sample_is_no_ledger() {
        let mut aios = Aios::default();
        assert_eq!(aios.ledger(), None);
        aios.add_rows(taken(0), vec![row(7, 1)]);
        assert_eq!(aios.ledger().map(|ledger| ledger.unmatched), Some(1));
    }

    #[test]
    fn an_owner_is_found_only_when_one_backend_reads_there_at_that_time() {
        let read = Unowned {
            start_ns: 1_000_000_000,
            end_ns: 1_001_000_000,
            relation: RELATION,
            segment: 0,
            offset: 81_920,
            length: 131_072,
        };
        let mut aios = Aios::default();
        aios.add_rows(taken(500_000_000), vec![row(6, 1)]);
        assert_eq!(aios.owners_of(&read, 131_072), Candidates::None);
        aios.add_rows(taken(1_000_500_000), vec![row(7, 2)]);
        assert_eq!(aios.owners_of(&read, 131_072), Candidates::One(InnerPid(7)));
        assert_eq!(aios.owners_of(&Unowned { segment: 1, ..read }, 131_072), Candidates::None);
        aios.add_rows(taken(1_000_600_000), vec![row(8, 3)]);
        assert_eq!(aios.owners_of(&read, 131_072), Candidates::Several);
    }
}
