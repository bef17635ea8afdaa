//! Pull-based PageRank on a Kronecker graph: each vertex sums the contributions of its neighbours.
//!
//! Offsets, adjacency lists and scores are streamed. Contributions are read randomly, those of hubs most often. As in
//! GAP's program, the graph is loaded before scores and contributions are allocated. The graph therefore takes fast
//! memory, and the hot part comes last.

use demeter_policy::MIB;
use demeter_scenario as scenario;

use super::cyclic_walk::CyclicWalk;
use super::generator::Generator;
use super::kronecker::{Kronecker, fit};
use super::memory::{Extent, ProgramMemory, load, region, store};
use crate::{Batch, Region};

const OFFSETS: usize = 0;
const ADJACENCY: usize = 1;
const SCORES: usize = 2;
const CONTRIBUTIONS: usize = 3;

/// Start of a list.
const OFFSET: u64 = 8;
/// A score or a contribution.
const SCORE: u64 = 4;
/// A vertex in an adjacency list.
const VERTEX: u64 = 4;
/// Bytes per vertex in all arrays of vertices.
const VERTEX_BYTES: u64 = OFFSET + 2 * SCORE;
/// Edges per vertex.
const DEGREE: u64 = 32;

/// Estimated: an addition per edge that waits for the previous one.
const EDGE_PS: u64 = 500;

/// Maximum accesses per vertex, besides those of edges.
const VERTEX_ACCESSES: usize = 4;

pub(crate) struct Pagerank {
    graph: Kronecker,
    threads: Vec<Thread>,
}

/// A thread's vertices.
struct Thread {
    vertices: CyclicWalk,
    /// Edges of the vertex that are left.
    list: std::ops::Range<u64>,
}

impl Pagerank {
    pub(crate) fn new(app: &scenario::App, seed: u64, scale_bits: u32) -> Self {
        let (scale, edges) = fit(app.size_mib * MIB, VERTEX_BYTES, VERTEX, DEGREE);
        let graph = Kronecker::new(scale, edges, seed);
        let threads = u64::from(app.threads);
        let list_bytes = graph.edges() / graph.vertices() * VERTEX;
        let thread = |i| {
            let vertex = |i| graph.vertices() * i / threads;
            Thread {
                vertices: CyclicWalk::new(vertex(i)..vertex(i + 1), list_bytes, scale_bits),
                list: graph.list(vertex(i)),
            }
        };
        Self {
            threads: (0..threads).map(thread).collect(),
            graph,
        }
    }
}

impl Generator for Pagerank {
    fn regions(&self) -> Vec<Region> {
        let vertices = self.graph.vertices();
        vec![
            region("offsets", vertices * OFFSET),
            region("adjacency", self.graph.edges() * VERTEX),
            region("scores", vertices * SCORE),
            region("contributions", vertices * SCORE),
        ]
    }

    fn threads(&self) -> u32 {
        self.threads.len() as u32
    }

    fn next(&mut self, memory: &ProgramMemory, thread: usize, _now_ns: u64, out: &mut Batch) {
        let [offsets, scores, contributions, adjacency] =
            [OFFSETS, SCORES, CONTRIBUTIONS, ADJACENCY].map(|region| memory.base(region));
        let thread = &mut self.threads[thread];
        while out.room() > VERTEX_ACCESSES {
            let edges = ((out.room() / 2) as u64).min(thread.list.end - thread.list.start);
            for edge in thread.list.start..thread.list.start + edges {
                out.push(load(adjacency + edge * VERTEX));
                out.push(load(contributions + self.graph.target(edge) * SCORE));
            }
            out.ops += edges as u32;
            thread.list.start += edges;
            if out.room() < VERTEX_ACCESSES || !thread.list.is_empty() {
                return;
            }
            let vertex = thread.vertices.item();
            out.push(load(scores + vertex * SCORE));
            out.push(store(scores + vertex * SCORE));
            out.push(store(contributions + vertex * SCORE));
            thread.vertices.advance();
            let next = thread.vertices.item();
            thread.list = if next == vertex + 1 {
                // Lists are contiguous.
                thread.list.end..thread.list.end + self.graph.degree(next)
            } else {
                self.graph.list(next)
            };
            out.push(load(offsets + next * OFFSET));
        }
    }

    fn hot(&self, _now_ns: u64) -> Vec<Extent> {
        vec![Extent {
            region: CONTRIBUTIONS,
            offset: 0,
            bytes: self.graph.vertices() * SCORE,
        }]
    }

    fn compute_ps(&self, _thread: usize) -> u64 {
        EDGE_PS
    }
}
