//! The measurements of a reader against its owner.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use connex_rs::{Engine, Range, Transfer};

use crate::cli::{EngineArgs, MeasureArgs, What};
use crate::control::{Control, ECHO, HEADER, PATIENCE, Peer, Request, SWALLOW};
use crate::report::{Op, Row, size};
use crate::steps::Steps;
use crate::times::{Recorder, Repeat};
use crate::{channels, gpu, machine, pattern, peers, verify};

/// Ranges of a batch.
const BATCH: usize = 10_000;
/// Bytes of each.
const BATCH_BYTES: usize = 4096;
/// Threads that share an engine.
const THREADS: usize = 8;
/// Peers of the idle engine.
const IDLE_PEERS: u32 = 10;
/// Its heartbeats.
const IDLE_HEARTBEAT_MS: u64 = 1000;
/// Fresh engines that connect.
const CONNECTS: usize = 20;
/// Steps in flight on a channel.
const IN_FLIGHT: [usize; 2] = [1, 4];
/// Bytes of the first step of a channel.
const FIRST_STEP: usize = 4096;
/// Peers in steps of growth.
const GROWTH: [usize; 4] = [1, 16, 64, 256];
/// Bytes of a chain's header.
const CHAIN_HEADER: usize = 64;
/// Bytes of its flag.
const CHAIN_FLAG: usize = 8;

/// What makes one measurement.
type Measure<'a> = fn(&mut Session<'a>) -> anyhow::Result<()>;

/// One reader, one owner, and what was found out.
pub(crate) struct Session<'a> {
    engine: &'a Engine,
    engine_args: &'a EngineArgs,
    ip: &'a str,
    control: &'a Control<'a>,
    args: &'a MeasureArgs,
    repeat: Repeat,
    /// Our buffer.
    local: usize,
    /// The owner's data.
    remote: u64,
    /// Number of the next contents: never used twice, so that stale bytes are told from fresh ones.
    seed: u64,
    /// Engines that connected: each has a fresh identity.
    fresh: u32,
    steps: Steps,
    pub(crate) results: Vec<Row>,
    pub(crate) problems: Vec<String>,
}

impl<'a> Session<'a> {
    /// Checks that what is to be measured fits the `offered` bytes at the owner's `addr`.
    ///
    /// # Errors
    /// If it does not, or memory is short.
    pub(crate) fn new(
        engine: &'a Engine,
        engine_args: &'a EngineArgs,
        ip: &'a str,
        control: &'a Control<'a>,
        addr: u64,
        offered: usize,
        args: &'a MeasureArgs,
    ) -> anyhow::Result<Self> {
        let mut need = verify::BYTES;
        for bytes in args.sizes() {
            need = need.max(stride(bytes) + 2 * 4096);
            if args.wants(What::Stream) {
                need = need.max(stride(bytes).saturating_mul(args.deepest()));
            }
        }
        if args.wants(What::Batch) {
            need = need.max(BATCH * BATCH_BYTES);
        }
        ensure!(
            need <= offered,
            "the measurement needs {} MiB at the owner, which offers {}: leave out large sizes or depths, or start the owner with --large",
            need.div_ceil(1 << 20),
            offered >> 20
        );
        let local = gpu::allocate(engine, args.gpu_reader, need)?;
        Ok(Self {
            engine,
            engine_args,
            ip,
            control,
            args,
            repeat: Repeat {
                iterations: args.iterations,
                budget: args.budget(),
            },
            local,
            remote: addr + HEADER as u64,
            seed: 1000,
            fresh: 0,
            steps: Steps::new(0),
            results: Vec::new(),
            problems: Vec::new(),
        })
    }

    /// Measures everything that was asked for.
    ///
    /// # Errors
    /// If a transfer fails or the owner is gone. Bytes that differ are told in `problems`.
    pub(crate) fn run(&mut self) -> anyhow::Result<()> {
        if self.args.verify_chain {
            self.steps = Steps::new(1);
            let row = verify::produce(
                self.engine,
                self.control,
                self.remote - HEADER as u64,
                self.args.seconds,
                self.args.break_order,
                &self.steps,
            )?;
            if let Row::VerifyChain { sent, seen, .. } = &row {
                if let Some((n, mismatch)) = &seen.first {
                    self.problems.push(format!(
                        "the flag of chain {n} was seen before its data {mismatch}; {} such chains",
                        seen.violations
                    ));
                }
                if seen.missing > 0 || seen.chains != *sent {
                    self.problems.push(format!(
                        "{} of {sent} chains were seen complete",
                        seen.chains
                    ));
                }
            }
            self.results.push(row);
            self.steps.clear();
            return Ok(());
        }
        let sizes = self.args.sizes();
        let kinds = [What::Latency, What::Stream, What::Chain, What::Signal];
        let per_size: u64 = kinds
            .into_iter()
            .filter(|&what| self.args.wants(what))
            .count() as u64;
        let steps = if self.args.wants(What::Channel) {
            self.args.steps()
        } else {
            Vec::new()
        };
        let once: u64 = [
            What::Connect,
            What::Open,
            What::Idle,
            What::Batch,
            What::Threads,
            What::Await,
            What::Growth,
        ]
        .into_iter()
        .filter(|&what| self.args.wants(what))
        .count() as u64;
        self.steps = Steps::new((per_size * sizes.len() as u64) + steps.len() as u64 + once);
        for &bytes in &sizes {
            if self.args.wants(What::Latency) {
                self.steps.next(&format!("latency, {}", size(bytes)));
                self.latency(bytes)?;
            }
            if self.args.wants(What::Stream) {
                self.steps.next(&format!("streams, {}", size(bytes)));
                self.stream(bytes)?;
            }
            if self.args.wants(What::Chain) {
                self.steps.next(&format!("chains, {}", size(bytes)));
                self.chain(bytes)?;
            }
            if self.args.wants(What::Signal) {
                self.steps.next(&format!("signals, {}", size(bytes)));
                self.signal(bytes)?;
            }
        }
        for bytes in steps {
            self.steps.next(&format!("channels, {}", size(bytes)));
            self.channel(bytes)?;
        }
        let others: [(What, Measure<'a>); 7] = [
            (What::Batch, Self::batch),
            (What::Threads, Self::threads),
            (What::Await, Self::awaiting),
            (What::Connect, Self::connect),
            (What::Open, Self::open),
            (What::Growth, Self::growth),
            (What::Idle, Self::idle),
        ];
        for (what, measure) in others {
            if self.args.wants(what) {
                self.steps.next(&format!("{what:?}").to_lowercase());
                measure(self)?;
            }
        }
        self.steps.clear();
        Ok(())
    }

    fn next_seed(&mut self) -> u64 {
        self.seed += 1;
        self.seed
    }

    /// Makes `slots` pieces of `bytes` ready: contents at the source, none at the destination. Returns the seed of the first slot.
    fn prepare(&mut self, op: Op, bytes: usize, slots: usize) -> anyhow::Result<u64> {
        let first = self.next_seed();
        for slot in 0..slots {
            let (offset, seed) = (slot * stride(bytes), first + slot as u64);
            match op {
                Op::Read => {
                    self.control.tell(&Request::Fill {
                        offset,
                        len: bytes,
                        seed,
                    })?;
                    // SAFETY: in our buffer (sized by `new`), which no transfer uses now.
                    unsafe { pattern::poison(self.local + offset, bytes) }?;
                }
                Op::Write => {
                    self.control.tell(&Request::Poison { offset, len: bytes })?;
                    // SAFETY: as above.
                    unsafe { pattern::fill(self.local + offset, bytes, seed) }?;
                }
            }
        }
        self.seed += slots as u64;
        Ok(first)
    }

    /// Compares the destination with the contents; a difference becomes a problem.
    fn verify(
        &mut self,
        what: &str,
        op: Op,
        bytes: usize,
        slots: usize,
        first: u64,
    ) -> anyhow::Result<()> {
        for slot in 0..slots {
            let (offset, seed) = (slot * stride(bytes), first + slot as u64);
            let found = match op {
                // SAFETY: in our buffer, which no transfer uses now.
                Op::Read => unsafe { pattern::check(self.local + offset, bytes, seed) }?,
                Op::Write => self.control.check(offset, bytes, seed)?,
            };
            if let Some(mismatch) = found {
                self.problems.push(format!(
                    "{what}: {} of {} arrived wrong {mismatch}",
                    op.name(),
                    size(bytes)
                ));
            }
        }
        Ok(())
    }

    fn blocking(&self, op: Op, bytes: usize) -> anyhow::Result<()> {
        // SAFETY: `bytes` fit both buffers, and ours is not touched while the call runs.
        let result = unsafe {
            match op {
                Op::Read => {
                    self.engine
                        .read(self.control.url, self.local, self.remote, bytes, None)
                }
                Op::Write => {
                    self.engine
                        .write(self.control.url, self.local, self.remote, bytes, None)
                }
            }
        };
        result.with_context(|| format!("{} of {} failed", op.name(), size(bytes)))
    }

    fn post(&self, op: Op, bytes: usize, slot: usize) -> anyhow::Result<Transfer> {
        let offset = slot * stride(bytes);
        let (local, remote) = (self.local + offset, self.remote + offset as u64);
        // SAFETY: the slot is inside both buffers, and ours is not touched until the transfer has ended.
        let posted = unsafe {
            match op {
                Op::Read => self
                    .engine
                    .get(self.control.url, local, remote, bytes, None),
                Op::Write => self
                    .engine
                    .put(self.control.url, local, remote, bytes, None),
            }
        };
        Ok(posted?)
    }

    fn latency(&mut self, bytes: usize) -> anyhow::Result<()> {
        for op in Op::BOTH {
            // The very first one is checked alone, the last of the timed ones afterwards.
            let seed = self.prepare(op, bytes, 1)?;
            self.blocking(op, bytes)?;
            self.verify("latency", op, bytes, 1, seed)?;
            let seed = self.prepare(op, bytes, 1)?;
            let times = self.repeat.time(|| self.blocking(op, bytes))?.times();
            self.verify("latency", op, bytes, 1, seed)?;
            self.results.push(Row::Latency { op, bytes, times });
        }
        Ok(())
    }

    /// Every depth goes through the same memory, as much as the deepest one has in flight: with less of it one depth would be
    /// measured in the processor's cache and another out of it.
    fn stream(&mut self, bytes: usize) -> anyhow::Result<()> {
        let places = self.args.deepest();
        for op in Op::BOTH {
            for depth in self.args.depths.clone().into_iter().map(usize::from) {
                let seed = self.prepare(op, bytes, places)?;
                let warm = Repeat {
                    iterations: places as u64 * 2,
                    budget: self.repeat.budget,
                };
                self.flow(op, bytes, depth, places, warm)?;
                self.verify("stream", op, bytes, places, seed)?;
                let enough = Repeat {
                    iterations: self.repeat.iterations.max(places as u64),
                    budget: self.repeat.budget,
                };
                let (count, took) = self.flow(op, bytes, depth, places, enough)?;
                self.verify("stream", op, bytes, places, seed)?;
                let seconds = took.as_secs_f64();
                self.results.push(Row::Stream {
                    op,
                    bytes,
                    depth,
                    count,
                    seconds,
                    gb_per_s: bytes as f64 * count as f64 / seconds / 1e9,
                });
            }
        }
        Ok(())
    }

    /// Keeps `depth` transfers in flight, each in the next of `places`; returns how many there were and how long all took.
    fn flow(
        &self,
        op: Op,
        bytes: usize,
        depth: usize,
        places: usize,
        repeat: Repeat,
    ) -> anyhow::Result<(u64, Duration)> {
        let mut flying: VecDeque<Transfer> = VecDeque::with_capacity(depth);
        let mut posted = 0;
        let start = Instant::now();
        loop {
            while flying.len() < depth && (posted < places as u64 || repeat.more(posted, start)) {
                flying.push_back(self.post(op, bytes, posted as usize % places)?);
                posted += 1;
            }
            let Some(oldest) = flying.pop_front() else {
                return Ok((posted, start.elapsed()));
            };
            done(&oldest)?;
        }
    }

    fn chain(&mut self, bytes: usize) -> anyhow::Result<()> {
        let Some(payload) = bytes
            .checked_sub(CHAIN_HEADER + CHAIN_FLAG)
            .filter(|&n| n > 0)
        else {
            return Ok(());
        };
        let range = |at: usize, len: usize| Range {
            local: self.local + at,
            remote: self.remote + at as u64,
            len,
        };
        // Payload, header and flag are apart, as they are in a ring; their sum is `bytes`.
        let end = payload.next_multiple_of(4096);
        let ranges = [
            range(0, payload),
            range(end, CHAIN_HEADER),
            range(end + CHAIN_HEADER, CHAIN_FLAG),
        ];
        let rest = CHAIN_HEADER + CHAIN_FLAG;
        let seed = self.next_seed();
        self.control.tell(&Request::Poison {
            offset: 0,
            len: end + rest,
        })?;
        // SAFETY: in our buffer, which no transfer uses now.
        unsafe {
            pattern::fill(self.local, payload, seed)?;
            pattern::fill(self.local + end, rest, seed)?;
        }
        let (engine, url) = (self.engine, self.control.url);
        let send = || {
            // SAFETY: the ranges are inside our buffer, which is not touched until the chain has ended.
            done(&unsafe { engine.put_chain(url, &ranges, None) }?)
        };
        send()?;
        for (offset, len) in [(0, payload), (end, rest)] {
            if let Some(mismatch) = self.control.check(offset, len, seed)? {
                self.problems.push(format!(
                    "a chain of {} arrived wrong {mismatch}",
                    size(bytes)
                ));
            }
        }
        let (chain, one_write) =
            self.alternate(send, || done(&self.post(Op::Write, bytes, 0)?))?;
        self.results.push(Row::Chain {
            bytes,
            chain: chain.times(),
            one_write: one_write.times(),
            ratio: ratio(&chain, &one_write),
        });
        Ok(())
    }

    /// Times two operations in turn.
    fn alternate(
        &self,
        mut a: impl FnMut() -> anyhow::Result<()>,
        mut b: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<(Recorder, Recorder)> {
        let mut recorders = (Recorder::new(), Recorder::new());
        a()?;
        b()?;
        let start = Instant::now();
        let repeat = Repeat {
            budget: self.repeat.budget * 2,
            ..self.repeat
        };
        while repeat.more(recorders.0.count(), start) {
            let before = Instant::now();
            a()?;
            let between = Instant::now();
            b()?;
            recorders.0.record(between - before);
            recorders.1.record(between.elapsed());
        }
        Ok(recorders)
    }

    fn signal(&mut self, bytes: usize) -> anyhow::Result<()> {
        let seed = self.prepare(Op::Write, bytes, 1)?;
        let (engine, url, local, remote) = (self.engine, self.control.url, self.local, self.remote);
        let send = |kind: u8| {
            // SAFETY: inside our buffer, which is not touched until the transfer has ended.
            let sent = unsafe {
                engine.put_signal(url, local, remote, bytes, vec![kind; 16], Some(PATIENCE))
            }?;
            done(&sent)
        };
        send(ECHO)?;
        ensure!(
            self.control.receive()? == [ECHO; 16],
            "the owner's answer to a signal is not the signal's message"
        );
        self.verify("signal", Op::Write, bytes, 1, seed)?;
        let finished = self.repeat.time(|| send(SWALLOW))?;
        let answered = self.repeat.time(|| {
            send(ECHO)?;
            ensure!(
                self.control.receive()? == [ECHO; 16],
                "the owner's answer to a signal is not the signal's message"
            );
            Ok(())
        })?;
        self.results.push(Row::Signal {
            bytes,
            done: finished.times(),
            answered: answered.times(),
        });
        Ok(())
    }

    fn channel(&mut self, bytes: usize) -> anyhow::Result<()> {
        self.control.tell(&Request::Channels)?;
        for in_flight in IN_FLIGHT {
            let line = channels::Line::open(self.control, bytes, in_flight)?;
            let figures = line.measure(self.repeat, &mut self.problems)?;
            let seconds = figures.took.as_secs_f64();
            self.results.push(Row::Channel {
                bytes,
                in_flight,
                count: figures.count,
                seconds,
                gb_per_s: bytes as f64 * figures.count as f64 / seconds / 1e9,
                sent: figures.sent,
                answered: figures.answered,
            });
        }
        Ok(())
    }

    fn batch(&mut self) -> anyhow::Result<()> {
        for op in Op::BOTH {
            // Every second half first: no two neighbours are adjacent in the list.
            let ranges: Vec<Range> = (0..BATCH)
                .map(|i| (i * 2 % BATCH + i * 2 / BATCH) * BATCH_BYTES)
                .map(|at| Range {
                    local: self.local + at,
                    remote: self.remote + at as u64,
                    len: BATCH_BYTES,
                })
                .collect();
            let (engine, url) = (self.engine, self.control.url);
            let many = || {
                // SAFETY: the ranges are inside our buffer, which is not touched until the transfer has ended.
                done(&unsafe {
                    match op {
                        Op::Read => engine.get_many(url, &ranges, None),
                        Op::Write => engine.put_many(url, &ranges, None),
                    }
                }?)
            };
            let seed = self.prepare(op, BATCH * BATCH_BYTES, 1)?;
            many()?;
            self.verify("batch", op, BATCH * BATCH_BYTES, 1, seed)?;
            let (batch, one) =
                self.alternate(many, || done(&self.post(op, BATCH * BATCH_BYTES, 0)?))?;
            self.results.push(Row::Batch {
                op,
                ranges: BATCH,
                bytes: BATCH_BYTES,
                batch: batch.times(),
                one_transfer: one.times(),
                ratio: ratio(&batch, &one),
            });
        }
        Ok(())
    }

    fn threads(&mut self) -> anyhow::Result<()> {
        let bytes = 4096;
        let seed = self.prepare(Op::Read, bytes, THREADS)?;
        let (mut one, mut many) = (0.0, 0.0);
        const ROUNDS: u32 = 3;
        for _ in 0..ROUNDS {
            one += self.rate(1, bytes)?;
            many += self.rate(THREADS, bytes)?;
        }
        self.verify("threads", Op::Read, bytes, THREADS, seed)?;
        let rounds = f64::from(ROUNDS);
        self.results.push(Row::Threads {
            threads: THREADS,
            bytes,
            ops_per_s: many / rounds,
            one_thread_ops_per_s: one / rounds,
            ratio: many / one,
        });
        Ok(())
    }

    /// Blocking reads a second from `threads` threads together.
    fn rate(&self, threads: usize, bytes: usize) -> anyhow::Result<f64> {
        let stop = AtomicBool::new(false);
        let start = Instant::now();
        let counts: Vec<connex_rs::Result<u64>> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads)
                .map(|slot| {
                    let (engine, url, stop) = (self.engine, self.control.url, &stop);
                    let offset = slot * stride(bytes);
                    let (local, remote) = (self.local + offset, self.remote + offset as u64);
                    scope.spawn(move || {
                        let mut count = 0;
                        while !stop.load(Ordering::Relaxed) {
                            // SAFETY: each thread has its own slot of our buffer.
                            unsafe { engine.read(url, local, remote, bytes, None) }?;
                            count += 1;
                        }
                        Ok(count)
                    })
                })
                .collect();
            std::thread::sleep((self.repeat.budget / 3).min(Duration::from_secs(1)));
            stop.store(true, Ordering::Relaxed);
            workers
                .into_iter()
                .map(|worker| {
                    worker
                        .join()
                        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
                .collect()
        });
        let took = start.elapsed().as_secs_f64();
        let mut all = 0;
        for count in counts {
            all += count?;
        }
        Ok(all as f64 / took)
    }

    fn awaiting(&mut self) -> anyhow::Result<()> {
        for op in Op::BOTH {
            let bytes = 4096;
            let seed = self.prepare(op, bytes, 1)?;
            let (awaited, blocking) = self.alternate(
                || Ok(block_on(self.post(op, bytes, 0)?)?),
                || self.blocking(op, bytes),
            )?;
            self.verify("await", op, bytes, 1, seed)?;
            self.results.push(Row::Await {
                op,
                bytes,
                awaited: awaited.times(),
                blocking: blocking.times(),
                ratio: ratio(&awaited, &blocking),
            });
        }
        Ok(())
    }

    /// An engine of its own identity; `heartbeat_ms` 0 means none.
    fn fresh(&mut self, heartbeat_ms: u64) -> anyhow::Result<Engine> {
        self.fresh += 1;
        let mut config =
            self.engine_args
                .config(self.ip, "cxrma-fresh", self.fresh, std::process::id())?;
        config.heartbeat = (heartbeat_ms > 0).then(|| Duration::from_millis(heartbeat_ms));
        Ok(Engine::start(config.with_environment()?)?)
    }

    fn connect(&mut self) -> anyhow::Result<()> {
        let mut page = peers::Page::new();
        let (first, later) = self.first_use(|engine, peer| {
            page.clear();
            let before = Instant::now();
            peers::read(engine, peer, &mut page, Some(PATIENCE))?;
            let took = before.elapsed();
            peers::check(&page)?;
            Ok(took)
        })?;
        self.results.push(Row::Connect {
            peer: "first",
            times: first.times(),
        });
        self.results.push(Row::Connect {
            peer: "later",
            times: later.times(),
        });
        Ok(())
    }

    /// Fresh engines, each of which uses some peers for the first time: the times of its first peer, and of later ones.
    fn first_use(
        &mut self,
        mut using: impl FnMut(&Engine, &Peer) -> anyhow::Result<Duration>,
    ) -> anyhow::Result<(Recorder, Recorder)> {
        const LATER: u32 = 4;
        let (mut first, mut later) = (Recorder::new(), Recorder::new());
        let peers = self.control.peers(1 + LATER, 0)?;
        for _ in 0..self.fresh_engines()? {
            let engine = self.fresh(0)?;
            for (n, peer) in peers.iter().enumerate() {
                let recorder = if n == 0 { &mut first } else { &mut later };
                recorder.record(using(&engine, peer)?);
            }
            engine.close();
        }
        self.control.peers(0, 0)?;
        Ok((first, later))
    }

    /// How many fresh engines are started for one figure.
    fn fresh_engines(&self) -> anyhow::Result<usize> {
        Ok(CONNECTS.min(usize::try_from(self.repeat.iterations)?.max(2)))
    }

    fn open(&mut self) -> anyhow::Result<()> {
        let mut page = peers::Page::new();
        let (first, later) = self.first_use(|engine, peer| {
            let before = Instant::now();
            peers::chain(engine, peer)?;
            let took = before.elapsed();
            page.clear();
            peers::read(engine, peer, &mut page, Some(PATIENCE))?;
            peers::check(&page)?;
            Ok(took)
        })?;
        self.control.tell(&Request::Channels)?;
        let (mut fresh, mut linked) = (Recorder::new(), Recorder::new());
        for _ in 0..self.fresh_engines()? {
            let engine = self.fresh(0)?;
            for recorder in [&mut fresh, &mut linked] {
                recorder.record(channels::first_step(&engine, self.control.url, FIRST_STEP)?);
            }
            engine.close();
        }
        for (what, peer, recorder) in [
            ("chain", "first", first),
            ("chain", "later", later),
            ("step", "first", fresh),
            ("step", "linked", linked),
        ] {
            self.results.push(Row::Open {
                what,
                peer,
                times: recorder.times(),
            });
        }
        Ok(())
    }

    fn growth(&mut self) -> anyhow::Result<()> {
        let most = GROWTH[GROWTH.len() - 1];
        let peers = self.control.peers(u32::try_from(most)?, 0)?;
        let engine = self.fresh(0)?;
        let mut page = peers::Page::new();
        let mut one = None;
        let before = machine::resident();
        let mut connected = 0;
        for n in GROWTH {
            for peer in &peers[connected..n] {
                page.clear();
                peers::read(&engine, peer, &mut page, Some(PATIENCE))?;
                peers::check(&page)?;
            }
            connected = n;
            let grown = machine::resident() as i64 - before as i64;
            let mut next = 0;
            let repeat = Repeat {
                iterations: self.repeat.iterations.max(2 * n as u64),
                ..self.repeat
            };
            let times = repeat
                .time(|| {
                    next = (next + 1) % n;
                    Ok(peers::read(
                        &engine,
                        &peers[next],
                        &mut page,
                        Some(PATIENCE),
                    )?)
                })?
                .times();
            let base = *one.get_or_insert(times.p50_us);
            self.results.push(Row::Growth {
                peers: n,
                times,
                ratio_to_one: times.p50_us / base,
                bytes_per_peer: grown / n as i64,
            });
        }
        engine.close();
        self.control.peers(0, 0)?;
        Ok(())
    }

    fn idle(&mut self) -> anyhow::Result<()> {
        let peers = self.control.peers(IDLE_PEERS, IDLE_HEARTBEAT_MS)?;
        let engine = self.fresh(IDLE_HEARTBEAT_MS)?;
        let mut page = peers::Page::new();
        for peer in &peers {
            page.clear();
            peers::read(&engine, peer, &mut page, Some(PATIENCE))?;
            peers::check(&page)?;
        }
        // What polls after traffic stops; then this process has one engine with peers and one with a silent owner.
        std::thread::sleep(Duration::from_millis(200));
        let (wakeups, cpu, start) = (engine.stats().wakeups, machine::cpu_time(), Instant::now());
        std::thread::sleep(Duration::from_secs(self.args.seconds));
        let (used, took) = (machine::cpu_time() - cpu, start.elapsed());
        let stats = engine.stats();
        ensure!(
            stats.failures == 0 && stats.live_peers == u64::from(IDLE_PEERS),
            "{} of {IDLE_PEERS} peers were lost while idle",
            stats.failures
        );
        self.results.push(Row::Idle {
            peers: IDLE_PEERS,
            heartbeat_ms: IDLE_HEARTBEAT_MS,
            seconds: took.as_secs_f64(),
            cpu_percent: 100.0 * used.as_secs_f64() / took.as_secs_f64(),
            wakeups: stats.wakeups - wakeups,
        });
        engine.close();
        self.control.peers(0, 0)?;
        Ok(())
    }
}

/// Distance of slots: whole pages.
fn stride(bytes: usize) -> usize {
    bytes.next_multiple_of(4096)
}

/// Waits for the end of a transfer.
fn done(transfer: &Transfer) -> anyhow::Result<()> {
    match transfer.wait(Some(PATIENCE)) {
        Some(result) => Ok(result?),
        None => bail!("a transfer did not end within {PATIENCE:?}"),
    }
}

/// Median against median.
fn ratio(of: &Recorder, to: &Recorder) -> f64 {
    of.times().p50_us / to.times().p50_us
}

/// Runs a future on this thread, which sleeps meanwhile: what the simplest executor does.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Sleeper(std::thread::Thread, AtomicU64);
    impl Wake for Sleeper {
        fn wake(self: Arc<Self>) {
            self.1.store(1, Ordering::Release);
            self.0.unpark();
        }
    }
    let sleeper = Arc::new(Sleeper(std::thread::current(), AtomicU64::new(0)));
    let waker = Waker::from(sleeper.clone());
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        while sleeper.1.swap(0, Ordering::AcqRel) == 0 {
            std::thread::park();
        }
    }
}
