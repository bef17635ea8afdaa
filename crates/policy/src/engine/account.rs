//! Whether moving pays: an account of what moves have cost and of what they have brought.
//!
//! # Problem
//! A ranking says what is hotter than something else. It does not say whether that lasts until a move
//! has paid for itself: a sweep, a window that moves on, or chance make a ranking, too, and whoever
//! follows it moves memory for nothing, for as long as the program runs.
//!
//! # Approach
//! Moves are an investment, in units of time.
//!
//! - *Cost* is what the driver has measured for each batch; what a byte costs is a mean of the last
//!   batches by their bytes, for each direction, so that small pages are as dear as they are, and a
//!   small batch that the kernel was slow with says little. A quarter is charged on top: moves disturb caches and
//!   TLBs, and benefit is an estimate. What was measured long ago is
//!   forgotten, later after each loss: a price at which nothing is worth moving would not be measured again. Batches
//!   are small while the price is a guess. What the host takes through the balloon is measured, but not
//!   charged, nor judged, nor undone: it is no investment of the agent's.
//! - *Benefit* is what is sampled in memory that was moved, until its trial is judged and can be undone: a sample
//!   in promoted memory brings the loads that it stands for times the difference of the tiers'
//!   latencies, a sample in demoted memory takes as much. Memory that came back to where it
//!   was counts as neither. So what is credited is the difference to memory left alone.
//! - The account begins with a stake, pays for moves, earns their benefit, and is capped. Planning may
//!   spend what is in it, on what is hoped to pay for itself within the horizon.
//!   All samples of an epoch together are worth no more than the time that it took: a sweep makes
//!   many loads that do not wait for memory.
//! - What came in steadily, in two epochs in a row, is lent on: then the rest of a hot set follows its
//!   first blocks at once.
//! - When the account has been unable to pay for anything for [`BROKE_TICKS`], the engine *rests*: it
//!   goes on to watch, less often, and looks nothing up. A trial that has not paid for itself until then has
//!   another horizon to do so; it goes on as soon as it has. Else, or once what it moved has brought nothing for
//!   [`UNUSED_TICKS`](rests::UNUSED_TICKS), it has lost: what it moved goes back to
//!   where it lay, unless it has brought most of its cost ([`KEEP_PART`]) or brings something steadily, since
//!   memory that lies otherwise serves a program as well on the whole, but not at each moment. What stays
//!   is judged again in each epoch of the rest, and goes back, too, once it has lost as much as that costs: a program that has
//!   come back to what was demoted is not to wait until all that the trial had brought is gone. Where looks are few, chance makes one of two find nothing: there, moves are undone
//!   if all looks of the trial together have found that they lose, or the last two alike.
//! - A pause ends as soon as its trial has paid for itself, since nothing was lost then. Else the engine tries again after it with a
//!   small stake. A pause is so long that what the
//!   trial has lost is a hundredth of it ([`LOSS_SHARE`]), and twice as long as the one before it,
//!   up to a bound. A trial that has gained makes it short again; if it has lost by the end of that pause, since memory that it
//!   has moved serves the program worse now, it is judged then. Where much fast memory has come free a pause ends as soon
//!   as its trial's loss is a hundredth of the time.
//!
//! A tracker may not know what a sample stands for. The samples of an epoch together
//! are then taken to be worth [`SHARE_OF_TIME`] of it. Such a tracker looks now and then only, and repeats in
//! between what it has seen: before a move, too. So its samples say what is hot, but not what a move has brought.
//! That is told by *sightings*, what the last look alone has found, and counts from one look to the next. What one
//! look found may be chance, as a sweep comes by: what two in a row agree on counts.
//!
//! What such moves bring shows late. But what a plan would bring can be seen before it costs anything: under such a
//! tracker each trial begins with a *rehearsal*. A plan is only noted; its blocks count as moved for the looks that
//! come after, which had no part in making it. If each of them finds that it would pay for itself within the horizon,
//! for four ticks at least, the trial may spend what that would have brought; else the next plan is noted. Each
//! loss doubles the time and the looks that it takes, until a trial has gained.
//! A sweep and a window that moves on are elsewhere by then. What moves cost is a guess until some were made: where the
//! first batches show that the plan costs more than it was found to bring, the rest is given up. The trial has lost then, and
//! what it has moved goes back: a few looks have found that cold, and a program that came back to 24 MiB of it ran at 0.6 of its
//! speed.
//!
//! # Properties
//! - Moves cost no more than the stakes, with what was lent on each, twice (to undo them), and what
//!   moves have brought, but for one batch, whatever is sampled.
//! - A trial that fails leaves memory where it lay, soon after nothing uses what it moved.
//! - What a trial has moved goes back in the epoch in which it has lost as much as the moves have cost, whatever it had brought.
//! - A pause that ends early has lasted until its trial's loss is a hundredth of the time.
//! - What the host takes through the balloon is not charged, judged or undone; promotions are charged meanwhile, too.
//! - Samples that repeat what was seen before bring nothing, nor does a look that the next one does not confirm.
//! - Whatever is sampled, a loss is no more than the stake and a hundredth of the time, but for the
//!   trial that is under way. So on a sweep moves die out.
//! - Under a tracker that does not know what a sample stands for, a trial moves nothing before the looks after a plan
//!   agree that it pays. Once its price turns out too high for that, it gives the rest up, and what it has moved goes back.
//! - Under such a tracker nothing else goes back that looks have found no loss in.
//! - A stable hot set comes into fast memory; a hot set that has moved is followed.
//! - Total: nothing that is told overflows.

mod price;
mod rehearsal;
mod rests;
mod saved;

use super::protocol::Direction;
use crate::{Budget, ByteCount, PerTier, Tier};
use price::Price;
use rehearsal::Rehearsal;
pub(super) use rests::REST_EPOCHS;
use rests::{REST_MIN_MS, Rest};

/// Time within which a move has to pay for itself.
pub const HORIZON_MS: u64 = 10_000;

/// What an engine starts with: a fifth of a second of moves.
pub(super) const STAKE_NS: u64 = 200_000_000;

/// A further trial gets this part of the stake, and so does a first one that comes late.
const TRIAL_PART: i64 = 6;

/// A move is charged this part of its time on top: it drives a program's data out of caches and TLBs, and what it brings
/// is an estimate. An account that broke even without it lost up to 7 % of a hot set that moves each two seconds.
const DISTURBANCE_PART: u64 = 4;

/// Horizons after which half of what is known of prices is forgotten, as long as nothing was lost.
const PRICE_HORIZONS: u32 = 2;

/// Ticks of income that are lent, and the most that is.
const CREDIT_TICKS: u32 = 8;
const CREDIT_MAX_NS: i64 = 500_000_000;

/// The most that is lent on a rehearsal, and on what looks agree on: all that it brings within the horizon, since both
/// have been confirmed.
const CREDIT_CONFIRMED_MAX_NS: i64 = 2_000_000_000;

/// The most that is kept for later, or the stake if that is more; and where looks come now and then only: moves that wait
/// for what the first ones have brought wait for long, so that a hot set that has moved is to be paid for at once.
const BALANCE_MAX_NS: i64 = 1_000_000_000;
const BALANCE_CONFIRMED_MAX_NS: i64 = 2_000_000_000;

/// Part of the time that all samples of an epoch together are taken to be worth, where nobody knows
/// what one stands for: assumed, a program that waits for memory most of its time. With less, a hot set of most of fast memory
/// does not pay for its moves within the horizon.
const SHARE_OF_TIME: f64 = 0.4;

/// One tick of exposure.
const EXPOSURE_ONE: u32 = 1024;

/// More than moves cost or bring in a lifetime: nine years.
const TOTAL_MAX_NS: u64 = 1 << 58;

/// What samples are worth on a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gain {
    /// Loads that a sample stands for; nothing where the tracker cannot say.
    pub loads_per_sample: Option<u32>,
    /// Latency of a load from each tier, nanoseconds; as measured.
    pub latency_ns: PerTier<u32>,
    /// CPUs that programs run on.
    pub cpus: u32,
}

impl Gain {
    /// Nanoseconds that a sample brings when its memory is promoted, if anybody knows.
    fn sample_ns(&self) -> Option<f64> {
        let PerTier { fast, slow } = self.latency_ns;
        let loads = self.loads_per_sample?;
        Some(f64::from(loads) * f64::from(slow.saturating_sub(fast)))
    }

    /// Part of the time that a program saves that does nothing but wait for slow memory.
    fn time_saved(&self) -> f64 {
        let PerTier { fast, slow } = self.latency_ns;
        f64::from(self.cpus) * f64::from(slow.saturating_sub(fast)) / f64::from(slow.max(1))
    }
}

/// What moves have cost and brought so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Balance {
    /// Time that moves took, but for what the host has ordered, nanoseconds.
    pub cost_ns: u64,
    /// Time that they are taken to have saved, less what they are taken to have lost, nanoseconds.
    pub benefit_ns: i64,
    /// Whether the engine rests, because moving brings nothing.
    pub is_resting: bool,
}

/// The account. See the module's text.
#[derive(Debug, Clone)]
pub(super) struct Account {
    gain: Gain,
    epoch_ms: u64,
    /// Whether it is kept at all.
    is_kept: bool,
    is_closed: bool,
    cap_ns: i64,
    trial_ns: i64,
    balance_ns: i64,
    /// Ticks since somebody has looked: samples have only repeated what was seen before.
    unseen_ticks: u32,
    /// What came in for each tick until the last look, and until the two last ones the less.
    income_ns: i64,
    steady_ns: i64,
    prices: [Price; 2],
    cost_ns: u64,
    benefit_ns: i64,
    /// What this trial has brought, the most that this ever was, and what it has cost.
    trial_benefit_ns: i64,
    trial_best_ns: i64,
    trial_cost_ns: u64,
    /// What its looks have found that it brings, confirmed or not; and whether the last two agree that it loses.
    trial_found_ns: i64,
    is_losing: bool,
    /// Samples of this epoch in promoted memory, less those in demoted memory.
    net_samples: i64,
    /// Weight of all samples of this epoch.
    all_samples: u64,
    /// The same of sightings.
    net_sighted: i64,
    all_sighted: u64,
    /// What a sample is worth now.
    sample_ns: f64,
    /// Epochs of the usual length so far.
    tick: u32,
    /// Ticks that the counts of ranges are made of, decayed as they are; in [`EXPOSURE_ONE`] parts.
    exposure: u32,
    broke_ticks: u32,
    /// Ticks for which what was moved has brought nothing.
    unused_ticks: u32,
    rest_ms: u64,
    /// The first tick after the rest; 0 while there is none.
    rest_until: u32,
    rest: Rest,
    /// The tick at which the last loss is a hundredth of the time since.
    loss_paid_at: u32,
    /// There while plans are only noted, and then until the first look after that.
    rehearsal: Option<Rehearsal>,
}

/// What an access brings in memory that was moved to this tier.
fn sign(moved: Option<Tier>) -> i64 {
    match moved {
        Some(Tier::Fast) => 1,
        Some(Tier::Slow) => -1,
        None => 0,
    }
}

/// What both say: of two gains or two losses the lesser one.
fn agreed(a: i64, b: i64) -> i64 {
    match a.signum() == b.signum() {
        true if a.abs() < b.abs() => a,
        true => b,
        false => 0,
    }
}

impl Account {
    pub(super) fn new(gain: Gain, stake_ns: u64, epoch_ms: u64, is_kept: bool) -> Self {
        let stake_ns = stake_ns.min(TOTAL_MAX_NS) as i64;
        let kept_ns = match gain.loads_per_sample {
            Some(_) => BALANCE_MAX_NS,
            None => BALANCE_CONFIRMED_MAX_NS,
        };
        Self {
            gain,
            epoch_ms,
            is_kept,
            is_closed: false,
            cap_ns: stake_ns.max(kept_ns),
            trial_ns: stake_ns / TRIAL_PART,
            balance_ns: stake_ns,
            unseen_ticks: 0,
            income_ns: 0,
            steady_ns: 0,
            prices: [Price::default(); 2],
            cost_ns: 0,
            benefit_ns: 0,
            trial_benefit_ns: 0,
            trial_best_ns: 0,
            trial_cost_ns: 0,
            trial_found_ns: 0,
            is_losing: false,
            net_samples: 0,
            all_samples: 0,
            net_sighted: 0,
            all_sighted: 0,
            sample_ns: gain.sample_ns().unwrap_or(0.0),
            tick: 0,
            exposure: 0,
            broke_ticks: 0,
            unused_ticks: 0,
            rest_ms: REST_MIN_MS,
            rest_until: 0,
            rest: Rest::Pause,
            loss_paid_at: 0,
            rehearsal: (is_kept && gain.loads_per_sample.is_none()).then(Rehearsal::default),
        }
    }

    /// Whether each trial begins with a rehearsal: the tracker looks now and then only.
    pub(super) fn rehearses(&self) -> bool {
        self.gain.loads_per_sample.is_none()
    }

    /// Whether plans are noted only.
    pub(super) fn is_rehearsing(&self) -> bool {
        self.rehearsal.is_some_and(|rehearsal| !rehearsal.is_over)
    }

    /// Whether the next look may confirm a plan that was noted.
    pub(super) fn awaits_look(&self) -> bool {
        self.is_rehearsing() && self.rehearsal != Some(Rehearsal::default())
    }

    /// Whether a plan is to be noted: there is none, and somebody has just looked.
    pub(super) fn wants_rehearsal(&self) -> bool {
        self.rehearsal == Some(Rehearsal::default()) && self.unseen_ticks == 0
    }

    /// Takes note of a plan that promotes and demotes so many bytes.
    pub(super) fn rehearse(&mut self, promoted: ByteCount, demoted: ByteCount) {
        self.rehearsal = Some(Rehearsal::new(promoted, demoted));
    }

    /// Whether a plan that brings so much for each tick pays for such a cost within the horizon.
    fn pays(&self, cost_ns: u128, income_ns: i64) -> bool {
        let hoped_ns = income_ns.saturating_mul(self.horizon_ticks().into());
        cost_ns > 0 && u128::try_from(hoped_ns).is_ok_and(|hoped_ns| hoped_ns >= cost_ns)
    }

    /// What moving a byte costs in each direction, picoseconds. A direction that was not measured is no cheaper than the
    /// other one, as far as anybody can tell.
    fn prices_ps(&self) -> [u64; 2] {
        let [a, b] = &self.prices;
        [(a, b), (b, a)].map(|(it, other)| match other.is_known() && !it.is_known() {
            true => it.ps_per_byte().max(other.ps_per_byte()),
            false => it.ps_per_byte(),
        })
    }

    fn begin_rehearsal(&mut self) {
        self.rehearsal = Some(Rehearsal::default());
        self.income_ns = 0;
        self.steady_ns = 0;
    }

    /// A look has found what a plan would have brought for each tick since the last one.
    fn rehearsed(&mut self, of: Rehearsal, income_ns: i64, ticks: u32) {
        let cost_ns = of.cost_ns(self.prices_ps());
        if !self.pays(cost_ns + cost_ns / u128::from(DISTURBANCE_PART), income_ns) {
            self.rehearsal = Some(Rehearsal::default());
            return;
        }
        self.income_ns = match of.looks {
            0 => income_ns,
            _ => income_ns.min(self.income_ns),
        };
        let of = of.confirmed(ticks, self.caution());
        self.rehearsal = Some(of);
        if of.is_over {
            self.steady_ns = self.income_ns;
        }
    }

    /// Ticks within which a move has to pay for itself.
    fn horizon_ticks(&self) -> u32 {
        (HORIZON_MS / self.epoch_ms).max(1) as u32
    }

    /// Ticks for which a move is watched: those of a trial are until it is judged, and can be undone then.
    pub(super) fn watch_ticks(&self) -> u32 {
        self.patience() + 2 * self.horizon_ticks()
    }

    /// How many times the usual length of an epoch have passed.
    pub(super) fn tick(&self) -> u32 {
        self.tick
    }

    /// Takes a sample of this weight, in memory that was `moved` to a tier not long ago.
    #[inline]
    pub(super) fn take_sample(&mut self, weight: u32, moved: Option<Tier>) {
        self.all_samples = self.all_samples.saturating_add(weight.into());
        let net = sign(moved) * i64::from(weight);
        self.net_samples = self.net_samples.saturating_add(net);
    }

    /// Takes a sighting of this weight, likewise.
    pub(super) fn take_sighting(&mut self, weight: u32, moved: Option<Tier>) {
        self.all_sighted = self.all_sighted.saturating_add(weight.into());
        let net = sign(moved) * i64::from(weight);
        self.net_sighted = self.net_sighted.saturating_add(net);
    }

    /// Ends an epoch of `epochs` times the usual length. Its benefit comes in, unless its samples repeat what was
    /// seen before: that cannot tell what the moves since then have brought.
    pub(super) fn end_samples(&mut self, epochs: u32, is_repeat: bool) {
        let before = self.tick;
        self.tick = self.tick.saturating_add(epochs);
        let has_passed = |ticks: u32| self.tick / ticks > before / ticks;
        let forgets_after = self.horizon_ticks().saturating_mul(PRICE_HORIZONS);
        if has_passed(forgets_after.saturating_mul(self.caution())) {
            self.prices.iter_mut().for_each(Price::age);
        }
        if has_passed(self.horizon_ticks()) {
            // A hot set shows in seconds. What first shows after a horizon is more often chance.
            if self.cost_ns == 0 {
                self.balance_ns = self.balance_ns.min(self.trial_ns);
            }
        }
        self.exposure = self.exposure / 2 + epochs * EXPOSURE_ONE;
        let elapsed_ns = (self.epoch_ms * u64::from(epochs)) as f64 * 1e6;
        let share_ns = elapsed_ns / self.all_samples.max(1) as f64;
        self.sample_ns = match self.gain.sample_ns() {
            // All of them together are worth no more than the time that passed.
            Some(sample_ns) => sample_ns.min(share_ns * self.gain.time_saved()),
            None => share_ns * SHARE_OF_TIME,
        };
        // What was long before the last look nobody knows.
        let most = 2 * self.horizon_ticks();
        self.unseen_ticks = self.unseen_ticks.saturating_add(epochs).min(most);
        if !is_repeat {
            self.earn();
        }
        if self.is_resting() {
            self.rest(is_repeat);
        }
        self.net_samples = 0;
        self.all_samples = 0;
        self.net_sighted = 0;
        self.all_sighted = 0;
    }

    /// Takes in what moves have brought since the last look.
    fn earn(&mut self) {
        let ticks = std::mem::take(&mut self.unseen_ticks);
        let found_ns = match self.gain.loads_per_sample {
            Some(_) => self.net_samples as f64 * self.sample_ns,
            None => {
                let elapsed_ns = (self.epoch_ms * u64::from(ticks)) as f64 * 1e6;
                let share = self.net_sighted as f64 / self.all_sighted.max(1) as f64;
                share * elapsed_ns * SHARE_OF_TIME
            }
        };
        let most = TOTAL_MAX_NS as i64;
        let income_ns = (found_ns as i64 / i64::from(ticks.max(1))).clamp(-most, most);
        if let Some(rehearsal) = self.rehearsal.take_if(|it| !it.is_over) {
            return self.rehearsed(rehearsal, income_ns, ticks);
        }
        self.rehearsal = None;
        let agreed_ns = agreed(self.income_ns, income_ns);
        let benefit_ns = match self.gain.loads_per_sample {
            Some(_) => found_ns as i64,
            // One look may find by chance what a sweep is at, or come just after a hot set has moved.
            None => agreed_ns.saturating_mul(ticks.into()),
        };
        self.is_losing = agreed_ns < 0;
        self.steady_ns = income_ns.min(self.income_ns);
        self.income_ns = income_ns;
        self.unused_ticks = match income_ns {
            ..=0 => self.unused_ticks.saturating_add(ticks),
            _ => 0,
        };
        let add = |sum_ns: i64, ns: i64| sum_ns.saturating_add(ns).clamp(-most, most);
        self.benefit_ns = add(self.benefit_ns, benefit_ns);
        self.balance_ns = add(self.balance_ns, benefit_ns).min(self.cap_ns);
        self.trial_benefit_ns = add(self.trial_benefit_ns, benefit_ns);
        self.trial_best_ns = self.trial_best_ns.max(self.trial_benefit_ns);
        self.trial_found_ns = add(self.trial_found_ns, found_ns as i64);
    }

    /// What this trial has brought, less what it has cost.
    fn trial_gain_ns(&self) -> i64 {
        self.trial_benefit_ns - self.trial_cost_ns as i64
    }

    /// Takes note of what a batch took that this account does not pay for.
    pub(super) fn learn_price(&mut self, direction: Direction, tried: ByteCount, took_ns: u64) {
        self.prices[direction as usize].pay(tried.0, took_ns);
    }

    /// Pays for a batch. Whether moves may go on: something is left, and what was rehearsed still pays.
    pub(super) fn pay(&mut self, direction: Direction, tried: ByteCount, took_ns: u64) -> bool {
        let took_ns = took_ns.min(TOTAL_MAX_NS / 2);
        self.learn_price(direction, tried, took_ns);
        self.cost_ns = (self.cost_ns + took_ns).min(TOTAL_MAX_NS);
        let charge_ns = took_ns + took_ns / DISTURBANCE_PART;
        let least = -(TOTAL_MAX_NS as i64);
        self.balance_ns = self.balance_ns.saturating_sub(charge_ns as i64).max(least);
        self.trial_cost_ns = (self.trial_cost_ns + charge_ns).min(TOTAL_MAX_NS);
        let carried_out = self.rehearsal.filter(|it| it.is_over && !self.is_resting());
        let cost_ns = carried_out.map(|it| it.cost_ns(self.prices_ps()));
        if cost_ns.is_some_and(|cost_ns| !self.pays(cost_ns, self.steady_ns)) {
            self.give_up();
        }
        !self.is_kept || (self.left_ns() > 0 && !self.is_resting())
    }

    /// Whether it has been measured, not long ago, what a move costs in each direction.
    pub(super) fn knows_prices(&self) -> bool {
        self.prices.iter().all(Price::is_known)
    }

    /// What may be spent: what there is, and what steady income lends.
    fn left_ns(&self) -> i64 {
        let (ticks, most_ns) = match self.gain.loads_per_sample {
            Some(_) => (CREDIT_TICKS, CREDIT_MAX_NS),
            None => (self.horizon_ticks(), CREDIT_CONFIRMED_MAX_NS),
        };
        let lent_ns = self.steady_ns.saturating_mul(ticks.into());
        self.balance_ns.saturating_add(lent_ns.clamp(0, most_ns))
    }

    /// What may be spent now.
    pub(super) fn budget(&self) -> Budget {
        if !self.is_kept {
            return Budget::NONE;
        }
        let prices_ps = self.prices_ps();
        let price = |d: Direction| prices_ps[d as usize];
        let ticks = f64::from(self.horizon_ticks());
        let exposure = f64::from(self.exposure.max(EXPOSURE_ONE)) / f64::from(EXPOSURE_ONE);
        Budget {
            left_ps: self.left_ns().max(0).unsigned_abs().saturating_mul(1000),
            promotion_ps: price(Direction::Promotion),
            demotion_ps: price(Direction::Demotion),
            sample_ps: self.sample_ns * 1000.0 * ticks / exposure,
        }
    }

    /// The same for a plan that is rehearsed: that costs nothing.
    pub(super) fn rehearsal_budget(&self) -> Budget {
        Budget {
            left_ps: Budget::NONE.left_ps,
            ..self.budget()
        }
    }

    /// Keeps no account from now on.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
        self.is_kept = false;
        self.rehearsal = None;
        self.rest_until = 0;
    }

    /// Whether it was closed.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub(super) fn balance(&self) -> Balance {
        Balance {
            cost_ns: self.cost_ns,
            benefit_ns: self.benefit_ns,
            is_resting: self.is_resting(),
        }
    }
}

#[cfg(test)]
mod tests;
