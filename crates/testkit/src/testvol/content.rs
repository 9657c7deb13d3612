//! A file's bytes: as readers see them now, and as a power cut would leave them.
//!
//! Owns both views. They share the pages that are equal, so that a sync costs as much as was written since the last one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Chance;

/// Bytes that reach the disk as one or not at all.
pub const PAGE_BYTES: u64 = 4096;
const PAGE: usize = PAGE_BYTES as usize;

#[derive(Clone, Debug, Default)]
struct View {
    size: u64,
    /// A page that is absent is a hole.
    pages: BTreeMap<u64, Arc<[u8; PAGE]>>,
}

/// Both views of a file.
#[derive(Clone, Debug, Default)]
pub struct Content {
    now: View,
    durable: View,
    /// Pages that differ between the views, perhaps.
    dirty: BTreeSet<u64>,
}

impl View {
    fn page(&mut self, index: u64) -> &mut [u8; PAGE] {
        Arc::make_mut(
            self.pages
                .entry(index)
                .or_insert_with(|| Arc::new([0; PAGE])),
        )
    }

    /// Changes the size, and gives the pages that were changed by that.
    fn resize(&mut self, size: u64) -> Vec<u64> {
        let mut changed = Vec::new();
        if size < self.size {
            changed.extend(self.pages.split_off(&size.div_ceil(PAGE_BYTES)).into_keys());
            let last = size / PAGE_BYTES;
            if self.pages.contains_key(&last) {
                self.page(last)[(size % PAGE_BYTES) as usize..].fill(0);
                changed.push(last);
            }
        }
        self.size = size;
        changed
    }
}

impl Content {
    /// Bytes as readers see them.
    pub fn size(&self) -> u64 {
        self.now.size
    }

    /// Pages that take room.
    pub fn pages(&self) -> u64 {
        self.now.pages.len() as u64
    }

    /// How many pages a write would take that the file does not have.
    pub fn pages_missing(&self, offset: u64, bytes: u64) -> u64 {
        let (first, end) = pages_of(offset, bytes);
        (end - first) - self.now.pages.range(first..end).count() as u64
    }

    /// Up to `bytes` bytes; fewer at the end of the file.
    pub fn read(&self, offset: u64, bytes: u64) -> Vec<u8> {
        let end = offset.saturating_add(bytes).min(self.now.size);
        let mut read = vec![0; end.saturating_sub(offset) as usize];
        let (first, last) = pages_of(offset, read.len() as u64);
        for (index, page) in self.now.pages.range(first..last) {
            let start = index * PAGE_BYTES;
            let (from, to) = (start.max(offset), (start + PAGE_BYTES).min(end));
            read[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&page[(from - start) as usize..(to - start) as usize]);
        }
        read
    }

    /// Writes for readers. Nothing of it is durable.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let end = offset + data.len() as u64;
        let (first, last) = pages_of(offset, data.len() as u64);
        for index in first..last {
            let start = index * PAGE_BYTES;
            let (from, to) = (start.max(offset), (start + PAGE_BYTES).min(end));
            self.now.page(index)[(from - start) as usize..(to - start) as usize]
                .copy_from_slice(&data[(from - offset) as usize..(to - offset) as usize]);
            self.dirty.insert(index);
        }
        self.now.size = self.now.size.max(end);
    }

    /// Cuts or lengthens for readers.
    pub fn resize(&mut self, size: u64) {
        self.dirty.extend(self.now.resize(size));
    }

    /// Makes durable what readers see.
    pub fn sync(&mut self) {
        for index in std::mem::take(&mut self.dirty) {
            self.keep_page(index);
        }
        self.durable.size = self.now.size;
    }

    /// Makes durable what readers see of these bytes.
    pub fn sync_range(&mut self, offset: u64, bytes: u64) {
        let (first, last) = pages_of(offset, bytes);
        for index in first..last {
            if self.dirty.remove(&index) {
                self.keep_page(index);
            }
        }
        let end = offset.saturating_add(bytes).min(self.now.size);
        self.durable.size = self.durable.size.max(end);
    }

    fn keep_page(&mut self, index: u64) {
        match self.now.pages.get(&index) {
            Some(page) => self.durable.pages.insert(index, page.clone()),
            None => self.durable.pages.remove(&index),
        };
    }

    /// Lets readers see what a power cut left: what was durable and what else chance let reach the disk, page by page,
    /// in any order, with or without the new size.
    pub fn cut(&mut self, chance: &mut Chance) {
        let (before, after) = (self.durable.size, self.now.size);
        let size = chance.between(before, after);
        let dirty = std::mem::take(&mut self.dirty);
        // A cut that lost the shortening of a file lost all that came with it.
        for index in dirty.into_iter().filter(|_| size <= after) {
            if chance.keeps() {
                self.keep_page(index);
            }
        }
        // Pages beyond the old end may be there already: a size between the two shows a part of them.
        self.durable.size = self.durable.size.max(after);
        self.durable.resize(size);
        self.now = self.durable.clone();
    }
}

/// The first page that a range touches, and the first after it that it does not.
fn pages_of(offset: u64, bytes: u64) -> (u64, u64) {
    if bytes == 0 {
        return (0, 0);
    }
    (
        offset / PAGE_BYTES,
        offset.saturating_add(bytes).div_ceil(PAGE_BYTES),
    )
}
