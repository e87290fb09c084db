//! The loop that drives an engine, and the callers that help.
//!
//! The *driver* is the core and its transport together; whoever holds its lock drives. Usually that is
//! the progress thread, which sleeps in epoll when there is nothing to do. A caller that waits for its own
//! operation takes the driver if nobody helps already, and polls: two hops between threads would cost more
//! than a small transfer. Who cannot get the driver leaves a command in the queue; whoever holds it looks into the
//! queue again after letting go, so that no command is left behind.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::time::{Duration, Instant};

use crossbeam_queue::SegQueue;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::time::Timespec;

use crate::clock::now_ns;
use crate::completion::{Completion, deadline};
use crate::core::{Command, Core, Out, Shared};
use crate::error::{Error, Result};
use crate::fork;
use crate::host;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::transport::{OneSided, OneSidedDone, Transport};

/// Commands taken in one turn, so that a flood of posts does not hold up answers.
const COMMANDS_PER_TURN: usize = 256;

/// The core with its transport. Only its holder may touch either.
pub(crate) struct Driver {
    core: Core,
    /// Gone once the engine is closed.
    transport: Option<Box<dyn Transport>>,
    out: Vec<Out>,
    reaped: Vec<OneSidedDone>,
}

/// What the handles of an engine and its progress thread share.
pub(crate) struct Hub {
    pub(crate) shared: Arc<Shared>,
    /// The process that its threads run in, as [`fork::generation`] tells it.
    pub(crate) born: u32,
    commands: SegQueue<Command>,
    driver: Mutex<Driver>,
    /// Callers that want the driver: the progress thread does not poll beside them.
    wanted: AtomicUsize,
    /// A caller is helping.
    helping: AtomicBool,
    /// Watches the transport and `wake`.
    epoll: OwnedFd,
    transport_fd: std::os::fd::RawFd,
    wake: OwnedFd,
    /// The progress thread sleeps, or is about to.
    asleep: AtomicBool,
    /// Until when it means to sleep.
    sleeping_until: AtomicU64,
    /// The lookups that are under way: to bound the threads.
    lookups: AtomicUsize,
    spin: Duration,
    ended: Mutex<bool>,
    ended_changed: Condvar,
}

/// Turns in which nothing happened, of a thread that polls.
#[derive(Default)]
struct Idle(u32);

impl Idle {
    /// Lets others have the processor now and then: where processors are short, whoever is to answer needs this one.
    fn pass(&mut self) {
        /// Each time costs as much as a look at the socket.
        const YIELD_EVERY: u32 = 4;
        self.0 = self.0.wrapping_add(1);
        if self.0.is_multiple_of(YIELD_EVERY) {
            std::thread::yield_now();
        }
    }
}

impl Hub {
    pub(crate) fn new(
        shared: Arc<Shared>,
        transport: Box<dyn Transport>,
        spin: Duration,
    ) -> Result<Arc<Self>> {
        let system = |what: &str, e: rustix::io::Errno| {
            Error::new(crate::error::ErrorKind::Transport, format!("{what}: {e}"))
        };
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|e| system("cannot make an epoll descriptor", e))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| system("cannot make an event descriptor", e))?;
        let transport_fd = transport.fd();
        let hub = Self {
            commands: SegQueue::new(),
            driver: Mutex::new(Driver {
                core: Core::new(shared.clone()),
                transport: Some(transport),
                out: Vec::new(),
                reaped: Vec::new(),
            }),
            shared,
            born: fork::generation(),
            wanted: AtomicUsize::new(0),
            helping: AtomicBool::new(false),
            epoll,
            transport_fd,
            wake,
            asleep: AtomicBool::new(false),
            sleeping_until: AtomicU64::new(0),
            lookups: AtomicUsize::new(0),
            spin,
            ended: Mutex::new(false),
            ended_changed: Condvar::new(),
        };
        epoll::add(
            &hub.epoll,
            &hub.wake,
            epoll::EventData::new_u64(0),
            epoll::EventFlags::IN,
        )
        .and_then(|()| {
            epoll::add(
                &hub.epoll,
                hub.transport_fd(),
                epoll::EventData::new_u64(1),
                epoll::EventFlags::IN,
            )
        })
        .map_err(|e| system("cannot watch the transport", e))?;
        Ok(Arc::new(hub))
    }

    pub(crate) fn transport_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: used only while the driver, which owns the transport and its descriptor, is held or before the
        // progress thread starts.
        unsafe { BorrowedFd::borrow_raw(self.transport_fd) }
    }

    // ---- commands -----------------------------------------------------------------------------

    /// Hands a command to the core: at once if nobody drives, else whoever drives takes it.
    pub(crate) fn command(self: &Arc<Self>, command: Command) {
        self.commands.push(command);
        self.serve();
    }

    /// Leaves a command for the next turn. The caller drives already, or is to call [`attend`](Self::attend).
    pub(crate) fn leave(&self, command: Command) {
        self.commands.push(command);
    }

    /// Sees to commands that were left.
    pub(crate) fn attend(self: &Arc<Self>) {
        if !self.commands.is_empty() {
            self.serve();
        }
    }

    /// Drives for one turn if nobody does; else sees to it that somebody will.
    fn serve(self: &Arc<Self>) {
        while self.shared.devices.may_drive() {
            // Pairs with the fence of whoever lets go of the driver: either they see our command or we get the driver.
            fence(Ordering::SeqCst);
            let Some(mut driver) = self.driver.try_lock() else {
                break;
            };
            driver.turn(self);
            self.let_go(driver);
            if self.commands.is_empty() {
                break;
            }
        }
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) && !self.commands.is_empty() {
            self.wake_up();
        }
    }

    /// Releases the driver, wakes those whose operations have ended, and the progress thread if it sleeps too long.
    fn let_go(&self, mut driver: MutexGuard<'_, Driver>) {
        let mut woken = Vec::new();
        driver.core.take_woken(&mut woken);
        let next = driver.core.next_tick();
        let unsent =
            driver.core.is_copying() || driver.transport.as_mut().is_some_and(|t| !t.arm());
        // Only the progress thread can end the engine.
        let closed = driver.core.is_closed();
        drop(driver);
        fence(Ordering::SeqCst);
        for completion in woken {
            completion.wake();
        }
        if unsent || closed || next < self.sleeping_until.load(Ordering::SeqCst) {
            self.wake_up();
        }
    }

    fn wake_up(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            // Cannot fail but for a counter that is full, and then the thread is awake.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    // ---- helping ------------------------------------------------------------------------------

    /// Hands over a command and stays to drive until `completion` has ended, `until` has passed, or nothing has
    /// happened for the spin time. The caller then waits for the completion in the ordinary way.
    pub(crate) fn command_and_help(
        self: &Arc<Self>,
        command: Command,
        completion: &Completion,
        until: Option<Instant>,
    ) {
        self.commands.push(command);
        self.help(completion, until, || false);
    }

    /// As [`command_and_help`](Self::command_and_help), for something that no command of ours brings about, and that
    /// may show without this engine's doing: `ready` looks for it, briefly and without waiting.
    pub(crate) fn help(
        self: &Arc<Self>,
        completion: &Completion,
        until: Option<Instant>,
        ready: impl Fn() -> bool,
    ) {
        if !self.shared.devices.may_drive() {
            return self.serve();
        }
        if self.helping.swap(true, Ordering::AcqRel) {
            // Somebody helps already and takes our command along.
            self.serve();
            if !self.take_over(completion, until, &ready) {
                return;
            }
        }
        self.wanted.fetch_add(1, Ordering::SeqCst);
        let mut driver = self.driver.lock();
        // The command goes out first: what else is to be done has time until its answer comes.
        let mut n = driver.turn(self);
        self.watch_transport(&driver, false);
        let (mut busy, mut idle) = (Instant::now(), Idle::default());
        while !(completion.is_done() || ready()) {
            if n > 0 {
                busy = Instant::now();
            } else {
                let now = Instant::now();
                if now - busy >= self.spin || until.is_some_and(|until| now >= until) {
                    break;
                }
                idle.pass();
            }
            if driver.core.has_woken() {
                let mut woken = Vec::new();
                driver.core.take_woken(&mut woken);
                drop(driver);
                for completion in woken {
                    completion.wake();
                }
                driver = self.driver.lock();
            }
            n = driver.turn(self);
        }
        self.watch_transport(&driver, true);
        self.wanted.fetch_sub(1, Ordering::SeqCst);
        self.helping.store(false, Ordering::Release);
        self.let_go(driver);
        self.attend();
    }

    /// Watches while somebody else helps, no longer than the spin time; true if this caller is to help instead. Between two threads
    /// that sleep and wake each other more time would pass than a small transfer takes.
    fn take_over(
        &self,
        completion: &Completion,
        until: Option<Instant>,
        ready: &impl Fn() -> bool,
    ) -> bool {
        let end = Instant::now() + self.spin;
        let end = until.map_or(end, |until| until.min(end));
        while !(completion.is_done() || ready()) {
            if !self.helping.load(Ordering::Relaxed) && !self.helping.swap(true, Ordering::AcqRel) {
                return true;
            }
            if Instant::now() >= end {
                break;
            }
            std::thread::yield_now();
        }
        false
    }

    /// While a caller helps, news on the transport need not wake the progress thread.
    fn watch_transport(&self, driver: &Driver, on: bool) {
        if driver.transport.is_none() {
            return;
        }
        let flags = if on {
            epoll::EventFlags::IN
        } else {
            epoll::EventFlags::empty()
        };
        // Cannot fail: the descriptor was added and the transport still owns it.
        let _ = epoll::modify(
            &self.epoll,
            self.transport_fd(),
            epoll::EventData::new_u64(1),
            flags,
        );
    }

    // ---- the progress thread ------------------------------------------------------------------

    /// The body of the progress thread: returns when the engine has closed.
    pub(crate) fn run(self: &Arc<Self>) {
        let mut idle = Idle::default();
        loop {
            let mut driver = self.driver.lock();
            self.shared.devices.adopt();
            let n = driver.turn(self);
            if driver.core.is_closed() {
                let transport = driver.transport.take();
                let mut woken = Vec::new();
                driver.core.take_woken(&mut woken);
                drop(driver);
                drop(transport);
                for completion in woken {
                    completion.wake();
                }
                *self.ended.lock() = true;
                self.ended_changed.notify_all();
                return;
            }
            let polls = n > 0
                || driver.core.is_copying()
                || driver.core.now.saturating_sub(driver.core.traffic)
                    < self.spin.as_nanos() as u64;
            if polls && self.wanted.load(Ordering::SeqCst) == 0 {
                let woken = driver.core.has_woken();
                if woken {
                    self.let_go(driver);
                } else {
                    drop(driver);
                    fence(Ordering::SeqCst);
                }
                if n == 0 {
                    idle.pass();
                }
                continue;
            }
            self.sleep(driver);
        }
    }

    fn sleep(self: &Arc<Self>, mut driver: MutexGuard<'_, Driver>) {
        let ready = driver.core.is_copying() || driver.transport.as_mut().is_some_and(|t| !t.arm());
        let until = driver
            .core
            .next_tick()
            .min(now_ns().saturating_add(self.shared.seat.longest_sleep()));
        self.sleeping_until.store(until, Ordering::SeqCst);
        self.asleep.store(true, Ordering::SeqCst);
        let mut woken = Vec::new();
        driver.core.take_woken(&mut woken);
        drop(driver);
        fence(Ordering::SeqCst);
        for completion in woken {
            completion.wake();
        }
        // A helper that is about to take the driver has work of its own: nothing is lost by sleeping.
        let helped = self.wanted.load(Ordering::SeqCst) > 0;
        if (ready && !helped) || !self.commands.is_empty() {
            self.asleep.store(false, Ordering::SeqCst);
            return;
        }
        let timeout = (until != u64::MAX).then(|| {
            let left = until.saturating_sub(now_ns());
            Timespec {
                tv_sec: (left / 1_000_000_000) as _,
                tv_nsec: (left % 1_000_000_000) as _,
            }
        });
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 2];
        // Interrupted or not, the next turn looks at everything.
        let _ = epoll::wait(&self.epoll, &mut events[..], timeout.as_ref());
        self.asleep.store(false, Ordering::SeqCst);
        self.sleeping_until.store(0, Ordering::SeqCst);
        let mut count = [0; 8];
        let _ = rustix::io::read(self.wake.as_fd(), &mut count);
        self.shared.counters.wakeups.add_one();
    }

    /// Waits until the progress thread has ended; false after `timeout`.
    pub(crate) fn wait_ended(&self, timeout: Duration) -> bool {
        let until = deadline(Some(timeout));
        let mut ended = self.ended.lock();
        while !*ended {
            let timed_out;
            (ended, timed_out) = self.ended_changed.wait_until(ended, until);
            if timed_out {
                break;
            }
        }
        *ended
    }

    /// Looks a name up on a thread of its own: a resolver may take seconds.
    fn resolve(self: &Arc<Self>, core: &Core, peer: usize, link: crate::peer::LinkId) {
        const MAX_LOOKUPS: usize = 16;
        let Some(url) = core.peer_url(peer) else {
            return;
        };
        if self.lookups.fetch_add(1, Ordering::SeqCst) >= MAX_LOOKUPS {
            self.lookups.fetch_sub(1, Ordering::SeqCst);
            let result = Err(format!("{MAX_LOOKUPS} names are being looked up already"));
            return self.commands.push(core.resolution(peer, link, result));
        }
        let hub = Arc::downgrade(self);
        let make = core.resolution(peer, link, Err(String::new()));
        let started = std::thread::Builder::new()
            .name("connex-resolve".into())
            .spawn(move || {
                let result = host::resolve(&url.host, url.port);
                let (Some(hub), Command::Resolved { peer, link, .. }) = (hub.upgrade(), make)
                else {
                    return;
                };
                hub.lookups.fetch_sub(1, Ordering::SeqCst);
                hub.command(Command::Resolved { peer, link, result });
            });
        if let Err(e) = started {
            self.lookups.fetch_sub(1, Ordering::SeqCst);
            self.commands.push(core.resolution(
                peer,
                link,
                Err(format!("no thread for looking a name up: {e}")),
            ));
        }
    }
}

impl Driver {
    /// Does what there is to be done; returns how much that was.
    fn turn(&mut self, hub: &Arc<Hub>) -> usize {
        self.core.now = now_ns();
        hub.shared.seat.beat();
        let mut n = 0;
        while n < COMMANDS_PER_TURN {
            let Some(command) = hub.commands.pop() else {
                break;
            };
            self.core.command(command);
            n += 1;
        }
        self.carry_out(hub);
        if let Some(transport) = &mut self.transport {
            n += transport.progress(&mut self.core);
            if let Some(access) = transport.one_sided() {
                access.reap(&mut self.reaped);
                n += self.reaped.len();
                for done in self.reaped.drain(..) {
                    self.core.one_sided_done(done);
                }
            }
        }
        n += self.core.look_at_copies();
        if self.core.now >= self.core.next_tick() {
            self.core.tick();
        }
        n + self.carry_out(hub)
    }

    /// Carries out what the core wants of the transport.
    fn carry_out(&mut self, hub: &Arc<Hub>) -> usize {
        let mut n = 0;
        while self.core.has_out() {
            let mut out = std::mem::take(&mut self.out);
            self.core.take_out(&mut out);
            for out in out.drain(..) {
                n += 1;
                let Some(transport) = &mut self.transport else {
                    continue;
                };
                match out {
                    Out::Send(conn, frame) => transport.send(conn, frame),
                    Out::Dial { peer, link, to } => {
                        let conn = transport.dial(to);
                        self.core.dialled(peer, link, conn, to);
                    }
                    Out::Resolve { peer, link } => hub.resolve(&self.core, peer, link),
                    Out::Close(conn, how) => transport.close(conn, how),
                    Out::StopListening => transport.stop_listening(),
                    Out::Learn(conn) => {
                        let (one_sided, reaches_devices) =
                            transport.one_sided().map_or((false, false), |access| {
                                (access.usable(conn), access.reaches_devices())
                            });
                        let caps = transport.caps(conn);
                        self.core.learn_caps(conn, caps, one_sided, reaches_devices);
                    }
                    one_sided => {
                        carry_out_one_sided(one_sided, transport.one_sided(), &mut self.core)
                    }
                }
            }
            self.out = out;
        }
        if let Some(transport) = &mut self.transport {
            n += self.core.pump(transport.as_mut());
        }
        n
    }
}

#[cfg(by_hand)]
impl Hub {
    /// One turn, as of a thread that polls.
    pub(crate) fn turn_by_hand(self: &Arc<Self>) -> usize {
        self.driver.lock().turn(self)
    }
}

/// What concerns one-sided access; only asked for on links that the transport called usable for it.
fn carry_out_one_sided(out: Out, access: Option<&mut dyn OneSided>, core: &mut Core) {
    const NONE: &str = "the transport has no one-sided access";
    match (out, access) {
        (
            Out::Export {
                conn,
                req,
                base,
                len,
                device,
            },
            access,
        ) => {
            let mut ordered = false;
            let result = access.map_or(Err(NONE.into()), |a| {
                if device && !a.reaches_devices() {
                    // No key: whoever asked goes through us.
                    return Ok(Vec::new());
                }
                // What reaches a device's memory may be overtaken by what reaches the host's.
                ordered = !device && a.in_order(conn);
                a.register(base as usize, len as usize)
            });
            core.exported(conn, req, base, len, device, ordered, result);
        }
        (Out::Unexport { base, completion }, access) => {
            if let Some(access) = access {
                access.deregister(base as usize);
            }
            core.end_withdrawal(&completion);
        }
        (
            Out::Unpack {
                conn,
                req,
                range,
                key,
            },
            access,
        ) => {
            let result = access.map_or(Err(NONE.into()), |a| a.unpack(conn, &key));
            core.unpacked(conn, req, range, result);
        }
        (Out::DropKey(key), Some(access)) => access.drop_key(key),
        (
            Out::Get {
                conn,
                key,
                remote,
                target,
                token,
            },
            Some(access),
        ) => {
            access.get(conn, key, remote, target, token);
        }
        (
            Out::Put {
                conn,
                key,
                remote,
                source,
                token,
            },
            Some(access),
        ) => {
            access.put(conn, key, remote, source, token);
        }
        (Out::Fence { conn, fence }, Some(access)) => access.fence(conn, fence),
        _ => {}
    }
}
