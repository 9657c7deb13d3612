//! Disk images, opened with the rights of QEMU's user and no more.
//!
//! QEMU gets the open file, not a path: nothing in a path can reach its option syntax, and the file that was checked is
//! the file that is used. Who may describe a VM could otherwise read any file of the host through it, since the VM
//! process is privileged: so the file is opened by a thread that has become QEMU's user. Refuses: files that this user
//! may not open (read-only disks: read; others: read and write), and everything but regular files and block devices.

use rustix::fd::OwnedFd;
use rustix::fs::{FileType, Gid, Mode, OFlags, Uid, fcntl_setfl, fstat, open};
use rustix::io::Errno;
use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_uid};
use std::io;
use std::path::{Path, PathBuf};

/// Why an image cannot be given to QEMU.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    #[error("the disk image {path} does not exist: copy it there or correct the VM")]
    Missing { path: PathBuf },
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
    /// A directory, a pipe, a terminal.
    #[error("{path} is no disk image: it must be a regular file or a block device")]
    Kind { path: PathBuf },
    #[error("cannot open the disk image {path}: {source}")]
    Io {
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Opens an image as `uid` and `gid`, without supplementary groups.
pub fn open_image(path: &Path, read_only: bool, uid: u32, gid: u32) -> Result<OwnedFd, DiskError> {
    let opened = std::thread::scope(|scope| {
        // Rights belong to threads: this one gives its own up for good, and ends.
        let opener = scope.spawn(|| {
            become_user(uid, gid)?;
            open_file(path, read_only)
        });
        opener.join().unwrap_or(Err(Errno::IO))
    });
    let (file, kind) = opened.map_err(|errno| failed(path, read_only, uid, errno))?;
    if matches!(kind, FileType::RegularFile | FileType::BlockDevice) {
        Ok(file)
    } else {
        Err(DiskError::Kind {
            path: path.to_owned(),
        })
    }
}

/// Nothing to give up for a process that is this user already.
fn become_user(uid: u32, gid: u32) -> Result<(), Errno> {
    if rustix::process::geteuid().as_raw() == uid {
        return Ok(());
    }
    set_thread_groups(&[])?;
    set_thread_gid(Gid::from_raw(gid))?;
    set_thread_uid(Uid::from_raw(uid))
}

/// A pipe without a writer must not hold the caller up, so the first open never waits.
fn open_file(path: &Path, read_only: bool) -> Result<(OwnedFd, FileType), Errno> {
    let access = if read_only {
        OFlags::RDONLY
    } else {
        OFlags::RDWR
    };
    let flags = access | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let file = open(path, flags, Mode::empty())?;
    let kind = FileType::from_raw_mode(fstat(&file)?.st_mode);
    fcntl_setfl(&file, OFlags::empty())?;
    Ok((file, kind))
}

fn failed(path: &Path, read_only: bool, uid: u32, errno: Errno) -> DiskError {
    let path = path.to_owned();
    match errno {
        Errno::NOENT | Errno::NOTDIR => DiskError::Missing { path },
        Errno::ISDIR | Errno::NXIO => DiskError::Kind { path },
        Errno::ACCESS | Errno::PERM => DiskError::Denied {
            path,
            uid,
            access: if read_only {
                "reading"
            } else {
                "reading and writing"
            },
        },
        errno => DiskError::Io {
            path,
            source: errno.into(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt as _, chown};

    const UID: u32 = 61_234;

    fn place() -> tempfile::TempDir {
        let directory = tempfile::tempdir().expect("a directory");
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).expect("chmod");
        directory
    }

    #[test]
    fn what_qemus_user_may_not_open_is_refused_though_we_may() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: becoming another user needs root");
        }
        let directory = place();
        let path = directory.path().join("image");
        fs::write(&path, [0; 512]).expect("image");
        fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("chmod");
        let error = open_image(&path, true, UID, UID).expect_err("root's own");
        assert!(
            error
                .to_string()
                .contains("(uid 61234) may not open the disk image"),
            "{error}"
        );
        fs::set_permissions(&path, Permissions::from_mode(0o644)).expect("chmod");
        open_image(&path, true, UID, UID).expect("readable");
        let error = open_image(&path, false, UID, UID).expect_err("not writable");
        assert!(
            error.to_string().contains("for reading and writing"),
            "{error}"
        );
        chown(&path, Some(UID), None).expect("chown");
        open_image(&path, false, UID, UID).expect("its own");
        assert!(
            rustix::process::geteuid().is_root(),
            "only the opening thread became another user"
        );
    }

    #[test]
    fn what_is_no_image_is_refused_without_waiting() {
        let directory = place();
        let own = rustix::process::geteuid().as_raw();
        let pipe = directory.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::RUSR).expect("a pipe");
        for (path, read_only) in [
            (pipe.as_path(), true),
            (directory.path(), true),
            (directory.path(), false),
        ] {
            let error = open_image(path, read_only, own, own).expect_err("no image");
            assert!(matches!(error, DiskError::Kind { .. }), "{error}");
        }
        let error = open_image(&directory.path().join("none"), true, own, own).expect_err("none");
        assert!(matches!(error, DiskError::Missing { .. }), "{error}");
    }
}
