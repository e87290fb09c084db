//! A whole engine over UCX that hears arbitrary messages of whoever speaks UCX to it, before and after a handshake. Nothing of it
//! may end the process, reach memory outside the region or disturb another peer.
//!
//! What UCX itself makes of arbitrary bytes is not tried: the project's docs/failure-model.md says what is known of that.
#![no_main]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use connex_fuzz::input::Input;
use connex_fuzz::world::{World, assert_no_leak};
use connex_rs::TransportChoice;
use connex_rs::transport::ucx::configure;
use connex_rs::transport::ucx::settings::{Facts, plan};
use connex_rs::wire::{self, Message};
use connex_ucx::{
    Context, Endpoint, EpId, Event, Features, Landing, Library, Protocol, Receiver, Worker,
};
use libfuzzer_sys::fuzz_target;

/// The kinds of messages that the engine takes (`transport/ucx/mod.rs`), and one that it does not.
const KINDS: std::ops::RangeInclusive<u16> = 10..=18;
const FRAME: u16 = 11;
const GREETING: u16 = 12;
const JOIN: u16 = 15;
const APART: u16 = 18;
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

static WORLD: LazyLock<World> = LazyLock::new(|| World::new(TransportChoice::Ucx));
static CONTEXT: LazyLock<Context> = LazyLock::new(|| {
    let library = Library::load().expect("a UCX");
    let facts = Facts::gather(library, HERE, Some("lo".into()));
    let plan = plan(&facts).expect("a plan");
    let (config, _environment) = configure(library, &plan.settings).expect("settings");
    Context::new(&config, Features { rma: false }).expect("a context")
});
static RUNS: AtomicU64 = AtomicU64::new(1);

/// What came.
#[derive(Default)]
struct Heard(Vec<(u16, Vec<u8>)>);

impl Receiver for Heard {
    fn message(&mut self, _: EpId, kind: u16, head: &[u8], body: &[u8]) {
        assert_no_leak(body);
        self.0.push((kind, head.to_vec()));
    }

    fn rendezvous(&mut self, _: EpId, _: u16, _: &[u8], _: usize) -> Option<Landing> {
        None
    }
}

/// Somebody who is connected.
struct Stranger {
    worker: Worker,
    endpoint: Endpoint,
    heard: Heard,
    over: bool,
}

impl Stranger {
    fn new(port: u16) -> Self {
        let mut worker = Worker::new(&CONTEXT).expect("a worker");
        for kind in KINDS {
            worker.accept_messages(kind).expect("a handler");
        }
        let endpoint = worker
            .connect(SocketAddr::new(HERE, port), None)
            .expect("a connection");
        Self {
            worker,
            endpoint,
            heard: Heard::default(),
            over: false,
        }
    }

    fn step(&mut self) {
        self.worker.progress(&mut self.heard);
        while let Some(event) = self.worker.next_event() {
            self.over |= matches!(event, Event::Failed { .. });
        }
    }

    /// Eager alone: UCX 1.22 ends the process that closes by force what it offered by rendezvous.
    fn send(&mut self, kind: u16, head: &[u8], body: Vec<u8>) {
        let sent = self
            .endpoint
            .send(&mut self.worker, kind, head, body, Protocol::Eager, 1);
        self.over |= sent.is_err();
    }

    /// Waits for a message that `wanted` is about.
    fn hear(&mut self, wanted: impl Fn(u16, &[u8]) -> bool) -> bool {
        let limit = Instant::now() + Duration::from_secs(2);
        while !self.over && Instant::now() < limit {
            self.step();
            if self.heard.0.iter().any(|(kind, head)| wanted(*kind, head)) {
                return true;
            }
        }
        false
    }

    /// The handshake of an insider who keeps to TCP.
    fn link(&mut self, world: &World, link: u64) -> bool {
        if !self.hear(|kind, _| kind == GREETING) {
            return false;
        }
        self.send(APART, &[], Vec::new());
        let (head, body) = world.hello(link);
        self.send(FRAME, &head, body);
        let welcome = |kind, head: &[u8]| {
            kind == FRAME && matches!(wire::decode(head), Ok(Message::Welcome(_)))
        };
        if !self.hear(welcome) {
            return false;
        }
        let confirm = wire::encode(&Message::Confirm { link });
        self.send(FRAME, confirm.as_slice(), Vec::new());
        true
    }
}

fuzz_target!(|data: &[u8]| {
    let world = &*WORLD;
    let run = RUNS.fetch_add(1, Ordering::Relaxed);
    let port = world.victim().port();
    if run == 1 {
        // Otherwise most of this would test nothing.
        assert!(Stranger::new(port).link(world, u64::MAX), "no link");
    }
    let mut input = Input::new(data);
    let mut stranger = Stranger::new(port);
    if !input.byte().is_multiple_of(4) {
        stranger.link(world, run);
    }
    while !input.rest().is_empty() && !stranger.over {
        let (choice, how) = (input.byte(), input.byte());
        let kind = match choice % 4 {
            0 => KINDS.start() + u16::from(how) % KINDS.clone().count() as u16,
            _ => FRAME,
        };
        let (head, mut body) = input.frame(world.region());
        if kind == JOIN {
            // UCX looks at no more than an empty one.
            body.clear();
        }
        stranger.send(kind, &head, body);
        stranger.step();
    }
    // Until the engine has taken it, as far as it does.
    let limit = Instant::now() + Duration::from_millis(5);
    while !stranger.over && Instant::now() < limit {
        stranger.step();
    }
    world.look(run);
});
