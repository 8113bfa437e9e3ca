//! `pgiotrace stat`: trace for a while, then print the summary.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, IsTerminal},
    os::unix::process::ExitStatusExt,
    path::Path,
    pin::pin,
    process::{ExitCode, ExitStatus},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::anyhow;
use rustix::process::{Pid, Signal};
use tokio::{
    process::{Child, Command},
    signal::unix::{SignalKind, signal},
};

use super::{doctor, find_server, runtime};
use crate::{
    capture::{
        Capture,
        live::{Live, Plan},
        sampler::Habits,
    },
    cli::{Attribution, StatOptions, Until},
    join::Join,
    model::{StatReport, Window},
    present,
    server::{
        connect::{CommandEnvironment, Connector},
        discover::Server,
    },
};

/// Exit code of a trace that lost reads.
pub(super) const INCOMPLETE: u8 = 3;
/// How long a command waits for the first look at PostgreSQL's statistics.
const FIRST_LOOK_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs the verb. `started` is when the program started.
///
/// # Errors
///
/// When no server can be traced, the command cannot be run, or the report cannot be written.
pub fn run(
    options: &StatOptions,
    is_verbose: bool,
    started: Instant,
    color: anstream::ColorChoice,
) -> anyhow::Result<ExitCode> {
    options.report.destination.check()?;
    let (server, connector) = find_server(&options.connection)?;
    doctor::require_privileges()?;
    let plan = Plan {
        server: server.clone(),
        connector,
        samples: options.sample_rate.map(|hertz| Habits {
            interval: Duration::from_secs(1) / hertz.get(),
            // Where all that is known of owners comes from samples: a testing aid.
            is_unlimited: options.attribution == Attribution::PgAios,
            query_text: options.query_text,
            spent: Arc::default(),
        }),
        use_handles: options.attribution == Attribution::Handle,
        pg_probes: options.pg_probes,
        ring_bytes: options.ring_kib << 10,
        raw_records: options.raw_records.as_deref().map(create).transpose()?,
    };
    let (report, status) = runtime()?.block_on(trace(options, plan, is_verbose, started))?;
    present::deliver_stat(&report, options.report.format, &options.report.destination, color)?;
    Ok(exit_code(&report, status))
}

fn create(path: &Path) -> anyhow::Result<File> {
    File::create(path)
        .map_err(|error| anyhow!("creating {} failed: {error}; name another file", path.display()))
}

/// The command's own code where there is one, as `perf stat` and `env` do.
fn exit_code(report: &StatReport, status: Option<ExitStatus>) -> ExitCode {
    let code = match status {
        Some(status) => status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1),
        None if report.ledger.complete => 0,
        None => i32::from(INCOMPLETE),
    };
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

async fn trace(
    options: &StatOptions,
    plan: Plan,
    is_verbose: bool,
    started: Instant,
) -> anyhow::Result<(StatReport, Option<ExitStatus>)> {
    let server = plan.server.clone();
    let is_sampled = plan.connector.is_some() && plan.samples.is_some();
    let mut join = Join::new(server.clone(), options.filter.clone(), is_sampled);
    if plan.pg_probes {
        join = join.with_wakeups();
    }
    // Before anything is attached: a signal that comes early ends the trace early, and still gives a report.
    let signals = Signals::listen()?;
    let environment = plan.connector.as_ref().map(Connector::environment).unwrap_or_default();
    let mut live = Live::attach(plan)?;
    let attach_ms = started.elapsed().as_secs_f64() * 1e3;
    let (start, began) = (jiff::Timestamp::now(), Instant::now());
    say_that_it_traces(&server, &options.until, is_verbose);
    let status = {
        let mut end = pin!(until(&options.until, &environment, signals));
        let mut told = 0;
        if matches!(options.until, Until::CommandEnds { .. }) {
            await_first_look(&mut live, &mut join).await?;
        }
        loop {
            let mut sink = |event| join.take(event);
            tokio::select! {
                result = live.next(&mut sink) => result?,
                status = &mut end => break status?,
            }
            told = tell_new_notes(&join, told);
            if join.is_stopped() && !matches!(options.until, Until::CommandEnds { .. }) {
                break None;
            }
        }
    };
    let duration_s = began.elapsed().as_secs_f64();
    let ending = live.finish(&mut |event| join.take(event)).await?;
    let window = Window { start: format!("{start:.6}"), duration_s };
    Ok((join.report(window, attach_ms, &ending), status))
}

/// Lets a command begin only after the first look at PostgreSQL's statistics, so that these have none of its reads yet.
async fn await_first_look(live: &mut Live, join: &mut Join) -> anyhow::Result<()> {
    let look = async {
        while !join.has_first_look() && !join.is_stopped() {
            live.next(&mut |event| join.take(event)).await?;
        }
        Ok(())
    };
    // A server that does not answer must not keep the command from running.
    tokio::time::timeout(FIRST_LOOK_TIMEOUT, look).await.unwrap_or(Ok(()))
}

/// Who waits at a terminal learns at once what will be missing in the report. Returns how many notes are told.
fn tell_new_notes(join: &Join, told: usize) -> usize {
    let notes = join.notes();
    if io::stderr().is_terminal() {
        for note in notes.iter().skip(told) {
            anstream::eprintln!("note: {}", present::printable(note));
        }
    }
    notes.len()
}

/// On a terminal a person waits for the end; with `--verbose` a program may wait for the start.
fn say_that_it_traces(server: &Server, until: &Until, is_verbose: bool) {
    let what = format!(
        "PostgreSQL {}, postmaster {}, {}",
        server.major,
        server.postmaster,
        server.data_directory.display()
    );
    let end = match until {
        Until::Interrupted => "Ctrl-C ends it".to_owned(),
        Until::Elapsed(duration) => format!("for {duration:?}, Ctrl-C ends it earlier"),
        // The command has the terminal.
        Until::CommandEnds { .. } if !is_verbose => return,
        Until::CommandEnds { program, .. } => format!("until {} ends", program.display()),
    };
    if is_verbose || io::stderr().is_terminal() {
        anstream::eprintln!("tracing {}; {end}", present::printable(&what));
    }
}

/// Waits for the end of the trace. The status is the command's.
async fn until(
    until: &Until,
    environment: &CommandEnvironment,
    mut signals: Signals,
) -> anyhow::Result<Option<ExitStatus>> {
    match until {
        Until::Interrupted => {
            signals.next().await;
            Ok(None)
        }
        Until::Elapsed(duration) => {
            tokio::select! {
                () = tokio::time::sleep(*duration) => {}
                _ = signals.next() => {}
            }
            Ok(None)
        }
        Until::CommandEnds { program, args } => {
            run_command(program, args, environment, signals).await.map(Some)
        }
    }
}

async fn run_command(
    program: &OsString,
    args: &[OsString],
    environment: &CommandEnvironment,
    mut signals: Signals,
) -> anyhow::Result<ExitStatus> {
    let mut child = Command::new(program).args(args).envs(environment.clone()).spawn().map_err(|error| {
        let hint = hint_for(&program.to_string_lossy());
        anyhow!("running the command {} failed: {error}; {hint}", program.display())
    })?;
    tokio::select! {
        status = child.wait() => return ended(status),
        signal = signals.next() => forward(&child, signal),
    }
    // The command may take its time to end; a second signal no longer waits for it.
    tokio::select! {
        status = child.wait() => ended(status),
        _ = signals.next() => Ok(ExitStatus::from_raw(Signal::INT.as_raw())),
    }
}

/// What to do about a command that does not exist.
fn hint_for(word: &str) -> &'static str {
    if word.starts_with("postgres://") || word.starts_with("postgresql://") {
        "give a connection URI with -d"
    } else if word.starts_with(|first: char| first.is_ascii_digit()) {
        "give the length of the trace with --duration"
    } else {
        "check its name and PATH"
    }
}

fn ended(status: io::Result<ExitStatus>) -> anyhow::Result<ExitStatus> {
    status.map_err(|error| anyhow!("waiting for the command failed: {error}"))
}

/// Hands a signal on to the command. A terminal sends Ctrl-C to both by itself.
fn forward(child: &Child, signal: Signal) {
    let pid = child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    if let (Some(pid), false) = (pid, signal == Signal::INT) {
        // It may have ended meanwhile.
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// The signals that end a trace, and still give a report.
pub(super) struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    hang_up: tokio::signal::unix::Signal,
}

impl Signals {
    pub(super) fn listen() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).map_err(|error| anyhow!("listening for signals failed: {error}"));
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            hang_up: listen(SignalKind::hangup())?,
        })
    }

    pub(super) async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.interrupt.recv() => Signal::INT,
            _ = self.terminate.recv() => Signal::TERM,
            _ = self.hang_up.recv() => Signal::HUP,
        }
    }
}
