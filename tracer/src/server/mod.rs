//! The PostgreSQL server that is traced: finding it, its symbols and shared memory, and connecting to it.
//!
//! Everything here only reads `/proc` or speaks SQL: the server is never written to, signalled or stopped.

pub mod aio;
pub mod connect;
pub mod control_file;
pub mod discover;
pub mod facts;
pub mod own_sessions;
pub mod probes;
pub mod relpath;
pub mod symbols;

mod parameters;
mod passwd;
mod pgpass;
mod postmaster_pid;
mod service;
mod tls;

use std::fmt;

/// A process, as the tracer's own PID namespace numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pid(pub u32);

impl fmt::Display for Pid {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

/// A process, as the server's PID namespace numbers it: what SQL shows. Equal to the [`Pid`] unless the
/// server runs in a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InnerPid(pub u32);

impl fmt::Display for InnerPid {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}
