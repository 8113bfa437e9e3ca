//! Bringing what the build, the tests and the demo need.
//!
//! In each step the order of preference is: what the user has, the ecosystem's ordinary way, and last a Debian package or a
//! Python wheel that is unpacked in the cache. Nothing is installed into the system.

mod cargo_tool;
mod debian;
mod debian_tool;
mod packages;
mod postgres;
mod rust_src;
mod tracefs;
mod unpack;

pub(crate) use cargo_tool::{bpf_linker, cargo_deny, typos};
pub(crate) use debian_tool::{BPFTOOL, MKFS_EXT4, MKFS_XFS};

use anyhow::Result;

/// How much is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// To compile both sides.
    Build,
    /// For the demo: a build, PostgreSQL 18, tracing.
    Demo,
    /// For the tests: all of that, older PostgreSQLs and the next one, and tools to make disks and to look for what is left behind.
    Tests,
}

/// Does every step of the scope; what is there already is only reported.
pub(crate) fn run(scope: Scope) -> Result<()> {
    rust_src::ensure()?;
    bpf_linker()?;
    if scope == Scope::Build {
        return Ok(());
    }
    postgres::ensure_current()?;
    if scope == Scope::Tests {
        postgres::ensure_others();
        for tool in [BPFTOOL, MKFS_EXT4, MKFS_XFS] {
            tool.ensure();
        }
    }
    tracefs::ensure(scope)
}
