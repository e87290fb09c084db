//! Which settings the engine makes for UCX, and why.
//!
//! [`plan`] is a pure function: from the version of UCX, what the host has, the `UCX_*` variables and the address
//! to listen on it makes a list of settings, each with its reason. The transport applies them to a configuration of its own,
//! `doctor` and `stats` show them. **An explicit variable always wins**: what is set is not set again.

use std::collections::BTreeMap;
use std::net::IpAddr;

use connex_ucx::Version;

use super::obstacles;

/// An RDMA device, as sysfs shows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RdmaDevice {
    /// Device and port as UCX writes them: `mlx5_0:1`.
    pub name: String,
    /// The network interfaces that belong to it.
    pub interfaces: Vec<String>,
    /// There is no hardware behind it (Soft-RoCE).
    pub software: bool,
}

/// What the rules look at.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Of the UCX that was loaded.
    pub version: Version,
    /// The process's variables that begin with `UCX_`.
    pub env: BTreeMap<String, String>,
    /// The address that peers are told: its interface is the one that matters.
    pub addr: IpAddr,
    /// The interface that carries `addr`; `None` if none does.
    pub interface: Option<String>,
    /// The RDMA ports that this process can use.
    pub rdma: Vec<RdmaDevice>,
    /// What keeps the process from RDMA devices that the host has, or will: each a sentence with the way out.
    pub obstacles: Vec<String>,
    /// How many bytes may be locked in memory, where RDMA is usable; `None`: as many as are wanted.
    pub locked_limit: Option<u64>,
    /// A CUDA driver is there, so UCX may be given GPU memory.
    pub cuda: bool,
}

impl Facts {
    /// The usable RDMA ports, for people.
    fn rdma_text(&self) -> String {
        let names: Vec<_> = self.rdma.iter().map(|d| d.name.as_str()).collect();
        names.join(", ")
    }

    /// Those of them that the variables allow.
    pub(super) fn allowed_rdma(&self) -> String {
        let list = self.env.get("UCX_NET_DEVICES").map(|l| Devices::parse(l));
        let names: Vec<_> = self
            .rdma
            .iter()
            .map(|d| d.name.as_str())
            .filter(|name| list.as_ref().is_none_or(|list| list.allows(name)))
            .collect();
        names.join(", ")
    }
}

/// One setting that the engine makes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Setting {
    /// The variable by which people know it, for example `UCX_TCP_TX_SEG_SIZE`.
    pub variable: String,
    /// The name by which this version's configuration takes it; `None`: only through the environment, which is set for
    /// the moment in which UCX reads it.
    pub key: Option<String>,
    /// The value.
    pub value: String,
    /// Why, in one sentence.
    pub reason: &'static str,
}

/// What the rules give.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Plan {
    /// In the order in which they are made.
    pub settings: Vec<Setting>,
    /// The same for the workers of peers of this host, if they are reached through shared memory; else none.
    pub same_host: Vec<Setting>,
    /// What somebody should know.
    pub warnings: Vec<String>,
    /// What keeps RDMA from working and should be put right.
    pub obstacles: Vec<String>,
    /// One-sided transfers by hardware are possible: the context asks for them.
    pub one_sided: bool,
    /// Peers on the same host are reached through shared memory.
    pub shared_memory: bool,
}

/// The first version whose configuration takes a transport's setting by its full name.
const FULL_NAMES: u32 = 17;
/// The first version on which shared memory can be used with peer error handling: in 1.13 messages of more than 100
/// bytes fail ("Invalid am_short_iov length").
const SHARED_MEMORY: u32 = 16;
/// The first version that can be told how to fence; before, a fence never waits.
const FENCE_MODES: u32 = 14;
/// The first version whose protocol v1 refuses puts (1.21 still makes them).
const PUTS_NEED_V2: u32 = 22;
/// Versions whose protocol v2 falls back to software for one-sided transfers with error handling: the owner's process takes part in
/// each. v1's work there.
pub(super) const V2_EMULATES: std::ops::Range<u32> = 16..19;
/// The size of a fragment in shared memory. A piece of [`SHM_PIECE`](super::SHM_PIECE) with its heads fits one; from 60k on
/// it is slow or corrupts data.
const SHM_SEGMENT: &str = "50176";
/// Fragments in the queue of a worker with one peer.
const SHM_QUEUE: &str = "32";
/// Fragments for which memory is made at a time.
const SHM_BUFFERS: &str = "48";

/// Decides the settings.
///
/// # Errors
/// A variable with which the engine cannot work: one that excludes the interface of the address, lets messages overtake each
/// other, or asks for a protocol that this version cannot write with. The text names it and the way out.
pub fn plan(facts: &Facts) -> Result<Plan, String> {
    check_devices(facts)?;
    check_order(facts)?;
    if facts.addr.is_ipv6() && facts.version.minor < SHARED_MEMORY {
        return Err(format!(
            "UCX {}.{} cannot be used with IPv6 (it dials the wrong family and crashes): use {}.{SHARED_MEMORY} or newer, an IPv4 address instead of {}, or transport \"tcp\"",
            facts.version.major, facts.version.minor, facts.version.major, facts.addr
        ));
    }
    let mut plan = Plan::default();
    let tls = Allowed::of(facts.env.get("UCX_TLS").map(String::as_str));
    plan.one_sided = !facts.rdma.is_empty() && tls.rdma() && devices_allow_rdma(facts);
    check_protocol(facts, plan.one_sided)?;
    check_locked_memory(facts, plan.one_sided)?;
    if tls.rdma() {
        plan.obstacles.clone_from(&facts.obstacles);
    }
    let old = facts.version.minor < SHARED_MEMORY;
    // 1.20.0 and 1.20.1 find no route over `lo` unless lanes are pinned.
    let pinned = facts.version.minor == 20
        && facts.version.release < 2
        && facts.interface.as_deref() == Some("lo");
    plan.shared_memory = !plan.one_sided && !old && tls.allows_shared_memory();

    let mut add = Adder::new(facts);
    if plan.one_sided {
        with_rdma(&mut add);
    } else {
        without_rdma(&mut add, &tls, pinned, plan.shared_memory);
    }
    everywhere(&mut add, &tls, plan.one_sided);
    plan.settings = add.settings;
    if plan.shared_memory {
        let mut add = Adder::new(facts);
        same_host(&mut add);
        plan.same_host = add.settings;
    }
    if !facts.rdma.is_empty() && !plan.one_sided {
        plan.warnings.push(format!(
            "RDMA devices ({}) are there, but UCX_TLS or UCX_NET_DEVICES rules them out",
            facts.rdma_text()
        ));
    }
    if !plan.one_sided && tls.wants_posix() {
        plan.warnings.push(
            "UCX_TLS names posix, which is not used: it attaches a peer's memory by the number of a descriptor, whatever that number stands \
             for by then. Peers of this host are reached over TCP; name sysv in its place to share memory with them"
                .to_owned(),
        );
    }
    if plan.one_sided && asks_for_v2(facts) && V2_EMULATES.contains(&facts.version.minor) {
        plan.warnings.push(format!(
            "UCX_PROTO_ENABLE=y: protocol v2 of UCX {} emulates one-sided transfers over RDMA in software, so they wait for the \
             owner's process and fail while it is stopped: unset it",
            facts.version
        ));
    }
    Ok(plan)
}

fn with_rdma(add: &mut Adder<'_>) {
    add.device(
        "IB_ALLOC",
        "mmap,heap",
        "transparent huge pages in the buffer pools stall a connect for up to 1.7 s",
    );
    add.device(
        "IB_PCI_RELAXED_ORDERING",
        "n",
        "a chain's flag must not pass its data on the way from the device to memory",
    );
    if add.facts.version.minor >= FENCE_MODES {
        add.plain(
            "FENCE_MODE",
            "weak",
            "a fence must not wait: it is used where one lane keeps the order, and a flush elsewhere",
        );
    }
    if V2_EMULATES.contains(&add.facts.version.minor) {
        add.plain(
            "PROTO_ENABLE",
            "n",
            "before 1.19 protocol v2 emulates one-sided transfers in software",
        );
    }
}

fn without_rdma(add: &mut Adder<'_>, tls: &Allowed, pinned: bool, shared_memory: bool) {
    // The engine stages GPU memory itself, so UCX sees none of it unless its user wants that.
    let cuda = add.facts.cuda && !tls.is_default() && tls.names("cuda_copy");
    if tls.is_default() {
        add.plain(
            "TLS",
            "tcp",
            "no RDMA here, and GPU memory is staged by the engine",
        );
    } else if let Some(others) = tls.without_shared_memory().filter(|_| shared_memory) {
        // What the variable allows is used, but not here.
        add.override_plain(
            "TLS",
            &others,
            "shared memory is for workers that have one peer each: a killed one leaves its queue stuck",
        );
    }
    if !cuda && add.facts.version.minor >= 16 {
        // With GPU memory v1 touches the device's pointers.
        add.plain(
            "PROTO_ENABLE",
            "n",
            "messages over TCP alone: protocol v1 connects in a fifth of the time",
        );
    }
    if !cuda || pinned {
        add.plain(
            "CM_USE_ALL_DEVICES",
            "n",
            "only the device of the connection is used, which connects faster",
        );
    }
}

/// The workers of peers of this host: they find each other without a network. Never protocol v1, which fails over shared memory
/// for messages of more than 100 bytes.
fn same_host(add: &mut Adder<'_>) {
    // Also where the variable allows more: that is for the others.
    add.override_plain(
        "TLS",
        "sysv",
        "peers of this host; never posix, which attaches memory by a descriptor's number, whoever has it by then",
    );
    add.plain(
        "MM_ERROR_HANDLING",
        "y",
        "otherwise error handling switches shared memory off",
    );
    add.sysv("SEG_SIZE", SHM_SEGMENT, "one piece fits one fragment");
    add.sysv(
        "ALLOC",
        "md",
        "where shared memory runs out UCX otherwise takes memory that is not shared, and crashes",
    );
    add.sysv(
        "RX_MAX_BUFS",
        SHM_BUFFERS,
        "a worker takes what it needs when it is made, and nothing later",
    );
    add.sysv(
        "FIFO_SIZE",
        SHM_QUEUE,
        "one sender's queue: what is under way stays in the cache",
    );
    add.sysv(
        "RX_BUFS_GROW",
        SHM_BUFFERS,
        "for the queue and some more; memory for 512 at a time takes milliseconds to make",
    );
}

/// With and without RDMA, for all workers.
fn everywhere(add: &mut Adder<'_>, tls: &Allowed, one_sided: bool) {
    if tls.names("tcp") {
        for name in ["TX_SEG_SIZE", "RX_SEG_SIZE"] {
            add.transport(
                "TCP_",
                name,
                "256k",
                "8 KB segments, the default, move large data at a third of the speed",
            );
        }
    }
    if add.facts.addr.is_ipv6() && tls.names("tcp") {
        add.transport(
            "TCP_",
            "AF_PRIO",
            "inet6,inet",
            "the engine's address is an IPv6 one; with IPv4 first UCX dials the wrong family and corrupts memory (1.16 to 1.22)",
        );
    }
    if EAGER_RAILS.iter().all(|name| !add.set(name)) {
        add.plain(
            EAGER_RAILS[0],
            "1",
            "over several devices at a time messages overtake each other; a file of UCX's settings may say otherwise",
        );
    }
    // UCX warns of a setting of a connection manager that it is told not to use.
    let managers = add.facts.env.get("UCX_SOCKADDR_TLS_PRIORITY");
    if managers.is_none_or(|list| list.trim() != "rdmacm") {
        add.manager(
            "TCP_CM_REUSEADDR",
            "y",
            "a restarted process can listen on its port again at once",
        );
    }
    pin_devices(add, one_sided);
}

fn pin_devices(add: &mut Adder<'_>, one_sided: bool) {
    let Some(interface) = add.facts.interface.clone() else {
        return;
    };
    if add.set("NET_DEVICES") {
        return;
    }
    let mut devices = Vec::new();
    if one_sided {
        let own = |d: &&RdmaDevice| d.interfaces.contains(&interface);
        let mine: Vec<_> = add
            .facts
            .rdma
            .iter()
            .filter(own)
            .map(|d| d.name.clone())
            .collect();
        // An address that belongs to none of them must not pin RDMA away.
        devices = if mine.is_empty() {
            add.facts.rdma.iter().map(|d| d.name.clone()).collect()
        } else {
            mine
        };
    }
    devices.push(interface);
    let value = devices.join(",");
    add.plain(
        "NET_DEVICES",
        &value,
        "no other interface is tried or listened on",
    );
}

/// Refuses an address whose interface the user's list leaves out.
fn check_devices(facts: &Facts) -> Result<(), String> {
    let (Some(list), Some(interface)) = (facts.env.get("UCX_NET_DEVICES"), &facts.interface) else {
        return Ok(());
    };
    let devices = Devices::parse(list);
    if devices.allows(interface) {
        return Ok(());
    }
    // The interface of a listed RDMA device needs no entry of its own: the device carries the connection.
    let by_device = facts
        .rdma
        .iter()
        .any(|d| devices.allows(&d.name) && d.interfaces.contains(interface));
    if by_device {
        return Ok(());
    }
    Err(format!(
        "UCX_NET_DEVICES={list} leaves out {interface}, the interface that carries {}: add {interface} to the list, unset it, or \
         listen on an address of a listed device",
        facts.addr
    ))
}

/// On how many devices one eager message may be sent at a time, under both of its names.
const EAGER_RAILS: [&str; 2] = ["MAX_EAGER_RAILS", "MAX_EAGER_LANES"];

/// Refuses what breaks the order of frames, on which chains, signals and messages rest (I3). Rails of other kinds of
/// transfers are harmless: rendezvous is not used, and one-sided writes over several lanes are fenced by their completions.
fn check_order(facts: &Facts) -> Result<(), String> {
    for variable in EAGER_RAILS.map(|name| format!("UCX_{name}")) {
        if let Some(value) = facts.env.get(&variable)
            && value.trim() != "1"
        {
            return Err(format!(
                "{variable}={value} lets messages overtake each other on their way over several devices, and chains and signals \
                 rest on their order: unset it or set it to 1"
            ));
        }
    }
    Ok(())
}

/// Refuses a protocol with which this version cannot put: a chain's flag and a signal stand for writes that are in place.
fn check_protocol(facts: &Facts, one_sided: bool) -> Result<(), String> {
    let version = facts.version;
    let asked = facts.env.get("UCX_PROTO_ENABLE").map(|value| value.trim());
    let no = matches!(asked, Some("n" | "no" | "off" | "0"));
    if one_sided && no && version.minor >= PUTS_NEED_V2 {
        return Err(format!(
            "UCX_PROTO_ENABLE=n: UCX {version} cannot write over RDMA with protocol v1, so no data could be in place before its flag: unset it, or set it to y"
        ));
    }
    if asks_for_v2(facts) && version.minor < SHARED_MEMORY {
        return Err(format!(
            "UCX_PROTO_ENABLE=y: protocol v2 of UCX {version} ends the process when it connects: unset it, or use UCX {}.{SHARED_MEMORY} or newer",
            version.major
        ));
    }
    Ok(())
}

fn asks_for_v2(facts: &Facts) -> bool {
    let asked = facts.env.get("UCX_PROTO_ENABLE").map(|value| value.trim());
    matches!(asked, Some("y" | "yes" | "on" | "1"))
}

/// Refuses RDMA where UCX would not even get its own buffers.
fn check_locked_memory(facts: &Facts, one_sided: bool) -> Result<(), String> {
    let too_low = |limit: &u64| one_sided && *limit < obstacles::LOCKED_NEEDED;
    match facts.locked_limit.filter(too_low) {
        Some(limit) => Err(format!(
            "{}; or do without RDMA: transport \"tcp\"",
            obstacles::locked_memory(Some(limit)).unwrap_or_default()
        )),
        None => Ok(()),
    }
}

fn devices_allow_rdma(facts: &Facts) -> bool {
    match facts.env.get("UCX_NET_DEVICES") {
        Some(list) => {
            let devices = Devices::parse(list);
            facts.rdma.iter().any(|d| devices.allows(&d.name))
        }
        None => true,
    }
}

/// A list of devices as UCX reads it.
struct Devices<'a> {
    negated: bool,
    names: Vec<&'a str>,
}

impl<'a> Devices<'a> {
    fn parse(list: &'a str) -> Self {
        let (negated, list) = match list.strip_prefix('^') {
            Some(rest) => (true, rest),
            None => (false, list),
        };
        Self {
            negated,
            names: list
                .split(',')
                .map(str::trim)
                .filter(|n| !n.is_empty())
                .collect(),
        }
    }

    fn allows(&self, device: &str) -> bool {
        let matches = |name: &&str| match name.strip_suffix('*') {
            Some(prefix) => device.starts_with(prefix),
            // A device without a port means its first.
            None => *name == "all" || *name == device || device.strip_suffix(":1") == Some(name),
        };
        self.names.iter().any(matches) != self.negated
    }
}

/// What stands for both kinds of shared memory in `UCX_TLS`.
const SHARED_MEMORY_GROUPS: &[&str] = &["sm", "shm", "mm"];

/// What `UCX_TLS` allows.
enum Allowed {
    Default,
    Only(Vec<String>),
    Without(Vec<String>),
}

impl Allowed {
    fn of(value: Option<&str>) -> Self {
        let list = |text: &str| {
            text.split(',')
                .map(|t| t.trim().to_owned())
                .filter(|t| !t.is_empty())
                .collect()
        };
        match value {
            None => Allowed::Default,
            Some(text) if text.trim() == "all" => Allowed::Without(Vec::new()),
            Some(text) => match text.strip_prefix('^') {
                Some(rest) => Allowed::Without(list(rest)),
                None => Allowed::Only(list(text)),
            },
        }
    }

    fn is_default(&self) -> bool {
        matches!(self, Allowed::Default)
    }

    /// Whether this transport may be used, by its own name or that of a group.
    fn names(&self, transport: &str) -> bool {
        let groups: &[&str] = match transport {
            "sysv" => SHARED_MEMORY_GROUPS,
            "cuda_copy" => &["cuda", "gpu"],
            _ => &[],
        };
        let named = |list: &[String]| {
            list.iter().any(|t| {
                let t = t.as_str();
                t == "all" || t == transport || groups.contains(&t)
            })
        };
        match self {
            Allowed::Default => true,
            Allowed::Only(list) => named(list),
            Allowed::Without(list) => !named(list),
        }
    }

    fn rdma(&self) -> bool {
        const RDMA: [&str; 16] = [
            "ib", "rc", "rc_x", "rc_v", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5", "ud",
            "ud_x", "ud_v", "ud_verbs", "ud_mlx5", "srd", "gga",
        ];
        match self {
            Allowed::Default => true,
            Allowed::Only(list) => list
                .iter()
                .any(|t| t == "all" || RDMA.contains(&t.as_str())),
            Allowed::Without(list) => !list.iter().any(|t| t == "ib" || t == "rc"),
        }
    }

    /// Whether shared memory may be used, in its safe form only: sysv, with TCP to connect by.
    fn allows_shared_memory(&self) -> bool {
        self.names("tcp") && self.names("sysv")
    }

    /// Whether a list asks for the form of shared memory that is not used, and not for the one that is.
    fn wants_posix(&self) -> bool {
        let Allowed::Only(list) = self else {
            return false;
        };
        list.iter().any(|t| t == "posix") && !self.names("sysv")
    }

    /// A list that names shared memory, without it.
    fn without_shared_memory(&self) -> Option<String> {
        let Allowed::Only(list) = self else {
            return None;
        };
        let shared = |t: &str| ["sysv", "posix"].contains(&t) || SHARED_MEMORY_GROUPS.contains(&t);
        let others: Vec<_> = list.iter().filter(|t| !shared(t)).cloned().collect();
        (others.len() < list.len()).then(|| others.join(","))
    }
}

struct Adder<'a> {
    facts: &'a Facts,
    settings: Vec<Setting>,
}

impl<'a> Adder<'a> {
    fn new(facts: &'a Facts) -> Self {
        Self {
            facts,
            settings: Vec::new(),
        }
    }

    fn set(&self, name: &str) -> bool {
        self.facts.env.contains_key(&format!("UCX_{name}"))
    }

    /// A setting that goes by one name in every version.
    fn plain(&mut self, name: &str, value: &str, reason: &'static str) {
        self.push(name, Some(name.to_owned()), value, reason);
    }

    /// A setting of a transport: before 1.17 the configuration takes it without the transport's name.
    fn transport(&mut self, prefix: &str, name: &str, value: &str, reason: &'static str) {
        let full = format!("{prefix}{name}");
        let key = if self.full_names() {
            full.clone()
        } else {
            name.to_owned()
        };
        self.push(&full, Some(key), value, reason);
    }

    /// A setting of shared memory, which the user may name for all kinds of it, as the configuration does before 1.17. (Without a
    /// prefix 1.16 takes it without a word, and changes nothing.)
    fn sysv(&mut self, name: &str, value: &str, reason: &'static str) {
        let general = format!("MM_{name}");
        if self.set(&general) {
            return;
        }
        let full = format!("SYSV_{name}");
        let key = if self.full_names() {
            full.clone()
        } else {
            general
        };
        self.push(&full, Some(key), value, reason);
    }

    /// A setting of a connection manager: before 1.17 the configuration does not take it at all.
    fn manager(&mut self, name: &str, value: &str, reason: &'static str) {
        self.push(
            name,
            self.full_names().then(|| name.to_owned()),
            value,
            reason,
        );
    }

    /// A setting of RDMA devices: where UCX is built without them, 1.22's configuration refuses the name as unknown.
    fn device(&mut self, name: &str, value: &str, reason: &'static str) {
        self.push(name, None, value, reason);
    }

    fn full_names(&self) -> bool {
        self.facts.version.minor >= FULL_NAMES
    }

    /// A setting that stands although the variable is set, in its spirit.
    fn override_plain(&mut self, name: &str, value: &str, reason: &'static str) {
        self.insert(name, Some(name.to_owned()), value, reason);
    }

    fn push(&mut self, name: &str, key: Option<String>, value: &str, reason: &'static str) {
        if !self.set(name) {
            self.insert(name, key, value, reason);
        }
    }

    fn insert(&mut self, name: &str, key: Option<String>, value: &str, reason: &'static str) {
        self.settings.push(Setting {
            variable: format!("UCX_{name}"),
            key,
            value: value.to_owned(),
            reason,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(minor: u32) -> Facts {
        Facts {
            version: Version {
                major: 1,
                minor,
                release: 0,
            },
            env: BTreeMap::new(),
            addr: "127.0.0.1".parse().expect("an address"),
            interface: Some("lo".into()),
            rdma: Vec::new(),
            obstacles: Vec::new(),
            locked_limit: None,
            cuda: false,
        }
    }

    fn hca() -> RdmaDevice {
        RdmaDevice {
            name: "mlx5_0:1".into(),
            interfaces: vec!["ib0".into()],
            software: false,
        }
    }

    fn with(mut facts: Facts, vars: &[(&str, &str)]) -> Facts {
        facts
            .env
            .extend(vars.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())));
        facts
    }

    fn value(plan: &Plan, variable: &str) -> Option<String> {
        plan.settings
            .iter()
            .find(|s| s.variable == variable)
            .map(|s| s.value.clone())
    }

    fn at_home(plan: &Plan, variable: &str) -> Option<String> {
        plan.same_host
            .iter()
            .find(|s| s.variable == variable)
            .map(|s| s.value.clone())
    }

    #[test]
    fn without_rdma_other_hosts_are_reached_by_tcp_and_this_one_through_shared_memory() {
        let plan = plan(&facts(22)).expect("a plan");
        assert!(plan.shared_memory && !plan.one_sided && plan.warnings.is_empty());
        assert_eq!(value(&plan, "UCX_TLS").as_deref(), Some("tcp"));
        assert_eq!(value(&plan, "UCX_MM_ERROR_HANDLING"), None);
        assert_eq!(value(&plan, "UCX_PROTO_ENABLE").as_deref(), Some("n"));
        assert_eq!(value(&plan, "UCX_CM_USE_ALL_DEVICES").as_deref(), Some("n"));
        assert_eq!(at_home(&plan, "UCX_TLS").as_deref(), Some("sysv"));
        let error_handling = "UCX_MM_ERROR_HANDLING";
        assert_eq!(at_home(&plan, error_handling).as_deref(), Some("y"));
        // It would break it.
        assert_eq!(at_home(&plan, "UCX_PROTO_ENABLE"), None);
        assert_eq!(value(&plan, "UCX_NET_DEVICES").as_deref(), Some("lo"));
        assert_eq!(value(&plan, "UCX_TCP_TX_SEG_SIZE").as_deref(), Some("256k"));
        assert_eq!(value(&plan, "UCX_MAX_EAGER_RAILS").as_deref(), Some("1"));
    }

    #[test]
    fn what_only_the_environment_can_say_is_not_for_workers_made_later() {
        for minor in [16, 22] {
            let plan = plan(&facts(minor)).expect("a plan");
            assert!(plan.shared_memory && plan.same_host.iter().all(|s| s.key.is_some()));
        }
    }

    #[test]
    fn shared_memory_in_a_list_is_for_peers_of_this_host_alone() {
        for (tls, others) in [
            ("sysv,tcp,self", Some("tcp,self")),
            ("tcp,sm", Some("tcp")),
            ("shm,posix,tcp", Some("tcp")),
            ("all", None),
            ("^cuda", None),
        ] {
            let plan = plan(&with(facts(22), &[("UCX_TLS", tls)])).expect("a plan");
            assert!(plan.shared_memory && plan.warnings.is_empty(), "{tls}");
            assert_eq!(value(&plan, "UCX_TLS").as_deref(), others, "{tls}");
            assert_eq!(value(&plan, "UCX_MM_ERROR_HANDLING"), None, "{tls}");
            assert_eq!(at_home(&plan, "UCX_TLS").as_deref(), Some("sysv"), "{tls}");
        }
    }

    #[test]
    fn with_rdma_there_is_no_shared_memory() {
        let mut facts = facts(22);
        facts.rdma = vec![hca()];
        let plan = plan(&facts).expect("a plan");
        assert!(plan.one_sided && !plan.shared_memory && plan.same_host.is_empty());
    }

    #[test]
    fn a_fence_between_writes_never_waits() {
        let of = |minor, vars: &[(&str, &str)]| {
            let mut facts = with(facts(minor), vars);
            facts.rdma = vec![hca()];
            value(&plan(&facts).expect("a plan"), "UCX_FENCE_MODE")
        };
        for minor in [14, 16, 19, 22] {
            assert_eq!(of(minor, &[]).as_deref(), Some("weak"));
            assert_eq!(of(minor, &[("UCX_FENCE_MODE", "strong")]), None);
        }
        // It has no modes, and its fence does not wait.
        assert_eq!(of(13, &[]), None);
        let without = plan(&facts(22)).expect("a plan");
        assert_eq!(value(&without, "UCX_FENCE_MODE"), None);
    }

    #[test]
    fn old_versions_have_no_shared_memory_and_odd_ones_pinned_devices() {
        for vars in [&[][..], &[("UCX_TLS", "tcp,sysv")]] {
            let old = plan(&with(facts(13), vars)).expect("a plan");
            assert!(!old.shared_memory && old.same_host.is_empty());
            // 1.13 aborts with v2 and knows v1 only.
            assert_eq!(value(&old, "UCX_PROTO_ENABLE"), None);
            let odd = plan(&with(facts(20), vars)).expect("a plan");
            assert!(odd.shared_memory);
            assert_eq!(value(&odd, "UCX_CM_USE_ALL_DEVICES").as_deref(), Some("n"));
            assert_eq!(value(&odd, "UCX_PROTO_ENABLE").as_deref(), Some("n"));
        }
    }

    #[test]
    fn keys_follow_the_version() {
        let key = |minor, variable: &str| {
            let plan = plan(&facts(minor)).expect("a plan");
            let setting = plan.settings.into_iter().find(|s| s.variable == variable);
            setting.expect("a setting").key
        };
        assert_eq!(
            key(16, "UCX_TCP_TX_SEG_SIZE").as_deref(),
            Some("TX_SEG_SIZE")
        );
        assert_eq!(
            key(18, "UCX_TCP_TX_SEG_SIZE").as_deref(),
            Some("TCP_TX_SEG_SIZE")
        );
        assert_eq!(key(16, "UCX_TCP_CM_REUSEADDR"), None);
        let sysv = |minor, vars: &[(&str, &str)]| {
            let plan = plan(&with(facts(minor), vars)).expect("a plan");
            let mut settings = plan.same_host.into_iter();
            settings.find(|s| s.variable == "UCX_SYSV_SEG_SIZE")?.key
        };
        assert_eq!(sysv(16, &[]).as_deref(), Some("MM_SEG_SIZE"));
        assert_eq!(sysv(18, &[]).as_deref(), Some("SYSV_SEG_SIZE"));
        for variable in ["UCX_SYSV_SEG_SIZE", "UCX_MM_SEG_SIZE"] {
            assert_eq!(sysv(18, &[(variable, "9k")]), None, "{variable}");
        }
        assert_eq!(
            key(18, "UCX_TCP_CM_REUSEADDR").as_deref(),
            Some("TCP_CM_REUSEADDR")
        );
    }

    #[test]
    fn what_the_user_set_is_left_alone() {
        let vars = [
            ("UCX_TLS", "tcp"),
            ("UCX_TCP_TX_SEG_SIZE", "64k"),
            ("UCX_NET_DEVICES", "lo,eth0"),
            ("UCX_TCP_CM_REUSEADDR", "n"),
        ];
        let plan = plan(&with(facts(22), &vars)).expect("a plan");
        for (name, _) in vars {
            assert_eq!(value(&plan, name), None, "{name}");
        }
        assert!(!plan.shared_memory);
        assert_eq!(value(&plan, "UCX_TCP_RX_SEG_SIZE").as_deref(), Some("256k"));
        assert_eq!(value(&plan, "UCX_PROTO_ENABLE").as_deref(), Some("n"));
    }

    #[test]
    fn posix_is_never_used_and_who_asks_for_it_is_told() {
        for tls in ["tcp,posix", "posix", "^sysv", "sm", "^tcp"] {
            let plan = plan(&with(facts(22), &[("UCX_TLS", tls)])).expect("a plan");
            assert!(!plan.shared_memory && plan.same_host.is_empty(), "{tls}");
            assert_eq!(value(&plan, "UCX_MM_ERROR_HANDLING"), None, "{tls}");
            assert_eq!(value(&plan, "UCX_TLS"), None, "{tls}");
            let told = plan.warnings.iter().any(|w| w.contains("name sysv"));
            assert_eq!(told, tls.contains("posix"), "{tls}: {:?}", plan.warnings);
        }
    }

    #[test]
    fn an_address_that_the_list_leaves_out_is_refused_by_name() {
        let mut facts = with(facts(22), &[("UCX_NET_DEVICES", "mlx5_0:1,eth0")]);
        let text = plan(&facts).expect_err("lo is not listed");
        assert!(
            text.contains("lo, the interface that carries 127.0.0.1"),
            "{text}"
        );
        facts.interface = Some("ib0".into());
        facts.addr = "10.1.1.1".parse().expect("an address");
        assert!(
            plan(&facts).is_err(),
            "nothing says that ib0 is the device's"
        );
        facts.rdma = vec![hca()];
        assert!(
            plan(&facts).is_ok_and(|p| p.one_sided),
            "ib0 is the device's own interface"
        );
        let negated = with(facts, &[("UCX_NET_DEVICES", "^ib0,docker0")]);
        // The negated list does not leave out the device.
        assert!(plan(&negated).is_ok());
    }

    #[test]
    fn what_breaks_the_order_of_messages_is_refused_by_name() {
        let one = plan(&facts(22)).expect("a plan");
        assert_eq!(value(&one, "UCX_MAX_EAGER_RAILS").as_deref(), Some("1"));
        for variable in ["UCX_MAX_EAGER_RAILS", "UCX_MAX_EAGER_LANES"] {
            for wrong in ["2", "auto", "inf"] {
                let text = plan(&with(facts(22), &[(variable, wrong)])).expect_err("refused");
                assert!(
                    text.contains(&format!("{variable}={wrong}")) && text.contains("set it to 1"),
                    "{text}"
                );
            }
            let explicit = plan(&with(facts(22), &[(variable, "1")])).expect("a plan");
            assert_eq!(value(&explicit, "UCX_MAX_EAGER_RAILS"), None);
        }
        // Rails of other kinds do not carry frames.
        let others = [("UCX_MAX_RNDV_RAILS", "2"), ("UCX_MAX_RMA_RAILS", "2")];
        assert!(plan(&with(facts(22), &others)).is_ok());
    }

    #[test]
    fn rdma_is_pinned_with_its_interface_and_never_away() {
        let mut facts = facts(22);
        facts.rdma = vec![
            hca(),
            RdmaDevice {
                name: "mlx5_1:1".into(),
                interfaces: vec!["ib1".into()],
                software: false,
            },
        ];
        facts.interface = Some("ib1".into());
        let own = plan(&facts).expect("a plan");
        assert!(own.one_sided);
        assert_eq!(
            value(&own, "UCX_NET_DEVICES").as_deref(),
            Some("mlx5_1:1,ib1")
        );
        assert_eq!(value(&own, "UCX_IB_ALLOC").as_deref(), Some("mmap,heap"));
        let ordering = "UCX_IB_PCI_RELAXED_ORDERING";
        assert_eq!(value(&own, ordering).as_deref(), Some("n"));
        let explicit = plan(&with(facts.clone(), &[(ordering, "y")])).expect("a plan");
        assert_eq!(value(&explicit, ordering), None, "set explicitly");
        // A UCX without verbs knows neither: only by the environment does it start all the same.
        let keys = own
            .settings
            .iter()
            .filter(|s| s.variable.starts_with("UCX_IB_"));
        assert!(keys.clone().count() == 2 && keys.clone().all(|s| s.key.is_none()));
        assert_eq!(value(&own, "UCX_TLS"), None);
        facts.interface = Some("eth0".into());
        let other = plan(&facts).expect("a plan");
        assert_eq!(
            value(&other, "UCX_NET_DEVICES").as_deref(),
            Some("mlx5_0:1,mlx5_1:1,eth0")
        );
        let without = plan(&with(facts, &[("UCX_TLS", "tcp")])).expect("a plan");
        assert!(
            !without.one_sided && without.warnings[0].contains("mlx5_0:1"),
            "{without:?}"
        );
    }

    #[test]
    fn a_protocol_that_cannot_write_is_refused_by_name() {
        let asked = |minor, value: &str, rdma: bool| {
            let mut facts = with(facts(minor), &[("UCX_PROTO_ENABLE", value)]);
            if rdma {
                facts.rdma = vec![hca()];
            }
            plan(&facts)
        };
        let text = asked(22, "n", true).expect_err("v1 of 1.22 has no puts");
        for part in ["UCX_PROTO_ENABLE=n", "1.22", "set it to y"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(asked(23, "no", true).is_err());
        assert!(asked(22, "n", false).is_ok(), "messages work in v1");
        assert!(asked(21, "n", true).is_ok() && asked(22, "y", true).is_ok());
        let text = asked(13, "y", false).expect_err("v2 of 1.13 aborts");
        for part in ["UCX_PROTO_ENABLE=y", "1.13", "1.16 or newer"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(asked(13, "n", true).is_ok() && asked(16, "y", true).is_ok());
    }

    #[test]
    fn a_protocol_that_emulates_rdma_is_told() {
        let warnings = |minor, value| {
            let mut facts = with(facts(minor), &[("UCX_PROTO_ENABLE", value)]);
            facts.rdma = vec![hca()];
            plan(&facts).expect("a plan").warnings
        };
        for minor in [16, 18] {
            let told = warnings(minor, "y");
            assert!(told.len() == 1 && told[0].contains("unset it"), "{told:?}");
            assert!(warnings(minor, "n").is_empty());
        }
        assert!(warnings(22, "y").is_empty());
        // Without RDMA nothing is emulated.
        let tcp = with(facts(18), &[("UCX_PROTO_ENABLE", "y")]);
        assert!(plan(&tcp).expect("a plan").warnings.is_empty());
    }

    #[test]
    fn tcp_s_connection_manager_is_set_where_it_is_used() {
        let reuse = |list| {
            let facts = with(facts(18), &[("UCX_SOCKADDR_TLS_PRIORITY", list)]);
            value(&plan(&facts).expect("a plan"), "UCX_TCP_CM_REUSEADDR")
        };
        assert_eq!(reuse("rdmacm"), None);
        assert_eq!(reuse("rdmacm,tcp").as_deref(), Some("y"));
    }

    #[test]
    fn rdma_without_locked_memory_is_refused_with_the_way_out() {
        let mut facts = facts(22);
        facts.locked_limit = Some(8 << 20);
        assert!(plan(&facts).is_ok(), "no RDMA");
        facts.rdma = vec![hca()];
        let text = plan(&facts).expect_err("too little");
        for part in ["8192 KiB", "ulimit -l unlimited", "transport \"tcp\""] {
            assert!(text.contains(part), "{text}");
        }
        assert!(plan(&with(facts.clone(), &[("UCX_TLS", "tcp")])).is_ok());
        facts.locked_limit = Some(64 << 20);
        assert!(plan(&facts).is_ok());
        facts.locked_limit = None;
        assert!(plan(&facts).is_ok());
    }

    #[test]
    fn obstacles_are_told_where_rdma_is_wanted() {
        let mut facts = facts(22);
        facts.obstacles = vec!["no device file".into()];
        assert_eq!(plan(&facts).expect("a plan").obstacles, facts.obstacles);
        let tcp = plan(&with(facts, &[("UCX_TLS", "tcp")])).expect("a plan");
        assert!(tcp.obstacles.is_empty(), "RDMA is not wanted");
    }

    #[test]
    fn protocols_by_version_on_rdma() {
        let proto = |minor| {
            let mut facts = facts(minor);
            facts.rdma = vec![hca()];
            value(&plan(&facts).expect("a plan"), "UCX_PROTO_ENABLE")
        };
        assert_eq!(proto(16).as_deref(), Some("n"));
        // Seen on 1.18.1: with v2 a stopped owner is not read, with v1 it is.
        assert_eq!(proto(18).as_deref(), Some("n"));
        assert_eq!(proto(13), None);
        // v1 cannot put on 1.22.
        assert_eq!(proto(22), None);
    }
}
