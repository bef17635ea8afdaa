//! One epoch's plan: which pairs of blocks change place.

use std::collections::BTreeSet;

use super::collapse::collapse;
use super::scan::{Part, Scan};
use super::shares::Parts;
use super::unit::Unit;
use super::{FIRST_BLOCKS, Rule};
use crate::heat::{Estimate, Heat, WINDOWS, windows_due};
use crate::residency::CHUNK_BLOCKS;
use crate::significance::CERTAINTY;
use crate::sockets::Rooms;
use crate::{BLOCK_SIZE, Block, Level, Pid, Plan, Relocation, Situation, Spread, Tier};

/// Fast blocks that are compared with a slow one before it is passed over, and pairs that are named as undecided.
const TRIED: usize = 16;

/// Units that may move now.
pub(super) struct Candidates<'a> {
    /// Hottest first.
    pub(super) slow: Vec<Unit<'a>>,
    /// Coldest first.
    fast: Vec<Unit<'a>>,
    /// Units of a tier that load has made slower than the one below, hottest first.
    overloaded: Vec<Unit<'a>>,
}

/// Time and room that the plan may still use.
pub(super) struct Left {
    tokens_s: f64,
    /// Tokens that moves do not need: those beyond the first ones, without loans.
    spare_s: f64,
    /// Time of all threads that move, until the epoch ends.
    epoch_s: f64,
    may_promote: u64,
    may_demote: u64,
    /// Events a second whose memory may still move.
    may_shift: f64,
    fast_free: u64,
    level: u64,
    slow_free: u64,
    /// Free fast memory near each socket.
    rooms: Rooms,
}

impl Left {
    fn of(rule: &Rule, situation: &Situation<'_>) -> Self {
        let room = &situation.room;
        let most = match rule.knows_prices() || situation.balloon_waits {
            true => room.batch.0,
            false => room.batch.0.min(FIRST_BLOCKS as u64 * BLOCK_SIZE),
        };
        let spent_s = |(_, plan): &(Level, Plan)| {
            let bytes = |moves: &[Relocation]| moves.iter().map(|r| r.bytes.0).sum();
            rule.promotion_s(bytes(&plan.promotions)) + rule.demotion_s(bytes(&plan.demotions))
        };
        let spent_s: f64 = situation.planned.iter().map(spent_s).sum();
        Self {
            tokens_s: rule.spendable_s() - spent_s,
            spare_s: rule.spare_s() - spent_s,
            epoch_s: rule.movers_s(situation) - spent_s,
            may_promote: most,
            may_demote: most,
            may_shift: rule.load.most_events(&rule.gain, situation.level),
            fast_free: room.fast_free.0,
            level: room.level().0,
            slow_free: room.slow_free.0,
            rooms: situation.sockets.rooms_of(situation.level),
        }
    }

    /// Whether no exchange can be paid for in this epoch any more, or the tiers' latencies have to be measured first.
    fn is_spent(&self) -> bool {
        self.epoch_s <= 0.0 || self.tokens_s <= 0.0 || self.may_shift <= 0.0
    }

    fn has_room_for(&self, bytes: u64) -> bool {
        self.fast_free >= self.level + bytes
    }

    fn can_demote(&self, bytes: u64) -> bool {
        bytes <= self.may_demote.min(self.slow_free)
    }

    /// Whether a block can be collapsed where it lies.
    pub(super) fn can_collapse(&self, bytes: u64) -> bool {
        !self.is_spent() && self.spare_s > 0.0 && bytes <= self.may_promote.min(self.slow_free)
    }

    /// One thread collapses blocks while the others that move wait. Its block takes the place of another one.
    pub(super) fn collapse(&mut self, bytes: u64, cost_s: f64, movers: f64) {
        self.spend(cost_s);
        self.epoch_s -= cost_s * (movers - 1.0);
        self.slow_free -= bytes;
        self.may_promote -= bytes;
    }

    fn spend(&mut self, cost_s: f64) {
        self.tokens_s -= cost_s;
        self.spare_s -= cost_s;
        self.epoch_s -= cost_s;
    }

    fn promote(&mut self, hot: &Unit<'_>, cost_s: f64) {
        let bytes = hot.bytes;
        self.spend(cost_s);
        self.rooms.take(hot.socket, bytes);
        self.fast_free -= bytes.min(self.fast_free);
        self.slow_free += bytes;
        self.may_promote -= bytes;
    }

    fn demote(&mut self, cold: &Unit<'_>, cost_s: f64) {
        let bytes = cold.bytes;
        self.spend(cost_s);
        self.rooms.give(cold.socket, bytes);
        self.fast_free += bytes;
        self.slow_free -= bytes;
        self.may_demote -= bytes;
    }
}

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
    let mut left = Left::of(rule, situation);
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
        make_room(rule, situation, &mut candidates, &mut left, &mut plan);
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

/// Demotes the coldest without an exchange while the balloon waits for memory.
fn make_room(
    rule: &Rule,
    situation: &Situation<'_>,
    candidates: &mut Candidates<'_>,
    left: &mut Left,
    plan: &mut Plan,
) {
    if !situation.balloon_waits {
        return;
    }
    let mut taken = 0;
    for victim in &candidates.fast {
        if left.fast_free >= left.level || !left.can_demote(victim.bytes) {
            break;
        }
        left.demote(victim, rule.demotion_s(victim.bytes));
        plan.demotions.push(victim.relocation());
        taken += 1;
    }
    candidates.fast.drain(..taken);
}

/// Demotes the hottest units of a tier that is slower than the next one, as far as that pays.
fn relieve(
    rule: &Rule,
    window: usize,
    candidates: &Candidates<'_>,
    left: &mut Left,
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
    left: &mut Left,
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
            let may_fill = parts.may_fill(hot.pid) && (left.tokens_s > 0.0 || hot.goes_home);
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
    left: &Left,
    plan: &mut Plan,
) -> Option<Vec<usize>> {
    let is_broke = left.tokens_s <= 0.0;
    if is_broke && !hot.goes_home && parts.is_empty() {
        return None;
    }
    let may_leave = |at: &usize| !is_broke || victims[*at].goes_home || !parts.is_empty();
    let coldest_first = (0..victims.len()).rev().filter(may_leave);
    // Memory that is due to a group comes first, and memory on the same socket: what is promoted finds room there.
    let is_here = |&at: &usize| victims[at].socket == hot.socket;
    // While memory is free on another socket, only an exchange here is better.
    let takes_others = !left.has_room_for(hot.bytes);
    let near = coldest_first.clone().filter(is_here);
    let other = coldest_first.filter(|at| takes_others && !is_here(at));
    // Memory near may only seem as hot, as nobody has looked yet.
    let coldest_near = near.clone().next().map(|at| Unit {
        event_s: hot.event_s,
        ..*victims[at]
    });
    let is_colder = |&at: &usize| {
        let than = |near| rule.knows_prices() && rule.pays(window, &near, Some(victims[at]));
        rule.has_lost() || coldest_near.is_none_or(than)
    };
    let tried: Vec<usize> = match parts.is_empty() {
        // Hot memory near must not keep cold memory elsewhere from being tried.
        true => {
            let other = other.take(TRIED).filter(is_colder);
            near.take(TRIED).chain(other).collect()
        }
        false => {
            let is_due = |&at: &usize| parts.is_due(hot, victims[at]);
            let (due, others): (Vec<_>, Vec<_>) = near.chain(other).partition(is_due);
            due.into_iter().chain(others).take(TRIED).collect()
        }
    };
    let free = match takes_others {
        true => left.fast_free.saturating_sub(left.level),
        false => 0,
    };
    let mut leaving: Vec<usize> = vec![];
    let mut demoted = 0;
    for at in tried {
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
        if free + demoted >= hot.bytes {
            leaving.sort_unstable_by(|a, b| b.cmp(a));
            return Some(leaving);
        }
    }
    None
}

impl Plan {
    fn note_undecided(&mut self, hot: &Unit<'_>, cold: &Unit<'_>) {
        if self.undecided.len() < TRIED * TRIED {
            self.undecided
                .extend([(hot.pid, hot.block), (cold.pid, cold.block)]);
        }
    }
}

/// The standard deviation of the square root of a count with such a variance.
fn root_deviation(count: f64, variance: f64) -> f64 {
    (variance / (4.0 * count).max(f64::MIN_POSITIVE)).sqrt()
}

impl Rule {
    /// The time that all threads together can move in one epoch, seconds.
    fn movers_s(&self, situation: &Situation<'_>) -> f64 {
        situation.epoch_ms as f64 / 1e3 * self.movers() as f64
    }

    /// The extra cost of an event in memory below a tier, of which there are `bytes`, compared with that tier, seconds.
    pub(super) fn extra_s(&self, level: Level, spread: &Spread, bytes: u64) -> f64 {
        let extra = |slower: Level| {
            let part = spread.bytes.get(slower).0 as f64 / bytes.max(1) as f64;
            part * (self.load.event_s.get(slower) - self.load.event_s.get(level))
        };
        level.slower().map(extra).sum()
    }

    /// The loss of a pair over a window that chance does not explain, seconds; zero unless it recurs.
    fn certain_loss_s(&self, window: usize, hot: &Unit<'_>, cold: &Unit<'_>) -> f64 {
        let (of_hot, hot_variance) = hot.events_by(hot.estimate, window, hot.bytes);
        let (of_cold, cold_variance) = cold.events_by(cold.estimate, window, hot.bytes);
        let (difference, variance) = (of_hot - of_cold, hot_variance + cold_variance);
        let certain = difference - CERTAINTY * variance.sqrt();
        match certain > 0.0 && recurs(window, hot, Some(cold), (difference, variance)) {
            true => certain * hot.event_s,
            false => 0.0,
        }
    }

    /// Whether the loss of a pair over a window has reached the cost of its exchange, and recurs in each shorter window.
    fn pays(&self, window: usize, hot: &Unit<'_>, cold: Option<&Unit<'_>>) -> bool {
        let bytes = hot.bytes;
        let demotion_s = cold.map_or(0.0, |_| self.demotion_s(bytes));
        self.reaches(window, hot, cold, self.promotion_s(bytes) + demotion_s)
    }

    /// Whether the loss of a unit over a window, less that of its partner, has reached a cost, and recurs in each shorter
    /// window.
    fn reaches(&self, window: usize, hot: &Unit<'_>, cold: Option<&Unit<'_>>, cost_s: f64) -> bool {
        let bytes = hot.bytes;
        let (of_hot, hot_variance) = hot.events_by(hot.estimate, window, bytes);
        let (of_cold, cold_variance) = cold.map_or((0.0, 0.0), |cold| {
            cold.events_by(cold.estimate, window, bytes)
        });
        let difference = of_hot - of_cold;
        let enough = of_cold + cost_s / hot.event_s;
        // Square roots of counts differ by chance by the same, however few they are.
        let chance = CERTAINTY
            * root_deviation(of_hot, hot_variance).hypot(root_deviation(enough, cold_variance));
        let reaches = hot.event_s > 0.0 && of_hot.sqrt() - enough.sqrt() > chance;
        reaches
            && recurs(
                window,
                hot,
                cold,
                (difference, hot_variance + cold_variance),
            )
    }
}

/// Whether each shorter window shows the difference of a pair, within chance. `difference` is that of its events over
/// the window, with its variance.
fn recurs(
    window: usize,
    hot: &Unit<'_>,
    cold: Option<&Unit<'_>>,
    (difference, variance): (f64, f64),
) -> bool {
    let hot_estimates = hot.shorter(window);
    let cold = cold.map(|cold| (cold, cold.shorter(window)));
    (0..window).all(|shorter| {
        let part = hot.span_s(shorter) / hot.span_s(window).max(f64::MIN_POSITIVE);
        let (of_hot, hot_variance) = hot.events_by(hot_estimates[shorter], shorter, hot.bytes);
        let (of_cold, cold_variance) = cold.map_or((0.0, 0.0), |(cold, estimates)| {
            cold.events_by(estimates[shorter], shorter, hot.bytes)
        });
        let chance = CERTAINTY * (variance * part + hot_variance + cold_variance).sqrt();
        of_hot - of_cold >= difference * part - chance
    })
}

impl Candidates<'_> {
    fn drop_planned<'p>(&mut self, plans: impl Iterator<Item = &'p Plan>) {
        let planned: BTreeSet<(Pid, Block)> = plans.flat_map(Plan::planned).collect();
        if planned.is_empty() {
            return;
        }
        let is_new = |unit: &Unit<'_>| !planned.contains(&(unit.pid, unit.block));
        self.slow.retain(is_new);
        self.fast.retain(is_new);
        self.overloaded.retain(is_new);
    }
}

/// The units of a plan for this window: slow ones whose loss may reach the cost of a promotion, and the coldest fast ones.
/// No more of either are kept than can be tried in one epoch.
fn candidates<'a>(
    rule: &Rule,
    situation: &Situation<'_>,
    parts: &[Part<'a>],
    window: usize,
    scan: &mut Scan,
) -> Candidates<'a> {
    let block_s = rule.promotion_s(BLOCK_SIZE) + rule.demotion_s(BLOCK_SIZE);
    let by_time = (rule.movers_s(situation) / block_s.max(1e-6)) as usize;
    let by_rate = (situation.room.batch.0 / BLOCK_SIZE) as usize;
    // Small blocks are cheaper to move than whole ones.
    let most = by_time.min(by_rate).saturating_mul(TRIED).max(TRIED);
    let level = situation.level;
    let excess_s = rule.load.excess_s(level);
    let is_relieved = excess_s > 0.0 && situation.shares.is_empty();
    let mut all = Vec::with_capacity(parts.len());
    let (mut slow, mut overloaded) = (vec![], vec![]);
    // By the socket that they lie near, so that each has partners.
    let mut fast: Vec<Vec<u128>> = vec![vec![]];
    let mut longer = [0.0; CHUNK_BLOCKS];
    for (part, first) in parts.iter().zip((0..).step_by(CHUNK_BLOCKS)) {
        let mut estimates = [Estimate::default(); CHUNK_BLOCKS];
        part.heat.estimates(window, &mut estimates);
        if part.chunk.sum.fast.0 > 0 {
            part.heat.longer_rates(window, &mut longer);
        }
        let (mut hottest_slow, mut coldest_fast) = (0.0f64, f64::INFINITY);
        for (at, known) in part.chunk.blocks().enumerate() {
            let Some(known) = known.filter(|k| k.aside_until <= situation.epoch) else {
                continue;
            };
            let spread = known.spread();
            let (placement, resident) = (spread.at(level), spread.resident().0 as f64);
            let at_block = first + at as u64;
            let density = estimates[at].rate / resident.max(1.0);
            if placement.slow.0 > 0 {
                hottest_slow = hottest_slow.max(density);
                slow.push(!key(density, at_block));
            }
            if placement.fast.0 > 0 {
                if is_relieved {
                    overloaded.push(!key(density, at_block));
                }
                // Of blocks that are all idle now, those that were so for long go first.
                let bytes = placement.fast.0 as f64;
                let density = density + longer[at] * (bytes / resident.max(1.0)) / bytes;
                coldest_fast = coldest_fast.min(density);
                let socket = usize::from(spread.socket.number());
                if fast.len() <= socket {
                    fast.resize_with(socket + 1, Vec::new);
                }
                fast[socket].push(key(density, at_block));
            }
        }
        scan.saw(part, window, hottest_slow, coldest_fast);
        all.push(estimates);
    }
    let unit = |tier: Tier, key: u128| {
        let (density, at_block) = of_key(key);
        let (part, at) = (at_block / CHUNK_BLOCKS, at_block % CHUNK_BLOCKS);
        let estimate = all[part][at];
        Unit::new(
            rule,
            situation,
            &parts[part],
            (tier, at),
            (estimate, density),
        )
    };
    let slow = least(slow, most).into_iter();
    let of_socket = |keys| least(keys, most);
    let mut fast: Vec<u128> = fast.into_iter().flat_map(of_socket).collect();
    fast.sort_unstable();
    let fast = fast.into_iter();
    let overloaded = least(overloaded, most).into_iter();
    Candidates {
        slow: slow.filter_map(|key| unit(Tier::Slow, !key)).collect(),
        fast: fast.filter_map(|key| unit(Tier::Fast, key)).collect(),
        overloaded: overloaded
            .filter_map(|key| {
                let event_s = excess_s;
                unit(Tier::Fast, !key).map(|unit| Unit { event_s, ..unit })
            })
            .collect(),
    }
}

/// A number that orders blocks by density, then by place. Numbers are sorted several times as fast as pairs.
fn key(density: f64, at_block: u64) -> u128 {
    let bits = density.to_bits();
    // As in `f64::total_cmp`, but unsigned: among negative numbers the larger bits are less.
    let order = match bits >> 63 {
        0 => bits | 1 << 63,
        _ => !bits,
    };
    u128::from(order) << 64 | u128::from(at_block)
}

/// The density and place behind a key.
fn of_key(key: u128) -> (f64, usize) {
    let order = (key >> 64) as u64;
    let bits = match order >> 63 {
        1 => order ^ 1 << 63,
        _ => !order,
    };
    (f64::from_bits(bits), key as u64 as usize)
}

/// The `most` least keys, sorted.
fn least(mut keys: Vec<u128>, most: usize) -> Vec<u128> {
    if keys.len() > most {
        keys.select_nth_unstable(most);
        keys.truncate(most);
    }
    keys.sort_unstable();
    keys
}
