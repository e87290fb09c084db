//! Step channels: what the pure-Python layer `connex_rs.channel` stands on. Arrays are addresses here; their memory
//! is kept until the engine does not need it any more.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use connex_rs::channel::{DType, OwnedArray};
use connex_rs::{ChannelConfig, Error, ErrorKind};
use pyo3::exceptions::{PyRuntimeError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::args;
use crate::convert;
use crate::errors::exception;
use crate::transfer::{self, Transfer};
use crate::waiting::{detached, in_slices};

/// The pure layer.
const LAYER: &str = "connex_rs.channel";

/// As for any call, and the correlation numbers that were not taken as `untaken` of a ConnectionError.
fn failure(py: Python<'_>, error: &Error) -> PyErr {
    let raised = exception(py, error);
    if error.kind() == ErrorKind::PeerFailed {
        // An extra, but clients count on it: if it cannot be set, that is the error.
        if let Err(error) = raised
            .value(py)
            .setattr("untaken", error.untaken().to_vec())
        {
            return error;
        }
    }
    raised
}

fn endless() -> PyErr {
    PyRuntimeError::new_err("a wait without end has ended")
}

/// Tries with a time limit of a slice until there is a result other than "timed out", which is given only after `timeout`.
fn patiently<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    mut attempt: impl FnMut(Duration) -> connex_rs::Result<T> + Send,
) -> PyResult<T> {
    let mut late = None;
    let result = in_slices(py, timeout, |slice| match attempt(slice) {
        Err(error) if error.kind() == ErrorKind::TimedOut => {
            late = Some(error);
            None
        }
        result => Some(result),
    })?;
    match (result, late) {
        (Some(Ok(value)), _) => Ok(value),
        (Some(Err(error)), _) => Err(failure(py, &error)),
        (None, Some(late)) => Err(late_by(&late, timeout)),
        (None, None) => Err(endless()),
    }
}

/// The error of the last slice, with the time that the caller gave.
fn late_by(late: &Error, timeout: Option<Duration>) -> PyErr {
    let text = late.text();
    let time = format!(" within {} ms", timeout.unwrap_or_default().as_millis());
    let text = match text.split_once(" within ") {
        Some((before, after)) => {
            let rest = after.find(';').map_or("", |at| &after[at..]);
            format!("{before}{time}{rest}")
        }
        None => format!("{text}{time}"),
    };
    PyTimeoutError::new_err(text)
}

// ---- memory of steps under way ----------------------------------------------------------------

/// Steps whose memory the engine may still read, with whatever owns it.
static KEPT: Mutex<Vec<(Py<Transfer>, Py<PyAny>)>> = Mutex::new(Vec::new());

/// Keeps `owner` while `transfer` runs; lets go of the owners of those that have ended.
fn keep(transfer: &Bound<'_, Transfer>, owner: &Bound<'_, PyAny>) {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let (ended, mut running): (Vec<_>, Vec<_>) = std::mem::take(&mut *kept)
        .into_iter()
        .partition(|(transfer, _)| transfer.get().inner().done());
    if !transfer.get().inner().done() {
        running.push((transfer.clone().unbind(), owner.clone().unbind()));
    }
    *kept = running;
    drop(kept);
    // Dropping an owner may run any Python code, so not with the list locked.
    drop(ended);
}

fn array(part: &Bound<'_, PyAny>) -> PyResult<OwnedArray> {
    let (dtype, shape, addr, len): (String, Vec<usize>, usize, usize) = part.extract()?;
    // SAFETY: the memory is kept, with its owner, until the transfer has ended; that nobody changes it meanwhile is the
    // caller's promise, as for any transfer.
    unsafe { OwnedArray::from_raw(DType::from_name(&dtype), &shape, addr, len, Arc::new(())) }
        .map_err(|error| PyValueError::new_err(error.to_string()))
}

// ---- the sending end ----------------------------------------------------------------------------

/// The sending end of a channel: the native half of `connex_rs.channel.Sender`.
#[pyclass(frozen, module = "connex_rs._connex_rs")]
pub(crate) struct ChannelSender {
    /// Gone once it is closed for good.
    inner: Option<connex_rs::Sender>,
}

impl Drop for ChannelSender {
    fn drop(&mut self) {
        let inner = self.inner.take();
        // It may be the engine's last owner, and closing that takes time.
        let _ = Python::try_attach(|py| detached(py, || drop(inner)));
    }
}

impl ChannelSender {
    fn sender(&self) -> PyResult<&connex_rs::Sender> {
        self.inner.as_ref().ok_or_else(endless)
    }
}

/// `Engine.channel`.
pub(crate) fn open<'py>(
    py: Python<'py>,
    engine: &connex_rs::Engine,
    url: &str,
    name: &str,
    config: ChannelConfig,
) -> PyResult<Bound<'py, PyAny>> {
    let sender = detached(py, || engine.channel(url, name, config))
        .map_err(|error| exception(py, &error))?;
    let native = ChannelSender {
        inner: Some(sender),
    };
    py.import(LAYER)?.call_method1("Sender", (native,))
}

/// `Engine.accept_channel`.
pub(crate) fn accept<'py>(
    py: Python<'py>,
    engine: &connex_rs::Engine,
    name: Option<&str>,
    timeout: Option<Duration>,
) -> PyResult<Bound<'py, PyAny>> {
    let receiver = patiently(py, timeout, |slice| {
        engine.accept_channel(name, Some(slice))
    })?;
    let native = ChannelReceiver {
        inner: Mutex::new(Some(Arc::new(receiver))),
    };
    py.import(LAYER)?.call_method1("Receiver", (native,))
}

#[pymethods]
impl ChannelSender {
    /// The name that the channel was opened with.
    #[getter]
    fn name(&self) -> PyResult<&str> {
        Ok(self.sender()?.name())
    }

    /// Who receives: an id tuple.
    #[getter]
    fn peer<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        convert::id_tuple(py, self.sender()?.peer())
    }

    /// Bytes of arrays that fit into one step.
    #[getter]
    fn slot_bytes(&self) -> PyResult<usize> {
        Ok(self.sender()?.slot_bytes())
    }

    /// The correlation numbers of the steps that the receiver has not released.
    #[getter]
    fn untaken(&self) -> PyResult<Vec<u64>> {
        Ok(self.sender()?.untaken())
    }

    /// Waits for a slot and posts a step of `parts`, tuples `(dtype, shape, address, length)`. `owner` is kept while
    /// their memory is needed.
    #[pyo3(signature = (parts, owner, corr, timeout_ms=None))]
    fn post<'py>(
        &self,
        py: Python<'py>,
        parts: &Bound<'py, PyList>,
        owner: &Bound<'py, PyAny>,
        corr: &Bound<'py, PyAny>,
        timeout_ms: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, Transfer>> {
        let corr = args::integer(corr, "corr", u64::MAX)?;
        let timeout = args::timeout(timeout_ms, "timeout_ms")?;
        let arrays = parts
            .iter()
            .map(|part| array(&part))
            .collect::<PyResult<Vec<_>>>()?;
        let sender = self.sender()?;
        let posted = patiently(py, timeout, |slice| {
            sender.send_owned(&arrays, corr, Some(slice))
        })?;
        let transfer = Bound::new(py, Transfer::new(posted))?;
        keep(&transfer, owner);
        Ok(transfer)
    }

    /// Waits until a transfer of `post` has ended; raises as it ended.
    fn finish(&self, py: Python<'_>, transfer: &Bound<'_, Transfer>) -> PyResult<()> {
        let sender = self.sender()?;
        let transfer = transfer.get().inner();
        let waited = transfer::wait(py, transfer, None)?;
        match (sender.outcome(transfer), waited) {
            (Some(Ok(())), _) => Ok(()),
            (Some(Err(error)), _) | (None, Some(Err(error))) => Err(failure(py, &error)),
            (None, _) => Err(endless()),
        }
    }

    /// Waits until the receiver has accepted the channel.
    #[pyo3(signature = (timeout_ms=None))]
    fn wait_open(&self, py: Python<'_>, timeout_ms: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let timeout = args::timeout(timeout_ms, "timeout_ms")?;
        let sender = self.sender()?;
        patiently(py, timeout, |slice| sender.wait_open(Some(slice)))
    }

    /// Waits until the receiver has released every step.
    #[pyo3(signature = (timeout_ms=None))]
    fn drain(&self, py: Python<'_>, timeout_ms: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let timeout = args::timeout(timeout_ms, "timeout_ms")?;
        let sender = self.sender()?;
        patiently(py, timeout, |slice| sender.drain(Some(slice)))
    }

    /// A transfer that ends when another `post` is worth a try.
    fn changed(&self) -> PyResult<Transfer> {
        Ok(Transfer::new(self.sender()?.changed()))
    }

    /// Ends the channel after what was sent.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let sender = self.sender()?;
        detached(py, || sender.close());
        Ok(())
    }
}

// ---- the receiving end --------------------------------------------------------------------------

/// The receiving end of a channel: the native half of `connex_rs.channel.Receiver`.
#[pyclass(frozen, module = "connex_rs._connex_rs")]
pub(crate) struct ChannelReceiver {
    /// Gone once it is closed.
    inner: Mutex<Option<Arc<connex_rs::Receiver>>>,
}

impl Drop for ChannelReceiver {
    fn drop(&mut self) {
        let inner = self
            .inner
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        // It may be the engine's last owner, and closing that takes time.
        let _ = Python::try_attach(|py| detached(py, || drop(inner)));
    }
}

impl ChannelReceiver {
    fn receiver(&self) -> PyResult<Arc<connex_rs::Receiver>> {
        self.inner
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
            .ok_or_else(|| {
                PyRuntimeError::new_err("canceled: this end of the channel has been closed")
            })
    }
}

#[pymethods]
impl ChannelReceiver {
    /// The name that the sender gave the channel.
    #[getter]
    fn name(&self) -> PyResult<String> {
        Ok(self.receiver()?.name().to_owned())
    }

    /// Who sends: an id tuple.
    #[getter]
    fn peer<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        convert::id_tuple(py, self.receiver()?.peer())
    }

    /// The correlation numbers of the steps that are out and not released.
    #[getter]
    fn untaken(&self) -> PyResult<Vec<u64>> {
        Ok(self.receiver()?.untaken())
    }

    /// The next step; None at the end of the channel.
    #[pyo3(signature = (timeout_ms=None))]
    fn recv(
        &self,
        py: Python<'_>,
        timeout_ms: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<ChannelStep>> {
        let timeout = args::timeout(timeout_ms, "timeout_ms")?;
        let receiver = self.receiver()?;
        let step = patiently(py, timeout, |slice| receiver.recv(Some(slice)));
        // If the channel was closed meanwhile this is its last owner.
        detached(py, || drop(receiver));
        Ok(step?.map(|step| ChannelStep {
            corr: step.corr(),
            memory: step.memory(),
            step: Mutex::new(Some(step)),
        }))
    }

    /// A transfer that ends when another `recv` is worth a try.
    fn changed(&self) -> PyResult<Transfer> {
        Ok(Transfer::new(self.receiver()?.changed()))
    }

    /// Takes no more steps. The sender fails, unless it had come to its end.
    fn close(&self, py: Python<'_>) {
        let inner = self
            .inner
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        detached(py, || drop(inner));
    }
}

/// A received step: the native half of `connex_rs.channel.Step`. Every view of its arrays holds it.
#[pyclass(frozen, module = "connex_rs._connex_rs")]
pub(crate) struct ChannelStep {
    corr: u64,
    /// Keeps the ring mapped as long as a view may look at it.
    #[expect(dead_code, reason = "held for its drop")]
    memory: Arc<dyn std::any::Any + Send + Sync>,
    /// Gone once it is released.
    step: Mutex<Option<connex_rs::Step>>,
}

impl Drop for ChannelStep {
    fn drop(&mut self) {
        let step = self
            .step
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if step.is_some() {
            let _ = Python::try_attach(|py| detached(py, || drop(step)));
        }
    }
}

#[pymethods]
impl ChannelStep {
    /// The correlation number that the sender gave it.
    #[getter]
    fn corr(&self) -> u64 {
        self.corr
    }

    /// Its arrays: tuples `(dtype, shape, address, length)`.
    fn arrays<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let step = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        let step = step
            .as_ref()
            .ok_or_else(|| PyValueError::new_err("the step has been released"))?;
        let list = PyList::empty(py);
        for view in step.iter() {
            let bytes = view.bytes();
            let shape = PyTuple::new(py, view.shape())?;
            let addr = bytes.as_ptr() as usize;
            list.append((view.dtype().name(), shape, addr, bytes.len()))?;
        }
        Ok(list)
    }

    /// Frees its slot for the sender. Idempotent.
    fn release(&self, py: Python<'_>) {
        let step = self
            .step
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        detached(py, || drop(step));
    }
}
