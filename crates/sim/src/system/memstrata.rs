//! Hardware-tiered memory, and Memstrata, which divides dedicated fast memory between VMs.
//!
//! Zhong et al., OSDI 2024. The memory controller tracks and moves lines (`machine/flat.rs`); the hypervisor classifies
//! VMs, not pages. Sources are the abstract and others' notes on the paper. The notes give the period of 10 s, the
//! limits of 5 % and of a tenth of a VM's pages, and the random choice of pages.
//!
//! # Problem
//! Two hot lines that share a place in fast memory evict each other at each access. Software cannot see that, and the
//! hardware does not know which VM suffers.
//!
//! # Approach
//! Both pages of a pair belong to one VM, so VMs do not evict each other's lines. Some fast memory is dedicated: it is
//! in no pair. Every 10 s each VM's loss is estimated. While a VM loses more than 5 %, its pairs become dedicated
//! pages, and as many dedicated pages of other VMs become pairs. At most a tenth of a VM's pages change in each period,
//! chosen at random. Pages pass through a few spare pages of the host. If the host has given VMs more slow pages than
//! fast ones, it reclaims dedicated pages.
//!
//! The authors estimate the loss by a classifier, trained on four counters of a core. The model uses the extra time of
//! misses over hits, divided by all other time. If several VMs lose, the authors serve the one with most misses first;
//! the model serves all at once.
//!
//! # Properties
//! - Dedicated pages move from VMs with a small loss to VMs with a large loss; none disappears.

use demeter_policy::{ByteCount, GuestPhysAddr, Tier};
use demeter_scenario::rng::Rng;

use super::{Context, Manager, Needs, Tiering};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;

/// Time between two estimates.
const PERIOD_PS: u64 = 10_000_000_000_000;

/// Time between two moves (assumed).
const STEP_PS: u64 = 10_000_000_000;

/// Share of its time above which a VM loses too much.
const OUTLIER: f64 = 0.05;

/// Divisor of a VM's pages: the most that change per period.
const MOVED_SHARE: usize = 10;

/// Random number stream that chooses pages.
const STREAM: u64 = 0x3e3;

/// Hardware tiering without a manager.
#[derive(Debug)]
pub(crate) struct HardwareAlone;

/// Memstrata's state of one VM.
#[derive(Debug)]
pub(crate) struct Memstrata {
    rng: Rng,
    /// Its paired pages, the fast one first.
    pairs: Vec<[GuestPhysAddr; 2]>,
    /// Its unpaired pages.
    dedicated: Vec<GuestPhysAddr>,
    /// End of the period.
    until_ps: u64,
    /// Whether it lost too much in the last period.
    is_outlier: bool,
    /// Pages that may still change in this period.
    allowed: usize,
    /// At the last estimate: time of misses, and the program's total time.
    before_ps: [u64; 2],
}

impl Default for Memstrata {
    fn default() -> Self {
        Self {
            rng: Rng::new(1, STREAM),
            pairs: vec![],
            dedicated: vec![],
            until_ps: 0,
            is_outlier: false,
            allowed: 0,
            before_ps: [0; 2],
        }
    }
}

/// Requirements: the memory controller tiers.
fn needs() -> Needs {
    Needs {
        tiering: Tiering::Hardware,
        ..Needs::default()
    }
}

impl Memstrata {
    /// Finds its paired and dedicated pages.
    fn look(&mut self, ctx: &mut Context<'_>) {
        let Some(flat) = &ctx.actor.memory.flat else {
            return;
        };
        let mut pages = std::collections::BTreeMap::new();
        let all = GuestPhysAddr(0)..ctx.guest.end_gpa();
        ctx.backing.tree.for_each(all, |gpa, entry, _| {
            pages.insert(entry.index(), gpa);
        });
        for (&frame, &gpa) in &pages {
            let fellow = flat.fellow(frame);
            match fellow.and_then(|fellow| pages.get(&fellow)) {
                None => self.dedicated.push(gpa),
                Some(&slow) if ctx.hypervisor.tier_of(frame) == Tier::Fast => {
                    self.pairs.push([gpa, slow]);
                }
                Some(_) => {}
            }
        }
    }

    /// Share of time that the VM lost to misses since the last call.
    fn loss(&mut self, actor: &Actor<'_>) -> f64 {
        let sum = |of: fn(&crate::machine::actor::Vcpu) -> u64| actor.vcpus.iter().map(of).sum();
        let now_ps: [u64; 2] = [
            sum(|vcpu| vcpu.bill.of(Cause::Slow)),
            sum(|vcpu| vcpu.worked_ps()),
        ];
        let [missed_ps, worked_ps] = [0, 1].map(|i| now_ps[i] - self.before_ps[i]);
        self.before_ps = now_ps;
        let [hit, more] = actor.memory.tiers().map(|tier| tier.latency_ps as f64);
        let lost_ps = missed_ps as f64 * more / (hit + more);
        lost_ps / (worked_ps as f64 - lost_ps).max(1.0)
    }

    /// Turns pairs into dedicated pages, as far as the host has fast pages; returns whether any changed.
    fn take(&mut self, ctx: &mut Context<'_>) -> bool {
        let before = self.dedicated.len();
        while self.allowed >= 2 && ctx.hypervisor.free_pages(Tier::Fast) > 0 {
            if self.pairs.is_empty() {
                break;
            }
            let chosen = self.rng.below(self.pairs.len() as u64) as usize;
            let [fast, slow] = self.pairs.swap_remove(chosen);
            if let (Some(frame), Some(flat)) =
                (ctx.backing.tree.frame(fast), &mut ctx.actor.memory.flat)
            {
                flat.part(frame);
            }
            self.move_both(slow, Tier::Fast, ctx);
            self.dedicated.extend([fast, slow]);
        }
        self.dedicated.len() > before
    }

    /// Turns dedicated pages into pairs, as far as the host needs fast pages; returns whether any changed.
    fn give(&mut self, ctx: &mut Context<'_>) -> bool {
        let before = self.pairs.len();
        let wants = |ctx: &Context<'_>| {
            let [fast, slow] = [Tier::Fast, Tier::Slow].map(|tier| ctx.hypervisor.free_pages(tier));
            fast < slow
        };
        while self.allowed >= 2 && self.dedicated.len() >= 2 && wants(ctx) {
            let [fast, slow] = [(); 2].map(|()| {
                let chosen = self.rng.below(self.dedicated.len() as u64) as usize;
                self.dedicated.swap_remove(chosen)
            });
            self.move_both(slow, Tier::Slow, ctx);
            let frames = [fast, slow].map(|gpa| ctx.backing.tree.frame(gpa));
            if let ([Some(fast), Some(slow)], Some(flat)) = (frames, &mut ctx.actor.memory.flat) {
                flat.join(fast, slow);
            }
            self.pairs.push([fast, slow]);
        }
        self.pairs.len() > before
    }

    /// Moves a page and its partner to a tier; spare pages of the host take their place.
    fn move_both(&mut self, page: GuestPhysAddr, to: Tier, ctx: &mut Context<'_>) {
        let Context {
            hypervisor,
            backing,
            actor,
            ..
        } = ctx;
        hypervisor.migrate(backing, page, to, actor);
        let bytes = 1 << backing.tree.page_bits();
        actor.charge_page(Cause::Migrate, actor.costs.migrate_page_ps);
        actor.copy(Cause::Migrate, Tier::Fast, Tier::Fast, bytes);
        self.allowed -= 2;
    }
}

impl Manager for HardwareAlone {
    fn needs(&self) -> Needs {
        needs()
    }
}

impl Manager for Memstrata {
    fn needs(&self) -> Needs {
        needs()
    }

    fn start(&mut self, _guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        self.until_ps = now_ps + PERIOD_PS;
        now_ps
    }

    fn memory_overhead(&self, guest: &Guest) -> ByteCount {
        let lists = size_of_val(&self.pairs[..]) + size_of_val(&self.dedicated[..]);
        ByteCount((lists as u64) << guest.k())
    }

    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let now_ps = ctx.actor.now_ps();
        if self.pairs.is_empty() && self.dedicated.is_empty() {
            self.look(ctx);
            self.loss(&ctx.actor);
        }
        if now_ps >= self.until_ps {
            self.until_ps = now_ps + PERIOD_PS;
            self.is_outlier = self.loss(&ctx.actor) > OUTLIER;
            self.allowed = (2 * self.pairs.len() + self.dedicated.len()) / MOVED_SHARE;
        }
        let moved = match self.is_outlier {
            true => self.take(ctx),
            false => self.give(ctx),
        };
        ctx.actor.invept(u64::from(moved));
        now_ps + STEP_PS
    }
}

#[cfg(test)]
mod tests {
    use demeter_scenario::{Scenario, System};

    use crate::machine::cost::PS_PER_S;
    use crate::setup::WorldSetup;
    use crate::system::build;
    use crate::workload::Workload;
    use demeter_policy::Tier;

    /// Two VMs: one uses all of its memory evenly, the other a small part of it.
    #[test]
    fn dedicated_pages_go_where_they_help_and_none_is_lost() {
        let text = r#"
            name = "memstrata"
            duration_s = 60
            systems = ["memstrata"]
            [machine]
            vcpus = 2
            thp = "never"
            fast = { usable_mib = 682, latency_ns = 80, bandwidth_gbps = 100 }
            slow = { usable_mib = 342, latency_ns = 200, bandwidth_gbps = 20 }
            [workload]
            kind = "gups"
            size_mib = 1000
            hot_mib = 64
            hot_weight = 0.95
            [sim]
            vms = 2
            scale_bits = 8
        "#;
        let mut scenario: Scenario = toml::from_str(text).unwrap();
        let setup = WorldSetup::new(&scenario).unwrap();
        let local = Workload::new(&scenario.workload, 1, setup.k).unwrap();
        if let demeter_scenario::Workload::Gups(gups) = &mut scenario.workload {
            gups.hot_weight = 0.064;
        }
        let even = Workload::new(&scenario.workload, 2, setup.k).unwrap();
        let mut world = setup.world(build(System::Memstrata), vec![local, even]);
        setup.pair(&mut world).unwrap();
        world.start(false).unwrap();
        let dedicated = |world: &mut crate::world::World<Workload>| {
            let flat = world.host.machine.memory.flat.clone().unwrap();
            let mut counts = vec![];
            for vm in &mut world.vms {
                let all = super::GuestPhysAddr(0)..vm.guest.end_gpa();
                let mut count = 0;
                vm.backing.tree.for_each(all, |_, entry, _| {
                    count += u64::from(flat.fellow(entry.index()).is_none());
                });
                counts.push(count);
            }
            counts
        };
        let before = dedicated(&mut world);
        assert_eq!(before[0], before[1]);
        world.run_until(60 * PS_PER_S).unwrap();
        let after = dedicated(&mut world);
        assert!(after[1] > before[1] && after[0] < before[0], "{after:?}");
        // If a spare fast page was used to make two dedicated pages, another pair is gone.
        let spare = world.host.hypervisor.free_pages(Tier::Fast);
        let spare_before = 2 * (demeter_policy::BLOCK_SIZE >> (12 + setup.k));
        let all = |dedicated: &[u64], spare: u64| dedicated.iter().sum::<u64>() + 2 * spare;
        assert_eq!(all(&after, spare.into()), all(&before, spare_before));
        let mut backings: Vec<_> = world.vms.iter_mut().map(|vm| &mut vm.backing).collect();
        world.host.hypervisor.check_frames(&mut backings);
    }

    #[test]
    fn more_slow_memory_than_fast_is_refused_with_the_key_to_raise() {
        let path =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/gups.toml");
        let scenario = Scenario::load(&path).unwrap();
        let refused = crate::run::run(&scenario, System::FlatMode, 1, &|_| Ok(()));
        let said = refused.unwrap_err().to_string();
        assert!(said.contains("machine.fast.usable_mib"), "{said}");
    }
}
