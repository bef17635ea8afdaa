//! The host side of a lab VM: its parts (kernel, initramfs, plugin) and its emulator.

mod child;
mod counts;
mod domain;
mod elastic;
mod elf;
mod emulator;
mod initramfs;
mod kernel;
mod lab;
mod memory;
mod module;
mod monitor;
mod nested;
mod package;
pub(crate) mod plugin;
mod prepare;
mod prepared;
mod programs;
mod qemu;
mod qemu_check;
mod quoted;
mod setup;
mod tool;
mod tree;

pub use child::dies_with_this_thread;
pub(crate) use child::{Orders, VmChild};
pub(crate) use domain::Daemon;
pub(crate) use elastic::Elastic;
pub use initramfs::Initramfs;
pub use lab::Lab;
pub(crate) use memory::{NodeSizes, check_host};
pub(crate) use monitor::{DIMM_SLOTS, Monitor};
pub(crate) use prepare::run_name;
pub(crate) use prepared::PreparedVm;
pub(crate) use programs::{Finder, in_place};
pub(crate) use setup::{CONFIG, ControllerSetup, VmEntry, socket};
