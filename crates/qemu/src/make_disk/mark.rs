//! What an image bears that was made and has not been used: for which disk, and of what.
//!
//! An extended attribute; a kill between the naming of an image and the word that it is made would else leave one that nobody knows. Owns nothing.
//! Refuses nothing.

use godwit_types::VmName;
use godwit_types::vm::DiskSpec;
use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr};
use rustix::io::Errno;
use std::os::fd::AsFd;

/// Where an image bears whose disk it is.
const MARK: &str = "user.godwit.disk";
/// Most bytes of that.
const MARK_MAX: usize = 8192;

/// Whose disk an image was made for, and of what, until it is first used.
pub(super) fn mark_of(vm: &VmName, disk: &DiskSpec) -> String {
    let (from, gib) = (
        disk.from.as_deref().unwrap_or(""),
        disk.size_gib.unwrap_or(0),
    );
    let linked = if disk.linked { "linked " } else { "" };
    format!("{vm}/{}/{gib}/{linked}{from}", disk.name)
}

/// Whether a mark is of this disk, whatever that was made of.
pub(super) fn is_of(mark: &[u8], vm: &VmName, disk: &DiskSpec) -> bool {
    mark.starts_with(format!("{vm}/{}/", disk.name).as_bytes())
}

/// An image is used from here on: it is what its guest makes of it, and not what a disk is made to be. Nothing is done where it
/// bears no mark.
pub fn forget_mark(image: impl AsFd) {
    match fremovexattr(image.as_fd(), MARK) {
        // Neither a block device nor what is mounted for reading only can bear one.
        Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::PERM | Errno::ROFS) => {}
        Err(errno) => tracing::warn!(%errno, "a disk's image keeps the mark of having been made"),
    }
}

/// The mark that an image bears.
pub(super) fn borne_by(image: impl AsFd) -> Result<Vec<u8>, Errno> {
    let mut value = vec![0; MARK_MAX];
    let length = fgetxattr(image.as_fd(), MARK, &mut value[..])?;
    value.truncate(length);
    Ok(value)
}

/// Has it bear one.
pub(super) fn bear(image: impl AsFd, mark: &str) -> Result<(), Errno> {
    fsetxattr(image.as_fd(), MARK, mark.as_bytes(), XattrFlags::empty())
}
