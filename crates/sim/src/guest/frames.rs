//! Per-frame state of a guest's kernel: the mapping and the usage of each frame.

use crate::reclaim::Seen;

/// Whether a page begins at a frame, and its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begins {
    Nothing,
    Base,
    Huge,
}

/// One entry for each frame of the guest, 10 bytes.
#[derive(Debug, Clone)]
pub(crate) struct Frames {
    first: u32,
    /// The virtual page mapped to each frame.
    pages: Vec<u32>,
    begins: Vec<Begins>,
    seen: Vec<Seen>,
    /// A word for the memory manager: time of its last scan, or an access count.
    words: Vec<u32>,
}

/// A page in use, by its first frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Used {
    /// Its virtual page number.
    pub(crate) page: u32,
    /// Whether it is a huge page.
    pub(crate) huge: bool,
    /// Its usage.
    pub(crate) seen: Seen,
}

impl Frames {
    /// `count` unused frames from `first` on.
    pub(crate) fn new(first: u32, count: u32) -> Self {
        Self {
            first,
            pages: vec![0; count as usize],
            begins: vec![Begins::Nothing; count as usize],
            seen: vec![Seen::default(); count as usize],
            words: vec![0; count as usize],
        }
    }

    fn at(&self, frame: u32) -> usize {
        (frame - self.first) as usize
    }

    /// Marks a frame, or the block that begins with it, as used.
    pub(crate) fn take(&mut self, frame: u32, page: u32, huge: bool) {
        let at = self.at(frame);
        self.pages[at] = page;
        self.begins[at] = if huge { Begins::Huge } else { Begins::Base };
        self.seen[at] = Seen::default();
        self.words[at] = 0;
    }

    /// Marks a frame as free.
    pub(crate) fn free(&mut self, frame: u32) {
        let at = self.at(frame);
        self.begins[at] = Begins::Nothing;
    }

    /// Moves a page to another frame, along with its list and word.
    pub(crate) fn transfer(&mut self, from: u32, to: u32) {
        let (from, to) = (self.at(from), self.at(to));
        self.pages[to] = self.pages[from];
        self.begins[to] = self.begins[from];
        self.seen[to] = self.seen[from];
        self.words[to] = self.words[from];
        self.begins[from] = Begins::Nothing;
    }

    /// The page that begins at this frame.
    pub(crate) fn used(&self, frame: u32) -> Option<Used> {
        let at = self.at(frame);
        let begins = self.begins[at];
        (begins != Begins::Nothing).then(|| Used {
            page: self.pages[at],
            huge: begins == Begins::Huge,
            seen: self.seen[at],
        })
    }

    /// Usage of the page that begins at this frame.
    pub(crate) fn seen(&mut self, frame: u32) -> &mut Seen {
        let at = self.at(frame);
        &mut self.seen[at]
    }

    /// The memory manager's word of a page.
    pub(crate) fn word(&mut self, frame: u32) -> &mut u32 {
        let at = self.at(frame);
        &mut self.words[at]
    }

    /// Number of used base pages and huge pages.
    pub(crate) fn in_use(&self) -> [u64; 2] {
        let count = |what| self.begins.iter().filter(|&&b| b == what).count() as u64;
        [Begins::Base, Begins::Huge].map(count)
    }

    /// Bytes of the simulator's own memory.
    #[cfg(test)]
    pub(crate) fn state_bytes(&self) -> usize {
        self.pages.capacity() * 4
            + self.begins.capacity()
            + self.seen.capacity()
            + self.words.capacity() * 4
    }
}
