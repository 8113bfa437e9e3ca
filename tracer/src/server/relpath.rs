//! What a file of the data directory is, by its path.

use crate::model::io::{Fork, RelationFork, Subject};

/// `DEFAULTTABLESPACE_OID` and `GLOBALTABLESPACE_OID` of PostgreSQL's `src/include/catalog/pg_tablespace.dat`.
const DEFAULT_TABLESPACE: u32 = 1663;
const GLOBAL_TABLESPACE: u32 = 1664;

/// A relation's segment file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// The relation.
    pub relation: RelationFork,
    /// Number of the segment.
    pub number: u32,
}

/// The segment that a path relative to the data directory names (`GetRelationPath` in PostgreSQL's
/// `src/common/relpath.c`); `None` when it is no relation's.
#[must_use]
pub fn segment_of(path: &str) -> Option<Segment> {
    let parts: Vec<&str> = path.split('/').collect();
    let (tablespace_oid, database_oid, file) = match parts[..] {
        ["global", file] => (GLOBAL_TABLESPACE, 0, file),
        ["base", database, file] => (DEFAULT_TABLESPACE, database.parse().ok()?, file),
        ["pg_tblspc", tablespace, version, database, file] if version.starts_with("PG_") => {
            (tablespace.parse().ok()?, database.parse().ok()?, file)
        }
        _ => return None,
    };
    let (temporary, relfilenumber, fork, number) = parse_file_name(file)?;
    let relation = RelationFork { tablespace_oid, database_oid, relfilenumber, fork, temporary };
    Some(Segment { relation, number })
}

/// Parts of a name like `16384`, `16384_vm`, `16384.3`, `t7_16390_fsm.1`.
fn parse_file_name(name: &str) -> Option<(bool, u32, Fork, u32)> {
    let (name, segment) = match name.split_once('.') {
        Some((name, segment)) => (name, segment.parse().ok()?),
        None => (name, 0),
    };
    let (temporary, name) = match name.strip_prefix('t') {
        Some(rest) => {
            let (backend, name) = rest.split_once('_')?;
            backend.parse::<u32>().ok()?;
            (true, name)
        }
        None => (false, name),
    };
    let (number, fork) = match name.split_once('_') {
        Some((number, fork)) => (number, Fork::from_name(fork).filter(|fork| *fork != Fork::Main)?),
        None => (name, Fork::Main),
    };
    Some((temporary, number.parse().ok()?, fork, segment))
}

/// What a report calls the file of this path.
#[must_use]
pub fn subject_of(path: &str) -> Subject {
    match segment_of(path) {
        Some(segment) => Subject::Relation(segment.relation),
        None => Subject::Folder(path.rsplit_once('/').map_or(".", |(folder, _)| folder).to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relation(path: &str) -> Option<(u32, u32, u32, Fork, bool, u32)> {
        segment_of(path).map(|Segment { relation: r, number }| {
            (r.tablespace_oid, r.database_oid, r.relfilenumber, r.fork, r.temporary, number)
        })
    }

    #[test]
    fn paths_of_relations_are_taken_apart() {
        assert_eq!(relation("base/5/16384"), Some((1663, 5, 16384, Fork::Main, false, 0)));
        assert_eq!(relation("base/5/16384.12"), Some((1663, 5, 16384, Fork::Main, false, 12)));
        assert_eq!(relation("base/5/16384_vm"), Some((1663, 5, 16384, Fork::VisibilityMap, false, 0)));
        assert_eq!(relation("base/5/t3_16390_fsm.1"), Some((1663, 5, 16390, Fork::FreeSpaceMap, true, 1)));
        assert_eq!(relation("global/1262"), Some((1664, 0, 1262, Fork::Main, false, 0)));
        assert_eq!(
            relation("pg_tblspc/16500/PG_18_202506291/5/16501"),
            Some((16500, 5, 16501, Fork::Main, false, 0))
        );
    }

    #[test]
    fn other_files_are_no_relations() {
        for path in [
            "base/5/pg_filenode.map",
            "base/pgsql_tmp/pgsql_tmp4242.0",
            "pg_wal/000000010000000000000001",
            "global/pg_control",
            "postmaster.pid",
            "base/5/16384_nofork",
            "base/5/16384.x",
            "elsewhere/5/16384",
            "",
        ] {
            assert_eq!(segment_of(path), None, "{path}");
        }
        assert_eq!(subject_of("pg_wal/000000010000000000000001"), Subject::Folder("pg_wal".to_owned()));
        assert_eq!(subject_of("postmaster.pid"), Subject::Folder(".".to_owned()));
    }
}
