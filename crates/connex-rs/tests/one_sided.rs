//! One-sided transfers over the in-memory transport: keys are asked for once, used with their own life only (I4),
//! and given back before a region goes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use connex_rs::transport::memory::{Network, Ways};
use connex_rs::transport::{ConnIds, Transport};
use connex_rs::{Access, Config, Engine, ErrorKind, LogicalId, Range};

const WAIT: Option<Duration> = Some(Duration::from_secs(20));

struct Lab {
    network: Network,
}

impl Lab {
    fn new() -> Self {
        Self {
            network: Network::default(),
        }
    }

    fn engine(&self, stage: u32) -> (Engine, std::net::SocketAddr) {
        self.engine_with(stage, Ways::default())
    }

    fn engine_with(&self, stage: u32, ways: Ways) -> (Engine, std::net::SocketAddr) {
        let transport = self.network.endpoint_with(ConnIds::default(), ways);
        let at = transport.local_addr();
        let config = Config::new(LogicalId::new("one-sided", stage, 0, 0).expect("valid"));
        (
            Engine::start_over(config, Box::new(transport)).expect("start"),
            at,
        )
    }
}

fn buffer(engine: &Engine, len: usize) -> usize {
    engine.allocate_managed_buffer(len).expect("buffer")
}

/// A snapshot of memory that peers may write.
fn bytes(addr: usize, len: usize) -> Vec<u8> {
    // SAFETY: the buffers of these tests live as long as their engines.
    (0..len)
        .map(|i| unsafe { std::ptr::read_volatile((addr + i) as *const u8) })
        .collect()
}

fn fill(addr: usize, with: &[u8]) {
    // SAFETY: as above.
    unsafe { std::ptr::copy_nonoverlapping(with.as_ptr(), addr as *mut u8, with.len()) };
}

#[test]
fn large_ranges_are_cut_and_arrive() {
    let lab = Lab::new();
    let ((a, _), (b, _)) = (lab.engine(0), lab.engine(1));
    let len = (48 << 20) + 7;
    let (here, there, back) = (buffer(&a, len), buffer(&b, len), buffer(&a, len));
    let data: Vec<u8> = (0..len).map(|i| (i * 7 % 253) as u8).collect();
    fill(here, &data);
    // SAFETY: managed buffers outlive the calls.
    unsafe {
        a.write(b.local_url(), here, there as u64, len, WAIT)
            .expect("write");
        a.read(b.local_url(), back, there as u64, len, WAIT)
            .expect("read");
    }
    assert!(bytes(back, len) == data);
    let stats = a.stats();
    assert_eq!(
        (stats.rkey_fetches, stats.remote_rkeys),
        (1, 1),
        "one key for one region"
    );
    assert_eq!(stats.paths[0].mode, "one-sided");
}

#[test]
fn a_wrong_address_is_refused_and_the_link_stays() {
    let lab = Lab::new();
    let ((a, _), (b, _)) = (lab.engine(0), lab.engine(1));
    let (here, there) = (buffer(&a, 4096), buffer(&b, 4096));
    for (remote, len) in [(there as u64 + 1, 4096), (8, 8)] {
        // SAFETY: managed buffers outlive the calls.
        let error =
            unsafe { a.read(b.local_url(), here, remote, len, WAIT) }.expect_err("no region");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    // Of several it is named as the caller counts them, empty ones included.
    let ranges = [(there, 8), (there, 0), (8, 8)].map(|(remote, len)| Range {
        local: here,
        remote: remote as u64,
        len,
    });
    // SAFETY: as above.
    let chain = unsafe { a.put_chain(b.local_url(), &ranges, WAIT) }.expect("chain");
    let error = chain.wait(WAIT).expect("ends").expect_err("no region");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.text().contains("element 2: "), "{error}");
    // SAFETY: as above.
    unsafe {
        a.read(b.local_url(), here, there as u64, 4096, WAIT)
            .expect("the next one works")
    };
    assert_eq!(a.stats().eps_created, 1);
}

#[test]
fn a_region_that_goes_takes_its_keys_along() {
    let lab = Lab::new();
    let ((a, _), (b, _)) = (lab.engine(0), lab.engine(1));
    let here = buffer(&a, 4096);
    for round in 0..50u8 {
        let there = buffer(&b, 4096);
        fill(there, &[round; 4096]);
        // SAFETY: managed buffers outlive the calls.
        unsafe {
            a.read(b.local_url(), here, there as u64, 4096, WAIT)
                .expect("read")
        };
        assert_eq!(bytes(here, 4096), [round; 4096]);
        b.free_managed_buffer(there).expect("free");
        assert_eq!(
            a.stats().remote_rkeys,
            0,
            "the key was given back before the region went"
        );
        // SAFETY: as above.
        let error =
            unsafe { a.read(b.local_url(), here, there as u64, 4096, WAIT) }.expect_err("gone");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    assert_eq!(a.stats().invalidations, 50);
    assert_eq!(lab.network.dead_key_uses(), 0);
}

#[test]
fn keys_die_with_the_life_they_came_from() {
    let lab = Lab::new();
    let (a, _) = lab.engine(0);
    let here = buffer(&a, 64);
    for life in 0..20u8 {
        let (b, at) = lab.engine(1);
        let there = buffer(&b, 64);
        fill(there, &[life; 64]);
        // SAFETY: managed buffers outlive the calls.
        unsafe {
            a.read(b.local_url(), here, there as u64, 64, WAIT)
                .expect("read")
        };
        assert_eq!(bytes(here, 64), [life; 64]);
        lab.network.cut(at);
        let begun = std::time::Instant::now();
        while a.stats().live_peers > 0 {
            assert!(
                begun.elapsed() < Duration::from_secs(20),
                "the cut was not noticed"
            );
            std::thread::yield_now();
        }
        assert_eq!(a.stats().remote_rkeys, 0);
    }
    assert_eq!(lab.network.dead_key_uses(), 0);
    assert_eq!(a.stats().rkey_fetches, 20);
}

#[test]
fn a_chains_flag_and_a_signal_come_last() {
    let lab = Lab::new();
    let ((a, _), (b, _)) = (lab.engine(0), lab.engine(1));
    let (here, there) = (buffer(&a, 1 << 20), buffer(&b, 1 << 20));
    let flag = there + (1 << 20) - 8;
    for round in 1..200u64 {
        fill(here, &[round as u8; 1 << 16]);
        fill(here + (1 << 20) - 8, &round.to_ne_bytes());
        let ranges = [
            Range {
                local: here,
                remote: there as u64,
                len: 1 << 16,
            },
            Range {
                local: here + (1 << 20) - 8,
                remote: flag as u64,
                len: 8,
            },
        ];
        // SAFETY: managed buffers outlive the transfer.
        let transfer = unsafe { a.put_chain(b.local_url(), &ranges, WAIT) }.expect("chain");
        // SAFETY: aligned, inside a managed buffer.
        let seen = unsafe { AtomicU64::from_ptr(flag as *mut u64) };
        while seen.load(Ordering::Acquire) != round {
            std::hint::spin_loop();
        }
        assert_eq!(bytes(there + (1 << 16) - 1, 1), [round as u8]);
        transfer.wait(WAIT).expect("ended").expect("well");
    }
    // SAFETY: as above.
    let transfer = unsafe {
        a.put_signal(
            b.local_url(),
            here,
            there as u64,
            100,
            b"there".to_vec(),
            WAIT,
        )
    };
    assert_eq!(b.recv_msg(WAIT), Some((a.id().clone(), b"there".to_vec())));
    transfer
        .expect("signal")
        .wait(WAIT)
        .expect("ended")
        .expect("well");
}

/// Sends a chain of a piece of data and a flag, and polls the flag. Says whether the data was there when the flag was: the order
/// check of the tests below.
fn a_chain_is_seen_in_order(lab: &Lab, a: &Engine, b: &Engine) -> bool {
    let len = 1 << 16;
    let (here, there) = (buffer(a, len + 8), buffer(b, len + 8));
    fill(here, &[7; 1 << 16]);
    fill(here + len, &1u64.to_ne_bytes());
    let range = |at, len| Range {
        local: here + at,
        remote: (there + at) as u64,
        len,
    };
    // SAFETY: managed buffers outlive the transfer.
    let chain = unsafe { a.put_chain(b.local_url(), &[range(0, len), range(len, 8)], WAIT) };
    let chain = chain.expect("chain");
    // SAFETY: aligned, inside a managed buffer.
    let flag = unsafe { AtomicU64::from_ptr((there + len) as *mut u64) };
    let begun = std::time::Instant::now();
    while flag.load(Ordering::Acquire) != 1 {
        assert!(begun.elapsed() < Duration::from_secs(20), "no flag came");
        std::thread::yield_now();
    }
    let whole = bytes(there, len) == vec![7; len];
    lab.network.let_go();
    chain.wait(WAIT).expect("ended").expect("well");
    assert!(bytes(there, len) == vec![7; len], "done means in place");
    whole
}

/// Chains between engines whose puts travel so; how many fences were followed and how many waited.
fn fences(from: Ways, to: Ways) -> (bool, (u64, u64)) {
    let lab = Lab::new();
    let ((a, _), (b, _)) = (lab.engine_with(0, from), lab.engine_with(1, to));
    let ordered = a_chain_is_seen_in_order(&lab, &a, &b);
    (ordered, lab.network.fences())
}

#[test]
fn a_flag_follows_its_data_without_a_wait_where_one_lane_keeps_the_order() {
    assert_eq!(fences(Ways::One, Ways::One), (true, (1, 0)));
}

#[test]
fn a_flag_waits_for_its_data_where_lanes_do_not_order_each_other() {
    assert_eq!(fences(Ways::Many, Ways::Many), (true, (0, 1)));
    // Either side may be the one that cannot say so: the owner's devices may place what comes as they like.
    assert_eq!(fences(Ways::Many, Ways::One), (true, (0, 1)));
    assert_eq!(fences(Ways::One, Ways::Many), (true, (0, 1)));
}

#[test]
fn an_order_that_is_claimed_and_not_kept_is_caught() {
    let (ordered, fences) = fences(Ways::ManySaidToBeOne, Ways::ManySaidToBeOne);
    assert_eq!(fences, (1, 0));
    assert!(!ordered, "the check cannot see a flag before its data");
}

#[test]
fn a_signal_waits_for_its_data_whatever_orders_puts() {
    for ways in [Ways::None, Ways::One, Ways::Many, Ways::ManySaidToBeOne] {
        let lab = Lab::new();
        let ((a, _), (b, _)) = (lab.engine_with(0, ways), lab.engine_with(1, ways));
        let len = 9 << 20;
        let (here, there) = (buffer(&a, len), buffer(&b, len));
        for round in 1..3u8 {
            fill(here, &vec![round; len]);
            // SAFETY: managed buffers outlive the transfer.
            let put =
                unsafe { a.put_signal(b.local_url(), here, there as u64, len, vec![round], WAIT) };
            assert_eq!(b.recv_msg(WAIT), Some((a.id().clone(), vec![round])));
            assert!(bytes(there, len) == vec![round; len], "{ways:?}");
            put.expect("put").wait(WAIT).expect("ended").expect("well");
        }
        assert_eq!(lab.network.fences(), (0, 0), "nothing to fence: {ways:?}");
    }
}

#[test]
fn a_long_chain_keeps_its_order_and_its_bounds() {
    // More pieces than may be in flight, and ranges that are cut.
    for ways in [Ways::None, Ways::One, Ways::Many] {
        let lab = Lab::new();
        let ((a, _), (b, _)) = (lab.engine_with(0, ways), lab.engine_with(1, ways));
        let (len, flag) = (5 << 20, 8);
        let (here, there) = (buffer(&a, len * 5 + flag), buffer(&b, len * 5 + flag));
        fill(here, &vec![3; len * 5 + flag]);
        let mut ranges: Vec<Range> = (0..5)
            .map(|i| Range {
                local: here + i * len,
                remote: (there + i * len) as u64,
                len,
            })
            .collect();
        ranges.push(Range {
            local: here + 5 * len,
            remote: (there + 5 * len) as u64,
            len: flag,
        });
        // SAFETY: managed buffers outlive the transfer.
        let chain = unsafe { a.put_chain(b.local_url(), &ranges, WAIT) }.expect("chain");
        // SAFETY: aligned, inside a managed buffer.
        let seen = unsafe { AtomicU64::from_ptr((there + 5 * len) as *mut u64) };
        while seen.load(Ordering::Acquire) == 0 && !chain.done() {
            std::thread::yield_now();
        }
        assert!(bytes(there, 5 * len) == vec![3; 5 * len], "{ways:?}");
        chain.wait(WAIT).expect("ended").expect("well");
        let (followed, waited) = lab.network.fences();
        let expected = u64::from(ways != Ways::Many);
        assert_eq!((followed, waited), (expected, 1 - expected), "{ways:?}");
    }
}

/// Five writes of 8 bytes into every 64th byte, the second of them empty.
fn five(here: usize, there: usize) -> Vec<Range> {
    let range = |i: usize| Range {
        local: here,
        remote: (there + i * 64) as u64,
        len: if i == 1 { 0 } else { 8 },
    };
    (0..5).map(range).collect()
}

#[test]
fn behind_an_element_that_is_refused_nothing_is_written_and_the_error_names_it() {
    for ways in [Ways::None, Ways::One, Ways::Many] {
        let lab = Lab::new();
        let ((a, _), (b, _)) = (lab.engine_with(0, ways), lab.engine_with(1, ways));
        let (here, there) = (buffer(&a, 4096), buffer(&b, 4096));
        fill(here, &[9; 4096]);
        let mut ranges = five(here, there);
        ranges[2].remote = 8;
        // SAFETY: managed buffers outlive the transfer.
        let chain = unsafe { a.put_chain(b.local_url(), &ranges, WAIT) }.expect("chain");
        let error = chain.wait(WAIT).expect("ends").expect_err("no region");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{ways:?}: {error}");
        assert!(error.text().contains("element 2: "), "{ways:?}: {error}");
        assert_eq!(bytes(there, 8), [9; 8], "{ways:?}");
        assert_eq!(bytes(there + 64, 5 * 64), [0; 5 * 64], "{ways:?}");
        assert_eq!((a.stats().eps_created, lab.network.fences()), (1, (0, 0)));
    }
}

#[test]
fn behind_a_write_that_fails_on_its_way_comes_no_flag() {
    for ways in [Ways::None, Ways::One, Ways::Many] {
        let lab = Lab::new();
        let ((a, _), (b, _)) = (lab.engine_with(0, ways), lab.engine_with(1, ways));
        let (here, there) = (buffer(&a, 4096), buffer(&b, 4096));
        fill(here, &[9; 4096]);
        let ranges = five(here, there);
        lab.network.fail_puts_at(ranges[2].remote);
        // SAFETY: managed buffers outlive the transfer.
        let chain = unsafe { a.put_chain(b.local_url(), &ranges, WAIT) }.expect("chain");
        let error = chain.wait(WAIT).expect("ends").expect_err("a fault");
        // The device broke the connection.
        assert_eq!(error.kind(), ErrorKind::PeerFailed, "{ways:?}: {error}");
        let after = bytes(there, 4096);
        assert_eq!(after[4 * 64..5 * 64], [0; 64], "the flag: {ways:?}");
        if ways != Ways::Many {
            assert_eq!(after[..8], [9; 8], "{ways:?}");
            assert_eq!(after[64..], [0; 4096 - 64], "{ways:?}");
        }
        // What was reported is over (I2), and the next operation goes over another connection.
        // SAFETY: as above.
        unsafe { a.write(b.local_url(), here, there as u64 + 2048, 8, WAIT) }.expect("works");
        let mut expected = after;
        expected[2048..2056].fill(9);
        assert!(bytes(there, 4096) == expected, "{ways:?}");
        assert_eq!(lab.network.dead_key_uses(), 0);
    }
}

#[test]
fn a_signal_of_a_refused_write_holds_up_no_later_message() {
    let lab = Lab::new();
    let ((a, _), (b, _)) = (lab.engine(0), lab.engine(1));
    let (here, there) = (buffer(&a, 4096), buffer(&b, 4096));
    for (round, message) in [0, 1, 100_000].into_iter().enumerate() {
        // SAFETY: managed buffers outlive the transfer.
        let refused = unsafe { a.put_signal(b.local_url(), here, 8, 64, vec![1; message], WAIT) };
        let error = refused.expect("put").wait(WAIT).expect("ends");
        assert_eq!(error.expect_err("no region").kind(), ErrorKind::Invalid);
        let next = vec![round as u8; 10];
        // SAFETY: as above.
        let signal =
            unsafe { a.put_signal(b.local_url(), here, there as u64, 64, next.clone(), WAIT) };
        assert_eq!(b.recv_msg(WAIT), Some((a.id().clone(), next)));
        signal
            .expect("put")
            .wait(WAIT)
            .expect("ends")
            .expect("well");
    }
    assert_eq!(a.stats().eps_created, 1);
}

#[test]
fn a_region_with_limits_is_asked_for_and_its_limits_hold() {
    let lab = Lab::new();
    let ((a, _), (b, _)) = (lab.engine(0), lab.engine(1));
    let here = buffer(&a, 4096);
    for round in 1..20u8 {
        let (source, sink) = (vec![round; 4096], vec![0u8; 4096]);
        let (from, to) = (source.as_ptr() as usize, sink.as_ptr() as usize);
        // SAFETY: the memories live until they are unregistered below.
        unsafe {
            b.register_memory_for(from, 4096, Access::ReadOnly)
                .expect("register");
            b.register_memory_for(to, 4096, Access::WriteOnly)
                .expect("register");
        }
        // SAFETY: managed buffers outlive the calls.
        let write = |at: usize| unsafe { a.write(b.local_url(), here, at as u64, 4096, WAIT) };
        // SAFETY: as above.
        let read = |at: usize| unsafe { a.read(b.local_url(), here, at as u64, 4096, WAIT) };
        assert_eq!(
            write(from).expect_err("read-only").kind(),
            ErrorKind::Invalid
        );
        assert_eq!(read(to).expect_err("write-only").kind(), ErrorKind::Invalid);
        read(from).expect("allowed");
        assert_eq!(bytes(here, 4096), [round; 4096]);
        write(to).expect("allowed");
        assert_eq!(bytes(to, 4096), [round; 4096]);
        for at in [from, to] {
            b.unregister_memory(at).expect("unregister");
        }
        assert_eq!(a.stats().remote_rkeys, 0);
        assert_eq!(read(from).expect_err("gone").kind(), ErrorKind::Invalid);
    }
    assert_eq!(lab.network.dead_key_uses(), 0);
}
