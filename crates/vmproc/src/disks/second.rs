//! The second image of a disk that moves on its host: made, filled beside the guest, and under its name once both are equal.
//!
//! Part of a move ([`super::in_place`]), which owns the mirror from then on. Refuses: a place that is taken, and to begin with a disk whose image this host
//! does not hold.

use super::claim::Taking;
use super::labelled::name_in;
use super::served::Served;
use super::switching::{Going, Mirror, Stopped};
use super::to_copy::{begin_copying, begin_copying_all, open_disk_image};
use super::tracked::filter_for;
use super::tree::NewImage;
use super::{LOCK_WAIT, REST_WAIT};
use crate::faults::{planted, reached};
use godwit_blockio::filters::{Course, Pace};
use godwit_blockio::{Arriving, Image, SecondImage};
use godwit_qemu::disk::must_be_free;
use godwit_types::bytes_per_s;
use godwit_types::disk_move::Method;
use godwit_types::vm::DiskSpec;
use godwit_vhost::Disk;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

impl Served {
    /// Makes a second image that is equal to the first and has its name, durably.
    pub(super) fn make_equal(&self, going: &mut Going<'_>) -> Result<(Mirror, NewImage), Stopped> {
        let path = Path::new(&going.place.path);
        if !going.copying.is_on_device() {
            must_be_free(path)?;
        }
        let disk = self.disk(going.index)?;
        self.must_be_mirrored(going.index, &disk)?;
        if !disk.status()?.has_image {
            return Err("its image is not this host's now".into());
        }
        let is_linked = self.must_be_copied_whole(&going.spec, going.place.method)?;
        let bytes = disk.measure()?;
        going.tree = match is_linked {
            true => None,
            false => self.begin_tree(going, &disk)?,
        };
        let image = self.make_second(going, bytes)?;
        let cap = going.place.max_bandwidth_mbit_per_s;
        let pace = Pace::at_most(cap.map(bytes_per_s));
        let deltas = self.copy_below(going, (&disk, &image), &pace)?;
        let new = NewImage { image, deltas };
        let former = self.seen_along(&going.spec, going.image);
        let mirror = self.begin_mirror(going, (disk, bytes), (&new, is_linked), &pace)?;
        reached("disk-move.copying");
        match going.place.method {
            Method::DirtyTracking => self.wait_until_few_are_left(going, &mirror)?,
            Method::Mirror | Method::Snapshot => self.wait_until_equal(going, &mirror)?,
        }
        // What takes long comes before the disk stands still.
        mirror.second.sync()?;
        match going.copying.is_on_device() {
            true => self.finish_copied(&going.copying, &new.image)?,
            false => going.copying.give_name()?,
        }
        self.name_tree(going)?;
        reached("disk-move.named");
        let spec = going.there();
        let now = going
            .copying
            .image
            .map(|image| self.seen_along(&spec, image));
        going.follows = former.ok().zip(now.transpose().ok().flatten());
        Ok((mirror, new))
    }

    /// Puts what copies the disk below its filters, and lets that begin. `is_linked`: in its own image is nothing of what its guest reads.
    fn begin_mirror(
        &self,
        going: &Going<'_>,
        (disk, bytes): (Arc<Disk>, u64),
        (new, is_linked): (&NewImage, bool),
        pace: &Pace,
    ) -> Result<Mirror, Stopped> {
        let course = Course::at(pace);
        let second = match new.deltas.split_last() {
            None => {
                let source = open_disk_image(&going.spec, going.image).ok();
                let source = source.filter(|_| !is_linked);
                SecondImage::of(&new.image, source, &course)?
            }
            Some((top, lower)) => {
                SecondImage::over(Arriving::over(top, lower, &new.image)?, &course)?
            }
        };
        let by = (going.place.method, &going.place.without[..]);
        let outlet = match &going.tree {
            None => second.outlet()?,
            Some(tree) => tree.only_top(second.outlet()?),
        };
        disk.put_lowest(filter_for(by, bytes, outlet, &course), REST_WAIT)?;
        let total = match &going.tree {
            Some(tree) => tree.begin_copying(bytes, &course),
            // What is a hole in the first image may be anything there.
            None if going.copying.is_on_device() && !planted("device-holes-skipped") => {
                begin_copying_all(bytes, &course)
            }
            None if is_linked => begin_copying_all(bytes, &course),
            None => begin_copying((&going.spec, going.image), bytes, &course),
        };
        Ok(Mirror {
            total,
            disk,
            second,
            began: Instant::now(),
        })
    }

    /// Makes the image that the disk is copied to, and notes that it is this move's.
    pub(super) fn make_second(&self, going: &mut Going<'_>, bytes: u64) -> Result<Image, Stopped> {
        self.change(|what| what.copying = Some(going.copying.clone()))?;
        let is_on_device = going.copying.is_on_device();
        let beside = DiskSpec {
            path: match is_on_device {
                true => going.place.path.clone(),
                false => going.copying.beside.clone(),
            },
            shared: going.place.shared,
            ..going.spec.clone()
        };
        let made = match is_on_device {
            true => self.make_on_device(&beside, (&name_in(&going.copying.beside), bytes))?,
            false => self.make(&beside, bytes)?,
        };
        reached("disk-move.made");
        let (image, known) = self.open(&beside, LOCK_WAIT, Some(Taking::Anew), Some(&made))?;
        let identity = image.identity()?;
        going.copying.image = Some((identity.device, identity.inode));
        going.copying.known = known;
        self.change(|what| what.copying = Some(going.copying.clone()))?;
        Ok(image)
    }
}
