//! Runs the tests on Arm in a separate Debian: cross-compiled, and emulated.
//!
//! rustup has the target's standard library, but not every machine can reach it. Debian's backports have a package of
//! it for their own compiler.

use crate::fresh::{self, CLONE, Release, Steps, root::Root};

/// The suite with a sufficiently new compiler.
const BACKPORTS: &str = "trixie-backports";
/// The packages of the compiler and the target's standard library.
const COMPILER: &str = "cargo rustc libstd-rust-dev:arm64";
/// Packages with the target's linker and the emulator of its programs and kernel.
const TOOLS: &str = "ca-certificates git gcc libc6-dev gcc-aarch64-linux-gnu \
    libc6-dev-arm64-cross qemu-user qemu-system-arm";

/// Debian's cargo, instead of this machine's, which the root also has. Lightly optimized, since emulation takes most of
/// the time.
const CARGO: &str = "export PATH=/usr/bin:/bin:/usr/sbin CARGO_PROFILE_TEST_OPT_LEVEL=1 \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=qemu-aarch64; \
    cargo test --locked --workspace --exclude xtask --target aarch64-unknown-linux-gnu";

/// Tests that cannot run under emulation of single programs: they need perf events, move_pages(2) or PAGEMAP_SCAN,
/// start themselves as another program, or boot a VM of x86.
const NOT_EMULATED: [&str; 9] = [
    "tracker::conformance::perf_conforms_on_page_faults",
    "tracker::perf::tests::a_child_is_a_stranger_until_it_is_a_target",
    "tracker::perf::tests::a_thread_that_was_running_before_is_covered",
    "tracker::perf::tests::faults_of_a_target_carry_their_addresses",
    "pages::conformance::live_pages_conform",
    "here::tests::a_workload_",
    "page_size::tests::a_page_of_our_stack_is_small",
    "run::world::nobody_is_hurt_by_vms_that_lie",
    "hard_limit::tests::the_kernel_holds_a_process_to_what_it_owns",
];

/// Options of `cargo xtask arm`.
#[derive(clap::Args)]
pub struct Args {
    /// Keep the root file system, and print its path
    #[arg(long)]
    keep: bool,
}

/// Runs the tests.
pub fn arm(args: &Args) -> anyhow::Result<()> {
    fresh::in_root(Release::Trixie, &[BACKPORTS], args.keep, test)
}

fn test(root: &Root, steps: &mut Steps) -> anyhow::Result<()> {
    let install = "DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install";
    steps.time("packages", || {
        root.run(&format!(
            "dpkg --add-architecture arm64 && apt-get -qq update \
             && {install} {TOOLS} >/dev/null && {install} -t {BACKPORTS} {COMPILER} >/dev/null"
        ))
    })?;
    steps.time("git clone", || fresh::clone(root))?;
    let skipped = NOT_EMULATED.map(|test| format!(" --skip {test}")).concat();
    steps.time("unit tests", || {
        root.run(&format!(
            "cd /{CLONE} && {CARGO} --no-fail-fast --lib --bins -- {skipped}"
        ))
    })?;
    // The emulated host has its own kernel and KVM.
    steps.time("dirty log", || {
        root.run(&format!(
            "cd /{CLONE} && {CARGO} --test live -- in_an_emulated_host"
        ))
    })
}
