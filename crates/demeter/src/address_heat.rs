//! Heat over addresses and time, as text: which memory of a process is used, and when.
//!
//! # Problem
//! An address space is a few mapped areas in 128 TiB, sampled thousands of times. A terminal has a hundred columns and
//! some dozens of lines.
//!
//! # Approach
//! Columns are equal parts of all memory that was ever mapped; gaps are omitted. Lines are equal parts of the time. A
//! cell is the mean heat of its memory over its samples, in steps of two below the hottest cell. If there are too many
//! samples, every second one is dropped, repeatedly.
//!
//! # Properties
//! - A picture has at most [`LINES`] lines of [`COLUMNS`] cells, for any input.
//! - Memory in use is never shown as unused beside unused memory.
//! - Any addresses and heats are accepted, even heats that are not numbers.

use std::fmt::Write;

/// Cells of a line.
const COLUMNS: usize = 72;
/// Most lines.
const LINES: usize = 32;
/// Maximum number of ranges kept, over all samples.
const RANGES_MAX: usize = 1 << 20;
/// From the coldest to the hottest; each is twice as hot as the one before. A blank means no access.
const SHADES: [char; 9] = ['.', ':', '-', '=', '+', '*', '#', '%', '@'];

/// A range of addresses with accesses per byte, in any unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeatRange {
    /// Its first address.
    pub start: u64,
    /// Its end, exclusive.
    pub end: u64,
    /// How hot it is.
    pub heat: f64,
}

/// Collected heat of one process's memory.
#[derive(Debug, Clone, Default)]
pub struct AddressHeat {
    looks: Vec<(f64, Vec<HeatRange>)>,
    ranges: usize,
    /// One of two to the power of this samples is kept.
    thinned: u32,
    seen: u64,
}

impl AddressHeat {
    /// Adds a sample at a time in seconds, which must not decrease.
    pub fn look(&mut self, t_s: f64, ranges: impl IntoIterator<Item = HeatRange>) {
        self.seen += 1;
        if !self.seen.is_multiple_of(1 << self.thinned) {
            return;
        }
        let ranges: Vec<_> = ranges.into_iter().take(RANGES_MAX / LINES).collect();
        self.ranges += ranges.len();
        self.looks.push((t_s, ranges));
        while self.ranges > RANGES_MAX && self.looks.len() > 1 {
            self.thinned += 1;
            let mut is_kept = false;
            self.looks.retain(|_| {
                is_kept = !is_kept;
                is_kept
            });
            self.ranges = self.looks.iter().map(|(_, ranges)| ranges.len()).sum();
        }
    }

    /// The picture, or a sentence if there are no samples.
    pub fn text(&self) -> String {
        let islands = self.islands();
        let bytes = islands.iter().map(|(start, end)| end - start);
        let bytes = bytes.fold(0u64, u64::saturating_add);
        let (Some(first), Some(last)) = (self.looks.first(), self.looks.last()) else {
            return "nothing was seen\n".into();
        };
        if bytes == 0 {
            return "no memory was seen\n".into();
        }
        let lines = LINES.min(self.looks.len());
        let span_s = (last.0 - first.0).max(f64::MIN_POSITIVE);
        let line_of = |t_s: f64| {
            let share = (t_s - first.0) / span_s;
            ((share * lines as f64) as usize).min(lines - 1)
        };
        let mut cells = vec![[0.0f64; COLUMNS]; lines];
        let mut looks = vec![0u32; lines];
        for (t_s, ranges) in &self.looks {
            let line = line_of(*t_s);
            looks[line] += 1;
            for range in ranges {
                add(&mut cells[line], &islands, bytes, range);
            }
        }
        for (cells, &looks) in cells.iter_mut().zip(&looks) {
            cells
                .iter_mut()
                .for_each(|cell| *cell /= f64::from(looks.max(1)));
        }
        let hottest = cells.iter().flatten().copied().fold(0.0, f64::max);
        let mut text = String::new();
        let mib = bytes as f64 / f64::from(1 << 20);
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{mib:.0} MiB in {} pieces from {:#x} to {:#x}; a column is {:.1} MiB, `{}` is in use, each of `{}` \
             twice as hot as the one before",
            islands.len(),
            islands[0].0,
            islands[islands.len() - 1].1,
            mib / COLUMNS as f64,
            SHADES[0],
            SHADES.iter().collect::<String>(),
        );
        for (line, cells) in cells
            .iter()
            .enumerate()
            .filter(|(line, _)| looks[*line] > 0)
        {
            let t_s = first.0 + span_s * line as f64 / lines as f64;
            let shades = cells.iter().map(|&heat| shade(heat, hottest));
            let _ = writeln!(text, "{t_s:8.1} s |{}|", shades.collect::<String>());
        }
        text
    }

    /// All memory that was ever mapped: sorted, disjoint, not adjacent.
    fn islands(&self) -> Vec<(u64, u64)> {
        let ranges = self.looks.iter().flat_map(|(_, ranges)| ranges);
        let ranges = ranges.filter(|range| range.start < range.end);
        let mut all: Vec<_> = ranges.map(|range| (range.start, range.end)).collect();
        all.sort_unstable();
        let mut islands: Vec<(u64, u64)> = vec![];
        for (start, end) in all {
            match islands.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => islands.push((start, end)),
            }
        }
        islands
    }
}

/// Adds a range's heat to its cells, weighted by overlap.
fn add(cells: &mut [f64; COLUMNS], islands: &[(u64, u64)], bytes: u64, range: &HeatRange) {
    if range.start >= range.end || !range.heat.is_finite() || range.heat <= 0.0 {
        return;
    }
    let mut before = 0u64;
    for &(start, end) in islands {
        if start <= range.start && range.end <= end {
            // In columns, from the left.
            let at = |addr: u64| {
                (before.saturating_add(addr - start)) as f64 / bytes as f64 * COLUMNS as f64
            };
            let (from, to) = (at(range.start), at(range.end));
            let first = (from as usize).min(COLUMNS - 1);
            let last = (to as usize).min(COLUMNS - 1);
            for (column, cell) in cells.iter_mut().enumerate().take(last + 1).skip(first) {
                let overlap = to.min(column as f64 + 1.0) - from.max(column as f64);
                *cell += range.heat * overlap.max(0.0);
            }
            return;
        }
        before = before.saturating_add(end - start);
    }
}

fn shade(heat: f64, hottest: f64) -> char {
    if heat <= 0.0 || hottest <= 0.0 {
        return ' ';
    }
    let below = (hottest / heat).log2().max(0.0) as usize;
    SHADES[(SHADES.len() - 1).saturating_sub(below)]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(start: u64, end: u64, heat: f64) -> HeatRange {
        HeatRange { start, end, heat }
    }

    fn lines(seen: &AddressHeat) -> Vec<String> {
        let text = seen.text();
        let cells = text.lines().skip(1).map(|line| {
            let cells = line.split('|').nth(1).unwrap_or_default();
            cells.to_owned()
        });
        cells.collect()
    }

    #[test]
    fn gaps_are_left_out_and_a_step_is_twice_as_hot() {
        let mut seen = AddressHeat::default();
        let far = 1 << 46;
        for second in 0..4 {
            // A quarter is unused, a quarter hot, and half of a distant area a quarter as hot.
            let hot = if second < 2 { 8.0 } else { 0.0 };
            seen.look(
                f64::from(second),
                [
                    range(0, 1 << 20, 0.0),
                    range(1 << 20, 2 << 20, hot),
                    range(far, far + (2 << 20), 2.0),
                ],
            );
        }
        let text = seen.text();
        assert!(
            text.starts_with("4 MiB in 2 pieces from 0x0 to 0x400000200000;"),
            "{text}"
        );
        let part = |shade: &str, columns: usize| shade.repeat(columns);
        let early = part(" ", 18) + &part("@", 18) + &part("#", 36);
        let late = part(" ", 36) + &part("#", 36);
        assert_eq!(lines(&seen), [early.clone(), early, late.clone(), late]);
    }

    #[test]
    fn nothing_is_a_line_of_words() {
        let mut seen = AddressHeat::default();
        assert_eq!(seen.text(), "nothing was seen\n");
        seen.look(0.0, []);
        assert_eq!(seen.text(), "no memory was seen\n");
    }

    proptest! {
        #[test]
        fn a_picture_is_bounded(
            looks in prop::collection::vec(
                (any::<f64>(), prop::collection::vec((any::<u64>(), any::<u64>(), any::<f64>()), 0..8)),
                0..80,
            ),
        ) {
            let mut seen = AddressHeat::default();
            for (t_s, ranges) in looks {
                seen.look(t_s, ranges.into_iter().map(|(a, b, heat)| range(a, b, heat)));
            }
            let lines = lines(&seen);
            prop_assert!(lines.len() <= LINES);
            prop_assert!(lines.iter().all(|line| line.chars().count() == COLUMNS));
        }

        #[test]
        fn memory_in_use_is_drawn(at in 0u64..512, heat in 1e-9..1e9f64) {
            let mut seen = AddressHeat::default();
            let page = 1 << 12;
            seen.look(0.0, [
                range(0, at * page, 0.0),
                range(at * page, (at + 1) * page, heat),
                range((at + 1) * page, 1 << 30, 0.0),
            ]);
            prop_assert!(lines(&seen)[0].contains('@'));
        }
    }
}
