//! A simulated machine that tests how well the observer separates hot from cold memory, and its cost.

use std::num::NonZero;
use std::time::Duration;

use super::*;
use crate::chance::Chance;
use crate::{BLOCK_SIZE, GuestVirtAddr, VirtRange};

const PID: Pid = Pid(7);

/// Costs of looks: on hardware as in the simulator, and in the emulator as measured.
#[derive(Debug, Clone, Copy)]
struct Costs {
    look_s: f64,
    set_s: f64,
    /// Fixed cost of a pass.
    pass_s: f64,
}

const HARDWARE: Costs = Costs {
    look_s: 1.2e-6,
    set_s: 13e-6,
    pass_s: 1e-3,
};
const EMULATOR: Costs = Costs {
    look_s: 45e-6,
    set_s: 70e-6,
    pass_s: 16e-3,
};

/// Memory whose blocks are randomly accessed at known rates, and its observer.
struct Machine {
    observer: Observer,
    costs: Costs,
    /// Accesses per second of each block.
    rates: Vec<f64>,
    is_huge: fn(usize) -> bool,
    chance: Chance,
    now: Duration,
    spent_s: f64,
    passes: u32,
    told: Vec<(Pid, Block)>,
    /// Reported events and exposure of each block.
    seen: Vec<(f64, f64)>,
}

impl Machine {
    fn new(cpus: u32, costs: Costs, rates: Vec<f64>, is_huge: fn(usize) -> bool) -> Self {
        let mut observer = Observer::new(CPU_PERCENT, cpus, Duration::ZERO);
        let end = GuestVirtAddr(rates.len() as u64 * BLOCK_SIZE);
        observer.set_memory(PID, &[VirtRange::new(GuestVirtAddr(0), end).unwrap()]);
        Self {
            observer,
            costs,
            seen: vec![(0.0, 0.0); rates.len()],
            rates,
            is_huge,
            chance: Chance::new(1),
            now: Duration::ZERO,
            spent_s: 0.0,
            passes: 0,
            told: vec![],
        }
    }

    fn look(&mut self, look: &Look) {
        let Pass {
            interval, looks, ..
        } = look.pass;
        let own = look.blocks.len() as f64 * self.costs.look_s;
        let real_s = interval.as_secs_f64() + own;
        let mut find = |&(pid, block): &(Pid, Block)| {
            let b = block.0 as usize;
            let entries = if (self.is_huge)(b) { 1.0 } else { 512.0 };
            let share = -(-self.rates[b] / entries * real_s).exp_m1();
            let accesses = (0..looks).filter(|_| self.chance.draw() < share).count() as u32;
            let page_bytes = NonZero::new(BLOCK_SIZE / entries as u64);
            Found {
                pid,
                block,
                accesses,
                page_bytes: page_bytes.filter(|_| accesses > 0),
            }
        };
        let found: Vec<_> = look.blocks.iter().map(&mut find).collect();
        let is_kept = std::mem::replace(&mut self.told, look.blocks.clone()) == look.blocks;
        let set = if is_kept { 0 } else { look.blocks.len() as u64 };
        let setting_s = set as f64 * self.costs.set_s;
        let looking_s = own * f64::from(looks + 1) + self.costs.pass_s;
        self.spent_s += setting_s + looking_s;
        self.passes += 1;
        let elapsed = Duration::from_secs_f64(real_s * f64::from(looks));
        self.now += elapsed + interval + Duration::from_secs_f64(setting_s + self.costs.pass_s);
        let cost = Cost {
            looking: Duration::from_secs_f64(looking_s),
            setting: Duration::from_secs_f64(setting_s),
            set,
        };
        let mut out = vec![];
        self.observer.found(look, elapsed, &cost, &found, &mut out);
        for seen in out {
            let (events, exposure) = &mut self.seen[seen.block.0 as usize];
            *events += f64::from(seen.events);
            *exposure += seen.exposure_ns as f64;
        }
    }

    /// Runs the observer until this time.
    fn run(&mut self, until: Duration) {
        while self.now < until {
            match self.observer.next(self.now) {
                Next::Look(look) => self.look(&look),
                Next::Rest(due) => self.now = due.min(until),
                Next::Idle => return,
            }
        }
    }

    /// Runs until each block was looked at, and its round is over.
    fn cover(&mut self) {
        while self.observer.unknown() > 0 || !self.observer.round.is_over() {
            match self.observer.next(self.now) {
                Next::Look(look) => self.look(&look),
                Next::Rest(due) => self.now = due,
                Next::Idle => return,
            }
        }
    }

    /// The share of hot blocks among the blocks with the highest estimates.
    fn found_hot(&self) -> f64 {
        let estimate = |b: usize| self.seen[b].0 / self.seen[b].1.max(1.0);
        let mut blocks: Vec<usize> = (0..self.rates.len()).collect();
        blocks.sort_by(|&a, &b| estimate(b).total_cmp(&estimate(a)));
        let hottest = self.rates.iter().copied().fold(0.0, f64::max);
        let is_hot = |&b: &usize| self.rates[b] > hottest / 2.0;
        let hot = blocks.iter().filter(|b| is_hot(b)).count();
        let found = blocks[..hot].iter().filter(|b| is_hot(b)).count();
        found as f64 / hot as f64
    }
}

/// Nine of ten accesses go to a tenth of the memory: at the end, or every tenth block.
fn gups(blocks: usize, total: f64, is_scattered: bool) -> Vec<f64> {
    let hot = blocks / 10;
    let is_hot = |b: usize| match is_scattered {
        true => b % 10 == 3,
        false => b >= blocks - hot,
    };
    let rate = |b: usize| {
        let hot_part = if is_hot(b) { 0.9 / hot as f64 } else { 0.0 };
        total * (hot_part + 0.1 / blocks as f64)
    };
    (0..blocks).map(rate).collect()
}

const SMALL: fn(usize) -> bool = |_| false;
const HUGE: fn(usize) -> bool = |_| true;
const MIXED: fn(usize) -> bool = |b| b % 3 == 0;

#[test]
fn the_first_cover_tells_hot_from_cold_in_seconds() {
    // Blocks, CPUs, accesses per second, share of the hot set that must be found, seconds, and allowed CPU seconds.
    // With 1 TiB, a cold block is sometimes found accessed as often as the least accessed hot ones.
    let sizes = [
        (400, 2, 4e6, 0.99, 1.5, 0.06),
        (32_768, 16, 8e7, 0.99, 8.0, 1.5),
        (524_288, 64, 4e8, 0.9, 120.0, 26.0),
    ];
    for (blocks, cpus, total, least, wall_s, cpu_s) in sizes {
        for (name, pages) in [("mixed", MIXED), ("huge", HUGE), ("small", SMALL)] {
            for is_scattered in [false, true] {
                // The largest size takes a while.
                if blocks > 100_000 && !(is_scattered && name == "mixed") {
                    continue;
                }
                let rates = gups(blocks, total, is_scattered);
                let mut machine = Machine::new(cpus, HARDWARE, rates, pages);
                machine.cover();
                let hot = machine.found_hot();
                let took_s = machine.now.as_secs_f64();
                let what = format!(
                    "{blocks} blocks, {name} pages, scattered {is_scattered}: {hot:.4} found in \
                     {took_s:.2} s, {:.3} s of CPU, {} passes",
                    machine.spent_s, machine.passes
                );
                println!("{what}");
                assert!(hot >= least, "{what}");
                assert!(took_s <= wall_s, "{what}");
                assert!(machine.spent_s <= cpu_s, "{what}");
            }
        }
    }
}

#[test]
fn a_settled_agent_looks_for_little() {
    let sizes: [(_, _, _, &[_], _); 2] = [
        (32_768, 16, 8e7, &[SMALL, HUGE], 0.4),
        (524_288, 64, 4e8, &[HUGE], 1.5),
    ];
    for (blocks, cpus, total, kinds, percent) in sizes {
        for &pages in kinds {
            let mut machine = Machine::new(cpus, HARDWARE, gups(blocks, total, false), pages);
            machine.cover();
            machine.observer.set_prospect(Prospect {
                is_calm: true,
                earned: 1.0,
                promised: 0.0,
            });
            machine.run(machine.now + Duration::from_secs(30));
            let (before_s, began) = (machine.spent_s, machine.now);
            machine.run(began + Duration::from_secs(120));
            let spent = (machine.spent_s - before_s) / 120.0 * 100.0;
            println!("{blocks} blocks settled: {spent:.3} % of one CPU");
            assert!(spent <= percent, "{blocks} blocks: {spent} % of one CPU");
        }
    }
}

#[test]
fn a_hot_set_that_has_moved_is_found_again() {
    for pages in [SMALL, HUGE] {
        let blocks = 32_768;
        let mut machine = Machine::new(16, HARDWARE, gups(blocks, 8e7, false), pages);
        machine.observer.set_prospect(Prospect {
            is_calm: false,
            earned: 1.0,
            promised: 0.0,
        });
        machine.cover();
        machine.run(machine.now + Duration::from_secs(30));
        machine.rates.rotate_right(blocks / 3);
        machine.seen.fill((0.0, 0.0));
        machine.run(machine.now + Duration::from_secs(60));
        let hot = machine.found_hot();
        println!("moved: {hot:.3}");
        assert!(hot >= 0.99, "{hot}");
    }
}

#[test]
fn in_an_emulated_vm_of_8_gib_hot_memory_is_found_within_a_minute() {
    // One of seven looks finds a hot small page accessed.
    for (pages, early, late) in [(SMALL, 0.55, 0.75), (HUGE, 0.97, 0.97)] {
        let mut machine = Machine::new(1, EMULATOR, gups(4000, 4.8e5, false), pages);
        // Exchanges would save a fifth of the time.
        machine.observer.set_prospect(Prospect {
            promised: 0.2,
            ..Prospect::OPEN
        });
        for (until_s, least) in [(25, early), (60, late)] {
            machine.run(Duration::from_secs(until_s));
            let (hot, spent_s) = (machine.found_hot(), machine.spent_s);
            println!("8 GiB emulated: after {until_s} s and {spent_s:.2} s of CPU {hot:.3}");
            assert!(hot > least, "{hot} after {until_s} s");
            assert!(
                spent_s <= 2.2 + 0.025 * until_s as f64,
                "{spent_s} s of CPU"
            );
        }
    }
}
