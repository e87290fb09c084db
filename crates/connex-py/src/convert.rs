//! Results: the engine's values as Python objects.

use connex_rs::{Event, EventKind, LogicalId, Stats};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

/// `(model, stage, shard, replica)`.
pub(crate) fn id_tuple<'py>(py: Python<'py>, id: &LogicalId) -> PyResult<Bound<'py, PyTuple>> {
    (id.model(), id.stage(), id.shard(), id.replica()).into_pyobject(py)
}

/// An event as SPEC section 6 has it.
pub(crate) fn event_dict<'py>(py: Python<'py>, event: &Event) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item(pyo3::intern!(py, "type"), event.kind.name())?;
    dict.set_item(pyo3::intern!(py, "peer"), id_tuple(py, &event.peer)?)?;
    dict.set_item(pyo3::intern!(py, "ts_ns"), event.ts_ns)?;
    match &event.kind {
        EventKind::Joined { rejoin } => dict.set_item("rejoin", rejoin)?,
        EventKind::Failed {
            status,
            reason,
            detail,
            established,
        } => {
            dict.set_item("status", status)?;
            dict.set_item("reason", reason)?;
            dict.set_item("detail", detail)?;
            dict.set_item("established", established)?;
        }
        _ => {}
    }
    Ok(dict)
}

/// The counters by name, then `transport`, `paths`, `sentinel` and `warnings`.
pub(crate) fn stats_dict<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, value) in stats.counters() {
        dict.set_item(name, value)?;
    }
    dict.set_item("transport", &stats.transport)?;
    let paths = PyList::empty(py);
    for path in &stats.paths {
        let entry = PyDict::new(py);
        entry.set_item("peer", &path.peer)?;
        entry.set_item("path", &path.path)?;
        entry.set_item("mode", path.mode)?;
        paths.append(entry)?;
    }
    dict.set_item("paths", paths)?;
    dict.set_item("sentinel", stats.sentinel.name())?;
    dict.set_item("warnings", &stats.warnings)?;
    Ok(dict)
}
