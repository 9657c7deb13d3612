//! Which guest pages a record is about: lists of runs before page data, and bitmaps of zero pages.
//!
//! Owns its buffers, which are reused from record to record. Refuses on decoding: anything empty, out of order,
//! overlapping, past the guest's end or not in its one canonical form.

use crate::{PAYLOAD_LEN_MAX, WireError};
use godwit_types::PAGE_BYTES;
use std::ops::Range;

/// Bytes of one guest page.
pub const PAGE_SIZE: usize = PAGE_BYTES as usize;
/// Most pages of one payload record: 1 MiB.
pub const PAGES_MAX: u32 = (PAYLOAD_LEN_MAX / PAGE_SIZE) as u32;
/// Most runs of one list: a run has at least one page.
pub const RUNS_MAX: usize = PAGES_MAX as usize;
/// Encoded length of a run: first page `u64`, page count `u32`.
const RUN_LEN: usize = 12;
/// Longest encoded list of runs, in bytes.
pub const RUNS_LEN_MAX: usize = RUNS_MAX * RUN_LEN;
/// Pages that one zero-page record may span: 2 GiB of guest memory.
pub const ZERO_SPAN_MAX: u32 = 512 * 1024;
/// Encoded length before the bitmap: first page `u64`, span `u32`.
const ZERO_HEAD_LEN: usize = 12;
/// Longest encoded zero-page bitmap, in bytes.
pub const ZERO_LEN_MAX: usize = ZERO_HEAD_LEN + ZERO_SPAN_MAX as usize / 8;

/// Neighbouring guest pages, which one entry of a record names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageRun {
    /// Index of the first page, from the start of guest memory.
    pub first: u64,
    /// How many pages, at least one.
    pub count: u32,
}

impl PageRun {
    /// The page after the last; `None` when it does not fit.
    pub fn end(self) -> Option<u64> {
        self.first.checked_add(u64::from(self.count))
    }

    /// Its pages. Ends at the last index there is where the run would not fit.
    pub fn range(self) -> Range<u64> {
        self.first..self.first.saturating_add(u64::from(self.count))
    }
}

/// The runs whose bytes follow in the next record: ascending, apart from each other, at most [`PAGES_MAX`] pages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageRuns {
    runs: Vec<PageRun>,
    pages: u32,
}

impl PageRuns {
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets all runs and keeps the memory.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.pages = 0;
    }

    /// In ascending order, without overlap.
    pub fn runs(&self) -> &[PageRun] {
        &self.runs
    }

    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// How many more pages fit.
    pub fn room(&self) -> u32 {
        PAGES_MAX.saturating_sub(self.pages)
    }

    /// Length of the payload that must follow, in bytes.
    pub fn payload_len(&self) -> usize {
        self.pages as usize * PAGE_SIZE
    }

    /// Adds a run behind the others, merged with the last one where they touch.
    pub fn push(&mut self, run: PageRun) -> Result<(), WireError> {
        if run.count == 0 || run.end().is_none() {
            return Err(WireError::PageListMisuse("an empty or endless run"));
        }
        if run.count > self.room() {
            return Err(WireError::PageListMisuse("more than 256 pages"));
        }
        let last_end = self.runs.last().and_then(|last| last.end());
        match (self.runs.last_mut(), last_end) {
            (Some(_), Some(last_end)) if run.first < last_end => {
                return Err(WireError::PageListMisuse("runs must ascend"));
            }
            (Some(last), Some(last_end)) if run.first == last_end => last.count += run.count,
            _ => self.runs.push(run),
        }
        self.pages += run.count;
        Ok(())
    }

    /// Appends the encoded list to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        for run in &self.runs {
            out.extend_from_slice(&run.first.to_le_bytes());
            out.extend_from_slice(&run.count.to_le_bytes());
        }
    }

    /// Replaces the list by the one in `bytes`, for a guest of `guest_pages` pages. Left empty on an error.
    pub fn decode(&mut self, bytes: &[u8], guest_pages: u64) -> Result<(), WireError> {
        self.clear();
        let result = walk(bytes, guest_pages, |run| self.runs.push(run));
        match result {
            Ok(pages) => self.pages = pages,
            Err(_) => self.clear(),
        }
        result.map(drop)
    }
}

/// Checks an encoded list, whatever the guest's size, and gives the length of the payload that must follow.
pub(crate) fn announced_payload_len(bytes: &[u8]) -> Result<usize, WireError> {
    walk(bytes, u64::MAX, |_| {}).map(|pages| pages as usize * PAGE_SIZE)
}

/// Calls `visit` with every run of a valid list and returns the number of pages.
fn walk(bytes: &[u8], guest_pages: u64, mut visit: impl FnMut(PageRun)) -> Result<u32, WireError> {
    let refuse = |what, offset| Err(WireError::Pages { what, offset });
    let (runs, rest) = bytes.as_chunks::<RUN_LEN>();
    if runs.is_empty() || !rest.is_empty() || runs.len() > RUNS_MAX {
        return refuse("not 1 to 256 whole runs", bytes.len());
    }
    let (mut pages, mut free_from) = (0u32, 0u64);
    for (index, encoded) in runs.iter().enumerate() {
        let offset = index * RUN_LEN;
        let run = decode_run(encoded);
        let touches = index > 0 && run.first == free_from;
        if run.first < free_from || touches {
            return refuse("a run overlaps or touches the one before", offset);
        }
        match run.end() {
            Some(end) if run.count > 0 && end <= guest_pages => free_from = end,
            _ => return refuse("a run is empty or beyond the guest's memory", offset),
        }
        pages = pages.saturating_add(run.count);
        if pages > PAGES_MAX {
            return refuse("more than 256 pages", offset);
        }
        visit(run);
    }
    Ok(pages)
}

fn decode_run(encoded: &[u8; RUN_LEN]) -> PageRun {
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *encoded;
    PageRun {
        first: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        count: u32::from_le_bytes([i, j, k, l]),
    }
}

/// Pages that hold only zeros, as a bitmap from the first to the last of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ZeroPages {
    first: u64,
    span: u32,
    count: u32,
    bitmap: Vec<u8>,
}

impl ZeroPages {
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets all pages and keeps the memory.
    pub fn clear(&mut self) {
        (self.first, self.span, self.count) = (0, 0, 0);
        self.bitmap.clear();
    }

    /// Zero pages in all.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Whether no page was added.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds a page behind the others. `false`: it is too far from the first; send this record and begin another.
    pub fn insert(&mut self, page: u64) -> Result<bool, WireError> {
        if self.is_empty() {
            self.first = page;
        }
        let position = page.checked_sub(self.first);
        let position = position.filter(|p| *p >= u64::from(self.span));
        let position = position.ok_or(WireError::PageListMisuse("zero pages must ascend"))?;
        let Some(position) = u32::try_from(position).ok().filter(|p| *p < ZERO_SPAN_MAX) else {
            return Ok(false);
        };
        self.bitmap.resize(position as usize / 8 + 1, 0);
        if let Some(byte) = self.bitmap.last_mut() {
            *byte |= 1 << (position % 8);
        }
        self.span = position + 1;
        self.count += 1;
        Ok(true)
    }

    /// Appends the encoded bitmap to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.first.to_le_bytes());
        out.extend_from_slice(&self.span.to_le_bytes());
        out.extend_from_slice(&self.bitmap);
    }

    /// Replaces the pages by those in `bytes`, for a guest of `guest_pages` pages. Left empty on an error.
    pub fn decode(&mut self, bytes: &[u8], guest_pages: u64) -> Result<(), WireError> {
        self.clear();
        let (head, bitmap) = check_zero(bytes, guest_pages)?;
        self.first = head.first;
        self.span = head.count;
        self.count = bitmap.iter().map(|byte| byte.count_ones()).sum();
        self.bitmap.extend_from_slice(bitmap);
        Ok(())
    }

    /// The zero pages as runs, ascending.
    pub fn runs(&self) -> impl Iterator<Item = PageRun> + '_ {
        ZeroRuns {
            zero: self,
            position: 0,
        }
    }

    fn is_set(&self, position: u32) -> bool {
        let byte = self.bitmap.get(position as usize / 8).copied();
        byte.is_some_and(|byte| byte >> (position % 8) & 1 == 1)
    }
}

/// The head (as the run that the bitmap spans) and the bitmap of a valid encoding.
fn check_zero(bytes: &[u8], guest_pages: u64) -> Result<(PageRun, &[u8]), WireError> {
    let refuse = |what, offset| Err(WireError::Pages { what, offset });
    let Some((head, bitmap)) = bytes.split_first_chunk::<ZERO_HEAD_LEN>() else {
        return refuse("a zero-page head is cut short", bytes.len());
    };
    let head = decode_run(head);
    if head.count == 0 || head.count > ZERO_SPAN_MAX {
        return refuse("an empty or too long zero-page span", 8);
    }
    if head.end().is_none_or(|end| end > guest_pages) {
        return refuse("a zero page is beyond the guest's memory", 0);
    }
    if bitmap.len() != head.count.div_ceil(8) as usize {
        return refuse("the zero-page bitmap has another length than its span", 8);
    }
    let last_bit = 1u16 << ((head.count - 1) % 8);
    let first_is_set = bitmap.first().is_some_and(|byte| byte & 1 == 1);
    // The last byte's highest set bit is the span's last page: nothing missing, nothing beyond.
    let last_fits = bitmap
        .last()
        .is_some_and(|byte| (last_bit..last_bit * 2).contains(&u16::from(*byte)));
    if !first_is_set || !last_fits {
        return refuse("a zero-page bitmap does not match its span", ZERO_HEAD_LEN);
    }
    Ok((head, bitmap))
}

struct ZeroRuns<'a> {
    zero: &'a ZeroPages,
    position: u32,
}

impl ZeroRuns<'_> {
    /// Steps over whole bytes of `value` (0 or 255), then over single bits that are `set`.
    fn skip(&mut self, set: bool) {
        let whole = if set { u8::MAX } else { 0 };
        while self.position < self.zero.span {
            let byte = self.zero.bitmap.get(self.position as usize / 8).copied();
            if self.position.is_multiple_of(8) && byte == Some(whole) {
                self.position += 8;
            } else if self.zero.is_set(self.position) == set {
                self.position += 1;
            } else {
                return;
            }
        }
        self.position = self.zero.span;
    }
}

impl Iterator for ZeroRuns<'_> {
    type Item = PageRun;

    fn next(&mut self) -> Option<PageRun> {
        self.skip(false);
        let start = self.position;
        self.skip(true);
        let count = self.position - start;
        (count > 0).then(|| PageRun {
            first: self.zero.first + u64::from(start),
            count,
        })
    }
}
