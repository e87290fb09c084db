//! Heads and greetings: what is decoded is what would be encoded.
#![no_main]

use std::sync::LazyLock;

use connex_rs::wire::{self, Greeting, Message};
use libfuzzer_sys::fuzz_target;

/// A fault on purpose, by which `cargo xtask fuzz` sees that one would be found.
static SEEDED: LazyLock<bool> =
    LazyLock::new(|| std::env::var_os("CONNEX_FUZZ_SEEDED_FAULT").is_some());

fuzz_target!(|data: &[u8]| {
    if let Ok(message) = wire::decode(data) {
        assert!(
            !*SEEDED || !matches!(message, Message::Ping { .. }),
            "the fault on purpose"
        );
        let head = wire::encode(&message);
        assert_eq!(wire::decode(head.as_slice()).ok(), Some(message));
    }
    let _ = wire::foreign_version(data);
    if let Ok(greeting) = Greeting::decode(data) {
        let again = Greeting::decode(&greeting.encode());
        assert_eq!(again.ok(), Some(greeting));
    }
});
