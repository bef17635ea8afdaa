//! Any observations of three VMs, in any order, including answers to commands that were never sent.
//!
//! Committed memory never exceeds the pool, and each VM has at most one command at a time.
#![no_main]

use std::collections::BTreeSet;

use arbitrary::Arbitrary;
use demeter_host::VmName;
use demeter_host::controller::{Controller, Limits, Millis, Observation, Ticket};
use demeter_policy::{ByteCount, MIB, Tier, TierBytes};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
enum Told {
    Here,
    Lost,
    Gone,
    Reset,
    OwnedChanged,
    Owned(u8, u16, u16),
    Moved(u8, u16, bool),
    Failed(u8),
    Hostile,
    Wish(u16, u16),
    Forgive,
    Pass(u16),
}

fn tiers(fast_mib: u16, slow_mib: u16) -> TierBytes {
    TierBytes {
        fast: ByteCount(u64::from(fast_mib) * MIB),
        slow: ByteCount(u64::from(slow_mib) * MIB),
    }
}

fuzz_target!(|script: Vec<(u8, Told)>| {
    let pool = tiers(300, 700);
    let mut controller = Controller::new(pool);
    let names: Vec<VmName> = ["a", "b", "c"].map(|name| name.parse().unwrap()).into();
    for name in &names {
        let limits = Limits {
            guarantee: tiers(10, 20),
            limit: tiers(200, 400),
            oom: ByteCount(8 * MIB),
        };
        controller
            .add(name.clone(), limits, None, tiers(50, 100))
            .unwrap();
    }
    let mut now = Millis(0);
    let mut sent = vec![];
    for (which, told) in script {
        let name = &names[usize::from(which) % names.len()];
        // The ticket of a sent command, or an invented one.
        let ticket = |index: u8| match sent.get(usize::from(index)) {
            Some(ticket) => *ticket,
            None => Ticket(index.into()),
        };
        let observation = match told {
            Told::Here => Observation::Here,
            Told::Lost => Observation::Lost,
            Told::Gone => Observation::Gone,
            Told::Reset => Observation::Reset,
            Told::OwnedChanged => Observation::OwnedChanged,
            Told::Owned(index, fast, slow) => Observation::Owned {
                ticket: ticket(index),
                owned: tiers(fast, slow),
            },
            Told::Moved(index, mib, short) => Observation::Moved {
                ticket: ticket(index),
                owned: ByteCount(u64::from(mib) * MIB),
                reason: short.then(|| "no more".into()),
            },
            Told::Failed(index) => Observation::Failed {
                ticket: ticket(index),
                reason: "no".into(),
            },
            Told::Hostile => Observation::Hostile {
                reason: "lies".into(),
            },
            Told::Wish(fast, slow) => {
                let _ = controller.desire(now, &[(name.clone(), tiers(fast, slow))]);
                continue;
            }
            Told::Forgive => {
                let _ = controller.forgive(now, name);
                continue;
            }
            Told::Pass(ms) => {
                now.0 += u64::from(ms);
                continue;
            }
        };
        controller.observe(now, name, observation);
        let step = controller.step(now);
        let asked: BTreeSet<_> = step.commands.iter().map(|command| &command.vm).collect();
        assert_eq!(asked.len(), step.commands.len(), "two commands for one VM");
        sent.extend(step.commands.iter().map(|command| command.ticket));
        assert_eq!(controller.violations(), 0);
        for tier in Tier::ALL {
            assert!(controller.committed(tier) <= *pool.get(tier));
        }
    }
});
