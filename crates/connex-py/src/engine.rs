//! `connex_rs.Engine`.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use connex_rs::{ChannelConfig, Config, Error, ErrorKind, Recipient, TransportChoice, device};
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString, PyTuple};

use crate::args::{self, Order};
use crate::channel;
use crate::convert;
use crate::errors::{check_process, exception, made};
use crate::exit;
use crate::transfer::{self, Transfer};
use crate::waiting::{SLICE, detached, in_slices};

const DONE: i32 = 0;
const INVALID: i32 = -4;

/// A running engine. Every method may be called from any thread at any time; whatever can wait releases the
/// interpreter lock.
///
/// Addresses are plain integers. Memory that is registered or being transferred must stay valid until it has been
/// unregistered or the transfer has ended.
///
/// The synchronous calls return a code: 0 done, -1 another error of the transport, -2 the peer failed, -3 timed out
/// (the connection has been closed), -4 invalid, -5 canceled.
#[pyclass(frozen, module = "connex_rs")]
pub(crate) struct Engine {
    inner: Arc<connex_rs::Engine>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !self.inner.is_closed() {
            // Closing can take a second. Without an interpreter the exit hook has closed it.
            let _ = Python::try_attach(|py| detached(py, || self.inner.close()));
        }
    }
}

/// The code of a refused argument of a synchronous call; other exceptions (an interrupt, no memory) pass.
fn code_of_refusal(py: Python<'_>, error: PyErr) -> PyResult<i32> {
    let error = made(py, error);
    if error.is_instance_of::<pyo3::exceptions::PyException>(py)
        && !error.is_instance_of::<PyMemoryError>(py)
    {
        Ok(INVALID)
    } else {
        Err(error)
    }
}

fn code<T>(result: Result<T, Error>) -> i32 {
    result.map_or_else(|error| error.code(), |_| DONE)
}

impl Engine {
    fn check_process(&self) -> PyResult<()> {
        check_process(&self.inner)
    }

    /// A finished synchronous transfer, or one that still has to be waited for, as a code.
    fn finish(py: Python<'_>, started: Result<connex_rs::Transfer, Error>) -> PyResult<i32> {
        match started {
            Ok(transfer) => match transfer::wait(py, &transfer, None)? {
                Some(result) => Ok(code(result)),
                None => Err(PyRuntimeError::new_err("a wait without end has ended")),
            },
            Err(error) => Ok(error.code()),
        }
    }

    /// Starts an asynchronous operation.
    fn start(
        &self,
        py: Python<'_>,
        start: impl FnOnce(&connex_rs::Engine) -> Result<connex_rs::Transfer, Error> + Send,
    ) -> PyResult<Transfer> {
        detached(py, || start(&self.inner))
            .map(Transfer::new)
            .map_err(|error| exception(py, &error))
    }
}

/// Starts an engine on a thread of its own, so that Ctrl-C works while a name is looked up or a port is waited for. An
/// engine that comes up after an interrupt is closed again.
fn start_engine(py: Python<'_>, config: Config) -> PyResult<connex_rs::Engine> {
    let (sender, receiver) = mpsc::channel();
    std::thread::Builder::new()
        .name("connex-start".into())
        .spawn(move || {
            let _ = sender.send(config.with_environment().and_then(connex_rs::Engine::start));
        })
        .map_err(|e| PyRuntimeError::new_err(format!("cannot start a thread: {e}")))?;
    // A receiver may not be shared between threads, but it may be lent to the one that is us.
    let receiver = std::sync::Mutex::new(receiver);
    let started = in_slices(py, None, |slice| {
        let receiver = receiver
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        match receiver.recv_timeout(slice) {
            Ok(started) => Some(started),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Err(Error::new(
                ErrorKind::Transport,
                "the start of the engine panicked",
            ))),
        }
    })?;
    match started {
        Some(Ok(engine)) => Ok(engine),
        Some(Err(error)) => Err(exception(py, &error)),
        None => Err(PyRuntimeError::new_err("a wait without end has ended")),
    }
}

#[pymethods]
impl Engine {
    /// Starts an engine that listens on `listen_ip`:`port` (0: any port).
    ///
    /// The environment fills in what is left at its default: `CONNEX_RS_TRANSPORT`, `CONNEX_RS_SECRET_FILE`,
    /// `CONNEX_RS_TLS_CERT`, `_KEY` and `_CA`, `CONNEX_RS_SENTINEL`.
    /// Raises ValueError for arguments that cannot be, RuntimeError if the address cannot be bound.
    #[new]
    #[pyo3(signature = (model, stage, shard=None, replica=None, listen_ip=None, port=None, advertise_ip=None,
        heartbeat_ms=None, heartbeat_timeout_ms=None, spin_us=None, transport=None, sentinel=true, secret=None,
        tls=None, stall_ms=None, allow_staging=true),
        text_signature = "(model, stage, shard=0, replica=0, listen_ip=\"0.0.0.0\", port=0, advertise_ip=None, \
        heartbeat_ms=0, heartbeat_timeout_ms=None, spin_us=500, transport=\"auto\", sentinel=True, secret=None, \
        tls=None, stall_ms=None, allow_staging=True)")]
    #[expect(clippy::too_many_arguments, reason = "the Python signature")]
    fn new(
        py: Python<'_>,
        model: &Bound<'_, PyAny>,
        stage: &Bound<'_, PyAny>,
        shard: Option<&Bound<'_, PyAny>>,
        replica: Option<&Bound<'_, PyAny>>,
        listen_ip: Option<&Bound<'_, PyAny>>,
        port: Option<&Bound<'_, PyAny>>,
        advertise_ip: Option<&Bound<'_, PyAny>>,
        heartbeat_ms: Option<&Bound<'_, PyAny>>,
        heartbeat_timeout_ms: Option<&Bound<'_, PyAny>>,
        spin_us: Option<&Bound<'_, PyAny>>,
        transport: Option<&Bound<'_, PyAny>>,
        sentinel: bool,
        secret: Option<&Bound<'_, PyAny>>,
        tls: Option<&Bound<'_, PyAny>>,
        stall_ms: Option<&Bound<'_, PyAny>>,
        allow_staging: bool,
    ) -> PyResult<Self> {
        let optional = |value: Option<&Bound<'_, PyAny>>, name| {
            value.map_or(Ok(0), |value| args::number(value, name))
        };
        let id = args::logical_id(
            &args::text(model, "model")?,
            [
                args::number(stage, "stage")?,
                optional(shard, "shard")?,
                optional(replica, "replica")?,
            ],
        )?;
        let mut config = Config::new(id);
        if let Some(listen_ip) = listen_ip {
            config.listen_ip = args::text(listen_ip, "listen_ip")?.into_owned();
        }
        if let Some(port) = port {
            config.port = args::integer(port, "port", u16::MAX.into())? as u16;
        }
        if let Some(advertise_ip) = advertise_ip {
            config.advertise_ip = Some(args::text(advertise_ip, "advertise_ip")?.into_owned());
        }
        config.heartbeat =
            args::timeout(heartbeat_ms, "heartbeat_ms")?.filter(|interval| !interval.is_zero());
        config.heartbeat_timeout = args::timeout(heartbeat_timeout_ms, "heartbeat_timeout_ms")?;
        if let Some(spin_us) = spin_us {
            config.spin = Duration::from_micros(args::integer(spin_us, "spin_us", 1_000_000)?);
        }
        if let Some(transport) = transport {
            config.transport = TransportChoice::parse(&args::text(transport, "transport")?)
                .map_err(|error| exception(py, &error))?;
        }
        config.secret = secret.map(args::secret).transpose()?;
        config.allow_staging = allow_staging;
        config.sentinel = sentinel;
        config.tls = tls.map(args::tls_files).transpose()?;
        config.stall = args::timeout(stall_ms, "stall_ms")?.filter(|stall| !stall.is_zero());
        let inner = Arc::new(start_engine(py, config)?);
        exit::remember(&inner);
        Ok(Self { inner })
    }

    /// The URL that peers dial: `ip:port#model|stage|shard|replica`.
    #[getter]
    fn local_url(&self) -> &str {
        self.inner.local_url()
    }

    /// Who the engine is: `(model, stage, shard, replica)`.
    #[getter]
    fn id<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        convert::id_tuple(py, self.inner.id())
    }

    /// The port that it listens on.
    #[getter]
    fn port(&self) -> u16 {
        self.inner.port()
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    // ---- memory -------------------------------------------------------------------------------

    /// Makes `length` bytes at `ptr` a region that peers may read and write. Returns a code.
    fn register_memory(
        &self,
        py: Python<'_>,
        ptr: &Bound<'_, PyAny>,
        length: &Bound<'_, PyAny>,
    ) -> PyResult<i32> {
        self.check_process()?;
        let (ptr, length) = match (args::word(ptr, "ptr"), args::word(length, "length")) {
            (Ok(ptr), Ok(length)) => (ptr, length),
            (Err(error), _) | (_, Err(error)) => return code_of_refusal(py, error),
        };
        // SAFETY: the caller's promise, which the class documents.
        let result = detached(py, || unsafe { self.inner.register_memory(ptr, length) });
        Ok(code(result))
    }

    /// Takes back the region that was registered at `ptr`, once no transfer uses it any more (bounded: users get a
    /// second). Returns a code; 0 after `close`.
    fn unregister_memory(&self, py: Python<'_>, ptr: &Bound<'_, PyAny>) -> PyResult<i32> {
        self.check_process()?;
        match args::word(ptr, "ptr") {
            Ok(ptr) => Ok(code(detached(py, || self.inner.unregister_memory(ptr)))),
            Err(error) => code_of_refusal(py, error),
        }
    }

    /// Allocates `size` bytes of page-aligned, zeroed host memory, registered while it lives; returns its address.
    ///
    /// Raises MemoryError, ValueError for a size that cannot be, or RuntimeError after `close`.
    fn allocate_managed_buffer(&self, py: Python<'_>, size: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.check_process()?;
        let size = args::word(size, "size")?;
        detached(py, || self.inner.allocate_managed_buffer(size)).map_err(|error| {
            match error.kind() {
                ErrorKind::Transport => PyMemoryError::new_err(error.to_string()),
                ErrorKind::Canceled => exception(py, &error),
                // Not a ValueError: callers handle what SPEC names.
                _ => PyRuntimeError::new_err(error.to_string()),
            }
        })
    }

    /// Frees a managed buffer; transfers under way keep its pages until they end. Returns a code; 0 after `close`.
    #[pyo3(signature = (ptr, size=None), text_signature = "($self, ptr, size=0)")]
    fn free_managed_buffer(
        &self,
        py: Python<'_>,
        ptr: &Bound<'_, PyAny>,
        size: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<i32> {
        self.check_process()?;
        // The size is known; callers that pass it are used to other engines.
        let _ = size;
        match args::word(ptr, "ptr") {
            Ok(ptr) => Ok(code(detached(py, || self.inner.free_managed_buffer(ptr)))),
            Err(error) => code_of_refusal(py, error),
        }
    }

    /// Copies the first `length` bytes of the bytes-like `data` to host memory at `ptr`. Returns a code.
    fn write_bytes_to_buffer(
        &self,
        py: Python<'_>,
        ptr: &Bound<'_, PyAny>,
        data: &Bound<'_, PyAny>,
        length: &Bound<'_, PyAny>,
    ) -> PyResult<i32> {
        let parsed = args::word(ptr, "ptr").and_then(|ptr| {
            Ok((
                ptr,
                args::bytes(data, "data")?,
                args::word(length, "length")?,
            ))
        });
        let (ptr, data, length) = match parsed {
            Ok(parsed) => parsed,
            Err(error) => return code_of_refusal(py, error),
        };
        let Some(source) = data.as_bytes().get(..length) else {
            return Ok(INVALID);
        };
        if length == 0 {
            return Ok(DONE);
        }
        if ptr == 0 || ptr.checked_add(length).is_none() {
            return Ok(INVALID);
        }
        let copied = args::copying(py, length, || {
            // SAFETY: the caller names memory that is theirs to write; the source cannot change. They may overlap only
            // if the caller lies about that.
            unsafe { device::copy_to(ptr, source.as_ptr(), source.len()) }
        });
        Ok(copied.map_or_else(|error| error.code(), |()| DONE))
    }

    /// A copy of `length` bytes of host memory at `ptr`.
    fn read_bytes_from_buffer<'py>(
        &self,
        py: Python<'py>,
        ptr: &Bound<'_, PyAny>,
        length: &Bound<'_, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let ptr = args::word(ptr, "ptr")?;
        let length = args::word(length, "length")?;
        if length == 0 {
            return Ok(PyBytes::new(py, &[]));
        }
        if ptr == 0 || ptr.checked_add(length).is_none() {
            return Err(PyValueError::new_err(format!(
                "{length} bytes at {ptr:#x} are not memory that can be read"
            )));
        }
        if isize::try_from(length).is_err() {
            return Err(PyMemoryError::new_err(format!(
                "{length} bytes are too many"
            )));
        }
        PyBytes::new_with(py, length, |copy| {
            args::copying(py, length, || {
                // SAFETY: the caller names memory that is theirs to read; the object is not known to anybody yet.
                unsafe { device::copy_from(ptr, copy.as_mut_ptr(), length) }
            })
            .map_err(|error| PyRuntimeError::new_err(error.to_string()))
        })
    }

    // ---- transfers ----------------------------------------------------------------------------

    /// Reads `length` bytes at `src_ptr` in the peer into `dst_ptr`, and waits. Returns a code.
    #[pyo3(signature = (url, dst_ptr, src_ptr, length, timeout_ms=None))]
    fn transfer_sync_read(
        &self,
        py: Python<'_>,
        url: &Bound<'_, PyAny>,
        dst_ptr: &Bound<'_, PyAny>,
        src_ptr: &Bound<'_, PyAny>,
        length: &Bound<'_, PyAny>,
        timeout_ms: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<i32> {
        self.check_process()?;
        let parsed = args::text(url, "url").and_then(|url| {
            let range = args::range(Order::Get, dst_ptr, src_ptr, length)?;
            Ok((url, range, args::timeout(timeout_ms, "timeout_ms")?))
        });
        let (url, range, timeout) = match parsed {
            Ok(parsed) => parsed,
            Err(error) => return code_of_refusal(py, error),
        };
        let started = detached(py, || {
            // SAFETY: the caller's promise, which the class documents.
            unsafe {
                self.inner
                    .read_within(&url, range.local, range.remote, range.len, timeout, SLICE)
            }
        });
        Self::finish(py, started)
    }

    /// Writes `length` bytes at `src_ptr` to `dst_ptr` in the peer, and waits until they are there. Returns a code.
    #[pyo3(signature = (url, src_ptr, dst_ptr, length, timeout_ms=None))]
    fn transfer_sync_write(
        &self,
        py: Python<'_>,
        url: &Bound<'_, PyAny>,
        src_ptr: &Bound<'_, PyAny>,
        dst_ptr: &Bound<'_, PyAny>,
        length: &Bound<'_, PyAny>,
        timeout_ms: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<i32> {
        self.check_process()?;
        let parsed = args::text(url, "url").and_then(|url| {
            let range = args::range(Order::Put, src_ptr, dst_ptr, length)?;
            Ok((url, range, args::timeout(timeout_ms, "timeout_ms")?))
        });
        let (url, range, timeout) = match parsed {
            Ok(parsed) => parsed,
            Err(error) => return code_of_refusal(py, error),
        };
        let started = detached(py, || {
            // SAFETY: the caller's promise, which the class documents.
            unsafe {
                self.inner
                    .write_within(&url, range.local, range.remote, range.len, timeout, SLICE)
            }
        });
        Self::finish(py, started)
    }

    /// As `transfer_sync_read`, not waiting.
    #[pyo3(signature = (url, dst_ptr, src_ptr, length, timeout_ms=None))]
    fn get_async(
        &self,
        py: Python<'_>,
        url: &Bound<'_, PyAny>,
        dst_ptr: &Bound<'_, PyAny>,
        src_ptr: &Bound<'_, PyAny>,
        length: &Bound<'_, PyAny>,
        timeout_ms: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        self.check_process()?;
        let url = args::text(url, "url")?;
        let range = args::range(Order::Get, dst_ptr, src_ptr, length)?;
        let timeout = args::timeout(timeout_ms, "timeout_ms")?;
        // SAFETY: the caller's promise, which the class documents.
        self.start(py, |engine| unsafe {
            engine.get(&url, range.local, range.remote, range.len, timeout)
        })
    }

    /// As `transfer_sync_write`, not waiting.
    #[pyo3(signature = (url, src_ptr, dst_ptr, length, timeout_ms=None))]
    fn put_async(
        &self,
        py: Python<'_>,
        url: &Bound<'_, PyAny>,
        src_ptr: &Bound<'_, PyAny>,
        dst_ptr: &Bound<'_, PyAny>,
        length: &Bound<'_, PyAny>,
        timeout_ms: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        self.check_process()?;
        let url = args::text(url, "url")?;
        let range = args::range(Order::Put, src_ptr, dst_ptr, length)?;
        let timeout = args::timeout(timeout_ms, "timeout_ms")?;
        // SAFETY: the caller's promise, which the class documents.
        self.start(py, |engine| unsafe {
            engine.put(&url, range.local, range.remote, range.len, timeout)
        })
    }

    /// Many reads from one peer as one operation: `ranges` holds tuples `(dst_ptr, src_ptr, length)`.
    #[pyo3(signature = (url, ranges, timeout_ms=None))]
    fn get_many(
        &self,
        py: Python<'_>,
        url: &Bound<'_, PyAny>,
        ranges: &Bound<'_, PyAny>,
        timeout_ms: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        self.check_process()?;
        let url = args::text(url, "url")?;
        let ranges = args::ranges(Order::Get, ranges)?;
        let timeout = args::timeout(timeout_ms, "timeout_ms")?;
        // SAFETY: the caller's promise, which the class documents.
        self.start(py, |engine| unsafe {
            engine.get_many(&url, &ranges, timeout)
        })
    }

    /// Many writes to one peer as one operation, in no particular order: `ranges` holds tuples
    /// `(src_ptr, dst_ptr, length)`.
    #[pyo3(signature = (url, ranges, timeout_ms=None))]
    fn put_many(
        &self,
        py: Python<'_>,
        url: &Bound<'_, PyAny>,
        ranges: &Bound<'_, PyAny>,
        timeout_ms: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        self.check_process()?;
        let url = args::text(url, "url")?;
        let ranges = args::ranges(Order::Put, ranges)?;
        let timeout = args::timeout(timeout_ms, "timeout_ms")?;
        // SAFETY: the caller's promise, which the class documents.
        self.start(py, |engine| unsafe {
            engine.put_many(&url, &ranges, timeout)
        })
    }

    /// Writes, then delivers `msg` to the peer's `recv_msg` once the data is in place.
    #[pyo3(signature = (url, src_ptr, dst_ptr, length, msg, timeout_ms=None))]
    #[expect(clippy::too_many_arguments, reason = "the Python signature")]
    fn put_signal(
        &self,
        py: Python<'_>,
        url: &Bound<'_, PyAny>,
        src_ptr: &Bound<'_, PyAny>,
        dst_ptr: &Bound<'_, PyAny>,
        length: &Bound<'_, PyAny>,
        msg: &Bound<'_, PyAny>,
        timeout_ms: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        self.check_process()?;
        let url = args::text(url, "url")?;
        let range = args::range(Order::Put, src_ptr, dst_ptr, length)?;
        let message = args::message(msg, "msg")?;
        let timeout = args::timeout(timeout_ms, "timeout_ms")?;
        // SAFETY: the caller's promise, which the class documents.
        self.start(py, |engine| unsafe {
            engine.put_signal(&url, range.local, range.remote, range.len, message, timeout)
        })
    }

    /// Writes in order: whoever polls the bytes of the last of `writes`, tuples `(src_ptr, dst_ptr, length)`, in the peer's
    /// memory never sees them before all the data before it.
    #[pyo3(signature = (url, writes, timeout_ms=None))]
    fn put_chain(
        &self,
        py: Python<'_>,
        url: &Bound<'_, PyAny>,
        writes: &Bound<'_, PyAny>,
        timeout_ms: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        self.check_process()?;
        let url = args::text(url, "url")?;
        let writes = args::ranges(Order::Put, writes)?;
        let timeout = args::timeout(timeout_ms, "timeout_ms")?;
        // SAFETY: the caller's promise, which the class documents.
        self.start(py, |engine| unsafe {
            engine.put_chain(&url, &writes, timeout)
        })
    }

    // ---- messages -----------------------------------------------------------------------------

    /// Sends a message, in order with all others to that peer. `peer` is a URL (connects on demand) or an id tuple
    /// (needs a live link). Returns when the message is accepted for sending; waits while the receiver is behind.
    ///
    /// Raises TimeoutError (the link stays), ConnectionError, ValueError or RuntimeError.
    #[pyo3(signature = (peer, data, timeout_ms=None))]
    fn send_msg(
        &self,
        py: Python<'_>,
        peer: &Bound<'_, PyAny>,
        data: &Bound<'_, PyAny>,
        timeout_ms: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.check_process()?;
        let message = args::message(data, "data")?;
        let timeout = args::timeout(timeout_ms, "timeout_ms")?;
        let started = if peer.is_instance_of::<PyString>() {
            let url = args::text(peer, "peer")?;
            detached(py, || {
                self.inner
                    .send_msg_within(Recipient::Url(&url), message, timeout, SLICE)
            })
        } else {
            let id = args::id(peer, "peer")?;
            detached(py, || {
                self.inner
                    .send_msg_within(Recipient::Id(&id), message, timeout, SLICE)
            })
        };
        let transfer = started.map_err(|error| exception(py, &error))?;
        match transfer::wait(py, &transfer, None)? {
            Some(result) => result.map_err(|error| exception(py, &error)),
            None => Err(PyRuntimeError::new_err("a wait without end has ended")),
        }
    }

    /// The next message as `(id_tuple, bytes)`; None after `timeout_ms` (None: wait forever, 0: poll) or after `close`.
    #[pyo3(signature = (timeout_ms=None))]
    fn recv_msg<'py>(
        &self,
        py: Python<'py>,
        timeout_ms: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<(Bound<'py, PyTuple>, Bound<'py, PyBytes>)>> {
        let timeout = args::timeout(timeout_ms, "timeout_ms")?;
        self.check_process()?;
        let received = in_slices(py, timeout, |slice| {
            match self.inner.recv_msg(Some(slice)) {
                Some(mail) => Some(Some(mail)),
                None => self.inner.is_closed().then_some(None),
            }
        })?;
        match received.flatten() {
            Some((from, bytes)) => Ok(Some((
                convert::id_tuple(py, &from)?,
                PyBytes::new(py, &bytes),
            ))),
            None => Ok(None),
        }
    }

    // ---- channels -----------------------------------------------------------------------------

    /// Opens a step channel to a peer, connecting on demand: a `connex_rs.channel.Sender`. Does not wait. `slots` steps of
    /// at most `slot_bytes` of arrays may be out at a time.
    #[pyo3(signature = (peer_url, name=None, slots=None, slot_bytes=None),
        text_signature = "($self, peer_url, name=\"\", slots=8, slot_bytes=1048576)")]
    fn channel<'py>(
        &self,
        py: Python<'py>,
        peer_url: &Bound<'_, PyAny>,
        name: Option<&Bound<'_, PyAny>>,
        slots: Option<&Bound<'_, PyAny>>,
        slot_bytes: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.check_process()?;
        let url = args::text(peer_url, "peer_url")?;
        let name = name.map(|name| args::text(name, "name")).transpose()?;
        let mut config = ChannelConfig::default();
        if let Some(slots) = slots {
            config.slots = args::word(slots, "slots")?;
        }
        if config.slots < 2 {
            return Err(PyValueError::new_err(format!(
                "slots {} must be at least 2: a loop over steps holds one while it waits for the next",
                config.slots
            )));
        }
        if let Some(slot_bytes) = slot_bytes {
            config.slot_bytes = args::word(slot_bytes, "slot_bytes")?;
        }
        channel::open(py, &self.inner, &url, name.as_deref().unwrap_or(""), config)
    }

    /// Accepts the oldest channel that a peer has opened, of that name if one is given: a `connex_rs.channel.Receiver`.
    ///
    /// Raises TimeoutError after `timeout_ms` (None: never), RuntimeError after `close` or without memory for the ring.
    #[pyo3(signature = (name=None, timeout_ms=None))]
    fn accept_channel<'py>(
        &self,
        py: Python<'py>,
        name: Option<&Bound<'_, PyAny>>,
        timeout_ms: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.check_process()?;
        let name = name.map(|name| args::text(name, "name")).transpose()?;
        let timeout = args::timeout(timeout_ms, "timeout_ms")?;
        channel::accept(py, &self.inner, name.as_deref(), timeout)
    }

    // ---- peers --------------------------------------------------------------------------------

    /// Starts a link to a peer, if there is none; reports by event. Never blocks.
    fn connect(&self, py: Python<'_>, url: &Bound<'_, PyAny>) -> PyResult<()> {
        self.check_process()?;
        let url = args::text(url, "url")?;
        detached(py, || self.inner.connect(&url)).map_err(|error| exception(py, &error))
    }

    /// Closes the link to a peer, after what was accepted for sending has been delivered. Does not wait; gives no
    /// event here.
    fn disconnect(&self, py: Python<'_>, peer: &Bound<'_, PyAny>) -> PyResult<()> {
        self.check_process()?;
        let peer = args::id(peer, "peer")?;
        detached(py, || self.inner.disconnect(&peer)).map_err(|error| exception(py, &error))
    }

    /// The next event as a dictionary; None after `timeout_ms` (None: wait forever, 0: poll) or after `close`.
    #[pyo3(signature = (timeout_ms=None))]
    fn wait_event<'py>(
        &self,
        py: Python<'py>,
        timeout_ms: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        let timeout = args::timeout(timeout_ms, "timeout_ms")?;
        self.check_process()?;
        let event = in_slices(py, timeout, |slice| {
            match self.inner.wait_event(Some(slice)) {
                Some(event) => Some(Some(event)),
                None => self.inner.is_closed().then_some(None),
            }
        })?;
        match event.flatten() {
            Some(event) => convert::event_dict(py, &event).map(Some),
            None => Ok(None),
        }
    }

    /// All counters, and what the engine tells about itself. Goes on working after `close`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = detached(py, || self.inner.stats());
        convert::stats_dict(py, &stats)
    }

    /// Closes the engine, within a second. Idempotent. Every pending operation ends with -5 and all waiters wake.
    fn close(&self, py: Python<'_>) {
        detached(py, || self.inner.close());
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let state = if self.inner.is_closed() {
            "closed"
        } else {
            "open"
        };
        format!("<connex_rs.Engine {} {state}>", self.inner.local_url())
    }
}
