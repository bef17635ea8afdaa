//! The Python module `demeter._core`: scenarios, the simulator, sweeps and reports.
//!
//! Results are passed as JSON. `lib/demeter/_core.pyi` has the types for Python.

mod error;
mod result;
mod scenario;
mod simulate;
mod sweep;

use pyo3::prelude::*;

/// The module.
#[pymodule]
mod _core {
    #[pymodule_export]
    use crate::error::Error;
    #[pymodule_export]
    use crate::result::{figures, page, systems, table};
    #[pymodule_export]
    use crate::scenario::Scenario;
    #[pymodule_export]
    use crate::simulate::{Stop, simulate, simulate_one};
    #[pymodule_export]
    use crate::sweep::Sweep;
}
