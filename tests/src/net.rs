//! Two network namespaces joined by a cable.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Runs a command and expects that it succeeds.
///
/// # Panics
/// With what it printed, if it does not.
pub fn sh(words: &[&str]) -> String {
    let output = Command::new(words[0])
        .args(&words[1..])
        .output()
        .unwrap_or_else(|e| panic!("{words:?}: {e}: install it"));
    assert!(
        output.status.success(),
        "{words:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Expects that the lab can work here.
///
/// # Panics
/// If it cannot, with the reason.
pub fn need_root() {
    // SAFETY: only asks who we are.
    let user = unsafe { libc::geteuid() };
    assert_eq!(
        user, 0,
        "the fault lab makes network namespaces: run it as root"
    );
}

/// Which end of the cable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The survivor's.
    A,
    /// The victim's.
    B,
}

/// Two namespaces and the cable between them; gone when dropped, also by a panic.
pub struct Cable {
    names: [String; 2],
}

impl Cable {
    /// Makes both namespaces: 10.77.0.1 and 10.77.0.2.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        need_root();
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("cnx-{}-{n}{side}", std::process::id());
        let cable = Self {
            names: [name("a"), name("b")],
        };
        let [a, b] = [&cable.names[0], &cable.names[1]];
        sh(&["ip", "netns", "add", a]);
        sh(&["ip", "netns", "add", b]);
        sh(&[
            "ip", "-n", a, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns",
            b,
        ]);
        for (name, addr) in [(a, "10.77.0.1/24"), (b, "10.77.0.2/24")] {
            sh(&["ip", "-n", name, "addr", "add", addr, "dev", "wire"]);
            sh(&["ip", "-n", name, "link", "set", "lo", "up"]);
            sh(&["ip", "-n", name, "link", "set", "wire", "up"]);
        }
        cable
    }

    /// Adds a second cable, `wire2`, with 10.79.0.1 and 10.79.0.2.
    pub fn double(&self) {
        let [a, b] = [&self.names[0], &self.names[1]];
        sh(&[
            "ip", "-n", a, "link", "add", "wire2", "type", "veth", "peer", "name", "wire2",
            "netns", b,
        ]);
        for (name, addr) in [(a, "10.79.0.1/24"), (b, "10.79.0.2/24")] {
            sh(&["ip", "-n", name, "addr", "add", addr, "dev", "wire2"]);
            sh(&["ip", "-n", name, "link", "set", "wire2", "up"]);
        }
    }

    /// Bytes that a side has sent over a cable.
    ///
    /// # Panics
    /// If there is no such cable.
    pub fn sent(&self, side: Side, wire: &str) -> u64 {
        let text = self.sysfs(side, wire, "statistics/tx_bytes");
        text.parse().expect("a number")
    }

    /// Whether a side's end of a cable runs: the kernel says so some time after both ends are up, and UCX looks once.
    pub fn runs(&self, side: Side, wire: &str) -> bool {
        self.sysfs(side, wire, "operstate") == "up"
    }

    fn sysfs(&self, side: Side, wire: &str, what: &str) -> String {
        // The namespace's own sysfs: `ip netns exec` mounts it.
        let file = format!("/sys/class/net/{wire}/{what}");
        self.on(side, &["cat", &file]).trim().to_owned()
    }

    /// The name of a side's namespace.
    pub fn name(&self, side: Side) -> &str {
        &self.names[side as usize]
    }

    /// The address of a side.
    pub fn ip(side: Side) -> &'static str {
        match side {
            Side::A => "10.77.0.1",
            Side::B => "10.77.0.2",
        }
    }

    /// Runs a command on a side.
    pub fn on(&self, side: Side, words: &[&str]) -> String {
        let mut all = vec!["ip", "netns", "exec", self.name(side)];
        all.extend_from_slice(words);
        sh(&all)
    }

    /// Takes a side's end of the cable out, or puts it in again.
    pub fn link(&self, side: Side, up: bool) {
        let state = if up { "up" } else { "down" };
        self.on(side, &["ip", "link", "set", "wire", state]);
    }

    /// Drops all packets that come in at a side.
    pub fn drop_at(&self, side: Side) {
        self.on(side, &["nft", "add", "table", "inet", "cut"]);
        let chain = "{ type filter hook input priority 0 ; policy drop ; }";
        self.on(side, &["nft", "add", "chain", "inet", "cut", "in", chain]);
    }

    /// Drops what comes in at a side over TCP; datagrams pass.
    pub fn stall_at(&self, side: Side) {
        self.on(side, &["nft", "add", "table", "inet", "cut"]);
        let chain = "{ type filter hook input priority 0 ; }";
        self.on(side, &["nft", "add", "chain", "inet", "cut", "in", chain]);
        let rule = "nft add rule inet cut in meta l4proto tcp drop";
        let words: Vec<&str> = rule.split(' ').collect();
        self.on(side, &words);
    }

    /// Limits what both sides send to so many bytes a second each; 0: no limit.
    pub fn set_rate(&self, rate: u64) {
        for side in [Side::A, Side::B] {
            let mut words: Vec<&str> = "tc qdisc replace dev wire root".split(' ').collect();
            let limit = format!("{rate}bps");
            if rate == 0 {
                words.push("noqueue");
            } else {
                words.extend(["tbf", "rate", &limit, "burst", "128k", "latency", "50ms"]);
            }
            self.on(side, &words);
        }
    }

    /// Ends every TCP connection of a side to the other one: the kernel resets them.
    pub fn reset_at(&self, side: Side) {
        let other = match side {
            Side::A => Side::B,
            Side::B => Side::A,
        };
        self.on(side, &["ss", "-K", "dst", Self::ip(other)]);
    }

    /// Lets them through again.
    pub fn pass_at(&self, side: Side) {
        self.on(side, &["nft", "delete", "table", "inet", "cut"]);
    }
}

impl Default for Cable {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for name in &self.names {
            // Gone already or not: nothing else can be done in a drop.
            let _ = Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}
