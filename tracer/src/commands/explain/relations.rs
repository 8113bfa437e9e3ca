//! The relations that a plan may read: what the catalogs say of them, and which nodes read which.

use std::collections::BTreeSet;

use postgres::{Client, Row};

use super::plan::{Node, Table};
use crate::{
    capture::names::RelationKey,
    model::{PlanRelation, RelationKind},
};

/// Tables by schema and name, their indexes, their TOAST relations and the indexes of these. Two lists side by side are syntax, for
/// which `unnest` must have no schema; the session's search path is empty.
const RELATIONS: &str = "WITH wanted AS (
        SELECT c.oid, c.reltoastrelid, n.nspname, c.relname
        FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
            JOIN unnest($1::text[], $2::text[]) AS w (schema_name, name)
                ON n.nspname = w.schema_name AND c.relname = w.name
    ), found AS (
        SELECT oid, 't' AS kind, oid AS of FROM wanted
        UNION ALL SELECT i.indexrelid, 'i', w.oid FROM wanted w JOIN pg_catalog.pg_index i ON i.indrelid = w.oid
        UNION ALL SELECT reltoastrelid, 'o', oid FROM wanted WHERE reltoastrelid <> 0
        UNION ALL SELECT i.indexrelid, 'x', w.oid FROM wanted w JOIN pg_catalog.pg_index i ON i.indrelid = w.reltoastrelid
    )
    SELECT c.oid, f.kind, n.nspname::text, c.relname::text, w.nspname::text, w.relname::text,
        CASE WHEN c.reltablespace <> 0 THEN c.reltablespace ELSE d.dattablespace END,
        CASE WHEN c.relisshared THEN 0::oid ELSE d.oid END,
        COALESCE(pg_catalog.pg_relation_filenode(c.oid), 0::oid), c.relpersistence = 't'
    FROM found f JOIN pg_catalog.pg_class c ON c.oid = f.oid
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        JOIN wanted w ON w.oid = f.of
        JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database()
    ORDER BY w.nspname, w.relname, f.kind <> 't', f.kind, c.relname";

/// A relation that a plan may read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Its OID.
    pub oid: u32,
    /// What it is.
    pub kind: RelationKind,
    /// Schema.
    pub schema: String,
    /// Name.
    pub name: String,
    /// Schema and name of the table that it belongs to, or is.
    pub table: (String, String),
    /// What reads of it are of; `None` where it has no file, as a partitioned table.
    pub key: Option<RelationKey>,
}

/// What nodes read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reads {
    /// Nothing by itself.
    Nothing,
    /// These relations, which no other node reads.
    Alone(Vec<RelationKey>),
    /// Relations that others read as well, or that are not known.
    Shared,
}

/// The catalogs' entries for the tables of a plan that was made with VERBOSE.
pub fn look_up(client: &mut Client, nodes: &[Node]) -> Result<Vec<Found>, postgres::Error> {
    let tables: BTreeSet<(&str, &str)> = nodes
        .iter()
        .filter_map(|node| node.table.as_ref())
        .filter_map(|table| Some((table.schema.as_deref()?, table.name.as_str())))
        .collect();
    let (schemas, names): (Vec<&str>, Vec<&str>) = tables.into_iter().unzip();
    client.query(RELATIONS, &[&schemas, &names])?.iter().map(found).collect()
}

fn found(row: &Row) -> Result<Found, postgres::Error> {
    let key = RelationKey {
        tablespace_oid: row.try_get(6)?,
        database_oid: row.try_get(7)?,
        relfilenumber: row.try_get(8)?,
        is_temp: row.try_get(9)?,
    };
    let kind = match row.try_get(1)? {
        "t" => RelationKind::Table,
        "i" => RelationKind::Index,
        "o" => RelationKind::Toast,
        _ => RelationKind::ToastIndex,
    };
    Ok(Found {
        oid: row.try_get(0)?,
        kind,
        schema: row.try_get(2)?,
        name: row.try_get(3)?,
        table: (row.try_get(4)?, row.try_get(5)?),
        key: Some(key).filter(|key| key.relfilenumber != 0),
    })
}

/// What each node of a plan reads, and the relations with the nodes that read them. `named` is the same plan as made with VERBOSE,
/// which alone tells schemas.
pub fn assign(nodes: &[Node], named: &[Node], found: &[Found]) -> (Vec<Reads>, Vec<PlanRelation>) {
    let of_nodes: Vec<Option<Vec<usize>>> =
        nodes.iter().map(|node| relations_of(node, named, found)).collect();
    let readers = |relation: usize| -> Vec<usize> {
        let reads =
            |numbers: &Option<Vec<usize>>| numbers.as_ref().is_some_and(|own| own.contains(&relation));
        of_nodes.iter().enumerate().filter(|(_, own)| reads(own)).map(|(number, _)| number).collect()
    };
    let reads = of_nodes.iter().map(|own| match own.as_deref() {
        Some([]) => Reads::Nothing,
        Some(own) if own.iter().all(|relation| readers(*relation).len() == 1) => {
            Reads::Alone(own.iter().filter_map(|relation| found[*relation].key).collect())
        }
        Some(_) | None => Reads::Shared,
    });
    let reads = reads.collect();
    let relation = |(number, found): (usize, &Found)| PlanRelation {
        schema: found.schema.clone(),
        name: found.name.clone(),
        kind: found.kind,
        table: (found.kind != RelationKind::Table).then(|| format!("{}.{}", found.table.0, found.table.1)),
        nodes: readers(number),
    };
    (reads, found.iter().enumerate().map(relation).collect())
}

/// The relations that a node reads, by their number; `None` when they cannot be told. Long values in TOAST relations may be read by any
/// node that looks at them, and are no node's.
fn relations_of(node: &Node, named: &[Node], found: &[Found]) -> Option<Vec<usize>> {
    let Node { table, index, is_change, .. } = node;
    let mut own = Vec::new();
    let mut of_table = None;
    if let Some(table) = table {
        let schema = schema_of(table, named)?;
        let is_it = |found: &Found| found.table.0 == schema && found.table.1 == table.name;
        of_table = Some((schema, table.name.as_str()));
        let kinds: &[RelationKind] =
            if *is_change { &[RelationKind::Table, RelationKind::Index] } else { &[RelationKind::Table] };
        let numbers =
            (0..found.len()).filter(|number| is_it(&found[*number]) && kinds.contains(&found[*number].kind));
        own.extend(numbers.filter(|number| found[*number].key.is_some()));
    }
    if let Some(index) = index {
        let is_it = |found: &Found| {
            let is_of_table =
                of_table.is_none_or(|(schema, name)| found.table.0 == schema && found.table.1 == name);
            found.kind == RelationKind::Index && found.name == *index && is_of_table
        };
        let mut numbers = (0..found.len()).filter(|number| is_it(&found[*number]));
        // A bitmap's index has no schema in any plan; two of one name cannot be told apart.
        let (Some(number), None) = (numbers.next(), numbers.next()) else { return None };
        own.push(number);
    }
    Some(own)
}

/// The schema of a table that a plan without VERBOSE names.
fn schema_of<'a>(table: &Table, named: &'a [Node]) -> Option<&'a str> {
    let tables =
        || named.iter().filter_map(|node| node.table.as_ref()).filter(|named| named.name == table.name);
    let only = |schemas: BTreeSet<&'a str>| schemas.first().copied().filter(|_| schemas.len() == 1);
    let all = tables().filter_map(|named| named.schema.as_deref()).collect();
    only(all).or_else(|| {
        let same = tables().filter(|named| named.alias == table.alias);
        only(same.filter_map(|named| named.schema.as_deref()).collect())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::explain::plan::Plan;

    fn nodes(plans: &str) -> Vec<Node> {
        let text = format!(r#"[{{"Plan": {{"Node Type": "Append", "Plans": [{plans}]}}}}]"#);
        Plan::parse(&text).expect("a plan").nodes
    }

    fn scan(schema: &str, table: &str, alias: &str) -> String {
        let schema = if schema.is_empty() { String::new() } else { format!(r#""Schema": "{schema}", "#) };
        format!(r#"{{"Node Type": "Seq Scan", {schema}"Relation Name": "{table}", "Alias": "{alias}"}}"#)
    }

    fn entry(number: u32, kind: RelationKind, schema: &str, name: &str, table: &str) -> Found {
        let key =
            RelationKey { tablespace_oid: 1663, database_oid: 5, relfilenumber: number, is_temp: false };
        Found {
            oid: number,
            kind,
            schema: schema.to_owned(),
            name: name.to_owned(),
            table: (schema.to_owned(), table.to_owned()),
            key: Some(key),
        }
    }

    fn numbers(reads: &Reads) -> Option<Vec<u32>> {
        match reads {
            Reads::Alone(keys) => Some(keys.iter().map(|key| key.relfilenumber).collect()),
            Reads::Nothing => Some(Vec::new()),
            Reads::Shared => None,
        }
    }

    #[test]
    fn a_node_has_the_relations_that_it_reads_alone() {
        let named = nodes(&[scan("a", "t", "t"), scan("a", "u", "x"), scan("a", "u", "y")].join(","));
        let own = nodes(&[scan("", "t", "t"), scan("", "u", "x"), scan("", "u", "y")].join(","));
        let found = [
            entry(1, RelationKind::Table, "a", "t", "t"),
            entry(2, RelationKind::Toast, "a", "pg_toast_1", "t"),
            entry(3, RelationKind::Table, "a", "u", "u"),
        ];
        let (reads, relations) = assign(&own, &named, &found);
        let reads: Vec<_> = reads.iter().map(numbers).collect();
        assert_eq!(reads, [Some(vec![]), Some(vec![1]), None, None]);
        assert_eq!(
            relations.iter().map(|one| one.nodes.clone()).collect::<Vec<_>>(),
            [vec![1], vec![], vec![2, 3]]
        );
        assert_eq!(relations[1].table.as_deref(), Some("a.t"));
    }

    #[test]
    fn tables_of_one_name_are_told_apart_by_what_the_query_calls_them() {
        let named = nodes(&[scan("a", "t", "x"), scan("b", "t", "y")].join(","));
        let own = nodes(&[scan("", "t", "x"), scan("", "t", "y"), scan("", "t", "z")].join(","));
        let found =
            [entry(1, RelationKind::Table, "a", "t", "t"), entry(2, RelationKind::Table, "b", "t", "t")];
        let (reads, _) = assign(&own, &named, &found);
        let reads: Vec<_> = reads.iter().map(numbers).collect();
        assert_eq!(reads, [Some(vec![]), Some(vec![1]), Some(vec![2]), None]);
    }

    #[test]
    fn an_index_scan_reads_the_index_too_and_a_change_all_indexes() {
        let index_scan = r#"{"Node Type": "Index Scan", "Index Name": "i", "Relation Name": "t", "Alias": "t", "Schema": "a"}"#;
        let update = r#"{"Node Type": "ModifyTable", "Operation": "Update", "Relation Name": "u", "Alias": "u", "Schema": "a"}"#;
        let bitmap = r#"{"Node Type": "Bitmap Index Scan", "Index Name": "twice"}"#;
        let nodes = nodes(&[index_scan, update, bitmap].join(","));
        let found = [
            entry(1, RelationKind::Table, "a", "t", "t"),
            entry(2, RelationKind::Index, "a", "i", "t"),
            entry(3, RelationKind::Table, "a", "u", "u"),
            entry(4, RelationKind::Index, "a", "twice", "u"),
            entry(5, RelationKind::Index, "b", "twice", "v"),
        ];
        let (reads, _) = assign(&nodes, &nodes, &found);
        let reads: Vec<_> = reads.iter().map(numbers).collect();
        assert_eq!(reads, [Some(vec![]), Some(vec![1, 2]), Some(vec![3, 4]), None]);
    }
}
