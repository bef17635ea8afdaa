//! Random 8-byte updates with a hot set: see `gups --help`.

use std::process::ExitCode;

use demeter_workload::{gups, run_program};

fn main() -> ExitCode {
    run_program(gups::run)
}
