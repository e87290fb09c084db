//! Peers that come back, and peers that meet in the middle.

mod common;

use std::sync::Barrier;
use std::time::Duration;

use common::{
    LONG, Memory, Net, config, engine, event, expect_failed, expect_quiet, expect_up,
    open_descriptors, read, resident_kib, wait_for, write,
};
use connex_rs::{Engine, EventKind, Recipient};

on_every_transport!(
    disconnect_then_reconnect_without_a_pause,
    a_newcomer_takes_its_predecessors_place,
    a_message_that_waits_goes_to_the_newcomer,
    the_older_of_two_lives_is_refused,
    simultaneous_connects_make_one_link,
    crossing_first_reads_make_one_link,
    a_watcher_that_dials_crosses_the_first_read,
    many_rejoins_leave_everything_flat,
);

fn disconnect_then_reconnect_without_a_pause(net: Net) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    let there = Memory::patterned(4096, 3);
    there.register(&b);
    let here = Memory::new(4096);
    let rounds = if common::soak() { 2000 } else { 100 };
    for round in 0..rounds {
        // Each side hangs up in turn, each side dials in turn.
        let (first, second) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        let dialler = if round % 4 < 2 { &a } else { &b };
        let other = if round % 4 < 2 { &b } else { &a };
        dialler.connect(other.local_url()).expect("connect");
        assert_eq!(expect_up(dialler, other.id()), round > 0);
        assert_eq!(expect_up(other, dialler.id()), round > 0);
        assert_eq!(
            read(&a, b.local_url(), here.addr(), there.addr(), 4096, LONG),
            0
        );
        first.disconnect(second.id()).expect("disconnect");
        first.connect(second.local_url()).expect("connect");
        assert!(expect_up(first, second.id()), "round {round}");
        let failed = expect_failed(second, first.id());
        assert_eq!(
            (failed.reason.as_str(), failed.status),
            ("closed by peer", -2)
        );
        assert!(expect_up(second, first.id()));
        first.disconnect(second.id()).expect("disconnect");
        expect_failed(second, first.id());
    }
    expect_quiet(&a, Duration::from_millis(20));
    expect_quiet(&b, Duration::from_millis(20));
}

fn reborn(net: Net, stage: u32, port: u16) -> Engine {
    let mut config = config(net, stage);
    config.port = port;
    Engine::start(config).expect("the port is free at once")
}

fn a_newcomer_takes_its_predecessors_place(net: Net) {
    let a = engine(net, 0);
    let old = engine(net, 1);
    let (url, port) = (old.local_url().to_owned(), old.port());
    let here = Memory::new(8192);
    let large = Memory::patterned(8192, 1);
    large.register(&old);
    assert_eq!(read(&a, &url, here.addr(), large.addr(), 8192, LONG), 0);
    assert!(!expect_up(&a, old.id()));
    old.close();
    assert_eq!(expect_failed(&a, old.id()).reason, "closed by peer");
    // A smaller region at the same place.
    let new = reborn(net, 1, port);
    assert_eq!(new.local_url(), url);
    // SAFETY: the memory outlives the engine.
    unsafe { new.register_memory(large.addr(), 4096) }.expect("register");
    assert_eq!(read(&a, &url, here.addr(), large.addr(), 8192, LONG), -4);
    assert_eq!(read(&a, &url, here.addr(), large.addr(), 4096, LONG), 0);
    assert!(expect_up(&a, new.id()), "a rejoin");
    assert!(!expect_up(&new, a.id()), "new to the newcomer");
    assert_eq!(a.stats().rejoins, 1);
}

fn a_message_that_waits_goes_to_the_newcomer(net: Net) {
    let a = engine(net, 0);
    let old = engine(net, 1);
    let url = old.local_url().to_owned();
    a.connect(&url).expect("connect");
    expect_up(&a, old.id());
    // The window of the old one is filled; the next message and signal wait.
    let filled = loop {
        let sent = a.send_msg(
            Recipient::Url(&url),
            vec![1; 200_000],
            Some(Duration::from_millis(200)),
        );
        if let Err(error) = sent {
            break error;
        }
    };
    assert_eq!(filled.code(), -3, "{filled}");
    let message = a
        .send_msg_async(Recipient::Url(&url), vec![2; 200_000], None)
        .expect("posted");
    let there = Memory::new(64);
    // SAFETY: the memories outlive the transfer.
    let signal = unsafe {
        a.put_signal(
            &url,
            there.addr(),
            there.addr() as u64,
            8,
            vec![1; 200_000],
            None,
        )
    }
    .expect("posted");
    std::thread::sleep(Duration::from_millis(50));
    assert!(!signal.done());
    // A newer life of the same identity, elsewhere, knocks while the old one lives.
    let new = engine(net, 1);
    new.connect(a.local_url()).expect("connect");
    let failed = expect_failed(&a, new.id());
    assert_eq!(failed.status, -2);
    assert!(failed.reason.contains("replaced"), "{failed:?}");
    assert!(expect_up(&a, new.id()));
    expect_up(&new, a.id());
    if !message.done() {
        assert_eq!(message.wait(LONG), Some(Ok(())));
    }
    let error = signal
        .wait(LONG)
        .expect("ends")
        .expect_err("its address is dead");
    assert_eq!(error.code(), -2, "{error}");
    let (_, first) = new.recv_msg(LONG).expect("the message that waited");
    assert!(first == vec![2; 200_000]);
    expect_up(&old, a.id());
    let failed = expect_failed(&old, a.id());
    assert!(failed.reason.contains("superseded"), "{failed:?}");
}

fn the_older_of_two_lives_is_refused(net: Net) {
    let a = engine(net, 0);
    let old = engine(net, 1);
    old.connect(a.local_url()).expect("connect");
    expect_up(&a, old.id());
    expect_up(&old, a.id());
    let new = engine(net, 1);
    new.connect(a.local_url()).expect("connect");
    assert!(expect_failed(&a, old.id()).reason.contains("replaced"));
    assert!(expect_up(&a, new.id()));
    expect_up(&new, a.id());
    let failed = expect_failed(&old, a.id());
    assert_eq!((failed.status, failed.established), (-2, true));
    assert!(failed.reason.contains("superseded"), "{failed:?}");
    // It does not come back by itself, and is refused when it is told to.
    expect_quiet(&old, Duration::from_millis(500));
    old.connect(a.local_url()).expect("connect");
    let failed = expect_failed(&old, a.id());
    assert!(!failed.established);
    assert!(failed.reason.contains("superseded"), "{failed:?}");
    let byte = Memory::new(8);
    assert_eq!(read(&old, a.local_url(), byte.addr(), 4096, 8, LONG), -2);
    expect_quiet(&a, Duration::from_millis(100));
    expect_quiet(&new, Duration::from_millis(10));
    // Not even when the newer one is gone: it was replaced once.
    new.close();
    assert_eq!(expect_failed(&a, new.id()).reason, "closed by peer");
    old.connect(a.local_url()).expect("connect");
    let failed = expect_failed(&old, a.id());
    assert!(failed.reason.contains("superseded"), "{failed:?}");
    expect_quiet(&a, Duration::from_millis(100));
}

/// Both are up, with one link, without a failure; reads from both succeed.
fn check_one_link(a: &Engine, b: &Engine, memories: (&Memory, &Memory), what: &str) {
    let here = Memory::new(64);
    let (in_a, in_b) = memories;
    assert_eq!(
        read(a, b.local_url(), here.addr(), in_b.addr(), 64, LONG),
        0,
        "{what}"
    );
    assert_eq!(
        read(b, a.local_url(), here.addr(), in_a.addr(), 64, LONG),
        0,
        "{what}"
    );
    for (one, other) in [(a, b), (b, a)] {
        expect_up(one, other.id());
        if let Some(event) = one.wait_event(Some(Duration::from_millis(2))) {
            panic!("{what}: {event:?}");
        }
        assert_eq!(one.stats().live_peers, 1, "{what}");
    }
    wait_for("one connection to be left", || {
        [a, b].iter().all(|e| {
            let stats = e.stats();
            stats.eps_created - stats.eps_closed == 1
        })
    });
}

fn crossing(net: Net, rounds: u32, first: impl Fn(&Engine, &Engine, u32) + Sync) {
    let barrier = Barrier::new(2);
    for round in 0..rounds {
        let (a, b) = (engine(net, 0), engine(net, 1));
        let (in_a, in_b) = (Memory::patterned(64, 1), Memory::patterned(64, 2));
        in_a.register(&a);
        in_b.register(&b);
        std::thread::scope(|scope| {
            for (one, other, to, at) in [(&a, &b, in_b.addr(), 0), (&b, &a, in_a.addr(), 1)] {
                let (barrier, first) = (&barrier, &first);
                scope.spawn(move || {
                    barrier.wait();
                    // One side a little later, to meet in every phase of the handshake.
                    if round % 2 == at {
                        let until = std::time::Instant::now()
                            + Duration::from_micros(u64::from(round * 7 % 400));
                        while std::time::Instant::now() < until {
                            std::hint::spin_loop();
                        }
                    }
                    first(one, other, round);
                    let here = Memory::new(64);
                    assert_eq!(
                        read(one, other.local_url(), here.addr(), to, 64, LONG),
                        0,
                        "round {round}"
                    );
                });
            }
        });
        check_one_link(&a, &b, (&in_a, &in_b), &format!("round {round}"));
    }
}

fn rounds(net: Net) -> u32 {
    match net {
        _ if common::soak() => 5000,
        Net::Tcp => 200,
        // A connect takes a hundred times as long.
        Net::Ucx => 20,
    }
}

fn simultaneous_connects_make_one_link(net: Net) {
    crossing(net, rounds(net), |one, other, _| {
        one.connect(other.local_url()).expect("connect");
    });
}

fn crossing_first_reads_make_one_link(net: Net) {
    crossing(net, rounds(net), |_, _, _| {});
}

fn a_watcher_that_dials_crosses_the_first_read(net: Net) {
    crossing(net, rounds(net), |one, other, round| {
        if (one.id().stage() + round) % 2 == 0 {
            one.connect(other.local_url()).expect("connect");
        }
    });
}

fn many_rejoins_leave_everything_flat(net: Net) {
    let a = engine(net, 0);
    let (here, there) = (Memory::new(4096), Memory::patterned(4096, 5));
    let mut port = 0;
    let mut cycle = |n: u32| {
        let b = if port == 0 {
            engine(net, 1)
        } else {
            reborn(net, 1, port)
        };
        port = b.port();
        there.register(&b);
        let url = b.local_url().to_owned();
        assert_eq!(read(&a, &url, here.addr(), there.addr(), 4096, LONG), 0);
        assert_eq!(write(&a, &url, here.addr(), there.addr(), 4096, LONG), 0);
        assert_eq!(expect_up(&a, b.id()), n > 0);
        let id = b.id().clone();
        if n.is_multiple_of(2) {
            b.close();
        }
        drop(b);
        let failed = event(&a);
        assert!(
            matches!(failed.kind, EventKind::Failed { .. }),
            "{failed:?}"
        );
        assert_eq!(failed.peer, id);
    };
    for n in 0..20 {
        cycle(n);
    }
    let (descriptors, memory) = (open_descriptors(), resident_kib());
    let count = if common::soak() { 1000 } else { 100 };
    for n in 0..count {
        cycle(n + 20);
    }
    let stats = a.stats();
    assert_eq!(
        (stats.live_peers, stats.inflight, stats.remote_rkeys),
        (0, 0, 0)
    );
    wait_for("connections to go", || {
        let stats = a.stats();
        stats.eps_created == stats.eps_closed
    });
    assert!(
        open_descriptors() <= descriptors + 100,
        "tests beside take some"
    );
    let grown = resident_kib().saturating_sub(memory);
    assert!(grown < 100 << 10, "{grown} KiB more after {count} rejoins");
    assert_eq!(stats.rejoins, u64::from(count) + 19);
}
