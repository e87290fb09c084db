//! Pinned host memory that pieces of GPU memory are staged in.

use std::sync::Arc;

use super::driver::{ContextId, Driver};
use crate::sync::Mutex;

/// Bytes of a buffer: the longest piece of any transport.
pub(crate) const BUFFER: usize = crate::transport::tcp::PIECE;

/// Buffers that are kept for later; more are freed. Pinning takes a system call and the device's page tables.
const KEPT: usize = 64;

/// The free buffers of an engine.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    free: Mutex<Vec<Pinned>>,
}

/// One piece of host memory.
#[derive(Debug)]
struct Pinned {
    at: *mut u8,
    /// `None`: the driver gave no pinned memory, so this is ordinary memory, which it copies more slowly.
    by: Option<(&'static Driver, ContextId)>,
}

// SAFETY: plain memory without thread affinity, owned by its holder.
unsafe impl Send for Pinned {}
// SAFETY: as above; it is accessed through raw pointers whose users take turns.
unsafe impl Sync for Pinned {}

impl Pinned {
    fn new(driver: &'static Driver, context: ContextId) -> Self {
        if let Some(at) = driver.pin(context, BUFFER) {
            return Self {
                at,
                by: Some((driver, context)),
            };
        }
        let at = Box::into_raw(vec![0u8; BUFFER].into_boxed_slice()).cast();
        Self { at, by: None }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        match self.by {
            // SAFETY: it came from `pin`, and whoever used it has let go.
            Some((driver, context)) => unsafe { driver.unpin(context, self.at) },
            None => {
                let bytes = std::ptr::slice_from_raw_parts_mut(self.at, BUFFER);
                // SAFETY: it was made from a boxed slice of this length.
                drop(unsafe { Box::from_raw(bytes) });
            }
        }
    }
}

impl Pool {
    /// A buffer of [`BUFFER`] bytes; it comes back when it is dropped. `token` counts for whom it is in use.
    pub(super) fn take(
        self: &Arc<Self>,
        driver: &'static Driver,
        context: ContextId,
        token: Arc<()>,
    ) -> Buffer {
        let free = self.free.lock().pop();
        Buffer {
            memory: Some(free.unwrap_or_else(|| Pinned::new(driver, context))),
            pool: Arc::clone(self),
            _token: token,
        }
    }
}

/// A buffer in use.
#[derive(Debug)]
pub(crate) struct Buffer {
    memory: Option<Pinned>,
    pool: Arc<Pool>,
    _token: Arc<()>,
}

impl Buffer {
    /// Its first byte.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.memory
            .as_ref()
            .map_or(std::ptr::null_mut(), |memory| memory.at)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            let mut free = self.pool.free.lock();
            if free.len() < KEPT {
                free.push(memory);
            }
        }
    }
}
