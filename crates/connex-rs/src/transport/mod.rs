//! The seam between the engine and whatever moves its bytes.
//!
//! Above this trait nothing knows sockets or UCX. A transport offers *connections* that carry
//! *frames* (a small head and an optional body) in order, says where a connection stands, and has a
//! descriptor to sleep on. One-sided access is a capability that a transport may have besides.
//!
//! # Rules
//! * One thread at a time drives a transport: the one that holds the engine's driver. No method
//!   blocks.
//! * Inside [`Transport::progress`] the transport reports through [`Upcalls`]; the engine never
//!   calls the transport back from there, it acts after `progress` returned.
//! * For each frame the transport calls [`Upcalls::frame`] once with the complete head and the
//!   length of the body; the answer says where the body goes. When all of the body is there (at once
//!   for an empty one) it calls [`Upcalls::body`] once. No second frame of that connection starts
//!   before the first one's `body`.
//! * [`Upcalls::closed`] is the last call for a connection and means that **nothing of the
//!   transport touches memory for that connection any more**: no source is read and no target written
//!   after it. Results of operations on a broken connection are reported only then (I2).
//! * A [`Lease`] inside a source or a target keeps the memory valid. The transport drops it as
//!   soon as the memory is not needed any more.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::RawFd;

use crate::device::Prober;
use crate::region::Lease;

#[doc(hidden)]
pub mod memory;
pub mod tcp;
pub mod ucx;

/// Names a connection within one engine. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ConnId(pub u64);

/// How soon a frame may go, relative to others of the same connection.
///
/// Frames of one class keep their order. `Urgent` frames may overtake `Bulk` ones, never the other
/// way round. A transport may treat both alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// Small requests, answers, control.
    Urgent,
    /// Pieces of large transfers, and whatever must stay behind them.
    Bulk,
}

/// The longest head of a frame, in bytes.
pub const MAX_HEAD: usize = 64;

/// The encoded head of a frame: at most [`MAX_HEAD`] bytes, held inline.
#[derive(Clone, Copy)]
pub struct Head {
    bytes: [u8; MAX_HEAD],
    len: u8,
}

impl Head {
    /// Copies `bytes` in.
    ///
    /// # Panics
    /// If there are more than [`MAX_HEAD`] bytes: heads are our own fixed structs, so that is a bug.
    pub fn new(bytes: &[u8]) -> Self {
        let mut head = Self {
            bytes: [0; MAX_HEAD],
            len: bytes.len() as u8,
        };
        head.bytes[..bytes.len()].copy_from_slice(bytes);
        head
    }

    /// The encoded bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl fmt::Debug for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Head({:02x?})", self.as_slice())
    }
}

/// Memory that a transport reads from: `len` bytes at `ptr`, valid while the lease lives.
#[derive(Debug)]
pub struct Source {
    /// First byte.
    pub ptr: *const u8,
    /// Bytes.
    pub len: usize,
    /// Keeps the memory there.
    pub lease: Lease,
}

// SAFETY: the pointer names memory that the lease keeps valid; it is dereferenced only by the one
// thread that drives the transport.
unsafe impl Send for Source {}

/// Memory that a transport writes to: `len` bytes at `ptr`, valid while the lease lives.
#[derive(Debug)]
pub struct Target {
    /// First byte.
    pub ptr: *mut u8,
    /// Bytes.
    pub len: usize,
    /// Keeps the memory there.
    pub lease: Lease,
}

// SAFETY: as for `Source`.
unsafe impl Send for Target {}

/// The body of a frame to be sent.
#[derive(Debug)]
pub enum Body {
    /// No bytes.
    Empty,
    /// Bytes that the frame owns.
    Bytes(Vec<u8>),
    /// Bytes of registered or caller's memory; read at any time until they are sent.
    Memory(Source),
}

impl Body {
    /// Bytes in the body.
    pub fn len(&self) -> usize {
        match self {
            Body::Empty => 0,
            Body::Bytes(bytes) => bytes.len(),
            Body::Memory(source) => source.len,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One frame to be sent.
#[derive(Debug)]
pub struct Frame {
    /// Encoded head.
    pub head: Head,
    /// Body; at most [`Caps::piece`] bytes.
    pub body: Body,
    /// Priority and order.
    pub class: Class,
}

/// Where the body of an incoming frame goes.
#[derive(Debug)]
pub enum Place {
    /// Into this memory, whose length is that of the body.
    Memory(Target),
    /// Into a vector, handed over with [`Received::Bytes`].
    Bytes,
    /// Nowhere: read it and forget it.
    Discard,
}

/// What became of the body of an incoming frame.
#[derive(Debug)]
pub enum Received {
    /// It lies in the memory that [`Place::Memory`] named (or was empty).
    Placed,
    /// Here it is.
    Bytes(Vec<u8>),
    /// It was thrown away.
    Discarded,
}

/// How a connection is to be closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Close {
    /// Deliver what was handed to `send`, then close. The engine bounds the time by a later `Abort`.
    Flush,
    /// Stop at once: what was not sent is dropped. `closed` comes as soon as no memory is in use.
    Abort,
}

/// Why a connection is gone.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Gone {
    /// The engine closed it.
    Local,
    /// The peer closed its side in order: end of stream.
    EndOfStream,
    /// The peer or something between refused or reset it.
    Reset {
        /// The system's or UCX's own words.
        detail: String,
    },
    /// A time-out of the kernel, of UCX or of the network: a suspicion, not a death.
    TimedOut {
        /// The system's or UCX's own words.
        detail: String,
    },
    /// The dial did not come through: refused, unreachable, no such device.
    Unreachable {
        /// The system's or UCX's own words.
        detail: String,
    },
    /// What came was not our protocol, or broke its rules.
    Protocol {
        /// What was wrong.
        detail: String,
    },
}

/// The engine refuses a frame: the connection is to be closed with this detail.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refuse(pub String);

/// What a transport tells the engine, from inside [`Transport::progress`].
pub trait Upcalls {
    /// A stranger connected; frames may follow.
    fn accepted(&mut self, conn: ConnId, from: SocketAddr);
    /// Our dial came through; frames may be sent and may come.
    fn connected(&mut self, conn: ConnId);
    /// The transport has proven who is at the other end (by a certificate's URI name). Before any frame, and before
    /// `connected` of a dial.
    fn proven(&mut self, conn: ConnId, subject: String) {
        let _ = (conn, subject);
    }
    /// Bytes came on this connection, be it in the middle of a frame.
    fn heard(&mut self, conn: ConnId);
    /// The head of a frame is complete and a body of `body_len` bytes follows: where to?
    ///
    /// # Errors
    /// [`Refuse`] if the frame breaks the protocol; the transport then closes the connection with
    /// [`Gone::Protocol`].
    fn frame(&mut self, conn: ConnId, head: &[u8], body_len: usize) -> Result<Place, Refuse>;
    /// The body of the last `frame` of this connection is complete.
    ///
    /// # Errors
    /// As for `frame`.
    fn body(&mut self, conn: ConnId, received: Received) -> Result<(), Refuse>;
    /// The connection is gone, see the rules of this module.
    fn closed(&mut self, conn: ConnId, why: Gone);
    /// Accept found no descriptor left and backs off.
    fn backed_off(&mut self) {}
}

/// What a connection can do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Caps {
    /// The longest body of one frame, in bytes.
    pub piece: usize,
    /// What carries it, for people: `tcp`, `ucx:tcp/lo`, `ucx:sysv`.
    pub path: String,
}

/// Something that moves frames between engines.
pub trait Transport: Send {
    /// `tcp`, `ucx`, `memory`.
    fn name(&self) -> &'static str;
    /// Where it listens.
    fn local_addr(&self) -> SocketAddr;
    /// Starts a connection. `connected` or `closed` follows.
    fn dial(&mut self, to: SocketAddr) -> ConnId;
    /// Queues a frame; it goes out at once where that is possible. On a connection that is closed or
    /// closing the frame is dropped (with its lease).
    fn send(&mut self, conn: ConnId, frame: Frame);
    /// Whether another frame of data of this class should be queued now. Asked before each piece, so
    /// that what a connection holds stays bounded and operations take turns. Control frames are queued
    /// without asking; a transport closes a connection whose peer does not take them.
    fn room(&self, conn: ConnId, class: Class) -> bool;
    /// Closes a connection. `closed` follows from `progress`, exactly once, whatever the mode.
    fn close(&mut self, conn: ConnId, how: Close);
    /// Does what can be done without waiting; returns how much there was (0: nothing).
    fn progress(&mut self, up: &mut dyn Upcalls) -> usize;
    /// Readable when `progress` has something to do, after `arm` said true.
    fn fd(&self) -> RawFd;
    /// Prepares to sleep on `fd`; false: there is work already, do not sleep.
    fn arm(&mut self) -> bool;
    /// What the connection can do; the piece size of a connection never changes.
    fn caps(&self, conn: ConnId) -> Caps;
    /// Stops listening. Connections stay.
    fn stop_listening(&mut self);
    /// Tells the kind of memory that the CUDA driver does not know, if the transport can.
    fn prober(&self) -> Option<Prober> {
        None
    }
    /// The one-sided capability, if there is one.
    fn one_sided(&mut self) -> Option<&mut dyn OneSided> {
        None
    }
}

/// A key of a peer's region on one connection, unpacked by the transport.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct KeyId(pub u64);

/// How puts are held apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fence {
    /// Later puts are posted when all earlier ones are in place: a round trip.
    InPlace,
    /// No later put is seen before the puts with this token and greater ones. The owner's side keeps the order of posting; where
    /// ours does not ([`OneSided::in_order`]) it is as `InPlace`.
    Posted {
        /// The first token.
        since: u64,
    },
}

/// One-sided access: the target's processor is not asked.
///
/// Completions come as [`OneSidedDone`] from [`OneSided::reap`], after `progress`.
pub trait OneSided {
    /// Whether one-sided transfers on this connection are done by hardware.
    fn usable(&self, conn: ConnId) -> bool;
    /// Whether its hardware can reach GPU memory.
    fn reaches_devices(&self) -> bool {
        false
    }
    /// Registers memory with the device; returns the key to be sent to peers.
    ///
    /// # Errors
    /// The transport's own words.
    fn register(&mut self, addr: usize, len: usize) -> Result<Vec<u8>, String>;
    /// Takes the registration back. Keys that peers hold are dead afterwards.
    fn deregister(&mut self, addr: usize);
    /// Makes a peer's key usable on this connection.
    ///
    /// # Errors
    /// The transport's own words: the bytes are not a key for this connection.
    fn unpack(&mut self, conn: ConnId, key: &[u8]) -> Result<KeyId, String>;
    /// Forgets an unpacked key.
    fn drop_key(&mut self, key: KeyId);
    /// Reads `target.len` bytes at `remote` in the peer.
    fn get(&mut self, conn: ConnId, key: KeyId, remote: u64, target: Target, token: u64);
    /// Writes `source.len` bytes to `remote` in the peer. Done means that they are in place there.
    fn put(&mut self, conn: ConnId, key: KeyId, remote: u64, source: Source, token: u64);
    /// Whether this side of the connection leaves puts, in either direction, in the order in which they are posted: one way
    /// for all of them, and nothing on it or behind it that lets a later one be seen before an earlier one. Only if both sides
    /// say so the order holds. It is for host memory; settled when the connection is, and never changes.
    fn in_order(&self, conn: ConnId) -> bool {
        let _ = conn;
        false
    }
    /// Orders later puts on this connection after earlier ones.
    fn fence(&mut self, conn: ConnId, fence: Fence);
    /// Operations that have ended since the last call.
    fn reap(&mut self, into: &mut Vec<OneSidedDone>);
}

/// The end of a one-sided operation.
#[derive(Debug)]
pub struct OneSidedDone {
    /// The connection it ran on.
    pub conn: ConnId,
    /// The caller's token.
    pub token: u64,
    /// How it ended.
    pub result: Result<(), String>,
}

/// Hands out connection names. The transports of one engine share one.
#[derive(Clone, Debug, Default)]
pub struct ConnIds(std::sync::Arc<std::sync::atomic::AtomicU64>);

impl ConnIds {
    /// The next free name.
    pub fn next(&self) -> ConnId {
        ConnId(self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1)
    }
}
