//! Tests that ending `demeter run` also ends a hanging emulator.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Longest wait for the end of a process.
const PATIENCE: Duration = Duration::from_secs(20);

/// A command whose booted VM hangs.
struct Hanging {
    /// The command's temporary directory.
    temporary: PathBuf,
    vm_pid: String,
    command: Child,
    _folder: tempfile::TempDir,
}

impl Hanging {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let programs = folder.path().join("programs");
        let temporary = folder.path().join("tmp");
        fs::create_dir(&programs).unwrap();
        fs::create_dir(&temporary).unwrap();
        let demeter = programs.join("demeter");
        // A child of another test would inherit the copy while it is open for writing, and then it cannot be executed.
        static STARTS: Mutex<()> = Mutex::new(());
        let start = STARTS.lock().unwrap();
        fs::copy(env!("CARGO_BIN_EXE_demeter"), &demeter).unwrap();
        for name in ["gups", "memlat", "mix"] {
            fs::write(programs.join(name), "").unwrap();
        }
        let qemu = folder.path().join("qemu");
        let pid = folder.path().join("pid");
        fs::write(
            &qemu,
            format!(
                "#!/bin/sh\n\
                 if [ \"$1\" = --version ]; then echo 'QEMU emulator version 7.2.0'; exit; fi\n\
                 case \"$*\" in *,check=on) exit;; esac\n\
                 echo $$ >{}\n\
                 echo '{{\"report\":\"booted\",\"kernel\":\"6.12\",\"fast_free_mib\":1,\
                 \"slow_free_mib\":1}}' >&0\n\
                 exec sleep 1000\n",
                pid.display()
            ),
        )
        .unwrap();
        fs::set_permissions(&qemu, fs::Permissions::from_mode(0o755)).unwrap();
        let scenarios = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
        // A test runner under nohup ignores SIGHUP, and its children would, too.
        let mut command = Command::new("env")
            .arg("--default-signal=HUP")
            .arg(demeter)
            .arg("run")
            .arg(scenarios.join("ci.toml"))
            .env("DEMETER_QEMU", &qemu)
            .env("DEMETER_KERNEL", "/dev/null")
            .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
            .env("TMPDIR", &temporary)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(start);
        let mut lines = BufReader::new(command.stderr.take().unwrap()).lines();
        let booted = lines.find(|line| line.as_ref().unwrap().contains("Linux 6.12"));
        assert!(booted.is_some(), "the command ended before its VM was up");
        let vm_pid = fs::read_to_string(pid).unwrap().trim().to_owned();
        Self {
            temporary,
            vm_pid,
            command,
            _folder: folder,
        }
    }

    fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.command.id());
        assert!(
            Command::new("sh")
                .args(["-c", &kill])
                .status()
                .unwrap()
                .success()
        );
    }

    fn assert_the_vm_goes(&self) {
        let process = Path::new("/proc").join(&self.vm_pid);
        let start = Instant::now();
        while is_running(&process) {
            assert!(start.elapsed() < PATIENCE, "the VM still runs");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Whether the process exists and is no zombie.
fn is_running(process: &Path) -> bool {
    fs::read_to_string(process.join("stat")).is_ok_and(|stat| {
        !stat
            .rsplit(") ")
            .next()
            .unwrap_or_default()
            .starts_with('Z')
    })
}

#[test]
fn ctrl_c_or_the_end_of_the_terminal_ends_the_vm_and_cleans_up() {
    for signal in ["INT", "TERM", "HUP"] {
        let mut hanging = Hanging::start();
        hanging.signal(signal);
        assert_eq!(
            hanging.command.wait().unwrap().code(),
            Some(130),
            "SIG{signal}"
        );
        hanging.assert_the_vm_goes();
        assert_eq!(
            fs::read_dir(&hanging.temporary).unwrap().count(),
            0,
            "SIG{signal}"
        );
    }
}

#[test]
fn a_vm_does_not_outlive_a_command_that_was_killed() {
    let mut hanging = Hanging::start();
    hanging.signal("KILL");
    hanging.command.wait().unwrap();
    hanging.assert_the_vm_goes();
}
