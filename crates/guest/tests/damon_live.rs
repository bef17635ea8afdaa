//! DAMON on a real kernel. Needs root, a kernel with DAMON and tracefs, and nobody else using
//! DAMON; a VM will do: build this test static, make it part of an initramfs and run it with
//! `--ignored --nocapture`.

use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use demeter_guest::maps::read_maps;
use demeter_guest::tracker::damon::DamonTracker;
use demeter_guest::tracker::{Settings, Tracker};
use demeter_policy::{GuestVirtAddr, MIB, Pid, VirtRange};

const SIZE: u64 = 800 * MIB;
const HOT: u64 = SIZE / 8;
const EPOCH: Duration = Duration::from_millis(500);
const EPOCHS: u32 = 12;
/// Set in the child, which is the same test.
const CHILD: &str = "DEMETER_TEST_UPDATE_FOR_EVER";
const NAME: &str = "a_hot_eighth_stands_out";

/// 90 % of random updates go to the last eighth of an array.
fn update_for_ever() -> ! {
    /// Slows the loop to the rate of a program that misses its caches.
    const PAUSES: u32 = 1000;
    let mut memory = vec![1u64; (SIZE / 8) as usize];
    fs::write(std::env::var_os(CHILD).unwrap(), "ready").unwrap();
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    loop {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let words = if random.is_multiple_of(10) { SIZE } else { HOT } / 8;
        let index = SIZE / 8 - 1 - (random >> 16) % words;
        memory[index as usize] ^= random;
        for pause in 0..PAUSES {
            black_box(pause);
        }
    }
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "needs root, DAMON for itself and a minute"]
fn a_hot_eighth_stands_out() {
    if std::env::var_os(CHILD).is_some() {
        update_for_ever();
    }
    let ready = tempfile::NamedTempFile::new().unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", NAME])
        .env(CHILD, ready.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let pid = Pid(child.id());
    let _child = Killed(child);
    while fs::read_to_string(ready.path()).unwrap().is_empty() {
        std::thread::sleep(Duration::from_millis(50));
    }
    let vmas = read_maps(Path::new("/"), pid).unwrap();
    let array = vmas
        .iter()
        .map(|vma| vma.range)
        .find(|range| range.len().0 >= SIZE)
        .unwrap();
    let hot = VirtRange::new(GuestVirtAddr(array.end().0 - HOT), array.end()).unwrap();

    let admin = Path::new("/sys/kernel/mm/damon/admin/kdamonds");
    let mut tracker = DamonTracker::new(&Settings::default()).unwrap();
    tracker.set_targets(&[pid]).unwrap();
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
