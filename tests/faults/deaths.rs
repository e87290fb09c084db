//! Processes that die or stop.

use super::*;

const BULK: usize = 64 << 20;

/// Kills a peer while `what` is under way through a slow relay; the survivor has one `failed`, and it is a death.
fn killed_during(what: &str) {
    let (a, _) = local(0, None);
    let (mut b, url) = local(1, None);
    let relay = Relay::new(
        format!("127.0.0.1:{}", port_of(&url))
            .parse()
            .expect("address"),
    );
    let url = relay.url(&url);
    link(&a, &b, &url);
    let there = b.buffer(BULK, 1, false);
    let here = a.buffer(BULK, 2, true);
    relay.set_rate(20 << 20);
    let before = relay.passed();
    let transfer = a.transfer(what, &url, here, there, BULK, None);
    wait_for("data to flow", || relay.passed() > before + (2 << 20));
    b.kill();
    relay.set_rate(0);
    let (status, reason) = a.expect_failed(what);
    assert_eq!(status, -2, "{reason}");
    assert!(reason.contains("died"), "{reason}");
    expect_failure(transfer, &[-2], what);
    a.expect_quiet(100, what);
    assert_eq!((a.stat("live_peers"), a.stat("inflight")), (0, 0));
}

#[test]
fn sigkill_during_a_read() {
    killed_during("read");
}

#[test]
fn sigkill_during_a_write() {
    killed_during("write");
}

#[test]
fn sigkill_during_a_signal() {
    killed_during("signal");
}

#[test]
fn sigkill_and_sigterm_while_idle() {
    let (a, _) = local(0, None);
    for (round, signal) in [libc::SIGKILL, libc::SIGTERM, libc::SIGKILL]
        .into_iter()
        .enumerate()
    {
        let (b, url) = local(10 + round as u32, None);
        link(&a, &b, &url);
        let start = Instant::now();
        b.signal(signal);
        let (status, reason) = a.expect_failed("idle");
        assert_eq!(status, -2, "{reason}");
        assert!(!reason.contains("closed by peer"), "{reason}");
        // Milliseconds on an idle machine; here only that no timeout was waited for.
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "{:?}",
            start.elapsed()
        );
        a.expect_quiet(50, "once");
    }
    wait_for("connections to go", || {
        a.stat("eps_created") == a.stat("eps_closed")
    });
}

#[test]
fn a_clean_exit_is_a_goodbye() {
    let (a, _) = local(0, None);
    let (b, url) = local(1, None);
    link(&a, &b, &url);
    b.call(json!({"do": "close"}));
    assert_eq!(a.expect_failed("close"), (-2, "closed by peer".into()));
}

#[test]
fn a_frozen_peer_is_suspected_and_comes_back() {
    let (a, url_a) = local(0, Some(BEAT));
    let (b, url) = local(1, Some(BEAT));
    link(&a, &b, &url);
    let there = b.buffer(4096, 1, false);
    let here = a.buffer(4096, 2, true);
    for round in 0..2 {
        let start = Instant::now();
        b.signal(libc::SIGSTOP);
        let (status, reason) = a.expect_failed("frozen");
        let took = start.elapsed();
        assert_eq!(status, -3, "{reason}");
        assert!(
            took >= Duration::from_millis(BEAT.1 - 2 * BEAT.0),
            "{took:?}"
        );
        assert!(took < Duration::from_secs(10), "{took:?}");
        b.signal(libc::SIGCONT);
        // It lives: it hears that it was given up, not that the other died.
        let (status, reason) = b.expect_failed("given up");
        assert_eq!(status, -3, "{reason}");
        // The next use links them again, whoever dials.
        if round == 0 {
            assert_eq!(a.read(&url, here, there, 4096, None), 0);
            assert!(a.holds(here, 4096, 1));
        } else {
            b.call(json!({"do": "connect", "url": url_a}));
        }
        a.expect_up("again");
        b.expect_up("again");
    }
    a.expect_quiet(300, "settled");
    b.expect_quiet(10, "settled");
}

#[test]
fn a_frozen_peer_during_a_read_times_out_and_nothing_lands() {
    let (a, _) = local(0, None);
    let (b, url) = local(1, None);
    let relay = Relay::new(
        format!("127.0.0.1:{}", port_of(&url))
            .parse()
            .expect("address"),
    );
    let url = relay.url(&url);
    link(&a, &b, &url);
    let there = b.buffer(BULK, 1, false);
    let here = a.buffer(BULK, 2, true);
    relay.set_rate(20 << 20);
    let transfer = a.transfer("read", &url, here, there, BULK, None);
    std::thread::sleep(Duration::from_millis(300));
    b.signal(libc::SIGSTOP);
    // What was under way runs out first; then three seconds without progress.
    let wake = std::thread::spawn(move || {
        let failed = a.expect_failed("frozen");
        b.signal(libc::SIGCONT);
        (a, b, failed)
    });
    expect_failure(transfer, &[-3], "frozen owner");
    let (_a, b, (status, reason)) = wake.join().expect("no panic");
    assert_eq!(status, -3, "{reason}");
    let (status, reason) = b.expect_failed("given up");
    assert_eq!(status, -3, "{reason}");
}

#[test]
fn a_pause_shorter_than_the_timeout_is_no_event() {
    let beat = Some((200, 4000));
    let (a, _) = local(0, beat);
    let (b, url) = local(1, beat);
    link(&a, &b, &url);
    let pause = Duration::from_millis(1500);
    for agent in [&b, &a] {
        agent.signal(libc::SIGSTOP);
        std::thread::sleep(pause);
        agent.signal(libc::SIGCONT);
        a.expect_quiet(700, "a short pause");
        b.expect_quiet(10, "a short pause");
    }
    // Longer than the timeout: the one that slept does not blame the other for its own absence. The other may.
    assert_eq!(
        (a.stat("heartbeat_failures"), b.stat("heartbeat_failures")),
        (0, 0)
    );
}

/// Restarts a peer on its port many times, at rest and in the middle of transfers, with a smaller region the second time.
#[test]
fn restarts_under_one_identity() {
    let (a, _) = local(0, None);
    let here = a.buffer(BULK, 9, true);
    let mut port = 0;
    let rounds = if soak() { 100 } else { 12 };
    for round in 0..rounds {
        let mut b = Agent::spawn(AGENT, &[]);
        let url = b.start(config(1, "127.0.0.1", port, None));
        port = port_of(&url);
        let len = if round % 2 == 0 { BULK } else { 4096 };
        let there = b.buffer(len, round, false);
        assert_eq!(a.read(&url, here, there, 4096, None), 0, "round {round}");
        a.expect_up("again");
        assert!(
            a.holds(here, 4096, round),
            "round {round}: another life's bytes"
        );
        if len == 4096 {
            // Refused without a trace of the larger region that was there before.
            assert_eq!(a.read(&url, here, there, 8192, None), -4);
            b.kill();
        } else {
            let transfers: Vec<Pending> = (0..3)
                .map(|_| a.transfer("write", &url, here, there, BULK, None))
                .collect();
            std::thread::sleep(Duration::from_millis(round % 7));
            b.kill();
            for transfer in transfers {
                let code = transfer.wait()["code"].clone();
                assert!(code == 0 || code == -2, "{code}");
            }
        }
        assert_eq!(a.expect_failed("killed").0, -2);
    }
    assert_eq!(a.stat("rejoins"), rounds - 1);
    wait_for("connections to go", || {
        a.stat("eps_created") == a.stat("eps_closed")
    });
    assert_eq!((a.stat("inflight"), a.stat("live_peers")), (0, 0));
}

#[test]
fn two_hundred_clients_at_once() {
    let (server, url) = local(0, Some((1000, 20_000)));
    let crowds: Vec<Agent> = (0..4).map(|_| Agent::spawn(AGENT, &[])).collect();
    let orders: Vec<Pending> = crowds
        .iter()
        .enumerate()
        .map(|(n, crowd)| {
            let mut order = config(100 + 50 * n as u32, "127.0.0.1", 0, None);
            order["do"] = json!("crowd");
            order["first"] = order["stage"].clone();
            order["count"] = json!(50);
            order["url"] = json!(url);
            crowd.post(order)
        })
        .collect();
    for order in orders {
        let answer = order.wait();
        assert_eq!(answer["failed"], json!([]), "{answer}");
    }
    // A dialler is up one message earlier.
    wait_for("all clients", || server.stat("live_peers") == 200);
    let (mut joined, mut up) = (0, 0);
    for _ in 0..400 {
        match text(&server.event(10_000)[0]).as_str() {
            "joined" => joined += 1,
            "up" => up += 1,
            other => panic!("{other}"),
        }
    }
    assert_eq!((joined, up), (200, 200));
    // All of them die at one moment.
    drop(crowds);
    for _ in 0..200 {
        server.expect_failed("the crowd");
    }
    wait_for("connections to go", || {
        server.stat("eps_created") == server.stat("eps_closed")
    });
}

#[test]
fn little_shared_memory_and_other_process_namespaces() {
    need_root();
    let tiny = "mount -t tmpfs -o size=64m none /dev/shm && exec \"$0\"";
    let none = "mount -t tmpfs -o size=4k,mode=000 none /dev/shm && exec \"$0\"";
    let wrappers: [&[&str]; 4] = [
        &["unshare", "-m", "sh", "-c", tiny],
        &["unshare", "-m", "sh", "-c", none],
        &["unshare", "-p", "-f", "--kill-child", "--mount-proc"],
        &["unshare", "-i", "-p", "-f", "--kill-child"],
    ];
    let (a, _) = local(0, None);
    let here = a.buffer(1 << 20, 2, true);
    for (n, wrapper) in wrappers.into_iter().enumerate() {
        let mut b = Agent::spawn(AGENT, wrapper);
        let url = b.start(config(n as u32 + 1, "127.0.0.1", 0, None));
        let there = b.buffer(1 << 20, 30 + n as u64, false);
        assert_eq!(a.read(&url, here, there, 1 << 20, None), 0, "{wrapper:?}");
        assert!(a.holds(here, 1 << 20, 30 + n as u64), "{wrapper:?}");
        a.expect_up("the other namespace");
        b.kill();
        assert_eq!(a.expect_failed("killed").0, -2, "{wrapper:?}");
    }
}
