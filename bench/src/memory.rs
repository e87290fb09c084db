//! Memory that transfers come from and go to.

/// The hot buffer through which staged transfers go: it stays in the cache.
pub(crate) const HOT: usize = 256 << 10;

const PAGE: usize = 4096;

/// Page-aligned bytes.
pub(crate) struct Pages {
    bytes: Vec<u8>,
    skip: usize,
    len: usize,
}

impl Pages {
    /// Zeroes.
    pub(crate) fn new(len: usize) -> Self {
        let bytes = vec![0; len + PAGE];
        let skip = bytes.as_ptr().align_offset(PAGE);
        Self { bytes, skip, len }
    }

    /// The bytes.
    pub(crate) fn get(&self) -> &[u8] {
        &self.bytes[self.skip..self.skip + self.len]
    }

    /// The bytes, to be written.
    pub(crate) fn get_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.skip..self.skip + self.len]
    }

    /// Fills them with contents number `seed`.
    pub(crate) fn fill(&mut self, seed: u8) {
        for (index, byte) in self.get_mut().iter_mut().enumerate() {
            *byte = content(seed, index);
        }
    }

    /// Whether the first `len` are contents number `seed`.
    pub(crate) fn holds(&self, len: usize, seed: u8) -> bool {
        self.get()[..len]
            .iter()
            .enumerate()
            .all(|(index, &byte)| byte == content(seed, index))
    }
}

/// No two neighbours of a page or of a piece are alike.
fn content(seed: u8, index: usize) -> u8 {
    (index % 251) as u8 ^ (index >> 12) as u8 ^ seed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_aligned_and_told_apart() {
        let mut pages = Pages::new(10_000);
        assert_eq!(pages.get().as_ptr() as usize % PAGE, 0);
        assert_eq!(pages.get().len(), 10_000);
        pages.fill(3);
        assert!(pages.holds(10_000, 3) && !pages.holds(10_000, 4));
        pages.get_mut()[9_999] ^= 1;
        assert!(pages.holds(9_999, 3) && !pages.holds(10_000, 3));
    }
}
