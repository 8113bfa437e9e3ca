//! What a server says about itself.

use std::collections::HashMap;
use std::path::PathBuf;

use postgres::Client;

use super::InnerPid;

/// Settings that are asked for; those that the role may not see are missing in `pg_settings`.
const SETTINGS: [&str; 11] = [
    "server_version",
    "server_version_num",
    "block_size",
    "segment_size",
    "max_connections",
    "io_method",
    "io_workers",
    "io_max_workers",
    "data_directory",
    "track_io_timing",
    "compute_query_id",
];

/// What a server says about itself and about the role that asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerFacts {
    /// `server_version`: "18.6 (Debian 18.6-3)".
    pub version: String,
    /// `server_version_num`: 180006.
    pub version_num: u32,
    /// `sync`, `worker` or `io_uring`; `None` before PostgreSQL 18.
    pub io_method: Option<String>,
    /// `io_workers`, or from PostgreSQL 19 on `io_max_workers`; `None` before 18.
    pub io_workers: Option<u32>,
    /// Bytes of a block.
    pub block_size: u32,
    /// Blocks of a full segment file.
    pub segment_blocks: u32,
    /// `max_connections`.
    pub max_connections: u32,
    /// `data_directory`; `None` where the role may not see it.
    pub data_directory: Option<PathBuf>,
    /// `track_io_timing`.
    pub track_io_timing: bool,
    /// `compute_query_id`: `auto`, `on`, `off`, `regress`.
    pub compute_query_id: String,
    /// The role that asks.
    pub user: String,
    /// Database of the session.
    pub database: String,
    /// The session's own process.
    pub backend: InnerPid,
    /// Whether the role has the rights of `pg_read_all_stats`: else other roles' sessions show little.
    pub reads_all_stats: bool,
    /// Whether the role has the rights of `pg_monitor`.
    pub is_monitor: bool,
    /// Whether the role may read `pg_aios`; `None` where there is no such view.
    pub reads_aios: Option<bool>,
}

impl ServerFacts {
    /// What the role's missing rights cost and how to mend it, in one sentence; `None` when nothing is
    /// missing.
    #[must_use]
    pub fn missing_rights(&self) -> Option<String> {
        let user = self.user.replace('"', "\"\"");
        let mend = format!("GRANT pg_monitor TO \"{user}\" mends it");
        let stats = "backend types and parallel leaders of other roles' sessions are missing";
        let aios = "traced reads are not checked against pg_aios";
        let cost = match (self.reads_all_stats, self.reads_aios) {
            (false, Some(false)) => format!("{stats} and {aios}"),
            (false, _) => stats.to_owned(),
            (true, Some(false)) => aios.to_owned(),
            (true, _) => return None,
        };
        Some(format!("role \"{user}\" lacks rights, so {cost}; {mend}"))
    }
}

/// Asks a server.
///
/// # Errors
///
/// What the server or the connection said.
pub fn facts(client: &mut Client) -> Result<ServerFacts, postgres::Error> {
    // Not SHOW or current_setting(): they fail where the role may not see a setting, and the view leaves it
    // out.
    let rows = client.query(
        "SELECT name, setting FROM pg_catalog.pg_settings WHERE name = ANY ($1)",
        &[&SETTINGS.as_slice()],
    )?;
    let mut settings = HashMap::new();
    for row in rows {
        settings.insert(row.try_get::<_, String>(0)?, row.try_get::<_, String>(1)?);
    }
    let mut setting = |name: &str| settings.remove(name);
    // A setting that every version has parses; the fallbacks are the defaults of pg_config.h and
    // guc_tables.c.
    let number = |value: Option<String>| value.and_then(|value| value.parse::<u32>().ok());
    let row = client.query_one(
        "SELECT current_user::text, pg_catalog.current_database()::text, pg_catalog.pg_backend_pid(),
                pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE'),
                pg_catalog.pg_has_role('pg_monitor', 'USAGE'),
                pg_catalog.has_table_privilege(pg_catalog.to_regclass('pg_catalog.pg_aios')::oid, 'SELECT')",
        &[],
    )?;
    Ok(ServerFacts {
        version: setting("server_version").unwrap_or_default(),
        version_num: number(setting("server_version_num")).unwrap_or_default(),
        io_method: setting("io_method"),
        io_workers: number(setting("io_workers")).or_else(|| number(setting("io_max_workers"))),
        block_size: number(setting("block_size")).unwrap_or(8192),
        segment_blocks: number(setting("segment_size")).unwrap_or(131_072),
        max_connections: number(setting("max_connections")).unwrap_or(100),
        data_directory: setting("data_directory").map(PathBuf::from),
        track_io_timing: setting("track_io_timing").as_deref() == Some("on"),
        compute_query_id: setting("compute_query_id").unwrap_or_default(),
        user: row.try_get(0)?,
        database: row.try_get(1)?,
        backend: InnerPid(row.try_get::<_, i32>(2)?.unsigned_abs()),
        reads_all_stats: row.try_get(3)?,
        is_monitor: row.try_get(4)?,
        reads_aios: row.try_get(5)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(reads_all_stats: bool, reads_aios: Option<bool>) -> ServerFacts {
        ServerFacts {
            version: "18.6".to_owned(),
            version_num: 180_006,
            io_method: None,
            io_workers: None,
            block_size: 8192,
            segment_blocks: 131_072,
            max_connections: 100,
            data_directory: None,
            track_io_timing: false,
            compute_query_id: "auto".to_owned(),
            user: "alice".to_owned(),
            database: "shop".to_owned(),
            backend: InnerPid(1),
            reads_all_stats,
            is_monitor: reads_all_stats,
            reads_aios,
        }
    }

    #[test]
    fn missing_rights_say_what_they_cost() {
        assert_eq!(
            facts(false, Some(false)).missing_rights().as_deref(),
            Some(
                "role \"alice\" lacks rights, so backend types and parallel leaders of other roles' \
                 sessions are missing and traced reads are not checked against pg_aios; \
                 GRANT pg_monitor TO \"alice\" mends it"
            )
        );
        assert_eq!(facts(true, Some(true)).missing_rights(), None);
        assert_eq!(facts(true, None).missing_rights(), None, "before 18 there is no pg_aios to miss");
        assert!(facts(false, None).missing_rights().is_some_and(|text| !text.contains("pg_aios")));
    }
}
