//! The settings that the engine makes are those that UCX got, and explicit variables win: read back from UCX, in a process for each case,
//! because UCX takes its variables from the process.

use std::io::Write;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::process::Command;
use std::time::{Duration, Instant};

use connex_rs::transport::ucx::configure;
use connex_rs::transport::ucx::settings::{Facts, RdmaDevice, plan};
use connex_ucx::{
    ConnRequest, Context, Endpoint, EpId, Event, Features, Landing, Library, Protocol, Receiver,
    Worker,
};

/// Makes the test [`child`] the process of a case: of a worker for all peers ("main"), or for one of this host ("home").
const CHILD: &str = "CONNEX_RS_TEST_SETTINGS";
const LIMIT: Duration = Duration::from_secs(30);
const AM: u16 = 1;

/// What UCX says in a process with these variables.
struct Seen {
    text: String,
    minor: u32,
}

impl Seen {
    fn with(vars: &[(&str, &str)]) -> Self {
        Self::of("main", vars)
    }

    fn of(worker: &str, vars: &[(&str, &str)]) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "child", "--nocapture"]);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("UCX_") {
                command.env_remove(name);
            }
        }
        let output = command
            .env(CHILD, worker)
            .envs(vars.iter().copied())
            .output()
            .expect("started");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{vars:?}: {text}\n{errors}");
        let mut seen = Self { text, minor: 0 };
        seen.minor = seen.number("MINOR");
        seen
    }

    fn line(&self, name: &str) -> Option<&str> {
        let start = format!("{name}=");
        self.text.lines().find_map(|line| line.strip_prefix(&start))
    }

    fn number(&self, name: &str) -> u32 {
        let text = self.line(name).unwrap_or_else(|| panic!("no {name}"));
        text.parse().expect("a number")
    }

    /// The bytes of a segment: the longest header of a message is a little less.
    fn segment(&self) -> std::ops::Range<u32> {
        let header = self.number("MAX_HEADER");
        header..header + 200
    }
}

#[test]
fn child() {
    let Ok(worker) = std::env::var(CHILD) else {
        return;
    };
    let mut out = String::from("\n");
    let library = Library::load().expect("a UCX");
    let addr = [127, 0, 0, 1].into();
    let facts = Facts::gather(library, addr, Some("lo".into()));
    if worker == "rdma" {
        return with_rdma(facts);
    }
    let plan = plan(&facts).expect("a plan");
    let home = worker == "home" && plan.shared_memory;
    let settings = if home {
        &plan.same_host
    } else {
        &plan.settings
    };
    let (config, _environment) = configure(library, settings).expect("settings");
    out += &format!("MINOR={}\n{}\n", library.version().minor, config.print());
    let features = Features {
        rma: plan.one_sided,
    };
    let context = Context::new(&config, features).expect("a context");
    let mut a = Worker::new(&context).expect("a worker");
    let mut b = Worker::new(&context).expect("a worker");
    b.accept_messages(AM).expect("a handler");
    out += &format!("MAX_HEADER={}\n", a.max_header());
    let lanes = if home {
        join(&mut a, &mut b)
    } else {
        let listener = b.listen(SocketAddr::new(addr, 0)).expect("a listener");
        let socket = listener.socket().expect("a socket");
        // SAFETY: the listener keeps it open.
        let socket = unsafe { BorrowedFd::borrow_raw(socket) };
        let reused = rustix::net::sockopt::socket_reuseaddr(socket).expect("an option");
        out += &format!("REUSEADDR={}\n", u8::from(reused));
        let ab = a.connect(listener.addr(), None).expect("a connection");
        talk(&mut a, &mut b, &ab)
    };
    out += &format!("LANES={lanes}\n");
    std::io::stdout().write_all(out.as_bytes()).expect("told");
}

/// The settings for a host with RDMA, but for those that only its devices take: this UCX may have none.
fn with_rdma(mut facts: Facts) {
    facts.rdma = vec![RdmaDevice {
        name: "rdma0:1".into(),
        interfaces: vec!["lo".into()],
        software: false,
    }];
    facts.locked_limit = None;
    let mut settings = plan(&facts).expect("a plan").settings;
    settings.retain(|setting| setting.key.is_some());
    let (config, _environment) =
        configure(Library::load().expect("a UCX"), &settings).expect("settings");
    let text = format!("\nMINOR={}\n{}", facts.version.minor, config.print());
    std::io::stdout().write_all(text.as_bytes()).expect("told");
}

/// The lanes between two workers that know each other's addresses; none if UCX finds no way.
fn join(a: &mut Worker, b: &mut Worker) -> String {
    let (of_a, of_b) = (a.address(), b.address());
    let ab = a.join(&of_b.expect("an address"), "b");
    let ba = b.join(&of_a.expect("an address"), "a");
    match (ab, ba) {
        (Ok(ab), Ok(_)) => talk(a, b, &ab),
        _ => String::new(),
    }
}

/// The lanes of a connection, once a message has gone over it.
fn talk(a: &mut Worker, b: &mut Worker, ab: &Endpoint) -> String {
    let _ = ab.send(a, AM, b"x", Vec::new(), Protocol::Eager, 0);
    let mut heard = Heard(false);
    let (mut accepted, until) = (Vec::new(), Instant::now() + LIMIT);
    while !heard.0 {
        assert!(Instant::now() < until, "not connected");
        a.progress(&mut Heard(false));
        b.progress(&mut heard);
        while let Some(event) = b.next_event() {
            if let Event::ConnRequest(request) = event {
                accepted.push(ConnRequest::accept(request, b).expect("accepted"));
            }
        }
    }
    let lanes = ab.lanes(a).expect("lanes");
    let lanes = lanes
        .iter()
        .map(|lane| format!("{}/{}", lane.transport, lane.device));
    lanes.collect::<Vec<_>>().join(",")
}

/// Whether a message has come.
struct Heard(bool);

impl Receiver for Heard {
    fn message(&mut self, _: EpId, _: u16, _: &[u8], _: &[u8]) {
        self.0 = true;
    }

    fn rendezvous(&mut self, _: EpId, _: u16, _: &[u8], _: usize) -> Option<Landing> {
        None
    }
}

#[test]
fn the_engines_settings_reach_ucx() {
    // Named, because on a host with RDMA the engine leaves it open.
    let seen = Seen::with(&[("UCX_TLS", "tcp")]);
    assert_eq!(seen.line("UCX_TLS"), Some("tcp"));
    assert_eq!(seen.line("UCX_NET_DEVICES"), Some("lo"));
    let rails = ["UCX_MAX_EAGER_RAILS", "UCX_MAX_EAGER_LANES"];
    let rails = rails.iter().find_map(|name| seen.line(name));
    assert_eq!(rails, Some("1"));
    assert_eq!(seen.line("UCX_CM_USE_ALL_DEVICES"), Some("n"));
    if seen.minor >= 16 {
        assert_eq!(seen.line("UCX_PROTO_ENABLE"), Some("n"));
    }
    assert!(
        seen.segment().contains(&(256 << 10)),
        "{:?}",
        seen.segment()
    );
    assert_eq!(seen.number("REUSEADDR"), 1);
    let lanes = seen.line("LANES").expect("told");
    assert!(lanes.contains("tcp/lo"), "{lanes}");
}

#[test]
fn explicit_variables_win() {
    let mut vars = vec![
        ("UCX_TLS", "tcp"),
        ("UCX_NET_DEVICES", "lo,nowhere0"),
        ("UCX_CM_USE_ALL_DEVICES", "y"),
        ("UCX_TCP_TX_SEG_SIZE", "64k"),
        ("UCX_TCP_RX_SEG_SIZE", "64k"),
        ("UCX_TCP_CM_REUSEADDR", "n"),
    ];
    // Before that nobody sets it, and v2 ends the process.
    let proto = Seen::with(&[]).minor >= 16;
    if proto {
        vars.push(("UCX_PROTO_ENABLE", "y"));
    }
    let seen = Seen::with(&vars);
    for (name, value) in &vars[..3] {
        assert_eq!(seen.line(name), Some(*value), "{name}");
    }
    if proto {
        assert_eq!(seen.line("UCX_PROTO_ENABLE"), Some("y"));
    }
    assert!(seen.segment().contains(&(64 << 10)), "{:?}", seen.segment());
    assert_eq!(seen.number("REUSEADDR"), 0);
}

#[test]
fn ucx_takes_the_mode_of_fences_and_an_explicit_one_wins() {
    let seen = Seen::of("rdma", &[]);
    // 1.13 has none, and never waits.
    if seen.minor >= 14 {
        assert_eq!(seen.line("UCX_FENCE_MODE"), Some("weak"));
        let explicit = Seen::of("rdma", &[("UCX_FENCE_MODE", "strong")]);
        assert_eq!(explicit.line("UCX_FENCE_MODE"), Some("strong"));
    }
}

#[test]
fn a_worker_for_a_peer_of_this_host_shares_memory_and_an_explicit_no_is_heeded() {
    let ask = ("UCX_TLS", "tcp,sysv");
    let seen = Seen::of("home", &[ask]);
    // Those cannot have it with error handling.
    let able = seen.minor >= 16;
    let shared = |seen: &Seen| seen.line("LANES").expect("told").contains("sysv/");
    assert_eq!(shared(&seen), able);
    assert!(
        !shared(&Seen::with(&[ask])),
        "the queue of all is not shared"
    );
    if able {
        assert!(seen.segment().contains(&50176), "{:?}", seen.segment());
        let no = [ask, ("UCX_MM_ERROR_HANDLING", "n")];
        assert!(!shared(&Seen::of("home", &no)));
        for variable in ["UCX_SYSV_SEG_SIZE", "UCX_MM_SEG_SIZE"] {
            let other = Seen::of("home", &[ask, (variable, "9k")]).segment();
            assert!(other.contains(&(9 << 10)), "{variable}: {other:?}");
        }
    }
}
