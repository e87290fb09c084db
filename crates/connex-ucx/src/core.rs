//! What a worker's callbacks share with it.
//!
//! UCX calls back from inside many of its functions. So the rule for all of this crate: **no reference into a [`Core`]
//! is held while a function of UCX runs**; code copies the handle it needs out, calls, and borrows again. Callbacks
//! then may borrow the core themselves, briefly, and never across a call of user code.

use std::any::Any;
use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Weak;

use crate::addr;
use crate::endpoint::EpId;
use crate::event::{Event, Receiver};
use crate::library::Library;
use crate::listener::{ConnRequest, ListenerId};
use crate::request::{self, Answer, Op};
use crate::socket::Socket;
use crate::status::Status;
use crate::sys;
use crate::worker::Shared;

/// Finished operations that are kept for reuse, at most.
const SPARE_OPS: usize = 256;
/// Data buffers larger than this are not kept with them.
const SPARE_DATA: usize = 4096;

/// The state of one worker. Lives in a box of its own whose address UCX's callbacks know.
pub(crate) struct Core {
    pub(crate) library: &'static Library,
    pub(crate) worker: sys::ucp_worker_h,
    /// For the objects that events hand out.
    pub(crate) shared: Weak<Shared>,
    pub(crate) eps: Vec<EpSlot>,
    free_eps: Vec<u32>,
    by_handle: HashMap<usize, EpId>,
    pub(crate) listeners: HashMap<u64, ListenerSlot>,
    next_listener: u64,
    /// Connection requests that nobody has answered, with the listener they belong to.
    pub(crate) requests: HashMap<usize, ListenerId>,
    /// Keys that were unpacked and not destroyed.
    pub(crate) keys: HashSet<usize>,
    pub(crate) events: VecDeque<Event>,
    #[allow(clippy::vec_box, reason = "UCX is given the address of the box")]
    spare_ops: Vec<Box<Op>>,
    /// Operations under way, on all endpoints.
    pub(crate) outstanding: usize,
    /// The receiver of the `progress` that runs.
    pub(crate) receiver: Option<*mut dyn Receiver>,
}

/// One endpoint.
pub(crate) struct EpSlot {
    pub(crate) generation: u32,
    pub(crate) handle: sys::ucp_ep_h,
    /// What its error callback gets; freed with the slot.
    ctx: *mut EpCtx,
    pub(crate) outstanding: u32,
    pub(crate) failed: bool,
    /// `ucp_ep_close_nbx` was called: the handle is UCX's alone.
    pub(crate) closing: bool,
    closed: Option<Result<(), Status>>,
    pub(crate) peer: String,
}

/// The argument of an endpoint's error callback.
pub(crate) struct EpCtx {
    core: *mut Core,
    ep: EpId,
}

/// One listener.
pub(crate) struct ListenerSlot {
    pub(crate) handle: sys::ucp_listener_h,
    ctx: *mut ListenerCtx,
    /// Nobody is accepted any more.
    pub(crate) closing: bool,
    /// Its socket, if it was found.
    pub(crate) socket: Option<Socket>,
}

/// The argument of a listener's callback.
pub(crate) struct ListenerCtx {
    core: *mut Core,
    id: ListenerId,
}

impl Core {
    pub(crate) fn new(
        library: &'static Library,
        worker: sys::ucp_worker_h,
        shared: Weak<Shared>,
    ) -> Self {
        Self {
            library,
            worker,
            shared,
            eps: Vec::new(),
            free_eps: Vec::new(),
            by_handle: HashMap::new(),
            listeners: HashMap::new(),
            next_listener: 1,
            requests: HashMap::new(),
            keys: HashSet::new(),
            events: VecDeque::new(),
            spare_ops: Vec::new(),
            outstanding: 0,
            receiver: None,
        }
    }

    // --- endpoints ---

    /// Reserves a place for an endpoint that is about to be created; its id and its callback's argument.
    pub(crate) fn reserve_ep(this: *mut Core, peer: String) -> (EpId, *mut EpCtx) {
        // SAFETY: called outside of UCX, see the module.
        let core = unsafe { &mut *this };
        let index = core.free_eps.pop().unwrap_or_else(|| {
            core.eps.push(EpSlot {
                generation: 0,
                handle: std::ptr::null_mut(),
                ctx: std::ptr::null_mut(),
                outstanding: 0,
                failed: false,
                closing: false,
                closed: None,
                peer: String::new(),
            });
            (core.eps.len() - 1) as u32
        });
        let slot = &mut core.eps[index as usize];
        let ep = EpId {
            index,
            generation: slot.generation,
        };
        let ctx = Box::into_raw(Box::new(EpCtx { core: this, ep }));
        slot.ctx = ctx;
        slot.peer = peer;
        (ep, ctx)
    }

    pub(crate) fn bind_ep(&mut self, ep: EpId, handle: sys::ucp_ep_h) {
        self.eps[ep.index as usize].handle = handle;
        self.by_handle.insert(handle as usize, ep);
    }

    /// The slot of a live endpoint.
    pub(crate) fn ep(&mut self, ep: EpId) -> Option<&mut EpSlot> {
        self.eps
            .get_mut(ep.index as usize)
            .filter(|slot| slot.generation == ep.generation && !slot.ctx.is_null())
    }

    /// The handle of an endpoint that may still be used.
    pub(crate) fn open_handle(&mut self, ep: EpId) -> Option<sys::ucp_ep_h> {
        self.ep(ep)
            .filter(|slot| !slot.closing && !slot.handle.is_null())
            .map(|slot| slot.handle)
    }

    /// Forgets a reserved or closed endpoint. Its generation goes up, so that old ids find nothing.
    pub(crate) fn free_ep(&mut self, ep: EpId) {
        let Some(slot) = self.ep(ep) else { return };
        let (handle, ctx) = (slot.handle, slot.ctx);
        slot.generation = slot.generation.wrapping_add(1);
        slot.handle = std::ptr::null_mut();
        slot.ctx = std::ptr::null_mut();
        slot.outstanding = 0;
        slot.failed = false;
        slot.closing = false;
        slot.closed = None;
        slot.peer = String::new();
        if self.by_handle.get(&(handle as usize)) == Some(&ep) {
            self.by_handle.remove(&(handle as usize));
        }
        // SAFETY: made by `reserve_ep`; the endpoint is destroyed, so no callback can come any more.
        drop(unsafe { Box::from_raw(ctx) });
        self.free_eps.push(ep.index);
    }

    /// The endpoint is closing: no lookup by handle finds it, for UCX may give the handle to another one.
    pub(crate) fn begin_close(&mut self, ep: EpId) {
        let Some(slot) = self.ep(ep) else { return };
        slot.closing = true;
        let handle = slot.handle as usize;
        if self.by_handle.get(&handle) == Some(&ep) {
            self.by_handle.remove(&handle);
        }
    }

    pub(crate) fn close_done(&mut self, ep: EpId, result: Result<(), Status>) {
        if let Some(slot) = self.ep(ep) {
            slot.closed = Some(result);
        }
        self.reap_ep(ep);
    }

    /// Reports the end of an endpoint once its close and all of its operations are over.
    fn reap_ep(&mut self, ep: EpId) {
        let Some(slot) = self.ep(ep) else { return };
        if slot.outstanding > 0 {
            return;
        }
        if let Some(result) = slot.closed.take() {
            self.free_ep(ep);
            self.events.push_back(Event::Closed { ep, result });
        }
    }

    // --- operations ---

    pub(crate) fn take_op(this: *mut Core, ep: EpId, token: u64) -> Box<Op> {
        // SAFETY: called outside of UCX or from a callback, nobody else borrows the core.
        let core = unsafe { &mut *this };
        let mut op = core.spare_ops.pop().unwrap_or_else(|| Op::new(this));
        op.ep = ep;
        op.token = token;
        op.is_close = false;
        op
    }

    fn keep_op(&mut self, mut op: Box<Op>) {
        op.header.clear();
        op.data.clear();
        if op.data.capacity() > SPARE_DATA {
            op.data = Vec::new();
        }
        if self.spare_ops.len() < SPARE_OPS {
            self.spare_ops.push(op);
        }
    }

    /// Counts an operation before UCX is asked: its callback may come before the call returns.
    pub(crate) fn begin_op(&mut self, ep: EpId) {
        self.outstanding += 1;
        if let Some(slot) = self.ep(ep) {
            slot.outstanding += 1;
        }
    }

    /// An operation that ended without its callback.
    pub(crate) fn retract_op(&mut self, op: Box<Op>) {
        let ep = op.ep;
        self.end_op(ep);
        self.keep_op(op);
        self.reap_ep(ep);
    }

    fn end_op(&mut self, ep: EpId) {
        self.outstanding -= 1;
        if let Some(slot) = self.ep(ep) {
            slot.outstanding -= 1;
        }
    }

    /// From the callback of an operation.
    pub(crate) fn finished(&mut self, op: Box<Op>, status: Status) {
        let (ep, token, is_close) = (op.ep, op.token, op.is_close);
        self.end_op(ep);
        self.keep_op(op);
        if is_close {
            self.close_done(ep, status.check());
        } else {
            self.events.push_back(Event::Completed {
                ep,
                token,
                result: status.check(),
            });
            self.reap_ep(ep);
        }
    }

    // --- listeners ---

    pub(crate) fn reserve_listener(this: *mut Core) -> (ListenerId, *mut ListenerCtx) {
        // SAFETY: called outside of UCX, see the module.
        let core = unsafe { &mut *this };
        let id = ListenerId(core.next_listener);
        core.next_listener += 1;
        let ctx = Box::into_raw(Box::new(ListenerCtx { core: this, id }));
        core.listeners.insert(
            id.0,
            ListenerSlot {
                handle: std::ptr::null_mut(),
                ctx,
                closing: false,
                socket: None,
            },
        );
        (id, ctx)
    }

    pub(crate) fn forget_listener(&mut self, id: ListenerId) {
        if let Some(slot) = self.listeners.remove(&id.0) {
            // SAFETY: made by `reserve_listener`; the listener does not exist (any more), so no callback can come.
            drop(unsafe { Box::from_raw(slot.ctx) });
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        for slot in &self.eps {
            if !slot.ctx.is_null() {
                // SAFETY: made by `reserve_ep`; the worker is gone, so no callback can come.
                drop(unsafe { Box::from_raw(slot.ctx) });
            }
        }
        for slot in self.listeners.values() {
            // SAFETY: as above.
            drop(unsafe { Box::from_raw(slot.ctx) });
        }
    }
}

/// UCX: an endpoint broke.
pub(crate) unsafe extern "C" fn on_error(
    arg: *mut c_void,
    _ep: sys::ucp_ep_h,
    status: sys::ucs_status_t,
) {
    // SAFETY: `arg` is the context of an endpoint that is not destroyed yet.
    let (core, ep) = unsafe { ((*arg.cast::<EpCtx>()).core, (*arg.cast::<EpCtx>()).ep) };
    // SAFETY: see the module.
    let core = unsafe { &mut *core };
    if let Some(slot) = core.ep(ep)
        && !slot.failed
        && !slot.closing
    {
        slot.failed = true;
        core.events.push_back(Event::Failed {
            ep,
            status: Status(status),
        });
    }
}

/// UCX: somebody wants to connect.
pub(crate) unsafe extern "C" fn on_conn_request(
    request: sys::ucp_conn_request_h,
    arg: *mut c_void,
) {
    // SAFETY: `arg` is the context of a listener that is not destroyed yet.
    let (this, id) = unsafe {
        (
            (*arg.cast::<ListenerCtx>()).core,
            (*arg.cast::<ListenerCtx>()).id,
        )
    };
    // SAFETY: see the module.
    let library = unsafe { (*this).library };
    let mut attr = sys::ucp_conn_request_attr_t {
        field_mask: u64::from(sys::UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR),
        client_address: addr::empty(),
        client_id: 0,
    };
    // SAFETY: the request is alive, and the mask asks for one field.
    let status = unsafe { library.ucp.ucp_conn_request_query(request, &mut attr) };
    let from = (status == sys::UCS_OK)
        .then(|| addr::from_storage(&attr.client_address))
        .flatten();
    // SAFETY: see the module.
    let core = unsafe { &mut *this };
    let Some(shared) = core.shared.upgrade() else {
        return;
    };
    core.requests.insert(request as usize, id);
    core.events.push_back(Event::ConnRequest(ConnRequest::new(
        shared,
        id,
        request as usize,
        from,
    )));
}

/// UCX: a message, or the offer of one. `arg` is the `Route` of the message's id.
pub(crate) unsafe extern "C" fn on_message(
    arg: *mut c_void,
    header: *const c_void,
    header_len: usize,
    data: *mut c_void,
    len: usize,
    param: *const sys::ucp_am_recv_param_t,
) -> sys::ucs_status_t {
    // SAFETY: `arg` is a route that lives as long as the worker.
    let (this, id) = unsafe { ((*arg.cast::<Route>()).core, (*arg.cast::<Route>()).id) };
    // SAFETY: UCX passes valid parameters; `reply_ep` is read only where the mask says that it is set.
    let (attr, reply_ep) = unsafe { ((*param).recv_attr, (*param).reply_ep) };
    if attr & u64::from(sys::UCP_AM_RECV_ATTR_FIELD_REPLY_EP) == 0 {
        // Our own sends always name their endpoint: not one of ours.
        tracing::warn!(id, "a message without a sender was dropped");
        return sys::UCS_OK;
    }
    // SAFETY: see the module.
    let found = unsafe {
        (*this)
            .by_handle
            .get(&(reply_ep as usize))
            .copied()
            .zip((*this).receiver)
    };
    let Some((ep, receiver)) = found else {
        return sys::UCS_OK;
    };
    let bytes = |ptr: *const c_void, len: usize| {
        if len == 0 || ptr.is_null() {
            return &[][..];
        }
        // SAFETY: UCX passes `len` readable bytes, valid during the callback.
        unsafe { std::slice::from_raw_parts(ptr.cast::<u8>(), len) }
    };
    let header = bytes(header, header_len);
    if attr & u64::from(sys::UCP_AM_RECV_ATTR_FLAG_RNDV) == 0 {
        let payload = bytes(data, len);
        // SAFETY: `progress` put it there for the time of the call, exclusively; nothing else uses it meanwhile.
        let run = AssertUnwindSafe(|| unsafe { (*receiver).message(ep, id, header, payload) });
        if let Err(panic) = catch_unwind(run) {
            // SAFETY: see the module.
            unsafe { (*this).panicked(ep, &*panic) };
        }
        return sys::UCS_OK;
    }
    // SAFETY: as above.
    let run = AssertUnwindSafe(|| unsafe { (*receiver).rendezvous(ep, id, header, len) });
    match catch_unwind(run) {
        // SAFETY: inside the callback of the offer that `data` stands for; the landing's maker vouches for its memory.
        Ok(Some(landing)) if landing.len >= len => unsafe { receive(this, ep, data, len, landing) },
        Ok(_) => sys::UCS_ERR_REJECTED,
        Err(panic) => {
            // SAFETY: see the module.
            unsafe { (*this).panicked(ep, &*panic) };
            sys::UCS_ERR_REJECTED
        }
    }
}

/// What the callback of one kind of message gets.
pub(crate) struct Route {
    pub(crate) core: *mut Core,
    pub(crate) id: u16,
}

/// # Safety
/// Only from the callback that offers `desc`, with a landing of at least `len` bytes.
unsafe fn receive(
    this: *mut Core,
    ep: EpId,
    desc: *mut c_void,
    len: usize,
    landing: crate::event::Landing,
) -> sys::ucs_status_t {
    // SAFETY: see the module.
    let (library, worker) = unsafe { ((*this).library, (*this).worker) };
    let op = Box::into_raw(Core::take_op(this, ep, landing.token));
    // SAFETY: see the module.
    unsafe { (*this).begin_op(ep) };
    let callback = sys::ucp_request_param_t__bindgen_ty_1 {
        recv_am: Some(request::on_received),
    };
    let param = request::param(op, callback);
    // SAFETY: the caller's promise; `op` is UCX's until its callback or until it is taken back below.
    let answer = unsafe {
        library
            .ucp
            .ucp_am_recv_data_nbx(worker, desc, landing.ptr.cast(), len, &param)
    };
    let status = match Answer::of(answer) {
        Answer::Runs => return sys::UCS_INPROGRESS,
        Answer::Done => Status::OK,
        Answer::Failed(status) => status,
    };
    // SAFETY: there is no callback in these cases, so the operation is ours again.
    unsafe { (*this).finished(Box::from_raw(op), status) };
    sys::UCS_INPROGRESS
}

impl Core {
    fn panicked(&mut self, ep: EpId, panic: &(dyn Any + Send)) {
        let message = panic
            .downcast_ref::<&str>()
            .map(|s| (*s).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "a panic without a message".to_owned());
        self.events.push_back(Event::Panicked { ep, message });
    }
}
