//! A disk that is mirrored to a second image, whose storage may be slow.

use super::{Gate, LONG, Site};
use godwit_blockio::filters::{Change, Course, Mirroring, Origin, Outlet, Pace};
use godwit_blockio::{Access, Image, SecondImage};
use godwit_vhost::{Disk, Standing};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::time::Instant;

/// A disk that is mirrored to a second image.
pub struct Mirrored {
    pub course: Course,
    pub second: SecondImage,
    pub image: Image,
    pub path: PathBuf,
}

impl Mirrored {
    pub fn begin(site: &Site, disk: &Disk, bytes: u64) -> Self {
        Self::begin_by((site, disk, bytes), None, |outlet| outlet)
    }

    /// By what this makes of the outlet, copied no faster than so many bytes a second.
    pub fn begin_by(
        (site, disk, bytes): (&Site, &Disk, u64),
        pace: Option<f64>,
        by: impl FnOnce(Box<dyn Outlet>) -> Box<dyn Outlet>,
    ) -> Self {
        let path = site.image.with_extension("second");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(bytes).unwrap();
        let mut image = Image::open(&path, Access::ReadWrite, 512).unwrap();
        image.lock("root", LONG).unwrap();
        let course = Course::at(&Pace::at_most(pace));
        let second = SecondImage::of(&image, None, &course).unwrap();
        let filter = Mirroring::new(bytes, by(second.outlet().unwrap()), &course);
        disk.put_lowest(Box::new(filter), LONG).unwrap();
        course.begin(None);
        Self {
            course,
            second,
            image,
            path,
        }
    }

    pub fn is_equal(&self) -> bool {
        self.second.under_way_bytes() == 0 && self.course.is_synchronised()
    }

    /// The disk, standing still with both images equal. Storage may lose some of what is under way, which a disk that stands
    /// still does not copy again.
    pub fn stand_equal<'a>(&self, disk: &'a Disk) -> Standing<'a> {
        let deadline = Instant::now() + LONG;
        loop {
            let standing = disk.stand_still(LONG).unwrap();
            until(|| self.second.under_way_bytes() == 0);
            if self.is_equal() {
                self.second.sync().unwrap();
                return standing;
            }
            drop(standing);
            assert!(Instant::now() < deadline, "they are never equal");
        }
    }
}

pub fn until(is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "it never came");
        std::thread::yield_now();
    }
}

/// A second image that carries all out and says so only while its gate is open.
pub struct Unconfirmed {
    outlet: Box<dyn Outlet>,
    gate: Gate,
    ended: Vec<u64>,
}

impl Unconfirmed {
    pub fn over(outlet: Box<dyn Outlet>, gate: &Gate) -> Box<dyn Outlet> {
        let (gate, ended) = (gate.clone(), Vec::new());
        Box::new(Self {
            outlet,
            gate,
            ended,
        })
    }
}

impl Outlet for Unconfirmed {
    fn is_silent(&mut self) -> bool {
        self.outlet.is_silent()
    }

    fn takes(&mut self, origin: Origin) -> bool {
        self.outlet.takes(origin)
    }

    fn region_limit(&mut self) -> usize {
        self.outlet.region_limit()
    }

    fn is_behind(&mut self) -> bool {
        self.outlet.is_behind()
    }

    fn give(&mut self, origin: Origin, range: Range<u64>, change: Change) {
        self.outlet.give(origin, range, change);
    }

    fn confirms(&self) -> bool {
        self.outlet.confirms()
    }

    fn give_write(&mut self, number: u64, range: Range<u64>, change: Change) -> bool {
        self.outlet.give_write(number, range, change)
    }

    fn flush(&mut self, number: u64) -> bool {
        self.outlet.flush(number)
    }

    fn take_ended(&mut self) -> Vec<u64> {
        self.ended.extend(self.outlet.take_ended());
        match self.gate.is_open() {
            true => std::mem::take(&mut self.ended),
            false => Vec::new(),
        }
    }

    fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.outlet.bell()
    }
}
