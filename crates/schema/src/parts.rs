//! Scenarios that extend others.
//!
//! Such a file gives only the keys that it changes, at every depth. So its tables may lack keys that a scenario needs.
//! Lists are replaced as a whole: a table in a list is complete, unless its type is also used outside of lists.

use std::collections::BTreeSet;

use anyhow::Context;
use schemars::Schema;
use serde_json::{Map, Value, json};

/// Where a schema keeps the types that it refers to.
const DEFINITIONS: &str = "definitions";

/// Keys whose values are lists of schemas for the same value.
const COMBINED: [&str; 2] = ["allOf", "anyOf"];

/// Allows `extends`, and parts of tables. A file that extends none still needs the first level's keys.
///
/// # Errors
/// The schema is not that of a table.
pub fn allow(root: &mut Schema) -> anyhow::Result<()> {
    let root = root.as_object_mut().context("a schema without keys")?;
    let needed = root.get("required").cloned().unwrap_or_else(|| json!([]));
    let mut definitions = match root.remove(DEFINITIONS) {
        Some(Value::Object(definitions)) => definitions,
        _ => Map::new(),
    };
    let mut waiting = vec![];
    relax(root, &mut waiting);
    let mut seen = BTreeSet::new();
    while let Some(name) = waiting.pop() {
        if let Some(Value::Object(found)) = definitions.get_mut(&name)
            && seen.insert(name)
        {
            relax(found, &mut waiting);
        }
    }
    root.insert(DEFINITIONS.into(), definitions.into());
    let keys = root.get_mut("properties").and_then(Value::as_object_mut);
    let extends = json!({
        "type": "string",
        "description": "A scenario that this one changes, relative to this file's folder.",
    });
    keys.context("a table without keys")?
        .insert("extends".into(), extends);
    root.insert("if".into(), json!({ "required": ["extends"] }));
    root.insert("else".into(), json!({ "required": needed }));
    Ok(())
}

/// Requires no keys of a table and of its tables. `waiting` gets the definitions that it refers to.
fn relax(schema: &mut Map<String, Value>, waiting: &mut Vec<String>) {
    schema.remove("required");
    // Several kinds may fit a table that does not give its `kind`.
    if let Some(one) = schema.remove("oneOf") {
        schema.insert("anyOf".into(), one);
    }
    if let Some(Value::String(target)) = schema.get("$ref") {
        waiting.extend(target.rsplit('/').next().map(str::to_owned));
    }
    let tables = schema.get_mut("properties").and_then(Value::as_object_mut);
    for table in tables.into_iter().flat_map(Map::values_mut) {
        relax_value(table, waiting);
    }
    for key in COMBINED {
        let parts = schema.get_mut(key).and_then(Value::as_array_mut);
        for part in parts.into_iter().flatten() {
            relax_value(part, waiting);
        }
    }
}

fn relax_value(schema: &mut Value, waiting: &mut Vec<String>) {
    if let Some(schema) = schema.as_object_mut() {
        relax(schema, waiting);
    }
}
