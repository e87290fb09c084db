//! The fault lab: what survivors see when peers die, hang, vanish and come back, and that no late byte lands.

use std::time::{Duration, Instant};

use connex_tests::agent::{Agent, Pending, text};
use connex_tests::net::{Cable, Side, need_root};
use connex_tests::relay::Relay;
use serde_json::{Value, json};

mod cables;
mod deaths;
mod identities;
mod lanes;
mod relays;

const AGENT: &str = env!("CARGO_BIN_EXE_connex-agent");

/// Heartbeats of the lab: interval and timeout in milliseconds.
const BEAT: (u64, u64) = (200, 1500);

fn soak() -> bool {
    std::env::var_os("CONNEX_SOAK").is_some_and(|v| v == "1")
}

/// An agent on this host's loopback with its engine started.
fn local(stage: u32, beat: Option<(u64, u64)>) -> (Agent, String) {
    let agent = Agent::spawn(AGENT, &[]);
    let url = agent.start(config(stage, "127.0.0.1", 0, beat));
    (agent, url)
}

/// An agent on a side of a cable with its engine started.
fn on(cable: &Cable, side: Side, stage: u32, beat: Option<(u64, u64)>) -> (Agent, String) {
    let agent = Agent::spawn(AGENT, &["ip", "netns", "exec", cable.name(side)]);
    let url = agent.start(config(stage, Cable::ip(side), 0, beat));
    (agent, url)
}

fn config(stage: u32, ip: &str, port: u16, beat: Option<(u64, u64)>) -> Value {
    let (heartbeat, timeout) = beat.unzip();
    json!({"stage": stage, "ip": ip, "port": port, "heartbeat": heartbeat, "timeout": timeout})
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
