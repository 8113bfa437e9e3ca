//! The kernel's records as the tracer saw them, one by one.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use pgiotrace_ebpf::{RequestRecord, kind};
use zerocopy::FromBytes as _;

/// What `pgiotrace stat --raw-records FILE` wrote.
#[derive(Debug, Default)]
pub struct RawRecords {
    /// Requests that completed, or parts of them.
    pub requests: Vec<RequestRecord>,
}

impl RawRecords {
    /// Reads such a file.
    ///
    /// # Errors
    ///
    /// When it cannot be read, or ends in the middle of a record.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut records = Self::default();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let (length, tail) = rest.split_first_chunk().context("a length is cut off")?;
            let length = u32::from_ne_bytes(*length) as usize;
            ensure!(tail.len() >= length, "a record is cut off");
            let (record, tail) = tail.split_at(length);
            records.take(record)?;
            rest = tail;
        }
        Ok(records)
    }

    fn take(&mut self, record: &[u8]) -> Result<()> {
        let (kind, _) = u32::read_from_prefix(record).ok().context("a record has no kind")?;
        if kind == kind::REQUEST {
            self.requests.push(RequestRecord::read_from_bytes(record).ok().context("no request")?);
        }
        Ok(())
    }

    /// Requests of one device.
    #[must_use]
    pub fn requests_of(&self, (major, minor): (u32, u32)) -> Vec<&RequestRecord> {
        let device = (major << 20) | minor;
        self.requests.iter().filter(|record| record.request.device == device).collect()
    }
}
