//! What a task tells while it works: one line a step.

use std::io::{self, IsTerminal as _, Write as _};

/// Says what a step found or did.
pub(crate) fn done(step: &str, what: impl AsRef<str>) {
    say(&format!("{step:<14} {}\n", what.as_ref()));
}

/// Says what takes so long, where a person is watching; the line goes when the step is done.
pub(crate) fn doing(step: &str, what: impl AsRef<str>) {
    if io::stdout().is_terminal() {
        say(&format!("{step:<14} {} …", what.as_ref()));
    }
}

/// Writes, over what [`doing`] said. If nobody reads it any more (`| head`), the work goes on all the same.
fn say(text: &str) {
    let mut out = io::stdout();
    let over = if out.is_terminal() { "\r\x1b[K" } else { "" };
    let _ = write!(out, "{over}{text}").and_then(|()| out.flush());
}
