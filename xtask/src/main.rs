//! The project's task runner: `make TARGET` or `cargo xtask TASK`.

mod build;
mod demo;
mod fuzz;
mod shell;
mod test;

use std::process::ExitCode;

use clap::Parser;

/// The project's tasks.
#[derive(Parser)]
enum Task {
    /// Build static release binaries into target/release
    Build,
    /// Run the demo scenario in the lab and report it
    Demo,
    /// Run all checks and tests
    Test,
    /// Run the benchmarks
    Bench,
}

fn main() -> ExitCode {
    let done = match Task::parse() {
        Task::Build => build::build(),
        Task::Demo => demo::demo(),
        Task::Test => test::test(),
        Task::Bench => shell::run(shell::cargo("bench --locked --package demeter-policy")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
