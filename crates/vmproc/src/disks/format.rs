//! Whether an image that no disk has had yet is raw, which is all that a disk can be.
//!
//! Owns nothing. Refuses: what its first bytes call another format. Once it is a disk its guest may have written anything there, so whoever knows
//! it as one does not ask.

use godwit_blockio::{Buffer, holder};
use godwit_delta::header::is_extent;
use godwit_qemu::qcow2::{Format, format_of};
use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;

/// Bytes that tell it, for a file that is read beside the page cache, too.
const HEAD: usize = 4096;

/// Why not is a part of a sentence.
pub(super) fn must_be_raw(image: &File, path: &str) -> Result<(), String> {
    if !matches!(holder::read(image.as_fd()), Ok(None)) {
        return Ok(());
    }
    let mut head = Buffer::zeroed(HEAD);
    // What cannot be read is told when it is served.
    let length = image.read_at(head.bytes_mut(), 0).unwrap_or_default();
    match format_of(head.bytes().get(..length).unwrap_or_default()) {
        Ok(Format::Raw) if is_extent(head.bytes()) => Err(format!(
            "the image {path} is a part of a disk with snapshots, or of a linked one, and no disk by itself: name that disk's own image, or give this disk another path"
        )),
        Ok(Format::Raw) => Ok(()),
        Ok(Format::Qcow2(_)) => Err(format!(
            "the image {path} is no raw image but a qcow2 one: give the disk another path, and `from = \"{path}\"` if it is to begin with what that one holds"
        )),
        Err(why) => Err(format!("the image {path} is no raw image: {why}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_blockio::delta::{NewDelta, create};

    /// Whoever described a VM with it read what another VM's guest had written.
    #[test]
    fn a_part_of_another_disk_is_no_disk_by_itself() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let parent = godwit_delta::Parent {
            cid: 1,
            hint: "base.vmdk".to_owned(),
        };
        let new = NewDelta {
            descriptor: &dir.path().join("db.raw.d1.vmdk"),
            bytes: 1 << 20,
            id: godwit_delta::Id([1; 16]),
            parent: &parent,
        };
        create(&new).unwrap();
        let extent = dir.path().join("db.raw.d1-sesparse.vmdk");
        let why = must_be_raw(&File::open(&extent).unwrap(), "db.raw.d1-sesparse.vmdk");
        assert!(why.unwrap_err().contains("a part of a disk with snapshots"));
    }

    #[test]
    fn an_image_of_another_format_is_no_disk_until_a_guest_has_written_that_itself() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        let image = file.as_file();
        let path = file.path().to_str().unwrap();
        must_be_raw(image, path).unwrap();
        for head in [&b"QFI\xfb\0\0\0\x03"[..], b"KDMV", b"vhdxfile"] {
            image.write_all_at(head, 0).unwrap();
            let why = must_be_raw(image, path).unwrap_err();
            assert!(why.contains("no raw image") && why.contains(path), "{why}");
            image.write_all_at(&[0; 8], 0).unwrap();
        }
        must_be_raw(image, path).unwrap();
        assert!(holder::replace(image.as_fd(), None, b"of a disk").unwrap());
        image.write_all_at(b"QFI\xfb", 0).unwrap();
        must_be_raw(image, path).unwrap();
    }
}
