//! A slow disk by hand.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use jiff::SignedDuration;
use pgiotrace_tests::{FileSystem, Latency, SlowDisk, is_root};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};

use crate::{setup, step};

/// What the disk is to be like.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How long each read takes ("200us", "5ms").
    #[arg(long, default_value = "5ms", value_parser = latency)]
    latency: Duration,
    /// Size ("512M", "2G"); memory is used for what is written only.
    #[arg(long, default_value = "2G", value_parser = size)]
    size: u64,
    /// File system.
    #[arg(long, default_value = "ext4")]
    fs: Fs,
    /// How many reads are served at once; unless given, all are.
    #[arg(long)]
    concurrency: Option<usize>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Fs {
    Ext4,
    Xfs,
}

/// Makes the disk, and removes it when this process is told to end.
pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(is_root(), "cannot make a slow disk as a normal user: run `sudo -E cargo xtask slowdisk`");
    let (file_system, mkfs) = match args.fs {
        Fs::Ext4 => (FileSystem::Ext4, setup::MKFS_EXT4),
        Fs::Xfs => (FileSystem::Xfs, setup::MKFS_XFS),
    };
    mkfs.ensure();
    // Before anything is made, so that no signal can leave something behind.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot listen for signals")?;
    let mut builder = SlowDisk::builder().size(args.size).file_system(file_system);
    if let Some(reads) = args.concurrency {
        builder = builder.concurrency(reads);
    }
    let disk = builder.latency(Latency::Constant(args.latency)).start()?;
    let (major, minor) = disk.device();
    step::done("mounted", disk.mount_point().display().to_string());
    step::done("device", format!("{} ({major}:{minor})", disk.device_node().display()));
    step::done(
        "tablespace",
        format!("CREATE TABLESPACE slow LOCATION '{}'", disk.tablespace_dir().display()),
    );
    step::done("latency", format!("{:?} a read, none a write; Ctrl-C removes the disk", args.latency));
    signals.forever().next();
    step::done("served", format!("{} reads", disk.log().len()));
    drop(disk);
    step::done("removed", "all of it");
    Ok(())
}

fn latency(text: &str) -> Result<Duration> {
    let duration: SignedDuration = text.parse()?;
    Duration::try_from(duration).context("a latency cannot be negative")
}

/// A number with K, M, G or T, powers of 1024.
fn size(text: &str) -> Result<u64> {
    let text = text.trim_end_matches(['B', 'b']).trim_end_matches('i');
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let power = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" => 0,
        "K" => 1,
        "M" => 2,
        "G" => 3,
        "T" => 4,
        unit => anyhow::bail!("{unit} is no unit of a size: use K, M, G or T"),
    };
    let number: u64 = digits.trim().parse().context("a size is a number with K, M, G or T")?;
    number.checked_mul(1 << (10 * power)).context("a size is too large")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        let sizes = ["4096", "3K", "512M", "2G", "2GiB", "1T"].map(|text| size(text).ok());
        assert_eq!(sizes, [4096, 3 << 10, 512 << 20, 2 << 30, 2 << 30, 1 << 40].map(Some));
        assert!(["", "G", "2X", "-1G", "99999999T"].iter().all(|text| size(text).is_err()));
    }

    #[test]
    fn latencies_have_units() {
        assert_eq!(latency("200us").ok(), Some(Duration::from_micros(200)));
        assert_eq!(latency("5ms").ok(), Some(Duration::from_millis(5)));
        assert!(latency("-5ms").is_err() && latency("5").is_err());
    }
}
