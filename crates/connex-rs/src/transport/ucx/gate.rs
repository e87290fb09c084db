//! Listening that stops while no descriptor is left.
//!
//! UCX accepts on a thread of its own. Without a free descriptor that thread spins, and logs an error each time round. So the
//! transport watches UCX's listening socket as well: a connection that waits there while no descriptor can be had
//! means that UCX must not see it for a while.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use connex_ucx::{Listener, Worker};
use rustix::event::{PollFd, PollFlags, epoll, poll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use crate::fork::Private;
use crate::transport::Upcalls;

/// How long listening pauses at a time.
const PAUSE: Duration = Duration::from_millis(100);
/// How often the socket is looked at, at most.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// What one connection needs, and some for the host.
const DESCRIPTORS: usize = 6;

const WORKER: u64 = 0;
const SOCKET: u64 = 1;
const TIMER: u64 = 2;

/// The listener of a transport, and the descriptor that the engine sleeps on.
pub(super) struct Gate {
    open: Option<Open>,
    paused: bool,
    epoll: OwnedFd,
    timer: OwnedFd,
    looked: Instant,
}

/// The listener, in the order in which its parts go.
struct Open {
    /// UCX's socket; `None` if it was not found, and then nothing can be watched or paused.
    socket: Option<RawFd>,
    _private: Option<Private>,
    listener: Listener,
}

impl Gate {
    /// Takes over `listener`; `worker` is the descriptor of its worker.
    ///
    /// # Errors
    /// No descriptor left.
    pub(super) fn new(listener: Listener, worker: RawFd) -> Result<Self, String> {
        let system = |what: &'static str| move |e: rustix::io::Errno| format!("{what}: {e}");
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(system("cannot make an epoll descriptor"))?;
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )
        .map_err(system("cannot make a timer descriptor"))?;
        watch(&epoll, worker, WORKER).map_err(system("cannot watch the worker"))?;
        watch(&epoll, timer.as_raw_fd(), TIMER).map_err(system("cannot watch the timer"))?;
        let socket = listener
            .socket()
            .filter(|fd| watch(&epoll, *fd, SOCKET).is_ok());
        let open = Open {
            socket,
            _private: socket.map(keep_from_children),
            listener,
        };
        Ok(Self {
            open: Some(open),
            paused: false,
            epoll,
            timer,
            looked: Instant::now(),
        })
    }

    /// Readable when the worker is, when a connection waits, and when a pause is over.
    pub(super) fn fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Another worker wakes the engine too. False: it cannot be watched.
    pub(super) fn watch_worker(&self, worker: RawFd) -> bool {
        watch(&self.epoll, worker, WORKER).is_ok()
    }

    /// A worker is about to end.
    pub(super) fn forget_worker(&self, worker: RawFd) {
        // SAFETY: the worker, and so its descriptor, is still there; it is taken out only.
        let worker = unsafe { BorrowedFd::borrow_raw(worker) };
        let _ = epoll::delete(&self.epoll, worker);
    }

    /// Whether strangers are wanted.
    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Ends listening for good.
    pub(super) fn stop(&mut self) {
        self.watch_socket(false);
        self.open = None;
    }

    /// Looks after the listener; cheap, for each round.
    pub(super) fn look(&mut self, worker: &mut Worker, up: &mut dyn Upcalls) {
        let now = Instant::now();
        if now.duration_since(self.looked) < LOOK_EVERY {
            return;
        }
        self.looked = now;
        let Some(socket) = self.open.as_ref().and_then(|open| open.socket) else {
            return;
        };
        if self.paused {
            self.resume(worker);
        } else if waits(socket) && !descriptors_left() {
            self.pause(worker, up);
        }
    }

    /// Stops accepting for a while.
    pub(super) fn pause(&mut self, worker: &mut Worker, up: &mut dyn Upcalls) {
        let Some(open) = self.open.as_ref().filter(|_| !self.paused) else {
            return;
        };
        up.backed_off();
        if open.listener.pause(worker, true) {
            tracing::warn!(
                target: "connex_rs::transport",
                "no descriptor is left: accepting pauses (raise the limit of open files)"
            );
            self.paused = true;
            self.watch_socket(false);
            self.set_timer(PAUSE);
        }
    }

    fn resume(&mut self, worker: &mut Worker) {
        let mut count = [0; 8];
        if rustix::io::read(&self.timer, &mut count).is_err() {
            // Not yet.
            return;
        }
        match &self.open {
            Some(open) if descriptors_left() && open.listener.pause(worker, false) => {
                self.paused = false;
                self.watch_socket(true);
            }
            Some(_) => self.set_timer(PAUSE),
            None => {}
        }
    }

    fn watch_socket(&self, on: bool) {
        let Some(socket) = self.open.as_ref().and_then(|open| open.socket) else {
            return;
        };
        // SAFETY: the socket is open while its listener lives, which `open` holds.
        let socket = unsafe { BorrowedFd::borrow_raw(socket) };
        let flags = if on {
            epoll::EventFlags::IN
        } else {
            epoll::EventFlags::empty()
        };
        let _ = epoll::modify(
            &self.epoll,
            socket,
            epoll::EventData::new_u64(SOCKET),
            flags,
        );
    }

    fn set_timer(&self, after: Duration) {
        let spec = Itimerspec {
            it_interval: Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: Timespec {
                tv_sec: 0,
                tv_nsec: after.as_nanos() as _,
            },
        };
        // Cannot fail: the descriptor is a timer and the value is in range.
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec);
    }
}

fn watch(epoll: &OwnedFd, fd: RawFd, data: u64) -> rustix::io::Result<()> {
    // SAFETY: the caller's descriptor is open; epoll keeps no reference to the number.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    epoll::add(
        epoll,
        fd,
        epoll::EventData::new_u64(data),
        epoll::EventFlags::IN,
    )
}

/// Whether a connection waits at a listening socket.
fn waits(socket: RawFd) -> bool {
    // SAFETY: the socket is open while its listener lives, which the gate holds.
    let socket = unsafe { BorrowedFd::borrow_raw(socket) };
    let mut fds = [PollFd::new(&socket, PollFlags::IN)];
    poll(
        &mut fds,
        Some(&Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        }),
    )
    .is_ok_and(|n| n > 0)
}

/// Whether a connection can be taken.
pub(super) fn descriptors_left() -> bool {
    let mut held = Vec::with_capacity(DESCRIPTORS);
    for _ in 0..DESCRIPTORS {
        match rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC) {
            Ok(fd) => held.push(fd),
            Err(_) => return false,
        }
    }
    true
}

/// UCX's own socket between two addresses, which ends when the process does.
pub(super) fn socket_between(local: SocketAddr, remote: SocketAddr) -> Option<RawFd> {
    find_socket(|fd| local_of(fd) == Some(local) && remote_of(fd) == Some(remote))
}

/// Keeps a socket of UCX from children: UCX does not close its sockets on exec, and a child that kept one would hide this
/// process's death, or hold its port.
pub(super) fn keep_from_children(socket: RawFd) -> Private {
    // SAFETY: the caller found it open, and it is UCX's own.
    let fd = unsafe { BorrowedFd::borrow_raw(socket) };
    let _ = rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::CLOEXEC);
    Private::new(socket)
}

fn local_of(fd: BorrowedFd<'_>) -> Option<SocketAddr> {
    rustix::net::getsockname(fd)
        .ok()
        .and_then(|addr| SocketAddr::try_from(addr).ok())
}

fn remote_of(fd: BorrowedFd<'_>) -> Option<SocketAddr> {
    rustix::net::getpeername(fd)
        .ok()
        .flatten()
        .and_then(|addr| SocketAddr::try_from(addr).ok())
}

/// UCX does not tell its descriptors, so the process's are looked through.
fn find_socket(is_it: impl Fn(BorrowedFd<'_>) -> bool) -> Option<RawFd> {
    let fds = std::fs::read_dir("/proc/self/fd").ok()?;
    fds.flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .find(|&fd: &RawFd| {
            // SAFETY: only asked about; a descriptor that another thread closes meanwhile gives an error, or is another
            // socket, which then has other addresses.
            is_it(unsafe { BorrowedFd::borrow_raw(fd) })
        })
}
