//! How a running guest uses its memory: what has content, and how much is written within several times.
//!
//! Owns the write tracking while it looks. Whatever ends it, the tracking is put away first and huge pages are put back
//! afterwards. Refuses: to track beside somebody else, which its caller sees to.

use crate::dirty_tracker::begin;
use crate::{CHUNK_PAGES, Error, HugePages, PageSet, RamFile, Tracking};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Looks, as shares of the whole time: a working set shows by growing ever more slowly.
const LOOKS: [f64; 5] = [0.06, 0.15, 0.35, 0.6, 1.0];
/// Chunks whose content is looked at; more memory than this is judged by a sample, evenly spread.
const CHUNKS_READ_MAX: u64 = 256;

/// A QEMU whose guest's memory is looked at.
#[derive(Debug)]
pub struct Subject {
    pub ram: Arc<RamFile>,
    pub huge_pages: Arc<HugePages>,
    pub qemu_pid: u32,
    pub handout_socket: PathBuf,
    /// The whole time of looking.
    pub within: Duration,
}

/// What the looks have shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    /// Pages that are not zero, judged by a sample where there are many.
    pub data_pages: u64,
    /// One look each, the earliest first.
    pub written: Vec<Written>,
}

/// How many pages were written within a time from the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    pub after: Duration,
    pub pages: u64,
}

/// Looks at content once and at what is written several times; `None` when `wait`, which says whether a time has passed
/// undisturbed, said no.
pub fn measure(subject: &Subject, wait: impl Fn(Duration) -> bool) -> Result<Option<Usage>, Error> {
    let data_pages = data_pages(&subject.ram)?;
    let tracking = begin(
        &subject.ram,
        subject.qemu_pid,
        &subject.handout_socket,
        &subject.huge_pages,
    )?;
    let looked = look(subject, tracking, wait);
    subject.huge_pages.put_back();
    Ok(looked?.map(|written| Usage {
        data_pages,
        written,
    }))
}

/// Looks at what has been written since the beginning, several times. Puts the tracking away, whatever happens.
fn look(
    subject: &Subject,
    mut tracking: Tracking,
    wait: impl Fn(Duration) -> bool,
) -> Result<Option<Vec<Written>>, Error> {
    let began = Instant::now();
    let mut written = PageSet::new(subject.ram.page_count());
    let mut looks = Vec::with_capacity(LOOKS.len());
    for share in LOOKS {
        let at = subject.within.mul_f64(share);
        if !wait(at.saturating_sub(began.elapsed())) {
            return Ok(None);
        }
        let pages = tracking.peek(&mut written)?;
        looks.push(Written {
            after: began.elapsed(),
            pages,
        });
    }
    tracking.stop()?;
    Ok(Some(looks))
}

/// Pages that are not zero, judged by a sample where there are many.
fn data_pages(ram: &RamFile) -> Result<u64, Error> {
    let present = ram.data_pages()?.count();
    let chunks = ram.page_count() / CHUNK_PAGES;
    let step = chunks.div_ceil(CHUNKS_READ_MAX).max(1);
    let (mut seen, mut data) = (0_u64, 0_u64);
    let mut chunk = 0;
    while chunk < chunks {
        let first = chunk * CHUNK_PAGES;
        seen += ram
            .data_extents(first..first + CHUNK_PAGES)?
            .iter()
            .map(|extent| extent.end - extent.start)
            .sum::<u64>();
        let content = ram.classify_chunk(first, [u64::MAX; CHUNK_PAGES as usize / 64])?;
        data += content
            .data
            .iter()
            .map(|word| u64::from(word.count_ones()))
            .sum::<u64>();
        chunk += step;
    }
    Ok(scaled(present, data, seen))
}

/// The share of data among what was seen, of all that is present.
fn scaled(present: u64, data: u64, seen: u64) -> u64 {
    if seen == 0 {
        // No sample fell on memory: all of what there is may be data.
        return present;
    }
    (present as f64 * data as f64 / seen as f64).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shm_file(pages: u64) -> (tempfile::TempDir, RamFile) {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let ram = RamFile::create(&dir.path().join("ram"), pages * 4096, None).unwrap();
        (dir, ram)
    }

    #[test]
    fn untouched_and_zero_memory_is_no_data() {
        use std::os::unix::fs::FileExt as _;
        let (_dir, ram) = shm_file(4 * CHUNK_PAGES);
        assert_eq!(data_pages(&ram).unwrap(), 0);
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(ram.path())
            .unwrap();
        file.write_all_at(&[1; 4096], 0).unwrap();
        file.write_all_at(&[0; 4096], 3 * 4096).unwrap();
        file.write_all_at(&[7; 8192], 600 * 4096).unwrap();
        assert_eq!(data_pages(&ram).unwrap(), 3);
    }

    #[test]
    fn a_sample_speaks_for_the_rest() {
        assert_eq!(scaled(1000, 30, 60), 500);
        assert_eq!(scaled(1000, 0, 60), 0);
        assert_eq!(scaled(1000, 0, 0), 1000);
    }
}
