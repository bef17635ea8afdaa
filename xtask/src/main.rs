//! The project's task runner: `make TARGET` or `cargo xtask TASK`.

mod arm;
mod build;
mod deb;
mod demo;
mod docs;
mod emulator;
mod fresh;
mod future;
mod fuzz;
mod kernels;
mod kubernetes;
mod package_test;
mod python;
mod results;
mod sensitivity;
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
    /// Prints a line for each part, or "skipped" with the reason if it cannot run, and ends with the numbers of passed
    /// and failed parts. Results are kept in target/test-long. The random cases are new ones each time; their seed is
    /// printed.
    TestLong,
    /// Fuzz all decoders of sockets, rings and files
    Fuzz(fuzz::Args),
    /// Run the experiments of systems' authors on the simulator, scenarios/paper-*.toml and seed-*.toml, and write
    /// docs/src/systems.md
    ///
    /// Results are kept in target/systems. An experiment runs again only if its scenario or the code of simulator and
    /// policy has changed.
    Systems(systems::Args),
    /// Run scenarios/sensitivity.toml, in which each assumed cost of the simulator is halved and doubled, and print which
    /// orders of systems change
    Sensitivity(sensitivity::Args),
    /// Generate the reference pages of docs/ from the code, and the book if mdbook is installed
    Docs,
    /// Generate the figures of README.md and docs/src from the stored results, or store another result
    Results(results::Args),
    /// Build the Python package into target/python, and run its tests with the built command
    Python,
    /// Run the benchmarks
    Bench,
    /// Follow the README on a fresh Debian: clone, `make demo`, `make test`
    ///
    /// In a root file system made by debootstrap from the archive that this machine's apt uses, with git, make and
    /// ca-certificates. Rust and cargo's cache of crates are this machine's own, bind-mounted. The clone has the
    /// committed state. Prints the duration of each step and the installed packages, or "skipped" if it is not
    /// possible: it needs root and the archive.
    Fresh(fresh::Args),
    /// Boot kernels of Debian's archive in the lab, and generate the page that shows what works on each
    ///
    /// Kernels of several releases are downloaded and unpacked below target/kernels, by a separate apt; nothing is
    /// installed. Each runs scenarios/gups.toml twice, which takes about four minutes. Prints "skipped" if the archive
    /// cannot be reached.
    Kernels(kernels::Args),
    /// Try the newest kernel of Debian's archive, and `make demo` on Debian sid; name what broke
    ///
    /// Meant to run each week. Nothing is installed, and the table of `kernels` stays as it is. "skipped" is printed as by
    /// `kernels` and `fresh`.
    Future,
    /// Cross-compile everything for Arm in a separate Debian 13, and run the tests there, emulated
    ///
    /// The root file system is made as by `fresh`; compiler and standard library come from Debian's backports. The
    /// committed state is tested: the unit tests, except a few that cannot run under emulation of single programs, and
    /// dirty logging under KVM in an emulated machine. It takes about forty minutes. Prints "skipped" if it is not
    /// possible: it needs root and the archive.
    Arm(arm::Args),
    /// Build an emulator whose CPUs have AMD's sampling unit (IBS), for `demeter run --emulator exact`
    ///
    /// The source of QEMU is this Debian's package; the patches are those of crates/lab/emulator. The result is kept below
    /// target/emulator until source or patches change. Says first how long it takes. docs/src/emulator.md has more.
    Emulator,
    /// Install the Debian packages in an emulated VM of a Debian with systemd, use them, remove them
    ///
    /// Makes the root file system with mmdebstrap from the archive that this machine's apt uses. Boots it under QEMU
    /// (no KVM needed) with a fast and a slow NUMA node. Prints a line for each check: install, DKMS module, agent,
    /// moved memory, upgrade, purge. Takes about ten minutes. Prints "skipped" if it is not possible: it needs root and
    /// the archive.
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
        Task::Sensitivity(args) => sensitivity::sensitivity(&args),
        Task::Python => python::test(),
        Task::Systems(args) => systems::systems(&args),
        Task::Arm(args) => arm::arm(&args),
        Task::Emulator => emulator::emulator(),
        Task::Kernels(args) => kernels::kernels(&args),
        Task::Fresh(args) => fresh::fresh(&args),
        Task::Future => future::future(),
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
