//! The fault lab: what survivors see when peers die, hang, vanish and come back, and that no late byte lands.

use std::time::{Duration, Instant};

use connex_tests::agent::{Agent, Pending, text};
use connex_tests::net::{Cable, Side, need_root};
use serde_json::{Value, json};

mod cables;
mod deaths;
mod identities;
mod lanes;
mod path;
mod program;
mod relays;

use path::Path;

const AGENT: &str = env!("CARGO_BIN_EXE_connex-agent");

/// Heartbeats of the lab: interval and timeout in milliseconds.
const BEAT: (u64, u64) = (200, 1500);

/// How long the survivors of a loss are watched for a second report of it, in milliseconds. Longer than every time that
/// an engine waits for something by itself: the copies of an obituary (8 ms), the lab's heartbeats, a dial and
/// progress (3 s).
const WATCH: u64 = 3500;

/// What carries the bytes in one instance of a case.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Net {
    /// The built-in transport.
    Tcp,
    /// UCX over TCP; where UCX is not found the case fails.
    Ucx,
}

/// Instantiates each case once for every transport, in a module named for it.
macro_rules! on_every_transport {
    ($($case:ident),+ $(,)?) => {
        mod tcp {
            $(
                #[test]
                fn $case() {
                    super::$case($crate::Net::Tcp);
                }
            )+
        }
        mod ucx {
            $(
                #[test]
                fn $case() {
                    super::$case($crate::Net::Ucx);
                }
            )+
        }
    };
}
use on_every_transport;

fn soak() -> bool {
    std::env::var_os("CONNEX_SOAK").is_some_and(|v| v == "1")
}

/// An agent on this host's loopback with its engine started.
fn local(net: Net, stage: u32, beat: Option<(u64, u64)>) -> (Agent, String) {
    let agent = Agent::spawn(AGENT, &[]);
    let url = agent.start(config(net, stage, "127.0.0.1", 0, beat));
    (agent, url)
}

/// An agent on a side of a cable with its engine started.
fn on(
    net: Net,
    cable: &Cable,
    side: Side,
    stage: u32,
    beat: Option<(u64, u64)>,
) -> (Agent, String) {
    // UCX looks once, when it starts, whether the device runs.
    wait_for("the cable", || cable.runs(side, "wire"));
    let agent = Agent::spawn(AGENT, &["ip", "netns", "exec", cable.name(side)]);
    let url = agent.start(config(net, stage, Cable::ip(side), 0, beat));
    (agent, url)
}

fn config(net: Net, stage: u32, ip: &str, port: u16, beat: Option<(u64, u64)>) -> Value {
    let (heartbeat, timeout) = beat.unzip();
    let transport = match net {
        Net::Tcp => "tcp",
        Net::Ucx => "ucx",
    };
    json!({
        "stage": stage, "ip": ip, "port": port, "heartbeat": heartbeat, "timeout": timeout, "transport": transport,
    })
}

fn port_of(url: &str) -> u16 {
    let (address, _) = url.split_once('#').expect("a URL");
    let (_, port) = address.rsplit_once(':').expect("a port");
    port.parse().expect("a port")
}

/// Links two agents and takes both sides' events.
fn link(a: &Agent, b: &Agent, url_of_b: &str) {
    a.call(json!({"do": "connect", "url": url_of_b}));
    a.expect_up("a");
    b.expect_up("b");
}

/// How the reason of a death begins that nobody announced. Whoever saw it first goes on: the sentinel or the transport.
const DIED: &str = "peer died: ";
/// A connection that ended while both processes live.
const RESET: &str = "peer died: the connection is gone";
/// A goodbye.
const CLOSED: &str = "closed by peer";
/// What the one says that hears nothing.
const SILENCE: &str = "heartbeat timeout: nothing heard for ";
/// What the one says whose operation made no progress.
const OVERDUE: &str = "operation timeout: the link was closed so that no late byte lands";
/// What the other one says.
const GIVEN_UP: &str = "link timeout: given up by peer";

/// Expects that an established link was lost by a death, in these words (SPEC section 6).
fn expect_death(agent: &Agent, begins: &str, what: &str) {
    let (status, reason) = agent.expect_failed(what);
    assert_eq!(status, -2, "{what}: {reason}");
    assert!(
        reason.starts_with(begins),
        "{what}: {reason:?} instead of {begins:?}"
    );
}

/// Expects that an established link was given up on a suspicion, in one of these words.
fn expect_suspicion(agent: &Agent, begins: &[&str], what: &str) {
    let (status, reason) = agent.expect_failed(what);
    assert_eq!(status, -3, "{what}: {reason}");
    assert!(
        begins.iter().any(|begin| reason.starts_with(begin)),
        "{what}: {reason:?} instead of one of {begins:?}"
    );
}

/// Watches all agents for so many milliseconds: not one more event, and as many links lost as were reported.
fn expect_settled(agents: &[&Agent], ms: u64, what: &str) {
    let looks: Vec<Pending> = agents
        .iter()
        .map(|agent| agent.post(json!({"do": "event", "ms": ms})))
        .collect();
    for (look, agent) in looks.into_iter().zip(agents) {
        let event = look.wait();
        assert!(event.is_null(), "{what}: one event too many: {event}");
        assert_eq!(agent.stat("failures"), agent.losses(), "{what}: links lost");
        assert_eq!(agent.stat("dropped_events"), 0, "{what}");
    }
}

/// Waits for a transfer that must fail with one of these codes, and that nothing lands after it.
fn expect_failure(transfer: Pending, codes: &[i64], what: &str) -> Value {
    let answer = transfer.wait();
    let code = answer["code"]
        .as_i64()
        .unwrap_or_else(|| panic!("{what}: {answer}"));
    assert!(codes.contains(&code), "{what}: {answer}");
    assert_ne!(
        answer["late"], true,
        "{what}: bytes landed after the failure: {answer}"
    );
    answer
}

/// Waits until `done`; panics with `what` when it takes too long.
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "waited in vain for {what}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}
