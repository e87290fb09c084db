//! What the elements of an array are.

use std::fmt;

/// The type of an array's elements. It travels by name; the engine knows the size of those named here and carries
/// any other as it is.
#[non_exhaustive]
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum DType {
    /// One byte, 0 or 1.
    Bool,
    /// Unsigned, 8 bits.
    U8,
    /// Unsigned, 16 bits.
    U16,
    /// Unsigned, 32 bits.
    U32,
    /// Unsigned, 64 bits.
    U64,
    /// Signed, 8 bits.
    I8,
    /// Signed, 16 bits.
    I16,
    /// Signed, 32 bits.
    I32,
    /// Signed, 64 bits.
    I64,
    /// IEEE 754 half precision.
    F16,
    /// The upper half of an `F32`.
    BF16,
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 double precision.
    F64,
    /// Two `F32`.
    C64,
    /// Two `F64`.
    C128,
    /// Any other, by its name; at most 255 bytes of UTF-8.
    Other(Box<str>),
}

/// All that have a name of ours, with it and their size.
const KNOWN: [(DType, &str, usize); 15] = [
    (DType::Bool, "bool", 1),
    (DType::U8, "uint8", 1),
    (DType::U16, "uint16", 2),
    (DType::U32, "uint32", 4),
    (DType::U64, "uint64", 8),
    (DType::I8, "int8", 1),
    (DType::I16, "int16", 2),
    (DType::I32, "int32", 4),
    (DType::I64, "int64", 8),
    (DType::F16, "float16", 2),
    (DType::BF16, "bfloat16", 2),
    (DType::F32, "float32", 4),
    (DType::F64, "float64", 8),
    (DType::C64, "complex64", 8),
    (DType::C128, "complex128", 16),
];

impl DType {
    /// The type of that name.
    pub fn from_name(name: &str) -> Self {
        KNOWN
            .iter()
            .find(|(_, known, _)| *known == name)
            .map_or_else(|| Self::Other(name.into()), |(dtype, _, _)| dtype.clone())
    }

    /// Its name, as NumPy has it.
    pub fn name(&self) -> &str {
        match self {
            Self::Other(name) => name,
            known => KNOWN
                .iter()
                .find(|(dtype, _, _)| dtype == known)
                .map_or("", |(_, name, _)| name),
        }
    }

    /// Bytes of one element; `None` where the engine does not know.
    pub fn size(&self) -> Option<usize> {
        KNOWN
            .iter()
            .find(|(dtype, _, _)| dtype == self)
            .map(|(_, _, size)| *size)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod private {
    pub trait Sealed {}
}

/// A Rust type that is an array's element. Every bit pattern of it is a value and it has no padding.
pub trait Element: Copy + Send + Sync + private::Sealed + 'static {
    /// What it is called on the way.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),+ $(,)?) => {
        $(
            impl private::Sealed for $rust {}
            impl Element for $rust {
                const DTYPE: DType = DType::$dtype;
            }
        )+
    };
}

elements! {
    u8 => U8, u16 => U16, u32 => U32, u64 => U64,
    i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    f32 => F32, f64 => F64,
}

/// The bytes of elements.
pub(crate) fn bytes_of<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: an `Element` has no padding, so all of its bytes are initialised; the length is that of the slice.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// Bytes that an array of that type and shape has; `None` if the type's size is not known.
///
/// # Errors
/// A sentence if that is more than an address space holds.
pub(crate) fn expected_bytes(dtype: &DType, shape: &[usize]) -> Result<Option<usize>, String> {
    let Some(size) = dtype.size() else {
        return Ok(None);
    };
    // A dimension of 0 makes all of it empty, whatever the others are.
    if shape.contains(&0) {
        return Ok(Some(0));
    }
    shape
        .iter()
        .try_fold(size, |bytes, &n| bytes.checked_mul(n))
        .map(Some)
        .ok_or_else(|| format!("an array of shape {shape:?} has more bytes than can be counted"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        for (dtype, name, size) in &KNOWN {
            assert_eq!(&DType::from_name(name), dtype);
            assert_eq!(dtype.name(), *name);
            assert_eq!(dtype.size(), Some(*size));
        }
        let odd = DType::from_name("float8_e4m3fn");
        assert_eq!((odd.name(), odd.size()), ("float8_e4m3fn", None));
    }

    #[test]
    fn shapes_are_counted_without_overflow() {
        assert_eq!(expected_bytes(&DType::F32, &[]), Ok(Some(4)));
        assert_eq!(expected_bytes(&DType::F32, &[2, 3]), Ok(Some(24)));
        assert_eq!(expected_bytes(&DType::F32, &[usize::MAX, 0]), Ok(Some(0)));
        assert!(expected_bytes(&DType::F32, &[usize::MAX, 2]).is_err());
        assert_eq!(expected_bytes(&DType::from_name("x"), &[3]), Ok(None));
    }
}
