//! The guest on Arm: EL1, identity-mapped by one table of 1 GiB blocks.
//!
//! The MMU must be on. Without it the guest's stores would bypass the caches through which the host reads them.

use std::arch::{asm, global_asm};

use kvm_bindings::{
    KVM_ARM_VCPU_PSCI_0_2, KVM_REG_ARM_CORE, KVM_REG_ARM64, KVM_REG_ARM64_SYSREG, KVM_REG_SIZE_U64,
    kvm_vcpu_init,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use super::{LOGGED_AT, SYSTEM_AT, Start, tables_at};
use crate::error::Error;
use crate::memory::Memory;
use crate::settings::{PAGE_BYTES, Settings};

// x0: words; x1: slice; x2: its end; x3: stride; x4: address of the stop store; x5: time of the last store.
global_asm!(
    ".pushsection .rodata",
    ".balign 4",
    ".globl demeter_dirtylog_code, demeter_dirtylog_code_end",
    ".hidden demeter_dirtylog_code, demeter_dirtylog_code_end",
    "demeter_dirtylog_code:",
    "mrs x5, cntvct_el0",
    "2:",
    "mov x6, x1",
    "3:",
    "str x5, [x6]",
    "mrs x7, cntvct_el0",
    "sub x8, x7, x5",
    "mov x5, x7",
    "ldr x9, [x0, #8]",
    "cmp x8, x9",
    "b.ls 4f",
    "str x8, [x0, #8]",
    "4:",
    "ldr x9, [x0]",
    "add x9, x9, #1",
    "str x9, [x0]",
    "ldr x9, [x0, #16]",
    "cbnz x9, 5f",
    "add x6, x6, x3",
    "cmp x6, x2",
    "b.lo 3b",
    "b 2b",
    "5:",
    "str x9, [x4]",
    "b 5b",
    "demeter_dirtylog_code_end:",
    ".popsection",
);

/// An unmapped guest-physical address: a store to it exits to us.
const STOP_AT: u64 = PAGE_BYTES;
const GIB: u64 = 1 << 30;
/// A block of the first memory type in [`MAIR`], inner shareable, accessed.
const BLOCK: u64 = 1 | 3 << 8 | 1 << 10;
/// Normal memory, write-back.
const MAIR: u64 = 0xFF;
/// 39-bit addresses, 4 KiB granule, cacheable walks, no second table, 40-bit physical addresses.
const TCR: u64 = 25 | 1 << 8 | 1 << 10 | 3 << 12 | 1 << 23 | 2 << 32;
/// MMU and caches on; the other bits are reserved ones.
const SCTLR: u64 = 0x30D0_0800 | 1 | 1 << 2 | 1 << 12;
/// EL1 with its own stack pointer and all interrupts masked.
const PSTATE: u64 = 0x3C5;

/// One table of the first level.
pub fn table_bytes(_: &Settings) -> u64 {
    PAGE_BYTES
}

/// Writes the table.
pub fn write_tables(settings: &Settings, system: &mut Memory) {
    let first = LOGGED_AT / GIB;
    let end = first + settings.memory_bytes().div_ceil(GIB);
    for gib in std::iter::once(SYSTEM_AT / GIB).chain(first..end) {
        let entry = (gib * GIB) | BLOCK;
        system.write(tables_at(settings) + gib * 8, &entry.to_le_bytes());
    }
}

/// Prepares a virtual CPU to run the program.
pub fn prepare(
    _: &Kvm,
    vm: &VmFd,
    vcpu: &VcpuFd,
    settings: &Settings,
    number: u32,
) -> Result<(), Error> {
    let mut init = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut init)
        .map_err(Error::kvm("ask which CPU there is"))?;
    init.features[0] |= 1 << KVM_ARM_VCPU_PSCI_0_2;
    vcpu.vcpu_init(&init)
        .map_err(Error::kvm("set up a virtual CPU"))?;
    let start = Start::of(settings, number);
    let general = [
        start.words,
        start.slice,
        start.slice_end,
        start.stride,
        STOP_AT,
    ];
    let general = (0..)
        .zip(general)
        .map(|(index, value)| (core(index), value));
    let others = [
        (core(32), start.code),
        (core(33), PSTATE),
        (system_register(10, 2, 0), MAIR),
        (system_register(2, 0, 2), TCR),
        (system_register(2, 0, 0), SYSTEM_AT + tables_at(settings)),
        (system_register(1, 0, 0), SCTLR),
    ];
    for (register, value) in general.chain(others) {
        vcpu.set_one_reg(register, &value.to_le_bytes())
            .map_err(Error::kvm("set a register"))?;
    }
    Ok(())
}

/// The id of a register in `struct user_pt_regs`: x0 to x30, sp, pc (32), pstate (33), eight bytes each.
fn core(index: u64) -> u64 {
    // KVM counts offsets in 4-byte words.
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | u64::from(KVM_REG_ARM_CORE) | index * 2
}

/// The id of an EL1 system register: op0 is 3, op1 is 0.
fn system_register(crn: u64, crm: u64, op2: u64) -> u64 {
    let name = 3 << 14 | crn << 7 | crm << 3 | op2;
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | u64::from(KVM_REG_ARM64_SYSREG) | name
}

/// Frequency of the guest's clock, ticks per millisecond.
pub fn clock_khz(_: &VcpuFd) -> Result<u64, Error> {
    let hz: u64;
    // SAFETY: user space may read this register; reading has no side effect.
    unsafe { asm!("mrs {}, cntfrq_el0", out(reg) hz, options(nomem, nostack)) };
    Ok((hz / 1000).max(1))
}

/// Whether a virtual CPU has reached the end of its program.
pub fn has_stopped(exit: &VcpuExit<'_>) -> bool {
    matches!(exit, VcpuExit::MmioWrite(STOP_AT, _))
}
