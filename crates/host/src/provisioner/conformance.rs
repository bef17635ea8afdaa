//! The conformance suite of every [`Provisioner`], over simulated VMs.

use std::time::Duration;

use demeter_policy::{ByteCount, MIB, NodeId, PerTier, Tier, TierBytes};
use demeter_proto::RequestId;
use tokio::time::{Instant, timeout};

use super::balloon::Balloon;
use super::virtio_balloon::VirtioBalloon;
use super::virtio_mem::VirtioMem;
use super::{ProvisionError, Provisioner};
use crate::agent::AgentClient;
use crate::agent::tests::own_process;
use crate::hypervisor::Connection;
use crate::hypervisor::qemu::Qemu;
use crate::memory::{HostFiles, LiveBacking};
use crate::outside::Outside;
use crate::process::Opener;
use crate::testing::{FakeGuest, FakeVm};

const SIZE: TierBytes = TierBytes {
    fast: ByteCount(64 * MIB),
    slow: ByteCount(128 * MIB),
};

/// A VM that has touched all its memory.
struct Case<P> {
    provisioner: P,
    vm: FakeVm,
    guest: Option<FakeGuest>,
    /// Its initial size.
    whole: TierBytes,
}

fn deadline(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

#[expect(clippy::too_many_lines, reason = "one life of a VM, from start to end")]
async fn conforms(case: Case<impl Provisioner>) {
    let Case {
        mut provisioner,
        vm,
        guest,
        whole,
    } = case;
    let name = provisioner.name();
    let own = provisioner.actual(deadline(5000)).await.unwrap();
    assert_eq!(own, whole, "{name}: it begins with all its memory");

    let part = |numerator| ByteCount(whole.fast.0 / 8 * numerator);
    let shrunk = provisioner
        .set(Tier::Fast, part(5), deadline(5000))
        .await
        .unwrap();
    assert_eq!((shrunk.owned, shrunk.reason), (part(5), None), "{name}");
    assert_eq!(
        shrunk.returned_to_host,
        part(3),
        "{name}: what it lost, the host has"
    );
    let own = provisioner.actual(deadline(5000)).await.unwrap();
    assert_eq!(
        own,
        TierBytes {
            fast: part(5),
            ..whole
        },
        "{name}: and the other tier stays"
    );

    let same = provisioner
        .set(Tier::Fast, part(5), deadline(5000))
        .await
        .unwrap();
    assert_eq!(
        (same.owned, same.returned_to_host),
        (part(5), ByteCount(0)),
        "{name}: again"
    );

    let grown = provisioner
        .set(Tier::Fast, part(7), deadline(5000))
        .await
        .unwrap();
    assert_eq!((grown.owned, grown.reason), (part(7), None), "{name}");
    assert_eq!(grown.returned_to_host, ByteCount(0), "{name}");

    // Memory in use stays, and the provisioner reports that in time.
    vm.use_memory(Tier::Fast, part(6));
    if let Some(guest) = &guest {
        guest.use_memory(NodeId(0), part(6));
    }
    let short = timeout(
        Duration::from_secs(5),
        provisioner.set(Tier::Fast, part(5), deadline(2000)),
    );
    let short = short.await.expect("in time").unwrap();
    assert_eq!(short.owned, part(6), "{name}");
    assert!(short.reason.is_some(), "{name}: and why");

    // A silent VM is reported in time, too.
    vm.state().silent = true;
    if let Some(guest) = &guest {
        guest.fall_silent();
    }
    for order in [true, false] {
        let answered = async {
            match order {
                true => provisioner.actual(deadline(300)).await.map(drop),
                false => provisioner
                    .set(Tier::Slow, whole.slow, deadline(300))
                    .await
                    .map(drop),
            }
        };
        let answered = timeout(Duration::from_secs(5), answered)
            .await
            .expect("in time");
        assert!(
            matches!(
                answered,
                Err(ProvisionError::Timeout(_) | ProvisionError::Unreachable(_))
            ),
            "{name}: {answered:?}"
        );
    }
}

async fn backing(connection: &Connection<Qemu>) -> LiveBacking<Qemu> {
    let memdev = FakeVm::memdev();
    LiveBacking::find(
        &HostFiles::default(),
        &Outside::default(),
        "vm",
        connection,
        &memdev,
    )
    .await
    .unwrap()
}

const NODES: PerTier<NodeId> = PerTier {
    fast: NodeId(0),
    slow: NodeId(1),
};

#[tokio::test]
async fn virtio_mem_conforms() {
    let vm = FakeVm::new(SIZE);
    let memdev = FakeVm::memdev();
    let memdev = PerTier::from_fn(|tier| Some(memdev.get(tier).clone()));
    let hypervisor = vm.connect().await.hypervisor;
    let provisioner = VirtioMem::find(hypervisor, NODES, &memdev, deadline(5000))
        .await
        .unwrap();
    let whole = TierBytes::from_fn(|tier| ByteCount(SIZE.get(tier).0 * 2));
    conforms(Case {
        provisioner,
        vm,
        guest: None,
        whole,
    })
    .await;
}

#[tokio::test]
async fn virtio_balloon_conforms_where_the_guest_takes_fast_memory_first() {
    let vm = FakeVm::new(SIZE);
    let connection = vm.connect().await;
    let backing = backing(&connection).await;
    conforms(Case {
        provisioner: VirtioBalloon::new(connection.hypervisor, backing, Outside::default()),
        vm,
        guest: None,
        whole: SIZE,
    })
    .await;
}

#[tokio::test]
async fn demeter_balloon_conforms() {
    let vm = FakeVm::new(SIZE);
    let connection = vm.connect().await;
    let backing = backing(&connection).await;
    let (guest, agent) = guest(&vm).await;
    conforms(Case {
        provisioner: Balloon::new(agent, backing, NODES, ByteCount(0)),
        vm,
        guest: Some(guest),
        whole: SIZE,
    })
    .await;
}

async fn guest(vm: &FakeVm) -> (FakeGuest, AgentClient) {
    let socket = vm.folder().join("agent");
    let guest = FakeGuest::new(vm, &vm.guest_ranges());
    let agent = AgentClient::connect(socket, Opener::only(own_process()), RequestId(7));
    agent.peer().wait_for(Option::is_some).await.unwrap();
    (guest, agent)
}
