//! A link's life: effects of the peer's state machine, what closes, and how what hung on it ends.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::{
    Close, Conn, Core, FLUSH_TIME, Incoming, Link, NOBODY, Out, Stage, Verdict, debug_line,
    handshake::rejected,
};
use crate::error::{Error, ErrorKind};
use crate::event::EventKind;
use crate::heartbeat::Heartbeat;
use crate::identity::{Incarnation, LogicalId, PeerUrl};
use crate::inbox::{Credit, WINDOW};
use crate::peer::{Effect, How, Input, LinkId, LinkKey, Phase, Refusal, Why, Work as PeerWork};
use crate::random;
use crate::sentinel::Notice;
use crate::transport::{Caps, ConnId, Gone};
use crate::wire::{GoodbyeCode, Message};

use std::sync::Arc;

/// What the application hears of an end.
struct End {
    kind: ErrorKind,
    reason: String,
}

impl End {
    fn status(&self) -> i32 {
        self.kind.code()
    }

    fn error(&self, peer: &LogicalId, detail: &str) -> Error {
        let text = if detail.is_empty() {
            self.reason.clone()
        } else {
            format!("{} ({detail})", self.reason)
        };
        Error::new(self.kind, text).with_peer(peer)
    }
}

/// Our own sentence for why a link is no more, or did not come up; `said` replaces the general one. Those of suspicions contain "timeout", the
/// others never do (SPEC section 6).
fn end_of(why: Why, said: Option<String>) -> End {
    let (kind, general) = match why {
        Why::Dead => (
            ErrorKind::PeerFailed,
            "peer died: the connection is gone".to_owned(),
        ),
        Why::Goodbye => (ErrorKind::PeerFailed, "closed by peer".to_owned()),
        Why::Timeout => (ErrorKind::TimedOut, "transport timeout".to_owned()),
        Why::GivenUp => (
            ErrorKind::TimedOut,
            "link timeout: given up by peer".to_owned(),
        ),
        Why::Redialled => (
            ErrorKind::TimedOut,
            "link timeout: the peer lost the connection and dials anew".to_owned(),
        ),
        Why::Superseded { by } => (
            ErrorKind::PeerFailed,
            format!("superseded by {by}: a newer engine has taken this identity"),
        ),
        Why::Replaced { by } => (
            ErrorKind::PeerFailed,
            format!("replaced by a new incarnation {by}"),
        ),
        Why::Stale { incarnation, by } => (
            ErrorKind::PeerFailed,
            format!("refused: {incarnation} answered, which {by} has replaced"),
        ),
        Why::Refused(refusal) => (
            ErrorKind::PeerFailed,
            match refusal {
                Refusal::Superseded { by } => {
                    format!("superseded by {by}: a newer engine has taken this identity")
                }
                Refusal::Closing => "refused: the peer is closing".into(),
                Refusal::Rejected(rejected::WRONG_IDENTITY) => "refused: wrong identity".into(),
                Refusal::Rejected(rejected::AUTHENTICATION) => {
                    "refused: authentication failed".into()
                }
                Refusal::Rejected(rejected::VERSION) => "refused: another protocol version".into(),
                Refusal::Rejected(rejected::BUSY) => "refused: the peer is busy".into(),
                Refusal::Rejected(_) => "refused: what answered broke the protocol".into(),
            },
        ),
    };
    End {
        kind,
        reason: said.unwrap_or(general),
    }
}

impl Core {
    // ---- the application ----------------------------------------------------------------------

    pub(super) fn connect(&mut self, url: Arc<PeerUrl>) {
        if self.closing.is_some() {
            return;
        }
        let peer = self.peer_index(&url.id);
        let entry = &mut self.peers[peer];
        entry.url = Some(url);
        match entry.machine.phase() {
            Phase::Closed => {}
            // A link that is on its way down is no link: the new one follows it.
            Phase::Up => entry.connect_called = entry.leaving.is_some(),
            _ => {
                entry.connect_called = true;
                self.want(peer, true);
            }
        }
    }

    pub(super) fn disconnect(&mut self, id: &LogicalId) {
        let Some(&peer) = self.by_id.get(id) else {
            return;
        };
        let until = self.now + FLUSH_TIME;
        let entry = &mut self.peers[peer];
        entry.leaving = Some(until);
        entry.connect_called = false;
        self.check_at(self.now);
    }

    /// Somebody needs a link to this peer.
    pub(super) fn want(&mut self, peer: usize, explicit: bool) {
        let link = LinkId(random::number());
        self.input(peer, Input::Want { link, explicit });
    }

    // ---- the state machine --------------------------------------------------------------------

    pub(super) fn input(&mut self, peer: usize, input: Input) {
        self.input_with(peer, input, None, "");
    }

    /// Feeds the state machine of a peer and carries out its effects. `said` is our own sentence on the
    /// cause, `detail` the transport's words.
    pub(super) fn input_with(
        &mut self,
        peer: usize,
        input: Input,
        said: Option<String>,
        detail: &str,
    ) {
        let mut effects = Vec::new();
        self.peers[peer].machine.on(input, &mut effects);
        let why = effects.iter().find_map(|e| match e {
            Effect::Failed { why, .. } => Some(*why),
            _ => None,
        });
        for effect in effects {
            self.effect(peer, effect, why, said.as_deref(), detail);
        }
        // Work that came while a link was on its way down needs a new one.
        let entry = &self.peers[peer];
        if entry.machine.phase() == Phase::Idle
            && !entry.waiting.is_empty()
            && self.closing.is_none()
        {
            self.want(peer, false);
        }
    }

    fn effect(
        &mut self,
        peer: usize,
        effect: Effect,
        why: Option<Why>,
        said: Option<&str>,
        detail: &str,
    ) {
        match effect {
            Effect::Dial { link } => self.dial(peer, link),
            Effect::SendHello { greeting } => self.send_hello(peer, greeting),
            Effect::SendWelcome { link } => self.send_welcome(peer, link),
            Effect::SendRefusal { link, refusal } => self.send_refusal(peer, link, refusal),
            Effect::SendConfirm { link } => {
                if let Some(&conn) = self.peers[peer].links.get(&LinkKey::mine(link)) {
                    self.send(conn, &Message::Confirm { link: link.0 });
                }
            }
            Effect::CloseLink { key, how } => self.close_link(peer, key, how, why, said, detail),
            Effect::Joined { rejoin, .. } => {
                self.peers[peer].joined = true;
                if rejoin {
                    self.shared.counters.rejoins.add_one();
                }
                self.event(peer, EventKind::Joined { rejoin });
            }
            Effect::Up { key } => self.link_up(peer, key),
            Effect::Failed { established, why } => {
                self.failed(peer, established, why, said.map(str::to_owned), detail);
            }
            Effect::EndWork { which } => self.end_work(peer, which, why, said, detail),
            Effect::WantAgain { explicit } => self.want(peer, explicit),
        }
    }

    fn failed(
        &mut self,
        peer: usize,
        established: bool,
        why: Why,
        said: Option<String>,
        detail: &str,
    ) {
        let end = end_of(why, said);
        let called = std::mem::take(&mut self.peers[peer].connect_called);
        self.peers[peer].dial = None;
        if established {
            self.shared.counters.failures.add_one();
        }
        if established || called {
            let (status, reason) = (end.status(), end.reason);
            self.event(
                peer,
                EventKind::Failed {
                    status,
                    reason,
                    detail: detail.to_owned(),
                    established,
                },
            );
        }
    }

    fn end_work(
        &mut self,
        peer: usize,
        which: PeerWork,
        why: Option<Why>,
        said: Option<&str>,
        detail: &str,
    ) {
        let entry = &mut self.peers[peer];
        // Messages outlive a peer that comes back in a new life: they go to the newcomer.
        let mut ended: Vec<u64> = Vec::new();
        match which {
            PeerWork::Bound => {
                let replaced = matches!(why, Some(Why::Replaced { .. }));
                for op in std::mem::take(&mut entry.letters) {
                    let keep = replaced && self.ops.get(&op).is_some_and(|op| !op.is_transfer());
                    if keep {
                        entry.waiting.push_back(op);
                    } else {
                        ended.push(op);
                    }
                }
            }
            PeerWork::Unbound => {
                entry.dial = None;
                ended.extend(std::mem::take(&mut entry.letters));
                ended.extend(std::mem::take(&mut entry.waiting));
            }
        }
        let error = match why {
            Some(why) => end_of(why, said.map(str::to_owned)).error(&self.peers[peer].id, detail),
            None if self.closing.is_some() => Error::closed(),
            None if self.peers[peer].leaving.is_some() => {
                Error::new(ErrorKind::Canceled, "canceled: disconnected").with_peer(&self.peers[peer].id)
            }
            None => Error::new(
                ErrorKind::PeerFailed,
                "superseded: a newer engine has taken this engine's identity; connect explicitly to try all the same",
            )
            .with_peer(&self.peers[peer].id),
        };
        for op in ended {
            self.finish(op, Err(error.clone()));
        }
    }

    // ---- up and down --------------------------------------------------------------------------

    fn link_up(&mut self, peer: usize, key: LinkKey) {
        let Some(&conn) = self.peers[peer].links.get(&key) else {
            return;
        };
        let heartbeat = self
            .shared
            .heartbeats
            .map(|(interval, timeout)| Heartbeat::new(interval, timeout, self.now));
        if let Some((interval, _)) = self.shared.heartbeats {
            self.check_at(self.now + interval);
        }
        let held = self.shared.inbox.held_for(&self.peers[peer].id);
        let Some(entry) = self.conns.get_mut(&conn) else {
            return;
        };
        entry.stage = Stage::Live;
        if let Some(life) = entry.life
            && !self
                .shared
                .seat
                .link_up(conn, life, entry.issued, entry.obituaries)
        {
            self.shared.counters.obituaries_unlisted.add_one();
        }
        entry.deadline = None;
        entry.hello = None;
        entry.link = Some(Box::new(Link {
            piece: 0,
            small: VecDeque::new(),
            bulk: VecDeque::new(),
            one_sided: false,
            reaches_devices: false,
            keys: super::one_sided::Keys::new(),
            pumped: false,
            reads_out: 0,
            reads_waiting: VecDeque::new(),
            refused: HashMap::new(),
            credit_out: Credit::new(entry.window.min(WINDOW)),
            credit_in: Credit::new(WINDOW.saturating_sub(held)),
            next_seq_out: 0,
            next_seq_in: 0,
            letters_in: BTreeMap::new(),
            heartbeat,
            sent: self.now,
            moved: self.now,
        }));
        let peer_entry = &mut self.peers[peer];
        peer_entry.live = Some(conn);
        peer_entry.dial = None;
        peer_entry.connect_called = false;
        self.shared.counters.live_peers.add_one();
        self.shared
            .paths
            .lock()
            .insert((*peer_entry.id).clone(), ("connecting".into(), "requested"));
        self.event(peer, EventKind::Up);
        self.out.push(Out::Learn(conn));
    }

    /// What the transport says of a connection that has just come up: work that waits goes out.
    pub(crate) fn learn_caps(
        &mut self,
        conn: ConnId,
        caps: Caps,
        one_sided: bool,
        reaches_devices: bool,
    ) {
        let Some(Conn {
            peer: Some(peer),
            link: Some(link),
            ..
        }) = self.conns.get_mut(&conn)
        else {
            return;
        };
        link.piece = caps.piece;
        link.one_sided = one_sided;
        link.reaches_devices = reaches_devices;
        let mode = if one_sided { "one-sided" } else { "requested" };
        let id = (*self.peers[*peer].id).clone();
        self.shared.paths.lock().insert(id, (caps.path, mode));
        for op in std::mem::take(&mut self.peers[*peer].waiting) {
            self.start(op, conn);
        }
    }

    /// The state machine closes a connection: says what is to be said, and remembers how operations on it end.
    fn close_link(
        &mut self,
        peer: usize,
        key: LinkKey,
        how: How,
        why: Option<Why>,
        said: Option<&str>,
        detail: &str,
    ) {
        if self.peers[peer]
            .dial
            .is_some_and(|(link, _)| LinkKey::mine(link) == key)
        {
            self.peers[peer].dial = None;
        }
        let Some(conn) = self.peers[peer].links.remove(&key) else {
            return;
        };
        let error = match (how, why) {
            (How::Goodbye, _) if self.closing.is_some() => Error::closed(),
            (How::Goodbye, _) => Error::new(ErrorKind::Canceled, "canceled: disconnected")
                .with_peer(&self.peers[peer].id),
            (_, Some(why)) => {
                end_of(why, said.map(str::to_owned)).error(&self.peers[peer].id, detail)
            }
            _ => Error::new(ErrorKind::PeerFailed, "the connection was given up")
                .with_peer(&self.peers[peer].id),
        };
        if self.peers[peer].live == Some(conn) {
            if how == How::Suspected {
                self.shared.seat.tell_given_up(conn);
            }
            self.peers[peer].live = None;
            self.shared.counters.live_peers.sub_one();
            self.shared.paths.lock().remove(&*self.peers[peer].id);
            self.shared.inbox.forget(conn);
            self.channels_lost(conn, &error);
            self.shared.seat.link_down(conn);
        }
        if !self.release(conn, error) {
            return;
        }
        match how {
            How::Silently => self.out.push(Out::Close(conn, Close::Abort)),
            How::Goodbye => {
                self.send_last(
                    conn,
                    &Message::Goodbye {
                        why: GoodbyeCode::Closed,
                        by: NOBODY,
                    },
                );
                self.close_in_order(conn);
            }
            How::Suspected => {
                self.send(
                    conn,
                    &Message::Goodbye {
                        why: GoodbyeCode::GivenUp,
                        by: NOBODY,
                    },
                );
                self.out.push(Out::Close(conn, Close::Abort));
            }
            How::Superseded { by } => {
                self.send_last(
                    conn,
                    &Message::Goodbye {
                        why: GoodbyeCode::Superseded,
                        by,
                    },
                );
                self.close_in_order(conn);
            }
        }
    }

    /// The state machine knows this connection no more; false if the transport has closed it already.
    /// What waits to be sent on it is dropped.
    pub(super) fn release(&mut self, conn: ConnId, error: Error) -> bool {
        let Some(entry) = self.conns.get_mut(&conn) else {
            return false;
        };
        entry.stage = Stage::Leaving;
        entry.released = Some(error);
        if let Some(link) = &mut entry.link {
            link.small.clear();
            link.bulk.clear();
            link.heartbeat = None;
        }
        true
    }

    /// The peer's sentinel says how the peer is. Its token names this very link, so that no later one can be meant.
    pub(super) fn obituary(&mut self, conn: ConnId, notice: Notice) {
        let live = |c: &Conn| c.stage == Stage::Live && c.verdict.is_none();
        if !self.conns.get(&conn).is_some_and(live) {
            return;
        }
        let counters = &self.shared.counters;
        match notice {
            Notice::Died => {
                counters.obituaries.add_one();
                let reason = "peer died: obituary of its sentinel".to_owned();
                self.give_up(conn, Why::Dead, reason);
            }
            Notice::Dumping => {
                counters.obituaries.add_one();
                let reason =
                    "peer died: its sentinel says that its core is being dumped".to_owned();
                self.give_up(conn, Why::Dead, reason);
            }
            Notice::Stalled(ms) => {
                counters.stall_suspicions.add_one();
                let reason = format!(
                    "stall timeout: the peer made no progress for {ms} ms, says its sentinel"
                );
                self.suspect(conn, reason);
            }
            Notice::GivenUp => self.on_goodbye(conn, GoodbyeCode::GivenUp, NOBODY, ""),
        }
    }

    /// This engine suspects a link: see [`give_up`](Self::give_up).
    pub(super) fn suspect(&mut self, conn: ConnId, reason: String) {
        self.give_up(conn, Why::Timeout, reason);
    }

    /// Closes a link, and tells the state machine once no memory is in use any more: a dead peer's own half of the connection
    /// may live on for a while.
    pub(super) fn give_up(&mut self, conn: ConnId, why: Why, reason: String) {
        let Some(entry) = self.conns.get_mut(&conn) else {
            return;
        };
        if entry.verdict.is_some() || entry.stage == Stage::Leaving {
            return;
        }
        entry.verdict = Some(Verdict {
            why,
            reason: Some(reason),
        });
        let live = entry.stage == Stage::Live;
        entry.stage = Stage::Leaving;
        entry.deadline = None;
        if let Some(link) = &mut entry.link {
            link.small.clear();
            link.bulk.clear();
        }
        if live && why.is_suspicion() {
            // Twice: a frame stays in order with what was sent, and is dropped with it where the transport closes by force.
            self.shared.seat.tell_given_up(conn);
            self.send(
                conn,
                &Message::Goodbye {
                    why: GoodbyeCode::GivenUp,
                    by: NOBODY,
                },
            );
        }
        self.out.push(Out::Close(conn, Close::Abort));
    }

    /// The peer said goodbye.
    pub(super) fn on_goodbye(
        &mut self,
        conn: ConnId,
        why: GoodbyeCode,
        by: Incarnation,
        text: &str,
    ) {
        let Some(entry) = self.conns.get_mut(&conn) else {
            return;
        };
        if entry.stage == Stage::Leaving {
            return;
        }
        let why = match why {
            GoodbyeCode::Closed => Why::Goodbye,
            GoodbyeCode::GivenUp => Why::GivenUp,
            GoodbyeCode::Superseded => Why::Superseded { by },
        };
        entry.farewell = Some((why, text.to_owned()));
        entry.stage = Stage::Leaving;
        self.out.push(Out::Close(conn, Close::Abort));
    }

    /// The transport has let go of a connection: no memory is in use for it any more.
    pub(super) fn on_closed(&mut self, conn: ConnId, gone: Gone) {
        let Some(mut entry) = self.conns.remove(&conn) else {
            return;
        };
        self.shared.counters.eps_closed.add_one();
        if self.shared.debug {
            debug_line(&format!("connection {} closed: {gone:?}", conn.0));
        }
        if Self::is_stranger(&entry) {
            self.strangers -= 1;
            match &gone {
                Gone::Protocol { detail } => self.stranger_refused(detail),
                _ => self.stranger_refused("a connection that ended before it said who it is"),
            }
        }
        self.copies.forget(conn);
        if let Some(link) = entry.link.take() {
            self.forget_keys(conn, link.keys);
        }
        let Some(peer) = entry.peer else { return };
        if let Some(error) = entry.released {
            return self.end_ops(entry.ops, &error);
        }
        if entry.stage == Stage::Dialling {
            self.peers[peer].links.retain(|_, c| *c != conn);
            if self.dial_again(peer, entry.key, &gone) {
                return;
            }
        }
        let dialling = matches!(entry.stage, Stage::Dialling | Stage::Greeted);
        let detail = match &gone {
            Gone::Local => String::new(),
            Gone::EndOfStream => "end of stream".to_owned(),
            Gone::Reset { detail }
            | Gone::TimedOut { detail }
            | Gone::Unreachable { detail }
            | Gone::Protocol { detail } => detail.clone(),
        };
        let (why, said) = match (entry.verdict, entry.farewell, gone) {
            (Some(verdict), _, _) => (verdict.why, verdict.reason),
            (_, Some((why, _)), _) => (why, None),
            (_, _, Gone::EndOfStream | Gone::Reset { .. })
                if entry.stage == Stage::Live && self.shared.seat.was_given_up(conn) =>
            {
                (Why::GivenUp, None)
            }
            (_, _, Gone::TimedOut { .. }) if dialling => (
                Why::Timeout,
                Some("connect timeout: no answer from the network".to_owned()),
            ),
            (_, _, Gone::TimedOut { .. }) => (Why::Timeout, None),
            (_, _, Gone::Unreachable { .. }) => (
                Why::Dead,
                Some(format!("cannot connect to {}", self.where_is(peer))),
            ),
            (_, _, Gone::Protocol { .. }) if dialling => (
                Why::Dead,
                Some(format!(
                    "what listens at {} is not a connex-rs engine, or its transport is another one",
                    self.where_is(peer)
                )),
            ),
            (_, _, Gone::Protocol { .. }) => {
                (Why::Dead, Some("the peer broke the protocol".to_owned()))
            }
            (_, _, Gone::EndOfStream | Gone::Reset { .. }) if dialling => (
                Why::Dead,
                Some(format!(
                    "{} closed the connection during the handshake: a likely cause is another transport setting there",
                    self.where_is(peer)
                )),
            ),
            _ => (Why::Dead, None),
        };
        let error = end_of(why, said.clone()).error(&self.peers[peer].id, &detail);
        self.end_ops(entry.ops, &error);
        if let Some(key) = entry.key {
            // Still among the links, so that the machine's release finds it and counters are kept.
            self.peers[peer].links.insert(key, conn);
            self.input_with(peer, Input::Lost { key, why }, said, &detail);
            self.peers[peer].links.remove(&key);
        }
    }

    fn where_is(&self, peer: usize) -> String {
        self.peers[peer]
            .url
            .as_ref()
            .map_or_else(|| "the peer".to_owned(), |url| url.authority())
    }

    fn end_ops(&mut self, ops: impl IntoIterator<Item = u64>, error: &Error) {
        for id in ops {
            let own = self.ops.get_mut(&id).and_then(|op| op.doom.take());
            self.finish(id, Err(own.unwrap_or_else(|| error.clone())));
        }
    }

    /// Whether a connection has nothing of the application's left to deliver.
    pub(super) fn delivered(&self, peer: usize) -> bool {
        let entry = &self.peers[peer];
        let Some(conn) = entry.live else {
            return entry.waiting.is_empty() && entry.letters.is_empty();
        };
        let idle = self.conns.get(&conn).is_none_or(|c| {
            c.link
                .as_ref()
                .is_none_or(|l| l.small.is_empty() && l.bulk.is_empty())
                && c.ops
                    .iter()
                    .all(|op| self.ops.get(op).is_none_or(|op| op.is_read()))
        });
        idle && entry.letters.is_empty() && !self.copies.out.holds(conn)
    }

    /// Frames that come on a connection that is being closed lead nowhere.
    pub(super) fn ignore(entry: &mut Conn) {
        entry.incoming = Some(Incoming::Nothing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SPEC section 6: clients tell deaths and suspicions apart by the word "timeout".
    #[test]
    fn reasons_say_timeout_exactly_for_suspicions() {
        let by = Incarnation {
            start_ns: 1,
            random: 2,
        };
        for why in [
            Why::Dead,
            Why::Goodbye,
            Why::Timeout,
            Why::GivenUp,
            Why::Redialled,
            Why::Superseded { by },
            Why::Replaced { by },
            Why::Stale {
                incarnation: by,
                by,
            },
            Why::Refused(Refusal::Superseded { by }),
            Why::Refused(Refusal::Closing),
            Why::Refused(Refusal::Rejected(rejected::WRONG_IDENTITY)),
            Why::Refused(Refusal::Rejected(rejected::AUTHENTICATION)),
            Why::Refused(Refusal::Rejected(rejected::BUSY)),
            Why::Refused(Refusal::Rejected(rejected::VERSION)),
        ] {
            let end = end_of(why, None);
            assert_eq!(
                end.reason.contains("timeout"),
                why.is_suspicion(),
                "{why:?}: {}",
                end.reason
            );
            assert_eq!(end.status() == -3, why.is_suspicion(), "{why:?}");
            assert_eq!(end.reason, end.reason.to_lowercase(), "{why:?}");
        }
        assert_eq!(end_of(Why::Goodbye, None).reason, "closed by peer");
    }
}
