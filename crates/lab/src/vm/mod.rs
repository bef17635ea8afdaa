//! The host's side of a lab VM: its parts (kernel, initramfs, plugin), its emulator, its life.

mod child;
mod elf;
mod initramfs;
mod kernel;
mod lab;
mod memory;
mod module;
mod package;
mod plugin;
mod qemu;
mod tool;

pub use initramfs::Initramfs;
pub use lab::Lab;
