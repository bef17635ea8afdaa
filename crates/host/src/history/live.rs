//! Tests of histories on a real kernel: DAMON, move_pages and two nodes.
//!
//! A process that updates an array stands for a hypervisor. The test needs root and exclusive use
//! of DAMON. To run it in a VM, build this crate's static tests, put them into an initramfs and run
//! them with `--ignored --nocapture`.

use std::fs;

use demeter_linux::cpu;
use demeter_linux::mover::Mover;
use demeter_linux::nodes::NodeUsage;
use demeter_linux::testing::HotArray;
use demeter_policy::engine::Direction;
use demeter_policy::{Block, Level, MIB};

use super::*;
use crate::VmName;
use crate::config::Config;

const SIZE: u64 = 400 * MIB;
const HOT: u64 = SIZE / 8;
/// Limit of the array's fast memory.
const FAST: u64 = 150 * MIB;
const NAME: &str = "history::live::a_hot_eighth_is_promoted";

/// Bytes of these blocks that lie in fast memory.
fn in_fast(pid: Pid, range: &VirtRange, tiers: Pair) -> u64 {
    let mut pages = LivePages::default();
    let blocks: Vec<_> = Block::all_of(range).collect();
    let mut prober = demeter_linux::prober::Prober::new(tiers.into());
    let found = prober.look(&mut pages, pid, &[*range], &blocks).unwrap();
    found
        .iter()
        .map(|spread| spread.at(Level::First).fast.0)
        .sum()
}

#[tokio::test]
#[ignore = "needs root, two nodes, DAMON for itself and a minute"]
async fn a_hot_eighth_is_promoted() {
    let process = HotArray::start(NAME, SIZE);
    let (pid, array, hot) = (process.pid(), process.array, process.hot);
    let root = Path::new("/");
    // The test's thread is one of several in this process.
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let threads = threads.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let memory = VmMemory {
        process: pid,
        ranges: vec![array],
        vcpus: threads.map(|name| Pid(name.parse().unwrap())).collect(),
    };
    let tiers = Topology::read(root).unwrap().order().unwrap().pair;
    let text = format!(
        "pool = {{ fast_mib = 1000, slow_mib = 1000 }}\n[vm.a]\nqmp = \"/q\"\n\
         manage = \"history\"\nfast = {{ size_mib = {} }}\nslow = {{ size_mib = 500 }}\n",
        FAST / MIB
    );
    let config: Config = toml::from_str(&text).unwrap();
    let name: VmName = "a".parse().unwrap();
    let damon = SharedDamon::new(root, &config);
    let usage = |node| NodeUsage::read(root, node).unwrap().free.0 / MIB;
    // Start with the hot part in slow memory.
    let mut mover = Mover::new(tiers.into(), false);
    for blocks in Block::all_of(&hot).collect::<Vec<_>>().chunks(8) {
        let mut pages = LivePages::default();
        let moved = mover.migrate(
            &mut pages,
            (Level::First, Direction::Demotion),
            tiers.slow,
            pid,
            &[array],
            blocks,
        );
        moved.unwrap();
    }
    assert!(in_fast(pid, &hot, tiers) < HOT / 20);
    println!(
        "array of {} MiB, {} of it and {} of the hot part in fast memory; free: fast {}, slow {} MiB",
        array.len().0 / MIB,
        in_fast(pid, &array, tiers) / MIB,
        in_fast(pid, &hot, tiers) / MIB,
        usage(tiers.fast),
        usage(tiers.slow),
    );
    let before = own_cpu();
    let mine = damon.take(&name).unwrap();
    let vm = &config.vms[&name];
    // Without nodes of a pool the machine's are taken.
    let nodes = PerTier::default();
    let (mut tiering, reports) = HistoryTiering::start(root, vm, memory, &nodes, mine).unwrap();
    let deadline = || Instant::now() + Duration::from_secs(20);
    let set = tiering.set(Tier::Fast, ByteCount(FAST), deadline()).await;
    println!("{:?}", set.unwrap());
    let began = Instant::now();
    let mut share = 0.0;
    for _ in 0..12 {
        sleep(Duration::from_secs(5)).await;
        share = in_fast(pid, &hot, tiers) as f64 / HOT as f64;
        println!(
            "{:>3} s: {:.0} % of the hot part and {} MiB in all in fast memory; {:?} s of CPU; {:?}",
            began.elapsed().as_secs(),
            share * 100.0,
            in_fast(pid, &array, tiers) / MIB,
            own_cpu().saturating_sub(before),
            *reports.borrow(),
        );
    }
    assert!(in_fast(pid, &array, tiers) <= FAST);
    assert!(share >= 0.9, "{share} of the hot part in fast memory");
    drop(tiering);
    let kdamonds = fs::read_to_string("/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds");
    assert_eq!(kdamonds.unwrap().trim(), "0", "nothing stays behind");
}

/// CPU time of this process, without kdamonds.
fn own_cpu() -> Duration {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let tasks = tasks.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    tasks
        .filter_map(|task| cpu::of(Path::new("/"), Pid(task)))
        .sum()
}
