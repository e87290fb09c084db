//! Known contents: filling memory with them and checking that they arrived.

use connex_rs::device;
use serde::{Deserialize, Serialize};

/// Where bytes differ from what they should be.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub(crate) struct Mismatch {
    /// Offset of the first 8-byte word that differs.
    pub(crate) offset: usize,
    /// What it should be.
    pub(crate) expected: u64,
    /// What it is.
    pub(crate) found: u64,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "at byte {}: {:#018x} instead of {:#018x}",
            self.offset, self.found, self.expected
        )
    }
}

/// The word at `index` of the contents number `seed`. Neighbours, seeds and all-equal memory differ from it.
pub(crate) fn word(seed: u64, index: u64) -> u64 {
    let mixed = (seed.rotate_left(32) ^ index)
        .wrapping_add(0x9e37_79b9_7f4a_7c15)
        .wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ (mixed >> 31)
}

/// Words that are made or compared at a time: memory may be a GPU's, which is reached by copies only.
const CHUNK: usize = 32 << 10;

/// Writes `len` bytes of contents number `seed` at `addr`.
///
/// # Safety
/// `addr` is valid for writing `len` bytes, rounded up to whole words; it may be host or GPU memory.
///
/// # Errors
/// The driver's, for GPU memory.
pub(crate) unsafe fn fill(addr: usize, len: usize, seed: u64) -> connex_rs::Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { write(addr, len, |index| word(seed, index)) }
}

/// Overwrites `len` bytes at `addr` with what no contents have.
///
/// # Safety
/// As for [`fill`].
///
/// # Errors
/// As for `fill`.
pub(crate) unsafe fn poison(addr: usize, len: usize) -> connex_rs::Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { write(addr, len, |index| !word(!0, index)) }
}

/// # Safety
/// As for [`fill`].
unsafe fn write(addr: usize, len: usize, word: impl Fn(u64) -> u64) -> connex_rs::Result<()> {
    let words = len.div_ceil(8);
    for start in (0..words).step_by(CHUNK) {
        let end = words.min(start + CHUNK);
        let chunk: Vec<u64> = (start..end).map(|index| word(index as u64)).collect();
        // SAFETY: inside the range that the caller vouches for.
        unsafe { device::copy_to(addr + start * 8, chunk.as_ptr().cast(), chunk.len() * 8) }?;
    }
    Ok(())
}

/// Compares `len` bytes at `addr` with contents number `seed`; the first difference.
///
/// # Safety
/// `addr` is valid for reading `len` bytes, rounded up to whole words; it may be host or GPU memory.
///
/// # Errors
/// The driver's, for GPU memory.
pub(crate) unsafe fn check(
    addr: usize,
    len: usize,
    seed: u64,
) -> connex_rs::Result<Option<Mismatch>> {
    let words = len.div_ceil(8);
    let mut chunk = vec![0u64; words.min(CHUNK)];
    for start in (0..words).step_by(CHUNK) {
        let n = CHUNK.min(words - start);
        // SAFETY: inside the range that the caller vouches for.
        unsafe { device::copy_from(addr + start * 8, chunk.as_mut_ptr().cast(), n * 8) }?;
        for (index, &found) in (start..).zip(&chunk[..n]) {
            let expected = word(seed, index as u64);
            let unused_bits = (index * 8 + 8).saturating_sub(len) * 8;
            if (found ^ expected) << unused_bits != 0 {
                return Ok(Some(Mismatch {
                    offset: index * 8,
                    expected,
                    found,
                }));
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_recognised_and_others_are_not() {
        let mut memory = [0u64; 8];
        let addr = memory.as_mut_ptr() as usize;
        let at = |len, seed| {
            // SAFETY: 64 bytes, ours.
            let found = unsafe { check(addr, len, seed) }.expect("host memory");
            found.map(|mismatch| mismatch.offset)
        };
        // SAFETY: as above.
        unsafe {
            fill(addr, 61, 7).expect("host memory");
            assert_eq!(at(61, 7), None);
            assert_eq!(at(64, 7), None);
            assert_eq!(at(61, 8), Some(0));
            for byte in 0..61 {
                *(addr as *mut u8).add(byte) ^= 1;
                assert_eq!(at(61, 7), Some(byte / 8 * 8));
                *(addr as *mut u8).add(byte) ^= 1;
            }
            *(addr as *mut u8).add(62) ^= 1;
            assert_eq!(at(61, 7), None, "past the end");
            poison(addr, 64).expect("host memory");
            assert!(at(1, 7).is_some());
        }
    }
}
