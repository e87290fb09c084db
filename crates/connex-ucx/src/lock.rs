//! Locking the standard library's mutexes; connex-rs's `sync` explains why it is these.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits for the lock. A thread that panicked with it held has left nothing half done behind any of ours.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
