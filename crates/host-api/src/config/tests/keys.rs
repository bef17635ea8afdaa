//! Each key of the reference page, wrong in each way in which a person gets it wrong.

use toml::{Table, Value};

use super::*;

/// The page is made from the code, so it has all keys.
const PAGE: &str = include_str!("../../../../../docs/src/reference/host.md");

/// A file that has each key, but for those that exclude another one.
const FULL: &str = r#"
    socket = "/run/d.sock"
    listen = "127.0.0.1:9100"
    token_file = "/etc/token"
    state = "/var/d.json"
    memory_paths = ["/mnt"]
    discover = "libvirt"
    policy = "wss"
    pool = { name = "all", fast_mib = 1000, slow_mib = 4000, fast_nodes = "0", slow_nodes = "1" }
    libvirt = { socket = "/run/l", uri = "qemu:///system", owner_uid = 0 }
    [defaults]
    pool = "all"
    provisioner = "virtio-mem"
    share = 100
    slowdown_max_percent = 10
    oom_mib = 16
    hard_limit_extra_mib = 256
    fast = { guarantee_mib = 1, limit_mib = 1000 }
    slow = { guarantee_mib = 1, limit_mib = 4000 }
    [vm.a]
    qmp = "/run/a.qmp"
    agent = "/run/a.agent"
    pool = "all"
    owner_uid = 0
    manage = "agent"
    history = { interval_ms = 100, hot_ones = 22 }
    provisioner = "demeter-balloon"
    share = 100
    slowdown_max_percent = 10
    oom_mib = 16
    hard_limit_extra_mib = 256
    fast = { memdev = "m0", node = 0, size_mib = 400, guarantee_mib = 1, limit_mib = 1000 }
    slow = { memdev = "m1", node = 1, size_mib = 1600, guarantee_mib = 100, limit_mib = 2000 }
"#;

/// The tables' paths, and key and type of each key in them.
fn keys() -> Vec<(Vec<String>, String, String)> {
    let mut keys = vec![];
    let mut tables = vec![vec![]];
    for line in PAGE.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            let path = |of: &str| {
                let of = of.trim_matches(['`', '[', ']']).replace("NAME", "a");
                of.split('.').map(str::to_owned).collect()
            };
            tables = title.split(", ").map(path).collect();
        }
        let row: Vec<_> = line.split(" | ").collect();
        if let [key, kind, ..] = row[..]
            && let Some(key) = key.strip_prefix("| `")
        {
            let key = key.trim_end_matches('`');
            let of = |table: &Vec<String>| (table.clone(), key.to_owned(), kind.to_owned());
            keys.extend(tables.iter().map(of));
        }
    }
    assert!(keys.len() > 50, "{keys:?}");
    keys
}

/// Values of the wrong kind, beyond any machine, or empty.
fn wrong_values(kind: &str) -> Vec<Value> {
    let text = |text: &str| Value::from(text);
    match kind {
        "integer" => vec![
            text("much"),
            text(""),
            Value::from(-1),
            Value::from(i64::MAX),
            Value::from(1.5),
            Value::from(true),
        ],
        "text" | "path" => vec![Value::from(7), text(""), Value::from(vec![text("/x")])],
        "address and port" | "one of those below" => {
            vec![Value::from(7), text(""), text("nonsense")]
        }
        "list of path" => vec![
            Value::from(7),
            text("/x"),
            Value::from(vec![7]),
            Value::from(vec![text("")]),
        ],
        "table" | "list of table" | "by name: table" => vec![Value::from(7), text("x")],
        other => panic!("no wrong values are known for {other}"),
    }
}

fn table_at<'a>(document: &'a mut Table, path: &[String]) -> &'a mut Table {
    path.iter().fold(document, |table, name| {
        let inner = table.get_mut(name).and_then(Value::as_table_mut);
        inner.unwrap_or_else(|| panic!("{path:?} is not in the file"))
    })
}

/// The error that a file leads to. It is one line, and names file and line.
fn refusal(document: &Table) -> (String, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("host.toml");
    let text = toml::to_string(document).unwrap();
    std::fs::write(&path, &text).unwrap();
    let said = Config::load(&path).expect_err(&text).to_string();
    assert!(!said.contains('\n'), "{said}");
    let place = format!("{}:", path.display());
    let rest = said
        .strip_prefix(&place)
        .unwrap_or_else(|| panic!("{said}"));
    let (line, what) = rest.split_once(": ").unwrap_or_else(|| panic!("{said}"));
    let line: usize = line.parse().unwrap_or_else(|_| panic!("{said}"));
    let line = text.lines().nth(line - 1).unwrap();
    (line.to_owned(), what.to_owned())
}

#[test]
fn the_full_file_is_right() {
    let config = parse(FULL).unwrap();
    config.check().unwrap();
}

#[test]
fn each_key_that_is_wrong_is_named_with_its_line_and_a_hint() {
    for (table, key, kind) in keys() {
        let mut path = table.clone();
        path.push(key.clone());
        let path = path.join(".");
        for wrong in wrong_values(&kind) {
            if path == "pool.name" && wrong == Value::from("") {
                // An only pool needs no name.
                continue;
            }
            let mut document: Table = toml::from_str(FULL).unwrap();
            table_at(&mut document, &table).insert(key.clone(), wrong.clone());
            let (line, what) = refusal(&document);
            let said = format!("{path} = {wrong}: {line}: {what}");
            let (fault, hint) = what.split_once("; ").expect(&said);
            assert!(fault.contains(&key) && !hint.is_empty(), "{said}");
            let section = format!("[{}]", table.join("."));
            assert!(line.contains(&key) || line == section, "{said}");
            for jargon in ["u64", "u32", "struct", "a map", "sequence"] {
                assert!(!what.contains(jargon), "{said}");
            }
        }
    }
}

#[test]
fn each_mistyped_key_is_named_with_the_right_one() {
    for (table, key, _) in keys() {
        let mistyped = key.replacen(&key[1..2], &key[1..2].repeat(2), 1);
        let mut document: Table = toml::from_str(FULL).unwrap();
        let own = table_at(&mut document, &table);
        let value = own.remove(&key).unwrap_or_else(|| Value::from("x"));
        own.insert(mistyped.clone(), value);
        let (line, what) = refusal(&document);
        let said = format!("{table:?} {key}: {line}: {what}");
        assert!(what.contains(&format!("{mistyped} is no key")), "{said}");
        assert!(
            what.ends_with(&format!("; did you mean `{key}`?")),
            "{said}"
        );
        assert!(line.contains(&mistyped), "{said}");
    }
}
