//! The soak test: VMs run rounds while they are resized constantly, for any duration. Resource usage of controller,
//! agents and kernels must not grow, and no word may be wrong.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use demeter_outcome::{Provisioning, SoakFigures, SystemResult, Use};
use demeter_policy::Pid;
use demeter_scenario::rng::{Rng, scale};
use demeter_scenario::{Scenario, Settings, Soak};

use super::controller::Controller;
use super::fleet::Run;
use super::life::Life;
use super::sizing::random_size;
use crate::error::Error;
use crate::link::VmMessage;
use crate::process_usage::ProcessUsage;
use crate::vm::{ControllerSetup, Elastic, NodeSizes, PreparedVm, VmEntry, check_host};

/// Interval between samples of usage.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Time for which one VM's reports are read before the next one's.
const TURN: Duration = Duration::from_millis(50);

/// Time limit of a VM beyond the soak itself.
const GRACE: Duration = Duration::from_secs(600);

/// Allowed growth of usage from the second quarter to the last: a percentage, plus a constant.
const GROWTH_PERCENT: u64 = 10;
const SLACK_KIB: u64 = 1024;
const SLACK_PIECES: u64 = 4;

/// Runs the soak to its end.
pub fn run(
    run: Run,
    soak: Soak,
    progress: &mut dyn FnMut(&str, &VmMessage),
) -> Result<SystemResult, Error> {
    let incomplete = || Error::Incomplete(run.name.into());
    let provisioner = run.variant.provisioner.kind().ok_or_else(incomplete)?;
    let duration = Duration::from_secs(run.scenario.duration_s);
    let system = run.scenario.systems[0];
    let mut prepared = vec![];
    let daemon = run.daemon()?;
    for (name, scenario) in run.scenario.vms() {
        let scenario = Scenario {
            duration_s: soak.round_s,
            ..scenario
        };
        let label = format!("{} {name}", run.name);
        let settings = Settings::new(system, "");
        let mut vm = run
            .lab
            .prepare(&label, &scenario, &settings, Some(provisioner))?;
        vm.limit = duration * 2 + GRACE;
        vm.daemon.clone_from(&daemon);
        prepared.push((name, vm));
    }
    let needed_mib = prepared.iter().map(|(_, vm)| vm.memory_mib()).sum();
    check_host(Path::new("/"), needed_mib)?;
    let elastics = prepared.iter().map(|(_, vm)| vm.elastic().cloned());
    let elastics: Vec<Elastic> = elastics.collect::<Option<_>>().ok_or_else(incomplete)?;
    let folder = tempfile::Builder::new()
        .prefix("demeter-host-")
        .tempdir()
        .map_err(Error::io("create", "a folder for the host controller"))?;
    let lives = prepared.iter().map(|(_, vm)| Life::start(vm));
    let lives = lives.collect::<Result<Vec<_>, _>>()?;
    let program = run.lab.programs.join("demeter");
    let setup = setup(&prepared, &elastics);
    let controller = Controller::start(&program, folder.path(), &setup)?;
    let mut course = Course {
        run,
        soak,
        setup,
        elastics,
        lives,
        controller,
        seen: BTreeMap::new(),
        progress,
    };
    let ended = course.until(Instant::now() + duration);
    let kept = course.keep_logs(ended.is_err());
    let resizes = ended?;
    kept?;
    course.figures(duration, resizes)
}

fn setup(prepared: &[(String, PreparedVm)], elastics: &[Elastic]) -> ControllerSetup {
    let vms = prepared
        .iter()
        .zip(elastics)
        .map(|((name, vm), elastic)| VmEntry::unbounded(name, vm, elastic));
    let whole = elastics.iter().map(Elastic::full);
    ControllerSetup {
        provisioner: elastics[0].provisioner,
        pool: whole.fold(NodeSizes::default(), |sum, vm| NodeSizes {
            fast_mib: sum.fast_mib + vm.fast_mib,
            slow_mib: sum.slow_mib + vm.slow_mib,
        }),
        libvirt: prepared[0].1.libvirt(),
        vms: vms.collect(),
    }
}

struct Course<'a> {
    run: Run<'a>,
    soak: Soak,
    setup: ControllerSetup,
    elastics: Vec<Elastic>,
    lives: Vec<Life<'a>>,
    controller: Controller,
    /// Usage samples by owner and resource.
    seen: BTreeMap<(String, &'static str), Vec<u64>>,
    progress: &'a mut dyn FnMut(&str, &VmMessage),
}

impl Course<'_> {
    /// Runs until `end`; returns the number of resizes.
    fn until(&mut self, end: Instant) -> Result<u64, Error> {
        let mut rng = Rng::new(self.run.scenario.seed, 0);
        let resize_every = Duration::from_secs(self.soak.resize_s);
        let (mut next_resize, mut next_look) = (Instant::now() + resize_every, Instant::now());
        let mut resizes = 0;
        while Instant::now() < end {
            for (index, life) in self.lives.iter_mut().enumerate() {
                let name = &self.setup.vms[index].name;
                let (seen, progress) = (&mut self.seen, &mut self.progress);
                life.hear_until(Instant::now() + TURN, &self.run, &mut |report| {
                    progress(life.vm.run(), report);
                    if let VmMessage::Uses { agent, kernel_kib } = report {
                        note(seen, &format!("agent of {name}"), agent);
                        let of_kernel = (format!("kernel of {name}"), KIB);
                        seen.entry(of_kernel).or_default().push(*kernel_kib);
                    }
                })?;
            }
            if Instant::now() >= next_resize {
                next_resize += resize_every;
                let which = scale(rng.next(), self.lives.len() as u64) as usize;
                let size = random_size(&self.elastics[which], &mut rng);
                self.controller
                    .set(&self.setup.vms[which].name, size.into())?;
                resizes += 1;
            }
            if Instant::now() >= next_look {
                next_look = Instant::now() + LOOK_EVERY;
                let uses = ProcessUsage::of(Path::new("/"), Pid(self.controller.pid()));
                let uses = uses.map_err(Error::io("look at", "the host controller"))?;
                note(&mut self.seen, "controller", &uses);
            }
        }
        Ok(resizes)
    }

    fn figures(&self, duration: Duration, resizes: u64) -> Result<SystemResult, Error> {
        let uses = self.seen.iter().map(|((who, what), seen)| {
            let (early, late) = early_and_late(seen).ok_or_else(|| {
                let why = format!("the soak was too short to measure {who}; raise --duration");
                Error::Controller(why)
            })?;
            Ok(Use {
                who: who.clone(),
                what: (*what).into(),
                early,
                late,
                grew: has_grown(
                    early,
                    late,
                    if *what == KIB {
                        SLACK_KIB
                    } else {
                        SLACK_PIECES
                    },
                ),
            })
        });
        let sum = |count: fn(&Life) -> u64| self.lives.iter().map(count).sum();
        let figures = SoakFigures {
            seconds: duration.as_secs(),
            resizes,
            rounds: sum(|life| life.rounds),
            words: sum(|life| life.words),
            wrong_words: sum(|life| life.wrong_words),
            uses: uses.collect::<Result<_, Error>>()?,
        };
        Ok(SystemResult {
            name: self.run.name.into(),
            verify_errors: Some(figures.wrong_words),
            provisioning: Some(Provisioning {
                provisioner: self.setup.provisioner.to_string(),
                policy: self.run.variant.policy.to_string(),
                pool_violations: Some(self.controller.view()?.violations),
                soak: Some(figures),
                ..Provisioning::default()
            }),
            ..SystemResult::default()
        })
    }

    fn keep_logs(&self, failed: bool) -> Result<(), Error> {
        let Some(kept) = &self.run.lab.keep_logs else {
            return Ok(());
        };
        self.controller.keep_logs(kept, self.run.name, failed)?;
        self.lives
            .iter()
            .try_for_each(|life| life.vm.keep_logs(kept))
    }
}

/// Units of usage.
const KIB: &str = "KiB";
const DESCRIPTORS: &str = "descriptors";
const THREADS: &str = "threads";

fn note(seen: &mut BTreeMap<(String, &'static str), Vec<u64>>, who: &str, uses: &ProcessUsage) {
    for (what, figure) in [
        (KIB, uses.resident_kib),
        (DESCRIPTORS, uses.descriptors),
        (THREADS, uses.threads),
    ] {
        seen.entry((who.into(), what)).or_default().push(figure);
    }
}

/// Maximum in the second quarter of the samples and in the last one. The first quarter is skipped, as usage first grows
/// to its normal level. None if there are too few samples.
fn early_and_late(seen: &[u64]) -> Option<(u64, u64)> {
    let quarter = seen.len() / 4;
    let early = seen.get(quarter..2 * quarter)?.iter().max()?;
    let late = seen.get(seen.len() - quarter..)?.iter().max()?;
    Some((*early, *late))
}

fn has_grown(early: u64, late: u64, slack: u64) -> bool {
    late > early + early * GROWTH_PERCENT / 100 + slack
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_told_from_noise_and_from_a_beginning() {
        let grew = |looks: u64, used: fn(u64) -> u64| {
            let seen: Vec<u64> = (0..looks).map(used).collect();
            early_and_late(&seen).map(|(early, late)| has_grown(early, late, SLACK_KIB))
        };
        // One leaks, one does not, one needs some time.
        assert_eq!(grew(600, |t| 10_000 + 20 * t), Some(true));
        assert_eq!(grew(600, |t| 10_000 + t % 7 * 100), Some(false));
        assert_eq!(grew(600, |t| 200 * t.min(100)), Some(false));
        assert_eq!(grew(3, |_| 1), None);
    }
}
