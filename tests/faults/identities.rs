//! Two processes with one name.

use super::*;

on_every_transport!(
    the_newer_of_two_claimants_wins_and_nothing_flaps,
    a_frozen_one_wakes_after_its_replacement_came_up,
);

/// What the loser of an identity says.
const SUPERSEDED: &str = "superseded by ";

fn the_newer_of_two_claimants_wins_and_nothing_flaps(net: Net) {
    let (a, url_a) = local(net, 0, None);
    let (old, url_old) = local(net, 1, None);
    link(&a, &old, &url_old);
    let (new, _) = local(net, 1, None);
    new.call(json!({"do": "connect", "url": url_a}));
    new.expect_up("the newer");
    expect_death(&a, "replaced by a new incarnation ", "replaced");
    a.expect_up("the newer");
    expect_death(&old, SUPERSEDED, "superseded");
    // Nobody redials by itself: nothing flaps.
    expect_settled(&[&a, &old, &new], WATCH, "superseded");
    old.call(json!({"do": "connect", "url": url_a}));
    let failed = old.event(60_000);
    assert_eq!((&failed[0], &failed[4]), (&json!("failed"), &json!(false)));
    assert!(text(&failed[3]).starts_with(SUPERSEDED), "{failed}");
    expect_settled(&[&a, &new], 500, "refused without a sound");
}

fn a_frozen_one_wakes_after_its_replacement_came_up(net: Net) {
    let (a, url_a) = local(net, 0, Some(BEAT));
    let (old, url_old) = local(net, 1, Some(BEAT));
    link(&a, &old, &url_old);
    old.signal(libc::SIGSTOP);
    expect_suspicion(&a, &[SILENCE], "frozen");
    let (new, url_new) = local(net, 1, Some(BEAT));
    new.call(json!({"do": "connect", "url": url_a}));
    new.expect_up("the replacement");
    a.expect_up("the replacement");
    let there = new.buffer(4096, 3, false);
    let here = a.buffer(4096, 4, true);
    old.signal(libc::SIGCONT);
    // One failure, and no way back, also when it tries.
    old.expect_failed("awake");
    expect_settled(&[&a, &old, &new], WATCH, "awake");
    old.call(json!({"do": "connect", "url": url_a}));
    let failed = old.event(60_000);
    assert_eq!((&failed[0], &failed[4]), (&json!("failed"), &json!(false)));
    assert!(text(&failed[3]).starts_with(SUPERSEDED), "{failed}");
    expect_settled(&[&a, &new], 500, "the replacement stays");
    assert_eq!(a.read(&url_new, here, there, 4096, None), 0);
    assert!(a.holds(here, 4096, 3));
}
