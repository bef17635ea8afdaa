//! A private libvirtd: a user's daemon (`qemu:///session`) in its own folder, isolated from the system's domains.
//!
//! libvirt's domains outlive their daemon, and would outlive this process. A *keeper* prevents that. It is a shell that
//! waits until its standard input ends, as it does when this process exits. It then kills the daemon and its domains.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::lchown;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use demeter_host_api::config::Libvirt;
use rustix::process::{Pid, Signal, geteuid, kill_process};

use super::super::tool;
use crate::error::Error;

const URI: &str = "qemu:///session";

/// UID of the daemon if we are root, as root's daemon would use the system's folders.
const NOBODY: u32 = 65534;

/// Time limit until it listens.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Interval between checks of the socket.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// No log daemon, which would outlive us, and no security profiles, which would not know our folders.
const CONFIG: &str = "stdio_handler = \"file\"\nsecurity_driver = \"none\"\n";

/// Kills the daemon and its domains, by the PID files in the folder `$1`. It checks that each process has the folder in
/// its environment. A PID file has no newline at its end, which `read` reports as failure.
const KEEPER: &str = r#"read -r _
for note in "$1"/libvirt/qemu/run/*.pid; do
    read -r pid <"$note"
    if grep -qsF "$1" "/proc/$pid/environ"; then kill -KILL "$pid"; fi
done"#;

const MEND: &str =
    "apt-get install libvirt-daemon libvirt-clients, or leave \"libvirt\" out of provision.through";

/// A running daemon; dropping it ends it and all its domains.
#[derive(Debug)]
pub struct Daemon {
    folder: tempfile::TempDir,
    programs: Programs,
    process: Mutex<Child>,
    keeper: Child,
}

#[derive(Debug)]
struct Programs {
    libvirtd: PathBuf,
    virsh: PathBuf,
}

impl Daemon {
    /// Starts the daemon and waits until it listens.
    pub fn start() -> Result<Self, Error> {
        let find = |name: &str| {
            tool::find(Path::new(name)).ok_or_else(|| Error::Missing {
                what: format!("there is no {name}, which provision.through = [\"libvirt\"] needs"),
                hint: MEND.into(),
            })
        };
        let programs = Programs {
            libvirtd: find("libvirtd")?,
            virsh: find("virsh")?,
        };
        let folder = tempfile::Builder::new()
            .prefix("demeter-virt-")
            .tempdir()
            .map_err(Error::io("create", "a folder for libvirtd"))?;
        let config = folder.path().join("libvirt/qemu.conf");
        let written =
            fs::create_dir(folder.path().join("libvirt")).and_then(|()| fs::write(&config, CONFIG));
        written.map_err(Error::io("write", &config))?;
        give(folder.path())?;
        give(&folder.path().join("libvirt"))?;
        let keeper = keeper(folder.path())?;
        let process = spawn(folder.path(), &programs.libvirtd)?;
        let daemon = Self {
            folder,
            programs,
            process: Mutex::new(process),
            keeper,
        };
        daemon.wait_until_up(&mut daemon.process())?;
        Ok(daemon)
    }

    /// Stops the daemon as systemd would, and starts it again; its domains keep running. Returns once it listens.
    pub fn restart(&self) -> Result<(), Error> {
        let mut process = self.process();
        let ended = kill_process(Pid::from_child(&process), Signal::TERM)
            .map_err(io::Error::from)
            .and_then(|()| process.wait());
        ended.map_err(Error::io("end", &self.programs.libvirtd))?;
        *process = spawn(self.folder.path(), &self.programs.libvirtd)?;
        self.wait_until_up(&mut process)
    }

    /// Starts the domain of this XML; libvirt forgets it when it ends.
    pub fn create(&self, xml: &Path) -> Result<(), Error> {
        let mut virsh = command(self.folder.path(), &self.programs.virsh);
        // Give up on a daemon that is silent for 20 s.
        virsh.args(["-k", "5", "-K", "4", "-c", URI, "create"]);
        let hint = "libvirt 9.0 with QEMU 7.2 is known to work";
        tool::output(virsh.arg(xml), hint).map(drop)
    }

    /// Gives a folder and its content to the daemon's user.
    pub fn give(&self, folder: &Path) -> Result<(), Error> {
        give(folder)?;
        for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
            give(&entry.map_err(Error::io("list", folder))?.path())?;
        }
        Ok(())
    }

    /// The connection of the host controller to the daemon.
    pub fn libvirt(&self) -> Libvirt {
        Libvirt {
            socket: Some(self.socket()),
            uri: Some(URI.into()),
            owner_uid: user(),
        }
    }

    /// Path of a domain's PID file.
    pub fn pid_file_of(&self, domain: &str) -> PathBuf {
        let run = self.folder.path().join("libvirt/qemu/run");
        run.join(format!("{domain}.pid"))
    }

    /// Log of a domain's emulator.
    pub fn log_of(&self, domain: &str) -> PathBuf {
        let logs = self.folder.path().join("libvirt/qemu/log");
        logs.join(format!("{domain}.log"))
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("libvirt/libvirt-sock")
    }

    fn process(&self) -> std::sync::MutexGuard<'_, Child> {
        // The child is consistent even if another thread panicked.
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until_up(&self, process: &mut Child) -> Result<(), Error> {
        let socket = self.socket();
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let Err(error) = UnixStream::connect(&socket) else {
                return Ok(());
            };
            let ended = process.try_wait();
            if let Some(status) = ended.map_err(Error::io("wait for", &self.programs.libvirtd))? {
                let log = fs::read_to_string(log(self.folder.path())).unwrap_or_default();
                return Err(Error::Tool {
                    program: self.programs.libvirtd.display().to_string(),
                    said: log.lines().last().map_or(status.to_string(), str::to_owned),
                    hint: MEND.into(),
                });
            }
            if Instant::now() >= deadline {
                return Err(Error::io("connect to", &socket)(error));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The keeper kills both the daemon and its domains. Each call fails only if that has happened already.
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
        let process = self.process.get_mut();
        let process = process.unwrap_or_else(PoisonError::into_inner);
        let _ = process.kill();
        let _ = process.wait();
    }
}

/// The UID of the daemon, if it is not ours.
fn user() -> Option<u32> {
    geteuid().is_root().then_some(NOBODY)
}

fn give(path: &Path) -> Result<(), Error> {
    match user() {
        Some(user) => lchown(path, Some(user), Some(user)).map_err(Error::io("give away", path)),
        None => Ok(()),
    }
}

fn log(folder: &Path) -> PathBuf {
    folder.join("log")
}

/// Starts the keeper; it acts when its standard input ends.
fn keeper(folder: &Path) -> Result<Child, Error> {
    command(folder, Path::new("sh"))
        .args(["-c", KEEPER, "keeper"])
        .arg(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(Error::io("start", "sh"))
}

fn spawn(folder: &Path, libvirtd: &Path) -> Result<Child, Error> {
    let log = log(folder);
    let errors = File::options().create(true).append(true).open(&log);
    let errors = errors.map_err(Error::io("create", &log))?;
    command(folder, libvirtd)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(errors)
        .spawn()
        .map_err(Error::io("start", libvirtd))
}

/// A command that uses the folder for all user state, so that it finds only our daemon.
fn command(folder: &Path, program: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .current_dir(folder)
        .env("HOME", folder)
        .env("LIBVIRT_AUTOSTART", "0")
        // In its own process group, so that Ctrl-C reaches us only, and we end it.
        .process_group(0);
    for kind in ["RUNTIME_DIR", "CONFIG_HOME", "CACHE_HOME", "DATA_HOME"] {
        command.env(format!("XDG_{kind}"), folder);
    }
    if let Some(user) = user() {
        command.uid(user).gid(user);
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keeper_kills_what_the_daemon_noted_and_nobody_else() {
        let folder = tempfile::tempdir().unwrap();
        let other = tempfile::tempdir().unwrap();
        let run = folder.path().join("libvirt/qemu/run");
        fs::create_dir_all(&run).unwrap();
        give(folder.path()).unwrap();
        give(other.path()).unwrap();
        // The second process has a PID from a domain's file, but is not a domain.
        let [mut domain, mut stranger] = [folder.path(), other.path()].map(|of| {
            let mut sleep = command(of, Path::new("sleep"));
            sleep.arg("60").spawn().unwrap()
        });
        fs::write(run.join("a.pid"), domain.id().to_string()).unwrap();
        fs::write(run.join("b.pid"), stranger.id().to_string()).unwrap();
        let mut keeper = keeper(folder.path()).unwrap();
        assert!(domain.try_wait().unwrap().is_none());
        drop(keeper.stdin.take());
        keeper.wait().unwrap();
        let status = domain.wait().unwrap();
        assert!(!status.success(), "{status}");
        assert!(stranger.try_wait().unwrap().is_none());
        stranger.kill().unwrap();
        stranger.wait().unwrap();
    }
}
