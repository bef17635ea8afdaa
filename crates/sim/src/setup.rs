//! Translates a scenario's machine into a world, before any access.

use demeter_outcome::Unit;
use demeter_policy::engine::{Config, Gain};

use demeter_policy::{BLOCK_SIZE, ByteCount, MIB, PerTier, SAMPLE_PERIOD_MAX, VirtRange};
use demeter_scenario::{Cpu, Curve, Scenario, Settings, Thp, Translation, Workload};

use crate::error::SimError;
use crate::guest::{Guest, GuestConfig, Watermarks};
use crate::hypervisor::{Backing, BackingPolicy, Hypervisor};
use crate::machine::actor::Vcpu;
use crate::machine::core::Core;
use crate::machine::cost::PS_PER_NS;
use crate::machine::cpu::{CpuModel, ICE_LAKE_SP, SANDY_BRIDGE, ZEN_3, emulated_host, emulator};
use crate::machine::flat::Flat;
use crate::machine::flush::FlushCounts;
use crate::machine::memory::Memory;
use crate::machine::radix::{INDEX_MAX, PageSize, table_bytes, touched_table_bytes};
use crate::machine::sampler::Sampling;
use crate::machine::tier::{LINE_BYTES, TierModel};
use crate::machine::walk::Space;
use crate::program::Program;
use crate::reserve::reserve;
use crate::resizable::{self, Sizes};
use crate::system::Split;
use crate::system::{AgentSettings, Build, Managed, Needs, Tiering};
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
    pub(crate) tiers: [TierModel; 2],
    /// Memory of each VM that its program can use, by tier.
    pub(crate) usable: [ByteCount; 2],
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
        if !scenario.machine.node.is_empty() {
            return Err(SimError::NoModelOf(
                "other nodes than a fast and a slow one ([[machine.node]])",
            ));
        }
        if !scenario.machine.hmat {
            return Err(SimError::NoModelOf(
                "firmware without HMAT (machine.hmat = false)",
            ));
        }
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
            Cpu::Lab => (emulator(), dilation),
            Cpu::LabHost => (emulated_host(), dilation),
        };
        let usable = [&machine.fast, &machine.slow].map(|t| ByteCount(t.usable_mib * MIB));
        let setup = Self {
            cpu,
            workloads,
            k: match scenario.sim.scale_bits {
                Some(bits) => bits,
                None => scale_for(scenario)?,
            },
            tiers: tier_models(scenario, dilation),
            usable,
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
            sizes: Sizes::new(scenario, nodes(usable), usable[0]),
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
        let own = self.usable[0].0 + self.usable[1].0;
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

    /// Refuses programs whose address range is too wide.
    pub(crate) fn check_programs<P: Program>(&self, programs: &[P]) -> Result<(), SimError> {
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
        let Sizes {
            nodes: [fast, slow],
            owned_fast,
            host: [host_fast, host_slow],
        } = self.sizes;
        let count = vms.len() as u64;
        let guest_config = self.guest_config(&needs);
        let guest_tables = table_bytes(fast.0 + slow.0).next_multiple_of(BLOCK_SIZE);
        let host_tables = table_bytes(guest_tables + fast.0 + slow.0 + BLOCK_SIZE);
        // Unused table memory of a tiering hypervisor would be a gift to its guest, so tables get exact backing.
        let backed_tables = match (needs.tiering, &self.translation) {
            (Tiering::Hypervisor, None) => {
                touched_table_bytes(fast.0 + slow.0, 1 << self.page_bits())
            }
            _ => guest_tables,
        };
        // Spare pages through which pages move between VMs.
        let spare = match needs.tiering {
            Tiering::Hardware => BLOCK_SIZE,
            Tiering::Guest | Tiering::Hypervisor => 0,
        };
        let (hypervisor, fast_end) = Hypervisor::new(
            self.page_bits(),
            ByteCount(count * host_tables),
            ByteCount(count * (backed_tables + host_fast.0 + spare)),
            ByteCount(count * (host_slow.0 + spare)),
            needs.watermarks,
        );
        let fast_end = match self.translation {
            // Without a hypervisor, the guest's memory is the machine's.
            Some(translation) if !translation.mode.is_nested() => guest_tables + fast.0,
            _ => fast_end,
        };
        let vm = |(i, (manager, program)): (usize, (_, P))| {
            let mut guest = Guest::new(&guest_config);
            if owned_fast < fast {
                guest.begin_with(owned_fast);
            }
            let policy = match needs.tiering {
                Tiering::Hypervisor | Tiering::Hardware => BackingPolicy::First(needs.first_touch),
                Tiering::Guest => BackingPolicy::ByNode {
                    slow: guest.slow_gpa(),
                    pages: self.host_pages,
                },
            };
            let first_page = (i as u64 * host_tables / 4096) as u32;
            let backing = Backing::new(self.cpu.levels, self.page_bits(), first_page, policy);
            let mut vm = Vm::new(self.hardware(i as u32), guest, backing, manager, program);
            vm.share = self.operations;
            if needs.keeps_hot_set {
                let changes_s = self.workload(i as u32).hot_changes_s();
                let changes_s = std::iter::once(0).chain(changes_s);
                let hot = changes_s.flat_map(|s| vm.program.hot(s * 1_000_000_000));
                vm.guest.promise(union(hot.collect()));
            }
            vm
        };
        let vms = vms.into_iter().enumerate().map(vm).collect();
        let host = Host {
            machine: Machine {
                cores: (0..self.cores as u32).map(|core| self.core(core)).collect(),
                memory: Memory::new(&self.cpu, self.tiers, fast_end),
            },
            hypervisor,
        };
        World::new(host, vms, self.k)
    }

    /// The configuration of each VM's guest, under a system with these needs.
    fn guest_config(&self, needs: &Needs) -> GuestConfig {
        let [fast, slow] = self.sizes.nodes;
        GuestConfig {
            levels: self.cpu.levels,
            page_bits: self.page_bits(),
            nodes: match needs.tiering {
                Tiering::Guest => [fast, slow],
                Tiering::Hypervisor | Tiering::Hardware => {
                    [ByteCount(fast.0 + slow.0), ByteCount(0)]
                }
            },
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
        let [fast, slow] = self.nodes();
        if slow > fast {
            let [fast_mib, slow_mib] = self.usable.map(|bytes| bytes.0 / MIB);
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
        Managed {
            footprint: ByteCount(bytes),
            threads: program.threads() as u64,
            load_ps: self.tiers[0].latency_ps.min(self.tiers[1].latency_ps),
            tiers: self.tiers,
            agent: self.agent,
            memtis_unlimited: self.memtis_unlimited,
            settings: self.settings.as_ref(),
        }
    }

    /// Sizes of a VM's nodes: the program's memory plus the watermark of allocations.
    pub(crate) fn nodes(&self) -> [ByteCount; 2] {
        nodes(self.usable)
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

    fn hardware(&self, vm: u32) -> Hardware {
        let vcpus = self.vcpus as usize;
        Hardware {
            vcpus: vec![Vcpu::new(self.k); vcpus],
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

/// The models of both tiers, under a clock that runs slower by `dilation`.
fn tier_models(scenario: &Scenario, dilation: u64) -> [TierModel; 2] {
    let machine = &scenario.machine;
    let gbps = 1_000_000_000 / dilation;
    let tier = |tier: &demeter_scenario::Tier,
                write_gbps: Option<u64>,
                granule: u64,
                curve: Curve,
                others: u64| TierModel {
        latency_ps: tier.latency_ns * dilation * PS_PER_NS,
        read_bytes_per_s: tier.bandwidth_gbps * gbps,
        write_bytes_per_s: write_gbps.unwrap_or(tier.bandwidth_gbps) * gbps,
        granule_lines: granule / LINE_BYTES,
        curve,
        others_bytes_per_s: others * gbps,
    };
    [
        tier(
            &machine.fast,
            None,
            LINE_BYTES,
            scenario.sim.fast_curve,
            scenario.sim.fast_others_gbps,
        ),
        tier(
            &machine.slow,
            scenario.sim.slow_write_gbps,
            scenario.sim.slow_granule_bytes,
            scenario.sim.slow_curve,
            scenario.sim.slow_others_gbps,
        ),
    ]
}

/// Sizes of nodes that leave these sizes to programs.
fn nodes([fast, slow]: [ByteCount; 2]) -> [ByteCount; 2] {
    [Watermarks::LINUX.around(fast), slow].map(|n| ByteCount(n.0.next_multiple_of(BLOCK_SIZE)))
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
    let latency_ns = |tier: &demeter_scenario::Tier| {
        u32::try_from(tier.latency_ns * dilation).unwrap_or(u32::MAX)
    };
    let latency_ns = PerTier {
        fast: latency_ns(&machine.fast),
        slow: latency_ns(&machine.slow),
    };
    let period = tuning.loads_per_sample(latency_ns.slow.max(latency_ns.fast));
    let gain = Gain {
        loads_per_sample: Some(period),
        waits: 1.0,
        latency_ns: latency_ns.into(),
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
        engine: Config::new(tuning, ByteCount(0)),
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
