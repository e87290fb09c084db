//! `cxrma faults`: what survivors see, and when.
//!
//! The survivors' engines are in this process; whoever is killed or stopped is in one of its own. All clocks are
//! CLOCK_MONOTONIC of one host.

mod child;
mod link;
mod report;

use std::collections::HashMap;
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum as _;
use connex_rs::{Engine, EventKind, LogicalId, PeerUrl, now_ns};

use self::child::{Role, Victim};
pub(crate) use self::link::run as link_down;
use self::report::{Holdings, Report, Row, SCHEMA};
use crate::cli::{Fault, FaultsArgs};
use crate::control::Peer;
use crate::machine::{self, Machine};
use crate::peers::{self, Page};
use crate::steps::Steps;
use crate::times::Recorder;

/// Model name of survivors.
const MODEL: &str = "cxrma-survivor";
/// Stage of healthy peers.
const BYSTANDERS: u32 = 2;
/// Stage of those that suffer.
const VICTIMS: u32 = 3;
/// How long something may take that is expected to happen in milliseconds.
const PATIENCE: Duration = Duration::from_secs(30);
/// Quiet before a kill, so that nobody is in the middle of something.
const QUIET: Duration = Duration::from_millis(10);
/// How long one attempt to read from a process that is being restarted may take.
const ATTEMPT: Duration = Duration::from_millis(500);

/// How the reason begins when heartbeats stay away.
const HEARTBEATS: &str = "heartbeat timeout: ";

/// What is promised for a suspicion by heartbeats: the timeout, three intervals, and one interval more.
fn heartbeat_limit_us(heartbeat_ms: u64) -> f64 {
    heartbeat_ms as f64 * 4e3
}

/// What makes one fault.
type Case<'a> = fn(&mut Lab<'a>) -> anyhow::Result<()>;

/// Runs what was asked for; false if something went wrong that is not an error of the run.
///
/// # Errors
/// If processes or engines cannot be started, or die by themselves.
pub(crate) fn run(args: &FaultsArgs) -> anyhow::Result<bool> {
    let mut lab = Lab {
        args,
        results: Vec::new(),
        problems: Vec::new(),
        left_out: Vec::new(),
        engines: 0,
        transport: String::new(),
        steps: Steps::new(0),
    };
    let cases: [(Fault, Case<'_>); 9] = [
        (Fault::Kill, Lab::kill),
        (Fault::Stop, Lab::stop),
        (Fault::StopSentinel, Lab::stop_sentinel),
        (Fault::LinkDown, Lab::link_down),
        (Fault::Connect, Lab::connect),
        (Fault::Stall, Lab::stall),
        (Fault::Cycles, Lab::cycles),
        (Fault::Heartbeats, Lab::heartbeats),
        (Fault::Load, Lab::load),
    ];
    lab.steps = Steps::new(cases.iter().filter(|case| args.wants(case.0)).count() as u64);
    for (fault, case) in cases {
        if args.wants(fault) {
            let value = fault.to_possible_value();
            let name = value.as_ref().map_or("?", |value| value.get_name());
            lab.steps.next(name);
            case(&mut lab).with_context(|| format!("faults, {name}"))?;
        }
    }
    lab.steps.clear();
    let report = Report {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        command: std::env::args().skip(1).collect::<Vec<_>>().join(" "),
        machine: Machine::here(),
        transport: lab.transport,
        results: lab.results,
        problems: lab.problems,
        left_out: lab.left_out,
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        write!(out, "{}", report.text())?;
    }
    out.flush()?;
    Ok(report.problems.is_empty())
}

struct Lab<'a> {
    args: &'a FaultsArgs,
    results: Vec<Row>,
    problems: Vec<String>,
    left_out: Vec<String>,
    /// Survivors so far: each has a fresh identity.
    engines: u32,
    transport: String,
    steps: Steps,
}

/// The first loss of a link to `victim` that an engine reports.
struct Loss {
    ts_ns: u64,
    seen_ns: u64,
    reason: String,
}

impl<'a> Lab<'a> {
    fn survivor(&mut self, heartbeat_ms: u64) -> anyhow::Result<Engine> {
        self.engines += 1;
        let mut config = self
            .args
            .engine
            .config(&self.args.ip, MODEL, 0, self.engines)?;
        config.heartbeat = (heartbeat_ms > 0).then(|| Duration::from_millis(heartbeat_ms));
        let engine = Engine::start(config.with_environment()?)?;
        self.transport = engine.stats().transport;
        Ok(engine)
    }

    fn role(&self, stage: u32, count: u32) -> Role<'a> {
        Role {
            ip: &self.args.ip,
            engine: &self.args.engine,
            stage,
            count,
            heartbeat_ms: 0,
            ballast: 0,
            stall_ms: 0,
        }
    }

    /// Starts healthy peers and has `engine` read from each.
    fn bystanders(
        &self,
        engine: &Engine,
        count: u32,
        heartbeat_ms: u64,
    ) -> anyhow::Result<(Victim, Vec<Peer>)> {
        let process = Victim::spawn(
            &Role {
                heartbeat_ms,
                ..self.role(BYSTANDERS, count)
            },
            0,
        )?;
        let peers = process.peers()?;
        let mut page = Page::new();
        for peer in &peers {
            read(engine, peer, &mut page)?;
        }
        Ok((process, peers))
    }

    fn kill(&mut self) -> anyhow::Result<()> {
        for &ballast in &self.args.ballast {
            for &peers in &self.args.peers {
                self.kill_with(ballast, peers, 1)?;
            }
            for &survivors in self.args.survivors.iter().filter(|&&n| n > 1) {
                self.kill_with(ballast, 1, survivors)?;
            }
        }
        Ok(())
    }

    fn kill_with(&mut self, ballast: usize, peers: u32, survivors: u32) -> anyhow::Result<()> {
        let engines: Vec<Engine> = (0..survivors)
            .map(|_| self.survivor(0))
            .collect::<Result<_, _>>()?;
        let _bystanders = (peers > 1)
            .then(|| self.bystanders(&engines[0], peers - 1, 0))
            .transpose()?;
        let role = Role {
            ballast,
            ..self.role(VICTIMS, 1)
        };
        let mut page = Page::new();
        let (mut told, mut seen, mut process, mut engine) = (
            Recorder::new(),
            Recorder::new(),
            Recorder::new(),
            Recorder::new(),
        );
        let mut victim = Victim::spawn(&role, 0)?;
        let mut peer = only(victim.peers()?)?;
        let url: PeerUrl = peer.url.parse()?;
        for n in 0..self.args.kills {
            self.steps.say(&format!(
                "kill {n} of {}, {} MB, peers {peers}, survivors {survivors}",
                self.args.kills,
                ballast >> 20
            ));
            for survivor in &engines {
                read(survivor, &peer, &mut page)?;
                drain(survivor);
            }
            victim.settle()?;
            std::thread::sleep(QUIET);
            let killed = victim.kill()?;
            for survivor in &engines {
                let loss = wait_loss(survivor, &url.id)?;
                told.record_ns(loss.ts_ns.saturating_sub(killed));
                seen.record_ns(loss.seen_ns.saturating_sub(killed));
                if loss.reason.contains("timeout") {
                    self.problems.push(format!(
                        "the death of {} was only suspected: {}",
                        url.id, loss.reason
                    ));
                }
            }
            // At once, on the same port, while the dead one may still be taken down.
            let next = Victim::spawn(&role, url.port)?;
            peer = rejoin(&engines[0], &next, &peer, &mut page)?;
            let now = now_ns();
            process.record_ns(now - next.spawned_ns);
            engine.record_ns(now.saturating_sub(peer.started_ns));
            victim = next;
        }
        for survivor in engines {
            survivor.close();
        }
        self.results.push(Row::Kill {
            peers,
            survivors,
            ballast,
            told: told.times(),
            seen: (survivors == 1).then(|| seen.times()),
            histogram: told.buckets(),
        });
        if survivors == 1 {
            self.results.push(Row::Restart {
                peers,
                ballast,
                process: process.times(),
                engine: engine.times(),
            });
        }
        Ok(())
    }

    fn stop(&mut self) -> anyhow::Result<()> {
        let heartbeat_ms = self.args.heartbeat_ms;
        let told = self.stops(heartbeat_ms, 0, HEARTBEATS)?;
        self.results.push(Row::Stop {
            heartbeat_ms,
            limit_us: heartbeat_limit_us(heartbeat_ms),
            told: told.times(),
            histogram: told.buckets(),
        });
        Ok(())
    }

    fn stop_sentinel(&mut self) -> anyhow::Result<()> {
        let stall_ms = self.args.stall_ms;
        let told = self.stops(0, stall_ms, "stall timeout: ")?;
        self.results.push(Row::StopSentinel {
            stall_ms,
            limit_us: stall_ms as f64 * 1.5e3,
            told: told.times(),
            histogram: told.buckets(),
        });
        Ok(())
    }

    /// Stops peers, each once, and returns when the survivor suspected them, for a reason that begins with `reason`.
    fn stops(
        &mut self,
        heartbeat_ms: u64,
        stall_ms: u64,
        reason: &str,
    ) -> anyhow::Result<Recorder> {
        let survivor = self.survivor(heartbeat_ms)?;
        let role = Role {
            stall_ms,
            ..self.role(VICTIMS, 1)
        };
        let mut told = Recorder::new();
        let mut page = Page::new();
        for n in 0..self.args.stops {
            self.steps.say(&format!("stop {n} of {}", self.args.stops));
            let victim = Victim::spawn(&role, 0)?;
            let peer = only(victim.peers()?)?;
            read(&survivor, &peer, &mut page)?;
            drain(&survivor);
            victim.settle()?;
            let stopped = victim.stop()?;
            let id = peer.url.parse::<PeerUrl>()?.id;
            let loss = wait_loss(&survivor, &id)?;
            told.record_ns(loss.ts_ns.saturating_sub(stopped));
            if !loss.reason.starts_with(reason) {
                self.problems.push(format!(
                    "the stop of {id} was taken for something else than a {reason}…: {}",
                    loss.reason
                ));
            }
        }
        survivor.close();
        Ok(told)
    }

    fn link_down(&mut self) -> anyhow::Result<()> {
        let heartbeat_ms = self.args.heartbeat_ms;
        let seen = link::measure(&self.args.engine, heartbeat_ms, self.args.stops)?;
        if let Some(why) = seen.unable {
            // What was asked for by its name and cannot be had is an error.
            let named = self.args.names(Fault::LinkDown);
            ensure!(!named, "this cannot be measured here: {why}");
            self.left_out.push(format!("link-down was left out: {why}"));
            return Ok(());
        }
        self.transport = seen.transport;
        let mut told = Recorder::new();
        for ns in seen.told_ns {
            told.record_ns(ns);
        }
        self.problems.extend(seen.problems);
        self.results.push(Row::LinkDown {
            heartbeat_ms,
            limit_us: heartbeat_limit_us(heartbeat_ms),
            told: told.times(),
            histogram: told.buckets(),
        });
        Ok(())
    }

    fn connect(&mut self) -> anyhow::Result<()> {
        const LATER: u32 = 4;
        let process = Victim::spawn(&self.role(BYSTANDERS, 1 + LATER), 0)?;
        let peers = process.peers()?;
        let (mut first, mut later) = (Recorder::new(), Recorder::new());
        let mut page = Page::new();
        for _ in 0..self.args.connects {
            let engine = self.survivor(0)?;
            for (n, peer) in peers.iter().enumerate() {
                let before = Instant::now();
                read(&engine, peer, &mut page)?;
                if n == 0 { &mut first } else { &mut later }.record(before.elapsed());
            }
            engine.close();
        }
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

    fn stall(&mut self) -> anyhow::Result<()> {
        let survivor = self.survivor(0)?;
        let (_bystander, healthy) = self.bystanders(&survivor, 1, 0)?;
        let healthy = only(healthy)?;
        let role = self.role(VICTIMS, 1);
        let churns = self.args.churns;
        let start = Instant::now();
        let faults = while_reading(&survivor, &healthy, || {
            let mut page = Page::new();
            let mut victim = Victim::spawn(&role, 0)?;
            let mut peer = only(victim.peers()?)?;
            let url: PeerUrl = peer.url.parse()?;
            read(&survivor, &peer, &mut page)?;
            for n in 0..churns {
                self.steps.say(&format!("kill and restart {n} of {churns}"));
                victim.kill()?;
                wait_loss(&survivor, &url.id)?;
                let next = Victim::spawn(&role, url.port)?;
                peer = rejoin(&survivor, &next, &peer, &mut page)?;
                victim = next;
            }
            Ok(())
        })?;
        let took = start.elapsed();
        self.steps.say("the same without faults");
        let quiet = while_reading(&survivor, &healthy, || {
            std::thread::sleep(took);
            Ok(())
        })?;
        survivor.close();
        self.results.push(Row::Stall {
            churns,
            faults: faults.times(),
            quiet: quiet.times(),
            histogram: faults.buckets(),
        });
        Ok(())
    }

    fn cycles(&mut self) -> anyhow::Result<()> {
        let survivor = self.survivor(0)?;
        // A region of the survivor's own, so that there is something to count.
        survivor.allocate_managed_buffer(Peer::BYTES)?;
        let role = self.role(VICTIMS, 1);
        let mut page = Page::new();
        let mut victim = Victim::spawn(&role, 0)?;
        let mut peer = only(victim.peers()?)?;
        let url: PeerUrl = peer.url.parse()?;
        read(&survivor, &peer, &mut page)?;
        let cycles = self.args.cycles;
        let mut start = None;
        for n in 0..cycles {
            // By then allocators and caches have what they need.
            if n == cycles.div_ceil(10) {
                start = Some(holdings(&survivor));
            }
            self.steps.say(&format!("cycle {n} of {cycles}"));
            victim.kill()?;
            wait_loss(&survivor, &url.id)?;
            let next = Victim::spawn(&role, url.port)?;
            peer = rejoin(&survivor, &next, &peer, &mut page)?;
            victim = next;
            drain(&survivor);
        }
        let end = holdings(&survivor);
        let start = start.unwrap_or(end);
        let flat = end.flat_since(&start);
        if !flat {
            self.problems.push(format!(
                "{cycles} kill and rejoin cycles left something behind: {start:?} became {end:?}"
            ));
        }
        drop(victim);
        survivor.close();
        self.results.push(Row::Cycles {
            cycles,
            start,
            end,
            flat,
        });
        Ok(())
    }

    fn heartbeats(&mut self) -> anyhow::Result<()> {
        const INTERVAL_MS: u64 = 1000;
        let peers = self.args.heartbeat_peers;
        let survivor = self.survivor(INTERVAL_MS)?;
        let _process = self.bystanders(&survivor, peers, 0)?;
        drain(&survivor);
        // What polls after the first reads stops.
        std::thread::sleep(Duration::from_millis(500));
        let (cpu, start) = (machine::cpu_time(), Instant::now());
        std::thread::sleep(Duration::from_secs(self.args.seconds));
        let (used, took) = (machine::cpu_time() - cpu, start.elapsed());
        let lost = survivor.stats().failures;
        if lost > 0 {
            self.problems
                .push(format!("{lost} of {peers} healthy peers were lost"));
        }
        survivor.close();
        let cpu_percent = 100.0 * used.as_secs_f64() / took.as_secs_f64();
        self.results.push(Row::Heartbeats {
            peers,
            interval_ms: INTERVAL_MS,
            seconds: took.as_secs_f64(),
            cpu_percent,
            lost,
        });
        Ok(())
    }

    fn load(&mut self) -> anyhow::Result<()> {
        const PEERS: u32 = 4;
        const HEARTBEAT_MS: u64 = 1000;
        let survivor = self.survivor(HEARTBEAT_MS)?;
        let _process = self.bystanders(&survivor, PEERS, HEARTBEAT_MS)?;
        drain(&survivor);
        let stop = AtomicBool::new(false);
        let start = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..2 * std::thread::available_parallelism().map_or(1, std::num::NonZero::get) {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            std::thread::sleep(Duration::from_secs(self.args.load_seconds));
            stop.store(true, Ordering::Relaxed);
        });
        let seconds = start.elapsed().as_secs_f64();
        let false_alarms = survivor.stats().failures;
        if false_alarms > 0 {
            self.problems.push(format!(
                "{false_alarms} false alarms while the processors were busy"
            ));
        }
        survivor.close();
        self.results.push(Row::Load {
            seconds,
            peers: PEERS,
            heartbeat_ms: HEARTBEAT_MS,
            timeout_ms: 3 * HEARTBEAT_MS,
            false_alarms,
        });
        Ok(())
    }
}

fn only(mut peers: Vec<Peer>) -> anyhow::Result<Peer> {
    ensure!(peers.len() == 1, "{} engines instead of one", peers.len());
    peers.pop().context("no engine")
}

/// A read that must succeed and bring the right bytes.
fn read(engine: &Engine, peer: &Peer, page: &mut Page) -> anyhow::Result<()> {
    page.clear();
    peers::read(engine, peer, page, Some(PATIENCE))
        .with_context(|| format!("cannot read from {}", peer.url))?;
    peers::check(page)
}

/// Keeps trying to reach `next`, the successor of `dead` under its URL; returns it after the first read.
fn rejoin(engine: &Engine, next: &Victim, dead: &Peer, page: &mut Page) -> anyhow::Result<Peer> {
    let start = Instant::now();
    loop {
        // Nothing is moved: its memory is somewhere else now, and where is known only when it is up.
        // SAFETY: no byte is written.
        match unsafe { engine.read(&dead.url, page_addr(page), dead.addr, 0, Some(ATTEMPT)) } {
            Ok(()) => break,
            Err(error) if start.elapsed() > PATIENCE => {
                return Err(error).context("a process that was started again is not reached");
            }
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    let peer = only(next.peers()?)?;
    ensure!(
        peer.url == dead.url,
        "the process came back as {} instead of {}",
        peer.url,
        dead.url
    );
    read(engine, &peer, page)?;
    Ok(peer)
}

fn page_addr(page: &mut Page) -> usize {
    std::ptr::from_mut(page) as usize
}

/// Forgets the events so far.
fn drain(engine: &Engine) {
    while engine.wait_event(Some(Duration::ZERO)).is_some() {}
}

/// Waits for the loss of the link to `victim`. Others must not be lost.
fn wait_loss(engine: &Engine, victim: &LogicalId) -> anyhow::Result<Loss> {
    let start = Instant::now();
    let mut others: HashMap<LogicalId, String> = HashMap::new();
    while start.elapsed() < PATIENCE {
        let Some(event) = engine.wait_event(Some(PATIENCE)) else {
            continue;
        };
        if let EventKind::Failed {
            reason,
            established: true,
            ..
        } = event.kind
        {
            if event.peer == *victim {
                ensure!(others.is_empty(), "healthy peers were lost: {others:?}");
                return Ok(Loss {
                    ts_ns: event.ts_ns,
                    seen_ns: now_ns(),
                    reason,
                });
            }
            others.insert(event.peer, reason);
        }
    }
    bail!("the loss of {victim} was not reported within {PATIENCE:?}")
}

fn holdings(engine: &Engine) -> Holdings {
    let stats = engine.stats();
    Holdings {
        descriptors: machine::descriptors(),
        threads: machine::threads(),
        resident: machine::resident(),
        regions: stats.regions,
        connections: stats.eps_created.saturating_sub(stats.eps_closed),
        remote_rkeys: stats.remote_rkeys,
    }
}

/// Reads from `peer`, back to back, while `churn` runs; returns the times of the reads.
fn while_reading(
    engine: &Engine,
    peer: &Peer,
    churn: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Recorder> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut recorder = Recorder::new();
            let mut page = Page::new();
            while !stop.load(Ordering::Relaxed) {
                let before = Instant::now();
                peers::read(engine, peer, &mut page, Some(PATIENCE))
                    .context("a read between healthy peers failed")?;
                recorder.record(before.elapsed());
            }
            peers::check(&page)?;
            anyhow::Ok(recorder)
        });
        let churned = churn();
        stop.store(true, Ordering::Relaxed);
        let recorder = reader
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        churned?;
        recorder
    })
}
