//! The conformance suite of every [`Hypervisor`], over a simulated VM.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use demeter_policy::{ByteCount, GuestPhysAddr, MIB, NodeId, PhysRange, Tier, TierBytes};
use tokio::time::{sleep, timeout};

use super::{Connection, Event, HostVirtAddr, Hypervisor, HypervisorError, MemoryBackend};
use crate::testing::{FakeVm, Told};

const SIZE: TierBytes = TierBytes {
    fast: ByteCount(4 * MIB),
    slow: ByteCount(8 * MIB),
};

async fn soon<T>(future: impl Future<Output = T>) -> T {
    let limit = Duration::from_secs(10);
    timeout(limit, future).await.expect("in time")
}

/// Differences between hypervisors.
struct Traits {
    /// Guest-physical addresses of slow memory.
    slow: Vec<PhysRange>,
    /// Whether memory can be plugged in and size changes are reported.
    grows: bool,
}

impl Traits {
    /// Whether `count` events are right after `happened`. A hypervisor that polls may report a
    /// change twice.
    fn is_count(&self, count: u64, happened: u64) -> bool {
        match self.grows {
            true => count == happened,
            false => (happened..=2 * happened).contains(&count),
        }
    }

    fn of_qemu() -> Self {
        Self {
            slow: vec![range(4 * MIB, 4 * MIB), range(1 << 32, 4 * MIB)],
            grows: true,
        }
    }
}

fn range(start: u64, bytes: u64) -> PhysRange {
    PhysRange::new(GuestPhysAddr(start), ByteCount(bytes)).unwrap()
}

async fn conforms<H: Hypervisor>(vm: FakeVm, connection: Connection<H>, traits: Traits) {
    let Connection {
        hypervisor,
        mut events,
        process,
        ..
    } = connection;
    assert_eq!(process.pid.0, std::process::id(), "who has the memory");
    assert!(!hypervisor.name().is_empty());

    let boot = maps_memory(&vm, &hypervisor, &traits).await;
    if traits.grows {
        plugs(&vm, &hypervisor, boot).await;
    }

    assert_eq!(hypervisor.vcpus().await.unwrap(), [process.pid]);

    assert_eq!(hypervisor.pinning_device().await.unwrap(), None);
    vm.state().pinned = true;
    let pinning = hypervisor.pinning_device().await.unwrap();
    assert_eq!(pinning.as_deref(), Some("gpu0"));

    // The balloon reaches the requested size.
    let size = ByteCount(2 * MIB);
    hypervisor.request_balloon_size(size).await.unwrap();
    soon(async {
        while hypervisor.balloon_size().await.unwrap() != size {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    if traits.grows {
        resizes(&vm, &hypervisor).await;
    } else {
        let refused = hypervisor.request_size("vm1", size).await;
        assert!(matches!(refused, Err(HypervisorError::Failed(_))));
    }

    // An answer comes after all events of what happened before the question.
    for event in [Event::Changed, Event::Reset] {
        let before = hypervisor.events_told();
        vm.tell(Told::Event(event));
        soon(hypervisor.catch_up()).await.unwrap();
        let count = hypervisor.events_told() - before;
        assert!(traits.is_count(count, 1), "{count}");
        let told = timeout(Duration::ZERO, events.next()).await;
        assert_eq!(told, Ok(Some(event)), "without waiting");
        for _ in 1..count {
            let told = timeout(Duration::ZERO, events.next()).await;
            assert_eq!(told, Ok(Some(Event::Changed)));
        }
    }

    // Events come in order, and so does the end of the connection.
    let before = hypervisor.events_told();
    vm.tell(Told::Event(Event::Reset));
    vm.tell(Told::Event(Event::Changed));
    assert_eq!(soon(events.next()).await, Some(Event::Reset));
    assert_eq!(soon(events.next()).await, Some(Event::Changed));
    vm.state().silent = true;
    let silent = soon(hypervisor.backends()).await;
    assert!(
        matches!(silent, Err(HypervisorError::Timeout(_))),
        "{silent:?}"
    );
    drop(vm);
    // A hypervisor that polls may find one change in two polls.
    let mut last = soon(events.next()).await;
    while last == Some(Event::Changed) && !traits.grows {
        last = soon(events.next()).await;
    }
    assert_eq!(last, None);
    let count = hypervisor.events_told() - before;
    assert!(traits.is_count(count, 3), "the end counts: {count}");
}

/// Memory lies at the reported addresses. Returns that of the fast node.
async fn maps_memory(vm: &FakeVm, hypervisor: &impl Hypervisor, traits: &Traits) -> HostVirtAddr {
    let backend = |id: &str, size, shared| MemoryBackend {
        id: Some(id.into()),
        size,
        shared,
    };
    let all = |shared| {
        [
            backend("node0", SIZE.fast, shared),
            backend("node1", SIZE.slow, shared),
        ]
    };
    assert_eq!(hypervisor.backends().await.unwrap(), all(true));
    vm.state().private = true;
    assert_eq!(hypervisor.backends().await.unwrap(), all(false));
    let map = hypervisor.memory_map("node1").await.unwrap();
    let guest: Vec<_> = map.iter().map(|mapping| mapping.guest).collect();
    assert_eq!(guest, traits.slow);
    let boot = hypervisor.memory_map("node0").await.unwrap();
    assert_eq!(boot.len(), 1);
    let memory = File::options().write(true).open("/proc/self/mem").unwrap();
    for (mapping, byte) in map.iter().zip(1..) {
        memory.write_all_at(&[byte], mapping.host.0).unwrap();
    }
    let mut offset = 0;
    for (mapping, byte) in map.iter().zip(1..) {
        let mut read = [0];
        let file = vm.file(Tier::Slow);
        file.read_exact_at(&mut read, offset).unwrap();
        assert_eq!(read, [byte]);
        offset += mapping.guest.len().0;
    }
    assert_eq!(hypervisor.memory_map("node2").await.unwrap(), []);
    boot[0].host
}

/// Plugged memory is not a backend that the VM was started with.
async fn plugs(vm: &FakeVm, hypervisor: &impl Hypervisor, host: HostVirtAddr) {
    let dimm = range(1 << 33, 2 * MIB);
    vm.state().dimm = Some(dimm);
    let plugged = hypervisor.plugged_memory().await.unwrap();
    assert_eq!(plugged.len(), 3, "two devices and the DIMM");
    assert_eq!(plugged[2].guest, dimm);
    assert_eq!(plugged[2].host, host, "where its memory is");
}

/// Devices reach the requested size, and size changes are reported.
async fn resizes(vm: &FakeVm, hypervisor: &impl Hypervisor) {
    let size = ByteCount(2 * MIB);
    hypervisor.request_size("vm1", size).await.unwrap();
    soon(async {
        loop {
            let devices = hypervisor.memory_devices().await.unwrap();
            let [fast, slow] = &devices[..] else {
                panic!("{devices:?}")
            };
            assert_eq!((fast.node, slow.node), (NodeId(0), NodeId(1)));
            assert_eq!((fast.size, fast.max), (SIZE.fast, SIZE.fast));
            assert_eq!((slow.requested, slow.max), (size, SIZE.slow));
            if slow.size == size {
                break;
            }
        }
    })
    .await;
    for (device, size) in [
        ("vm9", size),
        ("vm1", ByteCount(1)),
        ("vm1", ByteCount(1 << 40)),
    ] {
        let refused = hypervisor.request_size(device, size).await;
        assert!(
            matches!(refused, Err(HypervisorError::Failed(_))),
            "{device} {size}: {refused:?}"
        );
    }
    let changed = hypervisor.size_change();
    vm.tell(Told::SizeChange);
    soon(changed).await;
}

#[tokio::test]
async fn qemu_conforms() {
    let vm = FakeVm::new(SIZE);
    let connection = vm.connect().await;
    conforms(vm, connection, Traits::of_qemu()).await;
}

#[tokio::test]
async fn qemu_by_libvirt_conforms() {
    let vm = FakeVm::new(SIZE);
    let connection = vm.connect_libvirt().await;
    conforms(vm, connection, Traits::of_qemu()).await;
}

#[tokio::test]
async fn the_simulated_one_conforms() {
    let vm = FakeVm::new(SIZE);
    let connection = vm.simulated();
    conforms(vm, connection, Traits::of_qemu()).await;
}

#[tokio::test]
#[cfg_attr(
    not(target_arch = "x86_64"),
    ignore = "where Cloud Hypervisor puts memory is known for x86-64 only"
)]
async fn cloud_hypervisor_conforms() {
    let vm = FakeVm::new(SIZE);
    let connection = vm.connect_cloud_hypervisor().await;
    let traits = Traits {
        slow: vec![range(4 * MIB, 8 * MIB)],
        grows: false,
    };
    conforms(vm, connection, traits).await;
}
