use proptest::collection::vec;
use proptest::prelude::*;

use strum::VariantNames;

use super::*;
use crate::MIB;
use crate::benefit::{Benefit, BenefitPoint, LATENCY_MAX_NS, POINTS_MAX, RUNNING_MAX_MS, Waits};

const STEP: ByteCount = ByteCount(16 * MIB);

fn bytes(mib: u64) -> ByteCount {
    ByteCount(mib * MIB)
}

fn both(fast: u64, slow: u64) -> TierBytes {
    TierBytes {
        fast: bytes(fast),
        slow: bytes(slow),
    }
}

/// A VM with a limit of 1 GiB in each tier and a quarter of it now, without usage.
fn claim(share: u32) -> Claim {
    Claim {
        share,
        guarantee: both(0, 0),
        limit: both(1024, 1024),
        current: both(256, 256),
        usage: None,
        pinned: false,
        service: None,
    }
}

fn working(mut claim: Claim, working_set: u64, pressed: bool) -> Claim {
    claim.usage = Some(Usage {
        used: claim.current,
        working_set: Some(bytes(working_set)),
        curve: None,
        pressed,
    });
    claim
}

fn fast(policy: Policy, pool: u64, claims: &[Claim]) -> Vec<u64> {
    let grants = allocate(policy, both(pool, 4096), claims, STEP).unwrap();
    grants.iter().map(|grant| grant.fast.0 / MIB).collect()
}

#[test]
fn shares_divide_the_pool_as_equation_1_says() {
    let claims = [claim(1), claim(2), claim(5)];
    assert_eq!(fast(Policy::Shares, 800, &claims), [100, 200, 500]);
}

#[test]
fn working_sets_are_shares() {
    let claims = [(30, 1), (10, 7), (60, 2)];
    let claims = claims.map(|(ws, share)| working(claim(share), ws, false));
    assert_eq!(fast(Policy::Wss, 1000, &claims), [300, 100, 600]);
}

#[test]
fn a_vm_whose_accesses_nobody_tracks_keeps_what_it_has() {
    let untracked = Claim {
        usage: None,
        ..claim(1)
    };
    let claims = [
        working(claim(1), 30, false),
        untracked,
        working(claim(1), 10, false),
    ];
    assert_eq!(fast(Policy::Wss, 456, &claims), [150, 256, 50]);
}

#[test]
fn static_leaves_what_was_wished() {
    let mut claims = [claim(1), claim(9)];
    claims[1].current = both(77, 1);
    assert_eq!(fast(Policy::Static, 800, &claims), [256, 77]);
}

#[test]
fn what_a_limit_leaves_over_goes_to_the_others() {
    let mut claims = [claim(6), claim(1), claim(1)];
    claims[0].limit = both(400, 1024);
    assert_eq!(fast(Policy::Shares, 800, &claims), [400, 200, 200]);
}

#[test]
fn a_pressed_vm_keeps_what_it_uses() {
    let claims = [working(claim(1), 10, true), working(claim(1), 990, false)];
    assert_eq!(fast(Policy::Wss, 600, &claims), [256, 344]);
    assert_eq!(fast(Policy::Shares, 600, &claims), [300, 300]);
}

#[test]
fn small_changes_move_nothing() {
    let mut claims = [claim(100), claim(100)];
    assert_eq!(fast(Policy::Shares, 520, &claims), [256, 256]);
    claims[0].share = 120;
    assert_eq!(fast(Policy::Shares, 520, &claims), [282, 236]);
}

#[test]
fn guarantees_beyond_the_pool_are_refused() {
    let mut claims = [claim(1), claim(1)];
    claims[0].guarantee = both(300, 0);
    claims[1].pinned = true;
    let refused = |claims: &[Claim]| {
        let refused = allocate(Policy::Shares, both(500, 4096), claims, STEP);
        refused.unwrap_err().to_string()
    };
    assert_eq!(
        refused(&claims),
        "the fast pool has 500 MiB, but 300 MiB of it is guaranteed, and VMs that cannot be resized now \
         have 256 MiB; sizes stay until these VMs answer or end"
    );
    claims[0].guarantee = both(501, 0);
    assert_eq!(
        refused(&claims[..1]),
        "the fast pool has 500 MiB, but 501 MiB of it is guaranteed; lower a guarantee"
    );
}

fn tier_bytes(mib_max: u64) -> impl Strategy<Value = TierBytes> {
    let bytes = move || (0..=mib_max * MIB).prop_map(ByteCount);
    (bytes(), bytes()).prop_map(|(fast, slow)| TierBytes { fast, slow })
}

/// A benefit of any shape, concave or not.
fn benefit() -> impl Strategy<Value = Benefit> {
    let points = vec((1u64..400, 0u16..=1000), 1..=POINTS_MAX);
    (points, 1u32..1000, 0u32..1000, 0u32..64_000, 0u16..=1000).prop_map(
        |(steps, fast, more, running_ms, waits)| {
            let steps = steps.iter().map(|&(mib, served)| (bytes(mib), served));
            Benefit::of_steps(steps.collect(), (fast, more), running_ms, (0, waits))
        },
    )
}

fn curve() -> impl Strategy<Value = Curve> {
    benefit().prop_map(|benefit| Curve::new(&benefit))
}

/// A VM whose programs run all the time and save `percent` of it with `mib` of fast memory, and half with half.
fn saving(mut claim: Claim, mib: u64, percent: u16) -> Claim {
    let point = |mib, served_permille| BenefitPoint {
        fast: bytes(mib),
        served_permille,
    };
    let points = vec![point(0, 0), point(mib, 1000)];
    let waits = Waits {
        min_permille: 0,
        max_permille: percent * 10,
    };
    let benefit = Benefit::new(
        points,
        PerTier {
            fast: 100,
            slow: 200,
        },
        1000,
        waits,
    )
    .unwrap();
    claim.usage = Some(Usage {
        used: claim.current,
        working_set: None,
        curve: Some(Curve::new(&benefit)),
        pressed: false,
    });
    claim
}

#[test]
fn fast_memory_goes_where_the_next_mib_saves_most() {
    let (small, large) = (saving(claim(1), 100, 30), saving(claim(1), 600, 60));
    // 0.3 % a MiB, then 0.1 % a MiB.
    assert_eq!(fast(Policy::Benefit, 400, &[large, small]), [300, 100]);
    // Nothing of the rest saves time, and it is divided by shares.
    let twice = Claim { share: 2, ..small };
    assert_eq!(fast(Policy::Benefit, 300, &[twice, small]), [200, 100]);
    // Equal curves are served alike.
    assert_eq!(fast(Policy::Benefit, 100, &[small, small]), [50, 50]);
    // Without a curve it keeps what it has.
    assert_eq!(fast(Policy::Benefit, 400, &[large, claim(1)]), [144, 256]);
}

#[test]
fn a_second_of_a_slow_program_counts_by_its_work() {
    // Both save 0.5 % of the time with fast memory alone for each MiB. Without any the first one runs at half of its speed, and the
    // second one at two thirds.
    let (slower, faster) = (saving(claim(1), 200, 100), saving(claim(1), 100, 50));
    assert_eq!(fast(Policy::Benefit, 100, &[slower, faster]), [0, 100]);
}

#[test]
fn a_jump_behind_a_flat_part_is_worth_its_mean() {
    let points = [(0, 0), (100, 0), (200, 1000)];
    let points = points.map(|(mib, served_permille)| BenefitPoint {
        fast: bytes(mib),
        served_permille,
    });
    let waits = Waits {
        min_permille: 0,
        max_permille: 500,
    };
    let latency_ns = PerTier {
        fast: 100,
        slow: 200,
    };
    let jump = Benefit::new(points.into(), latency_ns, 1000, waits).unwrap();
    let mut jumping = saving(claim(1), 1, 0);
    jumping.usage.as_mut().unwrap().curve = Some(Curve::new(&jump));
    // 0.25 % a MiB over 200 MiB, against 0.2 % and 0.3 %.
    let (less, more) = (saving(claim(1), 100, 20), saving(claim(1), 100, 30));
    assert_eq!(fast(Policy::Benefit, 200, &[jumping, less]), [200, 0]);
    assert_eq!(fast(Policy::Benefit, 300, &[jumping, more]), [200, 100]);
}

#[test]
fn a_service_level_raises_the_floor_as_far_as_the_pool_reaches() {
    let level = |mib, of: Claim| Claim {
        service: Some(bytes(mib)),
        ..of
    };
    let (dear, cheap) = (saving(claim(1), 100, 50), saving(claim(1), 100, 1));
    assert_eq!(
        fast(Policy::Benefit, 100, &[dear, level(80, cheap)]),
        [20, 80]
    );
    let both = [level(400, dear), level(200, dear)];
    assert_eq!(fast(Policy::Benefit, 300, &both), [200, 100]);
    assert_eq!(
        fast(Policy::Shares, 100, &[dear, level(80, cheap)]),
        [20, 80]
    );
    let wss = [
        working(claim(1), 100, false),
        level(80, working(claim(1), 0, false)),
    ];
    assert_eq!(fast(Policy::Wss, 100, &wss), [20, 80]);
}

/// Claims whose present state follows all rules, and pools that hold it.
fn host() -> impl Strategy<Value = (TierBytes, Vec<Claim>)> {
    let working_set = prop::option::of((0..4000 * MIB).prop_map(ByteCount));
    let usage = (
        tier_bytes(3000),
        working_set,
        prop::option::of(curve()),
        any::<bool>(),
    );
    let usage = prop::option::of(usage);
    let claim = (
        0u32..50,
        vec(tier_bytes(2000), 3),
        usage,
        prop::bool::weighted(0.1),
        prop::option::of((0..4000 * MIB).prop_map(ByteCount)),
    );
    let claim = claim.prop_map(|(share, amounts, usage, pinned, service)| {
        let sorted = |tier: Tier| {
            let mut three: Vec<_> = amounts.iter().map(|a| *a.get(tier)).collect();
            three.sort();
            three
        };
        let (fast, slow) = (sorted(Tier::Fast), sorted(Tier::Slow));
        let nth = |i: usize| TierBytes {
            fast: fast[i],
            slow: slow[i],
        };
        Claim {
            share,
            guarantee: nth(0),
            current: nth(1),
            limit: nth(2),
            usage: usage.map(|(used, working_set, curve, pressed)| Usage {
                used,
                working_set,
                curve,
                pressed,
            }),
            pinned,
            service,
        }
    });
    (vec(claim, 0..8), tier_bytes(4000)).prop_map(|(claims, spare)| {
        let pools = PerTier::from_fn(|tier| {
            let sum: u64 = claims.iter().map(|c| c.current.get(tier).0).sum();
            ByteCount(sum + spare.get(tier).0)
        });
        (pools, claims)
    })
}

fn policy() -> impl Strategy<Value = Policy> {
    prop::sample::select(Policy::VARIANTS).prop_map(|name| name.parse().unwrap())
}

fn total(grants: &[TierBytes], tier: Tier) -> u64 {
    grants.iter().map(|grant| grant.get(tier).0).sum()
}

proptest! {
    #[test]
    fn grants_keep_to_pool_guarantee_and_limit((pools, claims) in host(), policy in policy(), shrink in 0u64..=100) {
        // Even if the present sizes exceed the pool.
        let pools = PerTier::from_fn(|tier| {
            let bound: u64 = claims.iter()
                .map(|c| if c.pinned { c.current } else { c.guarantee }.get(tier).0).sum();
            ByteCount(bound + (pools.get(tier).0 - bound) / 100 * shrink)
        });
        let grants = allocate(policy, pools, &claims, STEP).unwrap();
        for tier in Tier::ALL {
            prop_assert!(total(&grants, tier) <= pools.get(tier).0);
            for (claim, grant) in claims.iter().zip(&grants) {
                let grant = grant.get(tier);
                prop_assert!(claim.guarantee.get(tier) <= grant && grant <= claim.limit.get(tier));
                prop_assert!(!claim.pinned || grant == claim.current.get(tier));
            }
        }
    }

    #[test]
    fn a_vm_under_pressure_keeps_what_it_uses((pools, claims) in host(), policy in policy()) {
        let grants = allocate(policy, pools, &claims, STEP).unwrap();
        for (claim, grant) in claims.iter().zip(&grants) {
            if let Some(usage) = claim.usage.filter(|usage| usage.pressed) {
                for tier in Tier::ALL {
                    let keeps = usage.used.get(tier).min(claim.current.get(tier));
                    prop_assert!(grant.get(tier) >= keeps);
                }
            }
        }
    }

    #[test]
    fn the_order_of_vms_makes_no_difference((pools, claims) in host(), policy in policy(), turn in any::<prop::sample::Index>()) {
        prop_assume!(!claims.is_empty());
        let turn = turn.index(claims.len());
        let mut grants = allocate(policy, pools, &claims, STEP).unwrap();
        let mut turned = claims.clone();
        turned.rotate_left(turn);
        turned.reverse();
        grants.rotate_left(turn);
        grants.reverse();
        prop_assert_eq!(allocate(policy, pools, &turned, STEP).unwrap(), grants);
    }

    #[test]
    fn a_larger_weight_gets_no_less((pools, mut claims) in host(), more in 1u32..1000) {
        prop_assume!(!claims.is_empty());
        let no_step = ByteCount(0);
        let before = allocate(Policy::Shares, pools, &claims, no_step).unwrap();
        claims[0].share += more;
        let after = allocate(Policy::Shares, pools, &claims, no_step).unwrap();
        for tier in Tier::ALL {
            prop_assert!(after[0].get(tier) >= before[0].get(tier));
            for (after, before) in after.iter().zip(&before).skip(1) {
                prop_assert!(after.get(tier) <= before.get(tier));
            }
        }
    }

    #[test]
    fn a_multiplied_curve_gets_no_less(
        (pools, mut claims) in host(),
        benefits in vec(benefit(), 8),
        times in 1u32..100,
    ) {
        prop_assume!(!claims.is_empty());
        for (claim, benefit) in claims.iter_mut().zip(&benefits) {
            claim.usage = saving(*claim, 1, 0).usage;
            claim.usage.as_mut().unwrap().curve = Some(Curve::new(benefit));
        }
        let before = allocate(Policy::Benefit, pools, &claims, ByteCount(0)).unwrap();
        let one = &benefits[0];
        let running_ms = one.running_ms() * times;
        let more = Benefit::new(one.points().to_vec(), one.latency_ns(), running_ms, one.waits());
        claims[0].usage.as_mut().unwrap().curve = Some(Curve::new(&more.unwrap()));
        let after = allocate(Policy::Benefit, pools, &claims, ByteCount(0)).unwrap();
        // Curves have whole microseconds, so a slope changes a little when it is multiplied.
        prop_assert!(after[0].fast.0 + BLOCK_SIZE >= before[0].fast.0, "{before:?} {after:?}");
    }

    #[test]
    fn a_false_curve_takes_nothing_of_floors((pools, mut claims) in host(), lie in benefit()) {
        prop_assume!(!claims.is_empty());
        let lie = Benefit::new(
            lie.points().to_vec(),
            PerTier { fast: 1, slow: LATENCY_MAX_NS },
            RUNNING_MAX_MS,
            Waits { min_permille: 1000, max_permille: 1000 },
        );
        claims[0].usage = saving(claims[0], 1, 0).usage;
        claims[0].usage.as_mut().unwrap().curve = Some(Curve::new(&lie.unwrap()));
        claims[0].service = Some(ByteCount(u64::MAX));
        let grants = allocate(Policy::Benefit, pools, &claims, STEP).unwrap();
        prop_assert!(grants[0].fast <= claims[0].limit.fast.max(claims[0].current.fast));
        for (claim, grant) in claims.iter().zip(&grants).skip(1) {
            prop_assert!(grant.fast >= claim.guarantee.fast);
            let pressed = claim.usage.filter(|usage| usage.pressed);
            let keeps = pressed.map(|usage| usage.used.fast.min(claim.current.fast));
            prop_assert!(grant.fast >= keeps.unwrap_or_default());
        }
    }

    #[test]
    fn a_mean_of_curves_lies_between_them_and_comes_to_rest(first in benefit(), then in benefit()) {
        let (first, then) = (Curve::new(&first), Curve::new(&then));
        let mut mean = SmoothedCurve::default();
        prop_assert_eq!(mean.update(first), first);
        let between = mean.update(then);
        for bytes in then.sizes() {
            let (old, new) = (first.saved_us(bytes), then.saved_us(bytes));
            let mean = between.saved_us(bytes);
            prop_assert!((old.min(new)..=old.max(new)).contains(&mean), "{old} {new} {mean}");
        }
        let rest = (0..200).map(|_| mean.update(then)).last().unwrap();
        for mib in (0..6400).step_by(100) {
            prop_assert!(rest.saved_us(mib * MIB).abs_diff(then.saved_us(mib * MIB)) < PARTS_BYTES);
        }
    }

    #[test]
    fn what_no_limit_forbids_is_given_out((pools, claims) in host()) {
        let grants = allocate(Policy::Shares, pools, &claims, ByteCount(0)).unwrap();
        for tier in Tier::ALL {
            let left = pools.get(tier).0 - total(&grants, tier);
            let hungry = claims.iter().zip(&grants).any(|(claim, grant)| {
                claim.share > 0 && !claim.pinned
                    && grant.get(tier).0 + BLOCK_SIZE <= claim.limit.get(tier).0
            });
            prop_assert!(!hungry || left < (BLOCK_SIZE + 1) * claims.len() as u64, "{left}");
        }
    }

    #[test]
    fn what_was_allocated_stays((pools, mut claims) in host(), policy in policy()) {
        let grants = allocate(policy, pools, &claims, STEP).unwrap();
        for (claim, grant) in claims.iter_mut().zip(&grants) {
            claim.current = *grant;
            // Usage must be known: without it the weight is the present memory, which has just changed.
            let usage = claim.usage.get_or_insert(Usage {
                used: *grant,
                working_set: None,
                curve: None,
                pressed: false,
            });
            usage.working_set.get_or_insert(grant.fast);
            usage.curve.get_or_insert_default();
        }
        let first = allocate(policy, pools, &claims, STEP).unwrap();
        for (claim, grant) in claims.iter_mut().zip(&first) {
            claim.current = *grant;
        }
        prop_assert_eq!(allocate(policy, pools, &claims, STEP).unwrap(), first);
    }

    #[test]
    fn a_mean_lies_within_what_was_measured_and_comes_to_rest(
        measured in vec(any::<u64>(), 1..20),
    ) {
        let mut mean = Smoothed::default();
        let means: Vec<_> = measured.iter().map(|&m| mean.update(ByteCount(m)).0).collect();
        let (least, greatest) = (measured.iter().min(), measured.iter().max());
        prop_assert!(means.iter().all(|m| Some(m) >= least && Some(m) <= greatest));
        let last = measured[measured.len() - 1];
        let rest = (0..200).map(|_| mean.update(ByteCount(last)).0).last();
        prop_assert!(rest.unwrap().abs_diff(last) < PARTS_BYTES);
    }
}

/// Distance within which a mean converges to a constant.
const PARTS_BYTES: u64 = 4;
