//! pgiotrace: kernel-side I/O latency tracer for PostgreSQL.
//!
//! Data flows one way: [`capture`] (kernel records, `/proc`, PostgreSQL samples) → [`join`] (pure functions) →
//! [`model`] (what a trace amounts to) → [`present`] (text, JSON, CSV). [`server`] finds the server to trace; [`verdict`] has
//! the rules over the finished report.

pub mod capture;
pub mod cli;
pub mod commands;
pub mod join;
pub mod model;
pub mod present;
pub mod server;
pub mod units;
pub mod verdict;
