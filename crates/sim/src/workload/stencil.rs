//! bwaves-like sweeps: repeated sparse matrix-vector products with 5 x 5 blocks, seven for each cell of a cube.
//!
//! For each cell, a sweep streams its blocks, reads the vector at the cell and its six neighbours, and writes the
//! result at the cell. The stream is nearly uniform; the planes around the current cell are read seven times. Vector
//! and result swap after each sweep. Blocks are read line by line: one access stands for the eight words of a line.

use demeter_policy::MIB;
use demeter_scenario as scenario;

use super::cyclic_walk::CyclicWalk;
use super::generator::Generator;
use super::memory::{Extent, LINE, ProgramMemory, load, region, store};
use crate::{Batch, Region};

const VECTORS: [usize; 2] = [0, 1];
const BLOCKS: usize = 2;

/// Five variables of 8 bytes.
const VARIABLES: u64 = 40;
/// Seven blocks of 25 numbers of 8 bytes.
const BLOCK_BYTES: u64 = 7 * 25 * 8;
/// Maximum accesses of a cell: its blocks' lines, its neighbours and itself, the result.
const CELL_MAX: usize = (BLOCK_BYTES / LINE) as usize + 2 + 7 + 1;

/// Estimated: 175 multiplications and additions, four per cycle.
const CELL_PS: u64 = 15_000;

pub(crate) struct Stencil {
    /// Cells along one edge of the cube.
    edge: u64,
    threads: Vec<Thread>,
}

/// A thread's slab of cells.
struct Thread {
    cells: CyclicWalk,
    round: usize,
}

impl Stencil {
    pub(crate) fn new(app: &scenario::App, scale_bits: u32) -> Self {
        let cells = app.size_mib * MIB / (2 * VARIABLES + BLOCK_BYTES);
        let edge = ((cells as f64).cbrt() as u64).max(1);
        let cells = edge.pow(3);
        let threads = u64::from(app.threads);
        let slab = |i| cells * i / threads..cells * (i + 1) / threads;
        let thread = |i| Thread {
            cells: CyclicWalk::new(slab(i), BLOCK_BYTES, scale_bits),
            round: 0,
        };
        Self {
            edge,
            threads: (0..threads).map(thread).collect(),
        }
    }
}

impl Generator for Stencil {
    fn regions(&self) -> Vec<Region> {
        let cells = self.edge.pow(3);
        vec![
            region("vector", cells * VARIABLES),
            region("result", cells * VARIABLES),
            region("blocks", cells * BLOCK_BYTES),
        ]
    }

    fn threads(&self) -> u32 {
        self.threads.len() as u32
    }

    fn next(&mut self, memory: &ProgramMemory, thread: usize, _now_ns: u64, out: &mut Batch) {
        let blocks = memory.base(BLOCKS);
        let (row, plane) = (self.edge, self.edge.pow(2));
        let last = self.edge.pow(3) - 1;
        let thread = &mut self.threads[thread];
        while out.room() >= CELL_MAX {
            let vector = memory.base(VECTORS[thread.round % 2]);
            let result = memory.base(VECTORS[(thread.round + 1) % 2]);
            let cell = thread.cells.item();
            // Cells of a row are contiguous; the faces of the cube end the neighbourhood.
            let neighbours = [
                cell.saturating_sub(plane),
                cell.saturating_sub(row),
                cell.saturating_sub(1),
                cell,
                (cell + 1).min(last),
                (cell + row).min(last),
                (cell + plane).min(last),
            ];
            for neighbour in neighbours {
                out.push(load(vector + neighbour * VARIABLES));
            }
            let (first, end) = (cell * BLOCK_BYTES, (cell + 1) * BLOCK_BYTES);
            let mut line = first.next_multiple_of(LINE);
            while line < end {
                out.push(load(blocks + line));
                line += LINE;
            }
            out.push(store(result + cell * VARIABLES));
            out.ops += 1;
            thread.round += usize::from(thread.cells.advance());
        }
    }

    fn hot(&self, _now_ns: u64) -> Vec<Extent> {
        Vec::new()
    }

    fn compute_ps(&self, _thread: usize) -> u64 {
        CELL_PS
    }
}
