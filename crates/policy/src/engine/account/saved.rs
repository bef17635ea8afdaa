//! An account's state, as a recording keeps it.

use super::price::PRICE_BYTES;
use super::rehearsal::Rehearsal;
use super::rests::{REST_EPOCHS, REST_MAX_MS, REST_MIN_MS, Rest};
use super::{Account, EXPOSURE_ONE, TOTAL_MAX_NS};
use crate::engine::snapshot::{NotAState, Numbers};

impl Account {
    /// Appends its state between two epochs.
    pub(in crate::engine) fn save(&self, to: &mut Vec<u64>) {
        let signed = |ns: i64| ns.wrapping_add(TOTAL_MAX_NS as i64) as u64;
        to.extend([
            signed(self.balance_ns),
            self.cost_ns,
            signed(self.benefit_ns),
        ]);
        let trial = [
            self.trial_benefit_ns,
            self.trial_best_ns,
            self.trial_found_ns,
        ];
        to.extend(trial.map(signed));
        to.extend([self.income_ns, self.steady_ns].map(signed));
        to.extend([self.trial_cost_ns, self.is_losing.into(), self.rest as u64]);
        to.extend(
            self.prices
                .map(|price| [price.bytes, price.took_ns])
                .concat(),
        );
        to.push(self.sample_ns.to_bits());
        let ticks = [self.tick, self.unseen_ticks, self.exposure];
        to.extend(ticks.map(u64::from));
        to.extend(
            [
                self.broke_ticks,
                self.unused_ticks,
                self.rest_until,
                self.loss_paid_at,
            ]
            .map(u64::from),
        );
        to.extend([self.rest_ms, self.cap_ns as u64, self.trial_ns as u64]);
        Rehearsal::save(self.rehearsal, to);
    }

    /// Takes over what was saved.
    pub(in crate::engine) fn restore(&mut self, from: &mut Numbers<'_>) -> Result<(), NotAState> {
        let signed = |n: u64| n as i64 - TOTAL_MAX_NS as i64;
        self.balance_ns = signed(from.next(2 * TOTAL_MAX_NS)?);
        self.cost_ns = from.next(TOTAL_MAX_NS)?;
        self.benefit_ns = signed(from.next(2 * TOTAL_MAX_NS)?);
        self.trial_benefit_ns = signed(from.next(2 * TOTAL_MAX_NS)?);
        self.trial_best_ns = signed(from.next(2 * TOTAL_MAX_NS)?);
        self.trial_found_ns = signed(from.next(2 * TOTAL_MAX_NS)?);
        self.income_ns = signed(from.next(2 * TOTAL_MAX_NS)?);
        self.steady_ns = signed(from.next(2 * TOTAL_MAX_NS)?);
        self.trial_cost_ns = from.next(TOTAL_MAX_NS)?;
        self.is_losing = from.next(1)? > 0;
        let rests = [
            Rest::Watch,
            Rest::Pause,
            Rest::GivenUp,
            Rest::PutBack,
            Rest::Gained,
        ];
        let rest = from.next(u64::MAX)?;
        self.rest = from.known(rests.into_iter().find(|&r| r as u64 == rest))?;
        for price in &mut self.prices {
            price.bytes = from.next(PRICE_BYTES)?;
            price.took_ns = from.next(u64::MAX)?;
        }
        let sample_ns = f64::from_bits(from.next(u64::MAX)?);
        self.sample_ns = from.known(Some(sample_ns).filter(|ns| (0.0..=1e20).contains(ns)))?;
        self.tick = from.next_u32()?;
        self.unseen_ticks = from.next((2 * self.horizon_ticks()).into())? as u32;
        self.exposure = from.next((2 * (REST_EPOCHS + 1) * EXPOSURE_ONE).into())? as u32;
        self.broke_ticks = from.next(self.patience().into())? as u32;
        self.unused_ticks = from.next_u32()?;
        self.rest_until = from.next_u32()?;
        self.loss_paid_at = from.next_u32()?;
        self.rest_ms = from.next(REST_MAX_MS)?;
        from.known((self.rest_ms >= REST_MIN_MS).then_some(()))?;
        self.cap_ns = from.next(TOTAL_MAX_NS)? as i64;
        self.trial_ns = from.next(TOTAL_MAX_NS)? as i64;
        self.rehearsal = Rehearsal::restore(from)?;
        Ok(())
    }
}
