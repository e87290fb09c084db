//! Two processes with one name.

use super::*;

#[test]
fn the_newer_of_two_claimants_wins_and_nothing_flaps() {
    let (a, url_a) = local(0, None);
    let (old, url_old) = local(1, None);
    link(&a, &old, &url_old);
    let (new, _) = local(1, None);
    new.call(json!({"do": "connect", "url": url_a}));
    new.expect_up("the newer");
    let (status, reason) = a.expect_failed("replaced");
    assert_eq!(status, -2);
    assert!(reason.contains("replaced"), "{reason}");
    a.expect_up("the newer");
    let (status, reason) = old.expect_failed("superseded");
    assert_eq!(status, -2);
    assert!(reason.contains("superseded"), "{reason}");
    old.expect_quiet(1500, "it does not redial by itself");
    a.expect_quiet(10, "nothing flaps");
    old.call(json!({"do": "connect", "url": url_a}));
    let failed = old.event(60_000);
    assert_eq!((&failed[0], &failed[4]), (&json!("failed"), &json!(false)));
    assert!(text(&failed[3]).contains("superseded"), "{failed}");
    a.expect_quiet(300, "refused without a sound");
    new.expect_quiet(10, "not disturbed");
}

#[test]
fn a_frozen_one_wakes_after_its_replacement_came_up() {
    let (a, url_a) = local(0, Some(BEAT));
    let (old, url_old) = local(1, Some(BEAT));
    link(&a, &old, &url_old);
    old.signal(libc::SIGSTOP);
    assert_eq!(a.expect_failed("frozen").0, -3);
    let (new, url_new) = local(1, Some(BEAT));
    new.call(json!({"do": "connect", "url": url_a}));
    new.expect_up("the replacement");
    a.expect_up("the replacement");
    let there = new.buffer(4096, 3, false);
    let here = a.buffer(4096, 4, true);
    old.signal(libc::SIGCONT);
    // One failure, and no way back, also when it tries.
    old.expect_failed("awake");
    old.expect_quiet(500, "once");
    old.call(json!({"do": "connect", "url": url_a}));
    let failed = old.event(60_000);
    assert_eq!((&failed[0], &failed[4]), (&json!("failed"), &json!(false)));
    assert!(text(&failed[3]).contains("superseded"), "{failed}");
    a.expect_quiet(500, "the replacement stays");
    assert_eq!(a.read(&url_new, here, there, 4096, None), 0);
    assert!(a.holds(here, 4096, 3));
}
