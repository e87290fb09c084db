//! GPU memory through the engine, on the stand-in driver: every test runs its cases in a process of its own, because the driver's
//! ways (at once, delayed, strict) are the process's.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod common;
#[path = "common/gpu.rs"]
mod gpu;
#[path = "common/stand_in.rs"]
mod stand_in;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::{LONG, Memory, Net, config, engine, expect_failed, link, read, wait_for, write};
use connex_rs::channel::{Element, OwnedArray};
use connex_rs::{ChannelConfig, Engine, EventKind, LogicalId, Range};
use gpu::{Context, Device, Gpu, Sort};

/// Around every threshold: the zero-copy one, small and bulk, pieces of each transport.
const SIZES: &[usize] = &[
    1,
    7,
    4095,
    4096,
    4097,
    (16 << 10) - 1,
    (16 << 10) + 1,
    32 << 10,
    (32 << 10) + 1,
    (240 << 10) - 1,
    (240 << 10) + 1,
    256 << 10,
    (256 << 10) + 1,
    (1 << 20) + 3,
    (9 << 20) + 5,
];
const LARGEST: usize = (9 << 20) + 5;
/// Bytes before and after what a transfer may touch.
const GUARD: usize = 64;
const POISON: u8 = 0xa5;

// ---- the processes --------------------------------------------------------------------------------

fn run(role: &str, net: Net, env: &[(&str, &str)]) {
    let folder = stand_in::build();
    let mut command = child(role, net, &folder);
    command.envs(env.iter().copied());
    let status = command.status().expect("this binary again");
    assert!(
        status.success(),
        "{role} over {net:?} with {env:?}: {status}"
    );
}

fn child(role: &str, net: Net, folder: &std::path::Path) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command
        .args([
            "--exact",
            "in_a_process_of_its_own",
            "--ignored",
            "--nocapture",
        ])
        .env("GPU_TEST_ROLE", role)
        .env("GPU_TEST_NET", format!("{net:?}"))
        .env("GPU_TEST_DRIVER", folder);
    command
}

#[test]
#[ignore = "the body of the other tests; does nothing by itself"]
fn in_a_process_of_its_own() {
    let Ok(role) = std::env::var("GPU_TEST_ROLE") else {
        return;
    };
    let folder = std::env::var("GPU_TEST_DRIVER").expect("set with the role");
    let folder = std::path::Path::new(&folder);
    let net = match std::env::var("GPU_TEST_NET").as_deref() {
        Ok("Tcp") => Net::Tcp,
        _ => Net::Ucx,
    };
    let gpu = Gpu::load(folder);
    match role.as_str() {
        "cases" => cases(gpu, net),
        "refusals" => refusals(gpu, net),
        "ends" => ends(gpu, net, folder),
        "owner" => owner(gpu, net),
        other => panic!("no role {other}"),
    }
}

fn at_once_delayed_strict(role: &str, net: Net, env: &[(&str, &str)]) {
    for mode in [
        [("STANDIN_DELAY", "0"), ("STANDIN_STRICT", "0")],
        [("STANDIN_DELAY", "3"), ("STANDIN_STRICT", "0")],
        [("STANDIN_DELAY", "1"), ("STANDIN_STRICT", "1")],
    ] {
        let env: Vec<_> = mode.iter().chain(env).copied().collect();
        run(role, net, &env);
    }
}

#[test]
fn transfers_over_tcp() {
    at_once_delayed_strict("cases", Net::Tcp, &[]);
}

#[test]
fn transfers_over_ucx_in_shared_memory() {
    at_once_delayed_strict("cases", Net::Ucx, &[("UCX_TLS", "tcp,sysv")]);
}

#[test]
fn transfers_over_ucx_tcp() {
    at_once_delayed_strict("cases", Net::Ucx, &[("UCX_TLS", "tcp")]);
}

/// UCX itself is given what is not too small, by one-sided access as over RDMA; the rest is staged. A version whose copies do
/// not work is given none of it.
#[test]
fn one_sided_transfers_over_ucx() {
    let env = [
        ("UCX_TLS", "tcp,cuda_copy"),
        ("CONNEX_RS_FORCE_ONE_SIDED", "1"),
    ];
    at_once_delayed_strict("cases", Net::Ucx, &env);
}

#[test]
fn small_transfers_are_refused_where_staging_is_off() {
    run("refusals", Net::Tcp, &[]);
    run("refusals", Net::Ucx, &[]);
    run("refusals", Net::Tcp, &[("UCX_ZCOPY_THRESH", "100")]);
}

#[test]
fn ends_in_the_middle_over_tcp() {
    run("ends", Net::Tcp, &[]);
}

/// Not in shared memory: a peer that is killed while it sends there leaves UCX's queue of the survivor stuck, whatever the
/// memory.
#[test]
fn ends_in_the_middle_over_ucx() {
    run("ends", Net::Ucx, &[("UCX_TLS", "tcp")]);
}

// ---- the cases ------------------------------------------------------------------------------------

/// Bytes that differ everywhere.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len)
        .map(|i| {
            (i.wrapping_mul(31) ^ (i >> 8) ^ (i >> 16).wrapping_mul(7)).wrapping_add(seed) as u8
        })
        .collect()
}

/// Memory of either kind.
enum Place {
    Host(Memory),
    Device(Device),
}

impl Place {
    fn addr(&self) -> usize {
        match self {
            Place::Host(memory) => memory.addr(),
            Place::Device(device) => device.addr(),
        }
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        match self {
            Place::Host(memory) => memory.copy_in(offset, bytes),
            Place::Device(device) => device.write(offset, bytes),
        }
    }

    fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        match self {
            Place::Host(memory) => {
                let mut bytes = vec![0; len];
                memory.copy_out(offset, &mut bytes);
                bytes
            }
            Place::Device(device) => device.bytes(offset, len),
        }
    }

    fn register(&self, engine: &Engine) {
        match self {
            Place::Host(memory) => memory.register(engine),
            Place::Device(device) => device.register(engine),
        }
    }
}

/// Two engines with memory on two devices.
struct Pair {
    gpu: Gpu,
    near: Engine,
    far: Engine,
    first: Context,
    second: Context,
}

fn cases(gpu: Gpu, net: Net) {
    let pair = Pair {
        gpu,
        near: engine(net, 1),
        far: engine(net, 2),
        first: gpu.primary(0),
        second: gpu.primary(1),
    };
    link(&pair.near, &pair.far);
    // UCX looks around when it is loaded, without a context.
    let before = gpu.context_errors();
    every_way(&pair);
    from_any_thread(&pair);
    signals(&pair);
    chains(&pair);
    channels(&pair);
    many_at_once(&pair);
    wrong_ranges(&pair);
    let staged = pair.near.stats().staged_bytes + pair.far.stats().staged_bytes;
    // One-sided, only what is too small for it.
    let one_sided = std::env::var_os("CONNEX_RS_FORCE_ONE_SIDED").is_some();
    let least = if one_sided { 10_000 } else { 50 << 20 };
    assert!(staged > least, "{staged} bytes were staged");
    pair.near.close();
    pair.far.close();
    drop(pair);
    assert_eq!(gpu.context_errors(), before, "a call without a context");
}

fn every_way(pair: &Pair) {
    let room = LARGEST + 2 * GUARD;
    let device = |sort, context| Place::Device(pair.gpu.memory(sort, context, room));
    let host = || Place::Host(Memory::new(room));
    let ways = [
        (
            device(Sort::Device, pair.first),
            device(Sort::Device, pair.second),
        ),
        (device(Sort::Device, pair.first), host()),
        (host(), device(Sort::Device, pair.second)),
        (
            device(Sort::Managed, pair.first),
            device(Sort::StreamOrdered, pair.second),
        ),
    ];
    let url = pair.far.local_url();
    for (way, (local, remote)) in ways.iter().enumerate() {
        local.register(&pair.near);
        remote.register(&pair.far);
        for &len in SIZES {
            for writes in [false, true] {
                let (from, to) = if writes {
                    (local, remote)
                } else {
                    (remote, local)
                };
                let bytes = pattern(len, way + len);
                from.write(GUARD, &bytes);
                to.write(0, &vec![POISON; len + 2 * GUARD]);
                let transfer = if writes { write } else { read };
                let (near, far) = (local.addr() + GUARD, remote.addr() + GUARD);
                let code = transfer(&pair.near, url, near, far, len, LONG);
                assert_eq!(code, 0, "way {way}, {len} bytes, writes: {writes}");
                let seen = to.bytes(0, len + 2 * GUARD);
                assert!(
                    seen[GUARD..GUARD + len] == bytes,
                    "way {way}, {len} bytes: other bytes"
                );
                let around = seen[..GUARD].iter().chain(&seen[GUARD + len..]);
                assert!(
                    around.clone().all(|&b| b == POISON),
                    "way {way}, {len} bytes: outside"
                );
            }
        }
        pair.near.unregister_memory(local.addr()).expect("there");
        pair.far.unregister_memory(remote.addr()).expect("there");
    }
}

/// The caller may have no context, the engine's, or another; the local side may be unregistered.
fn from_any_thread(pair: &Pair) {
    let len = 300 << 10;
    let remote = pair.gpu.memory(Sort::Device, pair.second, len);
    remote.register(&pair.far);
    let bytes = pattern(len, 3);
    remote.write(0, &bytes);
    for context in [None, Some(pair.first), Some(pair.second)] {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let local = pair.gpu.memory(Sort::Device, pair.first, len);
                let get = || {
                    read(
                        &pair.near,
                        pair.far.local_url(),
                        local.addr(),
                        remote.addr(),
                        len,
                        LONG,
                    )
                };
                let code = match context {
                    Some(context) => pair.gpu.within(context, get),
                    None => get(),
                };
                assert_eq!(code, 0);
                assert!(local.bytes(0, len) == bytes);
            });
        });
    }
    pair.far.unregister_memory(remote.addr()).expect("there");
}

fn signals(pair: &Pair) {
    let len = 700 << 10;
    let local = pair.gpu.memory(Sort::Device, pair.first, len);
    let remote = pair.gpu.memory(Sort::Device, pair.second, len);
    remote.register(&pair.far);
    for round in 0..20 {
        let len = if round % 2 == 0 { len } else { 5000 };
        let bytes = pattern(len, 100 + round);
        local.write(0, &bytes);
        let message = vec![round as u8; 10];
        // SAFETY: the memory lives until the transfer has ended.
        let sent = unsafe {
            pair.near.put_signal(
                pair.far.local_url(),
                local.addr(),
                remote.addr() as u64,
                len,
                message.clone(),
                LONG,
            )
        }
        .expect("sound");
        let (_, came) = pair.far.recv_msg(LONG).expect("the signal");
        assert_eq!(came, message);
        assert!(
            remote.bytes(0, len) == bytes,
            "round {round}: a signal before its data"
        );
        sent.wait(LONG).expect("in time").expect("well");
    }
    pair.far.unregister_memory(remote.addr()).expect("there");
}

/// Data on a device; flags of each kind, in host memory and on another device.
fn chains(pair: &Pair) {
    let len = 600 << 10;
    let local = pair.gpu.memory(Sort::Device, pair.first, len);
    let data = pair.gpu.memory(Sort::Device, pair.second, len);
    let flag = Memory::new(4096);
    let other = pair.gpu.memory(Sort::Device, pair.first, 4096);
    data.register(&pair.far);
    flag.register(&pair.far);
    other.register(&pair.far);
    let source = Memory::new(4096);
    for round in 1..=30usize {
        let bytes = pattern(len, 200 + round);
        local.write(0, &bytes);
        source.copy_in(0, &vec![round as u8; 4096]);
        // A word, a long flag in host memory, a word on a device.
        let (target, flag_len) = match round % 3 {
            0 => (flag.addr(), 8),
            1 => (flag.addr(), 1000),
            _ => (other.addr(), 8),
        };
        let range = |local, remote: usize, len| Range {
            local,
            remote: remote as u64,
            len,
        };
        let ranges = [
            range(local.addr(), data.addr(), len),
            range(source.addr(), target, flag_len),
        ];
        // SAFETY: the memory lives until the transfer has ended.
        let chain =
            unsafe { pair.near.put_chain(pair.far.local_url(), &ranges, LONG) }.expect("sound");
        let word = u64::from_ne_bytes([round as u8; 8]);
        wait_for("the flag", || match round % 3 {
            0 | 1 => flag.word(0).load(Ordering::Acquire) == word,
            _ => other.bytes(0, 8) == word.to_ne_bytes(),
        });
        assert!(
            data.bytes(0, len) == bytes,
            "round {round}: a flag before its data"
        );
        chain.wait(LONG).expect("in time").expect("well");
    }
    for addr in [data.addr(), flag.addr(), other.addr()] {
        pair.far.unregister_memory(addr).expect("there");
    }
}

/// Steps whose arrays lie on a device, beside ones of the host.
fn channels(pair: &Pair) {
    let len = 300 << 10;
    let config = ChannelConfig {
        slots: 4,
        slot_bytes: 1 << 20,
    };
    let sender = pair
        .near
        .channel(pair.far.local_url(), "steps", config)
        .expect("sound");
    let receiver = pair
        .far
        .accept_channel(Some("steps"), LONG)
        .expect("opened");
    for corr in 0..20u64 {
        let bytes = pattern(len, 300 + corr as usize);
        let device = Arc::new(pair.gpu.memory(Sort::Device, pair.first, len));
        device.write(0, &bytes);
        let addr = device.addr();
        // SAFETY: the array keeps the memory, which nobody changes.
        let array = unsafe { OwnedArray::from_raw(u8::DTYPE, &[len], addr, len, device) };
        let small = OwnedArray::of(vec![corr; 16], &[16]).expect("sound");
        sender
            .send_owned(&[array.expect("sound"), small], corr, LONG)
            .expect("sent");
        let step = receiver.recv(LONG).expect("in time").expect("a step");
        assert_eq!(step.corr(), corr);
        assert!(step[0].bytes() == bytes, "step {corr}");
        assert_eq!(step[1].elements::<u64>(), Some(&[corr; 16][..]));
    }
    sender.close();
}

/// Host and device ranges in one operation, and more operations than staging buffers.
fn many_at_once(pair: &Pair) {
    let (count, len) = (40, 100_003);
    let local = pair.gpu.memory(Sort::Device, pair.first, count * len);
    let remote = pair.gpu.memory(Sort::Device, pair.second, count * len);
    let host = Memory::new(count * len);
    remote.register(&pair.far);
    host.register(&pair.far);
    let bytes = pattern(count * len, 9);
    local.write(0, &bytes);
    let ranges: Vec<Range> = (0..count)
        .map(|i| Range {
            local: local.addr() + i * len,
            remote: (if i % 2 == 0 {
                remote.addr()
            } else {
                host.addr()
            } + i * len) as u64,
            len,
        })
        .collect();
    let url = pair.far.local_url();
    // SAFETY: the memory lives until the transfer has ended.
    let put = unsafe { pair.near.put_many(url, &ranges, LONG) }.expect("sound");
    put.wait(LONG).expect("in time").expect("well");
    let (on_device, on_host) = (remote.bytes(0, count * len), {
        let mut copy = vec![0; count * len];
        host.copy_out(0, &mut copy);
        copy
    });
    for i in 0..count {
        let seen = if i % 2 == 0 { &on_device } else { &on_host };
        assert!(
            seen[i * len..][..len] == bytes[i * len..][..len],
            "range {i}"
        );
    }
    local.write(0, &vec![0; count * len]);
    // SAFETY: as above.
    let got = unsafe { pair.near.get_many(url, &ranges, LONG) }.expect("sound");
    got.wait(LONG).expect("in time").expect("well");
    assert!(local.bytes(0, count * len) == bytes);
    // Each by itself, all at once.
    local.write(0, &vec![0; count * len]);
    let gets: Vec<_> = ranges
        .iter()
        // SAFETY: as above.
        .map(|r| unsafe { pair.near.get(url, r.local, r.remote, r.len, LONG) }.expect("sound"))
        .collect();
    for get in gets {
        get.wait(LONG).expect("in time").expect("well");
    }
    assert!(local.bytes(0, count * len) == bytes);
    pair.far.unregister_memory(remote.addr()).expect("there");
    pair.far.unregister_memory(host.addr()).expect("there");
}

fn wrong_ranges(pair: &Pair) {
    let local = pair.gpu.memory(Sort::Device, pair.first, 8192);
    let remote = pair.gpu.memory(Sort::Device, pair.second, 8192);
    remote.register(&pair.far);
    let url = pair.far.local_url();
    for transfer in [read, write] {
        assert_eq!(
            transfer(&pair.near, url, local.addr(), remote.addr() + 1, 8192, LONG),
            -4
        );
        assert_eq!(
            transfer(&pair.near, url, local.addr(), remote.addr(), 8192, LONG),
            0
        );
    }
    pair.far.unregister_memory(remote.addr()).expect("there");
    assert_eq!(
        read(&pair.near, url, local.addr(), remote.addr(), 8192, LONG),
        -4
    );
}

// ---- refusals ---------------------------------------------------------------------------------------

/// `allow_staging=False` on one side or the other.
fn refusals(gpu: Gpu, net: Net) {
    let threshold: usize =
        std::env::var("UCX_ZCOPY_THRESH").map_or(4096, |v| v.parse().expect("a number"));
    let start = |stage, allow_staging| {
        let mut config = config(net, stage);
        config.allow_staging = allow_staging;
        Engine::start(config).expect("the engine starts")
    };
    let (strict, lenient) = (start(1, false), start(2, true));
    link(&strict, &lenient);
    let context = gpu.primary(0);
    let (near, far) = (
        gpu.memory(Sort::Device, context, 8192),
        gpu.memory(Sort::Device, context, 8192),
    );
    let host = Memory::new(8192);
    near.register(&strict);
    far.register(&lenient);
    for (len, ok) in [(threshold - 1, false), (threshold, true)] {
        for transfer in [read, write] {
            let expected = if ok { 0 } else { -4 };
            // Its own memory, and its memory as a peer sees it.
            let own = transfer(
                &strict,
                lenient.local_url(),
                near.addr(),
                far.addr(),
                len,
                LONG,
            );
            assert_eq!(own, expected, "{len} bytes");
            let asked = transfer(
                &lenient,
                strict.local_url(),
                host.addr(),
                near.addr(),
                len,
                LONG,
            );
            assert_eq!(asked, expected, "{len} bytes, asked by the peer");
            // The other's memory is the other's business, and so is the host's.
            let other = transfer(
                &strict,
                lenient.local_url(),
                host.addr(),
                far.addr(),
                len,
                LONG,
            );
            assert_eq!(other, 0, "{len} bytes from the host");
        }
    }
    // SAFETY: the memory lives until the call returns.
    let refused =
        unsafe { strict.read(lenient.local_url(), near.addr(), far.addr() as u64, 1, LONG) };
    let text = refused.expect_err("refused").to_string();
    assert!(
        text.contains("allow_staging") && text.contains("UCX_ZCOPY_THRESH"),
        "{text}"
    );
    assert_eq!(
        strict.stats().failures + lenient.stats().failures,
        0,
        "a refusal cost the link"
    );
}

// ---- ends in the middle ---------------------------------------------------------------------------------

/// The owner of device memory in a process of its own.
fn owner(gpu: Gpu, net: Net) {
    let engine = engine(net, 7);
    let memory = gpu.memory(Sort::Device, gpu.primary(0), LARGEST);
    memory.write(0, &pattern(LARGEST, 1));
    memory.register(&engine);
    let mut out = std::io::stdout();
    writeln!(out, "@{} {}", engine.local_url(), memory.addr()).expect("the parent listens");
    out.flush().expect("the parent listens");
    // Until it is killed.
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

struct Owner {
    process: Child,
    url: String,
    addr: usize,
}

impl Owner {
    fn start(net: Net, folder: &std::path::Path) -> Self {
        let process = child("owner", net, folder)
            .stdout(Stdio::piped())
            .spawn()
            .expect("this binary again");
        let mut owner = Self {
            process,
            url: String::new(),
            addr: 0,
        };
        let mut lines = BufReader::new(owner.process.stdout.take().expect("piped"));
        while owner.addr == 0 {
            let mut line = String::new();
            let n = lines.read_line(&mut line).expect("a line");
            assert!(n > 0, "the owner has ended");
            if let Some((_, said)) = line.split_once('@') {
                let (url, addr) = said.trim().split_once(' ').expect("two words");
                owner.url = url.to_owned();
                owner.addr = addr.parse().expect("a number");
            }
        }
        owner
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn ends(gpu: Gpu, net: Net, folder: &std::path::Path) {
    let near = engine(net, 1);
    let before = gpu.context_errors();
    let context = gpu.primary(0);
    let memory = gpu.memory(Sort::Device, context, LARGEST);
    memory.register(&near);
    killed_while_copies_wait(&gpu, &near, &memory, net, folder);
    timed_out_while_copies_wait(&gpu, &near, &memory, net, folder);
    unregistered_while_copies_wait(&gpu, &near, net, folder);
    near.close();
    assert_eq!(gpu.context_errors(), before, "a call without a context");
    closed_while_copies_wait(&gpu, net, folder);
}

/// Links to an owner that has just started. On a loaded machine its first connection may take longer than a dial may.
fn dial(near: &Engine, owner: &Owner, memory: &Device) {
    for _ in 0..5 {
        if read(near, &owner.url, memory.addr(), owner.addr, 8, LONG) == 0 {
            return;
        }
    }
    panic!("no link to {}", owner.url);
}

/// Expects a new link with a peer; dials that did not come through are passed over.
fn linked(near: &Engine, peer: &LogicalId) {
    loop {
        match common::event(near).kind {
            EventKind::Joined { .. } => break,
            EventKind::Failed { established, .. } => assert!(!established),
            other => panic!("{other:?} before a link"),
        }
    }
    let up = common::event(near);
    assert_eq!((&up.peer, up.kind), (peer, EventKind::Up));
}

/// Starts a read whose copies to the device wait, so that some of it has come and none is in place.
fn stuck_read(gpu: &Gpu, near: &Engine, memory: &Device, owner: &Owner) -> connex_rs::Transfer {
    memory.write(0, &vec![POISON; memory.len()]);
    dial(near, owner, memory);
    gpu.hold(true);
    let before = near.stats().staged_bytes;
    // SAFETY: the memory lives until the transfer has ended.
    let get = unsafe {
        near.get(
            &owner.url,
            memory.addr(),
            owner.addr as u64,
            LARGEST.min(memory.len()),
            Some(Duration::from_secs(5)),
        )
    }
    .expect("sound");
    wait_for("a piece that waits for its copy", || {
        near.stats().staged_bytes > before
    });
    get
}

/// What a transfer that ended with an error leaves behind does not change any more (I2).
fn is_still(memory: &Device) {
    let seen = memory.bytes(0, memory.len());
    std::thread::sleep(Duration::from_millis(100));
    assert!(
        memory.bytes(0, memory.len()) == seen,
        "bytes landed after the end was reported"
    );
}

fn killed_while_copies_wait(
    gpu: &Gpu,
    near: &Engine,
    memory: &Device,
    net: Net,
    folder: &std::path::Path,
) {
    let mut owner = Owner::start(net, folder);
    let get = stuck_read(gpu, near, memory, &owner);
    owner.process.kill().expect("kill");
    owner.process.wait().expect("reap");
    // The peer is dead, but the driver may still write: the end must wait for it.
    std::thread::sleep(Duration::from_millis(300));
    assert!(
        !get.done(),
        "the end was reported while copies were under way"
    );
    gpu.hold(false);
    let error = get
        .wait(LONG)
        .expect("in time")
        .expect_err("the peer is dead");
    assert!(matches!(error.code(), -2 | -1), "{error}");
    is_still(memory);
    let peer = owner
        .url
        .split_once('#')
        .expect("an identity")
        .1
        .parse()
        .expect("valid");
    linked(near, &peer);
    assert!(expect_failed(near, &peer).established);
}

fn timed_out_while_copies_wait(
    gpu: &Gpu,
    near: &Engine,
    memory: &Device,
    net: Net,
    folder: &std::path::Path,
) {
    let owner = Owner::start(net, folder);
    let peer = owner
        .url
        .split_once('#')
        .expect("an identity")
        .1
        .parse()
        .expect("valid");
    let get = stuck_read(gpu, near, memory, &owner);
    // Longer than its deadline.
    let start = Instant::now();
    while !get.done() && start.elapsed() < Duration::from_secs(7) {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(
        !get.done(),
        "the time-out was reported while copies were under way"
    );
    gpu.hold(false);
    let error = get.wait(LONG).expect("in time").expect_err("too late");
    assert!(matches!(error.code(), -2 | -3), "{error}");
    is_still(memory);
    linked(near, &peer);
    assert!(expect_failed(near, &peer).established);
    // The owner lives, and is used again.
    dial(near, &owner, memory);
    // SAFETY: the memory lives until the call returns.
    unsafe { near.read(&owner.url, memory.addr(), owner.addr as u64, LARGEST, LONG) }
        .expect("the link stands");
    assert!(memory.bytes(0, LARGEST) == pattern(LARGEST, 1));
    linked(near, &peer);
    drop(owner);
    expect_failed(near, &peer);
}

fn unregistered_while_copies_wait(gpu: &Gpu, near: &Engine, net: Net, folder: &std::path::Path) {
    let owner = Owner::start(net, folder);
    let memory = gpu.memory(Sort::Device, gpu.primary(0), 1 << 20);
    memory.register(near);
    let get = stuck_read(gpu, near, &memory, &owner);
    std::thread::scope(|scope| {
        let gone = scope.spawn(|| near.unregister_memory(memory.addr()));
        std::thread::sleep(Duration::from_millis(300));
        assert!(
            !gone.is_finished(),
            "the region went while copies into it were under way"
        );
        gpu.hold(false);
        gone.join().expect("no panic").expect("unregistered");
    });
    // With the copies let go in time it has ended well.
    get.wait(LONG).expect("in time").expect("well");
    assert!(memory.bytes(0, 1 << 20) == pattern(LARGEST, 1)[..1 << 20]);
}

fn closed_while_copies_wait(gpu: &Gpu, net: Net, folder: &std::path::Path) {
    let owner = Owner::start(net, folder);
    let near = engine(net, 3);
    let memory = gpu.memory(Sort::Device, gpu.primary(1), 1 << 20);
    memory.register(&near);
    let get = stuck_read(gpu, &near, &memory, &owner);
    let start = Instant::now();
    near.close();
    // A second by contract; generous for a loaded machine.
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "close took {:?}",
        start.elapsed()
    );
    assert!(
        !get.done(),
        "the end was reported while copies were under way"
    );
    gpu.hold(false);
    match get.wait(LONG).expect("in time") {
        // All of it had come and only waited for its copies.
        Ok(()) => assert!(memory.bytes(0, 1 << 20) == pattern(LARGEST, 1)[..1 << 20]),
        Err(error) => assert_eq!(error.code(), -5, "{error}"),
    }
    is_still(&memory);
}
