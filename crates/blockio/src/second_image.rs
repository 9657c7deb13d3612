//! A second image of a disk on the same host, which a mirroring fills while the guest works with the first.
//!
//! Threads carry changes out, each one at a time and beside the page cache; of two changes of the same bytes the later
//! stays ([`Arriving`]). What is under way is bounded, and little of the guest's, so that a guest is as fast as the slower of its
//! images and both are soon equal once it stands still. Half of the threads are the guest's first, so that neither its writes nor
//! the copying waits for all of the other. Who owns the state: this value and its outlets share it; the threads end
//! with the last outlet. Refuses: nothing that is given; an image that cannot be written ends the mirroring, never the guest.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::filters::{Change, Course, Origin, Outlet, REGION};
use crate::{Arriving, Error, Image};

/// Threads, and with them changes that the storage has at the same time.
const THREADS: usize = 32;
/// Bytes of the guest's changes that may be under way,
const GUEST_BYTES_MAX: u64 = 2 << 20;
/// and how many of them, which is twice what the storage has at the same time.
const GUEST_CHANGES_MAX: usize = 2 * THREADS;
/// Bytes of what is copied that may be under way: as many as the storage writes in a moment, between these bounds,
const COPY_BYTES: Range<u64> = 256 << 10..16 << 20;
/// and in so many pieces. Storage that serves all requests alike would else leave little to one large piece that is copied
/// beside many small writes of the guest, and a guest that writes all the while would have no end of it.
const COPY_PIECES: u64 = 16;
/// What may be under way at first: storage is slow until it has shown not to be.
const COPY_BYTES_AT_FIRST: u64 = 2 << 20;
/// Storage that takes longer for a change that is copied has too many of them; one that takes half as long may have more.
const COPY_TAKES: Duration = Duration::from_millis(400);
/// Changes that may wait: those without content are cheap, and are remembered.
const WAITING_MAX: usize = 4096;
/// What is under way is worth a moment in which the guest's requests wait if it is no more than so many bytes.
const CLOSE_BYTES: u64 = 512 << 10;
/// How often it is looked whether nothing is under way any more.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// A change without content counts as so many bytes.
const ZERO_COST: u64 = 4096;
/// Storage that has had a change for so long, and has done nothing since, is waited for by nobody.
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
    /// Changes that no thread has taken, by origin, oldest first.
    waiting: [VecDeque<Task>; 2],
    /// Numbers of those that a thread carries out, and since when.
    running: Vec<(u64, Instant)>,
    /// When one was done last.
    done_at: Option<Instant>,
    /// Bytes by origin.
    under_way: [u64; 2],
    /// How many of the guest's.
    of_guest: usize,
    /// Bytes that the copying may have under way,
    copy_room: u64,
    /// and the number of the last change that was given before it was so: what is measured of that one is of no use.
    adapted_at: u64,
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
            state: Mutex::new(State {
                copy_room: COPY_BYTES_AT_FIRST,
                ..State::default()
            }),
            news: Condvar::new(),
            syncing: Mutex::default(),
        })))
    }

    /// Begins the threads that write it, and gives what a mirroring takes. Once for each image.
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
        Ok(outlet)
    }

    /// Bytes that were given and are still to be written; none once it has all, or has lost some.
    pub fn under_way_bytes(&self) -> u64 {
        self.0.lock().under_way.iter().sum()
    }

    /// Whether so little is under way that the disk can stand still for it.
    pub fn is_close(&self) -> bool {
        self.under_way_bytes() <= CLOSE_BYTES
    }

    /// Whether both images are equal, once nothing is under way: for a disk that stands still. Waits until then at most.
    pub fn is_equal(&self, until: Instant) -> bool {
        while self.under_way_bytes() > 0 {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        self.0.course.is_synchronised()
    }

    /// Makes durable what was written, and looks at something on the same storage then: within so long or not at all, since
    /// storage may hang while the disk stands still. Nothing where it took longer.
    pub fn sync_within<R: Send + 'static>(
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
        is_done.recv_timeout(limit).ok().transpose()
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
            state.lose_waiting(&self.0.course);
        }
        is_silent
    }

    fn takes(&mut self, origin: Origin) -> bool {
        let state = self.0.lock();
        let has_room = state.room(origin) > 0;
        has_room && (origin == Origin::Copy || state.of_guest < GUEST_CHANGES_MAX)
    }

    fn copies(&mut self) -> usize {
        let room = self.0.lock().room(Origin::Copy);
        usize::try_from(room.div_ceil(REGION)).unwrap_or(usize::MAX)
    }

    fn is_behind(&mut self) -> bool {
        let state = self.0.lock();
        2 * state.under_way[Origin::Copy as usize] > state.copy_room
    }

    fn give(&mut self, origin: Origin, range: Range<u64>, change: Change) {
        let mut state = self.0.lock();
        let (Change::Written(buffer, at), Origin::Copy) = (&change, origin) else {
            state.add(origin, range, change);
            drop(state);
            return self.0.news.notify_one();
        };
        let piece = state.copy_room / COPY_PIECES;
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start.saturating_add(piece));
            let inside = at + (start - range.start) as usize;
            state.add(
                origin,
                start..end,
                Change::Written(Arc::clone(buffer), inside),
            );
            start = end;
        }
        drop(state);
        self.0.news.notify_all();
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.has_ended = true;
        state.lose_waiting(&self.0.course);
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

    fn write_all(&self, first: Origin) {
        while let Some((task, below)) = self.next(first) {
            self.carry_out(&task, below);
        }
    }

    fn carry_out(&self, task: &Task, below: u64) {
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
        self.lock().has_done(task);
    }

    /// The oldest change of this origin, else of the other, and the number before which none is under way; none where there
    /// will be no more.
    fn next(&self, first: Origin) -> Option<(Task, u64)> {
        let mut state = self.lock();
        loop {
            if state.has_ended {
                return None;
            }
            if let Some(task) = state.take(first) {
                let below = state.oldest().unwrap_or(task.number).min(task.number);
                state.running.push((task.number, Instant::now()));
                return Some((task, below));
            }
            let waited = self.news.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn no_thread(source: std::io::Error) -> Error {
    Error::Ring {
        action: "begin a thread",
        source,
    }
}

impl State {
    /// Whether it has had a change for long, and has done nothing meanwhile: slow storage is not silent.
    fn is_silent(&self) -> bool {
        let is_long = |since: &Instant| since.elapsed() >= SILENT_FOR;
        let mut running = self.running.iter();
        running.any(|(_, since)| is_long(since)) && self.done_at.as_ref().is_none_or(is_long)
    }

    /// Bytes that may still be given.
    fn room(&self, origin: Origin) -> u64 {
        if self.is_silent() || self.waiting[origin as usize].len() >= WAITING_MAX {
            return 0;
        }
        let most = match origin {
            Origin::Guest => GUEST_BYTES_MAX,
            Origin::Copy => self.copy_room,
        };
        most.saturating_sub(self.under_way[origin as usize])
    }

    fn add(&mut self, origin: Origin, range: Range<u64>, change: Change) {
        self.count += 1;
        let task = Task {
            number: self.count,
            origin,
            range,
            change,
        };
        self.under_way[origin as usize] += task.cost();
        self.of_guest += usize::from(origin == Origin::Guest);
        self.waiting[origin as usize].push_back(task);
    }

    fn take(&mut self, first: Origin) -> Option<Task> {
        let second = match first {
            Origin::Guest => Origin::Copy,
            Origin::Copy => Origin::Guest,
        };
        let [first, second] = [first as usize, second as usize];
        let task = self.waiting[first].pop_front();
        task.or_else(|| self.waiting[second].pop_front())
    }

    /// The lowest number of those that are under way.
    fn oldest(&self) -> Option<u64> {
        let waiting = self.waiting.iter().filter_map(VecDeque::front);
        let running = self.running.iter().map(|(number, _)| *number);
        running.chain(waiting.map(|task| task.number)).min()
    }

    fn lose_waiting(&mut self, course: &Course) {
        for task in std::mem::take(&mut self.waiting).into_iter().flatten() {
            // Who counts what waits must see it as lost, so first that.
            course.lose(task.range.clone());
            self.end(&task);
        }
    }

    /// A thread has carried it out.
    fn has_done(&mut self, task: &Task) {
        let now = Instant::now();
        self.done_at = Some(now);
        let mut running = self.running.iter();
        if let Some(at) = running.position(|(number, _)| *number == task.number) {
            let (_, since) = self.running.swap_remove(at);
            let is_content = matches!(task.change, Change::Written(..));
            if task.origin == Origin::Copy && is_content {
                self.adapt(task.number, now - since);
            }
        }
        self.end(task);
    }

    /// Less is copied at once where storage takes long for it: a guest's writes wait in the same queue of the storage.
    fn adapt(&mut self, number: u64, mut took: Duration) {
        if number <= self.adapted_at || (COPY_TAKES / 2..=COPY_TAKES).contains(&took) {
            return;
        }
        if took < COPY_TAKES / 2 {
            self.copy_room = self.copy_room.saturating_mul(2);
        }
        while took > COPY_TAKES {
            (self.copy_room, took) = (self.copy_room / 2, took / 2);
        }
        self.copy_room = self.copy_room.clamp(COPY_BYTES.start, COPY_BYTES.end);
        self.adapted_at = self.count;
    }

    fn end(&mut self, task: &Task) {
        let bytes = &mut self.under_way[task.origin as usize];
        *bytes = bytes.saturating_sub(task.cost());
        if task.origin == Origin::Guest {
            self.of_guest = self.of_guest.saturating_sub(1);
        }
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
    use crate::{Access, Buffer};

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn what_is_under_way_follows_what_storage_takes_for_it_once_for_what_was_given_since() {
        let mut state = State {
            copy_room: COPY_BYTES_AT_FIRST,
            count: 16,
            ..State::default()
        };
        state.adapt(1, 10 * MS);
        assert_eq!(state.copy_room, 4 << 20);
        // Those that were given before tell nothing of it: a burst of quick ends must not let in what takes seconds.
        (2..=16).for_each(|number| state.adapt(number, 10 * MS));
        assert_eq!(state.copy_room, 4 << 20);
        state.count = 40;
        state.adapt(17, 300 * MS);
        assert_eq!(state.copy_room, 4 << 20);
        state.adapt(18, 1600 * MS);
        assert_eq!(state.copy_room, 1 << 20);
        state.count = 60;
        state.adapt(41, Duration::from_secs(60));
        assert_eq!(state.copy_room, COPY_BYTES.start);
    }

    #[test]
    fn a_copied_region_is_given_to_storage_in_pieces_beside_which_a_guests_writes_are_not_many() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(REGION).unwrap();
        let image = Image::open(file.path(), Access::ReadWrite, 512).unwrap();
        let second = SecondImage::of(&image, &Course::default()).unwrap();
        let mut outlet = Writers(Arc::clone(&second.0));
        let mut region = Buffer::zeroed(REGION as usize);
        for (block, bytes) in region.bytes_mut().chunks_mut(4096).enumerate() {
            bytes.fill(1 + (block % 200) as u8);
        }
        let region = Arc::new(region);
        let change = Change::Written(Arc::clone(&region), 0);
        assert_eq!(outlet.copies(), 2);
        outlet.give(Origin::Copy, 0..REGION, change);
        assert_eq!(outlet.copies(), 1);
        let pieces = second.0.lock().waiting[Origin::Copy as usize].len() as u64;
        assert_eq!(pieces, REGION / (COPY_BYTES_AT_FIRST / COPY_PIECES));
        let take = |_| second.0.next(Origin::Copy).unwrap();
        let taken: Vec<_> = (0..pieces).map(take).collect();
        for (task, below) in taken.iter().rev() {
            second.0.carry_out(task, *below);
        }
        assert_eq!(second.under_way_bytes(), 0);
        assert_eq!(std::fs::read(file.path()).unwrap(), region.bytes());
    }

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
