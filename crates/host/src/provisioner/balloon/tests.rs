//! Tests of the provisioner on a simulated guest, honest or hostile, with memory that is really
//! punched.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, LazyLock, Mutex};

use demeter_policy::{GuestPhysAddr, MIB, PAGE_SIZE, PhysRange};
use demeter_proto::{Done, GpaRange, Nonce, Outcome, Ranges, RequestId, Resize};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;

mod hostile;
mod vm;

use super::*;
use crate::agent::tests::{Pipe, hello, own_process, shown, soon};
use crate::backing::{Extent, FileOffset, NotInTier};
use crate::outside::MayWait;
use crate::process::Opener;
use vm::*;

#[tokio::test]
async fn memory_goes_back_to_the_host_and_comes_again() {
    let (mut vm, driver) = honest().await;
    let owned = vm.balloon.actual(deadline()).await.unwrap();
    assert_eq!(
        owned,
        PerTier {
            fast: mib(8),
            slow: mib(16)
        }
    );

    let progress = vm
        .balloon
        .set(Tier::Fast, mib(3), deadline())
        .await
        .unwrap();
    let expected = Progress {
        owned: mib(3),
        returned_to_host: mib(5),
        reason: None,
    };
    assert_eq!(progress, expected);
    only_held_memory_is_gone(&vm.memory, &driver.lock().unwrap());
    assert_eq!(
        vm.memory.backed(Tier::Fast, &MayWait::in_a_test()).unwrap(),
        mib(3)
    );

    let progress = vm
        .balloon
        .set(Tier::Fast, mib(6), deadline())
        .await
        .unwrap();
    assert_eq!((progress.owned, progress.reason), (mib(6), None));
    assert_eq!(
        driver.lock().unwrap().held[&NodeId(0)].len() as u64 * PIECE,
        2 * MIB
    );
    // Returned memory that was written again can be punched again.
    let progress = vm
        .balloon
        .set(Tier::Fast, mib(1), deadline())
        .await
        .unwrap();
    assert_eq!((progress.owned, progress.reason), (mib(1), None));
    assert_eq!(
        driver.lock().unwrap().held[&NodeId(0)].len() as u64 * PIECE,
        7 * MIB
    );
}

/// A driver cannot tell plugged memory from its node's other memory.
#[tokio::test]
async fn what_was_plugged_in_is_of_no_use_and_no_lie() {
    let (mut vm, driver) = honest().await;
    {
        let mut driver = driver.lock().unwrap();
        let free = driver.free.get_mut(&NodeId(0)).unwrap();
        let (start, len) = PLUGGED;
        let pieces = (start * MIB..(start + len) * MIB).step_by(PIECE as usize);
        // The driver takes these pieces first.
        free.extend(pieces.map(|piece| range(piece, PIECE)));
    }
    let held = || {
        let driver = driver.lock().unwrap();
        driver.held[&NodeId(0)].len() as u64 * PIECE
    };
    let set = async |vm: &mut Vm, size: ByteCount| {
        let progress = vm.balloon.set(Tier::Fast, size, deadline()).await.unwrap();
        assert_eq!((progress.owned, progress.reason), (size, None));
    };
    // Plugged memory is held as well, and the requested size is still punched.
    set(&mut vm, mib(3)).await;
    assert_eq!(
        vm.memory.backed(Tier::Fast, &MayWait::in_a_test()).unwrap(),
        mib(3)
    );
    assert_eq!(held(), 7 * MIB);
    set(&mut vm, mib(6)).await;
    assert_eq!(held(), 4 * MIB);
    // Plugged memory is released first and does not count towards the target.
    set(&mut vm, mib(8)).await;
    assert_eq!(held(), 0);
    // Memory that is neither boot nor plugged memory is a lie.
    let beyond = range(14 * MIB, PIECE);
    {
        let mut driver = driver.lock().unwrap();
        let free = driver.free.get_mut(&NodeId(0)).unwrap();
        free.push(beyond);
    }
    let lied = vm.balloon.set(Tier::Fast, mib(1), deadline()).await;
    assert!(matches!(lied, Err(ProvisionError::Hostile(_))), "{lied:?}");
}

#[tokio::test]
async fn held_memory_that_was_touched_is_taken_back_again() {
    let (mut vm, driver) = honest().await;
    let progress = vm.balloon.set(Tier::Fast, mib(3), deadline()).await;
    assert_eq!(progress.unwrap().owned, mib(3));
    let held = driver.lock().unwrap().held[&NodeId(0)][0];
    let held = PhysRange::new(held.start, held.bytes).unwrap();
    let extent = vm.memory.resolve(Tier::Fast, held).unwrap();
    let file = vm.memory.0.get(Tier::Fast);
    file.write_all_at(&[1; PAGE_SIZE as usize], extent.offset.0)
        .unwrap();
    assert!(vm.memory.backed(Tier::Fast, &MayWait::in_a_test()).unwrap() > mib(3));
    vm.balloon.actual(deadline()).await.unwrap();
    assert_eq!(
        vm.memory.backed(Tier::Fast, &MayWait::in_a_test()).unwrap(),
        mib(3)
    );
    only_held_memory_is_gone(&vm.memory, &driver.lock().unwrap());
}

#[tokio::test]
async fn a_guest_gives_what_it_can() {
    let (mut vm, driver) = honest().await;
    driver
        .lock()
        .unwrap()
        .free
        .get_mut(&NodeId(1))
        .unwrap()
        .truncate(32);
    let progress = vm
        .balloon
        .set(Tier::Slow, mib(10), deadline())
        .await
        .unwrap();
    let reason = Some("that is all there is".to_owned());
    assert_eq!((progress.owned, progress.reason), (mib(14), reason));
    only_held_memory_is_gone(&vm.memory, &driver.lock().unwrap());
}

#[tokio::test]
async fn the_allowance_is_what_may_be_owned_beyond_the_target() {
    let (mut vm, driver) = honest().await;
    let allowed = || driver.lock().unwrap().allowed;
    vm.balloon.actual(deadline()).await.unwrap();
    assert_eq!(allowed(), ByteCount(0));
    vm.balloon
        .set(Tier::Slow, mib(10), deadline())
        .await
        .unwrap();
    wait_until(|| allowed() == OOM).await;
    // The driver gives back a quarter of it by itself.
    let pages: Vec<_> = driver
        .lock()
        .unwrap()
        .held
        .get_mut(&NodeId(1))
        .unwrap()
        .drain(..4)
        .collect();
    assert_eq!(pages.len() as u64 * PIECE, OOM.0 / 4);
    let owned = vm.balloon.actual(deadline()).await.unwrap();
    assert_eq!(owned.slow.0, mib(10).0 + OOM.0 / 4);
    wait_until(|| allowed().0 == OOM.0 * 3 / 4).await;
}

async fn wait_until(condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    soon(wait).await;
}

#[tokio::test]
async fn a_new_controller_learns_what_is_held_and_takes_back_what_was_missed() {
    let (mut vm, driver) = honest().await;
    vm.balloon
        .set(Tier::Fast, mib(5), deadline())
        .await
        .unwrap();
    // The pages are held, but the controller died before it learned of them.
    let request = RequestId(9);
    let (node, bytes) = (NodeId(0), mib(1));
    driver.lock().unwrap().allowed = ByteCount(0);
    driver.lock().unwrap().answer(&Message::Inflate(Resize {
        request,
        node,
        bytes,
    }));
    let socket = vm.dir.path().join("agent.sock");
    let again = balloon(&vm.memory, &socket);
    // The guest's port takes one connection at a time.
    vm.balloon.guest.agent = AgentClient::connect(
        "/nonexistent".into(),
        Opener::only(own_process()),
        RequestId(0),
    );
    vm.balloon = again.await;
    let owned = vm.balloon.actual(deadline()).await.unwrap();
    assert_eq!(
        owned,
        PerTier {
            fast: mib(4),
            slow: mib(16)
        }
    );
    only_held_memory_is_gone(&vm.memory, &driver.lock().unwrap());
}

#[tokio::test]
async fn a_reset_between_answer_and_punch_destroys_nothing() {
    let mut driver = Driver::new();
    let mut vm = vm(move |message| match message {
        // The machine was reset before the ping; another agent answers it.
        Message::Ping { nonce } => {
            vec![Message::Hello(hello(2, 2)), Message::Pong { nonce }]
        }
        message => driver.answer(&message),
    })
    .await;
    let error = vm
        .balloon
        .set(Tier::Fast, mib(3), deadline())
        .await
        .unwrap_err();
    assert!(matches!(error, ProvisionError::Unreachable(_)), "{error}");
    assert!(vm.memory.is_untouched());
}

#[tokio::test]
async fn what_a_guest_does_not_have_is_told() {
    let (mut vm, _driver) = honest().await;
    vm.balloon.guest.nodes.slow = NodeId(7);
    let error = vm.balloon.actual(deadline()).await.unwrap_err();
    assert_eq!(error.to_string(), "refused: the guest has no node 7");

    let mut without = self::vm(|message| match message {
        Message::List { request, node, .. } => vec![done(request, node, Outcome::NoDriver)],
        _ => vec![],
    })
    .await;
    let error = without.balloon.actual(deadline()).await.unwrap_err();
    assert!(matches!(error, ProvisionError::NoDriver), "{error}");
    assert!(error.to_string().contains("load demeter_balloon"));
}
