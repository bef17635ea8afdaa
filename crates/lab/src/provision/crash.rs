//! The crash matrix: random failures of agent, controller, VM and libvirtd while the VM is resized.
//!
//! Agent, host controller and VM are killed. The VM is reset, stopped, restored from a snapshot, migrated and
//! hotplugged, or its libvirtd is restarted. After each event everything must recover, and no word may be wrong.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use demeter_host_api::view::{VmState, VmView};
use demeter_outcome::{CrashFigures, Provisioning, SystemResult};
use demeter_scenario::rng::{Rng, scale};
use demeter_scenario::{Crashes, Settings, Through};

use super::controller::Controller;
use super::fleet::Run;
use super::life::Life;
use super::sizing::{NEAR_BYTES, random_size};
use crate::error::Error;
use crate::link::VmMessage;
use crate::vm::{ControllerSetup, DIMM_SLOTS, Elastic, Monitor, VmEntry};

/// The VM's name in the controller.
const NAME: &str = "vm";

/// An event occurs at a random time within this long after a resize request; the resize takes about half of it. Events
/// with a duration last at most as long.
const WITHIN_MS: u64 = 3000;

/// Interval between checks for recovery.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// An event; its name has the action and the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
enum Disruption {
    #[strum(to_string = "kill agent")]
    Agent,
    #[strum(to_string = "kill host")]
    Host,
    #[strum(to_string = "kill vm")]
    Vm,
    #[strum(to_string = "reset vm")]
    Reset,
    /// For a limited time.
    #[strum(to_string = "stop vm")]
    Stop,
    /// A snapshot is written, the VM continues and is resized, and is then restored.
    #[strum(to_string = "load snapshot")]
    Snapshot,
    /// A migration that is cancelled at a random time, unless it has completed.
    #[strum(to_string = "migrate vm")]
    Migrate,
    /// A DIMM is plugged or, if one is plugged already, requested back.
    #[strum(to_string = "plug dimm")]
    Plug,
    #[strum(to_string = "restart libvirt")]
    Libvirt,
}

impl Disruption {
    /// Events that apply to a VM with this connection. QEMU is never changed behind libvirt's back.
    fn possible(through: Through) -> &'static [Self] {
        match through {
            Through::Qmp => &[
                Self::Agent,
                Self::Host,
                Self::Vm,
                Self::Reset,
                Self::Stop,
                Self::Snapshot,
                Self::Migrate,
                Self::Plug,
            ],
            Through::Libvirt => &[Self::Agent, Self::Host, Self::Vm, Self::Libvirt],
        }
    }
}

/// Runs all cycles. Fails if anything does not recover in time.
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
    vm.daemon = run.daemon()?;
    let Some(elastic) = vm.elastic().cloned() else {
        return Err(Error::Incomplete(run.name.into()));
    };
    let setup = ControllerSetup {
        provisioner,
        pool: elastic.full(),
        libvirt: vm.libvirt(),
        vms: vec![VmEntry::unbounded(NAME, &vm, &elastic)],
    };
    let life = Life::start(&vm)?;
    let program = run.lab.programs.join("demeter");
    let controller = Controller::start(&program, vm.folder(), &setup)?;
    let mut matrix = Matrix {
        run,
        elastic,
        recovery: Duration::from_secs(crashes.recovery_s),
        life,
        controller,
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

struct Matrix<'a> {
    run: Run<'a>,
    elastic: Elastic,
    recovery: Duration,
    life: Life<'a>,
    controller: Controller,
    progress: &'a mut dyn FnMut(&str, &VmMessage),
}

impl Matrix<'_> {
    fn all(&mut self, cycles: u32) -> Result<CrashFigures, Error> {
        let mut rng = Rng::new(self.run.scenario.seed, 0);
        let mut figures = CrashFigures::default();
        let mut by_event: BTreeMap<String, u64> = BTreeMap::new();
        let events = Disruption::possible(self.run.variant.through);
        self.recover("the start")?;
        for cycle in 1..=cycles {
            let event = events[scale(rng.next(), events.len() as u64) as usize];
            self.change_size(&mut rng)?;
            self.go_on_for_a_while(&mut rng)?;
            self.happen(event, &mut rng)?;
            let happened = Instant::now();
            let violations = self.recover(&format!("cycle {cycle}, {event}"))?;
            let recovered_s = happened.elapsed().as_secs_f64();
            tracing::info!(
                "cycle {cycle} of {cycles}: {event}, recovered after {recovered_s:.1} s"
            );
            figures.cycles = cycle.into();
            figures.recovered_max_s = figures.recovered_max_s.max(recovered_s);
            // A restarted controller counts from 0 again.
            figures.violations = figures.violations.max(violations);
            *by_event.entry(event.to_string()).or_default() += 1;
        }
        figures.by_event = by_event;
        figures.rounds = self.life.rounds;
        figures.words = self.life.words;
        figures.wrong_words = self.life.wrong_words;
        Ok(figures)
    }

    /// Requests a random size between the programs' memory and all memory.
    fn change_size(&self, rng: &mut Rng) -> Result<(), Error> {
        let size = random_size(&self.elastic, rng);
        self.controller.set(NAME, size.into())
    }

    fn go_on_for_a_while(&mut self, rng: &mut Rng) -> Result<(), Error> {
        let pause = Duration::from_millis(scale(rng.next(), WITHIN_MS));
        self.hear_until(Instant::now() + pause)
    }

    fn happen(&mut self, event: Disruption, rng: &mut Rng) -> Result<(), Error> {
        match event {
            Disruption::Agent => {
                let killed = self.life.child.orders()?.kill_agent();
                killed.map_err(|fault| self.life.vm.error(fault))
            }
            Disruption::Host => self.controller.kill_and_restart(),
            Disruption::Vm => {
                self.life.child.kill();
                self.life.may_boot = true;
                self.life.child = self.life.vm.start()?;
                Ok(())
            }
            Disruption::Reset => {
                let mut monitor = self.monitor()?;
                if !monitor.dimms()?.is_empty() {
                    // The plugin does not know the address of a DIMM that is present at boot.
                    return self.happen(Disruption::Vm, rng);
                }
                self.life.may_boot = true;
                monitor.reset()
            }
            Disruption::Stop => {
                self.monitor()?.stop()?;
                self.go_on_for_a_while(rng)?;
                self.monitor()?.go_on()
            }
            Disruption::Snapshot => {
                self.monitor()?.save_snapshot()?;
                self.change_size(rng)?;
                self.go_on_for_a_while(rng)?;
                self.life.may_stutter = true;
                self.monitor()?.load_snapshot()
            }
            Disruption::Migrate => {
                self.monitor()?.migrate()?;
                self.go_on_for_a_while(rng)?;
                self.monitor()?.end_migration()
            }
            Disruption::Libvirt => match &self.life.vm.daemon {
                Some(daemon) => daemon.restart(),
                None => Ok(()),
            },
            Disruption::Plug => {
                let mut monitor = self.monitor()?;
                let dimms = monitor.dimms()?;
                let back = scale(rng.next(), 2) == 0 || dimms.len() == DIMM_SLOTS;
                match dimms.first() {
                    Some(dimm) if back => monitor.unplug_dimm(dimm),
                    _ => monitor.plug_dimm(scale(rng.next(), 2)),
                }
            }
        }
    }

    fn monitor(&self) -> Result<Monitor, Error> {
        Monitor::connect(self.life.vm.folder())
    }

    /// Waits until the VM owns its target and a round that began after the event has been verified. Returns the
    /// controller's count of violations.
    fn recover(&mut self, what: &str) -> Result<u64, Error> {
        let deadline = Instant::now() + self.recovery;
        // The current round, and a complete one.
        let rounds = self.life.rounds + 2;
        loop {
            self.hear_until(Instant::now() + LOOK_EVERY)?;
            let view = self.controller.view()?;
            let vm = view.vms.iter().find(|vm| vm.name == NAME);
            if self.life.rounds >= rounds && vm.is_some_and(is_settled) {
                self.life.may_stutter = false;
                return Ok(view.violations);
            }
            if Instant::now() >= deadline {
                return Err(Error::Controller(format!(
                    "had not recovered {} s after {what}: {} of {rounds} rounds verified, {vm:?}",
                    self.recovery.as_secs(),
                    self.life.rounds,
                )));
            }
        }
    }

    fn hear_until(&mut self, until: Instant) -> Result<(), Error> {
        let Self {
            run,
            life,
            progress,
            ..
        } = self;
        life.hear_until(until, run, &mut |report| progress(run.name, report))
    }

    fn keep_logs(&self, failed: bool) -> Result<(), Error> {
        let Some(kept) = &self.run.lab.keep_logs else {
            return Ok(());
        };
        self.controller.keep_logs(kept, self.run.name, failed)?;
        self.life.vm.keep_logs(kept)
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
