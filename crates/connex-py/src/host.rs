//! What `doctor` asks about the host.

use std::net::IpAddr;

use connex_rs::transport::ucx::settings::{self, Facts};
use connex_ucx::Library;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
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

/// The settings that an engine which advertises `ip` makes for UCX: `settings`, a list of `(variable, value, reason)`, and
/// `same_host`, the same for peers of this host; `warnings`, `obstacles` (what keeps RDMA from working), `one_sided`,
/// `shared_memory` and `rdma_devices` (those that this process can use, each with its interfaces). Loads UCX. Raises
/// `RuntimeError` as `ucx` does, `ValueError` for a bad address or one that the variables exclude.
#[pyfunction]
pub(crate) fn ucx_plan<'py>(py: Python<'py>, ip: &str) -> PyResult<Bound<'py, PyDict>> {
    let addr: IpAddr = ip
        .parse()
        .map_err(|_| PyValueError::new_err(format!("{ip:?} is not an IP address")))?;
    let library =
        detached(py, Library::load).map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    let facts = Facts::gather(library, addr, connex_rs::host::interface_of(addr));
    let plan = settings::plan(&facts).map_err(PyValueError::new_err)?;
    let dict = PyDict::new(py);
    for (name, settings) in [("settings", plan.settings), ("same_host", plan.same_host)] {
        let list: Vec<_> = settings
            .into_iter()
            .map(|setting| (setting.variable, setting.value, setting.reason))
            .collect();
        dict.set_item(name, list)?;
    }
    dict.set_item("warnings", plan.warnings)?;
    dict.set_item("obstacles", plan.obstacles)?;
    dict.set_item("one_sided", plan.one_sided)?;
    dict.set_item("shared_memory", plan.shared_memory)?;
    let devices: Vec<_> = facts
        .rdma
        .into_iter()
        .map(|device| (device.name, device.interfaces))
        .collect();
    dict.set_item("rdma_devices", devices)?;
    Ok(dict)
}

/// The source address of the default route. Raises `ValueError` with the host's addresses if there is none.
#[pyfunction]
pub(crate) fn default_ip(py: Python<'_>) -> PyResult<String> {
    detached(py, || connex_rs::host::default_route_source(false))
        .map(|addr| addr.to_string())
        .map_err(|error| PyValueError::new_err(error.to_string()))
}
