//! The image to which a linked disk is linked, its parent: opened for reading alone, locked, and known by its number.
//!
//! It bears that number, by which nobody writes it, or is on storage that nobody of this host can write ([`godwit_qemu::parent`]). Where that can be written
//! again, it bears it before a guest reads it.
//!
//! Owns nothing: the image is everybody's. Refuses: another image than the one to which the disk was linked, one that was written since, and one that may be
//! written.

use super::described::NotDone;
use super::layers::Place;
use super::served::open_file;
use super::{BLOCK, LOCK_WAIT, lock_name};
use godwit_blockio::delta::Delta;
use godwit_blockio::{Access, Image as DiskImage};
use godwit_qemu::mounted::Mounted;
use godwit_qemu::parent::{Known, known_by, must_be_trusted, protect};
use godwit_snapshots::{Common, Images};
use godwit_types::snapshots::PARENT_MARK;
use godwit_types::vm::DiskSpec;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::Duration;

/// Whether it is asked who may change the image. A guest that lives goes on over the one that it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trust {
    Asked,
    AsBefore,
}

impl Place<'_> {
    /// Lays the lowest delta of a linked disk over the image as which that begins.
    pub(super) fn over_common(
        &self,
        images: &Images,
        lowest: Delta,
        (patience, trust): (Duration, Trust),
    ) -> Result<Delta, String> {
        let Some(common) = images.common() else {
            return Ok(lowest);
        };
        let reader = lock_name(self.config, self.spec);
        let image = self.open_common(common, images.bytes, (&reader, patience, trust))?;
        lowest.over(image).map_err(|error| error.to_string())
    }

    /// What lies below all deltas: the disk's own image, which is given, or what it is linked to, which its guest may have open meanwhile. `whose`: who
    /// reads it beside the guest.
    pub fn below_all(&self, images: &Images, own: File, whose: &str) -> Result<File, String> {
        let Some(common) = images.common() else {
            return Ok(own);
        };
        let reader = format!("{}/{whose}", lock_name(self.config, self.spec));
        let image =
            self.open_common(common, images.bytes, (&reader, LOCK_WAIT, Trust::AsBefore))?;
        let file = image.as_fd().try_clone_to_owned();
        file.map(File::from).map_err(|error| error.to_string())
    }

    /// The very image to which the disk was linked: whoever puts another one in its place changes what the guest has not written.
    pub(super) fn open_common(
        &self,
        common: Common<'_>,
        bytes: u64,
        (reader, patience, trust): (&str, Duration, Trust),
    ) -> Result<DiskImage, String> {
        let path = common.path;
        let linked = format!("disk '{}' is linked to the image {path}", self.spec.name);
        let spec = DiskSpec {
            path: path.to_owned(),
            read_only: true,
            ..self.spec.clone()
        };
        let file = open_file(self.config, &spec, self.owner);
        let file =
            file.map_err(|error| format!("{linked}, which is not opened: {}", error.message))?;
        // The same open file, with the same lock.
        let looked = file.try_clone();
        let looked = looked.map_err(|error| format!("{linked}, which is not opened: {error}"))?;
        let told = |error: godwit_blockio::Error| format!("{linked}: {error}");
        let image = DiskImage::of(file, Path::new(path), Access::ReadOnly, BLOCK);
        let mut image = image.map_err(told)?;
        image.lock(reader, patience).map_err(told)?;
        self.must_be_it((&looked, common), &linked)?;
        if trust == Trust::Asked {
            let trusted = must_be_trusted(&looked, self.config.qemu_uid);
            trusted.map_err(|why| format!("{linked}, which is not used: {why}"))?;
        }
        match image.bytes() == bytes {
            true => Ok(image),
            false => Err(format!(
                "{linked}, which has {} bytes and had {bytes} when it was linked: put that image back",
                image.bytes()
            )),
        }
    }

    /// Refuses another image, and has this one be written by nobody, which is locked.
    fn must_be_it(
        &self,
        (image, Common { path, id }): (&File, Common<'_>),
        linked: &str,
    ) -> Result<(), String> {
        let known = self.as_opener(|| known_by(image, id).map_err(NotDone::from));
        let known = known.map_err(|why| format!("{linked}, whose mark cannot be read: {why}"))?;
        match known {
            Known::ByMark => return Ok(()),
            Known::BySight => {}
            Known::Not => return Err(format!("{linked}, {}", is_another(image, path, id))),
        }
        // Its owner alone may mark it, and on a file server perhaps not this process.
        let done = protect(image, id);
        let done = done.or_else(|why| {
            let theirs = self.as_opener(|| protect(image, id).map_err(NotDone::Why));
            theirs.map_err(|_| why)
        });
        done.map_err(|why| format!("{linked}, which somebody might write: {why}"))
    }
}

/// Why it is not the one of this number; the end of a sentence that names it.
fn is_another(image: &File, path: &str, id: &str) -> String {
    let says = format!("'setfattr -n {PARENT_MARK} -v {id} {path}' says so");
    match Mounted::of(image) {
        Ok(Mounted::ForWriting) | Err(_) => format!(
            "and what is there now is another one, or lost its mark ({PARENT_MARK}, which was {id}) when it was copied: put that image back, with its attributes; if it certainly is the same, {says}"
        ),
        Ok(Mounted::ForReading | Mounted::ForReadingHere) => format!(
            "and what is there now is another one, or was written, copied or restored since it was linked to: on storage that is mounted for reading only it is known by the mark {id}, or, without one, by its inode, length, times and content, of which that number is made. Put that image back; if it certainly is the same, {says} once its file system is mounted for writing"
        ),
    }
}
