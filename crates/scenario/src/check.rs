//! Checks scenarios beyond their types. Each error names the key and the fix.

use crate::dirty_logging;
use crate::fault::{at_least_one, is_plain_name, refuse_if, unique, within};
use crate::provision_check::check_provision;
use crate::workload::THREADS_MAX;
use crate::{
    Clock, Error, Lab, Machine, MachinePlace, Place, SamplingUnit, Scenario, Sim, System, Tier,
    Workload,
};

/// Longest timed phase, seconds. A longer run on an emulated machine shows nothing new.
const DURATION_MAX_S: u64 = 3600;
/// Longest soak, seconds: a week. A soak keeps no points in time.
const SOAK_MAX_S: u64 = 7 * 24 * 3600;
/// Largest tier, MiB (16 TiB); sums of sizes cannot overflow.
pub(crate) const TIER_MAX_MIB: u64 = 1 << 24;
/// Largest factor for memory delays.
const DILATION_MAX: u64 = 1000;
/// Maximum number of VMs on the simulator, and of those that share cores: a translation has six bits for the VM's
/// number.
const VMS_MAX: u32 = 1024;
const VMS_MAX_ON_SHARED_CORES: u32 = 64;
/// Maximum number of cores of the simulator's host.
const CORES_MAX: u32 = 1024;
/// Largest scale of the simulator: a page of 2 MiB.
const SCALE_BITS_MAX: u32 = 9;
/// Most address space that a program reserves around a mapping, MiB (256 GiB).
pub(crate) const RESERVE_MAX_MIB: u64 = 256 << 10;
/// Highest latency of a tier, nanoseconds.
pub(crate) const LATENCY_MAX_NS: u64 = 1_000_000;
/// Highest bandwidth of a tier, GB/s.
pub(crate) const BANDWIDTH_MAX_GBPS: u64 = 10_000;

impl Scenario {
    /// Checks values beyond their types.
    pub fn check(&self) -> Result<(), Error> {
        self.check_keys().map_err(|what| Error::Invalid {
            name: self.name.clone(),
            what,
        })
    }

    /// Memory that the workload touches, MiB.
    pub fn footprint_mib(&self) -> u64 {
        let workload = &self.workload;
        workload.size_mib().saturating_add(workload.cold_mib())
    }

    /// When the hot set jumps, seconds into the timed phase.
    pub fn shift_at_s(&self) -> Option<u64> {
        self.workload.shift_at_s()
    }

    /// The error in its keys, if any.
    pub(crate) fn check_keys(&self) -> Result<(), String> {
        refuse_if(!is_plain_name(&self.name), || {
            "name: 1 to 64 letters, digits, - or _ (files are named after it)".into()
        })?;
        let soaks = self.provision.as_ref().is_some_and(|p| p.soak.is_some());
        let most_s = if soaks { SOAK_MAX_S } else { DURATION_MAX_S };
        within("duration_s", self.duration_s, 1..=most_s)?;
        self.check_systems()?;
        self.check_place()?;
        self.check_settings()?;
        self.check_vcpus()?;
        self.check_machine()?;
        self.check_workload()?;
        check_lab(&self.lab)?;
        self.check_clock()?;
        self.check_unit()?;
        check_sim(&self.sim)?;
        self.check_translation()?;
        self.check_dirty_logging()?;
        self.agent.check().map_err(|e| format!("agent.{e}"))?;
        check_provision(self)?;
        self.check_vary()
    }

    /// Checks the workload, and whether it fits machine and systems.
    pub(crate) fn check_workload(&self) -> Result<(), String> {
        self.workload.check(self.duration_s)?;
        self.check_named_nodes()?;
        self.check_oracle()?;
        self.check_fit()
    }

    fn check_vcpus(&self) -> Result<(), String> {
        let most = match self.sim.dirty_logging {
            Some(_) => dirty_logging::VCPUS_MAX,
            None => THREADS_MAX,
        };
        within("machine.vcpus", self.machine.vcpus, 1..=most)
    }

    /// Rejects a clock of the model's own where the host's clock matters: a host answers provisioned VMs by its own.
    fn check_clock(&self) -> Result<(), String> {
        if self.lab.clock == Clock::Host {
            return Ok(());
        }
        let vcpus = self.machine.vcpus;
        let wrong = [
            (vcpus != 1, format!("machine.vcpus = {vcpus}: must be 1")),
            (
                self.machine.place == MachinePlace::Host,
                "remove machine.place = \"host\"".into(),
            ),
            (self.provision.is_some(), "remove provision".into()),
        ];
        match wrong.into_iter().find(|(is_wrong, _)| *is_wrong) {
            Some((_, hint)) => Err(format!("lab.clock = \"model\": {hint}, or the clock")),
            None => Ok(()),
        }
    }

    /// Rejects a unit of Intel's where guests run on guests: the emulator has AMD's virtualization only.
    fn check_unit(&self) -> Result<(), String> {
        let is_intel = self.lab.unit == SamplingUnit::Pebs;
        refuse_if(is_intel && self.machine.place == MachinePlace::Host, || {
            "lab.unit = \"pebs\": remove machine.place = \"host\", or the unit".into()
        })
    }

    fn check_systems(&self) -> Result<(), String> {
        refuse_if(self.systems.is_empty(), || {
            "systems: name at least one, such as \"demeter\"".into()
        })?;
        unique("systems", &self.systems)
    }

    /// Rejects scenarios that cannot run on a host, and systems of hosts elsewhere.
    fn check_place(&self) -> Result<(), String> {
        let is_host = self.machine.place == MachinePlace::Host;
        let only_for_hosts = |system: &&System| system.row().runs_on == [Place::Host];
        if !is_host {
            return match self.systems.iter().find(only_for_hosts) {
                Some(system) => Err(format!(
                    "systems: \"{system}\" runs on hosts only: set machine.place = \"host\", or leave it out"
                )),
                None => Ok(()),
            };
        }
        if let Some(system) = self.systems.iter().find(|s| !s.runs_on(Place::Host)) {
            return Err(format!(
                "systems: \"{system}\" does not run under machine.place = \"host\": leave it out"
            ));
        }
        let is_fleet = self.vms().len() > 1;
        refuse_if(is_fleet && self.systems.contains(&System::Demeter), || {
            "systems: \"demeter\" does not run in several guests of a host, whose emulator has one sampling unit: use \
             \"demeter-damon\""
                .into()
        })?;
        let own = matches!(
            self.workload,
            Workload::Gups(_) | Workload::Memlat(_) | Workload::Mix(_)
        );
        refuse_if(!own, || {
            format!(
                "workload: a host's guest runs no {}: use gups, memlat or mix",
                self.workload.kind()
            )
        })?;
        refuse_if(!self.vary.is_empty(), || {
            "machine.place = \"host\": does not go with vary: remove it".into()
        })
    }

    /// Refuses a workload that names a node that the machine lacks, or that has no memory.
    fn check_named_nodes(&self) -> Result<(), String> {
        let Workload::Gups(gups) = &self.workload else {
            return Ok(());
        };
        let nodes = self.machine.nodes();
        for (key, named) in [
            ("bind", &gups.bind),
            ("interleave", &gups.interleave),
            ("cpuset", &gups.cpuset),
        ] {
            let has_memory = |n: &u32| {
                nodes
                    .get(*n as usize)
                    .is_some_and(|node| node.usable_mib > 0)
            };
            if let Some(node) = named.iter().find(|node| !has_memory(node)) {
                return Err(format!(
                    "workload.{key}: the machine has no node {node} with memory: name one of its {} nodes from 0 on",
                    nodes.len()
                ));
            }
        }
        Ok(())
    }

    fn check_oracle(&self) -> Result<(), String> {
        let is_blind = !self.workload.tells_hot_set() && self.systems.contains(&System::Oracle);
        refuse_if(is_blind, || {
            "systems: this workload has no known hot set, so there is no \"oracle\": leave it out"
                .into()
        })
    }

    fn check_fit(&self) -> Result<(), String> {
        let room = self.machine.room_mib();
        let need = self.footprint_mib();
        let (memory, key) = match self.machine.node.is_empty() {
            true => ("both tiers", "machine.slow.usable_mib"),
            false => ("the lasting nodes", "machine.node.usable_mib"),
        };
        refuse_if(need > room, || {
            format!(
                "the workload touches {need} MiB but {memory} hold {room} MiB: raise {key} or shrink \
                 the workload"
            )
        })
    }

    fn check_machine(&self) -> Result<(), String> {
        let machine = &self.machine;
        if machine.node.is_empty() {
            return check_tiers(machine);
        }
        refuse_if(machine.place == MachinePlace::Host, || {
            "machine.node: a host has a fast and a slow tier: remove place = \"host\"".into()
        })?;
        refuse_if(self.provision.is_some(), || {
            "machine.node: memory of such a machine is not provisioned: remove [provision]".into()
        })?;
        machine.check_nodes(self.duration_s)
    }
}

fn check_tiers(machine: &Machine) -> Result<(), String> {
    let Machine { fast, slow, .. } = machine;
    for (key, tier) in [("fast", fast), ("slow", slow)] {
        refuse_if(*tier == Tier::default(), || {
            format!("machine.{key} is missing: give both tiers, or the nodes ([[machine.node]])")
        })?;
    }
    check_tier("fast", fast)?;
    check_tier("slow", slow)?;
    refuse_if(slow.bandwidth_gbps > fast.bandwidth_gbps, || {
        format!(
            "machine.slow.bandwidth_gbps = {} exceeds machine.fast.bandwidth_gbps = {}: swap the \
             tiers",
            slow.bandwidth_gbps, fast.bandwidth_gbps
        )
    })?;
    refuse_if(slow.latency_ns < fast.latency_ns, || {
        format!(
            "machine.slow.latency_ns = {} is below machine.fast.latency_ns = {}: swap the tiers",
            slow.latency_ns, fast.latency_ns
        )
    })
}

fn check_tier(name: &str, tier: &Tier) -> Result<(), String> {
    let key = |key: &str| format!("machine.{name}.{key}");
    within(&key("usable_mib"), tier.usable_mib, 1..=TIER_MAX_MIB)?;
    within(&key("latency_ns"), tier.latency_ns, 1..=LATENCY_MAX_NS)?;
    let gbps = tier.bandwidth_gbps;
    within(&key("bandwidth_gbps"), gbps, 1..=BANDWIDTH_MAX_GBPS)
}

fn check_lab(lab: &Lab) -> Result<(), String> {
    within("lab.dilation", lab.dilation, 1..=DILATION_MAX)?;
    within("lab.timeout_s", lab.timeout_s, 1..=DURATION_MAX_S)
}

fn check_sim(sim: &Sim) -> Result<(), String> {
    within("sim.vms", sim.vms, 1..=VMS_MAX)?;
    refuse_if(
        sim.cores.is_some() && sim.vms > VMS_MAX_ON_SHARED_CORES,
        || {
            format!(
                "sim.vms = {}: at most {VMS_MAX_ON_SHARED_CORES} share cores: leave sim.cores out",
                sim.vms
            )
        },
    )?;
    if let Some(cores) = sim.cores {
        within("sim.cores", cores, 1..=CORES_MAX)?;
    }
    if let Some(operations) = sim.operations {
        at_least_one("sim.operations", operations)?;
    }
    if let Some(bits) = sim.scale_bits {
        within("sim.scale_bits", bits, 0..=SCALE_BITS_MAX)?;
    }
    within("sim.reserve_mib", sim.reserve_mib, 0..=RESERVE_MAX_MIB)?;
    refuse_if(sim.reserve_mib > 0 && sim.translation.is_some(), || {
        "sim.reserve_mib: with sim.translation all memory is reserved in one piece: remove one"
            .into()
    })?;
    sim.cost_percent.check()?;
    let granule = sim.slow_granule_bytes;
    let is_granule = (64..=4096).contains(&granule) && granule.is_power_of_two();
    refuse_if(!is_granule, || {
        format!("sim.slow_granule_bytes = {granule}: must be a power of two from 64 to 4096")
    })?;
    for (key, gbps) in [
        ("sim.fast_others_gbps", sim.fast_others_gbps),
        ("sim.slow_others_gbps", sim.slow_others_gbps),
    ] {
        within(key, gbps, 0..=BANDWIDTH_MAX_GBPS)?;
    }
    match sim.slow_write_gbps {
        Some(gbps) => within("sim.slow_write_gbps", gbps, 1..=BANDWIDTH_MAX_GBPS),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use demeter_policy::Tuning;
    use proptest::prelude::*;

    use super::*;
    use crate::{Gups, System, Thp, Workload};

    fn scenario() -> Scenario {
        let tier = |usable_mib, latency_ns| Tier {
            usable_mib,
            latency_ns,
            bandwidth_gbps: 50,
        };
        Scenario {
            name: "test".into(),
            about: String::new(),
            duration_s: 60,
            seed: 1,
            systems: vec![System::None, System::Demeter],
            machine: Machine {
                place: MachinePlace::Guest,
                vcpus: 1,
                thp: Thp::Always,
                fast: tier(200, 80),
                slow: tier(900, 250),
                hmat: true,
                node: vec![],
            },
            workload: Workload::Gups(gups()),
            provision: None,
            agent: Tuning::default(),
            settings: vec![],
            vary: vec![],
            published: vec![],
            lab: Lab::default(),
            sim: Sim::default(),
        }
    }

    fn gups() -> Gups {
        Gups {
            reverse: true,
            shift_at_s: Some(30),
            ..Gups::new(800, 100, 0.9)
        }
    }

    #[test]
    fn hosts_and_guests_have_systems_of_their_own() {
        let said = |change: &dyn Fn(&mut Scenario)| {
            let mut s = scenario();
            s.machine.place = MachinePlace::Host;
            s.systems = vec![System::None, System::HLinux];
            change(&mut s);
            s.check().map_err(|error| error.to_string())
        };
        said(&|_| ()).unwrap();
        let refused = |change: &dyn Fn(&mut Scenario)| said(change).unwrap_err();
        let linux = refused(&|s| s.systems.push(System::Linux));
        assert!(
            linux.contains("\"linux\" does not run under machine.place"),
            "{linux}"
        );
        let guest = refused(&|s| {
            s.machine.place = MachinePlace::Guest;
            s.systems.push(System::HDamon);
        });
        assert!(guest.contains("\"h-damon\" runs on hosts only"), "{guest}");
        let fleet = refused(&|s| {
            s.systems.push(System::Demeter);
            let text = "provisioners = [\"static\"]\npolicies = [\"static\"]\n\
                        vms = [{ name = \"a\", hot_mib = 1 }, { name = \"b\", hot_mib = 1 }]\n";
            s.provision = Some(toml::from_str(text).unwrap());
        });
        assert!(fleet.contains("one sampling unit"), "{fleet}");
        let varied = refused(&|s| s.vary = vec![toml::Table::new()]);
        assert!(varied.contains("does not go with vary"), "{varied}");
    }

    #[test]
    fn a_clock_of_the_models_own_is_for_one_cpu_alone() {
        let said = |change: &dyn Fn(&mut Scenario)| {
            let mut s = scenario();
            s.machine.vcpus = 1;
            s.lab.clock = Clock::Model;
            change(&mut s);
            s.check().map_err(|error| error.to_string())
        };
        said(&|_| ()).unwrap();
        let cpus = said(&|s| s.machine.vcpus = 2).unwrap_err();
        assert!(cpus.contains("machine.vcpus = 2: must be 1"), "{cpus}");
        let host = said(&|s| {
            s.machine.place = MachinePlace::Host;
            s.systems = vec![System::HLinux];
        });
        assert!(host.unwrap_err().contains("remove machine.place"));
    }

    #[test]
    fn a_unit_of_intels_is_for_a_guest() {
        let mut s = scenario();
        s.lab.unit = SamplingUnit::Pebs;
        s.check().unwrap();
        s.machine.place = MachinePlace::Host;
        s.systems = vec![System::HLinux];
        let error = s.check().unwrap_err().to_string();
        assert!(error.contains("lab.unit = \"pebs\""), "{error}");
    }

    proptest! {
        /// Every accepted scenario fits its machine and leaves memory beside the hot set.
        #[test]
        fn what_passes_fits(
            size_mib: u64,
            hot_mib in 0u64..2000,
            small in 0u64..2000,
            use_small: bool,
            hot_weight: f64,
            fast in 0u64..2000,
            slow: u64,
            shift_at_s in proptest::option::of(0u64..200),
            duration_s in 0u64..200,
        ) {
            let mut s = scenario();
            s.duration_s = duration_s;
            s.machine.fast.usable_mib = fast;
            s.machine.slow.usable_mib = if use_small { small } else { slow };
            let size_mib = if use_small { small } else { size_mib };
            s.workload =
                Workload::Gups(Gups { size_mib, hot_mib, hot_weight, shift_at_s, ..gups() });
            if s.check().is_ok() {
                prop_assert!(s.footprint_mib() <= fast + s.machine.slow.usable_mib);
                prop_assert!(0 < hot_mib && hot_mib < size_mib);
                prop_assert!((0.0..=1.0).contains(&hot_weight));
                prop_assert!(shift_at_s.is_none_or(|at| 0 < at && at < duration_s));
            }
        }
    }
}
