//! Tests of the whole module on a simulated kernel, with nodes that fill up and pages that move.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use demeter_linux::pages::simulated::{SharedPages, SimulatedPages};
use demeter_policy::{BLOCK_SIZE, Block, NodeId};
use tempfile::TempDir;

use super::*;
use crate::VmName;
use crate::config::Config;
use crate::hard_limit::tests::FakeRoot;
use crate::outside::Outside;
use crate::testing::FakeVm;

const VMM: Pid = Pid(9);
const VCPU: Pid = Pid(10);
const TIERS: Pair = Pair {
    fast: NodeId(0),
    slow: NodeId(1),
};
/// First block of the VM's memory.
const FIRST: u64 = 512;
const BLOCKS: u64 = 40;
/// Blocks that lie in fast memory at first.
const IN_FAST: u64 = 16;

fn blocks(range: std::ops::Range<u64>) -> ByteCount {
    ByteCount((range.end - range.start) * BLOCK_SIZE)
}

fn range(start: u64, end: u64) -> VirtRange {
    VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(end)).unwrap()
}

/// Behaviour of the guest.
#[derive(Debug, Default)]
struct Guest {
    accessed: Vec<u64>,
    run_ms: u64,
    waited_ms: u64,
    /// Its run time during a scan.
    runs_ms: u64,
    fails: bool,
}

/// Access bits of a guest that runs during scans.
struct FakeBits {
    root: PathBuf,
    guest: Arc<Mutex<Guest>>,
}

fn run_for(root: &Path, guest: &mut Guest, ms: u64) {
    guest.run_ms += ms;
    let folder = root.join(format!("proc/{VCPU}"));
    fs::create_dir_all(&folder).unwrap();
    let [ran, waited] = [guest.run_ms, guest.waited_ms].map(|ms| ms * 1_000_000);
    // Rename makes the update atomic for readers, like the kernel's.
    let new = folder.join("new");
    fs::write(&new, format!("{ran} {waited} 1\n")).unwrap();
    fs::rename(new, folder.join("schedstat")).unwrap();
}

impl AccessBits for FakeBits {
    fn look(
        &mut self,
        _window: Duration,
        accessed: &mut Vec<GuestVirtAddr>,
    ) -> Result<Duration, DamonError> {
        let mut guest = self.guest.lock().unwrap();
        if guest.fails {
            return Err(DamonError::Unavailable {
                why: "somebody else has taken DAMON".into(),
                hint: "ask for it back".into(),
            });
        }
        accessed.extend(guest.accessed.iter().map(|&b| Block(FIRST + b).start()));
        if !guest.accessed.is_empty() {
            let ms = guest.runs_ms;
            run_for(&self.root, &mut guest, ms);
        }
        Ok(Duration::ZERO)
    }
}

struct Vm {
    tiering: HistoryTiering,
    reports: watch::Receiver<HistoryState>,
    pages: SharedPages,
    guest: Arc<Mutex<Guest>>,
    root: TempDir,
}

fn config(slow_mib: u64) -> VmConfig {
    let text = format!(
        "pool = {{ fast_mib = 1000, slow_mib = 1000 }}\n[vm.a]\nqmp = \"/q\"\n\
         manage = \"history\"\nfast = {{ size_mib = 32 }}\nslow = {{ size_mib = {slow_mib} }}\n"
    );
    let config: Config = toml::from_str(&text).unwrap();
    config.check().unwrap();
    config.vms.into_values().next().unwrap()
}

/// A VM of huge pages that accesses these blocks.
fn start(accessed: impl IntoIterator<Item = u64>, slow_mib: u64) -> Result<Vm, HistoryError> {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join("proc")).unwrap();
    let free = 100 * BLOCK_SIZE;
    let mut pages = SimulatedPages::new(free, free);
    for block in 0..BLOCKS {
        let node = NodeId((block >= IN_FAST).into());
        pages.map_block(VMM, FIRST + block, true, node);
    }
    let pages = SharedPages::new(pages, Some(root.path().into()));
    let guest = Arc::new(Mutex::new(Guest {
        accessed: accessed.into_iter().collect(),
        runs_ms: 200,
        ..Guest::default()
    }));
    run_for(root.path(), &mut guest.lock().unwrap(), 200);
    let memory = VmMemory {
        process: VMM,
        ranges: vec![range(FIRST * BLOCK_SIZE, (FIRST + BLOCKS) * BLOCK_SIZE)],
        vcpus: vec![VCPU],
    };
    let bits = FakeBits {
        root: root.path().into(),
        guest: guest.clone(),
    };
    let (tiering, reports) = HistoryTiering::with(
        root.path(),
        &config(slow_mib),
        memory,
        TIERS,
        Box::new(pages.clone()),
        Box::new(bits),
    )?;
    Ok(Vm {
        tiering,
        reports,
        pages,
        guest,
        root,
    })
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// The reported working set.
fn used(state: &HistoryState) -> Option<ByteCount> {
    let nodes = state.usage.as_ref()?.nodes.iter();
    Some(ByteCount(nodes.map(|node| node.working_set.0).sum()))
}

impl Vm {
    fn in_fast(&self, block: u64) -> bool {
        let addr = Block(FIRST + block).start();
        let mut out = vec![];
        self.pages.clone().locate(VMM, &[addr], &mut out).unwrap();
        out == [demeter_linux::pages::PageState::On(TIERS.fast)]
    }

    /// Waits until the working set is reported with this size.
    async fn uses(&mut self, bytes: ByteCount) {
        let deadline = soon();
        loop {
            let state = self.reports.borrow_and_update().clone();
            if used(&state) == Some(bytes) {
                return;
            }
            assert!(Instant::now() < deadline, "{state:?}");
            let _ = timeout_at(deadline, self.reports.changed()).await;
        }
    }

    /// Waits until all these blocks lie in fast memory.
    async fn promotes(&mut self, blocks: std::ops::Range<u64>) {
        let deadline = soon();
        while !blocks.clone().all(|block| self.in_fast(block)) {
            assert!(Instant::now() < deadline, "{:?}", self.reports.borrow());
            // The answer comes between two turns.
            self.tiering.actual(deadline).await.unwrap();
        }
    }
}

#[tokio::test]
async fn hot_memory_takes_the_place_of_cold_memory_within_what_the_vm_may_have() {
    let mut vm = start(30..38, 100).unwrap();
    let whole = blocks(0..BLOCKS);
    let owned = vm.tiering.actual(soon()).await.unwrap();
    assert_eq!((owned.fast, owned.slow), (blocks(0..IN_FAST), whole));
    vm.promotes(30..38).await;
    let on_fast = vm.pages.lock().on(VMM, TIERS.fast);
    assert!(on_fast <= blocks(0..IN_FAST), "{on_fast}");
    // The working set is reported, too.
    vm.uses(blocks(30..38)).await;
    // Newly hot blocks replace the old ones.
    vm.guest.lock().unwrap().accessed = (20..30).collect();
    vm.promotes(20..30).await;
}

#[tokio::test]
async fn what_a_vm_uses_is_not_known_before_anything_can_be_hot() {
    let mut vm = start(30..38, 100).unwrap();
    let is_known = |state: &HistoryState| {
        let usage = state.usage.as_ref();
        usage.is_some_and(|usage| usage.fast_hit.is_some())
    };
    let first = timeout_at(soon(), vm.reports.wait_for(is_known)).await;
    let usage = first.unwrap().unwrap().usage.clone().unwrap();
    let set: u64 = usage.nodes.iter().map(|node| node.working_set.0).sum();
    assert_eq!(ByteCount(set), blocks(30..38));
}

#[tokio::test]
async fn a_vm_that_falls_asleep_uses_nothing_until_it_wakes() {
    let mut vm = start(30..38, 100).unwrap();
    vm.uses(blocks(30..38)).await;
    vm.guest.lock().unwrap().accessed.clear();
    // The last scans find nothing accessed, which is no evidence; then the CPU's clock stands
    // still.
    vm.uses(ByteCount(0)).await;
    let usage = vm.reports.borrow().usage.clone().unwrap();
    assert!(usage.fast_hit.is_some(), "it is known, and nothing");
    {
        let mut guest = vm.guest.lock().unwrap();
        guest.accessed = (30..38).collect();
        run_for(vm.root.path(), &mut guest, 200);
    }
    vm.uses(blocks(30..38)).await;
}

/// The CPU still accesses the same blocks, but wants only a twentieth of the time.
#[tokio::test]
async fn a_vm_that_hardly_wants_to_run_uses_nothing_and_one_that_waits_for_a_cpu_does() {
    let mut vm = start(30..38, 100).unwrap();
    vm.uses(blocks(30..38)).await;
    vm.guest.lock().unwrap().runs_ms = 0;
    let (guest, root) = (vm.guest.clone(), vm.root.path().to_owned());
    let waits = Arc::new(Mutex::new(true));
    let runs = tokio::spawn({
        let waits = waits.clone();
        async move {
            let mut ticks = tokio::time::interval(Duration::from_millis(100));
            loop {
                ticks.tick().await;
                let mut guest = guest.lock().unwrap();
                if *waits.lock().unwrap() {
                    guest.waited_ms += 95;
                }
                run_for(&root, &mut guest, 5);
            }
        }
    });
    // One scan comes every two seconds.
    let mut reports = vm.reports.clone();
    let idle = timeout_at(
        Instant::now() + Duration::from_secs(3),
        reports.wait_for(|state| used(state) == Some(ByteCount(0))),
    );
    assert!(idle.await.is_err(), "it waits for a CPU");
    *waits.lock().unwrap() = false;
    vm.uses(ByteCount(0)).await;
    runs.abort();
}

#[tokio::test]
async fn a_vm_that_sleeps_gives_memory_back_and_gets_more() {
    let mut vm = start([], 100).unwrap();
    let less = blocks(0..6);
    let shrunk = vm.tiering.set(Tier::Fast, less, soon()).await.unwrap();
    assert_eq!((shrunk.owned, shrunk.reason), (less, None));
    assert!(shrunk.returned_to_host >= blocks(6..IN_FAST));
    assert!(vm.pages.lock().on(VMM, TIERS.fast) <= less);
    let more = blocks(0..20);
    let grown = vm.tiering.set(Tier::Fast, more, soon()).await.unwrap();
    assert_eq!((grown.owned, grown.reason), (more, None));
    let owned = vm.tiering.actual(soon()).await.unwrap();
    assert_eq!(owned.fast, more, "what it may have is its own");
    // All of it may end up in slow memory.
    let slow = vm.tiering.set(Tier::Slow, less, soon()).await.unwrap();
    assert_eq!(slow.owned, blocks(0..BLOCKS));
    assert!(slow.reason.is_some());
    drop(vm.root);
}

/// Fast memory is full, except for the reserve of 4 MiB.
#[tokio::test]
async fn a_vm_keeps_what_it_may_have_when_it_gets_less() {
    let mut vm = start(30..38, 100).unwrap();
    let less = blocks(0..10);
    vm.tiering.set(Tier::Fast, less, soon()).await.unwrap();
    for _ in 0..10 {
        // The answer comes between two turns.
        vm.tiering.actual(soon()).await.unwrap();
        let on_fast = vm.pages.lock().on(VMM, TIERS.fast);
        assert!((blocks(0..8)..=less).contains(&on_fast), "{on_fast}");
    }
}

#[tokio::test]
async fn memory_that_does_not_move_is_told_in_time() {
    let mut vm = start([], 100).unwrap();
    {
        let mut pages = vm.pages.lock();
        for block in 0..IN_FAST {
            pages.stuck.insert((VMM, (FIRST + block) * BLOCK_SIZE));
        }
    }
    let deadline = Instant::now() + Duration::from_millis(600);
    let short = vm.tiering.set(Tier::Fast, ByteCount(0), deadline).await;
    let short = short.unwrap();
    assert_eq!(short.owned, blocks(0..IN_FAST));
    assert!(short.reason.unwrap().contains("not moved out yet"));
}

#[tokio::test]
async fn who_loses_damon_says_why_and_is_not_there() {
    let mut vm = start([1], 100).unwrap();
    vm.guest.lock().unwrap().fails = true;
    let failed = vm.reports.wait_for(|report| report.failed.is_some());
    let report = timeout_at(soon(), failed).await.unwrap().unwrap().clone();
    let why = report.failed.unwrap();
    assert!(why.contains("somebody else") && why.contains("manage = \"agent\""));
    let asked = vm.tiering.actual(soon()).await;
    assert!(matches!(asked, Err(ProvisionError::Unreachable(_))));
}

#[test]
fn a_vm_whose_memory_the_slow_tier_may_not_hold_is_refused() {
    let refused = start([], 79).err().unwrap().to_string();
    assert!(refused.contains("80 MiB") && refused.contains("79 MiB"));
}

#[tokio::test]
async fn the_vms_memory_is_found_in_its_hypervisor() {
    let size = TierBytes {
        fast: ByteCount(4 << 20),
        slow: ByteCount(8 << 20),
    };
    let vm = FakeVm::new(size);
    let outside = Outside::default();
    let found = VmMemory::find(Path::new("/"), &outside, &vm.connect().await).await;
    let found = found.unwrap();
    assert_eq!(found.size(), ByteCount(12 << 20));
    let own = Pid(std::process::id());
    assert_eq!((found.process, found.vcpus), (own, vec![own]));
    vm.state().pinned = true;
    let refused = VmMemory::find(Path::new("/"), &outside, &vm.simulated()).await;
    let why = refused.unwrap_err().to_string();
    assert!(why.contains("gpu0 pins the VM's memory"), "{why}");
}

#[test]
fn ranges_that_touch_are_one_and_memory_of_files_is_refused() {
    let ranges = vec![range(30, 40), range(0, 10), range(10, 20), range(35, 50)];
    assert_eq!(joined(ranges), [range(0, 20), range(30, 50)]);
    let vma = |start, end, kind| Vma {
        range: range(start, end),
        readable: true,
        writable: true,
        kind,
        backing: None,
    };
    let vmas = [
        vma(0, 10, VmaKind::Anonymous),
        vma(10, 20, VmaKind::Shmem),
        vma(30, 40, VmaKind::File),
    ];
    let refused = |start, end| check_movable(&range(start, end), &vmas).err();
    assert!(refused(5, 15).is_none());
    let why = refused(15, 35).unwrap().to_string();
    assert!(why.contains("hugetlbfs") && why.contains("memory-backend-ram"));
    assert!(refused(50, 60).unwrap().to_string().contains("not mapped"));
}

/// DAMON's sysfs files for two kdamonds.
fn fake_damon(root: &Path) -> PathBuf {
    let admin = root.join("sys/kernel/mm/damon/admin/kdamonds");
    let fake = |file: &str, text: &str| {
        let path = admin.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    fake("nr_kdamonds", "0\n");
    for kdamond in 0..2 {
        fake(&format!("{kdamond}/state"), "off\n");
        fake(&format!("{kdamond}/contexts/nr_contexts"), "");
        let context = format!("{kdamond}/contexts/0");
        fake(&format!("{context}/avail_operations"), "vaddr\nfvaddr\n");
        fake(&format!("{context}/operations"), "");
        let intervals = format!("{context}/monitoring_attrs/intervals");
        fake(&format!("{intervals}/update_us"), "");
    }
    admin.join("nr_kdamonds")
}

#[test]
fn vms_share_damon_and_the_last_gives_it_back() {
    let root = tempfile::tempdir().unwrap();
    let vm = |name: &str| -> VmName { name.parse().unwrap() };
    let damon = SharedDamon::of(root.path(), [vm("a"), vm("b")]);
    let missing = HistoryError::from(damon.take(&vm("a")).unwrap_err());
    assert!(missing.to_string().contains("CONFIG_DAMON_SYSFS"));
    let count = fake_damon(root.path());
    let kdamonds = || fs::read_to_string(&count).unwrap().trim().to_owned();
    let first = damon.take(&vm("a")).unwrap();
    let second = damon.take(&vm("b")).unwrap();
    assert_eq!(kdamonds(), "2");
    assert!(damon.take(&vm("c")).is_err());
    drop(first);
    assert_eq!(kdamonds(), "2");
    drop(second);
    assert_eq!(kdamonds(), "0");
    drop(damon.take(&vm("a")).unwrap());
    assert_eq!(kdamonds(), "0", "it can be taken again");
}

#[test]
fn memory_moves_between_nodes_of_its_pool() {
    let root = FakeRoot::new();
    root.has_nodes(&[(0, "0"), (1, "1"), (2, ""), (3, ""), (5, "")]);
    let meminfo = root.path().join("sys/devices/system/node/node5/meminfo");
    fs::write(
        meminfo,
        "Node 5 MemTotal: 8388608 kB\nNode 5 MemFree: 1 kB\n",
    )
    .unwrap();
    let topology = Topology::read(root.path()).unwrap();
    let pair = |fast: &[u32], slow: &[u32]| {
        let nodes = |of: &[u32]| of.iter().copied().map(NodeId).collect();
        let pool = PerTier {
            fast: nodes(fast),
            slow: nodes(slow),
        };
        let Pair { fast, slow } = pair(&topology, &pool).unwrap();
        (fast.0, slow.0)
    };
    assert_eq!(pair(&[1], &[3]), (1, 3));
    assert_eq!(pair(&[1], &[2, 3]), (1, 2), "the first of equal ones");
    assert_eq!(pair(&[1], &[2, 5]), (1, 5), "the largest");
    let of_machine = topology.order().unwrap().pair;
    assert_eq!(pair(&[], &[]), (of_machine.fast.0, of_machine.slow.0));
}
