//! Where an engine receives obituaries: a datagram socket, and the tokens it has issued.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::{OnceLock, Weak};
use std::time::{Duration, Instant};

use super::program::{self, DATAGRAM, Notice};
use crate::core::Command;
use crate::fork::Private;
use crate::identity::Incarnation;
use crate::progress::Hub;
use crate::random;
use crate::sync::Mutex;
use crate::transport::ConnId;

/// Datagrams read at one wake-up.
const BURST: usize = 64;

/// So many datagrams that nobody was waiting for close the ears for the rest of a [`WINDOW`]: a flood costs this process
/// about one percent of a processor, and the flooder gains nothing but that an obituary comes late, or by the transport.
const UNKNOWN_PER_WINDOW: u32 = 64;

/// See [`UNKNOWN_PER_WINDOW`].
const WINDOW: Duration = Duration::from_millis(10);

/// The receiving end of one engine.
pub(crate) struct Post {
    // Before the socket: see `Private`.
    _private: Private,
    socket: UdpSocket,
    port: u16,
    hub: OnceLock<Weak<Hub>>,
    /// Live links by the first half of their token: random numbers that we drew.
    issued: Mutex<HashMap<u64, Issued>>,
    /// The last that was heard of live links.
    heard: Mutex<HashMap<ConnId, Notice>>,
    flood: Mutex<Flood>,
}

/// What an obituary for one link must say.
#[derive(Clone, Copy)]
struct Issued {
    conn: ConnId,
    life: Incarnation,
    token: [u8; 16],
}

struct Flood {
    since: Instant,
    unknown: u32,
}

/// What to do after a look at the socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// Wait for more.
    Listen,
    /// Do not look before this time.
    Deaf(Instant),
}

impl Post {
    /// Binds a datagram socket at `addr`: the port of the engine's listener if it is free, else any.
    pub(super) fn open(addr: IpAddr, port: u16) -> io::Result<Self> {
        let socket = UdpSocket::bind((addr, port)).or_else(|_| UdpSocket::bind((addr, 0)))?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            _private: Private::new(socket.as_raw_fd()),
            port: socket.local_addr()?.port(),
            socket,
            hub: OnceLock::new(),
            issued: Mutex::default(),
            heard: Mutex::default(),
            flood: Mutex::new(Flood {
                since: Instant::now(),
                unknown: 0,
            }),
        })
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    pub(super) fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    pub(super) fn attach(&self, hub: Weak<Hub>) {
        // Once per engine.
        let _ = self.hub.set(hub);
    }

    pub(super) fn expect(&self, conn: ConnId, life: Incarnation, token: [u8; 16]) {
        let issued = Issued { conn, life, token };
        self.issued.lock().insert(first_half(&token), issued);
    }

    pub(super) fn forget(&self, token: &[u8; 16]) {
        if let Some(issued) = self.issued.lock().remove(&first_half(token)) {
            self.heard.lock().remove(&issued.conn);
        }
    }

    /// What has been heard of a live link, also what nobody has read yet.
    pub(super) fn heard(&self, conn: ConnId) -> Option<Notice> {
        self.read(Instant::now());
        self.heard.lock().get(&conn).copied()
    }

    /// Reads what has come and has the engine act on it, on this thread if nobody drives the engine: another thread would have
    /// to be woken for it, perhaps on the very processor where the dead process's memory is being freed.
    pub(super) fn deliver(&self, now: Instant) -> Next {
        let next = self.read(now);
        if let Some(hub) = self.hub.get().and_then(Weak::upgrade) {
            hub.attend();
        }
        next
    }

    /// Reads what has come, not more than a burst of it, and leaves it to whoever drives the engine.
    fn read(&self, now: Instant) -> Next {
        let Some(hub) = self.hub.get().and_then(Weak::upgrade) else {
            return Next::Listen;
        };
        let counters = &hub.shared.counters;
        let mut flood = self.flood.lock();
        if now.duration_since(flood.since) >= WINDOW {
            *flood = Flood {
                since: now,
                unknown: 0,
            };
        }
        // One byte more than ours have, so that longer ones are told apart.
        let mut bytes = [0; DATAGRAM + 1];
        for _ in 0..BURST {
            let len = match self.socket.recv(&mut bytes) {
                Ok(len) => len,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                // An answer of the network to somebody else's packet: not ours to care about.
                Err(_) => continue,
            };
            match self.recognise(&bytes[..len]) {
                Some((conn, notice)) => {
                    self.heard.lock().insert(conn, notice);
                    hub.leave(Command::Obituary { conn, notice });
                }
                None => {
                    counters.obituaries_unknown.add_one();
                    flood.unknown += 1;
                }
            }
        }
        if flood.unknown >= UNKNOWN_PER_WINDOW {
            Next::Deaf(flood.since + WINDOW)
        } else {
            Next::Listen
        }
    }

    fn recognise(&self, bytes: &[u8]) -> Option<(ConnId, Notice)> {
        let (notice, life, token) = program::decode(bytes)?;
        let issued = *self.issued.lock().get(&first_half(&token))?;
        let same_life = life == (issued.life.start_ns, issued.life.random);
        (equal(&token, &issued.token) & same_life).then_some((issued.conn, notice))
    }
}

/// A fresh token: unguessable, and good for one link.
pub(super) fn draw() -> [u8; 16] {
    random::bytes()
}

fn first_half(token: &[u8; 16]) -> u64 {
    let mut half = [0; 8];
    half.copy_from_slice(&token[..8]);
    u64::from_le_bytes(half)
}

/// Compares in a time that does not tell where they differ.
fn equal(a: &[u8; 16], b: &[u8; 16]) -> bool {
    let differ = a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b));
    std::hint::black_box(differ) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_issued_token_with_its_life_is_recognised() {
        let post = Post::open([127, 0, 0, 1].into(), 0).expect("bind");
        let life = Incarnation {
            start_ns: 5,
            random: 6,
        };
        let (conn, token) = (ConnId(3), draw());
        post.expect(conn, life, token);
        let right = program::encode(Notice::Died, (5, 6), &token);
        assert_eq!(post.recognise(&right), Some((conn, Notice::Died)));
        for at in 0..DATAGRAM {
            let mut wrong = right;
            wrong[at] ^= 1;
            // The kind may change: whoever knows the token may say what it likes.
            let known = post.recognise(&wrong);
            assert!(known.is_none() || at == 5, "byte {at}: {known:?}");
        }
        assert_eq!(post.recognise(&right[..DATAGRAM - 1]), None);
        assert_eq!(post.recognise(&[right.as_slice(), &[0]].concat()), None);
        post.forget(&token);
        assert_eq!(
            post.recognise(&right),
            None,
            "a replay after the link's end"
        );
    }
}
