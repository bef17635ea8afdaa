//! The VM's init process: mounts file systems, runs the job, powers off.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use demeter_guest::balloon::port;

use super::fault::Fault;
use super::{job, layout, modules};
use crate::link::{
    GO, JOB_PATH, Job, LAST_WORDS, LINE_MAX_BYTES, LineReader, PORT_NAME, VmMessage,
};

/// Time limit for the host's port to appear, and the polling interval.
const PORT_WAIT: Duration = Duration::from_secs(10);
const PORT_TICK: Duration = Duration::from_millis(10);

/// Runs the job in [`JOB_PATH`] and powers the machine off.
///
/// It mounts file systems and powers the machine off. It therefore runs only as the init process of a lab VM, started
/// by the kernel's command line.
pub fn init() -> io::Result<()> {
    if std::process::id() != 1 || !Path::new(JOB_PATH).exists() {
        return Err(io::Error::other(
            "lab-init is only for the first process of a lab VM",
        ));
    }
    if let Err(fault) = mount_all()
        .and_then(|()| take_console())
        .and_then(|()| run())
    {
        // Without a link, the host sees only the console's log.
        eprintln!("{LAST_WORDS}{fault}");
    }
    power_off()
}

/// Opens the link, runs the job and reports its result.
fn run() -> Result<(), Fault> {
    let root = Path::new("/");
    // Drivers that are modules find their devices some time after loading.
    let patience = match modules::load_early(root)? {
        true => PORT_WAIT,
        false => Duration::ZERO,
    };
    let mut link = Link::open(root, patience)?;
    let done = read_job().and_then(|job| {
        if !job.level.is_guest() {
            layout::agree(root, &job.scenario.machine)?;
        }
        job::run(&mut link, &job)
    });
    let last = match done {
        Ok(()) => VmMessage::Finished,
        Err(fault) => VmMessage::Failed {
            what: fault.to_string(),
        },
    };
    link.send(&last)
}

fn read_job() -> Result<Job, Fault> {
    let text = fs::read_to_string(JOB_PATH).map_err(Fault::io("read", JOB_PATH))?;
    serde_json::from_str(&text).map_err(|e| Fault::io("decode", JOB_PATH)(e.into()))
}

fn mount_all() -> Result<(), Fault> {
    for (kind, target) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/run"),
        ("tmpfs", "/tmp"),
        ("cgroup2", "/sys/fs/cgroup"),
        ("tracefs", "/sys/kernel/tracing"),
        ("debugfs", "/sys/kernel/debug"),
    ] {
        mount(kind, target, "")?;
    }
    fs::create_dir("/run/demeter").map_err(Fault::io("create", "/run/demeter"))
}

/// Mounts a file system with its own options.
pub fn mount(kind: &str, target: &str, options: &str) -> Result<(), Fault> {
    mount_at(kind, target, options).map_err(Fault::io("mount", target))
}

fn mount_at(kind: &str, target: &str, options: &str) -> io::Result<()> {
    let [kind, target, options] = [kind, target, options].map(CString::new);
    let (kind, target, options) = (kind?, target?, options?);
    // SAFETY: every pointer is a C string that outlives the call.
    let failed = unsafe {
        libc::mount(
            kind.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            0,
            options.as_ptr().cast(),
        )
    };
    if failed != 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Redirects the output of this process and its children to the console's log.
fn take_console() -> Result<(), Fault> {
    let path = "/dev/ttyS0";
    let console = File::options()
        .read(true)
        .write(true)
        .open(path)
        .map_err(Fault::io("open", path))?;
    for stdio in 0..=2 {
        // SAFETY: both descriptors are plain numbers; the kernel checks them.
        if unsafe { libc::dup2(console.as_raw_fd(), stdio) } < 0 {
            return Err(Fault::io("duplicate", path)(io::Error::last_os_error()));
        }
    }
    Ok(())
}

fn power_off() -> io::Result<()> {
    // SAFETY: the first process of a VM owns the whole machine; there is nothing to save.
    unsafe { libc::reboot(libc::RB_POWER_OFF) };
    Err(io::Error::last_os_error())
}

/// Orders of the host, one per line.
pub type Orders = LineReader<File>;

/// The connection to the host.
#[derive(Debug)]
pub struct Link {
    port: File,
    orders: Orders,
    path: PathBuf,
}

impl Link {
    /// Opens the virtio-serial port named [`PORT_NAME`], waiting at most `patience` for it.
    fn open(root: &Path, patience: Duration) -> Result<Self, Fault> {
        let deadline = Instant::now() + patience;
        let name = loop {
            match find_port(root) {
                Err(_) if Instant::now() < deadline => thread::sleep(PORT_TICK),
                found => break found?,
            }
        };
        let path = root.join("dev").join(name);
        let port = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(Fault::io("open", &path))?;
        let mut link = Self {
            orders: LineReader::new(port.try_clone().map_err(Fault::io("duplicate", &path))?),
            port,
            path,
        };
        // After a reset, half a line from before may remain in the pipe.
        link.write(b"\n")?;
        Ok(link)
    }

    /// The host's orders, for another thread.
    pub fn orders(&self) -> Result<Orders, Fault> {
        let port = self.port.try_clone();
        Ok(LineReader::new(
            port.map_err(Fault::io("duplicate", &self.path))?,
        ))
    }

    /// Waits for the host's [`GO`]. The host's time limit bounds the wait.
    pub fn wait_for_go(&mut self) -> Result<(), Fault> {
        match self
            .orders
            .next_line()
            .map_err(Fault::io("read", &self.path))?
        {
            Some(order) if order == GO => Ok(()),
            order => Err(Fault::Order(order)),
        }
    }

    /// Sends one report.
    pub fn send(&mut self, report: &VmMessage) -> Result<(), Fault> {
        let mut line = serde_json::to_vec(report)
            .map_err(|e| Fault::io("encode for", &self.path)(e.into()))?;
        if line.len() >= LINE_MAX_BYTES {
            return Err(Fault::io("write", &self.path)(io::Error::other(
                "report too long",
            )));
        }
        line.push(b'\n');
        self.write(&line)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        self.port
            .write_all(bytes)
            .map_err(Fault::io("write", &self.path))
    }
}

/// The device name under /dev of the host's port.
fn find_port(root: &Path) -> Result<String, Fault> {
    let found = port::find(root, PORT_NAME).map_err(Fault::io("find the port", PORT_NAME))?;
    found.ok_or_else(|| Fault::Unsupported {
        what: format!("there is no virtio-serial port named {PORT_NAME}"),
        hint: "use a kernel with CONFIG_VIRTIO_CONSOLE=y, as linux-image-cloud-amd64 6.12",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_missing_is_named() {
        let root = tempfile::tempdir().unwrap();
        let said = find_port(root.path()).unwrap_err().to_string();
        assert!(
            said.contains(PORT_NAME) && said.contains("CONFIG_VIRTIO_CONSOLE"),
            "{said}"
        );
    }

    #[test]
    fn init_refuses_to_run_elsewhere() {
        assert!(
            init()
                .unwrap_err()
                .to_string()
                .contains("only for the first process")
        );
    }
}
