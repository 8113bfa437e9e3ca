//! The command line: what may be written, and the validated options that it becomes.
//!
//! The `PG*` environment is read where the connection is made, as libpq does, and not here.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Write};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anstream::ColorChoice;
use clap::builder::NonEmptyStringValueParser;
use clap::error::ErrorKind;
use clap::{ArgAction, ArgGroup, Args, CommandFactory, Parser, Subcommand, ValueEnum, ValueHint};
use clap_complete::Shell;
use jiff::fmt::friendly::SpanParser;

use crate::present::{Destination, Format};
use crate::server::{InnerPid, Pid};

/// Samples of `pg_stat_activity` and `pg_aios` a second, unless asked otherwise.
const DEFAULT_SAMPLE_RATE: &str = "20";
/// Default of `--ring-kib`: at 192 bytes a record, room for 87,000 reads between two visits.
const DEFAULT_RING_KIB: &str = "16384";

/// More samples a second than this would load the server that is looked at.
const MAX_SAMPLE_RATE: i64 = 1_000;

/// More runs of a query than this are a benchmark's.
const MAX_RUNS: i64 = 1_000;

/// Name of the binary, in help and completions.
const NAME: &str = "pgiotrace";

const EXAMPLES: &str = "\
Examples:
  pgiotrace doctor                          what can be traced on this host
  pgiotrace stat --duration 10s             the only running server, for ten seconds
  pgiotrace stat -p 5433 -- pgbench -T 30   the server on port 5433, while pgbench runs
  pgiotrace explain 'SELECT …'              one query: EXPLAIN's claim beside the kernel's truth
  pgiotrace stat --help                     all options of stat

The connection is made as psql makes it: PG* variables and .pgpass count.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 done but reads were lost.";

const DOCTOR_EXAMPLES: &str = "\
Examples:
  pgiotrace doctor
  pgiotrace doctor -p 5433 --format json

Exit codes: 0 stat can run here, 1 it cannot, 2 wrong usage.";

const STAT_EXAMPLES: &str = "\
Examples:
  pgiotrace stat                                      until Ctrl-C
  pgiotrace stat --duration 10s -o report.txt
  pgiotrace stat -d shop --relation public.orders --min-latency 5ms
  pgiotrace stat --pid 4242 --format json -o - | jq .relations
  pgiotrace stat -D /var/lib/postgresql/18/main -- psql -c 'SELECT count(*) FROM orders'

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 done but reads were lost.
With CMD: the exit code of CMD, unless pgiotrace itself failed.";

const EXPLAIN_EXAMPLES: &str = "\
Examples:
  pgiotrace explain -d shop 'SELECT count(*) FROM orders'
  pgiotrace explain -d shop -f report.sql --cold --runs 5
  pgiotrace explain --allow-write \"UPDATE t SET a = a + 1\"       runs it, and rolls it back
  PGOPTIONS='-c effective_io_concurrency=64' pgiotrace explain -f report.sql --save 64.json
  pgiotrace explain --compare sync.json worker.json io_uring.json

Exit codes: 0 done, 1 failed or refused, 2 wrong usage, 3 done but reads were lost, 130 cancelled with Ctrl-C.";

/// Shows where the read latency of a PostgreSQL server comes from: which backend wanted each read, who executed it,
/// which relation it was, and how long it took.
#[derive(Debug, Parser)]
#[command(name = NAME, bin_name = NAME, version, propagate_version = true, disable_help_flag = true, after_help = EXAMPLES)]
#[command(max_term_width = 110)]
pub struct Cli {
    #[command(flatten)]
    global: GlobalArgs,

    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Says what this kernel, these privileges and this server allow
    ///
    /// Each line names what was looked at; what is missing comes with what that costs and how to mend it. Nothing is
    /// changed.
    #[command(after_help = DOCTOR_EXAMPLES)]
    Doctor,

    /// Traces the server's reads and prints a summary
    ///
    /// The trace lasts for --duration, while CMD runs, or until Ctrl-C; the summary is by backend, io worker, relation
    /// and device. Needs root, or the capabilities that doctor names. The server is not changed and not restarted.
    #[command(after_help = STAT_EXAMPLES)]
    Stat(Box<StatArgs>),

    /// Runs a query under EXPLAIN (ANALYZE, BUFFERS): PostgreSQL's claim beside the kernel's truth
    ///
    /// The query runs in a session of its own, in a read-only transaction that is rolled back; only what this session and
    /// its parallel workers read is counted. What no transaction holds back is done: functions that write elsewhere
    /// (dblink), or advance a sequence with --allow-write. Settings for the session stand in PGOPTIONS, as with psql. The
    /// server is never restarted or configured: to compare io_method, save a report under each.
    #[command(after_help = EXPLAIN_EXAMPLES)]
    Explain(ExplainArgs),

    /// Prints a completion script for a shell
    ///
    /// For bash: source <(pgiotrace completions bash)
    Completions {
        /// Shell to complete for
        shell: Shell,
    },
}

#[derive(Debug, Args)]
struct GlobalArgs {
    /// Write the report to FILE; - is standard output
    ///
    /// FILE is replaced only once the report is whole. Without this option, the report goes to standard output, or
    /// to standard error beside a CMD, so that the output of CMD stays clean.
    #[arg(short, long, value_name = "FILE", global = true, value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,

    /// Form of the report
    #[arg(long, value_enum, value_name = "FORM", default_value_t, global = true)]
    format: Format,

    /// When to use colours; auto: on a terminal, unless NO_COLOR is set
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = clap::ColorChoice::Auto, global = true)]
    color: clap::ColorChoice,

    /// Say on standard error what is being done; twice for more
    #[arg(short, long, action = ArgAction::Count, global = true)]
    verbose: u8,

    // The short layout; `pgiotrace help VERB` prints the long one. There is no -h: that is the host, as in psql.
    /// Print help; 'pgiotrace help stat' says more
    #[arg(long, action = ArgAction::HelpShort, global = true)]
    help: Option<bool>,

    #[command(flatten)]
    connection: ConnectionArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Server")]
struct ConnectionArgs {
    /// Host or socket directory of the server
    #[arg(short = 'h', long, value_name = "HOST", global = true, value_hint = ValueHint::Hostname)]
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    host: Option<String>,

    /// Port of the server; needed when several run and none is chosen with -D
    #[arg(short, long, value_name = "PORT", global = true, value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,

    /// Role to connect as; pg_monitor is enough
    #[arg(short = 'U', long, value_name = "USER", global = true, value_hint = ValueHint::Username)]
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    username: Option<String>,

    /// Database to connect to, or a connection URI
    #[arg(short, long, value_name = "DBNAME|URI", global = true)]
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    dbname: Option<String>,

    /// Data directory of the server to trace
    #[arg(short = 'D', long, visible_alias = "data-directory", value_name = "DATADIR", global = true)]
    #[arg(value_hint = ValueHint::DirPath)]
    pgdata: Option<PathBuf>,

    /// Do not connect to the server: trace with fewer names
    ///
    /// Reads are traced all the same; backends are shown by PID and relations by relfilenode.
    #[arg(long, global = true)]
    no_connect: bool,
}

#[derive(Debug, Args)]
struct StatArgs {
    /// Trace for this long: 10s, 1m30s, 500ms (default: until Ctrl-C or the end of CMD)
    #[arg(long, value_name = "TIME", value_parser = positive_duration, conflicts_with = "command")]
    duration: Option<Duration>,

    /// Samples a second of pg_stat_activity and pg_aios; 0: none
    #[arg(long, value_name = "HZ", default_value = DEFAULT_SAMPLE_RATE)]
    #[arg(value_parser = clap::value_parser!(u32).range(0..=MAX_SAMPLE_RATE))]
    sample_rate: u32,

    /// Leave the texts of queries out: they are shown by their query_id
    #[arg(long)]
    no_query_text: bool,

    /// Probe PostgreSQL's functions as well: exact pg_queue and wakeup times
    ///
    /// Measures how long reads wait for an io worker or their submission, and how long after their end their owner runs
    /// again. Each batch of reads that is handed over, and each wait for one, then costs the server a trap of one to ten
    /// microseconds; the report says how many there were and what one costs on this machine. Needs PostgreSQL 18.
    #[arg(long, conflicts_with = "attribution")]
    pg_probes: bool,

    /// How the owner of a read is found (a testing aid)
    #[arg(long, hide = true, value_enum, default_value_t)]
    attribution: Attribution,

    /// Size of the ring between kernel and tracer, KiB (a testing aid)
    #[arg(long, hide = true, value_name = "KIB", default_value = DEFAULT_RING_KIB, value_parser = ring_kib)]
    ring_kib: u32,

    /// Write the kernel's records, as they come, to this file (a testing aid)
    #[arg(long, hide = true, value_name = "FILE")]
    raw_records: Option<PathBuf>,

    /// Trace while this command runs; put -- before it when its name could be an option
    #[arg(trailing_var_arg = true, value_name = "CMD", value_hint = ValueHint::CommandWithArguments)]
    command: Vec<OsString>,

    // Last, because its heading holds for all that follows.
    #[command(flatten)]
    filter: FilterArgs,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).args(["sql", "file", "compare"]))]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is an option of its own, and any combination is meant"
)]
struct ExplainArgs {
    /// The query: one statement, without EXPLAIN
    #[arg(value_name = "SQL")]
    sql: Option<String>,

    /// Read the query from FILE; - is standard input
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    file: Option<PathBuf>,

    /// Let the statement change data; it is rolled back all the same
    #[arg(long, conflicts_with = "compare")]
    allow_write: bool,

    /// Empty the caches before each run: the query's relations in shared_buffers, and this host's page cache
    ///
    /// Asks first. The page cache is that of the whole host, so that everything on it reads from the disks for a while.
    /// shared_buffers are emptied by pg_buffercache_evict_relation (PostgreSQL 18, extension pg_buffercache, superuser), which
    /// writes changed pages first; where that is not there, a note says so.
    #[arg(long, conflicts_with = "compare")]
    cold: bool,

    /// Answer yes to what --cold asks
    #[arg(short, long, requires = "cold")]
    yes: bool,

    /// Run the query this often; the report is of the run with the median run time, and lists all
    #[arg(long, value_name = "N", default_value = "1", conflicts_with = "compare")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=MAX_RUNS))]
    runs: u32,

    /// Probe PostgreSQL's functions as well, as in stat: exact pg_queue and wakeup times
    #[arg(long, conflicts_with = "compare")]
    pg_probes: bool,

    /// Write the report as JSON to FILE as well, for --compare
    #[arg(long, value_name = "FILE", conflicts_with = "compare", value_hint = ValueHint::FilePath)]
    save: Option<PathBuf>,

    /// Print one table of saved reports; needs no server
    #[arg(long, value_name = "FILE", num_args = 1.., value_hint = ValueHint::FilePath)]
    compare: Vec<PathBuf>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Filters (a read must match each kind that is given)")]
struct FilterArgs {
    /// Only reads that this process wanted; may be repeated
    #[arg(long, value_name = "PID", value_parser = process_id)]
    pid: Vec<u32>,

    /// Only reads of this relation; may be repeated
    ///
    /// As in SQL, a name is folded to lower case unless it is in double quotes.
    #[arg(long, value_name = "[SCHEMA.]NAME")]
    relation: Vec<RelationName>,

    /// Only reads wanted in this database; may be repeated
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    database: Vec<String>,

    /// Only reads wanted by sessions of this role; may be repeated
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    user: Vec<String>,

    /// Only reads that this query wanted, as far as that is known; may be repeated
    ///
    /// The number is that of pg_stat_activity and pg_stat_statements; the server must compute it (compute_query_id).
    #[arg(long, value_name = "ID", allow_negative_numbers = true)]
    query_id: Vec<i64>,

    /// Only reads that took at least this long: 5ms, 250us
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    min_latency: Option<Duration>,
}

/// Everything that the command line asks for, validated.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// What to do.
    pub action: Action,
    /// 0: only the report and what must be known; 1: what is being done; 2 and more: details.
    pub verbosity: u8,
    /// Whether styles are used, on standard error too.
    pub color: ColorChoice,
}

/// What to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// `doctor`.
    Doctor(DoctorOptions),
    /// `stat`.
    Stat(Box<StatOptions>),
    /// `explain`.
    Explain(ExplainOptions),
    /// `explain --compare`.
    Compare(CompareOptions),
    /// `completions`.
    Completions(Shell),
}

/// Options of `doctor`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DoctorOptions {
    /// Which server, and how to connect to it.
    pub connection: ConnectionOptions,
    /// Where the report goes and in which form; never CSV.
    pub report: ReportOptions,
}

/// Options of `stat`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatOptions {
    /// Which server, and how to connect to it.
    pub connection: ConnectionOptions,
    /// Where the report goes and in which form.
    pub report: ReportOptions,
    /// When the trace ends. Ctrl-C ends it in any case.
    pub until: Until,
    /// Samples of `pg_stat_activity` and `pg_aios` a second; `None`: no sampling.
    pub sample_rate: Option<NonZeroU32>,
    /// Whether the texts of queries are asked for.
    pub query_text: bool,
    /// Which reads count.
    pub filter: Filter,
    /// How owners are found.
    pub attribution: Attribution,
    /// Whether PostgreSQL's functions are probed.
    pub pg_probes: bool,
    /// Size of the ring between kernel and tracer, KiB; a power of two of pages.
    pub ring_kib: u32,
    /// Where the kernel's records go as they come.
    pub raw_records: Option<PathBuf>,
}

/// Options of `explain`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is an option of its own, and any combination is meant"
)]
pub struct ExplainOptions {
    /// Which server, and how to connect to it.
    pub connection: ConnectionOptions,
    /// Where the report goes and in which form; never CSV.
    pub report: ReportOptions,
    /// The query.
    pub query: QuerySource,
    /// Whether its transaction may write.
    pub allow_write: bool,
    /// Whether caches are emptied before each run.
    pub cold: bool,
    /// Whether that is agreed to already.
    pub yes: bool,
    /// How often it is run.
    pub runs: NonZeroU32,
    /// Whether PostgreSQL's functions are probed.
    pub pg_probes: bool,
    /// Where the JSON report goes as well.
    pub save: Option<Destination>,
}

/// Where a query stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QuerySource {
    /// Here.
    Text(String),
    /// In a file.
    File(PathBuf),
    /// On standard input.
    StandardInput,
}

/// Options of `explain --compare`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompareOptions {
    /// Where the table goes and in which form; never CSV.
    pub report: ReportOptions,
    /// Saved reports, at least one.
    pub files: Vec<PathBuf>,
}

/// Which server to trace, and how to connect to it. What is `None` is left to the `PG*` variables and the defaults.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConnectionOptions {
    /// `-h`: host or socket directory.
    pub host: Option<String>,
    /// `-p`: port, which also chooses among several servers.
    pub port: Option<u16>,
    /// `-U`: role.
    pub user: Option<String>,
    /// `-d`: name of a database, a URI, or a string of keywords and values.
    pub dbname: Option<String>,
    /// `-D`: data directory of the server to trace.
    pub data_directory: Option<PathBuf>,
    /// Whether to connect at all.
    pub connect: bool,
}

/// Where a report goes, and in which form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportOptions {
    /// Where.
    pub destination: Destination,
    /// In which form.
    pub format: Format,
}

/// When a trace ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Until {
    /// At Ctrl-C.
    Interrupted,
    /// After this time, which is not zero.
    Elapsed(Duration),
    /// When this command ends.
    CommandEnds {
        /// Program to run.
        program: OsString,
        /// Its arguments.
        args: Vec<OsString>,
    },
}

/// Which reads count: those that match one entry of each list that is not empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Owners.
    pub pids: Vec<u32>,
    /// Relations.
    pub relations: Vec<RelationName>,
    /// Databases of the owners.
    pub databases: Vec<String>,
    /// Roles of the owners.
    pub users: Vec<String>,
    /// Identifiers of the queries.
    pub query_ids: Vec<i64>,
    /// Shortest latency that counts.
    pub min_latency: Option<Duration>,
    /// The session that `explain` opened, with its parallel workers. No option names it.
    pub session: Option<Session>,
}

/// A session, by its process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Session {
    /// The process, as the tracer sees it.
    pub pid: Pid,
    /// The process, as the server sees it: so its parallel workers name it.
    pub inner_pid: InnerPid,
}

impl Filter {
    /// Whether every read counts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// How the owner of a read is found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Attribution {
    /// From the I/O's own handle, validated; where there is none, as [`Attribution::PgAios`].
    #[default]
    Handle,
    /// Handles are left unread, so that owners are matched with rows of `pg_aios`.
    #[value(name = "pg_aios")]
    PgAios,
}

/// A relation as the user names it, folded as SQL folds names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelationName {
    /// Schema; `None`: any.
    pub schema: Option<String>,
    /// Name of the table, index, …
    pub name: String,
}

impl RelationName {
    /// Whether the relation `schema.name` is meant.
    #[must_use]
    pub fn matches(&self, schema: &str, name: &str) -> bool {
        self.name == name && self.schema.as_deref().is_none_or(|wanted| wanted == schema)
    }
}

impl fmt::Display for RelationName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(schema) = &self.schema {
            write!(formatter, "{schema}.")?;
        }
        formatter.write_str(&self.name)
    }
}

impl FromStr for RelationName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = identifiers(text)?;
        let name = parts.pop().filter(|name| !name.is_empty());
        let schema = parts.pop();
        match name {
            Some(name) if parts.is_empty() && schema.as_deref() != Some("") => Ok(Self { schema, name }),
            _ => Err("write [SCHEMA.]NAME, with double quotes around a name that holds a dot".to_owned()),
        }
    }
}

/// Splits at the dots outside of double quotes; folds what is not quoted.
fn identifiers(text: &str) -> Result<Vec<String>, String> {
    let mut parts = vec![String::new()];
    let mut quoted = false;
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        let part = parts.last_mut().expect("there is always a part");
        match character {
            '"' if quoted && characters.peek() == Some(&'"') => {
                characters.next();
                part.push('"');
            }
            '"' => quoted = !quoted,
            '.' if !quoted => parts.push(String::new()),
            _ if quoted => part.push(character),
            // The server folds no more than ASCII in a multi-byte encoding (downcase_identifier, scansup.c).
            _ => part.push(character.to_ascii_lowercase()),
        }
    }
    if quoted { Err("a double quote is not closed".to_owned()) } else { Ok(parts) }
}

/// Parses a time such as `10s` or `1m30s` that is more than zero.
fn positive_duration(text: &str) -> Result<Duration, String> {
    static PARSER: SpanParser = SpanParser::new();
    match PARSER.parse_unsigned_duration(text) {
        Ok(Duration::ZERO) => Err("it must be more than zero".to_owned()),
        Ok(duration) => Ok(duration),
        Err(_) => Err("write a number with its unit, such as 500ms, 10s, 1m30s or 2h".to_owned()),
    }
}

/// Reads the command line of this process. Wrong usage, `--help` and `--version` print and end the process (codes 2,
/// 0 and 0).
#[must_use]
pub fn parse() -> Options {
    parse_from(std::env::args_os()).unwrap_or_else(|error| error.exit())
}

/// Reads a command line, its first word being the program's name.
///
/// # Errors
///
/// Wrong usage; also `--help` and `--version`, which clap treats as such: [`clap::Error::exit`] does what is due.
pub fn parse_from<I, T>(words: I) -> Result<Options, clap::Error>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    Cli::try_parse_from(words)?.into_options()
}

/// Writes the completion script for `shell`.
///
/// # Errors
///
/// When `out` cannot be written to.
pub fn write_completions(shell: Shell, out: &mut dyn Write) -> io::Result<()> {
    // In memory first: the generator panics when it cannot write.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), NAME, &mut script);
    out.write_all(&script)
}

impl Cli {
    fn into_options(self) -> Result<Options, clap::Error> {
        let Self { global, verb } = self;
        let GlobalArgs { output, format, color, verbose, help: _, connection } = global;
        let traces_command = matches!(&verb, Verb::Stat(args) if !args.command.is_empty());
        let report = ReportOptions { destination: destination(output, traces_command)?, format };
        let action = match verb {
            Verb::Completions { shell } => Action::Completions(shell),
            Verb::Doctor if format == Format::Csv => {
                return Err(usage("doctor has no CSV form: use --format text or json"));
            }
            Verb::Doctor => Action::Doctor(DoctorOptions { connection: connection.into_options()?, report }),
            Verb::Explain(_) if format == Format::Csv => {
                return Err(usage("explain has no CSV form: use --format text or json"));
            }
            Verb::Explain(args) => args.into_action(connection.into_options()?, report)?,
            Verb::Stat(args) => Action::Stat(Box::new(args.into_options(connection.into_options()?, report))),
        };
        Ok(Options { action, verbosity: verbose, color: color_choice(color) })
    }
}

impl ConnectionArgs {
    fn into_options(self) -> Result<ConnectionOptions, clap::Error> {
        let Self { host, port, username, dbname, pgdata, no_connect } = self;
        // clap cannot say this itself: it does not see conflicts across a global option's levels.
        if no_connect && (host.is_some() || username.is_some() || dbname.is_some()) {
            return Err(usage("--no-connect makes no connection: leave out -h, -U and -d"));
        }
        let connect = !no_connect;
        Ok(ConnectionOptions { host, port, user: username, dbname, data_directory: pgdata, connect })
    }
}

impl StatArgs {
    fn into_options(self, connection: ConnectionOptions, report: ReportOptions) -> StatOptions {
        let Self {
            duration,
            sample_rate,
            no_query_text,
            filter,
            pg_probes,
            attribution,
            ring_kib,
            raw_records,
            command,
        } = self;
        let FilterArgs { pid, relation, database, user, query_id, min_latency } = filter;
        StatOptions {
            connection,
            report,
            until: until(duration, command),
            sample_rate: NonZeroU32::new(sample_rate),
            query_text: !no_query_text,
            filter: Filter {
                pids: pid,
                relations: relation,
                databases: database,
                users: user,
                query_ids: query_id,
                min_latency,
                session: None,
            },
            attribution,
            pg_probes,
            ring_kib,
            raw_records,
        }
    }
}

impl ExplainArgs {
    fn into_action(
        self,
        connection: ConnectionOptions,
        report: ReportOptions,
    ) -> Result<Action, clap::Error> {
        let Self { sql, file, allow_write, cold, yes, runs, pg_probes, save, compare } = self;
        let query = match (sql, file) {
            (Some(sql), _) => QuerySource::Text(sql),
            (None, Some(path)) if path.as_os_str() == "-" => QuerySource::StandardInput,
            (None, Some(path)) => QuerySource::File(path),
            (None, None) => return Ok(Action::Compare(CompareOptions { report, files: compare })),
        };
        if !connection.connect {
            return Err(usage("explain runs the query in a session of the server: leave --no-connect out"));
        }
        Ok(Action::Explain(ExplainOptions {
            connection,
            report,
            query,
            allow_write,
            cold,
            yes,
            runs: NonZeroU32::new(runs).unwrap_or(NonZeroU32::MIN),
            pg_probes,
            save: save.map(|path| destination(Some(path), false)).transpose()?,
        }))
    }
}

/// A process ID as people write it.
fn process_id(text: &str) -> Result<u32, String> {
    text.parse().ok().filter(|pid| *pid > 0).ok_or_else(|| "write a process ID, such as 4242".to_owned())
}

/// A size that the kernel takes for a ring.
fn ring_kib(text: &str) -> Result<u32, String> {
    let kib: u32 = text.parse().map_err(|_| "not a number".to_owned())?;
    // BPF_MAP_TYPE_RINGBUF wants a power of two of pages, and no page is larger than 64 KiB.
    if !kib.is_power_of_two() || !(64..=1 << 20).contains(&kib) {
        return Err("not a power of two from 64 to 1048576".to_owned());
    }
    Ok(kib)
}

/// When the trace ends; clap has refused a duration beside a command.
fn until(duration: Option<Duration>, command: Vec<OsString>) -> Until {
    let mut words = command.into_iter();
    match (words.next(), duration) {
        (Some(program), _) => Until::CommandEnds { program, args: words.collect() },
        (None, Some(duration)) => Until::Elapsed(duration),
        (None, None) => Until::Interrupted,
    }
}

/// Where the report goes: beside a command, its standard output is left to the command.
fn destination(output: Option<PathBuf>, traces_command: bool) -> Result<Destination, clap::Error> {
    match output {
        Some(path) if path.as_os_str().is_empty() => Err(usage("-o needs the name of a file, or -")),
        Some(path) if path.as_os_str() == "-" => Ok(Destination::Stdout),
        Some(path) => Ok(Destination::File(path)),
        None if traces_command => Ok(Destination::Stderr),
        None => Ok(Destination::Stdout),
    }
}

fn color_choice(choice: clap::ColorChoice) -> ColorChoice {
    match choice {
        clap::ColorChoice::Auto => ColorChoice::Auto,
        clap::ColorChoice::Always => ColorChoice::Always,
        clap::ColorChoice::Never => ColorChoice::Never,
    }
}

/// Wrong usage that clap has no rule for; it exits as clap's own does.
fn usage(message: &str) -> clap::Error {
    Cli::command().error(ErrorKind::ArgumentConflict, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Options {
        parse_from(line.split_whitespace()).unwrap_or_else(|error| panic!("{line}: {error}"))
    }

    fn refused(line: &str) -> String {
        let error = parse_from(line.split_whitespace()).expect_err("wrong usage");
        assert_eq!(error.exit_code(), 2, "{line}");
        error.to_string()
    }

    fn stat(line: &str) -> StatOptions {
        match parsed(line).action {
            Action::Stat(options) => *options,
            other => panic!("{line}: {other:?}"),
        }
    }

    fn words(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn defaults() {
        let options = parsed("pgiotrace stat");
        assert_eq!((options.verbosity, options.color), (0, ColorChoice::Auto));
        let expected = StatOptions {
            connection: ConnectionOptions { connect: true, ..ConnectionOptions::default() },
            report: ReportOptions { destination: Destination::Stdout, format: Format::Text },
            until: Until::Interrupted,
            sample_rate: NonZeroU32::new(20),
            query_text: true,
            filter: Filter::default(),
            attribution: Attribution::Handle,
            pg_probes: false,
            ring_kib: 16 << 10,
            raw_records: None,
        };
        assert_eq!(options.action, Action::Stat(Box::new(expected)));
        assert!(stat("pgiotrace stat").filter.is_empty());
    }

    #[test]
    fn connection_flags_are_those_of_psql_before_and_after_the_verb() {
        let expected = ConnectionOptions {
            host: Some("/run/postgresql".to_owned()),
            port: Some(5433),
            user: Some("dba".to_owned()),
            dbname: Some("postgres://db/x".to_owned()),
            data_directory: Some("/data".into()),
            connect: true,
        };
        for line in [
            "pgiotrace -h /run/postgresql -p 5433 -U dba -d postgres://db/x -D /data stat",
            "pgiotrace stat -h /run/postgresql -p 5433 -U dba -d postgres://db/x -D /data",
            "pgiotrace stat --host /run/postgresql --port=5433 --username dba --dbname postgres://db/x --pgdata /data",
            "pgiotrace stat -h /run/postgresql -p5433 -Udba -d postgres://db/x --data-directory=/data",
        ] {
            assert_eq!(stat(line).connection, expected, "{line}");
        }
        for line in ["stat -p 0", "stat -p 65536", "stat -p x", "stat --host=", "stat -U="] {
            refused(&format!("pgiotrace {line}"));
        }
    }

    #[test]
    fn no_connection_needs_no_credentials() {
        let connection = stat("pgiotrace stat --no-connect -p 5433 -D /data").connection;
        assert!(!connection.connect);
        for line in ["--no-connect stat -d x", "stat -h x --no-connect", "stat -U x --no-connect"] {
            assert!(refused(&format!("pgiotrace {line}")).contains("--no-connect"));
        }
    }

    #[test]
    fn durations_have_units_and_are_not_zero() {
        let cases = [("10s", 10_000), ("1m30s", 90_000), ("500ms", 500), ("1.5s", 1_500), ("2h", 7_200_000)];
        for (text, millis) in cases {
            let until = stat(&format!("pgiotrace stat --duration {text}")).until;
            assert_eq!(until, Until::Elapsed(Duration::from_millis(millis)));
        }
        assert!(refused("pgiotrace stat --duration 0s").contains("more than zero"));
        for text in ["10", "-5s", "s", "tomorrow", "3mo"] {
            let message = refused(&format!("pgiotrace stat --duration={text}"));
            assert!(message.contains("unit, such as"), "{message}");
        }
    }

    #[test]
    fn a_command_is_taken_as_it_is() {
        for line in
            ["pgiotrace stat -p 5433 -- pgbench -p 1 --help", "pgiotrace stat -p 5433 pgbench -p 1 --help"]
        {
            let options = stat(line);
            let until = Until::CommandEnds { program: "pgbench".into(), args: words(&["-p", "1", "--help"]) };
            assert_eq!(options.until, until, "{line}");
            assert_eq!(options.connection.port, Some(5433));
        }
        let until = stat("pgiotrace stat -- -odd --").until;
        assert_eq!(until, Until::CommandEnds { program: "-odd".into(), args: words(&["--"]) });
        assert!(refused("pgiotrace stat --duration 5s -- true").contains("--duration"));
    }

    #[test]
    fn the_report_leaves_standard_output_to_a_command() {
        let destination = |line| stat(line).report.destination;
        assert_eq!(destination("pgiotrace stat"), Destination::Stdout);
        assert_eq!(destination("pgiotrace stat -- true"), Destination::Stderr);
        assert_eq!(destination("pgiotrace stat -o - -- true"), Destination::Stdout);
        assert_eq!(destination("pgiotrace -o r.txt stat -- true"), Destination::File("r.txt".into()));
        refused("pgiotrace stat --output=");
    }

    #[test]
    fn formats() {
        for (word, format) in [("text", Format::Text), ("json", Format::Json), ("csv", Format::Csv)] {
            assert_eq!(stat(&format!("pgiotrace stat --format {word}")).report.format, format);
        }
        refused("pgiotrace stat --format xml");
        assert!(refused("pgiotrace doctor --format csv").contains("no CSV form"));
        let Action::Doctor(doctor) = parsed("pgiotrace doctor --format json -p 1").action else { panic!() };
        assert_eq!((doctor.report.format, doctor.connection.port), (Format::Json, Some(1)));
    }

    #[test]
    fn filters_may_be_repeated() {
        let filter = stat(
            "pgiotrace stat --pid 1 --pid 2 --relation a --relation s.B --database x --user u --user v \
             --query-id -7 --query-id=8 --min-latency 5ms",
        )
        .filter;
        let relation = |schema: Option<&str>, name: &str| RelationName {
            schema: schema.map(str::to_owned),
            name: name.to_owned(),
        };
        let expected = Filter {
            pids: vec![1, 2],
            relations: vec![relation(None, "a"), relation(Some("s"), "b")],
            databases: vec!["x".to_owned()],
            users: vec!["u".to_owned(), "v".to_owned()],
            query_ids: vec![-7, 8],
            min_latency: Some(Duration::from_millis(5)),
            session: None,
        };
        assert_eq!(filter, expected);
        refused("pgiotrace stat --pid 0");
    }

    #[test]
    fn relation_names_are_folded_and_quoted_as_in_sql() {
        let parse = |text: &str| text.parse::<RelationName>().map(|found| (found.schema, found.name));
        assert_eq!(parse("Orders"), Ok((None, "orders".to_owned())));
        assert_eq!(parse("\"My.Schema\".\"T\"\"1\""), Ok((Some("My.Schema".to_owned()), "T\"1".to_owned())));
        assert_eq!(parse("データ.表"), Ok((Some("データ".to_owned()), "表".to_owned())));
        for wrong in ["", ".", "a.", ".a", "a.b.c", "\"a", "\"\""] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        let any: RelationName = "t".parse().expect("a name");
        assert!(any.matches("a", "t") && any.matches("b", "t") && !any.matches("a", "u"));
        let one: RelationName = "a.t".parse().expect("a name");
        assert!(one.matches("a", "t") && !one.matches("b", "t"));
    }

    #[test]
    fn sampling_can_be_switched_off() {
        assert_eq!(stat("pgiotrace stat --sample-rate 0").sample_rate, None);
        assert_eq!(stat("pgiotrace stat --sample-rate 100").sample_rate, NonZeroU32::new(100));
        refused("pgiotrace stat --sample-rate 1001");
        refused("pgiotrace stat --sample-rate=-1");
    }

    #[test]
    fn probes_are_asked_for() {
        assert!(stat("pgiotrace stat --pg-probes").pg_probes);
        refused("pgiotrace stat --pg-probes --attribution pg_aios");
    }

    #[test]
    fn explain_wants_one_query_or_saved_reports() {
        let explain = |words: &[&str]| {
            let words = ["pgiotrace", "explain"].iter().chain(words);
            parse_from(words).map(|options| options.action)
        };
        let query = |words: &[&str]| match explain(words) {
            Ok(Action::Explain(options)) => options.query,
            other => panic!("{words:?}: {other:?}"),
        };
        assert_eq!(query(&["SELECT 1"]), QuerySource::Text("SELECT 1".to_owned()));
        assert_eq!(query(&["-f", "a.sql"]), QuerySource::File("a.sql".into()));
        assert_eq!(query(&["--file", "-"]), QuerySource::StandardInput);
        let Ok(Action::Compare(compare)) = explain(&["--compare", "a", "b"]) else { panic!() };
        assert_eq!(compare.files, [PathBuf::from("a"), "b".into()]);
        let Ok(Action::Explain(options)) =
            explain(&["-p", "1", "--runs=3", "--save", "s", "--cold", "-y", "Q"])
        else {
            panic!()
        };
        assert_eq!(
            (options.runs.get(), options.connection.port, options.cold, options.yes),
            (3, Some(1), true, true)
        );
        assert_eq!(options.save, Some(Destination::File("s".into())));
        assert!(!options.allow_write && !options.pg_probes);
        for words in [
            &[][..],
            &["Q", "-f", "x"],
            &["Q", "--compare", "x"],
            &["--compare"],
            &["--compare", "x", "--cold"],
            &["Q", "--yes"],
            &["Q", "--runs", "0"],
            &["Q", "--no-connect"],
            &["Q", "--format", "csv"],
            &["Q", "R"],
        ] {
            assert_eq!(explain(words).expect_err("wrong usage").exit_code(), 2, "{words:?}");
        }
    }

    #[test]
    fn the_testing_aids_are_hidden() {
        assert_eq!(stat("pgiotrace stat --ring-kib 64").ring_kib, 64);
        refused("pgiotrace stat --ring-kib 100");
        refused("pgiotrace stat --ring-kib 32");
        assert_eq!(stat("pgiotrace stat --attribution pg_aios").attribution, Attribution::PgAios);
        for words in [["pgiotrace", "stat", "--help"], ["pgiotrace", "help", "stat"]] {
            let help = parse_from(words).expect_err("help").to_string();
            assert!(!help.contains("attribution") && !help.contains("ring-kib"), "{help}");
        }
    }

    #[test]
    fn help_and_version_are_no_errors() {
        for line in ["--help", "--version", "-V", "stat --help", "help stat", "doctor --help"] {
            let words = std::iter::once(NAME).chain(line.split_whitespace());
            assert_eq!(parse_from(words).expect_err("it prints").exit_code(), 0, "{line}");
        }
        refused("pgiotrace -h");
        refused("pgiotrace");
        refused("pgiotrace strace");
    }

    #[test]
    fn verbosity_and_colour() {
        let options = parsed("pgiotrace -vv --color never stat");
        assert_eq!((options.verbosity, options.color), (2, ColorChoice::Never));
        assert_eq!(parsed("pgiotrace stat --color always").color, ColorChoice::Always);
    }

    #[test]
    fn completions_name_the_verbs() {
        let Action::Completions(shell) = parsed("pgiotrace completions bash").action else { panic!() };
        let mut script = Vec::new();
        write_completions(shell, &mut script).expect("a vector takes everything");
        let script = String::from_utf8(script).expect("a script is UTF-8");
        assert!(script.contains("doctor") && script.contains("stat") && script.contains("--duration"));
    }
}
