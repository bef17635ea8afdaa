//! Result files, and what people look at: a table in the terminal and one self-contained page.

mod schema;

pub use schema::{Point, RunResult, SCHEMA, SystemResult};
