//! What reader and owner say to each other besides the transfers that are measured.
//!
//! Messages of the engine carry it. The first byte tells what a message is; requests and answers are JSON.

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use connex_rs::{Engine, LogicalId, Recipient};
use serde::{Deserialize, Serialize};

use crate::pattern::Mismatch;
use crate::verify;

/// First byte of a request or an answer.
pub(crate) const CONTROL: u8 = b'c';
/// First byte of a message that the owner sends back as it is.
pub(crate) const ECHO: u8 = b'e';
/// First byte of a message that the owner drops.
pub(crate) const SWALLOW: u8 = b's';
/// First byte of the owner's answer to a step of a channel; what was wrong follows.
pub(crate) const STEP: u8 = b't';

/// How long an answer may take; filling and checking large memory in a debug build takes seconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What is at the address that an owner prints, in 8-byte words: [`MAGIC`], version, bytes of data.
pub(crate) const HEADER: usize = 4096;
/// The first word there.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"cxrma-ow");
/// The second: reader and owner must be of one version.
pub(crate) const VERSION: u64 = 2;

/// The most engines that an owner starts for a reader.
pub(crate) const MAX_PEERS: u32 = 1024;

/// What a reader asks for. Offsets count from the end of the header.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) enum Request {
    /// Fill with contents number `seed`.
    Fill {
        offset: usize,
        len: usize,
        seed: u64,
    },
    /// Overwrite with what no contents have.
    Poison { offset: usize, len: usize },
    /// Compare with contents number `seed`.
    Check {
        offset: usize,
        len: usize,
        seed: u64,
    },
    /// Start engines besides the main one; those started before are closed.
    Peers { count: u32, heartbeat_ms: u64 },
    /// Accept channels, from now on.
    Channels,
    /// Start to consume chains.
    Watch,
    /// Consume up to chain number `last`, then stop.
    WatchEnd { last: u64 },
}

/// What the owner answers.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) enum Answer {
    /// Done.
    Done,
    /// The result of a check.
    Checked(Option<Mismatch>),
    /// The engines that were started.
    Peers(Vec<Peer>),
    /// What the consumer of chains saw.
    Watched(verify::Seen),
    /// Refused or failed.
    Refused(String),
}

/// A small engine with one page of memory, filled with contents number [`Peer::SEED`].
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(crate) struct Peer {
    /// Its URL.
    pub(crate) url: String,
    /// Its memory.
    pub(crate) addr: u64,
    /// When it was up, CLOCK_MONOTONIC nanoseconds.
    pub(crate) started_ns: u64,
}

impl Peer {
    /// Bytes of its memory.
    pub(crate) const BYTES: usize = 4096;
    /// What they hold.
    pub(crate) const SEED: u64 = 4;
}

/// A message of JSON.
pub(crate) fn encode<T: Serialize>(what: &T) -> anyhow::Result<Vec<u8>> {
    let mut message = vec![CONTROL];
    serde_json::to_writer(&mut message, what)?;
    Ok(message)
}

/// The reader's side.
pub(crate) struct Control<'a> {
    /// The engine that talks.
    pub(crate) engine: &'a Engine,
    /// The owner.
    pub(crate) url: &'a str,
    /// Its identity.
    pub(crate) owner: LogicalId,
}

impl Control<'_> {
    /// Asks and waits for the answer.
    ///
    /// # Errors
    /// If the owner is gone, refuses, or says what was not expected.
    pub(crate) fn ask(&self, request: &Request) -> anyhow::Result<Answer> {
        self.engine
            .send_msg(Recipient::Url(self.url), encode(request)?, Some(PATIENCE))
            .context("cannot ask the owner")?;
        let message = self.receive()?;
        ensure!(
            message.first() == Some(&CONTROL),
            "the owner answered with a message of another kind"
        );
        match serde_json::from_slice(&message[1..])
            .context("the owner's answer cannot be read: are both programs of one version?")?
        {
            Answer::Refused(why) => bail!("the owner refused: {why}"),
            answer => Ok(answer),
        }
    }

    /// The owner's next message.
    ///
    /// # Errors
    /// If none comes in time.
    pub(crate) fn receive(&self) -> anyhow::Result<Vec<u8>> {
        loop {
            let Some((from, message)) = self.engine.recv_msg(Some(PATIENCE)) else {
                bail!("the owner did not answer within {PATIENCE:?}");
            };
            if from == self.owner {
                return Ok(message);
            }
        }
    }

    /// Asks for something that has no result.
    ///
    /// # Errors
    /// As for [`ask`](Self::ask).
    pub(crate) fn tell(&self, request: &Request) -> anyhow::Result<()> {
        match self.ask(request)? {
            Answer::Done => Ok(()),
            other => bail!("unexpected answer {other:?}"),
        }
    }

    /// Has the owner compare its memory.
    ///
    /// # Errors
    /// As for [`ask`](Self::ask).
    pub(crate) fn check(
        &self,
        offset: usize,
        len: usize,
        seed: u64,
    ) -> anyhow::Result<Option<Mismatch>> {
        match self.ask(&Request::Check { offset, len, seed })? {
            Answer::Checked(found) => Ok(found),
            other => bail!("unexpected answer {other:?}"),
        }
    }

    /// Has the owner start engines.
    ///
    /// # Errors
    /// As for [`ask`](Self::ask).
    pub(crate) fn peers(&self, count: u32, heartbeat_ms: u64) -> anyhow::Result<Vec<Peer>> {
        match self.ask(&Request::Peers {
            count,
            heartbeat_ms,
        })? {
            Answer::Peers(peers) => {
                ensure!(
                    peers.len() == count as usize,
                    "{} engines instead of {count}",
                    peers.len()
                );
                Ok(peers)
            }
            other => bail!("unexpected answer {other:?}"),
        }
    }
}
