//! What loading UCX does to its host, undone.
//!
//! Left alone, a load of UCX makes the process ignore SIGHUP, may take over the signals of crashes (before
//! 1.20) from whoever wants them, and sleeps 50 ms for every memory function that it patches. All three
//! are steered by environment variables that UCX reads **while it is loaded**, so they are set for that moment,
//! only where the user has not set them, and taken away again.
//!
//! Changing the environment of a process with threads is a race with any C code that calls `getenv` at
//! the same moment (Rust code is safe: `std::env` has a lock of its own). It cannot be avoided, only kept short: it
//! happens once per process, under [`LOAD`], before the first engine exists.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

use crate::lock::lock;

/// Held while the process's state is changed.
static LOAD: Mutex<()> = Mutex::new(());

/// Set while UCX is loaded, where the user has not set them.
const VARIABLES: &[(&str, &str)] = &[
    // Signal that attaches a debugger: UCX takes SIGHUP unless told 0.
    ("UCX_DEBUG_SIGNO", "0"),
    // No handlers for crashes: they belong to the host, e.g. to Python's faulthandler.
    ("UCX_HANDLE_ERRORS", "none"),
    // No waits of 50 ms for each patched function (1.22); nobody runs those functions' first bytes now.
    (GRACE, "0"),
    // UCX logs to stdout by default, where it would mix with the host's output.
    ("UCX_LOG_FILE", "stderr"),
];

/// Versions that do not know this one warn of it, so it is set only for those that do.
const GRACE: &str = "UCX_MEM_BISTRO_GRACE_DURATION";

/// Whose dispositions are put back.
const SIGNALS: &[c_int] = &[
    libc::SIGHUP,
    libc::SIGILL,
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGSEGV,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGPIPE,
];

/// Signal dispositions at one moment; put back on drop.
pub(crate) struct KeepSignals {
    saved: Vec<(c_int, libc::sigaction)>,
}

impl KeepSignals {
    pub(crate) fn new() -> Self {
        // Whoever asks UCX to handle signals gets what they asked for.
        let asked = |name| std::env::var_os(name).is_some();
        let saved = SIGNALS
            .iter()
            .filter(|&&signal| match signal {
                libc::SIGHUP => !asked("UCX_DEBUG_SIGNO"),
                _ => !asked("UCX_HANDLE_ERRORS") && !asked("UCX_ERROR_SIGNALS"),
            })
            .filter_map(|&signal| disposition(signal).map(|action| (signal, action)))
            .collect();
        Self { saved }
    }
}

impl Drop for KeepSignals {
    fn drop(&mut self) {
        for (signal, action) in &self.saved {
            let now = disposition(*signal);
            if now.is_some_and(|now| now.sa_sigaction == action.sa_sigaction) {
                continue;
            }
            // SAFETY: `action` is what the kernel reported for this very signal.
            unsafe { libc::sigaction(*signal, action, std::ptr::null_mut()) };
        }
    }
}

fn disposition(signal: c_int) -> Option<libc::sigaction> {
    let mut action = MaybeUninit::uninit();
    // SAFETY: a null new action only asks; the old one is written to `action` on success.
    let rc = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: success means that it was written.
    (rc == 0).then(|| unsafe { action.assume_init() })
}

/// Variables that are set for a while, where the user has not set them; taken away again on drop.
///
/// For settings that a version of UCX reads from the environment alone. One at a time in a process; what the module says
/// of the environment and threads holds here too, so keep it short.
#[derive(Debug)]
pub struct ScopedEnv {
    set: Vec<String>,
    _lock: MutexGuard<'static, ()>,
}

impl ScopedEnv {
    /// Sets each variable that is not set. Waits for an earlier one, and for a load of UCX, to end: one thread must not hold two.
    pub fn set<'a>(variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let lock = lock(&LOAD);
        let mut set = Vec::new();
        for (name, value) in variables {
            if std::env::var_os(name).is_none() {
                // SAFETY: the module says what remains of the race, and why.
                unsafe { std::env::set_var(name, value) };
                set.push(name.to_owned());
            }
        }
        Self { set, _lock: lock }
    }
}

impl Drop for ScopedEnv {
    fn drop(&mut self) {
        for name in &self.set {
            // SAFETY: as in `set`.
            unsafe { std::env::remove_var(name) };
        }
    }
}

/// The process as it was before the load; put back on drop.
pub(crate) struct LoadGuard {
    // Undone in this order, the lock inside the variables last.
    _signals: KeepSignals,
    _variables: ScopedEnv,
}

impl LoadGuard {
    /// For the load of the UCX whose libucs this is.
    pub(crate) fn new(libucs: &Path) -> Self {
        // Signals are looked at first: what the user set decides about them.
        let signals = KeepSignals::new();
        let wanted = VARIABLES
            .iter()
            .filter(|(name, _)| *name != GRACE || knows(libucs, b"BISTRO_GRACE_DURATION"))
            .copied();
        Self {
            _signals: signals,
            _variables: ScopedEnv::set(wanted),
        }
    }
}

/// Whether the file holds these bytes; a setting that UCX knows is a string in it.
fn knows(file: &Path, setting: &[u8]) -> bool {
    std::fs::read(file).is_ok_and(|bytes| bytes.windows(setting.len()).any(|w| w == setting))
}
