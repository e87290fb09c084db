//! Where things are in a ring, and the header of a step.
//!
//! ```text
//! ring:  flag words (8 bytes each) | slot 0 | slot 1 | …
//! slot:  array 0 | array 1 | … | header          each at a multiple of 64 bytes
//! ```
//! A slot has room for `slot_bytes` of arrays and [`HEADER_ROOM`] beyond; each array counts rounded up to
//! [`ALIGN`].

use super::dtype::{DType, expected_bytes};

/// Every array starts at a multiple of this many bytes.
pub const ALIGN: usize = 64;

/// Room for the header of a step that does not count against `slot_bytes`: enough for some hundred arrays.
pub(crate) const HEADER_ROOM: u64 = 4096;

/// The most slots a ring may have.
pub const MAX_SLOTS: usize = 4096;

/// The longest name of a channel or an element type, in bytes.
pub const MAX_NAME: usize = 255;

/// The most dimensions of an array.
pub const MAX_DIMS: usize = 64;

const ALIGN64: u64 = ALIGN as u64;

/// Bytes of a flag word.
pub(crate) const FLAG_BYTES: usize = 8;

/// Bytes of a header before its arrays.
const FIXED: usize = 24;

/// The geometry of a ring. Both ends compute the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Layout {
    slots: u32,
    slot_bytes: u64,
}

impl Layout {
    /// Checks the numbers of a ring.
    ///
    /// # Errors
    /// A sentence with the number and its limit.
    pub(crate) fn new(slots: u64, slot_bytes: u64) -> Result<Self, String> {
        if slots == 0 || slots > MAX_SLOTS as u64 {
            return Err(format!(
                "a channel of {slots} slots: 1 to {MAX_SLOTS} are allowed"
            ));
        }
        // What a flag word can point into, and far from any overflow.
        const MAX_SLOT: u64 = 1 << 37;
        if slot_bytes == 0 || slot_bytes > MAX_SLOT {
            return Err(format!(
                "a channel with slots of {slot_bytes} bytes: 1 to {MAX_SLOT} are allowed"
            ));
        }
        Ok(Self {
            slots: slots as u32,
            slot_bytes,
        })
    }

    pub(crate) fn slots(&self) -> u32 {
        self.slots
    }

    pub(crate) fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Bytes of one slot, with the room for the header.
    fn stride(&self) -> u64 {
        self.slot_bytes.next_multiple_of(ALIGN64) + HEADER_ROOM
    }

    /// Where the flag word of a slot is in the ring.
    pub(crate) fn flag_at(&self, slot: u32) -> u64 {
        u64::from(slot) * FLAG_BYTES as u64
    }

    fn slots_at(&self) -> u64 {
        (u64::from(self.slots) * FLAG_BYTES as u64).next_multiple_of(ALIGN64)
    }

    /// Where a slot starts in the ring.
    pub(crate) fn slot_at(&self, slot: u32) -> u64 {
        self.slots_at() + u64::from(slot) * self.stride()
    }

    /// Bytes of the ring.
    pub(crate) fn bytes(&self) -> u64 {
        self.slot_at(self.slots)
    }

    /// The slot whose flag word is at `offset` of the ring.
    pub(crate) fn slot_of_flag(&self, offset: u64) -> Option<u32> {
        let slot = offset / FLAG_BYTES as u64;
        (offset.is_multiple_of(FLAG_BYTES as u64) && slot < u64::from(self.slots))
            .then_some(slot as u32)
    }

    /// Places arrays of these lengths and a header of `header` bytes in a slot: returns the offsets, the
    /// header's last.
    ///
    /// # Errors
    /// A sentence that names the sizes, if they do not fit.
    pub(crate) fn place(
        &self,
        lens: impl Iterator<Item = usize>,
        header: usize,
    ) -> Result<Vec<u64>, String> {
        let mut at = 0u64;
        let mut offsets = Vec::with_capacity(lens.size_hint().0 + 1);
        for len in lens {
            offsets.push(at);
            at = (len as u64)
                .checked_next_multiple_of(ALIGN64)
                .and_then(|len| at.checked_add(len))
                .ok_or_else(|| format!("an array of {len} bytes has more than can be counted"))?;
        }
        let end = at.checked_add(header as u64);
        let room = self.slot_bytes.next_multiple_of(ALIGN64);
        if at > room || end.is_none_or(|end| end > self.stride()) {
            return Err(format!(
                "a step of {} arrays with {at} bytes (each array rounded up to {ALIGN}) and a header of {header} does not \
                 fit into a slot of {} bytes (and {HEADER_ROOM} for the header): open the channel with larger slot_bytes, \
                 or send less in one step",
                offsets.len(),
                self.slot_bytes
            ));
        }
        offsets.push(at);
        Ok(offsets)
    }
}

/// One array in a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Placed {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// Where it starts in its slot.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: u64,
}

/// Bytes of the header of a step with these arrays.
pub(crate) fn header_len<'a>(arrays: impl Iterator<Item = (&'a DType, &'a [usize])>) -> usize {
    arrays.fold(FIXED, |n, (dtype, shape)| {
        n + 24 + 8 * shape.len() + dtype.name().len()
    })
}

/// Appends a header.
pub(crate) fn encode_header<'a>(
    out: &mut Vec<u8>,
    seq: u64,
    corr: u64,
    arrays: impl ExactSizeIterator<Item = (&'a DType, &'a [usize], u64, u64)>,
) {
    let start = out.len();
    out.extend_from_slice(&seq.to_le_bytes());
    out.extend_from_slice(&corr.to_le_bytes());
    out.extend_from_slice(&(arrays.len() as u32).to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    for (dtype, shape, offset, len) in arrays {
        let name = dtype.name().as_bytes();
        out.extend_from_slice(&offset.to_le_bytes());
        out.extend_from_slice(&len.to_le_bytes());
        out.extend_from_slice(&(shape.len() as u32).to_le_bytes());
        out.extend_from_slice(&(name.len() as u32).to_le_bytes());
        for &n in shape {
            out.extend_from_slice(&(n as u64).to_le_bytes());
        }
        out.extend_from_slice(name);
    }
    let len = (out.len() - start) as u32;
    out[start + 20..start + 24].copy_from_slice(&len.to_le_bytes());
}

/// Reads a header out of a slot with `read(offset, length)`, which copies: the peer could change the bytes
/// while they are looked at. Nothing in it is believed.
///
/// # Errors
/// A sentence with what is wrong.
pub(crate) fn decode_header(
    layout: &Layout,
    at: u64,
    seq: u64,
    read: impl Fn(u64, usize) -> Vec<u8>,
) -> Result<(u64, Vec<Placed>), String> {
    let room = layout.stride();
    let cut = || format!("the header of step {seq} at {at} leaves its slot");
    if at.checked_add(FIXED as u64).is_none_or(|end| end > room) {
        return Err(cut());
    }
    let fixed = read(at, FIXED);
    let mut fixed = Cursor(&fixed);
    let (number, corr) = (fixed.u64()?, fixed.u64()?);
    let (count, len) = (fixed.u32()? as usize, fixed.u32()? as usize);
    if number != seq {
        return Err(format!(
            "the header of step {seq} says that it is of step {number}"
        ));
    }
    if len < FIXED || at + len as u64 > room || count > len / 24 {
        return Err(cut());
    }
    let body = read(at + FIXED as u64, len - FIXED);
    let mut body = Cursor(&body);
    let mut arrays = Vec::with_capacity(count);
    for n in 0..count {
        let (offset, len) = (body.u64()?, body.u64()?);
        let (dims, name) = (body.u32()? as usize, body.u32()? as usize);
        if dims > MAX_DIMS || name > MAX_NAME {
            return Err(format!(
                "array {n} of step {seq} has {dims} dimensions and a type name of {name} bytes"
            ));
        }
        let mut shape = Vec::with_capacity(dims);
        for _ in 0..dims {
            let n = usize::try_from(body.u64()?).map_err(|e| e.to_string())?;
            shape.push(n);
        }
        let name = std::str::from_utf8(body.take(name)?)
            .map_err(|_| format!("the type name of array {n} of step {seq} is not UTF-8"))?;
        let dtype = DType::from_name(name);
        let inside =
            offset.is_multiple_of(ALIGN64) && offset.checked_add(len).is_some_and(|end| end <= at);
        if !inside {
            return Err(format!(
                "array {n} of step {seq} with {len} bytes at {offset} leaves its place"
            ));
        }
        if expected_bytes(&dtype, &shape)?.is_some_and(|bytes| bytes as u64 != len) {
            return Err(format!(
                "array {n} of step {seq}, {dtype} of shape {shape:?}, has {len} bytes"
            ));
        }
        arrays.push(Placed {
            dtype,
            shape,
            offset,
            len,
        });
    }
    Ok((corr, arrays))
}

/// Reads a header at `at` in a slot that begins with these bytes, and writes what came out again.
#[cfg(fuzzing)]
pub(crate) fn fuzz(at: u64, bytes: &[u8]) {
    const SEQ: u64 = 0;
    let layout = Layout::new(2, 512).expect("valid");
    let mut slot = vec![0; layout.stride() as usize];
    let len = bytes.len().min(slot.len());
    slot[..len].copy_from_slice(&bytes[..len]);
    let read = |slot: &[u8], at: u64, len: usize| slot[at as usize..][..len].to_vec();
    let Ok((corr, arrays)) = decode_header(&layout, at, SEQ, |at, len| read(&slot, at, len)) else {
        return;
    };
    for array in &arrays {
        assert!(array.offset + array.len <= at);
    }
    let of = |array: &'_ Placed| (array.dtype.clone(), array.shape.clone());
    let parts: Vec<_> = arrays.iter().map(of).collect();
    let mut again = Vec::new();
    let list = parts.iter().zip(&arrays);
    let list = list.map(|((dtype, shape), placed)| (dtype, &shape[..], placed.offset, placed.len));
    encode_header(&mut again, SEQ, corr, list);
    slot[at as usize..][..again.len()].copy_from_slice(&again);
    let result = decode_header(&layout, at, SEQ, |at, len| read(&slot, at, len));
    assert_eq!(result, Ok((corr, arrays)));
}

/// Arrays by the name of their type, and their shape.
#[cfg(fuzzing)]
pub(crate) const SEED_ARRAYS: [(&str, &[usize]); 3] =
    [("float32", &[2, 3]), ("bfloat16", &[4]), ("uint8", &[])];

/// The first step of a channel with such arrays.
#[cfg(fuzzing)]
pub(crate) fn seed(arrays: &[(&str, &[usize])]) -> crate::fuzzing::FirstStep {
    let layout = Layout::new(2, 512).expect("valid");
    let parts: Vec<_> = arrays
        .iter()
        .map(|(name, shape)| {
            let dtype = DType::from_name(name);
            let len = expected_bytes(&dtype, shape).ok().flatten();
            (dtype, *shape, len.expect("a known type"))
        })
        .collect();
    let header = header_len(parts.iter().map(|(dtype, shape, _)| (dtype, *shape)));
    let lens = parts.iter().map(|(_, _, len)| *len);
    let places = layout.place(lens, header).expect("there is room");
    let (header_at, offsets) = places.split_last().expect("the header's is there");
    let mut slot = vec![0x5a; *header_at as usize];
    let list = parts.iter().zip(offsets);
    let list = list.map(|((dtype, shape, len), &offset)| (dtype, *shape, offset, *len as u64));
    encode_header(&mut slot, 0, 17, list);
    crate::fuzzing::FirstStep {
        slot,
        header_at: *header_at as u16,
        flag: super::state::flag(0, *header_at).to_le_bytes(),
    }
}

/// Takes numbers off the front of bytes.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], String> {
        if n > self.0.len() {
            return Err("a header is cut short".into());
        }
        let (head, rest) = self.0.split_at(n);
        self.0 = rest;
        Ok(head)
    }

    fn u32(&mut self) -> Result<u32, String> {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(self.take(4)?);
        Ok(u32::from_le_bytes(bytes))
    }

    fn u64(&mut self) -> Result<u64, String> {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(self.take(8)?);
        Ok(u64::from_le_bytes(bytes))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layout() -> Layout {
        Layout::new(3, 1000).expect("valid")
    }

    fn read(slot: &[u8]) -> impl Fn(u64, usize) -> Vec<u8> {
        |at, len| slot[at as usize..at as usize + len].to_vec()
    }

    /// A slot with two arrays and the offset of its header.
    fn written(seq: u64) -> (Vec<u8>, u64) {
        let arrays = [
            (DType::F32, vec![2usize, 3]),
            (DType::from_name("float8"), vec![5]),
        ];
        let lens = [24usize, 5];
        let of = |i: usize| (&arrays[i].0, &arrays[i].1[..]);
        let header = header_len((0..2).map(of));
        let at = layout().place(lens.into_iter(), header).expect("fits");
        let mut bytes = Vec::new();
        encode_header(
            &mut bytes,
            seq,
            77,
            (0..2).map(|i| (of(i).0, of(i).1, at[i], lens[i] as u64)),
        );
        assert_eq!(bytes.len(), header);
        let mut slot = vec![0; layout().stride() as usize];
        slot[at[2] as usize..][..header].copy_from_slice(&bytes);
        (slot, at[2])
    }

    #[test]
    fn a_header_comes_back() {
        let (slot, at) = written(9);
        let (corr, arrays) = decode_header(&layout(), at, 9, read(&slot)).expect("valid");
        assert_eq!((corr, arrays.len()), (77, 2));
        assert_eq!((&arrays[0].shape[..], arrays[0].offset), (&[2, 3][..], 0));
        assert_eq!((arrays[1].dtype.name(), arrays[1].offset), ("float8", 64));
        assert!(decode_header(&layout(), at, 8, read(&slot)).is_err());
    }

    #[test]
    fn slots_and_flags_do_not_overlap() {
        let layout = layout();
        assert!(layout.flag_at(2) + 8 <= layout.slot_at(0));
        for slot in 0..3 {
            assert_eq!(layout.slot_of_flag(layout.flag_at(slot)), Some(slot));
            assert_eq!(layout.slot_at(slot) % 64, 0);
        }
        assert_eq!(layout.slot_of_flag(24), None);
        assert_eq!(layout.slot_of_flag(4), None);
        assert_eq!(layout.bytes(), layout.slot_at(2) + 1024 + HEADER_ROOM);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_sizes() {
        let fits = |lens: &[usize]| layout().place(lens.iter().copied(), 100);
        assert!(fits(&[1000]).is_ok());
        assert!(fits(&[960, 64]).is_ok());
        let error = fits(&[1025]).expect_err("too large");
        assert!(error.contains("1088") && error.contains("1000"), "{error}");
        let long = layout().place([64usize].into_iter(), 4096 + 961);
        assert!(long.is_err(), "a header that is too long");
        assert!(fits(&[usize::MAX, 1]).is_err());
        for (slots, bytes) in [(0, 1), (1, 0), (4097, 1), (1, u64::MAX)] {
            assert!(Layout::new(slots, bytes).is_err());
        }
    }

    proptest! {
        #[test]
        fn made_up_headers_never_panic(seed in prop::collection::vec(any::<u8>(), 64), at in 0u64..8000, seq in 0u64..3, poke in prop::collection::vec((0usize..200, any::<u8>()), 0..6)) {
            let (mut slot, good) = written(seq);
            let _ = decode_header(&layout(), at, seq, read(&slot));
            for (i, byte) in poke {
                slot[good as usize + i] = byte;
            }
            if let Ok((_, arrays)) = decode_header(&layout(), good, seq, read(&slot)) {
                for array in arrays {
                    prop_assert!(array.offset + array.len <= layout().stride());
                }
            }
            slot[..64].copy_from_slice(&seed);
            let _ = decode_header(&layout(), 0, seq, read(&slot));
        }
    }
}
