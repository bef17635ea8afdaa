//! Saves a process's heat between two epochs as numbers.

use super::pool::{LEVELS, Pools, Spread};
use super::{CELLS, CHUNK_BLOCKS, Chunk, FIRST, Heat, Mapped, WINDOWS, cells};
use crate::numbers::{NotAState, Numbers, Saved};

impl Saved for Heat {
    fn save(&self, to: &mut Vec<u64>) {
        for window in 0..WINDOWS {
            let sums = [self.events[window], self.exposure[window]];
            let clock = [
                self.weight[window],
                self.span_s[window],
                self.sampled_s[window],
            ];
            to.extend(clock.into_iter().chain(sums).map(f64::to_bits));
            to.push(self.watched_rate[window].to_bits());
            to.extend(self.pools[window].worth.map(f64::to_bits));
        }
        to.push(self.chunks.len() as u64);
        for chunk in &self.chunks {
            to.extend([chunk.number, chunk.exposure.is_some().into()]);
            for measured in &*chunk.measured {
                to.push(measured.watched_rate.to_bits());
                for s in &measured.spreads {
                    to.extend([s.excess, s.chance, s.squares].map(f64::to_bits));
                }
            }
            let arrays = [Some(&chunk.events), chunk.exposure.as_ref()];
            for cells in arrays.into_iter().flatten() {
                let is_there = |cell: &[f32; WINDOWS]| cell.iter().any(|number| *number != 0.0);
                to.push(cells.iter().filter(|cell| is_there(cell)).count() as u64);
                for (at, cell) in cells.iter().enumerate().filter(|(_, cell)| is_there(cell)) {
                    to.push(at as u64);
                    to.extend(cell.map(|number| u64::from(number.to_bits())));
                }
            }
        }
    }

    fn restore(&mut self, from: &mut Numbers<'_>) -> Result<(), NotAState> {
        for window in 0..WINDOWS {
            self.weight[window] = from.number()?;
            from.known((self.weight[window] >= 1.0).then_some(()))?;
            self.span_s[window] = from.number()?;
            self.sampled_s[window] = from.number()?;
            self.events[window] = from.number()?;
            self.exposure[window] = from.number()?;
            self.watched_rate[window] = from.number()?;
            let mut worth = [f64::INFINITY; LEVELS];
            for worth in &mut worth {
                *worth = f64::from_bits(from.next(u64::MAX)?);
                from.known((*worth >= 0.0).then_some(()))?;
            }
            self.pools[window] = Pools { worth };
        }
        let mut before = None;
        for _ in 0..from.next_u32()? {
            let number = from.next(u64::MAX / CHUNK_BLOCKS as u64)?;
            from.known(before.is_none_or(|before| before < number).then_some(()))?;
            before = Some(number);
            let mut chunk = Chunk::new(number, &self.space);
            let has_exposure = from.next(1)? == 1;
            for measured in &mut *chunk.measured {
                measured.watched_rate = from.number()?;
                for spread in &mut measured.spreads {
                    *spread = Spread {
                        excess: from.number()?,
                        chance: from.number()?,
                        squares: from.number()?,
                    };
                }
            }
            for is_exposure in [false, true] {
                if is_exposure && !has_exposure {
                    continue;
                }
                let mut all = cells();
                for _ in 0..from.next(CELLS as u64)? {
                    let at = from.next(CELLS as u64 - 1)? as usize;
                    let level = FIRST.partition_point(|first| *first <= at) - 1;
                    let mapped = chunk.mapped.count(level, at - FIRST[level]);
                    from.known((mapped > 0).then_some(()))?;
                    for number in &mut all[at] {
                        let value = f32::from_bits(from.next_u32()?);
                        from.known((value.is_finite() && value >= 0.0).then_some(()))?;
                        *number = value;
                    }
                }
                match is_exposure {
                    true => chunk.exposure = Some(all),
                    false => chunk.events = all,
                }
            }
            from.known((chunk.mapped != Mapped::default()).then_some(()))?;
            self.chunks.push(chunk);
        }
        Ok(())
    }
}
