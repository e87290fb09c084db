//! Step channels: the owner takes steps, the reader sends them and measures.
//!
//! The correlation number of a step says what is to be done with it: its upper bits whether the contents are compared and
//! whether the owner answers with a message, the others are the step's number, which only grows.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use connex_rs::channel::{Array, OwnedArray, View};
use connex_rs::{ChannelConfig, Engine, Receiver, Recipient, Sender};

use crate::control::{Control, PATIENCE, STEP};
use crate::pattern::word;
use crate::times::{Recorder, Repeat, Times};

/// Name of all channels of ours.
const NAME: &str = "cxrma";
/// The contents are those of the step's number, and the owner compares them.
const CHECK: u64 = 1 << 63;
/// The owner answers when it has released the step.
const ANSWER: u64 = 1 << 62;
/// The rest of a correlation number.
const NUMBER: u64 = ANSWER - 1;

// ---- the owner --------------------------------------------------------------------------------

/// Accepts channels until the engine is closed; each is served by a thread of its own.
pub(crate) fn accept(engine: &Engine) {
    while let Ok(receiver) = engine.accept_channel(Some(NAME), None) {
        let engine = engine.clone();
        std::thread::spawn(move || serve(&engine, &receiver));
    }
}

/// Takes steps until the end, and says what was wrong with them.
fn serve(engine: &Engine, receiver: &Receiver) {
    let (mut last, mut problem) = (0, String::new());
    for step in receiver {
        // A reader that is gone needs no answer.
        let Ok(step) = step else { return };
        let (corr, number) = (step.corr(), step.corr() & NUMBER);
        if problem.is_empty() && number <= last {
            problem = format!("step {number} came after step {last}");
        }
        last = number;
        if problem.is_empty() && corr & CHECK != 0 {
            problem = compare(&step[0], number).err().unwrap_or_default();
        }
        drop(step);
        if corr & ANSWER != 0 {
            let mut message = vec![STEP];
            message.append(&mut std::mem::take(&mut problem).into_bytes());
            let to = Recipient::Id(receiver.peer());
            if engine.send_msg(to, message, Some(PATIENCE)).is_err() {
                return;
            }
        }
    }
}

/// Whether an array holds contents number `number`.
fn compare(array: &View, number: u64) -> Result<(), String> {
    let words: &[u64] = array
        .elements()
        .ok_or_else(|| format!("step {number} holds {} instead of uint64", array.dtype()))?;
    match (0..).zip(words).find(|&(n, &w)| w != word(number, n)) {
        None => Ok(()),
        Some((n, &found)) => Err(format!(
            "step {number} of {} bytes arrived wrong at byte {}: {found:#018x} instead of {:#018x}",
            words.len() * 8,
            n * 8,
            word(number, n)
        )),
    }
}

// ---- the reader -------------------------------------------------------------------------------

/// What was found out about a channel.
pub(crate) struct Figures {
    /// Steps of the stream, and what they took until the last one was released.
    pub(crate) count: u64,
    /// See `count`.
    pub(crate) took: Duration,
    /// A blocking send: until the step is in place. With one in flight only.
    pub(crate) sent: Option<Times>,
    /// Send to the owner's answer that it has taken and released the step.
    pub(crate) answered: Times,
}

/// A channel to the owner, and the numbers of its steps.
pub(crate) struct Line<'a> {
    control: &'a Control<'a>,
    sender: Sender,
    words: usize,
    in_flight: usize,
    number: u64,
}

impl<'a> Line<'a> {
    /// Opens a channel with a ring of `in_flight` slots for steps of `bytes`, whole words.
    ///
    /// # Errors
    /// If it is not accepted.
    pub(crate) fn open(
        control: &'a Control<'a>,
        bytes: usize,
        in_flight: usize,
    ) -> anyhow::Result<Self> {
        let sender = open(control.engine, control.url, bytes, in_flight)?;
        sender
            .wait_open(Some(PATIENCE))
            .context("the owner did not accept a channel")?;
        Ok(Self {
            control,
            sender,
            words: bytes / 8,
            in_flight,
            number: 0,
        })
    }

    /// Measures; what arrived wrong is told in `problems`.
    ///
    /// # Errors
    /// If the channel or the owner fails.
    pub(crate) fn measure(
        mut self,
        repeat: Repeat,
        problems: &mut Vec<String>,
    ) -> anyhow::Result<Figures> {
        self.checked(problems)?;
        let array = contents(0, self.words)?;
        let sent = if self.in_flight == 1 {
            Some(self.sent(repeat)?)
        } else {
            None
        };
        let warm = Repeat {
            iterations: 2 * self.in_flight as u64,
            ..repeat
        };
        self.answered(&array, warm, problems)?;
        let answered = self.answered(&array, repeat, problems)?;
        let (count, took) = self.stream(&array, repeat)?;
        self.checked(problems)?;
        self.sender.close();
        self.sender.drain(Some(PATIENCE))?;
        Ok(Figures {
            count,
            took,
            sent,
            answered,
        })
    }

    fn next(&mut self) -> u64 {
        self.number += 1;
        self.number
    }

    /// Every slot once, with contents of its own that the owner compares.
    fn checked(&mut self, problems: &mut Vec<String>) -> anyhow::Result<()> {
        for _ in 0..self.in_flight {
            let number = self.next();
            let array = contents(number, self.words)?;
            self.sender
                .send_owned(&[array], CHECK | ANSWER | number, Some(PATIENCE))?;
        }
        for _ in 0..self.in_flight {
            self.answer(problems)?;
        }
        Ok(())
    }

    fn answer(&self, problems: &mut Vec<String>) -> anyhow::Result<()> {
        let message = self.control.receive()?;
        ensure!(
            message.first() == Some(&STEP),
            "the owner's answer to a step is a message of another kind"
        );
        if message.len() > 1 {
            problems.push(String::from_utf8_lossy(&message[1..]).into_owned());
        }
        Ok(())
    }

    fn sent(&mut self, repeat: Repeat) -> anyhow::Result<Times> {
        let words: Vec<u64> = (0..self.words as u64).map(|n| word(0, n)).collect();
        let shape = [words.len()];
        let times = repeat.time(|| {
            let number = self.next();
            let array = Array::of(&words, &shape)?;
            self.sender.send(&[array], number, Some(PATIENCE))?;
            // The next one finds its slot free.
            Ok(self.sender.drain(Some(PATIENCE))?)
        })?;
        Ok(times.times())
    }

    /// Keeps as many steps in flight as there are slots, each until its answer.
    fn answered(
        &mut self,
        array: &OwnedArray,
        repeat: Repeat,
        problems: &mut Vec<String>,
    ) -> anyhow::Result<Times> {
        let mut times = Recorder::new();
        let mut flying = VecDeque::with_capacity(self.in_flight);
        let (begun, mut posted) = (Instant::now(), 0);
        loop {
            while flying.len() < self.in_flight
                && (posted < self.in_flight as u64 || repeat.more(posted, begun))
            {
                let number = self.next();
                flying.push_back(Instant::now());
                self.sender.send_owned(
                    std::slice::from_ref(array),
                    ANSWER | number,
                    Some(PATIENCE),
                )?;
                posted += 1;
            }
            let Some(since) = flying.pop_front() else {
                return Ok(times.times());
            };
            self.answer(problems)?;
            times.record(since.elapsed());
        }
    }

    /// Steps one after the other, as fast as slots come back; until all are released.
    fn stream(&mut self, array: &OwnedArray, repeat: Repeat) -> anyhow::Result<(u64, Duration)> {
        let (begun, mut count) = (Instant::now(), 0);
        while count < self.in_flight as u64 || repeat.more(count, begun) {
            let number = self.next();
            self.sender
                .send_owned(std::slice::from_ref(array), number, Some(PATIENCE))?;
            count += 1;
        }
        self.sender.drain(Some(PATIENCE))?;
        Ok((count, begun.elapsed()))
    }
}

/// Opens a channel and sends one step: how long that took until the step was in place.
///
/// # Errors
/// If it cannot be opened, or the send fails.
pub(crate) fn first_step(engine: &Engine, url: &str, bytes: usize) -> anyhow::Result<Duration> {
    let words: Vec<u64> = (0..bytes as u64 / 8).map(|n| word(1, n)).collect();
    let shape = [words.len()];
    let begun = Instant::now();
    let sender = open(engine, url, bytes, 1)?;
    let corr = CHECK | ANSWER | 1;
    sender.send(&[Array::of(&words, &shape)?], corr, Some(PATIENCE))?;
    let took = begun.elapsed();
    let (_, answer) = engine
        .recv_msg(Some(PATIENCE))
        .context("the owner did not answer a step")?;
    ensure!(
        answer == [STEP],
        "{}",
        String::from_utf8_lossy(&answer[1..])
    );
    sender.close();
    Ok(took)
}

fn open(engine: &Engine, url: &str, bytes: usize, slots: usize) -> anyhow::Result<Sender> {
    let config = ChannelConfig {
        slots,
        slot_bytes: bytes,
    };
    Ok(engine.channel(url, NAME, config)?)
}

/// An array with contents number `number`.
fn contents(number: u64, words: usize) -> anyhow::Result<OwnedArray> {
    let contents: Vec<u64> = (0..words as u64).map(|n| word(number, n)).collect();
    Ok(OwnedArray::of(contents, &[words])?)
}
