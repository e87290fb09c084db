//! A clock that wakes the engine while connections are made over RDMA.
//!
//! UCX joins the ends of such a connection over datagrams, part of it on a thread of its own, and does not always wake who sleeps on
//! its worker: a dial then stood still until something else came. So the worker is progressed every few milliseconds while a
//! connection is young.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

const EVERY: Duration = Duration::from_millis(10);
/// As long as a dial and the handshake behind it may take.
const YOUNG: Duration = Duration::from_secs(6);

/// The clock.
pub(super) struct Nudge {
    timer: OwnedFd,
    until: Option<Instant>,
}

impl Nudge {
    /// A clock that stands.
    ///
    /// # Errors
    /// No descriptor left.
    pub(super) fn new() -> Result<Self, String> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)
            .map_err(|e| format!("cannot make a timer descriptor: {e}"))?;
        Ok(Self { timer, until: None })
    }

    /// Readable when it is time.
    pub(super) fn fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }

    /// A connection begins.
    pub(super) fn start(&mut self, now: Instant) {
        if self.until.is_none() {
            self.set(EVERY);
        }
        self.until = Some(now + YOUNG);
    }

    /// For each round: takes what woke the engine, and stops the clock when no connection is young.
    pub(super) fn look(&mut self, now: impl FnOnce() -> Instant) {
        let Some(until) = self.until else { return };
        let mut count = [0; 8];
        // Not yet, or so many times: either way it is not readable now.
        let _ = rustix::io::read(&self.timer, &mut count);
        if now() >= until {
            self.until = None;
            self.set(Duration::ZERO);
        }
    }

    fn set(&self, every: Duration) {
        let every = Timespec {
            tv_sec: 0,
            tv_nsec: every.as_nanos() as _,
        };
        let spec = Itimerspec {
            it_interval: every,
            it_value: every,
        };
        // Cannot fail: the descriptor is a timer and the value is in range.
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec);
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    fn wakes(nudge: &Nudge, within: Duration) -> bool {
        let mut fds = [PollFd::new(&nudge.timer, PollFlags::IN)];
        let limit = Timespec::try_from(within).expect("in range");
        poll(&mut fds, Some(&limit)).expect("polled") > 0
    }

    #[test]
    fn it_wakes_again_and_again_while_a_connection_is_young() {
        let mut nudge = Nudge::new().expect("a timer");
        let begun = Instant::now();
        assert!(!wakes(&nudge, Duration::from_millis(30)), "it stands");
        nudge.start(begun);
        for _ in 0..3 {
            assert!(wakes(&nudge, Duration::from_secs(10)));
            nudge.look(|| begun);
        }
        nudge.look(|| begun + YOUNG);
        assert!(!wakes(&nudge, Duration::from_millis(30)), "it stands again");
        nudge.start(begun);
        assert!(wakes(&nudge, Duration::from_secs(10)), "the next one");
    }
}
