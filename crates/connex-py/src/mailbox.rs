//! Telling event loops that a transfer has ended.
//!
//! Wakers are called on a thread of the engine, which must never wait for the interpreter lock. So a waker leaves a
//! number in the mailbox of each event loop that awaits, and the loop, which watches the mailbox's descriptor, does the
//! rest: `connex_rs/_awaiting.py`. No thread of ours ever calls into Python.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Wake;

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

/// The numbers of ended transfers, and the descriptor that is readable while there are any.
pub(crate) struct Slot {
    ended: Mutex<Vec<u64>>,
    readable: OwnedFd,
}

impl Slot {
    fn put(&self, number: u64) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if ended.is_empty() {
            // Cannot fail: the count is below its limit, for `take` resets it.
            let _ = rustix::io::write(&self.readable, &1_u64.to_ne_bytes());
        }
        ended.push(number);
    }

    fn take(&self) -> Vec<u64> {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        // Fails when nothing was put.
        let _ = rustix::io::read(&self.readable, &mut [0; 8]);
        std::mem::take(&mut *ended)
    }
}

/// The mailbox of one event loop.
#[pyclass(frozen, module = "connex_rs._connex_rs")]
pub(crate) struct Mailbox {
    slot: Arc<Slot>,
}

impl Mailbox {
    pub(crate) fn slot(&self) -> &Arc<Slot> {
        &self.slot
    }
}

#[pymethods]
impl Mailbox {
    #[new]
    fn new() -> PyResult<Self> {
        let readable =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| {
                PyOSError::new_err((
                    error.raw_os_error(),
                    format!("cannot make an event descriptor for the event loop: {error}"),
                ))
            })?;
        Ok(Self {
            slot: Arc::new(Slot {
                ended: Mutex::new(Vec::new()),
                readable,
            }),
        })
    }

    /// The descriptor that is readable while there is something to take.
    fn fileno(&self) -> i32 {
        self.slot.readable.as_raw_fd()
    }

    /// The numbers that have come since the last call.
    fn take(&self) -> Vec<u64> {
        self.slot.take()
    }
}

/// Who awaits a transfer: its waker.
#[derive(Default)]
pub(crate) struct Awaiting(Mutex<Vec<(Arc<Slot>, u64)>>);

impl Awaiting {
    /// `number` is put into `slot` at the end.
    pub(crate) fn add(&self, slot: &Arc<Slot>, number: u64) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((slot.clone(), number));
    }
}

impl Wake for Awaiting {
    fn wake(self: Arc<Self>) {
        let awaiting = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        for (slot, number) in awaiting {
            slot.put(number);
        }
    }
}
