//! A VM with the test program as its init process, and its console output.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use demeter_lab::{Initramfs, Lab, dies_with_this_thread};

/// Boots a VM with these emulator options, and waits at most `limit` for its end. Its file system has this program as
/// `init`, and `files`. `append` extends the kernel's command line. Returns the console output.
pub fn boot(
    lab: &Lab,
    options: &[String],
    files: &[(&str, &Path)],
    append: &str,
    limit: Duration,
) -> String {
    let kernel = lab.kernel_image().unwrap_or_else(|e| panic!("{e}"));
    let folder = tempfile::tempdir().unwrap();
    let mut initramfs = Initramfs::default();
    let this = std::env::current_exe().unwrap();
    for (name, file) in [("init", this.as_path())].iter().chain(files) {
        initramfs.add_program(name, file).unwrap();
    }
    let archive = folder.path().join("initramfs");
    initramfs.write(&archive).unwrap();
    let console = folder.path().join("console");
    let mut vm = Command::new(&lab.qemu);
    dies_with_this_thread(&mut vm);
    let mut vm = vm
        .args(["-accel", "tcg", "-cpu", "qemu64"])
        .args(options)
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(archive)
        .arg("-append")
        .arg(format!(
            "console=ttyS0 loglevel=4 panic=-1 no_timer_check rdinit=/init {append}"
        ))
        .arg("-serial")
        .arg(format!("file:{}", console.display()))
        .args(["-display", "none", "-nodefaults", "-no-user-config"])
        .arg("-no-reboot")
        .stdin(Stdio::null())
        .spawn()
        .expect("QEMU is needed: apt-get install qemu-system-x86");
    let deadline = Instant::now() + limit;
    while vm.try_wait().unwrap().is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(200));
    }
    // Fails only if it has exited already.
    let _ = vm.kill();
    let _ = vm.wait();
    String::from_utf8_lossy(&fs::read(&console).unwrap_or_default()).into_owned()
}
