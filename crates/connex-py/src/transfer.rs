//! `connex_rs.Transfer`.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::args;
use crate::errors::exception;
use crate::mailbox::{Awaiting, Mailbox};
use crate::waiting::{detached, in_slices};

/// The longest time that `_help` may hold the interpreter lock.
const MAX_HELP_US: u64 = 1000;

/// An operation under way. Dropping it does not end the operation.
///
/// It can be awaited on an asyncio event loop: `await` gives None, or raises as `wait` does. Cancelling the task
/// that awaits leaves the operation running.
#[pyclass(frozen, module = "connex_rs")]
pub(crate) struct Transfer {
    inner: connex_rs::Transfer,
    /// The process that started it: in a forked child it never ends.
    pid: u32,
    /// The event loops that await it.
    awaiting: Arc<Awaiting>,
}

impl Transfer {
    pub(crate) fn new(inner: connex_rs::Transfer) -> Self {
        Self {
            inner,
            pid: std::process::id(),
            awaiting: Arc::default(),
        }
    }

    pub(crate) fn inner(&self) -> &connex_rs::Transfer {
        &self.inner
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
        self.inner.done()
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

    /// Drives the engine for at most `microseconds`, with the interpreter lock held, in the hope of the end; whether
    /// it has come. Letting go of the lock could cost more than that.
    fn _help(&self, microseconds: u64) -> PyResult<bool> {
        self.check_process()?;
        let time = Duration::from_micros(microseconds.min(MAX_HELP_US));
        Ok(self.inner.wait(Some(time)).is_some())
    }

    /// Has `number` put into the mailbox at the end; false, and it is not, if the end has come already.
    fn _tell(&self, mailbox: &Bound<'_, Mailbox>, number: u64) -> PyResult<bool> {
        self.check_process()?;
        self.awaiting.add(mailbox.get().slot(), number);
        Ok(self.inner.set_waker(&Waker::from(self.awaiting.clone())))
    }

    fn __repr__(&self) -> String {
        match self.inner.result() {
            None => "<connex_rs.Transfer running>".to_owned(),
            Some(Ok(())) => "<connex_rs.Transfer done>".to_owned(),
            Some(Err(error)) => format!("<connex_rs.Transfer failed: {error}>"),
        }
    }
}
