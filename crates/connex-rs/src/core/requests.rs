//! What comes from peers: frames to their places, and requests on our regions.
//!
//! Nothing a peer says is believed: every range is checked against the regions, every answer against
//! the request it claims to answer, and what can be made to wait here is bounded.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use super::devices::{Arrival, Landing, Store};
use super::one_sided::KeyRange;
use super::{Core, Flag, Incoming, SMALL, Stage, Stream};
use crate::region::{Denied, Direction, Granted};
use crate::transfer::Work;
use crate::transport::{ConnId, Gone, Place, Received, Refuse, Target, Upcalls};
use crate::wire::{self, MAX_TEXT, Message, Piece, RefusalCode};

/// Reads of one peer that may wait for their answers. An honest engine asks for fewer at a time
/// ([`super::operations::MAX_READS_OUT`]).
const MAX_ANSWERS: usize = 64 << 10;

/// Refused writes of one peer whose last piece has not come.
const MAX_REFUSED: usize = 4096;

/// A receiver of bulk says how far it is at least this often, so that the sender sees a slow link is not
/// a dead one.
const PROGRESS_EVERY: u64 = 200_000_000;

impl Upcalls for Core {
    fn accepted(&mut self, conn: ConnId, from: SocketAddr) {
        self.on_accepted(conn, from);
    }

    fn connected(&mut self, conn: ConnId) {
        self.on_connected(conn);
    }

    fn proven(&mut self, conn: ConnId, subject: String) {
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.subject = Some(subject);
        }
    }

    fn backed_off(&mut self) {
        self.shared.counters.accept_backoffs.add_one();
    }

    fn heard(&mut self, conn: ConnId) {
        let now = self.now;
        let Some(entry) = self.conns.get_mut(&conn) else {
            return;
        };
        let bulk = matches!(
            entry.incoming,
            Some(Incoming::Data { .. } | Incoming::Write { .. })
        );
        if let Some(link) = &mut entry.link {
            if let Some(heartbeat) = &mut link.heartbeat {
                heartbeat.heard(now);
            }
            if bulk {
                link.moved = now;
            }
        }
    }

    fn frame(&mut self, conn: ConnId, head: &[u8], body_len: usize) -> Result<Place, Refuse> {
        let Some(entry) = self.conns.get_mut(&conn) else {
            return Ok(Place::Discard);
        };
        if entry.stage == Stage::Leaving {
            Self::ignore(entry);
            return Ok(Place::Discard);
        }
        let live = entry.stage == Stage::Live;
        if entry.stage == Stage::Stranger
            && let Some(version) = wire::foreign_version(head)
        {
            let text = format!(
                "protocol version {version} where this engine speaks {}: run the same release on both sides",
                wire::VERSION
            );
            self.refuse_stranger(conn, RefusalCode::Version, &text);
            return Ok(Place::Discard);
        }
        let message = wire::decode(head)?;
        match message {
            Message::Hello(_)
            | Message::Challenge { .. }
            | Message::Proof { .. }
            | Message::Welcome(_)
            | Message::Refusal { .. }
            | Message::Confirm { .. }
            | Message::Goodbye { .. } => self.text(conn, message, body_len),
            _ if !live => Err(Refuse("data before the handshake is complete".into())),
            Message::Done { .. } | Message::KeyIs { .. } | Message::Channel(_) => {
                self.text(conn, message, body_len)
            }
            Message::Data { req, elem, offset } => {
                self.place_data(conn, req, elem, offset, body_len)
            }
            Message::Write(piece) => self.place_write(conn, piece, body_len),
            Message::Msg(piece) => {
                self.open_letter(conn, &piece, body_len)?;
                self.set_incoming(conn, Incoming::Letter(piece));
                Ok(Place::Bytes)
            }
            _ if body_len > 0 => Err(Refuse(format!(
                "a body of {body_len} bytes where none belongs"
            ))),
            control => {
                self.set_incoming(conn, Incoming::Nothing);
                self.control(conn, control)?;
                Ok(Place::Discard)
            }
        }
    }

    fn body(&mut self, conn: ConnId, received: Received) -> Result<(), Refuse> {
        let Some(incoming) = self.conns.get_mut(&conn).and_then(|c| c.incoming.take()) else {
            return Ok(());
        };
        match (incoming, received) {
            (Incoming::Text(message), Received::Bytes(bytes)) => {
                self.on_text(conn, message, &bytes)
            }
            (Incoming::Data { op, elem, len, to }, received) => {
                self.data_arrived(op, elem, len);
                let arrival = Arrival::Data { op, elem, len };
                self.arrived(conn, to, received, arrival)
            }
            (
                Incoming::Write {
                    req,
                    last,
                    bytes,
                    store,
                },
                received,
            ) => self.write_arrived(conn, req, last, bytes, store, received),
            (Incoming::Refused { req, last }, _) => {
                if last {
                    self.answer_refused(conn, req);
                }
                Ok(())
            }
            (Incoming::Letter(piece), Received::Bytes(bytes)) => {
                // A signal stands for data that may still be on its way to the device.
                if piece.signals.is_some() && self.copies.arrivals.holds(conn) {
                    self.copies
                        .arrivals
                        .push(conn, None, Arrival::Letter(piece, bytes));
                    return Ok(());
                }
                self.letter_piece(conn, piece, bytes)
            }
            _ => Ok(()),
        }
    }

    fn closed(&mut self, conn: ConnId, why: Gone) {
        self.now = crate::clock::now_ns();
        if self.copies.holds(conn) {
            // The driver may still touch memory for it.
            return self.copies.end_later(conn, why);
        }
        self.on_closed(conn, why);
    }
}

impl Core {
    fn set_incoming(&mut self, conn: ConnId, incoming: Incoming) {
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.incoming = Some(incoming);
        }
    }

    fn text(&mut self, conn: ConnId, message: Message, len: usize) -> Result<Place, Refuse> {
        if len > MAX_TEXT {
            return Err(Refuse(format!(
                "{len} bytes where at most {MAX_TEXT} belong"
            )));
        }
        self.set_incoming(conn, Incoming::Text(message));
        Ok(Place::Bytes)
    }

    fn on_text(&mut self, conn: ConnId, message: Message, body: &[u8]) -> Result<(), Refuse> {
        match message {
            Message::Goodbye { why, by } => {
                self.on_goodbye(conn, why, by, &String::from_utf8_lossy(body));
                Ok(())
            }
            Message::Done { req, code, elem } => {
                self.on_done(conn, req, code, elem, &String::from_utf8_lossy(body))
            }
            Message::KeyIs {
                req,
                base,
                len,
                min,
                ordered,
            } => {
                let range = KeyRange {
                    base,
                    len,
                    min,
                    ordered,
                };
                self.on_key(conn, req, range, body.to_vec())
            }
            Message::Channel(control) => self.on_channel(conn, control, body),
            greeting => self.on_greeting(conn, greeting, body),
        }
    }

    /// A frame that has no body.
    fn control(&mut self, conn: ConnId, message: Message) -> Result<(), Refuse> {
        match message {
            Message::Ping { stamp } => self.send(conn, &Message::Pong { stamp }),
            Message::Pong { .. } => {}
            Message::Read {
                req,
                elem,
                addr,
                len,
            } => return self.on_read(conn, req, elem, addr, len),
            Message::Progress { req, .. } => {
                let now = self.now;
                if let Some(op) = self.ops.get_mut(&req).filter(|op| op.conn == Some(conn)) {
                    op.moved = now;
                }
                self.moved(conn);
            }
            Message::Credit { limit } => self.on_credit(conn, limit),
            Message::KeyAsk { req, addr, len } => self.on_key_ask(conn, req, addr, len),
            Message::KeyDrop { base } => self.on_key_drop(conn, base),
            Message::KeyDropped { base } => self.on_key_dropped(conn, base),
            other => return Err(Refuse(format!("{other:?} is not spoken on this link"))),
        }
        Ok(())
    }

    // ---- reads of a peer ----------------------------------------------------------------------

    fn on_read(
        &mut self,
        conn: ConnId,
        req: u64,
        elem: u32,
        addr: u64,
        len: u64,
    ) -> Result<(), Refuse> {
        self.moved(conn);
        let granted = self
            .shared
            .registry
            .lock()
            .grant(conn, addr, len, Direction::Read)
            .map_err(|denied| denial(denied, addr, len, Direction::Read))
            .and_then(|granted| self.usable(granted, addr, len));
        match granted {
            Ok(Granted {
                lease, residence, ..
            }) => {
                let (ptr, len) = (addr as usize, len as usize);
                let answer = Stream::Answer {
                    req,
                    elem,
                    ptr,
                    len,
                    sent: 0,
                    lease,
                    residence,
                };
                let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) else {
                    return Ok(());
                };
                let queue = if len <= SMALL {
                    &mut link.small
                } else {
                    &mut link.bulk
                };
                if queue.len() >= MAX_ANSWERS {
                    return Err(Refuse(format!(
                        "more than {MAX_ANSWERS} reads wait for their answers"
                    )));
                }
                queue.push_back(answer);
                self.pump_later(conn);
            }
            Err(text) => {
                self.shared.counters.requests_refused.add_one();
                self.send_with(
                    conn,
                    &Message::Done {
                        req,
                        code: -4,
                        elem,
                    },
                    text.into_bytes(),
                );
            }
        }
        Ok(())
    }

    // ---- writes of a peer ---------------------------------------------------------------------

    fn place_write(
        &mut self,
        conn: ConnId,
        piece: Piece,
        body_len: usize,
    ) -> Result<Place, Refuse> {
        let within = piece
            .offset
            .checked_add(body_len as u64)
            .is_some_and(|end| end <= piece.len);
        if !within || body_len == 0 {
            return Err(Refuse(format!(
                "a piece of {body_len} bytes at {} of an element of {}",
                piece.offset, piece.len
            )));
        }
        let (req, last, bytes) = (piece.req, piece.last, piece.offset + body_len as u64);
        let behind = self.copies.arrivals.holds(conn);
        let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) else {
            return Ok(Place::Discard);
        };
        if link.refused.contains_key(&req) {
            self.set_incoming(conn, Incoming::Refused { req, last });
            return Ok(Place::Discard);
        }
        // The whole element is checked with each piece: nothing of a bad one is written.
        let granted = self
            .shared
            .registry
            .lock()
            .grant(conn, piece.addr, piece.len, Direction::Write)
            .map_err(|denied| denial(denied, piece.addr, piece.len, Direction::Write))
            .and_then(|granted| {
                match self
                    .shared
                    .devices
                    .refuses(granted.residence, piece.len, false)
                {
                    Some(why) => Err(in_the_peer(&why, piece.addr)),
                    None => Ok(granted),
                }
            });
        let granted = match granted {
            Ok(granted) => granted,
            Err(text) => {
                self.shared.counters.requests_refused.add_one();
                if link.refused.len() >= MAX_REFUSED {
                    return Err(Refuse(format!(
                        "more than {MAX_REFUSED} refused writes are not ended"
                    )));
                }
                link.refused.insert(req, (piece.elem, -4, text));
                self.set_incoming(conn, Incoming::Refused { req, last });
                return Ok(Place::Discard);
            }
        };
        let lease = granted.lease;
        let addr = piece.addr as usize + piece.offset as usize;
        if let Some(residence) = granted.residence {
            let landing = self.landing(conn, residence, addr, body_len, lease);
            let place = landing.place();
            let store = if piece.flag {
                Store::DeviceInTurn(landing)
            } else {
                Store::Device(landing)
            };
            self.set_incoming(
                conn,
                Incoming::Write {
                    req,
                    last,
                    bytes,
                    store,
                },
            );
            return Ok(place);
        }
        let at_once = piece.flag
            && piece.offset == 0
            && body_len as u64 == piece.len
            && matches!(body_len, 1 | 2 | 4 | 8)
            && addr.is_multiple_of(body_len);
        if at_once || (piece.flag && behind) {
            let store = if at_once {
                Store::Flag(Flag { addr, lease })
            } else {
                Store::Late {
                    addr,
                    _lease: lease,
                }
            };
            self.set_incoming(
                conn,
                Incoming::Write {
                    req,
                    last,
                    bytes,
                    store,
                },
            );
            return Ok(Place::Bytes);
        }
        if piece.flag {
            // What this thread stored before is visible before what it stores from here on.
            fence(Ordering::Release);
        }
        self.set_incoming(
            conn,
            Incoming::Write {
                req,
                last,
                bytes,
                store: Store::InPlace,
            },
        );
        Ok(Place::Memory(Target {
            ptr: addr as *mut u8,
            len: body_len,
            lease,
        }))
    }

    pub(super) fn write_placed(&mut self, conn: ConnId, req: u64, last: bool, bytes: u64) {
        self.moved(conn);
        if last {
            self.send(
                conn,
                &Message::Done {
                    req,
                    code: 0,
                    elem: 0,
                },
            );
        } else {
            self.tell_progress(conn, req, bytes);
        }
    }

    /// On a slow link the sender hears now and then that its bytes arrive.
    pub(super) fn tell_progress(&mut self, conn: ConnId, req: u64, bytes: u64) {
        let quiet = self
            .conns
            .get(&conn)
            .and_then(|c| c.link.as_ref())
            .is_some_and(|link| self.now.saturating_sub(link.sent) > PROGRESS_EVERY);
        if quiet {
            self.send(conn, &Message::Progress { req, bytes });
        }
    }

    /// The last piece of a refused write has come.
    pub(super) fn answer_refused(&mut self, conn: ConnId, req: u64) {
        let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) else {
            return;
        };
        if let Some((elem, code, text)) = link.refused.remove(&req) {
            self.send_with(conn, &Message::Done { req, code, elem }, text.into_bytes());
        }
    }

    // ---- answers to our reads -----------------------------------------------------------------

    fn place_data(
        &mut self,
        conn: ConnId,
        req: u64,
        elem: u32,
        offset: u64,
        body_len: usize,
    ) -> Result<Place, Refuse> {
        let elem = elem as usize;
        let element = self
            .ops
            .get(&req)
            .filter(|op| op.conn == Some(conn))
            .and_then(|op| match &op.work {
                // Beyond `next` it has not been asked for.
                Work::Read { elements, next, .. } if elem < *next => elements.get(elem),
                _ => None,
            })
            .ok_or_else(|| {
                Refuse(format!(
                    "an answer to request {req} element {elem}, which was not asked"
                ))
            })?;
        if offset != element.done as u64 || body_len == 0 || body_len > element.len - element.done {
            return Err(Refuse(format!(
                "a piece of {body_len} bytes at {offset} where {} of {} bytes have come",
                element.done, element.len
            )));
        }
        let at = element.local + element.done;
        let lease = element.lease.clone();
        let residence = element.residence;
        let to =
            residence.map(|residence| self.landing(conn, residence, at, body_len, lease.clone()));
        let place = to.as_ref().map_or_else(
            || {
                Place::Memory(Target {
                    ptr: at as *mut u8,
                    len: body_len,
                    lease,
                })
            },
            Landing::place,
        );
        self.set_incoming(
            conn,
            Incoming::Data {
                op: req,
                elem,
                len: body_len,
                to,
            },
        );
        Ok(place)
    }
}

/// Stores a flag at once, after all that this thread stored before.
pub(super) fn store_flag(flag: &Flag, value: &[u8]) {
    macro_rules! store {
        ($atomic:ty, $int:ty) => {
            if let Ok(bytes) = value.try_into() {
                // SAFETY: the address is aligned to the size and lies in a region that the flag's lease keeps valid;
                // memory that peers write is only ever accessed through raw pointers and atomics here.
                let at = unsafe { <$atomic>::from_ptr(flag.addr as *mut $int) };
                at.store(<$int>::from_ne_bytes(bytes), Ordering::Release);
            }
        };
    }
    match value.len() {
        1 => store!(AtomicU8, u8),
        2 => store!(AtomicU16, u16),
        4 => store!(AtomicU32, u32),
        _ => store!(AtomicU64, u64),
    }
}

/// The same for memory that cannot be used.
pub(super) fn in_the_peer(why: &str, addr: u64) -> String {
    format!("the peer's region at {addr:#x}: {why}")
}

/// The sentence that the requester gets.
fn denial(denied: Denied, addr: u64, len: u64, direction: Direction) -> String {
    let what = match direction {
        Direction::Read => "read",
        Direction::Write => "write",
    };
    match denied {
        Denied::Unregistered => {
            format!("{what} of {len} bytes at {addr:#x}: no region is registered there in the peer")
        }
        Denied::OutOfBounds => format!(
            "{what} of {len} bytes at {addr:#x}: the range leaves the peer's region that holds its start"
        ),
        Denied::Access => {
            format!("{what} of {len} bytes at {addr:#x}: the peer's region does not allow it")
        }
    }
}
