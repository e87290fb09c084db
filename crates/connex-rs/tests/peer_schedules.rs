//! Long random schedules of many events, where the model checker does short ones exhaustively; and a
//! peer that sends anything at all.

mod peer_world;

use std::collections::BTreeSet;

use connex_rs::identity::{Incarnation, LogicalId};
use connex_rs::peer::{
    Dialler, Effect, Greeting, Input, LinkId, LinkKey, Peer, Phase, Refusal, Why,
};
use peer_world::{Budget, Fault, Rule, Step, World};
use proptest::prelude::*;
use proptest::strategy::ValueTree;

const ALL_PAIRS: &[(u8, u8)] = &[(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)];

/// One engine process per id.
const HONEST: Budget = Budget {
    wants: 8,
    pairs: ALL_PAIRS,
    wants_by_itself: true,
    breaks: 8,
    timeouts: 6,
    restarts: 4,
    usurpers: 0,
    ancients: 0,
    disconnects: 6,
};

/// Several processes may claim an id.
const RIVALS: Budget = Budget {
    usurpers: 2,
    ancients: 2,
    ..HONEST
};

/// Takes the steps that the numbers choose, then lets what is under way come to rest.
fn run(ids: u8, budget: Budget, fault: Fault, choices: &[u16]) -> Result<World, (Rule, Vec<Step>)> {
    let mut world = World::new(ids, budget, fault);
    let mut taken = Vec::new();
    let mut choices = choices.iter().map(|choice| usize::from(*choice));
    loop {
        let mut steps = Vec::new();
        match choices.next() {
            Some(choice) => {
                world.steps(&mut steps);
                if steps.is_empty() {
                    return Ok(world);
                }
                let step = steps[choice % steps.len()];
                taken.push(step);
                world.step(step);
            }
            None => {
                world.inner_steps(&mut steps);
                let Some(step) = steps.first() else {
                    return Ok(world);
                };
                taken.push(*step);
                world.step(*step);
            }
        }
        if let Some(rule) = world.broken() {
            return Err((rule, taken));
        }
    }
}

fn choices() -> impl Strategy<Value = Vec<u16>> {
    proptest::collection::vec(any::<u16>(), 0..250)
}

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn two_engines_keep_the_rules(choices in choices()) {
        let result = run(2, Budget { pairs: &[(0, 1), (1, 0)], ..HONEST }, Fault::None, &choices);
        prop_assert!(result.is_ok(), "{:#?}", result.err());
    }

    #[test]
    fn three_engines_keep_the_rules(choices in choices()) {
        let result = run(3, HONEST, Fault::None, &choices);
        prop_assert!(result.is_ok(), "{:#?}", result.err());
    }

    #[test]
    fn rivals_for_an_id_break_no_rule(choices in choices()) {
        let result = run(2, Budget { pairs: &[(0, 1), (1, 0)], ..RIVALS }, Fault::None, &choices);
        prop_assert!(result.is_ok(), "{:#?}", result.err());
    }

    #[test]
    fn dials_without_a_fault_all_come_up(choices in choices()) {
        let calm = Budget { wants: 8, pairs: ALL_PAIRS, wants_by_itself: true, ..Budget::NONE };
        let world = run(3, calm, Fault::None, &choices);
        let world = world.map_err(|broken| TestCaseError::fail(format!("{broken:#?}")))?;
        for (one, other) in ALL_PAIRS {
            for phase in world.phases(*one, *other) {
                prop_assert!(matches!(phase, Phase::Up | Phase::Idle), "{phase:?} at rest");
            }
        }
    }
}

/// Random schedules find a seeded fault as well.
#[test]
fn seeded_faults_are_caught() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    for fault in [
        Fault::BothRefuse,
        Fault::NoParking,
        Fault::UpTooEarly,
        Fault::DeafHalfOpen,
        Fault::ForgetsAttempt,
        Fault::KeepsBoundWork,
        Fault::FailsTwice,
    ] {
        let caught = (0..2000).any(|_| {
            let tree = choices().new_tree(&mut runner).expect("no filter");
            run(3, HONEST, fault, &tree.current()).is_err()
        });
        assert!(caught, "{fault:?}");
    }
}

/// Few values, so that inputs meet.
fn links() -> impl Strategy<Value = LinkId> {
    (0_u64..6).prop_map(LinkId)
}

fn keys() -> impl Strategy<Value = LinkKey> {
    (any::<bool>(), links()).prop_map(|(mine, id)| {
        if mine {
            LinkKey::mine(id)
        } else {
            LinkKey::theirs(id)
        }
    })
}

fn lives() -> impl Strategy<Value = Incarnation> {
    (0_u64..3, 0_u64..2).prop_map(|(start_ns, random)| Incarnation { start_ns, random })
}

fn greetings() -> impl Strategy<Value = Greeting> {
    (
        links(),
        0_u64..4,
        proptest::option::of(keys()),
        any::<bool>(),
    )
        .prop_map(|(link, attempt, lost, closed)| Greeting {
            link,
            attempt,
            lost,
            closed,
        })
}

fn refusals() -> impl Strategy<Value = Refusal> {
    prop_oneof![
        lives().prop_map(|by| Refusal::Superseded { by }),
        Just(Refusal::Closing),
        any::<u16>().prop_map(Refusal::Rejected),
    ]
}

fn reasons() -> impl Strategy<Value = Why> {
    prop_oneof![
        Just(Why::Dead),
        Just(Why::Goodbye),
        Just(Why::Timeout),
        Just(Why::GivenUp),
        lives().prop_map(|by| Why::Superseded { by }),
    ]
}

fn inputs() -> impl Strategy<Value = Input> {
    prop_oneof![
        3 => any::<bool>().prop_map(|explicit| Input::Want { link: LinkId(0), explicit }),
        3 => links().prop_map(|link| Input::Connected { link }),
        6 => (greetings(), lives()).prop_map(|(greeting, incarnation)| Input::Hello { greeting, incarnation }),
        4 => (links(), lives()).prop_map(|(link, incarnation)| Input::Welcome { link, incarnation }),
        2 => (links(), refusals()).prop_map(|(link, refusal)| Input::Refused { link, refusal }),
        4 => links().prop_map(|link| Input::Confirm { link }),
        4 => (keys(), reasons()).prop_map(|(key, why)| Input::Lost { key, why }),
        1 => Just(Input::Disconnect),
    ]
}

proptest! {
    #![proptest_config(cases(4000))]

    /// Whatever comes in, in whatever order: no panic, no more than one link and one parked hello,
    /// each link closed once, each `up` after its `joined` and ended by at most one `failed`.
    #[test]
    fn no_input_confuses_the_machine(lower: bool, inputs in proptest::collection::vec(inputs(), 0..80)) {
        let id = |stage| LogicalId::new("m", stage, 0, 0).expect("legal");
        let mut peer = Peer::new(&id(u32::from(!lower)), &id(u32::from(lower)));
        let mut open = BTreeSet::new();
        let mut up = None;
        let mut fresh = 0;
        for mut input in inputs.into_iter().chain([Input::Close]) {
            match &mut input {
                // Our own ids are never used twice; the inputs may name them.
                Input::Want { link, .. } => {
                    *link = LinkId(fresh);
                    fresh += 1;
                }
                // The engine lets no hello through that names an open connection.
                Input::Hello { greeting, .. } if open.contains(&LinkKey::theirs(greeting.link)) => continue,
                Input::Hello { greeting, .. } => {
                    open.insert(LinkKey::theirs(greeting.link));
                }
                _ => {}
            }
            let mut out = Vec::new();
            peer.on(input, &mut out);
            let mut previous = None;
            for effect in out {
                match effect {
                    Effect::Dial { link } => prop_assert!(open.insert(LinkKey::mine(link))),
                    Effect::CloseLink { key, .. } => {
                        prop_assert!(open.remove(&key), "{effect:?}");
                        if up == Some(key) && matches!(input, Input::Disconnect | Input::Close) {
                            up = None;
                        }
                    }
                    Effect::SendRefusal { link, .. } => prop_assert!(open.remove(&LinkKey::theirs(link))),
                    Effect::Up { key } => {
                        let joined = matches!(previous, Some(Effect::Joined { .. }));
                        prop_assert!(joined && up.replace(key).is_none() && open.contains(&key));
                    }
                    Effect::Failed { established: true, .. } => {
                        let key = up.take();
                        prop_assert!(key.is_some_and(|key| !open.contains(&key)), "{effect:?}");
                    }
                    _ => {}
                }
                previous = Some(effect);
            }
            prop_assert_eq!(peer.up(), up);
            prop_assert_eq!(peer.bound().is_some(), up.is_some());
            let dialled = open.iter().filter(|key| key.dialler == Dialler::Me).count();
            prop_assert!(open.len() <= 2 && dialled <= 1, "{open:?}");
        }
        prop_assert!(open.is_empty() && peer.phase() == Phase::Closed);
    }
}
