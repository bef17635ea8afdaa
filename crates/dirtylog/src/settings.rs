//! Settings of a measurement: guest, memory, and use of the log.

use serde::Serialize;

/// Size of a page in KVM's log.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// Size of a block: the huge page that logging splits.
pub(crate) const BLOCK_BYTES: u64 = 2 << 20;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Maximum of all slices together.
const MEMORY_MAX_MIB: u64 = 256 << 10;
/// Maximum number of passes.
const PASSES_MAX: u32 = 100;
/// Longest pause after a chunk.
const PAUSE_MAX_US: u64 = 1_000_000;
/// KVM clears whole words of its bitmap: 64 pages each.
const CLEAR_UNIT_KIB: u64 = 256;

/// The kind of pages that back the guest's memory.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Serialize,
    strum::Display,
    strum::EnumString,
    strum::VariantNames,
)]
pub enum Backing {
    /// Pages of 4 KiB.
    #[strum(serialize = "4k")]
    #[serde(rename = "4k")]
    Base,
    /// Transparent huge pages, if the kernel provides them.
    #[strum(serialize = "thp")]
    #[serde(rename = "thp")]
    Transparent,
    /// Reserved huge pages of 2 MiB.
    #[strum(serialize = "2m")]
    #[serde(rename = "2m")]
    Huge2M,
    /// Reserved huge pages of 1 GiB.
    #[strum(serialize = "1g")]
    #[serde(rename = "1g")]
    Huge1G,
}

impl Backing {
    /// Size of the huge pages that must be reserved.
    pub(crate) fn hugetlb_bytes(self) -> Option<u64> {
        match self {
            Self::Base | Self::Transparent => None,
            Self::Huge2M => Some(BLOCK_BYTES),
            Self::Huge1G => Some(GIB),
        }
    }
}

/// When pages are write-protected.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Serialize,
    strum::Display,
    strum::EnumString,
    strum::VariantNames,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Protect {
    /// All of them when logging is enabled, and again whenever the log is read.
    Get,
    /// All of them when logging is enabled, and again when their part of the log is cleared
    /// (KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2).
    Manual,
    /// When their part of the log is first cleared: the log starts with all pages in it (KVM_DIRTY_LOG_INITIALLY_SET).
    InitiallySet,
}

/// Settings of one measurement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Settings {
    /// Virtual CPUs, each with a slice of its own.
    pub vcpus: u32,
    /// Size of each slice, MiB.
    pub slice_mib: u64,
    /// Backing of the slices.
    pub backing: Backing,
    /// Distance between stores, KiB: 4 stores to every page, 2048 to one page per block.
    pub stride_kib: u64,
    /// When pages are write-protected.
    pub protect: Protect,
    /// Size of the parts in which the log is cleared, MiB; `None` clears all at once. Not with [`Protect::Get`].
    pub clear_chunk_mib: Option<u64>,
    /// Pause after each part, microseconds.
    pub clear_pause_us: u64,
    /// Size of the chunks that Arm's KVM splits before it write-protects, KiB (KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE);
    /// `None` splits at faults. On x86 the parameter `eager_page_split` of the module kvm decides.
    pub eager_split_kib: Option<u64>,
    /// Number of passes over the log.
    pub passes: u32,
    /// Length of the run before logging, seconds.
    pub before_s: f64,
    /// Time limit of each pass, seconds.
    pub pass_limit_s: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            vcpus: 1,
            slice_mib: 256,
            backing: Backing::Transparent,
            stride_kib: 4,
            protect: Protect::InitiallySet,
            clear_chunk_mib: None,
            clear_pause_us: 0,
            eager_split_kib: None,
            passes: 3,
            before_s: 1.0,
            pass_limit_s: 60.0,
        }
    }
}

/// An error in the settings.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SettingsError {
    /// A number is out of range.
    #[error("{name} = {value}: it must be {must}")]
    Range {
        /// Its option.
        name: &'static str,
        /// The value.
        value: String,
        /// The allowed range.
        must: String,
    },
    /// Chunks or pauses without manual clearing.
    #[error(
        "--clear-chunk-mib and --clear-pause-us need --protect manual or initially-set: reading clears all at once"
    )]
    NothingToClear,
}

impl Settings {
    /// Checks the settings.
    ///
    /// # Errors
    /// The first invalid one.
    pub fn check(&self) -> Result<(), SettingsError> {
        let wrong = |name, value: &dyn ToString, must: &dyn ToString| {
            Err(SettingsError::Range {
                name,
                value: value.to_string(),
                must: must.to_string(),
            })
        };
        if !(1..=4096).contains(&self.vcpus) {
            return wrong("--vcpus", &self.vcpus, &"from 1 to what KVM allows");
        }
        let unit_mib = self.backing.hugetlb_bytes().unwrap_or(BLOCK_BYTES) / MIB;
        if self.slice_mib == 0 || !self.slice_mib.is_multiple_of(unit_mib) {
            let must = format!("a multiple of {unit_mib} with --backing {}", self.backing);
            return wrong("--slice-mib", &self.slice_mib, &must);
        }
        if self.slice_mib > MEMORY_MAX_MIB / u64::from(self.vcpus) {
            let must = format!("{MEMORY_MAX_MIB} in all slices at the most");
            return wrong("--slice-mib", &self.slice_mib, &must);
        }
        if !self.stride_kib.is_power_of_two() || !(4..=2048).contains(&self.stride_kib) {
            return wrong(
                "--stride-kib",
                &self.stride_kib,
                &"a power of two from 4 to 2048",
            );
        }
        if self.protect == Protect::Get
            && (self.clear_chunk_mib.is_some() || self.clear_pause_us > 0)
        {
            return Err(SettingsError::NothingToClear);
        }
        if self.clear_chunk_mib == Some(0) {
            return wrong("--clear-chunk-mib", &0, &"1 or more");
        }
        if self.clear_pause_us > PAUSE_MAX_US {
            let must = format!("{PAUSE_MAX_US} at the most");
            return wrong("--clear-pause-us", &self.clear_pause_us, &must);
        }
        if let Some(kib) = self.eager_split_kib
            && (!kib.is_power_of_two() || kib < BLOCK_BYTES / 1024)
        {
            return wrong("--eager-split-kib", &kib, &"a power of two, 2048 or more");
        }
        if !(1..=PASSES_MAX).contains(&self.passes) {
            return wrong("--passes", &self.passes, &format!("from 1 to {PASSES_MAX}"));
        }
        // NaN is in no range.
        if !(0.01..=600.0).contains(&self.before_s) {
            return wrong("--before-s", &self.before_s, &"from 0.01 to 600");
        }
        if !(0.01..=3600.0).contains(&self.pass_limit_s) {
            return wrong("--pass-limit-s", &self.pass_limit_s, &"from 0.01 to 3600");
        }
        Ok(())
    }

    /// Size of one slice.
    pub(crate) fn slice_bytes(&self) -> u64 {
        self.slice_mib * MIB
    }

    /// Size of all logged memory.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.slice_bytes() * u64::from(self.vcpus)
    }

    /// Number of stores in one sweep of a virtual CPU.
    pub(crate) fn stores_a_sweep(&self) -> u64 {
        self.slice_mib * 1024 / self.stride_kib
    }

    /// Number of pages written by all sweeps together.
    pub fn pages_written(&self) -> u64 {
        self.stores_a_sweep() * u64::from(self.vcpus)
    }

    /// The parts in which the log is cleared: first page and number of pages.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = (u64, u32)> {
        // The kernel's limit of 2^32 - 1 pages per call exceeds all memory here.
        let pages = self.memory_bytes() / PAGE_BYTES;
        let each = self
            .clear_chunk_mib
            .map_or(pages, |mib| mib * MIB / PAGE_BYTES)
            .clamp(CLEAR_UNIT_KIB * 1024 / PAGE_BYTES, pages);
        (0..pages)
            .step_by(each as usize)
            .map(move |first| (first, each.min(pages - first) as u32))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn refused(change: impl FnOnce(&mut Settings)) -> String {
        let mut settings = Settings::default();
        change(&mut settings);
        settings.check().unwrap_err().to_string()
    }

    #[test]
    fn what_cannot_be_is_told_with_what_may() {
        assert_eq!(Settings::default().check(), Ok(()));
        let said = refused(|s| s.slice_mib = 3);
        assert_eq!(
            said,
            "--slice-mib = 3: it must be a multiple of 2 with --backing thp"
        );
        let said = refused(|s| {
            s.backing = Backing::Huge1G;
            s.slice_mib = 512;
        });
        assert!(
            said.contains("multiple of 1024 with --backing 1g"),
            "{said}"
        );
        let said = refused(|s| {
            s.vcpus = 4096;
            s.slice_mib = !1;
        });
        assert!(said.contains("262144 in all"), "{said}");
        let said = refused(|s| {
            s.protect = Protect::Get;
            s.clear_chunk_mib = Some(64);
        });
        assert!(said.contains("--protect manual"), "{said}");
        for wrong in [f64::NAN, -1.0, 1e9] {
            assert!(refused(|s| s.before_s = wrong).contains("--before-s"));
            assert!(refused(|s| s.pass_limit_s = wrong).contains("--pass-limit-s"));
        }
        assert!(refused(|s| s.vcpus = 0).contains("--vcpus"));
        assert!(refused(|s| s.stride_kib = 12).contains("--stride-kib"));
        assert!(refused(|s| s.clear_chunk_mib = Some(0)).contains("--clear-chunk-mib"));
        assert!(refused(|s| s.clear_pause_us = u64::MAX).contains("--clear-pause-us"));
        assert!(refused(|s| s.eager_split_kib = Some(4)).contains("--eager-split-kib"));
        assert!(refused(|s| s.passes = 0).contains("--passes"));
    }

    #[test]
    fn names_are_those_of_the_command_line() {
        assert_eq!("2m".parse(), Ok(Backing::Huge2M));
        assert_eq!("initially-set".parse(), Ok(Protect::InitiallySet));
        assert_eq!(Protect::InitiallySet.to_string(), "initially-set");
    }

    proptest! {
        /// Chunks cover the log exactly once, in order, with the alignment that the kernel needs.
        #[test]
        fn chunks_cover_the_log(vcpus in 1u32..9, blocks in 1u64..200, chunk in prop::option::of(1u64..600)) {
            let settings = Settings {
                vcpus,
                slice_mib: blocks * 2,
                clear_chunk_mib: chunk,
                ..Settings::default()
            };
            prop_assert_eq!(settings.check(), Ok(()));
            let mut next = 0;
            for (first, pages) in settings.chunks() {
                prop_assert_eq!(first, next);
                prop_assert!(first.is_multiple_of(64) && pages > 0);
                next = first + u64::from(pages);
            }
            prop_assert_eq!(next * PAGE_BYTES, settings.memory_bytes());
        }
    }
}
