//! What a guest's kernel knows of each of its frames: who maps it, and how it was used.

/// A frame is in use as a base page.
const BASE: u8 = 1;
/// It is the first of a huge page.
const HUGE: u8 = 2;
/// Its page is on the active list.
const ACTIVE: u8 = 4;

/// One entry for each frame of the guest, 9 bytes.
#[derive(Debug, Clone)]
pub(crate) struct Frames {
    first: u32,
    /// The virtual page that maps it.
    pages: Vec<u32>,
    state: Vec<u8>,
    /// A word for whoever manages memory: when it looked, or how much it saw.
    words: Vec<u32>,
}

/// A page in use, by its first frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Used {
    /// Its virtual page number.
    pub(crate) page: u32,
    /// Whether it is a huge page.
    pub(crate) huge: bool,
    /// Whether it is on the active list.
    pub(crate) active: bool,
}

impl Frames {
    /// `count` frames from `first` on, none in use.
    pub(crate) fn new(first: u32, count: u32) -> Self {
        Self {
            first,
            pages: vec![0; count as usize],
            state: vec![0; count as usize],
            words: vec![0; count as usize],
        }
    }

    fn at(&self, frame: u32) -> usize {
        (frame - self.first) as usize
    }

    /// A frame, or the block that begins with it, comes into use.
    pub(crate) fn take(&mut self, frame: u32, page: u32, huge: bool) {
        let at = self.at(frame);
        self.pages[at] = page;
        self.state[at] = if huge { HUGE } else { BASE };
        self.words[at] = 0;
    }

    /// A frame is free again.
    pub(crate) fn free(&mut self, frame: u32) {
        let at = self.at(frame);
        self.state[at] = 0;
    }

    /// A page moves to another frame; list and word go with it.
    pub(crate) fn transfer(&mut self, from: u32, to: u32) {
        let (from, to) = (self.at(from), self.at(to));
        self.pages[to] = self.pages[from];
        self.state[to] = self.state[from];
        self.words[to] = self.words[from];
        self.state[from] = 0;
    }

    /// The page that begins at this frame.
    pub(crate) fn used(&self, frame: u32) -> Option<Used> {
        let at = self.at(frame);
        let state = self.state[at];
        (state & (BASE | HUGE) != 0).then(|| Used {
            page: self.pages[at],
            huge: state & HUGE != 0,
            active: state & ACTIVE != 0,
        })
    }

    /// Puts a page on the active list, or on the inactive one.
    pub(crate) fn set_active(&mut self, frame: u32, active: bool) {
        let at = self.at(frame);
        self.state[at] = self.state[at] & !ACTIVE | if active { ACTIVE } else { 0 };
    }

    /// The manager's word of a page.
    pub(crate) fn word(&mut self, frame: u32) -> &mut u32 {
        let at = self.at(frame);
        &mut self.words[at]
    }

    /// Bytes of the simulator's own memory.
    #[cfg(test)]
    pub(crate) fn state_bytes(&self) -> usize {
        self.pages.capacity() * 4 + self.state.capacity() + self.words.capacity() * 4
    }
}
