//! Memory that is not the host's: where it lives, which of it is staged, and on which thread its driver may be called.
//!
//! The processor cannot touch GPU memory, and no socket or shared memory can carry it. So the engine stages it: pieces
//! are copied by the process's own CUDA driver into pinned host buffers and sent from there, and the other way round at
//! the receiver, while other pieces travel. `driver` holds the driver, `buffers` the pinned memory, `copies` what waits for
//! copies. Hardware that reaches the memory itself (RDMA) is used instead where the transport has it and the transfer is
//! not too small for it.

pub(crate) mod buffers;
pub(crate) mod copies;
pub(crate) mod driver;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use self::driver::{ContextId, Driver};
use crate::error::{Error, ErrorKind, Result};

/// What kind of memory an address names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// A CUDA device's.
    Cuda,
    /// CUDA managed memory, which moves between device and host.
    CudaManaged,
    /// A ROCm device's.
    Rocm,
    /// ROCm managed memory.
    RocmManaged,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Cuda => "CUDA",
            Kind::CudaManaged => "CUDA managed",
            Kind::Rocm => "ROCm",
            Kind::RocmManaged => "ROCm managed",
        }
    }
}

/// Where memory lives that is not the host's. Kept with its region.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Residence {
    pub(crate) kind: Kind,
    /// The context to copy in.
    context: ContextId,
}

impl Residence {
    /// Whether the engine can copy it.
    fn can_be_staged(&self) -> bool {
        matches!(self.kind, Kind::Cuda | Kind::CudaManaged)
    }
}

/// Tells the kind of memory of what the CUDA driver does not know; a transport may have one.
pub type Prober = Box<dyn Fn(usize, usize) -> Option<Kind> + Send + Sync>;

/// The variable that sets the threshold: UCX's own, so that both agree.
const THRESHOLD: &str = "UCX_ZCOPY_THRESH";
/// Its default.
const THRESHOLD_DEFAULT: u64 = 4096;

/// Copies `len` bytes of host memory to `to`, which may be host or GPU memory. From any thread.
///
/// # Safety
/// `len` bytes must be valid at both places.
///
/// # Errors
/// `Transport` with the driver's words; never for host memory.
pub unsafe fn copy_to(to: usize, from: *const u8, len: usize) -> Result<()> {
    if let Some(driver) = Driver::known()
        && let Some(residence) = driver.residence(to)
    {
        // SAFETY: by this function's contract.
        return unsafe { driver.copy_in_now(residence, to, from, len) }
            .map_err(|text| Error::new(ErrorKind::Transport, text));
    }
    // SAFETY: by this function's contract; the two may overlap.
    unsafe { std::ptr::copy(from, to as *mut u8, len) };
    Ok(())
}

/// Copies `len` bytes at `from`, which may be host or GPU memory, to host memory. From any thread.
///
/// # Safety
/// As for `copy_to`.
///
/// # Errors
/// As for `copy_to`.
pub unsafe fn copy_from(from: usize, to: *mut u8, len: usize) -> Result<()> {
    if let Some(driver) = Driver::known()
        && let Some(residence) = driver.residence(from)
    {
        // SAFETY: by this function's contract.
        return unsafe { driver.copy_out_now(residence, to, from, len) }
            .map_err(|text| Error::new(ErrorKind::Transport, text));
    }
    // SAFETY: by this function's contract; the two may overlap.
    unsafe { std::ptr::copy(from as *const u8, to, len) };
    Ok(())
}

/// What an engine knows of devices.
pub(crate) struct Devices {
    allow_staging: bool,
    /// Transfers of GPU memory shorter than this are not for zero-copy.
    threshold: u64,
    prober: Option<Prober>,
    /// The context of the first GPU memory that was seen, 0 for none yet.
    context: AtomicUsize,
    pub(crate) pool: Arc<buffers::Pool>,
}

impl Devices {
    pub(crate) fn new(allow_staging: bool, prober: Option<Prober>) -> Self {
        Self {
            allow_staging,
            threshold: threshold(std::env::var(THRESHOLD).ok().as_deref()),
            prober,
            context: AtomicUsize::new(0),
            pool: Arc::default(),
        }
    }

    /// Where memory that is being registered lives; `None` is the host. The driver is looked for.
    pub(crate) fn of_region(&self, addr: usize, len: usize) -> Option<Residence> {
        let residence = Driver::find().and_then(|driver| driver.residence(addr));
        let residence = residence.or_else(|| {
            let kind = self.prober.as_ref()?(addr, len)?;
            Some(Residence {
                kind,
                context: ContextId(0),
            })
        });
        self.seen(residence)
    }

    /// Where memory lives that is not registered; `None` is the host. Asks a driver only if one is known.
    pub(crate) fn of_local(&self, addr: usize) -> Option<Residence> {
        self.seen(Driver::known().and_then(|driver| driver.residence(addr)))
    }

    fn seen(&self, residence: Option<Residence>) -> Option<Residence> {
        let context = residence?.context.0;
        if context != 0 {
            // The first one stays.
            let _ = self
                .context
                .compare_exchange(0, context, Ordering::AcqRel, Ordering::Acquire);
        }
        residence
    }

    /// The engine's context, once there is GPU memory.
    pub(crate) fn context(&self) -> Option<ContextId> {
        match self.context.load(Ordering::Acquire) {
            0 => None,
            context => Some(ContextId(context)),
        }
    }

    /// Whether the calling thread may drive: with GPU memory in use only one whose context is the engine's, for UCX and
    /// copies call the driver.
    pub(crate) fn may_drive(&self) -> bool {
        self.context()
            .is_none_or(|own| Driver::known().and_then(Driver::current) == Some(own))
    }

    /// Makes the engine's context that of the calling thread, which is the engine's own.
    pub(crate) fn adopt(&self) {
        if let (Some(context), Some(driver)) = (self.context(), Driver::known())
            && driver.current() != Some(context)
            && let Err(text) = driver.adopt(context)
        {
            tracing::warn!(target: "connex_rs::device", "the progress thread cannot use the CUDA context of the registered memory: {text}");
        }
    }

    /// The shortest transfer that may go zero-copy, in bytes.
    pub(crate) fn threshold(&self) -> u64 {
        self.threshold
    }

    /// Why a transfer of `len` bytes from or into this memory cannot be; `zero_copy`: hardware may reach it.
    pub(crate) fn refuses(
        &self,
        residence: Option<Residence>,
        len: u64,
        zero_copy: bool,
    ) -> Option<String> {
        let residence = residence?;
        let kind = residence.kind.name();
        if len < self.threshold && !self.allow_staging {
            return Some(format!(
                "{len} bytes of {kind} memory are below the zero-copy threshold of {} bytes ({THRESHOLD}) and staging is off: allow_staging=True stages them through host memory",
                self.threshold
            ));
        }
        let zero_copy = zero_copy && len >= self.threshold;
        if !zero_copy && !residence.can_be_staged() {
            return Some(format!(
                "{len} bytes of {kind} memory cannot be staged through host memory: only transfers of at least {} bytes over RDMA can use it",
                self.threshold
            ));
        }
        None
    }
}

impl std::fmt::Debug for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Devices")
            .field("allow_staging", &self.allow_staging)
            .field("threshold", &self.threshold)
            .field("context", &self.context())
            .finish_non_exhaustive()
    }
}

/// The threshold as the variable sets it: UCX's sizes; `inf` is never, and what is no size is the default.
fn threshold(value: Option<&str>) -> u64 {
    match value.map(str::trim) {
        Some(text) if text.eq_ignore_ascii_case("inf") => u64::MAX,
        Some(text) => crate::transport::ucx::memory_units(text)
            .map_or(THRESHOLD_DEFAULT, |bytes| bytes as u64),
        None => THRESHOLD_DEFAULT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CUDA: Residence = Residence {
        kind: Kind::Cuda,
        context: ContextId(1),
    };
    const ROCM: Residence = Residence {
        kind: Kind::Rocm,
        context: ContextId(0),
    };

    fn devices(allow_staging: bool) -> Devices {
        Devices {
            threshold: 4096,
            ..Devices::new(allow_staging, None)
        }
    }

    #[test]
    fn the_threshold_is_read_as_ucx_reads_it() {
        for (text, bytes) in [
            (None, 4096),
            (Some("16k"), 16384),
            (Some("100"), 100),
            (Some("inf"), u64::MAX),
            (Some("auto"), 4096),
        ] {
            assert_eq!(threshold(text), bytes, "{text:?}");
        }
    }

    #[test]
    fn small_transfers_are_refused_where_staging_is_off() {
        assert_eq!(devices(true).refuses(Some(CUDA), 1, false), None);
        assert_eq!(devices(false).refuses(None, 1, false), None);
        assert_eq!(devices(false).refuses(Some(CUDA), 4096, false), None);
        let why = devices(false).refuses(Some(CUDA), 4095, true);
        assert!(why.is_some_and(|why| why.contains("4095") && why.contains("UCX_ZCOPY_THRESH")));
    }

    #[test]
    fn rocm_goes_by_hardware_or_not_at_all() {
        assert_eq!(devices(true).refuses(Some(ROCM), 4096, true), None);
        for (len, zero_copy) in [(4096, false), (4095, true)] {
            let why = devices(true).refuses(Some(ROCM), len, zero_copy);
            assert!(
                why.is_some_and(|why| why.contains("ROCm")),
                "{len} {zero_copy}"
            );
        }
    }

    #[test]
    fn without_gpu_memory_any_thread_drives() {
        let devices = devices(true);
        assert_eq!(devices.of_local(0x1000), None);
        assert!(devices.may_drive() && devices.context().is_none());
    }
}
