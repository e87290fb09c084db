//! Memory that is taken back while it is used.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{LONG, Memory, Net, code, engine, link, read};

on_every_transport!(
    a_region_taken_back_during_a_read_is_not_touched_after,
    a_region_taken_back_during_a_write_is_not_touched_after,
    the_local_region_of_a_transfer_may_be_taken_back,
    a_managed_buffer_freed_during_a_read_stays_until_it_ends,
    a_recycled_address_is_never_read_through_the_old_region,
);

const BULK: usize = 64 << 20;

fn a_region_taken_back_during_a_read_is_not_touched_after(net: Net) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    let here = Memory::new(BULK);
    for round in 0..8u64 {
        if a.stats().live_peers == 0 {
            a.connect(b.local_url()).expect("connect");
        }
        let there = Memory::patterned(BULK, 1);
        there.register(&b);
        // SAFETY: the memories outlive the transfer, which is waited for.
        let get = unsafe { a.get(b.local_url(), here.addr(), there.addr() as u64, BULK, LONG) }
            .expect("get");
        std::thread::sleep(Duration::from_micros(round * 1500));
        let start = Instant::now();
        b.unregister_memory(there.addr()).expect("unregister");
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "{:?}",
            start.elapsed()
        );
        // Unmapped: whoever still reads it crashes the process, or has the connection fail.
        drop(there);
        let result = get.wait(LONG).expect("ends");
        match code(result) {
            0 => assert!(here.holds(0, BULK, 1), "round {round}"),
            -4..=-2 => {}
            other => panic!("round {round}: {other}"),
        }
    }
}

fn a_region_taken_back_during_a_write_is_not_touched_after(net: Net) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    let here = Memory::patterned(BULK, 1);
    for round in 0..8u64 {
        if a.stats().live_peers == 0 {
            a.connect(b.local_url()).expect("connect");
        }
        let there = Memory::new(BULK);
        there.register(&b);
        // SAFETY: the memories outlive the transfer, which is waited for.
        let put = unsafe { a.put(b.local_url(), here.addr(), there.addr() as u64, BULK, LONG) }
            .expect("put");
        std::thread::sleep(Duration::from_micros(round * 1500));
        b.unregister_memory(there.addr()).expect("unregister");
        there.poison(0, BULK, 0xab);
        let result = put.wait(LONG).expect("ends");
        std::thread::sleep(Duration::from_millis(100));
        assert!(
            there.is_all(0, BULK, 0xab),
            "round {round}: written after unregister"
        );
        assert!(matches!(code(result), 0 | -4 | -2 | -3));
    }
}

fn the_local_region_of_a_transfer_may_be_taken_back(net: Net) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    link(&a, &b);
    let there = Memory::patterned(BULK, 1);
    there.register(&b);
    let here = Memory::new(BULK);
    here.register(&a);
    // SAFETY: the memories outlive the transfer, which is waited for.
    let get =
        unsafe { a.get(b.local_url(), here.addr(), there.addr() as u64, BULK, LONG) }.expect("get");
    a.unregister_memory(here.addr()).expect("unregister");
    here.poison(0, BULK, 0xab);
    let result = get.wait(LONG).expect("ends");
    std::thread::sleep(Duration::from_millis(100));
    assert!(here.is_all(0, BULK, 0xab), "written after unregister");
    assert!(matches!(code(result), 0 | -5));
}

fn a_managed_buffer_freed_during_a_read_stays_until_it_ends(net: Net) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    let here = Memory::new(BULK);
    for round in 0..6u64 {
        let there = b.allocate_managed_buffer(BULK).expect("buffer");
        // SAFETY: the destination outlives the transfer; the source is the engine's own to keep.
        let get =
            unsafe { a.get(b.local_url(), here.addr(), there as u64, BULK, LONG) }.expect("get");
        std::thread::sleep(Duration::from_micros(round * 1000));
        let start = Instant::now();
        b.free_managed_buffer(there).expect("free");
        assert!(
            start.elapsed() < Duration::from_secs(1),
            "free does not wait"
        );
        let code = code(get.wait(LONG).expect("ends"));
        assert!(matches!(code, 0 | -4), "round {round}: {code}");
    }
    assert_eq!(b.stats().regions, 0);
}

fn a_recycled_address_is_never_read_through_the_old_region(net: Net) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    link(&a, &b);
    let slot = Memory::new(8192);
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let here = Memory::new(8192);
            let (mut good, mut refused) = (0, 0);
            while !end.load(Ordering::Relaxed) {
                match read(&a, b.local_url(), here.addr(), slot.addr(), 8192, LONG) {
                    // Whole, and of one life of the region.
                    0 => {
                        let mut first = [0];
                        here.copy_out(0, &mut first);
                        assert_ne!(first[0], 0xdd, "read while it was not registered");
                        assert!(here.is_all(0, 8192, first[0]), "two lives in one read");
                        good += 1;
                    }
                    -4 => refused += 1,
                    other => panic!("{other}"),
                }
            }
            (good, refused)
        });
        let start = Instant::now();
        let mut life = 0;
        while start.elapsed() < Duration::from_secs(2) {
            slot.poison(0, 8192, life % 0xd0);
            life = life.wrapping_add(1);
            slot.register(&b);
            std::thread::sleep(Duration::from_micros(400));
            b.unregister_memory(slot.addr()).expect("unregister");
            slot.poison(0, 8192, 0xdd);
        }
        end.store(true, Ordering::Relaxed);
        let (good, refused) = reader.join().expect("the reader");
        assert!(good > 0 && refused > 0, "{good} read, {refused} refused");
    });
    assert_eq!(a.stats().eps_created, 1);
}
