//! Reports results as terminal tables, a self-contained HTML page, pictures, and tables for other programs.
//!
//! ```
//! use demeter_outcome::RunResult;
//! use demeter_report::{html, table};
//!
//! let text = r#"{"schema":2,"scenario":"gups","on":"lab","seed":1,"duration_s":60,"systems":[]}"#;
//! let result = RunResult::from_json(text).unwrap();
//! println!("{}", table(&result));
//! assert!(html(&result).starts_with("<!doctype html>"));
//! ```

mod draw;
mod export;
mod measure;
mod page;
mod shape;
mod text;

pub use draw::along::shares_svg;
pub use draw::field::maps_svg;
pub use draw::lines::throughput_svg;
pub use draw::speeds::{Speeds, speeds_svg};
pub use export::csv::csv;
pub use export::parquet::parquet;
pub use export::rows::{RunRow, columns};
pub use page::html;
pub use text::compare::{CompareError, compare};
pub use text::harm::harm;
pub use text::part::{Part, part};
pub use text::ratios::{Of, ratios, times};
pub use text::table::table;
pub use text::worst_first::worst_first;

/// The system that tables and pictures highlight.
const OURS: &str = "demeter";
