//! The owner: offers memory, and does what readers ask of it.

use std::io::Write as _;

use anyhow::Context as _;
use connex_rs::{Engine, Recipient, device};
use serde::{Deserialize, Serialize};

use crate::cli::{LARGE, OwnerArgs, PeersArgs};
use crate::control::{Answer, CONTROL, ECHO, HEADER, MAGIC, MAX_PEERS, Request, VERSION, encode};
use crate::{channels, gpu, pattern, peers, verify};

/// Model name of owners.
pub(crate) const MODEL: &str = "cxrma-owner";

/// What an owner prints for programs.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Offer {
    /// Its URL.
    pub(crate) url: String,
    /// Where its memory begins, as `0x…`.
    pub(crate) addr: String,
    /// Bytes of it that transfers may use.
    pub(crate) bytes: usize,
}

/// Runs an owner until it is told to end.
///
/// # Errors
/// If the engine cannot be started, or memory is short.
pub(crate) fn run(args: &OwnerArgs) -> anyhow::Result<()> {
    let mut config = args.engine.config(&args.ip, MODEL, 0, 0)?;
    config.port = args.port;
    let engine = Engine::start(config.with_environment()?)
        .with_context(|| format!("cannot start the owner on {}", args.ip))?;
    // Room for eight in flight of the largest size, and a page more each where a size is not whole pages.
    let bytes = if args.large { 9 * LARGE } else { 192 << 20 };
    let base = gpu::allocate(&engine, args.gpu_owner, HEADER + bytes)?;
    let header = [MAGIC, VERSION, bytes as u64];
    // SAFETY: the header of our own buffer, which nobody knows of yet.
    unsafe { device::copy_to(base, header.as_ptr().cast(), size_of_val(&header)) }?;
    let offer = Offer {
        url: engine.local_url().to_owned(),
        addr: format!("{base:#x}"),
        bytes,
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&offer)?)?;
    } else {
        writeln!(
            out,
            "the owner is ready: {} MiB at {}, as {}",
            bytes >> 20,
            offer.addr,
            offer.url
        )?;
        writeln!(
            out,
            "on this or another host: cxrma reader --url '{}' --addr {}",
            offer.url, offer.addr
        )?;
        writeln!(out, "Ctrl-C ends it")?;
    }
    out.flush()?;
    drop(out);
    if args.until_eof {
        let engine = engine.clone();
        std::thread::spawn(move || {
            // Whoever started this holds the other end: when it is gone, so is the need for this process.
            let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
            engine.close();
        });
    }
    Owner {
        args,
        engine,
        data: base + HEADER,
        bytes,
        peers: Vec::new(),
        watch: None,
        channels: false,
    }
    .serve();
    Ok(())
}

struct Owner<'a> {
    args: &'a OwnerArgs,
    engine: Engine,
    data: usize,
    bytes: usize,
    peers: Vec<Engine>,
    watch: Option<verify::Watch>,
    /// Channels are accepted.
    channels: bool,
}

impl Owner<'_> {
    /// Answers until the engine is closed.
    fn serve(mut self) {
        while let Some((from, message)) = self.engine.recv_msg(None) {
            let reply = match message.first() {
                Some(&CONTROL) => {
                    let answer = serde_json::from_slice(&message[1..])
                        .context("cannot read the request: are both programs of one version?")
                        .and_then(|request| self.answer(&request))
                        .unwrap_or_else(|error| Answer::Refused(format!("{error:#}")));
                    encode(&answer).unwrap_or_default()
                }
                Some(&ECHO) => message,
                _ => continue,
            };
            // A reader that is gone needs no answer.
            if let Err(error) =
                self.engine
                    .send_msg(Recipient::Id(&from), reply, Some(crate::control::PATIENCE))
            {
                eprintln!("cxrma: cannot answer {from}: {error}");
            }
        }
    }

    fn answer(&mut self, request: &Request) -> anyhow::Result<Answer> {
        match *request {
            Request::Fill { offset, len, seed } => {
                let addr = self.range(offset, len)?;
                // SAFETY: checked above: whole words inside our buffer, which lives as long as the engine.
                unsafe { pattern::fill(addr, len, seed) }?;
                Ok(Answer::Done)
            }
            Request::Poison { offset, len } => {
                let addr = self.range(offset, len)?;
                // SAFETY: as above.
                unsafe { pattern::poison(addr, len) }?;
                Ok(Answer::Done)
            }
            Request::Check { offset, len, seed } => {
                let addr = self.range(offset, len)?;
                // SAFETY: as above.
                Ok(Answer::Checked(unsafe { pattern::check(addr, len, seed) }?))
            }
            Request::Peers {
                count,
                heartbeat_ms,
            } => {
                anyhow::ensure!(
                    count <= MAX_PEERS,
                    "{count} engines: at most {MAX_PEERS} are allowed"
                );
                for engine in self.peers.drain(..) {
                    engine.close();
                }
                let started = peers::start(&PeersArgs {
                    ip: self.args.ip.clone(),
                    engine: self.args.engine.clone(),
                    stage: 1,
                    count,
                    heartbeat_ms,
                    port: 0,
                    ballast: 0,
                    stall_ms: 0,
                })?;
                let (engines, peers) = started.into_iter().unzip();
                self.peers = engines;
                Ok(Answer::Peers(peers))
            }
            Request::Channels => {
                if !std::mem::replace(&mut self.channels, true) {
                    let engine = self.engine.clone();
                    std::thread::spawn(move || channels::accept(&engine));
                }
                Ok(Answer::Done)
            }
            Request::Watch => {
                anyhow::ensure!(
                    self.args.gpu_owner.is_none(),
                    "chains are consumed by the processor: --verify-chain needs an owner without --gpu-owner"
                );
                self.watch = None;
                let base = self.range(0, verify::BYTES)?;
                // SAFETY: the range is in our buffer, which outlives the watch: it is dropped before the engine is.
                self.watch = Some(unsafe { verify::Watch::start(base) }?);
                Ok(Answer::Done)
            }
            Request::WatchEnd { last } => {
                let watch = self.watch.take().context("no chains are being consumed")?;
                Ok(Answer::Watched(watch.finish(last)))
            }
        }
    }

    /// The address of a range, if it is inside the data and made of whole words.
    fn range(&self, offset: usize, len: usize) -> anyhow::Result<usize> {
        let fits = offset
            .checked_add(len.next_multiple_of(8))
            .is_some_and(|end| end <= self.bytes);
        anyhow::ensure!(
            fits && offset.is_multiple_of(8),
            "{len} bytes at offset {offset} are not inside the {} that are offered",
            self.bytes
        );
        Ok(self.data + offset)
    }
}

impl Drop for Owner<'_> {
    fn drop(&mut self) {
        // The consumer uses the engine's memory: it ends first.
        self.watch = None;
        self.engine.close();
    }
}
