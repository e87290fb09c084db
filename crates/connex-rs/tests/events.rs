//! What the application hears of its peers: once, in order, in the right words, in a bounded queue.

mod common;

use std::net::TcpListener;
use std::time::{Duration, Instant};

use common::{
    LONG, Memory, Net, config, engine, event, expect_failed, expect_quiet, expect_up, failed_of,
    id, link, open_descriptors, read, resident_kib, test_ip, wait_for,
};
use connex_rs::{Engine, EventKind, Recipient};

on_every_transport!(
    a_link_is_announced_once_on_both_sides,
    the_callers_own_goodbye_is_no_event,
    a_connect_that_fails_says_so_once_per_call,
    operations_that_fail_to_connect_raise_no_event,
    a_wrong_identity_is_refused_with_both_named,
    a_secret_must_be_shared,
    a_black_hole_ends_in_time,
    connecting_to_a_dead_port_leaks_nothing,
    an_application_that_never_looks_costs_nothing,
    idle_links_with_heartbeats_stay_quiet,
    a_stranger_disturbs_nobody,
);

fn a_link_is_announced_once_on_both_sides(net: Net) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    for _ in 0..50 {
        a.connect(b.local_url()).expect("connect");
    }
    assert!(!expect_up(&a, b.id()));
    assert!(!expect_up(&b, a.id()));
    for _ in 0..50 {
        a.connect(b.local_url()).expect("connect");
        b.connect(a.local_url()).expect("connect");
        let byte = Memory::new(8);
        assert_eq!(read(&a, b.local_url(), byte.addr(), 4096, 8, LONG), -4);
    }
    expect_quiet(&a, Duration::from_millis(100));
    expect_quiet(&b, Duration::from_millis(100));
    for engine in [&a, &b] {
        let stats = engine.stats();
        assert_eq!((stats.eps_created, stats.live_peers), (1, 1));
        assert_eq!(stats.paths.len(), 1);
    }
    b.close();
    let failed = expect_failed(&a, b.id());
    assert_eq!(
        (failed.status, failed.reason.as_str(), failed.established),
        (-2, "closed by peer", true)
    );
    expect_quiet(&a, Duration::from_millis(100));
    assert_eq!((a.stats().failures, a.stats().live_peers), (1, 0));
}

fn the_callers_own_goodbye_is_no_event(net: Net) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    link(&a, &b);
    a.disconnect(b.id()).expect("disconnect");
    assert_eq!(expect_failed(&b, a.id()).reason, "closed by peer");
    a.disconnect(b.id()).expect("again is harmless");
    a.disconnect(&id(77)).expect("unknown is harmless");
    expect_quiet(&a, Duration::from_millis(100));
    expect_quiet(&b, Duration::from_millis(100));
}

fn dead_url() -> String {
    let listener = TcpListener::bind((test_ip(), 0)).expect("bind");
    let addr = listener.local_addr().expect("bound");
    format!("{addr}#test|9|0|0")
}

fn a_connect_that_fails_says_so_once_per_call(net: Net) {
    let a = engine(net, 0);
    let url = dead_url();
    for _ in 0..5 {
        a.connect(&url).expect("connect");
        let failed = expect_failed(&a, &id(9));
        assert_eq!(
            (failed.status, failed.established),
            (-2, false),
            "{failed:?}"
        );
        assert!(
            failed
                .reason
                .contains(url.split('#').next().expect("an address"))
        );
        assert!(!failed.detail.is_empty());
    }
    expect_quiet(&a, Duration::from_millis(100));
    assert_eq!(a.stats().failures, 0, "no established link was lost");
}

fn operations_that_fail_to_connect_raise_no_event(net: Net) {
    let a = engine(net, 0);
    let byte = Memory::new(8);
    let url = dead_url();
    for _ in 0..5 {
        assert_eq!(read(&a, &url, byte.addr(), 4096, 8, LONG), -2);
    }
    let error = a
        .send_msg(Recipient::Url(&url), Vec::new(), LONG)
        .expect_err("nobody there");
    assert_eq!(error.code(), -2, "{error}");
    expect_quiet(&a, Duration::from_millis(100));
    assert_eq!(a.stats().inflight, 0);
}

fn a_wrong_identity_is_refused_with_both_named(net: Net) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    let wrong = format!(
        "{}#test|8|0|0",
        b.local_url().split('#').next().expect("address")
    );
    let byte = Memory::new(8);
    // SAFETY: refused.
    let error =
        unsafe { a.read(&wrong, byte.addr(), 4096, 8, LONG) }.expect_err("somebody else listens");
    assert_eq!(error.code(), -2, "{error}");
    for name in ["test|8|0|0", "test|1|0|0"] {
        assert!(error.to_string().contains(name), "{error}");
    }
    a.connect(&wrong).expect("connect");
    let failed = expect_failed(&a, &id(8));
    assert_eq!((failed.status, failed.established), (-2, false));
    assert!(failed.reason.contains("test|8|0|0") && failed.reason.contains("test|1|0|0"));
    expect_quiet(&b, Duration::from_millis(50));
    // The right one is not disturbed.
    link(&a, &b);
}

fn a_secret_must_be_shared(net: Net) {
    let with = |stage, secret: Option<&[u8]>| {
        let mut config = config(net, stage);
        config.secret = secret.map(<[u8]>::to_vec);
        Engine::start(config).expect("start")
    };
    let (one, other) = (&b"a secret of 20 bytes"[..], &b"another of 20 bytes!"[..]);
    let b = with(1, Some(one));
    for (n, secret) in [None, Some(other)].into_iter().enumerate() {
        let a = with(10 + n as u32, secret);
        for (from, to) in [(&a, &b), (&b, &a)] {
            from.connect(to.local_url()).expect("connect");
            let failed = expect_failed(from, to.id());
            assert_eq!(
                (failed.status, failed.established),
                (-2, false),
                "{failed:?}"
            );
            assert!(
                failed.reason.contains("authentication") || failed.reason.contains("secret"),
                "{failed:?}"
            );
            expect_quiet(to, Duration::from_millis(50));
        }
        let byte = Memory::new(8);
        assert_eq!(read(&a, b.local_url(), byte.addr(), 4096, 8, LONG), -2);
    }
    let c = with(12, Some(one));
    link(&c, &b);
    let mut short = config(net, 3);
    short.secret = Some(vec![1; 15]);
    let error = Engine::start(short).expect_err("too short");
    assert!(error.code() == -4 && error.text().contains("15"), "{error}");
}

fn a_black_hole_ends_in_time(net: Net) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    link(&a, &b);
    // Its backlog accepts; nobody ever speaks.
    let mute = TcpListener::bind((test_ip(), 0)).expect("bind");
    let url = format!("{}#test|9|0|0", mute.local_addr().expect("bound"));
    let start = Instant::now();
    a.connect(&url).expect("connect");
    let failed = expect_failed(&a, &id(9));
    assert_eq!(
        (failed.status, failed.established),
        (-3, false),
        "{failed:?}"
    );
    assert!(
        start.elapsed() >= Duration::from_millis(2900),
        "{:?}",
        start.elapsed()
    );
    assert!(
        start.elapsed() < Duration::from_secs(8),
        "{:?}",
        start.elapsed()
    );
    expect_quiet(&b, Duration::from_millis(10));
}

fn a_stranger_disturbs_nobody(net: Net) {
    use std::io::{Read, Write};
    let (a, b) = (engine(net, 0), engine(net, 1));
    let there = Memory::patterned(4096, 3);
    there.register(&b);
    let here = Memory::new(4096);
    link(&a, &b);
    let to = b.local_url().split('#').next().expect("address").to_owned();
    let stranger = |says: &[u8]| {
        let mut stranger = std::net::TcpStream::connect(&to).expect("connect");
        let _ = stranger.write_all(says);
        stranger
            .set_read_timeout(Some(Duration::from_secs(20)))
            .expect("a timeout");
        stranger
    };
    let mut garbage = stranger(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n");
    let mut mute = stranger(b"");
    let start = Instant::now();
    let work = || {
        for _ in 0..100 {
            let code = read(&a, b.local_url(), here.addr(), there.addr(), 4096, LONG);
            assert_eq!(code, 0);
        }
    };
    work();
    match net {
        Net::Tcp => {
            // Garbage ends at once, silence after the handshake's time.
            assert!(matches!(garbage.read(&mut [0; 64]), Ok(0) | Err(_)));
            assert!(start.elapsed() < Duration::from_secs(10));
            assert!(matches!(mute.read(&mut [0; 64]), Ok(0)), "it is closed");
            assert!(
                start.elapsed() >= Duration::from_millis(2500),
                "{:?}",
                start.elapsed()
            );
            wait_for("both to be counted", || b.stats().strangers_refused >= 2);
        }
        Net::Ucx => {
            // They are UCX's to handle: it may never hang up, and does not tell the engine of them. Their first eight bytes are no
            // length that it would accept, as with every common protocol: a stranger whose are, and who does not go on as UCX
            // would, can abort any version of it, before the engine hears of it (docs/failure-model.md).
            let tls = [&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc][..], &[0xa5; 508]].concat();
            for says in [&tls[..], &[0xff; 16], &[0xa5; 4000], b"\x01"] {
                drop(stranger(says));
                let _stays = stranger(says);
                work();
            }
            let newcomer = engine(net, 2);
            link(&newcomer, &b);
            newcomer.close();
            expect_failed(&b, newcomer.id());
        }
    }
    expect_quiet(&a, Duration::from_millis(10));
    expect_quiet(&b, Duration::from_millis(10));
    work();
}

fn connecting_to_a_dead_port_leaks_nothing(net: Net) {
    let a = engine(net, 0);
    let url = dead_url();
    let rounds = |n: usize| {
        for _ in 0..n {
            a.connect(&url).expect("connect");
            failed_of(event(&a));
        }
    };
    rounds(300);
    let (descriptors, memory) = (open_descriptors(), resident_kib());
    let count = if common::soak() { 50_000 } else { 3000 };
    rounds(count);
    wait_for("connections to go", || {
        let stats = a.stats();
        stats.eps_created == stats.eps_closed
    });
    let grown = resident_kib().saturating_sub(memory);
    // Other tests of this binary run beside: a leak of a descriptor each would show all the same.
    assert!(open_descriptors() < descriptors + 500);
    assert!(grown < 64 << 10, "{grown} KiB more for {count} connects");
    assert_eq!(a.stats().inflight, 0);
}

fn an_application_that_never_looks_costs_nothing(net: Net) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    let rounds = if common::soak() { 6000 } else { 1500 };
    // b never looks: each round gives it three events.
    for round in 0..rounds {
        a.connect(b.local_url()).expect("connect");
        assert_eq!(expect_up(&a, b.id()), round > 0);
        a.disconnect(b.id()).expect("disconnect");
        wait_for("the goodbye", || {
            b.stats().live_peers == 0 && a.stats().live_peers == 0
        });
    }
    a.connect(b.local_url()).expect("connect");
    expect_up(&a, b.id());
    let mut events = Vec::new();
    wait_for("up", || b.stats().live_peers == 1);
    while let Some(event) = b.wait_event(Some(Duration::from_millis(50))) {
        events.push(event);
    }
    let total = 3 * rounds + 2;
    assert_eq!(events.len() as u64 + b.stats().dropped_events, total);
    assert!(events.len() <= connex_rs::event::CAPACITY);
    if total > connex_rs::event::CAPACITY as u64 {
        assert!(b.stats().dropped_events > 0);
    }
    let last = events.last().expect("events");
    assert_eq!(
        last.kind,
        EventKind::Up,
        "the newest state is never dropped"
    );
    assert!(events.is_sorted_by_key(|e| e.ts_ns));
}

fn idle_links_with_heartbeats_stay_quiet(net: Net) {
    let beating = |stage| {
        let mut config = config(net, stage);
        config.heartbeat = Some(Duration::from_millis(200));
        config.heartbeat_timeout = Some(Duration::from_secs(10));
        Engine::start(config).expect("start")
    };
    // One side beats, both do; one that does not answers all the same.
    let (a, b, c) = (beating(0), engine(net, 1), beating(2));
    link(&a, &b);
    link(&a, &c);
    let time = if common::soak() { 60 } else { 3 };
    expect_quiet(&a, Duration::from_secs(time));
    for engine in [&b, &c] {
        expect_quiet(engine, Duration::from_millis(10));
    }
    assert_eq!(a.stats().heartbeat_failures, 0);
}
