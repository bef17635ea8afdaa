//! The rule's state, as a recording keeps it.

use super::price::{PRICE_BYTES, Price};
use super::scan::Extremes;
use super::{Fresh, Rule};
use crate::Pid;
use crate::heat::WINDOWS;
use crate::numbers::{NotAState, Numbers};

impl Rule {
    /// Appends its state between two epochs.
    pub(crate) fn save(&self, to: &mut Vec<u64>) {
        to.push(self.tokens_s.to_bits());
        for price in [self.promotion, self.demotion, self.collapse] {
            to.extend([price.bytes, price.took_ns]);
        }
        for fresh in self.fresh.0.iter().flat_map(|by_now| &by_now.0) {
            to.extend([fresh.events, fresh.rates, fresh.watched].map(f64::to_bits));
        }
        to.extend(self.load.latency_ns.0.map(f64::to_bits));
        to.push(self.load.rate.to_bits());
        to.extend([self.unseen_s.to_bits(), self.gain.cpus.into()]);
        to.extend(self.income.map(f64::to_bits));
        to.extend(self.promises.0.iter().flatten().map(|p| p.to_bits()));
        to.extend(
            self.unfinished
                .0
                .map(|window| window.map_or(0, |w| w as u64 + 1)),
        );
        to.extend([self.balance.cost_ns, self.balance.benefit_ns as u64]);
        for scan in &self.scans.0 {
            to.push(scan.seen.len() as u64);
            for ((pid, chunk), extremes) in &scan.seen {
                to.extend([pid.0.into(), *chunk]);
                for seen in extremes {
                    to.extend([seen.hottest_slow, seen.coldest_fast].map(f64::to_bits));
                }
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
        (self.promotion, self.demotion, self.collapse) = (price()?, price()?, price()?);
        for fresh in self.fresh.0.iter_mut().flat_map(|by_now| &mut by_now.0) {
            *fresh = Fresh {
                events: from.number()?,
                rates: from.number()?,
                watched: from.number()?,
            };
        }
        for latency_ns in &mut self.load.latency_ns.0 {
            *latency_ns = from.number()?;
        }
        let rate = from.number()?;
        self.unseen_s = from.number()?;
        self.gain.cpus = from.next_u32()?;
        self.load.set_rate(&self.gain, rate);
        for number in self
            .income
            .iter_mut()
            .chain(self.promises.0.iter_mut().flatten())
        {
            *number = from.number()?;
        }
        for unfinished in &mut self.unfinished.0 {
            *unfinished = (from.next(WINDOWS as u64)? as usize).checked_sub(1);
        }
        self.balance.cost_ns = from.next(u64::MAX)?;
        self.balance.benefit_ns = from.next(u64::MAX)? as i64;
        for scan in &mut self.scans.0 {
            for _ in 0..from.next_u32()? {
                let key = (Pid(from.next_u32()?), from.next(u64::MAX)?);
                let mut extremes = [Extremes::default(); WINDOWS];
                for seen in &mut extremes {
                    seen.hottest_slow = from.number()?;
                    seen.coldest_fast = from.number()?;
                }
                scan.seen.insert(key, extremes);
            }
        }
        Ok(())
    }
}
