//! Exports many runs as one table.

pub(crate) mod csv;
pub(crate) mod parquet;
pub(crate) mod rows;
