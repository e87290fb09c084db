//! When to ask a peer whether it is there, and when to stop believing it.

/// The heartbeat of one link. All times are nanoseconds of one clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Heartbeat {
    interval: u64,
    timeout: u64,
    next_ping: u64,
    heard: u64,
}

/// What is to be done now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Beat {
    /// Nothing before this time.
    Rest {
        /// When to look again.
        until: u64,
    },
    /// Send a ping, then look again.
    Ping,
    /// The peer has been silent for the timeout.
    Suspect {
        /// For how long it has been silent.
        silence: u64,
    },
}

impl Heartbeat {
    pub(crate) fn new(interval: u64, timeout: u64, now: u64) -> Self {
        Self {
            interval,
            timeout,
            next_ping: now + interval,
            heard: now,
        }
    }

    /// Any bytes of the peer count.
    pub(crate) fn heard(&mut self, now: u64) {
        self.heard = now;
    }

    /// This engine itself did not run for `gap`: silence in that time says nothing of the peer.
    pub(crate) fn forgive(&mut self, gap: u64, now: u64) {
        self.heard = (self.heard + gap).min(now);
    }

    /// What is to be done at `now`.
    pub(crate) fn tick(&mut self, now: u64) -> Beat {
        let silence = now.saturating_sub(self.heard);
        if silence >= self.timeout {
            return Beat::Suspect { silence };
        }
        if now >= self.next_ping {
            self.next_ping = now + self.interval;
            return Beat::Ping;
        }
        Beat::Rest {
            until: self.next_ping.min(self.heard + self.timeout),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_peer_is_suspected_after_the_timeout() {
        let mut beat = Heartbeat::new(10, 30, 0);
        let mut pings = 0;
        let mut now = 0;
        let silence = loop {
            match beat.tick(now) {
                Beat::Rest { until } => {
                    assert!(until > now);
                    now = until;
                }
                Beat::Ping => pings += 1,
                Beat::Suspect { silence } => break silence,
            }
        };
        assert_eq!((now, silence, pings), (30, 30, 2));
    }

    #[test]
    fn anything_heard_postpones_the_suspicion() {
        let mut beat = Heartbeat::new(10, 30, 0);
        beat.heard(25);
        assert_eq!(beat.tick(30), Beat::Ping);
        assert_eq!(beat.tick(54), Beat::Ping);
        assert_eq!(beat.tick(55), Beat::Suspect { silence: 30 });
    }

    #[test]
    fn an_engine_that_slept_does_not_blame_its_peers() {
        let mut beat = Heartbeat::new(10, 30, 0);
        beat.forgive(100, 100);
        assert!(matches!(beat.tick(100), Beat::Ping));
        assert!(matches!(beat.tick(100), Beat::Rest { .. }));
    }
}
