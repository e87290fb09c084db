//! The engine's errors as Python exceptions.

use connex_rs::{Error, ErrorKind};
use pyo3::exceptions::{PyConnectionError, PyRuntimeError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;

use crate::convert;

/// The exception that stands for an error; it carries the code as `code` and the peer, if there was one, as `peer`.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let text = error.to_string();
    let raised = match error.kind() {
        ErrorKind::PeerFailed => PyConnectionError::new_err(text),
        ErrorKind::TimedOut => PyTimeoutError::new_err(text),
        ErrorKind::Invalid => PyValueError::new_err(text),
        ErrorKind::Canceled => PyRuntimeError::new_err(canceled(error)),
        _ => PyRuntimeError::new_err(text),
    };
    let raised = made(py, raised);
    let value = raised.value(py);
    let peer = error.peer().map(|peer| convert::id_tuple(py, peer));
    // Extras: an exception without them is better than a different one.
    let _ = value.setattr("code", error.code());
    if let Some(Ok(peer)) = peer {
        let _ = value.setattr("peer", peer);
    }
    raised
}

/// The same error with its exception object made, so that it can be looked at.
///
/// Otherwise pyo3 makes the object at the first look (`value`, `is_instance_of`), and gives the interpreter lock away
/// meanwhile. A daemon thread that meets the end of the interpreter there does not stop as in [`detached`], it panics.
///
/// [`detached`]: crate::waiting::detached
pub(crate) fn made(py: Python<'_>, error: PyErr) -> PyErr {
    error.restore(py);
    PyErr::fetch(py)
}

/// Callers recognise a canceled operation by how its text begins.
fn canceled(error: &Error) -> String {
    let text = error.text();
    let text = if text.starts_with("canceled") {
        text.to_owned()
    } else {
        format!("canceled: {text}")
    };
    match error.peer() {
        Some(peer) => format!("{text} (peer {peer})"),
        None => text,
    }
}

/// Refuses the use of an engine in a forked child.
pub(crate) fn check_process(engine: &connex_rs::Engine) -> PyResult<()> {
    engine
        .check_process()
        .map_err(|error| PyRuntimeError::new_err(error.to_string()))
}
