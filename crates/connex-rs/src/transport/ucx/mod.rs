//! The transport over UCX: RDMA, TCP and shared memory.
//!
//! Every frame is one active message, always eager, and its body is cut by the engine so that it stays one fragment
//! ([`Caps::piece`]). Frames of one connection keep their order; both classes are treated alike.
//!
//! Besides frames travel: the greeting of the accepting side (UCX tells the dialling side nothing when a connection
//! stands), the goodbye of a side that closes in order (UCX reports an orderly close and a death alike), and the other side's
//! farewell. The side that closes waits for the farewell: a flush of UCX over shared memory ends before the peer has read,
//! and what the peer has not read when the connection goes is lost.

mod conn;
mod devices;
mod facts;
mod gate;
mod nearby;
mod nudge;
mod obstacles;
mod one_sided;
mod order;
pub mod settings;
mod workers;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::time::Instant;

use connex_ucx::{
    CloseMode, Config, Context, EpId, Event, Features, Library, Listener, Posted, Protocol,
    Receiver, ScopedEnv, Status, Worker,
};
use rustc_hash::FxHashMap;

use self::conn::{Conn, Pieces, State, caps_of};
use self::gate::Gate;
use self::nearby::{Nearby, Said};
use self::nudge::Nudge;
use self::one_sided::Access;
use self::order::Order;
use self::settings::{Facts, Plan, Setting};
use self::workers::{MAIN, WorkerId, Workers};
use super::{
    Body, Caps, Class, Close, ConnId, ConnIds, Frame, Gone, OneSided, Place, Received, Transport,
    Upcalls,
};
use crate::device::Prober;
use crate::region::Lease;

/// The longest body of a frame over TCP, if segments are 256 KB: exactly 256 KB would become two fragments.
pub const TCP_PIECE: usize = 240 << 10;
/// The same in shared memory, with the segments that [`settings`] asks for.
pub const SHM_PIECE: usize = 48 << 10;
/// The same over RDMA, whose fragments are 8 KB: large transfers go one-sided there.
pub const RDMA_PIECE: usize = 8000;
/// What a fragment holds besides the body, generously.
const HEADS: usize = 256;

/// Bulk that a connection may hold unsent before the engine waits with the next piece, in pieces.
const BULK_PIECES: usize = 4;
/// Small frames of data that a connection may hold before the engine waits with the next one.
const URGENT_HELD: usize = 1024;
/// Frames that a connection may hold at all: a peer that asks on and on without reading loses it.
const FRAME_LIMIT: usize = 64 << 10;

/// Kinds of active messages.
mod kind {
    /// A frame: its head is the header, its body the data.
    pub(super) const FRAME: u16 = 11;
    /// The accepting side's first message.
    pub(super) const GREETING: u16 = 12;
    /// Nothing follows; the sender closes in order.
    pub(super) const GOODBYE: u16 = 13;
    /// The goodbye has come, and so has everything before it.
    pub(super) const FAREWELL: u16 = 14;
    // What `nearby` says.
    pub(super) const JOIN: u16 = 15;
    pub(super) const JOINED: u16 = 16;
    pub(super) const HERE: u16 = 17;
    pub(super) const APART: u16 = 18;

    pub(super) const ALL: [u16; 8] = [
        FRAME, GREETING, GOODBYE, FAREWELL, JOIN, JOINED, HERE, APART,
    ];
}

/// Operations whose end is not waited for.
const NO_TOKEN: u64 = 0;

/// What a UCX transport is started with.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where to listen.
    pub listen: SocketAddr,
    /// The address that peers are told: its interface is the one that settings and checks are about.
    pub advertise: IpAddr,
    /// The interface that carries it.
    pub interface: Option<String>,
}

/// The UCX transport of one engine.
pub struct Ucx {
    // The workers go first: when their drop returns, UCX touches no memory that the connections hold.
    workers: Workers,
    gate: Gate,
    local: SocketAddr,
    ids: ConnIds,
    table: Table,
    access: Access,
    order: Order,
    /// Counts the calls of `progress`.
    round: u64,
    plan: Plan,
    pieces: Pieces,
    /// The RDMA devices in use, for people.
    rdma: Option<String>,
    /// Where connections are made over RDMA devices.
    nudge: Option<Nudge>,
    /// The version's word for a reset connection is a time-out (before 1.16).
    timeout_is_reset: bool,
    /// Closed connections that are to be reported.
    gone: Vec<(ConnId, Gone)>,
    /// Those of them that UCX is to end once that was done.
    reported: Vec<ConnId>,
    /// What is left of the way to closed peers of this host: taken down when their end has been reported.
    left: Vec<Nearby>,
}

/// The connections, apart from the worker: message handlers use them while it runs.
#[derive(Default)]
struct Table {
    conns: FxHashMap<ConnId, Conn>,
    by_ep: FxHashMap<(WorkerId, EpId), ConnId>,
    /// What was said about going on in shared memory during this round.
    said: Vec<(ConnId, Said)>,
    /// Connections whose peer broke the rules during this round.
    refused: Vec<(ConnId, String)>,
    /// Connections whose peer said goodbye during this round.
    goodbyes: Vec<ConnId>,
    /// Connections whose goodbye was answered during this round.
    farewells: Vec<ConnId>,
}

impl Table {
    /// The peer broke the rules: nothing else of it is looked at.
    fn refuse(&mut self, id: ConnId, detail: String) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.broken = true;
            self.refused.push((id, detail));
        }
    }
}

impl Ucx {
    /// Loads UCX if that was not done, and listens.
    ///
    /// # Errors
    /// A sentence with the reason and the way out: no UCX, an address that `UCX_NET_DEVICES` excludes, a port that is in
    /// use.
    pub fn listen(options: &Options, ids: ConnIds) -> Result<Self, String> {
        Self::listen_with(options, ids, one_sided::forced())
    }

    fn listen_with(options: &Options, ids: ConnIds, force_one_sided: bool) -> Result<Self, String> {
        let library = Library::load().map_err(|e| e.to_string())?;
        let facts = Facts::gather(library, options.advertise, options.interface.clone());
        let mut plan = settings::plan(&facts)?;
        if force_one_sided {
            // Protocol v1, good for messages alone, cannot put on 1.22.
            plan.settings
                .retain(|setting| setting.variable != "UCX_PROTO_ENABLE");
        }
        for warning in plan.warnings.iter().chain(&plan.obstacles) {
            tracing::warn!(target: "connex_rs::transport", "{warning}");
        }
        let mut access = Access::new(plan.one_sided, force_one_sided);
        access.locked_limit = facts.locked_limit;
        // A context for one-sided access offers peers more than the requested way needs.
        let features = Features {
            rma: access.enabled,
        };
        // UCX's statuses do not say that a device could not be opened or memory not be locked.
        let explained = |text: String| with_obstacles(text, &plan.obstacles);
        let context = |config| Context::new(config, features).map_err(|e| explained(e.to_string()));
        let (config, _environment) = configure(library, &plan.settings)?;
        let main = context(&config)?;
        let share = plan.shared_memory && !force_one_sided;
        let same_host = share.then(|| shared_memory(library, &plan.same_host));
        let mut workers = Workers::new(&main, same_host.flatten()).map_err(explained)?;
        let fd = workers.main().event_fd().map_err(|e| e.to_string())?;
        let listener = bind(workers.main(), options.listen).map_err(explained)?;
        let nudge = plan.one_sided.then(Nudge::new).transpose()?;
        let local = listener.addr();
        let gate = Gate::new(listener, fd)?;
        if let Some(nudge) = &nudge {
            gate.watch_worker(nudge.fd());
        }
        Ok(Self {
            local,
            gate,
            nudge,
            workers,
            ids,
            table: Table::default(),
            access,
            order: Order::of(&facts),
            round: 0,
            pieces: pieces(&facts),
            rdma: plan.one_sided.then(|| facts.allowed_rdma()),
            timeout_is_reset: library.version().minor < 16,
            plan,
            gone: Vec::new(),
            reported: Vec::new(),
            left: Vec::new(),
        })
    }

    /// The settings that were made, with their reasons.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    fn insert(&mut self, id: ConnId, conn: Conn) {
        if let Some(nudge) = &mut self.nudge {
            nudge.start(Instant::now());
        }
        self.table.by_ep.insert((MAIN, conn.ep), id);
        self.table.conns.insert(id, conn);
    }

    /// Hands a frame to UCX.
    fn post(&mut self, id: ConnId, frame: Frame) {
        let Some(conn) = self.table.conns.get_mut(&id) else {
            return;
        };
        // Its end may have been reported: nothing of the caller's memory may be used any more.
        if conn.state == State::Closing {
            return;
        }
        let token = conn.token();
        let Some((endpoint, worker)) = conn.carrier() else {
            return;
        };
        let worker = self.workers.get(worker);
        let Frame { head, body, class } = frame;
        let bytes = body.len();
        let (posted, lease): (_, Option<Lease>) = match body {
            Body::Empty => (
                endpoint.send(
                    worker,
                    kind::FRAME,
                    head.as_slice(),
                    Vec::new(),
                    Protocol::Eager,
                    token,
                ),
                None,
            ),
            Body::Bytes(data) => (
                endpoint.send(
                    worker,
                    kind::FRAME,
                    head.as_slice(),
                    data,
                    Protocol::Eager,
                    token,
                ),
                None,
            ),
            Body::Memory(source) => {
                // SAFETY: the lease keeps the memory; it is held until the operation has ended, or the endpoint is
                // closed, or the worker is gone, which is what `send_from` asks for.
                let posted = unsafe {
                    endpoint.send_from(
                        worker,
                        kind::FRAME,
                        head.as_slice(),
                        source.ptr,
                        source.len,
                        Protocol::Eager,
                        token,
                    )
                };
                (posted, Some(source.lease))
            }
        };
        match posted {
            Ok(Posted::Done) => {}
            Ok(Posted::Pending) => conn.hold(token, lease, class, bytes),
            Err(e) => {
                let detail = e.to_string();
                self.abort(id, Gone::Reset { detail });
            }
        }
    }

    /// Sends a message of our own, without data.
    fn post_note(&mut self, id: ConnId, kind: u16) {
        self.post_bytes(id, kind, Vec::new());
    }

    /// Sends a message of our own.
    fn post_bytes(&mut self, id: ConnId, kind: u16, data: Vec<u8>) {
        let conn = self.table.conns.get(&id);
        let conn = conn.filter(|conn| conn.state != State::Closing);
        let Some((endpoint, worker)) = conn.and_then(Conn::carrier) else {
            return;
        };
        let worker = self.workers.get(worker);
        if let Err(e) = endpoint.send(worker, kind, &[], data, Protocol::Eager, NO_TOKEN) {
            let detail = e.to_string();
            self.abort(id, Gone::Reset { detail });
        }
    }

    /// Closes by force. `why` is reported when UCX is done with it, or at once if there is nothing that UCX could still touch:
    /// closing takes it milliseconds where many connections end together.
    fn abort(&mut self, id: ConnId, why: Gone) {
        let Some(conn) = self.table.conns.get_mut(&id) else {
            return;
        };
        if conn.state == State::Closing {
            return;
        }
        conn.state = State::Closing;
        conn.waiting.clear();
        // One-sided transfers of the peer's reach our memory until the connection is gone.
        if self.access.enabled || conn.frames() > 0 {
            conn.why = Some(why);
            self.close_by_force(id);
        } else {
            self.gone.push((id, why));
            self.reported.push(id);
        }
    }

    /// Has UCX end a connection.
    fn close_by_force(&mut self, id: ConnId) {
        let Some(conn) = self.table.conns.get_mut(&id) else {
            return;
        };
        conn.private = None;
        let nearby = conn.nearby.as_mut();
        let nearby = nearby.and_then(|n| Some((n.worker, n.endpoint.take()?)));
        let first = conn.endpoint.take().map(|endpoint| (MAIN, endpoint));
        for (worker, endpoint) in nearby.into_iter().chain(first) {
            conn.ending += 1;
            // Cannot fail: the endpoint is this worker's.
            let _ = endpoint.close(self.workers.get(worker), CloseMode::Force);
        }
    }

    /// Starts an orderly close of an open connection.
    fn leave(&mut self, id: ConnId) {
        if let Some(conn) = self.table.conns.get_mut(&id)
            && conn.state == State::Open
        {
            conn.state = State::Leaving;
            self.post_note(id, kind::GOODBYE);
        }
    }

    /// Forgets a connection; its end, if that was not reported, is reported by `progress`.
    fn finish(&mut self, id: ConnId) {
        if let Some(mut conn) = self.table.conns.remove(&id) {
            self.table.by_ep.remove(&(MAIN, conn.ep));
            for token in conn.one_sided_left() {
                self.finished(id, token, Err("the connection has ended".to_owned()));
            }
            self.access.forget(id);
            self.left.extend(conn.nearby.take());
            self.gone.extend(conn.why.map(|why| (id, why)));
        }
    }

    fn on_event(&mut self, worker: WorkerId, event: Event, up: &mut dyn Upcalls) {
        match event {
            Event::ConnRequest(request) => self.accept(request, up),
            Event::Completed { ep, token, result } => {
                let Some(&id) = self.table.by_ep.get(&(worker, ep)) else {
                    return;
                };
                let Some(conn) = self.table.conns.get_mut(&id) else {
                    return;
                };
                if let Err(status) = result {
                    // What was lost while the connection stands would be waited for for ever. Its memory is let go, and a
                    // one-sided transfer reported, when the connection has ended.
                    let why = self.why(id, status);
                    return self.abort(id, why);
                }
                if let Some((caller, put)) = conn.release(token) {
                    self.finished(id, caller, Ok(()));
                    if put {
                        self.put_done(id, caller);
                    }
                }
            }
            Event::Failed { ep, status } => {
                let Some(&id) = self.table.by_ep.get(&(worker, ep)) else {
                    return;
                };
                let why = self.why(id, status);
                self.abort(id, why);
            }
            Event::Panicked { ep, message } => {
                let Some(&id) = self.table.by_ep.get(&(worker, ep)) else {
                    return;
                };
                tracing::error!(target: "connex_rs::transport", %message, "a message handler panicked");
                self.abort(
                    id,
                    Gone::Protocol {
                        detail: format!("handling a message failed: {message}"),
                    },
                );
            }
            Event::Closed { ep, .. } => {
                // A connection that drained and was then aborted has been reported already.
                let Some(&id) = self.table.by_ep.get(&(worker, ep)) else {
                    return;
                };
                let Some(conn) = self.table.conns.get_mut(&id) else {
                    return;
                };
                conn.ending -= 1;
                if conn.ending == 0 {
                    self.finish(id);
                }
            }
        }
    }

    fn accept(&mut self, request: connex_ucx::ConnRequest, up: &mut dyn Upcalls) {
        if !self.gate.is_open() {
            // Dropped, it is rejected.
            return;
        }
        if !gate::descriptors_left() {
            return self.gate.pause(self.workers.main(), up);
        }
        let from = request.from();
        let same_host = from.is_some_and(|from| workers::is_own(from.ip()));
        match request.accept(self.workers.main()) {
            Ok(endpoint) => {
                let id = self.ids.next();
                // What the peer must have in common with us to share memory.
                let domain = self.workers.domain().filter(|_| same_host);
                let domain = domain.map_or_else(Vec::new, |d| d.as_bytes().to_vec());
                let state = if domain.is_empty() {
                    State::Open
                } else {
                    State::Agreeing
                };
                let mut conn = Conn::new(endpoint, state, self.unknown_caps());
                conn.same_host = same_host;
                self.insert(id, conn);
                self.keep_private(id);
                if state == State::Open {
                    self.learn_caps(id);
                }
                self.post_bytes(id, kind::GREETING, domain);
                up.accepted(id, from.unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0))));
            }
            Err(e) => {
                tracing::warn!(target: "connex_rs::transport", %e, "a connection could not be accepted");
            }
        }
    }

    fn unknown_caps(&self) -> Caps {
        Caps {
            piece: self.pieces.unknown,
            path: "ucx".to_owned(),
        }
    }

    /// Keeps UCX's socket from children: one that held it would hide our death.
    fn keep_private(&mut self, id: ConnId) {
        let conn = self.table.conns.get_mut(&id);
        let Some(conn) = conn.filter(|conn| conn.private.is_none()) else {
            return;
        };
        let ends = conn
            .endpoint
            .as_ref()
            .and_then(|e| e.addresses(self.workers.main()).ok());
        if let Some((Some(local), Some(remote))) = ends {
            conn.private = gate::socket_between(local, remote).map(gate::keep_from_children);
        }
    }

    /// Finds out what carries the connection.
    fn learn_caps(&mut self, id: ConnId) {
        let Some(conn) = self.table.conns.get_mut(&id) else {
            return;
        };
        let lanes = conn
            .carrier()
            .and_then(|(endpoint, worker)| endpoint.lanes(self.workers.get(worker)).ok())
            .unwrap_or_default();
        conn.by_hardware = lanes.iter().any(one_sided::by_hardware);
        conn.in_order = self.order.holds(&lanes);
        tracing::debug!(
            target: "connex_rs::transport",
            ?lanes,
            in_order = conn.in_order,
            "what carries a connection"
        );
        conn.caps = caps_of(&lanes, self.pieces);
    }

    /// What carries the connection is settled, and does not change any more: what waited goes out.
    fn settled(&mut self, id: ConnId) {
        self.keep_private(id);
        self.learn_caps(id);
        let Some(conn) = self.table.conns.get_mut(&id) else {
            return;
        };
        let (waiting, flush) = (std::mem::take(&mut conn.waiting), conn.flush_when_open);
        for frame in waiting {
            self.post(id, frame);
        }
        if flush {
            self.leave(id);
        }
    }

    /// What a failure of UCX means for a connection.
    fn why(&self, id: ConnId, status: Status) -> Gone {
        let detail = status.to_string();
        let timeout = status.is_timeout() && !self.timeout_is_reset;
        match self.table.conns.get(&id).map(|c| (c.state, c.goodbye)) {
            // Both sides left at the same moment: the farewell was lost in the other's close.
            Some((State::Leaving, true)) => Gone::Local,
            Some((_, true)) => Gone::EndOfStream,
            _ if timeout => Gone::TimedOut { detail },
            Some((State::Dialing, _)) => Gone::Unreachable {
                detail: match &self.rdma {
                    Some(devices) => unreachable_by_rdma(status, devices),
                    None => detail,
                },
            },
            _ => Gone::Reset { detail },
        }
    }
}

/// Gets the messages of one `progress`.
struct Inbox<'a> {
    worker: WorkerId,
    table: &'a mut Table,
    up: &'a mut dyn Upcalls,
}

impl Receiver for Inbox<'_> {
    fn message(&mut self, ep: EpId, id: u16, header: &[u8], data: &[u8]) {
        let Some(&conn_id) = self.table.by_ep.get(&(self.worker, ep)) else {
            return;
        };
        let Some(conn) = self.table.conns.get_mut(&conn_id) else {
            return;
        };
        if !conn.is_alive() {
            return;
        }
        let settled =
            matches!(conn.state, State::Open | State::Leaving) && conn.carried_by() == self.worker;
        let result = match id {
            kind::FRAME if !settled => {
                Err("a frame came before the connection was settled".to_owned())
            }
            kind::FRAME if conn.goodbye => Err("a frame came after the goodbye".to_owned()),
            kind::FRAME => frame(conn_id, header, data, self.up),
            kind::GOODBYE if settled && !conn.goodbye => {
                conn.goodbye = true;
                self.table.goodbyes.push(conn_id);
                Ok(())
            }
            kind::FAREWELL if settled && conn.state == State::Leaving => {
                self.table.farewells.push(conn_id);
                Ok(())
            }
            kind::GOODBYE | kind::FAREWELL => {
                Err("a goodbye or a farewell came out of turn".to_owned())
            }
            other => nearby::hear(conn, self.worker, other, data).map(|said| {
                // What follows in this round counts on it.
                if matches!(said, Said::Here | Said::Apart) {
                    conn.open(conn_id, self.up);
                }
                self.table.said.push((conn_id, said));
            }),
        };
        if let Err(detail) = result {
            self.table.refuse(conn_id, detail);
        }
    }

    fn rendezvous(
        &mut self,
        ep: EpId,
        _: u16,
        _: &[u8],
        len: usize,
    ) -> Option<connex_ucx::Landing> {
        if let Some(&conn) = self.table.by_ep.get(&(self.worker, ep)) {
            let detail = format!("a rendezvous of {len} bytes was offered: frames are eager");
            self.table.refuse(conn, detail);
        }
        None
    }
}

/// Takes one frame to its place.
fn frame(conn: ConnId, head: &[u8], body: &[u8], up: &mut dyn Upcalls) -> Result<(), String> {
    up.heard(conn);
    let received = match up
        .frame(conn, head, body.len())
        .map_err(|refuse| refuse.0)?
    {
        Place::Discard => Received::Discarded,
        Place::Bytes => Received::Bytes(body.to_vec()),
        Place::Memory(target) if target.len == body.len() => {
            // The one copy of the requested way: out of UCX's receive buffer, which is in the cache, to where the bytes
            // belong. Receiving in place would need a rendezvous, which is slower and cannot be cancelled.
            // SAFETY: the lease in the target keeps its memory writable for `len` bytes; the body is UCX's own
            // buffer, so the two do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(body.as_ptr(), target.ptr, body.len()) };
            Received::Placed
        }
        Place::Memory(target) => {
            return Err(format!(
                "a body of {} bytes has a place of {}",
                body.len(),
                target.len
            ));
        }
    };
    up.body(conn, received).map_err(|refuse| refuse.0)
}

impl Transport for Ucx {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn dial(&mut self, to: SocketAddr) -> ConnId {
        let id = self.ids.next();
        match self.workers.main().connect(to, None) {
            Ok(endpoint) => {
                let mut conn = Conn::new(endpoint, State::Dialing, self.unknown_caps());
                conn.same_host = workers::is_own(to.ip());
                self.insert(id, conn);
            }
            Err(e) => {
                let detail = e.to_string();
                self.gone.push((id, Gone::Unreachable { detail }));
            }
        }
        id
    }

    fn send(&mut self, id: ConnId, frame: Frame) {
        let Some(conn) = self.table.conns.get_mut(&id) else {
            return;
        };
        if conn.frames() >= FRAME_LIMIT {
            let detail = format!("{FRAME_LIMIT} frames wait for a peer that does not take them");
            self.abort(id, Gone::Protocol { detail });
            return;
        }
        match conn.state {
            State::Open if conn.endpoint.is_some() && conn.waiting.is_empty() => {
                self.post(id, frame)
            }
            State::Open | State::Dialing | State::Agreeing if !conn.flush_when_open => {
                conn.waiting.push_back(frame)
            }
            _ => {}
        }
    }

    fn room(&self, id: ConnId, class: Class) -> bool {
        let Some(conn) = self.table.conns.get(&id) else {
            return false;
        };
        match class {
            Class::Bulk => conn.bulk() < BULK_PIECES * conn.caps.piece,
            Class::Urgent => conn.frames() < URGENT_HELD,
        }
    }

    fn close(&mut self, id: ConnId, how: Close) {
        let Some(conn) = self.table.conns.get_mut(&id) else {
            return;
        };
        match (how, conn.state) {
            (Close::Flush, State::Dialing | State::Agreeing) => conn.flush_when_open = true,
            (Close::Flush, State::Open) if conn.waiting.is_empty() => self.leave(id),
            // Settled in this round: what waits is sent, then it is closed.
            (Close::Flush, State::Open) => conn.flush_when_open = true,
            (Close::Flush, _) => {}
            (Close::Abort, _) => self.abort(id, Gone::Local),
        }
    }

    fn progress(&mut self, up: &mut dyn Upcalls) -> usize {
        self.round += 1;
        self.gate.look(self.workers.main(), up);
        if let Some(nudge) = &mut self.nudge {
            nudge.look(Instant::now);
        }
        let mut done = self.workers.each(|id, worker| {
            worker.progress(&mut Inbox {
                worker: id,
                table: &mut self.table,
                up,
            })
        });
        for (id, said) in std::mem::take(&mut self.table.said) {
            self.agree(id, said, up);
        }
        for (id, detail) in std::mem::take(&mut self.table.refused) {
            self.abort(id, Gone::Protocol { detail });
        }
        for id in std::mem::take(&mut self.table.goodbyes) {
            self.post_note(id, kind::FAREWELL);
        }
        for id in std::mem::take(&mut self.table.farewells) {
            self.abort(id, Gone::Local);
        }
        while let Some((worker, event)) = self.workers.next_event() {
            done += 1;
            self.on_event(worker, event, up);
        }
        for (id, why) in std::mem::take(&mut self.gone) {
            done += 1;
            up.closed(id, why);
        }
        for id in std::mem::take(&mut self.reported) {
            self.close_by_force(id);
        }
        for nearby in std::mem::take(&mut self.left) {
            self.end_nearby(nearby);
        }
        done
    }

    fn fd(&self) -> RawFd {
        self.gate.fd()
    }

    fn arm(&mut self) -> bool {
        let reported = self.gone.is_empty() && self.access.done.is_empty();
        reported && self.left.is_empty() && self.workers.arm()
    }

    fn caps(&self, id: ConnId) -> Caps {
        self.table
            .conns
            .get(&id)
            .map_or_else(|| self.unknown_caps(), |conn| conn.caps.clone())
    }

    fn stop_listening(&mut self) {
        self.gate.stop();
    }

    fn prober(&self) -> Option<Prober> {
        devices::prober(self.workers.context())
    }

    fn one_sided(&mut self) -> Option<&mut dyn OneSided> {
        if self.access.enabled {
            Some(self)
        } else {
            None
        }
    }
}

/// A configuration of UCX with these settings. What this version's configuration does not take stands in the environment while the
/// guard lives, which must be until the context's workers and listeners are made.
///
/// # Errors
/// A variable or a value that UCX does not take.
#[doc(hidden)]
pub fn configure(
    library: &'static Library,
    settings: &[Setting],
) -> Result<(Config, Option<ScopedEnv>), String> {
    let by_env: Vec<_> = settings.iter().filter(|s| s.key.is_none()).collect();
    let environment = (!by_env.is_empty()).then(|| {
        let pairs = by_env
            .iter()
            .map(|s| (s.variable.as_str(), s.value.as_str()));
        ScopedEnv::set(pairs)
    });
    let mut config = Config::read(library).map_err(|e| e.to_string())?;
    for setting in settings {
        if let Some(key) = &setting.key {
            config.set(key, &setting.value).map_err(|e| e.to_string())?;
        }
    }
    Ok((config, environment))
}

/// A context for peers of this host; `None`, and a warning, where UCX finds no shared memory.
fn shared_memory(library: &'static Library, settings: &[Setting]) -> Option<Context> {
    let context = workers::check_memory()
        .and_then(|()| configure(library, settings))
        .and_then(|(config, _)| {
            Context::new(&config, Features { rma: false }).map_err(|e| e.to_string())
        });
    let warn = |reason: &String| {
        tracing::warn!(
            target: "connex_rs::transport",
            %reason,
            "no shared memory: peers of this host are reached over TCP"
        );
    };
    context.inspect_err(warn).ok()
}

/// Listens. Asked first with a socket of our own, which waits for a busy port, names who holds it, and spares UCX's
/// log lines for each try.
fn bind(worker: &mut Worker, addr: SocketAddr) -> Result<Listener, String> {
    drop(super::tcp::bind(addr)?);
    worker
        .listen(addr)
        .map_err(|e| format!("cannot listen on {addr}: {e}"))
}

/// What the status of a dial means where connections are made through RDMA devices: UCX's words do not tell.
fn unreachable_by_rdma(status: Status, devices: &str) -> String {
    match status {
        Status::IO_ERROR | Status::INVALID_ADDR | Status::NO_DEVICE => format!(
            "{status}: the address could not be resolved to a way over RDMA ({devices}): it must be reachable through the interface of one of \
             these devices (ip route get ADDRESS tells), or be named with UCX_NET_DEVICES"
        ),
        Status::UNREACHABLE | Status::REJECTED => format!(
            "{status}: nobody listens there over RDMA ({devices}): the peer must run, and its address be that of an RDMA device's interface"
        ),
        other => other.to_string(),
    }
}

/// An error with what is known to stand in the way behind it.
fn with_obstacles(error: String, obstacles: &[String]) -> String {
    obstacles
        .iter()
        .fold(error, |text, obstacle| format!("{text}; {obstacle}"))
}

/// The pieces that fit the fragments in use.
fn pieces(facts: &Facts) -> Pieces {
    let of = |name: &str, default: usize, piece: usize| match facts
        .env
        .get(name)
        .map(|v| memory_units(v))
    {
        None => piece,
        // The user's own segments, or UCX's default if we cannot read what they wrote.
        Some(size) => size
            .unwrap_or(default)
            .saturating_sub(HEADS)
            .clamp(1024, piece),
    };
    let tcp = of("UCX_TCP_TX_SEG_SIZE", 8 << 10, TCP_PIECE).min(of(
        "UCX_TCP_RX_SEG_SIZE",
        8 << 10,
        TCP_PIECE,
    ));
    let shared_memory =
        of("UCX_SYSV_SEG_SIZE", 8 << 10, SHM_PIECE).min(of("UCX_MM_SEG_SIZE", 8 << 10, SHM_PIECE));
    // Without a list of lanes only what the settings allow is known.
    let tcp_only = match facts.env.get("UCX_TLS") {
        Some(tls) => tls == "tcp",
        None => facts.rdma.is_empty(),
    };
    let unknown = if facts.version.minor < 14 && tcp_only {
        tcp
    } else {
        RDMA_PIECE.min(tcp)
    };
    Pieces {
        tcp,
        shared_memory,
        other: RDMA_PIECE,
        unknown,
    }
}

/// A size as UCX reads it: `256k`, `8KB`, `1m`, `16384`.
pub(crate) fn memory_units(text: &str) -> Option<usize> {
    let text = text.trim().to_ascii_lowercase();
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let number: usize = text[..digits].parse().ok()?;
    let shift = match text[digits..].trim_end_matches('b') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        _ => return None,
    };
    number.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests;
