//! Writes inputs of engines: the other way round than [`Input`] reads them.

use connex_rs::wire::{ChannelVerb, Control, Message, MsgPiece, Piece};

use crate::input::Input;
use crate::world::LEN;

/// Where addresses of a script are counted from: wherever the engine's memory is when it is played.
pub const BASE: u64 = 1 << 40;

/// An input that is being written.
#[derive(Clone, Default)]
pub struct Script(Vec<u8>);

impl Script {
    /// One whose first byte says who speaks.
    pub fn by(who: u8) -> Self {
        Self(vec![who])
    }

    /// The input.
    pub fn bytes(self) -> Vec<u8> {
        self.0
    }

    /// Adds bytes as they are.
    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    /// A frame: what [`Input::frame`] reads as this.
    ///
    /// # Panics
    /// If it reads something else: the message is one that no input gives, or the body is too long.
    pub fn frame(mut self, message: Message, body: &[u8]) -> Self {
        let start = self.0.len();
        self.0
            .extend([u8::try_from(body.len()).expect("a short body"), 1]);
        self.message(message);
        self.0.extend(body);
        let (head, read) = Input::new(&self.0[start..]).frame(BASE);
        let wanted = connex_rs::wire::encode(&message);
        assert_eq!((&head[..], &read[..]), (wanted.as_slice(), body));
        self
    }

    fn number(&mut self, number: u64) {
        let width = (u64::BITS - number.leading_zeros()).div_ceil(8) as usize;
        self.0.push(width as u8);
        self.0.extend(&number.to_le_bytes()[..width]);
    }

    fn address(&mut self, address: u64) {
        self.0.push(1);
        self.number(address + LEN as u64 / 2 - BASE);
    }

    fn flip(&mut self, yes: bool) {
        self.0.push(u8::from(!yes));
    }

    /// What [`Input::message`] reads as this.
    fn message(&mut self, message: Message) {
        let start = |script: &mut Self, req: u64, elem: u32, kind: u8| {
            script.number(req);
            script.number(elem.into());
            script.0.push(kind);
        };
        match message {
            Message::Read {
                req,
                elem,
                addr,
                len,
            } => {
                start(self, req, elem, 0);
                self.address(addr);
                self.number(len);
            }
            Message::Msg(MsgPiece {
                seq,
                total,
                offset,
                signals,
            }) => {
                start(self, 0, 0, 3);
                for number in [seq, total, offset] {
                    self.number(number);
                }
                self.flip(signals.is_some());
                if let Some(req) = signals {
                    self.number(req);
                }
            }
            Message::Ping { stamp } => start(self, stamp, 0, 4),
            Message::Credit { limit } => start(self, limit, 0, 7),
            Message::KeyAsk { req, addr, len } => {
                start(self, req, 0, 8);
                self.address(addr);
                self.number(len);
            }
            Message::Goodbye { by, .. } => start(self, by.start_ns, 0, 13),
            Message::Proof { .. } => start(self, 0, 0, 16),
            Message::Channel(Control { channel, verb }) => {
                start(self, 0, 0, 17);
                self.number(channel);
                self.verb(verb);
            }
            Message::Write(Piece {
                req,
                elem,
                last,
                flag,
                addr,
                len,
                offset,
            }) => {
                start(self, req, elem, 18);
                self.flip(last);
                self.flip(flag);
                self.address(addr);
                self.number(len);
                self.number(offset);
            }
            other => panic!("no seed has {other:?}"),
        }
    }

    fn verb(&mut self, verb: ChannelVerb) {
        match verb {
            ChannelVerb::Open { slots, slot_bytes } => {
                self.0.push(0);
                self.number(slots);
                self.number(slot_bytes);
            }
            ChannelVerb::Accept { ring } => {
                self.0.push(1);
                self.number(ring);
            }
            ChannelVerb::Refuse => self.0.push(2),
            ChannelVerb::Credit => self.0.push(3),
            ChannelVerb::End { count, clean } => {
                self.0.push(4);
                self.number(count);
                self.flip(clean);
            }
            ChannelVerb::Quit => self.0.push(5),
            ChannelVerb::Landed => self.0.push(6),
        }
    }
}
