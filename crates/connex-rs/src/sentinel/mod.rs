//! Death in a millisecond, whatever the size of the process.
//!
//! A killed process of many GB keeps its sockets open until the kernel has freed its memory, so its peers would
//! learn of its death late. A *sentinel*, a tiny process beside it, learns of it at once by a robust lock and sends each
//! peer an *obituary*, a datagram with a token that the peer issued for the link. `sentinel/main.rs` is that program.
//!
//! In this process one thread for all engines ([`guardian`]) holds the lock, keeps the sentinel alive ([`spawn`]), and
//! reads the obituaries that others send ([`post`]); it reads them although the progress thread may be busy or held up.
//! An engine has a [`Seat`]. Receiving needs no sentinel of one's own.

mod guardian;
mod memory;
mod post;
mod spawn;

#[path = "../../sentinel/main.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "a program of its own, of which the layouts are used here"
)]
pub(crate) mod program;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use crate::identity::Incarnation;
use crate::progress::Hub;
use crate::stats::SentinelState;
use crate::sync::Mutex;
use crate::transport::ConnId;
use guardian::Guardian;
use post::Post;
use program::Entry;
pub(crate) use program::Notice;

/// What an engine is to have.
pub(crate) struct Wish {
    /// A sentinel.
    pub(crate) sentinel: bool,
    /// That it suspects the engine when it makes no progress for so long.
    pub(crate) stall: Option<Duration>,
    /// Where the engine listens.
    pub(crate) listen: SocketAddr,
}

/// An engine's place beside the sentinel.
pub(crate) struct Seat {
    life: Incarnation,
    guardian: Option<Arc<Guardian>>,
    post: Option<Arc<Post>>,
    /// The guardian's name for the post, once it listens.
    watched: OnceLock<u64>,
    /// Its place in the shared memory, if it has a sentinel.
    slot: Option<usize>,
    stall_ns: u64,
    links: Mutex<HashMap<ConnId, Placed>>,
    left: AtomicBool,
    trouble: Vec<String>,
}

/// A live link.
struct Placed {
    issued: Option<[u8; 16]>,
    /// Where the peer listens for news of us.
    theirs: Option<(SocketAddr, [u8; 16])>,
    entry: Option<u32>,
}

impl Seat {
    /// No seat: nothing is sent or received.
    pub(crate) fn none() -> Self {
        Self {
            life: Incarnation {
                start_ns: 0,
                random: 0,
            },
            guardian: None,
            post: None,
            watched: OnceLock::new(),
            slot: None,
            stall_ns: 0,
            links: Mutex::default(),
            left: AtomicBool::new(false),
            trouble: Vec::new(),
        }
    }

    /// Takes a seat. What cannot be had is missing, and said in [`warnings`](Self::warnings).
    pub(crate) fn take(wish: &Wish, life: Incarnation) -> Self {
        let mut seat = Self::none();
        seat.life = life;
        let guardian = match Guardian::join() {
            Ok(guardian) => guardian,
            Err(e) => {
                seat.complain(format!(
                    "no sentinel, and no obituaries of peers: its thread cannot be started: {e}"
                ));
                return seat;
            }
        };
        match Post::open(wish.listen.ip(), wish.listen.port()) {
            Ok(post) => seat.post = Some(Arc::new(post)),
            Err(e) => seat.complain(format!(
                "peers' obituaries are not received: no datagram socket at {}: {e}",
                wish.listen.ip()
            )),
        }
        if wish.sentinel {
            guardian.want_sentinel();
            seat.stall_ns = wish.stall.map_or(0, |stall| {
                u64::try_from(stall.as_nanos()).unwrap_or(u64::MAX)
            });
            seat.slot = guardian.seat_engine(seat.stall_ns);
            if seat.slot.is_none() {
                seat.stall_ns = 0;
                seat.complain(format!(
                    "the sentinel does not watch this engine: a process may have {} of them",
                    program::MAX_ENGINES
                ));
            }
        }
        seat.guardian = Some(guardian);
        seat
    }

    fn complain(&mut self, what: String) {
        tracing::warn!(target: "connex_rs::sentinel", "{what}");
        self.trouble.push(what);
    }

    /// From now on obituaries are handed to this engine.
    ///
    /// # Errors
    /// The system does not watch another descriptor.
    pub(crate) fn attach(&self, hub: Weak<Hub>) -> std::io::Result<()> {
        if let (Some(post), Some(guardian)) = (&self.post, &self.guardian) {
            post.attach(hub);
            let name = guardian.watch(post.clone())?;
            // Once per engine.
            let _ = self.watched.set(name);
        }
        Ok(())
    }

    /// Where obituaries for this engine go, with a fresh token for one link.
    pub(crate) fn address(&self) -> Option<(u16, [u8; 16])> {
        self.post.as_ref().map(|post| (post.port(), post::draw()))
    }

    /// A link is up. `issued` is the token that we gave the peer, `theirs` where it wants to be told of our death.
    /// False: the table is full, and it will not be told.
    pub(crate) fn link_up(
        &self,
        conn: ConnId,
        life: Incarnation,
        issued: Option<[u8; 16]>,
        theirs: Option<(SocketAddr, [u8; 16])>,
    ) -> bool {
        let mut links = self.links.lock();
        if self.left.load(Ordering::Acquire) {
            return true;
        }
        if let (Some(post), Some(token)) = (&self.post, issued) {
            post.expect(conn, life, token);
        }
        let mut full = false;
        let entry = match (&self.guardian, self.slot, theirs) {
            (Some(guardian), Some(slot), Some((to, token))) => {
                let entry = guardian.enter(&Entry {
                    engine: slot as u32,
                    to,
                    life: (self.life.start_ns, self.life.random),
                    token,
                });
                full = entry.is_none();
                entry
            }
            _ => None,
        };
        links.insert(
            conn,
            Placed {
                issued,
                theirs,
                entry,
            },
        );
        !full
    }

    /// Tells the peer of a link that this engine gives it up after a time-out. A datagram that is lost costs the peer the word
    /// "timeout": it takes the end of the connection for a death, where the connection does not say it either.
    pub(crate) fn tell_given_up(&self, conn: ConnId) {
        let theirs = self.links.lock().get(&conn).and_then(|link| link.theirs);
        if let (Some(post), Some((to, token))) = (&self.post, theirs) {
            let life = (self.life.start_ns, self.life.random);
            let datagram = program::encode(Notice::GivenUp, life, &token);
            // Not blocking; what the system cannot take now is lost.
            let _ = post.socket().send_to(&datagram, to);
        }
    }

    /// Whether the peer of a live link said that it gives the link up.
    pub(crate) fn was_given_up(&self, conn: ConnId) -> bool {
        self.post.as_ref().and_then(|post| post.heard(conn)) == Some(Notice::GivenUp)
    }

    /// A link is no more, or about to be closed: no obituary is sent for it, and none is believed.
    pub(crate) fn link_down(&self, conn: ConnId) {
        let Some(placed) = self.links.lock().remove(&conn) else {
            return;
        };
        if let (Some(post), Some(token)) = (&self.post, placed.issued) {
            post.forget(&token);
        }
        if let (Some(guardian), Some(entry)) = (&self.guardian, placed.entry) {
            guardian.strike(entry);
        }
    }

    /// The engine makes progress.
    pub(crate) fn beat(&self) {
        if self.stall_ns > 0
            && let (Some(guardian), Some(slot)) = (&self.guardian, self.slot)
        {
            guardian.memory.engines[slot]
                .beat
                .fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How long the progress thread may sleep without being taken for stalled, in nanoseconds.
    pub(crate) fn longest_sleep(&self) -> u64 {
        if self.stall_ns > 0 {
            self.stall_ns / 4
        } else {
            u64::MAX
        }
    }

    /// How the sentinel is, and how often it had to be started again.
    pub(crate) fn state(&self) -> (SentinelState, u64) {
        match &self.guardian {
            Some(guardian) if self.slot.is_some() && !self.left.load(Ordering::Acquire) => {
                (guardian.state(), guardian.restarts())
            }
            _ => (SentinelState::Off, 0),
        }
    }

    /// What is missing, in plain sentences.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let mut warnings = self.trouble.clone();
        if let (SentinelState::Unavailable { reason }, _) = self.state() {
            warnings.push(format!("no sentinel: {reason}"));
        }
        warnings
    }

    /// The engine is closed.
    pub(crate) fn leave(&self) {
        if self.left.swap(true, Ordering::AcqRel) {
            return;
        }
        let links: Vec<ConnId> = self.links.lock().keys().copied().collect();
        for conn in links {
            self.link_down(conn);
        }
        if let Some(guardian) = &self.guardian {
            if let Some(&name) = self.watched.get() {
                guardian.unwatch(name);
            }
            if let Some(slot) = self.slot {
                guardian.unseat_engine(slot);
            }
            guardian.leave();
        }
    }
}

impl Drop for Seat {
    /// An engine whose start failed half-way.
    fn drop(&mut self) {
        self.leave();
    }
}
