//! Which small pages become huge ones where they lie.
//!
//! # Problem
//! A program that starts while fast memory is full gets small pages of slow memory. Linux looks for a huge page in the near
//! node only, and khugepaged repairs less than 2 MiB a second. Blocks that are promoted become huge on their way. The others
//! stay small for days, and their translations miss the TLB.
//!
//! # Approach
//! Rent or buy, as with moves. Each load from small pages is taken to cost a little more ([`WALK_NS`]). A block is collapsed
//! once that has cost as much, over some window, as a collapse costs. No partner is needed, so that chance does no harm.
//! Until its cost is measured, the price is that of a promotion, which copies as much, and a plan has few collapses. They
//! earn nothing that can be measured. So they are paid from tokens that moves leave.
//!
//! # Properties
//! - Each block is collapsed at most once while it stays where it is.
//! - Without the time that moves leave, and on machines where nothing has moved yet, nothing is collapsed.

use std::collections::BTreeSet;

use super::candidates::Candidates;
use super::remaining::Remaining;
use super::{FIRST_BLOCKS, Rule};
use crate::Plan;

/// Cost of a translation that misses the TLB, nanoseconds. Under a hypervisor two page tables are walked, in 20 to 50 ns.
const WALK_NS: f64 = 30.0;

/// Plans collapses of slow units, the hottest first.
pub(super) fn collapse(
    rule: &Rule,
    window: usize,
    candidates: &Candidates<'_>,
    left: &mut Remaining,
    plan: &mut Plan,
) {
    if !rule.knows_prices() {
        return;
    }
    let walk_s = rule.loads_per_event() * WALK_NS * 1e-9;
    let most = match rule.collapse.is_known() {
        true => usize::MAX,
        false => FIRST_BLOCKS,
    };
    let planned: BTreeSet<_> = plan.planned().collect();
    for hot in &candidates.slow {
        if !hot.may_collapse || planned.contains(&(hot.pid, hot.block)) {
            continue;
        }
        let cost_s = rule.collapse.or(&rule.promotion).seconds(hot.bytes);
        let (events, _) = hot.events_by(hot.estimate, window, hot.bytes);
        let is_done = plan.collapses.len() >= most || !left.can_collapse(hot.bytes);
        if is_done || events * walk_s < cost_s {
            break;
        }
        left.collapse(hot.bytes, cost_s, rule.movers() as f64);
        plan.collapses.push(hot.relocation());
    }
}
