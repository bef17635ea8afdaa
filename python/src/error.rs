//! The error of the Python module, with the command line's messages.

use demeter_outcome::one_line;
use pyo3::exceptions::PyException;
use pyo3::{PyErr, create_exception};

create_exception!(
    demeter,
    Error,
    PyException,
    "What went wrong, in the one line that the command line says."
);

/// Converts an error of the library for Python.
pub fn told(error: impl std::error::Error + 'static) -> PyErr {
    Error::new_err(one_line(&error))
}
