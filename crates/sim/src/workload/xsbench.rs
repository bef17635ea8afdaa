//! XSBench-like lookups of macroscopic cross sections on a unionised energy grid.
//!
//! A lookup draws an energy and a material, and finds the energy by binary search in the unionised grid. For each
//! nuclide of the material, it reads that point's row of the index grid, and two neighbouring points of the nuclide's
//! own grid. The nuclides' grids are a thirtieth of the memory, but get most accesses: a permanent hot spot. They are
//! allocated first.
//!
//! Sizes, materials and their shares follow XSBench's "large" problem. Only the number of energies depends on the
//! memory size.

use demeter_policy::MIB;
use demeter_scenario as scenario;

use super::generator::Generator;
use super::memory::{Extent, ProgramMemory, load, region};
use super::rng::{Rng, bound};
use crate::{Batch, Region};

const NUCLIDE_GRIDS: usize = 0;
const ENERGIES: usize = 1;
const INDEX_GRID: usize = 2;

/// Number of nuclides.
const NUCLIDES: u64 = 355;
/// An energy and five cross sections, 8 bytes each.
const POINT: u64 = 48;
/// An energy of the unionised grid.
const ENERGY: u64 = 8;
/// An index into a nuclide's grid.
const INDEX: u64 = 4;

/// By material: its number of nuclides, and its share of lookups.
const MATERIALS: [(u64, f64); 12] = [
    (321, 0.140),
    (5, 0.052),
    (4, 0.275),
    (4, 0.134),
    (27, 0.154),
    (21, 0.064),
    (21, 0.066),
    (21, 0.055),
    (21, 0.008),
    (21, 0.015),
    (9, 0.025),
    (9, 0.013),
];

/// Estimated: five interpolations for each of 56 nuclides, the mean.
const LOOKUP_PS: u64 = 500_000;

/// Maximum accesses of a step: a binary search over 2^64 energies.
const STEP_MAX: usize = 64;

pub(crate) struct Xsbench {
    /// Points of the unionised grid.
    energies: u64,
    /// Random numbers below a bound select its material or an earlier one.
    material_below: [u64; MATERIALS.len()],
    threads: Vec<Thread>,
}

struct Thread {
    rng: Rng,
    /// Nuclides of the current lookup that are left.
    left: std::ops::Range<u64>,
    /// Point of the unionised grid.
    point: u64,
}

impl Xsbench {
    pub(crate) fn new(app: &scenario::App, seed: u64) -> Self {
        let bytes_per_energy = POINT + ENERGY + NUCLIDES * INDEX;
        // All nuclides have equally many points.
        let points = (app.size_mib * MIB / bytes_per_energy / NUCLIDES).max(1);
        let mut below = 0.0;
        let thread = |rng| Thread {
            rng,
            left: 0..0,
            point: 0,
        };
        Self {
            energies: points * NUCLIDES,
            material_below: MATERIALS.map(|(_, share)| {
                below += share;
                bound(below)
            }),
            threads: Rng::for_threads(seed, app.threads)
                .into_iter()
                .map(thread)
                .collect(),
        }
    }
}

/// The loads of a binary search for `point` among `energies`.
fn search(base: u64, energies: u64, point: u64, out: &mut Batch) {
    let (mut low, mut high) = (0, energies);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        out.push(load(base + middle * ENERGY));
        if middle <= point {
            low = middle;
        } else {
            high = middle;
        }
    }
}

impl Generator for Xsbench {
    fn regions(&self) -> Vec<Region> {
        vec![
            region("nuclide grids", self.energies * POINT),
            region("energies", self.energies * ENERGY),
            region("index grid", self.energies * NUCLIDES * INDEX),
        ]
    }

    fn threads(&self) -> u32 {
        self.threads.len() as u32
    }

    fn next(&mut self, memory: &ProgramMemory, thread: usize, _now_ns: u64, out: &mut Batch) {
        let grids = memory.base(NUCLIDE_GRIDS);
        let index_grid = memory.base(INDEX_GRID);
        let points = self.energies / NUCLIDES;
        let thread = &mut self.threads[thread];
        while out.room() >= STEP_MAX {
            if thread.left.is_empty() {
                let random = thread.rng.next();
                let material = self.material_below.iter().position(|&b| random < b);
                let material = material.unwrap_or(MATERIALS.len() - 1);
                let (count, _) = MATERIALS[material];
                // Materials share few nuclides, so each begins at another nuclide.
                let first = material as u64 * 31 % (NUCLIDES - count);
                thread.left = first..first + count;
                thread.point = thread.rng.below(self.energies);
                search(memory.base(ENERGIES), self.energies, thread.point, out);
            }
            let row = index_grid + thread.point * NUCLIDES * INDEX;
            // A nuclide's points are spread evenly over all energies.
            let point = (thread.point / NUCLIDES).min(points.saturating_sub(2));
            let ahead = (out.room() / 3) as u64;
            let nuclides = thread.left.start..thread.left.end.min(thread.left.start + ahead);
            thread.left.start = nuclides.end;
            for nuclide in nuclides {
                let low = grids + (nuclide * points + point) * POINT;
                out.push(load(row + nuclide * INDEX));
                out.push(load(low));
                out.push(load(low + POINT));
            }
            out.ops += u32::from(thread.left.is_empty());
        }
    }

    fn hot(&self, _now_ns: u64) -> Vec<Extent> {
        let whole = |region, bytes| Extent {
            region,
            offset: 0,
            bytes,
        };
        vec![
            whole(NUCLIDE_GRIDS, self.energies * POINT),
            whole(ENERGIES, self.energies * ENERGY),
        ]
    }

    fn compute_ps(&self, _thread: usize) -> u64 {
        LOOKUP_PS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_of_eight_takes_three_steps() {
        let mut batch = Batch::default();
        search(0, 8, 5, &mut batch);
        let middles: Vec<u64> = batch
            .accesses()
            .iter()
            .map(|a| a.gva().0 / ENERGY)
            .collect();
        assert_eq!(middles, [4, 6, 5]);
    }

    #[test]
    fn all_lookups_have_a_material() {
        let total: f64 = MATERIALS.iter().map(|(_, share)| share).sum();
        assert!((0.999..=1.002).contains(&total), "{total}");
    }
}
