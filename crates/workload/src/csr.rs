//! A Kronecker graph as adjacency arrays, and two kernels on it.
//!
//! # Problem
//! Graph programs read a large array of edges occasionally and a small array of vertices constantly. Their memory has a
//! natural hot part.
//!
//! # Approach
//! Edges follow the Graph500 generator (initiator 0.57, 0.19, 0.19, 0.05) with shuffled vertices. They are generated
//! twice from one seed, first to count and then to store. No separate list of edges is needed.
//!
//! # Properties
//! - Each edge is stored at both of its ends.
//! - Searches from any two vertices of a component reach the same vertices and edges.
//! - Ranks add up to one.

use super::rng::{Rng, scale};

/// The initiator's first three quadrants, in 65536ths.
const QUARTERS: [u64; 3] = [37_356, 12_452, 12_452];

/// Marks a vertex that no search has reached.
const UNREACHED: u32 = u32::MAX;

/// Damping factor of PageRank.
const DAMPING: f32 = 0.85;

/// An undirected graph.
pub(crate) struct Csr {
    /// Start of each vertex's neighbours; the last entry is the total.
    offsets: Vec<u64>,
    neighbours: Vec<u32>,
}

/// The result of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found {
    /// Number of vertices reached.
    pub(crate) vertices: u64,
    /// Number of edges examined.
    pub(crate) edges: u64,
}

impl Csr {
    /// A graph of `2^scale` vertices with `factor` edges each. `go_on` is called at intervals and may stop the
    /// construction.
    ///
    /// # Errors
    /// The first error of `go_on`.
    pub(crate) fn kronecker<E>(
        scale: u32,
        factor: u32,
        seed: u64,
        mut go_on: impl FnMut() -> Result<(), E>,
    ) -> Result<Self, E> {
        let vertices = 1usize << scale;
        let mut offsets = vec![0u64; vertices + 1];
        for_edges(scale, factor, seed, &mut go_on, |a, b| {
            offsets[a as usize + 1] += 1;
            offsets[b as usize + 1] += 1;
        })?;
        for vertex in 0..vertices {
            offsets[vertex + 1] += offsets[vertex];
        }
        let mut neighbours = vec![0u32; offsets[vertices] as usize];
        let mut next = offsets[..vertices].to_vec();
        let mut store = |at: u32, neighbour: u32| {
            let next = &mut next[at as usize];
            neighbours[*next as usize] = neighbour;
            *next += 1;
        };
        for_edges(scale, factor, seed, &mut go_on, |a, b| {
            store(a, b);
            store(b, a);
        })?;
        Ok(Self {
            offsets,
            neighbours,
        })
    }

    /// Number of vertices, connected or not.
    pub(crate) fn vertices(&self) -> u32 {
        (self.offsets.len() - 1) as u32
    }

    /// Address and size of the edges.
    pub(crate) fn edges_memory(&self) -> (u64, u64) {
        let bytes = size_of_val(&self.neighbours[..]) as u64;
        (self.neighbours.as_ptr() as u64, bytes)
    }

    fn of(&self, vertex: u32) -> &[u32] {
        let vertex = vertex as usize;
        &self.neighbours[self.offsets[vertex] as usize..self.offsets[vertex + 1] as usize]
    }

    /// The vertex with most neighbours among a few random ones, which is in the large component.
    pub(crate) fn source(&self, rng: &mut Rng) -> u32 {
        let candidates = (0..64).map(|_| scale(rng.next(), self.vertices().into()) as u32);
        candidates
            .max_by_key(|&vertex| self.of(vertex).len())
            .unwrap_or(0)
    }

    /// Searches breadth-first from `source`. `done` receives the number of edges examined, and returns whether to
    /// continue. An interrupted search has no result.
    pub(crate) fn search(
        &self,
        source: u32,
        parents: &mut Vec<u32>,
        queue: &mut Vec<u32>,
        mut done: impl FnMut(u64) -> bool,
    ) -> Option<Found> {
        parents.clear();
        parents.resize(self.vertices() as usize, UNREACHED);
        queue.clear();
        queue.push(source);
        parents[source as usize] = source;
        let (mut next, mut edges) = (0, 0);
        while let Some(&vertex) = queue.get(next) {
            next += 1;
            let neighbours = self.of(vertex);
            for &neighbour in neighbours {
                let parent = &mut parents[neighbour as usize];
                if *parent == UNREACHED {
                    *parent = vertex;
                    queue.push(neighbour);
                }
            }
            edges += neighbours.len() as u64;
            if !done(neighbours.len() as u64) {
                return None;
            }
        }
        Some(Found {
            vertices: queue.len() as u64,
            edges,
        })
    }

    /// Runs one step of PageRank over all edges; returns the sum of the ranks.
    pub(crate) fn rank(
        &self,
        ranks: &mut Vec<f32>,
        shares: &mut Vec<f32>,
        mut done: impl FnMut(u64) -> bool,
    ) -> Option<f64> {
        let vertices = self.vertices() as usize;
        if ranks.is_empty() {
            ranks.resize(vertices, 1.0 / vertices as f32);
        }
        shares.clear();
        let mut stranded = 0.0f64;
        for (vertex, rank) in ranks.iter().enumerate() {
            let degree = self.offsets[vertex + 1] - self.offsets[vertex];
            if degree == 0 {
                stranded += f64::from(*rank);
            }
            shares.push(rank / (degree.max(1) as f32));
        }
        let base = (f64::from(1.0 - DAMPING) + f64::from(DAMPING) * stranded) / vertices as f64;
        let mut sum = 0.0f64;
        for (vertex, rank) in (0..).zip(ranks) {
            let neighbours = self.of(vertex);
            let incoming: f32 = neighbours.iter().map(|&n| shares[n as usize]).sum();
            *rank = base as f32 + DAMPING * incoming;
            sum += f64::from(*rank);
            if !done(neighbours.len() as u64) {
                return None;
            }
        }
        Some(sum)
    }
}

/// Calls `edge` with both ends of every edge, except loops.
fn for_edges<E>(
    scale: u32,
    factor: u32,
    seed: u64,
    go_on: &mut impl FnMut() -> Result<(), E>,
    mut edge: impl FnMut(u32, u32),
) -> Result<(), E> {
    let mut rng = Rng::new(seed, 0);
    for number in 0..u64::from(factor) << scale {
        if number % (1 << 16) == 0 {
            go_on()?;
        }
        let (mut a, mut b, mut random) = (0u32, 0u32, 0u64);
        for level in 0..scale {
            // One random number serves four levels.
            random = if level % 4 == 0 {
                rng.next()
            } else {
                random >> 16
            };
            let draw = random & 0xffff;
            let (down, right) = match draw {
                _ if draw < QUARTERS[0] => (0, 0),
                _ if draw < QUARTERS[0] + QUARTERS[1] => (0, 1),
                _ if draw < QUARTERS[0] + QUARTERS[1] + QUARTERS[2] => (1, 0),
                _ => (1, 1),
            };
            (a, b) = (a << 1 | down, b << 1 | right);
        }
        let (a, b) = (shuffled(a, scale), shuffled(b, scale));
        if a != b {
            edge(a, b);
        }
    }
    Ok(())
}

/// A permutation of vertices, so that hubs are not adjacent.
fn shuffled(vertex: u32, scale: u32) -> u32 {
    let mask = (1u32 << scale) - 1;
    let mut x = vertex;
    for _ in 0..2 {
        x = x.wrapping_mul(0x9e37_79b1) & mask;
        x ^= x >> scale.div_ceil(2);
    }
    x
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Csr, shuffled};
    use crate::rng;

    fn graph(scale: u32, factor: u32, seed: u64) -> Csr {
        let made: Result<Csr, ()> = Csr::kronecker(scale, factor, seed, || Ok(()));
        made.unwrap()
    }

    proptest! {
        #[test]
        fn each_edge_is_stored_at_both_ends(scale in 1u32..8, factor in 1u32..9, seed: u64) {
            let graph = graph(scale, factor, seed);
            let count = |a: u32, b: u32| graph.of(a).iter().filter(|&&n| n == b).count();
            for a in 0..graph.vertices() {
                prop_assert_eq!(count(a, a), 0);
                for b in 0..a {
                    prop_assert_eq!(count(a, b), count(b, a));
                }
            }
        }

        #[test]
        fn all_of_a_component_find_the_same(scale in 1u32..8, factor in 1u32..9, seed: u64) {
            let graph = graph(scale, factor, seed);
            let (mut parents, mut queue) = (vec![], vec![]);
            let source = graph.source(&mut rng::Rng::new(seed, 1));
            let found = graph.search(source, &mut parents, &mut queue, |_| true).unwrap();
            for other in queue.clone() {
                let again = graph.search(other, &mut parents, &mut queue, |_| true).unwrap();
                prop_assert_eq!(again, found);
                for &reached in &queue {
                    let parent = parents[reached as usize];
                    prop_assert!(reached == other || graph.of(parent).contains(&reached));
                }
            }
        }

        #[test]
        fn ranks_add_up_to_one(scale in 1u32..10, factor in 1u32..9, seed: u64) {
            let graph = graph(scale, factor, seed);
            let (mut ranks, mut shares) = (vec![], vec![]);
            for _ in 0..5 {
                let sum = graph.rank(&mut ranks, &mut shares, |_| true).unwrap();
                prop_assert!((sum - 1.0).abs() < 1e-3, "{}", sum);
            }
        }

        #[test]
        fn shuffling_loses_no_vertex(scale in 1u32..12) {
            let mut seen: Vec<u32> = (0..1 << scale).map(|v| shuffled(v, scale)).collect();
            seen.sort_unstable();
            prop_assert!(seen.iter().enumerate().all(|(v, &s)| v as u32 == s));
        }
    }
}
