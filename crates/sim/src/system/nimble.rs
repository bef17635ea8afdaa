//! Nimble: the kernel's lists, and moves that are quick: by several threads, in pairs.
//!
//! Yan et al., ASPLOS 2019; numbers as in the authors' kernel (`mm/memory_manage.c`). It tracks by
//! accessed bits, classifies by active and inactive lists, and exchanges as many pages as it finds
//! on both sides.
//!
//! # Problem
//! A kernel moves pages one after the other by one thread, which leaves most of the bandwidth unused.
//!
//! # Approach
//! Every second each page's bit is taken. A page that was accessed twice in a row is active; one
//! that was not accessed is inactive. Active pages of slow memory go up and as many inactive
//! ones of fast memory down, in batches that four threads copy.
//!
//! # Properties
//! - No more goes up than comes down, beyond what is free.

use demeter_policy::GuestVirtAddr;

use super::{Context, Manager};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::memory::TierId;
use crate::machine::radix::PageSize;

/// Time between two turns.
const TURN_PS: u64 = 1_000_000_000_000;

/// Threads that copy (`limit_mt_num`).
const COPIERS: usize = 4;

/// Real pages that are moved by one call (`migration_batch_size`).
const BATCH: usize = 16;

/// The kernel's part: it keeps all that it knows in its lists.
#[derive(Debug, Default)]
pub(crate) struct Nimble;

/// Active pages of slow memory, and inactive ones of fast memory.
#[derive(Debug, Default)]
struct Found {
    hot: Vec<GuestVirtAddr>,
    cold: Vec<GuestVirtAddr>,
}

/// Takes all pages' bits; the lists follow.
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
                (TierId::Slow, true) => found.hot.push(at),
                (TierId::Fast, false) => found.cold.push(at),
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
            while guest.usable(TierId::Fast).0 < bytes {
                let down: Vec<_> = cold.by_ref().take(batch).collect();
                if guest.migrate_pages(&down, TierId::Slow, actor) == 0 {
                    break;
                }
            }
            if guest.migrate_pages(up, TierId::Fast, actor) == 0 {
                break;
            }
        }
        actor.copiers = 1;
        due_ps.max(actor.now_ps())
    }
}
