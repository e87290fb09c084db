//! The public handle of an engine.

use std::collections::HashMap;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::channel::Channels;
use crate::clock::{now_ns, wall_ns};
use crate::completion::{Completion, deadline};
use crate::config::{Config, TransportChoice};
use crate::core::{Command, Shared, Target};
use crate::device::{Devices, Residence};
use crate::error::{Error, ErrorKind, Result};
use crate::event::{Event, EventQueue};
use crate::fork;
use crate::host;
use crate::identity::{Host, Incarnation, LogicalId, PeerUrl};
use crate::inbox::Inbox;
use crate::memory::Pages;
use crate::progress::Hub;
use crate::random;
use crate::region::{Access, Denied, Granted, Holder, Registry};
use crate::sentinel::{Seat, Wish};
use crate::stats::{Counters, PeerPath, Stats};
use crate::sync::{Mutex, RwLock};
use crate::transfer::{Deadline, Element, Letter, OpId, Work};
use crate::transport::tcp::{Liveness, Tcp, Tls};
use crate::transport::ucx::{self, Ucx};
use crate::transport::{ConnIds, Transport};
use crate::wire::MAX_MESSAGE;

/// How long `unregister` lets the users of a region finish before it cuts them off.
pub(crate) const UNREGISTER_PATIENCE: Duration = Duration::from_secs(1);

/// How long `unregister` then waits for them to let go.
const UNREGISTER_LIMIT: Duration = Duration::from_secs(5);

/// `close` returns within this time, whatever the peers do.
const CLOSE_LIMIT: Duration = Duration::from_millis(950);

/// Parsed URLs that are kept.
const URLS_KEPT: usize = 4096;

/// One range of a [`get_many`](Engine::get_many), [`put_many`](Engine::put_many) or [`put_chain`](Engine::put_chain).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// First byte in this process.
    pub local: usize,
    /// First byte in the peer.
    pub remote: u64,
    /// Bytes.
    pub len: usize,
}

/// Whom a message is for.
#[derive(Clone, Copy, Debug)]
pub enum Recipient<'a> {
    /// By URL: connects on demand.
    Url(&'a str),
    /// By identity: must have a live link.
    Id(&'a LogicalId),
}

/// A running engine: a handle that may be cloned and used from any thread. The last one closes it.
#[derive(Clone)]
pub struct Engine(Arc<Handle>);

struct Handle {
    hub: Arc<Hub>,
    born: u32,
    id: LogicalId,
    port: u16,
    next_op: AtomicU64,
    closed: AtomicBool,
    urls: RwLock<HashMap<String, Arc<PeerUrl>>>,
    managed: Mutex<HashMap<usize, Arc<Pages>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    transport: &'static str,
    /// Peers may hold keys of regions.
    one_sided: bool,
    warnings: Vec<String>,
}

impl Engine {
    /// Starts an engine: binds its address and starts its progress thread.
    ///
    /// # Errors
    /// `Invalid` for a configuration that cannot be; `Transport` if the address cannot be bound, with its
    /// holder or the host's addresses.
    pub fn start(config: Config) -> Result<Self> {
        let liveness = config
            .heartbeats()?
            .map(|(interval, timeout)| Liveness { interval, timeout });
        let authenticated = config.checked_secret()?.is_some() || config.tls.is_some();
        config.checked_stall()?;
        let (listen, advertised) = addresses(&config)?;
        let ids = ConnIds::default();
        let mut warnings = Vec::new();
        let transport: Box<dyn Transport> = match choose(config.transport, authenticated) {
            TransportChoice::Ucx if config.tls.is_some() => {
                return Err(Error::invalid(
                    "tls cannot be used with transport \"ucx\": UCX's own wire stays open; use transport \"tcp\"",
                ));
            }
            TransportChoice::Ucx => {
                let options = ucx::Options {
                    listen: SocketAddr::new(listen, config.port),
                    advertise: advertised,
                    interface: host::interface_of(advertised),
                };
                let ucx =
                    Ucx::listen(&options, ids).map_err(|e| Error::new(ErrorKind::Transport, e))?;
                let plan = ucx.plan();
                warnings.extend(plan.warnings.iter().chain(&plan.obstacles).cloned());
                if authenticated {
                    let warning = "the secret authenticates identities only: UCX's own wire stays open to whoever reaches its ports";
                    tracing::warn!(target: "connex_rs::engine", "{warning}");
                    warnings.push(warning.to_owned());
                }
                Box::new(ucx)
            }
            _ => {
                let tls = config
                    .tls
                    .as_ref()
                    .map(|files| Tls::load(files, &config.id));
                let tls = tls
                    .transpose()
                    .map_err(|e| Error::invalid(format!("tls: {e}")))?;
                Box::new(
                    Tcp::listen(SocketAddr::new(listen, config.port), liveness, tls, ids)
                        .map_err(|e| Error::new(ErrorKind::Transport, e))?,
                )
            }
        };
        if !authenticated {
            let warning = format!(
                "peers are not authenticated: whoever reaches {listen} may connect; set a secret to change that"
            );
            tracing::info!(target: "connex_rs::engine", "{warning}");
            warnings.push(warning);
        }
        Self::run_over(config, transport, Some(listen), advertised, warnings, true)
    }

    /// Starts an engine over a transport that is there already, without a sentinel. For tests.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    #[doc(hidden)]
    pub fn start_over(config: Config, transport: Box<dyn Transport>) -> Result<Self> {
        let advertised = transport.local_addr().ip();
        Self::run_over(config, transport, None, advertised, Vec::new(), true)
    }

    /// As [`start_over`](Self::start_over), and without a progress thread. See [`by_hand`](crate::by_hand).
    #[cfg(by_hand)]
    pub(crate) fn start_by_hand(config: Config, transport: Box<dyn Transport>) -> Result<Self> {
        let advertised = transport.local_addr().ip();
        Self::run_over(config, transport, None, advertised, Vec::new(), false)
    }

    fn run_over(
        config: Config,
        mut transport: Box<dyn Transport>,
        listen: Option<IpAddr>,
        advertised: IpAddr,
        mut warnings: Vec<String>,
        with_thread: bool,
    ) -> Result<Self> {
        let heartbeats = config.heartbeats()?;
        let secret = config.checked_secret()?.map(<[u8]>::to_vec);
        let local = transport.local_addr();
        let local_url = PeerUrl {
            host: match advertised {
                IpAddr::V4(addr) => Host::V4(addr),
                IpAddr::V6(addr) => Host::V6 { addr, scope: None },
            },
            port: local.port(),
            id: config.id.clone(),
        };
        let incarnation = Incarnation {
            start_ns: wall_ns(),
            random: random::number(),
        };
        let stall = config.checked_stall()?;
        let wish = listen.map(|listen| Wish {
            sentinel: config.sentinel,
            stall,
            listen: SocketAddr::new(listen, local.port()),
        });
        if stall.is_some() && !config.sentinel {
            let warning =
                "stalls are not watched for: that needs the sentinel, which is switched off";
            tracing::warn!(target: "connex_rs::engine", "{warning}");
            warnings.push(warning.to_owned());
        }
        let shared = Arc::new(Shared {
            id: Arc::new(config.id.clone()),
            incarnation,
            seat: wish.map_or_else(Seat::none, |wish| Seat::take(&wish, incarnation)),
            local_url: local_url.to_string(),
            counters: Counters::default(),
            events: EventQueue::default(),
            inbox: Inbox::default(),
            registry: Mutex::new(Registry::default()),
            channels: Channels::new(config.channel_bytes),
            devices: Devices::new(config.allow_staging, transport.prober()),
            secret,
            heartbeats: heartbeats.map(|(i, t)| (i.as_nanos() as u64, t.as_nanos() as u64)),
            debug: std::env::var_os("CONNEX_RS_DEBUG").is_some_and(|v| v == "1"),
            paths: Mutex::default(),
        });
        let name = transport.name();
        let one_sided = transport.one_sided().is_some();
        let hub = Hub::new(shared, transport, config.spin)?;
        hub.shared.seat.attach(Arc::downgrade(&hub)).map_err(|e| {
            Error::new(
                ErrorKind::Transport,
                format!("cannot watch for obituaries: {e}"),
            )
        })?;
        let thread = with_thread.then(|| progress_thread(&hub)).transpose()?;
        Ok(Self(Arc::new(Handle {
            hub,
            born: fork::generation(),
            id: config.id,
            port: local.port(),
            next_op: AtomicU64::new(1),
            closed: AtomicBool::new(false),
            urls: RwLock::default(),
            managed: Mutex::default(),
            thread: Mutex::new(thread),
            transport: name,
            one_sided,
            warnings,
        })))
    }

    /// The URL that peers dial.
    pub fn local_url(&self) -> &str {
        &self.0.hub.shared.local_url
    }

    /// Who the engine is.
    pub fn id(&self) -> &LogicalId {
        &self.0.id
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.0.port
    }

    /// Whether `close` was called.
    pub fn is_closed(&self) -> bool {
        self.0.closed.load(Ordering::Acquire)
    }

    // ---- memory -------------------------------------------------------------------------------

    /// Makes `len` bytes at `addr` a region that peers may read and write.
    ///
    /// # Safety
    /// The memory must stay valid until [`unregister_memory`](Self::unregister_memory) or the engine's `close` has
    /// returned, and the process must expect it to change at any time: it may be accessed through raw
    /// pointers, atomics or copies only.
    ///
    /// # Errors
    /// `Invalid` for a null address, a zero or wrapping length, or a start that is registered already; `Canceled` after
    /// `close`.
    pub unsafe fn register_memory(&self, addr: usize, len: usize) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.register_memory_for(addr, len, Access::ReadWrite) }
    }

    /// As [`register_memory`](Self::register_memory), limited to what `access` allows peers.
    ///
    /// # Safety
    /// As for `register_memory`.
    ///
    /// # Errors
    /// As for `register_memory`.
    pub unsafe fn register_memory_for(
        &self,
        addr: usize,
        len: usize,
        access: Access,
    ) -> Result<()> {
        self.check_open()?;
        // Asked before the lock is taken: a driver may take its time.
        let residence = self.shared().devices.of_region(addr, len);
        self.shared()
            .registry
            .lock()
            .register_in(addr, len, access, None, residence)
    }

    /// Takes a region back. Returns once no transfer uses it any more: transfers under way get
    /// one second to finish, then their links are closed.
    ///
    /// # Errors
    /// `Invalid` if no region starts at `addr`; `Transport` if its users did not let go within some seconds more.
    pub fn unregister_memory(&self, addr: usize) -> Result<()> {
        fork::check(self.0.born)?;
        if self.is_closed() {
            return Ok(());
        }
        let region = self.shared().registry.lock().unregister(addr)?;
        self.withdraw_key(addr);
        if region.wait_unused(UNREGISTER_PATIENCE) {
            return Ok(());
        }
        let conns = region
            .holders()
            .into_iter()
            .filter_map(|holder| match holder {
                Holder::Peer(conn) => Some(conn),
                Holder::Local => None,
            })
            .collect();
        self.0.hub.command(Command::Evict {
            conns,
            addr,
            len: region.len(),
        });
        if region.wait_unused(UNREGISTER_LIMIT) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Transport,
            format!(
                "the region at {addr:#x} is still in use by a transfer: do not free its memory before the engine is closed"
            ),
        ))
    }

    /// Waits until no peer holds the key of a region that is to go. Bounded: who does not give it back loses
    /// its link.
    fn withdraw_key(&self, addr: usize) {
        if !self.0.one_sided {
            return;
        }
        let completion = Arc::new(Completion::default());
        self.0.hub.command(Command::Withdraw {
            addr,
            completion: completion.clone(),
        });
        completion.wait_until(deadline(Some(UNREGISTER_LIMIT)));
    }

    /// Allocates page-aligned, zeroed host memory and registers it; returns its address. It lives until
    /// [`free_managed_buffer`](Self::free_managed_buffer), or `close`.
    ///
    /// # Errors
    /// `Invalid` for 0 bytes, `Transport` when memory is short, `Canceled` after `close`.
    pub fn allocate_managed_buffer(&self, len: usize) -> Result<usize> {
        self.check_open()?;
        let pages = Arc::new(Pages::new(len)?);
        let addr = pages.addr();
        self.shared().registry.lock().register(
            addr,
            len,
            Access::ReadWrite,
            Some(pages.clone()),
        )?;
        self.0.managed.lock().insert(addr, pages);
        Ok(addr)
    }

    /// Frees a managed buffer; harmless after `close`. Transfers under way keep its pages until they end.
    ///
    /// # Errors
    /// `Invalid` if it is not a managed buffer's address.
    pub fn free_managed_buffer(&self, addr: usize) -> Result<()> {
        fork::check(self.0.born)?;
        if self.0.managed.lock().remove(&addr).is_none() {
            return if self.is_closed() {
                Ok(())
            } else {
                Err(Error::invalid(format!(
                    "{addr:#x} is not the address of a managed buffer"
                )))
            };
        }
        if !self.is_closed() {
            // The region keeps the pages until no peer holds its key.
            let region = self.shared().registry.lock().unregister(addr)?;
            self.withdraw_key(addr);
            drop(region);
        }
        Ok(())
    }

    // ---- transfers ----------------------------------------------------------------------------

    /// Reads `len` bytes at `src` in the peer into `dst`, and waits.
    ///
    /// # Safety
    /// `len` bytes at `dst` must be valid for writing until this returns, and not be accessed meanwhile.
    ///
    /// # Errors
    /// See [`ErrorKind`]; after any error nothing writes to `dst` any more.
    pub unsafe fn read(
        &self,
        url: &str,
        dst: usize,
        src: u64,
        len: usize,
        timeout: Option<Duration>,
    ) -> Result<()> {
        let ranges = [Range {
            local: dst,
            remote: src,
            len,
        }];
        let (command, completion, _) = self.prepare(url, Kind::Read, &ranges, None, timeout)?;
        self.run(command, &completion, timeout)
    }

    /// Writes `len` bytes at `src` to `dst` in the peer, and waits until they are in place there.
    ///
    /// # Safety
    /// `len` bytes at `src` must be valid for reading until this returns.
    ///
    /// # Errors
    /// See [`ErrorKind`].
    pub unsafe fn write(
        &self,
        url: &str,
        src: usize,
        dst: u64,
        len: usize,
        timeout: Option<Duration>,
    ) -> Result<()> {
        let ranges = [Range {
            local: src,
            remote: dst,
            len,
        }];
        let (command, completion, _) = self.prepare(url, Kind::Write, &ranges, None, timeout)?;
        self.run(command, &completion, timeout)
    }

    /// As [`read`](Self::read), not waiting.
    ///
    /// # Safety
    /// As for `read`, until the transfer has ended.
    ///
    /// # Errors
    /// `Invalid` for what is wrong at the call (the URL); everything else comes through the transfer.
    pub unsafe fn get(
        &self,
        url: &str,
        dst: usize,
        src: u64,
        len: usize,
        timeout: Option<Duration>,
    ) -> Result<Transfer> {
        self.submit(
            url,
            Kind::Read,
            &[Range {
                local: dst,
                remote: src,
                len,
            }],
            None,
            timeout,
        )
    }

    /// As [`write`](Self::write), not waiting.
    ///
    /// # Safety
    /// As for `write`, until the transfer has ended.
    ///
    /// # Errors
    /// As for `get`.
    pub unsafe fn put(
        &self,
        url: &str,
        src: usize,
        dst: u64,
        len: usize,
        timeout: Option<Duration>,
    ) -> Result<Transfer> {
        self.submit(
            url,
            Kind::Write,
            &[Range {
                local: src,
                remote: dst,
                len,
            }],
            None,
            timeout,
        )
    }

    /// Many reads from one peer as one operation.
    ///
    /// # Safety
    /// As for `get`, for each range.
    ///
    /// # Errors
    /// As for `get`.
    pub unsafe fn get_many(
        &self,
        url: &str,
        ranges: &[Range],
        timeout: Option<Duration>,
    ) -> Result<Transfer> {
        self.submit(url, Kind::Read, ranges, None, timeout)
    }

    /// Many writes to one peer as one operation, in no particular order.
    ///
    /// # Safety
    /// As for `put`, for each range.
    ///
    /// # Errors
    /// As for `get`.
    pub unsafe fn put_many(
        &self,
        url: &str,
        ranges: &[Range],
        timeout: Option<Duration>,
    ) -> Result<Transfer> {
        self.submit(url, Kind::Write, ranges, None, timeout)
    }

    /// Writes, then delivers `message` to the peer's [`recv_msg`](Self::recv_msg) once the data is in place (I3).
    ///
    /// # Safety
    /// As for `put`.
    ///
    /// # Errors
    /// As for `get`; `Invalid` also for a message that is too long.
    pub unsafe fn put_signal(
        &self,
        url: &str,
        src: usize,
        dst: u64,
        len: usize,
        message: Vec<u8>,
        timeout: Option<Duration>,
    ) -> Result<Transfer> {
        check_message(&message)?;
        self.submit(
            url,
            Kind::Write,
            &[Range {
                local: src,
                remote: dst,
                len,
            }],
            Some(message),
            timeout,
        )
    }

    /// Writes in order: whoever polls the bytes of the last range in the peer's memory never sees them before all
    /// the data before it (I3). On a range that the peer refuses, nothing after it is written.
    ///
    /// # Safety
    /// As for `put`, for each range.
    ///
    /// # Errors
    /// As for `get`; `Invalid` also for an empty chain.
    pub unsafe fn put_chain(
        &self,
        url: &str,
        ranges: &[Range],
        timeout: Option<Duration>,
    ) -> Result<Transfer> {
        if ranges.is_empty() {
            return Err(Error::invalid("a chain needs at least one range"));
        }
        self.submit(url, Kind::Chain, ranges, None, timeout)
    }

    fn submit(
        &self,
        url: &str,
        kind: Kind,
        ranges: &[Range],
        message: Option<Vec<u8>>,
        timeout: Option<Duration>,
    ) -> Result<Transfer> {
        let target = self.target(url)?;
        if self.is_closed() {
            return Ok(self.ended(Err(Error::closed())));
        }
        match self.prepare_for(target, kind, ranges, message, timeout) {
            Ok((command, completion, id)) => {
                self.0.hub.command(command);
                Ok(Transfer {
                    completion,
                    id,
                    engine: Some(self.0.hub.clone()),
                })
            }
            Err(error) => Ok(self.ended(Err(error))),
        }
    }

    fn ended(&self, result: Result<()>) -> Transfer {
        Transfer {
            completion: Arc::new(Completion::ended(result)),
            id: 0,
            engine: None,
        }
    }

    fn prepare(
        &self,
        url: &str,
        kind: Kind,
        ranges: &[Range],
        message: Option<Vec<u8>>,
        timeout: Option<Duration>,
    ) -> Result<(Command, Arc<Completion>, OpId)> {
        let target = self.target(url)?;
        self.check_open()?;
        self.prepare_for(target, kind, ranges, message, timeout)
    }

    fn prepare_for(
        &self,
        target: Arc<PeerUrl>,
        kind: Kind,
        ranges: &[Range],
        message: Option<Vec<u8>>,
        timeout: Option<Duration>,
    ) -> Result<(Command, Arc<Completion>, OpId)> {
        let elements = self.elements(ranges)?;
        let signals = message.is_some();
        let work = match kind {
            Kind::Read => Work::Read {
                elements,
                next: 0,
                out: 0,
            },
            Kind::Write | Kind::Chain => Work::Write {
                elements,
                next: 0,
                chain: kind == Kind::Chain,
                signal: message.map(|bytes| Letter { bytes, seq: None }),
            },
        };
        let deadline = match timeout {
            Some(timeout) => Deadline::At(now_ns().saturating_add(nanos(timeout))),
            None if signals => Deadline::Never,
            None => Deadline::Stall,
        };
        Ok(self.post(Target::Url(target), work, deadline))
    }

    pub(crate) fn post(
        &self,
        target: Target,
        work: Work,
        deadline: Deadline,
    ) -> (Command, Arc<Completion>, OpId) {
        let id = self.0.next_op.fetch_add(1, Ordering::Relaxed);
        let completion = Arc::new(Completion::default());
        (
            Command::Post {
                id,
                target,
                work,
                deadline,
                completion: completion.clone(),
            },
            completion,
            id,
        )
    }

    /// Checks the local side of each range and takes its lease. Empty ranges move nothing and are left out.
    fn elements(&self, ranges: &[Range]) -> Result<Vec<Element>> {
        let registry = self.shared().registry.lock();
        let mut elements = Vec::with_capacity(ranges.len());
        for (index, range) in ranges.iter().enumerate().filter(|(_, r)| r.len > 0) {
            let Range { local, remote, len } = *range;
            let given = (ranges.len() > 1).then_some(index as u32);
            let named = || given.map_or_else(String::new, |given| format!("element {given}: "));
            if local == 0 || remote == 0 {
                let whose = if local == 0 { "local" } else { "remote" };
                return Err(Error::invalid(format!(
                    "{}the {whose} address is null",
                    named()
                )));
            }
            if local.checked_add(len).is_none() || remote.checked_add(len as u64).is_none() {
                return Err(Error::invalid(format!(
                    "{}{len} bytes at {local:#x} or {remote:#x} wrap around the address space",
                    named()
                )));
            }
            let granted = registry.local(local, len).map_err(|denied| {
                debug_assert_eq!(denied, Denied::OutOfBounds);
                Error::invalid(format!(
                    "{}{len} bytes at {local:#x} start in a registered region and leave it",
                    named()
                ))
            })?;
            let residence = self.residence(&granted, local, len, named)?;
            elements.push(Element {
                local,
                remote,
                len,
                done: 0,
                given,
                placed: 0,
                lease: granted.lease,
                residence,
            });
        }
        Ok(elements)
    }

    /// Where the local side of a transfer lives, if it can be used at all.
    pub(crate) fn residence(
        &self,
        granted: &Granted,
        addr: usize,
        len: usize,
        named: impl Fn() -> String,
    ) -> Result<Option<Residence>> {
        let devices = &self.shared().devices;
        let residence = if granted.registered {
            granted.residence
        } else {
            devices.of_local(addr)
        };
        match devices.refuses(residence, len as u64, self.0.one_sided) {
            Some(why) => Err(Error::invalid(format!("{}{why}", named()))),
            None => Ok(residence),
        }
    }

    /// Drives while waiting, then sleeps.
    fn run(
        &self,
        command: Command,
        completion: &Arc<Completion>,
        timeout: Option<Duration>,
    ) -> Result<()> {
        self.0
            .hub
            .command_and_help(command, completion, deadline(timeout));
        // The core ends the operation by its deadline; there is no second clock here.
        completion.wait_until(None);
        completion
            .result()
            .cloned()
            .unwrap_or_else(|| Err(Error::closed()))
    }

    // ---- for callers that look up from time to time --------------------------------------------

    /// As [`read`](Self::read), but returns after `patience` at the latest; the transfer may be under way then.
    ///
    /// # Safety
    /// As for `read`, until the transfer has ended.
    ///
    /// # Errors
    /// `Invalid` for what is wrong at the call, `Canceled` after `close`; everything else comes through the transfer.
    pub unsafe fn read_within(
        &self,
        url: &str,
        dst: usize,
        src: u64,
        len: usize,
        timeout: Option<Duration>,
        patience: Duration,
    ) -> Result<Transfer> {
        let range = Range {
            local: dst,
            remote: src,
            len,
        };
        let prepared = self.prepare(url, Kind::Read, &[range], None, timeout)?;
        Ok(self.run_within(prepared, patience))
    }

    /// As [`write`](Self::write), but returns after `patience` at the latest; the transfer may be under way then.
    ///
    /// # Safety
    /// As for `write`, until the transfer has ended.
    ///
    /// # Errors
    /// As for [`read_within`](Self::read_within).
    pub unsafe fn write_within(
        &self,
        url: &str,
        src: usize,
        dst: u64,
        len: usize,
        timeout: Option<Duration>,
        patience: Duration,
    ) -> Result<Transfer> {
        let range = Range {
            local: src,
            remote: dst,
            len,
        };
        let prepared = self.prepare(url, Kind::Write, &[range], None, timeout)?;
        Ok(self.run_within(prepared, patience))
    }

    /// As [`send_msg`](Self::send_msg), but returns after `patience` at the latest; the message may be waiting then.
    ///
    /// # Errors
    /// As for `send_msg_async`.
    pub fn send_msg_within(
        &self,
        to: Recipient<'_>,
        message: Vec<u8>,
        timeout: Option<Duration>,
        patience: Duration,
    ) -> Result<Transfer> {
        let prepared = self.letter(to, message, timeout)?;
        Ok(self.run_within(prepared, patience))
    }

    fn run_within(
        &self,
        (command, completion, id): (Command, Arc<Completion>, OpId),
        patience: Duration,
    ) -> Transfer {
        let until = deadline(Some(patience));
        self.0.hub.command_and_help(command, &completion, until);
        completion.wait_until(until);
        Transfer {
            completion,
            id,
            engine: Some(self.0.hub.clone()),
        }
    }

    /// Whether the engine may be used in this process.
    ///
    /// # Errors
    /// `Invalid` in a forked child, with the way out.
    pub fn check_process(&self) -> Result<()> {
        fork::check(self.0.born)
    }

    pub(crate) fn target(&self, url: &str) -> Result<Arc<PeerUrl>> {
        fork::check(self.0.born)?;
        if let Some(known) = self.0.urls.read().get(url) {
            return Ok(known.clone());
        }
        let parsed: PeerUrl = url
            .parse()
            .map_err(|e| Error::invalid(format!("bad peer URL: {e}")))?;
        if parsed.id == self.0.id {
            return Err(Error::invalid(format!("{url} names this engine itself")));
        }
        let parsed = Arc::new(parsed);
        let mut urls = self.0.urls.write();
        if urls.len() >= URLS_KEPT {
            urls.clear();
        }
        urls.insert(url.to_owned(), parsed.clone());
        Ok(parsed)
    }

    // ---- messages -----------------------------------------------------------------------------

    /// Sends a message, in order with all others to that peer. Returns when it is accepted for sending: waits
    /// for credit when the receiver is behind, forever without a timeout.
    ///
    /// # Errors
    /// `Invalid` for a bad URL or more than 64 MiB; `TimedOut` (the link stays); `PeerFailed`; `Canceled`.
    pub fn send_msg(
        &self,
        to: Recipient<'_>,
        message: Vec<u8>,
        timeout: Option<Duration>,
    ) -> Result<()> {
        let (command, completion, _) = self.letter(to, message, timeout)?;
        self.run(command, &completion, timeout)
    }

    /// As [`send_msg`](Self::send_msg), not waiting: the transfer ends when the message is accepted for sending.
    ///
    /// # Errors
    /// `Invalid` as for `send_msg`; everything else comes through the transfer.
    pub fn send_msg_async(
        &self,
        to: Recipient<'_>,
        message: Vec<u8>,
        timeout: Option<Duration>,
    ) -> Result<Transfer> {
        let (command, completion, id) = self.letter(to, message, timeout)?;
        self.0.hub.command(command);
        Ok(Transfer {
            completion,
            id,
            engine: Some(self.0.hub.clone()),
        })
    }

    fn letter(
        &self,
        to: Recipient<'_>,
        message: Vec<u8>,
        timeout: Option<Duration>,
    ) -> Result<(Command, Arc<Completion>, OpId)> {
        let target = match to {
            Recipient::Url(url) => Target::Url(self.target(url)?),
            Recipient::Id(id) => Target::Id(id.clone()),
        };
        self.check_open()?;
        check_message(&message)?;
        let deadline = match timeout {
            Some(timeout) => Deadline::At(now_ns().saturating_add(nanos(timeout))),
            None => Deadline::Never,
        };
        Ok(self.post(
            target,
            Work::Message(Letter {
                bytes: message,
                seq: None,
            }),
            deadline,
        ))
    }

    /// The next message, from whomever; `None` after `timeout` (`None`: never) or after `close`.
    pub fn recv_msg(&self, timeout: Option<Duration>) -> Option<(LogicalId, Vec<u8>)> {
        if !fork::is_native(self.0.born) {
            return None;
        }
        let (mail, owed) = self.shared().inbox.wait(timeout)?;
        if let Some(owed) = owed {
            self.0.hub.command(Command::Owed(owed));
        }
        Some(((*mail.from).clone(), mail.bytes))
    }

    // ---- peers --------------------------------------------------------------------------------

    /// Starts a link to a peer, if there is none; reports by event. Never blocks.
    ///
    /// # Errors
    /// `Invalid` for a bad URL, `Canceled` after `close`.
    pub fn connect(&self, url: &str) -> Result<()> {
        let target = self.target(url)?;
        self.check_open()?;
        self.0.hub.command(Command::Connect(target));
        Ok(())
    }

    /// Closes the link to a peer, after what was accepted for sending has been delivered (for at most 500 ms).
    /// No event comes here; the peer's reason is "closed by peer". Does not wait.
    ///
    /// # Errors
    /// `Canceled` after `close`.
    pub fn disconnect(&self, peer: &LogicalId) -> Result<()> {
        self.check_open()?;
        self.0.hub.command(Command::Disconnect(peer.clone()));
        Ok(())
    }

    /// The next event; `None` after `timeout` (`None`: never) or after `close`.
    pub fn wait_event(&self, timeout: Option<Duration>) -> Option<Event> {
        if !fork::is_native(self.0.born) {
            return None;
        }
        self.shared().events.wait(timeout)
    }

    /// All counters; goes on working after `close`.
    pub fn stats(&self) -> Stats {
        let shared = self.shared();
        let counters = &shared.counters;
        if fork::is_native(self.0.born) {
            let registry = shared.registry.lock();
            let rings = shared.channels.rings();
            counters
                .regions
                .set(registry.count().saturating_sub(rings) as u64);
            counters.region_bytes.set(registry.bytes());
            drop(registry);
            counters.messages_queued_bytes.set(shared.inbox.bytes());
        }
        let mut stats = counters.read();
        stats.transport = self.0.transport.to_owned();
        stats.warnings = self.0.warnings.clone();
        if fork::is_native(self.0.born) {
            (stats.sentinel, stats.sentinel_restarts) = shared.seat.state();
            stats.warnings.extend(shared.seat.warnings());
            stats.paths = shared
                .paths
                .lock()
                .iter()
                .map(|(peer, (path, mode))| PeerPath {
                    peer: peer.to_string(),
                    path: path.clone(),
                    mode,
                })
                .collect();
        }
        stats
    }

    /// Closes the engine. Idempotent. Accepts nothing new, delivers accepted messages and posted writes for at most
    /// 500 ms, ends the rest with `Canceled`, and returns within 1 s.
    pub fn close(&self) {
        self.0.close();
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.0.hub.shared
    }

    /// Drives while waiting, then sleeps; false if `until` came first.
    pub(crate) fn wait_helping(&self, wait: &Completion, until: Option<Instant>) -> bool {
        self.wait_helping_for(wait, until, || false)
    }

    /// As [`wait_helping`](Self::wait_helping), and while it drives looks for what may show without this engine's doing.
    pub(crate) fn wait_helping_for(
        &self,
        wait: &Completion,
        until: Option<Instant>,
        ready: impl Fn() -> bool,
    ) -> bool {
        if until.is_none_or(|until| until > Instant::now()) {
            self.0.hub.help(wait, until, &ready);
        }
        wait.is_done() || ready() || wait.wait_until(until)
    }

    /// A wait for a change, as its caller sees it; it cannot be canceled, only forgotten.
    pub(crate) fn change(&self, wait: Option<Arc<Completion>>) -> Transfer {
        Transfer {
            completion: wait.unwrap_or_else(|| Arc::new(Completion::ended(Ok(())))),
            id: 0,
            engine: None,
        }
    }

    /// An operation that has been posted, as its caller sees it.
    pub(crate) fn transfer(&self, completion: Arc<Completion>, id: OpId) -> Transfer {
        Transfer {
            completion,
            id,
            engine: Some(self.0.hub.clone()),
        }
    }

    pub(crate) fn hub(&self) -> &Arc<Hub> {
        &self.0.hub
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        fork::check(self.0.born)?;
        if self.is_closed() {
            Err(Error::closed())
        } else {
            Ok(())
        }
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Engine({})", self.local_url())
    }
}

impl Handle {
    fn close(&self) {
        if !fork::is_native(self.born) {
            return;
        }
        let first = !self.closed.swap(true, Ordering::AcqRel);
        if first {
            self.hub.command(Command::Close);
        }
        let ended = self.hub.wait_ended(CLOSE_LIMIT);
        if first {
            self.hub.shared.events.close();
            self.hub.shared.inbox.close();
            self.hub.shared.channels.close();
            self.hub.shared.seat.leave();
            let thread = self.thread.lock().take();
            if let (true, Some(thread)) = (ended, thread) {
                // It has said that it ends; a panic of it was reported when it happened.
                let _ = thread.join();
            }
            if ended {
                // No transfer is left that could use them.
                let mut registry = self.hub.shared.registry.lock();
                for (addr, _) in self.managed.lock().drain() {
                    let _ = registry.unregister(addr);
                }
            }
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if fork::is_native(self.born) {
            self.close();
        } else {
            // The parent's descriptors and locks are not ours to touch: an epoll change here would be seen there.
            std::mem::forget(self.hub.clone());
            // Nor is its thread: what was its memory may be that of a thread of ours by now.
            std::mem::forget(self.thread.get_mut().take());
        }
    }
}

/// An operation under way. Dropping it does not end the operation.
///
/// A `Transfer` is also a future that works with any executor.
pub struct Transfer {
    completion: Arc<Completion>,
    id: OpId,
    engine: Option<Arc<Hub>>,
}

impl Transfer {
    /// Whether it has ended.
    pub fn done(&self) -> bool {
        self.completion.is_done()
    }

    /// Waits for the end; `None` if it is still running after `timeout` (`None`: never).
    ///
    /// # Errors
    /// How it ended, as the call that started it says; `Invalid` in a forked child, where it never ends.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Result<()>> {
        let until = deadline(timeout);
        if let Some(hub) = self.running_on() {
            if let Err(error) = fork::check(hub.born) {
                return Some(Err(error));
            }
            if timeout != Some(Duration::ZERO) {
                hub.help(&self.completion, until, || false);
            }
        }
        self.completion.wait_until(until);
        self.completion.result().cloned()
    }

    /// How it ended, if it has.
    pub fn result(&self) -> Option<Result<()>> {
        self.completion.result().cloned()
    }

    /// Leaves a waker that is called once the operation has ended, on a thread of the engine: it may mark a task
    /// runnable and no more. Replaces an earlier one. False if the operation has ended already: then the waker is not kept.
    pub fn set_waker(&self, waker: &Waker) -> bool {
        self.completion.set_waker(waker)
    }

    /// Ends the operation before its time, with `Canceled`, and returns once nothing touches its memory any
    /// more. If it had been started its link is closed, as by a time-out. Nothing happens to one that has ended, nor in a forked
    /// child, where nothing touches it.
    pub fn cancel(&self) {
        if let Some(hub) = self.running_on()
            && fork::is_native(hub.born)
        {
            let error = Error::new(ErrorKind::Canceled, "canceled by its caller");
            hub.command(Command::Cancel { id: self.id, error });
            self.completion.wait_until(None);
        }
    }

    /// The engine it runs on, until it has ended.
    fn running_on(&self) -> Option<&Arc<Hub>> {
        self.engine.as_ref().filter(|_| !self.done())
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if let Some(hub) = self.engine.take()
            && !fork::is_native(hub.born)
        {
            // The child has closed its descriptors: their numbers may be those of others by now.
            std::mem::forget(hub);
        }
    }
}

impl Future for Transfer {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        if let Some(hub) = self.running_on() {
            fork::check(hub.born)?;
        }
        if self.completion.set_waker(context.waker()) {
            return Poll::Pending;
        }
        Poll::Ready(
            self.completion
                .result()
                .cloned()
                .unwrap_or_else(|| Err(Error::closed())),
        )
    }
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Transfer({}, {:?})", self.id, self.completion.result())
    }
}

fn progress_thread(hub: &Arc<Hub>) -> Result<JoinHandle<()>> {
    let hub = hub.clone();
    std::thread::Builder::new()
        .name("connex-progress".into())
        .spawn(move || hub.run())
        .map_err(|e| {
            Error::new(
                ErrorKind::Transport,
                format!("cannot start the progress thread: {e}"),
            )
        })
}

/// What an operation does with its ranges.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Chain,
}

fn check_message(message: &[u8]) -> Result<()> {
    if message.len() as u64 > MAX_MESSAGE {
        return Err(Error::invalid(format!(
            "a message of {} bytes: at most {MAX_MESSAGE} are allowed; move larger data with put_signal",
            message.len()
        )));
    }
    Ok(())
}

fn nanos(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX)
}

/// What `auto` stands for: UCX where RDMA is usable or `UCX_TLS` says what is wanted, else TCP; a secret makes it
/// TCP, whose peers can be held to it.
fn choose(choice: TransportChoice, authenticated: bool) -> TransportChoice {
    let asked_for = || std::env::var_os("UCX_TLS").is_some_and(|value| !value.is_empty());
    match choice {
        TransportChoice::Auto if authenticated => TransportChoice::Tcp,
        TransportChoice::Auto if asked_for() || host::has_rdma() => TransportChoice::Ucx,
        TransportChoice::Auto => TransportChoice::Tcp,
        given => given,
    }
}

/// The address to bind and the one to advertise (SPEC section 3, wildcards and names).
fn addresses(config: &Config) -> Result<(IpAddr, IpAddr)> {
    let listen = one_address(&config.listen_ip, "listen_ip")?;
    let advertised = config
        .advertise_ip
        .as_deref()
        .map(|a| one_address(a, "advertise_ip"))
        .transpose()?;
    match advertised {
        Some(advertised) if advertised.is_unspecified() => Err(Error::invalid(format!(
            "advertise_ip {advertised} is a wildcard: name the address that peers are to dial"
        ))),
        Some(advertised) => Ok((listen, advertised)),
        None if listen.is_unspecified() => {
            let source = host::default_route_source(listen.is_ipv6())?;
            tracing::info!(target: "connex_rs::engine", "listening on {source}, the source address of the default route, for {listen}");
            Ok((source, source))
        }
        None => Ok((listen, listen)),
    }
}

fn one_address(text: &str, what: &str) -> Result<IpAddr> {
    let host: Host = text
        .parse()
        .map_err(|e| Error::invalid(format!("{what} {text:?}: {e}")))?;
    if let Host::V6 { scope: Some(_), .. } = host {
        return Err(Error::invalid(format!(
            "{what} {text:?}: a scope cannot be advertised; use a global address"
        )));
    }
    let addrs =
        host::resolve(&host, 0).map_err(|e| Error::invalid(format!("{what} {text:?}: {e}")))?;
    addrs
        .first()
        .map(SocketAddr::ip)
        .ok_or_else(|| Error::invalid(format!("{what} {text:?} has no address")))
}
