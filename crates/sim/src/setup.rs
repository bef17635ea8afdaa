//! Translates a scenario's machine into a world, before any access.

mod nodes;

use demeter_outcome::Unit;
use demeter_policy::engine::{Config, Gain};
use demeter_policy::{BLOCK_SIZE, ByLevel, ByteCount, MIB, SAMPLE_PERIOD_MAX, VirtRange};
use demeter_scenario::{Clock, Cpu, Scenario, Settings, System, Thp, Translation, Workload};

use crate::error::SimError;
use crate::guest::{Guest, GuestConfig, NodeConfig};
use crate::hypervisor::{Backing, BackingPolicy, Hypervisor};
use crate::machine::actor::Vcpu;
use crate::machine::core::Core;
use crate::machine::cost::PS_PER_NS;
use crate::machine::cpu::{
    CpuModel, ICE_LAKE_SP, SANDY_BRIDGE, ZEN_3, emulated_host, emulator, exact_emulator,
};
use crate::machine::flat::Flat;
use crate::machine::flush::FlushCounts;
use crate::machine::memory::{Memory, NodeIndex, NodeModel};
use crate::machine::radix::{INDEX_MAX, PageSize, table_bytes, touched_table_bytes};
use crate::machine::sampler::Sampling;
use crate::machine::walk::Space;
use crate::program::Program;
use crate::reserve::reserve;
use crate::resizable::{self, Sizes};
use crate::system::Split;
use crate::system::{AgentSettings, Build, Managed, Needs, Tiering};
use crate::vm::plug::Plug;
use crate::vm::{Hardware, Host, Machine, Vm};
use crate::workload::accesses_per_operation;
use crate::world::World;

const GIB: u64 = 1 << 30;

/// Target number of simulated accesses if the scenario sets no scale; some seconds of computation.
const ACCESSES_WANTED: u64 = 1 << 25;

/// Assumed time between two accesses of a thread, to choose the scale.
const ACCESS_NS: u64 = 100;

/// Maximum memory of a VM, limited by its page tables.
const MEMORY_MAX: u64 = 4 << 40;

/// Maximum address range of a program: 32 bits number pages of 4 KiB.
const SPAN_MAX: u64 = 16 << 40;

/// Largest automatic scale: a 2 MiB block keeps 8 pages.
const SCALE_MAX: u32 = 6;

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

    /// The host's memory and hypervisor for a number of VMs, and the bytes of each VM's second-level tables.
    fn host_memory(&self, needs: &Needs, count: u64) -> (Hypervisor, Memory, u64) {
        let Sizes { nodes, host, .. } = &self.sizes;
        let own: u64 = nodes.iter().map(|node| node.0).sum();
        let guest_tables = table_bytes(own).next_multiple_of(BLOCK_SIZE);
        let host_tables = table_bytes(guest_tables + own + BLOCK_SIZE);
        // Unused table memory of a tiering hypervisor would be a gift to its guest, so tables get exact backing.
        let backed_tables = match (needs.tiering, &self.translation) {
            (Tiering::Hypervisor, None) => touched_table_bytes(own, 1 << self.page_bits()),
            _ => guest_tables,
        };
        // Spare pages through which pages move between VMs.
        let spare = match needs.tiering {
            Tiering::Hardware => BLOCK_SIZE,
            Tiering::Guest | Tiering::Hypervisor => 0,
        };
        // The guest's tables lie in the first node with memory.
        let with_tables = host.iter().position(|node| node.0 > 0);
        let size = |(node, bytes): (usize, &ByteCount)| {
            let tables = if Some(node) == with_tables {
                backed_tables
            } else {
                0
            };
            ByteCount(count * (tables + bytes.0 + spare))
        };
        let host_nodes: Vec<ByteCount> = host.iter().enumerate().map(size).collect();
        let hypervisor = Hypervisor::new(
            self.page_bits(),
            ByteCount(count * host_tables),
            &host_nodes,
            needs.watermarks,
        );
        let starts = match self.translation {
            // Without a hypervisor, the guest's memory is the machine's.
            Some(translation) if !translation.mode.is_nested() => vec![guest_tables + nodes[0].0],
            _ => hypervisor.node_starts(),
        };
        let memory = Memory::new(&self.cpu, &self.nodes, &starts);
        (hypervisor, memory, host_tables)
    }

    /// The configuration of each VM's guest, under a system with these needs.
    fn guest_config(&self, needs: &Needs) -> GuestConfig {
        let sizes = self.sizes.nodes.iter();
        let nodes = match needs.tiering {
            Tiering::Guest => {
                let node = |(&bytes, node): (&ByteCount, &NodeModel)| NodeConfig {
                    bytes,
                    level: node.level,
                    socket: node.socket,
                };
                sizes.zip(&self.nodes).map(node).collect()
            }
            Tiering::Hypervisor | Tiering::Hardware => {
                let all = sizes.map(|node| node.0).sum();
                NodeConfig::of_tiers([ByteCount(all), ByteCount(0)])
            }
        };
        GuestConfig {
            levels: self.cpu.levels,
            page_bits: self.page_bits(),
            nodes,
            orders: self.orders.clone(),
            huge_pages: self.huge_pages,
            huge_in_slow: needs.huge_in_slow && !self.is_lab,
            interleave: needs.interleave,
            reserved: self.reserved,
            watermarks: needs.watermarks,
            lists: needs.lists.clone(),
        }
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

    /// The socket of a thread. The processes of a program run on the sockets in turn.
    fn socket_of<P: Program>(&self, program: &P, thread: usize) -> usize {
        program.process_of(thread) as usize % self.orders.len()
    }

    /// The socket of each virtual CPU. Threads stay on theirs, so these are on the sockets of their threads; the others
    /// fill the sockets up.
    fn sockets_of_vcpus<P: Program>(&self, program: &P) -> Vec<usize> {
        let (vcpus, sockets) = (self.vcpus as usize, self.orders.len());
        let busy = vcpus.min(program.threads());
        let mut of = Vec::with_capacity(vcpus);
        of.extend((0..busy).map(|thread| self.socket_of(program, thread)));
        while of.len() < vcpus {
            let count = |socket: &usize| of.iter().filter(|&other| other == socket).count();
            let emptiest = (0..sockets).min_by_key(count);
            of.push(emptiest.unwrap_or(0));
        }
        of
    }

    /// Whether each socket has a virtual CPU for each of its threads.
    fn has_cpus_for<P: Program>(&self, program: &P) -> bool {
        let (vcpus, sockets) = (self.vcpus as usize, self.orders.len());
        let of = self.sockets_of_vcpus(program);
        let count = |socket| of.iter().filter(|&&other| other == socket).count();
        let mut threads = 0..program.threads();
        threads.all(|thread| of[thread % vcpus] == self.socket_of(program, thread))
            && (0..sockets).all(|socket| count(socket) * sockets == vcpus)
    }

    /// The workload of a VM.
    fn workload(&self, vm: u32) -> &Workload {
        &self.workloads[vm as usize % self.workloads.len()]
    }

    /// A core, with as many misses in flight as the programs on it have.
    fn core(&self, core: u32) -> Core {
        let in_flight = self.workload(core / self.vcpus).in_flight();
        Core::new(&self.cpu, self.page_bits()).overlapping(in_flight)
    }

    fn hardware(&self, vm: u32, sockets: &[usize]) -> Hardware {
        let vcpus = self.vcpus as usize;
        let vcpu = |&socket: &usize| Vcpu::new(socket, self.k);
        Hardware {
            vcpus: sockets.iter().map(vcpu).collect(),
            placed: (0..vcpus)
                .map(|vcpu| (vm as usize * vcpus + vcpu) % self.cores)
                .collect(),
            flushes: FlushCounts::default(),
            space: Space(vm % Space::COUNT),
            costs: self.cpu.costs,
            k: self.k,
        }
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

/// Number of host cores, at most one for each virtual CPU.
fn cores_of(scenario: &Scenario) -> u32 {
    let vcpus = scenario.machine.vcpus * vms_of(scenario);
    scenario.sim.cores.map_or(vcpus, |cores| cores.min(vcpus))
}

/// The scale at which a scenario takes some seconds.
fn scale_for(scenario: &Scenario) -> Result<u32, SimError> {
    let cores = u64::from(cores_of(scenario));
    let mut accesses = scenario.duration_s * 1_000_000_000 / ACCESS_NS * cores;
    if let Some(operations) = scenario.sim.operations {
        let vms = scenario.vms();
        let each = vms
            .iter()
            .map(|(_, vm)| accesses_per_operation(&vm.workload));
        let each = each.collect::<Result<Vec<u64>, _>>();
        let each = each.map_err(|e| SimError::Workload(e.to_string()))?;
        let all = operations.saturating_mul(vms_of(scenario).into());
        accesses = accesses.min(all.saturating_mul(each.into_iter().max().unwrap_or(1)));
    }
    let scale = (0..SCALE_MAX).find(|k| accesses >> k <= ACCESSES_WANTED);
    Ok(scale.unwrap_or(SCALE_MAX))
}

/// The agent's settings in the model's units. The agent measures latencies; the sampling threshold is the hardware's,
/// as in the lab.
fn agent_settings(scenario: &Scenario, dilation: u64) -> AgentSettings {
    let (tuning, machine) = (&scenario.agent, &scenario.machine);
    let latency_ns = ByLevel::from_fn(|level| nodes::latency_ns(machine, level, dilation));
    let slowest_ns = latency_ns.0.into_iter().max();
    let period = tuning.loads_per_sample(slowest_ns.unwrap_or(0));
    let gain = Gain {
        loads_per_sample: Some(period),
        waits: 1.0,
        latency_ns,
        cpus: machine.vcpus,
    };
    let sampling = |period: u32| Sampling {
        period: period.into(),
        threshold_ps: u64::from(tuning.latency_threshold_ns) * dilation * PS_PER_NS,
    };
    AgentSettings {
        split: Split::of(tuning),
        gain,
        sampling: sampling(period),
        paper_sampling: sampling(tuning.sample_period.unwrap_or(SAMPLE_PERIOD_MAX)),
        epoch_ps: tuning.epoch_ms * 1_000_000_000,
        placer: nodes::placer(scenario),
        engine: Config {
            slowest: machine
                .nodes()
                .iter()
                .map(nodes::level_of)
                .max()
                .unwrap_or_default(),
            collapses: machine.thp == Thp::Always,
            ..Config::new(tuning, ByteCount(0))
        },
        vcpus: scenario.machine.vcpus,
    }
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

    #[test]
    fn the_scale_follows_from_the_work_when_that_is_fixed() {
        let scale = |operations: &str| {
            let text = format!(
                "name = \"x\"\nduration_s = 600\nsystems = []\n\
                 machine = {{ vcpus = 4, fast = {{ usable_mib = 100, latency_ns = 80, \
                 bandwidth_gbps = 50 }}, slow = {{ usable_mib = 100, latency_ns = 250, \
                 bandwidth_gbps = 20 }} }}\n\
                 workload = {{ kind = \"silo\", size_mib = 80, mix = \"tpcc\" }}\n\
                 [sim]\n{operations}"
            );
            scale_for(&toml::from_str(&text).unwrap()).unwrap()
        };
        assert_eq!(scale(""), SCALE_MAX);
        // A transaction makes about a hundred accesses.
        assert_eq!(scale("operations = 100_000"), 0);
        let few = scale("operations = 2_000_000");
        assert!((1..SCALE_MAX).contains(&few), "{few}");
    }
}
