//! Long streams of signals, chains or steps of a channel from one process to another, with a checksum and an order that
//! the consumer looks at as soon as a message, a flag or a step says that the data is in place.
//!
//! For signals and chains the consumer's memory is a ring of slots: a flag word, a head, and from byte 64 on the payload. The
//! producer overwrites a slot when the consumer has said that it is done with it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use connex_rs::channel::OwnedArray;
use connex_rs::{ChannelConfig, Engine, Range, Recipient, Transfer};
use serde_json::Value;

/// Nothing of a stream may stand still for longer, on a loaded machine.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

/// Name of the channel of a stream.
const NAME: &str = "stream";

/// Where the payload of a slot begins; its head is before it.
const PAYLOAD_AT: usize = 64;

/// Words of a head: number, bytes, checksum.
const HEAD: usize = 3;

/// What a stream is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Signal,
    Chain,
    Channel,
}

/// A stream that both sides know.
#[derive(Debug)]
pub struct Plan {
    kind: Kind,
    /// Bytes of a payload, in turn.
    lens: Vec<usize>,
    count: u64,
    slots: usize,
}

impl Plan {
    /// The stream that an order describes: `kind`, `lens`, `count`, `slots`.
    ///
    /// # Errors
    /// What is missing or wrong.
    pub fn of(order: &Value) -> Result<Self, String> {
        let kind = match order["kind"].as_str() {
            Some("signal") => Kind::Signal,
            Some("chain") => Kind::Chain,
            Some("channel") => Kind::Channel,
            other => return Err(format!("{other:?} is no kind of stream")),
        };
        let lens: Option<Vec<usize>> = order["lens"].as_array().and_then(|lens| {
            lens.iter()
                .map(|len| len.as_u64().map(|len| len as usize))
                .collect()
        });
        let number = |name: &str| {
            let number = order[name].as_u64().filter(|&n| n > 0);
            number.ok_or_else(|| format!("{name} is missing in {order}"))
        };
        Ok(Self {
            kind,
            lens: lens
                .filter(|lens| !lens.is_empty() && !lens.contains(&0))
                .ok_or("lens are missing")?,
            count: number("count")?,
            slots: number("slots")? as usize,
        })
    }

    fn len(&self, n: u64) -> usize {
        self.lens[n as usize % self.lens.len()]
    }

    fn longest(&self) -> usize {
        self.lens.iter().copied().max().unwrap_or(0)
    }

    fn stride(&self) -> usize {
        PAYLOAD_AT + self.longest().next_multiple_of(64)
    }

    /// Where payload `n` goes, from the beginning of the ring.
    fn slot(&self, n: u64) -> usize {
        n as usize % self.slots * self.stride()
    }

    /// Bytes of the ring.
    pub fn bytes(&self) -> usize {
        self.slots * self.stride()
    }

    /// Whether the consumer says that it is done with all up to `n`: often enough that the producer never waits for nothing.
    fn tells(&self, n: u64) -> bool {
        (n + 1).is_multiple_of((self.slots as u64 / 2).max(1)) || n + 1 == self.count
    }
}

/// Fills a payload: no two of a stream are equal.
fn fill(payload: &mut [u8], n: u64) {
    let mut word = (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut words = payload.chunks_exact_mut(8);
    for chunk in &mut words {
        chunk.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_add(0xbf58_476d_1ce4_e5b9);
    }
    let rest = words.into_remainder();
    rest.copy_from_slice(&word.to_le_bytes()[..rest.len()]);
}

/// Depends on every byte and its place.
fn checksum(bytes: &[u8]) -> u64 {
    let step = |sum: u64, word: u64| {
        (sum ^ word)
            .wrapping_mul(0x0000_0100_0000_01b3)
            .rotate_left(29)
    };
    let words = bytes.chunks_exact(8);
    let mut tail = [0; 8];
    tail[..words.remainder().len()].copy_from_slice(words.remainder());
    let sum = words.fold(bytes.len() as u64, |sum, word| {
        step(sum, u64::from_le_bytes(word.try_into().unwrap_or_default()))
    });
    step(sum, u64::from_le_bytes(tail))
}

fn check(plan: &Plan, n: u64, head: [u64; HEAD], payload: &[u8]) -> Result<(), String> {
    let [number, len, sum] = head;
    let found = checksum(payload);
    if (number, len as usize, sum) == (n, plan.len(n), found) && payload.len() == plan.len(n) {
        return Ok(());
    }
    Err(format!(
        "{:?} {n} of {} bytes: its head says number {number}, {len} bytes, checksum {sum:#x}; the payload has {} bytes, checksum {found:#x}",
        plan.kind,
        plan.len(n),
        payload.len()
    ))
}

// ---- the consumer -----------------------------------------------------------------------------

/// Takes a stream of `producer` (a URL), whose ring begins at `ring`.
///
/// # Errors
/// The first thing that is wrong with it.
///
/// # Safety
/// `ring` is the address of [`Plan::bytes`] of registered memory, 64-byte aligned, that lives until this returns.
pub unsafe fn consume(
    engine: &Engine,
    producer: &str,
    ring: usize,
    plan: &Plan,
) -> Result<(), String> {
    if plan.kind == Kind::Channel {
        return take_steps(engine, plan);
    }
    let mut payload = vec![0; plan.longest()];
    for n in 0..plan.count {
        let slot = ring + plan.slot(n);
        let head = match plan.kind {
            Kind::Signal => {
                let (_, message) = engine
                    .recv_msg(PATIENCE)
                    .ok_or_else(|| format!("signal {n} did not come"))?;
                words(&message)?
            }
            _ => {
                // SAFETY: aligned, and in the ring that the caller vouches for.
                unsafe { await_flag(slot, n) }?;
                // SAFETY: behind the flag, in the same slot.
                words(&unsafe { copy(slot + 8, HEAD * 8) })?
            }
        };
        let payload = &mut payload[..plan.len(n)];
        // SAFETY: the slot's payload, in the ring that the caller vouches for; copied, because a peer could change it.
        unsafe {
            let from = (slot + PAYLOAD_AT) as *const u8;
            std::ptr::copy_nonoverlapping(from, payload.as_mut_ptr(), payload.len());
        }
        check(plan, n, head, payload)?;
        if plan.tells(n) {
            let told = (n + 1).to_le_bytes().to_vec();
            let sent = engine.send_msg(Recipient::Url(producer), told, PATIENCE);
            sent.map_err(|e| format!("cannot tell that {n} was taken: {e}"))?;
        }
    }
    Ok(())
}

fn take_steps(engine: &Engine, plan: &Plan) -> Result<(), String> {
    let receiver = engine.accept_channel(Some(NAME), PATIENCE);
    let receiver = receiver.map_err(|e| e.to_string())?;
    let mut n = 0;
    while let Some(step) = receiver.recv(PATIENCE).map_err(|e| e.to_string())? {
        let head: &[u64] = step[1].elements().ok_or("a head that is none")?;
        let head = head.try_into().map_err(|_| "a head of another length")?;
        if step.corr() != n {
            return Err(format!("step {} came instead of {n}", step.corr()));
        }
        check(plan, n, head, step[0].bytes())?;
        n += 1;
    }
    if n == plan.count {
        Ok(())
    } else {
        Err(format!("{n} steps instead of {}", plan.count))
    }
}

/// Polls the flag of slot `n` with acquire loads.
///
/// # Safety
/// `slot` is an aligned word that lives until this returns.
unsafe fn await_flag(slot: usize, n: u64) -> Result<(), String> {
    // SAFETY: passed on to the caller; a peer stores it as one word.
    let flag = unsafe { AtomicU64::from_ptr(slot as *mut u64) };
    let begun = Instant::now();
    let mut polls = 0u32;
    while flag.load(Ordering::Acquire) != n + 1 {
        polls += 1;
        if polls.is_multiple_of(64) {
            std::thread::yield_now();
        }
        if polls.is_multiple_of(1 << 16) && Some(begun.elapsed()) > PATIENCE {
            return Err(format!("the flag of chain {n} did not come"));
        }
    }
    Ok(())
}

/// # Safety
/// `len` bytes at `addr` are readable.
unsafe fn copy(addr: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: passed on to the caller.
    unsafe { std::ptr::copy_nonoverlapping(addr as *const u8, bytes.as_mut_ptr(), len) };
    bytes
}

fn words<const N: usize>(bytes: &[u8]) -> Result<[u64; N], String> {
    if bytes.len() != N * 8 {
        return Err(format!("{} bytes instead of {}", bytes.len(), N * 8));
    }
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    }
    Ok(words)
}

// ---- the producer -----------------------------------------------------------------------------

/// Sends a stream to `consumer` (a URL), whose ring begins at `ring` there.
///
/// # Errors
/// The first operation that fails.
pub fn produce(engine: &Engine, consumer: &str, ring: u64, plan: &Plan) -> Result<(), String> {
    if plan.kind == Kind::Channel {
        return send_steps(engine, consumer, plan);
    }
    // Lives as long as the process: an operation that fails here may still read it.
    let source: &'static mut [u64] = vec![0; plan.bytes() / 8].leak();
    let source = source.as_mut_ptr() as usize;
    let mut flying: VecDeque<Transfer> = VecDeque::new();
    let mut taken = 0;
    for n in 0..plan.count {
        while n - taken >= plan.slots as u64 {
            taken = told(engine, taken)?;
        }
        if flying.len() == plan.slots {
            end(flying.pop_front())?;
        }
        let (slot, len) = (source + plan.slot(n), plan.len(n));
        // SAFETY: inside the leaked buffer; the operation that used this slot has ended.
        let sum = unsafe {
            let payload = std::slice::from_raw_parts_mut((slot + PAYLOAD_AT) as *mut u8, len);
            fill(payload, n);
            checksum(payload)
        };
        let head = [n, len as u64, sum];
        let there = ring + plan.slot(n) as u64;
        let posted = if plan.kind == Kind::Signal {
            let message = head.iter().flat_map(|word| word.to_le_bytes()).collect();
            let (from, to) = (slot + PAYLOAD_AT, there + PAYLOAD_AT as u64);
            // SAFETY: the leaked buffer; its slot is not touched until the operation has ended.
            unsafe { engine.put_signal(consumer, from, to, len, message, PATIENCE) }
        } else {
            let flag_and_head = [n + 1, head[0], head[1], head[2]];
            // SAFETY: the words before the payload in the slot.
            unsafe { std::ptr::copy_nonoverlapping(flag_and_head.as_ptr(), slot as *mut u64, 4) };
            let range = |at: usize, len: usize| Range {
                local: slot + at,
                remote: there + at as u64,
                len,
            };
            let ranges = [range(PAYLOAD_AT, len), range(8, HEAD * 8), range(0, 8)];
            // SAFETY: as above.
            unsafe { engine.put_chain(consumer, &ranges, PATIENCE) }
        };
        flying.push_back(posted.map_err(|e| e.to_string())?);
    }
    while !flying.is_empty() {
        end(flying.pop_front())?;
    }
    while taken < plan.count {
        taken = told(engine, taken)?;
    }
    Ok(())
}

/// How many the consumer has taken, when it says so again.
fn told(engine: &Engine, taken: u64) -> Result<u64, String> {
    let (_, told) = engine
        .recv_msg(PATIENCE)
        .ok_or_else(|| format!("{taken} were taken, and no more"))?;
    let [now] = words(&told)?;
    Ok(now)
}

fn end(transfer: Option<Transfer>) -> Result<(), String> {
    match transfer.and_then(|transfer| transfer.wait(None)) {
        Some(Err(error)) => Err(error.to_string()),
        _ => Ok(()),
    }
}

fn send_steps(engine: &Engine, consumer: &str, plan: &Plan) -> Result<(), String> {
    let config = ChannelConfig {
        slots: plan.slots,
        slot_bytes: plan.stride(),
    };
    let sender = engine.channel(consumer, NAME, config);
    let sender = sender.map_err(|e| e.to_string())?;
    for n in 0..plan.count {
        let mut payload = vec![0u8; plan.len(n)];
        fill(&mut payload, n);
        let head = [n, payload.len() as u64, checksum(&payload)];
        let shape = [payload.len()];
        let arrays = [
            OwnedArray::of(payload, &shape).map_err(|e| e.to_string())?,
            OwnedArray::of(head, &[HEAD]).map_err(|e| e.to_string())?,
        ];
        let sent = sender.send_owned(&arrays, n, PATIENCE);
        sent.map_err(|e| e.to_string())?;
    }
    sender.close();
    sender.drain(PATIENCE).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_differ_and_checksums_notice_every_byte() {
        for len in [1, 7, 8, 100, 256] {
            let (mut a, mut b) = (vec![0; len], vec![0; len]);
            fill(&mut a, 5);
            fill(&mut b, 6);
            assert_ne!(checksum(&a), checksum(&b), "{len}");
            for at in 0..len {
                b.clone_from(&a);
                b[at] ^= 1;
                assert_ne!(checksum(&a), checksum(&b), "{at} of {len}");
            }
        }
        assert_ne!(checksum(&[0]), checksum(&[0, 0]));
    }
}
