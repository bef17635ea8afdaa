//! Many runs as one table, for other programs.

pub(crate) mod csv;
pub(crate) mod parquet;
pub(crate) mod rows;
