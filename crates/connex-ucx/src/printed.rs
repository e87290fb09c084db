//! What UCX prints into a C stream, as a string.

use std::ffi::c_char;
use std::ptr;

/// Runs `print` with a stream in memory and returns what was written to it; empty if no stream can be had.
pub(crate) fn printed(print: impl FnOnce(*mut libc::FILE)) -> String {
    let mut buffer: *mut c_char = ptr::null_mut();
    let mut len = 0usize;
    // SAFETY: both pointers outlive the stream.
    let stream = unsafe { libc::open_memstream(&mut buffer, &mut len) };
    if stream.is_null() {
        return String::new();
    }
    print(stream);
    // SAFETY: the stream is open and is closed once.
    unsafe { libc::fclose(stream) };
    if buffer.is_null() {
        return String::new();
    }
    // SAFETY: after `fclose` the buffer holds `len` bytes, and it is ours to free.
    unsafe {
        let text = String::from_utf8_lossy(std::slice::from_raw_parts(buffer.cast::<u8>(), len))
            .into_owned();
        libc::free(buffer.cast());
        text
    }
}
