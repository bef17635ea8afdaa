//! Pictures as SVG, one module per kind.

pub(crate) mod along;
pub(crate) mod axis;
pub(crate) mod bars;
pub(crate) mod curves;
pub(crate) mod field;
pub(crate) mod frame;
pub(crate) mod grouped;
pub(crate) mod heat;
pub(crate) mod legend;
pub(crate) mod lines;
pub(crate) mod palette;
pub(crate) mod picture;
pub(crate) mod speeds;
pub(crate) mod stacked;
pub(crate) mod svg;
