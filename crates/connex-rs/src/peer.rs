//! One peer as one engine sees it: a plain state machine.
//!
//! It does no I/O, has no clock and draws no random numbers: inputs go in, effects come out, and the
//! same inputs give the same effects. The progress loop feeds it and carries out the effects in order.
//!
//! # Handshake
//! ```text
//! dialler                       acceptor
//!   Hello(incarnation, …)  ->
//!                          <-   Welcome(incarnation)  or  Refusal
//!   Confirm                ->
//!   up                          up
//! ```
//! The dialler is up when the answer has come, the acceptor when the third message has: both have
//! seen a round trip. Payload may follow the Confirm at once.
//!
//! # Links
//! At most one link is up, and each connection that the machine is told of or asks for is closed
//! exactly once: by [`Effect::CloseLink`] or [`Effect::SendRefusal`]. A link that the machine no longer
//! knows is forgotten: late inputs about it are ignored.
//!
//! # Crossing dials
//! Two peers that dial each other at one moment keep the connection opened by the lower logical id. The
//! lower side *parks* the other's hello while its own dial is in progress: it neither answers nor
//! refuses it. The higher side drops its own dial for the other's hello, which ends the parked one; if
//! the lower one's dial fails instead, the parked hello is accepted.
//!
//! A hello of the life that a link is up to says that the link is lost, or is late: it was sent before
//! that link was made, and its connection is being dropped. [`Greeting::lost`] and
//! [`Greeting::attempt`] tell which. Where they do not, the hello is parked, too: either its end comes, or
//! the end of the link, and then it is accepted. So is the first hello after a link that its sender closed
//! in order, which overtook the goodbye ([`Greeting::closed`]).
//!
//! # Lives
//! A greater incarnation replaces a smaller one; one that was replaced is never accepted again (the
//! last [`REPLACED_KEPT`] of them are remembered). See [`Refusal::Superseded`].

use std::collections::VecDeque;
use std::fmt;

use crate::identity::{Incarnation, LogicalId};

/// How many replaced incarnations of one peer are remembered; the oldest is forgotten first.
pub const REPLACED_KEPT: usize = 256;

/// Names one connection attempt: a random number chosen by the dialling engine, never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u64);

/// Which end of a connection dialled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dialler {
    /// This engine.
    Me,
    /// The peer.
    Them,
}

/// Names a connection to one peer: both ends choose ids, so the dialler is part of the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkKey {
    /// Who opened the connection, and chose `id`.
    pub dialler: Dialler,
    /// The dialler's name for it.
    pub id: LinkId,
}

impl LinkKey {
    /// A link that this engine dialled.
    pub fn mine(id: LinkId) -> Self {
        Self {
            dialler: Dialler::Me,
            id,
        }
    }

    /// A link that the peer dialled.
    pub fn theirs(id: LinkId) -> Self {
        Self {
            dialler: Dialler::Them,
            id,
        }
    }

    /// The same link as the other end names it.
    pub fn mirrored(self) -> Self {
        match self.dialler {
            Dialler::Me => Self::theirs(self.id),
            Dialler::Them => Self::mine(self.id),
        }
    }
}

impl fmt::Display for LinkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dialler = match self.dialler {
            Dialler::Me => "out",
            Dialler::Them => "in",
        };
        write!(f, "{dialler}:{:016x}", self.id.0)
    }
}

/// Why a hello is not welcome. Travels to the dialler, whose machine gets [`Input::Refused`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The sender of the hello claims an identity that a later incarnation has taken.
    Superseded {
        /// The incarnation that took it.
        by: Incarnation,
    },
    /// The engine is closing.
    Closing,
    /// A reason of the engine's own (wrong identity, protocol version, …), by a code of its own.
    /// The machine never makes one and only passes it through.
    Rejected(u16),
}

/// Why a link ended or did not come up.
///
/// The first group comes in with [`Input::Lost`]; the machine makes the second group itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Why {
    /// The transport says that the connection is gone (reset, end of stream, nobody listens), or an
    /// obituary came: a death.
    Dead,
    /// The peer said goodbye: a death in the sense of the events, with a reason of its own.
    Goodbye,
    /// This engine ran out of patience: heartbeat, operation, dial or handshake deadline. A suspicion.
    Timeout,
    /// The peer said that it gave this link up after a time-out of its own. A suspicion.
    GivenUp,
    /// The peer said that a later incarnation of this engine's id has taken the link's place.
    Superseded {
        /// That incarnation.
        by: Incarnation,
    },

    /// The same incarnation dialled anew because it had lost this link. It lives, so: a suspicion.
    Redialled,
    /// A later incarnation of the peer said hello.
    Replaced {
        /// That incarnation.
        by: Incarnation,
    },
    /// The peer refused the hello.
    Refused(Refusal),
    /// An incarnation answered that was replaced before, or than which a later one waits already.
    Stale {
        /// The one that answered.
        incarnation: Incarnation,
        /// The one that had taken its place.
        by: Incarnation,
    },
}

impl Why {
    /// Whether this is a suspicion (nothing says that the peer's process is gone) rather than a death.
    pub fn is_suspicion(self) -> bool {
        matches!(self, Self::Timeout | Self::GivenUp | Self::Redialled)
    }
}

/// How to close a link, that is, what to tell the other end first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum How {
    /// Nothing: the link is gone already, was never up, or the other end drops it too.
    Silently,
    /// A goodbye: the other end gets [`Why::Goodbye`].
    Goodbye,
    /// That this engine gave the link up, if the other end still reads: it gets [`Why::GivenUp`].
    Suspected,
    /// That a later incarnation has come: the other end gets [`Why::Superseded`].
    Superseded {
        /// That incarnation.
        by: Incarnation,
    },
}

/// What a dialler says first, besides who it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Greeting {
    /// The dialler's name for the connection.
    pub link: LinkId,
    /// Counts the dials of the sender to this peer, so that hellos that overtake one another on
    /// different connections are put in order.
    pub attempt: u64,
    /// The last link, **as the sender names it**, that was up or half-open for the sender and is no more.
    pub lost: Option<LinkKey>,
    /// The sender closed that link in order: what it sent before, and its goodbye, may still be under way.
    pub closed: bool,
}

/// What the machine is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Input {
    /// Somebody needs a link. Harmless to repeat.
    Want {
        /// Names the dial if one starts now; otherwise it is not used.
        link: LinkId,
        /// The application asked: `connect`, or a new operation. `false` when the engine wants by itself,
        /// for work that waits. After this engine was superseded only an explicit want dials.
        explicit: bool,
    },
    /// Our dial is connected: time for the hello.
    Connected {
        /// The link.
        link: LinkId,
    },
    /// A hello came on a new connection. The engine has checked the wanted id, the protocol version and
    /// that no open connection of this peer has the same link id. It may stay without an answer for a
    /// while: the engine bounds that by a deadline longer than the dial deadline, which ends as
    /// `Lost { Timeout }`.
    Hello {
        /// The hello.
        greeting: Greeting,
        /// The life of the peer that speaks.
        incarnation: Incarnation,
    },
    /// The answer to our hello.
    Welcome {
        /// The link.
        link: LinkId,
        /// The life of the peer that answers.
        incarnation: Incarnation,
    },
    /// The other answer to our hello, or the engine's own: the answer does not pass its checks.
    Refused {
        /// The link.
        link: LinkId,
        /// The reason.
        refusal: Refusal,
    },
    /// The third message of the handshake, on a link that the peer dialled.
    Confirm {
        /// The link.
        link: LinkId,
    },
    /// A link is over: the transport closed it, the peer announced its end, or a deadline passed.
    Lost {
        /// The link.
        key: LinkKey,
        /// One of the first group of [`Why`].
        why: Why,
    },
    /// The application does not want this peer now. What was to be delivered first, has been.
    Disconnect,
    /// The engine closes. Nothing starts after this.
    Close,
}

/// Which operations end with -2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Work {
    /// Those that were queued or posted while [`Peer::bound`] was the incarnation just lost.
    Bound,
    /// Those that wait with no incarnation: there will be no link for them.
    Unbound,
}

/// What the machine asks for. The engine carries effects out in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Start to connect to the peer's address; start the dial deadline, which covers the time until
    /// the answer to the hello and ends as `Lost { Timeout }`.
    Dial {
        /// Names the connection.
        link: LinkId,
    },
    /// Send the hello on our connected dial.
    SendHello {
        /// What to say.
        greeting: Greeting,
    },
    /// Accept: answer the hello; start the handshake deadline, which ends as `Lost { Timeout }` if no
    /// Confirm has come.
    SendWelcome {
        /// The accepted link.
        link: LinkId,
    },
    /// Answer the hello with a refusal, flush, and close that connection.
    SendRefusal {
        /// The refused link, dialled by the peer.
        link: LinkId,
        /// The reason.
        refusal: Refusal,
    },
    /// Send the third message of the handshake on our dial.
    SendConfirm {
        /// The link.
        link: LinkId,
    },
    /// Close that connection and release what belongs to it. For a link that the engine reported as lost
    /// it is only the release.
    CloseLink {
        /// The link.
        key: LinkKey,
        /// What to say first.
        how: How,
    },
    /// Report `joined`. Always directly followed by [`Effect::Up`].
    Joined {
        /// The life of the peer that is bound now.
        incarnation: Incarnation,
        /// Whether this identity had been bound before.
        rejoin: bool,
    },
    /// Report `up`; work that waits goes out on this link.
    Up {
        /// The link.
        key: LinkKey,
    },
    /// Report `failed`.
    Failed {
        /// Whether the link had been up.
        established: bool,
        /// Why.
        why: Why,
    },
    /// End operations with -2, after the link they used was closed by an earlier effect.
    EndWork {
        /// Which ones.
        which: Work,
    },
    /// Feed [`Input::Want`] with a fresh link: somebody wanted a link, the peer's dial was preferred, and
    /// came to nothing.
    WantAgain {
        /// What to put into the want.
        explicit: bool,
    },
}

/// Where a peer stands, for statistics and decisions of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// No link, none in the making.
    Idle,
    /// Our dial is in progress.
    Dialling,
    /// We answered the peer's hello and wait for the third message.
    HalfOpen,
    /// A link is up.
    Up,
    /// The engine is closed.
    Closed,
}

/// A hello that was not refused: parked or half-open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Caller {
    link: LinkId,
    incarnation: Incarnation,
    attempt: u64,
}

impl Caller {
    fn key(self) -> LinkKey {
        LinkKey::theirs(self.link)
    }
}

/// Our dial.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Dial {
    link: LinkId,
    /// The hello is out.
    greeted: bool,
}

impl Dial {
    fn key(self) -> LinkKey {
        LinkKey::mine(self.link)
    }
}

/// The link that is up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Live {
    key: LinkKey,
    incarnation: Incarnation,
    /// The attempt that its hello named; 0 for a link of our own.
    attempt: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum State {
    Idle,
    Dialling(Dial),
    HalfOpen(Caller),
    Up(Live),
    Closed,
}

/// Whether somebody waits for the link that is being made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Wanted {
    No,
    ByWork,
    Explicitly,
}

/// The state machine of one peer. See the module's documentation.
///
/// Forgetting one (to bound a table of peers) forgets which incarnations were replaced, so drop it
/// only in [`Phase::Idle`] and long after its last link.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Peer {
    lower: bool,
    state: State,
    wanted: Wanted,
    /// A hello that waits for what becomes of our dial, or of the link that is up.
    parked: Option<Caller>,
    /// The peer told us that a later life of our own id has taken our place.
    superseded: bool,
    /// The incarnation of the last link that was up.
    last: Option<Incarnation>,
    /// The last link that was up or half-open and is no more.
    lost: Option<Live>,
    /// That link was closed by us, in order.
    lost_closed: bool,
    /// The link whose goodbye a hello has waited for: a second one does not wait.
    waited_for: Option<LinkKey>,
    /// Dials so far.
    attempts: u64,
    /// Replaced incarnations, each with the one that took its place; oldest first.
    replaced: VecDeque<(Incarnation, Incarnation)>,
}

impl Peer {
    /// A peer without a link. `me` and `peer` decide whose dial is kept when two cross; an engine never
    /// has a peer of its own id.
    pub fn new(me: &LogicalId, peer: &LogicalId) -> Self {
        Self {
            lower: me < peer,
            state: State::Idle,
            wanted: Wanted::No,
            parked: None,
            superseded: false,
            last: None,
            lost: None,
            lost_closed: false,
            waited_for: None,
            attempts: 0,
            replaced: VecDeque::new(),
        }
    }

    /// The incarnation that work queued now is bound to: that of the link that is up, else none.
    pub fn bound(&self) -> Option<Incarnation> {
        match self.state {
            State::Up(live) => Some(live.incarnation),
            _ => None,
        }
    }

    /// The link that is up.
    pub fn up(&self) -> Option<LinkKey> {
        match self.state {
            State::Up(live) => Some(live.key),
            _ => None,
        }
    }

    /// The incarnation that was bound last, whether or not a link to it is up.
    pub fn last_bound(&self) -> Option<Incarnation> {
        self.last
    }

    /// Where the peer stands.
    pub fn phase(&self) -> Phase {
        match self.state {
            State::Idle => Phase::Idle,
            State::Dialling(_) => Phase::Dialling,
            State::HalfOpen(_) => Phase::HalfOpen,
            State::Up(_) => Phase::Up,
            State::Closed => Phase::Closed,
        }
    }

    /// Takes one input and appends what is to be done to `out`. Never panics and never blocks, whatever
    /// comes in.
    pub fn on(&mut self, input: Input, out: &mut Vec<Effect>) {
        match input {
            Input::Want { link, explicit } => self.want(link, explicit, out),
            Input::Connected { link } => self.connected(link, out),
            Input::Hello {
                greeting,
                incarnation,
            } => self.hello(greeting, incarnation, out),
            Input::Welcome { link, incarnation } => self.welcome(link, incarnation, out),
            Input::Refused { link, refusal } => self.refused(link, refusal, out),
            Input::Confirm { link } => self.confirm(link, out),
            Input::Lost { key, why } => self.lost(key, why, out),
            Input::Disconnect => self.leave(State::Idle, out),
            Input::Close => self.leave(State::Closed, out),
        }
    }

    fn want(&mut self, link: LinkId, explicit: bool, out: &mut Vec<Effect>) {
        let wanted = if explicit {
            Wanted::Explicitly
        } else {
            Wanted::ByWork
        };
        match self.state {
            State::Up(_) => {}
            State::Dialling(_) | State::HalfOpen(_) => self.wanted = self.wanted.max(wanted),
            State::Idle if explicit || !self.superseded => {
                self.superseded = false;
                self.wanted = wanted;
                self.attempts += 1;
                self.state = State::Dialling(Dial {
                    link,
                    greeted: false,
                });
                out.push(Effect::Dial { link });
            }
            State::Idle | State::Closed => out.push(Effect::EndWork {
                which: Work::Unbound,
            }),
        }
    }

    fn connected(&mut self, link: LinkId, out: &mut Vec<Effect>) {
        match self.state {
            State::Dialling(dial) if dial.link == link && !dial.greeted => {
                self.state = State::Dialling(Dial {
                    greeted: true,
                    ..dial
                });
                let lost = self.lost.map(|live| live.key);
                let greeting = Greeting {
                    link,
                    attempt: self.attempts,
                    lost,
                    closed: lost.is_some() && self.lost_closed,
                };
                out.push(Effect::SendHello { greeting });
            }
            _ => {}
        }
    }

    fn hello(&mut self, greeting: Greeting, incarnation: Incarnation, out: &mut Vec<Effect>) {
        let caller = Caller {
            link: greeting.link,
            incarnation,
            attempt: greeting.attempt,
        };
        if self.in_use(caller.key()) {
            return;
        }
        if let Some(by) = self.replaced_by(incarnation) {
            return refuse(caller, Refusal::Superseded { by }, out);
        }
        let lost = greeting.lost.map(LinkKey::mirrored);
        match self.state {
            State::Idle => self.accept(caller, out),
            State::Dialling(dial) => self.hello_while_dialling(dial, caller, lost, out),
            State::HalfOpen(current) => {
                if self.prefer(caller, current, out) {
                    self.remember_lost(current.into(), false);
                    self.accept(caller, out);
                }
            }
            State::Up(live) => self.hello_while_up(live, caller, (lost, greeting.closed), out),
            State::Closed => refuse(caller, Refusal::Closing, out),
        }
    }

    fn hello_while_dialling(
        &mut self,
        dial: Dial,
        caller: Caller,
        lost: Option<LinkKey>,
        out: &mut Vec<Effect>,
    ) {
        if !self.prefer_to_parked(caller, out) {
            return;
        }
        // The higher side gives way. So does the lower one if the peer had our dial and lost it.
        if !self.lower || lost == Some(dial.key()) {
            out.push(Effect::CloseLink {
                key: dial.key(),
                how: How::Silently,
            });
            self.accept(caller, out);
        } else {
            self.parked = Some(caller);
        }
    }

    fn hello_while_up(
        &mut self,
        live: Live,
        caller: Caller,
        (lost, closed): (Option<LinkKey>, bool),
        out: &mut Vec<Effect>,
    ) {
        if caller.incarnation < live.incarnation {
            return refuse(
                caller,
                Refusal::Superseded {
                    by: live.incarnation,
                },
                out,
            );
        }
        if !self.prefer_to_parked(caller, out) {
            return;
        }
        if caller.incarnation > live.incarnation {
            let by = caller.incarnation;
            self.end_up(live, How::Superseded { by }, Why::Replaced { by }, out);
            self.remember_replaced(live.incarnation, by);
            return self.accept(caller, out);
        }
        // The same life. It dials only when it has no link, so either it lost this one, or the hello is
        // from before this one.
        let dialled_by_them = live.key.dialler == Dialler::Them;
        // What was sent before a goodbye is to be taken, and the goodbye is no suspicion: both come over the other connection.
        if lost == Some(live.key) && closed && self.waited_for != Some(live.key) {
            self.waited_for = Some(live.key);
            self.parked = Some(caller);
        } else if lost == Some(live.key) || (dialled_by_them && caller.attempt > live.attempt) {
            self.end_up(live, How::Silently, Why::Redialled, out);
            self.accept(caller, out);
        } else if dialled_by_them {
            out.push(Effect::CloseLink {
                key: caller.key(),
                how: How::Silently,
            });
        } else {
            self.parked = Some(caller);
        }
    }

    /// Settles which of two hellos stays; the other one is closed or refused.
    fn prefer(&mut self, newcomer: Caller, current: Caller, out: &mut Vec<Effect>) -> bool {
        let close = |caller: Caller, how| Effect::CloseLink {
            key: caller.key(),
            how,
        };
        if newcomer.incarnation < current.incarnation {
            refuse(
                newcomer,
                Refusal::Superseded {
                    by: current.incarnation,
                },
                out,
            );
            return false;
        }
        if newcomer.incarnation > current.incarnation {
            let by = newcomer.incarnation;
            self.remember_replaced(current.incarnation, by);
            out.push(close(current, How::Superseded { by }));
            return true;
        }
        // The same life has given up the earlier of two dials.
        let later = newcomer.attempt > current.attempt;
        out.push(close(if later { current } else { newcomer }, How::Silently));
        later
    }

    /// Makes room for a hello, unless the parked one is to be preferred.
    fn prefer_to_parked(&mut self, newcomer: Caller, out: &mut Vec<Effect>) -> bool {
        let Some(parked) = self.parked else {
            return true;
        };
        let preferred = self.prefer(newcomer, parked, out);
        if preferred {
            self.parked = None;
        }
        preferred
    }

    fn welcome(&mut self, link: LinkId, incarnation: Incarnation, out: &mut Vec<Effect>) {
        let dial = match self.state {
            State::Dialling(dial) if dial.link == link && dial.greeted => dial,
            _ => return,
        };
        let waiting = self.parked.map(|parked| parked.incarnation);
        let by = self
            .replaced_by(incarnation)
            .or(waiting.filter(|waiting| *waiting > incarnation));
        if let Some(by) = by {
            self.remember_replaced(incarnation, by);
            out.push(Effect::CloseLink {
                key: dial.key(),
                how: How::Superseded { by },
            });
            return self.dial_failed(Why::Stale { incarnation, by }, out);
        }
        if let Some(parked) = self
            .parked
            .take_if(|parked| parked.incarnation < incarnation)
        {
            refuse(parked, Refusal::Superseded { by: incarnation }, out);
        }
        out.push(Effect::SendConfirm { link });
        self.join(
            Live {
                key: dial.key(),
                incarnation,
                attempt: 0,
            },
            out,
        );
    }

    fn refused(&mut self, link: LinkId, refusal: Refusal, out: &mut Vec<Effect>) {
        match self.state {
            State::Dialling(dial) if dial.link == link => {
                out.push(Effect::CloseLink {
                    key: dial.key(),
                    how: How::Silently,
                });
                self.dial_failed(Why::Refused(refusal), out);
            }
            _ => {}
        }
    }

    fn confirm(&mut self, link: LinkId, out: &mut Vec<Effect>) {
        match self.state {
            State::HalfOpen(caller) if caller.link == link => self.join(caller.into(), out),
            _ => {}
        }
    }

    fn lost(&mut self, key: LinkKey, why: Why, out: &mut Vec<Effect>) {
        // The dialler of a link may be up before us, and it lives: it should not take our time-out for a
        // death.
        let how = if why == Why::Timeout {
            How::Suspected
        } else {
            How::Silently
        };
        if self.parked.take_if(|parked| parked.key() == key).is_some() {
            return out.push(Effect::CloseLink { key, how });
        }
        match self.state {
            State::Dialling(dial) if dial.key() == key => {
                out.push(Effect::CloseLink {
                    key,
                    how: How::Silently,
                });
                self.dial_failed(why, out);
            }
            State::HalfOpen(caller) if caller.key() == key => {
                out.push(Effect::CloseLink { key, how });
                self.half_open_lost(caller, why, out);
            }
            State::Up(live) if live.key == key => {
                self.end_up(live, how, why, out);
                if let Some(parked) = self.parked.take() {
                    self.accept(parked, out);
                }
            }
            _ => {}
        }
    }

    fn half_open_lost(&mut self, caller: Caller, why: Why, out: &mut Vec<Effect>) {
        self.remember_lost(caller.into(), false);
        self.superseded |= matches!(why, Why::Superseded { .. });
        match self.wanted {
            Wanted::No => self.state = State::Idle,
            _ if self.superseded => self.give_up(why, out),
            wanted => {
                self.wanted = Wanted::No;
                self.state = State::Idle;
                out.push(Effect::WantAgain {
                    explicit: wanted == Wanted::Explicitly,
                });
            }
        }
    }

    fn leave(&mut self, next: State, out: &mut Vec<Effect>) {
        let goodbye = |key| Effect::CloseLink {
            key,
            how: How::Goodbye,
        };
        match self.state {
            State::Closed => return,
            State::Idle => {}
            State::Dialling(dial) => {
                out.push(Effect::CloseLink {
                    key: dial.key(),
                    how: How::Silently,
                });
            }
            // The peer may be up already.
            State::HalfOpen(caller) => {
                self.remember_lost(caller.into(), true);
                out.push(goodbye(caller.key()));
            }
            State::Up(live) => {
                self.remember_lost(live, true);
                out.push(goodbye(live.key));
                out.push(Effect::EndWork { which: Work::Bound });
            }
        }
        out.extend(self.parked.take().map(|parked| goodbye(parked.key())));
        out.push(Effect::EndWork {
            which: Work::Unbound,
        });
        self.wanted = Wanted::No;
        self.state = next;
    }

    /// Answers a hello; whether a link is wanted stays as it is.
    fn accept(&mut self, caller: Caller, out: &mut Vec<Effect>) {
        self.state = State::HalfOpen(caller);
        out.push(Effect::SendWelcome { link: caller.link });
    }

    /// The round trip is proven.
    fn join(&mut self, live: Live, out: &mut Vec<Effect>) {
        if let Some(last) = self.last.filter(|last| *last != live.incarnation) {
            self.remember_replaced(last, live.incarnation);
        }
        let rejoin = self.last.replace(live.incarnation).is_some();
        self.superseded = false;
        self.wanted = Wanted::No;
        self.state = State::Up(live);
        out.push(Effect::Joined {
            incarnation: live.incarnation,
            rejoin,
        });
        out.push(Effect::Up { key: live.key });
    }

    /// Our dial, closed by now, came to nothing.
    fn dial_failed(&mut self, why: Why, out: &mut Vec<Effect>) {
        match self.parked.take() {
            Some(parked) => self.accept(parked, out),
            None => self.give_up(why, out),
        }
    }

    /// Nothing will come up for whoever wanted a link.
    fn give_up(&mut self, why: Why, out: &mut Vec<Effect>) {
        let refused = matches!(why, Why::Refused(Refusal::Superseded { .. }));
        self.superseded |= refused || matches!(why, Why::Superseded { .. });
        self.wanted = Wanted::No;
        self.state = State::Idle;
        out.push(Effect::EndWork {
            which: Work::Unbound,
        });
        out.push(Effect::Failed {
            established: false,
            why,
        });
    }

    /// The link that was up is over; it is closed before work ends and before anybody hears of it.
    fn end_up(&mut self, live: Live, how: How, why: Why, out: &mut Vec<Effect>) {
        self.superseded |= matches!(why, Why::Superseded { .. });
        self.remember_lost(live, false);
        self.state = State::Idle;
        out.push(Effect::CloseLink { key: live.key, how });
        out.push(Effect::EndWork { which: Work::Bound });
        out.push(Effect::Failed {
            established: true,
            why,
        });
    }

    fn in_use(&self, key: LinkKey) -> bool {
        let current = match self.state {
            State::HalfOpen(caller) => Some(caller.key()),
            State::Up(live) => Some(live.key),
            State::Idle | State::Dialling(_) | State::Closed => None,
        };
        current == Some(key) || self.parked.is_some_and(|parked| parked.key() == key)
    }

    /// A late hello of an abandoned dial must not hide that a later link was lost.
    fn remember_lost(&mut self, link: Live, closed: bool) {
        let older = self.lost.is_some_and(|lost| {
            lost.incarnation == link.incarnation
                && lost.key.dialler == Dialler::Them
                && link.key.dialler == Dialler::Them
                && link.attempt < lost.attempt
        });
        if !older {
            self.lost = Some(link);
            self.lost_closed = closed;
        }
    }

    fn replaced_by(&self, incarnation: Incarnation) -> Option<Incarnation> {
        self.replaced
            .iter()
            .find(|(old, _)| *old == incarnation)
            .map(|(_, by)| *by)
    }

    fn remember_replaced(&mut self, old: Incarnation, by: Incarnation) {
        if self.replaced_by(old).is_some() {
            return;
        }
        if self.replaced.len() == REPLACED_KEPT {
            self.replaced.pop_front();
        }
        self.replaced.push_back((old, by));
    }
}

impl From<Caller> for Live {
    fn from(caller: Caller) -> Self {
        Self {
            key: caller.key(),
            incarnation: caller.incarnation,
            attempt: caller.attempt,
        }
    }
}

fn refuse(caller: Caller, refusal: Refusal, out: &mut Vec<Effect>) {
    out.push(Effect::SendRefusal {
        link: caller.link,
        refusal,
    });
}

#[cfg(test)]
mod tests;
