//! The balloon driver in a real kernel: this program boots a VM in which it is itself the first
//! process, loads and unloads the module there a hundred times, and looks at everything that it
//! does.

mod inside;

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use demeter_lab::{Initramfs, Lab, dies_with_this_thread};

/// What the VM says when everything holds.
const VERDICT: &str = "balloon_module: everything holds";

/// How long the VM may take on a slow machine.
const LIMIT: Duration = Duration::from_secs(600);

fn main() -> ExitCode {
    if std::process::id() == 1 {
        inside::first_process();
    }
    if std::env::args().nth(1).as_deref() == Some(inside::EAT) {
        inside::eat();
    }
    // cargo's runner asks what there is.
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

/// Boots the VM and returns what its console said.
fn boot() -> String {
    let lab = Lab::from_env().unwrap();
    let kernel = lab.kernel_image().unwrap_or_else(|e| panic!("{e}"));
    let module = lab.balloon_module().unwrap_or_else(|e| panic!("{e}"));
    let folder = tempfile::tempdir().unwrap();
    let mut initramfs = Initramfs::default();
    let this = std::env::current_exe().unwrap();
    initramfs.add_program("init", &this).unwrap();
    initramfs
        .add_program(inside::MODULE.trim_start_matches('/'), &module)
        .unwrap();
    let archive = folder.path().join("initramfs");
    initramfs.write(&archive).unwrap();
    let console = folder.path().join("console");
    let mut vm = Command::new(&lab.qemu);
    dies_with_this_thread(&mut vm);
    let mut vm = vm
        .args(["-machine", "pc", "-accel", "tcg", "-cpu", "qemu64"])
        .args(["-smp", "2", "-m", "1152M"])
        .args(["-object", "memory-backend-memfd,id=m0,size=512M,share=on"])
        .args(["-object", "memory-backend-memfd,id=m1,size=640M,share=on"])
        .args(["-numa", "node,nodeid=0,cpus=0-1,memdev=m0"])
        .args(["-numa", "node,nodeid=1,memdev=m1"])
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(archive)
        .args([
            "-append",
            "console=ttyS0 loglevel=4 panic=-1 no_timer_check rdinit=/init",
        ])
        .arg("-serial")
        .arg(format!("file:{}", console.display()))
        .args([
            "-display",
            "none",
            "-nodefaults",
            "-no-user-config",
            "-no-reboot",
        ])
        .stdin(Stdio::null())
        .spawn()
        .expect("QEMU is needed: apt-get install qemu-system-x86");
    let deadline = Instant::now() + LIMIT;
    while vm.try_wait().unwrap().is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(200));
    }
    // Fails only when it has ended, which is as well.
    let _ = vm.kill();
    let _ = vm.wait();
    read(&console)
}

fn read(console: &Path) -> String {
    String::from_utf8_lossy(&fs::read(console).unwrap_or_default()).into_owned()
}

fn tail(console: &str) -> String {
    let lines: Vec<&str> = console.lines().collect();
    let last = &lines[lines.len().saturating_sub(80)..];
    last.iter().map(|line| format!("{line}\n")).collect()
}
