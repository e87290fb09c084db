//! Numbers that nobody can guess, from the system each time: a generator in the process would draw in a forked child what it
//! draws in the parent.

use rand::rngs::OsRng;
use rand::{RngCore, TryRngCore};

/// A number.
///
/// # Panics
/// If the system has no randomness to give, which no running Linux refuses.
pub(crate) fn number() -> u64 {
    OsRng.unwrap_err().next_u64()
}

/// `N` bytes.
///
/// # Panics
/// As [`number`].
pub(crate) fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    OsRng.unwrap_err().fill_bytes(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    #[test]
    fn a_child_draws_other_numbers_than_its_parent() {
        super::number();
        let (mut from_child, mut to_parent) = std::io::pipe().expect("a pipe");
        // SAFETY: the child draws, writes and ends.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
        if child == 0 {
            let written = to_parent.write_all(&super::number().to_ne_bytes());
            // SAFETY: ends the child without what belongs to the parent.
            unsafe { libc::_exit(written.is_err().into()) };
        }
        drop(to_parent);
        let mut theirs = [0; 8];
        from_child
            .read_exact(&mut theirs)
            .expect("the child's number");
        assert_ne!(u64::from_ne_bytes(theirs), super::number());
        // SAFETY: waits for our own child.
        let waited = unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        assert_eq!(waited, child);
    }
}
