//! The memory that the engines of this process share with their sentinel, and the robust locks in it.

use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::program::{self, HOLDER, LOCK_FROM_NODE, RobustLock, Shared, WAITERS};

/// A mapping of [`Shared`]; the file behind it goes to the sentinel.
pub(super) struct Memory {
    at: NonNull<Shared>,
    /// `None`: there is no sentinel to share it with.
    file: Option<OwnedFd>,
}

// SAFETY: the mapping is made of atomics and lives as long as this value.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Makes the memory. If no memory file can be had it is private, and the error comes along.
    pub(super) fn new() -> std::io::Result<(Self, Option<String>)> {
        let file = rustix::fs::memfd_create("connex-sentinel-table", MemfdFlags::CLOEXEC).and_then(
            |file| rustix::fs::ftruncate(&file, size_of::<Shared>() as u64).map(|()| file),
        );
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let len = size_of::<Shared>();
        let at = match &file {
            // SAFETY: a new mapping where the kernel likes.
            Ok(file) => unsafe {
                rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, file, 0)
            },
            // SAFETY: as above.
            Err(_) => unsafe {
                rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, prot, MapFlags::PRIVATE)
            },
        }?;
        let at = NonNull::new(at.cast()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        let trouble = file
            .as_ref()
            .err()
            .map(|e| format!("no shared memory file can be made: {e}"));
        let this = Self {
            at,
            file: file.ok(),
        };
        this.parent.store(std::process::id(), Ordering::Relaxed);
        this.layout.store(program::LAYOUT, Ordering::Release);
        Ok((this, trouble))
    }

    /// The file, for the sentinel.
    pub(super) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }
}

impl std::ops::Deref for Memory {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        // SAFETY: mapped with this length until drop; all zeros are valid for atomics.
        unsafe { self.at.as_ref() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: ours, and nobody holds a reference to it beyond our own life.
        let unmapped = unsafe { rustix::mm::munmap(self.at.as_ptr().cast(), size_of::<Shared>()) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

/// The kernel's `struct robust_list_head`.
#[repr(C)]
struct ListHead {
    first: *const AtomicU64,
    futex_offset: isize,
    pending: *const AtomicU64,
}

/// The locks, held by the present thread: when the thread ends, by whatever cause, the kernel marks the lock words and wakes
/// the sentinel's threads, before it takes the process's memory down.
///
/// The thread's robust list is replaced meanwhile, so the thread must not take robust locks of the C library.
pub(super) struct Held<'a> {
    memory: &'a Memory,
    /// The list of the C library, put back at the end.
    theirs: (*const ListHead, usize),
    /// Named to the kernel: stays where it is.
    _head: Box<ListHead>,
    /// Belongs to the thread that took it.
    _thread: PhantomData<*const ()>,
}

impl<'a> Held<'a> {
    /// Takes the locks, which are free.
    ///
    /// # Errors
    /// The system has no robust locks, or a filter forbids them.
    pub(super) fn take(memory: &'a Memory) -> std::io::Result<Self> {
        let mut theirs: (*const ListHead, usize) = (std::ptr::null(), 0);
        // SAFETY: the kernel writes one pointer and one length.
        let got = unsafe {
            libc::syscall(
                libc::SYS_get_robust_list,
                0,
                &raw mut theirs.0,
                &raw mut theirs.1,
            )
        };
        if got != 0 {
            return Err(std::io::Error::last_os_error());
        }
        let mut head = Box::new(ListHead {
            first: &memory.locks[0].node,
            futex_offset: LOCK_FROM_NODE,
            pending: std::ptr::null(),
        });
        // A list is a circle: its last entry points to the head.
        let start = &raw const head.first as u64;
        let next = &raw const memory.locks[1].node as u64;
        memory.locks[0].node.store(next, Ordering::Relaxed);
        memory.locks[1].node.store(start, Ordering::Relaxed);
        // SAFETY: plain call without arguments.
        let thread = unsafe { libc::syscall(libc::SYS_gettid) } as u32 & HOLDER;
        for lock in &memory.locks {
            lock.word.store(thread | WAITERS, Ordering::Release);
        }
        // SAFETY: head and entries stay where they are until the old list is put back in `drop`; if the thread ends before
        // that the process ends, too, or the memory has been leaked.
        let set = unsafe {
            libc::syscall(
                libc::SYS_set_robust_list,
                &raw mut *head,
                size_of::<ListHead>(),
            )
        };
        if set != 0 {
            let error = std::io::Error::last_os_error();
            for lock in &memory.locks {
                lock.word.store(0, Ordering::Release);
            }
            return Err(error);
        }
        Ok(Self {
            memory,
            theirs,
            _head: head,
            _thread: PhantomData,
        })
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for lock in &self.memory.locks {
            lock.word.store(0, Ordering::Release);
            wake(lock);
        }
        // SAFETY: the pointer and length that the kernel gave us for this very thread.
        unsafe { libc::syscall(libc::SYS_set_robust_list, self.theirs.0, self.theirs.1) };
    }
}

/// Wakes whoever waits for the lock, in whatever process.
pub(super) fn wake(lock: &RobustLock) {
    let word = lock.word.as_ptr();
    // SAFETY: the word is mapped; waking touches nothing.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX) };
}
