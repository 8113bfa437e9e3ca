//! Figures that several rules look at, and whether they are known.

use super::{FEWEST_READS, Known, NotKnown, Scope};
use crate::model::{Backend, BySource, Device, Dist, IoSummary, StatReport};

/// The stages must make up that much of the reads' time, else it is not known where it went: of what a tenth holds, no
/// rule could be turned round.
const LEAST_COVERED: f64 = 0.9;

/// A report, and sums over all its reads.
pub(super) struct Figures<'a> {
    pub report: &'a StatReport,
    /// Where their time went.
    pub times: Known<Times>,
    /// What they cost their owners.
    pub waits: Known<Waits>,
}

impl<'a> Figures<'a> {
    /// The figures, if there is anything to judge by.
    pub fn of(report: &'a StatReport) -> Result<Self, Scope> {
        if !report.ledger.complete || report.ledger.impossible > 0 {
            return Err(Scope::Incomplete);
        }
        if report.filter.as_ref().is_some_and(|filter| filter.min_latency_us.is_some()) {
            return Err(Scope::SlowReadsOnly);
        }
        let reads = report.methods.iter().map(|totals| totals.io.reads).sum();
        if reads < FEWEST_READS {
            return Err(Scope::TooFew(reads));
        }
        let owners = report.backends.iter().map(|backend| &backend.io);
        let owners = owners.chain(report.ended_backends.iter().map(|ended| &ended.io));
        Ok(Self {
            report,
            times: Times::of(report.methods.iter().map(|totals| &totals.io)),
            waits: Waits::of(owners),
        })
    }

    /// All reads that a method executed; `None` where it executed none.
    pub fn method(&self, name: &str) -> Option<&'a IoSummary> {
        let found = self.report.methods.iter().find(|totals| totals.method == name);
        found.map(|totals| &totals.io).filter(|io| io.reads > 0)
    }

    /// Whether the tables hold a part of the server's reads only.
    pub fn is_filtered(&self) -> bool {
        self.report.filter.is_some()
    }

    /// Length of the trace, microseconds.
    pub fn window_us(&self) -> f64 {
        self.report.window.duration_s * 1e6
    }

    /// Backends that read.
    pub fn sessions(&self) -> impl Iterator<Item = &'a Backend> {
        self.report.backends.iter().filter(|backend| backend.io.reads > 0)
    }

    /// A setting that is a plain number.
    pub fn number(&self, setting: &str) -> Known<u64> {
        self.report.target.settings.get(setting).and_then(|text| text.parse().ok()).ok_or(NotKnown)
    }

    /// A setting that is a size, in bytes.
    pub fn size(&self, setting: &str) -> Known<u64> {
        self.report.target.settings.get(setting).and_then(|text| size(text)).ok_or(NotKnown)
    }

    /// The device that spent most time on the server's requests.
    pub fn busiest_device(&self) -> Option<&'a Device> {
        let devices = self.report.devices.iter().filter(|device| device.users.server_requests > 0);
        devices.max_by(|a, b| server_time(a).total_cmp(&server_time(b)))
    }
}

/// What a size is in bytes, as `SHOW` writes it: `128kB`, `16MB` (`convert_int_from_base_unit`,
/// `src/backend/utils/misc/guc.c`).
fn size(text: &str) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim() {
        "" | "B" => 1,
        "kB" => 1 << 10,
        "MB" => 1 << 20,
        "GB" => 1 << 30,
        "TB" => 1 << 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

/// Time that a device spent on the server's requests, microseconds, as far as its time is even over all requests.
pub(super) fn server_time(device: &Device) -> f64 {
    device.device_us.map_or(0.0, |dist| dist.sum) * ratio(device.users.server_requests, device.requests)
}

/// The kernel's name of a device, or its numbers.
pub(super) fn device_name(device: &Device) -> &str {
    device.name.as_deref().unwrap_or(&device.dev)
}

/// `part / whole`; 0 where there is no whole.
pub(super) fn ratio(part: u64, whole: u64) -> f64 {
    if whole > 0 { part as f64 / whole as f64 } else { 0.0 }
}

/// Sum of a distribution, microseconds; of none 0.
pub(super) fn sum(dist: Option<&Dist>) -> f64 {
    dist.map_or(0.0, |dist| dist.sum)
}

/// Where the time of some reads went, microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Times {
    /// All of it.
    pub all: f64,
    pub submit: f64,
    pub cache: f64,
    pub block_queue: f64,
    pub device: f64,
}

impl Times {
    /// Of these reads; not known where the stages do not make up their time.
    pub fn of<'a>(sets: impl IntoIterator<Item = &'a IoSummary>) -> Known<Self> {
        let mut times = Self::default();
        let mut covered = 0.0;
        for io in sets {
            let stages = &io.stages_us;
            times.all += sum(io.latency_us.as_ref());
            times.submit += sum(stages.submit.as_ref());
            times.cache += sum(stages.cache.as_ref());
            times.block_queue += sum(stages.block_queue.as_ref());
            times.device += sum(stages.device.as_ref());
            covered += sum(stages.pg_queue.as_ref()) + sum(stages.wakeup.as_ref());
        }
        covered += times.submit + times.cache + times.block_queue + times.device;
        if times.all > 0.0 && covered >= LEAST_COVERED * times.all { Ok(times) } else { Err(NotKnown) }
    }

    /// Of all of it, the part that a time is.
    pub fn share(&self, part: f64) -> f64 {
        part / self.all
    }
}

/// What reads cost their owners, microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Waits {
    /// Owners were blocked while a read of theirs was in flight.
    pub exposed: f64,
    /// They were not.
    pub hidden: f64,
}

impl Waits {
    /// Of these owners; not known where it is not of all of them.
    pub fn of<'a>(owners: impl IntoIterator<Item = &'a IoSummary>) -> Known<Self> {
        let mut waits = Self::default();
        for io in owners.into_iter().filter(|io| io.reads > 0) {
            waits.exposed += io.exposed_us.ok_or(NotKnown)?;
            waits.hidden += io.hidden_us.ok_or(NotKnown)?;
        }
        Ok(waits)
    }

    /// Time in which there was a read in flight.
    pub fn reading(&self) -> f64 {
        self.exposed + self.hidden
    }

    /// How much of that the owners were blocked.
    pub fn exposed_share(&self) -> f64 {
        if self.reading() > 0.0 { self.exposed / self.reading() } else { 0.0 }
    }
}

/// Reads of some sets by where their bytes came from; not known where it is not of all of them.
pub(super) fn sources<'a>(sets: impl IntoIterator<Item = &'a IoSummary>) -> Known<BySource> {
    let mut sum = BySource::default();
    for io in sets.into_iter().filter(|io| io.reads > 0) {
        let BySource { cache, device, mixed, unknown: _ } = io.by_source.ok_or(NotKnown)?;
        sum.cache += cache;
        sum.device += device;
        sum.mixed += mixed;
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_show_writes_them() {
        let cases = [
            ("8kB", Some(8_192)),
            ("128kB", Some(131_072)),
            ("1MB", Some(1 << 20)),
            ("16", Some(16)),
            ("", None),
            ("on", None),
            ("-1", None),
            ("8 parsecs", None),
            ("99999999999999TB", None),
        ];
        for (text, bytes) in cases {
            assert_eq!(size(text), bytes, "{text}");
        }
    }
}
