//! Decoders that are not public, for the fuzz targets: each takes arbitrary bytes, and checks what must hold of whatever came out.

use crate::channel::ring;
use crate::sentinel::program;
use crate::transport::tcp::tls;

/// A datagram of the sentinel's kind: nothing but what is encoded is decoded.
pub fn datagram(bytes: &[u8]) {
    if let Some((notice, life, token)) = program::decode(bytes) {
        assert_eq!(program::encode(notice, life, &token), bytes);
    }
}

/// The header of a channel's step: where it is, and the slot's bytes.
pub fn step_header(bytes: &[u8]) {
    let Some((at, bytes)) = bytes.split_first_chunk() else {
        return;
    };
    let at = u64::from(u16::from_le_bytes(*at));
    ring::fuzz(at, bytes);
}

/// A peer's certificate.
pub fn certificate(bytes: &[u8]) {
    tls::fuzz(bytes);
}
