//! graph: repeated searches or ranking of a Kronecker graph.
//!
//! Edges are read occasionally, data of vertices constantly. Every search of a component must match the first one, and
//! ranks must add up to one.

use std::sync::{Mutex, PoisonError};

use clap::{Parser, ValueEnum};

use super::args::Common;
use super::csr::Csr;
use super::event::{Output, Rate, WorkloadEvent};
use super::rng::Rng;
use super::wait::Waiter;
use super::{Error, single_worker};

/// Maximum error of the sum of all ranks, which have 24 bits of precision.
const SUM_ERROR_MAX: f64 = 0.01;

/// Breadth-first searches or PageRank of a Kronecker graph
#[derive(Debug, Clone, Parser)]
#[command(name = "graph", version)]
pub struct Graph {
    /// Operation on the graph
    #[arg(value_enum)]
    kernel: Kernel,
    /// The graph has two to this many vertices
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=28))]
    scale: u32,
    /// Edges for each vertex
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=64))]
    factor: u32,
    #[command(flatten)]
    common: Common,
}

/// The operation on the graph.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Kernel {
    /// Breadth-first searches from vertices at random
    Bfs,
    /// Ranks of all vertices by who points to them
    Pagerank,
}

/// Runs graph with these arguments. An operation is an examined edge.
pub fn run(args: &Graph) -> Result<(), Error> {
    let output = Output {
        json: args.common.json,
    };
    let waiter = Waiter::new()?;
    let graph = Csr::kronecker(args.scale, args.factor, args.common.seed, || waiter.check())?;
    // Memory of searches is touched before the timed phase, after the edges.
    let (mut parents, mut queue) = (vec![], vec![]);
    let (mut ranks, mut shares) = (vec![], vec![]);
    let mut rng = Rng::new(args.common.seed, 1);
    let go_on = |_| true;
    let expected = match args.kernel {
        Kernel::Bfs => graph.search(graph.source(&mut rng), &mut parents, &mut queue, go_on),
        Kernel::Pagerank => {
            graph.rank(&mut ranks, &mut shares, go_on);
            None
        }
    };
    waiter.check()?;
    let (start, bytes) = graph.edges_memory();
    let (hot_start, hot_bytes) = match args.kernel {
        Kernel::Bfs => (parents.as_ptr() as u64, size_of_val(&parents[..]) as u64),
        Kernel::Pagerank => (shares.as_ptr() as u64, size_of_val(&shares[..]) as u64),
    };
    output.say(&WorkloadEvent::Ready {
        start,
        bytes,
        hot_start,
        hot_bytes,
    })?;
    let state = Mutex::new((parents, queue, ranks, shares, rng));
    single_worker::run(&args.common, &waiter, Rate::mops, |control| {
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let (parents, queue, ranks, shares, rng) = &mut *state;
        let mut done = |edges| {
            control.done(0, edges);
            control.stage().is_some()
        };
        while control.stage().is_some() {
            match args.kernel {
                Kernel::Bfs => {
                    let found = graph.search(graph.source(rng), parents, queue, &mut done);
                    if found.is_some() && found != expected {
                        let what = format!("a search found {found:?}, the first {expected:?}");
                        return Err(Error::Wrong(what));
                    }
                }
                Kernel::Pagerank => {
                    let sum = graph.rank(ranks, shares, &mut done).unwrap_or(1.0);
                    if (sum - 1.0).abs() > SUM_ERROR_MAX {
                        return Err(Error::Wrong(format!("ranks add up to {sum}")));
                    }
                }
            }
        }
        Ok(())
    })
}
