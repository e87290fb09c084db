//! Known contents: filling memory with them and checking that they arrived.

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

/// Writes `len` bytes of contents number `seed` at `addr`.
///
/// # Safety
/// `addr` is 8-byte aligned and valid for writing `len` bytes, rounded up to whole words.
pub(crate) unsafe fn fill(addr: usize, len: usize, seed: u64) {
    for index in 0..len.div_ceil(8) {
        // SAFETY: inside the range that the caller vouches for.
        unsafe {
            (addr as *mut u64)
                .add(index)
                .write_volatile(word(seed, index as u64))
        };
    }
}

/// Overwrites `len` bytes at `addr` with what no contents have.
///
/// # Safety
/// As for [`fill`].
pub(crate) unsafe fn poison(addr: usize, len: usize) {
    for index in 0..len.div_ceil(8) {
        // SAFETY: inside the range that the caller vouches for.
        unsafe {
            (addr as *mut u64)
                .add(index)
                .write_volatile(!word(!0, index as u64))
        };
    }
}

/// Compares `len` bytes at `addr` with contents number `seed`.
///
/// # Safety
/// `addr` is 8-byte aligned and valid for reading `len` bytes, rounded up to whole words.
pub(crate) unsafe fn check(addr: usize, len: usize, seed: u64) -> Result<(), Mismatch> {
    for index in 0..len.div_ceil(8) {
        // SAFETY: inside the range that the caller vouches for.
        let found = unsafe { (addr as *const u64).add(index).read_volatile() };
        let expected = word(seed, index as u64);
        let unused_bits = (index * 8 + 8).saturating_sub(len) * 8;
        if (found ^ expected) << unused_bits != 0 {
            return Err(Mismatch {
                offset: index * 8,
                expected,
                found,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_recognised_and_others_are_not() {
        let mut memory = [0u64; 8];
        let addr = memory.as_mut_ptr() as usize;
        // SAFETY: 64 bytes, aligned, ours.
        unsafe {
            fill(addr, 61, 7);
            assert_eq!(check(addr, 61, 7), Ok(()));
            assert_eq!(check(addr, 64, 7), Ok(()));
            assert_eq!(check(addr, 61, 8).map_err(|m| m.offset), Err(0));
            for at in 0..61 {
                let byte = (addr as *mut u8).add(at);
                *byte ^= 1;
                assert_eq!(check(addr, 61, 7).map_err(|m| m.offset), Err(at / 8 * 8));
                *byte ^= 1;
            }
            *(addr as *mut u8).add(62) ^= 1;
            assert_eq!(check(addr, 61, 7), Ok(()), "past the end");
            poison(addr, 64);
            assert!(check(addr, 1, 7).is_err());
        }
    }
}
