//! A vsock port, for hypervisors without named virtio-serial ports (Cloud Hypervisor, Firecracker).
//!
//! The guest listens and the host calls; see vsock(7).

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use demeter_proto::VSOCK_PORT;

/// _IO(7, 0xb9) in linux/vm_sockets.h.
const GET_LOCAL_CID: libc::Ioctl = 0x7b9;

/// Whether a caller's address is the host's.
type IsHost = fn(&libc::sockaddr_vm) -> bool;

/// A listening vsock port, and the host's call.
#[derive(Debug)]
pub(super) struct Calls {
    listener: OwnedFd,
    host: Option<File>,
    is_host: IsHost,
}

/// Whether this guest has a vsock device: its address is not -1 (any), 1 (local) or 2 (the host).
pub(super) fn is_there(root: &Path) -> bool {
    let Ok(device) = File::open(root.join("dev/vsock")) else {
        return false;
    };
    let mut cid = 0_u32;
    // SAFETY: the kernel writes one 32-bit number to the pointer.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), GET_LOCAL_CID, &raw mut cid) };
    result == 0 && (libc::VMADDR_CID_HOST + 1..libc::VMADDR_CID_ANY).contains(&cid)
}

impl Calls {
    /// Listens for the host; `None` without a vsock device.
    pub(super) fn listen(root: &Path) -> io::Result<Option<Self>> {
        if !is_there(root) {
            return Ok(None);
        }
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: takes numbers only.
        let listener = owned(unsafe { libc::socket(libc::AF_VSOCK, kind, 0) })?;
        let mut address = no_address();
        address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
        address.svm_cid = libc::VMADDR_CID_ANY;
        address.svm_port = VSOCK_PORT;
        let bytes = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
        let at = (&raw const address).cast();
        // SAFETY: the address is ours, and the length is the address'.
        done(unsafe { libc::bind(listener.as_raw_fd(), at, bytes) })?;
        // SAFETY: takes numbers only.
        done(unsafe { libc::listen(listener.as_raw_fd(), 1) })?;
        Ok(Some(Self::on(listener, |peer| {
            peer.svm_cid == libc::VMADDR_CID_HOST
        })))
    }

    /// Accepts calls from a listening non-blocking socket.
    pub(super) fn on(listener: OwnedFd, is_host: IsHost) -> Self {
        Self {
            listener,
            host: None,
            is_host,
        }
    }

    /// Accepts the host's call, if any, and returns whether there is one. Calls from the guest's own processes are
    /// closed.
    pub(super) fn answer(&mut self) -> io::Result<bool> {
        if self.host.is_some() {
            return Ok(true);
        }
        let mut peer = no_address();
        let mut bytes = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: buffer and length are ours; the kernel writes no more than the length.
        let call = owned(unsafe {
            let peer = (&raw mut peer).cast();
            libc::accept4(self.listener.as_raw_fd(), peer, &raw mut bytes, flags)
        });
        match call {
            Ok(call) if (self.is_host)(&peer) => self.host = Some(call.into()),
            Ok(_) => tracing::debug!("a call from {} is none of the host", peer.svm_cid),
            Err(error) if is_passing(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(self.host.is_some())
    }

    /// The accepted call, for reading and writing.
    pub(super) fn host(&mut self) -> Option<&mut File> {
        self.host.as_mut()
    }

    /// Closes the call; the host can call again.
    pub(super) fn hang_up(&mut self) {
        self.host = None;
    }
}

impl AsFd for Calls {
    /// The descriptor to poll: the call, or else the listening socket.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.host {
            Some(host) => host.as_fd(),
            None => self.listener.as_fd(),
        }
    }
}

fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    matches!(error.kind(), ConnectionAborted | Interrupted | WouldBlock)
}

fn no_address() -> libc::sockaddr_vm {
    // SAFETY: a struct of numbers, for which zero is valid.
    unsafe { std::mem::zeroed() }
}

fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    done(fd)?;
    // SAFETY: the kernel has just created this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn done(result: libc::c_int) -> io::Result<()> {
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
