//! EXPLAIN's plan, read: what it claims in all and of each node, and which relations each node reads. Pure.

use serde::Deserialize;
use serde_json::{Map, Value, value::RawValue};

use crate::model::{Claim, NodeClaim};

/// A plan that was run, or only made.
#[derive(Debug, Clone)]
pub struct Plan {
    /// As the server wrote it, without the white space between the words.
    pub json: Box<RawValue>,
    /// The nodes, from the top, children behind their parents.
    pub nodes: Vec<Node>,
    /// What it claims in all.
    pub claim: Claim,
    /// Planning Time and Execution Time, milliseconds; 0 where it was not run.
    pub run_time_ms: f64,
}

/// A node.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// How many nodes are above it.
    pub depth: usize,
    /// What psql would call it.
    pub label: String,
    /// Its name where it is a subplan.
    pub subplan: Option<String>,
    /// A mean over the loops; `None` where it was never executed.
    pub rows: Option<f64>,
    /// How often it was executed.
    pub loops: f64,
    /// Milliseconds, children included; a mean over the loops.
    pub time_ms: Option<f64>,
    /// What it claims of itself; `None` where that cannot be told.
    pub claimed: Option<NodeClaim>,
    /// The table that it reads.
    pub table: Option<Table>,
    /// The index that it reads. It is of the table, where there is one.
    pub index: Option<String>,
    /// Whether it changes its table, and so may read all its indexes.
    pub is_change: bool,
}

/// A table as a plan names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Told with VERBOSE only.
    pub schema: Option<String>,
    /// Name.
    pub name: String,
    /// What the query calls it.
    pub alias: String,
}

/// Why EXPLAIN's answer cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// It is no JSON.
    #[error("reading EXPLAIN's answer failed: {0}; report it as a bug of pgiotrace")]
    NoJson(#[from] serde_json::Error),
    /// The statement has no plan.
    #[error("the statement has no plan that could be explained; give a query")]
    NoPlan,
}

impl Plan {
    /// Reads the answer of `EXPLAIN (FORMAT JSON)`.
    ///
    /// # Errors
    ///
    /// When it is not JSON, or the statement has no plan (`REFRESH MATERIALIZED VIEW`).
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        let json = RawValue::from_string(without_white_space(text))?;
        // Each node is two levels deep, and a join of a hundred tables may be as many nodes deep.
        let mut deserializer = serde_json::Deserializer::from_str(json.get());
        deserializer.disable_recursion_limit();
        let answer = Value::deserialize(&mut deserializer)?;
        let explained = answer.get(0).and_then(Value::as_object).ok_or(PlanError::NoPlan)?;
        let top = explained.get("Plan").and_then(Value::as_object).ok_or(PlanError::NoPlan)?;
        let mut tree = Tree::default();
        tree.add(top, 0);
        tree.settle_subplans();
        let planning = explained.get("Planning").and_then(Value::as_object);
        let planning = planning.map(Counts::of).unwrap_or_default();
        let execution = Counts::of(top);
        let time = |key: &str| explained.get(key).and_then(Value::as_f64).unwrap_or(0.0);
        Ok(Self {
            nodes: tree.nodes.into_iter().map(|grown| grown.node).collect(),
            claim: claim(execution, planning),
            run_time_ms: time("Planning Time") + time("Execution Time"),
            json,
        })
    }
}

fn claim(execution: Counts, planning: Counts) -> Claim {
    let sum = execution.plus(planning);
    Claim {
        shared_read_blocks: sum.shared.unsigned_abs(),
        planning_read_blocks: planning.shared.unsigned_abs(),
        local_read_blocks: sum.local.unsigned_abs(),
        temp_read_blocks: sum.temp.unsigned_abs(),
        io_read_time_ms: sum.io_ms,
    }
}

/// The JSON without what stands between its words: within them, a line break is always written as an escape.
fn without_white_space(json: &str) -> String {
    let mut compact = String::with_capacity(json.len());
    let (mut is_quoted, mut is_escaped) = (false, false);
    for character in json.chars() {
        if is_quoted || !character.is_ascii_whitespace() {
            compact.push(character);
        }
        if is_escaped {
            is_escaped = false;
        } else if is_quoted && character == '\\' {
            is_escaped = true;
        } else if character == '"' {
            is_quoted = !is_quoted;
        }
    }
    compact
}

/// What a node counted, its children's included. Signed, because differences are made of it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Counts {
    shared: i64,
    local: i64,
    temp: i64,
    io_ms: Option<f64>,
}

impl Counts {
    fn of(node: &Map<String, Value>) -> Self {
        let count = |key: &str| node.get(key).and_then(Value::as_i64).unwrap_or(0);
        let time = |key: &str| node.get(key).and_then(Value::as_f64);
        // Since PostgreSQL 17 by the kind of block; before, both kinds in one.
        let io_ms = match (time("Shared I/O Read Time"), time("Local I/O Read Time")) {
            (None, None) => time("I/O Read Time"),
            (shared, local) => Some(shared.unwrap_or(0.0) + local.unwrap_or(0.0)),
        };
        Self {
            shared: count("Shared Read Blocks"),
            local: count("Local Read Blocks"),
            temp: count("Temp Read Blocks"),
            io_ms,
        }
    }

    fn plus(self, other: Self) -> Self {
        let io_ms = match (self.io_ms, other.io_ms) {
            (None, None) => None,
            (own, others) => Some(own.unwrap_or(0.0) + others.unwrap_or(0.0)),
        };
        Self {
            shared: self.shared + other.shared,
            local: self.local + other.local,
            temp: self.temp + other.temp,
            io_ms,
        }
    }

    fn minus(self, other: Self) -> Self {
        let Self { shared, local, temp, io_ms } = other;
        self.plus(Self { shared: -shared, local: -local, temp: -temp, io_ms: io_ms.map(std::ops::Neg::neg) })
    }

    fn claim(self) -> NodeClaim {
        NodeClaim {
            read_blocks: u64::try_from(self.shared + self.local).unwrap_or(0),
            io_read_time_ms: self.io_ms.map(|time| time.max(0.0)),
        }
    }
}

/// A node on the way to what it claims of itself.
struct Grown {
    node: Node,
    inclusive: Counts,
    own: Counts,
    /// Everything that it says in words, where it may name subplans.
    words: Vec<String>,
    /// The number behind the last of its descendants'.
    end: usize,
}

/// A plan as it is read.
#[derive(Default)]
struct Tree {
    nodes: Vec<Grown>,
}

impl Tree {
    /// Adds a node and all below it; what it counted in all.
    fn add(&mut self, plan: &Map<String, Value>, depth: usize) -> Counts {
        let number = self.nodes.len();
        let inclusive = Counts::of(plan);
        let node = node(plan, depth);
        self.nodes.push(Grown { node, inclusive, own: inclusive, words: words(plan), end: number + 1 });
        let children = plan.get("Plans").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        for child in children.iter().filter_map(Value::as_object) {
            let of_child = self.add(child, depth + 1);
            self.nodes[number].own = self.nodes[number].own.minus(of_child);
        }
        self.nodes[number].end = self.nodes.len();
        inclusive
    }

    /// What a subplan without parameters counted, is counted by the node that ran it too: whichever asked for its result
    /// first, and not the node that it is shown under.
    fn settle_subplans(&mut self) {
        for grown in &mut self.nodes {
            grown.node.claimed = Some(grown.own.claim());
        }
        for number in 0..self.nodes.len() {
            let Some(name) = self.nodes[number].node.subplan.clone() else { continue };
            if name.starts_with("CTE ") {
                continue;
            }
            self.settle_subplan(number, &name);
        }
        for grown in &mut self.nodes {
            // A scan of a CTE reads no relation by itself: what it counts, the CTE's own nodes counted.
            if grown.node.label.starts_with("CTE Scan") {
                grown.node.claimed =
                    Some(NodeClaim { read_blocks: 0, io_read_time_ms: grown.own.io_ms.map(|_| 0.0) });
            }
        }
    }

    fn settle_subplan(&mut self, number: usize, name: &str) {
        let Some(parent) = self.parent_of(number) else { return };
        let marks = marks_of(name);
        let within = number..self.nodes[number].end;
        let askers: Vec<usize> = (parent..self.nodes[parent].end)
            .filter(|other| !within.contains(other) && self.nodes[*other].mentions(&marks))
            .collect();
        // It may be named where only VERBOSE shows it: then its parent is the likeliest.
        if askers.is_empty() || askers == [parent] {
            return;
        }
        let share = self.nodes[number].inclusive;
        if let [asker] = askers[..] {
            for (node, own) in
                [(parent, self.nodes[parent].own.plus(share)), (asker, self.nodes[asker].own.minus(share))]
            {
                self.nodes[node].own = own;
                self.nodes[node].node.claimed = Some(own.claim());
            }
        } else if share != Counts::default() {
            for asker in askers {
                self.nodes[asker].node.claimed = None;
            }
        }
    }

    fn parent_of(&self, number: usize) -> Option<usize> {
        let depth = self.nodes[number].node.depth.checked_sub(1)?;
        (0..number).rev().find(|other| self.nodes[*other].node.depth == depth)
    }
}

impl Grown {
    fn mentions(&self, marks: &[String]) -> bool {
        self.words.iter().any(|word| marks.iter().any(|mark| mentions(word, mark)))
    }
}

/// Whether a text holds a mark that does not go on: `$1` is not in `$10`.
fn mentions(text: &str, mark: &str) -> bool {
    text.match_indices(mark).any(|(at, _)| {
        let next = text[at + mark.len()..].chars().next();
        next.is_none_or(|next| !next.is_ascii_digit())
    })
}

/// What conditions call a subplan: since PostgreSQL 17 `InitPlan 1`, before `$0` of `InitPlan 1 (returns $0)`.
fn marks_of(name: &str) -> Vec<String> {
    match name.split_once(" (returns ") {
        Some((_, parameters)) => {
            parameters.trim_end_matches(')').split(',').map(|parameter| parameter.trim().to_owned()).collect()
        }
        None => vec![name.to_owned()],
    }
}

/// All texts of a node, but not of those below it.
fn words(plan: &Map<String, Value>) -> Vec<String> {
    let own = plan.iter().filter(|(key, _)| !matches!(key.as_str(), "Plans" | "Subplan Name" | "Workers"));
    let texts = own.flat_map(|(_, value)| match value {
        Value::String(text) => vec![text.clone()],
        Value::Array(items) => items.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => Vec::new(),
    });
    texts.collect()
}

fn node(plan: &Map<String, Value>, depth: usize) -> Node {
    let text = |key: &str| plan.get(key).and_then(Value::as_str);
    let number = |key: &str| plan.get(key).and_then(Value::as_f64);
    let loops = number("Actual Loops").unwrap_or(0.0);
    let if_executed = |figure: Option<f64>| figure.filter(|_| loops > 0.0);
    let is_change = text("Node Type") == Some("ModifyTable");
    Node {
        depth,
        label: label(plan),
        subplan: text("Subplan Name").map(str::to_owned),
        rows: if_executed(number("Actual Rows")),
        loops,
        time_ms: if_executed(number("Actual Total Time")),
        claimed: None,
        table: text("Relation Name").map(|name| Table {
            schema: text("Schema").map(str::to_owned),
            name: name.to_owned(),
            alias: text("Alias").unwrap_or(name).to_owned(),
        }),
        index: text("Index Name").map(str::to_owned),
        is_change,
    }
}

/// What psql calls a node (`ExplainNode`, `src/backend/commands/explain.c`).
fn label(plan: &Map<String, Value>) -> String {
    let text = |key: &str| plan.get(key).and_then(Value::as_str);
    let is_set = |key: &str| plan.get(key).and_then(Value::as_bool) == Some(true);
    let index = text("Index Name");
    let object = ["Relation Name", "Function Name", "Table Function Name", "CTE Name", "Tuplestore Name"]
        .iter()
        .find_map(|key| text(key));
    let alias = text("Alias");
    let mut words: Vec<&str> = Vec::new();
    words.extend(is_set("Async Capable").then_some("Async"));
    words.extend(is_set("Parallel Aware").then_some("Parallel"));
    let kind = kind(plan);
    words.push(&kind);
    words.extend((text("Scan Direction") == Some("Backward")).then_some("Backward"));
    match (index, object.or(alias)) {
        // A bitmap's index stands alone.
        (Some(index), None) => words.extend(["on", index]),
        (Some(index), Some(_)) => words.extend(["using", index]),
        (None, _) => {}
    }
    if let Some(object) = object.or(alias) {
        words.extend(["on", object]);
        words.extend(alias.filter(|alias| *alias != object));
    }
    words.join(" ")
}

/// The kind of a node, in psql's words.
fn kind(plan: &Map<String, Value>) -> String {
    let text = |key: &str| plan.get(key).and_then(Value::as_str);
    let node_type = text("Node Type").unwrap_or("?");
    match node_type {
        "ModifyTable" => text("Operation").unwrap_or(node_type).to_owned(),
        "Aggregate" => {
            let name = match text("Strategy") {
                Some("Sorted") => "GroupAggregate",
                Some("Hashed") => "HashAggregate",
                Some("Mixed") => "MixedAggregate",
                _ => "Aggregate",
            };
            match text("Partial Mode") {
                Some(mode) if mode != "Simple" => format!("{mode} {name}"),
                _ => name.to_owned(),
            }
        }
        "SetOp" => {
            let name = if text("Strategy") == Some("Hashed") { "HashSetOp" } else { "SetOp" };
            text("Command").map_or_else(|| name.to_owned(), |command| format!("{name} {command}"))
        }
        _ => match text("Join Type") {
            Some(join) if join != "Inner" => {
                format!("{} {join} Join", node_type.strip_suffix(" Join").unwrap_or(node_type))
            }
            _ => node_type.to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(json: &str) -> Plan {
        Plan::parse(json).expect("a plan")
    }

    fn own_blocks(plan: &Plan) -> Vec<Option<u64>> {
        plan.nodes.iter().map(|node| node.claimed.map(|claim| claim.read_blocks)).collect()
    }

    #[test]
    fn the_plan_stays_as_it_was_but_for_white_space() {
        let text = "[\n  {\n    \"Plan\": {\"Z\": 1.50, \"A\": \"a \\\" \\\\\", \"Node Type\": \"x  y\"},\n    \"Triggers\": []\n  }\n]";
        let expected = r#"[{"Plan":{"Z":1.50,"A":"a \" \\","Node Type":"x  y"},"Triggers":[]}]"#;
        assert_eq!(plan(text).json.get(), expected);
    }

    #[test]
    fn planning_counts_too() {
        let plan = plan(
            r#"[{"Plan": {"Node Type": "Seq Scan", "Relation Name": "t", "Alias": "t", "Shared Read Blocks": 10,
                "Shared I/O Read Time": 1.5, "Local I/O Read Time": 0.0, "Temp Read Blocks": 7},
                "Planning": {"Shared Read Blocks": 3, "Shared I/O Read Time": 0.25, "Local I/O Read Time": 0.0},
                "Planning Time": 0.5, "Execution Time": 20.0}]"#,
        );
        let expected = Claim {
            shared_read_blocks: 13,
            planning_read_blocks: 3,
            local_read_blocks: 0,
            temp_read_blocks: 7,
            io_read_time_ms: Some(1.75),
        };
        assert_eq!((plan.claim, plan.run_time_ms), (expected, 20.5));
    }

    #[test]
    fn without_track_io_timing_there_is_no_time() {
        let plan = plan(r#"[{"Plan": {"Node Type": "Seq Scan", "Shared Read Blocks": 10}}]"#);
        assert_eq!((plan.claim.io_read_time_ms, plan.claim.shared_read_blocks), (None, 10));
        assert_eq!(plan.nodes[0].claimed, Some(NodeClaim { read_blocks: 10, io_read_time_ms: None }));
    }

    #[test]
    fn before_17_the_times_have_another_name() {
        let plan =
            plan(r#"[{"Plan": {"Node Type": "Seq Scan", "Shared Read Blocks": 10, "I/O Read Time": 2.5}}]"#);
        assert_eq!(plan.claim.io_read_time_ms, Some(2.5));
    }

    #[test]
    fn a_node_claims_what_its_children_do_not() {
        let plan = plan(
            r#"[{"Plan": {"Node Type": "Aggregate", "Strategy": "Plain", "Partial Mode": "Simple", "Shared Read Blocks": 100, "Plans": [
                {"Node Type": "Bitmap Heap Scan", "Relation Name": "t", "Alias": "a", "Shared Read Blocks": 100, "Plans": [
                    {"Node Type": "Bitmap Index Scan", "Index Name": "t_k", "Shared Read Blocks": 30}]}]}}]"#,
        );
        assert_eq!(own_blocks(&plan), [Some(0), Some(70), Some(30)]);
        let labels: Vec<&str> = plan.nodes.iter().map(|node| node.label.as_str()).collect();
        assert_eq!(labels, ["Aggregate", "Bitmap Heap Scan on t a", "Bitmap Index Scan on t_k"]);
        assert_eq!(plan.nodes.iter().map(|node| node.depth).collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn what_a_cte_read_is_its_own_nodes() {
        let plan = plan(
            r#"[{"Plan": {"Node Type": "Hash Join", "Join Type": "Inner", "Shared Read Blocks": 50, "Plans": [
                {"Node Type": "Seq Scan", "Subplan Name": "CTE c", "Relation Name": "t", "Alias": "t", "Shared Read Blocks": 50},
                {"Node Type": "CTE Scan", "CTE Name": "c", "Alias": "a", "Shared Read Blocks": 20},
                {"Node Type": "Hash", "Shared Read Blocks": 30, "Plans": [
                    {"Node Type": "CTE Scan", "CTE Name": "c", "Alias": "b", "Shared Read Blocks": 30}]}]}}]"#,
        );
        assert_eq!(own_blocks(&plan), [Some(0), Some(50), Some(0), Some(0), Some(0)]);
    }

    #[test]
    fn what_an_initplan_read_is_not_of_the_node_that_asked_for_it() {
        // The scan of u ran the scan of t, which is shown under the aggregate.
        let with = |name: &str, condition: &str| {
            plan(&format!(
                r#"[{{"Plan": {{"Node Type": "Aggregate", "Strategy": "Plain", "Shared Read Blocks": 60, "Plans": [
                    {{"Node Type": "Seq Scan", "Subplan Name": "{name}", "Relation Name": "t", "Alias": "t", "Shared Read Blocks": 40}},
                    {{"Node Type": "Seq Scan", "Relation Name": "u", "Alias": "u", "Filter": "{condition}", "Shared Read Blocks": 60}}]}}}}]"#
            ))
        };
        let expected = [Some(0), Some(40), Some(20)];
        assert_eq!(own_blocks(&with("InitPlan 1", "(k > (InitPlan 1).col1)")), expected);
        assert_eq!(own_blocks(&with("InitPlan 1 (returns $1)", "(k > $1)")), expected);
        // Another parameter: nobody is known to have asked.
        assert_eq!(own_blocks(&with("InitPlan 1 (returns $1)", "(k > $10)")), [Some(0), Some(40), Some(60)]);
    }

    #[test]
    fn who_ran_an_initplan_that_two_name_is_not_known() {
        let plan = plan(
            r#"[{"Plan": {"Node Type": "Append", "Shared Read Blocks": 60, "Plans": [
                {"Node Type": "Seq Scan", "Subplan Name": "InitPlan 1", "Relation Name": "t", "Alias": "t", "Shared Read Blocks": 40},
                {"Node Type": "Seq Scan", "Relation Name": "u", "Alias": "u", "Filter": "(k > (InitPlan 1).col1)", "Shared Read Blocks": 60},
                {"Node Type": "Seq Scan", "Relation Name": "v", "Alias": "v", "Filter": "(k > (InitPlan 1).col1)", "Shared Read Blocks": 0}]}}]"#,
        );
        assert_eq!(own_blocks(&plan), [Some(0), Some(40), None, None]);
    }

    #[test]
    fn nodes_have_psqls_names() {
        let named =
            |properties: &str| plan(&format!(r#"[{{"Plan": {{{properties}}}}}]"#)).nodes[0].label.clone();
        let cases = [
            (
                r#""Node Type": "Seq Scan", "Parallel Aware": true, "Relation Name": "t", "Alias": "t""#,
                "Parallel Seq Scan on t",
            ),
            (
                r#""Node Type": "Index Scan", "Scan Direction": "Backward", "Index Name": "i", "Relation Name": "t", "Alias": "x""#,
                "Index Scan Backward using i on t x",
            ),
            (r#""Node Type": "Hash Join", "Join Type": "Left""#, "Hash Left Join"),
            (r#""Node Type": "Nested Loop", "Join Type": "Semi""#, "Nested Loop Semi Join"),
            (r#""Node Type": "Merge Join", "Join Type": "Inner""#, "Merge Join"),
            (
                r#""Node Type": "Aggregate", "Strategy": "Hashed", "Partial Mode": "Partial""#,
                "Partial HashAggregate",
            ),
            (
                r#""Node Type": "ModifyTable", "Operation": "Update", "Relation Name": "t", "Alias": "t""#,
                "Update on t",
            ),
            (r#""Node Type": "Function Scan", "Function Name": "f", "Alias": "f""#, "Function Scan on f"),
            (r#""Node Type": "Subquery Scan", "Alias": "q""#, "Subquery Scan on q"),
        ];
        for (properties, expected) in cases {
            assert_eq!(named(properties), expected);
        }
    }

    #[test]
    fn a_node_that_never_ran_has_no_figures() {
        let plan = plan(
            r#"[{"Plan": {"Node Type": "Seq Scan", "Actual Rows": 0, "Actual Loops": 0, "Actual Total Time": 0.0}}]"#,
        );
        assert_eq!((plan.nodes[0].rows, plan.nodes[0].time_ms), (None, None));
    }

    #[test]
    fn a_deep_plan_is_read_all_the_same() {
        let levels = 500;
        let open = r#"{"Node Type": "Result", "Plans": ["#.repeat(levels);
        let text = format!(r#"[{{"Plan": {open}{{"Node Type": "Result"}}{}}}]"#, "]}".repeat(levels));
        assert_eq!(plan(&text).nodes.len(), levels + 1);
    }

    #[test]
    fn a_utility_statement_has_no_plan() {
        assert!(matches!(Plan::parse(r#"["Utility Statement"]"#), Err(PlanError::NoPlan)));
        assert!(matches!(Plan::parse("QUERY PLAN"), Err(PlanError::NoJson(_))));
    }
}
