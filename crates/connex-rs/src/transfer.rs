//! One operation from its post to its end: what it moves, how far it is, when its time is up.
//!
//! Plain data without I/O; the core drives it.

use std::sync::Arc;

use crate::channel::Outlet;
use crate::completion::Completion;
use crate::core::one_sided;
use crate::device::Residence;
use crate::error::Error;
use crate::region::Lease;
use crate::transport::ConnId;

/// Names an operation of this engine; also its request number on the wire. Never reused.
pub(crate) type OpId = u64;

/// How long an operation may make no progress when no deadline was given (SPEC section 5).
pub(crate) const STALL: u64 = 3_000_000_000;

/// One range to be moved.
#[derive(Debug)]
pub(crate) struct Element {
    /// First byte here.
    pub(crate) local: usize,
    /// First byte in the peer.
    pub(crate) remote: u64,
    /// Bytes; never 0.
    pub(crate) len: usize,
    /// Bytes that have come (read) or were handed to the transport (write).
    pub(crate) done: usize,
    /// Its place among the ranges that the caller gave, empty ones included; none if there was one alone.
    pub(crate) given: Option<u32>,
    /// Bytes in place (read): those for GPU memory have to be copied first.
    pub(crate) placed: usize,
    /// Keeps the local memory.
    pub(crate) lease: Lease,
    /// Where the local memory lives, if not in the host's.
    pub(crate) residence: Option<Residence>,
}

/// Says of which of the caller's ranges an error text speaks. `elem` may come from a peer.
pub(crate) fn of_element(elements: &[Element], elem: usize, text: &str) -> String {
    match elements.get(elem).and_then(|element| element.given) {
        Some(given) => format!("element {given}: {text}"),
        None => text.to_owned(),
    }
}

/// What an operation does.
#[derive(Debug)]
pub(crate) enum Work {
    /// Reads ranges of the peer.
    Read {
        elements: Vec<Element>,
        /// The next element to be asked for.
        next: usize,
        /// Elements asked for and not answered.
        out: usize,
    },
    /// Writes ranges in the peer.
    Write {
        elements: Vec<Element>,
        /// The element that is being sent.
        next: usize,
        /// The last element becomes visible after all others.
        chain: bool,
        /// The message that follows the data.
        signal: Option<Letter>,
    },
    /// Sends a message; done when it is accepted for sending.
    Message(Letter),
    /// Asks for a channel; done when the peer has been asked.
    Open(Arc<Outlet>),
}

/// A message on its way out.
#[derive(Debug, Default)]
pub(crate) struct Letter {
    pub(crate) bytes: Vec<u8>,
    /// Its number on the link, once it has credit.
    pub(crate) seq: Option<u64>,
}

/// When an operation's time is up. Nanoseconds of the monotonic clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Deadline {
    /// At this time, whatever happens.
    At(u64),
    /// [`STALL`] after the last progress.
    Stall,
    /// Never: a message that waits for credit.
    Never,
}

/// One operation.
#[derive(Debug)]
pub(crate) struct Op {
    /// Index of the peer.
    pub(crate) peer: usize,
    pub(crate) work: Work,
    pub(crate) completion: Arc<Completion>,
    pub(crate) deadline: Deadline,
    /// When it was posted, for error texts.
    pub(crate) posted: u64,
    /// When it last moved.
    pub(crate) moved: u64,
    /// The connection that it was started on.
    pub(crate) conn: Option<ConnId>,
    /// It is to end with this once its connection has let go of the memory.
    pub(crate) doom: Option<Error>,
    /// How far it is, if it goes one-sided.
    pub(crate) one_sided: Option<one_sided::Progress>,
    /// Its entry in the set of timers.
    pub(crate) timer: Option<u64>,
    /// The channel whose step or opening it is: fails with it.
    pub(crate) channel: Option<Arc<Outlet>>,
}

impl Op {
    /// Bytes of all elements.
    pub(crate) fn bytes(&self) -> usize {
        match &self.work {
            Work::Read { elements, .. } | Work::Write { elements, .. } => {
                elements.iter().map(|e| e.len).sum()
            }
            Work::Message(letter) => letter.bytes.len(),
            Work::Open(_) => 0,
        }
    }

    /// Whether there is nothing to be moved: it ends as soon as the link is up.
    pub(crate) fn is_empty(&self) -> bool {
        match &self.work {
            Work::Read { elements, .. }
            | Work::Write {
                elements,
                signal: None,
                ..
            } => elements.is_empty(),
            _ => false,
        }
    }

    /// The message that needs credit before the operation may start.
    pub(crate) fn letter(&self) -> Option<&Letter> {
        match &self.work {
            Work::Message(letter)
            | Work::Write {
                signal: Some(letter),
                ..
            } => Some(letter),
            _ => None,
        }
    }

    /// As [`letter`](Self::letter), to be changed.
    pub(crate) fn letter_mut(&mut self) -> Option<&mut Letter> {
        match &mut self.work {
            Work::Message(letter)
            | Work::Write {
                signal: Some(letter),
                ..
            } => Some(letter),
            _ => None,
        }
    }

    /// Whether it moves memory (and is counted as a transfer).
    pub(crate) fn is_transfer(&self) -> bool {
        !matches!(self.work, Work::Message(_) | Work::Open(_))
    }

    /// Whether it writes the caller's memory.
    pub(crate) fn is_read(&self) -> bool {
        matches!(self.work, Work::Read { .. })
    }

    /// Whether its local memory overlaps a range.
    pub(crate) fn touches(&self, addr: usize, len: usize) -> bool {
        match &self.work {
            Work::Read { elements, .. } | Work::Write { elements, .. } => {
                elements.iter().any(|e| {
                    e.local < addr.saturating_add(len) && addr < e.local.saturating_add(e.len)
                })
            }
            Work::Message(_) | Work::Open(_) => false,
        }
    }

    /// When its time is up, as things stand.
    pub(crate) fn due(&self) -> Option<u64> {
        match self.deadline {
            Deadline::At(at) => Some(at),
            Deadline::Stall => Some(self.moved + STALL),
            Deadline::Never => None,
        }
    }

    /// What it is, for error texts.
    pub(crate) fn describe(&self) -> String {
        let bytes = self.bytes();
        match &self.work {
            Work::Read { elements, .. } => match elements.first() {
                Some(e) => format!("read of {bytes} bytes at {:#x}", e.remote),
                None => "read of 0 bytes".into(),
            },
            Work::Write {
                elements,
                chain,
                signal,
                ..
            } => {
                let what = match (chain, signal) {
                    (true, _) => "chain",
                    (_, Some(_)) => "write with signal",
                    _ => "write",
                };
                match elements.first() {
                    Some(e) => format!("{what} of {bytes} bytes at {:#x}", e.remote),
                    None => format!("{what} of 0 bytes"),
                }
            }
            Work::Message(_) => format!("message of {bytes} bytes"),
            Work::Open(outlet) => format!("opening of {outlet:?}"),
        }
    }
}
