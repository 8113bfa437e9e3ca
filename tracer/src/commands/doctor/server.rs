//! The server to trace, as far as it shows without a connection.

use std::path::PathBuf;

use procfs::process::{MMapPath, Process};

use super::connection::{self, Session};
use super::topic::{Problem, Topic};
use crate::cli::ConnectionOptions;
use crate::model::Check;
use crate::server::aio::FIRST_AIO_MAJOR;
use crate::server::aio::{self, AioArea, AioRefusal};
use crate::server::connect::ConnectOptions;
use crate::server::discover::{self, Server, ServerError};
use crate::server::{Pid, symbols};

pub(super) const AREA: &str = "server";
const SERVER: Topic = Topic::required(AREA, "server");
const HANDLES: Topic = Topic::optional(AREA, "I/O handles");
const LIBURING: Topic = Topic::optional(AREA, "liburing");

const NO_SERVER: &str = "there is nothing to trace";

/// All checks of this area.
pub(super) fn checks(options: &ConnectionOptions) -> Vec<Check> {
    let ConnectionOptions { host, port, user, dbname, data_directory, connect } = options.clone();
    let connect_options = ConnectOptions { host, port, user, dbname };
    let server = match find(&connect_options, data_directory) {
        Ok(server) => server,
        Err(check) => return vec![check],
    };
    let session = connect.then(|| Session::open(&server, &connect_options));
    let allows_io_uring = session.as_ref().and_then(Session::allows_io_uring);
    let mut checks = vec![
        SERVER.ok(describe(&server)),
        handles(&area(&server)),
        liburing(server.major, maps_liburing(server.postmaster), allows_io_uring),
    ];
    checks.extend(session.map_or_else(|| vec![connection::left_out()], |session| session.checks()));
    checks
}

/// Finds the server, or says why not.
fn find(options: &ConnectOptions, data_directory: Option<PathBuf>) -> Result<Server, Check> {
    let selection =
        options.selection(data_directory).map_err(|error| SERVER.missing(no_server(&error.to_string())))?;
    discover::find(&selection).map_err(|error| {
        SERVER.missing(match &error {
            ServerError::Several { servers } => choice("several PostgreSQL servers run here", servers),
            ServerError::NoMatch { wanted, servers } if !servers.is_empty() => {
                choice(&format!("no PostgreSQL server {wanted} runs here, but others do"), servers)
            }
            _ => no_server(&error.to_string()),
        })
    })
}

fn no_server(sentence: &str) -> Problem {
    let problem = Problem::from_sentence(sentence, NO_SERVER);
    problem.or_mend("run pgiotrace where the server runs, and choose the server with -p or -D")
}

fn choice(detail: &str, servers: &[Server]) -> Problem {
    let list: Vec<_> = servers.iter().map(describe).collect();
    let ports: Vec<_> = servers.iter().map(|server| format!("-p {}", server.port)).collect();
    let mend = format!("choose one with {}, or with -D and its data directory", ports.join(" or "));
    Problem::new(format!("{detail}: {}", list.join("; ")), NO_SERVER).mend(mend)
}

/// "PostgreSQL 18, PID 4100, port 5432, data directory /var/lib/postgresql/18/main".
fn describe(server: &Server) -> String {
    let Server { major, postmaster, port, data_directory, .. } = server;
    format!("PostgreSQL {major}, PID {postmaster}, port {port}, data directory {}", data_directory.display())
}

/// Why there is no area, in one sentence; or that there need not be one.
enum NoArea {
    /// The server predates asynchronous I/O.
    BeforeAio,
    /// This server or this pgiotrace lacks something.
    Missing(String),
    /// It cannot be read, or is not what it should be.
    Broken(String),
}

fn area(server: &Server) -> Result<AioArea, NoArea> {
    let symbols = symbols::read(server.postmaster).map_err(|error| NoArea::Broken(error.to_string()))?;
    aio::read(server, &symbols).map_err(|refusal| {
        let sentence = refusal.to_string();
        match refusal {
            AioRefusal::BeforeAio { .. } => NoArea::BeforeAio,
            AioRefusal::UnknownMajor { .. } | AioRefusal::SymbolMissing { .. } | AioRefusal::NotReady => {
                NoArea::Missing(sentence)
            }
            AioRefusal::Unreadable { .. } | AioRefusal::LayoutMismatch { .. } => NoArea::Broken(sentence),
        }
    })
}

/// Handles give each read its owner.
fn handles(area: &Result<AioArea, NoArea>) -> Check {
    let problem = |sentence: &str| {
        Problem::from_sentence(
            sentence,
            "owners of reads by io workers are only inferred from pg_aios, and relations of reads through io_uring are \
             not known",
        )
    };
    match area {
        Ok(area) => {
            HANDLES.ok(format!("{} found, {} for each process", area.handle_count, area.handles_per_proc))
        }
        Err(NoArea::BeforeAio) => HANDLES.ok(
            "not needed: there is no asynchronous I/O before PostgreSQL 18, so each read is its caller's own",
        ),
        Err(NoArea::Missing(sentence)) => HANDLES.missing(problem(sentence)),
        Err(NoArea::Broken(sentence)) => HANDLES.broken(problem(sentence)),
    }
}

/// Whether a process has the shared library mapped; `None` when that cannot be seen.
fn maps_liburing(pid: Pid) -> Option<bool> {
    let maps = Process::new(i32::try_from(pid.0).ok()?).ok()?.maps().ok()?;
    let is_liburing = |path: &MMapPath| match path {
        MMapPath::Path(path) => {
            path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"liburing"))
        }
        _ => false,
    };
    Some(maps.iter().any(|map| is_liburing(&map.pathname)))
}

/// `is_mapped`: whether the postmaster maps the shared library, which a static build does not. `is_allowed`: whether
/// the server lists io_uring among the values of io_method, which is the better witness.
fn liburing(major: u16, is_mapped: Option<bool>, is_allowed: Option<bool>) -> Check {
    if major < FIRST_AIO_MAJOR {
        return LIBURING.ok("not needed: there is no io_method before PostgreSQL 18");
    }
    let detail = match (is_allowed, is_mapped) {
        (Some(true), _) => return LIBURING.ok("the server is built with it: io_method may be io_uring"),
        (None, Some(true)) => return LIBURING.ok("the server has it mapped: io_method may be io_uring"),
        (Some(false), _) => "the server is built without it: io_method has no value io_uring",
        (None, Some(false)) => "the server has no shared liburing mapped",
        (None, None) => {
            let problem = Problem::new(
                "not known: neither the server's settings nor its mappings can be read",
                "whether the server may use io_method=io_uring cannot be said",
            );
            return LIBURING.missing(problem.mend("run pgiotrace doctor as root"));
        }
    };
    let problem =
        Problem::new(detail, "io_method=io_uring cannot be used on this server; nothing else is lost");
    LIBURING.missing(problem.mend("install a PostgreSQL that is built with --with-liburing"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Status;

    #[test]
    fn a_server_is_required() {
        let check = SERVER.missing(no_server("no server was found in /proc; start the server first"));
        assert_eq!((check.status, check.required), (Status::Missing, true));
        assert_eq!(check.mend.as_deref(), Some("start the server first"));
        assert!(SERVER.missing(no_server("host \"x\" is not this machine")).mend.is_some());
    }

    #[test]
    fn what_cannot_be_found_says_what_to_give() {
        let nowhere = PathBuf::from("/no/such/data/directory");
        let check = find(&ConnectOptions::default(), Some(nowhere)).expect_err("there is no such directory");
        assert!(check.detail.contains("is not a PostgreSQL data directory"), "{}", check.detail);
        let string = ConnectOptions { dbname: Some("nonsense=1".to_owned()), ..ConnectOptions::default() };
        let check = find(&string, None).expect_err("it does not parse");
        assert!(check.required && check.mend.is_some_and(|mend| mend.contains("postgresql://")));
    }

    #[test]
    fn handles_are_not_missed_before_18() {
        let area = AioArea {
            handles: 8,
            handle_count: 1_400,
            iovecs: 8,
            iovec_count: 22_400,
            iovecs_per_handle: 16,
            handles_per_proc: 10,
        };
        assert_eq!(handles(&Ok(area)).detail, "1400 found, 10 for each process");
        assert_eq!(handles(&Err(NoArea::BeforeAio)).status, Status::Ok);
        let sentence = "reading pgaio_ctl failed: denied; run pgiotrace as root".to_owned();
        let broken = handles(&Err(NoArea::Broken(sentence)));
        assert_eq!((broken.status, broken.required), (Status::Broken, false));
        assert_eq!(broken.mend.as_deref(), Some("run pgiotrace as root"));
        assert_eq!(handles(&Err(NoArea::Missing("no".to_owned()))).status, Status::Missing);
    }

    #[test]
    fn the_server_knows_best_whether_it_has_liburing() {
        assert_eq!(liburing(17, Some(false), None).status, Status::Ok);
        for (is_mapped, is_allowed, status) in [
            (Some(false), Some(true), Status::Ok),
            (Some(true), Some(false), Status::Missing),
            (Some(true), None, Status::Ok),
            (Some(false), None, Status::Missing),
            (None, None, Status::Missing),
        ] {
            let check = liburing(18, is_mapped, is_allowed);
            assert_eq!((check.status, check.required), (status, false), "{is_mapped:?} {is_allowed:?}");
        }
    }

    #[test]
    fn this_process_has_no_liburing() {
        assert_eq!(maps_liburing(Pid(std::process::id())), Some(false));
        assert_eq!(maps_liburing(Pid(u32::MAX)), None);
    }
}
