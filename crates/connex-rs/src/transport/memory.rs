//! A transport inside one process, for tests: deterministic, without sockets, with one-sided access.
//!
//! A [`Network`] joins the endpoints made from it. What one endpoint sends lies in the other's queue until
//! that one is driven; nothing is lost or reordered unless a connection is [cut](Network::cut). One-sided access
//! touches the memory of the same process directly, under keys that the owner can take back: using a dead key is
//! counted, so that a test can tell that nobody does (I4). Puts travel in one of several [`Ways`], with and without order; as on
//! a reliable connection of RDMA, one that fails ends the connection, and nothing posted behind it on the same lane is placed.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use super::{
    Body, Caps, Class, Close, ConnId, ConnIds, Fence, Frame, Gone, Head, KeyId, OneSided,
    OneSidedDone, Place, Received, Refuse, Source, Target, Transport, Upcalls,
};
use crate::sync::Mutex;

/// The longest body of a frame: small, so that tests see many pieces.
const PIECE: usize = 16 << 10;

/// How the puts of an endpoint travel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Ways {
    /// They are in place when they have been posted.
    #[default]
    None,
    /// One lane, which keeps the order of posting. One put arrives in each round.
    One,
    /// Lanes that do not order each other: of what is under way the last posted arrives first. What was overtaken by a put
    /// behind a fence arrives only when the test [lets it go](Network::let_go).
    Many,
    /// As `Many`, and said to keep the order: a fault for tests to find.
    ManySaidToBeOne,
}

/// Joins endpoints of one process.
#[derive(Clone, Default)]
pub struct Network(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    /// By address.
    nodes: HashMap<SocketAddr, Node>,
    next_port: u16,
    next_key: u64,
    /// Live keys: the range that each opens.
    keys: HashMap<u64, (usize, usize)>,
    dead_key_uses: u64,
    /// Where a put fails.
    faults: HashSet<u64>,
    /// What was overtaken may arrive.
    let_go: bool,
    followed: u64,
    waited: u64,
}

/// What waits for one endpoint.
struct Node {
    inbox: VecDeque<Letter>,
    wake: Arc<OwnedFd>,
    listening: bool,
}

/// Names a connection at its two ends.
type End = (SocketAddr, ConnId);

enum Letter {
    Dialled {
        from: End,
        mine: ConnId,
    },
    Accepted {
        mine: ConnId,
        from: End,
    },
    Refused {
        mine: ConnId,
    },
    Frame {
        mine: ConnId,
        head: Head,
        body: Vec<u8>,
    },
    Closed {
        mine: ConnId,
    },
}

impl Network {
    /// A new endpoint.
    ///
    /// # Panics
    /// If the system has no descriptor left.
    pub fn endpoint(&self, ids: ConnIds) -> Memory {
        self.endpoint_with(ids, Ways::default())
    }

    /// A new endpoint whose puts travel like this.
    ///
    /// # Panics
    /// As for `endpoint`.
    pub fn endpoint_with(&self, ids: ConnIds, ways: Ways) -> Memory {
        let wake = Arc::new(
            eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("a descriptor"),
        );
        let mut inner = self.0.lock();
        inner.next_port += 1;
        let local = SocketAddr::from(([127, 0, 0, 1], inner.next_port));
        let node = Node {
            inbox: VecDeque::new(),
            wake: wake.clone(),
            listening: true,
        };
        inner.nodes.insert(local, node);
        drop(inner);
        Memory {
            network: self.clone(),
            ids,
            local,
            wake,
            ends: HashMap::new(),
            gone: Vec::new(),
            ways,
            puts: HashMap::new(),
            keys: HashMap::new(),
            exported: HashMap::new(),
            done: Vec::new(),
        }
    }

    /// Breaks every connection of an endpoint, as the death of its process would.
    pub fn cut(&self, endpoint: SocketAddr) {
        let mut inner = self.0.lock();
        if let Some(node) = inner.nodes.get_mut(&endpoint) {
            node.listening = false;
        }
        let others: Vec<SocketAddr> = inner
            .nodes
            .keys()
            .copied()
            .filter(|a| *a != endpoint)
            .collect();
        for other in others {
            inner.post(
                other,
                Letter::Closed {
                    mine: ConnId(u64::from(endpoint.port()) | CUT),
                },
            );
        }
    }

    /// Every put that begins at this address fails from now on.
    pub fn fail_puts_at(&self, remote: u64) {
        self.0.lock().faults.insert(remote);
    }

    /// Lets what was overtaken arrive, from now on.
    pub fn let_go(&self) {
        let mut inner = self.0.lock();
        inner.let_go = true;
        for node in inner.nodes.values() {
            let _ = rustix::io::write(&node.wake, &1u64.to_ne_bytes());
        }
    }

    /// How many fences stood between puts without a wait, and how many waited for the puts before them.
    pub fn fences(&self) -> (u64, u64) {
        let inner = self.0.lock();
        (inner.followed, inner.waited)
    }

    /// How often a key was used that its owner had taken back.
    pub fn dead_key_uses(&self) -> u64 {
        self.0.lock().dead_key_uses
    }
}

/// Marks a letter that closes all connections to a port.
const CUT: u64 = 1 << 63;

impl Inner {
    fn post(&mut self, to: SocketAddr, letter: Letter) {
        if let Some(node) = self.nodes.get_mut(&to) {
            node.inbox.push_back(letter);
            let _ = rustix::io::write(&node.wake, &1u64.to_ne_bytes());
        }
    }
}

/// One endpoint.
pub struct Memory {
    network: Network,
    ids: ConnIds,
    local: SocketAddr,
    wake: Arc<OwnedFd>,
    /// The other end of each connection, once it is known.
    ends: HashMap<ConnId, Option<End>>,
    gone: Vec<(ConnId, Gone)>,
    ways: Ways,
    puts: HashMap<ConnId, Puts>,
    keys: HashMap<KeyId, u64>,
    exported: HashMap<usize, u64>,
    done: Vec<OneSidedDone>,
}

/// The puts of one connection.
#[derive(Default)]
struct Puts {
    under_way: VecDeque<Put>,
    /// Behind a fence that waits; `None` is the fence.
    waiting: VecDeque<Option<Put>>,
    /// Fences so far.
    fences: u64,
}

struct Put {
    key: KeyId,
    remote: u64,
    source: Source,
    token: u64,
    /// Fences before it.
    fences: u64,
    overtaken: bool,
}

impl Puts {
    /// Posts what no fence holds back any more.
    fn advance(&mut self) {
        while let Some(next) = self.waiting.pop_front() {
            match next {
                None if !self.under_way.is_empty() => return self.waiting.push_front(None),
                None => {}
                Some(put) => self.under_way.push_back(put),
            }
        }
    }

    /// The next that arrives.
    fn next(&mut self, ways: Ways, let_go: bool) -> Option<Put> {
        if matches!(ways, Ways::None | Ways::One) {
            return self.under_way.pop_front();
        }
        self.under_way
            .back()
            .filter(|put| !put.overtaken || let_go)?;
        let put = self.under_way.pop_back()?;
        for other in &mut self.under_way {
            other.overtaken |= other.fences < put.fences;
        }
        Some(put)
    }

    /// Nothing can arrive.
    fn is_still(&self, let_go: bool) -> bool {
        self.under_way
            .back()
            .is_none_or(|put| put.overtaken && !let_go)
    }
}

impl Memory {
    /// Lets one put of each connection arrive.
    fn arrivals(&mut self) -> usize {
        let let_go = self.network.0.lock().let_go;
        let conns: Vec<ConnId> = self.puts.keys().copied().collect();
        let mut count = 0;
        for conn in conns {
            let Some(puts) = self.puts.get_mut(&conn) else {
                continue;
            };
            if let Some(put) = puts.next(self.ways, let_go) {
                count += 1;
                self.arrive(conn, put);
            }
            if let Some(puts) = self.puts.get_mut(&conn) {
                puts.advance();
            }
        }
        count
    }

    /// A put reaches the peer's memory, or does not.
    fn arrive(&mut self, conn: ConnId, put: Put) {
        let Put {
            remote,
            source,
            token,
            ..
        } = put;
        let faulty = self.network.0.lock().faults.contains(&remote);
        let result = if faulty {
            Err("as the test asked".to_owned())
        } else {
            self.opens(put.key, remote, source.len)
        };
        if result.is_ok() {
            // SAFETY: as in `get`, the other way round.
            unsafe { std::ptr::copy(source.ptr, remote as *mut u8, source.len) };
        }
        let failed = result.as_ref().err().cloned();
        self.done.push(OneSidedDone {
            conn,
            token,
            result,
        });
        if let Some(detail) = failed {
            self.hang_up(conn);
            self.lost(conn, Gone::Reset { detail });
        }
    }

    fn take(&mut self, letter: Letter, up: &mut dyn Upcalls) {
        match letter {
            Letter::Dialled { from, mine } => {
                let id = self.ids.next();
                self.ends.insert(id, Some(from));
                self.network.0.lock().post(
                    from.0,
                    Letter::Accepted {
                        mine,
                        from: (self.local, id),
                    },
                );
                up.accepted(id, from.0);
            }
            Letter::Accepted { mine, from } => match self.ends.get_mut(&mine) {
                Some(end) => {
                    *end = Some(from);
                    up.connected(mine);
                }
                None => self
                    .network
                    .0
                    .lock()
                    .post(from.0, Letter::Closed { mine: from.1 }),
            },
            Letter::Refused { mine } => self.lost(
                mine,
                Gone::Unreachable {
                    detail: "nobody listens".into(),
                },
            ),
            Letter::Frame { mine, head, body } if self.ends.contains_key(&mine) => {
                if let Err(Refuse(detail)) = deliver(mine, &head, body, up) {
                    self.hang_up(mine);
                    self.lost(mine, Gone::Protocol { detail });
                }
            }
            Letter::Closed { mine } if mine.0 & CUT != 0 => {
                let dead: Vec<ConnId> = self
                    .ends
                    .iter()
                    .filter(|(_, end)| {
                        end.is_some_and(|(a, _)| u64::from(a.port()) == mine.0 & !CUT)
                    })
                    .map(|(&id, _)| id)
                    .collect();
                for id in dead {
                    self.lost(
                        id,
                        Gone::Reset {
                            detail: "cut".into(),
                        },
                    );
                }
            }
            Letter::Closed { mine } => self.lost(mine, Gone::EndOfStream),
            Letter::Frame { .. } => {}
        }
    }

    fn lost(&mut self, id: ConnId, why: Gone) {
        if self.ends.remove(&id).is_none() {
            return;
        }
        self.gone.push((id, why));
        let puts = self.puts.remove(&id).unwrap_or_default();
        let waiting = puts.waiting.into_iter().flatten();
        for put in puts.under_way.into_iter().chain(waiting) {
            self.refuse(id, put.token);
        }
    }

    fn refuse(&mut self, conn: ConnId, token: u64) {
        self.done.push(OneSidedDone {
            conn,
            token,
            result: Err("the connection is gone".into()),
        });
    }

    fn hang_up(&mut self, id: ConnId) {
        if let Some(Some((to, mine))) = self.ends.get(&id).copied() {
            self.network.0.lock().post(to, Letter::Closed { mine });
        }
    }

    /// The range that a key opens, if it still does and holds the request.
    fn opens(&self, key: KeyId, remote: u64, len: usize) -> Result<(), String> {
        let mut inner = self.network.0.lock();
        let range = self
            .keys
            .get(&key)
            .and_then(|key| inner.keys.get(key).copied());
        match range {
            Some((base, size))
                if remote as usize >= base && remote as usize + len <= base + size =>
            {
                Ok(())
            }
            _ => {
                inner.dead_key_uses += 1;
                Err("the key does not open this range".into())
            }
        }
    }
}

fn deliver(conn: ConnId, head: &Head, body: Vec<u8>, up: &mut dyn Upcalls) -> Result<(), Refuse> {
    up.heard(conn);
    let received = match up.frame(conn, head.as_slice(), body.len())? {
        Place::Memory(target) => {
            // SAFETY: the target has room for the body and its lease keeps it valid.
            unsafe { std::ptr::copy_nonoverlapping(body.as_ptr(), target.ptr, body.len()) };
            Received::Placed
        }
        Place::Bytes => Received::Bytes(body),
        Place::Discard => Received::Discarded,
    };
    up.body(conn, received)
}

impl Transport for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn dial(&mut self, to: SocketAddr) -> ConnId {
        let mine = self.ids.next();
        self.ends.insert(mine, None);
        let from = (self.local, mine);
        let mut inner = self.network.0.lock();
        if inner.nodes.get(&to).is_some_and(|node| node.listening) {
            inner.post(to, Letter::Dialled { from, mine });
        } else {
            inner.post(self.local, Letter::Refused { mine });
        }
        mine
    }

    fn send(&mut self, conn: ConnId, frame: Frame) {
        let Some(Some((to, mine))) = self.ends.get(&conn).copied() else {
            return;
        };
        let body = match frame.body {
            Body::Empty => Vec::new(),
            Body::Bytes(bytes) => bytes,
            Body::Memory(source) => {
                // SAFETY: the source is valid while its lease lives, which is until the end of this arm.
                let bytes = unsafe { std::slice::from_raw_parts(source.ptr, source.len) };
                bytes.to_vec()
            }
        };
        self.network.0.lock().post(
            to,
            Letter::Frame {
                mine,
                head: frame.head,
                body,
            },
        );
    }

    fn room(&self, conn: ConnId, _class: Class) -> bool {
        const HELD: usize = 256;
        let Some(Some((to, _))) = self.ends.get(&conn) else {
            return false;
        };
        self.network
            .0
            .lock()
            .nodes
            .get(to)
            .is_some_and(|node| node.inbox.len() < HELD)
    }

    fn close(&mut self, conn: ConnId, _how: Close) {
        self.hang_up(conn);
        self.lost(conn, Gone::Local);
    }

    fn progress(&mut self, up: &mut dyn Upcalls) -> usize {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
        let letters = {
            let mut inner = self.network.0.lock();
            inner
                .nodes
                .get_mut(&self.local)
                .map(|node| std::mem::take(&mut node.inbox))
                .unwrap_or_default()
        };
        let mut n = letters.len();
        for letter in letters {
            self.take(letter, up);
        }
        n += self.arrivals();
        for (id, why) in std::mem::take(&mut self.gone) {
            n += 1;
            up.closed(id, why);
        }
        n
    }

    fn fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    fn arm(&mut self) -> bool {
        let inner = self.network.0.lock();
        let idle = inner
            .nodes
            .get(&self.local)
            .is_none_or(|node| node.inbox.is_empty());
        let still = self.puts.values().all(|puts| puts.is_still(inner.let_go));
        idle && still && self.gone.is_empty() && self.done.is_empty()
    }

    fn caps(&self, _conn: ConnId) -> Caps {
        Caps {
            piece: PIECE,
            path: "memory".into(),
        }
    }

    fn stop_listening(&mut self) {
        if let Some(node) = self.network.0.lock().nodes.get_mut(&self.local) {
            node.listening = false;
        }
    }

    fn one_sided(&mut self) -> Option<&mut dyn OneSided> {
        Some(self)
    }
}

impl OneSided for Memory {
    fn usable(&self, _conn: ConnId) -> bool {
        true
    }

    fn register(&mut self, addr: usize, len: usize) -> Result<Vec<u8>, String> {
        let mut inner = self.network.0.lock();
        let key = match self.exported.get(&addr) {
            Some(&key) => key,
            None => {
                inner.next_key += 1;
                inner.next_key
            }
        };
        self.exported.insert(addr, key);
        inner.keys.insert(key, (addr, len));
        Ok(key.to_le_bytes().to_vec())
    }

    fn deregister(&mut self, addr: usize) {
        if let Some(key) = self.exported.remove(&addr) {
            self.network.0.lock().keys.remove(&key);
        }
    }

    fn unpack(&mut self, _conn: ConnId, key: &[u8]) -> Result<KeyId, String> {
        let key = key
            .try_into()
            .map(u64::from_le_bytes)
            .map_err(|_| "not a key".to_owned())?;
        let id = KeyId(self.ids.next().0);
        self.keys.insert(id, key);
        Ok(id)
    }

    fn drop_key(&mut self, key: KeyId) {
        self.keys.remove(&key);
    }

    fn get(&mut self, conn: ConnId, key: KeyId, remote: u64, target: Target, token: u64) {
        let result = self.opens(key, remote, target.len);
        if result.is_ok() {
            // SAFETY: the key opens the range in this very process, and the lease keeps the target valid. The owner may
            // change the bytes meanwhile: that is what one-sided access means.
            unsafe { std::ptr::copy(remote as *const u8, target.ptr, target.len) };
        }
        self.done.push(OneSidedDone {
            conn,
            token,
            result,
        });
    }

    fn put(&mut self, conn: ConnId, key: KeyId, remote: u64, source: Source, token: u64) {
        if !self.ends.contains_key(&conn) {
            return self.refuse(conn, token);
        }
        let puts = self.puts.entry(conn).or_default();
        let put = Put {
            key,
            remote,
            source,
            token,
            fences: puts.fences,
            overtaken: false,
        };
        if self.ways == Ways::None {
            return self.arrive(conn, put);
        }
        puts.waiting.push_back(Some(put));
        puts.advance();
    }

    fn in_order(&self, _conn: ConnId) -> bool {
        self.ways != Ways::Many
    }

    fn fence(&mut self, conn: ConnId, fence: Fence) {
        let in_order = self.in_order(conn);
        let Some(puts) = self.puts.get_mut(&conn) else {
            return;
        };
        puts.fences += 1;
        let mut inner = self.network.0.lock();
        if in_order && puts.waiting.is_empty() && fence != Fence::InPlace {
            inner.followed += 1;
        } else if !puts.under_way.is_empty() || !puts.waiting.is_empty() {
            inner.waited += 1;
            puts.waiting.push_back(None);
        }
    }

    fn reap(&mut self, into: &mut Vec<OneSidedDone>) {
        into.append(&mut self.done);
    }
}
