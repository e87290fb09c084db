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
#[pyfunction]
fn close_all(py: Python<'_>) {
    let live = std::mem::take(&mut *LIVE.lock().unwrap_or_else(PoisonError::into_inner));
    let open: Vec<_> = live
        .iter()
        .filter_map(Weak::upgrade)
        .filter(|engine| !engine.is_closed() && engine.check_process().is_ok())
        .collect();
    detached(py, || {
        std::thread::scope(|scope| {
            if let Some((first, others)) = open.split_first() {
                for engine in others {
                    // Without a thread to spare it is closed by whoever drops it, or by the end of the process.
                    let _ = std::thread::Builder::new().spawn_scoped(scope, || engine.close());
                }
                first.close();
            }
        });
    });
}
