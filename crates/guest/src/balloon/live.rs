//! The kernel's balloon driver: `/dev/demeter_balloon` and its statistics in sysfs.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use demeter_policy::{ByteCount, GuestPhysAddr, NodeId, PAGE_SIZE};
use demeter_proto::{GpaRange, Nonce};

use super::{
    Balloon, BalloonError, Cursor, Deflated, Inflated, Listed, NodeBalloon, Stop, abi, join,
};

const DEVICE: &str = "dev/demeter_balloon";
const STATS_DIR: &str = "sys/class/misc/demeter_balloon";

/// A client of the kernel's balloon driver.
#[derive(Debug)]
pub struct LiveBalloon {
    device: File,
    stats_dir: PathBuf,
    /// A buffer that every call reuses.
    ranges: Vec<abi::Range>,
}

impl LiveBalloon {
    /// Opens the driver below `root`.
    pub fn open(root: &Path) -> Result<Self, BalloonError> {
        let path = root.join(DEVICE);
        let device = File::options()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path)
            .map_err(|e| BalloonError::Unavailable {
                why: format!("cannot open {}: {e}", path.display()),
                hint: match e.kind() {
                    io::ErrorKind::NotFound => {
                        "load it (modprobe demeter_balloon), or let the host use virtio-mem"
                    }
                    _ => "run the agent as root",
                },
            })?;
        let mut balloon = Self {
            device,
            stats_dir: root.join(STATS_DIR),
            ranges: vec![abi::Range::default(); abi::RANGES_MAX],
        };
        let mut version = 0u32;
        balloon.call(abi::IOC_ABI, &mut version, || "tell its version".into())?;
        if version != abi::ABI {
            return Err(BalloonError::Unavailable {
                why: format!("its interface is version {version}, not {}", abi::ABI),
                hint: "load the one that came with this agent",
            });
        }
        Ok(balloon)
    }

    /// `argument` must be of the type that `request` takes.
    fn call<T>(
        &mut self,
        request: libc::Ioctl,
        argument: &mut T,
        what: impl FnOnce() -> String,
    ) -> Result<(), BalloonError> {
        // SAFETY: the request's number contains the size of T, which the kernel reads and fills. If T has a pointer, it
        // is `self.ranges`', with its length.
        let failed = unsafe { libc::ioctl(self.device.as_raw_fd(), request, argument) } < 0;
        if !failed {
            return Ok(());
        }
        Err(BalloonError::Call {
            what: what(),
            source: io::Error::last_os_error(),
        })
    }

    /// The ranges that a call returned.
    fn filled(&self, count: u32) -> Result<Vec<GpaRange>, BalloonError> {
        let filled = self
            .ranges
            .get(..count as usize)
            .ok_or_else(|| BalloonError::Nonsense(format!("{count} ranges")))?;
        let ranges = filled.iter().map(|r| GpaRange {
            start: GuestPhysAddr(r.start),
            bytes: ByteCount(r.bytes),
        });
        Ok(join(ranges.collect()))
    }

    /// Returns up to `bytes` of held memory of `node` between `start` and `end` to the kernel.
    pub fn deflate_within(
        &mut self,
        node: NodeId,
        bytes: ByteCount,
        (start, end): (GuestPhysAddr, GuestPhysAddr),
    ) -> Result<Deflated, BalloonError> {
        let mut call = abi::Deflate {
            node: node.0,
            bytes: bytes.0,
            start: start.0,
            end: end.0,
            ..Default::default()
        };
        self.call(abi::IOC_DEFLATE, &mut call, || {
            format!("give back {} bytes of node {node}", bytes.0)
        })?;
        Ok(Deflated {
            moved: ByteCount(call.moved),
            stop: stop(call.stop)?,
        })
    }

    fn statistic(&self, node: NodeId, name: &str) -> Result<ByteCount, BalloonError> {
        let path = self.stats_dir.join(format!("node{node}/{name}"));
        let text = fs::read_to_string(&path).map_err(|source| BalloonError::Call {
            what: format!("show {}", path.display()),
            source,
        })?;
        let bytes = text.trim().parse().map_err(|_| {
            BalloonError::Nonsense(format!("{:?} in {}", text.trim(), path.display()))
        })?;
        Ok(ByteCount(bytes))
    }
}

impl Balloon for LiveBalloon {
    fn inflate(
        &mut self,
        node: NodeId,
        bytes: ByteCount,
        reclaim: bool,
    ) -> Result<Inflated, BalloonError> {
        let mut call = abi::Inflate {
            node: node.0,
            flags: if reclaim { abi::RECLAIM } else { 0 },
            bytes: bytes.0,
            ranges: self.ranges.as_mut_ptr() as u64,
            ranges_max: self.ranges.len() as u32,
            ..Default::default()
        };
        self.call(abi::IOC_INFLATE, &mut call, || {
            format!("hold {} more bytes of node {node}", bytes.0)
        })?;
        Ok(Inflated {
            ranges: self.filled(call.ranges_count)?,
            stop: stop(call.stop)?,
        })
    }

    fn deflate(&mut self, node: NodeId, bytes: ByteCount) -> Result<Deflated, BalloonError> {
        let everywhere = (GuestPhysAddr(0), GuestPhysAddr(u64::MAX));
        self.deflate_within(node, bytes, everywhere)
    }

    fn list(&mut self, node: NodeId, cursor: Cursor) -> Result<Listed, BalloonError> {
        let mut call = abi::List {
            node: node.0,
            ranges_max: self.ranges.len() as u32,
            ranges: self.ranges.as_mut_ptr() as u64,
            cursor: cursor.0,
            ..Default::default()
        };
        self.call(abi::IOC_LIST, &mut call, || {
            format!("list held memory of node {node}")
        })?;
        Ok(Listed {
            ranges: self.filled(call.ranges_count)?,
            next: (call.more != 0).then_some(Cursor(call.cursor)),
        })
    }

    fn allow_oom(&mut self, node: NodeId, bytes: ByteCount) -> Result<(), BalloonError> {
        let mut call = abi::Allow {
            node: node.0,
            bytes: bytes.0 / PAGE_SIZE * PAGE_SIZE,
            ..Default::default()
        };
        self.call(abi::IOC_ALLOW, &mut call, || {
            format!("give back {} bytes of node {node} by itself", bytes.0)
        })
    }

    fn prove(&mut self, node: NodeId, nonce: Nonce) -> Result<GuestPhysAddr, BalloonError> {
        let mut call = abi::Prove {
            node: node.0,
            nonce: nonce.0,
            ..Default::default()
        };
        self.call(abi::IOC_PROVE, &mut call, || {
            format!("show whose memory node {node} is")
        })?;
        Ok(GuestPhysAddr(call.page))
    }

    fn stats(&mut self, node: NodeId) -> Result<NodeBalloon, BalloonError> {
        Ok(NodeBalloon {
            held: self.statistic(node, "held_bytes")?,
            oom_returned: self.statistic(node, "oom_returned_bytes")?,
        })
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.device.as_fd())
    }

    fn take_event(&mut self) -> Result<bool, BalloonError> {
        match self.device.read(&mut [0; 8]) {
            Ok(_) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(source) => Err(BalloonError::Call {
                what: "tell what it gave back".into(),
                source,
            }),
        }
    }
}

/// `enum demeter_balloon_stop`
fn stop(number: u32) -> Result<Stop, BalloonError> {
    Ok(match number {
        0 => Stop::Done,
        1 | 3 => Stop::Again,
        2 => Stop::NoMemory,
        4 => Stop::Empty,
        _ => return Err(BalloonError::Nonsense(format!("stop {number}"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_is_not_loaded_is_told_with_the_hint() {
        let root = tempfile::tempdir().unwrap();
        let error = LiveBalloon::open(root.path()).unwrap_err().to_string();
        assert!(
            error.contains("modprobe demeter_balloon") && error.contains("virtio-mem"),
            "{error}"
        );
    }

    #[test]
    fn another_device_of_that_name_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("dev")).unwrap();
        fs::write(root.path().join(DEVICE), "").unwrap();
        let error = LiveBalloon::open(root.path()).unwrap_err().to_string();
        assert!(error.contains("refuses to tell its version"), "{error}");
    }
}
