//! What a connection to the server shows.

use postgres::Client;

use super::server::AREA;
use super::topic::{Problem, Topic};
use crate::model::Check;
use crate::server::connect::{ConnectOptions, Connector, innermost};
use crate::server::discover::Server;
use crate::server::facts::{self, ServerFacts};

const CONNECTION: Topic = Topic::optional(AREA, "connection");
const PASSWORD_FILE: Topic = Topic::optional(AREA, "password file");
const RIGHTS: Topic = Topic::optional(AREA, "rights");
const IO_METHOD: Topic = Topic::optional(AREA, "io_method");
const IO_TIMING: Topic = Topic::optional(AREA, "track_io_timing");
const NAMES: Topic = Topic::optional(AREA, "relation names");

const NO_NAMES: &str =
    "backends are shown by PID and relations by relfilenode, and no read is checked against pg_aios";

/// Values of io_method: without liburing, `io_uring` is not among them.
const ALLOWS_IO_URING: &str =
    "SELECT 'io_uring' = ANY (enumvals) FROM pg_catalog.pg_settings WHERE name = 'io_method'";

/// How the session is encrypted; NULL when it is not.
const OWN_TLS: &str = "SELECT version FROM pg_catalog.pg_stat_ssl WHERE pid = pg_catalog.pg_backend_pid()";

/// Whether the lookup of names works here; databases that the role may not connect to.
const OWN_LOOKUP: &str = "SELECT pg_catalog.pg_filenode_relation(0, \
    pg_catalog.pg_relation_filenode('pg_catalog.pg_attribute'::pg_catalog.regclass)) \
    = 'pg_catalog.pg_attribute'::pg_catalog.regclass";
const BARRED_DATABASES: &str = "SELECT datname::text FROM pg_catalog.pg_database \
    WHERE datallowconn AND NOT pg_catalog.has_database_privilege(oid, 'CONNECT') ORDER BY datname";

/// What became of the connection; it is closed again.
pub(super) struct Session {
    /// A password file that is ignored, and the like.
    warnings: Vec<String>,
    outcome: Result<Answers, String>,
}

/// What the server answered.
struct Answers {
    facts: ServerFacts,
    allows_io_uring: Option<bool>,
    /// Version of TLS, where the session is encrypted.
    tls: Option<String>,
    /// `Err`: what the server said.
    barred: Result<Vec<String>, String>,
}

impl Session {
    /// Connects and asks everything.
    pub(super) fn open(server: &Server, options: &ConnectOptions) -> Self {
        let connector = match Connector::new(server, options) {
            Ok(connector) => connector,
            Err(error) => return Self { warnings: Vec::new(), outcome: Err(error.to_string()) },
        };
        let client = connector.connect(None).map_err(|error| error.to_string());
        let ask = |mut client| Answers::ask(&mut client).map_err(|error| innermost(&error));
        Self { warnings: connector.warnings().to_vec(), outcome: client.and_then(ask) }
    }

    /// Whether the server may be set to io_method=io_uring; `None` when it was not asked or has no such setting.
    pub(super) fn allows_io_uring(&self) -> Option<bool> {
        self.outcome.as_ref().ok()?.allows_io_uring
    }

    /// What the connection showed.
    pub(super) fn checks(&self) -> Vec<Check> {
        let mut checks: Vec<_> = self.warnings.iter().map(|warning| password_file(warning)).collect();
        match &self.outcome {
            Err(sentence) => checks.push(no_connection(sentence)),
            Ok(Answers { facts, barred, tls, allows_io_uring: _ }) => checks.extend([
                connection(facts, tls.as_deref()),
                rights(facts),
                io_method(facts),
                track_io_timing(facts.track_io_timing),
                names(&facts.user, barred.as_deref()),
            ]),
        }
        checks
    }
}

impl Answers {
    fn ask(client: &mut Client) -> Result<Self, postgres::Error> {
        let facts = facts::facts(client)?;
        let allowed = client.query_opt(ALLOWS_IO_URING, &[])?;
        let allows_io_uring = allowed.and_then(|row| row.try_get(0).ok());
        let tls = client.query_opt(OWN_TLS, &[])?.and_then(|row| row.try_get(0).ok());
        let barred = ask_names(client).map_err(|error| innermost(&error));
        Ok(Self { facts, allows_io_uring, tls, barred })
    }
}

fn ask_names(client: &mut Client) -> Result<Vec<String>, postgres::Error> {
    client.query_one(OWN_LOOKUP, &[])?;
    client.query(BARRED_DATABASES, &[])?.iter().map(|row| row.try_get(0)).collect()
}

/// With `--no-connect`.
pub(super) fn left_out() -> Check {
    let detail = "left out, as --no-connect asks: role, rights, io_method and names are not checked";
    CONNECTION.missing(Problem::new(detail, NO_NAMES).mend("leave --no-connect out"))
}

fn password_file(warning: &str) -> Check {
    PASSWORD_FILE.broken(Problem::from_sentence(warning, "passwords in it are not used"))
}

fn no_connection(sentence: &str) -> Check {
    let problem = Problem::from_sentence(sentence, NO_NAMES);
    CONNECTION.broken(problem.or_mend("say with -h, -p, -U and -d how psql connects to this server"))
}

/// `tls`: its version, where the session is encrypted.
fn connection(facts: &ServerFacts, tls: Option<&str>) -> Check {
    let ServerFacts { version, user, database, .. } = facts;
    let tls = tls.map_or_else(String::new, |tls| format!(", {tls}"));
    let cluster = facts.settings.get("cluster_name").filter(|name| !name.is_empty());
    let cluster = cluster.map_or_else(String::new, |name| format!(", cluster \"{name}\""));
    CONNECTION.ok(format!("role \"{user}\", database \"{database}\", PostgreSQL {version}{cluster}{tls}"))
}

fn rights(facts: &ServerFacts) -> Check {
    let Some(missing) = facts.missing_rights() else {
        let user = facts.user.replace('"', "\"\"");
        let role = if facts.is_monitor { "pg_monitor" } else { "pg_read_all_stats" };
        return RIGHTS.ok(format!("role \"{user}\" has those of {role}"));
    };
    let detail = format!("role \"{}\" lacks those of pg_monitor", missing.user);
    RIGHTS.missing(Problem::new(detail, missing.cost).mend(missing.mend))
}

fn io_method(facts: &ServerFacts) -> Check {
    let Some(method) = facts.io_method.as_deref() else {
        return IO_METHOD.ok("every read is sync: there is no io_method before PostgreSQL 18");
    };
    match (method, facts.io_workers) {
        ("worker", Some(workers)) => IO_METHOD.ok(format!("worker, io_workers {workers}")),
        _ => IO_METHOD.ok(method),
    }
}

fn track_io_timing(is_on: bool) -> Check {
    if is_on {
        return IO_TIMING.ok("on");
    }
    let cost = "EXPLAIN and pg_stat_io show no times to compare with; tracing itself does not need it";
    let mend = "ALTER SYSTEM SET track_io_timing = on; SELECT pg_reload_conf()";
    IO_TIMING.missing(Problem::new("off", cost).mend(mend))
}

/// `barred`: databases that the role may not connect to, or why that is not known.
fn names(user: &str, barred: Result<&[String], &String>) -> Check {
    let by_number = "relations are shown by relfilenode";
    let databases = match barred {
        Ok([]) => return NAMES.ok("can be looked up in every database that accepts connections"),
        Ok(databases) => databases,
        Err(message) => {
            let detail = format!("looking one up failed: {message}");
            let mend =
                "GRANT EXECUTE ON FUNCTION pg_filenode_relation(oid, oid) TO PUBLIC, which is the default";
            return NAMES.broken(Problem::new(detail, by_number).mend(mend));
        }
    };
    let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
    let list = databases.iter().map(|name| quoted(name)).collect::<Vec<_>>().join(", ");
    let user = quoted(user);
    let problem =
        Problem::new(format!("role {user} may not connect to {list}"), format!("there, {by_number}"));
    NAMES.missing(problem.mend(format!("GRANT CONNECT ON DATABASE {list} TO {user}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Status;

    fn facts() -> ServerFacts {
        ServerFacts::example()
    }

    #[test]
    fn nothing_about_a_connection_is_required() {
        let session =
            Session { warnings: vec!["it is open; chmod it".to_owned()], outcome: Err("no".to_owned()) };
        let checks = session.checks();
        assert_eq!(checks.len(), 2);
        for check in checks.into_iter().chain([left_out()]) {
            assert!(!check.required && check.cost.is_some() && check.mend.is_some(), "{check:?}");
            assert_ne!(check.status, Status::Ok);
        }
        assert_eq!(session.allows_io_uring(), None);
    }

    #[test]
    fn missing_rights_are_split_into_cost_and_mend() {
        assert_eq!(rights(&facts()).detail, "role \"alice\" has those of pg_monitor");
        let check = rights(&ServerFacts { reads_all_stats: true, reads_aios: Some(false), ..facts() });
        assert_eq!(check.status, Status::Missing);
        assert_eq!(check.cost.as_deref(), Some("traced reads are not checked against pg_aios"));
        assert_eq!(check.mend.as_deref(), Some("GRANT pg_monitor TO \"alice\""));
    }

    #[test]
    fn the_method_is_shown_with_its_workers() {
        assert_eq!(io_method(&facts()).detail, "worker, io_workers 3");
        let method = |name: Option<&str>| {
            io_method(&ServerFacts { io_method: name.map(str::to_owned), ..facts() }).detail
        };
        assert_eq!(method(Some("io_uring")), "io_uring");
        assert!(method(None).starts_with("every read is sync"));
    }

    #[test]
    fn databases_without_the_right_to_connect_keep_their_names() {
        assert_eq!(names("alice", Ok(&[])).status, Status::Ok);
        let check = names("al\"ice", Ok(&["a".to_owned(), "b".to_owned()]));
        assert_eq!(check.mend.as_deref(), Some("GRANT CONNECT ON DATABASE \"a\", \"b\" TO \"al\"\"ice\""));
        assert_eq!(names("alice", Err(&"denied".to_owned())).status, Status::Broken);
        assert_eq!(
            (track_io_timing(true).status, track_io_timing(false).status),
            (Status::Ok, Status::Missing)
        );
    }
}
