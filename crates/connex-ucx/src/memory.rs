//! Registered memory.

use std::fmt;
use std::ptr::{self, NonNull};

use crate::context::Context;
use crate::error::{Error, Result};
use crate::status::Status;
use crate::sys;

/// What kind of memory an address names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryType {
    /// The processor's.
    Host,
    /// A CUDA device's.
    Cuda,
    /// CUDA managed memory, which both can touch.
    CudaManaged,
    /// A ROCm device's.
    Rocm,
    /// ROCm managed memory, which both can touch.
    RocmManaged,
    /// Another kind, by UCX's number.
    Other(u32),
}

impl MemoryType {
    pub(crate) fn from_raw(raw: sys::ucs_memory_type_t) -> Self {
        match raw {
            sys::UCS_MEMORY_TYPE_HOST => MemoryType::Host,
            sys::UCS_MEMORY_TYPE_CUDA => MemoryType::Cuda,
            sys::UCS_MEMORY_TYPE_CUDA_MANAGED => MemoryType::CudaManaged,
            sys::UCS_MEMORY_TYPE_ROCM => MemoryType::Rocm,
            sys::UCS_MEMORY_TYPE_ROCM_MANAGED => MemoryType::RocmManaged,
            other => MemoryType::Other(other),
        }
    }

    /// Its bit in a mask of types; `None` for numbers that no mask can hold.
    pub(crate) fn bit(self) -> Option<u32> {
        match self {
            MemoryType::Host => Some(sys::UCS_MEMORY_TYPE_HOST),
            MemoryType::Cuda => Some(sys::UCS_MEMORY_TYPE_CUDA),
            MemoryType::CudaManaged => Some(sys::UCS_MEMORY_TYPE_CUDA_MANAGED),
            MemoryType::Rocm => Some(sys::UCS_MEMORY_TYPE_ROCM),
            MemoryType::RocmManaged => Some(sys::UCS_MEMORY_TYPE_ROCM_MANAGED),
            MemoryType::Other(bit) => (bit < 64).then_some(bit),
        }
    }
}

/// Memory that devices may reach; unregistered on drop. May be used from any thread.
pub struct Memory {
    context: Context,
    raw: NonNull<sys::ucp_mem>,
    addr: usize,
    len: usize,
}

// SAFETY: a memory handle is immutable, and the context locks what it shares (see `Context`).
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Registers `len` bytes at `addr` with every device of the context.
    ///
    /// # Safety
    /// The memory must stay mapped until the `Memory` is dropped.
    ///
    /// # Errors
    /// A device that refuses, for instance because of the limit on locked memory.
    pub unsafe fn map(context: &Context, addr: *mut u8, len: usize) -> Result<Self> {
        // SAFETY: plain numbers and pointers, for which zero is valid.
        let mut params: sys::ucp_mem_map_params_t = unsafe { std::mem::zeroed() };
        params.field_mask =
            u64::from(sys::UCP_MEM_MAP_PARAM_FIELD_ADDRESS | sys::UCP_MEM_MAP_PARAM_FIELD_LENGTH);
        params.address = addr.cast();
        params.length = len;
        let mut raw = ptr::null_mut();
        // SAFETY: the caller vouches for the memory; the mask says which fields are set.
        let status = unsafe {
            context
                .library()
                .ucp
                .ucp_mem_map(context.raw(), &params, &mut raw)
        };
        let what = || format!("{len} bytes at {addr:p}");
        Status(status)
            .check()
            .map_err(|s| Error::about("ucp_mem_map", s, what()))?;
        let raw = NonNull::new(raw)
            .ok_or_else(|| Error::about("ucp_mem_map", Status::NO_MEMORY, what()))?;
        Ok(Self {
            context: context.clone(),
            raw,
            addr: addr as usize,
            len,
        })
    }

    /// The first byte.
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// Bytes, as they were asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What UCX found it to be.
    ///
    /// # Errors
    /// UCX cannot tell.
    pub fn kind(&self) -> Result<MemoryType> {
        // SAFETY: zero is valid, and the mask asks for one field.
        let mut attr: sys::ucp_mem_attr_t = unsafe { std::mem::zeroed() };
        attr.field_mask = u64::from(sys::UCP_MEM_ATTR_FIELD_MEM_TYPE);
        // SAFETY: the handle is alive.
        let status = unsafe {
            self.context
                .library()
                .ucp
                .ucp_mem_query(self.raw.as_ptr(), &mut attr)
        };
        Status(status)
            .check()
            .map_err(|s| Error::ucx("ucp_mem_query", s))?;
        Ok(MemoryType::from_raw(attr.mem_type))
    }

    /// The key that peers need to reach it, for [`RemoteKey::unpack`](crate::RemoteKey::unpack).
    ///
    /// # Errors
    /// A device that cannot make one.
    pub fn key(&self) -> Result<Vec<u8>> {
        let ucp = &self.context.library().ucp;
        let (mut buffer, mut size) = (ptr::null_mut(), 0);
        // SAFETY: context and handle are alive and belong together.
        let status = unsafe {
            ucp.ucp_rkey_pack(
                self.context.raw(),
                self.raw.as_ptr(),
                &mut buffer,
                &mut size,
            )
        };
        Status(status)
            .check()
            .map_err(|s| Error::ucx("ucp_rkey_pack", s))?;
        // SAFETY: UCX made `size` bytes there, which are given back right after the copy.
        unsafe {
            let key = std::slice::from_raw_parts(buffer.cast::<u8>().cast_const(), size).to_vec();
            ucp.ucp_rkey_buffer_release(buffer);
            Ok(key)
        }
    }

    pub(crate) fn raw(&self) -> sys::ucp_mem_h {
        self.raw.as_ptr()
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({:#x}, {} bytes)", self.addr, self.len)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.context.library().in_forked_child() {
            return;
        }
        // SAFETY: mapped by us in this context, which is still alive, and unmapped once.
        unsafe {
            self.context
                .library()
                .ucp
                .ucp_mem_unmap(self.context.raw(), self.raw.as_ptr())
        };
    }
}
