//! Locks that leave a forked child free to make its own.
//!
//! They are the standard library's, each of which is a few words of its own memory. A lock whose sleepers stand in one
//! table for the whole process (parking_lot's) hands a forked child that table with the parent's threads in it: their memory
//! becomes the stacks of the child's threads, and the table is followed into them. What a thread of the parent held at the
//! fork stays locked in the child: a child locks nothing that it inherited. No lock is poisoned.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{self, PoisonError, TryLockError};
use std::time::Instant;

pub(crate) use std::sync::MutexGuard;

/// Mutual exclusion.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    /// Waits for the lock: first by passing the processor on, since most holders are done within microseconds, then asleep.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        /// To sleep and be woken costs as much as about this many.
        const YIELDS: usize = 8;
        for _ in 0..YIELDS {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            std::thread::yield_now();
        }
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock, if it is free.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Many readers or one writer.
#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn read(&self) -> sync::RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> sync::RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where threads sleep for a change of what a [`Mutex`] guards.
///
/// Whoever makes the change notifies after that, with the lock held or released. With no sleeper that costs no system call.
#[derive(Debug, Default)]
pub(crate) struct Condvar {
    condvar: sync::Condvar,
    /// Counted, both ways, with the lock held, so that who had the lock later knows of every sleeper that missed its change.
    sleepers: AtomicUsize,
}

impl Condvar {
    pub(crate) const fn new() -> Self {
        Self {
            condvar: sync::Condvar::new(),
            sleepers: AtomicUsize::new(0),
        }
    }

    /// Sleeps without the lock until notified, or until `until` (`None`: never) has passed, or for no reason; true if time is up.
    pub(crate) fn wait_until<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        until: Option<Instant>,
    ) -> (MutexGuard<'a, T>, bool) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        let (guard, timed_out) = match until {
            Some(until) => {
                let left = until.saturating_duration_since(Instant::now());
                let (guard, result) = self
                    .condvar
                    .wait_timeout(guard, left)
                    .unwrap_or_else(PoisonError::into_inner);
                (guard, result.timed_out())
            }
            None => {
                let guard = self.condvar.wait(guard);
                (guard.unwrap_or_else(PoisonError::into_inner), false)
            }
        };
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        (guard, timed_out)
    }

    /// Whether anybody sleeps here. Exact while the lock is held.
    pub(crate) fn has_sleepers(&self) -> bool {
        self.sleepers.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn notify_one(&self) {
        if self.has_sleepers() {
            self.condvar.notify_one();
        }
    }

    pub(crate) fn notify_all(&self) {
        if self.has_sleepers() {
            self.condvar.notify_all();
        }
    }
}
