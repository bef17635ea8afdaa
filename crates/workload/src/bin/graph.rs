//! Searches or ranks a Kronecker graph: see `graph --help`.

use std::process::ExitCode;

use demeter_workload::{graph, run_program};

fn main() -> ExitCode {
    run_program(graph::run)
}
