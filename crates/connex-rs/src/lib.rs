//! The engine.

pub mod identity;
pub mod peer;
