//! Decoders inside the library: the first byte says which.
#![no_main]

use connex_rs::fuzzing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((which, bytes)) = data.split_first() else {
        return;
    };
    match which % 3 {
        0 => fuzzing::datagram(bytes),
        1 => fuzzing::step_header(bytes),
        _ => fuzzing::certificate(bytes),
    }
});
