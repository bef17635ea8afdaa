//! Fast memory that moves between VMs while they run.
//!
//! # Approach
//! Once a second the policy divides the pool, as the host controller lets it do. VMs that shall have
//! less give blocks to their balloons, at the cost of demoting what lies there, and the host takes back
//! what backed them. Then others get what is free of the pool.
//!
//! # Properties
//! - VMs never have more than the pool together: the host's fast tier is no larger.
//! - Pages are neither lost nor doubled, in the guests or in the host.

use demeter_outcome::Provisioning;
use demeter_policy::provision::{Claim, Policy, ProvisionerKind, Smoothed, Usage, allocate};
use demeter_policy::{BLOCK_SIZE, ByteCount, MIB, PerTier};
use demeter_scenario::{Provisioner as Mechanism, Scenario, Variant};

use crate::error::SimError;
use crate::program::Program;
use crate::setup::Setup;
use crate::world::World;

/// The least that a policy moves, as the host controller has it.
const STEP_MIN: ByteCount = ByteCount(16 * MIB);

/// Refuses what there is no model of.
pub(crate) fn check(scenario: &Scenario) -> Result<(), SimError> {
    let Some(provision) = &scenario.provision else {
        return Ok(());
    };
    let balloon = Mechanism::Sized(ProvisionerKind::DemeterBalloon);
    let refused = if provision.provisioners != [balloon] {
        "provisioners but demeter-balloon"
    } else if provision.vms.is_empty() {
        "a single VM that is sized from outside (provision without vms)"
    } else if provision.runs_rounds() || provision.resize_cycle.is_some() {
        "crashes, soaks and resize cycles"
    } else if scenario.systems.iter().any(|system| !system.has_agent()) {
        "provisioning for a system without Demeter's agent"
    } else if scenario.sim.translation.is_some() {
        "provisioning of memory that is reserved (sim.translation)"
    } else {
        return Ok(());
    };
    Err(SimError::NoModelOf(refused))
}

/// The scenario for each of its ways to provision memory, with its name in results.
pub(crate) fn variants(scenario: &Scenario) -> Vec<(String, Scenario)> {
    let Some(provision) = &scenario.provision else {
        return vec![];
    };
    let one = |(name, variant): (String, Variant)| {
        let mut one = scenario.clone();
        if let Some(provision) = &mut one.provision {
            provision.provisioners = vec![variant.provisioner];
            provision.policies = vec![variant.policy];
        }
        (name, one)
    };
    provision.variants().into_iter().map(one).collect()
}

/// What divides the pool between the VMs of a world.
#[derive(Debug)]
pub(crate) struct Provisioner {
    policy: Policy,
    /// What all VMs have together.
    pool: PerTier<ByteCount>,
    /// As the policy sees them, in the order of VMs.
    claims: Vec<Claim>,
    working_sets: Vec<Smoothed>,
    /// Moments at which VMs had more than the pool.
    violations: u64,
}

impl Provisioner {
    /// That of a scenario that names one variant, if memory is provisioned there.
    pub(crate) fn new(scenario: &Scenario, setup: &Setup) -> Option<Self> {
        let provision = scenario.provision.as_ref()?;
        let count = provision.vms.len() as u64;
        let [fast, slow] = setup.nodes();
        let all = |bytes: ByteCount| ByteCount(count * bytes.0);
        let pool = PerTier {
            fast: all(fast),
            slow: all(slow),
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
        };
        Some(Self {
            policy: *provision.policies.first()?,
            pool,
            claims: provision.vms.iter().map(|vm| claim(vm.share)).collect(),
            working_sets: vec![Smoothed::default(); provision.vms.len()],
            violations: 0,
        })
    }

    /// Asks the policy, and does what it says as far as the pool allows.
    pub(crate) fn step<P: Program>(&mut self, world: &mut World<P>) {
        if self.policy == Policy::Static {
            return;
        }
        let vms = world.vms.iter().zip(&mut self.working_sets);
        for ((vm, smoothed), claim) in vms.zip(&mut self.claims) {
            let before = claim.usage.and_then(|usage| usage.working_set);
            let seen = vm.manager.working_set();
            claim.usage = Some(Usage {
                used: PerTier {
                    fast: vm.guest.used_fast(),
                    slow: claim.current.slow,
                },
                working_set: seen.map(|bytes| smoothed.update(bytes)).or(before),
                // The model has no tasks that wait for memory.
                pressed: false,
            });
        }
        // Guarantees are no more than what VMs begin with.
        let Ok(grants) = allocate(self.policy, self.pool, &self.claims, STEP_MIN) else {
            return;
        };
        for (claim, grant) in self.claims.iter_mut().zip(grants) {
            claim.current.fast = grant.fast;
        }
        self.shrink(world);
        self.grow(world);
        self.violations += u64::from(owned(world) > self.pool.fast);
    }

    fn shrink<P: Program>(&self, world: &mut World<P>) {
        for (vm, claim) in world.vms.iter_mut().zip(&self.claims) {
            let (_, mut ctx) = vm.manager_on(0, &mut world.host);
            while ctx.guest.owned_fast() > claim.current.fast {
                let Some(block) = ctx.guest.inflate(&mut ctx.actor) else {
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

    /// What the result file says of it.
    pub(crate) fn figures(&self) -> Provisioning {
        Provisioning {
            provisioner: ProvisionerKind::DemeterBalloon.to_string(),
            policy: self.policy.to_string(),
            pool_violations: Some(self.violations),
            ..Provisioning::default()
        }
    }
}

/// Fast memory of all VMs.
fn owned<P>(world: &World<P>) -> ByteCount {
    ByteCount(world.vms.iter().map(|vm| vm.guest.owned_fast().0).sum())
}

#[cfg(test)]
mod tests;
