//! A randomized test: a million steps against guests that crash, reset, stall and lie.
//!
//! Observations get lost, duplicated and late, and the controller is killed and restarted. After
//! the last disturbance every guest must come to own what is desired.

use std::collections::VecDeque;

use demeter_policy::chance::Chance;

use super::*;

/// Random events, reproducible by a seed.
struct Rng(Chance);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0.below(n)
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// A random size up to `mib` MiB.
    fn mib(&mut self, mib: u64) -> ByteCount {
        bytes(self.below(mib + 1))
    }

    fn both(&mut self, mib: u64) -> TierBytes {
        PerTier::from_fn(|_| self.mib(mib))
    }

    fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }
}

/// Whether an observation answers a command.
fn answers(observation: &Observation) -> bool {
    matches!(
        observation,
        Observation::Owned { .. }
            | Observation::Moved { .. }
            | Observation::Failed { .. }
            | Observation::Unfinished { .. }
    )
}

const POOL_MIB: u64 = 4000;
const SIZE_MIB: u64 = 3000;
const VMS: usize = 4;

/// Each hypervisor's report of its VM.
const SEEN: Observation = Observation::Seen {
    most: TierBytes {
        fast: ByteCount(SIZE_MIB * MIB),
        slow: ByteCount(SIZE_MIB * MIB),
    },
};

struct Guest {
    name: VmName,
    limits: Limits,
    honest: bool,
    running: bool,
    /// Memory that it has with its present balloon.
    owned: TierBytes,
    /// Whether it has shrunk since its boot. Until then it owns more than it may use.
    settled: PerTier<bool>,
    /// Bound of the slow memory that it may own through its out-of-memory allowance.
    ceiling: Option<ByteCount>,
    /// Commands in flight to it, in order, each with its controller's number.
    pipe: VecDeque<(u32, VmCommand)>,
}

struct World {
    rng: Rng,
    pools: TierBytes,
    now: Millis,
    controller: Controller,
    /// Number of controllers so far.
    generation: u32,
    /// The stored state.
    kept: BTreeMap<VmName, Account>,
    guests: Vec<Guest>,
    /// Observations in flight, as (guest, observation).
    observations: Vec<(usize, Observation)>,
    /// Guests with an unsolicited observation in flight.
    untold: Vec<VmName>,
    /// Committed sums at the last check.
    committed: TierBytes,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng(Chance::new(seed));
        let guests: Vec<_> = (0..VMS)
            .map(|i| {
                let guarantee = PerTier::from_fn(|_| bytes(50 + rng.below(100)));
                Guest {
                    name: name(&format!("vm{i}")),
                    limits: Limits {
                        guarantee,
                        limit: PerTier::from_fn(|_| bytes(1000 + rng.below(2000))),
                        oom: rng.mib(40),
                    },
                    honest: !rng.one_in(4),
                    running: false,
                    owned: TierBytes::default(),
                    settled: PerTier::default(),
                    ceiling: None,
                    pipe: VecDeque::new(),
                }
            })
            .collect();
        let mut world = Self {
            rng,
            pools: both(POOL_MIB, POOL_MIB),
            now: Millis(0),
            controller: Controller::new(both(0, 0)),
            generation: 0,
            kept: BTreeMap::new(),
            guests,
            observations: vec![],
            untold: vec![],
            committed: TierBytes::default(),
        };
        world.start_controller();
        world
    }

    /// Starts a controller from the stored state. Observations for its predecessor are lost.
    fn start_controller(&mut self) {
        self.observations.clear();
        self.generation += 1;
        self.committed = PerTier::from_fn(|_| ByteCount(u64::MAX));
        self.controller = Controller::new(self.pools);
        for (i, guest) in self.guests.iter().enumerate() {
            let kept = self.kept.get(&guest.name).copied();
            let added = self.controller.add(
                guest.name.clone(),
                guest.limits,
                kept,
                guest.limits.guarantee,
            );
            added.expect("it is there once");
            if guest.running {
                self.observations.push((i, SEEN));
                self.observations.push((i, Observation::Here));
            }
        }
        let first = |name: &VmName| {
            let guest = self.guests.iter().find(|guest| guest.name == *name);
            guest.unwrap().limits.guarantee
        };
        self.controller.fit(self.now, first);
        self.kept = self.controller.accounts();
    }

    fn tell(&mut self, guest: usize, observation: Observation) {
        self.observations.push((guest, observation));
    }

    fn boot(&mut self, i: usize) {
        let guest = &mut self.guests[i];
        guest.running = true;
        guest.owned = both(SIZE_MIB, SIZE_MIB);
        guest.settled = PerTier::default();
        guest.ceiling = None;
        guest.pipe.clear();
    }

    /// Injects a random disturbance.
    fn disturb(&mut self) {
        let i = self.rng.index(VMS);
        let running = self.guests[i].running;
        match self.rng.below(100) {
            0..30 => self.deliver(),
            30..60 => self.guest_acts(i),
            60..70 => self.wish(),
            70..80 => self.now.0 += self.rng.below(3000),
            80..85 => self.lose_or_double_an_observation(),
            85 if running => {
                // The agent dies with its queued commands, and another one starts.
                self.guests[i].pipe.clear();
                self.tell(i, Observation::Lost);
                self.tell(i, Observation::Here);
            }
            86 if running => {
                self.boot(i);
                self.tell(i, Observation::Reset);
            }
            87 if running => {
                self.guests[i].running = false;
                self.guests[i].owned = TierBytes::default();
                self.guests[i].ceiling = None;
                self.guests[i].pipe.clear();
                self.tell(i, Observation::Gone);
            }
            88..94 if !running => {
                self.boot(i);
                self.tell(i, SEEN);
                self.tell(i, Observation::Here);
            }
            94 if !self.guests[i].honest => {
                let reason = "it was caught".to_owned();
                self.tell(i, Observation::Hostile { reason });
            }
            95 => {
                // Sometimes with other pools.
                if self.rng.one_in(4) {
                    let mib = |rng: &mut Rng| bytes(POOL_MIB / 2 + rng.below(POOL_MIB));
                    self.pools = PerTier::from_fn(|_| mib(&mut self.rng));
                }
                self.start_controller();
            }
            96..100 => self.out_of_memory(i),
            _ => {}
        }
        self.step();
    }

    /// Delivers one of the observations in flight. Reports of a VM's connection may be late, but
    /// keep their order and are not lost, like the state of a socket.
    fn deliver(&mut self) {
        if self.observations.is_empty() {
            return;
        }
        let mut at = self.rng.index(self.observations.len());
        let (guest, observation) = &self.observations[at];
        if !answers(observation) {
            let first = |(other, observation): &(usize, Observation)| {
                other == guest && !answers(observation)
            };
            at = self.observations.iter().position(first).unwrap_or(at);
        }
        let (guest, observation) = self.observations.remove(at);
        let name = &self.guests[guest].name;
        self.controller.observe(self.now, name, observation);
    }

    fn lose_or_double_an_observation(&mut self) {
        if self.observations.is_empty() {
            return;
        }
        let at = self.rng.index(self.observations.len());
        if !answers(&self.observations[at].1) {
            return;
        }
        if self.rng.one_in(2) {
            self.observations.push(self.observations[at].clone());
        } else {
            self.observations.remove(at);
        }
    }

    /// A guest carries out its next command, fully, in part or not at all.
    fn guest_acts(&mut self, i: usize) {
        let guest = &mut self.guests[i];
        let Some((generation, command)) = guest.pipe.pop_front() else {
            return;
        };
        let ticket = command.ticket;
        let reason = "no".to_owned();
        let observation = match command.order {
            _ if self.rng.one_in(8) => Observation::Failed { ticket, reason },
            _ if self.rng.one_in(8) => Observation::Unfinished { ticket, reason },
            Order::Ask if guest.honest => Observation::Owned {
                ticket,
                owned: guest.owned,
            },
            Order::Ask => Observation::Owned {
                ticket,
                owned: self.rng.both(SIZE_MIB),
            },
            Order::Set { tier, target } => {
                let owned = guest.owned.get_mut(tier);
                let whole = !self.rng.one_in(4);
                *owned = match (whole, target < *owned) {
                    (true, _) => target,
                    (false, true) => ByteCount(target.0 + (owned.0 - target.0) / 2),
                    (false, false) => ByteCount(owned.0 + (target.0 - owned.0) / 2),
                };
                if tier == Tier::Slow {
                    guest.ceiling = Some(ByteCount(target.min(*owned).0 + guest.limits.oom.0));
                }
                Observation::Moved {
                    ticket,
                    owned: match guest.honest {
                        true => *owned,
                        false => self.rng.mib(SIZE_MIB),
                    },
                    reason: (!whole).then_some(reason),
                }
            }
        };
        if generation == self.generation {
            self.tell(i, observation);
        }
    }

    /// A guest takes memory back by itself, within its allowance.
    fn out_of_memory(&mut self, i: usize) {
        let guest = &mut self.guests[i];
        if let Some(ceiling) = guest.ceiling.filter(|&c| guest.owned.slow < c) {
            let left = ceiling.0 - guest.owned.slow.0;
            guest.owned.slow.0 += 1 + self.rng.below(left);
            self.tell(i, Observation::OwnedChanged);
        }
    }

    fn wish(&mut self) {
        let n = 1 + self.rng.index(VMS);
        let wishes: Vec<_> = (0..n)
            .map(|_| {
                let i = self.rng.index(VMS);
                (self.guests[i].name.clone(), self.rng.both(2500))
            })
            .collect();
        let before = self.controller.accounts();
        if self.controller.desire(self.now, &wishes).is_err() {
            assert_eq!(
                self.controller.accounts(),
                before,
                "a refusal changed something"
            );
        }
    }

    /// The controller decides; its accounts are stored before its commands are sent.
    fn step(&mut self) {
        let step = self.controller.step(self.now);
        let accounts = self.controller.accounts();
        if step.accounts_changed {
            self.kept = accounts;
        } else {
            assert_eq!(self.kept, accounts, "a change was not announced");
        }
        for command in step.commands {
            self.check_growth(&command);
            let guest = self
                .guests
                .iter_mut()
                .find(|g| g.name == command.vm)
                .unwrap();
            if guest.running {
                guest.pipe.push_back((self.generation, command));
            }
        }
    }

    /// Checks that no VM grows while VMs may hold more than the pool.
    fn check_growth(&self, command: &VmCommand) {
        let vm = self.controller.vms().find(|(name, _)| **name == command.vm);
        let owned = vm.unwrap().1.owned;
        if let (Order::Set { tier, target }, Some(owned)) = (command.order, owned)
            && target > *owned.get(tier)
        {
            let (held, pool) = (self.controller.may_hold(tier), self.controller.pool(tier));
            assert!(held <= pool, "{command:?} with {held} of {pool} held");
        }
    }

    fn check(&mut self) {
        for tier in Tier::ALL {
            // An excess over the pool must be older than this controller, and may only shrink.
            let committed = self.controller.committed(tier);
            let before = self.committed.get_mut(tier);
            assert!(committed <= self.controller.pool(tier).max(*before));
            *before = committed;
        }
        assert_eq!(self.controller.violations(), 0);
        let is_told = |(guest, told): &(usize, Observation)| {
            (!answers(told)).then(|| self.guests[*guest].name.clone())
        };
        self.untold = self.observations.iter().filter_map(is_told).collect();
        for (name, vm) in self.controller.vms() {
            let guest = self.guests.iter_mut().find(|g| g.name == *name).unwrap();
            for tier in Tier::ALL {
                let (owned, committed) = (guest.owned.get(tier), vm.committed.get(tier));
                // The controller does not know observations in flight.
                let is_known = !self.untold.contains(&guest.name);
                assert!(
                    !guest.honest || !is_known || *owned <= *vm.may_hold.get(tier),
                    "{name} owns {owned} {tier}, and may hold {}",
                    vm.may_hold.get(tier)
                );
                let settled = guest.settled.get_mut(tier);
                assert!(
                    !guest.honest || !*settled || owned <= committed,
                    "{name} owns {owned} {tier}, committed are {committed}"
                );
                *settled |= owned <= committed;
            }
        }
    }

    /// Ends all disturbances: guests are honest and carry out every command.
    fn come_to_rest(&mut self) {
        self.observations
            .retain(|(_, r)| !matches!(r, Observation::Hostile { .. }));
        for i in 0..VMS {
            if self.guests[i].running && !self.guests[i].honest {
                self.boot(i);
                self.tell(i, Observation::Reset);
            }
            self.guests[i].honest = true;
            if !self.guests[i].running {
                self.boot(i);
                self.tell(i, SEEN);
                self.tell(i, Observation::Here);
            }
            if matches!(self.status(i).state, State::Hostile(_)) {
                self.boot(i);
                self.tell(i, Observation::Gone);
            }
        }
        for _ in 0..100 {
            for (guest, observation) in std::mem::take(&mut self.observations) {
                // A restarted VM's Gone arrives before its Here.
                let name = self.guests[guest].name.clone();
                let gone = observation == Observation::Gone;
                self.controller.observe(self.now, &name, observation);
                if gone {
                    self.controller.observe(self.now, &name, SEEN);
                    self.controller.observe(self.now, &name, Observation::Here);
                }
            }
            self.step();
            self.check();
            for guest in &mut self.guests {
                for (generation, command) in std::mem::take(&mut guest.pipe) {
                    let ticket = command.ticket;
                    let observation = match command.order {
                        Order::Ask => Observation::Owned {
                            ticket,
                            owned: guest.owned,
                        },
                        Order::Set { tier, target } => {
                            *guest.owned.get_mut(tier) = target;
                            Observation::Moved {
                                ticket,
                                owned: target,
                                reason: None,
                            }
                        }
                    };
                    if generation == self.generation {
                        self.controller.observe(self.now, &guest.name, observation);
                    }
                }
            }
            if let Some(due) = self.controller.wake_at() {
                self.now = self.now.max(due);
            }
        }
        for i in 0..VMS {
            let (status, guest) = (self.status(i), &self.guests[i]);
            let slow = ByteCount(status.desired.slow.0 - guest.limits.oom.0);
            let due = TierBytes {
                fast: status.desired.fast,
                slow,
            };
            assert_eq!(
                guest.owned, due,
                "{} did not come to rest: {status:?}",
                guest.name
            );
            assert_eq!(status.committed, status.desired);
        }
        assert_eq!(self.controller.wake_at(), None);
    }

    fn status(&self, i: usize) -> VmStatus {
        let name = &self.guests[i].name;
        self.controller.vms().find(|(vm, _)| *vm == name).unwrap().1
    }
}

const SEEDS: u64 = 1000;
const STEPS: u64 = 1000;

#[test]
fn a_million_random_steps_never_promise_more_than_there_is_and_end_at_rest() {
    for seed in 0..SEEDS {
        let run = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            for _ in 0..STEPS {
                world.disturb();
                world.check();
            }
            world.come_to_rest();
        });
        assert!(run.is_ok(), "seed {seed}");
    }
}
