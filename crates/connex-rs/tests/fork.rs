//! Forks: what a child can do that its parent's engines and their threads left behind. A process of its own, in which nothing but
//! these engines runs.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{LONG, Memory, Net, code, engine, id, link, read};
use connex_rs::channel::OwnedArray;
use connex_rs::{ChannelConfig, Engine, Recipient};

/// Threads that sleep in an engine: enough that the memory of each thread of a child was that of such a thread.
const SLEEPERS: usize = 40;

/// How long a child may take before it is ended: a deadlock shows as a death by this signal.
const CHILD_SECONDS: u32 = 30;

/// Forks, runs `body` in the child, and expects true of it.
fn in_child(what: &str, body: impl FnOnce() -> bool) {
    // SAFETY: the child runs `body` and ends by `_exit`. It allocates and starts threads, which glibc, unlike POSIX, allows.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        // SAFETY: has the child ended by a signal if it hangs.
        unsafe { libc::alarm(CHILD_SECONDS) };
        let right = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(false);
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(if right { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child, which ends in any case.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
        "{what}: the child ended with status {status:#x}"
    );
}

struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Runs `test` with threads asleep in both engines and others that keep them busy.
fn among_busy_threads(a: &Engine, b: &Engine, test: impl FnOnce()) {
    let there = Memory::patterned(1 << 20, 1);
    there.register(b);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for n in 0..SLEEPERS {
            scope.spawn(move || {
                if n % 2 == 0 {
                    while a.wait_event(None).is_some() {}
                } else {
                    while b.recv_msg(None).is_some() {}
                }
            });
        }
        for n in 0..4 {
            let (over, there) = (&over, &there);
            scope.spawn(move || {
                let here = Memory::new(1 << 20);
                while !over.load(Ordering::Relaxed) {
                    let result = match n {
                        0 => code(a.send_msg(Recipient::Id(b.id()), vec![7; 1000], LONG)),
                        _ => read(a, b.local_url(), here.addr(), there.addr(), 1 << 20, LONG),
                    };
                    assert!(result == 0 || over.load(Ordering::Relaxed), "{result}");
                }
            });
        }
        // Ends the threads, also when the test fails.
        let _end = OnDrop(|| {
            over.store(true, Ordering::Relaxed);
            a.close();
            b.close();
        });
        test();
    });
}

/// Two engines of a child, with sleepers of their own, that talk and close.
fn new_engines_work(net: Net) -> bool {
    let (mine, other) = (engine(net, 8), engine(net, 9));
    std::thread::scope(|scope| {
        for n in 0..SLEEPERS {
            let (mine, other) = (&mine, &other);
            scope.spawn(move || {
                if n % 2 == 0 {
                    while mine.wait_event(None).is_some() {}
                } else {
                    while other.wait_event(None).is_some() {}
                }
            });
        }
        let _end = OnDrop(|| {
            mine.close();
            other.close();
        });
        let soon = Some(Duration::from_secs(10));
        (0..100).all(|_| {
            let sent = mine.send_msg(Recipient::Url(other.local_url()), vec![1], soon);
            sent.is_ok() && other.recv_msg(soon) == Some((id(8), vec![1]))
        })
    })
}

#[test]
fn a_child_of_busy_threads_has_engines_of_its_own() {
    let (a, b) = (engine(Net::Tcp, 0), engine(Net::Tcp, 1));
    link(&a, &b);
    among_busy_threads(&a, &b, || {
        for round in 0..20 {
            let (a, b) = (a.clone(), b.clone());
            in_child("new engines", || {
                if round % 2 == 0 {
                    drop((a, b));
                }
                new_engines_work(Net::Tcp)
            });
        }
        assert_eq!(a.stats().failures + b.stats().failures, 0);
    });
}

#[test]
fn a_child_drops_what_it_inherited() {
    let (a, b) = (engine(Net::Tcp, 0), engine(Net::Tcp, 1));
    let config = ChannelConfig {
        slots: 4,
        slot_bytes: 4096,
    };
    let sender = a.channel(b.local_url(), "steps", config).expect("open");
    let receiver = b.accept_channel(None, LONG).expect("accept");
    let step = || vec![OwnedArray::of(vec![1_u8; 64], &[64]).expect("sound")];
    sender.send_owned(&step(), 0, LONG).expect("sent");
    let kept = receiver.recv(LONG).expect("no failure").expect("no end");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _close = OnDrop(|| sender.close());
            while !over.load(Ordering::Relaxed) {
                sender.send_owned(&step(), 1, LONG).expect("sent");
            }
        });
        scope.spawn(|| {
            for step in receiver.steps() {
                drop(step.expect("no failure"));
            }
        });
        let _end = OnDrop(|| over.store(true, Ordering::Relaxed));
        for _ in 0..200 {
            in_child("drops", || {
                // SAFETY: this process uses none of them again; the threads that do are not in it.
                unsafe {
                    drop(std::ptr::read(&raw const kept));
                    drop(std::ptr::read(&raw const receiver));
                    drop(std::ptr::read(&raw const sender));
                    drop(std::ptr::read(&raw const a));
                    drop(std::ptr::read(&raw const b));
                }
                true
            });
        }
    });
    assert_eq!(a.stats().failures + b.stats().failures, 0);
}

#[test]
fn a_childs_descriptors_outlive_a_transfer_that_it_inherited() {
    let (a, b) = (engine(Net::Tcp, 0), engine(Net::Tcp, 1));
    link(&a, &b);
    let (here, there) = (Memory::new(4096), Memory::patterned(4096, 1));
    there.register(&b);
    let read = || {
        // SAFETY: `here` lives until the transfer has ended.
        unsafe { a.get(b.local_url(), here.addr(), there.addr() as u64, 4096, LONG) }
    };
    let ended = read().expect("posted");
    ended.wait(LONG).expect("ended").expect("read");
    b.close();
    // The transfer is what is left of its engine.
    a.close();
    drop(a);
    in_child("descriptors", || {
        let files: Vec<_> = (0..64)
            .map(|_| std::fs::File::open("/dev/null").expect("a descriptor"))
            .collect();
        drop(ended);
        files.iter().all(|file| file.metadata().is_ok())
    });
}
