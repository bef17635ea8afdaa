//! Checks the numbers of `shared_page.h` that other languages repeat.

use std::collections::HashMap;

/// The header's numeric `#define`s, without expressions, which the C compiler evaluates.
fn defines() -> HashMap<String, u64> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/plugin/shared_page.h");
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let ("#define", name, value) = (words.next()?, words.next()?, words.next()?) else {
                return None;
            };
            let digits = value.trim_end_matches('u');
            let number = match digits.strip_prefix("0x") {
                Some(hex) => u64::from_str_radix(hex, 16),
                None => digits.parse(),
            };
            Some((name.to_owned(), number.ok()?))
        })
        .collect()
}

#[test]
fn the_layout_is_the_published_one() {
    let expected = [
        ("DEMETER_MAGIC", u64::from(u32::from_le_bytes(*b"DTR1"))),
        ("DEMETER_VERSION", 1),
        ("DEMETER_CONTROL_BYTES", 4096),
        ("DEMETER_RING_HEADER_BYTES", 64),
        ("DEMETER_RECORD_BYTES", 32),
        ("DEMETER_RING_RECORDS", 4096),
        ("DEMETER_MAX_VCPUS", 16),
        ("DEMETER_SHARED_BYTES", 4 << 20),
    ];
    let defines = defines();
    for (name, value) in expected {
        assert_eq!(defines.get(name), Some(&value), "{name}");
    }
}
