//! Memory of our own that direct IO takes: aligned to 4096 bytes.
//!
//! Who owns the state: whoever has the value; it stays where it is when the value moves.

/// What every device and file system takes.
const ALIGNMENT: usize = 4096;

/// Bytes that begin at a multiple of 4096.
#[derive(Debug)]
pub struct Buffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    pub fn zeroed(len: usize) -> Self {
        let memory = vec![0; len.saturating_add(ALIGNMENT)];
        // The allocator gives at least one byte, and u8 can be aligned to anything: never `usize::MAX`.
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { memory, start, len }
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }

    /// All of them, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_aligned_and_as_long_as_asked() {
        for len in [0, 1, 512, 4096, 1 << 20] {
            let mut buffer = Buffer::zeroed(len);
            assert_eq!((buffer.len(), buffer.bytes_mut().len()), (len, len));
            assert_eq!(buffer.bytes().as_ptr() as usize % 4096, 0);
        }
    }
}
