//! For whom devices read: sums by file and device.

use std::collections::HashMap;

use pgiotrace_ebpf::FileId;

use super::parts::{Part, WantedBy};

/// Files whose sums are kept one by one.
const MOST_SUMS: usize = 65_536;

/// What was read of one file from one device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct FromDevice {
    /// Requests.
    pub requests: u64,
    /// Bytes that a read asked for.
    pub asked_bytes: u64,
    /// Bytes that were read ahead.
    pub ahead_bytes: u64,
}

impl FromDevice {
    /// Adds another one's counts.
    pub fn merge(&mut self, other: &Self) {
        self.requests += other.requests;
        self.asked_bytes += other.asked_bytes;
        self.ahead_bytes += other.ahead_bytes;
    }
}

/// Requests and bytes of one device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Adopted {
    pub requests: u64,
    pub bytes: u64,
}

/// The sums of a trace.
#[derive(Debug, Default)]
pub(super) struct Sums {
    by_file: HashMap<(FileId, u32), FromDevice>,
    /// By device: what the kernel side could not know to be for the server.
    adopted: HashMap<u32, Adopted>,
}

impl Sums {
    /// By the file that was read and the device that it came from; no file: nobody's metadata or direct reads.
    pub fn iter(&self) -> impl Iterator<Item = (FileId, u32, &FromDevice)> {
        self.by_file.iter().map(|((file, device), sum)| (*file, *device, sum))
    }

    /// What the kernel side counted for others on a device, and turned out to be for the server.
    pub fn adopted(&self, device: u32) -> Adopted {
        self.adopted.get(&device).copied().unwrap_or_default()
    }

    /// Counts a part that the server wanted.
    pub fn add(&mut self, part: &Part) {
        if !matches!(part.wanted_by, WantedBy::Server | WantedBy::RingOf(_)) {
            return;
        }
        // Without pages of a file, all of it was asked for. Of what a thread of io_uring queued, it turns out when its reads end.
        let bytes = if part.is_of_file() { part.range.1 - part.range.0 } else { part.bytes };
        let asked_bytes = if part.is_of_file() { part.asked.length() } else { bytes };
        self.entry(part.file, part.device).merge(&FromDevice {
            requests: u64::from(part.is_last),
            asked_bytes,
            ahead_bytes: bytes - asked_bytes,
        });
    }

    /// Counts what brought no page of a file (direct I/O, metadata) for the file of the read in whose course it was.
    pub fn credit(&mut self, part: &Part, file: FileId) {
        let credited =
            FromDevice { requests: u64::from(part.is_last), asked_bytes: part.bytes, ahead_bytes: 0 };
        if let Some(of_nobody) = self.by_file.get_mut(&(part.file, part.device)) {
            of_nobody.requests = of_nobody.requests.saturating_sub(credited.requests);
            of_nobody.asked_bytes = of_nobody.asked_bytes.saturating_sub(credited.asked_bytes);
        }
        self.entry(file, part.device).merge(&credited);
    }

    /// A read turned out to have asked for that many bytes more of a part that is the server's.
    pub fn ask(&mut self, part: &Part, bytes: u64) {
        let sums = self.entry(part.file, part.device);
        sums.asked_bytes += bytes;
        sums.ahead_bytes = sums.ahead_bytes.saturating_sub(bytes);
    }

    /// A direct read of the server waited for a part that the block layer had held back.
    pub fn claim_direct(&mut self, part: &mut Part) {
        if self.adopt(part) {
            self.ask(part, part.bytes);
        }
    }

    /// Counts a part for the server, a read of which waited for it, if it was nobody's before; whether it was.
    pub fn adopt(&mut self, part: &mut Part) -> bool {
        if part.wanted_by != WantedBy::NotKnown {
            return false;
        }
        part.wanted_by = WantedBy::Adopted;
        let adopted = self.adopted.entry(part.device).or_default();
        adopted.requests += u64::from(part.is_last);
        adopted.bytes += part.bytes;
        let sum = FromDevice { requests: u64::from(part.is_last), asked_bytes: 0, ahead_bytes: part.bytes };
        self.entry(part.file, part.device).merge(&sum);
        true
    }

    fn entry(&mut self, file: FileId, device: u32) -> &mut FromDevice {
        // In a long trace there may be no end of temporary files.
        let is_full = self.by_file.len() >= MOST_SUMS && !self.by_file.contains_key(&(file, device));
        self.by_file.entry((if is_full { FileId::default() } else { file }, device)).or_default()
    }
}
