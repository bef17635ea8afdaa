//! silo: transactions on an in-memory record store with an index and moving hot records.
//!
//! There are two mixes. In `ycsb`, a transaction finds one record by a Zipf-distributed key and reads it; one in five
//! also updates it. Popular keys are scattered over the store; with `drift_s` the popular set changes. In `tpcc`, each
//! thread has its own part of the store (a warehouse). Half of the transactions insert an order of ten records and
//! update five scattered ones. The other half read an order, mostly recent ones. A part is a ring: a new order replaces
//! the oldest. Memory size is therefore constant, while the hot end moves through the store.

use demeter_policy::MIB;
use demeter_scenario::{self as scenario, SiloMix};

use super::generator::Generator;
use super::memory::{Extent, LINE, ProgramMemory, load, region, store};
use super::rng::{Rng, bound};
use super::scatter::Scatter;
use super::tree::{FANOUT, LOADS_MAX, NODE, Tree};
use super::zipf::Zipf;
use crate::{Batch, Region};

const RECORDS: usize = 0;
const INDEX: usize = 1;

/// Bytes of a record: YCSB's 100, rounded up to whole lines.
const RECORD: u64 = 2 * LINE;

/// Zipf exponent of YCSB.
const YCSB_THETA: f64 = 0.99;
/// Share of YCSB's transactions that update a record.
const YCSB_UPDATES: f64 = 0.2;
/// Estimated: begin, validate and commit of a small transaction.
const YCSB_PS: u64 = 700_000;

/// Records per order: TPC-C's mean number of lines.
const ORDER: u64 = 10;
/// Scattered records (stock) updated by a new order.
const STOCK: u64 = 5;
/// Zipf exponent over the age of orders that are read.
const AGE_THETA: f64 = 1.0;
/// Estimated: a whole TPC-C transaction, without the accesses below.
const TPCC_PS: u64 = 10_000_000;
/// Divisor of the number of orders: the newest part gets most reads and counts as hot.
const NEWEST: u64 = 16;

/// Maximum accesses of a transaction: a new order's.
const ACCESSES_MAX: usize = LOADS_MAX + 2 * ORDER as usize + STOCK as usize * (LOADS_MAX + 3);

pub(crate) struct Silo {
    index: Tree,
    mix: Mix,
    rngs: Vec<Rng>,
}

enum Mix {
    Ycsb {
        popularity: Zipf,
        keys: Scatter,
        updates_below: u64,
        drift_ns: Option<u64>,
    },
    Tpcc {
        age: Zipf,
        /// Orders per thread.
        orders: u64,
        /// Number of orders inserted by each thread.
        inserted: Vec<u64>,
    },
}

impl Silo {
    pub(crate) fn new(silo: &scenario::Silo, seed: u64) -> Self {
        // Each record's share of all index levels, and a partial node per level.
        let bytes = silo.size_mib * MIB - LOADS_MAX as u64 / 2 * NODE;
        let records = bytes / (RECORD + NODE.div_ceil(FANOUT - 1));
        let threads = u64::from(silo.threads);
        let mix = match silo.mix {
            SiloMix::Ycsb => Mix::Ycsb {
                popularity: Zipf::new(records, silo.theta.unwrap_or(YCSB_THETA)),
                keys: Scatter::new(records, seed),
                updates_below: bound(YCSB_UPDATES),
                drift_ns: silo.drift_s.map(|s| s * 1_000_000_000),
            },
            SiloMix::Tpcc => {
                let orders = records / threads / ORDER;
                Mix::Tpcc {
                    age: Zipf::new(orders, AGE_THETA),
                    orders,
                    inserted: vec![0; silo.threads as usize],
                }
            }
        };
        Self {
            index: Tree::new(records),
            mix,
            rngs: Rng::for_threads(seed, silo.threads),
        }
    }
}

/// The key at a popularity rank; the assignment changes every `drift_ns`.
fn drifted(rank: u64, records: u64, drift_ns: Option<u64>, now_ns: u64) -> u64 {
    let moves = drift_ns.map_or(0, |drift_ns| now_ns / drift_ns);
    // A move shifts by a seventh of the store, so no key soon returns to the top.
    (rank + moves % 7 * (records / 7)) % records
}

impl Generator for Silo {
    fn regions(&self) -> Vec<Region> {
        vec![
            region("records", self.index.keys() * RECORD),
            region("index", self.index.bytes()),
        ]
    }

    fn threads(&self) -> u32 {
        self.rngs.len() as u32
    }

    fn next(&mut self, memory: &ProgramMemory, thread: usize, now_ns: u64, out: &mut Batch) {
        let (records, base) = (memory.base(RECORDS), memory.base(INDEX));
        let (index, rng) = (&self.index, &mut self.rngs[thread]);
        while out.room() >= ACCESSES_MAX {
            match &mut self.mix {
                Mix::Ycsb {
                    popularity,
                    keys,
                    updates_below,
                    drift_ns,
                } => {
                    let rank = popularity.rank(rng.next());
                    let key = keys.at(drifted(rank, keys.count(), *drift_ns, now_ns));
                    let record = records + key * RECORD;
                    index.lookup(base, key, out);
                    out.push(load(record));
                    out.push(load(record + LINE));
                    if rng.next() < *updates_below {
                        out.push(store(record));
                    }
                }
                Mix::Tpcc {
                    age,
                    orders,
                    inserted,
                } => {
                    let first = thread as u64 * *orders;
                    let inserted = &mut inserted[thread];
                    if rng.next() >> 63 == 0 {
                        let key = (first + *inserted % *orders) * ORDER;
                        *inserted += 1;
                        index.lookup(base, key, out);
                        for line in 0..ORDER * RECORD / LINE {
                            out.push(store(records + key * RECORD + line * LINE));
                        }
                        for _ in 0..STOCK {
                            let key = first * ORDER + rng.below(*orders * ORDER);
                            let record = records + key * RECORD;
                            index.lookup(base, key, out);
                            out.push(load(record));
                            out.push(load(record + LINE));
                            out.push(store(record));
                        }
                    } else {
                        // Age 0 is the last inserted order.
                        let age = age.rank(rng.next()) + 1;
                        let key = (first + (*inserted + *orders - age) % *orders) * ORDER;
                        index.lookup(base, key, out);
                        for line in 0..ORDER * RECORD / LINE {
                            out.push(load(records + key * RECORD + line * LINE));
                        }
                    }
                }
            }
            out.end_operation();
        }
    }

    fn hot(&self, _now_ns: u64) -> Vec<Extent> {
        let mut hot = Vec::new();
        if let Mix::Tpcc {
            orders, inserted, ..
        } = &self.mix
        {
            let newest = orders.div_ceil(NEWEST);
            let mut add = |first: u64, orders: std::ops::Range<u64>| {
                hot.push(Extent {
                    region: RECORDS,
                    offset: (first + orders.start) * ORDER * RECORD,
                    bytes: (orders.end - orders.start) * ORDER * RECORD,
                });
            };
            for (thread, inserted) in inserted.iter().enumerate() {
                let first = thread as u64 * orders;
                let head = inserted % orders;
                add(first, head.saturating_sub(newest)..head);
                // The part behind the ring's end.
                add(first, orders - newest.saturating_sub(head)..*orders);
            }
        }
        hot.push(Extent {
            region: INDEX,
            offset: self.index.leaf_bytes(),
            bytes: self.index.bytes() - self.index.leaf_bytes(),
        });
        hot.retain(|extent| extent.bytes > 0);
        hot
    }

    fn compute_ps(&self, _thread: usize) -> u64 {
        match self.mix {
            Mix::Ycsb { .. } => YCSB_PS,
            Mix::Tpcc { .. } => TPCC_PS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_drift_changes_which_keys_are_popular(
            records in 100u64..1 << 40, now_ns in 0u64..1 << 40, rank in 0u64..14,
        ) {
            let at = |now_ns| drifted(rank, records, Some(1 << 30), now_ns);
            prop_assert!(at(now_ns) < records);
            prop_assert_eq!(at(now_ns), at(now_ns >> 30 << 30));
            prop_assert_ne!(at(now_ns), at(now_ns + (1 << 30)));
            prop_assert_eq!(drifted(rank, records, None, now_ns), rank);
        }
    }
}
