//! `demeter host fits`: would a VM find its memory?

use std::path::Path;

use anyhow::bail;
use demeter_host::VmName;
use demeter_host::config::{Config, VmConfig};
use demeter_host::view::{HostView, PoolView, TierView, VmView};
use demeter_policy::MIB;
use demeter_policy::provision::Policy;

use super::client::Client;
use crate::output;

/// Asks a running controller whether the VMs of a file would fit, and prints what is left.
pub fn fits(file: &Path, client: &Client) -> anyhow::Result<()> {
    let (config, names) = client.get::<Config>("/v1/config")?.with_vms(file)?;
    let mut view: HostView = client.get("/v1/vms")?;
    let mut text = String::new();
    for name in names {
        let vm = &config.vms[&name];
        let pool = config
            .pool_of(vm)
            .map(|pool| pool.0.clone())
            .unwrap_or_default();
        view.vms.retain(|of| of.name != name.as_str());
        text += &line(&view, &pool, &name, vm)?;
        // The next VM of the file comes on top of it.
        view.vms.push(VmView {
            name: name.to_string(),
            pool,
            desired: vm.sizes().into(),
            guarantee: vm.guarantees().into(),
            ..VmView::default()
        });
    }
    output::print(text)
}

/// Memory that is left beside a VM; an error if it does not fit.
fn line(view: &HostView, pool: &str, name: &VmName, vm: &VmConfig) -> anyhow::Result<String> {
    let Some(of) = view.pools.iter().find(|of| of.name == pool) else {
        bail!("VM {name}: the running controller has no pool {pool:?}; reload it first");
    };
    // Under a policy that divides memory, only guarantees are certain.
    let (needs, takes): (TierView, fn(&VmView) -> TierView) = match view.policy {
        Policy::Static => (vm.sizes().into(), |vm| vm.desired),
        _ => (vm.guarantees().into(), |vm| vm.guarantee),
    };
    let taken = view.vms.iter().filter(|of| of.pool == pool).map(takes);
    let taken = taken.fold(TierView::default(), |sum, of| TierView {
        fast_bytes: sum.fast_bytes.saturating_add(of.fast_bytes),
        slow_bytes: sum.slow_bytes.saturating_add(of.slow_bytes),
    });
    let tiers = [
        (
            "fast",
            of.size.fast_bytes,
            taken.fast_bytes,
            needs.fast_bytes,
        ),
        (
            "slow",
            of.size.slow_bytes,
            taken.slow_bytes,
            needs.slow_bytes,
        ),
    ];
    let mut left = vec![];
    for (tier, size, taken, needs) in tiers {
        let free = size.saturating_sub(taken);
        if needs > free {
            bail!(
                "VM {name} does not fit: {} MiB of {tier} memory are missing; lower another VM, or enlarge the pool",
                (needs - free).div_ceil(MIB)
            );
        }
        left.push(format!("{} MiB {tier}", (free - needs) / MIB));
    }
    Ok(format!(
        "VM {name} fits; {} are left{}\n",
        left.join(" and "),
        held(of)
    ))
}

/// A warning while VMs hold more than the pool.
fn held(pool: &PoolView) -> &'static str {
    match pool.excess().sum() {
        0 => "",
        _ => ", once VMs have given back what they hold beyond the pool",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_fits_into_what_others_leave_of_its_pool() {
        let mib = |fast: u64, slow: u64| TierView {
            fast_bytes: fast * MIB,
            slow_bytes: slow * MIB,
        };
        let vm = |pool: &str| VmView {
            pool: pool.into(),
            desired: mib(60, 60),
            guarantee: mib(10, 10),
            ..VmView::default()
        };
        let mut view = HostView {
            pools: vec![PoolView {
                name: "s0".into(),
                size: mib(100, 100),
                ..PoolView::default()
            }],
            vms: vec![vm("s0"), vm("s1")],
            ..HostView::default()
        };
        let new: VmConfig = serde_json::from_value(serde_json::json!({
            "qmp": "/q",
            "fast": { "size_mib": 50, "guarantee_mib": 20 },
            "slow": { "size_mib": 30 },
        }))
        .unwrap();
        let name = "new".parse().unwrap();
        let refused = line(&view, "s0", &name, &new).unwrap_err().to_string();
        assert!(
            refused.contains("10 MiB of fast memory are missing"),
            "{refused}"
        );
        view.policy = Policy::Shares;
        let said = line(&view, "s0", &name, &new).unwrap();
        assert_eq!(said, "VM new fits; 70 MiB fast and 74 MiB slow are left\n");
        view.pools[0].may_hold = mib(101, 0);
        assert!(
            line(&view, "s0", &name, &new)
                .unwrap()
                .contains("once VMs have given back")
        );
        assert!(line(&view, "s2", &name, &new).is_err());
    }
}
