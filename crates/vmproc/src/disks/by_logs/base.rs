//! What lies under the first redo log of a disk that moves by snapshotting: copied while nobody writes to it.
//!
//! That is its own image; of a linked disk the image to which it is linked, which is copied first, and what its guest had written over that, which is brought
//! into the copy then. So the copy is all of the disk, whatever it was linked to.
//!
//! Part of a move ([`super`]). Owns nothing. Refuses: another image than the one to which the disk is linked.

use super::super::switching::Stopped;
use super::super::to_copy::{but, holes, holes_in};
use super::{ByLogs, log_of};
use crate::faults::reached;
use godwit_blockio::{Arriving, Frozen};
use godwit_redo::Work;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::Path;

impl ByLogs<'_> {
    pub(super) fn copy_base(&mut self, filled: &Arriving) -> Result<(), Stopped> {
        let own = File::from(self.own.try_clone()?);
        let lowest = self.place.get().below_all(&self.images, own, "move")?;
        let data = but(&self.holes_of(&lowest), self.bytes);
        let over = self.over_lowest();
        let over_bytes = over.as_deref().map_or(Ok(0), |name| self.bytes_of(name))?;
        let bytes: u64 = data.iter().map(|range| range.end - range.start).sum();
        self.total = bytes.saturating_add(over_bytes);
        let began = self.begin();
        let mut copied = self.copy_lowest(&lowest, (data, filled))?;
        if let Some(name) = over {
            reached("redo.parent-copied");
            let merged = self.merge(&name)?;
            merged
                .ok_or("what lies over the image that it is linked to was not copied to its end")?;
            copied = copied.saturating_add(over_bytes);
        }
        reached("redo.copied");
        let work = Work {
            bytes: copied,
            seconds: began.at.elapsed().as_secs_f64(),
        };
        self.ended(&began, work, copied)
    }

    /// What lies over the image that the disk is linked to, if it is, and under the first log.
    fn over_lowest(&self) -> Option<String> {
        self.images.common()?;
        log_of(&self.images, 0)
    }

    /// All is copied where that cannot be looked at.
    fn holes_of(&self, lowest: &File) -> Vec<Range<u64>> {
        let spec = &self.place.spec;
        match self.images.common() {
            None => holes(spec, self.image, self.bytes),
            Some(_) => holes_in(spec, lowest, self.bytes),
        }
    }

    /// Copies what lies below all that was written over it, durably. Returns the bytes that were copied.
    fn copy_lowest(
        &mut self,
        lowest: &File,
        (data, filled): (Vec<Range<u64>>, &Arriving),
    ) -> Result<u64, Stopped> {
        let pace = self.pace.clone();
        let common = self.images.common().map(|common| common.path.to_owned());
        let path = common.unwrap_or_else(|| self.place.spec.path.clone());
        let frozen = Frozen {
            from: lowest.as_fd(),
            path: Path::new(&path),
            into: filled,
            data,
            pace: &pace,
        };
        let mut stopped = None;
        let copied = frozen.copy(|copied| {
            self.left = self.total.saturating_sub(copied.bytes);
            self.waits = copied.waits;
            match self.goes_on(0) {
                Ok(()) => Some(self.disk.glance().map_or(0, |status| status.under_way)),
                Err(why) => {
                    stopped = Some(why);
                    None
                }
            }
        });
        if let Some(why) = stopped {
            return Err(why);
        }
        // Where there is no room any more, that is what a person can do something about.
        let copied =
            copied.or_else(|error| self.must_leave_room().and(Err(Stopped::from(error))))?;
        Ok(copied.ok_or("its image was not copied to its end")?.bytes)
    }
}
