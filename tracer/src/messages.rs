//! Messages for whoever asks with `--verbose`: the kernel side's own, on standard error.

use log::{LevelFilter, Log, Metadata, Record};

/// Writes messages to standard error.
struct Stderr;

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record) {
        // Of the libraries' messages, none is for users.
        if self.enabled(record.metadata()) && record.target().starts_with("pgiotrace") {
            anstream::eprintln!("{}: {}", record.level().as_str().to_lowercase(), record.args());
        }
    }

    fn flush(&self) {}
}

/// Shows warnings with one `--verbose`, everything with two, nothing without.
pub fn to_stderr(verbosity: u8) {
    log::set_max_level(match verbosity {
        0 => LevelFilter::Off,
        1 => LevelFilter::Warn,
        _ => LevelFilter::Debug,
    });
    // Nobody has set one before.
    let _ = log::set_logger(&Stderr);
}
