//! One epoch's plan: which pairs of blocks change place.

use super::Rule;
use super::candidates::{Candidates, TRIED, candidates};
use super::collapse::collapse;
use super::remaining::Remaining;
use super::scan::{Part, Scan};
use super::shares::Parts;
use super::unit::Unit;
use crate::heat::{Heat, WINDOWS, windows_due};
use crate::{Pid, Plan, Situation};

/// Plans the relocations of one epoch.
pub(crate) fn plan(rule: &mut Rule, situation: &Situation<'_>, heats: &[(Pid, &Heat)]) -> Plan {
    let mut scan = std::mem::take(rule.scans.get_mut(situation.level));
    let mut promises = *rule.promises.get(situation.level);
    let (plan, unfinished) = plan_with(rule, &mut scan, &mut promises, situation, heats);
    *rule.unfinished.get_mut(situation.level) = unfinished;
    *rule.promises.get_mut(situation.level) = promises;
    *rule.scans.get_mut(situation.level) = scan;
    plan
}

fn plan_with(
    rule: &Rule,
    scan: &mut Scan,
    promises: &mut [f64; WINDOWS],
    situation: &Situation<'_>,
    heats: &[(Pid, &Heat)],
) -> (Plan, Option<usize>) {
    let mut plan = Plan {
        level: situation.room.level(),
        ..Plan::default()
    };
    let mut left = Remaining::of(rule, situation);
    let mut shares = Parts::new(situation, heats);
    let parts: Vec<Part<'_>> = (heats.iter())
        .flat_map(|&(pid, heat)| {
            let chunks = situation.residency.known_by_chunk(pid, situation.level);
            chunks.map(move |chunk| Part {
                pid,
                heat: heat.of_chunk(chunk.first),
                chunk,
            })
        })
        .collect();
    scan.restrict(&parts);
    // A window with more exchanges than fit one epoch, or than the tokens paid for, goes on in the next one.
    let before = *rule.unfinished.get(situation.level);
    let due = windows_due(situation.epoch).filter(|&window| Some(window) != before);
    let mut unfinished = None;
    for window in before.into_iter().chain(due) {
        let chosen = scan.choose(&parts, window, situation.epoch);
        let mut candidates = candidates(rule, situation, &chosen, window, scan);
        let planned = situation.planned.iter().map(|(_, plan)| plan);
        candidates.drop_planned(planned.chain([&plan]));
        let may_move = |unit: &Unit<'_>| {
            let (events, _) = unit.events_by(unit.estimate, window, unit.bytes);
            let may_pay = events * unit.event_s > rule.promotion_s(unit.bytes);
            may_pay || (rule.has_lost() && unit.goes_home) || !situation.shares.is_empty()
        };
        promises[window] = promise(rule, window, &mut candidates, &mut plan, may_move);
        make_room(
            rule,
            window,
            situation,
            &mut candidates,
            &mut left,
            &mut plan,
        );
        let goes_on = !left.is_spent() || before == Some(window);
        exchange(rule, window, &candidates, &mut shares, &mut left, &mut plan);
        relieve(rule, window, &candidates, &mut left, &mut plan);
        if situation.collapses {
            collapse(rule, window, &candidates, &mut left, &mut plan);
        }
        if goes_on && left.is_spent() {
            unfinished = Some(window);
        }
    }
    (plan, unfinished)
}

/// The time that exchanges would certainly save, seconds a second: the sum over pairs whose difference recurs. The
/// shortest window has no shorter one in which it could. Pairs whose loss is still below their cost are undecided.
fn promise(
    rule: &Rule,
    window: usize,
    candidates: &mut Candidates<'_>,
    plan: &mut Plan,
    may_move: impl Fn(&Unit<'_>) -> bool,
) -> f64 {
    let mut promised_s = 0.0;
    if window > 0 {
        for (hot, cold) in candidates.slow.iter().zip(&candidates.fast) {
            let saved_s = rule.certain_loss_s(window, hot, cold);
            promised_s += saved_s / hot.span_s(window).max(f64::MIN_POSITIVE);
            if saved_s > 0.0 && !may_move(hot) {
                plan.note_undecided(hot, cold);
            }
        }
    }
    candidates.slow.retain(may_move);
    promised_s
}

/// Demotes the coldest without an exchange while the balloon waits for memory. It does so, too, where fast memory lacks some
/// before anything can be promoted, as far as exchanges for the hottest would pay.
fn make_room(
    rule: &Rule,
    window: usize,
    situation: &Situation<'_>,
    candidates: &mut Candidates<'_>,
    left: &mut Remaining,
    plan: &mut Plan,
) {
    let lacks = situation.room.fast_missing.0 > 0 && situation.shares.is_empty();
    let Candidates { slow, fast, .. } = candidates;
    let hottest = slow.first().filter(|_| lacks);
    let pays = |victim: &Unit<'_>| {
        hottest.is_some_and(|hot| {
            // Room on another socket would attract memory that belongs here.
            victim.socket == hot.socket
                && victim.density < hot.density
                && rule.pays(window, hot, Some(victim))
        })
    };
    fast.retain(|victim| {
        let may_leave = left.fast_free < left.level && left.can_demote(victim.bytes);
        let leaves = may_leave && (situation.balloon_waits || (!left.is_spent() && pays(victim)));
        if leaves {
            left.demote(victim, rule.demotion_s(victim.bytes));
            plan.demotions.push(victim.relocation());
        }
        !leaves
    });
}

/// Demotes the hottest units of a tier that is slower than the next one, as far as that pays.
fn relieve(
    rule: &Rule,
    window: usize,
    candidates: &Candidates<'_>,
    left: &mut Remaining,
    plan: &mut Plan,
) {
    for hot in &candidates.overloaded {
        if left.is_spent() || !left.can_demote(hot.bytes) {
            break;
        }
        let cost_s = rule.demotion_s(hot.bytes);
        if rule.reaches(window, hot, None, cost_s) {
            left.demote(hot, cost_s);
            left.may_shift -= hot.rate();
            plan.demotions.push(hot.relocation());
        }
    }
}

/// Promotes the hottest slow units as far as that pays. Free memory near their process comes first, then an exchange for
/// the coldest fast units, then free memory elsewhere.
fn exchange(
    rule: &Rule,
    window: usize,
    candidates: &Candidates<'_>,
    parts: &mut Parts,
    left: &mut Remaining,
    plan: &mut Plan,
) {
    // Coldest last, so that those that leave are taken from the end.
    let mut victims: Vec<&Unit<'_>> = candidates.fast.iter().rev().collect();
    for hot in &candidates.slow {
        if left.epoch_s <= 0.0 || left.may_shift <= 0.0 || hot.bytes > left.may_promote {
            break;
        }
        let has_room = left.has_room_for(hot.bytes);
        let partners = match has_room && left.rooms.fits(hot.socket, hot.bytes) {
            true => None,
            false => partners(rule, window, hot, &victims, parts, left, plan),
        };
        if partners.is_none() {
            let may_fill = parts.may_fill(hot.pid) && (!left.is_broke() || hot.goes_home);
            if !has_room || !may_fill || !rule.pays(window, hot, None) {
                continue;
            }
        }
        for at in partners.unwrap_or_default() {
            let cold = victims.remove(at);
            left.demote(cold, rule.demotion_s(cold.bytes));
            parts.demoted(cold.pid, cold.bytes);
            plan.demotions.push(cold.relocation());
        }
        left.promote(hot, rule.promotion_s(hot.bytes));
        left.may_shift -= hot.rate();
        parts.promoted(hot.pid, hot.bytes);
        plan.promotions.push(hot.relocation());
    }
}

/// The places of those victims that leave for a slow unit, last first: as many of the coldest as make room for it. None where
/// too few may leave; pairs that were tried in vain are noted in the plan.
fn partners(
    rule: &Rule,
    window: usize,
    hot: &Unit<'_>,
    victims: &[&Unit<'_>],
    parts: &Parts,
    left: &Remaining,
    plan: &mut Plan,
) -> Option<Vec<usize>> {
    let is_broke = left.is_broke();
    if is_broke && !hot.goes_home && parts.is_empty() {
        return None;
    }
    let missing = match left.has_room_for(hot.bytes) {
        true => hot.bytes,
        false => hot
            .bytes
            .saturating_sub(left.fast_free.saturating_sub(left.level)),
    };
    let mut leaving: Vec<usize> = vec![];
    let mut demoted = 0;
    for at in tried(rule, window, hot, victims, parts, left) {
        let cold = victims[at];
        let is_due = parts.is_due(hot, cold);
        if cold.density >= hot.density && !is_due && !rule.has_lost() {
            continue;
        }
        let both_go_home = hot.goes_home && cold.goes_home;
        let may_spend = is_due || !is_broke || both_go_home;
        let is_worth = is_due
            || (rule.has_lost() && both_go_home)
            || (parts.may_exchange(hot.pid, cold.pid) && rule.pays(window, hot, Some(cold)));
        if !may_spend || !left.can_demote(demoted + cold.bytes) || !is_worth {
            plan.note_undecided(hot, cold);
            continue;
        }
        leaving.push(at);
        demoted += cold.bytes;
        if demoted >= missing {
            leaving.sort_unstable_by(|a, b| b.cmp(a));
            return Some(leaving);
        }
    }
    None
}

/// The places of victims that are compared with a slow unit. Memory that is due to its group comes first, then memory on its
/// socket, where what is promoted finds room, then memory elsewhere. The coldest of each comes first. While memory is free on
/// another socket, only an exchange on its own is better. Memory elsewhere must be colder than the coldest near that would have
/// to leave, which may only seem to be as hot since nobody has looked yet.
fn tried(
    rule: &Rule,
    window: usize,
    hot: &Unit<'_>,
    victims: &[&Unit<'_>],
    parts: &Parts,
    left: &Remaining,
) -> Vec<usize> {
    let is_broke = left.is_broke();
    let may_leave = |at: &usize| !is_broke || victims[*at].goes_home || !parts.is_empty();
    let coldest_first = (0..victims.len()).rev().filter(may_leave);
    let is_near = |at: &usize| victims[*at].socket == hot.socket;
    let takes_others = !left.has_room_for(hot.bytes);
    let near = coldest_first.clone().filter(is_near);
    let others = coldest_first.filter(|at| takes_others && !is_near(at));
    if !parts.is_empty() {
        let is_due = |at: &usize| parts.is_due(hot, victims[*at]);
        let (due, rest): (Vec<_>, Vec<_>) = near.chain(others).partition(is_due);
        return due.into_iter().chain(rest).take(TRIED).collect();
    }
    // A few cold pages alone make no room.
    let mut room = 0;
    let mut makes_room = |at: &usize| {
        room += victims[*at].bytes;
        room >= hot.bytes
    };
    let last_near = near.clone().find(&mut makes_room).map(|at| Unit {
        event_s: hot.event_s,
        ..*victims[at]
    });
    let is_colder = |at: &usize| {
        let than = |near| rule.knows_prices() && rule.pays(window, &near, Some(victims[*at]));
        rule.has_lost() || last_near.is_none_or(than)
    };
    // Hot memory near must not keep cold memory elsewhere from being tried.
    let others = others.take(TRIED).filter(is_colder);
    near.take(TRIED).chain(others).collect()
}

impl Plan {
    fn note_undecided(&mut self, hot: &Unit<'_>, cold: &Unit<'_>) {
        if self.undecided.len() < TRIED * TRIED {
            self.undecided
                .extend([(hot.pid, hot.block), (cold.pid, cold.block)]);
        }
    }
}
