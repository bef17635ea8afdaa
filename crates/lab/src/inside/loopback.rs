//! The network of a VM: loopback only.

use std::io;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

/// Enables the loopback interface (netdevice(7)).
pub fn up() -> io::Result<()> {
    // The ioctl works on any socket.
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    // SAFETY: all fields are numbers, so zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    // SAFETY: the kernel reads the request, whose name is zero-terminated.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
