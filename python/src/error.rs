//! Errors: in Python there is one, which says what the command line says.

use demeter_outcome::one_line;
use pyo3::exceptions::PyException;
use pyo3::{PyErr, create_exception};

create_exception!(
    demeter,
    Error,
    PyException,
    "What went wrong, in the one line that the command line says."
);

/// An error of the library, for Python.
pub fn told(error: impl std::error::Error + 'static) -> PyErr {
    Error::new_err(one_line(&error))
}
