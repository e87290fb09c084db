//! The sentinel: a tiny process beside the engines of another one, its *parent*, that outlives it by some
//! milliseconds and tells the parent's peers that it died.
//!
//! The kernel takes a killed process down in this order: its threads end, and with them the *robust locks*
//! that they hold; then its memory is freed, which takes seconds for tens of GB; then its files are closed, and only
//! then does any socket tell anyone. The sentinel waits for such a lock, and so knows first.
//!
//! This file is the whole program, on the standard library alone. `build.rs` compiles it and the library embeds
//! the result; the library also includes this file as a module, for the layout of the shared memory and of the datagrams.
//!
//! # What it does
//! * Descriptor 0 is the shared memory ([`Shared`]); there is no other, no argument and no environment.
//! * It sleeps in a futex wait on a lock of [`Shared::locks`]. The kernel marks the word when the thread that holds it ends. Nothing
//!   is polled, unless the parent could be writing a core dump or an engine asked for stall detection.
//! * Lock lost: every peer of the table gets an obituary, a few times over some milliseconds; then it exits.
//! * Lock released: it exits. A wake-up with the lock held: the settings may have changed, it looks again.
//! * There are two such locks and two threads, each kept to one half of the processors: on one of them the dead process's memory is
//!   being freed, and whoever is woken there, or loses it there, may have to wait for the clock's next tick. For the same reason who frees
//!   the memory is asked to give way whenever an obituary has gone out: its reader may be waiting for that processor.

use std::fs::File;
use std::mem::offset_of;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

// ---- the shared memory ----------------------------------------------------------------------------

/// First word of the shared memory; changes with every change of its layout.
pub const LAYOUT: u64 = 0x436e_7853_656e_0002;

/// Engines that one process may announce.
pub const MAX_ENGINES: usize = 64;

/// Peers of all engines of a process together. Those beyond get no obituary.
pub const MAX_PEERS: usize = 4096;

/// Bit of the lock word: the kernel is to wake a waiter. Always set while the lock is held.
pub const WAITERS: u32 = 0x8000_0000;

/// Bit of the lock word that the kernel sets when the holder ended without releasing the lock.
pub const OWNER_DIED: u32 = 0x4000_0000;

/// Bits of the lock word that hold the thread id of the holder; 0: nobody holds it.
pub const HOLDER: u32 = 0x3fff_ffff;

/// The shared memory. The parent writes all of it but `ack` and `ready`.
///
/// The futex and robust-list interfaces of the kernel are used as they are, not those of a C library: the two
/// processes need not have the same one.
#[repr(C)]
pub struct Shared {
    /// [`LAYOUT`].
    pub layout: AtomicU64,
    /// The robust locks, held by one thread for its life: one for each thread of the sentinel.
    pub locks: [RobustLock; 2],
    /// The parent's process id.
    pub parent: AtomicU32,
    /// Counts changes of the settings that the sentinel has to know of.
    pub change: AtomicU32,
    /// The last change that the sentinel has taken in.
    pub ack: AtomicU32,
    /// The sentinel's process id, once it watches.
    pub ready: AtomicU32,
    /// Entries of `peers` that are or were in use: those at and beyond were never touched.
    pub peers_used: AtomicU32,
    /// Entries of `peers` that are in use.
    pub peers_now: AtomicU32,
    /// Tests only: bit mask of what the sentinel does not send ([`MUTE_ALL`]).
    pub mute: AtomicU32,
    /// One entry for each engine.
    pub engines: [EngineSlot; MAX_ENGINES],
    /// One entry for each live link of any engine.
    pub peers: [PeerSlot; MAX_PEERS],
}

/// An entry of a thread's robust list.
#[repr(C)]
pub struct RobustLock {
    /// Points to the next entry.
    pub node: AtomicU64,
    /// The lock.
    pub word: AtomicU32,
    /// Padding.
    pub reserved: AtomicU32,
}

/// [`Shared::mute`]: send no datagram at all, as if a firewall dropped them.
pub const MUTE_ALL: u32 = 1;

/// What the sentinel watches of one engine.
#[repr(C)]
pub struct EngineSlot {
    /// Nanoseconds without progress after which the engine counts as stalled; 0: not watched.
    pub stall_ns: AtomicU64,
    /// Counted up by whoever drives the engine, at least four times in `stall_ns`.
    pub beat: AtomicU64,
}

/// Where the obituary for one peer goes, and what it says.
///
/// A sequence lock: `seq` is odd while the entry is written. A writer that dies in between leaves an odd number, and
/// the entry is skipped.
#[repr(C)]
pub struct PeerSlot {
    /// See above.
    pub seq: AtomicU32,
    /// Index in `engines`, plus one; 0: the entry is free.
    pub engine: AtomicU32,
    /// 4 or 6.
    pub family: AtomicU32,
    /// UDP port.
    pub port: AtomicU32,
    /// Scope of a link-local IPv6 address.
    pub scope: AtomicU32,
    /// Padding.
    pub reserved: AtomicU32,
    /// IP address in network order; IPv4 in the first four bytes.
    pub addr: [AtomicU64; 2],
    /// The incarnation of the engine that the peer knows.
    pub life: [AtomicU64; 2],
    /// The token that the peer issued for this link.
    pub token: [AtomicU64; 2],
}

/// An entry of the table, read in one piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Index in [`Shared::engines`].
    pub engine: u32,
    /// The peer's obituary socket.
    pub to: SocketAddr,
    /// The incarnation of the engine: start in nanoseconds, random number.
    pub life: (u64, u64),
    /// The token that the peer issued.
    pub token: [u8; 16],
}

impl PeerSlot {
    /// Writes the entry. One writer at a time.
    pub fn fill(&self, entry: &Entry) {
        let (family, addr, scope) = match entry.to {
            SocketAddr::V4(to) => {
                let mut bytes = [0; 16];
                bytes[..4].copy_from_slice(&to.ip().octets());
                (4, bytes, 0)
            }
            SocketAddr::V6(to) => (6, to.ip().octets(), to.scope_id()),
        };
        let seq = self.open();
        self.family.store(family, Ordering::Relaxed);
        self.port
            .store(u32::from(entry.to.port()), Ordering::Relaxed);
        self.scope.store(scope, Ordering::Relaxed);
        store(&self.addr, u128::from_ne_bytes(addr));
        store(&self.token, u128::from_ne_bytes(entry.token));
        self.life[0].store(entry.life.0, Ordering::Relaxed);
        self.life[1].store(entry.life.1, Ordering::Relaxed);
        self.engine.store(entry.engine + 1, Ordering::Relaxed);
        self.seq.store(seq.wrapping_add(2), Ordering::Release);
    }

    /// Frees the entry. One writer at a time.
    pub fn clear(&self) {
        let seq = self.open();
        self.engine.store(0, Ordering::Relaxed);
        store(&self.token, 0);
        self.seq.store(seq.wrapping_add(2), Ordering::Release);
    }

    fn open(&self) -> u32 {
        let seq = self.seq.load(Ordering::Relaxed) & !1;
        self.seq.store(seq.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        seq
    }

    /// Reads the entry; `None` if it is free, or somebody stopped in the middle of writing it.
    pub fn read(&self) -> Option<Entry> {
        // The writer has died, or needs no more than this.
        (0..100).find_map(|_| self.try_read()).flatten()
    }

    /// `None`: not consistent now.
    fn try_read(&self) -> Option<Option<Entry>> {
        let seq = self.seq.load(Ordering::Acquire);
        let engine = self.engine.load(Ordering::Relaxed);
        let port = self.port.load(Ordering::Relaxed) as u16;
        let addr = load(&self.addr).to_ne_bytes();
        let to = if self.family.load(Ordering::Relaxed) == 4 {
            let ip = Ipv4Addr::new(addr[0], addr[1], addr[2], addr[3]);
            SocketAddr::V4(SocketAddrV4::new(ip, port))
        } else {
            let scope = self.scope.load(Ordering::Relaxed);
            SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::from(addr), port, 0, scope))
        };
        let entry = Entry {
            engine: engine.wrapping_sub(1),
            to,
            life: (
                self.life[0].load(Ordering::Relaxed),
                self.life[1].load(Ordering::Relaxed),
            ),
            token: load(&self.token).to_ne_bytes(),
        };
        fence(Ordering::Acquire);
        let consistent = seq.is_multiple_of(2) && self.seq.load(Ordering::Relaxed) == seq;
        consistent.then_some((engine != 0).then_some(entry))
    }
}

fn store(words: &[AtomicU64; 2], value: u128) {
    words[0].store(value as u64, Ordering::Relaxed);
    words[1].store((value >> 64) as u64, Ordering::Relaxed);
}

fn load(words: &[AtomicU64; 2]) -> u128 {
    u128::from(words[0].load(Ordering::Relaxed))
        | u128::from(words[1].load(Ordering::Relaxed)) << 64
}

/// Where the kernel finds the lock word, counted from the node of the robust list.
pub const LOCK_FROM_NODE: isize =
    offset_of!(RobustLock, word) as isize - offset_of!(RobustLock, node) as isize;

// ---- the datagrams --------------------------------------------------------------------------------

/// Bytes of every datagram.
pub const DATAGRAM: usize = 48;

const MAGIC: [u8; 4] = *b"CNXO";
const VERSION: u8 = 1;

/// What a datagram says of the engine that it names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notice {
    /// Its process is dead.
    Died,
    /// Its process is being written to a core dump: it runs no more.
    Dumping,
    /// It made no progress for this many milliseconds: a suspicion.
    Stalled(u32),
    /// Its engine lives and gave the link up after a time-out: a suspicion. Said by the engine itself, where the connection can
    /// no longer carry it.
    GivenUp,
}

/// Encodes a datagram.
pub fn encode(notice: Notice, life: (u64, u64), token: &[u8; 16]) -> [u8; DATAGRAM] {
    let (kind, ms) = match notice {
        Notice::Died => (1, 0),
        Notice::Dumping => (2, 0),
        Notice::Stalled(ms) => (3, ms),
        Notice::GivenUp => (4, 0),
    };
    let mut bytes = [0; DATAGRAM];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4] = VERSION;
    bytes[5] = kind;
    bytes[8..16].copy_from_slice(&life.0.to_le_bytes());
    bytes[16..24].copy_from_slice(&life.1.to_le_bytes());
    bytes[24..40].copy_from_slice(token);
    bytes[40..44].copy_from_slice(&ms.to_le_bytes());
    bytes
}

/// Decodes a datagram; `None` for whatever is not exactly one of ours.
pub fn decode(bytes: &[u8]) -> Option<(Notice, (u64, u64), [u8; 16])> {
    let bytes: &[u8; DATAGRAM] = bytes.try_into().ok()?;
    let long = |at: usize| {
        let mut long = [0; 8];
        long.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(long)
    };
    let ms = long(40);
    if bytes[..4] != MAGIC || bytes[4] != VERSION || bytes[6..8] != [0, 0] {
        return None;
    }
    let notice = match (bytes[5], u32::try_from(ms)) {
        (1, Ok(0)) => Notice::Died,
        (2, Ok(0)) => Notice::Dumping,
        (3, Ok(ms)) => Notice::Stalled(ms),
        (4, Ok(0)) => Notice::GivenUp,
        _ => return None,
    };
    let mut token = [0; 16];
    token.copy_from_slice(&bytes[24..40]);
    Some((notice, (long(8), long(16)), token))
}

// ---- the system -----------------------------------------------------------------------------------

mod sys {
    use std::ffi::{c_int, c_long, c_ulong, c_void};

    unsafe extern "C" {
        pub(super) fn syscall(number: c_long, ...) -> c_long;
        pub(super) fn mmap(
            addr: *mut c_void,
            len: usize,
            prot: c_int,
            flags: c_int,
            fd: c_int,
            offset: i64,
        ) -> *mut c_void;
        pub(super) fn getpriority(which: c_int, who: u32) -> c_int;
        pub(super) fn setpriority(which: c_int, who: u32, nice: c_int) -> c_int;
        pub(super) fn sched_getaffinity(pid: c_int, len: usize, mask: *mut u64) -> c_int;
        pub(super) fn sched_setaffinity(pid: c_int, len: usize, mask: *const u64) -> c_int;
        pub(super) fn signal(signal: c_int, handler: usize) -> usize;
        pub(super) fn prctl(option: c_int, ...) -> c_int;
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) const SYS_FUTEX: c_long = 202;
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) const SYS_FUTEX: c_long = 98;
    #[cfg(target_arch = "x86_64")]
    pub(super) const SYS_SCHED_SETATTR: c_long = 314;
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) const SYS_SCHED_SETATTR: c_long = 274;
    /// The kernel's `struct sched_attr`, as of its first version.
    #[repr(C)]
    pub(super) struct SchedAttr {
        pub(super) size: u32,
        pub(super) policy: u32,
        pub(super) flags: u64,
        pub(super) nice: c_int,
        pub(super) priority: u32,
        pub(super) runtime: u64,
        pub(super) deadline: u64,
        pub(super) period: u64,
    }
    pub(super) const FUTEX_WAIT: c_int = 0;
    pub(super) const PRIO_PROCESS: c_int = 0;
    pub(super) const PROT_READ_WRITE: c_int = 3;
    pub(super) const MAP_SHARED: c_int = 1;
    pub(super) const SIG_IGN: usize = 1;
    pub(super) const PR_SET_NAME: c_int = 15;
    /// HUP, INT, QUIT, USR1, USR2, PIPE, ALRM, TERM, TSTP, TTIN, TTOU.
    pub(super) const IGNORED: [c_int; 11] = [1, 2, 3, 10, 12, 13, 14, 15, 20, 21, 22];

    #[repr(C)]
    pub(super) struct Timespec {
        pub(super) sec: i64,
        pub(super) nsec: i64,
    }

    /// The type of `prctl`'s further arguments.
    pub(super) type Word = c_ulong;
}

/// Sleeps while `word` is `value`, until somebody wakes us or for `limit`.
fn futex_wait(word: &AtomicU32, value: u32, limit: Option<Duration>) {
    let limit = limit.map(|limit| sys::Timespec {
        sec: limit.as_secs() as i64,
        nsec: i64::from(limit.subsec_nanos()),
    });
    let pointer = limit
        .as_ref()
        .map_or(std::ptr::null(), |limit| limit as *const sys::Timespec);
    // SAFETY: the word is mapped, and the time, if there is one, lives until the call returns. All errors (the word has
    // changed, interrupted, time is up) mean: look again.
    unsafe {
        sys::syscall(
            sys::SYS_FUTEX,
            word.as_ptr(),
            sys::FUTEX_WAIT,
            value,
            pointer,
        )
    };
}

/// The shortest turn that the kernel gives.
pub const TURN: Duration = Duration::from_micros(100);

/// Asks the scheduler for short turns, which come sooner: for a thread that sleeps nearly always and is then in a hurry. A thread
/// that wakes takes the processor from one with longer turns only; from others it has to wait for the clock's next tick, which
/// may be 4 ms away. Needs no privilege. Kernels before 6.12 have no such thing, and it is only a wish.
pub fn ask_for_turns_of(turn: Duration) {
    // SAFETY: the struct is complete and of the size that it names; nothing but this thread's scheduling changes.
    unsafe {
        let attr = sys::SchedAttr {
            size: size_of::<sys::SchedAttr>() as u32,
            policy: 0,
            flags: 0,
            nice: sys::getpriority(sys::PRIO_PROCESS, 0),
            priority: 0,
            runtime: turn.as_nanos() as u64,
            deadline: 0,
            period: 0,
        };
        sys::syscall(sys::SYS_SCHED_SETATTR, 0, &raw const attr, 0);
    }
}

/// Processors, a bit for each.
type Processors = [u64; 128];

/// The two halves of the processors that this thread may use; `None` if it is one alone, or the system does not tell.
fn halves() -> Option<[Processors; 2]> {
    let mut all: Processors = [0; 128];
    // SAFETY: writes no more than the length that it is given.
    if unsafe { sys::sched_getaffinity(0, size_of_val(&all), all.as_mut_ptr()) } != 0 {
        return None;
    }
    let set = |cpu: &usize| all[cpu / 64] >> (cpu % 64) & 1 == 1;
    let cpus: Vec<usize> = (0..all.len() * 64).filter(set).collect();
    let (first, second) = cpus.split_at(cpus.len() / 2);
    let mask = |cpus: &[usize]| {
        let mut mask: Processors = [0; 128];
        cpus.iter()
            .for_each(|cpu| mask[cpu / 64] |= 1 << (cpu % 64));
        mask
    };
    (!first.is_empty()).then(|| [mask(first), mask(second)])
}

/// Keeps this thread to some processors. It is only a wish.
fn keep_to(processors: Option<Processors>) {
    if let Some(mask) = processors {
        // SAFETY: reads the mask, and nothing but this thread's scheduling changes.
        unsafe { sys::sched_setaffinity(0, size_of_val(&mask), mask.as_ptr()) };
    }
}

// ---- the program ----------------------------------------------------------------------------------

/// Bytes of the second thread's stack.
const STACK: usize = 64 << 10;

/// How often `/proc` is asked whether the parent is being dumped, where that can be at all.
const DUMP_CHECK: Duration = Duration::from_millis(20);

/// When an obituary is sent, counted from the first time.
const SENDS: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_micros(300),
    Duration::from_millis(1),
    Duration::from_millis(3),
    Duration::from_millis(8),
];

/// Until when who frees the memory is asked to give way: a few times, for each costs it some of its share.
const WAY: Duration = Duration::from_millis(1);

fn main() {
    // SAFETY: plain calls with constant arguments; the name ends with a zero.
    unsafe {
        for signal in sys::IGNORED {
            sys::signal(signal, sys::SIG_IGN);
        }
        sys::prctl(
            sys::PR_SET_NAME,
            c"connex-sentinel".as_ptr() as sys::Word,
            0 as sys::Word,
            0 as sys::Word,
            0 as sys::Word,
        );
    }
    ask_for_turns_of(TURN);
    // SAFETY: maps descriptor 0 or fails, and touches nothing else.
    let map = unsafe {
        sys::mmap(
            std::ptr::null_mut(),
            size_of::<Shared>(),
            sys::PROT_READ_WRITE,
            sys::MAP_SHARED,
            0,
            0,
        )
    };
    if map as isize == -1 {
        std::process::exit(2);
    }
    // SAFETY: mapped above for the whole of our life, and made of atomics only.
    let shared = unsafe { &*map.cast::<Shared>() };
    if shared.layout.load(Ordering::Acquire) != LAYOUT {
        std::process::exit(3);
    }
    let said = Said::default();
    let halves = halves();
    std::thread::scope(|scope| {
        // Where no thread can be had the other one does.
        let _ = std::thread::Builder::new()
            .stack_size(STACK)
            .spawn_scoped(scope, || {
                ask_for_turns_of(TURN);
                keep_to(halves.map(|halves| halves[1]));
                wait_for_death(Herald::new(shared, &said));
            });
        keep_to(halves.map(|halves| halves[0]));
        Watch::new(Herald::new(shared, &said)).run();
    });
}

/// The second thread: waits for its own lock, and for nothing else.
fn wait_for_death(mut herald: Herald<'_>) {
    let word = &herald.shared.locks[1].word;
    loop {
        let lock = word.load(Ordering::Acquire);
        if lock & OWNER_DIED != 0 {
            return herald.announce_death();
        }
        if lock & HOLDER == 0 {
            return;
        }
        futex_wait(word, lock, None);
    }
}

/// The watch over one parent.
struct Watch<'a> {
    shared: &'a Shared,
    herald: Herald<'a>,
    /// `/proc/PARENT/status`, where the parent may leave a core dump.
    dump: Option<File>,
    /// When it is looked at next.
    dump_at: Instant,
    engines: [Stall; MAX_ENGINES],
}

/// What is known of the progress of one engine.
#[derive(Clone, Copy)]
struct Stall {
    beat: u64,
    /// When the beat was seen to change, or watching began.
    since: Instant,
    suspected: bool,
}

impl<'a> Watch<'a> {
    fn new(herald: Herald<'a>) -> Self {
        let shared = herald.shared;
        let now = Instant::now();
        let stall = Stall {
            beat: 0,
            since: now,
            suspected: false,
        };
        Self {
            shared,
            herald,
            dump: dump_status(shared.parent.load(Ordering::Relaxed)),
            dump_at: now,
            engines: [stall; MAX_ENGINES],
        }
    }

    fn run(&mut self) {
        // The process that started us ends when we have been started; our real parent is whoever takes orphans.
        self.shared
            .ready
            .store(std::process::id(), Ordering::Release);
        let mut asked = Instant::now();
        let mut pause = None;
        loop {
            let word = &self.shared.locks[0].word;
            let lock = word.load(Ordering::Acquire);
            if lock & OWNER_DIED != 0 {
                return self.herald.announce_death();
            }
            if lock & HOLDER == 0 {
                return;
            }
            let change = self.shared.change.load(Ordering::Acquire);
            self.shared.ack.store(change, Ordering::Release);
            let now = Instant::now();
            // How much later than asked for we got to run: that time says nothing of the parent.
            let late = pause.map_or(Duration::ZERO, |pause: Duration| {
                (now - asked).saturating_sub(pause)
            });
            self.look_for_dump(now);
            self.look_for_stalls(now, late);
            pause = self.pause(now);
            asked = Instant::now();
            futex_wait(word, lock, pause);
        }
    }

    /// How long nothing has to be looked at; `None`: until woken.
    fn pause(&self, now: Instant) -> Option<Duration> {
        if self.herald.said.dumping() {
            return None;
        }
        // Also while there is no peer: the wake-up that tells of the first one is lost if it comes just before we sleep, and a
        // parent that is stopped at that moment rings no second time.
        let stalls = self
            .shared
            .engines
            .iter()
            .map(|engine| engine.stall_ns.load(Ordering::Relaxed))
            .filter(|&stall| stall != 0)
            .map(|stall| Duration::from_nanos(stall / 8));
        let peers = self.shared.peers_now.load(Ordering::Acquire) > 0;
        let dump = self
            .dump
            .as_ref()
            .filter(|_| peers)
            .map(|_| self.dump_at.saturating_duration_since(now));
        stalls.chain(dump).min()
    }

    /// A core dump is written before locks are released and memory is freed; it takes as long as the memory is large.
    fn look_for_dump(&mut self, now: Instant) {
        if now < self.dump_at {
            return;
        }
        self.dump_at = now + DUMP_CHECK;
        let mut text = [0; 4096];
        let dumping = self.dump.as_ref().is_some_and(|status| {
            let len = status.read_at(&mut text, 0).unwrap_or(0);
            text[..len]
                .split(|&byte| byte == b'\n')
                .any(|line| line == b"CoreDumping:\t1")
        });
        if dumping && !self.herald.said.dumping.swap(true, Ordering::Relaxed) {
            self.herald.announce(Notice::Dumping, None);
        }
    }

    fn look_for_stalls(&mut self, now: Instant, late: Duration) {
        for index in 0..MAX_ENGINES {
            let engine = &self.shared.engines[index];
            let limit = engine.stall_ns.load(Ordering::Relaxed);
            if limit == 0 {
                continue;
            }
            let limit = Duration::from_nanos(limit);
            let beat = engine.beat.load(Ordering::Relaxed);
            let stall = &mut self.engines[index];
            if beat != stall.beat {
                *stall = Stall {
                    beat,
                    since: now,
                    suspected: false,
                };
                continue;
            }
            // Where this process starves the other one does, too.
            if late > limit / 8 {
                stall.since = (stall.since + late).min(now);
            }
            let silence = now - stall.since;
            if silence >= limit && !stall.suspected && !self.herald.said.dumping() {
                stall.suspected = true;
                let ms = u32::try_from(silence.as_millis()).unwrap_or(u32::MAX);
                self.herald
                    .announce(Notice::Stalled(ms), Some(index as u32));
            }
        }
    }
}

/// What the threads of the sentinel have said of the parent.
#[derive(Default)]
struct Said {
    /// That it is being dumped: all peers know of its end.
    dumping: AtomicBool,
    /// That it is dead, and one of the threads says it again.
    dead: AtomicBool,
}

impl Said {
    fn dumping(&self) -> bool {
        self.dumping.load(Ordering::Relaxed)
    }
}

/// What one thread of the sentinel tells the peers with.
struct Herald<'a> {
    shared: &'a Shared,
    said: &'a Said,
    /// The parent's threads, in `/proc`: those of that process, also when another one has got its number.
    threads: Option<File>,
    /// Sockets to send from; made when the first datagram is due.
    sockets: (Option<UdpSocket>, Option<UdpSocket>),
}

impl<'a> Herald<'a> {
    fn new(shared: &'a Shared, said: &'a Said) -> Self {
        let parent = shared.parent.load(Ordering::Relaxed);
        Self {
            shared,
            said,
            threads: File::open(format!("/proc/{parent}/task")).ok(),
            sockets: (None, None),
        }
    }

    /// Tells all peers that the parent is dead, unless they know of its end. Both threads do: either may lose its processor to the one
    /// that frees the memory. The first then sleeps, for the readers may be waiting for its own processor, and goes on to say it again.
    fn announce_death(&mut self) {
        if self.said.dumping() {
            return;
        }
        let start = Instant::now();
        let entries = self.entries(None);
        self.tell(Notice::Died, &entries);
        if self.said.dead.swap(true, Ordering::Relaxed) {
            return self.make_way();
        }
        for &at in &SENDS[1..] {
            std::thread::sleep(at.saturating_sub(start.elapsed()));
            self.tell(Notice::Died, &entries);
            if at <= WAY {
                self.make_way();
            }
        }
    }

    /// Tells all peers, or those of one engine, several times.
    ///
    /// The links are those of this moment: what comes up while a stalled process wakes again is none of them.
    fn announce(&mut self, notice: Notice, engine: Option<u32>) {
        let start = Instant::now();
        let entries = self.entries(engine);
        for at in SENDS {
            std::thread::sleep(at.saturating_sub(start.elapsed()));
            self.tell(notice, &entries);
        }
    }

    /// The peers of all engines, or of one.
    fn entries(&self, engine: Option<u32>) -> Vec<Entry> {
        let used = self.shared.peers_used.load(Ordering::Acquire) as usize;
        let slots = self.shared.peers.iter().take(used);
        slots
            .filter_map(PeerSlot::read)
            .filter(|entry| engine.is_none_or(|engine| engine == entry.engine))
            .collect()
    }

    fn tell(&mut self, notice: Notice, entries: &[Entry]) {
        for entry in entries {
            self.send(entry.to, &encode(notice, entry.life, &entry.token));
        }
    }

    /// Has the parent's ending threads give way, of which the last frees its memory: a little less priority makes the kernel choose again
    /// who runs there. It is not made much less, for where there is more to do than processors the memory has to be freed as well. A
    /// thread that goes on, with another program (exec), keeps what it has.
    fn make_way(&self) {
        let Some(threads) = &self.threads else {
            return;
        };
        let threads = std::fs::read_dir(format!("/proc/self/fd/{}", threads.as_raw_fd()));
        for thread in threads.into_iter().flatten().flatten() {
            let id = thread.file_name().to_str().and_then(|id| id.parse().ok());
            if let Some(id) = id.filter(|_| is_ending(&thread.path())) {
                // SAFETY: plain calls with numbers, which change one thread's scheduling or fail.
                unsafe {
                    let nice = sys::getpriority(sys::PRIO_PROCESS, id);
                    sys::setpriority(sys::PRIO_PROCESS, id, nice + 1);
                }
            }
        }
    }

    fn send(&mut self, to: SocketAddr, datagram: &[u8]) {
        if self.shared.mute.load(Ordering::Relaxed) & MUTE_ALL != 0 {
            return;
        }
        let (socket, any): (_, SocketAddr) = if to.is_ipv4() {
            (&mut self.sockets.0, (Ipv4Addr::UNSPECIFIED, 0).into())
        } else {
            (&mut self.sockets.1, (Ipv6Addr::UNSPECIFIED, 0).into())
        };
        if socket.is_none() {
            *socket = UdpSocket::bind(any)
                .and_then(|socket| socket.set_nonblocking(true).map(|()| socket))
                .ok();
        }
        // What cannot be sent is lost: the peer's own detection stays.
        if let Some(socket) = socket {
            let _ = socket.send_to(datagram, to);
        }
    }
}

/// Whether the thread of this folder in `/proc` is ending.
fn is_ending(thread: &Path) -> bool {
    /// The kernel's `PF_EXITING`.
    const ENDING: u32 = 4;
    let stat = std::fs::read_to_string(thread.join("stat")).unwrap_or_default();
    // The name, in brackets, may contain anything.
    let flags = stat
        .rsplit(')')
        .next()
        .and_then(|rest| rest.split_whitespace().nth(6));
    flags
        .and_then(|flags| flags.parse().ok())
        .is_some_and(|flags: u32| flags & ENDING != 0)
}

/// `/proc/PARENT/status`, if a crash of the parent may leave a core dump.
///
/// A core pattern that names a program, or a socket, is served whatever the limit is.
fn dump_status(parent: u32) -> Option<File> {
    let pattern = std::fs::read("/proc/sys/kernel/core_pattern").ok()?;
    let served = matches!(pattern.first(), Some(b'|' | b'@'));
    let limits = std::fs::read_to_string(format!("/proc/{parent}/limits")).unwrap_or_default();
    let file = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max core file size"))
        .and_then(|rest| rest.split_whitespace().next())
        .is_some_and(|soft| soft != "0");
    if !(served || file) {
        return None;
    }
    File::open(format!("/proc/{parent}/status")).ok()
}

// Of the module that the library makes of this file.
#[cfg(test)]
mod tests {
    use super::super::memory::Memory;
    use super::*;

    #[test]
    fn one_that_watches_for_stalls_never_sleeps_for_good() {
        let (shared, _) = Memory::new().expect("memory");
        let said = Said::default();
        let mut watch = Watch::new(Herald::new(&shared, &said));
        watch.dump = None;
        let now = Instant::now();
        assert_eq!(watch.pause(now), None, "nothing to look at");
        // The first peer may come between this and the sleep, and who tells of it may be stopped then.
        let stall = Duration::from_millis(100);
        shared.engines[3]
            .stall_ns
            .store(stall.as_nanos() as u64, Ordering::Relaxed);
        assert_eq!(watch.pause(now), Some(stall / 8));
        said.dumping.store(true, Ordering::Relaxed);
        assert_eq!(watch.pause(now), None, "all has been said");
    }

    /// A memory with one peer, and that peer's socket.
    fn one_peer() -> (Memory, UdpSocket) {
        let (shared, _) = Memory::new().expect("memory");
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
        socket.set_nonblocking(true).expect("a socket");
        shared.peers[0].fill(&Entry {
            engine: 0,
            to: socket.local_addr().expect("bound"),
            life: (1, 2),
            token: [3; 16],
        });
        shared.peers_used.store(1, Ordering::Release);
        // No process: nobody's priority is touched.
        shared.parent.store(u32::MAX, Ordering::Relaxed);
        (shared, socket)
    }

    fn received(socket: &UdpSocket) -> usize {
        let mut bytes = [0; DATAGRAM];
        let all = std::iter::from_fn(|| socket.recv(&mut bytes).ok().map(|_| bytes));
        all.inspect(|bytes| assert_eq!(decode(bytes), Some((Notice::Died, (1, 2), [3; 16]))))
            .count()
    }

    #[test]
    fn both_threads_tell_of_a_death_and_one_tells_it_again() {
        let (shared, socket) = one_peer();
        let said = Said::default();
        for lock in &shared.locks {
            lock.word.store(7 | WAITERS | OWNER_DIED, Ordering::Release);
        }
        wait_for_death(Herald::new(&shared, &said));
        assert_eq!(received(&socket), SENDS.len());
        Watch::new(Herald::new(&shared, &said)).run();
        assert_eq!(received(&socket), 1);
    }

    #[test]
    fn what_was_told_while_it_was_dumped_is_not_told_again() {
        let (shared, socket) = one_peer();
        let said = Said::default();
        said.dumping.store(true, Ordering::Relaxed);
        Herald::new(&shared, &said).announce_death();
        assert_eq!(received(&socket), 0);
        // Released in order: nobody died.
        said.dumping.store(false, Ordering::Relaxed);
        wait_for_death(Herald::new(&shared, &said));
        assert_eq!(received(&socket), 0);
    }

    #[test]
    fn the_halves_are_all_processors_and_share_none() {
        let allowed = rustix::thread::sched_getaffinity(None).expect("told");
        let cpus = allowed.count() as usize;
        let Some([first, second]) = halves() else {
            assert_eq!(cpus, 1);
            return;
        };
        let count = |mask: &Processors| mask.iter().map(|word| word.count_ones()).sum::<u32>();
        assert_eq!((count(&first) + count(&second)) as usize, cpus);
        assert!(first.iter().zip(&second).all(|(a, b)| a & b == 0));
        assert!(count(&first) > 0 && count(&second) > 0);
    }
}
