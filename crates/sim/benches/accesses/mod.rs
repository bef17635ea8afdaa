//! Access patterns of the access loop benchmarks.

use std::time::Duration;

use demeter_policy::{ByteCount, GuestVirtAddr, MIB};
use demeter_sim::{Access, Testbed};

/// Number of accesses, generated in advance and run repeatedly.
pub const ACCESSES: usize = 1 << 21;

/// A benchmark case: accesses to a memory of a given size.
pub struct Case {
    /// Its name.
    pub name: &'static str,
    /// Size of the memory.
    pub size: ByteCount,
    /// The accesses in order.
    pub accesses: Vec<Access>,
}

/// All cases; large footprints need some hundred MiB of memory.
pub fn cases() -> Vec<Case> {
    let case = |name, bytes, accesses: fn(u64) -> Vec<Access>| Case {
        name,
        size: ByteCount(bytes),
        accesses: accesses(bytes),
    };
    vec![
        case("gups 256 MiB", 256 * MIB, |bytes| updates(bytes, false)),
        case("gups 16 GiB", 16 << 30, |bytes| updates(bytes, false)),
        case("hot and cold", 256 * MIB, |bytes| updates(bytes, true)),
        case("sequential", 256 * MIB, sequential),
    ]
}

/// CPU time of this thread, which excludes other load on the computer.
pub fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = stat.split(' ').next().and_then(|ns| ns.parse().ok());
    Duration::from_nanos(nanoseconds.expect("Linux counts the time of threads"))
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0) * u128::from(n)) >> 64) as u64
    }
}

/// Random 8-byte updates, a load and a store each. With `hot`, seven of eight go to the first 1/128.
fn updates(bytes: u64, hot: bool) -> Vec<Access> {
    let mut rng = Rng(88172645463325252);
    let mut accesses = Vec::with_capacity(ACCESSES);
    while accesses.len() < ACCESSES {
        let within = if hot && rng.below(8) < 7 {
            bytes / 128
        } else {
            bytes
        };
        let gva = GuestVirtAddr(Testbed::BASE.0 + rng.below(within / 8) * 8);
        accesses.extend([Access::load(gva), Access::store(gva)]);
    }
    accesses
}

fn sequential(bytes: u64) -> Vec<Access> {
    (0..ACCESSES as u64)
        .map(|i| Access::load(GuestVirtAddr(Testbed::BASE.0 + i * 8 % bytes)))
        .collect()
}
