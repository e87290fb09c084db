//! `connex_rs.Transfer`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::args;
use crate::errors::exception;
use crate::notify;
use crate::waiting::{detached, in_slices};

/// An operation under way. Dropping it does not end the operation.
///
/// It can be awaited on an asyncio event loop: `await` gives None, or raises as `wait` does. Cancelling the task
/// that awaits leaves the operation running.
#[pyclass(frozen, module = "connex_rs")]
pub(crate) struct Transfer {
    inner: connex_rs::Transfer,
    /// The process that started it: in a forked child it never ends.
    pid: u32,
    /// Its number at the notifier; 0 before the first `await`.
    key: AtomicU64,
}

impl Transfer {
    pub(crate) fn new(inner: connex_rs::Transfer) -> Self {
        Self {
            inner,
            pid: std::process::id(),
            key: AtomicU64::new(0),
        }
    }

    pub(crate) fn inner(&self) -> &connex_rs::Transfer {
        &self.inner
    }

    pub(crate) fn is_done(&self) -> bool {
        self.inner.done()
    }

    pub(crate) fn set_waker(&self, waker: &Waker) -> bool {
        self.inner.set_waker(waker)
    }

    pub(crate) fn key(&self) -> u64 {
        self.key.load(Ordering::Relaxed)
    }

    pub(crate) fn set_key(&self, key: u64) {
        self.key.store(key, Ordering::Relaxed);
    }

    /// How it ended; an exception while it is running.
    pub(crate) fn outcome(&self, py: Python<'_>) -> PyResult<()> {
        match self.inner.result() {
            Some(result) => result.map_err(|error| exception(py, &error)),
            None => Err(PyRuntimeError::new_err("the transfer is still running")),
        }
    }

    fn check_process(&self) -> PyResult<()> {
        if self.inner.done() || self.pid == std::process::id() {
            return Ok(());
        }
        Err(PyRuntimeError::new_err(
            "this transfer was started before fork(): it ends in the parent only",
        ))
    }
}

/// Waits until a transfer has ended, and looks at signals meanwhile; an exception of a signal handler ends it first.
/// `None` if it is still running after `timeout`.
pub(crate) fn wait(
    py: Python<'_>,
    transfer: &connex_rs::Transfer,
    timeout: Option<std::time::Duration>,
) -> PyResult<Option<connex_rs::Result<()>>> {
    if let Some(result) = transfer.result() {
        return Ok(Some(result));
    }
    in_slices(py, timeout, |slice| transfer.wait(Some(slice))).inspect_err(|_| {
        detached(py, || transfer.cancel());
    })
}

#[pymethods]
impl Transfer {
    /// Whether it has ended.
    fn done(&self) -> bool {
        self.is_done()
    }

    /// Waits for the end: True when done, False if it is still running after `timeout_ms` (None: wait forever, 0: poll).
    ///
    /// Raises ConnectionError (the peer failed), TimeoutError (the operation's own time ran out), ValueError (invalid) or
    /// RuntimeError (canceled, or another error).
    #[pyo3(signature = (timeout_ms=None))]
    fn wait(&self, py: Python<'_>, timeout_ms: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        let timeout = args::timeout(timeout_ms, "timeout_ms")?;
        self.check_process()?;
        match wait(py, &self.inner, timeout)? {
            Some(Ok(())) => Ok(true),
            Some(Err(error)) => Err(exception(py, &error)),
            None => Ok(false),
        }
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.get().check_process()?;
        notify::future(slf)?.call_method0(pyo3::intern!(slf.py(), "__await__"))
    }

    fn __repr__(&self) -> String {
        match self.inner.result() {
            None => "<connex_rs.Transfer running>".to_owned(),
            Some(Ok(())) => "<connex_rs.Transfer done>".to_owned(),
            Some(Err(error)) => format!("<connex_rs.Transfer failed: {error}>"),
        }
    }
}
