//! Memory that its owner has placed or shared, with a real kernel. This program boots VMs in which it is itself the first
//! process. There it starts programs, has an agent manage them, and looks where their memory lies. Two tests are for
//! `cargo test -p demeter-lab --test contracts -- --ignored`: shared memory takes minutes, and the soak an hour, or as many
//! seconds as `DEMETER_SOAK_S` says.

#[path = "../console/mod.rs"]
mod console;
#[path = "../console/fast_and_slow.rs"]
mod fast_and_slow;
mod hugetlb;
#[path = "../in_vm/mod.rs"]
mod in_vm;
mod inside;
#[path = "../in_vm/places.rs"]
mod places;
mod shared;
mod soak;

use std::process::ExitCode;
use std::time::Duration;

use demeter_lab::Lab;
use fast_and_slow::FAST_AND_SLOW;

/// How long a VM may take on a slow machine, beyond the soak.
const LIMIT: Duration = Duration::from_secs(600);

/// Length of the soak, and the variable for another one.
const SOAK_S: u64 = 3600;
const SOAK_VARIABLE: &str = "DEMETER_SOAK_S";

/// A test: a VM of its own.
pub struct Case {
    /// Its name.
    pub name: &'static str,
    /// The first process's part.
    pub watch: fn(),
    /// The program's part.
    pub use_memory: fn() -> !,
    /// The agent's part.
    pub manage: fn(),
    /// Whether it runs on demand only.
    pub is_long: bool,
}

/// The tests.
pub const CASES: [Case; 3] = [
    Case {
        name: "hugetlb",
        watch: hugetlb::watch,
        use_memory: hugetlb::use_memory,
        manage: hugetlb::manage,
        is_long: false,
    },
    Case {
        name: "shared",
        watch: shared::watch,
        use_memory: shared::use_memory,
        manage: shared::manage,
        is_long: true,
    },
    Case {
        name: "soak",
        watch: soak::watch,
        use_memory: soak::use_memory,
        manage: soak::manage,
        is_long: true,
    },
];

fn main() -> ExitCode {
    if std::process::id() == 1 {
        inside::first_process();
    }
    inside::be_a_child();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let has = |option: &str| args.iter().any(|arg| arg == option);
    // cargo's runner asks for the list of tests.
    if has("--list") {
        for Case { name, .. } in &CASES {
            println!("{name}: test");
        }
        return ExitCode::SUCCESS;
    }
    let is_wanted = |case: &&Case| {
        let names: Vec<_> = args.iter().filter(|arg| !arg.starts_with('-')).collect();
        let is_named = names.is_empty() || names.iter().any(|name| case.name.contains(&**name));
        let is_due = match case.is_long {
            true => has("--ignored") || has("--include-ignored"),
            false => !has("--ignored"),
        };
        is_named && is_due
    };
    for case in CASES.iter().filter(is_wanted) {
        let console = boot(case);
        print!("{console}");
        if !console.lines().any(|line| line.trim() == verdict(case)) {
            println!("test {} ... FAILED", case.name);
            return ExitCode::FAILURE;
        }
        println!("test {} ... ok", case.name);
    }
    ExitCode::SUCCESS
}

/// The line that a VM prints when everything holds.
pub fn verdict(case: &Case) -> String {
    format!("contracts: {}: everything holds", case.name)
}

/// Boots the VM of a test and returns the output of its console.
fn boot(case: &Case) -> String {
    let lab = Lab::from_env().unwrap();
    let options: Vec<String> = FAST_AND_SLOW.split_whitespace().map(Into::into).collect();
    let soak_s = std::env::var(SOAK_VARIABLE).map_or(SOAK_S, |text| text.parse().unwrap());
    let append = format!("case={} {SOAK_VARIABLE}={soak_s}", case.name);
    let limit = match case.is_long {
        true => LIMIT + Duration::from_secs(soak_s),
        false => LIMIT,
    };
    console::boot(&lab, &options, &[], &append, limit)
}
