//! Step channels between two engines of one process. What needs a death is in `channel_faults.rs`.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use connex_rs::channel::{ALIGN, Array, DType, OwnedArray};
use connex_rs::transport::ConnIds;
use connex_rs::transport::memory::Network;
use connex_rs::{
    ChannelConfig, Config, Engine, ErrorKind, LogicalId, Receiver, Recipient, Sender, Step,
    TransportChoice,
};

const WAIT: Option<Duration> = Some(Duration::from_secs(60));
const SHORT: Option<Duration> = Some(Duration::from_millis(50));

/// What carries the bytes.
enum Lab {
    /// The peer's engine stores what comes.
    Requested,
    /// Hardware stores it, as far as the engine can tell: nothing of a step passes through the owner's engine.
    OneSided(Network),
}

impl Lab {
    fn engine_with(&self, stage: u32, change: impl FnOnce(&mut Config)) -> Engine {
        let mut config = Config::new(LogicalId::new("channel", stage, 0, 0).expect("valid"));
        config.listen_ip = "127.0.0.1".into();
        config.transport = TransportChoice::Tcp;
        change(&mut config);
        match self {
            Lab::Requested => Engine::start(config),
            Lab::OneSided(network) => {
                Engine::start_over(config, Box::new(network.endpoint(ConnIds::default())))
            }
        }
        .expect("start")
    }

    fn engine(&self, stage: u32) -> Engine {
        self.engine_with(stage, |_| ())
    }

    fn pair(&self) -> (Engine, Engine) {
        (self.engine(0), self.engine(1))
    }
}

/// Instantiates each test for both ways of moving bytes.
macro_rules! both_ways {
    ($($test:ident),+ $(,)?) => {
        mod requested {
            $(#[test] fn $test() { super::$test(&super::Lab::Requested); })+
        }
        mod one_sided {
            $(#[test] fn $test() {
                super::$test(&super::Lab::OneSided(connex_rs::transport::memory::Network::default()));
            })+
        }
    };
}

fn ring(slots: usize, slot_bytes: usize) -> ChannelConfig {
    ChannelConfig { slots, slot_bytes }
}

both_ways! {
    arrays_arrive_as_they_were_sent,
    flow_control_waits_and_never_drops,
    a_step_that_is_too_large_is_invalid_and_the_channel_stays,
    a_clean_close_ends_the_iteration_after_the_last_step,
    a_channel_without_steps_has_an_end_too,
    a_sender_dropped_unclosed_is_a_failure,
    a_receiver_dropped_early_fails_the_sender_with_what_was_not_released,
    a_receiver_that_never_accepts_keeps_nobody,
    openings_are_bounded_and_refused_with_a_reason,
    control_does_not_show_up_among_messages,
    closing_an_engine_wakes_everybody,
    futures_do_the_same,
    many_threads_share_both_ends,
    small_steps_arrive_intact,
    middling_steps_arrive_intact,
    large_steps_arrive_intact,
}

/// A channel from `a` to `b`.
fn channel(a: &Engine, b: &Engine, config: ChannelConfig) -> (Sender, Receiver) {
    let sender = a.channel(b.local_url(), "test", config).expect("open");
    let receiver = b.accept_channel(Some("test"), WAIT).expect("accept");
    assert_eq!((receiver.peer(), receiver.name()), (a.id(), "test"));
    sender.wait_open(WAIT).expect("accepted");
    (sender, receiver)
}

fn numbers(n: u64) -> Vec<OwnedArray> {
    vec![OwnedArray::of(vec![n; 16], &[16]).expect("sound")]
}

/// The next step, which must be there.
fn next(receiver: &Receiver) -> Step {
    receiver.recv(WAIT).expect("no failure").expect("no end")
}

/// Polls without a runtime.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        assert!(Instant::now() < until, "a future was never woken");
        thread::park_timeout(Duration::from_secs(10));
    }
}

/// FNV-1a over 8 bytes at a time: quick enough in a debug build.
fn checksum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut add = |word: u64| {
        hash = (hash ^ word)
            .wrapping_mul(0x0000_0100_0000_01b3)
            .rotate_left(29)
    };
    words.iter().for_each(|word| add(u64::from_le_bytes(*word)));
    rest.iter().for_each(|byte| add(u64::from(*byte)));
    hash
}

/// Bytes that differ from step to step everywhere.
fn pattern(step: u64, len: usize) -> Vec<u8> {
    let mut state = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn arrays_arrive_as_they_were_sent(lab: &Lab) {
    let (a, b) = lab.pair();
    let (sender, receiver) = channel(&a, &b, ring(4, 1 << 16));
    let floats: Vec<f32> = (0..600).map(|n| n as f32 * 0.5).collect();
    let odd = DType::from_name("float8_e4m3fn");
    let eleven = [7u8; 11];
    let step = [
        Array::of(&floats, &[2, 30, 10]).expect("sound"),
        Array::new(&odd, &[11], &eleven).expect("sound"),
        Array::of::<i64>(&[], &[0, 5]).expect("sound"),
        Array::of(&[-9i16], &[]).expect("sound"),
    ];
    sender.send(&step, u64::MAX, WAIT).expect("send");
    sender.send(&[], 5, WAIT).expect("a step without arrays");
    let first = next(&receiver);
    assert_eq!((first.corr(), first.len()), (u64::MAX, 4));
    assert_eq!(first[0].shape(), [2, 30, 10]);
    assert_eq!(first[0].elements::<f32>(), Some(&floats[..]));
    assert_eq!(first[0].elements::<f64>(), None, "not of that type");
    assert_eq!((first[1].dtype(), first[1].bytes()), (&odd, &eleven[..]));
    assert_eq!(first[2].elements::<i64>(), Some(&[][..]));
    assert_eq!(first[2].shape(), [0, 5]);
    assert_eq!(first[3].elements::<i16>(), Some(&[-9][..]));
    assert!(first[3].shape().is_empty());
    for view in first.iter().filter(|view| !view.bytes().is_empty()) {
        assert!((view.bytes().as_ptr() as usize).is_multiple_of(ALIGN));
    }
    let second = next(&receiver);
    assert_eq!((second.corr(), second.len()), (5, 0));
    // More arrays than the header's own room holds.
    let many: Vec<Array<'_>> = (0..300)
        .map(|n| Array::of(&floats[n..=n], &[1]).expect("sound"))
        .collect();
    sender.send(&many, 6, WAIT).expect("many arrays");
    let third = next(&receiver);
    assert_eq!(third.len(), 300);
    for (n, view) in third.iter().enumerate() {
        assert_eq!(view.elements::<f32>(), Some(&floats[n..=n]));
    }
    assert!(Array::of(&floats, &[601]).is_err());
}

fn flow_control_waits_and_never_drops(lab: &Lab) {
    let (a, b) = lab.pair();
    let (sender, receiver) = channel(&a, &b, ring(3, 4096));
    for n in 0..3 {
        let transfer = sender
            .try_send(&numbers(n), n)
            .expect("alive")
            .expect("free");
        transfer.wait(WAIT).expect("in time").expect("sent");
    }
    assert!(sender.try_send(&numbers(3), 3).expect("alive").is_none());
    let late = sender.send_owned(&numbers(3), 3, SHORT).expect_err("full");
    assert_eq!(late.kind(), ErrorKind::TimedOut, "{late}");
    assert_eq!(sender.untaken(), [0, 1, 2]);
    let steps = [next(&receiver), next(&receiver), next(&receiver)];
    let nothing = receiver.recv(SHORT).expect_err("no step");
    assert_eq!(nothing.kind(), ErrorKind::TimedOut, "{nothing}");
    assert_eq!(receiver.untaken(), [0, 1, 2]);
    // The one in the middle goes first: its slot alone is free, and one blocked sender gets it.
    let [first, middle, last] = steps;
    thread::scope(|scope| {
        let blocked = scope.spawn(|| sender.send_owned(&numbers(4), 4, WAIT).map(drop));
        drop(middle);
        blocked.join().expect("no panic").expect("a slot is free");
    });
    assert!(sender.try_send(&numbers(5), 5).expect("alive").is_none());
    let fourth = next(&receiver);
    assert_eq!(fourth.corr(), 4);
    assert_eq!(fourth[0].elements::<u64>(), Some(&[4; 16][..]));
    // What is held was not touched.
    assert_eq!(first[0].elements::<u64>(), Some(&[0; 16][..]));
    assert_eq!(last[0].elements::<u64>(), Some(&[2; 16][..]));
    let undrained = sender.drain(SHORT).expect_err("three are out");
    assert_eq!(undrained.kind(), ErrorKind::TimedOut, "{undrained}");
    drop((first, last, fourth));
    sender.drain(WAIT).expect("all released");
    assert!(sender.untaken().is_empty());
}

fn a_step_that_is_too_large_is_invalid_and_the_channel_stays(lab: &Lab) {
    let (a, b) = lab.pair();
    let (sender, receiver) = channel(&a, &b, ring(1, 1000));
    let large = vec![0u8; 1025];
    let error = sender
        .send(&[Array::of(&large, &[1025]).expect("sound")], 1, WAIT)
        .expect_err("too large");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(
        error.text().contains("1000") && error.text().contains("1088"),
        "{error}"
    );
    sender
        .send(
            &[Array::of(&large[..1000], &[1000]).expect("sound")],
            2,
            WAIT,
        )
        .expect("fits");
    assert_eq!(next(&receiver).corr(), 2);
    for config in [ring(0, 1), ring(1, 0), ring(1 << 20, 1)] {
        let error = a.channel(b.local_url(), "", config).expect_err("bad ring");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

fn a_clean_close_ends_the_iteration_after_the_last_step(lab: &Lab) {
    let (a, b) = lab.pair();
    let (sender, receiver) = channel(&a, &b, ring(4, 1 << 20));
    let taker = thread::spawn(move || {
        let corrs: Vec<u64> = receiver
            .steps()
            .map(|step| step.expect("clean").corr())
            .collect();
        assert!(receiver.recv(WAIT).expect("still the end").is_none());
        corrs
    });
    for n in 0..20 {
        sender.send_owned(&numbers(n), n, WAIT).expect("send");
    }
    sender.close();
    sender.close();
    let error = sender.try_send(&numbers(9), 9).expect_err("closed");
    assert_eq!(error.kind(), ErrorKind::Canceled, "{error}");
    drop(sender);
    // What was accepted goes out before the engine says goodbye.
    a.close();
    assert_eq!(taker.join().expect("no panic"), (0..20).collect::<Vec<_>>());
}

fn a_channel_without_steps_has_an_end_too(lab: &Lab) {
    let (a, b) = lab.pair();
    let sender = a
        .channel(b.local_url(), "", ChannelConfig::default())
        .expect("open");
    sender.close();
    let receiver = b.accept_channel(None, WAIT).expect("accept");
    assert!(receiver.recv(WAIT).expect("clean").is_none());
}

fn a_sender_dropped_unclosed_is_a_failure(lab: &Lab) {
    let (a, b) = lab.pair();
    let (sender, receiver) = channel(&a, &b, ring(4, 4096));
    sender.send_owned(&numbers(1), 71, WAIT).expect("send");
    sender.send_owned(&numbers(2), 72, WAIT).expect("send");
    drop(sender);
    let held = next(&receiver);
    assert_eq!(next(&receiver).corr(), 72);
    let error = receiver.recv(WAIT).expect_err("abandoned");
    assert_eq!(error.kind(), ErrorKind::PeerFailed, "{error}");
    assert_eq!(error.untaken(), [71]);
    assert_eq!(held[0].elements::<u64>(), Some(&[1; 16][..]));
}

fn a_receiver_dropped_early_fails_the_sender_with_what_was_not_released(lab: &Lab) {
    let (a, b) = lab.pair();
    let (sender, receiver) = channel(&a, &b, ring(4, 4096));
    for n in 10..14 {
        sender.send_owned(&numbers(n), n, WAIT).expect("send");
    }
    drop(next(&receiver));
    let held = next(&receiver);
    drop(receiver);
    let error = sender.drain(WAIT).expect_err("its receiver is gone");
    assert_eq!(error.kind(), ErrorKind::PeerFailed, "{error}");
    assert_eq!(error.untaken(), [11, 12, 13]);
    assert_eq!(error.peer(), Some(b.id()));
    let error = sender.send_owned(&numbers(0), 0, WAIT).expect_err("failed");
    assert_eq!(error.untaken(), [11, 12, 13]);
    // Everything has landed, so the ring is given back, and the step that is held stays readable.
    let until = Instant::now() + Duration::from_secs(20);
    while b.stats().region_bytes > 0 {
        assert!(Instant::now() < until, "the ring is still registered");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(held[0].elements::<u64>(), Some(&[11; 16][..]));
    // The link and other channels on it are fine.
    let (sender, receiver) = channel(&a, &b, ring(1, 4096));
    sender.send_owned(&numbers(3), 3, WAIT).expect("send");
    assert_eq!(next(&receiver).corr(), 3);
}

fn a_receiver_that_never_accepts_keeps_nobody(lab: &Lab) {
    let (a, b) = lab.pair();
    let sender = a
        .channel(b.local_url(), "later", ring(2, 4096))
        .expect("open");
    let error = sender
        .send_owned(&numbers(1), 1, SHORT)
        .expect_err("not accepted");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    let other = b
        .accept_channel(Some("other"), SHORT)
        .expect_err("no such channel");
    assert_eq!(other.kind(), ErrorKind::TimedOut, "{other}");
    // It is still wanted when the receiver comes round to it.
    let receiver = b.accept_channel(Some("later"), WAIT).expect("accept");
    sender.send_owned(&numbers(1), 1, WAIT).expect("send");
    assert_eq!(next(&receiver).corr(), 1);
    // One that was given up meanwhile is not. What is said of it comes before what is said of the next one.
    drop(
        a.channel(b.local_url(), "later", ring(2, 4096))
            .expect("open"),
    );
    let next = a
        .channel(b.local_url(), "next", ring(2, 4096))
        .expect("open");
    next.close();
    let receiver = b.accept_channel(Some("next"), WAIT).expect("accept");
    assert!(receiver.recv(WAIT).expect("the next one").is_none());
    let gone = b
        .accept_channel(Some("later"), SHORT)
        .expect_err("given up");
    assert_eq!(gone.kind(), ErrorKind::TimedOut, "{gone}");
    assert_eq!(b.stats().regions, 0, "rings are not the caller's regions");
}

fn openings_are_bounded_and_refused_with_a_reason(lab: &Lab) {
    let a = lab.engine(0);
    let b = lab.engine_with(1, |config| config.channel_bytes = 1 << 20);
    let large = a
        .channel(b.local_url(), "", ring(2, 1 << 20))
        .expect("open");
    let error = large.wait_open(WAIT).expect_err("too large");
    assert_eq!(error.kind(), ErrorKind::PeerFailed);
    assert!(
        error.text().contains("refused") && error.text().contains("1048576"),
        "{error}"
    );
    let all: Vec<Sender> = (0..40)
        .map(|_| a.channel(b.local_url(), "", ring(1, 64)).expect("open"))
        .collect();
    let error = all[39].wait_open(WAIT).expect_err("too many");
    assert!(error.text().contains("accept_channel"), "{error}");
    let refused = all.iter().filter(|s| {
        s.wait_open(SHORT)
            .is_err_and(|e| e.kind() == ErrorKind::PeerFailed)
    });
    let refused = refused.count();
    assert!((1..40).contains(&refused), "{refused}");
    // Those that fit are served.
    for _ in 0..40 - refused {
        b.accept_channel(None, WAIT).expect("accept");
    }
}

fn control_does_not_show_up_among_messages(lab: &Lab) {
    let (a, b) = lab.pair();
    let (sender, receiver) = channel(&a, &b, ring(2, 4096));
    a.send_msg(Recipient::Url(b.local_url()), b"plain".to_vec(), WAIT)
        .expect("send");
    for n in 0..10 {
        sender.send_owned(&numbers(n), n, WAIT).expect("send");
        next(&receiver);
    }
    drop(sender);
    drop(receiver);
    let (from, message) = b.recv_msg(WAIT).expect("one");
    assert_eq!((&from, &message[..]), (a.id(), &b"plain"[..]));
    assert!(b.recv_msg(SHORT).is_none());
    assert!(a.recv_msg(SHORT).is_none());
}

fn closing_an_engine_wakes_everybody(lab: &Lab) {
    let (a, b) = lab.pair();
    let (sender, receiver) = channel(&a, &b, ring(1, 4096));
    let unaccepted = a
        .channel(b.local_url(), "unaccepted", ring(1, 4096))
        .expect("open");
    sender.send_owned(&numbers(1), 1, WAIT).expect("send");
    thread::scope(|scope| {
        let waits = [
            scope.spawn(|| sender.send_owned(&numbers(2), 2, None).map(drop)),
            scope.spawn(|| sender.drain(None)),
            scope.spawn(|| unaccepted.wait_open(None)),
            scope.spawn(|| a.accept_channel(None, None).map(drop)),
        ];
        thread::sleep(Duration::from_millis(30));
        a.close();
        for wait in waits {
            let error = wait.join().expect("no panic").expect_err("closed");
            assert_eq!(error.kind(), ErrorKind::Canceled, "{error}");
        }
    });
    let held = next(&receiver);
    let error = receiver.recv(WAIT).expect_err("its sender is gone");
    assert_eq!(
        (error.kind(), error.untaken()),
        (ErrorKind::PeerFailed, &[1][..]),
        "{error}"
    );
    b.close();
    drop(receiver);
    drop((a, b));
    assert_eq!(held[0].elements::<u64>(), Some(&[1; 16][..]));
}

fn futures_do_the_same(lab: &Lab) {
    let (a, b) = lab.pair();
    let sender = a.channel(b.local_url(), "", ring(2, 4096)).expect("open");
    let taker = thread::spawn({
        let b = b.clone();
        move || {
            block_on(async {
                let receiver = b.accept_channel_async(None).await.expect("accept");
                let mut sum = 0;
                while let Some(step) = receiver.next_step().await.expect("clean") {
                    sum += step.corr() + step[0].elements::<u64>().map_or(0, |e| e[3]);
                }
                sum
            })
        }
    });
    block_on(async {
        for n in 0..500 {
            sender.send_async(numbers(n), n).await.expect("sent");
        }
    });
    sender.close();
    assert_eq!(taker.join().expect("no panic"), 499 * 500);
}

fn many_threads_share_both_ends(lab: &Lab) {
    let (a, b) = lab.pair();
    let (sender, receiver) = channel(&a, &b, ring(5, 1 << 17));
    const EACH: u64 = 200;
    let taken = thread::scope(|scope| {
        let takers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut taken = Vec::new();
                    for step in &receiver {
                        let step = step.expect("clean");
                        let sent = pattern(step.corr(), (step.corr() as usize * 97) % 100_000);
                        assert_eq!(checksum(step[0].bytes()), checksum(&sent));
                        taken.push(step.corr());
                    }
                    taken
                })
            })
            .collect();
        let senders: Vec<_> = (0..3)
            .map(|thread| {
                let sender = &sender;
                scope.spawn(move || {
                    for n in 0..EACH {
                        let corr = thread * EACH + n;
                        let bytes = pattern(corr, (corr as usize * 97) % 100_000);
                        let array = Array::of(&bytes, std::slice::from_ref(&bytes.len()))
                            .map(|array| sender.send(&[array], corr, WAIT));
                        array.expect("sound").expect("sent");
                    }
                })
            })
            .collect();
        for thread in senders {
            thread.join().expect("no panic");
        }
        sender.close();
        let mut taken = Vec::new();
        for taker in takers {
            taken.extend(taker.join().expect("no panic"));
        }
        taken
    });
    let mut taken = taken;
    taken.sort_unstable();
    assert_eq!(taken, (0..3 * EACH).collect::<Vec<_>>());
}

/// Steps of `len` bytes, several in flight, with a checksum in the consumer.
fn checked(lab: &Lab, count: u64, len: usize, slots: usize) {
    let (a, b) = lab.pair();
    let (sender, receiver) = channel(&a, &b, ring(slots, len));
    let distinct: Vec<OwnedArray> = (0..count.min(slots as u64 + 3))
        .map(|n| OwnedArray::of(pattern(n, len), &[len]).expect("sound"))
        .collect();
    let sums: Vec<u64> = (0..distinct.len() as u64)
        .map(|n| checksum(&pattern(n, len)))
        .collect();
    let taker = thread::spawn(move || {
        let mut n = 0;
        for step in &receiver {
            let step = step.expect("clean");
            assert_eq!(step.corr(), n, "out of order");
            let sum = checksum(step[0].bytes());
            assert_eq!(
                sum,
                sums[n as usize % sums.len()],
                "step {n} of {len} bytes"
            );
            n += 1;
        }
        n
    });
    for n in 0..count {
        let array = &distinct[n as usize % distinct.len()];
        sender
            .send_owned(std::slice::from_ref(array), n, WAIT)
            .expect("send");
    }
    sender.close();
    assert_eq!(taker.join().expect("no panic"), count);
    sender.drain(WAIT).expect("all released");
}

fn soak(default: u64, soak: u64) -> u64 {
    if std::env::var_os("CONNEX_SOAK").is_some_and(|v| v == "1") {
        soak
    } else {
        default
    }
}

fn small_steps_arrive_intact(lab: &Lab) {
    let by_default = if cfg!(debug_assertions) {
        20_000
    } else {
        100_000
    };
    checked(lab, soak(by_default, 1_000_000), 256, 16);
}

fn middling_steps_arrive_intact(lab: &Lab) {
    checked(lab, soak(300, 100_000), 64 << 10, 4);
    checked(lab, soak(40, 10_000), 1 << 20, 4);
}

fn large_steps_arrive_intact(lab: &Lab) {
    checked(lab, soak(4, 1000), 64 << 20, 2);
}
