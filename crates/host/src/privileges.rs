//! Capabilities of the controller's process.

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// Capabilities that the controller keeps, to inspect processes of other users, take their memory
/// files and connect to their sockets.
const NEEDED: CapabilitySet = CapabilitySet::SYS_PTRACE.union(CapabilitySet::DAC_OVERRIDE);

/// Additional capabilities for histories: to move pages of other processes and to read the kernel's
/// tracepoints.
const NEEDED_BY_HISTORY: CapabilitySet = CapabilitySet::SYS_NICE.union(CapabilitySet::PERFMON);

/// Drops all other capabilities of this thread, and of threads that it starts, for good.
pub(crate) fn give_up(by_history: bool) -> io::Result<()> {
    let needed = match by_history {
        true => NEEDED | NEEDED_BY_HISTORY,
        false => NEEDED,
    };
    let kept = capabilities(None)?.permitted & needed;
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets)?;
    rustix::thread::set_no_new_privs(true)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_needed_is_left() {
        // Capabilities belong to a thread, so use one that ends.
        let left = |by_history| {
            let left = std::thread::spawn(move || {
                give_up(by_history).unwrap();
                let sets = capabilities(None).unwrap();
                assert!(rustix::thread::no_new_privs().unwrap());
                sets.permitted | sets.effective | sets.inheritable
            });
            left.join().unwrap()
        };
        assert_eq!(left(false) - NEEDED, CapabilitySet::empty());
        let most = NEEDED | NEEDED_BY_HISTORY;
        assert_eq!(left(true) - most, CapabilitySet::empty());
    }
}
