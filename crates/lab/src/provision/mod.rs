//! Scenarios whose VMs get and lose memory while they run: one run for each mechanism and policy.

mod backing;
mod controller;
mod crash;
mod fleet;
mod result;
mod setup;
mod sizing;
mod swing;

use std::sync::atomic::AtomicBool;

use demeter_report::SystemResult;
use demeter_scenario::{Provision, Scenario};

use crate::error::Error;
use crate::link::Report;
use crate::vm::Lab;

/// Runs every variant of the scenario, one after the other; see [`crate::run()`].
pub fn run(
    scenario: &Scenario,
    provision: &Provision,
    lab: &Lab,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(&str, &Report),
) -> Result<Vec<SystemResult>, Error> {
    let variants = provision.variants().into_iter();
    variants
        .map(|(name, variant)| {
            let run = fleet::Run {
                name: &name,
                variant,
                scenario,
                provision,
                lab,
                stop,
            };
            if let Some(crashes) = provision.crashes {
                return crash::run(run, crashes, progress);
            }
            let trace = fleet::run(run, progress)?;
            result::summarise(&name, variant, &trace).ok_or(Error::Incomplete(name))
        })
        .collect()
}
