//! Whether an image can be made at a place, and how large, found out beforehand.
//!
//! Owns nothing, and leaves nothing. Refuses: what [`crate::disk::make_image`] would, as far as that is known without a name.

use crate::disk::{DiskError, must_be_no_devices, must_give_names};
use crate::rights::as_user;
use godwit_types::vm::room_for_images;
use rustix::fs::{AtFlags, Mode, OFlags, StatVfs, StatxFlags, ioctl_ficlone, open, openat, statx};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// A guest's blocks, bytes.
const BLOCK_BYTES: u32 = 512;
/// A file that never has a name, used beside the page cache.
const NAMELESS: OFlags = OFlags::TMPFILE
    .union(OFlags::RDWR)
    .union(OFlags::DIRECT)
    .union(OFlags::CLOEXEC);

/// Whether an image could be made there as `uid` and `gid`, and be used beside the page cache: found out with a file that never has a name.
/// A file system that has none such is told by making it.
pub fn can_make_image(path: &Path, uid: u32, gid: u32) -> Result<(), DiskError> {
    must_be_no_devices(path)?;
    let dir = path.parent().unwrap_or(Path::new("/"));
    must_give_names(dir)?;
    let tried = as_user(uid, gid, || open(dir, NAMELESS, Mode::RUSR | Mode::WUSR));
    judge(tried, path, uid)
}

/// As [`can_make_image`], in a directory that is open, by this thread, which is `uid`.
pub(crate) fn can_make_image_in(
    dir: BorrowedFd<'_>,
    path: &Path,
    uid: u32,
) -> Result<(), DiskError> {
    judge(
        openat(dir, ".", NAMELESS, Mode::RUSR | Mode::WUSR),
        path,
        uid,
    )
}

fn judge(tried: Result<OwnedFd, Errno>, path: &Path, uid: u32) -> Result<(), DiskError> {
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

/// Whether files of this directory's file system can have the same blocks, so that a copy of one takes no room: found out with two that never
/// have a name.
pub fn shares_blocks(dir: &Path) -> bool {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = || open(dir, flags, Mode::RUSR | Mode::WUSR).map(File::from);
    let (Ok(file), Ok(copy)) = (file(), file()) else {
        return false;
    };
    file.write_all_at(&[1; 4096], 0).is_ok() && ioctl_ficlone(copy, file).is_ok()
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

    /// The images of a VM that came did not get their names there, when it had left its source.
    #[test]
    fn a_directory_in_which_its_owner_alone_gives_names_is_refused_unless_it_is_root_s() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: giving a directory away needs root");
            return;
        }
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let image = dir.path().join("web.raw");
        for (owner, mode, is_taken) in [
            (0, 0o3770, true),
            (4242, 0o3770, false),
            (4242, 0o2770, true),
        ] {
            std::os::unix::fs::chown(dir.path(), Some(owner), Some(65534)).unwrap();
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
            let can = can_make_image(&image, 65534, 65534);
            assert_eq!(can.is_ok(), is_taken, "{owner} {mode:o}: {can:?}");
            if let Err(why) = can {
                assert!(why.to_string().contains("chown root"), "{why}");
            }
        }
    }

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
            refused.contains("may not make")
                && refused.contains(&format!("chmod 3770 {})", dir.display())),
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

    #[test]
    fn files_share_blocks_where_their_file_system_lets_them() {
        use godwit_testkit::file_system::{Device, Mount};
        if !rustix::process::geteuid().is_root() {
            println!("skipped: loop devices and mounts need root");
            return;
        }
        for (kind, wanted) in [("ext4", false), ("xfs", true), ("btrfs", true)] {
            let below = tempfile::tempdir_in("/var/tmp").expect("a directory");
            let place = tempfile::tempdir().expect("a directory");
            let device = Device::over(&below.path().join("device"), 512);
            let Some(mount) = device.and_then(|device| Mount::of(kind, device, place.path()))
            else {
                println!("skipped in part: {kind} cannot be made here");
                continue;
            };
            assert_eq!(shares_blocks(place.path()), wanted, "{kind}");
            let left = fs::read_dir(place.path()).expect("read").flatten();
            let files = left.filter(|left| left.path().is_file());
            assert_eq!(files.count(), 0, "nothing is left");
            drop(mount);
        }
    }
}
