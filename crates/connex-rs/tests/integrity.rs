//! Every byte arrives, at every size, in both directions, and nowhere else.

mod common;

use common::{LONG, Memory, Net, code, engine, read, write};
use connex_rs::Range;

on_every_transport!(
    every_size_both_ways,
    sixty_four_mebibytes_both_ways,
    several_transfers_at_once_do_not_mix,
    many_ranges_as_one_operation,
    a_bad_range_of_many_is_named_and_costs_nothing_else,
    a_bad_range_is_counted_among_those_given,
    empty_transfers_end_well,
);

/// Canaries around a range.
const EDGE: usize = 4096 + 64;

fn both_ways(net: Net, sizes: &[usize], offsets: &[usize]) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    let most = sizes.iter().max().expect("sizes") + 2 * EDGE + 128;
    let (here, there) = (Memory::new(most), Memory::new(most));
    there.register(&b);
    let url = b.local_url();
    for (n, &len) in sizes.iter().enumerate() {
        for &offset in offsets {
            let at = EDGE + offset;
            let seed = (n * 131 + offset) as u32 + 1;
            // A write: into the middle of the region, nothing beside it.
            here.fill(offset, len, seed);
            there.poison(0, at + len + EDGE, 0xee);
            assert_eq!(
                write(&a, url, here.at(offset), there.at(at), len, LONG),
                0,
                "{len}"
            );
            assert!(
                there.holds(at, len, seed),
                "write of {len} bytes at +{offset}"
            );
            assert!(
                there.is_all(0, at, 0xee),
                "before a write of {len} at +{offset}"
            );
            assert!(there.is_all(at + len, EDGE, 0xee), "after a write of {len}");
            // A read: the same on this side.
            here.poison(0, at + len + EDGE, 0x11);
            assert_eq!(
                read(&a, url, here.at(at), there.at(at), len, LONG),
                0,
                "{len}"
            );
            assert!(
                here.holds(at, len, seed),
                "read of {len} bytes at +{offset}"
            );
            assert!(
                here.is_all(0, at, 0x11),
                "before a read of {len} at +{offset}"
            );
            assert!(here.is_all(at + len, EDGE, 0x11), "after a read of {len}");
        }
    }
    assert_eq!(a.stats().eps_created, 1);
    a.close();
    b.close();
}

fn every_size_both_ways(net: Net) {
    let sizes = [
        0,
        1,
        2,
        3,
        7,
        8,
        64,
        65,
        4095,
        4096,
        4097,
        32 << 10,
        (32 << 10) + 1,
        (256 << 10) - 1,
        256 << 10,
        (256 << 10) + 1,
        (1 << 20) + 7,
    ];
    both_ways(net, &sizes, &[0, 1, 16, 63]);
}

fn sixty_four_mebibytes_both_ways(net: Net) {
    both_ways(net, &[64 << 20], &[0, 3]);
}

fn several_transfers_at_once_do_not_mix(net: Net) {
    const EACH: usize = (3 << 20) + 5;
    const N: usize = 12;
    let (a, b) = (engine(net, 0), engine(net, 1));
    let there = Memory::new(EACH * N);
    let here = Memory::new(EACH * N);
    let back = Memory::new(EACH * N);
    there.register(&b);
    for i in 0..N {
        here.fill(i * EACH, EACH, i as u32 + 1);
    }
    let url = b.local_url();
    let put = |i: usize| {
        // SAFETY: both memories outlive the transfers, which are waited for.
        unsafe {
            a.put(
                url,
                here.at(i * EACH),
                there.at(i * EACH) as u64,
                EACH,
                LONG,
            )
        }
        .expect("put")
    };
    let puts: Vec<_> = (0..N).map(put).collect();
    for put in puts {
        assert_eq!(put.wait(LONG), Some(Ok(())));
    }
    let get = |i: usize| {
        // SAFETY: as above.
        unsafe {
            a.get(
                url,
                back.at(i * EACH),
                there.at(i * EACH) as u64,
                EACH,
                LONG,
            )
        }
        .expect("get")
    };
    // A small read in between overtakes and is not disturbed.
    let gets: Vec<_> = (0..N).map(get).collect();
    let small = Memory::new(64);
    assert_eq!(read(&a, url, small.addr(), there.at(EACH), 64, LONG), 0);
    assert!(small.holds(0, 64, 2));
    for get in gets {
        assert_eq!(get.wait(LONG), Some(Ok(())));
    }
    for i in 0..N {
        assert!(back.holds(i * EACH, EACH, i as u32 + 1), "transfer {i}");
    }
    let stats = a.stats();
    assert_eq!((stats.inflight, stats.rma_err), (0, 0));
    assert_eq!(stats.rma_ok, 2 * N as u64 + 1);
}

fn ranges(here: &Memory, there: &Memory, lens: &[usize]) -> Vec<Range> {
    let mut at = 0;
    lens.iter()
        .map(|&len| {
            let range = Range {
                local: here.at(at),
                remote: there.at(at) as u64,
                len,
            };
            at += len;
            range
        })
        .collect()
}

fn many_ranges_as_one_operation(net: Net) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    let mut lens = vec![1, 0, 4097, 64, 300_000, 8, 1 << 20, 3];
    lens.extend(std::iter::repeat_n(37, 20_000));
    let total: usize = lens.iter().sum();
    let (here, there, back) = (
        Memory::patterned(total, 9),
        Memory::new(total),
        Memory::new(total),
    );
    there.register(&b);
    // SAFETY: the memories outlive the transfers, which are waited for.
    let put = unsafe { a.put_many(b.local_url(), &ranges(&here, &there, &lens), LONG) };
    assert_eq!(put.expect("put").wait(LONG), Some(Ok(())));
    assert!(there.holds(0, total, 9));
    // SAFETY: as above.
    let get = unsafe { a.get_many(b.local_url(), &ranges(&back, &there, &lens), LONG) };
    assert_eq!(get.expect("get").wait(LONG), Some(Ok(())));
    assert!(back.holds(0, total, 9));
    // SAFETY: nothing is moved.
    let none = unsafe { a.get_many(b.local_url(), &[], LONG) };
    assert_eq!(none.expect("get").wait(LONG), Some(Ok(())));
    assert_eq!(a.stats().eps_created, 1);
}

fn a_bad_range_of_many_is_named_and_costs_nothing_else(net: Net) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    let lens = [64, 500_000, 64, 700_000, 64];
    let total: usize = lens.iter().sum();
    let there = Memory::patterned(total, 5);
    there.register(&b);
    let beside = Memory::poisoned(1 << 20, 0x77);
    for bad in 0..lens.len() {
        let here = Memory::poisoned(total, 0x33);
        let mut list = ranges(&here, &there, &lens);
        list[bad].remote = beside.addr() as u64;
        // SAFETY: the memories outlive the transfers, which are waited for.
        let transfer = unsafe { a.get_many(b.local_url(), &list, LONG) }.expect("get");
        let error = transfer
            .wait(LONG)
            .expect("ends")
            .expect_err("a bad element");
        assert_eq!(error.code(), -4, "{error}");
        assert!(error.text().contains(&format!("element {bad}")), "{error}");
        // I2: nothing comes after the error.
        here.poison(0, total, 0x33);
        assert_eq!(
            read(&a, b.local_url(), here.addr(), there.addr(), 8, LONG),
            0
        );
        assert!(
            here.is_all(8, total - 8, 0x33),
            "bytes came after the error"
        );

        let before = Memory::new(total);
        // SAFETY: as above.
        let transfer = unsafe {
            let mut list = ranges(&before, &there, &lens);
            list[bad].remote = beside.addr() as u64;
            a.put_many(b.local_url(), &list, LONG)
        }
        .expect("put");
        let error = transfer
            .wait(LONG)
            .expect("ends")
            .expect_err("a bad element");
        assert_eq!(error.code(), -4, "{error}");
        assert!(error.text().contains(&format!("element {bad}")), "{error}");
        assert!(
            beside.is_all(0, beside.len(), 0x77),
            "memory outside regions"
        );
        there.fill(0, total, 5);
    }
    assert_eq!(a.stats().eps_created, 1, "an invalid request costs no link");
    assert_eq!(b.stats().requests_refused, 2 * lens.len() as u64);
}

/// Empty ranges move nothing, but the caller counts them.
fn a_bad_range_is_counted_among_those_given(net: Net) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    let there = Memory::new(4096);
    there.register(&b);
    let (here, beside) = (Memory::new(4096), Memory::new(4096));
    let url = b.local_url();
    for lens in [&[0, 64, 0, 0, 64, 0, 64, 0][..], &[0, 0, 64]] {
        let sound = ranges(&here, &there, lens);
        for bad in (0..lens.len()).filter(|&i| lens[i] > 0) {
            // Refused by the peer, and refused here.
            for (local, remote) in [(here.addr(), beside.addr()), (0, there.addr())] {
                let mut list = sound.clone();
                list[bad] = Range {
                    local,
                    remote: remote as u64,
                    len: 64,
                };
                // SAFETY: the memories outlive the transfers, which are waited for; null is refused.
                let posted = unsafe {
                    [
                        a.get_many(url, &list, LONG),
                        a.put_many(url, &list, LONG),
                        a.put_chain(url, &list, LONG),
                    ]
                };
                for transfer in posted {
                    let ended = transfer.expect("posted").wait(LONG).expect("ends");
                    let error = ended.expect_err("a bad element");
                    assert_eq!(error.code(), -4, "{error}");
                    let named = format!("element {bad}: ");
                    assert!(error.text().contains(&named), "{named:?} {error}");
                }
            }
        }
    }
    assert_eq!(a.stats().eps_created, 1, "an invalid request costs no link");
}

fn empty_transfers_end_well(net: Net) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    let byte = Memory::new(1);
    assert_eq!(read(&a, b.local_url(), byte.addr(), 4096, 0, LONG), 0);
    assert_eq!(
        a.stats().live_peers,
        1,
        "0 bytes end well once the link is up"
    );
    assert_eq!(write(&a, b.local_url(), byte.addr(), 4096, 0, LONG), 0);
    assert_eq!(read(&a, b.local_url(), 0, 0, 0, LONG), 0);
    // SAFETY: nothing is moved.
    let signal = unsafe { a.put_signal(b.local_url(), byte.addr(), 4096, 0, b"s".to_vec(), LONG) };
    assert_eq!(code(signal.expect("put").wait(LONG).expect("ends")), 0);
    assert_eq!(b.recv_msg(LONG), Some((a.id().clone(), b"s".to_vec())));
}
