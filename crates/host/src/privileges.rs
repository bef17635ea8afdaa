//! What the process may do, as root.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// What the controller needs of root's rights: to look at processes of other users and to take
/// their memory files, and to connect to their sockets.
const NEEDED: CapabilitySet = CapabilitySet::SYS_PTRACE.union(CapabilitySet::DAC_OVERRIDE);

/// What it needs on top to manage VMs by histories: to move the pages of other processes, and to listen to
/// the kernel's tracepoints.
const NEEDED_BY_HISTORY: CapabilitySet = CapabilitySet::SYS_NICE.union(CapabilitySet::PERFMON);

/// Gives up all other rights of this thread, and of those that it starts, for good.
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

/// Lets this process open as many files as it ever may, and says how many that are.
pub(crate) fn raise_descriptors() -> u64 {
    let limits = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limits.maximum,
        maximum: limits.maximum,
    };
    // A soft limit may always be raised to the hard one; if not, what there is counts.
    let _ = setrlimit(Resource::Nofile, raised);
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_needed_is_left() {
        // Rights are a thread's: this one's end with it.
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
