//! Two linked agents, and a path between them that can be slow, stall, or be reset.

use connex_tests::relay::Relay;

use super::*;

/// Two agents and what lies between them.
pub(crate) struct Path {
    pub(crate) a: Agent,
    pub(crate) b: Agent,
    /// The URL of `b` as `a` dials it.
    pub(crate) url: String,
    way: Way,
}

enum Way {
    /// A program that passes the bytes on, on loopback.
    Relay(Relay),
    /// Two namespaces. UCX's connections need this: the listener tells the dialler other ports to connect to, past any relay.
    Cable(Cable),
}

impl Path {
    /// Starts and links two agents.
    pub(crate) fn new(net: Net, beat_a: Option<(u64, u64)>, beat_b: Option<(u64, u64)>) -> Self {
        let (a, b, url, way) = match net {
            Net::Tcp => {
                let (a, _) = local(net, 0, beat_a);
                let (b, url) = local(net, 1, beat_b);
                let to = format!("127.0.0.1:{}", port_of(&url));
                let relay = Relay::new(to.parse().expect("an address"));
                (a, b, relay.url(&url), Way::Relay(relay))
            }
            Net::Ucx => {
                let cable = Cable::new();
                let (a, _) = on(net, &cable, Side::A, 0, beat_a);
                let (b, url) = on(net, &cable, Side::B, 1, beat_b);
                (a, b, url, Way::Cable(cable))
            }
        };
        link(&a, &b, &url);
        Self { a, b, url, way }
    }

    /// Limits it to so many bytes a second each way; 0: no limit.
    pub(crate) fn set_rate(&self, rate: u64) {
        match &self.way {
            Way::Relay(relay) => relay.set_rate(rate),
            Way::Cable(cable) => cable.set_rate(rate),
        }
    }

    /// Bytes that went through so far.
    pub(crate) fn passed(&self) -> u64 {
        match &self.way {
            Way::Relay(relay) => relay.passed(),
            Way::Cable(cable) => cable.sent(Side::A, "wire") + cable.sent(Side::B, "wire"),
        }
    }

    /// Passes no byte of a connection on, and keeps the connections, until told otherwise. Datagrams pass.
    pub(crate) fn stall(&self, stalled: bool) {
        match &self.way {
            Way::Relay(relay) => relay.stall(stalled),
            Way::Cable(cable) => {
                for side in [Side::A, Side::B] {
                    if stalled {
                        cable.stall_at(side);
                    } else {
                        cable.pass_at(side);
                    }
                }
            }
        }
    }

    /// Resets all connections.
    pub(crate) fn reset(&self) {
        match &self.way {
            Way::Relay(relay) => relay.reset(),
            Way::Cable(cable) => cable.reset_at(Side::A),
        }
    }
}
