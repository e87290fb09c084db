//! A connection to a peer.

use std::ffi::CStr;
use std::fmt;
use std::net::SocketAddr;
use std::ptr;
use std::sync::Arc;

use crate::addr::{self, RawAddr};
use crate::core::{self, Core};
use crate::error::{Error, Result};
use crate::lanes;
use crate::memory::Memory;
use crate::printed::printed;
use crate::request::{self, Answer, Op, Posted};
use crate::rkey::RemoteKey;
use crate::status::Status;
use crate::sys;
use crate::worker::{Dropped, Shared, Worker};

/// Names an endpoint within its worker. Never reused (before 2^32 endpoints in one place).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct EpId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl EpId {
    pub(crate) const NONE: Self = Self {
        index: u32::MAX,
        generation: 0,
    };
}

/// How an endpoint is closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CloseMode {
    /// What was sent is delivered first, and the peer is asked to close too: a frozen one makes it wait.
    Flush,
    /// At once; operations under way end with an error, later, through [`Worker::progress`].
    Force,
}

/// How UCX is to move a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    /// Copied through UCX's buffers, in order with everything before it.
    Eager,
    /// The receiver fetches it when it has a place for it; it may be overtaken by later eager ones.
    Rendezvous,
}

/// One transport that an endpoint uses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lane {
    /// `tcp`, `sysv`, `rc_mlx5`.
    pub transport: String,
    /// `eth0`, `memory`, `mlx5_0:1`.
    pub device: String,
}

/// A connection to a peer, with peer error handling: a peer that dies is reported by
/// [`Event::Failed`](crate::Event::Failed).
///
/// Every call takes the worker it belongs to. Dropped, it is closed by force.
pub struct Endpoint {
    shared: Arc<Shared>,
    id: EpId,
}

impl Endpoint {
    /// Its name in events and messages.
    pub fn id(&self) -> EpId {
        self.id
    }

    /// Sends a message that owns its data.
    ///
    /// # Errors
    /// UCX refuses it, for instance because the connection is broken; a header that is too long.
    pub fn send(
        &self,
        worker: &mut Worker,
        id: u16,
        header: &[u8],
        data: Vec<u8>,
        protocol: Protocol,
        token: u64,
    ) -> Result<Posted> {
        let (handle, mut op) = self.begin(worker, "ucp_am_send_nbx", token)?;
        op.data = data;
        let (ptr, len) = (op.data.as_ptr(), op.data.len());
        // SAFETY: the operation owns the data until it ends.
        unsafe { self.post_message(worker, handle, op, id, header, ptr, len, protocol) }
    }

    /// Sends a message whose data lies elsewhere.
    ///
    /// # Safety
    /// `len` bytes at `data` must stay readable and unchanged until the operation has ended: it was `Done`,
    /// [`Event::Completed`](crate::Event::Completed) with `token` or [`Event::Closed`](crate::Event::Closed) of this endpoint
    /// has come, or the worker has been dropped.
    ///
    /// # Errors
    /// As for [`send`](Endpoint::send).
    #[allow(clippy::too_many_arguments, reason = "one call of UCX, spelt out")]
    pub unsafe fn send_from(
        &self,
        worker: &mut Worker,
        id: u16,
        header: &[u8],
        data: *const u8,
        len: usize,
        protocol: Protocol,
        token: u64,
    ) -> Result<Posted> {
        let (handle, op) = self.begin(worker, "ucp_am_send_nbx", token)?;
        // SAFETY: the caller's promise.
        unsafe { self.post_message(worker, handle, op, id, header, data, len, protocol) }
    }

    /// # Safety
    /// As for `send_from`.
    #[allow(clippy::too_many_arguments, reason = "one call of UCX, spelt out")]
    unsafe fn post_message(
        &self,
        worker: &mut Worker,
        handle: sys::ucp_ep_h,
        mut op: Box<Op>,
        id: u16,
        header: &[u8],
        data: *const u8,
        len: usize,
        protocol: Protocol,
    ) -> Result<Posted> {
        if header.len() > worker.max_header() {
            worker.core_mut().retract_op(op);
            let problem = format!(
                "a header of {} bytes, and UCX takes {}",
                header.len(),
                worker.max_header()
            );
            return Err(Error::Invalid {
                operation: "ucp_am_send_nbx",
                problem,
            });
        }
        op.header.clear();
        op.header.extend_from_slice(header);
        let header = op.header.as_ptr();
        let header_len = op.header.len();
        let flags = match protocol {
            Protocol::Eager => sys::UCP_AM_SEND_FLAG_EAGER,
            Protocol::Rendezvous => sys::UCP_AM_SEND_FLAG_RNDV,
        };
        // The reply flag makes the message carry the receiver's own endpoint: that is how it knows who sent it.
        let flags = flags | sys::UCP_AM_SEND_FLAG_REPLY;
        let ucp = worker.ucp();
        self.post(worker, op, "ucp_am_send_nbx", |mut param| {
            param.op_attr_mask |= sys::UCP_OP_ATTR_FIELD_FLAGS;
            param.flags = flags;
            // SAFETY: the endpoint is open; header and data live until the operation has ended.
            unsafe {
                ucp.ucp_am_send_nbx(
                    handle,
                    u32::from(id),
                    header.cast(),
                    header_len,
                    data.cast(),
                    len,
                    &param,
                )
            }
        })
    }

    /// Ends when everything posted before is complete: messages handed to the network, puts visible in the peer.
    ///
    /// # Errors
    /// UCX refuses it, for instance because the connection is broken.
    pub fn flush(&self, worker: &mut Worker, token: u64) -> Result<Posted> {
        let (handle, op) = self.begin(worker, "ucp_ep_flush_nbx", token)?;
        let ucp = worker.ucp();
        self.post(worker, op, "ucp_ep_flush_nbx", |param| {
            // SAFETY: the endpoint is open.
            unsafe { ucp.ucp_ep_flush_nbx(handle, &param) }
        })
    }

    /// Reads `len` bytes at `remote` in the peer. `local` says how the memory is registered, if it is.
    ///
    /// # Safety
    /// `len` bytes at `into` must stay writable, and nobody else may use them, until the operation has ended (see
    /// [`send_from`](Endpoint::send_from)). `local`, if given, must hold them and live as long, and so must `key`.
    ///
    /// # Errors
    /// UCX refuses it; a key of another endpoint; a context without one-sided access.
    #[allow(clippy::too_many_arguments, reason = "one call of UCX, spelt out")]
    pub unsafe fn get(
        &self,
        worker: &mut Worker,
        into: *mut u8,
        len: usize,
        local: Option<&Memory>,
        remote: u64,
        key: &RemoteKey,
        token: u64,
    ) -> Result<Posted> {
        let operation = "ucp_get_nbx";
        self.check_one_sided(worker, local, key, operation)?;
        let (handle, op) = self.begin(worker, operation, token)?;
        let ucp = worker.ucp();
        self.post(worker, op, operation, |mut param| {
            with_memory(&mut param, local);
            // SAFETY: the endpoint is open, the key is its own, the caller vouches for the memory.
            unsafe { ucp.ucp_get_nbx(handle, into.cast(), len, remote, key.raw(), &param) }
        })
    }

    /// Writes `len` bytes to `remote` in the peer. The end says that `from` is free; that they are in place is said by a later
    /// [`flush`](Endpoint::flush).
    ///
    /// # Safety
    /// `len` bytes at `from` must stay readable and unchanged until the operation has ended (see
    /// [`send_from`](Endpoint::send_from)). `local`, if given, must hold them and live as long, and so must `key`.
    ///
    /// # Errors
    /// As for [`get`](Endpoint::get).
    #[allow(clippy::too_many_arguments, reason = "one call of UCX, spelt out")]
    pub unsafe fn put(
        &self,
        worker: &mut Worker,
        from: *const u8,
        len: usize,
        local: Option<&Memory>,
        remote: u64,
        key: &RemoteKey,
        token: u64,
    ) -> Result<Posted> {
        let operation = "ucp_put_nbx";
        self.check_one_sided(worker, local, key, operation)?;
        let (handle, op) = self.begin(worker, operation, token)?;
        let ucp = worker.ucp();
        self.post(worker, op, operation, |mut param| {
            with_memory(&mut param, local);
            // SAFETY: the endpoint is open, the key is its own, the caller vouches for the memory.
            unsafe { ucp.ucp_put_nbx(handle, from.cast(), len, remote, key.raw(), &param) }
        })
    }

    fn check_one_sided(
        &self,
        worker: &Worker,
        local: Option<&Memory>,
        key: &RemoteKey,
        operation: &'static str,
    ) -> Result<()> {
        worker.owns(key.shared(), operation, "key")?;
        if key.ep() != self.id {
            return Err(Error::Foreign {
                operation,
                what: "key",
            });
        }
        if !worker.context().features().rma {
            return Err(Error::about(
                operation,
                Status::UNSUPPORTED,
                "the context has no one-sided access",
            ));
        }
        match local {
            Some(memory) if memory.context().raw() != worker.context().raw() => {
                Err(Error::Foreign {
                    operation,
                    what: "registered memory",
                })
            }
            _ => Ok(()),
        }
    }

    /// Closes it. [`Event::Closed`](crate::Event::Closed) follows, after everything of it has ended.
    ///
    /// # Errors
    /// It belongs to another worker.
    pub fn close(self, worker: &mut Worker, mode: CloseMode) -> Result<()> {
        worker.owns(&self.shared, "ucp_ep_close_nbx", "endpoint")?;
        close(worker, self.id, mode);
        // Dropping the handle finds nothing to close.
        Ok(())
    }

    /// Operations under way on it.
    pub fn outstanding(&self, worker: &mut Worker) -> usize {
        if !Arc::ptr_eq(&self.shared, &worker.shared) {
            return 0;
        }
        worker
            .core_mut()
            .ep(self.id)
            .map_or(0, |slot| slot.outstanding as usize)
    }

    /// The transports it uses, one for each of its lanes; complete once it is connected. Empty if UCX cannot tell. One without
    /// a device makes connections and carries no data.
    ///
    /// # Errors
    /// The endpoint is closed.
    pub fn lanes(&self, worker: &mut Worker) -> Result<Vec<Lane>> {
        match self.query_lanes(worker) {
            Ok(lanes) if !lanes.is_empty() => Ok(lanes),
            Err(e @ (Error::Closed { .. } | Error::Foreign { .. })) => Err(e),
            // Before 1.14 there is no such query, and what UCX prints for people has to do.
            _ => Ok(lanes::parse(&self.print(worker)?)),
        }
    }

    /// What UCX prints about it for people: its lanes, and on some versions which protocols it would use.
    ///
    /// # Errors
    /// The endpoint is closed.
    pub fn print(&self, worker: &mut Worker) -> Result<String> {
        let handle = self.handle(worker, "ucp_ep_print_info")?;
        // SAFETY: the endpoint and the stream are open.
        Ok(printed(|stream| unsafe {
            worker.ucp().ucp_ep_print_info(handle, stream)
        }))
    }

    fn query_lanes(&self, worker: &mut Worker) -> Result<Vec<Lane>> {
        const MAX: usize = 32;
        let handle = self.handle(worker, "ucp_ep_query")?;
        let mut entries = [sys::ucp_transport_entry_t {
            transport_name: ptr::null(),
            device_name: ptr::null(),
        }; MAX];
        let mut attr = ep_attr(sys::UCP_EP_ATTR_FIELD_TRANSPORTS);
        attr.transports = sys::ucp_transports_t {
            entries: entries.as_mut_ptr(),
            num_entries: MAX as u32,
            entry_size: size_of::<sys::ucp_transport_entry_t>(),
        };
        // SAFETY: the endpoint is open, and there is room for `num_entries`, of which UCX lowers the number.
        let status = unsafe { worker.ucp().ucp_ep_query(handle, &mut attr) };
        Status(status)
            .check()
            .map_err(|s| Error::ucx("ucp_ep_query", s))?;
        let text = |p: *const std::ffi::c_char| {
            if p.is_null() {
                return String::new();
            }
            // SAFETY: a C string that lives with the endpoint.
            unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned()
        };
        let count = (attr.transports.num_entries as usize).min(MAX);
        Ok(entries[..count]
            .iter()
            .filter(|e| !e.transport_name.is_null())
            .map(|e| Lane {
                transport: text(e.transport_name),
                device: text(e.device_name),
            })
            .collect())
    }

    /// Both ends' addresses, as far as UCX knows them (it does once connected).
    ///
    /// # Errors
    /// The endpoint is closed, or has no socket.
    pub fn addresses(
        &self,
        worker: &mut Worker,
    ) -> Result<(Option<SocketAddr>, Option<SocketAddr>)> {
        let handle = self.handle(worker, "ucp_ep_query")?;
        let mut attr =
            ep_attr(sys::UCP_EP_ATTR_FIELD_LOCAL_SOCKADDR | sys::UCP_EP_ATTR_FIELD_REMOTE_SOCKADDR);
        // SAFETY: the endpoint is open.
        let status = unsafe { worker.ucp().ucp_ep_query(handle, &mut attr) };
        Status(status)
            .check()
            .map_err(|s| Error::ucx("ucp_ep_query", s))?;
        Ok((
            addr::from_storage(&attr.local_sockaddr),
            addr::from_storage(&attr.remote_sockaddr),
        ))
    }

    pub(crate) fn handle(
        &self,
        worker: &mut Worker,
        operation: &'static str,
    ) -> Result<sys::ucp_ep_h> {
        worker.owns(&self.shared, operation, "endpoint")?;
        worker.core_mut().open_handle(self.id).ok_or(Error::Closed {
            operation,
            what: "endpoint",
        })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn begin(
        &self,
        worker: &mut Worker,
        operation: &'static str,
        token: u64,
    ) -> Result<(sys::ucp_ep_h, Box<Op>)> {
        let handle = self.handle(worker, operation)?;
        worker.core_mut().begin_op(self.id);
        Ok((handle, Core::take_op(worker.core(), self.id, token)))
    }

    /// Gives `op` to UCX through `call`, and takes it back if there will be no callback.
    fn post(
        &self,
        worker: &mut Worker,
        op: Box<Op>,
        operation: &'static str,
        call: impl FnOnce(sys::ucp_request_param_t) -> sys::ucs_status_ptr_t,
    ) -> Result<Posted> {
        let op = Box::into_raw(op);
        let callback = sys::ucp_request_param_t__bindgen_ty_1 {
            send: Some(request::on_sent),
        };
        let answer = Answer::of(call(request::param(op, callback)));
        if let Answer::Runs = answer {
            return Ok(Posted::Pending);
        }
        // SAFETY: UCX calls back only for what runs, so the operation is ours again.
        let op = unsafe { Box::from_raw(op) };
        worker.core_mut().retract_op(op);
        match answer {
            Answer::Failed(status) => {
                let peer = worker.core_mut().ep(self.id).map(|slot| slot.peer.clone());
                Err(Error::Ucx {
                    operation,
                    status,
                    peer,
                })
            }
            _ => Ok(Posted::Done),
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({}.{})", self.id.index, self.id.generation)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.shared.dropped(Dropped::Endpoint(self.id));
    }
}

fn with_memory(param: &mut sys::ucp_request_param_t, local: Option<&Memory>) {
    if let Some(memory) = local {
        // 1.13 ignores the field: UCX then finds the registration by itself.
        param.op_attr_mask |= sys::UCP_OP_ATTR_FIELD_MEMH;
        param.memh = memory.raw();
    }
}

fn ep_attr(fields: sys::ucp_ep_attr_field) -> sys::ucp_ep_attr_t {
    // SAFETY: plain numbers and pointers, for which zero is valid.
    let mut attr: sys::ucp_ep_attr_t = unsafe { std::mem::zeroed() };
    attr.field_mask = u64::from(fields);
    attr
}

/// Parameters of a new endpoint in peer error mode, and its reserved id.
fn prepare(worker: &mut Worker, peer: String) -> (EpId, sys::ucp_ep_params_t) {
    let (id, ctx) = Core::reserve_ep(worker.core(), peer);
    // SAFETY: plain numbers and pointers, for which zero is valid.
    let mut params: sys::ucp_ep_params_t = unsafe { std::mem::zeroed() };
    params.field_mask =
        u64::from(sys::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | sys::UCP_EP_PARAM_FIELD_ERR_HANDLER);
    params.err_mode = sys::UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler = sys::ucp_err_handler_t {
        cb: Some(core::on_error),
        arg: ctx.cast(),
    };
    (id, params)
}

fn create(
    worker: &mut Worker,
    id: EpId,
    params: &sys::ucp_ep_params_t,
    peer: String,
) -> Result<Endpoint> {
    let mut handle = ptr::null_mut();
    // SAFETY: the worker is alive, and the mask says which fields are set.
    let status = unsafe {
        worker
            .ucp()
            .ucp_ep_create(worker.raw(), params, &mut handle)
    };
    if let Err(status) = Status(status).check() {
        worker.core_mut().free_ep(id);
        return Err(Error::about("ucp_ep_create", status, peer));
    }
    worker.core_mut().bind_ep(id, handle);
    Ok(Endpoint {
        shared: Arc::clone(&worker.shared),
        id,
    })
}

pub(crate) fn connect(
    worker: &mut Worker,
    to: SocketAddr,
    from: Option<SocketAddr>,
) -> Result<Endpoint> {
    let (remote, local) = (RawAddr::new(to), from.map(RawAddr::new));
    let (id, mut params) = prepare(worker, to.to_string());
    params.field_mask |=
        u64::from(sys::UCP_EP_PARAM_FIELD_FLAGS | sys::UCP_EP_PARAM_FIELD_SOCK_ADDR);
    params.flags = sys::UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
    params.sockaddr = remote.view();
    if let Some(local) = &local {
        params.field_mask |= u64::from(sys::UCP_EP_PARAM_FIELD_LOCAL_SOCK_ADDR);
        params.local_sockaddr = local.view();
    }
    create(worker, id, &params, to.to_string())
}

/// Zeros behind a peer's address: a cut one ends in them, and not in memory of others.
const ADDRESS_MARGIN: usize = 4096;

/// Makes the endpoint to a worker by its address.
pub(crate) fn join(worker: &mut Worker, address: &[u8], peer: &str) -> Result<Endpoint> {
    let mut bytes = address.to_vec();
    bytes.resize(address.len() + ADDRESS_MARGIN, 0);
    let (id, mut params) = prepare(worker, peer.to_owned());
    params.field_mask |= u64::from(sys::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
    // Read before the call returns.
    params.address = bytes.as_ptr().cast();
    create(worker, id, &params, peer.to_owned())
}

/// Makes the endpoint for a connection request. UCX consumes the request, also when it fails.
pub(crate) fn accept(worker: &mut Worker, request: usize, peer: String) -> Result<Endpoint> {
    let (id, mut params) = prepare(worker, peer.clone());
    params.field_mask |= u64::from(sys::UCP_EP_PARAM_FIELD_CONN_REQUEST);
    params.conn_request = request as sys::ucp_conn_request_h;
    create(worker, id, &params, peer)
}

/// Starts to close an endpoint, unless that was done already.
pub(crate) fn close(worker: &mut Worker, ep: EpId, mode: CloseMode) {
    let Some(handle) = worker.core_mut().open_handle(ep) else {
        return;
    };
    let core = worker.core();
    let mut op = Core::take_op(core, ep, 0);
    op.is_close = true;
    worker.core_mut().begin_op(ep);
    worker.core_mut().begin_close(ep);
    let op = Box::into_raw(op);
    let callback = sys::ucp_request_param_t__bindgen_ty_1 {
        send: Some(request::on_sent),
    };
    let mut param = request::param(op, callback);
    if mode == CloseMode::Force {
        param.op_attr_mask |= sys::UCP_OP_ATTR_FIELD_FLAGS;
        param.flags = sys::UCP_EP_CLOSE_FLAG_FORCE;
    }
    // SAFETY: the endpoint is open and is closed once; the operation is UCX's until its callback.
    let answer = Answer::of(unsafe { worker.ucp().ucp_ep_close_nbx(handle, &param) });
    let result = match answer {
        Answer::Runs => return,
        Answer::Done => Ok(()),
        Answer::Failed(status) => Err(status),
    };
    // SAFETY: no callback comes in these cases.
    let op = unsafe { Box::from_raw(op) };
    worker.core_mut().retract_op(op);
    worker.core_mut().close_done(ep, result);
}
