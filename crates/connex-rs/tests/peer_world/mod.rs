//! A small world of engines around the state machine of a peer: processes, connections that keep
//! order within but not across each other, losses, restarts; and monitors that watch every effect.
//!
//! Used by the model checker (all interleavings of few steps) and by random schedules (long ones).

#![allow(dead_code, reason = "each test program uses its part")]

use connex_rs::identity::{Incarnation, LogicalId};
use connex_rs::peer::{
    Dialler, Effect, Greeting, How, Input, LinkId, LinkKey, Peer, Phase, Refusal, Why, Work,
};

/// What must hold. A world stops at the first one that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Rule {
    /// `joined` comes directly before `up`, says `rejoin` rightly, and `up` is not said twice.
    JoinedUp,
    /// One `failed` for each link that was up, one for each want that came to nothing.
    OneFailed,
    /// `up` only after a round trip with the life that `joined` names.
    RoundTrip,
    /// Work of one life does not reach another (I4).
    OtherLife,
    /// A replaced incarnation is not bound again.
    ReplacedReturns,
    /// Every connection is closed exactly once.
    Ledger,
    /// Work and wants are never forgotten.
    Orphan,
    /// Without a fault nothing fails, and the connection of the lower id is kept.
    Crossing,
    /// When nothing moves, both ends agree on the one link.
    Agreement,
    /// When nothing moves, a want leads to a link.
    EndsConnected,
    /// A dial that its dialler still counts on is not dropped without an answer.
    LiveDialDropped,
    /// Nothing dials by itself, without end.
    Flapping,
}

/// A deliberately broken machine, to show that the rules see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Fault {
    /// The machine as it is.
    None,
    /// Each side refuses the other's hello while it dials.
    BothRefuse,
    /// The lower side accepts at once where it should park.
    NoParking,
    /// Replaced incarnations are forgotten with the link.
    ForgetsReplaced,
    /// The acceptor is up without the third message.
    UpTooEarly,
    /// Hellos are not counted.
    ForgetsAttempt,
    /// Losses of half-open links are not heard.
    DeafHalfOpen,
    /// Work of a life that ended stays in the queue.
    KeepsBoundWork,
    /// The end of a link is reported twice.
    FailsTwice,
}

/// What travels on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Message {
    Hello(Greeting, Incarnation),
    Welcome(Incarnation),
    Refused(Refusal),
    Confirm,
    Work { for_life: Incarnation },
    Bye(Why),
    End,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct End {
    open: bool,
    /// The machine of this end knows the link.
    known: bool,
    /// The connection broke and this end has not been told.
    reset: bool,
    /// Welcome or Confirm, whichever makes this end's round trip, has been delivered.
    proven: bool,
    inbox: Vec<Message>,
}

/// More dials of one process than any schedule here explains.
const MOST_DIALS: u64 = 500;

const DIALLER: usize = 0;
const ACCEPTOR: usize = 1;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Connection {
    link: LinkId,
    /// Process ids of dialler and acceptor; the latter once connected.
    pids: [Option<u8>; 2],
    /// Logical ids of dialler and acceptor.
    ids: [u8; 2],
    ends: [End; 2],
    broken: bool,
}

impl Connection {
    fn key(&self, side: usize) -> LinkKey {
        if side == DIALLER {
            LinkKey::mine(self.link)
        } else {
            LinkKey::theirs(self.link)
        }
    }

    /// Puts a message into the other end's inbox, unless it cannot arrive.
    fn send(&mut self, from: usize, message: Message) {
        let to = &mut self.ends[1 - from];
        if to.open && !self.broken {
            to.inbox.push(message);
        }
    }

    fn close(&mut self, side: usize) {
        self.send(side, Message::End);
        self.ends[side] = End {
            open: false,
            known: false,
            reset: false,
            proven: false,
            inbox: Vec::new(),
        };
    }
}

/// One process's machine for one peer, and what is watched about it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Watched {
    machine: Peer,
    up: Option<LinkKey>,
    life: Option<Incarnation>,
    joined_before: bool,
    banned: Vec<Incarnation>,
    /// A want has not been answered by `up` or `failed`.
    owed: bool,
    /// Queued operations with the life that was bound when they were queued.
    queue: Vec<Option<Incarnation>>,
    /// Dialled since the world began, kept only while no fault has happened.
    dialled: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Process {
    pid: u8,
    id: u8,
    life: Incarnation,
    dials: u64,
    /// By logical id; its own place stays unused.
    peers: Vec<Watched>,
}

/// How many more of each kind of event may happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Budget {
    /// Wants of each pair in `pairs`.
    pub wants: u8,
    /// Who may want whom.
    pub pairs: &'static [(u8, u8)],
    /// Whether the engine also wants by itself.
    pub wants_by_itself: bool,
    /// Connections that break.
    pub breaks: u8,
    /// Time-outs that an engine raises on any link of its own.
    pub timeouts: u8,
    /// Processes that are killed and started again with a later incarnation.
    pub restarts: u8,
    /// Processes started beside the one that has the id already.
    pub usurpers: u8,
    /// As before, but with an earlier incarnation: the clock went back.
    pub ancients: u8,
    /// Disconnects.
    pub disconnects: u8,
}

impl Budget {
    /// Nothing may happen.
    pub(crate) const NONE: Self = Self {
        wants: 0,
        pairs: &[(0, 1), (1, 0)],
        wants_by_itself: false,
        breaks: 0,
        timeouts: 0,
        restarts: 0,
        usurpers: 0,
        ancients: 0,
        disconnects: 0,
    };
}

/// One step of the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Want {
        pid: u8,
        peer: u8,
        explicit: bool,
    },
    Disconnect {
        pid: u8,
        peer: u8,
    },
    /// The dial reaches a process.
    Connect {
        link: LinkId,
        pid: u8,
    },
    Deliver {
        link: LinkId,
        side: usize,
    },
    LearnReset {
        link: LinkId,
        side: usize,
    },
    Break {
        link: LinkId,
    },
    Timeout {
        link: LinkId,
        side: usize,
    },
    Restart {
        pid: u8,
    },
    Usurp {
        id: u8,
    },
    Ancient {
        id: u8,
    },
}

/// The whole state.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct World {
    processes: Vec<Process>,
    connections: Vec<Connection>,
    wants: Vec<Vec<u8>>,
    left: Budget,
    next_pid: u8,
    /// No fault has happened yet.
    calm: bool,
    fault: Fault,
    broken: Option<Rule>,
}

fn logical(id: u8) -> LogicalId {
    LogicalId::new("m", id.into(), 0, 0).expect("legal")
}

impl World {
    /// `ids` engines, one process each; id 0 is the lowest.
    pub(crate) fn new(ids: u8, left: Budget, fault: Fault) -> Self {
        let mut world = Self {
            processes: Vec::new(),
            connections: Vec::new(),
            wants: vec![vec![0; ids.into()]; ids.into()],
            left,
            next_pid: 0,
            calm: true,
            fault,
            broken: None,
        };
        for (from, to) in left.pairs {
            world.wants[usize::from(*from)][usize::from(*to)] = left.wants;
        }
        for id in 0..ids {
            world.start(id, 1000);
        }
        world
    }

    /// The first broken rule.
    pub(crate) fn broken(&self) -> Option<Rule> {
        self.broken
    }

    /// Processes with the given id, as their machine for `peer` stands.
    pub(crate) fn phases(&self, id: u8, peer: u8) -> impl Iterator<Item = Phase> {
        let found = self
            .processes
            .iter()
            .filter(move |process| process.id == id);
        found.map(move |process| process.peers[usize::from(peer)].machine.phase())
    }

    /// Whether some process was bound to two lives of a peer.
    pub(crate) fn someone_rejoined(&self) -> bool {
        self.processes
            .iter()
            .flat_map(|process| &process.peers)
            .any(|peer| !peer.banned.is_empty())
    }

    /// Whether a refusal of this kind is on its way.
    pub(crate) fn some_refusal(&self, wanted: fn(Refusal) -> bool) -> bool {
        let inboxes = self
            .connections
            .iter()
            .flat_map(|c| &c.ends)
            .flat_map(|end| &end.inbox);
        inboxes
            .into_iter()
            .any(|message| matches!(message, Message::Refused(r) if wanted(*r)))
    }

    fn start(&mut self, id: u8, start_ns: u64) {
        let pid = self.next_pid;
        self.next_pid += 1;
        let ids = u8::try_from(self.wants.len()).expect("few");
        let watched = |peer| Watched {
            machine: Peer::new(&logical(id), &logical(peer)),
            up: None,
            life: None,
            joined_before: false,
            banned: Vec::new(),
            owed: false,
            queue: Vec::new(),
            dialled: false,
        };
        self.processes.push(Process {
            pid,
            id,
            life: Incarnation {
                start_ns,
                random: pid.into(),
            },
            dials: 0,
            peers: (0..ids).map(watched).collect(),
        });
    }

    fn kill(&mut self, pid: u8) {
        for connection in &mut self.connections {
            for side in [DIALLER, ACCEPTOR] {
                if connection.pids[side] == Some(pid) {
                    connection.broken = true;
                    connection.ends[1 - side].reset = connection.ends[1 - side].open;
                    connection.close(side);
                }
            }
        }
        self.processes.retain(|process| process.pid != pid);
        self.tidy();
    }

    fn violate(&mut self, rule: Rule) {
        self.broken.get_or_insert(rule);
    }

    fn require(&mut self, holds: bool, rule: Rule) {
        if !holds {
            self.violate(rule);
        }
    }

    fn fault_happened(&mut self) {
        self.calm = false;
        for process in &mut self.processes {
            for peer in &mut process.peers {
                peer.dialled = false;
            }
        }
    }

    fn tidy(&mut self) {
        self.connections
            .retain(|c| c.ends[DIALLER].open || c.ends[ACCEPTOR].open);
        self.connections.sort_by_key(|c| c.link);
    }

    fn process(&mut self, pid: u8) -> &mut Process {
        self.processes
            .iter_mut()
            .find(|process| process.pid == pid)
            .expect("alive")
    }

    fn watched(&mut self, pid: u8, peer: u8) -> &mut Watched {
        &mut self.process(pid).peers[usize::from(peer)]
    }

    fn connection(&mut self, link: LinkId) -> Option<&mut Connection> {
        self.connections
            .iter_mut()
            .find(|connection| connection.link == link)
    }

    /// The steps that need no new event: what is under way goes on.
    pub(crate) fn inner_steps(&self, steps: &mut Vec<Step>) {
        for connection in &self.connections {
            let link = connection.link;
            let [dialler, acceptor] = &connection.ends;
            if dialler.open && connection.pids[ACCEPTOR].is_none() && !dialler.reset {
                for process in self
                    .processes
                    .iter()
                    .filter(|p| p.id == connection.ids[ACCEPTOR])
                {
                    steps.push(Step::Connect {
                        link,
                        pid: process.pid,
                    });
                }
            }
            for (side, end) in [(DIALLER, dialler), (ACCEPTOR, acceptor)] {
                if !end.inbox.is_empty() {
                    steps.push(Step::Deliver { link, side });
                }
                if end.reset {
                    steps.push(Step::LearnReset { link, side });
                }
            }
        }
    }

    /// Everything that may happen next.
    pub(crate) fn steps(&self, steps: &mut Vec<Step>) {
        if self.broken.is_some() {
            return;
        }
        self.inner_steps(steps);
        let ids = u8::try_from(self.wants.len()).expect("few");
        for process in &self.processes {
            let pid = process.pid;
            for peer in (0..ids).filter(|peer| *peer != process.id) {
                if self.wants[usize::from(process.id)][usize::from(peer)] > 0 {
                    steps.push(Step::Want {
                        pid,
                        peer,
                        explicit: true,
                    });
                    steps.push(Step::Want {
                        pid,
                        peer,
                        explicit: false,
                    });
                }
                let idle = process.peers[usize::from(peer)].machine.phase() == Phase::Idle;
                if self.left.disconnects > 0 && !idle {
                    steps.push(Step::Disconnect { pid, peer });
                }
            }
            if self.left.restarts > 0 {
                steps.push(Step::Restart { pid });
            }
        }
        for id in 0..ids {
            if self.left.usurpers > 0 {
                steps.push(Step::Usurp { id });
            }
            if self.left.ancients > 0 {
                steps.push(Step::Ancient { id });
            }
        }
        for connection in &self.connections {
            let link = connection.link;
            if self.left.breaks > 0 && !connection.broken {
                steps.push(Step::Break { link });
            }
            for side in [DIALLER, ACCEPTOR] {
                if self.left.timeouts > 0 && connection.ends[side].known {
                    steps.push(Step::Timeout { link, side });
                }
            }
        }
    }

    /// Makes one step, then checks what must always hold and, when nothing moves, what must hold then.
    pub(crate) fn step(&mut self, step: Step) {
        self.make(step);
        if self.broken.is_none() {
            let mut inner = Vec::new();
            self.inner_steps(&mut inner);
            if inner.is_empty() {
                self.check_at_rest();
            }
        }
    }

    fn make(&mut self, step: Step) {
        match step {
            Step::Want {
                pid,
                peer,
                explicit,
            } => {
                let id = self.process(pid).id;
                let left = &mut self.wants[usize::from(id)][usize::from(peer)];
                *left = left.saturating_sub(1);
                self.want(pid, peer, explicit);
            }
            Step::Disconnect { pid, peer } => {
                self.left.disconnects -= 1;
                self.fault_happened();
                let watched = self.watched(pid, peer);
                watched.up = None;
                watched.owed = false;
                self.feed(pid, peer, Input::Disconnect);
                let phase = self.watched(pid, peer).machine.phase();
                self.require(phase == Phase::Idle, Rule::Ledger);
            }
            Step::Connect { link, pid } => {
                let connection = self.connection(link).expect("dialled");
                connection.pids[ACCEPTOR] = Some(pid);
                connection.ends[ACCEPTOR].open = true;
                let (dialler, peer) = (connection.pids[DIALLER], connection.ids[ACCEPTOR]);
                self.feed(dialler.expect("dialled"), peer, Input::Connected { link });
            }
            Step::Deliver { link, side } => self.deliver(link, side),
            Step::LearnReset { link, side } => self.end(link, side, Why::Dead),
            Step::Break { link } => {
                self.left.breaks -= 1;
                self.fault_happened();
                let connection = self.connection(link).expect("listed");
                connection.broken = true;
                for end in &mut connection.ends {
                    end.reset = end.open;
                }
            }
            Step::Timeout { link, side } => {
                self.left.timeouts -= 1;
                self.fault_happened();
                self.end(link, side, Why::Timeout);
            }
            Step::Restart { pid } => {
                self.left.restarts -= 1;
                self.fault_happened();
                let id = self.process(pid).id;
                self.kill(pid);
                self.start(id, 1000 + u64::from(self.next_pid));
            }
            Step::Usurp { id } => {
                self.left.usurpers -= 1;
                self.fault_happened();
                self.start(id, 1000 + u64::from(self.next_pid));
            }
            Step::Ancient { id } => {
                self.left.ancients -= 1;
                self.fault_happened();
                self.start(id, 900 - u64::from(self.next_pid));
            }
        }
    }

    fn want(&mut self, pid: u8, peer: u8, explicit: bool) {
        let watched = self.watched(pid, peer);
        watched.owed |= watched.up.is_none();
        watched.queue.push(watched.machine.bound());
        watched.queue.dedup();
        let link = self.fresh_link(pid);
        self.feed(pid, peer, Input::Want { link, explicit });
    }

    /// Unique as long as it is offered again only if no dial used it.
    fn fresh_link(&mut self, pid: u8) -> LinkId {
        let process = self.process(pid);
        LinkId(u64::from(pid) * 1000 + process.dials)
    }

    fn deliver(&mut self, link: LinkId, side: usize) {
        let connection = self.connection(link).expect("listed");
        let message = connection.ends[side].inbox.remove(0);
        let (pid, peer) = (
            connection.pids[side].expect("open"),
            connection.ids[1 - side],
        );
        let end = &mut connection.ends[side];
        let input = match message {
            Message::Hello(greeting, incarnation) => {
                end.known = true;
                Input::Hello {
                    greeting,
                    incarnation,
                }
            }
            Message::Welcome(incarnation) => {
                end.proven = true;
                Input::Welcome { link, incarnation }
            }
            Message::Refused(refusal) => Input::Refused { link, refusal },
            Message::Confirm => {
                end.proven = true;
                Input::Confirm { link }
            }
            Message::Work { for_life } => {
                let key = connection.key(side);
                let life = self.process(pid).life;
                self.require(life == for_life, Rule::OtherLife);
                let up = self.watched(pid, peer).up;
                return self.require(up == Some(key), Rule::RoundTrip);
            }
            Message::Bye(why) => return self.end(link, side, why),
            Message::End => return self.end(link, side, Why::Dead),
        };
        self.feed(pid, peer, input);
    }

    /// One end learns that its connection is over.
    fn end(&mut self, link: LinkId, side: usize, why: Why) {
        let connection = self.connection(link).expect("listed");
        let (pid, peer) = (
            connection.pids[side].expect("open"),
            connection.ids[1 - side],
        );
        let key = connection.key(side);
        connection.ends[side].reset = false;
        if connection.ends[side].known {
            self.feed(pid, peer, Input::Lost { key, why });
            let open = self.connection(link).is_some_and(|c| c.ends[side].open);
            self.require(!open, Rule::Ledger);
        } else {
            connection.close(side);
            self.tidy();
        }
    }

    /// Feeds the machine and carries out its effects; checks what must hold after each input.
    fn feed(&mut self, pid: u8, peer: u8, input: Input) {
        let mut pending = Some(input);
        while let Some(input) = pending.take() {
            let effects = self.bent_on(pid, peer, input);
            // The engine's own want after it was superseded is answered so, without an event.
            let declined = [Effect::EndWork {
                which: Work::Unbound,
            }];
            if matches!(
                input,
                Input::Want {
                    explicit: false,
                    ..
                }
            ) && effects == declined
            {
                self.watched(pid, peer).owed = false;
            }
            let mut previous = None;
            for effect in effects {
                if let Effect::WantAgain { explicit } = effect {
                    let link = self.fresh_link(pid);
                    pending = Some(Input::Want { link, explicit });
                }
                if matches!(effect, Effect::Dial { .. }) {
                    self.require(matches!(input, Input::Want { .. }), Rule::Flapping);
                }
                self.check_drop(input, effect);
                self.carry_out(pid, peer, effect, previous);
                previous = Some(effect);
            }
        }
        self.tidy();
        let watched = self.watched(pid, peer);
        let (machine, up, life) = (&watched.machine, watched.up, watched.life);
        let phase = machine.phase();
        let coming = matches!(phase, Phase::Dialling | Phase::HalfOpen);
        let waits = watched.queue.contains(&None) || watched.owed;
        let bound_only_to_up = watched
            .queue
            .iter()
            .flatten()
            .all(|bound| Some(*bound) == life);
        let bound_well =
            bound_only_to_up && (up.is_some() || !watched.queue.iter().any(Option::is_some));
        let reported = machine.up() == up && machine.bound() == life.filter(|_| up.is_some());
        self.require(reported, Rule::OneFailed);
        self.require(!waits || coming, Rule::Orphan);
        self.require(bound_well, Rule::OtherLife);
        if let Some(key) = up {
            let side = if key.dialler == Dialler::Me {
                DIALLER
            } else {
                ACCEPTOR
            };
            let open = self.connection(key.id).is_some_and(|c| c.ends[side].open);
            self.require(open, Rule::Ledger);
        }
        let dials = self.process(pid).dials;
        self.require(
            self.connections.len() < 12 && dials < MOST_DIALS,
            Rule::Flapping,
        );
    }

    /// A silent close of the other side's dial must find that dial given up, or broken.
    fn check_drop(&mut self, input: Input, effect: Effect) {
        let Effect::CloseLink {
            key,
            how: How::Silently,
        } = effect
        else {
            return;
        };
        let told = matches!(input, Input::Lost { key: lost, .. } if lost == key);
        if key.dialler == Dialler::Them && !told {
            let counted_on = self
                .connection(key.id)
                .is_some_and(|c| c.ends[DIALLER].open && !c.broken);
            self.require(!counted_on, Rule::LiveDialDropped);
        }
    }

    /// The machine, bent by the seeded fault.
    fn bent_on(&mut self, pid: u8, peer: u8, mut input: Input) -> Vec<Effect> {
        let fault = self.fault;
        let dial = self
            .connections
            .iter()
            .find(|c| c.pids[DIALLER] == Some(pid) && c.ids[ACCEPTOR] == peer);
        let dial = dial.map(|connection| connection.link);
        let process = self.process(pid);
        let lower = process.id < peer;
        let me = logical(process.id);
        let watched = &mut process.peers[usize::from(peer)];
        let mut out = Vec::new();
        let phase = watched.machine.phase();
        if let Input::Hello {
            mut greeting,
            incarnation,
        } = input
        {
            match fault {
                Fault::BothRefuse if phase == Phase::Dialling => {
                    let refusal = Refusal::Rejected(0);
                    return vec![Effect::SendRefusal {
                        link: greeting.link,
                        refusal,
                    }];
                }
                Fault::NoParking if phase == Phase::Dialling && lower => {
                    if let Some(link) = dial {
                        let lost = Input::Lost {
                            key: LinkKey::mine(link),
                            why: Why::Dead,
                        };
                        watched.machine.on(lost, &mut out);
                        out.retain(|effect| matches!(effect, Effect::CloseLink { .. }));
                    }
                }
                Fault::ForgetsReplaced if phase == Phase::Idle => {
                    let mut honest = Vec::new();
                    watched.machine.clone().on(input, &mut honest);
                    if matches!(honest[..], [Effect::SendRefusal { .. }]) {
                        watched.machine = Peer::new(&me, &logical(peer));
                        watched.joined_before = false;
                    }
                }
                Fault::ForgetsAttempt => {
                    greeting.attempt = 7;
                    input = Input::Hello {
                        greeting,
                        incarnation,
                    };
                }
                _ => {}
            }
        }
        if let (Fault::DeafHalfOpen, Phase::HalfOpen, Input::Lost { .. }) = (fault, phase, input) {
            return out;
        }
        watched.machine.on(input, &mut out);
        match (fault, out.last().copied()) {
            (Fault::UpTooEarly, Some(Effect::SendWelcome { link })) => {
                watched.machine.on(Input::Confirm { link }, &mut out);
            }
            (
                Fault::FailsTwice,
                Some(
                    failed @ Effect::Failed {
                        established: true, ..
                    },
                ),
            ) => {
                out.push(failed);
            }
            (Fault::KeepsBoundWork, _) => {
                out.retain(|effect| *effect != Effect::EndWork { which: Work::Bound });
            }
            _ => {}
        }
        out
    }

    fn carry_out(&mut self, pid: u8, peer: u8, effect: Effect, previous: Option<Effect>) {
        match effect {
            Effect::Dial { link } => {
                let process = self.process(pid);
                process.dials += 1;
                let id = process.id;
                let calm = self.calm;
                self.watched(pid, peer).dialled = calm;
                let end = |open| End {
                    open,
                    known: open,
                    reset: false,
                    proven: false,
                    inbox: Vec::new(),
                };
                self.connections.push(Connection {
                    link,
                    pids: [Some(pid), None],
                    ids: [id, peer],
                    ends: [end(true), end(false)],
                    broken: false,
                });
            }
            Effect::SendHello { greeting } => {
                let life = self.process(pid).life;
                self.send(DIALLER, greeting.link, Message::Hello(greeting, life));
            }
            Effect::SendWelcome { link } => {
                let life = self.process(pid).life;
                self.send(ACCEPTOR, link, Message::Welcome(life));
            }
            Effect::SendConfirm { link } => self.send(DIALLER, link, Message::Confirm),
            Effect::SendRefusal { link, refusal } => {
                self.send(ACCEPTOR, link, Message::Refused(refusal));
                self.close(LinkKey::theirs(link), How::Silently);
            }
            Effect::CloseLink { key, how } => self.close(key, how),
            Effect::Joined {
                incarnation,
                rejoin,
            } => {
                let watched = self.watched(pid, peer);
                let returns = watched.banned.contains(&incarnation);
                let rejoin_right = rejoin == watched.joined_before;
                let up = watched.up;
                watched.joined_before = true;
                if let Some(old) = watched.life.replace(incarnation)
                    && old != incarnation
                {
                    watched.banned.push(old);
                }
                self.require(!returns, Rule::ReplacedReturns);
                self.require(rejoin_right && up.is_none(), Rule::JoinedUp);
            }
            Effect::Up { key } => self.up(pid, peer, key, previous),
            Effect::Failed { established, why } => {
                let calm = self.calm;
                let watched = self.watched(pid, peer);
                let due = if established {
                    watched.up.take().is_some()
                } else {
                    watched.owed
                };
                watched.owed &= established;
                if let (true, Why::Replaced { .. }) = (established, why) {
                    watched.banned.extend(watched.life);
                }
                self.require(due, Rule::OneFailed);
                self.require(!calm, Rule::Crossing);
            }
            Effect::EndWork { which } => {
                let calm = self.calm;
                let watched = self.watched(pid, peer);
                watched
                    .queue
                    .retain(|bound| bound.is_some() != (which == Work::Bound));
                self.require(!calm, Rule::Crossing);
            }
            Effect::WantAgain { .. } => {}
        }
    }

    fn up(&mut self, pid: u8, peer: u8, key: LinkKey, previous: Option<Effect>) {
        let side = if key.dialler == Dialler::Me {
            DIALLER
        } else {
            ACCEPTOR
        };
        let life = self.watched(pid, peer).life.expect("joined");
        let other = self.connection(key.id).and_then(|connection| {
            let end = &connection.ends[side];
            let proven = end.open && end.proven && connection.pids[side] == Some(pid);
            if proven {
                connection.pids[1 - side]
            } else {
                None
            }
        });
        // The other process may be dead already, but if it lives it is the one that was named.
        let other_life = self
            .processes
            .iter()
            .find(|p| Some(p.pid) == other)
            .map(|p| p.life);
        let named = other.is_some() && other_life.is_none_or(|other| other == life);
        self.require(named, Rule::RoundTrip);
        let watched = self.watched(pid, peer);
        let first = watched.up.replace(key).is_none();
        let after_joined = matches!(previous, Some(Effect::Joined { .. }));
        watched.owed = false;
        let mixed = watched.queue.iter().flatten().any(|bound| *bound != life);
        let waiting = watched.queue.len();
        watched.queue.retain(Option::is_some);
        let sends = watched.queue.len() < waiting;
        self.require(first && after_joined, Rule::JoinedUp);
        self.require(!mixed, Rule::OtherLife);
        if sends {
            self.send(side, key.id, Message::Work { for_life: life });
        }
    }

    fn send(&mut self, side: usize, link: LinkId, message: Message) {
        match self.connection(link) {
            Some(connection) if connection.ends[side].open => connection.send(side, message),
            _ => self.violate(Rule::Ledger),
        }
    }

    fn close(&mut self, key: LinkKey, how: How) {
        let side = if key.dialler == Dialler::Me {
            DIALLER
        } else {
            ACCEPTOR
        };
        let bye = match how {
            How::Silently => None,
            How::Goodbye => Some(Why::Goodbye),
            How::Suspected => Some(Why::GivenUp),
            How::Superseded { by } => Some(Why::Superseded { by }),
        };
        match self.connection(key.id) {
            Some(connection) if connection.ends[side].open => {
                if let Some(why) = bye {
                    connection.send(side, Message::Bye(why));
                }
                connection.close(side);
            }
            _ => self.violate(Rule::Ledger),
        }
    }

    /// Nothing is under way.
    fn check_at_rest(&mut self) {
        let mut links = Vec::new();
        for process in &self.processes {
            for (peer, watched) in process.peers.iter().enumerate() {
                let Some(key) = watched.up else { continue };
                links.push(key.id);
                let Some(connection) = self.connections.iter().find(|c| c.link == key.id) else {
                    return self.violate(Rule::Agreement);
                };
                let side = if key.dialler == Dialler::Me {
                    DIALLER
                } else {
                    ACCEPTOR
                };
                let other = self
                    .processes
                    .iter()
                    .find(|p| Some(p.pid) == connection.pids[1 - side]);
                let agreed = other.is_some_and(|other| {
                    let seen = &other.peers[usize::from(process.id)];
                    usize::from(other.id) == peer
                        && seen.up == Some(key.mirrored())
                        && seen.life == Some(process.life)
                        && watched.life == Some(other.life)
                });
                if !agreed {
                    return self.violate(Rule::Agreement);
                }
                // Both dialled and nothing went wrong: the lower one's link is the one.
                let lower = if process.id < connection.ids[1 - side] {
                    watched
                } else {
                    &other.expect("agreed").peers[usize::from(process.id)]
                };
                let lowers = lower.up.is_some_and(|key| key.dialler == Dialler::Me);
                if self.calm && lower.dialled && !lowers {
                    return self.violate(Rule::Crossing);
                }
            }
        }
        if self
            .connections
            .iter()
            .any(|connection| !links.contains(&connection.link))
        {
            return self.violate(Rule::Ledger);
        }
        self.check_wants_connect();
    }

    /// Every single pair can be connected from here by one want, whichever side has it.
    fn check_wants_connect(&mut self) {
        if !self.calm || self.connections.is_empty() {
            let lone = |id| {
                self.processes
                    .iter()
                    .filter(|process| process.id == id)
                    .count()
                    == 1
            };
            let mut pairs = Vec::new();
            for process in &self.processes {
                for other in self.processes.iter().filter(|other| other.id != process.id) {
                    let knows = process.peers[usize::from(other.id)]
                        .banned
                        .contains(&other.life);
                    let known = other.peers[usize::from(process.id)]
                        .banned
                        .contains(&process.life);
                    if lone(process.id) && lone(other.id) && !knows && !known {
                        pairs.push((process.pid, other.pid, process.id, other.id));
                    }
                }
            }
            for (pid, other_pid, id, other) in pairs {
                let mut future = self.clone();
                future.want(pid, other, true);
                let mut steps = Vec::new();
                for _ in 0..100 {
                    steps.clear();
                    future.inner_steps(&mut steps);
                    let Some(step) = steps.first() else { break };
                    future.make(*step);
                }
                let up = future.watched(pid, other).up;
                let seen = future.watched(other_pid, id).up;
                let agreed = up.is_some() && up.map(LinkKey::mirrored) == seen;
                if future.broken.is_some() || !steps.is_empty() || !agreed {
                    return self.violate(Rule::EndsConnected);
                }
            }
        }
    }
}
