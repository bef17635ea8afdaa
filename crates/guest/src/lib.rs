//! The guest agent: tracks accesses, ranks memory by heat, and moves pages between tiers.

pub mod agent;
pub mod balloon;
pub mod config;
pub mod heat;
pub mod latency;
pub mod probe;
pub mod recording;
pub mod server;
pub mod status;
pub mod supervisor;
pub mod targets;
pub mod tracker;

pub use demeter_linux::{maps, mover, nodes, pages, policies, prober};
