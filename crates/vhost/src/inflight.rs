//! Which requests are under way, in a memory that outlives this process.
//!
//! What it is for: a request that was taken out of a ring and not answered when the process was killed is nowhere else. Its
//! successor, who gets the memory from QEMU, carries all of them out again, oldest first, before it takes a new one.
//!
//! Layout, for each queue: that of QEMU's document (`docs/interop/vhost-user.rst`, "Inflight I/O tracking", split rings),
//! always for [`RING_MAX`] entries, whatever size QEMU says: on version 10 a ring may become larger than that.
//! A header of 16 bytes: features, version, entries, the head answered last, and the index of the used ring after it. Then
//! for each head 16 bytes: whether it is under way, and its number in the order of taking.
//!
//! Who owns the state: QEMU keeps the memory, the disk's thread reads and writes it. Refuses: a memory that is not as it was given, and
//! heads and queues for which it has no place, which change nothing.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;

use crate::message::InflightArea;
use crate::shared_area::SharedArea;
use crate::{Error, QUEUES_MAX, RING_MAX};

const HEADER: usize = 16;
const ENTRY: usize = 16;
const VERSION_AT: usize = 8;
const ENTRIES_AT: usize = 10;
const LAST_HEAD_AT: usize = 12;
const USED_AT: usize = 14;
const COUNTER: usize = 8;
/// A multiple of a cache line.
const QUEUE: usize = (HEADER + ENTRY * RING_MAX as usize).next_multiple_of(64);

/// The memory for all queues of a disk.
#[derive(Debug)]
pub struct Inflight {
    area: SharedArea,
    queues: u16,
}

impl Inflight {
    /// A new one: nothing is under way.
    pub fn create(queues: u16) -> Result<Self, Error> {
        let queues = queues.clamp(1, QUEUES_MAX);
        let area = SharedArea::create(QUEUE * usize::from(queues))?;
        let made = Self { area, queues };
        for queue in 0..queues {
            made.set(queue, VERSION_AT, 1);
            made.set(queue, ENTRIES_AT, RING_MAX);
        }
        Ok(made)
    }

    /// The one that QEMU kept; refused if it is no such memory.
    pub fn open(fd: OwnedFd, told: &InflightArea) -> Result<Self, Error> {
        let queues = told.queues;
        let bytes = QUEUE * usize::from(queues);
        let as_made = told.offset == 0 && told.bytes == bytes as u64;
        if queues == 0 || queues > QUEUES_MAX || !as_made {
            return Err(Error::Message {
                request: crate::message::request::SET_INFLIGHT_FD,
                reason: "it is not the in-flight area that was given".to_owned(),
            });
        }
        let area = SharedArea::open(fd, bytes)?;
        Ok(Self { area, queues })
    }

    /// As QEMU is told of it.
    pub fn told(&self, queue_size: u16) -> InflightArea {
        InflightArea {
            bytes: (QUEUE * usize::from(self.queues)) as u64,
            offset: 0,
            queues: self.queues,
            queue_size,
        }
    }

    /// For a front end that has it already, and says so.
    pub(crate) fn area(&self) -> InflightArea {
        self.told(RING_MAX)
    }

    /// A head was taken: before anything is done about it.
    pub fn took(&self, queue: u16, head: u16, counter: u64) {
        if let Some(at) = self.entry(queue, head) {
            if let Some(cell) = self.area.long(at + COUNTER) {
                cell.store(counter, SeqCst);
            }
            self.mark(at, true);
        }
    }

    /// A head is about to be put into the used ring.
    pub fn answers(&self, queue: u16, head: u16) {
        self.set(queue, LAST_HEAD_AT, head);
    }

    /// It was put there, and the ring's index is now this.
    pub fn answered(&self, queue: u16, head: u16, used: u16) {
        if let Some(at) = self.entry(queue, head) {
            self.mark(at, false);
        }
        self.set(queue, USED_AT, used);
    }

    /// After a ring was begun whose used index is this: heads that are to be carried out again, oldest first, and the number
    /// for the next one that is taken.
    pub fn left_over(&self, queue: u16, size: u16, used: u16) -> (Vec<u16>, u64) {
        let last = self
            .get(queue, LAST_HEAD_AT)
            .filter(|&head| head < RING_MAX);
        if let Some(last) = last
            && self.get(queue, USED_AT) != Some(used)
        {
            // The process ended between the used ring and this memory.
            self.answered(queue, last, used);
        }
        let mut found: Vec<(u64, u16)> = (0..size.min(RING_MAX))
            .filter_map(|head| self.counter(queue, head).map(|counter| (counter, head)))
            .collect();
        found.sort_unstable();
        let next = found
            .last()
            .map_or(0, |(counter, _)| counter.wrapping_add(1));
        (found.into_iter().map(|(_, head)| head).collect(), next)
    }

    /// How many heads of a queue are under way.
    pub(crate) fn under_way(&self, queue: u16) -> usize {
        let heads = 0..RING_MAX;
        heads
            .filter(|&head| self.counter(queue, head).is_some())
            .count()
    }

    /// The number of a head that is under way.
    fn counter(&self, queue: u16, head: u16) -> Option<u64> {
        let at = self.entry(queue, head)?;
        let under_way = self.area.byte(at)?.load(SeqCst) != 0;
        under_way.then(|| self.area.long(at + COUNTER).map(|cell| cell.load(SeqCst)))?
    }

    fn entry(&self, queue: u16, head: u16) -> Option<usize> {
        let inside = queue < self.queues && head < RING_MAX;
        inside.then(|| QUEUE * usize::from(queue) + HEADER + ENTRY * usize::from(head))
    }

    fn mark(&self, entry: usize, under_way: bool) {
        if let Some(cell) = self.area.byte(entry) {
            cell.store(u8::from(under_way), SeqCst);
        }
    }

    fn get(&self, queue: u16, at: usize) -> Option<u16> {
        let at = (queue < self.queues).then(|| QUEUE * usize::from(queue) + at)?;
        Some(self.area.half(at)?.load(SeqCst))
    }

    fn set(&self, queue: u16, at: usize, value: u16) {
        if queue < self.queues
            && let Some(cell) = self.area.half(QUEUE * usize::from(queue) + at)
        {
            cell.store(value, SeqCst);
        }
    }
}

impl AsFd for Inflight {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.area.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a successor has it: the same memory, mapped again.
    fn again(before: &Inflight) -> Inflight {
        let fd = before.as_fd().try_clone_to_owned().unwrap();
        Inflight::open(fd, &before.told(256)).unwrap()
    }

    #[test]
    fn a_successor_finds_what_was_taken_and_not_answered_in_the_order_of_taking() {
        let before = Inflight::create(2).unwrap();
        for (counter, head) in [(0, 7), (1, 1023), (2, 3), (3, 5)] {
            before.took(1, head, counter);
        }
        before.answers(1, 3);
        before.answered(1, 3, 1);
        let after = again(&before);
        assert_eq!(after.left_over(1, 1024, 1), (vec![7, 1023, 5], 4));
        assert_eq!(after.left_over(0, 1024, 0), (vec![], 0));
    }

    #[test]
    fn what_was_in_the_used_ring_already_is_not_carried_out_again() {
        let before = Inflight::create(1).unwrap();
        before.took(0, 1, 0);
        before.took(0, 2, 1);
        before.answers(0, 2);
        // Killed here: the used ring has it, this memory does not say so.
        assert_eq!(again(&before).left_over(0, 256, 1), (vec![1], 1));
        // And after it was repaired nothing more is.
        assert_eq!(again(&before).left_over(0, 256, 1), (vec![1], 1));
    }

    #[test]
    fn a_ring_that_is_larger_than_was_said_has_room() {
        let made = Inflight::create(1).unwrap();
        assert_eq!(made.told(256).queue_size, 256);
        for head in 0..RING_MAX {
            made.took(0, head, head.into());
        }
        assert!(made.left_over(0, RING_MAX, 0).0.into_iter().eq(0..RING_MAX));
    }

    #[test]
    fn a_memory_that_is_none_of_ours_is_refused() {
        let told = Inflight::create(1).unwrap().told(256);
        // One that could be made shorter under us.
        let unsealed = rustix::fs::memfd_create(c"x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&unsealed, told.bytes).unwrap();
        assert!(Inflight::open(unsealed, &told).is_err());
        for wrong in [
            InflightArea { queues: 2, ..told },
            InflightArea {
                queues: 0,
                bytes: 0,
                ..told
            },
            InflightArea { offset: 64, ..told },
            InflightArea {
                bytes: u64::MAX,
                ..told
            },
        ] {
            let fd = Inflight::create(1)
                .unwrap()
                .as_fd()
                .try_clone_to_owned()
                .unwrap();
            assert!(Inflight::open(fd, &wrong).is_err(), "{wrong:?}");
        }
    }
}
