//! Memory reserved before a run, contiguous in both dimensions, for segments and pages of 1 GiB.

use demeter_policy::{GuestPhysAddr, GuestVirtAddr, MIB};
use demeter_scenario::rng::Rng;
use demeter_scenario::{Pages, Translation};

use crate::error::SimError;
use crate::hypervisor::Hypervisor;
use crate::machine::radix::PageSize;
use crate::machine::segment::{EscapeFilter, Segment, Segments};
use crate::vm::Vm;

/// Random number stream that chooses bad pages.
const BAD_PAGES_STREAM: u64 = 0xbad;

/// Maps all memory of a VM with known regions, and sets its segments.
pub(crate) fn reserve<P: crate::program::Program>(
    vm: &mut Vm<P>,
    hypervisor: &mut Hypervisor,
    translation: &Translation,
) -> Result<(), SimError> {
    let mode = translation.mode;
    let page_bits = vm.guest.page_bits();
    let piece = translation.pieces_mib.map(|mib| mib * MIB);
    let (virt, start) = vm.guest.reserve(size(translation.guest_pages), piece)?;
    let program_end = GuestPhysAddr(start.0 + (virt.end.0 - virt.start.0));
    // Bad pages are chosen from the program's memory, so that they matter.
    let filter = |to: u64, end: u64| {
        let mut escapes = EscapeFilter::default();
        let mut rng = Rng::new(1, BAD_PAGES_STREAM);
        for _ in 0..translation.bad_pages {
            escapes.insert(to + (rng.below((end - to) >> 12) << 12));
        }
        escapes
    };
    vm.backing.is_native = !mode.is_nested();
    let mut segments = Segments::default();
    if mode.guest_segment() {
        let escapes = if mode.is_nested() {
            EscapeFilter::default()
        } else {
            filter(virt.start.0, virt.end.0)
        };
        let whole = virt.end.0 - virt.start.0;
        let end = virt.start.0 + piece.unwrap_or(whole).min(whole);
        let segment = Segment::new(virt.start, GuestVirtAddr(end), start.0, escapes);
        segments.guest = Some(segment);
    }
    if mode.is_nested() {
        let end = vm.guest.end_gpa();
        let frame = hypervisor.reserve(&mut vm.backing, end, size(translation.host_pages))?;
        if mode.host_segment() {
            let to = u64::from(frame) << page_bits;
            let escapes = filter(start.0, program_end.0);
            segments.host = Some(Segment::new(GuestPhysAddr(0), end, to, escapes));
        }
    }
    vm.backing.segments = segments;
    Ok(())
}

fn size(pages: Pages) -> PageSize {
    match pages {
        Pages::Base => PageSize::Base,
        Pages::Huge => PageSize::Huge,
        Pages::Giant => PageSize::Giant,
    }
}
