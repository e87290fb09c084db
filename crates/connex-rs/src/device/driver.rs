//! The CUDA driver of this process, if the application has loaded one.
//!
//! Nothing is loaded here: a host or a process without CUDA stays without. What is used are the driver's copies, streams
//! and events, which any version since CUDA 4 has.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::transmute_copy;
use std::sync::OnceLock;
use std::{fmt, ptr};

use super::{Kind, Residence};
use crate::sync::Mutex;

/// A context of the driver, by its handle; 0 is none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct ContextId(pub(super) usize);

/// What `cuPointerGetAttribute` can tell.
mod attribute {
    use super::c_int;
    pub(super) const CONTEXT: c_int = 1;
    pub(super) const MEMORY_TYPE: c_int = 2;
    pub(super) const IS_MANAGED: c_int = 8;
    pub(super) const DEVICE_ORDINAL: c_int = 9;
}

/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: c_uint = 2;
/// `CUDA_ERROR_NOT_READY`: an event has not happened yet.
const NOT_READY: c_int = 600;
/// `CU_STREAM_NON_BLOCKING`: copies do not wait for the application's default stream, nor it for them.
const NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: c_uint = 2;
/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context.
const PORTABLE: c_uint = 1;

macro_rules! api {
    ($($name:ident = $symbol:literal ($($argument:ty),*);)+) => {
        /// The driver's functions. Each returns 0 or an error number.
        struct Api {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)+
        }

        impl Api {
            /// Looks the functions up; `None` if one is missing.
            ///
            /// # Safety
            /// `library` must be a handle of the CUDA driver, whose functions have these signatures.
            unsafe fn of(library: *mut c_void) -> Option<Self> {
                Some(Self {
                    $($name: {
                        // SAFETY: the handle is valid and the name ends in a zero.
                        let symbol = unsafe { libc::dlsym(library, $symbol.as_ptr()) };
                        if symbol.is_null() {
                            return None;
                        }
                        // SAFETY: the driver's public interface gives the symbol this signature.
                        unsafe {
                            transmute_copy::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(&symbol)
                        }
                    },)+
                })
            }
        }
    };
}

api! {
    pointer_attribute = c"cuPointerGetAttribute" (*mut c_void, c_int, u64);
    error_string = c"cuGetErrorString" (c_int, *mut *const c_char);
    primary_retain = c"cuDevicePrimaryCtxRetain" (*mut usize, c_int);
    get_current = c"cuCtxGetCurrent" (*mut usize);
    set_current = c"cuCtxSetCurrent" (usize);
    push = c"cuCtxPushCurrent_v2" (usize);
    pop = c"cuCtxPopCurrent_v2" (*mut usize);
    stream_create = c"cuStreamCreate" (*mut usize, c_uint);
    stream_destroy = c"cuStreamDestroy_v2" (usize);
    stream_wait = c"cuStreamSynchronize" (usize);
    event_create = c"cuEventCreate" (*mut usize, c_uint);
    event_destroy = c"cuEventDestroy_v2" (usize);
    event_record = c"cuEventRecord" (usize, usize);
    event_query = c"cuEventQuery" (usize);
    copy_in_now = c"cuMemcpyHtoD_v2" (u64, *const c_void, usize);
    copy_out_now = c"cuMemcpyDtoH_v2" (*mut c_void, u64, usize);
    copy_in = c"cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, usize);
    copy_out = c"cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, usize);
    pin = c"cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    unpin = c"cuMemFreeHost" (*mut c_void);
}

/// The driver of this process.
pub(crate) struct Driver {
    api: Api,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

impl Driver {
    /// The driver, if it was found before. Costs nothing.
    pub(crate) fn known() -> Option<&'static Driver> {
        DRIVER.get()
    }

    /// Looks whether the process has loaded a driver. It is never unloaded afterwards.
    pub(crate) fn find() -> Option<&'static Driver> {
        if let Some(known) = DRIVER.get() {
            return Some(known);
        }
        // SAFETY: with `RTLD_NOLOAD` nothing is loaded and no code of it runs; the name ends in a zero.
        let library = unsafe {
            libc::dlopen(
                c"libcuda.so.1".as_ptr(),
                libc::RTLD_NOLOAD | libc::RTLD_LAZY,
            )
        };
        if library.is_null() {
            return None;
        }
        // SAFETY: by its name it is the CUDA driver.
        let api = unsafe { Api::of(library) }?;
        Some(DRIVER.get_or_init(|| Driver { api }))
    }

    /// Where the memory at `addr` lives; `None` if the driver does not know it, or it is the host's.
    pub(crate) fn residence(&self, addr: usize) -> Option<Residence> {
        let mut managed: c_uint = 0;
        let mut kind: c_uint = 0;
        let mut context = 0usize;
        let mut ordinal: c_int = -1;
        // An address that the driver does not know gives an error, and so does a driver that was not initialised.
        let is_managed = self
            .attribute(addr, attribute::IS_MANAGED, &mut managed)
            .is_ok()
            && managed != 0;
        if !is_managed
            && (self
                .attribute(addr, attribute::MEMORY_TYPE, &mut kind)
                .is_err()
                || kind != DEVICE)
        {
            return None;
        }
        // Stream-ordered allocations belong to no context: that of their device serves.
        if self
            .attribute(addr, attribute::CONTEXT, &mut context)
            .is_err()
            || context == 0
        {
            self.attribute(addr, attribute::DEVICE_ORDINAL, &mut ordinal)
                .ok()?;
            context = self.primary(ordinal)?.0;
        }
        let kind = if is_managed {
            Kind::CudaManaged
        } else {
            Kind::Cuda
        };
        Some(Residence {
            kind,
            context: ContextId(context),
        })
    }

    fn attribute<T>(&self, addr: usize, which: c_int, into: &mut T) -> Result<(), c_int> {
        // SAFETY: each attribute that is asked for has the type that its caller passes; the address is only looked up.
        let code =
            unsafe { (self.api.pointer_attribute)(ptr::from_mut(into).cast(), which, addr as u64) };
        if code == 0 { Ok(()) } else { Err(code) }
    }

    /// The primary context of a device. Kept for the life of the process, as the CUDA runtime itself does.
    fn primary(&self, ordinal: c_int) -> Option<ContextId> {
        static PRIMARY: Mutex<Vec<(c_int, ContextId)>> = Mutex::new(Vec::new());
        let mut known = PRIMARY.lock();
        if let Some((_, context)) = known.iter().find(|(of, _)| *of == ordinal) {
            return Some(*context);
        }
        let mut context = 0;
        // SAFETY: writes one handle.
        let code = unsafe { (self.api.primary_retain)(&mut context, ordinal) };
        (code == 0 && context != 0).then(|| {
            known.push((ordinal, ContextId(context)));
            ContextId(context)
        })
    }

    /// The calling thread's context.
    pub(crate) fn current(&self) -> Option<ContextId> {
        let mut context = 0;
        // SAFETY: writes one handle.
        let code = unsafe { (self.api.get_current)(&mut context) };
        (code == 0 && context != 0).then_some(ContextId(context))
    }

    /// Makes a context the calling thread's, for good. For threads of our own.
    pub(crate) fn adopt(&self, context: ContextId) -> Result<(), String> {
        // SAFETY: a handle that the driver gave out; one that has been destroyed is refused.
        self.check("cuCtxSetCurrent", unsafe {
            (self.api.set_current)(context.0)
        })
    }

    /// Runs `action` while `context` is the calling thread's.
    pub(crate) fn within<T>(
        &self,
        context: ContextId,
        action: impl FnOnce() -> Result<T, String>,
    ) -> Result<T, String> {
        if self.current() == Some(context) {
            return action();
        }
        // SAFETY: a handle that the driver gave out; one that has been destroyed is refused.
        self.check("cuCtxPushCurrent", unsafe { (self.api.push)(context.0) })?;
        let result = action();
        let mut popped = 0;
        // SAFETY: takes off what was pushed above; writes one handle.
        unsafe { (self.api.pop)(&mut popped) };
        result
    }

    fn check(&self, what: &str, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: writes one pointer to a string that lives as long as the driver.
        let known = unsafe { (self.api.error_string)(code, &mut text) } == 0 && !text.is_null();
        let text = if known {
            // SAFETY: the driver's own string, which ends in a zero.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        } else {
            "unknown error".into()
        };
        Err(format!("{what}: {text} (CUDA error {code})"))
    }

    /// Copies to the device, and waits.
    ///
    /// # Safety
    /// `len` bytes must be valid at both places.
    pub(super) unsafe fn copy_in_now(
        &self,
        residence: Residence,
        to: usize,
        from: *const u8,
        len: usize,
    ) -> Result<(), String> {
        self.within(residence.context, || {
            // SAFETY: by this function's contract.
            let code = unsafe { (self.api.copy_in_now)(to as u64, from.cast(), len) };
            self.check("cuMemcpyHtoD", code)
        })
    }

    /// Copies from the device, and waits.
    ///
    /// # Safety
    /// As for `copy_in_now`.
    pub(super) unsafe fn copy_out_now(
        &self,
        residence: Residence,
        to: *mut u8,
        from: usize,
        len: usize,
    ) -> Result<(), String> {
        self.within(residence.context, || {
            // SAFETY: by this function's contract.
            let code = unsafe { (self.api.copy_out_now)(to.cast(), from as u64, len) };
            self.check("cuMemcpyDtoH", code)
        })
    }

    /// Pinned host memory, which the device copies to and from by itself; `None` if there is none to be had.
    pub(super) fn pin(&self, context: ContextId, len: usize) -> Option<*mut u8> {
        let mut at = ptr::null_mut();
        let pinned = self.within(context, || {
            // SAFETY: writes one pointer.
            self.check("cuMemHostAlloc", unsafe {
                (self.api.pin)(&mut at, len, PORTABLE)
            })
        });
        (pinned.is_ok() && !at.is_null()).then_some(at.cast())
    }

    /// Gives back what [`pin`](Self::pin) gave.
    ///
    /// # Safety
    /// `at` must come from `pin`, and nothing may use the memory any more.
    pub(super) unsafe fn unpin(&self, context: ContextId, at: *mut u8) {
        // When the driver is being torn down there is nothing left to free.
        let _ = self.within(context, || {
            // SAFETY: by this function's contract.
            self.check("cuMemFreeHost", unsafe { (self.api.unpin)(at.cast()) })
        });
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Driver")
    }
}

/// A stream of copies in one context: they happen in the order in which they were started.
#[derive(Debug)]
pub(super) struct Lane {
    driver: &'static Driver,
    context: ContextId,
    stream: usize,
    /// Events that are free to be used again.
    events: Mutex<Vec<usize>>,
}

impl Lane {
    pub(super) fn new(driver: &'static Driver, context: ContextId) -> Result<Self, String> {
        let mut stream = 0;
        driver.within(context, || {
            // SAFETY: writes one handle.
            let code = unsafe { (driver.api.stream_create)(&mut stream, NON_BLOCKING) };
            driver.check("cuStreamCreate", code)
        })?;
        Ok(Self {
            driver,
            context,
            stream,
            events: Mutex::default(),
        })
    }

    /// Starts a copy to the device and records an event behind it; returns the event.
    ///
    /// # Safety
    /// `len` bytes at `from` must stay valid and unchanged, and `len` at `to` on the device valid, until the event has happened.
    pub(super) unsafe fn copy_in(
        &self,
        to: usize,
        from: *const u8,
        len: usize,
    ) -> Result<usize, String> {
        self.driver.within(self.context, || {
            // SAFETY: by this function's contract.
            let code =
                unsafe { (self.driver.api.copy_in)(to as u64, from.cast(), len, self.stream) };
            self.driver.check("cuMemcpyHtoDAsync", code)?;
            self.record()
        })
    }

    /// The same from the device.
    ///
    /// # Safety
    /// As for `copy_in`, the other way round: nobody may look at `to` before the event has happened.
    pub(super) unsafe fn copy_out(
        &self,
        to: *mut u8,
        from: usize,
        len: usize,
    ) -> Result<usize, String> {
        self.driver.within(self.context, || {
            // SAFETY: by this function's contract.
            let code =
                unsafe { (self.driver.api.copy_out)(to.cast(), from as u64, len, self.stream) };
            self.driver.check("cuMemcpyDtoHAsync", code)?;
            self.record()
        })
    }

    /// An event behind all copies so far. If none can be had the copies are waited for, so that whoever gets the error may
    /// take the memory back.
    fn record(&self) -> Result<usize, String> {
        let result = self.try_record();
        if result.is_err() {
            // SAFETY: the stream is ours.
            unsafe { (self.driver.api.stream_wait)(self.stream) };
        }
        result
    }

    fn try_record(&self) -> Result<usize, String> {
        let known = self.events.lock().pop();
        let event = match known {
            Some(event) => event,
            None => {
                let mut event = 0;
                // SAFETY: writes one handle.
                let code = unsafe { (self.driver.api.event_create)(&mut event, NO_TIMING) };
                self.driver.check("cuEventCreate", code)?;
                event
            }
        };
        // SAFETY: event and stream are of this lane and alive.
        let code = unsafe { (self.driver.api.event_record)(event, self.stream) };
        match self.driver.check("cuEventRecord", code) {
            Ok(()) => Ok(event),
            Err(text) => {
                self.events.lock().push(event);
                Err(text)
            }
        }
    }

    /// Whether an event has happened.
    pub(super) fn happened(&self, event: usize) -> Result<bool, String> {
        self.driver.within(self.context, || {
            // SAFETY: the event is of this lane and alive.
            match unsafe { (self.driver.api.event_query)(event) } {
                NOT_READY => Ok(false),
                code => self
                    .driver
                    .check("a copy between host and device", code)
                    .map(|()| true),
            }
        })
    }

    /// An event is not needed any more.
    pub(super) fn recycle(&self, event: usize) {
        self.events.lock().push(event);
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // When the context is gone already there is nothing to destroy.
        let _ = self.driver.within(self.context, || {
            // SAFETY: stream and events are ours and nothing else uses them; the copies are waited for, since their
            // memory goes next.
            unsafe {
                (self.driver.api.stream_wait)(self.stream);
                for event in self.events.get_mut().drain(..) {
                    (self.driver.api.event_destroy)(event);
                }
                (self.driver.api.stream_destroy)(self.stream);
            }
            Ok(())
        });
    }
}
