//! Tests that the upgrade page has the code's versions.

use std::fs;
use std::path::Path;

const PAGE: &str = "docs/src/upgrade.md";

/// First cell of a row, the source with the version, and the text before it there.
const VERSIONS: [(&str, &str, &str); 5] = [
    (
        "result files",
        "crates/outcome/src/schema.rs",
        "pub const SCHEMA: u32 = ",
    ),
    (
        "`/var/lib/demeter/host.json`",
        "crates/host/src/store.rs",
        "const VERSION: u32 = ",
    ),
    (
        "protocol of agent and controller",
        "crates/proto/src/version.rs",
        "pub const VERSION: u16 = ",
    ),
    (
        "interface of driver and agent",
        "kernel/demeter_balloon/demeter_balloon.h",
        "#define DEMETER_BALLOON_ABI ",
    ),
    (
        "recordings",
        "crates/guest/src/recording/format.rs",
        "pub const VERSION: u16 = ",
    ),
];

fn read(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    fs::read_to_string(root.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The number after `before` in a source.
fn version<'a>(source: &'a str, before: &str) -> Option<&'a str> {
    let (_, rest) = source.split_once(before)?;
    rest.split(|c: char| !c.is_ascii_digit()).next()
}

#[test]
fn the_page_has_the_versions_of_the_code() {
    let page = read(PAGE);
    for (what, path, before) in VERSIONS {
        let source = read(path);
        let version = version(&source, before).unwrap_or_else(|| panic!("{path}: no {before}"));
        let row = format!("| {what} | {version} |");
        assert!(page.contains(&row), "{PAGE} lacks {row}");
    }
}

#[test]
fn a_version_is_the_number_behind_its_name() {
    assert_eq!(version("const A: u8 = 12;\n", "const A: u8 = "), Some("12"));
    assert_eq!(version("const B: u8 = 12;\n", "const A: u8 = "), None);
}
