//! Heads and greetings: what is decoded is what would be encoded.
#![no_main]

use connex_rs::wire::{self, Greeting};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(message) = wire::decode(data) {
        let head = wire::encode(&message);
        assert_eq!(wire::decode(head.as_slice()).ok(), Some(message));
    }
    let _ = wire::foreign_version(data);
    if let Ok(greeting) = Greeting::decode(data) {
        let again = Greeting::decode(&greeting.encode());
        assert_eq!(again.ok(), Some(greeting));
    }
});
