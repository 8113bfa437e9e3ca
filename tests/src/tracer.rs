//! Running `pgiotrace` as a user does: as a program, with arguments.

use std::{
    env,
    ffi::OsString,
    fs,
    io::{BufRead as _, BufReader, Read as _},
    path::PathBuf,
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    sync::{
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use rustix::process::Signal;
use serde_json::Value;

use crate::{
    Cluster,
    process::{self, wait_timeout},
    user::elevated,
};

/// With `--verbose`, the tracer says on stderr that it is attached in a line that begins like this.
const ATTACHED: &str = "tracing ";
/// How long the tracer may take to attach, or to end after it was told to.
const PATIENCE: Duration = Duration::from_mins(1);

/// Numbers the reports, so that two tracers of one cluster do not share a file.
static REPORTS: AtomicU32 = AtomicU32::new(0);

/// Path of the built tracer: `PGIOTRACE_BIN`, else beside this very executable.
///
/// # Errors
///
/// When it has not been built.
pub fn tracer_binary() -> Result<PathBuf> {
    if let Some(named) = env::var_os("PGIOTRACE_BIN") {
        return Ok(named.into());
    }
    let own = env::current_exe().context("cannot find this executable's own path")?;
    // target/debug/xtask, or target/debug/deps/some-test.
    let found = own.ancestors().skip(1).take(2).map(|dir| dir.join("pgiotrace")).find(|path| path.exists());
    found.context("cannot find the tracer: build it with `cargo build`, or name it in PGIOTRACE_BIN")
}

/// A run of the tracer, to be described and started.
#[derive(Debug, Clone)]
pub struct Tracer {
    args: Vec<OsString>,
    envs: Vec<(OsString, OsString)>,
    binary: Option<PathBuf>,
    /// What starts it, with arguments; empty when nothing does.
    wrapper: Vec<OsString>,
    /// Where it writes its JSON report: into the cluster's folder, which goes however we end.
    report: Option<PathBuf>,
}

impl Tracer {
    /// Any command line.
    #[must_use]
    pub fn new<S: Into<OsString>>(args: impl IntoIterator<Item = S>) -> Self {
        Self {
            args: args.into_iter().map(Into::into).collect(),
            envs: Vec::new(),
            binary: None,
            wrapper: Vec::new(),
            report: None,
        }
    }

    /// `pgiotrace stat --format json` of this cluster, as its superuser. The report is parsed.
    #[must_use]
    pub fn stat(cluster: &Cluster) -> Self {
        let report =
            cluster.folder().join(format!("report-{}.json", REPORTS.fetch_add(1, Ordering::Relaxed)));
        let args = ["stat", "--format", "json", "-o"].map(OsString::from);
        let mut tracer = Self::new(args).arg(report.clone()).server(cluster);
        tracer.report = Some(report);
        tracer
    }

    /// Runs another binary than [`tracer_binary`] would find.
    #[must_use]
    pub fn binary(mut self, binary: PathBuf) -> Self {
        self.binary = Some(binary);
        self
    }

    /// Starts it through another program that ends in `exec` ("setpriv --reuid 42 --"): with fewer rights, or another
    /// view of the machine.
    #[must_use]
    pub fn through<S: Into<OsString>>(mut self, wrapper: impl IntoIterator<Item = S>) -> Self {
        self.wrapper = wrapper.into_iter().map(Into::into).collect();
        self
    }

    /// Names the server and the role to connect as.
    #[must_use]
    pub fn server(self, cluster: &Cluster) -> Self {
        let data = cluster.data_dir().into_os_string();
        self.args([
            OsString::from("-D"),
            data,
            "-U".into(),
            "postgres".into(),
            "-d".into(),
            "postgres".into(),
        ])
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(self, arg: impl Into<OsString>) -> Self {
        self.args([arg])
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<S: Into<OsString>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds arguments at the beginning, where they are never taken for a command's.
    #[must_use]
    pub fn first<S: Into<OsString>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args.splice(0..0, args.into_iter().map(Into::into));
        self
    }

    /// Sets an environment variable (not through sudo).
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.envs.push((name.into(), value.into()));
        self
    }

    /// Traces while `traced` runs, and waits for both. Only the command's program and arguments are used.
    ///
    /// # Errors
    ///
    /// When the tracer cannot be started. That it fails is a result, not an error.
    pub fn run(&self, traced: &Command) -> Result<Finished> {
        let separator = [OsString::from("--"), traced.get_program().to_owned()];
        let command_line = separator.into_iter().chain(traced.get_args().map(ToOwned::to_owned));
        self.clone().args(command_line).finish()
    }

    /// Runs the tracer to its own end (`--duration`, or a verb that ends by itself).
    ///
    /// # Errors
    ///
    /// When the tracer cannot be started. That it fails is a result, not an error.
    pub fn finish(&self) -> Result<Finished> {
        self.spawn()?.wait()
    }

    /// Starts the tracer and waits until it is attached; it traces until [`Running::interrupt`].
    ///
    /// # Errors
    ///
    /// When it ends before it is attached, or is not attached after a minute; the error has what it said.
    pub fn start(&self) -> Result<Running> {
        let mut tracer = self.clone();
        tracer.args.insert(1.min(tracer.args.len()), "--verbose".into());
        let mut running = tracer.spawn()?;
        match running.attached.recv_timeout(PATIENCE) {
            Ok(()) => Ok(running),
            Err(reason) => {
                let _ = running.child.kill();
                bail!("pgiotrace did not attach ({reason}); it said: {}", running.wait()?.stderr.trim())
            }
        }
    }

    /// Starts the tracer without waiting for anything.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub fn spawn(&self) -> Result<Running> {
        let binary = self.binary.clone().map_or_else(tracer_binary, Ok)?;
        let mut command = match self.wrapper.split_first() {
            Some((program, args)) => {
                let mut command = elevated(program);
                command.args(args).arg(&binary);
                command
            }
            None => elevated(&binary),
        };
        command.args(&self.args).envs(self.envs.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("cannot start {}", binary.display()))?;
        let (attached, stderr) = read_stderr(child.stderr.take());
        let mut out = child.stdout.take();
        let stdout = thread::spawn(move || {
            let mut bytes = Vec::new();
            // What was read before a failure is still worth showing.
            let _ = out.as_mut().map(|out| out.read_to_end(&mut bytes));
            String::from_utf8_lossy(&bytes).into_owned()
        });
        Ok(Running {
            child,
            attached,
            stdout: Some(stdout),
            stderr: Some(stderr),
            report: self.report.clone(),
        })
    }
}

/// Reads all that is said on stderr, and tells when the line of being attached was among it.
fn read_stderr(pipe: Option<ChildStderr>) -> (mpsc::Receiver<()>, JoinHandle<String>) {
    let (attached, receiver) = mpsc::channel();
    let reader = thread::spawn(move || {
        let mut said = String::new();
        for line in pipe.into_iter().flat_map(|pipe| BufReader::new(pipe).lines()).map_while(Result::ok) {
            if line.starts_with(ATTACHED) {
                // Nobody waits for it when the tracer runs a command.
                let _ = attached.send(());
            }
            said.push_str(&line);
            said.push('\n');
        }
        said
    });
    (receiver, reader)
}

/// A tracer at work.
#[derive(Debug)]
pub struct Running {
    child: Child,
    attached: mpsc::Receiver<()>,
    stdout: Option<JoinHandle<String>>,
    stderr: Option<JoinHandle<String>>,
    report: Option<PathBuf>,
}

impl Running {
    /// The tracer's PID.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends the trace as Ctrl-C does, and waits for the report.
    ///
    /// # Errors
    ///
    /// When it has not ended after a minute; it is killed then.
    pub fn interrupt(self) -> Result<Finished> {
        self.end_with(Signal::INT)
    }

    /// Ends the trace by a signal, and waits for the report.
    ///
    /// # Errors
    ///
    /// As [`Running::interrupt`].
    pub fn end_with(mut self, signal: Signal) -> Result<Finished> {
        process::signal(self.child.id(), signal);
        if wait_timeout(&mut self.child, PATIENCE)?.is_none() {
            let _ = self.child.kill();
            bail!("pgiotrace had not ended {} s after {signal:?}, and was killed", PATIENCE.as_secs());
        }
        self.wait()
    }

    /// Kills it (SIGKILL), and waits until it is gone.
    ///
    /// # Errors
    ///
    /// When it cannot be killed.
    pub fn kill(mut self) -> Result<Finished> {
        self.child.kill().context("cannot kill pgiotrace")?;
        self.wait()
    }

    /// Waits until it ends by itself.
    ///
    /// # Errors
    ///
    /// When it cannot be waited for.
    pub fn wait(mut self) -> Result<Finished> {
        let status = self.child.wait().context("cannot wait for pgiotrace")?;
        let report = self.report.as_ref().and_then(|file| fs::read_to_string(file).ok());
        let text = |reader: Option<JoinHandle<String>>| {
            reader.and_then(|reader| reader.join().ok()).unwrap_or_default()
        };
        Ok(Finished { status, stdout: text(self.stdout.take()), stderr: text(self.stderr.take()), report })
    }
}

/// A test that fails leaves no tracer behind.
impl Drop for Running {
    fn drop(&mut self) {
        // It has ended, unless a test failed before it waited for it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a run of the tracer left.
#[derive(Debug)]
pub struct Finished {
    /// How it ended.
    pub status: ExitStatus,
    /// What it, and a traced command, wrote to stdout.
    pub stdout: String,
    /// What it, and a traced command, wrote to stderr.
    pub stderr: String,
    report: Option<String>,
}

impl Finished {
    /// The exit code; 128 plus the signal's number for a process that was killed.
    #[must_use]
    pub fn code(&self) -> i32 {
        use std::os::unix::process::ExitStatusExt as _;
        self.status.code().or_else(|| self.status.signal().map(|signal| 128 + signal)).unwrap_or(-1)
    }

    /// The JSON report: the file's where one was asked for, else what is on stdout.
    ///
    /// # Errors
    ///
    /// When it is no JSON; the error has what the tracer said instead.
    pub fn report(&self) -> Result<Value> {
        let text = self.report.as_deref().unwrap_or(&self.stdout);
        serde_json::from_str(text).with_context(|| {
            format!("pgiotrace ({}) wrote no JSON report, but said: {}", self.status, self.stderr.trim())
        })
    }
}
