//! Disk images, opened with the rights of QEMU's user and no more.
//!
//! QEMU gets the open file, not a path: nothing in a path can reach its option syntax, and the file that was checked is
//! the file that is used. Who may describe a VM could otherwise read any file of the host through it, since the VM
//! process is privileged: so the file is opened by a thread that has QEMU's user's rights to files alone ([`crate::rights`]). Refuses: files that this user
//! may not open (read-only disks: read; others: read and write), everything but regular files and block devices, which is never even opened
//! ([`open_looked_at`]), and what lies where the host keeps records and guests' memory ([`Reserved`]).

use crate::layered::is_described;
use crate::parent::{is_not_written, is_parent};
use crate::reserved::Reserved;
use crate::rights::as_user;
use godwit_blockio::label::{self, End};
use godwit_types::datastore::is_device_path;
use godwit_types::plant::planted;
use godwit_types::snapshots::description_of;
use rustix::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, fcntl_setfl, fstat, linkat, open, openat,
    renameat_with, statat, unlink, unlinkat,
};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// Why an image cannot be given to QEMU.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    #[error(
        "the disk image {path} does not exist: see that its storage is mounted; where it was never there, copy it there or correct the VM"
    )]
    Missing { path: PathBuf },
    /// A file that is made there would be in memory, and gone with the next boot.
    #[error("{}", crate::device::is_missing(&.path.to_string_lossy()))]
    NoDevice { path: PathBuf },
    /// Somebody copied an image to where its device should be.
    #[error(
        "{path} is a file in memory, and no block device: it is gone with the next boot, so move it to storage and see that the device is there, or correct that path"
    )]
    AmongDevices { path: PathBuf },
    /// QEMU's user may not use it.
    #[error(
        "QEMU's user (uid {uid}) may not open the disk image {path} for {access}: give it to that user (chown {uid} {path}), and let it pass through the directories above"
    )]
    Denied {
        path: PathBuf,
        uid: u32,
        /// What was asked for.
        access: &'static str,
    },
    /// QEMU's user may not make files there.
    #[error(
        "QEMU's user (uid {uid}) may not make {path}: let the group of the host's QEMUs write into that directory (chown root:godwit-qemu {dir}; chmod 3770 {dir}), or give the disk another place",
        dir = .path.parent().unwrap_or(Path::new("/")).display()
    )]
    NoPlace { path: PathBuf, uid: u32 },
    /// Images get their names with the rights of root, who may do that where the directory is root's.
    #[error(
        "{dir} is a directory of user {owner} with the sticky bit, in which nobody else renames or removes files, nor does this host's process: give it to root (chown root {dir})"
    )]
    Sticky { dir: PathBuf, owner: u32 },
    #[error(
        "{path} cannot be a disk's image: its file system takes no direct IO (ext4, XFS and btrfs do): give the disk another place"
    )]
    NotDirect { path: PathBuf },
    #[error(
        "{path} cannot be a disk's image: its device has larger blocks than 512 bytes: give the disk another place, or use btrfs there"
    )]
    LargeBlocks { path: PathBuf },
    /// A directory, a pipe, a terminal.
    #[error("{path} is no disk image: it must be a regular file or a block device")]
    Kind { path: PathBuf },
    /// Records, sockets or guests' memory are kept there.
    #[error(
        "{path} lies in {dir}, where this host keeps its records or its guests' memory: put the file elsewhere"
    )]
    Reserved { path: PathBuf, dir: PathBuf },
    /// Others have it, too, and only read it.
    #[error("{}", is_not_written(.path))]
    Parent { path: PathBuf },
    #[error("cannot open the disk image {path}: {source}")]
    Io {
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Why something was not opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotOpened {
    /// A directory, a pipe, a terminal, a link where none is followed.
    #[error("it is neither a file nor a block device")]
    Kind,
    /// What was looked at is opened by its number there.
    #[error(
        "files are opened by way of /proc, and this process is not found there: mount it (mount -t proc proc /proc)"
    )]
    NoProc,
    /// The kernel refuses it.
    #[error(transparent)]
    Errno(#[from] Errno),
}

impl From<NotOpened> for io::Error {
    fn from(why: NotOpened) -> Self {
        match why {
            NotOpened::Errno(errno) => errno.into(),
            why => Self::other(why),
        }
    }
}

/// Opens what lies there if it is a regular file or a block device, and nothing else: devices may act when they are opened, and a
/// pipe's other end is let go. What is looked at is held by a descriptor that opens nothing, and that very file is opened then,
/// whatever whoever owns a directory of its path has put there meanwhile. Of `flags` count for what it is opened and whether a link
/// is followed.
pub fn open_looked_at(dir: impl AsFd, path: &Path, flags: OFlags) -> Result<File, NotOpened> {
    let access = flags.intersection(OFlags::RWMODE);
    let links = flags.intersection(OFlags::NOFOLLOW);
    // Whose file it is may have a lease on it, for the end of which nobody waits.
    let access = access | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    if planted("opened-unlooked") {
        drop(openat(&dir, path, access | links, Mode::empty()));
    }
    let held = OFlags::PATH | OFlags::CLOEXEC | links;
    let held = openat(dir, path, held, Mode::empty())?;
    let kind = FileType::from_raw_mode(fstat(&held)?.st_mode);
    if !matches!(kind, FileType::RegularFile | FileType::BlockDevice) {
        return Err(NotOpened::Kind);
    }
    let number = format!("/proc/self/fd/{}", held.as_raw_fd());
    let file = open(&number, access, Mode::empty());
    let file = file.map_err(|errno| match errno {
        Errno::NOENT | Errno::NOTDIR if !is_there(&number) => NotOpened::NoProc,
        errno => NotOpened::Errno(errno),
    })?;
    fcntl_setfl(&file, OFlags::empty())?;
    Ok(File::from(file))
}

/// A link counts, whatever it leads to.
fn is_there(path: &str) -> bool {
    statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

/// Opens an image as `uid` and `gid`, without supplementary groups.
pub fn open_image(
    path: &Path,
    read_only: bool,
    uid: u32,
    gid: u32,
    reserved: &Reserved,
) -> Result<OwnedFd, DiskError> {
    let flags = match read_only {
        true => OFlags::RDONLY,
        false => OFlags::RDWR,
    };
    let opened = as_user(uid, gid, || {
        let file = open_looked_at(CWD, path, flags);
        // On a file server this process may have no rights to look.
        Ok(file.and_then(|file| {
            let is_read = !read_only && is_file(&file) && is_parent(&file)?;
            Ok((file, is_read))
        }))
    });
    let opened = opened.map_err(NotOpened::from).flatten();
    let (file, is_read) = opened.map_err(|why| failed(path, read_only, uid, why))?;
    let path = path.to_owned();
    if is_read {
        return Err(DiskError::Parent { path });
    }
    if is_device_path(&path.to_string_lossy()) && is_file(&file) {
        return Err(DiskError::AmongDevices { path });
    }
    match reserved.of_open(&file) {
        Ok(None) => Ok(file.into()),
        Ok(Some(dir)) => Err(DiskError::Reserved { path, dir }),
        Err(source) => Err(DiskError::Io { path, source }),
    }
}

fn is_file(file: &File) -> bool {
    file.metadata().is_ok_and(|found| found.is_file())
}

/// Makes an image of so many bytes as `uid` and `gid`, without supplementary groups, where no file is yet.
pub fn make_image(
    path: &Path,
    bytes: u64,
    uid: u32,
    gid: u32,
    reserved: &Reserved,
) -> Result<OwnedFd, DiskError> {
    must_be_no_devices(path)?;
    must_give_names(path.parent().unwrap_or(Path::new("/")))?;
    let made = as_user(uid, gid, || {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        open(path, flags, Mode::RUSR | Mode::WUSR)
    });
    let path = path.to_owned();
    let file = match made {
        Ok(file) => file,
        Err(Errno::ACCESS | Errno::PERM | Errno::ROFS) => {
            return Err(DiskError::NoPlace { path, uid });
        }
        Err(errno) => return Err(failed(&path, false, uid, errno.into())),
    };
    let undone = |error| {
        // Nobody has used it. What has the path by now may be another file, so with no more rights than it was made with.
        let _ = as_user(uid, gid, || unlink(path.as_path()));
        Err(error)
    };
    match reserved.of_open(&file) {
        Ok(None) => {}
        Ok(Some(dir)) => {
            return undone(DiskError::Reserved {
                path: path.clone(),
                dir,
            });
        }
        Err(source) => {
            return undone(DiskError::Io {
                path: path.clone(),
                source,
            });
        }
    }
    match rustix::fs::ftruncate(&file, bytes) {
        Ok(()) => Ok(file),
        Err(error) => undone(DiskError::Io {
            path: path.clone(),
            source: error.into(),
        }),
    }
}

/// Refuses a directory in which this process makes files and cannot rename them.
pub(crate) fn must_give_names(dir: &Path) -> Result<(), DiskError> {
    // What cannot be looked at is told by whoever makes a file there.
    let Ok(found) = dir.metadata() else {
        return Ok(());
    };
    let (is_sticky, owner) = (found.mode() & 0o1000 != 0, found.uid());
    let own = rustix::process::geteuid().as_raw();
    match is_sticky && ![0, own].contains(&owner) {
        false => Ok(()),
        true => Err(DiskError::Sticky {
            dir: dir.to_owned(),
            owner,
        }),
    }
}

/// Refuses a place for a file where only devices are.
pub(crate) fn must_be_no_devices(path: &Path) -> Result<(), DiskError> {
    match is_device_path(&path.to_string_lossy()) {
        true => Err(DiskError::NoDevice {
            path: path.to_owned(),
        }),
        false => Ok(()),
    }
}

/// Opens a file or block device only to look at it. Anything may lie there by now: a link is not followed.
pub fn open_to_look(path: &Path) -> io::Result<File> {
    Ok(open_looked_at(
        CWD,
        path,
        OFlags::RDONLY | OFlags::NOFOLLOW,
    )?)
}

/// Bytes of an image, and those of them that it takes on its storage: all of a block device, of which nobody tells. `end` is where a disk
/// on one ends.
pub fn length_and_use(image: &File, end: End) -> io::Result<(u64, u64)> {
    let found = image.metadata()?;
    // A block device has its length at its end alone.
    let bytes = label::length(image.as_fd(), end)?;
    let used = match found.file_type().is_block_device() {
        true => bytes,
        false => found.blocks().saturating_mul(512).min(bytes),
    };
    Ok((bytes, used))
}

/// Refuses a place for an image where anything is, a link to nothing, too, or where the snapshots of one are described. Why is a part of
/// a sentence.
pub fn must_be_free(path: &Path) -> Result<(), String> {
    if path.symlink_metadata().is_ok() {
        return Err(is_taken(path));
    }
    match description_of(path).symlink_metadata() {
        Ok(_) => Err(is_described(path)),
        Err(_) => Ok(()),
    }
}

/// As [`must_be_free`] says it.
pub fn is_taken(path: &Path) -> String {
    let path = path.display();
    format!(
        "a file is at {path} already: 'godwit image show {path}' tells whose disk it is; move it away if it is nobody's"
    )
}

/// Gives a file another name; both are below this directory unless they are absolute. What has that name is never replaced.
pub fn rename_to_free(dir: BorrowedFd<'_>, from: &Path, to: &Path) -> Result<(), Errno> {
    match renameat_with(dir, from, dir, to, RenameFlags::NOREPLACE) {
        // A file system that cannot refuse to replace makes no second name for what is there either.
        Err(Errno::INVAL | Errno::NOSYS) => rename_by_link(dir, from, to),
        named => named,
    }
}

/// Who died between the two steps left one file with both names.
fn rename_by_link(dir: BorrowedFd<'_>, from: &Path, to: &Path) -> Result<(), Errno> {
    let identity = |path| {
        let found = statat(dir, path, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        Some((found.st_dev, found.st_ino))
    };
    match linkat(dir, from, dir, to, AtFlags::empty()) {
        Err(_) if identity(from).is_some() && identity(from) == identity(to) => {}
        linked => linked?,
    }
    unlinkat(dir, from, AtFlags::empty())
}

/// Which file or block device this is: its file system and inode, or its number; nothing where there is none.
pub fn identity_of(path: &Path) -> io::Result<Option<(u64, u64)>> {
    match std::fs::metadata(path) {
        Ok(metadata) => Ok(Some(identity(&metadata))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The same of an open one.
pub fn identity_of_open(file: &File) -> io::Result<(u64, u64)> {
    Ok(identity(&file.metadata()?))
}

fn identity(metadata: &std::fs::Metadata) -> (u64, u64) {
    match metadata.file_type().is_block_device() {
        true => (metadata.rdev(), 0),
        false => (metadata.dev(), metadata.ino()),
    }
}

fn failed(path: &Path, read_only: bool, uid: u32, why: NotOpened) -> DiskError {
    let path = path.to_owned();
    match why {
        NotOpened::Kind => DiskError::Kind { path },
        NotOpened::Errno(Errno::NOENT | Errno::NOTDIR) => match must_be_no_devices(&path) {
            Err(no_device) => no_device,
            Ok(()) => DiskError::Missing { path },
        },
        NotOpened::Errno(Errno::ACCESS | Errno::PERM) => DiskError::Denied {
            path,
            uid,
            access: if read_only {
                "reading"
            } else {
                "reading and writing"
            },
        },
        why => DiskError::Io {
            path,
            source: why.into(),
        },
    }
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
