//! The one clock of the engine.

use rustix::time::{ClockId, clock_gettime};

/// CLOCK_MONOTONIC in nanoseconds: the clock of the events' `ts_ns`.
pub fn now_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// The wall clock in nanoseconds since the epoch; 0 before it.
pub(crate) fn wall_ns() -> u64 {
    let t = clock_gettime(ClockId::Realtime);
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + t.tv_nsec as u64
}
