//! What a task tells while it works: one line a step.

use std::io::{self, IsTerminal as _, Write as _};

/// Says what a step found or did.
pub(crate) fn done(step: &str, what: impl AsRef<str>) {
    clear();
    println!("{step:<14} {}", what.as_ref());
}

/// Says what takes so long, where a person is watching; the line goes when the step is done.
pub(crate) fn doing(step: &str, what: impl AsRef<str>) {
    if io::stdout().is_terminal() {
        clear();
        print!("{step:<14} {} …", what.as_ref());
        // If the terminal is gone, so is the person.
        let _ = io::stdout().flush();
    }
}

fn clear() {
    if io::stdout().is_terminal() {
        print!("\r\x1b[K");
    }
}
