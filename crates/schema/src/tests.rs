use std::fs;
use std::path::{Path, PathBuf};

use jsonschema::Validator;
use serde_json::Value;

use super::files;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn validator(name: &str) -> Validator {
    let files = files().unwrap();
    let (_, text) = files.iter().find(|(file, _)| *file == name).unwrap();
    let schema: Value = serde_json::from_str(text).unwrap();
    jsonschema::draft7::new(&schema).unwrap()
}

/// The faults of a TOML file, each with its place.
fn faults(validator: &Validator, text: &str) -> Vec<String> {
    let document: Value = toml::from_str(text).unwrap();
    let faults = validator.iter_errors(&document);
    faults
        .map(|fault| format!("{}: {fault}", fault.instance_path()))
        .collect()
}

fn toml_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = vec![];
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(toml_files(&path));
        } else if path.extension().is_some_and(|kind| kind == "toml") {
            found.push(path);
        }
    }
    found
}

#[test]
fn published_schemas_are_current() {
    for (name, text) in files().unwrap() {
        let path = root().join("docs/src/reference").join(name);
        let stored = fs::read_to_string(path).unwrap_or_default();
        assert!(
            stored == text,
            "{name} is out of date: run `cargo xtask docs`"
        );
    }
}

#[test]
fn every_scenario_and_configuration_that_we_ship_fits() {
    let scenarios = toml_files(&root().join("scenarios"));
    assert!(scenarios.len() > 100, "{}", scenarios.len());
    let scenario = validator("scenario.schema.json");
    for path in scenarios {
        let mut text = fs::read_to_string(&path).unwrap();
        let is_base = path.parent().is_some_and(|folder| folder.ends_with("base"));
        if is_base && !text.contains("extends = ") {
            // Others extend it, so it may be a part of a scenario.
            text.insert_str(0, "extends = \"none\"\n");
        }
        let none: [&str; 0] = [];
        assert_eq!(faults(&scenario, &text), none, "{}", path.display());
    }
    for name in ["guest", "host"] {
        let path = root().join(format!("packaging/{name}.toml"));
        let text = fs::read_to_string(&path).unwrap();
        let none: [&str; 0] = [];
        let validator = validator(&format!("{name}.schema.json"));
        assert_eq!(faults(&validator, &text), none, "{name}");
    }
}

#[test]
fn wrong_keys_types_and_names_are_found() {
    let scenario = "name = \"x\"\nduration_s = 5\nsystems = [\"none\", \"demeter\"]\n[machine]\nvcpus = 1\n\
                    [workload]\nkind = \"gups\"\nsize_mib = 8\nhot_mib = 1\nhot_weight = 0.9";
    let host = "pool = { fast_mib = 9, slow_mib = 9 }\n[vm.a]\nqmp = \"/q\"\nagent = \"/a\"\n\
                fast = { memdev = \"f\", size_mib = 1 }\nslow = { memdev = \"s\", size_mib = 1 }";
    let guest = "all = true\ntracker = \"damon\"\ntiers = \"0/1\"\ncgroup = \"/sys/fs/cgroup/db\"";
    let part = "extends = \"ci.toml\"\n[machine]\nvcpus = 1\n[workload]\nhot_mib = 5";
    for (name, text, changes) in [
        (
            "scenario",
            scenario,
            &[
                ("vcpus", "vcpu"),
                ("\"demeter\"", "\"demetre\""),
                ("duration_s = ", "duration_s = \"\" #"),
                ("duration_s = ", "seed = "),
                ("kind = \"gups\"", "kind = \"gupps\""),
                ("hot_mib", "hot_gib"),
            ][..],
        ),
        (
            "scenario",
            part,
            &[
                ("extends = \"ci.toml\"", ""),
                ("vcpus", "vcpu"),
                ("hot_mib", "hot_gib"),
                ("\"ci.toml\"", "1"),
            ],
        ),
        (
            "guest",
            guest,
            &[
                ("all", "al"),
                ("\"damon\"", "\"magic\""),
                ("\"0/1\"", "[[0], [1]]"),
                ("\"/sys/fs/cgroup/db\"", "3"),
                ("\"/sys/fs/cgroup/db\"", "[{ path = \"/a\", wait = 2 }]"),
            ],
        ),
        (
            "host",
            host,
            &[
                ("fast_mib", "fast_gib"),
                ("pool =", "pools ="),
                ("fast = ", "fats = "),
                ("size_mib = 1", "size_mib = \"1\""),
                ("[vm.a]", "[vm.a]\nmanage = \"magic\""),
            ],
        ),
    ] {
        let validator = validator(&format!("{name}.schema.json"));
        let none: [&str; 0] = [];
        assert_eq!(faults(&validator, text), none, "{name}: {text}");
        for (right, wrong) in changes {
            assert!(text.contains(right), "{text} lacks {right}");
            let text = text.replacen(right, wrong, 1);
            assert_ne!(faults(&validator, &text), none, "{name}: {text}");
        }
    }
}
