//! Page-aligned host memory that the engine owns.

use std::ffi::c_void;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::error::{Error, ErrorKind, Result};

/// Anonymous pages, zeroed, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Pages {
    ptr: NonNull<c_void>,
    len: usize,
}

// SAFETY: plain memory without thread affinity; all access goes through raw pointers whose users synchronise.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps `len` bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// `Invalid` for 0 bytes or more than the address space, `Transport` with the system's words when memory is short.
    pub(crate) fn new(len: usize) -> Result<Self> {
        if len == 0 || isize::try_from(len).is_err() {
            return Err(Error::invalid(format!(
                "cannot allocate a buffer of {len} bytes"
            )));
        }
        // SAFETY: a fresh anonymous mapping at an address of the system's choice touches nothing else.
        let ptr = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(|e| {
            Error::new(
                ErrorKind::Transport,
                format!("cannot allocate {len} bytes: {e}"),
            )
        })?;
        let ptr = NonNull::new(ptr)
            .ok_or_else(|| Error::new(ErrorKind::Transport, "mapped the null page"))?;
        Ok(Self { ptr, len })
    }

    pub(crate) fn addr(&self) -> usize {
        self.ptr.as_ptr() as usize
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and whoever used it holds an `Arc` of it no more. Nothing can be done if it fails.
        let _ = unsafe { munmap(self.ptr.as_ptr(), self.len) };
    }
}
