use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, channel};

use std::time::Duration;

use demeter_policy::GuestPhysAddr;
use demeter_proto::{BootId, RequestId, SessionId};
use proptest::prelude::*;

use super::super::conformance;
use super::super::simulated::Shared;
use super::*;

const SESSION: SessionId = SessionId(77);
const FAST: NodeId = NodeId(0);
const SLOW: NodeId = NodeId(1);

/// A relay over a simulated driver, with a clock of its own.
struct Case {
    relay: Relay,
    balloon: Shared,
    now: Instant,
    controls: Receiver<Control>,
}

impl Case {
    fn new(pages: u64, with_agent: bool) -> Self {
        let balloon = Shared::new(pages);
        let (agent, controls) = channel();
        let room = with_agent.then_some(RoomMaker { agent, fast: FAST });
        Self {
            relay: Relay::new(hello(), balloon.opener(), room, SLOW),
            balloon,
            now: Instant::now(),
            controls,
        }
    }

    fn welcomed(pages: u64, with_agent: bool) -> Self {
        let mut case = Self::new(pages, with_agent);
        case.tell(Message::Welcome { session: SESSION });
        case
    }

    /// Passes the relay a message, and runs it as far as possible at once.
    fn tell(&mut self, message: Message) -> Vec<Message> {
        let mut out = vec![];
        self.relay.receive(message, &mut out);
        self.work(&mut out);
        out
    }

    fn work(&mut self, out: &mut Vec<Message>) {
        while self
            .relay
            .wake_at(self.now)
            .is_some_and(|at| at <= self.now)
        {
            self.relay.step(self.now, out);
        }
    }

    fn pass(&mut self, ms: u64) -> Vec<Message> {
        let mut out = vec![];
        let end = self.now + Duration::from_millis(ms);
        while let Some(wake) = self.relay.wake_at(self.now).filter(|at| *at <= end) {
            self.now = self.now.max(wake);
            self.relay.step(self.now, &mut out);
        }
        self.now = end;
        out
    }

    fn holds(&self, [fast, slow]: &[BTreeSet<u64>; 2]) -> bool {
        fast.is_subset(&self.held(FAST)) && slow.is_subset(&self.held(SLOW))
    }

    fn held(&self, node: NodeId) -> BTreeSet<u64> {
        pages(&conformance::list(&mut self.balloon.clone(), node))
    }
}

fn hello() -> Hello {
    Hello {
        boot_id: BootId([1; 16]),
        session: SESSION,
        driver: false,
        nodes: vec![],
    }
}

fn resize(id: u64, node: NodeId, pages: u64) -> Resize {
    Resize {
        request: RequestId(id),
        node,
        bytes: ByteCount(pages * PAGE_SIZE),
    }
}

fn list(id: u64, node: NodeId) -> Message {
    Message::List {
        request: RequestId(id),
        node,
        from: GuestPhysAddr(0),
    }
}

fn pages(ranges: &[GpaRange]) -> BTreeSet<u64> {
    let of = |r: &GpaRange| r.start.0 / PAGE_SIZE..(r.start.0 + r.bytes.0) / PAGE_SIZE;
    ranges.iter().flat_map(of).collect()
}

/// The pages that messages name, and the final answer.
fn answer(messages: &[Message]) -> (BTreeSet<u64>, &Done) {
    let (last, named) = messages.split_last().expect("an answer");
    let Message::Done(done) = last else {
        panic!("no end: {last:?}");
    };
    let mut all = BTreeSet::new();
    for (i, message) in named.iter().enumerate() {
        let (Message::Inflated(part) | Message::Held(part)) = message else {
            panic!("{message:?}");
        };
        assert_eq!((part.request, part.node), (done.request, done.node));
        // The last part of a list may say that more follows.
        let may_be_more = matches!(message, Message::Held(_)) && i + 1 == named.len();
        assert!(
            part.more == (i + 1 < named.len()) || may_be_more,
            "only the last says so"
        );
        let mut new = pages(&part.ranges);
        assert!(new.is_disjoint(&all), "a page is named once");
        all.append(&mut new);
    }
    (all, done)
}

/// All held memory of a node, listed part by part, and the number of answers.
fn listed(case: &mut Case, node: NodeId) -> (BTreeSet<u64>, u32) {
    let (mut all, mut from) = (BTreeSet::new(), GuestPhysAddr(0));
    for answers in 1..1000 {
        let told = case.tell(Message::List {
            request: RequestId(100 + u64::from(answers)),
            node,
            from,
        });
        let (mut part, _) = answer(&told);
        let last = part.last().copied();
        assert!(part.is_disjoint(&all), "a page is named once");
        all.append(&mut part);
        let more = told
            .iter()
            .any(|m| matches!(m, Message::Held(part) if part.more));
        match last.filter(|_| more) {
            Some(page) => from = GuestPhysAddr((page + 1) * PAGE_SIZE),
            None => return (all, answers),
        }
    }
    panic!("a list without end");
}

#[test]
fn a_nonce_is_shown_in_the_drivers_own_page() {
    let prove = |node, byte| Message::Prove {
        request: RequestId(9),
        node,
        nonce: Nonce([byte; 16]),
    };
    let mut case = Case::new(1000, false);
    assert_eq!(case.tell(prove(FAST, 1)), [], "nobody was welcomed");
    assert_eq!(case.balloon.lock().shown(FAST), None);
    let mut case = Case::welcomed(1000, false);
    case.tell(Message::Inflate(resize(1, FAST, 990)));
    for (node, byte) in [(FAST, 1), (SLOW, 2), (FAST, 3)] {
        let said = case.tell(prove(node, byte));
        let (page, nonce) = case.balloon.lock().shown(node).unwrap();
        assert_eq!(nonce, Nonce([byte; 16]));
        let request = RequestId(9);
        assert_eq!(
            said,
            [Message::Proof {
                request,
                node,
                page
            }]
        );
        assert!(!case.held(node).contains(&(page.0 / PAGE_SIZE)));
    }
    let said = case.tell(prove(NodeId(77), 4));
    let [Message::Done(done)] = &said[..] else {
        panic!("{said:?}");
    };
    assert_eq!(
        (done.request, done.outcome),
        (RequestId(9), Outcome::Refused)
    );
}

#[test]
fn nothing_is_done_before_this_session_is_welcomed() {
    let mut case = Case::new(1000, false);
    let mut out = vec![];
    case.relay.connected(&mut out);
    let Message::Hello(hello) = &out[0] else {
        panic!("{out:?}");
    };
    assert!(hello.driver);
    assert_eq!(case.tell(Message::Inflate(resize(1, FAST, 10))), []);
    let session = SessionId(78);
    assert_eq!(case.tell(Message::Welcome { session }), []);
    assert_eq!(case.tell(Message::Inflate(resize(2, FAST, 10))), []);
    let nonce = 5;
    assert_eq!(
        case.tell(Message::Ping { nonce }),
        [Message::Pong { nonce }]
    );
    case.tell(Message::Welcome { session: SESSION });
    assert!(case.held(FAST).is_empty());
    // The relay does not know the session, so it greets again.
    let again = case.tell(Message::Welcome { session });
    assert!(matches!(again[..], [Message::Hello(_)]), "{again:?}");
}

#[test]
fn an_inflation_names_what_is_held_and_a_repeated_one_names_it_again() {
    let mut case = Case::welcomed(5000, false);
    let first = case.tell(Message::Inflate(resize(1, FAST, 3000)));
    let (named, done) = answer(&first);
    assert_eq!(named, case.held(FAST));
    assert_eq!(named.len(), 3000);
    let bytes = ByteCount(3000 * PAGE_SIZE);
    assert_eq!(
        (done.moved, done.held, done.outcome),
        (bytes, bytes, Outcome::Ok)
    );

    assert_eq!(case.tell(Message::Inflate(resize(1, FAST, 3000))), first);
    assert_eq!(case.held(FAST).len(), 3000, "it was done once");

    let given = case.tell(Message::Deflate(resize(2, FAST, 100)));
    assert_eq!(answer(&given).1.outcome, Outcome::Ok);
    assert_eq!(case.tell(Message::Deflate(resize(2, FAST, 100))), given);
    assert_eq!(case.held(FAST).len(), 2900);
    let repeated = case.tell(Message::Inflate(resize(1, FAST, 3000)));
    let (named, done) = answer(&repeated);
    assert!(named.is_empty(), "some of it is not held any more");
    assert_eq!(done.outcome, Outcome::Refused);
    assert!(done.reason.starts_with("list first"), "{}", done.reason);
}

#[test]
fn a_list_is_whole_in_several_parts() {
    let mut case = Case::welcomed(20_000, false);
    let empty = case.tell(list(1, SLOW));
    assert_eq!(answer(&empty).0, BTreeSet::new());
    assert_eq!(empty.len(), 2, "an empty list is told, too");
    case.tell(Message::Inflate(resize(2, SLOW, 15_000)));
    let (pages, answers) = listed(&mut case, SLOW);
    assert_eq!(pages, case.held(SLOW));
    assert!(answers > 1, "a part is bounded");
}

#[test]
fn the_agent_makes_room_before_the_kernel_reclaims() {
    let mut case = Case::welcomed(2000, true);
    case.balloon.lock().use_all_but(FAST, 100);
    assert_eq!(case.tell(Message::Inflate(resize(1, FAST, 300))), []);
    let missing = ByteCount(200 * PAGE_SIZE);
    assert_eq!(case.controls.try_recv(), Ok(Control::MakeRoom(missing)));
    case.balloon.lock().free(FAST, 150);
    assert_eq!(case.pass(60), []);
    let missing = ByteCount(50 * PAGE_SIZE);
    assert_eq!(
        case.controls.try_iter().last(),
        Some(Control::MakeRoom(missing))
    );
    case.balloon.lock().free(FAST, 150);
    let told = case.pass(60);
    assert_eq!(answer(&told).0, case.held(FAST));
    assert_eq!(answer(&told).1.outcome, Outcome::Ok);
    let last = case.controls.try_iter().last();
    assert_eq!(last, Some(Control::MakeRoom(ByteCount(0))));
    assert_eq!(
        case.balloon.lock().spare(FAST),
        100,
        "no more than asked for"
    );
}

#[test]
fn an_agent_that_makes_no_room_is_waited_for_so_long() {
    let mut case = Case::welcomed(2000, true);
    case.balloon.lock().use_all_but(FAST, 100);
    assert_eq!(case.tell(Message::Inflate(resize(1, FAST, 300))), []);
    assert_eq!(case.pass(900), []);
    assert_eq!(case.held(FAST).len(), 100);
    // After a second the kernel reclaims.
    let told = case.pass(1000);
    assert_eq!(answer(&told).1.outcome, Outcome::Ok);
    assert_eq!(answer(&told).0.len(), 300);

    // Memory that does not exist cannot be reclaimed.
    assert_eq!(case.tell(Message::Inflate(resize(2, FAST, 5000))), []);
    let told = case.pass(1600);
    let (named, done) = answer(&told);
    assert_eq!(done.outcome, Outcome::Partial);
    assert!(!done.reason.is_empty());
    assert_eq!(done.moved.0, named.len() as u64 * PAGE_SIZE);
    assert_eq!(done.held.0, case.held(FAST).len() as u64 * PAGE_SIZE);
}

#[test]
fn without_an_agent_the_kernel_reclaims_at_once() {
    let mut case = Case::welcomed(2000, false);
    case.balloon.lock().use_all_but(SLOW, 100);
    let told = case.tell(Message::Inflate(resize(1, SLOW, 300)));
    assert_eq!(answer(&told).0.len(), 300);
}

#[test]
fn what_went_by_itself_must_be_listed_before_more_is_held() {
    let mut case = Case::welcomed(2000, false);
    let oom = ByteCount(10 * PAGE_SIZE);
    case.tell(Message::Allow { oom });
    case.tell(Message::Inflate(resize(1, SLOW, 500)));
    assert!(
        case.balloon.lock().run_out_of_memory().is_empty(),
        "not before the next Allow"
    );
    case.tell(Message::Allow { oom });
    assert_eq!(case.balloon.lock().run_out_of_memory().len(), 10);
    let refused = case.tell(Message::Inflate(resize(2, SLOW, 10)));
    assert!(answer(&refused).1.reason.starts_with("list first"));
    assert_eq!(case.held(SLOW).len(), 490);
    case.tell(list(3, SLOW));
    let told = case.tell(Message::Inflate(resize(4, SLOW, 10)));
    assert_eq!(answer(&told).1.outcome, Outcome::Ok);
}

#[test]
fn a_new_agent_finds_what_an_old_one_held() {
    let mut old = Case::welcomed(2000, false);
    old.tell(Message::Inflate(resize(1, FAST, 500)));
    let mut case = Case {
        relay: Relay::new(hello(), old.balloon.opener(), None, SLOW),
        ..old
    };
    case.tell(Message::Welcome { session: SESSION });
    let refused = case.tell(Message::Inflate(resize(2, FAST, 10)));
    assert!(answer(&refused).1.reason.starts_with("list first"));
    assert_eq!(listed(&mut case, FAST).0.len(), 500);
}

#[test]
fn a_driver_that_is_missing_is_told_and_used_once_it_is_there() {
    let balloon = Shared::new(1000);
    let mut loaded = false;
    let mut open = balloon.opener();
    let opener: Opener = Box::new(move || {
        if std::mem::replace(&mut loaded, true) {
            return open();
        }
        Err(BalloonError::Unavailable {
            why: "not loaded".into(),
            hint: "load it",
        })
    });
    let mut case = Case {
        relay: Relay::new(hello(), opener, None, SLOW),
        ..Case::new(1000, false)
    };
    case.tell(Message::Welcome { session: SESSION });
    let told = case.tell(Message::Inflate(resize(1, FAST, 10)));
    let (_, done) = answer(&told);
    assert_eq!(done.outcome, Outcome::NoDriver);
    assert!(done.reason.contains("load it"), "{}", done.reason);
    let told = case.tell(Message::Inflate(resize(2, FAST, 10)));
    assert_eq!(answer(&told).1.outcome, Outcome::Ok);
}

#[test]
fn nonsense_is_refused_with_a_reason() {
    let mut case = Case::welcomed(1000, false);
    let mut odd = resize(1, FAST, 1);
    odd.bytes.0 += 1;
    let told = case.tell(Message::Inflate(odd));
    assert_eq!(answer(&told).1.outcome, Outcome::Refused);
    let told = case.tell(Message::Deflate(resize(2, NodeId(9), 1)));
    assert_eq!(answer(&told).1.outcome, Outcome::Refused);
    assert!(answer(&told).1.reason.contains("node 9"));
    // A huge request ends after all memory was returned.
    let told = case.tell(Message::Deflate(resize(3, FAST, 1 << 40)));
    assert_eq!(answer(&told).1.outcome, Outcome::Partial);
}

#[test]
fn a_host_that_asks_too_much_at_once_is_refused() {
    let mut case = Case::welcomed(2000, true);
    case.balloon.lock().use_all_but(FAST, 0);
    let mut out = vec![];
    for id in 0..WAITING_MAX as u64 + 2 {
        case.relay
            .receive(Message::Inflate(resize(id, FAST, 1)), &mut out);
        case.relay.step(case.now, &mut out);
    }
    assert_eq!(answer(&out).1.outcome, Outcome::Refused);
    // When the host disconnects there is no work left.
    case.relay.disconnected();
    assert_eq!(case.relay.wake_at(case.now), None);
}

#[derive(Debug, Clone)]
enum Event {
    Inflate(u64, u64, u64),
    Deflate(u64, u64),
    List(u64),
    Allow(u64),
    Repeat(u64),
    OutOfMemory,
    InUse(u64, usize),
    Free(u64, usize),
    Reconnect,
}

fn event() -> impl Strategy<Value = Event> {
    let node = 0..2u64;
    prop_oneof![
        4 => (node.clone(), 0..400u64, 0..200u64).prop_map(|(n, p, t)| Event::Inflate(n, p, t)),
        2 => (node.clone(), 0..400u64).prop_map(|(n, p)| Event::Deflate(n, p)),
        2 => node.clone().prop_map(Event::List),
        2 => (0..100u64).prop_map(Event::Allow),
        1 => (0..20u64).prop_map(Event::Repeat),
        3 => Just(Event::OutOfMemory),
        1 => (node.clone(), 0..400usize).prop_map(|(n, p)| Event::InUse(n, p)),
        1 => (node, 0..100usize).prop_map(|(n, p)| Event::Free(n, p)),
        1 => Just(Event::Reconnect),
    ]
}

proptest! {
    /// Pages that were named and may be punched stay held until the host says that it has punched them. The safety of
    /// guest data depends on this rule.
    #[test]
    fn what_may_be_punched_is_held(events in prop::collection::vec(event(), 1..60)) {
        let mut case = Case::welcomed(600, false);
        // Pages that an answer named, and that an honest host may still be punching.
        let mut unpunched: [BTreeSet<u64>; 2] = Default::default();
        let mut asked: Vec<Message> = vec![];
        for (id, event) in events.into_iter().enumerate() {
            let id = id as u64;
            let node = |n: u64| NodeId(n as u32);
            let request = match event {
                Event::Inflate(n, pages, _) => Message::Inflate(resize(id, node(n), pages)),
                Event::Deflate(n, pages) => Message::Deflate(resize(id, node(n), pages)),
                Event::List(n) => list(id, node(n)),
                Event::Allow(pages) => Message::Allow { oom: ByteCount(pages * PAGE_SIZE) },
                Event::Repeat(i) if (i as usize) < asked.len() => asked[i as usize].clone(),
                Event::Repeat(_) => continue,
                Event::OutOfMemory => {
                    case.balloon.lock().run_out_of_memory();
                    prop_assert!(case.holds(&unpunched));
                    continue;
                }
                Event::InUse(n, pages) => {
                    case.balloon.lock().use_all_but(node(n), pages);
                    continue;
                }
                Event::Free(n, pages) => {
                    case.balloon.lock().free(node(n), pages);
                    continue;
                }
                Event::Reconnect => {
                    case.relay.disconnected();
                    case.relay.connected(&mut vec![]);
                    case.tell(Message::Welcome { session: SESSION });
                    continue;
                }
            };
            if matches!(request, Message::Deflate(_) | Message::Allow { .. }) {
                // The host sends these only after it has punched.
                unpunched = Default::default();
            } else {
                asked.push(request.clone());
            }
            let mut told = case.tell(request);
            if let Event::Inflate(_, _, early_ms) = event {
                // Memory runs out in the middle of the request.
                told.extend(case.pass(early_ms));
                case.balloon.lock().run_out_of_memory();
            }
            told.extend(case.pass(2000));
            for message in told {
                if let Message::Inflated(part) | Message::Held(part) = message {
                    unpunched[part.node.0 as usize].extend(pages(&part.ranges));
                }
            }
            prop_assert!(case.holds(&unpunched));
        }
    }
}
