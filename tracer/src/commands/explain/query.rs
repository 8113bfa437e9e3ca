//! What is said to the server: the query under EXPLAIN, in a transaction that is always rolled back.

use std::error::Error;

use postgres::{
    Client,
    error::SqlState,
    types::{FromSql, Type},
};

use super::plan::{Plan, PlanError};
use crate::server::connect::innermost;

/// How the query is run. The claim's keys come from these.
const ANALYZE: &str = "EXPLAIN (ANALYZE, BUFFERS, WAL, SETTINGS, FORMAT JSON) ";
/// How it is only planned: VERBOSE tells the schemas.
const PLAN: &str = "EXPLAIN (VERBOSE, FORMAT JSON) ";
/// Only a plain query may stand behind it: no `INTO`, nothing that changes data.
const PLAN_OF_CURSOR: &str = "EXPLAIN DECLARE pgiotrace_query NO SCROLL CURSOR FOR ";

/// Why a query is not run, or did not end.
#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    /// It is `EXPLAIN …` already.
    #[error("the statement begins with EXPLAIN, which pgiotrace adds itself: give the query alone")]
    IsExplain,
    /// It wants values.
    #[error("the query has parameters ($1, …), for which EXPLAIN has no values: write values in their place")]
    HasParameters,
    /// It changes something.
    #[error(
        "the statement would change data or make a relation{0}: with --allow-write it is run, and rolled back; nothing was \
         changed"
    )]
    Writes(String),
    /// There are several statements.
    #[error(
        "explain takes one statement, and these are several: give one query, without what follows its semicolon"
    )]
    Several,
    /// Ctrl-C.
    #[error("the query was cancelled and its transaction rolled back")]
    Cancelled,
    /// Anything else.
    #[error("the server refused the statement: {0}")]
    Refused(String),
    /// EXPLAIN's answer is no plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The session was lost.
    #[error("the session was lost ({0}): nothing is known of the query; try again")]
    Lost(String),
}

impl QueryError {
    fn of(error: &postgres::Error) -> Self {
        let Some(refusal) = error.as_db_error() else { return Self::Lost(innermost(error)) };
        let code = refusal.code();
        // `exec_parse_message` (src/backend/tcop/postgres.c) has no code of its own for it, and its words are translated.
        let is_of_parsing = refusal.routine() == Some("exec_parse_message");
        if *code == SqlState::SYNTAX_ERROR && is_of_parsing {
            Self::Several
        } else if *code == SqlState::READ_ONLY_SQL_TRANSACTION {
            Self::Writes(format!(" ({})", refusal.message()))
        } else if *code == SqlState::QUERY_CANCELED {
            // A statement_timeout has this code as well, and says so itself.
            Self::Refused(refusal.message().to_owned())
        } else {
            let hint =
                refusal.hint().map(|hint| format!(" ({})", hint.trim_end_matches('.'))).unwrap_or_default();
            Self::Refused(format!("{}{hint}", refusal.message()))
        }
    }
}

/// The text of a value of type json.
struct JsonText(String);

impl<'a> FromSql<'a> for JsonText {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(std::str::from_utf8(raw)?.to_owned()))
    }

    fn accepts(kind: &Type) -> bool {
        *kind == Type::JSON || *kind == Type::TEXT
    }
}

/// The plan of a query that is not run, with schemas; and first of all whether it is to be run.
pub fn plan(client: &mut Client, sql: &str, allow_write: bool) -> Result<Plan, QueryError> {
    if first_word(sql).is_some_and(|word| word.eq_ignore_ascii_case("EXPLAIN")) {
        return Err(QueryError::IsExplain);
    }
    in_transaction(client, allow_write, |client| {
        let plan = Plan::parse(&explained(client, PLAN, sql)?)?;
        if !allow_write {
            refuse_what_writes(client, sql)?;
        }
        Ok(plan)
    })
}

/// Runs a query, and returns its plan.
pub fn run(client: &mut Client, sql: &str, allow_write: bool) -> Result<Plan, QueryError> {
    in_transaction(client, allow_write, |client| Ok(Plan::parse(&explained(client, ANALYZE, sql)?)?))
}

/// Does something in a transaction that is rolled back however that ends.
fn in_transaction<T>(
    client: &mut Client,
    allow_write: bool,
    work: impl FnOnce(&mut Client) -> Result<T, QueryError>,
) -> Result<T, QueryError> {
    let mode = if allow_write { "READ WRITE" } else { "READ ONLY" };
    client.batch_execute(&format!("BEGIN TRANSACTION {mode}")).map_err(|error| QueryError::of(&error))?;
    let result = work(client);
    let rolled_back = client.batch_execute("ROLLBACK").map_err(|error| QueryError::of(&error));
    result.and_then(|value| rolled_back.map(|()| value))
}

/// EXPLAIN's answer.
///
/// By the extended protocol, which takes one statement only: nothing behind a semicolon leaves the transaction.
fn explained(client: &mut Client, explain: &str, sql: &str) -> Result<String, QueryError> {
    let statement = client.prepare(&format!("{explain}{sql}")).map_err(|error| QueryError::of(&error))?;
    if !statement.params().is_empty() {
        return Err(QueryError::HasParameters);
    }
    let row = client.query_one(&statement, &[]).map_err(|error| QueryError::of(&error))?;
    let answer: JsonText = row.try_get(0).map_err(|error| QueryError::of(&error))?;
    Ok(answer.0)
}

/// `CREATE TABLE AS` and `SELECT INTO` are run by EXPLAIN even in a read-only transaction (tried: 15 and 18; what makes the
/// relation, `intorel_startup` in createas.c, does not ask). Neither has a result, so that only what has none needs the
/// second look: a cursor can only be declared for a query that changes nothing, and here it is not even declared.
fn refuse_what_writes(client: &mut Client, sql: &str) -> Result<(), QueryError> {
    let statement = client.prepare(sql).map_err(|error| QueryError::of(&error))?;
    if !statement.columns().is_empty() {
        return Ok(());
    }
    match client.prepare(&format!("{PLAN_OF_CURSOR}{sql}")) {
        Ok(_) => Ok(()),
        Err(error) if error.as_db_error().is_some() => Err(QueryError::Writes(String::new())),
        Err(error) => Err(QueryError::of(&error)),
    }
}

/// The first word of a statement, behind white space and comments.
fn first_word(sql: &str) -> Option<&str> {
    let mut rest = sql.trim_start();
    loop {
        if let Some(comment) = rest.strip_prefix("--") {
            rest = comment.split_once('\n').map_or("", |(_, behind)| behind).trim_start();
        } else if let Some(comment) = rest.strip_prefix("/*") {
            rest = behind_comment(comment).trim_start();
        } else {
            break;
        }
    }
    let end = rest.find(|character: char| !character.is_ascii_alphabetic()).unwrap_or(rest.len());
    (end > 0).then(|| &rest[..end])
}

/// What stands behind a comment that has begun; in SQL they may be nested.
fn behind_comment(text: &str) -> &str {
    let mut depth = 1;
    let mut at = 0;
    let bytes = text.as_bytes();
    while at < bytes.len() && depth > 0 {
        match bytes.get(at..at + 2) {
            Some(b"*/") => (depth, at) = (depth - 1, at + 2),
            Some(b"/*") => (depth, at) = (depth + 1, at + 2),
            _ => at += 1,
        }
    }
    &text[at.min(text.len())..]
}

/// Whether there is nothing but white space, comments and semicolons.
pub fn is_empty(sql: &str) -> bool {
    let behind = sql.trim_start_matches(|character: char| character.is_whitespace() || character == ';');
    if !behind.starts_with("--") && !behind.starts_with("/*") {
        return behind.is_empty();
    }
    let rest = match behind.strip_prefix("--") {
        Some(comment) => comment.split_once('\n').map_or("", |(_, behind)| behind),
        None => behind_comment(&behind[2..]),
    };
    is_empty(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_word_is_behind_comments() {
        for sql in
            ["explain select 1", " \n-- a\n--b\n explain(analyze) x", "/* a /* b */ c */explain x", "EXPLAIN"]
        {
            assert!(first_word(sql).is_some_and(|word| word.eq_ignore_ascii_case("explain")), "{sql}");
        }
        assert_eq!(first_word("explainer()"), Some("explainer"));
        for sql in ["", "(select 1)", "-- explain", "/* explain", "é"] {
            assert_eq!(first_word(sql), None, "{sql}");
        }
    }

    #[test]
    fn what_holds_no_statement_is_empty() {
        for sql in ["", " \n\t", ";", "-- a", " ; -- a\n/* b /* c */ */ ;\n", "/* open"] {
            assert!(is_empty(sql), "{sql}");
        }
        for sql in ["select 1", "-- a\nselect 1", "/* a */ table t"] {
            assert!(!is_empty(sql), "{sql}");
        }
    }
}
