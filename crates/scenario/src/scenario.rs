//! The structure of scenario files.

use demeter_policy::Tuning;
use demeter_toml_file::FileError;
use serde::{Deserialize, Serialize};

use crate::{
    CostPercent, DirtyLogging, MachineNode, Place, Provision, Published, Settings, System,
    Translation, Workload,
};

/// A scenario: one workload on one machine under several systems.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Short name, also the name in the result file.
    pub name: String,
    /// One sentence for people: what the scenario shows.
    #[serde(default)]
    pub about: String,
    /// Length of the timed phase, seconds.
    pub duration_s: u64,
    /// Seed of the workload's random numbers.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// Systems to run, in this order.
    pub systems: Vec<System>,
    /// The machine.
    pub machine: Machine,
    /// The workload.
    pub workload: Workload,
    /// How VMs get memory while they run; by default they boot with the memory of `machine`.
    #[serde(default)]
    pub provision: Option<Provision>,
    /// The agent's tuning: the keys of `[tuning]` in its configuration.
    #[serde(default)]
    pub agent: Tuning,
    /// Settings of rivals. In the lab a system runs under each of its settings, and the best is shown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub settings: Vec<Settings>,
    /// Keys with several values, dotted as in `demeter sweep`. Every combination of a table's values is a case. Simulator
    /// and lab run cases.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(schema_with = "crate::schema::vary"))]
    pub vary: Vec<toml::Table>,
    /// Published figures of the scenario.
    #[serde(default)]
    pub published: Vec<Published>,
    /// How the lab emulates the machine.
    #[serde(default)]
    pub lab: Lab,
    /// How the simulator models the machine.
    #[serde(default)]
    pub sim: Sim,
}

fn default_seed() -> u64 {
    1
}

/// The guest machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Whether the workload runs in this machine or in a guest of it.
    #[serde(default, skip_serializing_if = "MachinePlace::is_guest")]
    pub place: MachinePlace,
    /// Virtual CPUs; a host's guest has as many.
    pub vcpus: u32,
    /// Transparent huge pages in the guest.
    #[serde(default)]
    pub thp: Thp,
    /// The fast tier (node 0). Both tiers are given, or `node` is.
    #[serde(default, skip_serializing_if = "Tier::is_left_out")]
    pub fast: Tier,
    /// The slow tier (node 1).
    #[serde(default, skip_serializing_if = "Tier::is_left_out")]
    pub slow: Tier,
    /// Whether the firmware tells latency and bandwidth of nodes (ACPI HMAT). It changes nothing on the simulator.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub hmat: bool,
    /// The nodes of a machine that has others than these two, in the order of their numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node: Vec<MachineNode>,
}

fn yes() -> bool {
    true
}

fn is_true(value: &bool) -> bool {
    *value
}

/// The machine's role: the workload's VM, or its host. Only the lab has hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum MachinePlace {
    /// The VM that the workload runs in.
    #[default]
    Guest,
    /// A host with KVM that runs the workload in its guest, or in several guests: those of `provision.vms`. The tiers
    /// are the host's.
    Host,
}

impl MachinePlace {
    /// Where the lab runs systems that manage such a machine.
    pub fn in_lab(self) -> Place {
        match self {
            Self::Guest => Place::Lab,
            Self::Host => Place::Host,
        }
    }

    /// Whether the workload runs directly in the machine.
    pub fn is_guest(&self) -> bool {
        *self == Self::Guest
    }
}

/// The kernel's mode of transparent huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
#[derive(strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum Thp {
    /// Wherever possible: Debian's default.
    #[default]
    Always,
    /// For programs that request them.
    Madvise,
    /// Only 4 KiB pages.
    Never,
}

/// One memory tier.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Tier {
    /// Memory available to programs after boot, MiB, in addition to the kernel's own memory.
    pub usable_mib: u64,
    /// Latency of a load, nanoseconds.
    pub latency_ns: u64,
    /// Bandwidth, GB/s (10^9 bytes).
    pub bandwidth_gbps: u64,
}

impl Tier {
    fn is_left_out(&self) -> bool {
        *self == Self::default()
    }
}

/// How the lab emulates the machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Lab {
    /// How much slower than hardware the emulated CPU is assumed to be. Memory delays are multiplied by this factor, so
    /// that the ratio of memory to computation is realistic.
    pub dilation: u64,
    /// Time limit of a VM, without the timed phase, seconds.
    pub timeout_s: u64,
    /// Which clock the guest has.
    pub clock: Clock,
    /// The sampling unit of the CPUs, with `--emulator exact`.
    pub unit: SamplingUnit,
}

/// The clock of the lab's guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Clock {
    /// The host's: results vary with the host's load.
    #[default]
    Host,
    /// The modelled machine's: it counts instructions and the delays of memory. Needs `--emulator exact`.
    Model,
}

/// The sampling unit of the lab's CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum SamplingUnit {
    /// AMD's, instruction-based sampling.
    #[default]
    Ibs,
    /// Intel's, with the event for slow loads. Needs `--emulator exact`.
    Pebs,
    /// None: the CPUs have no performance counters.
    None,
}

impl Default for Lab {
    fn default() -> Self {
        Self {
            dilation: 8,
            timeout_s: 240,
            clock: Clock::Host,
            unit: SamplingUnit::Ibs,
        }
    }
}

/// How the simulator models the machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Sim {
    /// The modelled processor, with its sizes and costs.
    pub cpu: Cpu,
    /// VMs that run the workload side by side, each with the scenario's machine. `provision.vms` names VMs that differ.
    pub vms: u32,
    /// Cores that all virtual CPUs share; by default each has its own.
    pub cores: Option<u32>,
    /// Operations after which a VM is finished. The run ends when all VMs are, and reports the elapsed time.
    /// `duration_s` is still the limit.
    pub operations: Option<u64>,
    /// One simulated page or access represents two to this many real ones; by default chosen so that a run takes
    /// seconds.
    pub scale_bits: Option<u32>,
    /// Bandwidth of stores to the slow tier, GB/s; by default that of loads.
    pub slow_write_gbps: Option<u64>,
    /// Internal transfer size of the slow tier for a random access: 64 bytes, or 256 for Optane.
    pub slow_granule_bytes: u64,
    /// Load of other programs on the fast tier, GB/s, if it were idle. They wait for each load, so that they get less
    /// of a busy tier.
    pub fast_others_gbps: u64,
    /// The same on the slow tier.
    #[serde(skip_serializing_if = "is_zero")]
    pub slow_others_gbps: u64,
    /// How the fast tier's latency grows with its load.
    pub fast_curve: Curve,
    /// How the slow tier's latency grows with its load.
    pub slow_curve: Curve,
    /// Whether the hypervisor backs a guest's nodes with huge pages.
    pub host_thp: Thp,
    /// Whether filling the program's memory counts as part of the timed phase, with the system already active. For
    /// programs that are timed as a whole.
    pub timed_fill: bool,
    /// Address space without access (`PROT_NONE`) that a program reserves before each of its mappings, MiB. JVMs and
    /// sanitizers do so: `reserve_mib = 65536`. It contains no movable memory.
    #[serde(skip_serializing_if = "is_zero")]
    pub reserve_mib: u64,
    /// Whether `memtis` runs without its authors' limit on a program's fast memory. It then demotes nothing, and
    /// promotes only into free memory.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub memtis_unlimited: bool,
    /// Changed costs, in percent of the model's.
    #[serde(skip_serializing_if = "CostPercent::is_default")]
    pub cost_percent: CostPercent,
    /// Address translation if all memory is reserved in one piece: direct segments, and pages of 1 GiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub translation: Option<Translation>,
    /// A VM under dirty logging; replaces the model of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_logging: Option<DirtyLogging>,
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

impl Default for Sim {
    fn default() -> Self {
        Self {
            cpu: Cpu::default(),
            vms: 1,
            cores: None,
            operations: None,
            scale_bits: None,
            slow_write_gbps: None,
            slow_granule_bytes: 64,
            fast_others_gbps: 0,
            slow_others_gbps: 0,
            fast_curve: Curve::default(),
            slow_curve: Curve::default(),
            host_thp: Thp::Always,
            timed_fill: false,
            reserve_mib: 0,
            memtis_unlimited: false,
            cost_percent: CostPercent::default(),
            translation: None,
            dirty_logging: None,
        }
    }
}

/// A processor model of the simulator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Cpu {
    /// Intel Ice Lake-SP.
    #[default]
    IceLakeSp,
    /// AMD Zen 3.
    #[serde(rename = "zen-3")]
    Zen3,
    /// Intel Sandy Bridge-EN.
    SandyBridge,
    /// The lab's emulator, for comparing the simulator with the lab.
    Lab,
    /// The lab's emulator as a host, whose guest it emulates, too (`machine.place = "host"`).
    LabHost,
}

/// Measured curves of latency under load. The idle latency is the tier's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Curve {
    /// DDR4 of Ice Lake-SP: 1.6 times at 80 % of the peak bandwidth.
    #[default]
    Ddr4,
    /// DDR5 of Sapphire Rapids: 1.4 times at 80 %.
    Ddr5,
    /// Another socket's memory: 1.3 times at 80 %.
    Remote,
    /// CXL memory that is attached directly: 1.4 times at 80 %.
    Cxl,
    /// Optane modules: 1.2 times at 80 %.
    Optane,
}

impl Curve {
    /// All curves.
    pub const ALL: [Self; 5] = [
        Self::Ddr4,
        Self::Ddr5,
        Self::Remote,
        Self::Cxl,
        Self::Optane,
    ];
}

/// An error in a scenario.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read or parsed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A value is invalid.
    #[error("scenario {name}: {what}")]
    Invalid {
        /// The scenario.
        name: String,
        /// The key and the fix.
        what: String,
    },
}

impl Scenario {
    /// Removes and returns the systems that do not run at `place`.
    ///
    /// If none runs there, all stay, so that the caller's error names the first.
    pub fn leave_out_what_cannot_run_on(&mut self, place: Place) -> Vec<System> {
        let runs = |system: &System| system.runs_on(place);
        if !self.systems.iter().any(runs) {
            return vec![];
        }
        let (kept, others) = self.systems.drain(..).partition(runs);
        self.systems = kept;
        others
    }

    /// The scenario without its size and name: scenarios that differ only in size are equal.
    pub fn without_size(&self) -> Self {
        let mut scenario = self.clone();
        scenario.name.clear();
        scenario.about.clear();
        let Machine {
            vcpus, fast, slow, ..
        } = &mut scenario.machine;
        (*vcpus, fast.usable_mib, slow.usable_mib) = (0, 0, 0);
        scenario.sim.scale_bits = None;
        match &mut scenario.workload {
            Workload::Gups(gups) => (gups.size_mib, gups.hot_mib, gups.threads) = (0, 0, 0),
            Workload::Zipf(zipf) => (zipf.size_mib, zipf.cold_mib, zipf.threads) = (0, 0, 0),
            _ => {}
        }
        scenario
    }

    /// The VMs of a run, each with its name and scenario.
    ///
    /// Most scenarios have one VM, others those of `provision.vms`. Each VM has its own seed.
    pub fn vms(&self) -> Vec<(String, Self)> {
        let vms = self.provision.as_ref().map_or(&[][..], |p| &p.vms);
        let own = vms.iter().zip(0u64..).map(|(vm, number)| {
            let mut scenario = self.clone();
            scenario.seed = self.seed.wrapping_add(number);
            scenario.workload = vm.workload(&self.workload);
            (vm.name.clone(), scenario)
        });
        let own: Vec<_> = own.collect();
        if own.is_empty() {
            vec![("vm".into(), self.clone())]
        } else {
            own
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn every_scenario_that_we_ship_loads() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
        let mut seen = 0;
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|ext| ext == "toml") {
                let scenario = Scenario::load(&path).unwrap_or_else(|e| panic!("{e}"));
                assert_eq!(
                    Some(scenario.name.as_ref()),
                    path.file_stem().and_then(|s| s.to_str())
                );
                seen += 1;
            }
        }
        assert!(seen >= 5, "only {seen} scenarios in {}", folder.display());
    }

    #[test]
    fn the_scale_suite_loads_and_its_sizes_differ_in_nothing_else() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/scale");
        let load = |name: &str| Scenario::load(&folder.join(format!("{name}.toml"))).unwrap();
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap();
            assert_eq!(load(name).name, name);
        }
        let small = load("gups-256m").without_size();
        assert_eq!(load("gups-1t").without_size(), small);
        for other in ["small-pages-4g", "zipf-4g"] {
            assert_ne!(load(other).without_size(), small);
        }
    }

    #[test]
    fn an_unknown_key_and_a_missing_file_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.toml");
        let said = Scenario::load(&path).unwrap_err().to_string();
        assert!(said.contains("x.toml"), "{said}");
        std::fs::write(&path, "name = \"x\"\nbogus = 1\n").unwrap();
        let said = Scenario::load(&path).unwrap_err().to_string();
        assert!(said.contains("x.toml") && said.contains("bogus"), "{said}");
    }
}
