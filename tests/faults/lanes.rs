//! Long streams of signals, chains and steps with checksums in the consumer, over one cable and over two.
#![allow(
    clippy::print_stderr,
    reason = "how long each stream took, for who runs the soak"
)]

use super::*;

/// Variables of both processes, as arguments of `env`.
type Variables<'a> = &'a [&'a str];

/// Two devices, of which UCX may use both.
const BOTH: Variables<'_> = &[
    "UCX_TLS=tcp",
    "UCX_NET_DEVICES=wire,wire2",
    "UCX_CM_USE_ALL_DEVICES=y",
    "UCX_MAX_RNDV_RAILS=2",
    "UCX_MAX_RMA_RAILS=2",
    "UCX_MAX_RMA_LANES=2",
];

/// One-sided transfers, emulated: what RDMA does, with its several lanes.
const ONE_SIDED: &str = "CONNEX_RS_FORCE_ONE_SIDED=1";

/// Two agents, a producer and a consumer, that are linked.
struct Lab {
    cable: Cable,
    a: Agent,
    b: Agent,
    url_a: String,
    url_b: String,
}

impl Lab {
    fn new(cables: usize, net: Net, variables: Variables<'_>) -> Self {
        let cable = Cable::new();
        if cables == 2 {
            cable.double();
        }
        for wire in &["wire", "wire2"][..cables] {
            wait_for("the cable", || {
                cable.runs(Side::A, wire) && cable.runs(Side::B, wire)
            });
        }
        let start = |side, stage| {
            let mut words = vec!["ip", "netns", "exec", cable.name(side), "env"];
            words.extend_from_slice(variables);
            let agent = Agent::spawn(AGENT, &words);
            let url = agent.start(config(net, stage, Cable::ip(side), 0, None));
            (agent, url)
        };
        let (a, url_a) = start(Side::A, 0);
        let (b, url_b) = start(Side::B, 1);
        link(&a, &b, &url_b);
        Self {
            cable,
            a,
            b,
            url_a,
            url_b,
        }
    }

    /// One stream from its first payload to its last; panics with what is wrong in it.
    fn stream(&self, kind: &str, lens: &[usize], count: u64, slots: usize) {
        let plan = json!({"kind": kind, "lens": lens, "count": count, "slots": slots});
        let order = |what: &str, url: &str, ring: u64| {
            let mut order = plan.clone();
            order["do"] = json!(what);
            order["url"] = json!(url);
            order["ring"] = json!(ring);
            order
        };
        let ring = match kind {
            "channel" => 0,
            _ => {
                let made = self.b.call(order("ring", "", 0));
                made["addr"].as_u64().expect("an address")
            }
        };
        let begun = Instant::now();
        let consumer = self.b.post(order("consume", &self.url_a, ring));
        let producer = self.a.post(order("produce", &self.url_b, ring));
        let time = Duration::from_secs(if soak() { 3600 } else { 180 });
        let (consumed, produced) = (consumer.wait_for(time), producer.wait_for(time));
        let well = consumed.is_null() && produced.is_null();
        assert!(well, "{kind}: consumer {consumed}, producer {produced}");
        eprintln!("{count} x {kind} of {lens:?}: {:?}", begun.elapsed());
    }

    /// Small, large and mixed payloads of every kind.
    fn streams(&self) {
        for kind in ["signal", "chain", "channel"] {
            let (small, large) = if soak() { (1_000_000, 1000) } else { (3000, 3) };
            self.stream(kind, &[256], small, 64);
            self.stream(kind, &[64 << 20], large, 2);
            // Of every class of the transport and from one piece to many, so that a later one could overtake.
            let mixed = [8, 300_000, 100, 65_536, 5000, 1 << 20, 1, 250_000];
            self.stream(kind, &mixed, if soak() { 20_000 } else { 200 }, 16);
        }
        assert_eq!(self.a.stat("eps_created"), 1, "one connection");
    }
}

#[test]
fn streams_over_tcp() {
    Lab::new(1, Net::Tcp, &[]).streams();
}

#[test]
fn streams_over_tcp_with_two_devices() {
    let lab = Lab::new(2, Net::Tcp, &[]);
    lab.streams();
    // One connection has one device: that of the address which was dialled.
    assert!(lab.cable.sent(Side::A, "wire") > 3 * (64 << 20));
    assert!(lab.cable.sent(Side::A, "wire2") < 1 << 20);
}

#[test]
fn streams_over_ucx() {
    Lab::new(1, Net::Ucx, &["UCX_TLS=tcp"]).streams();
}

#[test]
fn streams_over_ucx_one_sided() {
    Lab::new(1, Net::Ucx, &["UCX_TLS=tcp", ONE_SIDED]).streams();
}

#[test]
fn streams_over_ucx_with_two_devices() {
    Lab::new(2, Net::Ucx, BOTH).streams();
}

#[test]
fn streams_over_ucx_one_sided_with_two_lanes() {
    let variables: Vec<&str> = BOTH.iter().copied().chain([ONE_SIDED]).collect();
    let lab = Lab::new(2, Net::Ucx, &variables);
    lab.streams();
    for wire in ["wire", "wire2"] {
        let sent = lab.cable.sent(Side::A, wire);
        assert!(
            sent > 64 << 20,
            "{wire} carried {sent} bytes: not two lanes"
        );
    }
}

#[test]
fn rails_that_break_the_order_are_refused() {
    let cable = Cable::new();
    let name = cable.name(Side::A);
    let words = ["ip", "netns", "exec", name, "env", "UCX_MAX_EAGER_RAILS=2"];
    let agent = Agent::spawn(AGENT, &words);
    let mut order = config(Net::Ucx, 0, Cable::ip(Side::A), 0, None);
    order["do"] = json!("start");
    let answer = agent.post(order).wait();
    let said = text(&answer["error"]);
    assert!(said.contains("UCX_MAX_EAGER_RAILS=2"), "{said}");
}
