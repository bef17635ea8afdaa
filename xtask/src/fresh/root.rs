//! Runs commands in a root file system.
//!
//! Each command has its own mount namespace, so that no mount outlives it, and the outside is never visible through the
//! root. Each has its own process namespace, too: when its first process ends, all others end.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::shell;

/// The toolchain's path in the root.
const TOOLCHAIN: &str = "opt/rust";
/// The path of cargo's registry in the root.
const REGISTRY: &str = "root/.cargo/registry";

/// Mounts the file systems that programs need, and runs the remaining arguments in the root.
const ENTER: &str = r#"
root=$1 toolchain=$2 toolchain_at=$3 registry=$4 registry_at=$5
shift 5
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount --bind -o ro "$toolchain" "$root/$toolchain_at"
mount --bind "$registry" "$root/$registry_at"
trap 'exit 130' INT TERM
chroot "$root" "$@" &
wait $!
"#;

/// Prefixes of environment variables that are passed on, for access to networks and registries.
const HANDED_ON: [&str; 6] = [
    "CARGO_HTTP_",
    "CARGO_NET_",
    "CARGO_REGISTR",
    "CARGO_SOURCE_",
    "http",
    "no_proxy",
];

/// Polling interval of the stop flag.
const TICK: Duration = Duration::from_millis(100);
/// Attempts to remove the folder, because killed programs may still be ending.
const REMOVALS: u32 = 50;

/// Whether this process can create a root.
pub fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|me| me.uid() == 0)
}

/// A root file system in a temporary folder.
pub struct Root {
    folder: tempfile::TempDir,
    toolchain: PathBuf,
    registry: PathBuf,
    stop: Arc<AtomicBool>,
}

impl Root {
    /// An empty root. When `stop` is set, its programs are killed.
    pub fn new(stop: Arc<AtomicBool>) -> anyhow::Result<Self> {
        let sysroot = shell::program("rustc", "--print sysroot").output();
        let sysroot = sysroot.context("cannot run rustc")?.stdout;
        let home = std::env::var_os("CARGO_HOME")
            .map(PathBuf::from)
            .or_else(|| Some(std::env::home_dir()?.join(".cargo")))
            .context("there is no home folder for cargo's registry; set CARGO_HOME")?;
        let folder = tempfile::Builder::new().prefix("demeter-fresh-").tempdir();
        let root = Self {
            folder: folder.context("cannot make a folder for the root")?,
            toolchain: String::from_utf8_lossy(&sysroot).trim().into(),
            registry: home.join("registry"),
            stop,
        };
        for folder in [
            &root.registry,
            &root.path().join(TOOLCHAIN),
            &root.path().join(REGISTRY),
        ] {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let config = home.join("config.toml");
        if config.exists() {
            let to = root.path().join("root/.cargo/config.toml");
            fs::copy(&config, to).with_context(|| format!("cannot copy {}", config.display()))?;
        }
        Ok(root)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Runs a shell command in the root, with our own output. An error if it fails.
    pub fn run(&self, command: &str) -> anyhow::Result<()> {
        eprintln!("$ {command}");
        let mut enter = self.namespace(&["sh", "-euc", ENTER, "sh"]);
        enter.arg(self.path());
        enter.arg(&self.toolchain).arg(TOOLCHAIN);
        enter.arg(&self.registry).arg(REGISTRY);
        enter.args(["sh", "-euc", command]).env_clear();
        let handed_on = |name: &str| {
            let name = name.to_lowercase();
            HANDED_ON
                .iter()
                .any(|start| name.starts_with(&start.to_lowercase()))
        };
        enter.envs(std::env::vars().filter(|(name, _)| handed_on(name)));
        enter.env("HOME", "/root").env("LANG", "C.UTF-8").env(
            "PATH",
            format!(
                "/{TOOLCHAIN}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            ),
        );
        let status = self.wait(enter)?;
        if !status.success() {
            bail!("{command}: {status}");
        }
        Ok(())
    }

    /// Runs a program outside of the root and returns its output.
    pub fn output_outside(&self, command: &[&str]) -> anyhow::Result<Output> {
        let log = tempfile::NamedTempFile::new().context("cannot make a file for a log")?;
        let file = || log.reopen().context("cannot open a log");
        let mut program = self.namespace(command);
        program.stdout(file()?).stderr(file()?);
        let status = self.wait(program)?;
        Ok(Output {
            status,
            stdout: fs::read(log.path()).context("cannot read a log")?,
            stderr: Vec::new(),
        })
    }

    /// Keeps the folder.
    pub fn keep(self) -> PathBuf {
        self.folder.keep()
    }

    /// Removes the folder and its contents.
    pub fn remove(self) -> anyhow::Result<()> {
        let path = self.folder.keep();
        let mut tries = 0;
        while let Err(error) = fs::remove_dir_all(&path) {
            tries += 1;
            if tries == REMOVALS {
                return Err(error).with_context(|| format!("cannot remove {}", path.display()));
            }
            thread::sleep(TICK);
        }
        Ok(())
    }

    fn namespace(&self, command: &[&str]) -> Command {
        let mut unshare = Command::new("unshare");
        unshare
            .args(["--mount-proc", "--pid", "--fork", "--kill-child", "--"])
            .args(command)
            .stdin(Stdio::null());
        unshare
    }

    fn wait(&self, mut command: Command) -> anyhow::Result<ExitStatus> {
        let mut child = command.spawn().context("cannot run unshare")?;
        loop {
            if let Some(status) = child.try_wait().context("cannot wait for a command")? {
                if self.stop.load(Ordering::Relaxed) {
                    bail!("interrupted");
                }
                return Ok(status);
            }
            if self.stop.load(Ordering::Relaxed) {
                // It fails only if the program has already ended.
                let _ = child.kill();
            }
            thread::sleep(TICK);
        }
    }
}
