//! Reads a large array again and again: see `sweep --help`.

use std::process::ExitCode;

use demeter_workload::{run_program, sweep};

fn main() -> ExitCode {
    run_program(sweep::run)
}
