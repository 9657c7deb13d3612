//! Copies a file that nobody writes to somewhere else: an image that lies below the top of a disk with deltas.
//!
//! What takes the copy is the same as for a disk that a guest works with ([`Outlet`]), and so is what paces it and tells how far it is
//! ([`Course`]). Holes stay holes. Who owns the state: whoever copies, on a thread of its own. Refuses: a file that cannot be read.

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::Ordering;

use super::REGION;
use super::course::Course;
use super::outlet::Outlet;
use super::unwritten::{Unwritten, copy_all, copy_piece};
use crate::{Error, Image, data_in_regions};

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
        copy_all(self, under_way, |still| goes_on(still.course))
    }

    fn clip(&self, range: &Range<u64>) -> Range<u64> {
        let own = |at: u64| at.saturating_sub(self.begins);
        let start = own(range.start) / REGION * REGION;
        start
            ..own(range.end)
                .next_multiple_of(REGION)
                .min(self.image.bytes())
    }
}

impl Unwritten for Still<'_> {
    fn course_path_outlet(&mut self) -> (&Course, &Path, &mut (dyn Outlet + 'static)) {
        (self.course, self.image.path(), &mut *self.outlet)
    }

    fn is_capped(&self) -> bool {
        true
    }

    fn copy_again(&mut self, lost: Vec<Range<u64>>) {
        for range in lost {
            let range = self.clip(&range);
            self.add(range);
        }
    }

    fn has_next(&mut self) -> bool {
        !self.left.is_empty()
    }

    fn give_next(&mut self) -> Result<(), Error> {
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
        if !self.outlet.try_clone(&piece) {
            let (at, to) = (piece.start, (self.course, &mut *self.outlet));
            let from = (&self.file, self.image.path());
            copy_piece(from, (at, piece), to, self.begins + at)?;
        }
        self.tell_left();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, SecondImage};
    use std::os::unix::fs::{FileExt as _, MetadataExt as _};

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
