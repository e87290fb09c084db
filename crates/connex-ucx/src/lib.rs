//! A small, safe wrapper of UCX's `libucp`, loaded at run time.
//!
//! Nothing of UCX is needed to compile: [`Library::load`] finds a `libucp` of version 1.13 or newer on the
//! host (its documentation has the order) and everything else hangs off it:
//!
//! ```text
//! Library ── Config ── Context ── Worker ── Listener ── ConnRequest
//!                         │          └───── Endpoint ── RemoteKey
//!                         └──────────────── Memory
//! ```
//!
//! Children hold their parents, so no drop order can be wrong. A [`Worker`] may move between
//! threads but serves one at a time: whatever touches UCX through it takes `&mut Worker`. The handles of
//! a worker ([`Endpoint`], [`Listener`], [`ConnRequest`], [`RemoteKey`]) may be dropped on any thread at
//! any time; the worker then closes what they stood for in its next [`Worker::progress`].
//!
//! Results arrive as [`Event`]s, and received messages at a [`Receiver`], both only from
//! [`Worker::progress`]. Nothing unwinds through UCX: a [`Receiver`] that panics costs the
//! connection, not the process.

mod addr;
mod config;
mod context;
mod core;
mod endpoint;
mod error;
mod event;
mod find;
mod guard;
mod lanes;
mod library;
mod listener;
mod lock;
mod memory;
mod printed;
mod request;
mod rkey;
mod socket;
mod status;
mod sys;
mod worker;

pub use config::Config;
pub use context::{Context, Features};
pub use endpoint::{CloseMode, Endpoint, EpId, Lane, Protocol};
pub use error::{Error, LoadError, Result};
pub use event::{Event, Landing, Receiver};
pub use find::{Choice, set_wheel_dir};
pub use guard::ScopedEnv;
pub use library::{Library, MIN_VERSION, Version};
pub use listener::{ConnRequest, Listener, ListenerId};
pub use memory::{Memory, MemoryType};
pub use request::Posted;
pub use rkey::RemoteKey;
pub use status::Status;
pub use worker::Worker;
