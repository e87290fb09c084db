//! The thread behind the engines of this process: it holds the robust lock, keeps the sentinel alive, and delivers obituaries.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::time::Timespec;

use super::memory::{Held, Memory, wake};
use super::post::{Next, Post};
use super::program::{self, Entry, MAX_ENGINES, MAX_PEERS, MUTE_ALL};
use super::spawn::{self, Started, Ways};
use crate::completion::deadline;
use crate::fork::{self, Private};
use crate::stats::SentinelState;
use crate::sync::{Condvar, Mutex};

/// Between attempts to start a sentinel that does not live: doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// A sentinel that lived for less counts as one that cannot live here.
const A_LIFE: Duration = Duration::from_secs(1);

/// So many of those in a row, and the engines go on without.
const MAX_SHORT_LIVES: u32 = 6;

/// Until a change of the settings has been taken in the bell is rung this often: the sentinel may have been about to sleep.
const RING_AGAIN: Duration = Duration::from_millis(5);

/// How long a sentinel may take to end once the lock is released. One that somebody has stopped is killed then.
const FAREWELL: Duration = Duration::from_secs(2);

/// Tests only: the sentinel sends nothing, as if a firewall dropped it.
const MUTE: &str = "CONNEX_RS_TEST_MUTE";

/// How long `close` waits for that: it has to return in time itself.
const PARTING: Duration = Duration::from_millis(25);

const WAKE: u64 = 0;
const ENDED: u64 = 1;
const FIRST_POST: u64 = 2;

/// What the engines of one process share.
pub(super) struct Guardian {
    pub(super) memory: Memory,
    // Before the descriptors: see `Private`.
    _private: [Private; 2],
    epoll: OwnedFd,
    wake: OwnedFd,
    posts: Mutex<HashMap<u64, Arc<Post>>>,
    next_post: AtomicU64,
    table: Mutex<Table>,
    ways: Ways,
    state: Mutex<SentinelState>,
    /// Some engine wants a sentinel.
    wanted: AtomicBool,
    stop: AtomicBool,
    /// How often one was started again.
    restarts: AtomicU64,
    ended: Mutex<bool>,
    ended_changed: Condvar,
}

/// Which entries of the shared memory are in use. What it says goes for the single writer that its lock makes.
struct Table {
    engines: [bool; MAX_ENGINES],
    free: Vec<u32>,
    used: u32,
}

/// The guardian of this process and how many engines it has.
struct Office {
    born: u32,
    post: Mutex<Option<(Arc<Guardian>, usize)>>,
}

/// The office of this process. A forked child opens a new one: the parent's lock may have been taken at that moment.
fn office() -> &'static Office {
    static OFFICE: AtomicPtr<Office> = AtomicPtr::new(std::ptr::null_mut());
    let born = fork::generation();
    loop {
        let current = OFFICE.load(Ordering::Acquire);
        // SAFETY: null, or leaked below.
        if let Some(office) = unsafe { current.as_ref() }
            && office.born == born
        {
            return office;
        }
        let new = Box::into_raw(Box::new(Office {
            born,
            post: Mutex::new(None),
        }));
        if OFFICE
            .compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
        {
            // SAFETY: made above and shared with nobody.
            drop(unsafe { Box::from_raw(new) });
        }
    }
}

impl Guardian {
    /// The guardian of this process, started if there is none. Each call is to be matched by one of [`leave`](Self::leave).
    pub(super) fn join() -> io::Result<Arc<Self>> {
        let mut post = office().post.lock();
        if let Some((guardian, engines)) = &mut *post {
            *engines += 1;
            return Ok(guardian.clone());
        }
        let guardian = Self::start()?;
        *post = Some((guardian.clone(), 1));
        Ok(guardian)
    }

    /// An engine leaves. With the last one the thread and the sentinel end, which takes some milliseconds; that
    /// is waited for a little.
    pub(super) fn leave(self: &Arc<Self>) {
        let mut post = office().post.lock();
        if let Some((guardian, engines)) = &mut *post
            && Arc::ptr_eq(guardian, self)
        {
            *engines -= 1;
            if *engines > 0 {
                return;
            }
            *post = None;
        }
        drop(post);
        self.stop.store(true, Ordering::Release);
        self.knock();
        let until = deadline(Some(PARTING));
        let (mut ended, mut timed_out) = (self.ended.lock(), false);
        while !*ended && !timed_out {
            (ended, timed_out) = self.ended_changed.wait_until(ended, until);
        }
    }

    fn start() -> io::Result<Arc<Self>> {
        let (memory, trouble) = Memory::new()?;
        if std::env::var_os(MUTE).is_some() {
            memory.mute.store(MUTE_ALL, Ordering::Release);
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&epoll, &wake, data, epoll::EventFlags::IN)?;
        let state = match trouble {
            None => SentinelState::Off,
            Some(reason) => SentinelState::Unavailable { reason },
        };
        let guardian = Arc::new(Self {
            memory,
            _private: [&epoll, &wake].map(|fd| Private::new(fd.as_raw_fd())),
            epoll,
            wake,
            posts: Mutex::default(),
            next_post: AtomicU64::new(FIRST_POST),
            table: Mutex::new(Table {
                engines: [false; MAX_ENGINES],
                free: Vec::new(),
                used: 0,
            }),
            ways: Ways::from_environment(),
            state: Mutex::new(state),
            wanted: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            restarts: AtomicU64::new(0),
            ended: Mutex::new(false),
            ended_changed: Condvar::new(),
        });
        std::thread::Builder::new()
            .name("connex-sentinel".into())
            .stack_size(256 << 10)
            .spawn({
                let guardian = guardian.clone();
                move || {
                    guardian.run();
                    *guardian.ended.lock() = true;
                    guardian.ended_changed.notify_all();
                }
            })?;
        Ok(guardian)
    }

    /// An engine wants a sentinel to watch over this process.
    pub(super) fn want_sentinel(&self) {
        if !self.wanted.swap(true, Ordering::AcqRel) {
            let mut state = self.state.lock();
            if *state == SentinelState::Off {
                *state = SentinelState::Starting;
            }
            drop(state);
            self.knock();
        }
    }

    pub(super) fn state(&self) -> SentinelState {
        let state = self.state.lock().clone();
        match state {
            // Started is not yet watching.
            SentinelState::Running { pid } if self.memory.ready.load(Ordering::Acquire) != pid => {
                SentinelState::Starting
            }
            other => other,
        }
    }

    pub(super) fn restarts(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }

    fn knock(&self) {
        // Cannot fail but for a counter that is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    // ---- the table ----------------------------------------------------------------------------

    /// A place for an engine; `None` if all are taken. `stall_ns` of 0: its progress is not watched.
    pub(super) fn seat_engine(&self, stall_ns: u64) -> Option<usize> {
        let mut table = self.table.lock();
        let index = table.engines.iter().position(|used| !used)?;
        table.engines[index] = true;
        self.memory.engines[index]
            .beat
            .fetch_add(1, Ordering::Relaxed);
        self.memory.engines[index]
            .stall_ns
            .store(stall_ns, Ordering::Release);
        drop(table);
        if stall_ns > 0 {
            self.changed();
        }
        Some(index)
    }

    pub(super) fn unseat_engine(&self, index: usize) {
        let mut table = self.table.lock();
        self.memory.engines[index]
            .stall_ns
            .store(0, Ordering::Release);
        table.engines[index] = false;
    }

    /// Enters a peer into the table; `None` if it is full.
    pub(super) fn enter(&self, entry: &Entry) -> Option<u32> {
        let mut table = self.table.lock();
        let index = match table.free.pop() {
            Some(index) => index,
            None if (table.used as usize) < MAX_PEERS => {
                table.used += 1;
                table.used - 1
            }
            None => return None,
        };
        self.memory.peers[index as usize].fill(entry);
        self.memory.peers_used.store(table.used, Ordering::Release);
        let before = self.memory.peers_now.fetch_add(1, Ordering::AcqRel);
        drop(table);
        if before == 0 {
            self.changed();
        }
        Some(index)
    }

    pub(super) fn strike(&self, index: u32) {
        let mut table = self.table.lock();
        self.memory.peers[index as usize].clear();
        self.memory.peers_now.fetch_sub(1, Ordering::AcqRel);
        table.free.push(index);
    }

    /// The sentinel has to look at the settings again: at once, and our thread rings until it has.
    fn changed(&self) {
        self.memory.change.fetch_add(1, Ordering::AcqRel);
        wake(&self.memory.locks[0]);
        self.knock();
    }

    // ---- obituaries of others -----------------------------------------------------------------

    /// Listens for an engine; returns the name for [`unwatch`](Self::unwatch).
    pub(super) fn watch(&self, post: Arc<Post>) -> io::Result<u64> {
        let name = self.next_post.fetch_add(1, Ordering::Relaxed);
        let data = epoll::EventData::new_u64(name);
        epoll::add(&self.epoll, post.socket(), data, epoll::EventFlags::IN)?;
        self.posts.lock().insert(name, post);
        Ok(name)
    }

    pub(super) fn unwatch(&self, name: u64) {
        if let Some(post) = self.posts.lock().remove(&name) {
            // It was added; that it is gone is all that is wanted.
            let _ = epoll::delete(&self.epoll, post.socket());
        }
    }

    fn hear(&self, post: &Post, on: bool, name: u64) {
        let flags = if on {
            epoll::EventFlags::IN
        } else {
            epoll::EventFlags::empty()
        };
        // Fails for a socket that has just been taken away, and need not be heard.
        let _ = epoll::modify(
            &self.epoll,
            post.socket(),
            epoll::EventData::new_u64(name),
            flags,
        );
    }

    // ---- the thread ---------------------------------------------------------------------------

    fn run(&self) {
        block_signals();
        // The sentinel is woken by this thread's end, which then frees the process's memory: it must not have to wait for that.
        program::ask_for_turns_of(2 * program::TURN);
        let mut held = None;
        let mut nurse = Nurse::new(self);
        let mut deaf: HashMap<u64, Instant> = HashMap::new();
        while !self.stop.load(Ordering::Acquire) {
            if self.wanted.load(Ordering::Acquire) && held.is_none() && !nurse.gave_up {
                match Held::take(&self.memory) {
                    Ok(lock) => held = Some(lock),
                    Err(e) => nurse.give_up(format!("the system has no robust locks: {e}")),
                }
            }
            let now = Instant::now();
            if held.is_some() {
                nurse.tend(now);
            }
            deaf.retain(|&name, until| {
                let over = now >= *until;
                if over && let Some(post) = self.posts.lock().get(&name) {
                    self.hear(post, true, name);
                }
                !over
            });
            let next = deaf.values().copied().chain(nurse.next(now)).min();
            let timeout = next.map(|at| {
                let left = at.saturating_duration_since(now);
                Timespec {
                    tv_sec: left.as_secs() as _,
                    tv_nsec: left.subsec_nanos() as _,
                }
            });
            let mut events = [epoll::Event {
                flags: epoll::EventFlags::empty(),
                data: epoll::EventData::new_u64(0),
            }; 16];
            let n = epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()).unwrap_or(0);
            for event in &events[..n] {
                match event.data.u64() {
                    WAKE => {
                        let mut count = [0; 8];
                        let _ = rustix::io::read(self.wake.as_fd(), &mut count);
                    }
                    ENDED => nurse.ended(),
                    name => {
                        let post = self.posts.lock().get(&name).cloned();
                        if let Some(post) = post
                            && let Next::Deaf(until) = post.deliver(Instant::now())
                        {
                            self.hear(&post, false, name);
                            deaf.insert(name, until);
                        }
                    }
                }
            }
        }
        drop(held);
        nurse.farewell();
        *self.state.lock() = SentinelState::Off;
    }
}

/// Keeps a sentinel alive.
struct Nurse<'a> {
    guardian: &'a Guardian,
    sentinel: Option<(Started, Instant)>,
    short_lives: u32,
    start_at: Option<Instant>,
    started_once: bool,
    gave_up: bool,
}

impl<'a> Nurse<'a> {
    fn new(guardian: &'a Guardian) -> Self {
        Self {
            guardian,
            sentinel: None,
            short_lives: 0,
            start_at: None,
            started_once: false,
            gave_up: false,
        }
    }

    /// Starts a sentinel if there is none, and rings until it has heard.
    fn tend(&mut self, now: Instant) {
        let memory = &self.guardian.memory;
        if self.sentinel.is_some() {
            if memory.ack.load(Ordering::Acquire) != memory.change.load(Ordering::Acquire) {
                wake(&memory.locks[0]);
            }
            return;
        }
        if self.gave_up || self.start_at.is_some_and(|at| now < at) {
            return;
        }
        let Some(file) = memory.file() else {
            // Said when the memory was made.
            self.gave_up = true;
            return;
        };
        memory.ready.store(0, Ordering::Release);
        match spawn::start(&self.guardian.ways, file) {
            Ok(started) => {
                if std::mem::replace(&mut self.started_once, true) {
                    self.guardian.restarts.fetch_add(1, Ordering::Relaxed);
                }
                if let Some(fd) = &started.ended {
                    let data = epoll::EventData::new_u64(ENDED);
                    if let Err(e) =
                        epoll::add(&self.guardian.epoll, fd, data, epoll::EventFlags::IN)
                    {
                        tracing::warn!(target: "connex_rs::sentinel", "the sentinel will not be started again if it is killed: {e}");
                    }
                }
                *self.guardian.state.lock() = SentinelState::Running {
                    pid: started.pid.unsigned_abs(),
                };
                self.sentinel = Some((started, now));
            }
            Err(reason) => self.give_up(reason),
        }
    }

    /// When there is something to do.
    fn next(&self, now: Instant) -> Option<Instant> {
        let memory = &self.guardian.memory;
        match &self.sentinel {
            Some(_) => (memory.ack.load(Ordering::Acquire)
                != memory.change.load(Ordering::Acquire))
            .then(|| now + RING_AGAIN),
            None if self.gave_up => None,
            None => self.start_at,
        }
    }

    /// Somebody ended it.
    fn ended(&mut self) {
        let Some((started, since)) = self.sentinel.take() else {
            return;
        };
        self.bury(&started);
        *self.guardian.state.lock() = SentinelState::Starting;
        let now = Instant::now();
        if now - since >= A_LIFE {
            self.short_lives = 0;
            self.start_at = None;
        } else {
            self.short_lives += 1;
            self.start_at = Some(now + FIRST_PAUSE * (1 << self.short_lives.min(8)));
        }
        if self.short_lives >= MAX_SHORT_LIVES {
            self.give_up(format!(
                "it ended {MAX_SHORT_LIVES} times within {A_LIFE:?} of its start"
            ));
        }
    }

    fn bury(&self, started: &Started) {
        if let Some(fd) = &started.ended {
            // Closing would do, were it not for copies in forked children.
            let _ = epoll::delete(&self.guardian.epoll, fd);
        }
        spawn::reap(started.pid);
    }

    fn give_up(&mut self, reason: String) {
        self.gave_up = true;
        tracing::warn!(
            target: "connex_rs::sentinel",
            "running without a sentinel, so peers learn of the death of this process only when its memory has been freed: {reason}"
        );
        *self.guardian.state.lock() = SentinelState::Unavailable { reason };
    }

    /// The lock is released: the sentinel ends by itself.
    fn farewell(&mut self) {
        let Some((started, _)) = self.sentinel.take() else {
            return;
        };
        if let Some(fd) = &started.ended
            && !ends_within(fd, FAREWELL)
            && rustix::process::pidfd_send_signal(fd, rustix::process::Signal::KILL).is_ok()
        {
            ends_within(fd, FAREWELL);
        }
        self.bury(&started);
    }
}

/// Whether the process of a descriptor ends in time.
fn ends_within(process: &OwnedFd, limit: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    let limit = Timespec {
        tv_sec: limit.as_secs() as _,
        tv_nsec: limit.subsec_nanos() as _,
    };
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    poll(&mut fds, Some(&limit)).is_ok_and(|ready| ready > 0)
}

/// The application's signal handlers have no business on this thread.
fn block_signals() {
    // SAFETY: plain calls on a local set.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
    }
}
