//! The data plane of a pipeline of model stages: moves step data between endpoints at the speed of the
//! network and tells within milliseconds when a peer dies.
//!
//! [`Engine`] is the way in. See `docs/architecture.md` in the repository for how it is built.

#[cfg(by_hand)]
#[doc(hidden)]
pub mod by_hand;
pub mod channel;
mod clock;
mod completion;
pub mod config;
mod core;
pub mod device;
mod engine;
mod environment;
mod error;
pub mod event;
mod fork;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod heartbeat;
pub mod host;
pub mod identity;
mod inbox;
mod memory;
pub mod peer;
mod progress;
mod random;
pub mod region;
mod sentinel;
pub mod stats;
mod sync;
mod transfer;
pub mod transport;
pub mod wire;

pub use channel::{ChannelConfig, Receiver, Sender, Step};
pub use clock::now_ns;
pub use config::{Config, TransportChoice};
pub use engine::{Engine, Range, Recipient, Transfer};
pub use error::{Error, ErrorKind, Result};
pub use event::{Event, EventKind};
pub use identity::{LogicalId, PeerUrl};
pub use region::Access;
pub use stats::{SentinelState, Stats};
pub use transport::tcp::TlsFiles;

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
