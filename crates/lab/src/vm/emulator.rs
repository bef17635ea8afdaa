//! The process of an emulator, whoever started it.

use std::io;
use std::process::Child;

use super::domain::Domain;

/// A running emulator.
#[derive(Debug)]
pub enum Emulator {
    /// A child of ours.
    Child(Child),
    /// libvirt's.
    Domain(Domain),
}

impl Emulator {
    /// Its process.
    pub fn pid(&self) -> u32 {
        match self {
            Self::Child(child) => child.id(),
            Self::Domain(domain) => domain.pid(),
        }
    }

    /// Kills it without warning; returns when it is gone.
    pub fn kill(&mut self) {
        match self {
            Self::Child(child) => {
                // Both fail only when it has ended already, which is as well.
                let _ = child.kill();
                let _ = child.wait();
            }
            Self::Domain(domain) => domain.kill(),
        }
    }

    /// How it ended, if it did.
    pub fn ended(&mut self) -> io::Result<Option<String>> {
        Ok(match self {
            Self::Child(child) => child.try_wait()?.map(|status| status.to_string()),
            // Its status is told to its parent alone.
            Self::Domain(domain) => domain.has_ended()?.then(|| "under libvirt".into()),
        })
    }
}
