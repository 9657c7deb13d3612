//! A guest's memory seen from outside: filling it with random data, comparing two, watching a counter guest step.
//!
//! The same for all systems: the file of a shared backend, or `/proc/PID/mem` of the process where memory is anonymous.
//! Whoever compares must have stopped both guests. Owns the open file, which keeps a removed RAM file's pages alive.

use anyhow::{Context as _, Result, ensure};
use godwit_testkit::guest::checker::{self, CheckError};
use godwit_testkit::guest::counter::{COUNTER_OFFSET, PAGE_BYTES};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

const CHUNK_BYTES: usize = 1 << 20;

/// Guest memory; offsets are those of the guest's one memory block.
pub struct Memory {
    file: File,
    base: u64,
    bytes: u64,
}

impl FileExt for Memory {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buffer, self.base + offset)
    }

    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<usize> {
        self.file.write_at(buffer, self.base + offset)
    }
}

impl Memory {
    /// The file behind a shared backend.
    pub fn of_file(path: &Path) -> Result<Self> {
        let open = File::options().read(true).write(true).open(path);
        let file = open.with_context(|| format!("cannot open {}", path.display()))?;
        let bytes = file.metadata()?.len();
        Ok(Self {
            file,
            base: 0,
            bytes,
        })
    }

    /// Memory at an address of a process.
    pub fn of_process(pid: u32, address: u64, bytes: u64) -> Result<Self> {
        let path = format!("/proc/{pid}/mem");
        let open = File::options().read(true).write(true).open(&path);
        Ok(Self {
            file: open.with_context(|| format!("cannot open {path}"))?,
            base: address,
            bytes,
        })
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes random data from an offset to the end, every page another.
    pub fn fill(&self, from: u64, seed: u64) -> Result<()> {
        let mut random = Random::new(seed);
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut at = from;
        while at < self.bytes {
            let length = (self.bytes - at).min(CHUNK_BYTES as u64) as usize;
            random.fill(&mut chunk[..length]);
            self.write_all_at(&chunk[..length], at)
                .context("cannot fill the guest's memory")?;
            at += length as u64;
        }
        Ok(())
    }

    /// Compares from an offset on, page for page, and gives how many pages differ.
    pub fn differing_pages(&self, other: &Self, from: u64) -> Result<u64> {
        ensure!(self.bytes == other.bytes, "the two memories differ in size");
        let (mut left, mut right) = (vec![0; CHUNK_BYTES], vec![0; CHUNK_BYTES]);
        let (mut at, mut differing) = (from, 0);
        while at < self.bytes {
            let length = (self.bytes - at).min(CHUNK_BYTES as u64) as usize;
            self.read_exact_at(&mut left[..length], at)?;
            other.read_exact_at(&mut right[..length], at)?;
            if left[..length] != right[..length] {
                let page = PAGE_BYTES as usize;
                let pairs = left[..length]
                    .chunks(page)
                    .zip(right[..length].chunks(page));
                differing += pairs.filter(|(one, two)| one != two).count() as u64;
            }
            at += length as u64;
        }
        Ok(differing)
    }

    /// Pages that a counter guest has stepped since it booted. The guest may run.
    pub fn steps(&self) -> Result<u64, CheckError> {
        let control = checker::control(self)?;
        if control.state == 0 {
            return Err(CheckError::Preparing);
        }
        let pages = control.end_page.saturating_sub(control.first_page);
        // Pages of this pass come first, so their number is found by halving.
        let (mut low, mut high) = (0, pages);
        while low < high {
            let middle = low + (high - low) / 2;
            let at = u64::from(control.first_page + middle) * PAGE_BYTES + COUNTER_OFFSET;
            let mut word = [0; 4];
            let read = self.read_exact_at(&mut word, at);
            read.map_err(|source| CheckError::Read { offset: at, source })?;
            if u32::from_le_bytes(word) == control.passes {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        Ok(u64::from(control.passes) * u64::from(pages) + u64::from(low))
    }
}

/// A fast generator whose output no compressor and no zero test likes.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_exact_mut(8) {
            self.0 = self.0.wrapping_add(0xA076_1D64_78BD_642F);
            let wide = u128::from(self.0) * u128::from(self.0 ^ 0xE703_7ED1_A0B4_28DB);
            let mixed = (wide >> 64) as u64 ^ wide as u64;
            word.copy_from_slice(&mixed.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(pages: u64) -> (tempfile::NamedTempFile, Memory) {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(pages * PAGE_BYTES).unwrap();
        let memory = Memory::of_file(file.path()).unwrap();
        (file, memory)
    }

    #[test]
    fn a_fill_leaves_no_page_zero_and_no_two_alike() {
        let (_file, memory) = memory(600);
        memory.fill(PAGE_BYTES, 7).unwrap();
        let mut seen = std::collections::HashSet::new();
        for page in 0..600 {
            let mut bytes = vec![0; PAGE_BYTES as usize];
            memory.read_exact_at(&mut bytes, page * PAGE_BYTES).unwrap();
            assert_eq!(
                bytes.iter().all(|byte| *byte == 0),
                page == 0,
                "page {page}"
            );
            assert!(seen.insert(bytes), "page {page}");
        }
    }

    #[test]
    fn one_wrong_byte_is_one_differing_page() {
        let ((_a, left), (_b, right)) = (memory(600), memory(600));
        left.fill(0, 1).unwrap();
        right.fill(0, 1).unwrap();
        assert_eq!(left.differing_pages(&right, 0).unwrap(), 0);
        let mut byte = [0];
        right
            .read_exact_at(&mut byte, 300 * PAGE_BYTES + 9)
            .unwrap();
        right
            .write_all_at(&[!byte[0]], 300 * PAGE_BYTES + 9)
            .unwrap();
        assert_eq!(left.differing_pages(&right, 0).unwrap(), 1);
        assert_eq!(left.differing_pages(&right, 301 * PAGE_BYTES).unwrap(), 0);
    }

    #[test]
    fn the_memory_of_a_process_is_reached_by_its_address() {
        let buffer = vec![3_u8; 8192];
        let memory = Memory::of_process(std::process::id(), buffer.as_ptr() as u64, 8192).unwrap();
        let mut bytes = [0; 4];
        memory.read_exact_at(&mut bytes, 4000).unwrap();
        assert_eq!(bytes, [3; 4]);
    }
}
