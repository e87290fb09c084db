//! Every interleaving of a few events between two and three engines, by a model checker.
//!
//! The explorations here take seconds in a debug build. `cargo test --release -- --ignored` runs the
//! larger ones.

mod peer_world;

use connex_rs::peer::{Phase, Refusal};
use peer_world::{Budget, Fault, Rule, Step, World};
use stateright::{Checker, Model, Property};

const SOUND: &str = "no rule is broken";

/// What is explored.
#[derive(Debug, Clone, Copy)]
struct Exploration {
    ids: u8,
    budget: Budget,
    fault: Fault,
    /// The rule to look at; all of them if none.
    hunted: Option<Rule>,
    /// What must occur somewhere, so that an exploration does not miss its subject.
    witness: fn(&World) -> bool,
}

impl Model for Exploration {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self.ids, self.budget, self.fault)]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        world.steps(steps);
    }

    fn next_state(&self, world: &World, step: Step) -> Option<World> {
        let mut next = world.clone();
        next.step(step);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(SOUND, |model: &Self, world: &World| match model.hunted {
                None => world.broken().is_none(),
                hunted => world.broken() != hunted,
            }),
            Property::sometimes("a pair is up", |_, world| both(world, Phase::Up)),
            Property::sometimes("the witness", |model, world| (model.witness)(world)),
        ]
    }
}

/// Explores everything; gives the first broken rule and the shortest way to it.
fn search(model: Exploration) -> Result<(), (Rule, Vec<Step>)> {
    let checker = model.checker().threads(2).spawn_bfs().join();
    if let Some(path) = checker.discovery(SOUND) {
        let rule = path.last_state().broken().expect("what the property says");
        return Err((rule, path.into_actions()));
    }
    checker.assert_properties();
    Ok(())
}

fn explore(ids: u8, budget: Budget, witness: fn(&World) -> bool) {
    if let Err((rule, steps)) = search(Exploration {
        ids,
        budget,
        fault: Fault::None,
        hunted: None,
        witness,
    }) {
        panic!("{rule:?} is broken by {steps:#?}");
    }
}

fn both(world: &World, wanted: Phase) -> bool {
    world
        .phases(0, 1)
        .chain(world.phases(1, 0))
        .all(|phase| phase == wanted)
}

fn crossing(world: &World) -> bool {
    both(world, Phase::Dialling)
}

fn superseded(world: &World) -> bool {
    world.some_refusal(|refusal| matches!(refusal, Refusal::Superseded { .. }))
}

const PAIR: Budget = Budget {
    wants: 2,
    pairs: &[(0, 1), (1, 0)],
    ..Budget::NONE
};

#[test]
fn dials_that_cross_never_fail_and_the_lower_ones_link_stays() {
    explore(
        2,
        Budget {
            wants: 3,
            wants_by_itself: true,
            ..PAIR
        },
        crossing,
    );
}

#[test]
fn connections_break_and_time_out() {
    explore(
        2,
        Budget {
            wants_by_itself: true,
            breaks: 1,
            timeouts: 1,
            ..PAIR
        },
        crossing,
    );
}

#[test]
fn an_engine_is_restarted_while_connections_break() {
    explore(
        2,
        Budget {
            breaks: 1,
            restarts: 1,
            ..PAIR
        },
        World::someone_rejoined,
    );
}

#[test]
fn a_disconnect_is_followed_by_a_want_at_once() {
    explore(
        2,
        Budget {
            disconnects: 2,
            wants_by_itself: true,
            ..PAIR
        },
        crossing,
    );
}

#[test]
fn two_live_processes_claim_one_id() {
    for (wants, breaks) in [(2, 0), (1, 1)] {
        let budget = Budget {
            wants,
            breaks,
            usurpers: 1,
            ..PAIR
        };
        explore(2, budget, superseded);
    }
}

#[test]
fn an_engine_is_restarted_under_a_clock_that_went_back() {
    for (wants, breaks) in [(2, 0), (1, 1)] {
        let budget = Budget {
            wants,
            breaks,
            ancients: 1,
            ..PAIR
        };
        explore(2, budget, World::someone_rejoined);
    }
}

#[test]
fn three_engines_dial_in_a_circle_and_one_connection_breaks() {
    let pairs = &[(0, 1), (1, 2), (2, 0)];
    explore(
        3,
        Budget {
            wants: 1,
            pairs,
            breaks: 1,
            ..Budget::NONE
        },
        |world| both(world, Phase::Up) && world.phases(2, 0).all(|phase| phase == Phase::Up),
    );
}

#[test]
fn of_three_engines_the_middle_one_is_restarted() {
    let pairs = &[(0, 1), (1, 0), (1, 2)];
    let budget = Budget {
        wants: 1,
        pairs,
        restarts: 1,
        ..Budget::NONE
    };
    explore(3, budget, |world| {
        crossing(world) && world.phases(1, 2).all(|p| p == Phase::Dialling)
    });
}

#[test]
#[ignore = "minutes: the full bounds"]
fn full_breaks_time_outs_and_disconnects() {
    explore(
        2,
        Budget {
            wants: 3,
            timeouts: 1,
            disconnects: 1,
            ..PAIR
        },
        crossing,
    );
    explore(
        2,
        Budget {
            breaks: 2,
            timeouts: 1,
            ..PAIR
        },
        crossing,
    );
}

#[test]
#[ignore = "minutes: the full bounds"]
fn full_restarts_and_rivals() {
    explore(
        2,
        Budget {
            wants: 3,
            breaks: 1,
            usurpers: 1,
            ..PAIR
        },
        superseded,
    );
    explore(
        2,
        Budget {
            restarts: 2,
            disconnects: 1,
            ..PAIR
        },
        World::someone_rejoined,
    );
}

#[test]
#[ignore = "minutes: the full bounds"]
fn full_three_engines() {
    let pairs = &[(0, 1), (1, 0), (0, 2), (2, 0), (1, 2)];
    explore(
        3,
        Budget {
            wants: 1,
            pairs,
            ..Budget::NONE
        },
        crossing,
    );
}

/// The rules are of use only if they see what is wrong.
#[test]
fn seeded_faults_are_caught() {
    let one = Budget { wants: 1, ..PAIR };
    for (fault, budget, expected) in [
        (Fault::BothRefuse, one, Rule::Crossing),
        (Fault::NoParking, one, Rule::Crossing),
        (Fault::UpTooEarly, one, Rule::RoundTrip),
        (
            Fault::DeafHalfOpen,
            Budget { breaks: 1, ..one },
            Rule::Ledger,
        ),
        (
            Fault::ForgetsAttempt,
            Budget {
                timeouts: 1,
                ..PAIR
            },
            Rule::LiveDialDropped,
        ),
        (
            Fault::ForgetsReplaced,
            Budget {
                usurpers: 1,
                breaks: 1,
                pairs: &[(0, 1)],
                wants: 3,
                ..PAIR
            },
            Rule::ReplacedReturns,
        ),
        (
            Fault::KeepsBoundWork,
            Budget {
                restarts: 1,
                ..PAIR
            },
            Rule::OtherLife,
        ),
        (
            Fault::FailsTwice,
            Budget { breaks: 1, ..one },
            Rule::OneFailed,
        ),
    ] {
        let found = search(Exploration {
            ids: 2,
            budget,
            fault,
            hunted: Some(expected),
            witness: |_| true,
        });
        let (rule, _) = found.expect_err("a seeded fault must be caught");
        assert_eq!(rule, expected, "{fault:?}");
    }
}
