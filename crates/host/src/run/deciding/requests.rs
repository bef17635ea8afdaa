//! Requests of people to a running controller.

use demeter_http::Peer;
use demeter_policy::provision::Policy;
use demeter_policy::{ByteCount, PerTier, TierBytes};

use super::Deciding;
use crate::VmName;
use crate::api::{Change, ChangeError};

impl Deciding {
    /// Applies a change, saves it and answers.
    pub(super) async fn make(&mut self, Peer(by): &Peer, change: Change) {
        let (answer, refusal) = match change {
            Change::Reload { answer } => {
                let reloaded = self.reload(by).await;
                self.advance().await;
                self.publish();
                // The client may have stopped waiting.
                let _ = answer.send(reloaded);
                return;
            }
            Change::SetTiers { vm, tiers, answer } => {
                let refusal = self.set_tiers(&vm, tiers).err();
                self.audit(by);
                (answer, refusal)
            }
            Change::Forgive { vm, answer } => {
                let refusal = self.forgive(&vm).err();
                self.audit(by);
                (answer, refusal)
            }
            Change::Evacuate { answer } => {
                let refusal = self.evacuate(by).err();
                self.audit(by);
                if refusal.is_none() {
                    self.save().await;
                }
                (answer, refusal)
            }
            Change::Setting {
                vm,
                asked,
                may_run,
                answer,
            } => {
                let refusal = self.set(&vm, asked, may_run, by).err();
                if refusal.is_none() {
                    self.save().await;
                }
                (answer, refusal)
            }
            Change::SetPolicy { policy, answer } => {
                self.end_evacuation();
                self.policy_chosen = policy.is_some();
                let policy = policy.unwrap_or(self.file.policy);
                self.policy = policy;
                self.note(None, format!("policy is now {policy}"), by);
                self.audit(by);
                self.save().await;
                self.ask_policy();
                (answer, None)
            }
        };
        self.advance().await;
        self.publish();
        let unsaved = || self.unsaved.clone().map(ChangeError::State);
        // The client may have stopped waiting.
        let _ = answer.send(refusal.or_else(unsaved).map_or(Ok(()), Err));
    }

    fn set_tiers(
        &mut self,
        name: &VmName,
        tiers: PerTier<Option<ByteCount>>,
    ) -> Result<(), ChangeError> {
        let vm = self.controller.vm(name);
        let vm = vm.ok_or_else(|| ChangeError::NoVm(name.clone()))?;
        if self.evacuates {
            return Err(ChangeError::Conflict(self.evacuating()));
        }
        if self.policy != Policy::Static {
            return Err(ChangeError::Conflict(format!(
                "policy {} decides about sizes; choose policy static first",
                self.policy
            )));
        }
        let wish = TierBytes::from_fn(|tier| tiers.get(tier).unwrap_or(*vm.desired.get(tier)));
        let now = self.now();
        let pool = self.controller.of_mut(name);
        let pool = pool.ok_or_else(|| ChangeError::NoVm(name.clone()))?;
        pool.desire(now, &[(name.clone(), wish)])
            .map_err(|refusal| ChangeError::Conflict(refusal.to_string()))
    }

    fn forgive(&mut self, name: &VmName) -> Result<(), ChangeError> {
        let now = self.now();
        match self
            .controller
            .of_mut(name)
            .map(|pool| pool.forgive(now, name))
        {
            Some(Ok(true)) => Ok(()),
            Some(Ok(false)) => Err(ChangeError::Conflict(format!("VM {name} is not marked"))),
            Some(Err(_)) | None => Err(ChangeError::NoVm(name.clone())),
        }
    }
}
