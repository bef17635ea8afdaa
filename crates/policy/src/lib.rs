//! The policy of tiered memory, as pure functions over plain data.
//!
//! No I/O, no clock, no thread, no randomness: time, limits and observations are arguments, and decisions are results.
//! The live agent, the lab and the simulator run the same code.
//!
//! Within a guest [`engine::Engine`] decides: [`Sample`]s or [`Observation`]s → [`Heat`] of each block → pairs of
//! blocks whose exchange has paid for itself ([`Plan`], with [`ResidencyMap`] and [`Room`]) → batches of moves.
//! [`Tuning`] has its parameters. [`damon`] chooses which accessed bits to read in a guest without a PMU. [`provision`]
//! divides a host's memory between guests, with the [`benefit`] that each expects of fast memory, and [`history`] finds hot memory of a guest without an agent.

mod addr;
pub mod benefit;
pub mod chance;
pub mod damon;
pub mod engine;
mod heat;
pub mod history;
mod placer;
mod planner;
pub mod provision;
mod ranking;
mod residency;
mod rule;
mod sample;
mod saved;
pub mod served;
mod share;
mod significance;
mod sockets;
mod thinning;
mod tier;
mod tuning;
mod working_set;

pub use addr::{
    BLOCK_SIZE, Block, ByteCount, COLLAPSE_HOLES_MAX, GuestPhysAddr, GuestVirtAddr, MIB, NodeId,
    PAGE_SIZE, PhysRange, Pid, VirtRange,
};
pub use heat::Heat;
pub use placer::{Distances, Placer, Rooms, room_of_one};
pub use planner::{FillThreshold, MoveBudget, Plan, Relocation, Room, Situation, plan};
pub use ranking::{ClassifiedRange, RankedRange, rank};
pub use residency::{Away, ResidencyMap, Spread};
pub use sample::{Observation, Sample};
pub use share::{Share, divide};
pub use sockets::{Socket, Sockets, rooms_by_socket};
pub use thinning::thinning;
pub use tier::{ByLevel, LEVELS, Level, PerTier, Tier, TierBytes};
pub use tuning::{OutOfBounds, SAMPLE_PERIOD_MAX, Tuning};
pub use working_set::{WorkingSet, working_set};
