//! What only RDMA does: transfers that the owner's process takes no part in. `cargo xtask test-rdma` runs these, in a
//! machine that has Soft-RoCE devices.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};

use common::{LONG, Net, engine, test_ip};

/// Makes the test [`owner`] the other process.
const OWNER: &str = "CONNEX_RS_TEST_RDMA_OWNER";
const SIZE: usize = 1 << 20;
const PATTERN: u8 = 0x5a;

/// The process that offers memory.
struct Owner {
    child: Child,
    _input: ChildStdin,
    url: String,
    addr: u64,
}

impl Owner {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "owner", "--ignored", "--nocapture"])
            .env(OWNER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let line = output
            .lines()
            .map(|line| line.expect("a line"))
            .find_map(|line| Some(line.split_once("offer ")?.1.to_owned()))
            .expect("the owner offers memory");
        let (addr, url) = line.split_once(' ').expect("address and URL");
        Self {
            child,
            _input: input,
            url: url.to_owned(),
            addr: addr.parse().expect("a number"),
        }
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
#[ignore = "the other process of a_stopped_owner_is_read_all_the_same"]
fn owner() {
    if std::env::var_os(OWNER).is_none() {
        return;
    }
    let engine = engine(Net::Ucx, 1);
    let addr = engine.allocate_managed_buffer(SIZE).expect("buffer");
    // SAFETY: the buffer has SIZE bytes and nobody else knows it yet.
    unsafe { std::ptr::write_bytes(addr as *mut u8, PATTERN, SIZE) };
    let mut out = std::io::stdout();
    writeln!(out, "\noffer {addr} {}", engine.local_url()).expect("told");
    out.flush().expect("flushed");
    // Until the other process is gone.
    let _ = std::io::stdin().lines().next();
}

#[test]
#[ignore = "needs an RDMA device: cargo xtask test-rdma"]
fn a_stopped_owner_is_read_all_the_same() {
    let owner = Owner::start();
    let engine = engine(Net::Ucx, 0);
    let here = engine.allocate_managed_buffer(SIZE).expect("buffer");
    let read = |len: usize| {
        // SAFETY: a managed buffer outlives the call.
        unsafe { engine.read(&owner.url, here, owner.addr, len, LONG) }.expect("read");
        // SAFETY: the read is over, nobody else writes there.
        let bytes = unsafe { std::slice::from_raw_parts(here as *const u8, len) };
        assert!(bytes.iter().all(|b| *b == PATTERN), "{len} bytes");
        // SAFETY: as above.
        unsafe { std::ptr::write_bytes(here as *mut u8, 0, SIZE) };
    };
    // The first one connects and asks for the region's key.
    read(64);
    let stats = engine.stats();
    assert_eq!(stats.paths[0].mode, "one-sided", "at {}", test_ip());
    owner.signal(libc::SIGSTOP);
    for len in [8, 4096, 100_000, SIZE] {
        read(len);
    }
    owner.signal(libc::SIGCONT);
    read(8);
    let stats = engine.stats();
    assert_eq!(
        (stats.rkey_fetches, stats.remote_rkeys),
        (1, 1),
        "one key for one region"
    );
}
