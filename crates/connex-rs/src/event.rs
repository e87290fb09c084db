//! What an engine tells its application about peers.
//!
//! The queue is bounded. When it is full the events of one peer collapse into the newest ones, so that the
//! last `up` or `failed` of a peer is never lost and an application that never looks costs nothing.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::identity::LogicalId;
use crate::sync::{Condvar, Mutex};

/// What happened.
#[non_exhaustive]
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EventKind {
    /// An identity was bound to a link; `up` follows at once.
    Joined {
        /// It had been bound before.
        rejoin: bool,
    },
    /// A round trip over a new link has been proven.
    Up,
    /// An established link was lost, or a connect did not come up.
    Failed {
        /// -2 death, -3 suspicion, -5 canceled.
        status: i32,
        /// Our own sentence, lower case; contains "timeout" exactly for suspicions.
        reason: String,
        /// The transport's words, for people.
        detail: String,
        /// Whether the link had been up.
        established: bool,
    },
}

impl EventKind {
    /// `joined`, `up`, `failed`.
    pub fn name(&self) -> &'static str {
        match self {
            EventKind::Joined { .. } => "joined",
            EventKind::Up => "up",
            EventKind::Failed { .. } => "failed",
        }
    }
}

/// Something that happened to a peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// The peer.
    pub peer: LogicalId,
    /// CLOCK_MONOTONIC, nanoseconds, of the moment when the transport told us.
    pub ts_ns: u64,
    /// What happened.
    pub kind: EventKind,
}

/// The most events that wait for the application.
pub const CAPACITY: usize = 4096;

/// The most events that wait at all: beyond that many peers with news even the oldest news goes.
const LIMIT: usize = 2 * CAPACITY;

/// The bounded queue between the engine and `wait_event`.
#[derive(Debug, Default)]
pub struct EventQueue {
    inner: Mutex<Inner>,
    filled: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    events: VecDeque<Event>,
    /// How many of them each peer has, so that a full queue need not be counted again for each event.
    counts: HashMap<LogicalId, usize>,
    closed: bool,
}

impl EventQueue {
    /// Adds an event; returns how many events were dropped to make room for it.
    pub fn push(&self, event: Event) -> usize {
        let mut inner = self.inner.lock();
        if inner.closed {
            return 0;
        }
        let dropped = if inner.events.len() >= CAPACITY {
            inner.collapse(&event.peer)
        } else {
            0
        };
        let mut dropped = dropped;
        if inner.events.len() >= LIMIT {
            inner.pop();
            dropped += 1;
        }
        inner.push(event);
        drop(inner);
        self.filled.notify_one();
        dropped
    }

    /// The next event; `None` after `timeout` (`None`: never) or when the queue is closed.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Event> {
        let until = timeout.and_then(|t| Instant::now().checked_add(t));
        let mut inner = self.inner.lock();
        loop {
            if inner.closed {
                return None;
            }
            if let Some(event) = inner.pop() {
                return Some(event);
            }
            let timed_out;
            (inner, timed_out) = self.filled.wait_until(inner, until);
            if timed_out {
                return if inner.closed { None } else { inner.pop() };
            }
        }
    }

    /// Wakes all waiters; nothing is handed out any more.
    pub fn close(&self) {
        let mut inner = self.inner.lock();
        inner.closed = true;
        inner.events.clear();
        inner.counts.clear();
        drop(inner);
        self.filled.notify_all();
    }
}

impl Inner {
    fn push(&mut self, event: Event) {
        *self.counts.entry(event.peer.clone()).or_default() += 1;
        self.events.push_back(event);
    }

    fn pop(&mut self) -> Option<Event> {
        let event = self.events.pop_front()?;
        if let Some(count) = self.counts.get_mut(&event.peer) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&event.peer);
            }
        }
        Some(event)
    }

    /// Makes room for an event of `peer`: all of that peer's events go; if it has none, those of the
    /// peer with the most, except its newest state.
    fn collapse(&mut self, peer: &LogicalId) -> usize {
        let before = self.events.len();
        if self.counts.remove(peer).is_some() {
            self.events.retain(|event| event.peer != *peer);
        } else if before > 2 * self.counts.len() {
            // Some peer has more than its newest state.
            let most = self.counts.iter().max_by_key(|(_, n)| **n);
            if let Some(most) = most.map(|(peer, _)| peer.clone()) {
                self.keep_newest_state_of(&most);
                let left = self.events.iter().filter(|e| e.peer == most).count();
                self.counts.insert(most, left);
            }
        }
        before - self.events.len()
    }

    /// Of the events of `peer` keeps only the last `failed`, or the last `joined` and `up`.
    fn keep_newest_state_of(&mut self, peer: &LogicalId) {
        let theirs = |event: &Event| event.peer == *peer;
        let Some(last) = self.events.iter().rposition(theirs) else {
            return;
        };
        let up = matches!(self.events[last].kind, EventKind::Up);
        let pair = if up {
            self.events.iter().take(last).rposition(theirs)
        } else {
            None
        };
        let mut index = 0;
        self.events.retain(|event| {
            let keep = event.peer != *peer || index == last || Some(index) == pair;
            index += 1;
            keep
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u32) -> LogicalId {
        LogicalId::new("m", n, 0, 0).expect("valid")
    }

    fn up(n: u32, ts_ns: u64) -> Event {
        Event {
            peer: id(n),
            ts_ns,
            kind: EventKind::Up,
        }
    }

    #[test]
    fn a_full_queue_keeps_the_newest_state_of_every_peer() {
        let queue = EventQueue::default();
        queue.push(up(7, 1));
        let mut dropped = 0;
        for ts in 0..3 * CAPACITY as u64 {
            dropped += queue.push(up(1, ts));
        }
        let mut all = Vec::new();
        while let Some(event) = queue.wait(Some(Duration::ZERO)) {
            all.push(event);
        }
        assert!(
            all.contains(&up(7, 1)),
            "the quiet peer's only event was dropped"
        );
        assert_eq!(all.last(), Some(&up(1, 3 * CAPACITY as u64 - 1)));
        assert_eq!(all.len() + dropped, 3 * CAPACITY + 1);
    }

    #[test]
    fn many_peers_never_exceed_the_bound_by_more_than_their_states() {
        let queue = EventQueue::default();
        for ts in 0..2 * CAPACITY as u64 {
            queue.push(up((ts % 16) as u32, ts));
        }
        let mut newest = std::collections::HashMap::new();
        let mut n = 0;
        while let Some(event) = queue.wait(Some(Duration::ZERO)) {
            newest.insert(event.peer.stage(), event.ts_ns);
            n += 1;
        }
        assert!(n <= CAPACITY);
        for peer in 0..16u32 {
            assert_eq!(newest[&peer], 2 * CAPACITY as u64 - 16 + u64::from(peer));
        }
    }

    #[test]
    fn names_without_end_do_not_fill_the_queue() {
        let queue = EventQueue::default();
        let mut dropped = 0;
        for name in 0..LIMIT as u32 + 100 {
            dropped += queue.push(up(name, u64::from(name)));
        }
        assert_eq!(dropped, 100);
        let oldest = queue.wait(Some(Duration::ZERO)).expect("full");
        assert_eq!(oldest, up(100, 100), "the oldest news goes first");
    }

    #[test]
    fn close_wakes_waiters() {
        let queue = std::sync::Arc::new(EventQueue::default());
        let waiter = std::thread::spawn({
            let queue = queue.clone();
            move || queue.wait(None)
        });
        std::thread::sleep(Duration::from_millis(20));
        queue.close();
        assert_eq!(waiter.join().expect("no panic"), None);
    }
}
