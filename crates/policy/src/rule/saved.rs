//! The rule's state, as a recording keeps it.

use super::price::{PRICE_BYTES, Price};
use super::scan::Extremes;
use super::{Fresh, Rule};
use crate::engine::{NotAState, Numbers};
use crate::heat::WINDOWS;
use crate::{PerTier, Pid, Tier};

impl Rule {
    /// Appends its state between two epochs.
    pub(crate) fn save(&self, to: &mut Vec<u64>) {
        to.push(self.tokens_s.to_bits());
        for price in [self.promotion, self.demotion] {
            to.extend([price.bytes, price.took_ns]);
        }
        for tier in Tier::ALL {
            let fresh = self.fresh.get(tier);
            to.extend([fresh.events.to_bits(), fresh.rates.to_bits(), fresh.watched]);
        }
        to.extend([self.unseen_s.to_bits(), self.event_s.to_bits()]);
        to.extend(self.income.map(f64::to_bits));
        to.extend([self.balance.cost_ns, self.balance.benefit_ns as u64]);
        to.push(self.scan.seen.len() as u64);
        for ((pid, chunk), extremes) in &self.scan.seen {
            to.extend([pid.0.into(), *chunk]);
            for seen in extremes {
                to.extend([seen.hottest_slow, seen.coldest_fast].map(f64::to_bits));
            }
        }
    }

    /// Takes over what was saved.
    pub(crate) fn restore(&mut self, from: &mut Numbers<'_>) -> Result<(), NotAState> {
        self.tokens_s = from.number()?;
        let mut price = || {
            let (bytes, took_ns) = (from.next(PRICE_BYTES)?, from.next(u64::MAX)?);
            Ok(Price { bytes, took_ns })
        };
        (self.promotion, self.demotion) = (price()?, price()?);
        let mut fresh = || {
            Ok(Fresh {
                events: from.number()?,
                rates: from.number()?,
                watched: from.next(u64::MAX)?,
            })
        };
        self.fresh = PerTier {
            fast: fresh()?,
            slow: fresh()?,
        };
        self.unseen_s = from.number()?;
        self.event_s = from.number()?;
        for income in &mut self.income {
            *income = from.number()?;
        }
        self.balance.cost_ns = from.next(u64::MAX)?;
        self.balance.benefit_ns = from.next(u64::MAX)? as i64;
        for _ in 0..from.next_u32()? {
            let key = (Pid(from.next_u32()?), from.next(u64::MAX)?);
            let mut extremes = [Extremes::default(); WINDOWS];
            for seen in &mut extremes {
                seen.hottest_slow = from.number()?;
                seen.coldest_fast = from.number()?;
            }
            self.scan.seen.insert(key, extremes);
        }
        Ok(())
    }
}
