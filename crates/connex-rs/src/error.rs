//! The one error type of the crate.

use std::fmt;

use crate::identity::LogicalId;

/// What kind of failure it was; each has a code (SPEC section 5) that callers from other languages see.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ErrorKind {
    /// The transport failed in a way that is not one of the others. Code -1.
    Transport,
    /// The peer is dead, unknown, refused us or is somebody else. Code -2.
    PeerFailed,
    /// Time ran out. The connection has been closed. Code -3.
    TimedOut,
    /// The request cannot be carried out as it stands. Code -4. The connection stays.
    Invalid,
    /// The engine was closed, or the peer disconnected on request. Code -5.
    Canceled,
}

impl ErrorKind {
    /// The code of SPEC section 5.
    pub fn code(self) -> i32 {
        match self {
            ErrorKind::Transport => -1,
            ErrorKind::PeerFailed => -2,
            ErrorKind::TimedOut => -3,
            ErrorKind::Invalid => -4,
            ErrorKind::Canceled => -5,
        }
    }

    fn from_code(code: i32) -> Self {
        match code {
            -2 => ErrorKind::PeerFailed,
            -3 => ErrorKind::TimedOut,
            -4 => ErrorKind::Invalid,
            -5 => ErrorKind::Canceled,
            _ => ErrorKind::Transport,
        }
    }
}

/// A failed call: its kind, the peer it concerned, and a sentence that names the thing, the value
/// and the way out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    kind: ErrorKind,
    peer: Option<Box<LogicalId>>,
    text: Box<str>,
    /// No allocation while it is empty, as it nearly always is.
    untaken: Box<[u64]>,
}

/// `Result` with the crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of any kind.
    pub fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self {
            kind,
            peer: None,
            text: text.into().into_boxed_str(),
            untaken: Box::default(),
        }
    }

    /// The request cannot be carried out as it stands.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, text)
    }

    /// The engine was closed.
    pub fn closed() -> Self {
        Self::new(ErrorKind::Canceled, "canceled: the engine is closed")
    }

    /// Names the peer that the call concerned.
    #[must_use]
    pub fn with_peer(mut self, peer: &LogicalId) -> Self {
        self.peer = Some(Box::new(peer.clone()));
        self
    }

    /// Names the steps of a channel that failed whose slots had not been released.
    #[must_use]
    pub(crate) fn with_untaken(mut self, untaken: Vec<u64>) -> Self {
        self.untaken = untaken.into_boxed_slice();
        self
    }

    /// Of a failed step channel: the correlation numbers of the steps whose slots had not been released, in the order
    /// of their sends. Empty for every other error.
    pub fn untaken(&self) -> &[u64] {
        &self.untaken
    }

    /// What kind of failure it was.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The code of SPEC section 5.
    pub fn code(&self) -> i32 {
        self.kind.code()
    }

    /// The peer, where there was one.
    pub fn peer(&self) -> Option<&LogicalId> {
        self.peer.as_deref()
    }

    /// The sentence alone, without the peer.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// From a code that came over the wire.
    pub(crate) fn from_code(code: i32, text: impl Into<String>) -> Self {
        Self::new(ErrorKind::from_code(code), text)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.peer {
            Some(peer) => write!(f, "peer {peer}: {}", self.text),
            None => f.write_str(&self.text),
        }
    }
}

impl std::error::Error for Error {}
