//! The file `global/pg_control`: how large the server's blocks and segments are, without a connection.

use std::{fs, path::Path};

/// `FLOATFORMAT_VALUE` of PostgreSQL's `src/include/catalog/pg_control.h`: the value of `floatFormat`, behind which
/// `blcksz` and `relseg_size` lie in every version.
const FLOAT_FORMAT: f64 = 1_234_567.0;

/// Sizes that a server was built with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BuildSizes {
    /// Bytes of a block (`BLCKSZ`).
    pub block_bytes: u32,
    /// Blocks of a segment file (`RELSEG_SIZE`).
    pub segment_blocks: u32,
}

/// Reads a data directory's control file; `None` when it cannot be read or is not understood.
#[must_use]
pub fn read(data_directory: &Path) -> Option<BuildSizes> {
    parse(&fs::read(data_directory.join("global/pg_control")).ok()?)
}

fn parse(bytes: &[u8]) -> Option<BuildSizes> {
    let mark = FLOAT_FORMAT.to_ne_bytes();
    // A double is aligned to eight bytes.
    let start = (0..bytes.len()).step_by(8).find(|start| bytes[*start..].starts_with(&mark))? + mark.len();
    let number = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let sizes = BuildSizes { block_bytes: number(start)?, segment_blocks: number(start + 4)? };
    // configure allows 1 to 32 KiB.
    let is_plausible = sizes.block_bytes.is_power_of_two()
        && (1 << 10..=32 << 10).contains(&sizes.block_bytes)
        && sizes.segment_blocks != 0;
    is_plausible.then_some(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_lie_behind_the_float_format() {
        let mut bytes = vec![0; 240];
        bytes.extend(FLOAT_FORMAT.to_ne_bytes());
        bytes.extend(8192_u32.to_ne_bytes());
        bytes.extend(131_072_u32.to_ne_bytes());
        assert_eq!(parse(&bytes), Some(BuildSizes { block_bytes: 8192, segment_blocks: 131_072 }));
        assert_eq!(parse(&bytes[..250]), None, "cut off");
        bytes[248] = 1;
        assert_eq!(parse(&bytes), None, "no power of two");
        assert_eq!(parse(&[]), None);
    }
}
