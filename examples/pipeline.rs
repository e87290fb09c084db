//! A pipeline of three processes that moves arrays through step channels; the middle one is killed and restarted.
//!
//! ```text
//! source (stage 0) ──activations──▶ middle (stage 1) ──results──▶ sink (stage 2)
//! ```
//!
//! The program starts itself once for each stage, kills the middle stage when a third of the steps is through, and
//! starts it again under the same identity and address. No step is lost: the middle releases a step only when its
//! result is in the sink's memory, and the source sends again what had not been released when its channel failed. The
//! sink verifies every result and drops those that come twice. The exit code is 0 only if every result was right.
//!
//! ```console
//! $ cargo run --example pipeline
//! ```
#![allow(
    clippy::print_stdout,
    reason = "a program that talks to people and to its parent"
)]

use std::collections::{BTreeSet, VecDeque};
use std::error::Error as StdError;
use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use connex_rs::channel::{Array, OwnedArray};
use connex_rs::{
    ChannelConfig, Config, Engine, Error, ErrorKind, LogicalId, PeerUrl, Sender, Step,
};

type Outcome<T> = Result<T, Box<dyn StdError>>;

const STEPS: u64 = 240;
const TOKENS: usize = 16;
const HIDDEN: usize = 512;

/// Ends a stage that hangs.
const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        [] => pipeline(),
        ["source", next] => source(next),
        ["middle", port, next] => middle(port, next),
        ["sink"] => sink(),
        _ => Err("usage: pipeline (without arguments)".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}

// ---- the parent -----------------------------------------------------------------------------------

/// A stage in its own process; killed when dropped.
struct Stage {
    name: &'static str,
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Stage {
    fn start(name: &'static str, arguments: &[&str]) -> Outcome<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .arg(name)
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()?;
        let output = process.stdout.take().ok_or("no output")?;
        let lines = BufReader::new(output).lines();
        Ok(Self {
            name,
            process,
            lines,
        })
    }

    /// The rest of its next line that starts with `word`. Other lines are shown.
    fn says(&mut self, word: &str) -> Outcome<String> {
        for line in &mut self.lines {
            let line = line?;
            if let Some(rest) = line.strip_prefix(word) {
                return Ok(rest.trim().to_owned());
            }
            println!("{}: {line}", self.name);
        }
        Err(format!("{} ended before it said {word:?}", self.name).into())
    }

    fn finish(mut self) -> Outcome<()> {
        for line in &mut self.lines {
            println!("{}: {}", self.name, line?);
        }
        let status = self.process.wait()?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("{} ended with {status}", self.name).into())
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn pipeline() -> Outcome<()> {
    let begin = Instant::now();
    let mut sink = Stage::start("sink", &[])?;
    let sink_url = sink.says("url")?;
    let mut middle = Stage::start("middle", &["0", &sink_url])?;
    let middle_url = middle.says("url")?;
    let source = Stage::start("source", &[&middle_url])?;

    sink.says("a third")?;
    // Dropping a stage kills it.
    drop(middle);
    let killed = Instant::now();
    println!("middle killed");
    let port = middle_url.parse::<PeerUrl>()?.port.to_string();
    let mut middle = Stage::start("middle", &[&port, &sink_url])?;
    if middle.says("url")? != middle_url {
        return Err("the middle stage did not come back at its address".into());
    }
    sink.says("first result of the new middle")?;
    println!(
        "middle restarted: next result {:.0?} after the kill",
        killed.elapsed()
    );

    source.finish()?;
    middle.finish()?;
    sink.finish()?;
    println!("{STEPS} results verified in {:.1?}", begin.elapsed());
    Ok(())
}

// ---- the stages -----------------------------------------------------------------------------------

fn engine(stage: u32, port: u16) -> Outcome<Engine> {
    let mut config = Config::new(LogicalId::new("demo", stage, 0, 0)?);
    config.listen_ip = "127.0.0.1".into();
    config.port = port;
    Ok(Engine::start(config)?)
}

fn ring() -> ChannelConfig {
    ChannelConfig {
        slots: 4,
        slot_bytes: 64 << 10,
    }
}

/// The arrays of a step: activations and the positions of its tokens.
fn input(corr: u64) -> (Vec<f32>, Vec<i32>) {
    let activations = (0..TOKENS * HIDDEN).map(|n| ((n as u64 * 31 + corr * 7) % 1009) as f32);
    let positions = (0..TOKENS).map(|n| corr as i32 + n as i32);
    (activations.collect(), positions.collect())
}

/// What the middle stage computes.
fn compute(activations: &[f32], positions: &[i32]) -> Vec<f32> {
    activations
        .chunks(HIDDEN)
        .zip(positions)
        .flat_map(|(row, &position)| row.iter().map(move |x| x * 2.0 + position as f32))
        .collect()
}

/// The link to the next stage, opened anew for as long as that stage is away.
fn open(engine: &Engine, url: &str, name: &str) -> Outcome<Sender> {
    let begin = Instant::now();
    loop {
        let sender = engine.channel(url, name, ring())?;
        match sender.wait_open(Some(PATIENCE)) {
            Ok(()) => return Ok(sender),
            Err(error) if begin.elapsed() > PATIENCE => return Err(error.into()),
            // Nobody listens yet: the stage is being restarted.
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Whether the next stage is gone, with the steps that it had not taken.
fn untaken(result: Result<(), Error>) -> Outcome<Option<Vec<u64>>> {
    match result {
        Ok(()) => Ok(None),
        Err(error) if error.kind() == ErrorKind::PeerFailed => Ok(Some(error.untaken().to_vec())),
        Err(error) => Err(error.into()),
    }
}

fn source(next: &str) -> Outcome<()> {
    let engine = engine(0, 0)?;
    let mut todo: VecDeque<u64> = (0..STEPS).collect();
    loop {
        let sender = open(&engine, next, "activations")?;
        let lost = loop {
            let Some(corr) = todo.pop_front() else {
                sender.close();
                break untaken(sender.drain(Some(PATIENCE)))?;
            };
            let (activations, positions) = input(corr);
            let step = [
                OwnedArray::of(activations, &[TOKENS, HIDDEN])?,
                OwnedArray::of(positions, &[TOKENS])?,
            ];
            let sent = sender.send_owned(&step, corr, Some(PATIENCE)).map(drop);
            if let Some(lost) = untaken(sent)? {
                if !lost.contains(&corr) {
                    todo.push_front(corr);
                }
                break Some(lost);
            }
        };
        let Some(lost) = lost else {
            return Ok(());
        };
        println!("channel failed; to be sent again: {lost:?}");
        for corr in lost.into_iter().rev() {
            todo.push_front(corr);
        }
    }
}

fn middle(port: &str, next: &str) -> Outcome<()> {
    let engine = engine(1, port.parse()?)?;
    println!("url {}", engine.local_url());
    let receiver = engine.accept_channel(Some("activations"), Some(PATIENCE))?;
    let sender = open(&engine, next, "results")?;
    for step in &receiver {
        let step = step?;
        let (Some(activations), Some(positions)) = (step[0].elements(), step[1].elements()) else {
            return Err(format!("a step of other types: {step:?}").into());
        };
        let result = compute(activations, positions);
        // As long as a small model might take.
        thread::sleep(Duration::from_millis(2));
        let shape = step[0].shape();
        sender.send(&[Array::of(&result, shape)?], step.corr(), Some(PATIENCE))?;
        // The step is dropped, and so released, only now: its result is in the sink's memory.
    }
    sender.close();
    sender.drain(Some(PATIENCE))?;
    Ok(())
}

fn verify(step: &Step) -> Outcome<()> {
    let (activations, positions) = input(step.corr());
    let expected = compute(&activations, &positions);
    if step[0].shape() != [TOKENS, HIDDEN] || step[0].elements() != Some(&expected[..]) {
        return Err(format!("the result of step {} is wrong", step.corr()).into());
    }
    Ok(())
}

fn sink() -> Outcome<()> {
    let engine = engine(2, 0)?;
    println!("url {}", engine.local_url());
    let mut seen = BTreeSet::new();
    let (mut twice, mut failures) = (0, 0);
    while failures < 2 {
        let receiver = engine.accept_channel(Some("results"), Some(PATIENCE))?;
        let mut taken = 0;
        for step in &receiver {
            let step = match step {
                Ok(step) => step,
                Err(error) if error.kind() == ErrorKind::PeerFailed => {
                    println!("channel failed after {taken} results: {error}");
                    failures += 1;
                    break;
                }
                Err(error) => return Err(error.into()),
            };
            verify(&step)?;
            taken += 1;
            twice += usize::from(!seen.insert(step.corr()));
            if failures == 0 && seen.len() as u64 == STEPS / 3 {
                println!("a third");
            }
            if failures == 1 && taken == 1 {
                println!("first result of the new middle");
            }
        }
        if seen.len() as u64 == STEPS {
            println!("{STEPS} results, {twice} of them twice");
            return if failures == 1 {
                Ok(())
            } else {
                Err("the middle stage was not seen to fail".into())
            };
        }
    }
    Err(format!("{} of {STEPS} results came", seen.len()).into())
}
