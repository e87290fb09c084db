//! Two processes that copy through 256 KB of shared memory, both polling: the least that moving bytes
//! between two address spaces costs without the help of the kernel. And `memcpy` within one.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::memory::{HOT, Pages};
use crate::timing::{Repeat, Row};

/// Bytes of a piece: eight of them are under way at most.
const PIECE: usize = 32 << 10;
/// The words before the ring, each in a cache line of its own.
const WORDS: usize = 4096;
/// How long the other side may be silent.
const PATIENCE: Duration = Duration::from_secs(30);

const SERVED: u8 = 17;
const WRITTEN: u8 = 99;

const READ: u64 = 1;
const WRITE: u64 = 2;
const CHECK: u64 = 3;
const END: u64 = 4;

/// The mapping.
struct Ring {
    base: NonNull<u8>,
}

impl Ring {
    fn map(file: &File) -> anyhow::Result<Self> {
        // SAFETY: a fresh mapping at an address of the system's choice touches nothing else; the file is as long.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                WORDS + HOT,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        Ok(Self {
            base: NonNull::new(base.cast()).context("mapped the null page")?,
        })
    }

    /// Word `index`: 0 the request, 1 its length, 2 pieces put in, 3 pieces taken out, 4 answers.
    fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: aligned, inside the mapping, and used as an atomic by both sides.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(index * 64).cast()) }
    }

    fn piece(&self, number: u64) -> *mut u8 {
        let at = WORDS + number as usize % (HOT / PIECE) * PIECE;
        // SAFETY: inside the mapping.
        unsafe { self.base.as_ptr().add(at) }
    }

    /// Waits until `word` is at least `value`.
    fn wait(&self, word: usize, value: u64) -> anyhow::Result<()> {
        let mut spins = 0_u32;
        let mut start = None;
        while self.word(word).load(Ordering::Acquire) < value {
            std::hint::spin_loop();
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(1 << 16) {
                let start = start.get_or_insert_with(Instant::now);
                ensure!(start.elapsed() < PATIENCE, "the other process is silent");
                // On a busy machine the other one may need this processor.
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn put(&self, bytes: &[u8], number: &mut u64) -> anyhow::Result<()> {
        for piece in bytes.chunks(PIECE) {
            self.wait(3, (*number + 1).saturating_sub((HOT / PIECE) as u64))?;
            // SAFETY: the piece is inside the mapping, and ours until its number is published.
            unsafe {
                std::ptr::copy_nonoverlapping(piece.as_ptr(), self.piece(*number), piece.len())
            };
            *number += 1;
            self.word(2).store(*number, Ordering::Release);
        }
        Ok(())
    }

    fn take(&self, into: &mut [u8], number: &mut u64) -> anyhow::Result<()> {
        for piece in into.chunks_mut(PIECE) {
            self.wait(2, *number + 1)?;
            // SAFETY: the piece was published and is ours until we say that it was taken.
            unsafe {
                std::ptr::copy_nonoverlapping(self.piece(*number), piece.as_mut_ptr(), piece.len())
            };
            *number += 1;
            self.word(3).store(*number, Ordering::Release);
        }
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing borrows from it any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), WORDS + HOT) };
    }
}

/// The other process.
pub(crate) fn serve(file: &Path) -> anyhow::Result<()> {
    let ring = Ring::map(&OpenOptions::new().read(true).write(true).open(file)?)?;
    println!("ready");
    let (mut source, mut place) = (Pages::new(0), Pages::new(0));
    let (mut served, mut number) = (0, 0);
    loop {
        // The low bits of the request count; the rest says what.
        ring.wait(0, (served + 1) << 8)?;
        served += 1;
        let what = ring.word(0).load(Ordering::Acquire) & 0xff;
        let len = usize::try_from(ring.word(1).load(Ordering::Acquire))?;
        if source.get().len() < len {
            (source, place) = (Pages::new(len), Pages::new(len));
            source.fill(SERVED);
        }
        let mut answer = 1;
        match what {
            READ => ring.put(&source.get()[..len], &mut number)?,
            WRITE => ring.take(&mut place.get_mut()[..len], &mut number)?,
            CHECK => {
                answer = u64::from(place.holds(len, WRITTEN));
                place.get_mut().fill(0);
            }
            END => return Ok(()),
            other => bail!("request {other} is unknown"),
        }
        ring.word(4).store(served << 8 | answer, Ordering::Release);
    }
}

struct Client {
    ring: Ring,
    asked: u64,
    number: u64,
}

impl Client {
    fn ask(&mut self, what: u64, len: usize) {
        self.asked += 1;
        self.ring.word(1).store(len as u64, Ordering::Release);
        self.ring
            .word(0)
            .store(self.asked << 8 | what, Ordering::Release);
    }

    fn answer(&self) -> anyhow::Result<bool> {
        self.ring.wait(4, self.asked << 8)?;
        Ok(self.ring.word(4).load(Ordering::Acquire) & 1 == 1)
    }
}

/// Removes the file's name again.
struct Named(PathBuf);

impl Drop for Named {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Measures all sizes.
///
/// # Errors
/// If a process fails, shared memory is missing, or bytes differ.
pub(crate) fn measure(sizes: &[usize], repeat: Repeat) -> anyhow::Result<Vec<Row>> {
    let name = Named(PathBuf::from(format!(
        "/dev/shm/connex-bench-{}",
        std::process::id()
    )));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&name.0)
        .context("cannot make a file in /dev/shm")?;
    file.set_len((WORDS + HOT) as u64)?;
    let mut server = Command::new(std::env::current_exe()?)
        .arg("serve-shared")
        .arg(&name.0)
        .stdout(Stdio::piped())
        .spawn()?;
    let mut client = Client {
        ring: Ring::map(&file)?,
        asked: 0,
        number: 0,
    };
    let mut line = String::new();
    BufReader::new(server.stdout.take().context("no output")?).read_line(&mut line)?;
    drop(name);
    let rows = run(&mut client, sizes, repeat);
    client.ask(END, 0);
    if rows.is_err() {
        let _ = server.kill();
    }
    server.wait()?;
    rows
}

fn run(client: &mut Client, sizes: &[usize], repeat: Repeat) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &bytes in sizes {
        let (mut source, mut place) = (Pages::new(bytes), Pages::new(bytes));
        source.fill(WRITTEN);
        rows.push(repeat.row("read", bytes, "shared", || {
            client.ask(READ, bytes);
            let (ring, number) = (&client.ring, &mut client.number);
            ring.take(place.get_mut(), number)?;
            client.answer().map(drop)
        })?);
        ensure!(place.holds(bytes, SERVED), "{bytes} bytes were read wrong");
        rows.push(repeat.row("write", bytes, "shared", || {
            client.ask(WRITE, bytes);
            let (ring, number) = (&client.ring, &mut client.number);
            ring.put(source.get(), number)?;
            client.answer().map(drop)
        })?);
        client.ask(CHECK, bytes);
        ensure!(client.answer()?, "{bytes} bytes were written wrong");
        rows.push(repeat.row("read", bytes, "memcpy", || {
            std::hint::black_box(place.get_mut())
                .copy_from_slice(std::hint::black_box(source.get()));
            Ok(())
        })?);
    }
    Ok(rows)
}
