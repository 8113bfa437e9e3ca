//! Names of operating-system users, as the server and as the tracer see them.

use std::fs;
use std::path::Path;

use super::discover::Server;

/// Name of the user who owns the postmaster, looked up in the server's own `/etc/passwd`, then in the
/// tracer's.
pub(super) fn owner_name(server: &Server) -> Option<String> {
    let map = fs::read_to_string(format!("/proc/{}/uid_map", server.postmaster)).unwrap_or_default();
    let inside = name_in(&server.host_path(Path::new("/etc/passwd")), inner_uid(&map, server.uid));
    inside.or_else(|| own_name(server.uid))
}

/// Name of a user of the tracer's own system.
pub(super) fn own_name(uid: u32) -> Option<String> {
    name_in(Path::new("/etc/passwd"), uid)
}

fn name_in(file: &Path, uid: u32) -> Option<String> {
    find_name(&fs::read_to_string(file).ok()?, uid).map(str::to_owned)
}

/// The name of a user in the text of a `passwd` file.
fn find_name(passwd: &str, uid: u32) -> Option<&str> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        (fields.nth(1)?.parse() == Ok(uid)).then_some(name)
    })
}

/// A user's number inside a container, by the text of `/proc/PID/uid_map` (`user_namespaces(7)`): lines of
/// first inside, first outside, count.
fn inner_uid(uid_map: &str, uid: u32) -> u32 {
    let range = |line: &str| {
        let mut numbers = line.split_whitespace().map(str::parse::<u32>);
        let (inside, outside, count) = (numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?);
        let distance = uid.checked_sub(outside).filter(|distance| *distance < count)?;
        inside.checked_add(distance)
    };
    uid_map.lines().find_map(range).unwrap_or(uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found_by_number() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\n# comment\nbroken\n\
            postgres:x:101:104:PostgreSQL,,,:/home:/bin/sh\n";
        assert_eq!(find_name(passwd, 101), Some("postgres"));
        assert_eq!(find_name(passwd, 0), Some("root"));
        assert_eq!(find_name(passwd, 104), None);
        assert_eq!(find_name("", 0), None);
    }

    #[test]
    fn a_user_namespace_shifts_numbers() {
        assert_eq!(inner_uid("         0          0 4294967295\n", 101), 101);
        assert_eq!(inner_uid("0 1000 1\n1 100000 65536\n", 100_998), 999);
        assert_eq!(inner_uid("0 1000 1\n1 100000 65536\n", 1000), 0);
        assert_eq!(inner_uid("", 70), 70);
    }
}
