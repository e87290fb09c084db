//! Arguments: Python objects in, checked values out. Each error names the argument and the value.

use std::borrow::Cow;
use std::path::PathBuf;
use std::time::Duration;

use connex_rs::{LogicalId, Range, TlsFiles};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyString, PyTuple};

use crate::waiting::detached;

/// How much of a refused value an error repeats, in characters.
const EXCERPT: usize = 60;

/// Copies of at least this many bytes are made without the interpreter lock.
const LONG_COPY: usize = 256 << 10;

fn excerpt(value: &Bound<'_, PyAny>) -> String {
    let text = value.repr().map_or_else(
        // An integer of thousands of digits, for example.
        |_| "(too long to show)".to_owned(),
        |repr| repr.to_string_lossy().into_owned(),
    );
    match text.char_indices().nth(EXCERPT) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// The name of an object's type, for error texts.
fn kind(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(
        |_| "?".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    )
}

/// An integer from 0 to `max`.
pub(crate) fn integer(value: &Bound<'_, PyAny>, name: &str, max: u64) -> PyResult<u64> {
    let out_of_range = || {
        PyValueError::new_err(format!(
            "{name} {} must be between 0 and {max}",
            excerpt(value)
        ))
    };
    match value.extract::<u64>() {
        Ok(number) if number <= max => Ok(number),
        Ok(_) => Err(out_of_range()),
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => Err(out_of_range()),
        Err(error) if error.is_instance_of::<PyTypeError>(value.py()) => Err(PyTypeError::new_err(
            format!("{name} must be an integer, not {}", kind(value)),
        )),
        Err(error) => Err(error),
    }
}

/// An address or a length.
pub(crate) fn word(value: &Bound<'_, PyAny>, name: &str) -> PyResult<usize> {
    integer(value, name, usize::MAX as u64).map(|n| n as usize)
}

/// A number of an id.
pub(crate) fn number(value: &Bound<'_, PyAny>, name: &str) -> PyResult<u32> {
    integer(value, name, u32::MAX.into()).map(|n| n as u32)
}

/// A time in milliseconds; `None` is none.
pub(crate) fn timeout(value: Option<&Bound<'_, PyAny>>, name: &str) -> PyResult<Option<Duration>> {
    match value {
        Some(value) if !value.is_none() => {
            integer(value, name, u64::MAX).map(|ms| Some(Duration::from_millis(ms)))
        }
        _ => Ok(None),
    }
}

/// Text.
pub(crate) fn text<'a>(value: &'a Bound<'_, PyAny>, name: &str) -> PyResult<Cow<'a, str>> {
    match value.downcast::<PyString>() {
        Ok(text) => text.to_cow(),
        Err(_) => Err(PyTypeError::new_err(format!(
            "{name} must be a string, not {}",
            kind(value)
        ))),
    }
}

/// A logical id: a tuple or list of four.
pub(crate) fn id(value: &Bound<'_, PyAny>, name: &str) -> PyResult<LogicalId> {
    let [model, stage, shard, replica] = items(value).ok_or_else(|| {
        let wants = format!(
            "{name} must be a tuple (model, stage, shard, replica), not {}",
            excerpt(value)
        );
        if is_sequence(value) {
            PyValueError::new_err(wants)
        } else {
            PyTypeError::new_err(wants)
        }
    })?;
    logical_id(
        &text(&model, "model")?,
        [
            number(&stage, "stage")?,
            number(&shard, "shard")?,
            number(&replica, "replica")?,
        ],
    )
}

/// A logical id from its parts.
pub(crate) fn logical_id(model: &str, [stage, shard, replica]: [u32; 3]) -> PyResult<LogicalId> {
    LogicalId::new(model, stage, shard, replica).map_err(|e| PyValueError::new_err(e.to_string()))
}

fn is_sequence(value: &Bound<'_, PyAny>) -> bool {
    value.is_instance_of::<PyTuple>() || value.is_instance_of::<PyList>()
}

/// The items of a tuple or list of exactly `N`.
fn items<'py, const N: usize>(value: &Bound<'py, PyAny>) -> Option<[Bound<'py, PyAny>; N]> {
    let items: Vec<_> = if let Ok(tuple) = value.downcast::<PyTuple>() {
        if tuple.len() != N {
            return None;
        }
        tuple.iter().collect()
    } else {
        let list = value.downcast::<PyList>().ok()?;
        if list.len() != N {
            return None;
        }
        list.iter().collect()
    };
    items.try_into().ok()
}

/// What the two addresses of a range are called, in the order of the caller's tuple.
#[derive(Clone, Copy)]
pub(crate) enum Order {
    /// `(dst_ptr, src_ptr, length)`: read from the peer.
    Get,
    /// `(src_ptr, dst_ptr, length)`: write to the peer.
    Put,
}

impl Order {
    fn names(self) -> [&'static str; 2] {
        match self {
            Order::Get => ["dst_ptr", "src_ptr"],
            Order::Put => ["src_ptr", "dst_ptr"],
        }
    }
}

/// One range: the local address comes first in both orders.
pub(crate) fn range(
    order: Order,
    local: &Bound<'_, PyAny>,
    remote: &Bound<'_, PyAny>,
    length: &Bound<'_, PyAny>,
) -> PyResult<Range> {
    let [local_name, remote_name] = order.names();
    Ok(Range {
        local: word(local, local_name)?,
        remote: integer(remote, remote_name, u64::MAX)?,
        len: word(length, "length")?,
    })
}

/// Any iterable of ranges.
pub(crate) fn ranges(order: Order, value: &Bound<'_, PyAny>) -> PyResult<Vec<Range>> {
    let mut ranges = Vec::with_capacity(value.len().unwrap_or(0).min(1 << 20));
    for (index, element) in value.try_iter()?.enumerate() {
        let element = element?;
        let [local, remote, length] = items(&element).ok_or_else(|| {
            let [first, second] = order.names();
            let wants = format!(
                "element {index} must be a tuple ({first}, {second}, length), not {}",
                excerpt(&element)
            );
            if is_sequence(&element) {
                PyValueError::new_err(wants)
            } else {
                PyTypeError::new_err(wants)
            }
        })?;
        ranges.push(range(order, &local, &remote, &length)?);
    }
    Ok(ranges)
}

/// The bytes of a bytes-like object, as an object that cannot change.
pub(crate) fn bytes<'py>(value: &Bound<'py, PyAny>, name: &str) -> PyResult<Bound<'py, PyBytes>> {
    if let Ok(bytes) = value.downcast::<PyBytes>() {
        return Ok(bytes.clone());
    }
    let py = value.py();
    if let Ok(array) = value.downcast::<PyByteArray>() {
        // SAFETY: the slice is copied at once, without running Python code in between.
        return Ok(PyBytes::new(py, unsafe { array.as_bytes() }));
    }
    // The stable interface has no buffer protocol before Python 3.11.
    let builtins = py.import(pyo3::intern!(py, "builtins"))?;
    let view = builtins
        .getattr(pyo3::intern!(py, "memoryview"))?
        .call1((value,))
        .map_err(|_| {
            PyTypeError::new_err(format!("{name} must be bytes-like, not {}", kind(value)))
        })?;
    let copy = view.call_method0(pyo3::intern!(py, "tobytes"))?;
    view.call_method0(pyo3::intern!(py, "release"))?;
    Ok(copy.downcast_into::<PyBytes>()?)
}

/// A message: a copy that the engine keeps.
pub(crate) fn message(value: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<u8>> {
    let bytes = bytes(value, name)?;
    let slice = bytes.as_bytes();
    Ok(copy_of(value.py(), slice))
}

/// A copy of bytes that cannot change, made without the interpreter lock where it takes long.
pub(crate) fn copy_of(py: Python<'_>, slice: &[u8]) -> Vec<u8> {
    if slice.len() < LONG_COPY {
        slice.to_vec()
    } else {
        detached(py, || slice.to_vec())
    }
}

/// Runs a copy of `len` bytes, without the interpreter lock where it takes long.
pub(crate) fn copying<T>(py: Python<'_>, len: usize, copy: impl FnOnce() -> T + Send) -> T {
    if len < LONG_COPY {
        copy()
    } else {
        detached(py, copy)
    }
}

/// A shared secret: text or bytes.
pub(crate) fn secret(value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    match value.downcast::<PyString>() {
        Ok(text) => Ok(text.to_cow()?.as_bytes().to_vec()),
        Err(_) => message(value, "secret").map_err(|_| {
            PyTypeError::new_err(format!(
                "secret must be bytes or a string, not {}",
                kind(value)
            ))
        }),
    }
}

/// The three files of TLS: certificate, key, authority; paths as text or path objects.
pub(crate) fn tls_files(value: &Bound<'_, PyAny>) -> PyResult<TlsFiles> {
    let [cert, key, ca] = value.extract::<[PathBuf; 3]>().map_err(|_| {
        PyTypeError::new_err(format!(
            "tls must be three paths (cert, key, ca), not {}",
            excerpt(value)
        ))
    })?;
    Ok(TlsFiles { cert, key, ca })
}
