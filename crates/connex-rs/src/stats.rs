//! Counters of an engine.
//!
//! They are written by whoever drives the engine and read by anyone at any time, so they are
//! relaxed atomics: each is exact, two read together need not be of the same instant.

use std::sync::atomic::{AtomicU64, Ordering};

/// One counter or gauge.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds one.
    pub fn add_one(&self) {
        self.add(1);
    }

    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Takes one away.
    pub fn sub_one(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// Sets a gauge.
    pub fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// The live counters.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: Counter,)+
        }

        /// A reading of all counters, with what else an engine tells about itself.
        #[non_exhaustive]
        #[derive(Clone, PartialEq, Eq, Debug, Default)]
        pub struct Stats {
            $($(#[doc = $doc])+ pub $name: u64,)+
            /// The transport that the engine listens on: `tcp` or `ucx`.
            pub transport: String,
            /// For each peer with a live link what carries its data.
            pub paths: Vec<PeerPath>,
            /// The helper process that tells peers of the death of this one.
            pub sentinel: SentinelState,
            /// Plain sentences on what makes this engine slower or less safe than it could be.
            pub warnings: Vec<String>,
        }

        impl Counters {
            /// Reads all counters.
            pub fn read(&self) -> Stats {
                Stats { $($name: self.$name.get(),)+ ..Stats::default() }
            }
        }

        impl Stats {
            /// The counters by name, in their order.
            pub fn counters(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)+]
            }
        }
    };
}

counters! {
    /// Connections opened, dialled and accepted.
    eps_created,
    /// Connections closed, whatever the reason.
    eps_closed,
    /// Peers with a live link.
    live_peers,
    /// Established links that were lost.
    failures,
    /// Peers that came back after having been bound before.
    rejoins,
    /// Links given up because heartbeats were not answered.
    heartbeat_failures,
    /// Events dropped or collapsed because the queue was full.
    dropped_events,
    /// Regions and managed buffers registered by the caller.
    regions,
    /// Their bytes.
    region_bytes,
    /// Keys of peers' regions held.
    remote_rkeys,
    /// Operations posted and not ended.
    inflight,
    /// Transfers that ended well.
    rma_ok,
    /// Transfers that failed.
    rma_err,
    /// Keys fetched from peers.
    rkey_fetches,
    /// Invalidations of keys received.
    invalidations,
    /// Operations that ran out of time.
    op_timeouts,
    /// Times the progress thread woke up.
    wakeups,
    /// Bytes sent in bodies of frames.
    bytes_sent,
    /// Bytes received in bodies of frames.
    bytes_received,
    /// Bytes copied between host and GPU memory, both ways.
    staged_bytes,
    /// Messages delivered to the application's queue.
    messages_received,
    /// Bytes of messages that wait for `recv_msg`.
    messages_queued_bytes,
    /// Connections refused or dropped before they proved an identity.
    strangers_refused,
    /// Requests of peers refused because no region holds their range.
    requests_refused,
    /// Times accept found no descriptor left.
    accept_backoffs,
    /// Links ended by an obituary of the peer's sentinel.
    obituaries,
    /// Datagrams that no live link was waiting for: forged, late, or a second copy.
    obituaries_unknown,
    /// Links ended because the peer's sentinel said that the peer is stalled.
    stall_suspicions,
    /// Links whose peer will not be told of this process's death, because the sentinel's table is full.
    obituaries_unlisted,
    /// Times this process's sentinel was started again.
    sentinel_restarts,
}

/// How the helper process of this process's engines is.
#[non_exhaustive]
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum SentinelState {
    /// Not asked for, or the engine is closed.
    #[default]
    Off,
    /// Being started.
    Starting,
    /// It watches.
    Running {
        /// Its process id.
        pid: u32,
    },
    /// It cannot run here: peers learn of this process's death by their transport.
    Unavailable {
        /// What was tried, and the system's words.
        reason: String,
    },
}

impl SentinelState {
    /// `off`, `starting`, `running`, `unavailable`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Starting => "starting",
            Self::Running { .. } => "running",
            Self::Unavailable { .. } => "unavailable",
        }
    }
}

/// What carries the data of one peer.
#[non_exhaustive]
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerPath {
    /// The peer.
    pub peer: String,
    /// For example `tcp`, `ucx:tcp/lo`, `ucx:sysv`.
    pub path: String,
    /// `requested` or `one-sided`.
    pub mode: &'static str,
}
