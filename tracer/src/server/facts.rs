//! What a server says about itself.

use std::collections::BTreeMap;
use std::fmt;

use postgres::Client;

use super::InnerPid;

/// Settings that are asked for; those that the role may not see are missing in `pg_settings`.
const SETTINGS: [&str; 14] = [
    "block_size",
    "cluster_name",
    "compute_query_id",
    "debug_io_direct",
    "effective_io_concurrency",
    "io_combine_limit",
    "io_max_concurrency",
    "io_max_workers",
    "io_method",
    "io_workers",
    "server_version",
    "shared_buffers",
    "track_activity_query_size",
    "track_io_timing",
];

/// What a server says about itself and about the role that asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerFacts {
    /// `server_version`: "18.6 (Debian 18.6-3)".
    pub version: String,
    /// `sync`, `worker` or `io_uring`; `None` before PostgreSQL 18.
    pub io_method: Option<String>,
    /// `io_workers`, or from PostgreSQL 19 on `io_max_workers`; `None` before 18.
    pub io_workers: Option<u32>,
    /// `track_io_timing`.
    pub track_io_timing: bool,
    /// All settings that were asked for and seen, as `SHOW` writes them (`128kB`).
    pub settings: BTreeMap<String, String>,
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
    /// What a server of version 18 says to a member of `pg_monitor`, for tests.
    #[cfg(test)]
    pub(crate) fn example() -> Self {
        Self {
            version: "18.6".to_owned(),
            io_method: Some("worker".to_owned()),
            io_workers: Some(3),
            track_io_timing: false,
            settings: BTreeMap::new(),
            user: "alice".to_owned(),
            database: "shop".to_owned(),
            backend: InnerPid(1),
            reads_all_stats: true,
            is_monitor: true,
            reads_aios: Some(true),
        }
    }

    /// What the role's missing rights cost, and how to mend it; `None` when nothing is missing.
    #[must_use]
    pub fn missing_rights(&self) -> Option<MissingRights> {
        let stats = "backend types and parallel leaders of other roles' sessions are missing";
        let aios = "traced reads are not checked against pg_aios";
        let cost = match (self.reads_all_stats, self.reads_aios) {
            (false, Some(false)) => format!("{stats} and {aios}"),
            (false, _) => stats.to_owned(),
            (true, Some(false)) => aios.to_owned(),
            (true, _) => return None,
        };
        let user = self.user.replace('"', "\"\"");
        Some(MissingRights { cost, mend: format!("GRANT pg_monitor TO \"{user}\""), user })
    }
}

/// What a role may not see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingRights {
    /// The role, as it stands between double quotes.
    pub user: String,
    /// What is missing without the rights.
    pub cost: String,
    /// The statement that gives them.
    pub mend: String,
}

impl fmt::Display for MissingRights {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { user, cost, mend } = self;
        write!(formatter, "role \"{user}\" lacks rights, so {cost}; {mend} mends it")
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
        "SELECT name, pg_catalog.current_setting(name) FROM pg_catalog.pg_settings
        WHERE name = ANY ($1)",
        &[&SETTINGS.as_slice()],
    )?;
    let mut settings = BTreeMap::new();
    for row in rows {
        settings.insert(row.try_get::<_, String>("name")?, row.try_get::<_, String>("current_setting")?);
    }
    let setting = |name: &str| settings.get(name).cloned();
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
        io_method: setting("io_method"),
        io_workers: number(setting("io_workers")).or_else(|| number(setting("io_max_workers"))),
        track_io_timing: setting("track_io_timing").as_deref() == Some("on"),
        user: row.try_get(0)?,
        database: row.try_get(1)?,
        backend: InnerPid(row.try_get::<_, i32>(2)?.unsigned_abs()),
        reads_all_stats: row.try_get(3)?,
        is_monitor: row.try_get(4)?,
        reads_aios: row.try_get(5)?,
        settings,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(reads_all_stats: bool, reads_aios: Option<bool>) -> ServerFacts {
        ServerFacts { reads_all_stats, is_monitor: reads_all_stats, reads_aios, ..ServerFacts::example() }
    }

    #[test]
    fn missing_rights_say_what_they_cost() {
        assert_eq!(
            facts(false, Some(false)).missing_rights().map(|missing| missing.to_string()).as_deref(),
            Some(
                "role \"alice\" lacks rights, so backend types and parallel leaders of other roles' \
                 sessions are missing and traced reads are not checked against pg_aios; \
                 GRANT pg_monitor TO \"alice\" mends it"
            )
        );
        assert_eq!(facts(true, Some(true)).missing_rights(), None);
        assert_eq!(facts(true, None).missing_rights(), None, "before 18 there is no pg_aios to miss");
        assert!(facts(false, None).missing_rights().is_some_and(|missing| !missing.cost.contains("pg_aios")));
    }
}
