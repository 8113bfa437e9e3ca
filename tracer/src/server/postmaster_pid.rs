//! The file `postmaster.pid` in a data directory.

use std::path::PathBuf;

use super::InnerPid;

/// What a server writes about itself into its data directory.
///
/// Lines as `LOCK_FILE_LINE_…` in PostgreSQL's `src/include/utils/pidfile.h` numbers them. A server that is
/// starting has written only the first ones, so all but the PID may be missing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PostmasterPid {
    /// Line 1. A stand-alone backend writes its PID negated; such a file is refused.
    pub pid: Option<InnerPid>,
    /// Line 2.
    pub data_directory: Option<PathBuf>,
    /// Line 3, seconds since 1970.
    pub start_time: Option<u64>,
    /// Line 4.
    pub port: Option<u16>,
    /// Line 5: the first of `unix_socket_directories`.
    pub socket_directory: Option<PathBuf>,
    /// Line 6: the first of `listen_addresses`, `*` when all.
    pub listen_address: Option<String>,
    /// Line 7: key and identifier of the shared memory segment.
    pub shared_memory: Option<String>,
}

/// Reads the text of a `postmaster.pid`; what does not parse is `None`.
pub(super) fn parse(text: &str) -> PostmasterPid {
    let mut lines = text.lines().map(str::trim).map(|line| (!line.is_empty()).then_some(line));
    let mut next = || lines.next().flatten();
    PostmasterPid {
        pid: next().and_then(|line| line.parse().ok()).filter(|pid| *pid != 0).map(InnerPid),
        data_directory: next().map(PathBuf::from),
        start_time: next().and_then(|line| line.parse().ok()),
        port: next().and_then(|line| line.parse().ok()),
        socket_directory: next().map(PathBuf::from),
        listen_address: next().map(str::to_owned),
        shared_memory: next().map(str::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_server_fills_every_line() {
        let parsed =
            parse("812\n/var/lib/pg/18\n1790000000\n5433\n/run/postgresql\nlocalhost\n  1049 3\nready   \n");
        assert_eq!(
            parsed,
            PostmasterPid {
                pid: Some(InnerPid(812)),
                data_directory: Some("/var/lib/pg/18".into()),
                start_time: Some(1_790_000_000),
                port: Some(5433),
                socket_directory: Some("/run/postgresql".into()),
                listen_address: Some("localhost".to_owned()),
                shared_memory: Some("1049 3".to_owned()),
            }
        );
    }

    #[test]
    fn a_server_without_sockets_or_addresses_leaves_lines_empty() {
        let parsed = parse("812\n/data\n1790000000\n5433\n\n\n");
        assert_eq!((parsed.socket_directory, parsed.listen_address), (None, None));
        assert_eq!(parsed.port, Some(5433));
    }

    #[test]
    fn a_starting_server_has_written_only_the_first_lines() {
        let parsed = parse("812\n/data\n1790000000\n5433\n");
        assert_eq!((parsed.pid, parsed.port), (Some(InnerPid(812)), Some(5433)));
        assert_eq!(parsed.socket_directory, None);
    }

    #[test]
    fn a_stand_alone_backend_is_no_server() {
        assert_eq!(parse("-812\n/data\n").pid, None);
    }

    #[test]
    fn garbage_is_nothing() {
        for text in ["", "\n\n\n", "\u{0}\u{1}", "pid\nx\ny\nz", "0\n", "99999999999999\n"] {
            let parsed = parse(text);
            assert_eq!((parsed.pid, parsed.port), (None, None), "{text:?}");
        }
    }

    #[test]
    fn a_port_beyond_the_range_is_none() {
        assert_eq!(parse("1\n/data\n2\n70000\n").port, None);
    }
}
