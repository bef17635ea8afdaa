//! Any messages to the guest's relay, while hosts reconnect and the kernel runs out of memory.
//!
//! Ranges that it names are held at that moment, and its output is proportional to its input.
#![no_main]

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use arbitrary::Arbitrary;
use demeter_guest::balloon::conformance::list;
use demeter_guest::balloon::relay::Relay;
use demeter_guest::balloon::simulated::Shared;
use demeter_policy::{ByteCount, GuestPhysAddr, NodeId, PAGE_SIZE};
use demeter_proto::{BootId, GpaRange, Hello, Message, Nonce, RequestId, Resize, SessionId};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
enum Told {
    Connected,
    Disconnected,
    Welcome(bool),
    Inflate(u8, u8, u16),
    Deflate(u8, u8, u16),
    /// A size that is not a whole number of pages.
    Odd(u8, u8, u64),
    List(u8, u8),
    Prove(u8, u8),
    Allow(u16),
    Ping(u64),
    OutOfMemory,
    Pass(u16),
}

const PAGES: u64 = 1000;

fn resize(id: u8, node: u8, bytes: u64) -> Resize {
    Resize {
        request: RequestId(id.into()),
        node: NodeId(u32::from(node) % 3),
        bytes: ByteCount(bytes),
    }
}

fn pages(ranges: &[GpaRange]) -> BTreeSet<u64> {
    let of = |r: &GpaRange| r.start.0 / PAGE_SIZE..(r.start.0 + r.bytes.0) / PAGE_SIZE;
    ranges.iter().flat_map(of).collect()
}

/// Checks that named ranges are held now.
fn check(balloon: &Shared, said: &[Message]) {
    for message in said {
        if let Message::Inflated(part) | Message::Held(part) = message {
            let held = pages(&list(&mut balloon.clone(), part.node));
            assert!(pages(&part.ranges).is_subset(&held), "{part:?}");
        }
    }
    assert!(said.len() < 64, "{} messages at once", said.len());
}

fuzz_target!(|script: Vec<Told>| {
    let balloon = Shared::new(PAGES);
    let session = SessionId(7);
    let hello = Hello {
        boot_id: BootId([1; 16]),
        session,
        driver: false,
        nodes: vec![],
    };
    let mut relay = Relay::new(hello, balloon.opener(), None, NodeId(1));
    let mut now = Instant::now();
    for told in script {
        let mut out = vec![];
        let page_bytes = |pages: u16| u64::from(pages) * PAGE_SIZE;
        let message = match told {
            Told::Connected => {
                relay.connected(&mut out);
                continue;
            }
            Told::Disconnected => {
                relay.disconnected();
                continue;
            }
            Told::OutOfMemory => {
                balloon.lock().run_out_of_memory();
                continue;
            }
            Told::Pass(ms) => {
                now += Duration::from_millis(ms.into());
                // Like the link, one step at a time.
                for _ in 0..16 {
                    if relay.wake_at(now).is_none_or(|at| at > now) {
                        break;
                    }
                    relay.step(now, &mut out);
                    check(&balloon, &out);
                    out.clear();
                }
                continue;
            }
            Told::Welcome(ours) => Message::Welcome {
                session: if ours { session } else { SessionId(8) },
            },
            Told::Inflate(id, node, pages) => Message::Inflate(resize(id, node, page_bytes(pages))),
            Told::Deflate(id, node, pages) => Message::Deflate(resize(id, node, page_bytes(pages))),
            Told::Odd(id, node, bytes) => Message::Inflate(resize(id, node, bytes)),
            Told::List(id, node) => {
                let Resize { request, node, .. } = resize(id, node, 0);
                let from = GuestPhysAddr(0);
                Message::List {
                    request,
                    node,
                    from,
                }
            }
            Told::Prove(id, node) => {
                let Resize { request, node, .. } = resize(id, node, 0);
                let nonce = Nonce([id; 16]);
                Message::Prove {
                    request,
                    node,
                    nonce,
                }
            }
            Told::Allow(pages) => Message::Allow {
                oom: ByteCount(page_bytes(pages)),
            },
            Told::Ping(nonce) => Message::Ping { nonce },
        };
        relay.receive(message, &mut out);
        check(&balloon, &out);
    }
});
