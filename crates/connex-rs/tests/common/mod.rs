//! What the integration tests share: engines on a chosen transport, memory that peers may change, events.
#![allow(
    dead_code,
    reason = "each test binary compiles this module and uses a part of it"
)]

use std::time::{Duration, Instant};

use connex_rs::{Config, Engine, Event, EventKind, LogicalId, TransportChoice};

/// Ends a test that hangs; far longer than anything takes on a loaded machine.
pub(crate) const LONG: Option<Duration> = Some(Duration::from_secs(60));

/// What carries the bytes in one instance of the tests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Net {
    /// The built-in transport.
    Tcp,
    /// UCX: as engines use it, or over what `CONNEX_RS_TEST_TLS` names.
    Ucx,
}

/// Instantiates each test body once for every transport: one line here for each of them.
#[macro_export]
macro_rules! on_every_transport {
    ($($(#[$attribute:meta])* $test:ident),+ $(,)?) => {
        $crate::on_transport!(tcp, Tcp, [$($(#[$attribute])* $test),+]);
        $crate::on_transport!(ucx, Ucx, [$($(#[$attribute])* $test),+]);
    };
}

/// One transport's instances: a module named for it.
#[macro_export]
macro_rules! on_transport {
    ($name:ident, $net:ident, [$($(#[$attribute:meta])* $test:ident),+]) => {
        mod $name {
            $(
                #[test]
                $(#[$attribute])*
                fn $test() {
                    super::$test($crate::common::Net::$net);
                }
            )+
        }
    };
}

/// The address that engines listen on: `CONNEX_RS_TEST_IP`, else loopback.
pub(crate) fn test_ip() -> String {
    std::env::var("CONNEX_RS_TEST_IP").unwrap_or_else(|_| "127.0.0.1".into())
}

/// Whether the long counts are asked for (`CONNEX_SOAK=1`).
pub(crate) fn soak() -> bool {
    std::env::var_os("CONNEX_SOAK").is_some_and(|v| v == "1")
}

/// An identity of the tests.
pub(crate) fn id(stage: u32) -> LogicalId {
    LogicalId::new("test", stage, 0, 0).expect("a valid id")
}

/// The configuration of an engine of the tests.
pub(crate) fn config(net: Net, stage: u32) -> Config {
    let mut config = Config::new(id(stage));
    config.listen_ip = test_ip();
    config.transport = match net {
        Net::Tcp => TransportChoice::Tcp,
        Net::Ucx => {
            ask_for_tls();
            TransportChoice::Ucx
        }
    };
    config
}

/// Hands `CONNEX_RS_TEST_TLS` on to UCX, which reads its variables when an engine starts.
fn ask_for_tls() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        if let Some(tls) = std::env::var_os("CONNEX_RS_TEST_TLS") {
            // SAFETY: before the first engine of this process starts; the tests themselves read no environment
            // concurrently.
            unsafe { std::env::set_var("UCX_TLS", tls) };
        }
    });
}

/// Starts an engine.
pub(crate) fn engine(net: Net, stage: u32) -> Engine {
    Engine::start(config(net, stage)).expect("the engine starts")
}

/// The next event; panics if none comes.
pub(crate) fn event(engine: &Engine) -> Event {
    engine
        .wait_event(LONG)
        .unwrap_or_else(|| panic!("{engine:?}: no event came"))
}

/// Expects `joined` and `up` of a peer, one directly after the other; returns `rejoin`.
pub(crate) fn expect_up(engine: &Engine, peer: &LogicalId) -> bool {
    let joined = event(engine);
    let EventKind::Joined { rejoin } = joined.kind else {
        panic!("{engine:?}: joined was expected, not {joined:?}");
    };
    let up = event(engine);
    assert_eq!((&joined.peer, &up.peer), (peer, peer));
    assert_eq!(up.kind, EventKind::Up, "{engine:?}: up was expected");
    assert!(up.ts_ns >= joined.ts_ns);
    rejoin
}

/// What a `failed` event says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Failed {
    pub(crate) status: i32,
    pub(crate) reason: String,
    pub(crate) detail: String,
    pub(crate) established: bool,
}

/// Expects `failed` of a peer and checks the rules for its words.
pub(crate) fn expect_failed(engine: &Engine, peer: &LogicalId) -> Failed {
    let event = event(engine);
    assert_eq!(&event.peer, peer, "{event:?}");
    failed_of(event)
}

/// Takes a `failed` event apart and checks the rules for its words.
pub(crate) fn failed_of(event: Event) -> Failed {
    let EventKind::Failed {
        status,
        reason,
        detail,
        established,
    } = event.kind
    else {
        panic!("failed was expected, not {event:?}");
    };
    assert_eq!(
        reason.contains("timeout"),
        status == -3,
        "only suspicions say timeout: {status} {reason:?}"
    );
    assert!(
        reason.starts_with(|c: char| !c.is_uppercase()),
        "not lower case: {reason:?}"
    );
    Failed {
        status,
        reason,
        detail,
        established,
    }
}

/// Watches an engine for a while and expects that nothing happens.
pub(crate) fn expect_quiet(engine: &Engine, time: Duration) {
    if let Some(event) = engine.wait_event(Some(time)) {
        panic!("{engine:?}: no event was expected, but {event:?} came");
    }
}

/// Links two engines by hand and takes the events of both.
pub(crate) fn link(a: &Engine, b: &Engine) {
    a.connect(b.local_url()).expect("connect");
    expect_up(a, b.id());
    expect_up(b, a.id());
}

/// Waits until `done` says so; panics with `what` when it takes too long.
pub(crate) fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "waited in vain for {what}"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Bytes that differ from block to block, so that a piece at a wrong place shows.
const BLOCK: usize = 4099;

/// Page-aligned memory that engines may change at any time: accessed by copies through raw pointers only.
pub(crate) struct Memory {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: plain memory, accessed by copies through raw pointers; who does so synchronises.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zeroed memory. Untouched pages take no space.
    pub(crate) fn new(len: usize) -> Self {
        // SAFETY: a fresh anonymous mapping at a place of the system's choice.
        let ptr = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        assert_ne!(ptr, libc::MAP_FAILED, "no memory for {len} bytes");
        Self {
            ptr: ptr.cast(),
            len,
        }
    }

    /// Memory filled with the pattern of `seed`.
    pub(crate) fn patterned(len: usize, seed: u32) -> Self {
        let memory = Self::new(len);
        memory.fill(0, len, seed);
        memory
    }

    /// Memory filled with one byte.
    pub(crate) fn poisoned(len: usize, byte: u8) -> Self {
        let memory = Self::new(len);
        memory.poison(0, len, byte);
        memory
    }

    /// First byte, for the engine's local side.
    pub(crate) fn addr(&self) -> usize {
        self.ptr as usize
    }

    /// Address of a byte inside.
    pub(crate) fn at(&self, offset: usize) -> usize {
        assert!(offset <= self.len);
        self.addr() + offset
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Registers all of it.
    pub(crate) fn register(&self, engine: &Engine) {
        // SAFETY: whoever registers keeps the memory until the engine is closed or the region is taken back.
        unsafe { engine.register_memory(self.addr(), self.len) }.expect("register");
    }

    /// Writes the pattern of `seed`.
    pub(crate) fn fill(&self, offset: usize, len: usize, seed: u32) {
        self.blocks(offset, len, seed, |at, block| {
            // SAFETY: `blocks` stays inside the memory.
            unsafe { std::ptr::copy_nonoverlapping(block.as_ptr(), self.ptr.add(at), block.len()) };
            true
        });
    }

    /// Whether the pattern of `seed`, as a buffer of its own would hold it, is there.
    pub(crate) fn holds(&self, offset: usize, len: usize, seed: u32) -> bool {
        let mut seen = vec![0; BLOCK];
        self.blocks(offset, len, seed, |at, block| {
            self.copy_out(at, &mut seen[..block.len()]);
            seen[..block.len()] == *block
        })
    }

    /// Fills with one byte.
    pub(crate) fn poison(&self, offset: usize, len: usize, byte: u8) {
        assert!(offset + len <= self.len);
        // SAFETY: inside the memory.
        unsafe { std::ptr::write_bytes(self.ptr.add(offset), byte, len) };
    }

    /// Whether all bytes of the range are `byte`.
    pub(crate) fn is_all(&self, offset: usize, len: usize, byte: u8) -> bool {
        let mut seen = vec![0; 1 << 16];
        let want = vec![byte; 1 << 16];
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let n = (end - at).min(seen.len());
            self.copy_out(at, &mut seen[..n]);
            if seen[..n] != want[..n] {
                return false;
            }
            at += n;
        }
        true
    }

    /// Copies bytes out.
    pub(crate) fn copy_out(&self, offset: usize, into: &mut [u8]) {
        assert!(offset + into.len() <= self.len);
        // SAFETY: inside the memory; a copy of bytes that may change at any time.
        unsafe {
            std::ptr::copy_nonoverlapping(self.ptr.add(offset), into.as_mut_ptr(), into.len());
        }
    }

    /// Copies bytes in.
    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) {
        assert!(offset + from.len() <= self.len);
        // SAFETY: inside the memory.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.ptr.add(offset), from.len()) };
    }

    /// An aligned word inside, as a flag that a peer writes.
    pub(crate) fn word(&self, offset: usize) -> &std::sync::atomic::AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.len);
        // SAFETY: aligned, inside, and accessed atomically by both sides.
        unsafe { std::sync::atomic::AtomicU64::from_ptr(self.ptr.add(offset).cast()) }
    }

    fn blocks(
        &self,
        offset: usize,
        len: usize,
        seed: u32,
        mut each: impl FnMut(usize, &[u8]) -> bool,
    ) -> bool {
        assert!(offset + len <= self.len);
        let mut block: Vec<u8> = (0..BLOCK)
            .map(|i| (i as u32).wrapping_mul(seed | 1).wrapping_add(seed) as u8 ^ (i >> 8) as u8)
            .collect();
        let mut done = 0;
        while done < len {
            let n = BLOCK.min(len - done);
            let name = (done / BLOCK) as u64;
            block[..8].copy_from_slice(&name.to_le_bytes());
            block[0] ^= seed as u8;
            if !each(offset + done, &block[..n]) {
                return false;
            }
            done += n;
        }
        true
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours; its users were told that it goes.
        unsafe { libc::munmap(self.ptr.cast(), self.len) };
    }
}

/// Blocking calls as codes (SPEC section 5), on memory of the tests.
pub(crate) fn read(
    engine: &Engine,
    url: &str,
    dst: usize,
    src: usize,
    len: usize,
    timeout: Option<Duration>,
) -> i32 {
    // SAFETY: callers pass memory that lives until the call returns, or null, which is refused.
    code(unsafe { engine.read(url, dst, src as u64, len, timeout) })
}

/// As [`read`], the other way.
pub(crate) fn write(
    engine: &Engine,
    url: &str,
    src: usize,
    dst: usize,
    len: usize,
    timeout: Option<Duration>,
) -> i32 {
    // SAFETY: as for `read`.
    code(unsafe { engine.write(url, src, dst as u64, len, timeout) })
}

/// The code of a result.
pub(crate) fn code(result: connex_rs::Result<()>) -> i32 {
    result.map_or_else(|e| e.code(), |()| 0)
}

/// Descriptors that this process has open.
pub(crate) fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc").count()
}

/// Resident memory of this process, in KiB.
pub(crate) fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc");
    status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse().ok())
        .expect("VmRSS")
}
