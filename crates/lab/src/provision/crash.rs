//! The crash matrix: agent, host controller and VM are killed and the VM is reset at random
//! points, while its sizes change; after each everything has to come back, and no word may be
//! wrong.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use demeter_host::view::{TierView, VmState, VmView};
use demeter_outcome::{CrashFigures, Provisioning, SystemResult};
use demeter_scenario::{Crashes, Settings};
use strum::VariantArray;

use super::controller::Controller;
use super::fleet::{NEAR_BYTES, Run};
use super::setup::{Setup, VmEntry};
use crate::error::{Error, VmFault};
use crate::link::VmMessage;
use crate::vm::{Elastic, NodeSizes, PreparedVm, VmChild, reset};
use crate::workload::rng::{Rng, scale};

/// The VM's name for the controller.
const NAME: &str = "vm";

/// A crash comes at a random point of so long a time after a change of sizes was asked for: the
/// change itself takes about half of it.
const WITHIN_MS: u64 = 3000;

/// Time between two looks whether all is well again.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What is crashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, strum::VariantArray)]
enum Victim {
    #[strum(to_string = "kill agent")]
    Agent,
    #[strum(to_string = "kill host")]
    Host,
    #[strum(to_string = "kill vm")]
    Vm,
    #[strum(to_string = "reset vm")]
    Reset,
}

/// Runs all cycles. Fails when something does not come back in time.
pub fn run(
    run: Run,
    crashes: Crashes,
    progress: &mut dyn FnMut(&str, &VmMessage),
) -> Result<SystemResult, Error> {
    let Some(provisioner) = run.variant.provisioner.kind() else {
        return Err(Error::Incomplete(run.name.into()));
    };
    let system = run.scenario.systems[0];
    let mut vm = run.lab.prepare(
        run.name,
        run.scenario,
        &Settings::new(system, ""),
        Some(provisioner),
    )?;
    vm.limit = Duration::from_secs(crashes.recovery_s) * (crashes.cycles + 1) * 2;
    let Some(elastic) = vm.elastic().cloned() else {
        return Err(Error::Incomplete(run.name.into()));
    };
    let setup = Setup {
        provisioner,
        pool: elastic.full(),
        vms: vec![VmEntry {
            name: NAME.into(),
            folder: vm.folder().into(),
            size: elastic.target,
            limit: elastic.full(),
            fast_guarantee_mib: 0,
            slow_guarantee_mib: 0,
            share: 1,
        }],
    };
    let child = vm.start()?;
    let program = run.lab.programs.join("demeter");
    let controller = Controller::start(&program, vm.folder(), &setup)?;
    let mut matrix = Matrix {
        run,
        vm: &vm,
        elastic,
        recovery: Duration::from_secs(crashes.recovery_s),
        child,
        controller,
        heard: Heard::default(),
        progress,
    };
    let outcome = matrix.all(crashes.cycles);
    let kept = matrix.keep_logs(outcome.is_err());
    let figures = outcome?;
    kept?;
    Ok(SystemResult {
        name: run.name.into(),
        verify_errors: Some(figures.wrong_words),
        provisioning: Some(Provisioning {
            provisioner: provisioner.to_string(),
            policy: run.variant.policy.to_string(),
            pool_violations: Some(figures.violations),
            crashes: Some(figures),
            ..Provisioning::default()
        }),
        ..SystemResult::default()
    })
}

/// What the VM has said.
#[derive(Debug, Default)]
struct Heard {
    rounds: u64,
    words: u64,
    wrong_words: u64,
    /// Whether it may start anew, or break off in the middle of a line.
    may_boot: bool,
}

struct Matrix<'a> {
    run: Run<'a>,
    vm: &'a PreparedVm,
    elastic: Elastic,
    recovery: Duration,
    child: VmChild,
    controller: Controller,
    heard: Heard,
    progress: &'a mut dyn FnMut(&str, &VmMessage),
}

impl Matrix<'_> {
    fn all(&mut self, cycles: u32) -> Result<CrashFigures, Error> {
        let mut rng = Rng::new(self.run.scenario.seed, 0);
        let mut figures = CrashFigures::default();
        let mut by_victim: BTreeMap<String, u64> = BTreeMap::new();
        self.heard.may_boot = true;
        self.recover("the start")?;
        for cycle in 1..=cycles {
            let victim =
                Victim::VARIANTS[scale(rng.next(), Victim::VARIANTS.len() as u64) as usize];
            let size = self.random_size(&mut rng);
            self.controller.set(NAME, size)?;
            let pause = Duration::from_millis(scale(rng.next(), WITHIN_MS));
            self.hear_until(Instant::now() + pause)?;
            self.crash(victim)?;
            let crashed = Instant::now();
            let violations = self.recover(&format!("cycle {cycle}, {victim}"))?;
            let recovered_s = crashed.elapsed().as_secs_f64();
            tracing::info!(
                "cycle {cycle} of {cycles}: {victim}, well again after {recovered_s:.1} s"
            );
            figures.cycles = cycle.into();
            figures.recovered_max_s = figures.recovered_max_s.max(recovered_s);
            // A controller that was killed counts from 0 again.
            figures.violations = figures.violations.max(violations);
            *by_victim.entry(victim.to_string()).or_default() += 1;
        }
        figures.by_victim = by_victim;
        figures.rounds = self.heard.rounds;
        figures.words = self.heard.words;
        figures.wrong_words = self.heard.wrong_words;
        Ok(figures)
    }

    /// Between what the machine promises to programs and everything.
    fn random_size(&self, rng: &mut Rng) -> TierView {
        let (least, full) = (self.elastic.target, self.elastic.full());
        // Even: whole huge pages.
        let mut between = |low: u64, high: u64| low + scale(rng.next(), (high - low) / 2 + 1) * 2;
        TierView::from(NodeSizes {
            fast_mib: between(least.fast_mib, full.fast_mib),
            slow_mib: between(least.slow_mib, full.slow_mib),
        })
    }

    fn crash(&mut self, victim: Victim) -> Result<(), Error> {
        let error = |fault| self.vm.error(fault);
        match victim {
            Victim::Agent => self.child.orders()?.kill_agent().map_err(error),
            Victim::Host => self.controller.kill_and_restart(),
            Victim::Vm => {
                self.child.kill();
                self.heard.may_boot = true;
                self.child = self.vm.start()?;
                Ok(())
            }
            Victim::Reset => {
                self.heard.may_boot = true;
                reset(self.vm.folder())
            }
        }
    }

    /// Waits until the VM owns what it should and a round that began after the crash has been
    /// verified. Returns the controller's count of violations.
    fn recover(&mut self, what: &str) -> Result<u64, Error> {
        let deadline = Instant::now() + self.recovery;
        // The round that was under way, and a whole one.
        let rounds = self.heard.rounds + 2;
        loop {
            self.hear_until(Instant::now() + LOOK_EVERY)?;
            let view = self.controller.view()?;
            let vm = view.vms.iter().find(|vm| vm.name == NAME);
            if self.heard.rounds >= rounds && vm.is_some_and(is_settled) {
                return Ok(view.violations);
            }
            if Instant::now() >= deadline {
                return Err(Error::Controller(format!(
                    "was not well again {} s after {what}: {} of {rounds} rounds verified, {vm:?}",
                    self.recovery.as_secs(),
                    self.heard.rounds,
                )));
            }
        }
    }

    fn hear_until(&mut self, until: Instant) -> Result<(), Error> {
        loop {
            let report = match self.child.report_until(until, self.run.stop) {
                Ok(Some(report)) => report,
                Ok(None) => return Ok(()),
                // Half a line of a life that was cut off.
                Err(VmFault::Nonsense(_)) if self.heard.may_boot => continue,
                Err(VmFault::Interrupted) => return Err(Error::Interrupted),
                Err(fault) => return Err(self.vm.error(fault)),
            };
            (self.progress)(self.run.name, &report);
            let heard = &mut self.heard;
            match report {
                VmMessage::Booted { .. } if heard.may_boot => heard.may_boot = false,
                VmMessage::Booted { .. } => {
                    let what = "it started anew by itself; see its console".into();
                    return Err(self.vm.error(VmFault::Job(what)));
                }
                VmMessage::Verified { words, errors } => {
                    heard.rounds += 1;
                    heard.words += words;
                    heard.wrong_words += errors;
                }
                VmMessage::Failed { what } => return Err(self.vm.error(VmFault::Job(what))),
                _ => {}
            }
        }
    }

    fn keep_logs(&self, failed: bool) -> Result<(), Error> {
        let Some(kept) = &self.run.lab.keep_logs else {
            return Ok(());
        };
        self.controller.keep_logs(kept, self.run.name, failed)?;
        self.vm.keep_logs(kept)
    }
}

fn is_settled(vm: &VmView) -> bool {
    let near = |a: u64, b: u64| a.abs_diff(b) <= NEAR_BYTES;
    vm.state == VmState::Up
        && vm.owned.is_some_and(|owned| {
            near(owned.fast_bytes, vm.target.fast_bytes)
                && near(owned.slow_bytes, vm.target.slow_bytes)
        })
}
