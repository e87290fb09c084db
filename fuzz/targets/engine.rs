//! A whole engine on the built-in transport that hears arbitrary bytes: from strangers, from a peer with a link, and as
//! datagrams. Nothing of it may end the process, reach memory outside the region or disturb another peer.
#![no_main]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream, UdpSocket};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use connex_rs::identity::Incarnation;
use connex_rs::wire::{self, Greet, Greeting, Message, MsgPiece, Piece};
use connex_rs::{Config, Engine, LogicalId, TransportChoice};
use libfuzzer_sys::fuzz_target;

const LEN: usize = 4096;
const CANARY: u8 = 0xc5;
/// How often the honest peer looks whether all is well.
const LOOK_EVERY: u64 = 256;

struct World {
    victim: Engine,
    friend: Engine,
    /// The region lies in the middle of a canary of its own length on each side.
    memory: usize,
    here: usize,
    datagrams: UdpSocket,
}

static WORLD: LazyLock<World> = LazyLock::new(|| {
    let engine = |stage| {
        let mut config = Config::new(id(stage));
        config.listen_ip = "127.0.0.1".into();
        config.transport = TransportChoice::Tcp;
        Engine::start(config).expect("an engine")
    };
    let (victim, friend) = (engine(0), engine(1));
    let memory = vec![CANARY; 3 * LEN].leak().as_mut_ptr() as usize;
    // SAFETY: leaked, and looked at through raw pointers only.
    unsafe { victim.register_memory(memory + LEN, LEN) }.expect("a region");
    World {
        victim,
        friend,
        memory,
        here: vec![0_u8; LEN].leak().as_mut_ptr() as usize,
        datagrams: UdpSocket::bind("127.0.0.1:0").expect("a socket"),
    }
});

static RUNS: AtomicU64 = AtomicU64::new(1);

fn id(stage: u32) -> LogicalId {
    LogicalId::new("fuzz", stage, 0, 0).expect("valid")
}

fn frame(head: &[u8], body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0xc7, 0x5d, head.len() as u8, 0];
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(head);
    bytes.extend(body);
    bytes
}

/// Reads the input bit by bit; zeroes after its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn take(&mut self, len: usize) -> Vec<u8> {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken.to_vec()
    }

    fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    fn number(&mut self) -> u64 {
        // Often small, sometimes anything.
        let width = usize::from(self.byte() % 9);
        let mut bytes = [0; 8];
        let taken = self.take(width);
        bytes[..taken.len()].copy_from_slice(&taken);
        u64::from_le_bytes(bytes)
    }

    /// An address in or near the region, or anywhere.
    fn address(&mut self, region: u64) -> u64 {
        match self.byte() % 4 {
            0 => self.number(),
            _ => region
                .wrapping_add(self.number() % (2 * LEN as u64))
                .wrapping_sub(LEN as u64 / 2),
        }
    }

    fn message(&mut self, region: u64) -> Message {
        let (req, elem) = (self.number(), self.number() as u32);
        match self.byte() % 6 {
            0 => Message::Read {
                req,
                elem,
                addr: self.address(region),
                len: self.number(),
            },
            1 => Message::Data {
                req,
                elem,
                offset: self.number(),
            },
            2 => Message::Done { req, code: 0, elem },
            3 => Message::Msg(MsgPiece {
                seq: self.number(),
                total: self.number(),
                offset: self.number(),
                signals: (self.byte() % 2 == 0).then(|| self.number()),
            }),
            4 => Message::Ping { stamp: req },
            _ => Message::Write(Piece {
                req,
                last: self.byte() % 2 == 0,
                addr: self.address(region),
                len: self.number(),
                offset: self.number(),
                ..piece()
            }),
        }
    }

    /// What is sent in one go: raw bytes, a frame around any head, or one around a real message.
    fn burst(&mut self, region: u64) -> Vec<u8> {
        let (kind, len) = (self.byte(), usize::from(self.byte()));
        match kind % 4 {
            0 => self.take(len),
            1 => {
                let head = self.take(len % 65);
                let body = self.take(len);
                frame(&head, &body)
            }
            _ => {
                let head = wire::encode(&self.message(region));
                let body = self.take(len);
                frame(head.as_slice(), &body)
            }
        }
    }
}

fn piece() -> Piece {
    Piece {
        req: 0,
        elem: 0,
        last: false,
        flag: false,
        addr: 0,
        len: 0,
        offset: 0,
    }
}

/// A link as any insider could have it.
fn linked(world: &World, run: u64) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(("127.0.0.1", world.victim.port())).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    stream.set_nodelay(true).ok()?;
    let who = id(100 + (run % 32) as u32);
    let greet = Greet {
        link: run,
        attempt: 1,
        incarnation: Incarnation {
            start_ns: run,
            random: run,
        },
        nonce: [7; 16],
        lost: None,
    };
    let greeting = Greeting {
        id: Some(who.clone()),
        wanted: Some(world.victim.id().clone()),
        url: format!("127.0.0.1:9#{who}"),
        window: u64::MAX,
        ..Greeting::default()
    };
    let hello = wire::encode(&Message::Hello(greet));
    stream
        .write_all(&frame(hello.as_slice(), &greeting.encode()))
        .ok()?;
    let mut prefix = [0; 8];
    stream.read_exact(&mut prefix).ok()?;
    let body = u32::from_le_bytes(prefix[4..].try_into().ok()?) as usize;
    let mut rest = vec![0; usize::from(prefix[2]) + body];
    stream.read_exact(&mut rest).ok()?;
    let confirm = wire::encode(&Message::Confirm { link: run });
    stream.write_all(&frame(confirm.as_slice(), &[])).ok()?;
    Some(stream)
}

fn look(world: &World) {
    // SAFETY: leaked memory on both sides.
    unsafe {
        let time = Some(Duration::from_secs(20));
        let region = (world.memory + LEN) as u64;
        world
            .friend
            .read(world.victim.local_url(), world.here, region, LEN, time)
            .expect("the honest peer is served");
        for side in [world.memory, world.memory + 2 * LEN] {
            let canary = std::slice::from_raw_parts(side as *const u8, LEN);
            assert!(
                canary.iter().all(|&b| b == CANARY),
                "memory outside the region was written"
            );
        }
    }
    assert_eq!(
        world.friend.stats().failures,
        0,
        "the honest peer lost its link"
    );
}

fuzz_target!(|data: &[u8]| {
    let world = &*WORLD;
    let run = RUNS.fetch_add(1, Ordering::Relaxed);
    let region = (world.memory + LEN) as u64;
    let mut input = Input(data);
    let stream = match input.byte() % 4 {
        0 => {
            let _ = world
                .datagrams
                .send_to(input.0, ("127.0.0.1", world.victim.port()));
            None
        }
        1 => TcpStream::connect(("127.0.0.1", world.victim.port())).ok(),
        _ => linked(world, run),
    };
    if let Some(mut stream) = stream {
        while !input.0.is_empty() {
            let bytes = input.burst(region);
            if stream.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = stream.shutdown(Shutdown::Write);
        // Until the engine has read all of it and closed, so that what it covers counts for this input.
        let _ = stream.set_read_timeout(Some(Duration::from_millis(200)));
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    }
    if run % LOOK_EVERY == 0 {
        look(world);
    }
});
