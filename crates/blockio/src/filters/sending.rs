//! Sends what an image has that nobody writes to any more to where its disk goes: the disk's own image, or a redo log over it.
//!
//! What takes it is the same as for a disk that a guest works with ([`Outlet`]). What a log has is given at its place in the disk, so that the
//! other side has a raw image and knows of no logs. Who owns the state: whoever sends, on a thread of its own. Refuses: a file that cannot be read.

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use godwit_delta::{GRAIN, Move};

use super::REGION;
use super::course::Course;
use super::outlet::{Change, Origin, Outlet};
use super::unwritten::{LOOK_EVERY, Unwritten, copy_all, copy_piece};
use crate::Error;
use crate::delta::Delta;

/// Nobody waits longer for what is made durable early.
const FLUSH_WAIT: Duration = Duration::from_secs(60);

/// A file that is sent.
pub struct Sending<'a> {
    file: File,
    path: PathBuf,
    /// Where in it the first byte of the disk is.
    data_at: u64,
    outlet: &'a mut (dyn Outlet + 'static),
    course: &'a Course,
    /// Whether it keeps to the cap: no guest waits for it.
    is_capped: bool,
}

impl<'a> Sending<'a> {
    /// Of the disk's own image. `outlet` tells `course` of what it loses.
    pub fn of_image(
        (file, path): (File, &Path),
        outlet: &'a mut (dyn Outlet + 'static),
        course: &'a Course,
    ) -> Self {
        Self {
            file,
            path: path.to_owned(),
            data_at: 0,
            outlet,
            course,
            is_capped: true,
        }
    }

    /// Of a redo log.
    pub fn of_log(
        log: &Delta,
        outlet: &'a mut (dyn Outlet + 'static),
        course: &'a Course,
        is_capped: bool,
    ) -> Result<Self, Error> {
        let path = log.image().path().to_owned();
        let file = log.image().as_fd().try_clone_to_owned();
        let file = file.map_err(|source| Error::Image {
            action: "open",
            path: path.clone(),
            source,
        })?;
        Ok(Self {
            file: file.into(),
            path,
            data_at: log.layout().data_at(),
            outlet,
            course,
            is_capped,
        })
    }

    /// Sends all of these, and again what of it was lost, until the other side has carried out everything, of which `under_way` tells. `goes_on` hears
    /// again and again how much was given. Returns whether it came to its end.
    pub fn run<I: Iterator<Item = Move>>(
        &mut self,
        all: impl Fn() -> I,
        under_way: impl Fn() -> u64,
        mut goes_on: impl FnMut(u64) -> bool,
    ) -> Result<bool, Error> {
        let mut run = Run {
            first: all(),
            all,
            next: VecDeque::new(),
            given: 0,
            sending: self,
        };
        copy_all(&mut run, under_way, |run| goes_on(run.given))
    }

    /// Returns the bytes that were given.
    fn give(&mut self, piece: Move) -> Result<u64, Error> {
        let range = match piece {
            Move::Copy(range) => range,
            Move::Zero(range) => {
                let bytes = range.end - range.start;
                self.outlet.give(Origin::Copy, range, Change::Zeroed);
                return Ok(bytes);
            }
        };
        let (at, start) = (self.data_at + range.start, range.start);
        let bytes = range.end - start;
        let to = (self.course, &mut *self.outlet);
        copy_piece((&self.file, &self.path), (at, range), to, start)?;
        Ok(bytes)
    }
}

/// One run of it over all moves.
struct Run<'r, 'a, A, I> {
    sending: &'r mut Sending<'a>,
    all: A,
    /// Those that were not looked at yet,
    first: I,
    /// and those that come before.
    next: VecDeque<Move>,
    given: u64,
}

impl<A: Fn() -> I, I: Iterator<Item = Move>> Unwritten for Run<'_, '_, A, I> {
    fn course_path_outlet(&mut self) -> (&Course, &Path, &mut (dyn Outlet + 'static)) {
        let sending = &mut *self.sending;
        (sending.course, &sending.path, &mut *sending.outlet)
    }

    fn is_capped(&self) -> bool {
        self.sending.is_capped
    }

    fn copy_again(&mut self, lost: Vec<Range<u64>>) {
        self.next.extend(parts_in((self.all)(), lost));
    }

    fn has_next(&mut self) -> bool {
        if self.next.is_empty() {
            self.next.extend(self.first.next());
        }
        !self.next.is_empty()
    }

    fn give_next(&mut self) -> Result<(), Error> {
        let Some(one) = self.next.pop_front() else {
            return Ok(());
        };
        let (piece, rest) = cut(&one);
        rest.into_iter().for_each(|rest| self.next.push_front(rest));
        self.given += self.sending.give(piece)?;
        Ok(())
    }
}

/// Has the other side make durable what it has, if it can be asked to, so that less is left for when a guest waits for that.
pub fn flush_early(
    outlet: &mut (dyn Outlet + 'static),
    number: u64,
    mut goes_on: impl FnMut() -> bool,
) {
    if !outlet.may_be_left_alone() || !outlet.flush(number) {
        return;
    }
    let until = Instant::now() + FLUSH_WAIT;
    while !outlet.take_ended().contains(&number) {
        if outlet.is_silent() || !goes_on() || Instant::now() >= until {
            return;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// A piece of at most one region, and what is left.
fn cut(one: &Move) -> (Move, Option<Move>) {
    let range = one.range();
    let end = range.end.min(range.start.saturating_add(REGION));
    let rest = (end < range.end).then(|| one.at(end..range.end));
    (one.at(range.start..end), rest)
}

/// What of these lies in those ranges, in whole grains.
fn parts_in(all: impl Iterator<Item = Move>, mut ranges: Vec<Range<u64>>) -> Vec<Move> {
    ranges.sort_by_key(|range| range.start);
    let mut wanted: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        let range = range.start / GRAIN * GRAIN..range.end.next_multiple_of(GRAIN);
        match wanted.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => wanted.push(range),
        }
    }
    let mut parts = Vec::new();
    for one in all {
        let range = one.range();
        let first = wanted.partition_point(|wanted| wanted.end <= range.start);
        let touched = wanted.iter().skip(first);
        for wanted in touched.take_while(|wanted| wanted.start < range.end) {
            let inside = wanted.start.max(range.start)..wanted.end.min(range.end);
            parts.push(one.at(inside));
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Image, SecondImage};
    use std::os::unix::fs::FileExt as _;

    #[test]
    fn what_was_lost_is_sent_again_and_nothing_else() {
        let all = || {
            [
                Move::Copy(0..4 * GRAIN),
                Move::Zero(6 * GRAIN..8 * GRAIN),
                Move::Copy(9 * GRAIN..10 * GRAIN),
            ]
            .into_iter()
        };
        let between = vec![4 * GRAIN..5 * GRAIN, 5 * GRAIN..6 * GRAIN];
        assert_eq!(parts_in(all(), between), []);
        let lost = vec![7 * GRAIN..9 * GRAIN + 1, GRAIN + 1..GRAIN + 2];
        let parts = [
            Move::Copy(GRAIN..2 * GRAIN),
            Move::Zero(7 * GRAIN..8 * GRAIN),
            Move::Copy(9 * GRAIN..10 * GRAIN),
        ];
        assert_eq!(parts_in(all(), lost), parts);
    }

    #[test]
    fn a_large_piece_is_cut() {
        let (piece, rest) = cut(&Move::Zero(1..REGION + 3));
        assert_eq!(piece, Move::Zero(1..REGION + 1));
        assert_eq!(rest, Some(Move::Zero(REGION + 1..REGION + 3)));
        assert_eq!(cut(&Move::Copy(0..7)), (Move::Copy(0..7), None));
    }

    #[test]
    fn an_image_is_sent_where_it_has_something_and_a_cap_of_nothing_is_heard() {
        let bytes = 3 * REGION;
        let [from, to] = [(), ()].map(|()| {
            let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
            file.as_file().set_len(bytes).unwrap();
            file
        });
        from.as_file().write_all_at(&[7; 512], REGION).unwrap();
        to.as_file().write_all_at(&[5; 512], 0).unwrap();
        let image = Image::open(to.path(), Access::ReadWrite, 512).unwrap();
        let course = Course::default();
        let second = SecondImage::of(&image, None, &course).unwrap();
        let mut outlet = second.outlet().unwrap();
        let file = from.as_file().try_clone().unwrap();
        let mut sending = Sending::of_image((file, from.path()), &mut *outlet, &course);
        let all = || [Move::Zero(0..REGION), Move::Copy(REGION..bytes)].into_iter();
        let ended = sending.run(all, || second.under_way_bytes(), |_| true);
        assert!(ended.unwrap());
        let [from, to] = [from, to].map(|file| std::fs::read(file.path()).unwrap());
        assert!(from == to);
        assert!(!sending.run(all, || 0, |_| false).unwrap());
        course.fail("the storage is gone".to_owned());
        assert!(sending.run(all, || 0, |_| true).is_err());
    }
}
