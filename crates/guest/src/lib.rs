//! The guest agent: tracks accesses, classifies ranges of virtual addresses, relocates pages.

pub mod maps;
pub mod nodes;
pub mod probe;
pub mod tracker;
