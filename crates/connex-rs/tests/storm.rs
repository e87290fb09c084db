//! Many threads doing everything at once: nothing hangs, nothing is lost, nothing lands where it must not.

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use common::{Memory, Net, code, engine, read, wait_for, write};
use connex_rs::{Engine, Recipient};

on_every_transport!(sixteen_threads_do_everything, many_threads_share_one_link);

const SLOT: usize = 256 << 10;

fn time() -> Duration {
    Duration::from_secs(if common::soak() { 30 } else { 3 })
}

/// Draws numbers without a generator of its own state elsewhere.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

fn sixteen_threads_do_everything(net: Net) {
    let engines: Vec<RwLock<Engine>> = (0..3).map(|n| RwLock::new(engine(net, n))).collect();
    let memory: Vec<Memory> = (0..16).map(|_| Memory::new(SLOT)).collect();
    let canary = Memory::poisoned(1 << 20, 0x99);
    let until = Instant::now() + time();
    let counts: Vec<AtomicU64> = (0..6).map(|_| AtomicU64::new(0)).collect();
    let any = Some(Duration::from_secs(20));
    std::thread::scope(|scope| {
        for thread in 0..16usize {
            let (engines, memory, counts, canary) = (&engines, &memory, &counts, &canary);
            scope.spawn(move || {
                let mut dice = Dice(thread as u64 * 7919 + 17);
                let own = &memory[thread];
                let scratch = Memory::new(SLOT);
                while Instant::now() < until {
                    let (n, m) = (dice.roll(3) as usize, dice.roll(3) as usize);
                    let me = engines[n].read().expect("no thread panicked").clone();
                    let url = engines[m]
                        .read()
                        .expect("no thread panicked")
                        .local_url()
                        .to_owned();
                    let other = &memory[dice.roll(16) as usize];
                    let len = 1 + dice.roll(SLOT as u64 - 1) as usize;
                    let result = match dice.roll(20) {
                        0..6 if n != m => read(&me, &url, scratch.addr(), other.addr(), len, any),
                        6..10 if n != m => write(&me, &url, scratch.addr(), other.addr(), len, any),
                        10..12 => {
                            // SAFETY: the memory outlives all engines.
                            code(unsafe { me.register_memory(own.addr(), SLOT) })
                        }
                        12..14 => code(me.unregister_memory(own.addr())),
                        14 if n != m => {
                            code(me.send_msg(Recipient::Url(&url), vec![1; len / 8], any))
                        }
                        15 => {
                            while me.recv_msg(Some(Duration::ZERO)).is_some() {}
                            while me.wait_event(Some(Duration::ZERO)).is_some() {}
                            0
                        }
                        16 if n != m => {
                            // SAFETY: waited for.
                            let get = unsafe {
                                me.get(&url, scratch.addr(), other.addr() as u64, len, any)
                            };
                            get.map_or(-5, |get| code(get.wait(None).expect("ends")))
                        }
                        17 if n != m => {
                            assert_ne!(read(&me, &url, scratch.addr(), canary.addr(), 8, any), 0);
                            assert_ne!(
                                write(&me, &url, scratch.addr(), canary.addr(), len, any),
                                0
                            );
                            0
                        }
                        18 if dice.roll(30) == 0 => {
                            // Closed under everybody's feet and replaced.
                            let fresh = engine(net, n as u32);
                            let old = std::mem::replace(
                                &mut *engines[n].write().expect("no thread panicked"),
                                fresh,
                            );
                            old.close();
                            0
                        }
                        _ => code(me.connect(&url)),
                    };
                    counts[result.unsigned_abs() as usize].fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let counts: Vec<u64> = counts.iter().map(|c| c.load(Ordering::Relaxed)).collect();
    assert!(counts[0] > 100 && counts[4] > 0, "by code: {counts:?}");
    assert_eq!(counts[3], 0, "nothing is slow here: {counts:?}");
    assert!(canary.is_all(0, 1 << 20, 0x99), "memory outside regions");
    for engine in &engines {
        let engine = engine.read().expect("no thread panicked");
        engine.close();
        let stats = engine.stats();
        assert_eq!((stats.inflight, stats.live_peers), (0, 0));
        assert_eq!(stats.eps_created, stats.eps_closed);
    }
}

fn many_threads_share_one_link(net: Net) {
    let (a, b) = (engine(net, 0), engine(net, 1));
    let end = Arc::new(AtomicBool::new(false));
    let rounds = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..16u32 {
            let (a, b, end, rounds) = (&a, &b, &end, &rounds);
            scope.spawn(move || {
                let there = Memory::new(SLOT);
                there.register(b);
                let (from, back) = (Memory::new(SLOT), Memory::new(SLOT));
                let mut seed = thread * 1000;
                let any = Some(Duration::from_secs(60));
                while !end.load(Ordering::Relaxed) {
                    seed += 1;
                    let len = 1 + (seed as usize * 7919) % SLOT;
                    from.fill(0, len, seed);
                    assert_eq!(
                        write(a, b.local_url(), from.addr(), there.addr(), len, any),
                        0
                    );
                    assert_eq!(
                        read(a, b.local_url(), back.addr(), there.addr(), len, any),
                        0
                    );
                    assert!(
                        back.holds(0, len, seed),
                        "thread {thread} got another's bytes"
                    );
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
                b.unregister_memory(there.addr()).expect("unregister");
            });
        }
        std::thread::sleep(time());
        end.store(true, Ordering::Relaxed);
    });
    assert!(rounds.load(Ordering::Relaxed) > 16);
    wait_for("operations to be counted", || a.stats().inflight == 0);
    let stats = a.stats();
    assert_eq!((stats.eps_created, stats.rma_err), (1, 0));
}
