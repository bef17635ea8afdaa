//! The network of a VM: programs reach each other, and nobody else.

use std::io;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

/// Switches the loopback interface on (netdevice(7)).
pub fn up() -> io::Result<()> {
    // Any socket will do to ask by.
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    // SAFETY: all fields are numbers, for which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    // SAFETY: the kernel reads the request, whose name ends with a zero.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
