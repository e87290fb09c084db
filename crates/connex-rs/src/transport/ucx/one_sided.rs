//! One-sided access over UCX: gets and puts with keys.
//!
//! A put is reported when a flush behind it is complete, for UCX's own end of a put says only that the local memory is
//! free. A fence holds back later puts until the earlier ones are in place: UCX's own orders nothing between several lanes, but
//! by waiting inside the call. Where one lane keeps the order (see [`order`](super::order)) UCX's weak fence, which never waits, is
//! all there is between them.
//!
//! That is so only for puts that were posted since the last round of progress. What UCX cannot hand to the device stands in a
//! line of its endpoint, where a message that waits for the peer's credit may stand before it; when a round has made room in the
//! device, later puts would pass that line.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use connex_ucx::{Lane, Memory, MemoryType, Posted, RemoteKey};

use super::Ucx;
use crate::transport::{ConnId, Fence, Gone, KeyId, OneSided, OneSidedDone, Source, Target};

/// One-sided transfers also where UCX emulates them in software. For tests: nobody checks the target there.
const FORCE: &str = "CONNEX_RS_FORCE_ONE_SIDED";

/// The first version whose own copies of GPU memory work from a thread without a context.
const STAGES_DEVICES: u32 = 19;

/// Whether [`FORCE`] asks for it.
pub(super) fn forced() -> bool {
    std::env::var_os(FORCE).is_some_and(|v| v == "1")
}

/// What the transport knows of one-sided access.
#[derive(Default)]
pub(super) struct Access {
    /// The context can do it.
    pub(super) enabled: bool,
    /// It counts as usable without hardware, see [`FORCE`].
    pub(super) forced: bool,
    /// How many bytes the process may lock in memory, if there is a limit.
    pub(super) locked_limit: Option<u64>,
    memories: HashMap<usize, Memory>,
    keys: HashMap<KeyId, (ConnId, Arc<RemoteKey>)>,
    next_key: u64,
    pub(super) done: Vec<OneSidedDone>,
}

impl Access {
    pub(super) fn new(by_plan: bool, forced: bool) -> Self {
        Self {
            enabled: by_plan || forced,
            forced,
            ..Self::default()
        }
    }

    /// Why `len` bytes could not be registered: the kernel's answer, and the limit that most often is behind it.
    fn cannot_register(&self, len: usize, answer: &str) -> String {
        match self.locked_limit {
            Some(limit) => format!(
                "{answer}: {len} bytes are to be locked in memory, and the process may lock {} KiB in all: raise the limit (ulimit -l \
                 unlimited; LimitMEMLOCK=infinity in a systemd unit; docker run --ulimit memlock=-1)",
                limit >> 10
            ),
            None => format!("{answer} ({len} bytes)"),
        }
    }

    /// The keys of a connection that is gone.
    pub(super) fn forget(&mut self, conn: ConnId) {
        self.keys.retain(|_, (of, _)| *of != conn);
    }
}

/// A put that a fence holds back.
#[derive(Debug)]
pub(super) struct Put {
    key: KeyId,
    remote: u64,
    source: Source,
    token: u64,
}

/// The puts of a connection.
#[derive(Debug, Default)]
pub(super) struct Puts {
    /// Posted and not in place, by the callers' tokens: the round of progress in which that was.
    under_way: BTreeMap<u64, u64>,
    /// Waiting behind a fence; `None` is the fence.
    waiting: VecDeque<Option<Put>>,
}

impl Puts {
    /// Whether later puts keep behind the one with this token and later ones without waiting: all of these were posted in
    /// `round`, the present one, or are in place.
    fn can_follow(&self, since: u64, round: u64) -> bool {
        self.waiting.is_empty() && self.under_way.range(since..).all(|(_, &r)| r == round)
    }

    /// The callers' tokens of what never started.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = u64> + '_ {
        self.waiting.drain(..).flatten().map(|put| put.token)
    }
}

/// Whether a lane's hardware does one-sided transfers.
pub(super) fn by_hardware(lane: &Lane) -> bool {
    ["rc", "dc", "gga"]
        .iter()
        .any(|name| lane.transport.starts_with(name))
}

impl Ucx {
    /// A put of `conn` is in place.
    pub(super) fn put_done(&mut self, conn: ConnId, token: u64) {
        if let Some(c) = self.table.conns.get_mut(&conn) {
            c.puts.under_way.remove(&token);
            self.next_puts(conn);
        }
    }

    /// Posts what no fence holds back any more.
    fn next_puts(&mut self, id: ConnId) {
        while let Some(conn) = self.table.conns.get_mut(&id) {
            match conn.puts.waiting.pop_front() {
                None => return,
                Some(None) if !conn.puts.under_way.is_empty() => {
                    return conn.puts.waiting.push_front(None);
                }
                Some(None) => {}
                Some(Some(put)) => self.post_put(id, put),
            }
        }
    }

    fn post_put(&mut self, id: ConnId, put: Put) {
        let Put {
            key,
            remote,
            source,
            token,
        } = put;
        let (Some(conn), Some((of, key))) =
            (self.table.conns.get_mut(&id), self.access.keys.get(&key))
        else {
            return self.refuse(id, token);
        };
        let ucx = conn.token();
        let Some(endpoint) = conn.endpoint.as_ref().filter(|_| *of == id) else {
            return self.refuse(id, token);
        };
        let worker = self.workers.main();
        // SAFETY: lease and key keep what UCX uses; they are held until the flush has ended, or the endpoint is closed, or
        // the worker is gone.
        let posted = unsafe {
            endpoint.put(
                worker,
                source.ptr,
                source.len,
                None,
                remote,
                key,
                super::NO_TOKEN,
            )
        };
        match posted.and_then(|_| endpoint.flush(worker, ucx)) {
            Ok(Posted::Done) => self.finished(id, token, Ok(())),
            Ok(Posted::Pending) => {
                conn.puts.under_way.insert(token, self.round);
                conn.hold_one_sided(ucx, source.lease, Arc::clone(key), token, true);
            }
            Err(e) => {
                // The put itself may be under way: what it uses goes with the connection.
                conn.hold_one_sided(ucx, source.lease, Arc::clone(key), token, false);
                self.abort(
                    id,
                    Gone::Reset {
                        detail: e.to_string(),
                    },
                );
            }
        }
    }

    fn refuse(&mut self, conn: ConnId, token: u64) {
        self.finished(
            conn,
            token,
            Err("the connection or the key is gone".to_owned()),
        );
    }

    pub(super) fn finished(&mut self, conn: ConnId, token: u64, result: Result<(), String>) {
        self.access.done.push(OneSidedDone {
            conn,
            token,
            result,
        });
    }
}

impl OneSided for Ucx {
    fn usable(&self, conn: ConnId) -> bool {
        self.access.enabled
            && self
                .table
                .conns
                .get(&conn)
                .is_some_and(|c| c.by_hardware || self.access.forced)
    }

    /// Before 1.19 UCX copies GPU memory by itself wrongly or not at all: only RDMA hardware, which reaches it without a
    /// copy, may be given it there.
    fn reaches_devices(&self) -> bool {
        let context = self.workers.context();
        let by_hardware = !self.access.forced;
        (by_hardware || context.library().version().minor >= STAGES_DEVICES)
            && (context.supports(MemoryType::Cuda) || context.supports(MemoryType::Rocm))
    }

    fn register(&mut self, addr: usize, len: usize) -> Result<Vec<u8>, String> {
        let context = self.workers.context().clone();
        // SAFETY: the engine registers what its caller keeps mapped until it is deregistered.
        let memory = unsafe { Memory::map(&context, addr as *mut u8, len) }
            .map_err(|e| self.access.cannot_register(len, &e.to_string()))?;
        let key = memory.key().map_err(|e| e.to_string())?;
        self.access.memories.insert(addr, memory);
        Ok(key)
    }

    fn deregister(&mut self, addr: usize) {
        self.access.memories.remove(&addr);
    }

    fn unpack(&mut self, conn: ConnId, key: &[u8]) -> Result<KeyId, String> {
        let gone = || "the connection is gone".to_owned();
        let of = self.table.conns.get(&conn).ok_or_else(gone)?;
        let endpoint = of.endpoint.as_ref().ok_or_else(gone)?;
        let worker = self.workers.main();
        let key = RemoteKey::unpack(worker, endpoint, key).map_err(|e| e.to_string())?;
        self.access.next_key += 1;
        let id = KeyId(self.access.next_key);
        self.access.keys.insert(id, (conn, Arc::new(key)));
        Ok(id)
    }

    fn drop_key(&mut self, key: KeyId) {
        self.access.keys.remove(&key);
    }

    fn get(&mut self, id: ConnId, key: KeyId, remote: u64, target: Target, token: u64) {
        let (Some(conn), Some((of, key))) =
            (self.table.conns.get_mut(&id), self.access.keys.get(&key))
        else {
            return self.refuse(id, token);
        };
        let ucx = conn.token();
        let Some(endpoint) = conn.endpoint.as_ref().filter(|_| *of == id) else {
            return self.refuse(id, token);
        };
        // SAFETY: as for a put, until the get has ended.
        let posted = unsafe {
            endpoint.get(
                self.workers.main(),
                target.ptr,
                target.len,
                None,
                remote,
                key,
                ucx,
            )
        };
        match posted {
            Ok(Posted::Done) => self.finished(id, token, Ok(())),
            Ok(Posted::Pending) => {
                conn.hold_one_sided(ucx, target.lease, Arc::clone(key), token, false)
            }
            Err(e) => {
                conn.hold_one_sided(ucx, target.lease, Arc::clone(key), token, false);
                self.abort(
                    id,
                    Gone::Reset {
                        detail: e.to_string(),
                    },
                );
            }
        }
    }

    fn put(&mut self, id: ConnId, key: KeyId, remote: u64, source: Source, token: u64) {
        let put = Put {
            key,
            remote,
            source,
            token,
        };
        match self.table.conns.get_mut(&id) {
            Some(conn) if conn.endpoint.is_none() => self.refuse(id, token),
            Some(conn) if !conn.puts.waiting.is_empty() => conn.puts.waiting.push_back(Some(put)),
            Some(_) => self.post_put(id, put),
            None => self.refuse(id, token),
        }
    }

    fn in_order(&self, conn: ConnId) -> bool {
        self.table.conns.get(&conn).is_some_and(|c| c.in_order)
    }

    fn fence(&mut self, id: ConnId, fence: Fence) {
        let Some(conn) = self.table.conns.get_mut(&id) else {
            return;
        };
        if conn.puts.under_way.is_empty() && conn.puts.waiting.is_empty() {
            return;
        }
        let follows = match fence {
            Fence::Posted { since } => conn.in_order && conn.puts.can_follow(since, self.round),
            Fence::InPlace => false,
        };
        let follows = follows && self.workers.main().fence().is_ok();
        tracing::trace!(target: "connex_rs::transport", follows, "a fence between puts");
        if !follows {
            conn.puts.waiting.push_back(None);
        }
    }

    fn reap(&mut self, into: &mut Vec<OneSidedDone>) {
        into.append(&mut self.access.done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_posted_since_the_last_progress_is_followed_without_waiting() {
        let mut puts = Puts::default();
        assert!(puts.can_follow(1, 7));
        // Of others, posted before: their order does not matter.
        puts.under_way.insert(3, 6);
        puts.under_way.insert(4, 7);
        assert!(puts.can_follow(4, 7));
        assert!(!puts.can_follow(3, 7), "it may stand in UCX's line");
        assert!(!puts.can_follow(4, 8));
        puts.waiting.push_back(None);
        assert!(!puts.can_follow(4, 7), "what comes later stands in ours");
    }

    #[test]
    fn a_registration_that_fails_names_the_limit() {
        let mut access = Access::new(true, false);
        let text = access.cannot_register(4096, "input/output error");
        assert_eq!(text, "input/output error (4096 bytes)");
        access.locked_limit = Some(65536);
        let text = access.cannot_register(1 << 20, "input/output error");
        for part in ["input/output error", "1048576 bytes", "64 KiB", "ulimit -l"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
