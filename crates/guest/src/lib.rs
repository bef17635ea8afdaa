//! The guest agent: tracks accesses, classifies ranges of virtual addresses, relocates pages.

pub mod maps;
pub mod mover;
pub mod nodes;
pub mod pages;
pub mod residency;
pub mod targets;
pub mod tracker;
