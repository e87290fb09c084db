//! Recognising a forked child: nothing of an engine but its memory survives a fork.

use std::os::fd::RawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering};

use crate::error::{Error, ErrorKind, Result};

/// How many forks lie between the process that loaded us and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Descriptors that a forked child closes at once: a socket that it kept would hide its parent's death from
/// the parent's peers.
static PRIVATE: [AtomicI32; PRIVATE_SLOTS] = [const { AtomicI32::new(FREE) }; PRIVATE_SLOTS];

/// More descriptors than this are not closed in the child; the sentinel still reports the parent's death.
const PRIVATE_SLOTS: usize = 8192;

const FREE: i32 = -1;

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    for slot in &PRIVATE {
        let fd = slot.swap(FREE, Ordering::Relaxed);
        if fd != FREE {
            // SAFETY: `close` may be called in a forked child; the descriptor was the parent's engine's own.
            unsafe { libc::close(fd) };
        }
    }
}

/// A descriptor that no forked child keeps, while this lives. Must be dropped before the descriptor is closed.
#[derive(Debug)]
pub(crate) struct Private(Option<usize>);

impl Private {
    /// Remembers `fd`.
    pub(crate) fn new(fd: RawFd) -> Self {
        static HINT: AtomicUsize = AtomicUsize::new(0);
        generation();
        let start = HINT.load(Ordering::Relaxed);
        let slot = (0..PRIVATE_SLOTS)
            .map(|i| (start + i) % PRIVATE_SLOTS)
            .find(|&slot| {
                PRIVATE[slot]
                    .compare_exchange(FREE, fd, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok()
            });
        if let Some(slot) = slot {
            HINT.store(slot + 1, Ordering::Relaxed);
        }
        Self(slot)
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            PRIVATE[slot].store(FREE, Ordering::Relaxed);
        }
    }
}

/// The generation of this process; counting starts with the first call.
pub(crate) fn generation() -> u32 {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the handler only touches atomics and closes descriptors, which is allowed in a forked child.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    GENERATION.load(Ordering::Relaxed)
}

/// Whether this process is the one in which `born` was read.
pub(crate) fn is_native(born: u32) -> bool {
    GENERATION.load(Ordering::Relaxed) == born
}

/// Refuses the use of an engine in a forked child.
///
/// # Errors
/// `Invalid`, with the way out.
pub(crate) fn check(born: u32) -> Result<()> {
    if is_native(born) {
        Ok(())
    } else {
        Err(Error::new(
            ErrorKind::Invalid,
            "this engine was made before fork(): its threads and connections stay with the parent; make a new engine in the child",
        ))
    }
}
