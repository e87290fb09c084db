//! TLS between engines: both sides prove their identity, strangers get nowhere.

use std::path::{Path, PathBuf};
use std::time::Duration;

use connex_rs::transport::tcp::uri_of;
use connex_rs::{Config, Engine, ErrorKind, LogicalId, TlsFiles, TransportChoice};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType};

const WAIT: Option<Duration> = Some(Duration::from_secs(20));

fn id(stage: u32) -> LogicalId {
    LogicalId::new("tls", stage, 0, 0).expect("valid")
}

/// An authority whose certificates lie in a folder of the test's own.
struct Authority {
    folder: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("tls-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("folder");
        let mut params = CertificateParams::new(Vec::new()).expect("params");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("key");
        let cert = params.self_signed(&key).expect("certificate");
        std::fs::write(folder.join("ca.pem"), cert.pem()).expect("write");
        Self {
            folder,
            issuer: Issuer::new(params, key),
        }
    }

    fn files(&self, whose: &LogicalId) -> TlsFiles {
        let mut params = CertificateParams::new(Vec::new()).expect("params");
        params.subject_alt_names = vec![SanType::URI(uri_of(whose).try_into().expect("ascii"))];
        let key = KeyPair::generate().expect("key");
        let cert = params.signed_by(&key, &self.issuer).expect("certificate");
        let path = |what: &str| self.folder.join(format!("{}-{what}.pem", whose.stage()));
        std::fs::write(path("cert"), cert.pem()).expect("write");
        std::fs::write(path("key"), key.serialize_pem()).expect("write");
        TlsFiles {
            cert: path("cert"),
            key: path("key"),
            ca: self.folder.join("ca.pem"),
        }
    }
}

impl Drop for Authority {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn engine(stage: u32, tls: Option<TlsFiles>) -> Engine {
    let mut config = Config::new(id(stage));
    config.listen_ip = "127.0.0.1".into();
    config.transport = TransportChoice::Tcp;
    config.tls = tls;
    Engine::start(config).expect("start")
}

/// Reads 8 bytes of the owner; the error if that fails.
fn read(reader: &Engine, owner: &Engine, addr: usize) -> Result<u64, connex_rs::Error> {
    let mut word = 0u64;
    // SAFETY: the destination outlives the blocking call.
    unsafe {
        reader.read(
            owner.local_url(),
            (&raw mut word) as usize,
            addr as u64,
            8,
            WAIT,
        )
    }
    .map(|()| word)
}

#[test]
fn bytes_move_between_proven_peers() {
    let authority = Authority::new("good");
    let (a, b) = (
        engine(0, Some(authority.files(&id(0)))),
        engine(1, Some(authority.files(&id(1)))),
    );
    let len = (9 << 20) + 5;
    let there = b.allocate_managed_buffer(len).expect("buffer");
    let data: Vec<u8> = (0..len).map(|i| (i * 13 % 251) as u8).collect();
    let mut back = vec![0u8; len];
    // SAFETY: the buffers outlive the blocking calls.
    unsafe {
        a.write(
            b.local_url(),
            data.as_ptr() as usize,
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
    assert!(back == data);
    for n in 0..200u64 {
        let word = n.to_ne_bytes();
        // SAFETY: as above.
        unsafe {
            b.write(a.local_url(), word.as_ptr() as usize, 1, 0, WAIT)
                .expect("empty write the other way")
        };
        // SAFETY: as above.
        unsafe {
            a.write(b.local_url(), word.as_ptr() as usize, there as u64, 8, WAIT)
                .expect("small write")
        };
        assert_eq!(read(&a, &b, there).expect("small read"), n);
    }
    assert_eq!(a.stats().eps_created, 1);
}

#[test]
fn a_certificate_of_somebody_else_is_refused_at_the_start() {
    let authority = Authority::new("other");
    let mut config = Config::new(id(0));
    config.listen_ip = "127.0.0.1".into();
    config.tls = Some(authority.files(&id(7)));
    let error = Engine::start(config).expect_err("not its own");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(
        error.text().contains(&id(0).to_string()) && error.text().contains(&id(7).to_string()),
        "{error}"
    );
}

#[test]
fn strangers_get_nowhere_and_disturb_nobody() {
    let (authority, forger) = (Authority::new("ours"), Authority::new("forger"));
    let owner = engine(1, Some(authority.files(&id(1))));
    let addr = owner.allocate_managed_buffer(8).expect("buffer");
    let friend = engine(0, Some(authority.files(&id(0))));
    assert_eq!(read(&friend, &owner, addr).expect("a friend"), 0);
    let forged = engine(2, Some(forger.files(&id(2))));
    assert_eq!(
        read(&forged, &owner, addr)
            .expect_err("another authority")
            .kind(),
        ErrorKind::PeerFailed
    );
    let plain = engine(3, None);
    assert_eq!(
        read(&plain, &owner, addr).expect_err("no TLS").kind(),
        ErrorKind::PeerFailed
    );
    // And the other way round: a TLS engine does not talk to one without.
    let open = engine(4, None);
    let there = open.allocate_managed_buffer(8).expect("buffer");
    assert_eq!(
        read(&friend, &open, there)
            .expect_err("the owner has no TLS")
            .kind(),
        ErrorKind::PeerFailed
    );
    assert_eq!(read(&friend, &owner, addr).expect("still a friend"), 0);
    assert_eq!(friend.stats().failures, 0);
    let begun = std::time::Instant::now();
    while owner.stats().strangers_refused < 2 {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "strangers are not counted"
        );
        std::thread::yield_now();
    }
}

#[test]
fn tls_is_refused_over_ucx() {
    let authority = Authority::new("ucx");
    let mut config = Config::new(id(0));
    config.listen_ip = "127.0.0.1".into();
    config.transport = TransportChoice::Ucx;
    config.tls = Some(authority.files(&id(0)));
    let error = Engine::start(config).expect_err("refused");
    assert!(error.text().contains("ucx"), "{error}");
}
