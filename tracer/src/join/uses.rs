//! Rows of `pg_aios` against traced uses of I/O handles.
//!
//! `(io_id, generation)` names one use of a handle, so a row and a read of the same use must agree on everything
//! else. Rows and reads come through different channels and may overtake each other: each side is kept for a while.

use std::collections::VecDeque;

use crate::{
    capture::sampler::{AioRow, AioState, Taken},
    model::{PgAiosLedger, io::RelationFork},
    server::InnerPid,
};

/// How many rows of one handle are remembered: those of reads that have not ended.
const REMEMBERED_ROWS: usize = 8;
/// How long the uses of a handle are remembered, for rows that are still on their way: PostgreSQL hands out the handle
/// that was released last, so that thousands of uses of one handle may lie between a sample and its arrival.
const REMEMBERED_NS: u64 = 2_000_000_000;
/// How many uses of one handle are remembered at the most.
const REMEMBERED_USES: usize = 65_536;

/// A traced read, as far as the view shows it too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TracedUse {
    /// When it ended, `CLOCK_MONOTONIC` nanoseconds.
    pub end_ns: u64,
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

/// A row, when it was first seen, and whether its read is known.
#[derive(Debug, Clone)]
struct Seen {
    row: AioRow,
    by_ns: u64,
    is_settled: bool,
}

#[derive(Debug, Clone, Default)]
struct Slot {
    rows: VecDeque<Seen>,
    uses: VecDeque<TracedUse>,
}

/// The comparison, as it grows.
#[derive(Debug, Default)]
pub struct Uses {
    slots: Vec<Slot>,
    ledger: PgAiosLedger,
    sampled: bool,
    swept_ns: u64,
    /// The first contradictions, each in a sentence.
    contradictions: Vec<String>,
}

impl Uses {
    /// The books, `None` if the view was never sampled.
    #[must_use]
    pub fn ledger(&self) -> Option<PgAiosLedger> {
        let PgAiosLedger { rows, confirmed, contradicted, .. } = self.ledger;
        let unmatched = rows - confirmed - contradicted;
        self.sampled.then_some(PgAiosLedger { rows, confirmed, contradicted, unmatched })
    }

    /// The first contradictions between the view and traced reads, each in a sentence.
    #[must_use]
    pub fn contradictions(&self) -> &[String] {
        &self.contradictions
    }

    /// Forgets rows and reads, because handles and generations start anew.
    pub fn forget(&mut self) {
        self.slots.clear();
    }

    /// Adds the rows of one sample, taken at this time.
    pub fn add_rows(&mut self, taken: Taken, rows: &[AioRow]) {
        self.sampled = true;
        self.forget_uses_before(taken.from_ns.saturating_sub(REMEMBERED_NS));
        for row in rows {
            self.add_row(row, taken.to_ns);
        }
    }

    fn add_row(&mut self, row: &AioRow, by_ns: u64) {
        let slot = slot(&mut self.slots, row.io_id);
        // The same use, seen again at the next sample.
        if slot.rows.iter().any(|known| known.row.generation == row.generation) {
            return;
        }
        self.ledger.rows += 1;
        let traced = slot.uses.iter().rev().find(|traced| traced.generation == row.generation).copied();
        let matched = traced.map(|traced| traced.agrees_with(row));
        count(&mut self.ledger, matched);
        if let (Some(false), Some(traced)) = (matched, traced) {
            keep_example(&mut self.contradictions, row, &traced);
        }
        slot.rows.push_back(Seen { row: row.clone(), by_ns, is_settled: matched.is_some() });
        if slot.rows.len() > REMEMBERED_ROWS {
            slot.rows.pop_front();
        }
    }

    /// Adds a traced read of a handle.
    pub fn add_use(&mut self, io_id: u32, traced: TracedUse) {
        let slot = slot(&mut self.slots, io_id);
        for Seen { row, is_settled, .. } in &mut slot.rows {
            if row.generation == traced.generation && !*is_settled {
                *is_settled = true;
                let agrees = traced.agrees_with(row);
                count(&mut self.ledger, Some(agrees));
                if !agrees {
                    keep_example(&mut self.contradictions, row, &traced);
                }
            }
        }
        let oldest = traced.end_ns.saturating_sub(REMEMBERED_NS);
        while slot.uses.front().is_some_and(|old| old.end_ns < oldest) || slot.uses.len() >= REMEMBERED_USES {
            slot.uses.pop_front();
        }
        slot.uses.push_back(traced);
    }

    /// Handles that are used no more would keep what is remembered of them for ever.
    fn forget_uses_before(&mut self, oldest: u64) {
        if self.swept_ns > oldest {
            return;
        }
        self.swept_ns = oldest + REMEMBERED_NS;
        for slot in &mut self.slots {
            slot.uses.retain(|traced| traced.end_ns >= oldest);
            slot.uses.shrink_to(REMEMBERED_ROWS);
        }
    }

    /// The owner that the view shows for a use of a handle.
    #[must_use]
    pub fn owner_of_use(&self, io_id: u32, generation: u64) -> Option<InnerPid> {
        self.row_of_use(io_id, generation).map(|seen| seen.row.owner)
    }

    /// When the view had shown a use of a handle on its way to its executor.
    #[must_use]
    pub fn queued_by_ns(&self, io_id: u32, generation: u64) -> Option<u64> {
        let seen = self.row_of_use(io_id, generation)?;
        matches!(seen.row.state, AioState::Staged | AioState::Submitted).then_some(seen.by_ns)
    }

    fn row_of_use(&self, io_id: u32, generation: u64) -> Option<&Seen> {
        self.slots.get(io_id as usize)?.rows.iter().find(|seen| seen.row.generation == generation)
    }
}

/// How many contradictions are told in full.
const EXAMPLES: usize = 5;

fn keep_example(examples: &mut Vec<String>, row: &AioRow, traced: &TracedUse) {
    if examples.len() < EXAMPLES {
        examples.push(format!(
            "pg_aios contradicts a traced read: the view showed {row:?}, the kernel {traced:?}"
        ));
    }
}

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
    use crate::{capture::aio_target::AioTarget, model::io::Fork};

    const RELATION: RelationFork = RelationFork {
        tablespace_oid: 1663,
        database_oid: 5,
        relfilenumber: 16384,
        fork: Fork::Main,
        temporary: false,
    };

    const AT: Taken = Taken { from_ns: 10, to_ns: 20 };

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
        }
    }

    fn traced(owner: u32, generation: u64) -> TracedUse {
        TracedUse {
            end_ns: 0,
            generation,
            owner: Some(InnerPid(owner)),
            offset: Some(81_920),
            length: Some(131_072),
            relation: RELATION,
            block: 10,
            blocks: 16,
        }
    }

    #[test]
    fn a_row_is_confirmed_whichever_side_comes_first() {
        let mut aios = Uses::default();
        aios.add_rows(AT, &[row(7, 1)]);
        aios.add_use(3, traced(7, 1));
        aios.add_use(3, traced(7, 2));
        aios.add_rows(AT, &[row(7, 2)]);
        let expected = PgAiosLedger { rows: 2, confirmed: 2, contradicted: 0, unmatched: 0 };
        assert_eq!(aios.ledger(), Some(expected));
    }

    #[test]
    fn a_use_that_the_view_showed_had_been_handed_over_by_then() {
        let mut aios = Uses::default();
        aios.add_rows(AT, &[row(7, 1)]);
        aios.add_rows(Taken { from_ns: 50, to_ns: 60 }, &[row(7, 1)]);
        assert_eq!(aios.queued_by_ns(3, 1), Some(AT.to_ns));
        assert_eq!((aios.queued_by_ns(3, 2), aios.queued_by_ns(4, 1)), (None, None));
        aios.add_rows(AT, &[AioRow { state: AioState::Defined, ..row(7, 5) }]);
        assert_eq!(aios.queued_by_ns(3, 5), None);
    }

    #[test]
    fn a_row_that_is_sampled_twice_counts_once() {
        let mut aios = Uses::default();
        aios.add_rows(AT, &[row(7, 1)]);
        aios.add_rows(AT, &[row(7, 1)]);
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
            let mut aios = Uses::default();
            aios.add_rows(AT, &[row(7, 1)]);
            aios.add_use(3, wrong);
            let ledger = aios.ledger().expect("sampled");
            assert_eq!((ledger.confirmed, ledger.contradicted), (0, 1), "{wrong:?}");
        }
    }

    #[test]
    fn a_row_without_a_read_is_unmatched_and_no_sample_is_no_ledger() {
        let mut aios = Uses::default();
        assert_eq!(aios.ledger(), None);
        aios.add_rows(AT, &[row(7, 1)]);
        assert_eq!(aios.ledger().map(|ledger| ledger.unmatched), Some(1));
    }

    #[test]
    fn a_row_is_confirmed_however_often_the_handle_was_used_since() {
        let mut aios = Uses::default();
        aios.add_use(3, traced(7, 1));
        for generation in 2..5000 {
            aios.add_use(3, TracedUse { end_ns: generation * 1_000, ..traced(8, generation) });
        }
        aios.add_rows(AT, &[row(7, 1)]);
        assert_eq!(aios.ledger().map(|ledger| ledger.confirmed), Some(1));
    }

    #[test]
    fn uses_are_forgotten_when_no_row_of_them_can_come_any_more() {
        let mut aios = Uses::default();
        aios.add_use(3, traced(7, 1));
        let late = Taken { from_ns: 2 * REMEMBERED_NS, to_ns: 2 * REMEMBERED_NS };
        aios.add_rows(late, &[row(7, 1)]);
        assert_eq!(aios.ledger().map(|ledger| (ledger.rows, ledger.confirmed)), Some((1, 0)));
        assert!(aios.slots.iter().all(|slot| slot.uses.is_empty()));
    }
}
