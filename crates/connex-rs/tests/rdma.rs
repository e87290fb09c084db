//! What only RDMA does: transfers that the owner's process takes no part in, by keys that die with it. `cargo xtask test-rdma`
//! runs these, in a machine that has Soft-RoCE devices.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};

use common::{LONG, Net, config, engine, event, expect_failed, id, test_ip};
use connex_rs::{Engine, EventKind, PeerUrl};

/// Makes the test [`owner`] the other process: the port to listen on, and the byte that its memory is full of.
const OWNER: &str = "CONNEX_RS_TEST_RDMA_OWNER";
const SIZE: usize = 1 << 20;
const PATTERN: u8 = 0x5a;

/// The process that offers memory.
struct Owner {
    child: Child,
    input: Option<ChildStdin>,
    url: String,
    addr: u64,
}

impl Owner {
    fn start(port: u16, pattern: u8) -> Self {
        Self::with(port, pattern, &[], Stdio::inherit())
    }

    fn with(port: u16, pattern: u8, env: &[(&str, Option<&str>)], errors: Stdio) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command
            .args(["--exact", "owner", "--ignored", "--nocapture"])
            .env(OWNER, format!("{port} {pattern}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors);
        for (name, value) in env {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let mut child = command.spawn().expect("started");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let line = output
            .lines()
            .map(|line| line.expect("a line"))
            .find_map(|line| Some(line.split_once("offer ")?.1.to_owned()))
            .expect("the owner offers memory");
        let (addr, url) = line.split_once(' ').expect("address and URL");
        Self {
            child,
            input,
            url: url.to_owned(),
            addr: addr.parse().expect("a number"),
        }
    }

    fn port(&self) -> u16 {
        let url: PeerUrl = self.url.parse().expect("a URL");
        url.port
    }

    fn signal(&self, signal: i32) {
        let pid = libc::pid_t::try_from(self.child.id()).expect("a process id");
        // SAFETY: the child has not been waited for, so the id is its own.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "the other process of these tests"]
fn owner() {
    let Ok(words) = std::env::var(OWNER) else {
        return;
    };
    let (port, pattern) = words.split_once(' ').expect("port and pattern");
    let mut config = config(Net::Ucx, 1);
    config.port = port.parse().expect("a port");
    let engine = Engine::start(config).expect("the engine starts");
    let addr = engine.allocate_managed_buffer(SIZE).expect("buffer");
    let pattern = pattern.parse().expect("a byte");
    // SAFETY: the buffer has SIZE bytes and nobody else knows it yet.
    unsafe { std::ptr::write_bytes(addr as *mut u8, pattern, SIZE) };
    let mut out = std::io::stdout();
    writeln!(out, "\noffer {addr} {}", engine.local_url()).expect("told");
    out.flush().expect("flushed");
    // Until the other process is gone.
    let _ = std::io::stdin().lines().next();
}

/// An engine that reads into a buffer of its own.
struct Reader {
    engine: Engine,
    here: usize,
}

impl Reader {
    fn start() -> Self {
        let engine = engine(Net::Ucx, 0);
        let here = engine.allocate_managed_buffer(SIZE).expect("buffer");
        Self { engine, here }
    }

    /// Links with the owner; returns whether that is a rejoin. In an emulated machine a connect may take longer than the 3 s that an
    /// engine waits: it is tried again then, as a client does.
    fn reach(&self, owner: &Owner) -> bool {
        for _ in 0..20 {
            self.engine.connect(&owner.url).expect("connect");
            match event(&self.engine).kind {
                EventKind::Joined { rejoin } => {
                    assert_eq!(event(&self.engine).kind, EventKind::Up);
                    return rejoin;
                }
                EventKind::Failed {
                    established: false,
                    reason,
                    ..
                } if reason.contains("connect timeout") => {}
                other => panic!("{other:?}"),
            }
        }
        panic!("no connect came through in time");
    }

    fn code(&self, owner: &Owner, at: u64, len: usize) -> i32 {
        common::read(&self.engine, &owner.url, self.here, at as usize, len, LONG)
    }

    /// Reads the first `len` bytes and checks that all are `pattern`.
    fn read(&self, owner: &Owner, len: usize, pattern: u8) {
        // SAFETY: the buffer has SIZE bytes, and no transfer is under way.
        unsafe { std::ptr::write_bytes(self.here as *mut u8, !pattern, SIZE) };
        assert_eq!(self.code(owner, owner.addr, len), 0, "{len} bytes");
        // SAFETY: the read is over, nobody else writes there.
        let bytes = unsafe { std::slice::from_raw_parts(self.here as *const u8, SIZE) };
        let (read, rest) = bytes.split_at(len);
        assert!(read.iter().all(|b| *b == pattern), "{len} bytes");
        assert!(rest.iter().all(|b| *b == !pattern), "beyond {len} bytes");
    }

    /// Writes `pattern` into the first `len` bytes.
    fn write(&self, owner: &Owner, len: usize, pattern: u8) {
        // SAFETY: the buffer has SIZE bytes, and no transfer is under way.
        unsafe { std::ptr::write_bytes(self.here as *mut u8, pattern, len) };
        let there = owner.addr as usize;
        let code = common::write(&self.engine, &owner.url, self.here, there, len, LONG);
        assert_eq!(code, 0, "{len} bytes");
    }

    /// The link is there and moves bytes without the other process.
    fn expect_one_sided(&self) {
        let stats = self.engine.stats();
        let path = &stats.paths[0];
        assert_eq!(path.mode, "one-sided", "at {}: {}", test_ip(), path.path);
        // The transport and the device, as UCX tells them.
        assert!(path.path.contains("ucx:rc_"), "{}", path.path);
    }

    /// Keys fetched so far, and keys held.
    fn keys(&self) -> (u64, u64) {
        let stats = self.engine.stats();
        (stats.rkey_fetches, stats.remote_rkeys)
    }
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test-rdma"]
fn a_stopped_owner_is_read_and_written_all_the_same() {
    let owner = Owner::start(0, PATTERN);
    let reader = Reader::start();
    reader.reach(&owner);
    // The first one asks for the region's key.
    reader.read(&owner, 64, PATTERN);
    reader.expect_one_sided();
    owner.signal(libc::SIGSTOP);
    for len in [8, 4096, 100_000, SIZE] {
        reader.read(&owner, len, PATTERN);
    }
    for (len, pattern) in [(8, 1), (4096, 2), (100_000, 3), (SIZE, 4)] {
        reader.write(&owner, len, pattern);
        reader.read(&owner, len, pattern);
    }
    owner.signal(libc::SIGCONT);
    reader.read(&owner, 8, 4);
    assert_eq!(reader.keys(), (1, 1), "one key for one region");
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test-rdma"]
fn what_no_region_holds_is_refused_and_the_link_stays() {
    let owner = Owner::start(0, PATTERN);
    let reader = Reader::start();
    reader.reach(&owner);
    reader.read(&owner, 4096, PATTERN);
    reader.expect_one_sided();
    let connections = reader.engine.stats().eps_created;
    let end = owner.addr + SIZE as u64;
    for (at, len) in [(end, 8), (end - 8, 16), (owner.addr - 8, 16), (1 << 40, 8)] {
        assert_eq!(reader.code(&owner, at, len), -4, "{len} bytes at {at:#x}");
        reader.read(&owner, 4096, PATTERN);
    }
    assert_eq!(reader.engine.stats().eps_created, connections);
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test-rdma"]
fn a_killed_owner_is_a_death_and_its_successor_is_read_by_its_own_key() {
    let reader = Reader::start();
    let mut owner = Owner::start(0, 0);
    for life in 0..3u8 {
        if life > 0 {
            owner = Owner::start(owner.port(), life);
        }
        assert_eq!(reader.reach(&owner), life > 0);
        reader.read(&owner, SIZE, life);
        reader.expect_one_sided();
        assert_eq!(reader.keys(), (u64::from(life) + 1, 1), "life {life}");
        owner.signal(libc::SIGKILL);
        let failed = expect_failed(&reader.engine, &id(1));
        assert_eq!(
            (failed.status, failed.established),
            (-2, true),
            "{failed:?}"
        );
        assert_eq!(reader.keys().1, 0, "keys of a dead process");
    }
}

/// What UCX says itself that its environment holds when it reads its settings; those of RDMA devices go this way.
fn seen_by_ucx(env: &[(&str, Option<&str>)]) -> String {
    let mut env = env.to_vec();
    env.push(("UCX_LOG_LEVEL", Some("info")));
    let mut owner = Owner::with(0, PATTERN, &env, Stdio::piped());
    drop(owner.input.take());
    let mut text = String::new();
    let mut errors = owner.child.stderr.take().expect("piped");
    errors.read_to_string(&mut text).expect("text");
    let line = text.lines().find(|line| line.contains("env variables"));
    line.unwrap_or_else(|| panic!("UCX did not tell its variables:\n{text}"))
        .to_owned()
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test-rdma"]
fn the_settings_of_rdma_devices_reach_ucx_and_explicit_ones_win() {
    let made = seen_by_ucx(&[("UCX_IB_ALLOC", None)]);
    for setting in ["UCX_IB_ALLOC=mmap,heap", "UCX_IB_PCI_RELAXED_ORDERING=n"] {
        assert!(made.contains(setting), "{setting}: {made}");
    }
    let explicit = seen_by_ucx(&[
        ("UCX_IB_ALLOC", Some("heap")),
        ("UCX_IB_PCI_RELAXED_ORDERING", Some("try")),
    ]);
    for setting in ["UCX_IB_ALLOC=heap", "UCX_IB_PCI_RELAXED_ORDERING=try"] {
        assert!(explicit.contains(setting), "{setting}: {explicit}");
    }
    assert!(!explicit.contains("mmap"), "{explicit}");
}
