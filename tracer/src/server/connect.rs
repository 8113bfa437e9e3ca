//! Connecting to the server that is traced.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use postgres::config::{ChannelBinding, SslMode, SslNegotiation};
use postgres::error::SqlState;
use postgres::{Client, Config, NoTls};
use rustix::fs::{Mode, OFlags};
use rustix::process::Uid;
use tokio_postgres_rustls::MakeRustlsConnect;

use super::discover::{Selection, Server, is_this_machine};
use super::own_sessions::OwnSessions;
use super::parameters::{ParameterError, Parameters};
use super::service::{self, ServiceError};
use super::tls::{self, Encryption, Tls, TlsError};
use super::{InnerPid, passwd, pgpass};

/// How the server knows the tracer's sessions.
pub const APPLICATION_NAME: &str = "pgiotrace";

/// How it knows a session that runs the user's query.
pub const QUERIES_APPLICATION_NAME: &str = "pgiotrace explain";

/// How long a connection may take to come up, unless `PGCONNECT_TIMEOUT` or the connection string says
/// otherwise.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// For each session. The search path is empty so that no object of a user is ever called, as pg_dump does it;
/// a sampler needs neither workers nor compiled expressions, and must not wait for anybody.
const SESSION_SETTINGS: &str = "SET search_path = ''; SET default_transaction_read_only = on; \
    SET statement_timeout = '10s'; SET lock_timeout = '2s'; SET jit = off; \
    SET max_parallel_workers_per_gather = 0";

/// Whose statements a session runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Purpose {
    /// The tracer's own.
    #[default]
    Tracer,
    /// The user's.
    Queries,
}

impl Purpose {
    fn application_name(self) -> &'static str {
        match self {
            Self::Tracer => APPLICATION_NAME,
            Self::Queries => QUERIES_APPLICATION_NAME,
        }
    }

    /// What is set first. A user's session is as the server, the role and the user set it.
    fn settings(self) -> &'static str {
        match self {
            Self::Tracer => SESSION_SETTINGS,
            Self::Queries => "",
        }
    }
}

/// How to connect, as psql's options `-h -p -U -d`; `None` is the default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConnectOptions {
    /// A directory of Unix sockets, a name or an address.
    pub host: Option<String>,
    /// TCP port, or that of the socket.
    pub port: Option<u16>,
    /// Role.
    pub user: Option<String>,
    /// Database, or a connection string: `postgresql://…` or `key=value …`.
    pub dbname: Option<String>,
}

/// Why there is no connection. No message ever holds a password.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// `-d` holds a connection string that does not parse.
    #[error(
        "the connection string given with -d is not valid{detail}; write \
         postgresql://USER@HOST:PORT/DATABASE or key=value pairs"
    )]
    ConnectionString {
        /// What is wrong, with a colon before it; empty when telling could give a password away.
        detail: String,
    },
    /// A variable of the environment or a parameter's value.
    #[error(
        "the connection's parameters are not valid: {0}; mend the connection string, the service or the variable"
    )]
    Parameter(#[from] ParameterError),
    /// The service that `service=` or `PGSERVICE` names.
    #[error(transparent)]
    Service(#[from] ServiceError),
    /// How to encrypt.
    #[error(transparent)]
    TlsSettings(#[from] TlsError),
    /// Encrypting failed.
    #[error("connecting to the server at {address} with TLS failed: {problem}")]
    Tls {
        /// The host and port.
        address: String,
        /// What is wrong and what to do.
        problem: String,
    },
    /// Nobody listens, or the way there is barred.
    #[error("connecting to the server at {address} failed: {detail}; is it accepting connections there?")]
    Unreachable {
        /// The socket or host and port.
        address: String,
        /// What the system said.
        detail: String,
    },
    /// No answer in time.
    #[error(
        "the server at {address} did not answer within {} s; PGCONNECT_TIMEOUT allows more",
        .timeout.as_secs()
    )]
    Timeout {
        /// The socket or host and port.
        address: String,
        /// How long was waited.
        timeout: Duration,
    },
    /// The server asks for a password and none is known.
    #[error(
        "the server at {address} wants a password for role \"{user}\" and none is set; set PGPASSWORD or \
         write it to ~/.pgpass"
    )]
    PasswordMissing {
        /// The socket or host and port.
        address: String,
        /// The role.
        user: String,
    },
    /// The password is wrong.
    #[error("the server at {address} refused the password of role \"{user}\"; mend PGPASSWORD or ~/.pgpass")]
    Password {
        /// The socket or host and port.
        address: String,
        /// The role.
        user: String,
    },
    /// The server refuses the connection for another reason.
    #[error(
        "the server at {address} refused role \"{user}\" on database \"{database}\": {message}{}",
        hint(.code)
    )]
    Refused {
        /// The socket or host and port.
        address: String,
        /// The role.
        user: String,
        /// The database.
        database: String,
        /// What the server said.
        message: String,
        /// Its SQLSTATE.
        code: SqlState,
    },
    /// Another server answered.
    #[error(
        "the server that answers at {address} is not the one to trace (PID {postmaster}); give -h and -p of \
         that one"
    )]
    OtherServer {
        /// The socket or host and port.
        address: String,
        /// The postmaster of the server to trace.
        postmaster: super::Pid,
    },
    /// The session could not be set up.
    #[error("setting up the session at {address} failed: {detail}")]
    SetUp {
        /// The socket or host and port.
        address: String,
        /// What the server said.
        detail: String,
    },
    /// The system gave no thread or descriptor.
    #[error("preparing to connect to {address} failed: {source}")]
    System {
        /// The socket or host and port.
        address: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

fn hint(code: &SqlState) -> &'static str {
    if *code == SqlState::INVALID_AUTHORIZATION_SPECIFICATION {
        "; choose a role with -U that pg_hba.conf lets in"
    } else if *code == SqlState::INVALID_CATALOG_NAME {
        "; choose a database with -d"
    } else {
        ""
    }
}

impl ConnectError {
    /// Whether trying again later may help: the server is starting, restarting, away or full.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Timeout { .. } | Self::SetUp { .. } | Self::System { .. } => {
                true
            }
            // Class 57 is "operator intervention", 53 "insufficient resources".
            Self::Refused { code, .. } => ["57", "53"].iter().any(|class| code.code().starts_with(class)),
            Self::ConnectionString { .. }
            | Self::Parameter(_)
            | Self::Service(_)
            | Self::TlsSettings(_)
            | Self::Tls { .. }
            | Self::PasswordMissing { .. }
            | Self::Password { .. }
            | Self::OtherServer { .. } => false,
        }
    }
}

impl ConnectError {
    /// Whether another `sslmode` may do better: the handshake failed, or `pg_hba.conf` lets nobody in this way.
    fn may_depend_on_encryption(&self) -> bool {
        match self {
            Self::Tls { .. } | Self::TlsSettings(_) | Self::Password { .. } => true,
            // Class 28 is "invalid authorization specification".
            Self::Refused { code, .. } => code.code().starts_with("28"),
            _ => false,
        }
    }
}

/// What the environment says, so that tests can say something else.
type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

fn environment(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

impl ConnectOptions {
    /// The server that these options mean. `PGHOST` and `PGPORT` count only where neither `-D` nor an option
    /// chooses.
    ///
    /// # Errors
    ///
    /// [`ConnectError::ConnectionString`].
    pub fn selection(&self, data_directory: Option<PathBuf>) -> Result<Selection, ConnectError> {
        self.selection_in(data_directory, &environment)
    }

    fn selection_in(
        &self,
        data_directory: Option<PathBuf>,
        environment: Environment,
    ) -> Result<Selection, ConnectError> {
        let sources = Sources::of(self, environment)?;
        let is_open = data_directory.is_none();
        // Beside -D, a connection string may lead to the server by another port, that of a pooler.
        let string_port = sources.string.port()?.filter(|_| is_open);
        let service_port = sources.service.port()?.filter(|_| is_open);
        let fallback = |name: &str| environment(name).filter(|_| is_open);
        let service_host = first_host(&sources.service).filter(|_| is_open || sources.is_service_named);
        Ok(Selection {
            port: string_port.or(self.port).or(service_port).or_else(|| fallback("PGPORT")?.parse().ok()),
            host: first_host(&sources.string)
                .or_else(|| self.host.clone())
                .or(service_host)
                .or_else(|| fallback("PGHOST")),
            data_directory,
        })
    }

    /// The connection string in `-d`, if it is one.
    fn connection_string(&self) -> Result<Option<Parameters>, ConnectError> {
        let Some(text) = &self.dbname else { return Ok(None) };
        let parse = || {
            let string = Parameters::of_connection_string(text)?;
            string.as_ref().map_or(Ok(None), Parameters::port)?;
            Ok(string)
        };
        parse().map_err(|error: ParameterError| {
            let may_hold_password = text.contains('@') || text.contains("password");
            let detail = if may_hold_password { String::new() } else { format!(" ({error})") };
            ConnectError::ConnectionString { detail }
        })
    }
}

/// The first host of some parameters, as `-h` would give it; an address is better than a name that may have others.
fn first_host(parameters: &Parameters) -> Option<String> {
    parameters.first("hostaddr").or_else(|| parameters.first("host")).map(str::to_owned)
}

/// Where parameters come from, beside options.
struct Sources {
    /// Empty without a connection string.
    string: Parameters,
    is_string: bool,
    /// Empty without a service.
    service: Parameters,
    /// Whether the connection string names the service, and not the environment: then its host and port count like those of
    /// an option.
    is_service_named: bool,
    environment: Parameters,
}

impl Sources {
    fn of(options: &ConnectOptions, environment: Environment) -> Result<Self, ConnectError> {
        let string = options.connection_string()?;
        let is_string = string.is_some();
        let string = string.unwrap_or_default();
        let variables = Parameters::of_environment(environment)?;
        let named = string.get("service");
        let service = match named.or_else(|| variables.get("service")) {
            None => Parameters::default(),
            Some(service) => {
                let file = string.get("servicefile").or_else(|| variables.get("servicefile"));
                service::Files::find(file, environment).service(service)?
            }
        };
        Ok(Self { is_service_named: named.is_some(), string, is_string, service, environment: variables })
    }
}

/// All that is settled before the first attempt.
#[derive(Clone)]
struct Settings {
    /// Of `-h`, a connection string, a service or `PGHOST`.
    host: Option<String>,
    /// Address of that host, where it is given too.
    hostaddr: Option<IpAddr>,
    port: u16,
    user: String,
    database: Option<String>,
    password: Option<Vec<u8>>,
    /// The password file.
    passfile: Option<PathBuf>,
    timeout: Duration,
    /// `options`: settings of the session.
    options: Option<String>,
    tls: Tls,
    channel_binding: ChannelBinding,
}

impl Settings {
    /// Precedence as in psql: a connection string, then options, then a service, then the environment, then defaults.
    fn resolve(
        options: &ConnectOptions,
        server_port: u16,
        default_user: &str,
        environment: Environment,
    ) -> Result<Self, ConnectError> {
        let sources = Sources::of(options, environment)?;
        let Sources { string, is_string, service, is_service_named, environment: variables } = sources;
        // Who has PGHOST set for a remote server, and traces a local one, means the local one.
        let is_meant = |host: &String| host.starts_with('/') || is_this_machine(host);
        let named_service = if is_service_named { service.clone() } else { Parameters::default() };
        let host = string
            .first("host")
            .map(str::to_owned)
            .or_else(|| first_host(&string))
            .or_else(|| options.host.clone())
            .or_else(|| named_service.first("host").map(str::to_owned))
            .or_else(|| first_host(&named_service))
            .or_else(|| first_host(&service).filter(is_meant))
            .or_else(|| environment("PGHOST").filter(is_meant));
        // PGPORT is of no use here, nor is that of PGSERVICE: the server was found, so its port is known.
        let port = string.port()?.or(options.port).or(named_service.port()?).unwrap_or(server_port);
        let hostaddr = hostaddr_of(if string.get("host").is_some() { &string } else { &named_service })?;

        let mut all = string;
        for (name, value) in [("user", &options.user), ("dbname", &options.dbname)] {
            let is_plain = name != "dbname" || !is_string;
            if let Some(value) = value.as_ref().filter(|_| is_plain && all.get(name).is_none()) {
                all.set(name, value.clone())?;
            }
        }
        all.complete_with(&service);
        all.complete_with(&variables);
        let home = environment("HOME").map(PathBuf::from);
        let default_passfile = || home.as_ref().map(|home| home.join(".pgpass"));
        Ok(Self {
            host,
            hostaddr,
            port,
            user: all.get("user").unwrap_or(default_user).to_owned(),
            database: all.get("dbname").map(str::to_owned),
            password: all.get("password").map(|password| password.as_bytes().to_vec()),
            passfile: all.get("passfile").map(PathBuf::from).or_else(default_passfile),
            timeout: timeout_of(&all)?,
            options: all.get("options").map(str::to_owned),
            tls: Tls::of(&all, home.as_deref()).map_err(|refusal| match refusal {
                tls::Refusal::Value(error) => ConnectError::Parameter(error),
                tls::Refusal::Tls(error) => ConnectError::TlsSettings(error),
            })?,
            channel_binding: channel_binding_of(&all)?,
        })
    }

    /// Databases to try when nobody asks for a certain one.
    fn databases(&self) -> Vec<String> {
        match &self.database {
            Some(database) => vec![database.clone()],
            None => vec!["postgres".to_owned(), self.user.clone()],
        }
    }
}

fn hostaddr_of(parameters: &Parameters) -> Result<Option<IpAddr>, ParameterError> {
    let Some(text) = parameters.first("hostaddr") else { return Ok(None) };
    text.parse().map(Some).map_err(|_| ParameterError::Value {
        parameter: "hostaddr",
        value: text.to_owned(),
        allowed: "an IP address",
    })
}

/// Zero and less is libpq's "without limit"; a tracer has one.
fn timeout_of(parameters: &Parameters) -> Result<Duration, ParameterError> {
    let Some(text) = parameters.get("connect_timeout") else { return Ok(CONNECT_TIMEOUT) };
    let seconds: i32 = text.trim().parse().map_err(|_| ParameterError::Value {
        parameter: "connect_timeout",
        value: text.to_owned(),
        allowed: "a number of seconds",
    })?;
    let seconds = u64::try_from(seconds).ok().filter(|seconds| *seconds > 0);
    Ok(seconds.map_or(CONNECT_TIMEOUT, Duration::from_secs))
}

/// Also refuses `gssencmode=require`, which asks for another kind of encryption.
fn channel_binding_of(parameters: &Parameters) -> Result<ChannelBinding, ParameterError> {
    if let Some(value @ "require") = parameters.get("gssencmode") {
        let allowed = "disable or prefer, since GSSAPI is not supported";
        return Err(ParameterError::Value { parameter: "gssencmode", value: value.to_owned(), allowed });
    }
    match parameters.get("channel_binding") {
        None | Some("prefer") => Ok(ChannelBinding::Prefer),
        Some("disable") => Ok(ChannelBinding::Disable),
        Some("require") => Ok(ChannelBinding::Require),
        Some(value) => Err(ParameterError::Value {
            parameter: "channel_binding",
            value: value.to_owned(),
            allowed: "disable, prefer or require",
        }),
    }
}

/// A way to the server.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Route {
    /// A Unix socket.
    Socket {
        /// Its directory, as the server sees it: for messages and the password file.
        directory: PathBuf,
        /// Where the tracer may reach it; the first that it can open counts.
        reached_at: Vec<PathBuf>,
    },
    /// A name or an address.
    Tcp(String),
}

impl Route {
    fn address(&self, port: u16) -> String {
        match self {
            Self::Socket { directory, .. } => {
                directory.join(format!(".s.PGSQL.{port}")).display().to_string()
            }
            Self::Tcp(host) if host.contains(':') => format!("[{host}]:{port}"),
            Self::Tcp(host) => format!("{host}:{port}"),
        }
    }

    /// What libpq calls the route, if it leads anywhere.
    fn reachable_host(&self, port: u16) -> Option<OsString> {
        match self {
            Self::Tcp(host) => Some(host.into()),
            Self::Socket { reached_at, .. } => reached_at
                .iter()
                // A socket's path must fit into sockaddr_un, which those through /proc may not.
                .rev()
                .find(|directory| directory.join(format!(".s.PGSQL.{port}")).exists())
                .map(|directory| directory.clone().into_os_string()),
        }
    }

    /// What the password file may call the host (`fe-connect.c`: the default socket is "localhost").
    fn names(&self) -> Vec<String> {
        match self {
            Self::Socket { directory, .. } => vec!["localhost".to_owned(), directory.display().to_string()],
            Self::Tcp(host) => vec![host.clone()],
        }
    }
}

/// The ways to a server, best first.
fn routes(server: &Server, host: Option<&str>) -> Vec<Route> {
    let socket = |directory: &Path| Route::Socket {
        directory: directory.to_path_buf(),
        reached_at: vec![server.host_path(directory), directory.to_path_buf()],
    };
    match host {
        // A directory given by a person is first of all one of the tracer's own system.
        Some(directory) if directory.starts_with('/') => {
            let given = PathBuf::from(directory);
            let inside = server.host_path(&given);
            vec![Route::Socket { directory: given.clone(), reached_at: vec![given, inside] }]
        }
        Some(host) => vec![Route::Tcp(host.to_owned())],
        None => {
            // An abstract socket, "@…", is out of the library's reach.
            let directory = server.socket_directory.as_deref().filter(|directory| directory.is_absolute());
            let address = server.listen_address.as_deref().map(reachable_address);
            directory.map(socket).into_iter().chain(address.map(Route::Tcp)).collect()
        }
    }
}

/// Where a server that listens on an address is reached from its own machine.
fn reachable_address(listen_address: &str) -> String {
    match listen_address {
        // localhost need not resolve everywhere.
        "*" | "0.0.0.0" | "localhost" => "127.0.0.1".to_owned(),
        "::" => "::1".to_owned(),
        address => address.to_owned(),
    }
}

/// Environment variables by name.
pub type CommandEnvironment = Vec<(&'static str, OsString)>;

/// Connects to one server, as often as needed.
#[derive(Clone)]
pub struct Connector {
    server: Server,
    settings: Settings,
    routes: Vec<Route>,
    /// The postmaster's owner, where the tracer may and should take that user's place for peer
    /// authentication.
    peer_uid: Option<u32>,
    pgpass: Option<String>,
    warnings: Vec<String>,
    own: OwnSessions,
    purpose: Purpose,
}

impl Connector {
    /// Settles how to connect, by the options, the `PG…` variables, the password file and the server.
    ///
    /// # Errors
    ///
    /// A [`ConnectError`] of the parameters; nothing is connected yet.
    pub fn new(server: &Server, options: &ConnectOptions) -> Result<Self, ConnectError> {
        let uid = rustix::process::geteuid().as_raw();
        let is_root = uid == 0;
        let owner = passwd::owner_name(server);
        // What `sudo -u postgres psql` gives: root may be any user, and has no role of its own as a rule.
        let default_user = if is_root { owner.clone() } else { passwd::own_name(uid) };
        let default_user = default_user.unwrap_or_else(|| "postgres".to_owned());
        let settings = Settings::resolve(options, server.port, &default_user, &environment)?;
        let is_owner = is_root && server.uid != 0 && owner.as_ref() == Some(&settings.user);
        let read = settings.passfile.as_deref().map_or(Ok(None), pgpass::read);
        let (pgpass, warning) = match read {
            Ok(text) => (text, None),
            Err(warning) => (None, Some(warning)),
        };
        Ok(Self {
            routes: routes(server, settings.host.as_deref()),
            server: server.clone(),
            settings,
            peer_uid: is_owner.then_some(server.uid),
            pgpass,
            warnings: warning.into_iter().collect(),
            own: OwnSessions::default(),
            purpose: Purpose::Tracer,
        })
    }

    /// The sessions that were opened, by this and by its clones.
    #[must_use]
    pub fn own_sessions(&self) -> &OwnSessions {
        &self.own
    }

    /// The same for sessions that run the user's queries: with nothing set but what the user sets (`PGOPTIONS`, or
    /// `options` in a connection string), and not among the tracer's own.
    #[must_use]
    pub fn for_queries(self) -> Self {
        Self { purpose: Purpose::Queries, own: OwnSessions::default(), ..self }
    }

    /// Variables that lead libpq's programs to the same server, for those that the user has not set: a command that is
    /// traced must not talk to another server by accident.
    #[must_use]
    pub fn environment(&self) -> CommandEnvironment {
        let host = self.routes.iter().find_map(|route| route.reachable_host(self.server.port));
        let variables = [
            ("PGHOST", host),
            ("PGPORT", Some(self.server.port.to_string().into())),
            ("PGUSER", Some(self.settings.user.clone().into())),
        ];
        let is_unset = |(name, _): &(&str, _)| env::var_os(name).is_none();
        variables.into_iter().filter(is_unset).filter_map(|(name, value)| Some((name, value?))).collect()
    }

    /// What the user should know, each in one sentence: a password file that is ignored.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The role that is connected as.
    #[must_use]
    pub fn user(&self) -> &str {
        &self.settings.user
    }

    /// The server that is connected to.
    #[must_use]
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Opens a session on a database, or on the default one, that can only read.
    ///
    /// The client must not be used or dropped on a thread that runs an async runtime.
    ///
    /// # Errors
    ///
    /// A [`ConnectError`] for the last way that was tried.
    pub fn connect(&self, database: Option<&str>) -> Result<Client, ConnectError> {
        let databases = database.map_or_else(|| self.settings.databases(), |name| vec![name.to_owned()]);
        let mut result = Err(ConnectError::Unreachable {
            address: format!("port {}", self.settings.port),
            detail: "it listens neither on a Unix socket nor on an address".to_owned(),
        });
        for database in &databases {
            for route in &self.routes {
                result = self.connect_by(route, database);
                match result {
                    // The socket may be out of reach (another mount namespace, no rights) and TCP not.
                    Err(ConnectError::Unreachable { .. }) => {}
                    _ => break,
                }
            }
            match &result {
                Err(ConnectError::Refused { code, .. }) if *code == SqlState::INVALID_CATALOG_NAME => {}
                _ => break,
            }
        }
        result
    }

    /// Tries what `sslmode` allows.
    fn connect_by(&self, route: &Route, database: &str) -> Result<Client, ConnectError> {
        let (first, second) = match route {
            // As libpq: nobody listens in on a Unix socket.
            Route::Socket { .. } => (Encryption::Plain, None),
            Route::Tcp(_) => self.settings.tls.attempts(),
        };
        let (error, second) = match (self.connect_with(first, route, database), second) {
            (Err(error), Some(second)) if error.may_depend_on_encryption() => (error, second),
            (outcome, _) => return outcome,
        };
        self.connect_with(second, route, database).map_err(|other| {
            let is_refusal = |error: &ConnectError| matches!(error, ConnectError::Refused { .. });
            // That pg_hba.conf lets nobody in this way says less than what is wrong with the other way, and of two such
            // refusals the one with encryption says more.
            if is_refusal(&error) && (first == Encryption::Plain || !is_refusal(&other)) {
                other
            } else {
                error
            }
        })
    }

    fn connect_with(
        &self,
        encryption: Encryption,
        route: &Route,
        database: &str,
    ) -> Result<Client, ConnectError> {
        let Settings { port, ref user, timeout, ref tls, .. } = self.settings;
        let address = route.address(port);
        let _attempt = self.own.attempt();
        let mut config = Config::new();
        config.port(port).user(user).dbname(database).application_name(self.purpose.application_name());
        config.connect_timeout(timeout).channel_binding(self.settings.channel_binding);
        config.ssl_mode(match encryption {
            Encryption::Plain => SslMode::Disable,
            Encryption::Offered => SslMode::Prefer,
            Encryption::Tls => SslMode::Require,
        });
        if encryption == Encryption::Tls && tls.is_direct {
            config.ssl_negotiation(SslNegotiation::Direct);
        }
        if let Some(options) = &self.settings.options {
            config.options(options);
        }
        if let Some(password) = self.password(route, database) {
            config.password(password);
        }
        let connector = if encryption == Encryption::Plain { None } else { Some(tls.connector()?) };
        let directory = match route {
            Route::Tcp(host) => {
                config.host(host);
                self.settings.hostaddr.map(|address| config.hostaddr(address));
                None
            }
            Route::Socket { reached_at, .. } => {
                let directory = open_directory(reached_at).map_err(|error| ConnectError::Unreachable {
                    address: address.clone(),
                    detail: error.to_string(),
                })?;
                config.host_path(format!("/proc/self/fd/{}", directory.as_raw_fd()));
                Some(directory)
            }
        };
        let peer_uid = self.peer_uid.filter(|_| directory.is_some());
        let mut client = attempt(config, connector, directory, peer_uid, timeout)
            .map_err(|failure| self.explain(failure, address.clone(), database))?;
        self.set_up(&mut client, address)?;
        Ok(client)
    }

    fn password(&self, route: &Route, database: &str) -> Option<Vec<u8>> {
        let from_file = || {
            let wanted = pgpass::Wanted {
                hosts: &route.names(),
                port: self.settings.port,
                database,
                user: &self.settings.user,
            };
            pgpass::find(self.pgpass.as_deref()?, &wanted).map(String::into_bytes)
        };
        self.settings.password.clone().or_else(from_file)
    }

    fn explain(&self, failure: Failure, address: String, database: &str) -> ConnectError {
        let user = self.settings.user.clone();
        let error = match failure {
            Failure::System(source) => return ConnectError::System { address, source },
            Failure::Timeout => return ConnectError::Timeout { address, timeout: self.settings.timeout },
            Failure::Postgres(error) => error,
        };
        if let Some(refusal) = error.as_db_error() {
            return match refusal.code() {
                code if *code == SqlState::INVALID_PASSWORD => ConnectError::Password { address, user },
                code => ConnectError::Refused {
                    address,
                    user,
                    database: database.to_owned(),
                    message: refusal.message().to_owned(),
                    code: code.clone(),
                },
            };
        }
        if let Some(problem) = self.settings.tls.problem(&error) {
            return ConnectError::Tls { address, problem };
        }
        match innermost(&error).as_str() {
            // The library has no other name for it (tokio-postgres, connect_raw.rs).
            "password missing" => ConnectError::PasswordMissing { address, user },
            "connection timed out" => ConnectError::Timeout { address, timeout: self.settings.timeout },
            detail => ConnectError::Unreachable { address, detail: detail.to_owned() },
        }
    }

    /// Makes sure that this is the server to trace, and that the session can do no harm.
    fn set_up(&self, client: &mut Client, address: String) -> Result<(), ConnectError> {
        let outcome = client.batch_execute(self.purpose.settings()).and_then(|()| backend_pid(client));
        let inner_pid = match outcome {
            Ok(inner_pid) => inner_pid,
            Err(error) => return Err(ConnectError::SetUp { address, detail: innermost(&error) }),
        };
        // For one language in pg_aios.target_desc, which the parser does not need; only a superuser may.
        if self.purpose == Purpose::Tracer {
            let _ = client.batch_execute("SET lc_messages = 'C'");
        }
        let Some(pid) = self.server.child(inner_pid) else {
            return Err(ConnectError::OtherServer { address, postmaster: self.server.postmaster });
        };
        self.own.add(inner_pid, pid);
        Ok(())
    }
}

/// The process that serves a session.
fn backend_pid(client: &mut Client) -> Result<InnerPid, postgres::Error> {
    let pid: i32 = client.query_one("SELECT pg_catalog.pg_backend_pid()", &[])?.try_get(0)?;
    Ok(InnerPid(pid.unsigned_abs()))
}

/// Opens the first of some directories that can be opened.
///
/// A socket is then named through `/proc/self/fd`, because the path through `/proc/PID/root` may be longer
/// than the 107 bytes that a socket's address holds, and because only root may follow it and the thread that
/// connects is not root.
fn open_directory(candidates: &[PathBuf]) -> io::Result<OwnedFd> {
    let mut result = Err(io::Error::from(io::ErrorKind::NotFound));
    for path in candidates {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        result = rustix::fs::open(path, flags, Mode::empty()).map_err(io::Error::from);
        if result.is_ok() {
            break;
        }
    }
    result
}

enum Failure {
    Postgres(postgres::Error),
    Timeout,
    System(io::Error),
}

/// Connects on a thread of its own.
///
/// *Why a thread*: peer authentication looks at the effective user of whoever calls `connect(2)`, and on
/// Linux that is the
/// thread's. So this thread, and no other, takes the place of the server's owner, and never has to become
/// root again: it ends. It also bounds the whole handshake, where the library bounds only `connect(2)`; a
/// thread that a stopped server keeps waiting ends with it.
fn attempt(
    config: Config,
    connector: Option<MakeRustlsConnect>,
    directory: Option<OwnedFd>,
    peer_uid: Option<u32>,
    timeout: Duration,
) -> Result<Client, Failure> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let work = move || {
        // Open until the attempt is over.
        let _directory = directory.map(File::from);
        let become_peer = |uid| {
            let uid = Uid::from_raw(uid);
            rustix::thread::set_thread_res_uid(None::<Uid>, Some(uid), None::<Uid>)
        };
        let outcome = match peer_uid.map_or(Ok(()), become_peer) {
            Ok(()) => match connector {
                Some(connector) => config.connect(connector),
                None => config.connect(NoTls),
            }
            .map_err(Failure::Postgres),
            Err(errno) => Err(Failure::System(errno.into())),
        };
        // Nobody waits any more: the time was up.
        let _ = sender.send(outcome);
    };
    thread::Builder::new().name("pg-connect".to_owned()).spawn(work).map_err(Failure::System)?;
    receiver.recv_timeout(timeout).unwrap_or(Err(Failure::Timeout))
}

/// The message of the cause at the bottom: the library's own say little.
pub(crate) fn innermost(error: &postgres::Error) -> String {
    if let Some(refusal) = error.as_db_error() {
        return refusal.message().to_owned();
    }
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(_: &str) -> Option<String> {
        None
    }

    fn everything(name: &str) -> Option<String> {
        let value = match name {
            "PGHOST" => "/env/sockets",
            "PGPORT" => "1111",
            "PGUSER" => "env_user",
            "PGDATABASE" => "env_database",
            "PGPASSWORD" => "env_password",
            "PGCONNECT_TIMEOUT" => "9",
            _ => return None,
        };
        Some(value.to_owned())
    }

    fn with_dbname(dbname: &str) -> ConnectOptions {
        ConnectOptions { dbname: Some(dbname.to_owned()), ..ConnectOptions::default() }
    }

    #[test]
    fn defaults_come_from_the_server() {
        let settings = Settings::resolve(&ConnectOptions::default(), 5433, "postgres", &nothing);
        let settings = settings.expect("no connection string");
        assert_eq!((settings.port, settings.user.as_str(), settings.host.as_ref()), (5433, "postgres", None));
        assert_eq!(settings.databases(), ["postgres", "postgres"]);
        assert_eq!((settings.password.as_ref(), settings.timeout), (None, CONNECT_TIMEOUT));
    }

    #[test]
    fn the_environment_beats_the_defaults() {
        let settings = Settings::resolve(&ConnectOptions::default(), 5433, "postgres", &everything);
        let settings = settings.expect("no connection string");
        assert_eq!((settings.port, settings.user.as_str()), (5433, "env_user"));
        assert_eq!(settings.host.as_deref(), Some("/env/sockets"));
        assert_eq!(settings.databases(), ["env_database"]);
        assert_eq!(settings.password.as_deref(), Some(&b"env_password"[..]));
        assert_eq!(settings.timeout, Duration::from_secs(9));
    }

    #[test]
    fn options_beat_the_environment() {
        let options = ConnectOptions {
            host: Some("localhost".to_owned()),
            port: Some(5433),
            user: Some("alice".to_owned()),
            dbname: Some("shop".to_owned()),
        };
        let settings =
            Settings::resolve(&options, 5433, "postgres", &everything).expect("no connection string");
        assert_eq!((settings.user.as_str(), settings.host.as_deref()), ("alice", Some("localhost")));
        assert_eq!(settings.databases(), ["shop"]);
    }

    #[test]
    fn a_connection_string_beats_options() {
        for text in [
            "postgresql://bob:secret@localhost:6432/books?connect_timeout=3",
            "host=localhost port=6432 user=bob password=secret dbname=books connect_timeout=3",
        ] {
            let options = ConnectOptions { user: Some("alice".to_owned()), ..with_dbname(text) };
            let settings = Settings::resolve(&options, 5433, "postgres", &everything).expect("it is valid");
            assert_eq!((settings.user.as_str(), settings.port), ("bob", 6432), "{text}");
            assert_eq!(settings.host.as_deref(), Some("localhost"));
            assert_eq!(settings.databases(), ["books"]);
            assert_eq!(settings.password.as_deref(), Some(&b"secret"[..]));
            assert_eq!(settings.timeout, Duration::from_secs(3));
        }
    }

    #[test]
    fn a_remote_pghost_is_not_meant() {
        let remote = |name: &str| (name == "PGHOST").then(|| "192.0.2.1".to_owned());
        let settings = Settings::resolve(&ConnectOptions::default(), 5432, "postgres", &remote);
        assert_eq!(settings.expect("no connection string").host, None);
    }

    #[test]
    fn a_broken_connection_string_keeps_the_password() {
        for text in [
            "postgresql://bob:secret@localhost:port/books",
            "password=secret nonsense=x",
            "postgresql://bob:x@secret:secret@localhost/books",
            "password=a secret=b",
        ] {
            let error = with_dbname(text).selection_in(None, &nothing).expect_err("it is broken");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
        let error = with_dbname("nonsense=x").selection_in(None, &nothing).expect_err("an unknown key");
        assert!(error.to_string().contains("no parameter \"nonsense\""), "{error}");
    }

    #[test]
    fn options_choose_the_server() {
        let options = with_dbname("postgresql:///books?host=/run/postgresql&port=5434");
        let selection = options.selection_in(None, &everything).expect("it is valid");
        assert_eq!((selection.host.as_deref(), selection.port), (Some("/run/postgresql"), Some(5434)));
        let selection = ConnectOptions::default().selection_in(None, &everything).expect("nothing to parse");
        assert_eq!((selection.host.as_deref(), selection.port), (Some("/env/sockets"), Some(1111)));
        let selection = ConnectOptions::default().selection_in(Some("/data".into()), &everything);
        let selection = selection.expect("nothing to parse");
        assert_eq!((selection.host, selection.port), (None, None), "-D has chosen");
    }

    #[test]
    fn a_service_stands_between_options_and_the_environment() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let file = folder.path().join("services");
        let text = "[shop]\nhost=127.0.0.1\nport=6432\nuser=carol\ndbname=shop\npassword=of_service\nsslmode=disable\n\
            [remote]\nhost=192.0.2.1\nport=6432\n";
        std::fs::write(&file, text).expect("a file");
        let file = file.display().to_string();
        let with = |service: &'static str| {
            let file = file.clone();
            move |name: &str| match name {
                "PGSERVICE" => Some(service.to_owned()).filter(|name| !name.is_empty()),
                "PGSERVICEFILE" => Some(file.clone()),
                name => everything(name),
            }
        };
        let resolve = |options: &ConnectOptions, environment: Environment| {
            Settings::resolve(options, 5433, "postgres", environment)
        };
        let settings = resolve(&ConnectOptions::default(), &with("shop")).expect("it is defined");
        assert_eq!(
            (settings.user.as_str(), settings.port),
            ("carol", 5433),
            "the server was found by its port"
        );
        assert_eq!(settings.host.as_deref(), Some("127.0.0.1"));
        assert_eq!(settings.databases(), ["shop"]);
        assert_eq!(settings.password.as_deref(), Some(&b"of_service"[..]));
        assert_eq!(settings.timeout, Duration::from_secs(9), "the environment's");

        let options =
            ConnectOptions { user: Some("alice".to_owned()), ..with_dbname("service=shop dbname=books") };
        let settings = resolve(&options, &with("")).expect("it is defined");
        assert_eq!((settings.user.as_str(), settings.port), ("alice", 6432), "the service is meant");
        assert_eq!(settings.databases(), ["books"]);
        let selection = options.selection_in(None, &with("")).expect("it is defined");
        assert_eq!((selection.host.as_deref(), selection.port), (Some("127.0.0.1"), Some(6432)));

        let settings = resolve(&ConnectOptions::default(), &with("remote")).expect("it is defined");
        assert_eq!(settings.host.as_deref(), Some("/env/sockets"), "a remote server is not meant");
        let error = resolve(&ConnectOptions::default(), &with("none")).err().expect("it is not defined");
        assert!(error.to_string().contains("the service \"none\" is not defined in"), "{error}");
    }

    #[test]
    fn an_address_beside_a_name_is_where_to_connect() {
        let options = with_dbname("host=db.example hostaddr=127.0.0.1");
        let settings = Settings::resolve(&options, 5433, "postgres", &nothing).expect("it is valid");
        assert_eq!(settings.host.as_deref(), Some("db.example"), "the name that a certificate is for");
        assert_eq!(settings.hostaddr, Some(IpAddr::from([127, 0, 0, 1])));
        let selection = options.selection_in(None, &nothing).expect("it is valid");
        assert_eq!(selection.host.as_deref(), Some("127.0.0.1"));
    }

    #[test]
    fn values_that_make_no_sense_are_said() {
        for (text, part) in [
            ("sslmode=on", "sslmode cannot be \"on\""),
            ("connect_timeout=soon", "connect_timeout"),
            ("hostaddr=localhost host=x", "hostaddr"),
            ("channel_binding=x", "channel_binding"),
            ("gssencmode=require", "GSSAPI"),
            ("port=0", "port cannot be"),
        ] {
            let error = Settings::resolve(&with_dbname(text), 5432, "postgres", &nothing).err();
            assert!(
                error.as_ref().is_some_and(|error| error.to_string().contains(part)),
                "{text}: {error:?}"
            );
        }
    }

    #[test]
    fn addresses_are_written_as_people_do() {
        assert_eq!(Route::Tcp("127.0.0.1".to_owned()).address(5432), "127.0.0.1:5432");
        assert_eq!(Route::Tcp("::1".to_owned()).address(5432), "[::1]:5432");
        let socket = Route::Socket { directory: "/tmp".into(), reached_at: Vec::new() };
        assert_eq!(socket.address(5432), "/tmp/.s.PGSQL.5432");
    }

    #[test]
    fn all_addresses_are_reached_through_one() {
        for (listen, reached) in
            [("*", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::", "::1"), ("10.0.0.1", "10.0.0.1")]
        {
            assert_eq!(reachable_address(listen), reached);
        }
    }

    #[test]
    fn only_what_may_pass_is_retried() {
        let refused = |code: SqlState| ConnectError::Refused {
            address: String::new(),
            user: String::new(),
            database: String::new(),
            message: String::new(),
            code,
        };
        assert!(refused(SqlState::CANNOT_CONNECT_NOW).is_transient());
        assert!(refused(SqlState::TOO_MANY_CONNECTIONS).is_transient());
        assert!(!refused(SqlState::INVALID_AUTHORIZATION_SPECIFICATION).is_transient());
        assert!(!ConnectError::Password { address: String::new(), user: String::new() }.is_transient());
    }
}
