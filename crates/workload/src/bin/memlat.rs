//! Mean latency of a random pointer chase: see `memlat --help`.

use std::process::ExitCode;

use demeter_workload::{memlat, run_program};

fn main() -> ExitCode {
    run_program(memlat::run)
}
