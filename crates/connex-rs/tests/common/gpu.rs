//! GPU memory on a host without a GPU: the stand-in driver of `tests/cuda-stand-in`, built and loaded by the tests.

use std::ffi::{CString, c_int, c_void};
use std::path::Path;

/// The driver, loaded into this process.
#[derive(Clone, Copy)]
pub(crate) struct Gpu {
    library: usize,
}

/// A context of the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Context(usize);

macro_rules! call {
    ($gpu:expr, $name:literal ($($value:expr => $type:ty),*)) => {{
        // SAFETY: the stand-in gives the function this signature, and the callers below pass what it asks for.
        let code = unsafe {
            let function: unsafe extern "C" fn($($type),*) -> c_int =
                std::mem::transmute::<*mut c_void, _>($gpu.symbol($name));
            function($($value),*)
        };
        assert_eq!(code, 0, "{}", $name);
    }};
}

impl Gpu {
    /// Loads it from its folder, and makes the first context.
    pub(crate) fn load(folder: &Path) -> Self {
        let mut library = std::ptr::null_mut();
        for name in ["libnvidia-ml.so.1", "libcuda.so.1"] {
            let path = CString::new(folder.join(name).to_str().expect("UTF-8")).expect("no zero");
            // SAFETY: our own library, whose loading runs no code.
            library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
            assert!(!library.is_null(), "{name} does not load");
        }
        let gpu = Self {
            library: library as usize,
        };
        call!(gpu, "cuInit"(0 => u32));
        gpu
    }

    fn symbol(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).expect("no zero");
        // SAFETY: the handle is that of a loaded library.
        let symbol = unsafe { libc::dlsym(self.library as *mut c_void, name.as_ptr()) };
        assert!(!symbol.is_null(), "{name:?} is missing");
        symbol
    }

    /// The primary context of a device.
    pub(crate) fn primary(&self, device: c_int) -> Context {
        let mut context = 0;
        call!(self, "cuDevicePrimaryCtxRetain"(&mut context => *mut usize, device => c_int));
        Context(context)
    }

    /// Makes it the calling thread's for the time of `action`.
    pub(crate) fn within<T>(&self, context: Context, action: impl FnOnce() -> T) -> T {
        call!(self, "cuCtxPushCurrent_v2"(context.0 => usize));
        let result = action();
        let mut popped = 0;
        call!(self, "cuCtxPopCurrent_v2"(&mut popped => *mut usize));
        result
    }

    /// Asynchronous copies wait, or go on.
    pub(crate) fn hold(&self, on: bool) {
        // SAFETY: the stand-in's function of this signature.
        unsafe {
            let function: unsafe extern "C" fn(c_int) =
                std::mem::transmute::<*mut c_void, _>(self.symbol("standin_hold"));
            function(c_int::from(on));
        }
    }

    /// Calls that found no current context where one is needed.
    pub(crate) fn context_errors(&self) -> u64 {
        // SAFETY: the stand-in's function of this signature.
        unsafe {
            let function: unsafe extern "C" fn() -> u64 =
                std::mem::transmute::<*mut c_void, _>(self.symbol("standin_context_errors"));
            function()
        }
    }

    /// Memory of a device.
    pub(crate) fn memory(&self, sort: Sort, context: Context, len: usize) -> Device {
        let mut addr = 0u64;
        self.within(context, || match sort {
            Sort::Device => call!(self, "cuMemAlloc_v2"(&mut addr => *mut u64, len => usize)),
            Sort::Managed => {
                call!(self, "cuMemAllocManaged"(&mut addr => *mut u64, len => usize, 1 => u32));
            }
            Sort::StreamOrdered => {
                call!(self, "cuMemAllocAsync"(&mut addr => *mut u64, len => usize, 0 => usize));
            }
        });
        Device {
            gpu: *self,
            context,
            addr: addr as usize,
            len,
        }
    }
}

/// How memory of a device is allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sort {
    Device,
    Managed,
    StreamOrdered,
}

/// Memory of a device; freed when dropped.
pub(crate) struct Device {
    gpu: Gpu,
    context: Context,
    addr: usize,
    len: usize,
}

impl Device {
    pub(crate) fn addr(&self) -> usize {
        self.addr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Its bytes, copied by the driver.
    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        let mut bytes = vec![0u8; len];
        self.gpu.within(self.context, || {
            call!(self.gpu, "cuMemcpyDtoH_v2"(
                bytes.as_mut_ptr() => *mut u8, (self.addr + offset) as u64 => u64, len => usize
            ));
        });
        bytes
    }

    /// Writes bytes, copied by the driver.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        self.gpu.within(self.context, || {
            call!(self.gpu, "cuMemcpyHtoD_v2"(
                (self.addr + offset) as u64 => u64, bytes.as_ptr() => *const u8, bytes.len() => usize
            ));
        });
    }

    /// Registers all of it.
    pub(crate) fn register(&self, engine: &connex_rs::Engine) {
        // SAFETY: whoever registers keeps the memory until the engine is closed or the region is taken back.
        unsafe { engine.register_memory(self.addr, self.len) }.expect("register");
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.gpu.within(self.context, || {
            call!(self.gpu, "cuMemFree_v2"(self.addr as u64 => u64));
        });
    }
}
