use proptest::prelude::*;

use super::*;
use crate::MIB;

const GIB: u64 = 1024 * MIB;

fn vma(start: u64, len: u64) -> VirtRange {
    VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(start + len)).unwrap()
}

/// A small deterministic stream of numbers, for samples in tests.
struct Stream(u64);

impl Stream {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        ((u128::from(self.0) * u128::from(n)) >> 64) as u64
    }
}

/// `n` samples an epoch in a VMA, `hot_percent` of them in `[hot, hot + hot_len)` (offsets).
fn epoch(
    c: &mut Classifier,
    s: &mut Stream,
    space: VirtRange,
    hot: (u64, u64),
    hot_percent: u64,
    n: u64,
) {
    for _ in 0..n {
        let offset = if s.below(100) < hot_percent {
            hot.0 + s.below(hot.1)
        } else {
            s.below(space.len().0)
        };
        c.add(GuestVirtAddr(space.start().0 + offset), 1);
    }
    c.end_epoch();
}

fn hottest(c: &Classifier) -> ClassifiedRange {
    c.ranges()
        .max_by(|a, b| {
            let density = |r: &ClassifiedRange| r.count / r.range.len().0 as f64;
            density(a).total_cmp(&density(b))
        })
        .unwrap()
}

#[test]
fn a_2_mib_hot_spot_in_1_tib_is_found_within_3_epochs() {
    for seed in 0..20 {
        for hot_percent in [10, 50, 90] {
            let space = vma(1 << 40, 1024 * GIB);
            let spot = (seed * 37 + 5) % 512 * 1024 * 2 * MIB;
            let mut c = Classifier::new(ClassifierConfig::default());
            c.set_space(&[space]);
            let mut s = Stream(seed);
            for _ in 0..3 {
                epoch(&mut c, &mut s, space, (spot, 2 * MIB), hot_percent, 3000);
            }
            assert_eq!(
                hottest(&c).range,
                vma(space.start().0 + spot, 2 * MIB),
                "seed {seed}, {hot_percent} %"
            );
            assert!(c.state_bytes() <= 256 << 10);
        }
    }
}

#[test]
fn a_hot_set_at_the_end_stands_out_after_one_epoch_of_few_samples() {
    let space = vma(1 << 40, 800 * MIB);
    for seed in 0..20 {
        let mut c = Classifier::new(ClassifierConfig::default());
        c.set_space(&[space]);
        epoch(
            &mut c,
            &mut Stream(seed),
            space,
            (700 * MIB, 100 * MIB),
            90,
            150,
        );
        let hot = hottest(&c).range;
        assert!(
            hot.start().0 >= space.start().0 + 670 * MIB,
            "seed {seed}: {hot}"
        );
        assert!(hot.len().0 >= 70 * MIB, "seed {seed}: {hot}");
    }
}

#[test]
fn uniform_traffic_is_not_split_for_long() {
    let space = vma(1 << 40, 16 * GIB);
    let mut c = Classifier::new(ClassifierConfig::default());
    c.set_space(&[space]);
    let mut s = Stream(3);
    for _ in 0..50 {
        epoch(&mut c, &mut s, space, (0, 16 * GIB), 100, 3000);
        assert!(c.ranges().len() <= 3, "{} ranges", c.ranges().len());
    }
}

#[test]
fn a_64_tib_space_costs_no_more_state() {
    let space = vma(0, 64 * 1024 * GIB);
    let mut c = Classifier::new(ClassifierConfig::default());
    c.set_space(&[space]);
    let mut s = Stream(5);
    for _ in 0..20 {
        epoch(&mut c, &mut s, space, (GIB, GIB), 50, 20_000);
    }
    assert!(c.state_bytes() <= 256 << 10, "{} bytes", c.state_bytes());
    assert_eq!(
        hottest(&c).range.intersection(&vma(GIB, GIB)),
        Some(hottest(&c).range)
    );
}

#[test]
fn a_vma_that_grows_keeps_what_is_known() {
    let mut c = Classifier::new(ClassifierConfig::default());
    let space = vma(1 << 40, 64 * MIB);
    c.set_space(&[space]);
    epoch(&mut c, &mut Stream(1), space, (0, 4 * MIB), 100, 1000);
    let before = hottest(&c);
    c.set_space(&[vma(1 << 40, 128 * MIB)]);
    assert_eq!(hottest(&c), before);
    assert_eq!(c.ranges().map(|r| r.range.len().0).sum::<u64>(), 128 * MIB);
    c.set_space(&[]);
    assert_eq!(c.ranges().len(), 0);
}

/// One step of a random life.
#[derive(Debug, Clone)]
enum Step {
    Space(Vec<(u64, u64)>),
    Samples(Vec<(u64, u32)>),
    EndEpoch,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => prop::collection::vec((0u64..4096, 1u64..512), 0..12).prop_map(Step::Space),
        3 => prop::collection::vec((0u64..4600, 1u32..40), 0..300).prop_map(Step::Samples),
        3 => Just(Step::EndEpoch),
    ]
}

fn run(
    steps: &[Step],
    max_ranges: usize,
    mut check: impl FnMut(&Classifier, &[VirtRange]),
) -> Vec<ClassifiedRange> {
    let config = ClassifierConfig {
        tau_split: 3,
        alpha: 1.0,
        max_ranges,
        ..Default::default()
    };
    let mut c = Classifier::new(config);
    let mut space = vec![];
    for step in steps {
        match step {
            Step::Space(vmas) => {
                space = vmas
                    .iter()
                    .map(|&(s, l)| vma(s * 2 * MIB, l * 2 * MIB))
                    .collect();
                c.set_space(&space);
            }
            Step::Samples(samples) => {
                for &(granule, n) in samples {
                    c.add(GuestVirtAddr(granule * 2 * MIB + 77), n);
                }
            }
            Step::EndEpoch => c.end_epoch(),
        }
        check(&c, &space);
    }
    c.ranges().collect()
}

proptest! {
    #[test]
    fn ranges_partition_the_space_within_the_bound(
        steps in prop::collection::vec(step(), 1..40), max_ranges in 24usize..64,
    ) {
        run(&steps, max_ranges, |c, space| {
            let ranges: Vec<_> = c.ranges().collect();
            assert!(ranges.len() <= max_ranges);
            assert!(ranges.windows(2).all(|w| w[0].range.end() <= w[1].range.start()));
            // Every VMA is covered without a gap, and nothing else is.
            for v in space {
                let covered: u64 = ranges.iter().filter_map(|r| r.range.intersection(v)).map(|r| r.len().0).sum();
                assert_eq!(covered, v.len().0);
            }
            for r in &ranges {
                let mut at = r.range.start();
                while at < r.range.end() {
                    assert!(space.iter().any(|v| v.contains(at)), "{at} is in no VMA");
                    at.0 += 2 * MIB;
                }
            }
        });
    }

    #[test]
    fn the_same_input_gives_the_same_ranges(steps in prop::collection::vec(step(), 1..30)) {
        prop_assert_eq!(run(&steps, 40, |_, _| ()), run(&steps, 40, |_, _| ()));
    }

    #[test]
    fn split_and_merge_conserve_counts(
        epochs in prop::collection::vec(prop::collection::vec((0u64..4096, 1u32..40), 0..300), 1..12),
    ) {
        let mut c = Classifier::new(ClassifierConfig { tau_split: 2, alpha: 1.0, ..Default::default() });
        c.set_space(&[vma(0, 4096 * 2 * MIB)]);
        let mut want = 0.0;
        let mut rounding = 0.0;
        for samples in &epochs {
            want /= 2.0;
            rounding += 4096.0 / 16.0;
            for &(granule, n) in samples {
                c.add(GuestVirtAddr(granule * 2 * MIB), n);
                want += f64::from(n);
            }
            c.end_epoch();
            let got: f64 = c.ranges().map(|r| r.count).sum();
            prop_assert!(got <= want + 1e-9 && got >= want - rounding, "{got} for {want}");
        }
        prop_assert_eq!(c.unplaced(), 0);
    }

    #[test]
    fn decay_reaches_zero_and_one_range_per_vma(
        samples in prop::collection::vec((0u64..512, 1u32..=u32::MAX), 0..300),
    ) {
        let mut c = Classifier::new(ClassifierConfig::default());
        c.set_space(&[vma(0, 512 * MIB), vma(GIB, 512 * MIB)]);
        for (granule, n) in samples {
            c.add(GuestVirtAddr(granule * 2 * MIB), n);
        }
        for _ in 0..40 {
            c.end_epoch();
        }
        prop_assert!(c.ranges().all(|r| r.count == 0.0));
        prop_assert_eq!(c.ranges().len(), 2);
    }

    #[test]
    fn forgetting_granules_conserves_counts(step in 1u64..7000, n in 8_000u64..40_000) {
        let mut c = Classifier::new(ClassifierConfig::default());
        c.set_space(&[vma(0, 64 * 1024 * GIB)]);
        for i in 0..n {
            c.add(GuestVirtAddr(i * step % (1 << 25) * 2 * MIB), 1);
        }
        c.end_epoch();
        let got: f64 = c.ranges().map(|r| r.count).sum();
        prop_assert_eq!(got, n as f64);
    }
}
