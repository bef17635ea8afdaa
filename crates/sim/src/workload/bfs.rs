//! graph500: breadth-first searches of a Kronecker graph.
//!
//! A vertex comes from the queue; its offsets, its adjacency list and, for each neighbour, the
//! neighbour's parent are read; a vertex that was new gets a parent and a place in the queue. What
//! is of vertices is allocated first, so that the hot part lands in fast memory by itself.
//!
//! Which vertex is found when is not computed (that would take state as large as the graph): each
//! search takes the vertices in another scattered order, and each of them finds one new vertex,
//! the mean. Hubs are thus found no earlier than others.

use demeter_policy::MIB;
use demeter_scenario as scenario;

use super::generator::Generator;
use super::kronecker::{Kronecker, fit};
use super::memory::{Extent, ProgramMemory, load, region, store};
use super::rng::mix;
use super::scatter::Scatter;
use crate::{Batch, Region};

const OFFSETS: usize = 0;
const PARENTS: usize = 1;
const QUEUE: usize = 2;
const ADJACENCY: usize = 3;

/// Start and end of a list, as Graph500's reference code stores them.
const OFFSET: u64 = 16;
/// A vertex in any other array.
const VERTEX: u64 = 8;
/// Bytes of all arrays of vertices, for each.
const VERTEX_BYTES: u64 = OFFSET + 2 * VERTEX;
/// Edges for each vertex: Graph500's factor of 16, in both directions.
const DEGREE: u64 = 32;
/// How far the queue's end is ahead of its start: the frontier, as a share of all vertices.
const FRONTIER: u64 = 8;

/// Estimated: a comparison and a branch that is hard to predict, for each edge.
const EDGE_PS: u64 = 1_000;

/// Most accesses beside those of edges, for each vertex.
const VERTEX_ACCESSES: usize = 5;

pub(crate) struct Bfs {
    graph: Kronecker,
    order: Scatter,
    threads: Vec<Thread>,
}

/// One thread takes every n-th place of the queue.
struct Thread {
    place: u64,
    search: u64,
    /// Edges of the current vertex that are still to follow.
    list: std::ops::Range<u64>,
}

impl Bfs {
    pub(crate) fn new(app: &scenario::App, seed: u64) -> Self {
        let (scale, edges) = fit(app.size_mib * MIB, VERTEX_BYTES, VERTEX, DEGREE);
        let graph = Kronecker::new(scale, edges, seed);
        let thread = |place| Thread {
            place,
            search: 0,
            list: 0..0,
        };
        Self {
            order: Scatter::new(graph.vertices(), mix(seed)),
            graph,
            threads: (0..app.threads.into()).map(thread).collect(),
        }
    }

    /// The vertex at `place` of the queue in a search.
    fn vertex(&self, place: u64, search: u64) -> u64 {
        let mask = self.graph.vertices() - 1;
        self.order.at((place & mask) ^ (mix(search) & mask))
    }
}

impl Generator for Bfs {
    fn regions(&self) -> Vec<Region> {
        let vertices = self.graph.vertices();
        vec![
            region("offsets", vertices * OFFSET),
            region("parents", vertices * VERTEX),
            region("queue", vertices * VERTEX),
            region("adjacency", self.graph.edges() * VERTEX),
        ]
    }

    fn threads(&self) -> u32 {
        self.threads.len() as u32
    }

    fn next(&mut self, memory: &ProgramMemory, thread: usize, _now_ns: u64, out: &mut Batch) {
        let [offsets, parents, queue, adjacency] =
            [OFFSETS, PARENTS, QUEUE, ADJACENCY].map(|region| memory.base(region));
        let vertices = self.graph.vertices();
        let Thread {
            mut place,
            mut search,
            mut list,
        } = std::mem::replace(
            &mut self.threads[thread],
            Thread {
                place: 0,
                search: 0,
                list: 0..0,
            },
        );
        while out.room() > VERTEX_ACCESSES {
            if list.is_empty() {
                place += self.threads.len() as u64;
                if place >= vertices {
                    place = thread as u64;
                    search += 1;
                }
                let vertex = self.vertex(place, search);
                list = self.graph.list(vertex);
                // Vertices without edges are in no queue.
                if list.is_empty() {
                    continue;
                }
                out.push(load(queue + place * VERTEX));
                out.push(load(offsets + vertex * OFFSET));
                out.push(load(offsets + vertex * OFFSET + OFFSET / 2));
                let end = (place + vertices / FRONTIER) % vertices;
                out.push(store(parents + self.vertex(end, search) * VERTEX));
                out.push(store(queue + end * VERTEX));
            }
            let edges = ((out.room() / 2) as u64).min(list.end - list.start);
            for edge in list.start..list.start + edges {
                out.push(load(adjacency + edge * VERTEX));
                out.push(load(parents + self.graph.target(edge) * VERTEX));
            }
            out.ops += edges as u32;
            list.start += edges;
        }
        self.threads[thread] = Thread {
            place,
            search,
            list,
        };
    }

    fn hot(&self, _now_ns: u64) -> Vec<Extent> {
        let whole = |region, bytes| Extent {
            region,
            offset: 0,
            bytes: self.graph.vertices() * bytes,
        };
        vec![whole(OFFSETS, OFFSET), whole(PARENTS, VERTEX)]
    }

    fn compute_ps(&self, _thread: usize) -> u64 {
        EDGE_PS
    }
}
