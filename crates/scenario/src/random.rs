//! Random scenarios: a new one for each seed and index, of any size, shape and heat.
//!
//! # Problem
//! A policy that was tuned to known scenarios may work well only there. It must be tested on unknown ones.
//!
//! # Approach
//! A case is drawn from one seed: first the machine and its size, then a kind of program, then its parameters. Sizes
//! and shares over a wide range are drawn by their logarithm.
//!
//! # Properties
//! - A case depends on seed and index only.
//! - Every case passes [`Scenario::check`], and its file loads as the same scenario.

use std::ops::RangeInclusive;

use crate::rng::{Rng, mix};
use crate::{
    Gups, Lab, Machine, MachinePlace, Mix, Part, Pattern, Scenario, Sim, System, Thp, Tier,
    Workload, Zipf,
};

/// Length of the timed phase, seconds.
const DURATION_S: u64 = 60;
/// Sizes of programs, MiB: 256 MiB to 64 GiB.
const SIZE_MIB: RangeInclusive<f64> = 256.0..=65536.0;
/// Most threads, as a power of two.
const THREADS_BITS_MAX: u64 = 4;
/// Approximate number of accesses of a thread per simulated second.
const ACCESSES_PER_S: u64 = 10_000_000;
/// Simulated accesses of a run, for a run time of seconds.
const ACCESSES_WANTED: u64 = 1 << 24;
/// The largest scale of the simulator: a page of 2 MiB.
const SCALE_BITS_MAX: u32 = 9;

impl Scenario {
    /// The random scenario `index` of `seed`.
    pub fn random(seed: u64, index: u64) -> Self {
        let mut draw = Draw(Rng::new(seed, index));
        let size_mib = draw.log(SIZE_MIB) as u64;
        let threads = draw.threads();
        let machine = draw.machine(size_mib, threads);
        let (kind, about, workload) = draw.program(size_mib, threads);
        Self {
            name: format!("{kind}-{index:03}-{seed}"),
            about: format!("Random: {about} in {size_mib} MiB, {threads} threads"),
            duration_s: DURATION_S,
            // TOML has no larger integers.
            seed: mix(seed ^ mix(index)) >> 1,
            systems: vec![System::None, System::Demeter, System::DemeterDamon],
            machine,
            workload,
            provision: None,
            agent: Default::default(),
            settings: vec![],
            vary: vec![],
            published: vec![],
            lab: Lab::default(),
            sim: Sim {
                scale_bits: Some(scale_bits(threads)),
                ..Sim::default()
            },
        }
    }
}

/// The smallest scale at which a run takes only seconds.
fn scale_bits(threads: u32) -> u32 {
    let accesses = DURATION_S * ACCESSES_PER_S * u64::from(threads);
    let fits = |bits: &u32| accesses >> bits <= ACCESSES_WANTED;
    (0..SCALE_BITS_MAX).find(fits).unwrap_or(SCALE_BITS_MAX)
}

/// Draws a case's parameters.
struct Draw(Rng);

impl Draw {
    /// A number from 0 to 1.
    fn share(&mut self) -> f64 {
        // The number of bits in a double's fraction.
        (self.0.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A uniform number in the range.
    fn even(&mut self, range: RangeInclusive<f64>) -> f64 {
        let (low, high) = range.into_inner();
        low + (high - low) * self.share()
    }

    /// A log-uniform number in the range.
    fn log(&mut self, range: RangeInclusive<f64>) -> f64 {
        let (low, high) = range.into_inner();
        (low * (high / low).powf(self.share())).clamp(low, high)
    }

    /// A uniform integer in the range.
    fn whole(&mut self, range: RangeInclusive<u64>) -> u64 {
        let (low, high) = range.into_inner();
        low + self.0.below(high - low + 1)
    }

    fn is_heads(&mut self) -> bool {
        self.0.below(2) == 0
    }

    /// One to sixteen: a power of two.
    fn threads(&mut self) -> u32 {
        1 << self.whole(0..=THREADS_BITS_MAX)
    }

    /// A machine whose slow tier alone can hold the program.
    fn machine(&mut self, size_mib: u64, threads: u32) -> Machine {
        let fast_mib = size_mib as f64 * self.log(0.125..=0.5);
        let fast_gbps = self.whole(60..=200);
        let tier = |usable_mib, latency_ns, bandwidth_gbps| Tier {
            usable_mib,
            latency_ns,
            bandwidth_gbps,
        };
        Machine {
            place: MachinePlace::Guest,
            vcpus: threads + self.whole(0..=2) as u32,
            thp: if self.is_heads() {
                Thp::Always
            } else {
                Thp::Never
            },
            fast: tier(fast_mib as u64, self.whole(70..=120), fast_gbps),
            slow: tier(size_mib, self.whole(140..=400), self.whole(20..=60)),
            hmat: true,
            node: vec![],
        }
    }

    /// A program: kind, description, parameters.
    fn program(&mut self, size_mib: u64, threads: u32) -> (&'static str, &'static str, Workload) {
        let compute_ns = self.compute_ns();
        let parts = |parts| {
            Workload::Mix(Mix {
                cold_mib: 0,
                threads,
                turns_s: None,
                compute_ns,
                parts,
            })
        };
        match self.whole(0..=6) {
            0 => (
                "gups",
                "a hot set at an end",
                self.hot_end(size_mib, threads, compute_ns),
            ),
            1 => {
                let placed = self.hot_somewhere(size_mib);
                ("place", "a hot set somewhere", parts(placed))
            }
            2 => {
                let hot = self.hot_part(size_mib);
                let moves_s = Some(self.log(1.0..=60.0) as u64);
                let moving = Part { moves_s, ..hot };
                ("moves", "a hot set that moves", parts(vec![moving]))
            }
            3 => {
                let zipf = Workload::Zipf(Zipf {
                    size_mib,
                    cold_mib: 0,
                    threads,
                    theta: self.even(0.6..=1.2),
                    store_share: self.even(0.0..=0.5),
                    whole_pages: self.is_heads(),
                    compute_ns,
                });
                ("zipf", "a law of popularity", zipf)
            }
            4 => {
                let uniform = self.part(size_mib, Pattern::Random);
                ("uniform", "accesses at random", parts(vec![uniform]))
            }
            5 => {
                let sweep = self.part(size_mib, Pattern::Sweep);
                ("sweep", "one sweep after the other", parts(vec![sweep]))
            }
            _ => {
                let several = self.several(size_mib);
                ("several", "parts of unequal heat", parts(several))
            }
        }
    }

    /// Computation between two accesses: none, or up to fifty times the time of an access.
    fn compute_ns(&mut self) -> u64 {
        match self.is_heads() {
            true => 0,
            false => self.log(10.0..=10_000.0) as u64,
        }
    }

    fn hot_end(&mut self, size_mib: u64, threads: u32, compute_ns: u64) -> Workload {
        let scattered = self.is_heads();
        // Scattered hot sets consist of whole blocks.
        let whole = |mib: u64| if scattered { (mib & !1).max(2) } else { mib };
        let (hot_mib, hot_weight) = (self.hot_mib(size_mib), self.even(0.5..=0.99));
        Workload::Gups(Gups {
            reverse: self.is_heads(),
            threads,
            scattered,
            compute_ns,
            ..Gups::new(whole(size_mib), whole(hot_mib), hot_weight)
        })
    }

    /// A hot set between two areas of cold memory.
    fn hot_somewhere(&mut self, size_mib: u64) -> Vec<Part> {
        let hot_mib = self.hot_mib(size_mib);
        let hot_weight = self.even(0.5..=0.99);
        let cold_mib = size_mib - hot_mib;
        let before_mib = self.whole(1..=cold_mib - 1);
        let stores = self.even(0.0..=0.5);
        let part = |size_mib: u64, share: f64| Part {
            share,
            stores,
            ..evenly(size_mib)
        };
        let cold = |mib: u64| part(mib, (1.0 - hot_weight) * mib as f64 / cold_mib as f64);
        vec![
            cold(before_mib),
            part(hot_mib, hot_weight),
            cold(cold_mib - before_mib),
        ]
    }

    /// A part with its own hot set.
    fn hot_part(&mut self, size_mib: u64) -> Part {
        Part {
            hot_mib: self.hot_mib(size_mib),
            hot_weight: self.even(0.5..=0.99),
            ..self.part(size_mib, Pattern::Random)
        }
    }

    fn part(&mut self, size_mib: u64, pattern: Pattern) -> Part {
        Part {
            pattern,
            stores: self.even(0.0..=1.0),
            ..evenly(size_mib)
        }
    }

    /// Two to five parts with different access patterns.
    fn several(&mut self, size_mib: u64) -> Vec<Part> {
        let count = self.whole(2..=5);
        let mut left_mib = size_mib;
        (0..count)
            .map(|n| {
                let others = count - n - 1;
                let own_mib = match others {
                    0 => left_mib,
                    // The rest is at least a half, so that some memory always remains.
                    _ => (left_mib as f64 * self.even(0.1..=0.5)) as u64,
                };
                left_mib -= own_mib;
                let part = match self.whole(0..=3) {
                    0 => self.part(own_mib, Pattern::Sweep),
                    1 => self.hot_part(own_mib),
                    _ => self.part(own_mib, Pattern::Random),
                };
                Part {
                    share: self.log(0.05..=1.0),
                    ..part
                }
            })
            .collect()
    }

    /// From a sixty-fourth to a half of a program: some hot sets fit fast memory, some do not.
    fn hot_mib(&mut self, size_mib: u64) -> u64 {
        ((size_mib as f64 * self.log(1.0 / 64.0..=0.5)) as u64).max(1)
    }
}

/// A part with uniform accesses.
fn evenly(size_mib: u64) -> Part {
    Part {
        size_mib,
        share: 1.0,
        pattern: Pattern::Random,
        stores: 0.0,
        hot_mib: 0,
        hot_weight: 0.0,
        moves_s: None,
        start_mib: None,
        grows_s: None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// A scenario without its name.
    fn content(seed: u64, index: u64) -> Scenario {
        Scenario {
            name: "x".into(),
            ..Scenario::random(seed, index)
        }
    }

    proptest! {
        #[test]
        fn every_case_is_sound_and_survives_its_file(seed: u64, index in 0u64..100_000) {
            let case = Scenario::random(seed, index);
            prop_assert!(case.check().is_ok(), "{:?}", case.check());
            let Machine { fast, slow, vcpus, .. } = &case.machine;
            let size_mib = case.workload.size_mib();
            prop_assert!((256..=65536).contains(&size_mib), "{}", size_mib);
            prop_assert!(slow.usable_mib >= size_mib && fast.usable_mib * 2 <= size_mib);
            prop_assert!((1..=18).contains(vcpus));
            let file: Scenario = toml::from_str(&toml::to_string(&case).unwrap()).unwrap();
            prop_assert_eq!(file, case);
        }

        #[test]
        fn a_seed_means_the_same_cases_and_no_two_are_alike(seed: u64, index in 0u64..100_000) {
            prop_assert_eq!(content(seed, index), content(seed, index));
            for other in [content(seed, index + 1), content(seed.wrapping_add(1), index)] {
                prop_assert_ne!(content(seed, index), other);
            }
        }
    }

    #[test]
    fn a_hundred_cases_have_every_kind_of_program() {
        let cases = || (0..100).map(|index| Scenario::random(7, index));
        let kind = |case: &Scenario| case.name.split('-').next().unwrap().to_owned();
        let kinds: BTreeSet<_> = cases().map(|case| kind(&case)).collect();
        assert_eq!(kinds.len(), 7, "{kinds:?}");
        let small = cases().filter(|case| case.workload.size_mib() < 4096);
        // Half of them are, on a logarithmic scale.
        assert!((35..=65).contains(&small.count()));
    }
}
