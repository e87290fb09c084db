//! Decoders that are not public, for the fuzz targets: each takes arbitrary bytes, and checks what must hold of whatever came out.
//! And what our own encoders make for each, for the fuzzer to begin with.

use crate::channel::ring;
use crate::sentinel::program::{self, Notice};
use crate::transport::tcp::tls;

/// A datagram of the sentinel's kind: nothing but what is encoded is decoded.
pub fn datagram(bytes: &[u8]) {
    if let Some((notice, life, token)) = program::decode(bytes) {
        assert_eq!(program::encode(notice, life, &token), bytes);
    }
}

/// One datagram of each kind.
pub fn datagrams() -> [(&'static str, Vec<u8>); 4] {
    [
        ("died", Notice::Died),
        ("dumping", Notice::Dumping),
        ("stalled", Notice::Stalled(250)),
        ("given-up", Notice::GivenUp),
    ]
    .map(|(name, notice)| (name, program::encode(notice, (3, 4), &[5; 16]).to_vec()))
}

/// The header of a channel's step: where it is, and the slot's bytes.
pub fn step_header(bytes: &[u8]) {
    let Some((at, bytes)) = bytes.split_first_chunk() else {
        return;
    };
    let at = u64::from(u16::from_le_bytes(*at));
    ring::fuzz(at, bytes);
}

/// A channel's first step as it lies in the ring.
pub struct FirstStep {
    /// The bytes of the slot: arrays and header.
    pub slot: Vec<u8>,
    /// Where in them the header is.
    pub header_at: u16,
    /// The word that tells of it.
    pub flag: [u8; 8],
}

/// Steps with arrays of several types and shapes, with one, and without any.
pub fn first_steps() -> [(&'static str, FirstStep); 3] {
    let all = &ring::SEED_ARRAYS;
    [("arrays", &all[..]), ("array", &all[..1]), ("empty", &[])]
        .map(|(name, arrays)| (name, ring::seed(arrays)))
}

/// Where the first slot of a ring with so many slots begins.
pub fn first_slot(slots: u64) -> u64 {
    ring::Layout::new(slots, 1).map_or(0, |layout| layout.slot_at(0))
}

/// A peer's certificate.
pub fn certificate(bytes: &[u8]) {
    tls::fuzz(bytes);
}
