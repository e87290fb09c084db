//! The sentinel with real processes: what dies, what is told, and what is left behind.
//!
//! The victims are this test program itself, run again with one of the ignored tests below as their job.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use connex_rs::{Config, Engine, Event, EventKind, LogicalId, SentinelState, now_ns};

/// Nothing here takes that long, on a machine that is not hopelessly overloaded.
const LONG: Duration = Duration::from_secs(30);

fn config(stage: u32) -> Config {
    let mut config = Config::new(LogicalId::new("sentinel", stage, 0, 0).expect("valid"));
    config.listen_ip = "127.0.0.1".into();
    config
}

fn engine(stage: u32) -> Engine {
    Engine::start(config(stage)).expect("start")
}

/// The sentinel's process id, once it watches.
fn sentinel_of(engine: &Engine) -> u32 {
    let until = Instant::now() + LONG;
    loop {
        match engine.stats().sentinel {
            SentinelState::Running { pid } => return pid,
            other => assert!(Instant::now() < until, "no sentinel: {other:?}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + LONG;
    while !done() {
        assert!(Instant::now() < until, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn next_event(engine: &Engine) -> Event {
    engine.wait_event(Some(LONG)).expect("an event in time")
}

fn expect_up(engine: &Engine) {
    assert!(matches!(next_event(engine).kind, EventKind::Joined { .. }));
    assert_eq!(next_event(engine).kind, EventKind::Up);
}

/// Status and reason of the next event, which is the end of an established link.
fn expect_failed(engine: &Engine) -> (i32, String, u64) {
    let event = next_event(engine);
    match event.kind {
        EventKind::Failed {
            status,
            reason,
            established: true,
            ..
        } => (status, reason, event.ts_ns),
        other => panic!("not the end of a link: {other:?}"),
    }
}

fn expect_silence(engine: &Engine, time: Duration) {
    if let Some(event) = engine.wait_event(Some(time)) {
        panic!("an event too many: {event:?}");
    }
}

/// Whether a process runs. A dead one whose new parent, process 1, has not looked yet does not.
fn exists(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let mut fields = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace();
    let (state, parent) = (fields.next(), fields.next());
    let unburied = (state, parent) == (Some("Z"), Some("1"));
    !stat.is_empty() && !unburied
}

fn signal(pid: u32, signal: i32) {
    // SAFETY: sends a signal to a process that this test started.
    let sent = unsafe { libc::kill(pid as i32, signal) };
    assert_eq!(sent, 0, "{}", std::io::Error::last_os_error());
}

// ---- victims --------------------------------------------------------------------------------------

const SURVIVOR: &str = "TEST_SURVIVOR";
const BALLAST: &str = "TEST_BALLAST_MB";
const STALL: &str = "TEST_STALL_MS";
const NO_SENTINEL: &str = "TEST_NO_SENTINEL";
const PORT: &str = "TEST_PORT";
const STAGE: &str = "TEST_STAGE";
const CORE: &str = "TEST_CORE_DIR";

/// Another process with an engine.
struct Victim {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    url: String,
    sentinel: u32,
}

impl Victim {
    /// A victim that has a link to `survivor`, whose `up` has been taken from the queue.
    fn connected(survivor: &Engine, settings: &[(&str, &str)]) -> Self {
        let mut settings = settings.to_vec();
        settings.push((SURVIVOR, survivor.local_url()));
        let victim = Self::start("victim", &settings);
        expect_up(survivor);
        victim
    }

    fn start(job: &str, settings: &[(&str, &str)]) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("our own path"))
            .args(["--ignored", "--exact", job, "--nocapture"])
            .envs(settings.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .expect("spawn");
        let stdin = child.stdin.take().expect("piped");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The test harness writes its own words in front.
                if let Some((_, said)) = line.split_once('@') {
                    let _ = send.send(said.to_owned());
                }
            }
        });
        let mut victim = Self {
            child,
            stdin,
            lines,
            url: String::new(),
            sentinel: 0,
        };
        if job == "victim" {
            victim.url = victim.hear("url ");
            victim.sentinel = victim.hear("sentinel ").parse().expect("a number");
            victim.hear("ready");
        }
        victim
    }

    /// The rest of the next line, which begins with `word`.
    fn hear(&self, word: &str) -> String {
        let line = self.lines.recv_timeout(LONG).expect("the victim speaks");
        line.strip_prefix(word)
            .unwrap_or_else(|| panic!("{word:?} expected, {line:?} heard"))
            .to_owned()
    }

    fn tell(&mut self, what: &str) {
        writeln!(self.stdin, "{what}").expect("the victim listens");
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it; returns the time of the kill.
    fn kill(&self) -> u64 {
        let at = now_ns();
        signal(self.pid(), libc::SIGKILL);
        at
    }

    fn end(mut self) -> ExitStatus {
        self.child.wait().expect("a child of ours")
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        // A test that failed half-way.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(what: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{what}")
        .and_then(|()| out.flush())
        .expect("somebody reads");
}

fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn number(name: &str) -> Option<u64> {
    setting(name).map(|n| n.parse().expect("a number"))
}

/// Connects to the survivor and does what it is told.
#[test]
#[ignore = "a job of the other tests"]
fn victim() {
    if let Some(dir) = setting(CORE) {
        std::env::set_current_dir(dir).expect("the directory for the core");
        let all = libc::rlimit {
            rlim_cur: libc::RLIM_INFINITY,
            rlim_max: libc::RLIM_INFINITY,
        };
        // SAFETY: reads the struct.
        let set = unsafe { libc::setrlimit(libc::RLIMIT_CORE, &all) };
        assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    }
    let mut config = config(number(STAGE).unwrap_or(1) as u32);
    config.port = number(PORT).unwrap_or(0) as u16;
    config.sentinel = setting(NO_SENTINEL).is_none();
    config.stall = number(STALL).map(Duration::from_millis);
    let wants_sentinel = config.sentinel && setting("CONNEX_RS_TEST_NO_SPAWN").is_none();
    let engine = Engine::start(config).expect("start");
    say(format!("url {}", engine.local_url()));
    let sentinel = if wants_sentinel {
        sentinel_of(&engine)
    } else {
        0
    };
    say(format!("sentinel {sentinel}"));
    let ballast = vec![1u8; (number(BALLAST).unwrap_or(0) as usize) << 20];
    if let Some(url) = setting(SURVIVOR) {
        engine.connect(&url).expect("connect");
        expect_up(&engine);
    }
    say("ready");
    for line in std::io::stdin().lines() {
        let line = line.expect("stdin");
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match word {
            "close" => {
                engine.close();
                say("closed");
            }
            "stats" => {
                wait_until("the sentinel's start has come to an end", || {
                    engine.stats().sentinel != SentinelState::Starting
                });
                let stats = engine.stats();
                say(format!(
                    "stats {} {} {}",
                    stats.sentinel.name(),
                    stats.sentinel_restarts,
                    stats.warnings.join("; ")
                ));
            }
            "sentinel" => say(format!("sentinel {}", sentinel_of(&engine))),
            "event" => {
                let (status, reason, _) = expect_failed(&engine);
                say(format!("failed {status} {reason}"));
            }
            "exec" => {
                // The descriptors that the shell has would be seen by its ends of the pipes alone.
                panic!("{}", Command::new("/bin/sleep").arg("1000").exec());
            }
            "fork" => {
                // SAFETY: the child calls nothing but `sleep` and `_exit`.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: as above.
                    unsafe {
                        libc::usleep(rest.parse::<u32>().unwrap_or(0) * 1000);
                        libc::_exit(0);
                    }
                }
                assert!(child > 0);
                say(format!("forked {child}"));
            }
            "abort" => std::process::abort(),
            "exit" => std::process::exit(0),
            other => panic!("what is {other:?}?"),
        }
    }
    drop(ballast);
}

// ---- deaths ---------------------------------------------------------------------------------------

/// The median of a few kills: one may be late on a loaded machine.
fn kill_times(settings: &[(&str, &str)], kills: usize) -> (Vec<f64>, String) {
    let survivor = engine(0);
    let mut times = Vec::new();
    let mut last = String::new();
    for _ in 0..kills {
        let victim = Victim::connected(&survivor, settings);
        let at = victim.kill();
        let (status, reason, ts) = expect_failed(&survivor);
        assert_eq!(status, -2, "{reason}");
        assert!(!reason.contains("timeout"), "{reason}");
        times.push((ts - at) as f64 / 1e6);
        last = reason;
        let sentinel = victim.sentinel;
        victim.end();
        wait_until("the sentinel ends, too", || {
            sentinel == 0 || !exists(sentinel)
        });
    }
    // One loss is one event, although the obituary is sent several times and the connection breaks besides.
    expect_silence(&survivor, Duration::from_millis(50));
    times.sort_by(f64::total_cmp);
    (times, last)
}

#[test]
fn a_large_process_is_reported_before_its_memory_is_freed() {
    let (times, reason) = kill_times(&[(BALLAST, "1024")], 3);
    assert!(times[1] < 50.0, "kill to event: {times:?} ms");
    assert_eq!(reason, "peer died: obituary of its sentinel");
}

/// Not a test: prints how long it takes from a kill to the event. `TEST_KILLS` and `TEST_SIZES` (MB) choose.
#[test]
#[ignore = "a measurement"]
fn measure() {
    let kills = number("TEST_KILLS").unwrap_or(20) as usize;
    for size in setting("TEST_SIZES")
        .as_deref()
        .unwrap_or("10 1024")
        .split_whitespace()
    {
        for sentinel in [true, false] {
            let off = (!sentinel).then_some((NO_SENTINEL, "1"));
            let settings: Vec<_> = [(BALLAST, size)].into_iter().chain(off).collect();
            let (times, reason) = kill_times(&settings, kills);
            let at = |p: usize| times[(times.len() * p / 100).min(times.len() - 1)];
            say(format!(
                "{size} MB, sentinel {sentinel}: kill to event p50 {:.2} ms, p99 {:.2} ms of {kills} ({reason})",
                at(50),
                at(99),
            ));
        }
    }
}

#[test]
fn without_a_sentinel_the_transport_still_reports() {
    let (times, reason) = kill_times(&[(NO_SENTINEL, "1")], 1);
    assert!(times[0] < 5000.0, "{times:?}");
    assert!(!reason.contains("obituary"), "{reason}");
    let (times, reason) = kill_times(&[("CONNEX_RS_TEST_MUTE", "1")], 1);
    assert!(times[0] < 5000.0, "{times:?}");
    assert!(!reason.contains("obituary"), "{reason}");
}

#[test]
fn a_sentinel_that_is_killed_first_is_started_again() {
    let survivor = engine(0);
    let mut victim = Victim::connected(&survivor, &[(BALLAST, "1024")]);
    let first = victim.sentinel;
    signal(first, libc::SIGKILL);
    wait_until("the old one is gone", || !exists(first));
    // The process learns of it a moment later than we do.
    wait_until("another one watches", || {
        victim.tell("sentinel");
        victim.hear("sentinel ") != first.to_string()
    });
    victim.tell("stats");
    assert!(victim.hear("stats ").starts_with("running 1"));
    expect_silence(&survivor, Duration::from_millis(20));
    victim.kill();
    let (status, reason, _) = expect_failed(&survivor);
    assert_eq!(
        (status, reason.as_str()),
        (-2, "peer died: obituary of its sentinel")
    );
}

#[test]
fn both_killed_together_leave_the_transport() {
    let survivor = engine(0);
    let victim = Victim::connected(&survivor, &[]);
    signal(victim.sentinel, libc::SIGKILL);
    victim.kill();
    let (status, reason, _) = expect_failed(&survivor);
    assert_eq!(status, -2);
    assert!(!reason.contains("timeout"), "{reason}");
    expect_silence(&survivor, Duration::from_millis(50));
}

#[test]
fn ends_that_are_deaths_are_told_and_leave_nothing() {
    for how in ["exit", "abort", "exec"] {
        let survivor = engine(0);
        let mut victim = Victim::connected(&survivor, &[]);
        victim.tell(how);
        let (status, reason, _) = expect_failed(&survivor);
        assert_eq!(status, -2, "{how}: {reason}");
        assert!(!reason.contains("timeout"), "{how}: {reason}");
        let sentinel = victim.sentinel;
        wait_until("the sentinel ends", || !exists(sentinel));
        if how == "exec" {
            // It gave way to nobody: it lives on.
            assert_eq!(nice(victim.pid()), nice(0));
        }
        expect_silence(&survivor, Duration::from_millis(30));
    }
}

/// The priority of a process; of this one for 0.
fn nice(process: u32) -> i32 {
    // SAFETY: a plain call with numbers.
    unsafe { libc::getpriority(libc::PRIO_PROCESS, process) }
}

#[test]
fn a_process_that_is_being_dumped_is_dead() {
    let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    let dir = std::env::temp_dir().join(format!("connex-rs-core-{}", std::process::id()));
    std::fs::create_dir(&dir).expect("a directory for the core");
    let survivor = engine(0);
    let dir_text = dir.to_string_lossy().into_owned();
    let settings = [(BALLAST, "512"), (CORE, dir_text.as_str())];
    let mut victim = Victim::connected(&survivor, &settings);
    victim.tell("abort");
    let (status, reason, _) = expect_failed(&survivor);
    // Gigabytes of core are written meanwhile where it counts; here it is half of one.
    victim.kill();
    victim.child.wait().expect("a child of ours");
    std::fs::remove_dir_all(&dir).expect("cleaned up");
    assert_eq!(status, -2, "{reason}");
    if pattern.trim() == "core" {
        assert_eq!(
            reason,
            "peer died: its sentinel says that its core is being dumped"
        );
    }
    expect_silence(&survivor, Duration::from_millis(30));
}

#[test]
fn a_closed_engine_is_not_announced() {
    let survivor = engine(0);
    let mut victim = Victim::connected(&survivor, &[]);
    victim.tell("close");
    let (status, reason, _) = expect_failed(&survivor);
    assert_eq!((status, reason.as_str()), (-2, "closed by peer"));
    victim.hear("closed");
    let sentinel = victim.sentinel;
    wait_until("the sentinel ends", || !exists(sentinel));
    victim.kill();
    victim.end();
    expect_silence(&survivor, Duration::from_millis(50));
    assert_eq!(survivor.stats().obituaries, 0);
    assert_eq!(survivor.stats().obituaries_unknown, 0);
}

#[test]
fn a_forked_child_neither_announces_nor_hides_a_death() {
    let survivor = engine(0);
    let mut victim = Victim::connected(&survivor, &[(BALLAST, "1024")]);
    victim.tell("fork 20");
    victim.hear("forked ");
    // The child's end is nobody's death.
    expect_silence(&survivor, Duration::from_millis(100));
    victim.tell("fork 60000");
    let child: u32 = victim.hear("forked ").parse().expect("a number");
    victim.kill();
    let (status, reason, _) = expect_failed(&survivor);
    assert_eq!(
        (status, reason.as_str()),
        (-2, "peer died: obituary of its sentinel")
    );
    let sentinel = victim.sentinel;
    wait_until("the sentinel ends", || !exists(sentinel));
    signal(child, libc::SIGKILL);
}

// ---- where things are forbidden -------------------------------------------------------------------

#[test]
fn a_file_serves_where_memory_is_not_executable() {
    let survivor = engine(0);
    let settings = [("CONNEX_RS_TEST_NO_MEMFD", "1"), (BALLAST, "1024")];
    let victim = Victim::connected(&survivor, &settings);
    let program =
        std::fs::read_link(format!("/proc/{}/exe", victim.sentinel)).expect("its program");
    assert!(!program.to_string_lossy().contains("memfd"), "{program:?}");
    // Nothing of it is left on disk.
    assert!(
        program.to_string_lossy().ends_with(" (deleted)"),
        "{program:?}"
    );
    victim.kill();
    let (_, reason, _) = expect_failed(&survivor);
    assert_eq!(reason, "peer died: obituary of its sentinel");
}

#[test]
fn an_engine_that_cannot_have_a_sentinel_says_so_and_works() {
    let survivor = engine(0);
    let settings = [("CONNEX_RS_TEST_NO_SPAWN", "1")];
    let mut victim = Victim::connected(&survivor, &settings);
    victim.tell("stats");
    let stats = victim.hear("stats ");
    assert!(stats.starts_with("unavailable 0"), "{stats}");
    assert!(stats.contains("no sentinel: "), "{stats}");
    victim.kill();
    let (status, _, _) = expect_failed(&survivor);
    assert_eq!(status, -2);
}

// ---- obituaries that are none ---------------------------------------------------------------------

/// Where a survivor reads obituaries: the port of its listener, as nothing else has it.
fn obituary_address(survivor: &Engine) -> SocketAddr {
    format!("127.0.0.1:{}", survivor.port())
        .parse()
        .expect("an address")
}

#[test]
fn forged_obituaries_are_counted_and_do_nothing() {
    let survivor = engine(0);
    let victim = Victim::connected(&survivor, &[]);
    let forger = UdpSocket::bind("127.0.0.1:0").expect("bind");
    let mut datagram = [0u8; 48];
    datagram[..6].copy_from_slice(b"CNXO\x01\x01");
    for n in 0..1000u32 {
        datagram[24..28].copy_from_slice(&n.to_le_bytes());
        forger
            .send_to(&datagram[..(n as usize % 49)], obituary_address(&survivor))
            .expect("send");
        forger
            .send_to(&datagram, obituary_address(&survivor))
            .expect("send");
    }
    wait_until("they are counted", || {
        survivor.stats().obituaries_unknown > 100
    });
    expect_silence(&survivor, Duration::from_millis(50));
    assert_eq!(survivor.stats().obituaries, 0);
    // In spite of the flood a real one is read, or at the latest the connection's end.
    victim.kill();
    let (status, _, _) = expect_failed(&survivor);
    assert_eq!(status, -2);
}

#[test]
fn an_obituary_that_is_replayed_after_a_rejoin_does_nothing() {
    // A survivor of our own making stands in the way of the datagrams: it listens where the sentinel sends.
    let survivor = engine(0);
    let Some(tap) = Tap::between(&survivor) else {
        #[expect(clippy::print_stderr, reason = "a test that does not run says so")]
        let () =
            eprintln!("skipped: hearing other processes' datagrams needs a raw socket, so root");
        return;
    };
    let victim = Victim::connected(&survivor, &[]);
    victim.kill();
    let (_, reason, _) = expect_failed(&survivor);
    victim.end();
    let heard = tap.heard();
    assert!(!heard.is_empty(), "the tap heard nothing; reason: {reason}");
    let newcomer = Victim::connected(&survivor, &[]);
    let before = survivor.stats();
    for datagram in &heard {
        tap.send(datagram, obituary_address(&survivor));
    }
    wait_until("they are counted", || {
        survivor.stats().obituaries_unknown >= before.obituaries_unknown + heard.len() as u64
    });
    expect_silence(&survivor, Duration::from_millis(50));
    assert_eq!(survivor.stats().obituaries, before.obituaries);
    drop(newcomer);
}

/// Hears all datagrams to this host's loopback addresses (a raw socket: needs root).
struct Tap {
    raw: std::os::fd::OwnedFd,
    port: u16,
    socket: UdpSocket,
}

impl Tap {
    fn between(survivor: &Engine) -> Option<Self> {
        use std::os::fd::FromRawFd;
        // SAFETY: a new descriptor, or an error.
        let raw = unsafe {
            let fd = libc::socket(
                libc::AF_INET,
                libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
                libc::IPPROTO_UDP,
            );
            if fd < 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EPERM) {
                return None;
            }
            assert!(fd >= 0, "a raw socket: {}", std::io::Error::last_os_error());
            std::os::fd::OwnedFd::from_raw_fd(fd)
        };
        Some(Self {
            raw,
            port: survivor.port(),
            socket: UdpSocket::bind("127.0.0.1:0").expect("bind"),
        })
    }

    /// The obituaries for the survivor that have passed by.
    fn heard(&self) -> Vec<Vec<u8>> {
        use std::os::fd::AsRawFd;
        let mut heard = Vec::new();
        let until = Instant::now() + LONG;
        while heard.is_empty() && Instant::now() < until {
            let mut packet = [0u8; 2048];
            loop {
                // SAFETY: writes into the array.
                let len = unsafe {
                    libc::recv(
                        self.raw.as_raw_fd(),
                        packet.as_mut_ptr().cast(),
                        packet.len(),
                        0,
                    )
                };
                let Ok(len) = usize::try_from(len) else { break };
                // IPv4 header without options, then that of UDP.
                let to = u16::from_be_bytes([packet[22], packet[23]]);
                if to == self.port && packet[28..len].starts_with(b"CNXO") {
                    heard.push(packet[28..len].to_vec());
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        heard
    }

    fn send(&self, datagram: &[u8], to: SocketAddr) {
        self.socket.send_to(datagram, to).expect("send");
    }
}

// ---- stalls ---------------------------------------------------------------------------------------

#[test]
fn a_stopped_process_is_suspected_where_stall_is_set() {
    let survivor = engine(0);
    let mut victim = Victim::connected(&survivor, &[(STALL, "100")]);
    // Idle is not stalled.
    expect_silence(&survivor, Duration::from_millis(600));
    let at = now_ns();
    signal(victim.pid(), libc::SIGSTOP);
    let (status, reason, ts) = expect_failed(&survivor);
    assert_eq!(status, -3, "{reason}");
    assert!(reason.starts_with("stall timeout: "), "{reason}");
    let ms = (ts - at) as f64 / 1e6;
    assert!((75.0..1000.0).contains(&ms), "{ms} ms");
    signal(victim.pid(), libc::SIGCONT);
    // The other side hears that it was given up: a suspicion, too.
    victim.tell("event");
    let said = victim.hear("failed ");
    assert!(
        said.starts_with("-3 ") && said.contains("timeout"),
        "{said}"
    );
    // And it is as good as new.
    survivor.connect(&victim.url).expect("connect");
    expect_up(&survivor);
    expect_silence(&survivor, Duration::from_millis(300));
    // Death of the new link is told as ever.
    victim.kill();
    assert_eq!(expect_failed(&survivor).0, -2);
}

#[test]
fn a_pause_is_no_event_where_stall_is_not_set() {
    let survivor = engine(0);
    let victim = Victim::connected(&survivor, &[]);
    signal(victim.pid(), libc::SIGSTOP);
    expect_silence(&survivor, Duration::from_millis(700));
    signal(victim.pid(), libc::SIGCONT);
    expect_silence(&survivor, Duration::from_millis(200));
}

// ---- what is left behind --------------------------------------------------------------------------

#[test]
fn start_and_close_leave_no_process_thread_or_descriptor() {
    for job in ["cycles", "cycles_of_a_subreaper"] {
        let victim = Victim::start(job, &[]);
        let said = victim.hear("left ");
        assert_eq!(
            said, "0 0 0 0",
            "{job}: processes, threads, descriptors, zombies"
        );
    }
}

#[test]
#[ignore = "a job of the other tests"]
fn cycles() {
    count_what_is_left(100);
}

#[test]
#[ignore = "a job of the other tests"]
fn cycles_of_a_subreaper() {
    // SAFETY: orphans of this process's children become its own: as in process 1 of a container.
    let set = unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
    assert_eq!(set, 0);
    count_what_is_left(100);
}

fn entries(dir: &str) -> i64 {
    std::fs::read_dir(dir).map_or(0, |entries| entries.count() as i64)
}

/// Whether a thread of an engine is left in this process.
fn ours_run() -> bool {
    (std::fs::read_dir("/proc/self/task").expect("proc"))
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .any(|name| name.starts_with("connex-"))
}

fn count_what_is_left(cycles: usize) {
    let start = |seen: &mut Vec<u32>, wait| {
        let (a, b) = (engine(0), engine(1));
        if wait {
            seen.push(sentinel_of(&a));
            assert_eq!(sentinel_of(&b), seen[seen.len() - 1], "one for both");
        }
        if let SentinelState::Running { pid } = a.stats().sentinel {
            seen.push(pid);
        }
        a.close();
        b.close();
    };
    let mut seen = Vec::new();
    start(&mut seen, true);
    let count = || (entries("/proc/self/task"), entries("/proc/self/fd"));
    wait_until("the first one ends", || !exists(seen[0]) && !ours_run());
    let before = count();
    for cycle in 0..cycles {
        start(&mut seen, cycle % 4 == 0);
    }
    let until = Instant::now() + LONG / 2;
    while Instant::now() < until && (count() != before || seen.iter().any(|&pid| exists(pid))) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let after = count();
    // SAFETY: asks whether there is any child, dead or alive.
    let child = unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG | libc::__WALL) };
    say(format!(
        "left {} {} {} {}",
        seen.iter().filter(|&&pid| exists(pid)).count(),
        after.0 - before.0,
        after.1 - before.1,
        i32::from(child >= 0),
    ));
}

#[test]
fn the_application_sees_no_child() {
    let victim = Victim::start("watches_its_children", &[]);
    assert_eq!(victim.hear("children "), "0 0");
}

static CHILD_SIGNALS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

extern "C" fn count_child_signal(_: i32) {
    CHILD_SIGNALS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
}

#[test]
#[ignore = "a job of the other tests"]
fn watches_its_children() {
    // SAFETY: the handler touches an atomic only.
    unsafe { libc::signal(libc::SIGCHLD, count_child_signal as *const () as usize) };
    let mut children = 0;
    for _ in 0..10 {
        let engine = engine(0);
        while !matches!(engine.stats().sentinel, SentinelState::Running { .. }) {
            // SAFETY: the usual loop of a process that reaps whatever it has.
            children +=
                i32::from(unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } > 0);
        }
        engine.close();
        // SAFETY: as above.
        children +=
            i32::from(unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } > 0);
    }
    let signals = CHILD_SIGNALS.load(std::sync::atomic::Ordering::Relaxed);
    say(format!("children {children} {signals}"));
}

#[test]
fn a_parent_that_ignores_its_children_has_a_sentinel() {
    let victim = Victim::start("ignores_its_children", &[]);
    assert_eq!(victim.hear("lived "), "yes");
}

#[test]
#[ignore = "a job of the other tests"]
fn ignores_its_children() {
    // SAFETY: plain call.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    let engine = engine(0);
    let pid = sentinel_of(&engine);
    engine.close();
    wait_until("it ends", || !exists(pid));
    say("lived yes");
}

#[test]
fn the_sentinel_holds_and_costs_next_to_nothing() {
    let survivor = engine(0);
    let victim = Victim::connected(&survivor, &[(BALLAST, "64")]);
    let pid = victim.sentinel;
    let read = |what: &str| std::fs::read_to_string(format!("/proc/{pid}/{what}")).expect("alive");
    let status = read("status");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.expect("there").trim().to_owned()
    };
    assert_eq!(field("Name:"), "connex-sentinel");
    let kb: u64 = field("VmRSS:")
        .trim_end_matches(" kB")
        .parse()
        .expect("a number");
    assert!(kb < 2048, "{kb} kB resident");
    assert_eq!(field("Threads:"), "2");
    // A session of its own: Ctrl-C in the parent's terminal does not reach it.
    let stat = read("stat");
    let session = stat
        .rsplit(')')
        .next()
        .and_then(|rest| rest.split_whitespace().nth(3));
    assert_eq!(session, Some(pid.to_string().as_str()));
    let open: Vec<String> = (std::fs::read_dir(format!("/proc/{pid}/fd")).expect("alive"))
        .map(|fd| {
            fd.and_then(|fd| std::fs::read_link(fd.path()))
                .expect("alive")
        })
        .map(|path| path.to_string_lossy().into_owned())
        .filter(|path| path != "/dev/null" && !path.starts_with("/memfd:connex-sentinel-table"))
        .filter(|path| {
            !["status", "task"]
                .map(|of| format!("/proc/{}/{of}", victim.pid()))
                .contains(path)
        })
        .collect();
    assert!(open.is_empty(), "{open:?}");
    // SIGINT, SIGTERM and SIGHUP do not end it before its parent.
    for number in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        signal(pid, number);
    }
    let switches = || {
        let status = read("status");
        let line = status
            .lines()
            .find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
        line.expect("there")
            .trim()
            .parse::<u64>()
            .expect("a number")
    };
    let polls = open_dump_watch(pid);
    let before = switches();
    std::thread::sleep(Duration::from_millis(500));
    let woke = switches() - before;
    assert!(
        polls || woke <= 2,
        "woke {woke} times in half a second of nothing"
    );
}

/// Whether the sentinel has to poll for core dumps on this host.
fn open_dump_watch(pid: u32) -> bool {
    (std::fs::read_dir(format!("/proc/{pid}/fd")).expect("alive"))
        .filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok())
        .any(|path| path.ends_with("status"))
}

#[test]
fn ipv6_works_as_well() {
    let mut config = config(0);
    config.listen_ip = "::1".into();
    let survivor = Engine::start(config).expect("start");
    let victim = Victim::connected(&survivor, &[(BALLAST, "1024")]);
    victim.kill();
    let (_, reason, _) = expect_failed(&survivor);
    assert_eq!(reason, "peer died: obituary of its sentinel");
}
