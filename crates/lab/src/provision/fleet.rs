//! Several VMs under one host controller: starts, sizes, measures and monitors them.
//!
//! Each VM has a thread that starts it and reads its reports. One conductor acts on the reports and sends requests to
//! the controller. A VM waits twice: before it populates memory, so that it can be resized, and before its timed phase,
//! so that all VMs start together.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use demeter_host_api::view::{HostView, TierView, VmView};
use demeter_outcome::Resize;
use demeter_policy::provision::Policy;
use demeter_scenario::{Provision, Scenario, Settings, Through, Variant};

use super::controller::Controller;
use super::resize_cycle::CycleState;
use super::sizing::{self, Sizing};
use crate::error::{Error, VmFault};
use crate::link::VmMessage;
use crate::timeline::VmTimeline;
use crate::vm::{ControllerSetup, Daemon, Lab, NodeSizes, Orders, PreparedVm, VmEntry, check_host};

/// Interval of the conductor's checks.
const TICK: Duration = Duration::from_millis(50);

/// Interval between two points of the series of VM memory.
const POINT_EVERY: Duration = Duration::from_secs(1);

/// The parameters of one run.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// Its name in results and messages.
    pub name: &'a str,
    /// Its mechanism and policy.
    pub variant: Variant,
    /// The scenario.
    pub scenario: &'a Scenario,
    /// The scenario's section on provisioning.
    pub provision: &'a Provision,
    /// The lab that makes the VMs.
    pub lab: &'a Lab,
    /// Set when the user asks to stop.
    pub stop: &'a AtomicBool,
}

impl Run<'_> {
    /// The libvirtd that runs the VMs, if requested.
    pub fn daemon(&self) -> Result<Option<Arc<Daemon>>, Error> {
        match self.variant.through {
            Through::Qmp => Ok(None),
            Through::Libvirt => Ok(Some(Arc::new(Daemon::start()?))),
        }
    }
}

/// The reports of a run.
#[derive(Debug, Default)]
pub struct FleetTimeline {
    /// Each VM with its name.
    pub vms: Vec<(String, VmTimeline)>,
    /// The measured inflation before the workload started.
    pub sizing: Option<Sizing>,
    /// Memory available to programs in the first VM afterwards, MiB by tier.
    pub free_mib: Option<[u64; 2]>,
    /// Fast memory of each VM over time: seconds into the timed phase, bytes.
    pub fast_bytes: Vec<(f64, Vec<Option<u64>>)>,
    /// Resizes of the first VM's fast memory in the timed phase.
    pub resizes: Vec<Resize>,
    /// The controller's count of times that it committed more than the pool.
    pub violations: Option<u64>,
}

enum Message {
    Started { pid: u32, orders: Orders },
    Report(VmMessage),
    Ended(Result<(), Error>),
}

/// Runs all VMs to their end. `progress` receives each report and the VM's name.
pub fn run(run: Run, progress: &mut dyn FnMut(&str, &VmMessage)) -> Result<FleetTimeline, Error> {
    let mut names = Vec::new();
    let mut prepared = Vec::new();
    let daemon = run.daemon()?;
    for (name, scenario) in run.scenario.vms() {
        let label = match run.provision.vms.len() {
            0 | 1 => run.name.to_owned(),
            _ => format!("{} {name}", run.name),
        };
        let system = run.scenario.systems[0];
        let mut vm = run.lab.prepare(
            &label,
            &scenario,
            &Settings::new(system, ""),
            run.variant.provisioner.kind(),
        )?;
        // Returned memory is only measurable if it was backed before.
        vm.prealloc = run.provision.vms.len() < 2;
        vm.daemon.clone_from(&daemon);
        prepared.push(vm);
        names.push(name);
    }
    check_host(
        Path::new("/"),
        prepared.iter().map(PreparedVm::memory_mib).sum(),
    )?;
    let folder = tempfile::Builder::new()
        .prefix("demeter-host-")
        .tempdir()
        .map_err(Error::io("create", "a folder for the host controller"))?;
    let halt = AtomicBool::new(false);
    let (sender, inbox) = mpsc::channel();
    let mut conductor = Conductor {
        run,
        prepared: &prepared,
        folder: folder.path(),
        inbox,
        vms: prepared.iter().map(|_| None).collect(),
        controller: None,
        counts: Counts::default(),
        began: None,
        next_point: None,
        cycle: run.provision.resize_cycle.map(CycleState::new),
        timeline: FleetTimeline {
            vms: names
                .into_iter()
                .map(|n| (n, VmTimeline::new(run.scenario.machine.vcpus)))
                .collect(),
            ..FleetTimeline::default()
        },
    };
    let outcome = std::thread::scope(|scope| {
        for (index, vm) in prepared.iter().enumerate() {
            let (sender, halt) = (sender.clone(), &halt);
            scope.spawn(move || {
                let outcome = hear(index, vm, halt, &sender);
                // The receiver is gone if another VM has failed.
                let _ = sender.send((index, Message::Ended(outcome)));
            });
        }
        drop(sender);
        let outcome = conductor.conduct(progress);
        halt.store(true, Ordering::Relaxed);
        outcome
    });
    conductor.keep_logs(outcome.is_err())?;
    outcome.map(|()| conductor.timeline)
}

/// Starts a VM and forwards its reports.
fn hear(
    index: usize,
    vm: &PreparedVm,
    halt: &AtomicBool,
    sender: &Sender<(usize, Message)>,
) -> Result<(), Error> {
    let child = vm.start()?;
    let started = Message::Started {
        pid: child.pid(),
        orders: child.orders()?,
    };
    let send = |message| {
        let sent = sender.send((index, message));
        sent.map_err(|_| VmFault::Interrupted)
    };
    send(started).map_err(|_| Error::Interrupted)?;
    vm.listen(child, halt, &mut |report| send(Message::Report(report)))
}

/// Number of VMs that have reached each stage.
#[derive(Debug, Default)]
struct Counts {
    booted: usize,
    filled: usize,
    done: usize,
    ended: usize,
}

struct Conductor<'a> {
    run: Run<'a>,
    prepared: &'a [PreparedVm],
    folder: &'a Path,
    inbox: Receiver<(usize, Message)>,
    vms: Vec<Option<(u32, Orders)>>,
    controller: Option<Controller>,
    counts: Counts,
    /// Start of the timed phase; none before and after it.
    began: Option<Instant>,
    next_point: Option<Instant>,
    cycle: Option<CycleState>,
    timeline: FleetTimeline,
}

impl Conductor<'_> {
    fn conduct(&mut self, progress: &mut dyn FnMut(&str, &VmMessage)) -> Result<(), Error> {
        while self.counts.ended < self.prepared.len() {
            if self.run.stop.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            match self.inbox.recv_timeout(TICK) {
                Ok((index, Message::Started { pid, orders })) => {
                    self.vms[index] = Some((pid, orders));
                }
                Ok((index, Message::Report(report))) => {
                    progress(self.prepared[index].run(), &report);
                    self.take(index, report)?;
                }
                Ok((_, Message::Ended(outcome))) => {
                    outcome?;
                    self.counts.ended += 1;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.watch()?;
        }
        Ok(())
    }

    fn take(&mut self, index: usize, report: VmMessage) -> Result<(), Error> {
        let all = self.prepared.len();
        let is_elastic = self.prepared[0].elastic().is_some();
        match &report {
            VmMessage::Booted { .. } => {
                self.counts.booted += 1;
                if self.counts.booted == all && is_elastic {
                    self.size()?;
                    self.go()?;
                }
            }
            VmMessage::Sized {
                fast_free_mib,
                slow_free_mib,
            } if index == 0 => self.timeline.free_mib = Some([*fast_free_mib, *slow_free_mib]),
            VmMessage::Start { .. } => {
                self.counts.filled += 1;
                if self.counts.filled == all && is_elastic {
                    self.begin()?;
                }
            }
            VmMessage::Done { .. } => {
                self.counts.done += 1;
                if self.counts.done == all {
                    self.began = None;
                    if let Some(controller) = &self.controller {
                        self.timeline.violations = Some(controller.view()?.violations);
                    }
                }
            }
            _ => {}
        }
        let timeline = &mut self.timeline.vms[index].1;
        timeline
            .add(report)
            .map_err(|fault| self.prepared[index].error(fault))
    }

    /// Starts the controller and resizes all VMs to their initial sizes.
    fn size(&mut self) -> Result<(), Error> {
        let Some(elastics) = self
            .prepared
            .iter()
            .map(PreparedVm::elastic)
            .collect::<Option<Vec<_>>>()
        else {
            return Ok(());
        };
        let names = self.timeline.vms.iter().map(|(name, _)| name);
        let entries = names.zip(self.prepared).zip(&elastics).enumerate();
        // A single VM begins with all memory, so that inflation can be timed. It has no policy that needs a guarantee.
        let is_single = self.prepared.len() == 1;
        let kernel_mib = elastics[0].target.fast_mib - self.run.scenario.machine.fast.usable_mib;
        let fast_guarantee_mib = kernel_mib + self.run.provision.fast_guarantee_mib;
        let vms: Vec<VmEntry> = entries
            .map(|(index, ((name, vm), elastic))| VmEntry {
                name: name.clone(),
                folder: vm.folder().into(),
                domain: vm.domain(),
                size: if is_single {
                    elastic.full()
                } else {
                    elastic.target
                },
                limit: elastic.full(),
                fast_guarantee_mib: if is_single { 0 } else { fast_guarantee_mib },
                // Policies divide fast memory only, since with less slow memory the workload would not fit.
                slow_guarantee_mib: if is_single {
                    0
                } else {
                    elastic.target.slow_mib
                },
                share: self.run.provision.vms.get(index).map_or(1, |vm| vm.share),
            })
            .collect();
        let pool = vms.iter().fold(NodeSizes::default(), |sum, vm| NodeSizes {
            fast_mib: sum.fast_mib + vm.size.fast_mib,
            slow_mib: sum.slow_mib + vm.size.slow_mib,
        });
        let setup = ControllerSetup {
            provisioner: elastics[0].provisioner,
            pool,
            libvirt: self.prepared[0].libvirt(),
            vms,
        };
        let program = self.run.lab.programs.join("demeter");
        let controller = Controller::start(&program, self.folder, &setup)?;
        let sized = (|| {
            sizing::wait_until_settled(&controller, self.run.stop)?;
            match (&self.vms[0], is_single) {
                (Some((pid, _)), true) => {
                    let name = &setup.vms[0].name;
                    let target = TierView::from(elastics[0].target);
                    sizing::measure(&controller, name, target, *pid, self.run.stop).map(Some)
                }
                _ => Ok(None),
            }
        })();
        self.controller = Some(controller);
        self.timeline.sizing = sized?;
        Ok(())
    }

    /// Starts the timed phase in all VMs.
    fn begin(&mut self) -> Result<(), Error> {
        if let Some(controller) = &self.controller
            && self.run.variant.policy != Policy::Static
        {
            controller.set_policy(self.run.variant.policy)?;
        }
        self.go()?;
        let now = Instant::now();
        (self.began, self.next_point) = (Some(now), Some(now));
        Ok(())
    }

    fn go(&mut self) -> Result<(), Error> {
        for (vm, prepared) in self.vms.iter_mut().zip(self.prepared) {
            if let Some((_, orders)) = vm {
                orders.go().map_err(|fault| prepared.error(fault))?;
            }
        }
        Ok(())
    }

    /// The conductor's timed actions in the timed phase.
    fn watch(&mut self) -> Result<(), Error> {
        let (Some(began), Some(controller)) = (self.began, &self.controller) else {
            return Ok(());
        };
        let t_s = began.elapsed().as_secs_f64();
        let is_due = self.next_point.is_some_and(|at| at <= Instant::now());
        let is_resizing = self.cycle.as_ref().is_some_and(|cycle| cycle.is_awake(t_s));
        if !is_due && !is_resizing {
            return Ok(());
        }
        let view = controller.view()?;
        if is_due {
            self.next_point = self
                .next_point
                .map(|at| (at + POINT_EVERY).max(Instant::now()));
            let names = self.timeline.vms.iter().map(|(name, _)| name);
            let owned = names.map(|name| Some(find(&view, name)?.owned?.fast_bytes));
            self.timeline.fast_bytes.push((t_s, owned.collect()));
        }
        if let (Some(cycle), Some(elastic)) = (&mut self.cycle, self.prepared[0].elastic()) {
            let name = &self.timeline.vms[0].0;
            let duration_s = self.run.scenario.duration_s as f64;
            let base = TierView::from(elastic.target);
            if let Some(vm) = find(&view, name) {
                cycle.settle(t_s, vm, &mut self.timeline.resizes);
            }
            if let Some(tiers) = cycle.due(t_s, duration_s, base) {
                let reason = controller.set(name, tiers).err().map(|e| e.to_string());
                cycle.is_pending = reason.is_none();
                self.timeline.resizes.push(Resize {
                    t_s,
                    fast_bytes: tiers.fast_bytes,
                    took_s: None,
                    reason,
                });
            }
        }
        Ok(())
    }

    fn keep_logs(&self, failed: bool) -> Result<(), Error> {
        match (&self.controller, &self.run.lab.keep_logs) {
            (Some(controller), Some(kept)) => controller.keep_logs(kept, self.run.name, failed),
            _ => Ok(()),
        }
    }
}

fn find<'a>(view: &'a HostView, name: &str) -> Option<&'a VmView> {
    view.vms.iter().find(|vm| vm.name == name)
}
