//! Small engines, many in one process: the far ends of measurements with many peers.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use connex_rs::{Engine, Range, SentinelState, now_ns};

use crate::cli::PeersArgs;
use crate::control::{PATIENCE, Peer};
use crate::pattern;

/// Model name of all of them.
pub(crate) const MODEL: &str = "cxrma-peer";

/// Starts engines with replicas 0 … and one filled page each.
///
/// # Errors
/// If an engine cannot be started.
pub(crate) fn start(args: &PeersArgs) -> anyhow::Result<Vec<(Engine, Peer)>> {
    let count = args.count;
    let time = |ms: u64| (ms > 0).then(|| Duration::from_millis(ms));
    (0..count)
        .map(|replica| {
            let mut config = args.engine.config(&args.ip, MODEL, args.stage, replica)?;
            config.port = args.port;
            // Far ends are many in one process: polling ones would take the processors from each other.
            config.spin = if count > 1 {
                Duration::ZERO
            } else {
                config.spin
            };
            config.heartbeat = time(args.heartbeat_ms);
            config.stall = time(args.stall_ms);
            let started = Engine::start(config.with_environment()?)
                .with_context(|| format!("cannot start engine {replica} of {count}"))?;
            let addr = started.allocate_managed_buffer(Peer::BYTES)?;
            // SAFETY: a page that was just allocated and lives until the engine closes.
            unsafe { pattern::fill(addr, Peer::BYTES, Peer::SEED) }?;
            let peer = Peer {
                url: started.local_url().to_owned(),
                addr: addr as u64,
                started_ns: now_ns(),
            };
            Ok((started, peer))
        })
        .collect()
}

/// One blocking read of all of a peer's memory into `dst`, checked.
///
/// # Errors
/// If it fails or the bytes are wrong.
pub(crate) fn read(
    engine: &Engine,
    peer: &Peer,
    dst: &mut Page,
    timeout: Option<Duration>,
) -> connex_rs::Result<()> {
    // SAFETY: the page is exclusively ours during the blocking call.
    unsafe {
        engine.read(
            &peer.url,
            dst.0.as_mut_ptr() as usize,
            peer.addr,
            Peer::BYTES,
            timeout,
        )
    }
}

/// A chain of payload, header and flag that overwrites all of a peer's memory with what it holds, to its end.
///
/// # Errors
/// If it fails.
pub(crate) fn chain(engine: &Engine, peer: &Peer) -> anyhow::Result<()> {
    const CUTS: [usize; 4] = [0, Peer::BYTES - 72, Peer::BYTES - 8, Peer::BYTES];
    let mut page = Page::new();
    let from = page.0.as_mut_ptr() as usize;
    // SAFETY: the page is ours and whole words long.
    unsafe { pattern::fill(from, Peer::BYTES, Peer::SEED) }?;
    let ranges: Vec<Range> = CUTS
        .windows(2)
        .map(|cut| Range {
            local: from + cut[0],
            remote: peer.addr + cut[0] as u64,
            len: cut[1] - cut[0],
        })
        .collect();
    // SAFETY: the page lives, untouched, until the chain has ended: `wait` has no other end but that, for `cancel`
    // returns only then too.
    let chain = unsafe { engine.put_chain(&peer.url, &ranges, None) }?;
    match chain.wait(Some(PATIENCE)) {
        Some(result) => Ok(result?),
        None => {
            chain.cancel();
            anyhow::bail!("a chain did not end within {PATIENCE:?}")
        }
    }
}

/// Whether the page holds what a peer's memory holds.
///
/// # Errors
/// If it does not.
pub(crate) fn check(page: &Page) -> anyhow::Result<()> {
    // SAFETY: the page is ours and whole words long.
    let wrong = unsafe { pattern::check(page.0.as_ptr() as usize, Peer::BYTES, Peer::SEED) }?;
    match wrong {
        None => Ok(()),
        Some(mismatch) => bail!("wrong bytes were read {mismatch}"),
    }
}

/// Memory for one read.
#[repr(align(64))]
pub(crate) struct Page([u8; Peer::BYTES]);

impl Page {
    /// Zeroes.
    pub(crate) fn new() -> Box<Self> {
        Box::new(Self([0; Peer::BYTES]))
    }

    /// Zeroes again.
    pub(crate) fn clear(&mut self) {
        self.0.fill(0);
    }
}

/// Waits until the sentinel has been started, which takes some milliseconds from the first engine on, or has not.
fn await_sentinel(engines: &[Engine]) -> anyhow::Result<SentinelState> {
    let start = Instant::now();
    let mut last = SentinelState::Off;
    for engine in engines {
        loop {
            last = engine.stats().sentinel;
            match last {
                SentinelState::Starting if start.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                SentinelState::Starting => {
                    bail!("the sentinel does not start within {PATIENCE:?}")
                }
                _ => break,
            }
        }
    }
    Ok(last)
}

/// Runs small engines in this process until standard input ends: a victim, or bystanders, of `cxrma faults`.
///
/// # Errors
/// If an engine cannot be started.
pub(crate) fn run(args: &PeersArgs) -> anyhow::Result<()> {
    // A stopped process does not notice the end of its input.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    // Written, not only reserved: memory that the kernel has to take back page by page.
    let ballast = vec![1u8; args.ballast];
    let started = start(args)?;
    let (engines, offers): (Vec<Engine>, Vec<Peer>) = started.into_iter().unzip();
    println!("{}", serde_json::to_string(&offers)?);
    let sentinel = await_sentinel(&engines)?;
    if args.stall_ms > 0 && !matches!(sentinel, SentinelState::Running { .. }) {
        bail!("there is no sentinel to tell of a stall: {sentinel:?}");
    }
    println!("sentinel {}", sentinel.name());
    std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink())?;
    std::hint::black_box(&ballast);
    for engine in engines {
        engine.close();
    }
    Ok(())
}
