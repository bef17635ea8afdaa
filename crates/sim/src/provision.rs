//! Provisioning: resizing the fast memory of VMs while they run.
//!
//! # Approach
//! Once a second, the policy divides the pool as in the host controller, or one VM's fast memory is changed as the
//! scenario says. VMs that shrink demote pages and give the freed blocks to the host, which frees the backing memory.
//! Other VMs then receive free memory of the pool.
//!
//! Demeter's balloon demotes pages that were not accessed recently. The driver of virtio-mem empties blocks in address
//! order, hot or not. The standard balloon ignores tiers. Before the program starts it takes the fast node, where the
//! kernel allocates first. Later it returns slow memory.
//!
//! # Properties
//! - VMs never own more than the pool: the host's fast tier is no larger.
//! - No page is lost or duplicated, in the guests or in the host.

use demeter_outcome::{Provisioning, Resize};
use demeter_policy::provision::{
    Claim, Curve, Policy, ProvisionerKind, Smoothed, SmoothedCurve, Usage, allocate,
};
use demeter_policy::{BLOCK_SIZE, ByteCount, MIB, PerTier};
use demeter_scenario::{Provisioner as Mechanism, ResizeCycle, RivalPolicy, Scenario, Variant};

mod memstrata;

use crate::machine::cost::PS_PER_S;
use crate::program::Program;
use crate::setup::WorldSetup;
use crate::world::World;
use memstrata::{Lost, Memstrata};

/// Smallest change by a policy, as in the host controller.
const STEP_MIN: ByteCount = ByteCount(16 * MIB);

/// The scenario for each of its provisioning variants, with their names in results.
pub(crate) fn variants(scenario: &Scenario) -> Vec<(String, Scenario)> {
    let Some(provision) = &scenario.provision else {
        return vec![];
    };
    let one = |(name, variant): (String, Variant)| {
        let mut one = scenario.clone();
        if let Some(provision) = &mut one.provision {
            provision.provisioners = vec![variant.provisioner];
            let policy = variant.rival.is_none().then_some(variant.policy);
            provision.policies = policy.into_iter().collect();
            provision.rivals = variant.rival.into_iter().collect();
            provision.through = vec![variant.through];
        }
        (name, one)
    };
    provision.variants().into_iter().map(one).collect()
}

/// The provisioner, which resizes the VMs of a world.
#[derive(Debug)]
pub(crate) struct Provisioner {
    mechanism: Mechanism,
    policy: Policy,
    memstrata: Option<Memstrata>,
    cycle: Option<ResizeCycle>,
    duration_s: u64,
    /// Memory of all VMs together.
    pool: PerTier<ByteCount>,
    /// The policy's view of the VMs, in order.
    claims: Vec<Claim>,
    working_sets: Vec<Smoothed>,
    curves: Vec<SmoothedCurve>,
    resizes: Vec<Resize>,
    /// Number of times that VMs owned more than the pool.
    violations: u64,
}

impl Provisioner {
    /// The provisioner of a scenario with a single variant; none if memory is not provisioned.
    pub(crate) fn new(scenario: &Scenario, setup: &WorldSetup) -> Option<Self> {
        let provision = scenario.provision.as_ref()?;
        let mechanism = *provision.provisioners.first()?;
        if mechanism == Mechanism::Static && !provision.vms.is_empty() {
            return None;
        }
        let count = provision.vms.len().max(1);
        let [fast, slow] = setup.sizes_of_tiers();
        let all = |bytes: ByteCount| ByteCount(count as u64 * bytes.0);
        let pool = PerTier {
            fast: all(setup.sizes.host[0]),
            slow: all(setup.sizes.host[1]),
        };
        let kernels = fast.0 - setup.usable[0].0.min(fast.0);
        let guarantee = kernels + provision.fast_guarantee_mib * MIB;
        let guarantee = guarantee.next_multiple_of(BLOCK_SIZE).min(fast.0);
        let claim = |share| Claim {
            share,
            guarantee: PerTier {
                fast: ByteCount(guarantee),
                slow,
            },
            limit: PerTier {
                fast: pool.fast,
                slow,
            },
            current: PerTier { fast, slow },
            usage: None,
            pinned: false,
            service: None,
        };
        let shares = provision.vms.iter().map(|vm| vm.share);
        let shares: Vec<u32> = shares.chain([1]).take(count).collect();
        Some(Self {
            mechanism,
            // A published policy has the field of its own.
            policy: provision.policies.first().copied().unwrap_or_default(),
            memstrata: provision
                .rivals
                .first()
                .map(|RivalPolicy::Memstrata| Memstrata::new(&scenario.machine, count)),
            cycle: provision.resize_cycle,
            duration_s: scenario.duration_s,
            pool,
            claims: shares.into_iter().map(claim).collect(),
            working_sets: vec![Smoothed::default(); count],
            curves: vec![SmoothedCurve::default(); count],
            resizes: vec![],
            violations: 0,
        })
    }

    /// Resizes the VMs in this second of the timed phase.
    pub(crate) fn step<P: Program>(&mut self, second: u64, world: &mut World<P>) {
        let knows_tiers = !matches!(
            self.mechanism,
            Mechanism::Static | Mechanism::Sized(ProvisionerKind::VirtioBalloon)
        );
        if let Some(cycle) = self.cycle {
            if knows_tiers {
                self.resize(second, cycle, world);
            }
        } else if let Some(mut memstrata) = self.memstrata.take() {
            let lost: Vec<_> = world
                .vms
                .iter()
                .map(|vm| Lost::of(&vm.hardware.vcpus))
                .collect();
            if let Some(sizes) = memstrata.divide(second, &lost, &self.claims) {
                for (claim, fast) in self.claims.iter_mut().zip(sizes) {
                    claim.current.fast = fast;
                }
                self.carry_out(world);
            }
            self.memstrata = Some(memstrata);
        } else if self.policy != Policy::Static {
            self.divide(world);
        }
    }

    /// Resizes a single VM, if that is due.
    fn resize<P: Program>(&mut self, second: u64, cycle: ResizeCycle, world: &mut World<P>) {
        let Some(since_s) = second.checked_sub(cycle.from_s) else {
            return;
        };
        let (turn, rest) = (since_s / cycle.every_s, since_s % cycle.every_s);
        // Memory must end at its initial size. The last growth therefore needs time to shrink back, and only a grown VM
        // shrinks.
        let grows_at = second - turn % 2 * cycle.every_s;
        let is_due = rest == 0 && grows_at + cycle.every_s < self.duration_s;
        let Some(claim) = self.claims.first_mut().filter(|_| is_due) else {
            return;
        };
        let more = cycle.fast_mib * MIB;
        let fast = match turn % 2 {
            0 => claim.current.fast.0 + more,
            _ => claim.current.fast.0 - more,
        };
        claim.current.fast = ByteCount(fast);
        let before_ps = world.vms[0].hardware.vcpus[0].clock_ps;
        self.shrink(world);
        self.grow(world);
        let took_ps = world.vms[0].hardware.vcpus[0].clock_ps - before_ps;
        let owned = owned(world).0;
        self.resizes.push(Resize {
            t_s: second as f64,
            fast_bytes: fast,
            took_s: (owned.abs_diff(fast) < BLOCK_SIZE).then_some(took_ps as f64 / PS_PER_S as f64),
            reason: None,
        });
        self.violations += u64::from(owned > self.pool.fast.0);
    }

    /// Applies the policy's decision as far as the pool allows.
    fn divide<P: Program>(&mut self, world: &mut World<P>) {
        let vms = world.vms.iter().zip(&mut self.working_sets);
        let vms = vms.zip(&mut self.curves).zip(&mut self.claims);
        for (((vm, smoothed), curve), claim) in vms {
            let before = claim.usage.and_then(|usage| usage.working_set);
            let curve_before = claim.usage.and_then(|usage| usage.curve);
            let seen = vm.manager.working_set();
            let benefit = vm.benefit();
            claim.usage = Some(Usage {
                used: PerTier {
                    fast: vm.guest.used_fast(),
                    slow: claim.current.slow,
                },
                working_set: seen.map(|bytes| smoothed.update(bytes)).or(before),
                curve: benefit
                    .map(|benefit| curve.update(Curve::new(&benefit)))
                    .or(curve_before),
                // The model has no tasks that wait for memory.
                pressed: false,
            });
        }
        // Guarantees never exceed the initial sizes.
        let Ok(grants) = allocate(self.policy, self.pool, &self.claims, STEP_MIN) else {
            return;
        };
        for (claim, grant) in self.claims.iter_mut().zip(grants) {
            claim.current.fast = grant.fast;
        }
        self.carry_out(world);
    }

    /// Gives each VM its size.
    fn carry_out<P: Program>(&mut self, world: &mut World<P>) {
        self.shrink(world);
        self.grow(world);
        self.violations += u64::from(owned(world) > self.pool.fast);
    }

    fn shrink<P: Program>(&self, world: &mut World<P>) {
        let spares_hot = self.mechanism == Mechanism::Sized(ProvisionerKind::DemeterBalloon);
        for (vm, claim) in world.vms.iter_mut().zip(&self.claims) {
            let (_, mut ctx) = vm.manager_on(0, &mut world.host);
            while ctx.guest.owned_fast() > claim.current.fast {
                let Some(block) = ctx.guest.inflate(spares_hot, &mut ctx.actor) else {
                    break;
                };
                ctx.hypervisor.release_block(ctx.backing, block);
                ctx.actor.invept(1);
            }
        }
    }

    fn grow<P: Program>(&self, world: &mut World<P>) {
        let mut free = self.pool.fast.0.saturating_sub(owned(world).0);
        for (vm, claim) in world.vms.iter_mut().zip(&self.claims) {
            while free >= BLOCK_SIZE
                && vm.guest.owned_fast() < claim.current.fast
                && vm.guest.deflate()
            {
                free -= BLOCK_SIZE;
            }
        }
    }

    /// Figures for the result file.
    pub(crate) fn figures(&self) -> Provisioning {
        Provisioning {
            provisioner: self.mechanism.to_string(),
            policy: match self.memstrata {
                Some(_) => RivalPolicy::Memstrata.to_string(),
                None => self.policy.to_string(),
            },
            resizes: self.resizes.clone(),
            pool_violations: Some(self.violations),
            ..Provisioning::default()
        }
    }
}

/// Total fast memory of all VMs.
fn owned<P>(world: &World<P>) -> ByteCount {
    ByteCount(world.vms.iter().map(|vm| vm.guest.owned_fast().0).sum())
}

#[cfg(test)]
mod tests;
