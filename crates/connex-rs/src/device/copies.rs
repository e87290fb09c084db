//! What waits for copies between host and device, in order.
//!
//! Two lines, one for each way: what leaves the device goes out to peers when its copy is done, what has come for the
//! device counts as arrived then. A line also takes work without a copy of its own that must stay behind others of its
//! connection. While anything of a connection is in a line, device and staging memory may be touched for it: its end is told
//! only afterwards (I2).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::Residence;
use super::buffers::{Buffer, Pool};
use super::driver::{Driver, Lane};
use crate::region::Lease;
use crate::transport::{ConnId, Gone};

/// Pieces that one connection may have in a line, and buffers that it may have in use for sending.
pub(crate) const MAX_PIECES: usize = 32;

/// The way of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Way {
    In,
    Out,
}

/// A copy under way. Dropped, its memory is let go: only when it [has ended](Copy::ended), or with its lane.
#[derive(Debug)]
pub(crate) struct Copy {
    lane: Arc<Lane>,
    event: usize,
    _keep: Keep,
}

/// What a copy uses until it has ended.
#[derive(Debug)]
pub(crate) struct Keep {
    host: Host,
    /// The memory on the device.
    _device: Lease,
}

#[derive(Debug)]
enum Host {
    Buffer(Arc<Buffer>),
    Bytes(Vec<u8>),
}

impl Keep {
    /// A staging buffer, and the memory on the device.
    pub(crate) fn buffer(buffer: Arc<Buffer>, device: Lease) -> Self {
        Self {
            host: Host::Buffer(buffer),
            _device: device,
        }
    }

    /// Bytes of their own, and the memory on the device.
    pub(crate) fn bytes(bytes: Vec<u8>, device: Lease) -> Self {
        Self {
            host: Host::Bytes(bytes),
            _device: device,
        }
    }

    fn host(&self) -> *const u8 {
        match &self.host {
            Host::Buffer(buffer) => buffer.ptr(),
            Host::Bytes(bytes) => bytes.as_ptr(),
        }
    }
}

impl Copy {
    fn ended(&self) -> Result<bool, String> {
        self.lane.happened(self.event)
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        self.lane.recycle(self.event);
    }
}

/// Work in order, some of it behind copies.
#[derive(Debug)]
pub(crate) struct Line<T> {
    entries: VecDeque<(ConnId, Option<Copy>, T)>,
    of: HashMap<ConnId, usize>,
}

impl<T> Default for Line<T> {
    fn default() -> Self {
        Self {
            entries: VecDeque::new(),
            of: HashMap::new(),
        }
    }
}

impl<T> Line<T> {
    /// Entries of a connection.
    pub(crate) fn count(&self, conn: ConnId) -> usize {
        self.of.get(&conn).copied().unwrap_or(0)
    }

    /// Whether the connection has any.
    pub(crate) fn holds(&self, conn: ConnId) -> bool {
        self.of.contains_key(&conn)
    }

    pub(crate) fn push(&mut self, conn: ConnId, copy: Option<Copy>, what: T) {
        *self.of.entry(conn).or_insert(0) += 1;
        self.entries.push_back((conn, copy, what));
    }

    /// Puts work back whose copy could only start now.
    pub(crate) fn push_front(&mut self, conn: ConnId, copy: Copy, what: T) {
        *self.of.entry(conn).or_insert(0) += 1;
        self.entries.push_front((conn, Some(copy), what));
    }

    /// Takes the first entry if nothing of it is under way; with what its copy came to.
    pub(crate) fn next(&mut self) -> Option<(ConnId, Result<(), String>, T)> {
        let result = match &self.entries.front()?.1 {
            None => Ok(()),
            Some(copy) => match copy.ended() {
                Ok(false) => return None,
                Ok(true) => Ok(()),
                // A context that reports errors has stopped: nothing copies in it any more.
                Err(text) => Err(text),
            },
        };
        let (conn, _, what) = self.entries.pop_front()?;
        if let Some(count) = self.of.get_mut(&conn) {
            *count -= 1;
            if *count == 0 {
                self.of.remove(&conn);
            }
        }
        Some((conn, result, what))
    }
}

/// The copies of an engine, and the two lines behind them.
#[derive(Debug)]
pub(crate) struct Copies<O, I> {
    /// To peers.
    pub(crate) out: Line<O>,
    /// To the device.
    pub(crate) arrivals: Line<I>,
    /// Connections that have ended while they had something in a line.
    ended: Vec<(ConnId, Gone)>,
    /// Counts the buffers of each connection.
    tokens: HashMap<ConnId, Arc<()>>,
    lanes: HashMap<(Residence, Way), Arc<Lane>>,
    pool: Arc<Pool>,
}

impl<O, I> Copies<O, I> {
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        Self {
            out: Line::default(),
            arrivals: Line::default(),
            ended: Vec::new(),
            tokens: HashMap::new(),
            lanes: HashMap::new(),
            pool,
        }
    }

    /// Whether copies are under way: whoever drives must look again soon, for no descriptor tells of their end.
    pub(crate) fn is_busy(&self) -> bool {
        !(self.out.entries.is_empty() && self.arrivals.entries.is_empty() && self.ended.is_empty())
    }

    /// Whether memory may still be touched for a connection.
    pub(crate) fn holds(&self, conn: ConnId) -> bool {
        self.out.holds(conn) || self.arrivals.holds(conn)
    }

    /// Keeps the end of a connection until nothing of it is in a line.
    pub(crate) fn end_later(&mut self, conn: ConnId, why: Gone) {
        self.ended.push((conn, why));
    }

    /// A kept end whose time has come.
    pub(crate) fn next_end(&mut self) -> Option<(ConnId, Gone)> {
        let (out, arrivals) = (&self.out, &self.arrivals);
        let index = self
            .ended
            .iter()
            .position(|(conn, _)| !(out.holds(*conn) || arrivals.holds(*conn)))?;
        Some(self.ended.swap_remove(index))
    }

    /// A connection is gone.
    pub(crate) fn forget(&mut self, conn: ConnId) {
        self.tokens.remove(&conn);
    }

    /// Whether a connection may have another piece for sending.
    pub(crate) fn may_send(&self, conn: ConnId) -> bool {
        let in_use = self
            .tokens
            .get(&conn)
            .map_or(0, |token| Arc::strong_count(token) - 1);
        self.out.count(conn) < MAX_PIECES && in_use < 2 * MAX_PIECES
    }

    /// A staging buffer for a piece of a connection.
    pub(crate) fn buffer(&mut self, conn: ConnId, residence: Residence) -> Option<Arc<Buffer>> {
        let token = self.tokens.entry(conn).or_default().clone();
        let driver = Driver::known()?;
        Some(Arc::new(self.pool.take(driver, residence.context, token)))
    }

    /// Starts a copy of `len` bytes from the device into a staging buffer.
    pub(crate) fn start_out(
        &mut self,
        residence: Residence,
        from: usize,
        len: usize,
        buffer: Arc<Buffer>,
        lease: Lease,
    ) -> Result<Copy, String> {
        debug_assert!(len <= super::buffers::BUFFER);
        let lane = self.lane(residence, Way::Out)?;
        // SAFETY: the copy holds the lease of the device memory and the buffer, which nobody else writes, until it has
        // ended.
        let event = unsafe { lane.copy_out(buffer.ptr(), from, len) }?;
        Ok(Copy {
            lane,
            event,
            _keep: Keep::buffer(buffer, lease),
        })
    }

    /// Starts a copy of `len` bytes of `keep` to the device.
    pub(crate) fn start_in(
        &mut self,
        residence: Residence,
        to: usize,
        len: usize,
        keep: Keep,
    ) -> Result<Copy, String> {
        let lane = self.lane(residence, Way::In)?;
        // SAFETY: the copy holds the lease of the device memory and the bytes, which nobody changes, until it has ended.
        let event = unsafe { lane.copy_in(to, keep.host(), len) }?;
        Ok(Copy {
            lane,
            event,
            _keep: keep,
        })
    }

    fn lane(&mut self, residence: Residence, way: Way) -> Result<Arc<Lane>, String> {
        let driver = Driver::known().ok_or("this process has no CUDA driver")?;
        // Managed and device memory of one context share a lane: copies into both keep their order.
        let key = (
            Residence {
                kind: super::Kind::Cuda,
                ..residence
            },
            way,
        );
        if let Some(lane) = self.lanes.get(&key) {
            return Ok(lane.clone());
        }
        let lane = Arc::new(Lane::new(driver, residence.context)?);
        self.lanes.insert(key, lane.clone());
        Ok(lane)
    }
}
