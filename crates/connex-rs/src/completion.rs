//! The end of an operation, told once to whoever waits for it.

use std::sync::OnceLock;
use std::task::Waker;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::sync::{Condvar, Mutex};

/// Shared by the engine, which finishes it, and the caller, who waits.
#[derive(Debug, Default)]
pub(crate) struct Completion {
    result: OnceLock<Result<(), Error>>,
    waker: Mutex<Option<Waker>>,
    finished: Condvar,
}

impl Completion {
    /// One that has ended already.
    pub(crate) fn ended(result: Result<(), Error>) -> Self {
        let this = Self::default();
        this.finish(result);
        this
    }

    /// Records the end; true if somebody is to be woken with [`wake`](Self::wake).
    ///
    /// Only the first call counts (I1); that there is one alone is the engine's duty, checked in debug builds.
    pub(crate) fn finish(&self, result: Result<(), Error>) -> bool {
        let waker = self.waker.lock();
        let first = self.result.set(result).is_ok();
        debug_assert!(first, "an operation ended twice");
        self.finished.has_sleepers() || waker.is_some()
    }

    /// Wakes who waits. Called after the driver has been released: a waker is foreign code.
    pub(crate) fn wake(&self) {
        let waker = self.waker.lock().take();
        self.finished.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The result, once there is one.
    pub(crate) fn result(&self) -> Option<&Result<(), Error>> {
        self.result.get()
    }

    /// Whether it has ended.
    pub(crate) fn is_done(&self) -> bool {
        self.result.get().is_some()
    }

    /// Sleeps until the end or until `until` (`None`: forever); true if it has ended.
    pub(crate) fn wait_until(&self, until: Option<Instant>) -> bool {
        let mut waker = self.waker.lock();
        while self.result.get().is_none() {
            let timed_out;
            (waker, timed_out) = self.finished.wait_until(waker, until);
            if timed_out {
                break;
            }
        }
        self.result.get().is_some()
    }

    /// Leaves a waker; false if the end has come already and the waker is not kept.
    pub(crate) fn set_waker(&self, waker: &Waker) -> bool {
        let mut kept = self.waker.lock();
        if self.result.get().is_some() {
            return false;
        }
        match &mut *kept {
            Some(old) => old.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
        true
    }
}

/// The instant `timeout` from now; `None` means forever, as does a time too far to express.
pub(crate) fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|t| Instant::now().checked_add(t))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_sleeper_sees_the_result() {
        let completion = Arc::new(Completion::default());
        let sleeper = std::thread::spawn({
            let completion = completion.clone();
            move || completion.wait_until(None)
        });
        std::thread::sleep(Duration::from_millis(20));
        if completion.finish(Err(Error::closed())) {
            completion.wake();
        }
        assert!(sleeper.join().expect("no panic"));
        assert_eq!(completion.result(), Some(&Err(Error::closed())));
    }

    #[test]
    fn a_wait_that_runs_out_says_so() {
        let completion = Completion::default();
        assert!(!completion.wait_until(deadline(Some(Duration::from_millis(5)))));
        assert!(!completion.finish(Ok(())), "nobody waits any more");
    }
}
