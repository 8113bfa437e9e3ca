//! `--cold`: empties the caches of a query's relations, and the host's, after asking.

use std::{
    fs::{self, OpenOptions},
    io::{self, BufRead, IsTerminal, Write},
};

use anyhow::anyhow;
use postgres::Client;

use crate::server::connect::innermost;

/// What drops the page cache, when 1 is written to it (Documentation/admin-guide/sysctl/vm.rst).
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";
/// How often buffers are evicted that somebody held at that moment.
const ATTEMPTS: u32 = 5;

const QUESTION: &str = "--cold drops the page cache of this whole host, which slows down everything on it for a while. Go on? [y/N] ";
const WITHOUT_TERMINAL: &str =
    "--cold drops the page cache of this whole host and there is no terminal to ask on: --yes allows it";

/// May caches be emptied?
pub enum Consent {
    /// Yes.
    Given,
    /// Somebody said no.
    Refused,
    /// Nobody could be asked; why that is wrong usage.
    Unasked(&'static str),
}

/// Asks the person at the terminal.
///
/// # Errors
///
/// When the terminal cannot be read from or written to.
pub fn ask() -> anyhow::Result<Consent> {
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return Ok(Consent::Unasked(WITHOUT_TERMINAL));
    }
    let failed = |error| anyhow!("asking on the terminal failed: {error}; --yes makes it unnecessary");
    anstream::eprint!("{QUESTION}");
    io::stderr().flush().map_err(failed)?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer).map_err(failed)?;
    let is_yes = ["y", "yes"].contains(&answer.trim().to_ascii_lowercase().as_str());
    Ok(if is_yes { Consent::Given } else { Consent::Refused })
}

/// Makes sure that the host's page cache can be dropped at all, without doing it.
///
/// # Errors
///
/// Why not, and what to do.
pub fn require() -> anyhow::Result<()> {
    OpenOptions::new().write(true).open(DROP_CACHES).map(drop).map_err(|error| no_rights(&error))
}

fn no_rights(error: &io::Error) -> anyhow::Error {
    anyhow!(
        "--cold cannot drop the page cache of this host (writing to {DROP_CACHES} failed: {error}); run it as root, outside of \
         a container, or leave --cold out"
    )
}

/// Writes back what is dirty, and drops the host's page cache.
///
/// # Errors
///
/// As [`require`].
pub fn drop_page_cache() -> anyhow::Result<()> {
    rustix::fs::sync();
    fs::write(DROP_CACHES, "1").map_err(|error| no_rights(&error))
}

/// Evicts relations from `shared_buffers`; what of them may still be there, in one sentence, if anything.
pub fn evict(client: &mut Client, relations: &[u32]) -> Option<String> {
    match try_to_evict(client, relations) {
        Ok(0) => None,
        Ok(skipped) => Some(format!(
            "{skipped} pages of the query's relations stayed in shared_buffers, because somebody held them"
        )),
        Err(reason) => Some(format!(
            "shared_buffers may still hold pages of the query's relations ({reason}); only the host's page cache was emptied"
        )),
    }
}

fn try_to_evict(client: &mut Client, relations: &[u32]) -> Result<u64, String> {
    const FUNCTION: &str =
        // Only the extension's own: anybody who may create a function could give one that name, and a superuser calls it.
        "SELECT pg_catalog.quote_ident(n.nspname), pg_catalog.current_setting('is_superuser')
        FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace
            JOIN pg_catalog.pg_depend d ON d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_proc'::pg_catalog.regclass
                AND d.objid OPERATOR(pg_catalog.=) p.oid AND d.deptype OPERATOR(pg_catalog.=) 'e'
            JOIN pg_catalog.pg_extension e ON e.oid OPERATOR(pg_catalog.=) d.refobjid
        WHERE p.proname OPERATOR(pg_catalog.=) 'pg_buffercache_evict_relation'
            AND e.extname OPERATOR(pg_catalog.=) 'pg_buffercache'";
    let failed = |error: postgres::Error| innermost(&error);
    let found = client.query_opt(FUNCTION, &[]).map_err(failed)?;
    let found = found
        .ok_or("emptying them needs PostgreSQL 18 and CREATE EXTENSION pg_buffercache in this database")?;
    let (schema, is_superuser): (String, String) =
        (found.try_get(0).map_err(failed)?, found.try_get(1).map_err(failed)?);
    if is_superuser != "on" {
        return Err("emptying them needs a superuser".to_owned());
    }
    let evict =
        format!("SELECT buffers_skipped FROM {schema}.pg_buffercache_evict_relation($1::oid::regclass)");
    let statement = client.prepare(&evict).map_err(failed)?;
    let mut left = 0;
    for relation in relations {
        let mut skipped = 0;
        for _ in 0..ATTEMPTS {
            let row = client.query_one(&statement, &[relation]).map_err(failed)?;
            skipped = row.try_get::<_, i32>(0).map_err(failed)?.unsigned_abs();
            if skipped == 0 {
                break;
            }
        }
        left += u64::from(skipped);
    }
    Ok(left)
}
