//! Guests that lie, and agents that speak for another VM.

use super::*;

#[tokio::test]
async fn who_cannot_prove_whose_guest_it_is_changes_nothing() {
    let proves: [fn(NodeId, Nonce) -> Option<GuestPhysAddr>; 4] = [
        // Memory of the VM without the nonce.
        |_, _| Some(GuestPhysAddr(0)),
        // Memory of no VM, of the other tier, and a partial page.
        |_, _| Some(GuestPhysAddr(1 << 40)),
        |_, _| Some(GuestPhysAddr(16 * MIB)),
        |_, _| Some(GuestPhysAddr(8)),
    ];
    for prove in proves {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let guest = tokio::spawn(async move {
            let mut driver = Driver::new();
            let mut pipe = Pipe::welcomed(&listener, hello(1, 1)).await;
            pipe.prove_by(Box::new(prove));
            while let Some(message) = pipe.hear().await {
                for message in driver.answer(&message) {
                    pipe.say(&message).await;
                }
            }
        });
        let memory = TestBacking::new();
        let mut balloon = balloon(&memory, &socket).await;
        let refused = balloon.set(Tier::Fast, mib(3), deadline()).await;
        let Err(ProvisionError::Refused(why)) = refused else {
            panic!("{refused:?}");
        };
        assert!(why.contains("does not speak for this VM"), "{why}");
        assert!(memory.is_untouched());
        guest.abort();
    }
}

/// Lies of a hostile guest that is asked for 1 MiB of fast memory, as (lie, ranges).
fn lies() -> Vec<(&'static str, Vec<GpaRange>)> {
    let page = PAGE_SIZE;
    vec![
        ("slow memory as fast", vec![range(16 * MIB, MIB)]),
        ("in the hole", vec![range(5 * MIB, page)]),
        (
            "over the edge of the hole",
            vec![range(4 * MIB - page, 2 * page)],
        ),
        (
            "across the hole",
            vec![range(4 * MIB - page, 4 * MIB + 2 * page)],
        ),
        ("beyond all memory", vec![range(1 << 50, page)]),
        (
            "beyond all addresses",
            vec![range(u64::MAX - page + 1, 2 * page)],
        ),
        ("everything", vec![range(0, !(page - 1))]),
        ("unaligned start", vec![range(512, page)]),
        ("unaligned length", vec![range(0, page + 1)]),
        ("nothing", vec![range(0, 0)]),
        ("twice", vec![range(0, page), range(0, page)]),
        (
            "overlapping",
            vec![range(0, 3 * page), range(2 * page, 2 * page)],
        ),
        ("more than asked", vec![range(0, MIB), range(MIB, page)]),
        ("one bad of many", {
            let mut pages: Vec<_> = (0..200).map(|i| range(i * page, page)).collect();
            pages.push(range(32 * MIB, page));
            pages
        }),
    ]
}

#[tokio::test]
async fn a_hostile_guest_touches_no_memory() {
    for (lie, ranges) in lies() {
        // Sent in an answer to Inflate, then to List; a list has no limit to exceed.
        for listed in [false, true] {
            if listed && lie == "more than asked" {
                continue;
            }
            let mut driver = Driver::new();
            let ranges = ranges.clone();
            let mut vm = vm(move |message| match message {
                Message::Inflate(Resize { request, node, .. }) if !listed => {
                    let mut answers = parts(request, node, &ranges, Message::Inflated);
                    answers.push(done(request, node, Outcome::Ok));
                    answers
                }
                Message::List { request, node, .. } if listed && node == NodeId(0) => {
                    let mut answers = parts(request, node, &ranges, Message::Held);
                    answers.push(done(request, node, Outcome::Ok));
                    answers
                }
                message => driver.answer(&message),
            })
            .await;
            let error = vm
                .balloon
                .set(Tier::Fast, mib(7), deadline())
                .await
                .unwrap_err();
            assert!(
                matches!(error, ProvisionError::Hostile(_)),
                "{lie}: {error}"
            );
            assert!(vm.memory.is_untouched(), "{lie}");
        }
    }
}

#[tokio::test]
async fn held_pages_cannot_be_named_again() {
    let mut driver = Driver::new();
    let mut first: Option<Vec<Message>> = None;
    let mut vm = vm(move |message| match (&message, &first) {
        (Message::Inflate(resize), Some(replayed)) => {
            // The answer to an earlier request with the id of this one.
            let renamed = |message: &Message| match message.clone() {
                Message::Inflated(ranges) => Message::Inflated(Ranges {
                    request: resize.request,
                    ..ranges
                }),
                message => message,
            };
            replayed.iter().map(renamed).collect()
        }
        (Message::Inflate(_), None) => {
            let answers = driver.answer(&message);
            first = Some(answers.clone());
            answers
        }
        _ => driver.answer(&message),
    })
    .await;
    vm.balloon
        .set(Tier::Fast, mib(7), deadline())
        .await
        .unwrap();
    let before = vm.memory.bytes(Tier::Fast);
    let error = vm
        .balloon
        .set(Tier::Fast, mib(6), deadline())
        .await
        .unwrap_err();
    assert!(matches!(error, ProvisionError::Hostile(_)), "{error}");
    assert!(vm.memory.bytes(Tier::Fast) == before);
}

#[tokio::test]
async fn answers_to_other_requests_are_not_acted_upon() {
    let mut driver = Driver::new();
    let mut vm = vm(move |message| {
        let mut answers = driver.answer(&message);
        if let Message::Inflate(Resize { request, node, .. }) = message {
            for other in [request.0 - 1, request.0 + 1, 0, u64::MAX] {
                let foreign = parts(RequestId(other), node, &[range(0, MIB)], Message::Inflated);
                answers.splice(0..0, foreign.clone());
                answers.extend(foreign);
            }
        }
        answers
    })
    .await;
    let progress = vm
        .balloon
        .set(Tier::Fast, mib(7), deadline())
        .await
        .unwrap();
    assert_eq!(
        (progress.owned, progress.returned_to_host),
        (mib(7), mib(1))
    );
    let first = ..MIB as usize;
    assert!(vm.memory.bytes(Tier::Fast)[first] == untouched(Tier::Fast)[first]);
}

#[tokio::test]
async fn an_answer_without_end_ends_at_the_deadline() {
    for empty in [true, false] {
        let mut driver = Driver::new();
        let mut vm = vm(move |message| match message {
            Message::List { request, node, .. } => {
                let part = |i: u64| {
                    let pages = (0..50).map(|p| range((i * 50 + p) * PAGE_SIZE, PAGE_SIZE));
                    Message::Held(Ranges {
                        request,
                        node,
                        more: true,
                        ranges: if empty { vec![] } else { pages.collect() },
                    })
                };
                (0..10_000).map(part).collect()
            }
            message => driver.answer(&message),
        })
        .await;
        let short = Instant::now() + Duration::from_millis(500);
        let error = vm.balloon.actual(short).await.unwrap_err();
        match (empty, &error) {
            (true, ProvisionError::Timeout(_)) | (false, ProvisionError::Hostile(_)) => {}
            _ => panic!("{error}"),
        }
        assert!(vm.memory.is_untouched());
    }
}

#[tokio::test]
async fn one_hostile_guest_does_not_keep_another_from_its_work() {
    let mut silent = vm(|_| vec![]).await;
    let (mut vm, driver) = honest().await;
    let hostile = silent
        .balloon
        .actual(Instant::now() + Duration::from_millis(300));
    let honest = vm.balloon.set(Tier::Slow, mib(4), deadline());
    let (silent, progress) = tokio::join!(hostile, honest);
    assert!(
        matches!(silent, Err(ProvisionError::Timeout(_))),
        "{silent:?}"
    );
    assert_eq!(progress.unwrap().owned, mib(4));
    only_held_memory_is_gone(&vm.memory, &driver.lock().unwrap());
}
