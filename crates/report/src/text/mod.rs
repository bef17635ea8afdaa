//! Figures as text: the terminal's output, and the tables that the page shares.

pub(crate) mod agreement;
pub(crate) mod clean;
pub(crate) mod compare;
pub(crate) mod flushes;
pub(crate) mod grid;
pub(crate) mod harm;
pub(crate) mod kvm;
pub(crate) mod number;
pub(crate) mod part;
pub(crate) mod predicted;
pub(crate) mod ratios;
pub(crate) mod summary;
pub(crate) mod table;
pub(crate) mod worst_first;
