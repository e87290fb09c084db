//! A relay between two engines that can be slow, stall, or break.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What the relay does now; shared with its threads.
#[derive(Default)]
struct State {
    /// Bytes a second in each direction; 0: no limit.
    rate: AtomicU64,
    stalled: AtomicBool,
    passed: AtomicU64,
    streams: Mutex<Vec<TcpStream>>,
    stop: AtomicBool,
}

/// A relay on loopback. Stops when dropped.
pub struct Relay {
    addr: SocketAddr,
    state: Arc<State>,
}

impl Relay {
    /// Relays whatever connects to `to`.
    ///
    /// # Panics
    /// If it cannot listen.
    pub fn new(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let addr = listener.local_addr().expect("bound");
        let state = Arc::new(State::default());
        std::thread::spawn({
            let state = state.clone();
            move || {
                for stream in listener.incoming().flatten() {
                    if state.stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let Ok(other) = TcpStream::connect(to) else {
                        continue;
                    };
                    for (from, into) in [(&stream, &other), (&other, &stream)] {
                        let (Ok(from), Ok(into)) = (from.try_clone(), into.try_clone()) else {
                            continue;
                        };
                        let state = state.clone();
                        std::thread::spawn(move || pass(&state, from, into));
                    }
                    let mut streams = state.streams.lock().unwrap_or_else(PoisonError::into_inner);
                    streams.extend([stream, other]);
                }
            }
        });
        Self { addr, state }
    }

    /// The URL of the engine behind it, by the relay's address.
    ///
    /// # Panics
    /// If `url` is none.
    pub fn url(&self, url: &str) -> String {
        let (_, id) = url.split_once('#').expect("a URL");
        format!("{}#{id}", self.addr)
    }

    /// Limits it to so many bytes a second each way.
    pub fn set_rate(&self, rate: u64) {
        self.state.rate.store(rate, Ordering::Relaxed);
    }

    /// Passes nothing on, and keeps the connections, until told otherwise.
    pub fn stall(&self, stalled: bool) {
        self.state.stalled.store(stalled, Ordering::Relaxed);
    }

    /// Bytes passed on so far.
    pub fn passed(&self) -> u64 {
        self.state.passed.load(Ordering::Relaxed)
    }

    /// Resets all connections, in both directions.
    pub fn reset(&self) {
        use std::os::fd::AsRawFd;
        let mut streams = self
            .state
            .streams
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for stream in streams.drain(..) {
            let linger = libc::linger {
                l_onoff: 1,
                l_linger: 0,
            };
            // SAFETY: the option takes a `linger`. Disconnecting with it sends a reset, also while others read the stream.
            unsafe {
                let size = size_of::<libc::linger>() as libc::socklen_t;
                let value = (&raw const linger).cast();
                libc::setsockopt(
                    stream.as_raw_fd(),
                    libc::SOL_SOCKET,
                    libc::SO_LINGER,
                    value,
                    size,
                );
                let nowhere = libc::sockaddr {
                    sa_family: libc::AF_UNSPEC as _,
                    sa_data: [0; 14],
                };
                let size = size_of::<libc::sockaddr>() as libc::socklen_t;
                libc::connect(stream.as_raw_fd(), &raw const nowhere, size);
            }
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Relaxed);
        self.state.stalled.store(false, Ordering::Relaxed);
        let _ = TcpStream::connect(self.addr);
    }
}

fn pass(state: &State, mut from: TcpStream, mut into: TcpStream) {
    let mut buffer = vec![0; 16 << 10];
    let mut next = Instant::now();
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        while state.stalled.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let rate = state.rate.load(Ordering::Relaxed);
        if let Some(time) = (n as u64 * 1_000_000_000).checked_div(rate) {
            next = next.max(Instant::now()) + Duration::from_nanos(time);
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        if into.write_all(&buffer[..n]).is_err() {
            break;
        }
        state.passed.fetch_add(n as u64, Ordering::Relaxed);
    }
    let _ = into.shutdown(Shutdown::Write);
}
