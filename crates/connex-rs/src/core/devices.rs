//! GPU memory on either side of a transfer: pieces that are copied by the driver before they go, or after they came.
//!
//! Peers see none of it: a piece is a piece. What differs is *when*: a piece from GPU memory is sent when its copy is done,
//! one for GPU memory counts as placed then, and whatever must not overtake it (a chain's flag, a signal, the end of a write, the end
//! of the connection) waits in line behind it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::requests::{in_the_peer, store_flag};
use super::{Core, Flag, Link, Out, Stream};
use crate::device::Residence;
use crate::device::buffers::{BUFFER, Buffer};
use crate::device::copies::{Keep, MAX_PIECES};
use crate::error::{Error, ErrorKind};
use crate::peer::Why;
use crate::region::{Granted, Lease};
use crate::transfer::{OpId, Work};
use crate::transport::{Body, Class, ConnId, Frame, Place, Received, Refuse, Source, Target};
use crate::wire::MsgPiece;

/// How long a device may take for copies that hold up everything else of their connection.
const PATIENCE: Duration = Duration::from_secs(1);

/// A frame that goes out when it is its turn.
#[derive(Debug)]
pub(super) struct Departure {
    frame: Frame,
    op: Option<OpId>,
}

/// Where a piece for GPU memory goes.
#[derive(Debug)]
pub(super) struct Landing {
    residence: Residence,
    addr: usize,
    len: usize,
    lease: Lease,
    /// Staging memory; without it the piece is received into bytes of its own.
    buffer: Option<Arc<Buffer>>,
}

impl Landing {
    /// Where the transport puts it.
    pub(super) fn place(&self) -> Place {
        match &self.buffer {
            Some(buffer) => Place::Memory(Target {
                ptr: buffer.ptr(),
                len: self.len,
                lease: Lease::of(buffer.clone()),
            }),
            None => Place::Bytes,
        }
    }
}

/// What is to be done with a piece of a write once it is here.
#[derive(Debug)]
pub(super) enum Store {
    /// Nothing: it lies where it belongs.
    InPlace,
    /// A chain's flag of a few bytes: stored at once.
    Flag(Flag),
    /// Part of a longer flag in host memory, which waits for the copies before it.
    Late { addr: usize, _lease: Lease },
    /// Copied to the device.
    Device(Landing),
    /// The same, but not started before all copies before it have ended: they may be another device's.
    DeviceInTurn(Landing),
}

/// What has come, and counts when it is its turn.
#[derive(Debug)]
pub(super) enum Arrival {
    /// A piece of an answer to us.
    Data { op: OpId, elem: usize, len: usize },
    /// A piece of a peer's write, with what is to be done in its turn.
    Write {
        req: u64,
        last: bool,
        bytes: u64,
        store: Store,
        received: Received,
    },
    /// A piece of a signal.
    Letter(MsgPiece, Vec<u8>),
}

/// Where the next piece of a stream comes from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Origin {
    residence: Option<Residence>,
    op: Option<OpId>,
}

impl Origin {
    /// The longest piece.
    pub(super) fn piece(self) -> usize {
        self.residence.map_or(usize::MAX, |_| BUFFER)
    }
}

impl Link {
    /// Puts a stream back whose turn has not come.
    pub(super) fn put_back(&mut self, stream: Stream, class: Class) {
        match class {
            Class::Urgent => self.small.push_front(stream),
            Class::Bulk => self.bulk.push_front(stream),
        }
    }
}

impl Core {
    /// Whether copies are under way, of whose end no descriptor tells.
    pub(crate) fn is_copying(&self) -> bool {
        self.copies.is_busy()
    }

    /// A peer's request on memory that it may use: whether the engine can serve it.
    pub(super) fn usable(&self, granted: Granted, addr: u64, len: u64) -> Result<Granted, String> {
        match self.shared.devices.refuses(granted.residence, len, false) {
            Some(why) => Err(in_the_peer(&why, addr)),
            None => Ok(granted),
        }
    }

    // ---- what goes out ------------------------------------------------------------------------

    /// Where the next piece of a stream comes from.
    pub(super) fn origin(&self, stream: &Stream) -> Origin {
        match stream {
            Stream::Answer { residence, .. } => Origin {
                residence: *residence,
                op: None,
            },
            Stream::Write(id) => {
                let residence = self.ops.get(id).and_then(|op| match &op.work {
                    Work::Write { elements, next, .. } => elements.get(*next)?.residence,
                    _ => None,
                });
                Origin {
                    residence,
                    op: Some(*id),
                }
            }
            Stream::Letter { signals, .. } => Origin {
                residence: None,
                op: *signals,
            },
        }
    }

    /// Whether a piece may be taken from a stream now: what is staged for one connection is bounded.
    pub(super) fn may_depart(&self, conn: ConnId, origin: Origin) -> bool {
        (origin.residence.is_none() && !self.copies.out.holds(conn)) || self.copies.may_send(conn)
    }

    /// Sends a frame on its way; returns it if that is at once.
    pub(super) fn depart(&mut self, conn: ConnId, origin: Origin, frame: Frame) -> Option<Frame> {
        let Frame { head, body, class } = frame;
        let (Some(residence), Body::Memory(source)) = (origin.residence, &body) else {
            let frame = Frame { head, body, class };
            if !self.copies.out.holds(conn) {
                return Some(frame);
            }
            let op = origin.op;
            self.copies.out.push(conn, None, Departure { frame, op });
            return None;
        };
        let Source { ptr, len, lease } = source;
        let Some(buffer) = self.copies.buffer(conn, residence) else {
            self.copy_failed(conn, origin.op, "this process has no CUDA driver");
            return None;
        };
        let started = self.copies.start_out(
            residence,
            *ptr as usize,
            *len,
            buffer.clone(),
            lease.clone(),
        );
        match started {
            Ok(copy) => {
                let body = Body::Memory(Source {
                    ptr: buffer.ptr(),
                    len: *len,
                    lease: Lease::of(buffer),
                });
                let frame = Frame { head, body, class };
                self.shared.counters.staged_bytes.add(*len as u64);
                let op = origin.op;
                self.copies
                    .out
                    .push(conn, Some(copy), Departure { frame, op });
            }
            Err(text) => self.copy_failed(conn, origin.op, &text),
        }
        None
    }

    // ---- what comes ---------------------------------------------------------------------------

    /// Prepares a place for a piece that goes to GPU memory.
    pub(super) fn landing(
        &mut self,
        conn: ConnId,
        residence: Residence,
        addr: usize,
        len: usize,
        lease: Lease,
    ) -> Landing {
        let buffer = if len <= BUFFER {
            self.copies.buffer(conn, residence)
        } else {
            None
        };
        Landing {
            residence,
            addr,
            len,
            lease,
            buffer,
        }
    }

    /// A piece is here; `to`: it has to be copied to its place first.
    pub(super) fn arrived(
        &mut self,
        conn: ConnId,
        to: Option<Landing>,
        received: Received,
        arrival: Arrival,
    ) -> Result<(), Refuse> {
        match to {
            None => self.settle(conn, arrival),
            Some(landing) => {
                let op = arrival.op();
                match self.start_in(landing, received) {
                    Ok(copy) => self.copies.arrivals.push(conn, Some(copy), arrival),
                    Err(text) => self.copy_failed(conn, op, &text),
                }
                self.make_room(conn)
            }
        }
    }

    /// A piece of a peer's write is here.
    pub(super) fn write_arrived(
        &mut self,
        conn: ConnId,
        req: u64,
        last: bool,
        bytes: u64,
        store: Store,
        received: Received,
    ) -> Result<(), Refuse> {
        let behind = self.copies.arrivals.holds(conn);
        let write = |store, received| Arrival::Write {
            req,
            last,
            bytes,
            store,
            received,
        };
        match store {
            Store::Device(landing) => {
                let arrival = write(Store::InPlace, Received::Placed);
                self.arrived(conn, Some(landing), received, arrival)
            }
            Store::DeviceInTurn(landing) if !behind => {
                let arrival = write(Store::InPlace, Received::Placed);
                self.arrived(conn, Some(landing), received, arrival)
            }
            store if behind => {
                self.copies
                    .arrivals
                    .push(conn, None, write(store, received));
                self.make_room(conn)
            }
            store => self.settle(conn, write(store, received)),
        }
    }

    fn start_in(
        &mut self,
        landing: Landing,
        received: Received,
    ) -> Result<crate::device::copies::Copy, String> {
        let Landing {
            residence,
            addr,
            len,
            lease,
            buffer,
        } = landing;
        let keep = match (buffer, received) {
            (Some(buffer), Received::Placed) => Keep::buffer(buffer, lease),
            (_, Received::Bytes(bytes)) if bytes.len() == len => Keep::bytes(bytes, lease),
            _ => return Err("a piece did not come as it was announced".into()),
        };
        self.shared.counters.staged_bytes.add(len as u64);
        self.copies.start_in(residence, addr, len, keep)
    }

    /// What has come is in place, or is put there now: its turn has come.
    fn settle(&mut self, conn: ConnId, arrival: Arrival) -> Result<(), Refuse> {
        match arrival {
            Arrival::Data { op, elem, len } => self.data_placed(conn, op, elem, len),
            Arrival::Letter(piece, bytes) => return self.letter_piece(conn, piece, bytes),
            Arrival::Write {
                req,
                last,
                bytes,
                store,
                received,
            } => {
                let flag = match (store, received) {
                    (Store::Flag(flag), Received::Bytes(value)) => {
                        store_flag(&flag, &value);
                        Some(flag.addr)
                    }
                    (Store::Late { addr, _lease }, Received::Bytes(value)) => {
                        // SAFETY: the lease keeps the region's memory valid; nothing else refers to the bytes.
                        unsafe {
                            std::ptr::copy_nonoverlapping(
                                value.as_ptr(),
                                addr as *mut u8,
                                value.len(),
                            );
                        }
                        None
                    }
                    (Store::DeviceInTurn(landing), received) => {
                        let arrival = Arrival::Write {
                            req,
                            last,
                            bytes,
                            store: Store::InPlace,
                            received: Received::Placed,
                        };
                        match self.start_in(landing, received) {
                            Ok(copy) => self.copies.arrivals.push_front(conn, copy, arrival),
                            Err(text) => self.copy_failed(conn, None, &text),
                        }
                        return Ok(());
                    }
                    _ => None,
                };
                self.write_placed(conn, req, last, bytes);
                if let Some(addr) = flag {
                    self.flag_stored(conn, addr);
                }
            }
        }
        Ok(())
    }

    /// Waits until a connection has no more pieces in line than it may: more come only when these are on the device. A
    /// copy takes microseconds.
    fn make_room(&mut self, conn: ConnId) -> Result<(), Refuse> {
        let until = Instant::now() + PATIENCE;
        while self.copies.arrivals.count(conn) > MAX_PIECES {
            if self.look_at_arrivals() == 0 {
                if Instant::now() >= until {
                    return Err(Refuse(format!(
                        "the device did not copy {MAX_PIECES} pieces within {PATIENCE:?}"
                    )));
                }
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    // ---- copies that have ended ---------------------------------------------------------------

    /// Goes on with what waited for copies that have ended. Returns how much that was.
    pub(crate) fn look_at_copies(&mut self) -> usize {
        if !self.copies.is_busy() {
            return 0;
        }
        let mut n = 0;
        while let Some((conn, result, departure)) = self.copies.out.next() {
            n += 1;
            match result {
                Ok(()) => self.out.push(Out::Send(conn, departure.frame)),
                Err(text) => self.copy_failed(conn, departure.op, &text),
            }
        }
        n += self.look_at_arrivals();
        while let Some((conn, why)) = self.copies.next_end() {
            n += 1;
            self.on_closed(conn, why);
        }
        n
    }

    fn look_at_arrivals(&mut self) -> usize {
        let mut n = 0;
        while let Some((conn, result, arrival)) = self.copies.arrivals.next() {
            n += 1;
            match result {
                Err(text) => self.copy_failed(conn, arrival.op(), &text),
                Ok(()) => {
                    if let Err(Refuse(why)) = self.settle(conn, arrival) {
                        tracing::warn!(target: "connex_rs::device", "{why}");
                        self.give_up(conn, Why::Dead, "the peer broke the protocol".into());
                    }
                }
            }
        }
        n
    }

    /// The driver cannot copy: no piece may be missing in what is reported as done, so the link goes.
    fn copy_failed(&mut self, conn: ConnId, op: Option<OpId>, text: &str) {
        let text = format!("a copy between host and device failed: {text}");
        tracing::warn!(target: "connex_rs::device", "{text}");
        if let Some(op) = op.and_then(|id| self.ops.get_mut(&id)) {
            op.doom
                .get_or_insert_with(|| Error::new(ErrorKind::Transport, text));
        }
        let reason = "a copy between host and device failed".to_owned();
        self.give_up(conn, Why::Dead, reason);
    }
}

impl Arrival {
    /// The operation of ours that it belongs to.
    fn op(&self) -> Option<OpId> {
        match self {
            Arrival::Data { op, .. } => Some(*op),
            _ => None,
        }
    }
}
