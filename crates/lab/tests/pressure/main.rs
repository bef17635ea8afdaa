//! An agent under memory pressure with a real kernel. This program boots a VM in which it is itself the first process. There it
//! runs a program near its limits, first beside an agent at rest and then beside one that moves, and compares what the kernel
//! reclaimed. It takes minutes: `cargo test -p demeter-lab --test pressure -- --ignored`.

#[path = "../console/mod.rs"]
mod console;
#[path = "../console/fast_and_slow.rs"]
mod fast_and_slow;
#[path = "../in_vm/mod.rs"]
mod in_vm;
mod inside;

use std::process::ExitCode;
use std::time::Duration;

use demeter_lab::Lab;
use fast_and_slow::FAST_AND_SLOW;

/// The VM's output when all checks pass.
const VERDICT: &str = "pressure: everything holds";

/// How long the VM may take on a slow machine.
const LIMIT: Duration = Duration::from_secs(1200);

fn main() -> ExitCode {
    if std::process::id() == 1 {
        inside::first_process();
    }
    inside::be_a_child();
    let has = |option: &str| std::env::args().any(|arg| arg == option);
    // cargo's runner asks for the list of tests.
    if has("--list") {
        println!("pressure: test");
        return ExitCode::SUCCESS;
    }
    if !has("--ignored") && !has("--include-ignored") {
        println!("test pressure ... ignored, minutes in a VM");
        return ExitCode::SUCCESS;
    }
    let console = boot();
    print!("{console}");
    match console.lines().any(|line| line.trim() == VERDICT) {
        true => {
            println!("test pressure ... ok");
            ExitCode::SUCCESS
        }
        false => {
            println!("test pressure ... FAILED");
            ExitCode::FAILURE
        }
    }
}

/// Boots the VM and returns the output of its console.
fn boot() -> String {
    let lab = Lab::from_env().unwrap();
    let modules = lab.stock_modules(["drivers/block/brd"]);
    let [disk] = modules.unwrap_or_else(|e| panic!("{e}"));
    let options: Vec<String> = FAST_AND_SLOW.split_whitespace().map(Into::into).collect();
    let files = [(inside::DISK.trim_start_matches('/'), disk.as_path())];
    console::boot(&lab, &options, &files, "", LIMIT)
}
