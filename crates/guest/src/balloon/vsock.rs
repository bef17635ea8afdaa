//! The host's calls on a vsock port, for hypervisors without named virtio-serial ports (Cloud Hypervisor,
//! Firecracker): the guest listens, the host calls. See vsock(7).

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use demeter_proto::VSOCK_PORT;

/// _IO(7, 0xb9) in linux/vm_sockets.h.
const GET_LOCAL_CID: libc::Ioctl = 0x7b9;

/// Who may call. Whether it is the host, by its address.
type IsHost = fn(&libc::sockaddr_vm) -> bool;

/// A port on which the host may call, and its call.
#[derive(Debug)]
pub(super) struct Calls {
    listener: OwnedFd,
    host: Option<File>,
    is_host: IsHost,
}

/// Whether this guest has a vsock device: an address that is neither everybody's (-1), its own (1) nor
/// the host's (2).
pub(super) fn is_there(root: &Path) -> bool {
    let Ok(device) = File::open(root.join("dev/vsock")) else {
        return false;
    };
    let mut cid = 0_u32;
    // SAFETY: the kernel writes one number of 32 bits, to which the pointer leads.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), GET_LOCAL_CID, &raw mut cid) };
    result == 0 && (libc::VMADDR_CID_HOST + 1..libc::VMADDR_CID_ANY).contains(&cid)
}

impl Calls {
    /// Listens for the host, where the guest has a vsock device.
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
        // SAFETY: an address of ours that is as long as told.
        done(unsafe { libc::bind(listener.as_raw_fd(), at, bytes) })?;
        // SAFETY: takes numbers only.
        done(unsafe { libc::listen(listener.as_raw_fd(), 1) })?;
        Ok(Some(Self::on(listener, |peer| {
            peer.svm_cid == libc::VMADDR_CID_HOST
        })))
    }

    /// Takes calls that a listening socket has, which does not block.
    pub(super) fn on(listener: OwnedFd, is_host: IsHost) -> Self {
        Self {
            listener,
            host: None,
            is_host,
        }
    }

    /// Takes the host's call, if it has called; says whether there is one. Processes of the guest can call,
    /// too, and are hung up on.
    pub(super) fn answer(&mut self) -> io::Result<bool> {
        if self.host.is_some() {
            return Ok(true);
        }
        let mut peer = no_address();
        let mut bytes = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: room for an address of ours, with its length; the kernel writes no more.
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

    /// The call, to read and write.
    pub(super) fn host(&mut self) -> Option<&mut File> {
        self.host.as_mut()
    }

    /// Ends the call, and lets the host call again.
    pub(super) fn hang_up(&mut self) {
        self.host = None;
    }
}

impl AsFd for Calls {
    /// What becomes readable when there is something to read, or to answer.
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
    // SAFETY: numbers only, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    done(fd)?;
    // SAFETY: the kernel has just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn done(result: libc::c_int) -> io::Result<()> {
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
