//! What a worker reports.

use crate::endpoint::EpId;
use crate::listener::ConnRequest;
use crate::status::Status;

/// Something that happened, from [`Worker::next_event`](crate::Worker::next_event).
#[derive(Debug)]
pub enum Event {
    /// A stranger wants to connect: accept or reject it. Dropped, it is rejected.
    ConnRequest(ConnRequest),
    /// The connection broke. Nothing is delivered on it any more; [close](crate::Endpoint::close) it by force to
    /// have what is under way ended.
    Failed {
        /// Which.
        ep: EpId,
        /// Why: [`Status::CONNECTION_RESET`] for a peer that died or closed.
        status: Status,
    },
    /// The receiver panicked while it handled a message: the connection is to be given up.
    Panicked {
        /// Which.
        ep: EpId,
        /// The panic's message.
        message: String,
    },
    /// An operation that was [pending](crate::Posted::Pending) has ended: its memory is free.
    Completed {
        /// On which endpoint.
        ep: EpId,
        /// The caller's token.
        token: u64,
        /// How.
        result: Result<(), Status>,
    },
    /// A close is complete and every operation of the endpoint has been reported: UCX touches no memory for it any
    /// more. The last event of an endpoint.
    Closed {
        /// Which.
        ep: EpId,
        /// What the close itself gave; after a forced close this can be anything.
        result: Result<(), Status>,
    },
}

/// Memory that a rendezvous may be received into.
#[derive(Debug)]
pub struct Landing {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
    pub(crate) token: u64,
}

impl Landing {
    /// `len` bytes at `ptr`. The end is told by [`Event::Completed`] with `token`.
    ///
    /// # Safety
    /// The memory must be valid for writes, and nobody else may use it, until that event or the endpoint's
    /// [`Event::Closed`] has come, or the worker has been dropped.
    pub unsafe fn new(ptr: *mut u8, len: usize, token: u64) -> Self {
        Self { ptr, len, token }
    }
}

/// Gets the messages, during [`Worker::progress`](crate::Worker::progress).
///
/// A message arrives whole: UCX puts the fragments of a large eager one together in memory of its own first (so
/// senders should cut theirs to one fragment). A panic in here is caught and reported as
/// [`Event::Panicked`].
pub trait Receiver {
    /// A message. `header` and `data` are valid during the call only.
    fn message(&mut self, ep: EpId, id: u16, header: &[u8], data: &[u8]);

    /// The offer of a rendezvous of `len` bytes: where to? A landing that is shorter, and `None`, refuse it. What was
    /// received is then reported by [`Event::Completed`].
    fn rendezvous(&mut self, ep: EpId, id: u16, header: &[u8], len: usize) -> Option<Landing> {
        let _ = (ep, id, header, len);
        None
    }
}
