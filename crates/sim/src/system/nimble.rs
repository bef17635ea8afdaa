//! Nimble: kernel page lists with fast migration, by several threads and in pairs.
//!
//! Yan et al., ASPLOS 2019; constants from the authors' kernel (`mm/memory_manage.c`). It tracks by accessed bits,
//! classifies by active and inactive lists, and exchanges pages in equal numbers.
//!
//! # Problem
//! A kernel migrates pages one at a time in one thread, which leaves most bandwidth unused.
//!
//! # Approach
//! Every second, each page's accessed bit is cleared. A page accessed twice in a row is active; an idle page is
//! inactive. Active pages of slow memory are promoted, and as many inactive pages of fast memory demoted. Four threads
//! copy each batch.
//!
//! # Properties
//! - Promotions never exceed demotions plus free memory.

use demeter_policy::{GuestVirtAddr, Tier};

use super::{Context, Manager};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::radix::PageSize;

/// Time between two turns.
const TURN_PS: u64 = 1_000_000_000_000;

/// Number of copying threads (`limit_mt_num`).
const COPIERS: usize = 4;

/// Real pages moved by one call (`migration_batch_size`).
const BATCH: usize = 16;

/// Nimble's kernel part; all its state is in the kernel's lists.
#[derive(Debug, Default)]
pub(crate) struct Nimble;

/// Active pages of slow memory, and inactive pages of fast memory.
#[derive(Debug, Default)]
struct Found {
    hot: Vec<GuestVirtAddr>,
    cold: Vec<GuestVirtAddr>,
}

/// Clears all accessed bits and updates the lists.
fn look(guest: &mut Guest, actor: &mut Actor<'_>) -> Found {
    let mut found = Found::default();
    let (mut base, mut huge) = (0, 0);
    for vma in guest.vmas().to_vec() {
        guest.take_accessed(vma.start()..vma.end(), |at, size, tier, is_active| {
            match size {
                PageSize::Base => base += 1,
                _ => huge += 1,
            }
            match (tier, is_active) {
                (Tier::Slow, true) => found.hot.push(at),
                (Tier::Fast, false) => found.cold.push(at),
                _ => {}
            }
        });
    }
    actor.charge_page(Cause::Track, base * actor.costs.scan_entry_ps);
    actor.charge(Cause::Track, huge * actor.costs.scan_entry_ps);
    found
}

impl Manager for Nimble {
    fn start(&mut self, _guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        now_ps + TURN_PS
    }

    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let Context { guest, actor, .. } = ctx;
        let due_ps = actor.now_ps() + TURN_PS;
        let Found { hot, cold } = look(guest, actor);
        let mut cold = cold.into_iter();
        let batch = (BATCH >> actor.k).max(1);
        actor.copiers = COPIERS;
        for up in hot.chunks(batch) {
            let sizes = up.iter().filter_map(|&at| Some(guest.tables.find(at)?.1));
            let bytes: u64 = sizes.map(|size| guest.bytes(size)).sum();
            while guest.usable(Tier::Fast).0 < bytes {
                let down: Vec<_> = cold.by_ref().take(batch).collect();
                if guest.migrate_pages(&down, Tier::Slow, actor) == 0 {
                    break;
                }
            }
            if guest.migrate_pages(up, Tier::Fast, actor) == 0 {
                break;
            }
        }
        actor.copiers = 1;
        due_ps.max(actor.now_ps())
    }
}
