//! Channels whose other side is killed: processes of their own, SIGKILL, restarts under the same identity.

use std::io::{BufRead, BufReader, ErrorKind as IoKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use connex_rs::channel::{Array, OwnedArray};
use connex_rs::{
    ChannelConfig, Config, Engine, ErrorKind, EventKind, LogicalId, PeerUrl, Receiver,
    TransportChoice,
};

const WAIT: Option<Duration> = Some(Duration::from_secs(60));
const SMALL: usize = 64 << 10;
const LARGE: usize = 1 << 20;
const SLOTS: usize = 4;

/// Marks the lines of a child among those of the test harness.
const MARK: char = '@';

fn engine(stage: u32, port: u16) -> Engine {
    let mut config = Config::new(LogicalId::new("faults", stage, 0, 0).expect("valid"));
    config.listen_ip = "127.0.0.1".into();
    config.transport = TransportChoice::Tcp;
    config.port = port;
    Engine::start(config).expect("start")
}

fn config() -> ChannelConfig {
    ChannelConfig {
        slots: SLOTS,
        slot_bytes: LARGE,
    }
}

fn data(corr: u64, len: usize) -> Vec<u64> {
    (0..len as u64 / 8)
        .map(|n| n.wrapping_mul(corr | 1) ^ corr << 40)
        .collect()
}

fn array(corr: u64, len: usize) -> OwnedArray {
    OwnedArray::of(data(corr, len), &[len / 8]).expect("sound")
}

fn is_intact(step: &connex_rs::Step, len: usize) -> bool {
    step[0].elements::<u64>() == Some(&data(step.corr(), len)[..])
}

// ---- the children ---------------------------------------------------------------------------------

/// A child of a test: this binary again, running [`child`]. Killed when dropped.
struct Helper {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Helper {
    fn start(role: &str, arguments: &[&str]) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "child", "--ignored", "--nocapture"])
            .env("CHANNEL_FAULTS_ROLE", role)
            .env("CHANNEL_FAULTS_ARGUMENTS", arguments.join(" "))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start a child");
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().expect("piped"));
        Self {
            process,
            input,
            output,
        }
    }

    /// The child's next line.
    fn says(&mut self) -> String {
        loop {
            let mut line = String::new();
            let n = self.output.read_line(&mut line).expect("a line");
            assert!(n > 0, "the child has ended");
            if let Some((_, said)) = line.split_once(MARK) {
                return said.trim().to_owned();
            }
        }
    }

    fn tell(&mut self, what: &str) {
        let input = self.input.as_mut().expect("open");
        writeln!(input, "{what}").expect("the child listens");
    }

    fn kill(&mut self) {
        self.process.kill().expect("kill");
        self.process.wait().expect("reap");
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn say(what: &str) {
    let mut out = std::io::stdout();
    writeln!(out, "{MARK}{what}").expect("the parent listens");
    out.flush().expect("the parent listens");
}

fn hear() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a line");
    line.trim().to_owned()
}

#[test]
#[ignore = "the other process of the tests here; does nothing by itself"]
fn child() {
    let Ok(role) = std::env::var("CHANNEL_FAULTS_ROLE") else {
        return;
    };
    let arguments = std::env::var("CHANNEL_FAULTS_ARGUMENTS").expect("set with the role");
    let arguments: Vec<&str> = arguments.split(' ').collect();
    match (&role[..], &arguments[..]) {
        ("send", [url]) => child_sends(url),
        ("signal", [url, addr]) => child_signals(url, addr.parse().expect("an address")),
        ("take", [port]) => child_takes(port.parse().expect("a port")),
        _ => panic!("{role} {arguments:?}"),
    }
}

/// Sends a small step, then on demand a large one, then waits to be killed.
fn child_sends(url: &str) {
    let engine = engine(0, 0);
    let sender = engine.channel(url, "", config()).expect("open");
    let small = data(1, SMALL);
    sender
        .send(&[Array::of(&small, &[SMALL / 8]).expect("sound")], 1, WAIT)
        .expect("send");
    say("sent");
    match &hear()[..] {
        "more" => {
            // Does not return before its flag is in place: never, in one of the tests.
            let posted = sender
                .send_owned(&[array(2, LARGE)], 2, WAIT)
                .expect("a slot");
            say("posted");
            hear();
            drop(posted);
        }
        "close" => {
            sender.close();
            sender.drain(WAIT).expect("all taken");
            engine.close();
        }
        other => panic!("{other}"),
    }
}

/// Writes with a signal, a small and then on demand a large one, then waits to be killed.
fn child_signals(url: &str, addr: u64) {
    let engine = engine(0, 0);
    let source: &'static [u64] = data(2, LARGE).leak();
    let signal = |len, text: &str| {
        let (from, message) = (source.as_ptr() as usize, text.into());
        // SAFETY: leaked.
        unsafe { engine.put_signal(url, from, addr, len, message, WAIT) }.expect("post")
    };
    let small = signal(SMALL, "the first signal");
    small.wait(WAIT).expect("ends").expect("well");
    say("sent");
    hear();
    // Does not end before the signal is delivered: never, in the test.
    let large = signal(LARGE, "the second signal");
    say("posted");
    hear();
    drop(large);
}

/// Takes steps: holds the first one and waits to be killed, or on demand takes all until the end.
fn child_takes(port: u16) {
    let engine = engine(1, port);
    say(engine.local_url());
    let receiver = engine.accept_channel(None, WAIT).expect("accept");
    let first = receiver.recv(WAIT).expect("a step").expect("no end");
    assert!(is_intact(&first, SMALL));
    say("holding");
    if hear() != "go on" {
        return;
    }
    drop(first);
    let mut count = 1;
    for step in &receiver {
        assert!(is_intact(&step.expect("no failure"), SMALL));
        count += 1;
    }
    say(&count.to_string());
}

// ---- the way between ------------------------------------------------------------------------------

/// Passes bytes on, and on demand keeps the last 8 bytes of what a dialler sends: the flag word of the step that it sends
/// last.
struct Relay {
    port: u16,
    hold: Arc<AtomicBool>,
    /// Bytes passed on to the receiver.
    passed: Arc<AtomicUsize>,
}

const FLAG: usize = 8;

impl Relay {
    fn start(to: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let port = listener.local_addr().expect("bound").port();
        let (hold, passed) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let relay = Self {
            port,
            hold: hold.clone(),
            passed: Arc::clone(&passed),
        };
        thread::spawn(move || {
            for near in listener.incoming() {
                let near = near.expect("accept");
                let far = TcpStream::connect(("127.0.0.1", to)).expect("connect");
                let back = (
                    far.try_clone().expect("clone"),
                    near.try_clone().expect("clone"),
                );
                let (hold, passed) = (hold.clone(), passed.clone());
                thread::spawn(move || pass(near, far, Some(&hold), &passed));
                thread::spawn(move || pass(back.0, back.1, None, &AtomicUsize::new(0)));
            }
        });
        relay
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, hold: Option<&AtomicBool>, passed: &AtomicUsize) {
    let mut kept = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let n = match from.read(&mut buffer) {
            Ok(0) => break,
            Err(e) if e.kind() == IoKind::Interrupted => continue,
            Err(_) => break,
            Ok(n) => n,
        };
        kept.extend_from_slice(&buffer[..n]);
        let holds = hold.is_some_and(|hold| hold.load(Ordering::SeqCst));
        let go = if holds {
            kept.len().saturating_sub(FLAG)
        } else {
            kept.len()
        };
        if to.write_all(&kept[..go]).is_err() {
            break;
        }
        kept.drain(..go);
        passed.fetch_add(go, Ordering::SeqCst);
    }
    // Either may be gone.
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

/// The URL with another port.
fn via(url: &str, port: u16) -> String {
    let mut url: PeerUrl = url.parse().expect("valid");
    url.port = port;
    url.to_string()
}

fn accept(engine: &Engine) -> Receiver {
    engine.accept_channel(None, WAIT).expect("accept")
}

// ---- the tests ------------------------------------------------------------------------------------

#[test]
fn a_sender_killed_between_data_and_flag_leaves_no_step_behind() {
    let owner = engine(1, 0);
    let relay = Relay::start(owner.port());
    let url = via(owner.local_url(), relay.port);
    let mut sender = Helper::start("send", &[&url]);
    let receiver = accept(&owner);
    let first = receiver.recv(WAIT).expect("a step").expect("no end");
    assert!(is_intact(&first, SMALL));
    assert_eq!(sender.says(), "sent");
    let before = relay.passed.load(Ordering::SeqCst);
    relay.hold.store(true, Ordering::SeqCst);
    sender.tell("more");
    assert_eq!(sender.says(), "posted");
    // All of the data and the head of the flag's frame have passed; the word itself has not.
    let until = Instant::now() + Duration::from_secs(60);
    while relay.passed.load(Ordering::SeqCst) < before + LARGE {
        assert!(Instant::now() < until, "the data does not come");
        thread::sleep(Duration::from_millis(1));
    }
    let late = receiver
        .recv(Some(Duration::from_millis(200)))
        .expect_err("no flag yet");
    assert_eq!(late.kind(), ErrorKind::TimedOut, "{late}");
    sender.kill();
    let error = receiver.recv(WAIT).expect_err("killed");
    assert_eq!(error.kind(), ErrorKind::PeerFailed, "{error}");
    assert_eq!(error.untaken(), [1], "the one that is held");
    assert!(is_intact(&first, SMALL), "what is held stays");
    drop(first);
    assert!(receiver.recv(WAIT).is_err(), "a failure stays one");
    assert!(receiver.untaken().is_empty());

    // The same peer in a new life opens a fresh channel.
    let mut sender = Helper::start("send", &[owner.local_url()]);
    let fresh = accept(&owner);
    assert_eq!(fresh.peer(), receiver.peer());
    let step = fresh.recv(WAIT).expect("a step").expect("no end");
    assert!(step.corr() == 1 && is_intact(&step, SMALL));
    drop(step);
    assert_eq!(sender.says(), "sent");
    sender.tell("close");
    assert!(fresh.recv(WAIT).expect("clean").is_none());
    assert!(receiver.recv(WAIT).is_err(), "the old one stays failed");
    assert!(sender.process.wait().expect("reap").success());
}

#[test]
fn a_sender_killed_between_data_and_signal_leaves_no_signal_behind() {
    let owner = engine(1, 0);
    let there = owner.allocate_managed_buffer(LARGE).expect("buffer");
    let word = |index: usize| {
        assert!(index < LARGE / 8);
        // SAFETY: aligned, inside the managed buffer, and accessed atomically.
        unsafe { AtomicU64::from_ptr((there as *mut u64).add(index)) }.load(Ordering::Acquire)
    };
    let relay = Relay::start(owner.port());
    let url = via(owner.local_url(), relay.port);
    let mut sender = Helper::start("signal", &[&url, &there.to_string()]);
    let (from, first) = owner.recv_msg(WAIT).expect("a signal");
    assert_eq!(first, b"the first signal");
    assert_eq!(sender.says(), "sent");
    relay.hold.store(true, Ordering::SeqCst);
    sender.tell("more");
    assert_eq!(sender.says(), "posted");
    // All of the data is in place, and the beginning of the signal has come; its end has not.
    let sent = data(2, LARGE);
    let until = Instant::now() + Duration::from_secs(60);
    while (0..LARGE / 8).any(|index| word(index) != sent[index]) {
        assert!(Instant::now() < until, "the data does not come");
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(owner.recv_msg(Some(Duration::from_millis(200))), None);
    sender.kill();
    let failed = std::iter::from_fn(|| owner.wait_event(WAIT))
        .find_map(|event| match event.kind {
            EventKind::Failed { status, .. } => Some((event.peer, status)),
            _ => None,
        })
        .expect("a death");
    assert_eq!(failed, (from.clone(), -2));
    assert_eq!(owner.recv_msg(Some(Duration::from_millis(200))), None);

    // The same peer in a new life is heard, from its first signal on.
    let mut sender = Helper::start("signal", &[owner.local_url(), &there.to_string()]);
    assert_eq!(owner.recv_msg(WAIT), Some((from.clone(), first)));
    assert_eq!(sender.says(), "sent");
    sender.tell("more");
    let (_, second) = owner.recv_msg(WAIT).expect("a signal");
    assert_eq!(second, b"the second signal");
}

#[test]
fn a_sender_killed_at_any_moment_leaves_whole_steps_only() {
    let owner = engine(1, 0);
    for round in 0..8 {
        let mut sender = Helper::start("send", &[owner.local_url()]);
        let receiver = accept(&owner);
        let first = receiver.recv(WAIT).expect("a step").expect("no end");
        assert!(is_intact(&first, SMALL));
        assert_eq!(sender.says(), "sent");
        sender.tell("more");
        thread::sleep(Duration::from_micros(round * 400));
        sender.kill();
        let error = loop {
            match receiver.recv(WAIT) {
                Ok(step) => {
                    let step = step.expect("not closed");
                    assert!(step.corr() == 2 && is_intact(&step, LARGE), "round {round}");
                }
                Err(error) => break error,
            }
        };
        assert_eq!(
            (error.kind(), error.untaken()),
            (ErrorKind::PeerFailed, &[1][..]),
            "{error}"
        );
    }
    let until = Instant::now() + Duration::from_secs(20);
    while owner.stats().region_bytes > 0 {
        assert!(
            Instant::now() < until,
            "a ring of a dead sender is still registered"
        );
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_receiver_killed_with_all_slots_full_fails_the_sender_with_all_of_them() {
    let engine = engine(0, 0);
    let mut receiver = Helper::start("take", &["0"]);
    let url = receiver.says();
    let sender = engine.channel(&url, "", config()).expect("open");
    let slots = SLOTS as u64;
    for corr in 0..slots {
        sender
            .send_owned(&[array(corr, SMALL)], corr, WAIT)
            .expect("send");
    }
    assert_eq!(receiver.says(), "holding");
    assert!(
        sender
            .try_send(&[array(9, SMALL)], 9)
            .expect("alive")
            .is_none()
    );
    thread::scope(|scope| {
        let blocked = scope.spawn(|| sender.send_owned(&[array(9, SMALL)], 9, None).map(drop));
        thread::sleep(Duration::from_millis(20));
        receiver.kill();
        let error = blocked.join().expect("no panic").expect_err("killed");
        assert_eq!(error.kind(), ErrorKind::PeerFailed, "{error}");
        assert_eq!(error.untaken(), (0..slots).collect::<Vec<_>>());
    });
    let error = sender.drain(WAIT).expect_err("killed");
    let untaken = error.untaken().to_vec();
    assert_eq!(untaken, sender.untaken());

    // The same peer, restarted at its address: what was not taken goes to it over a fresh channel.
    let port = url.parse::<PeerUrl>().expect("valid").port.to_string();
    let mut receiver = Helper::start("take", &[&port]);
    assert_eq!(receiver.says(), url);
    let fresh = engine.channel(&url, "", config()).expect("open");
    for &corr in &untaken {
        fresh
            .send_owned(&[array(corr, SMALL)], corr, WAIT)
            .expect("send");
    }
    receiver.tell("go on");
    for corr in slots..40 {
        fresh
            .send_owned(&[array(corr, SMALL)], corr, WAIT)
            .expect("send");
    }
    fresh.close();
    fresh.drain(WAIT).expect("all taken");
    assert_eq!(receiver.says(), "holding");
    assert_eq!(receiver.says(), "40");
    assert!(
        sender.try_send(&[array(9, SMALL)], 9).is_err(),
        "the old one stays failed"
    );
}

#[test]
fn nobody_listening_fails_the_opening() {
    let engine = engine(0, 0);
    let gone = TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = gone.local_addr().expect("bound").port();
    drop(gone);
    let url = format!("127.0.0.1:{port}#faults|1|0|0");
    let sender = engine.channel(&url, "", config()).expect("does not wait");
    let error = sender
        .send_owned(&[array(1, SMALL)], 1, WAIT)
        .expect_err("nobody there");
    assert_eq!(error.kind(), ErrorKind::PeerFailed, "{error}");
    assert!(error.untaken().is_empty(), "it was never sent");
}
