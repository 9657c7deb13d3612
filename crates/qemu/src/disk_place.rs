//! Whether an image can be made at a place, and how large, found out beforehand.
//!
//! Owns nothing, and leaves nothing. Refuses: what [`crate::disk::make_image`] would, as far as that is known without a name.

use crate::disk::DiskError;
use crate::rights::as_user;
use godwit_types::vm::room_for_images;
use rustix::fs::{AtFlags, Mode, OFlags, StatVfs, StatxFlags, open, statx};
use rustix::io::Errno;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

/// A guest's blocks, bytes.
const BLOCK_BYTES: u32 = 512;

/// Whether an image could be made there as `uid` and `gid`, and be used beside the page cache: found out with a file that never has a name.
/// A file system that has none such is told by making it.
pub fn can_make_image(path: &Path, uid: u32, gid: u32) -> Result<(), DiskError> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    let tried = as_user(uid, gid, || {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
        open(dir, flags, Mode::RUSR | Mode::WUSR)
    });
    let path = path.to_owned();
    match tried {
        Ok(file) if has_large_blocks(file.as_fd()) => Err(DiskError::LargeBlocks { path }),
        Ok(_) | Err(Errno::OPNOTSUPP | Errno::ISDIR) => Ok(()),
        Err(Errno::ACCESS | Errno::PERM | Errno::ROFS) => Err(DiskError::NoPlace { path, uid }),
        Err(Errno::INVAL) => Err(DiskError::NotDirect { path }),
        Err(errno) => Err(DiskError::Io {
            path,
            source: errno.into(),
        }),
    }
}

/// Bytes that images which come to a file system may take of what is free there.
pub fn room_of(found: &StatVfs) -> u64 {
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    room_for_images(bytes(found.f_blocks), bytes(found.f_bavail))
}

/// Whether the device below has blocks that are larger than a disk's. Where the kernel does not tell (btrfs) it takes any.
fn has_large_blocks(file: BorrowedFd<'_>) -> bool {
    let flags = StatxFlags::DIOALIGN;
    let said = statx(file, c"", AtFlags::EMPTY_PATH, flags);
    said.is_ok_and(|said| {
        let told = StatxFlags::from_bits_retain(said.stx_mask).contains(flags);
        told && said.stx_dio_offset_align > BLOCK_BYTES
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn whether_an_image_can_be_made_is_known_without_making_one() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: another user's rights need root");
            return;
        }
        const NOBODY: u32 = 65_534;
        let parent = tempfile::tempdir_in("/var/tmp").expect("a directory");
        fs::set_permissions(parent.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
        let dir = parent.path().join("vms");
        fs::create_dir(&dir).expect("made");
        let can = || can_make_image(&dir.join("root.raw"), NOBODY, NOBODY);
        let refused = can().expect_err("it is root's").to_string();
        assert!(
            refused.contains("may not make") && refused.contains("chmod 2770"),
            "{refused}"
        );
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).expect("chmod");
        can().expect("everybody's");
        assert_eq!(
            fs::read_dir(&dir).expect("read").count(),
            0,
            "nothing is left"
        );
    }
}
