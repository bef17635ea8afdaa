//! The guest agent: tracks accesses, classifies ranges of virtual addresses, relocates pages.

pub mod agent;
pub mod balloon;
pub mod config;
pub mod latency;
pub mod maps;
pub mod mover;
pub mod nodes;
pub mod pages;
pub mod probe;
pub mod prober;
pub mod recording;
pub mod server;
pub mod status;
pub mod supervisor;
pub mod targets;
pub mod tracker;
