//! Translates a scenario's machine into a world, before any access.

mod agent;
mod cpus;
mod memory;
mod nodes;
mod scale;

use demeter_outcome::Unit;
use demeter_policy::{ByteCount, MIB, VirtRange};
use demeter_scenario::{Clock, Cpu, Scenario, Settings, System, Thp, Translation, Workload};

use self::agent::agent_settings;
use self::cpus::cores_of;
use self::scale::scale_for;
use crate::error::SimError;
use crate::guest::Guest;
use crate::hypervisor::{Backing, BackingPolicy};
use crate::machine::cpu::{
    CpuModel, ICE_LAKE_SP, SANDY_BRIDGE, ZEN_3, emulated_host, emulator, exact_emulator,
};
use crate::machine::flat::Flat;
use crate::machine::memory::{NodeIndex, NodeModel};
use crate::machine::radix::{INDEX_MAX, PageSize};
use crate::program::Program;
use crate::reserve::reserve;
use crate::resizable::{self, Sizes};
use crate::system::{AgentSettings, Build, Managed, Needs, Tiering};
use crate::vm::plug::Plug;
use crate::vm::{Host, Machine, Vm};
use crate::world::World;

const GIB: u64 = 1 << 30;

/// Maximum memory of a VM, limited by its page tables.
const MEMORY_MAX: u64 = 4 << 40;

/// Maximum address range of a program: 32 bits number pages of 4 KiB.
const SPAN_MAX: u64 = 16 << 40;

/// Parameters of a world without its programs and system.
#[derive(Debug, Clone)]
pub(crate) struct WorldSetup {
    pub(crate) cpu: CpuModel,
    /// The workload of each VM; one for all VMs that are alike.
    workloads: Vec<Workload>,
    /// A base page and an access stand for `2^k` real ones.
    pub(crate) k: u32,
    /// The nodes: on most machines a fast and a slow one.
    pub(crate) nodes: Vec<NodeModel>,
    /// Memory of each VM that its program can use, by node.
    pub(crate) usable: Vec<ByteCount>,
    /// The nodes that first touches try, in order, by socket: Linux's zone lists.
    orders: Vec<Vec<NodeIndex>>,
    /// The nodes that come or go.
    pub(crate) plugs: Vec<Plug>,
    pub(crate) huge_pages: bool,
    /// Whether this models the lab's machine, which always runs Debian's kernel.
    is_lab: bool,
    /// Page size of the hypervisor's backing memory.
    host_pages: PageSize,
    /// Whether population of memory is part of the timed phase.
    pub(crate) timed_fill: bool,
    memtis_unlimited: bool,
    /// Memory sizes of each VM, including those for provisioning.
    pub(crate) sizes: Sizes,
    /// Virtual CPUs of each VM.
    pub(crate) vcpus: u32,
    pub(crate) vms: u32,
    pub(crate) agent: AgentSettings,
    /// Number of host cores. It equals the number of virtual CPUs unless they share cores.
    cores: usize,
    /// Total operations of all VMs, if the work is fixed.
    operations: Option<u64>,
    /// Address space that a program reserves before each of its mappings.
    reserved: ByteCount,
    /// Translation mode of reserved memory.
    translation: Option<Translation>,
    /// Settings of the system, if they are not the defaults.
    settings: Option<Settings>,
}

impl WorldSetup {
    /// The machine of a scenario.
    pub(crate) fn new(scenario: &Scenario) -> Result<Self, SimError> {
        nodes::check(scenario, vms_of(scenario))?;
        let vms = scenario.vms().into_iter();
        let workloads: Vec<Workload> = vms.map(|(_, vm)| vm.workload).collect();
        if let Some(key) = workloads.iter().find_map(Workload::lab_only) {
            return Err(SimError::NoModelOf(key));
        }
        let overlaps = |pair: &[Workload]| pair[0].in_flight() != pair[1].in_flight();
        if scenario.sim.cores.is_some() && workloads.windows(2).any(overlaps) {
            return Err(SimError::NoModelOf(
                "VMs with different workload.in_flight on the same cores (sim.cores)",
            ));
        }
        resizable::check(scenario)?;
        let machine = &scenario.machine;
        let dilation = scenario.lab.dilation;
        let (cpu, dilation) = match scenario.sim.cpu {
            Cpu::IceLakeSp => (ICE_LAKE_SP, 1),
            Cpu::Zen3 => (ZEN_3, 1),
            Cpu::SandyBridge => (SANDY_BRIDGE, 1),
            // Only the exact emulator has that clock.
            Cpu::Lab if scenario.lab.clock == Clock::Model => (exact_emulator(), dilation),
            Cpu::Lab => (emulator(), dilation),
            Cpu::LabHost => (emulated_host(), dilation),
        };
        let cpu = CpuModel {
            costs: cpu.costs.changed(&scenario.sim.cost_percent),
            ..cpu
        };
        let listed = machine.nodes();
        let nodes: Vec<NodeModel> = listed
            .iter()
            .map(|node| nodes::model(scenario, node, dilation))
            .collect();
        let usable: Vec<ByteCount> = listed
            .iter()
            .map(|node| ByteCount(node.usable_mib * MIB))
            .collect();
        let setup = Self {
            cpu,
            workloads,
            k: match scenario.sim.scale_bits {
                Some(bits) => bits,
                None => scale_for(scenario)?,
            },
            orders: nodes::orders(scenario),
            plugs: nodes::plugs(&listed),
            huge_pages: machine.thp == Thp::Always,
            is_lab: matches!(scenario.sim.cpu, Cpu::Lab | Cpu::LabHost),
            host_pages: match scenario.sim.host_thp {
                Thp::Always => PageSize::Huge,
                // The hypervisor does not request them.
                Thp::Madvise | Thp::Never => PageSize::Base,
            },
            timed_fill: scenario.sim.timed_fill,
            memtis_unlimited: scenario.sim.memtis_unlimited,
            vcpus: machine.vcpus,
            sizes: Sizes::new(scenario, nodes::sizes(&nodes, &usable), usable[0]),
            nodes,
            usable,
            vms: vms_of(scenario),
            agent: agent_settings(scenario, dilation),
            cores: cores_of(scenario) as usize,
            operations: scenario.sim.operations,
            reserved: ByteCount(scenario.sim.reserve_mib * MIB),
            translation: scenario.sim.translation,
            settings: None,
        };
        setup.check()?;
        Ok(setup)
    }

    /// This setup for a system with settings.
    pub(crate) fn under(self, settings: &Settings) -> Self {
        Self {
            settings: Some(settings.clone()),
            ..self
        }
    }

    fn check(&self) -> Result<(), SimError> {
        self.cpu.check()?;
        let own: u64 = self.usable.iter().map(|node| node.0).sum();
        let bytes = u64::from(self.vms) * own;
        // Allow a little extra for tables and watermarks.
        let pages = (bytes + bytes / 16) >> self.page_bits();
        let max = u64::from(INDEX_MAX);
        if pages > max {
            return Err(SimError::TooLarge { pages, max });
        }
        if own > MEMORY_MAX {
            let [gib, max_gib] = [own, MEMORY_MAX].map(|bytes| bytes.div_ceil(GIB));
            return Err(SimError::TooMuchMemory { gib, max_gib });
        }
        Ok(())
    }

    /// Refuses systems that know a fast and a slow node on a machine with other nodes.
    pub(crate) fn check_system(&self, system: System) -> Result<(), SimError> {
        let knows_nodes = matches!(
            system,
            System::None | System::Oracle | System::Demeter | System::DemeterDamon
        );
        let is_usual = matches!(&self.nodes[..], [fast, slow] if fast.level < slow.level);
        match knows_nodes || is_usual && self.orders.len() == 1 {
            true => Ok(()),
            false => Err(SimError::TwoNodes(system)),
        }
    }

    /// Refuses programs whose address range is too wide, and threads for which their socket has no virtual CPU.
    pub(crate) fn check_programs<P: Program>(&self, programs: &[P]) -> Result<(), SimError> {
        if programs.iter().any(|program| !self.has_cpus_for(program)) {
            return Err(SimError::NoModelOf(
                "more threads on a socket than it has CPUs (machine.vcpus)",
            ));
        }
        let span = |program: &P| {
            let regions = program.regions().into_iter();
            let spans = regions.map(|region| region.bytes.0 + self.reserved.0);
            spans.fold(GIB, u64::saturating_add)
        };
        let widest = programs.iter().map(span).max().unwrap_or(0);
        match widest {
            0..=SPAN_MAX => Ok(()),
            _ => {
                let [gib, max_gib] = [widest, SPAN_MAX].map(|bytes| bytes.div_ceil(GIB));
                Err(SimError::TooWide { gib, max_gib })
            }
        }
    }

    fn page_bits(&self) -> u32 {
        12 + self.k
    }

    /// Builds a world in which each program runs in its own VM with its own manager.
    pub(crate) fn world<P: Program>(&self, build: Build, programs: Vec<P>) -> World<P> {
        let vms: Vec<_> = programs
            .into_iter()
            .map(|program| (build(&self.managed(&program)), program))
            .collect();
        let needs = vms.first().map_or_else(Needs::default, |(m, _)| m.needs());
        let (hypervisor, memory, host_tables) = self.host_memory(&needs, vms.len() as u64);
        let guest_config = self.guest_config(&needs);
        let (owned_fast, fast) = (self.sizes.owned_fast, self.sizes.nodes[0]);
        let sockets = vms
            .first()
            .map_or_else(Vec::new, |(_, p)| self.sockets_of_vcpus(p));
        let vm = |(i, (manager, program)): (usize, (_, P))| {
            let mut guest = Guest::new(&guest_config);
            if owned_fast < fast {
                guest.begin_with(owned_fast);
            }
            for plug in self.plugs.iter().filter(|plug| !plug.is_there_at_start()) {
                guest.hold(plug.node);
            }
            let policy = match needs.tiering {
                Tiering::Hypervisor | Tiering::Hardware => BackingPolicy::First(needs.first_touch),
                Tiering::Guest => BackingPolicy::ByNode {
                    starts: guest.node_starts(),
                    pages: self.host_pages,
                },
            };
            let first_page = (i as u64 * host_tables / 4096) as u32;
            let backing = Backing::new(self.cpu.levels, self.page_bits(), first_page, policy);
            let hardware = self.hardware(i as u32, &sockets);
            let mut vm = Vm::new(hardware, guest, backing, manager, program);
            vm.share = self.operations;
            if needs.keeps_hot_set {
                let changes_s = self.workload(i as u32).hot_changes_s();
                let changes_s = std::iter::once(0).chain(changes_s);
                let hot = changes_s.flat_map(|s| vm.program.hot(s * 1_000_000_000));
                vm.guest.promise(&union(hot.collect()));
            }
            vm
        };
        let vms = vms.into_iter().enumerate().map(vm).collect();
        let core = |core: usize| {
            let socket = sockets.get(core % self.vcpus as usize).copied();
            self.core(core as u32)
                .on_socket(socket.unwrap_or(0), &memory)
        };
        let cores = (0..self.cores).map(core).collect();
        let host = Host {
            machine: Machine { cores, memory },
            hypervisor,
        };
        World::new(host, vms, self.k)
    }

    /// Reserves the memory of all programs before the first touch, if the scenario requests it.
    pub(crate) fn reserve<P: Program>(&self, world: &mut World<P>) -> Result<(), SimError> {
        let Some(translation) = &self.translation else {
            return Ok(());
        };
        let hypervisor = &mut world.host.hypervisor;
        let mut vms = world.vms.iter_mut();
        vms.try_for_each(|vm| reserve(vm, hypervisor, translation))
    }

    /// Backs the memory of all VMs in pairs before the first touch, if the memory controller tiers.
    pub(crate) fn pair<P: Program>(&self, world: &mut World<P>) -> Result<(), SimError> {
        let tiering = |vm: &Vm<P>| vm.manager.needs().tiering;
        if world.vms.first().map(tiering) != Some(Tiering::Hardware) {
            return Ok(());
        }
        let [fast, slow] = self.sizes_of_tiers();
        if slow > fast {
            let [fast_mib, slow_mib] = [0, 1].map(|node| self.usable[node].0 / MIB);
            return Err(SimError::Pairs { fast_mib, slow_mib });
        }
        let Host {
            machine,
            hypervisor,
        } = &mut world.host;
        let first_slow = machine.memory.first_slow_page(self.page_bits());
        let mut flat = Flat::new(self.page_bits(), first_slow, hypervisor.pages());
        for vm in &mut world.vms {
            let (end, slow) = (vm.guest.end_gpa(), slow.0 >> self.page_bits());
            hypervisor.back_in_pairs(&mut vm.backing, end, slow, &mut flat)?;
        }
        machine.memory.flat = Some(Box::new(flat));
        Ok(())
    }

    /// The manager's view of a program's memory.
    fn managed<P: Program>(&self, program: &P) -> Managed<'_> {
        let bytes = program.regions().iter().map(|r| r.bytes.0).sum();
        let tiers = [0, 1].map(|node| self.nodes[node].from[0]);
        Managed {
            footprint: ByteCount(bytes),
            threads: program.threads() as u64,
            load_ps: tiers[0].latency_ps.min(tiers[1].latency_ps),
            tiers,
            agent: &self.agent,
            memtis_unlimited: self.memtis_unlimited,
            settings: self.settings.as_ref(),
        }
    }

    /// Sizes of a VM's fast and slow node: the program's memory plus the watermark of allocations.
    pub(crate) fn sizes_of_tiers(&self) -> [ByteCount; 2] {
        let sizes = nodes::sizes(&self.nodes, &self.usable);
        [sizes[0], sizes[1]]
    }

    /// The workload of a VM.
    fn workload(&self, vm: u32) -> &Workload {
        &self.workloads[vm as usize % self.workloads.len()]
    }
}

/// The union of ranges, as sorted disjoint ranges.
fn union(mut ranges: Vec<VirtRange>) -> Vec<VirtRange> {
    ranges.sort_unstable();
    let mut union: Vec<VirtRange> = vec![];
    for range in ranges {
        let joined = union.last().filter(|last| last.end() > range.start());
        let end = joined.map(|last| last.end().max(range.end()));
        match (joined.map(VirtRange::start), end) {
            (Some(start), Some(end)) => {
                union.pop();
                union.extend(VirtRange::new(start, end));
            }
            _ => union.push(range),
        }
    }
    union
}

fn vms_of(scenario: &Scenario) -> u32 {
    let named = scenario.provision.as_ref().map(|p| p.vms.len() as u32);
    named.filter(|&named| named > 0).unwrap_or(scenario.sim.vms)
}

/// The unit of a workload's speed.
pub(crate) fn unit(workload: &Workload) -> Unit {
    match workload {
        Workload::Memlat(_) => Unit::NS,
        _ => Unit::MOPS,
    }
}

#[cfg(test)]
mod tests {
    use demeter_policy::GuestVirtAddr;

    use super::*;

    #[test]
    fn ranges_that_overlap_become_one() {
        let range = |(a, b)| VirtRange::new(GuestVirtAddr(a), GuestVirtAddr(b)).unwrap();
        let found = union([(6, 9), (1, 5), (2, 3), (4, 6), (20, 21)].map(range).into());
        assert_eq!(found, [(1, 6), (6, 9), (20, 21)].map(range));
    }
}
