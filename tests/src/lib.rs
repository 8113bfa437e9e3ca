//! The harness of the integration suite, also used by `cargo xtask demo`: throw-away PostgreSQL clusters and the tracer
//! beside them.
//!
//! What a test needs, in the order it needs it:
//!
//! 1. [`PgInstall`]: PostgreSQL's programs, as `cargo xtask setup` found or fetched them;
//! 2. [`Cluster`]: a server of its own, which is gone with the value, however the test ends;
//! 3. [`Tracer`]: `pgiotrace` run against that server, with its report parsed;
//! 4. [`SlowDisk`], made before the cluster: a tablespace on a device whose latency is set, and logged.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use pgiotrace_tests::{Cluster, PgInstall, Tracer};
//!
//! let cluster = Cluster::builder(PgInstall::v18()?).io_method("worker").start()?;
//! cluster.pgbench_init(10)?;
//! cluster.drop_caches()?;
//! let scan = cluster.psql_command(&["-c", "SELECT count(abalance) FROM pgbench_accounts"]);
//! let run = Tracer::stat(&cluster).run(&scan)?;
//! assert_eq!(run.report()?["ledger"]["lost"], 0);
//! # Ok(())
//! # }
//! ```

pub mod cache;
mod cluster;
mod folder;
mod install;
pub mod ledger;
mod mounts;
mod process;
mod records;
mod sandbox;
pub mod scan;
mod slow_disk;
mod throttle;
mod tool;
mod tracer;
mod user;
pub mod victim;
mod wait;

pub use cluster::{Cluster, ClusterBuilder, Kept, StopMode};
pub use folder::{remove_everything, sweep_stale};
pub use install::{Kind, PgInstall, STAMP};
pub use process::{signal, wait_timeout};
pub use records::RawRecords;
pub use slow_disk::{FileSystem, Latency, Served, SlowDisk, SlowDiskBuilder, quantile_of};
pub use throttle::Throttle;
pub use tool::{bpftool, find_program, run};
pub use tracer::{Finished, Running, Tracer, tracer_binary};
pub use user::{drop_caches, elevated, is_root};
pub use wait::wait_until;
