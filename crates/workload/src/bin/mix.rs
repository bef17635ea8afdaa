//! Parts of memory that are used in different ways: see `mix --help`.

use std::process::ExitCode;

use demeter_workload::{mix, run_program};

fn main() -> ExitCode {
    run_program(mix::run)
}
