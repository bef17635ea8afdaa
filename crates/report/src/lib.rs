//! Result files, and what people look at: a table in the terminal, one self-contained page and a
//! picture.
//!
//! ```
//! use demeter_report::{RunResult, html, table};
//!
//! let text = r#"{"schema":1,"scenario":"gups","on":"lab","seed":1,"duration_s":60,"systems":[]}"#;
//! let result = RunResult::from_json(text).unwrap();
//! println!("{}", table(&result));
//! assert!(html(&result).starts_with("<!doctype html>"));
//! ```

mod agreement;
mod axis;
mod bars;
mod breakdown;
mod check;
mod columns;
mod compare;
mod csv;
mod curves;
mod figure;
mod file;
mod frame;
mod grouped;
mod heat;
mod lines;
mod measure;
mod number;
mod page;
mod palette;
mod parquet;
mod provision;
mod rows;
mod schema;
mod shape;
mod summary;
mod svg;
mod table;
mod text;

pub use compare::{CompareError, compare};
pub use csv::csv;
pub use figure::figure;
pub use file::{ContentError, Error, FILE_BYTES_MAX, write_file};
pub use lines::throughput_svg;
pub use page::html;
pub use parquet::parquet;
pub use provision::{CrashFigures, Provisioning, Resize, VmResult};
pub use rows::RunRow;
pub use schema::{Case, Point, Published, Repeats, RunResult, SCHEMA, SystemResult, Tail};
pub use table::table;
