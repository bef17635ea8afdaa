//! Receivers of a run's progress.

use demeter_policy::RankedRange;

use crate::error::SimError;

/// Receives the progress of a run, 0 to 1; an error ends the run.
pub(crate) type OnProgress<'a> = dyn Fn(f64) -> Result<(), SimError> + 'a;

/// Receives a time in seconds and the first VM's ranges with their heat.
pub(crate) type OnRanges<'a> = dyn FnMut(f64, &[RankedRange]) + 'a;
