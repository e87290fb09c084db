//! Logical ids and peer URLs: what is read is written the same way, and read again.
#![no_main]

use connex_rs::{LogicalId, PeerUrl};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(id) = text.parse::<LogicalId>() {
        assert_eq!(id.to_string().parse::<LogicalId>().ok(), Some(id));
    }
    if let Ok(url) = text.parse::<PeerUrl>() {
        assert_eq!(url.to_string().parse::<PeerUrl>().ok(), Some(url));
    }
});
