//! The engines that hear an input, and what must hold of them whatever they heard.

use std::sync::Arc;
use std::time::Duration;

use connex_rs::wire::{self, Greet, Greeting, Message};
use connex_rs::{Config, Engine, LogicalId, TransportChoice};

use crate::input::life;

/// Bytes of the region.
pub const LEN: usize = 4096;
/// Stands before and behind the region, over and over: nobody may change it, and no answer may contain it.
const CANARY: [u8; 16] = *b"\xc5neither in nor\x5c";
/// How often the honest peer looks whether all is well, in inputs.
const LOOK_EVERY: u64 = 256;

/// A victim with a region, and an honest peer of it.
pub struct World {
    victim: Arc<Engine>,
    friend: Engine,
    /// The region lies in the middle of a canary of its own length on each side.
    memory: usize,
    here: usize,
}

/// The identity of a stage.
pub fn id(stage: u32) -> LogicalId {
    LogicalId::new("fuzz", stage, 0, 0).expect("valid")
}

fn engine(stage: u32, transport: TransportChoice) -> Engine {
    let mut config = Config::new(id(stage));
    config.listen_ip = "127.0.0.1".into();
    config.transport = transport;
    Engine::start(config).expect("an engine")
}

/// An engine that wants a secret, and listens on the built-in transport.
pub fn guarded() -> Engine {
    let mut config = Config::new(id(2));
    config.listen_ip = "127.0.0.1".into();
    config.transport = TransportChoice::Tcp;
    config.secret = Some(b"nobody can guess this".to_vec());
    Engine::start(config).expect("an engine")
}

impl World {
    /// Starts both.
    pub fn new(transport: TransportChoice) -> Self {
        let victim = Arc::new(engine(0, transport));
        let mut memory = CANARY.repeat(3 * LEN / CANARY.len());
        memory[LEN..2 * LEN].fill(0);
        let memory = memory.leak().as_mut_ptr() as usize;
        // SAFETY: leaked, and looked at through raw pointers only.
        unsafe { victim.register_memory(memory + LEN, LEN) }.expect("a region");
        // An application that takes whatever comes.
        let taker = Arc::clone(&victim);
        std::thread::spawn(move || {
            while !taker.is_closed() {
                taker.recv_msg(Some(Duration::from_secs(1)));
            }
        });
        let taker = Arc::clone(&victim);
        std::thread::spawn(move || {
            while !taker.is_closed() {
                let Ok(channel) = taker.accept_channel(None, Some(Duration::from_secs(1))) else {
                    continue;
                };
                // Several at once, and gone after a while.
                std::thread::spawn(move || {
                    while let Ok(Some(step)) = channel.recv(Some(Duration::from_millis(200))) {
                        drop(step);
                    }
                });
            }
        });
        Self {
            victim,
            friend: engine(1, transport),
            memory,
            here: vec![0_u8; LEN].leak().as_mut_ptr() as usize,
        }
    }

    /// The one that hears the input.
    pub fn victim(&self) -> &Engine {
        &self.victim
    }

    /// Where its region is.
    pub fn region(&self) -> u64 {
        (self.memory + LEN) as u64
    }

    /// Looks after every so many inputs whether all is well.
    ///
    /// # Panics
    /// If it is not.
    pub fn look(&self, run: u64) {
        if !run.is_multiple_of(LOOK_EVERY) {
            return;
        }
        // SAFETY: leaked memory on both sides.
        unsafe {
            let time = Some(Duration::from_secs(20));
            self.friend
                .read(self.victim.local_url(), self.here, self.region(), LEN, time)
                .expect("the honest peer is served");
            for side in [self.memory, self.memory + 2 * LEN] {
                let bytes = std::slice::from_raw_parts(side as *const u8, LEN);
                assert!(
                    bytes.chunks(CANARY.len()).all(|chunk| chunk == CANARY),
                    "memory outside the region was written"
                );
            }
        }
        assert_eq!(
            self.friend.stats().failures,
            0,
            "the honest peer lost its link"
        );
    }

    /// What an insider with a link of this name says first.
    pub fn hello(&self, link: u64) -> (Vec<u8>, Vec<u8>) {
        hello_to(&self.victim, link)
    }
}

/// What an insider says first to this engine.
pub fn hello_to(engine: &Engine, link: u64) -> (Vec<u8>, Vec<u8>) {
    hello(engine.id(), link)
}

/// What an insider with a link of this name says first to whom it wants.
pub fn hello(wanted: &LogicalId, link: u64) -> (Vec<u8>, Vec<u8>) {
    let who = id(100 + (link % 32) as u32);
    let greet = Greet {
        link,
        attempt: 1,
        incarnation: life(link),
        nonce: [7; 16],
        lost: None,
        closed: false,
    };
    let greeting = Greeting {
        id: Some(who.clone()),
        wanted: Some(wanted.clone()),
        url: format!("127.0.0.1:9#{who}"),
        window: u64::MAX,
        ..Greeting::default()
    };
    let head = wire::encode(&Message::Hello(greet));
    (head.as_slice().to_vec(), greeting.encode())
}

/// Whoever reads from the victim must not read what lies beside the region.
///
/// # Panics
/// If these bytes contain it.
pub fn assert_no_leak(bytes: &[u8]) {
    assert!(
        !bytes.windows(CANARY.len()).any(|window| window == CANARY),
        "memory outside the region was read"
    );
}
