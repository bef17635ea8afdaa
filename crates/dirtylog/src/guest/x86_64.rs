//! The guest on x86-64: long mode, identity-mapped by 2 MiB pages.

use std::arch::global_asm;

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use super::{LOGGED_AT, SYSTEM_AT, Start, tables_at};
use crate::error::Error;
use crate::memory::Memory;
use crate::settings::{PAGE_BYTES, Settings};

// rbx: words; rsi: slice; rdi: its end; rbp: stride; r9: time of the last store.
global_asm!(
    ".pushsection .rodata",
    ".globl demeter_dirtylog_code, demeter_dirtylog_code_end",
    ".hidden demeter_dirtylog_code, demeter_dirtylog_code_end",
    "demeter_dirtylog_code:",
    "rdtsc",
    "shl rdx, 32",
    "or rax, rdx",
    "mov r9, rax",
    "2:",
    "mov rcx, rsi",
    "3:",
    "mov [rcx], r9",
    "rdtsc",
    "shl rdx, 32",
    "or rax, rdx",
    "mov r8, rax",
    "sub r8, r9",
    "mov r9, rax",
    "cmp r8, [rbx + 8]",
    "jbe 4f",
    "mov [rbx + 8], r8",
    "4:",
    "inc qword ptr [rbx]",
    "cmp qword ptr [rbx + 16], 0",
    "jne 5f",
    "add rcx, rbp",
    "cmp rcx, rdi",
    "jb 3b",
    "jmp 2b",
    "5:",
    "hlt",
    "jmp 5b",
    "demeter_dirtylog_code_end:",
    ".popsection",
);

/// Protection, numeric errors, write protection and paging.
const CR0: u64 = 1 | 1 << 5 | 1 << 16 | 1 << 31;
/// Eight-byte entries, which long mode requires.
const CR4_PAE: u64 = 1 << 5;
/// Long mode, enabled and active.
const EFER: u64 = 1 << 8 | 1 << 10;
/// Present, writable, accessed, dirty: the CPU never writes to the tables.
const TABLE: u64 = 1 | 1 << 1 | 1 << 5;
const BLOCK: u64 = TABLE | 1 << 6 | 1 << 7;
const GIB: u64 = 1 << 30;
const BLOCK_BYTES: u64 = 2 << 20;

/// One table of level 4, one of level 3, and one of level 2 for each GiB in use.
pub fn table_bytes(settings: &Settings) -> u64 {
    (2 + gibs(settings).count() as u64) * PAGE_BYTES
}

/// The GiB of guest-physical memory in use.
fn gibs(settings: &Settings) -> impl Iterator<Item = u64> {
    let first = LOGGED_AT / GIB;
    let end = first + settings.memory_bytes().div_ceil(GIB);
    std::iter::once(SYSTEM_AT / GIB).chain(first..end)
}

/// Writes the tables.
pub fn write_tables(settings: &Settings, system: &mut Memory) {
    let mut set = |at: u64, value: u64| system.write(at, &value.to_le_bytes());
    let fourth = tables_at(settings);
    let third = fourth + PAGE_BYTES;
    set(fourth, (SYSTEM_AT + third) | TABLE);
    for (table, gib) in gibs(settings).enumerate() {
        let second = third + (1 + table as u64) * PAGE_BYTES;
        set(third + gib * 8, (SYSTEM_AT + second) | TABLE);
        for entry in 0..GIB / BLOCK_BYTES {
            set(
                second + entry * 8,
                (gib * GIB + entry * BLOCK_BYTES) | BLOCK,
            );
        }
    }
}

/// Prepares a virtual CPU to run the program.
pub fn prepare(
    kvm: &Kvm,
    _vm: &VmFd,
    vcpu: &VcpuFd,
    settings: &Settings,
    number: u32,
) -> Result<(), Error> {
    let what = Error::kvm("set up a virtual CPU");
    let cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(what)?;
    vcpu.set_cpuid2(&cpuid)
        .map_err(Error::kvm("tell a virtual CPU what it is"))?;

    let mut sregs = vcpu.get_sregs().map_err(Error::kvm("read registers"))?;
    let segment = |selector: u16, type_: u8, l: u8| kvm_segment {
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        db: 1 - l,
        s: 1,
        l,
        g: 1,
        ..kvm_segment::default()
    };
    // Code: executable and readable. Data: writable. Both are marked accessed.
    sregs.cs = segment(8, 11, 1);
    let data = segment(16, 3, 0);
    (sregs.ds, sregs.es, sregs.fs) = (data, data, data);
    (sregs.gs, sregs.ss) = (data, data);
    sregs.cr3 = SYSTEM_AT + tables_at(settings);
    (sregs.cr0, sregs.cr4, sregs.efer) = (CR0, CR4_PAE, EFER);
    vcpu.set_sregs(&sregs)
        .map_err(Error::kvm("set registers"))?;

    let start = Start::of(settings, number);
    let regs = kvm_regs {
        rip: start.code,
        rbx: start.words,
        rsi: start.slice,
        rdi: start.slice_end,
        rbp: start.stride,
        // A reserved bit.
        rflags: 2,
        ..kvm_regs::default()
    };
    vcpu.set_regs(&regs).map_err(Error::kvm("set registers"))
}

/// Frequency of the guest's clock, ticks per millisecond.
pub fn clock_khz(vcpu: &VcpuFd) -> Result<u64, Error> {
    let khz = vcpu
        .get_tsc_khz()
        .map_err(Error::kvm("ask how fast the guest's clock is"))?;
    Ok(u64::from(khz).max(1))
}

/// Whether a virtual CPU has reached the end of its program.
pub fn has_stopped(exit: &VcpuExit<'_>) -> bool {
    matches!(exit, VcpuExit::Hlt)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Backing;

    #[test]
    fn each_address_is_mapped_to_itself() {
        let settings = Settings {
            vcpus: 3,
            slice_mib: 700,
            ..Settings::default()
        };
        let bytes = super::super::system_bytes(&settings);
        let mut system = Memory::map(bytes.next_multiple_of(PAGE_BYTES), Backing::Base).unwrap();
        super::super::load(&settings, &mut system);
        let read =
            |at: u64| u64::from_le(system.word(at).load(std::sync::atomic::Ordering::Relaxed));
        let table = |entry: u64| (entry & !0xFFF) - SYSTEM_AT;
        let walk = |addr: u64| {
            let third = table(read(tables_at(&settings) + (addr >> 39 & 511) * 8));
            let entry = read(third + (addr >> 30 & 511) * 8);
            (entry != 0).then(|| {
                (read(table(entry) + (addr >> 21 & 511) * 8) & !0x1F_FFFF) + (addr & 0x1F_FFFF)
            })
        };
        for vcpu in 0..3 {
            let start = Start::of(&settings, vcpu);
            for addr in [start.code, start.words, start.slice, start.slice_end - 8] {
                assert_eq!(walk(addr), Some(addr));
            }
        }
        assert_eq!(walk(LOGGED_AT - 8), None);
        assert_eq!(
            Start::of(&settings, 2).slice,
            Start::of(&settings, 1).slice_end
        );
    }
}
