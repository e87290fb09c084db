//! Waiting without the interpreter lock, and looking up for signals meanwhile.

use std::time::{Duration, Instant};

use pyo3::ffi::PyThreadState;
use pyo3::prelude::*;

/// How long a blocking call waits before it looks at signals: SPEC allows 100 ms, the rest is for the way back.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

// Not pyo3's own declarations: before Python 3.14 a thread that asks for the lock of an interpreter that is going down is
// ended by a forced unwind, which may not pass a function declared as "C".
unsafe extern "C-unwind" {
    fn PyEval_SaveThread() -> *mut PyThreadState;
    fn PyEval_RestoreThread(state: *mut PyThreadState);
}

/// Takes the lock back when dropped, also on a panic.
struct Reattach(*mut PyThreadState);

impl Drop for Reattach {
    fn drop(&mut self) {
        let end = ParkForGood;
        // SAFETY: the state comes from `PyEval_SaveThread` on this thread, and is given back once.
        unsafe { PyEval_RestoreThread(self.0) };
        std::mem::forget(end);
    }
}

/// Stops the unwinding of a thread that the dying interpreter wants gone: nothing above it in the stack may be unwound
/// like that, and the process is about to end anyway.
struct ParkForGood;

impl Drop for ParkForGood {
    fn drop(&mut self) {
        loop {
            std::thread::park();
        }
    }
}

/// Runs `work` without the interpreter lock. `work` must not touch Python objects, nor drop one: it is given none.
pub(crate) fn detached<T>(_py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    // SAFETY: `_py` proves that this thread is attached; `Reattach` undoes it before `_py` can be used again.
    let reattach = Reattach(unsafe { PyEval_SaveThread() });
    let result = work();
    drop(reattach);
    result
}

/// Calls `wait` with at most [`SLICE`] at a time until it gives something or `timeout` has passed (`None`: never), and
/// looks at signals in between.
pub(crate) fn in_slices<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    mut wait: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let slice = left.map_or(SLICE, |left| left.min(SLICE));
        if let Some(value) = detached(py, || wait(slice)) {
            return Ok(Some(value));
        }
        py.check_signals()?;
        if left.is_some_and(|left| left <= SLICE) {
            return Ok(None);
        }
    }
}
