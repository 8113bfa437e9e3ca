//! What a read in `pg_aios` reads.

/// `DEFAULTTABLESPACE_OID`, "pg_default", in PostgreSQL's `src/include/catalog/pg_tablespace.dat`.
const DEFAULT_TABLESPACE: u32 = 1663;
/// `GLOBALTABLESPACE_OID`, "pg_global", in the same file.
const GLOBAL_TABLESPACE: u32 = 1664;

/// Blocks of a relation fork.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AioTarget {
    /// Tablespace.
    pub tablespace_oid: u32,
    /// Database; 0 for shared relations.
    pub database_oid: u32,
    /// Relfilenode.
    pub relfilenumber: u32,
    /// 0 main, 1 fsm, 2 vm, 3 init.
    pub fork: u8,
    /// Whether the relation is a temporary one. Whose is not to be had here: the view shows the number of the
    /// backend that looks.
    pub is_temp: bool,
    /// First block, counted over all segments.
    pub first_block: u32,
    /// Last block.
    pub last_block: u32,
}

impl AioTarget {
    /// Reads `pg_aios.target_desc`: `block 7 in file "base/5/16384"`, `blocks 7..9 in file "global/1262_vm"`
    /// (`smgr_aio_describe_identity` in `smgr.c`); `None` for anything else.
    ///
    /// The server translates the words and their order, and only a superuser may ask for English; so this looks for
    /// the path and for the one or two numbers outside it, whatever stands between.
    #[must_use]
    pub fn parse(description: &str) -> Option<Self> {
        let is_of_path = |character: char| character.is_ascii_alphanumeric() || "/_.".contains(character);
        let start = ["base/", "global/", "pg_tblspc/"].iter().find_map(|root| description.find(root))?;
        let length = description[start..]
            .find(|character| !is_of_path(character))
            .unwrap_or(description.len() - start);
        let (path, after) = description[start..].split_at(length);

        let outside = [&description[..start], after];
        let digits =
            outside.iter().flat_map(|text| text.split(|character: char| !character.is_ascii_digit()));
        let numbers: Vec<u32> = digits.filter_map(|text| text.parse().ok()).collect();
        let (first_block, last_block) = match numbers[..] {
            [only] => (only, only),
            [first, last] if first <= last => (first, last),
            _ => return None,
        };
        Some(Self { first_block, last_block, ..Self::of_path(path)? })
    }

    /// Reads a relation's path (`GetRelationPath` in `src/common/relpath.c`); the blocks are still 0.
    fn of_path(path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.split('/').collect();
        let (tablespace_oid, database_oid, file) = match parts[..] {
            ["global", file] => (GLOBAL_TABLESPACE, 0, file),
            ["base", database, file] => (DEFAULT_TABLESPACE, database.parse().ok()?, file),
            ["pg_tblspc", tablespace, version, database, file] if version.starts_with("PG_") => {
                (tablespace.parse().ok()?, database.parse().ok()?, file)
            }
            _ => return None,
        };
        let temporary = file.strip_prefix('t').and_then(|rest| rest.split_once('_'));
        let file = match temporary {
            Some((backend, file)) => backend.parse::<u32>().ok().map(|_| file)?,
            None => file,
        };
        let (number, fork) = file.split_once('_').unwrap_or((file, ""));
        let fork = match fork {
            "" => 0,
            "fsm" => 1,
            "vm" => 2,
            "init" => 3,
            _ => return None,
        };
        Some(Self {
            tablespace_oid,
            database_oid,
            relfilenumber: number.parse().ok()?,
            fork,
            is_temp: temporary.is_some(),
            first_block: 0,
            last_block: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: AioTarget = AioTarget {
        tablespace_oid: 1663,
        database_oid: 5,
        relfilenumber: 16384,
        fork: 0,
        is_temp: false,
        first_block: 7,
        last_block: 7,
    };

    #[test]
    fn one_block_and_several() {
        assert_eq!(AioTarget::parse(r#"block 7 in file "base/5/16384""#), Some(TABLE));
        let several = AioTarget { last_block: 22, ..TABLE };
        assert_eq!(AioTarget::parse(r#"blocks 7..22 in file "base/5/16384""#), Some(several));
    }

    #[test]
    fn every_place_a_relation_may_lie_in() {
        let shared = AioTarget { tablespace_oid: 1664, database_oid: 0, relfilenumber: 1262, ..TABLE };
        assert_eq!(AioTarget::parse(r#"block 7 in file "global/1262""#), Some(shared));
        let elsewhere = AioTarget { tablespace_oid: 16390, ..TABLE };
        let text = r#"block 7 in file "pg_tblspc/16390/PG_18_202506291/5/16384""#;
        assert_eq!(AioTarget::parse(text), Some(elsewhere));
        let text = r#"block 7 in file "pg_tblspc/16390/PG_18_202506291/5/t3_16384""#;
        assert_eq!(AioTarget::parse(text), Some(AioTarget { is_temp: true, ..elsewhere }));
    }

    #[test]
    fn every_fork() {
        for (suffix, fork) in [("", 0), ("_fsm", 1), ("_vm", 2), ("_init", 3)] {
            let text = format!("block 7 in file \"base/5/16384{suffix}\"");
            assert_eq!(AioTarget::parse(&text), Some(AioTarget { fork, ..TABLE }));
            let text = format!("block 7 in file \"base/5/t12_16384{suffix}\"");
            assert_eq!(AioTarget::parse(&text), Some(AioTarget { fork, is_temp: true, ..TABLE }));
        }
    }

    #[test]
    fn other_languages_say_the_same() {
        let several = AioTarget { last_block: 22, ..TABLE };
        for text in [
            "Blöcke 7..22 in Datei »base/5/16384«",
            "blocs 7..22 dans le fichier « base/5/16384 »",
            "ファイル\"base/5/16384\"のブロック7..22",
        ] {
            assert_eq!(AioTarget::parse(text), Some(several), "{text}");
        }
    }

    #[test]
    fn anything_else_is_not_understood() {
        for text in [
            "",
            "file \"pg_wal/000000010000000000000001\"",
            "block 7 in file \"base/5\"",
            "block 7 in file \"base/5/16384_other\"",
            "block 7 in file \"base/5/16384.1\"",
            "block 7 in file \"base/5/tx_16384\"",
            "block in file \"base/5/16384\"",
            "blocks 9..7 in file \"base/5/16384\"",
            "blocks 1..2..3 in file \"base/5/16384\"",
            "block 7 in file \"pg_tblspc/1/18/5/16384\"",
            "block 7 in file \"base/99999999999/1\"",
        ] {
            assert_eq!(AioTarget::parse(text), None, "{text}");
        }
    }
}
