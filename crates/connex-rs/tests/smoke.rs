//! The main job in one process: two engines, bytes both ways, a goodbye.

use std::time::Duration;

use connex_rs::{Config, Engine, ErrorKind, EventKind, LogicalId, Recipient};

const WAIT: Option<Duration> = Some(Duration::from_secs(20));

fn engine(stage: u32) -> Engine {
    let mut config = Config::new(LogicalId::new("smoke", stage, 0, 0).expect("valid"));
    config.listen_ip = "127.0.0.1".into();
    let config = config.with_environment().expect("environment");
    Engine::start(config).expect("start")
}

#[test]
fn bytes_move_both_ways() {
    let (a, b) = (engine(0), engine(1));
    for len in [1usize, 64, 4096, 4097, (1 << 20) + 7, 64 << 20] {
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
    assert_eq!(
        a.wait_event(WAIT).map(|e| e.kind),
        Some(EventKind::Joined { rejoin: false })
    );
    assert_eq!(a.wait_event(WAIT).map(|e| e.kind), Some(EventKind::Up));
    a.send_msg(Recipient::Id(b.id()), b"hello".to_vec(), WAIT)
        .expect("send");
    assert_eq!(b.recv_msg(WAIT), Some((a.id().clone(), b"hello".to_vec())));
    // SAFETY: the destination is leaked.
    let error =
        unsafe { a.read(b.local_url(), source_addr(), 4096, 8, WAIT) }.expect_err("not registered");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    b.close();
    let Some(EventKind::Failed {
        reason,
        status,
        established,
        ..
    }) = a.wait_event(WAIT).map(|e| e.kind)
    else {
        panic!("no failed event")
    };
    assert_eq!(
        (reason.as_str(), status, established),
        ("closed by peer", -2, true)
    );
    a.close();
}

fn source_addr() -> usize {
    Box::leak(Box::new([0u8; 8])).as_mut_ptr() as usize
}

#[test]
fn a_sleeping_engine_closes_at_once() {
    let quickest = (0..5)
        .map(|_| {
            let engine = engine(7);
            // Long enough for its progress thread to stop polling and sleep.
            std::thread::sleep(Duration::from_millis(50));
            let start = std::time::Instant::now();
            engine.close();
            start.elapsed()
        })
        .min();
    assert!(
        quickest < Some(Duration::from_millis(500)),
        "close waited for its limit: {quickest:?}"
    );
}
