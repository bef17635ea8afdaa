//! The program of the virtual CPUs, and its layout in guest-physical memory.
//!
//! | guest-physical | content |
//! |---|---|
//! | 1 MiB | a page of code, a page of words for each virtual CPU, page tables (x86) |
//! | 4 GiB | the slices, one after another: the logged memory |
//!
//! A virtual CPU stores to its slice with a stride, from start to end, repeatedly. After each store it reads the clock,
//! keeps the longest time between two stores, counts the store, and checks whether to stop. The VM has nothing else: no
//! interrupts, no devices, no firmware.

#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
mod arch;

use std::slice;

use crate::memory::Memory;
use crate::settings::{PAGE_BYTES, Settings};

pub use arch::{clock_khz, has_stopped, prepare};

/// Guest-physical address of memory that is not logged.
pub const SYSTEM_AT: u64 = 1 << 20;
/// Guest-physical address of logged memory, aligned to the largest page size.
pub const LOGGED_AT: u64 = 4 << 30;

/// Offsets of a virtual CPU's words in its page.
pub mod word {
    /// Number of stores so far.
    pub const STORES: u64 = 0;
    /// Longest time between two stores since the word was reset, in ticks of the guest's clock.
    pub const WAIT: u64 = 8;
    /// Not zero if the virtual CPU should stop.
    pub const STOP: u64 = 16;
}

/// Offset of a virtual CPU's words in memory that is not logged.
pub fn words_at(vcpu: u32) -> u64 {
    PAGE_BYTES * (1 + u64::from(vcpu))
}

/// Size of the memory that is not logged.
pub fn system_bytes(settings: &Settings) -> u64 {
    tables_at(settings) + arch::table_bytes(settings)
}

unsafe extern "C" {
    #[link_name = "demeter_dirtylog_code"]
    static CODE: u8;
    #[link_name = "demeter_dirtylog_code_end"]
    static CODE_END: u8;
}

/// The program.
fn code() -> &'static [u8] {
    let (begin, end) = (&raw const CODE, &raw const CODE_END);
    // SAFETY: the two labels enclose the program of each architecture, in one read-only section.
    unsafe { slice::from_raw_parts(begin, end.offset_from_unsigned(begin)) }
}

/// Writes code and tables.
pub fn load(settings: &Settings, system: &mut Memory) {
    system.write(0, code());
    arch::write_tables(settings, system);
}

/// Offset of page tables in memory that is not logged.
fn tables_at(settings: &Settings) -> u64 {
    words_at(settings.vcpus)
}

/// Initial values of a virtual CPU.
struct Start {
    code: u64,
    words: u64,
    slice: u64,
    slice_end: u64,
    stride: u64,
}

impl Start {
    fn of(settings: &Settings, vcpu: u32) -> Self {
        let slice = LOGGED_AT + u64::from(vcpu) * settings.slice_bytes();
        Self {
            code: SYSTEM_AT,
            words: SYSTEM_AT + words_at(vcpu),
            slice,
            slice_end: slice + settings.slice_bytes(),
            stride: settings.stride_kib << 10,
        }
    }
}
