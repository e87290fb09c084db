//! The built-in transport: plain TCP sockets, driven by the engine's own loop.
//!
//! Nothing here blocks and there is no thread per connection. Small frames overtake queued bulk;
//! what a connection holds of bulk is bounded through [`Transport::room`].

mod conn;
mod listener;
mod options;
pub(crate) mod tls;

use std::io;
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use rustix::event::epoll;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use self::conn::{Broken, Conn};
use self::options::{hurry_on_host, retransmit_steadily, set_not_sent_low_water};
use crate::fork::Private;

use super::{Caps, Class, Close, ConnId, ConnIds, Frame, Gone, Transport, Upcalls};

pub use self::listener::BIND_RETRY;
pub(in crate::transport) use self::listener::bind;
pub use self::tls::{Tls, TlsFiles, uri_of};

/// The longest body of a frame. Chosen by measurement: below 128 KiB the cost per frame shows,
/// above 512 KiB a piece leaves the cache between the socket and its place (`docs/results.md`).
pub const PIECE: usize = 256 << 10;

/// The hot buffer: one piece with its head.
const HOT: usize = PIECE + 4096;

/// Bulk that a connection may hold unsent before the engine waits with the next piece.
const BULK_HELD: usize = 4 * PIECE;

/// Small frames of data that a connection may hold before the engine waits with the next one.
const URGENT_HELD: usize = 1024;

/// Frames that a connection may hold at all: a peer that asks on and on without reading loses it.
const URGENT_LIMIT: usize = 64 << 10;

/// Connections accepted in one go, so that a storm of them delays nobody.
const ACCEPT_BATCH: usize = 64;

/// Sockets that are looked at in one go.
const READY: usize = 64;

/// How long accepting pauses when no descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long an aborted connection may take to hand its last words to the peer.
const PARTING_TIME: Duration = Duration::from_millis(300);

/// Aborted connections that may do so at a time.
const MAX_PARTING: usize = 64;

/// The kernel is asked who has something at least every so many rounds: asking costs as much as trying the talker.
const ASK_EVERY: u32 = 4;

const LISTENER: u64 = 0;
const TIMER: u64 = u64::MAX;

/// Kernel time-outs that follow the heartbeat settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Liveness {
    /// Time between heartbeats.
    pub interval: Duration,
    /// Silence after which a peer is suspected.
    pub timeout: Duration,
}

/// The TCP transport of one engine.
pub struct Tcp {
    ids: ConnIds,
    listener: Option<(Private, TcpListener)>,
    local: SocketAddr,
    epoll: OwnedFd,
    timer: OwnedFd,
    /// When the timer is to ring next.
    rings: Option<Instant>,
    accepting: bool,
    liveness: Option<Liveness>,
    tls: Option<Tls>,
    slots: FxHashMap<ConnId, Slot>,
    /// How many of them are [`State::Parting`].
    parting: usize,
    /// Connections with frames queued since the last flush.
    dirty: Vec<ConnId>,
    /// The connection that spoke last: tried before the kernel is asked who has something.
    talker: Option<ConnId>,
    /// Calls of `progress` so far.
    rounds: u32,
    /// Connections that are closed, to be reported.
    gone: Vec<(ConnId, Gone)>,
    hot: Box<[u8]>,
}

struct Slot {
    conn: Conn,
    state: State,
    /// What the kernel watches for us.
    watched: epoll::EventFlags,
    dirty: bool,
    /// The system reports an error once, to whichever call comes first: kept for the end that the reading
    /// side finds.
    send_error: Option<Gone>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Connecting,
    /// Connected; the TLS handshake of our dial is under way.
    Securing,
    Open,
    /// Sends what is queued, then ends its stream.
    Flushing,
    /// Has ended its stream and waits for the peer to do so: closing earlier could reset the
    /// connection and take what the peer has not read yet.
    Draining,
    /// Reported as closed: gets a goodbye out until then, so that the peer does not take the end for a death. Uses no
    /// memory but its own.
    Parting {
        until: Instant,
    },
}

impl Tcp {
    /// Listens on `addr`.
    ///
    /// # Errors
    /// A sentence that names the address and the reason.
    pub fn listen(
        addr: SocketAddr,
        liveness: Option<Liveness>,
        tls: Option<Tls>,
        ids: ConnIds,
    ) -> Result<Self, String> {
        let listener = listener::bind(addr)?;
        let private = Private::new(listener.as_raw_fd());
        let local = listener
            .local_addr()
            .map_err(|e| format!("cannot read the bound address: {e}"))?;
        let system = |what: &'static str| move |e: rustix::io::Errno| format!("{what}: {e}");
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(system("cannot make an epoll descriptor"))?;
        let timer = rustix::time::timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )
        .map_err(system("cannot make a timer descriptor"))?;
        epoll::add(
            &epoll,
            &listener,
            epoll::EventData::new_u64(LISTENER),
            epoll::EventFlags::IN,
        )
        .map_err(system("cannot watch the listener"))?;
        epoll::add(
            &epoll,
            &timer,
            epoll::EventData::new_u64(TIMER),
            epoll::EventFlags::IN,
        )
        .map_err(system("cannot watch the timer"))?;
        Ok(Self {
            ids,
            listener: Some((private, listener)),
            local,
            epoll,
            timer,
            rings: None,
            parting: 0,
            accepting: true,
            liveness,
            tls,
            slots: FxHashMap::default(),
            dirty: Vec::new(),
            talker: None,
            rounds: 0,
            gone: Vec::new(),
            hot: vec![0; HOT].into_boxed_slice(),
        })
    }

    fn insert(
        &mut self,
        id: ConnId,
        socket: Socket,
        state: State,
        watched: epoll::EventFlags,
    ) -> io::Result<()> {
        epoll::add(
            &self.epoll,
            &socket,
            epoll::EventData::new_u64(id.0),
            watched,
        )?;
        self.slots.insert(
            id,
            Slot {
                conn: Conn::new(id, socket),
                state,
                watched,
                dirty: false,
                send_error: None,
            },
        );
        Ok(())
    }

    fn prepare(&self, socket: &Socket) -> io::Result<()> {
        socket.set_nonblocking(true)?;
        socket.set_tcp_nodelay(true)?;
        set_not_sent_low_water(socket)?;
        if let Some(liveness) = self.liveness {
            retransmit_steadily(socket, liveness.interval);
            socket.set_tcp_user_timeout(Some(liveness.timeout))?;
            let second = Duration::from_secs(1);
            socket.set_tcp_keepalive(
                &TcpKeepalive::new()
                    .with_time(liveness.interval.max(second))
                    .with_interval(liveness.interval.max(second)),
            )?;
        }
        Ok(())
    }

    fn start_dial(&mut self, id: ConnId, to: SocketAddr) -> io::Result<()> {
        let socket = Socket::new(
            Domain::for_address(to),
            Type::STREAM.nonblocking().cloexec(),
            Some(Protocol::TCP),
        )?;
        self.prepare(&socket)?;
        match socket.connect(&to.into()) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(e) => return Err(e),
        }
        hurry_on_host(&socket, to);
        self.insert(id, socket, State::Connecting, epoll::EventFlags::OUT)
    }

    fn accept(&mut self, up: &mut dyn Upcalls) -> usize {
        let mut n = 0;
        while n < ACCEPT_BATCH {
            let Some((_, listener)) = &self.listener else {
                break;
            };
            match SockRef::from(listener).accept() {
                Ok((socket, from)) => {
                    n += 1;
                    let Some(from) = from.as_socket() else {
                        continue;
                    };
                    hurry_on_host(&socket, from);
                    let id = self.ids.next();
                    // A connection that is reset before it is set up is no error of ours.
                    if self.prepare(&socket).is_ok()
                        && self
                            .insert(id, socket, State::Open, epoll::EventFlags::IN)
                            .is_ok()
                        && self.secure(id, Tls::accept)
                    {
                        up.accepted(id, from);
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if is_connection_error(&e) => n += 1,
                Err(e) => {
                    self.pause_accepting(&e);
                    up.backed_off();
                    break;
                }
            }
        }
        n
    }

    /// No descriptor or memory is left: accepting stops for a while instead of spinning.
    fn pause_accepting(&mut self, why: &io::Error) {
        tracing::warn!(target: "connex_rs::transport", %why, "accept: pausing for {ACCEPT_PAUSE:?}");
        self.watch_listener(false);
        self.ring_in(ACCEPT_PAUSE);
    }

    /// Sees to it that the timer rings no later than that.
    fn ring_in(&mut self, time: Duration) {
        let at = Instant::now() + time;
        if self.rings.is_some_and(|rings| rings <= at) {
            return;
        }
        self.rings = Some(at);
        let spec = Itimerspec {
            it_interval: Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: Timespec {
                tv_sec: time.as_secs() as _,
                tv_nsec: time.subsec_nanos() as _,
            },
        };
        // Cannot fail: the descriptor is a timer and the value is in range.
        let _ = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec);
    }

    /// The timer rang.
    fn rang(&mut self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.timer, &mut count);
        self.rings = None;
        self.watch_listener(true);
        let now = Instant::now();
        let mut next = None;
        let mut late = Vec::new();
        for (&id, slot) in &self.slots {
            match slot.state {
                State::Parting { until } if until <= now => late.push(id),
                State::Parting { until } => {
                    next = Some(next.map_or(until, |n: Instant| n.min(until)))
                }
                _ => {}
            }
        }
        for id in late {
            self.forget(id);
        }
        if let Some(next) = next {
            self.ring_in(next - now);
        }
    }

    /// Aborts a connection. What the peer is still to hear goes out behind its back, for a bounded time.
    fn abort(&mut self, id: ConnId) {
        let Some(slot) = self.slots.get_mut(&id) else {
            return;
        };
        let open = matches!(slot.state, State::Open);
        if !open
            || self.parting >= MAX_PARTING
            || slot.conn.part().is_err()
            || !slot.conn.is_unsent()
        {
            return self.end(id, Gone::Local);
        }
        let until = Instant::now() + PARTING_TIME;
        slot.state = State::Parting { until };
        if self.talker == Some(id) {
            self.talker = None;
        }
        self.parting += 1;
        self.gone.push((id, Gone::Local));
        self.ring_in(PARTING_TIME);
        self.go_on_parting(id);
    }

    /// A connection in [`State::Parting`] can go on.
    fn go_on_parting(&mut self, id: ConnId) -> usize {
        let Some(slot) = self.slots.get_mut(&id) else {
            return 0;
        };
        let more = slot.conn.discard(&mut self.hot);
        match slot.conn.flush(&mut 0) {
            Ok(_) if !more => self.forget(id),
            Ok(true) => {
                let _ = slot.conn.socket().shutdown(std::net::Shutdown::Write);
                self.watch(id, epoll::EventFlags::IN);
            }
            Ok(false) => self.watch(id, epoll::EventFlags::IN | epoll::EventFlags::OUT),
            Err(_) => self.forget(id),
        }
        1
    }

    /// Closes a connection of which nobody is to be told any more.
    fn forget(&mut self, id: ConnId) {
        if let Some(slot) = self.slots.remove(&id) {
            self.parting -= 1;
            let _ = epoll::delete(&self.epoll, slot.conn.socket());
        }
    }

    fn watch_listener(&mut self, on: bool) {
        let Some((_, listener)) = &self.listener else {
            return;
        };
        if on == self.accepting {
            return;
        }
        let flags = if on {
            epoll::EventFlags::IN
        } else {
            epoll::EventFlags::empty()
        };
        if epoll::modify(
            &self.epoll,
            listener,
            epoll::EventData::new_u64(LISTENER),
            flags,
        )
        .is_ok()
        {
            self.accepting = on;
        }
    }

    /// Ends a connection here and now; `closed` is reported by `progress`.
    fn end(&mut self, id: ConnId, why: Gone) {
        if let Some(mut slot) = self.slots.remove(&id) {
            slot.conn.drop_memory();
            let _ = epoll::delete(&self.epoll, slot.conn.socket());
            // Said to the peer even if somebody else still holds the descriptor.
            let _ = slot.conn.socket().shutdown(std::net::Shutdown::Both);
            self.gone.push((id, why));
        }
    }

    fn end_broken(&mut self, id: ConnId, broken: Broken) {
        let Some(slot) = self.slots.get_mut(&id) else {
            return;
        };
        let why = match broken {
            _ if slot.state == State::Draining => Gone::Local,
            Broken::End => slot.send_error.take().unwrap_or(Gone::EndOfStream),
            Broken::Io(e) => gone_of(&e),
            Broken::Protocol(detail) => Gone::Protocol { detail },
        };
        self.end(id, why);
    }

    fn watch(&mut self, id: ConnId, flags: epoll::EventFlags) {
        let Some(slot) = self.slots.get_mut(&id) else {
            return;
        };
        if slot.watched != flags
            && epoll::modify(
                &self.epoll,
                slot.conn.socket(),
                epoll::EventData::new_u64(id.0),
                flags,
            )
            .is_ok()
        {
            slot.watched = flags;
        }
    }

    fn flush_dirty(&mut self) -> usize {
        let mut moved = 0;
        let mut dirty = std::mem::take(&mut self.dirty);
        for id in dirty.drain(..) {
            if let Some(slot) = self.slots.get_mut(&id) {
                slot.dirty = false;
                moved += self.flush(id);
                // Whom we spoke to is the most likely to speak next.
                if self.slots.get(&id).is_some_and(|s| s.state == State::Open) {
                    self.talker = Some(id);
                }
            }
        }
        // The list keeps its memory.
        dirty.append(&mut self.dirty);
        self.dirty = dirty;
        moved
    }

    fn flush(&mut self, id: ConnId) -> usize {
        let Some(slot) = self.slots.get_mut(&id) else {
            return 0;
        };
        if !matches!(slot.state, State::Securing | State::Open | State::Flushing) {
            return 0;
        }
        let mut sent = 0;
        match slot.conn.flush(&mut sent) {
            Ok(true) => {
                if slot.state == State::Flushing {
                    slot.state = State::Draining;
                    let _ = slot.conn.socket().shutdown(std::net::Shutdown::Write);
                }
                self.watch(id, epoll::EventFlags::IN);
            }
            Ok(false) => self.watch(id, epoll::EventFlags::IN | epoll::EventFlags::OUT),
            Err(e) => {
                // The peer's last words may still lie in the receive buffer: leave the end to the
                // reading side, which meets the same error after them.
                tracing::debug!(target: "connex_rs::transport", %e, "send failed");
                if let Some(slot) = self.slots.get_mut(&id) {
                    slot.conn.drop_memory_to_send();
                    slot.send_error = Some(gone_of(&e));
                }
                self.watch(id, epoll::EventFlags::IN);
                if e.raw_os_error() == Some(libc::EFAULT) {
                    let detail = "local memory of a transfer is not mapped".to_owned();
                    self.end(id, Gone::Protocol { detail });
                }
            }
        }
        sent as usize
    }

    fn receive(&mut self, id: ConnId, up: &mut dyn Upcalls) -> usize {
        let Some(slot) = self.slots.get_mut(&id) else {
            return 0;
        };
        match slot.conn.receive(&mut self.hot, up) {
            Ok(0) => self.secured(id, up),
            Ok(n) => {
                self.talker = Some(id);
                n + self.secured(id, up)
            }
            Err((n, broken)) => {
                self.end_broken(id, broken);
                n + 1
            }
        }
    }

    /// Starts TLS on a connection, if the engine has it; false if that failed.
    fn secure(
        &mut self,
        id: ConnId,
        begin: fn(&Tls) -> Result<tls::Session, rustls::Error>,
    ) -> bool {
        let (Some(tls), Some(slot)) = (&self.tls, self.slots.get_mut(&id)) else {
            return true;
        };
        match begin(tls) {
            Ok(session) => slot.conn.secure(session),
            Err(e) => {
                tracing::warn!(target: "connex_rs::transport", %e, "TLS");
                return false;
            }
        }
        true
    }

    /// A dial whose TLS handshake is done is connected.
    fn secured(&mut self, id: ConnId, up: &mut dyn Upcalls) -> usize {
        let Some(slot) = self.slots.get_mut(&id) else {
            return 0;
        };
        if slot.state != State::Securing || !slot.conn.is_open() {
            return 0;
        }
        slot.state = State::Open;
        self.flush(id);
        up.connected(id);
        1
    }

    fn finish_dial(&mut self, id: ConnId, up: &mut dyn Upcalls) {
        let Some(slot) = self.slots.get_mut(&id) else {
            return;
        };
        match slot.conn.socket().take_error() {
            Ok(None) => {
                if self.tls.is_some() {
                    slot.state = State::Securing;
                    if self.secure(id, Tls::dial) {
                        self.flush(id);
                    } else {
                        let detail = "a TLS session cannot be started".to_owned();
                        self.end(id, Gone::Unreachable { detail });
                    }
                    return;
                }
                slot.state = State::Open;
                self.watch(id, epoll::EventFlags::IN);
                up.connected(id);
            }
            Ok(Some(e)) | Err(e) => {
                let why = match gone_of(&e) {
                    timed_out @ Gone::TimedOut { .. }
                        if e.raw_os_error() == Some(libc::ETIMEDOUT) =>
                    {
                        timed_out
                    }
                    _ => Gone::Unreachable {
                        detail: e.to_string(),
                    },
                };
                self.end(id, why);
            }
        }
    }

    fn handle(&mut self, event: epoll::Event, up: &mut dyn Upcalls) -> usize {
        let flags = event.flags;
        match event.data.u64() {
            LISTENER => self.accept(up),
            TIMER => {
                self.rang();
                1
            }
            id => {
                let id = ConnId(id);
                let Some(slot) = self.slots.get(&id) else {
                    return 0;
                };
                match slot.state {
                    State::Connecting => {
                        self.finish_dial(id, up);
                        return 1;
                    }
                    State::Parting { .. } => return self.go_on_parting(id),
                    _ => {}
                }
                let mut n = 0;
                if flags.contains(epoll::EventFlags::OUT) {
                    n += self.flush(id);
                }
                if flags.intersects(
                    epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR,
                ) {
                    n += self.receive(id, up);
                }
                n
            }
        }
    }

    fn report_gone(&mut self, up: &mut dyn Upcalls) -> usize {
        let mut n = 0;
        for (id, why) in std::mem::take(&mut self.gone) {
            if self.talker == Some(id) {
                self.talker = None;
            }
            up.closed(id, why);
            n += 1;
        }
        n
    }
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn dial(&mut self, to: SocketAddr) -> ConnId {
        let id = self.ids.next();
        if let Err(e) = self.start_dial(id, to) {
            self.gone.push((
                id,
                Gone::Unreachable {
                    detail: e.to_string(),
                },
            ));
        }
        id
    }

    fn send(&mut self, conn: ConnId, frame: Frame) {
        let Some(slot) = self.slots.get_mut(&conn) else {
            return;
        };
        if !matches!(slot.state, State::Open | State::Connecting) {
            return;
        }
        if slot.conn.urgent_frames() >= URGENT_LIMIT {
            let detail = format!("{URGENT_LIMIT} answers wait: the peer asks and does not read");
            return self.end(conn, Gone::Protocol { detail });
        }
        slot.conn.queue(frame);
        if !slot.dirty {
            slot.dirty = true;
            self.dirty.push(conn);
        }
    }

    fn room(&self, conn: ConnId, class: Class) -> bool {
        self.slots.get(&conn).is_some_and(|slot| match class {
            Class::Urgent => slot.conn.urgent_frames() < URGENT_HELD,
            Class::Bulk => slot.conn.bulk_bytes() < BULK_HELD,
        })
    }

    fn close(&mut self, conn: ConnId, how: Close) {
        let Some(slot) = self.slots.get_mut(&conn) else {
            return;
        };
        match how {
            _ if matches!(slot.state, State::Parting { .. }) => {}
            Close::Flush if slot.state == State::Open => {
                slot.state = State::Flushing;
                self.flush(conn);
            }
            Close::Flush if slot.state != State::Connecting => {}
            _ => {
                self.abort(conn);
            }
        }
    }

    fn progress(&mut self, up: &mut dyn Upcalls) -> usize {
        let mut n = self.flush_dirty();
        if let Some(talker) = self.talker {
            n += self.receive(talker, up);
        }
        // A talker that never stops must not hide the others.
        self.rounds = self.rounds.wrapping_add(1);
        if self.talker.is_none() || self.rounds.is_multiple_of(ASK_EVERY) {
            let mut ready = [const { MaybeUninit::uninit() }; READY];
            let zero = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            if let Ok((events, _)) = epoll::wait(&self.epoll, &mut ready[..], Some(&zero)) {
                for event in events {
                    n += self.handle(*event, up);
                }
            }
        }
        n + self.report_gone(up)
    }

    fn fd(&self) -> RawFd {
        self.epoll.as_fd().as_raw_fd()
    }

    fn arm(&mut self) -> bool {
        // Whoever wakes up asks first.
        self.rounds = u32::MAX;
        self.dirty.is_empty() && self.gone.is_empty()
    }

    fn caps(&self, _conn: ConnId) -> Caps {
        Caps {
            piece: PIECE,
            path: "tcp".into(),
        }
    }

    fn stop_listening(&mut self) {
        if let Some((private, listener)) = self.listener.take() {
            drop(private);
            let _ = epoll::delete(&self.epoll, &listener);
        }
    }
}

/// Errors that accept passes on from the connection and that say nothing of the listener.
fn is_connection_error(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(
            libc::ECONNABORTED
                | libc::EPROTO
                | libc::ENOPROTOOPT
                | libc::EHOSTDOWN
                | libc::ENONET
                | libc::EHOSTUNREACH
                | libc::EOPNOTSUPP
                | libc::ENETUNREACH
                | libc::ENETDOWN
        )
    )
}

/// What an error on an established connection means: a reset is a death; what only says that the path
/// is silent or gone is a suspicion.
fn gone_of(e: &io::Error) -> Gone {
    let detail = e.to_string();
    match e.raw_os_error() {
        Some(
            libc::ETIMEDOUT
            | libc::EHOSTUNREACH
            | libc::ENETUNREACH
            | libc::ENETDOWN
            | libc::EHOSTDOWN,
        ) => Gone::TimedOut { detail },
        _ => Gone::Reset { detail },
    }
}
