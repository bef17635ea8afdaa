//! Conformance suite of all implementations of [`Pages`].

use demeter_policy::{BLOCK_SIZE, Block, GuestVirtAddr, NodeId, PAGE_SIZE, Pid};

use super::simulated::SimulatedPages;
use super::{LivePages, PageState, Pages, PagesError};

/// A process with `present` on node 0 and `absent` not mapped.
struct Case<P> {
    pages: P,
    pid: Pid,
    gone: Pid,
    present: Vec<GuestVirtAddr>,
    absent: GuestVirtAddr,
}

fn conforms(mut case: Case<impl Pages>) {
    let mut out = vec![PageState::Absent];
    let mut asked = case.present.clone();
    asked.insert(1, case.absent);
    case.pages.locate(case.pid, &asked, &mut out).unwrap();
    let on_0 = PageState::On(NodeId(0));
    let mut want = vec![PageState::Absent];
    want.extend(asked.iter().map(|a| {
        if *a == case.absent {
            PageState::Absent
        } else {
            on_0
        }
    }));
    assert_eq!(out, want, "locate appends one state per page, in order");

    out.clear();
    case.pages
        .migrate(case.pid, &asked, NodeId(0), &mut out)
        .unwrap();
    assert_eq!(
        out,
        want[1..],
        "pages that are there already stay; absent ones are no error"
    );

    out.clear();
    case.pages.locate(case.pid, &[], &mut out).unwrap();
    case.pages
        .migrate(case.pid, &[], NodeId(0), &mut out)
        .unwrap();
    assert_eq!(out, []);

    // Whether the block is collapsed or not, its pages stay where they are.
    case.pages
        .collapse(case.pid, &[Block::of(case.present[0])])
        .unwrap();
    case.pages.locate(case.pid, &asked, &mut out).unwrap();
    assert_eq!(out, want[1..], "collapsing moves nothing to another node");

    for result in [
        case.pages
            .collapse(case.gone, &[Block::of(case.present[0])]),
        case.pages.locate(case.gone, &asked, &mut out),
        case.pages.migrate(case.gone, &asked, NodeId(0), &mut out),
    ] {
        assert!(
            matches!(result, Err(PagesError::Gone(pid)) if pid == case.gone),
            "{result:?}"
        );
    }
}

#[test]
fn simulated_pages_conform() {
    let mut pages = SimulatedPages::new(1 << 30, 1 << 30);
    let present: Vec<_> = (16..20).map(|i| GuestVirtAddr(i * PAGE_SIZE)).collect();
    for page in &present {
        pages.map(Pid(7), page.0, PAGE_SIZE, NodeId(0));
    }
    conforms(Case {
        pages,
        pid: Pid(7),
        gone: Pid(8),
        present,
        absent: GuestVirtAddr(4 * BLOCK_SIZE),
    });
}

#[test]
fn live_pages_conform() {
    let memory = vec![1u8; 8 * PAGE_SIZE as usize];
    let first = (memory.as_ptr() as u64).next_multiple_of(PAGE_SIZE);
    let present: Vec<_> = (0..4)
        .map(|i| GuestVirtAddr(first + i * PAGE_SIZE))
        .collect();
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    for movers in [1, 2, 3, 64] {
        let mut pages = LivePages::default();
        pages.set_movers(movers);
        conforms(Case {
            pages,
            pid: Pid(std::process::id()),
            gone: Pid(child.id()),
            present: present.clone(),
            absent: GuestVirtAddr(PAGE_SIZE),
        });
    }
    drop(memory);
}
