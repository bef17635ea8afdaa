//! Tests the Debian packages in an emulated VM: a Debian with systemd, a fast and a slow NUMA node.
//!
//! `check.sh` runs in the VM, and prints its results on the serial port.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::deb;
use crate::fresh::{Release, archive, root};
use crate::shell;

/// Programs needed for the test, with their Debian packages.
const NEEDED: [(&str, &str); 3] = [
    ("mmdebstrap", "mmdebstrap"),
    ("mkfs.ext4", "e2fsprogs"),
    ("qemu-system-x86_64", "qemu-system-x86"),
];
/// Packages in the root besides the minimal Debian and the kernel: the dependencies of ours, so that the VM needs no
/// network, and the tools of the checks.
const INCLUDED: &str = "systemd-sysv,udev,kmod,dkms,procps,curl";
/// The folder of packages and checks in the root.
const FOLDER: &str = "package-test";
/// The unit that runs them.
const UNIT: &str = "package-test.service";
/// Size of the VM's disk, MiB; it is sparse.
const DISK_MIB: u64 = 4096;
/// Time limit of the VM on a slow machine.
const LIMIT: Duration = Duration::from_secs(90 * 60);
/// Polling interval of the console.
const TICK: Duration = Duration::from_millis(200);
/// Prefix of each result, and of the last line.
const FINDING: &str = "check: ";
const END: &str = "end";

/// Options of `cargo xtask package-test`.
#[derive(clap::Args)]
pub struct Args {
    /// The Debian release
    #[arg(value_enum)]
    release: Release,
    /// Test the packages that are in target/deb already
    #[arg(long)]
    built: bool,
    /// Keep the VM's disk and console log, and print their paths
    #[arg(long)]
    keep: bool,
}

/// The release's kernel with DAMON, the only tracker in an emulated VM. The package of its headers has the same suffix.
fn kernel(release: Release) -> &'static str {
    match release {
        Release::Bookworm => "6.12-cloud-amd64",
        Release::Trixie | Release::Forky | Release::Sid => "cloud-amd64",
    }
}

/// Runs the test, and prints a line for each check.
pub fn package_test(args: &Args) -> anyhow::Result<()> {
    let release = args.release.codename();
    if !root::is_root() {
        println!(
            "skipped: only root can make a root file system: sudo cargo xtask package-test {release}"
        );
        return Ok(());
    }
    let sources = archive::sources(release);
    if !sources.iter().any(|source| source.suite == release) {
        println!("skipped: this machine's apt knows no archive of Debian");
        return Ok(());
    }
    shell::need(&NEEDED)?;
    if !args.built {
        deb::deb()?;
    }
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("cannot catch signals")?;
    }
    let work = tempfile::Builder::new()
        .prefix("demeter-package-")
        .tempdir();
    let work = work.context("cannot make a folder for the VM")?;
    let vm = Vm {
        folder: work.path(),
    };
    let console = match vm.make(args.release, &sources)? {
        true => Some(vm.boot(&stop)),
        false => None,
    };
    if args.keep {
        println!("kept: {}", work.keep().display());
    }
    match console {
        Some(console) => judge(&console?),
        None => {
            println!("skipped: the archive cannot be reached");
            Ok(())
        }
    }
}

/// The VM's files.
struct Vm<'a> {
    folder: &'a Path,
}

impl Vm<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Creates the disk, the kernel and its initramfs. Returns false if the archive cannot be reached.
    fn make(&self, release: Release, sources: &[archive::Source]) -> anyhow::Result<bool> {
        let root = self.path("root");
        let kernel = kernel(release);
        let mut mmdebstrap = Command::new("mmdebstrap");
        mmdebstrap
            .args(["--variant=minbase", "--quiet"])
            .arg(format!(
                "--include={INCLUDED},linux-image-{kernel},linux-headers-{kernel}"
            ))
            .arg(release.codename())
            .arg(&root)
            .args(sources.iter().map(archive::Source::line));
        eprintln!("== mmdebstrap {}", release.codename());
        let output = mmdebstrap.output().context("cannot run mmdebstrap")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            if said.contains("apt-get update") && said.contains("failed") {
                return Ok(false);
            }
            bail!("mmdebstrap: {}\n{said}", output.status);
        }

        let folder = root.join(FOLDER);
        let units = root.join("etc/systemd/system");
        let wants = units.join("multi-user.target.wants");
        for folder in [&folder, &wants] {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        for package in deb::packages(&deb::folder())? {
            let to = folder.join(package.file_name().unwrap_or_default());
            fs::copy(&package, to).with_context(|| format!("cannot copy {}", package.display()))?;
        }
        for (path, text) in [
            (folder.join("check.sh"), include_str!("check.sh")),
            (units.join(UNIT), include_str!("check.service")),
        ] {
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        symlink(Path::new("..").join(UNIT), wants.join(UNIT))
            .context("cannot enable the checks")?;
        for (link, name) in [("vmlinuz", "kernel"), ("initrd.img", "initramfs")] {
            fs::copy(root.join(link), self.path(name))
                .with_context(|| format!("the root has no /{link}"))?;
        }
        let mut mkfs = shell::program("mkfs.ext4", "-q -d");
        mkfs.arg(&root)
            .arg(self.path("disk"))
            .arg(format!("{DISK_MIB}M"));
        shell::run(mkfs)?;
        fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
        Ok(true)
    }

    /// Boots the VM, prints results as they come, and returns the console's output.
    fn boot(&self, stop: &AtomicBool) -> anyhow::Result<String> {
        let qemu = std::env::var_os("DEMETER_QEMU").unwrap_or_else(|| "qemu-system-x86_64".into());
        eprintln!("== boot");
        let mut vm = Command::new(qemu);
        vm.args([
            "-machine",
            "pc",
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "qemu64",
        ])
        .args(["-smp", "2", "-m", "2048M"])
        .args([
            "-object",
            "memory-backend-memfd,id=node0,size=1280M,share=on",
        ])
        .args([
            "-object",
            "memory-backend-memfd,id=node1,size=768M,share=on",
        ])
        .args(["-numa", "node,nodeid=0,cpus=0-1,memdev=node0"])
        .args(["-numa", "node,nodeid=1,memdev=node1"])
        .args([
            "-display",
            "none",
            "-nodefaults",
            "-no-user-config",
            "-no-reboot",
        ])
        .args(["-device", "virtio-serial-pci"])
        .args(["-chardev", "socket,id=host,path=host,server=on,wait=off"])
        .args(["-device", "virtserialport,chardev=host,name=org.demeter.0"])
        .args(["-drive", "file=disk,format=raw,if=virtio,cache=unsafe"])
        .args([
            "-kernel",
            "kernel",
            "-initrd",
            "initramfs",
            "-serial",
            "file:console",
        ])
        .args([
            "-append",
            "console=ttyS0 root=/dev/vda rw panic=-1 no_timer_check systemd.show_status=no \
                 loglevel=3 systemd.mask=serial-getty@ttyS0.service",
        ])
        .current_dir(self.folder)
        .stdin(Stdio::null());
        let mut vm = vm.spawn().context("cannot run QEMU")?;
        let deadline = Instant::now() + LIMIT;
        let mut shown = 0;
        let ended = loop {
            let ended = vm.try_wait().context("cannot wait for QEMU")?;
            let console = fs::read(self.path("console")).unwrap_or_default();
            let console = String::from_utf8_lossy(&console).into_owned();
            for finding in findings(&console).skip(shown) {
                println!("{finding}");
                shown += 1;
            }
            if ended.is_some()
                || has_ended(&console)
                || Instant::now() > deadline
                || stop.load(Ordering::Relaxed)
            {
                break console;
            }
            thread::sleep(TICK);
        };
        // Fails only if the VM has already ended.
        let _ = vm.kill();
        vm.wait().context("cannot wait for QEMU")?;
        Ok(ended)
    }
}

/// The results in complete lines of the console's log.
fn findings(console: &str) -> impl Iterator<Item = &str> {
    let whole = console.rfind('\n').map_or("", |end| &console[..end]);
    whole
        .lines()
        .filter_map(|line| line.trim_end().strip_prefix(FINDING))
        .filter(|finding| *finding != END)
}

/// Whether all checks have run.
fn has_ended(console: &str) -> bool {
    console
        .lines()
        .any(|line| line.trim_end().strip_prefix(FINDING) == Some(END))
}

/// Checks that every check has run and none failed; otherwise shows the console's output.
fn judge(console: &str) -> anyhow::Result<()> {
    let failed = findings(console)
        .filter(|finding| !finding.ends_with(": ok"))
        .count();
    let ended = has_ended(console);
    if ended && failed == 0 {
        return Ok(());
    }
    eprintln!("{console}");
    match ended {
        true => bail!("{failed} checks failed"),
        false => bail!("the VM ended, or was ended, before all checks were made"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_lines_are_findings() {
        let console =
            "boot\r\ncheck: one: ok\r\n    check: not me\r\ncheck: two: FAILED: x\r\ncheck: thr";
        let found: Vec<_> = findings(console).collect();
        assert_eq!(found, ["one: ok", "two: FAILED: x"]);
    }

    #[test]
    fn a_failure_and_a_missing_end_are_errors() {
        assert!(judge("check: one: ok\r\ncheck: end\r\n").is_ok());
        assert!(judge("check: one: ok\r\n").is_err());
        assert!(judge("check: one: FAILED: x\r\ncheck: end\r\n").is_err());
    }
}
