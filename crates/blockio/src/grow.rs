//! Makes an image longer, for good, and never shorter.
//!
//! The new length is durable before this returns: no guest is told of one that a power cut takes back. Owns nothing; the image
//! is its caller's, who has its lock. Refuses: what would make it shorter, a block device of another size or with a label, and a length for
//! which there is no room; then nothing has changed.

use std::io;
use std::os::fd::BorrowedFd;

use crate::label;
use godwit_types::plant::planted;
use rustix::fs::{FallocateFlags, FileType, SeekFrom, fallocate, fstat, fsync, ftruncate, seek};
use rustix::io::Errno;

const GIB: u64 = 1 << 30;
/// What is allocated at the new end.
const LAST: u64 = 4096;

/// Why an image is not made longer: a part of a sentence about it.
#[derive(Debug, thiserror::Error)]
pub enum NotGrown {
    #[error("it has {} already, and a disk is only made larger", size(*.has))]
    Shorter {
        /// Bytes.
        has: u64,
    },
    #[error(
        "it is a block device of {}, which is what its disk has: make the device as large as the disk is to be first", size(*.has)
    )]
    Device {
        /// Bytes.
        has: u64,
    },
    #[error(
        "it has {} on a block device, where its label is behind it: move it to a datastore that is a directory first, with 'godwit vm move-disk'", size(*.has)
    )]
    Labelled {
        /// Bytes.
        has: u64,
    },
    #[error("there is no room for it: make room on its file system")]
    NoRoom,
    #[error("its file system has no files of that length")]
    TooLong,
    #[error(
        "its file system does not make a file longer without the risk to make it shorter (fallocate), and other hosts have this one, too"
    )]
    Unsafe,
    #[error("it cannot be made longer: {0}")]
    Io(#[from] io::Error),
}

impl From<Errno> for NotGrown {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::NOSPC | Errno::DQUOT => Self::NoRoom,
            Errno::FBIG => Self::TooLong,
            errno => Self::Io(errno.into()),
        }
    }
}

/// Makes an image so long, durably, where it is not yet. A block device must have that many whole GiB, and the disk before a label these very bytes. Returns the bytes that
/// it has. Others may make a shared image longer at the same time.
pub fn grow(image: BorrowedFd<'_>, bytes: u64, is_shared: bool) -> Result<u64, NotGrown> {
    let kind = FileType::from_raw_mode(fstat(image)?.st_mode);
    let has = seek(image, SeekFrom::End(0))?;
    if kind == FileType::BlockDevice {
        if let Some(found) = label::read(image)? {
            return match found.label.bytes {
                has if has == bytes => Ok(has),
                has => Err(NotGrown::Labelled { has }),
            };
        }
        return grow_plain(image, bytes);
    }
    if has > bytes {
        return Err(NotGrown::Shorter { has });
    }
    if has < bytes {
        lengthen(image, bytes, is_shared)?;
    }
    // Also of one that is so long: whoever made it that may have died before this.
    if !planted("length-not-durable") {
        fsync(image)?;
    }
    Ok(bytes)
}

/// The same of a block device that is a disk without a label, whatever its guest wrote at its end.
pub fn grow_plain(image: BorrowedFd<'_>, bytes: u64) -> Result<u64, NotGrown> {
    let has = seek(image, SeekFrom::End(0))?;
    match has / GIB == bytes / GIB {
        true => Ok(has),
        false => Err(NotGrown::Device { has }),
    }
}

/// Allocates what is the end then, which takes nothing away, whatever the length is by now: this may have waited for its storage for
/// long. What lies between stays a hole.
fn lengthen(image: BorrowedFd<'_>, bytes: u64, is_shared: bool) -> Result<(), NotGrown> {
    let last = LAST.min(bytes);
    match fallocate(image, FallocateFlags::empty(), bytes - last, last) {
        // Whoever has the lock of one that is this host's alone is the only one who could.
        Err(Errno::OPNOTSUPP) if !is_shared => Ok(ftruncate(image, bytes)?),
        Err(Errno::OPNOTSUPP) => Err(NotGrown::Unsafe),
        made => Ok(made?),
    }
}

/// Bytes, for people.
pub fn size(bytes: u64) -> String {
    match bytes.is_multiple_of(GIB) {
        true => format!("{} GiB", bytes / GIB),
        false => format!("{} MiB", bytes >> 20),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::{FileExt as _, MetadataExt as _};

    /// On the file system of the build.
    fn image(bytes: u64) -> File {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.set_len(bytes).unwrap();
        file.write_all_at(&[7; 512], bytes - 512).unwrap();
        file
    }

    #[test]
    fn an_image_gets_longer_sparsely_and_keeps_what_it_has() {
        let image = image(1 << 20);
        for shared in [false, true] {
            let wanted = if shared { 3 * GIB } else { GIB };
            assert_eq!(grow(image.as_fd(), wanted, shared).unwrap(), wanted);
            // Once more changes nothing.
            assert_eq!(grow(image.as_fd(), wanted, shared).unwrap(), wanted);
            assert_eq!(image.metadata().unwrap().len(), wanted);
        }
        assert!(image.metadata().unwrap().blocks() * 512 < 1 << 20);
        let (mut kept, mut last) = ([0; 512], [1; 512]);
        image.read_exact_at(&mut kept, (1 << 20) - 512).unwrap();
        image.read_exact_at(&mut last, 3 * GIB - 512).unwrap();
        assert_eq!((kept, last), ([7; 512], [0; 512]));
    }

    #[test]
    fn an_image_never_gets_shorter() {
        let image = image(2 * GIB + 512);
        let refused = grow(image.as_fd(), 2 * GIB, false).unwrap_err().to_string();
        assert!(refused.contains("it has 2048 MiB already"), "{refused}");
        // Nor one that somebody else has made longer since this one looked.
        lengthen(image.as_fd(), GIB, true).unwrap();
        assert_eq!(image.metadata().unwrap().len(), 2 * GIB + 512);
    }

    #[test]
    fn a_length_that_its_file_system_does_not_have_is_refused_and_changes_nothing() {
        let image = image(1 << 20);
        let refused = grow(image.as_fd(), 1 << 62, false).unwrap_err();
        assert!(matches!(refused, NotGrown::TooLong), "{refused}");
        assert_eq!(image.metadata().unwrap().len(), 1 << 20);
    }
}
