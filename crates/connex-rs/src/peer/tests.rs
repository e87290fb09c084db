//! The rules one by one, as examples. All interleavings are in `tests/peer_model.rs`.

use super::*;

const OLD: Incarnation = life(1);
const NEW: Incarnation = life(2);

const fn life(start_ns: u64) -> Incarnation {
    Incarnation {
        start_ns,
        random: 0,
    }
}

fn mine(id: u64) -> LinkKey {
    LinkKey::mine(LinkId(id))
}

fn theirs(id: u64) -> LinkKey {
    LinkKey::theirs(LinkId(id))
}

fn want(id: u64) -> Input {
    Input::Want {
        link: LinkId(id),
        explicit: true,
    }
}

fn hello(id: u64, incarnation: Incarnation) -> Input {
    hello_after(None, id, incarnation)
}

/// A hello that names the link that its sender lost, as the sender names it.
fn hello_after(lost: Option<LinkKey>, id: u64, incarnation: Incarnation) -> Input {
    let greeting = Greeting {
        link: LinkId(id),
        attempt: id,
        lost,
        closed: false,
    };
    Input::Hello {
        greeting,
        incarnation,
    }
}

fn welcome(id: u64, incarnation: Incarnation) -> Input {
    Input::Welcome {
        link: LinkId(id),
        incarnation,
    }
}

fn lost(key: LinkKey, why: Why) -> Input {
    Input::Lost { key, why }
}

fn confirm(id: u64) -> Input {
    Input::Confirm { link: LinkId(id) }
}

fn close(key: LinkKey, how: How) -> Effect {
    Effect::CloseLink { key, how }
}

fn send_welcome(id: u64) -> Effect {
    Effect::SendWelcome { link: LinkId(id) }
}

fn failed(established: bool, why: Why) -> Effect {
    Effect::Failed { established, why }
}

fn refused(id: u64, refusal: Refusal) -> Effect {
    Effect::SendRefusal {
        link: LinkId(id),
        refusal,
    }
}

const END_BOUND: Effect = Effect::EndWork { which: Work::Bound };
const END_UNBOUND: Effect = Effect::EndWork {
    which: Work::Unbound,
};

/// A machine and a way to feed it.
struct Side(Peer);

impl Side {
    fn new(me: u32, peer: u32) -> Self {
        let id = |stage| LogicalId::new("m", stage, 0, 0).expect("legal");
        Self(Peer::new(&id(me), &id(peer)))
    }

    fn lower() -> Self {
        Self::new(0, 1)
    }

    fn higher() -> Self {
        Self::new(1, 0)
    }

    fn on(&mut self, input: Input) -> Vec<Effect> {
        let mut out = Vec::new();
        self.0.on(input, &mut out);
        out
    }

    /// Dials until the hello is out.
    fn greets(mut self, id: u64) -> Self {
        self.on(want(id));
        self.on(Input::Connected { link: LinkId(id) });
        self
    }

    /// Is up on a link of its own.
    fn up(self, id: u64, incarnation: Incarnation) -> Self {
        let mut side = self.greets(id);
        side.on(welcome(id, incarnation));
        assert_eq!(side.0.up(), Some(mine(id)));
        side
    }

    /// Is up on a link of the peer's.
    fn up_by_them(mut self, id: u64, incarnation: Incarnation) -> Self {
        self.on(hello(id, incarnation));
        self.on(confirm(id));
        assert_eq!(self.0.up(), Some(theirs(id)));
        self
    }
}

#[test]
fn both_ends_are_up_after_three_messages() {
    let (mut dialler, mut acceptor) = (Side::lower(), Side::higher());
    let link = LinkId(7);
    assert_eq!(dialler.on(want(7)), [Effect::Dial { link }]);
    assert_eq!(dialler.on(want(8)), []);
    let greeting = Greeting {
        link,
        attempt: 1,
        lost: None,
        closed: false,
    };
    assert_eq!(
        dialler.on(Input::Connected { link }),
        [Effect::SendHello { greeting }]
    );
    assert_eq!(acceptor.on(hello(7, OLD)), [send_welcome(7)]);
    assert_eq!(acceptor.0.phase(), Phase::HalfOpen);
    let joined = |incarnation| Effect::Joined {
        incarnation,
        rejoin: false,
    };
    assert_eq!(
        dialler.on(welcome(7, NEW)),
        [
            Effect::SendConfirm { link },
            joined(NEW),
            Effect::Up { key: mine(7) }
        ]
    );
    assert_eq!(
        acceptor.on(confirm(7)),
        [joined(OLD), Effect::Up { key: theirs(7) }]
    );
    assert_eq!(dialler.0.bound(), Some(NEW));
}

#[test]
fn the_lower_side_parks_a_crossing_hello_and_the_higher_one_gives_way() {
    let mut lower = Side::lower().greets(1);
    assert_eq!(lower.on(hello(5, OLD)), []);
    let mut higher = Side::higher().greets(5);
    assert_eq!(
        higher.on(hello(1, OLD)),
        [close(mine(5), How::Silently), send_welcome(1)]
    );
    lower.on(welcome(1, OLD));
    assert_eq!(lower.0.up(), Some(mine(1)));
    // What the higher side dropped ends without a word.
    assert_eq!(
        lower.on(lost(theirs(5), Why::Dead)),
        [close(theirs(5), How::Silently)]
    );
    assert_eq!(lower.0.up(), Some(mine(1)));
}

#[test]
fn a_parked_hello_is_accepted_when_our_dial_fails() {
    let mut lower = Side::lower().greets(1);
    lower.on(hello(5, OLD));
    assert_eq!(
        lower.on(lost(mine(1), Why::Dead)),
        [close(mine(1), How::Silently), send_welcome(5)]
    );
}

#[test]
fn a_half_open_link_that_somebody_waits_for_is_wanted_again() {
    let mut side = Side::higher().greets(5);
    side.on(hello(1, OLD));
    let again = Effect::WantAgain { explicit: true };
    assert_eq!(
        side.on(lost(theirs(1), Why::Dead)),
        [close(theirs(1), How::Silently), again]
    );
    // And one that nobody waits for is not.
    side.on(hello(2, OLD));
    assert_eq!(
        side.on(lost(theirs(2), Why::Dead)),
        [close(theirs(2), How::Silently)]
    );
}

#[test]
fn a_hello_that_names_the_link_as_lost_ends_it() {
    for mut side in [Side::lower().up(9, OLD), Side::lower().up_by_them(9, OLD)] {
        let key = side.0.up().expect("up");
        assert_eq!(
            side.on(hello_after(Some(key.mirrored()), 10, OLD)),
            [
                close(key, How::Silently),
                END_BOUND,
                failed(true, Why::Redialled),
                send_welcome(10)
            ]
        );
    }
}

/// The peer closed the link and dials anew, and the hello overtook the goodbye.
#[test]
fn a_hello_after_a_close_in_order_waits_for_the_goodbye_once() {
    let after = |key: LinkKey, id| {
        let Input::Hello {
            mut greeting,
            incarnation,
        } = hello_after(Some(key.mirrored()), id, OLD)
        else {
            unreachable!()
        };
        greeting.closed = true;
        Input::Hello {
            greeting,
            incarnation,
        }
    };
    for side in [Side::lower().up(9, OLD), Side::lower().up_by_them(9, OLD)] {
        let key = side.0.up().expect("up");
        let mut told = Side(side.0.clone());
        assert_eq!(told.on(after(key, 10)), []);
        assert_eq!(
            told.on(lost(key, Why::Goodbye)),
            [
                close(key, How::Silently),
                END_BOUND,
                failed(true, Why::Goodbye),
                send_welcome(10)
            ]
        );
        // The goodbye does not come: the one that dials has to get through all the same.
        let mut deaf = Side(side.0.clone());
        assert_eq!(deaf.on(after(key, 10)), []);
        let parked = LinkKey::theirs(LinkId(10));
        assert_eq!(
            deaf.on(lost(parked, Why::Dead)),
            [close(parked, How::Silently)]
        );
        assert_eq!(
            deaf.on(after(key, 11)),
            [
                close(key, How::Silently),
                END_BOUND,
                failed(true, Why::Redialled),
                send_welcome(11)
            ]
        );
    }
}

/// Whoever closes in order says so when it dials again, and whoever lost the link does not.
#[test]
fn a_dial_tells_whether_the_last_link_was_closed_in_order() {
    for (end, closed) in [
        (Input::Disconnect, true),
        (lost(LinkKey::mine(LinkId(9)), Why::Dead), false),
    ] {
        let mut side = Side::lower().up(9, OLD);
        side.on(end);
        side.on(want(10));
        let effects = side.on(Input::Connected { link: LinkId(10) });
        assert!(
            matches!(effects[..], [Effect::SendHello { greeting }] if greeting.closed == closed && greeting.lost.is_some()),
            "{effects:?}"
        );
    }
}

#[test]
fn a_hello_that_may_be_late_waits_for_its_end_or_the_links() {
    let mut side = Side::lower().up(9, OLD);
    assert_eq!(side.on(hello_after(Some(mine(3)), 10, OLD)), []);
    assert_eq!(
        side.on(lost(theirs(10), Why::Dead)),
        [close(theirs(10), How::Silently)]
    );
    assert_eq!(side.on(hello(11, OLD)), []);
    assert_eq!(
        side.on(lost(mine(9), Why::Dead)),
        [
            close(mine(9), How::Silently),
            END_BOUND,
            failed(true, Why::Dead),
            send_welcome(11)
        ]
    );
}

#[test]
fn a_dial_that_its_side_gave_up_before_the_current_one_is_dropped() {
    let mut side = Side::lower().up_by_them(9, OLD);
    assert_eq!(side.on(hello(8, OLD)), [close(theirs(8), How::Silently)]);
    assert_eq!(side.0.up(), Some(theirs(9)));
}

#[test]
fn a_new_life_replaces_the_old_one_which_never_returns() {
    let mut side = Side::lower().up_by_them(1, OLD);
    let superseded = How::Superseded { by: NEW };
    assert_eq!(
        side.on(hello(2, NEW)),
        [
            close(theirs(1), superseded),
            END_BOUND,
            failed(true, Why::Replaced { by: NEW }),
            send_welcome(2)
        ]
    );
    assert_eq!(
        side.on(confirm(2)),
        [
            Effect::Joined {
                incarnation: NEW,
                rejoin: true
            },
            Effect::Up { key: theirs(2) }
        ]
    );
    let refusal = Refusal::Superseded { by: NEW };
    assert_eq!(side.on(hello(3, OLD)), [refused(3, refusal)]);
    side.on(lost(theirs(2), Why::Dead));
    assert_eq!(side.on(hello(4, OLD)), [refused(4, refusal)]);
    // The same where it answers.
    let mut side = side.greets(5);
    let stale = Why::Stale {
        incarnation: OLD,
        by: NEW,
    };
    assert_eq!(
        side.on(welcome(5, OLD)),
        [
            close(mine(5), superseded),
            END_UNBOUND,
            failed(false, stale)
        ]
    );
}

#[test]
fn an_older_life_is_refused_beside_a_newer_one_and_accepted_without() {
    let mut side = Side::lower().up_by_them(1, NEW);
    let refusal = Refusal::Superseded { by: NEW };
    assert_eq!(side.on(hello(2, OLD)), [refused(2, refusal)]);
    side.on(lost(theirs(1), Why::Dead));
    assert_eq!(side.on(hello(3, OLD)), [send_welcome(3)]);
    side.on(confirm(3));
    // The clock went back: now the one that came first is the replaced one.
    assert_eq!(
        side.on(hello(4, NEW)),
        [refused(4, Refusal::Superseded { by: OLD })]
    );
}

#[test]
fn the_loser_reports_once_and_dials_only_when_asked() {
    let by = NEW;
    let mut side = Side::higher().up(1, OLD);
    let why = Why::Superseded { by };
    assert_eq!(
        side.on(lost(mine(1), why)),
        [close(mine(1), How::Silently), END_BOUND, failed(true, why)]
    );
    let by_itself = Input::Want {
        link: LinkId(2),
        explicit: false,
    };
    assert_eq!(side.on(by_itself), [END_UNBOUND]);
    let mut side = side.greets(3);
    let refusal = Refusal::Superseded { by };
    let why = Why::Refused(refusal);
    let link = LinkId(3);
    assert_eq!(
        side.on(Input::Refused { link, refusal }),
        [
            close(mine(3), How::Silently),
            END_UNBOUND,
            failed(false, why)
        ]
    );
    assert_eq!(side.on(by_itself), [END_UNBOUND]);
    // The peer's own dial settles it.
    side.on(hello(4, OLD));
    side.on(confirm(4));
    side.on(lost(theirs(4), Why::Dead));
    assert_eq!(side.on(by_itself), [Effect::Dial { link: LinkId(2) }]);
}

#[test]
fn a_suspicion_tells_the_peer_and_the_next_link_joins_again() {
    let mut side = Side::lower().up(1, OLD);
    assert_eq!(
        side.on(lost(mine(1), Why::Timeout)),
        [
            close(mine(1), How::Suspected),
            END_BOUND,
            failed(true, Why::Timeout)
        ]
    );
    assert_eq!(side.0.bound(), None);
    side.on(want(2));
    let sent = side.on(Input::Connected { link: LinkId(2) });
    let named = |effect: &Effect| matches!(effect, Effect::SendHello { greeting } if greeting.lost == Some(mine(1)));
    assert!(sent.iter().all(named), "{sent:?}");
    assert!(side.on(welcome(2, OLD)).contains(&Effect::Joined {
        incarnation: OLD,
        rejoin: true
    }));
}

#[test]
fn a_disconnect_says_goodbye_and_the_next_want_dials_at_once() {
    let mut side = Side::lower().up(1, OLD);
    side.on(hello(5, OLD));
    assert_eq!(
        side.on(Input::Disconnect),
        [
            close(mine(1), How::Goodbye),
            END_BOUND,
            close(theirs(5), How::Goodbye),
            END_UNBOUND
        ]
    );
    assert_eq!(side.on(lost(mine(1), Why::Dead)), []);
    assert_eq!(side.on(want(2)), [Effect::Dial { link: LinkId(2) }]);
}

#[test]
fn a_closed_machine_starts_nothing() {
    let mut side = Side::lower().up(1, OLD);
    side.on(Input::Close);
    assert_eq!(side.on(want(2)), [END_UNBOUND]);
    assert_eq!(side.on(hello(3, OLD)), [refused(3, Refusal::Closing)]);
    assert_eq!(side.on(Input::Close), []);
    assert_eq!(side.0.phase(), Phase::Closed);
}

#[test]
fn the_memory_of_replaced_lives_is_bounded() {
    let mut side = Side::lower();
    let lives = REPLACED_KEPT as u64 + 10;
    for n in 1..=lives {
        side.on(hello(n, life(n)));
        side.on(confirm(n));
        assert_eq!(side.0.bound(), Some(life(n)));
    }
    assert_eq!(side.0.replaced.len(), REPLACED_KEPT);
    side.on(lost(theirs(lives), Why::Dead));
    assert!(matches!(
        side.on(hello(9999, life(lives - 1)))[..],
        [Effect::SendRefusal { .. }]
    ));
}
