//! Paths that are slow, stall, or are reset.

use super::*;

const BULK: usize = 32 << 20;

on_every_transport!(
    a_stall_during_a_read,
    a_stall_during_a_write,
    a_stall_during_a_signal,
    one_megabyte_a_second_is_not_dead,
    a_large_message_over_a_slow_path_arrives,
    a_signal_with_a_large_message_over_a_slow_path_arrives,
    a_reset_is_a_death_on_both_sides,
);

fn stalled(net: Net, what: &str) {
    let path = Path::new(net, None, None);
    let (a, b, url) = (&path.a, &path.b, &path.url);
    let there = b.buffer(BULK, 1, false);
    let here = a.buffer(BULK, 2, true);
    path.set_rate(20 << 20);
    let before = path.passed();
    let start = Instant::now();
    let transfer = a.transfer(what, url, here, there, BULK, None);
    wait_for("data to flow", || path.passed() > before + (4 << 20));
    path.stall(true);
    expect_suspicion(a, &[OVERDUE], what);
    let took = start.elapsed();
    assert!(
        took >= Duration::from_secs(3) && took < Duration::from_secs(15),
        "{took:?}"
    );
    // What the relay holds comes now: it must not land.
    path.set_rate(0);
    path.stall(false);
    let answer = expect_failure(transfer, &[-3], what);
    assert!(text(&answer["said"]).contains("progress"), "{answer}");
    // It was given up; the other one did not die.
    expect_suspicion(b, &[GIVEN_UP], what);
    expect_settled(&[a, b], WATCH, what);
    assert_eq!(a.read(url, here, there, 4096, None), 0, "a new link");
}

fn a_stall_during_a_read(net: Net) {
    stalled(net, "read");
}

fn a_stall_during_a_write(net: Net) {
    stalled(net, "write");
}

fn a_stall_during_a_signal(net: Net) {
    stalled(net, "signal");
}

/// 1 MB/s is slow, not dead: no default deadline and no heartbeat may end it.
fn one_megabyte_a_second_is_not_dead(net: Net) {
    const LEN: usize = 6 << 20;
    let path = Path::new(net, Some((500, 3000)), Some((500, 3000)));
    let (a, b, url) = (&path.a, &path.b, &path.url);
    path.set_rate(1_000_000);
    let there = b.buffer(LEN, 1, false);
    let here = a.buffer(LEN, 2, true);
    let start = Instant::now();
    let read = a.transfer("read", url, here, there, LEN, None).wait();
    assert_eq!(read["code"], 0, "{read}");
    assert!(a.holds(here, LEN, 1));
    assert!(
        start.elapsed() > Duration::from_secs(4),
        "the relay was to be slow"
    );
    let write = a.transfer("write", url, here, there, LEN, None).wait();
    assert_eq!(write["code"], 0, "{write}");
    expect_settled(&[a, b], 10, "slow is not dead");
}

fn a_large_message_over_a_slow_path_arrives(net: Net) {
    const LEN: usize = 6 << 20;
    // Only the sender beats: what it hears is what the receiver says by itself.
    let path = Path::new(net, Some((500, 3000)), None);
    let (a, b, url) = (&path.a, &path.b, &path.url);
    path.set_rate(1_000_000);
    let sent = a.call(json!({"do": "send", "url": url, "len": LEN, "byte": 3}));
    assert_eq!(sent["code"], 0);
    let got = b.call(json!({"do": "recv", "ms": 60_000}));
    assert_eq!(got, json!(["lab|0|0|0", LEN, 3]));
    expect_settled(&[a, b], 10, "slow is not dead");
}

fn a_signal_with_a_large_message_over_a_slow_path_arrives(net: Net) {
    const NOTE: usize = 6 << 20;
    let path = Path::new(net, None, None);
    let (a, b, url) = (&path.a, &path.b, &path.url);
    let there = b.buffer(4096, 1, false);
    let here = a.buffer(4096, 2, true);
    path.set_rate(1_000_000);
    let signal = a.post(json!({
        "do": "signal", "url": url, "local": here, "remote": there, "len": 4096, "note": NOTE,
    }));
    let got = b.call(json!({"do": "recv", "ms": 60_000}));
    assert_eq!(got, json!(["lab|0|0|0", NOTE, 7]));
    let answer = signal.wait();
    assert_eq!(answer["code"], 0, "slow is not dead: {answer}");
    expect_settled(&[a, b], 10, "slow is not dead");
}

fn a_reset_is_a_death_on_both_sides(net: Net) {
    let path = Path::new(net, None, None);
    let (a, b, url) = (&path.a, &path.b, &path.url);
    let there = b.buffer(BULK, 1, false);
    let here = a.buffer(BULK, 2, true);
    for what in ["read", "write", "idle"] {
        let transfer = (what != "idle").then(|| {
            path.set_rate(20 << 20);
            a.transfer(what, url, here, there, BULK, None)
        });
        std::thread::sleep(Duration::from_millis(200));
        path.reset();
        path.set_rate(0);
        for agent in [a, b] {
            expect_death(agent, RESET, what);
        }
        if let Some(transfer) = transfer {
            expect_failure(transfer, &[-2], what);
        }
        link(a, b, url);
    }
    expect_settled(&[a, b], WATCH, "all resets");
}
