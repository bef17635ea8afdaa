//! A property test of several pools under a configuration that changes.
//!
//! VMs are added, removed, limited and moved between pools, and pools change their sizes, as by
//! commands and a reloaded file. Meanwhile guests boot, end, answer late, in part or not at all, and the controller is
//! restarted. After the last disturbance every guest must come to own what is desired.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::PoolName;

const VMS: usize = 4;
const POOLS: usize = 2;

/// All memory of a VM in each tier, and its first size.
const ALL_MIB: u64 = 400;
const FIRST_MIB: u64 = 100;

/// Time until everything must have settled: less than twice the longest retry interval, 16 s.
const SETTLED_WITHIN_MS: u64 = 30_000;

const LIMITS: Limits = Limits {
    guarantee: TierBytes {
        fast: ByteCount(16 * MIB),
        slow: ByteCount(16 * MIB),
    },
    limit: TierBytes {
        fast: ByteCount(300 * MIB),
        slow: ByteCount(u64::MAX),
    },
    oom: ByteCount(0),
};

#[derive(Debug)]
struct Guest {
    limits: Limits,
    is_running: bool,
    owned: TierBytes,
    /// The pool in the configuration; `None` without a section.
    pool: Option<usize>,
    /// Commands and reports of the VM's task, in order.
    commands: VecDeque<VmCommand>,
    reports: VecDeque<Observation>,
}

impl Default for Guest {
    fn default() -> Self {
        Self {
            limits: LIMITS,
            is_running: false,
            owned: TierBytes::default(),
            pool: None,
            commands: VecDeque::new(),
            reports: VecDeque::new(),
        }
    }
}

#[derive(Debug)]
struct Fleet {
    pools: Pools,
    sizes: [TierBytes; POOLS],
    guests: [Guest; VMS],
    now: Millis,
}

fn vm_name(at: usize) -> VmName {
    name(&format!("vm{at}"))
}

fn pool_name(at: usize) -> PoolName {
    PoolName(format!("pool{at}"))
}

impl Fleet {
    fn new() -> Self {
        let mut fleet = Self {
            pools: Pools::default(),
            sizes: [both(500, 600); POOLS],
            guests: Default::default(),
            now: Millis(0),
        };
        fleet.guests[0].pool = Some(0);
        fleet.restart();
        fleet
    }

    /// One disturbance; `kind` and `figure` are random.
    fn disturb(&mut self, kind: u8, at: usize, figure: u64) {
        let guest = &mut self.guests[at];
        match kind {
            0 if !guest.is_running => self.boot(at),
            1 if guest.is_running => {
                guest.owned = both(ALL_MIB, ALL_MIB);
                guest.commands.clear();
                self.report(at, Observation::Reset);
            }
            2 if guest.is_running => {
                guest.is_running = false;
                guest.owned = TierBytes::default();
                guest.commands.clear();
                self.report(at, Observation::Gone);
            }
            3..=6 => self.deliver(at),
            7..=10 => self.act(at, !figure.is_multiple_of(4)),
            11 | 12 => self.now.0 += figure % 3000,
            13 => {
                let wish = both(figure % ALL_MIB, figure / 7 % ALL_MIB);
                if let Some(pool) = self.pools.of_mut(&vm_name(at)) {
                    // It may be refused.
                    let _ = pool.desire(self.now, &[(vm_name(at), wish)]);
                }
            }
            14 => {
                let size = |of: u64| VMS as u64 * FIRST_MIB + of % 1200;
                self.sizes[at % POOLS] = both(size(figure), size(figure / 11));
                self.reload();
            }
            15 | 16 => {
                guest.pool = [None, Some(0), Some(1)][(figure % 3) as usize];
                self.reload();
            }
            17 => self.restart(),
            // The answer is lost, and the command with it.
            18 => drop(guest.commands.pop_front()),
            19 => self.limit(at, figure),
            _ => {}
        }
        self.step();
    }

    /// A person changes a VM's guarantee and limit. Guarantees fit into the smallest pool.
    fn limit(&mut self, at: usize, figure: u64) {
        let limits = &mut self.guests[at].limits;
        limits.guarantee = both(figure % FIRST_MIB, figure / 5 % FIRST_MIB);
        limits.limit.fast = ByteCount((FIRST_MIB + figure / 7 % 300) * MIB);
        let limits = *limits;
        if let Some(pool) = self.pools.of_mut(&vm_name(at)) {
            pool.set_limits(self.now, &vm_name(at), limits)
                .expect("it is there");
        }
        self.fit();
    }

    fn boot(&mut self, at: usize) {
        self.guests[at].is_running = true;
        self.guests[at].owned = both(ALL_MIB, ALL_MIB);
        self.connect(at);
    }

    /// The VM's task finds its hypervisor.
    fn connect(&mut self, at: usize) {
        let most = both(ALL_MIB, ALL_MIB);
        self.report(at, Observation::Seen { most });
        self.report(at, Observation::Here);
    }

    /// A VM without a section has no task to report.
    fn report(&mut self, at: usize, observation: Observation) {
        if self.guests[at].pool.is_some() {
            self.guests[at].reports.push_back(observation);
        }
    }

    fn deliver(&mut self, at: usize) {
        let report = self.guests[at].reports.pop_front();
        if let (Some(report), Some(pool)) = (report, self.pools.of_mut(&vm_name(at))) {
            pool.observe(self.now, &vm_name(at), report);
        }
    }

    fn act(&mut self, at: usize, wholly: bool) {
        let guest = &mut self.guests[at];
        let Some(VmCommand { ticket, order, .. }) = guest.commands.pop_front() else {
            return;
        };
        let observation = match order {
            Order::Ask => Observation::Owned {
                ticket,
                owned: guest.owned,
            },
            Order::Set { tier, target } => {
                let owned = guest.owned.get_mut(tier);
                let half = ByteCount(u64::midpoint(owned.0, target.0));
                *owned = if wholly { target } else { half };
                Observation::Moved {
                    ticket,
                    owned: *owned,
                    reason: (!wholly).then(|| "half".into()),
                }
            }
        };
        self.report(at, observation);
    }

    /// Takes the configuration over, as the deciding task does.
    fn reload(&mut self) {
        let (accounts, sizes) = (self.pools.accounts(), self.sizes);
        for (at, guest) in self.guests.iter().enumerate() {
            if guest.pool.is_none() {
                self.pools.remove(&vm_name(at));
            }
        }
        let sizes = (0..POOLS).map(|at| (pool_name(at), sizes[at]));
        self.pools.set(&sizes.collect());
        for at in 0..VMS {
            let wanted = self.guests[at].pool.map(pool_name);
            if wanted.as_ref() != self.pools.pool_of(&vm_name(at)) {
                self.place(at, accounts.get(&vm_name(at)).copied());
            }
        }
        self.fit();
    }

    /// Puts a VM into its pool, with a new task.
    fn place(&mut self, at: usize, kept: Option<Account>) {
        let name = vm_name(at);
        self.pools.remove(&name);
        self.guests[at].commands.clear();
        self.guests[at].reports.clear();
        let Some(pool) = self.guests[at].pool else {
            return;
        };
        let first = both(FIRST_MIB, FIRST_MIB);
        let limits = self.guests[at].limits;
        let added = self.pools.add(&pool_name(pool), &name, limits, kept, first);
        added.expect("its pool is there");
        if self.guests[at].is_running {
            self.connect(at);
        }
    }

    fn fit(&mut self) {
        for (_, pool) in self.pools.iter_mut() {
            pool.fit(self.now, |_| both(FIRST_MIB, FIRST_MIB));
        }
    }

    /// Starts a controller from the stored accounts.
    fn restart(&mut self) {
        let accounts = self.pools.accounts();
        self.pools = Pools::default();
        let sizes = (0..POOLS).map(|at| (pool_name(at), self.sizes[at]));
        self.pools.set(&sizes.collect());
        for at in 0..VMS {
            self.place(at, accounts.get(&vm_name(at)).copied());
        }
        self.fit();
    }

    fn step(&mut self) {
        for (_, pool) in self.pools.iter_mut() {
            for command in pool.step(self.now).commands {
                let vm = pool.vms().find(|(name, _)| **name == command.vm);
                let owned = vm.and_then(|(_, vm)| vm.owned);
                if let (Order::Set { tier, target }, Some(owned)) = (command.order, owned)
                    && target > *owned.get(tier)
                {
                    let (held, size) = (pool.may_hold(tier), pool.pool(tier));
                    assert!(held <= size, "{command:?} with {held} of {size} held");
                }
                let guest = (0..VMS).find(|at| vm_name(*at) == command.vm);
                let guest = &mut self.guests[guest.expect("it is a guest of ours")];
                if guest.is_running {
                    guest.commands.push_back(command);
                }
            }
        }
    }

    fn check(&self) {
        assert_eq!(self.pools.violations(), 0);
        for (at, guest) in self.guests.iter().enumerate() {
            let Some(vm) = self.pools.vm(&vm_name(at)) else {
                assert_eq!(guest.pool, None);
                continue;
            };
            // The controller does not know reports on their way.
            if guest.reports.is_empty() {
                for tier in Tier::ALL {
                    assert!(
                        guest.owned.get(tier) <= vm.may_hold.get(tier),
                        "{at}: {vm:?}"
                    );
                }
            }
        }
    }

    /// Starts every VM, and lets every guest carry out every command.
    fn settle(&mut self) {
        for at in 0..VMS {
            if !self.guests[at].is_running {
                self.boot(at);
            }
        }
        let end = self.now.0 + SETTLED_WITHIN_MS;
        while self.now.0 < end {
            for at in 0..VMS {
                self.act(at, true);
                while !self.guests[at].reports.is_empty() {
                    self.deliver(at);
                }
            }
            self.now.0 += 100;
            self.step();
            self.check();
        }
        for (name, pool) in self.pools.iter() {
            for tier in Tier::ALL {
                let (committed, size) = (pool.committed(tier), pool.pool(tier));
                assert!(committed <= size, "{name:?}: {committed} of {size} {tier}");
                assert!(pool.may_hold(tier) <= size, "{name:?}: {pool:?}");
            }
        }
        for (at, guest) in self.guests.iter().enumerate() {
            let Some(vm) = self.pools.vm(&vm_name(at)).filter(|_| guest.is_running) else {
                continue;
            };
            assert_eq!(guest.owned, vm.desired, "{at} ({guest:?}): {vm:?}");
            for tier in Tier::ALL {
                let (owned, guarantee) = (guest.owned.get(tier), guest.limits.guarantee.get(tier));
                assert!(
                    owned >= guarantee,
                    "{at} starves: {owned} of {guarantee} {tier}"
                );
            }
        }
    }
}

/// Disturbances, with their VMs and figures.
type Script = Vec<(u8, usize, u32)>;

fn script(steps: impl Into<prop::collection::SizeRange>) -> impl Strategy<Value = Script> {
    prop::collection::vec((0..20_u8, 0..VMS, any::<u32>()), steps)
}

fn no_pool_is_exceeded_and_all_comes_to_rest(script: Script) {
    let mut fleet = Fleet::new();
    for (kind, at, figure) in script {
        fleet.disturb(kind, at, figure.into());
        fleet.check();
    }
    fleet.settle();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_pool_is_exceeded_while_the_configuration_changes_and_all_comes_to_rest(
        script in script(1..300),
    ) {
        no_pool_is_exceeded_and_all_comes_to_rest(script);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    #[ignore = "minutes in a debug build, seconds in release; cargo xtask test-long runs it"]
    fn a_million_disturbances_exceed_no_pool(script in script(2000..=2000)) {
        no_pool_is_exceeded_and_all_comes_to_rest(script);
    }
}
