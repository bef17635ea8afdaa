//! Conformance suite of every [`Balloon`], real and simulated. A violation panics.

use demeter_policy::{BLOCK_SIZE, ByteCount, NodeId, PAGE_SIZE};
use demeter_proto::{GpaRange, Nonce};

use super::{Balloon, Cursor, Stop, join};

/// Limit of a loop of bounded calls.
const CALLS_MAX: usize = 100_000;

/// Checks `balloon` on `node`.
///
/// At the start nothing may be held, and at least four blocks must be free. Nothing is held afterwards.
pub fn conforms(balloon: &mut dyn Balloon, node: NodeId) {
    assert_eq!(held(balloon, node), 0, "nothing is held at first");
    assert_eq!(list(balloon, node), []);
    let empty = balloon.deflate(node, ByteCount(PAGE_SIZE)).unwrap();
    assert_eq!((empty.moved.0, empty.stop), (0, Stop::Empty));

    let asked = 3 * BLOCK_SIZE + 5 * PAGE_SIZE;
    let (taken, stop) = inflate(balloon, node, asked);
    assert_eq!((sum(&taken), stop), (asked, Stop::Done));
    assert_eq!(held(balloon, node), asked);
    assert_whole_pages_apart(&taken);
    assert_eq!(list(balloon, node), taken, "the list is what was told");

    // Less than a block: the driver splits a block, or returns single pages.
    let given = deflate(balloon, node, BLOCK_SIZE / 2 + PAGE_SIZE);
    assert_eq!(given, (BLOCK_SIZE / 2 + PAGE_SIZE, Stop::Done));
    let rest = list(balloon, node);
    assert_eq!(sum(&rest), asked - given.0);
    assert_whole_pages_apart(&rest);
    let is_in = |r: &GpaRange, of: &GpaRange| {
        of.start <= r.start && r.start.0 + r.bytes.0 <= of.start.0 + of.bytes.0
    };
    for range in &rest {
        assert!(
            taken.iter().any(|t| is_in(range, t)),
            "{range:?} is not of {taken:?}"
        );
    }

    let (all, stop) = inflate(balloon, node, 1 << 50);
    assert_eq!(stop, Stop::NoMemory, "no node is that large");
    let page = balloon.prove(node, Nonce([7; 16])).unwrap();
    assert!(page.0.is_multiple_of(PAGE_SIZE), "{page} is no page");
    let again = balloon.prove(node, Nonce([8; 16])).unwrap();
    assert_eq!(again, page, "one page is enough");
    let everything = sum(&rest) + sum(&all);
    assert_eq!(held(balloon, node), everything);
    let listed = list(balloon, node);
    assert_eq!(
        listed,
        join(rest.into_iter().chain(all).collect()),
        "nothing is told twice, nothing is left out"
    );
    assert_whole_pages_apart(&listed);
    let own = GpaRange {
        start: page,
        bytes: ByteCount(PAGE_SIZE),
    };
    assert!(
        !listed.iter().any(|held| is_in(&own, held)),
        "its own page is held"
    );
    assert!(balloon.prove(NodeId(1022), Nonce([7; 16])).is_err());

    assert_eq!(deflate(balloon, node, 1 << 50), (everything, Stop::Empty));
    assert_eq!(held(balloon, node), 0);
    assert_eq!(list(balloon, node), []);

    assert!(
        balloon
            .inflate(NodeId(1022), ByteCount(PAGE_SIZE), false)
            .is_err(),
        "there is no such node"
    );
    assert!(!balloon.take_event().unwrap(), "memory was never short");
}

/// Inflates by `bytes` in as many calls as needed. Returns the newly held ranges.
pub fn inflate(balloon: &mut dyn Balloon, node: NodeId, bytes: u64) -> (Vec<GpaRange>, Stop) {
    let mut ranges = vec![];
    for _ in 0..CALLS_MAX {
        let left = ByteCount(bytes - sum(&ranges));
        let part = balloon.inflate(node, left, false).unwrap();
        ranges.extend(part.ranges);
        if part.stop != Stop::Again {
            return (join(ranges), part.stop);
        }
    }
    panic!("inflating never ends");
}

/// Deflates by `bytes` in as many calls as needed. Returns the returned bytes.
pub fn deflate(balloon: &mut dyn Balloon, node: NodeId, bytes: u64) -> (u64, Stop) {
    let mut moved = 0;
    for _ in 0..CALLS_MAX {
        let part = balloon.deflate(node, ByteCount(bytes - moved)).unwrap();
        moved += part.moved.0;
        if part.stop != Stop::Again {
            return (moved, part.stop);
        }
    }
    panic!("deflating never ends");
}

/// All held ranges, by address, with touching ranges joined.
pub fn list(balloon: &mut dyn Balloon, node: NodeId) -> Vec<GpaRange> {
    let mut ranges = vec![];
    let mut cursor = Cursor::default();
    for _ in 0..CALLS_MAX {
        let part = balloon.list(node, cursor).unwrap();
        ranges.extend(part.ranges);
        match part.next {
            Some(next) => cursor = next,
            None => return join(ranges),
        }
    }
    panic!("the list never ends");
}

/// Bytes in all ranges.
pub fn sum(ranges: &[GpaRange]) -> u64 {
    ranges.iter().map(|r| r.bytes.0).sum()
}

fn held(balloon: &mut dyn Balloon, node: NodeId) -> u64 {
    balloon.stats(node).unwrap().held.0
}

fn assert_whole_pages_apart(ranges: &[GpaRange]) {
    for range in ranges {
        let whole =
            range.start.0.is_multiple_of(PAGE_SIZE) && range.bytes.0.is_multiple_of(PAGE_SIZE);
        assert!(whole && range.bytes.0 > 0, "{range:?}");
    }
    for pair in ranges.windows(2) {
        let end = pair[0].start.0 + pair[0].bytes.0;
        assert!(end < pair[1].start.0, "{pair:?} overlap or touch");
    }
}
