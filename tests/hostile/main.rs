//! Hostile peers on the TCP transport: raw sockets that speak the protocol's letters and break its rules. Meanwhile the
//! engine serves its real peer, keeps its memory, and stays small.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use connex_rs::identity::Incarnation;
use connex_rs::wire::{self, GoodbyeCode, Greet, Greeting, Message, MsgPiece, Piece, RefusalCode};
use connex_rs::{Config, Engine, LogicalId, TransportChoice};

const LEN: usize = 64 << 10;

fn id(stage: u32) -> LogicalId {
    LogicalId::new("hostile", stage, 0, 0).expect("valid")
}

fn engine(stage: u32, secret: Option<&[u8]>) -> Engine {
    let mut config = Config::new(id(stage));
    config.listen_ip = "127.0.0.1".into();
    config.transport = TransportChoice::Tcp;
    config.secret = secret.map(<[u8]>::to_vec);
    Engine::start(config).expect("start")
}

/// A buffer that lives as long as the process.
fn buffer(byte: u8, len: usize) -> usize {
    vec![byte; len].leak().as_mut_ptr() as usize
}

fn is_all(addr: usize, len: usize, byte: u8) -> bool {
    let mut seen = vec![0; len];
    // SAFETY: a leaked buffer of that length.
    unsafe { std::ptr::copy_nonoverlapping(addr as *const u8, seen.as_mut_ptr(), len) };
    seen.iter().all(|&b| b == byte)
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc");
    let line = status.lines().find(|l| l.starts_with("VmRSS:"));
    let number = line.and_then(|l| l.split_whitespace().nth(1));
    number.and_then(|n| n.parse().ok()).expect("VmRSS")
}

/// One raw connection.
struct Raw(TcpStream);

impl Raw {
    fn to(engine: &Engine) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", engine.port())).expect("connect");
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .expect("a timeout");
        stream
            .set_write_timeout(Some(Duration::from_secs(20)))
            .expect("a timeout");
        Self(stream)
    }

    fn frame(message: &Message, body: &[u8]) -> Vec<u8> {
        let head = wire::encode(message);
        let head = head.as_slice();
        let mut bytes = vec![0xc7, 0x5d, head.len() as u8, 0];
        bytes.extend((body.len() as u32).to_le_bytes());
        bytes.extend(head);
        bytes.extend(body);
        bytes
    }

    /// Sends a frame; a connection that was closed meanwhile is what many of these tests are about.
    fn send(&mut self, message: &Message, body: &[u8]) {
        let _ = self.0.write_all(&Self::frame(message, body));
    }

    /// The next frame: its message and body; `None` at the end.
    fn next(&mut self) -> Option<(Message, Vec<u8>)> {
        let mut prefix = [0; 8];
        self.0.read_exact(&mut prefix).ok()?;
        let mut head = vec![0; usize::from(prefix[2])];
        self.0.read_exact(&mut head).ok()?;
        let len = u32::from_le_bytes(prefix[4..].try_into().expect("four bytes"));
        let mut body = vec![0; len as usize];
        self.0.read_exact(&mut body).ok()?;
        Some((wire::decode(&head).expect("the engine's own frames"), body))
    }

    fn hello(stage: u32, wanted: &Engine, link: u64) -> (Message, Vec<u8>) {
        let greet = Greet {
            link,
            attempt: 1,
            incarnation: Incarnation {
                start_ns: 5,
                random: link,
            },
            nonce: [7; 16],
            lost: None,
            closed: false,
        };
        let greeting = Greeting {
            id: Some(id(stage)),
            wanted: Some(wanted.id().clone()),
            url: format!("127.0.0.1:9#{}", id(stage)),
            window: u64::MAX,
            ..Greeting::default()
        };
        (Message::Hello(greet), greeting.encode())
    }

    /// A link that has come up: what an insider could do.
    fn linked(engine: &Engine, stage: u32) -> Self {
        let mut raw = Self::to(engine);
        let link = u64::from(stage) * 1000 + 1;
        let (hello, body) = Self::hello(stage, engine, link);
        raw.send(&hello, &body);
        let (welcome, _) = raw.next().expect("a welcome");
        assert!(matches!(welcome, Message::Welcome(_)), "{welcome:?}");
        raw.send(&Message::Confirm { link }, &[]);
        raw
    }

    /// Expects that the engine closes the connection; what it says before does not matter.
    fn expect_closed(&mut self, what: &str) {
        let start = Instant::now();
        let mut bytes = [0; 4096];
        loop {
            match self.0.read(&mut bytes) {
                Ok(0) => return,
                Ok(_) => {}
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return,
                Err(e) => panic!("{what}: the connection was not closed: {e}"),
            }
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "{what}: not closed"
            );
        }
    }
}

/// Runs `attack` on an engine while its real peer reads and writes; neither may notice.
#[expect(clippy::print_stdout, reason = "the figures are for a soak's reader")]
fn besieged(secret: Option<&[u8]>, attack: impl FnOnce(&Engine, usize)) {
    let (victim, friend) = (engine(0, secret), engine(1, secret));
    let outside = buffer(0xcc, LEN);
    let region = buffer(0x11, LEN);
    // SAFETY: leaked.
    unsafe { victim.register_memory(region, LEN) }.expect("register");
    let end = AtomicBool::new(false);
    let before = resident_kib();
    std::thread::scope(|scope| {
        let served = scope.spawn(|| {
            let here = buffer(0, LEN);
            let mut small = Vec::new();
            let any = Some(Duration::from_secs(20));
            while !end.load(Ordering::Relaxed) || small.is_empty() {
                // SAFETY: leaked memory on both sides.
                unsafe {
                    let url = victim.local_url();
                    friend
                        .read(url, here, region as u64, LEN, any)
                        .expect("a read");
                    friend
                        .write(url, here, region as u64, LEN, any)
                        .expect("a write");
                    let start = Instant::now();
                    friend
                        .read(url, here, region as u64, 4096, any)
                        .expect("a small read");
                    small.push(start.elapsed());
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            small
        });
        let attack = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            attack(&victim, region);
        }));
        end.store(true, Ordering::Relaxed);
        let mut small = served.join().expect("the friend was served");
        small.sort_unstable();
        println!(
            "{} reads of 4 KB by the real peer meanwhile: median {:?}, longest {:?}",
            small.len(),
            small[small.len() / 2],
            small[small.len() - 1]
        );
        if let Err(panic) = attack {
            std::panic::resume_unwind(panic);
        }
    });
    assert_eq!(friend.stats().eps_created, 1, "the friend's link was lost");
    assert!(
        is_all(outside, LEN, 0xcc),
        "memory outside regions was written"
    );
    assert!(
        is_all(region, LEN, 0x11),
        "the region was written by a stranger"
    );
    let grown = resident_kib().saturating_sub(before);
    assert!(grown < 200 << 10, "{grown} KiB more");
    // The engine still accepts the honest.
    let late = engine(2, secret);
    late.connect(victim.local_url()).expect("connect");
    let event = late
        .wait_event(Some(Duration::from_secs(20)))
        .expect("an event");
    assert_eq!(event.kind.name(), "joined", "{event:?}");
}

fn write(addr: u64, len: u64, offset: u64) -> Message {
    Message::Write(Piece {
        req: 1,
        elem: 0,
        last: true,
        flag: false,
        addr,
        len,
        offset,
    })
}

#[test]
fn frames_that_break_the_rules_end_their_connection_only() {
    besieged(None, |victim, region| {
        let at = region as u64;
        let data = |req, elem, offset| Message::Data { req, elem, offset };
        let msg = |seq, total, offset, signals| {
            Message::Msg(MsgPiece {
                seq,
                total,
                offset,
                signals,
            })
        };
        let bad: Vec<(&str, Message, Vec<u8>)> = vec![
            ("an answer nobody asked for", data(1, 0, 0), vec![9; 64]),
            (
                "a wild answer",
                data(u64::MAX, u32::MAX, u64::MAX),
                vec![9; 64],
            ),
            ("a piece beyond its element", write(at, 8, 8), vec![9; 8]),
            ("a wrapping offset", write(at, 64, u64::MAX - 3), vec![9; 8]),
            ("an empty piece", write(at, 64, 0), Vec::new()),
            (
                "an end nobody waits for",
                Message::Done {
                    req: 1,
                    code: 0,
                    elem: 0,
                },
                Vec::new(),
            ),
            (
                "a message of 2^64 bytes",
                msg(0, u64::MAX, 0, None),
                vec![9; 8],
            ),
            (
                "a message beyond the limit",
                msg(0, (64 << 20) + 1, 0, None),
                vec![9; 8],
            ),
            (
                "a message that starts in the middle",
                msg(0, 100, 50, None),
                vec![9; 8],
            ),
            (
                "a piece longer than its message",
                msg(0, 4, 0, None),
                vec![9; 8],
            ),
            (
                "an empty piece of a message",
                msg(0, 4, 0, None),
                Vec::new(),
            ),
            (
                "a body where none belongs",
                Message::Ping { stamp: 1 },
                vec![9; 8],
            ),
            ("a second confirm", Message::Confirm { link: 1 }, Vec::new()),
            (
                "a second hello",
                Raw::hello(50, victim, 9).0,
                Raw::hello(50, victim, 9).1,
            ),
            (
                "a long text",
                Message::Goodbye {
                    why: GoodbyeCode::Closed,
                    by: Incarnation {
                        start_ns: 0,
                        random: 0,
                    },
                },
                vec![9; 5000],
            ),
        ];
        for (n, (what, message, body)) in bad.into_iter().enumerate() {
            let mut raw = Raw::linked(victim, 100 + n as u32);
            raw.send(&message, &body);
            raw.expect_closed(what);
        }
        // Heads and prefixes that are none.
        for (n, bytes) in [
            vec![0xc7, 0x5d, 0, 0, 0, 0, 0, 0],
            vec![0xc7, 0x5d, 65, 0, 0, 0, 0, 0],
            vec![0xc7, 0x5d, 8, 0, 0xff, 0xff, 0xff, 0xff],
            vec![0xc7, 0x5d, 1, 0, 0, 0, 0, 0, 99],
            vec![0xc7, 0x5d, 1, 0, 0, 0, 0, 0, 10],
            vec![0; 4096],
            (0..=255).collect(),
        ]
        .into_iter()
        .enumerate()
        {
            let mut raw = Raw::linked(victim, 200 + n as u32);
            let _ = raw.0.write_all(&bytes);
            raw.expect_closed("garbage on a link");
            let mut raw = Raw::to(victim);
            let _ = raw.0.write_all(&bytes);
            raw.expect_closed("garbage of a stranger");
        }
    });
}

#[test]
fn the_request_of_another_cannot_be_answered() {
    besieged(None, |victim, _| {
        let (mut honest, mut liar) = (Raw::linked(victim, 20), Raw::linked(victim, 21));
        let here = buffer(0xaa, 64);
        // SAFETY: leaked.
        let transfer = unsafe {
            let url = format!("127.0.0.1:9#{}", id(20));
            victim.get(&url, here, 0x1000, 64, Some(Duration::from_secs(20)))
        }
        .expect("a get");
        let (req, elem) = loop {
            match honest.next().expect("the request").0 {
                Message::Read { req, elem, .. } => break (req, elem),
                Message::Ping { .. } => {}
                other => panic!("{other:?}"),
            }
        };
        let answer = Message::Data {
            req,
            elem,
            offset: 0,
        };
        liar.send(&answer, &[0xbb; 64]);
        liar.expect_closed("an answer to the request of another");
        let done = Message::Done { req, code: 0, elem };
        let mut liar = Raw::linked(victim, 22);
        liar.send(&done, &[]);
        liar.expect_closed("the end of the request of another");
        assert!(is_all(here, 64, 0xaa) && !transfer.done());
        honest.send(&answer, &[0x20; 64]);
        transfer
            .wait(Some(Duration::from_secs(20)))
            .expect("an end")
            .expect("the honest answer");
        assert!(is_all(here, 64, 0x20));
    });
}

#[test]
fn forged_addresses_are_refused_and_cost_nothing() {
    besieged(None, |victim, region| {
        let mut raw = Raw::linked(victim, 9);
        let at = region as u64;
        let end = at + LEN as u64;
        let ranges = [
            (at, LEN as u64 + 1),
            (end - 8, 9),
            (end, 1),
            (at - 1, 2),
            (0, 8),
            (u64::MAX, 8),
            (u64::MAX - 7, 8),
            (at, u64::MAX),
            (1 << 63, 1 << 63),
        ];
        for (n, &(addr, len)) in ranges.iter().enumerate() {
            let req = n as u64;
            raw.send(
                &Message::Read {
                    req,
                    elem: 0,
                    addr,
                    len,
                },
                &[],
            );
            let (answer, _) = raw.next().expect("a refusal");
            assert_eq!(
                answer,
                Message::Done {
                    req,
                    code: -4,
                    elem: 0
                },
                "{addr:#x}+{len}"
            );
            raw.send(&write(addr, len, 0), &[9]);
            let (answer, _) = raw.next().expect("a refusal");
            assert_eq!(
                answer,
                Message::Done {
                    req: 1,
                    code: -4,
                    elem: 0
                },
                "{addr:#x}+{len}"
            );
        }
        // The next valid one works.
        let read = Message::Read {
            req: 77,
            elem: 3,
            addr: at,
            len: 16,
        };
        raw.send(&read, &[]);
        let (answer, body) = raw.next().expect("an answer");
        assert_eq!(
            answer,
            Message::Data {
                req: 77,
                elem: 3,
                offset: 0
            }
        );
        assert_eq!(body.len(), 16);
    });
}

#[test]
fn one_that_asks_and_never_reads_is_bounded() {
    besieged(None, |victim, region| {
        for (n, len) in [(0, 8), (1, LEN as u64)] {
            let mut raw = Raw::linked(victim, 20 + n);
            raw.0
                .set_write_timeout(Some(Duration::from_secs(5)))
                .expect("a timeout");
            let addr = region as u64;
            let one = Raw::frame(
                &Message::Read {
                    req: 1,
                    elem: 0,
                    addr,
                    len,
                },
                &[],
            );
            let many = one.repeat(1000);
            // Until it is closed, or pushed back upon.
            for _ in 0..1000 {
                if raw.0.write_all(&many).is_err() {
                    break;
                }
            }
        }
    });
}

#[test]
fn messages_beyond_the_credit_end_the_link() {
    besieged(None, |victim, _| {
        let mut raw = Raw::linked(victim, 30);
        let body = vec![9; 256 << 10];
        for seq in 0..2000 {
            let piece = MsgPiece {
                seq,
                total: body.len() as u64,
                offset: 0,
                signals: None,
            };
            if raw
                .0
                .write_all(&Raw::frame(&Message::Msg(piece), &body))
                .is_err()
            {
                break;
            }
        }
        raw.expect_closed("beyond the credit");
        assert!(victim.stats().messages_queued_bytes < 80 << 20);
        // Empty ones count, too, and early ones wait within the credit.
        let mut raw = Raw::linked(victim, 31);
        let empty: Vec<u8> = (1..2_000_000u64)
            .flat_map(|seq| {
                Raw::frame(
                    &Message::Msg(MsgPiece {
                        seq,
                        total: 0,
                        offset: 0,
                        signals: None,
                    }),
                    &[],
                )
            })
            .collect();
        let _ = raw.0.write_all(&empty);
        raw.expect_closed("empty messages beyond the credit");
    });
}

#[test]
fn thousands_of_half_open_connections_are_bounded() {
    besieged(None, |victim, _| {
        let mut held = Vec::new();
        let count = if std::env::var_os("CONNEX_SOAK").is_some_and(|v| v == "1") {
            10_000
        } else {
            1500
        };
        for n in 0..count {
            let mut raw = Raw::to(victim);
            // Some say nothing, some half a prefix, some a hello without an end.
            match n % 3 {
                0 => {}
                1 => drop(raw.0.write_all(&[0xc7])),
                _ => {
                    let (hello, body) = Raw::hello(9, victim, n);
                    let frame = Raw::frame(&hello, &body);
                    let _ = raw.0.write_all(&frame[..frame.len() - 1]);
                }
            }
            held.push(raw);
        }
        let start = Instant::now();
        let open = || {
            let stats = victim.stats();
            stats.eps_created - stats.eps_closed
        };
        while open() > 600 {
            assert!(
                start.elapsed() < Duration::from_secs(30),
                "{} stay open",
                open()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        // And the rest goes after the time of a handshake.
        while open() > 1 {
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "{} stay open",
                open()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(victim.stats().strangers_refused >= count);
        drop(held);
    });
}

#[test]
fn a_slow_writer_delays_nobody() {
    besieged(None, |victim, _| {
        let mut raw = Raw::to(victim);
        let (hello, body) = Raw::hello(9, victim, 1);
        let start = Instant::now();
        for byte in Raw::frame(&hello, &body) {
            if raw.0.write_all(&[byte]).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(40));
        }
        raw.expect_closed("a hello that takes too long");
        assert!(start.elapsed() < Duration::from_secs(30));
    });
}

#[test]
fn the_secret_cannot_be_gone_round() {
    let secret = &b"a secret of 20 bytes"[..];
    besieged(Some(secret), |victim, region| {
        let read = Message::Read {
            req: 1,
            elem: 0,
            addr: region as u64,
            len: 8,
        };
        // Without a proof; with a wrong one; with data or a confirm instead of one.
        for (n, instead) in [
            Message::Proof { mac: [0; 32] },
            Message::Proof { mac: [0xff; 32] },
            Message::Confirm { link: 3 },
            read,
            Raw::hello(9, victim, 3).0,
        ]
        .into_iter()
        .enumerate()
        {
            let mut raw = Raw::to(victim);
            let (hello, body) = Raw::hello(9, victim, 3);
            raw.send(&hello, &body);
            let (challenge, _) = raw.next().expect("a challenge");
            assert!(
                matches!(challenge, Message::Challenge { .. }),
                "{challenge:?}"
            );
            raw.send(&instead, if n == 4 { &body } else { &[] });
            raw.send(&Message::Confirm { link: 3 }, &[]);
            raw.send(&read, &[]);
            while let Some((message, _)) = raw.next() {
                assert!(
                    matches!(message, Message::Refusal { .. } | Message::Goodbye { .. }),
                    "{message:?}"
                );
            }
        }
        // A handshake that was overheard is worth nothing on another connection: the challenge is a fresh one.
        let nonces: Vec<Message> = (0..2)
            .map(|_| {
                let mut raw = Raw::to(victim);
                let (hello, body) = Raw::hello(9, victim, 3);
                raw.send(&hello, &body);
                raw.next().expect("a challenge").0
            })
            .collect();
        assert_ne!(nonces[0], nonces[1]);
        // The dialler of the real link is up one message earlier than the victim.
        let begun = std::time::Instant::now();
        while victim.stats().live_peers != 1 {
            assert!(
                begun.elapsed() < std::time::Duration::from_secs(20),
                "the real peer's link is not up"
            );
            std::thread::yield_now();
        }
    });
}

/// Carries one connection to `victim`; the address to dial, and what its dialler says.
fn overheard(victim: &Engine) -> (std::net::SocketAddr, std::sync::mpsc::Receiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let at = listener.local_addr().expect("bound");
    let port = victim.port();
    let (told, heard) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut near, _) = listener.accept().expect("a dialler");
        let mut far = TcpStream::connect(("127.0.0.1", port)).expect("the victim");
        let (mut back_from, mut back_to) = (
            far.try_clone().expect("a descriptor"),
            near.try_clone().expect("a descriptor"),
        );
        std::thread::spawn(move || std::io::copy(&mut back_from, &mut back_to));
        let mut bytes = [0; 4096];
        while let Ok(n @ 1..) = near.read(&mut bytes) {
            let _ = told.send(bytes[..n].to_vec());
            if far.write_all(&bytes[..n]).is_err() {
                return;
            }
        }
    });
    (at, heard)
}

#[test]
fn a_handshake_that_was_overheard_opens_nothing() {
    let secret = &b"a secret of 20 bytes"[..];
    besieged(Some(secret), |victim, region| {
        let (at, heard) = overheard(victim);
        let honest = engine(7, Some(secret));
        let here = buffer(0, LEN);
        let url = format!("{at}#{}", victim.id());
        // SAFETY: leaked.
        unsafe {
            let any = Some(Duration::from_secs(20));
            honest.read(&url, here, region as u64, LEN, any)
        }
        .expect("a read through the relay");
        // Hello, proof, confirm and the read itself, as they were said.
        let said: Vec<u8> = heard.try_iter().flatten().collect();
        for gone in [false, true] {
            if gone {
                honest.close();
            }
            let before = victim.stats().strangers_refused;
            let mut raw = Raw::to(victim);
            let _ = raw.0.write_all(&said);
            while let Some((message, _)) = raw.next() {
                assert!(
                    matches!(message, Message::Challenge { .. } | Message::Refusal { .. }),
                    "{message:?}"
                );
            }
            assert!(victim.stats().strangers_refused > before, "not counted");
            assert_eq!(honest.stats().failures, 0, "the honest peer was disturbed");
        }
        // Its goodbye may still be on its way.
        let begun = Instant::now();
        while victim.stats().live_peers != 1 {
            assert!(begun.elapsed() < Duration::from_secs(20), "a link too many");
            std::thread::yield_now();
        }
    });
}

#[test]
fn another_protocol_version_is_told_so() {
    besieged(None, |victim, _| {
        let mut raw = Raw::to(victim);
        let (hello, body) = Raw::hello(9, victim, 3);
        let mut frame = Raw::frame(&hello, &body);
        // After the prefix of eight bytes comes the kind, then the version.
        frame[9] = wire::VERSION + 1;
        raw.0.write_all(&frame).expect("the hello");
        let (refusal, text) = raw.next().expect("a refusal");
        assert!(
            matches!(
                refusal,
                Message::Refusal {
                    why: RefusalCode::Version,
                    ..
                }
            ),
            "{refusal:?}"
        );
        let text = String::from_utf8(text).expect("text");
        let both = format!(
            "version {} where this engine speaks {}",
            wire::VERSION + 1,
            wire::VERSION
        );
        assert!(text.contains(&both), "{text}");
        raw.expect_closed("another version");
    });
}

#[test]
fn names_without_end_are_bounded() {
    besieged(None, |victim, _| {
        let count = if std::env::var_os("CONNEX_SOAK").is_some_and(|v| v == "1") {
            200_000
        } else {
            5000
        };
        let before = resident_kib();
        for n in 0..count {
            // A fresh name each: says hello and goes.
            let mut raw = Raw::to(victim);
            let (hello, body) = Raw::hello(10_000 + n, victim, u64::from(n) + 10);
            raw.send(&hello, &body);
            let _ = raw.next();
        }
        let grown = resident_kib().saturating_sub(before);
        assert!(grown < 60 << 10, "{grown} KiB more for {count} names");
    });
}
