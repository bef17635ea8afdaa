//! Tests dirty logging on a real kernel: on this machine, if `/dev/kvm` can run a guest, and in an emulated host.
//!
//! In the emulated host this program is the first process. It loads KVM, and measures with and without eager splitting.

mod emulated_host;
mod trials;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    if std::process::id() == 1 {
        emulated_host::first_process();
    }
    let mut arguments = Arguments::from_args();
    // Each test needs the machine for itself, and they count descriptors.
    arguments.test_threads = Some(1);
    let mut trials = trials::trials();
    trials.push(Trial::test("in_an_emulated_host", emulated_host::boot));
    libtest_mimic::run(&arguments, trials).exit_code()
}
