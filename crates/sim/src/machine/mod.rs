//! The machine model: cores with TLBs, page-walk caches and data caches; page tables; memory tiers; costs of events.

pub(crate) mod actor;
mod assoc;
mod caches;
pub(crate) mod core;
pub(crate) mod cost;
pub(crate) mod cpu;
pub(crate) mod flat;
pub(crate) mod flush;
pub(crate) mod ledger;
pub(crate) mod mapping;
pub(crate) mod memory;
mod prefetch;
pub(crate) mod radix;
pub(crate) mod sampler;
pub(crate) mod segment;
pub(crate) mod tier;
mod tlb;
pub(crate) mod walk;
