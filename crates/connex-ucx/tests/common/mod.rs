//! Two workers of one process that talk over loopback.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part")]

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use connex_ucx::{
    Config, Context, Endpoint, EpId, Event, Features, Landing, Library, Receiver, Worker,
};

/// The kind of message that the tests send.
pub const AM: u16 = 7;
/// Generous: the machine may be busy.
pub const LIMIT: Duration = Duration::from_secs(10);

/// The UCX under test. Without one the tests fail, with the loader's own advice.
pub fn library() -> &'static Library {
    match Library::load() {
        Ok(library) => library,
        Err(e) => panic!("these tests need a UCX: {e}"),
    }
}

pub fn context(tls: &str, rma: bool) -> Context {
    let library = library();
    let version = library.version();
    // Before 1.17 the settings of a transport go by their names without the transport's.
    let tcp = if version.minor >= 17 { "TCP_" } else { "" };
    let mut config = Config::read(library).expect("settings");
    let mut settings = vec![
        ("TLS".to_owned(), tls),
        ("NET_DEVICES".to_owned(), "lo"),
        (format!("{tcp}TX_SEG_SIZE"), "256k"),
        (format!("{tcp}RX_SEG_SIZE"), "256k"),
    ];
    if tls.contains("sysv") {
        settings.push(("MM_ERROR_HANDLING".to_owned(), "y"));
    } else {
        // 1.20 finds no route over `lo` otherwise.
        settings.push(("CM_USE_ALL_DEVICES".to_owned(), "n"));
    }
    if version.minor >= 16 {
        // A strong fence waits for the peer inside UCX, and here the peer is the same thread.
        settings.push(("FENCE_MODE".to_owned(), "weak"));
    }
    for (name, value) in settings {
        config.set(&name, value).expect("a setting");
    }
    Context::new(&config, Features { rma }).expect("a context")
}

/// What arrived: header and data.
#[derive(Default)]
pub struct Inbox {
    pub messages: Vec<(EpId, Vec<u8>, Vec<u8>)>,
    pub landings: Vec<Landing>,
    pub offers: Vec<usize>,
}

impl Receiver for Inbox {
    fn message(&mut self, ep: EpId, id: u16, header: &[u8], data: &[u8]) {
        assert_eq!(id, AM);
        if header == b"panic" {
            panic!("as the test asked");
        }
        self.messages.push((ep, header.to_vec(), data.to_vec()));
    }

    fn rendezvous(&mut self, _: EpId, _: u16, _: &[u8], len: usize) -> Option<Landing> {
        self.offers.push(len);
        self.landings.pop()
    }
}

/// A worker and what it reported.
pub struct Side {
    pub worker: Worker,
    pub inbox: Inbox,
    pub events: Vec<Event>,
}

impl Side {
    pub fn new(context: &Context) -> Self {
        let mut worker = Worker::new(context).expect("a worker");
        worker.accept_messages(AM).expect("a handler");
        Self {
            worker,
            inbox: Inbox::default(),
            events: Vec::new(),
        }
    }

    pub fn step(&mut self) -> usize {
        let done = self.worker.progress(&mut self.inbox);
        while let Some(event) = self.worker.next_event() {
            self.events.push(event);
        }
        done
    }

    /// Takes the first event that `pick` accepts.
    pub fn take<T>(&mut self, pick: impl Fn(&Event) -> Option<T>) -> Option<T> {
        let (index, found) = self
            .events
            .iter()
            .enumerate()
            .find_map(|(i, e)| pick(e).map(|t| (i, t)))?;
        self.events.remove(index);
        Some(found)
    }

    pub fn take_request(&mut self) -> Option<connex_ucx::ConnRequest> {
        let index = self
            .events
            .iter()
            .position(|e| matches!(e, Event::ConnRequest(_)))?;
        match self.events.remove(index) {
            Event::ConnRequest(request) => Some(request),
            _ => unreachable!("looked for it"),
        }
    }
}

/// Progresses both until `done` gives something.
pub fn until<T>(
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
            "{what} did not happen in {LIMIT:?}; events: {:?} / {:?}",
            a.events,
            b.events
        );
        std::thread::yield_now();
    }
}

/// A connected pair: the dialling side, the accepting side, and their endpoints.
pub struct Pair {
    pub a: Side,
    pub b: Side,
    pub ab: Endpoint,
    pub ba: Endpoint,
    pub listener: connex_ucx::Listener,
}

pub fn pair(tls: &str, rma: bool) -> Pair {
    let mut a = Side::new(&context(tls, rma));
    let mut b = Side::new(&context(tls, rma));
    let listener = b
        .worker
        .listen(SocketAddr::from(([127, 0, 0, 1], 0)))
        .expect("a listener");
    assert_ne!(listener.addr().port(), 0);
    let ab = a
        .worker
        .connect(listener.addr(), None)
        .expect("a connection");
    let ba = until(&mut a, &mut b, "the connection request", |_, b| {
        let request = b.take_request()?;
        assert_eq!(request.listener(), listener.id());
        assert!(request.from().is_some_and(|from| from.ip().is_loopback()));
        Some(request.accept(&mut b.worker).expect("accepted"))
    });
    Pair {
        a,
        b,
        ab,
        ba,
        listener,
    }
}
