//! Engines without a progress thread: whoever holds the handles drives both ends of a connection, turn by turn. For
//! measurements that must not depend on when a thread gets to run (`cargo xtask bench-instructions`).

use std::os::fd::BorrowedFd;

use crate::config::Config;
use crate::engine::Engine;
use crate::error::Result;
use crate::transport::Transport;

/// Starts an engine over a transport that is there already, without a sentinel.
///
/// # Errors
/// As for [`Engine::start`].
pub fn start(config: Config, transport: Box<dyn Transport>) -> Result<Engine> {
    Engine::start_by_hand(config, transport)
}

/// One turn, as of a thread that polls; returns how much was done.
pub fn turn(engine: &Engine) -> usize {
    engine.hub().turn_by_hand()
}

/// Readable when the transport has something: to wait without turns that find nothing.
pub fn descriptor(engine: &Engine) -> BorrowedFd<'_> {
    engine.hub().transport_fd()
}
