//! What a read in `pg_aios` reads.

use crate::{model::io::RelationFork, server::relpath};

/// Blocks of a relation fork.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AioTarget {
    /// What is read. Whose a temporary relation is cannot be told: the view shows the number of the backend that
    /// looks.
    pub relation: RelationFork,
    /// First block, counted over all segments.
    pub first_block: u32,
    /// Last block.
    pub last_block: u32,
}

impl AioTarget {
    /// Reads `pg_aios.target_desc`: `block 7 in file "base/5/16384"`, `blocks 7..9 in file "global/1262_vm"`
    /// (`smgr_aio_describe_identity` in `smgr.c`); `None` for anything else.
    ///
    /// The server translates the words and their order, and only a superuser may ask for English; so this
    /// looks for the path and for the one or two numbers outside it, whatever stands between.
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
        // The view names the relation, never a segment of it.
        let segment = relpath::segment_of(path).filter(|_| !path.contains('.'))?;
        Some(Self { relation: segment.relation, first_block, last_block })
    }

    /// Number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.last_block - self.first_block + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::io::Fork;

    const RELATION: RelationFork = RelationFork {
        tablespace_oid: 1663,
        database_oid: 5,
        relfilenumber: 16384,
        fork: Fork::Main,
        temporary: false,
    };
    const TABLE: AioTarget = AioTarget { relation: RELATION, first_block: 7, last_block: 7 };

    fn with(relation: RelationFork) -> AioTarget {
        AioTarget { relation, ..TABLE }
    }

    #[test]
    fn one_block_and_several() {
        assert_eq!(AioTarget::parse(r#"block 7 in file "base/5/16384""#), Some(TABLE));
        let several = AioTarget { last_block: 22, ..TABLE };
        assert_eq!(AioTarget::parse(r#"blocks 7..22 in file "base/5/16384""#), Some(several));
    }

    #[test]
    fn every_place_a_relation_may_lie_in() {
        let shared = RelationFork { tablespace_oid: 1664, database_oid: 0, relfilenumber: 1262, ..RELATION };
        assert_eq!(AioTarget::parse(r#"block 7 in file "global/1262""#), Some(with(shared)));
        let elsewhere = RelationFork { tablespace_oid: 16390, ..RELATION };
        let text = r#"block 7 in file "pg_tblspc/16390/PG_18_202506291/5/16384""#;
        assert_eq!(AioTarget::parse(text), Some(with(elsewhere)));
        let text = r#"block 7 in file "pg_tblspc/16390/PG_18_202506291/5/t3_16384""#;
        assert_eq!(AioTarget::parse(text), Some(with(RelationFork { temporary: true, ..elsewhere })));
    }

    #[test]
    fn every_fork() {
        for fork in [Fork::FreeSpaceMap, Fork::VisibilityMap, Fork::Init] {
            let text = format!("block 7 in file \"base/5/16384_{fork}\"");
            assert_eq!(AioTarget::parse(&text), Some(with(RelationFork { fork, ..RELATION })));
            let text = format!("block 7 in file \"base/5/t12_16384_{fork}\"");
            assert_eq!(
                AioTarget::parse(&text),
                Some(with(RelationFork { fork, temporary: true, ..RELATION }))
            );
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
