//! Throw-away servers.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fmt::Write as _,
    fs::{self, File},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use postgres::{Client, Config, NoTls, error::SqlState};
use rustix::process::Signal;

use crate::{
    PgInstall, SlowDisk,
    folder::Folder,
    process::{self, spawn_from_lasting_thread, wait_timeout},
    sandbox::Sandbox,
    user::{self, Account},
};

/// The superuser of every cluster.
const SUPERUSER: &str = "postgres";
/// How long a server may take to start or to stop; generous, as CI's machines are shared.
const PATIENCE: Duration = Duration::from_mins(2);
/// Between two attempts to connect to a server that is starting.
const RETRY: Duration = Duration::from_millis(10);
/// How many times another port is tried when somebody else took the one that was free a moment ago.
const PORT_ATTEMPTS: u32 = 5;

/// How a server is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopMode {
    /// Sessions are ended, the shutdown checkpoint is written.
    Fast,
    /// As in a crash: the next start recovers.
    Immediate,
}

/// What a cluster is to be like.
#[derive(Debug, Clone)]
pub struct ClusterBuilder {
    install: PgInstall,
    settings: BTreeMap<String, String>,
    initdb_args: Vec<String>,
    password: Option<String>,
    outlives_us: bool,
    has_own_pids: bool,
    visible: Vec<PathBuf>,
}

impl ClusterBuilder {
    /// Sets `io_method`.
    #[must_use]
    pub fn io_method(self, method: &str) -> Self {
        self.setting("io_method", method)
    }

    /// Sets `shared_buffers`, in PostgreSQL's notation ("64MB").
    #[must_use]
    pub fn shared_buffers(self, size: &str) -> Self {
        self.setting("shared_buffers", size)
    }

    /// Sets any parameter of the server's configuration.
    #[must_use]
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Gives `initdb` one more argument.
    #[must_use]
    pub fn initdb_arg(mut self, arg: &str) -> Self {
        self.initdb_args.push(arg.to_owned());
        self
    }

    /// Asks everybody for a password (scram-sha-256) and gives the superuser this one; without it, all are trusted.
    #[must_use]
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self
    }

    /// Lets the server use a disk, for a tablespace in [`SlowDisk::tablespace_dir`]. The disk is to be dropped after it.
    #[must_use]
    pub fn slow_disk(mut self, disk: &SlowDisk) -> Self {
        self.visible.push(disk.shared_mounts().to_owned());
        self
    }

    /// Lets the server run on after this process, if [`Cluster::keep`] is called.
    #[must_use]
    pub fn outlives_us(mut self) -> Self {
        self.outlives_us = true;
        self
    }

    /// Runs the server in a PID namespace of its own, as in a container. Needs root, and a cluster that does not outlive
    /// us.
    #[must_use]
    pub fn own_pids(mut self) -> Self {
        self.has_own_pids = true;
        self
    }

    /// Makes the cluster and starts it; it accepts connections when this returns.
    ///
    /// # Errors
    ///
    /// When there is no room or no right to make it, or the server does not start; the error then ends with the last
    /// lines of its log.
    pub fn start(self) -> Result<Cluster> {
        let mut cluster = self.initdb()?;
        cluster.start()?;
        Ok(cluster)
    }

    /// Makes the cluster without starting it.
    ///
    /// # Errors
    ///
    /// When there is no room or no right to make it.
    pub fn initdb(self) -> Result<Cluster> {
        let account = Account::for_server()?;
        let folder = Folder::create(account)?;
        let sandbox = Sandbox::new(self.install, account, folder.path(), self.has_own_pids, self.visible)?;
        let mut command = sandbox.command("initdb")?;
        command.arg("-D").arg(folder.data()).args([
            "-U",
            SUPERUSER,
            "--no-sync",
            "--locale=C",
            "--encoding=UTF8",
        ]);
        if let Some(password) = &self.password {
            let file = folder.path().join("password");
            fs::write(&file, password).context("cannot write the superuser's password for initdb")?;
            command.arg("--auth=scram-sha-256").arg("--pwfile").arg(file);
        } else {
            command.arg("--auth=trust");
        }
        run(command.args(&self.initdb_args), "initdb")?;

        let cluster = Cluster {
            server: None,
            port: 0,
            settings: self.settings,
            password: self.password,
            outlives_us: self.outlives_us,
            sandbox,
            folder,
        };
        cluster.include_own_settings(account)?;
        Ok(cluster)
    }
}

/// A server of one's own, on `127.0.0.1` and on a socket in its own folder. Dropping it leaves nothing behind.
///
/// Its settings are PostgreSQL's defaults except: `fsync` and `autovacuum` are off (nothing but the test reads),
/// `track_io_timing` is on.
#[derive(Debug)]
pub struct Cluster {
    server: Option<Child>,
    port: u16,
    settings: BTreeMap<String, String>,
    password: Option<String>,
    outlives_us: bool,
    sandbox: Sandbox,
    // Last: its drop ends what is left, and removes all.
    folder: Folder,
}

/// A cluster that outlives this process.
#[derive(Debug)]
pub struct Kept {
    /// Its folder.
    pub folder: PathBuf,
    /// Folder of its socket, usable as a host by psql.
    pub socket_dir: PathBuf,
    /// Port on `127.0.0.1`.
    pub port: u16,
    /// PID of its postmaster.
    pub postmaster_pid: u32,
}

impl Cluster {
    /// Begins to describe a cluster.
    #[must_use]
    pub fn builder(install: PgInstall) -> ClusterBuilder {
        let settings = [("fsync", "off"), ("autovacuum", "off"), ("track_io_timing", "on")];
        ClusterBuilder {
            install,
            settings: settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            initdb_args: Vec::new(),
            password: None,
            outlives_us: false,
            has_own_pids: false,
            visible: Vec::new(),
        }
    }

    /// Starts the server; it accepts connections when this returns.
    ///
    /// # Errors
    ///
    /// When it does not start within two minutes; the error ends with the last lines of its log.
    pub fn start(&mut self) -> Result<()> {
        ensure!(self.server.is_none(), "cannot start the server: it runs already");
        for attempt in 1.. {
            self.port = free_port()?;
            self.write_settings()?;
            self.spawn()?;
            match self.await_ready() {
                Err(_) if attempt < PORT_ATTEMPTS && self.log_tail().contains("Address already in use") => {}
                other => return other,
            }
        }
        Ok(())
    }

    /// Stops the server and waits until it is gone.
    ///
    /// # Errors
    ///
    /// When it has not ended after two minutes; it is killed then.
    pub fn stop(&mut self, mode: StopMode) -> Result<()> {
        // Asked for as long as the server is known to run: what we started may only be its parent, who need not heed signals.
        let postmaster = self.postmaster_pid();
        let Some(mut server) = self.server.take() else { return Ok(()) };
        let signal = match mode {
            StopMode::Fast => Signal::INT,
            StopMode::Immediate => Signal::QUIT,
        };
        process::signal(postmaster.unwrap_or(server.id()), signal);
        if wait_timeout(&mut server, PATIENCE)?.is_none() {
            process::kill_all_in(&self.data_dir());
            server.kill().and_then(|()| server.wait()).context("cannot kill the server")?;
            bail!(
                "cannot stop the server: it had not ended {} s after {signal:?}, and was killed",
                PATIENCE.as_secs()
            );
        }
        Ok(())
    }

    /// Stops the server (fast), changes these settings, and starts it again, on another port.
    ///
    /// # Errors
    ///
    /// As [`Cluster::stop`] and [`Cluster::start`].
    pub fn restart(&mut self, settings: &[(&str, &str)]) -> Result<()> {
        self.stop(StopMode::Fast)?;
        self.settings.extend(settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        self.start()
    }

    /// A connection of the superuser's.
    ///
    /// # Errors
    ///
    /// When the server does not run or there is no such database.
    pub fn connect(&self, dbname: &str) -> Result<Client> {
        let client = self.config(dbname).connect(NoTls);
        client.with_context(|| {
            format!("cannot connect to database {dbname} of the cluster on port {}", self.port)
        })
    }

    /// `psql` as the superuser in database `postgres`, reading no start-up file; usable as `-- CMD` of the tracer.
    ///
    /// # Panics
    ///
    /// When the installation has no `psql`.
    #[must_use]
    pub fn psql_command<S: AsRef<OsStr>>(&self, args: &[S]) -> Command {
        let mut command =
            self.sandbox.command("psql").expect("the tests that use psql ask for an installation with it");
        command.args(["-X", "-v", "ON_ERROR_STOP=1"]).args(self.connection_args()).args(args);
        command
    }

    /// `pgbench` as the superuser in database `postgres`.
    ///
    /// # Errors
    ///
    /// When the installation has no `pgbench`.
    pub fn pgbench_command<S: AsRef<OsStr>>(&self, args: &[S]) -> Result<Command> {
        let mut command = self.client_command("pgbench")?;
        // pgbench's -d was --debug before PostgreSQL 16, so the database's name comes last.
        command.args(args).arg("postgres");
        Ok(command)
    }

    /// One of PostgreSQL's client programs, led to this server as the superuser.
    ///
    /// # Errors
    ///
    /// When the installation has no such program.
    pub fn client_command(&self, program: &str) -> Result<Command> {
        let mut command = self.sandbox.command(program)?;
        command.args(self.address_args());
        Ok(command)
    }

    /// Loads pgbench's tables into database `postgres`: 100,000 rows or about 13 MB per unit of scale, vacuumed.
    ///
    /// # Errors
    ///
    /// When pgbench fails.
    pub fn pgbench_init(&self, scale: u32) -> Result<()> {
        run(&mut self.pgbench_command(&["-i", "-q", "-s", &scale.to_string()])?, "pgbench")
    }

    /// PID of the postmaster on the host.
    ///
    /// # Errors
    ///
    /// When the server does not run.
    pub fn postmaster_pid(&self) -> Result<u32> {
        if self.sandbox.has_own_pids() {
            let server = self.server.as_ref().context("the server does not run")?.id();
            let children = fs::read_to_string(format!("/proc/{server}/task/{server}/children"))?;
            return children.trim().parse().context("the server's namespace has no process");
        }
        let file = self.data_dir().join("postmaster.pid");
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let pid = text.lines().next().and_then(|pid| pid.trim().parse().ok());
        pid.with_context(|| format!("cannot find the postmaster's PID in {}", file.display()))
    }

    /// The data directory, at the same path for the server and for us.
    #[must_use]
    pub fn data_dir(&self) -> PathBuf {
        self.folder.data()
    }

    /// The cluster's folder, in which its account may write: for tablespaces, scripts, reports.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Folder of the socket.
    #[must_use]
    pub fn socket_dir(&self) -> PathBuf {
        self.folder.path().to_owned()
    }

    /// The port, on `127.0.0.1` and of the socket. Another one after each start.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The installation that it runs.
    #[must_use]
    pub fn install(&self) -> &PgInstall {
        self.sandbox.install()
    }

    /// What the server has logged since it was made.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    /// Makes the next reads come from the device: writes back what is dirty, then empties the kernel's page cache. What
    /// is in `shared_buffers` stays there; only [`Cluster::restart`] empties these too.
    ///
    /// # Errors
    ///
    /// When there is no right to.
    pub fn drop_caches(&self) -> Result<()> {
        if self.server.is_some() {
            self.connect("postgres")?.batch_execute("CHECKPOINT").context("cannot write a checkpoint")?;
        }
        user::drop_caches()
    }

    /// Leaves a cluster that was built with [`ClusterBuilder::outlives_us`] running.
    ///
    /// # Errors
    ///
    /// When it does not run.
    pub fn keep(mut self) -> Result<Kept> {
        ensure!(self.outlives_us, "cannot keep a cluster that was not built to outlive this process");
        let postmaster_pid = self.postmaster_pid()?;
        self.folder.keep()?;
        // Without its handle, the drop of this value has nothing to stop.
        self.server = None;
        Ok(Kept {
            folder: self.folder().to_owned(),
            socket_dir: self.socket_dir(),
            port: self.port,
            postmaster_pid,
        })
    }

    fn config(&self, dbname: &str) -> Config {
        let mut config = Config::new();
        config.host_path(self.socket_dir()).port(self.port).user(SUPERUSER).dbname(dbname);
        if let Some(password) = &self.password {
            config.password(password);
        }
        config
    }

    fn address_args(&self) -> [String; 6] {
        ["-h", "127.0.0.1", "-p", &self.port.to_string(), "-U", SUPERUSER].map(str::to_owned)
    }

    fn connection_args(&self) -> Vec<String> {
        let mut args = self.address_args().to_vec();
        args.extend(["-d".to_owned(), "postgres".to_owned()]);
        args
    }

    fn own_settings(&self) -> PathBuf {
        self.folder.path().join("settings.conf")
    }

    /// Settings live in a file of their own, so that ALTER SYSTEM still wins and a restart can rewrite them all.
    fn include_own_settings(&self, account: Account) -> Result<()> {
        let conf = self.data_dir().join("postgresql.conf");
        let mut text = fs::read_to_string(&conf).context("cannot read the new cluster's postgresql.conf")?;
        writeln!(text, "include '{}'", self.own_settings().display())?;
        fs::write(&conf, text).context("cannot extend the new cluster's postgresql.conf")?;
        // The server opens its log before it gives up root's rights; a test may want to read both.
        for file in [self.own_settings(), self.log_file()] {
            fs::write(&file, "").context("cannot write into the cluster's folder")?;
            std::os::unix::fs::chown(&file, Some(account.uid), Some(account.gid))
                .context("cannot give a file of the cluster's to its account")?;
        }
        Ok(())
    }

    fn write_settings(&self) -> Result<()> {
        let mut text = format!(
            "listen_addresses = '127.0.0.1'\nport = {}\nunix_socket_directories = '{}'\n",
            self.port,
            self.socket_dir().display()
        );
        for (name, value) in &self.settings {
            writeln!(text, "{name} = '{}'", value.replace('\'', "''"))?;
        }
        fs::write(self.own_settings(), text).context("cannot write the cluster's settings")
    }

    fn spawn(&mut self) -> Result<()> {
        use std::os::unix::process::CommandExt as _;
        let log = File::options()
            .append(true)
            .create(true)
            .open(self.log_file())
            .context("cannot open the server's log")?;
        let mut command = if self.outlives_us {
            self.sandbox.command("postgres")?
        } else {
            self.sandbox.command_that_dies_with_us("postgres")?
        };
        command.arg("-D").arg(self.data_dir()).stdin(Stdio::null());
        command.stdout(log.try_clone().context("cannot share the server's log")?).stderr(log);
        // Ctrl-C on our terminal is for us; the server is then stopped in order.
        command.process_group(0);
        self.server = Some(spawn_from_lasting_thread(command).context("cannot start the server")?);
        Ok(())
    }

    fn await_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(server) = &mut self.server
                && let Some(status) = server.try_wait().context("cannot ask for the server's state")?
            {
                self.server = None;
                bail!("the server did not start ({status}); its log ends with:\n{}", self.log_tail());
            }
            match self.config("postgres").connect(NoTls) {
                Ok(_) => return Ok(()),
                // Not listening yet, or listening and starting up.
                Err(error) if error.code().is_none_or(|code| *code == SqlState::CANNOT_CONNECT_NOW) => {
                    thread::sleep(RETRY);
                }
                Err(error) => return Err(error).context("the server started, but refuses the superuser"),
            }
        }
        bail!(
            "the server was not ready after {} s; its log ends with:\n{}",
            PATIENCE.as_secs(),
            self.log_tail()
        )
    }

    fn log_file(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = self.stop(StopMode::Immediate) {
            eprintln!("warning: {error:#}");
        }
    }
}

/// A TCP port of `127.0.0.1` that nobody listens on at this moment.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("cannot find a free TCP port on 127.0.0.1")?;
    Ok(listener.local_addr().context("cannot ask for the free port's number")?.port())
}

/// Runs a program to its end; its output is shown only when it fails.
fn run(command: &mut Command, name: &str) -> Result<()> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {name}"))?;
    if !output.status.success() {
        bail!("{name} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
