//! The VM's init process: mounts file systems, runs the job, powers off.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

use super::host_link::HostLink;
use super::{job, layout, modules};
use crate::fault::Fault;
use crate::link::{JOB_PATH, Job, LAST_WORDS, VmMessage};

/// Time limit for the host's port to appear.
const PORT_WAIT: Duration = Duration::from_secs(10);

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
    let mut link = HostLink::open(root, patience)?;
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

#[cfg(test)]
mod tests {
    use super::*;

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
