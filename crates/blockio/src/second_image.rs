//! A second image of a disk on the same host, which a mirroring fills while the guest works with the first.
//!
//! A few threads carry changes out, each one at a time and beside the page cache; of two changes of the same bytes the later
//! stays ([`Arriving`]). What is under way is bounded. Who owns the state: this value and its outlets share it; the threads end
//! with the last outlet. Refuses: nothing that is given; an image that cannot be written ends the mirroring, never the guest.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::filters::{Change, Course, Origin, Outlet};
use crate::{Arriving, Error, Image};

/// Threads, and with them changes that the storage has at the same time.
const THREADS: usize = 8;
/// Bytes of each origin that may be under way.
const UNDER_WAY_MAX: u64 = 16 << 20;
/// Changes that may wait: those without content are cheap, and are remembered.
const WAITING_MAX: usize = 4096;
/// A change without content counts as so many bytes.
const ZERO_COST: u64 = 4096;
/// Storage that has had a change for so long is waited for by nobody.
const SILENT_FOR: Duration = Duration::from_millis(500);

/// An image that becomes the same as a disk's. Clones are the same one.
#[derive(Debug, Clone)]
pub struct SecondImage(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    image: Arriving,
    course: Course,
    state: Mutex<State>,
    news: Condvar,
    syncing: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    /// Number of the change that was given last.
    count: u64,
    /// Changes that no thread has taken, oldest first.
    waiting: VecDeque<Task>,
    /// Numbers of those that a thread carries out, and since when.
    running: Vec<(u64, Instant)>,
    /// Bytes by origin.
    under_way: [u64; 2],
    has_ended: bool,
}

#[derive(Debug)]
struct Task {
    number: u64,
    origin: Origin,
    range: Range<u64>,
    change: Change,
}

impl SecondImage {
    /// Fills this image, whose lock is kept for as long as either lives, for a mirroring with this course.
    pub fn of(image: &Image, course: &Course) -> Result<Self, Error> {
        Ok(Self(Arc::new(Shared {
            image: Arriving::of(image)?,
            course: course.clone(),
            state: Mutex::default(),
            news: Condvar::new(),
            syncing: Mutex::default(),
        })))
    }

    /// Begins the threads that write it, and gives what a mirroring takes. Once for each image.
    pub fn outlet(&self) -> Result<Box<dyn Outlet>, Error> {
        let outlet = Box::new(Writers(Arc::clone(&self.0)));
        for _ in 0..THREADS {
            let shared = Arc::clone(&self.0);
            let thread = std::thread::Builder::new().name("disk-copy".to_owned());
            let begun = thread.spawn(move || shared.write_all());
            begun.map_err(|source| Error::Ring {
                action: "begin a thread",
                source,
            })?;
        }
        Ok(outlet)
    }

    /// Bytes that were given and are still to be written; none once it has all, or has lost some.
    pub fn under_way_bytes(&self) -> u64 {
        self.0.lock().under_way.iter().sum()
    }

    /// Makes durable what was written. The kernel tells of a failure once: it ends the mirroring, and every later one fails, too.
    pub fn sync(&self) -> Result<(), Error> {
        self.0.sync_by(|image| image.sync())
    }
}

/// What a mirroring gives its changes to: the threads end with it.
struct Writers(Arc<Shared>);

impl Outlet for Writers {
    fn is_silent(&mut self) -> bool {
        let mut state = self.0.lock();
        let is_silent = state.is_silent();
        if is_silent {
            // Who counts what waits must see it as lost, so first that.
            for task in std::mem::take(&mut state.waiting) {
                self.0.course.lose(task.range.clone());
                state.end(&task);
            }
        }
        is_silent
    }

    fn takes(&mut self, origin: Origin) -> bool {
        let state = self.0.lock();
        let has_room = state.under_way[origin as usize] < UNDER_WAY_MAX;
        has_room && state.waiting.len() < WAITING_MAX && !state.is_silent()
    }

    fn give(&mut self, origin: Origin, range: Range<u64>, change: Change) {
        let mut state = self.0.lock();
        state.count += 1;
        let task = Task {
            number: state.count,
            origin,
            range,
            change,
        };
        state.under_way[origin as usize] += task.cost();
        state.waiting.push_back(task);
        drop(state);
        self.0.news.notify_one();
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.has_ended = true;
        for task in std::mem::take(&mut state.waiting) {
            self.0.course.lose(task.range.clone());
            state.end(&task);
        }
        drop(state);
        self.0.news.notify_all();
    }
}

impl Shared {
    /// One after the other: none is over before an earlier one has failed or not, however long its caller waited.
    fn sync_by(&self, sync: impl FnOnce(&Arriving) -> Result<(), Error>) -> Result<(), Error> {
        let _turn = self.syncing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(why) = self.course.failure() {
            return Err(self.image.unusable(why));
        }
        sync(&self.image).inspect_err(|error| self.course.fail(error.to_string()))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_all(&self) {
        while let Some((task, below)) = self.next() {
            let (number, range) = (task.number, &task.range);
            let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
            let written = match &task.change {
                Change::Zeroed => self.image.apply(number, below, range, None),
                Change::Written(buffer, at) => {
                    let bytes = buffer.bytes().get(*at..at.saturating_add(len));
                    self.image.apply(number, below, range, bytes)
                }
            };
            if let Err(error) = written {
                self.course.fail(error.to_string());
            }
            let mut state = self.lock();
            state.running.retain(|(running, _)| *running != number);
            state.end(&task);
        }
    }

    /// The oldest change that waits, and the number before which none is under way; none where there will be no more.
    fn next(&self) -> Option<(Task, u64)> {
        let mut state = self.lock();
        loop {
            if state.has_ended {
                return None;
            }
            if let Some(task) = state.waiting.pop_front() {
                let running = state.running.iter().map(|(number, _)| *number);
                let below = running.min().unwrap_or(task.number).min(task.number);
                state.running.push((task.number, Instant::now()));
                return Some((task, below));
            }
            let waited = self.news.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl State {
    fn is_silent(&self) -> bool {
        let mut running = self.running.iter();
        running.any(|(_, since)| since.elapsed() >= SILENT_FOR)
    }

    fn end(&mut self, task: &Task) {
        let bytes = &mut self.under_way[task.origin as usize];
        *bytes = bytes.saturating_sub(task.cost());
    }
}

impl Task {
    fn cost(&self) -> u64 {
        match self.change {
            Change::Written(..) => self.range.end - self.range.start,
            Change::Zeroed => ZERO_COST,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Access;
    use std::sync::mpsc::channel;

    #[test]
    fn a_sync_that_fails_after_its_caller_has_gone_is_not_followed_by_one_that_succeeds() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(4096).unwrap();
        let image = Image::open(file.path(), Access::ReadWrite, 512).unwrap();
        let course = Course::default();
        let second = SecondImage::of(&image, &course).unwrap();
        second.sync().unwrap();
        let (began, has_begun) = channel();
        let (fail, fails) = channel();
        let slow = second.clone();
        let thread = std::thread::spawn(move || {
            slow.0.sync_by(|image| {
                began.send(()).unwrap();
                fails.recv().unwrap();
                Err(image.unusable("the storage failed".to_owned()))
            })
        });
        has_begun.recv().unwrap();
        let later = second.clone();
        let later = std::thread::spawn(move || later.sync());
        fail.send(()).unwrap();
        assert!(thread.join().unwrap().is_err());
        let refused = later.join().unwrap().unwrap_err().to_string();
        assert!(refused.contains("the storage failed"), "{refused}");
        assert!(!course.is_synchronised());
        assert!(second.sync().is_err());
    }
}
