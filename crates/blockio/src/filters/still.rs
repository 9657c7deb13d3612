//! Copies a file that nobody writes to somewhere else: an image that lies below the top of a disk with deltas.
//!
//! What takes the copy is the same as for a disk that a guest works with ([`Outlet`]), and so is what paces it and tells how far it is
//! ([`Course`]). Holes stay holes. Who owns the state: whoever copies, on a thread of its own. Refuses: a file that cannot be read.

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::REGION;
use super::copying::give_copy;
use super::course::{Course, lock};
use super::outlet::Outlet;
use crate::{Buffer, Error, Image, data_in_regions};

/// How often it is looked whether there is room again.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A file that is copied.
pub struct Still<'a> {
    image: &'a Image,
    outlet: Box<dyn Outlet>,
    course: &'a Course,
    file: File,
    /// Where its first byte is at the other side.
    begins: u64,
    /// What is to be copied, in whole regions, none of them empty,
    left: VecDeque<Range<u64>>,
    /// and how much that is.
    left_bytes: u64,
}

impl<'a> Still<'a> {
    /// Copies what of this file is no hole to there, where all is zero. `outlet` tells `course` of what it loses.
    pub fn new(
        image: &'a Image,
        outlet: Box<dyn Outlet>,
        course: &'a Course,
    ) -> Result<Self, Error> {
        let failed = |action, source| Error::Image {
            action,
            path: image.path().to_owned(),
            source,
        };
        let data = data_in_regions(image, image.bytes());
        let data = data.map_err(|error| failed("look for holes in", error))?;
        let file = image.as_fd().try_clone_to_owned();
        let mut still = Self {
            image,
            outlet,
            course,
            file: file.map_err(|source| failed("open", source))?.into(),
            begins: 0,
            left: VecDeque::new(),
            left_bytes: 0,
        };
        data.into_iter().for_each(|range| still.add(range));
        still.tell_left();
        Ok(still)
    }

    /// Its first byte is this one at the other side, which has several files one after the other.
    #[must_use]
    pub fn at(self, begins: u64) -> Self {
        Self { begins, ..self }
    }

    /// Bytes that are still to be given.
    pub fn left_bytes(&self) -> u64 {
        self.left_bytes
    }

    fn add(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.left_bytes += range.end - range.start;
            self.left.push_back(range);
        }
    }

    fn tell_left(&self) {
        let left = &self.course.0.left_bytes;
        left.store(self.left_bytes, Ordering::Relaxed);
    }

    /// Copies until nothing is left and nothing is under way any more, of which `under_way` tells. `goes_on` is asked again and again. Returns
    /// whether it came to its end.
    pub fn run(
        &mut self,
        under_way: impl Fn() -> u64,
        mut goes_on: impl FnMut(&Course) -> bool,
    ) -> Result<bool, Error> {
        loop {
            if !goes_on(self.course) {
                return Ok(false);
            }
            if let Some(reason) = self.course.failure() {
                let path = self.image.path().to_owned();
                return Err(Error::Unusable { path, reason });
            }
            for range in self.course.take_lost() {
                let range = self.clip(&range);
                self.add(range);
            }
            if self.left.is_empty() {
                if under_way() == 0 && lock(&self.course.0.lost).is_empty() {
                    return Ok(true);
                }
                std::thread::sleep(LOOK_EVERY);
                continue;
            }
            if !self.has_room() {
                std::thread::sleep(LOOK_EVERY);
                continue;
            }
            self.copy_next()?;
            self.tell_left();
        }
    }

    fn clip(&self, range: &Range<u64>) -> Range<u64> {
        let own = |at: u64| at.saturating_sub(self.begins);
        let start = own(range.start) / REGION * REGION;
        start
            ..own(range.end)
                .next_multiple_of(REGION)
                .min(self.image.bytes())
    }

    /// Whether one more region may be read; counts for what it is waited.
    fn has_room(&mut self) -> bool {
        let is_capped = self.course.0.pace.region_limit(Instant::now()) == Some(0);
        let takes = !self.outlet.is_silent() && self.outlet.region_limit() > 0;
        may_copy(self.course, is_capped, takes)
    }

    fn copy_next(&mut self) -> Result<(), Error> {
        let Some(mut range) = self.left.pop_front() else {
            return Ok(());
        };
        let end = range.end.min(range.start + REGION);
        let piece = range.start..end;
        range.start = end;
        if !range.is_empty() {
            self.left.push_front(range);
        }
        self.left_bytes = self.left_bytes.saturating_sub(piece.end - piece.start);
        if self.outlet.try_clone(&piece) {
            return Ok(());
        }
        let (at, to) = (piece.start, (self.course, &mut *self.outlet));
        copy_piece(
            (&self.file, self.image.path()),
            (at, piece),
            to,
            self.begins + at,
        )
    }
}

/// Whether one more piece may be copied; counts for what it is waited until it is looked again.
pub(super) fn may_copy(course: &Course, is_capped: bool, takes: bool) -> bool {
    let mut waited = lock(&course.0.wait_times);
    match (is_capped, takes) {
        (true, _) => waited.cap += LOOK_EVERY,
        (false, false) => waited.writes += LOOK_EVERY,
        (false, true) => {}
    }
    !is_capped && takes
}

/// Reads this piece, which begins there in the file, and gives it to the other side to have it at `start`. What cannot be read, the course hears of.
pub(super) fn copy_piece(
    (file, path): (&File, &Path),
    (at, piece): (u64, Range<u64>),
    (course, outlet): (&Course, &mut (dyn Outlet + 'static)),
    start: u64,
) -> Result<(), Error> {
    let began = Instant::now();
    let mut buffer = Buffer::zeroed((piece.end - piece.start) as usize);
    if let Err(source) = file.read_exact_at(buffer.bytes_mut(), at) {
        course.fail_to_read(format!("its bytes {piece:?} cannot be read: {source}"));
        return Err(Error::Image {
            action: "read",
            path: path.to_owned(),
            source,
        });
    }
    let now = Instant::now();
    lock(&course.0.wait_times).reads += now.saturating_duration_since(began);
    give_copy((course, outlet), start, &Arc::new(buffer), now);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, SecondImage};
    use std::os::unix::fs::MetadataExt as _;

    fn files(bytes: u64) -> (tempfile::NamedTempFile, tempfile::NamedTempFile) {
        let file = || {
            let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
            file.as_file().set_len(bytes).unwrap();
            file
        };
        (file(), file())
    }

    #[test]
    fn a_file_is_copied_with_its_holes() {
        let bytes = 64 * REGION + 4096;
        let (from, to) = files(bytes);
        for at in [3 * REGION + 512, 40 * REGION, bytes - 512] {
            from.as_file().write_all_at(&[7; 512], at).unwrap();
        }
        from.as_file().sync_all().unwrap();
        let source = Image::open(from.path(), Access::ReadOnly, 512).unwrap();
        let image = Image::open(to.path(), Access::ReadWrite, 512).unwrap();
        let course = Course::default();
        let second = SecondImage::of(&image, None, &course).unwrap();
        let mut still = Still::new(&source, second.outlet().unwrap(), &course).unwrap();
        assert!(still.left_bytes() <= 4 * REGION, "{}", still.left_bytes());
        let ended = still.run(|| second.under_way_bytes(), |_| true);
        assert!(ended.unwrap());
        second.sync().unwrap();
        assert!(std::fs::read(from.path()).unwrap() == std::fs::read(to.path()).unwrap());
        let taken = to.as_file().metadata().unwrap().blocks() * 512;
        assert!(taken <= 4 * REGION, "{taken}");
    }

    #[test]
    fn a_copying_that_is_called_off_or_fails_comes_to_no_end() {
        let (from, to) = files(REGION);
        from.as_file().write_all_at(&[7; 512], 0).unwrap();
        let source = Image::open(from.path(), Access::ReadOnly, 512).unwrap();
        let image = Image::open(to.path(), Access::ReadWrite, 512).unwrap();
        let course = Course::default();
        let second = SecondImage::of(&image, None, &course).unwrap();
        let mut still = Still::new(&source, second.outlet().unwrap(), &course).unwrap();
        assert!(!still.run(|| 0, |_| false).unwrap());
        course.fail("the storage is gone".to_owned());
        let refused = still.run(|| 0, |_| true).unwrap_err().to_string();
        assert!(refused.contains("the storage is gone"), "{refused}");
    }
}
