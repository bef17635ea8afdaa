//! What holds for every [`Hypervisor`], over a simulated VM.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use demeter_policy::{ByteCount, GuestPhysAddr, MIB, NodeId, PhysRange, Tier, TierBytes};
use tokio::time::{sleep, timeout};

use super::{Connection, Event, Hypervisor, HypervisorError, MemoryBackend};
use crate::testing::{FakeVm, Told};

const SIZE: TierBytes = TierBytes {
    fast: ByteCount(4 * MIB),
    slow: ByteCount(8 * MIB),
};

async fn soon<T>(future: impl Future<Output = T>) -> T {
    let limit = Duration::from_secs(10);
    timeout(limit, future).await.expect("in time")
}

async fn conforms<H: Hypervisor>(vm: FakeVm, connection: Connection<H>) {
    let Connection {
        hypervisor,
        mut events,
        process,
        ..
    } = connection;
    assert_eq!(process.pid.0, std::process::id(), "who has the memory");
    assert!(!hypervisor.name().is_empty());

    // Memory is where it says.
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
    let range = |start, bytes| PhysRange::new(GuestPhysAddr(start), ByteCount(bytes)).unwrap();
    let guest: Vec<_> = map.iter().map(|mapping| mapping.guest).collect();
    assert_eq!(guest, [range(4 * MIB, 4 * MIB), range(1 << 32, 4 * MIB)]);
    let boot = hypervisor.memory_map("node0").await.unwrap();
    assert_eq!(boot.len(), 1);
    let memory = File::options().write(true).open("/proc/self/mem").unwrap();
    for (mapping, byte) in map.iter().zip(1..) {
        memory.write_all_at(&[byte], mapping.host.0).unwrap();
    }
    for (offset, byte) in [(0, 1), (4 * MIB, 2)] {
        let mut read = [0];
        let file = vm.file(Tier::Slow);
        file.read_exact_at(&mut read, offset).unwrap();
        assert_eq!(read, [byte]);
    }
    assert_eq!(hypervisor.memory_map("node2").await.unwrap(), []);

    // What was plugged in is no backend that it was started with.
    let dimm = range(1 << 33, 2 * MIB);
    vm.state().dimm = Some(dimm);
    let plugged = hypervisor.plugged_memory().await.unwrap();
    assert_eq!(plugged.len(), 3, "two devices and the DIMM");
    assert_eq!(plugged[2].guest, dimm);
    assert_eq!(plugged[2].host, boot[0].host, "where its memory is");

    assert_eq!(hypervisor.vcpus().await.unwrap(), [process.pid]);

    assert_eq!(hypervisor.pinning_device().await.unwrap(), None);
    vm.state().pinned = true;
    let pinning = hypervisor.pinning_device().await.unwrap();
    assert_eq!(pinning.as_deref(), Some("gpu0"));

    // Devices and balloon come to what is asked for.
    let size = ByteCount(2 * MIB);
    hypervisor.request_size("vm1", size).await.unwrap();
    hypervisor.request_balloon_size(size).await.unwrap();
    soon(async {
        while hypervisor.balloon_size().await.unwrap() != size {
            sleep(Duration::from_millis(1)).await;
        }
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

    // Who has got an answer was told of all that happened before the question.
    for event in [Event::Changed, Event::Reset] {
        let before = hypervisor.events_told();
        vm.tell(Told::Event(event));
        soon(hypervisor.catch_up()).await.unwrap();
        assert_eq!(hypervisor.events_told(), before + 1);
        let told = timeout(Duration::ZERO, events.next()).await;
        assert_eq!(told, Ok(Some(event)), "without waiting");
    }

    // What happens is told in order, and that it cannot be told any more as well.
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
    let before = hypervisor.events_told();
    drop(vm);
    assert_eq!(soon(events.next()).await, None);
    assert_eq!(hypervisor.events_told(), before + 1, "the end counts");
}

#[tokio::test]
async fn qemu_conforms() {
    let vm = FakeVm::new(SIZE);
    let connection = vm.connect().await;
    conforms(vm, connection).await;
}

#[tokio::test]
async fn qemu_by_libvirt_conforms() {
    let vm = FakeVm::new(SIZE);
    let connection = vm.connect_libvirt().await;
    conforms(vm, connection).await;
}

#[tokio::test]
async fn the_simulated_one_conforms() {
    let vm = FakeVm::new(SIZE);
    let connection = vm.simulated();
    conforms(vm, connection).await;
}
