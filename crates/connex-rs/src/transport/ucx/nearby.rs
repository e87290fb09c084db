//! Two sides that find out, once connected, that they are on one host, and go on in shared memory.
//!
//! 1. The accepting side greets with its domain: what two processes must have in common to share memory.
//! 2. The dialling side, if its own is the same, makes a worker for this peer alone, and asks to join it.
//! 3. The accepting side makes one too, joins it to the peer's, and says where its own is.
//! 4. The dialling side joins, and says so through shared memory. From then on all frames go there.
//!
//! Whoever cannot go on says that they stay apart: the frames go over the connection at hand. No frame is sent before that
//! is settled, so none overtakes another on its way over the other path. The first connection stays in any case: it tells
//! of the peer's death.
//!
//! UCX reads a worker's address without a check of its own, so one is taken from a peer of this host alone.

use connex_ucx::{CloseMode, Endpoint, EpId};

use super::conn::{Conn, State};
use super::workers::WorkerId;
use super::{Ucx, kind};
use crate::transport::{ConnId, Upcalls};

/// The way to a peer of this host.
#[derive(Debug)]
pub(super) struct Nearby {
    pub(super) worker: WorkerId,
    /// There once the peer's worker was joined, gone once a close was handed to UCX.
    pub(super) endpoint: Option<Endpoint>,
    ep: Option<EpId>,
    /// Agreed: frames go this way.
    pub(super) in_use: bool,
}

/// What the other side said.
#[derive(Debug)]
pub(super) enum Said {
    /// The accepting side's greeting, with its domain.
    Greeting(Vec<u8>),
    /// Where its worker is: the dialling side's wish, or the accepting side's consent.
    Join(Vec<u8>),
    /// The dialling side has come, through shared memory.
    Here,
    /// Frames go over the connection at hand.
    Apart,
}

/// Reads what the peer says about going on in shared memory.
///
/// # Errors
/// It is not its turn, or came another way than it should.
pub(super) fn hear(
    conn: &mut Conn,
    from: WorkerId,
    kind: u16,
    data: &[u8],
) -> Result<Said, String> {
    let own_way = conn.nearby.as_ref().is_some_and(|n| n.worker == from);
    let said = match (conn.state, conn.ours, conn.last_said, kind) {
        (State::Dialing, true, None, kind::GREETING) if data.is_empty() => Said::Apart,
        (State::Dialing, true, None, kind::GREETING) => Said::Greeting(data.to_vec()),
        (State::Agreeing, true, Some(kind::GREETING), kind::JOINED)
        | (State::Agreeing, false, None, kind::JOIN) => Said::Join(data.to_vec()),
        (State::Agreeing, true, Some(kind::GREETING), kind::APART)
        | (State::Agreeing, false, None | Some(kind::JOIN), kind::APART) => Said::Apart,
        (State::Agreeing, false, Some(kind::JOIN), kind::HERE) if own_way => Said::Here,
        _ => {
            return Err(format!(
                "a message of kind {kind} about shared memory came out of turn"
            ));
        }
    };
    conn.last_said = Some(kind);
    match &said {
        Said::Greeting(_) => conn.state = State::Agreeing,
        Said::Here => {
            if let Some(nearby) = &mut conn.nearby {
                nearby.in_use = true;
            }
        }
        Said::Join(_) | Said::Apart => {}
    }
    Ok(said)
}

impl Ucx {
    /// Does what follows from what the peer said.
    pub(super) fn agree(&mut self, id: ConnId, said: Said, up: &mut dyn Upcalls) {
        let Some(conn) = self.table.conns.get(&id).filter(|conn| conn.is_alive()) else {
            return;
        };
        let (ours, same_host) = (conn.ours, conn.same_host);
        match said {
            Said::Greeting(theirs) => {
                self.keep_private(id);
                let ours = self.workers.domain().map(str::as_bytes);
                let shared = same_host && ours == Some(&theirs);
                match shared.then(|| self.make_nearby(id)).flatten() {
                    Some(address) => self.post_bytes(id, kind::JOIN, address),
                    None => self.stay_apart(id, up),
                }
            }
            Said::Join(theirs) if ours => {
                if self.join_nearby(id, &theirs) {
                    self.go_nearby(id, up);
                } else {
                    self.stay_apart(id, up);
                }
            }
            Said::Join(theirs) => match self.make_nearby(id) {
                Some(address) if self.join_nearby(id, &theirs) => {
                    self.post_bytes(id, kind::JOINED, address);
                }
                _ => self.stay_apart(id, up),
            },
            Said::Here => self.settled(id),
            Said::Apart => {
                self.leave_nearby(id);
                self.settled(id);
            }
        }
    }

    /// Makes the worker for this peer; where it is reached.
    fn make_nearby(&mut self, id: ConnId) -> Option<Vec<u8>> {
        // The last place may have been taken since it was offered.
        self.workers.domain()?;
        let made = self.workers.make();
        let (worker, fd, address) = made.inspect_err(|e| cannot(e)).ok()?;
        // One that cannot be slept on would keep its peer waiting.
        if !self.gate.watch_worker(fd) {
            self.workers.end(worker);
            return None;
        }
        let conn = self.table.conns.get_mut(&id)?;
        conn.nearby = Some(Nearby {
            worker,
            endpoint: None,
            ep: None,
            in_use: false,
        });
        Some(address)
    }

    /// Joins the peer's worker to ours.
    fn join_nearby(&mut self, id: ConnId, theirs: &[u8]) -> bool {
        let conn = self.table.conns.get_mut(&id);
        let Some(nearby) = conn.and_then(|conn| conn.nearby.as_mut()) else {
            return false;
        };
        let worker = self.workers.get(nearby.worker);
        match worker.join(theirs, "a peer of this host") {
            Ok(endpoint) => {
                let key = (nearby.worker, endpoint.id());
                self.table.by_ep.insert(key, id);
                nearby.ep = Some(endpoint.id());
                nearby.endpoint = Some(endpoint);
                true
            }
            Err(e) => {
                cannot(&e.to_string());
                false
            }
        }
    }

    /// The dialling side's last step.
    fn go_nearby(&mut self, id: ConnId, up: &mut dyn Upcalls) {
        let conn = self.table.conns.get_mut(&id);
        if let Some(nearby) = conn.and_then(|conn| conn.nearby.as_mut()) {
            nearby.in_use = true;
        }
        self.post_bytes(id, kind::HERE, Vec::new());
        self.agreed(id, up);
    }

    fn stay_apart(&mut self, id: ConnId, up: &mut dyn Upcalls) {
        self.leave_nearby(id);
        self.post_bytes(id, kind::APART, Vec::new());
        self.agreed(id, up);
    }

    /// Settled by us.
    fn agreed(&mut self, id: ConnId, up: &mut dyn Upcalls) {
        let conn = self.table.conns.get_mut(&id);
        let Some(conn) = conn.filter(|conn| conn.is_alive()) else {
            return;
        };
        conn.open(id, up);
        self.settled(id);
    }

    /// Gives up the way through shared memory, on which nothing has been sent.
    fn leave_nearby(&mut self, id: ConnId) {
        let conn = self.table.conns.get_mut(&id);
        if let Some(nearby) = conn.and_then(|conn| conn.nearby.take()) {
            self.end_nearby(nearby);
        }
    }

    /// Ends the worker of a peer whose connection is over, or goes on without it.
    pub(super) fn end_nearby(&mut self, nearby: Nearby) {
        if let Some(ep) = nearby.ep {
            self.table.by_ep.remove(&(nearby.worker, ep));
        }
        if let Some(endpoint) = nearby.endpoint {
            // Cannot fail: the endpoint is this worker's, which sees to the rest when it ends.
            let _ = endpoint.close(self.workers.get(nearby.worker), CloseMode::Force);
        }
        if let Some(fd) = self.workers.event_fd(nearby.worker) {
            self.gate.forget_worker(fd);
        }
        self.workers.end(nearby.worker);
    }
}

fn cannot(reason: &str) {
    tracing::warn!(
        target: "connex_rs::transport",
        %reason,
        "no shared memory with a peer of this host: it is reached over TCP"
    );
}
