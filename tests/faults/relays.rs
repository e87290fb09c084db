//! Paths that are slow, stall, or are reset.

use super::*;

const BULK: usize = 32 << 20;

fn through_a_relay(beat: Option<(u64, u64)>) -> (Agent, Agent, Relay, String) {
    let (a, _) = local(0, beat);
    let (b, url) = local(1, beat);
    let relay = Relay::new(
        format!("127.0.0.1:{}", port_of(&url))
            .parse()
            .expect("address"),
    );
    let url = relay.url(&url);
    link(&a, &b, &url);
    (a, b, relay, url)
}

fn stalled(what: &str) {
    let (a, b, relay, url) = through_a_relay(None);
    let there = b.buffer(BULK, 1, false);
    let here = a.buffer(BULK, 2, true);
    relay.set_rate(20 << 20);
    let before = relay.passed();
    let start = Instant::now();
    let transfer = a.transfer(what, &url, here, there, BULK, None);
    wait_for("data to flow", || relay.passed() > before + (4 << 20));
    relay.stall(true);
    let (status, reason) = a.expect_failed(what);
    assert_eq!(status, -3, "{reason}");
    let took = start.elapsed();
    assert!(
        took >= Duration::from_secs(3) && took < Duration::from_secs(15),
        "{took:?}"
    );
    // What the relay holds comes now: it must not land.
    relay.set_rate(0);
    relay.stall(false);
    let answer = expect_failure(transfer, &[-3], what);
    assert!(text(&answer["said"]).contains("progress"), "{answer}");
    let (status, reason) = b.expect_failed(what);
    assert_eq!(status, -3, "b was given up, a did not die: {reason}");
    assert_eq!(a.read(&url, here, there, 4096, None), 0, "a new link");
}

#[test]
fn a_stall_during_a_read() {
    stalled("read");
}

#[test]
fn a_stall_during_a_write() {
    stalled("write");
}

#[test]
fn a_stall_during_a_signal() {
    stalled("signal");
}

/// 1 MB/s is slow, not dead: no default deadline and no heartbeat may end it.
#[test]
fn one_megabyte_a_second_is_not_dead() {
    const LEN: usize = 8 << 20;
    let (a, b, relay, url) = through_a_relay(Some((500, 3000)));
    relay.set_rate(1_000_000);
    let there = b.buffer(LEN, 1, false);
    let here = a.buffer(LEN, 2, true);
    let start = Instant::now();
    let read = a.transfer("read", &url, here, there, LEN, None).wait();
    assert_eq!(read["code"], 0, "{read}");
    assert!(a.holds(here, LEN, 1));
    assert!(
        start.elapsed() > Duration::from_secs(4),
        "the relay was to be slow"
    );
    let write = a.transfer("write", &url, here, there, LEN, None).wait();
    assert_eq!(write["code"], 0, "{write}");
    a.expect_quiet(10, "slow is not dead");
    b.expect_quiet(10, "slow is not dead");
}

#[test]
fn a_large_message_over_a_slow_path_arrives() {
    const LEN: usize = 8 << 20;
    // Only the sender beats: what it hears is what the receiver says by itself.
    let (a, _) = local(0, Some((500, 3000)));
    let (b, url) = local(1, None);
    let relay = Relay::new(
        format!("127.0.0.1:{}", port_of(&url))
            .parse()
            .expect("address"),
    );
    let url = relay.url(&url);
    link(&a, &b, &url);
    relay.set_rate(1_000_000);
    let sent = a.call(json!({"do": "send", "url": url, "len": LEN, "byte": 3}));
    assert_eq!(sent["code"], 0);
    let got = b.call(json!({"do": "recv", "ms": 60_000}));
    assert_eq!(got, json!(["lab|0|0|0", LEN, 3]));
    a.expect_quiet(10, "slow is not dead");
    b.expect_quiet(10, "slow is not dead");
}

#[test]
fn a_signal_with_a_large_message_over_a_slow_path_arrives() {
    const NOTE: usize = 10 << 20;
    let (a, b, relay, url) = through_a_relay(None);
    let there = b.buffer(4096, 1, false);
    let here = a.buffer(4096, 2, true);
    relay.set_rate(1_000_000);
    let signal = a.post(json!({
        "do": "signal", "url": url, "local": here, "remote": there, "len": 4096, "note": NOTE,
    }));
    let got = b.call(json!({"do": "recv", "ms": 60_000}));
    assert_eq!(got, json!(["lab|0|0|0", NOTE, 7]));
    let answer = signal.wait();
    assert_eq!(answer["code"], 0, "slow is not dead: {answer}");
    a.expect_quiet(10, "slow is not dead");
}

#[test]
fn a_reset_is_a_death_on_both_sides() {
    let (a, b, relay, url) = through_a_relay(None);
    let there = b.buffer(BULK, 1, false);
    let here = a.buffer(BULK, 2, true);
    for what in ["read", "write", "idle"] {
        let transfer = (what != "idle").then(|| {
            relay.set_rate(20 << 20);
            a.transfer(what, &url, here, there, BULK, None)
        });
        std::thread::sleep(Duration::from_millis(200));
        relay.reset();
        relay.set_rate(0);
        for agent in [&a, &b] {
            let (status, reason) = agent.expect_failed(what);
            assert_eq!(status, -2, "{reason}");
            agent.expect_quiet(50, "once");
        }
        if let Some(transfer) = transfer {
            expect_failure(transfer, &[-2], what);
        }
        link(&a, &b, &url);
    }
}
