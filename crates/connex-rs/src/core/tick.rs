//! Time: deadlines, heartbeats, and closing.

use std::time::Duration;

use super::{Close, Closing, ConnId, Core, FLUSH_TIME, GOODBYE_TIME, Out, Stage};
use crate::error::Error;
use crate::heartbeat::Beat;
use crate::peer::{Input, LinkKey, Why};
use crate::wire::Message;

/// An engine that gets to run this much too late (stopped, starved) does not blame its peers for the silence.
const OWN_GAP: u64 = 50_000_000;

/// While something is being flushed its state is looked at this often.
const FLUSH_CHECK: u64 = 1_000_000;

impl Core {
    /// When [`tick`](Self::tick) has something to do next; `u64::MAX` for never.
    pub(crate) fn next_tick(&self) -> u64 {
        let timer = self.timers.first().map_or(u64::MAX, |&(at, _)| at);
        timer.min(self.next_check)
    }

    /// Looks at the clock. Called after the transport's news have been taken in, so that nobody is
    /// blamed for a silence that is only ours.
    pub(crate) fn tick(&mut self) {
        if self.now >= self.next_check {
            // How much later than asked for this engine got to run.
            let late = self.now - std::mem::replace(&mut self.next_check, u64::MAX);
            let slept = if late > OWN_GAP { late } else { 0 };
            self.check_peers();
            self.check_conns(slept);
            self.check_withdrawals();
            self.check_closing();
        }
        self.expire_ops();
    }

    fn check_peers(&mut self) {
        for peer in 0..self.peers.len() {
            if let Some((link, until)) = self.peers[peer].dial {
                if self.now < until {
                    self.check_at(until);
                } else {
                    self.dial_timed_out(peer, link);
                }
            }
            if let Some(until) = self.peers[peer].leaving {
                if self.now >= until || self.delivered(peer) {
                    self.input(peer, Input::Disconnect);
                    self.peers[peer].leaving = None;
                    let entry = &self.peers[peer];
                    if entry.connect_called || !entry.waiting.is_empty() {
                        self.want(peer, true);
                    }
                } else {
                    self.check_at(self.now + FLUSH_CHECK);
                }
            }
        }
    }

    fn dial_timed_out(&mut self, peer: usize, link: crate::peer::LinkId) {
        self.peers[peer].dial = None;
        let key = LinkKey::mine(link);
        let reason = format!(
            "connect timeout: no answer within {:?}",
            Duration::from_nanos(super::CONNECT_TIMEOUT)
        );
        match self.peers[peer].links.get(&key) {
            Some(&conn) => self.suspect(conn, reason),
            None => self.input_with(
                peer,
                Input::Lost {
                    key,
                    why: Why::Timeout,
                },
                Some(reason),
                "",
            ),
        }
    }

    fn check_conns(&mut self, slept: u64) {
        let mut overdue: Vec<ConnId> = Vec::new();
        let mut pings: Vec<ConnId> = Vec::new();
        let mut silent: Vec<(ConnId, u64)> = Vec::new();
        let mut next = u64::MAX;
        for (&id, conn) in &mut self.conns {
            match conn.deadline {
                Some(at) if at <= self.now => overdue.push(id),
                Some(at) => next = next.min(at),
                None => {}
            }
            let Some(heartbeat) = conn.link.as_mut().and_then(|l| l.heartbeat.as_mut()) else {
                continue;
            };
            if conn.stage != Stage::Live {
                continue;
            }
            if slept > 0 {
                heartbeat.forgive(slept, self.now);
            }
            loop {
                match heartbeat.tick(self.now) {
                    Beat::Ping => pings.push(id),
                    Beat::Rest { until } => {
                        next = next.min(until);
                        break;
                    }
                    Beat::Suspect { silence } => {
                        silent.push((id, silence));
                        break;
                    }
                }
            }
        }
        self.check_at(next);
        for conn in pings {
            self.send(conn, &Message::Ping { stamp: self.now });
        }
        for (conn, silence) in silent {
            self.shared.counters.heartbeat_failures.add_one();
            self.suspect(
                conn,
                format!(
                    "heartbeat timeout: nothing heard for {} ms",
                    silence / 1_000_000
                ),
            );
        }
        for conn in overdue {
            self.overdue(conn);
        }
    }

    /// A stage of a connection has taken too long.
    fn overdue(&mut self, conn: ConnId) {
        let Some(entry) = self.conns.get_mut(&conn) else {
            return;
        };
        entry.deadline = None;
        if Self::is_stranger(entry) {
            self.drop_stranger(conn, "a connection that did not say who it is in time");
        } else if entry.stage == Stage::Leaving {
            self.out.push(Out::Close(conn, Close::Abort));
        } else {
            self.suspect(
                conn,
                "handshake timeout: the dialler did not confirm".into(),
            );
        }
    }

    // ---- closing ------------------------------------------------------------------------------

    pub(super) fn begin_close(&mut self) {
        if self.closing.is_some() {
            return;
        }
        self.closing = Some(Closing {
            flush_until: self.now + FLUSH_TIME,
            abort_at: None,
        });
        self.out.push(Out::StopListening);
        self.check_at(self.now);
    }

    fn check_closing(&mut self) {
        let Some(closing) = self.closing else { return };
        match closing.abort_at {
            None => {
                let delivered = (0..self.peers.len())
                    .all(|peer| self.peers[peer].live.is_none() || self.delivered(peer));
                if delivered || self.now >= closing.flush_until {
                    for peer in 0..self.peers.len() {
                        self.input(peer, Input::Close);
                    }
                    self.closing = Some(Closing {
                        abort_at: Some(self.now + GOODBYE_TIME),
                        ..closing
                    });
                    let strangers: Vec<ConnId> = self
                        .conns
                        .iter()
                        .filter(|(_, c)| Self::is_stranger(c))
                        .map(|(&id, _)| id)
                        .collect();
                    for conn in strangers {
                        self.drop_stranger(conn, "the engine closes");
                    }
                    self.end_if_empty();
                }
            }
            Some(at) if self.now >= at => {
                for &conn in self.conns.keys() {
                    self.out.push(Out::Close(conn, Close::Abort));
                }
                self.end_if_empty();
            }
            Some(_) => self.end_if_empty(),
        }
        if !self.closed {
            self.check_at(self.now + FLUSH_CHECK);
        }
    }

    /// Once no connection is left no memory is in use: the rest of the operations ends.
    fn end_if_empty(&mut self) {
        if !self.conns.is_empty() {
            return;
        }
        let rest: Vec<u64> = self.ops.keys().copied().collect();
        for id in rest {
            self.finish(id, Err(Error::closed()));
        }
        self.closed = true;
    }
}
