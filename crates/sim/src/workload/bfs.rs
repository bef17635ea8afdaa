//! graph500: breadth-first searches of a Kronecker graph.
//!
//! The search takes a vertex from the queue. It reads the vertex's offsets and adjacency list, and the parent of each
//! neighbour. A new vertex gets a parent and a place in the queue. Arrays of vertices are allocated first, so the hot
//! part starts in fast memory.
//!
//! The true order of discovery is not computed, as that would need state as large as the graph. Each search takes the
//! vertices in a different scattered order, and each vertex discovers one new vertex, the mean. Hubs are therefore
//! found no earlier than others.

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

/// Start and end of a list, as in Graph500's reference code.
const OFFSET: u64 = 16;
/// An entry of any other array of vertices.
const VERTEX: u64 = 8;
/// Bytes per vertex in all arrays of vertices.
const VERTEX_BYTES: u64 = OFFSET + 2 * VERTEX;
/// Edges per vertex: Graph500's factor of 16, in both directions.
const DEGREE: u64 = 32;
/// Distance from the queue's start to its end (the frontier), as a divisor of the number of vertices.
const FRONTIER: u64 = 8;

/// Estimated: a comparison and a hard-to-predict branch per edge.
const EDGE_PS: u64 = 1_000;

/// Maximum accesses per vertex, besides those of edges.
const VERTEX_ACCESSES: usize = 5;

pub(crate) struct Bfs {
    graph: Kronecker,
    order: Scatter,
    threads: Vec<Thread>,
}

/// A thread, which takes every n-th place of the queue.
struct Thread {
    place: u64,
    search: u64,
    /// Edges of the current vertex that are left.
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

    /// The vertex at `place` of a search's queue.
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
                // Vertices without edges never enter a queue.
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
