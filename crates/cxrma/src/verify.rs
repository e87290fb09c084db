//! `--verify-chain`: a consumer in the owner's process polls flags with acquire loads and looks at once
//! whether everything that was written before them is there.
//!
//! The data area is a ring of slots. In each: the flag (up to 64 bytes), a header (64 bytes), the payload.
//! Chain number n goes to slot n mod [`SLOTS`]; its lengths and contents follow from n, so that both
//! sides know them. A word behind the slots tells the producer how far the consumer is.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use connex_rs::{Engine, Range, Transfer};
use serde::{Deserialize, Serialize};

use crate::control::{Answer, Control, HEADER, PATIENCE, Request};
use crate::pattern::{Mismatch, word};
use crate::report::Row;
use crate::steps::Steps;

/// Chains under way at most.
const SLOTS: u64 = 8;
/// Bytes of a slot.
const STRIDE: usize = 1 << 20;
/// Where a slot's header begins; the flag is before it.
const HEAD_AT: usize = 64;
/// Where its payload begins.
const PAYLOAD_AT: usize = 128;
/// Where the consumer's word is.
const PROGRESS_AT: usize = SLOTS as usize * STRIDE;
/// All of it.
pub(crate) const BYTES: usize = PROGRESS_AT + 4096;

/// What a consumer has seen.
#[derive(Serialize, Deserialize, Clone, Default, Debug)]
pub(crate) struct Seen {
    /// Chains consumed.
    pub(crate) chains: u64,
    /// Bytes of payload compared.
    pub(crate) bytes: u64,
    /// Chains whose flag was there before all of their data.
    pub(crate) violations: u64,
    /// The first of them: its number and where the data was missing (offset in its slot).
    pub(crate) first: Option<(u64, Mismatch)>,
    /// Chains that never became complete.
    pub(crate) missing: u64,
}

/// The shape of chain number `n`.
struct Shape {
    payload: usize,
    pieces: usize,
    flag: usize,
}

impl Shape {
    fn of(n: u64) -> Self {
        let dice = word(n, 99);
        // Two of three are small, so that flags follow their data closely; the others need many frames.
        let most = if dice.is_multiple_of(3) {
            512 << 10
        } else {
            4 << 10
        };
        let payload = 8 * (1 + (dice >> 8) as usize % (most / 8));
        Self {
            payload,
            pieces: 1 + (dice >> 40) as usize % 4,
            // One word is stored at once; a longer flag may come in any order within itself.
            flag: if (dice >> 50).is_multiple_of(3) {
                64
            } else {
                8
            },
        }
    }
}

/// Consumes chains on a thread of the owner.
pub(crate) struct Watch {
    last: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Seen>>,
}

impl Watch {
    /// Zeroes the ring at `base` and starts to consume.
    ///
    /// # Safety
    /// [`BYTES`] at `base`, page-aligned, must stay valid until the watch is dropped, and be accessed by nobody
    /// in this process meanwhile.
    pub(crate) unsafe fn start(base: usize) -> std::io::Result<Self> {
        for slot in 0..SLOTS as usize {
            for at in 0..PAYLOAD_AT / 8 {
                // SAFETY: inside the range that the caller vouches for.
                unsafe { at_word(base, slot * STRIDE + at * 8) }.store(0, Ordering::Relaxed);
            }
        }
        // SAFETY: as above.
        unsafe { at_word(base, PROGRESS_AT) }.store(0, Ordering::Release);
        let last = Arc::new(AtomicU64::new(u64::MAX));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::Builder::new().name("consumer".into()).spawn({
            let (last, stop) = (last.clone(), stop.clone());
            // SAFETY: the thread is joined before the watch is gone.
            move || unsafe { consume(base, &last, &stop) }
        })?;
        Ok(Self {
            last,
            stop,
            thread: Some(thread),
        })
    }

    /// Consumes up to chain number `last`, or until nothing has come for some seconds.
    pub(crate) fn finish(mut self, last: u64) -> Seen {
        self.last.store(last, Ordering::Release);
        self.thread
            .take()
            .and_then(|thread| thread.join().ok())
            .unwrap_or_default()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic of it was printed when it happened.
            let _ = thread.join();
        }
    }
}

/// The word at `base + at`.
///
/// # Safety
/// It is aligned, valid for `'a`, and accessed in this process only through atomics or volatile copies.
unsafe fn at_word<'a>(base: usize, at: usize) -> &'a AtomicU64 {
    // SAFETY: the caller's.
    unsafe { AtomicU64::from_ptr((base + at) as *mut u64) }
}

/// The consumer.
///
/// # Safety
/// As for [`Watch::start`].
unsafe fn consume(base: usize, last: &AtomicU64, stop: &AtomicBool) -> Seen {
    // SAFETY: offsets below are within the ring.
    let load = |at: usize, order| unsafe { at_word(base, at) }.load(order);
    let mut seen = Seen::default();
    let mut n = 1;
    let mut spins = 0_u32;
    let mut since = Instant::now();
    loop {
        let shape = Shape::of(n);
        let slot = (n % SLOTS) as usize * STRIDE;
        // Any word of the flag may be the first that is seen.
        let flagged = (0..shape.flag / 8).any(|at| load(slot + at * 8, Ordering::Acquire) == n);
        if !flagged {
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(256) {
                let ending = last.load(Ordering::Acquire);
                if n > ending || stop.load(Ordering::Acquire) {
                    return seen;
                }
                if ending != u64::MAX && since.elapsed() > Duration::from_secs(10) {
                    seen.missing = ending - n + 1;
                    return seen;
                }
                std::thread::yield_now();
            }
            std::hint::spin_loop();
            continue;
        }
        // The payload first, its end first: the last bytes before the flag are the likeliest to be late.
        let payload = (0..shape.payload / 8).rev().find_map(|at| {
            let found = load(slot + PAYLOAD_AT + at * 8, Ordering::Relaxed);
            let expected = word(n, at as u64);
            (found != expected).then_some(Mismatch {
                offset: PAYLOAD_AT + at * 8,
                expected,
                found,
            })
        });
        let late = payload.or_else(|| {
            (0..8).find_map(|at| {
                let found = load(slot + HEAD_AT + at * 8, Ordering::Relaxed);
                (found != n).then_some(Mismatch {
                    offset: HEAD_AT + at * 8,
                    expected: n,
                    found,
                })
            })
        });
        if let Some(mismatch) = late {
            seen.violations += 1;
            seen.first.get_or_insert((n, mismatch));
        }
        let whole = Instant::now();
        while !(0..shape.flag / 8).all(|at| load(slot + at * 8, Ordering::Acquire) == n) {
            if stop.load(Ordering::Acquire) || whole.elapsed() > Duration::from_secs(10) {
                seen.missing += 1;
                return seen;
            }
            std::thread::yield_now();
        }
        seen.chains += 1;
        seen.bytes += shape.payload as u64;
        // SAFETY: within the ring.
        unsafe { at_word(base, PROGRESS_AT) }.store(n, Ordering::Release);
        since = Instant::now();
        n += 1;
    }
}

/// Sends chains for `seconds` and gives the owner's verdict.
///
/// # Errors
/// If a transfer fails or the owner is gone; a violation is in the row, not an error.
pub(crate) fn produce(
    engine: &Engine,
    control: &Control<'_>,
    addr: u64,
    seconds: u64,
    break_order: bool,
    steps: &Steps,
) -> anyhow::Result<Row> {
    let url = control.url;
    let data = addr + HEADER as u64;
    // Slots like the consumer's, the last word for reading its progress.
    let local = engine.allocate_managed_buffer(BYTES)?;
    control.tell(&Request::Watch)?;
    let start = Instant::now();
    let mut under_way: VecDeque<Transfer> = VecDeque::new();
    let mut consumed = 0;
    let mut n = 0;
    while start.elapsed() < Duration::from_secs(seconds) {
        n += 1;
        while under_way.len() >= SLOTS as usize {
            finish(&mut under_way)?;
        }
        let waiting = Instant::now();
        while consumed + SLOTS < n {
            // The flag of a chain that is under way must be able to arrive: nothing here depends on later chains.
            // SAFETY: the word is in our buffer, which only this call writes.
            unsafe { engine.read(url, local + PROGRESS_AT, data + PROGRESS_AT as u64, 8, None) }
                .context("cannot read the consumer's progress")?;
            // SAFETY: as above, and the read has ended.
            consumed = unsafe { at_word(local, PROGRESS_AT) }.load(Ordering::Acquire);
            ensure!(
                waiting.elapsed() < PATIENCE,
                "the consumer is stuck at chain {consumed} although chain {n} waits"
            );
        }
        let slot = (n % SLOTS) as usize * STRIDE;
        let shape = Shape::of(n);
        for (at, value) in (0..shape.flag / 8)
            .map(|at| (at, n))
            .chain((0..8).map(|at| (HEAD_AT / 8 + at, n)))
        {
            // SAFETY: in our buffer; the transfer that used this slot before has ended.
            unsafe { at_word(local, slot + at * 8) }.store(value, Ordering::Relaxed);
        }
        for at in 0..shape.payload / 8 {
            // SAFETY: as above.
            unsafe { at_word(local, slot + PAYLOAD_AT + at * 8) }
                .store(word(n, at as u64), Ordering::Relaxed);
        }
        let range = |at: usize, len: usize| Range {
            local: local + slot + at,
            remote: data + (slot + at) as u64,
            len,
        };
        let piece = shape.payload.div_ceil(8 * shape.pieces) * 8;
        let mut ranges: Vec<Range> = (0..shape.payload)
            .step_by(piece)
            .map(|at| range(PAYLOAD_AT + at, piece.min(shape.payload - at)))
            .collect();
        ranges.push(range(HEAD_AT, 64));
        ranges.push(range(0, shape.flag));
        if break_order {
            ranges.rotate_right(1);
        }
        // SAFETY: the slot stays as it is until this transfer has ended.
        under_way.push_back(unsafe { engine.put_chain(url, &ranges, None) }?);
        if n % 64 == 0 {
            steps.say(&format!("{n} chains"));
        }
    }
    while !under_way.is_empty() {
        finish(&mut under_way)?;
    }
    let took = start.elapsed();
    let Answer::Watched(seen) = control.ask(&Request::WatchEnd { last: n })? else {
        bail!("the owner did not say what it saw");
    };
    engine.free_managed_buffer(local)?;
    Ok(Row::VerifyChain {
        seconds: took.as_secs_f64(),
        sent: n,
        seen,
    })
}

fn finish(under_way: &mut VecDeque<Transfer>) -> anyhow::Result<()> {
    let Some(transfer) = under_way.pop_front() else {
        return Ok(());
    };
    match transfer.wait(Some(PATIENCE)) {
        Some(result) => result.context("a chain failed"),
        None => bail!("a chain did not end within {PATIENCE:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_fits_its_slot_and_all_kinds_occur() {
        let shapes: Vec<Shape> = (0..1000).map(Shape::of).collect();
        assert!(shapes.iter().all(|s| s.payload >= 8
            && PAYLOAD_AT + s.payload <= STRIDE
            && (1..=4).contains(&s.pieces)));
        assert!(shapes.iter().any(|s| s.flag == 8) && shapes.iter().any(|s| s.flag == 64));
        assert!(
            shapes.iter().any(|s| s.payload > 256 << 10) && shapes.iter().any(|s| s.payload < 1024)
        );
    }
}
