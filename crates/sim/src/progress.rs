//! Receivers of a run's progress.

use demeter_policy::RankedRange;
use demeter_policy::benefit::Benefit;

use crate::error::SimError;

/// Receives the progress of a run, 0 to 1; an error ends the run.
pub(crate) type OnProgress<'a> = dyn Fn(f64) -> Result<(), SimError> + 'a;

/// Receives a time in seconds, the first VM's ranges with their heat, and a way to ask for the benefit of fast memory.
pub(crate) type OnRanges<'a> = dyn FnMut(f64, &[RankedRange], &dyn Fn() -> Option<Benefit>) + 'a;
