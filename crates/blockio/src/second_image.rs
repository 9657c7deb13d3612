//! A second image of a disk on the same host, which is filled, by whatever method, while the guest works with the first.
//!
//! Threads carry changes out, each one at a time and beside the page cache; of two changes of the same bytes the later
//! stays ([`Arriving`]). What is under way is bounded, and little of the guest's, so that a guest is as fast as the slower of its
//! images and both are soon equal once it stands still. Half of the threads are the guest's first, so that neither its writes nor
//! the copying waits for all of the other. A guest's write is confirmed once it is carried out, and a flush once the image is durable. Who owns the state: this value and its outlets share it; the threads end
//! with the last outlet. Refuses: nothing that is given; an image that cannot be written ends the copying, never the guest.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::arriving::Cloned;
use crate::filters::{Change, Course, Origin, Outlet};
use crate::under_way::{Content, THREADS, Task, UnderWay};
use crate::{Arriving, Bell, Error, Image};

/// A second image can soon be bound if no more bytes are under way.
const CLOSE_BYTES: u64 = 512 << 10;
/// A disk that is to stand still waits so long at most until little is under way.
const END_WAIT: Duration = Duration::from_millis(200);
/// So often the file system may refuse to let both images have the same blocks before all the rest is copied. It refuses parts of blocks, which
/// come of small writes of the guest.
const REFUSALS_MAX: u32 = 64;
/// How often it is looked whether nothing is under way any more.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// An image that becomes the same as a disk's. Clones are the same one.
#[derive(Debug, Clone)]
pub struct SecondImage(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    image: Arriving,
    /// The disk's image, whose blocks both may have.
    source: Option<File>,
    /// How often the file system has refused that, up to [`REFUSALS_MAX`].
    refusals: AtomicU32,
    course: Course,
    state: Mutex<UnderWay>,
    news: Condvar,
    /// A flush is to be done.
    asked: Condvar,
    /// Rings when something was carried out.
    bell: Bell,
}

impl SecondImage {
    /// Fills this image, whose lock is kept for as long as either lives, for a copying with this course. Blocks that the file system lets
    /// it share with `source`, the disk's image, are not copied.
    pub fn of(image: &Image, source: Option<File>, course: &Course) -> Result<Self, Error> {
        Self::filled(Arriving::of(image)?, source, course)
    }

    /// The same of a delta, the top of a disk ([`Arriving::over`]).
    pub fn over(image: Arriving, course: &Course) -> Result<Self, Error> {
        Self::filled(image, None, course)
    }

    fn filled(image: Arriving, source: Option<File>, course: &Course) -> Result<Self, Error> {
        Ok(Self(Arc::new(Shared {
            bell: Bell::new()?,
            image,
            source,
            refusals: AtomicU32::new(0),
            course: course.clone(),
            state: Mutex::default(),
            news: Condvar::new(),
            asked: Condvar::new(),
        })))
    }

    /// Begins the threads that write it, and gives what a filter that copies takes. Once for each image.
    pub fn outlet(&self) -> Result<Box<dyn Outlet>, Error> {
        let outlet = Box::new(Writers(Arc::clone(&self.0)));
        for number in 0..THREADS {
            let first = match number % 2 {
                0 => Origin::Guest,
                _ => Origin::Copy,
            };
            let shared = Arc::clone(&self.0);
            let thread = std::thread::Builder::new().name("disk-copy".to_owned());
            let begun = thread.spawn(move || shared.write_all(first));
            begun.map_err(no_thread)?;
        }
        let shared = Arc::clone(&self.0);
        let thread = std::thread::Builder::new().name("disk-flush".to_owned());
        let begun = thread.spawn(move || shared.flush_all());
        begun.map_err(no_thread)?;
        Ok(outlet)
    }

    /// Bytes that were given and are still to be written; none once it has all, or has lost some.
    pub fn under_way_bytes(&self) -> u64 {
        self.0.lock().bytes()
    }

    /// Whether so little is under way that it is worth binding it.
    pub(crate) fn is_close(&self) -> bool {
        self.under_way_bytes() <= CLOSE_BYTES
    }

    /// Whether it has had a change for long, and has done nothing meanwhile.
    pub(crate) fn is_silent(&self) -> bool {
        self.0.lock().is_silent()
    }

    /// How the copying that fills it goes.
    pub fn course(&self) -> &Course {
        &self.0.course
    }

    /// Lets no more than little of the guest's be under way, and waits until that is so, at most [`END_WAIT`]: what waits for room waits before
    /// the disk stands still, and reads go on.
    pub(crate) fn come_close(&self) {
        let until = Instant::now() + END_WAIT;
        self.0.lock().end_soon(true);
        while !self.0.lock().is_at_the_end() && Instant::now() < until {
            std::thread::sleep(LOOK_EVERY);
        }
        // What still waits for room is done at once then.
        self.0.lock().end_soon(false);
    }

    /// Number of the change that was given last.
    pub(crate) fn last_given(&self) -> u64 {
        self.0.lock().last_given()
    }

    /// Whether nothing that was given up to this one is under way.
    pub(crate) fn has_done(&self, last: u64) -> bool {
        self.0.lock().is_done_to(last)
    }

    /// Makes durable what was written, and then looks at something, both within this limit; nothing where that took longer, or where the image is
    /// silent meanwhile, for which a guest may wait. It goes on then, on a thread of its own.
    pub(crate) fn sync_within<R: Send + 'static>(
        &self,
        limit: Duration,
        look: impl FnOnce() -> R + Send + 'static,
    ) -> Result<Option<R>, Error> {
        let (second, (done, is_done)) = (self.clone(), channel());
        let thread = std::thread::Builder::new().name("disk-sync".to_owned());
        let begun = thread.spawn(move || {
            let looked = second.sync().map(|()| look());
            let _ = done.send(looked); // whoever asked may have given up
        });
        begun.map_err(no_thread)?;
        let until = Instant::now() + limit;
        loop {
            match is_done.recv_timeout(LOOK_EVERY) {
                Ok(looked) => return looked.map(Some),
                Err(RecvTimeoutError::Timeout) if Instant::now() < until && !self.is_silent() => {}
                Err(_) => return Ok(None),
            }
        }
    }

    /// The disk goes on with it, and stands still until then: waits until nobody says any more what is where of a delta.
    pub fn let_go(&self) {
        self.0.image.let_go();
    }

    /// Makes durable what was written. A failure ends the copying, and every later one fails, too.
    pub fn sync(&self) -> Result<(), Error> {
        self.0.sync()
    }
}

/// What a filter that copies gives its changes to: the threads end with it.
struct Writers(Arc<Shared>);

impl Outlet for Writers {
    fn is_silent(&mut self) -> bool {
        let mut state = self.0.lock();
        let is_silent = state.is_silent();
        if is_silent {
            state.lose_waiting(&self.0.course);
        }
        is_silent
    }

    fn takes(&mut self, origin: Origin) -> bool {
        self.0.lock().takes(origin)
    }

    fn region_limit(&mut self) -> usize {
        self.0.lock().region_limit()
    }

    fn is_behind(&mut self) -> bool {
        self.0.lock().is_behind()
    }

    fn give(&mut self, origin: Origin, range: Range<u64>, change: Change) {
        let count = self.0.lock().give(origin, range, change);
        match count {
            1 => self.0.news.notify_one(),
            _ => self.0.news.notify_all(),
        }
    }

    fn confirms(&self) -> bool {
        true
    }

    fn give_write(&mut self, number: u64, range: Range<u64>, change: Change) -> bool {
        self.0.lock().give_write(number, range, change);
        self.0.news.notify_one();
        true
    }

    fn flush(&mut self, number: u64) -> bool {
        self.0.lock().flush(number);
        self.0.asked.notify_one();
        true
    }

    fn take_ended(&mut self) -> Vec<u64> {
        self.0.lock().take_ended()
    }

    fn bell(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.bell.as_fd())
    }

    fn try_clone(&mut self, range: &Range<u64>) -> bool {
        let clones = self.0.clones();
        if clones {
            self.0
                .lock()
                .add(Origin::Copy, range.clone(), Content::Cloned);
            self.0.news.notify_one();
        }
        clones
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.0.lock().end(&self.0.course);
        self.0.news.notify_all();
        self.0.asked.notify_all();
    }
}

impl Shared {
    fn sync(&self) -> Result<(), Error> {
        if let Some(why) = self.course.failure() {
            return Err(self.image.unusable(why));
        }
        let synced = self.image.sync();
        synced.inspect_err(|error| self.course.fail(error.to_string()))
    }

    fn lock(&self) -> MutexGuard<'_, UnderWay> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_all(&self, first: Origin) {
        while let Some((task, below)) = self.next(first) {
            self.carry_out(&task, below);
        }
    }

    fn carry_out(&self, task: &Task, below: u64) {
        let (number, range) = (task.number, &task.range);
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let done = match &task.content {
            Content::Change(Change::Zeroed) => self.image.apply(number, below, range, None),
            Content::Change(Change::Written(buffer, at)) => {
                let bytes = buffer.bytes().get(*at..at.saturating_add(len));
                self.image.apply(number, below, range, bytes)
            }
            Content::Cloned => self.clone_range(number, below, range),
        };
        let is_done = done.is_ok();
        if let Err(error) = done {
            self.course.fail(error.to_string());
        }
        if self.lock().has_done(task, is_done) {
            self.bell.ring();
        }
    }

    /// Those that came meanwhile are done by one. One that fails has ended the copying.
    fn flush_all(&self) {
        let mut state = self.lock();
        while !state.has_ended() {
            let flushes = state.take_flushes();
            if flushes.is_empty() {
                let waited = self.asked.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            drop(state);
            let synced = self.sync();
            state = self.lock();
            if synced.is_ok() && state.confirm(flushes) {
                self.bell.ring();
            }
        }
    }

    /// The oldest change of this origin, else of the other, and the number before which none is under way; none where there
    /// will be no more.
    fn next(&self, first: Origin) -> Option<(Task, u64)> {
        let mut state = self.lock();
        while !state.has_ended() {
            let begun = state.begin(first);
            if begun.is_some() {
                return begun;
            }
            let waited = self.news.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    fn clones(&self) -> bool {
        self.source.is_some() && self.refusals.load(Ordering::Relaxed) < REFUSALS_MAX
    }

    /// What could not be cloned is lost, and comes again: to be cloned, or to be copied after too many refusals.
    fn clone_range(&self, number: u64, below: u64, range: &Range<u64>) -> Result<(), Error> {
        let Some(source) = &self.source else {
            return Ok(());
        };
        let cloned = self.image.clone_from(number, below, range, source)?;
        let refusals = match cloned {
            Cloned::Whole => return Ok(()),
            Cloned::NotThis => 1,
            Cloned::None => REFUSALS_MAX,
        };
        let add = |now: u32| Some(now.saturating_add(refusals));
        let _ = self
            .refusals
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        self.course.lose(range.clone());
        Ok(())
    }
}

fn no_thread(source: std::io::Error) -> Error {
    Error::System {
        action: "begin a thread",
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filters::{PATIENCE, REGION};
    use crate::{Access, Bound, Buffer};

    #[test]
    fn a_thread_that_cannot_begin_is_told_of_without_a_word_of_io_uring() {
        let refused = no_thread(std::io::ErrorKind::OutOfMemory.into());
        assert_eq!(refused.to_string(), "cannot begin a thread: out of memory");
    }

    #[test]
    fn a_copied_region_is_given_to_storage_in_pieces_beside_which_a_guests_writes_are_not_many() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(REGION).unwrap();
        let image = Image::open(file.path(), Access::ReadWrite, 512).unwrap();
        let second = SecondImage::of(&image, None, &Course::default()).unwrap();
        let mut outlet = Writers(Arc::clone(&second.0));
        let mut region = Buffer::zeroed(REGION as usize);
        for (block, bytes) in region.bytes_mut().chunks_mut(4096).enumerate() {
            bytes.fill(1 + (block % 200) as u8);
        }
        let region = Arc::new(region);
        let change = Change::Written(Arc::clone(&region), 0);
        assert_eq!(outlet.region_limit(), 8);
        outlet.give(Origin::Copy, 0..REGION, change);
        assert_eq!(outlet.region_limit(), 7);
        let begin = || second.0.lock().begin(Origin::Copy);
        let taken: Vec<_> = std::iter::from_fn(begin).collect();
        assert_eq!(taken.len(), 2);
        for (task, below) in taken.iter().rev() {
            second.0.carry_out(task, *below);
        }
        assert_eq!(second.under_way_bytes(), 0);
        assert_eq!(std::fs::read(file.path()).unwrap(), region.bytes());
    }

    #[test]
    fn a_second_image_that_hangs_is_waited_for_neither_until_it_is_bound_nor_until_it_is_durable() {
        let (file, limit) = (tempfile::NamedTempFile::new_in("/var/tmp"), 20 * PATIENCE);
        let file = file.unwrap();
        file.as_file().set_len(REGION).unwrap();
        let image = Image::open(file.path(), Access::ReadWrite, 512).unwrap();
        let second = SecondImage::of(&image, None, &Course::default()).unwrap();
        let mut outlet = Writers(Arc::clone(&second.0));
        outlet.give(Origin::Guest, 0..REGION, Change::Zeroed);
        // A thread that is never done with it.
        let _task = second.0.lock().begin(Origin::Guest).unwrap();
        let began = Instant::now();
        assert!(Bound::within(&second, limit).is_none());
        assert!(began.elapsed() < limit, "it is waited for all the while");
        let (go, goes) = channel::<()>();
        let looks = move || goes.recv().is_ok();
        assert_eq!(second.sync_within(limit, looks).unwrap(), None);
        assert!(began.elapsed() < limit, "what is silent is waited for");
        drop(go);
    }
}
