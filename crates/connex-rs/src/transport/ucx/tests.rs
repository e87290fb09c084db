//! The transport over a real UCX, on loopback.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::*;
use crate::transport::{Fence, Head, MAX_HEAD, Refuse, Source, Target};

/// Generous: the machine may be busy.
const LIMIT: Duration = Duration::from_secs(30);

/// What an engine would do, as far as the tests need it.
#[derive(Default)]
struct Log {
    accepted: Vec<ConnId>,
    connected: Vec<ConnId>,
    frames: Vec<(ConnId, Vec<u8>, Vec<u8>)>,
    placed: Vec<ConnId>,
    closed: HashMap<ConnId, Gone>,
    /// Where frames with the head `place` go.
    target: Option<(*mut u8, usize)>,
    head: Vec<u8>,
}

impl Upcalls for Log {
    fn accepted(&mut self, conn: ConnId, from: SocketAddr) {
        assert!(from.ip().is_loopback());
        self.accepted.push(conn);
    }

    fn connected(&mut self, conn: ConnId) {
        assert!(!self.closed.contains_key(&conn));
        self.connected.push(conn);
    }

    fn heard(&mut self, conn: ConnId) {
        assert!(
            !self.closed.contains_key(&conn),
            "nothing comes after the end"
        );
    }

    fn frame(&mut self, conn: ConnId, head: &[u8], body_len: usize) -> Result<Place, Refuse> {
        self.heard(conn);
        self.head = head.to_vec();
        match head {
            b"refuse" => Err(Refuse("as the test asked".to_owned())),
            b"panic" => panic!("as the test asked"),
            b"discard" => Ok(Place::Discard),
            b"place" => {
                let (ptr, len) = self.target.expect("a place");
                assert_eq!(len, body_len);
                Ok(Place::Memory(Target {
                    ptr,
                    len,
                    lease: Lease::unowned(),
                }))
            }
            _ => Ok(Place::Bytes),
        }
    }

    fn body(&mut self, conn: ConnId, received: Received) -> Result<(), Refuse> {
        match received {
            Received::Bytes(body) => self
                .frames
                .push((conn, std::mem::take(&mut self.head), body)),
            Received::Placed => self.placed.push(conn),
            Received::Discarded => {}
        }
        Ok(())
    }

    fn closed(&mut self, conn: ConnId, why: Gone) {
        assert!(self.closed.insert(conn, why).is_none(), "one end each");
    }
}

struct Side {
    ucx: Ucx,
    log: Log,
}

impl Side {
    fn new() -> Self {
        Self::with(false)
    }

    fn with(one_sided: bool) -> Self {
        let options = Options {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise: IpAddr::from([127, 0, 0, 1]),
            interface: Some("lo".into()),
        };
        let ucx = Ucx::listen_with(&options, ConnIds::default(), one_sided)
            .unwrap_or_else(|e| panic!("{e}"));
        Self {
            ucx,
            log: Log::default(),
        }
    }

    fn step(&mut self) -> usize {
        self.ucx.progress(&mut self.log)
    }

    fn send(&mut self, conn: ConnId, head: &[u8], body: Body) {
        self.ucx.send(
            conn,
            Frame {
                head: Head::new(head),
                body,
                class: Class::Bulk,
            },
        );
    }
}

fn until<T>(
    a: &mut Side,
    b: &mut Side,
    what: &str,
    mut done: impl FnMut(&mut Side, &mut Side) -> Option<T>,
) -> T {
    let limit = Instant::now() + LIMIT;
    loop {
        a.step();
        b.step();
        if let Some(result) = done(a, b) {
            return result;
        }
        assert!(
            Instant::now() < limit,
            "{what}: not within {LIMIT:?}; {:?} / {:?}",
            a.log.closed,
            b.log.closed
        );
        std::thread::yield_now();
    }
}

/// Two transports with a connection from the first to the second.
fn pair() -> (Side, ConnId, Side, ConnId) {
    connect(Side::new(), Side::new())
}

fn connect(mut a: Side, mut b: Side) -> (Side, ConnId, Side, ConnId) {
    let ab = a.ucx.dial(b.ucx.local_addr());
    until(&mut a, &mut b, "a connection", |a, b| {
        (a.log.connected == [ab] && b.log.accepted.len() == 1).then_some(())
    });
    let ba = b.log.accepted[0];
    (a, ab, b, ba)
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 ^ seed).collect()
}

#[test]
fn frames_arrive_whole_and_in_order_both_ways() {
    let (mut a, ab, mut b, ba) = pair();
    let piece = a.ucx.caps(ab).piece;
    assert!(piece >= 4096, "{:?}", a.ucx.caps(ab));
    assert!(
        a.ucx.caps(ab).path.starts_with("ucx"),
        "{:?}",
        a.ucx.caps(ab)
    );
    let sizes = [0, 1, 100, 4096, piece - 1, piece];
    for (i, &len) in sizes.iter().enumerate() {
        a.send(ab, &[i as u8; MAX_HEAD], Body::Bytes(pattern(len, i as u8)));
        b.send(ba, &[i as u8], Body::Bytes(pattern(len, !(i as u8))));
    }
    until(&mut a, &mut b, "all frames", |a, b| {
        (a.log.frames.len() == sizes.len() && b.log.frames.len() == sizes.len()).then_some(())
    });
    for (i, &len) in sizes.iter().enumerate() {
        assert_eq!(
            b.log.frames[i],
            (ba, vec![i as u8; MAX_HEAD], pattern(len, i as u8))
        );
        assert_eq!(
            a.log.frames[i],
            (ab, vec![i as u8], pattern(len, !(i as u8)))
        );
    }
}

/// As the settings ask for; versions without it are told apart there.
#[test]
fn peers_of_one_host_go_on_in_shared_memory_at_once() {
    let (mut a, ab, mut b, ba) = pair();
    // Sent before anything is settled, in both directions, and in one round with what settles it.
    until(&mut a, &mut b, "both at rest", |a, b| {
        (a.ucx.table.said.is_empty() && b.ucx.table.said.is_empty()).then_some(())
    });
    a.send(ab, b"there", Body::Empty);
    b.send(ba, b"back", Body::Empty);
    until(&mut a, &mut b, "a frame each", |a, b| {
        (a.log.frames.len() == 1 && b.log.frames.len() == 1).then_some(())
    });
    let shared = a.ucx.plan.shared_memory;
    for (conn, side) in [(ab, &a), (ba, &b)] {
        let path = side.ucx.caps(conn).path;
        assert_eq!(path == "ucx:sysv", shared, "{path}");
        let own = side.ucx.table.conns[&conn].nearby.is_some();
        assert_eq!(own, shared);
    }
    a.ucx.close(ab, Close::Flush);
    until(&mut a, &mut b, "both ends", |a, b| {
        (a.log.closed.contains_key(&ab) && b.log.closed.contains_key(&ba)).then_some(())
    });
    until(&mut a, &mut b, "the end of the workers", |a, b| {
        (a.ucx.workers.count() == 1 && b.ucx.workers.count() == 1).then_some(())
    });
}

/// What is said about shared memory is heard in its turn alone, and costs nobody else.
#[test]
fn what_is_said_out_of_turn_ends_its_connection() {
    for kind in [
        kind::GREETING,
        kind::JOIN,
        kind::JOINED,
        kind::HERE,
        kind::APART,
    ] {
        let (mut a, ab, mut b, ba) = pair();
        let second = a.ucx.dial(b.ucx.local_addr());
        until(&mut a, &mut b, "a second connection", |a, b| {
            (a.log.connected.len() == 2 && b.log.accepted.len() == 2).then_some(())
        });
        for dialed in [true, false] {
            let (from, id, to, of) = if dialed {
                (&mut a, ab, &mut b, ba)
            } else {
                let of = second;
                let id = b.log.accepted[1];
                (&mut b, id, &mut a, of)
            };
            from.ucx.post_bytes(id, kind, vec![1, 2, 3]);
            let why = until(from, to, "the end", |_, to| to.log.closed.get(&of).cloned());
            assert!(
                matches!(&why, Gone::Protocol { detail } if detail.contains("out of turn")),
                "{kind}: {why:?}"
            );
        }
    }
}

/// One side has no worker to spare for the other.
#[test]
fn sides_that_do_not_both_offer_shared_memory_use_tcp() {
    for dialer_keeps in [true, false] {
        let (mut a, mut b) = (Side::new(), Side::new());
        let keeps = if dialer_keeps { &mut a } else { &mut b };
        keeps.ucx.workers.keep_to_main();
        let (mut a, ab, mut b, ba) = connect(a, b);
        for (conn, side) in [(ab, &a), (ba, &b)] {
            let path = side.ucx.caps(conn).path;
            assert!(!path.contains("sysv"), "{dialer_keeps}: {path}");
        }
        let sizes = [0, 1, 4096, a.ucx.caps(ab).piece];
        for (i, &len) in sizes.iter().enumerate() {
            a.send(ab, &[i as u8], Body::Bytes(pattern(len, i as u8)));
            b.send(ba, &[i as u8], Body::Bytes(pattern(len, !(i as u8))));
        }
        until(&mut a, &mut b, "all frames", |a, b| {
            (a.log.frames.len() == sizes.len() && b.log.frames.len() == sizes.len()).then_some(())
        });
        for (i, &len) in sizes.iter().enumerate() {
            assert_eq!(b.log.frames[i].2, pattern(len, i as u8));
            assert_eq!(a.log.frames[i].2, pattern(len, !(i as u8)));
        }
    }
}

#[test]
fn what_is_sent_before_the_connection_stands_waits_for_it() {
    let (mut a, mut b) = (Side::new(), Side::new());
    let ab = a.ucx.dial(b.ucx.local_addr());
    a.send(ab, b"early", Body::Bytes(pattern(3000, 1)));
    until(&mut a, &mut b, "the frame", |_, b| {
        (b.log.frames.len() == 1).then_some(())
    });
    assert_eq!(b.log.frames[0].2, pattern(3000, 1));
}

#[test]
fn bodies_go_from_memory_to_memory_and_leases_end() {
    let (mut a, ab, mut b, ba) = pair();
    let piece = a.ucx.caps(ab).piece;
    let source = pattern(piece, 5);
    let mut place = vec![0u8; piece];
    b.log.target = Some((place.as_mut_ptr(), place.len()));
    let owner = std::sync::Arc::new(());
    const COUNT: usize = 50;
    let mut sent = 0;
    until(&mut a, &mut b, "all pieces", |a, b| {
        while sent < COUNT && a.ucx.room(ab, Class::Bulk) {
            let lease = Lease::of(owner.clone());
            let body = Body::Memory(Source {
                ptr: source.as_ptr(),
                len: source.len(),
                lease,
            });
            a.send(ab, b"place", body);
            sent += 1;
        }
        (b.log.placed.len() == COUNT).then_some(())
    });
    assert_eq!(place, source);
    assert!(b.log.placed.iter().all(|c| *c == ba));
    until(&mut a, &mut b, "the leases", |_, _| {
        (std::sync::Arc::strong_count(&owner) == 1).then_some(())
    });
}

#[test]
fn room_ends_when_the_peer_does_not_read_and_an_abort_frees_the_memory() {
    let (mut a, ab, mut b, ba) = pair();
    let source = pattern(a.ucx.caps(ab).piece, 5);
    let owner = std::sync::Arc::new(());
    let mut sent = 0;
    while a.ucx.room(ab, Class::Bulk) {
        let lease = Lease::of(owner.clone());
        a.send(
            ab,
            b"discard",
            Body::Memory(Source {
                ptr: source.as_ptr(),
                len: source.len(),
                lease,
            }),
        );
        sent += 1;
        a.step();
        assert!(sent < 10_000, "room never ends");
    }
    assert!(
        std::sync::Arc::strong_count(&owner) > 1,
        "something is under way"
    );
    assert!(a.ucx.room(ab, Class::Urgent));
    a.ucx.close(ab, Close::Abort);
    // The peer does nothing meanwhile.
    let limit = Instant::now() + LIMIT;
    while a.log.closed.is_empty() {
        a.step();
        assert!(Instant::now() < limit, "no end");
    }
    assert_eq!(a.log.closed[&ab], Gone::Local);
    assert_eq!(
        std::sync::Arc::strong_count(&owner),
        1,
        "nothing is used after the end was reported"
    );
    let why = until(&mut a, &mut b, "the peer's end", |_, b| {
        b.log.closed.get(&ba).cloned()
    });
    assert!(matches!(why, Gone::Reset { .. }), "{why:?}");
    // Sends and closes after the end do nothing.
    a.send(ab, b"late", Body::Empty);
    a.ucx.close(ab, Close::Abort);
    assert!(!a.ucx.room(ab, Class::Bulk));
    a.step();
}

#[test]
fn an_orderly_close_delivers_first_and_is_told_apart() {
    let (mut a, ab, mut b, ba) = pair();
    let piece = a.ucx.caps(ab).piece;
    for i in 0..20 {
        a.send(ab, &[i], Body::Bytes(pattern(piece, i)));
    }
    a.ucx.close(ab, Close::Flush);
    a.send(ab, b"late", Body::Empty);
    until(&mut a, &mut b, "both ends", |a, b| {
        (a.log.closed.contains_key(&ab) && b.log.closed.contains_key(&ba)).then_some(())
    });
    assert_eq!(
        b.log.frames.len(),
        20,
        "everything before the close, nothing after"
    );
    assert_eq!(
        (&a.log.closed[&ab], &b.log.closed[&ba]),
        (&Gone::Local, &Gone::EndOfStream)
    );
}

#[test]
fn an_orderly_close_with_a_frozen_peer_can_be_aborted() {
    let (mut a, ab, _b, _) = pair();
    a.send(ab, b"x", Body::Empty);
    a.ucx.close(ab, Close::Flush);
    for _ in 0..100 {
        a.step();
    }
    a.ucx.close(ab, Close::Abort);
    let limit = Instant::now() + LIMIT;
    while a.log.closed.is_empty() {
        a.step();
        assert!(Instant::now() < limit, "no end");
    }
    assert_eq!(a.log.closed[&ab], Gone::Local);
}

#[test]
fn a_dial_to_nobody_ends() {
    let (mut a, mut b) = (Side::new(), Side::new());
    let nobody = {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        socket.local_addr().expect("bound")
    };
    let conn = a.ucx.dial(nobody);
    let why = until(&mut a, &mut b, "the end", |a, _| {
        a.log.closed.get(&conn).cloned()
    });
    assert!(matches!(why, Gone::Unreachable { .. }), "{why:?}");
    // One that stopped listening refuses as well.
    let addr = b.ucx.local_addr();
    b.ucx.stop_listening();
    b.step();
    let conn = a.ucx.dial(addr);
    let why = until(&mut a, &mut b, "the end", |a, _| {
        a.log.closed.get(&conn).cloned()
    });
    assert!(matches!(why, Gone::Unreachable { .. }), "{why:?}");
    assert!(b.log.accepted.is_empty());
}

#[test]
fn a_refused_frame_and_a_panic_cost_their_connection_only() {
    let (mut a, first, mut b, _) = pair();
    let second = a.ucx.dial(b.ucx.local_addr());
    until(&mut a, &mut b, "a second connection", |_, b| {
        (b.log.accepted.len() == 2).then_some(())
    });
    let third = a.ucx.dial(b.ucx.local_addr());
    until(&mut a, &mut b, "a third connection", |a, b| {
        (b.log.accepted.len() == 3 && a.log.connected.len() == 3).then_some(())
    });
    let (b1, b2, b3) = (b.log.accepted[0], b.log.accepted[1], b.log.accepted[2]);
    a.send(first, b"refuse", Body::Empty);
    a.send(second, b"panic", Body::Empty);
    until(&mut a, &mut b, "the ends", |a, b| {
        (a.log.closed.len() == 2 && b.log.closed.len() == 2).then_some(())
    });
    assert_eq!(
        b.log.closed[&b1],
        Gone::Protocol {
            detail: "as the test asked".to_owned()
        }
    );
    assert!(
        matches!(&b.log.closed[&b2], Gone::Protocol { detail } if detail.contains("as the test asked"))
    );
    a.send(third, b"fine", Body::Empty);
    until(&mut a, &mut b, "a frame on the third", |_, b| {
        b.log.frames.iter().any(|f| f.0 == b3).then_some(())
    });
}

#[test]
fn an_engine_can_sleep_on_the_descriptor() {
    let (mut a, ab, mut b, _) = pair();
    let limit = Instant::now() + LIMIT;
    while !b.ucx.arm() {
        a.step();
        b.step();
        assert!(Instant::now() < limit, "never at rest");
    }
    assert!(!readable(b.ucx.fd(), 0));
    a.send(ab, b"wake", Body::Empty);
    assert!(readable(b.ucx.fd(), LIMIT.as_millis() as i32));
    until(&mut a, &mut b, "the frame", |_, b| {
        (b.log.frames.len() == 1).then_some(())
    });
}

fn readable(fd: RawFd, timeout_ms: i32) -> bool {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid record.
    unsafe { libc::poll(&mut poll, 1, timeout_ms) == 1 }
}

#[test]
fn sizes_are_read_as_ucx_reads_them() {
    assert_eq!(memory_units("256k"), Some(256 << 10));
    assert_eq!(memory_units("8KB"), Some(8 << 10));
    assert_eq!(memory_units("16384"), Some(16_384));
    assert_eq!(memory_units("1M"), Some(1 << 20));
    assert_eq!(memory_units("auto"), None);
}

/// One-sided access over UCX's emulation: the same calls as over hardware.
#[test]
fn keys_open_memory_and_fences_order_puts() {
    let (mut a, ab, mut b, ba) = one_sided_pair();
    let mut remote = pattern(1 << 20, 1);
    let key = b
        .one_sided()
        .register(remote.as_mut_ptr() as usize, remote.len())
        .expect("a key");
    b.send(ba, b"key", Body::Bytes(key));
    until(&mut a, &mut b, "the key", |a, _| {
        (a.log.frames.len() == 1).then_some(())
    });
    let key = a.log.frames[0].2.clone();
    let key = a.one_sided().unpack(ab, &key).expect("unpacked");
    assert!(a.one_sided().usable(ab));
    assert!(!a.one_sided().in_order(ab), "emulated puts have no order");

    let base = remote.as_ptr() as u64;
    let owner = std::sync::Arc::new(());
    let lease = || Lease::of(owner.clone());
    let mut into = vec![0u8; 300_000];
    a.one_sided().get(
        ab,
        key,
        base + 5,
        Target {
            ptr: into.as_mut_ptr(),
            len: into.len(),
            lease: lease(),
        },
        1,
    );
    reap(&mut a, &mut b, 1);
    assert_eq!(into, remote[5..300_005]);

    // A chain: large data, then a flag that must not be seen before it.
    let data = pattern(900_000, 77);
    let flag = [1u8];
    remote[1_000_000] = 0;
    a.one_sided().put(
        ab,
        key,
        base,
        Source {
            ptr: data.as_ptr(),
            len: data.len(),
            lease: lease(),
        },
        2,
    );
    a.one_sided().fence(ab, Fence::InPlace);
    a.one_sided().put(
        ab,
        key,
        base + 1_000_000,
        Source {
            ptr: flag.as_ptr(),
            len: 1,
            lease: lease(),
        },
        3,
    );
    reap(&mut a, &mut b, 2);
    assert_eq!(remote[..900_000], data[..], "done means in place");
    reap(&mut a, &mut b, 3);
    assert_eq!(remote[1_000_000], 1);
    assert_eq!(std::sync::Arc::strong_count(&owner), 1, "no lease is left");

    // Of a connection that ends, everything is reported, and only then the end.
    a.one_sided().put(
        ab,
        key,
        base,
        Source {
            ptr: data.as_ptr(),
            len: data.len(),
            lease: lease(),
        },
        4,
    );
    a.one_sided().fence(ab, Fence::Posted { since: 4 });
    a.one_sided().put(
        ab,
        key,
        base,
        Source {
            ptr: flag.as_ptr(),
            len: 1,
            lease: lease(),
        },
        5,
    );
    a.ucx.close(ab, Close::Abort);
    until(&mut a, &mut b, "the end", |a, _| {
        a.log.closed.contains_key(&ab).then_some(())
    });
    let mut done = Vec::new();
    a.one_sided().reap(&mut done);
    let mut tokens: Vec<u64> = done.iter().map(|d| d.token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, [4, 5]);
    assert_eq!(std::sync::Arc::strong_count(&owner), 1);
    a.one_sided().get(
        ab,
        key,
        base,
        Target {
            ptr: into.as_mut_ptr(),
            len: 1,
            lease: lease(),
        },
        6,
    );
    a.one_sided().reap(&mut done);
    assert!(
        done.pop()
            .is_some_and(|d| d.token == 6 && d.result.is_err()),
        "the key went with its connection"
    );
    b.one_sided().deregister(remote.as_ptr() as usize);
}

impl Side {
    fn one_sided(&mut self) -> &mut dyn OneSided {
        Transport::one_sided(&mut self.ucx).expect("enabled")
    }
}

fn reap(a: &mut Side, b: &mut Side, token: u64) {
    let mut done = Vec::new();
    until(a, b, "an end", |a, _| {
        a.one_sided().reap(&mut done);
        (!done.is_empty()).then_some(())
    });
    // Later ones are left for the next call.
    let first = done.remove(0);
    assert_eq!((first.token, first.result), (token, Ok(())));
    a.ucx.access.done.splice(0..0, done);
}

fn one_sided_pair() -> (Side, ConnId, Side, ConnId) {
    connect(Side::with(true), Side::with(true))
}

#[test]
fn a_dial_that_fails_over_rdma_names_the_devices_and_the_way_out() {
    let text = unreachable_by_rdma(Status::IO_ERROR, "mlx5_0:1");
    for part in ["input/output error", "resolved", "mlx5_0:1", "ip route get"] {
        assert!(text.contains(part), "{text}");
    }
    let text = unreachable_by_rdma(Status::UNREACHABLE, "mlx5_0:1");
    assert!(
        text.contains("nobody listens there over RDMA (mlx5_0:1)"),
        "{text}"
    );
    let other = unreachable_by_rdma(Status::NO_MEMORY, "mlx5_0:1");
    assert_eq!(other, Status::NO_MEMORY.to_string());
    let all = with_obstacles("out of memory".into(), &["one".into(), "two".into()]);
    assert_eq!(all, "out of memory; one; two");
}
