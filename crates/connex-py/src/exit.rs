//! The end of the interpreter: engines that nobody closed.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;

use crate::waiting::detached;

type Live = Weak<connex_rs::Engine>;

/// Engines that may be open. Locked with the interpreter lock held only.
static LIVE: Mutex<Vec<Live>> = Mutex::new(Vec::new());

/// Remembers an engine that has been started.
pub(crate) fn remember(engine: &Arc<connex_rs::Engine>) {
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    live.retain(|engine| engine.strong_count() > 0);
    live.push(Arc::downgrade(engine));
}

/// Has the open engines closed when the interpreter ends.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let close_all = wrap_pyfunction!(close_all, module)?;
    module
        .py()
        .import("atexit")?
        .call_method1("register", (close_all,))?;
    Ok(())
}

/// Closes every open engine, all at once: each close takes up to a second when a peer is frozen.
///
/// A busy host may not be done by then, and no thread may be inside a transport's library when the C library takes that
/// down at the end of the process: so there is a second wait for those.
#[pyfunction]
fn close_all(py: Python<'_>) {
    let live = std::mem::take(&mut *LIVE.lock().unwrap_or_else(PoisonError::into_inner));
    let native: Vec<_> = live
        .iter()
        .filter_map(Weak::upgrade)
        .filter(|engine| engine.check_process().is_ok())
        .collect();
    let close = |engine: &connex_rs::Engine| {
        engine.close();
        // Waits again if the first call has not seen the end, else returns at once.
        engine.close();
    };
    detached(py, || {
        std::thread::scope(|scope| {
            if let Some((first, others)) = native.split_first() {
                for engine in others {
                    // Without a thread to spare it is closed by whoever drops it.
                    let _ = std::thread::Builder::new().spawn_scoped(scope, || close(engine));
                }
                close(first);
            }
        });
    });
}
