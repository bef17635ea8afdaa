//! Loads and asks a key-value store: see `kvload --help`.

use std::process::ExitCode;

use demeter_workload::{kvload, run_program};

fn main() -> ExitCode {
    run_program(kvload::run)
}
