//! A context: which transports and devices are used.

use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::guard::KeepSignals;
use crate::library::Library;
use crate::memory::MemoryType;
use crate::status::Status;
use crate::sys;

/// What a context is to be able to do. Active messages and sleeping on a descriptor always are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Features {
    /// One-sided get and put. Without it UCX opens less, connects faster and offers peers less.
    pub rma: bool,
}

/// A UCX context. Cheap to clone; may be used from any thread.
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

struct Inner {
    library: &'static Library,
    raw: NonNull<sys::ucp_context>,
    features: Features,
}

// SAFETY: the context is created with `mt_workers_shared`, which makes UCX lock what workers and
// memory registrations of several threads share.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Context {
    /// Opens the devices that `config` and the host allow.
    ///
    /// The first one of a process takes some milliseconds, with a CUDA driver on the host some tens.
    ///
    /// # Errors
    /// No device that `UCX_TLS` and `UCX_NET_DEVICES` allow; no memory.
    pub fn new(config: &Config, features: Features) -> Result<Self> {
        let library = config.library;
        let mut bits = sys::UCP_FEATURE_AM | sys::UCP_FEATURE_WAKEUP;
        if features.rma {
            bits |= sys::UCP_FEATURE_RMA;
        }
        // SAFETY: plain numbers and pointers, for which zero is valid.
        let mut params: sys::ucp_params_t = unsafe { std::mem::zeroed() };
        params.field_mask =
            u64::from(sys::UCP_PARAM_FIELD_FEATURES | sys::UCP_PARAM_FIELD_MT_WORKERS_SHARED);
        params.features = u64::from(bits);
        params.mt_workers_shared = 1;
        // UCX's modules may touch signal dispositions when they are loaded, which happens here.
        let _signals = KeepSignals::new();
        let mut raw = ptr::null_mut();
        let version = library.version();
        // SAFETY: `params` says by its mask which fields are set; `config` is alive. The library's own version is
        // named, for the masks make the structs fit any.
        let status = unsafe {
            library.ucp.ucp_init_version(
                version.major,
                version.minor,
                &params,
                config.raw.as_ptr(),
                &mut raw,
            )
        };
        Status(status)
            .check()
            .map_err(|s| Error::ucx("ucp_init", s))?;
        let raw = NonNull::new(raw).ok_or(Error::ucx("ucp_init", Status::NO_MEMORY))?;
        Ok(Self {
            inner: Arc::new(Inner {
                library,
                raw,
                features,
            }),
        })
    }

    /// The library it was made with.
    pub fn library(&self) -> &'static Library {
        self.inner.library
    }

    /// What it was made to do.
    pub fn features(&self) -> Features {
        self.inner.features
    }

    /// Whether its transports can work with memory of this type.
    pub fn supports(&self, kind: MemoryType) -> bool {
        let Some(bit) = kind.bit() else { return false };
        // SAFETY: zero is valid, and the mask asks for one field.
        let mut attr: sys::ucp_context_attr_t = unsafe { std::mem::zeroed() };
        attr.field_mask = u64::from(sys::UCP_ATTR_FIELD_MEMORY_TYPES);
        // SAFETY: the context is alive.
        let status = unsafe {
            self.inner
                .library
                .ucp
                .ucp_context_query(self.raw(), &mut attr)
        };
        status == sys::UCS_OK && attr.memory_types & (1 << bit) != 0
    }

    pub(crate) fn raw(&self) -> sys::ucp_context_h {
        self.inner.raw.as_ptr()
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Context({:?}, {:?})",
            self.inner.library, self.inner.features
        )
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.library.in_forked_child() {
            return;
        }
        // SAFETY: workers and memory hold the context, so none is left; the context goes once.
        unsafe { self.library.ucp.ucp_cleanup(self.raw.as_ptr()) };
    }
}
