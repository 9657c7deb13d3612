//! What a second image was given and has not done yet: whose it is, which thread takes what next, and how much more may come.
//!
//! Little of the guest's may be under way, so that a guest is as fast as the slower of its images and both are soon equal once it stands still; and as much
//! of what is copied as the storage does in a moment. Owned by the second image, below its lock. Refuses nothing: whoever gives asks first
//! whether there is room.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::filters::{Change, Course, Origin, PATIENCE, REGION};

/// Threads, and with them changes that the storage has at the same time.
pub(crate) const THREADS: usize = 32;
/// Bytes of the guest's changes that may be under way,
const GUEST_BYTES_MAX: u64 = 2 << 20;
/// and how many of them, which is twice what the storage has at the same time.
const GUEST_CHANGES_MAX: usize = 2 * THREADS;
/// Bytes of what is copied that may be under way: as many as the storage writes in a moment, between these bounds,
const COPY_BYTES: Range<u64> = 256 << 10..COPY_PIECES * REGION;
/// and in so many pieces, no more at a time. Storage that serves all requests alike would else leave little to one large piece that is copied
/// beside many small writes of the guest, and a guest that writes all the while would have no end of it.
const COPY_PIECES: u64 = 16;
/// What may be under way at first: storage is slow until it has shown not to be.
const COPY_BYTES_AT_FIRST: u64 = 2 << 20;
/// Storage that takes longer for a change that is copied has too many of them; one that takes half as long may have more.
const COPY_TAKES: Duration = Duration::from_millis(400);
/// Changes that may wait: those without content are cheap, and are remembered.
const WAITING_MAX: usize = 4096;
/// Just before the disk stands still the guest may have so many bytes under way,
const GUEST_BYTES_AT_THE_END: u64 = 64 << 10;
/// and so many changes.
const GUEST_CHANGES_AT_THE_END: usize = 8;
/// A change without content counts as so many bytes, and so does a clone.
const CHEAP_COST: u64 = 4096;
/// No region is copied while so many pieces of what is copied wait for a thread.
const COPIES_WAITING_MAX: usize = 4 * THREADS;

/// What a second image has to do.
#[derive(Debug)]
pub(crate) struct UnderWay {
    /// Number of the change that was given last.
    count: u64,
    /// Changes that no thread has taken, by origin, oldest first.
    waiting: [VecDeque<Task>; 2],
    /// Numbers of those that a thread carries out, and since when.
    running: Vec<(u64, Instant)>,
    /// When one was done last.
    done_at: Option<Instant>,
    /// What is under way, by origin.
    bytes: [u64; 2],
    /// How many of the guest's,
    of_guest: usize,
    /// and how many pieces of what is copied, but clones.
    pieces: u64,
    /// The guest's writes, and flushes, that were carried out, until they are told of,
    ended: Vec<u64>,
    /// and flushes that are to be.
    flushes: Vec<u64>,
    /// Bytes that the copying may have under way,
    copy_room: u64,
    /// and the number of the last change that was given before it was so: what is measured of that one is of no use.
    adapted_at: u64,
    /// Whether the disk is about to stand still.
    ends_soon: bool,
    /// Whether no more is to be done.
    has_ended: bool,
}

/// What becomes of bytes.
#[derive(Debug)]
pub(crate) enum Content {
    Change(Change),
    /// They are those of the first image then: what the guest has written there since this was given comes later by itself.
    Cloned,
}

#[derive(Debug)]
pub(crate) struct Task {
    pub number: u64,
    pub range: Range<u64>,
    pub content: Content,
    origin: Origin,
    /// The guest's write whose end is told.
    write: Option<u64>,
}

impl Default for UnderWay {
    fn default() -> Self {
        Self {
            count: 0,
            waiting: Default::default(),
            running: Vec::new(),
            done_at: None,
            bytes: [0; 2],
            of_guest: 0,
            pieces: 0,
            ended: Vec::new(),
            flushes: Vec::new(),
            copy_room: COPY_BYTES_AT_FIRST,
            adapted_at: 0,
            ends_soon: false,
            has_ended: false,
        }
    }
}

impl UnderWay {
    /// Whether it has had a change for long, and has done nothing meanwhile: slow storage is not silent.
    pub fn is_silent(&self) -> bool {
        let is_long = |since: &Instant| since.elapsed() >= PATIENCE;
        let mut running = self.running.iter();
        running.any(|(_, since)| is_long(since)) && self.done_at.as_ref().is_none_or(is_long)
    }

    /// Bytes that were given and are still to be done.
    pub fn bytes(&self) -> u64 {
        self.bytes.iter().sum()
    }

    /// Whether there is room for a change of this origin.
    pub fn takes(&self, origin: Origin) -> bool {
        self.room(origin) > 0 && (origin == Origin::Copy || self.of_guest < self.guest_max().0)
    }

    /// How many regions may be copied at once.
    pub fn region_limit(&self) -> usize {
        if self.waiting[Origin::Copy as usize].len() >= COPIES_WAITING_MAX {
            return 0;
        }
        let regions = self.room(Origin::Copy).div_ceil(REGION);
        let pieces = COPY_PIECES.saturating_sub(self.pieces);
        let of_a_region = REGION * COPY_PIECES / self.copy_room;
        let regions = regions.min(pieces.div_ceil(of_a_region));
        usize::try_from(regions).unwrap_or(usize::MAX)
    }

    /// Whether most of what may be copied at once is under way.
    pub fn is_behind(&self) -> bool {
        2 * self.bytes[Origin::Copy as usize] > self.copy_room
    }

    /// From now on, or no longer, the disk is about to stand still.
    pub fn end_soon(&mut self, ends_soon: bool) {
        self.ends_soon = ends_soon;
    }

    /// Whether so little is under way as there is just before the disk stands still.
    pub fn is_at_the_end(&self) -> bool {
        self.of_guest <= GUEST_CHANGES_AT_THE_END && self.bytes() <= GUEST_BYTES_AT_THE_END
    }

    /// Nothing more is to be done.
    pub fn end(&mut self, course: &Course) {
        self.has_ended = true;
        self.lose_waiting(course);
    }

    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Bytes that may still be given.
    fn room(&self, origin: Origin) -> u64 {
        if self.is_silent() || self.waiting[origin as usize].len() >= WAITING_MAX {
            return 0;
        }
        let most = match origin {
            Origin::Guest => self.guest_max().1,
            Origin::Copy => self.copy_room,
        };
        most.saturating_sub(self.bytes[origin as usize])
    }

    /// How many changes of the guest's may be under way, and bytes.
    fn guest_max(&self) -> (usize, u64) {
        match self.ends_soon {
            true => (GUEST_CHANGES_AT_THE_END, GUEST_BYTES_AT_THE_END),
            false => (GUEST_CHANGES_MAX, GUEST_BYTES_MAX),
        }
    }

    /// Takes a change, in several pieces where it is one that is copied. Returns how many.
    pub fn give(&mut self, origin: Origin, range: Range<u64>, change: Change) -> usize {
        let (Change::Written(buffer, at), Origin::Copy) = (&change, origin) else {
            self.add(origin, range, Content::Change(change));
            return 1;
        };
        let before = self.count;
        let piece = self.copy_room / COPY_PIECES;
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start.saturating_add(piece));
            let inside = at + (start - range.start) as usize;
            let change = Change::Written(Arc::clone(buffer), inside);
            self.add(origin, start..end, Content::Change(change));
            start = end;
        }
        usize::try_from(self.count - before).unwrap_or(usize::MAX)
    }

    /// Takes the guest's write of this number.
    pub fn give_write(&mut self, number: u64, range: Range<u64>, change: Change) {
        self.add_task(
            (Origin::Guest, Some(number)),
            range,
            Content::Change(change),
        );
    }

    pub fn add(&mut self, origin: Origin, range: Range<u64>, content: Content) {
        self.add_task((origin, None), range, content);
    }

    fn add_task(
        &mut self,
        (origin, write): (Origin, Option<u64>),
        range: Range<u64>,
        content: Content,
    ) {
        self.count += 1;
        let task = Task {
            number: self.count,
            range,
            content,
            origin,
            write,
        };
        self.bytes[origin as usize] += task.cost();
        self.of_guest += usize::from(origin == Origin::Guest);
        self.pieces += u64::from(task.is_piece());
        self.waiting[origin as usize].push_back(task);
    }

    /// The oldest change of this origin, else of the other, which is carried out from now on, and the number before which none is
    /// under way.
    pub fn begin(&mut self, first: Origin) -> Option<(Task, u64)> {
        let task = self.take(first)?;
        let below = self.oldest().unwrap_or(task.number).min(task.number);
        self.running.push((task.number, Instant::now()));
        Some((task, below))
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

    /// What no thread has taken is not done.
    pub fn lose_waiting(&mut self, course: &Course) {
        for task in std::mem::take(&mut self.waiting).into_iter().flatten() {
            // Who counts what waits must see it as lost, so first that.
            course.lose(task.range.clone());
            self.account_end(&task);
        }
    }

    /// A thread is done with it. Returns whether somebody is to be told, who has not been yet.
    pub fn has_done(&mut self, task: &Task, is_done: bool) -> bool {
        let now = Instant::now();
        self.done_at = Some(now);
        let mut running = self.running.iter();
        if let Some(at) = running.position(|(number, _)| *number == task.number) {
            let (_, since) = self.running.swap_remove(at);
            if task.is_piece() {
                self.adapt(task.number, now - since);
            }
        }
        self.account_end(task);
        // Of one that has failed nobody is told that it is there.
        let write = task.write.filter(|_| is_done);
        self.confirm(write)
    }

    /// These were carried out. Returns whether somebody is to be told, who has not been yet.
    pub fn confirm(&mut self, numbers: impl IntoIterator<Item = u64>) -> bool {
        let was_empty = self.ended.is_empty();
        self.ended.extend(numbers);
        was_empty && !self.ended.is_empty()
    }

    /// What was carried out since this was called last.
    pub fn take_ended(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.ended)
    }

    /// A flush is to be done.
    pub fn flush(&mut self, number: u64) {
        self.flushes.push(number);
    }

    /// Those that are to be done, which one of the image does.
    pub fn take_flushes(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.flushes)
    }

    /// Number of the change that was given last.
    pub fn last_given(&self) -> u64 {
        self.count
    }

    /// Whether nothing that was given up to this one is under way.
    pub fn is_done_to(&self, last: u64) -> bool {
        self.oldest().is_none_or(|oldest| oldest > last)
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

    fn account_end(&mut self, task: &Task) {
        let bytes = &mut self.bytes[task.origin as usize];
        *bytes = bytes.saturating_sub(task.cost());
        if task.origin == Origin::Guest {
            self.of_guest = self.of_guest.saturating_sub(1);
        }
        self.pieces = self.pieces.saturating_sub(task.is_piece().into());
    }
}

impl Task {
    /// Whether it is one of what is copied, with content.
    fn is_piece(&self) -> bool {
        let is_content = matches!(self.content, Content::Change(Change::Written(..)));
        self.origin == Origin::Copy && is_content
    }

    fn cost(&self) -> u64 {
        match self.content {
            Content::Change(Change::Zeroed) | Content::Cloned => CHEAP_COST,
            Content::Change(Change::Written(..)) => self.range.end - self.range.start,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffer;

    const MS: Duration = Duration::from_millis(1);

    /// How many changes of the guest's there is room for, of so many bytes each.
    fn taken(state: &mut UnderWay, bytes: u64) -> usize {
        let mut count = 0;
        while state.takes(Origin::Guest) {
            let buffer = Arc::new(Buffer::zeroed(bytes as usize));
            state.give(Origin::Guest, 0..bytes, Change::Written(buffer, 0));
            count += 1;
        }
        count
    }

    #[test]
    fn just_before_the_disk_stands_still_little_of_the_guests_is_taken() {
        for (bytes, usual, at_the_end) in [(512, 64, 8), (16 << 10, 64, 4), (1 << 20, 2, 1)] {
            let mut state = UnderWay::default();
            assert_eq!(taken(&mut state, bytes), usual, "{bytes}");
            assert!(!state.is_at_the_end());
            let mut state = UnderWay::default();
            state.end_soon(true);
            assert_eq!(taken(&mut state, bytes), at_the_end, "{bytes}");
            // One that is larger than all that may be under way is taken alone.
            assert_eq!(state.is_at_the_end(), bytes <= GUEST_BYTES_AT_THE_END);
            state.end_soon(false);
            assert_eq!(taken(&mut state, bytes), usual - at_the_end, "{bytes}");
        }
    }

    #[test]
    fn no_region_is_copied_while_many_clones_wait_for_a_thread() {
        let mut state = UnderWay::default();
        for _ in 0..COPIES_WAITING_MAX {
            assert!(state.region_limit() > 0);
            state.add(Origin::Copy, 0..REGION, Content::Cloned);
        }
        assert_eq!(state.region_limit(), 0);
        state.begin(Origin::Copy).expect("one is taken");
        assert!(state.region_limit() > 0);
    }

    /// However much storage takes: what it serves alike would else leave a guest little.
    #[test]
    fn no_more_than_sixteen_pieces_of_what_is_copied_are_under_way() {
        for (copy_room, regions) in [(COPY_BYTES.end, 16), (2 << 20, 8), (256 << 10, 1)] {
            let mut state = UnderWay {
                copy_room,
                ..UnderWay::default()
            };
            let mut given = 0;
            while state.region_limit() > 0 {
                let region = Arc::new(Buffer::zeroed(REGION as usize));
                state.give(Origin::Copy, 0..REGION, Change::Written(region, 0));
                given += 1;
            }
            assert_eq!((given, state.pieces), (regions, COPY_PIECES));
            assert!(state.is_behind(), "what takes the copy is what holds it up");
            let (task, _) = state.begin(Origin::Copy).unwrap();
            state.has_done(&task, true);
            assert_eq!(state.pieces, COPY_PIECES - 1);
        }
    }

    #[test]
    fn what_is_under_way_follows_what_storage_takes_for_it_once_for_what_was_given_since() {
        let mut state = UnderWay {
            count: 16,
            copy_room: 1 << 20,
            ..UnderWay::default()
        };
        state.adapt(1, 10 * MS);
        assert_eq!(state.copy_room, 2 << 20);
        // Those that were given before tell nothing of it: a burst of quick ends must not let in what takes seconds.
        (2..=16).for_each(|number| state.adapt(number, 10 * MS));
        assert_eq!(state.copy_room, 2 << 20);
        state.count = 40;
        state.adapt(17, 300 * MS);
        assert_eq!(state.copy_room, 2 << 20);
        state.adapt(18, 1600 * MS);
        assert_eq!(state.copy_room, 512 << 10);
        state.count = 60;
        state.adapt(41, Duration::from_secs(60));
        assert_eq!(state.copy_room, COPY_BYTES.start);
    }
}
