//! Step channels: what a pipeline stage hands to the next, in order, with flow control and a clear end.
//!
//! The receiver holds a ring of slots in its registered memory. A step (some arrays and a correlation number) is
//! one chain of writes into a free slot: the arrays, a header, and a flag word that becomes visible last. The receiver
//! looks at the arrays where they landed and frees the slot when it lets go of the [`Step`]; the sender, who knows
//! which slots are free, never writes to one that is in use.
//!
//! A channel is bound to one link, and so to one life of each side: when the link is lost both ends fail with the
//! steps that had not been released, and a peer that has come back opens a fresh one.
//!
//! ```no_run
//! # use connex_rs::{ChannelConfig, Engine, channel::Array};
//! # fn sender(engine: &Engine, url: &str) -> connex_rs::Result<()> {
//! let channel = engine.channel(url, "activations", ChannelConfig::default())?;
//! channel.send(&[Array::of(&[1.0f32; 6], &[2, 3])?], 1, None)?;
//! channel.close();
//! # Ok(()) }
//! # fn receiver(engine: &Engine) -> connex_rs::Result<()> {
//! for step in &engine.accept_channel(Some("activations"), None)? {
//!     let step = step?;
//!     let activations: Option<&[f32]> = step[0].elements();
//! }
//! # Ok(()) }
//! ```

mod array;
mod dtype;
mod receiver;
pub(crate) mod ring;
mod sender;
mod state;
mod table;

pub use array::{Array, OwnedArray, Step, View};
pub use dtype::{DType, Element};
pub use receiver::{Accepting, NextStep, Receiver, Steps};
pub use ring::{ALIGN, MAX_DIMS, MAX_NAME, MAX_SLOTS};
pub use sender::{Sender, Sending};

pub(crate) use ring::Layout;
pub(crate) use state::{Broken, End, STEP_LOST};
pub(crate) use table::{Channels, Inlet, Open, Outlet, Request};

use std::time::Duration;

use crate::engine::{Engine, Transfer};
use crate::error::{Error, Result};

/// The ring of a channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChannelConfig {
    /// Steps that may be out at a time, from their send to their release: 1 to [`MAX_SLOTS`].
    pub slots: usize,
    /// Bytes of arrays in one step, each array rounded up to [`ALIGN`]; the header of up to some hundred arrays does
    /// not count.
    pub slot_bytes: usize,
}

impl Default for ChannelConfig {
    /// 8 slots of 1 MiB.
    fn default() -> Self {
        Self {
            slots: 8,
            slot_bytes: 1 << 20,
        }
    }
}

impl Engine {
    /// Opens a channel to a peer, connecting on demand. Does not wait: what becomes of the opening is told by
    /// [`Sender::wait_open`] and by the first send.
    ///
    /// # Errors
    /// `Invalid` for a bad URL, name or ring, `Canceled` after `close`.
    pub fn channel(&self, peer_url: &str, name: &str, config: ChannelConfig) -> Result<Sender> {
        if name.len() > MAX_NAME {
            return Err(Error::invalid(format!(
                "a channel name of {} bytes: at most {MAX_NAME} are allowed",
                name.len()
            )));
        }
        let layout =
            Layout::new(config.slots as u64, config.slot_bytes as u64).map_err(Error::invalid)?;
        Sender::open(self, peer_url, name, layout)
    }

    /// Accepts the oldest channel that a peer has opened, of that name if one is given, and makes its ring.
    ///
    /// Channels that are not accepted wait here, in bounded number, until their sender gives up.
    ///
    /// # Errors
    /// `TimedOut` after `timeout` (`None`: never); `Transport` if there is no memory for the ring (the sender is told);
    /// `Canceled` after `close`.
    pub fn accept_channel(
        &self,
        name: Option<&str>,
        timeout: Option<Duration>,
    ) -> Result<Receiver> {
        Receiver::accept(self, name, timeout)
    }

    /// Ends with the next channel that wants to be accepted, at once if one of that name waits: for bindings with a loop of
    /// their own. That it has ended says that it is worth a try, no more.
    pub fn channel_waits(&self, name: Option<&str>) -> Transfer {
        self.change(self.shared().channels.wait(name))
    }

    /// As [`accept_channel`](Self::accept_channel), as a future.
    pub fn accept_channel_async(&self, name: Option<&str>) -> Accepting<'_> {
        Accepting::new(self, name)
    }
}
