//! Tests DAMON on a real kernel.
//!
//! It needs root, a kernel with DAMON and tracefs, and no other user of DAMON. A VM suffices: build this test static,
//! put it into an initramfs and run it with `--ignored --nocapture`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use demeter_guest::tracker::damon::DamonTracker;
use demeter_guest::tracker::{Settings, Tracker};
use demeter_linux::testing::HotArray;
use demeter_policy::{Block, MIB};

const SIZE: u64 = 800 * MIB;
const EPOCH: Duration = Duration::from_millis(500);
const EPOCHS: u32 = 24;
const NAME: &str = "a_hot_eighth_stands_out";

#[test]
#[ignore = "needs root, DAMON for itself and a minute"]
fn a_hot_eighth_stands_out() {
    let process = HotArray::start(NAME, SIZE);
    let (array, hot) = (process.array, process.hot);

    let admin = Path::new("/sys/kernel/mm/damon/admin/kdamonds");
    let mut tracker = DamonTracker::new(&Settings::default()).unwrap();
    tracker.set_targets(&[process.pid()]).unwrap();
    // Events and observation time of each block.
    let mut seen: BTreeMap<Block, (f64, f64)> = BTreeMap::new();
    for epoch in 1..=EPOCHS {
        std::thread::sleep(EPOCH);
        let drained = tracker.drain(&mut vec![], 100_000).unwrap();
        for found in tracker.observed() {
            let (events, exposure_s) = seen.entry(found.block).or_default();
            *events += f64::from(found.events);
            *exposure_s += found.exposure_ns as f64 / 1e9;
        }
        println!("epoch {epoch}: {drained:?}");
    }
    let rate = |is_hot: bool| {
        let blocks = Block::all_of(&array).filter(|b| hot.contains(b.start()) == is_hot);
        let rates: Vec<f64> = blocks
            .filter_map(|block| seen.get(&block).map(|(events, s)| events / s))
            .collect();
        (
            rates.len(),
            rates.iter().sum::<f64>() / rates.len().max(1) as f64,
        )
    };
    let ((hot, hot_rate), (cold, cold_rate)) = (rate(true), rate(false));
    println!("{hot} hot blocks at {hot_rate:.1}/s, {cold} cold ones at {cold_rate:.1}/s");
    assert!(
        hot as u64 * 2 * MIB * 10 >= SIZE,
        "{hot} of the hot blocks were seen"
    );
    assert!(hot_rate > 1.5 * cold_rate);

    drop(tracker);
    assert_eq!(
        fs::read_to_string(admin.join("nr_kdamonds"))
            .unwrap()
            .trim(),
        "0"
    );
}
