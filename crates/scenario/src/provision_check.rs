//! Checks the section `provision`.

use demeter_policy::provision::{Policy, ProvisionerKind};

use crate::fault::{at_least_one, is_plain_name, refuse_if, unique, within};
use crate::{
    Crashes, MachinePlace, Provision, Provisioner, ResizeCycle, Scenario, Soak, System, Through,
    Vm, Workload,
};

/// Maximum number of VMs side by side.
const VMS_MAX: usize = 16;
/// Maximum number of guests of a host.
const GUESTS_MAX: usize = 3;
/// Maximum number of crashes.
const CYCLES_MAX: u32 = 100_000;

/// Checks the section `provision`; the error has the fix.
pub(crate) fn check_provision(scenario: &Scenario) -> Result<(), String> {
    let Some(provision) = &scenario.provision else {
        return Ok(());
    };
    check_lists(provision)?;
    if scenario.machine.place == MachinePlace::Host {
        check_guests(provision, &scenario.systems)?;
        return check_vms(provision, scenario);
    }
    check_ways(provision)?;
    check_policies(provision, &scenario.systems)?;
    if let Some(cycle) = &provision.resize_cycle {
        check_cycle(cycle, scenario.duration_s)?;
    }
    if let Some(crashes) = &provision.crashes {
        check_crashes(crashes, provision, scenario)?;
    }
    if let Some(soak) = &provision.soak {
        check_soak(soak, provision, scenario)?;
    }
    check_vms(provision, scenario)
}

/// A host's guests share its fast tier by one policy. They boot with all their memory, or have balloons that their
/// agents serve.
fn check_guests(provision: &Provision, systems: &[System]) -> Result<(), String> {
    let balloon = Provisioner::Sized(ProvisionerKind::DemeterBalloon);
    let has_balloons = provision.provisioners == [balloon];
    let is_apt = (has_balloons || provision.provisioners == [Provisioner::Static])
        && provision.policies.len() == 1
        && provision.through == [Through::Qmp]
        && provision.resize_cycle.is_none()
        && !provision.runs_rounds();
    refuse_if(!is_apt, || {
        "provision: with machine.place = \"host\" it needs provisioners = [\"static\"] or \
         [\"demeter-balloon\"] and one policy, no libvirt, no resize_cycle, no crashes, no soak"
            .into()
    })?;
    if let Some(system) = systems.iter().find(|s| has_balloons && !s.has_agent()) {
        return Err(format!(
            "systems: \"{system}\" has no agent to serve demeter-balloon in a host's guests: leave it out, or use \
             provisioners = [\"static\"]"
        ));
    }
    within(
        "provision.vms with machine.place = \"host\"",
        provision.vms.len(),
        1..=GUESTS_MAX,
    )
}

fn check_soak(soak: &Soak, provision: &Provision, scenario: &Scenario) -> Result<(), String> {
    at_least_one("provision.soak.round_s", soak.round_s)?;
    at_least_one("provision.soak.resize_s", soak.resize_s)?;
    let is_apt = provision.provisioners == [Provisioner::Sized(ProvisionerKind::DemeterBalloon)]
        && provision.policies == [Policy::Static]
        && provision.resize_cycle.is_none()
        && provision.crashes.is_none();
    refuse_if(!is_apt, || {
        "provision.soak: needs provisioners = [\"demeter-balloon\"], policies = [\"static\"], no \
         resize_cycle, no crashes"
            .into()
    })?;
    needs_verifying_agent("soak", scenario)
}

fn check_crashes(
    crashes: &Crashes,
    provision: &Provision,
    scenario: &Scenario,
) -> Result<(), String> {
    within("provision.crashes.cycles", crashes.cycles, 1..=CYCLES_MAX)?;
    at_least_one("provision.crashes.recovery_s", crashes.recovery_s)?;
    let is_apt = provision.provisioners == [Provisioner::Sized(ProvisionerKind::DemeterBalloon)]
        && provision.resize_cycle.is_none()
        && provision.vms.is_empty();
    refuse_if(!is_apt, || {
        "provision.crashes: needs provisioners = [\"demeter-balloon\"], no resize_cycle, no vms"
            .into()
    })?;
    needs_verifying_agent("crashes", scenario)
}

fn needs_verifying_agent(key: &str, scenario: &Scenario) -> Result<(), String> {
    let is_gups = matches!(scenario.workload, Workload::Gups(_));
    let has_agent = scenario.systems.iter().all(|system| system.has_agent());
    refuse_if(!is_gups || !has_agent, || {
        format!("provision.{key}: needs gups, which verifies its data, and a system with an agent")
    })
}

fn check_lists(provision: &Provision) -> Result<(), String> {
    let Provision {
        provisioners,
        policies,
        ..
    } = provision;
    refuse_if(provisioners.is_empty(), || {
        "provision.provisioners: name at least one, such as \"demeter-balloon\"".into()
    })?;
    refuse_if(policies.is_empty(), || {
        "provision.policies: name at least one, such as \"static\"".into()
    })?;
    unique("provision.provisioners", provisioners)?;
    unique("provision.policies", policies)?;
    unique("provision.rivals", &provision.rivals)
}

fn check_ways(provision: &Provision) -> Result<(), String> {
    let Provision {
        provisioners,
        through,
        ..
    } = provision;
    refuse_if(through.is_empty(), || {
        "provision.through: name at least one, such as \"qmp\"".into()
    })?;
    unique("provision.through", through)?;
    if !through.contains(&Through::Libvirt) {
        return Ok(());
    }
    match provisioners.iter().find(|one| one.kind().is_none()) {
        Some(other) => Err(format!(
            "provision.through: \"libvirt\" does not go with \"{other}\": use what changes a VM's memory"
        )),
        None => Ok(()),
    }
}

fn check_policies(provision: &Provision, systems: &[System]) -> Result<(), String> {
    let is_static = provision.provisioners == [Provisioner::Static];
    let [system, others @ ..] = systems else {
        return Ok(());
    };
    refuse_if(!others.is_empty() && !is_static, || {
        "systems: with provision exactly one, unless provisioners = [\"static\"]".into()
    })?;
    let dynamic = provision.policies.iter().find(|&&p| p != Policy::Static);
    let dynamic = dynamic.map(ToString::to_string);
    let rival = provision.rivals.first().map(ToString::to_string);
    let Some(dynamic) = dynamic.or(rival) else {
        return Ok(());
    };
    refuse_if(provision.vms.len() < 2, || {
        format!(
            "provision.policies: \"{dynamic}\" divides memory between VMs: list two or more in \
             provision.vms"
        )
    })?;
    if let Some(blind) = provision.provisioners.iter().find(|p| !p.knows_tiers()) {
        return Err(format!(
            "provision.provisioners: \"{blind}\" cannot follow the policy \"{dynamic}\": use \
             virtio-mem or demeter-balloon"
        ));
    }
    let estimates = [
        (Policy::Wss, "the working set"),
        (Policy::Benefit, "the benefit of fast memory"),
    ];
    for (policy, estimate) in estimates {
        let needs_agent = provision.policies.contains(&policy);
        refuse_if(needs_agent && !system.has_agent(), || {
            format!(
                "provision.policies: \"{policy}\" needs the agent's estimate of {estimate}, which \
                 the system \"{system}\" does not have"
            )
        })?;
    }
    Ok(())
}

fn check_cycle(cycle: &ResizeCycle, duration_s: u64) -> Result<(), String> {
    at_least_one("provision.resize_cycle.fast_mib", cycle.fast_mib)?;
    at_least_one("provision.resize_cycle.from_s", cycle.from_s)?;
    at_least_one("provision.resize_cycle.every_s", cycle.every_s)?;
    let back_s = cycle.from_s.saturating_add(cycle.every_s);
    refuse_if(back_s >= duration_s, || {
        format!(
            "provision.resize_cycle: grows at {} s and shrinks back at {back_s} s, which must be below \
             duration_s = {duration_s}",
            cycle.from_s
        )
    })
}

fn check_vms(provision: &Provision, scenario: &Scenario) -> Result<(), String> {
    let vms = &provision.vms;
    if vms.is_empty() {
        return Ok(());
    }
    refuse_if(vms.len() > VMS_MAX, || {
        format!("provision.vms: at most {VMS_MAX}")
    })?;
    let balloon = Provisioner::Sized(ProvisionerKind::VirtioBalloon);
    let has_balloon = provision.provisioners.contains(&balloon);
    refuse_if(has_balloon && vms.len() > 1, || {
        "provision.provisioners: virtio-balloon is compared in a single VM".into()
    })?;
    for (i, (vm, (_, own))) in vms.iter().zip(scenario.vms()).enumerate() {
        let Vm { name, .. } = vm;
        refuse_if(!is_plain_name(name), || {
            "provision.vms: name: 1 to 64 letters, digits, - or _".into()
        })?;
        refuse_if(vms[..i].iter().any(|other| other.name == *name), || {
            format!("provision.vms: two are named \"{name}\"; rename one")
        })?;
        refuse_if(vm.share == 0, || {
            format!("provision.vms: {name}: share must be at least 1")
        })?;
        check_workload(vm, scenario)
            .and_then(|()| own.check_workload())
            .map_err(|what| format!("provision.vms: {name}: {what}"))?;
    }
    Ok(())
}

/// Checks what a VM says about its workload.
fn check_workload(vm: &Vm, scenario: &Scenario) -> Result<(), String> {
    let is_gups = matches!(scenario.workload, Workload::Gups(_));
    let own = vm.workload.as_ref();
    refuse_if(vm.has_hot_set() && (own.is_some() || !is_gups), || {
        "only the scenario's gups has a hot set to vary: remove hot_mib and phases".into()
    })?;
    let is_host = scenario.machine.place == MachinePlace::Host;
    refuse_if(own.is_some() && is_host, || {
        "a host's guests run the scenario's workload: remove workload".into()
    })?;
    let is_time = |workload: &Workload| matches!(workload, Workload::Memlat(_));
    let differs = own.is_some_and(|own| is_time(own) != is_time(&scenario.workload));
    refuse_if(differs, || {
        "memlat has latencies and others have rates, which do not add up: use one kind of them"
            .into()
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

    #[test]
    fn a_hosts_guests_have_one_policy_and_an_agent_where_they_have_balloons() {
        let said = |change: &dyn Fn(&mut Scenario)| {
            let mut scenario: Scenario = toml::from_str(SCENARIO).unwrap();
            scenario.machine.place = MachinePlace::Host;
            scenario.systems = vec![System::None, System::HHistory];
            provision(&mut scenario).provisioners = vec![Provisioner::Static];
            provision(&mut scenario).policies = vec![Policy::Wss];
            change(&mut scenario);
            scenario.check().map_err(|error| error.to_string())
        };
        said(&|_| ()).unwrap();
        let two = said(&|s| provision(s).policies.push(Policy::Static)).unwrap_err();
        assert!(two.contains("one policy"), "{two}");
        let none = said(&|s| provision(s).vms.clear()).unwrap_err();
        assert!(none.contains("provision.vms"), "{none}");
        let sized = |kind| {
            said(&move |s| provision(s).provisioners = vec![Provisioner::Sized(kind)]).unwrap_err()
        };
        let balloon = sized(ProvisionerKind::DemeterBalloon);
        assert!(balloon.contains("\"none\" has no agent"), "{balloon}");
        let other = sized(ProvisionerKind::VirtioMem);
        assert!(other.contains("[\"demeter-balloon\"]"), "{other}");
        said(&|s| {
            s.systems = vec![System::DemeterDamon];
            let balloon = Provisioner::Sized(ProvisionerKind::DemeterBalloon);
            provision(s).provisioners = vec![balloon];
        })
        .unwrap();
    }

    #[test]
    fn runs_are_named_after_what_is_compared() {
        let names = |kinds: &[ProvisionerKind], policies: &[Policy]| {
            let mut scenario: Scenario = toml::from_str(SCENARIO).unwrap();
            let provision = provision(&mut scenario);
            provision.provisioners = kinds.iter().copied().map(Provisioner::Sized).collect();
            provision.policies = policies.into();
            let variants = provision.variants();
            variants
                .into_iter()
                .map(|(name, _)| name)
                .collect::<Vec<_>>()
        };
        use ProvisionerKind::{DemeterBalloon, VirtioMem};
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
    fn ways_that_are_compared_are_named() {
        let mut scenario: Scenario = toml::from_str(SCENARIO).unwrap();
        let provision = provision(&mut scenario);
        provision.policies = vec![Policy::Static];
        provision.through = vec![Through::Qmp, Through::Libvirt];
        let variants = provision.variants();
        let runs: Vec<_> = variants
            .iter()
            .map(|(n, v)| (n.as_str(), v.through))
            .collect();
        assert_eq!(
            runs,
            [
                ("demeter-balloon qmp", Through::Qmp),
                ("demeter-balloon libvirt", Through::Libvirt)
            ]
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
