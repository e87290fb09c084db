//! The engine's heart: peers, connections and operations, and what they do to each other.
//!
//! The core is driven by one thread at a time and does no I/O. Commands of the application and upcalls
//! of the transport come in; frames to be sent and connections to be opened or closed come out as
//! [`Out`], which the progress loop carries out. One file for each side of the work:
//! [`handshake`] (who is there), [`links`] (a link's life), [`requests`] (what peers ask of us),
//! [`operations`] (what we ask of peers), [`devices`] (GPU memory on either side), [`one_sided`] (where hardware does it), [`letters`] (messages), [`tick`] (time).

mod channels;
mod devices;
mod handshake;
mod letters;
mod links;
pub(crate) mod one_sided;
mod operations;
mod requests;
mod tick;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use self::one_sided::KeyRange;
use crate::channel::{Channels, Inlet, Outlet, Request};
use crate::completion::Completion;
use crate::device::copies::Copies;
use crate::device::{Devices, Residence};
use crate::error::{Error, Result};
use crate::event::{Event, EventKind, EventQueue};
use crate::heartbeat::Heartbeat;
use crate::identity::{Incarnation, LogicalId, PeerUrl};
use crate::inbox::{Credit, Inbox, Owed};
use crate::peer::{LinkId, LinkKey, Peer, Phase, Why};
use crate::region::{Lease, Registry};
use crate::sentinel::{Notice, Seat};
use crate::stats::Counters;
use crate::sync::Mutex;
use crate::transfer::{Deadline, Op, OpId, Work};
use crate::transport::{Body, Class, Close, ConnId, Fence, Frame, KeyId, Source};
use crate::wire::{self, Greeting, Message, MsgPiece};

/// In a goodbye or refusal that names no successor.
const NOBODY: Incarnation = Incarnation {
    start_ns: 0,
    random: 0,
};

/// How long a connect may take, from the dial to the answer of the peer's engine.
pub(crate) const CONNECT_TIMEOUT: u64 = 3_000_000_000;

/// How long a stranger may take to say who it is, and an accepted dialler to confirm.
pub(crate) const HANDSHAKE_TIMEOUT: u64 = 3_000_000_000;

/// How long `disconnect` and `close` go on delivering what was accepted.
pub(crate) const FLUSH_TIME: u64 = 500_000_000;

/// How long a connection that is closed in order may take to say goodbye.
pub(crate) const GOODBYE_TIME: u64 = 300_000_000;

/// Connections that may be open at once without having said who they are.
pub(crate) const MAX_STRANGERS: usize = 512;

/// Peers that are remembered, with a link or without: strangers that come under ever new names do not fill the memory.
pub(crate) const MAX_PEERS: usize = 16 << 10;

/// A transfer of at most this many bytes goes before bulk.
pub(crate) const SMALL: usize = 32 << 10;

/// What the application's threads and the core share.
pub(crate) struct Shared {
    pub(crate) id: Arc<LogicalId>,
    pub(crate) incarnation: Incarnation,
    pub(crate) local_url: String,
    pub(crate) counters: Counters,
    pub(crate) events: EventQueue,
    pub(crate) inbox: Inbox,
    pub(crate) registry: Mutex<Registry>,
    pub(crate) channels: Channels,
    pub(crate) devices: Devices,
    pub(crate) seat: Seat,
    pub(crate) secret: Option<Vec<u8>>,
    /// Interval and timeout in nanoseconds.
    pub(crate) heartbeats: Option<(u64, u64)>,
    /// Says on standard error what happens (`CONNEX_RS_DEBUG=1`).
    pub(crate) debug: bool,
    /// What `stats` tells of peers' paths; renewed as links come and go.
    pub(crate) paths: Mutex<BTreeMap<LogicalId, (String, &'static str)>>,
}

/// Who an operation is for.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// Connects on demand.
    Url(Arc<PeerUrl>),
    /// Must have a live link.
    Id(LogicalId),
    /// The link that the channel is bound to and no other: the addresses are of that life of the peer (I4).
    Channel(Arc<Outlet>),
}

/// What the application wants.
#[derive(Debug)]
pub(crate) enum Command {
    Post {
        id: OpId,
        target: Target,
        work: Work,
        deadline: Deadline,
        completion: Arc<Completion>,
    },
    Connect(Arc<PeerUrl>),
    Disconnect(LogicalId),
    /// End the operation with this error, and whatever could still touch its memory.
    Cancel {
        id: OpId,
        error: Error,
    },
    /// A name has been looked up.
    Resolved {
        peer: LogicalId,
        link: LinkId,
        result: Result<Vec<SocketAddr>, String>,
    },
    /// The application has taken messages.
    Owed(Owed),
    /// A region is to go: give no key of it, and end `completion` when no peer holds one.
    Withdraw {
        addr: usize,
        completion: Arc<Completion>,
    },
    /// A handle of a channel wants something.
    Channel(Request),
    /// A region is to go and these connections still use it.
    Evict {
        conns: Vec<ConnId>,
        addr: usize,
        len: usize,
    },
    /// The sentinel of a link's peer has spoken, with the token of that link.
    Obituary {
        conn: ConnId,
        notice: Notice,
    },
    Close,
}

/// What the progress loop is to do.
#[derive(Debug)]
pub(crate) enum Out {
    Send(ConnId, Frame),
    Dial {
        peer: usize,
        link: LinkId,
        to: SocketAddr,
    },
    /// Look the peer's name up, on another thread.
    Resolve {
        peer: usize,
        link: LinkId,
    },
    Close(ConnId, Close),
    StopListening,
    /// A link is up: what can it do?
    Learn(ConnId),
    /// Register a region with the device and tell the peer its key.
    Export {
        conn: ConnId,
        req: u64,
        base: u64,
        len: u64,
        /// It is GPU memory.
        device: bool,
    },
    /// The device is to forget a region.
    Unexport {
        base: u64,
        completion: Arc<Completion>,
    },
    /// Make a peer's key usable.
    Unpack {
        conn: ConnId,
        req: u64,
        range: KeyRange,
        key: Vec<u8>,
    },
    DropKey(KeyId),
    Get {
        conn: ConnId,
        key: KeyId,
        remote: u64,
        target: crate::transport::Target,
        token: u64,
    },
    Put {
        conn: ConnId,
        key: KeyId,
        remote: u64,
        source: Source,
        token: u64,
    },
    Fence {
        conn: ConnId,
        fence: Fence,
    },
}

/// One peer.
struct PeerEntry {
    id: Arc<LogicalId>,
    machine: Peer,
    /// Where to dial it: what the application said last, else what the peer itself said.
    url: Option<Arc<PeerUrl>>,
    /// Addresses of the present dial that have not been tried.
    addrs: VecDeque<SocketAddr>,
    /// Open connections by their key.
    links: HashMap<LinkKey, ConnId>,
    /// The connection that is up.
    live: Option<ConnId>,
    /// Operations that wait for a link.
    waiting: VecDeque<OpId>,
    /// Messages and signals that wait for credit on the live link, in order.
    letters: VecDeque<OpId>,
    /// `connect` was called for the dial in progress.
    connect_called: bool,
    /// Our dial and when it has taken too long.
    dial: Option<(LinkId, u64)>,
    /// `disconnect` was called: what was accepted is delivered until this time.
    leaving: Option<u64>,
    /// The live link belonged to this incarnation: for `rejoins`.
    joined: bool,
}

impl PeerEntry {
    fn new(me: &LogicalId, id: &LogicalId) -> Self {
        Self {
            id: Arc::new(id.clone()),
            machine: Peer::new(me, id),
            url: None,
            addrs: VecDeque::new(),
            links: HashMap::new(),
            live: None,
            waiting: VecDeque::new(),
            letters: VecDeque::new(),
            connect_called: false,
            dial: None,
            leaving: None,
            joined: false,
        }
    }
}

impl PeerEntry {
    /// Whether nothing but its history would be lost with it.
    fn is_forgettable(&self) -> bool {
        self.machine.phase() == Phase::Idle
            && self.links.is_empty()
            && self.live.is_none()
            && self.waiting.is_empty()
            && self.letters.is_empty()
            && self.dial.is_none()
            && self.leaving.is_none()
    }
}

/// How far the handshake of a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// We dial; nothing is up yet.
    Dialling,
    /// Our hello is out.
    Greeted,
    /// Somebody connected and has not spoken.
    Stranger,
    /// We asked a stranger for a proof of the secret.
    Challenged,
    /// The peer is known; its hello is parked or welcomed.
    Admitted,
    /// Up.
    Live,
    /// Being closed: whatever comes is thrown away.
    Leaving,
}

/// Why this engine closes a connection: kept until the transport has let go of it.
#[derive(Clone, Debug)]
struct Verdict {
    why: Why,
    reason: Option<String>,
}

/// One connection.
struct Conn {
    peer: Option<usize>,
    key: Option<LinkKey>,
    stage: Stage,
    /// When the present stage has taken too long.
    deadline: Option<u64>,
    /// Our nonce, for the proof of the secret.
    nonce: [u8; 16],
    /// A hello that waits for its proof.
    hello: Option<Box<(wire::Greet, Greeting)>>,
    /// The identity that the transport itself has proven.
    subject: Option<String>,
    /// What the frame that is being received is.
    incoming: Option<Incoming>,
    /// What the peer said before it closed.
    farewell: Option<(Why, String)>,
    /// Why we close it.
    verdict: Option<Verdict>,
    /// How operations on it end, once the state machine has released it.
    released: Option<Error>,
    /// Operations started on it.
    ops: FxHashSet<OpId>,
    /// Its life as a link.
    link: Option<Box<Link>>,
    /// Bytes of messages that the peer takes at first.
    window: u64,
    /// The other end: what was dialled, or where the dial came from.
    far: Option<SocketAddr>,
    /// The peer's life, as it said in its greeting.
    life: Option<Incarnation>,
    /// The token that the peer's sentinel has to show.
    issued: Option<[u8; 16]>,
    /// Where our sentinel tells the peer of our death, and the token it shows.
    obituaries: Option<(SocketAddr, [u8; 16])>,
}

/// What a frame in the middle of being received is.
#[derive(Debug)]
enum Incoming {
    /// A handshake frame, goodbye or error: the body is text or fields.
    Text(Message),
    /// A control frame without a body: dealt with already.
    Nothing,
    /// A piece of an answer to us.
    Data {
        op: OpId,
        elem: usize,
        len: usize,
        /// It goes to GPU memory.
        to: Option<devices::Landing>,
    },
    /// A piece of a write of the peer.
    Write {
        req: u64,
        last: bool,
        bytes: u64,
        store: devices::Store,
    },
    /// A piece of a write that is refused.
    Refused { req: u64, last: bool },
    /// A piece of a message.
    Letter(MsgPiece),
}

/// A chain's flag of at most 8 aligned bytes.
#[derive(Debug)]
struct Flag {
    addr: usize,
    #[expect(dead_code, reason = "held for its drop")]
    lease: Lease,
}

/// A live link.
struct Link {
    piece: usize,
    /// Small transfers; go before bulk.
    small: VecDeque<Stream>,
    /// Large transfers, which take turns piece by piece.
    bulk: VecDeque<Stream>,
    /// Reads and writes go one-sided.
    one_sided: bool,
    /// One-sided access reaches GPU memory.
    reaches_devices: bool,
    /// Keys of the peer's regions.
    keys: one_sided::Keys,
    /// In the list of links to be pumped.
    pumped: bool,
    /// Elements of reads asked for and not answered.
    reads_out: usize,
    /// Reads with elements that are still to be asked for.
    reads_waiting: VecDeque<OpId>,
    /// Writes of the peer that were refused and whose end has not come: element, code, sentence.
    refused: HashMap<u64, (u32, i32, String)>,
    credit_out: Credit,
    credit_in: Credit,
    next_seq_out: u64,
    next_seq_in: u64,
    /// Messages that are incomplete or early.
    letters_in: BTreeMap<u64, letters::Partial>,
    heartbeat: Option<Heartbeat>,
    /// When we last sent anything.
    sent: u64,
    /// When data last moved on this link, either way.
    moved: u64,
}

/// A transfer that is being sent piece by piece.
#[derive(Debug)]
enum Stream {
    /// The answer to a read of the peer.
    Answer {
        req: u64,
        elem: u32,
        ptr: usize,
        len: usize,
        sent: usize,
        lease: Lease,
        residence: Option<Residence>,
    },
    /// A write of ours: the operation knows how far it is.
    Write(OpId),
    /// A message of ours.
    Letter {
        seq: u64,
        bytes: Vec<u8>,
        sent: usize,
        signals: Option<OpId>,
    },
}

/// The engine is closing.
#[derive(Clone, Copy, Debug)]
struct Closing {
    /// Delivers until then.
    flush_until: u64,
    /// The goodbyes are out; what is left at this time is cut off.
    abort_at: Option<u64>,
}

/// See the module.
pub(crate) struct Core {
    pub(crate) shared: Arc<Shared>,
    pub(crate) now: u64,
    peers: Vec<PeerEntry>,
    by_id: HashMap<LogicalId, usize>,
    /// Indices of forgotten peers, to be used again.
    free_peers: Vec<usize>,
    /// Where the search for a peer to be forgotten goes on.
    next_forgotten: usize,
    // Their keys are numbers of ours, which no peer chooses.
    conns: FxHashMap<ConnId, Conn>,
    ops: FxHashMap<OpId, Op>,
    timers: BTreeSet<(u64, OpId)>,
    out: Vec<Out>,
    to_pump: Vec<ConnId>,
    /// Completions whose waiters are to be woken once the driver is released.
    woken: Vec<Arc<Completion>>,
    one_sided: one_sided::OneSidedState,
    copies: Copies<devices::Departure, devices::Arrival>,
    /// Rings that are not needed any more, until the device has forgotten them.
    old_rings: Vec<(Arc<Completion>, Arc<Inlet>)>,
    strangers: usize,
    last_stranger_logged: u64,
    /// When peers and connections are to be looked at again.
    next_check: u64,
    closing: Option<Closing>,
    closed: bool,
    /// When data last moved on any link: the progress thread polls for a while after.
    pub(crate) traffic: u64,
}

impl Core {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        let now = crate::clock::now_ns();
        let copies = Copies::new(shared.devices.pool.clone());
        Self {
            shared,
            now,
            peers: Vec::new(),
            by_id: HashMap::new(),
            free_peers: Vec::new(),
            next_forgotten: 0,
            conns: FxHashMap::default(),
            ops: FxHashMap::default(),
            timers: BTreeSet::new(),
            out: Vec::new(),
            to_pump: Vec::new(),
            woken: Vec::new(),
            one_sided: one_sided::OneSidedState::default(),
            copies,
            old_rings: Vec::new(),
            strangers: 0,
            last_stranger_logged: 0,
            next_check: u64::MAX,
            closing: None,
            closed: false,
            traffic: 0,
        }
    }

    /// Whether everything has ended after [`Command::Close`].
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Whether there is something in [`take_woken`](Self::take_woken).
    pub(crate) fn has_woken(&self) -> bool {
        !self.woken.is_empty()
    }

    /// Takes what is to be done.
    pub(crate) fn take_out(&mut self, into: &mut Vec<Out>) {
        into.append(&mut self.out);
    }

    /// Whether there is something in [`take_out`](Self::take_out).
    pub(crate) fn has_out(&self) -> bool {
        !self.out.is_empty()
    }

    /// Takes the completions whose waiters are to be woken.
    pub(crate) fn take_woken(&mut self, into: &mut Vec<Arc<Completion>>) {
        into.append(&mut self.woken);
    }

    /// A command of the application.
    pub(crate) fn command(&mut self, command: Command) {
        match command {
            Command::Post {
                id,
                target,
                work,
                deadline,
                completion,
            } => {
                self.post(id, target, work, deadline, completion);
            }
            Command::Connect(url) => self.connect(url),
            Command::Disconnect(id) => self.disconnect(&id),
            Command::Cancel { id, error } => self.fail_op(
                id,
                error,
                "operation cut short by its caller before any timeout",
            ),
            Command::Resolved { peer, link, result } => self.resolved(&peer, link, result),
            Command::Owed(owed) => self.owed(owed),
            Command::Withdraw { addr, completion } => self.withdraw(addr as u64, completion),
            Command::Channel(request) => self.channel_request(request),
            Command::Evict { conns, addr, len } => self.evict(&conns, addr, len),
            Command::Obituary { conn, notice } => self.obituary(conn, notice),
            Command::Close => self.begin_close(),
        }
    }

    /// A dial that the progress loop has started.
    pub(crate) fn dialled(&mut self, peer: usize, link: LinkId, conn: ConnId, to: SocketAddr) {
        self.shared.counters.eps_created.add_one();
        let key = LinkKey::mine(link);
        let mut entry = Conn::new(Stage::Dialling);
        entry.far = Some(to);
        entry.peer = Some(peer);
        entry.key = Some(key);
        self.conns.insert(conn, entry);
        let peer = &mut self.peers[peer];
        // Given up in the meantime.
        if peer.dial.is_none_or(|(current, _)| current != link) {
            self.out.push(Out::Close(conn, Close::Abort));
            if let Some(entry) = self.conns.get_mut(&conn) {
                entry.released = Some(Error::closed());
            }
            return;
        }
        peer.links.insert(key, conn);
    }

    /// The peer of a dial that is to be started, for its name.
    pub(crate) fn peer_url(&self, peer: usize) -> Option<Arc<PeerUrl>> {
        self.peers[peer].url.clone()
    }

    /// The index of a peer, made if it is new.
    fn peer_index(&mut self, id: &LogicalId) -> usize {
        if let Some(&index) = self.by_id.get(id) {
            return index;
        }
        let entry = PeerEntry::new(&self.shared.id, id);
        let index = match self.free_peers.pop() {
            Some(index) => {
                self.peers[index] = entry;
                index
            }
            None => {
                self.peers.push(entry);
                self.peers.len() - 1
            }
        };
        self.by_id.insert(id.clone(), index);
        index
    }

    /// As [`peer_index`](Self::peer_index) for who knocks. A table that is full of peers makes room by forgetting one
    /// that has neither a link nor work, whoever it is; `None` if there is none.
    fn knocking_peer(&mut self, id: &LogicalId) -> Option<usize> {
        if !self.by_id.contains_key(id) && self.by_id.len() >= MAX_PEERS {
            let count = self.peers.len();
            let idle = (0..count)
                .map(|step| (self.next_forgotten + step) % count)
                .find(|&index| self.peers[index].is_forgettable())?;
            self.next_forgotten = idle + 1;
            self.by_id.remove(&self.peers[idle].id);
            self.free_peers.push(idle);
        }
        Some(self.peer_index(id))
    }

    fn send(&mut self, conn: ConnId, message: &Message) {
        self.send_with(conn, message, Vec::new());
    }

    fn send_with(&mut self, conn: ConnId, message: &Message, body: Vec<u8>) {
        self.send_as(Class::Urgent, conn, message, body);
    }

    /// Sends behind all bulk that is queued: an urgent goodbye would overtake the last messages.
    fn send_last(&mut self, conn: ConnId, message: &Message) {
        self.send_as(Class::Bulk, conn, message, Vec::new());
    }

    fn send_as(&mut self, class: Class, conn: ConnId, message: &Message, body: Vec<u8>) {
        let body = if body.is_empty() {
            Body::Empty
        } else {
            Body::Bytes(body)
        };
        self.out.push(Out::Send(
            conn,
            Frame {
                head: wire::encode(message),
                body,
                class,
            },
        ));
        if let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) {
            link.sent = self.now;
        }
    }

    fn event(&mut self, peer: usize, kind: EventKind) {
        let event = Event {
            peer: (*self.peers[peer].id).clone(),
            ts_ns: crate::clock::now_ns(),
            kind,
        };
        if self.shared.debug {
            debug_line(&format!("event {} {:?}", event.peer, event.kind));
        }
        tracing::debug!(target: "connex_rs::event", peer = %event.peer, kind = ?event.kind);
        let dropped = self.shared.events.push(event);
        self.shared.counters.dropped_events.add(dropped as u64);
    }

    /// Peers and connections are to be looked at no later than at `at`.
    fn check_at(&mut self, at: u64) {
        self.next_check = self.next_check.min(at);
    }

    fn pump_later(&mut self, conn: ConnId) {
        if let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut())
            && !link.pumped
        {
            link.pumped = true;
            self.to_pump.push(conn);
        }
    }

    /// Data moved on a link.
    fn moved(&mut self, conn: ConnId) {
        self.traffic = self.now;
        if let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) {
            link.moved = self.now;
        }
    }
}

impl Conn {
    /// Whether the transport has said what the link can do: before, work waits.
    fn is_ready(&self) -> bool {
        self.link.as_ref().is_some_and(|link| link.piece > 0)
    }

    fn new(stage: Stage) -> Self {
        Self {
            peer: None,
            key: None,
            stage,
            deadline: None,
            nonce: [0; 16],
            hello: None,
            subject: None,
            incoming: None,
            farewell: None,
            verdict: None,
            released: None,
            ops: FxHashSet::default(),
            link: None,
            window: 0,
            far: None,
            life: None,
            issued: None,
            obituaries: None,
        }
    }
}

/// A line of `CONNEX_RS_DEBUG=1`.
#[expect(clippy::print_stderr, reason = "asked for by CONNEX_RS_DEBUG")]
pub(crate) fn debug_line(text: &str) {
    eprintln!("connex-rs: {text}");
}
