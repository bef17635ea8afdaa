//! Checks of the section `provision`.

use crate::check::{gups_fault, is_plain_name};
use crate::{Policy, Provision, Provisioner, Scenario, System, Vm, Workload};

/// Most VMs side by side.
const VMS_MAX: usize = 16;
/// Most crashes.
const CYCLES_MAX: u32 = 100_000;

/// What is wrong with the scenario's section `provision`, and how to mend it.
pub(crate) fn provision_fault(scenario: &Scenario) -> Option<String> {
    let provision = scenario.provision.as_ref()?;
    lists_fault(provision)
        .or_else(|| policies_fault(provision, &scenario.systems))
        .or_else(|| swing_fault(provision, scenario.duration_s))
        .or_else(|| crashes_fault(provision, scenario))
        .or_else(|| vms_fault(provision, scenario))
}

fn crashes_fault(provision: &Provision, scenario: &Scenario) -> Option<String> {
    let crashes = provision.crashes?;
    if !(1..=CYCLES_MAX).contains(&crashes.cycles) || crashes.recovery_s == 0 {
        return Some(format!(
            "provision.crashes: cycles must be 1 to {CYCLES_MAX}, recovery_s at least 1"
        ));
    }
    if provision.provisioners != [Provisioner::DemeterBalloon]
        || provision.swing.is_some()
        || !provision.vms.is_empty()
    {
        return Some(
            "provision.crashes: needs provisioners = [\"demeter-balloon\"], no swing, no vms"
                .into(),
        );
    }
    let is_gups = matches!(scenario.workload, Workload::Gups(_));
    (!is_gups || !scenario.systems.iter().all(|system| system.has_agent())).then(|| {
        "provision.crashes: needs gups, which verifies its data, and a system with an agent".into()
    })
}

fn lists_fault(provision: &Provision) -> Option<String> {
    let twice = |key: &str, names: Vec<&str>| {
        if names.is_empty() {
            return Some(format!("provision.{key}: name at least one"));
        }
        names.iter().enumerate().find_map(|(i, name)| {
            names[..i]
                .contains(name)
                .then(|| format!("provision.{key}: \"{name}\" stands twice; remove one"))
        })
    };
    let provisioners = provision.provisioners.iter().map(|p| p.name()).collect();
    let policies = provision.policies.iter().map(|p| p.name()).collect();
    twice("provisioners", provisioners).or_else(|| twice("policies", policies))
}

fn policies_fault(provision: &Provision, systems: &[System]) -> Option<String> {
    let [system] = systems else {
        return Some("systems: with provision exactly one".into());
    };
    let dynamic = provision.policies.iter().find(|&&p| p != Policy::Static)?;
    if provision.vms.len() < 2 {
        return Some(format!(
            "provision.policies: \"{}\" divides memory between VMs: list two or more in \
             provision.vms",
            dynamic.name()
        ));
    }
    let blind = provision.provisioners.iter().find(|p| !p.knows_tiers());
    if let Some(blind) = blind {
        return Some(format!(
            "provision.provisioners: \"{}\" cannot follow the policy \"{}\": use virtio-mem or \
             demeter-balloon",
            blind.name(),
            dynamic.name()
        ));
    }
    (provision.policies.contains(&Policy::Wss) && !system.has_agent()).then(|| {
        format!(
            "provision.policies: \"wss\" needs the agent's estimate of the working set, which \
             the system \"{system}\" does not have"
        )
    })
}

fn swing_fault(provision: &Provision, duration_s: u64) -> Option<String> {
    let swing = provision.swing?;
    if swing.fast_mib == 0 || swing.every_s == 0 || swing.from_s == 0 {
        return Some("provision.swing: fast_mib, from_s and every_s must be at least 1".into());
    }
    let back_s = swing.from_s.saturating_add(swing.every_s);
    (back_s >= duration_s).then(|| {
        format!(
            "provision.swing: grows at {} s and shrinks back at {back_s} s, which must be below \
             duration_s = {duration_s}",
            swing.from_s
        )
    })
}

fn vms_fault(provision: &Provision, scenario: &Scenario) -> Option<String> {
    let vms = &provision.vms;
    if vms.is_empty() {
        return None;
    }
    if vms.len() > VMS_MAX {
        return Some(format!("provision.vms: at most {VMS_MAX}"));
    }
    if provision.provisioners.contains(&Provisioner::VirtioBalloon) && vms.len() > 1 {
        return Some("provision.provisioners: virtio-balloon is compared in a single VM".into());
    }
    let Workload::Gups(gups) = &scenario.workload else {
        return Some("provision.vms: only gups has a hot set to vary".into());
    };
    vms.iter().enumerate().find_map(|(i, vm)| {
        let Vm { name, .. } = vm;
        if !is_plain_name(name) {
            return Some("provision.vms: name: 1 to 64 letters, digits, - or _".into());
        }
        if vms[..i].iter().any(|other| other.name == *name) {
            return Some(format!("provision.vms: two are named \"{name}\""));
        }
        if vm.share == 0 {
            return Some(format!("provision.vms: {name}: share must be at least 1"));
        }
        let mut own = gups.clone();
        own.hot_mib = vm.hot_mib;
        own.phases.clone_from(&vm.phases);
        gups_fault(&own, scenario.duration_s).map(|what| format!("provision.vms: {name}: {what}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCENARIO: &str = r#"
        name = "rebalance"
        duration_s = 60
        systems = ["demeter"]
        [machine]
        vcpus = 1
        fast = { usable_mib = 70, latency_ns = 80, bandwidth_gbps = 100 }
        slow = { usable_mib = 500, latency_ns = 250, bandwidth_gbps = 20 }
        [workload]
        kind = "gups"
        size_mib = 400
        hot_mib = 20
        hot_weight = 0.9
        [provision]
        provisioners = ["demeter-balloon"]
        policies = ["static", "shares", "wss"]
        vms = [
            { name = "a", hot_mib = 200, phases = [{ at_s = 20, hot_mib = 20 }] },
            { name = "b", hot_mib = 20, share = 2 },
        ]
    "#;

    fn provision(scenario: &mut Scenario) -> &mut Provision {
        scenario.provision.as_mut().unwrap()
    }

    fn refused(what: &str, change: impl FnOnce(&mut Scenario)) {
        let mut bad: Scenario = toml::from_str(SCENARIO).unwrap();
        bad.check().unwrap();
        change(&mut bad);
        let said = bad.check().expect_err(what).to_string();
        assert!(said.contains(what), "{said:?} does not say {what:?}");
    }

    #[test]
    fn each_fault_names_its_key() {
        refused("provision.provisioners", |s| {
            provision(s).provisioners.clear()
        });
        refused("\"wss\" stands twice", |s| {
            provision(s).policies.push(Policy::Wss)
        });
        refused("systems", |s| s.systems.push(System::Linux));
        refused("\"wss\" needs the agent", |s| {
            s.systems = vec![System::Linux]
        });
        refused("provision.vms", |s| provision(s).vms.truncate(1));
        refused("\"static\" cannot follow", |s| {
            provision(s).provisioners.push(Provisioner::Static)
        });
        refused("a: workload.hot_mib", |s| provision(s).vms[0].hot_mib = 400);
        refused("a: workload.phases", |s| {
            provision(s).vms[0].phases[0].at_s = 60
        });
        refused("two are named", |s| provision(s).vms[1].name = "a".into());
        refused("name", |s| provision(s).vms[1].name = "a/b".into());
        refused("b: share", |s| provision(s).vms[1].share = 0);
        refused("provision.crashes: cycles", |s| {
            provision(s).crashes = Some(crate::Crashes {
                cycles: 0,
                recovery_s: 60,
            })
        });
        refused("no vms", |s| {
            provision(s).crashes = Some(crate::Crashes {
                cycles: 1,
                recovery_s: 60,
            })
        });
        refused("provision.swing", |s| {
            provision(s).swing = Some(crate::Swing {
                fast_mib: 10,
                from_s: 30,
                every_s: 30,
            })
        });
    }

    #[test]
    fn runs_are_named_after_what_is_compared() {
        let names = |provisioners: &[Provisioner], policies: &[Policy]| {
            let mut scenario: Scenario = toml::from_str(SCENARIO).unwrap();
            let provision = provision(&mut scenario);
            provision.provisioners = provisioners.into();
            provision.policies = policies.into();
            let variants = provision.variants();
            variants
                .into_iter()
                .map(|(name, _)| name)
                .collect::<Vec<_>>()
        };
        use Provisioner::{DemeterBalloon, VirtioMem};
        assert_eq!(
            names(&[DemeterBalloon, VirtioMem], &[Policy::Static]),
            ["demeter-balloon", "virtio-mem"]
        );
        assert_eq!(
            names(&[VirtioMem], &[Policy::Static, Policy::Wss]),
            ["static", "wss"]
        );
        assert_eq!(
            names(&[DemeterBalloon, VirtioMem], &[Policy::Shares, Policy::Wss])
                .last()
                .unwrap(),
            "virtio-mem wss"
        );
    }

    #[test]
    fn each_vm_runs_its_own_hot_set() {
        let scenario: Scenario = toml::from_str(SCENARIO).unwrap();
        let vms = scenario.vms();
        let hot = |i: usize| match &vms[i].1.workload {
            Workload::Gups(gups) => (gups.hot_mib, gups.phases.len()),
            other => panic!("{other:?}"),
        };
        assert_eq!((vms[0].0.as_str(), hot(0)), ("a", (200, 1)));
        assert_eq!((vms[1].0.as_str(), hot(1)), ("b", (20, 0)));
        assert_ne!(vms[0].1.seed, vms[1].1.seed);
        let alone = Scenario {
            provision: None,
            ..scenario.clone()
        };
        assert_eq!(alone.vms(), [("vm".into(), alone.clone())]);
    }
}
