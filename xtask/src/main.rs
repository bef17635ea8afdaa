//! The project's task runner: `make TARGET` or `cargo xtask TASK`.

mod arm;
mod build;
mod deb;
mod demo;
mod docs;
mod fresh;
mod fuzz;
mod kernels;
mod package_test;
mod python;
mod results;
mod shell;
mod systems;
mod test;
mod test_long;

use std::process::ExitCode;

use clap::Parser;

/// The project's tasks.
#[derive(Parser)]
enum Task {
    /// Build static release binaries into target/release
    Build,
    /// Build Debian packages into target/deb: the small command with its units, the full one, and the driver for DKMS
    Deb,
    /// Run the demo scenario in the lab and report it
    Demo,
    /// Run all checks and tests
    Test,
    /// Run the tests that take hours: the scale suite, a hundred random cases, the soak, ignored tests
    ///
    /// Prints a line for each part, "skipped" and why where it cannot run, and ends with what passed and failed. Results are
    /// kept in target/test-long. The random cases are new ones each time; their seed is printed.
    TestLong,
    /// Fuzz what comes from the other side of a socket, a ring or a file
    Fuzz(fuzz::Args),
    /// Run the experiments of systems' authors on the simulator, scenarios/paper-*.toml and seed-*.toml, and
    /// write docs/src/systems.md
    ///
    /// Results are kept in target/systems. Only what has changed since is run again: an experiment's scenario, or
    /// the code of simulator and policy.
    Systems(systems::Args),
    /// Make the reference pages of docs/ from the code, and the book where mdbook is installed
    Docs,
    /// Make the figures of README.md and docs/src from the stored results, or store another
    Results(results::Args),
    /// Build the Python package into target/python, and run its tests with the built command
    Python,
    /// Run the benchmarks
    Bench,
    /// Do what a newcomer does, on a fresh Debian: clone, `make demo`, `make test`
    ///
    /// In a root file system made by debootstrap from the archive that this machine's apt uses,
    /// with git, make and ca-certificates. Rust and cargo's cache of crates are this machine's own,
    /// bind-mounted; cloned is what is committed. Prints how long each step took and what was
    /// installed, and "skipped" where that cannot be: it needs root and the archive.
    Fresh(fresh::Args),
    /// Boot kernels of Debian's archive in the lab, and make the page that says what works on each
    ///
    /// Kernels of several releases are downloaded and unpacked below target/kernels, by an apt of its own; nothing is
    /// installed. Each runs scenarios/gups.toml twice, which takes about four minutes. "skipped" where the archive cannot be
    /// reached.
    Kernels(kernels::Args),
    /// Cross-compile everything for Arm in a Debian 13 of its own, and run the tests there, emulated
    ///
    /// The root file system is made as by `fresh`; compiler and standard library are those of Debian's backports. Tested is what
    /// is committed: the unit tests but for a few that emulation of single programs cannot run, and dirty logging under KVM in an
    /// emulated machine. Took forty minutes of one core that did other work, too. "skipped" where that cannot be: it needs root and the archive.
    Arm(arm::Args),
    /// Install the Debian packages in an emulated VM of a Debian with systemd, use them, remove them
    ///
    /// Makes the root file system with mmdebstrap from the archive that this machine's apt uses, boots it
    /// under QEMU (no KVM needed) with a fast and a slow NUMA node, and prints a line for each check:
    /// install, DKMS module, agent, memory that moves, upgrade, purge. Takes about ten minutes.
    /// "skipped" where that cannot be: it needs root and the archive.
    PackageTest(package_test::Args),
}

fn main() -> ExitCode {
    let done = match Task::parse() {
        Task::Build => build::build(),
        Task::Deb => deb::deb(),
        Task::Demo => demo::demo(),
        Task::Test => test::test(),
        Task::TestLong => test_long::test_long(),
        Task::Docs => docs::docs(),
        Task::Results(args) => results::results(&args),
        Task::Fuzz(args) => fuzz::fuzz(&args),
        Task::Python => python::test(),
        Task::Systems(args) => systems::systems(&args),
        Task::Arm(args) => arm::arm(&args),
        Task::Kernels(args) => kernels::kernels(&args),
        Task::Fresh(args) => fresh::fresh(&args),
        Task::PackageTest(args) => package_test::package_test(&args),
        Task::Bench => shell::run(shell::cargo(
            "bench --locked --package demeter-policy --package demeter-sim",
        )),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
