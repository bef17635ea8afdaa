//! The outcome of a run: its timeline, its figures and the result file.
//!
//! The simulator and the lab fill a [`Timeline`]. [`Timeline::summarise`] turns it into a [`SystemResult`], and a
//! [`RunResult`] is the file with all systems of a scenario.
//!
//! ```
//! use demeter_outcome::RunResult;
//!
//! let text = r#"{"schema":2,"scenario":"gups","on":"lab","seed":1,"duration_s":60,"systems":[]}"#;
//! assert_eq!(RunResult::from_json(text).unwrap().scenario, "gups");
//! ```

mod check;
mod figure;
mod file;
mod names;
mod one_line;
mod provisioning;
mod runs;
mod schema;
mod schema_1;
mod timeline;
mod unit;

pub use figure::{Figure, UnknownFigure};
pub use file::{ContentError, Error, FILE_BYTES_MAX, write_file};
pub use names::{
    CAUSES, COUNTERS, HISTORY_PREFIX, KVM_PREFIX, LOGGING_COUNTERS, OTHER_SYSTEM, Role,
    VMSTAT_PREFIXES, role,
};
pub use one_line::one_line;
pub use provisioning::{CrashFigures, Provisioning, Resize, SoakFigures, Use};
pub use runs::{NONE, best, less_none, middle, together};
pub use schema::{
    Case, Estimate, EstimatePoint, HOST_NOISE_MAX, Metadata, Point, Published, Repeats, RunResult,
    SCHEMA, Speed, SystemResult, Tail, WorkloadResult,
};
pub use timeline::{Meter, Moment, Timeline, Work};
pub use unit::Unit;
