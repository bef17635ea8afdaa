//! Kernel state of a page's usage, beside the accessed bit.

/// Recent use in two steps (`mark_page_accessed` in mm/swap.c): an inactive page becomes referenced, and then active.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Seen {
    /// On the inactive list.
    #[default]
    Inactive,
    /// On the inactive list, and referenced once.
    Referenced,
    /// On the active list.
    Active,
}

impl Seen {
    /// Records one use.
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
