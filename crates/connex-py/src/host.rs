//! What `doctor` asks about the host.

use connex_ucx::Library;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::waiting::detached;

/// Says where the `libucx` Python package lies. No effect once a UCX is loaded.
#[pyfunction]
pub(crate) fn set_ucx_wheel(path: std::path::PathBuf) {
    connex_ucx::set_wheel_dir(path);
}

/// Finds and loads UCX; returns its `path`, `version` and `why` this one. Raises `RuntimeError` with every place that was
/// tried.
#[pyfunction]
pub(crate) fn ucx(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let library =
        detached(py, Library::load).map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    let dict = PyDict::new(py);
    dict.set_item("path", library.path().to_string_lossy())?;
    dict.set_item("version", library.version().to_string())?;
    dict.set_item("why", library.choice().to_string())?;
    Ok(dict)
}

/// The host's interfaces: `(name, address)` for each address.
#[pyfunction]
pub(crate) fn interfaces(py: Python<'_>) -> Vec<(String, String)> {
    detached(py, connex_rs::host::interfaces)
        .into_iter()
        .map(|interface| (interface.name, interface.addr.to_string()))
        .collect()
}
