//! A Kronecker graph that is computed instead of stored.
//!
//! **Problem.** Graph programs walk adjacency lists with power-law lengths and targets. Simulating a graph of 16 GiB
//! must not take 16 GiB.
//!
//! **Approach.** A vertex has a *rank*, a number of `scale` bits, and a scattered *label*, its index in all arrays, as
//! Graph500 requires. Graph500's initiator is (0.57, 0.19; 0.19, 0.05). The model rounds it to (0.5625, 0.1875; 0.1875,
//! 0.0625), so that rows and columns are independent: a bit of either end is 1 with probability 1/4. The expected
//! degree of a vertex then follows from the number of ones in its rank. The target of an edge is the *and* of two
//! random words. Adjacency lists are contiguous, in label order. The start of a list is a stored count for each 32
//! labels, plus the degrees since.
//!
//! **Properties.** Lists tile the adjacency array. Degrees and targets follow the law's distribution. An edge always
//! has the same target. Memory is a quarter of a byte per vertex.

use super::rng::{bound, mix};
use super::scatter::Scatter;

/// Labels per stored count.
const BLOCK: u64 = 32;

/// A graph, defined by its degrees and edges.
#[derive(Debug, Clone)]
pub(crate) struct Kronecker {
    seed: u64,
    labels: Scatter,
    /// By number of ones in a rank: the integer part of the degree, and the bound of random numbers that add one.
    degrees: Vec<(u64, u64)>,
    /// Edges before each block of labels; the last entry is the total.
    before: Vec<u64>,
}

impl Kronecker {
    /// A graph of 2^`scale` vertices (5 to 40) and at most `edges` directed edges, fewer by less than six standard
    /// deviations.
    pub(crate) fn new(scale: u32, edges: u64, seed: u64) -> Self {
        let vertices = 1u64 << scale;
        // Degrees are rounded randomly, so the sum varies by half the root of the number of vertices.
        let slack = 3.0 * (vertices as f64).sqrt();
        let edges = (edges as f64 - slack).max(0.0);
        let degrees = (0..=scale)
            .map(|ones| {
                let share = 0.75f64.powi((scale - ones) as i32) * 0.25f64.powi(ones as i32);
                let mean = edges * share;
                (mean as u64, bound(mean.fract()))
            })
            .collect();
        let mut graph = Self {
            seed,
            labels: Scatter::new(vertices, seed),
            degrees,
            before: Vec::new(),
        };
        let mut total = 0;
        let mut before = Vec::with_capacity((vertices / BLOCK + 1) as usize);
        for label in 0..vertices {
            if label % BLOCK == 0 {
                before.push(total);
            }
            total += graph.degree(label);
        }
        before.push(total);
        graph.before = before;
        graph
    }

    /// Number of vertices.
    pub(crate) fn vertices(&self) -> u64 {
        self.labels.count()
    }

    /// Number of directed edges.
    pub(crate) fn edges(&self) -> u64 {
        self.before[self.before.len() - 1]
    }

    /// Number of edges that leave the vertex `label`.
    #[inline]
    pub(crate) fn degree(&self, label: u64) -> u64 {
        let ones = self.labels.position(label).count_ones();
        let (whole, more_below) = self.degrees[ones as usize];
        whole + u64::from(mix(self.seed ^ label) < more_below)
    }

    /// The edges that leave the vertex `label`, as indices into the adjacency array.
    #[inline]
    pub(crate) fn list(&self, label: u64) -> std::ops::Range<u64> {
        let block = label / BLOCK;
        let earlier: u64 = (block * BLOCK..label).map(|l| self.degree(l)).sum();
        let start = self.before[block as usize] + earlier;
        start..start + self.degree(label)
    }

    /// The label of the target of `edge`.
    #[inline]
    pub(crate) fn target(&self, edge: u64) -> u64 {
        let first = mix(self.seed.wrapping_add(edge));
        let rank = first & mix(first) & (self.vertices() - 1);
        self.labels.at(rank)
    }
}

/// The scale whose graph fits into `bytes` with about `degree` edges per vertex, and the number of edges that fill the
/// memory.
pub(crate) fn fit(bytes: u64, vertex_bytes: u64, edge_bytes: u64, degree: u64) -> (u32, u64) {
    let vertices = bytes / (vertex_bytes + degree * edge_bytes);
    // The nearest power of two by ratio: the degree stays within a factor of about 1.5.
    let scale = (vertices.max(1) * 3 / 2).ilog2().clamp(5, 40);
    let edges = (bytes >> scale).saturating_sub(vertex_bytes) << scale;
    (scale, edges / edge_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn lists_tile_the_adjacency_array(scale in 5u32..12, degree in 1u64..40, seed: u64) {
            let graph = Kronecker::new(scale, degree << scale, seed);
            let mut end = 0;
            for label in 0..graph.vertices() {
                let list = graph.list(label);
                prop_assert_eq!(list.start, end);
                end = list.end;
            }
            prop_assert_eq!(end, graph.edges());
            prop_assert!(end <= degree << scale);
            prop_assert!(end + (6 << (scale / 2 + 1)) >= degree << scale);
        }

        #[test]
        fn targets_are_drawn_by_their_degree(seed: u64) {
            let graph = Kronecker::new(12, 16 << 12, seed);
            let mut hits = vec![0u64; 1 << 12];
            for edge in 0..graph.edges() {
                hits[graph.target(edge) as usize] += 1;
            }
            // For each number of ones in the rank, in-degree equals out-degree.
            let mut sums = [(0.0, 0.0); 13];
            for label in 0..graph.vertices() {
                let sum = &mut sums[graph.labels.position(label).count_ones() as usize];
                sum.0 += hits[label as usize] as f64;
                sum.1 += graph.degree(label) as f64;
            }
            for (arrive, leave) in sums {
                prop_assert!((arrive - leave).abs() < 6.0 * leave.sqrt() + 30.0, "{:?}", sums);
            }
        }
    }

    #[test]
    fn a_few_vertices_have_most_edges_and_lie_scattered() {
        let graph = Kronecker::new(16, 32 << 16, 1);
        let mut degrees: Vec<u64> = (0..graph.vertices()).map(|l| graph.degree(l)).collect();
        let half: u64 = degrees[..1 << 15].iter().sum();
        let share = half as f64 / graph.edges() as f64;
        assert!(
            (0.45..0.55).contains(&share),
            "first half of the labels: {share}"
        );
        degrees.sort_unstable();
        let top: u64 = degrees[(1 << 16) / 10 * 9..].iter().sum();
        let share = top as f64 / graph.edges() as f64;
        assert!(share > 0.5, "the tenth with most edges has {share} of them");
    }

    proptest! {
        #[test]
        fn what_fits_fills_the_memory(mib in 16u64..1 << 18) {
            let bytes = mib << 20;
            let (scale, edges) = fit(bytes, 32, 8, 32);
            let used = (32u64 << scale) + edges * 8;
            prop_assert!(used <= bytes && used > bytes / 10 * 9, "{} of {}", used, bytes);
            let degree = edges >> scale;
            prop_assert!((16..=64).contains(&degree), "degree {}", degree);
        }
    }
}
