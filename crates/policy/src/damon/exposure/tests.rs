use std::num::NonZero;

use proptest::prelude::*;

use super::*;
use crate::addr::{MIB, PAGE_SIZE};
use crate::chance::Chance;

const LONG: Duration = Duration::from_millis(80);
const SHORT: Duration = Duration::from_millis(10);

fn region(start: u64, len: u64, accesses: u32, page_bytes: u64) -> Region {
    let range = VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(start + len)).unwrap();
    Region {
        pid: Pid(1),
        range,
        accesses,
        page_bytes: NonZero::new(page_bytes),
    }
}

fn block(number: u64, accesses: u32, page_bytes: u64) -> Region {
    region(number * 2 * MIB, 2 * MIB, accesses, page_bytes)
}

fn samples_of(exposures: &mut Exposures) -> Vec<Sample> {
    let mut out = Vec::new();
    exposures.samples(100_000, &mut out);
    out
}

fn count(samples: &[Sample], region: &Region) -> usize {
    let inside = |s: &&Sample| region.range.contains(s.addr);
    samples.iter().filter(inside).count()
}

/// Regions as four looks find them that are accessed at this rate a page.
fn found(rate: f64, interval: Duration) -> u32 {
    (4.0 * (1.0 - (-rate * interval.as_secs_f64()).exp())).round() as u32
}

#[test]
fn hot_small_pages_outweigh_cold_huge_ones_that_are_always_accessed() {
    // 90 % of 450,000 updates a second in 50 blocks of small pages, and 1/8 of the rest in as
    // many huge ones: 9000 and 125 a second in each block.
    let hot: Vec<_> = (0..50)
        .map(|b| block(b, found(9000.0 / 512.0, LONG), PAGE_SIZE))
        .collect();
    let cold = |interval| (50..100).map(move |b| block(b, found(125.0, interval), 2 * MIB));
    let mut exposures = Exposures::default();
    let all: Vec<_> = hot.clone().into_iter().chain(cold(LONG)).collect();
    exposures.add(0, LONG, 4, &all);
    assert!(exposures.is_saturated(0));
    let all: Vec<_> = (0..50)
        .map(|b| block(b, 1, PAGE_SIZE))
        .chain(cold(SHORT))
        .collect();
    exposures.add(1, SHORT, 4, &all);
    assert!(!exposures.is_saturated(1));

    let samples = samples_of(&mut exposures);
    let in_hot: usize = hot.iter().map(|r| count(&samples, r)).sum();
    assert!(in_hot >= 100, "{in_hot}");
    assert!(
        in_hot > 20 * (samples.len() - in_hot),
        "{in_hot} of {}",
        samples.len()
    );
}

#[test]
fn what_is_saturated_in_all_exposures_lies_between_lukewarm_and_hot() {
    let mut exposures = Exposures::default();
    let huge = block(1, 20, 2 * MIB);
    let (hot, lukewarm) = (block(2, 10, PAGE_SIZE), block(3, 1, PAGE_SIZE));
    exposures.add(0, LONG, 20, &[huge, hot, lukewarm]);
    exposures.add(1, SHORT, 20, &[huge]);
    let samples = samples_of(&mut exposures);
    let [huge, hot, lukewarm] = [huge, hot, lukewarm].map(|block| count(&samples, &block));
    assert!(lukewarm < huge && huge < hot, "{lukewarm} {huge} {hot}");
}

proptest! {
    /// What passes find once is nothing to the policy; that a few blocks are found again makes no difference, that one is
    /// found most of the time does.
    #[test]
    fn what_only_comes_by_is_not_told(
        passes in prop::collection::vec(0u64..150, 1..20), again in 0u64..4, staying in 0u64..3,
    ) {
        let mut exposures = Exposures::default();
        for &from in &passes {
            let found = |b: u64| match b {
                200.. => 3,
                _ if (from..from + again).contains(&b) => 2,
                _ => u32::from((from..from + 50).contains(&b)),
            };
            let regions: Vec<_> = (0..200 + staying).map(|b| block(b, found(b), PAGE_SIZE)).collect();
            exposures.add(0, LONG, 4, &regions);
            if staying == 0 {
                prop_assert!(!exposures.is_settled());
                prop_assert_eq!(samples_of(&mut exposures), vec![]);
            }
        }
        let is_first = passes.len() == 1;
        prop_assert!(staying == 0 || !is_first || exposures.is_settled());
    }
}

proptest! {
    #[test]
    fn only_what_the_last_long_pass_confirms_is_sighted(
        passes in prop::collection::vec(prop::collection::vec(prop::option::of(0u32..5), 8), 1..6),
        short in prop::collection::vec(0u32..5, 8),
    ) {
        let regions = |accesses: &[Option<u32>]| -> Vec<Region> {
            let all = (1..).zip(accesses);
            all.filter_map(|(b, accesses)| Some(block(b, (*accesses)?, PAGE_SIZE))).collect()
        };
        let mut exposures = Exposures::default();
        for pass in &passes {
            exposures.add(0, LONG, 4, &regions(pass));
        }
        let short: Vec<_> = short.into_iter().map(Some).collect();
        exposures.add(1, SHORT, 4, &regions(&short));
        let mut sighted = vec![];
        exposures.sightings(100_000, &mut sighted);
        for (b, accesses) in (1..).zip(&passes[passes.len() - 1]) {
            if accesses.unwrap_or(0) == 0 {
                prop_assert_eq!(count(&sighted, &block(b, 0, PAGE_SIZE)), 0);
            }
        }
        let mut few = vec![];
        exposures.sightings(3, &mut few);
        prop_assert!(few.len() <= 3);
    }
}

proptest! {
    #[test]
    fn what_was_not_touched_is_no_hotter_than_before_whatever_its_pages_are_now(
        passes in prop::collection::vec((1u32..5, any::<bool>()), 1..8),
        is_huge in prop::option::of(any::<bool>()),
    ) {
        let page_bytes = |is_huge| if is_huge { 2 * MIB } else { PAGE_SIZE };
        let mut exposures = Exposures::default();
        for (accesses, is_huge) in passes {
            exposures.add(0, LONG, 4, &[block(1, accesses, page_bytes(is_huge))]);
        }
        let rate = |exposures: &Exposures| exposures.heats().values().map(|heat| heat.rate).sum::<f64>();
        let before = rate(&exposures);
        // Of what was not touched nobody may have asked.
        exposures.add(0, LONG, 4, &[block(1, 0, is_huge.map_or(0, page_bytes))]);
        let after = rate(&exposures);
        prop_assert!(after <= before * (1.0 + 1e-9), "{} after {}", after, before);
    }

    #[test]
    fn a_huge_page_that_is_split_is_as_hot_as_before(accesses in 0u32..=20) {
        let mut exposures = Exposures::default();
        exposures.add(0, LONG, 20, &[block(1, accesses, 2 * MIB)]);
        let rate = |exposures: &Exposures| exposures.heats().values().map(|heat| heat.rate).sum::<f64>();
        let before = rate(&exposures);
        exposures.restate(&[block(1, 0, PAGE_SIZE)]);
        let after = rate(&exposures);
        prop_assert!((after - before).abs() <= before * 1e-6, "{} after {}", after, before);
    }
}

proptest! {
    #[test]
    fn sightings_owe_nothing_to_what_was_found_before(
        rounds in prop::collection::vec(prop::collection::vec((0u32..5, 0u32..5), 8), 1..6),
    ) {
        let sighted = |rounds: &[Vec<(u32, u32)>]| {
            let mut exposures = Exposures::default();
            for round in rounds {
                let regions = |found: fn(&(u32, u32)) -> u32| -> Vec<Region> {
                    let all = (1..).zip(round);
                    all.map(|(b, pair)| block(b, found(pair), PAGE_SIZE)).collect()
                };
                exposures.add(0, LONG, 4, &regions(|pair| pair.0));
                exposures.add(1, SHORT, 4, &regions(|pair| pair.1));
            }
            let mut sighted = vec![];
            exposures.sightings(100_000, &mut sighted);
            sighted
        };
        prop_assert_eq!(sighted(&rounds), sighted(&rounds[rounds.len() - 1..]));
    }
}

#[test]
fn what_a_round_cannot_tell_apart_is_sighted_as_it_was_known() {
    let mut exposures = Exposures::default();
    let (hot, warm) = (block(1, 4, PAGE_SIZE), block(2, 4, PAGE_SIZE));
    exposures.add(0, LONG, 4, &[hot, warm]);
    exposures.add(1, SHORT, 4, &[hot, block(2, 1, PAGE_SIZE)]);
    // A calm agent looks with the long exposure only.
    exposures.add(0, LONG, 2, &[hot, warm]);
    let mut sighted = vec![];
    exposures.sightings(100_000, &mut sighted);
    assert!(count(&sighted, &hot) > count(&sighted, &warm));
}

#[test]
fn what_moves_away_is_forgotten() {
    let mut exposures = Exposures::default();
    exposures.add(
        0,
        LONG,
        4,
        &[block(1, 3, PAGE_SIZE), block(2, 0, PAGE_SIZE)],
    );
    samples_of(&mut exposures);
    let (old, new) = (block(1, 0, PAGE_SIZE), block(2, 3, PAGE_SIZE));
    let mut held = (0.0, 0.0);
    for _ in 0..4 {
        exposures.add(0, LONG, 4, &[old, new]);
        let samples = samples_of(&mut exposures);
        let decayed = |held: f64, region| held / 2.0 + count(&samples, region) as f64;
        held = (decayed(held.0, &old), decayed(held.1, &new));
    }
    assert!(held.1 > 4.0 * held.0, "{held:?}");
}

#[test]
fn a_hot_set_that_jumps_is_a_surprise_and_chance_is_none() {
    let blocks = |hot: std::ops::Range<u64>, luck: u64| -> Vec<Region> {
        let accesses = |b: u64| match hot.contains(&b) {
            true => 2 + (b * 7 + luck) % 3,
            false => u64::from((b * 13 + luck).is_multiple_of(20)),
        };
        (0..400)
            .map(|b| block(b + 1, accesses(b) as u32, PAGE_SIZE))
            .collect()
    };
    let mut exposures = Exposures::default();
    for luck in 0..6 {
        assert!(!exposures.add(0, LONG, 4, &blocks(0..50, luck)));
    }
    assert!(exposures.add(0, LONG, 4, &blocks(200..250, 6)));
    assert_eq!(samples_of(&mut exposures), [], "once is not enough");
    assert!(!exposures.add(0, LONG, 4, &blocks(200..250, 7)));
    assert!(!exposures.add(0, LONG, 4, &blocks(200..250, 8)));
    let samples = samples_of(&mut exposures);
    let within = |b: u64| count(&samples, &block(b + 1, 0, PAGE_SIZE));
    let (old, new): (usize, usize) = ((0..50).map(within).sum(), (200..250).map(within).sum());
    assert!(new > 3 * old, "{new} {old}");
}

#[test]
fn what_stays_as_hot_as_it_was_is_seldom_a_surprise() {
    let mut passes = 0;
    let mut surprises = 0;
    for (seed, share) in (0..100).flat_map(|seed| [0.1, 0.3, 0.5, 0.7, 0.9].map(|p| (seed, p))) {
        let mut chance = Chance::new(seed);
        let mut exposures = Exposures::default();
        for _ in 0..8 {
            let mut accesses = || (0..5).filter(|_| chance.draw() < share).count() as u32;
            let regions: Vec<_> = (1..=100).map(|b| block(b, accesses(), 2 * MIB)).collect();
            passes += 1;
            surprises += u32::from(exposures.add(1, SHORT, 5, &regions));
        }
    }
    assert!(surprises * 500 <= passes, "{surprises} of {passes}");
}

fn any_regions() -> impl Strategy<Value = Vec<Region>> {
    let parts = (1u64..1 << 34, 0u32..8, any::<bool>());
    prop::collection::vec(parts, 0..60).prop_map(|sizes| {
        let mut next = PAGE_SIZE;
        let place = |(len, accesses, is_huge)| {
            let page_bytes = if is_huge { 2 * MIB } else { PAGE_SIZE };
            let region = region(next, len, accesses, page_bytes);
            next += len;
            region
        };
        sizes.into_iter().map(place).collect()
    })
}

proptest! {
    #[test]
    fn samples_lie_inside_and_are_no_more_than_was_found(
        passes in prop::collection::vec((0usize..3, any_regions()), 0..6),
        looks in 1u32..6,
        max in 0usize..300,
    ) {
        let mut exposures = Exposures::default();
        for (rung, regions) in &passes {
            let interval = LONG / (1 + *rung as u32 * 7);
            exposures.add(*rung, interval, looks, regions);
            let mut samples = Vec::new();
            exposures.samples(max, &mut samples);
            prop_assert!(samples.len() <= max);
            let all = || passes.iter().flat_map(|(_, regions)| regions);
            for sample in &samples {
                prop_assert!(all().any(|r| r.range.contains(sample.addr)));
            }
            // All passes together find no more than twice the looks of one.
            for region in regions {
                let here = samples.iter().filter(|s| s.addr == region.range.start()).count();
                prop_assert!(here <= 2 * looks as usize);
            }
        }
    }

    #[test]
    fn regions_to_look_at_again_are_in_order_and_disjoint(
        passes in prop::collection::vec((0usize..3, any_regions()), 1..6),
        looks in 1u32..6,
        most in 0usize..20,
    ) {
        let mut exposures = Exposures::default();
        for (rung, regions) in &passes {
            exposures.add(*rung, LONG / (1 + *rung as u32 * 7), looks, regions);
            samples_of(&mut exposures);
            let hottest = exposures.hottest(most);
            prop_assert!(hottest.len() <= most);
            for again in [hottest, exposures.saturated(*rung)] {
                prop_assert!(again.is_sorted_by(|(_, a), (_, b)| a.end() <= b.start()));
                prop_assert!(again.iter().all(|(_, range)| passes
                    .iter()
                    .flat_map(|(_, regions)| regions)
                    .any(|region| region.range == *range)));
            }
        }
    }

    #[test]
    fn the_policy_holds_what_was_seen(regions in any_regions(), looks in 4u32..8) {
        let mut exposures = Exposures::default();
        exposures.add(0, LONG, looks, &regions);
        let mut held = vec![0.0; regions.len()];
        let mut first = Vec::new();
        for epoch in 0..12 {
            let samples = samples_of(&mut exposures);
            for (held, region) in held.iter_mut().zip(&regions) {
                let new = count(&samples, region) as f64;
                *held = *held / 2.0 + new;
                prop_assert!(*held <= f64::from(region.accesses.min(looks)).ceil() + 2.0);
                prop_assert!(region.accesses > 0 || new == 0.0);
            }
            if epoch == 0 {
                first = held.clone();
            }
        }
        let (was, is): (f64, f64) = (first.iter().sum(), held.iter().sum());
        prop_assert!((was - is).abs() <= 1.0 + regions.len() as f64, "{was} {is}");
    }

    #[test]
    fn the_hotter_of_two_blocks_has_no_fewer_samples(
        found in prop::array::uniform2(0u32..=16),
        huge in prop::array::uniform2(any::<bool>()),
    ) {
        // Enough looks to leave rounding behind, and few enough of them that found an access.
        const LOOKS: u32 = 20;
        let page = |huge| if huge { 2 * MIB } else { PAGE_SIZE };
        let [a, b] = [0, 1].map(|i| block(i as u64 + 1, found[i], page(huge[i])));
        let mut exposures = Exposures::default();
        exposures.add(0, LONG, LOOKS, &[a, b]);
        let samples = samples_of(&mut exposures);
        let rate = |r: &Region| f64::from(r.accesses) * entries_of(r).unwrap();
        let (hot, cold) = if rate(&a) >= rate(&b) { (a, b) } else { (b, a) };
        prop_assert!(count(&samples, &hot) + 1 >= count(&samples, &cold));
    }
}
