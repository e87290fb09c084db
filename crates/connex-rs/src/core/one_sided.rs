//! One-sided transfers: where the hardware reads and writes the peer's memory without asking its processor.
//!
//! A key opens one region of one life of a peer (I4): it is asked for once, lives with its connection, and is
//! given back before the owner's region goes. Large ranges are cut, so that progress can be seen.
//!
//! The flag of a chain stands behind a fence (I3). Where both sides say that writes are placed in the order in which they
//! are posted, the fence rests on that order and nothing is waited for; else the data is in place before the flag is posted.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::requests::in_the_peer;
use super::{Core, Out, Stream};
use crate::completion::Completion;
use crate::error::{Error, ErrorKind};
use crate::region::Denied;
use crate::transfer::{OpId, Work, of_element};
use crate::transport::{ConnId, Fence, KeyId, OneSidedDone, Refuse, Source, Target};
use crate::wire::Message;

/// A larger range is cut into pieces of this.
const CHUNK: usize = 4 << 20;

/// Pieces of one operation that are in flight at a time.
const IN_FLIGHT: usize = 8;

/// How long peers may take to give a key back before their links are closed.
const GIVE_BACK: u64 = 1_000_000_000;

/// How far a one-sided operation is, besides what [`Work`] says.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Bytes of the present element that have been posted.
    posted: usize,
    /// Pieces in flight.
    out: usize,
    /// A key has been asked for and not come.
    asking: bool,
    /// What is left is to be asked for.
    instead: bool,
    /// The signal has been sent.
    signalled: bool,
    /// The token of its first piece.
    first: Option<u64>,
    /// A piece of it may be overtaken by a later one.
    unordered: bool,
}

impl Progress {
    /// Whether the data is in place and the signal has gone.
    pub(super) fn signalled(&self) -> bool {
        self.signalled
    }
}

/// A key of the peer.
#[derive(Debug)]
pub(super) struct Key {
    len: u64,
    /// `None`: the transport cannot reach the region, so its owner has to be asked.
    id: Option<KeyId>,
    /// Shorter transfers are asked for: they are not for zero-copy.
    min: u64,
    /// The owner's side places writes in the order in which they were posted.
    ordered: bool,
    /// Pieces in flight that use it.
    users: usize,
    /// The owner wants it back.
    dropping: bool,
}

/// What an owner says of a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyRange {
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) min: u64,
    pub(crate) ordered: bool,
}

/// What a live link knows of keys.
pub(super) type Keys = BTreeMap<u64, Key>;

/// A piece in flight.
#[derive(Debug)]
struct Piece {
    op: OpId,
    conn: ConnId,
    base: u64,
    len: usize,
    elem: usize,
}

/// A region whose key peers hold or held.
#[derive(Debug, Default)]
struct Export {
    holders: HashSet<ConnId>,
    /// The region is to go: who waits for that, and until when holders may take.
    withdrawn: Option<(Arc<Completion>, u64)>,
}

/// The engine's side of one-sided access.
#[derive(Debug, Default)]
pub(super) struct OneSidedState {
    next_token: u64,
    pieces: FxHashMap<u64, Piece>,
    exports: HashMap<u64, Export>,
}

impl Core {
    // ---- our transfers ------------------------------------------------------------------------

    /// Posts as much of an operation as keys and the bound allow; ends it when all is done.
    pub(super) fn advance(&mut self, id: OpId) {
        let Some(op) = self.ops.get_mut(&id) else {
            return;
        };
        let Some(conn) = op.conn else { return };
        let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) else {
            return;
        };
        let progress = op.one_sided.get_or_insert_default();
        let (elements, next, write, chain) = match &mut op.work {
            Work::Read { elements, next, .. } => (elements, next, false, false),
            Work::Write {
                elements,
                next,
                chain,
                ..
            } => (elements, next, true, *chain),
            Work::Message(_) | Work::Open(_) => return,
        };
        if progress.instead && op.doom.is_none() {
            return self.ask_instead(id, conn);
        }
        let count = elements.len();
        while op.doom.is_none() && !progress.asking && progress.out < IN_FLIGHT && *next < count {
            let element = &elements[*next];
            let (remote, len) = (element.remote, element.len as u64);
            let too_small = element.residence.is_some()
                && (!link.reaches_devices || len < self.shared.devices.threshold());
            if progress.posted == 0 && too_small {
                return self.ask_instead(id, conn);
            }
            let Some((base, key)) = covering(&mut link.keys, remote, len) else {
                progress.asking = true;
                self.shared.counters.rkey_fetches.add_one();
                return self.send(
                    conn,
                    &Message::KeyAsk {
                        req: id,
                        addr: remote,
                        len,
                    },
                );
            };
            let Some(key_id) = key.id.filter(|_| len >= key.min) else {
                return self.ask_instead(id, conn);
            };
            let n = CHUNK.min(element.len - progress.posted);
            let local = element.local + progress.posted;
            let remote = remote + progress.posted as u64;
            key.users += 1;
            self.one_sided.next_token += 1;
            let token = self.one_sided.next_token;
            let first = *progress.first.get_or_insert(token);
            progress.unordered |= !key.ordered || element.residence.is_some();
            self.one_sided.pieces.insert(
                token,
                Piece {
                    op: id,
                    conn,
                    base,
                    len: n,
                    elem: *next,
                },
            );
            let lease = element.lease.clone();
            let key = key_id;
            if chain && *next + 1 == count && progress.posted == 0 {
                let fence = if progress.unordered {
                    Fence::InPlace
                } else {
                    Fence::Posted { since: first }
                };
                self.out.push(Out::Fence { conn, fence });
            }
            self.out.push(if write {
                let source = Source {
                    ptr: local as *const u8,
                    len: n,
                    lease,
                };
                Out::Put {
                    conn,
                    key,
                    remote,
                    source,
                    token,
                }
            } else {
                let target = Target {
                    ptr: local as *mut u8,
                    len: n,
                    lease,
                };
                Out::Get {
                    conn,
                    key,
                    remote,
                    target,
                    token,
                }
            });
            progress.out += 1;
            progress.posted += n;
            if progress.posted == element.len {
                progress.posted = 0;
                *next += 1;
            }
        }
        if progress.out > 0 || progress.asking {
            return;
        }
        if let Some(error) = op.doom.take() {
            return self.finish(id, Err(error));
        }
        if *next < count {
            return;
        }
        match &mut op.work {
            Work::Write {
                signal: Some(letter),
                ..
            } => {
                if std::mem::replace(&mut progress.signalled, true) {
                    return;
                }
                // All data is in place: only now the signal goes.
                let (Some(seq), bytes) = (letter.seq, std::mem::take(&mut letter.bytes)) else {
                    return;
                };
                link.small.push_back(Stream::Letter {
                    seq,
                    bytes,
                    sent: 0,
                    signals: Some(id),
                });
                self.pump_later(conn);
            }
            _ => self.finish(id, Ok(())),
        }
    }

    /// The rest of an operation is asked for, because the hardware cannot do its next element: once what is in flight
    /// has ended, so that the order stays.
    fn ask_instead(&mut self, id: OpId, conn: ConnId) {
        let Some(op) = self.ops.get_mut(&id) else {
            return;
        };
        if op
            .one_sided
            .as_ref()
            .is_some_and(|progress| progress.out > 0)
        {
            return;
        }
        op.one_sided = None;
        self.request(id, conn);
    }

    /// A piece has ended.
    pub(crate) fn one_sided_done(&mut self, done: OneSidedDone) {
        let Some(piece) = self.one_sided.pieces.remove(&done.token) else {
            return;
        };
        self.moved(piece.conn);
        self.key_unused(piece.conn, piece.base);
        let now = self.now;
        let Some(op) = self.ops.get_mut(&piece.op) else {
            return;
        };
        op.moved = now;
        if let Some(progress) = &mut op.one_sided {
            progress.out = progress.out.saturating_sub(1);
        }
        match done.result {
            Ok(()) => {
                if let Work::Read { elements, .. } | Work::Write { elements, .. } = &mut op.work {
                    elements[piece.elem].done += piece.len;
                }
            }
            Err(text) => {
                let peer = self.peers[op.peer].id.clone();
                op.doom
                    .get_or_insert_with(|| Error::new(ErrorKind::Transport, text).with_peer(&peer));
            }
        }
        self.advance(piece.op);
    }

    /// A key came for one of our operations.
    pub(super) fn on_key(
        &mut self,
        conn: ConnId,
        req: OpId,
        range: KeyRange,
        key: Vec<u8>,
    ) -> Result<(), Refuse> {
        let asked = self
            .ops
            .get_mut(&req)
            .filter(|op| op.conn == Some(conn))
            .and_then(|op| op.one_sided.as_mut());
        match asked {
            Some(progress) if progress.asking => progress.asking = false,
            _ => {
                return Err(Refuse(format!(
                    "a key for request {req}, which did not ask"
                )));
            }
        }
        if key.is_empty() {
            let min = u64::MAX;
            self.know_key(conn, KeyRange { min, ..range }, None);
            self.advance(req);
            return Ok(());
        }
        self.out.push(Out::Unpack {
            conn,
            req,
            range,
            key,
        });
        Ok(())
    }

    /// No key: the range is not the peer's to give.
    pub(super) fn key_refused(
        &mut self,
        conn: ConnId,
        req: OpId,
        code: i32,
        text: &str,
    ) -> Result<(), Refuse> {
        let Some(op) = self.ops.get_mut(&req).filter(|op| op.conn == Some(conn)) else {
            return Ok(());
        };
        let progress = op.one_sided.get_or_insert_default();
        if code == 0 || !std::mem::take(&mut progress.asking) {
            return Err(Refuse(format!(
                "the end of request {req} with code {code}, which is under way one-sided"
            )));
        }
        let peer = self.peers[op.peer].id.clone();
        let text = match &op.work {
            Work::Read { elements, next, .. } | Work::Write { elements, next, .. } => {
                of_element(elements, *next, text)
            }
            _ => text.to_owned(),
        };
        let error = Error::from_code(code, text).with_peer(&peer);
        self.doom_or_ask(req, error);
        Ok(())
    }

    /// An operation cannot go on one-sided. It ends with `error`, but for one with a signal: its number among the messages is given
    /// out, and later ones wait for it. The peer is asked for the rest then, which it refuses, and passes over the signal.
    fn doom_or_ask(&mut self, id: OpId, error: Error) {
        let Some(op) = self.ops.get_mut(&id) else {
            return;
        };
        match &op.work {
            Work::Write {
                signal: Some(_), ..
            } => op.one_sided.get_or_insert_default().instead = true,
            _ => {
                op.doom.get_or_insert(error);
            }
        }
        self.advance(id);
    }

    /// The transport has unpacked a key, or could not.
    pub(crate) fn unpacked(
        &mut self,
        conn: ConnId,
        req: OpId,
        range: KeyRange,
        result: Result<KeyId, String>,
    ) {
        match result {
            Ok(id) => self.know_key(conn, range, Some(id)),
            Err(text) => {
                if let Some(op) = self.ops.get(&req) {
                    let peer = &self.peers[op.peer].id;
                    let error = Error::new(ErrorKind::Transport, text).with_peer(peer);
                    return self.doom_or_ask(req, error);
                }
            }
        }
        self.advance(req);
    }

    fn know_key(&mut self, conn: ConnId, range: KeyRange, id: Option<KeyId>) {
        let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) else {
            return self.forget_key(id);
        };
        match link.keys.entry(range.base) {
            // Several operations asked at once. The first key stays: pieces in flight use it. It is of the same
            // region, because its owner has no other one there before this one was given back.
            Entry::Occupied(_) => self.forget_key(id),
            Entry::Vacant(place) => {
                self.shared.counters.remote_rkeys.add_one();
                place.insert(Key {
                    len: range.len,
                    id,
                    min: range.min,
                    ordered: range.ordered,
                    users: 0,
                    dropping: false,
                });
            }
        }
    }

    fn forget_key(&mut self, id: Option<KeyId>) {
        if let Some(id) = id {
            self.out.push(Out::DropKey(id));
        }
    }

    /// The owner wants a key back: it is used no more, and given back once nothing of it is in flight.
    pub(super) fn on_key_drop(&mut self, conn: ConnId, base: u64) {
        self.shared.counters.invalidations.add_one();
        let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) else {
            return;
        };
        match link.keys.get_mut(&base) {
            Some(key) => {
                key.dropping = true;
                if key.users == 0 {
                    self.give_key_back(conn, base);
                }
            }
            None => self.send(conn, &Message::KeyDropped { base }),
        }
    }

    fn key_unused(&mut self, conn: ConnId, base: u64) {
        let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) else {
            return;
        };
        let Some(key) = link.keys.get_mut(&base) else {
            return;
        };
        key.users = key.users.saturating_sub(1);
        if key.dropping && key.users == 0 {
            self.give_key_back(conn, base);
        }
    }

    fn give_key_back(&mut self, conn: ConnId, base: u64) {
        let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) else {
            return;
        };
        if let Some(key) = link.keys.remove(&base) {
            self.shared.counters.remote_rkeys.sub_one();
            self.forget_key(key.id);
        }
        self.send(conn, &Message::KeyDropped { base });
    }

    // ---- our regions --------------------------------------------------------------------------

    /// A peer asks for the key of a range.
    pub(super) fn on_key_ask(&mut self, conn: ConnId, req: u64, addr: u64, len: u64) {
        let found = self.shared.registry.lock().find(addr, len).map(|region| {
            (
                region.addr() as u64,
                region.len() as u64,
                region.residence(),
            )
        });
        let refused = found
            .as_ref()
            .ok()
            .and_then(|(_, _, residence)| self.shared.devices.refuses(*residence, len, true));
        if let Some(why) = refused {
            self.shared.counters.requests_refused.add_one();
            let message = Message::Done {
                req,
                code: -4,
                elem: 0,
            };
            return self.send_with(conn, &message, in_the_peer(&why, addr).into_bytes());
        }
        match found {
            Ok((base, len, residence)) if !self.withdrawn(base) => {
                self.holds_key(base, conn);
                self.out.push(Out::Export {
                    conn,
                    req,
                    base,
                    len,
                    device: residence.is_some(),
                });
            }
            // A key would open it in both directions: no key, and who asked goes through us.
            Err(Denied::Access) => {
                let limited = self.shared.registry.lock().holder(addr, len);
                let Some((base, len)) = limited.filter(|(base, _)| !self.withdrawn(*base)) else {
                    return self.refuse_key(conn, req, addr, len, &Denied::Unregistered);
                };
                self.holds_key(base, conn);
                self.exported(conn, req, base, len, false, false, Ok(Vec::new()));
            }
            Err(why) => self.refuse_key(conn, req, addr, len, &why),
            Ok(_) => self.refuse_key(conn, req, addr, len, &Denied::Unregistered),
        }
    }

    /// Remembers that a connection knows of a region, to be told when it goes.
    fn holds_key(&mut self, base: u64, conn: ConnId) {
        let export = self.one_sided.exports.entry(base).or_default();
        export.holders.insert(conn);
    }

    fn refuse_key(&mut self, conn: ConnId, req: u64, addr: u64, len: u64, why: &Denied) {
        self.shared.counters.requests_refused.add_one();
        let why = match why {
            Denied::OutOfBounds => "the range leaves the peer's region that holds its start",
            _ => "no region is registered there in the peer",
        };
        let text = format!("{len} bytes at {addr:#x}: {why}");
        let message = Message::Done {
            req,
            code: -4,
            elem: 0,
        };
        self.send_with(conn, &message, text.into_bytes());
    }

    /// The transport has exported a region, or could not.
    #[allow(clippy::too_many_arguments, reason = "what was asked, and the answer")]
    pub(crate) fn exported(
        &mut self,
        conn: ConnId,
        req: u64,
        base: u64,
        len: u64,
        device: bool,
        ordered: bool,
        result: Result<Vec<u8>, String>,
    ) {
        let min = if device {
            self.shared.devices.threshold()
        } else {
            0
        };
        let message = Message::KeyIs {
            req,
            base,
            len,
            min,
            ordered,
        };
        match result {
            Ok(key) => self.send_with(conn, &message, key),
            Err(text) => {
                let text = format!("the peer cannot register its region with the device: {text}");
                self.send_with(
                    conn,
                    &Message::Done {
                        req,
                        code: -1,
                        elem: 0,
                    },
                    text.into_bytes(),
                );
            }
        }
    }

    fn withdrawn(&self, base: u64) -> bool {
        self.one_sided
            .exports
            .get(&base)
            .is_some_and(|e| e.withdrawn.is_some())
    }

    /// A region is to go: `completion` ends when no peer holds its key any more.
    pub(super) fn withdraw(&mut self, base: u64, completion: Arc<Completion>) {
        let until = self.now + GIVE_BACK;
        let Some(export) = self.one_sided.exports.get_mut(&base) else {
            return self.end_withdrawal(&completion);
        };
        export.withdrawn = Some((completion, until));
        let holders: Vec<ConnId> = export.holders.iter().copied().collect();
        for conn in holders {
            self.send(conn, &Message::KeyDrop { base });
        }
        self.check_at(until);
        self.settle_withdrawal(base);
    }

    pub(super) fn on_key_dropped(&mut self, conn: ConnId, base: u64) {
        if let Some(export) = self
            .one_sided
            .exports
            .get_mut(&base)
            .filter(|e| e.withdrawn.is_some())
        {
            export.holders.remove(&conn);
            self.settle_withdrawal(base);
        }
    }

    fn settle_withdrawal(&mut self, base: u64) {
        let done = self
            .one_sided
            .exports
            .get(&base)
            .is_some_and(|e| e.withdrawn.is_some() && e.holders.is_empty());
        if done
            && let Some(Export {
                withdrawn: Some((completion, _)),
                ..
            }) = self.one_sided.exports.remove(&base)
        {
            self.out.push(Out::Unexport { base, completion });
        }
    }

    /// The device has forgotten the region.
    pub(crate) fn end_withdrawal(&mut self, completion: &Arc<Completion>) {
        if completion.finish(Ok(())) {
            self.woken.push(completion.clone());
        }
        self.free_rings();
    }

    /// Closes the links of peers that do not give keys back.
    pub(super) fn check_withdrawals(&mut self) {
        let mut late = Vec::new();
        let mut next = u64::MAX;
        for export in self.one_sided.exports.values_mut() {
            let Some((_, until)) = &mut export.withdrawn else {
                continue;
            };
            if *until <= self.now {
                *until = u64::MAX;
                late.extend(export.holders.iter().copied());
            } else {
                next = next.min(*until);
            }
        }
        self.check_at(next);
        for conn in late {
            self.suspect(
                conn,
                "key timeout: the peer did not give the key of a region back".into(),
            );
        }
    }

    /// A connection is gone, with its keys on both sides.
    pub(super) fn forget_keys(&mut self, conn: ConnId, keys: Keys) {
        for key in keys.into_values() {
            self.shared.counters.remote_rkeys.sub_one();
            self.forget_key(key.id);
        }
        self.one_sided.pieces.retain(|_, piece| piece.conn != conn);
        let bases: Vec<u64> = self.one_sided.exports.keys().copied().collect();
        for base in bases {
            if let Some(export) = self.one_sided.exports.get_mut(&base) {
                export.holders.remove(&conn);
                self.settle_withdrawal(base);
            }
        }
    }
}

/// The key of a region that holds all of the range.
fn covering(keys: &mut Keys, addr: u64, len: u64) -> Option<(u64, &mut Key)> {
    keys.range_mut(..=addr)
        .rev()
        .find(|(base, key)| {
            !key.dropping
                && addr
                    .checked_add(len)
                    .is_some_and(|end| end <= **base + key.len)
        })
        .map(|(base, key)| (*base, key))
}
