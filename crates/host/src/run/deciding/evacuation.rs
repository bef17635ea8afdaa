//! Evacuation: all guests get all their memory back, before the controller is removed.

use demeter_policy::provision::Policy;
use demeter_policy::{MIB, Tier};

use super::{Deciding, of_pool};
use crate::VmName;
use crate::api::ChangeError;

impl Deciding {
    /// Wishes all its memory for each VM, above its limit too, until another policy is chosen. All
    /// of them or none: refused if a pool is too small or a VM cannot get its memory.
    pub(super) fn evacuate(&mut self, by: &str) -> Result<(), ChangeError> {
        // A guest without an agent has all its memory already.
        let has_all = |name: &VmName| {
            let facts = self.facts.get(name);
            facts.is_some_and(|facts| facts.managed_by == Some("history"))
        };
        for (name, pool) in self.controller.iter() {
            let lacking = pool.lacks_for_all(has_all);
            if let Some((vm, why)) = lacking.vm {
                let why = format!("VM {vm} {why}, so it cannot get its memory back");
                return Err(ChangeError::Conflict(why));
            }
            let [fast, slow] = Tier::ALL.map(|tier| lacking.memory.get(tier).0.div_ceil(MIB));
            if fast + slow > 0 {
                return Err(ChangeError::Conflict(format!(
                    "{}{fast} MiB of fast and {slow} MiB of slow memory are missing to give each VM \
                     all its memory; enlarge the pool if the host has them, or stop a VM",
                    of_pool(name)
                )));
            }
        }
        let now = self.now();
        for (_, pool) in self.controller.iter_mut() {
            pool.give_all(now, has_all);
        }
        self.policy = Policy::Static;
        self.policy_chosen = true;
        self.evacuates = true;
        self.stale = true;
        let what = "all VMs get all their memory back".into();
        self.note(None, what, by);
        Ok(())
    }

    /// Restores the VMs' limits after an evacuation.
    pub(super) fn end_evacuation(&mut self) {
        if !std::mem::take(&mut self.evacuates) {
            return;
        }
        let now = self.now();
        for (name, facts) in &self.facts {
            if let Some(pool) = self.controller.of_mut(name) {
                // Cannot fail: the VM exists.
                let _ = pool.set_limits(now, name, facts.limits);
            }
        }
    }
}
