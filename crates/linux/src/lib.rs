//! Interfaces of the Linux kernel for agent and controller.
//!
//! Nodes, mappings, page placement, DAMON and perf rings. No decisions are made here.

pub mod base_page;
pub mod cpu;
pub mod damon;
pub mod lock;
pub mod mapping;
pub mod maps;
pub mod mover;
pub mod nodes;
pub mod open_files;
pub mod page_size;
pub mod pages;
pub mod perf;
pub mod policies;
pub mod prober;
pub mod report;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tlb_flusher;
