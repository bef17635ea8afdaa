//! An emulator process, started by the lab or by libvirt.

use std::io;
use std::process::Child;

use super::domain::process::Domain;

/// A running emulator.
#[derive(Debug)]
pub enum Emulator {
    /// A child process.
    Child(Child),
    /// A domain of libvirt.
    Domain(Domain),
}

impl Emulator {
    /// PID of the emulator.
    pub fn pid(&self) -> u32 {
        match self {
            Self::Child(child) => child.id(),
            Self::Domain(domain) => domain.pid(),
        }
    }

    /// Kills it with SIGKILL; returns when it has exited.
    pub fn kill(&mut self) {
        match self {
            Self::Child(child) => {
                // Both fail only if it has exited already.
                let _ = child.kill();
                let _ = child.wait();
            }
            Self::Domain(domain) => domain.kill(),
        }
    }

    /// Its exit status, if it has exited.
    pub fn ended(&mut self) -> io::Result<Option<String>> {
        Ok(match self {
            Self::Child(child) => child.try_wait()?.map(|status| status.to_string()),
            // Only its parent learns the exit status.
            Self::Domain(domain) => domain.has_ended()?.then(|| "under libvirt".into()),
        })
    }
}
