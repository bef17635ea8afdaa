//! Direct segments: base, limit and offset registers that replace page tables, and a filter of exempt pages.
//!
//! Source: Basu et al. (ISCA'13); Gandhi et al. (MICRO-47).
//!
//! # Approach
//! A segment translates an address between base and limit by adding its offset. Paging translates addresses outside,
//! and pages in the escape filter. The filter has 256 bits, 64 for each of four H3 hashes. It has no false negatives
//! and few false positives.
//!
//! # Properties
//! - A segment translates exactly the addresses inside that do not escape: to the segment's target plus their distance
//!   from the base.
//! - Every page inserted into the filter escapes. With 16 pages inserted, about 0.25 % of all others escape too.

use std::marker::PhantomData;

use demeter_policy::{GuestPhysAddr, GuestVirtAddr};
use demeter_scenario::rng::mix;

use super::mapping::Mapping;
use super::radix::{Address, PageSize};

/// log2 of the size of an escaping page.
const ESCAPE_BITS: u32 = 12;

/// Hashes of a filter.
const HASHES: usize = 4;

/// Pages that a segment must not translate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct EscapeFilter {
    /// 64 bits for each hash function.
    bits: [u64; HASHES],
}

impl EscapeFilter {
    /// Inserts the page that holds an address.
    pub(crate) fn insert(&mut self, address: u64) {
        for (hash, bits) in self.bits.iter_mut().enumerate() {
            *bits |= 1 << h3(hash, address >> ESCAPE_BITS);
        }
    }

    /// Whether no page was inserted.
    fn is_empty(&self) -> bool {
        self.bits == [0; HASHES]
    }

    /// Whether the page that holds an address escapes; may be a false positive.
    fn contains(&self, address: u64) -> bool {
        let mut hashes = self.bits.iter().enumerate();
        hashes.all(|(hash, bits)| bits >> h3(hash, address >> ESCAPE_BITS) & 1 != 0)
    }
}

/// An H3 hash, 0 to 63: XOR of one random word for each set bit.
fn h3(hash: usize, mut page: u64) -> u64 {
    let mut sum = 0;
    while page != 0 {
        let row = u64::from(page.trailing_zeros());
        sum ^= mix((hash as u64) << 6 | row);
        page &= page - 1;
    }
    sum >> 58
}

/// A direct segment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment<A> {
    base: u64,
    limit: u64,
    to: u64,
    escapes: EscapeFilter,
    addresses: PhantomData<A>,
}

impl<A: Address> Segment<A> {
    /// A segment from `base` to `limit` (exclusive), mapped to `to` and up.
    pub(crate) fn new(base: A, limit: A, to: u64, escapes: EscapeFilter) -> Self {
        Self {
            base: base.number(),
            limit: limit.number(),
            to,
            escapes,
            addresses: PhantomData,
        }
    }

    /// Translates an address, if the segment covers it.
    pub(crate) fn translate(&self, addr: A) -> Option<u64> {
        let addr = addr.number();
        let is_inside = (self.base..self.limit).contains(&addr);
        if !is_inside || !self.escapes.is_empty() && self.escapes.contains(addr) {
            return None;
        }
        Some(addr - self.base + self.to)
    }

    /// The translation as a page mapping in frames of `2^page_bits` bytes. The page has the largest size in which
    /// nothing escapes.
    pub(crate) fn mapping(&self, addr: A, page_bits: u32) -> Option<Mapping> {
        let size = if self.escapes.is_empty() {
            PageSize::Giant
        } else {
            PageSize::Base
        };
        Some(Mapping {
            frame: (self.translate(addr)? >> page_bits) as u32,
            size,
            dirty: true,
        })
    }
}

/// The segments of a VM, or of a program on bare metal.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Segments {
    /// From virtual to physical memory; guest-physical with a hypervisor.
    pub(crate) guest: Option<Segment<GuestVirtAddr>>,
    /// From guest-physical memory to the host's.
    pub(crate) host: Option<Segment<GuestPhysAddr>>,
}

impl Segments {
    /// Translates an address to host memory by segments alone, if they cover it.
    pub(crate) fn translate(&self, gva: GuestVirtAddr, is_nested: bool) -> Option<u64> {
        let physical = self.guest.as_ref()?.translate(gva)?;
        if is_nested {
            self.host.as_ref()?.translate(GuestPhysAddr(physical))
        } else {
            Some(physical)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Translated addresses keep their distance from the base; inserted pages always escape.
        #[test]
        fn a_segment_adds_an_offset_but_for_what_escapes(
            base in 0u64..1 << 30,
            pages in 1u64..1 << 20,
            to in 0u64..1 << 40,
            bad in prop::collection::vec(0u64..1 << 20, 0..17),
            at in 0u64..1 << 34,
        ) {
            let base = base << 12;
            let mut escapes = EscapeFilter::default();
            for page in &bad {
                escapes.insert(base + ((page % pages) << 12));
            }
            let limit = base + (pages << 12);
            let segment = Segment::new(GuestPhysAddr(base), GuestPhysAddr(limit), to, escapes);
            for page in &bad {
                let at = base + ((page % pages) << 12) + at % 4096;
                prop_assert_eq!(segment.translate(GuestPhysAddr(at)), None);
            }
            prop_assert_eq!(segment.translate(GuestPhysAddr(limit)), None);
            prop_assert_eq!(segment.translate(GuestPhysAddr(base.wrapping_sub(1))), None);
            let at = at % (pages << 12);
            match segment.translate(GuestPhysAddr(base + at)) {
                Some(there) => prop_assert_eq!(there, to + at),
                None => prop_assert!(!bad.is_empty()),
            }
        }
    }

    #[test]
    fn sixteen_pages_take_few_others_along() {
        let mut sum = 0;
        for trial in 0..64u64 {
            let mut filter = EscapeFilter::default();
            for page in 0..16 {
                filter.insert(mix(trial << 8 | page) >> 28 << ESCAPE_BITS);
            }
            let others = (0..1000).map(|page| mix(1 << 32 | trial << 16 | page) >> 28);
            sum += others
                .filter(|page| filter.contains(page << ESCAPE_BITS))
                .count();
        }
        // (1 - (63/64)^16)^4 of 64,000: 159.
        assert!((80..320).contains(&sum), "{sum}");
    }
}
