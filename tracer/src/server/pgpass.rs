//! The password file `.pgpass`.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What a password is wanted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted<'a> {
    /// Names that a line may give the host: `localhost` and the directory for a Unix socket.
    pub hosts: &'a [String],
    /// TCP port, or that of the socket.
    pub port: u16,
    /// Database.
    pub database: &'a str,
    /// Role.
    pub user: &'a str,
}

/// The text of a password file; `Err` is a sentence that says why it is ignored, `Ok(None)` that there is
/// none.
///
/// As libpq (`passwordFromFile` in `fe-connect.c`): anything but a plain file, and a file that others may
/// read, is ignored with a warning.
pub(super) fn read(path: &Path) -> Result<Option<String>, String> {
    let Ok(found) = fs::metadata(path) else { return Ok(None) };
    let path_text = path.display();
    if !found.is_file() {
        return Err(format!("the password file {path_text} is ignored: it is not a plain file"));
    }
    if found.mode() & 0o077 != 0 {
        return Err(format!(
            "the password file {path_text} is ignored: others may read it; run chmod 0600 {path_text}"
        ));
    }
    fs::read_to_string(path)
        .map(Some)
        .map_err(|error| format!("the password file {path_text} is ignored: reading it failed: {error}"))
}

/// The password of the first line that matches.
pub(super) fn find(text: &str, wanted: &Wanted) -> Option<String> {
    let port = wanted.port.to_string();
    text.lines().filter(|line| !line.starts_with('#')).find_map(|line| {
        let [host, line_port, database, user, password] = fields(line)?;
        let fits = |field: &Field, value: &str| field.is_wildcard || field.value == value;
        let host_fits = wanted.hosts.iter().any(|name| fits(&host, name));
        let all_fit = host_fits
            && fits(&line_port, &port)
            && fits(&database, wanted.database)
            && fits(&user, wanted.user);
        all_fit.then_some(password.value)
    })
}

/// One of the five fields of a line.
#[derive(Debug, Default, PartialEq, Eq)]
struct Field {
    value: String,
    /// A `*` that is not escaped, alone.
    is_wildcard: bool,
}

/// `host:port:database:user:password`; a backslash makes a colon or a backslash part of a field.
fn fields(line: &str) -> Option<[Field; 5]> {
    let mut fields: [Field; 5] = Default::default();
    let mut index = 0;
    let mut is_escaped = false;
    for character in line.chars() {
        let is_password = index == fields.len() - 1;
        match character {
            '\\' if !is_escaped => is_escaped = true,
            // The password ends at a colon too, as in libpq.
            ':' if !is_escaped && is_password => break,
            ':' if !is_escaped => index += 1,
            _ => {
                let field = &mut fields[index];
                field.is_wildcard = character == '*' && !is_escaped && field.value.is_empty();
                field.value.push(character);
                is_escaped = false;
            }
        }
    }
    (index == fields.len() - 1 && !fields[index].value.is_empty()).then_some(fields)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn password(text: &str) -> Option<String> {
        let hosts = ["localhost".to_owned(), "/run/postgresql".to_owned()];
        find(text, &Wanted { hosts: &hosts, port: 5432, database: "shop", user: "alice" })
    }

    #[test]
    fn the_first_line_that_matches_wins() {
        let text = "db:5432:shop:alice:1\nlocalhost:5433:shop:alice:2\nlocalhost:5432:*:alice:3\n*:*:*:*:4\n";
        assert_eq!(password(text).as_deref(), Some("3"));
    }

    #[test]
    fn a_socket_is_localhost_or_its_directory() {
        assert_eq!(password("/run/postgresql:5432:shop:alice:x").as_deref(), Some("x"));
        assert_eq!(password("localhost:5432:shop:alice:x").as_deref(), Some("x"));
        assert_eq!(password("127.0.0.1:5432:shop:alice:x"), None);
    }

    #[test]
    fn colons_and_backslashes_are_escaped() {
        assert_eq!(password(r"*:*:*:*:a\:b\\c").as_deref(), Some(r"a:b\c"));
        assert_eq!(password(r"*:*:sh\op:*:x").as_deref(), Some("x"));
        assert_eq!(password(r"*:*:\*:*:x"), None);
    }

    #[test]
    fn comments_and_broken_lines_are_skipped() {
        assert_eq!(
            password("# *:*:*:*:no\n\nlocalhost:5432\n*:*:*:*:\n*:*:*:*:yes\n").as_deref(),
            Some("yes")
        );
        assert_eq!(password(""), None);
    }

    #[test]
    fn a_star_within_a_field_is_no_wildcard() {
        assert_eq!(password("*:*:s*:*:x"), None);
        assert_eq!(password("*:*:**:*:x"), None);
    }

    #[test]
    fn a_file_that_others_may_read_is_ignored() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join(".pgpass");
        assert_eq!(read(&path), Ok(None));
        fs::write(&path, "*:*:*:*:x").expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("its permissions");
        let warning = read(&path).expect_err("the group may read it");
        assert!(warning.contains("chmod 0600"), "{warning}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("its permissions");
        assert_eq!(read(&path), Ok(Some("*:*:*:*:x".to_owned())));
        assert!(read(directory.path()).is_err());
    }
}
