//! The workers of a transport: one that listens and reaches other hosts, and one for each peer of this host.
//!
//! The queue of UCX's shared memory belongs to a worker and is filled by all who send to it. A sender that is killed between
//! taking a place there and filling it leaves it stuck for good. So a peer of this host gets a worker that it shares with
//! nobody: what its death leaves behind goes with that worker, and no other peer is disturbed (I6).
//!
//! The two sides connect with their main workers, over TCP, and agree there to go on in shared memory (see `nearby`): a
//! connection of UCX's own that has both takes it tens of milliseconds to plan, and sides of which only one can offer shared memory
//! could not connect at all. The first connection stays: it tells of the peer's death.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::RawFd;

use connex_ucx::{Context, Event, Worker};

use super::kind;
use crate::host;

/// How many peers of this host get a worker of their own: each costs 2.4 MB of shared memory, some descriptors, and a look at
/// each round. Further ones are reached over TCP.
const OWN_LIMIT: usize = 32;

/// What must be left of the kernel's limits for a worker to be made: the peer needs one too, and others of this host have theirs.
/// A worker takes two segments.
const SEGMENTS_LEFT: u64 = 16;
const BYTES_LEFT: u64 = 16 << 20;

/// Names a worker within its transport. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(super) struct WorkerId(u32);

/// The one that listens.
pub(super) const MAIN: WorkerId = WorkerId(0);

/// The workers, in the order in which they go: connections that were accepted at the main one's listener are
/// over before it is.
pub(super) struct Workers {
    own: BTreeMap<WorkerId, Worker>,
    main: Worker,
    same_host: Option<SameHost>,
    last: WorkerId,
}

/// Where shared memory may be used: its context.
struct SameHost {
    context: Context,
    /// Equal on both sides that can share memory.
    domain: String,
}

impl Workers {
    /// The main worker in `context`; those of peers of this host, if they are to have any, in `same_host`.
    ///
    /// # Errors
    /// UCX's words.
    pub(super) fn new(context: &Context, same_host: Option<Context>) -> Result<Self, String> {
        Ok(Self {
            own: BTreeMap::new(),
            main: worker(context)?,
            same_host: same_host.and_then(SameHost::new),
            last: MAIN,
        })
    }

    pub(super) fn main(&mut self) -> &mut Worker {
        &mut self.main
    }

    pub(super) fn context(&self) -> &Context {
        self.main.context()
    }

    /// The worker of that name, which is there as long as a connection uses it.
    pub(super) fn get(&mut self, id: WorkerId) -> &mut Worker {
        self.own.get_mut(&id).unwrap_or(&mut self.main)
    }

    /// What tells whether a peer can share memory with this transport; `None`: nobody can, at the moment.
    pub(super) fn domain(&self) -> Option<&str> {
        let free = self.own.len() < OWN_LIMIT;
        self.same_host
            .as_ref()
            .filter(|_| free)
            .map(|home| home.domain.as_str())
    }

    /// Makes a worker for one peer of this host; its name, what to sleep on, and where the peer's reaches it.
    ///
    /// # Errors
    /// UCX's words.
    pub(super) fn make(&mut self) -> Result<(WorkerId, RawFd, Vec<u8>), String> {
        let home = self.same_host.as_ref().ok_or("no shared memory")?;
        check_memory()?;
        let worker = worker(&home.context)?;
        let fd = worker.event_fd().map_err(|e| e.to_string())?;
        let address = worker.address().map_err(|e| e.to_string())?;
        self.last.0 += 1;
        self.own.insert(self.last, worker);
        Ok((self.last, fd, address))
    }

    /// From now on the peers of this host are reached like others.
    #[cfg(test)]
    pub(super) fn keep_to_main(&mut self) {
        self.same_host = None;
    }

    /// How many there are.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        1 + self.own.len()
    }

    /// Ends a worker whose connection is over; the main one stays.
    pub(super) fn end(&mut self, id: WorkerId) {
        self.own.remove(&id);
    }

    /// What to sleep on for the worker `id`.
    pub(super) fn event_fd(&self, id: WorkerId) -> Option<RawFd> {
        self.own.get(&id)?.event_fd().ok()
    }

    /// Calls `step` with each of them; gives the sum of what it gave. Each is looked at in each round, for a worker must not be slept
    /// on with steps left that nothing but progress brings about.
    pub(super) fn each(&mut self, mut step: impl FnMut(WorkerId, &mut Worker) -> usize) -> usize {
        let main = step(MAIN, &mut self.main);
        let own = self.own.iter_mut().map(|(&id, worker)| step(id, worker));
        main + own.sum::<usize>()
    }

    /// The next event of any of them.
    pub(super) fn next_event(&mut self) -> Option<(WorkerId, Event)> {
        if let Some(event) = self.main.next_event() {
            return Some((MAIN, event));
        }
        self.own
            .iter_mut()
            .find_map(|(&id, worker)| Some((id, worker.next_event()?)))
    }

    /// Prepares all of them to be slept on; false if one has something to do, or cannot be slept on.
    pub(super) fn arm(&mut self) -> bool {
        std::iter::once(&mut self.main)
            .chain(self.own.values_mut())
            .all(|worker| worker.arm().unwrap_or(false))
    }
}

/// Whether enough shared memory is left for another worker: UCX has loud words where it is not.
///
/// # Errors
/// What is left, what it takes, and the way out.
pub(super) fn check_memory() -> Result<(), String> {
    let left = host::shared_memory_left();
    if left.segments >= SEGMENTS_LEFT && left.bytes >= BYTES_LEFT {
        return Ok(());
    }
    Err(format!(
        "the kernel's limits leave {} segments and {} MB of System V shared memory to this process's name space, and {SEGMENTS_LEFT} \
         segments and {} MB are wanted: raise kernel.shmmni and kernel.shmall with sysctl, or set UCX_TLS=tcp",
        left.segments,
        left.bytes >> 20,
        BYTES_LEFT >> 20
    ))
}

fn worker(context: &Context) -> Result<Worker, String> {
    let mut worker = Worker::new(context).map_err(|e| e.to_string())?;
    for kind in kind::ALL {
        worker.accept_messages(kind).map_err(|e| e.to_string())?;
    }
    Ok(worker)
}

impl SameHost {
    fn new(context: Context) -> Option<Self> {
        let domain = host::shared_memory_domain();
        // Versions do not promise to read each other's queues.
        let version = context.library().version();
        (!domain.is_empty()).then(|| Self {
            domain: format!("{version} {domain}"),
            context,
        })
    }
}

/// Whether an address is this host's, so that who uses it is here too. (Another name space of the same host has other
/// addresses, and may not share memory.)
pub(super) fn is_own(addr: IpAddr) -> bool {
    let addr = addr.to_canonical();
    addr.is_loopback() || host::interface_of(addr).is_some()
}
