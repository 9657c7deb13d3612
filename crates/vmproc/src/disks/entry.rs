//! A name in a directory that is held open, so that a file is looked at, renamed and removed in one and the same directory.
//!
//! This process is root, and where images lie may be another user's: whoever owns a directory above can put a link in its place at any
//! moment, and what is removed by its path is another file then. Owns the descriptor. Whoever may change the names in the very directory can still
//! exchange the file between the look and the removal, but only for one that he could remove from there himself. Refuses: nothing.

use super::told;
use crate::faults::planted;
use godwit_blockio::next_data;
use godwit_qemu::disk::{open_looked_at, rename_to_free};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, fstat, fsync, open, openat, statat, unlinkat,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

/// What the log is told once of: a removal may be tried for days.
const REMOVED: &str = "removed";

/// What has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    Nothing,
    /// A regular file: its device and inode.
    File((u64, u64)),
    /// A link, a directory, a device.
    Other,
}

/// What is or may be at a path.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    dir: OwnedFd,
    name: &'a OsStr,
    /// As people are told of it; nothing is done by it.
    path: &'a Path,
}

impl<'a> Entry<'a> {
    /// Fails as not found where there is no such directory.
    pub(super) fn at(path: &'a Path) -> io::Result<Self> {
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::Error::other("it names no file"));
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = open(above, flags, Mode::empty())?;
        Ok(Self { dir, name, path })
    }

    /// Another name in the very directory that is held: that of this path, whose own directory counts for nothing.
    pub(super) fn beside<'b>(&self, path: &'b Path) -> io::Result<Entry<'b>> {
        let Some(name) = path.file_name() else {
            return Err(io::Error::other("it names no file"));
        };
        let dir = self.dir.try_clone()?;
        Ok(Entry { dir, name, path })
    }

    /// With what has the name.
    pub(super) fn looked_at(path: &'a Path) -> io::Result<(Found, Self)> {
        let entry = Self::at(path)?;
        Ok((entry.look()?, entry))
    }

    /// As people are told of it.
    pub(super) fn path(&self) -> &'a Path {
        self.path
    }

    /// What has the name just now; a link is not followed.
    pub(super) fn look(&self) -> io::Result<Found> {
        match statat(&self.dir, self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) => Ok(match FileType::from_raw_mode(found.st_mode) {
                FileType::RegularFile => Found::File((found.st_dev, found.st_ino)),
                _ => Found::Other,
            }),
            Err(Errno::NOENT) => Ok(Found::Nothing),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Bytes of the regular file that has the name, and those that it takes; nothing where there is none.
    pub(super) fn size(&self) -> io::Result<Option<(u64, u64)>> {
        match statat(&self.dir, self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) => {
                let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
                let (bytes, blocks) = (found.st_size, found.st_blocks);
                let of = |number: i64| u64::try_from(number).unwrap_or_default();
                Ok(is_file.then(|| (of(bytes), of(blocks).saturating_mul(512))))
            }
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Opens what has the name for reading.
    pub(super) fn open(&self) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW;
        Ok(open_looked_at(&self.dir, Path::new(self.name), flags)?)
    }

    /// Whether its directory is on this device: where its file system is not mounted, nothing that is missing there is gone.
    pub(super) fn is_on(&self, device: u64) -> bool {
        fstat(&self.dir).is_ok_and(|dir| dir.st_dev == device)
    }

    /// Removes what has the name, which is no directory. Returns whether it is gone.
    pub(super) fn remove(&self) -> bool {
        let path = self.path.display();
        let removed = match planted("removed-by-path") {
            true => unlinkat(CWD, self.path, AtFlags::empty()),
            false => unlinkat(&self.dir, self.name, AtFlags::empty()),
        };
        match removed {
            Ok(()) => {
                if let Err(error) = self.sync_names() {
                    tracing::warn!(%path, %error, "that a file is removed may not be durable");
                }
                if told::is_over((REMOVED, self.path)) {
                    tracing::info!(%path, "a file that was left behind is removed");
                }
                true
            }
            Err(Errno::NOENT) => {
                told::is_over((REMOVED, self.path));
                true
            }
            Err(error) => {
                if told::is_news((REMOVED, self.path), &error.to_string()) {
                    tracing::warn!(%path, %error, "a file is left behind");
                }
                false
            }
        }
    }

    /// Gives the file of another name in its directory this one. Nothing is done where a predecessor did it. A file that is there is
    /// never replaced.
    pub(super) fn take_from(&self, other: &OsStr) -> io::Result<()> {
        match rename_to_free(self.dir.as_fd(), Path::new(other), Path::new(self.name)) {
            Err(Errno::NOENT) if matches!(self.look()?, Found::File(_)) => Ok(()),
            named => Ok(named?),
        }
    }

    /// Makes the names in its directory durable, and the file, if one has the name.
    ///
    /// The file comes last, also where it is durable already: an XFS that was shut down ends the fsync of an open directory without an
    /// error though the names are lost, and only that of a file with EIO.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.sync_names()?;
        if !matches!(self.look()?, Found::File(_)) {
            return Ok(());
        }
        match self.open() {
            // A file server lets only whoever has the file open it; nothing is shut down then.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            file => file?.sync_all(),
        }
    }

    /// Makes the names in its directory durable.
    pub(super) fn sync_names(&self) -> io::Result<()> {
        // What is held is for names alone.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(fsync(openat(&self.dir, ".", flags, Mode::empty())?)?)
    }
}

/// Whether a file has no data at all; one whose file system tells of no holes has.
pub(super) fn holds_nothing(file: &File) -> io::Result<bool> {
    let bytes = file.metadata()?.len();
    Ok(next_data(file, 0..bytes)?.is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, symlink};
    use std::path::PathBuf;

    /// A directory of somebody's with an image, and another one with a file of the same name.
    struct Site {
        root: tempfile::TempDir,
    }

    impl Site {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            for dir in ["theirs", "ours"] {
                fs::create_dir(root.path().join(dir)).unwrap();
                fs::write(root.path().join(dir).join("image"), dir).unwrap();
            }
            Self { root }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.root.path().join(name)
        }

        /// Who owns the directory puts a link to the other one in its place.
        fn swap(&self) {
            fs::rename(self.at("theirs"), self.at("away")).unwrap();
            symlink(self.at("ours"), self.at("theirs")).unwrap();
        }
    }

    #[test]
    fn what_was_looked_at_is_removed_though_its_directory_was_exchanged_for_a_link() {
        let site = Site::new();
        let path = site.at("theirs/image");
        let entry = Entry::at(&path).unwrap();
        let image = fs::metadata(&path).unwrap();
        let found = Found::File((image.dev(), image.ino()));
        assert_eq!(entry.look().unwrap(), found);
        assert!(entry.is_on(image.dev()) && !entry.is_on(image.dev() + 1));
        site.swap();
        assert_eq!(entry.look().unwrap(), found);
        assert!(entry.remove());
        assert!(!site.at("away/image").exists());
        assert_eq!(fs::read_to_string(site.at("ours/image")).unwrap(), "ours");
        assert_eq!(entry.look().unwrap(), Found::Nothing);
        assert!(entry.remove(), "it is gone");
    }

    #[test]
    fn a_file_is_renamed_where_it_is_though_its_directory_was_exchanged_for_a_link() {
        let site = Site::new();
        let path = site.at("theirs/named");
        let entry = Entry::at(&path).unwrap();
        site.swap();
        for _ in 0..2 {
            entry.take_from(OsStr::new("image")).unwrap();
            assert_eq!(fs::read_to_string(site.at("away/named")).unwrap(), "theirs");
        }
        assert!(site.at("ours/image").exists() && !site.at("ours/named").exists());
        fs::write(site.at("away/image"), "another").unwrap();
        let refused = entry.take_from(OsStr::new("image")).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        entry.sync().unwrap();
    }

    #[test]
    fn a_name_is_durable_only_with_its_file_and_where_nothing_has_it_with_its_directory() {
        let site = Site::new();
        for name in ["theirs/image", "theirs/none"] {
            let path = site.at(name);
            Entry::at(&path).unwrap().sync().unwrap();
        }
        // What is no file is not opened: a pipe would wait, and a link may lead anywhere.
        symlink(site.at("nowhere"), site.at("theirs/link")).unwrap();
        let path = site.at("theirs/link");
        Entry::at(&path).unwrap().sync().unwrap();
    }

    #[test]
    fn a_link_is_no_file_whatever_it_leads_to() {
        let site = Site::new();
        symlink(site.at("ours/image"), site.at("theirs/link")).unwrap();
        let path = site.at("theirs/link");
        let entry = Entry::at(&path).unwrap();
        assert_eq!(entry.look().unwrap(), Found::Other);
        assert!(entry.take_from(OsStr::new("none")).is_err());
        assert!(entry.remove() && site.at("ours/image").exists());
        let path = site.at("none/image");
        let refused = Entry::at(&path).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::NotFound);
    }
}
