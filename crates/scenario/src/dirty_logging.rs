//! Dirty logging: how KVM finds the pages that a guest writes, for live migration.
//!
//! Source: Upton, KVM/ARM at Scale (KVM Forum 2022); the kernel's `dirty_log_perf_test`.

use serde::{Deserialize, Serialize};

use crate::fault::{at_least_one, refuse_if, within};
use crate::{Pages, Pattern, Scenario, System, Workload};

/// Maximum number of virtual CPUs of a logged VM.
pub(crate) const VCPUS_MAX: u32 = 512;
/// Maximum memory of a logged VM, MiB (1 TiB): the model has a byte per 4 KiB page.
const MEMORY_MAX_MIB: u64 = 1 << 20;
/// Largest stride, KiB: a block.
const STRIDE_MAX_KIB: u64 = 2048;
/// Maximum number of passes of a migration.
const PASSES_MAX: u32 = 100;

/// A VM under dirty logging: a model of second-level (stage-2) tables, `mmu_lock` and invalidations. The workload is a
/// mix of one swept part, `stores` of which are written. Each virtual CPU sweeps its own slice; speed counts steps of
/// the sweeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct DirtyLogging {
    /// The task to time.
    pub task: LoggedTask,
    /// Processor family: Arm breaks a table entry before it makes it anew, x86 logs pages in hardware.
    pub isa: Isa,
    /// Pages that back the VM before logging starts: 4k or 2m.
    pub pages: Pages,
    /// Memory of each virtual CPU, MiB; by default an equal part of the workload's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slice_mib: Option<u64>,
    /// Distance between two accesses of a sweep, KiB.
    pub stride_kib: u64,
    /// Faults that share `mmu_lock`.
    pub lock: MmuLock,
    /// When blocks of 2 MiB are split into pages.
    pub split: Split,
    /// Whether memory is write-protected (and split) in chunks, when the log is cleared, instead of all at once
    /// (KVM_DIRTY_LOG_INITIALLY_SET).
    pub initially_set: bool,
    /// Memory cleared by one call and sent in one step, MiB.
    pub chunk_mib: u64,
    /// Whether a relaxed permission is invalidated on the local CPU only, instead of all CPUs.
    pub local_invalidation: bool,
    /// Whether one instruction invalidates a range of addresses (FEAT_TLBIRANGE).
    pub tlbi_range: bool,
    /// Whether a block may be split without break-before-make (FEAT_BBM level 2).
    pub bbm2: bool,
    /// Whether hardware writes the addresses of dirty pages to a buffer (FEAT_HDBSS); x86 always does (PML).
    pub hardware_buffer: bool,
    /// Start of the migration, seconds.
    pub from_s: u64,
    /// Bandwidth of the migration, GB/s (10^9 bytes).
    pub bandwidth_gbps: u64,
    /// Maximum number of passes; then the VM is stopped and the rest is sent.
    pub passes_max: u32,
    /// Longest stop of the VM, milliseconds. The VM is stopped when the rest can be sent in this time.
    pub downtime_ms: u64,
}

impl Default for DirtyLogging {
    fn default() -> Self {
        Self {
            task: LoggedTask::default(),
            isa: Isa::default(),
            pages: Pages::Huge,
            slice_mib: None,
            stride_kib: 4,
            lock: MmuLock::default(),
            split: Split::default(),
            initially_set: false,
            chunk_mib: 64,
            local_invalidation: true,
            tlbi_range: false,
            bbm2: false,
            hardware_buffer: false,
            from_s: 5,
            bandwidth_gbps: 4,
            passes_max: 3,
            downtime_ms: 300,
        }
    }
}

/// The timed task of a VM under dirty logging.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum LoggedTask {
    /// Logging is enabled while the virtual CPUs wait. Then each sweeps its slice once, which is timed.
    #[default]
    Pass,
    /// The VM is migrated while it runs.
    Migrate,
    /// All of its memory is unmapped.
    Unmap,
}

/// A family of processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Isa {
    /// Armv8.
    #[default]
    Arm,
    /// x86-64 with a log of dirty pages (PML).
    X86,
}

/// How faults take the lock of a VM's second-level tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum MmuLock {
    /// One at a time: Linux up to 5.17 on Arm.
    Spinlock,
    /// Shared by faults that only relax a permission, exclusive for others: Linux 5.18 to 6.1.
    ReadForPermissions,
    /// Shared by all: Linux since 6.2, x86 since 5.12.
    #[default]
    ReadForAll,
}

/// When a block of 2 MiB is split, so that single pages can be logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Split {
    /// At the first fault in it, which maps only its own page.
    #[default]
    Lazy,
    /// When logging is enabled or the log is cleared; all pages stay mapped.
    Eager,
}

impl DirtyLogging {
    /// Memory of each virtual CPU, MiB.
    pub fn slice_mib(&self, scenario: &Scenario) -> u64 {
        let vcpus = u64::from(scenario.machine.vcpus.max(1));
        self.slice_mib
            .unwrap_or_else(|| scenario.workload.size_mib() / vcpus)
    }

    /// The error in its own keys, if any.
    fn check(&self) -> Result<(), String> {
        let key = |key: &str| format!("sim.dirty_logging.{key}");
        within(&key("stride_kib"), self.stride_kib, 4..=STRIDE_MAX_KIB)?;
        refuse_if(!self.stride_kib.is_power_of_two(), || {
            format!(
                "{} = {}: must be a power of two",
                key("stride_kib"),
                self.stride_kib
            )
        })?;
        within(&key("chunk_mib"), self.chunk_mib, 2..=MEMORY_MAX_MIB)?;
        refuse_if(!self.chunk_mib.is_multiple_of(2), || {
            format!(
                "{} = {}: must be whole blocks of 2 MiB",
                key("chunk_mib"),
                self.chunk_mib
            )
        })?;
        at_least_one(&key("bandwidth_gbps"), self.bandwidth_gbps)?;
        within(&key("bandwidth_gbps"), self.bandwidth_gbps, 1..=10_000)?;
        within(&key("passes_max"), self.passes_max, 1..=PASSES_MAX)?;
        within(&key("downtime_ms"), self.downtime_ms, 0..=3_600_000)?;
        refuse_if(self.pages == Pages::Giant, || {
            format!(
                "{} = \"1g\": the model has blocks of 2 MiB; use \"2m\"",
                key("pages")
            )
        })?;
        let is_x86 = self.isa == Isa::X86;
        let arm_only = [
            ("tlbi_range", self.tlbi_range),
            ("bbm2", self.bbm2),
            ("hardware_buffer", self.hardware_buffer),
        ];
        if let Some((name, _)) = arm_only.iter().find(|(_, is_on)| is_x86 && *is_on) {
            return Err(format!(
                "{}: only Arm's processors have it; remove it",
                key(name)
            ));
        }
        refuse_if(self.hardware_buffer && self.split == Split::Lazy, || {
            format!(
                "{}: the buffer holds pages, so that blocks must be split before: set split = \"eager\"",
                key("hardware_buffer")
            )
        })?;
        refuse_if(self.initially_set && self.task == LoggedTask::Pass, || {
            format!(
                "{}: a pass clears no log, so that nothing would be protected: remove it, or use task = \
                 \"migrate\"",
                key("initially_set")
            )
        })
    }
}

impl Scenario {
    pub(crate) fn check_dirty_logging(&self) -> Result<(), String> {
        let Some(logging) = &self.sim.dirty_logging else {
            return Ok(());
        };
        logging.check()?;
        refuse_if(self.systems != [System::None], || {
            "systems: with sim.dirty_logging no system moves pages: name \"none\" only".into()
        })?;
        let is_elsewhere =
            self.provision.is_some() || self.sim.translation.is_some() || self.sim.vms != 1;
        refuse_if(is_elsewhere, || {
            "sim.dirty_logging is a model of one VM by itself: remove provision, sim.translation and sim.vms"
                .into()
        })?;
        let is_swept = match &self.workload {
            Workload::Mix(mix) => {
                mix.cold_mib == 0
                    && mix.threads == 1
                    && matches!(&mix.parts[..], [part] if part.pattern == Pattern::Sweep)
            }
            _ => false,
        };
        refuse_if(!is_swept, || {
            "workload: with sim.dirty_logging it must be kind = \"mix\" with one part of pattern = \
             \"sweep\", one thread (there is one on each virtual CPU) and no cold_mib"
                .into()
        })?;
        let slice = logging.slice_mib(self);
        refuse_if(slice < 2 || slice % 2 != 0, || {
            format!(
                "sim.dirty_logging.slice_mib = {slice}: each virtual CPU needs whole blocks of 2 MiB"
            )
        })?;
        let all = slice.saturating_mul(self.machine.vcpus.into());
        let most = self.workload.size_mib().min(MEMORY_MAX_MIB);
        refuse_if(all > most, || {
            format!(
                "sim.dirty_logging.slice_mib = {slice}: all slices take {all} MiB, more than {most}: \
                 enlarge workload.parts, or use less"
            )
        })?;
        refuse_if(logging.from_s >= self.duration_s, || {
            format!(
                "sim.dirty_logging.from_s = {}: must be below duration_s = {}",
                logging.from_s, self.duration_s
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::workload::tests::checked_with;

    fn said(workload: &str, logging: &str) -> Result<(), String> {
        let sim = format!("sim = {{ dirty_logging = {{ {logging} }} }}");
        checked_with(workload, &sim).map(drop)
    }

    #[test]
    fn what_cannot_be_logged_is_refused_with_the_reason() {
        let sweep =
            "kind = \"mix\", parts = [{ size_mib = 80, pattern = \"sweep\", stores = 1.0 }]";
        assert_eq!(said(sweep, "task = \"migrate\""), Ok(()));
        for (logging, reason) in [
            ("pages = \"1g\"", "blocks of 2 MiB"),
            ("isa = \"x86\", bbm2 = true", "only Arm's"),
            ("hardware_buffer = true", "split = \"eager\""),
            ("stride_kib = 12", "a power of two"),
            ("slice_mib = 82", "all slices take 82 MiB"),
            ("slice_mib = 3", "whole blocks"),
            ("from_s = 9", "below duration_s"),
            ("initially_set = true", "clears no log"),
            ("passes_max = 0", "must be 1 to 100"),
        ] {
            let said = said(sweep, logging).unwrap_err();
            assert!(said.contains(reason), "{said}");
        }
        let said = said("kind = \"btree\", size_mib = 80", "").unwrap_err();
        assert!(said.contains("\"sweep\""), "{said}");
    }
}
