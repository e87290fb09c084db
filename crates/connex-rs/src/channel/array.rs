//! What goes into a step, and what comes out of it.

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use super::dtype::{DType, Element, bytes_of, expected_bytes};
use super::ring::{MAX_DIMS, MAX_NAME, Placed};
use super::table::Inlet;
use crate::error::{Error, Result};

fn check(dtype: &DType, shape: &[usize], bytes: usize) -> Result<()> {
    if shape.len() > MAX_DIMS {
        return Err(Error::invalid(format!(
            "an array of {} dimensions: at most {MAX_DIMS} are allowed",
            shape.len()
        )));
    }
    if dtype.name().len() > MAX_NAME {
        return Err(Error::invalid(format!(
            "a type name of {} bytes: at most {MAX_NAME} are allowed",
            dtype.name().len()
        )));
    }
    match expected_bytes(dtype, shape).map_err(Error::invalid)? {
        Some(expected) if expected != bytes => Err(Error::invalid(format!(
            "an array of {dtype} with shape {shape:?} has {expected} bytes, not {bytes}"
        ))),
        _ => Ok(()),
    }
}

/// An array to be sent, borrowed: [`Sender::send`](super::Sender::send) waits until it is not needed any more.
#[derive(Clone, Debug)]
pub struct Array<'a> {
    dtype: Cow<'a, DType>,
    shape: &'a [usize],
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Bytes with their type and shape.
    ///
    /// # Errors
    /// `Invalid` if they do not belong together.
    pub fn new(dtype: &'a DType, shape: &'a [usize], bytes: &'a [u8]) -> Result<Self> {
        Self::checked(Cow::Borrowed(dtype), shape, bytes)
    }

    fn checked(dtype: Cow<'a, DType>, shape: &'a [usize], bytes: &'a [u8]) -> Result<Self> {
        check(&dtype, shape, bytes.len())?;
        Ok(Self {
            dtype,
            shape,
            bytes,
        })
    }

    /// Elements with their shape, in row-major order.
    ///
    /// # Errors
    /// `Invalid` if there are not as many as the shape says.
    pub fn of<T: Element>(elements: &'a [T], shape: &'a [usize]) -> Result<Self> {
        Self::checked(Cow::Owned(T::DTYPE), shape, bytes_of(elements))
    }

    pub(super) fn raw(&self) -> Raw<'_> {
        Raw {
            dtype: &self.dtype,
            shape: self.shape,
            addr: self.bytes.as_ptr() as usize,
            len: self.bytes.len(),
            owner: None,
        }
    }
}

/// An array to be sent that keeps its memory itself: a step of these is sent without waiting and without a copy.
#[derive(Clone)]
pub struct OwnedArray {
    dtype: DType,
    shape: Vec<usize>,
    addr: usize,
    len: usize,
    owner: Arc<dyn Any + Send + Sync>,
}

impl OwnedArray {
    /// Elements with their shape, in row-major order.
    ///
    /// # Errors
    /// `Invalid` if there are not as many as the shape says.
    pub fn of<T: Element>(elements: impl Into<Arc<[T]>>, shape: &[usize]) -> Result<Self> {
        let elements = elements.into();
        let bytes = bytes_of(&elements);
        check(&T::DTYPE, shape, bytes.len())?;
        Ok(Self {
            dtype: T::DTYPE,
            shape: shape.to_vec(),
            addr: bytes.as_ptr() as usize,
            len: bytes.len(),
            owner: Arc::new(elements),
        })
    }

    /// Memory that `owner` keeps, at its address: what a binding to another language has in its hands. `owner` is dropped
    /// on whatever thread drives the engine.
    ///
    /// # Safety
    /// `len` bytes at `addr` must be valid for reading, and not change, as long as `owner` is not dropped.
    ///
    /// # Errors
    /// `Invalid` if type, shape and length do not belong together, or the range is null or wraps.
    pub unsafe fn from_raw(
        dtype: DType,
        shape: &[usize],
        addr: usize,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        check(&dtype, shape, len)?;
        if len > 0 && (addr == 0 || addr.checked_add(len).is_none()) {
            return Err(Error::invalid(format!(
                "{len} bytes at {addr:#x} are not a range of memory"
            )));
        }
        Ok(Self {
            dtype,
            shape: shape.to_vec(),
            addr,
            len,
            owner,
        })
    }

    pub(super) fn raw(&self) -> Raw<'_> {
        Raw {
            dtype: &self.dtype,
            shape: &self.shape,
            addr: self.addr,
            len: self.len,
            owner: Some(&self.owner),
        }
    }
}

impl fmt::Debug for OwnedArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OwnedArray({}, {:?})", self.dtype, self.shape)
    }
}

/// What both kinds of array come to.
#[derive(Clone, Copy)]
pub(super) struct Raw<'a> {
    pub(super) dtype: &'a DType,
    pub(super) shape: &'a [usize],
    pub(super) addr: usize,
    pub(super) len: usize,
    pub(super) owner: Option<&'a Arc<dyn Any + Send + Sync>>,
}

/// An array of a received step: a view into the slot that it came in. It lives as long as its [`Step`].
pub struct View {
    placed: Placed,
}

impl View {
    /// What its elements are.
    pub fn dtype(&self) -> &DType {
        &self.placed.dtype
    }

    /// Its shape; the elements lie in row-major order.
    pub fn shape(&self) -> &[usize] {
        &self.placed.shape
    }

    /// Its bytes.
    ///
    /// A peer that breaks the protocol could change them while they are looked at, as it could write to any registered
    /// memory; it cannot change where they are and how many.
    pub fn bytes(&self) -> &[u8] {
        if self.placed.len == 0 {
            return &[];
        }
        // SAFETY: the range was checked to lie in its slot; the slot's memory is initialised and kept by the step that
        // owns this view; the sender does not write to it before the step is released.
        unsafe {
            std::slice::from_raw_parts(self.placed.offset as *const u8, self.placed.len as usize)
        }
    }

    /// Its elements, if they are of type `T`.
    pub fn elements<T: Element>(&self) -> Option<&[T]> {
        if self.placed.dtype != T::DTYPE {
            return None;
        }
        let bytes = self.bytes();
        if bytes.is_empty() {
            return Some(&[]);
        }
        // SAFETY: every array starts at a multiple of 64 bytes, every bit pattern is a value of an `Element`, and the
        // length was checked against type and shape.
        Some(unsafe {
            std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>())
        })
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "View({}, {:?})", self.placed.dtype, self.placed.shape)
    }
}

/// A received step: its arrays, as views into the slot that it came in. Dropping it frees the slot for the sender;
/// until then the memory stays, whatever becomes of the channel or the engine.
pub struct Step {
    inlet: Arc<Inlet>,
    slot: u32,
    corr: u64,
    views: Vec<View>,
}

impl Step {
    pub(super) fn new(inlet: Arc<Inlet>, slot: u32, corr: u64, arrays: Vec<Placed>) -> Self {
        Self {
            inlet,
            slot,
            corr,
            views: arrays.into_iter().map(|placed| View { placed }).collect(),
        }
    }

    /// Keeps the memory of the ring, beyond the step's release: for views that a binding cannot take back. After the release
    /// the sender writes to it again.
    pub fn memory(&self) -> Arc<dyn Any + Send + Sync> {
        self.inlet.memory()
    }

    /// The correlation number that the sender gave it.
    pub fn corr(&self) -> u64 {
        self.corr
    }
}

impl Deref for Step {
    type Target = [View];

    fn deref(&self) -> &[View] {
        &self.views
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        self.inlet.release(self.slot);
    }
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Step({}, {:?})", self.corr, self.views)
    }
}
