//! Messages that wait for the application, and the credit that bounds them.
//!
//! Credit is per sender: a sender may have at most [`WINDOW`] bytes of messages out that the
//! application has not taken, and one message longer than half of that when at most half is out. So a slow
//! receiver pushes back on each sender separately, and what one sender can make it hold is bounded by
//! `WINDOW + MAX_MESSAGE`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::completion::deadline;
use crate::identity::LogicalId;
use crate::sync::{Condvar, Mutex};
use crate::transport::ConnId;
use crate::wire::MAX_MESSAGE;

/// Bytes of messages that one sender may have out.
pub(crate) const WINDOW: u64 = 4 << 20;

/// What a message costs beyond its bytes, so that empty ones are bounded too.
const OVERHEAD: u64 = 64;

/// Credit goes back in steps of this, so that not every message is followed by one of ours.
const RETURN_STEP: u64 = WINDOW / 4;

/// What a message of `len` bytes costs.
pub(crate) fn cost(len: u64) -> u64 {
    len + OVERHEAD
}

/// The sending or the receiving half of the credit of one link. Both sides compute the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Credit {
    /// Cost of all messages sent on this link.
    used: u64,
    /// Up to where `used` may go.
    limit: u64,
}

impl Credit {
    pub(crate) fn new(limit: u64) -> Self {
        Self { used: 0, limit }
    }

    /// Takes the credit of a message, if there is enough.
    pub(crate) fn take(&mut self, len: u64) -> bool {
        let cost = cost(len);
        let enough = if cost > WINDOW / 2 {
            len <= MAX_MESSAGE && self.used + WINDOW / 2 <= self.limit
        } else {
            self.used + cost <= self.limit
        };
        if enough {
            self.used += cost;
        }
        enough
    }

    /// The limit was raised. A lower one is old news.
    pub(crate) fn raise(&mut self, limit: u64) {
        self.limit = self.limit.max(limit);
    }

    /// Raises the limit by what was taken by the application; returns the new limit.
    pub(crate) fn give_back(&mut self, cost: u64) -> u64 {
        self.limit += cost;
        self.limit
    }
}

/// One message for the application.
#[derive(Debug)]
pub(crate) struct Mail {
    pub(crate) from: Arc<LogicalId>,
    /// The link it came on, for the credit.
    pub(crate) conn: ConnId,
    pub(crate) bytes: Vec<u8>,
}

/// Credit that is to go back to a sender.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Owed {
    pub(crate) conn: ConnId,
    pub(crate) cost: u64,
}

/// The queue between the engine and `recv_msg`.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    inner: Mutex<Inner>,
    filled: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    mails: VecDeque<Mail>,
    bytes: u64,
    /// Credit not yet given back, by link.
    owed: Vec<Owed>,
    closed: bool,
}

impl Inbox {
    /// Adds a message. Bounded by the senders' credit.
    pub(crate) fn push(&self, mail: Mail) {
        let mut inner = self.inner.lock();
        if inner.closed {
            return;
        }
        inner.bytes += mail.bytes.len() as u64;
        inner.mails.push_back(mail);
        drop(inner);
        self.filled.notify_one();
    }

    /// The next message, and the credit that is to go back now, if any. `None` after `timeout`
    /// (`None`: never) or when closed.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Option<(Mail, Option<Owed>)> {
        let until = deadline(timeout);
        let mut inner = self.inner.lock();
        loop {
            if inner.closed {
                return None;
            }
            if let Some(taken) = inner.take() {
                return Some(taken);
            }
            let timed_out;
            (inner, timed_out) = self.filled.wait_until(inner, until);
            if timed_out {
                return if inner.closed { None } else { inner.take() };
            }
        }
    }

    /// Bytes that wait.
    pub(crate) fn bytes(&self) -> u64 {
        self.inner.lock().bytes
    }

    /// Bytes of one sender's messages that wait, with their overhead: less of the window is free for its
    /// next link.
    pub(crate) fn held_for(&self, from: &LogicalId) -> u64 {
        let inner = self.inner.lock();
        inner
            .mails
            .iter()
            .filter(|m| *m.from == *from)
            .map(|m| cost(m.bytes.len() as u64))
            .sum()
    }

    /// A link is gone: nothing is owed on it.
    pub(crate) fn forget(&self, conn: ConnId) {
        self.inner.lock().owed.retain(|owed| owed.conn != conn);
    }

    /// Wakes all waiters; nothing is handed out any more.
    pub(crate) fn close(&self) {
        let mut inner = self.inner.lock();
        inner.closed = true;
        inner.mails.clear();
        inner.bytes = 0;
        drop(inner);
        self.filled.notify_all();
    }
}

impl Inner {
    fn take(&mut self) -> Option<(Mail, Option<Owed>)> {
        let mail = self.mails.pop_front()?;
        self.bytes -= mail.bytes.len() as u64;
        let cost = cost(mail.bytes.len() as u64);
        let index = match self.owed.iter().position(|owed| owed.conn == mail.conn) {
            Some(index) => index,
            None => {
                self.owed.push(Owed {
                    conn: mail.conn,
                    cost: 0,
                });
                self.owed.len() - 1
            }
        };
        self.owed[index].cost += cost;
        let due = (self.owed[index].cost >= RETURN_STEP).then(|| self.owed.swap_remove(index));
        Some((mail, due))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever the sizes: a sender whose messages are all taken can always send the next one,
        /// and never has more out than the bound.
        #[test]
        fn credit_never_deadlocks_and_never_overflows(sizes in prop::collection::vec(0u64..=MAX_MESSAGE, 1..60), drain in 1usize..8) {
            let mut sender = Credit::new(WINDOW);
            let mut receiver = Credit::new(WINDOW);
            let mut out = VecDeque::new();
            let mut held = 0u64;
            let mut owed = 0u64;
            for (i, len) in sizes.into_iter().enumerate() {
                let mut take_one = |sender: &mut Credit, receiver: &mut Credit, out: &mut VecDeque<u64>, held: &mut u64| {
                    if let Some(len) = out.pop_front() {
                        *held -= len;
                        owed += cost(len);
                        if owed >= RETURN_STEP {
                            sender.raise(receiver.give_back(owed));
                            owed = 0;
                        }
                    }
                };
                while !sender.take(len) {
                    prop_assert!(!out.is_empty(), "stuck with nothing out at message {i} of {len} bytes");
                    take_one(&mut sender, &mut receiver, &mut out, &mut held);
                }
                prop_assert!(receiver.take(len), "the receiver counts differently");
                out.push_back(len);
                held += len;
                prop_assert!(held <= WINDOW + MAX_MESSAGE);
                if i % drain == 0 {
                    take_one(&mut sender, &mut receiver, &mut out, &mut held);
                }
            }
        }
    }

    #[test]
    fn credit_goes_back_in_steps() {
        let inbox = Inbox::default();
        let from = Arc::new(LogicalId::new("m", 0, 0, 0).expect("valid"));
        let mut returned = 0;
        for _ in 0..100 {
            inbox.push(Mail {
                from: from.clone(),
                conn: ConnId(1),
                bytes: vec![0; 100_000],
            });
            let (_, owed) = inbox.wait(Some(Duration::ZERO)).expect("one");
            returned += owed.map_or(0, |o| o.cost);
        }
        assert!(returned > 8_000_000, "{returned}");
        assert_eq!(inbox.bytes(), 0);
    }
}
