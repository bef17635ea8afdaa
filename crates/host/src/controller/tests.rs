use demeter_policy::MIB;

use super::*;

mod fleet;
mod world;

fn bytes(mib: u64) -> ByteCount {
    ByteCount(mib * MIB)
}

fn both(fast: u64, slow: u64) -> TierBytes {
    TierBytes {
        fast: bytes(fast),
        slow: bytes(slow),
    }
}

fn name(text: &str) -> VmName {
    text.parse().unwrap()
}

fn limits() -> Limits {
    Limits {
        guarantee: both(32, 64),
        limit: both(1000, 1000),
        oom: bytes(0),
    }
}

/// A controller of 1000 MiB in each tier, with VMs that desire this much fast memory.
fn controller(vms: &[(&str, u64)]) -> Controller {
    let mut controller = Controller::new(both(1000, 1000));
    for (vm, fast) in vms {
        let added = controller.add(name(vm), limits(), None, both(*fast, 100));
        added.unwrap();
    }
    controller
}

const NOW: Millis = Millis(1000);

fn after(ms: u64) -> Millis {
    Millis(NOW.0 + ms)
}

/// Answers commands for a VM that owns this much. Returns the first order to own another size, if
/// any.
fn settle(c: &mut Controller, now: Millis, vm: &str, owned: TierBytes) -> Option<VmCommand> {
    for _ in 0..4 {
        let mut commands = sent(c, now).into_iter();
        let command = commands.find(|command| command.vm == name(vm))?;
        let ticket = command.ticket;
        let observation = match command.order {
            Order::Ask => Observation::Owned { ticket, owned },
            Order::Set { tier, target } if target == *owned.get(tier) => Observation::Moved {
                ticket,
                owned: target,
                reason: None,
            },
            Order::Set { .. } => return Some(command),
        };
        c.observe(now, &name(vm), observation);
    }
    panic!("{vm} is asked again and again");
}

/// The VM appears and owns this much.
fn here(c: &mut Controller, vm: &str, owned: TierBytes) -> Option<VmCommand> {
    c.observe(NOW, &name(vm), Observation::Here);
    settle(c, NOW, vm, owned)
}

fn sent(controller: &mut Controller, now: Millis) -> Vec<VmCommand> {
    controller.step(now).commands
}

fn set(tier: Tier, mib: u64) -> Order {
    Order::Set {
        tier,
        target: bytes(mib),
    }
}

#[test]
fn one_shrinks_before_another_grows() {
    let mut c = controller(&[("a", 600), ("b", 400)]);
    here(&mut c, "a", both(600, 100));
    here(&mut c, "b", both(400, 100));
    assert_eq!(sent(&mut c, NOW), []);
    let wishes = [(name("a"), both(200, 100)), (name("b"), both(800, 100))];
    c.desire(NOW, &wishes).unwrap();

    let commands = sent(&mut c, NOW);
    assert_eq!(commands.len(), 1, "{commands:?}");
    assert_eq!(commands[0].order, set(Tier::Fast, 200));
    let moved = |owned, reason: Option<&str>| Observation::Moved {
        ticket: commands[0].ticket,
        owned: bytes(owned),
        reason: reason.map(str::to_owned),
    };
    // Half has been returned, so half can go to the other VM at once.
    c.observe(NOW, &name("a"), moved(400, Some("busy")));
    let commands = sent(&mut c, NOW);
    assert_eq!(commands.len(), 1, "{commands:?}");
    assert_eq!(
        (commands[0].vm.as_str(), commands[0].order),
        ("b", set(Tier::Fast, 600))
    );
    assert_eq!(c.committed(Tier::Fast), bytes(1000));
    // A repeated observation changes nothing.
    c.observe(NOW, &name("a"), moved(0, None));
    assert_eq!(c.committed(Tier::Fast), bytes(1000));
}

#[test]
fn a_failure_is_asked_about_and_tried_again_later_and_later() {
    let mut c = controller(&[("a", 600)]);
    let owned = both(1000, 100);
    let mut command = here(&mut c, "a", owned).unwrap();
    let mut now = NOW;
    let mut waits = vec![];
    for _ in 0..10 {
        assert_eq!(command.order, set(Tier::Fast, 600));
        let (vm, ticket) = (name("a"), command.ticket);
        let reason = "no".to_owned();
        c.observe(now, &vm, Observation::Failed { ticket, reason });
        assert_eq!(settle(&mut c, now, "a", owned), None);
        let due = c.wake_at().unwrap();
        waits.push(due.0 - now.0);
        now = due;
        command = settle(&mut c, now, "a", owned).unwrap();
    }
    assert_eq!(
        waits,
        [250, 500, 1000, 2000, 4000, 8000, 16000, 16000, 16000, 16000]
    );
}

#[test]
fn what_is_unfinished_is_gone_on_with_at_once() {
    let mut c = controller(&[("a", 600)]);
    c.observe(NOW, &name("a"), Observation::Here);
    for _ in 0..10 {
        let commands = sent(&mut c, NOW);
        assert_eq!(commands[0].order, Order::Ask);
        let ticket = commands[0].ticket;
        let reason = "in many pieces".to_owned();
        c.observe(NOW, &name("a"), Observation::Unfinished { ticket, reason });
        let (_, vm) = c.vms().next().unwrap();
        assert_eq!(
            (vm.owned, vm.reason.as_deref()),
            (None, Some("in many pieces"))
        );
    }
}

#[test]
fn a_vm_that_does_not_answer_delays_no_other() {
    let mut c = controller(&[("a", 300), ("b", 300)]);
    here(&mut c, "a", both(300, 100));
    here(&mut c, "b", both(300, 100));
    let wishes = [(name("a"), both(400, 100)), (name("b"), both(600, 100))];
    c.desire(NOW, &wishes).unwrap();
    let commands = sent(&mut c, NOW);
    assert_eq!(commands.len(), 2);
    // "a" stalls, "b" obeys.
    let ticket = commands[1].ticket;
    let owned = bytes(600);
    let reason = None;
    c.observe(
        after(10),
        &name("b"),
        Observation::Moved {
            ticket,
            owned,
            reason,
        },
    );
    assert_eq!(sent(&mut c, after(10)), []);
    let overdue = c.wake_at().unwrap();
    assert_eq!(overdue, after(15_000));
    let step = c.step(overdue);
    assert_eq!(step.log[0].what, What::Overdue);
    assert_eq!(step.commands.len(), 1);
    assert_eq!(step.commands[0].order, Order::Ask);
    // The command for "a" may have taken effect.
    assert_eq!(c.committed(Tier::Fast), bytes(1000));
}

#[test]
fn on_a_busy_host_a_late_answer_counts_and_nothing_is_sent_again() {
    let mut c = controller(&[("a", 300)]);
    here(&mut c, "a", both(300, 100));
    c.desire(NOW, &[(name("a"), both(400, 100))]).unwrap();
    let ticket = sent(&mut c, NOW)[0].ticket;
    let late = after(3 * PATIENCE.as_millis() as u64);
    assert_eq!(sent(&mut c, late), []);
    let owned = bytes(400);
    let reason = None;
    let moved = Observation::Moved {
        ticket,
        owned,
        reason,
    };
    c.observe(late, &name("a"), moved);
    assert_eq!(sent(&mut c, late), []);
    let (_, vm) = c.vms().next().unwrap();
    assert_eq!(vm.owned, Some(both(400, 100)));
}

#[test]
fn wishes_that_break_a_rule_are_refused_and_change_nothing() {
    let mut c = controller(&[("a", 600), ("b", 400)]);
    let before = c.accounts();
    let refused = |c: &mut Controller, wishes: &[(&str, TierBytes)]| {
        let wishes: Vec<_> = wishes.iter().map(|(vm, wish)| (name(vm), *wish)).collect();
        c.desire(NOW, &wishes).unwrap_err().to_string()
    };
    assert_eq!(
        refused(&mut c, &[("b", both(401, 100))]),
        "1001 MiB of fast memory for all VMs together is more than the pool's 1000 MiB; \
         lower another VM first"
    );
    assert_eq!(
        refused(&mut c, &[("a", both(100, 100)), ("b", both(31, 100))]),
        "31 MiB of fast memory for b is under its guarantee of 32 MiB"
    );
    assert_eq!(
        refused(&mut c, &[("a", both(100, 1001))]),
        "1001 MiB of slow memory for a is over its limit of 1000 MiB"
    );
    assert_eq!(refused(&mut c, &[("x", both(0, 0))]), "there is no VM 'x'");
    assert_eq!(c.accounts(), before);
    // The sum of both wishes fits.
    let wishes = [(name("b"), both(900, 100)), (name("a"), both(100, 100))];
    c.desire(NOW, &wishes).unwrap();
}

#[test]
fn a_liar_is_left_alone_with_what_was_committed_for_it() {
    let mut c = controller(&[("a", 600), ("b", 400)]);
    here(&mut c, "a", both(600, 100));
    here(&mut c, "b", both(400, 100));
    c.desire(NOW, &[(name("a"), both(100, 100))]).unwrap();
    assert_eq!(sent(&mut c, NOW).len(), 1);
    let reason = "it claims memory of another VM".to_owned();
    c.observe(NOW, &name("a"), Observation::Hostile { reason });
    for observation in [
        Observation::Here,
        Observation::OwnedChanged,
        Observation::Reset,
    ] {
        c.observe(NOW, &name("a"), observation);
    }
    assert_eq!(sent(&mut c, after(60_000)), []);
    let refused = c.desire(NOW, &[(name("b"), both(900, 100))]).unwrap_err();
    assert!(matches!(refused, Refusal::BeyondPool { .. }), "{refused}");
    let refused = c.desire(NOW, &[(name("a"), both(200, 100))]).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "a is left alone until it is started anew, because it claims memory of another VM"
    );
    // Other VMs continue, and its memory is free once its hypervisor has exited.
    c.desire(NOW, &[(name("b"), both(300, 100))]).unwrap();
    assert_eq!(sent(&mut c, NOW)[0].order, set(Tier::Fast, 300));
    c.observe(NOW, &name("a"), Observation::Gone);
    c.desire(NOW, &[(name("b"), both(900, 100))]).unwrap();
}

#[test]
fn the_out_of_memory_allowance_is_part_of_what_is_committed() {
    let mut c = Controller::new(both(1000, 1000));
    let limits = Limits {
        oom: bytes(16),
        ..limits()
    };
    c.add(name("a"), limits, None, both(100, 100)).unwrap();
    let command = here(&mut c, "a", both(100, 500)).unwrap();
    assert_eq!(command.order, set(Tier::Slow, 84));
}

#[test]
fn what_was_committed_survives_the_controller() {
    let mut c = controller(&[("a", 600), ("b", 400)]);
    here(&mut c, "a", both(600, 100));
    let wishes = [(name("a"), both(200, 100)), (name("b"), both(800, 100))];
    c.desire(NOW, &wishes).unwrap();
    let step = c.step(NOW);
    assert!(step.accounts_changed);
    let kept = c.accounts();
    let mut again = Controller::new(both(1000, 1000));
    for (vm, account) in kept.clone() {
        again.add(vm, limits(), Some(account), both(0, 0)).unwrap();
    }
    assert_eq!(again.accounts(), kept);
    assert_eq!(again.committed(Tier::Fast), bytes(1000));
}

#[test]
fn what_a_vm_was_started_with_counts_until_it_is_given_back() {
    let mut c = controller(&[("a", 100), ("b", 300)]);
    here(&mut c, "b", both(300, 100));
    let most = both(900, 100);
    c.observe(NOW, &name("a"), Observation::Seen { most });
    // The agent of "a" is silent, and "a" may be using all its memory.
    let step = c.step(NOW);
    let above = |entry: &LogEntry| matches!(entry.what, What::Above { .. });
    assert!(step.log.iter().any(above), "{:?}", step.log);
    assert_eq!(c.may_hold(Tier::Fast), bytes(1200));
    c.desire(NOW, &[(name("b"), both(400, 100))]).unwrap();
    assert_eq!(sent(&mut c, NOW), [], "nobody grows");
    assert_eq!(c.wake_at(), None, "and nobody waits for a time");
    // Part of it is returned, and the other VM may grow by that.
    let command = here(&mut c, "a", both(900, 100)).unwrap();
    assert_eq!(command.order, set(Tier::Fast, 100));
    let moved = |owned, why: Option<&str>| Observation::Moved {
        ticket: command.ticket,
        owned: bytes(owned),
        reason: why.map(str::to_owned),
    };
    c.observe(NOW, &name("a"), moved(650, Some("busy")));
    let commands = sent(&mut c, NOW);
    assert_eq!(
        (commands[0].vm.as_str(), commands[0].order),
        ("b", set(Tier::Fast, 350))
    );
    // After a reset "a" holds all its memory again, but "b" may have grown already.
    c.observe(NOW, &name("a"), Observation::Reset);
    assert_eq!(c.may_hold(Tier::Fast), bytes(1250));
    // A mark does not change the bound; only the end of "a" does.
    let reason = "it lies".to_owned();
    c.observe(NOW, &name("a"), Observation::Hostile { reason });
    assert_eq!(c.may_hold(Tier::Fast), bytes(1250));
    c.observe(NOW, &name("a"), Observation::Gone);
    assert_eq!(c.may_hold(Tier::Fast), bytes(350));
}

#[test]
fn a_vm_is_given_no_more_than_its_hypervisor_gave_it() {
    let mut c = controller(&[("a", 600)]);
    let most = both(512, 200);
    c.observe(NOW, &name("a"), Observation::Seen { most });
    let (_, vm) = c.vms().next().unwrap();
    assert_eq!(vm.limits.limit, most);
    assert_eq!(here(&mut c, "a", both(512, 100)), None, "it has all it can");
    assert!(c.desire(NOW, &[(name("a"), both(513, 100))]).is_err());
}

/// A controller that starts with stored accounts of `vms`.
fn kept(pools: TierBytes, vms: &[(&str, u64)]) -> Controller {
    let mut c = Controller::new(pools);
    for (vm, fast) in vms {
        let account = Account {
            desired: both(*fast, 100),
            committed: both(*fast, 100),
        };
        c.add(name(vm), limits(), Some(account), both(100, 100))
            .unwrap();
    }
    c.fit(NOW, |_| both(100, 100));
    c
}

#[test]
fn a_pool_that_was_shrunk_is_kept_to_by_shrinking_first() {
    let mut c = kept(both(500, 1000), &[("a", 600), ("b", 400)]);
    let wishes: Vec<_> = c.vms().map(|(_, vm)| vm.desired.fast).collect();
    // Each wish is lowered by five eighths of its excess over its configuration.
    assert_eq!(wishes.iter().map(|wish| wish.0).sum::<u64>(), bytes(500).0);
    assert_eq!(wishes[0], ByteCount(bytes(600).0 - bytes(500).0 * 5 / 8));
    assert_eq!(c.violations(), 0);
    let shrinks = here(&mut c, "b", both(400, 100)).unwrap();
    assert!(matches!(shrinks.order, Order::Set { target, .. } if target == wishes[1]));
    here(&mut c, "a", both(600, 100)).unwrap();
    let before = c.committed(Tier::Fast);
    let ticket = shrinks.ticket;
    let (owned, reason) = (wishes[1], None);
    c.observe(
        NOW,
        &name("b"),
        Observation::Moved {
            ticket,
            owned,
            reason,
        },
    );
    let _ = c.step(NOW);
    assert!(c.committed(Tier::Fast) < before);
    assert_eq!(c.violations(), 0, "it only gets less");
}

#[test]
fn a_vm_that_is_added_where_all_is_given_out_is_given_what_others_give_back() {
    let mut c = kept(both(1000, 1000), &[("a", 600), ("b", 400)]);
    c.add(name("new"), limits(), None, both(100, 100)).unwrap();
    c.fit(NOW, |_| both(100, 100));
    let wished: u64 = c.vms().map(|(_, vm)| vm.desired.fast.0).sum();
    assert!(wished <= bytes(1000).0);
    let wish_of = |c: &Controller, vm: &str| c.vms().find(|(of, _)| of.as_str() == vm).unwrap().1;
    assert_eq!(wish_of(&c, "new").desired.fast, bytes(100), "as configured");
    assert_eq!(
        wish_of(&c, "new").committed.fast,
        bytes(0),
        "nothing is there yet"
    );
    for (vm, owned) in [("a", 600), ("b", 400)] {
        let command = here(&mut c, vm, both(owned, 100)).unwrap();
        let Order::Set { target, .. } = command.order else {
            panic!("{command:?}")
        };
        let moved = Observation::Moved {
            ticket: command.ticket,
            owned: target,
            reason: None,
        };
        c.observe(NOW, &name(vm), moved);
    }
    let command = here(&mut c, "new", both(0, 0)).unwrap();
    assert_eq!(command.order, set(Tier::Fast, 100));
    assert_eq!(c.violations(), 0);
}

#[test]
fn as_near_as_can_be_is_not_tried_again() {
    let mut c = controller(&[("a", 101)]);
    let command = here(&mut c, "a", both(104, 100)).unwrap();
    let (ticket, owned) = (command.ticket, bytes(100));
    let reason = None;
    c.observe(
        NOW,
        &name("a"),
        Observation::Moved {
            ticket,
            owned,
            reason,
        },
    );
    assert_eq!(sent(&mut c, NOW), []);
    assert_eq!(c.wake_at(), None);
    c.desire(NOW, &[(name("a"), both(102, 100))]).unwrap();
    assert_eq!(sent(&mut c, NOW)[0].order, set(Tier::Fast, 102));
}
