//! Address translation of memory reserved in one piece: paging with any page sizes, and direct segments.
//!
//! Sources: Basu et al., Efficient Virtual Memory for Big Memory Servers (ISCA'13); Gandhi et al., Efficient Memory
//! Virtualization (MICRO-47).

use serde::{Deserialize, Serialize};

use crate::fault::refuse_if;
use crate::{Scenario, System};

/// Maximum number of bad pages in an escape filter.
const BAD_PAGES_MAX: u32 = 16;

/// How addresses are translated. All memory is reserved and mapped before the program starts, in one piece in both
/// dimensions, as segments and pages of 1 GiB require.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Translation {
    /// Dimensions and segments.
    pub mode: TranslationMode,
    /// Pages of the guest, instead of `machine.thp`.
    #[serde(default)]
    pub guest_pages: Pages,
    /// Pages of the hypervisor, instead of `sim.host_thp`.
    #[serde(default)]
    pub host_pages: Pages,
    /// Broken pages of physical memory, which a segment must not map: its escape filter sends them to paging. At most
    /// 16.
    #[serde(default)]
    pub bad_pages: u32,
    /// Size of contiguous pieces of guest-physical memory, MiB; by default it is one piece. A guest's segment maps one
    /// piece only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pieces_mib: Option<u64>,
}

/// Dimensions of translation, and those replaced by a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum TranslationMode {
    /// No hypervisor.
    Native,
    /// No hypervisor; a segment maps virtual to physical memory.
    DirectSegment,
    /// Paging in the guest and in the hypervisor.
    Virtualized,
    /// A segment maps guest-physical to host memory.
    VmmDirect,
    /// A segment maps guest-virtual to guest-physical memory.
    GuestDirect,
    /// Both segments, applied in one step.
    DualDirect,
}

impl TranslationMode {
    /// Whether there is a hypervisor.
    pub fn is_nested(self) -> bool {
        !matches!(self, Self::Native | Self::DirectSegment)
    }

    /// Whether a segment translates virtual addresses.
    pub fn guest_segment(self) -> bool {
        matches!(
            self,
            Self::DirectSegment | Self::GuestDirect | Self::DualDirect
        )
    }

    /// Whether a segment translates guest-physical addresses.
    pub fn host_segment(self) -> bool {
        matches!(self, Self::VmmDirect | Self::DualDirect)
    }

    /// Whether the segment to physical memory has an escape filter; broken pages are known there only.
    fn has_filter(self) -> bool {
        self.host_segment() || self == Self::DirectSegment
    }
}

/// Size of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Pages {
    /// 4 KiB.
    #[default]
    #[serde(rename = "4k")]
    Base,
    /// 2 MiB.
    #[serde(rename = "2m")]
    Huge,
    /// 1 GiB.
    #[serde(rename = "1g")]
    Giant,
}

impl Scenario {
    pub(crate) fn check_translation(&self) -> Result<(), String> {
        let Some(translation) = &self.sim.translation else {
            return Ok(());
        };
        let mode = translation.mode;
        let moves = |system: &&System| !matches!(system, System::None);
        if let Some(system) = self.systems.iter().find(moves) {
            let reason = match (mode.guest_segment(), mode.host_segment()) {
                (false, false) => "with sim.translation all memory is reserved at the start",
                (true, false) => "a segment maps the program's memory as one piece",
                (false, true) => "a segment maps the guest's memory as one piece",
                (true, true) => "segments map all memory as one piece",
            };
            return Err(format!(
                "systems: \"{system}\" moves or chooses pages, but {reason} ({mode}): leave it out, or \
                 remove sim.translation"
            ));
        }
        refuse_if(self.provision.is_some(), || {
            format!(
                "provision: a balloon would take pages out of memory that is reserved in one piece \
                 ({mode}): remove it, or sim.translation"
            )
        })?;
        refuse_if(self.sim.vms != 1, || {
            "sim.vms: memory is reserved in one piece for one VM only: set it to 1".into()
        })?;
        if let Some(pieces_mib) = translation.pieces_mib {
            let is_apt = mode.guest_segment() && mode.is_nested();
            refuse_if(!is_apt || translation.guest_pages != Pages::Base, || {
                format!(
                    "sim.translation.pieces_mib = {pieces_mib}: is for a guest's segment beside pages of 4 KiB \
                     (guest-direct, dual-direct): leave it out with {mode}"
                )
            })?;
            refuse_if(pieces_mib < 2 || !pieces_mib.is_multiple_of(2), || {
                format!("sim.translation.pieces_mib = {pieces_mib}: must be a multiple of 2")
            })?;
        }
        let bad = translation.bad_pages;
        refuse_if(bad > BAD_PAGES_MAX, || {
            format!(
                "sim.translation.bad_pages = {bad}: an escape filter of 256 bits is made for \
                 {BAD_PAGES_MAX} at most"
            )
        })?;
        refuse_if(bad > 0 && !mode.has_filter(), || {
            format!(
                "sim.translation.bad_pages = {bad}: {mode} reaches physical memory by paging, which \
                 leaves them out by itself: set it to 0"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::workload::tests::checked_with;

    fn said(sim: &str) -> Result<(), String> {
        let sim = format!("[sim]\n{sim}");
        checked_with("kind = \"btree\", size_mib = 80", &sim).map(drop)
    }

    #[test]
    fn what_a_mode_cannot_do_is_refused_with_the_reason() {
        let with = |text: &str| said(&format!("translation = {{ {text} }}"));
        assert_eq!(with("mode = \"dual-direct\", bad_pages = 16"), Ok(()));
        assert_eq!(with("mode = \"native\", guest_pages = \"1g\""), Ok(()));
        for (text, reason) in [
            ("mode = \"vmm-direct\", bad_pages = 17", "16 at most"),
            ("mode = \"guest-direct\", bad_pages = 1", "by paging"),
            ("mode = \"native\", bad_pages = 1", "by paging"),
            ("mode = \"vmm-direct\", pieces_mib = 2", "guest's segment"),
            ("mode = \"guest-direct\", pieces_mib = 3", "multiple of 2"),
        ] {
            let said = with(text).unwrap_err();
            assert!(said.contains(reason), "{said}");
        }
        let said = said("vms = 2\ntranslation = { mode = \"dual-direct\" }").unwrap_err();
        assert!(said.contains("one VM only"), "{said}");
    }
}
