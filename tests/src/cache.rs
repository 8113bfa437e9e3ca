//! Where setup keeps its tools and downloads.
//!
//! Depends on the standard library alone: the tracer's build script includes this very file to find the linker.

use std::{env, path::PathBuf};

/// The cache folder: `$PGIOTRACE_CACHE`, else `$XDG_CACHE_HOME/pgiotrace`, else `$HOME/.cache/pgiotrace`.
///
/// `None` when none of the three variables is set. The folder need not exist.
#[must_use]
pub fn cache_dir() -> Option<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("PGIOTRACE_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|dir| dir.join("pgiotrace")))
        .or_else(|| set("HOME").map(|dir| dir.join(".cache/pgiotrace")))
}
