//! A worker: the place where everything happens, driven by one thread at a time.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::context::Context;
use crate::core::{self, Core, Route};
use crate::endpoint::{self, EpId};
use crate::error::{Error, Result};
use crate::event::{Event, Receiver};
use crate::listener::{self, ListenerId};
use crate::lock::lock;
use crate::rkey;
use crate::status::Status;
use crate::sys;

/// How long a dropped worker waits for its closes and operations before it goes all the same.
const DROP_TIME: Duration = Duration::from_millis(500);

/// Drives communication. Belongs to one thread at a time, may move between them.
pub struct Worker {
    pub(crate) shared: Arc<Shared>,
    raw: NonNull<sys::ucp_worker>,
    core: NonNull<Core>,
    routes: Vec<NonNull<Route>>,
    max_header: usize,
    /// Not `Sync`: UCX's worker is "serialized", one thread at a time.
    _not_sync: PhantomData<Cell<()>>,
}

// SAFETY: the worker is created with UCS_THREAD_MODE_SERIALIZED, so threads may take turns; the core and the
// routes are reached only through it.
unsafe impl Send for Worker {}

/// What a worker's handles hold: the context, and a box for whatever was dropped on another thread.
pub(crate) struct Shared {
    pub(crate) context: Context,
    dropped: Mutex<Vec<Dropped>>,
    any_dropped: AtomicBool,
    /// The worker is gone; nothing that is dropped from now on needs closing.
    gone: AtomicBool,
}

/// A handle that was dropped; the worker closes what it stood for.
pub(crate) enum Dropped {
    Endpoint(EpId),
    Listener(ListenerId),
    Request(usize),
    Key(usize),
}

impl Shared {
    pub(crate) fn dropped(&self, what: Dropped) {
        // In a child nobody closes anything, and a thread of the parent may have held the lock.
        if self.gone.load(Ordering::Acquire) || self.context.library().in_forked_child() {
            return;
        }
        lock(&self.dropped).push(what);
        self.any_dropped.store(true, Ordering::Release);
    }
}

impl Worker {
    /// Makes a worker in `context`.
    ///
    /// # Errors
    /// No descriptor or memory left; a transport that cannot sleep on a descriptor.
    pub fn new(context: &Context) -> Result<Self> {
        let library = context.library();
        // SAFETY: plain numbers and pointers, for which zero is valid.
        let mut params: sys::ucp_worker_params_t = unsafe { std::mem::zeroed() };
        params.field_mask = u64::from(sys::UCP_WORKER_PARAM_FIELD_THREAD_MODE);
        params.thread_mode = sys::UCS_THREAD_MODE_SERIALIZED;
        let mut raw = ptr::null_mut();
        // SAFETY: the context is alive, and the mask says which fields are set.
        let status = unsafe {
            library
                .ucp
                .ucp_worker_create(context.raw(), &params, &mut raw)
        };
        Status(status)
            .check()
            .map_err(|s| Error::ucx("ucp_worker_create", s))?;
        let raw = NonNull::new(raw).ok_or(Error::ucx("ucp_worker_create", Status::NO_MEMORY))?;
        let shared = Arc::new(Shared {
            context: context.clone(),
            dropped: Mutex::new(Vec::new()),
            any_dropped: AtomicBool::new(false),
            gone: AtomicBool::new(false),
        });
        let core = Box::new(Core::new(library, raw.as_ptr(), Arc::downgrade(&shared)));
        // SAFETY: a box is never null.
        let core = unsafe { NonNull::new_unchecked(Box::into_raw(core)) };
        let mut worker = Self {
            shared,
            raw,
            core,
            routes: Vec::new(),
            max_header: 0,
            _not_sync: PhantomData,
        };
        let attr = worker.query(sys::UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER)?;
        worker.max_header = attr.max_am_header;
        Ok(worker)
    }

    /// Asks UCX for one field of the worker's attributes.
    fn query(&self, field: sys::ucp_worker_attr_field) -> Result<sys::ucp_worker_attr_t> {
        // SAFETY: zero is valid, and the mask asks for one field.
        let mut attr: sys::ucp_worker_attr_t = unsafe { std::mem::zeroed() };
        attr.field_mask = u64::from(field);
        // SAFETY: the worker is alive.
        let status = unsafe { self.ucp().ucp_worker_query(self.raw(), &mut attr) };
        Status(status)
            .check()
            .map_err(|s| Error::ucx("ucp_worker_query", s))?;
        Ok(attr)
    }

    /// The context it belongs to.
    pub fn context(&self) -> &Context {
        &self.shared.context
    }

    /// The longest header of a message, in bytes.
    pub fn max_header(&self) -> usize {
        self.max_header
    }

    /// Takes messages of kind `id` from now on; they go to the [`Receiver`] of [`Worker::progress`]. Messages of
    /// a kind that nobody takes are dropped by UCX with a warning.
    ///
    /// # Errors
    /// No memory.
    pub fn accept_messages(&mut self, id: u16) -> Result<()> {
        let route = Box::new(Route {
            core: self.core.as_ptr(),
            id,
        });
        // SAFETY: a box is never null.
        let route = unsafe { NonNull::new_unchecked(Box::into_raw(route)) };
        self.routes.push(route);
        let param = sys::ucp_am_handler_param_t {
            field_mask: u64::from(
                sys::UCP_AM_HANDLER_PARAM_FIELD_ID
                    | sys::UCP_AM_HANDLER_PARAM_FIELD_FLAGS
                    | sys::UCP_AM_HANDLER_PARAM_FIELD_CB
                    | sys::UCP_AM_HANDLER_PARAM_FIELD_ARG,
            ),
            id: u32::from(id),
            // One callback for one message, however many fragments it came in: without it a receiver would have to
            // tell first fragments from later ones, which UCX's interface hardly allows.
            flags: sys::UCP_AM_FLAG_WHOLE_MSG,
            cb: Some(core::on_message),
            arg: route.as_ptr().cast(),
        };
        // SAFETY: the worker is alive, and the route lives as long as it.
        let status = unsafe {
            self.ucp()
                .ucp_worker_set_am_recv_handler(self.raw(), &param)
        };
        Status(status)
            .check()
            .map_err(|s| Error::ucx("ucp_worker_set_am_recv_handler", s))
    }

    /// Does what can be done without waiting: takes messages to `receiver`, collects [`Event`]s, and closes what the
    /// dropped handles stood for. Returns UCX's count of what was done; 0 means nothing.
    pub fn progress(&mut self, receiver: &mut dyn Receiver) -> usize {
        let buried = self.bury();
        let core = self.core.as_ptr();
        // Only for the time of this call; the lifetime is erased because the core cannot name it.
        let receiver: *mut (dyn Receiver + '_) = receiver;
        // SAFETY: the same fat pointer; it is taken away below before the receiver's borrow ends.
        let receiver = unsafe {
            std::mem::transmute::<*mut (dyn Receiver + '_), *mut (dyn Receiver + 'static)>(receiver)
        };
        // SAFETY: no UCX function runs, so nobody else borrows the core.
        unsafe { (*core).receiver = Some(receiver) };
        // SAFETY: the worker is alive, and this is the only thread that uses it.
        let done = unsafe { self.ucp().ucp_worker_progress(self.raw()) };
        // SAFETY: as above.
        unsafe { (*core).receiver = None };
        done as usize + buried
    }

    /// The oldest event that has not been taken.
    pub fn next_event(&mut self) -> Option<Event> {
        self.core_mut().events.pop_front()
    }

    /// Readable when [`progress`](Worker::progress) has something to do, after [`arm`](Worker::arm) said true.
    ///
    /// # Errors
    /// A transport that cannot sleep on a descriptor.
    pub fn event_fd(&self) -> Result<RawFd> {
        let mut fd = -1;
        // SAFETY: the worker is alive; `fd` receives the result, which stays UCX's.
        let status = unsafe { self.ucp().ucp_worker_get_efd(self.raw(), &mut fd) };
        Status(status)
            .check()
            .map_err(|s| Error::ucx("ucp_worker_get_efd", s))?;
        Ok(fd)
    }

    /// Prepares to sleep on the descriptor. False: there is something to do already, do not sleep.
    ///
    /// # Errors
    /// UCX's own failure to arm a transport.
    pub fn arm(&mut self) -> Result<bool> {
        if self.shared.any_dropped.load(Ordering::Acquire) || !self.core_mut().events.is_empty() {
            return Ok(false);
        }
        // SAFETY: the worker is alive, and this is the only thread that uses it.
        match Status(unsafe { self.ucp().ucp_worker_arm(self.raw()) }) {
            Status::OK => Ok(true),
            Status::BUSY => Ok(false),
            status => Err(Error::ucx("ucp_worker_arm", status)),
        }
    }

    /// Orders the one-sided operations posted from now on, on every endpoint, after those posted before.
    ///
    /// **It may block**: from 1.17 on UCX waits in here until the peers have answered, if it finds that the transports
    /// in use need that, unless the context was made with `FENCE_MODE=weak`. A [`flush`](crate::Endpoint::flush) before what
    /// comes later does the same without blocking.
    ///
    /// # Errors
    /// UCX's own.
    pub fn fence(&mut self) -> Result<()> {
        // SAFETY: the worker is alive, and this is the only thread that uses it.
        let status = unsafe { self.ucp().ucp_worker_fence(self.raw()) };
        Status(status)
            .check()
            .map_err(|s| Error::ucx("ucp_worker_fence", s))
    }

    /// How many operations run, closes included, on all endpoints.
    pub fn outstanding(&mut self) -> usize {
        self.core_mut().outstanding
    }

    /// Starts to listen; see [`Listener`](crate::Listener).
    ///
    /// # Errors
    /// [`Status::BUSY`] for a port in use, [`Status::INVALID_ADDR`] for an address that is not the host's.
    pub fn listen(&mut self, addr: SocketAddr) -> Result<crate::Listener> {
        listener::listen(self, addr)
    }

    /// Starts to connect; see [`Endpoint`](crate::Endpoint). With `from` the local address is chosen, where the UCX version
    /// can do that. The first message that comes, or [`Event::Failed`], tells how it went.
    ///
    /// # Errors
    /// An address that no device of the context can reach.
    pub fn connect(&mut self, to: SocketAddr, from: Option<SocketAddr>) -> Result<crate::Endpoint> {
        endpoint::connect(self, to, from)
    }

    /// Where other workers reach this one without a listener: bytes to be handed to their [`Worker::join`].
    ///
    /// # Errors
    /// No memory.
    pub fn address(&self) -> Result<Vec<u8>> {
        let attr = self.query(sys::UCP_WORKER_ATTR_FIELD_ADDRESS)?;
        // SAFETY: UCX gives that many bytes, which are ours until they are released.
        let bytes = unsafe {
            std::slice::from_raw_parts(attr.address.cast::<u8>(), attr.address_length).to_vec()
        };
        // SAFETY: given by the query above, and released once.
        unsafe {
            self.ucp()
                .ucp_worker_release_address(self.raw(), attr.address)
        };
        Ok(bytes)
    }

    /// Makes an endpoint to the worker with this [`address`](Worker::address); both sides do, and use it at once. `peer` names it in errors.
    ///
    /// UCX reads the bytes without knowing how many there are: they must come from somebody who is trusted as far as
    /// whoever reaches UCX's own ports.
    ///
    /// # Errors
    /// No transport of this worker's context reaches the other one.
    pub fn join(&mut self, address: &[u8], peer: &str) -> Result<crate::Endpoint> {
        endpoint::join(self, address, peer)
    }

    pub(crate) fn ucp(&self) -> &'static sys::Ucp {
        &self.shared.context.library().ucp
    }

    pub(crate) fn raw(&self) -> sys::ucp_worker_h {
        self.raw.as_ptr()
    }

    pub(crate) fn core(&self) -> *mut Core {
        self.core.as_ptr()
    }

    /// For short uses that call nothing of UCX.
    pub(crate) fn core_mut(&mut self) -> &mut Core {
        // SAFETY: `&mut self` means that no function of UCX runs for this worker, so nobody borrows the core.
        unsafe { self.core.as_mut() }
    }

    /// Fails unless `shared` is this worker's.
    pub(crate) fn owns(
        &self,
        shared: &Arc<Shared>,
        operation: &'static str,
        what: &'static str,
    ) -> Result<()> {
        if Arc::ptr_eq(&self.shared, shared) {
            Ok(())
        } else {
            Err(Error::Foreign { operation, what })
        }
    }

    /// Closes what dropped handles stood for.
    fn bury(&mut self) -> usize {
        if !self.shared.any_dropped.swap(false, Ordering::AcqRel) {
            return 0;
        }
        let dropped = std::mem::take(&mut *lock(&self.shared.dropped));
        let count = dropped.len();
        for what in dropped {
            match what {
                Dropped::Endpoint(ep) => endpoint::close(self, ep, crate::CloseMode::Force),
                Dropped::Listener(id) => listener::close(self, id),
                Dropped::Request(request) => listener::reject(self, request),
                Dropped::Key(key) => rkey::destroy(self, key),
            }
        }
        count
    }

    /// Ends everything that was started, for a bounded time. False: UCX still holds connections that would crash it if the
    /// worker were destroyed.
    fn wind_down(&mut self) -> bool {
        self.bury();
        let keys: Vec<_> = self.core_mut().keys.iter().copied().collect();
        keys.into_iter().for_each(|key| rkey::destroy(self, key));
        let requests: Vec<_> = self.core_mut().requests.keys().copied().collect();
        requests
            .into_iter()
            .for_each(|request| listener::reject(self, request));
        let listeners: Vec<_> = self.core_mut().listeners.keys().copied().collect();
        listeners
            .into_iter()
            .for_each(|id| listener::close(self, ListenerId(id)));
        let eps: Vec<_> = (0u32..)
            .zip(&self.core_mut().eps)
            .map(|(index, slot)| EpId {
                index,
                generation: slot.generation,
            })
            .collect();
        eps.into_iter()
            .for_each(|ep| endpoint::close(self, ep, crate::CloseMode::Force));
        let until = Instant::now() + DROP_TIME;
        while self.core_mut().outstanding > 0 && Instant::now() < until {
            if self.progress(&mut Nobody) == 0 {
                std::thread::yield_now();
            }
        }
        // A forced close may return at once and still have to take the connection down: a few more rounds.
        for _ in 0..32 {
            if self.progress(&mut Nobody) == 0 {
                break;
            }
        }
        let quiet = self.end_accepted();
        let left = self.core_mut().outstanding;
        if left > 0 {
            tracing::warn!(
                left,
                "a worker was dropped while operations were still running"
            );
        }
        quiet
    }

    /// Ends the connections that were accepted and never became endpoints: inside UCX they point to their listener until UCX's
    /// thread has seen their end. Then the listeners go. False if that takes too long, and they stay.
    fn end_accepted(&mut self) -> bool {
        if self.core_mut().listeners.is_empty() {
            return true;
        }
        let until = Instant::now() + DROP_TIME;
        let mut quiet = 0;
        loop {
            self.progress(&mut Nobody);
            // Requests among them are rejected in the next round.
            self.core_mut().events.clear();
            let slots = self.core_mut().listeners.values();
            let sockets = slots.filter_map(|slot| slot.socket.as_ref());
            let left = sockets.filter(|socket| !socket.end_accepted()).count();
            quiet = if left == 0 { quiet + 1 } else { 0 };
            // UCX's thread may be about to show one that it accepted just before.
            if quiet == 2 {
                break;
            }
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let listeners: Vec<_> = self.core_mut().listeners.keys().copied().collect();
        for id in listeners {
            listener::destroy(self, ListenerId(id));
        }
        true
    }
}

/// Takes messages of a worker that ends.
struct Nobody;

impl Receiver for Nobody {
    fn message(&mut self, _: EpId, _: u16, _: &[u8], _: &[u8]) {}
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Worker({:p})", self.raw)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.shared.context.library().in_forked_child() {
            // Nothing of UCX works here: leave everything as it lies.
            return;
        }
        let quiet = self.wind_down();
        self.shared.gone.store(true, Ordering::Release);
        if !quiet {
            tracing::warn!(
                "UCX does not let go of connections that were begun: this worker is kept, for destroying it would crash the process"
            );
            // With its context.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        // Events hold handles, whose drop needs nothing any more.
        self.core_mut().events.clear();
        // SAFETY: nobody else uses the worker (`&mut self`), and it goes once. Callbacks that come in here find the core.
        unsafe { self.ucp().ucp_worker_destroy(self.raw()) };
        // SAFETY: made in `new` and in `accept_messages`; with the worker gone no callback can come.
        unsafe {
            drop(Box::from_raw(self.core.as_ptr()));
            for route in self.routes.drain(..) {
                drop(Box::from_raw(route.as_ptr()));
            }
        }
    }
}
