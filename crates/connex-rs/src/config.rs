//! What an engine is told at its start.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::identity::LogicalId;
use crate::transport::tcp::TlsFiles;

/// What moves the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TransportChoice {
    /// UCX where RDMA is usable or `UCX_TLS` is set, else TCP; `secret` or `tls` makes it TCP.
    #[default]
    Auto,
    /// The built-in TCP transport.
    Tcp,
    /// UCX.
    Ucx,
}

impl TransportChoice {
    /// Parses `auto`, `tcp` or `ucx`.
    ///
    /// # Errors
    /// `Invalid` with the value and the three that are allowed.
    pub fn parse(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "tcp" => Ok(Self::Tcp),
            "ucx" => Ok(Self::Ucx),
            other => Err(Error::invalid(format!(
                "transport {other:?} is unknown: use \"auto\", \"tcp\" or \"ucx\""
            ))),
        }
    }
}

/// The shortest shared secret, in bytes.
pub const MIN_SECRET: usize = 16;

/// The longest time that may be given for heartbeats and deadlines: about 24 days, what a 32-bit count
/// of milliseconds can hold.
pub const MAX_TIMEOUT: Duration = Duration::from_millis(i32::MAX as u64);

/// The shortest stall time.
pub const MIN_STALL: Duration = Duration::from_millis(20);

/// What an engine is told at its start. Begin with [`Config::new`] and change what is to differ.
#[derive(Clone)]
pub struct Config {
    /// Who the engine is.
    pub id: LogicalId,
    /// Address or name to listen on; `0.0.0.0` and `::` are the wildcards (SPEC section 3).
    pub listen_ip: String,
    /// Port to listen on; 0 for any.
    pub port: u16,
    /// Address or name that goes into the local URL, where it is not `listen_ip`.
    pub advertise_ip: Option<String>,
    /// Time between heartbeats; `None`: this engine sends none (it answers them all the same).
    pub heartbeat: Option<Duration>,
    /// Silence after which a peer is suspected; `None`: three heartbeats.
    pub heartbeat_timeout: Option<Duration>,
    /// How long the progress thread polls after data traffic before it sleeps.
    pub spin: Duration,
    /// What moves the bytes.
    pub transport: TransportChoice,
    /// A secret that peers must share, of at least [`MIN_SECRET`] bytes.
    pub secret: Option<Vec<u8>>,
    /// TLS with peers, which makes the transport TCP.
    pub tls: Option<TlsFiles>,
    /// Whether small GPU transfers may be staged through host memory.
    pub allow_staging: bool,
    /// The most bytes of rings of [step channels](crate::channel) that one peer may have in this engine's memory.
    pub channel_bytes: u64,
    /// Whether a sentinel tells peers of this process's death. Obituaries of peers are received in any case.
    pub sentinel: bool,
    /// Time without progress of the process after which its sentinel makes peers suspect it; `None`: never. Needs `sentinel`.
    pub stall: Option<Duration>,
}

/// Default of [`Config::channel_bytes`]. Rings are mapped, not filled: untouched slots use no memory.
pub const CHANNEL_BYTES: u64 = 4 << 30;

impl Config {
    /// The defaults of SPEC section 3 for `id`.
    pub fn new(id: LogicalId) -> Self {
        Self {
            id,
            listen_ip: "0.0.0.0".into(),
            port: 0,
            advertise_ip: None,
            heartbeat: None,
            heartbeat_timeout: None,
            spin: Duration::from_micros(500),
            transport: TransportChoice::Auto,
            secret: None,
            tls: None,
            allow_staging: true,
            channel_bytes: CHANNEL_BYTES,
            sentinel: true,
            stall: None,
        }
    }

    /// The heartbeat interval and timeout, checked.
    ///
    /// # Errors
    /// `Invalid` if the timeout is not longer than the interval, or either is out of range.
    pub(crate) fn heartbeats(&self) -> Result<Option<(Duration, Duration)>> {
        let Some(interval) = self.heartbeat.filter(|i| !i.is_zero()) else {
            if self.heartbeat_timeout.is_some_and(|t| !t.is_zero()) {
                return Err(Error::invalid(
                    "heartbeat_timeout_ms is given but heartbeat_ms is 0: set heartbeat_ms to switch heartbeats on",
                ));
            }
            return Ok(None);
        };
        let timeout = self.heartbeat_timeout.unwrap_or(interval * 3);
        if interval > MAX_TIMEOUT || timeout > MAX_TIMEOUT {
            return Err(Error::invalid(format!(
                "heartbeats of {interval:?} with a timeout of {timeout:?}: at most {MAX_TIMEOUT:?} are allowed"
            )));
        }
        if timeout <= interval {
            return Err(Error::invalid(format!(
                "a heartbeat timeout of {timeout:?} is not longer than the interval of {interval:?}: every peer would be suspected"
            )));
        }
        Ok(Some((interval, timeout)))
    }

    /// The stall time, checked.
    ///
    /// # Errors
    /// `Invalid` if it is out of range.
    pub(crate) fn checked_stall(&self) -> Result<Option<Duration>> {
        match self.stall.filter(|s| !s.is_zero()) {
            Some(stall) if !(MIN_STALL..=MAX_TIMEOUT).contains(&stall) => {
                Err(Error::invalid(format!(
                    "a stall time of {stall:?}: it must be between {MIN_STALL:?}, below which ordinary scheduling looks like a stall, and {MAX_TIMEOUT:?}"
                )))
            }
            other => Ok(other),
        }
    }

    /// The secret, checked.
    ///
    /// # Errors
    /// `Invalid` if it is too short.
    pub(crate) fn checked_secret(&self) -> Result<Option<&[u8]>> {
        match &self.secret {
            Some(secret) if secret.len() < MIN_SECRET => Err(Error::invalid(format!(
                "the secret has {} bytes: at least {MIN_SECRET} are needed",
                secret.len()
            ))),
            other => Ok(other.as_deref()),
        }
    }
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config")
            .field("id", &self.id)
            .field("listen_ip", &self.listen_ip)
            .field("port", &self.port)
            .field("advertise_ip", &self.advertise_ip)
            .field("heartbeat", &self.heartbeat)
            .field("heartbeat_timeout", &self.heartbeat_timeout)
            .field("spin", &self.spin)
            .field("transport", &self.transport)
            .field("secret", &self.secret.as_ref().map(|_| "…"))
            .field("tls", &self.tls)
            .field("allow_staging", &self.allow_staging)
            .field("channel_bytes", &self.channel_bytes)
            .field("sentinel", &self.sentinel)
            .field("stall", &self.stall)
            .finish()
    }
}
