//! Who owns an io worker's read that has no usable handle: what rows of `pg_aios` claim.
//!
//! A use of a handle is sampled a few times at best, so a row is only a claim to *some* read of its place. What was seen
//! of the use bounds the time of that read: it began after the last sample that did not show the use yet, it ended after
//! every sample that showed it under way, and before any that showed it completed or no longer. A claim that fits
//! several reads, and a read that several owners claim, decide nothing: a wrong owner is worse than none.

use std::collections::{HashMap, HashSet};

use crate::{
    capture::sampler::{AioRow, AioState, Taken},
    model::io::RelationFork,
    server::InnerPid,
};

/// How long claims and reads are remembered after their end.
const REMEMBERED_NS: u64 = 5_000_000_000;

/// What is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The relation.
    pub relation: RelationFork,
    /// Number of the segment.
    pub segment: u32,
    /// Bytes from the start of the segment file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// When a read was executed, `CLOCK_MONOTONIC` nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Start.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
}

/// Who the view says owns a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Candidates {
    /// Nobody.
    None,
    /// One backend.
    One(InnerPid),
    /// Several backends, or one that may as well mean another read.
    Several,
}

/// One use of a handle, as far as samples showed it.
#[derive(Debug, Clone, Copy)]
struct Claim {
    io_id: u32,
    generation: u64,
    owner: InnerPid,
    began_after_ns: u64,
    ended_after_ns: u64,
    ended_before_ns: u64,
}

impl Claim {
    fn fits(&self, span: &Span) -> bool {
        span.start_ns >= self.began_after_ns
            && (self.ended_after_ns..=self.ended_before_ns).contains(&span.end_ns)
    }

    /// Takes in that a sample shows the use.
    fn see(&mut self, state: AioState, taken: Taken) {
        match state {
            AioState::Defined | AioState::Staged | AioState::Submitted => {
                self.ended_after_ns = self.ended_after_ns.max(taken.from_ns);
            }
            AioState::CompletedIo | AioState::CompletedShared | AioState::CompletedLocal => {
                self.ended_before_ns = self.ended_before_ns.min(taken.to_ns);
            }
            AioState::Other => {}
        }
    }
}

#[derive(Debug, Default)]
struct History {
    claims: Vec<Claim>,
    reads: Vec<Span>,
}

/// Claims and reads by place.
#[derive(Debug, Default)]
pub struct Claims {
    places: HashMap<Place, History>,
    /// Uses that the newest sample showed.
    open: HashMap<(u32, u64), Place>,
    newest: Option<Taken>,
    previous: Option<Taken>,
    swept_ns: u64,
}

impl Claims {
    /// Forgets everything, because handles and generations start anew.
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    /// Takes in a sample. All reads that ended before it must be in already.
    pub fn add_sample(&mut self, taken: Taken, rows: &[AioRow], segment_blocks: u32) {
        let began_after_ns = self.newest.map_or(0, |newest| newest.from_ns);
        let mut shown = HashSet::with_capacity(rows.len());
        for row in rows {
            // What the owner executes itself is no io worker's read.
            let Some(place) = place_of(row, segment_blocks).filter(|_| !row.is_synchronous) else { continue };
            let name = (row.io_id, row.generation);
            shown.insert(name);
            let history = self.places.entry(place).or_default();
            if self.open.insert(name, place).is_none() {
                history.claims.push(Claim {
                    io_id: row.io_id,
                    generation: row.generation,
                    owner: row.owner,
                    began_after_ns,
                    ended_after_ns: 0,
                    ended_before_ns: u64::MAX,
                });
            }
            if let Some(claim) = history.claim_mut(name) {
                claim.see(row.state, taken);
            }
        }
        self.close_all_but(&shown, taken);
        self.previous = self.newest.replace(taken);
        self.sweep(taken.from_ns);
    }

    /// Uses that a sample does not show any more have ended.
    fn close_all_but(&mut self, shown: &HashSet<(u32, u64)>, taken: Taken) {
        let Self { places, open, .. } = self;
        open.retain(|name, place| {
            if shown.contains(name) {
                return true;
            }
            if let Some(claim) = places.get_mut(place).and_then(|history| history.claim_mut(*name)) {
                claim.ended_before_ns = claim.ended_before_ns.min(taken.to_ns);
            }
            false
        });
    }

    /// Takes in a read without a handle, whoever owns it: a claim may mean it.
    pub fn add_read(&mut self, place: Place, span: Span) {
        // Samples may have ended, or never have come.
        self.sweep(span.end_ns);
        self.places.entry(place).or_default().reads.push(span);
    }

    /// Whether all claims to a read that ended then are in, and closed.
    #[must_use]
    pub fn are_settled(&self, end_ns: u64) -> bool {
        self.previous.is_some_and(|previous| previous.from_ns > end_ns)
    }

    /// Who owns a read that was added.
    #[must_use]
    pub fn owner_of(&self, place: &Place, span: &Span) -> Candidates {
        let Some(History { claims, reads }) = self.places.get(place) else { return Candidates::None };
        let mut found = Candidates::None;
        for claim in claims.iter().filter(|claim| claim.fits(span)) {
            let fitting_reads = reads.iter().filter(|read| claim.fits(read)).count();
            found = match found {
                _ if fitting_reads > 1 => return Candidates::Several,
                Candidates::One(owner) if owner != claim.owner => return Candidates::Several,
                _ => Candidates::One(claim.owner),
            };
        }
        found
    }

    /// Forgets what lies too far back for any read to come.
    fn sweep(&mut self, now_ns: u64) {
        let oldest = now_ns.saturating_sub(REMEMBERED_NS);
        if self.swept_ns > oldest {
            return;
        }
        self.swept_ns = now_ns;
        self.places.retain(|_, history| {
            history.claims.retain(|claim| claim.ended_before_ns >= oldest);
            history.reads.retain(|read| read.end_ns >= oldest);
            !history.claims.is_empty() || !history.reads.is_empty()
        });
    }
}

impl History {
    fn claim_mut(&mut self, (io_id, generation): (u32, u64)) -> Option<&mut Claim> {
        self.claims.iter_mut().rev().find(|claim| claim.io_id == io_id && claim.generation == generation)
    }
}

/// What a row reads.
fn place_of(row: &AioRow, segment_blocks: u32) -> Option<Place> {
    let target = row.target?;
    Some(Place {
        relation: target.relation,
        segment: target.first_block / segment_blocks.max(1),
        offset: row.offset,
        length: row.length,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{capture::aio_target::AioTarget, model::io::Fork};

    const SEGMENT: u32 = 131_072;
    const PLACE: Place = Place {
        relation: RelationFork {
            tablespace_oid: 1663,
            database_oid: 5,
            relfilenumber: 16384,
            fork: Fork::Main,
            temporary: false,
        },
        segment: 0,
        offset: 81_920,
        length: 131_072,
    };

    fn row(owner: u32, generation: u64, state: AioState) -> AioRow {
        AioRow {
            owner: InnerPid(owner),
            io_id: owner,
            generation,
            state,
            offset: PLACE.offset,
            length: PLACE.length,
            target: AioTarget::parse("blocks 10..25 in file \"base/5/16384\""),
            is_synchronous: false,
        }
    }

    fn at(ns: u64) -> Taken {
        Taken { from_ns: ns, to_ns: ns + 1 }
    }

    fn span(start_ns: u64, end_ns: u64) -> Span {
        Span { start_ns, end_ns }
    }

    /// Samples at 100, 200, 300, …, each with its rows; and reads.
    fn claims(samples: &[&[AioRow]], reads: &[Span]) -> Claims {
        let mut claims = Claims::default();
        for read in reads {
            claims.add_read(PLACE, *read);
        }
        for (time, rows) in (100..).step_by(100).zip(samples) {
            claims.add_sample(at(time), rows, SEGMENT);
        }
        claims
    }

    #[test]
    fn a_row_under_way_claims_the_read_that_was_executed_then() {
        let read = span(150, 250);
        let found = claims(&[&[], &[row(7, 1, AioState::Submitted)], &[], &[]], &[read]);
        assert_eq!(found.owner_of(&PLACE, &read), Candidates::One(InnerPid(7)));
        assert!(found.are_settled(read.end_ns));
        assert_eq!(found.owner_of(&Place { segment: 1, ..PLACE }, &read), Candidates::None);
    }

    #[test]
    fn a_row_claims_no_read_outside_the_time_of_its_use() {
        let samples: [&[AioRow]; 4] = [&[], &[row(7, 1, AioState::Submitted)], &[], &[]];
        // Before the use, before the sample that shows it under way, after the sample that shows it no more.
        for read in [span(20, 80), span(50, 250), span(150, 190), span(250, 350)] {
            assert_eq!(claims(&samples, &[read]).owner_of(&PLACE, &read), Candidates::None, "{read:?}");
        }
        let completed: [&[AioRow]; 3] = [&[], &[row(7, 1, AioState::CompletedShared)], &[]];
        let (before, after) = (span(150, 190), span(150, 250));
        assert_eq!(claims(&completed, &[before]).owner_of(&PLACE, &before), Candidates::One(InnerPid(7)));
        assert_eq!(claims(&completed, &[after]).owner_of(&PLACE, &after), Candidates::None);
    }

    #[test]
    fn a_claim_that_fits_two_reads_decides_nothing() {
        let (own, of_another) = (span(150, 250), span(160, 260));
        let found = claims(&[&[], &[row(7, 1, AioState::Submitted)], &[], &[]], &[own, of_another]);
        assert_eq!(found.owner_of(&PLACE, &own), Candidates::Several);
        assert_eq!(found.owner_of(&PLACE, &of_another), Candidates::Several);
    }

    #[test]
    fn a_read_that_two_backends_claim_is_nobodys() {
        let read = span(150, 250);
        let rows = [row(7, 1, AioState::Submitted), row(8, 1, AioState::Submitted)];
        assert_eq!(claims(&[&[], &rows, &[], &[]], &[read]).owner_of(&PLACE, &read), Candidates::Several);
    }

    #[test]
    fn what_an_owner_executes_itself_claims_no_workers_read() {
        let read = span(150, 250);
        let own = AioRow { is_synchronous: true, ..row(7, 1, AioState::Submitted) };
        assert_eq!(claims(&[&[], &[own], &[], &[]], &[read]).owner_of(&PLACE, &read), Candidates::None);
    }

    #[test]
    fn old_claims_and_reads_are_forgotten() {
        let mut found = claims(&[&[], &[row(7, 1, AioState::Submitted)], &[], &[]], &[span(150, 250)]);
        found.add_sample(at(2 * REMEMBERED_NS), &[], SEGMENT);
        assert!(found.places.is_empty() && found.open.is_empty());
    }
}
