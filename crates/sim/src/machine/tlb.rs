//! The TLBs of a core: two levels, three page sizes, tagged by address space.
//!
//! # Properties
//! - A look-up that hits yields the translation last inserted for that page.
//! - An invalidation removes exactly the translations that it covers.

use demeter_policy::GuestVirtAddr;
use demeter_scenario::{Geometry, TlbSizes};

use super::assoc::Assoc;
use super::radix::{HUGE_BITS, PageSize};
use super::walk::{KEY_BITS, Space};

/// Marks a translation that allows stores, as the dirty bits are set.
const DIRTY: u32 = 1 << 31;

/// Page sizes in look-up order.
const SIZES: [PageSize; 3] = [PageSize::Base, PageSize::Huge, PageSize::Giant];

/// A cached translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Translation(u32);

impl Translation {
    /// A translation to the first frame of a page; `dirty` if its dirty bits are set.
    #[inline(always)]
    pub(crate) fn new(first_frame: u32, dirty: bool) -> Self {
        Self(first_frame | if dirty { DIRTY } else { 0 })
    }

    #[inline(always)]
    pub(crate) fn first_frame(self) -> u32 {
        self.0 & !DIRTY
    }

    #[inline(always)]
    pub(crate) fn is_dirty(self) -> bool {
        self.0 & DIRTY != 0
    }
}

/// A TLB hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hit {
    pub(crate) translation: Translation,
    pub(crate) size: PageSize,
    /// Whether the second level served it.
    pub(crate) second: bool,
}

/// The TLBs of a core.
#[derive(Debug, Clone)]
pub(crate) struct Tlb {
    first: [Assoc<Translation, 4>; 3],
    second: Assoc<Translation, 16>,
    /// The second level's part for base pages, if a simulated page stands for many.
    second_scaled: Option<Assoc<Translation, 16>>,
    second_giant: Assoc<Translation, 4>,
    page_bits: u32,
    /// Bit mask of page sizes ever inserted; other sizes need no look-up.
    sizes: u8,
    is_second_small: bool,
}

impl Tlb {
    /// Empty TLBs for pages of `2^page_bits` bytes. If a page stands for `2^k` real ones, there are `2^k` times fewer
    /// entries for such pages, so that TLB reach stays equal.
    pub(crate) fn new(sizes: &TlbSizes, page_bits: u32) -> Self {
        let k = page_bits - 12;
        let scaled = |g: Geometry| {
            let left = k.saturating_sub(g.sets.trailing_zeros());
            Geometry {
                sets: (g.sets >> k).max(1),
                ways: (g.ways >> left).max(1),
            }
        };
        Self {
            first: [
                Assoc::new(scaled(sizes.l1_4k)),
                Assoc::new(sizes.l1_2m),
                Assoc::new(sizes.l1_1g),
            ],
            second: Assoc::new(sizes.l2),
            second_scaled: (k > 0).then(|| Assoc::new(scaled(sizes.l2))),
            second_giant: Assoc::new(sizes.l2_1g),
            page_bits,
            sizes: 0,
            is_second_small: sizes.is_l2_4k_only,
        }
    }

    /// A key: page number, then the space, then (in the second level) the size.
    #[inline(always)]
    fn key(&self, space: Space, gva: GuestVirtAddr, size: PageSize) -> u64 {
        let shift = match size {
            PageSize::Base => self.page_bits,
            PageSize::Huge => HUGE_BITS,
            PageSize::Giant => HUGE_BITS + 9,
        };
        // Fewer page numbers need fewer bits.
        gva.0 >> shift | u64::from(space.0) << (KEY_BITS + 12 - shift)
    }

    #[inline(always)]
    fn second_of(&mut self, size: PageSize) -> (&mut Assoc<Translation, 16>, u64) {
        match (&mut self.second_scaled, size) {
            (Some(scaled), PageSize::Base) => (scaled, 0),
            _ => (&mut self.second, (size as u64) << (KEY_BITS + 6)),
        }
    }

    /// Looks an address up. A hit of the second level is copied to the first.
    #[inline(always)]
    pub(crate) fn get(&mut self, space: Space, gva: GuestVirtAddr) -> Option<Hit> {
        for size in SIZES {
            if self.sizes & 1 << size as u8 != 0 {
                let key = self.key(space, gva, size);
                if let Some(&mut translation) = self.first[size as usize].get(key) {
                    return Some(Hit {
                        translation,
                        size,
                        second: false,
                    });
                }
            }
        }
        for size in SIZES {
            if self.sizes & 1 << size as u8 != 0 {
                let key = self.key(space, gva, size);
                let found = if size == PageSize::Giant {
                    self.second_giant.get(key).copied()
                } else {
                    let (second, mark) = self.second_of(size);
                    second.get(key | mark).copied()
                };
                if let Some(translation) = found {
                    self.first[size as usize].insert(key, translation);
                    return Some(Hit {
                        translation,
                        size,
                        second: true,
                    });
                }
            }
        }
        None
    }

    /// Inserts a base page's translation into the first level only, for segments, which replace the second level.
    #[inline(always)]
    pub(crate) fn insert_first(&mut self, space: Space, gva: GuestVirtAddr, t: Translation) {
        self.sizes |= 1 << PageSize::Base as u8;
        let key = self.key(space, gva, PageSize::Base);
        put::<false, _>(&mut self.first[PageSize::Base as usize], key, t);
    }

    /// Inserts or replaces a translation in the first level, and in the second if it holds such pages.
    #[inline(always)]
    pub(crate) fn insert(
        &mut self,
        space: Space,
        gva: GuestVirtAddr,
        size: PageSize,
        t: Translation,
    ) {
        self.put_in::<false>(space, gva, size, t);
    }

    /// Inserts a translation that was just looked up in vain, so no level is searched again.
    #[inline(always)]
    pub(crate) fn insert_new(
        &mut self,
        space: Space,
        gva: GuestVirtAddr,
        size: PageSize,
        t: Translation,
    ) {
        self.put_in::<true>(space, gva, size, t);
    }

    #[inline(always)]
    fn put_in<const NEW: bool>(
        &mut self,
        space: Space,
        gva: GuestVirtAddr,
        size: PageSize,
        t: Translation,
    ) {
        self.sizes |= 1 << size as u8;
        let key = self.key(space, gva, size);
        put::<NEW, _>(&mut self.first[size as usize], key, t);
        if self.is_second_small && size != PageSize::Base {
            return;
        }
        if size == PageSize::Giant {
            put::<NEW, _>(&mut self.second_giant, key, t);
        } else {
            let (second, mark) = self.second_of(size);
            put::<NEW, _>(second, key | mark, t);
        }
    }

    /// Drops the translations of one address.
    pub(crate) fn invalidate(&mut self, space: Space, gva: GuestVirtAddr) {
        for size in SIZES {
            let key = self.key(space, gva, size);
            self.first[size as usize].invalidate(key);
            if size == PageSize::Giant {
                self.second_giant.invalidate(key);
            } else {
                let (second, mark) = self.second_of(size);
                second.invalidate(key | mark);
            }
        }
    }

    /// Drops all translations of a space.
    pub(crate) fn clear_space(&mut self, space: Space) {
        let page_bits = self.page_bits;
        let other = |shift: u32| {
            move |key: u64| key >> (KEY_BITS + 12 - shift) & 0x3f != u64::from(space.0)
        };
        self.first[0].retain(other(page_bits));
        self.first[1].retain(other(HUGE_BITS));
        self.first[2].retain(other(HUGE_BITS + 9));
        self.second.retain(|key| {
            let shift = if key >> (KEY_BITS + 6) == 0 {
                page_bits
            } else {
                HUGE_BITS
            };
            other(shift)(key & ((1 << (KEY_BITS + 6)) - 1))
        });
        self.second_giant.retain(other(HUGE_BITS + 9));
        if let Some(scaled) = &mut self.second_scaled {
            scaled.retain(other(page_bits));
        }
    }
}

/// Inserts an entry; without `NEW`, replaces an existing one.
#[inline(always)]
fn put<const NEW: bool, const W: usize>(
    array: &mut Assoc<Translation, W>,
    key: u64,
    t: Translation,
) {
    if !NEW && let Some(there) = array.get(key) {
        *there = t;
    } else {
        array.insert(key, t);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::io::Write;
    use std::path::Path;
    use std::process::{Command, Stdio};
    use std::thread;

    use demeter_scenario::Cpu;
    use demeter_scenario::rng::Rng;
    use proptest::prelude::*;

    use super::*;

    const ONE: Space = Space(1);
    const TWO: Space = Space(2);

    proptest! {
        /// Every hit equals the entry in a map of all insertions.
        #[test]
        fn hits_tell_the_truth(
            page_bits in 12u32..18,
            steps in prop::collection::vec((0u64..1 << 10, 0u32..3, 0u32..5, any::<bool>()), 1..500),
        ) {
            let mut tlb = Tlb::new(&Cpu::IceLakeSp.tlb(), page_bits);
            let mut truth: HashMap<(u32, GuestVirtAddr), (Translation, PageSize)> = HashMap::new();
            for (n, (page, space, what, flag)) in steps.into_iter().enumerate() {
                // Pages of different sizes do not overlap: the size follows from the address.
                let size = SIZES[(page % 3) as usize];
                let gva = GuestVirtAddr((page % 3) << 40 | (page / 3) << 31);
                let translation = Translation::new(n as u32, flag);
                match what {
                    0 | 1 => {
                        match tlb.get(Space(space), gva) {
                            None => tlb.insert_new(Space(space), gva, size, translation),
                            Some(_) => tlb.insert(Space(space), gva, size, translation),
                        }
                        truth.insert((space, gva), (translation, size));
                    }
                    2 => {
                        tlb.invalidate(Space(space), gva);
                        truth.remove(&(space, gva));
                        prop_assert_eq!(tlb.get(Space(space), gva), None);
                    }
                    3 if page % 16 == 0 => {
                        tlb.clear_space(Space(space));
                        truth.retain(|k, _| k.0 != space);
                    }
                    _ => {}
                }
                if let Some(hit) = tlb.get(Space(space), gva) {
                    prop_assert_eq!(Some(&(hit.translation, hit.size)), truth.get(&(space, gva)));
                }
            }
        }
    }

    /// The lab's plugin models the same TLBs, in C: each access hits there as here.
    #[test]
    fn the_labs_plugin_has_the_same_misses() {
        let plugin = Path::new(env!("CARGO_MANIFEST_DIR")).join("../lab/plugin/tlb_stream.c");
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("tlb_stream");
        let mut compile = Command::new("cc");
        compile.args(["-O2", "-Wall", "-Wextra", "-Werror"]);
        compile.arg(plugin).arg("-o").arg(&program);
        assert!(compile.status().expect("apt-get install gcc").success());
        for (seed, cpu) in (1..).zip([Cpu::IceLakeSp, Cpu::Zen3, Cpu::SandyBridge]) {
            let (stream, hits) = stream(seed, &cpu.tlb());
            let of_plugin = run_plugin(&program, &cpu.tlb(), &stream);
            let count = |of: u8| hits.iter().filter(|&&it| it == of).count();
            assert!(count(b'h') > 30_000 && count(b'm') > 30_000, "{cpu:?}");
            assert!(of_plugin == hits, "{cpu:?}: {} misses here", count(b'm'));
        }
    }

    /// Accesses to pages of all sizes, and invalidations, as lines of text; and what the accesses are here: hits or misses.
    fn stream(seed: u64, sizes: &TlbSizes) -> (String, Vec<u8>) {
        let mut rng = Rng::new(seed, 0);
        let mut tlb = Tlb::new(sizes, 12);
        let (mut text, mut hits) = (String::new(), vec![]);
        for _ in 0..200_000 {
            // Half of the accesses are to a sixteenth of the pages.
            let hot = if rng.below(2) == 0 { 16 } else { 1 };
            let (size, shift, pages) = [
                (PageSize::Base, 12, 6000),
                (PageSize::Huge, 21, 3000),
                (PageSize::Giant, 30, 60),
            ][[0, 0, 0, 1, 1, 2][rng.below(6) as usize]];
            let page = rng.below(pages / hot);
            let within = rng.below(1 << shift);
            let gva = GuestVirtAddr((size as u64) << 40 | page << shift | within);
            match rng.below(10_000) {
                0 => {
                    tlb.clear_space(ONE);
                    text += "f\n";
                }
                1..50 => {
                    tlb.invalidate(ONE, gva);
                    text += &format!("i {:x}\n", gva.0);
                }
                _ => {
                    text += &format!("a {:x} {shift}\n", gva.0);
                    let is_hit = tlb.get(ONE, gva).is_some();
                    if !is_hit {
                        tlb.insert_new(ONE, gva, size, Translation::new(0, false));
                    }
                    hits.push(if is_hit { b'h' } else { b'm' });
                }
            }
        }
        (text, hits)
    }

    fn run_plugin(program: &Path, sizes: &TlbSizes, stream: &str) -> Vec<u8> {
        let arrays = [sizes.l1_4k, sizes.l1_2m, sizes.l1_1g, sizes.l2, sizes.l2_1g];
        let mut child = Command::new(program)
            .args(
                arrays
                    .iter()
                    .flat_map(|g| [g.sets, g.ways].map(|it| it.to_string())),
            )
            .arg(u8::from(sizes.is_l2_4k_only).to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let stream = stream.to_owned();
        // Both sides would wait for each other if one thread wrote and read.
        let writer = thread::spawn(move || stdin.write_all(stream.as_bytes()));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap().unwrap();
        assert!(output.status.success(), "{}", output.status);
        output.stdout
    }

    #[test]
    fn what_leaves_the_first_level_stays_in_the_second() {
        let mut tlb = Tlb::new(&Cpu::IceLakeSp.tlb(), 12);
        for page in 0..128u64 {
            tlb.insert(
                ONE,
                GuestVirtAddr(page << 12),
                PageSize::Base,
                Translation::new(page as u32, false),
            );
        }
        let hit = tlb.get(ONE, GuestVirtAddr(0)).unwrap();
        assert!(hit.second && hit.translation.first_frame() == 0);
        assert!(!tlb.get(ONE, GuestVirtAddr(0)).unwrap().second);
        assert_eq!(tlb.get(TWO, GuestVirtAddr(0)), None);
    }

    #[test]
    fn a_space_goes_alone() {
        let at = |size: PageSize| GuestVirtAddr((size as u64) << 32);
        let mut tlb = Tlb::new(&Cpu::IceLakeSp.tlb(), 12);
        for (space, size) in [ONE, TWO]
            .into_iter()
            .flat_map(|s| SIZES.map(|size| (s, size)))
        {
            tlb.insert(space, at(size), size, Translation::new(1, true));
        }
        tlb.clear_space(ONE);
        for size in SIZES {
            assert_eq!(tlb.get(ONE, at(size)), None, "{size:?}");
            assert!(tlb.get(TWO, at(size)).is_some(), "{size:?}");
        }
    }

    #[test]
    fn a_page_that_stands_for_many_leaves_the_reach_as_it_is() {
        let reach = |k: u32| {
            let mut tlb = Tlb::new(&Cpu::IceLakeSp.tlb(), 12 + k);
            let pages = 4096u64 >> k;
            let at = |page: u64| GuestVirtAddr(page << (12 + k));
            for page in 0..pages {
                let t = Translation::new(page as u32, false);
                tlb.insert(ONE, at(page), PageSize::Base, t);
            }
            (0..pages)
                .filter(|p| tlb.get(ONE, at(*p)).is_some())
                .count()
                << k
        };
        assert_eq!((reach(0), reach(3), reach(6)), (2048, 2048, 2048));
    }
}
