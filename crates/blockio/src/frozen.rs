//! Copies an image to which nobody writes into another one, beside a guest that works with what lies over it.
//!
//! Threads read and write regions, as many at once as a mirror would copy beside such a guest; a cap is kept, holes are left out, and blocks that
//! the file system lets both have are not read. Owns its threads while it copies. Refuses: to fill a file system to its end ([`crate::Arriving`]).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::filters::{Beside, COPIES, LOOK_EVERY, Pace, REGION, WaitTimes, runs};
use crate::{Arriving, Buffer, Error};

/// How often a thread looks again that has nothing to do now.
const REST: Duration = Duration::from_millis(2);

/// An image that nobody writes to, and the one that is to have the same.
#[derive(Debug)]
pub struct Frozen<'a> {
    pub from: BorrowedFd<'a>,
    /// By which people know the first one.
    pub path: &'a Path,
    pub into: &'a Arriving,
    /// What is to be copied, in order: all else is zero in both.
    pub data: Vec<Range<u64>>,
    pub pace: &'a Pace,
}

/// How far it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Copied {
    pub bytes: u64,
    pub waits: WaitTimes,
}

struct State {
    source: File,
    /// Which of the ranges is next, and from where.
    next: Mutex<(usize, u64)>,
    /// So many threads may copy.
    allowed: AtomicUsize,
    stops: AtomicBool,
    copied: AtomicU64,
    /// Whether the file system has not refused yet to let both have the same blocks.
    clones: AtomicBool,
    waits: Mutex<WaitTimes>,
    failure: Mutex<Option<Error>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Frozen<'_> {
    /// Copies all of it, and makes that durable. `look` is told, at first before anything is copied, how far it is, and tells how many requests the guest has under way; nothing where the
    /// copying is to end, and then nothing comes back.
    pub fn copy(
        &self,
        mut look: impl FnMut(Copied) -> Option<usize>,
    ) -> Result<Option<Copied>, Error> {
        if look(Copied::default()).is_none() {
            return Ok(None);
        }
        let source = self.from.try_clone_to_owned();
        let state = State {
            source: source.map_err(|error| self.failed("open", error))?.into(),
            next: Mutex::new((0, 0)),
            allowed: AtomicUsize::new(1),
            stops: AtomicBool::new(false),
            copied: AtomicU64::new(0),
            clones: AtomicBool::new(true),
            waits: Mutex::default(),
            failure: Mutex::default(),
        };
        let (mut beside, mut goes_on) = (Beside::default(), true);
        std::thread::scope(|scope| {
            let state = &state;
            let mut threads = Vec::new();
            for number in 0..COPIES {
                let thread = std::thread::Builder::new().name("disk-copy".to_owned());
                match thread.spawn_scoped(scope, move || self.work(state, number)) {
                    Ok(thread) => threads.push(thread),
                    Err(error) if number == 0 => state.fail(self.failed("copy", error)),
                    // As many as there are.
                    Err(_) => break,
                }
            }
            while threads.iter().any(|thread| !thread.is_finished()) {
                match look(state.progress()) {
                    Some(under_way) => beside.saw(under_way),
                    None => {
                        goes_on = false;
                        state.stops.store(true, Ordering::Relaxed);
                    }
                }
                state.allowed.store(beside.copies(), Ordering::Relaxed);
                std::thread::sleep(LOOK_EVERY);
            }
        });
        if let Some(error) = lock(&state.failure).take() {
            return Err(error);
        }
        if !goes_on {
            return Ok(None);
        }
        self.into.sync()?;
        Ok(Some(state.progress()))
    }

    fn failed(&self, action: &'static str, source: io::Error) -> Error {
        Error::Image {
            action,
            path: self.path.to_owned(),
            source,
        }
    }

    fn work(&self, state: &State, number: usize) {
        let mut buffer = Buffer::zeroed(REGION as usize);
        while !state.stops.load(Ordering::Relaxed) {
            let now = Instant::now();
            if number >= state.allowed.load(Ordering::Relaxed) && !self.is_at_end(state) {
                std::thread::sleep(REST);
                continue;
            }
            if self.pace.region_limit(now) == Some(0) {
                std::thread::sleep(REST);
                lock(&state.waits).cap += now.elapsed();
                continue;
            }
            let Some(range) = self.next(state) else {
                return;
            };
            if let Err(error) = self.copy_one(state, &range, &mut buffer) {
                state.fail(error);
                return;
            }
            let bytes = range.end - range.start;
            state.copied.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    fn is_at_end(&self, state: &State) -> bool {
        lock(&state.next).0 >= self.data.len()
    }

    /// The next region that is to be copied; none where there is nothing more.
    fn next(&self, state: &State) -> Option<Range<u64>> {
        let mut next = lock(&state.next);
        let (number, at) = *next;
        let range = self.data.get(number)?;
        let start = at.max(range.start);
        let end = (start - start % REGION + REGION).min(range.end);
        *next = match end < range.end {
            true => (number, end),
            false => (number + 1, 0),
        };
        Some(start..end)
    }

    fn copy_one(
        &self,
        state: &State,
        range: &Range<u64>,
        buffer: &mut Buffer,
    ) -> Result<(), Error> {
        if state.clones.load(Ordering::Relaxed) {
            if self.into.share_blocks(range, &state.source) {
                return Ok(());
            }
            state.clones.store(false, Ordering::Relaxed);
        }
        let began = Instant::now();
        let bytes = (range.end - range.start) as usize;
        let piece = buffer.bytes_mut().get_mut(..bytes).unwrap_or_default();
        let read = state.source.read_exact_at(piece, range.start);
        read.map_err(|error| self.failed("read", error))?;
        let read_in = began.elapsed();
        for (run, is_zero) in runs(piece) {
            if is_zero {
                continue;
            }
            self.pace.take(Instant::now(), run.len() as u64);
            let content = piece.get(run.clone()).unwrap_or_default();
            self.into.put(range.start + run.start as u64, content)?;
        }
        let mut waits = lock(&state.waits);
        waits.reads += read_in;
        waits.writes += began.elapsed().saturating_sub(read_in);
        Ok(())
    }
}

impl State {
    fn fail(&self, error: Error) {
        self.stops.store(true, Ordering::Relaxed);
        lock(&self.failure).get_or_insert(error);
    }

    fn progress(&self) -> Copied {
        Copied {
            bytes: self.copied.load(Ordering::Relaxed),
            waits: *lock(&self.waits),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Image};
    use std::os::fd::AsFd;

    const BYTES: u64 = 3 * REGION + 4096;

    /// An image with something in its second region and in its last block.
    fn images(directory: &Path) -> (Image, Image) {
        let [from, into] = ["from", "into"].map(|name| directory.join(name));
        for path in [&from, &into] {
            File::create(path).unwrap().set_len(BYTES).unwrap();
        }
        let file = File::options().write(true).open(&from).unwrap();
        file.write_all_at(&[5; 8192], REGION + 4096).unwrap();
        file.write_all_at(&[7; 4096], BYTES - 4096).unwrap();
        let open = |path: &Path| Image::open(path, Access::ReadWrite, 512).unwrap();
        (open(&from), open(&into))
    }

    /// Copies that of these parts; `under_way`: what whoever looks on says each time.
    fn copy(directory: &Path, data: Vec<Range<u64>>, under_way: Option<usize>) -> Option<Copied> {
        let (from, into) = images(directory);
        let filled = Arriving::of(&into).unwrap();
        let frozen = Frozen {
            from: from.as_fd(),
            path: from.path(),
            into: &filled,
            data,
            pace: &Pace::default(),
        };
        frozen.copy(|_| under_way).unwrap()
    }

    fn content(directory: &Path, name: &str) -> Vec<u8> {
        std::fs::read(directory.join(name)).unwrap()
    }

    #[test]
    fn all_that_is_there_is_copied_and_its_holes_are_not() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let data = vec![REGION..2 * REGION, 3 * REGION..BYTES];
        let copied = copy(directory.path(), data, Some(0)).unwrap();
        assert_eq!(copied.bytes, REGION + 4096);
        let [from, into] = ["from", "into"].map(|name| content(directory.path(), name));
        assert!(from == into);
    }

    #[test]
    fn whoever_ends_it_early_is_told_that_it_is_not_whole() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let all = std::iter::once(0..BYTES).collect();
        assert_eq!(copy(directory.path(), all, None), None);
        let copied = content(directory.path(), "into");
        assert!(copied.iter().all(|byte| *byte == 0));
    }
}
