//! Any text as /proc/zoneinfo: parsed without a panic.
#![no_main]

use demeter_guest::nodes::NodeMemory;
use demeter_policy::NodeId;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, &str)| {
    let (node, text) = input;
    if let Some(memory) = NodeMemory::parse(text, NodeId(node.into())) {
        assert!(text.contains(&format!("Node {node}, zone ")));
        let _ = memory.high_watermark;
    }
});
