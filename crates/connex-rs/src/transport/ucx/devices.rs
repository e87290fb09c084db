//! What UCX knows of GPU memory.

use connex_ucx::{Context, Memory, MemoryType};

use crate::device::{Kind, Prober};

/// Asks UCX for the kind of memory, where it knows kinds that the CUDA driver does not. Registering is what tells, so hosts
/// without ROCm are spared it.
pub(super) fn prober(context: &Context) -> Option<Prober> {
    if !context.supports(MemoryType::Rocm) {
        return None;
    }
    let context = context.clone();
    Some(Box::new(move |addr, len| {
        // SAFETY: whoever registers the range with the engine keeps it mapped for longer than this call.
        let memory = unsafe { Memory::map(&context, addr as *mut u8, len) }.ok()?;
        kind_of(memory.kind().ok()?)
    }))
}

/// `None` for what the processor may touch.
fn kind_of(found: MemoryType) -> Option<Kind> {
    match found {
        MemoryType::Cuda => Some(Kind::Cuda),
        MemoryType::CudaManaged => Some(Kind::CudaManaged),
        MemoryType::Rocm => Some(Kind::Rocm),
        MemoryType::RocmManaged => Some(Kind::RocmManaged),
        MemoryType::Host | MemoryType::Other(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_told_apart() {
        assert_eq!(kind_of(MemoryType::Host), None);
        assert_eq!(kind_of(MemoryType::Rocm), Some(Kind::Rocm));
        assert_eq!(kind_of(MemoryType::RocmManaged), Some(Kind::RocmManaged));
        assert_eq!(kind_of(MemoryType::Cuda), Some(Kind::Cuda));
    }
}
