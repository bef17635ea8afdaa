//! `demeter host fits`: would a VM find its memory?
//!
//! The controller promises guarantees, and refuses a VM whose guarantee does not fit. A service level is an estimate:
//! VMs with a level need the fast memory that their agents report. A new VM has no estimate yet. Another VM's estimate
//! stands for it (`--like`), or all its memory must be fast.

use std::path::Path;

use anyhow::bail;
use demeter_host::VmName;
use demeter_host::config::{Config, VmConfig};
use demeter_host::view::{HostView, PoolView, ServiceView, TierView, VmView};
use demeter_policy::benefit::Benefit;
use demeter_policy::provision::Policy;
use demeter_policy::{ByteCount, MIB};

use super::client::Client;
use crate::output;

/// Asks a running controller whether the VMs of a file would fit, and prints what is left.
pub fn fits(file: &Path, like: Option<&str>, client: &Client) -> anyhow::Result<()> {
    let (config, names) = client.get::<Config>("/v1/config")?.with_vms(file)?;
    let mut view: HostView = client.get("/v1/vms")?;
    let mut text = String::new();
    for name in names {
        let vm = &config.vms[&name];
        let pool = config.pool_of(vm);
        let pool = pool.map(|pool| pool.0.clone()).unwrap_or_default();
        let model = model(&view, like, &name)?;
        view.vms.retain(|of| of.name != name.as_str());
        let needs = needs(&name, vm, model.as_ref())?;
        text += &line(&view, &pool, &name, vm, needs)?;
        // The next VM of the file comes on top of it.
        view.vms.push(VmView {
            name: name.to_string(),
            pool,
            desired: vm.sizes().into(),
            guarantee: vm.guarantees().into(),
            limit: TierView {
                fast_bytes: u64::MAX,
                slow_bytes: u64::MAX,
            },
            service: needs.map(|(percent, needs)| ServiceView {
                slowdown_max_percent: percent,
                needs_bytes: Some(needs.0),
                unmet: None,
            }),
            ..VmView::default()
        });
    }
    output::print(text)
}

/// The estimate that stands for a VM: that of `like`, or else its own.
fn model(view: &HostView, like: Option<&str>, name: &VmName) -> anyhow::Result<Option<Benefit>> {
    let of = |name: &str| view.vms.iter().find(|of| of.name == name);
    let Some(like) = like else {
        return Ok(of(name.as_str()).and_then(|vm| vm.benefit.clone()));
    };
    match of(like).map(|vm| &vm.benefit) {
        Some(Some(benefit)) => Ok(Some(benefit.clone())),
        Some(None) => bail!(
            "VM {like} has no estimate of its slowdown; demeter host assess says why, or name another VM"
        ),
        None => bail!("there is no VM {like}; demeter host status lists them"),
    }
}

/// A VM's service level, and the fast memory that it needs for it.
fn needs(
    name: &VmName,
    vm: &VmConfig,
    model: Option<&Benefit>,
) -> anyhow::Result<Option<(u32, ByteCount)>> {
    let Some(percent) = vm.slowdown_max_percent else {
        return Ok(None);
    };
    let (needs, why) = match model {
        Some(benefit) => match benefit.fast_for(percent) {
            Some(needs) => (needs, "by the estimate"),
            None => bail!(
                "VM {name}: by the estimate no size of fast memory keeps its slowdown below {percent} %; raise \
                 slowdown_max_percent"
            ),
        },
        None => {
            let sizes = vm.sizes();
            let all = sizes.fast.0.saturating_add(sizes.slow.0);
            (
                ByteCount(all),
                "all its memory, since no estimate exists; name a VM with --like",
            )
        }
    };
    let limit = vm.limits().fast;
    if let Some(limit) = limit.filter(|limit| *limit < needs) {
        bail!(
            "VM {name} fits its slowdown_max_percent = {percent} only with {} MiB fast ({why}), and its \
             limit is {} MiB",
            needs.0.div_ceil(MIB),
            limit.0 / MIB
        );
    }
    Ok(Some((percent, needs)))
}

/// Memory that is left beside a VM; an error if it does not fit. `level` is its service level and the fast memory that
/// it needs.
fn line(
    view: &HostView,
    pool: &str,
    name: &VmName,
    vm: &VmConfig,
    level: Option<(u32, ByteCount)>,
) -> anyhow::Result<String> {
    let Some(of) = view.pools.iter().find(|of| of.name == pool) else {
        bail!("VM {name}: the running controller has no pool {pool:?}; reload it first");
    };
    // Under a policy that divides memory, only guarantees are certain.
    let (needs, takes): (TierView, fn(&VmView) -> TierView) = match view.policy {
        Policy::Static => (vm.sizes().into(), |vm| vm.desired),
        _ => (vm.guarantees().into(), |vm| vm.guarantee),
    };
    let free = free(view, of, takes);
    let tiers = [
        ("fast", free.fast_bytes, needs.fast_bytes),
        ("slow", free.slow_bytes, needs.slow_bytes),
    ];
    let mut left = vec![];
    for (tier, free, needs) in tiers {
        if needs > free {
            bail!(
                "VM {name} does not fit: {} MiB of {tier} memory are missing; lower another VM, or enlarge the pool",
                (needs - free).div_ceil(MIB)
            );
        }
        left.push(format!("{} MiB {tier}", (free - needs) / MIB));
    }
    let level = match (view.policy, level) {
        (Policy::Static, Some((percent, needs))) if needs > vm.sizes().fast => bail!(
            "VM {name} needs {} MiB fast for its slowdown_max_percent = {percent}, and policy static gives \
             it {} MiB; raise size_mib, or choose another policy",
            needs.0.div_ceil(MIB),
            vm.sizes().fast.0 / MIB
        ),
        (Policy::Static, _) => String::new(),
        (_, level) => levels(view, of, name, needs.fast_bytes, level)?,
    };
    Ok(format!(
        "VM {name} fits; {} are left{}{level}\n",
        left.join(" and "),
        held(of)
    ))
}

/// Memory of a pool that its VMs do not take.
fn free(view: &HostView, pool: &PoolView, takes: fn(&VmView) -> TierView) -> TierView {
    let vms = view.vms.iter().filter(|of| of.pool == pool.name);
    let taken = vms
        .map(takes)
        .fold(TierView::default(), |sum, of| TierView {
            fast_bytes: sum.fast_bytes.saturating_add(of.fast_bytes),
            slow_bytes: sum.slow_bytes.saturating_add(of.slow_bytes),
        });
    TierView {
        fast_bytes: pool.size.fast_bytes.saturating_sub(taken.fast_bytes),
        slow_bytes: pool.size.slow_bytes.saturating_sub(taken.slow_bytes),
    }
}

/// Fast memory that the service levels of a VM and of others leave; an error if some level would not be met.
fn levels(
    view: &HostView,
    pool: &PoolView,
    name: &VmName,
    guarantee: u64,
    level: Option<(u32, ByteCount)>,
) -> anyhow::Result<String> {
    let others = view.vms.iter().filter(|of| of.pool == pool.name);
    let others: Vec<_> = others
        .filter_map(|vm| Some((&vm.name, vm.service.as_ref()?)))
        .collect();
    if others.is_empty() && level.is_none() {
        return Ok(String::new());
    }
    let free = free(view, pool, |vm| TierView {
        fast_bytes: needed(vm).clamp(
            vm.guarantee.fast_bytes,
            vm.limit.fast_bytes.max(vm.guarantee.fast_bytes),
        ),
        slow_bytes: 0,
    });
    let needs = level.map_or(0, |(_, needs)| needs.0).max(guarantee);
    if needs > free.fast_bytes {
        let whose = match level {
            Some((percent, needs)) => format!(
                "it needs {} MiB fast for its slowdown_max_percent = {percent}",
                needs.0.div_ceil(MIB)
            ),
            None => "others need fast memory for their slowdown_max_percent".into(),
        };
        bail!(
            "VM {name} fits by guarantees, but {whose}: {} MiB are missing; lower another VM, or enlarge the pool",
            (needs - free.fast_bytes).div_ceil(MIB)
        );
    }
    let unknown = others
        .iter()
        .filter(|(_, service)| service.needs_bytes.is_none());
    let unknown: Vec<_> = unknown.map(|(name, _)| name.as_str()).collect();
    let unknown = match unknown.is_empty() {
        true => String::new(),
        false => format!(
            ", not counting {}, whose needs are unknown",
            unknown.join(", ")
        ),
    };
    Ok(format!(
        "; {} MiB fast with all slowdown_max_percent{unknown}",
        (free.fast_bytes - needs) / MIB
    ))
}

/// Fast memory that a VM needs for its service level.
fn needed(vm: &VmView) -> u64 {
    let needs = vm.service.as_ref().and_then(|service| service.needs_bytes);
    needs.unwrap_or(0)
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
        let refused = line(&view, "s0", &name, &new, None)
            .unwrap_err()
            .to_string();
        assert!(
            refused.contains("10 MiB of fast memory are missing"),
            "{refused}"
        );
        view.policy = Policy::Shares;
        let said = line(&view, "s0", &name, &new, None).unwrap();
        assert_eq!(said, "VM new fits; 70 MiB fast and 74 MiB slow are left\n");
        view.pools[0].may_hold = mib(101, 0);
        assert!(
            line(&view, "s0", &name, &new, None)
                .unwrap()
                .contains("once VMs have given back")
        );
        assert!(line(&view, "s2", &name, &new, None).is_err());
    }

    /// A program that always waits, and is half as fast without fast memory.
    fn estimate(mib: u64) -> Benefit {
        let fields = serde_json::json!({
            "points": [[0, 0], [mib * MIB, 1000]],
            "fast_latency_ns": 100, "slow_latency_ns": 200, "running_ms": 1000,
            "waits_min_permille": 0, "waits_max_permille": 1000,
        });
        serde_json::from_value(fields).unwrap()
    }

    #[test]
    fn a_level_needs_what_an_estimate_says_beside_the_levels_of_others() {
        let name: VmName = "new".parse().unwrap();
        let mut vm: VmConfig = serde_json::from_value(serde_json::json!({
            "qmp": "/q",
            "fast": { "size_mib": 50, "guarantee_mib": 20 },
            "slow": { "size_mib": 30 },
        }))
        .unwrap();
        let mib = |fast: u64| TierView {
            fast_bytes: fast * MIB,
            slow_bytes: 0,
        };
        let other = VmView {
            name: "db".into(),
            guarantee: mib(10),
            limit: mib(60),
            benefit: Some(estimate(100)),
            ..VmView::default()
        };
        let mut view = HostView {
            policy: Policy::Shares,
            pools: vec![PoolView {
                size: TierView {
                    slow_bytes: 100 * MIB,
                    ..mib(100)
                },
                ..PoolView::default()
            }],
            vms: vec![other],
            ..HostView::default()
        };
        let said = |view: &HostView, vm: &VmConfig, like| {
            let needs = needs(&name, vm, model(view, like, &name)?.as_ref())?;
            line(view, "", &name, vm, needs)
        };
        let refused =
            |view: &HostView, vm: &VmConfig, like| said(view, vm, like).unwrap_err().to_string();
        assert!(!said(&view, &vm, None).unwrap().contains("slowdown"));
        vm.slowdown_max_percent = Some(30);
        let text = said(&view, &vm, Some("db")).unwrap();
        assert!(
            text.contains("; 20 MiB fast with all slowdown_max_percent"),
            "{text}"
        );
        // All 80 MiB of the VM, without an estimate.
        let text = said(&view, &vm, None).unwrap();
        assert!(text.contains("; 10 MiB fast with all"), "{text}");
        let service = |needs_bytes| {
            Some(ServiceView {
                slowdown_max_percent: 30,
                needs_bytes,
                unmet: None,
            })
        };
        // The other's limit bounds what it takes.
        view.vms[0].service = service(Some(70 * MIB));
        let text = refused(&view, &vm, Some("db"));
        assert!(
            text.contains("needs 70 MiB fast") && text.contains("30 MiB are missing"),
            "{text}"
        );
        view.vms[0].service = service(None);
        let text = said(&view, &vm, Some("db")).unwrap();
        assert!(text.contains("not counting db"), "{text}");
        vm.fast.limit_mib = Some(60);
        assert!(refused(&view, &vm, Some("db")).contains("its limit is 60 MiB"));
        vm.fast.limit_mib = None;
        view.policy = Policy::Static;
        assert!(refused(&view, &vm, Some("db")).contains("policy static gives it 50 MiB"));
        assert!(refused(&view, &vm, Some("web")).contains("there is no VM web"));
        view.vms[0].benefit = None;
        assert!(refused(&view, &vm, Some("db")).contains("no estimate"));
        // A VM without a level must leave others theirs.
        view.policy = Policy::Wss;
        view.vms[0].limit = mib(100);
        view.vms[0].service = service(Some(90 * MIB));
        vm.slowdown_max_percent = None;
        let text = refused(&view, &vm, None);
        assert!(
            text.contains("others need") && text.contains("10 MiB are missing"),
            "{text}"
        );
    }
}
