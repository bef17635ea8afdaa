//! The host's side of a lab VM: its parts (kernel, initramfs, plugin), its emulator, its life.

pub(crate) mod child;
mod elf;
mod initramfs;
mod kernel;
mod lab;
mod memory;
pub(crate) mod plugin;
mod qemu;
mod tool;

pub use lab::Lab;
