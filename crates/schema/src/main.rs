//! Writes JSON Schemas of scenarios, guest.toml and host.toml, made from the types that read them.
//!
//! `demeter-schema FOLDER` writes one file for each. Editors use them to complete keys, to show their documentation and
//! to mark errors. A schema knows keys, types and names. Bounds, and rules between keys, are checked by the commands.

mod parts;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::{env, fs};

use anyhow::Context;
use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::transform::{Transform, transform_subschemas};
use schemars::{JsonSchema, Schema};
use serde_json::Value;

fn main() -> anyhow::Result<()> {
    let folder = env::args().nth(1);
    let folder = folder.context("name the folder to write to: demeter-schema FOLDER")?;
    for (name, text) in files()? {
        let path = Path::new(&folder).join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The name and the text of each file.
fn files() -> anyhow::Result<[(&'static str, String); 3]> {
    let mut scenario = schema::<demeter_scenario::Scenario>("Demeter: scenario");
    parts::allow(&mut scenario)?;
    Ok([
        ("scenario.schema.json", text(&scenario)?),
        (
            "guest.schema.json",
            text(&schema::<demeter_guest::config::Config>(
                "Demeter: guest.toml",
            ))?,
        ),
        (
            "host.schema.json",
            text(&schema::<demeter_host_api::config::Config>(
                "Demeter: host.toml",
            ))?,
        ),
    ])
}

/// The schema of files that hold a `T`.
fn schema<T: JsonSchema>(title: &str) -> Schema {
    // The newest version that editors' TOML plugins know.
    let settings = SchemaSettings::draft07().with_transform(WithoutNull);
    let mut schema = SchemaGenerator::new(settings).into_root_schema_for::<T>();
    schema.insert("title".into(), title.into());
    schema
}

fn text(schema: &Schema) -> serde_json::Result<String> {
    Ok(serde_json::to_string_pretty(schema)? + "\n")
}

/// Removes `null`, by which serde reads an `Option`: TOML has none.
#[derive(Clone)]
struct WithoutNull;

impl Transform for WithoutNull {
    fn transform(&mut self, schema: &mut Schema) {
        match schema.get_mut("default") {
            Some(Value::Null) => drop(schema.remove("default")),
            Some(Value::Object(keys)) => keys.retain(|_, value| !value.is_null()),
            _ => {}
        }
        if let Some(Value::Array(types)) = schema.get_mut("type") {
            types.retain(|kind| kind != "null");
            if let [one] = &types[..] {
                let one = one.clone();
                schema.insert("type".into(), one);
            }
        }
        if let Some(Value::Array(mut any)) = schema.remove("anyOf") {
            any.retain(|other| other.get("type").is_none_or(|kind| kind != "null"));
            let key = if any.len() == 1 { "allOf" } else { "anyOf" };
            schema.insert(key.into(), any.into());
        }
        transform_subschemas(self, schema);
    }
}
