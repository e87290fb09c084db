//! Makes messages of an input's bytes.

use connex_rs::identity::Incarnation;
use connex_rs::wire::{
    self, ChannelVerb, Control, GoodbyeCode, Greet, Message, MsgPiece, Piece, RefusalCode,
};

use crate::world::LEN;

/// Reads the input bit by bit; zeroes after its end.
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All of it.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// What has not been read.
    pub fn rest(&self) -> &'a [u8] {
        self.0
    }

    /// The next bytes, as many as there are.
    pub fn take(&mut self, len: usize) -> Vec<u8> {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken.to_vec()
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    /// Often small, sometimes anything.
    pub fn number(&mut self) -> u64 {
        let width = usize::from(self.byte() % 9);
        let mut bytes = [0; 8];
        let taken = self.take(width);
        bytes[..taken.len()].copy_from_slice(&taken);
        u64::from_le_bytes(bytes)
    }

    /// An address in or near `base`, or anywhere.
    fn address(&mut self, base: u64) -> u64 {
        match self.byte() % 4 {
            0 => self.number(),
            _ => base
                .wrapping_add(self.number() % (2 * LEN as u64))
                .wrapping_sub(LEN as u64 / 2),
        }
    }

    fn flip(&mut self) -> bool {
        self.byte().is_multiple_of(2)
    }

    /// Any message; its addresses are often around `base`.
    pub fn message(&mut self, base: u64) -> Message {
        let (req, elem) = (self.number(), self.number() as u32);
        match self.byte() % 20 {
            0 => Message::Read {
                req,
                elem,
                addr: self.address(base),
                len: self.number(),
            },
            1 => Message::Data {
                req,
                elem,
                offset: self.number(),
            },
            2 => Message::Done {
                req,
                code: -i32::from(self.byte() % 8),
                elem,
            },
            3 => Message::Msg(MsgPiece {
                seq: self.number(),
                total: self.number(),
                offset: self.number(),
                signals: self.flip().then(|| self.number()),
            }),
            4 => Message::Ping { stamp: req },
            5 => Message::Pong { stamp: req },
            6 => Message::Progress {
                req,
                bytes: self.number(),
            },
            7 => Message::Credit { limit: req },
            8 => Message::KeyAsk {
                req,
                addr: self.address(base),
                len: self.number(),
            },
            9 => Message::KeyIs {
                req,
                base: self.address(base),
                len: self.number(),
                min: self.number(),
                ordered: self.flip(),
            },
            10 => Message::KeyDrop { base: req },
            11 => Message::KeyDropped { base: req },
            12 => Message::Confirm { link: req },
            13 => Message::Goodbye {
                why: GoodbyeCode::GivenUp,
                by: life(req),
            },
            14 => Message::Refusal {
                why: RefusalCode::Busy,
                by: life(req),
            },
            15 => Message::Hello(Greet {
                link: req,
                attempt: self.number(),
                incarnation: life(self.number()),
                nonce: [1; 16],
                lost: self.flip().then(|| (true, self.number())),
                closed: self.flip(),
            }),
            16 => Message::Proof { mac: [2; 32] },
            17 => Message::Channel(Control {
                channel: self.number(),
                verb: self.verb(),
            }),
            _ => Message::Write(Piece {
                req,
                elem,
                last: self.flip(),
                flag: self.flip(),
                addr: self.address(base),
                len: self.number(),
                offset: self.number(),
            }),
        }
    }

    fn verb(&mut self) -> ChannelVerb {
        match self.byte() % 7 {
            0 => ChannelVerb::Open {
                slots: self.number(),
                slot_bytes: self.number(),
            },
            1 => ChannelVerb::Accept {
                ring: self.number(),
            },
            2 => ChannelVerb::Refuse,
            3 => ChannelVerb::Credit,
            4 => ChannelVerb::End {
                count: self.number(),
                clean: self.flip(),
            },
            5 => ChannelVerb::Quit,
            _ => ChannelVerb::Landed,
        }
    }

    /// Head and body of a frame: any bytes, or a real message with any body.
    pub fn frame(&mut self, base: u64) -> (Vec<u8>, Vec<u8>) {
        let len = usize::from(self.byte());
        let head = if self.byte().is_multiple_of(4) {
            self.take(len % 65)
        } else {
            wire::encode(&self.message(base)).as_slice().to_vec()
        };
        (head, self.take(len))
    }
}

/// A life that a number names.
pub fn life(number: u64) -> Incarnation {
    Incarnation {
        start_ns: number,
        random: number,
    }
}

/// A frame of the built-in transport.
pub fn framed(head: &[u8], body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0xc7, 0x5d, head.len() as u8, 0];
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(head);
    bytes.extend(body);
    bytes
}
