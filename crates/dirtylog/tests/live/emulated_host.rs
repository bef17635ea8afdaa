//! Runs the tests in an emulated host with KVM: AMD's SVM with nested paging, or Arm's EL2.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use demeter_lab::{Initramfs, Lab, dies_with_this_thread};
use libtest_mimic::{Arguments, Failed};

use crate::trials::trials;
use machine::{CONSOLE, EAGER_SPLIT, MODULES, OPTIONS};

/// The VM's last line if all tests pass.
const VERDICT: &str = "dirty log: everything holds";
/// Time limit on a slow machine.
const LIMIT: Duration = Duration::from_secs(900);
/// Number of boots, in case the emulated host's kernel panics. It did so once in about ten boots, with a corrupted
/// stack, when virtual CPUs ended while others ran; the cause is unknown.
const BOOTS: u32 = 3;

/// Machine options for our architecture.
#[cfg(target_arch = "x86_64")]
mod machine {
    /// Without "enhanced rep movsb", with which a kernel clears memory byte by byte.
    pub const OPTIONS: &[&str] = &["-machine", "pc", "-cpu", "max,erms=off"];
    pub const CONSOLE: &str = "ttyS0";
    /// KVM's modules, in the order in which they are loaded.
    pub const MODULES: [&str; 3] = [
        "virt/lib/irqbypass",
        "arch/x86/kvm/kvm",
        "arch/x86/kvm/kvm-amd",
    ];
    /// Values of KVM's parameter to test.
    pub const EAGER_SPLIT: &[Option<&str>] = &[Some("Y"), Some("N")];
}

/// On Arm, KVM is a part of Debian's kernel, and eager splitting is set per VM.
#[cfg(target_arch = "aarch64")]
mod machine {
    pub const OPTIONS: &[&str] = &[
        "-machine",
        "virt,virtualization=on,gic-version=3",
        "-cpu",
        "cortex-a76",
    ];
    pub const CONSOLE: &str = "ttyAMA0";
    pub const MODULES: [&str; 0] = [];
    pub const EAGER_SPLIT: &[Option<&str>] = &[None];
}

const EAGER_SPLIT_AT: &str = "/sys/module/kvm/parameters/eager_page_split";
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// Boots the VM and checks its console.
pub fn boot() -> Result<(), Failed> {
    for _ in 0..BOOTS {
        let said = console_of_a_boot()?;
        print!("{said}");
        if said.contains("Kernel panic") {
            continue;
        }
        let holds = said.lines().any(|line| line.trim() == VERDICT);
        return match holds && !said.contains("skipped:") {
            true => Ok(()),
            false => Err("the VM did not say that everything holds".into()),
        };
    }
    Err(format!("the VM's kernel panicked in each of {BOOTS} boots").into())
}

/// Boots the VM, waits for its end, and returns the console's output.
fn console_of_a_boot() -> Result<String, Failed> {
    let lab = Lab::from_env()?;
    let kernel = lab.kernel_image()?;
    let folder = tempfile::tempdir()?;
    let mut initramfs = Initramfs::default();
    initramfs.add_program("init", &std::env::current_exe()?)?;
    for (name, module) in MODULES.iter().zip(&lab.stock_modules(MODULES)?) {
        initramfs.add_file(&in_vm(name), module);
    }
    let archive = folder.path().join("initramfs");
    initramfs.write(&archive)?;
    let console = folder.path().join("console");
    let mut vm = Command::new(&lab.qemu);
    dies_with_this_thread(&mut vm);
    vm.args(OPTIONS)
        .args(["-accel", "tcg,thread=single"])
        .args(["-smp", "2", "-m", "2304M", "-serial"])
        .arg(format!("file:{}", console.display()))
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(archive)
        .arg("-append")
        .arg(format!(
            "console={CONSOLE} loglevel=4 panic=-1 no_timer_check hugepagesz=1G hugepages=1 rdinit=/init"
        ))
        .args(["-display", "none", "-nodefaults", "-no-user-config", "-no-reboot"])
        .stdin(Stdio::null());
    let mut vm = vm
        .spawn()
        .map_err(|error| format!("{} is needed: {error}", lab.qemu.display()))?;
    let deadline = Instant::now() + LIMIT;
    while vm.try_wait()?.is_none() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(200));
    }
    // It fails only if the VM has already ended.
    let _ = vm.kill();
    let _ = vm.wait();
    Ok(String::from_utf8_lossy(&fs::read(&console)?).into_owned())
}

/// Path of a module in the VM.
fn in_vm(name: &str) -> String {
    format!("/{}.ko", name.replace('/', "-"))
}

/// Runs the tests, prints the result on the console, and powers off.
pub fn first_process() -> ! {
    match measure() {
        Ok(true) => println!("{VERDICT}"),
        Ok(false) => println!("something does not hold"),
        Err(error) => println!("cannot set up the machine: {error}"),
    }
    // SAFETY: the first process of a VM owns the whole machine.
    unsafe { libc::reboot(libc::RB_POWER_OFF) };
    unreachable!("the machine is off");
}

fn measure() -> io::Result<bool> {
    for (kind, target) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        mount(kind, target)?;
    }
    for name in MODULES {
        load(Path::new(&in_vm(name)))?;
    }
    fs::write(HUGE_PAGES, "20")?;
    let mut holds = true;
    for eager in EAGER_SPLIT {
        if let Some(eager) = eager {
            fs::write(EAGER_SPLIT_AT, eager)?;
        }
        let arguments = Arguments {
            test_threads: Some(1),
            ..Arguments::default()
        };
        holds &= !libtest_mimic::run(&arguments, trials()).has_failed();
    }
    Ok(holds)
}

fn mount(kind: &str, target: &str) -> io::Result<()> {
    let (kind, target) = (CString::new(kind)?, CString::new(target)?);
    let (kind, target) = (kind.as_ptr(), target.as_ptr());
    // SAFETY: C strings that outlive the call; no data is passed.
    match unsafe { libc::mount(kind, target, kind, 0, std::ptr::null()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// finit_module(2) without parameters.
fn load(module: &Path) -> io::Result<()> {
    let file = File::open(module)?;
    // SAFETY: an open descriptor, no parameters, no flags.
    let loaded =
        unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
    match loaded {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
