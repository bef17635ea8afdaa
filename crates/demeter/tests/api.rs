//! Tests that the API page has exactly the code's routes.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const PAGE: &str = "docs/src/api.md";
const SOURCES: [&str; 2] = ["crates/guest/src/server.rs", "crates/host/src/api/mod.rs"];
const METHODS: [&str; 4] = ["get", "put", "post", "delete"];

fn read(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    fs::read_to_string(root.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// `GET /path` for each `.route("/path", get(..))`.
fn routes(source: &str) -> impl Iterator<Item = String> {
    source.split(".route(").skip(1).map(|rest| {
        let mut pieces = rest.split('"');
        let path = pieces.nth(1).expect("a route has a path");
        let rest = pieces.next().expect("a route has a handler");
        let method = METHODS
            .into_iter()
            .find(|method| {
                rest.trim_start_matches([',', ' ', '\n'])
                    .starts_with(&format!("{method}("))
            })
            .unwrap_or_else(|| panic!("{path}: no known method in {rest}"));
        format!("{} {path}", method.to_uppercase())
    })
}

/// The first cells of the page's rows.
fn described(page: &str) -> impl Iterator<Item = String> {
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.filter_map(|row| Some(row.split_once('`')?.0.to_owned()))
}

#[test]
fn the_page_has_every_route() {
    let code: BTreeSet<String> = SOURCES
        .iter()
        .flat_map(|path| routes(&read(path)).collect::<Vec<_>>())
        .collect();
    assert!(code.len() > 8, "{code:?}");
    let page: BTreeSet<String> = described(&read(PAGE)).collect();
    assert_eq!(page, code, "{PAGE} and the code differ");
}

#[test]
fn a_route_is_read_with_its_method() {
    let source = "r.route(\"/a\", get(x)).route(\n    \"/b/{n}\",\n    put(y),\n)";
    assert_eq!(routes(source).collect::<Vec<_>>(), ["GET /a", "PUT /b/{n}"]);
}
