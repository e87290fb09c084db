//! Telling event loops that a transfer has ended.
//!
//! Wakers are called on a thread of the engine, which must never wait for the interpreter lock. So a waker only
//! sends a number to one thread of this module, and that thread takes the lock and calls `call_soon_threadsafe` of the
//! loops concerned.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyCFunction;

use crate::transfer::Transfer;

/// One `await` of a transfer.
pub(crate) struct Awaiting {
    event_loop: Py<PyAny>,
    future: Py<PyAny>,
}

/// A transfer with its awaits.
struct Entry {
    transfer: Py<Transfer>,
    awaiting: Vec<Awaiting>,
}

/// The thread of this process and what it is to deliver. Locked with the interpreter lock held only.
struct Notifier {
    pid: u32,
    sender: Sender<u64>,
    next: u64,
    entries: HashMap<u64, Entry>,
}

static NOTIFIER: Mutex<Option<Notifier>> = Mutex::new(None);

/// The waker: a number on its way to the thread.
struct Knock {
    key: u64,
    sender: Sender<u64>,
}

impl Wake for Knock {
    fn wake(self: Arc<Self>) {
        // The thread has ended only if the interpreter has.
        let _ = self.sender.send(self.key);
    }
}

/// Starts the thread where there is none: at first use, and in a forked child.
fn running(slot: &mut Option<Notifier>) -> PyResult<&mut Notifier> {
    let pid = std::process::id();
    if slot.as_ref().is_none_or(|notifier| notifier.pid != pid) {
        let (sender, receiver) = channel();
        std::thread::Builder::new()
            .name("connex-notify".into())
            .spawn(move || deliver(&receiver))
            .map_err(|e| {
                PyRuntimeError::new_err(format!(
                    "cannot start the thread that wakes event loops: {e}"
                ))
            })?;
        let next = slot.as_ref().map_or(1, |notifier| notifier.next);
        if let Some(parents) = slot.take() {
            // Event loops of the parent: dropping them could run Python code here.
            std::mem::forget(parents.entries);
        }
        *slot = Some(Notifier {
            pid,
            sender,
            next,
            entries: HashMap::new(),
        });
    }
    slot.as_mut()
        .ok_or_else(|| PyRuntimeError::new_err("no notifier"))
}

/// A future of the running event loop that is done when the transfer is.
pub(crate) fn future<'py>(transfer: &Bound<'py, Transfer>) -> PyResult<Bound<'py, PyAny>> {
    let py = transfer.py();
    let event_loop = py
        .import(pyo3::intern!(py, "asyncio"))?
        .call_method0(pyo3::intern!(py, "get_running_loop"))?;
    let future = event_loop.call_method0(pyo3::intern!(py, "create_future"))?;
    if transfer.get().is_done() || !enrol(transfer, &event_loop, &future)? {
        settle(&future, transfer)?;
    }
    Ok(future)
}

/// Has the future settled by the thread; false if the transfer has ended meanwhile.
fn enrol(
    transfer: &Bound<'_, Transfer>,
    event_loop: &Bound<'_, PyAny>,
    future: &Bound<'_, PyAny>,
) -> PyResult<bool> {
    let mut slot = NOTIFIER.lock().unwrap_or_else(PoisonError::into_inner);
    let notifier = running(&mut slot)?;
    let awaiting = Awaiting {
        event_loop: event_loop.clone().unbind(),
        future: future.clone().unbind(),
    };
    let key = transfer.get().key();
    if let Some(entry) = notifier.entries.get_mut(&key) {
        entry.awaiting.push(awaiting);
        return Ok(true);
    }
    let key = notifier.next;
    notifier.next += 1;
    transfer.get().set_key(key);
    let waker = Waker::from(Arc::new(Knock {
        key,
        sender: notifier.sender.clone(),
    }));
    if !transfer.get().set_waker(&waker) {
        return Ok(false);
    }
    notifier.entries.insert(
        key,
        Entry {
            transfer: transfer.clone().unbind(),
            awaiting: vec![awaiting],
        },
    );
    Ok(true)
}

/// Gives a future its result, unless its task was canceled.
#[pyfunction]
fn settle(future: &Bound<'_, PyAny>, transfer: &Bound<'_, Transfer>) -> PyResult<()> {
    let py = future.py();
    if future
        .call_method0(pyo3::intern!(py, "done"))?
        .is_truthy()?
    {
        return Ok(());
    }
    match transfer.get().outcome(py) {
        Ok(()) => future.call_method1(pyo3::intern!(py, "set_result"), (py.None(),))?,
        Err(error) => future.call_method1(pyo3::intern!(py, "set_exception"), (error,))?,
    };
    Ok(())
}

/// The thread: ends with the interpreter.
fn deliver(keys: &Receiver<u64>) {
    let mut function = None;
    while let Ok(first) = keys.recv() {
        let attached = Python::try_attach(|py| {
            for key in std::iter::once(first).chain(keys.try_iter()) {
                let entry = {
                    let mut slot = NOTIFIER.lock().unwrap_or_else(PoisonError::into_inner);
                    slot.as_mut()
                        .and_then(|notifier| notifier.entries.remove(&key))
                };
                if let Some(entry) = entry
                    && let Err(error) = entry.deliver(py, &mut function)
                {
                    error.write_unraisable(py, None);
                }
            }
        });
        if attached.is_none() {
            // The interpreter is going down: its objects are not ours to touch any more.
            std::mem::forget(function);
            return;
        }
    }
}

impl Entry {
    fn deliver(self, py: Python<'_>, function: &mut Option<Py<PyCFunction>>) -> PyResult<()> {
        let function = match function {
            Some(function) => function,
            none => none.insert(wrap_pyfunction!(settle, py)?.unbind()),
        };
        for Awaiting { event_loop, future } in &self.awaiting {
            // A loop that was closed meanwhile has nobody waiting.
            let _ = event_loop.call_method1(
                py,
                pyo3::intern!(py, "call_soon_threadsafe"),
                (&*function, future, &self.transfer),
            );
        }
        Ok(())
    }
}
