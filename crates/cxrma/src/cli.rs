//! The command line. What is wrong with a value is said here, with the value and the way out.

use std::net::IpAddr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use connex_rs::identity::Host;
use connex_rs::{Config, LogicalId, PeerUrl, TransportChoice};

/// Measures connex-rs: latency, bandwidth, chains, signals, connecting, idle cost.
#[derive(Parser)]
#[command(name = "cxrma", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Measure two processes on this host: starts an owner, reads from it and writes to it
    Local(LocalArgs),
    /// Offer memory to a reader on this or another host; prints what the reader needs
    Owner(OwnerArgs),
    /// Measure against an owner
    Reader(ReaderArgs),
    /// Measure what survivors see, and when, while processes are killed, stopped and started again
    Faults(FaultsArgs),
    /// Run small engines until standard input ends
    #[command(hide = true)]
    Peers(PeersArgs),
    /// Take links down between two network namespaces of its own
    #[command(hide = true)]
    LinkDown(LinkDownArgs),
}

/// How an engine is started.
#[derive(Args, Clone)]
pub(crate) struct EngineArgs {
    /// What moves the bytes: auto, tcp or ucx
    #[arg(long, default_value = "auto", value_parser = transport, env = "CONNEX_RS_TRANSPORT")]
    pub(crate) transport: TransportChoice,
    /// How long the engine polls after traffic before it sleeps, in microseconds
    #[arg(long, default_value_t = 500, value_name = "US")]
    pub(crate) spin_us: u64,
}

impl EngineArgs {
    /// A configuration for an engine of ours. `stage` and `replica` tell engines of one run apart.
    pub(crate) fn config(
        &self,
        ip: &str,
        model: &str,
        stage: u32,
        replica: u32,
    ) -> anyhow::Result<Config> {
        let mut config = Config::new(LogicalId::new(model, stage, 0, replica)?);
        config.listen_ip = ip.to_owned();
        config.transport = self.transport;
        config.spin = Duration::from_micros(self.spin_us);
        Ok(config)
    }

    /// The same settings as arguments of a child process.
    pub(crate) fn to_args(&self) -> Vec<String> {
        let transport = match self.transport {
            TransportChoice::Auto => "auto",
            TransportChoice::Tcp => "tcp",
            TransportChoice::Ucx => "ucx",
        };
        [
            "--transport",
            transport,
            "--spin-us",
            &self.spin_us.to_string(),
        ]
        .map(str::to_owned)
        .to_vec()
    }
}

#[derive(Args)]
pub(crate) struct LocalArgs {
    /// Address of this host that both processes use, as 127.0.0.1 or ::1
    #[arg(long, value_parser = ip)]
    pub(crate) ip: String,
    /// The owner's memory is that of this CUDA device
    #[arg(long, value_name = "D")]
    pub(crate) gpu_owner: Option<u32>,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
}

#[derive(Args)]
pub(crate) struct OwnerArgs {
    /// Address of this host to listen on
    #[arg(long, value_parser = ip)]
    pub(crate) ip: String,
    /// Port to listen on; 0 for any
    #[arg(long, default_value_t = 0)]
    pub(crate) port: u16,
    /// Offer enough memory for 64 MB transfers (576 MiB instead of 192 MiB)
    #[arg(long)]
    pub(crate) large: bool,
    /// Offer memory of this CUDA device
    #[arg(long, value_name = "D")]
    pub(crate) gpu_owner: Option<u32>,
    /// Print one line of JSON instead of text
    #[arg(long)]
    pub(crate) json: bool,
    /// End when standard input ends
    #[arg(long, hide = true)]
    pub(crate) until_eof: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

#[derive(Args)]
pub(crate) struct ReaderArgs {
    /// URL that the owner printed: ip:port#model|stage|shard|replica
    #[arg(long, value_parser = url)]
    pub(crate) url: String,
    /// Address that the owner printed, as 0x7f…
    #[arg(long, value_parser = address)]
    pub(crate) addr: u64,
    /// Address of this host to listen on; default: the one from which the owner is reached
    #[arg(long, value_parser = ip)]
    pub(crate) ip: Option<String>,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
}

/// What is measured, and how long.
#[derive(Args, Clone)]
pub(crate) struct MeasureArgs {
    /// Transfer sizes, as 4K,1M; default 4K,16K,64K,256K,1M,4M,16M
    #[arg(long, value_delimiter = ',', value_parser = size, value_name = "SIZES")]
    pub(crate) sizes: Vec<usize>,
    /// Add 64 MB transfers
    #[arg(long)]
    pub(crate) large: bool,
    /// The reader's memory is that of this CUDA device
    #[arg(long, value_name = "D", conflicts_with = "verify_chain")]
    pub(crate) gpu_reader: Option<u32>,
    /// Operations per point
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u64).range(1..), value_name = "N")]
    pub(crate) iterations: u64,
    /// Most time per point, in milliseconds; at least 5 operations are made
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..), value_name = "MS")]
    pub(crate) budget_ms: u64,
    /// In flight when streaming
    #[arg(long, value_delimiter = ',', default_value = "1,4,8", value_parser = clap::value_parser!(u16).range(1..=64), value_name = "DEPTHS")]
    pub(crate) depths: Vec<u16>,
    /// What to measure; default latency,stream,chain,signal,channel,connect,open,idle
    #[arg(long, value_delimiter = ',', value_enum, value_name = "WHAT")]
    pub(crate) only: Vec<What>,
    /// Measure everything, also batches, threads, futures and growth
    #[arg(long, conflicts_with = "only")]
    pub(crate) all: bool,
    /// Instead of measuring: prove that a consumer that polls never sees a chain's flag before its data
    #[arg(long, conflicts_with_all = ["only", "all"])]
    pub(crate) verify_chain: bool,
    /// For --verify-chain: how long; for the idle measurement: how long it looks
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..), value_name = "N")]
    pub(crate) seconds: u64,
    /// For --verify-chain: send the flag first, which must be caught (a test of the test)
    #[arg(long, hide = true, requires = "verify_chain")]
    pub(crate) break_order: bool,
    /// Print JSON instead of tables
    #[arg(long)]
    pub(crate) json: bool,
}

/// A kind of measurement.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum What {
    /// Blocking reads and writes
    Latency,
    /// Bandwidth with some in flight
    Stream,
    /// put_chain of payload, header and flag, against one write of the sum
    Chain,
    /// put_signal
    Signal,
    /// Step channels of 64K, 1M and 16M, or --sizes; 1 and 4 steps in flight
    Channel,
    /// Connect to first read
    Connect,
    /// First use: connect to the end of the first put_chain, channel to its first step in place
    Open,
    /// CPU of an idle engine with 10 peers, heartbeats on
    Idle,
    /// Batches of 10 000 × 4 KB against one transfer
    Batch,
    /// 8 threads against one
    Threads,
    /// Futures against the blocking call
    Await,
    /// Round robin over 1 to 256 peers
    Growth,
}

/// What is done to processes, how often, and how large they are.
#[derive(Args)]
pub(crate) struct FaultsArgs {
    /// Address of this host that all processes use, as 127.0.0.1 or ::1
    #[arg(long, value_parser = ip)]
    pub(crate) ip: String,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// What to measure; default everything
    #[arg(long, value_delimiter = ',', value_enum, value_name = "WHAT")]
    pub(crate) only: Vec<Fault>,
    /// Kills for each line of the table
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..), value_name = "N")]
    pub(crate) kills: u64,
    /// Peers that the survivor has when one of them is killed
    #[arg(long, value_delimiter = ',', default_value = "1,16,64", value_parser = clap::value_parser!(u32).range(1..=1024), value_name = "NUMBERS")]
    pub(crate) peers: Vec<u32>,
    /// Survivors that have the victim as their peer, besides the lines with one
    #[arg(long, value_delimiter = ',', default_value = "64", value_parser = clap::value_parser!(u32).range(1..=256), value_name = "NUMBERS")]
    pub(crate) survivors: Vec<u32>,
    /// Memory that the victim has touched, as 10M,1G,8G
    #[arg(long, value_delimiter = ',', default_value = "10M", value_parser = ballast, value_name = "SIZES")]
    pub(crate) ballast: Vec<usize>,
    /// How often a peer is stopped, and how often a link is taken down
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..), value_name = "N")]
    pub(crate) stops: u64,
    /// Heartbeat interval of the survivor of a stop or a link that goes down; its timeout is three times that
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=60_000), value_name = "MS")]
    pub(crate) heartbeat_ms: u64,
    /// Time without progress after which the sentinel of a stopped process speaks
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(20..=60_000), value_name = "MS")]
    pub(crate) stall_ms: u64,
    /// Fresh engines that connect
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..), value_name = "N")]
    pub(crate) connects: u64,
    /// Kills and restarts during the search for stalls
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..), value_name = "N")]
    pub(crate) churns: u64,
    /// Kill and rejoin cycles after which nothing may have grown
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..), value_name = "N")]
    pub(crate) cycles: u64,
    /// Peers that are kept by heartbeats of one second
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1024), value_name = "N")]
    pub(crate) heartbeat_peers: u32,
    /// How long the heartbeats are watched
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..), value_name = "SECONDS")]
    pub(crate) seconds: u64,
    /// How long all processors are kept busy while false alarms are counted
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..), value_name = "SECONDS")]
    pub(crate) load_seconds: u64,
    /// Print JSON instead of tables
    #[arg(long)]
    pub(crate) json: bool,
}

/// A kind of fault.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// SIGKILL to the event, and restart to the first read
    Kill,
    /// SIGSTOP to the suspicion, by heartbeats
    Stop,
    /// SIGSTOP to the suspicion, by the sentinel of the stopped process
    StopSentinel,
    /// A network link goes down, to the suspicion, by heartbeats; between network namespaces, which needs root
    LinkDown,
    /// Connect to the first read
    Connect,
    /// Longest read between healthy peers while others die and come back
    Stall,
    /// Many kill and rejoin cycles: does anything grow?
    Cycles,
    /// CPU of heartbeats to many peers
    Heartbeats,
    /// False alarms while all processors are busy
    Load,
}

impl FaultsArgs {
    /// Whether `what` is asked for by its name.
    pub(crate) fn names(&self, what: Fault) -> bool {
        self.only.contains(&what)
    }

    /// Whether `what` is to be measured.
    pub(crate) fn wants(&self, what: Fault) -> bool {
        self.only.is_empty() || self.only.contains(&what)
    }
}

/// Small engines of one process.
#[derive(Args)]
pub(crate) struct PeersArgs {
    #[arg(long)]
    pub(crate) ip: String,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[arg(long)]
    pub(crate) stage: u32,
    #[arg(long)]
    pub(crate) count: u32,
    #[arg(long, default_value_t = 0)]
    pub(crate) heartbeat_ms: u64,
    #[arg(long, default_value_t = 0)]
    pub(crate) port: u16,
    #[arg(long, default_value_t = 0)]
    pub(crate) ballast: usize,
    #[arg(long, default_value_t = 0)]
    pub(crate) stall_ms: u64,
}

/// A survivor and a peer, and a link between them that goes down.
#[derive(Args)]
pub(crate) struct LinkDownArgs {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[arg(long)]
    pub(crate) heartbeat_ms: u64,
    #[arg(long)]
    pub(crate) count: u64,
}

/// The size that `--large` adds.
pub(crate) const LARGE: usize = 64 << 20;

/// Sizes that are measured when none are given.
const SIZES: [usize; 7] = [
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
];

/// Those of them that steps of channels have then.
const STEPS: [usize; 3] = [64 << 10, 1 << 20, 16 << 20];

impl MeasureArgs {
    /// The most transfers in flight at a time.
    pub(crate) fn deepest(&self) -> usize {
        self.depths.iter().copied().max().unwrap_or(1).into()
    }

    /// The sizes, in order.
    pub(crate) fn sizes(&self) -> Vec<usize> {
        let mut sizes = if self.sizes.is_empty() {
            SIZES.to_vec()
        } else {
            self.sizes.clone()
        };
        if self.large {
            sizes.push(LARGE);
        }
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// The sizes of steps, in order: whole words.
    pub(crate) fn steps(&self) -> Vec<usize> {
        let mut sizes = self.sizes();
        if self.sizes.is_empty() {
            sizes.retain(|bytes| STEPS.contains(bytes) || *bytes == LARGE);
        }
        for bytes in &mut sizes {
            *bytes = bytes.next_multiple_of(8);
        }
        sizes.dedup();
        sizes
    }

    /// Whether `what` is to be measured.
    pub(crate) fn wants(&self, what: What) -> bool {
        if self.all {
            return true;
        }
        if !self.only.is_empty() {
            return self.only.contains(&what);
        }
        !matches!(
            what,
            What::Batch | What::Threads | What::Await | What::Growth
        )
    }

    /// Most time per point.
    pub(crate) fn budget(&self) -> Duration {
        Duration::from_millis(self.budget_ms)
    }
}

/// Parses the size of a transfer.
pub(crate) fn size(text: &str) -> Result<usize, String> {
    bytes(text, 1 << 30).ok_or_else(|| format!("{text:?} is not a size: write bytes or a number with K, M or G, as 4096, 64K or 16M (at most 1G)"))
}

/// Parses the size of a process.
fn ballast(text: &str) -> Result<usize, String> {
    bytes(text, 1 << 40).ok_or_else(|| format!("{text:?} is not a size: write bytes or a number with K, M or G, as 10M or 8G (at most 1024G)"))
}

/// Parses `4K`, `1M`, `2G` or a number of bytes, from 1 to `most`.
fn bytes(text: &str, most: usize) -> Option<usize> {
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let number: usize = digits.parse().ok()?;
    number
        .checked_mul(1 << shift)
        .filter(|bytes| (1..=most).contains(bytes))
}

fn transport(text: &str) -> Result<TransportChoice, String> {
    TransportChoice::parse(text).map_err(|e| e.to_string())
}

fn ip(text: &str) -> Result<String, String> {
    match text.parse::<Host>() {
        Ok(Host::V4(addr)) if addr == std::net::Ipv4Addr::BROADCAST => {
            Err(format!("{addr} is no address of a host"))
        }
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(format!(
            "{error}; give an address of this host, as 127.0.0.1 or ::1"
        )),
    }
}

fn url(text: &str) -> Result<String, String> {
    text.parse::<PeerUrl>()
        .map(|url| url.to_string())
        .map_err(|error| format!("{error}; give the URL that `cxrma owner` printed, in quotes"))
}

fn address(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    };
    parsed
        .filter(|&addr| addr != 0 && addr.is_multiple_of(8))
        .ok_or_else(|| format!("{text:?} is not the address of an owner's buffer: give the one that `cxrma owner` printed, as 0x7f0000001000"))
}

/// The address of this host from which `url` is reached.
pub(crate) fn address_towards(url: &str) -> anyhow::Result<IpAddr> {
    let url: PeerUrl = url.parse()?;
    let addrs = connex_rs::host::resolve(&url.host, url.port).map_err(anyhow::Error::msg)?;
    let mut last = None;
    for addr in addrs {
        let any: IpAddr = if addr.is_ipv6() {
            std::net::Ipv6Addr::UNSPECIFIED.into()
        } else {
            std::net::Ipv4Addr::UNSPECIFIED.into()
        };
        // Connecting a datagram socket sends nothing; it asks the routing table.
        match std::net::UdpSocket::bind((any, 0))
            .and_then(|socket| socket.connect(addr).and_then(|()| socket.local_addr()))
        {
            Ok(local) => return Ok(local.ip()),
            Err(error) => last = Some(error),
        }
    }
    anyhow::bail!(
        "no route to {}: {}; give the address to use with --ip",
        url.authority(),
        last.map_or_else(|| "it has no address".to_owned(), |e| e.to_string())
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_parse_or_say_what_is_wrong() {
        assert_eq!(size("4K"), Ok(4096));
        assert_eq!(size("1m"), Ok(1 << 20));
        assert_eq!(size("77"), Ok(77));
        for wrong in [
            "",
            "K",
            "-1",
            "1T",
            "2G",
            "99999999999999999999",
            "18014398509481984K",
            "0",
            "é",
        ] {
            assert!(
                size(wrong).is_err_and(|e| e.contains(&format!("{wrong:?}")) && e.contains("64K")),
                "{wrong:?}"
            );
        }
    }

    #[test]
    fn addresses_parse_or_say_what_is_wrong() {
        assert_eq!(address("0x7f00"), Ok(0x7f00));
        assert_eq!(address("4096"), Ok(4096));
        for wrong in ["0", "0x", "7f", "0x7", "-8"] {
            assert!(
                address(wrong).is_err_and(|e| e.contains(wrong) && e.contains("cxrma owner")),
                "{wrong}"
            );
        }
    }
}
