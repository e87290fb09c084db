//! Recognising a forked child: nothing of an engine but its memory survives a fork.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, ErrorKind, Result};

/// How many forks lie between the process that loaded us and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// The generation of this process; counting starts with the first call.
pub(crate) fn generation() -> u32 {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the handler only touches an atomic, which is allowed in a forked child.
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
