//! What a kernel remembers of a page's use, beside the bit in its table entry.

/// Whether it was used lately, in two steps (`mark_page_accessed` in mm/swap.c): an inactive page
/// is referenced first, and active when that happens again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Seen {
    /// On the inactive list.
    #[default]
    Inactive,
    /// There, and referenced once.
    Referenced,
    /// On the active list.
    Active,
}

impl Seen {
    /// It was used.
    pub(crate) fn mark_accessed(&mut self) {
        *self = match self {
            Self::Inactive => Self::Referenced,
            Self::Referenced | Self::Active => Self::Active,
        };
    }

    /// Whether it is on the active list.
    pub(crate) fn is_active(self) -> bool {
        self == Self::Active
    }
}
