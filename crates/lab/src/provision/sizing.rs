//! Measures how fast a VM returns memory, before its workload starts.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use demeter_host_api::view::{HostView, TierView, VmState, VmView};
use demeter_scenario::rng::{Rng, scale};

use super::backing::backed_bytes;
use super::controller::Controller;
use crate::error::Error;
use crate::vm::{Elastic, NodeSizes};

/// Tolerance of a VM's target, as guests release whole huge pages.
pub const NEAR_BYTES: u64 = 4 << 20;

/// Time limit for VMs to reach their initial size.
const SETTLE_LIMIT: Duration = Duration::from_secs(120);

/// A change of the expected size is complete if nothing changes for this long.
const STILL: Duration = Duration::from_millis(500);

/// A change of another size has failed if nothing changes for this long.
const STUCK: Duration = Duration::from_secs(15);

/// Interval between checks of the memory's files, which is the error of measured times.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Checks per request to the controller; requests take CPU time from the VM.
const LOOKS_PER_QUESTION: u32 = 40;

/// Share of the returned memory that stops the clock; the rest is rounding.
const NEARLY_ALL: f64 = 0.99;

/// Result of an inflation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sizing {
    /// Bytes by which the VM's owned memory shrank.
    pub inflated_bytes: u64,
    /// Bytes by which the memory's files shrank.
    pub returned_bytes: u64,
    /// Seconds from the request until the files had shrunk by all but a hundredth of that.
    pub took_s: f64,
}

/// Waits until every VM owns its initial size.
pub fn wait_until_settled(controller: &Controller, stop: &AtomicBool) -> Result<(), Error> {
    let deadline = Instant::now() + SETTLE_LIMIT;
    loop {
        let view = controller.view()?;
        if view.vms.iter().all(is_settled) {
            return Ok(());
        }
        check_stop(stop)?;
        if Instant::now() >= deadline {
            return Err(unsettled(&view));
        }
        std::thread::sleep(LOOK_EVERY * LOOKS_PER_QUESTION);
    }
}

/// Resizes the VM `name`, whose emulator is process `pid`, to `target`, and measures that.
pub fn measure(
    controller: &Controller,
    name: &str,
    target: TierView,
    pid: u32,
    stop: &AtomicBool,
) -> Result<Sizing, Error> {
    let owned = || -> Result<Option<TierView>, Error> {
        let view = controller.view()?;
        Ok(view
            .vms
            .iter()
            .find(|vm| vm.name == name)
            .and_then(|vm| vm.owned))
    };
    let backed = || backed_bytes(Path::new("/"), pid);
    let (owned_before, backed_before) = (owned()?, backed()?);
    let asked = Instant::now();
    controller.set(name, target)?;
    let mut looks = vec![(0.0, backed_before)];
    let mut changed = Instant::now();
    let mut until_question = LOOKS_PER_QUESTION;
    let owned_after = loop {
        std::thread::sleep(LOOK_EVERY);
        let now_backed = backed()?;
        if looks.last().is_none_or(|&(_, last)| last != now_backed) {
            changed = Instant::now();
            looks.push((asked.elapsed().as_secs_f64(), now_backed));
        }
        until_question -= 1;
        if until_question > 0 {
            continue;
        }
        until_question = LOOKS_PER_QUESTION;
        check_stop(stop)?;
        let now_owned = owned()?;
        // Compares sums, since virtio-balloon takes memory from any tier.
        let is_there = now_owned.is_some_and(|o| o.sum() <= target.sum() + NEAR_BYTES);
        if changed.elapsed() >= if is_there { STILL } else { STUCK } {
            break now_owned;
        }
    };
    looks.push((asked.elapsed().as_secs_f64(), backed()?));
    let sum = |tiers: Option<TierView>| tiers.map_or(0, TierView::sum);
    let (returned_bytes, took_s) = returned(&looks);
    Ok(Sizing {
        inflated_bytes: sum(owned_before).saturating_sub(sum(owned_after)),
        returned_bytes,
        took_s,
    })
}

/// Returned bytes, and the time at which nearly all had returned, from samples of backed bytes.
fn returned(looks: &[(f64, u64)]) -> (u64, f64) {
    let (Some(&(_, first)), Some(&(_, last))) = (looks.first(), looks.last()) else {
        return (0, 0.0);
    };
    let returned = first.saturating_sub(last);
    let enough = (returned as f64 * NEARLY_ALL) as u64;
    let reached = looks
        .iter()
        .find(|(_, backed)| first.saturating_sub(*backed) >= enough);
    (returned, reached.map_or(0.0, |&(t_s, _)| t_s))
}

/// A random size between the programs' memory and all memory, in whole huge pages.
pub fn random_size(elastic: &Elastic, rng: &mut Rng) -> NodeSizes {
    let (least, full) = (elastic.target, elastic.full());
    let mut between = |low: u64, high: u64| low + scale(rng.next(), (high - low) / 2 + 1) * 2;
    NodeSizes {
        fast_mib: between(least.fast_mib, full.fast_mib),
        slow_mib: between(least.slow_mib, full.slow_mib),
    }
}

/// Whether a VM owns its target.
pub fn is_settled(vm: &VmView) -> bool {
    let is_near = |owned: TierView| owned.sum().abs_diff(vm.target.sum()) <= 2 * NEAR_BYTES;
    vm.state == VmState::Up && vm.owned.is_some_and(is_near)
}

fn check_stop(stop: &AtomicBool) -> Result<(), Error> {
    if stop.load(Ordering::Relaxed) {
        Err(Error::Interrupted)
    } else {
        Ok(())
    }
}

fn unsettled(view: &HostView) -> Error {
    let late = view.vms.iter().find(|vm| !is_settled(vm));
    let what = late.map_or("did not settle".into(), |vm| {
        let problem = vm.problem.as_deref().unwrap_or("no reason given");
        format!(
            "did not bring VM {} to its size within {} s ({}): {problem}",
            vm.name,
            SETTLE_LIMIT.as_secs(),
            vm.state
        )
    });
    Error::Controller(what)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_clock_stops_when_nearly_all_is_back() {
        let looks = [(0.0, 1000), (0.5, 600), (1.0, 102), (1.5, 101), (20.0, 100)];
        assert_eq!(returned(&looks), (900, 1.0));
        assert_eq!(returned(&[(0.0, 100), (9.0, 100)]), (0, 0.0));
        assert_eq!(returned(&[]), (0, 0.0));
    }

    proptest! {
        /// The time lies within the samples, and the returned bytes equal the files' decrease.
        #[test]
        fn times_lie_within_the_looks(backed in proptest::collection::vec(0u64..1 << 40, 1..50)) {
            let looks: Vec<_> = backed.iter().enumerate().map(|(t, b)| (t as f64, *b)).collect();
            let (returned, took_s) = returned(&looks);
            prop_assert_eq!(returned, backed[0].saturating_sub(*backed.last().unwrap()));
            prop_assert!((0.0..backed.len() as f64).contains(&took_s));
        }
    }
}
