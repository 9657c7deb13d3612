//! The descriptor beside a disk's own image, by which other programs read the deltas above it down to it.
//!
//! It is written where there is none, and again where it says something else than what is so (a disk is made larger between two snapshots); it goes
//! once the disk is one raw image again. Nobody here goes by it. Owns nothing. Refuses: to touch a file of that name that somebody else has made.

use super::described::{NotDone, not_done};
use godwit_blockio::delta::{describe_base, read_descriptor};
use godwit_delta::{Descriptor, Kind};
use std::io;
use std::path::Path;

/// By what deltas know a disk's own image: whoever reads a chain compares numbers.
pub(super) const OWN_IMAGE: u32 = 0x676f_6477;

/// Has it say that the image of this name is so long.
pub(super) fn describe(descriptor: &Path, image: &str, bytes: u64) -> Result<(), NotDone> {
    if descriptor.symlink_metadata().is_ok() {
        match ours(descriptor, image) {
            Some(said) if said.bytes != bytes => std::fs::remove_file(descriptor)?,
            _ => return Ok(()),
        }
    }
    let described = describe_base(descriptor, image, (bytes, OWN_IMAGE));
    described.map(drop).map_err(not_done)
}

/// Removes it, if it is there and ours.
pub(super) fn forget(descriptor: &Path, image: &str) -> Result<(), NotDone> {
    if ours(descriptor, image).is_none() {
        return Ok(());
    }
    match std::fs::remove_file(descriptor) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// What it says, if it is one that was made here for this image.
fn ours(descriptor: &Path, image: &str) -> Option<Descriptor> {
    let said = read_descriptor(descriptor).ok()?;
    let is_ours = said.kind == Kind::Raw && said.cid == OWN_IMAGE && said.extent == image;
    is_ours.then_some(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_what_is_so_goes_with_the_last_snapshot_and_is_nobody_elses() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let at = directory.path().join("root.raw.vmdk");
        let described = |bytes| assert!(describe(&at, "root.raw", bytes).is_ok());
        for bytes in [1 << 20, 1 << 20, 2 << 20] {
            described(bytes);
            let said = read_descriptor(&at).unwrap();
            assert_eq!((said.bytes, said.cid), (bytes, OWN_IMAGE));
        }
        assert!(forget(&at, "root.raw").is_ok() && !at.exists());
        assert!(forget(&at, "root.raw").is_ok(), "it is gone already");
        // A disk of another format, that somebody has put there.
        for theirs in ["KDMV and more", "# Disk DescriptorFile\nversion=1\n"] {
            std::fs::write(&at, theirs).unwrap();
            described(1 << 20);
            assert!(forget(&at, "root.raw").is_ok());
            assert_eq!(std::fs::read_to_string(&at).unwrap(), theirs);
        }
    }
}
