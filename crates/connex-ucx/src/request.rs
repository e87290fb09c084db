//! Operations that run.

use std::ffi::c_void;

use crate::core::Core;
use crate::endpoint::EpId;
use crate::status::Status;
use crate::sys;

/// What became of an operation when it was posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "a pending operation still uses its memory"]
pub enum Posted {
    /// It is over, with success; no event follows.
    Done,
    /// It runs; [`Event::Completed`](crate::Event::Completed) follows with the caller's token.
    Pending,
}

/// One operation under way: what its callback needs, and what UCX may still read.
///
/// Boxed, so that its address stays; finished ones are kept for reuse, so that nothing is allocated in the steady state.
#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) core: *mut Core,
    pub(crate) ep: EpId,
    pub(crate) token: u64,
    pub(crate) is_close: bool,
    /// The header of a message: UCX reads it until the end.
    pub(crate) header: Vec<u8>,
    /// The data of a message that the operation owns.
    pub(crate) data: Vec<u8>,
}

impl Op {
    pub(crate) fn new(core: *mut Core) -> Box<Self> {
        Box::new(Self {
            core,
            ep: EpId::NONE,
            token: 0,
            is_close: false,
            header: Vec::new(),
            data: Vec::new(),
        })
    }
}

/// Parameters for an operation whose end is reported to `op`.
pub(crate) fn param(
    op: *mut Op,
    callback: sys::ucp_request_param_t__bindgen_ty_1,
) -> sys::ucp_request_param_t {
    // SAFETY: plain numbers and pointers, for which zero is valid.
    let mut param: sys::ucp_request_param_t = unsafe { std::mem::zeroed() };
    param.op_attr_mask = sys::UCP_OP_ATTR_FIELD_CALLBACK | sys::UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb = callback;
    param.user_data = op.cast();
    param
}

/// UCX's answer to a post: nothing (done), a request (runs), or an error that is encoded in the pointer.
pub(crate) enum Answer {
    Done,
    Runs,
    Failed(Status),
}

impl Answer {
    pub(crate) fn of(pointer: sys::ucs_status_ptr_t) -> Self {
        match pointer as isize {
            0 => Answer::Done,
            code if (isize::from(sys::UCS_ERR_LAST)..0).contains(&code) => {
                Answer::Failed(Status(code as sys::ucs_status_t))
            }
            _ => Answer::Runs,
        }
    }
}

/// The end of a send, flush, get, put or close.
pub(crate) unsafe extern "C" fn on_sent(
    request: *mut c_void,
    status: sys::ucs_status_t,
    user_data: *mut c_void,
) {
    // SAFETY: UCX passes back what `param` was made with, once.
    unsafe { finish(request, status, user_data) }
}

/// The end of a rendezvous.
pub(crate) unsafe extern "C" fn on_received(
    request: *mut c_void,
    status: sys::ucs_status_t,
    _length: usize,
    user_data: *mut c_void,
) {
    // SAFETY: as above.
    unsafe { finish(request, status, user_data) }
}

/// # Safety
/// `user_data` is an `Op` that was given away to UCX with `Box::into_raw`, and is used here for the last time.
unsafe fn finish(request: *mut c_void, status: sys::ucs_status_t, user_data: *mut c_void) {
    // SAFETY: the caller's promise.
    let op = unsafe { Box::from_raw(user_data.cast::<Op>()) };
    let core = op.core;
    // SAFETY: the core outlives its worker's callbacks, and nobody holds a reference into it while UCX runs
    // (see `core`).
    let library = unsafe { (*core).library };
    if !request.is_null() {
        // SAFETY: ours to free, once; UCX allows it inside the callback.
        unsafe { library.ucp.ucp_request_free(request) };
    }
    // SAFETY: as above.
    unsafe { (*core).finished(op, Status(status)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_is_read_from_the_pointer() {
        let of = |code: isize| Answer::of(code as sys::ucs_status_ptr_t);
        assert!(matches!(of(0), Answer::Done));
        assert!(matches!(of(-25), Answer::Failed(Status::CONNECTION_RESET)));
        assert!(matches!(of(0x7f00_0000_1000), Answer::Runs));
    }
}
