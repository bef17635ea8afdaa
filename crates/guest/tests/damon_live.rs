//! DAMON on a real kernel. Needs root, a kernel with DAMON and tracefs, and nobody else using
//! DAMON; a VM will do: build this test static, make it part of an initramfs and run it with
//! `--ignored --nocapture`.

use std::fs;
use std::path::Path;
use std::time::Duration;

use demeter_guest::tracker::damon::DamonTracker;
use demeter_guest::tracker::{Settings, Tracker};
use demeter_linux::testing::HotArray;
use demeter_policy::{MIB, VirtRange};

const SIZE: u64 = 800 * MIB;
const EPOCH: Duration = Duration::from_millis(500);
const EPOCHS: u32 = 12;
const NAME: &str = "a_hot_eighth_stands_out";

#[test]
#[ignore = "needs root, DAMON for itself and a minute"]
fn a_hot_eighth_stands_out() {
    let process = HotArray::start(NAME, SIZE);
    let (array, hot) = (process.array, process.hot);

    let admin = Path::new("/sys/kernel/mm/damon/admin/kdamonds");
    let mut tracker = DamonTracker::new(&Settings::default()).unwrap();
    tracker.set_targets(&[process.pid()]).unwrap();
    let mut found = Vec::new();
    for epoch in 1..=EPOCHS {
        std::thread::sleep(EPOCH);
        let mut out = Vec::new();
        let before = std::time::Instant::now();
        let drained = tracker.drain(&mut out, 100_000).unwrap();
        let took = before.elapsed();
        let within = |range: VirtRange| out.iter().filter(|s| range.contains(s.addr)).count();
        let (in_hot, in_array) = (within(hot), within(array));
        let ratio = in_hot as f64 * 7.0 / (in_array - in_hot).max(1) as f64;
        println!(
            "epoch {epoch}: {} samples, {in_hot} of {in_array} hot, density {ratio:.1} to 1; \
             drain {took:?}; {drained:?}",
            out.len(),
        );
        found.push(ratio);
    }
    // The decision is made in the first epochs.
    let decided = found.iter().take(4).sum::<f64>() / 4.0;
    assert!(
        decided >= 1.5,
        "hot memory is only {decided:.1} times as dense as the rest"
    );

    drop(tracker);
    assert_eq!(
        fs::read_to_string(admin.join("nr_kdamonds"))
            .unwrap()
            .trim(),
        "0"
    );
}
