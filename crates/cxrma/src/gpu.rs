//! Memory to measure with: the host's, or a GPU's, for which this program loads the CUDA driver.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::mem::transmute_copy;

use anyhow::{Context as _, ensure};
use connex_rs::Engine;

/// Allocates and registers `len` bytes: of the host without a device, else of the CUDA device of that number. They live as long as
/// the engine.
///
/// # Errors
/// There is no such device, or memory is short.
pub(crate) fn allocate(engine: &Engine, device: Option<u32>, len: usize) -> anyhow::Result<usize> {
    let Some(device) = device else {
        return Ok(engine.allocate_managed_buffer(len)?);
    };
    let addr = allocate_on(device, len)?;
    // SAFETY: it is never freed, and accessed by copies of the driver only.
    unsafe { engine.register_memory(addr, len) }?;
    Ok(addr)
}

/// A function of the driver.
///
/// # Safety
/// `F` must be the type of the function of that name.
unsafe fn function<F>(driver: *mut c_void, name: &CStr) -> anyhow::Result<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the handle is that of a loaded library, the name ends in a zero.
    let symbol = unsafe { libc::dlsym(driver, name.as_ptr()) };
    ensure!(!symbol.is_null(), "the CUDA driver has no {name:?}");
    // SAFETY: by this function's contract.
    Ok(unsafe { transmute_copy(&symbol) })
}

fn allocate_on(device: u32, len: usize) -> anyhow::Result<usize> {
    let none = || format!("There is no GPU {device} on this host");
    let ordinal = c_int::try_from(device).with_context(none)?;
    // SAFETY: loading the driver has no effect but that it is there; it is never unloaded.
    let driver = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    ensure!(!driver.is_null(), "{}: it has no CUDA driver", none());
    let (mut count, mut context, mut addr) = (0, 0usize, 0u64);
    let (made, current, allocated);
    // SAFETY: the public types of these functions; each writes one value of the type that is passed.
    unsafe {
        let init: unsafe extern "C" fn(c_uint) -> c_int = function(driver, c"cuInit")?;
        let devices: unsafe extern "C" fn(*mut c_int) -> c_int =
            function(driver, c"cuDeviceGetCount")?;
        let retain: unsafe extern "C" fn(*mut usize, c_int) -> c_int =
            function(driver, c"cuDevicePrimaryCtxRetain")?;
        let set: unsafe extern "C" fn(usize) -> c_int = function(driver, c"cuCtxSetCurrent")?;
        let alloc: unsafe extern "C" fn(*mut u64, usize) -> c_int =
            function(driver, c"cuMemAlloc_v2")?;
        ensure!(
            init(0) == 0 && devices(&mut count) == 0 && ordinal < count,
            none()
        );
        made = retain(&mut context, ordinal);
        // This thread helps the engine, which it may only with the engine's context.
        current = set(context);
        allocated = alloc(&mut addr, len);
    }
    ensure!(
        made == 0 && current == 0 && allocated == 0,
        "GPU {device} gives no {} MiB (CUDA errors {made}, {current}, {allocated})",
        len.div_ceil(1 << 20)
    );
    Ok(addr as usize)
}
