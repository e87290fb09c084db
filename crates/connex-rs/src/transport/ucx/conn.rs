//! One connection over UCX.

use std::collections::VecDeque;
use std::sync::Arc;

use connex_ucx::{Endpoint, EpId, Lane, RemoteKey};
use rustc_hash::FxHashMap;

use super::nearby::Nearby;
use super::one_sided::{Puts, by_hardware};
use super::workers::{MAIN, WorkerId};
use crate::fork::Private;
use crate::region::Lease;
use crate::transport::{Caps, Class, ConnId, Frame, Gone, Upcalls};

/// Where a connection stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// Ours; the peer has not greeted yet.
    Dialing,
    /// Greeted or greeting, and still to be agreed whether the two sides go on in shared memory (see `nearby`).
    Agreeing,
    /// Frames go both ways.
    Open,
    /// We said goodbye and wait for the farewell.
    Leaving,
    /// Closed by force; UCX still owes us the ends of operations.
    Closing,
}

/// Memory that UCX may still read, and what it counts for.
#[derive(Debug)]
pub(super) struct Held {
    /// Held for its drop.
    pub(super) _lease: Option<Lease>,
    /// The key of a one-sided transfer: UCX uses it to the end.
    pub(super) _key: Option<Arc<RemoteKey>>,
    pub(super) bulk: usize,
    /// For a one-sided transfer: the caller's token, and whether it is a put.
    pub(super) one_sided: Option<(u64, bool)>,
}

/// A connection and what it holds.
#[derive(Debug)]
pub(super) struct Conn {
    /// Gone once a close was handed to UCX.
    pub(super) endpoint: Option<Endpoint>,
    pub(super) ep: EpId,
    /// The peer is reached through shared memory, or is about to be.
    pub(super) nearby: Option<Nearby>,
    /// The last that the peer said about that, as a kind of message.
    pub(super) last_said: Option<u16>,
    /// We dialled.
    pub(super) ours: bool,
    /// The peer's address is one of this host's.
    pub(super) same_host: bool,
    /// Endpoints whose end UCX still owes us.
    pub(super) ending: u32,
    pub(super) state: State,
    /// Why it will have been closed, if that is still to be reported.
    pub(super) why: Option<Gone>,
    /// Frames that were sent before the peer greeted.
    pub(super) waiting: VecDeque<Frame>,
    /// Close in order as soon as it is open.
    pub(super) flush_when_open: bool,
    /// The peer said that it closes in order.
    pub(super) goodbye: bool,
    /// The peer broke the rules; it is about to be closed.
    pub(super) broken: bool,
    pub(super) caps: Caps,
    /// One-sided transfers are done by hardware.
    pub(super) by_hardware: bool,
    /// Puts are placed in the order in which they are posted, as far as it is ours to say.
    pub(super) in_order: bool,
    /// Keeps UCX's socket from children; goes before the endpoint is closed.
    pub(super) private: Option<Private>,
    pub(super) puts: Puts,
    held: FxHashMap<u64, Held>,
    held_bulk: usize,
    next_token: u64,
}

impl Conn {
    pub(super) fn new(endpoint: Endpoint, state: State, caps: Caps) -> Self {
        Self {
            ep: endpoint.id(),
            endpoint: Some(endpoint),
            nearby: None,
            last_said: None,
            ours: state == State::Dialing,
            same_host: false,
            ending: 0,
            state,
            why: None,
            waiting: VecDeque::new(),
            flush_when_open: false,
            goodbye: false,
            broken: false,
            caps,
            by_hardware: false,
            in_order: false,
            private: None,
            puts: Puts::default(),
            held: FxHashMap::default(),
            held_bulk: 0,
            next_token: 1,
        }
    }

    /// Neither closed nor about to be because of what the peer did.
    pub(super) fn is_alive(&self) -> bool {
        self.state != State::Closing && !self.broken
    }

    /// It is settled what carries the frames: they may go both ways.
    pub(super) fn open(&mut self, id: ConnId, up: &mut dyn Upcalls) {
        self.state = State::Open;
        if self.ours {
            up.connected(id);
        }
    }

    /// What carries its frames: an endpoint and its worker.
    pub(super) fn carrier(&self) -> Option<(&Endpoint, WorkerId)> {
        match &self.nearby {
            Some(nearby) if nearby.in_use => Some((nearby.endpoint.as_ref()?, nearby.worker)),
            _ => Some((self.endpoint.as_ref()?, MAIN)),
        }
    }

    /// The worker that its frames come to.
    pub(super) fn carried_by(&self) -> WorkerId {
        match &self.nearby {
            Some(nearby) if nearby.in_use => nearby.worker,
            _ => MAIN,
        }
    }

    pub(super) fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }

    /// Remembers what an operation under way uses.
    pub(super) fn hold(&mut self, token: u64, lease: Option<Lease>, class: Class, bytes: usize) {
        let bulk = if class == Class::Bulk { bytes } else { 0 };
        self.held_bulk += bulk;
        let held = Held {
            _lease: lease,
            _key: None,
            bulk,
            one_sided: None,
        };
        self.held.insert(token, held);
    }

    /// The same for a one-sided transfer; `caller` is the engine's own token.
    pub(super) fn hold_one_sided(
        &mut self,
        token: u64,
        lease: Lease,
        key: Arc<RemoteKey>,
        caller: u64,
        put: bool,
    ) {
        let held = Held {
            _lease: Some(lease),
            _key: Some(key),
            bulk: 0,
            one_sided: Some((caller, put)),
        };
        self.held.insert(token, held);
    }

    /// An operation has ended; for a one-sided transfer the caller's token and whether it is a put.
    pub(super) fn release(&mut self, token: u64) -> Option<(u64, bool)> {
        let held = self.held.remove(&token)?;
        self.held_bulk -= held.bulk;
        held.one_sided
    }

    /// What one-sided transfers are left, by the caller's tokens.
    pub(super) fn one_sided_left(&mut self) -> Vec<u64> {
        let mut left: Vec<u64> = self
            .held
            .values()
            .filter_map(|h| h.one_sided.map(|(caller, _)| caller))
            .collect();
        left.extend(self.puts.drain());
        left
    }

    /// Bytes of bulk that have not gone.
    pub(super) fn bulk(&self) -> usize {
        self.held_bulk
            + self
                .waiting
                .iter()
                .filter(|f| f.class == Class::Bulk)
                .map(|f| f.body.len())
                .sum::<usize>()
    }

    /// Frames that have not gone.
    pub(super) fn frames(&self) -> usize {
        self.held.len() + self.waiting.len()
    }
}

/// What carries a connection, for people, and the longest piece that stays one fragment on it.
pub(super) fn caps_of(lanes: &[Lane], pieces: Pieces) -> Caps {
    let has = |names: &[&str]| lanes.iter().find(|l| names.contains(&l.transport.as_str()));
    if let Some(lane) = has(&["sysv"]) {
        return Caps {
            piece: pieces.shared_memory,
            path: format!("ucx:{}", lane.transport),
        };
    }
    let (mut piece, mut path) = (pieces.tcp, "ucx".to_owned());
    for lane in lanes {
        if lane.transport != "tcp" {
            piece = pieces.other;
        }
        // 1.22 names no device for some lanes.
        let named = if lane.device.is_empty() {
            format!("ucx:{}", lane.transport)
        } else {
            format!("ucx:{}/{}", lane.transport, lane.device)
        };
        if lane.transport != "tcp" || !path.contains('/') {
            path = named;
        }
    }
    // The lane that moves the data, not one that is there for keepalives.
    if let Some(lane) = lanes.iter().find(|lane| by_hardware(lane)) {
        path = format!("ucx:{}/{}", lane.transport, lane.device);
    }
    if lanes.is_empty() {
        piece = pieces.unknown;
    }
    Caps { piece, path }
}

/// The longest body of a frame, by what carries it: each must stay one eager fragment, for a larger message is put
/// together in memory of the sender's choosing, and slower.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Pieces {
    pub(super) tcp: usize,
    pub(super) shared_memory: usize,
    pub(super) other: usize,
    /// Where UCX cannot tell what carries it (before 1.14).
    pub(super) unknown: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_follow_the_lanes() {
        let pieces = Pieces {
            tcp: 240_000,
            shared_memory: 16_000,
            other: 8_000,
            unknown: 8_000,
        };
        let lane = |t: &str, d: &str| Lane {
            transport: t.into(),
            device: d.into(),
        };
        let caps = |lanes: &[Lane]| {
            let caps = caps_of(lanes, pieces);
            (caps.piece, caps.path)
        };
        assert_eq!(caps(&[lane("tcp", "lo")]), (240_000, "ucx:tcp/lo".into()));
        assert_eq!(
            caps(&[lane("tcp", "lo"), lane("sysv", "memory")]),
            (16_000, "ucx:sysv".into())
        );
        assert_eq!(
            caps(&[lane("rc_mlx5", "mlx5_0:1"), lane("tcp", "eth0")]),
            (8_000, "ucx:rc_mlx5/mlx5_0:1".into())
        );
        let keepalive = lane("ud_verbs", "rxe0:1");
        assert_eq!(
            caps(&[lane("rc_verbs", "rxe0:1"), keepalive]),
            (8_000, "ucx:rc_verbs/rxe0:1".into())
        );
        assert_eq!(caps(&[]), (8_000, "ucx".into()));
    }
}
