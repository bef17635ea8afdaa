//! Divides a host's memory of each tier between VMs.
//!
//! # Problem
//! A host has a pool of each tier and several VMs, each with a share, a guarantee and a limit. Divide the pools so that
//! VMs with a larger weight get more, no VM gets less than its guarantee, and memory does not move needlessly.
//!
//! # Terms
//! - *weight*: the proportion in which the policy divides a pool. With [`Policy::Shares`] it is the VM's share; with
//!   [`Policy::Wss`] the working set for fast memory, and the memory in use for slow memory.
//! - *curve*: the time that a VM's programs save with fast memory of each size.
//! - *floor*: the minimum of a VM: its guarantee and, under memory pressure, the part of its memory that it uses. A VM
//!   without a weight keeps all it has (all VMs with [`Policy::Static`], an untracked one with [`Policy::Wss`]). For
//!   other VMs the fast memory at which their service level holds is part of the floor, as far as the pool reaches.
//!
//! # Approach
//! Equation 1 of Lee, Gupta and Schwan: pool × weight ÷ sum of weights, within each VM's floor and limit. `fill` finds
//! the level at which the pool is used up. Weights are smoothed over time ([`Smoothed`]), grants are whole blocks, and
//! nothing changes unless some VM's grant changes by a minimum step.
//!
//! With [`Policy::Benefit`] fast memory goes where the next MiB saves most time (`benefit`). The concave hull of each
//! curve between floor and limit has pieces of falling slope. The steepest piece of all VMs is next. Memory moves to
//! another VM only if it saves a fifth more time there. Memory that saves nothing is divided by shares.
//!
//! # Properties
//! - The grants of a tier never exceed its pool.
//! - Every grant lies between the VM's guarantee and its limit.
//! - A VM under pressure keeps at least the memory that it uses, as long as the present sizes follow the rules.
//! - The same input gives the same grants, whatever the order of the VMs.
//! - A larger weight never gets less, all else being equal.
//! - A VM whose curve is multiplied gets no less, but for a block.
//! - A false curve gets no more than its VM's limit, and takes nothing of others' floors.
//! - VMs with a weight get all memory that limits allow, except for less than a block each.
//! - Changes below the minimum step are not made.

mod benefit;
mod fill;
mod smoothed;

use serde::{Deserialize, Serialize};

use crate::{BLOCK_SIZE, ByteCount, PerTier, Tier, TierBytes};

pub use benefit::{Curve, SmoothedCurve};
pub use smoothed::Smoothed;

use benefit::divide;
use fill::{Bounds, fill};

/// The policy that divides pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
#[derive(strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "lowercase")]
pub enum Policy {
    /// As configured or requested; nothing changes by itself.
    #[default]
    Static,
    /// By configured shares.
    Shares,
    /// By working sets.
    Wss,
    /// Where fast memory saves most time.
    Benefit,
}

/// The mechanism that resizes a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[derive(strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "kebab-case")]
pub enum ProvisionerKind {
    /// The guest's balloon driver, one balloon per node, through Demeter's agent.
    #[default]
    DemeterBalloon,
    /// A virtio-mem device for each node.
    VirtioMem,
    /// virtio-balloon, which does not distinguish tiers.
    VirtioBalloon,
}

/// A VM's input to the allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// Weight under [`Policy::Shares`].
    pub share: u32,
    /// Its minimum.
    pub guarantee: TierBytes,
    /// Its maximum; at least the guarantee.
    pub limit: TierBytes,
    /// Its present target.
    pub current: TierBytes,
    /// Its use of memory; `None` while unknown.
    pub usage: Option<Usage>,
    /// It cannot be resized now (it does not answer, or is left alone) and keeps its memory.
    pub pinned: bool,
    /// Fast memory at which its service level holds; `None` without a level, or while the size is unknown.
    pub service: Option<ByteCount>,
}

/// A VM's use of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Memory in use in each tier: neither free nor in a balloon.
    pub used: TierBytes,
    /// Working set in all tiers, smoothed with [`Smoothed`]; `None` if it is not tracked.
    pub working_set: Option<ByteCount>,
    /// Benefit of fast memory, smoothed with [`SmoothedCurve`]; `None` if it is unknown.
    pub curve: Option<Curve>,
    /// Whether its tasks wait for memory.
    pub pressed: bool,
}

/// A pool that is smaller than the sum of guarantees and of memory that cannot be taken back now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overbooked {
    /// The pool's tier.
    pub tier: Tier,
    /// Its size.
    pub pool: ByteCount,
    /// The sum of guarantees, without pinned VMs.
    pub guaranteed: ByteCount,
    /// All memory of pinned VMs.
    pub pinned: ByteCount,
}

impl std::error::Error for Overbooked {}

impl std::fmt::Display for Overbooked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            tier,
            pool,
            guaranteed,
            pinned,
        } = self;
        write!(
            f,
            "the {tier} pool has {pool}, but {guaranteed} of it is guaranteed"
        )?;
        if pinned.0 > 0 {
            write!(f, ", and VMs that cannot be resized now have {pinned}")?;
        }
        f.write_str(match guaranteed > pool {
            true => "; lower a guarantee",
            false => "; sizes stay until these VMs answer or end",
        })
    }
}

/// Computes each VM's memory, in the order of `claims`.
///
/// Nothing changes if no grant would change by `step_min` or more.
pub fn allocate(
    policy: Policy,
    pools: TierBytes,
    claims: &[Claim],
    step_min: ByteCount,
) -> Result<Vec<TierBytes>, Overbooked> {
    let fast = allocate_tier(policy, Tier::Fast, pools, claims, step_min)?;
    let slow = allocate_tier(policy, Tier::Slow, pools, claims, step_min)?;
    let both = fast.into_iter().zip(slow);
    Ok(both.map(|(fast, slow)| PerTier { fast, slow }).collect())
}

fn allocate_tier(
    policy: Policy,
    tier: Tier,
    pools: TierBytes,
    claims: &[Claim],
    step_min: ByteCount,
) -> Result<Vec<ByteCount>, Overbooked> {
    let pool = pools.get(tier).0;
    let parts: Vec<_> = claims.iter().map(|c| Part::of(policy, tier, c)).collect();
    let least = |pinned: bool| {
        let of = claims.iter().zip(&parts);
        let of = of.filter(move |(claim, _)| claim.pinned == pinned);
        let bytes = sum(of.map(|(_, part)| part.bounds.least));
        ByteCount(u64::try_from(bytes).unwrap_or(u64::MAX))
    };
    let (guaranteed, pinned) = (least(false), least(true));
    if guaranteed.0.saturating_add(pinned.0) > pool {
        return Err(Overbooked {
            tier,
            pool: ByteCount(pool),
            guaranteed,
            pinned,
        });
    }
    let mut bounds: Vec<_> = parts.iter().map(|part| part.bounds).collect();
    raise(pool, &mut bounds, parts.iter().map(|part| part.floor));
    raise(pool, &mut bounds, parts.iter().map(|part| part.service));
    let weights: Vec<_> = parts.iter().map(|part| part.weight).collect();
    let current: Vec<_> = parts.iter().map(|part| part.current).collect();
    let divided = match (policy, tier) {
        (Policy::Benefit, Tier::Fast) => {
            let curves: Vec<_> = claims.iter().map(Claim::curve).collect();
            divide(pool, &curves, &weights, &bounds, &current)
        }
        _ => fill(pool, &weights, &bounds),
    };
    let grants: Vec<_> = divided
        .into_iter()
        .zip(&bounds)
        .map(|(grant, bounds)| bounds.clamp(grant / BLOCK_SIZE * BLOCK_SIZE))
        .collect();
    let allowed = |(&now, bounds): (&u64, &Bounds)| bounds.clamp(now) == now;
    let may_stay =
        current.iter().zip(&bounds).all(allowed) && sum(current.iter().copied()) <= pool.into();
    let steps = current.iter().zip(&grants);
    let step = steps.map(|(now, grant)| now.abs_diff(*grant)).max();
    let stays = may_stay && step.unwrap_or(0) < step_min.0;
    let chosen = if stays { current } else { grants };
    Ok(chosen.into_iter().map(ByteCount).collect())
}

/// Raises minima to floors. If these exceed the pool, they shrink in proportion, down to the present minima.
fn raise(pool: u64, bounds: &mut [Bounds], floors: impl Iterator<Item = u64>) {
    let floors: Vec<_> = floors
        .zip(&*bounds)
        .map(|(floor, bounds)| bounds.clamp(floor))
        .collect();
    let up_to_floors = bounds.iter().zip(&floors);
    let up_to_floors: Vec<_> = up_to_floors
        .map(|(bounds, &most)| Bounds { most, ..*bounds })
        .collect();
    let raised = fill(pool, &floors, &up_to_floors);
    for (bounds, least) in bounds.iter_mut().zip(raised) {
        bounds.least = least;
    }
}

/// A VM's part in the division of one tier.
struct Part {
    bounds: Bounds,
    /// The minimum, if the pool can hold all minima.
    floor: u64,
    /// The size at which its service level holds, likewise, if floors leave it.
    service: u64,
    weight: u64,
    current: u64,
}

impl Part {
    fn of(policy: Policy, tier: Tier, claim: &Claim) -> Self {
        let current = claim.current.get(tier).0;
        let guarantee = claim.guarantee.get(tier).0;
        let bounds = match claim.pinned {
            true => Bounds {
                least: current,
                most: current,
            },
            false => Bounds {
                least: guarantee,
                most: claim.limit.get(tier).0.max(guarantee),
            },
        };
        let Some(weight) = weight(policy, tier, claim) else {
            let keeps = bounds.clamp(current);
            return Self {
                bounds: Bounds {
                    most: keeps,
                    ..bounds
                },
                floor: keeps,
                service: keeps,
                weight: 0,
                current,
            };
        };
        let pressed = claim.usage.filter(|usage| usage.pressed);
        let in_use = pressed.map_or(0, |usage| usage.used.get(tier).0.min(current));
        Self {
            bounds,
            floor: bounds.clamp(in_use),
            service: match (tier, claim.service) {
                (Tier::Fast, Some(service)) => bounds.clamp(service.0),
                _ => bounds.least,
            },
            weight,
            current,
        }
    }
}

impl Claim {
    fn curve(&self) -> Option<Curve> {
        self.usage?.curve
    }
}

/// A VM's weight; `None` if it keeps its memory.
fn weight(policy: Policy, tier: Tier, claim: &Claim) -> Option<u64> {
    match policy {
        Policy::Static => None,
        Policy::Shares => Some(claim.share.into()),
        Policy::Wss => claim.usage.and_then(|usage| match tier {
            Tier::Fast => usage.working_set.map(|bytes| bytes.0),
            Tier::Slow => Some(in_use(&usage)),
        }),
        Policy::Benefit => match tier {
            Tier::Fast => claim.curve().map(|_| claim.share.into()),
            Tier::Slow => claim.usage.map(|usage| in_use(&usage)),
        },
    }
}

/// Memory in use in both tiers.
fn in_use(usage: &Usage) -> u64 {
    usage.used.fast.0.saturating_add(usage.used.slow.0)
}

fn sum(bytes: impl Iterator<Item = u64>) -> u128 {
    bytes.map(u128::from).sum()
}

#[cfg(test)]
mod tests;
