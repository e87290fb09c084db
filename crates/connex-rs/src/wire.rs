//! The messages between engines: encoding and decoding, nothing else.
//!
//! A frame is a fixed little-endian head whose first byte says its kind, and a body. The bodies of the
//! handshake are lists of tagged fields, so that later versions can add some; all other bodies are
//! plain bytes. Every decoder takes arbitrary bytes and either understands them or says what is wrong.

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::identity::{Incarnation, LogicalId};
use crate::transport::{Head, Refuse};

/// The protocol version; engines of different versions refuse each other with both named.
pub const VERSION: u8 = 1;

/// First bytes of every greeting.
const MAGIC: [u8; 4] = *b"CNXR";

/// The longest body of a handshake frame, a refusal, a goodbye or an error, in bytes.
pub const MAX_TEXT: usize = 4096;

/// The longest message that [`send_msg`](crate::Engine::send_msg) takes: 64 MiB.
pub const MAX_MESSAGE: u64 = 64 << 20;

/// What a frame says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message {
    /// First frame of a dialler. Body: [`Greeting`].
    Hello(Greet),
    /// The acceptor wants a proof of the shared secret first.
    Challenge {
        /// Its nonce.
        nonce: [u8; 16],
    },
    /// The dialler's proof.
    Proof {
        /// HMAC-SHA-256.
        mac: [u8; 32],
    },
    /// The acceptor agrees. Body: [`Greeting`].
    Welcome(Greet),
    /// The acceptor does not agree. Body: a sentence.
    Refusal {
        /// Why.
        why: RefusalCode,
        /// Who took the dialler's place, for [`RefusalCode::Superseded`]; else zero.
        by: Incarnation,
    },
    /// The dialler has seen the welcome: the link is up on both sides.
    Confirm {
        /// The link, named by its dialler.
        link: u64,
    },
    /// The sender is about to close. Body: a sentence.
    Goodbye {
        /// Why.
        why: GoodbyeCode,
        /// Who took the receiver's place, for [`GoodbyeCode::Superseded`]; else zero.
        by: Incarnation,
    },
    /// Are you there?
    Ping {
        /// The sender's clock, sent back as it is.
        stamp: u64,
    },
    /// I am.
    Pong {
        /// The stamp of the ping.
        stamp: u64,
    },
    /// Send me that range.
    Read {
        /// Names the request until it has ended.
        req: u64,
        /// Which element of it.
        elem: u32,
        /// First byte in the owner.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// A piece of the range asked for. Body: the piece.
    Data {
        /// The request.
        req: u64,
        /// Which element of it.
        elem: u32,
        /// Where in the range the piece starts.
        offset: u64,
    },
    /// A piece of one element of a write or chain. Body: the piece.
    Write(Piece),
    /// A piece of a message. Body: the piece.
    Msg(MsgPiece),
    /// A request has ended. Body: a sentence if it failed.
    Done {
        /// The request.
        req: u64,
        /// 0 or a code of SPEC section 5.
        code: i32,
        /// The element that failed.
        elem: u32,
    },
    /// So much of a write has arrived.
    Progress {
        /// The request.
        req: u64,
        /// Bytes so far.
        bytes: u64,
    },
    /// The receiver of messages has made room.
    Credit {
        /// How many bytes may have been sent on this link in all.
        limit: u64,
    },
    /// Which key opens this range?
    KeyAsk {
        /// Names the request.
        req: u64,
        /// First byte in the owner.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// This one. Body: the key.
    KeyIs {
        /// The request.
        req: u64,
        /// First byte of the region.
        base: u64,
        /// Its bytes.
        len: u64,
        /// Shorter transfers are to be asked for: the region is GPU memory.
        min: u64,
        /// The owner's side places writes to it in the order in which they were posted.
        ordered: bool,
    },
    /// The region is about to go: forget its key.
    KeyDrop {
        /// First byte of the region.
        base: u64,
    },
    /// Forgotten, and nothing of it is in flight.
    KeyDropped {
        /// First byte of the region.
        base: u64,
    },
    /// Control of a step channel. Body: a name, a sentence, or slots.
    Channel(Control),
}

/// Control of a step channel. `channel` is named by the sender of its steps, anew for each channel of its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Control {
    /// Which channel, by the name that the sender of its steps gave it.
    pub channel: u64,
    /// What is to happen.
    pub verb: ChannelVerb,
}

/// What is to happen to a step channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChannelVerb {
    /// From the sender of steps: make a ring. Body: the channel's name.
    Open {
        /// Slots of the ring.
        slots: u64,
        /// Bytes of a slot.
        slot_bytes: u64,
    },
    /// From the receiver of steps: here it is.
    Accept {
        /// First byte of the ring in the receiver.
        ring: u64,
    },
    /// From the receiver of steps: there will be none. Body: a sentence.
    Refuse,
    /// From the receiver of steps: these slots are free again. Body: their numbers, 32 bits each.
    Credit,
    /// From the sender of steps: no step follows.
    End {
        /// Steps sent in all.
        count: u64,
        /// Closed in order; else abandoned.
        clean: bool,
    },
    /// From the receiver of steps: it takes no more.
    Quit,
    /// From the sender of steps: hardware has stored a flag word.
    Landed,
}

/// The fixed part of hello and welcome.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Greet {
    /// The link, named by its dialler.
    pub link: u64,
    /// Counts the dialler's dials to this peer.
    pub attempt: u64,
    /// The sender's life.
    pub incarnation: Incarnation,
    /// The sender's nonce for the proof of the secret.
    pub nonce: [u8; 16],
    /// The last link with this life of the receiver that the sender lost: who had dialled it (true: the
    /// sender) and its name.
    pub lost: Option<(bool, u64)>,
    /// The sender closed that link in order.
    pub closed: bool,
}

/// One piece of an element of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// The request.
    pub req: u64,
    /// Which element of a chain.
    pub elem: u32,
    /// This is the last piece of the request: answer it.
    pub last: bool,
    /// The element is a flag: it becomes visible after all before it.
    pub flag: bool,
    /// First byte of the element in the owner.
    pub addr: u64,
    /// Bytes of the whole element.
    pub len: u64,
    /// Where in the element the piece starts.
    pub offset: u64,
}

/// One piece of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MsgPiece {
    /// Number of the message on its link, from 0.
    pub seq: u64,
    /// Bytes of the whole message.
    pub total: u64,
    /// Where in it the piece starts.
    pub offset: u64,
    /// The write whose signal it is: answer that request once the message is delivered.
    pub signals: Option<u64>,
}

/// Why a dial is refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RefusalCode {
    /// A newer life of the dialler's identity is known.
    Superseded,
    /// The dialler wanted somebody else.
    WrongIdentity,
    /// Another protocol version.
    Version,
    /// No or a wrong proof of the secret.
    Authentication,
    /// The engine is closing.
    Closing,
    /// Too many strangers at once.
    Busy,
}

/// Why a live link is closed by its other side.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GoodbyeCode {
    /// Closed or disconnected on request.
    Closed,
    /// The other side gave us up after a time-out.
    GivenUp,
    /// A newer life of our identity took our place.
    Superseded,
}

macro_rules! codes {
    ($name:ident { $($variant:ident = $code:literal),+ $(,)? }) => {
        impl $name {
            fn code(self) -> u8 {
                match self { $($name::$variant => $code),+ }
            }

            fn from_code(code: u8) -> Result<Self, Refuse> {
                match code {
                    $($code => Ok($name::$variant),)+
                    other => Err(Refuse(format!(concat!("unknown ", stringify!($name), " {}"), other))),
                }
            }
        }
    };
}

codes!(RefusalCode {
    Superseded = 1,
    WrongIdentity = 2,
    Version = 3,
    Authentication = 4,
    Closing = 5,
    Busy = 6,
});
codes!(GoodbyeCode { Closed = 1, GivenUp = 2, Superseded = 3 });

const HELLO: u8 = 1;
const CHALLENGE: u8 = 2;
const PROOF: u8 = 3;
const WELCOME: u8 = 4;
const REFUSAL: u8 = 5;
const CONFIRM: u8 = 6;
const GOODBYE: u8 = 7;
const PING: u8 = 8;
const PONG: u8 = 9;
const READ: u8 = 10;
const DATA: u8 = 11;
const WRITE: u8 = 12;
const MSG: u8 = 13;
const DONE: u8 = 14;
const PROGRESS: u8 = 15;
const CREDIT: u8 = 16;
const KEY_ASK: u8 = 17;
const KEY_IS: u8 = 18;
const KEY_DROP: u8 = 19;
const KEY_DROPPED: u8 = 20;
const CHANNEL_OPEN: u8 = 21;
const CHANNEL_ACCEPT: u8 = 22;
const CHANNEL_REFUSE: u8 = 23;
const CHANNEL_CREDIT: u8 = 24;
const CHANNEL_END: u8 = 25;
const CHANNEL_QUIT: u8 = 26;
const CHANNEL_LANDED: u8 = 27;

const WRITE_LAST: u8 = 1;
const WRITE_FLAG: u8 = 2;
const LOST_SOME: u8 = 1;
const LOST_BY_SENDER: u8 = 2;
const LOST_CLOSED: u8 = 4;
const MSG_SIGNALS: u8 = 1;
const END_CLEAN: u8 = 1;
const KEY_ORDERED: u8 = 1;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct GreetHead {
    kind: u8,
    version: u8,
    flags: u8,
    zero: u8,
    magic: [u8; 4],
    link: U64,
    attempt: U64,
    start_ns: U64,
    random: U64,
    lost: U64,
    nonce: [u8; 16],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct MacHead {
    kind: u8,
    zero: [u8; 7],
    mac: [u8; 32],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct NonceHead {
    kind: u8,
    zero: [u8; 7],
    nonce: [u8; 16],
}

/// Heads with a few numbers: all other kinds.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct NumbersHead {
    kind: u8,
    flags: u8,
    zero: U16,
    small: U32,
    a: U64,
    b: U64,
    c: U64,
    d: U64,
}

fn numbers(kind: u8, flags: u8, small: u32, a: u64, b: u64, c: u64, d: u64) -> Head {
    let head = NumbersHead {
        kind,
        flags,
        zero: U16::ZERO,
        small: U32::new(small),
        a: U64::new(a),
        b: U64::new(b),
        c: U64::new(c),
        d: U64::new(d),
    };
    Head::new(head.as_bytes())
}

fn greet(kind: u8, greet: &Greet) -> Head {
    let (flags, lost) = match greet.lost {
        None => (0, 0),
        Some((by_sender, link)) => (LOST_SOME | if by_sender { LOST_BY_SENDER } else { 0 }, link),
    };
    let flags = flags | if greet.closed { LOST_CLOSED } else { 0 };
    let head = GreetHead {
        kind,
        version: VERSION,
        flags,
        zero: 0,
        magic: MAGIC,
        link: U64::new(greet.link),
        attempt: U64::new(greet.attempt),
        start_ns: U64::new(greet.incarnation.start_ns),
        random: U64::new(greet.incarnation.random),
        lost: U64::new(lost),
        nonce: greet.nonce,
    };
    Head::new(head.as_bytes())
}

/// Encodes a head.
pub fn encode(message: &Message) -> Head {
    match *message {
        Message::Hello(ref g) => greet(HELLO, g),
        Message::Welcome(ref g) => greet(WELCOME, g),
        Message::Challenge { nonce } => Head::new(
            NonceHead {
                kind: CHALLENGE,
                zero: [0; 7],
                nonce,
            }
            .as_bytes(),
        ),
        Message::Proof { mac } => Head::new(
            MacHead {
                kind: PROOF,
                zero: [0; 7],
                mac,
            }
            .as_bytes(),
        ),
        Message::Refusal { why, by } => {
            numbers(REFUSAL, why.code(), 0, by.start_ns, by.random, 0, 0)
        }
        Message::Confirm { link } => numbers(CONFIRM, 0, 0, link, 0, 0, 0),
        Message::Goodbye { why, by } => {
            numbers(GOODBYE, why.code(), 0, by.start_ns, by.random, 0, 0)
        }
        Message::Ping { stamp } => numbers(PING, 0, 0, stamp, 0, 0, 0),
        Message::Pong { stamp } => numbers(PONG, 0, 0, stamp, 0, 0, 0),
        Message::Read {
            req,
            elem,
            addr,
            len,
        } => numbers(READ, 0, elem, req, addr, len, 0),
        Message::Data { req, elem, offset } => numbers(DATA, 0, elem, req, offset, 0, 0),
        Message::Write(p) => {
            let flags = if p.last { WRITE_LAST } else { 0 } | if p.flag { WRITE_FLAG } else { 0 };
            numbers(WRITE, flags, p.elem, p.req, p.addr, p.len, p.offset)
        }
        Message::Msg(m) => {
            let flags = if m.signals.is_some() { MSG_SIGNALS } else { 0 };
            numbers(
                MSG,
                flags,
                0,
                m.seq,
                m.total,
                m.offset,
                m.signals.unwrap_or(0),
            )
        }
        Message::Done { req, code, elem } => numbers(DONE, (-code) as u8, elem, req, 0, 0, 0),
        Message::Progress { req, bytes } => numbers(PROGRESS, 0, 0, req, bytes, 0, 0),
        Message::Credit { limit } => numbers(CREDIT, 0, 0, limit, 0, 0, 0),
        Message::KeyAsk { req, addr, len } => numbers(KEY_ASK, 0, 0, req, addr, len, 0),
        Message::KeyIs {
            req,
            base,
            len,
            min,
            ordered,
        } => {
            let flags = if ordered { KEY_ORDERED } else { 0 };
            numbers(KEY_IS, flags, 0, req, base, len, min)
        }
        Message::KeyDrop { base } => numbers(KEY_DROP, 0, 0, base, 0, 0, 0),
        Message::KeyDropped { base } => numbers(KEY_DROPPED, 0, 0, base, 0, 0, 0),
        Message::Channel(Control { channel, verb }) => {
            let (kind, flags, b, c) = match verb {
                ChannelVerb::Open { slots, slot_bytes } => (CHANNEL_OPEN, 0, slots, slot_bytes),
                ChannelVerb::Accept { ring } => (CHANNEL_ACCEPT, 0, ring, 0),
                ChannelVerb::Refuse => (CHANNEL_REFUSE, 0, 0, 0),
                ChannelVerb::Credit => (CHANNEL_CREDIT, 0, 0, 0),
                ChannelVerb::End { count, clean } => {
                    (CHANNEL_END, if clean { END_CLEAN } else { 0 }, count, 0)
                }
                ChannelVerb::Quit => (CHANNEL_QUIT, 0, 0, 0),
                ChannelVerb::Landed => (CHANNEL_LANDED, 0, 0, 0),
            };
            numbers(kind, flags, 0, channel, b, c, 0)
        }
    }
}

fn parse<T: FromBytes + KnownLayout + Immutable + Unaligned>(head: &[u8]) -> Result<&T, Refuse> {
    T::ref_from_bytes(head).map_err(|_| {
        Refuse(format!(
            "a head of {} bytes does not fit its kind {}",
            head.len(),
            head[0]
        ))
    })
}

/// The protocol version of a greeting that this engine does not speak; `None` for any other head.
///
/// The kind, the version and the magic number stay in their places in every version, and so does a refusal, so that
/// engines of different releases can tell each other why they part.
pub fn foreign_version(head: &[u8]) -> Option<u8> {
    const AT: usize = std::mem::offset_of!(GreetHead, magic);
    let magic = head.get(AT..AT + MAGIC.len())?;
    let version = *head.get(std::mem::offset_of!(GreetHead, version))?;
    (head[0] == HELLO && magic == MAGIC && version != VERSION).then_some(version)
}

fn parse_greet(head: &[u8]) -> Result<Greet, Refuse> {
    let g: &GreetHead = parse(head)?;
    if g.magic != MAGIC {
        return Err(Refuse("the greeting is not one of connex-rs".into()));
    }
    if g.version != VERSION {
        return Err(Refuse(format!(
            "protocol version {} where this engine speaks {VERSION}: run the same release on both sides",
            g.version
        )));
    }
    let lost = (g.flags & LOST_SOME != 0).then(|| (g.flags & LOST_BY_SENDER != 0, g.lost.get()));
    Ok(Greet {
        link: g.link.get(),
        attempt: g.attempt.get(),
        incarnation: Incarnation {
            start_ns: g.start_ns.get(),
            random: g.random.get(),
        },
        nonce: g.nonce,
        lost,
        closed: g.flags & LOST_CLOSED != 0,
    })
}

/// Decodes a head.
///
/// # Errors
/// [`Refuse`] with what is wrong.
pub fn decode(head: &[u8]) -> Result<Message, Refuse> {
    let Some(&kind) = head.first() else {
        return Err(Refuse("an empty head".into()));
    };
    match kind {
        HELLO => return Ok(Message::Hello(parse_greet(head)?)),
        WELCOME => return Ok(Message::Welcome(parse_greet(head)?)),
        CHALLENGE => {
            return Ok(Message::Challenge {
                nonce: parse::<NonceHead>(head)?.nonce,
            });
        }
        PROOF => {
            return Ok(Message::Proof {
                mac: parse::<MacHead>(head)?.mac,
            });
        }
        REFUSAL..=CHANNEL_LANDED => {}
        other => return Err(Refuse(format!("unknown kind of frame {other}"))),
    }
    let n: &NumbersHead = parse(head)?;
    let (a, b, c, d) = (n.a.get(), n.b.get(), n.c.get(), n.d.get());
    Ok(match kind {
        REFUSAL => Message::Refusal {
            why: RefusalCode::from_code(n.flags)?,
            by: Incarnation {
                start_ns: a,
                random: b,
            },
        },
        CONFIRM => Message::Confirm { link: a },
        GOODBYE => Message::Goodbye {
            why: GoodbyeCode::from_code(n.flags)?,
            by: Incarnation {
                start_ns: a,
                random: b,
            },
        },
        PING => Message::Ping { stamp: a },
        PONG => Message::Pong { stamp: a },
        READ => Message::Read {
            req: a,
            elem: n.small.get(),
            addr: b,
            len: c,
        },
        DATA => Message::Data {
            req: a,
            elem: n.small.get(),
            offset: b,
        },
        WRITE => Message::Write(Piece {
            req: a,
            elem: n.small.get(),
            last: n.flags & WRITE_LAST != 0,
            flag: n.flags & WRITE_FLAG != 0,
            addr: b,
            len: c,
            offset: d,
        }),
        MSG => Message::Msg(MsgPiece {
            seq: a,
            total: b,
            offset: c,
            signals: (n.flags & MSG_SIGNALS != 0).then_some(d),
        }),
        DONE => {
            if n.flags > 5 {
                return Err(Refuse(format!("unknown code -{}", n.flags)));
            }
            Message::Done {
                req: a,
                code: -i32::from(n.flags),
                elem: n.small.get(),
            }
        }
        PROGRESS => Message::Progress { req: a, bytes: b },
        CREDIT => Message::Credit { limit: a },
        KEY_ASK => Message::KeyAsk {
            req: a,
            addr: b,
            len: c,
        },
        KEY_IS => Message::KeyIs {
            req: a,
            base: b,
            len: c,
            min: d,
            ordered: n.flags & KEY_ORDERED != 0,
        },
        KEY_DROP => Message::KeyDrop { base: a },
        KEY_DROPPED => Message::KeyDropped { base: a },
        _ => Message::Channel(Control {
            channel: a,
            verb: match kind {
                CHANNEL_OPEN => ChannelVerb::Open {
                    slots: b,
                    slot_bytes: c,
                },
                CHANNEL_ACCEPT => ChannelVerb::Accept { ring: b },
                CHANNEL_REFUSE => ChannelVerb::Refuse,
                CHANNEL_CREDIT => ChannelVerb::Credit,
                CHANNEL_END => ChannelVerb::End {
                    count: b,
                    clean: n.flags & END_CLEAN != 0,
                },
                CHANNEL_QUIT => ChannelVerb::Quit,
                _ => ChannelVerb::Landed,
            },
        }),
    })
}

/// The body of hello and welcome.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Greeting {
    /// Who the sender is.
    pub id: Option<LogicalId>,
    /// Whom a dialler wants.
    pub wanted: Option<LogicalId>,
    /// Where the sender can be dialled.
    pub url: String,
    /// How many bytes of messages may be sent to it at first.
    pub window: u64,
    /// An acceptor's proof of the shared secret.
    pub mac: Option<[u8; 32]>,
    /// Names the host: two engines with the same one share memory.
    pub host: String,
    /// Where obituaries of the receiver are to be sent: port and token.
    pub obituaries: Option<(u16, [u8; 16])>,
}

const TAG_ID: u8 = 1;
const TAG_WANTED: u8 = 2;
const TAG_URL: u8 = 3;
const TAG_WINDOW: u8 = 4;
const TAG_MAC: u8 = 5;
const TAG_HOST: u8 = 6;
const TAG_OBITUARIES: u8 = 7;

impl Greeting {
    /// Encodes the fields, tag by tag.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(256);
        let mut field = |tag: u8, bytes: &[u8]| {
            out.push(tag);
            out.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
            out.extend_from_slice(bytes);
        };
        if let Some(id) = &self.id {
            field(TAG_ID, id.to_string().as_bytes());
        }
        if let Some(wanted) = &self.wanted {
            field(TAG_WANTED, wanted.to_string().as_bytes());
        }
        field(TAG_URL, self.url.as_bytes());
        field(TAG_WINDOW, &self.window.to_le_bytes());
        if let Some(mac) = &self.mac {
            field(TAG_MAC, mac);
        }
        if !self.host.is_empty() {
            field(TAG_HOST, self.host.as_bytes());
        }
        if let Some((port, token)) = &self.obituaries {
            let mut bytes = port.to_le_bytes().to_vec();
            bytes.extend_from_slice(token);
            field(TAG_OBITUARIES, &bytes);
        }
        out
    }

    /// Decodes; unknown tags are skipped.
    ///
    /// # Errors
    /// [`Refuse`] with what is wrong.
    pub fn decode(mut bytes: &[u8]) -> Result<Self, Refuse> {
        let mut greeting = Self::default();
        while !bytes.is_empty() {
            let [tag, lo, hi, rest @ ..] = bytes else {
                return Err(Refuse("a field of the greeting is cut short".into()));
            };
            let len = usize::from(u16::from_le_bytes([*lo, *hi]));
            let Some((value, rest)) = rest.split_at_checked(len) else {
                return Err(Refuse(format!("field {tag} of the greeting is cut short")));
            };
            greeting.take(*tag, value)?;
            bytes = rest;
        }
        Ok(greeting)
    }

    fn take(&mut self, tag: u8, value: &[u8]) -> Result<(), Refuse> {
        match tag {
            TAG_ID => self.id = Some(id(value)?),
            TAG_WANTED => self.wanted = Some(id(value)?),
            TAG_URL => self.url = text(value)?.to_owned(),
            TAG_WINDOW => self.window = u64::from_le_bytes(exact(tag, value)?),
            TAG_MAC => self.mac = Some(exact(tag, value)?),
            TAG_HOST => self.host = text(value)?.to_owned(),
            TAG_OBITUARIES => {
                let bytes: [u8; 18] = exact(tag, value)?;
                let mut token = [0; 16];
                token.copy_from_slice(&bytes[2..]);
                self.obituaries = Some((u16::from_le_bytes([bytes[0], bytes[1]]), token));
            }
            _ => {}
        }
        Ok(())
    }
}

fn exact<const N: usize>(tag: u8, value: &[u8]) -> Result<[u8; N], Refuse> {
    value.try_into().map_err(|_| {
        Refuse(format!(
            "field {tag} of the greeting has {} bytes instead of {N}",
            value.len()
        ))
    })
}

fn text(value: &[u8]) -> Result<&str, Refuse> {
    std::str::from_utf8(value).map_err(|_| Refuse("text that is not UTF-8".into()))
}

fn id(value: &[u8]) -> Result<LogicalId, Refuse> {
    text(value)?
        .parse()
        .map_err(|e| Refuse(format!("a bad logical id: {e}")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn channel(verb: ChannelVerb) -> Message {
        Message::Channel(Control { channel: 7, verb })
    }

    fn all() -> Vec<Message> {
        let greet = Greet {
            link: u64::MAX,
            attempt: 3,
            incarnation: Incarnation {
                start_ns: 1,
                random: 2,
            },
            nonce: [7; 16],
            lost: Some((true, 9)),
            closed: true,
        };
        vec![
            Message::Hello(greet),
            Message::Welcome(Greet {
                lost: None,
                ..greet
            }),
            Message::Challenge { nonce: [3; 16] },
            Message::Proof { mac: [4; 32] },
            Message::Refusal {
                why: RefusalCode::Superseded,
                by: greet.incarnation,
            },
            Message::Confirm { link: 5 },
            Message::Goodbye {
                why: GoodbyeCode::GivenUp,
                by: Incarnation {
                    start_ns: 0,
                    random: 0,
                },
            },
            Message::Ping { stamp: 1 },
            Message::Pong { stamp: 2 },
            Message::Read {
                req: 1,
                elem: 9,
                addr: 2,
                len: 3,
            },
            Message::Data {
                req: 4,
                elem: 6,
                offset: 5,
            },
            Message::Write(Piece {
                req: 1,
                elem: 2,
                last: true,
                flag: false,
                addr: 3,
                len: 4,
                offset: 5,
            }),
            Message::Msg(MsgPiece {
                seq: 1,
                total: 2,
                offset: 3,
                signals: Some(0),
            }),
            Message::Msg(MsgPiece {
                seq: 1,
                total: 2,
                offset: 3,
                signals: None,
            }),
            Message::Done {
                req: 1,
                code: -4,
                elem: 2,
            },
            Message::Progress { req: 1, bytes: 2 },
            Message::Credit { limit: 1 },
            Message::KeyAsk {
                req: 1,
                addr: 2,
                len: 3,
            },
            Message::KeyIs {
                req: 1,
                base: 2,
                len: 3,
                min: 4,
                ordered: true,
            },
            Message::KeyDrop { base: 1 },
            Message::KeyDropped { base: 1 },
            channel(ChannelVerb::Open {
                slots: 4,
                slot_bytes: u64::MAX,
            }),
            channel(ChannelVerb::Accept { ring: 1 << 40 }),
            channel(ChannelVerb::Refuse),
            channel(ChannelVerb::Credit),
            channel(ChannelVerb::End {
                count: 3,
                clean: true,
            }),
            channel(ChannelVerb::End {
                count: 0,
                clean: false,
            }),
            channel(ChannelVerb::Quit),
            channel(ChannelVerb::Landed),
        ]
    }

    #[test]
    fn every_message_survives_the_wire() {
        for message in all() {
            assert_eq!(decode(encode(&message).as_slice()), Ok(message));
        }
    }

    #[test]
    fn a_cut_head_is_refused() {
        for message in all() {
            let head = encode(&message);
            for len in 0..head.as_slice().len() {
                assert!(
                    decode(&head.as_slice()[..len]).is_err(),
                    "{message:?} cut to {len}"
                );
            }
        }
    }

    #[test]
    fn another_version_is_refused_with_both_named() {
        let mut bytes = encode(&all()[0]).as_slice().to_vec();
        bytes[1] = 99;
        let Refuse(why) = decode(&bytes).expect_err("version 99");
        assert!(why.contains("99") && why.contains('1'), "{why}");
    }

    #[test]
    fn a_greeting_survives_the_wire() {
        let greeting = Greeting {
            id: Some(LogicalId::new("llama", 1, 2, u32::MAX).expect("valid")),
            wanted: Some(LogicalId::new("llama", 2, 0, 0).expect("valid")),
            url: "127.0.0.1:1#llama|1|2|4294967295".into(),
            window: 1 << 40,
            mac: Some([9; 32]),
            host: "abc".into(),
            obituaries: Some((4000, [1; 16])),
        };
        assert_eq!(Greeting::decode(&greeting.encode()), Ok(greeting));
    }

    #[test]
    fn unknown_fields_of_a_greeting_are_skipped() {
        let mut bytes = Greeting::default().encode();
        bytes.extend_from_slice(&[200, 2, 0, 1, 2]);
        assert_eq!(Greeting::decode(&bytes), Ok(Greeting::default()));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = decode(&bytes);
            let _ = Greeting::decode(&bytes);
        }

        #[test]
        fn what_decodes_encodes_to_an_equal_message(mut bytes in prop::collection::vec(any::<u8>(), 40), kind in 1u8..28) {
            bytes[0] = kind;
            if let Ok(message) = decode(&bytes) {
                prop_assert_eq!(decode(encode(&message).as_slice()), Ok(message));
            }
        }
    }
}
