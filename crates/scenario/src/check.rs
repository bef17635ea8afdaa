//! Checks that types alone cannot say: each failure names the key and its mend.

use crate::provision_check::provision_fault;
use crate::{Error, Gups, Memlat, Scenario, Tier, Workload, workload};

/// Longest timed phase, seconds: an hour of an emulated machine proves what there is to prove.
const DURATION_MAX_S: u64 = 3600;
/// Largest tier, MiB (16 TiB): keeps every sum of sizes far from overflow.
const TIER_MAX_MIB: u64 = 1 << 24;
/// Most virtual CPUs of a VM.
const VCPUS_MAX: u32 = 64;
/// Largest stretch of memory delays.
const DILATION_MAX: u64 = 1000;
/// Most VMs that the simulator runs side by side.
const VMS_MAX: u32 = 32;
/// Most cores of the simulator's host.
const CORES_MAX: u32 = 1024;
/// Largest scale of the simulator: a page of 2 MiB.
const SCALE_BITS_MAX: u32 = 9;
/// Longest latency of a tier, nanoseconds.
const LATENCY_MAX_NS: u64 = 1_000_000;
/// Most changes of a hot set's size.
const PHASES_MAX: usize = 100;

impl Scenario {
    /// Checks what types alone cannot say.
    pub fn check(&self) -> Result<(), Error> {
        self.find_fault().map_or(Ok(()), |what| {
            Err(Error::Invalid {
                name: self.name.clone(),
                what,
            })
        })
    }

    /// Bytes of memory that the workload touches, MiB.
    pub fn footprint_mib(&self) -> u64 {
        let workload = &self.workload;
        workload.size_mib().saturating_add(workload.cold_mib())
    }

    /// When the hot set jumps, seconds into the timed phase.
    pub fn shift_at_s(&self) -> Option<u64> {
        match &self.workload {
            Workload::Gups(gups) => gups.shift_at_s,
            _ => None,
        }
    }

    /// What is wrong with it, if anything.
    pub(crate) fn find_fault(&self) -> Option<String> {
        if !is_plain_name(&self.name) {
            return Some("name: 1 to 64 letters, digits, - or _ (files are named after it)".into());
        }
        if !(1..=DURATION_MAX_S).contains(&self.duration_s) {
            return Some(format!(
                "duration_s = {}: must be 1 to {DURATION_MAX_S}",
                self.duration_s
            ));
        }
        self.systems_fault()
            .or_else(|| self.machine_fault())
            .or_else(|| match &self.workload {
                Workload::Gups(gups) => gups_fault(gups, self.duration_s),
                Workload::Memlat(memlat) => memlat_fault(memlat),
                _ => workload::fault(self, VCPUS_MAX),
            })
            .or_else(|| self.fit_fault())
            .or_else(|| self.lab_fault())
            .or_else(|| self.sim_fault())
            .or_else(|| provision_fault(self))
            .or_else(|| self.vary_fault())
    }

    fn systems_fault(&self) -> Option<String> {
        if self.systems.is_empty() {
            return Some("systems: name at least one, such as \"demeter\"".into());
        }
        self.systems.iter().enumerate().find_map(|(i, system)| {
            self.systems[..i]
                .contains(system)
                .then(|| format!("systems: \"{system}\" stands twice; remove one"))
        })
    }

    fn machine_fault(&self) -> Option<String> {
        let machine = &self.machine;
        if !(1..=VCPUS_MAX).contains(&machine.vcpus) {
            return Some(format!(
                "machine.vcpus = {}: must be 1 to {VCPUS_MAX}",
                machine.vcpus
            ));
        }
        tier_fault("fast", &machine.fast)
            .or_else(|| tier_fault("slow", &machine.slow))
            .or_else(|| {
                (machine.slow.bandwidth_gbps > machine.fast.bandwidth_gbps).then(|| {
                    format!(
                        "machine.slow.bandwidth_gbps = {} exceeds machine.fast.bandwidth_gbps = \
                         {}: swap the tiers",
                        machine.slow.bandwidth_gbps, machine.fast.bandwidth_gbps
                    )
                })
            })
            .or_else(|| {
                (machine.slow.latency_ns < machine.fast.latency_ns).then(|| {
                    format!(
                        "machine.slow.latency_ns = {} is below machine.fast.latency_ns = {}: \
                         swap the tiers",
                        machine.slow.latency_ns, machine.fast.latency_ns
                    )
                })
            })
    }

    fn fit_fault(&self) -> Option<String> {
        let room = self.machine.fast.usable_mib + self.machine.slow.usable_mib;
        let need = self.footprint_mib();
        (need > room).then(|| {
            format!(
                "the workload touches {need} MiB but both tiers hold {room} MiB: raise \
                 machine.slow.usable_mib or shrink the workload"
            )
        })
    }

    fn sim_fault(&self) -> Option<String> {
        let sim = &self.sim;
        if !(1..=VMS_MAX).contains(&sim.vms) {
            return Some(format!("sim.vms = {}: must be 1 to {VMS_MAX}", sim.vms));
        }
        if let Some(cores) = sim.cores.filter(|cores| !(1..=CORES_MAX).contains(cores)) {
            return Some(format!("sim.cores = {cores}: must be 1 to {CORES_MAX}"));
        }
        if sim.operations == Some(0) {
            return Some("sim.operations = 0: must be at least 1".into());
        }
        if let Some(bits) = sim.scale_bits.filter(|&bits| bits > SCALE_BITS_MAX) {
            return Some(format!(
                "sim.scale_bits = {bits}: must be at most {SCALE_BITS_MAX}"
            ));
        }
        let granule = sim.slow_granule_bytes;
        if !(64..=4096).contains(&granule) || !granule.is_power_of_two() {
            return Some(format!(
                "sim.slow_granule_bytes = {granule}: must be a power of two from 64 to 4096"
            ));
        }
        let gbps = sim.slow_write_gbps?;
        (!(1..=10_000).contains(&gbps))
            .then(|| format!("sim.slow_write_gbps = {gbps}: must be 1 to 10000"))
    }

    fn lab_fault(&self) -> Option<String> {
        let lab = &self.lab;
        if !(1..=DILATION_MAX).contains(&lab.dilation) {
            return Some(format!(
                "lab.dilation = {}: must be 1 to {DILATION_MAX}",
                lab.dilation
            ));
        }
        (!(1..=DURATION_MAX_S).contains(&lab.timeout_s)).then(|| {
            format!(
                "lab.timeout_s = {}: must be 1 to {DURATION_MAX_S}",
                lab.timeout_s
            )
        })
    }
}

/// Whether a file, a socket or a heading may be named so.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    (1..=64).contains(&name.len()) && name.chars().all(is_plain)
}

fn tier_fault(name: &str, tier: &Tier) -> Option<String> {
    if !(1..=TIER_MAX_MIB).contains(&tier.usable_mib) {
        return Some(format!(
            "machine.{name}.usable_mib = {}: must be 1 to {TIER_MAX_MIB}",
            tier.usable_mib
        ));
    }
    if !(1..=LATENCY_MAX_NS).contains(&tier.latency_ns) {
        return Some(format!(
            "machine.{name}.latency_ns = {}: must be 1 to {LATENCY_MAX_NS}",
            tier.latency_ns
        ));
    }
    (!(1..=10_000).contains(&tier.bandwidth_gbps)).then(|| {
        format!(
            "machine.{name}.bandwidth_gbps = {}: must be 1 to 10000",
            tier.bandwidth_gbps
        )
    })
}

pub(crate) fn gups_fault(gups: &Gups, duration_s: u64) -> Option<String> {
    if gups.size_mib == 0 || gups.hot_mib == 0 {
        return Some("workload.size_mib and workload.hot_mib must be at least 1".into());
    }
    if gups.hot_mib >= gups.size_mib {
        return Some(format!(
            "workload.hot_mib = {}: must be below workload.size_mib = {}",
            gups.hot_mib, gups.size_mib
        ));
    }
    if !(0.0..=1.0).contains(&gups.hot_weight) {
        return Some(format!(
            "workload.hot_weight = {}: must be 0 to 1",
            gups.hot_weight
        ));
    }
    if !(1..=VCPUS_MAX).contains(&gups.threads) {
        return Some(format!(
            "workload.threads = {}: must be 1 to {VCPUS_MAX}",
            gups.threads
        ));
    }
    if let Some(fault) = phases_fault(gups, duration_s) {
        return Some(fault);
    }
    let shift_at_s = gups.shift_at_s?;
    if !(1..duration_s).contains(&shift_at_s) {
        return Some(format!(
            "workload.shift_at_s = {shift_at_s}: must be at least 1 and below duration_s = \
             {duration_s}"
        ));
    }
    // The hot set jumps to the array's middle and must not reach into where it was.
    (gups.hot_mib > gups.size_mib / 2).then(|| {
        format!(
            "workload.hot_mib = {}: with shift_at_s it must be at most half of size_mib = {}",
            gups.hot_mib, gups.size_mib
        )
    })
}

fn phases_fault(gups: &Gups, duration_s: u64) -> Option<String> {
    if gups.phases.len() > PHASES_MAX {
        return Some(format!("workload.phases: at most {PHASES_MAX}"));
    }
    if gups.shift_at_s.is_some() && !gups.phases.is_empty() {
        return Some("workload.shift_at_s and workload.phases exclude each other".into());
    }
    let mut last_s = 0;
    gups.phases.iter().find_map(|phase| {
        if !(last_s + 1..duration_s).contains(&phase.at_s) {
            return Some(format!(
                "workload.phases: at_s = {}: must be above {last_s}, as phases follow in order \
                 of time, and below duration_s = {duration_s}",
                phase.at_s
            ));
        }
        last_s = phase.at_s;
        (!(1..gups.size_mib).contains(&phase.hot_mib)).then(|| {
            format!(
                "workload.phases: hot_mib = {}: must be at least 1 and below size_mib = {}",
                phase.hot_mib, gups.size_mib
            )
        })
    })
}

fn memlat_fault(memlat: &Memlat) -> Option<String> {
    (memlat.size_mib == 0).then(|| "workload.size_mib must be at least 1".into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Lab, Machine, Phase, Sim, System, Thp};

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
                vcpus: 1,
                thp: Thp::Always,
                fast: tier(200, 80),
                slow: tier(900, 250),
            },
            workload: Workload::Gups(gups()),
            provision: None,
            agent: toml::Table::new(),
            vary: vec![],
            published: vec![],
            lab: Lab::default(),
            sim: Sim::default(),
        }
    }

    fn gups() -> Gups {
        Gups {
            size_mib: 800,
            hot_mib: 100,
            hot_weight: 0.9,
            reverse: true,
            threads: 1,
            shift_at_s: Some(30),
            phases: vec![],
        }
    }

    /// One named change of the good scenario; the error must speak of the key.
    fn refused(key: &str, change: impl FnOnce(&mut Scenario)) {
        let mut bad = scenario();
        change(&mut bad);
        let said = bad.check().expect_err(key).to_string();
        assert!(said.contains(key), "{said:?} does not name {key}");
    }

    fn refused_gups(key: &str, change: impl FnOnce(&mut Gups)) {
        refused(key, |s| {
            let mut changed = gups();
            change(&mut changed);
            s.workload = Workload::Gups(changed);
        });
    }

    #[test]
    fn a_sound_scenario_passes() {
        scenario().check().unwrap();
    }

    #[test]
    fn each_fault_names_its_key() {
        refused("name", |s| s.name = "../etc/passwd".into());
        refused("name", |s| s.name = String::new());
        refused("duration_s", |s| s.duration_s = 0);
        refused("duration_s", |s| s.duration_s = u64::MAX);
        refused("systems", |s| s.systems.clear());
        refused("demeter-damon", |s| {
            s.systems = vec![System::DemeterDamon; 2]
        });
        refused("machine.vcpus", |s| s.machine.vcpus = 0);
        refused("machine.vcpus", |s| s.machine.vcpus = 65);
        refused("machine.fast.usable_mib", |s| s.machine.fast.usable_mib = 0);
        refused("machine.slow.usable_mib", |s| {
            s.machine.slow.usable_mib = u64::MAX
        });
        refused("machine.slow.latency_ns", |s| {
            s.machine.slow.latency_ns = 79
        });
        refused("machine.slow.bandwidth_gbps", |s| {
            s.machine.slow.bandwidth_gbps = 51
        });
        refused("machine.fast.bandwidth_gbps", |s| {
            s.machine.fast.bandwidth_gbps = 0
        });
        refused("machine.slow.usable_mib", |s| {
            s.machine.slow.usable_mib = 599
        });
        refused("lab.dilation", |s| s.lab.dilation = 0);
        refused("lab.timeout_s", |s| s.lab.timeout_s = 0);
        refused("sim.vms", |s| s.sim.vms = 0);
        refused("sim.cores", |s| s.sim.cores = Some(0));
        refused("sim.operations", |s| s.sim.operations = Some(0));
        refused("sim.scale_bits", |s| s.sim.scale_bits = Some(10));
        refused("sim.slow_granule_bytes", |s| s.sim.slow_granule_bytes = 96);
        refused("sim.slow_write_gbps", |s| s.sim.slow_write_gbps = Some(0));
        refused_gups("workload.size_mib", |g| g.size_mib = 0);
        refused_gups("workload.hot_mib", |g| g.hot_mib = 0);
        refused_gups("workload.hot_mib", |g| g.hot_mib = 800);
        refused_gups("workload.hot_mib", |g| g.hot_mib = 401);
        refused_gups("workload.hot_weight", |g| g.hot_weight = 1.01);
        refused_gups("workload.hot_weight", |g| g.hot_weight = f64::NAN);
        refused_gups("workload.threads", |g| g.threads = 0);
        refused_gups("workload.shift_at_s", |g| g.shift_at_s = Some(60));
        refused_gups("workload.shift_at_s", |g| g.shift_at_s = Some(0));
        let phases = |phases: &[(u64, u64)]| {
            let phases: Vec<Phase> = phases
                .iter()
                .map(|&(at_s, hot_mib)| Phase { at_s, hot_mib })
                .collect();
            move |g: &mut Gups| (g.shift_at_s, g.phases) = (None, phases)
        };
        refused_gups("at_s = 60", phases(&[(60, 10)]));
        refused_gups("at_s = 10", phases(&[(10, 10), (10, 20)]));
        refused_gups("hot_mib = 0", phases(&[(10, 0)]));
        refused_gups("hot_mib = 800", phases(&[(10, 800)]));
        refused_gups("workload.shift_at_s", |g| {
            g.phases = vec![Phase {
                at_s: 1,
                hot_mib: 1,
            }]
        });
        refused("workload.size_mib", |s| {
            s.workload = Workload::Memlat(Memlat {
                size_mib: 0,
                cold_mib: 1,
            });
        });
        refused("machine.slow.usable_mib", |s| {
            s.workload = Workload::Memlat(Memlat {
                size_mib: 2,
                cold_mib: u64::MAX,
            });
        });
    }

    proptest! {
        /// Whatever passes fits its machine and leaves room beside the hot set.
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
