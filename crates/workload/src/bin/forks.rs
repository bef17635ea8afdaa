//! A server that answers each request in a child process: see `forks --help`.

use std::process::ExitCode;

use demeter_workload::{forks, run_program};

fn main() -> ExitCode {
    run_program(forks::run)
}
