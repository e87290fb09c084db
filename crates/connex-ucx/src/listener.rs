//! Waiting for connections.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::Arc;

use crate::addr::{self, RawAddr};
use crate::core::{self, Core};
use crate::endpoint::{self, Endpoint};
use crate::error::{Error, Result};
use crate::socket::Socket;
use crate::status::Status;
use crate::sys;
use crate::worker::{Dropped, Shared, Worker};

/// Names a listener within its worker. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ListenerId(pub(crate) u64);

/// Waits for connections; each comes as [`Event::ConnRequest`](crate::Event::ConnRequest).
///
/// Dropped, it stops listening in the next [`Worker::progress`]; the requests that it has reported can still be answered.
pub struct Listener {
    shared: Arc<Shared>,
    id: ListenerId,
    addr: SocketAddr,
    socket: Option<RawFd>,
}

impl Listener {
    /// Its name in requests.
    pub fn id(&self) -> ListenerId {
        self.id
    }

    /// UCX's listening socket, if it could be found: readable while a connection waits that UCX has not taken.
    pub fn socket(&self) -> Option<RawFd> {
        self.socket
    }

    /// Has UCX take no connections for a while (they wait in the kernel), or go on. False if that cannot be done.
    pub fn pause(&self, worker: &mut Worker, paused: bool) -> bool {
        if !Arc::ptr_eq(&self.shared, &worker.shared) {
            return false;
        }
        let slot = worker.core_mut().listeners.get(&self.id.0);
        slot.filter(|slot| !slot.closing)
            .and_then(|slot| slot.socket.as_ref())
            .is_some_and(|socket| socket.set_watched(!paused))
    }

    /// Where it listens: with the real port, if 0 was asked for.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener({})", self.addr)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.shared.dropped(Dropped::Listener(self.id));
    }
}

/// Somebody who wants to connect. Dropped, it is rejected.
pub struct ConnRequest {
    shared: Arc<Shared>,
    listener: ListenerId,
    raw: usize,
    from: Option<SocketAddr>,
    answered: bool,
}

impl ConnRequest {
    pub(crate) fn new(
        shared: Arc<Shared>,
        listener: ListenerId,
        raw: usize,
        from: Option<SocketAddr>,
    ) -> Self {
        Self {
            shared,
            listener,
            raw,
            from,
            answered: false,
        }
    }

    /// Whose it is.
    pub fn listener(&self) -> ListenerId {
        self.listener
    }

    /// The client's address, where UCX knows it.
    pub fn from(&self) -> Option<SocketAddr> {
        self.from
    }

    /// Takes the connection.
    ///
    /// # Errors
    /// UCX cannot make the endpoint; the request is used up all the same.
    pub fn accept(mut self, worker: &mut Worker) -> Result<Endpoint> {
        worker.owns(&self.shared, "ucp_ep_create", "connection request")?;
        self.answered = true;
        let peer = self
            .from
            .map_or_else(|| "an unknown address".to_owned(), |addr| addr.to_string());
        let result = endpoint::accept(worker, self.raw, peer);
        worker.core_mut().requests.remove(&self.raw);
        result
    }

    /// Refuses the connection; the client sees [`Status::REJECTED`].
    ///
    /// # Errors
    /// The request belongs to another worker.
    pub fn reject(mut self, worker: &mut Worker) -> Result<()> {
        worker.owns(&self.shared, "ucp_listener_reject", "connection request")?;
        self.answered = true;
        reject(worker, self.raw);
        Ok(())
    }
}

impl fmt::Debug for ConnRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnRequest({:?})", self.from)
    }
}

impl Drop for ConnRequest {
    fn drop(&mut self) {
        if !self.answered {
            self.shared.dropped(Dropped::Request(self.raw));
        }
    }
}

pub(crate) fn listen(worker: &mut Worker, at: SocketAddr) -> Result<Listener> {
    let raw_addr = RawAddr::new(at);
    let (id, ctx) = Core::reserve_listener(worker.core());
    // SAFETY: plain numbers and pointers, for which zero is valid.
    let mut params: sys::ucp_listener_params_t = unsafe { std::mem::zeroed() };
    params.field_mask = u64::from(
        sys::UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | sys::UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
    );
    params.sockaddr = raw_addr.view();
    params.conn_handler = sys::ucp_listener_conn_handler_t {
        cb: Some(core::on_conn_request),
        arg: ctx.cast(),
    };
    let mut handle = ptr::null_mut();
    // SAFETY: the worker is alive, and the mask says which fields are set.
    let status = unsafe {
        worker
            .ucp()
            .ucp_listener_create(worker.raw(), &params, &mut handle)
    };
    if let Err(status) = Status(status).check() {
        worker.core_mut().forget_listener(id);
        return Err(Error::about("ucp_listener_create", status, at.to_string()));
    }
    if let Some(slot) = worker.core_mut().listeners.get_mut(&id.0) {
        slot.handle = handle;
    }
    let mut listener = Listener {
        shared: Arc::clone(&worker.shared),
        id,
        addr: at,
        socket: None,
    };
    let mut attr = sys::ucp_listener_attr_t {
        field_mask: u64::from(sys::UCP_LISTENER_ATTR_FIELD_SOCKADDR),
        sockaddr: addr::empty(),
    };
    // SAFETY: the listener is alive.
    let status = unsafe { worker.ucp().ucp_listener_query(handle, &mut attr) };
    Status(status)
        .check()
        .map_err(|s| Error::about("ucp_listener_query", s, at.to_string()))?;
    if let Some(addr) = addr::from_storage(&attr.sockaddr) {
        listener.addr = addr;
    }
    let socket = Socket::find(listener.addr);
    listener.socket = socket.as_ref().map(Socket::fd);
    if let Some(slot) = worker.core_mut().listeners.get_mut(&id.0) {
        slot.socket = socket;
    }
    Ok(listener)
}

/// Stops a listener: its socket goes now, UCX's part with the worker (see `socket`).
pub(crate) fn close(worker: &mut Worker, id: ListenerId) {
    let Some(slot) = worker.core_mut().listeners.get_mut(&id.0) else {
        return;
    };
    if slot.closing {
        return;
    }
    slot.closing = true;
    match &mut slot.socket {
        Some(socket) => socket.close(),
        None => tracing::debug!(
            "UCX's listening socket was not found: it listens until its worker is dropped"
        ),
    }
}

/// Destroys a listener whose requests are answered; the worker is destroyed right after.
pub(crate) fn destroy(worker: &mut Worker, id: ListenerId) {
    let handle = worker
        .core_mut()
        .listeners
        .get(&id.0)
        .map(|slot| slot.handle);
    if let Some(handle) = handle {
        // SAFETY: alive until here, and destroyed once: it leaves the table.
        unsafe { worker.ucp().ucp_listener_destroy(handle) };
        worker.core_mut().forget_listener(id);
    }
}

/// Rejects a request that nobody has answered.
pub(crate) fn reject(worker: &mut Worker, request: usize) {
    let Some(id) = worker.core_mut().requests.remove(&request) else {
        return;
    };
    let handle = worker
        .core_mut()
        .listeners
        .get(&id.0)
        .map(|slot| slot.handle);
    if let Some(handle) = handle {
        // SAFETY: the request was not answered (it was in the table), and listeners live as long as their worker.
        let status = unsafe {
            worker
                .ucp()
                .ucp_listener_reject(handle, request as sys::ucp_conn_request_h)
        };
        if let Err(status) = Status(status).check() {
            tracing::debug!(%status, "a connection request could not be rejected");
        }
    }
}
