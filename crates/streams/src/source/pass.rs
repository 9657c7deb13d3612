//! One pass over dirty pages, shared by the sender threads without a lock: each takes the next chunk by one atomic add.
//!
//! Owned by the driver for the time of an iteration. What no thread took is dirty still.

use godwit_guestmem::PageSet;
use godwit_guestmem::page_set::Chunk;
use godwit_migrate::account::PAGE_BYTES;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Longest nap of a thread that is ahead of the cap; short, so that a cancel is heard.
const NAP_MAX: Duration = Duration::from_millis(50);

/// The chunks of one iteration.
#[derive(Debug)]
pub struct Pass {
    chunks: Vec<Chunk>,
    next: AtomicUsize,
    stopped: AtomicBool,
    gives_way: bool,
    pace: Option<Pace>,
}

/// Holds all threads together below a cap.
#[derive(Debug)]
struct Pace {
    began: Instant,
    bytes_per_s: f64,
    sent_bytes: AtomicU64,
}

impl Pass {
    /// A pass over the set's pages, at most `cap_bytes_per_s`. Its threads give way to vCPUs or take their full share.
    pub fn new(pages: &PageSet, cap_bytes_per_s: Option<f64>, gives_way: bool) -> Self {
        let pace = cap_bytes_per_s.map(|bytes_per_s| Pace {
            began: Instant::now(),
            bytes_per_s,
            sent_bytes: AtomicU64::new(0),
        });
        Self {
            chunks: pages.chunks().filter(|chunk| chunk.count() > 0).collect(),
            next: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            gives_way,
            pace,
        }
    }

    /// What holds it back, if anything does.
    pub fn cap_bytes_per_s(&self) -> Option<f64> {
        self.pace.as_ref().map(|pace| pace.bytes_per_s)
    }

    /// Whether its threads give way to vCPUs.
    pub fn gives_way(&self) -> bool {
        self.gives_way
    }

    /// The next chunk, until there is none or the pass was stopped.
    pub fn take(&self) -> Option<&Chunk> {
        if self.stopped.load(Ordering::Relaxed) {
            return None;
        }
        self.chunks.get(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Pages of the whole pass.
    fn pages(&self) -> u64 {
        self.chunks.iter().map(Chunk::count).sum()
    }

    /// Pages of the chunks that nobody has taken so far.
    pub fn left_pages(&self) -> u64 {
        let taken = self.next.load(Ordering::Relaxed).min(self.chunks.len());
        self.chunks.iter().skip(taken).map(Chunk::count).sum()
    }

    /// Bytes that no thread has taken yet, and the speed after `passed_s` where enough is sent to tell.
    pub fn progress(&self, passed_s: f64) -> (u64, Option<f64>) {
        let (left, all) = (self.left_pages(), self.pages());
        let sent_bytes = (all - left) * PAGE_BYTES;
        let telling = passed_s > 0.2 && sent_bytes > all * PAGE_BYTES / 50;
        let bytes_per_s = telling.then(|| sent_bytes as f64 / passed_s);
        (left * PAGE_BYTES, bytes_per_s)
    }

    /// Ends the pass early: a cancel or a lost channel.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Adds the pages of all chunks that nobody took. Only once every thread has reported its end.
    pub fn put_back_untaken(&self, pages: &mut PageSet) {
        let taken = self.next.load(Ordering::Relaxed).min(self.chunks.len());
        for chunk in self.chunks.iter().skip(taken) {
            put_back_chunk(chunk, pages);
        }
    }

    /// Books bytes against the cap and sleeps while ahead of it; says how long it slept.
    pub fn keep_pace(&self, bytes: u64) -> Duration {
        let Some(pace) = &self.pace else {
            return Duration::ZERO;
        };
        let sent = pace.sent_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let due = Duration::from_secs_f64(sent as f64 / pace.bytes_per_s);
        let began = Instant::now();
        while !self.stopped.load(Ordering::Relaxed) {
            let ahead = due.saturating_sub(pace.began.elapsed());
            if ahead.is_zero() {
                break;
            }
            std::thread::sleep(ahead.min(NAP_MAX));
        }
        began.elapsed()
    }
}

/// Adds a chunk's pages to a set.
pub fn put_back_chunk(chunk: &Chunk, pages: &mut PageSet) {
    for run in chunk.runs() {
        pages.insert_range(run);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages() -> PageSet {
        let mut set = PageSet::new(4096);
        set.insert_range(10..20);
        set.insert_range(1000..1100);
        set.insert_range(3000..3001);
        set
    }

    #[test]
    fn what_nobody_took_is_dirty_still() {
        let all = pages();
        let pass = Pass::new(&all, None, false);
        let mut seen = PageSet::new(4096);
        put_back_chunk(pass.take().unwrap(), &mut seen);
        pass.stop();
        assert!(pass.take().is_none());
        pass.put_back_untaken(&mut seen);
        assert_eq!(seen.count(), all.count());
    }

    #[test]
    fn empty_chunks_are_left_out() {
        let pass = Pass::new(&pages(), None, false);
        let mut chunks = 0;
        while pass.take().is_some() {
            chunks += 1;
        }
        assert_eq!(chunks, 4, "10..20, 1000..1024, 1024..1100, 3000");
    }
}
