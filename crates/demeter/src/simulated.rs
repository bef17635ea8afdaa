//! `--scenario` of `heat` and `assess`: the heat that an agent finds in a simulated run.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use demeter_policy::RankedRange;
use demeter_policy::benefit::Benefit;

/// Runs a scenario under `demeter` and shows `seen` the heat of its program every simulated second, with the time in
/// seconds, and a way to ask for the benefit of fast memory.
#[cfg(feature = "study")]
pub fn look(
    path: &Path,
    stop: &AtomicBool,
    seen: impl FnMut(f64, &[RankedRange], &dyn Fn() -> Option<Benefit>),
) -> anyhow::Result<()> {
    use std::cell::Cell;
    use std::time::Instant;

    use demeter_scenario::{Scenario, System};

    use crate::output::{self, SAY_EVERY};

    let scenario = Scenario::load(path)?;
    let said = Cell::new(Instant::now());
    let progress = |share: f64| {
        if said.get().elapsed() >= SAY_EVERY {
            said.set(Instant::now());
            output::say(format_args!("{:.0} %", share * 100.0));
        }
    };
    Ok(demeter_sim::look(
        &scenario,
        System::Demeter,
        stop,
        &progress,
        seen,
    )?)
}

/// Says which package has the simulator.
#[cfg(not(feature = "study"))]
pub fn look(
    _: &Path,
    _: &AtomicBool,
    _: impl FnMut(f64, &[RankedRange], &dyn Fn() -> Option<Benefit>),
) -> anyhow::Result<()> {
    anyhow::bail!(
        "--scenario needs the simulator, which is not in this package; install demeter-lab"
    )
}
