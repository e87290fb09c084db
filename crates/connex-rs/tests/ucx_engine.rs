//! Engines over UCX, in this process and in children of it (this test binary, started again with a role).

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use connex_rs::{Config, Engine, Event, EventKind, LogicalId, Recipient, TransportChoice};

const ROLE: &str = "CONNEX_RS_TEST_ROLE";
const LIMIT: Duration = Duration::from_secs(30);
const WAIT: Option<Duration> = Some(LIMIT);

fn engine(stage: u32, port: u16) -> Engine {
    let mut config = Config::new(LogicalId::new("ucx", stage, 0, 0).expect("valid"));
    config.listen_ip = "127.0.0.1".into();
    config.port = port;
    config.transport = TransportChoice::Ucx;
    Engine::start(config).unwrap_or_else(|e| panic!("{e}"))
}

/// An engine in a child process, with a region to read.
struct Peer {
    child: Child,
    // Its end is the child's sign to leave.
    stdin: Option<ChildStdin>,
    stderr: JoinHandle<String>,
    url: String,
    addr: u64,
}

const REGION: usize = 1 << 20;

impl Peer {
    fn start(port: u16) -> Self {
        Self::with_role(&port.to_string())
    }

    fn with_role(role: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "role", "--nocapture"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a child");
        let stdin = child.stdin.take();
        // Read all the time: a full pipe would block whatever writes in the child.
        let mut pipe = child.stderr.take().expect("piped");
        let stderr = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = pipe.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        });
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let ready = loop {
            match lines.next() {
                Some(line) => {
                    let line = line.expect("text");
                    if let Some((_, rest)) = line.split_once("READY ") {
                        break rest.to_owned();
                    }
                }
                None => {
                    panic!("the child ended: {}", stderr.join().expect("read"));
                }
            }
        };
        // Whatever else it prints must not block it.
        std::thread::spawn(move || lines.for_each(drop));
        let (url, addr) = ready.split_once(' ').expect("two words");
        Self {
            child,
            stdin,
            stderr,
            url: url.to_owned(),
            addr: addr.parse().expect("a number"),
        }
    }

    fn port(&self) -> u16 {
        let (head, _) = self.url.split_once('#').expect("a URL");
        head.rsplit(':')
            .next()
            .expect("a port")
            .parse()
            .expect("a number")
    }

    /// Lets it end in order; what it wrote to stderr.
    fn finish(mut self) -> String {
        drop(self.stdin.take());
        let status = self.child.wait().expect("ended");
        let stderr = self.stderr.join().expect("read");
        assert!(status.success(), "{status}: {stderr}");
        stderr
    }

    fn kill(mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("ended");
    }
}

/// The children's part; nothing without a role.
#[test]
fn role() {
    let Ok(port) = std::env::var(ROLE) else {
        return;
    };
    if port == "starved" {
        return starved();
    }
    let engine = engine(1, port.parse().expect("a port"));
    let addr = engine.allocate_managed_buffer(REGION).expect("a buffer");
    // SAFETY: the buffer is ours.
    unsafe { std::slice::from_raw_parts_mut(addr as *mut u8, REGION) }
        .iter_mut()
        .enumerate()
        .for_each(|(i, b)| *b = (i % 251) as u8);
    let mut out = std::io::stdout();
    writeln!(out, "READY {} {addr}", engine.local_url()).expect("written");
    out.flush().expect("flushed");
    let mut line = String::new();
    std::io::stdin()
        .read_line(&mut line)
        .expect("the end of it");
    engine.close();
}

/// An engine in a process that has no descriptor left for a while.
fn starved() {
    let engine = engine(1, 0);
    let addr = engine.allocate_managed_buffer(REGION).expect("a buffer");
    let mut all = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        all.push(file);
    }
    let mut out = std::io::stdout();
    writeln!(out, "READY {} {addr}", engine.local_url()).expect("written");
    out.flush().expect("flushed");
    let limit = Instant::now() + LIMIT;
    while engine.stats().accept_backoffs == 0 {
        assert!(Instant::now() < limit, "accept never backed off");
        std::thread::sleep(Duration::from_millis(10));
    }
    let before = processor_time();
    std::thread::sleep(Duration::from_secs(1));
    let used = processor_time() - before;
    assert!(
        used < Duration::from_millis(300),
        "it spins: {used:?} in a second"
    );
    drop(all);
    let mut line = String::new();
    std::io::stdin()
        .read_line(&mut line)
        .expect("the end of it");
    engine.close();
}

fn processor_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[test]
fn accepting_backs_off_without_descriptors_and_goes_on_later() {
    let engine = engine(0, 0);
    let peer = Peer::with_role("starved");
    let limit = Instant::now() + LIMIT;
    'up: loop {
        engine.connect(&peer.url).expect("accepted");
        loop {
            assert!(Instant::now() < limit, "it never came up");
            match engine
                .wait_event(Some(Duration::from_millis(100)))
                .map(|e| e.kind)
            {
                Some(EventKind::Up) => break 'up,
                Some(EventKind::Failed { .. }) => break,
                _ => {}
            }
        }
    }
    read(&engine, &peer, 4096);
    let stderr = peer.finish();
    assert!(
        stderr.lines().count() < 2000,
        "the log runs full: {} lines",
        stderr.lines().count()
    );
    engine.close();
}

fn read(engine: &Engine, peer: &Peer, len: usize) -> Vec<u8> {
    let mut into = vec![0u8; len];
    // SAFETY: the buffer outlives the blocking call.
    unsafe { engine.read(&peer.url, into.as_mut_ptr() as usize, peer.addr, len, WAIT) }
        .expect("read");
    into
}

fn wait_failed(engine: &Engine) -> Event {
    loop {
        let event = engine.wait_event(WAIT).expect("a failed event");
        if matches!(event.kind, EventKind::Failed { .. }) {
            return event;
        }
    }
}

#[test]
fn bytes_and_messages_move_between_engines() {
    let (a, b) = (engine(0, 0), engine(1, 0));
    for len in [1usize, 64, 4096, 4097, (1 << 20) + 7, 16 << 20] {
        let there = b.allocate_managed_buffer(len).expect("buffer");
        let source: Vec<u8> = (0..len).map(|i| (i * 31 % 251) as u8).collect();
        let mut back = vec![0u8; len];
        // SAFETY: both buffers outlive the blocking calls.
        unsafe {
            a.write(
                b.local_url(),
                source.as_ptr() as usize,
                there as u64,
                len,
                WAIT,
            )
            .expect("write");
            a.read(
                b.local_url(),
                back.as_mut_ptr() as usize,
                there as u64,
                len,
                WAIT,
            )
            .expect("read");
        }
        assert!(back == source, "{len} bytes differ");
        b.free_managed_buffer(there).expect("free");
    }
    a.send_msg(Recipient::Id(b.id()), b"hello".to_vec(), WAIT)
        .expect("send");
    assert_eq!(b.recv_msg(WAIT), Some((a.id().clone(), b"hello".to_vec())));
    b.close();
    let EventKind::Failed {
        reason,
        established,
        ..
    } = wait_failed(&a).kind
    else {
        unreachable!()
    };
    assert_eq!((reason.as_str(), established), ("closed by peer", true));
    a.close();
}

#[test]
fn a_killed_process_is_a_death_and_its_port_is_free_at_once() {
    let engine = engine(0, 0);
    let mut port = 0;
    for round in 0..3 {
        let peer = Peer::start(port);
        port = peer.port();
        let data = read(&engine, &peer, REGION);
        assert!(
            data.iter().enumerate().all(|(i, b)| *b == (i % 251) as u8),
            "round {round}"
        );
        let killed = Instant::now();
        peer.kill();
        let event = wait_failed(&engine);
        let took = killed.elapsed();
        let EventKind::Failed {
            reason,
            status,
            established,
            ..
        } = event.kind
        else {
            unreachable!()
        };
        assert!(established && status == -2, "round {round}: {reason}");
        assert!(
            !reason.contains("timeout"),
            "a death, not a suspicion: {reason}"
        );
        // Milliseconds on an idle machine.
        assert!(took < Duration::from_secs(5), "round {round}: {took:?}");
    }
    engine.close();
}

#[test]
fn nothing_listens_on_another_interface_and_nothing_is_printed() {
    let engine = engine(0, 0);
    let peer = Peer::start(0);
    read(&engine, &peer, 4096);
    for pid in [std::process::id(), peer.child.id()] {
        let open = listening_of(pid);
        assert!(!open.is_empty(), "the engines' own listeners at least");
        assert!(
            open.iter().all(|local| local.starts_with("0100007F:")),
            "{pid}: {open:?}"
        );
    }
    let stderr = peer.finish();
    assert!(!stderr.contains("UCX"), "UCX wrote: {stderr}");
    engine.close();
}

/// The addresses of the TCP sockets on which a process listens, as the kernel writes them.
fn listening_of(pid: u32) -> Vec<String> {
    let sockets: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("descriptors")
        .flatten()
        .filter_map(|fd| std::fs::read_link(fd.path()).ok())
        .filter_map(|link| {
            Some(
                link.to_str()?
                    .strip_prefix("socket:[")?
                    .strip_suffix(']')?
                    .to_owned(),
            )
        })
        .collect();
    ["tcp", "tcp6"]
        .iter()
        .flat_map(|table| {
            std::fs::read_to_string(format!("/proc/net/{table}"))
                .unwrap_or_default()
                .lines()
                .skip(1)
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            (fields[3] == "0A" && sockets.iter().any(|s| s == fields[9]))
                .then(|| fields[1].to_owned())
        })
        .collect()
}
