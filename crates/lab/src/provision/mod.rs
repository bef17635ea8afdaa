//! Scenarios that resize VMs during a run: one run for each mechanism and policy.

mod backing;
mod controller;
mod crash;
mod fleet;
mod life;
mod resize_cycle;
mod result;
mod sizing;
mod soak;

use std::sync::atomic::AtomicBool;

use demeter_outcome::SystemResult;
use demeter_scenario::{Provision, Scenario};

use crate::error::Error;
use crate::link::VmMessage;
use crate::vm::Lab;
pub use sizing::is_settled;

/// Runs all variants of the scenario in order; see [`crate::run()`]. `results` has all measurements, even if a variant
/// fails.
pub fn run(
    scenario: &Scenario,
    provision: &Provision,
    lab: &Lab,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(&str, &VmMessage),
    results: &mut Vec<SystemResult>,
) -> Result<(), Error> {
    for (name, variant) in provision.variants() {
        let run = fleet::Run {
            name: &name,
            variant,
            scenario,
            provision,
            lab,
            stop,
        };
        results.push(match (provision.crashes, provision.soak) {
            (Some(crashes), _) => crash::run(run, crashes, progress)?,
            (None, Some(soak)) => soak::run(run, soak, progress)?,
            (None, None) => {
                let timeline = fleet::run(run, progress)?;
                result::summarise(&name, variant, timeline).ok_or(Error::Incomplete(name))?
            }
        });
    }
    let soaks = results
        .iter()
        .filter_map(|result| result.provisioning.as_ref()?.soak.as_ref());
    let grew: Vec<String> = soaks
        .flat_map(|soak| &soak.uses)
        .filter(|of| of.grew)
        .map(|of| format!("{} from {} to {} {}", of.who, of.early, of.late, of.what))
        .collect();
    match grew.is_empty() {
        true => Ok(()),
        false => Err(Error::Grew(grew.join(", "))),
    }
}
