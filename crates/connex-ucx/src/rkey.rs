//! A peer's key.

use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::endpoint::{Endpoint, EpId};
use crate::error::{Error, Result};
use crate::status::Status;
use crate::sys;
use crate::worker::{Dropped, Shared, Worker};

/// Room that is kept behind a key while UCX reads it: `ucp_ep_rkey_unpack` is not told the length, so one that lies
/// about its parts would be read past its end. Each part has a length of one byte, and there are at most 64.
const SLACK: usize = 64 * 257 + 64;

/// A key of a peer's [`Memory`](crate::Memory), good for one endpoint.
pub struct RemoteKey {
    shared: Arc<Shared>,
    raw: NonNull<sys::ucp_rkey>,
    ep: EpId,
}

// SAFETY: the handle is used only together with `&mut Worker`, and its drop leaves the work to the worker.
unsafe impl Send for RemoteKey {}
// SAFETY: as above; nothing can be done with a shared reference alone.
unsafe impl Sync for RemoteKey {}

impl RemoteKey {
    /// Makes the bytes of [`Memory::key`](crate::Memory::key) usable on `ep`.
    ///
    /// # Errors
    /// They are no key, or none that this endpoint's transports can use.
    pub fn unpack(worker: &mut Worker, ep: &Endpoint, key: &[u8]) -> Result<Self> {
        let operation = "ucp_ep_rkey_unpack";
        let handle = ep.handle(worker, operation)?;
        if key.is_empty() || key.len() > SLACK {
            return Err(Error::Invalid {
                operation,
                problem: format!("a key of {} bytes", key.len()),
            });
        }
        let mut padded = Vec::with_capacity(key.len() + SLACK);
        padded.extend_from_slice(key);
        padded.resize(key.len() + SLACK, 0);
        let mut raw = ptr::null_mut();
        // SAFETY: the endpoint is open; whatever the bytes say, what UCX reads of them lies within `padded`.
        let status = unsafe {
            worker
                .ucp()
                .ucp_ep_rkey_unpack(handle, padded.as_ptr().cast(), &mut raw)
        };
        Status(status)
            .check()
            .map_err(|s| Error::ucx(operation, s))?;
        let raw = NonNull::new(raw).ok_or(Error::ucx(operation, Status::NO_MEMORY))?;
        worker.core_mut().keys.insert(raw.as_ptr() as usize);
        Ok(Self {
            shared: Arc::clone(ep.shared()),
            raw,
            ep: ep.id(),
        })
    }

    /// The endpoint it is good for.
    pub fn ep(&self) -> EpId {
        self.ep
    }

    pub(crate) fn raw(&self) -> sys::ucp_rkey_h {
        self.raw.as_ptr()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl fmt::Debug for RemoteKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteKey({:?})", self.ep)
    }
}

/// Destroys a key, unless that was done already.
pub(crate) fn destroy(worker: &mut Worker, key: usize) {
    if worker.core_mut().keys.remove(&key) {
        // SAFETY: unpacked by this worker, which is alive; it was in the table, so it goes once.
        unsafe { worker.ucp().ucp_rkey_destroy(key as sys::ucp_rkey_h) };
    }
}

impl Drop for RemoteKey {
    fn drop(&mut self) {
        self.shared
            .dropped(Dropped::Key(self.raw.as_ptr() as usize));
    }
}
