//! Sets of guest pages: one bit per page, worked on a word (64 pages) at a time.
//!
//! What it is for: dirty bitmaps. [`PageSet`] belongs to one thread; [`AtomicPageSet`] is marked
//! from many threads (a device's write into guest RAM) and drained by one.
//!
//! Who owns the state: whoever holds the value; nothing here touches guest memory or the kernel.
//!
//! What it refuses: pages beyond its size. They do not exist, so ranges are cut to the size.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::CHUNK_PAGES;

/// Each `u64` of a set stands for 64 neighbouring pages.
pub const WORD_PAGES: u64 = 64;
/// Words in a chunk of 512 pages (2 MiB).
pub const CHUNK_WORDS: usize = 8;

/// One chunk of 512 pages of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// First page of the chunk, a multiple of 512.
    pub first_page: u64,
    /// One bit per page, lowest bit of the first word first.
    pub words: [u64; CHUNK_WORDS],
}

impl Chunk {
    /// Pages of the chunk that are in the set.
    pub fn count(&self) -> u64 {
        count_words(&self.words)
    }

    /// Runs of pages of the chunk that are in the set, as page numbers of guest RAM.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let first_page = self.first_page;
        Runs::new(&self.words).map(move |run| {
            first_page.saturating_add(run.start)..first_page.saturating_add(run.end)
        })
    }
}

/// A set of pages of one guest RAM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageSet {
    words: Vec<u64>,
    page_count: u64,
}

impl PageSet {
    /// An empty set for a guest RAM of `page_count` pages.
    pub fn new(page_count: u64) -> Self {
        Self {
            words: vec![0; words_for(page_count)],
            page_count,
        }
    }

    /// The set of all pages.
    pub fn full(page_count: u64) -> Self {
        let mut set = Self::new(page_count);
        set.insert_range(0..page_count);
        set
    }

    /// Pages of the guest RAM described (not the pages in the set).
    pub fn page_count(&self) -> u64 {
        self.page_count
    }

    /// Pages in the set.
    pub fn count(&self) -> u64 {
        count_words(&self.words)
    }

    /// Whether no page is in the set.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// Whether the page is in the set.
    pub fn contains(&self, page: u64) -> bool {
        let word = self.words.get(word_index(page)).copied().unwrap_or(0);
        word & bit(page) != 0
    }

    /// Puts a page in.
    pub fn insert(&mut self, page: u64) {
        self.insert_range(page..page.saturating_add(1));
    }

    /// Puts a range of pages in.
    pub fn insert_range(&mut self, pages: Range<u64>) {
        for (index, mask) in word_masks(pages, self.page_count) {
            if let Some(word) = self.words.get_mut(index) {
                *word |= mask;
            }
        }
    }

    /// Takes a range of pages out.
    pub fn remove_range(&mut self, pages: Range<u64>) {
        for (index, mask) in word_masks(pages, self.page_count) {
            if let Some(word) = self.words.get_mut(index) {
                *word &= !mask;
            }
        }
    }

    /// Takes all pages out.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Puts in every page of `other`; of two sizes the smaller counts.
    pub fn merge(&mut self, other: &Self) {
        for (word, &theirs) in self.words.iter_mut().zip(&other.words) {
            *word |= theirs;
        }
        self.clear_tail();
    }

    /// Runs of neighbouring pages, ascending, each as long as possible.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        Runs::new(&self.words)
    }

    /// Runs widened to whole granules of `granule_pages` pages and joined where they touch.
    pub fn granule_runs(&self, granule_pages: u64) -> impl Iterator<Item = Range<u64>> + '_ {
        let granule = granule_pages.max(1);
        let end_of_ram = self.page_count;
        let mut widened = self.runs().map(move |run| {
            let start = run.start - run.start % granule;
            let end = run.end.checked_next_multiple_of(granule);
            start..end.unwrap_or(end_of_ram).min(end_of_ram)
        });
        let mut pending = widened.next();
        std::iter::from_fn(move || {
            let mut joined = pending.take()?;
            for next in widened.by_ref() {
                if next.start > joined.end {
                    pending = Some(next);
                    break;
                }
                joined.end = joined.end.max(next.end);
            }
            Some(joined)
        })
    }

    /// Chunks of 512 pages that have any page in the set, ascending.
    pub fn chunks(&self) -> impl Iterator<Item = Chunk> + '_ {
        self.words
            .chunks(CHUNK_WORDS)
            .enumerate()
            .filter(|(_, words)| words.iter().any(|&word| word != 0))
            .map(|(index, words)| chunk_of(index, words))
    }

    /// All of the set as one part.
    pub(crate) fn whole(&mut self) -> Part<'_> {
        Part {
            words: &mut self.words,
            pages: 0..self.page_count,
        }
    }

    /// The set in parts of at most so many pages, rounded up to whole chunks: one for each thread.
    pub(crate) fn parts(&mut self, pages: u64) -> impl Iterator<Item = Part<'_>> {
        let page_count = self.page_count;
        let words_each = usize::try_from(pages.div_ceil(CHUNK_PAGES).max(1))
            .unwrap_or(usize::MAX)
            .saturating_mul(CHUNK_WORDS);
        let parts = self.words.chunks_mut(words_each).enumerate();
        parts.map(move |(index, words)| {
            let first_page = (index.saturating_mul(words_each) as u64) * WORD_PAGES;
            let end = first_page + words.len() as u64 * WORD_PAGES;
            Part {
                words,
                pages: first_page..end.min(page_count),
            }
        })
    }

    fn clear_tail(&mut self) {
        let used = self.page_count % WORD_PAGES;
        if let Some(last) = self.words.last_mut().filter(|_| used != 0) {
            *last &= (1 << used) - 1;
        }
    }
}

/// A part of a set that belongs to one thread while others have the rest.
#[derive(Debug)]
pub(crate) struct Part<'a> {
    words: &'a mut [u64],
    pages: Range<u64>,
}

impl Part<'_> {
    /// The pages that it is about.
    pub(crate) fn pages(&self) -> Range<u64> {
        self.pages.clone()
    }

    /// Puts a range of pages in; those that are not this part's are left out.
    pub(crate) fn insert_range(&mut self, pages: Range<u64>) {
        let (first, end) = (self.pages.start, self.pages.end);
        let within = |page: u64| page.clamp(first, end).saturating_sub(first);
        let relative = within(pages.start)..within(pages.end);
        for (index, mask) in word_masks(relative, end.saturating_sub(first)) {
            if let Some(word) = self.words.get_mut(index) {
                *word |= mask;
            }
        }
    }
}

/// A set of pages that many threads mark and one drains.
///
/// Marking releases and draining acquires: a thread that drains a mark also sees the write into
/// guest RAM that was done before it.
#[derive(Debug)]
pub struct AtomicPageSet {
    words: Box<[AtomicU64]>,
    page_count: u64,
}

impl AtomicPageSet {
    /// An empty set for a guest RAM of `page_count` pages.
    pub fn new(page_count: u64) -> Self {
        Self {
            words: (0..words_for(page_count))
                .map(|_| AtomicU64::new(0))
                .collect(),
            page_count,
        }
    }

    /// Pages of the guest RAM described.
    pub fn page_count(&self) -> u64 {
        self.page_count
    }

    /// Marks a range of pages.
    pub fn insert_range(&self, pages: Range<u64>) {
        for (index, mask) in word_masks(pages, self.page_count) {
            if let Some(word) = self.words.get(index) {
                word.fetch_or(mask, Ordering::AcqRel);
            }
        }
    }

    /// Unmarks a range of pages.
    pub fn remove_range(&self, pages: Range<u64>) {
        for (index, mask) in word_masks(pages, self.page_count) {
            if let Some(word) = self.words.get(index) {
                word.fetch_and(!mask, Ordering::AcqRel);
            }
        }
    }

    /// Whether every page of the range is marked; false for pages that do not exist.
    pub fn contains_all(&self, pages: Range<u64>) -> bool {
        pages.end <= self.page_count
            && word_masks(pages, self.page_count).all(|(index, mask)| {
                let word = self.words.get(index);
                word.is_some_and(|word| word.load(Ordering::Acquire) & mask == mask)
            })
    }

    /// How many pages of the range are marked.
    pub fn count_in(&self, pages: Range<u64>) -> u64 {
        let marked = |(index, mask): (usize, u64)| {
            let word = self.words.get(index);
            word.map_or(0, |word| {
                u64::from((word.load(Ordering::Acquire) & mask).count_ones())
            })
        };
        word_masks(pages, self.page_count).map(marked).sum()
    }

    /// Marks the whole range if none of it is marked; otherwise changes nothing.
    /// Of several threads that try overlapping ranges at once at most one succeeds.
    pub fn try_claim(&self, pages: Range<u64>) -> bool {
        let mut done = pages.start;
        for (index, mask) in word_masks(pages.clone(), self.page_count) {
            let Some(word) = self.words.get(index) else {
                continue;
            };
            let before = word.fetch_or(mask, Ordering::AcqRel);
            if before & mask != 0 {
                word.fetch_and(!(mask & !before), Ordering::AcqRel);
                self.remove_range(pages.start..done);
                return false;
            }
            done = (index as u64).saturating_add(1).saturating_mul(WORD_PAGES);
        }
        true
    }

    /// Unmarks all pages.
    pub fn clear(&self) {
        for word in &self.words {
            if word.load(Ordering::Acquire) != 0 {
                word.swap(0, Ordering::AcqRel);
            }
        }
    }

    /// Puts all marked pages into `set`, and leaves them marked.
    pub fn copy_into(&self, set: &mut PageSet) {
        for (word, into) in self.words.iter().zip(&mut set.words) {
            *into |= word.load(Ordering::Acquire);
        }
        set.clear_tail();
    }

    /// Moves all marks into `set`.
    pub fn drain_into(&self, set: &mut PageSet) {
        for (word, into) in self.words.iter().zip(&mut set.words) {
            // A load first: words are mostly 0 and a swap would dirty every cache line.
            if word.load(Ordering::Acquire) != 0 {
                *into |= word.swap(0, Ordering::AcqRel);
            }
        }
        set.clear_tail();
    }
}

/// Runs of set bits in a bitmap.
struct Runs<'a> {
    words: &'a [u64],
    at: u64,
}

impl<'a> Runs<'a> {
    fn new(words: &'a [u64]) -> Self {
        Self { words, at: 0 }
    }

    /// First bit at or after `from` whose value is `wanted`, or the end of the bitmap.
    fn next_bit(&self, from: u64, wanted: bool) -> u64 {
        let end = self.words.len() as u64 * WORD_PAGES;
        let flip = if wanted { 0 } else { u64::MAX };
        let mut keep = u64::MAX.wrapping_shl((from % WORD_PAGES) as u32);
        for (index, &word) in self.words.iter().enumerate().skip(word_index(from)) {
            let found = (word ^ flip) & keep;
            if found != 0 {
                return index as u64 * WORD_PAGES + u64::from(found.trailing_zeros());
            }
            keep = u64::MAX;
        }
        end
    }
}

impl Iterator for Runs<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let start = self.next_bit(self.at, true);
        if start >= self.words.len() as u64 * WORD_PAGES {
            return None;
        }
        self.at = self.next_bit(start, false);
        Some(start..self.at)
    }
}

fn words_for(page_count: u64) -> usize {
    page_count.div_ceil(WORD_PAGES) as usize
}

fn word_index(page: u64) -> usize {
    (page / WORD_PAGES) as usize
}

fn bit(page: u64) -> u64 {
    1 << (page % WORD_PAGES)
}

fn count_words(words: &[u64]) -> u64 {
    words.iter().map(|word| u64::from(word.count_ones())).sum()
}

fn chunk_of(index: usize, words: &[u64]) -> Chunk {
    let mut chunk = Chunk {
        first_page: (index * CHUNK_WORDS) as u64 * WORD_PAGES,
        words: [0; CHUNK_WORDS],
    };
    for (into, &word) in chunk.words.iter_mut().zip(words) {
        *into = word;
    }
    chunk
}

/// The words that a range of pages touches, each with the bits of the range in it.
fn word_masks(pages: Range<u64>, page_count: u64) -> impl Iterator<Item = (usize, u64)> {
    let end = pages.end.min(page_count);
    let mut at = pages.start;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let first_bit = at % WORD_PAGES;
        let bits = (WORD_PAGES - first_bit).min(end - at);
        let mask = (u64::MAX >> (WORD_PAGES - bits)) << first_bit;
        let index = word_index(at);
        at += bits;
        Some((index, mask))
    })
}

#[cfg(test)]
#[allow(
    clippy::single_range_in_vec_init,
    reason = "a set may be one run of pages"
)]
mod tests;
