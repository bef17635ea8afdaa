//! Tests the balloon driver in a real kernel. The program boots a VM in which it is the init process, loads and unloads
//! the module a hundred times, and checks its actions.

#[path = "../console/mod.rs"]
mod console;
mod inside;

use std::process::ExitCode;
use std::time::Duration;

use demeter_lab::Lab;

/// The VM's output when all checks pass.
const VERDICT: &str = "balloon_module: everything holds";

/// Time limit of the VM on a slow machine.
const LIMIT: Duration = Duration::from_secs(600);

fn main() -> ExitCode {
    if std::process::id() == 1 {
        inside::first_process();
    }
    if std::env::args().nth(1).as_deref() == Some(inside::EAT) {
        inside::eat();
    }
    // cargo's runner asks for the list of tests.
    if std::env::args().any(|arg| arg == "--list") {
        println!("balloon_module: test");
        return ExitCode::SUCCESS;
    }
    let console = boot();
    print!("{}", tail(&console));
    if console.lines().any(|line| line.trim() == VERDICT) {
        println!("test balloon_module ... ok");
        ExitCode::SUCCESS
    } else {
        println!("test balloon_module ... FAILED");
        ExitCode::FAILURE
    }
}

/// Boots the VM and returns the output of its console.
fn boot() -> String {
    let lab = Lab::from_env().unwrap();
    let module = lab.balloon_module().unwrap_or_else(|e| panic!("{e}"));
    let options = "-machine pc -smp 2 -m 1152M \
                   -object memory-backend-memfd,id=m0,size=512M,share=on \
                   -object memory-backend-memfd,id=m1,size=640M,share=on \
                   -numa node,nodeid=0,cpus=0-1,memdev=m0 -numa node,nodeid=1,memdev=m1";
    let options: Vec<String> = options.split(' ').map(Into::into).collect();
    let files = [(inside::MODULE.trim_start_matches('/'), module.as_path())];
    console::boot(&lab, &options, &files, "", LIMIT)
}

fn tail(console: &str) -> String {
    let lines: Vec<&str> = console.lines().collect();
    let last = &lines[lines.len().saturating_sub(80)..];
    last.iter().map(|line| format!("{line}\n")).collect()
}
