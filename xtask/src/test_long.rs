//! Runs tests that take hours: the scale suite, random cases, the soak, ignored tests.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::bail;

use crate::fresh::root;
use crate::{build, shell};

/// Folder of the results of comparisons.
const FOLDER: &str = "target/test-long";

/// A part of the tests.
struct Part {
    name: &'static str,
    command: Command,
    needs: &'static [Need],
}

/// A requirement of a part that a machine may lack.
#[derive(Clone, Copy)]
enum Need {
    Emulator,
    Root,
    Damon,
    TwoNodes,
}

impl Need {
    /// Why the requirement is not met here, if so.
    fn missing(self) -> Option<&'static str> {
        let is_there = match self {
            Self::Emulator => shell::succeeds(shell::program("qemu-system-x86_64", "--version")),
            Self::Root => root::is_root(),
            Self::Damon => Path::new("/sys/kernel/mm/damon/admin").is_dir(),
            Self::TwoNodes => Path::new("/sys/devices/system/node/node1").is_dir(),
        };
        let why = match self {
            Self::Emulator => "qemu-system-x86_64 is missing: make setup",
            Self::Root => "it needs root: sudo",
            Self::Damon => "this kernel has no DAMON in sysfs: CONFIG_DAMON_SYSFS",
            Self::TwoNodes => "this machine has one memory node only",
        };
        (!is_there).then_some(why)
    }
}

/// Runs every part, even after failures, and counts those that passed.
pub fn test_long() -> anyhow::Result<()> {
    build::build()?;
    std::fs::create_dir_all(shell::root().join(FOLDER))?;
    let (mut passed, mut failed) = (0, 0);
    for part in parts() {
        let name = part.name;
        if let Some(why) = part.needs.iter().find_map(|need| need.missing()) {
            println!("{name}: skipped: {why}");
            continue;
        }
        let start = Instant::now();
        let verdict = match shell::run(part.command) {
            Ok(()) => {
                passed += 1;
                "passed".into()
            }
            Err(error) => {
                failed += 1;
                format!("failed: {error:#}")
            }
        };
        println!("{name}: {verdict} ({} s)", start.elapsed().as_secs());
    }
    println!("{passed} passed, {failed} failed");
    if failed > 0 {
        bail!("a long test failed; the line of its part above says which");
    }
    Ok(())
}

fn parts() -> Vec<Part> {
    let demeter = |args: &str| {
        let command = shell::root().join("target/release/demeter");
        shell::program(command, args)
    };
    let compare = |args: &str, file: &str| {
        demeter(&format!("run {args} --hours-max 24 --json {FOLDER}/{file}"))
    };
    let ignored = |args: &str| shell::cargo(&format!("test --locked {args} -- --ignored"));
    let part = |name, command, needs| Part {
        name,
        command,
        needs,
    };
    vec![
        part(
            "scale suite",
            compare("scenarios/scale --on sim", "scale.json"),
            &[],
        ),
        part(
            "random cases",
            compare("--random 100 --on sim", "random.json"),
            &[],
        ),
        part(
            "soak",
            compare("scenarios/soak.toml --on lab", "soak.json"),
            &[Need::Emulator],
        ),
        part(
            "a balloon of 128 GiB in pieces",
            ignored("--release --package demeter-host --test fragments"),
            &[],
        ),
        part(
            "a million disturbances of the controller",
            ignored("--release --package demeter-host --lib a_million_disturbances"),
            &[],
        ),
        part(
            "a thousand VMs",
            ignored("--release --package demeter-host --lib a_thousand_vms"),
            &[],
        ),
        part(
            "the latency of flushed lines, on a quiet machine",
            ignored("--package demeter-guest --lib flushed_lines_take"),
            &[],
        ),
        part(
            "a host with a guest, and tenants",
            ignored("--package demeter-lab --test vm"),
            &[Need::Emulator],
        ),
        part(
            "machines of any nodes, and bound memory",
            ignored("--package demeter-lab --test nodes"),
            &[Need::Emulator],
        ),
        part(
            "shared memory, and an hour of bound memory",
            // An unoptimized agent spends its time for policies on reading a few.
            ignored("--release --package demeter-lab --test contracts"),
            &[Need::Emulator],
        ),
        part(
            "an agent under memory pressure",
            ignored("--package demeter-lab --test pressure"),
            &[Need::Emulator],
        ),
        part(
            "DAMON in this kernel, in a guest",
            ignored("--package demeter-guest --test damon_live"),
            &[Need::Root, Need::Damon],
        ),
        part(
            "DAMON in this kernel, on a host",
            ignored("--package demeter-host --lib history::live"),
            &[Need::Root, Need::Damon, Need::TwoNodes],
        ),
    ]
}
