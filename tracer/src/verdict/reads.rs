//! What kind of reads they were: `small-reads`, `index-heap-random`.

use super::{FEWEST_READS, Finding, Known, NotKnown, figures};
use crate::{
    model::{IoSummary, Relation},
    units,
};
use figures::{Figures, Times, ratio, sum};

/// PostgreSQL's default of `io_combine_limit` (`DEFAULT_IO_COMBINE_LIMIT`, `src/include/storage/bufmgr.h`), bytes.
const DEFAULT_LIMIT: f64 = 131_072.0;
/// From that limit on, reads are not small: of two transfers of 64 kB, most devices make as much as of one of 128 kB.
const LEAST_LIMIT: u64 = 65_536;
/// Share of the limit that the mean read must reach for the limit to be what keeps reads small.
const REACHED: f64 = 0.8;

/// Share of the reads' time from which on they have most of it.
const MOST: f64 = 0.5;
/// Blocks a read up to which nearly all reads are of one block.
const ABOUT_ONE: f64 = 1.1;
/// Share of a relation's reads that are made synchronously, if nearly all are.
const NEARLY_ALL: f64 = 0.9;
/// Share of its reads that found what the kernel had read ahead, from which on it was read in order.
const IN_ORDER: f64 = 0.5;

/// Scans' reads are as small as `io_combine_limit` keeps them.
pub(super) fn small_reads(figures: &Figures<'_>) -> Known<Option<Finding>> {
    let (limit, block) = (figures.size("io_combine_limit")?, figures.size("block_size")?);
    let small = figures.report.methods.iter().filter(|totals| {
        // A synchronous read of one block was perhaps never to be combined with another.
        let is_of_scans =
            totals.method != "sync" || (totals.io.blocks >= 2 * totals.io.reads && limit > block);
        let mean = totals.io.bytes as f64 / totals.io.reads.max(1) as f64;
        is_of_scans && totals.io.reads >= FEWEST_READS && mean >= REACHED * limit as f64
    });
    let small: Vec<&IoSummary> = small.map(|totals| &totals.io).collect();
    if small.is_empty() || limit >= LEAST_LIMIT {
        return Ok(None);
    }
    let (reads, bytes) = small.iter().fold((0, 0), |(reads, bytes), io| (reads + io.reads, bytes + io.bytes));
    let of_small: f64 = small.iter().map(|io| sum(io.latency_us.as_ref())).sum();
    let evidence = format!(
        "{} of scans had {} each on average, which is as much as io_combine_limit permits ({}).",
        units::counted(reads, "read"),
        units::size(bytes / reads),
        units::size(limit),
    );
    let advice =
        "Set io_combine_limit to its default of 128kB or more: fewer and larger reads bring the same blocks.";
    // What larger reads would save, if each took as long as a small one.
    let saved = 1.0 - limit as f64 / DEFAULT_LIMIT;
    Ok(Some(Finding::of(figures.times?.share(of_small) * saved, evidence, advice)))
}

/// Most of the time of reading goes to single blocks, each read by itself and waited for, from a device.
pub(super) fn index_heap_random(figures: &Figures<'_>) -> Known<Option<Finding>> {
    let times = figures.times?;
    let settings = &figures.report.target.settings;
    if settings.contains_key("io_combine_limit")
        && figures.size("io_combine_limit")? <= figures.size("block_size")?
    {
        // Scans read single blocks, too.
        return Err(NotKnown);
    }
    let single: Vec<&Relation> =
        figures.report.relations.iter().filter(|relation| is_random(relation)).collect();
    let reads: u64 = single.iter().map(|relation| relation.io.reads).sum();
    if reads < FEWEST_READS {
        return Ok(None);
    }
    let own = Times::of(single.iter().map(|relation| &relation.io))?;
    if times.share(own.all) < MOST || own.share(own.device + own.block_queue) < MOST {
        return Ok(None);
    }
    let evidence = format!(
        "{} of one block each, waited for one by one, took {}, {} of all reads' time{}.",
        units::counted(reads, "read"),
        units::duration(own.all),
        units::percent(times.share(own.all).min(1.0)),
        slowest(&single).unwrap_or_default(),
    );
    let advice = "Let fewer or neighbouring blocks be fetched (a covering index, CLUSTER), or let a bitmap heap scan prefetch \
                  them; index scans do not.";
    Ok(Some(Finding::of(times.share(own.all).min(1.0), evidence, advice)))
}

/// Whether a relation was read block by block, out of order: not as a scan of a server that does not combine reads (before
/// PostgreSQL 17) would.
fn is_random(relation: &Relation) -> bool {
    let io = &relation.io;
    let is_synchronous = ratio(io.by_method.sync, io.reads) >= NEARLY_ALL;
    let is_single = io.blocks as f64 <= ABOUT_ONE * io.reads as f64;
    let is_in_order = io.readahead_hits.is_none_or(|hits| ratio(hits, io.reads) >= IN_ORDER);
    relation.file.is_none() && io.reads > 0 && is_synchronous && is_single && !is_in_order
}

/// `; most of it in public.items, 5.31 ms for half of its reads`.
fn slowest(relations: &[&Relation]) -> Option<String> {
    let of = |relation: &Relation| sum(relation.io.latency_us.as_ref());
    let relation = relations.iter().max_by(|a, b| of(a).total_cmp(&of(b)))?;
    let (name, latency) = (relation.name.as_deref()?, relation.io.latency_us?);
    let schema = relation.schema.as_deref().map(|schema| format!("{schema}.")).unwrap_or_default();
    Some(format!("; most of it in {schema}{name}, {} for half of its reads", units::duration(latency.p50)))
}

#[cfg(test)]
mod tests {
    use super::super::samples::{Sample, forget_stages, has};
    use crate::model::{ByMethod, StatReport};

    const RANDOM: &str = "index-heap-random";
    const SMALL: &str = "small-reads";

    /// A relation that has that share of the reads' time.
    fn random(share: f64, device: f64) -> StatReport {
        let mut report = Sample::of("sync", 1_000, 5_000.0).stages(0.0, 0.0, device).blocks(1).report();
        let io = &mut report.methods[0].io;
        for dist in
            [&mut io.latency_us, &mut io.stages_us.cache, &mut io.stages_us.device].into_iter().flatten()
        {
            dist.sum /= share;
        }
        report
    }

    #[test]
    fn single_blocks_matter_from_half_of_the_time_on() {
        assert!(has(&random(0.51, 0.9), RANDOM));
        assert!(!has(&random(0.49, 0.9), RANDOM));
        assert!(has(&random(1.0, 0.51), RANDOM));
        assert!(!has(&random(1.0, 0.49), RANDOM), "from the page cache");
    }

    #[test]
    fn scans_are_not_random() {
        let changed = |change: &dyn Fn(&mut StatReport)| {
            let mut report = random(1.0, 0.9);
            change(&mut report);
            has(&report, RANDOM)
        };
        assert!(changed(&|report| report.relations[0].io.blocks = 1_099));
        assert!(!changed(&|report| report.relations[0].io.blocks = 1_101));
        let by = |sync| ByMethod { sync, worker: 1_000 - sync, io_uring: 0 };
        assert!(changed(&|report| report.relations[0].io.by_method = by(901)));
        assert!(!changed(&|report| report.relations[0].io.by_method = by(899)));
        assert!(!changed(&|report| report.relations[0].io.readahead_hits = Some(501)), "read in order");
        assert!(changed(&|report| report.relations[0].io.readahead_hits = Some(499)));
        assert!(!changed(&|report| report.relations[0].io.readahead_hits = None));
        assert!(!changed(&|report| report.relations[0].file = Some("base/pgsql_tmp".to_owned())));
        assert!(!changed(&forget_stages));
        let combines_nothing = |report: &mut StatReport| {
            report.target.settings.insert("io_combine_limit".to_owned(), "8kB".to_owned());
        };
        assert!(!changed(&combines_nothing), "scans look alike");
    }

    fn sized(method: &'static str, limit: &str, bytes: u64) -> StatReport {
        let sample =
            Sample::of(method, 1_000, 5_000.0).stages(0.0, 0.0, 0.9).setting("io_combine_limit", limit);
        let mut report = sample.blocks(bytes.div_ceil(8_192)).report();
        report.methods[0].io.bytes = bytes * 1_000;
        report
    }

    #[test]
    fn reads_are_small_where_a_low_limit_keeps_them_so() {
        assert!(has(&sized("io_uring", "8kB", 8_192), SMALL));
        assert!(has(&sized("worker", "56kB", 57_344), SMALL));
        assert!(!has(&sized("worker", "64kB", 65_536), SMALL));
        assert!(has(&sized("worker", "32kB", 26_300), SMALL));
        assert!(!has(&sized("worker", "32kB", 26_200), SMALL), "something else keeps them small");
        assert!(!has(&sized("sync", "8kB", 8_192), SMALL), "perhaps no scan's");
        assert!(has(&sized("sync", "16kB", 16_384), SMALL));
        assert!(!has(&sized("worker", "?", 8_192), SMALL));
    }
}
