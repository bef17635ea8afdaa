//! DAMON's self-tuned tiering, as the kernel's sample module `mtier` sets it up (`samples/damon/mtier.c`, Linux 6.16).
//!
//! # Problem
//! An administrator has to tell [`super::Damon`] how often to look, what is hot, and how much to move. The right figures
//! differ from machine to machine.
//!
//! # Approach
//! A kdamond for each node, with one scheme each. Any access makes a region hot, none makes it cold. Quotas follow from
//! goals: demotion keeps 0.5 % of the fast node free, promotion wants 99.7 % of it used. Once a second each scheme's quota
//! grows by the share by which its goal is missed, or shrinks by it ([`next_input`]; the default tuner, `consist`).
//! No quota exceeds 200 MiB a second. The intervals tune themselves likewise: as often as makes 4 % of all looks find an
//! access, a look each 5 ms to 10 s.
//!
//! All figures are the module's own. Three choices are the model's:
//! - The schemes have been on since boot, while the fast node was empty. Promotion's quota has grown beyond its bound by
//!   then, and demotion's is the least. The module on a full node would begin to promote after an hour.
//! - A node's goals count memory above the watermark that allocations leave. The authors' node has 250 GiB and leaves 0.1 % of
//!   it, the model's leaves 2 %, so that the goals as they are would never demote.
//! - One scheme acts at the first look after its second is over. The kernel counts in intervals, too.
//!
//! # Properties
//! - A quota that has met its goal does not change; else it moves to where its goal is met.
//! - The interval stays within its bounds.

use demeter_policy::{ByteCount, GuestPhysAddr, MIB, Tier};

use super::damon::{Action, LOOKS, Pattern, Quota, Scheme};
use super::{Context, Managed, Manager, NEVER_PS};
use crate::damon::Region;
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::cost::PS_PER_MS;

/// The fewest and the most regions of a node.
const REGIONS: (u64, u64) = (10, 1000);

/// The least and the most time between two looks, milliseconds. It is the least at first.
const SAMPLE_MS: (u64, u64) = (5, 10_000);

/// Share of looks that should find an access, ten-thousandths, and aggregations between two adjustments.
const ACCESSED: u64 = 400;
const AGGREGATIONS: u32 = 3;

/// Bytes that a scheme acts on in a second at the most.
const RATE: u64 = 200 * MIB;

/// Time between two turns of a scheme.
const ACT_PS: u64 = 1000 * PS_PER_MS;

/// Shares of the fast node, ten-thousandths: used, for promotion, and free, for demotion.
const USED: u64 = 9970;
const FREE: u64 = 50;

/// Any access is hot, none is cold.
const PATTERN: Pattern = Pattern {
    hot_accesses_min: 1,
    cold_accesses_max: 0,
    cold_ms: 0,
};

/// The score of a goal that is met, and the least that a tuner gives: a byte.
const MET: u64 = 10_000;
const INPUT_MIN: u64 = 10_000;

/// A tuner's next input, in ten-thousandths, by the score that its last one has led to (`damon_feed_loop_next_input`). It grows by
/// the share by which the goal is missed, or shrinks by the share by which the goal is exceeded.
fn next_input(last: u64, score: u64) -> u64 {
    if score >= 2 * MET {
        return INPUT_MIN;
    }
    let change = u128::from(last) * u128::from(score.abs_diff(MET)) / u128::from(MET);
    let change = u64::try_from(change).unwrap_or(u64::MAX);
    match score > MET {
        true => last.saturating_sub(change).max(INPUT_MIN),
        false => last.saturating_add(change),
    }
}

/// Both kdamonds.
#[derive(Debug)]
pub(crate) struct DamonAuto {
    /// The slow node's and the fast node's.
    tuned: [Tuned; 2],
}

impl DamonAuto {
    /// As the module sets it up.
    pub(crate) fn new(_managed: &Managed<'_>) -> Self {
        Self {
            tuned: [Action::MigrateHot, Action::MigrateCold].map(Tuned::new),
        }
    }
}

impl Manager for DamonAuto {
    fn start(&mut self, _guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        now_ps
    }

    fn memory_overhead(&self, _guest: &Guest) -> ByteCount {
        let kdamonds = self.tuned.iter().filter_map(|t| t.scheme.kdamond.as_ref());
        ByteCount(kdamonds.map(|k| size_of_val(k.regions()) as u64).sum())
    }

    /// The turn of the kdamond that has waited longest.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let Context { guest, actor, .. } = ctx;
        if let Some(tuned) = self.tuned.iter_mut().min_by_key(|t| t.scheme.due_ps())
            && tuned.scheme.due_ps() <= actor.now_ps()
        {
            tuned.turn(guest, actor);
        }
        let due = self.tuned.iter().map(|t| t.scheme.due_ps());
        due.min().unwrap_or(NEVER_PS)
    }
}

/// A scheme and its tuners.
#[derive(Debug)]
struct Tuned {
    scheme: Scheme,
    /// The last input of the quota's tuner: ten-thousandths of a byte.
    input: u64,
    /// When the scheme acts next.
    act_due_ps: u64,
    /// Aggregations since the intervals were adjusted.
    aggregations: u32,
}

impl Tuned {
    fn new(action: Action) -> Self {
        Self {
            scheme: Scheme {
                action,
                pattern: PATTERN,
                regions: REGIONS,
                sample_ps: SAMPLE_MS.0 * PS_PER_MS,
                quota: Quota::new(RATE),
                kdamond: None,
            },
            input: match action {
                Action::MigrateHot => u64::MAX,
                Action::MigrateCold => INPUT_MIN,
            },
            act_due_ps: 0,
            aggregations: 0,
        }
    }

    fn turn(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        let Some(mut kdamond) = self.scheme.kdamond.take() else {
            self.scheme.kdamond = Some(self.scheme.begin(guest, actor));
            self.act_due_ps = actor.now_ps() + ACT_PS;
            return;
        };
        let is_end = kdamond.look(guest, actor);
        if actor.now_ps() >= self.act_due_ps {
            self.act_due_ps = actor.now_ps() + ACT_PS;
            self.input = next_input(self.input, self.score(guest));
            self.scheme.quota.bytes = (self.input / MET).min(RATE);
            let recent = kdamond.recent_accesses();
            let regions = std::mem::take(kdamond.regions_mut());
            *kdamond.regions_mut() = self.scheme.apply(regions, recent, guest, actor);
        }
        self.aggregations += u32::from(is_end);
        if self.aggregations == AGGREGATIONS {
            self.aggregations = 0;
            self.scheme.sample_ps = next_sample_ps(self.scheme.sample_ps, kdamond.regions());
            kdamond.set_sample_ps(self.scheme.sample_ps);
        }
        kdamond.go_on(guest, actor);
        self.scheme.kdamond = Some(kdamond);
    }

    /// How far the scheme's goal is met, ten-thousandths.
    fn score(&self, guest: &Guest) -> u64 {
        let all = u64::from(guest.frames_of(Tier::Fast)) << guest.page_bits();
        let free = guest.usable(Tier::Fast).0 * 10_000 / all.max(1);
        match self.scheme.action {
            Action::MigrateHot => (10_000 - free.min(10_000)) * MET / USED,
            Action::MigrateCold => free * MET / FREE,
        }
    }
}

/// The next interval. It is longer where too few looks of an aggregation found an access. It is shorter where too many did, by
/// half at the most.
fn next_sample_ps(sample_ps: u64, regions: &[Region<GuestPhysAddr>]) -> u64 {
    let mut bytes = 0;
    let mut accessed = 0;
    for region in regions {
        bytes += u128::from(region.bytes());
        accessed += u128::from(region.bytes()) * u128::from(region.accesses);
    }
    let wanted = (bytes * u128::from(LOOKS) * u128::from(ACCESSED) / 10_000).max(1);
    let score = u64::try_from(accessed * u128::from(MET) / wanted).unwrap_or(u64::MAX);
    let part = match next_input(MET * 10_000, score) / 10_000 {
        shorter @ 0..=10_000 => 5_000 + shorter / 2,
        longer => longer,
    };
    let (least, most) = (SAMPLE_MS.0 * PS_PER_MS, SAMPLE_MS.1 * PS_PER_MS);
    (sample_ps / 10_000 * part).clamp(least, most)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_goal_that_is_met_changes_nothing_and_one_that_is_far_exceeded_ends_it() {
        assert_eq!(next_input(123_456, MET), 123_456);
        assert_eq!(next_input(123_456, 0), 2 * 123_456);
        assert_eq!(next_input(123_456, 2 * MET), INPUT_MIN);
        assert_eq!(next_input(u64::MAX, 0), u64::MAX);
    }

    proptest! {
        /// Where the score is in proportion to the quota, the quota becomes that which meets the goal.
        #[test]
        fn a_quota_moves_to_where_its_goal_is_met(needed in 1u64..1 << 40, first in 1u64..1 << 40) {
            let mut input = first * 10_000;
            let score = |input: u64| {
                let score = u128::from(input) * u128::from(MET) / (u128::from(needed) * 10_000);
                u64::try_from(score).unwrap_or(u64::MAX)
            };
            for _ in 0..200 {
                input = next_input(input, score(input));
            }
            prop_assert!(score(input).abs_diff(MET) <= 1, "{} of {}", input / 10_000, needed);
        }

        #[test]
        fn intervals_follow_what_is_found_within_their_bounds(
            sample_ms in SAMPLE_MS.0..=SAMPLE_MS.1, found in prop::collection::vec(0..=LOOKS, 1..20),
        ) {
            let page = |i: usize| GuestPhysAddr(i as u64 * 4096);
            let regions: Vec<_> = found
                .iter()
                .enumerate()
                .map(|(i, &accesses)| {
                    let mut region = Region::new(page(i)..page(i + 1));
                    region.accesses = accesses;
                    region
                })
                .collect();
            let before_ps = sample_ms * PS_PER_MS;
            let after_ps = next_sample_ps(before_ps, &regions);
            let (least, most) = (SAMPLE_MS.0 * PS_PER_MS, SAMPLE_MS.1 * PS_PER_MS);
            prop_assert!((least..=most).contains(&after_ps));
            prop_assert!(after_ps >= before_ps / 2);
            let found: u64 = found.iter().map(|&f| u64::from(f)).sum();
            let wanted = regions.len() as u64 * u64::from(LOOKS) * ACCESSED / 10_000;
            if found > wanted + 1 {
                prop_assert!(after_ps <= before_ps);
            }
            if found < wanted {
                prop_assert!(after_ps >= before_ps);
            }
        }
    }
}
