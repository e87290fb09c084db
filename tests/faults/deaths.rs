//! Processes that die or stop.

use super::*;

const BULK: usize = 64 << 20;

on_every_transport!(
    sigkill_during_a_read,
    sigkill_during_a_write,
    sigkill_during_a_signal,
    sigkill_and_sigterm_while_idle,
    a_clean_exit_is_a_goodbye,
    a_frozen_peer_is_suspected_and_comes_back,
    a_frozen_peer_during_a_read_times_out_and_nothing_lands,
    a_pause_shorter_than_the_timeout_is_no_event,
    restarts_under_one_identity,
    killed_writers_leave_the_others_alone,
    two_hundred_clients_at_once,
    little_shared_memory_and_other_process_namespaces,
    shared_memory_that_runs_out_costs_speed_alone,
);

/// Kills a peer while `what` is under way over a slow path; the survivor has one `failed`, and it is a death.
fn killed_during(net: Net, what: &str) {
    let mut path = Path::new(net, None, None);
    let there = path.b.buffer(BULK, 1, false);
    let here = path.a.buffer(BULK, 2, true);
    path.set_rate(20 << 20);
    let before = path.passed();
    let transfer = path.a.transfer(what, &path.url, here, there, BULK, None);
    wait_for("data to flow", || path.passed() > before + (2 << 20));
    path.b.kill();
    path.set_rate(0);
    expect_death(&path.a, DIED, what);
    expect_failure(transfer, &[-2], what);
    expect_settled(&[&path.a], WATCH, what);
    let (live, inflight) = (path.a.stat("live_peers"), path.a.stat("inflight"));
    assert_eq!((live, inflight), (0, 0));
}

fn sigkill_during_a_read(net: Net) {
    killed_during(net, "read");
}

fn sigkill_during_a_write(net: Net) {
    killed_during(net, "write");
}

fn sigkill_during_a_signal(net: Net) {
    killed_during(net, "signal");
}

fn sigkill_and_sigterm_while_idle(net: Net) {
    let (a, _) = local(net, 0, None);
    for (round, signal) in [libc::SIGKILL, libc::SIGTERM, libc::SIGKILL]
        .into_iter()
        .enumerate()
    {
        let (b, url) = local(net, 10 + round as u32, None);
        link(&a, &b, &url);
        let start = Instant::now();
        b.signal(signal);
        expect_death(&a, DIED, "idle");
        // Milliseconds on an idle machine; here only that no timeout was waited for.
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "{:?}",
            start.elapsed()
        );
    }
    // One each: a second one would stand where the next peer's `joined` is expected.
    expect_settled(&[&a], WATCH, "idle");
    wait_for("connections to go", || {
        a.stat("eps_created") == a.stat("eps_closed")
    });
}

fn a_clean_exit_is_a_goodbye(net: Net) {
    let (a, _) = local(net, 0, None);
    let (mut b, url) = local(net, 1, None);
    link(&a, &b, &url);
    b.call(json!({"do": "close"}));
    assert_eq!(a.expect_failed("close"), (-2, CLOSED.into()));
    // Its process ends only now: that is no second end.
    b.kill();
    expect_settled(&[&a], WATCH, "close");
}

fn a_frozen_peer_is_suspected_and_comes_back(net: Net) {
    let (a, url_a) = local(net, 0, Some(BEAT));
    let (b, url) = local(net, 1, Some(BEAT));
    link(&a, &b, &url);
    let there = b.buffer(4096, 1, false);
    let here = a.buffer(4096, 2, true);
    for round in 0..2 {
        let start = Instant::now();
        b.signal(libc::SIGSTOP);
        expect_suspicion(&a, &[SILENCE], "frozen");
        let took = start.elapsed();
        assert!(
            took >= Duration::from_millis(BEAT.1 - 2 * BEAT.0),
            "{took:?}"
        );
        assert!(took < Duration::from_secs(10), "{took:?}");
        if round == 0 {
            expect_settled(&[&a], WATCH, "frozen");
        }
        b.signal(libc::SIGCONT);
        // It lives: it hears that it was given up, not that the other died.
        expect_suspicion(&b, &[GIVEN_UP], "given up");
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
    expect_settled(&[&a, &b], WATCH, "thawed");
}

fn a_frozen_peer_during_a_read_times_out_and_nothing_lands(net: Net) {
    let path = Path::new(net, None, None);
    let there = path.b.buffer(BULK, 1, false);
    let here = path.a.buffer(BULK, 2, true);
    path.set_rate(20 << 20);
    let transfer = path.a.transfer("read", &path.url, here, there, BULK, None);
    std::thread::sleep(Duration::from_millis(300));
    path.b.signal(libc::SIGSTOP);
    // What was under way runs out first; then three seconds without progress.
    let wake = std::thread::spawn(move || {
        expect_suspicion(&path.a, &[OVERDUE], "frozen");
        path.b.signal(libc::SIGCONT);
        path
    });
    expect_failure(transfer, &[-3], "frozen owner");
    let path = wake.join().expect("no panic");
    expect_suspicion(&path.b, &[GIVEN_UP], "given up");
    expect_settled(&[&path.a, &path.b], WATCH, "thawed");
}

fn a_pause_shorter_than_the_timeout_is_no_event(net: Net) {
    let beat = Some((200, 4000));
    let (a, _) = local(net, 0, beat);
    let (b, url) = local(net, 1, beat);
    link(&a, &b, &url);
    let pause = Duration::from_millis(1500);
    for agent in [&b, &a] {
        agent.signal(libc::SIGSTOP);
        std::thread::sleep(pause);
        agent.signal(libc::SIGCONT);
        expect_settled(&[&a, &b], 700, "a short pause");
    }
    // Longer than the timeout: the one that slept does not blame the other for its own absence. The other may.
    assert_eq!(
        (a.stat("heartbeat_failures"), b.stat("heartbeat_failures")),
        (0, 0)
    );
}

/// Peers that are killed in the middle of their writes disturb no other peer, whatever queue they shared with it.
fn killed_writers_leave_the_others_alone(net: Net) {
    let (a, url_a) = local(net, 0, None);
    let (c, url_c) = local(net, 1, None);
    link(&a, &c, &url_c);
    let (of_a, of_c) = (a.buffer(4096, 1, false), c.buffer(4096, 2, false));
    let (in_a, in_c) = (a.buffer(4096, 3, true), c.buffer(4096, 4, true));
    let target = a.buffer(BULK, 5, false);
    let rounds = if soak() { 60 } else { 20 };
    for round in 0..rounds {
        let mut b = Agent::spawn(AGENT, &[]);
        let url = b.start(config(net, 2, "127.0.0.1", 0, None));
        b.call(json!({"do": "connect", "url": url_a}));
        a.expect_up("a writer");
        let source = b.buffer(BULK, 6, true);
        for _ in 0..4 {
            b.transfer("write", &url_a, source, target, BULK, None);
        }
        std::thread::sleep(Duration::from_millis(2 + round % 9));
        b.kill();
        for _ in 0..5 {
            assert_eq!(a.read(&url_c, in_a, of_c, 4096, None), 0, "round {round}");
            assert_eq!(c.read(&url_a, in_c, of_a, 4096, None), 0, "round {round}");
        }
        expect_death(&a, DIED, &url);
    }
    assert!(a.holds(in_a, 4096, 2) && c.holds(in_c, 4096, 1));
    expect_settled(&[&a, &c], WATCH, "others");
}

/// Restarts a peer on its port many times, at rest and in the middle of transfers, with a smaller region the second time.
fn restarts_under_one_identity(net: Net) {
    let (a, _) = local(net, 0, None);
    let here = a.buffer(BULK, 9, true);
    let mut port = 0;
    let rounds = if soak() { 100 } else { 12 };
    for round in 0..rounds {
        let mut b = Agent::spawn(AGENT, &[]);
        let url = b.start(config(net, 1, "127.0.0.1", port, None));
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
        // One: a second one would stand where the next life's `joined` is expected.
        expect_death(&a, DIED, "killed");
    }
    expect_settled(&[&a], WATCH, "killed");
    assert_eq!(a.stat("rejoins"), rounds - 1);
    wait_for("connections to go", || {
        a.stat("eps_created") == a.stat("eps_closed")
    });
    assert_eq!((a.stat("inflight"), a.stat("live_peers")), (0, 0));
}

fn two_hundred_clients_at_once(net: Net) {
    let (server, url) = local(net, 0, Some((1000, 20_000)));
    let crowds: Vec<Agent> = (0..4).map(|_| Agent::spawn(AGENT, &[])).collect();
    let orders: Vec<Pending> = crowds
        .iter()
        .enumerate()
        .map(|(n, crowd)| {
            let mut order = config(net, 100 + 50 * n as u32, "127.0.0.1", 0, None);
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
        expect_death(&server, DIED, "the crowd");
    }
    expect_settled(&[&server], WATCH, "the crowd");
    wait_for("connections to go", || {
        server.stat("eps_created") == server.stat("eps_closed")
    });
}

/// The path of a peer with which memory is shared.
const SHARED: &str = "ucx:sysv";

fn little_shared_memory_and_other_process_namespaces(net: Net) {
    need_root();
    let none = "mount -t tmpfs -o size=4k,mode=000 none /dev/shm && exec \"$0\"";
    let few = "echo 3 >/proc/sys/kernel/shmmni && exec \"$0\"";
    let little = "echo 64 >/proc/sys/kernel/shmall && exec \"$0\"";
    let wrappers: [&[&str]; 7] = [
        &["unshare", "-m", "sh", "-c", none],
        &["unshare", "-i"],
        &["unshare", "-i", "sh", "-c", few],
        &["unshare", "-i", "sh", "-c", little],
        &["unshare", "-U"],
        &["unshare", "-p", "-f", "--kill-child", "--mount-proc"],
        &["unshare", "-i", "-p", "-f", "--kill-child"],
    ];
    let (a, _) = local(net, 0, None);
    let here = a.buffer(1 << 20, 2, true);
    for (n, wrapper) in wrappers.into_iter().enumerate() {
        let mut b = Agent::spawn(AGENT, wrapper);
        let url = b.start(config(net, n as u32 + 1, "127.0.0.1", 0, None));
        let there = b.buffer(1 << 20, 30 + n as u64, false);
        assert_eq!(a.read(&url, here, there, 1 << 20, None), 0, "{wrapper:?}");
        assert!(a.holds(here, 1 << 20, 30 + n as u64), "{wrapper:?}");
        a.expect_up("the other namespace");
        let paths = a.paths();
        // The size of /dev/shm alone does not matter.
        let shared = net == Net::Ucx && n == 0;
        assert_eq!(paths.contains(&SHARED.to_owned()), shared, "{wrapper:?}");
        b.kill();
        expect_death(&a, DIED, &format!("{wrapper:?}"));
    }
    expect_settled(&[&a], WATCH, "all killed");
}

/// More peers than find room within the kernel's limits, and somebody else who takes the rest.
fn shared_memory_that_runs_out_costs_speed_alone(net: Net) {
    need_root();
    let few = "echo 32 >/proc/sys/kernel/shmmni && exec \"$0\"";
    let a = Agent::spawn(AGENT, &["unshare", "-i", "sh", "-c", few]);
    let url_a = a.start(config(net, 0, "127.0.0.1", 0, None));
    let of_a = a.buffer(BULK, 1, false);
    let pid = a.pid().to_string();
    let beside: &[&str] = &["nsenter", "-t", &pid, "-i"];
    let full = "python3 -c 'import ctypes
while ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0: pass' && exec \"$0\"";
    let behind: Vec<&str> = [beside, &["sh", "-c", full]].concat();
    let mut peers = Vec::new();
    for n in 1..=12 {
        let b = Agent::spawn(AGENT, if n == 9 { &behind } else { beside });
        b.start(config(net, n, "127.0.0.1", 0, None));
        let here = b.buffer(1 << 20, u64::from(n), true);
        peers.push((b, here));
        // Those that were there first go on as well.
        for (n, (b, here)) in peers.iter().enumerate() {
            assert_eq!(b.read(&url_a, *here, of_a, 1 << 20, None), 0, "peer {n}");
            assert!(b.holds(*here, 1 << 20, 1), "peer {n}");
        }
        a.expect_up("a peer");
    }
    let paths = a.paths();
    let shared = paths.iter().filter(|path| *path == SHARED).count();
    let some = net == Net::Ucx;
    assert_eq!((shared > 0, shared < 9), (some, true), "{paths:?}");
    for (n, (b, _)) in peers.iter_mut().enumerate() {
        b.kill();
        expect_death(&a, DIED, &format!("peer {n}"));
    }
    expect_settled(&[&a], WATCH, "all killed");
}
