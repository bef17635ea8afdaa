//! liblinear-like dual coordinate descent: each instance of a sparse matrix updates one weight vector.
//!
//! An instance's features are streamed. The weight of each feature is read, and then read again and updated. Features
//! are skewed like words: some occur in many instances, most in few. The weights are a thirtieth of the memory, but get
//! two thirds of the accesses. They are allocated last, after the data was loaded, so the hot spot starts in slow
//! memory.

use demeter_policy::MIB;
use demeter_scenario as scenario;

use super::generator::Generator;
use super::memory::{Extent, ProgramMemory, load, region, store};
use super::rng::mix;
use super::scatter::Scatter;
use super::zipf::Zipf;
use crate::{Batch, Region};

const MATRIX: usize = 0;
const ALPHAS: usize = 1;
const WEIGHTS: usize = 2;

/// Features per instance: the mean of the data set kdda, 305.6 million over 8.4 million.
const FEATURES: u64 = 36;
/// Index and value of a feature.
const ENTRY: u64 = 16;
/// A number.
const NUMBER: u64 = 8;
/// Weights per ten instances: kdda has 20.2 million features.
const WEIGHTS_PER_TEN: u64 = 24;
/// Zipf exponent of feature popularity.
const THETA: f64 = 1.0;

/// Estimated: two multiplications and additions per feature.
const INSTANCE_PS: u64 = 40_000;

/// Accesses per instance.
const ACCESSES: usize = FEATURES as usize * 4 + 2;

pub(crate) struct Liblinear {
    seed: u64,
    instances: u64,
    popularity: Zipf,
    features: Scatter,
    threads: Vec<Thread>,
}

/// A thread's instances, in a new order in each pass.
struct Thread {
    first: u64,
    order: Scatter,
    next: u64,
    pass: u64,
}

impl Liblinear {
    pub(crate) fn new(app: &scenario::App, seed: u64) -> Self {
        let instance_bytes = FEATURES * ENTRY + NUMBER + WEIGHTS_PER_TEN * NUMBER / 10 + 1;
        let instances = app.size_mib * MIB / instance_bytes;
        let weights = instances * WEIGHTS_PER_TEN / 10;
        let threads = u64::from(app.threads);
        let thread = |i| {
            let first = instances * i / threads;
            Thread {
                first,
                order: Scatter::new(instances * (i + 1) / threads - first, mix(seed ^ i)),
                next: 0,
                pass: 0,
            }
        };
        Self {
            seed,
            instances,
            popularity: Zipf::new(weights, THETA),
            features: Scatter::new(weights, seed),
            threads: (0..threads).map(thread).collect(),
        }
    }

    /// The feature at `entry` of the matrix, constant over passes.
    #[inline]
    fn feature(&self, entry: u64) -> u64 {
        let rank = self.popularity.rank(mix(self.seed ^ entry));
        self.features.at(rank)
    }
}

impl Generator for Liblinear {
    fn regions(&self) -> Vec<Region> {
        vec![
            region("matrix", self.instances * FEATURES * ENTRY),
            region("alphas", self.instances * NUMBER),
            region("weights", self.features.count() * NUMBER),
        ]
    }

    fn threads(&self) -> u32 {
        self.threads.len() as u32
    }

    fn next(&mut self, memory: &ProgramMemory, thread: usize, _now_ns: u64, out: &mut Batch) {
        let [matrix, alphas, weights] = [MATRIX, ALPHAS, WEIGHTS].map(|region| memory.base(region));
        while out.room() >= ACCESSES {
            let Thread {
                first,
                order,
                next,
                pass,
            } = &mut self.threads[thread];
            // Each pass uses the scattered order from another start.
            let position = (*next + mix(*pass) % order.count()) % order.count();
            let instance = *first + order.at(position);
            *next += 1;
            if *next == order.count() {
                *next = 0;
                *pass += 1;
            }
            let entries = instance * FEATURES..(instance + 1) * FEATURES;
            let mut features = [0; FEATURES as usize];
            out.push(load(alphas + instance * NUMBER));
            for (feature, entry) in features.iter_mut().zip(entries) {
                *feature = weights + self.feature(entry) * NUMBER;
                out.push(load(matrix + entry * ENTRY));
                out.push(load(*feature));
            }
            for feature in features {
                out.push(load(feature));
                out.push(store(feature));
            }
            out.push(store(alphas + instance * NUMBER));
            out.ops += 1;
        }
    }

    fn hot(&self, _now_ns: u64) -> Vec<Extent> {
        // An instance's dual variable has 8 bytes beside its 576 in the matrix, and is read as often.
        let whole = |region, numbers: u64| Extent {
            region,
            offset: 0,
            bytes: numbers * NUMBER,
        };
        vec![
            whole(ALPHAS, self.instances),
            whole(WEIGHTS, self.features.count()),
        ]
    }

    fn compute_ps(&self, _thread: usize) -> u64 {
        INSTANCE_PS
    }
}
