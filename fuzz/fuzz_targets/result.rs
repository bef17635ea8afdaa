//! Any text as a result file: refused, or drawn.

#![no_main]

use demeter_outcome::RunResult;
use demeter_report::{html, table, throughput_svg};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(result) = RunResult::from_json(text) {
        table(&result);
        html(&result);
        throughput_svg(&result);
    }
});
