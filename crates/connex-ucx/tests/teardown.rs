//! A worker that goes while others connect to it. UCX takes their first bytes on a thread of its own, whenever they come.

mod common;

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::thread;

use common::{Side, context, library};
use connex_ucx::CloseMode;

/// With UCX's own order of things a process died in about one of 60 rounds.
const ROUNDS: usize = 150;

/// `CONNEX_SOAK=1` for more.
fn rounds() -> usize {
    let soak = std::env::var_os("CONNEX_SOAK").is_some_and(|v| v == "1");
    if soak { 100 * ROUNDS } else { ROUNDS }
}

#[test]
fn a_worker_goes_while_others_connect() {
    if library().version().minor < 16 {
        // It takes a descriptor of one worker for that of another whose number was the same, and aborts by an assertion:
        // docs/failure-model.md.
        return;
    }
    let port = AtomicU16::new(0);
    let end = AtomicBool::new(false);
    let target = || match port.load(Ordering::Acquire) {
        0 => None,
        port => Some(SocketAddr::from(([127, 0, 0, 1], port))),
    };
    thread::scope(|scope| {
        // Workers that dial, and go a little later.
        for _ in 0..2 {
            scope.spawn(|| {
                let context = context("tcp", false);
                while !end.load(Ordering::Acquire) {
                    let Some(to) = target() else {
                        thread::yield_now();
                        continue;
                    };
                    let mut side = Side::new(&context);
                    if let Ok(endpoint) = side.worker.connect(to, None) {
                        for _ in 0..20 {
                            side.step();
                            thread::yield_now();
                        }
                        let _ = endpoint.close(&mut side.worker, CloseMode::Force);
                    }
                }
            });
        }
        // Strangers that connect and say nothing, or nonsense, or go.
        scope.spawn(|| {
            let mut held = Vec::new();
            let mut n = 0_usize;
            while !end.load(Ordering::Acquire) {
                let stream = target().and_then(|to| TcpStream::connect(to).ok());
                let Some(mut stream) = stream else {
                    thread::yield_now();
                    continue;
                };
                n += 1;
                if n.is_multiple_of(3) {
                    // Less than a head, so that no version takes it for a request.
                    let _ = stream.write_all(&[0]);
                }
                if n.is_multiple_of(2) {
                    held.push(stream);
                }
                if held.len() > 8 {
                    held.clear();
                }
                thread::sleep(std::time::Duration::from_micros(300));
            }
        });
        let context = context("tcp", false);
        for round in 0..rounds() {
            let mut side = Side::new(&context);
            let listener = side
                .worker
                .listen(SocketAddr::from(([127, 0, 0, 1], 0)))
                .expect("a listener");
            port.store(listener.addr().port(), Ordering::Release);
            for _ in 0..round % 40 {
                side.step();
                thread::yield_now();
            }
            if round % 2 == 0 {
                // As the engine does: first no more connections, then the rest.
                drop(listener);
                side.step();
            }
            drop(side);
        }
        end.store(true, Ordering::Release);
    });
}
