//! A link that goes down: two network namespaces, a cable between them, a survivor in one and its peer in the other.
//!
//! All of it belongs to a process of its own and has no name: when that process ends, however it ends, the kernel takes the
//! namespaces and the cable away. It is told to end when the program that started it does.

use std::fs::File;
use std::net::UdpSocket;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use connex_rs::{Engine, LogicalId, PeerUrl, now_ns};
use rustix::process::{Signal, geteuid, set_parent_process_death_signal};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::{Deserialize, Serialize};

use super::child::{Role, Victim};
use super::{ATTEMPT, HEARTBEATS, MODEL, PATIENCE, VICTIMS, drain, only, read, wait_loss};
use crate::cli::{EngineArgs, LinkDownArgs};
use crate::control::Peer;
use crate::peers::{self, Page};

/// The survivor's address. The namespaces are connected to nothing else.
const HERE: &str = "10.77.0.1";
/// Its peer's address.
const THERE: &str = "10.77.0.2";
/// Both ends of the cable.
const WIRE: &str = "wire";

/// What the process with the namespaces has to say, as JSON on its standard output.
#[derive(Serialize, Deserialize, Default, Debug)]
pub(super) struct Seen {
    /// Why nothing could be measured here.
    pub(super) unable: Option<String>,
    /// The transport of the survivor.
    pub(super) transport: String,
    /// From each link down to the time stamp of the suspicion, in nanoseconds.
    pub(super) told_ns: Vec<u64>,
    /// What went wrong.
    pub(super) problems: Vec<String>,
}

/// Starts a process that takes a link down `count` times, and returns what it saw.
///
/// # Errors
/// If it fails; what cannot be had on this host is not an error but [`Seen::unable`].
pub(super) fn measure(engine: &EngineArgs, heartbeat_ms: u64, count: u64) -> anyhow::Result<Seen> {
    if !geteuid().is_root() {
        return Ok(unable("it makes network namespaces, which needs root"));
    }
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let output = Command::new(program)
        .arg("link-down")
        .args(engine.to_args())
        .args(["--heartbeat-ms", &heartbeat_ms.to_string()])
        .args(["--count", &count.to_string()])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start a process")?;
    ensure!(
        output.status.success(),
        "the process with the namespaces failed ({}); why is above",
        output.status
    );
    serde_json::from_slice(&output.stdout).context("the process with the namespaces said nothing")
}

fn unable(why: impl Into<String>) -> Seen {
    Seen {
        unable: Some(why.into()),
        ..Seen::default()
    }
}

/// The process with the namespaces; prints a [`Seen`].
///
/// # Errors
/// If engines cannot be started, or the link does not work when it is up.
pub(crate) fn run(args: &LinkDownArgs) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let role = Role {
        ip: THERE,
        engine: &args.engine,
        stage: VICTIMS,
        count: 1,
        heartbeat_ms: 0,
        ballast: 0,
        stall_ms: 0,
    };
    let seen = match Cable::with(|| Victim::spawn(&role, 0)) {
        Ok((cable, victim)) => take_down(args, &cable, &victim?)?,
        Err(why) => unable(format!("{why:#}")),
    };
    println!("{}", serde_json::to_string(&seen)?);
    Ok(())
}

fn take_down(args: &LinkDownArgs, cable: &Cable, victim: &Victim) -> anyhow::Result<Seen> {
    let peer = only(victim.peers()?)?;
    let id = peer.url.parse::<PeerUrl>()?.id;
    let mut config = args.engine.config(HERE, MODEL, 0, 1)?;
    config.heartbeat = Some(Duration::from_millis(args.heartbeat_ms));
    let survivor = Engine::start(config.with_environment()?)?;
    let mut seen = Seen {
        transport: survivor.stats().transport,
        ..Seen::default()
    };
    let mut page = Page::new();
    for _ in 0..args.count {
        reach(&survivor, &peer, &mut page)?;
        let (told_ns, reason) = cut(&survivor, cable, &id)?;
        seen.told_ns.push(told_ns);
        if !reason.starts_with(HEARTBEATS) {
            seen.problems
                .push(format!("a link that went down was taken for: {reason}"));
        }
    }
    survivor.close();
    Ok(seen)
}

/// Takes the link down, waits for the suspicion, and puts it up again; how long it took, and the words.
fn cut(survivor: &Engine, cable: &Cable, id: &LogicalId) -> anyhow::Result<(u64, String)> {
    drain(survivor);
    let down = now_ns();
    cable.set_up(false)?;
    let loss = wait_loss(survivor, id)?;
    cable.set_up(true)?;
    Ok((loss.ts_ns.saturating_sub(down), loss.reason))
}

/// Reads from the peer, again and again until the path works.
fn reach(survivor: &Engine, peer: &Peer, page: &mut Page) -> anyhow::Result<()> {
    let start = Instant::now();
    while let Err(error) = peers::read(survivor, peer, page, Some(ATTEMPT)) {
        if start.elapsed() > PATIENCE {
            return Err(error).context("the peer is not reached while the link is up");
        }
    }
    read(survivor, peer, page)
}

/// The cable between the two namespaces: this process is in the survivor's.
struct Cable {
    /// A socket of the survivor's namespace, to talk to its devices.
    socket: UdpSocket,
}

impl Cable {
    /// Makes both namespaces and the cable, runs `there` in the far one, and leaves this thread in the survivor's. It must be
    /// the only one of its process.
    ///
    /// # Errors
    /// What this host does not allow or have. `there` has not run then.
    fn with<T>(there: impl FnOnce() -> T) -> anyhow::Result<(Self, T)> {
        const WHAT: &str = "it makes network namespaces, which";
        separate(libc::CLONE_NEWNET | libc::CLONE_NEWNS)
            .with_context(|| format!("{WHAT} is not allowed here, also not to root"))?;
        let here = File::open("/proc/self/ns/net").context("no namespaces in /proc")?;
        // Mounts of ours are nobody else's business.
        mount(None, c"/", libc::MS_REC | libc::MS_PRIVATE)
            .context("cannot make the mounts private")?;
        separate(libc::CLONE_NEWNET).with_context(|| format!("{WHAT} is not allowed here"))?;
        let far = File::open("/proc/self/ns/net").context("no namespaces in /proc")?;
        let to = format!("/proc/{}/fd/{}", std::process::id(), here.as_raw_fd());
        ip(&[
            "link", "add", WIRE, "type", "veth", "peer", "name", WIRE, "netns", &to,
        ])?;
        configure(THERE)?;
        enter(&here)?;
        configure(HERE)?;
        enter(&far)?;
        see_devices()?;
        let result = there();
        // What runs there goes on seeing its own devices.
        separate(libc::CLONE_NEWNS).context("cannot separate the mounts")?;
        enter(&here)?;
        see_devices()?;
        let socket = UdpSocket::bind((HERE, 0)).context("cannot open a socket")?;
        Ok((Self { socket }, result))
    }

    /// Takes the survivor's end out, or puts it in again; returns when the kernel has done it.
    fn set_up(&self, up: bool) -> anyhow::Result<()> {
        // SAFETY: all zeroes are a valid request.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(WIRE.bytes()) {
            *to = from as libc::c_char;
        }
        let flags = libc::IFF_BROADCAST | libc::IFF_MULTICAST | if up { libc::IFF_UP } else { 0 };
        request.ifr_ifru.ifru_flags = flags as libc::c_short;
        // SAFETY: the request takes an `ifreq` that names a device, which it only reads.
        let result = unsafe {
            libc::ioctl(
                self.socket.as_raw_fd(),
                libc::SIOCSIFFLAGS as _,
                &raw const request,
            )
        };
        ensure!(
            result == 0,
            "cannot take the link down or up: {}",
            std::io::Error::last_os_error()
        );
        Ok(())
    }
}

/// Gives this namespace's end of the cable an address and sets it up.
fn configure(addr: &str) -> anyhow::Result<()> {
    let net = format!("{addr}/24");
    ip(&["addr", "add", &net, "dev", WIRE])?;
    ip(&["link", "set", "lo", "up"])?;
    ip(&["link", "set", WIRE, "up"])
}

/// Makes /sys show the devices of this namespace, and waits until the cable runs: UCX looks there once, when it starts.
fn see_devices() -> anyhow::Result<()> {
    mount(Some(c"sysfs"), c"/sys", 0).context("cannot mount sysfs")?;
    let state = format!("/sys/class/net/{WIRE}/operstate");
    let start = Instant::now();
    while std::fs::read_to_string(&state)?.trim() != "up" {
        ensure!(start.elapsed() < PATIENCE, "the cable does not come up");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn ip(words: &[&str]) -> anyhow::Result<()> {
    let output = match Command::new("ip").args(words).output() {
        Ok(output) => output,
        Err(error) => bail!("it needs the program ip ({error}): install iproute2"),
    };
    ensure!(
        output.status.success(),
        "ip {}: {}",
        words.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

/// Moves this thread into a network namespace.
fn enter(namespace: &File) -> anyhow::Result<()> {
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        .context("cannot enter a namespace")
}

/// Gives this process new namespaces of these kinds.
fn separate(kinds: libc::c_int) -> std::io::Result<()> {
    // SAFETY: takes flags only; nothing in this process depends on which namespaces it is in.
    match unsafe { libc::unshare(kinds) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Mounts a file system of this kind, or changes how what is there is mounted.
fn mount(
    kind: Option<&std::ffi::CStr>,
    target: &std::ffi::CStr,
    flags: libc::c_ulong,
) -> std::io::Result<()> {
    let kind = kind.map_or(std::ptr::null(), std::ffi::CStr::as_ptr);
    // SAFETY: each pointer is null, which the call allows for these, or a string that outlives the call.
    match unsafe { libc::mount(kind, target.as_ptr(), kind, flags, std::ptr::null()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
